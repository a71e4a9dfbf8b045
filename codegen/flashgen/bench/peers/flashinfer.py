"""FlashInfer, planned once per shape: its ragged prefill with the mma.sync (fa2) or the Hopper (fa3) kernel,
and its decode.
"""

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
_PAGE = 16  # keys
_HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))  # of q and k, and of v


class FlashInfer:
    """``BatchPrefillWithRaggedKVCacheWrapper`` with ``backend`` fa2 or fa3."""

    hosts = ("torch",)

    def __init__(self, backend: str) -> None:
        self.name = f"flashinfer-{backend}"
        self._backend = backend

    def unavailable(self) -> str | None:
        why = _unavailable()
        if why is None and self._backend == "fa3":
            import torch

            why = None if torch.cuda.get_device_capability()[0] == 9 else "its fa3 kernel needs a Hopper GPU"
        return why

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


class FlashInferDecode:
    """``BatchDecodeWithPagedKVCacheWrapper`` on tensor cores, with K and V as pages in their order."""

    hosts = ("torch",)
    name = "flashinfer-decode"

    def unavailable(self) -> str | None:
        return _unavailable()

    def declines(self, case: Case) -> str | None:
        if case.seqlen_q != 1:
            return "one query only"
        if case.dtype == "fp32":
            return "fp16 and bf16 only"
        if (case.head_dim, case.width_v) not in ((64, 64), (128, 128), (256, 256)):
            return "head_dim 64, 128 and 256 only"
        if case.is_dense:
            return "no mask array"
        if case.seqlen_kv % _PAGE:
            return f"a sequence is whole pages of {_PAGE} keys here"
        return None

    def prepare(self, case: Case, sets: Sequence[Inputs]) -> Run:
        import flashinfer
        import torch

        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        pages = case.seqlen_kv // _PAGE
        wrapper.plan(
            torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * pages,
            torch.arange(case.batch * pages, dtype=torch.int32, device="cuda"),
            torch.full((case.batch,), _PAGE, dtype=torch.int32, device="cuda"),
            case.num_heads_q,
            case.num_heads_kv,
            case.head_dim,
            _PAGE,
            window_left=case.window if case.mask == "window" else -1,
            q_data_type=sets[0].q.dtype,
            kv_data_type=sets[0].k.dtype,
        )
        paged = [tuple(x.flatten(0, 1).unflatten(0, (-1, _PAGE)) for x in (s.k, s.v)) for s in sets]

        def run(index: int) -> Any:
            return wrapper.run(sets[index].q.squeeze(1), paged[index]).unsqueeze(1)

        return run


def _unavailable() -> str | None:
    """Why FlashInfer cannot be used here, or None."""
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed"
    try:
        import flashinfer  # noqa: F401
        import torch
    except Exception as error:  # noqa: BLE001 - its import probes the machine and may raise anything
        return f"FlashInfer cannot be imported: {type(error).__name__}: {error}"
    return None if torch.cuda.is_available() else "this PyTorch sees no CUDA device"
