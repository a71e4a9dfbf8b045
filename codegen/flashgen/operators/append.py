"""The operator ``append``: new keys and values go into a KV cache, after the ones that each sequence has
there; they and the queries are rotated on the way (rotary embedding, https://arxiv.org/abs/2104.09864).

A cache is a number of pages of page_size tokens each. Without a page table a row of the cache is its one
page: row b for sequence b, or the row that ``index`` names. New token i of sequence b goes to position
p = lengths[b] + i, that is to token p % page_size of page pages[b, p // page_size]. A token without a place
there, or without a row in the tables, is left out. Packed tokens have no batch dimension: sequence b has the
tokens cu_seqlens_new[b] to cu_seqlens_new[b + 1], and tokens after the last sequence are left out.

Of the first rotary_dim elements of a row, (x, y) are a pair: elements i and i + rotary_dim / 2, or, where
they are interleaved, 2i and 2i + 1. With c and s the cosine and the sine of the position in column i,

    x' = c x - s y,  y' = c y + s x

A latent cache has rows of one array, ``k_cache``, and no v: a new token is one row of ``k_new``, whose last
rotary_dim elements are rotated, as of each query. The first ``head_dim_v`` elements are its value.

A cache of e4m3 codes holds what `quantize` makes of the elements, after they are rotated and rounded to their
dtype, with the scale of their sequence and head. Where the cache has an array of scales of tokens, the scale
of each new token and head is its largest finite |x| / 448, as in `quantize`, and goes into that array. In
rows of a latent cache that carry their scales (`latentrows`), each quarter of the latent has such a scale.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    BadTensorShape,
    NullPointer,
    arg,
    naming,
)
from flashgen.operators import kvcodes, latentrows
from flashgen.operators.append_sizes import check_room, check_sizes, check_table, sizes_of, symbols_of
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    INT32,
    ROW_ALIGNMENT,
    WHOLE_INT32,
    Argument,
    check_devices,
    check_layouts,
    flag,
    place,
    shown,
    shown_shape,
)
from flashgen.operators.contract import DTYPES
from flashgen.operators.latent import KV_DTYPES
from flashgen.operators.operator import Axis, Number, Operator, Problem, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from flashgen.operators.arguments import ArrayLayout, ArrayView

Pairs = Literal["none", "halves", "interleaved"]
Q_POSITIONS = ("each", "first")
_NEEDED = ("k_new", "v_new", "lengths", "k_cache", "v_cache")  # in a latent cache no v

_PAGES = "num_pages page_size num_heads_kv"
_TABLE = {"dtypes": DTYPES, "optional": True}
_SCALE = kvcodes.SCALE | {"shape": "sequences num_heads_kv 1"}
_SCALE_OUT = kvcodes.SCALE | {"shape": _PAGES}

ARGUMENTS = (
    Argument("k_new", "input", "batch seqlen_new num_heads_kv head_dim"),
    Argument("v_new", "input", "batch seqlen_new num_heads_kv head_dim_v", optional=True),
    Argument("lengths", "input", "sequences", **WHOLE_INT32),
    Argument("q", "input", "batch seqlen_q num_heads_q head_dim", optional=True),
    Argument("pages", "input", "sequences max_pages", optional=True, **INT32),
    Argument("index", "input", "sequences", optional=True, **WHOLE_INT32),
    Argument("cos", "input", "num_positions rotary_half", **_TABLE),
    Argument("sin", "input", "num_positions rotary_half", **_TABLE),
    Argument("positions", "input", "batch seqlen_new", optional=True, **INT32),
    Argument("cu_seqlens_new", "input", "boundaries", optional=True, **WHOLE_INT32),
    Argument("k_cache", "output", f"{_PAGES} head_dim"),
    Argument("v_cache", "output", f"{_PAGES} head_dim_v"),
    Argument("total_lengths", "output", "sequences", **WHOLE_INT32),
    Argument("q_rotated", "output", "batch seqlen_q num_heads_q head_dim"),
    Argument("k_scale", "input", **_SCALE),
    Argument("v_scale", "input", **_SCALE),
    Argument("k_scale_out", "output", **_SCALE_OUT),
    Argument("v_scale_out", "output", **_SCALE_OUT),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendProblem(Problem):
    """Shapes and strides of one append. ``num_heads_q`` is 0 where there is no q; ``max_pages`` 1 and
    ``page_size`` the capacity where the cache has no page table. ``rotary_half`` is half of rotary_dim, 0
    without rotation. ``table_dtype`` is the dtype of cos and sin, ``kv_dtype`` of a cache of codes.
    ``head_dim_v`` is 0 in a latent cache, whose values are no array. Packed tokens count as one batch entry,
    whatever the number of ``sequences``; there is one boundary more than sequences.
    """

    batch: int
    sequences: int
    boundaries: int
    seqlen_new: int
    seqlen_q: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    num_pages: int
    page_size: int
    max_pages: int
    paged: bool
    pairs: Pairs
    num_positions: int
    rotary_half: int
    table_dtype: str
    q_positions: str
    kv_dtype: str | None = None

    @property
    def operator(self) -> Operator:
        return APPEND

    def symbol_name(self, symbol: str) -> str:
        names = {"num_pages": "pages"} if self.paged else {"num_pages": "rows", "page_size": "capacity"}
        return names.get(symbol, symbol)

    @property
    def empty(self) -> bool:
        # total_lengths is written even where there is no new token.
        return self.sequences == 0

    @property
    def kv_scales(self) -> str:
        """Whether the call computes a scale for each new token and head; `kvcodes.KV_SCALES`."""
        return kvcodes.TOKEN if self.has("k_scale_out") else kvcodes.PER_TILE

    @property
    def has_packed_rows(self) -> bool:
        """Whether rows of the cache carry their scales, see `latentrows`."""
        return self.kv_dtype == latentrows.LAYOUT

    @property
    def capacity(self) -> int:
        """The tokens that a sequence may have."""
        return self.max_pages * self.page_size

    @property
    def latent(self) -> bool:
        """Whether the cache is latent."""
        return self.head_dim_v == 0

    @property
    def row_chunks(self) -> int:
        """The 16-byte chunks of the longest row, rounded up to a power of two."""
        chunks = max(self.head_dim, self.head_dim_v) * DTYPE_BYTES[self.dtype] // ROW_ALIGNMENT
        return 1 << (chunks - 1).bit_length()

    def dtype_of(self, argument: Argument) -> str:
        if argument.name in ("k_cache", "v_cache") and self.kv_dtype is not None:
            return kvcodes.E4M3
        return self.table_dtype if argument.name in ("cos", "sin") else argument.dtype(self.dtype)

    def layout_of(self, position: int, sizes: Mapping[str, int]) -> ArrayLayout | None:
        return latentrows.with_packed_rows(Problem.layout_of(self, position, sizes), self.kv_dtype, "k_cache")

    def shape(self, position: int) -> tuple[int, ...]:
        shape = Problem.shape(self, position)
        is_packed = self.has_packed_rows and ARGUMENTS[position].name == "k_cache"
        return (*shape[:-1], latentrows.ROW_BYTES) if is_packed else shape

    def description(self) -> str:
        tables = ", tables wide" if _has_wide_tables(self) else ""
        pages = "paged" if self.paged else "none"
        codes = "" if self.kv_dtype is None else f", kv_dtype {self.kv_dtype}"
        codes += ", kv_scales token" if self.kv_scales == kvcodes.TOKEN else ""
        latent = ", latent" if self.latent else ""
        return f"dtype {self.dtype}, rotary {self.pairs}{tables}, pages {pages}{codes}{latent}"

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """``chunks`` counts the chunks of a batch entry's rows of q, k_new and v_new; it is at least the
        number of elements of total_lengths.
        """
        arrays = 1 if self.latent else 2
        rows = self.seqlen_q * self.num_heads_q + arrays * self.seqlen_new * self.num_heads_kv
        lengths = -(-self.sequences // max(1, self.batch))
        return {"chunks": max(rows * self.row_chunks, lengths), "batch": self.batch}

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        return {
            "row_chunks_log2": self.row_chunks.bit_length() - 1,
            "capacity": self.capacity,
            "rotary_dim": 2 * self.rotary_half,
            "q_step": 1 if self.q_positions == "each" else 0,
        }


def normalise(
    arrays: Mapping[str, ArrayView],
    *,
    interleaved: bool = False,
    q_positions: str = "each",
    kv_dtype: str | None = None,
    head_dim_v: int | None = None,
) -> AppendProblem:
    """The Problem of a call, or the error of the contract that it breaks; ``arrays`` are by the names of
    arguments.

    ``interleaved`` is how elements are paired. ``q_positions``: query i is rotated as new token i is
    ("each"), or all queries as the first new one ("first"). ``kv_dtype``: "e4m3" where the cache holds codes
    as uint8, "fp8_ds_mla" where rows of a latent cache carry their scales. ``head_dim_v``: of a latent cache,
    the elements of a row that are its value; else None.

    Raises NullPointer, BadParam, BadTensorDtype, BadTensorShape, BadTensorStrides or DeviceTypeNotSupported.
    """
    views = {argument.name: arrays.get(argument.name) for argument in ARGUMENTS}
    latent = head_dim_v is not None
    _check_present(views, latent)
    interleaved = flag("interleaved", interleaved)
    _check_combination(views, q_positions)
    packed_rows = kv_dtype == latentrows.LAYOUT
    if packed_rows:
        views["k_cache"] = _unpacked_view(views, head_dim_v)
        kv_dtype = kvcodes.E4M3
    kv_dtype = _kv_dtype(views, kv_dtype)
    if latent and views["k_scale_out"] is not None:
        raise BadTensorShape(
            f"{arg('k_scale_out')} has shape {views['k_scale_out'].shape}; a latent cache takes (), or "
            "(batch, 1)"
        )
    _check_places_and_dtypes(views, kv_dtype)
    sizes = sizes_of(ARGUMENTS, views)
    present = {name: view for name, view in views.items() if view is not None}
    kvcodes.check(present, kv_dtype, sizes)
    kvcodes.check_scales_out(present, sizes)
    views |= {
        name: kvcodes.whole_scale_of_append(name, present[name], sizes["sequences"], sizes["num_heads_kv"])
        for name in kvcodes.SCALES
        if name in present
    }
    k_new, cos, packed = views["k_new"], views["cos"], views["cu_seqlens_new"] is not None
    paged = views["pages"] is not None
    _check_shapes(views, sizes, packed)
    check_sizes(sizes, k_new.dtype, tables=cos is not None, of_latent=head_dim_v)
    if not packed:  # whose lengths are in the memory of the device
        check_room(sizes, paged=paged)
        if cos is not None and views["positions"] is None:
            check_table(sizes, q_positions)
    check_layouts(ARGUMENTS, views)
    # The outputs that are allocated where the caller leaves them out.
    written = ("total_lengths", "q_rotated") if views["q"] is not None else ("total_lengths",)
    return AppendProblem(
        **sizes,
        dtype=k_new.dtype,
        paged=paged,
        pairs="none" if cos is None else "interleaved" if interleaved else "halves",
        table_dtype=k_new.dtype if cos is None else cos.dtype,
        q_positions=q_positions,
        kv_dtype=latentrows.LAYOUT if packed_rows else kv_dtype,
        batched=not packed,
        strides=tuple(
            place(argument, view, sizes, k_new.dtype).strides
            if view is not None or argument.name in written
            else None
            for argument, view in zip(ARGUMENTS, views.values(), strict=True)
        ),
        device=k_new.device,
    )


def _check_present(views: Mapping[str, ArrayView | None], latent: bool) -> None:
    """Raise for an array that each call needs and is None, and for an array of V beside a latent cache."""
    for name in ("k_new", "v_new", "lengths", "k_cache", "v_cache", "v_scale", "v_scale_out"):
        of_values = name.startswith("v_")
        if views[name] is None and name in _NEEDED and not (latent and of_values):
            raise NullPointer(f"{arg(name)} is None; expected an array")
        if views[name] is not None and latent and of_values:
            raise BadParam(
                f"{arg(name)} was given, and the cache is latent: its values are a part of {arg('k_cache')}; "
                "pass None"
            )


def _check_shapes(views: Mapping[str, ArrayView | None], sizes: Mapping[str, int], packed: bool) -> None:
    for argument in ARGUMENTS:
        view = views[argument.name]
        if view is not None:
            symbols, expected = symbols_of(argument, packed), argument.extents(sizes)[-len(view.shape) :]
            if view.shape != expected:
                raise BadTensorShape(
                    f"{arg(argument.name)} has shape {view.shape}; expected {shown_shape(symbols)} = "
                    f"{expected}"
                )


def _check_combination(views: Mapping[str, ArrayView | None], q_positions: Any) -> None:
    """Which arrays go with which."""
    if not isinstance(q_positions, str) or q_positions not in Q_POSITIONS:
        raise BadParam(
            f"{arg('q_positions')} is {shown(q_positions)}; allowed are "
            f"{' and '.join(map(repr, Q_POSITIONS))}"
        )
    if views["pages"] is not None and views["index"] is not None:
        raise BadParam(
            f"{arg('index')} was given together with {arg('pages')}; a page table already says which pages "
            "are whose"
        )
    if (views["cos"] is None) != (views["sin"] is None):
        present, missing = ("cos", "sin") if views["sin"] is None else ("sin", "cos")
        raise NullPointer(f"{arg(missing)} is None but {arg(present)} was given; rotation takes both")
    for name in ("q", "positions"):
        if views["cos"] is None and views[name] is not None:
            raise BadParam(
                f"{arg(name)} was given without {arg('cos')} and {arg('sin')}; only rotation needs it, so "
                "leave it out"
            )
    if views["q"] is None and views["q_rotated"] is not None:
        raise BadParam(f"{arg('q_rotated')} was given without {arg('q')}; pass both, or neither")


def _kv_dtype(views: Mapping[str, ArrayView | None], kv_dtype: str | None) -> str | None:
    """The dtype of a cache of codes, else None. Raises BadParam and BadTensorDtype."""
    k_cache, v_cache = views["k_cache"], views["v_cache"]
    of_cache = {"q": views["k_new"], "k": k_cache, "v": k_cache if v_cache is None else v_cache}
    with naming({"q": "k_new", "k": "k_cache", "v": "v_cache"}):
        return kvcodes.kv_dtype_of(of_cache, kv_dtype, has_lengths=True)


def _unpacked_view(views: Mapping[str, ArrayView | None], head_dim_v: int | None) -> ArrayView:
    """The view of a latent cache whose rows carry their scales, as `latentrows.unpacked_view` has it. Raises
    BadParam, BadTensorDtype and BadTensorShape.
    """
    if head_dim_v is None:
        raise BadParam(
            f"{arg('kv_dtype')} is {latentrows.LAYOUT!r}, of rows of a latent cache; pass KVCache(rows, "
            f"None, lengths, head_dim_v={latentrows.HEAD_DIM_V}, kv_dtype={latentrows.LAYOUT!r})"
        )
    has_scale = views["k_scale"] is not None or views["k_scale_out"] is not None
    with naming({"q": "k_new", "k": "k_cache"}):
        return latentrows.unpacked_view(views["k_new"], views["k_cache"], head_dim_v, has_scale)


def _check_places_and_dtypes(views: Mapping[str, ArrayView | None], kv_dtype: str | None) -> None:
    """That all arrays are on one device, and each has a dtype of its argument."""
    if kv_dtype is not None:  # checked already
        of_elements = dataclasses.replace(views["k_cache"], dtype=views["k_new"].dtype)
        both = ("k_cache", "v_cache") if views["v_cache"] is not None else ("k_cache",)
        views = {**views, **dict.fromkeys(both, of_elements)}
    dtype = views["k_cache"].dtype  # the norm: a cache stays what it is
    for name, hint in (("k_cache", ""), ("k_new", f"; the cache has {dtype}")):
        if views[name].dtype not in DTYPES:
            supported = ", ".join(DTYPES)
            raise BadTensorDtype(
                f"{arg(name)} has dtype {views[name].dtype}; supported are {supported}{hint}"
            )
    v_cache = views["v_cache"]
    if v_cache is not None and dtype != v_cache.dtype:  # what k_new has is likely to be what was meant
        wrong, right = "v_cache", "k_cache"
        if v_cache.dtype == views["k_new"].dtype:
            wrong, right = right, wrong
        norm = views[right].dtype
        raise BadTensorDtype(
            f"{arg(wrong)} has dtype {views[wrong].dtype}; expected {norm}, as {arg(right)} has dtype {norm}"
        )
    arrays = {name: view for name, view in views.items() if view is not None}
    check_devices({"k_new": views["k_new"]} | arrays)
    for name, view in arrays.items():
        argument = ARGUMENTS[APPEND.position(name)]
        if name in ("cos", "sin"):
            allowed = tuple(dict.fromkeys((dtype, "fp32")))
        else:
            allowed = argument.dtypes or (dtype,)
        if view.dtype not in allowed:
            why = "" if argument.dtypes == ("int32",) else f", as the cache has dtype {dtype}"
            raise BadTensorDtype(f"{arg(name)} has dtype {view.dtype}; expected {' or '.join(allowed)}{why}")
    cos, sin = views["cos"], views["sin"]
    if cos is not None and cos.dtype != sin.dtype:
        raise BadTensorDtype(
            f"{arg('sin')} has dtype {sin.dtype} but {arg('cos')} has {cos.dtype}; they must be the same"
        )


def _has_wide_tables(problem: AppendProblem) -> bool:
    return problem.table_dtype != problem.dtype


def _contract(
    operator: Operator, views: Sequence[ArrayView | None], options: Sequence[Any], scalars: Sequence[Any]
) -> Problem:
    arrays = {x.name: view for x, view in zip(ARGUMENTS, views, strict=True) if view is not None}
    return normalise(arrays, **dict(zip(operator.options, options, strict=True)))


def _check_elements(problem: AppendProblem, arrays: Mapping[str, np.ndarray | None]) -> None:
    from flashgen.operators.append_rows import check_places

    kvcodes.check_elements(arrays)
    check_places(problem, arrays)


APPEND = Operator(
    name="append",
    arguments=ARGUMENTS,
    options=("interleaved", "q_positions", "kv_dtype", "head_dim_v"),
    scalars=(),
    axes={
        "dtype": Axis.equal(lambda problem: problem.dtype, DTYPES),
        "rotary": Axis.equal(lambda problem: problem.pairs, ("none", "halves", "interleaved"), "none"),
        "tables": Axis.either("wide", _has_wide_tables),
        "pages": Axis.either("paged", lambda problem: problem.paged),
        "kv_dtype": Axis.equal(kvcodes.kv_dtype_word, KV_DTYPES, "none"),
        # Its last elements are rotated, not the first.
        "latent": Axis.either("latent", lambda problem: problem.latent and problem.pairs != "none"),
        "kv_scales": Axis.equal(lambda problem: problem.kv_scales, kvcodes.KV_SCALES, kvcodes.PER_TILE),
    },
    grid_dimensions=("chunks", "batch"),
    contract=_contract,
    elements_checked=("lengths", "pages", "index", "positions", "cu_seqlens_new", *kvcodes.SCALES),
    check_elements=_check_elements,
)
