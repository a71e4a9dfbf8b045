"""PyTorch's FlexAttention: a mask as a rule in Python, compiled to a Triton kernel."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam
from flashgen.tools.bench.cases import SOFTCAP
from flashgen.tools.bench.peers.base import TorchPeer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flashgen.call.mask import Mask
    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.hosts import Inputs
    from flashgen.tools.bench.peers.base import Run


class FlexAttention(TorchPeer):
    """``torch.compile(flex_attention)`` with a ``BlockMask``, so that fully hidden blocks are skipped."""

    name = "flex-attention"

    def unavailable(self) -> str | None:
        return super().unavailable() or (
            None if find_spec("triton") else "Triton, which compiles it, is not installed"
        )

    def declines(self, case: Case) -> str | None:
        if case.lengths != "none":
            return "timed without lengths only"
        if case.mask in ("none", "causal") and case.score == "none" and case.also != self.name:
            return "timed on windows, dense masks and modified scores, which the other peers do not all have"
        return None

    def forward(self, case: Case, sets: Sequence[Inputs]) -> Run:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # A grid compiles it for more cases than PyTorch would for one program.
        torch._dynamo.config.recompile_limit = 64
        # A graph that is retained may not give away the memory of what it saved.
        torch._functorch.config.donated_buffer = False
        # Whole or not at all: uncompiled it would compute every score in memory.
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        size = (case.seqlen_q, case.seqlen_kv)
        plain = case.mask == "none"
        masks = [
            None if plain else create_block_mask(_rule(case, s), None, None, *size, device=s.q.device)
            for s in sets
        ]
        modifications = [_modification(case, s) for s in sets]
        views = [(s.q.transpose(1, 2), s.k.transpose(1, 2), s.v.transpose(1, 2)) for s in sets]

        def run(index: int) -> Any:
            out = compiled(
                *views[index],
                score_mod=modifications[index],
                block_mask=masks[index],
                enable_gqa=case.group_size > 1,
            )
            return out.transpose(1, 2)

        return run


def _rule(case: Case, inputs: Inputs) -> Callable[[Any, Any, Any, Any], Any]:
    """Whether a query sees a key, as a function of their indices."""
    offset, window = case.seqlen_kv - case.seqlen_q, case.window
    if inputs.line is not None:
        return _of_line(case.line, inputs.line)
    if inputs.mask is not None:
        visible = ~inputs.mask
        if case.is_causal:
            return lambda batch, head, query, key: visible[query, key] & (key <= query + offset)
        return lambda batch, head, query, key: visible[query, key]
    if case.mask == "causal":
        return lambda batch, head, query, key: key <= query + offset
    return lambda batch, head, query, key: (key <= query + offset) & (key >= query + offset - window)


def _of_line(name: str, mask: Mask) -> Callable[[Any, Any, Any, Any], Any]:
    """The rule of a mask by a line, of queries that have as many keys."""
    params = {**mask.numbers, **mask.arrays}
    match name:
        case "documents":
            doc = params["doc"]
            return lambda b, h, q, kv: (doc[q] == doc[kv]) & (kv <= q)
        case "documents_full":
            doc = params["doc"]
            return lambda b, h, q, kv: doc[q] == doc[kv]
        case "document_starts":
            start = params["start"]
            return lambda b, h, q, kv: (start[q] <= kv) & (kv <= q)
        case "documents_array":
            hidden = params["hidden"]
            return lambda b, h, q, kv: ~hidden[q, kv]
        case "prefix_lm":
            prefix = params["prefix"]
            return lambda b, h, q, kv: (kv <= q) | (kv < prefix[0])
        case "window_first":
            width, first = params["width"], params["first"]
            return lambda b, h, q, kv: (kv <= q) & ((q - kv < width) | (kv < first))
        case "chunks":
            size = params["size"]
            return lambda b, h, q, kv: (q // size == kv // size) & (kv <= q)
        case "block_causal":
            size = params["size"]
            return lambda b, h, q, kv: kv // size <= q // size
    raise BadParam(f"FlexAttention has no rule of the mask {name}")


def _modification(case: Case, inputs: Inputs) -> Callable[[Any, Any, Any, Any, Any], Any] | None:
    """The modified score as a function of the score and its indices; None where scores stay as they are."""
    if case.score == "softcap":
        import torch

        return lambda score, batch, head, query, key: SOFTCAP * torch.tanh(score / SOFTCAP)
    if case.score == "alibi":
        offset, slopes = case.seqlen_kv - case.seqlen_q, inputs.slopes
        if case.is_causal:
            return lambda score, batch, head, query, key: score + slopes[head] * (key - query - offset)
        return lambda score, batch, head, query, key: score - slopes[head] * abs(key - query - offset)
    return None
