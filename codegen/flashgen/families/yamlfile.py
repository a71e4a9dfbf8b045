"""A YAML file that remembers the line of each key, so that an error can say where it is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from flashgen.errors import SpecError
from flashgen.families.bases import MAX_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from flashgen.families.kinds import Keys, Kind

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_scalars = yaml.constructor.SafeConstructor()
_SCALARS = {
    "tag:yaml.org,2002:int": _scalars.construct_yaml_int,
    "tag:yaml.org,2002:float": _scalars.construct_yaml_float,
    "tag:yaml.org,2002:bool": _scalars.construct_yaml_bool,
    "tag:yaml.org,2002:null": _scalars.construct_yaml_null,
}
# Values of a file, aliases written out, and how deeply they are nested.
MAX_VALUES, MAX_DEPTH = 100_000, 30


class Document:
    """The parsed ``text`` of one YAML file. ``value`` holds plain Python values.

    Raises SpecError for a text that is not UTF-8, is not YAML, is not a mapping, repeats a key, or is larger
    than MAX_BYTES, MAX_VALUES and MAX_DEPTH allow.
    """

    def __init__(self, path: Path, text: bytes) -> None:
        self.path = path
        if len(text) > MAX_BYTES:
            raise SpecError(f"1: has {len(text):,} bytes; a spec has at most {MAX_BYTES:,}", path)
        self._values = 0
        try:
            root = yaml.compose(text.decode(), Loader=_Loader)
        except RecursionError:
            raise SpecError(f"1: values are nested too deeply, at most {MAX_DEPTH} deep", path) from None
        except UnicodeDecodeError as error:
            raise SpecError(f" cannot be read: {error}", path) from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = mark.line + 1 if mark else 1
            raise SpecError(f"{line}: not valid YAML: {getattr(error, 'problem', error)}", path) from None
        if not isinstance(root, yaml.MappingNode):
            raise SpecError("1: a spec is a mapping of keys to values", path)
        self._root = root
        self.value: dict[str, Any] = self._plain(root)

    def error(self, keys: Keys, message: str, column: int | None = None) -> SpecError:
        """A SpecError that names the file, the line and the key path of ``keys``, and the place of one
        character of the text there: its ``column`` from 0.
        """
        where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
        line = str(self._line(keys))
        if column is not None:
            node = self.node(keys)
            line = str(node.start_mark.line + 1)
            if node.style not in ("|", ">"):  # a block's text begins on another line
                line += f":{node.start_mark.column + bool(node.style) + column + 1}"
        return SpecError(f"{line}: {where + ': ' if where else ''}{message}", self.path)

    def inherited(self, keys: Keys) -> bool:
        """Whether the value at ``keys`` comes from a spec that this one extends."""
        return False

    def node(self, keys: Keys) -> yaml.Node:
        """The node at ``keys``, which knows its place in the text. Raises KeyError where there is none."""
        node: Any = self._root
        for key in keys:
            if isinstance(node, yaml.MappingNode):
                node = next((value for name, value in node.value if str(_scalar(name)) == str(key)), None)
            else:
                node = node.value[key]
            if node is None:
                raise KeyError(keys)
        return node

    def convert(self, keys: Keys, value: Any, kind: Kind) -> Any:
        """``value``, which is at ``keys``, as that kind reads it; SpecError where it is of another."""
        return kind.read(self.error, keys, value)

    def _line(self, keys: Keys) -> int:
        """Line, from 1, of the deepest key of ``keys`` that the file has."""
        node, line = self._root, self._root.start_mark.line
        for key in keys:
            if isinstance(node, yaml.MappingNode):
                pair = next((pair for pair in node.value if str(_scalar(pair[0])) == str(key)), None)
                if pair is None:
                    break
                line, node = pair[0].start_mark.line, pair[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
                node = node.value[key]
                line = node.start_mark.line
            else:
                break
        return line + 1

    def _plain(self, node: yaml.Node, depth: int = 0) -> Any:
        self._values += 1
        if self._values > MAX_VALUES or depth > MAX_DEPTH:
            line = node.start_mark.line + 1
            if depth > MAX_DEPTH:
                raise SpecError(
                    f"{line}: nested more than {MAX_DEPTH} deep, or an anchor contains itself", self.path
                )
            raise SpecError(f"{line}: more than {MAX_VALUES:,} values, aliases included", self.path)
        if isinstance(node, yaml.ScalarNode):
            line = node.start_mark.line + 1
            try:
                value = _scalar(node)
            except ValueError as error:
                raise SpecError(f"{line}: {_shortened(node.value)!r}: {error}", self.path) from None
            if isinstance(value, int) and abs(value) >= 1 << 63:
                raise SpecError(
                    f"{line}: the integer {_shortened(node.value)} has more than 64 bits", self.path
                )
            return value
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, depth + 1) for item in node.value]
        mapping = {}
        for key_node, value_node in node.value:
            key = _scalar(key_node)
            if not isinstance(key, str):
                key = str(key_node.value)
            if key in mapping:
                line = key_node.start_mark.line + 1
                raise SpecError(f"{line}: {key}: the key occurs twice in one mapping", self.path)
            mapping[key] = self._plain(value_node, depth + 1)
        return mapping


def _shortened(text: str) -> str:
    return text if len(text) < 50 else f"{text[:20]}..."


def _scalar(node: yaml.Node) -> Any:
    construct = _SCALARS.get(node.tag)
    return construct(node) if construct else node.value
