"""Calls in programs of XLA that are not finished when the process ends: it waits for them.

XLA runs a program in threads of its own, which need Python for a call of flashgen. Once Python shuts down it
ends a thread that asks for it. XLA then waits for that thread without end, and so does the process. Functions
that JAX itself calls back have effects, for which JAX waits; calls of flashgen have none.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# The platforms for which programs were lowered, and the threads that are inside a call.
_platforms: set[str] = set()
_inside: set[int] = set()
# A program whose results were dropped is in no list of JAX. It may be between two calls.
_QUIET_CHECKS, _PAUSE = 20, 1e-3  # seconds


@contextlib.contextmanager
def call(platform: str) -> Iterator[None]:
    """The time that a thread of XLA is inside a call."""
    thread = threading.get_ident()
    _platforms.add(platform)
    _inside.add(thread)
    try:
        yield
    finally:
        _inside.discard(thread)


def expect(platform: str) -> None:
    """A program for this platform has a call. It may run at any time from now on."""
    _platforms.add(platform)


def wait_at_exit(jax: Any) -> None:
    """Wait for all calls before the functions run that JAX, which is imported by now, has for the exit."""
    atexit.register(_wait, jax)


def _wait(jax: Any) -> None:
    for platform in sorted(_platforms):
        arrays = []
        with contextlib.suppress(RuntimeError):  # a program was lowered for a platform that is not here
            arrays = jax.live_arrays(platform)
        for array in arrays:
            with contextlib.suppress(Exception):  # an error belongs to whoever reads the array
                array.block_until_ready()
    quiet = 0
    while _platforms and quiet < _QUIET_CHECKS:
        quiet = 0 if _inside else quiet + 1
        time.sleep(_PAUSE)
