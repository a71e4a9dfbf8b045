"""torch.nn.functional.scaled_dot_product_attention with one backend pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.operators.masks import hidden_keys
from flashgen.tools.bench.peers.base import TorchPeer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.hosts import Inputs
    from flashgen.tools.bench.peers.base import Run

_BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


class TorchSdpa(TorchPeer):
    """SDPA's ``flash`` (FlashAttention-2), ``cudnn`` or ``efficient`` (memory-efficient, CUTLASS) backend."""

    def __init__(self, backend: str) -> None:
        self.name = f"torch-{backend}"
        self._backend = backend

    def declines(self, case: Case) -> str | None:
        if case.lengths != "none" and (case.lengths != "cache" or case.page_size or case.appends):
            return "arrays without lengths, or a contiguous cache with room for no more, only"
        if case.score != "none":
            return "SDPA modifies no scores but by a mask array"
        if case.mask == "window":
            return "SDPA has no sliding window"
        if case.mask == "causal" and case.seqlen_q != case.seqlen_kv:
            return "SDPA aligns causal masks top-left"
        if case.dtype == "fp32" and self._backend != "efficient":
            return "fp16 and bf16 only"
        if case.is_dense and self._backend == "flash":
            return "no mask array"
        if case.width_v != case.head_dim and self._backend == "flash":
            return "one head dim for q, k and v"
        if case.group_size > 1 and self._backend == "efficient":
            return "no grouped heads"
        if case.deterministic and self._backend == "cudnn":
            return "PyTorch asks cuDNN for no order of additions"
        return None

    def forward(self, case: Case, sets: Sequence[Inputs]) -> Run:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        backend = getattr(SDPBackend, _BACKENDS[self._backend])
        # SDPA wants (batch, heads, seqlen, head_dim), for which a view is enough, and True for the keys that
        # stay.
        views = [(s.q.transpose(1, 2), s.k.transpose(1, 2), s.v.transpose(1, 2)) for s in sets]
        visible = [_visible(case, s.mask) for s in sets]

        def run(index: int) -> Any:
            q, k, v = views[index]
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=visible[index],
                    dropout_p=case.dropout_p,
                    is_causal=case.mask == "causal",
                    enable_gqa=case.group_size > 1,
                )
            return out.transpose(1, 2)

        return run


def _visible(case: Case, mask: Any) -> Any:
    """Which keys a query sees, for a case with a mask array: SDPA takes no diagonal beside one."""
    if mask is None:
        return None
    import torch

    rows, keys = (torch.arange(count, device=mask.device) for count in mask.shape)
    return ~hidden_keys(case.band, mask, rows[:, None], keys)
