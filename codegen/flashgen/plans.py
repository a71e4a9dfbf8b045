"""A plan: a Problem bound to the backend that computes it, to be called with arrays again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from flashgen import arrays
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, BadTensorStrides
from flashgen.problem import ROW_ALIGNMENT, Problem, check_memory

if TYPE_CHECKING:
    from flashgen.arrays import Kind
    from flashgen.variant import Variant

Arrays = tuple[Any, Any, Any, Any, Any, Any]
Pointers = tuple[int, int, int, int, int, int]
_OUT, _LSE = 4, 5


class Runner(Protocol):
    """What a backend makes of a Problem: a callable that queues the work. Arrays and pointers are those of q,
    k, v, mask, out and lse, with None and 0 for what is absent. ``stream`` is a CUDA handle."""

    variant: Variant | None
    source: str
    workspace_bytes: int

    def __call__(self, arrays: Arrays, pointers: Pointers, stream: int) -> None: ...


class Plan:
    """Attention for one set of shapes, strides, dtypes and options; made by ``flashgen.plan``.

    ``problem`` is what it computes, ``variant`` the kernel (None on the CPU), ``source`` its CUDA,
    ``workspace_bytes`` the memory it needs beyond inputs and outputs. A plan may be called from many threads.
    """

    __slots__ = (
        "_empty",
        "_extents",
        "_kind",
        "_kv_layouts",
        "_lse_shape",
        "_mask_layout",
        "_out_layout",
        "_out_shape",
        "_q_layout",
        "_runner",
        "problem",
    )

    def __init__(self, problem: Problem, runner: Runner, kind: Kind, layouts: tuple[Any, ...]) -> None:
        self.problem = problem
        self._runner = runner
        self._kind = kind
        self._q_layout = layouts[0]
        self._kv_layouts = layouts[1:3]
        self._mask_layout, self._out_layout = layouts[3:]
        self._extents = problem.extents()
        self._out_shape, self._lse_shape, self._empty = problem.out_shape, problem.lse_shape, problem.empty

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
        kind = self._kind
        layout = kind.layout
        same = (
            arrays.kind_of(q) is arrays.kind_of(k) is arrays.kind_of(v) is kind
            and layout(q) == self._q_layout
            and (layout(k), layout(v)) == self._kv_layouts
            and self._accepts_mask(mask)
            and self._accepts_out(out)
            and self._accepts_lse(lse)
        )
        if not same:
            if any(x is not None and arrays.kind_of(x) is None for x in (q, k, v, mask, out, lse)):
                return run_adopted(self, q, k, v, mask=mask, out=out, lse=lse, stream=stream)
            self._explain(q, k, v, mask, out)
        return self.run(q, k, v, mask, out, lse, stream)

    def run(self, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, stream: Any) -> Any:
        """``__call__`` for native arrays whose layouts are known to be the plan's."""
        kind = self._kind
        problem = self.problem
        pointer = kind.pointer
        if stream is None:
            handle = kind.current_stream(q)
        elif problem.device is None:
            raise BadParam("stream was given, but the arrays are in host memory, where there are no streams")
        else:
            handle = arrays.stream_pointer(stream)
        written: tuple[int, ...] = ()
        if out is None:
            out = kind.empty(self._out_shape, problem.dtype, q, stream)
        else:
            written = (_OUT,)
        lse_pointer = 0
        if problem.return_lse:
            if lse is None:
                lse = kind.empty(self._lse_shape, "fp32", q, stream)
            else:
                written += (_LSE,)
            lse_pointer = pointer(lse)
        at_q, at_k, at_v, at_out = pointer(q), pointer(k), pointer(v), pointer(out)
        pointers = (at_q, at_k, at_v, 0 if mask is None else pointer(mask), at_out, lse_pointer)
        if written or (at_q | at_k | at_v | at_out) % ROW_ALIGNMENT or not (at_q and at_k and at_v):
            check_memory(self._extents, pointers, written)
        if not self._empty:
            self._runner((q, k, v, mask, out, lse), pointers, handle)
        return (out, lse) if problem.return_lse else out

    def _accepts_mask(self, mask: Any) -> bool:
        if mask is None or self._mask_layout is None:
            return mask is None and self._mask_layout is None
        return arrays.kind_of(mask) is self._kind and self._kind.layout(mask) == self._mask_layout

    def _accepts_out(self, out: Any) -> bool:
        if out is None:
            return True
        if arrays.kind_of(out) is not self._kind:
            return False
        if self._out_layout is not None:
            return self._kind.layout(out) == self._out_layout
        view = self._kind.view(out)
        problem = self.problem
        seqlen, heads, width = problem.seqlen_q, problem.num_heads_q, problem.head_dim
        strides = (heads * seqlen * width, heads * width, width, 1)[-len(view.shape) :]
        return (
            (view.shape, view.dtype, view.device) == (problem.out_shape, problem.dtype, problem.device)
            and view.strides is not None
            and all(e <= 1 or s == t for e, s, t in zip(view.shape, view.strides, strides, strict=True))
        )

    def _accepts_lse(self, lse: Any) -> bool:
        if lse is None:
            return True
        if arrays.kind_of(lse) is not self._kind:
            return False
        problem = self.problem
        if not problem.return_lse:
            raise BadParam("lse was given to a plan made without return_lse=True")
        view = arrays.view(lse, "lse")
        if view.dtype != "fp32" or view.device != problem.device:
            raise BadTensorDtype(f"lse has dtype {view.dtype}; expected fp32, on the device of q")
        if view.shape != problem.lse_shape:
            raise BadTensorShape(f"lse has shape {view.shape}; expected {problem.lse_shape}")
        expected = 1
        for extent, stride in zip(reversed(view.shape), reversed(view.strides or ()), strict=False):
            if extent > 1 and stride != expected:
                raise BadTensorStrides(f"lse has strides {view.strides} (in elements); it must be contiguous")
            expected *= extent
        return True

    def _explain(self, q: Any, k: Any, v: Any, mask: Any, out: Any) -> None:
        given = {"q": q, "k": k, "v": v, "mask": mask, "out": out}
        planned = (self._q_layout, *self._kv_layouts, self._mask_layout, self._out_layout)
        for (name, array), layout in zip(given.items(), planned, strict=True):
            if array is None and (layout is None or name == "out"):
                continue
            if layout is None and name == "mask":
                raise BadParam("mask was given to a plan made without one")
            view = arrays.view(array, name)
            if view.kind != self._kind.name:
                raise BadParam(
                    f"{name} is a {view.kind} array, but the plan was made for {self._kind.name} arrays"
                )
            if layout is None or self._kind.layout(array) != layout:
                expected = "a contiguous array like q" if layout is None else f"{layout}"
                raise BadTensorShape(
                    f"{name} does not have the layout of the plan: it has {self._kind.layout(array)}, "
                    f"the plan was made for {expected}"
                )
        raise BadParam("lse is an array of another library than q")


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
