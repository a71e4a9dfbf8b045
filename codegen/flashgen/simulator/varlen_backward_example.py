"""Random problems of ``varlen_backward`` for one variant; all that is no sequence's is NaN."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.operators import varlen
from flashgen.operators.gradients import GradientVerdict, judge
from flashgen.operators.masks import Band
from flashgen.operators.numbers import bfloat16_bits, widened
from flashgen.operators.reference import Largest, attention, modification_of
from flashgen.operators.sequences import sequences
from flashgen.operators.varlen_backward import LENGTH_ARRAYS, VarlenBackwardProblem, normalise
from flashgen.simulator.attention_backward_example import BackwardExample
from flashgen.simulator.attention_example import check_sizes, score_arrays_of, score_scalars_of, score_views
from flashgen.simulator.example import random_rows, rows_within_nan, view_of
from flashgen.simulator.varlen_example import boundaries, expected_keys, masked, random_lengths, window_for

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.operators.sequences import Sequence
    from flashgen.simulator.example import Shape

# Rows of a packed array behind its last sequence.
_BEHIND = (0, 1, 150)
_NOTHING = Largest(0.0, 0.0, 0.0, ())
# Where an array of a call has the rows of a sequence.
_OF_QUERIES = ("dout", "q", "out", "dq")
_OF_KEYS = ("k", "v", "dk", "dv")
_OF_LSE = ("lse", "dlse")
_JUDGED = ("dout", "q", "k", "v", "mask", "out", "lse", "dlse", "dq", "dk", "dv")


@dataclass(frozen=True)
class VarlenBackwardExample(BackwardExample):
    """The same with lengths, of which each may be None."""

    problem: VarlenBackwardProblem

    @property
    def described(self) -> dict[str, Any]:
        """The sizes of the problem, for a report."""
        return super().described | {"shape": list(self.array("q").shape), "sequences": self.problem.batch}

    def sequences(self) -> list[Sequence]:
        """Those that the lengths say now."""
        given = {name: self.array(name) for name in LENGTH_ARRAYS}
        return sequences(self.problem, dict.fromkeys(varlen.LENGTH_ARRAYS) | given)

    def of_sequence(self, each: Sequence) -> dict[str, np.ndarray | None]:
        """The rows of a sequence in each array, with a batch of one: views."""
        problem, found = self.problem, {}
        entry, rows = each.queries()
        for name in (*_OF_QUERIES, *_OF_LSE):
            x = self.array(name)
            if x is not None:
                x = x[None] if problem.packed_q else x
                x = (x[entry, rows] if name in _OF_QUERIES else x[entry, :, rows])[None]
            found[name] = x
        for name in _OF_KEYS:
            x = self.array(name)
            found[name] = each.keys(x[None] if problem.packed_kv else x)[None]
        return found

    def forward(self) -> None:
        """Fill out and lse with the results that a forward call has for the lengths as they are now."""
        problem = self.problem
        for each in self.sequences():
            own, arrays = problem.of_sequence(each.q_length, each.kv_length), self.of_sequence(each)
            found = attention(
                *(widened(arrays[name], problem.dtype) for name in ("q", "k", "v")),
                problem.dtype,
                own.softmax_scale,
                Band.of(own),
                modification=modification_of(own, self._tables(each)),
            )
            bits = bfloat16_bits(found.out.astype(np.float32)) if problem.dtype == "bf16" else found.out
            arrays["out"][...] = bits
            arrays["lse"][...] = found.lse
            if arrays["dlse"] is not None:  # that of an LSE of -inf has no effect
                finite = np.nan_to_num(arrays["dlse"], nan=1.0)
                arrays["dlse"][...] = np.where(np.isneginf(found.lse), np.nan, finite)

    def _tables(self, each: Sequence) -> list[np.ndarray]:
        """The arrays of a score modification for a sequence."""
        problem = self.problem
        params = problem.score.arrays if problem.score else ()
        given = zip(params, self.arrays[len(self.arrays) - len(params) :], strict=True)
        return [x[each.number][None] if "batch" in param.symbols else x for param, x in given]

    def judge(self) -> GradientVerdict:
        """How far the outputs are from float64: the worst of all sequences. What is no sequence's must be
        0.
        """
        names = ("dq", "dk", "dv")
        rest = {name: np.ascontiguousarray(self.array(name)).copy() for name in names}
        others = dataclasses.replace(
            self,
            arrays=tuple(
                rest.get(argument.name, x)
                for argument, x in zip(self.problem.operator.arguments, self.arrays, strict=True)
            ),
        )
        found = {name: [] for name in names}
        for each in self.sequences():
            own = self.problem.of_sequence(each.q_length, each.kv_length)
            arrays = self.of_sequence(each) | {"mask": None}
            verdict = judge(own, *(arrays[name] for name in _JUDGED), *self._tables(each))
            for name in names:
                found[name].append(getattr(verdict, name))
                others.of_sequence(each)[name][...] = 0
        for name in names:
            if rest[name].view(np.uint8).any():
                found[name].append(Largest(np.inf, np.nan, 0.0, ()))
        worst = (max(each, key=lambda x: x.share, default=_NOTHING) for each in found.values())
        return GradientVerdict(*worst)


def make(variant: Variant, shape: Shape, seed: int) -> VarlenBackwardExample:
    """Normal random inputs for ``variant``, sequences of random lengths up to those of ``shape``, the first
    of which has these. Queries and keys are packed or padded, as the seed will; outputs, what lies between
    rows, rows behind the last sequence and keys past a length are NaN. ``shape.return_lse`` is whether LSE
    has a gradient.

    Raises as ``example.make``.
    """
    rng = np.random.default_rng(seed)
    head_dim, head_dim_v, kv_heads = check_sizes(variant, shape)
    batch, dtype, gap, heads = shape.batch, variant.dtype, shape.gap, shape.heads
    q_lengths, kv_lengths = (random_lengths(rng, batch, most) for most in (shape.seqlen_q, shape.seqlen_kv))
    lengths: dict[str, np.ndarray | None] = dict.fromkeys(LENGTH_ARRAYS)
    packed_q, packed_kv = (bool(rng.integers(2)) for _ in range(2))
    if packed_q:
        lengths["cu_seqlens_q"] = boundaries(q_lengths)
        q_rows = (1, int(q_lengths.sum()) + int(rng.choice(_BEHIND)))
        used_q = np.arange(q_rows[1])[None] < q_lengths.sum()
    else:
        q_rows = (batch, shape.seqlen_q)
        used_q = np.ones(q_rows, bool)
    if packed_kv:
        lengths["cu_seqlens_kv"] = boundaries(kv_lengths)
        kv_rows = (1, int(kv_lengths.sum()) + int(rng.choice(_BEHIND)))
        used_kv = np.arange(kv_rows[1])[None] < kv_lengths.sum()
    else:
        lengths["kv_lengths"] = kv_lengths.astype(np.int32)
        kv_rows = (batch, shape.seqlen_kv + int(rng.integers(3)))
        used_kv = np.arange(kv_rows[1]) < kv_lengths[:, None]

    def rows(size: tuple[int, int], of: int, width: int, used: np.ndarray, spread: float = 1.0) -> np.ndarray:
        x = random_rows(rng, (*size, of, width), dtype, spread, gap)
        x[~used] = 0xFFFF if dtype == "bf16" else np.nan
        return x

    arrays = {
        "dout": rows(q_rows, heads, head_dim_v, used_q),
        "q": rows(q_rows, heads, head_dim, used_q, shape.spread),
        "k": rows(kv_rows, kv_heads, head_dim, used_kv),
        "v": rows(kv_rows, kv_heads, head_dim_v, used_kv),
        "out": rows_within_nan((*q_rows, heads, head_dim_v), dtype, gap),
        "lse": np.full((q_rows[0], heads, q_rows[1]), np.nan, np.float32),
        "dlse": rng.standard_normal((q_rows[0], heads, q_rows[1]), np.float32) if shape.return_lse else None,
        "dq": rows_within_nan((*q_rows, heads, head_dim), dtype, gap),
        "dk": rows_within_nan((*kv_rows, kv_heads, head_dim), dtype, gap),
        "dv": rows_within_nan((*kv_rows, kv_heads, head_dim_v), dtype, gap),
    }
    packed = {name: packed_kv if name in _OF_KEYS else packed_q for name in arrays}
    arrays = {name: x[0] if x is not None and packed[name] else x for name, x in arrays.items()}
    sizes = {"batch": batch, "num_heads_q": heads, "seqlen_q": shape.seqlen_q, "seqlen_kv": shape.seqlen_kv}
    score_arrays = score_arrays_of(rng, variant.score, sizes)
    views = {
        name: view_of(x, "fp32" if name in _OF_LSE else dtype) for name, x in arrays.items() if x is not None
    }
    views |= {name: view_of(x, "int32") for name, x in lengths.items() if x is not None}
    problem = normalise(
        **views,
        window_size=window_for(variant, shape),
        max_seqlen_kv=None if variant.score and variant.score.arrays else expected_keys(rng, shape),
        deterministic=dict(variant.axes).get("dq_order") == "ordered",
        score=variant.score,
        score_arrays=score_views(score_arrays),
        score_scalars=score_scalars_of(rng, variant.score),
    )
    problem = masked(problem, variant, shape)
    given = arrays | lengths
    named = tuple(given.get(argument.name) for argument in problem.operator.arguments)
    example = VarlenBackwardExample(problem, (*named[: len(named) - len(score_arrays)], *score_arrays))
    example.forward()
    return example
