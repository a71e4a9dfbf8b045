"""``flashgen.distributed.attention``: attention of a sequence that is cut over ranks."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any, Never

import torch
import torch.distributed as dist

from flashgen.call.dropout import seeded
from flashgen.call.keywords import unexpected
from flashgen.call.mask import Mask
from flashgen.call.record import AttentionCall, call_of
from flashgen.distributed import operators
from flashgen.distributed.groups import Names, names_of, resolved
from flashgen.distributed.model import bounds_of, check_method, partition
from flashgen.distributed.rates import H200
from flashgen.distributed.setting import Options
from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import flag, margin_of, shown
from flashgen.operators.contract import scale_of
from flashgen.operators.dropout import NO_DROPOUT, probability_of
from flashgen.operators.maskoptions import window_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    layout: str = "zigzag",
    method: str = "auto",
    causal: bool = False,
    mask: Mask | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = NO_DROPOUT,
    dropout_seed: Tensor | tuple[int, int] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    seqlen: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    kv_heads_per_step: int | None = None,
    sm_margin: int = 0,
    **unknown: Never,
) -> Any:
    """``flashgen.attention`` of a sequence, or of packed documents, whose tokens are cut over ranks. Takes
    and returns shards, and records gradients. All ranks of the group have to call it, with the same options.

    q, k, v: this rank's tokens, (batch, tokens, heads, head_dim), or (tokens, heads, head_dim) with
        cu_seqlens; PyTorch tensors, on a GPU with NCCL or in host memory with gloo. `shard` cuts them.
    group: the ranks, a process group; by default all.
    mesh: the ranks, a DeviceMesh. With two dimensions the outer one gathers, and the inner one exchanges
        heads; tokens are cut over both, over the outer one first.
    layout: "zigzag", "contiguous", "documents" or "whole_documents": which tokens a rank has, see `shard`.
    method: "gather": a rank gathers keys and values, some heads at a time, and computes its rows of all
        heads, with the kernel of one GPU, and with its bits where cuts are at whole tiles. "ulysses": ranks
        exchange heads, so each computes all rows of some heads; the number of ranks divides the query heads.
        "auto": the one that `partition` expects to be faster, gather unless the gain is 5 %.
    mask: a ``flashgen.Mask``, with the arrays of all tokens of the call on every rank. A query sees a key if
        the line is true and neither causal, nor the window, nor a document hides it.
    causal, window_size, softmax_scale, softcap, alibi_slopes, sinks: as in ``flashgen.attention``. The
        gradient of sinks is what the rows of this rank add to it: like the gradient of a weight, it is to be
        summed over ranks.
    dropout_p, dropout_seed: as in ``flashgen.attention``, with the random numbers of one GPU; all ranks pass
        the same seed. None: the first rank draws it. Each batch entry, or each packed document, takes a
        launch.
    cu_seqlens: the bounds of all documents, over all ranks, from 0 to the number of tokens; integers, or an
        int32 tensor, best in host memory: each call reads it there. Documents may be cut anywhere.
    seqlen: the number of tokens of all ranks, where these do not have equally many and there is no
        cu_seqlens.
    return_lse: also return the log-sum-exp, fp32: (batch, heads, tokens), or (heads, tokens).
    deterministic: the same bits of gradients each time: ranks are summed in their order.
    kv_heads_per_step: how many kv heads one step gathers. None: as many as the model of `partition` expects
        to be fastest, and at most 2 GiB of K and V.
    sm_margin: as in ``flashgen.attention``: how many multiprocessors the forward kernels leave to NCCL.

    Raises what ``flashgen.attention`` raises. Under ``FLASHGEN_CHECK=1`` ranks compare their calls first, and
    an error of one rank, or a difference between two, is an error on every rank. Without it they may wait for
    each other for ever.
    """
    if unknown:
        raise unexpected(attention, unknown)
    check_method(method)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise BadParam(f"{arg(name)} has type {type(x).__name__}; expected a PyTorch tensor")
    if mask is not None and not isinstance(mask, Mask):
        what = "is an array" if hasattr(mask, "shape") else f"has type {type(mask).__name__}"
        raise BadParam(f"{arg('mask')} {what}; pass a flashgen.Mask, for an array Mask.from_array(mask)")
    names = names_of(group, mesh)
    documents = _documents(cu_seqlens)
    left, right = window_of(window_size)
    causal = flag("causal", causal)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise BadParam(f"{arg('alibi_slopes')} requires a gradient; pass alibi_slopes.detach()")
    dropout_p = probability_of(dropout_p)
    if dropout_p == NO_DROPOUT and dropout_seed is not None:
        raise BadParam(f"{arg('dropout_seed')} was given without {arg('dropout_p')}; leave it out")
    if names.outer == names.inner:
        if method == "auto":
            aligned = alibi_slopes is None or (mask is None and (causal or right == 0))
            method = _method(q, k, v, names, documents, seqlen, layout, (left, right), causal, aligned)
        names = Names(names.outer, "") if method == "gather" else Names("", names.inner)
    elif method != "auto":
        raise BadParam(
            f"{arg('method')} is {method!r}, but {arg('mesh')} has two dimensions, which gather and exchange "
            "heads; leave method out, or pass a mesh of one dimension"
        )
    if dropout_p != NO_DROPOUT:
        dropout_seed = _seed(q, k, v, dropout_p, dropout_seed, names)
    compute = operators.run if operators.is_plain(q, k, v, sinks) else operators.forward
    arrays = q, k, v, sinks, alibi_slopes, documents, dropout_seed
    options = Options(
        outer=names.outer,
        inner=names.inner,
        layout=layout,
        causal=causal,
        window_left=left,
        window_right=right,
        softmax_scale=None if softmax_scale is None else scale_of(softmax_scale, q.shape[-1]),
        softcap=None if softcap is None else number("softcap", softcap),
        seqlen=None if seqlen is None else whole("seqlen", seqlen),
        deterministic=flag("deterministic", deterministic),
        kv_heads_per_step=None
        if kv_heads_per_step is None
        else whole("kv_heads_per_step", kv_heads_per_step),
        dropout_p=dropout_p,
        sm_margin=margin_of("sm_margin", sm_margin),
        mask_line="" if mask is None else mask.line,
        mask_numbers=[] if mask is None else list(mask.numbers.values()),
    )
    out, lse, *_ = compute(*arrays, [] if mask is None else list(mask.arrays.values()), *options)
    return (out, lse) if flag("return_lse", return_lse) else out


def number(name: str, value: Any) -> float:
    """A number of a call. Raises BadParam."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise BadParam(f"{arg(name)} is {shown(value)}; expected a number or None")
    return float(value)


def whole(name: str, value: Any) -> int:
    """An integer of a call, which may be a symbol of torch.compile. Raises BadParam."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise BadParam(f"{arg(name)} is {shown(value)}; expected an integer or None")
    return value


def _seed(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, dropout_seed: Any, names: Names) -> Tensor:
    """Seed and offset of dropout on the device. Where the call has none, the first rank draws them, and sends
    them to all. Raises BadParam.
    """
    if dropout_seed is None and torch.compiler.is_compiling():
        raise BadParam(
            f"{arg('dropout_seed')} is None under torch.compile, which does not see how ranks agree on one; "
            "pass it"
        )
    seed = seeded(call_of(AttentionCall, q=q, k=k, v=v, dropout_p=dropout_p, dropout_seed=dropout_seed))
    if dropout_seed is None:
        for name in filter(None, names):
            dist.broadcast(seed.dropout_seed, group_src=0, group=resolved(name))
    return seed.dropout_seed


def _documents(cu_seqlens: Any) -> Tensor | None:
    """The bounds of documents as a tensor in host memory."""
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, torch.Tensor):
        return cu_seqlens.cpu()
    if not torch.compiler.is_compiling() and isinstance(cu_seqlens, (list, tuple)):
        with suppress(TypeError):  # an element that is no number
            return _tensor_of(tuple(cu_seqlens))
    return torch.tensor(bounds_of(cu_seqlens))


@lru_cache(maxsize=16)
def _tensor_of(bounds: tuple[int, ...]) -> Tensor:
    return torch.tensor(bounds_of(bounds))


def _method(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    names: Names,
    documents: Tensor | None,
    seqlen: int | None,
    layout: str,
    window_size: tuple[int, int],
    causal: bool,
    gathers: bool,
) -> str:
    """The method that `partition` expects to be faster; ``gathers`` is whether "gather" can compute the
    call.
    """
    world = resolved(names.outer).size()
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if world == 1 or heads_q % world or q.ndim < 3 or not heads_kv:
        return "gather"
    if not gathers:
        return "ulysses"
    if documents is None or torch.compiler.is_compiling():
        bounds: Any = int(seqlen) if seqlen is not None else world * q.shape[-3]
    else:
        bounds = documents
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return partition(
        bounds,
        world=world,
        heads=(heads_q, heads_kv),
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        batch=q.shape[0] if documents is None else 1,
        dtype_bytes=q.dtype.itemsize,
        layout=layout,
        causal=causal,
        window_size=window_size,
        rates=H200._replace(ranks_per_node=local),
    ).method
