"""The front door: ``attention`` and ``plan``."""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam, DeviceTypeNotSupported
from flashgen.operators import attention as problem
from flashgen.runtime import arrays
from flashgen.runtime.plans import Plan, run_adopted

if TYPE_CHECKING:
    from flashgen.operators.attention import Problem
    from flashgen.runtime.plans import Runner
    from flashgen.spec.model import Spec

BACKENDS = ("cuda", "cpu", "simulator")
_ON_HOST = ("cpu", "simulator")
MAX_PLANS = 1024

_plans: dict[Any, Plan] = {}
_plans_lock = threading.Lock()


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    mask: Any = None,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    out: Any = None,
    return_lse: bool = False,
    stream: Any = None,
    backend: str | None = None,
) -> Any:
    """softmax(q k^T * softmax_scale, masked) v, exactly, without the matrix of scores.

    Arrays may be of CuPy, NumPy, PyTorch, JAX, or of any library with DLPack or ``__cuda_array_interface__``;
    none is copied. NumPy arrays, and others in host memory, are computed on the CPU.

    q: (batch, seqlen_q, num_heads_q, head_dim), or without batch; fp16, bf16 or fp32. head_dim is at most 256
        and a multiple of 8 (of 4 for fp32). Any strides, but the last dimension is contiguous and rows are
        16-byte aligned.
    k: (batch, seqlen_kv, num_heads_kv, head_dim), of the dtype and device of q. num_heads_kv divides
        num_heads_q: query head h reads kv head h // (num_heads_q // num_heads_kv).
    v: (batch, seqlen_kv, num_heads_kv, head_dim_v), likewise; head_dim_v may be another than head_dim and is
        bound by the same rules.
    causal: hide key j from query i unless j <= i + seqlen_kv - seqlen_q; the same as mask_type 3.
    mask: bool or uint8, nonzero where a key is hidden (as in numpy.ma). Broadcasts from the right, as in
        NumPy, to (batch, num_heads_q, seqlen_q, seqlen_kv); (seqlen_q, seqlen_kv) and (seqlen_kv,) are the
        common shapes. Its last dimension is seqlen_kv itself and contiguous.
    mask_type: 0 "none", 1 "dense" (mask is given), 2 "causal_top_left" (j <= i), 3 "causal_bottom_right".
        None: what the other arguments say.
    window_size: (left, right). Query i sees only the keys from p - left to p + right, where
        p = i + seqlen_kv - seqlen_q; -1 is no bound. Goes with mask types 0 and 3; with 3, right is 0 or -1.
    softmax_scale: 1 / sqrt(head_dim) if None. Not negative.
    out: receives the result: (batch, seqlen_q, num_heads_q, head_dim_v), or without batch, of the dtype and
        device of q, in memory that no other argument touches. Not for JAX, whose arrays cannot be written to.
    return_lse: also return the logarithm (base e) of each row's sum of exponentials: fp32,
        (batch, num_heads_q, seqlen_q), or without batch.
    stream: where to queue the work: a CuPy or PyTorch stream, a CUDA handle, or None for the current stream
        of the library of q. JAX has no public stream: its arrays are handed over by DLPack, both ways, on
        CuPy's current stream. Nothing waits for the GPU, and the call can be captured in a CUDA graph once
        its kernel is loaded. As with all queued work, arrays of another stream must outlive it.
    backend: "cuda", "cpu", or "simulator", which slowly runs the generated CUDA on arrays in host memory and
        raises SimulationError where it does what a GPU forbids; None: FLASHGEN_BACKEND, or what the arrays'
        device asks for.

    Returns ``out``, of the kind of q, or ``(out, lse)``. A row that sees no key is 0, with an LSE of -inf.

    Raises a FlashgenError, before anything is queued or written: BadParam, BadTensorShape, BadTensorDtype,
    BadTensorStrides, NullPointer, DeviceTypeNotSupported, NoCompilerError, or CompileError.
    """
    kind_of = arrays.kind_of
    kind = kind_of(q)
    if (
        kind is None
        or kind_of(k) is not kind
        or kind_of(v) is not kind
        or (mask is not None and kind_of(mask) is not kind)
        or (out is not None and kind_of(out) is not kind)
    ):
        options = {"causal": causal, "mask_type": mask_type, "window_size": window_size, "backend": backend}
        options |= {"softmax_scale": softmax_scale, "return_lse": return_lse}
        if all(x is None or kind_of(x) is not None for x in (q, k, v, mask, out)):
            plan(q, k, v, mask=mask, out=out, **options)  # raises: the kinds differ
        return run_adopted(attention, q, k, v, mask=mask, out=out, stream=stream, **options)
    backend = backend or os.environ.get("FLASHGEN_BACKEND")
    layouts, out_layout, pointers = kind.read(q, k, v, out)
    key = (
        kind,
        layouts,
        None if mask is None else kind.layout(mask),
        out_layout,
        causal,
        mask_type,
        window_size,
        softmax_scale,
        return_lse,
        backend,
    )
    try:
        known = _plans.get(key)
    except TypeError:  # an option is not hashable, such as a window in a list
        key = known = None
    if known is None:
        known = plan(
            q,
            k,
            v,
            causal=causal,
            mask=mask,
            mask_type=mask_type,
            window_size=window_size,
            softmax_scale=softmax_scale,
            out=out,
            return_lse=return_lse,
            backend=backend,
        )
        if key is not None:
            _remember(key, known)
    return known.run(q, k, v, mask, out, None, stream, pointers)


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    mask: Any = None,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    out: Any = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Plan:
    """A ``Plan`` for all calls whose arrays have the layouts of these.

    Arguments and errors are those of ``attention``. The kernel is compiled and loaded here, so that calls of
    the plan only queue it. The elements of the arrays are not read. An ``out`` here fixes the layout of every
    later ``out``; otherwise it is contiguous.
    """
    given = [
        None if x is None and name in ("mask", "out") else arrays.adopt(x, name)
        for name, x in (("q", q), ("k", k), ("v", v), ("mask", mask), ("out", out))
    ]
    views = [
        None if x is None else arrays.view(x, name)
        for name, x in zip(("q", "k", "v", "mask", "out"), given, strict=True)
    ]
    for view, name in zip(views[1:], ("k", "v", "mask", "out"), strict=True):
        # Each library has its own current stream, so work on arrays of two of them would be in no order.
        if view is not None and view.kind != views[0].kind and view.device == views[0].device:
            raise BadParam(
                f"{name} is a {view.kind} array but q is a {views[0].kind} one; convert it, which by DLPack "
                f"costs no copy"
            )
    call = problem.normalise(
        views[0],
        views[1],
        views[2],
        mask=views[3],
        out=views[4],
        causal=causal,
        mask_type=mask_type,
        window_size=window_size,
        softmax_scale=softmax_scale,
        return_lse=return_lse,
    )
    return Plan(call, _runner(call, backend), (*given, None))


def backend_for(device: int | None, backend: str | None = None) -> str:
    """The backend that computes arrays on ``device``, a CUDA ordinal or None for host memory.

    This is the one place that picks it: ``backend``, else FLASHGEN_BACKEND, else what the device asks for.
    Raises BadParam for an unknown name, DeviceTypeNotSupported for a backend that cannot reach the arrays:
    nothing is copied unasked.
    """
    wanted = backend or os.environ.get("FLASHGEN_BACKEND") or None
    natural = "cpu" if device is None else "cuda"
    if wanted is None:
        return natural
    if wanted not in BACKENDS:
        raise BadParam(f"backend is {wanted!r}; allowed are {', '.join(map(repr, BACKENDS))}")
    if wanted != natural and not (device is None and wanted in _ON_HOST):
        place = "in host memory" if device is None else f"on GPU {device}"
        raise DeviceTypeNotSupported(f"backend {wanted!r} cannot compute arrays {place}; copy them first")
    return wanted


def _runner(call: Problem, backend: str | None) -> Runner:
    chosen = backend_for(call.device, backend)
    if chosen == "cpu":
        from flashgen.cpu.attention import Runner

        return Runner(call)
    folders = os.environ.get("FLASHGEN_SPECS", "")
    if chosen == "simulator":
        from flashgen.simulator import backend as runner

        return runner.prepare(call, _specs(folders))
    from flashgen.runtime.device import device
    from flashgen.runtime.launch import prepare
    from flashgen.schedule.dispatch import offers

    here = device(call.device)
    specs = _specs(folders, os.environ.get("FLASHGEN_TUNED", ""), here.name)
    return prepare(call, call.device, offers(call, here, specs))


@lru_cache(maxsize=8)
def _specs(folders: str, tuned: str = "", gpu: str | None = None) -> tuple[Spec, ...]:
    """The shipped specs and those in ``folders``, with what is tuned for ``gpu``; ``folders`` and ``tuned``
    are the values of FLASHGEN_SPECS and FLASHGEN_TUNED. Read once for each set of these."""
    from flashgen.spec.load import load_specs
    from flashgen.toolchain import cache as caches

    return load_specs(cache=caches.default(), gpu=gpu)


def _remember(key: Any, known: Plan) -> None:
    with _plans_lock:
        while len(_plans) >= MAX_PLANS:
            del _plans[next(iter(_plans))]
        _plans[key] = known
