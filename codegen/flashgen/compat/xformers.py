"""``xformers.ops.memory_efficient_attention``, under its signature, of PyTorch tensors.

>>> from flashgen.compat.xformers import BlockDiagonalMask, memory_efficient_attention

The masks of ``xformers.ops.fmha.attn_bias`` are served, and the classes here, which have their names and what
``memory_efficient_attention`` needs of them. xformers need not be installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from flashgen.compat.refusals import refuse_gradients
from flashgen.compat.widths import attention_of_any_width
from flashgen.errors import BadParam, BadTensorShape, naming
from flashgen.operators.arguments import Expected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "memory_efficient_attention",
]

_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "bias": "attn_bias",
    "softmax_scale": "scale",
    "dropout_p": "p",
    "cu_seqlens_q": "attn_bias.q_seqinfo.seqstart",
    "cu_seqlens_kv": "attn_bias.k_seqinfo.seqstart",
    "kv_lengths": "attn_bias.k_seqinfo.seqlen",
}


class LowerTriangularMask:
    """Query i sees the keys j <= i."""


class LowerTriangularFromBottomRightMask:
    """The last query sees the last key."""


@dataclass(frozen=True)
class LocalAttentionFromBottomRightMask:
    """Query i sees the keys from p - window_left to p + window_right, p = i + keys - queries."""

    window_left: int
    window_right: int


@dataclass(frozen=True)
class SeqLenInfo:
    """Where the sequences of packed rows begin: ``seqstart`` on a device, ``seqstart_py`` on the host."""

    seqstart: Tensor
    max_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Sequence[int], device: Any = None) -> SeqLenInfo:
        starts = [0]
        for length in seqlens:
            starts.append(starts[-1] + length)
        return cls(torch.tensor(starts, dtype=torch.int32, device=device), max(seqlens, default=0), starts)


@dataclass(frozen=True)
class PaddedSeqLenInfo(SeqLenInfo):
    """The same where each sequence has room for ``padding`` rows, of which the first ``seqlen`` count."""

    seqlen: Tensor
    padding: int


@dataclass(frozen=True)
class BlockDiagonalMask:
    """Packed sequences, each of which sees itself: a batch of 1."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> Self:
        q = SeqLenInfo.from_seqlens(q_seqlen, device)
        if kv_seqlen is not None and len(kv_seqlen) != len(q_seqlen):
            raise BadParam(f"kv_seqlen has {len(kv_seqlen)} sequences but q_seqlen has {len(q_seqlen)}")
        return cls(q, q if kv_seqlen is None else SeqLenInfo.from_seqlens(kv_seqlen, device))

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, window_size)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Query i of a sequence sees its keys j <= i."""


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """The last query of a sequence sees its last key."""


@dataclass(frozen=True)
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Query i of a sequence sees its keys from i - _window_size + 1 to i."""

    _window_size: int


@dataclass(frozen=True)
class BlockDiagonalCausalWithOffsetPaddedKeysMask:
    """Packed queries on padded keys; the last query of a sequence sees its last key that counts."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], *, device: Any = None
    ) -> Self:
        starts = SeqLenInfo.from_seqlens([kv_padding] * len(kv_seqlen), device)
        seqlen = torch.tensor(list(kv_seqlen), dtype=torch.int32, device=device)
        keys = PaddedSeqLenInfo(
            starts.seqstart, max(kv_seqlen, default=0), starts.seqstart_py, seqlen, kv_padding
        )
        return cls(SeqLenInfo.from_seqlens(q_seqlen, device), keys)


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention of query, (batch, queries, heads, K), on key, (batch, keys, heads, K), and value, (batch,
    keys, heads, Kv); without heads for one head; with (..., groups, heads, K) for GQA, where each group has
    one head of key and value, broadcast.

    attn_bias: a tensor that broadcasts to (batch, heads, queries, keys), added to the scaled scores; or one
        of the masks of this module, or of xformers; local ones and those with padded keys included.
    p: the probability that a score is dropped, as in ``flashgen.attention``.
    op, output_dtype: None, or the dtype of query.

    Returns (batch, queries, heads, Kv), or as query without heads or with groups. PyTorch's autograd gets the
    gradients of query, key and value.

    Raises NotImplementedError for an op, another output_dtype, a bias that requires a gradient,
    masks of other classes, and causal blocks aligned top left with other numbers of queries than keys;
    BadTensorShape for shapes that do not go together; and what ``flashgen.attention`` raises.
    """
    if op is not None:
        raise NotImplementedError("op was given; flashgen chooses its kernel: leave it out")
    if output_dtype not in (None, query.dtype):
        raise NotImplementedError(f"output_dtype is {output_dtype}; flashgen returns {query.dtype}, of query")
    shape = query.shape
    q, k, v = (_with_heads(name, x, shape) for name, x in (("query", query), ("key", key), ("value", value)))
    options = {"softmax_scale": scale, "dropout_p": p}
    with naming(_NAMES):
        if attn_bias is None:
            out = attention_of_any_width(q, k, v, **options)
        elif isinstance(attn_bias, torch.Tensor):
            out = attention_of_any_width(q, k, v, **options, **_added(attn_bias, shape))
        elif type(attn_bias).__name__ == "LowerTriangularMaskWithTensorBias":
            options |= _added(attn_bias._bias, shape) | {"mask_type": "causal_top_left"}
            out = attention_of_any_width(q, k, v, **options)
        elif hasattr(attn_bias, "q_seqinfo"):
            out = _of_blocks(q, k, v, attn_bias, options)
        else:
            out = attention_of_any_width(q, k, v, **options, **_pattern(attn_bias))
    return out.reshape(*shape[:-1], value.shape[-1])


def _with_heads(name: str, x: Tensor, of_query: torch.Size) -> Tensor:
    """``x`` as (batch, rows, heads, K); of the groups of key and value one head, if it is broadcast."""
    if x.ndim != len(of_query) or x.ndim not in (3, 4, 5):
        raise BadTensorShape(
            f"{name} has shape {tuple(x.shape)}; expected (batch, rows, heads, K), without heads or with "
            "groups before them, as query"
        )
    if x.ndim == 3:
        return x.unsqueeze(2)
    if x.ndim == 4:
        return x
    if name != "query" and (x.shape[3] == 1 or x.stride(3) == 0):
        return x[:, :, :, 0]
    return x.flatten(2, 3)


def _added(bias: Tensor, shape: torch.Size) -> dict[str, Any]:
    """The options for a tensor that is added to the scores of a query of ``shape``."""
    refuse_gradients(attn_bias=bias)
    return {"score": "bias", "params": {"bias": _bias(bias, shape)}}


def _bias(bias: Tensor, shape: torch.Size) -> Tensor:
    """A tensor that is added, (batch, heads, queries, keys), with rows that kernels read."""
    if bias.ndim == 5:
        bias = bias.flatten(1, 2)
    if bias.ndim == 3 and len(shape) == 3:  # (batch, queries, keys) of one head
        bias = bias.unsqueeze(1)
    bias = bias.float()
    return bias if bias.stride(-1) == 1 else bias.contiguous()


def _refused(mask: Any) -> NotImplementedError:
    return NotImplementedError(
        f"attn_bias is a {type(mask).__name__}; flashgen serves tensors, None, and {', '.join(_SERVED)}"
    )


_SERVED = (
    *__all__[:-1],
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalPaddedKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "LowerTriangularMaskWithTensorBias",
)


def _pattern(mask: Any) -> dict[str, Any]:
    """The options for a mask without sequences. Raises NotImplementedError."""
    kind = type(mask).__name__
    if kind == "LowerTriangularMask":
        return {"mask_type": "causal_top_left"}
    if kind == "LowerTriangularFromBottomRightMask":
        return {"causal": True}
    if kind == "LowerTriangularFromBottomRightLocalAttentionMask":
        return {"causal": True, "window_size": (mask._window_size - 1, 0)}
    if kind == "LocalAttentionFromBottomRightMask":
        return {"window_size": (mask.window_left, mask.window_right)}
    raise _refused(mask)


def _of_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
    """The result of packed queries: a batch of 1."""
    kind = type(mask).__name__
    queries, keys = mask.q_seqinfo, mask.k_seqinfo
    for name, x in (("query", q), ("key", k)):
        if x.shape[0] != 1:
            raise BadTensorShape(
                f"{name} has a batch of {x.shape[0]}; with a {kind} packed sequences are a batch of 1"
            )
    options = options | {
        "cu_seqlens_q": queries.seqstart.to(q.device),
        "max_seqlen_q": Expected(int(queries.max_seqlen)),
        **_blocks_pattern(kind, mask),
    }
    if hasattr(keys, "padding"):
        batch = len(keys.seqstart_py) - 1
        k, v = (x[0].unflatten(0, (batch, keys.padding)) for x in (k, v))
        options["kv_lengths"] = keys.seqlen.to(q.device)
        return attention_of_any_width(q[0], k, v, **options)[None]
    options |= {"cu_seqlens_kv": keys.seqstart.to(q.device), "max_seqlen_kv": Expected(int(keys.max_seqlen))}
    return attention_of_any_width(q[0], k[0], v[0], **options)[None]


def _blocks_pattern(kind: str, mask: Any) -> dict[str, Any]:
    """The options for the pattern in each block. Raises NotImplementedError."""
    if kind in ("BlockDiagonalMask", "BlockDiagonalPaddedKeysMask"):
        return {}
    if kind in ("BlockDiagonalCausalFromBottomRightMask", "BlockDiagonalCausalWithOffsetPaddedKeysMask"):
        return {"causal": True}
    if kind in (
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    ):
        return {"causal": True, "window_size": (mask._window_size - 1, 0)}
    if kind == "BlockDiagonalLocalAttentionPaddedKeysMask":
        return {"window_size": (mask.window_left, mask.window_right)}
    if kind in ("BlockDiagonalCausalMask", "BlockDiagonalCausalLocalAttentionMask"):
        if list(mask.q_seqinfo.seqstart_py) != list(mask.k_seqinfo.seqstart_py):
            raise NotImplementedError(
                f"attn_bias is a {kind}, aligned top left, of sequences with other numbers of queries than "
                "keys; flashgen aligns causal blocks bottom right: make_causal_from_bottomright()"
            )
        window = (mask._window_size - 1, 0) if "Local" in kind else (-1, -1)
        return {"causal": True, "window_size": window}
    raise _refused(mask)
