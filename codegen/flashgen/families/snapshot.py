"""Snapshots: what checking a spec file gave, kept in the disk cache for the next process.

Parsing and checking the shipped spec, with the imports of a YAML parser and a validator, takes longer than
all else that the first call of a cached kernel does. So the `Content` of a text that passed is stored, as
JSON, under a key over the text itself and over the code that checked it: an edited file, or an edited check,
has another key and is read anew. The cache verifies on read that a snapshot is the one that was written; a
text that is wrong has none. Nothing else is remembered, neither a path nor a time of change.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flashgen.errors import CacheWarning
from flashgen.families.dispatch import Dispatch
from flashgen.families.grid import Buffer, Grid, Visits
from flashgen.families.model import Content, Entry, Point, Resources, Step, TileRow
from flashgen.families.params import Box, Param
from flashgen.host.paths import code_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flashgen.toolchain.cache import CubinCache

# The rooms whose code decides what a text means.
_ROOMS = ("operators", "families")
# What reading a stored text raises that `encode` did not write.
_WRONG = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def recall(text: bytes, cache: CubinCache, check: Callable[[], Content]) -> Content:
    """The content of ``text`` as ``cache`` has it, else what ``check`` returns, which is stored.

    An exception of ``check`` passes through. Processes that ask at once may each check the text.
    """
    key = snapshot_key(text)

    def checked() -> Content:
        content = check()
        cache.put(key, encode(content))
        return content

    def replaced(error: Exception) -> Content:
        warnings.warn(f"{key} is not a snapshot of a spec ({error}); replaced", CacheWarning, stacklevel=4)
        return checked()

    stored = cache.get(key)
    if stored is None:
        return checked()
    try:
        return decode(stored, replaced)
    except _WRONG as error:
        return replaced(error)


def snapshot_key(text: bytes) -> str:
    """The key of the snapshot of ``text`` in the disk cache."""
    return hashlib.sha256(b"spec\0" + code_digest(*_ROOMS) + text).hexdigest()


def encode(content: Content) -> bytes:
    """A content as two lines of JSON: all but its entries, then these. What tiles take is listed once,
    however many points have the same.
    """
    taken: dict[tuple[Resources, ...], int] = {}
    tiles = [
        [point, [(row, committed, taken.setdefault(steps, len(taken))) for row, committed, steps in tiles]]
        for point, tiles in content.entries.items()
    ]
    lines = content._replace(entries=None), [list(taken), tiles]
    return b"\n".join(json.dumps(line, separators=(",", ":")).encode() for line in lines)


def decode(stored: bytes, replaced: Callable[[Exception], Content]) -> Content:
    """The content that `encode` made these bytes of. Its entries are read when they are first looked at:
    where they turn out to be wrong, ``replaced`` gets the error and gives the entries.
    """
    first, _, entries = stored.partition(b"\n")
    plain = json.loads(first)
    if not isinstance(plain, list) or not entries:
        raise TypeError(f"found {type(plain).__name__}, and {len(entries)} bytes of entries")
    content = Content._make([_frozen(member) for member in plain])
    return content._replace(
        steps=tuple(_step(step) for step in content.steps),
        dispatch=Dispatch._make(content.dispatch),
        rows=tuple(TileRow._make(row) for row in content.rows),
        workspace=tuple(Buffer._make(buffer) for buffer in content.workspace),
        entries=_Entries(entries, len(content.rows), replaced),
    )


class _Entries(Mapping[Point, tuple[Entry, ...]]):
    """The entries of a snapshot. A call looks at a few specs of many, and there at a few points."""

    def __init__(self, stored: bytes, num_rows: int, replaced: Callable[[Exception], Content]) -> None:
        self._stored, self._num_rows = stored, num_rows
        self._resources: dict[int, tuple[Resources, ...]] = {}
        self._replaced = replaced
        self._instead: Mapping[Point, tuple[Entry, ...]] | None = None  # where what is stored is wrong

    @cached_property
    def _parsed(self) -> tuple[list[Any], dict[Point, Any]]:
        """What tiles take, and the tiles of each point, as JSON has them."""
        taken, tiles = json.loads(self._stored)
        return taken, {tuple(point): of_point for point, of_point in tiles}

    def _sound(self, read: Callable[[], Any]) -> Any:
        """What ``read`` makes of the stored entries; None where they are wrong, and `_instead` is there."""
        if self._instead is None:
            try:
                return read()
            except KeyError:  # no point of the spec
                raise
            except _WRONG as error:
                self._instead = self._replaced(error).entries
        return None

    def __getitem__(self, point: Point) -> tuple[Entry, ...]:
        entries = self._sound(lambda: self._at(point))
        return self._instead[point] if entries is None else entries

    def _at(self, point: Point) -> tuple[Entry, ...]:
        of_point = self._parsed[1][point]
        entries = tuple([Entry(row, committed, self._taken(index)) for row, committed, index in of_point])
        if not all(0 <= entry.row < self._num_rows for entry in entries):
            raise ValueError(f"the tiles at {point} are not in its table")
        return entries

    def _taken(self, index: int) -> tuple[Resources, ...]:
        """What the steps take with a tile, which is the same at many points."""
        resources = self._resources.get(index)
        if resources is None:
            taken = self._parsed[0][index]
            resources = self._resources[index] = tuple([_resources(_frozen(step)) for step in taken])
        return resources

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points())

    def __len__(self) -> int:
        return len(self._points())

    def _points(self) -> Mapping[Point, Any]:
        points = self._sound(lambda: self._parsed[1])
        return self._instead if points is None else points


def _step(plain: tuple[Any, ...]) -> Step:
    step = Step._make(plain)
    return step._replace(params=tuple(Param(*param) for param in step.params))


def _resources(plain: tuple[Any, ...]) -> Resources:
    takes = Resources._make(plain)
    return takes._replace(
        boxes=tuple(Box._make(box) for box in takes.boxes),
        grid=Grid._make(takes.grid),
        visits=None if takes.visits is None else Visits._make(takes.visits),
    )


def _frozen(value: Any) -> Any:
    """JSON's lists as tuples, at every depth."""
    if isinstance(value, list):
        # Most items are plain, and a call for each would take most of the time.
        return tuple([_frozen(item) if isinstance(item, (list, dict)) else item for item in value])
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value
