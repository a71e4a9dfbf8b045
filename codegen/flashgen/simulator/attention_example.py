"""Random problems of attention for one variant, in memory whose gaps are NaN."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.errors import BadParam
from flashgen.operators.attention import AttentionProblem, normalise
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.reference import judge
from flashgen.simulator.example import ALIGNMENT, GUARD_ROWS, random_rows, rows_within_nan, view_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.families.variant import Variant
    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.reference import Verdict
    from flashgen.operators.scores import Score
    from flashgen.simulator.example import Shape, Window

_VIEWED = {"float32": "fp32", "int32": "int32"}


@dataclass(frozen=True)
class AttentionExample:
    """A problem with its arrays in host memory. bfloat16 elements are their bits in uint16; ``mask`` may be
    None."""

    problem: AttentionProblem
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None
    out: np.ndarray
    lse: np.ndarray | None
    score_arrays: tuple[np.ndarray, ...] = ()

    @property
    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """q, k, v, mask, out, lse, and the arrays of a score modification."""
        return self.q, self.k, self.v, self.mask, self.out, self.lse, *self.score_arrays

    @property
    def described(self) -> dict[str, Any]:
        """The sizes of the problem, for a report."""
        return described(self.problem)

    def judge(self) -> Verdict:
        """How far the outputs are from float64."""
        inputs = self.q, self.k, self.v, self.mask
        return judge(self.problem, *inputs, self.out, self.lse, *self.score_arrays)


def described(problem: AttentionProblem) -> dict[str, Any]:
    """The sizes of a problem of attention, for a report."""
    return {
        "shape": [problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim],
        "head_dim_v": problem.head_dim_v,
        "seqlen_kv": problem.seqlen_kv,
        "num_heads_kv": problem.num_heads_kv,
    }


def make(variant: Variant, shape: Shape, seed: int) -> AttentionExample:
    """Normal random inputs for ``variant``; outputs, and what lies between rows, are NaN.

    Raises BadParam for sizes that are not the variant's: heads that it cannot group, a head dim that it does
    not hold, a window where its mask type has none; and what the contract raises.
    """
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
    mask = random_mask(rng, shape) if variant.mask_type == "dense" else None
    views = [view_of(x, variant.dtype) for x in (q, k, v, out)]
    sizes = {"batch": shape.batch, "num_heads_q": shape.heads}
    sizes |= {"seqlen_q": shape.seqlen_q, "seqlen_kv": shape.seqlen_kv}
    score_arrays = score_arrays_of(rng, variant.score, sizes)
    problem = normalise(
        *views[:3],
        out=views[3],
        mask=None if mask is None else view_of(mask, "uint8"),
        return_lse=shape.return_lse,
        splits=shape.splits,
        score=variant.score,
        score_arrays=score_views(score_arrays),
        score_scalars=score_scalars_of(rng, variant.score),
    )
    return AttentionExample(masked(problem, variant, shape), q, k, v, mask, out, lse, score_arrays)


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


def score_arrays_of(
    rng: np.random.Generator, score: Score | None, sizes: Mapping[str, int]
) -> tuple[np.ndarray, ...]:
    """Random arrays of a score modification; a dimension of its own has 1 to 20 elements."""
    found = []
    for param in score.arrays if score else ():
        own = {symbol: int(rng.integers(1, 21)) for symbol in param.symbols}
        extents = tuple((own | sizes)[symbol] for symbol in param.symbols)
        if param.type == "i32":
            found.append(rng.integers(-3, 4, extents, np.int32))
        else:
            found.append(rng.standard_normal(extents, np.float32))
    return tuple(found)


def score_views(arrays: Sequence[np.ndarray]) -> list[ArrayView]:
    """The views of these arrays of a score modification."""
    return [view_of(x, _VIEWED[x.dtype.name]) for x in arrays]


def score_scalars_of(rng: np.random.Generator, score: Score | None) -> tuple[float, ...]:
    """Random numbers of a score modification, none of them 0."""
    kinds = [param.type for param in score.scalars] if score else []
    return tuple(int(rng.integers(1, 9)) if kind == "i32" else float(rng.uniform(0.5, 8)) for kind in kinds)


def random_mask(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Tiles of 64x64 keys that are hidden, visible and mixed, and some rows that see nothing."""
    extents = {"b": shape.batch, "h": shape.heads, "q": shape.seqlen_q, "k": shape.seqlen_kv, "1": 1}
    size = tuple(extents[letter] for letter in shape.mask)
    rows, keys = (1, *size)[-2:]
    hidden = rng.random(size) < 0.5
    kind = rng.random((*size[:-2], -(-rows // 64), -(-keys // 64)))
    kind = kind.repeat(64, -1)[..., :keys].repeat(64, -2)[..., :rows, :].reshape(size)
    hidden = (hidden | (kind < 1 / 3)) & (kind < 2 / 3)
    if rows > 1:
        hidden |= rng.random((*size[:-1], 1)) < 0.1
    alignment = shape.mask_alignment
    stride = -(-keys // alignment) * alignment
    if alignment < 16 and stride % (2 * alignment) == 0:
        stride += alignment
    count = math.prod(size[:-1]) * stride
    memory = rng.integers(1, 256, count + GUARD_ROWS * stride + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    mask = memory[start : start + count].reshape(*size[:-1], stride)[..., :keys]
    mask[...] = np.where(hidden, mask, 0)
    return mask


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
    if variant.mask_type not in ("local", "dense"):
        raise BadParam(
            f"window is {window}, and {variant.name} has mask type {variant.mask_type}; "
            "a window needs a variant of mask type local or dense"
        )
    if min(window) < -1:
        raise BadParam(f"window is {window}; each side must be -1 (no bound), 0 or more")


def masked(problem: AttentionProblem, variant: Variant, shape: Shape) -> AttentionProblem:
    """The problem with the variant's own mask type, even where a simpler kernel would hide the same keys."""
    offset = 0 if shape.top_left else problem.seqlen_kv - problem.seqlen_q
    if variant.mask_type == "none" or (variant.mask_type == "dense" and shape.window is None):
        return problem
    if variant.mask_type == "causal":
        left, right = -1, 0
    else:
        left, right = shape.window or (max(1, problem.seqlen_kv // 4), 0)
    left, right = (UNBOUNDED if side < 0 else side for side in (left, right))
    return dataclasses.replace(
        problem, mask_type=variant.mask_type, diagonal_offset=offset, window_left=left, window_right=right
    )
