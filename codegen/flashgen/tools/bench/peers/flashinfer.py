"""FlashInfer, planned once per shape: its ragged prefill with the mma.sync (fa2) or the Hopper (fa3) kernel,
and its decode.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.tools.bench.cases import SOFTCAP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.hosts import Inputs
    from flashgen.tools.bench.peers.base import Run

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
        if case.is_backward:
            return "no gradients"
        if (case.head_dim, case.width_v) not in _HEAD_DIMS:
            return "head_dim 64, 128 and 256, or 192 with 128 for v, only"
        if case.is_dense:
            return "dense masks are packed bits here, per request"
        if case.score == "alibi":
            return "ALiBi has slopes of its own here"
        if case.lengths == "cache":
            return "a cache is for its decode"
        return None

    def prepare(self, case: Case, sets: Sequence[Inputs]) -> Run:
        import flashinfer
        import torch

        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=self._backend)
        ends = np.cumsum([(0, 0), *case.sequences], axis=0, dtype=np.int32)
        wrapper.plan(
            *(torch.from_numpy(column.copy()) for column in ends.T),
            case.num_heads_q,
            case.num_heads_kv,
            case.head_dim,
            case.width_v,
            causal=case.mask in ("causal", "window"),
            window_left=case.window if case.mask == "window" else -1,
            q_data_type=sets[0].q.dtype,
            logits_soft_cap=SOFTCAP if case.score == "softcap" else None,
        )
        rows = [tuple(x.reshape(-1, *x.shape[-2:]) for x in (s.q, s.k, s.v)) for s in sets]

        def run(index: int) -> Any:
            return wrapper.run(*rows[index]).reshape(sets[index].out.shape)

        return run


class FlashInferDecode:
    """``BatchDecodeWithPagedKVCacheWrapper`` on tensor cores, with the pages of the case, or with K and V as
    pages in their order.
    """

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
        if case.is_backward:
            return "no gradients"
        if case.is_packed or case.appends:
            return "timed on a cache, with nothing to append"
        if case.seqlen_kv % (case.page_size or _PAGE):
            return f"a sequence is whole pages of {case.page_size or _PAGE} keys here"
        return None

    def prepare(self, case: Case, sets: Sequence[Inputs]) -> Run:
        import flashinfer
        import torch

        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        size = case.page_size or _PAGE
        count = case.seqlen_kv // size
        order = torch.arange(case.batch * count, dtype=torch.int32, device="cuda")
        wrapper.plan(
            torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * count,
            # A table for all sets: which pages of a set it names makes no difference to the time.
            sets[0].pages.flatten() if case.page_size else order,
            torch.full((case.batch,), size, dtype=torch.int32, device="cuda"),
            case.num_heads_q,
            case.num_heads_kv,
            case.head_dim,
            size,
            window_left=case.window if case.mask == "window" else -1,
            q_data_type=sets[0].q.dtype,
            kv_data_type=sets[0].k.dtype,
        )
        paged = [tuple(x.reshape(-1, size, *x.shape[2:]) for x in (s.k, s.v)) for s in sets]

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
