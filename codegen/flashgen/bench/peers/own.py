"""flashgen itself, through a held plan: as dispatched, or with the grouping of query heads pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.bench.cases import SOFTCAP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.bench.cases import Case
    from flashgen.bench.hosts import Inputs
    from flashgen.bench.peers.base import Run
    from flashgen.runtime.plans import Plan


class Flashgen:
    """``flashgen.plan``; with ``grouping`` (``gqa`` or ``packed``) only variants of that grouping compete."""

    hosts = ("cupy", "torch")

    def __init__(self, grouping: str | None = None) -> None:
        self.name = "flashgen" if grouping is None else f"flashgen-{grouping}"
        self.variant: str | None = None
        self._grouping = grouping

    def unavailable(self) -> str | None:
        from flashgen.runtime import device

        return None if device.available() else device.why_unavailable()

    def declines(self, case: Case) -> str | None:
        if self._grouping is not None and case.group_size == 1:
            return "one query head per kv head"
        return None

    def prepare(self, case: Case, sets: Sequence[Inputs]) -> Run:
        from flashgen import plan as make_plan

        first = sets[0]
        plan = make_plan(
            first.q,
            first.k,
            first.v,
            causal=case.is_causal,
            window_size=(case.window, 0) if case.mask == "window" else (-1, -1),
            mask=first.mask,
            softcap=SOFTCAP if case.score == "softcap" else None,
            alibi_slopes=first.slopes,
            out=first.out,
        )
        if self._grouping is not None:
            plan = _pinned(plan, first, self._grouping)
        self.variant = plan.variant.name

        def run(index: int) -> Any:
            inputs = sets[index]
            return plan(inputs.q, inputs.k, inputs.v, mask=inputs.mask, out=inputs.out)

        def run_with_slopes(index: int) -> Any:
            inputs = sets[index]
            return plan(inputs.q, inputs.k, inputs.v, mask=inputs.mask, out=inputs.out, slope=inputs.slopes)

        return run if first.slopes is None else run_with_slopes


def _pinned(plan: Plan, inputs: Inputs, grouping: str) -> Plan:
    """The same plan with the best variant of one grouping, whatever dispatch would take."""
    from flashgen.runtime.device import device
    from flashgen.runtime.launch import prepare
    from flashgen.runtime.plans import Plan
    from flashgen.schedule.dispatch import offers
    from flashgen.spec.load import load_specs

    problem = plan.problem
    here = device(problem.device)
    variants = offers(problem, here, load_specs(gpu=here.name))
    runner = prepare(problem, problem.device, tuple(v for v in variants if v.gqa == grouping))
    examples = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "mask": inputs.mask, "out": inputs.out}
    if inputs.slopes is not None:
        examples["slope"] = inputs.slopes
    return Plan(problem, runner, problem.operator.in_order(**examples))
