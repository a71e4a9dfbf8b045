"""A YAML file that remembers on which line each key stands, so that an error can say where it is wrong."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import yaml

from flashgen.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")
Keys = tuple[str | int, ...]

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_scalars = yaml.constructor.SafeConstructor()
_SCALARS = {
    "tag:yaml.org,2002:int": _scalars.construct_yaml_int,
    "tag:yaml.org,2002:float": _scalars.construct_yaml_float,
    "tag:yaml.org,2002:bool": _scalars.construct_yaml_bool,
    "tag:yaml.org,2002:null": _scalars.construct_yaml_null,
}
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+)\]")


class Document:
    """The parsed ``text`` of one YAML file. ``value`` holds plain Python values.

    Raises SpecError for a text that is not UTF-8, is not YAML, is not a mapping, or repeats a key.
    """

    def __init__(self, path: Path, text: bytes) -> None:
        self.path = path
        self._text = text
        try:
            root = yaml.compose(text.decode(), Loader=_Loader)
        except UnicodeDecodeError as error:
            raise SpecError(f"{path}: cannot be read: {error}") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = mark.line + 1 if mark else 1
            raise SpecError(f"{path}:{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
        if not isinstance(root, yaml.MappingNode):
            raise SpecError(f"{path}:1: a spec is a mapping of keys to values")
        self._root = root
        try:
            self.value: dict[str, Any] = self._plain(root)
        except RecursionError:
            raise SpecError(f"{path}:1: an anchor contains itself") from None

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
        return SpecError(f"{self.path}:{line}: {where + ': ' if where else ''}{message}")

    def inherited(self, keys: Keys) -> bool:
        """Whether what stands at ``keys`` comes from a spec that this one extends."""
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

    def line(self, index: int) -> str:
        """A line of the text, by its number from 0."""
        return self._text.decode().split("\n")[index]

    def convert(self, keys: Keys, value: Any, type: type[T]) -> T:
        """``value``, which stands at ``keys``, checked against ``type``; SpecError where they differ."""
        try:
            return msgspec.convert(value, type)
        except msgspec.ValidationError as error:
            found = _AT.match(str(error))
            steps = tuple(name or int(index) for name, index in _STEP.findall(found["path"] or ""))
            raise self._explain(keys, value, type, found["what"], steps) from None

    def _explain(self, keys: Keys, value: Any, type: Any, what: str, steps: Keys) -> SpecError:
        info = msgspec.inspect.type_info(type)
        for step in steps:
            value = value[step]
            info = _descend(info, step)
        unknown = re.match(r"Object contains unknown field `(.*)`", what)
        missing = re.match(r"Object missing required field `(.*)`", what)
        if unknown:
            allowed = ", ".join(f.encode_name for f in _struct(info).fields)
            return self.error((*keys, *steps, unknown[1]), f"unknown key; allowed: {allowed}")
        if missing:
            return self.error((*keys, *steps), f"the key `{missing[1]}` is missing")
        allowed = ", ".join(str(v) for v in _literals(info))
        if allowed:
            return self.error((*keys, *steps), f"found {value!r}; allowed: {allowed}")
        return self.error((*keys, *steps), f"{what[0].lower()}{what[1:]}, found {value!r}")

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

    def _plain(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.ScalarNode):
            try:
                return _scalar(node)
            except ValueError as error:
                raise SpecError(f"{self.path}:{node.start_mark.line + 1}: {node.value!r}: {error}") from None
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item) for item in node.value]
        mapping = {}
        for key_node, value_node in node.value:
            key = _scalar(key_node)
            if not isinstance(key, str):
                key = str(key_node.value)
            if key in mapping:
                line = key_node.start_mark.line + 1
                raise SpecError(f"{self.path}:{line}: {key}: the key occurs twice in one mapping")
            mapping[key] = self._plain(value_node)
        return mapping


def _scalar(node: yaml.Node) -> Any:
    construct = _SCALARS.get(node.tag)
    return construct(node) if construct else node.value


def _descend(info: Any, step: str | int) -> Any:
    if isinstance(info, msgspec.inspect.UnionType):
        wanted = msgspec.inspect.ListType if isinstance(step, int) else msgspec.inspect.StructType
        info = next(member for member in info.types if isinstance(member, wanted))
    if isinstance(info, msgspec.inspect.ListType):
        return info.item_type
    return next(field.type for field in info.fields if field.encode_name == step)


def _struct(info: Any) -> Any:
    if isinstance(info, msgspec.inspect.UnionType):
        return next(member for member in info.types if isinstance(member, msgspec.inspect.StructType))
    return info


def _literals(info: Any) -> tuple[Any, ...]:
    if isinstance(info, msgspec.inspect.LiteralType):
        return tuple(info.values)
    if isinstance(info, msgspec.inspect.ListType):
        return _literals(info.item_type)
    if isinstance(info, msgspec.inspect.UnionType):
        return tuple(dict.fromkeys(v for member in info.types for v in _literals(member)))
    return ()
