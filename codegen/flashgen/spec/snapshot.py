"""Snapshots: what checking a spec file gave, kept in the disk cache for the next process.

Parsing and checking the shipped spec, with the imports of a YAML parser and a validator, takes longer than
all else that the first call of a cached kernel does. So the `Content` of a text that passed is stored under a
key over the text itself and over the code that checked it: an edited file, or an edited check, has another
key and is read anew. The cache verifies on read that a snapshot is the one that was written; a text that is
wrong has none. Nothing else is remembered, neither a path nor a time of change.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import warnings
from typing import TYPE_CHECKING, Any

from flashgen.errors import CacheWarning
from flashgen.paths import code_digest
from flashgen.spec.model import Content, Entry
from flashgen.spec.params import Box, Param

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.toolchain.cache import CubinCache

# The rooms whose code decides what a text means.
_ROOMS = ("operators", "spec")
# What pickle says of bytes that it did not write.
_UNREADABLE = (pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError)
_CLASSES = {(kind.__module__, kind.__qualname__): kind for kind in (Box, Content, Entry, Param)}


def recall(text: bytes, cache: CubinCache, check: Callable[[], Content]) -> Content:
    """The content of ``text`` as ``cache`` has it, else what ``check`` returns, which is stored.

    An exception of ``check`` passes through. Processes that ask at once may each check the text.
    """
    key = snapshot_key(text)
    stored = cache.get(key)
    if stored is not None:
        try:
            return _read(stored)
        except _UNREADABLE as error:
            warnings.warn(f"{key} is no snapshot of a spec ({error}); replaced", CacheWarning, stacklevel=2)
    content = check()
    cache.put(key, pickle.dumps(content, protocol=5))
    return content


def snapshot_key(text: bytes) -> str:
    """The key of the snapshot of ``text`` in the disk cache."""
    return hashlib.sha256(b"spec\0" + code_digest(*_ROOMS) + text).hexdigest()


def _read(stored: bytes) -> Content:
    content = _Reader(io.BytesIO(stored)).load()
    if type(content) is not Content:
        raise pickle.UnpicklingError(f"found a {type(content).__name__}")
    return content


class _Reader(pickle.Unpickler):
    """Reads plain values and the records that a Content is made of; runs no other code."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _CLASSES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a spec") from None
