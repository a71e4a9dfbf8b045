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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    BadTensorShape,
    NullPointer,
    arg,
)
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    ROW_ALIGNMENT,
    Argument,
    check_devices,
    check_strides,
    flag,
    place,
    shown,
    shown_shape,
)
from flashgen.operators.contract import DTYPES, MAX_SEQLEN, check_head_dim
from flashgen.operators.operator import Axis, Number, Operator, Problem, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from flashgen.operators.arguments import ArrayView

Pairs = Literal["none", "halves", "interleaved"]
Q_POSITIONS = ("each", "first")
ROTARY_STEP = 16  # what rotary_dim is a multiple of

_INT32 = {"dtypes": ("int32",), "alignment": 4}
_PAGES = "num_pages page_size num_heads_kv"
_TABLE = {"dtypes": DTYPES, "optional": True}

ARGUMENTS = (
    Argument("k_new", "input", "batch seqlen_new num_heads_kv head_dim"),
    Argument("v_new", "input", "batch seqlen_new num_heads_kv head_dim_v"),
    Argument("lengths", "input", "sequences", layout="contiguous", **_INT32),
    Argument("q", "input", "batch seqlen_q num_heads_q head_dim", optional=True),
    Argument("pages", "input", "sequences max_pages", optional=True, **_INT32),
    Argument("index", "input", "sequences", layout="contiguous", optional=True, **_INT32),
    Argument("cos", "input", "num_positions rotary_half", **_TABLE),
    Argument("sin", "input", "num_positions rotary_half", **_TABLE),
    Argument("positions", "input", "batch seqlen_new", optional=True, **_INT32),
    Argument("cu_seqlens_new", "input", "boundaries", layout="contiguous", optional=True, **_INT32),
    Argument("k_cache", "output", f"{_PAGES} head_dim"),
    Argument("v_cache", "output", f"{_PAGES} head_dim_v"),
    Argument("total_lengths", "output", "sequences", layout="contiguous", **_INT32),
    Argument("q_rotated", "output", "batch seqlen_q num_heads_q head_dim"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendProblem(Problem):
    """Shapes and strides of one append. ``num_heads_q`` is 0 where there is no q; ``max_pages`` 1 and
    ``page_size`` the capacity where the cache has no page table. ``rotary_half`` is half of rotary_dim, 0
    without rotation. ``table_dtype`` is the dtype of cos and sin. Packed tokens count as one batch entry,
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

    @property
    def operator(self) -> Operator:
        return APPEND

    @property
    def sizes(self) -> dict[str, int]:
        return {symbol: getattr(self, symbol) for symbol in sorted(APPEND.symbols)}

    def symbol_name(self, symbol: str) -> str:
        names = {"num_pages": "pages"} if self.paged else {"num_pages": "rows", "page_size": "capacity"}
        return names.get(symbol, symbol)

    @property
    def empty(self) -> bool:
        # total_lengths is written even where there is no new token.
        return self.sequences == 0

    @property
    def capacity(self) -> int:
        """The tokens that a sequence may have."""
        return self.max_pages * self.page_size

    @property
    def row_chunks(self) -> int:
        """The 16-byte chunks of the longest row, rounded up to a power of two."""
        chunks = max(self.head_dim, self.head_dim_v) * DTYPE_BYTES[self.dtype] // ROW_ALIGNMENT
        return 1 << (chunks - 1).bit_length()

    def dtype_of(self, argument: Argument) -> str:
        return self.table_dtype if argument.name in ("cos", "sin") else argument.dtype(self.dtype)

    def description(self) -> str:
        tables = ", tables wide" if _tables(self) == "wide" else ""
        return f"dtype {self.dtype}, rotary {self.pairs}{tables}, pages {_pages(self)}"

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """``chunks`` counts the chunks of a batch entry's rows of q, k_new and v_new; it is at least the
        number of elements of total_lengths.
        """
        rows = self.seqlen_q * self.num_heads_q + 2 * self.seqlen_new * self.num_heads_kv
        lengths = -(-self.sequences // max(1, self.batch))
        return {"chunks": max(rows * self.row_chunks, lengths), "batch": self.batch}

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        return {
            "row_chunks_log2": self.row_chunks.bit_length() - 1,
            "capacity": self.capacity,
            "rotary_dim": 2 * self.rotary_half,
            "q_step": 1 if self.q_positions == "each" else 0,
        }

    def scalar_values(self) -> dict[str, Number]:
        return {}

    def with_scalars(self, scalars: Sequence[Any]) -> AppendProblem:
        return self


def normalise(
    arrays: Mapping[str, ArrayView], *, interleaved: bool = False, q_positions: str = "each"
) -> AppendProblem:
    """The Problem of a call, or the error of the contract that it breaks; ``arrays`` are by the names of
    arguments.

    ``interleaved`` is how elements are paired. ``q_positions``: query i is rotated as new token i is
    ("each"), or all queries as the first new one ("first").

    Raises NullPointer, BadParam, BadTensorDtype, BadTensorShape, BadTensorStrides or DeviceTypeNotSupported.
    """
    views = {argument.name: arrays.get(argument.name) for argument in ARGUMENTS}
    for name in ("k_new", "v_new", "lengths", "k_cache", "v_cache"):
        if views[name] is None:
            raise NullPointer(f"{arg(name)} is None; expected an array")
    interleaved = flag("interleaved", interleaved)
    _check_combination(views, q_positions)
    _check_places_and_dtypes(views)
    sizes = _sizes(views)
    k_new, cos, packed = views["k_new"], views["cos"], views["cu_seqlens_new"] is not None
    paged = views["pages"] is not None
    for argument in ARGUMENTS:
        view = views[argument.name]
        if view is not None:
            symbols, expected = _symbols(argument, packed), argument.extents(sizes)[-len(view.shape) :]
            if view.shape != expected:
                raise BadTensorShape(
                    f"{arg(argument.name)} has shape {view.shape}; expected {shown_shape(symbols)} = "
                    f"{expected}"
                )
    _check_sizes(sizes, k_new.dtype, tables=cos is not None)
    if not packed:  # whose lengths are in the memory of the device
        _check_room(sizes, paged=paged)
        if cos is not None and views["positions"] is None:
            _check_table(sizes, q_positions)
    for argument in ARGUMENTS:
        view = views[argument.name]
        if view is not None:
            check_strides(argument, view, DTYPE_BYTES[view.dtype])
    # What is not given, and written all the same, is allocated.
    written = ("total_lengths", "q_rotated") if views["q"] is not None else ("total_lengths",)
    return AppendProblem(
        **sizes,
        dtype=k_new.dtype,
        paged=paged,
        pairs="none" if cos is None else "interleaved" if interleaved else "halves",
        table_dtype=k_new.dtype if cos is None else cos.dtype,
        q_positions=q_positions,
        batched=not packed,
        strides=tuple(
            place(argument, views[argument.name], sizes, k_new.dtype).strides
            if views[argument.name] is not None or argument.name in written
            else None
            for argument in ARGUMENTS
        ),
        device=k_new.device,
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


def _check_places_and_dtypes(views: Mapping[str, ArrayView | None]) -> None:
    """That all arrays are on one device, and each has a dtype of its argument."""
    dtype = views["k_cache"].dtype  # the norm: a cache stays what it is
    for name, hint in (("k_cache", ""), ("k_new", f"; the cache has {dtype}")):
        if views[name].dtype not in DTYPES:
            supported = ", ".join(DTYPES)
            raise BadTensorDtype(
                f"{arg(name)} has dtype {views[name].dtype}; supported are {supported}{hint}"
            )
    if dtype != views["v_cache"].dtype:  # what k_new has is likely to be what was meant
        wrong, right = "v_cache", "k_cache"
        if views["v_cache"].dtype == views["k_new"].dtype:
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


def _sizes(views: Mapping[str, ArrayView | None]) -> dict[str, int]:
    """The size of each symbol; each array has the rank of its argument, without batch where tokens are
    packed.
    """
    boundaries = views["cu_seqlens_new"]
    packed = boundaries is not None
    for argument in ARGUMENTS:
        view, symbols = views[argument.name], _symbols(argument, packed)
        if view is not None and len(view.shape) != len(symbols):
            hint = ""
            if len(view.shape) == 3 and len(symbols) == 4 and not packed and symbols[0] == "batch":
                hint = f"; packed tokens need {arg('cu_seqlens_new')}"
                if view.shape[:1] == views["lengths"].shape:
                    hint += f", and one token of each sequence goes in as {arg(argument.name)}[:, None]"
            elif packed and argument.leads_with_batch:
                hint = f"; {arg('cu_seqlens_new')} was given, so tokens are packed, without batch"
            raise BadTensorShape(
                f"{arg(argument.name)} has shape {view.shape}; expected {shown_shape(symbols)}{hint}"
            )
    if packed and boundaries.shape == (0,):
        raise BadTensorShape(
            f"{arg('cu_seqlens_new')} has shape (0,); expected one element more than sequences"
        )
    seqlen_new, heads, head_dim = views["k_new"].shape[-3:]
    batch = 1 if packed else views["k_new"].shape[0]
    sequences = boundaries.shape[0] - 1 if packed else batch
    if views["lengths"].shape[0] != sequences:
        new = "cu_seqlens_new" if packed else "k_new"
        raise BadTensorShape(
            f"{arg('lengths')} has shape {views['lengths'].shape} but {arg(new)} is for {sequences} sequences"
        )
    head_dim_v = views["v_new"].shape[-1]
    num_pages, page_size = views["k_cache"].shape[:2]
    for new, cache in (("k_new", "k_cache"), ("v_new", "v_cache")):
        if views[new].shape[-2:] != views[cache].shape[-2:]:
            raise BadTensorShape(
                f"{arg(new)} has {views[new].shape[-2]} heads of {views[new].shape[-1]} elements but "
                f"{arg(cache)} has {views[cache].shape[-2]} of {views[cache].shape[-1]}; they must be the "
                "same"
            )
    q, pages, cos, positions = (views[name] for name in ("q", "pages", "cos", "positions"))
    sizes = {
        "batch": batch,
        "sequences": sequences,
        "boundaries": sequences + 1,
        "seqlen_new": seqlen_new,
        "seqlen_q": 0 if q is None else q.shape[-3],
        "num_heads_q": 0 if q is None else q.shape[-2],
        "num_heads_kv": heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "num_pages": num_pages,
        "page_size": page_size,
        "max_pages": 1 if pages is None else pages.shape[1],
        "num_positions": 0 if cos is None else cos.shape[0],
        "rotary_half": 0 if cos is None else cos.shape[1],
    }
    if q is not None and (positions is not None or packed) and sizes["seqlen_q"] != seqlen_new:
        why = f"{arg('cu_seqlens_new')} counts" if packed else f"{arg('positions')} place"
        raise BadTensorShape(
            f"{arg('q')} has {sizes['seqlen_q']} tokens but {arg('k_new')} has {seqlen_new}; {why} the "
            "tokens of both, so their numbers must be equal"
        )
    if pages is None and views["index"] is None and num_pages < sequences:
        raise BadTensorShape(
            f"{arg('k_cache')} has {num_pages} rows, fewer than the {sequences} sequences; pass a larger "
            f"cache, or {arg('index')} or {arg('pages')} to say where each sequence is"
        )
    return sizes


def _symbols(argument: Argument, packed: bool) -> tuple[str, ...]:
    """The symbols of an argument's dimensions as the caller has them."""
    return argument.symbols[1:] if packed and argument.symbols[0] == "batch" else argument.symbols


def _check_sizes(sizes: Mapping[str, int], dtype: str, *, tables: bool) -> None:
    """Limits of the sizes themselves."""
    for name in ("head_dim", "head_dim_v"):
        check_head_dim(name, sizes[name], dtype)
    if sizes["num_heads_kv"] < 1:
        raise BadTensorShape(f"{arg('k_new')} has no heads; it needs one at least")
    capacity = sizes["max_pages"] * sizes["page_size"]
    for name, length in (("k_new", sizes["seqlen_new"]), ("q", sizes["seqlen_q"]), ("k_cache", capacity)):
        if length > MAX_SEQLEN:
            raise BadTensorShape(
                f"{arg(name)} has sequence length {length}; the longest supported is {MAX_SEQLEN}"
            )
    rotary_dim = 2 * sizes["rotary_half"]
    if tables and (rotary_dim % ROTARY_STEP or not ROTARY_STEP <= rotary_dim <= sizes["head_dim"]):
        raise BadTensorShape(
            f"{arg('cos')} has {sizes['rotary_half']} columns, for a rotary_dim of {rotary_dim}; it must be "
            f"a multiple of {ROTARY_STEP} up to head_dim, {sizes['head_dim']}"
        )


def _check_room(sizes: Mapping[str, int], *, paged: bool) -> None:
    """That there is room for the new tokens of a sequence that has none yet."""
    seqlen_new, page_size = sizes["seqlen_new"], sizes["page_size"]
    if seqlen_new > sizes["max_pages"] * page_size:
        room = f"pages has room for {sizes['max_pages']} pages of" if paged else "k_cache has room for"
        raise BadTensorShape(
            f"{arg('k_new')} has {seqlen_new} tokens of a sequence but {room} {page_size}; pass fewer, or a "
            "larger cache"
        )


def _check_table(sizes: Mapping[str, int], q_positions: str) -> None:
    """That the tables have the positions of a sequence that has no tokens yet."""
    for name, count in (
        ("k_new", sizes["seqlen_new"]),
        ("q", sizes["seqlen_q"] if q_positions == "each" else 0),
    ):
        if sizes["num_positions"] < count:
            raise BadTensorShape(
                f"{arg('cos')} has {sizes['num_positions']} rows but {arg(name)} has {count} tokens of a "
                "sequence; the tables need a row for each position"
            )


def _tables(problem: AppendProblem) -> str:
    return "none" if problem.table_dtype == problem.dtype else "wide"


def _pages(problem: AppendProblem) -> str:
    return "paged" if problem.paged else "none"


def _contract(
    operator: Operator, views: Sequence[ArrayView | None], options: Sequence[Any], scalars: Sequence[Any]
) -> Problem:
    interleaved, q_positions = options
    arrays = {x.name: view for x, view in zip(ARGUMENTS, views, strict=True) if view is not None}
    return normalise(arrays, interleaved=interleaved, q_positions=q_positions)


def _check_elements(problem: AppendProblem, arrays: Mapping[str, np.ndarray | None]) -> None:
    from flashgen.operators.append_rows import check_places

    check_places(problem, arrays)


APPEND = Operator(
    name="append",
    arguments=ARGUMENTS,
    options=("interleaved", "q_positions"),
    scalars=(),
    axes={
        "dtype": Axis(lambda problem, value: value == problem.dtype, DTYPES),
        "rotary": Axis(
            lambda problem, value: value == problem.pairs, ("none", "halves", "interleaved"), default="none"
        ),
        "tables": Axis(lambda problem, value: value == _tables(problem), ("none", "wide"), default="none"),
        "pages": Axis(lambda problem, value: value == _pages(problem), ("none", "paged"), default="none"),
    },
    grid_dimensions=("chunks", "batch"),
    contract=_contract,
    elements_checked=("lengths", "pages", "index", "positions", "cu_seqlens_new"),
    check_elements=_check_elements,
)
