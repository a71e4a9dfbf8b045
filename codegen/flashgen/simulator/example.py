"""Random problems of attention for one variant, in memory whose gaps are NaN, and what the kernel of any
operator makes of such problems.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flashgen.errors import BadParam
from flashgen.operators.arguments import ArrayView
from flashgen.operators.attention import AttentionProblem, normalise
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.numbers import bfloat16_bits
from flashgen.operators.reference import Verdict, judge
from flashgen.operators.splits import AUTO
from flashgen.schedule.plan import plan_steps
from flashgen.simulator import hardware
from flashgen.simulator.execute import simulate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.arch import Device
    from flashgen.operators.operator import Problem
    from flashgen.operators.scores import Score
    from flashgen.operators.splits import Splits
    from flashgen.simulator.execute import Report
    from flashgen.simulator.library import Library
    from flashgen.spec.variant import Variant

Window = tuple[int, int]

_ALIGNMENT = 256  # bytes, of a fresh allocation on a GPU
_GUARD_ROWS = 256
_VIEWED = {"float32": "fp32", "int32": "int32"}


@dataclass(frozen=True)
class Shape:
    """The sizes of a problem. ``head_dim`` None is the variant's own, ``head_dim_v`` None the same as far as
    the variant holds it, ``kv_heads`` None as many as fit it.

    ``window`` is that of a ``local`` variant, or of a ``dense`` one beside its mask, where None is none; it
    is aligned bottom-right, and -1 is no bound. ``top_left`` aligns it, or a causal diagonal, there. ``mask``
    is the shape of a dense mask by the extents it has in full, such as "bhqk", "qk", "1hqk" or "k", and
    ``mask_alignment`` the bytes to which its rows are aligned. Queries are ``spread`` times normal numbers.
    ``gap`` is the bytes between rows, a multiple of 16. ``splits`` is as in ``attention``; "auto" means a
    number of splits for a variant that takes no other call.
    """

    seqlen_q: int = 128
    seqlen_kv: int = 128
    heads: int = 2
    kv_heads: int | None = None
    batch: int = 1
    head_dim: int | None = None
    head_dim_v: int | None = None
    window: Window | None = None
    top_left: bool = False
    mask: str = "bhqk"
    mask_alignment: int = 16
    spread: float = 1.0
    gap: int = 16
    return_lse: bool = True
    splits: Splits = AUTO


class AnyExample(Protocol):
    """A problem of any operator with its arrays in host memory, in the operator's order, and None for what is
    absent. ``out`` and ``lse`` are the outputs."""

    problem: Problem
    arrays: tuple[np.ndarray | None, ...]
    out: np.ndarray
    lse: np.ndarray | None
    described: dict[str, Any]

    def judge(self) -> Verdict:
        """How far the outputs are from float64."""


@dataclass(frozen=True)
class Example:
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


def make_any(variant: Variant, shape: Shape, seed: int) -> AnyExample:
    """`make` for a variant of any operator: attention's is here, another's in the module of its name."""
    module = "example" if variant.operator == "attention" else f"{variant.operator}_example"
    return importlib.import_module(f"flashgen.simulator.{module}").make(variant, shape, seed)


def make(variant: Variant, shape: Shape, seed: int) -> Example:
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
        score_arrays=[view_of(x, _VIEWED[x.dtype.name]) for x in score_arrays],
        score_scalars=score_scalars_of(rng, variant.score),
    )
    return Example(masked(problem, variant, shape), q, k, v, mask, out, lse, score_arrays)


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


def run(
    library: Library,
    variant: Variant,
    example: AnyExample,
    *,
    seed: int = 0,
    device: Device | None = None,
    threads: int | None = None,
) -> Report:
    """Simulate a variant that is all of its call on the example's arrays; see `run_steps`."""
    (report,) = run_steps([library], variant, example, seed=seed, device=device, threads=threads)
    return report


def run_steps(
    libraries: Sequence[Library],
    main: Variant,
    example: AnyExample,
    *,
    seed: int = 0,
    device: Device | None = None,
    threads: int | None = None,
) -> tuple[Report | None, ...]:
    """Simulate each step of the call that dispatch gives ``main`` on the example's arrays; see
    ``execute.simulate``. ``libraries`` has the kernel of each. ``device`` is by default the GPU that the
    variant is made for, as the simulator pretends it. A step that the call leaves out has no report.
    """
    planned = plan_steps(example.problem, main, device or hardware.pretend_for(main))
    pointers = tuple(0 if x is None else x.ctypes.data for x in example.arrays)
    memory = _aligned(planned.workspace.nbytes)
    if planned.workspace.nbytes:
        pointers = (*pointers, memory.ctypes.data)
    taken = {step.variant for step in planned.steps}
    kernels = [library for library, step in zip(libraries, main.steps, strict=True) if step in taken]
    reports = iter(simulate(kernels, planned, example.problem, pointers, seed=seed, threads=threads))
    return tuple(next(reports) if step in taken else None for step in main.steps)


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


def score_scalars_of(rng: np.random.Generator, score: Score | None) -> tuple[float, ...]:
    """Random numbers of a score modification, none of them 0."""
    kinds = [param.type for param in score.scalars] if score else []
    return tuple(int(rng.integers(1, 9)) if kind == "i32" else float(rng.uniform(0.5, 8)) for kind in kinds)


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


def random_rows(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, spread: float, gap: int
) -> np.ndarray:
    numbers = spread * rng.standard_normal(shape, np.float32)
    x = rows_within_nan(shape, dtype, gap)
    x[...] = bfloat16_bits(numbers) if dtype == "bf16" else numbers
    return x


def rows_within_nan(shape: tuple[int, ...], dtype: str, gap: int) -> np.ndarray:
    """Rows, heads and batch entries each followed by a gap; all bytes are 0xFF, a NaN in each dtype."""
    element = np.dtype({"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32}[dtype])
    batch, seqlen, heads, width = shape
    whole = (batch, seqlen + 1, heads + 1, width + gap // element.itemsize)
    # Aligned as memory of a GPU would be, so that sectors are counted as there. Behind it a guard of as many
    # rows as a block has at most, so that what reads past the end of one array does not meet the next.
    size = math.prod(whole) * element.itemsize
    guard = _GUARD_ROWS * math.prod(whole[2:]) * element.itemsize
    memory = _aligned(size + guard)
    return memory[:size].view(element).reshape(whole)[:, :seqlen, :heads, :width]


def _aligned(size: int) -> np.ndarray:
    """So many bytes of 0xFF, aligned as a fresh allocation on a GPU."""
    memory = np.full(size + _ALIGNMENT, 0xFF, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]


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
    memory = rng.integers(1, 256, count + _GUARD_ROWS * stride + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    mask = memory[start : start + count].reshape(*size[:-1], stride)[..., :keys]
    mask[...] = np.where(hidden, mask, 0)
    return mask


def view_of(x: np.ndarray, dtype: str) -> ArrayView:
    """The array as the contract sees it, bits of bfloat16 as what they mean."""
    strides = tuple(stride // x.itemsize for stride in x.strides)
    return ArrayView("numpy", x.ctypes.data, x.shape, strides, dtype, None, x)
