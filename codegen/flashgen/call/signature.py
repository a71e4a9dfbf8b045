"""Public functions with the parameters that `fields` declares: each makes the record of its call."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from flashgen.call.fields import BY_NAME
from flashgen.call.generate import function
from flashgen.call.keywords import unexpected
from flashgen.call.parameters import POSITIONAL, REQUIRED, parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from flashgen.call.field import Field
    from flashgen.call.record import Call


def public(
    name: str,
    record: type[Call],
    compute: Callable[[Any], Any],
    module: str,
    refuse: Callable[[Callable[..., Any], Mapping[str, Any]], None] | None = None,
) -> Any:
    """The function ``name`` of ``module``: ``compute`` of the record of its arguments, with the documentation
    of ``compute``. Keywords that it does not have go to ``refuse``, which raises their error.
    """
    fields = parameters(name)
    taken = {field.name for field in fields}
    required = POSITIONAL[name][: REQUIRED[name]]
    by_name = [f"{field.name}=default_{field.name}" for field in fields if field.name not in POSITIONAL[name]]
    by_position = [x if x in required else f"{x}=default_{x}" for x in POSITIONAL[name]]
    lines = [
        f"def {name}({', '.join((*by_position, '*', *by_name))}, **unknown):",
        "    if unknown:",
        f"        refuse({name}, unknown)",
        "    call = Record()",
        *(f"    call.{x.name} = {x.name if x.name in taken else f'default_{x.name}'}" for x in record.fields),
        "    return compute(call)",
        "",
    ]
    names = {f"default_{field.name}": field.default for field in record.fields}
    names |= {"Record": record, "compute": compute, "refuse": refuse or _refuse}
    result = function(name, "\n".join(lines), names)
    result.__doc__, result.__module__ = compute.__doc__, module
    result.__signature__ = inspect.Signature([*_parameters(fields, POSITIONAL[name], required), _UNKNOWN])
    return result


def _refuse(function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    raise unexpected(function, unknown)


_UNKNOWN = inspect.Parameter("unknown", inspect.Parameter.VAR_KEYWORD, annotation="Never")


def _parameters(
    fields: Iterable[Field], by_position: Iterable[str], required: Iterable[str]
) -> Iterable[inspect.Parameter]:
    for field in fields:
        kind = (
            inspect.Parameter.POSITIONAL_OR_KEYWORD
            if field.name in by_position
            else inspect.Parameter.KEYWORD_ONLY
        )
        default = inspect.Parameter.empty if field.name in required else field.default
        yield inspect.Parameter(field.name, kind, default=default, annotation=field.type)


def with_options(types: Mapping[str, str]) -> Callable[[Any], Any]:
    """A decorator of a function whose keywords are options: its signature lists these, with their types."""

    def decorated(function: Any) -> Any:
        signature = inspect.signature(function)
        parameters = {name: x for name, x in signature.parameters.items() if x.kind is not x.VAR_KEYWORD}
        for name, kind in types.items():
            default = BY_NAME[name].default if name in BY_NAME else None
            option = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            parameters.setdefault(name, option)
        function.__signature__ = signature.replace(parameters=[*parameters.values()])
        return function

    return decorated


def described(function: str) -> str:
    """The paragraphs of a docstring that say what each parameter of a function is."""
    return "\n    ".join(f"{field.name}: {field.doc}" for field in parameters(function) if field.doc)
