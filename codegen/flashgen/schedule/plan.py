"""The steps of a call: which kernels run, in order, on what grids, with what memory between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashgen.families.features import CLEARS_AHEAD, PLACES_BLOCKS
from flashgen.schedule.dispatch import select
from flashgen.schedule.grid import Launch, launch_of
from flashgen.schedule.groups import group_parts
from flashgen.schedule.parameters import NO_KEY_TILES, Struct, pack
from flashgen.schedule.sections import key_tiles
from flashgen.schedule.shares import Shares, shares_of
from flashgen.schedule.workspace import Workspace, workspace_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem


class Step(NamedTuple):
    """One kernel launch: the variant, its grid, and its parameter struct.

    ``struct`` says, for each pointer and tensor map among its parameters, the argument or the slice of the
    workspace that it is of. ``shares`` are what the thread blocks of a main step have of the keys, if
    these are cut into shares.
    """

    variant: Variant
    launch: Launch
    struct: Struct
    shares: Shares | None = None

    @property
    def source(self) -> str:
        """The CUDA that runs."""
        from flashgen.source.render import render

        return render(self.variant)


class Steps(NamedTuple):
    """All that a call does on a GPU, but for its pointers and scalars. ``main`` is the variant that dispatch
    chose.
    """

    main: Variant
    steps: tuple[Step, ...]
    workspace: Workspace


def plan_steps(problem: Problem, main: Variant, device: Device) -> Steps:
    """The steps of a call for which dispatch chose ``main``, and the workspace that they share. Where shares
    split no tile and groups of query heads are whole, a step that combines has nothing to do and is left out.
    So is one without tiles, unless the whole call has no output.

    Raises BadTensorShape for a grid that is too large, and SpecError for parameters that nobody can give.
    """
    if main.rule is not None and problem.block_lists is None and not problem.lengths_on_device:
        problem = problem.with_lists(main.tile_value("block_m"), main.tile_value("block_n"))
    shares = shares_of(problem, main, device) if main.grid.shares else None
    parts = group_parts(problem, main, device)
    # Such a main step reads arrays by tensor maps: none of these is empty.
    of_keys = CLEARS_AHEAD in main.features or PLACES_BLOCKS in main.features
    tiles = key_tiles(problem, main, device, parts) if of_keys else NO_KEY_TILES
    workspace = workspace_of(problem, main, shares, parts)
    steps = (
        Step(
            variant,
            launch_of(problem, variant, device, shares.count if shares else 0, parts),
            pack(problem, variant, device, workspace, shares, parts, tiles),
            shares if variant.is_main else None,
        )
        for variant in main.steps
        if not variant.combines or parts > 1 or (shares is not None and shares.split)
    )
    return Steps(main, tuple(step for step in steps if step.launch.blocks or problem.empty), workspace)


def choices(problem: Problem, device: Device, variants: Iterable[Variant]) -> Iterator[Steps]:
    """The steps of the variant that dispatch chooses among these; then of its choice among the others, for a
    caller that cannot load the first one, and so on.

    Raises as `select` and `plan_steps`, when it comes to that choice.
    """
    device = device.without(problem.sm_margin)
    left = tuple(variants)
    while True:
        main = select(problem, device, left)
        yield plan_steps(problem, main, device)
        left = tuple(variant for variant in left if variant != main)
        if not left:
            return
