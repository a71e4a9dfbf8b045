"""torch.nn.attention.varlen.varlen_attn: FlashAttention-2 on packed sequences."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from flashgen.tools.bench.peers.base import TorchPeer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.hosts import Inputs
    from flashgen.tools.bench.peers.base import Run


class TorchVarlen(TorchPeer):
    """``varlen_attn``. If it does not support grouped heads, K and V are repeated before the timing."""

    name = "torch-varlen"

    def unavailable(self) -> str | None:
        return super().unavailable() or (
            None if find_spec("torch.nn.attention.varlen") else "this PyTorch has no varlen_attn"
        )

    def declines(self, case: Case) -> str | None:
        if not case.is_packed:
            return "packed sequences only"
        if case.dtype == "fp32":
            return "fp16 and bf16 only"
        return "one head dim for q, k and v" if case.width_v != case.head_dim else None

    def forward(self, case: Case, sets: Sequence[Inputs]) -> Run:
        from torch.nn.attention.varlen import varlen_attn

        options: dict[str, Any] = {"window_size": (-1, 0) if case.is_causal else (-1, -1)}
        keys = [(s.k, s.v) for s in sets]
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = case.group_size > 1
        elif case.group_size > 1:
            keys = [tuple(x.repeat_interleave(case.group_size, dim=1) for x in pair) for pair in keys]
        longest = max(case.sequences)

        def run(index: int) -> Any:
            inputs = sets[index]
            ends = inputs.cu_seqlens_q, inputs.cu_seqlens_kv
            return varlen_attn(inputs.q, *keys[index], *ends, *longest, **options)

        return run
