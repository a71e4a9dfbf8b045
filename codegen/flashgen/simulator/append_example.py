"""Random problems of append for one variant, in memory whose gaps are NaN, with caches that are NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.operators import kvcodes, latentrows
from flashgen.operators.append import ARGUMENTS, Q_POSITIONS, AppendProblem, normalise
from flashgen.operators.append_reference import judge
from flashgen.operators.kvcodes import SCALES, SCALES_OUT, TOKEN
from flashgen.simulator import randomarrays
from flashgen.simulator.example import random_rows, rows_within_nan, view_of

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.operators.reference import Verdict
    from flashgen.simulator.example import Shape

_HEAD_DIM = 128  # where the shape has none: kernels take any
_PACKED = latentrows.LAYOUT.replace("_", "")  # a value of the axis kv_dtype
_GARBAGE = 1 << 30  # in int32 arrays, where nothing may be read


@dataclass(frozen=True)
class Choices:
    """What a variant leaves open: the tokens of a page, the elements of a row that are rotated, and whether
    there is an ``index``, given ``positions``, ``packed`` tokens, a q; and where its queries are. With
    ``head_dim_v`` the cache is latent, and these elements of its rows are values.
    """

    page_size: int
    rotary_dim: int
    index: bool = False
    positions: bool = False
    packed: bool = False
    q: bool = True
    q_positions: str = "each"
    head_dim_v: int | None = None


@dataclass(frozen=True)
class AppendExample:
    """A problem with its arrays in host memory, by name, and what some held ``before``. bfloat16 elements are
    their bits in uint16. ``head_dim_v`` is of a latent cache.
    """

    problem: AppendProblem
    named: dict[str, np.ndarray | None]
    before: dict[str, np.ndarray]
    head_dim_v: int | None = None

    @property
    def arrays(self) -> tuple[np.ndarray | None, ...]:
        return tuple(self.named[argument.name] for argument in ARGUMENTS)

    @property
    def described(self) -> dict[str, Any]:
        """The sizes of the problem, for a report."""
        problem = self.problem
        return {
            "shape": [problem.batch, problem.seqlen_new, problem.num_heads_kv, problem.head_dim],
            "head_dim_v": self.head_dim_v or problem.head_dim_v,
            "seqlen_kv": problem.capacity,
            "num_heads_kv": problem.num_heads_kv,
        }

    def judge(self) -> Verdict:
        """How far the outputs are from float64."""
        return judge(self.problem, self.before, self.named)


def choose(variant: Variant, shape: Shape, rng: np.random.Generator) -> Choices:
    """Choices for a variant at random."""
    width = shape.head_dim or _HEAD_DIM
    coin = [bool(rng.integers(2)) for _ in range(4)]
    rotary_dim = 16 * int(rng.integers(1, max(1, width // 16) + 1))
    latent = variant.axis("latent") == "latent"
    # Rows of codes are whole chunks of 16.
    step = kvcodes.HEAD_DIM_STEP if variant.axis("kv_dtype") != "none" else 8
    head_dim_v = step * int(rng.integers(1, width // step + 1)) if latent else None
    if variant.axis("kv_dtype") == _PACKED:
        head_dim_v, rotary_dim = latentrows.HEAD_DIM_V, 16 * int(rng.integers(1, 5))
    return Choices(
        page_size=int(rng.choice([1, 3, 16])),
        rotary_dim=rotary_dim,
        index=coin[0] and variant.axis("pages") == "none",
        positions=coin[1],
        packed=coin[2],
        q=coin[3] or bool(rng.integers(2)),
        q_positions=str(rng.choice(Q_POSITIONS)),
        head_dim_v=head_dim_v,
    )


def make(variant: Variant, shape: Shape, seed: int, choices: Choices | None = None) -> AppendExample:
    """Normal random keys, values and queries for ``variant``, ``seqlen_q`` new tokens to a sequence, and
    caches where it has up to ``seqlen_kv`` already. The cache, and the tables, are too small for the longest
    sequence, whose last tokens have to be left out. A latent cache has rows of ``head_dim_v`` elements, then
    some others, then the rotated ones. Raises what the contract raises.
    """
    rng = np.random.default_rng(seed)
    chosen = choose(variant, shape, rng) if choices is None else choices
    rotates, paged = variant.axis("rotary") != "none", variant.axis("pages") == "paged"
    width = shape.head_dim or _HEAD_DIM
    width_v = shape.head_dim_v or width
    kv_heads = shape.kv_heads or max(1, shape.heads // 2)
    latent = chosen.head_dim_v is not None
    if latent:
        rest = kvcodes.HEAD_DIM_STEP if variant.axis("kv_dtype") == kvcodes.E4M3 else 8
        width, kv_heads = chosen.head_dim_v + rest + chosen.rotary_dim, 1
    packed_rows = variant.axis("kv_dtype") == _PACKED
    if packed_rows:
        width = latentrows.HEAD_DIM
    batch, count, dtype, gap = shape.batch, shape.seqlen_q, variant.dtype, shape.gap

    lengths = rng.integers(0, shape.seqlen_kv + 1, batch, np.int32)
    lengths[-1], lengths[0] = 0, shape.seqlen_kv
    room = max(count, shape.seqlen_kv + count - 2)
    named: dict[str, np.ndarray | None] = {argument.name: None for argument in ARGUMENTS}
    if paged:
        page_size = chosen.page_size
        max_pages = -(-room // page_size)
        num_pages = batch * max_pages + 2
        named["pages"] = _page_table(rng, lengths, count, page_size, num_pages, max_pages)
    else:
        page_size, num_pages = room, batch + 2
        if chosen.index:
            # Not the rows that they have without.
            named["index"] = (num_pages - 1 - rng.permutation(batch)).astype(np.int32)

    leading, tokens = (1, batch * count + 2) if chosen.packed else (batch, count)
    if chosen.packed:
        # Up to ``count`` tokens of a sequence, at least one of the last, and tokens after that.
        ends = np.r_[np.sort(rng.integers(0, max(1, batch * count), batch - 1)), batch * count]
        starts = np.maximum(np.r_[0, ends[:-1]], ends - count)
        counts = ends - starts
        named["cu_seqlens_new"] = np.r_[0, np.cumsum(counts)].astype(np.int32)

    def filled(heads: int, columns: int) -> np.ndarray:
        x = random_rows(rng, (leading, tokens, heads, columns), dtype, shape.spread, gap)
        return x[0] if chosen.packed else x

    named |= {"k_new": filled(kv_heads, width), "lengths": lengths}
    caches = (num_pages, page_size, kv_heads)
    kv_dtype = dtype if variant.axis("kv_dtype") == "none" else kvcodes.E4M3
    row = latentrows.ROW_BYTES if packed_rows else width
    named["k_cache"] = rows_within_nan((*caches, row), kv_dtype, gap)
    if not latent:
        named["v_new"] = filled(kv_heads, width_v)
        named["v_cache"] = rows_within_nan((*caches, width_v), kv_dtype, gap)
    if variant.axis("kv_scales") == TOKEN:
        named |= {name: np.full(caches, np.nan, np.float32) for name in SCALES_OUT}
    else:
        scales = randomarrays.scales_of(rng, variant, batch, kv_heads)
        named |= {name: x for name, x in scales.items() if not latent or name == "k_scale"}
    named["total_lengths"] = np.full(batch, -1, np.int32)
    if rotates:
        of_tables = "fp32" if variant.axis("tables") == "wide" else dtype
        rows = max(count, shape.seqlen_kv + count - 3)
        for name in ("cos", "sin"):
            table = random_rows(rng, (1, rows, 1, chosen.rotary_dim // 2), of_tables, 1.0, gap)
            named[name] = table[0, :, 0]
        if chosen.positions:
            positions = rng.integers(-1, rows + 1, (leading, tokens), np.int32)
            named["positions"] = positions[0] if chosen.packed else positions
        if chosen.q:
            named["q"] = filled(shape.heads, width)
            q_rotated = rows_within_nan((leading, tokens, shape.heads, width), dtype, gap)
            named["q_rotated"] = q_rotated[0] if chosen.packed else q_rotated
    dtypes = dict.fromkeys(named, dtype) | dict.fromkeys(("k_cache", "v_cache"), kv_dtype)
    dtypes |= dict.fromkeys((*SCALES, *SCALES_OUT), "fp32")
    dtypes |= {name: "fp32" for name in ("cos", "sin") if variant.axis("tables") == "wide"}
    # A caller has scales without the dimension of one element.
    of_caller = named | {name: named[name][..., 0] for name in SCALES if named[name] is not None}
    views = {
        name: view_of(x, "int32" if x.dtype == np.int32 else dtypes[name])
        for name, x in of_caller.items()
        if x is not None
    }
    problem = normalise(
        views,
        interleaved=variant.axis("rotary") == "interleaved",
        q_positions=chosen.q_positions,
        kv_dtype=latentrows.LAYOUT if packed_rows else None,
        head_dim_v=chosen.head_dim_v,
    )
    outputs = (name for name in ("k_cache", "v_cache", "q_rotated", *SCALES_OUT) if named[name] is not None)
    before = {name: named[name].copy() for name in outputs}
    return AppendExample(problem, named, before, chosen.head_dim_v)


def _page_table(
    rng: np.random.Generator, lengths: np.ndarray, count: int, page_size: int, num_pages: int, max_pages: int
) -> np.ndarray:
    """Pages in any order, and garbage after the pages that a sequence needs."""
    table = np.full((len(lengths), max_pages + 1), _GARBAGE, np.int32)[:, :max_pages]
    free = iter(rng.permutation(num_pages))
    for row, length in zip(table, lengths, strict=True):
        needed = min(max_pages, -(-(int(length) + count) // page_size))
        row[:needed] = [next(free) for _ in range(needed)]
    return table
