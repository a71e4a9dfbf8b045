"""What arguments of flash-attn's functions are for ``attention``: options, caches, packed arrays."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

from flashgen.call.kvcache import KVCache
from flashgen.compat.libraries import counted, int32s, is_tensor, module_of, shape_of
from flashgen.compat.widths import missing
from flashgen.errors import BadParam, BadTensorShape, NullPointer, arg
from flashgen.operators.arguments import flag, shown, shown_shape
from flashgen.operators.dropout import NO_DROPOUT, probability_of
from flashgen.operators.maskoptions import NO_WINDOW, window_of
from flashgen.runtime.arrays import kind_of, tensor_kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What errors of ``attention`` call arguments, and advise, in the words of here.
OPTIONS = {"return_lse": "return_attn_probs", "cap": "softcap", "no softcap": "0", "sinks": "s_aux"}


def options_of(
    softmax_scale: float | None, causal: bool, window_size: Any, softcap: float, alibi_slopes: Any
) -> dict[str, Any]:
    """flash-attn's options as ``attention`` has them."""
    causal = flag("causal", causal)
    # Most calls have a float here, and isinstance of an abstract class takes longer.
    uncapped = (type(softcap) is float or isinstance(softcap, numbers.Real)) and softcap <= 0
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": _window(window_size, causal),
        "softcap": None if uncapped else softcap,
        "alibi_slopes": alibi_slopes,
    }


def with_dropout(dropout_p: float, q: Any, rng_state: Any = None) -> dict[str, Any]:
    """The options of dropout for a pass below autograd, of PyTorch tensors. ``rng_state`` has seed and offset
    in the backward pass; None: the forward pass, which draws them from PyTorch's generator. Raises BadParam
    if dropout_p is not a probability.
    """
    if probability_of(dropout_p) == NO_DROPOUT:
        return {}
    if rng_state is None:
        rng_state = kind_of(q).random_integers(2, q, None)
    return {"dropout_p": dropout_p, "dropout_seed": rng_state}


def _window(window_size: Any, causal: bool) -> Any:
    """flash-attn's window as ``attention`` has it, which says what is wrong with one that is no pair."""
    if window_size is NO_WINDOW or (type(window_size) is tuple and window_size == NO_WINDOW):
        return NO_WINDOW
    try:
        sides = tuple(window_size)
    except TypeError:
        return window_size
    if len(sides) != 2 or not all(map(_is_integer, sides)):
        return window_size
    left, right = (max(side, -1) for side in sides)
    return left, 0 if causal else right


def _is_integer(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def splits_of(num_splits: int) -> Any:
    """flash-attn's number of splits as ``attention`` has it."""
    if not _is_integer(num_splits) or num_splits < 0:
        raise BadParam(f"num_splits is {shown(num_splits)}; expected an integer of 0 (any number) or more")
    return int(num_splits) or "auto"


def cache_of(
    q: Any, k_cache: Any, v_cache: Any, filled: Any, index: Any, pages: Any, seqlen_new: int
) -> KVCache:
    """The cache of the sequences of q, with room for ``seqlen_new`` tokens of each where ``filled`` is an
    int. It has no lengths if all of it is read and each entry belongs to one sequence of q.
    """
    shape = "batch_cache, seqlen_cache" if pages is None else "num_blocks, page_block_size"
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_cache(name, x, f"{shape}, nheads_k, headdim")
    batch, room = q.shape[0], k_cache.shape[1]
    if pages is not None:
        check_rank("block_table", pages, "batch, max_num_blocks_per_seq")
        pages = contiguous(pages)
        room *= pages.shape[1]
    elif index is None:
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            if x.shape[0] < batch:
                raise BadTensorShape(
                    f"{arg(name)} has {x.shape[0]} entries; {arg('q')} has {batch}, and each needs one"
                )
        if k_cache.shape[:-1] != v_cache.shape[:-1]:  # said of the entries that q has not, too
            raise BadTensorShape(
                f"{arg('v_cache')} has shape {tuple(v_cache.shape)} but {arg('k_cache')} has "
                f"{tuple(k_cache.shape)}; all but the last dimension must be the same"
            )
        if k_cache.shape[0] > batch:
            k_cache, v_cache = k_cache[:batch], v_cache[:batch]
        if filled is None:
            return KVCache(k_cache, v_cache, None)
    if isinstance(filled, bool):
        raise BadParam(f"cache_seqlens is {filled}; expected an integer, or an int32 array, (batch,)")
    lengths = filled
    if filled is None or isinstance(filled, numbers.Integral):
        length = room if filled is None else int(filled)
        if not 0 <= length <= room - seqlen_new:
            new = f", and k has {seqlen_new} new ones" if seqlen_new else ""
            raise BadParam(
                f"cache_seqlens is {shown(length)}; {arg('k_cache')} has room for {room} keys{new}"
            )
        lengths = int32s(batch, length, q)
        if lengths is None:
            raise NotImplementedError(
                f"cache_seqlens is {filled} and q of type {type(q).__name__}, of which flashgen "
                f"cannot make an array of lengths: pass one, int32, (batch,)"
            )
    return KVCache(k_cache, v_cache, lengths, pages, contiguous(index))


def check_leftpad(q: Any, seqlen_new: int, options: Mapping[str, Any]) -> None:
    """That queries are rotated to the positions of new tokens, where each sequence begins at its leftpad."""
    if q.shape[1] != seqlen_new:
        raise NotImplementedError(
            f"cache_leftpad and rotary_cos were given, q has seqlen_q {q.shape[1]} and k has {seqlen_new} "
            "new tokens; flashgen takes as many: pass q and k rotated, and no rotary_cos"
        )
    if q.shape[1] > 1 and not options["causal"] and window_of(options["window_size"]) == NO_WINDOW:
        raise NotImplementedError(
            f"cache_leftpad and rotary_cos were given, and {q.shape[1]} queries that are not causal, which "
            "flash-attn rotates to one position: pass q and k rotated, and no rotary_cos"
        )


def leftpad_positions(cache: KVCache, seqlen_new: int) -> Any:
    """The positions of new tokens, (batch, seqlen_new), from the start of each sequence; None for a cache
    without starts, whose positions count from its rows.
    """
    if cache.starts is None:
        return None
    steps = counted(seqlen_new, cache.lengths)
    if steps is None:
        raise NotImplementedError(
            f"cache_leftpad was given with rotary_cos, and cache_seqlens of type "
            f"{type(cache.lengths).__name__}, of which flashgen cannot make positions: pass q and k rotated, "
            "and no rotary_cos"
        )
    return (cache.lengths - cache.starts)[:, None] + steps


def contiguous(table: Any) -> Any:
    """``table``, or a copy if its last dimension is not contiguous. Any other object is returned as it is."""
    if is_tensor(table):
        return table if not table.ndim or table.shape[-1] < 2 or table.stride(-1) == 1 else table.contiguous()
    strides = getattr(table, "strides", None)
    if not strides or module_of(table) is None:  # an array of JAX has none, and is contiguous
        return table
    return table if table.shape[-1] < 2 or strides[-1] == table.itemsize else table.copy()


def pages_of_packed(cu_seqlens_k: Any, most_keys: int) -> Any:
    """The page table of packed keys, which are pages of one key: (batch, most_keys). It serves sequences that
    have only the first keys of their parts. A number past the last key of a sequence has no meaning.
    """
    kind = tensor_kind(cu_seqlens_k)
    if kind is not None:
        positions = kind.torch.arange(most_keys, dtype=cu_seqlens_k.dtype, device=cu_seqlens_k.device)
    else:
        positions = module_of(cu_seqlens_k).arange(most_keys, dtype=cu_seqlens_k.dtype)
    return cu_seqlens_k[:-1, None] + positions


def check_new(k: Any, v: Any, rotary_cos: Any, rotary_sin: Any, cache_seqlens: Any) -> None:
    """That what is appended is there in full."""
    for (name, x), (other, y) in (
        (("k", k), ("v", v)),
        (("v", v), ("k", k)),
        (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)),
        (("rotary_sin", rotary_sin), ("rotary_cos", rotary_cos)),
    ):
        if x is not None and y is None:
            raise NullPointer(f"{other} is None but {arg(name)} was given; pass both, or neither")
    if k is None:
        if rotary_cos is not None:
            raise BadParam(
                f"rotary_cos was given without {arg('k')} and {arg('v')}; it rotates {arg('q')} where "
                f"{arg('k')} is appended"
            )
        return
    for name, x in (("k", k), ("v", v)):
        check_rank(name, x, "batch, seqlen_new, nheads_k, headdim")
    for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if x is not None:
            check_rank(name, x, "seqlen_ro, rotary_dim / 2")
    if cache_seqlens is None:
        raise NullPointer(f"cache_seqlens is None but {arg('k')} was given; it says where {arg('k')} goes")


def check_cache(name: str, x: Any, expected: str) -> None:
    """That a cache can be read where it lies."""
    check_rank(name, x, expected)
    lacking = missing(x)
    if lacking:
        width = x.shape[-1]
        raise BadTensorShape(
            f"{arg(name)} has head_dim {width}, and padding it would copy the cache; allocate it with "
            f"{width + lacking}, pad {arg('q')}, {arg('k')} and {arg('v')} with zeros to that, and pass "
            f"softmax_scale={width}**-0.5"
        )


def unpacked(name: str, x: Any, expected: str) -> Sequence[Any]:
    """The arrays packed in one; ``expected`` has their number before nheads and headdim."""
    check_rank(name, x, expected)
    parts = int(expected.split(", ")[-3])
    if x.shape[-3] != parts:
        raise BadTensorShape(f"{arg(name)} has shape {tuple(x.shape)}; expected ({expected})")
    # One function of autograd: it puts the gradients of the parts into one array, where each slice would add
    # to zeros.
    return x.unbind(-3) if is_tensor(x) else [x[..., place, :, :] for place in range(parts)]


def check_rank(name: str, x: Any, expected: str) -> None:
    rank = expected.count(",") + 1
    if is_tensor(x) and x.ndim == rank:
        return
    shape = shape_of(name, x)
    if len(shape) != rank:
        raise BadTensorShape(f"{arg(name)} has shape {shape}; expected {shown_shape(expected.split(', '))}")
