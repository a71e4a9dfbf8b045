"""The competition: compile all candidates, check each, time those that are right, all against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from flashgen.errors import InternalError
from flashgen.toolchain.build import build
from flashgen.tools.tune.candidates import Dropped
from flashgen.tools.tune.ranking import Trial, rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flashgen.families.variant import Variant
    from flashgen.toolchain.build import Built
    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.timing import Timing
    from flashgen.tools.tune.candidates import Field
    from flashgen.tools.tune.ranking import Ranking


class Bench(Protocol):
    """Where kernels run. ``gpu.GpuBench`` is the real one."""

    def arch(self, variant: Variant) -> str:
        """What to compile the variant for."""

    def wrong(self, variant: Variant) -> str:
        """In which way the kernel's results differ from the reference, or an empty text."""

    def blocks_per_sm(self, variant: Variant) -> int | None:
        """How many blocks of the kernel a multiprocessor holds at a time."""

    def time(self, variants: Sequence[Variant], case: Case) -> list[Timing | str]:
        """Time the variants in interleaved rounds; a text says why a variant's result there is wrong."""


def steps(fields: Sequence[Field], cases: Mapping[int, Sequence[Case]]) -> int:
    """How often `hold` calls ``on_step``."""
    return sum(1 + len(field.candidates) + len(cases[index]) for index, field in enumerate(fields))


def hold(
    fields: Sequence[Field],
    cases: Mapping[int, Sequence[Case]],
    bench: Bench,
    jobs: int | None = None,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[Ranking]:
    """Rank the candidates of every field on its cases, given by the field's index.

    Compiles on ``jobs`` threads, by default one for each processor. A candidate that does not compile, that
    spills although the ordinary tile may not, or that is wrong, is dropped with the reason, and never timed
    further. Raises InternalError where the ordinary tile itself fails.
    """
    entrants = [variant for field in fields for variant in (field.subject.ordinary, *field.candidates)]
    built = iter(
        build(
            [(variant, bench.arch(variant)) for variant in entrants],
            jobs,
            lambda done: on_step(f"compiled {label(done.variant)}"),
        )
    )
    results = []
    for index, field in enumerate(fields):
        kernels = [next(built) for _ in range(1 + len(field.candidates))]
        results.append(_compete(field, kernels, cases[index], bench, on_step))
    return results


def label(variant: Variant) -> str:
    """A variant with its tile, which the names of candidates do not tell apart."""
    return f"{variant} {tile_text(dict(variant.tile))}"


def tile_text(tile: Mapping[str, int]) -> str:
    """A tile as text: ``block_m=128 block_n=96 stages=2``."""
    return " ".join(f"{key}={value}" for key, value in tile.items())


def _compete(
    field: Field, built: Sequence[Built], cases: Sequence[Case], bench: Bench, on_step: Callable[[str], None]
) -> Ranking:
    dropped = list(field.dropped)
    ordinary = field.subject.ordinary

    def drop(variant: Variant, why: str) -> None:
        if variant is ordinary:
            raise InternalError(f"{ordinary}, the baseline, fails: {why}")
        dropped.append(Dropped(dict(variant.tile), why))

    left: list[Built] = []
    for kernel in built:
        # The ordinary tile serves now, spills or not.
        why = kernel.error if kernel.variant is ordinary else kernel.failure
        why = why or bench.wrong(kernel.variant)
        if why:
            drop(kernel.variant, why)
        else:
            left.append(kernel)
    timings: dict[Variant, dict[str, Timing]] = {kernel.variant: {} for kernel in left}
    for case in cases:
        variants = [kernel.variant for kernel in left]
        for variant, timing in zip(variants, bench.time(variants, case), strict=True):
            if isinstance(timing, str):
                drop(variant, f"{case.name}: {timing}")
                left = [kernel for kernel in left if kernel.variant is not variant]
            else:
                timings[variant][case.name] = timing
        on_step(f"timed {ordinary} on {case.name}")
    trials = [
        Trial(kernel.variant, kernel, bench.blocks_per_sm(kernel.variant), timings[kernel.variant])
        for kernel in left
    ]
    return rank(field.subject, cases, trials[0], trials[1:], dropped)
