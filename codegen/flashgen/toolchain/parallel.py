"""Sharing work among the processors that there are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Item = TypeVar("Item")
Result = TypeVar("Result")


def processors() -> int:
    """How many processors this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_parallel(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int | None = None,
    on_done: Callable[[Item, Result], None] | None = None,
) -> list[Result]:
    """``[work(item) for item in items]`` on ``workers`` threads, by default one for each processor.

    ``on_done`` is called in this thread as each one ends, in order of completion. The first exception ends
    it: what has not begun is dropped.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    items = list(items)
    pool = ThreadPoolExecutor(workers or processors(), thread_name_prefix="flashgen-compile")
    try:
        places = {pool.submit(work, item): place for place, item in enumerate(items)}
        results: dict[int, Result] = {}
        for future in as_completed(places):
            place = places[future]
            results[place] = future.result()
            if on_done is not None:
                on_done(items[place], results[place])
        return [results[place] for place in range(len(items))]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
