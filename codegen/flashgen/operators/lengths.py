"""Lengths of sequences that only a kernel reads, as int32 on the device: what a call of attention says of
them, and their part of its contract.

Queries are packed one sequence after another (``cu_seqlens_q``), or padded: all sequences have as many. Keys
are packed (``cu_seqlens_kv``), padded (``kv_lengths``), rows of a cache (``index``), or pages of one
(``pages``). Except for packed keys, the keys of a sequence may begin after the first row (``kv_starts``).
Nothing on the host reads a length: a problem has bounds, which fix grids and workspaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, NullPointer, arg, naming
from flashgen.operators import contract, maskoptions
from flashgen.operators.arguments import (
    WHOLE_INT32,
    Argument,
    Expected,
    length_bound,
    shown,
    shown_shape,
)
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.rules import PackedTokens
from flashgen.operators.splits import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.scores import Score
    from flashgen.operators.splits import Splits

# Whether a kernel reads the keys of a sequence as rows one after another, or from pages.
PAGES = ("none", "paged")
# Whether a kernel reads where the keys of each sequence begin.
STARTS = ("none", "starts")
_INTEGERS = {**WHOLE_INT32, "optional": True}
ARGUMENTS = (
    Argument("cu_seqlens_q", "input", "boundaries", **_INTEGERS),
    Argument("cu_seqlens_kv", "input", "boundaries", **_INTEGERS),
    Argument("kv_lengths", "input", "batch", **_INTEGERS),
    Argument("index", "input", "batch", **_INTEGERS),
    Argument("pages", "input", "batch max_pages", **(_INTEGERS | {"layout": "rows"})),
)
# The first key of each sequence. The last argument of attention: it came after the others.
KV_STARTS = Argument("kv_starts", "input", "batch", **_INTEGERS)
LENGTH_ARRAYS = (*(argument.name for argument in ARGUMENTS), KV_STARTS.name)
# Arrays of a cache, which has no gradients.
CACHE_ARRAYS = ("index", "pages")
BOUNDS = ("max_seqlen_q", "max_seqlen_kv")
_SHAPES = {
    "cu_seqlens_q": ("batch + 1",),
    "cu_seqlens_kv": ("batch + 1",),
    "pages": ("batch", "max_pages"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How the sequences of a call share its arrays.

    ``batch_q`` and ``rows_q``, ``batch_kv`` and ``rows_kv`` are the first two extents of the arrays: 1 and
    all tokens where sequences are packed, pages and their size where there are pages. ``max_pages`` is the
    pages that a sequence may have, 0 without pages. ``most_keys`` is the length to which kernels cut keys:
    the bound ``seqlen_kv`` of the problem, or all that the arrays hold where that is only `Expected`.
    """

    batch_q: int
    rows_q: int
    batch_kv: int
    rows_kv: int
    max_pages: int
    most_keys: int
    packed_q: bool
    packed_kv: bool
    paged: bool

    def sizes_of(self, batch: int) -> dict[str, int]:
        """The size of each symbol that only calls with lengths have."""
        return {
            "batch_q": self.batch_q,
            "rows_q": self.rows_q,
            "batch_kv": self.batch_kv,
            "rows_kv": self.rows_kv,
            "boundaries": batch + 1,
            "max_pages": self.max_pages,
        }

    def symbol_name(self, symbol: str) -> str:
        """What a caller calls a symbol."""
        rows_kv = "tokens" if self.packed_kv else "page_size" if self.paged else "seqlen_kv"
        names = {
            "batch_q": "batch",
            "rows_q": "tokens" if self.packed_q else "seqlen_q",
            "batch_kv": "pages" if self.paged else "batch",
            "rows_kv": rows_kv,
        }
        return names.get(symbol, symbol)

    @property
    def packed_tokens(self) -> PackedTokens:
        """The tokens of q and k, where they are packed."""
        of_q = self.rows_q if self.packed_q else None
        return PackedTokens(of_q, self.rows_kv if self.packed_kv else None)

    def capacity(self, batch: int) -> int:
        """The most keys that a sequence of a batch can have."""
        return _capacity(batch, self.batch_kv, self.rows_kv, self.max_pages if self.paged else 1)


def missing(argument: Argument, lengths: Lengths | None, batched: bool) -> int:
    """How many dimensions of an argument the caller leaves out: the batch of packed rows, or of a call
    without lengths that is not ``batched``.
    """
    if lengths is None:
        return int(argument.leads_with_batch and not batched)
    packed = {"batch_q": lengths.packed_q, "batch_kv": lengths.packed_kv}
    return int(packed.get(argument.symbols[0] if argument.symbols else "", False))


def read(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    arrays: Mapping[str, ArrayView],
    max_seqlen_q: int | Expected | None,
    max_seqlen_kv: int | Expected | None,
    splits: Splits,
) -> tuple[dict[str, int], Lengths]:
    """The sizes of a call, whose ``seqlen_q`` and ``seqlen_kv`` are bounds, and how its sequences share its
    arrays; ``arrays`` has the arrays of lengths, one at least. An `Expected` bound cuts no packed queries
    if there are more tokens than it allows.

    Raises BadParam, NullPointer, BadTensorDtype or BadTensorShape.
    """
    _check_combination(arrays)
    packed_q, invariant = "cu_seqlens_q" in arrays, splits != AUTO
    if invariant and packed_q and max_seqlen_q is None:
        raise BadParam(
            f"{arg('splits')} is {splits} and {arg('max_seqlen_q')} is None; with packed queries pass "
            f"{arg('max_seqlen_q')}, the same for all calls whose bits must agree: the kernel is chosen by it"
        )
    batch = _check_lengths(arrays, q)
    of_rows = _checked_shapes(q, k, v, arrays, batch)
    batch_q, rows_q = q.shape[:-2] if len(q.shape) == 4 else (1, q.shape[0])
    batch_kv, rows_kv = k.shape[:-2] if len(k.shape) == 4 else (1, k.shape[0])
    paged = "pages" in arrays
    max_pages = arrays["pages"].shape[1] if paged else 0
    capacity = _capacity(batch, batch_kv, rows_kv, max_pages if paged else 1)
    seqlen_q = _bound("max_seqlen_q", max_seqlen_q, rows_q, fixed=not packed_q)
    if isinstance(max_seqlen_q, Expected) and batch * seqlen_q < rows_q:
        seqlen_q = rows_q
    if invariant and packed_q:
        # Also above the tokens that there are: a few of them would choose another kernel.
        seqlen_q = _bound("max_seqlen_q", max_seqlen_q, contract.MAX_SEQLEN, fixed=False)
    seqlen_kv = _bound("max_seqlen_kv", max_seqlen_kv, capacity, fixed=False)
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv} | of_rows
    return sizes, Lengths(
        batch_q=batch_q,
        rows_q=rows_q,
        batch_kv=batch_kv,
        rows_kv=rows_kv,
        max_pages=max_pages,
        most_keys=capacity if isinstance(max_seqlen_kv, Expected) else seqlen_kv,
        packed_q=packed_q,
        packed_kv="cu_seqlens_kv" in arrays,
        paged=paged,
    )


def refuse_bounds(max_seqlen_q: Any, max_seqlen_kv: Any) -> None:
    """Raise BadParam for a bound in a call without lengths."""
    for name, bound in zip(BOUNDS, (max_seqlen_q, max_seqlen_kv), strict=True):
        if bound is not None:
            raise BadParam(
                f"{arg(name)} is {shown(bound)}, but no lengths were given; it is a bound of "
                f"{arg('kv_lengths')}, {arg('cu_seqlens_q')} and {arg('cu_seqlens_kv')}"
            )


def _check_combination(arrays: Mapping[str, ArrayView]) -> None:
    """That the arrays of lengths have what they need."""
    for needs in ("pages", "index"):
        if needs in arrays and "kv_lengths" not in arrays:
            raise NullPointer(
                f"{arg(needs)} needs {arg('kv_lengths')}, the keys of each sequence, which is None"
            )


def _check_lengths(arrays: Mapping[str, ArrayView], q: ArrayView) -> int:
    """That the arrays of lengths have their dtype and shape, and the batch, on which they agree."""
    batches = {} if "cu_seqlens_q" in arrays or len(q.shape) != 4 else {"q": q.shape[0]}
    for name, view in arrays.items():
        if view.dtype != "int32":
            raise BadTensorDtype(f"{arg(name)} has dtype {view.dtype}; expected int32")
        expected = _SHAPES.get(name, ("batch",))
        if len(view.shape) != len(expected):
            raise BadTensorShape(f"{arg(name)} has shape {view.shape}; expected {shown_shape(expected)}")
        if name.startswith("cu") and not view.shape[0]:
            raise BadTensorShape(f"{arg(name)} has shape (0,); expected (batch + 1,), with a 0 first")
        batches[name] = view.shape[0] - name.startswith("cu")
    (first, batch), *others = batches.items()
    for name, size in others:
        if size != batch:
            raise BadTensorShape(f"{arg(name)} is for a batch of {size} but {arg(first)} for one of {batch}")
    return batch


def _checked_shapes(
    q: ArrayView, k: ArrayView, v: ArrayView, arrays: Mapping[str, ArrayView], batch: int
) -> dict[str, int]:
    """The heads and head dims of q, k and v, which have the shapes that the arrays of lengths say."""
    layouts = {
        "q": ("tokens", "num_heads_q") if "cu_seqlens_q" in arrays else ("batch", "seqlen_q", "num_heads_q"),
        "k": ("tokens", "num_heads_kv")
        if "cu_seqlens_kv" in arrays
        else ("pages", "page_size", "num_heads_kv")
        if "pages" in arrays
        else ("batch", "capacity", "num_heads_kv"),
    }
    for name, view in (("q", q), ("k", k), ("v", v)):
        layout = layouts["q" if name == "q" else "k"]
        if len(view.shape) != len(layout) + 1:
            hint = ""
            if len(view.shape) == 3 and (name == "q" or "kv_lengths" not in arrays):
                needed = "cu_seqlens_q" if name == "q" else "cu_seqlens_kv"
                hint = f"; packed {'queries' if name == 'q' else 'keys'} need {arg(needed)}"
                if name == "q" and view.shape[0] == batch:
                    hint += f", and one query of each sequence goes in as {arg('q')}[:, None]"
            raise BadTensorShape(
                f"{arg(name)} has shape {view.shape}; with {arg(', '.join(arrays))} it is "
                f"{shown_shape((*layout, 'head_dim'))}{hint}"
            )
    sizes = contract.sizes_of_rows(q, k, v)
    batch_kv = k.shape[0] if len(k.shape) == 4 else 1
    if not {"cu_seqlens_kv", "pages", "index"} & arrays.keys() and batch_kv != batch:
        raise BadTensorShape(
            f"{arg('k')} has batch {batch_kv}, and there are {batch} sequences; {arg('index')} says which "
            "rows of a cache they have"
        )
    return sizes


def _capacity(batch: int, batch_kv: int, rows_kv: int, pages: int) -> int:
    """The most keys of a sequence: of its pages, or of its one entry of k. A batch of no sequences needs none
    of these, and its mask has the columns of any other batch.
    """
    return rows_kv * pages if batch_kv or not batch else 0


def _bound(name: str, bound: Any, most: int, fixed: bool) -> int:
    """The bound of a length: what the caller says, at most what the arrays hold."""
    bound = length_bound(name, bound.bound if isinstance(bound, Expected) else bound)
    if bound is None:
        return most
    if bound < 0 or (fixed and bound != most):
        what = f"{most}, the queries of each sequence" if fixed else "0 or more"
        raise BadParam(f"{arg(name)} is {shown(bound)}; expected {what}")
    return min(bound, most)


def check_mask(mask: ArrayView, sizes: Mapping[str, int], bounded: bool) -> None:
    """That a dense mask has a row for each query of each sequence, and a column for each key: as many as
    max_seqlen_kv, if the call has it (``bounded``).
    """
    columns = arg("max_seqlen_kv") if bounded else "the keys that a sequence has room for"
    with naming({"columns of mask": f"{columns}, {sizes['seqlen_kv']}"}):
        contract.check_mask(mask, sizes, instead=f"leave it out, as {arg('kv_lengths')} say the same")


def check_score_arrays(
    score: Score | None, views: Mapping[str, ArrayView], sizes: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """As `contract.check_score_arrays`; an error also says what seqlen_q and seqlen_kv mean with lengths."""
    try:
        return contract.check_score_arrays(score, views, sizes)
    except BadTensorShape as error:
        symbols = {symbol for param in score.arrays for symbol in param.symbols}
        if symbols.isdisjoint(("seqlen_q", "seqlen_kv")):
            raise
        raise BadTensorShape(
            f"{error.message}. With lengths seqlen_q and seqlen_kv are {arg('max_seqlen_q')} and "
            f"{arg('max_seqlen_kv')}, or the rows that q has and the keys that k has room for, where these "
            "are fewer"
        ) from None


def band(
    options: maskoptions.MaskOptions,
    seqlen_q: int,
    seqlen_kv: int,
    most_keys: int | None,
    kernel_mask: str | None = None,
) -> maskoptions.KernelMask:
    """The mask that a kernel must implement, with the band of a sequence of these lengths.

    Bands are aligned with the ends of their sequences. A side becomes unbounded if it hides no key from any
    sequence of up to seqlen_q queries and ``most_keys`` keys; None stands for any number of keys.
    ``kernel_mask`` is the mask type of a call with a mask by a line or a tree, which may also have a band.
    """
    name = maskoptions.mask_type_name(options.mask_type)
    if name == "causal_top_left":
        raise BadParam(
            f"{arg('mask_type')} is {name!r}; sequences of several lengths take "
            "'causal_bottom_right' or a window"
        )
    kind, offset, left, right = maskoptions.mask_semantics(options, seqlen_q, seqlen_kv)
    if right >= seqlen_q - 1:
        right = UNBOUNDED
    if most_keys is not None and left >= most_keys - 1:
        left = UNBOUNDED
    if kind == "dense" or kernel_mask:
        return maskoptions.KernelMask(kernel_mask or kind, offset, left, right)
    if left < UNBOUNDED:
        return maskoptions.KernelMask("local", offset, left, right)
    if right < UNBOUNDED:
        return maskoptions.KernelMask("causal", offset + right, UNBOUNDED, 0)
    return maskoptions.KernelMask("none", 0, UNBOUNDED, UNBOUNDED)
