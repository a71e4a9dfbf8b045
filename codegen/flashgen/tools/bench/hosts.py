"""The array library that holds a benchmark's inputs and clocks: PyTorch, or CuPy where no peer needs PyTorch.

Both clocks are CUDA events on the library's current stream, which is the stream that flashgen and every peer
launch on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from ml_dtypes import bfloat16

from flashgen.errors import DeviceTypeNotSupported
from flashgen.runtime.device import device
from flashgen.tools.bench.cases import DROPOUT_SEED
from flashgen.tools.bench.lines import line_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.tools.bench.cases import Case


@dataclass(frozen=True, slots=True)
class Inputs:
    """One set of arrays for a case.

    ``q`` is (batch, seqlen_q, num_heads_q, head_dim), ``k`` (batch, seqlen_kv, num_heads_kv, head_dim),
    ``v`` and ``out`` the same with head_dim_v, all contiguous; ``mask`` is bool (seqlen_q, seqlen_kv),
    True = hidden, or None; ``slopes`` is float32 (num_heads_q,), for ALiBi, or None, and so are ``sinks``.
    ``dropout_seed`` is int64 (2,), with dropout.
    ``block_indptr`` and ``block_indices``, int32, are the mask "blocks" as lists, ``line`` is a Mask.

    Packed, they are (tokens, heads, ...), with ``cu_seqlens_q`` and ``cu_seqlens_kv``. A cache has
    ``kv_lengths``, of codes ``k_scale`` and ``v_scale``, with padding ``kv_starts``, with a tree
    ``tree``, int64 (batch, seqlen_q), with topk ``indices``, int32 (batch, 1, topk), and, if k and v are
    (num_pages, page_size, ...), ``pages``. What is appended to it are ``k_new`` and ``v_new``; ``cos`` and
    ``sin`` come from `quarter_turns`.

    For a backward pass ``dout`` is as out, and ``dq``, ``dk`` and ``dv`` are as q, k and v, ``dsinks`` as
    sinks; out and ``lse``, float32 (batch, num_heads_q, seqlen_q) or (num_heads_q, tokens), are then for the
    forward call that is made ahead.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    mask: Any | None
    slopes: Any | None = None
    sinks: Any | None = None
    dropout_seed: Any | None = None
    block_indptr: Any | None = None
    block_indices: Any | None = None
    line: Any | None = None
    cu_seqlens_q: Any | None = None
    cu_seqlens_kv: Any | None = None
    kv_lengths: Any | None = None
    kv_starts: Any | None = None
    tree: Any | None = None
    indices: Any | None = None
    k_scale: Any | None = None
    v_scale: Any | None = None
    pages: Any | None = None
    k_new: Any | None = None
    v_new: Any | None = None
    cos: Any | None = None
    sin: Any | None = None
    dout: Any | None = None
    lse: Any | None = None
    dq: Any | None = None
    dk: Any | None = None
    dv: Any | None = None
    dsinks: Any | None = None

    @property
    def results(self) -> tuple[Any, ...]:
        """What the call that is timed writes."""
        return (self.out,) if self.dout is None else (self.dq, self.dk, self.dv)


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
        """Fresh normal inputs, and uninitialised results, on the current device."""

    def copy(self, array: Any) -> Any:
        """A copy on the device."""

    def poison(self, array: Any) -> None:
        """Fill the array with NaN."""

    def double(self, array: Any) -> Any:
        """The array's values in float64, on its device."""

    def numpy(self, array: Any) -> np.ndarray:
        """The array's values on the host, float64."""

    def growth(self, call: Callable[[], object]) -> int:
        """Bytes of device memory by which the allocator grew for ``call``."""

    def relative_error(self, array: Any, reference: Any) -> float:
        """‖array - reference‖ / ‖reference‖, summed in fp32 on the device; NaN where either holds a NaN."""


def shapes(case: Case) -> tuple[tuple[int, ...], ...]:
    """Shapes of q, k, v and out."""
    rows_q: tuple[int, ...] = (case.batch, case.seqlen_q)
    rows_kv: tuple[int, ...] = (case.batch, case.seqlen_kv + case.left_padding)
    if case.is_packed:
        rows_q, rows_kv = (case.batch * case.seqlen_q,), (case.batch * case.seqlen_kv,)
    elif case.page_size:
        rows_kv = (case.batch * -(-rows_kv[1] // case.page_size), case.page_size)
    q, kv = (*rows_q, case.num_heads_q), (*rows_kv, case.num_heads_kv)
    return (*q, case.head_dim), (*kv, case.head_dim), (*kv, case.width_v), (*q, case.width_v)


def quarter_turns(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables of cosines and sines, float32 (rows, columns), of whole quarter turns: rotation by them is
    exact, so that a result with it can be compared as closely as one without.
    """
    turns = (np.arange(rows)[:, None] + np.arange(columns)) % 4
    return np.array([1, 0, -1, 0], np.float32)[turns], np.array([0, 1, 0, -1], np.float32)[turns]


def filled(
    case: Case,
    seed: int,
    normal: Callable[[tuple[int, ...]], Any],
    empty: Callable[[tuple[int, ...]], Any],
    place: Callable[[np.ndarray], Any],
) -> Inputs:
    """One set. ``normal`` makes an array of random elements, ``empty`` one that is only written, ``place``
    copies one to the device.
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {"mask": place(case.hidden(rng)) if case.is_dense else None}
    if case.mask == "blocks":
        listed = case.listed_blocks()
        ends = np.append(0, np.cumsum(listed.sum(1))).astype(np.int32)
        arrays["block_indptr"] = place(ends[None, None])
        arrays["block_indices"] = place(np.nonzero(listed)[1].astype(np.int32))
    if case.line:
        from flashgen import Mask

        line, params = line_of(case.line, case.seqlen_kv).of_mask(case.line)
        # An array of one element has one for each batch entry.
        arrays_of_line = {
            name: np.repeat(x, case.batch) if x.shape == (1,) else x
            for name, x in params.items()
            if isinstance(x, np.ndarray)
        }
        on_device = {**params, **{name: place(x) for name, x in arrays_of_line.items()}}
        arrays["line"] = Mask(line, **on_device)
    *of_inputs, of_out = shapes(case)
    made = "qk" if case.latent else "qkv"
    arrays |= {name: normal(shape) for name, shape in zip(made, of_inputs, strict=False)}
    if case.latent:
        arrays["v"] = arrays["k"][..., : case.width_v]
    arrays["out"] = empty(of_out)
    if case.is_backward:
        arrays["dout"] = normal(of_out)
        rows = (case.num_heads_q, case.seqlen_q * (case.batch if case.is_packed else 1))
        arrays["lse"] = place(np.empty(rows if case.is_packed else (case.batch, *rows), np.float32))
        arrays |= {f"d{name}": empty(shape) for name, shape in zip("qkv", of_inputs, strict=True)}
    if case.score == "alibi":
        arrays["slopes"] = place(case.slopes())
    if case.sinks:
        arrays["sinks"] = place(case.sink_logits())
        if case.is_backward:
            arrays["dsinks"] = place(np.empty(case.num_heads_q, np.float32))
    if case.dropout_p:
        arrays["dropout_seed"] = place(np.array(DROPOUT_SEED, np.int64))
    if case.is_packed:
        ends = np.cumsum([(0, 0), *case.sequences], axis=0, dtype=np.int32)
        arrays |= {f"cu_seqlens_{name}": place(ends[:, n].copy()) for n, name in enumerate(("q", "kv"))}
    if case.lengths == "cache":
        length = case.seqlen_kv + case.left_padding - (case.seqlen_q if case.appends else 0)
        arrays["kv_lengths"] = place(np.full(case.batch, length, np.int32))
    for name in made[1:] if case.codes else ():
        from flashgen import quantize

        x, per = arrays[name], "token" if case.token_scales else "head"
        if case.latent:  # quantize takes no row as long
            x, per = x.reshape(*x.shape[:-2], -1, 64), "tensor"
        codes, scale = quantize(x, per)
        scale = scale if case.token_scales else scale.reshape(-1)
        arrays |= {name: codes.reshape(arrays[name].shape), f"{name}_scale": scale}
    if case.latent and case.codes:
        arrays |= {"v": arrays["k"][..., : case.width_v], "v_scale": arrays["k_scale"]}
    if case.left_padding:
        arrays["kv_starts"] = place(np.full(case.batch, case.left_padding, np.int32))
    if case.mask == "tree":
        arrays["tree"] = place(np.tile(case.tree(), (case.batch, 1)))
    if case.topk:
        lists = [rng.permutation(case.seqlen_kv)[: case.topk] for _ in range(case.batch)]
        arrays["indices"] = place(np.array(lists, np.int32)[:, None])
    if case.page_size:
        order = rng.permutation(shapes(case)[1][0]).astype(np.int32)
        arrays["pages"] = place(order.reshape(case.batch, -1))
    if case.appends:
        new = (case.batch, case.seqlen_q, case.num_heads_kv)
        arrays |= {"k_new": normal((*new, case.head_dim)), "v_new": normal((*new, case.width_v))}
        tables = quarter_turns(case.seqlen_kv, case.head_dim // 2)
        arrays |= {name: place(table) for name, table in zip(("cos", "sin"), tables, strict=True)}
    return Inputs(**arrays)


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

        dtype = self._dtypes[case.dtype]

        def normal(shape: tuple[int, ...]) -> Any:
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)

        def empty(shape: tuple[int, ...]) -> Any:
            return torch.empty(shape, dtype=dtype, device="cuda")

        return filled(case, seed, normal, empty, lambda array: torch.from_numpy(array).cuda())

    def record(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        cuda = self._torch.cuda
        # Once outside of the graph: autograd queues gradients on the stream of the forward pass, which a peer
        # runs when it is first called on a stream.
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            body()
        cuda.current_stream().wait_stream(stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, stream=stream):
            body()
        return graph.replay

    def copy(self, array: Any) -> Any:
        return array.clone()

    def poison(self, array: Any) -> None:
        array.fill_(float("nan"))

    def double(self, array: Any) -> Any:
        return array.detach().double()

    def numpy(self, array: Any) -> np.ndarray:
        return self.double(array).cpu().numpy()

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
    _DTYPES: ClassVar[dict[str, type]] = {"fp16": np.float16, "bf16": bfloat16, "fp32": np.float32}

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self.l2_bytes = device(cupy.cuda.Device().id).l2_bytes

    def inputs(self, case: Case, seed: int) -> Inputs:
        cupy = self._cupy
        generator = cupy.random.default_rng(seed)
        dtype = self._DTYPES[case.dtype]

        def normal(shape: tuple[int, ...]) -> Any:
            return generator.standard_normal(shape, dtype=np.float32).astype(dtype)

        return filled(case, seed, normal, lambda shape: cupy.empty(shape, dtype), cupy.asarray)

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

    def double(self, array: Any) -> Any:
        return array.astype(np.float32).astype(np.float64)

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
