"""FlashInfer's ragged prefill, planned once per shape, with its mma.sync (fa2) or its Hopper (fa3) kernel."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from flashgen.bench.cases import SOFTCAP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.bench.cases import Case
    from flashgen.bench.hosts import Inputs
    from flashgen.bench.peers.base import Run

_WORKSPACE_BYTES = 256 << 20
_HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))  # of q and k, and of v


class FlashInfer:
    """``BatchPrefillWithRaggedKVCacheWrapper`` with ``backend`` fa2 or fa3."""

    hosts = ("torch",)

    def __init__(self, backend: str) -> None:
        self.name = f"flashinfer-{backend}"
        self._backend = backend

    def unavailable(self) -> str | None:
        if find_spec("flashinfer") is None:
            return "FlashInfer is not installed"
        try:
            import flashinfer  # noqa: F401
            import torch
        except Exception as error:  # noqa: BLE001 - its import probes the machine and may raise anything
            return f"FlashInfer cannot be imported: {type(error).__name__}: {error}"
        if not torch.cuda.is_available():
            return "this PyTorch sees no CUDA device"
        if self._backend == "fa3" and torch.cuda.get_device_capability()[0] != 9:
            return "its fa3 kernel needs a Hopper GPU"
        return None

    def declines(self, case: Case) -> str | None:
        if case.dtype == "fp32":
            return "fp16 and bf16 only"
        if (case.head_dim, case.width_v) not in _HEAD_DIMS:
            return "head_dim 64, 128 and 256, or 192 with 128 for v, only"
        if case.is_dense:
            return "dense masks are packed bits here, per request"
        if case.score == "alibi":
            return "ALiBi has slopes of its own here"
        return None

    def prepare(self, case: Case, sets: Sequence[Inputs]) -> Run:
        import flashinfer
        import torch

        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=self._backend)
        starts = torch.arange(case.batch + 1, dtype=torch.int32)
        wrapper.plan(
            starts * case.seqlen_q,
            starts * case.seqlen_kv,
            case.num_heads_q,
            case.num_heads_kv,
            case.head_dim,
            case.width_v,
            causal=case.mask in ("causal", "window"),
            window_left=case.window if case.mask == "window" else -1,
            q_data_type=sets[0].q.dtype,
            logits_soft_cap=SOFTCAP if case.score == "softcap" else None,
        )
        rows = [(s.q.flatten(0, 1), s.k.flatten(0, 1), s.v.flatten(0, 1)) for s in sets]

        def run(index: int) -> Any:
            return wrapper.run(*rows[index]).unflatten(0, (case.batch, case.seqlen_q))

        return run
