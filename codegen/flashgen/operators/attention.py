"""The operator ``attention``: its arguments, its contract, and the problems of its calls.

The contract is checked here and nowhere else. `normalise` makes the Problem of a call from array views.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    BadTensorShape,
    NullPointer,
)
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    ROW_ALIGNMENT,
    Argument,
    check_array,
    check_broadcast,
    check_devices,
    check_strides,
    flag,
    place,
)
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.operator import Axis, Number, Operator, Problem, Value
from flashgen.operators.splits import AUTO, splits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.scores import Score
    from flashgen.operators.splits import Splits

DTYPES = ("fp16", "bf16", "fp32")
MASK_TYPES = ("none", "dense", "causal_top_left", "causal_bottom_right")
# What a kernel implements; see `AttentionProblem`.
KERNEL_MASKS = ("none", "causal", "local", "dense")
MAX_HEAD_DIM = 256
MAX_SEQLEN = UNBOUNDED - 4096
# Smallest normal fp32: a scale of zero would turn the -inf of a masked score into NaN.
MIN_SCALE = 2.0**-126
MAX_SCALE = 3.0e38
_LENGTHS_INSTEAD = "pass kv_lengths=, how many keys each has, instead"

ARGUMENTS = (
    Argument("q", "input", "batch seqlen_q num_heads_q head_dim"),
    Argument("k", "input", "batch seqlen_kv num_heads_kv head_dim"),
    Argument("v", "input", "batch seqlen_kv num_heads_kv head_dim_v"),
    Argument(
        "mask",
        "input",
        "batch num_heads_q seqlen_q seqlen_kv",
        dtypes=("bool", "uint8"),
        layout="broadcast",
        alignment=1,
        optional=True,
    ),
    Argument("out", "output", "batch seqlen_q num_heads_q head_dim_v"),
    Argument(
        "lse",
        "output",
        "batch num_heads_q seqlen_q",
        dtypes=("fp32",),
        layout="contiguous",
        alignment=4,
        optional=True,
    ),
)
OPTIONS = ("causal", "mask_type", "window_size", "return_lse", "splits", "score")
SCALARS = ("softmax_scale",)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem(Problem):
    """Shapes, strides and options of one call of attention.

    Key j is visible to query i iff ``p - window_left <= j <= p + window_right``, where
    ``p = i + diagonal_offset``, and the dense mask, if any, is zero there; a side that is ``UNBOUNDED`` hides
    nothing. ``mask_type`` is what a kernel must implement: ``none``, ``causal`` (bounded on the right only,
    ``window_right`` 0), ``local``, or ``dense``, whose keys may be bounded too. ``score`` is the score
    modification, if any; ``score_scalars`` are its numbers, NaN until a call gives them, and ``score_sizes``
    the sizes of symbols that are its own. ``splits`` is what the call says of split-KV.
    """

    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    mask_type: str
    diagonal_offset: int
    window_left: int
    window_right: int
    softmax_scale: float
    splits: Splits = AUTO
    score: Score | None = None
    score_scalars: tuple[float, ...] = ()
    score_sizes: tuple[tuple[str, int], ...] = ()

    @property
    def operator(self) -> Operator:
        return operator_for(self.score)

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "batch": self.batch,
            "seqlen_q": self.seqlen_q,
            "seqlen_kv": self.seqlen_kv,
            "num_heads_q": self.num_heads_q,
            "num_heads_kv": self.num_heads_kv,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            **dict(self.score_sizes),
        }

    @property
    def return_lse(self) -> bool:
        return self.strides[self.operator.position("lse")] is not None

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of ``out``: that of ``q``, with the head dim of ``v``."""
        return self.shape(self.operator.position("out"))

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp: (batch, num_heads_q, seqlen_q), without batch if ``q`` has none."""
        return self.shape(self.operator.position("lse"))

    @property
    def empty(self) -> bool:
        return self.batch * self.seqlen_q == 0

    def wanted(self) -> str:
        grouping = "mha" if self.group_size == 1 else "gqa or packed"
        return (
            f"head_dim {self.head_dim}, head_dim_v {self.head_dim_v}, dtype {self.dtype}, "
            f"mask_type {self.mask_type}, gqa {grouping}"
            + ("" if self.score is None else f", score {self.score.name}")
            + ("" if self.splits == AUTO else f", splits {self.splits}")
        )

    def standard(self) -> AttentionProblem:
        return dataclasses.replace(self, batch=1)

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """In packed GQA ``query_rows`` counts a query once for each head of its group, and ``heads`` are the
        kv heads.
        """
        packed = axes["gqa"] == "packed"
        return {
            "query_rows": self.seqlen_q * (self.group_size if packed else 1),
            "key_rows": self.seqlen_kv,
            "heads": self.num_heads_kv if packed else self.num_heads_q,
            "kv_heads": self.num_heads_kv,
            "batch": self.batch,
        }

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        return {
            "batch_size": self.batch,
            "group_size": self.group_size,
            "diagonal_offset": self.diagonal_offset,
            "window_left": self.window_left,
            "window_right": self.window_right,
        } | self.scalar_values()

    def scalar_values(self) -> dict[str, Number]:
        """``scale_log2`` is what a kernel's scores are multiplied by for exp2: the softmax scale, or what a
        score modification leaves to be multiplied, times log2(e).
        """
        values: dict[str, Number] = {"softmax_scale": self.softmax_scale}
        if self.score is None:
            return values | {"scale_log2": self.softmax_scale * math.log2(math.e)}
        values |= self._scalars_of_score()
        values |= self.score.constants(values, self.dtype, self.operator.differentiates)
        # As with softmax_scale: a factor of 0 would turn the -inf of a masked score into NaN.
        return values | {"scale_log2": max(values["scale_log2"], MIN_SCALE)}

    def with_scalars(self, given: Sequence[Any]) -> AttentionProblem:
        softmax_scale, *rest = given
        if softmax_scale is None and self.score is None:
            return self
        scale = self.softmax_scale if softmax_scale is None else scale_of(softmax_scale, self.head_dim)
        called = dataclasses.replace(self, softmax_scale=scale, score_scalars=self._score_scalars(rest))
        if called.score is not None:
            scalars = called._scalars_of_score() | {"softmax_scale": scale}
            called.score.check(scalars, self.dtype, self.operator.differentiates)
        return called

    def _score_scalars(self, given: Sequence[Any]) -> tuple[float, ...]:
        """The numbers of the score modification, where ``given`` has None those of this problem."""
        found = []
        for param, value, known in zip(
            self.score.scalars if self.score else (), given, self.score_scalars, strict=True
        ):
            if value is None and math.isnan(known):
                raise BadParam(f"{param.name} is None; the score {self.score.name} needs a number")
            found.append(known if value is None else self.score.number(param, value))
        return tuple(found)

    def _scalars_of_score(self) -> dict[str, Number]:
        """By name; an integer that no call has given yet is 0, since a struct has no other word for it."""
        return {
            param.name: 0 if param.type == "i32" and math.isnan(value) else value
            for param, value in zip(self.score.scalars, self.score_scalars, strict=True)
        }


def normalise(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    *,
    mask: ArrayView | None = None,
    out: ArrayView | None = None,
    causal: bool = False,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    return_lse: bool = False,
    splits: Splits = AUTO,
    score: Score | None = None,
    score_arrays: Sequence[ArrayView | None] = (),
    score_scalars: Sequence[Any] = (),
) -> AttentionProblem:
    """The Problem of a call, or the error of the contract that it breaks. Arguments as in ``attention``;
    ``score_arrays`` and ``score_scalars`` are in the order of the modification's.

    Raises BadTensorShape, BadTensorDtype, BadTensorStrides, DeviceTypeNotSupported, NullPointer or BadParam.
    """
    causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    splits = splits_of(splits)
    views = {"q": q, "k": k, "v": v}
    if out is not None:
        views["out"] = out
    own = score_views(score, score_arrays)
    check_devices((views if mask is None else views | {"mask": mask}) | own)
    dtype = check_dtypes(views)
    sizes = _check_shapes(q, k, v, out, dtype)
    for argument in ARGUMENTS:
        if argument.name in views:
            check_strides(argument, views[argument.name], DTYPE_BYTES[dtype])
    seqlen_q, seqlen_kv = sizes["seqlen_q"], sizes["seqlen_kv"]
    kind, offset, left, right = mask_semantics(
        causal, mask_type, window_size, mask is not None, seqlen_q, seqlen_kv
    )
    kind, offset, left, right = simplify(kind, seqlen_q, seqlen_kv, offset, left, right)
    if mask is not None:
        check_mask(mask, sizes)
    given = views | {"mask": mask} | own
    absent = {"mask"} if mask is None else set()
    absent |= set() if return_lse else {"lse"}
    score_sizes = check_score_arrays(score, own, sizes)
    problem = AttentionProblem(
        **sizes,
        dtype=dtype,
        mask_type=kind,
        diagonal_offset=offset,
        window_left=left,
        window_right=right,
        softmax_scale=scale_of(softmax_scale, sizes["head_dim"]),
        strides=tuple(
            None
            if argument.name in absent
            else place(argument, given.get(argument.name), sizes | dict(score_sizes), dtype).strides
            for argument in operator_for(score).arguments
        ),
        batched=len(q.shape) == 4,
        device=q.device,
        splits=splits,
        score=score,
        score_scalars=tuple(math.nan for _ in score.scalars) if score else (),
        score_sizes=score_sizes,
    )
    if any(value is not None for value in score_scalars):
        return problem.with_scalars((None, *score_scalars))
    return problem


def simplify(
    mask_type: str, seqlen_q: int, seqlen_kv: int, diagonal_offset: int, left: int, right: int
) -> tuple[str, int, int, int]:
    """The cheapest (mask_type, diagonal_offset, window_left, window_right) that hides exactly the same keys.

    A side of the band that even the row nearest to it does not reach is unbounded; a band without a left side
    is causal, with its right side folded into the offset; one without sides is no mask. So a causal call with
    one query, or a window longer than the keys, takes the kernel without masks. A dense mask stays, and its
    band is simplified alike.
    """
    if seqlen_q == 0 or seqlen_kv == 0 or right >= UNBOUNDED or diagonal_offset + right >= seqlen_kv - 1:
        right = UNBOUNDED
    if seqlen_q == 0 or seqlen_kv == 0 or left >= UNBOUNDED or seqlen_q - 1 + diagonal_offset - left <= 0:
        left = UNBOUNDED
    if left < UNBOUNDED:
        kind, offset = "local", diagonal_offset
    elif right < UNBOUNDED:
        kind, offset, right = "causal", diagonal_offset + right, 0
    else:
        kind, offset = "none", 0
    return "dense" if mask_type == "dense" else kind, offset, left, right


def check_dtypes(views: dict[str, ArrayView]) -> str:
    dtype = views["q"].dtype
    if dtype not in DTYPES:
        raise BadTensorDtype(f"q has dtype {dtype}; supported are {', '.join(DTYPES)}")
    for name, view in views.items():
        if view.dtype != dtype:
            raise BadTensorDtype(f"{name} has dtype {view.dtype} but q has {dtype}; they must be the same")
    return dtype


def _check_shapes(
    q: ArrayView, k: ArrayView, v: ArrayView, out: ArrayView | None, dtype: str
) -> dict[str, int]:
    if len(q.shape) not in (3, 4):
        raise BadTensorShape(
            f"q has shape {q.shape}; expected (batch, seqlen_q, num_heads_q, head_dim), or that without batch"
        )
    for name, view in (("k", k), ("v", v)):
        if len(view.shape) != len(q.shape):
            raise BadTensorShape(
                f"{name} has shape {view.shape} but q has {q.shape}; expected as many dimensions"
            )
    batch, seqlen_q, heads_q, head_dim = _batched(q.shape)
    batch_kv, seqlen_kv, heads_kv, head_dim_kv = _batched(k.shape)
    if k.shape[:-1] != v.shape[:-1]:
        raise BadTensorShape(
            f"v has shape {v.shape} but k has {k.shape}; all but the last dimension must be the same"
        )
    if batch_kv != batch:
        raise BadTensorShape(f"k has batch {batch_kv} but q has {batch}; they must be the same")
    if head_dim_kv != head_dim:
        raise BadTensorShape(f"k has head_dim {head_dim_kv} but q has {head_dim}; they must be the same")
    sizes = {
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_kv": seqlen_kv,
        "num_heads_q": heads_q,
        "num_heads_kv": heads_kv,
        "head_dim": head_dim,
        "head_dim_v": v.shape[-1],
    }
    check_extents(sizes, dtype)
    check_out(out, q, v)
    return sizes


def check_out(out: ArrayView | None, q: ArrayView, v: ArrayView) -> None:
    """That an ``out`` has the shape of the result. Raises BadTensorShape."""
    expected = (*q.shape[:-1], v.shape[-1])
    if out is not None and out.shape != expected:
        raise BadTensorShape(
            f"out has shape {out.shape}; expected that of q with the last dimension of v, {expected}"
        )


def check_extents(sizes: Mapping[str, int], dtype: str) -> None:
    """That there are kernels for head dims, heads and lengths such as these. Raises BadTensorShape."""
    for name in ("head_dim", "head_dim_v"):
        check_head_dim(name, sizes[name], dtype)
    heads_q, heads_kv = sizes["num_heads_q"], sizes["num_heads_kv"]
    if heads_kv < 1 or heads_q < 1 or heads_q % heads_kv:
        raise BadTensorShape(
            f"q has {heads_q} heads, k has {heads_kv}; those of q must be a positive multiple of those of k"
        )
    for name, symbol in (("q", "seqlen_q"), ("k", "seqlen_kv")):
        seqlen = sizes[symbol]
        if seqlen > MAX_SEQLEN:
            raise BadTensorShape(
                f"{name} has sequence length {seqlen}; the longest supported is {MAX_SEQLEN}"
            )


def check_head_dim(name: str, width: int, dtype: str) -> None:
    """That rows are a whole number of 16 bytes, and not too long. Raises BadTensorShape."""
    step = ROW_ALIGNMENT // DTYPE_BYTES[dtype]
    if not 1 <= width <= MAX_HEAD_DIM or width % step:
        raise BadTensorShape(
            f"{name} is {width}; {dtype} needs a multiple of {step} from {step} to {MAX_HEAD_DIM}"
        )


def mask_semantics(
    causal: bool,
    mask_type: int | str | None,
    window_size: tuple[int, int],
    has_mask: bool,
    seqlen_q: int,
    seqlen_kv: int,
) -> tuple[str, int, int, int]:
    name = mask_type_name(mask_type)
    if name == "dense" and not has_mask:
        raise NullPointer("mask_type 'dense' needs mask, which is None")
    if causal:
        if name not in (None, "dense", "causal_bottom_right"):
            raise BadParam(f"causal=True means mask_type 'causal_bottom_right', but mask_type is {name!r}")
        name = "causal_bottom_right"
    if name is None:
        name = "dense" if has_mask else "none"
    if has_mask and name == "none":
        raise BadParam("a mask was given, but mask_type 'none' takes none; leave mask_type out")
    kind = "dense" if has_mask else "local"
    left, right = window_of(window_size)
    windowed = (left, right) != (-1, -1)
    if windowed and name == "causal_top_left":
        raise BadParam(f"window_size is {(left, right)}, but mask_type {name!r} takes no window")
    if name == "causal_bottom_right":
        if right > 0:
            raise BadParam(
                f"window_size is {(left, right)}, but causal hides every later key: right must be 0 or -1"
            )
        right = 0
    elif name == "causal_top_left":
        return kind, 0, UNBOUNDED, 0
    left = UNBOUNDED if left < 0 else min(left, UNBOUNDED)
    right = UNBOUNDED if right < 0 else min(right, UNBOUNDED)
    return kind, seqlen_kv - seqlen_q, left, right


def sees_no_later_key(causal: bool, mask_type: int | str | None, window_size: Any) -> bool:
    """Whether these options, which may be wrong yet, say that no query sees a key past its own position."""
    if flag("causal", causal):
        return True
    if isinstance(mask_type, str | numbers.Integral) and mask_type in (3, "causal", "causal_bottom_right"):
        return True
    return isinstance(window_size, (tuple, list)) and len(window_size) == 2 and window_size[1] == 0


def mask_type_name(mask_type: int | str | None) -> str | None:
    """The one of ``MASK_TYPES`` that a caller means, or None for None. Raises BadParam."""
    if mask_type is None or (isinstance(mask_type, str) and mask_type in MASK_TYPES):
        return mask_type
    if isinstance(mask_type, str) and mask_type == "causal":
        return "causal_bottom_right"
    try:
        return MASK_TYPES[range(len(MASK_TYPES)).index(operator.index(mask_type))]
    except (TypeError, ValueError):
        allowed = ", ".join(f"{number} {name!r}" for number, name in enumerate(MASK_TYPES))
        raise BadParam(
            f"mask_type is {mask_type!r}; allowed are {allowed}, and 'causal' for 3; a window is window_size"
        ) from None


def window_of(window_size: Any) -> tuple[int, int]:
    """Both sides of a caller's window; -1 is no bound. Raises BadParam."""
    try:
        left, right = (operator.index(side) for side in window_size)
    except (TypeError, ValueError):
        raise BadParam(
            f"window_size is {window_size!r}; expected two integers (left, right), -1 for no bound"
        ) from None
    if left < -1 or right < -1:
        raise BadParam(f"window_size is {(left, right)}; each side must be -1 (no bound), 0 or more")
    return left, right


def scale_of(softmax_scale: float | None, head_dim: int) -> float:
    if softmax_scale is None:
        return head_dim**-0.5
    if not isinstance(softmax_scale, numbers.Real):
        raise BadParam(f"softmax_scale is {softmax_scale!r}; expected a number or None")
    scale = float(softmax_scale)
    # The running maximum is taken before scaling, so the scale must keep the order of the scores.
    if not 0.0 <= scale <= MAX_SCALE:
        raise BadParam(
            f"softmax_scale is {scale}; it must be finite in fp32 and not negative (negate q instead)"
        )
    return max(scale, MIN_SCALE)


def check_mask(mask: ArrayView, sizes: Mapping[str, int], instead: str = _LENGTHS_INSTEAD) -> None:
    """That a dense mask has its dtype and broadcasts to all scores; ``instead`` is what does for one that
    hides the ends of sequences. Raises BadTensorDtype, BadTensorShape or BadTensorStrides.
    """
    argument = ARGUMENTS[_MASK]
    if mask.dtype not in argument.dtypes:
        raise BadTensorDtype(
            f"mask has dtype {mask.dtype}; expected {' or '.join(argument.dtypes)}, "
            "nonzero where a key is hidden. What is added to scores goes in as score='bias', "
            "params={'bias': ...}"
        )
    try:
        check_broadcast(argument, mask, argument.extents(sizes))
    except BadTensorShape as error:
        if mask.shape != (sizes["batch"], sizes["seqlen_kv"]):
            raise
        raise BadTensorShape(
            f"{error}. Where it hides what lies behind the end of each sequence, {instead}: keys behind them "
            "are not read. Any other padding goes in as mask[:, None, None, :]"
        ) from None


def score_views(score: Score | None, given: Sequence[ArrayView | None]) -> dict[str, ArrayView]:
    """The arrays of a score modification by their names."""
    if score is None:
        return {}
    views = {}
    for param, view in zip(score.arrays, given, strict=True):
        if view is None:
            raise NullPointer(
                f"{param.name} is None; the score {score.name} needs an array ({', '.join(param.symbols)})"
            )
        views[param.name] = view
    return views


def check_score_arrays(
    score: Score | None, views: Mapping[str, ArrayView], sizes: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """That each array of a score modification fits, and the sizes of the symbols that are its own."""
    found: dict[str, int] = {}
    for param in score.arrays if score else ():
        argument, view = param.argument(), views[param.name]
        missing = len(param.symbols) - len(view.shape)
        for place_, symbol in enumerate(param.symbols):
            if symbol not in sizes:
                found[symbol] = view.shape[place_ - missing] if place_ - missing >= 0 else 1
                if found[symbol] < 1:
                    raise BadTensorShape(f"{param.name} has shape {view.shape}; it must not be empty")
        check_array(argument, view, {**sizes, **found}, "")
    return tuple(found.items())


def _batched(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if len(shape) == 4 else (1, *shape)


def by_name(
    normalise: Callable[..., Problem],
    arguments: Sequence[Argument],
    options: Sequence[str],
    without: Sequence[str] = (),
) -> Callable[..., Problem]:
    """`Operator.normalise` by a function that takes arrays, options and ``softmax_scale`` by their names, and
    what belongs to a score modification in ``score_arrays`` and ``score_scalars``. The
    arguments ``without`` are not passed: an LSE is there where return_lse says so.
    """

    def normalised(
        views: Sequence[ArrayView | None], given: Sequence[Any], scalars: Sequence[Any]
    ) -> Problem:
        softmax_scale, *score_scalars = scalars
        return normalise(
            **{
                argument.name: view
                for argument, view in zip(arguments, views, strict=False)
                if argument.name not in without
            },
            softmax_scale=softmax_scale,
            score_arrays=views[len(arguments) :],
            score_scalars=score_scalars,
            **dict(zip(options, given, strict=True)),
        )

    return normalised


def _serves_grouping(problem: AttentionProblem, gqa: Value) -> bool:
    return (gqa == "mha") == (problem.group_size == 1)


ATTENTION = Operator(
    name="attention",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=SCALARS,
    axes={
        "head_dim": Axis(lambda problem, value: value >= problem.head_dim, size=True),
        "head_dim_v": Axis(
            lambda problem, value: value >= problem.head_dim_v, size=True, default_from="head_dim"
        ),
        "dtype": Axis(lambda problem, value: value == problem.dtype, DTYPES),
        "mask_type": Axis(lambda problem, value: value == problem.mask_type, KERNEL_MASKS, default="none"),
        "gqa": Axis(_serves_grouping, ("mha", "gqa", "packed"), default="mha"),
    },
    grid_dimensions=("query_rows", "key_rows", "heads", "kv_heads", "batch"),
    normalise=by_name(normalise, ARGUMENTS, OPTIONS, without=("lse",)),
)


@functools.lru_cache(maxsize=64)
def modified(operator: Operator, score: Score) -> Operator:
    """``operator`` with a score modification, whose arrays are arguments behind the others."""
    return dataclasses.replace(
        operator,
        arguments=(*operator.arguments, *(param.argument() for param in score.arrays)),
        scalars=(*operator.scalars, *(param.name for param in score.scalars)),
    )


def operator_for(score: Score | None) -> Operator:
    """Attention with that score modification, if any."""
    return ATTENTION if score is None else modified(ATTENTION, score)


_MASK = ATTENTION.position("mask")
