"""Kinds of values in a YAML file. Each checks a value at its place, and says what is allowed there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from flashgen.errors import SpecError

Keys = tuple[str | int, ...]
if TYPE_CHECKING:
    # Makes the error of a message about what is at these keys: `yamlfile.Document.error`.
    MakeError = Callable[[Keys, str], SpecError]


class Kind:
    """A kind of values: ``words`` describe them, and ``choices`` lists them where they are few."""

    words = "anything"
    choices: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Whether a value is of this kind; of a list or a mapping, whatever it holds."""
        return True

    def read(self, error: MakeError, keys: Keys, value: Any) -> Any:
        """The value at ``keys``, checked to the last member. Raises SpecError."""
        if not self.accepts(value):
            raise self.misfit(error, keys, value)
        return value

    def schema(self) -> dict[str, Any]:
        """The kind in JSON Schema."""
        return {}

    def misfit(self, error: MakeError, keys: Keys, value: Any) -> SpecError:
        """The error of a value of another kind."""
        allowed = (
            f"allowed: {', '.join(map(str, self.choices))}" if self.choices else f"expected {self.words}"
        )
        return error(keys, f"found {value!r}; {allowed}")


class Text(Kind):
    def __init__(self, words: str = "a text", pattern: str = "") -> None:
        self.words = words
        self._pattern = pattern
        self._matches = re.compile(pattern).search

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and self._matches(value) is not None

    def schema(self) -> dict[str, Any]:
        if not self._pattern:
            return {"type": "string"}
        # JSON Schema has the expressions of JavaScript.
        pattern = self._pattern.replace(r"\A", "^").replace(r"\Z", "$")
        return {"type": "string", "pattern": pattern, "description": self.words}


class Flag(Kind):
    words = "true or false"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class Integer(Kind):
    def __init__(self, least: int | None = None) -> None:
        self.words = "an integer" if least is None else f"an integer of {least} or more"
        self._least = least

    def accepts(self, value: Any) -> bool:
        return type(value) is int and (self._least is None or value >= self._least)

    def schema(self) -> dict[str, Any]:
        return {"type": "integer"} | ({} if self._least is None else {"minimum": self._least})


class Decimal(Kind):
    """A number up to ``most``, and from ``least`` on or ``above`` it."""

    def __init__(self, *, least: float | None = None, above: float | None = None, most: float) -> None:
        lowest = f"above {above:g}" if least is None else f"of {least:g} or more"
        self.words = f"a number {lowest} and at most {most:g}"
        self._least, self._above, self._most = least, above, most

    def accepts(self, value: Any) -> bool:
        if type(value) not in (int, float) or not value <= self._most:
            return False
        return value > self._above if self._least is None else value >= self._least

    def read(self, error: MakeError, keys: Keys, value: Any) -> float:
        return float(super().read(error, keys, value))

    def schema(self) -> dict[str, Any]:
        lowest = {"exclusiveMinimum": self._above} if self._least is None else {"minimum": self._least}
        return {"type": "number", **lowest, "maximum": self._most}


class Choice(Kind):
    """One of some integers and texts."""

    def __init__(self, choices: Iterable[str | int]) -> None:
        self.choices = tuple(sorted(choices, key=lambda choice: (isinstance(choice, str), choice)))
        self._values = frozenset(self.choices)

    def accepts(self, value: Any) -> bool:
        return type(value) in (int, str) and value in self._values

    def schema(self) -> dict[str, Any]:
        return {"enum": [*self.choices]}


class Null(Kind):
    """What is left out, though its key is there."""

    def accepts(self, value: Any) -> bool:
        return value is None

    def schema(self) -> dict[str, Any]:
        return {"type": "null"}


class ListOf(Kind):
    def __init__(self, item: Kind, least: int = 0) -> None:
        self.words = "a list that is not empty" if least else "a list"
        self.choices = item.choices
        self._item, self._least = item, least

    def accepts(self, value: Any) -> bool:
        return isinstance(value, list)

    def read(self, error: MakeError, keys: Keys, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) < self._least:
            raise self.misfit(error, keys, value)
        return tuple([self._item.read(error, (*keys, i), item) for i, item in enumerate(value)])

    def schema(self) -> dict[str, Any]:
        least = {"minItems": self._least} if self._least else {}
        return {"type": "array", "items": self._item.schema(), **least}


class MapOf(Kind):
    """A mapping whose keys are of one kind and whose values are of another."""

    def __init__(self, value: Kind, key: Kind | None = None, least: int = 0) -> None:
        self.words = "a mapping that is not empty" if least else "a mapping"
        self._value, self._key, self._least = value, key, least

    def accepts(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, error: MakeError, keys: Keys, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) < self._least:
            raise self.misfit(error, keys, value)
        if self._key is not None:
            for key in value:
                self._key.read(error, (*keys, key), key)
        return {key: self._value.read(error, (*keys, key), item) for key, item in value.items()}

    def schema(self) -> dict[str, Any]:
        names = {"propertyNames": self._key.schema()} if self._key is not None else {}
        least = {"minProperties": self._least} if self._least else {}
        return {"type": "object", "additionalProperties": self._value.schema(), **names, **least}


class Either(Kind):
    """A value of one of several kinds, the first that accepts it."""

    def __init__(self, *members: Kind) -> None:
        self.words = ", or ".join(dict.fromkeys(m.words for m in members if not isinstance(m, Null)))
        self.choices = tuple(dict.fromkeys(choice for member in members for choice in member.choices))
        self._members = members

    def accepts(self, value: Any) -> bool:
        return any(member.accepts(value) for member in self._members)

    def read(self, error: MakeError, keys: Keys, value: Any) -> Any:
        for member in self._members:
            if member.accepts(value):
                return member.read(error, keys, value)
        raise self.misfit(error, keys, value)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [member.schema() for member in self._members]}


REQUIRED: Any = object()


class Field(NamedTuple):
    """A key of a record, which may be left out where it has a ``default``."""

    kind: Kind
    default: Any = REQUIRED


class Record(Kind):
    """A mapping with certain keys, read as what ``make`` makes of them: by default a dictionary."""

    words = "a mapping"

    def __init__(self, fields: Mapping[str, Field], make: Callable[..., Any] = dict) -> None:
        self.fields = dict(fields)
        self._make = make
        self._defaults = {
            key: field.default for key, field in fields.items() if field.default is not REQUIRED
        }

    def accepts(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, error: MakeError, keys: Keys, value: Any) -> Any:
        super().read(error, keys, value)
        read = dict(self._defaults)
        for key, item in value.items():
            field = self.fields.get(key)
            if field is None:
                raise error((*keys, key), f"unknown key; allowed: {', '.join(self.fields)}")
            read[key] = field.kind.read(error, (*keys, key), item)
        for key in self.fields:
            if key not in read:
                raise error(keys, f"the key `{key}` is missing")
        return self._make(**read)

    def schema(self) -> dict[str, Any]:
        required = [key for key in self.fields if key not in self._defaults]
        return {
            "type": "object",
            "properties": {key: field.kind.schema() for key, field in self.fields.items()},
            **({"required": required} if required else {}),
            "additionalProperties": False,
        }


def fields_of(cls: type) -> dict[str, Field]:
    """The fields of a NamedTuple whose annotations have kinds: ``start: Annotated[float, RATE] = 0.0``.

    An annotation may name what is here without an import, which modules of a first call do not wait for.
    """
    defaults = cls._field_defaults
    return {
        name: Field(hint.__metadata__[0], defaults.get(name, REQUIRED))
        for name, hint in get_type_hints(cls, localns=globals(), include_extras=True).items()
    }


def record(cls: type) -> Record:
    """The kind of mappings that are read as such a NamedTuple."""
    return Record(fields_of(cls), cls)


ANYTHING = Kind()
FLAG = Flag()
# In a file, a number that each tile at each point gives a value.
EXPRESSION = Either(Integer(), Text("an expression"))


def optional(kind: Kind) -> Either:
    """That kind, or null."""
    return Either(kind, Null())
