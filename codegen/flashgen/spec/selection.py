"""Choosing variants by text: the language of `--select`, and how a person names one variant.

A selection is a line of terms, and a variant must satisfy all of them:

    head_dim=128 dtype=fp16,bf16 gqa!=packed
    flash_fwd_hdim64_* tile=default

`key=a,b` keeps the variants whose key is one of the values, `key!=a,b` those whose key is none of them, and a
term without `=` is a name or a glob over names. Keys are the axes, the columns of the tile table, `family`,
`spec`, `target`, `tile` (its name, or `default`) and `committed` (true or false). Of several selections,
any one is enough.
"""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NoReturn

from flashgen.errors import BadParam

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flashgen.spec.variant import Variant

DEFAULT_TILE = "default"


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
        terms = selection.split()
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
    """The variant of that name; a path to its generated file will do as well.

    Raises SelectionError that suggests the closest names.
    """
    stem = name.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".cu")
    for variant in variants:
        if variant.name == stem:
            return variant
    raise SelectionError(_no_such_name(stem, variants))


def find_by_axes(variants: Sequence[Variant], wanted: Mapping[str, str | int]) -> tuple[Variant, ...]:
    """The variants whose keys have the wanted values: those of families on request last, default tiles first,
    then in spec order.

    Raises SelectionError for an unknown key or value, and where no variant has all of them.
    """
    found = select(variants, [" ".join(f"{key}={value}" for key, value in wanted.items())])
    return tuple(sorted(found, key=lambda variant: (variant.on_request, variant.tile_name != "")))


def _matches(
    term: str, selection: str, variants: Sequence[Variant], keys: Sequence[Mapping[str, str]]
) -> set[int]:
    """Indices of the variants that satisfy one term."""
    if "=" not in term:
        found = {index for index, variant in enumerate(variants) if fnmatchcase(variant.name, term)}
        if not found:
            raise SelectionError(_no_such_name(term, variants))
        return found
    negated = "!=" in term
    key, _, text = term.partition("!=" if negated else "=")
    values = text.split(",")
    known = sorted({name for each in keys for name in each})
    if key not in known:
        _unknown(f"unknown key {key!r} in selection {selection!r}", key, known, "keys")
    allowed = sorted({each[key] for each in keys if key in each}, key=_natural)
    for value in values:
        if value not in allowed:
            _unknown(
                f"no variant has {key}={value} (selection {selection!r})", value, allowed, f"values of {key}"
            )
    return {index for index, each in enumerate(keys) if key in each and (each[key] in values) != negated}


def _natural(text: str) -> tuple[int, int, str]:
    """Sort numbers by size and before words."""
    return (0, int(text), text) if text.lstrip("-").isdigit() else (1, 0, text)


def _unknown(problem: str, given: str, allowed: Sequence[str], what: str) -> NoReturn:
    close = difflib.get_close_matches(given, allowed, n=1)
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
