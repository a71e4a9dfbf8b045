"""Checks that the contracts of several operators share: of dtypes, extents and scales, of dense masks and of
the arrays of score modifications and of masks by a line."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING

from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, BadTensorStrides, NullPointer, arg
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    ROW_ALIGNMENT,
    Argument,
    check_array,
    check_broadcast,
    check_strides,
    is_contiguous,
    shown,
    shown_shape,
)
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.rules import named_by_caller, sizes_of_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.rules import PackedTokens, RuleOfCall
    from flashgen.operators.scores import Score

DTYPES = ("fp16", "bf16", "fp32")
# The CPU path alone computes it, so that gradients can be checked by differences.
DOUBLE = "float64"
MAX_HEAD_DIM = 256
MAX_SEQLEN = UNBOUNDED - 4096
# Smallest normal fp32: a scale of zero would turn the -inf of a masked score into NaN.
MIN_SCALE = 2.0**-126
# Times log2(e), by which kernels multiply scores for exp2, it is finite in fp32 as well.
MAX_SCALE = 2.0e38
# A dense mask: what is not zero hides its key.
MASK = Argument(
    "mask",
    "input",
    "batch num_heads_q seqlen_q seqlen_kv",
    dtypes=("bool", "uint8"),
    layout="broadcast",
    alignment=1,
    optional=True,
)


def check_dtypes(views: dict[str, ArrayView], double: bool = True) -> str:
    """The dtype of q, which all of the arrays must have; ``double`` is whether it may be DOUBLE in host
    memory. Raises BadTensorDtype.
    """
    dtype = views["q"].dtype
    if dtype == "e4m3":
        raise BadTensorDtype(
            f"{arg('q')} has dtype e4m3; attention of codes takes q_scale, k_scale and v_scale, or "
            "dtype='e4m3' where a code is the number itself. It has no gradients and no weights"
        )
    if dtype not in DTYPES and not (dtype == DOUBLE and double and views["q"].device is None):
        supported = ", ".join(DTYPES) + (f", and {DOUBLE} in host memory" if double else "")
        raise BadTensorDtype(f"{arg('q')} has dtype {dtype}; supported are {supported}")
    for name, view in views.items():
        if view.dtype != dtype:
            raise BadTensorDtype(
                f"{arg(name)} has dtype {view.dtype} but {arg('q')} has {dtype}; they must be the same"
            )
    return dtype


def check_extents(sizes: Mapping[str, int], dtype: str) -> None:
    """That there are kernels for head dims, heads and lengths such as these. Raises BadTensorShape."""
    for name in ("head_dim", "head_dim_v"):
        check_head_dim(name, sizes[name], dtype)
    check_heads_and_lengths(sizes)


def check_heads_and_lengths(sizes: Mapping[str, int]) -> None:
    """That heads form groups, and no sequence is too long. Raises BadTensorShape."""
    heads_q, heads_kv = sizes["num_heads_q"], sizes["num_heads_kv"]
    if heads_kv < 1 or heads_q < 1 or heads_q % heads_kv:
        raise BadTensorShape(
            f"{arg('q')} has {heads_q} heads, {arg('k')} has {heads_kv}; the heads of {arg('q')} must be a "
            f"positive multiple of the heads of {arg('k')}"
        )
    for name, symbol in (("q", "seqlen_q"), ("k", "seqlen_kv")):
        seqlen = sizes[symbol]
        if seqlen > MAX_SEQLEN:
            raise BadTensorShape(
                f"{arg(name)} has sequence length {seqlen}; the longest supported is {MAX_SEQLEN}"
            )


def check_head_dim(name: str, width: int, dtype: str) -> None:
    """That rows are a whole number of 16 bytes, and not too long. Raises BadTensorShape."""
    step = ROW_ALIGNMENT // DTYPE_BYTES[dtype]
    if not 1 <= width <= MAX_HEAD_DIM or width % step:
        raise BadTensorShape(
            f"{arg(name)} is {width}; {dtype} needs a multiple of {step} from {step} to {MAX_HEAD_DIM}"
        )


def check_rank(q: Sequence[int]) -> None:
    """That the shape of q has as many dimensions as it may have. Raises BadTensorShape."""
    if len(q) not in (3, 4):
        raise BadTensorShape(
            f"{arg('q')} has shape {tuple(q)}; expected (batch, seqlen_q, num_heads_q, head_dim), or that "
            "without batch"
        )


def check_rows(name: str, view: ArrayView, dimensions: str) -> tuple[int, ...]:
    """The extents of an array of rows, the last dimension, with a batch: where no other array gives them.
    Raises BadTensorDtype or BadTensorShape.
    """
    if view.dtype not in DTYPES:
        raise BadTensorDtype(f"{arg(name)} has dtype {view.dtype}; supported are {', '.join(DTYPES)}")
    if len(view.shape) not in (3, 4):
        raise BadTensorShape(
            f"{arg(name)} has shape {view.shape}; expected (batch, {dimensions}), or that without batch"
        )
    extents = view.shape if len(view.shape) == 4 else (1, *view.shape)
    _, seqlen, heads, _ = extents
    if heads < 1 or seqlen > MAX_SEQLEN:
        raise BadTensorShape(
            f"{arg(name)} has shape {view.shape}; it needs a head, and sequence lengths are at most "
            f"{MAX_SEQLEN}"
        )
    return extents


def sizes_of(q: ArrayView, k: ArrayView, v: ArrayView) -> dict[str, int]:
    """The sizes of a call without lengths. Raises BadTensorShape where q, k and v do not agree on them."""
    check_rank(q.shape)
    for name, view in (("k", k), ("v", v)):
        if len(view.shape) != len(q.shape):
            raise BadTensorShape(
                f"{arg(name)} has shape {view.shape} but {arg('q')} has {q.shape}; expected as many "
                "dimensions"
            )
    batch, seqlen_q = q.shape[:-2] if len(q.shape) == 4 else (1, q.shape[0])
    batch_kv, seqlen_kv = k.shape[:-2] if len(k.shape) == 4 else (1, k.shape[0])
    sizes = sizes_of_rows(q, k, v)
    if batch_kv != batch:
        raise BadTensorShape(
            f"{arg('k')} has batch {batch_kv} but {arg('q')} has {batch}; they must be the same"
        )
    return {"batch": batch, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv} | sizes


def sizes_of_rows(q: ArrayView, k: ArrayView, v: ArrayView) -> dict[str, int]:
    """The heads and head dims of a call. Raises BadTensorShape where k and v do not have the same rows, or k
    not as long ones as q.
    """
    if k.shape[:-1] != v.shape[:-1]:
        raise BadTensorShape(
            f"{arg('v')} has shape {v.shape} but {arg('k')} has {k.shape}; all but the last dimension must "
            "be the same"
        )
    if k.shape[-1] != q.shape[-1]:
        raise BadTensorShape(
            f"{arg('k')} has head_dim {k.shape[-1]} but {arg('q')} has {q.shape[-1]}; they must be the same"
        )
    heads = {"num_heads_q": q.shape[-2], "num_heads_kv": k.shape[-2]}
    return heads | {"head_dim": q.shape[-1], "head_dim_v": v.shape[-1]}


def check_out(out: ArrayView | None, q: ArrayView, v: ArrayView) -> None:
    """That an ``out`` has the shape of the result. Raises BadTensorShape."""
    expected = (*q.shape[:-1], v.shape[-1])
    if out is not None and out.shape != expected:
        raise BadTensorShape(
            f"{arg('out')} has shape {out.shape}; expected the shape of {arg('q')} with the last dimension "
            f"of {arg('v')}, {expected}"
        )


def check_beside_q(
    argument: Argument, view: ArrayView, sizes: Mapping[str, int], element: str, missing: int
) -> None:
    """That an array belongs to q, k and v of these sizes, and its layout fits; ``missing`` is how many
    dimensions the caller leaves out. Raises BadTensorDtype, BadTensorShape or BadTensorStrides.
    """
    name, allowed = argument.name, argument.dtypes or (element,)
    if view.dtype not in allowed:
        why = "" if argument.dtypes else ", that of q"
        raise BadTensorDtype(f"{arg(name)} has dtype {view.dtype}; expected {' or '.join(allowed)}{why}")
    expected = argument.extents(sizes)[missing:]
    if argument.layout == "broadcast":
        check_broadcast(argument, view, expected)
        return
    if view.shape != expected:
        symbols = shown_shape(argument.symbols[missing:])
        raise BadTensorShape(
            f"{arg(name)} has shape {view.shape}; these {arg('q')}, {arg('k')} and {arg('v')} need {symbols} "
            f"= {expected}"
        )
    check_strides(argument, view, DTYPE_BYTES[view.dtype])


def check_whole(argument: Argument, view: ArrayView, shape: tuple[int, ...]) -> None:
    """That an output has this shape and is contiguous. Raises BadTensorDtype, BadTensorShape or
    BadTensorStrides.
    """
    if view.dtype not in argument.dtypes:
        raise BadTensorDtype(
            f"{arg(argument.name)} has dtype {view.dtype}; expected {' or '.join(argument.dtypes)}"
        )
    if tuple(view.shape) != shape:
        raise BadTensorShape(f"{arg(argument.name)} has shape {view.shape}; expected {shape}")
    if not is_contiguous(view):
        raise BadTensorStrides(
            f"{arg(argument.name)} has strides {view.strides} (in elements); it must be contiguous"
        )


def scale_of(softmax_scale: float | None, head_dim: int) -> float:
    """The scale of scores that a caller means; 0 is the smallest there is. Raises BadParam."""
    if softmax_scale is None:
        return head_dim**-0.5
    if not isinstance(softmax_scale, numbers.Real) or isinstance(softmax_scale, bool):
        raise BadParam(f"{arg('softmax_scale')} is {shown(softmax_scale)}; expected a number or None")
    try:
        scale = float(softmax_scale)
    except OverflowError:  # an integer beyond fp64
        scale = math.inf
    # The running maximum is taken before scaling, so the scale must keep the order of the scores.
    if not 0.0 <= scale <= MAX_SCALE:
        value = shown(softmax_scale) if math.isinf(scale) else scale
        raise BadParam(
            f"{arg('softmax_scale')} is {value}; it must be at most {MAX_SCALE:g}, as kernels scale in fp32, "
            f"and not negative ({arg('the negated q', 'negate q')} instead)"
        )
    return max(scale, MIN_SCALE)


def check_mask(mask: ArrayView, sizes: Mapping[str, int], instead: str = "") -> None:
    """That a dense mask has its dtype and broadcasts to all scores; ``instead`` is what does for one that
    hides the ends of sequences. Raises BadTensorDtype, BadTensorShape or BadTensorStrides.
    """
    instead = instead or f"pass {arg('kv_lengths')}=, how many keys each has, instead"
    if mask.dtype not in MASK.dtypes:
        raise BadTensorDtype(
            f"{arg('mask')} has dtype {mask.dtype}; expected {' or '.join(MASK.dtypes)}, nonzero where a key "
            f"is hidden. What is added to scores goes in as score='bias', params={{'bias': ...}}"
        )
    try:
        check_broadcast(MASK, mask, MASK.extents(sizes))
    except BadTensorShape as error:
        if mask.shape != (sizes["batch"], sizes["seqlen_kv"]):
            raise
        raise BadTensorShape(
            f"{error.message}. If it hides the keys after the end of each sequence, {instead}: keys "
            f"after them are not read. Any other padding goes in as {arg('mask')}[:, None, None, :]"
        ) from None


def score_views(score: Score | None, arrays: Sequence[ArrayView | None]) -> dict[str, ArrayView]:
    """The arrays of a score modification by their names. Raises NullPointer for one that is None."""
    if score is None:
        return {}
    shapes = {param.name: param.symbols for param in score.arrays}
    return _views_by_name(f"the score {score.title}", shapes, arrays)


def check_score_arrays(
    score: Score | None, views: Mapping[str, ArrayView], sizes: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """That each array of a score modification fits, and the sizes of the symbols that are its own. Raises
    BadTensorShape, BadTensorDtype or BadTensorStrides.
    """
    return _check_tables([param.argument() for param in score.arrays] if score else (), views, sizes)


def rule_views(rule: RuleOfCall | None, arrays: Sequence[ArrayView | None]) -> dict[str, ArrayView]:
    """The arrays of a mask by a line by the names of arguments. Raises NullPointer for one that is None."""
    if rule is None:
        return {}
    shapes = {param.argument_name: param.dimensions for param in rule.rule.arrays}
    return _views_by_name(f"the mask {rule.rule.title}", shapes, arrays)


def _views_by_name(
    what: str, shapes: Mapping[str, Sequence[str]], arrays: Sequence[ArrayView | None]
) -> dict[str, ArrayView]:
    for (name, shape), view in zip(shapes.items(), arrays, strict=True):
        if view is None:
            raise NullPointer(f"{arg(name)} is None; {what} needs an array {shown_shape(shape)}")
    return dict(zip(shapes, arrays, strict=True))


def check_rule_arrays(
    rule: RuleOfCall | None,
    views: Mapping[str, ArrayView],
    sizes: Mapping[str, int],
    packed: PackedTokens,
) -> tuple[tuple[str, int], ...]:
    """That each array of a mask by a line fits, and the sizes of the symbols that are its own. Raises as
    `check_score_arrays`.
    """
    if rule is None:
        return ()
    of_tokens = sizes_of_tokens(sizes, packed)
    arguments = [param.argument() for param in rule.rule.arrays]
    named = [x._replace(shape=named_by_caller(x.shape, packed)) for x in arguments]
    callers = {**sizes, "tokens_of_q": of_tokens["tokens_q"], "tokens_of_k": of_tokens["tokens_kv"]}
    own_sizes = _check_tables(named, views, callers)
    return (*of_tokens.items(), *own_sizes)


def _check_tables(
    arguments: Sequence[Argument], views: Mapping[str, ArrayView], sizes: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """That the arrays of parameters fit, and the sizes of the symbols that are their own."""
    own_sizes: dict[str, int] = {}
    for argument in arguments:
        view = views[argument.name]
        missing = len(argument.symbols) - len(view.shape)
        for place_, symbol in enumerate(argument.symbols):
            if symbol not in sizes:
                own_sizes[symbol] = view.shape[place_ - missing] if place_ - missing >= 0 else 1
                if own_sizes[symbol] < 1:
                    raise BadTensorShape(f"{arg(argument.name)} has shape {view.shape}; it must not be empty")
        check_array(argument, view, {**sizes, **own_sizes}, "")
    return tuple(own_sizes.items())
