"""Specs that extend another: ``extends: flash_fwd_sm80``, and only what differs.

A key that the file has replaces the other's. Of ``axes`` each axis does, and of a step that both have by name
each key. The values and defaults of tile keys that the file leaves out are dropped. Lists of rows are joined:
the file's own come first, so they win; then the other's rows, as far as they fit the axes and targets that
are left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.errors import SpecError
from flashgen.families.bases import bases
from flashgen.families.model import as_values
from flashgen.families.schema import DEFAULT_AXIS, NAME
from flashgen.families.yamlfile import Document

if TYPE_CHECKING:
    from pathlib import Path

    from flashgen.families.yamlfile import Keys

# Keys whose rows, each with conditions over the axes, are joined.
_ROWS = ("tiles", "exclude", "commit", "tune")


def document(path: Path, text: bytes) -> Document:
    """The document of ``text``, the content of ``path``, with what it extends. Raises SpecError."""
    files = bases(path, text)
    merged = Document(*files[-1]) if files else Document(path, text)
    if "extends" in merged.value:  # `bases`, which parses no YAML, did not find it
        name = merged.convert(("extends",), merged.value["extends"], NAME).strip()
        raise merged.error(("extends",), f"write it as a line `extends: {name}` that is not indented")
    for place, content in [*reversed(files[:-1]), (path, text)] if files else ():
        merged = Extended(place, content, merged)
    return merged


class Extended(Document):
    """A document over another. Errors name the file and line of the mistake."""

    def __init__(self, path: Path, text: bytes, base: Document) -> None:
        super().__init__(path, text)
        overrides = self.value
        self._base, self._own = base, overrides
        # The document of each row of a joined list, and its place there.
        self._origins: dict[str, list[tuple[Document, int]]] = {}
        for document in (base, self):
            axes = document.value.get("axes", {})
            if not isinstance(axes, dict):
                raise document.error(("axes",), f"expected a mapping, found {axes!r}")
        merged = base.value | overrides
        del merged["extends"]
        if "family" not in overrides and path.stem != base.path.stem:
            merged["family"] = path.stem
        merged["axes"] = base.value.get("axes", {}) | overrides.get("axes", {})
        self.value = merged
        domain = self._domain()
        for name, axis in merged["axes"].items():
            if name not in overrides.get("axes", {}) and isinstance(axis, dict) and "also" in axis:
                values = domain.get(axis.get("default"), ())
                also = {key: choices for key, choices in axis["also"].items() if key in map(str, values)}
                merged["axes"][name] = axis | {"also": also}
        if "element_bytes" not in overrides and isinstance(merged.get("element_bytes"), dict):
            sizes = merged["element_bytes"]
            merged["element_bytes"] = {key: sizes[key] for key in sizes if key in domain.get("dtype", sizes)}
        for part in ("tile_values", "tile_defaults"):
            if part not in overrides and isinstance(merged.get(part), dict):
                keys = merged.get("tile_keys", ())
                merged[part] = {key: value for key, value in merged[part].items() if key in keys}
        for key in _ROWS:
            self._join(key, domain)
        if "features" not in overrides and isinstance(merged.get("features"), dict):
            left = {name: _restricted(when, domain) for name, when in merged["features"].items()}
            merged["features"] = {name: when for name, when in left.items() if when is not None}
        # Of each step the place of the inherited one that has its name, and what it does not say; of each
        # parameter that it has from there the place in that one's list.
        self._steps: dict[int, int] = {}
        self._params: dict[int, list[int]] = {}
        if isinstance(overrides.get("steps"), list) and isinstance(base.value.get("steps"), list):
            merged["steps"] = self._complete(overrides["steps"], base.value["steps"], domain)
        if "params" not in overrides and isinstance(merged.get("params"), list):
            kept, places = _fitting(merged["params"], domain)
            merged["params"], self._origins["params"] = kept, [(self._base, place) for place in places]

    def _domain(self) -> dict[str, list[Any]]:
        """The values that each axis, and the target, has here."""
        domain: dict[str, list[Any]] = {}
        for name, axis in self.value["axes"].items():
            if isinstance(axis, list):
                domain[name] = axis
            elif isinstance(axis, dict):
                row = self.convert(("axes", name), axis, DEFAULT_AXIS)
                further = [choice for value in row.also.values() for choice in as_values(value)]
                domain[name] = [*domain.get(row.default, ()), *further]
        if isinstance(self.value.get("targets"), dict):
            domain["target"] = [*self.value["targets"]]
        return domain

    def _join(self, key: str, domain: dict[str, list[Any]]) -> None:
        rows = self._own.get(key, [])
        inherited = self._base.value.get(key, [])
        if not isinstance(rows, list) or not isinstance(inherited, list):
            return
        # What the other file commits has the first value of an axis that only this file has.
        old = (*self._base.value.get("axes", {}), "target")
        further = {name: values[0] for name, values in domain.items() if name not in old and values}
        joined = [*rows]
        origins: list[tuple[Document, int]] = [(self, index) for index in range(len(rows))]
        for index, row in enumerate(inherited):
            left = _restricted(row, domain)
            if left is not None:
                joined.append(further | left if key == "commit" and isinstance(left, dict) else left)
                origins.append((self._base, index))
        if key in self.value:
            self.value[key] = joined
        self._origins[key] = origins

    def _complete(self, steps: list[Any], inherited: list[Any], domain: dict[str, list[Any]]) -> list[Any]:
        """The steps, each with what the inherited one of its name has besides."""
        places = {step.get("name"): place for place, step in enumerate(inherited) if isinstance(step, dict)}
        completed = []
        for index, step in enumerate(steps):
            if isinstance(step, dict) and step.get("name") in places:
                self._steps[index] = place = places[step["name"]]
                whole = inherited[place] | step
                if "params" not in step and isinstance(whole.get("params"), list):
                    whole["params"], self._params[index] = _fitting(whole["params"], domain)
                step = whole
            completed.append(step)
        return completed

    def _place(self, keys: Keys) -> tuple[Document, Keys]:
        """The document that has the value at ``keys``, and its place there."""
        first = keys[0] if keys else None
        if first in self._origins and len(keys) > 1 and isinstance(keys[1], int):
            owner, index = self._origins[first][keys[1]]
            return owner, (first, index, *keys[2:])
        if first == "steps" and len(keys) > 2 and keys[1] in self._steps:
            index, key, *further = keys[1:]
            if key not in self._own["steps"][index]:
                if key == "params" and further:
                    further[0] = self._params[index][further[0]]
                return self._base, (first, self._steps[index], key, *further)
        if first == "axes" and len(keys) > 1:
            return (self if keys[1] in self._own.get("axes", {}) else self._base), keys
        here = first is None or first in self._own or first in self._origins or first not in self._base.value
        return (self if here else self._base), keys

    def inherited(self, keys: Keys) -> bool:
        return self._place(keys)[0] is not self

    def error(self, keys: Keys, message: str) -> SpecError:
        owner, place = self._place(keys)
        if owner is self:
            return super().error(place, message)
        error = owner.error(place, message)
        return SpecError(f"{error.explanation} (extended by {self.path})", error.path)


def _fitting(params: list[Any], domain: dict[str, list[Any]]) -> tuple[list[Any], list[int]]:
    """The parameters whose condition, if any, names a value that is left of each axis, and their places."""
    kept, places = [], []
    for place, param in enumerate(params):
        if isinstance(param, dict) and isinstance(param.get("when"), dict):
            when = _restricted(param["when"], domain)
            if when is None:
                continue
            param = param | {"when": when}
        kept.append(param)
        places.append(place)
    return kept, places


def _restricted(row: Any, domain: dict[str, list[Any]]) -> Any:
    """A row for the values that are left of each axis; None if none is left. Anything but a row stays."""
    if not isinstance(row, dict):
        return row
    left = dict(row)
    for axis, values in domain.items():
        if left.get(axis) is not None:
            row_values = as_values(left[axis])
            kept = [value for value in row_values if value in values]
            if not kept:
                return None
            if len(kept) < len(row_values):
                left[axis] = kept
    return left
