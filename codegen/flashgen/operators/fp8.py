"""The operator ``attention_fp8``: attention of e4m3 codes of q, k and v.

A number is its code times a scale. With the scales s_q, s_k and s_v of a head, the scores are softmax_scale
s_q s_k q k^T of the codes, and the result is s_v times the softmax of them times the codes of v. A score
modification gets the scores, as in ``attention``. The result has 16 bits; or it has codes too, which times
s_out are the result.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, BadTensorStrides, arg
from flashgen.operators import attention, blocklists, operator_for
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    ROW_ALIGNMENT,
    WHOLE_FP32,
    Argument,
    ArrayView,
    check_devices,
    check_strides,
    dtype_name,
    normal_strides,
    place,
    shown,
    view_of_shape,
)
from flashgen.operators.attention import ATTENTION, OF_PLAIN, SCALARS, AttentionProblem
from flashgen.operators.kvcodes import E4M3
from flashgen.operators.lengths import ARGUMENTS as LENGTH_ARGUMENTS
from flashgen.operators.lengths import BOUNDS
from flashgen.operators.operator import Axis, Number, Operator, Value, by_name
from flashgen.operators.sequences import arrays_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from flashgen.operators.arguments import ArrayLayout, Strides
    from flashgen.operators.sequences import Sequence

CODES = E4M3
OUT_DTYPES = ("bf16", "fp16", CODES)
# How P V is summed: each KV block in the tensor core, and the blocks in fp32; or all keys of a row in the
# tensor core, whose sums of e4m3 products have 13 bits of fraction.
ACCUMULATE = ("promoted", "fast")
SCALES = ("q_scale", "k_scale", "v_scale")
ALL_SCALES = (*SCALES, "out_scale")

# The dimensions of v in memory where its tokens are contiguous.
_V_BY_COLUMNS = "batch head_dim_v num_heads_kv seqlen_kv"
_LENGTHS = tuple(argument.name for argument in LENGTH_ARGUMENTS)
_FORWARD = {x.name: x._replace(differentiable=False) for x in ATTENTION.arguments}
ARGUMENTS = (
    *(_FORWARD[name] for name in ("q", "k", "v", "mask")),
    _FORWARD["out"]._replace(dtypes=OUT_DTYPES[::-1]),
    _FORWARD["lse"],
    *(
        Argument(name, "input", f"{name}_batch {name}_heads", optional=True, **WHOLE_FP32)
        for name in ALL_SCALES
    ),
    *(_FORWARD[name] for name in ("sinks", *_LENGTHS, *blocklists.NAMES)),
)
OPTIONS = (
    *("causal", "mask_type", "window_size", "block_size", "return_lse", *BOUNDS),
    *("dtype", "out_dtype", "accumulate", "sm_margin", "score"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Problem(AttentionProblem):
    """Shapes, strides and options of one call. ``dtype`` is "e4m3", ``out_dtype`` the dtype of the result.
    ``scale_sizes`` are the sizes of the symbols of the scales: 1 where all batch entries or heads share one.
    ``v_by_columns`` is whether tokens of v are contiguous: its rows in memory are columns.
    """

    out_dtype: str = OUT_DTYPES[0]
    accumulate: str = ACCUMULATE[0]
    scale_sizes: tuple[tuple[str, int], ...] = ()
    v_by_columns: bool = False
    operator_name: ClassVar[str] = "attention_fp8"

    @property
    def sizes(self) -> dict[str, int]:
        # Not super(), which a dataclass with slots does not find.
        return AttentionProblem.sizes.fget(self) | dict(self.scale_sizes)

    def dtype_of(self, argument: Argument) -> str:
        return self.out_dtype if argument.name == "out" else AttentionProblem.dtype_of(self, argument)

    def layout_of(self, position: int, sizes: Mapping[str, int]) -> ArrayLayout | None:
        layout = AttentionProblem.layout_of(self, position, sizes)
        if not self.v_by_columns or layout is None or layout.argument.name != "v":
            return layout
        argument = layout.argument._replace(shape=_V_BY_COLUMNS)
        return layout._replace(argument=argument, extents=argument.extents(sizes))

    def new_dtype(self, argument: Argument) -> str | None:
        return self.out_dtype if argument.name == "out" else argument.dtypes[0]

    def description(self) -> str:
        common = f"{AttentionProblem.description(self)}, accumulate {self.accumulate}, out {self.out_dtype}"
        return common + (", v_layout vt" if self.v_by_columns else "")

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        return AttentionProblem.values(self, axes) | {"out_is_fp16": int(self.out_dtype == "fp16")}

    def of_sequence(self, q_length: int, kv_length: int) -> Fp8Problem:
        scales = {name: extents for name, extents in _extents(self).items() if self.has(name)}
        return _with_scales(
            AttentionProblem.of_sequence(self, q_length, kv_length),
            {name: (1, heads) for name, (_, heads) in scales.items()},
            self.out_dtype,
            self.accumulate,
        )


def normalise(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    *,
    out: ArrayView | None = None,
    dtype: str | None = None,
    out_dtype: str | None = None,
    accumulate: str | None = None,
    q_scale: ArrayView | None = None,
    k_scale: ArrayView | None = None,
    v_scale: ArrayView | None = None,
    out_scale: ArrayView | None = None,
    **others: Any,
) -> Fp8Problem:
    """The Problem of a call, or the error of the contract that it breaks. Arguments as in ``attention``;
    ``others`` are arguments of `attention.normalise`, which raises the same errors.
    """
    views = codes_of({"q": q, "k": k, "v": v}, dtype)
    arrays = zip(ALL_SCALES, (q_scale, k_scale, v_scale, out_scale), strict=True)
    scales = {name: view for name, view in arrays if view}
    out_dtype, out = _out_dtype(out, out_dtype)
    if out_scale is not None and out_dtype != CODES:
        raise BadParam(
            f"{arg('out_scale')} was given, and the result has dtype {out_dtype}; pass {arg('out_dtype')}="
            f"{CODES!r}, or leave it out"
        )
    check_devices(views | scales)
    accumulate = ACCUMULATE[0] if accumulate is None else accumulate
    if accumulate not in ACCUMULATE:
        allowed = " or ".join(map(repr, ACCUMULATE))
        raise BadParam(f"{arg('accumulate')} is {shown(accumulate)}; expected {allowed}")
    _refuse_scales_of_rows(scales, others)
    columns = _strides_by_columns(views["v"], others)
    if columns is not None:  # checked: the others see an array of rows
        rows = view_of_shape(v.shape, CODES, v.device).strides
        views["v"] = dataclasses.replace(views["v"], strides=rows)
    forward = attention.normalise(**views, out=out, of_codes=True, **others)
    extents = {name: _scale_extents(name, view, forward.sizes) for name, view in scales.items()}
    problem = _with_scales(forward, extents, out_dtype, accumulate)
    if columns is None:
        return problem
    strides = list(problem.strides)
    strides[problem.operator.position("v")] = columns
    return dataclasses.replace(problem, strides=tuple(strides), v_by_columns=True)


def _strides_by_columns(v: ArrayView, others: Mapping[str, Any]) -> Strides | None:
    """The strides of batch entries, columns and heads of a v whose tokens are contiguous instead of its
    columns; None for any other v. Raises BadTensorShape and BadTensorStrides.
    """
    if len(v.shape) not in (3, 4) or 0 in v.shape or v.strides is None:
        return None
    tokens, heads, width = v.shape[-3:]
    of_tokens, of_heads, of_columns = v.strides[-3:]
    if of_tokens != 1 or of_columns == 1 or width == 1:
        return None
    how = f"{arg('v')} has strides {v.strides} (in elements), so its tokens are contiguous"
    instead = "or pass v with its last dimension contiguous"
    if any(others.get(name) is not None for name in _LENGTHS):
        raise BadTensorStrides(f"{how}; with lengths or a KVCache its last dimension must be contiguous")
    if tokens % ROW_ALIGNMENT:
        raise BadTensorShape(
            f"{how}, and its {tokens} tokens are no multiple of {ROW_ALIGNMENT}; pad k and v and mask the "
            f"padding, {instead}"
        )
    batch, of_batch = (v.shape[0], v.strides[0]) if len(v.shape) == 4 else (1, 0)
    extents = batch, width, heads, tokens
    strides = normal_strides(extents, (of_batch, of_columns, of_heads))
    if any(stride % ROW_ALIGNMENT for stride in strides):
        raise BadTensorStrides(f"{how}; its other strides must be multiples of {ROW_ALIGNMENT}, {instead}")
    return strides


def _with_scales(
    forward: AttentionProblem, extents: Mapping[str, tuple[int, int]], out_dtype: str, accumulate: str
) -> Fp8Problem:
    """The problem of codes that is ``forward`` but for the scales, of which ``extents`` has the sizes where
    the call has the array.
    """
    scale_sizes = {
        f"{name}_{symbol}": size
        for name in ALL_SCALES
        for symbol, size in zip(("batch", "heads"), extents.get(name, (1, 1)), strict=True)
    }
    kept = {field.name: getattr(forward, field.name) for field in dataclasses.fields(forward)}
    strides = dict(zip(forward.operator.positions, forward.strides, strict=True))
    for argument in ARGUMENTS:
        if argument.name in ALL_SCALES:  # their own strides are never read: they are contiguous
            there = argument.name in extents
            strides[argument.name] = place(argument, None, scale_sizes, CODES).strides if there else None
    rule = forward.rule and forward.rule.rule
    operator = operator_for(Fp8Problem.operator_name, forward.score, forward.lengths is not None, rule)
    kept["strides"] = tuple(strides[argument.name] for argument in operator.arguments)
    return Fp8Problem(
        **kept, out_dtype=out_dtype, accumulate=accumulate, scale_sizes=tuple(scale_sizes.items())
    )


def _extents(problem: Fp8Problem) -> dict[str, tuple[int, int]]:
    """How many batch entries and how many heads each scale has."""
    sizes = dict(problem.scale_sizes)
    return {name: (sizes[f"{name}_batch"], sizes[f"{name}_heads"]) for name in ALL_SCALES}


def codes_of(views: Mapping[str, ArrayView], dtype: str | None) -> dict[str, ArrayView]:
    """The views of q, k and v as e4m3. Bytes are codes where ``dtype`` says so. Raises BadParam and
    BadTensorDtype.
    """
    if dtype is not None and (not isinstance(dtype, str) or dtype_name(dtype) != CODES):
        raise BadParam(
            f"{arg('dtype')} is {shown(dtype)}; expected {CODES!r}, for codes in uint8, or None: other "
            "arrays say their dtype"
        )
    codes = {}
    for name, view in views.items():
        if view.dtype == "uint8" and dtype is not None:
            view = dataclasses.replace(view, dtype=CODES)
        if view.dtype == "uint8":
            raise BadTensorDtype(f"{arg(name)} has dtype uint8; pass dtype={CODES!r} if it has e4m3 codes")
        if view.dtype != CODES:
            why = f"{arg('q_scale')}, {arg('k_scale')}, {arg('v_scale')}, out_dtype and accumulate are"
            raise BadTensorDtype(
                f"{arg(name)} has dtype {view.dtype}; {why} for q, k and v that are all {CODES}, as "
                "flashgen.quantize makes them"
            )
        codes[name] = view
    return codes


def _out_dtype(out: ArrayView | None, out_dtype: str | None) -> tuple[str, ArrayView | None]:
    """The dtype of the result, and its view, whose bytes are codes if ``out_dtype`` says so. Raises BadParam
    and BadTensorDtype.
    """
    named = None if out_dtype is None else dtype_name(out_dtype) if isinstance(out_dtype, str) else ""
    allowed = " or ".join(OUT_DTYPES)
    if named is not None and named not in OUT_DTYPES:
        raise BadParam(f"{arg('out_dtype')} is {shown(out_dtype)}; expected {allowed}")
    if out is None:
        return named or OUT_DTYPES[0], None
    if out.dtype == "uint8" and named == CODES:
        out = dataclasses.replace(out, dtype=CODES)
    if out.dtype not in OUT_DTYPES:
        raise BadTensorDtype(f"{arg('out')} has dtype {out.dtype}; of e4m3 codes it is {allowed}")
    if named not in (None, out.dtype):
        raise BadParam(f"{arg('out_dtype')} is {named} but {arg('out')} has dtype {out.dtype}; leave one out")
    return out.dtype, out


def _refuse_scales_of_rows(scales: Mapping[str, ArrayView], inputs: Mapping[str, Any]) -> None:
    """Raise BadTensorShape for scales of the rows of a cache, which may not be rows of sequences."""
    if all(inputs.get(name) is None for name in ("pages", "index")):
        return
    for name in ("k_scale", "v_scale"):
        shape = tuple(scales[name].shape) if name in scales else ()
        if len(shape) > 2 and shape[:2] != (1, 1):
            raise BadTensorShape(
                f"{arg(name)} has shape {shape}, with scales of rows or tokens of the cache; under "
                f"{arg('q')} of e4m3 pass (), (num_heads_kv,) or (batch, num_heads_kv), or else pass "
                f"{arg('q')} of 16 bits"
            )


def _scale_extents(name: str, view: ArrayView, sizes: Mapping[str, int]) -> tuple[int, int]:
    """How many batch entries and how many heads have scales of their own. Raises BadTensorDtype,
    BadTensorShape or BadTensorStrides.
    """
    if view.dtype != "fp32":
        raise BadTensorDtype(f"{arg(name)} has dtype {view.dtype}; expected fp32")
    batch, heads_kv = sizes["batch"], sizes["num_heads_kv"]
    of_q = sizes["num_heads_q"]
    heads = {"q_scale": {heads_kv, of_q}, "out_scale": {of_q}}.get(name, {heads_kv})
    shape = view.shape
    if len(shape) == 3 and shape[1] == 1:  # of `quantize`, which has scales of tokens, too
        shape = (shape[0], shape[2])
    extents = (1,) * (2 - len(shape)) + tuple(shape)
    if len(extents) != 2 or extents[0] not in (1, batch) or extents[1] not in {1} | heads:
        of_heads = " or ".join(map(str, sorted(heads)))
        raise BadTensorShape(
            f"{arg(name)} has shape {tuple(view.shape)}; expected one element, (heads,) or (batch, heads), "
            f"with batch {batch} and heads {of_heads}, or 1 where they share a scale"
        )
    argument = next(x for x in ARGUMENTS if x.name == name)
    check_strides(argument, view, DTYPE_BYTES["fp32"])
    return extents


def scale_of_heads(
    problem: Fp8Problem, arrays: Mapping[str, np.ndarray | None], name: str, heads: int
) -> np.ndarray:
    """The scale of q, k, v or out, which is ``name``, of each batch entry and head: (batch, heads)."""
    import numpy as np

    scale = arrays.get(f"{name}_scale")
    if scale is None:
        return np.ones((problem.batch, heads), np.float32)
    entries, count = _extents(problem)[f"{name}_scale"]
    of_heads = np.repeat(scale.reshape(entries, count), heads // count, axis=1)
    return np.broadcast_to(of_heads, (problem.batch, heads))


def numbers_of(
    problem: Fp8Problem, arrays: Mapping[str, np.ndarray | None], name: str, to: type[np.floating]
) -> np.ndarray:
    """The numbers that the codes of q, k, v or out stand for; codes are their bytes."""
    from ml_dtypes import float8_e4m3fn

    codes = arrays[name]
    scale = scale_of_heads(problem, arrays, name, codes.shape[-2]).astype(to)
    numbers = codes.view(float8_e4m3fn).astype(to)
    numbers *= scale[:, None, :, None] if problem.batched else scale[0, :, None]
    return numbers


def arrays_of_sequence(
    problem: Fp8Problem, sequence: Sequence, arrays: Mapping[str, np.ndarray | None]
) -> dict[str, np.ndarray | None]:
    """As `sequences.arrays_of`, of arrays that include the scales."""
    parts = arrays_of(problem, sequence, {name: x for name, x in arrays.items() if name not in ALL_SCALES})
    for name, (entries, heads) in _extents(problem).items():
        scale = arrays.get(name)
        of_entries = None if scale is None else scale.reshape(entries, heads)
        parts[name] = None if scale is None else of_entries[min(sequence.number, entries - 1)]
    return parts


def check_elements(problem: Fp8Problem, arrays: Mapping[str, np.ndarray | None]) -> None:
    """Raise BadParam for a scale that is not a finite number above 0, and for lengths and lists of key blocks
    as `attention.check_elements`.
    """
    for name in ALL_SCALES:
        scale = arrays.get(name)
        if scale is not None and not ((scale > 0) & (scale < float("inf"))).all():
            raise BadParam(f"{arg(name)} has an element that is not a finite number above 0")
    attention.check_elements(problem, arrays)


ATTENTION_FP8 = Operator(
    name="attention_fp8",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=SCALARS,
    axes={name: ATTENTION.axes[name] for name in ("head_dim", "head_dim_v")}
    | {
        "dtype": Axis.equal(lambda problem: problem.dtype, (CODES,)),
        "accumulate": Axis.equal(lambda problem: problem.accumulate, ACCUMULATE),
        "out_codes": Axis.either("codes", lambda problem: problem.out_dtype == CODES),
        "v_layout": Axis.either("vt", lambda problem: problem.v_by_columns),
    }
    | {name: ATTENTION.axes[name] for name in ("mask_type", "sinks", "dropout", "gqa", "pages", "kv_starts")},
    grid_dimensions=ATTENTION.grid_dimensions,
    contract=by_name(normalise, without=("lse",)),
    elements_checked=(*ALL_SCALES, *_LENGTHS, *blocklists.NAMES),
    check_elements=check_elements,
    of_lengths=(*_LENGTHS, *BOUNDS, "sequence_rows"),
    of_plain=OF_PLAIN,
)
