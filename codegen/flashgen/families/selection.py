"""Choosing variants by text: the language of `--select`, and how a person names one variant.

A selection is a line of terms, and a variant must satisfy all of them:

    head_dim=128 dtype=fp16,bf16 gqa!=packed
    flash_fwd_hdim64_* tile=default

`key=a,b` keeps the variants whose key is one of the values, `key!=a,b` those whose key is none of them.
`key>=a`, `key>a`, `key<=a` and `key<a` compare numbers. Blanks around these signs and commas do not count. A
term without a sign is a name or a glob over names. Dtypes may have their usual names, `float16` or `half` for
fp16, and masks the names of attention(): `causal_bottom_right` is causal, `window` is local.

Keys are the axes, the columns of the tile table, `family`, `spec`, `target`, `tile` (its name, or `default`)
and `committed` (true or false). Of several selections, any one is enough.
"""

from __future__ import annotations

import difflib
import operator
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NoReturn

from flashgen.errors import BadParam
from flashgen.families.variant import DEFAULT_TILE
from flashgen.operators import OPERATORS
from flashgen.operators.arguments import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flashgen.families.variant import Variant

# What attention() calls a mask, and the mask type of the kernels that compute it.
MASK_NAMES = {"causal_top_left": "causal", "causal_bottom_right": "causal", "window": "local"}
_ORDERS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_SIGN = r"(?:[!=<>]=|[=<>])"
_NAMES_SHOWN = 5


class SelectionError(BadParam):
    """A selection names an axis, a value or a variant that no spec has; the message lists what there is."""


def keys_of(variant: Variant) -> dict[str, str]:
    """Everything that a selection may ask of a variant, as the text to compare with."""
    keys = {name: str(value) for name, value in variant.axes}
    keys |= {name: str(value) for name, value in variant.tile}
    return keys | {
        "family": variant.family,
        "spec": variant.spec,
        "target": variant.target,
        "tile": variant.tile_name or DEFAULT_TILE,
        "committed": "true" if variant.committed else "false",
    }


def select(variants: Iterable[Variant], selections: Sequence[str]) -> tuple[Variant, ...]:
    """The variants that match any of the selections, in their own order; all if there is no selection.

    Raises SelectionError for an unknown key or value, a malformed term, and a selection that matches nothing.
    """
    variants = tuple(variants)
    if not selections:
        return variants
    keys = [keys_of(variant) for variant in variants]
    chosen: set[int] = set()
    for selection in selections:
        terms = re.sub(rf"\s*({_SIGN}|,)\s*", r"\1", selection).split()
        if not terms:
            raise SelectionError("empty selection; write terms such as 'head_dim=128 dtype=fp16,bf16'")
        matching = set(range(len(variants)))
        for term in terms:
            matching &= _matches(term, selection, variants, keys)
        if not matching:
            raise SelectionError(
                f"no variant matches {selection!r}: each term matches some, but none matches all of them"
            )
        chosen |= matching
    return tuple(variant for index, variant in enumerate(variants) if index in chosen)


def find_one(variants: Sequence[Variant], name: str) -> Variant:
    """The variant of that name; a path to its generated file will do as well, and so does a glob that only
    one name matches.

    Raises SelectionError that suggests the closest names.
    """
    stem = stem_of(name)
    for variant in variants:
        if variant.name == stem:
            return variant
    matches = [variant for variant in variants if fnmatchcase(variant.name, stem)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = [variant.name for variant in matches[:_NAMES_SHOWN]]
        more = ["..."] if len(matches) > len(shown) else []
        message = f"{len(matches)} variants match {stem!r}, and one is wanted; such as"
        raise SelectionError(
            "\n  ".join([message, *shown, *more]) + f"\n`flashgen list --select '{stem}'` prints them all"
        )
    raise SelectionError(_no_such_name(stem, variants))


def stem_of(name: str) -> str:
    """The name in a name or a path to a generated file."""
    return name.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".cu")


def find_by_axes(variants: Sequence[Variant], values: Mapping[str, str | int]) -> tuple[Variant, ...]:
    """The variants whose keys have these values, `in_order`.

    Raises SelectionError for an unknown key or value, and where no variant has all of them.
    """
    return in_order(select(variants, [" ".join(f"{key}={value}" for key, value in values.items())]))


def in_order(variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """The variants in the order in which commands list them: families on request last, attention before
    other operators, calls without lengths before calls with lengths, the main step of a call before its
    other steps, then families for few rows last; default tiles first, then the order of the specs.
    """
    operators = list(OPERATORS)

    def rank(v: Variant) -> tuple[int, ...]:
        of_kind = operators.index(v.operator), v.has_lengths, not v.is_main
        return v.dispatch.on_request, *of_kind, v.dispatch.rows_at_most is not None, v.tile_name != ""

    return tuple(sorted(variants, key=rank))


def _matches(
    term: str, selection: str, variants: Sequence[Variant], keys: Sequence[Mapping[str, str]]
) -> set[int]:
    """Indices of the variants that satisfy one term."""
    if not re.search(_SIGN, term):
        indices = {index for index, variant in enumerate(variants) if fnmatchcase(variant.name, term)}
        if not indices:
            raise SelectionError(_no_such_name(term, variants))
        return indices
    parsed = re.fullmatch(rf"(\w+)({_SIGN})([^!=<>]*)", term)
    if parsed is None:
        raise SelectionError(
            f"{term!r} is not a term (selection {selection!r}); "
            "write key=value, key=a,b, key!=value or key>=number"
        )
    key, sign, text = parsed.groups()
    names = sorted({name for row in keys for name in row})
    if key not in names:
        _unknown(f"unknown key {key!r} in selection {selection!r}", key, names, "keys")
    allowed = sorted({row[key] for row in keys if key in row}, key=_natural)
    if sign in _ORDERS:
        return _ordered(key, sign, text, allowed, keys)
    values = text.split(",")
    if key == "dtype":
        values = [dtype_name(value) for value in values]
    elif key == "mask_type":
        values = [MASK_NAMES.get(value, value) for value in values]
    for value in values:
        if value not in allowed:
            _unknown(
                f"no variant has {key}={value} (selection {selection!r})", value, allowed, f"values of {key}"
            )
    negated = sign == "!="
    return {index for index, row in enumerate(keys) if key in row and (row[key] in values) != negated}


def _ordered(
    key: str, sign: str, text: str, allowed: Sequence[str], keys: Sequence[Mapping[str, str]]
) -> set[int]:
    """Indices of the variants whose key is a number that compares so with ``text``."""
    if not all(_is_number(value) for value in [text, *allowed]):
        raise SelectionError(
            f"{key}{sign}{text} compares numbers; write {key}=a,b instead\n"
            f"values of {key}: {', '.join(allowed)}"
        )
    compare, bound = _ORDERS[sign], int(text)
    indices = {index for index, row in enumerate(keys) if key in row and compare(int(row[key]), bound)}
    if not indices:
        raise SelectionError(f"no variant has {key}{sign}{text}\nvalues of {key}: {', '.join(allowed)}")
    return indices


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _natural(text: str) -> tuple[int, int, str]:
    """Sort numbers by size and before words."""
    return (0, int(text), text) if _is_number(text) else (1, 0, text)


def _unknown(problem: str, word: str, allowed: Sequence[str], what: str) -> NoReturn:
    numbers = [value for value in allowed if _is_number(value)]
    if numbers and _is_number(word):
        close = [min(numbers, key=lambda value: (abs(int(value) - int(word)), -int(value)))]
    else:
        close = difflib.get_close_matches(word, allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise SelectionError(f"{problem}{hint}\n{what}: {', '.join(allowed)}")


def _no_such_name(name: str, variants: Sequence[Variant]) -> str:
    names = [variant.name for variant in variants]
    if any(character in name for character in "*?["):
        return f"no variant's name matches {name!r}; `flashgen list` prints all names"
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if not close:
        return f"no variant is called {name!r}; `flashgen list` prints all names"
    return "\n  ".join([f"no variant is called {name!r}; did you mean", *close])
