"""flashgen itself, through a held plan: as dispatched, or with the grouping of query heads pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.bench.cases import Case
    from flashgen.bench.hosts import Inputs
    from flashgen.bench.peers.base import Run


class Flashgen:
    """``flashgen.plan``; with ``grouping`` (``gqa`` or ``packed``) among the variants of that grouping only."""

    hosts = ("cupy", "torch")

    def __init__(self, grouping: str | None = None) -> None:
        self.name = "flashgen" if grouping is None else f"flashgen-{grouping}"
        self.variant: str | None = None
        self._grouping = grouping

    def unavailable(self) -> str | None:
        from flashgen import device

        return None if device.available() else device.why_unavailable()

    def declines(self, case: Case) -> str | None:
        if self._grouping is not None and case.group_size == 1:
            return "one query head per kv head"
        return None

    def prepare(self, case: Case, sets: Sequence[Inputs]) -> Run:
        import flashgen

        first = sets[0]
        plan = flashgen.plan(
            first.q,
            first.k,
            first.v,
            causal=case.mask == "causal",
            window_size=(case.window, 0) if case.mask == "window" else (-1, -1),
            mask=first.mask,
            out=first.out,
        )
        self.variant = plan.variant.name

        def run(index: int) -> Any:
            inputs = sets[index]
            return plan(inputs.q, inputs.k, inputs.v, mask=inputs.mask, out=inputs.out)

        return run
