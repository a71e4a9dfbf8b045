"""``flashgen.distributed.decode``: attention over a KV cache whose tokens are spread over ranks.

Each rank computes attention over the tokens that it has, and ranks merge their results by LSE, in fp32 and in
the order of ranks, so all have the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

import torch

import flashgen
from flashgen.call.keywords import unexpected
from flashgen.distributed.checks import agreed
from flashgen.distributed.exchange import gathered
from flashgen.distributed.groups import check_device, flat_ranks, names_of
from flashgen.errors import BadParam, BadTensorShape, arg
from flashgen.operators.arguments import flag, shown

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from flashgen.call.kvcache import KVCache


def decode(
    q: Tensor,
    cache: KVCache,
    *,
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **unknown: Never,
) -> Any:
    """Attention of one query a sequence over a ``KVCache`` that has a part of its tokens on each rank. All
    ranks of the group have to call it.

    q: (batch, 1, heads, head_dim), the same on all ranks.
    cache: this rank's tokens: its lengths, and its pages, count the tokens of this rank alone, in any order;
        `local_lengths` counts them. A sequence may have none here.
    softmax_scale, softcap, sinks: as in ``flashgen.attention``; sinks count once.

    Returns out, or (out, lse) with ``return_lse``, the same bits on every rank. It has no gradient. Raises
    what ``flashgen.attention`` raises, and BadParam for what a rank cannot know of tokens elsewhere: several
    queries, a window, a causal mask; one query sees all tokens anyway.
    """
    for name in ("causal", "window_size", "mask", "alibi_slopes"):
        if unknown.pop(name, None) not in (None, False, (-1, -1)):
            raise BadParam(
                f"{arg(name)} was given, but decode() has tokens in any order on any rank, and its one query "
                "sees all of them; attention() with a KVCache on one GPU can compute this call"
            )
    if unknown:
        raise unexpected(decode, unknown)
    ranks = flat_ranks(names_of(group, mesh))

    def facts() -> dict[str, Any]:
        check_device(ranks, q, "q")
        if q.ndim != 4 or q.shape[1] != 1:
            raise BadTensorShape(
                f"{arg('q')} has shape {tuple(q.shape)}; expected (batch, 1, heads, head_dim): a rank "
                "does not know the positions of its tokens, so decode() takes one query a sequence"
            )
        return {
            "q": (tuple(q.shape), q.dtype),
            "softmax_scale": softmax_scale,
            "softcap": softcap,
            "sinks": sinks is not None,
        }

    agreed(ranks, facts)
    out, lse = flashgen.attention(
        q,
        cache,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks if ranks.rank == 0 else None,
        return_lse=True,
    )
    rows = torch.cat((out.float(), lse.transpose(1, 2)[..., None]), -1)
    parts = gathered(rows, ranks).view(ranks.world, *out.shape[:-1], out.shape[-1] + 1)
    merged, merged_lse = merged_parts(parts[..., :-1], parts[..., -1])
    out = merged.to(q.dtype)
    lse = merged_lse.transpose(1, 2).contiguous()
    return (out, lse) if flag("return_lse", return_lse) else out


def merged_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """One result of the results over disjoint keys, in fp32: outs (parts, ..., head_dim), lses (parts, ...),
    natural logarithms. A row without a key anywhere is 0, with an LSE of -inf.
    """
    most = lses.amax(0)
    base = torch.where(most.isneginf(), torch.zeros_like(most), most)
    weights = torch.exp(lses - base)
    total, result = torch.zeros_like(base), torch.zeros_like(outs[0])
    for out, weight in zip(outs, weights, strict=True):
        total = total + weight
        # A part that saw no key may have anything in its row.
        result = result + torch.where(weight[..., None] > 0, out * weight[..., None], 0.0)
    return result / torch.where(total > 0, total, 1.0)[..., None], base + torch.log(total)


def local_lengths(
    lengths: Tensor,
    *,
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    interleave: int = 1,
) -> Tensor:
    """How many tokens of each sequence this rank has, int32, of how many there are: of P ranks, rank r has
    the token i with ``i // interleave % P == r``. The lengths of the rank's KVCache.
    """
    if interleave < 1:
        raise BadParam(f"{arg('interleave')} is {shown(interleave)}; expected 1 token or more")
    ranks = flat_ranks(names_of(group, mesh))
    turn = ranks.world * interleave
    rest = (lengths % turn - ranks.rank * interleave).clamp(0, interleave)
    return (lengths // turn * interleave + rest).to(torch.int32)
