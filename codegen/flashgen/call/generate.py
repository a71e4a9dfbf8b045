"""Functions whose text follows from a table: as quick as if written by hand, and shown in tracebacks."""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def function(name: str, source: str, names: Mapping[str, Any]) -> Any:
    """The function ``name`` of ``source``, which uses ``names``."""
    file = f"<flashgen {name}>"
    # A modification time of None: no cache that is checked drops it.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = dict(names)
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]
