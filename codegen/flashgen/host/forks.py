"""Locks that are free in a forked child, where the threads that held them do not run."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def guard() -> threading.RLock:
    """A lock for a moment's work. A fork waits for it, so that what it guards is whole in the child."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):  # Windows has no forks
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


def in_child(renew: Callable[[], Any]) -> None:
    """Call ``renew`` in each forked child: for locks that are held for longer than a fork can wait."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
