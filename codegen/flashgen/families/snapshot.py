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


def recall(text: bytes, cache: CubinCache, check: Callable[[], Content]) -> Content:
    """The content of ``text`` as ``cache`` has it, else what ``check`` returns, which is stored.

    An exception of ``check`` passes through. Processes that ask at once may each check the text.
    """
    key = snapshot_key(text)
    stored = cache.get(key)
    if stored is not None:
        try:
            return decode(stored)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            warnings.warn(
                f"{key} is not a snapshot of a spec ({error}); replaced", CacheWarning, stacklevel=2
            )
    content = check()
    cache.put(key, encode(content))
    return content


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


def decode(stored: bytes) -> Content:
    """The content that `encode` made these bytes of. Its entries are read when they are first looked at."""
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
        entries=_Entries(entries),
    )


class _Entries(Mapping[Point, tuple[Entry, ...]]):
    """The entries of a snapshot. A call looks at a few specs of many, and there at a few points."""

    def __init__(self, stored: bytes) -> None:
        self._stored = stored
        self._resources: dict[int, tuple[Resources, ...]] = {}

    @cached_property
    def _parsed(self) -> tuple[list[Any], dict[Point, Any]]:
        """What tiles take, and the tiles of each point, as JSON has them."""
        taken, tiles = json.loads(self._stored)
        return taken, {tuple(point): of_point for point, of_point in tiles}

    def __getitem__(self, point: Point) -> tuple[Entry, ...]:
        of_point = self._parsed[1][point]
        return tuple([Entry(row, committed, self._taken(index)) for row, committed, index in of_point])

    def _taken(self, index: int) -> tuple[Resources, ...]:
        """What the steps take with a tile, which is the same at many points."""
        resources = self._resources.get(index)
        if resources is None:
            taken = self._parsed[0][index]
            resources = self._resources[index] = tuple([_resources(_frozen(step)) for step in taken])
        return resources

    def __iter__(self) -> Iterator[Point]:
        return iter(self._parsed[1])

    def __len__(self) -> int:
        return len(self._parsed[1])


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
