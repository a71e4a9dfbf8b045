"""A plan: a Problem bound to the backend that computes it, to be called with arrays again and again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, BadTensorStrides, NullPointer
from flashgen.operators.attention import ROW_ALIGNMENT, Problem, check_memory
from flashgen.runtime import arrays

if TYPE_CHECKING:
    from flashgen.runtime.arrays import ArrayView, Pointers
    from flashgen.spec.variant import Variant

Arrays = tuple[Any, Any, Any, Any, Any, Any]
Work = Callable[[Arrays, int], None]  # queues a kernel on the stream of a CUDA handle
# Sets of addresses that a plan remembers the work of.
MAX_WORKS = 64
_OUT, _LSE = 4, 5


class Runner(Protocol):
    """What a backend makes of a Problem."""

    variant: Variant | None
    source: str
    workspace_bytes: int

    def at(self, pointers: Pointers) -> Work:
        """The work for arrays at these addresses, to be queued any number of times, by many threads.

        Pointers and arrays are those of q, k, v, mask, out and lse, with 0 and None for what is absent.
        """


class Plan:
    """Attention for one set of shapes, strides, dtypes and options; made by ``flashgen.plan``.

    ``problem`` is what it computes, ``variant`` the kernel (None on the CPU), ``source`` its CUDA,
    ``workspace_bytes`` the memory it needs beyond inputs and outputs. A plan may be called from many threads.
    """

    __slots__ = (
        "_current_stream",
        "_device",
        "_distances",
        "_empty",
        "_extents",
        "_kind",
        "_known_lse",
        "_known_out",
        "_layouts",
        "_lse_shape",
        "_mask_layout",
        "_out_layout",
        "_out_shape",
        "_pointer",
        "_previous",
        "_read",
        "_recent",
        "_return_lse",
        "_returns",
        "_runner",
        "_type",
        "_works",
        "problem",
    )

    def __init__(self, problem: Problem, runner: Runner, examples: Arrays) -> None:
        """``examples``: q, k, v, mask, out and lse of the layouts to come. None of the arrays is kept."""
        q, k, v, mask, out, _ = examples
        kind = arrays.kind_of(q)
        self.problem = problem
        self._runner = runner
        self._kind = kind
        self._type = type(q)
        self._layouts, self._out_layout, *_ = kind.read(q, k, v, out)
        self._mask_layout = None if mask is None else kind.layout(mask)
        # Layouts that were found to fit, so that the next call need not look again.
        self._known_out, self._known_lse = self._out_layout, None
        # What to queue, by pointers at which memory was sound. There these layouts are sound again: had the
        # plan allocated an output itself, that one overlaps nothing.
        self._works: dict[Pointers, Work] = {}
        # For callers with one set of arrays, of a kind of which only the shape can change: the last q, and,
        # where it came twice in a row, references to all of them, their shapes, and the work.
        self._returns = kind.steady and mask is None and not problem.return_lse
        self._previous: Callable[[], Any] = _nothing
        self._recent: tuple[Any, ...] | None = None
        # What a call needs is bound here: each look-up on the way to it would count.
        self._read, self._pointer = kind.read, kind.pointer
        self._current_stream, self._device = kind.current_stream, problem.device
        self._out_shape, self._lse_shape, self._empty = problem.out_shape, problem.lse_shape, problem.empty
        self._return_lse = problem.return_lse
        self._extents = problem.extents()
        self._distances = _overlapping_distances(self._extents)

    @property
    def variant(self) -> Variant | None:
        return self._runner.variant

    @property
    def source(self) -> str:
        return self._runner.source

    @property
    def workspace_bytes(self) -> int:
        return self._runner.workspace_bytes

    def __repr__(self) -> str:
        return f"<flashgen.Plan {self.variant.name if self.variant else 'cpu'}: {self.problem}>"

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        mask: Any = None,
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
    ) -> Any:
        """Compute attention of arrays that have the layouts of the plan; see ``flashgen.attention``.

        ``out`` and ``lse`` receive the results where given. ``out`` has the layout that it had when the plan
        was made, or is contiguous if there was none. ``lse``, contiguous fp32 of shape (batch, num_heads_q,
        seqlen_q), is allowed where the plan was made with ``return_lse``. Returns ``out``, or ``(out, lse)``
        with ``return_lse``.

        Raises BadTensorShape where an array's layout is not the plan's, and the errors of ``attention`` for
        its memory.
        """
        if self._recent is not None and mask is None and lse is None:
            q_ref, k_ref, v_ref, out_ref, shapes, work = self._recent
            if (
                (q_ref() is q and k_ref() is k and v_ref() is v and out_ref() is out)
                and not (q is None or k is None or v is None or out is None)  # a dead reference gives None
                and (q.shape, k.shape, v.shape, out.shape) == shapes
            ):
                work((q, k, v, None, out, None), self._handle(stream))
                return out
        if type(q) is type(k) is type(v) is self._type and (out is None or type(out) is self._type):
            layouts, out_layout, pointers = self._read(q, k, v, out)
            if (
                layouts == self._layouts
                and (out is None or out_layout == self._known_out or self._accepts_out(out))
                and (mask is None if self._mask_layout is None else self._accepts_mask(mask))
                and (lse is None or self._accepts_lse(lse))
            ):
                if self._returns and out is not None:
                    if self._previous() is q:
                        self._remember(q, k, v, out, pointers)
                    else:
                        self._previous = weakref.ref(q)
                return self.run(q, k, v, mask, out, lse, stream, pointers)
        if any(x is not None and arrays.kind_of(x) is None for x in (q, k, v, mask, out, lse)):
            return run_adopted(self, q, k, v, mask=mask, out=out, lse=lse, stream=stream)
        self._check(q, k, v, mask, out, lse)
        return self.run(q, k, v, mask, out, lse, stream, self._read(q, k, v, out)[2])

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        mask: Any,
        out: Any,
        lse: Any,
        stream: Any,
        pointers: Pointers,
    ) -> Any:
        """``__call__`` for native arrays whose layouts are known to be the plan's, with their pointers."""
        handle = self._handle(stream)
        given = out is not None, lse is not None
        if out is None or mask is not None or self._return_lse:
            if out is None:
                out = self._kind.empty(self._out_shape, q, stream)
            if self._return_lse and lse is None:
                lse = self._kind.empty(self._lse_shape, q, stream, "fp32")
            at_mask = 0 if mask is None else self._pointer(mask)
            at_lse = 0 if lse is None else self._pointer(lse)
            pointers = (*pointers[:3], at_mask, self._pointer(out), at_lse)
        work = self._works.get(pointers)
        if work is None:
            work = self._prepare(pointers, *given)
        work((q, k, v, mask, out, lse), handle)
        return (out, lse) if self._return_lse else out

    def _handle(self, stream: Any) -> int:
        """The CUDA handle of ``stream``, or of the current one."""
        if stream is None:
            return self._current_stream(self._device)
        if self._device is None:
            raise BadParam("stream was given, but the arrays are in host memory, where there are no streams")
        return arrays.stream_pointer(stream)

    def _remember(self, q: Any, k: Any, v: Any, out: Any, pointers: Pointers) -> None:
        """Keep all that the work of these arrays depends on, so that the next call need not read it."""
        work = self._works.get(pointers)
        if work is not None:
            refs = weakref.ref(q), weakref.ref(k), weakref.ref(v), weakref.ref(out)
            self._recent = (*refs, (q.shape, k.shape, v.shape, out.shape), work)

    def _prepare(self, pointers: Pointers, out_given: bool, lse_given: bool) -> Work:
        """What to queue for arrays at ``pointers``, if their memory is sound. Raises what it is not."""
        self._check_memory(pointers, out_given, lse_given)
        work = _no_work if self._empty else self._runner.at(pointers)
        if len(self._works) >= MAX_WORKS:
            self._works = {}  # where addresses keep changing, choosing what to forget would cost more
        self._works[pointers] = work
        return work

    def _check_memory(self, pointers: Pointers, out_given: bool, lse_given: bool) -> None:
        """``check_memory``, but the usual case of aligned arrays far apart is seen at a glance."""
        at_q, at_k, at_v, at_mask, at_out, _ = pointers
        written: tuple[int, ...] = (_LSE,) if lse_given else ()
        if out_given:
            q_low, q_high, k_low, k_high, v_low, v_high, mask_low, mask_high = self._distances
            if (
                q_low < at_out - at_q < q_high
                or k_low < at_out - at_k < k_high
                or v_low < at_out - at_v < v_high
                or mask_low < at_out - at_mask < mask_high
            ):
                written += (_OUT,)
        if (
            written
            or (at_q | at_k | at_v | at_out) % ROW_ALIGNMENT
            or not (at_q and at_k and at_v and at_out)
        ):
            check_memory(self._extents, pointers, written)

    def _accepts_mask(self, mask: Any) -> bool:
        if mask is None or self._mask_layout is None:
            return mask is None and self._mask_layout is None
        return arrays.kind_of(mask) is self._kind and self._kind.layout(mask) == self._mask_layout

    def _accepts_out(self, out: Any) -> bool:
        if out is None:
            return True
        if arrays.kind_of(out) is not self._kind:
            return False
        layout = self._kind.layout(out)
        if self._out_layout is not None:
            return layout == self._out_layout
        view = self._kind.view(out)
        problem = self.problem
        expected = (problem.out_shape, problem.dtype, problem.device)
        fits = (view.shape, view.dtype, view.device) == expected and _contiguous(view)
        if fits:
            self._known_out = layout
        return fits

    def _accepts_lse(self, lse: Any) -> bool:
        if lse is None:
            return True
        if arrays.kind_of(lse) is not self._kind:
            return False
        layout = self._kind.layout(lse)
        if layout == self._known_lse:
            return True
        problem = self.problem
        if not problem.return_lse:
            raise BadParam("lse was given to a plan made without return_lse=True")
        view = arrays.view(lse, "lse")
        if view.dtype != "fp32" or view.device != problem.device:
            raise BadTensorDtype(f"lse has dtype {view.dtype}; expected fp32, on the device of q")
        if view.shape != problem.lse_shape:
            raise BadTensorShape(f"lse has shape {view.shape}; expected {problem.lse_shape}")
        if not _contiguous(view):
            raise BadTensorStrides(f"lse has strides {view.strides} (in elements); it must be contiguous")
        self._known_lse = layout
        return True

    def _check(self, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any) -> None:
        """Raise the error of arrays that do not fit the plan."""
        for name, array in (("q", q), ("k", k), ("v", v), ("mask", mask), ("out", out), ("lse", lse)):
            if array is None and name in ("mask", "out", "lse"):
                continue
            view = arrays.view(array, name)
            if view.kind != self._kind.name:
                raise BadParam(
                    f"{name} is a {view.kind} array, but the plan was made for {self._kind.name} arrays"
                )
        layouts = self._read(q, k, v, None)[0]
        if layouts != self._layouts:
            raise BadTensorShape(
                f"q, k and v have layouts {layouts}, but the plan was made for {self._layouts}"
            )
        if mask is None and self._mask_layout is not None:
            raise NullPointer("mask is None, but the plan was made with a mask")
        if mask is not None and self._mask_layout is None:
            raise BadParam("mask was given to a plan made without one")
        if mask is not None and not self._accepts_mask(mask):
            raise BadTensorShape(
                f"mask has layout {self._kind.layout(mask)}, but the plan was made for {self._mask_layout}"
            )
        self._accepts_lse(lse)
        if out is not None and not self._accepts_out(out):
            expected = self._out_layout or f"a contiguous array of shape {self._out_shape}"
            raise BadTensorShape(
                f"out has layout {self._kind.layout(out)}, but the plan was made for {expected}"
            )


def _nothing() -> None:
    """A reference to an array that is gone."""


def _no_work(arrays: Arrays, stream: int) -> None:
    """What a call without elements comes to."""


def _contiguous(view: ArrayView) -> bool:
    """In C order, whatever the strides that are never multiplied."""
    if 0 in view.shape:
        return True
    if view.strides is None:
        return False
    expected = 1
    for extent, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True


def _overlapping_distances(extents: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """For q, k, v and mask in turn: both ends of the open interval of distances from it to ``out`` at which
    the two overlap."""
    out_low, out_high = extents[_OUT]
    distances: list[int] = []
    for low, high in extents[:4]:
        distances += (low - out_high, high - out_low) if high > low else (0, 0)
    return tuple(distances)


def run_adopted(call: Any, q: Any, k: Any, v: Any, *, mask: Any, out: Any, stream: Any, **rest: Any) -> Any:
    """``call`` for arrays that flashgen does not read directly: adopt them, call, hand the result back."""
    lse = rest.get("lse")
    for name, given in (("out", out), ("lse", lse)):
        if given is not None and arrays.immutable(given):
            raise BadParam(
                f"{name} is a {type(given).__name__}, which cannot be written to; leave {name} out"
            )
    inputs = [arrays.adopt(x, name, stream) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
    if mask is not None:
        mask = arrays.adopt(mask, "mask", stream)
    if lse is not None:
        rest["lse"] = arrays.adopt(lse, "lse", stream)
    native_out = None if out is None else arrays.adopt(out, "out", stream)
    result = call(*inputs, mask=mask, out=native_out, stream=stream, **rest)

    def handed(native: Any, given: Any) -> Any:
        return arrays.hand_back(native, q, (*inputs, mask), stream) if given is None else given

    if isinstance(result, tuple):
        return handed(result[0], out), handed(result[1], lse)
    return handed(result, out)
