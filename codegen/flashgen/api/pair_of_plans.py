"""The plan of a call that another operator computes a part of: two plans, of which one is attention's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.runtime.plans import Plan
    from flashgen.schedule.plan import Step


class PairOfPlans:
    """What callers read of such a plan; ``plans`` are in the order of their launches."""

    __slots__ = ("_plans", "attention")

    def __init__(self, plans: tuple[Plan, Plan], attention: Plan) -> None:
        self._plans, self.attention = plans, attention

    @property
    def variant(self) -> Variant | None:
        return self.attention.variant

    @property
    def steps(self) -> tuple[Step, ...]:
        first, second = self._plans
        return first.steps + second.steps

    @property
    def source(self) -> str:
        return self.attention.source

    @property
    def workspace_bytes(self) -> int:
        return self.attention.workspace_bytes

    def __repr__(self) -> str:
        first, second = self._plans
        return f"<flashgen.{type(self).__name__} {first!r}, {second!r}>"
