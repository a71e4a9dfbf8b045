"""Which variant serves a problem. A pure function of the problem, the device and the variants; no GPU is
needed.

The rule, which a spec names ``least_time``:

1. A variant is a candidate if the operator accepts each of its axes: dtype and mask type equal the problem's,
   head dims are large enough, and the grouping is ``mha`` for one query head per kv head, ``gqa`` or
   ``packed`` for several. If it reads arrays by tensor maps, they must have maps. The device must have its
   architecture and its shared memory. These are left out:
   - a family that is ``on_request``, and one whose ``rows_at_most`` is below the rows of a head;
   - tiles whose clusters have shares of several heads, if the heads of the grid make no whole clusters;
   - with an algorithm, all families of other names;
   - with a score modification, families without a seam for it (the others get the modification);
   - with ``splits``, families whose clusters share tiles, and families that cannot split keys, if the call
     needs several parts, or, with a SplitEvery, if other families have KV blocks that divide it.
2. Only candidates with the smallest head dims stay, by the work that they make; then, within a family, the
   newest architecture; then the target that its spec names first.
3. If a tile was tuned on this GPU, it replaces the ordinary tile of its point, against which it was measured.
   Other tiles of the point, for example one for small problems, stay.
4. Of the remaining tiles and groupings the least modelled time wins: the scores (rows of queries by keys, in
   whole blocks) that the tiles of the busiest multiprocessor visit, and the other costs of a tile, over the
   measured ``efficiency`` of the tile; see ``cost``. Ties go to fewer tiles, then to the order of the spec.
   With ``splits`` the time is modelled for one sequence on one multiprocessor, so that the choice does not
   depend on the batch.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING

from flashgen.errors import BadParam, BadTensorShape, DeviceTypeNotSupported, SpecError, arg
from flashgen.families.arch import arch_parts, reaches
from flashgen.families.variant import TUNED_TILE
from flashgen.operators import operator_of
from flashgen.operators.arguments import shown
from flashgen.operators.rules import LISTING
from flashgen.operators.splits import AUTO, SplitEvery
from flashgen.schedule.cost import OneSm, cost
from flashgen.schedule.grid import (
    KEYS,
    MAX_EXTENT,
    ROWS,
    extents,
    heads,
    launchable,
    rows,
    tiles,
)
from flashgen.schedule.shares import countable
from flashgen.schedule.tensormap import REQUIREMENTS, expressible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashgen.families.arch import Device
    from flashgen.families.model import Spec
    from flashgen.families.variant import Variant
    from flashgen.operators.blocklists import BlockLists
    from flashgen.operators.operator import Operator, Problem, Value

    _Point = tuple[tuple[int, ...], dict[str, Value]]

__all__ = ["offers", "select"]


def offers(
    problem: Problem, device: Device, specs: Iterable[Spec], algorithm: str | None = None
) -> tuple[Variant, ...]:
    """The variants of ``specs`` among which ``select`` has a choice, without making the others.

    With an ``algorithm`` only the families of that name have a say, else all that are not on request. Sizes
    such as head dims are gone through by their work, only as far as the first that the device has a variant
    for which serves the problem.

    Raises BadParam for an algorithm that no family has, or whose families do not serve the problem.
    """
    specs = tuple(specs)
    listing = listing_steps(problem, specs)
    if algorithm is None:
        families = [spec for spec in specs if computes(spec, problem) and not spec.on_request]
    else:
        families = named(problem, specs, algorithm)
    offered: list[Variant] = []
    by_work: dict[tuple[int, ...], list[tuple[Spec, dict[str, Value]]]] = {}
    for spec in families:
        for work, axes in _serving(problem, spec) if problem.score is None or spec.score_seam else ():
            by_work.setdefault(work, []).append((spec, axes))
    for _, alike in sorted(by_work.items()):
        selected = [variant for spec, axes in alike for variant in spec.select(**axes) if variant.is_main]
        if problem.score is not None:
            streams = rows_of_score_aligned(problem)
            selected = [variant.modified(problem.score, streams=streams) for variant in selected]
        if problem.rule is not None:
            selected = [v.lined(problem.rule.rule, listing) for v in selected if v.line_seam]
        offered += selected
        if any(
            not misfit(problem, variant) and runs_on(variant, device) and expressible(problem, variant)
            for variant in selected
        ):
            break
    if algorithm is not None and not offered:
        raise BadParam(
            f"algorithm is {algorithm!r}, which has no kernel for {problem.description()}; "
            f"it serves {' or '.join(map(_served, families))}"
        )
    return tuple(offered)


def rows_of_score_aligned(problem: Problem) -> bool:
    """Whether rows of the array of its score modification that kernels stream begin at multiples of 16 bytes,
    or there is none. Other rows are copied in pieces, which one warp does slower than all consumers.
    """
    streamed = problem.score.streamed
    array = problem.array(streamed.name) if streamed else None
    return array is None or all(stride * array.element_bytes % 16 == 0 for stride in array.strides)


def listing_steps(problem: Problem, specs: Iterable[Spec]) -> tuple[Variant, ...]:
    """The kernels that make lists of the blocks of a problem's mask by a line, in order; none for a problem
    without one, or whose call has lists or lengths. Raises SpecError where no spec has them.
    """
    if problem.rule is None or problem.operator.name == LISTING or problem.has("block_indptr"):
        return ()
    if problem.lengths_on_device:
        return ()
    variants = (variant for spec in specs if spec.operator == LISTING for variant in spec.variants())
    for variant in variants:
        if variant.is_main:
            return variant.steps
    raise SpecError(f"no spec of {LISTING} lists the blocks of a mask by a line; add one, or pass an array")


def computes(kernels: Spec | Variant, problem: Problem) -> bool:
    """Whether these kernels are of the problem's operator, and read lengths if it has lengths."""
    of_problem = problem.operator.name, problem.lengths_on_device
    return (kernels.operator, kernels.has_lengths) == of_problem


def _calls(problem: Problem) -> str:
    """The calls of the problem's operator, in words for a message."""
    return f"{problem.operator.name}{' with lengths' if problem.lengths_on_device else ''}"


def named(problem: Problem, specs: Iterable[Spec], algorithm: str) -> list[Spec]:
    """The specs of an algorithm. Raises BadParam, with the names that there are, for one that none has."""
    alternatives = [spec for spec in specs if computes(spec, problem) and spec.algorithm]
    families = [spec for spec in alternatives if isinstance(algorithm, str) and spec.algorithm == algorithm]
    if not families:
        names = ", ".join(repr(name) for name in sorted({spec.algorithm for spec in alternatives}))
        allowed = f"allowed are {names}, or None"
        if not names:
            of_what = "a call with lengths" if problem.lengths_on_device else problem.operator.name
            allowed = f"{of_what} has kernels of no algorithm alone: leave algorithm out"
        raise BadParam(f"algorithm is {shown(algorithm)}; {allowed}")
    return families


def select(problem: Problem, device: Device, variants: Iterable[Variant]) -> Variant:
    """The variant that serves ``problem`` on ``device`` in the least modelled time.

    Raises DeviceTypeNotSupported when no variant runs on the device, SpecError when none is written for the
    problem, BadTensorShape when it is too large for those that are.
    """
    suited = candidates(problem, device, variants)
    problem, device = standard(problem, device)
    return min(suited, key=lambda variant: (cost(problem, device, variant), tiles(problem, variant)))


def standard(problem: Problem, device: Device) -> tuple[Problem, Device | OneSm]:
    """The problem and the device by which times are modelled."""
    if not problem.invariant:
        return problem, device
    return problem.standard(), OneSm(1, device.smem_per_sm)


def candidates(problem: Problem, device: Device, variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """The variants of steps 1 to 3 of the rule, at least one. Raises as ``select``, and BadParam where none
    splits keys as the call asks.
    """
    operator, variants = problem.operator, tuple(variants)
    serving = [variant for variant in variants if not misfit(problem, variant)]
    reaching = [v for v in serving if max(extents(problem, v).values()) <= MAX_EXTENT]
    if serving and not reaching:
        sizes = extents(problem, serving[0])
        dimension = max(sizes, key=lambda name: sizes[name])
        raise BadTensorShape(
            f"the call has {sizes[dimension]} {dimension.replace('_', ' ')}, and kernels for it count at "
            f"most {MAX_EXTENT}; make several calls of fewer"
        )
    # Where none is launchable, `launch_of` says so.
    launched = [variant for variant in reaching if launchable(problem, variant)] or reaching
    computing = [variant for variant in launched if countable(problem, variant)]
    suited = [variant for variant in computing if expressible(problem, variant)]
    if computing and not suited:
        raise SpecError(
            f"the {_calls(problem)} variants for this call, such as {computing[0]}, read arrays by tensor "
            f"maps, which need {REQUIREMENTS}; pass contiguous copies, or add a variant without tensor maps"
        )
    if not suited:
        raise SpecError(
            f"no spec has a variant of {_calls(problem)} for {problem.description()}; add one, or see: "
            "flashgen list"
        )
    running = [variant for variant in suited if runs_on(variant, device)]
    if not running:
        needs = sorted({f"{v.min_arch} with {v.max_smem} bytes of shared memory" for v in suited})
        raise DeviceTypeNotSupported(
            f"{device.name} ({device.arch}, {device.smem_per_block} bytes of shared memory a block) runs "
            f"none of the variants of {_calls(problem)} for {problem.description()}; they need "
            f"{' or '.join(needs)}"
        )
    too_many = (variant for variant in variants if misfit(problem, variant) == "rows")
    running = splitting(problem, running, too_many)
    least = min(operator.work(dict(variant.axes)) for variant in running)
    smallest = [variant for variant in running if operator.work(dict(variant.axes)) == least]
    return without_replaced(preferred(smallest))


def splitting(
    problem: Problem, variants: Iterable[Variant], too_many: Iterable[Variant]
) -> tuple[Variant, ...]:
    """Of these the variants that split keys as the call asks. Raises BadParam where it needs one and there is
    none; ``too_many`` are the variants for which the call has too many rows, to say so.
    """
    variants = tuple(variants)
    if problem.splits == AUTO:
        return variants
    variants = tuple(variant for variant in variants if not variant.grid.shared_tiles)
    if problem.splits == 1:
        return variants
    able = tuple(variant for variant in variants if variant.grid.shares)
    if not isinstance(problem.splits, SplitEvery):
        if able:
            return able
        few = [variant for variant in too_many if variant.grid.shares]
        if few:
            count = min(rows(problem, variant) for variant in few)
            heads, most = count // problem.seqlen_q, max(variant.dispatch.rows_at_most for variant in few)
            queries = f"{problem.seqlen_q} queries x {heads} head{'s' * (heads > 1)}"
            why = f"{queries} are {count} rows of a kv head; kernels that split keys serve at most {most}"
        else:
            served = problem.description()
            why = f"no kernel that splits keys serves {served}; those that ship take fp16 and bf16"
        one = arg("one split", "1 or 'auto'")
        raise BadParam(f"{arg('splits')} is {problem.splits}, but {why}; pass {one}")
    keys = problem.splits.keys
    fitting = tuple(variant for variant in able if keys % variant.visits.keys == 0)
    if able and not fitting:
        block = min(variant.visits.keys for variant in able)
        raise BadParam(
            f"{arg('splits')} is {problem.splits}, but the kernels for this call have KV blocks of {block} "
            f"keys or more; pass a multiple of {block}, such as {-(-keys // block) * block}"
        )
    return fitting or variants


def preferred(variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """Of each family the variants of the newest architecture, and of these the ones on the target that comes
    first.
    """
    variants = tuple(variants)
    best: dict[str, tuple[int, int]] = {}
    for variant in variants:
        best[variant.family] = max(_preference(variant), best.get(variant.family, _preference(variant)))
    return tuple(variant for variant in variants if _preference(variant) == best[variant.family])


def without_replaced(variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """The variants without the ordinary tiles of points that have a tuned one."""
    variants = tuple(variants)
    tuned = {(v.spec, v.target, v.axes) for v in variants if v.tile_name == TUNED_TILE}
    return tuple(v for v in variants if v.tile_name or (v.spec, v.target, v.axes) not in tuned)


def runs_on(variant: Variant, device: Device) -> bool:
    """Whether the device has the architecture of the variant and the shared memory of its target."""
    major, minor = device.compute_capability
    return reaches(major * 10 + minor, variant.min_arch) and variant.max_smem <= device.smem_per_block


def _served(spec: Spec) -> str:
    """What a spec has kernels for, for a message."""
    claimed = operator_of(spec.operator, spec.has_lengths).axes
    defaults = {name: (axis.default,) for name, axis in claimed.items() if axis.default}
    axes = ", ".join(
        f"{name} {' '.join(map(str, values))}" for name, values in (defaults | spec.axes).items()
    )
    return f"{axes} ({spec.name}.yaml)"


def _serving(problem: Problem, spec: Spec) -> Iterable[_Point]:
    """The axes of each point of ``spec`` that computes ``problem``, with what it is compared by; the spec may
    exclude some of them.
    """
    claimed = problem.operator.axes

    def serves(name: str, value: Value) -> bool:
        following = (x for other, x in claimed.items() if x.default_from == name and other not in spec.axes)
        return all(axis.serves(problem, value) for axis in (claimed[name], *following))

    others = (name for name, axis in claimed.items() if name not in spec.axes and axis.default_from is None)
    if not all(serves(name, claimed[name].default) for name in others):
        return ()
    suited = (tuple([x for x in values if serves(name, x)]) for name, values in spec.axes.items())
    return _points(problem.operator, spec, tuple(suited))


@lru_cache(maxsize=1024)
def _points(operator: Operator, spec: Spec, suited: tuple[tuple[Value, ...], ...]) -> tuple[_Point, ...]:
    """The points of these values of the axes of a spec: hundreds, alike for most problems."""
    points = (dict(zip(spec.axes, values, strict=True)) for values in itertools.product(*suited))
    return tuple((operator.work(axes), axes) for axes in points)


def misfit(problem: Problem, variant: Variant) -> str:
    """What keeps the variant from computing such problems, on any GPU, of any size and wherever their arrays
    lie: "operator", an axis, "blocks" of lists that its tile does not divide, "score", "line", "rows", of
    which a head has too many, or "cluster", whose sets of heads the grid does not fill. "" if nothing does.
    """
    operator = problem.operator
    if not variant.is_main or not computes(variant, problem):
        return "operator"
    values = operator.axis_values(dict(variant.axes))
    for name, axis in operator.axes.items():
        if not axis.serves(problem, values[name]):
            return name
    if problem.has("block_indptr") and not divides(variant, problem.block_lists):
        return "blocks"
    if {step.score for step in variant.steps} - {None} != {problem.score} - {None}:
        return "score"
    if variant.rule != (problem.rule and problem.rule.rule):
        return "line"
    if variant.dispatch.rows_at_most is not None and rows(problem, variant) > variant.dispatch.rows_at_most:
        return "rows"
    if variant.grid.cluster > 1 and variant.grid.shares and heads(problem, variant) % variant.grid.cluster:
        return "cluster"
    return ""


def divides(variant: Variant, lists: BlockLists) -> bool:
    """Whether the rows and the keys that a tile of the variant visits at once are a block of the lists, or a
    part of one. Tables of a mask by a line have tiles, so these are blocks.
    """
    if variant.grid.tile(KEYS):
        rows_at_once, keys_at_once = variant.grid.step_rows, variant.grid.tile(KEYS)
    else:
        rows_at_once, keys_at_once = variant.grid.tile(ROWS), variant.visits.keys
    if lists.ranges is not None:
        return (lists.rows, lists.keys) == (rows_at_once, keys_at_once)
    return lists.rows % rows_at_once == 0 and lists.keys % keys_at_once == 0


def _preference(variant: Variant) -> tuple[int, int]:
    """Larger for a newer architecture, then for an earlier target of its spec."""
    return arch_parts(variant.min_arch)[0], -variant.priority
