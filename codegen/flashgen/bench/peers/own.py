"""flashgen itself, through a held plan: as dispatched, with the grouping of query heads pinned, or by one
algorithm."""

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
    """``flashgen.plan``; with ``grouping`` (``gqa`` or ``packed``) only variants of that grouping compete,
    with ``algorithm`` only those of that one, whose workspace is then held too: ``workspace_bytes`` of it.
    """

    hosts = ("cupy", "torch")

    def __init__(self, grouping: str | None = None, algorithm: str | None = None) -> None:
        self.name = "-".join(part for part in ("flashgen", grouping, algorithm) if part)
        self.variant: str | None = None
        self.algorithm = algorithm
        self.workspace_bytes = 0
        self._grouping = grouping

    def unavailable(self) -> str | None:
        from flashgen.runtime import device

        return None if device.available() else device.why_unavailable()

    def declines(self, case: Case) -> str | None:
        if self._grouping is not None and case.group_size == 1:
            return "one query head per kv head"
        if self.algorithm == "v3" and case.dtype == "fp32":
            return "fp16 and bf16 only"
        if self.algorithm in ("naive", "v1") and not (
            case.dtype != "fp32"
            and case.group_size == 1
            and case.mask in ("none", "causal")
            and max(case.head_dim, case.width_v) <= 128
        ):
            return "fp16 and bf16, head_dim up to 128, full and causal, one query head per kv head only"
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
            algorithm=self.algorithm,
        )
        if self._grouping is not None:
            plan = _pinned(plan, first, self._grouping)
        self.variant = plan.variant.name
        workspace = self._workspace(plan) if self.algorithm is not None else None

        def run(index: int) -> Any:
            inputs = sets[index]
            named = {} if inputs.slopes is None else {"slope": inputs.slopes}
            given = inputs.q, inputs.k, inputs.v
            return plan(*given, mask=inputs.mask, out=inputs.out, workspace=workspace, **named)

        return run

    def _workspace(self, plan: Plan) -> Any:
        """Memory for every call of the plan, or None where it needs none."""
        import cupy

        self.workspace_bytes = plan.workspace_bytes
        return cupy.empty(plan.workspace_bytes, cupy.uint8) if plan.workspace_bytes else None


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
