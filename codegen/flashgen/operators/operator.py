"""What an operator is: its arguments, the axes that tell its kernels apart, and the problems of its calls."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from flashgen.operators.arguments import Argument, ArrayLayout, Strides
from flashgen.operators.rules import ENDS
from flashgen.operators.splits import AUTO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.blocklists import BlockLists
    from flashgen.operators.rules import Rule, RuleOfCall
    from flashgen.operators.scores import Score
    from flashgen.operators.splits import Splits

Value = str | int
Number = int | float

# What the extents of arrays are where all sequences of a batch have one length.
_WITHOUT_LENGTHS = {"batch_q": "batch", "batch_kv": "batch", "rows_q": "seqlen_q", "rows_kv": "seqlen_kv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One call, normalised: everything but its pointers, so it is hashable and the same for every call of one
    layout.

    ``dtype`` is the dtype of elements. ``strides`` has, for each argument of the operator, the strides of all
    dimensions but the last, in elements, 0 where the extent is at most 1; None for an array that is absent.
    ``device`` is a CUDA ordinal, or None for host memory. ``batched`` is False where the caller left out the
    batch dimension.
    """

    dtype: str
    strides: tuple[Strides | None, ...]
    device: int | None = None
    batched: bool = True
    operator: ClassVar[Operator]
    # Whether sizes are bounds of lengths that only a kernel reads.
    lengths_on_device: ClassVar[bool] = False
    # The score modification of the call, for operators that have one; `scores.Score`.
    score: ClassVar[Score | None] = None
    # The mask by a line of the call, for operators that have one; `rules.RuleOfCall`.
    rule: ClassVar[RuleOfCall | None] = None
    # The lists of key blocks of the call, for operators that have some; `blocklists.BlockLists`.
    block_lists: ClassVar[BlockLists | None] = None
    # How the keys of a sequence are split, for operators that have them; `splits.Splits`.
    splits: ClassVar[Splits] = AUTO
    # How many multiprocessors the kernel leaves to others.
    sm_margin: ClassVar[int] = 0

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each symbol in the shapes of the arguments."""
        return {symbol: getattr(self, symbol) for symbol in sorted(self.operator.symbols)}

    def symbol_name(self, symbol: str) -> str:
        """What a caller calls a symbol of the arguments' shapes."""
        return symbol

    @property
    def empty(self) -> bool:
        """Whether there is no output element to write."""
        raise NotImplementedError

    @property
    def results(self) -> tuple[int, ...]:
        """The positions of the outputs that the caller gets, in order."""
        return tuple(
            position
            for position, (argument, strides) in enumerate(
                zip(self.operator.arguments, self.strides, strict=True)
            )
            if argument.is_output and strides is not None
        )

    def has(self, name: str) -> bool:
        """Whether the call has an array for the argument called ``name``."""
        position = self.operator.positions.get(name)
        return position is not None and self.strides[position] is not None

    @property
    def invariant(self) -> bool:
        """Whether the bits of a sequence must not depend on its batch nor on the GPU's multiprocessors."""
        return self.splits != AUTO

    @property
    def seen_keys(self) -> tuple[int, int]:
        """The keys [begin, end) that some query sees, unless a dense mask hides them: of an operator with
        queries and keys. A key outside has no effect, whatever its bits.
        """
        raise NotImplementedError

    def standard(self) -> Problem:
        """What stands for such a problem where its kernel is chosen: the same for each batch."""
        raise NotImplementedError

    def dtype_of(self, argument: Argument) -> str:
        """The dtype of an array of the call; of an argument that allows several, the last one."""
        return argument.dtype(self.dtype)

    def new_dtype(self, argument: Argument) -> str | None:
        """The dtype of an output that nobody passed; None: the dtype of the first array."""
        return argument.dtypes[0] if argument.dtypes else None

    def array_layouts(self) -> tuple[ArrayLayout | None, ...]:
        """The layout of each argument, in the operator's order; None for an absent one."""
        sizes = self.sizes
        return tuple(self.layout_of(position, sizes) for position in range(len(self.strides)))

    def array(self, name: str) -> ArrayLayout | None:
        """The layout of the argument ``name``."""
        return self.layout_of(self.operator.position(name), self.sizes)

    def layout_of(self, position: int, sizes: Mapping[str, int]) -> ArrayLayout | None:
        """The layout of one argument. A caller passes `sizes`, which take time to compute."""
        argument, strides = self.operator.arguments[position], self.strides[position]
        if strides is None:
            return None
        return ArrayLayout(argument, argument.extents(sizes), strides, self.dtype_of(argument))

    def spans(self) -> tuple[tuple[int, int], ...]:
        """For each argument the first byte touched and the one past the last, from its pointer."""
        return tuple((0, 0) if layout is None else layout.span() for layout in self.array_layouts())

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of an argument as the caller has it: without batch where the caller left that out."""
        argument = self.operator.arguments[position]
        extents = argument.extents(self.sizes)
        return extents if self.batched or not argument.leads_with_batch else extents[1:]

    def description(self) -> str:
        """What a variant has to be to compute it, for a message: ``head_dim 64, dtype fp16, ...``."""
        raise NotImplementedError

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """The dimensions that a grid may cover, for a variant with these axes: rows, heads, ..."""
        raise NotImplementedError

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        """The numbers that parameters of a variant with these axes may name, beside sizes and strides."""
        raise NotImplementedError

    def scalar_values(self) -> dict[str, Number]:
        """The entries of `values` that follow from the scalars alone."""
        return {}

    def with_scalars(self, scalars: Sequence[Any]) -> Problem:
        """This problem with other scalars, in the operator's order; None keeps one. Raises BadParam."""
        return self


class Axis(NamedTuple):
    """How an operator claims an axis of its families' specs.

    ``serves`` tells whether a variant with a value computes a problem. ``choices`` lists the values that a
    spec may give the axis; None: any whole number above 0. Of an axis that is a ``size`` the smallest value
    that serves is the best. ``default`` is what a spec without the axis stands for, and ``default_from`` the
    axis that has this value; with neither, every spec has the axis.
    """

    serves: Callable[[Any, Value], bool]
    choices: tuple[Value, ...] | None = None
    size: bool = False
    default: Value | None = None
    default_from: str | None = None

    @property
    def required(self) -> bool:
        return self.default is None and self.default_from is None

    @classmethod
    def equal(
        cls, of: Callable[[Any], Value], choices: tuple[Value, ...], default: Value | None = None
    ) -> Axis:
        """An axis whose value is the one that ``of`` gives for the problem."""
        return cls(lambda problem, value: value == of(problem), choices, default=default)

    @classmethod
    def either(cls, word: str, of: Callable[[Any], bool]) -> Axis:
        """An axis that is ``word`` where ``of`` is true of the problem, else none."""
        return cls(lambda problem, value: (value == word) == of(problem), ("none", word), default="none")


@dataclass(frozen=True, eq=False)
class Operator:
    """One operation: ``arguments`` in the order of pointers; ``options``, which decide what is computed;
    ``scalars``, numbers that may differ from call to call of a plan; ``axes``, which tell its kernels apart;
    ``grid_dimensions``, which a kernel's grid may cover (`Problem.grid_extents`).

    ``contract(operator, views, options, scalars)`` is `normalise`, of this operator or one made from it.

    ``of_lengths`` names the arguments, options, axes and grid dimensions that only calls with lengths have,
    ``of_plain`` those that only calls without lengths have: see `with_lengths` and `without_lengths`.

    ``check_elements(problem, arrays)`` raises the error of elements that contradict a problem; ``arrays``
    has, by name, the arrays of ``elements_checked`` in host memory, None for an absent array. The CPU path
    always checks, others if FLASHGEN_CHECK is set.

    ``differentiates`` is whether its kernels compute the derivative of a score modification, too.
    ``of_score(arguments, score)`` are its arguments before those of a score modification, where they differ.
    """

    name: str
    arguments: tuple[Argument, ...]
    options: tuple[str, ...]
    scalars: tuple[str, ...]
    axes: Mapping[str, Axis]
    grid_dimensions: tuple[str, ...]
    contract: Callable[..., Problem] = field(repr=False)
    elements_checked: tuple[str, ...] = ()
    check_elements: Callable[..., None] | None = field(default=None, repr=False)
    differentiates: bool = False
    of_lengths: tuple[str, ...] = ()
    of_plain: tuple[str, ...] = ()
    of_score: Callable[..., tuple[Argument, ...]] | None = field(default=None, repr=False)

    def normalise(
        self, views: Sequence[ArrayView | None], options: Sequence[Any], scalars: Sequence[Any]
    ) -> Problem:
        """The Problem of a call, or the error of the contract that it breaks. ``views`` has an ArrayView, or
        None, for each argument.
        """
        return self.contract(self, views, options, scalars)

    @functools.cached_property
    def with_lengths(self) -> Operator:
        """This operator for calls with lengths."""
        return self._without(self.of_plain) if self.of_plain else self

    @functools.cached_property
    def without_lengths(self) -> Operator:
        """This operator for calls without lengths, whose arrays have a batch of sequences of one length. Such
        a call carries no entry for what it cannot have.
        """
        if not self.of_lengths:
            return self
        plain = self._without(self.of_lengths)
        arguments = (
            argument._replace(shape=" ".join(_WITHOUT_LENGTHS.get(x, x) for x in argument.symbols))
            for argument in plain.arguments
        )
        checked = tuple(name for name in self.elements_checked if name in plain.positions)
        return dataclasses.replace(
            plain,
            arguments=tuple(arguments),
            elements_checked=checked,
            check_elements=self.check_elements if checked else None,
        )

    def _without(self, names: Sequence[str]) -> Operator:
        """This operator without arguments, options, axes and grid dimensions of these names."""
        return dataclasses.replace(
            self,
            elements_checked=tuple(name for name in self.elements_checked if name not in names),
            arguments=tuple(argument for argument in self.arguments if argument.name not in names),
            options=tuple(name for name in self.options if name not in names),
            axes={name: axis for name, axis in self.axes.items() if name not in names},
            grid_dimensions=tuple(name for name in self.grid_dimensions if name not in names),
            of_lengths=(),
            of_plain=(),
        )

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols in the shapes of its arguments."""
        return frozenset(x for argument in self.arguments for x in argument.symbols if not x.isdecimal())

    @functools.cached_property
    def positions(self) -> dict[str, int]:
        return {argument.name: position for position, argument in enumerate(self.arguments)}

    def position(self, name: str) -> int:
        """The position of an argument among pointers and arrays."""
        return self.positions[name]

    def shape_beside(self, name: str, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...] | None:
        """The shape of an argument of a call whose other arrays have these, by name; without batch where they
        have none. None where they do not say.
        """
        sizes: dict[str, int] = {}
        for other, shape in shapes.items():
            symbols = self.arguments[self.position(other)].symbols
            if len(symbols) - 1 <= len(shape) <= len(symbols):
                sizes = dict(zip(reversed(symbols), reversed(shape), strict=False)) | sizes
        argument = self.arguments[self.position(name)]
        symbols = argument.symbols
        if argument.leads_with_batch and symbols[0] not in sizes:
            symbols = symbols[1:]
        return tuple(sizes[symbol] for symbol in symbols) if sizes.keys() >= {*symbols} else None

    def in_order(self, **by_name: Any) -> tuple[Any, ...]:
        """Values given by the names of arguments, in their order; None for the others."""
        unknown = by_name.keys() - self.positions.keys()
        if unknown:
            raise KeyError(f"{self.name} has no argument {', '.join(sorted(unknown))}")
        return tuple(by_name.get(argument.name) for argument in self.arguments)

    def axis_values(self, axes: Mapping[str, Value]) -> dict[str, Value]:
        """The value of each claimed axis for a variant, by default where its spec has no such axis."""
        values = dict(axes)
        for name, axis in self.axes.items():
            if name not in values:
                values[name] = axis.default if axis.default_from is None else values[axis.default_from]
        return values

    def serves(self, problem: Problem, axes: Mapping[str, Value]) -> bool:
        """Whether a variant with these axes computes ``problem``, for any layout of its arrays."""
        values = self.axis_values(axes)
        return all(axis.serves(problem, values[name]) for name, axis in self.axes.items())

    def work(self, axes: Mapping[str, Value]) -> tuple[int, ...]:
        """What to compare variants by, the least first: the sum of their sizes, then each."""
        names = self._size_axes
        values = axes if all(name in axes for name in names) else self.axis_values(axes)
        sizes = tuple(values[name] for name in names)
        return (sum(sizes), *sizes)

    @functools.cached_property
    def _size_axes(self) -> tuple[str, ...]:
        return tuple(name for name, axis in self.axes.items() if axis.size)


def extended(operator: Operator, score: Score | None, rule: Rule | None = None) -> Operator:
    """``operator`` with that score modification and that mask by a line, if any."""
    operator = operator if score is None else modified(operator, score)
    return operator if rule is None else lined(operator, rule)


@functools.lru_cache(maxsize=64)
def modified(operator: Operator, score: Score) -> Operator:
    """``operator`` with a score modification, whose arrays are arguments after the others."""
    own = operator.arguments if operator.of_score is None else operator.of_score(operator.arguments, score)
    return dataclasses.replace(
        operator,
        arguments=(*own, *(param.argument() for param in score.arrays)),
        scalars=(*operator.scalars, *(param.name for param in score.scalars)),
    )


@functools.lru_cache(maxsize=64)
def lined(operator: Operator, rule: Rule) -> Operator:
    """``operator`` with a mask by a line, whose arrays are arguments after all others. Its last option,
    ``rule``, is a `rules.RuleOfCall`.
    """
    return dataclasses.replace(
        operator,
        arguments=(*operator.arguments, *(param.argument() for param in rule.arrays)),
        options=(*operator.options, "rule"),
        elements_checked=operator.elements_checked + (() if rule.pack is None else ENDS),
    )


def by_position(normalise: Callable[..., Problem]) -> Callable[..., Problem]:
    """`Operator.contract` by a function that takes arrays by position and options by their names."""

    def contract(
        operator: Operator, views: Sequence[ArrayView | None], options: Sequence[Any], scalars: Sequence[Any]
    ) -> Problem:
        return normalise(*views, **dict(zip(operator.options, options, strict=True)))

    return contract


def by_name(normalise: Callable[..., Problem], without: Sequence[str] = ()) -> Callable[..., Problem]:
    """`Operator.contract` by a function that takes arrays, options and ``softmax_scale`` by their names, and
    what belongs to a score modification in ``score_arrays`` and ``score_scalars``, and to a mask by a line in
    ``rule_arrays``. The arguments ``without`` are not passed: an LSE is there where return_lse says so.
    """

    def contract(
        operator: Operator, views: Sequence[ArrayView | None], options: Sequence[Any], scalars: Sequence[Any]
    ) -> Problem:
        named = dict(zip(operator.options, options, strict=True))
        softmax_scale, *score_scalars = scalars
        rule = named.get("rule")
        end = len(views) - (len(rule.rule.arrays) if rule else 0)
        if rule:
            named["rule_arrays"] = views[end:]
        count = end - (len(named["score"].arrays) if named.get("score") else 0)
        names = [argument.name for argument in operator.arguments[:count]]
        return normalise(
            **{name: view for name, view in zip(names, views, strict=False) if name not in without},
            softmax_scale=softmax_scale,
            score_arrays=views[count:end],
            score_scalars=score_scalars,
            **named,
        )

    return contract
