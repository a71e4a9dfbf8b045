"""Blocks of work over threads, each with a BLAS of one thread."""

from __future__ import annotations

import time
from _thread import start_new_thread
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from threadpoolctl import ThreadpoolController

from flashgen.host import forks
from flashgen.toolchain.parallel import processors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from threadpoolctl import LibController

# Below this many multiplications, starting threads costs more than they save.
_PARALLEL_WORK = 1 << 27


# What sets the threads of OpenBLAS, which distributions rename.
_OPENBLAS_SETTERS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
)


class _SharedLimit:
    """Keeps BLAS to one thread while any thread is inside: the blocks are what runs in parallel.

    The setting is the process's, so calls that overlap must not each save and restore it. The main thread
    must not enter: an interrupt can end it between any two steps, also between a change and its undoing.
    """

    def __init__(self) -> None:
        self._lock = forks.guard()
        self._inside = 0
        self._before: list[tuple[Callable[[int], Any], int]] = []
        forks.in_child(self._leave_parent)

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                libraries = ThreadpoolController().select(user_api="blas").lib_controllers
                self._before = [(_setter(library), library.num_threads) for library in libraries]
            self._inside += 1
            for set_threads, _ in self._before:  # for each thread: with OpenMP it is a thread's own setting
                set_threads(1)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._restore()

    def _restore(self) -> None:
        for set_threads, count in self._before:
            set_threads(count)

    def _leave_parent(self) -> None:
        """In a forked child: reset, because the threads that were inside are not in the child."""
        if self._inside:
            self._inside = 0
            self._restore()


def _setter(library: LibController) -> Callable[[int], Any]:
    """The function that sets the threads of a BLAS. If all threads share a pool, threadpoolctl's function
    sets it only for the first thread that calls it, and does nothing for any other.
    """
    if library.internal_api == "openblas" and library.threading_layer != "openmp":
        for name in _OPENBLAS_SETTERS:
            if hasattr(library.dynlib, name):
                return getattr(library.dynlib, name)
    return library.set_num_threads


_ONE_BLAS_THREAD = _SharedLimit()


def for_each(
    compute: Callable[[Any], None],
    tasks: Sequence[Any],
    multiplications: int,
    *,
    one_blas_thread: bool = False,
) -> None:
    """``compute`` each task, in several threads where there are enough ``multiplications`` in all; BLAS then
    has one thread, and in any case with ``one_blas_thread``.

    After an error or an interrupt no further task begins.
    """
    count = min(len(tasks), processors())
    if count < 2 or multiplications < _PARALLEL_WORK:
        if not one_blas_thread:
            for task in tasks:
                compute(task)
            return
        count = 1
    left, active, ended, stopped = iter([*tasks]), [], SimpleQueue(), False

    def work() -> None:
        failure = None
        active.append(True)  # before it reads `stopped`: the caller sets `stopped` before it reads `active`
        try:
            if not stopped:
                with _ONE_BLAS_THREAD:
                    for task in left:  # all threads take theirs from one iterator
                        if stopped:
                            break
                        compute(task)
        except BaseException as error:  # noqa: BLE001 - it is raised again, by the thread that waits
            failure = error
        active.pop()
        ended.put(failure)

    # Threads and a queue that are written in C. An interrupt may strike within the methods of `threading` and
    # `concurrent.futures`, too, and then leaves their locks locked, for which the threads would wait.
    try:
        for _ in range(count):
            start_new_thread(work, ())
        for _ in range(count):
            failure = ended.get()
            if failure is not None:
                raise failure
    except BaseException:
        stopped = True
        while active:  # none writes results any more when the error is raised
            time.sleep(0.001)
        raise
