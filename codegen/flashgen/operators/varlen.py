"""The operator ``varlen``: attention over sequences whose lengths lie on the device, as int32.

Queries are packed one sequence after another (``cu_seqlens_q``), or padded: all sequences have as many. Keys
are packed (``cu_seqlens_kv``), padded (``kv_lengths``), rows of a cache (``index``), or pages of one
(``pages``). Nothing on the host reads a length: a problem has bounds, which fix grids and workspaces.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, NullPointer, naming
from flashgen.operators import attention, contract, maskoptions
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    Argument,
    Expected,
    check_devices,
    check_strides,
    flag,
    length_bound,
    place,
    shown_shape,
)
from flashgen.operators.attention import ATTENTION, SCALARS, AttentionProblem
from flashgen.operators.maskoptions import simplify
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.operator import Axis, Number, Operator, Value
from flashgen.operators.splits import AUTO, splits_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.scores import Score
    from flashgen.operators.splits import Splits

# What a kernel knows of pages: the keys of a sequence are rows one after another, or lie in pages.
PAGES = ("none", "paged")
# Keys of the sequence that stands for all where the kernel must not depend on their lengths.
_STANDARD_KEYS = 4096
_INTEGERS = {"dtypes": ("int32",), "layout": "contiguous", "alignment": 4, "optional": True}

ARGUMENTS = (
    Argument("q", "input", "batch_q rows_q num_heads_q head_dim"),
    Argument("k", "input", "batch_kv rows_kv num_heads_kv head_dim"),
    Argument("v", "input", "batch_kv rows_kv num_heads_kv head_dim_v"),
    Argument("cu_seqlens_q", "input", "boundaries", **_INTEGERS),
    Argument("cu_seqlens_kv", "input", "boundaries", **_INTEGERS),
    Argument("kv_lengths", "input", "batch", **_INTEGERS),
    Argument("index", "input", "batch", **_INTEGERS),
    Argument("pages", "input", "batch max_pages", **(_INTEGERS | {"layout": "rows"})),
    contract.MASK._replace(shape="batch num_heads_q rows_q seqlen_kv"),
    Argument("out", "output", "batch_q rows_q num_heads_q head_dim_v"),
    Argument(
        "lse",
        "output",
        "batch_q num_heads_q rows_q",
        dtypes=("fp32",),
        layout="contiguous",
        alignment=4,
        optional=True,
    ),
)
_SHAPES = {
    "cu_seqlens_q": ("batch + 1",),
    "cu_seqlens_kv": ("batch + 1",),
    "pages": ("batch", "max_pages"),
}
LENGTH_ARRAYS = ("cu_seqlens_q", "cu_seqlens_kv", "kv_lengths", "index", "pages")
OPTIONS = (
    "causal",
    "mask_type",
    "window_size",
    "return_lse",
    "splits",
    "max_seqlen_q",
    "max_seqlen_kv",
    "score",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenProblem(AttentionProblem):
    """One call with lengths on the device.

    ``seqlen_q`` and ``seqlen_kv`` are bounds of the sequences' lengths; mask and window are those of a
    sequence of these lengths, and move with the others' ends (`of_sequence`). Kernels and grids are chosen by
    them. ``most_keys`` is the length to which kernels cut keys: ``seqlen_kv``, or all that the arrays hold
    where ``seqlen_kv`` is only `Expected`. ``batch_q`` and ``rows_q``, ``batch_kv`` and ``rows_kv`` are the
    first two extents of the arrays: 1 and all tokens where sequences are packed, pages and their size where
    there are pages.
    """

    lengths_on_device: ClassVar[bool] = True

    batch_q: int
    rows_q: int
    batch_kv: int
    rows_kv: int
    max_pages: int
    most_keys: int

    @property
    def operator(self) -> Operator:
        return operator_for(self.score)

    @property
    def sizes(self) -> dict[str, int]:
        # Not super(): a class with slots is made anew, and the function would not know which.
        return AttentionProblem.sizes.fget(self) | {
            "batch_q": self.batch_q,
            "rows_q": self.rows_q,
            "batch_kv": self.batch_kv,
            "rows_kv": self.rows_kv,
            "boundaries": self.batch + 1,
            "max_pages": self.max_pages,
        }

    def spoken(self, symbol: str) -> str:
        rows_kv = "tokens" if self.packed_kv else "page_size" if self.paged else "seqlen_kv"
        names = {
            "batch_q": "batch",
            "rows_q": "tokens" if self.packed_q else "seqlen_q",
            "batch_kv": "pages" if self.paged else "batch",
            "rows_kv": rows_kv,
        }
        return names.get(symbol, symbol)

    @property
    def empty(self) -> bool:
        return self.batch * self.batch_q * self.rows_q == 0

    @property
    def packed_q(self) -> bool:
        return self.strides[self.operator.position("cu_seqlens_q")] is not None

    @property
    def packed_kv(self) -> bool:
        return self.strides[self.operator.position("cu_seqlens_kv")] is not None

    @property
    def paged(self) -> bool:
        return self.strides[self.operator.position("pages")] is not None

    @property
    def capacity(self) -> int:
        """The most keys that a sequence can have."""
        pages = self.max_pages if self.paged else None
        return _capacity(self.batch, self.batch_kv, self.rows_kv, pages)

    def wanted(self) -> str:
        return f"{AttentionProblem.wanted(self)}, pages {'paged' if self.paged else 'none'}"

    def standard(self) -> VarlenProblem:
        """One sequence with as many keys as queries, or, if more, _STANDARD_KEYS."""
        seqlen_kv = max(self.seqlen_q, _STANDARD_KEYS)
        shift = seqlen_kv - self.seqlen_kv if self.mask_type != "none" else 0
        return dataclasses.replace(
            self,
            batch=1,
            batch_q=1,
            rows_q=self.seqlen_q,
            seqlen_kv=seqlen_kv,
            diagonal_offset=self.diagonal_offset + shift,
        )

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """``sequence_rows`` are the rows of all sequences; ``query_rows`` the bound of one."""
        extents = AttentionProblem.grid_extents(self, axes)
        group = self.group_size if axes["gqa"] == "packed" else 1
        return extents | {"sequence_rows": self.batch_q * self.rows_q * group}

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        """``diagonal_offset`` is how far the diagonal of a sequence lies right of the one that ends with it;
        ``page_size`` means something where there are pages. The ``seqlen_kv`` of a kernel is ``most_keys``.
        """
        return AttentionProblem.values(self, axes) | {
            "seqlen_kv": self.most_keys,
            "diagonal_offset": self.shift,
            "page_size": self.rows_kv,
        }

    @property
    def shift(self) -> int:
        """How far the diagonal of a sequence lies right of the one that ends with it."""
        return self.diagonal_offset - (self.seqlen_kv - self.seqlen_q) if self.mask_type == "causal" else 0

    def of_sequence(self, q_length: int, kv_length: int) -> AttentionProblem:
        """The problem of one sequence of these lengths, with contiguous arrays of its own."""
        kind, offset, left, right = simplify(
            "dense" if self.mask_type == "dense" else "local",
            q_length,
            kv_length,
            kv_length - q_length + self.shift,
            self.window_left,
            self.window_right,
        )
        sizes = AttentionProblem.sizes.fget(self) | {"batch": 1, "seqlen_q": q_length, "seqlen_kv": kv_length}
        arguments = attention.operator_for(self.score).arguments
        absent = set() if self.mask_type == "dense" else {"mask"}
        absent |= set() if self.return_lse else {"lse"}
        return AttentionProblem(
            **{name: sizes[name] for name in _OWN_SIZES},
            dtype=self.dtype,
            mask_type=kind,
            diagonal_offset=offset,
            window_left=left,
            window_right=right,
            softmax_scale=self.softmax_scale,
            splits=self.splits,
            strides=tuple(
                None if each.name in absent else place(each, None, sizes, self.dtype).strides
                for each in arguments
            ),
            score=self.score,
            score_scalars=self.score_scalars,
            score_sizes=self.score_sizes,
        )


def normalise(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    *,
    cu_seqlens_q: ArrayView | None = None,
    cu_seqlens_kv: ArrayView | None = None,
    kv_lengths: ArrayView | None = None,
    index: ArrayView | None = None,
    pages: ArrayView | None = None,
    mask: ArrayView | None = None,
    out: ArrayView | None = None,
    causal: bool = False,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    return_lse: bool = False,
    max_seqlen_q: int | Expected | None = None,
    max_seqlen_kv: int | Expected | None = None,
    splits: Splits = AUTO,
    score: Score | None = None,
    score_arrays: Sequence[ArrayView | None] = (),
    score_scalars: Sequence[Any] = (),
) -> VarlenProblem:
    """The Problem of a call, or the error of the contract that it breaks. Arguments as in ``attention``; the
    bounds may be `Expected`. Packed queries are not cut by such a bound if there are more tokens than it
    allows.

    Raises as `attention.normalise`.
    """
    causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    splits = splits_of(splits)
    views = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
    lengths = dict(zip(LENGTH_ARRAYS, (cu_seqlens_q, cu_seqlens_kv, kv_lengths, index, pages), strict=True))
    given = {name: view for name, view in lengths.items() if view is not None}
    own = contract.score_views(score, score_arrays)
    masks = {} if mask is None else {"mask": mask}
    check_devices(views | given | masks | own)
    dtype = contract.check_dtypes(views)
    _check_combination(given)
    invariant = splits != AUTO
    if invariant and cu_seqlens_q is not None and max_seqlen_q is None:
        raise BadParam(
            f"splits is {splits} and max_seqlen_q is None; with packed queries pass max_seqlen_q, the same "
            "for all calls whose bits must agree: the kernel is chosen by it"
        )
    batch = _check_lengths(given, q)
    sizes = _sizes(q, k, v, given, batch)
    pages_of_one = None if pages is None else sizes["max_pages"]
    capacity = _capacity(batch, sizes["batch_kv"], sizes["rows_kv"], pages_of_one)
    sizes["seqlen_q"] = _bound("max_seqlen_q", max_seqlen_q, sizes["rows_q"], cu_seqlens_q is None)
    if isinstance(max_seqlen_q, Expected) and batch * sizes["seqlen_q"] < sizes["rows_q"]:
        sizes["seqlen_q"] = sizes["rows_q"]
    if invariant and cu_seqlens_q is not None:
        # Also above the tokens that there are: a few of them would choose another kernel.
        sizes["seqlen_q"] = _bound("max_seqlen_q", max_seqlen_q, contract.MAX_SEQLEN, False)
    sizes["seqlen_kv"] = _bound("max_seqlen_kv", max_seqlen_kv, capacity, False)
    most_keys = capacity if isinstance(max_seqlen_kv, Expected) else sizes["seqlen_kv"]
    contract.check_extents(sizes, dtype)
    contract.check_out(out, q, v)
    for argument in ARGUMENTS:
        view = (views | given).get(argument.name)
        if view is not None:
            check_strides(argument, view, DTYPE_BYTES[view.dtype])
    kind, offset, left, right = _band(
        causal, mask_type, window_size, mask is not None, sizes, None if invariant else most_keys
    )
    if mask is not None:
        _check_mask(mask, given, sizes, max_seqlen_kv is not None)
    absent = {name for name in (*LENGTH_ARRAYS, "mask") if name not in given | masks}
    absent |= set() if return_lse else {"lse"}
    score_sizes = _check_score_arrays(score, own, sizes)
    symbols = sizes | dict(score_sizes) | {"boundaries": batch + 1}
    arrays = views | given | masks | own
    problem = VarlenProblem(
        **sizes,
        most_keys=most_keys,
        dtype=dtype,
        mask_type=kind,
        diagonal_offset=offset,
        window_left=left,
        window_right=right,
        softmax_scale=contract.scale_of(softmax_scale, sizes["head_dim"]),
        strides=tuple(
            None
            if argument.name in absent
            else place(argument, arrays.get(argument.name), symbols, dtype).strides
            for argument in operator_for(score).arguments
        ),
        batched=cu_seqlens_q is None,
        device=q.device,
        splits=splits,
        score=score,
        score_scalars=tuple(math.nan for _ in score.scalars) if score else (),
        score_sizes=score_sizes,
    )
    if any(value is not None for value in score_scalars):
        return problem.with_scalars((None, *score_scalars))
    return problem


def _check_combination(given: Mapping[str, ArrayView]) -> None:
    """That the arrays of lengths say one thing."""
    if "cu_seqlens_kv" in given:
        for other in ("kv_lengths", "index", "pages"):
            if other in given:
                raise BadParam(f"cu_seqlens_kv and {other} were given; packed keys have no {other}")
    if "pages" in given and "index" in given:
        raise BadParam("pages and index were given; each row of pages is a sequence's already")
    for needs in ("pages", "index"):
        if needs in given and "kv_lengths" not in given:
            raise NullPointer(f"{needs} needs kv_lengths, the keys of each sequence, which is None")


def _check_lengths(given: Mapping[str, ArrayView], q: ArrayView) -> int:
    """That the arrays of lengths have their dtype and shape, and the batch, on which they agree."""
    batches = {} if "cu_seqlens_q" in given or len(q.shape) != 4 else {"q": q.shape[0]}
    for name, view in given.items():
        if view.dtype != "int32":
            raise BadTensorDtype(f"{name} has dtype {view.dtype}; expected int32")
        expected = _SHAPES.get(name, ("batch",))
        if len(view.shape) != len(expected):
            raise BadTensorShape(f"{name} has shape {view.shape}; expected {shown_shape(expected)}")
        if name.startswith("cu") and not view.shape[0]:
            raise BadTensorShape(f"{name} has shape (0,); expected (batch + 1,), with a 0 ahead")
        batches[name] = view.shape[0] - name.startswith("cu")
    (first, batch), *others = batches.items()
    for name, found in others:
        if found != batch:
            raise BadTensorShape(f"{name} is for a batch of {found} but {first} for one of {batch}")
    return batch


def _sizes(
    q: ArrayView, k: ArrayView, v: ArrayView, given: Mapping[str, ArrayView], batch: int
) -> dict[str, int]:
    """The sizes of the symbols in the shapes of q, k, v and pages."""
    layouts = {
        "q": ("tokens", "num_heads_q") if "cu_seqlens_q" in given else ("batch", "seqlen_q", "num_heads_q"),
        "k": ("tokens", "num_heads_kv")
        if "cu_seqlens_kv" in given
        else ("pages", "page_size", "num_heads_kv")
        if "pages" in given
        else ("batch", "capacity", "num_heads_kv"),
    }
    for name, view in (("q", q), ("k", k), ("v", v)):
        layout = layouts["q" if name == "q" else "k"]
        if len(view.shape) != len(layout) + 1:
            hint = ""
            if len(view.shape) == 3 and (name == "q" or "kv_lengths" not in given):
                hint = f"; packed {'queries need cu_seqlens_q' if name == 'q' else 'keys need cu_seqlens_kv'}"
                if name == "q" and view.shape[0] == batch:
                    hint += ", and one query of each sequence goes in as q[:, None]"
            raise BadTensorShape(
                f"{name} has shape {view.shape}; with {', '.join(given)} it is "
                f"{shown_shape((*layout, 'head_dim'))}{hint}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise BadTensorShape(
            f"v has shape {v.shape} but k has {k.shape}; all but the last dimension must be the same"
        )
    batch_q, rows_q, heads_q, head_dim = q.shape if len(q.shape) == 4 else (1, *q.shape)
    batch_kv, rows_kv, heads_kv, head_dim_kv = k.shape if len(k.shape) == 4 else (1, *k.shape)
    if head_dim_kv != head_dim:
        raise BadTensorShape(f"k has head_dim {head_dim_kv} but q has {head_dim}; they must be the same")
    if not {"cu_seqlens_kv", "pages", "index"} & given.keys() and batch_kv != batch:
        raise BadTensorShape(
            f"k has batch {batch_kv}, and there are {batch} sequences; index says which rows of a cache "
            "they have"
        )
    return {
        "batch": batch,
        "num_heads_q": heads_q,
        "num_heads_kv": heads_kv,
        "head_dim": head_dim,
        "head_dim_v": v.shape[-1],
        "batch_q": batch_q,
        "rows_q": rows_q,
        "batch_kv": batch_kv,
        "rows_kv": rows_kv,
        "max_pages": given["pages"].shape[1] if "pages" in given else 0,
    }


def _capacity(batch: int, batch_kv: int, rows_kv: int, pages: int | None) -> int:
    """The most keys of a sequence, which has ``pages`` of rows_kv keys each, or one entry of k. A batch of no
    sequences needs none of these, and its mask has the columns of any other batch.
    """
    return rows_kv * (1 if pages is None else pages) if batch_kv or not batch else 0


def _bound(name: str, given: Any, most: int, fixed: bool) -> int:
    """The bound of a length: what the caller says, at most what the arrays hold."""
    bound = length_bound(name, given.bound if isinstance(given, Expected) else given)
    if bound is None:
        return most
    if bound < 0 or (fixed and bound != most):
        what = f"{most}, the queries of each sequence" if fixed else "0 or more"
        raise BadParam(f"{name} is {bound}; expected {what}")
    return min(bound, most)


def _check_mask(
    mask: ArrayView, given: Mapping[str, ArrayView], sizes: Mapping[str, int], bounded: bool
) -> None:
    """That a dense mask has a row for each query of each sequence, and a column for each key: as many as
    max_seqlen_kv, if the call has it (``bounded``).
    """
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        if name in given:
            raise BadParam(
                f"mask and {name} were given; a mask needs as many rows and columns for each sequence: pass "
                "queries that are padded, not packed, and keys that are padded or in a KVCache"
            )
    columns = "max_seqlen_kv" if bounded else "the keys that a sequence has room for"
    with naming(**{"seqlen_kv itself": f"{columns}, {sizes['seqlen_kv']}"}):
        contract.check_mask(mask, sizes, instead="leave it out, as kv_lengths say the same")


def _check_score_arrays(
    score: Score | None, views: Mapping[str, ArrayView], sizes: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """As `contract.check_score_arrays`; an error says what sizes the sequences give an array."""
    try:
        return contract.check_score_arrays(score, views, sizes)
    except BadTensorShape as error:
        symbols = {symbol for param in score.arrays for symbol in param.symbols}
        if symbols.isdisjoint(("seqlen_q", "seqlen_kv")):
            raise
        raise BadTensorShape(
            f"{error}. With lengths seqlen_q and seqlen_kv are max_seqlen_q and max_seqlen_kv, or the rows "
            "that q has and the keys that k has room for, where these are fewer"
        ) from None


def _band(
    causal: bool,
    mask_type: int | str | None,
    window_size: tuple[int, int],
    has_mask: bool,
    sizes: Mapping[str, int],
    most_keys: int | None,
) -> tuple[str, int, int, int]:
    """The mask type that a kernel must implement, and the band of a sequence of these sizes.

    All bands are aligned with the ends of their sequences. A side is unbounded where that hides nothing from
    a sequence of up to seqlen_q queries and ``most_keys`` keys; None: of any number of keys.
    """
    seqlen_q = sizes["seqlen_q"]
    name = maskoptions.mask_type_name(mask_type)
    if name == "causal_top_left":
        raise BadParam(
            f"mask_type is {name!r}; sequences of several lengths take 'causal_bottom_right' or a window"
        )
    kind, offset, left, right = maskoptions.mask_semantics(
        causal, mask_type, window_size, has_mask, seqlen_q, sizes["seqlen_kv"]
    )
    if right >= seqlen_q - 1:
        right = UNBOUNDED
    if most_keys is not None and left >= most_keys - 1:
        left = UNBOUNDED
    if kind == "dense":
        return kind, offset, left, right
    if left < UNBOUNDED:
        return "local", offset, left, right
    if right < UNBOUNDED:
        return "causal", offset + right, UNBOUNDED, 0
    return "none", 0, UNBOUNDED, UNBOUNDED


def _check_elements(problem: VarlenProblem, lengths: Mapping[str, np.ndarray | None]) -> None:
    from flashgen.operators.sequences import sequences

    sequences(problem, lengths)


VARLEN = Operator(
    name="varlen",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=SCALARS,
    axes={
        **ATTENTION.axes,
        "pages": Axis(lambda problem, value: (value == "paged") == problem.paged, PAGES, default="none"),
    },
    grid_dimensions=(*ATTENTION.grid_dimensions, "sequence_rows"),
    normalise=attention.by_name(normalise, ARGUMENTS, OPTIONS, without=("lse",)),
    elements_checked=LENGTH_ARRAYS,
    check_elements=_check_elements,
)


def operator_for(score: Score | None) -> Operator:
    """``varlen`` with that score modification, if any."""
    return VARLEN if score is None else attention.modified(VARLEN, score)


_OWN_SIZES = ("batch", "seqlen_q", "seqlen_kv", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")
