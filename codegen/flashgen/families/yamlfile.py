"""A YAML file that remembers on which line each key stands, so that an error can say where it is wrong."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import yaml
from msgspec import inspect

from flashgen.errors import SpecError
from flashgen.host import forks

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
# Bytes of a file, values in it, aliases written out, and how deeply they are nested: the largest shipped spec
# has some 20,000 bytes.
MAX_BYTES, MAX_VALUES, MAX_DEPTH = 1_000_000, 100_000, 30
_preparing = forks.guard()
_AT = re.compile(r"^(.*?)(?: - at `(key` in `)?\$(.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+|\.\.\.)\]")
_PLAIN = {
    inspect.StrType: "a text",
    inspect.BoolType: "true or false",
    inspect.ListType: "a list",
    inspect.DictType: "a mapping",
    inspect.StructType: "a mapping",
}


class Document:
    """The parsed ``text`` of one YAML file. ``value`` holds plain Python values.

    Raises SpecError for a text that is not UTF-8, is not YAML, is not a mapping, repeats a key, or is larger
    than MAX_BYTES, MAX_VALUES and MAX_DEPTH allow.
    """

    def __init__(self, path: Path, text: bytes) -> None:
        self.path = path
        self._text = text
        if len(text) > MAX_BYTES:
            raise SpecError(f"{path}:1: has {len(text):,} bytes; a spec has at most {MAX_BYTES:,}")
        self._values = 0
        try:
            root = yaml.compose(text.decode(), Loader=_Loader)
        except RecursionError:
            raise SpecError(f"{path}:1: values are nested too deeply, at most {MAX_DEPTH} deep") from None
        except UnicodeDecodeError as error:
            raise SpecError(f"{path}: cannot be read: {error}") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = mark.line + 1 if mark else 1
            raise SpecError(f"{path}:{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
        if not isinstance(root, yaml.MappingNode):
            raise SpecError(f"{path}:1: a spec is a mapping of keys to values")
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
            return _converted(value, type)
        except msgspec.ValidationError as error:
            raise self._explain(keys, value, type, str(error)) from None

    def _explain(self, keys: Keys, whole: Any, type: Any, said: str) -> SpecError:
        """The error of ``whole``, of which msgspec has ``said`` what is wrong."""
        what, of_key, path = _AT.match(said).groups()
        value, info, steps = whole, inspect.type_info(type), ()
        for name, index in _STEP.findall((path or "") + ("[...]" if of_key else "")):
            if index == "...":  # some key of a mapping
                step = next(key for key in value if _says(_with_only(whole, steps, key), type) == said)
            else:
                step = name or int(index)
            steps = (*steps, step)
            value, mapping, info = value[step], info, _descend(info, step)
        if of_key:
            value, info = steps[-1], _bare(mapping).key_type
        unknown = re.match(r"Object contains unknown field `(.*)`", what)
        missing = re.match(r"Object missing required field `(.*)`", what)
        if unknown:
            allowed = ", ".join(f.encode_name for f in _struct(info).fields)
            return self.error((*keys, *steps, unknown[1]), f"unknown key; allowed: {allowed}")
        if missing:
            return self.error((*keys, *steps), f"the key `{missing[1]}` is missing")
        allowed = ", ".join(str(v) for v in _literals(info))
        expected = f"allowed: {allowed}" if allowed else f"expected {_words(info)}"
        return self.error((*keys, *steps), f"found {value!r}; {expected}")

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
            at = f"{self.path}:{node.start_mark.line + 1}"
            if depth > MAX_DEPTH:
                raise SpecError(f"{at}: nested more than {MAX_DEPTH} deep, or an anchor contains itself")
            raise SpecError(f"{at}: more than {MAX_VALUES:,} values, aliases included")
        if isinstance(node, yaml.ScalarNode):
            at = f"{self.path}:{node.start_mark.line + 1}"
            try:
                value = _scalar(node)
            except ValueError as error:
                raise SpecError(f"{at}: {_shortened(node.value)!r}: {error}") from None
            if isinstance(value, int) and abs(value) >= 1 << 63:
                raise SpecError(f"{at}: the integer {_shortened(node.value)} has more than 64 bits")
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
                raise SpecError(f"{self.path}:{line}: {key}: the key occurs twice in one mapping")
            mapping[key] = self._plain(value_node, depth + 1)
        return mapping


def _shortened(text: str) -> str:
    return text if len(text) < 50 else f"{text[:20]}..."


def _scalar(node: yaml.Node) -> Any:
    construct = _SCALARS.get(node.tag)
    return construct(node) if construct else node.value


def _converted(value: Any, type: type[T]) -> T:
    """``value`` as that type. msgspec prepares a type when it is first used, and threads must not do so at
    once.
    """
    with _preparing:
        return msgspec.convert(value, type)


def _says(value: Any, type: Any) -> str:
    """What msgspec says is wrong with it."""
    try:
        _converted(value, type)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _with_only(value: Any, steps: Keys, key: str) -> Any:
    """``value`` with no other key in the mapping at ``steps``."""
    if not steps:
        return {key: value[key]}
    copy = value.copy()
    copy[steps[0]] = _with_only(value[steps[0]], steps[1:], key)
    return copy


def _bare(info: Any) -> Any:
    """A type without the words that describe it."""
    return info.type if isinstance(info, inspect.Metadata) else info


def _members(info: Any) -> list[Any]:
    """The types that a value may be of, but for the null of what is left out."""
    if isinstance(info, inspect.UnionType):
        return [each for each in info.types if not isinstance(each, inspect.NoneType)]
    return [info]


def _descend(info: Any, step: str | int) -> Any:
    wanted = (inspect.ListType,) if isinstance(step, int) else (inspect.StructType, inspect.DictType)
    found = next(bare for each in _members(_bare(info)) if isinstance(bare := _bare(each), wanted))
    if isinstance(found, inspect.ListType):
        return found.item_type
    if isinstance(found, inspect.DictType):
        return found.value_type
    return next(field.type for field in found.fields if field.encode_name == step)


def _struct(info: Any) -> Any:
    return next(each for each in _members(_bare(info)) if isinstance(each, inspect.StructType))


def _literals(info: Any) -> tuple[Any, ...]:
    found = []
    for each in map(_bare, _members(_bare(info))):
        if isinstance(each, inspect.LiteralType):
            found += each.values
        elif isinstance(each, inspect.ListType):
            found += _literals(each.item_type)
    return tuple(dict.fromkeys(found))


def _words(info: Any) -> str:
    """What values of a type are, for a message."""
    if isinstance(info, inspect.Metadata):
        return (info.extra_json_schema or {}).get("description") or _words(info.type)
    if isinstance(info, inspect.UnionType):
        return ", or ".join(dict.fromkeys(map(_words, _members(info))))
    if isinstance(info, (inspect.IntType, inspect.FloatType)):
        bounds = {"of {:g} or more": info.ge, "above {:g}": info.gt, "at most {:g}": info.le}
        limits = " and ".join(words.format(bound) for words, bound in bounds.items() if bound is not None)
        return f"{'an integer' if isinstance(info, inspect.IntType) else 'a number'} {limits}".strip()
    several = " that is not empty" if getattr(info, "min_length", None) else ""
    return _PLAIN[type(info)] + several
