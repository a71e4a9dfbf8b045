"""Advice for a keyword that a public function lacks: flashgen's name for this keyword of another library, or
the keyword that is spelled most like it.
"""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any

from flashgen.call.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

# Keywords of other libraries, by flashgen's name.
_ELSEWHERE = {field.name: field.elsewhere for field in FIELDS if field.elsewhere}
_HERE = {field.name: field.hint for field in FIELDS if field.hint}
_LEFT_OUT = {
    "dropout_p": "there is no dropout here; leave it out",
    "dropout_seed": "there is no dropout here; leave it out",
    "enable_gqa": "heads are grouped by their numbers; leave it out",
    "block_table": "pass k as a flashgen.KVCache with pages",
    "page_table": "pass k as a flashgen.KVCache with pages",
    "pages": "pass k as a flashgen.KVCache with pages",
    "cache_batch_idx": "pass k as a flashgen.KVCache with index",
}


def unexpected(function: Callable[..., Any], unknown: Mapping[str, Any]) -> TypeError:
    """The error of keywords that a function does not have, in Python's words."""
    name = next(iter(unknown))
    parameters = inspect.signature(function).parameters.values()
    names = [x.name for x in parameters if x.kind is not inspect.Parameter.VAR_KEYWORD]
    why = f"{function.__name__}() got an unexpected keyword argument {name!r}"
    return TypeError(why + advice(name, names))


def advice(name: str, names: Collection[str]) -> str:
    """What the caller may have meant by a keyword, after "; "; empty if there is no guess."""
    for here, elsewhere in _ELSEWHERE.items():
        if name in elsewhere and here in names:
            return f"; did you mean {here}{_HERE.get(here, '')}?"
    if name in _LEFT_OUT:
        return f"; {_LEFT_OUT[name]}"
    close = difflib.get_close_matches(str(name), names, 1, 0.6)
    return f"; did you mean {close[0]}?" if close else ""
