"""Random problems of attention_backward for one variant, in memory where all that belongs to no sequence is
NaN.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.operators.backward import BACKWARD, INPUT_OF, LENGTH_ARRAYS, BackwardProblem, normalise
from flashgen.operators.dropout import dropout_of
from flashgen.operators.gradients import GradientVerdict, expected, judge
from flashgen.operators.masks import Band
from flashgen.operators.modification import modification_of
from flashgen.operators.numbers import bfloat16_bits, widened
from flashgen.operators.reference import Largest, attention, dense_mask, largest, sinks_of
from flashgen.operators.sequences import arrays_of, sequences
from flashgen.operators.visibility import visibility_of
from flashgen.simulator import randomarrays, randomlines, randomlists
from flashgen.simulator.attention_example import (
    check_sizes,
    described,
    expected_keys,
    inputs_read,
    masked,
    sizes_of_scores,
    window_for,
)
from flashgen.simulator.example import random_rows, rows_within_nan, view_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashgen.families.variant import Variant
    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.operators.sequences import Sequence
    from flashgen.simulator.example import Shape

# Rows of a packed array after its last sequence.
_ROWS_AFTER = (0, 1, 150)
_NOTHING = Largest(0.0, 0.0, 0.0, ())

Arrays = dict[str, np.ndarray | None]


@dataclass(frozen=True)
class BackwardExample:
    """A problem with its arrays in host memory, in the operator's order. bfloat16 elements are their bits in
    uint16; mask, dlse and arrays of lengths may be None.
    """

    problem: BackwardProblem
    arrays: tuple[np.ndarray | None, ...]

    def array(self, name: str) -> np.ndarray | None:
        """One of them by its name."""
        return self.arrays[self.problem.operator.position(name)]

    @property
    def described(self) -> dict[str, Any]:
        """The sizes of the problem, for a report."""
        return described(self.problem, self.array("q"))

    def sequences(self) -> list[Sequence]:
        """The sequences that the lengths say now, of a call with lengths."""
        return sequences(self.problem, {name: self.array(name) for name in LENGTH_ARRAYS})

    def of_sequence(self, sequence: Sequence) -> Arrays:
        """The part of a sequence in each array but lengths, by name, with a batch of one: views."""
        return arrays_of(self.problem, sequence, self._without_lengths)

    @property
    def _without_lengths(self) -> Arrays:
        """All arrays but lengths by name; a mask by a line of packed sequences has such arrays itself."""
        named = dict(zip(self.problem.operator.positions, self.arrays, strict=True))
        dropped = () if self.problem.lengths is None else LENGTH_ARRAYS
        return {name: x for name, x in named.items() if name not in dropped}

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the gradients that the call has."""
        operator = self.problem.operator
        return tuple(x.name for x in operator.arguments if x.is_output and self.problem.has(x.name))

    def _parts(self) -> Iterator[tuple[BackwardProblem, Arrays]]:
        """The problem of each sequence with its arrays; without lengths the whole call."""
        if self.problem.lengths is None:
            yield self.problem, self._without_lengths
            return
        for sequence in self.sequences():
            part = self.problem.of_sequence(sequence.q_length, sequence.kv_length)
            yield part, self.of_sequence(sequence)

    def forward(self) -> None:
        """Fill out and lse with the results that a forward call has for the lengths as they are now."""
        for part, arrays in self._parts():
            fill_forward(part, arrays)

    def judge(self) -> GradientVerdict:
        """How far the outputs are from float64: the worst of all sequences. Rows outside all sequences must
        have gradients of 0.
        """
        verdicts = [judge(part, arrays) for part, arrays in self._parts()]
        if self.problem.lengths is None:
            return verdicts[0]
        outside = self._outside_sequences()
        worst = {}
        for name in self.gradients:
            wrong = [Largest(np.inf, np.nan, 0.0, ())] if outside[name].view(np.uint8).any() else []
            of_sequences = [verdict.gradients[name] for verdict in verdicts]
            worst[name] = max([*of_sequences, *wrong], key=lambda x: x.share, default=_NOTHING)
        if "dsinks" in worst:  # a sum over all sequences
            of_parts = [expected(part, arrays)["dsinks"] for part, arrays in self._parts()]
            value, bound = (sum(x) for x in zip(*of_parts, strict=True))
            worst["dsinks"] = largest(self.array("dsinks"), value, bound)
        return GradientVerdict(worst)

    def _outside_sequences(self) -> dict[str, np.ndarray]:
        """The gradients with 0 in the rows of sequences."""
        copies = {name: np.ascontiguousarray(self.array(name)).copy() for name in self.gradients}
        names = self.problem.operator.positions
        arrays = tuple(copies.get(name, x) for name, x in zip(names, self.arrays, strict=True))
        rest = dataclasses.replace(self, arrays=arrays)
        for sequence in rest.sequences():
            part = rest.of_sequence(sequence)
            for name in self.gradients:
                part[name][...] = 0
        return copies


def fill_forward(problem: AttentionProblem, arrays: Arrays) -> None:
    """Fill out and lse with the results of the forward call, by name; dlse is NaN where lse is -inf, so that
    it has no effect.
    """
    right = attention(
        *(widened(arrays[name], problem.dtype) for name in ("q", "k", "v")),
        problem.dtype,
        problem.softmax_scale,
        Band.of(problem),
        dense_mask(problem, arrays),
        modification=modification_of(problem, arrays),
        sinks=sinks_of(problem, arrays),
        rule=visibility_of(problem, arrays),
        dropout=dropout_of(problem, arrays),
    )
    arrays["out"][...] = bfloat16_bits(right.out.astype(np.float32)) if problem.dtype == "bf16" else right.out
    arrays["lse"][...] = right.lse
    if arrays["dlse"] is not None:
        finite = np.nan_to_num(arrays["dlse"], nan=1.0)
        arrays["dlse"][...] = np.where(np.isneginf(right.lse), np.nan, finite)


def make(variant: Variant, shape: Shape, seed: int) -> BackwardExample:
    """Normal random inputs for ``variant``, with the results that a forward call has for them; outputs, and
    what is between rows, are NaN. ``shape.return_lse`` is whether LSE has a gradient.

    A variant with lengths gets sequences of random lengths up to the lengths in ``shape``, which the first
    sequence has. Queries and keys are packed or padded, as the seed will; rows after the last sequence and
    keys past a length are NaN.

    Raises as ``attention_example.make``.
    """
    rng = np.random.default_rng(seed)
    if variant.has_lengths:
        problem, arrays = _with_lengths(variant, shape, rng)
    else:
        problem, arrays = _without_lengths(variant, shape, rng)
    problem, lists = randomlines.with_lists(masked(problem, variant, shape), variant, arrays)
    arrays |= lists
    example = BackwardExample(problem, problem.operator.in_order(**arrays))
    example.forward()
    return example


def _without_lengths(
    variant: Variant, shape: Shape, rng: np.random.Generator
) -> tuple[BackwardProblem, Arrays]:
    head_dim, head_dim_v, kv_heads = check_sizes(variant, shape)
    rows = (shape.batch, shape.seqlen_q, shape.heads)
    keys = (shape.batch, shape.seqlen_kv, kv_heads)
    dtype, gap = variant.dtype, shape.gap
    arrays: Arrays = {
        "q": random_rows(rng, (*rows, head_dim), dtype, shape.spread, gap),
        "k": random_rows(rng, (*keys, head_dim), dtype, 1.0, gap),
        "v": random_rows(rng, (*keys, head_dim_v), dtype, 1.0, gap),
        "dout": random_rows(rng, (*rows, head_dim_v), dtype, 1.0, gap),
        "out": rows_within_nan((*rows, head_dim_v), dtype, gap),
        "lse": np.empty((shape.batch, shape.heads, shape.seqlen_q), np.float32),
    }
    arrays["dlse"] = rng.standard_normal(arrays["lse"].shape, np.float32) if shape.return_lse else None
    for name in ("q", "k", "v"):
        arrays[f"d{name}"] = rows_within_nan(arrays[name].shape, dtype, gap)
    arrays["mask"] = randomarrays.random_mask(rng, shape) if variant.mask_type == "dense" else None
    return _normalised(variant, shape, rng, arrays)


def _with_lengths(variant: Variant, shape: Shape, rng: np.random.Generator) -> tuple[BackwardProblem, Arrays]:
    head_dim, head_dim_v, kv_heads = check_sizes(variant, shape)
    batch, dtype, gap, heads = shape.batch, variant.dtype, shape.gap, shape.heads
    q_lengths, kv_lengths = (
        randomarrays.random_lengths(rng, batch, most) for most in (shape.seqlen_q, shape.seqlen_kv)
    )
    lengths: Arrays = {}
    of_sums = "fp32" if variant.axis("dkv_dtype") == "fp32dkv" else dtype
    starts = variant.axis("kv_starts") == "starts"
    packed_q, packed_kv = (bool(rng.integers(2)) for _ in range(2))
    packed_kv = packed_kv and not starts
    if packed_q:
        q_rows, used_q = randomarrays.packed(rng, lengths, "cu_seqlens_q", q_lengths, _ROWS_AFTER)
    else:
        q_rows = (batch, shape.seqlen_q)
        used_q = np.ones(q_rows, bool)
    if packed_kv:
        kv_rows, used_kv = randomarrays.packed(rng, lengths, "cu_seqlens_kv", kv_lengths, _ROWS_AFTER)
    else:
        lengths["kv_lengths"] = kv_lengths.astype(np.int32)
        kv_rows = (batch, shape.seqlen_kv + int(rng.integers(3)))
        used_kv = np.arange(kv_rows[1]) < kv_lengths[:, None]
        if starts:
            lengths["kv_starts"] = randomarrays.random_starts(rng, kv_lengths)
            used_kv &= np.arange(kv_rows[1]) >= lengths["kv_starts"][:, None]

    def rows(size: tuple[int, int], of: int, width: int, used: np.ndarray, spread: float = 1.0) -> np.ndarray:
        return randomarrays.used_rows(rng, (*size, of, width), used, dtype, spread, gap)

    of_lse = (q_rows[0], heads, q_rows[1])
    of_q: Arrays = {
        "dout": rows(q_rows, heads, head_dim_v, used_q),
        "q": rows(q_rows, heads, head_dim, used_q, shape.spread),
    }
    of_kv: Arrays = {
        "k": rows(kv_rows, kv_heads, head_dim, used_kv),
        "v": rows(kv_rows, kv_heads, head_dim_v, used_kv),
        "dk": rows_within_nan((*kv_rows, kv_heads, head_dim), of_sums, gap),
        "dv": rows_within_nan((*kv_rows, kv_heads, head_dim_v), of_sums, gap),
    }
    of_q |= {
        "out": rows_within_nan((*q_rows, heads, head_dim_v), dtype, gap),
        "lse": np.full(of_lse, np.nan, np.float32),
        "dlse": rng.standard_normal(of_lse, np.float32) if shape.return_lse else None,
        "dq": rows_within_nan((*q_rows, heads, head_dim), dtype, gap),
    }
    for arrays, packed in ((of_q, packed_q), (of_kv, packed_kv)):
        if packed:
            arrays |= {name: None if x is None else x[0] for name, x in arrays.items()}
    return _normalised(
        variant,
        shape,
        rng,
        of_q | of_kv | lengths,
        window_size=window_for(variant, shape),
        max_seqlen_kv=None if variant.score and variant.score.arrays else expected_keys(rng, shape),
    )


def _normalised(
    variant: Variant, shape: Shape, rng: np.random.Generator, arrays: Arrays, **options: Any
) -> tuple[BackwardProblem, Arrays]:
    """The problem of a call with these arrays, and all of its arrays by name."""
    score_arrays = randomarrays.score_arrays_of(rng, variant.score, sizes_of_scores(shape))
    lists, block_size = randomlists.lists_of(rng, variant, shape, check_sizes(variant, shape)[2])
    line, of_line = randomlines.line_of(rng, variant, sizes_of_scores(shape))
    others = inputs_read(rng, variant, shape) | lists
    if not shape.sinks:
        others.pop("sinks", None)
    gradients = {
        name: np.full(others[x].shape, np.nan, np.float32) for name, x in INPUT_OF.items() if x in others
    }
    dtypes = {argument.name: argument.dtype(variant.dtype) for argument in BACKWARD.arguments}
    if variant.axis("dkv_dtype") == "fp32dkv":
        dtypes |= {"dk": "fp32", "dv": "fp32"}
    problem = normalise(
        **{name: view_of(x, dtypes[name]) for name, x in (arrays | gradients).items() if x is not None},
        **randomarrays.array_views(others),
        **options,
        **block_size,
        **line,
        **randomarrays.dropout_of_call(rng, others),
        deterministic=variant.axis("dq_order") != "none",
        **randomarrays.score_of_call(rng, variant.score, score_arrays),
    )
    params = variant.score.arrays if variant.score else ()
    return problem, arrays | gradients | others | of_line | {
        param.name: x for param, x in zip(params, score_arrays, strict=True)
    }
