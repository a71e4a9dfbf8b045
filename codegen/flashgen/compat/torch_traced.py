"""What functions of FlexAttention compute, as lines of masks and formulas of scores.

``mask_mod(b, h, q_idx, kv_idx)`` and ``score_mod(score, b, h, q_idx, kv_idx)`` are called once, with objects
that write down what is done to them. Captured tensors become parameters, and Python's numbers constants.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from flashgen.errors import BadParam, BadTensorShape, arg

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

_NUMBERS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "div": "/", "floordiv": "//", "mod": "%"}
_NUMBERS |= {"floor_divide": "//", "remainder": "%", "subtract": "-", "multiply": "*", "divide": "/"}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_COMPARISONS |= {"less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">=", "not_equal": "!="}
_CONNECTIVES = {"and": "and", "or": "or", "logical_and": "and", "logical_or": "or"}
_CONNECTIVES |= {"bitwise_and": "and", "bitwise_or": "or"}
_FUNCTIONS = {"tanh": "tanh", "exp": "exp", "log": "log", "abs": "abs", "absolute": "abs"}
_EXTREMES = {"minimum": "min", "maximum": "max", "min": "min", "max": "max"}
_KINDS = {torch.bool: "bool", torch.int32: "int", torch.int64: "int", torch.int16: "int", torch.int8: "int"}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Sizes(NamedTuple):
    """The sizes of a call that positions, heads and batch entries belong to."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_kv: int

    @property
    def shift(self) -> int:
        """What flashgen's position of a query is above its number: the last query is at the last key."""
        return self.seqlen_kv - self.seqlen_q


class Written(NamedTuple):
    """What a function computes: its ``text`` in flashgen's language, which may be a constant, and the tensors
    that the text reads, by name.
    """

    text: str
    params: dict[str, Tensor]


def line_of(mask_mod: Callable[..., Any], sizes: Sizes) -> Written:
    """The line of a mask. Raises BadParam for what no line can have, and BadTensorShape."""
    return _Writer("mask_mod", sizes).written(mask_mod, ("b", "h", "q", "kv"), _as_condition)


def formula_of(score_mod: Callable[..., Any], sizes: Sizes) -> Written:
    """The formula of a score. Raises as `line_of`."""
    return _Writer("score_mod", sizes).written(score_mod, ("score", "b", "h", "q", "kv"), _as_number)


class _Writer:
    """Writes down one call of a function, ``mask_mod`` or ``score_mod``."""

    def __init__(self, function: str, sizes: Sizes) -> None:
        self.function, self.sizes = function, sizes
        self._params: dict[tuple[Any, ...], tuple[str, Tensor, Tensor]] = {}

    def written(
        self, function: Callable[..., Any], names: Sequence[str], convert: Callable[[Any], str]
    ) -> Written:
        if not callable(function):
            raise BadParam(f"{arg(self.function)} has type {type(function).__name__}; expected a function")
        arguments = [_Value(self, name, "float" if name == "score" else "int", name) for name in names]
        if self.sizes.shift:
            place = names.index("q")
            arguments[place] = _Value(self, f"(q - {self.sizes.shift})", "int", "q")
        with _Indexing(self):
            result = function(*arguments)
        text = convert(self.value(result))
        return Written(text, {name: tensor for name, tensor, _ in self._params.values()})

    def refuse(self, what: str) -> BadParam:
        return BadParam(
            f"{arg(self.function)} {what}, which flashgen cannot write as a formula; it takes + - * / // %, "
            "comparisons, & | ~, abs, minimum, maximum, where, and elements of captured tensors"
            + (", and tanh, exp and log" if self.function == "score_mod" else ", of integers")
        )

    def value(self, x: Any) -> _Value:
        """Anything that a function may compute with, as a value."""
        if isinstance(x, _Value):
            return x
        if isinstance(x, _Element):
            raise self.refuse(f"takes a tensor of shape {tuple(x.tensor.shape)} for a number")
        if isinstance(x, torch.Tensor):
            if x.dim():
                raise self.refuse(f"computes with a tensor of shape {tuple(x.shape)}, not with its elements")
            if x.device.type == "cpu" and not x.requires_grad:
                return self.value(x.item())
            return _Element(self, x.reshape(1), ()).at((_Value(self, "0", "int"),))
        if isinstance(x, bool):
            return _Value(self, "", "bool", x)
        if isinstance(x, numbers.Integral):
            return _Value(self, str(int(x)), "int")
        if isinstance(x, numbers.Real):
            number = float(x)
            if math.isnan(number):
                raise self.refuse("computes with NaN")
            return _Value(self, repr(number) if number >= 0 else f"(-{-number!r})", "float")
        raise self.refuse(f"computes with a {type(x).__name__}")

    def param(self, tensor: Tensor, extents: tuple[int | None, ...]) -> tuple[str, str]:
        """The name and the type of the elements of a tensor, cut to ``extents`` where these say so."""
        key = (id(tensor), extents)
        kind = _KINDS.get(tensor.dtype, "float")
        if key not in self._params:
            if kind == "float" and (self.function == "mask_mod" or tensor.dtype not in _FLOATS):
                raise self.refuse(f"reads a tensor of {tensor.dtype}")
            for axis, extent in enumerate(extents):
                if extent is not None and tensor.shape[axis] < extent:
                    raise BadTensorShape(
                        f"{arg(self.function)} reads a tensor of shape {tuple(tensor.shape)} by a position; "
                        f"it must have {extent} elements along dimension {axis}"
                    )
            cut = tensor[tuple(slice(extent) for extent in extents)]
            cut = cut if kind == "float" else cut.to(torch.int32)
            if cut.dim() and cut.stride(-1) != 1:
                cut = cut.contiguous()
            self._params[key] = (f"tensor_{len(self._params)}", cut, tensor)
        return self._params[key][0], kind


class _Indexing(TorchFunctionMode):
    """While a function is called: elements of tensors at traced positions."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__()
        self._writer = writer

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and _is_traced(args[1]):
            return _Element(self._writer, args[0], ())[args[1]]
        return func(*args, **(kwargs or {}))


def _is_traced(x: Any) -> bool:
    return isinstance(x, _Value) or (isinstance(x, tuple) and any(isinstance(i, _Value) for i in x))


class _Traced:
    """What stands for a tensor while a function is called."""

    writer: _Writer

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        traced = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, _Traced))
        if func is torch.Tensor.__getitem__:
            return _Element(traced.writer, args[0], ())[args[1]]
        return _call(traced.writer, func.__name__, args, kwargs or {})

    def __bool__(self) -> bool:
        raise self.writer.refuse("uses a traced value in Python's if, and, or, not, min or max")

    def _to_python(self, *_: Any) -> Any:
        raise self.writer.refuse("makes a Python number of a traced value")

    __int__ = __float__ = __index__ = item = __iter__ = __len__ = _to_python


class _Element(_Traced):
    """A tensor, of which the first dimensions are indexed."""

    def __init__(self, writer: _Writer, tensor: Tensor, indices: tuple[_Value, ...]) -> None:
        self.writer, self.tensor, self._indices = writer, tensor, indices

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return self.at((*self._indices, *map(self.writer.value, more)))

    def at(self, indices: tuple[_Value, ...]) -> Any:
        if any(index.kind != "int" for index in indices) or len(indices) > self.tensor.dim():
            raise self.writer.refuse("indexes a tensor with something but integers")
        indices = tuple(
            self.writer.value(int(index.text) + extent) if index.text.startswith("-") else index
            for index, extent in zip(indices, self.tensor.shape, strict=False)
        )
        if len(indices) < self.tensor.dim():
            return _Element(self.writer, self.tensor, indices)
        texts, extents = _places(self.writer, indices)
        name, kind = self.writer.param(self.tensor, extents)
        element = _Value(self.writer, f"{name}[{', '.join(texts)}]", "int" if kind == "bool" else kind)
        return _Value(self.writer, f"({element.text} != 0)", "bool") if kind == "bool" else element


def _places(writer: _Writer, indices: tuple[_Value, ...]) -> tuple[list[str], tuple[int | None, ...]]:
    """The texts of indices, and how long a dimension is that counts the queries or the keys of the call."""
    of_mask, sizes = writer.function == "mask_mod", writer.sizes
    of_positions = {"b": sizes.batch, "h": sizes.num_heads, "kv": sizes.seqlen_kv}
    counted = [index.position in ("q", "kv") for index in indices]
    texts: list[str] = []
    extents: list[int | None] = []
    for index in indices:
        text, extent = index.text, of_positions.get(index.position)
        if index.position == "q" and (not of_mask or sum(counted) > 1 or not sizes.shift):
            # Here `q` alone is the number of a query, also where its position is another.
            text, extent = "q", sizes.seqlen_q
        texts.append(text)
        extents.append(extent)
    return texts, tuple(extents)


class _Value(_Traced):
    """A number or a condition: its ``text``, and its ``kind``, "int", "float" or "bool". ``position`` is the
    name of a position that it is, unchanged; of a constant condition it is True or False.
    """

    def __init__(self, writer: _Writer, text: str, kind: str, position: Any = None) -> None:
        self.writer, self.text, self.kind, self.position = writer, text, kind, position

    @property
    def constant(self) -> bool | None:
        return self.position if isinstance(self.position, bool) else None

    def new_ones(self, *_: Any, dtype: Any = None, **__: Any) -> _Value:
        return self._constant(1, dtype)

    def new_zeros(self, *_: Any, dtype: Any = None, **__: Any) -> _Value:
        return self._constant(0, dtype)

    def _constant(self, number: int, dtype: Any) -> _Value:
        return self.writer.value(bool(number) if dtype is torch.bool else number)

    def to(self, dtype: Any = None, *_: Any, **__: Any) -> _Value:
        """The same as another dtype: positions are exact in all of them."""
        kind = _KINDS.get(dtype, "float") if isinstance(dtype, torch.dtype) else self.kind
        if kind == self.kind:
            return self
        if kind == "bool":
            return _Value(self.writer, f"({_as_number(self)} != 0)", "bool")
        if self.kind == "float":
            raise self.writer.refuse(f"rounds a float to {dtype}")
        text = f"({_as_number(self)} * 1.0)" if kind == "float" else _as_number(self)
        return _Value(self.writer, text, kind)

    type = to

    def float(self) -> _Value:
        return self.to(torch.float32)

    def int(self) -> _Value:
        return self.to(torch.int32)

    def long(self) -> _Value:
        return self.to(torch.int64)

    def bool(self) -> _Value:
        return self.to(torch.bool)

    @property
    def device(self) -> Any:
        return torch.device("cpu")

    @property
    def dtype(self) -> Any:
        return {"int": torch.int32, "float": torch.float32, "bool": torch.bool}[self.kind]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _call(self.writer, name, (self, *args), kwargs)

    __hash__ = object.__hash__


def _method(name: str, reflected: bool = False) -> Any:
    def method(self: _Value, *others: Any) -> _Value:
        args = (*others, self) if reflected else (self, *others)
        return _call(self.writer, name, args, {})

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor"):
    setattr(_Value, f"__{_name}__", _method(_name))
    setattr(_Value, f"__r{_name}__", _method(_name, reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    setattr(_Value, f"__{_name}__", _method(_name))


def _call(writer: _Writer, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Value:
    """What a function or a method of PyTorch makes of values."""
    plain = name.strip("_")
    reflected = plain not in ("remainder",) and plain[:1] == "r" and plain[1:] in (*_NUMBERS, *_CONNECTIVES)
    if reflected:
        plain, args = plain[1:], (*args[1:], args[0])
    if plain in ("to", "type", "float", "int", "long", "bool"):
        return getattr(writer.value(args[0]), plain)(*args[1:], **kwargs)
    if plain in ("ones_like", "zeros_like"):
        dtype = kwargs.get("dtype", writer.value(args[0]).dtype)
        return writer.value(args[0])._constant(plain == "ones_like", dtype)
    if plain == "clamp" or plain == "clip":
        return _clamped(writer, *args, **kwargs)
    if kwargs.keys() - {"other"}:
        raise writer.refuse(f"calls {plain}({', '.join(kwargs)}=)")
    values = [writer.value(x) for x in (*args, *kwargs.values())]
    count = len(values)
    if plain in _NUMBERS and count == 2:
        one, other = map(_as_number, values)
        sign = _NUMBERS[plain]
        is_float = sign == "/" or "float" in (values[0].kind, values[1].kind)
        return _Value(writer, f"({one} {sign} {other})", "float" if is_float else "int")
    if plain in _COMPARISONS and count == 2:
        one, other = map(_as_number, values)
        return _Value(writer, f"({one} {_COMPARISONS[plain]} {other})", "bool")
    if plain in (*_CONNECTIVES, "xor", "logical_xor", "bitwise_xor") and count == 2:
        return _joined(writer, _CONNECTIVES.get(plain, "xor"), *values)
    if plain in ("invert", "logical_not", "bitwise_not") and count == 1:
        return _negated(writer, values[0])
    if plain in ("neg", "negative") and count == 1:
        return _Value(writer, f"(-{_as_number(values[0])})", values[0].kind)
    if plain in _FUNCTIONS and count == 1:
        kind = values[0].kind if _FUNCTIONS[plain] == "abs" else "float"
        return _Value(writer, f"{_FUNCTIONS[plain]}({_as_number(values[0])})", kind)
    if plain in _EXTREMES and count == 2:
        return _extreme(writer, _EXTREMES[plain], *values)
    if plain == "where" and count == 3:
        return _choice(writer, *values)
    raise writer.refuse(f"calls {plain}() of {count} value{'s' * (count != 1)}")


def _as_number(x: _Value) -> str:
    if x.kind != "bool":
        return x.text
    return str(int(x.constant)) if x.constant is not None else f"where({x.text}, 1, 0)"


def _as_condition(x: _Value) -> str:
    if x.constant is not None:
        return str(x.constant)
    return x.text if x.kind == "bool" else f"({x.text} != 0)"


def _condition(writer: _Writer, x: _Value) -> _Value:
    return x if x.kind == "bool" else _Value(writer, f"({x.text} != 0)", "bool")


def _joined(writer: _Writer, word: str, *values: _Value) -> _Value:
    if any(x.kind != "bool" for x in values):
        raise writer.refuse("uses & | or ^ of the bits of integers")
    one, other = values
    if word == "xor":
        both = _joined(writer, "and", one, other)
        some = _joined(writer, "or", one, other)
        return _joined(writer, "and", some, _negated(writer, both))
    for x, rest in ((one, other), (other, one)):
        if x.constant is not None:
            return rest if x.constant == (word == "and") else x
    return _Value(writer, f"({one.text} {word} {other.text})", "bool")


def _negated(writer: _Writer, x: _Value) -> _Value:
    if x.kind != "bool":
        raise writer.refuse("uses ~ of the bits of an integer")
    if x.constant is not None:
        return writer.value(not x.constant)
    return _Value(writer, f"(not {x.text})", "bool")


def _extreme(writer: _Writer, word: str, one: _Value, other: _Value) -> _Value:
    kind = "float" if "float" in (one.kind, other.kind) else "int"
    return _Value(writer, f"{word}({_as_number(one)}, {_as_number(other)})", kind)


def _clamped(writer: _Writer, x: Any, min: Any = None, max: Any = None) -> _Value:
    value = writer.value(x)
    if min is not None:
        value = _extreme(writer, "max", value, writer.value(min))
    return value if max is None else _extreme(writer, "min", value, writer.value(max))


def _choice(writer: _Writer, condition: _Value, one: _Value, other: _Value) -> _Value:
    condition = _condition(writer, condition)
    if condition.constant is not None:
        return one if condition.constant else other
    if one.kind == other.kind == "bool":
        first = _joined(writer, "and", condition, one)
        second = _joined(writer, "and", _negated(writer, condition), other)
        return _joined(writer, "or", first, second)
    kind = "float" if "float" in (one.kind, other.kind) else "int"
    return _Value(writer, f"where({condition.text}, {_as_number(one)}, {_as_number(other)})", kind)
