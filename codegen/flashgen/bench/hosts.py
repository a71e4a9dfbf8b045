"""The array library that holds a benchmark's inputs and clocks: PyTorch, or CuPy where no peer needs PyTorch.

Both clocks are CUDA events on the library's current stream, which is the stream that flashgen and every peer
launch on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flashgen.errors import DeviceTypeNotSupported
from flashgen.runtime.device import device

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.bench.cases import Case


@dataclass(frozen=True, slots=True)
class Inputs:
    """One set of arrays for a case.

    ``q`` is (batch, seqlen_q, num_heads_q, head_dim), ``k`` (batch, seqlen_kv, num_heads_kv, head_dim),
    ``v`` and ``out`` are likewise with head_dim_v, all contiguous; ``mask`` is bool (seqlen_q, seqlen_kv),
    True = hidden, or None; ``slopes`` is float32 (num_heads_q,), for ALiBi, or None.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    mask: Any | None
    slopes: Any | None = None


class Clock(Protocol):
    """What timing needs of a host."""

    def record(self) -> Any:
        """Put a timing event into the current stream and return it."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds of device time between two events that have passed."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        """Record what ``body`` launches as a CUDA graph; the result replays it in the current stream."""


class Host(Clock, Protocol):
    """A clock, and the arrays to time with."""

    name: str
    l2_bytes: int

    def inputs(self, case: Case, seed: int) -> Inputs:
        """Fresh normal q, k and v, and an uninitialised out, on the current device."""

    def copy(self, array: Any) -> Any:
        """A copy on the device."""

    def poison(self, array: Any) -> None:
        """Fill the array with NaN."""

    def numpy(self, array: Any) -> np.ndarray:
        """The array's values on the host, float64."""

    def growth(self, call: Callable[[], object]) -> int:
        """Bytes of device memory by which the allocator grew for ``call``."""

    def relative_error(self, array: Any, reference: Any) -> float:
        """‖array - reference‖ / ‖reference‖, summed in fp32 on the device; NaN where either holds a NaN."""


def shapes(case: Case) -> tuple[tuple[int, ...], ...]:
    """Shapes of q, k, v and out."""
    rows_q = (case.batch, case.seqlen_q, case.num_heads_q)
    rows_kv = (case.batch, case.seqlen_kv, case.num_heads_kv)
    return (
        (*rows_q, case.head_dim),
        (*rows_kv, case.head_dim),
        (*rows_kv, case.width_v),
        (*rows_q, case.width_v),
    )


class TorchHost:
    """PyTorch's current CUDA device and stream."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise DeviceTypeNotSupported("the benchmark needs a CUDA device, and this PyTorch sees none")
        self._torch = torch
        self.l2_bytes = device(torch.cuda.current_device()).l2_bytes
        self._dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

    def inputs(self, case: Case, seed: int) -> Inputs:
        torch = self._torch
        generator = torch.Generator("cuda").manual_seed(seed)
        *inputs, shape_out = shapes(case)

        def normal(shape: tuple[int, ...]) -> Any:
            return torch.randn(shape, generator=generator, device="cuda").to(self._dtypes[case.dtype])

        mask = torch.from_numpy(case.hidden(np.random.default_rng(seed))).cuda() if case.is_dense else None
        q, k, v = map(normal, inputs)
        slopes = torch.from_numpy(case.slopes()).cuda() if case.score == "alibi" else None
        return Inputs(q, k, v, q.new_empty(shape_out), mask, slopes)

    def record(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            body()
        return graph.replay

    def copy(self, array: Any) -> Any:
        return array.clone()

    def poison(self, array: Any) -> None:
        array.fill_(float("nan"))

    def numpy(self, array: Any) -> np.ndarray:
        return array.detach().double().cpu().numpy()

    def growth(self, call: Callable[[], object]) -> int:
        cuda = self._torch.cuda
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        call()
        return cuda.max_memory_allocated() - before

    def relative_error(self, array: Any, reference: Any) -> float:
        reference = reference.float()
        return float((array.float() - reference).norm() / reference.norm())


class CupyHost:
    """CuPy's current device and stream; flashgen alone can be timed on it."""

    name = "cupy"

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self.l2_bytes = device(cupy.cuda.Device().id).l2_bytes

    def _dtype(self, name: str) -> Any:
        if name == "bf16":
            import ml_dtypes

            return ml_dtypes.bfloat16
        return {"fp16": np.float16, "fp32": np.float32}[name]

    def inputs(self, case: Case, seed: int) -> Inputs:
        cupy = self._cupy
        generator = cupy.random.default_rng(seed)
        dtype = self._dtype(case.dtype)
        *inputs, shape_out = shapes(case)

        def normal(shape: tuple[int, ...]) -> Any:
            return generator.standard_normal(shape, dtype=np.float32).astype(dtype)

        mask = cupy.asarray(case.hidden(np.random.default_rng(seed))) if case.is_dense else None
        q, k, v = map(normal, inputs)
        slopes = cupy.asarray(case.slopes()) if case.score == "alibi" else None
        return Inputs(q, k, v, cupy.empty(shape_out, dtype), mask, slopes)

    def record(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(self._cupy.cuda.get_elapsed_time(start, end))

    def synchronize(self) -> None:
        self._cupy.cuda.Device().synchronize()

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        # The default stream cannot be captured.
        stream = self._cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            body()
            graph = stream.end_capture()
        return graph.launch

    def copy(self, array: Any) -> Any:
        return array.copy()

    def poison(self, array: Any) -> None:
        array.fill(np.nan)

    def numpy(self, array: Any) -> np.ndarray:
        return self._cupy.asnumpy(array.astype(np.float32)).astype(np.float64)

    def growth(self, call: Callable[[], object]) -> int:
        pool = self._cupy.get_default_memory_pool()
        self.synchronize()
        pool.free_all_blocks()  # what a call takes is new then
        before = pool.total_bytes()
        call()
        return pool.total_bytes() - before

    def relative_error(self, array: Any, reference: Any) -> float:
        cupy = self._cupy
        reference = reference.astype(np.float32)
        difference = array.astype(np.float32) - reference
        return float(cupy.sqrt((difference * difference).sum() / (reference * reference).sum()))
