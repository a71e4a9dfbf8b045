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
from typing import TYPE_CHECKING, Any

from flashgen.errors import CacheWarning
from flashgen.paths import code_digest
from flashgen.spec.grid import Buffer, Visits
from flashgen.spec.model import Content, Entry, Resources, Step
from flashgen.spec.params import Box, Param

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.toolchain.cache import CubinCache

_ENTRIES = Content._fields.index("entries")
# The rooms whose code decides what a text means.
_ROOMS = ("operators", "spec")


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
    """A content as JSON. What tiles take is listed once, however many points have the same."""
    taken: dict[tuple[Resources, ...], int] = {}
    entries = [
        [point, [(row, committed, taken.setdefault(steps, len(taken))) for row, committed, steps in tiles]]
        for point, tiles in content.entries.items()
    ]
    steps = [
        step._replace(params=[[param.name, param.ctype, param.doc, param.when] for param in step.params])
        for step in content.steps
    ]
    plain = content._replace(steps=steps, entries=[list(taken), entries])
    return json.dumps(plain, separators=(",", ":")).encode()


def decode(stored: bytes) -> Content:
    """The content that `encode` made these bytes of."""
    plain = json.loads(stored)
    if not isinstance(plain, list):
        raise TypeError(f"found {type(plain).__name__}")
    content = Content._make(plain)
    known, entries = content.entries
    taken = [tuple([_resources(_frozen(each)) for each in steps]) for steps in known]
    others = [_frozen(getattr(content, name)) for name in Content._fields if name != "entries"]
    frozen = Content._make([*others[:_ENTRIES], {}, *others[_ENTRIES:]])
    return frozen._replace(
        steps=tuple(_step(step) for step in frozen.steps),
        workspace=tuple(Buffer._make(buffer) for buffer in frozen.workspace),
        entries={
            tuple(point): tuple([Entry(row, committed, taken[index]) for row, committed, index in tiles])
            for point, tiles in entries
        },
    )


def _step(plain: tuple[Any, ...]) -> Step:
    step = Step._make(plain)
    return step._replace(params=tuple(Param(*param) for param in step.params))


def _resources(plain: tuple[Any, ...]) -> Resources:
    takes = Resources._make(plain)
    return takes._replace(
        boxes=tuple(Box._make(box) for box in takes.boxes),
        visits=None if takes.visits is None else Visits._make(takes.visits),
    )


def _frozen(value: Any) -> Any:
    """JSON's lists as tuples, at every depth."""
    if isinstance(value, list):
        return tuple([_frozen(item) for item in value])
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value
