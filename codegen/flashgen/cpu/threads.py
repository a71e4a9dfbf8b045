"""Blocks of work over threads, each with a BLAS of one thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from threadpoolctl import ThreadpoolController

from flashgen.toolchain.parallel import processors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Below this many multiplications, starting threads costs more than they save.
_PARALLEL_WORK = 1 << 27


class _SharedLimit:
    """Keeps BLAS to one thread while any call is inside: the blocks are what runs in parallel.

    The setting is the process's, so calls that overlap must not each save and restore it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._limit = ThreadpoolController().limit(limits=1, user_api="blas")
                self._limit.__enter__()
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._limit.__exit__(*exception)


_ONE_BLAS_THREAD = _SharedLimit()


def for_each(
    compute: Callable[[Any], None],
    tasks: Sequence[Any],
    multiplications: int,
    *,
    one_blas_thread: bool = False,
) -> None:
    """``compute`` each task, in several threads where there are enough ``multiplications`` in all; BLAS then
    has one thread, and in any case where that is asked for.
    """
    count = min(len(tasks), processors())
    if count < 2 or multiplications < _PARALLEL_WORK:
        with _ONE_BLAS_THREAD if one_blas_thread else nullcontext():
            for task in tasks:
                compute(task)
        return
    with _ONE_BLAS_THREAD, ThreadPoolExecutor(count) as pool:
        for _ in pool.map(compute, tasks):
            pass
