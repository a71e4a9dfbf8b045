"""The stub of the package for type checkers and editors, ``flashgen/__init__.pyi``: what `call.fields`
declares, written out.

    python -m flashgen.api.stub

writes it. A test compares it with the file that is checked in.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flashgen
from flashgen.api.cascade import cascade
from flashgen.api.explain import explain, explained_fields, warmup
from flashgen.call.fields import BY_NAME
from flashgen.call.parameters import POSITIONAL, REQUIRED, parameters
from flashgen.operators.attention import ATTENTION
from flashgen.operators.backward import BACKWARD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from flashgen.operators.operator import Operator

PATH = Path(flashgen.__file__).with_suffix(".pyi")

_HEAD = """\
# Written by `python -m flashgen.api.stub` from the fields of a call; not to be edited.

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, overload
"""


def text() -> str:
    """The stub."""
    errors = sorted(set(flashgen.__all__) - flashgen._HOMES.keys() - {"distributed"})
    homes = flashgen._HOMES.items()
    classes = [(name, home) for name, home in homes if inspect.isclass(getattr(flashgen, name))]
    imports = [f"from {home} import {name} as {name}" for name, home in classes]
    imports += [f"from flashgen.errors import {name} as {name}" for name in errors]
    imports.append("from flashgen import distributed as distributed")
    imports.append("from flashgen.schedule.explain import Explanation")
    names = "".join(f'    "{name}",\n' for name in flashgen.__all__)
    forward, backward = "_AttentionPlan", "_GradientPlan"
    plans = (
        (forward, {"append": "None", "rotary": "None", "return_weights": "Literal[False]"}),
        ("AppendPlan", {"k": "KVCache", "append": "tuple[Any, Any]", "return_weights": "Literal[False]"}),
        ("WeightsPlan", {"append": "None", "rotary": "None", "return_weights": "Literal[True]"}),
    )
    plan_classes = (
        _plan_class(forward, (ATTENTION.without_lengths, ATTENTION)),
        _plan_class(backward, (BACKWARD.without_lengths, BACKWARD.with_lengths)),
        _warmup_call(),
    )
    functions = (
        _function("attention", "Any"),
        *("@overload\n" + _function("plan", result, changes) for result, changes in plans),
        _function("attention_backward", "tuple[Any, ...]"),
        _function("plan_backward", backward),
        _function("append", "tuple[Any, Any]"),
        _written(cascade),
        _function("merge", "tuple[Any, Any]"),
        _function("quantize", "tuple[Any, Any]"),
        _written(explain),
        _written(warmup, {"calls": "Iterable[_WarmupCall] | str | PathLike[str]"}),
    )
    head = (_HEAD, "\n".join(sorted(imports)) + "\n", f"__version__: str\n__all__ = [\n{names}]\n")
    return "\n".join((*head, *plan_classes, "".join(functions)))


def _function(name: str, result: str, changes: dict[str, str] | None = None) -> str:
    """A function of the table; ``changes`` has other types of some parameters, which then have no default
    but None or False.
    """
    entries, changes = [], changes or {}
    required = POSITIONAL[name][: REQUIRED[name]]
    for position, field in enumerate(parameters(name)):
        if position == len(POSITIONAL[name]):
            entries.append("*")
        kind = changes.get(field.name, field.type)
        optional = field.name not in required and kind in (field.type, "None", "Literal[False]")
        entries.append(f"{field.name}: {kind}" + (f" = {_default(field.default)}" if optional else ""))
    return _signature(name, entries, result)


def _signature(name: str, entries: Iterable[str], result: str) -> str:
    lines = "".join(f"    {entry},\n" for entry in entries)
    return f"def {name}(\n{lines}) -> {result}: ...\n"


def _default(x: Any) -> str:
    return f'"{x}"' if isinstance(x, str) else repr(x)


def _written(function: Callable[..., Any], types: Mapping[str, str] | None = None) -> str:
    """A function whose signature Python knows; ``types`` has other types of some parameters."""
    signature, entries, types = inspect.signature(function), [], types or {}
    for x in signature.parameters.values():
        if x.kind is x.VAR_KEYWORD:
            continue
        if x.kind is x.KEYWORD_ONLY and "*" not in entries:
            entries.append("*")
        kind = types.get(x.name, x.annotation)
        entries.append(f"{x.name}: {kind}" + ("" if x.default is x.empty else f" = {_default(x.default)}"))
    return _signature(function.__name__, entries, signature.return_annotation)


def _warmup_call() -> str:
    """What describes a call of `warmup`."""
    types = {**dict.fromkeys("qkv", "Any"), "dtype": "str", "operator": "str"} | explained_fields()
    lines = "".join(f"    {name}: {kind}\n" for name, kind in types.items())
    return f"class _WarmupCall(TypedDict, total=False):\n{lines}"


def _plan_class(name: str, operators: tuple[Operator, ...]) -> str:
    """A plan whose calls take the arguments of these operators by name, and parameters of a score."""
    names = dict.fromkeys(x.name for operator in operators for x in operator.arguments)
    scalars = dict.fromkeys(x for operator in operators for x in operator.scalars)
    entries = ["self", "/", "*inputs: Any"]
    entries += [f"{x}: Any = ..." for x in names]
    entries += [f"{x}: {BY_NAME[x].type} = ..." for x in scalars]
    entries += ["stream: Any = ...", "workspace: Any = ...", "**params: Any"]
    call = _signature("__call__", entries, "Any").replace("\n", "\n    ").rstrip()
    return f"class {name}(Plan):\n    {call}\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
