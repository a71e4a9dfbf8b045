"""A plan: a Problem bound to the backend that computes it, to be called with arrays again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    NullPointer,
    arg,
)
from flashgen.operators.arguments import WORKSPACE_ALIGNMENT, Argument, ArrayLayout, is_contiguous
from flashgen.operators.overlaps import check_memory
from flashgen.runtime import arrays as libraries
from flashgen.runtime import check, dlpack, torchkind
from flashgen.runtime.adopted import run_adopted
from flashgen.runtime.arrays import Arrays, Pointers, Work
from flashgen.runtime.misfits import check_fit, check_workspace
from flashgen.runtime.streams import stream_pointer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem
    from flashgen.schedule.plan import Step

# A call that is checked and only has to be queued: its work, arrays and pointers, the handle of its stream,
# and its workspace, which lives until the work is queued.
Ready = tuple[Work, Arrays, Pointers, int, Any]
# Works that a plan keeps, by addresses and scalars.
MAX_WORKS = 256
# What messages refer to as the inputs that a call of a plan has to give.
TAKES = "what the plan takes"
_OF_WORKSPACE = -1  # instead of the position of a result
_WORKSPACE = Argument("workspace", "output", "bytes", ("uint8",), "contiguous", WORKSPACE_ALIGNMENT)


class Runner(Protocol):
    """What a backend makes of a Problem."""

    variant: Variant | None
    steps: tuple[Step, ...]
    workspace_bytes: int

    def at(self, pointers: Pointers, problem: Problem) -> Work:
        """The work for arrays at these addresses, with the scalars of ``problem``, to be queued any number of
        times, by many threads.
        """


class Plan:
    """One call of an operator, for one set of shapes, strides, dtypes and options; made by ``flashgen.plan``.

    ``problem`` is what it computes, ``variant`` the main kernel (None on the CPU). ``steps`` are its kernel
    launches, in order (none on the CPU): each has its ``variant``, ``launch`` and ``source``. ``source`` is
    the CUDA of the main kernel, ``workspace_bytes`` the memory that a call needs beyond inputs and outputs. A
    plan may be called from many threads. It cannot be pickled: each process makes its own.
    """

    __slots__ = (
        "_absent",
        "_checked",
        "_current_stream",
        "_device",
        "_empty",
        "_expected",
        "_expected_workspace",
        "_expecting",
        "_hint",
        "_known",
        "_known_workspace",
        "_layouts",
        "_makers",
        "_memory",
        "_needed",
        "_no_scalars",
        "_operator",
        "_outputs",
        "_positions",
        "_read",
        "_results",
        "_runner",
        "_spread",
        "_types",
        "_works",
        "_wrote",
        "kind",
        "problem",
    )

    def __init__(self, problem: Problem, runner: Runner, examples: Arrays, hint: str = "") -> None:
        """``examples``: arrays of the layouts to come, for each argument. None of them is kept. ``hint``:
        what messages add to the names of the arrays that the plan takes.
        """
        kind = libraries.kind_of(examples[0])
        self.problem, self.kind = problem, kind
        self._runner, self._hint = runner, hint
        self._read, self._current_stream, self._device = kind.read, kind.current_stream, problem.device
        self._empty = problem.empty
        self._layouts = kind.read(examples)[0]
        # The layouts of the last call, which were found to fit: the next one need not look again.
        self._known = self._layouts
        self._known_workspace: Any = None  # the same of the workspace
        # If the library has a fast check of these layouts: a function that returns the arrays' pointers.
        self._expecting = kind.expecting
        self._expected: Any = None
        self._expected_workspace: Any = None
        # The layouts and the spans of all arrays and of the workspace, once they were needed.
        self._memory: tuple[tuple[ArrayLayout | None, ...], tuple[tuple[int, int], ...]] | None = None
        # What to queue, by pointers at which memory was sound, and by scalars.
        self._works: dict[Any, Work] = {}
        self._types, self._wrote = kind.types, kind.wrote
        # What each call needs is bound here: every look-up on the way to a launch counts.
        self._operator = operator = problem.operator
        self._positions, self._results = operator.positions, problem.results
        self._absent, self._no_scalars = (None,) * len(examples), (None,) * len(operator.scalars)
        self._needed = runner.workspace_bytes
        # The CPU path reads lengths in any case.
        self._checked = runner.variant is not None and check.applies_to(operator)
        arguments = operator.arguments
        self._outputs = {
            place: (problem.shape(place), problem.new_dtype(arguments[place])) for place in self._results
        }
        # Results with a layout that empty_like would not produce: each call has to pass them.
        outputs = {place: examples[place] for place in self._results if examples[place] is not None}
        views = {place: libraries.view(x, arguments[place].name) for place, x in outputs.items()}
        self._spread = {place: view.strides for place, view in views.items() if not is_contiguous(view)}
        # What allocates results and workspace, if the library has something quicker than `empty` for it.
        self._makers: dict[int, Any] | None = None
        if kind.maker is not None:
            size = (self._needed + WORKSPACE_ALIGNMENT,)
            new = self._outputs | {_OF_WORKSPACE: (size, "uint8")}
            self._makers = {
                place: kind.maker(shape, examples[0], dtype) for place, (shape, dtype) in new.items()
            }

    def with_layouts(self, problem: Problem, runner: Runner, layouts: Any, changed: Sequence[int]) -> Plan:
        """A plan of a problem that differs from this plan's in the layouts of the inputs at ``changed``, for
        arrays of ``layouts``, as `Kind.read` has them.
        """
        other = object.__new__(Plan)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.problem, other._runner, other._layouts, other._known = problem, runner, layouts, layouts
        other._expected, other._works = None, {}
        if self._memory is not None:
            array_layouts, spans = map(list, self._memory)
            sizes = problem.sizes
            for place in changed:
                array_layouts[place] = array = problem.layout_of(place, sizes)
                spans[place] = array.span()
            other._memory = tuple(array_layouts), tuple(spans)
        return other

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def variant(self) -> Variant | None:
        return self._runner.variant

    @property
    def steps(self) -> tuple[Step, ...]:
        return self._runner.steps

    @property
    def source(self) -> str:
        from flashgen.source.render import render

        return "" if self.variant is None else render(self.variant)

    @property
    def workspace_bytes(self) -> int:
        return self._runner.workspace_bytes

    def __repr__(self) -> str:
        return f"<flashgen.Plan {self.variant.name if self.variant else 'cpu'}: {self.problem}>"

    def __copy__(self) -> Plan:
        # Nothing that decides a plan's results ever changes, so a copy would be the same.
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a flashgen.Plan cannot be pickled: its kernel is loaded in the process that made it; "
            "make one in the other process with flashgen.plan"
        )

    # A parameter of a score may be called self.
    def __call__(self, /, *inputs: Any, stream: Any = None, workspace: Any = None, **named: Any) -> Any:
        """Compute arrays that have the layouts of the plan: the inputs in the order of the operator, or any
        argument by its name; see ``flashgen.attention``.

        Outputs, such as ``out`` and ``lse``, receive the results where given: with the layout that they had
        when the plan was made, or contiguous if they were not there. One that was not contiguous has to be
        given in each call. ``lse`` is allowed where the plan was
        made with ``return_lse``. A scalar, for example ``softmax_scale``, may differ from the plan's.
        ``workspace`` is an array of at least ``workspace_bytes``, contiguous, on the plan's device, in memory
        that no other argument touches; without it memory is allocated for the call. Returns ``out``, or
        ``(out, lse)`` with ``return_lse``.

        Raises BadParam, NullPointer, BadTensorShape, BadTensorDtype, BadTensorStrides or
        DeviceTypeNotSupported for what does not fit the plan, and InsufficientWorkspace.
        """
        arrays, scalars = self.bound(inputs, named)
        try:
            pointers = self.pointers(arrays)
        except torchkind.RequiresGradient as error:
            raise error.of("plans") from None
        if pointers is None:
            return self._adopted(arrays, scalars, stream, workspace)
        return self.run(arrays, pointers, scalars, stream, workspace)

    def pointers(self, arrays: Arrays) -> Pointers | None:
        """The pointers of native arrays; None if one has to be adopted. Raises for arrays that do not fit."""
        if self._expected is not None:
            pointers = self._expected(arrays)
            if pointers is not None:
                return pointers
        if not self._types.issuperset(map(type, arrays)):
            kinds = [libraries.kind_of(x) for x in arrays if x is not None]
            if None in kinds:
                return None
            if any(kind is not self.kind for kind in kinds):
                self._check(arrays)  # raises: the libraries differ
        try:
            layouts, pointers = self._read(arrays)
        except RuntimeError:
            self._check(arrays)  # raises what is wrong, by the argument's name
            raise
        if layouts != self._known:
            self._check(arrays)
            self._known = layouts
        if self._expecting is not None:
            self._expected = self._expecting(arrays)
        return pointers

    def _adopted(self, arrays: Arrays, scalars: tuple[Any, ...], stream: Any, workspace: Any) -> Any:
        operator = self._operator
        rest = dict(zip(operator.scalars, scalars, strict=True)) | {"workspace": workspace}
        by_name = {argument.name: x for argument, x in zip(operator.arguments, arrays, strict=True)}
        try:
            return run_adopted(self, operator, by_name, stream, **rest)
        except BadTensorDtype:
            for name, x in by_name.items():
                if x is not None and not dlpack.is_array(x):
                    raise BadTensorDtype(f"{arg(name)} has type {type(x).__name__}; {self.takes()}") from None
            raise

    def run(
        self, arrays: Arrays, pointers: Pointers, scalars: tuple[Any, ...], stream: Any, workspace: Any = None
    ) -> Any:
        """``__call__`` for native arrays whose layouts are known to be the plan's, with their pointers."""
        work, filled, _, handle, _memory = self.ready(arrays, pointers, scalars, stream, workspace)
        work(filled, handle)
        results = self._results
        if self._wrote is not None:  # as `tell_written` and `results_of`, without two more calls
            for position in results:
                if arrays[position] is not None:
                    self._wrote(arrays[position])
        return filled[results[0]] if len(results) == 1 else tuple([filled[place] for place in results])

    def tell_written(self, arrays: Arrays) -> None:
        """Tell their library that the results among these arrays of a call were written to."""
        if self._wrote is not None:
            for position in self._results:
                if arrays[position] is not None:
                    self._wrote(arrays[position])

    def ready(
        self, arrays: Arrays, pointers: Pointers, scalars: tuple[Any, ...], stream: Any, workspace: Any = None
    ) -> Ready:
        """All of ``run`` but queueing: the checks, and the memory of results and workspace."""
        if stream is None:
            handle = self._current_stream(self._device)
        elif self._device is None:
            raise BadParam("stream was given, but the arrays are in host memory, where there are no streams")
        else:
            handle = stream_pointer(stream)
        caller_pointers = pointers
        for position in self._results:
            if arrays[position] is None:
                arrays, pointers = self._allocated(arrays, pointers, stream)
                break
        memory = None  # lives until the work is queued; an allocator reuses it in the order of the stream
        if self._needed:
            memory, address = self._workspace(workspace, arrays[0], stream)
            pointers = (*pointers, address)
        elif workspace is not None:
            self._workspace(workspace, arrays[0], stream)  # raises what is wrong with it
        # Where memory was sound once it is again: what the plan allocated itself overlaps nothing.
        # A scalar of another type may be equal and be refused all the same, as True is for 1.
        key = pointers, scalars, *map(type, scalars)
        try:
            work = self._works.get(key)
        except TypeError:  # a scalar that is no number; _prepare says so
            key = work = None
        if work is None:
            work = self._prepare(key, caller_pointers, pointers, scalars, workspace is not None)
        return work, arrays, pointers, handle, memory

    def results_of(self, arrays: Arrays) -> Any:
        """What a call returns: the one of its arrays that is a result, or a tuple of them."""
        results = self._results
        return arrays[results[0]] if len(results) == 1 else tuple([arrays[place] for place in results])

    @property
    def checks_elements(self) -> bool:
        """Whether each call reads its lengths and tables on the host, and checks them."""
        return self._checked or (self.variant is None and self.problem.operator.check_elements is not None)

    def bound(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Arrays, tuple[Any, ...]]:
        """Arrays in the operator's order, and scalars in theirs."""
        operator, count = self._operator, len(inputs)
        positions = self._positions
        if count > len(positions):
            raise BadParam(f"{count} arrays were given; {operator.name} has {len(positions)}")
        arrays: list[Any] = [*inputs, *self._absent[count:]]
        scalars = self._no_scalars
        for name, value in named.items():
            position = positions.get(name, -1)
            if position >= count:
                arrays[position] = value
            elif position < 0 and name in operator.scalars:
                place = operator.scalars.index(name)
                scalars = (*scalars[:place], value, *scalars[place + 1 :])
            else:
                names = ", ".join((*positions, *operator.scalars, "stream", "workspace"))
                why = "is not an argument" if position < 0 else "was given twice"
                raise BadParam(f"{arg(name)} {why}; the arguments are {names}")
        return tuple(arrays), scalars

    def _allocated(self, caller_arrays: Arrays, addresses: Pointers, stream: Any) -> tuple[Arrays, Pointers]:
        """The arrays with new ones for all outputs that are missing, and their pointers."""
        kind, arrays, pointers = self.kind, [*caller_arrays], [*addresses]
        quick = self._makers is not None and stream is None and type(arrays[0]) in self._types
        for position, (shape, dtype) in self._outputs.items():
            if arrays[position] is None:
                if position in self._spread:
                    name, strides = self.problem.operator.arguments[position].name, self._spread[position]
                    raise NullPointer(
                        f"{arg(name)} is None, but the plan was made with one of strides {strides} (in "
                        f"elements); pass one with the same layout, or make the plan without {arg(name)}"
                    )
                like = caller_arrays[0]
                new = self._makers[position]() if quick else kind.empty(shape, like, stream, dtype)
                arrays[position], pointers[position] = new, kind.pointer(new)
        return tuple(arrays), tuple(pointers)

    def _workspace(self, workspace: Any, like: Any, stream: Any) -> tuple[Any, int]:
        """The caller's workspace, or a new one, and its address."""
        needed = self._needed
        if workspace is None:
            quick = self._makers is not None and stream is None and type(like) in self._types
            size = (needed + WORKSPACE_ALIGNMENT,)
            memory = self._makers[_OF_WORKSPACE]() if quick else self.kind.empty(size, like, stream, "uint8")
            return memory, -(-self.kind.pointer(memory) // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        if self._expected_workspace is not None:
            native_pointers = self._expected_workspace((workspace,))
            if native_pointers is not None and not native_pointers[0] % WORKSPACE_ALIGNMENT:
                return workspace, native_pointers[0]
        layout = None
        if type(workspace) in self._types:
            try:
                (layout,), (address,) = self._read((workspace,))
            except RuntimeError:  # of a tensor without strides, which `view` refuses by name
                libraries.view(workspace, "workspace")
                raise
            if layout == self._known_workspace and not address % WORKSPACE_ALIGNMENT:
                return workspace, address
        view = libraries.view(workspace, "workspace")
        check_workspace(workspace, view, self.kind, self._device, needed)
        self._known_workspace = layout
        if self._expecting is not None:
            self._expected_workspace = self._expecting((workspace,))
        return workspace, view.pointer

    def _prepare(
        self,
        key: Any,
        caller_pointers: Pointers,
        pointers: Pointers,
        scalars: tuple[Any, ...],
        own_workspace: bool,
    ) -> Work:
        """What to queue for arrays at ``pointers``, if their memory is sound; ``caller_pointers`` has 0 for
        outputs that were just allocated, and ``own_workspace`` says that the caller passed one. Raises what
        is wrong.
        """
        problem = self.problem
        written = [place for place in problem.results if caller_pointers[place]]
        if self._memory is None:
            layouts = (*problem.array_layouts(), workspace_layout(self._needed))
            self._memory = layouts, (*problem.spans(), layouts[-1].span())
        layouts, spans = self._memory
        arguments = (*problem.operator.arguments, _WORKSPACE)
        count = len(arguments) - 1
        if self._needed and own_workspace:
            written.append(count)
            count += 1
        check_memory(arguments[:count], spans[:count], pointers[:count], written, layouts[:count])
        called = problem.with_scalars(scalars)
        work = _no_work if self._empty else self._runner.at(pointers, called)
        if self._checked or (self._empty and self.checks_elements):  # the CPU path checks what it computes
            work = check.checked(work, problem, pointers)
        if key is not None:
            self._keep(key, work)
        return work

    def _keep(self, key: Any, work: Work) -> None:
        if len(self._works) >= MAX_WORKS:
            self._works = {}  # where addresses keep changing, choosing what to forget would cost more
        self._works[key] = work

    def inputs(self) -> list[str]:
        """The names of the inputs that a call has to give."""
        planned = zip(self.problem.operator.arguments, self.problem.strides, strict=True)
        return [x.name for x, strides in planned if strides is not None and not x.is_output]

    def takes(self) -> str:
        """`inputs`, for a message."""
        words = f"the plan takes arrays by name: {', '.join(self.inputs())}{self._hint}"
        return arg(TAKES, words)

    def _check(self, arrays: Arrays) -> None:
        """Raise the error of arrays that do not fit the plan."""
        check_fit(self.problem, self.kind, self._layouts, self.takes, arrays)


def workspace_layout(size: int) -> ArrayLayout:
    """The layout of a workspace of ``size`` bytes."""
    return ArrayLayout(_WORKSPACE, (size,), (), "uint8")


def _no_work(arrays: Arrays, stream: int) -> None:
    """The work of a call without elements."""
