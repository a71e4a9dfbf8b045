"""The record of a call: what the caller of a public function passed, by name.

The classes are made from `fields.FIELDS`. Nothing assigns to a record once it is made: `Call.replace` gives
another one, and to a type checker attributes are read-only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from flashgen.call.field import BACKWARD, FORWARD, Field
from flashgen.call.fields import FIELDS, OF_BLOCK_MASK, OF_CODES, SCORES
from flashgen.call.generate import function
from flashgen.operators.arguments import Expected, flag, length_bound, margin_of
from flashgen.operators.blocklists import block_size_of
from flashgen.operators.dropout import probability_of
from flashgen.operators.maskoptions import NO_WINDOW, mask_type_name, window_of
from flashgen.operators.splits import AUTO, splits_of

# By the kind of a field: whether a value is in the form that is part of a plan's key, at little cost, and
# what gives it that form or raises BadParam. A list is no part of a key, and 1.0, which is refused, would
# find the plan of 1.
_CHECKS = {
    "flag": ("({x} is True or {x} is False)", "flag({name!r}, {x})"),
    "mask_type": ("{x} is None", "mask_type_name({x})"),
    # PyTorch 2.11 does not trace `is NO_WINDOW` under torch.compile. Of an array == is no truth value.
    "window": (
        "(type({x}) is tuple and len({x}) == 2 and type({x}[0]) is type({x}[1]) is int and {x} == NO_WINDOW)",
        "window_of({x})",
    ),
    "probability": ("(type({x}) is float and {x} == 0.0)", "probability_of({x})"),
    "splits": ("{x} is AUTO", "splits_of({x})"),
    "bound": (
        "({x} is None or type({x}) is int or (type({x}) is Expected and type({x}.bound) is int))",
        "length_bound({name!r}, {x})",
    ),
    "block_size": ("{x} is None", "block_size_of({x})"),
    "margin": ("(type({x}) is int and {x} == 0)", "margin_of({name!r}, {x})"),
}


_NAMES = {
    "AUTO": AUTO,
    "Expected": Expected,
    "block_size_of": block_size_of,
    "NO_WINDOW": NO_WINDOW,
    "flag": flag,
    "length_bound": length_bound,
    "margin_of": margin_of,
    "mask_type_name": mask_type_name,
    "probability_of": probability_of,
    "splits_of": splits_of,
    "window_of": window_of,
}


class Call:
    """What a caller passed, or the default of what was left out."""

    __slots__ = ()
    fields: ClassVar[tuple[Field, ...]]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @staticmethod
    def of_defaults() -> Any:
        """A record of the defaults of all fields."""
        raise NotImplementedError

    def copy(self) -> Self:
        raise NotImplementedError

    def drop_arrays(self) -> None:
        """Keep nothing but options: of a record that its only owner has made for a later call."""
        raise NotImplementedError

    def is_normal(self) -> bool:
        """Whether all options are in the form that is part of a plan's key."""
        raise NotImplementedError

    def is_plain(self) -> bool:
        """`is_normal`, and neither `has_score` nor `has_codes`, as most calls are; costs next to nothing."""
        raise NotImplementedError

    def normalised(self) -> Self:
        """The call with its options in that form. Raises BadParam for an option that is wrong by itself."""
        raise NotImplementedError

    def has_score(self) -> bool:
        """Whether the call has a score modification, or parameters of one."""
        raise NotImplementedError

    def has_codes(self) -> bool:
        """Whether the call has an argument that only calls of e4m3 codes have."""
        raise NotImplementedError

    def replace(self, **changes: Any) -> Self:
        """The call with other values of some fields."""
        call = self.copy()
        for name, value in changes.items():
            setattr(call, name, value)
        return call

    def __repr__(self) -> str:
        values = ((x, getattr(self, x.name)) for x in self.fields)
        shown = (
            f"{field.name}={getattr(value, 'shape', value)}"
            for field, value in values
            if value is not field.default and value is not None
        )
        return f"{type(self).__name__}({', '.join(shown)})"


def _record(name: str, doc: str, fields: tuple[Field, ...]) -> type[Call]:
    """A class of records with these fields."""
    namespace = {"__slots__": tuple(x.name for x in fields), "__doc__": doc, "fields": fields}
    record = type(name, (Call,), namespace | {"__module__": __name__})
    names = _NAMES | {"Record": record}
    checks = {x.name: _CHECKS.get(x.kind, ("", "")) for x in fields}
    begin = ["    other = Record()"]
    copies = [f"    other.{x.name} = self.{x.name}" for x in fields]
    normal = [
        f"    other.{name} = "
        + (f"{{x}} if {test} else {check}" if test else "{x}").format(x=f"self.{name}", name=name)
        for name, (test, check) in checks.items()
    ]
    tests = [test.format(x=f"self.{x}") for x, (test, _) in checks.items() if test]
    scores, codes = (
        [f"        self.{x.name} is not None or" for x in fields if x.name in names]
        for names in (SCORES, OF_CODES)
    )
    end = ["        False", "    )"]
    arrays = [f"    self.{x.name} = None" for x in fields if x.kind == "array"]
    sources = {
        "drop_arrays": [*arrays, ""],
        "copy": [*begin, *copies, "    return other"],
        "normalised": [*begin, *normal, "    return other"],
        "has_score": ["    return (", *scores, *end],
        "has_codes": ["    return (", *codes, *end],
        "is_normal": ["    return (", *(f"        {test} and" for test in tests), "        True", "    )"],
        "is_plain": [
            "    return not (",
            *(f"        not {test} or" for test in tests),
            *scores,
            *codes,
            *end,
        ],
    }
    defaults = [f"    other.{x.name} = default_{x.name}" for x in fields]
    names |= {f"default_{x.name}": x.default for x in fields}
    source = "\n".join(("def of_defaults():", *begin, *defaults, "    return other", ""))
    record.of_defaults = staticmethod(function("of_defaults", source, names))  # type: ignore[method-assign]
    for method, lines in sources.items():
        source = "\n".join((f"def {method}(self):", *lines, ""))
        setattr(record, method, function(method, source, names))
    return record


# What a KVCache says, and what callers within flashgen say.
_OF_CACHE, _INTERNAL = ("index", "pages", "head_dim_v", "kv_dtype"), ("dropout_row",)
_OF_ATTENTION = (*_OF_CACHE, *_INTERNAL, *OF_BLOCK_MASK)
_OF_GRADIENTS = ("dkv_dtype", *_INTERNAL, *OF_BLOCK_MASK)
AttentionCall = _record(
    "AttentionCall",
    "A call of ``attention`` or ``plan``; of a KVCache `request` sets k, v, and what it says of sequences.",
    tuple(x for x in FIELDS if set(FORWARD) & {*x.functions} or x.name in _OF_ATTENTION),
)
GradientCall = _record(
    "GradientCall",
    "A call of ``attention_backward`` or ``plan_backward``.",
    tuple(x for x in FIELDS if set(BACKWARD) & {*x.functions} or x.name in _OF_GRADIENTS),
)
AppendCall = _record(
    "AppendCall", "A call of ``append``.", tuple(x for x in FIELDS if "append" in x.functions)
)
MergeCall = _record("MergeCall", "A call of ``merge``.", tuple(x for x in FIELDS if "merge" in x.functions))
QuantizeCall = _record(
    "QuantizeCall", "A call of ``quantize``.", tuple(x for x in FIELDS if "quantize" in x.functions)
)


def call_of(record: type[Call], **values: Any) -> Any:
    """A record of these values, and of the defaults of all other fields."""
    call = record.of_defaults()
    for name, value in values.items():
        setattr(call, name, value)
    return call
