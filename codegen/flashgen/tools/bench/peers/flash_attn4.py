"""flash-attn-4: FlashAttention written in the CuTe DSL, `flash_attn.cute`."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from flashgen.tools.bench.cases import SOFTCAP
from flashgen.tools.bench.peers.base import TorchPeer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.hosts import Inputs
    from flashgen.tools.bench.peers.base import Run


class FlashAttn4(TorchPeer):
    """``flash_attn.cute.flash_attn_func``, or ``flash_attn_varlen_func`` where sequences are packed. They
    pick the Hopper or the Blackwell kernel themselves.
    """

    name = "flash-attn-4"

    def unavailable(self) -> str | None:
        try:
            metadata.version("flash-attn-4")
        except metadata.PackageNotFoundError:
            return "flash-attn-4 is not installed"
        try:
            from flash_attn.cute import flash_attn_func  # noqa: F401
        except Exception as error:  # noqa: BLE001 - a DSL that cannot start here may raise anything
            return f"flash_attn.cute cannot be imported: {type(error).__name__}: {error}"
        return None

    def declines(self, case: Case) -> str | None:
        if case.dtype == "fp32":
            return "fp16 and bf16 only"
        if case.is_dense:
            return "no mask array"
        if case.score == "alibi":
            return "no ALiBi"
        if case.page_size or case.appends:
            return "a cache without pages only, and nothing to append"
        return None

    def forward(self, case: Case, sets: Sequence[Inputs]) -> Run:
        from flash_attn.cute import flash_attn_func

        # Absent bounds are None here, not -1.
        window = (case.window, 0) if case.mask == "window" else (None, None)
        causal = case.mask == "causal"
        options: dict[str, Any] = {"softcap": SOFTCAP} if case.score == "softcap" else {}
        if case.deterministic:
            options["deterministic"] = True

        def run(index: int) -> Any:
            inputs = sets[index]
            if case.is_packed:
                result = packed(inputs)
            else:
                result = flash_attn_func(
                    inputs.q, inputs.k, inputs.v, causal=causal, window_size=window, **options
                )
            return result[0] if isinstance(result, tuple) else result

        def packed(inputs: Inputs) -> Any:
            from flash_attn.cute import flash_attn_varlen_func

            longest = max(case.sequences)
            return flash_attn_varlen_func(
                inputs.q,
                inputs.k,
                inputs.v,
                cu_seqlens_q=inputs.cu_seqlens_q,
                cu_seqlens_k=inputs.cu_seqlens_kv,
                max_seqlen_q=longest[0],
                max_seqlen_k=longest[1],
                causal=causal,
            )

        return run
