"""Score modifications: formulas that replace a score after scaling, before the mask and softmax.

A modification is one formula over ``score`` = softmax_scale q k^T, the positions ``q`` and ``kv``, the query
head ``h``, the batch entry ``b`` and parameters of its own. q counts from the first key, aligned so that the
last query is at the last key: query i has q = i + seqlen_kv - seqlen_q.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import DTYPE_BYTES, Argument, shown
from flashgen.operators.derivative import derivative
from flashgen.operators.formula import MAX_DEPTH, MAX_SIZE, Node, evaluate, number, short_text
from flashgen.operators.lowering import Lowered, lower

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# The types of the names that every formula may use.
NAMES = {"score": "float", "q": "int", "kv": "int", "h": "int", "b": "int"}
# The dimensions of an array that have a size of the call; any other is as long as the caller's array.
DIMENSIONS = {"b": "batch", "h": "num_heads_q", "q": "seqlen_q", "kv": "seqlen_kv"}
# How the names of modifications begin that are formulas without a file; a digest of the formula follows.
FORMULA = "formula_"


class ParamType(NamedTuple):
    """The type of a parameter: in a formula, of the elements of an array, and in C; and how large a number
    may be.
    """

    formula: str
    dtype: str
    ctype: str
    largest: float


# By the names that a spec gives them.
TYPES = {
    "f32": ParamType("float", "fp32", "float", 3.0e38),
    "i32": ParamType("int", "int32", "int32_t", 2**30),
    # Of arrays alone: what f32 stands for where the array has such elements.
    "f16": ParamType("float", "fp16", "fp16", 65504.0),
    "bf16": ParamType("float", "bf16", "bf16", 3.0e38),
}
# The types of arrays by the dtype of 16-bit elements.
HALF_TYPES = {"float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class ScoreParam:
    """A parameter of a modification: a number, or an array where it has dimensions. ``type`` is one of
    TYPES.
    """

    name: str
    type: str
    dimensions: tuple[str, ...] = ()

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols of the dimensions: one of the operator's, or one of its own."""
        return tuple(DIMENSIONS.get(dimension, f"{self.name}_{dimension}") for dimension in self.dimensions)

    @property
    def is_integer(self) -> bool:
        return TYPES[self.type].formula == "int"

    @property
    def dtype(self) -> str:
        """Of its elements."""
        return TYPES[self.type].dtype

    def argument(self) -> Argument:
        """The array as an argument of the operator."""
        shape, alignment = " ".join(self.symbols), DTYPE_BYTES[self.dtype]
        return Argument(self.name, "input", shape, (self.dtype,), "broadcast", alignment)


class ScoreSource(NamedTuple):
    """What a call makes a modification of: the names of modifications or their formulas, the type of each
    parameter of a formula, and the numbers that tensors hold.
    """

    names: tuple[str, ...]
    types: tuple[tuple[str, str], ...] = ()
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Score:
    """A modification: its formula as ``text`` and as a tree, and its parameters. Kernels of gradients
    differentiate it with respect to ``wrt``: the score, or an array. ``source`` is what a call made it of.
    """

    name: str
    text: str
    params: tuple[ScoreParam, ...]
    tree: Node = field(compare=False, repr=False)
    wrt: str = "score"
    source: ScoreSource | None = field(default=None, compare=False, repr=False)

    @property
    def title(self) -> str:
        """What a message calls it: its name, or the formula of one without a file."""
        return f"`{self.text}`" if FORMULA in self.name else self.name

    @cached_property
    def arrays(self) -> tuple[ScoreParam, ...]:
        return tuple(param for param in self.params if param.dimensions)

    @cached_property
    def scalars(self) -> tuple[ScoreParam, ...]:
        return tuple(param for param in self.params if not param.dimensions)

    def with_respect_to(self, array: str) -> Score:
        """The modification for kernels of the gradient of one of its arrays."""
        score = self._by_array.get(array)
        if score is None:
            score = self._by_array[array] = replace(self, name=f"{self.name}_d{array}", wrt=array)
        return score

    @cached_property
    def _by_array(self) -> dict[str, Score]:
        return {}

    def with_types(self, types: Mapping[str, str]) -> Score:
        """The modification whose arrays of numbers have these types, by name: the types of 16-bit elements.
        Other names have no effect.
        """
        changed = {x.name: types[x.name] for x in self.arrays if x.type == "f32" and x.name in types}
        if not changed:
            return self
        params = tuple(replace(x, type=changed.get(x.name, x.type)) for x in self.params)
        name = "_".join((self.name, *(f"{array}_{type}" for array, type in sorted(changed.items()))))
        return replace(self, name=name, params=params)

    def with_tensors(self, names: Sequence[str]) -> Score:
        """The modification whose numbers of these names are elements of arrays, of one element each."""
        params = tuple(replace(x, dimensions=("one",)) if x.name in names else x for x in self.params)

        def element(node: Node) -> Node | None:
            is_number = node.op == "name" and node.value in names
            return Node("load", (number(0),), node.value) if is_number else None

        name = "_".join((self.name, *(f"{name}_at" for name in names)))
        source = self.source and self.source._replace(tensors=(*names,))
        return replace(self, name=name, params=params, tree=self.tree.replaced(element), source=source)

    @cached_property
    def staged(self) -> ScoreParam | None:
        """The array whose elements a kernel may copy to shared memory before it has their scores: the first
        of 16-bit elements that is read by query and key, if there is one.
        """
        return next((array for array in self._by_pair if DTYPE_BYTES[array.dtype] == 2), None)

    @cached_property
    def streamed(self) -> ScoreParam | None:
        """As `staged`, for kernels that take elements of 32 bits as well."""
        floats = (array for array in self._by_pair if not array.is_integer)
        return self.staged or next(floats, None)

    @property
    def _by_pair(self) -> list[ScoreParam]:
        """The arrays that are read by query and key."""
        return [
            array
            for array in self.arrays
            if array.dimensions[-1] == "kv" and {"q"} < set(array.dimensions) <= set(DIMENSIONS)
        ]

    @property
    def reads_half(self) -> bool:
        """Whether it reads an array of 16-bit elements."""
        return any(DTYPE_BYTES[array.dtype] == 2 for array in self.arrays)

    def lowered(self, dtype: str, differentiated: bool = False) -> Lowered:
        """What a kernel of elements of ``dtype`` computes; what follows from scalars alone is a constant.
        ``differentiated`` is whether the kernel computes the derivative as well.
        """
        lowered = self._lowered.get((dtype, differentiated))
        if lowered is None:
            scalars = frozenset(param.name for param in self.scalars)
            slope = derivative(self.tree, self.wrt) if differentiated else None
            lowered = lower(self.tree, scalars, approximate=dtype != "fp32", derivative=slope)
            self._lowered[dtype, differentiated] = lowered
        return lowered

    @cached_property
    def _lowered(self) -> dict[tuple[str, bool], Lowered]:
        return {}

    def number(self, param: ScoreParam, value: Any) -> float:
        """A scalar of a call, checked. Raises BadParam."""
        number_type = numbers.Integral if param.is_integer else numbers.Real
        if not isinstance(value, number_type) or isinstance(value, bool):
            kind = "an integer" if param.is_integer else "a number"
            is_array = hasattr(value, "shape")
            what = f"has type {type(value).__name__}" if is_array else f"is {value!r}"
            raise BadParam(f"{arg(param.name)} {what}; the score {self.title} needs {kind}")
        try:
            checked = int(value) if param.is_integer else float(value)
        except OverflowError:  # an integer beyond fp64
            checked = math.inf
        if not abs(checked) <= TYPES[param.type].largest:
            most = f"{TYPES[param.type].largest:g}"
            raise BadParam(f"{arg(param.name)} is {shown(value)}; it must be finite, at most {most}")
        return checked

    def constants(
        self, scalars: Mapping[str, float], dtype: str, differentiated: bool = False
    ) -> dict[str, float]:
        """The constants of a kernel as in ``lowered`` for these scalars, softmax_scale among them; NaN where
        one cannot be computed. ``scale_log2`` is the factor of its scores times log2(e).
        """
        lowered, values = self.lowered(dtype, differentiated), {}
        for name, formula in (*lowered.constants.items(), ("scale_log2", lowered.factor)):
            try:
                values[name] = float(evaluate(formula, scalars, math))
            except (ArithmeticError, ValueError):
                values[name] = math.nan
        values["scale_log2"] *= math.log2(math.e)
        return values

    def check(self, scalars: Mapping[str, float], dtype: str, differentiated: bool = False) -> None:
        """That the constants of the kernel are finite. Raises BadParam."""
        for name, value in self.constants(scalars, dtype, differentiated).items():
            if abs(value) <= TYPES["f32"].largest:
                continue
            lowered = self.lowered(dtype, differentiated)
            whole = name == "scale_log2"
            formula = self._shown(lowered.factor if whole else lowered.constants[name])
            if whole:
                formula = f"log2(e) * ({formula})"
            settings = ", ".join(
                f"{arg(name)} = {scalars[name]!r}"
                for name in ("softmax_scale", *(p.name for p in self.scalars))
            )
            raise BadParam(
                f"the score {self.title}, {self._shown(self.tree)}, cannot be computed with {settings}: "
                f"{formula}, a constant of its kernels, may be at most {TYPES['f32'].largest:g}"
            )

    def _shown(self, tree: Node) -> str:
        """A formula for a message, which refers to parameters as to any arguments."""
        names = {"softmax_scale", *(param.name for param in self.params)}

        def reference(node: Node) -> Node | None:
            is_param = node.op == "name" and node.value in names
            return Node("name", (), arg(node.value), node.type) if is_param else None

        return short_text(tree.replaced(reference))


def chained(scores: Sequence[Score]) -> Score:
    """One modification after another: each takes for ``score`` what the one before it made.

    Raises BadParam where two have a parameter of one name, and for a formula that is too long as a whole.
    """
    if len(scores) == 1:
        return scores[0]
    params = tuple(param for score in scores for param in score.params)
    names = [param.name for param in params]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        chain = ", ".join(score.title for score in scores)
        raise BadParam(f"the scores {chain} each have a parameter {twice[0]}; chain others")
    tree = scores[0].tree
    for score in scores[1:]:
        before = tree
        tree = score.tree.replaced(lambda node, before=before: before if node.value == "score" else None)
        if tree.size > MAX_SIZE or tree.depth > MAX_DEPTH:
            chain = ", ".join(score.title for score in scores)
            raise BadParam(
                f"the scores {chain} make one formula of {tree.size:,} operations, {tree.depth} deep; "
                f"at most {MAX_SIZE:,} and {MAX_DEPTH} are allowed; chain fewer"
            )
    text = "; then ".join(score.text for score in scores)
    return Score("_".join(score.name for score in scores), text, params, tree)
