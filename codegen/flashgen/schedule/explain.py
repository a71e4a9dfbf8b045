"""Why dispatch takes the variant that it takes: each variant with the rule that decides on it.

The rules are the rules of ``dispatch``, in their order. Needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.families.arch import range_of
from flashgen.operators.arguments import shown
from flashgen.schedule.cost import cost
from flashgen.schedule.dispatch import (
    computes,
    listing_steps,
    misfit,
    named,
    preferred,
    rows_of_score_aligned,
    runs_on,
    splitting,
    standard,
    without_replaced,
)
from flashgen.schedule.grid import MAX_BLOCKS, MAX_EXTENT, extents, launchable, tiles
from flashgen.schedule.plan import plan_steps
from flashgen.schedule.shares import countable, shares_of
from flashgen.schedule.tensormap import REQUIREMENTS, expressible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashgen.families.arch import Device
    from flashgen.families.model import Spec
    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem
    from flashgen.schedule.plan import Step, Steps
    from flashgen.schedule.shares import Shares

TIME = "time"


@dataclass(frozen=True, slots=True)
class Judged:
    """A variant that is not taken: the ``rule`` that rules it out, a word, and ``why``, a sentence about this
    variant. ``time`` is its modelled time over the chosen variant's if the rule is "time", else None.
    """

    variant: Variant
    rule: str
    why: str
    time: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which kernel a call takes on a device, and why not the others.

    ``variant`` is the chosen one, None where no variant serves. ``others`` are all other variants of the
    operator: first those that lost on modelled time, the fastest first, then by the last rule that they
    passed. ``str()`` of it is a text of several lines.
    """

    problem: Problem
    device: Device
    variant: Variant | None
    others: tuple[Judged, ...]

    @property
    def shares(self) -> Shares | None:
        """How a kernel that splits keys shares them out among thread blocks; None for any other kernel."""
        if self.variant is None or not self.variant.grid.shares:
            return None
        return shares_of(self.problem, self.variant, self.device)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The launches of the call, in order; none where no variant serves."""
        return self._planned.steps if self.variant else ()

    @property
    def workspace_bytes(self) -> int:
        """The memory that the call needs beyond inputs and outputs."""
        return self._planned.workspace.nbytes if self.variant else 0

    @property
    def _planned(self) -> Steps:
        return plan_steps(self.problem, self.variant, self.device)

    @property
    def slower(self) -> tuple[Judged, ...]:
        """Those that could have served as well, and would take longer by the model."""
        return tuple(judged for judged in self.others if judged.rule == TIME)

    def counts(self) -> dict[str, int]:
        """How many variants each rule ruled out, time left aside."""
        by_rule: dict[str, int] = {}
        for judged in self.others:
            if judged.rule != TIME:
                by_rule[judged.rule] = by_rule.get(judged.rule, 0) + 1
        return by_rule

    def __str__(self) -> str:
        lines = [f"{self.device.name} ({self.device.arch}): {self.problem.description()}"]
        lines.append(f"takes {self.variant}" if self.variant else "no variant serves")
        lines += [f"  {self.shares}"] if self.shares else []
        lines += [f"  {step.variant}: {step.launch}" for step in self.steps]
        lines += [f"  workspace of {self.workspace_bytes:,} bytes"] if self.workspace_bytes else []
        lines += [f"  {judged.variant}: {judged.why}" for judged in self.slower]
        lines += [f"  {count} variants: {rule}" for rule, count in self.counts().items()]
        return "\n".join(lines)


def explain(
    problem: Problem, device: Device, specs: Iterable[Spec], algorithm: str | None = None
) -> Explanation:
    """What dispatch does with ``problem`` on ``device``, variant by variant; with an ``algorithm``, only for
    the families of that name. Raises BadParam for an algorithm that no family has.
    """
    operator = problem.operator
    specs = tuple(specs)
    listing = listing_steps(problem, specs)
    if algorithm is not None:
        specs = named(problem, specs, algorithm)
    others: list[Judged] = []
    left: list[Variant] = []
    for spec in specs:
        if not computes(spec, problem):
            continue
        for variant in spec.variants():
            if variant.is_main:
                if problem.score is not None and spec.score_seam:
                    variant = variant.modified(problem.score, streams=rows_of_score_aligned(problem))
                if problem.rule is not None and variant.line_seam:
                    variant = variant.lined(problem.rule.rule, listing)
                judged = _unfit(problem, device, variant, spec.on_request and algorithm is None)
                if judged is None:
                    left.append(variant)
                else:
                    others.append(judged)
    if not left:
        return Explanation(problem, device, None, _ordered(others, operator.axes))
    sizes = " and ".join(name for name, axis in operator.axes.items() if axis.size)

    def keep(kept: Iterable[Variant], rule: str, why: str) -> list[Variant]:
        kept = [*kept]
        others.extend(Judged(variant, rule, why) for variant in left if variant not in kept)
        return kept

    least = min(operator.work(dict(variant.axes)) for variant in left)
    smallest = (variant for variant in left if operator.work(dict(variant.axes)) == least)
    left = keep(smallest, f"larger {sizes}", f"a variant with smaller {sizes} serves, which does less work")
    # After the sizes, as `offers` makes no variants of larger sizes.
    too_many = [judged.variant for judged in others if judged.rule == "rows"]
    kept = splitting(problem, left, too_many)
    left = keep(
        kept, "split-KV", f"it splits keys in its own way, or never, not as splits={shown(problem.splits)}"
    )
    left = keep(preferred(left), "target", "another target of its family comes first on this GPU")
    left = keep(without_replaced(left), "tuned", "a tile that was tuned on this GPU takes its place")
    modelled, gpu = standard(problem, device)
    times = {variant: cost(modelled, gpu, variant) for variant in left}
    chosen = min(left, key=lambda variant: (times[variant], tiles(modelled, variant)))
    slower = []
    for variant in sorted((v for v in left if v != chosen), key=times.__getitem__):
        ratio = times[variant] / times[chosen] if times[chosen] else 1.0
        why = f"{ratio:.2f} times the modelled time" if ratio > 1 else "as fast by the model, with more tiles"
        slower.append(Judged(variant, TIME, why, ratio))
    return Explanation(problem, device, chosen, (*slower, *_ordered(others, operator.axes)))


def _unfit(problem: Problem, device: Device, variant: Variant, on_request: bool) -> Judged | None:
    """Why the variant cannot serve; None where it can."""
    rule = misfit(problem, variant)
    if rule == "blocks":
        return Judged(variant, rule, f"its tile does not divide {problem.block_lists}")
    if rule == "score":
        return Judged(variant, rule, f"{variant.family} has no seam for score modifications")
    if rule == "line":
        return Judged(variant, rule, f"{variant.family} takes no mask by a line")
    if rule == "rows":
        return Judged(variant, rule, f"it is for at most {variant.dispatch.rows_at_most} rows of a head")
    if rule == "cluster":
        count = variant.grid.cluster
        return Judged(variant, rule, f"its clusters have {count} sets of heads, which the call's do not fill")
    if rule:
        value = problem.operator.axis_values(dict(variant.axes))[rule]
        return Judged(variant, rule, f"its {rule} is {value}")
    if max(extents(problem, variant).values()) > MAX_EXTENT or not countable(problem, variant):
        return Judged(variant, "length", f"its grid counts at most {MAX_EXTENT} rows or KV blocks")
    if not launchable(problem, variant):
        return Judged(variant, "length", f"its grid would have more than {MAX_BLOCKS} thread blocks or tiles")
    if not runs_on(variant, device):
        needs = f"{range_of(variant.min_arch)}, with {variant.max_smem} bytes of shared memory a block"
        return Judged(variant, "GPU", f"it needs {needs}")
    if not expressible(problem, variant):
        return Judged(variant, "tensor maps", f"it reads arrays by tensor maps, which need {REQUIREMENTS}")
    if on_request:
        return Judged(variant, "on request", f"{variant.family} is taken only if `algorithm` names it")
    return None


def _ordered(others: list[Judged], axes: Iterable[str]) -> tuple[Judged, ...]:
    """The kernels, those that failed the latest check first."""
    order = [*axes, "blocks", "score", "rows", "length", "GPU", "tensor maps", "on request", "split-KV"]
    place = {rule: at for at, rule in enumerate(order)}
    return tuple(sorted(others, key=lambda judged: -place.get(judged.rule, len(order))))
