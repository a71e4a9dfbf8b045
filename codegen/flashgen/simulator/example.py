"""Random problems for one variant, of any operator, and what its kernels make of them."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from ml_dtypes import float8_e4m3fn

from flashgen.operators.arguments import ArrayView
from flashgen.operators.numbers import bfloat16_bits
from flashgen.operators.splits import AUTO
from flashgen.schedule.plan import plan_steps
from flashgen.simulator import hardware
from flashgen.simulator.execute import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem
    from flashgen.operators.reference import Verdict
    from flashgen.operators.splits import Splits
    from flashgen.simulator.execute import Report
    from flashgen.simulator.library import Library

Window = tuple[int, int]

ALIGNMENT = 256  # bytes, of a fresh allocation on a GPU
GUARD_ROWS = 256


@dataclass(frozen=True)
class Shape:
    """The sizes of a problem. ``head_dim`` None is the variant's own, ``head_dim_v`` None the same as far as
    the variant holds it, ``kv_heads`` None as many as fit it.

    ``window`` is the window of a ``local`` variant, or of a ``dense`` one with its mask, where None is none;
    it is aligned bottom-right, and -1 is no bound. ``top_left`` aligns it, or a causal diagonal, there.
    ``mask`` is the shape of a dense mask by the extents it has in full, such as "bhqk", "qk", "1hqk" or "k",
    and ``mask_alignment`` the bytes to which its rows are aligned. Queries are ``spread`` times normal
    numbers. ``gap`` is the bytes between rows, a multiple of 16. ``splits`` is as in ``attention``; "auto"
    means a number of splits for a variant that takes no other call. ``sinks`` is whether gradients are of a
    call with sinks; a forward variant says it itself. ``block`` is the size of the blocks of a ``blocks``
    variant, (rows, keys).
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
    sinks: bool = False
    block: tuple[int, int] | None = None


class Example(Protocol):
    """A problem of an operator with its arrays in host memory, in the operator's order, and None for what is
    absent. bfloat16 elements are their bits in uint16.
    """

    problem: Problem
    arrays: tuple[np.ndarray | None, ...]
    described: dict[str, Any]

    def judge(self) -> Verdict:
        """How far the outputs are from float64."""


@dataclass(frozen=True)
class PlainExample:
    """An `Example` whose outputs ``compare(problem, arrays by name)`` judges. ``described`` has the sizes of
    the problem, for a report.
    """

    problem: Any
    arrays: tuple[np.ndarray | None, ...]
    compare: Callable[[Any, dict[str, np.ndarray | None]], Verdict]
    described: dict[str, Any]

    @property
    def named(self) -> dict[str, np.ndarray | None]:
        """The arrays by name."""
        return dict(zip(self.problem.operator.positions, self.arrays, strict=True))

    @property
    def mask(self) -> np.ndarray | None:
        return self.named.get("mask")

    def judge(self) -> Verdict:
        """How far the outputs are from float64."""
        return self.compare(self.problem, self.named)


def outputs(example: Example) -> tuple[np.ndarray, ...]:
    """The arrays that a call writes."""
    pairs = zip(example.problem.operator.arguments, example.arrays, strict=True)
    return tuple(x for argument, x in pairs if argument.is_output and x is not None)


def make(variant: Variant, shape: Shape, seed: int) -> Example:
    """Random inputs for ``variant``, by the module of its operator; outputs, and what lies between rows, are
    NaN. Raises BadParam for sizes that are not the variant's, and what the contract raises.
    """
    module = importlib.import_module(f"flashgen.simulator.{variant.operator}_example")
    return module.make(variant, shape, seed)


def run(
    library: Library,
    variant: Variant,
    example: Example,
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
    example: Example,
    *,
    seed: int = 0,
    device: Device | None = None,
    threads: int | None = None,
    overlap: bool = False,
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
    options = {"seed": seed, "threads": threads, "overlap": overlap}
    reports = iter(simulate(kernels, planned, example.problem, pointers, **options))
    return tuple(next(reports) if step in taken else None for step in main.steps)


def random_rows(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, spread: float, gap: int
) -> np.ndarray:
    numbers = spread * rng.standard_normal(shape, np.float32)
    x = rows_within_nan(shape, dtype, gap)
    if dtype == "e4m3":
        numbers = numbers.astype(float8_e4m3fn).view(np.uint8)
    x[...] = bfloat16_bits(numbers) if dtype == "bf16" else numbers
    return x


def rows_within_nan(shape: tuple[int, ...], dtype: str, gap: int) -> np.ndarray:
    """Rows, heads and batch entries each followed by a gap; all bytes are 0xFF, a NaN in each dtype."""
    dtypes = {"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32, "e4m3": np.uint8}
    element = np.dtype(dtypes[dtype])
    batch, seqlen, heads, width = shape
    whole = (batch, seqlen + 1, heads + 1, width + gap // element.itemsize)
    # Aligned as memory of a GPU, so that sectors are counted as there. After it comes a guard of as many rows
    # as a block has at most, so that a read past the end of one array does not reach the next.
    size = math.prod(whole) * element.itemsize
    guard = GUARD_ROWS * math.prod(whole[2:]) * element.itemsize
    memory = _aligned(size + guard)
    return memory[:size].view(element).reshape(whole)[:, :seqlen, :heads, :width]


def _aligned(size: int) -> np.ndarray:
    """``size`` bytes of 0xFF, aligned as a fresh allocation on a GPU."""
    memory = np.full(size + ALIGNMENT, 0xFF, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def view_of(x: np.ndarray, dtype: str) -> ArrayView:
    """The array as the contract sees it, bits of bfloat16 as what they mean."""
    strides = tuple(stride // x.itemsize for stride in x.strides)
    return ArrayView("numpy", x.ctypes.data, x.shape, strides, dtype, None)
