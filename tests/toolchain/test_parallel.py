import os
import threading
import time

import pytest

from flashgen.toolchain.parallel import in_parallel, processors


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is Linux's")
def test_only_the_processors_of_this_process_count():
    allowed = os.sched_getaffinity(0)
    assert processors() == len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert processors() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("count", "expected"), [(6, 6), (None, 1)])
def test_without_affinity_all_count(count, expected, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert processors() == expected


def test_parallel_keeps_order_and_tells_of_each_in_the_calling_thread():
    seen = []

    def work(item: int) -> int:
        time.sleep(0.002 * (5 - item))  # the last ones end first
        return -item

    thread = threading.get_ident()
    results = in_parallel(work, range(6), 3, lambda *done: seen.append((done, threading.get_ident())))
    assert results == [0, -1, -2, -3, -4, -5]
    assert sorted(done for done, _ in seen) == [(n, -n) for n in range(6)]
    assert {ident for _, ident in seen} == {thread}


def test_parallel_stops_at_an_exception():
    started = []

    def work(item: int) -> None:
        started.append(item)
        time.sleep(0.01)
        raise KeyError(item)

    with pytest.raises(KeyError):
        in_parallel(work, range(1000), 2)
    assert len(started) < 1000
