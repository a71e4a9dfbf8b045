"""Random problems of attention for one variant, in memory where all that belongs to no sequence is NaN."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.errors import BadParam
from flashgen.operators import blocklists
from flashgen.operators.arguments import Expected
from flashgen.operators.attention import normalise
from flashgen.operators.kvcodes import SCALES, TOKEN
from flashgen.operators.lengths import LENGTH_ARRAYS
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.reference import Largest, Verdict, judge
from flashgen.operators.rules import PackedTokens
from flashgen.operators.sequences import arrays_of, sequences
from flashgen.operators.splits import AUTO
from flashgen.operators.trees import MAX_DRAFTS
from flashgen.operators.visibility import visibility_of
from flashgen.simulator import randomarrays, randomlines, randomlists
from flashgen.simulator.example import random_rows, rows_within_nan, view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from flashgen.families.variant import Variant
    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.operators.splits import Splits
    from flashgen.simulator.example import Shape, Window

# Rows of a packed array after its last sequence.
ROWS_AFTER = (0, 1, 2, 3)
_PAGE_SIZES = (1, 3, 16, 48, 64, 256)
# Of a variant for calls that say a number of splits, where the shape says none.
_SPLITS = 3


@dataclass(frozen=True)
class AttentionExample:
    """A problem with its arrays in host memory. bfloat16 elements are their bits in uint16; ``mask`` may be
    None. ``lengths`` has the arrays of lengths of a call that has some, None for those that it lacks;
    ``others`` has the other optional inputs that the variant reads.
    """

    problem: AttentionProblem
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None
    out: np.ndarray
    lse: np.ndarray | None
    score_arrays: tuple[np.ndarray, ...] = ()
    lengths: dict[str, np.ndarray | None] = field(default_factory=dict)
    others: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """All arrays, in the operator's order."""
        return self.problem.operator.in_order(**self._without_lengths, **self.lengths)

    @property
    def _without_lengths(self) -> dict[str, np.ndarray | None]:
        """All arrays but lengths by name."""
        params = self.problem.score.arrays if self.problem.score else ()
        named = {name: getattr(self, name) for name in ("q", "k", "v", "mask", "out", "lse")}
        named |= {param.name: x for param, x in zip(params, self.score_arrays, strict=True)}
        return named | self.others

    @property
    def described(self) -> dict[str, Any]:
        """The sizes of the problem, for a report."""
        return described(self.problem, self.q)

    def judge(self) -> Verdict:
        """How far the outputs are from float64: the worst of all sequences. Rows outside all sequences must
        still be NaN.
        """
        problem, arrays = self.problem, self._without_lengths
        if problem.lengths is None:
            return judge(problem, arrays)
        return worst_of_sequences(problem, self.lengths, arrays)


def worst_of_sequences(
    problem: AttentionProblem,
    lengths: dict[str, np.ndarray | None],
    arrays: dict[str, np.ndarray | None],
    arrays_of: Callable[..., dict[str, np.ndarray | None]] = arrays_of,
    judge: Callable[..., Verdict] = judge,
) -> Verdict:
    """The worst verdict on the sequences of a problem with these ``lengths`` and other arrays. Rows outside
    all sequences must still be NaN. The functions are as `sequences.arrays_of` and `reference.judge`.
    """
    out = arrays["out"][None] if problem.lengths.packed_q else arrays["out"]
    untouched = np.ones(out.shape[:2], bool)
    worst, line = [], visibility_of(problem, arrays)
    for sequence in sequences(problem, lengths):
        part = problem.of_sequence(sequence.q_length, sequence.kv_length)
        rule = {} if line is None else {"rule": line.of_sequence(sequence, problem)}
        worst.append(judge(part, arrays_of(problem, sequence, arrays), **rule))
        untouched[sequence.queries()] = False
    left = np.ascontiguousarray(out)[untouched].view(np.uint8)
    if not (left == 0xFF).all():
        worst.append(Verdict(Largest(np.inf, np.nan, 0.0, ()), None))
    return worst_of(worst, arrays["lse"] is not None)


def worst_of(verdicts: Iterable[Verdict], has_lse: bool) -> Verdict:
    """The worst elements of all parts of a call."""
    verdicts = [*verdicts]
    of_lse = (x.lse for x in verdicts if x.lse is not None)
    nothing = Largest(0.0, 0.0, 0.0, ())
    return Verdict(
        max((x.out for x in verdicts), key=lambda x: x.share, default=nothing),
        max(of_lse, key=lambda x: x.share, default=nothing) if has_lse else None,
    )


def described(problem: AttentionProblem, q: np.ndarray) -> dict[str, Any]:
    """The sizes of a problem of attention, for a report."""
    sizes = {
        "shape": [problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim],
        "head_dim_v": problem.head_dim_v,
        "seqlen_kv": problem.seqlen_kv,
        "num_heads_kv": problem.num_heads_kv,
    }
    if problem.lengths is not None:
        sizes |= {"shape": list(q.shape), "sequences": problem.batch}
    return sizes


def make(variant: Variant, shape: Shape, seed: int) -> AttentionExample:
    """Normal random inputs for ``variant``; outputs, and what is between rows, are NaN.

    A variant with lengths gets sequences of random lengths up to the lengths in ``shape``, which the first
    sequence has. Queries and keys are packed or padded, as the seed will, or padded with a dense mask. The
    kernel may be chosen by fewer keys than sequences have, as the seed will. Packed rows after the last
    sequence, slots past a length and pages of no sequence are NaN, and entries of the page table past a
    length are garbage.

    Raises BadParam for sizes that are not the variant's: heads that it cannot group, a head dim that it does
    not hold, a window where its mask type has none, with lengths a diagonal that starts top left; and what
    the contract raises.
    """
    return (
        _with_lengths(variant, shape, seed) if variant.has_lengths else _without_lengths(variant, shape, seed)
    )


def _without_lengths(variant: Variant, shape: Shape, seed: int) -> AttentionExample:
    rng = np.random.default_rng(seed)
    head_dim, head_dim_v, kv_heads = check_sizes(variant, shape)
    q_shape = (shape.batch, shape.seqlen_q, shape.heads, head_dim)
    k_shape = (shape.batch, shape.seqlen_kv, kv_heads, head_dim)
    v_shape = (shape.batch, shape.seqlen_kv, kv_heads, head_dim_v)
    q, k, v = (
        random_rows(rng, size, variant.dtype, spread, shape.gap)
        for size, spread in ((q_shape, shape.spread), (k_shape, 1.0), (v_shape, 1.0))
    )
    out = rows_within_nan((*q_shape[:-1], head_dim_v), variant.dtype, shape.gap)
    lse = (
        np.full((shape.batch, shape.heads, shape.seqlen_q), np.nan, np.float32) if shape.return_lse else None
    )
    mask = randomarrays.random_mask(rng, shape) if variant.mask_type == "dense" else None
    views = [view_of(x, variant.dtype) for x in (q, k, v, out)]
    score_arrays = randomarrays.score_arrays_of(rng, variant.score, sizes_of_scores(shape))
    lists, block_size = randomlists.lists_of(rng, variant, shape, kv_heads)
    line, of_line = randomlines.line_of(rng, variant, sizes_of_scores(shape))
    others = inputs_read(rng, variant, shape) | lists
    problem = normalise(
        *views[:3],
        **block_size,
        **line,
        out=views[3],
        mask=None if mask is None else view_of(mask, "uint8"),
        return_lse=shape.return_lse,
        splits=shape.splits,
        **randomarrays.dropout_of_call(rng, others),
        **randomarrays.array_views(others),
        **randomarrays.score_of_call(rng, variant.score, score_arrays),
    )
    problem, lists = randomlines.with_lists(masked(problem, variant, shape), variant, of_line)
    others |= of_line | lists
    return AttentionExample(problem, q, k, v, mask, out, lse, score_arrays, others=others)


class Sequences(NamedTuple):
    """Arrays of sequences of random lengths, and which of them are packed."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    lse: np.ndarray | None
    lengths: dict[str, np.ndarray | None]
    packed_q: bool
    used: np.ndarray | None  # rows of k and v; None: all


def random_sequences(
    rng: np.random.Generator, variant: Variant, shape: Shape, kv_dtype: str, out_dtype: str
) -> Sequences:
    """Arrays for a variant with lengths, as `make` says."""
    head_dim, head_dim_v, kv_heads = check_sizes(variant, shape)
    batch, dtype = shape.batch, variant.dtype
    q_lengths, kv_lengths = (
        randomarrays.random_lengths(rng, batch, most) for most in (shape.seqlen_q, shape.seqlen_kv)
    )
    lengths: dict[str, np.ndarray | None] = dict.fromkeys(LENGTH_ARRAYS)
    dense = variant.mask_type == "dense"
    starts = variant.axis("kv_starts") == "starts"
    if starts:
        lengths["kv_starts"] = randomarrays.random_starts(rng, kv_lengths)
    packed_q = bool(rng.integers(2)) and not dense
    if packed_q:
        q_rows, used = randomarrays.packed(rng, lengths, "cu_seqlens_q", q_lengths, ROWS_AFTER)
    else:
        q_rows, used = (batch, shape.seqlen_q), None
    q = randomarrays.used_rows(rng, (*q_rows, shape.heads, head_dim), used, dtype, shape.spread, shape.gap)
    if variant.axis("pages") == "paged":
        kv_rows, used = randomarrays.paged(rng, lengths, kv_lengths, page_sizes_of(variant))
    elif variant.axis_values.get("kv_scales") != TOKEN and rng.integers(2) and not dense and not starts:
        kv_rows, used = randomarrays.packed(rng, lengths, "cu_seqlens_kv", kv_lengths, ROWS_AFTER)
    else:
        kv_rows, used = randomarrays.cache_rows(
            rng, lengths, kv_lengths, shape, variant.axis("dropout") == "none"
        )
    k, v = (
        randomarrays.used_rows(rng, (*kv_rows, kv_heads, width), used, kv_dtype, 1.0, shape.gap)
        for width in (head_dim, head_dim_v)
    )
    out = rows_within_nan((*q_rows, shape.heads, head_dim_v), out_dtype, shape.gap)
    lse = np.full((q_rows[0], shape.heads, q_rows[1]), np.nan, np.float32) if shape.return_lse else None
    if packed_q:
        q, out, lse = q[0], out[0], None if lse is None else lse[0]
    if lengths["cu_seqlens_kv"] is not None:
        k, v = k[0], v[0]
    return Sequences(q, k, v, out, lse, lengths, packed_q, used)


def _with_lengths(variant: Variant, shape: Shape, seed: int) -> AttentionExample:
    rng = np.random.default_rng(seed)
    has_tree = variant.mask_type == "tree"
    if has_tree:
        shape = dataclasses.replace(shape, seqlen_q=min(shape.seqlen_q, MAX_DRAFTS))
    batch, dtype, dense = shape.batch, variant.dtype, variant.mask_type == "dense"
    kv_dtype = dtype if variant.axis("kv_dtype") == "none" else str(variant.axis("kv_dtype"))
    q, k, v, out, lse, lengths, packed_q, used = random_sequences(rng, variant, shape, kv_dtype, dtype)
    kv_heads = k.shape[-2]
    score_arrays = randomarrays.score_arrays_of(rng, variant.score, sizes_of_scores(shape))
    others = inputs_read(rng, variant, shape)
    if variant.axis("kv_scales") == TOKEN:
        others |= randomarrays.scales_of_tokens(rng, used, k.shape[:2], kv_heads)
    else:
        scales = randomarrays.scales_of(rng, variant, batch, kv_heads)
        others |= {name: scale[:, None] for name, scale in scales.items()}
    if has_tree:
        others["tree"] = rng.integers(-(2**63), 2**63, q.shape[:-2], np.int64)
    # What an array has an element for: of a call without bounds the operator takes larger ones.
    bounded = {
        symbol for param in (variant.score.arrays if variant.score else ()) for symbol in param.symbols
    }
    line, of_line = randomlines.line_of(rng, variant, sizes_of_scores(shape), tokens_of(q, k, lengths))
    if variant.rule is not None:
        bounded |= {"seqlen_q", "seqlen_kv"}
    mask = randomarrays.random_mask(rng, shape) if dense else None
    splits = splits_for(variant, shape)
    # A caller has scales without the dimension of one element, and without rows where no token has its own.
    of_caller = others | {
        name: others[name][..., 0].squeeze(() if variant.axis("kv_scales") == TOKEN else 1)
        for name in SCALES
        if name in others
    }
    problem = normalise(
        *(view_of(x, of) for x, of in ((q, dtype), (k, kv_dtype), (v, kv_dtype))),
        **{name: None if x is None else view_of(x, "int32") for name, x in lengths.items()},
        mask=None if mask is None else view_of(mask, "uint8"),
        out=view_of(out, dtype),
        window_size=window_for(variant, shape),
        max_seqlen_q=shape.seqlen_q
        if (packed_q and (splits != AUTO or has_tree)) or "seqlen_q" in bounded
        else None,
        max_seqlen_kv=shape.seqlen_kv
        if dense or "seqlen_kv" in bounded
        else expected_keys(rng, shape, splits),
        return_lse=shape.return_lse,
        splits=splits,
        **randomarrays.dropout_of_call(rng, others),
        **randomarrays.array_views(of_caller),
        **line,
        **randomarrays.score_of_call(rng, variant.score, score_arrays),
    )
    problem = masked(problem, variant, shape)
    return AttentionExample(problem, q, k, v, mask, out, lse, score_arrays, lengths, others | of_line)


def tokens_of(q: np.ndarray, k: np.ndarray, lengths: Mapping[str, np.ndarray | None]) -> PackedTokens:
    """How many tokens q and k have where their sequences are packed."""
    of_q, of_k = (
        None if lengths[f"cu_seqlens_{name}"] is None else len(x) for name, x in (("q", q), ("kv", k))
    )
    return PackedTokens(of_q, of_k)


def splits_for(variant: Variant, shape: Shape) -> Splits:
    """What a call for ``variant`` says of splits."""
    fixed = variant.axis("splits") == "fixed" and shape.splits == AUTO
    return _SPLITS if fixed else shape.splits


def page_sizes_of(variant: Variant) -> list[int]:
    """The sizes of pages to draw from, of which a variant takes all."""
    boxes = [param.box.rows for param in variant.params if param.name == "k" and param.box]
    return [size for size in _PAGE_SIZES if not any(size % rows for rows in boxes)]


def inputs_read(rng: np.random.Generator, variant: Variant, shape: Shape) -> dict[str, np.ndarray]:
    """Random arrays for the optional inputs that a problem of attention draws by their row of the table."""
    drawn_apart = ("mask", "dlse", "tree", "q_scale", "out_scale", *LENGTH_ARRAYS, *blocklists.NAMES, *SCALES)
    return randomarrays.inputs_read(rng, variant, sizes_of_scores(shape), drawn_apart)


def sizes_of_scores(shape: Shape) -> dict[str, int]:
    """The extents of scores, of which arrays of a score modification have some."""
    sizes = {"batch": shape.batch, "num_heads_q": shape.heads}
    return sizes | {"seqlen_q": shape.seqlen_q, "seqlen_kv": shape.seqlen_kv}


def check_sizes(variant: Variant, shape: Shape) -> tuple[int, int, int]:
    """head_dim, head_dim_v and kv heads of a problem for ``variant``. Raises BadParam as `make`."""
    head_dim = variant.head_dim if shape.head_dim is None else shape.head_dim
    head_dim_v = min(head_dim, variant.head_dim_v) if shape.head_dim_v is None else shape.head_dim_v
    held = {"head_dim": (head_dim, variant.head_dim), "head_dim_v": (head_dim_v, variant.head_dim_v)}
    for name, (width, most) in held.items():
        if width > most:
            raise BadParam(f"{name} is {width}, and {variant.name} holds at most {most}")
    _check_window(variant, shape.window)
    return head_dim, head_dim_v, _kv_heads(variant, shape)


def _kv_heads(variant: Variant, shape: Shape) -> int:
    if variant.gqa == "mha":
        kv_heads = shape.heads if shape.kv_heads is None else shape.kv_heads
        if kv_heads != shape.heads:
            raise BadParam(f"{variant.name} has one query head to a kv head, not {shape.heads} to {kv_heads}")
        return kv_heads
    return 1 if shape.kv_heads is None else shape.kv_heads


def _check_window(variant: Variant, window: Window | None) -> None:
    if window is None:
        return
    if variant.mask_type not in ("local", "dense", "blocks", "tree"):
        raise BadParam(
            f"window is {window}, and {variant.name} has mask type {variant.mask_type}; "
            "a window needs a variant of mask type local, dense, blocks or tree"
        )
    if min(window) < -1:
        raise BadParam(f"window is {window}; each side must be -1 (no bound), 0 or more")


def expected_keys(rng: np.random.Generator, shape: Shape, splits: Splits = AUTO) -> Expected | None:
    """A bound of keys that is smaller than ``shape.seqlen_kv`` and must cut no key; None for no bound."""
    return Expected(int(rng.integers(shape.seqlen_kv + 1))) if splits == AUTO and rng.integers(2) else None


def window_for(variant: Variant, shape: Shape) -> Window:
    """The window of a call for ``variant``. Raises BadParam for a diagonal that starts top left."""
    if shape.top_left:
        raise BadParam(
            f"{variant.name} takes sequences of several lengths, whose diagonals end bottom right; "
            "causal_top_left does not fit"
        )
    if variant.mask_type == "local" and variant.rule is None:
        return shape.window or (max(1, shape.seqlen_kv // 4), 0)
    if variant.mask_type == "causal":
        return (-1, 0)
    return shape.window or (-1, -1)


def masked(problem: AttentionProblem, variant: Variant, shape: Shape) -> AttentionProblem:
    """The problem with the variant's mask type, even where a simpler kernel would hide the same keys."""
    end = problem.seqlen_kv - problem.seqlen_q
    if problem.lengths is not None:
        if problem.mask_type == variant.mask_type or problem.rule is not None:
            return problem
        offset, left, right = end, problem.window_left, window_for(variant, shape)[1]
    elif variant.mask_type == "none" or (variant.mask_type in ("dense", "blocks") and shape.window is None):
        return problem
    else:
        window = (-1, 0) if variant.mask_type == "causal" else shape.window
        offset = 0 if shape.top_left else end
        left, right = window or (max(1, problem.seqlen_kv // 4), 0)
    left, right = (UNBOUNDED if side < 0 else side for side in (left, right))
    kind = "lines" if problem.rule else variant.mask_type
    return dataclasses.replace(
        problem, mask_type=kind, diagonal_offset=offset, window_left=left, window_right=right
    )
