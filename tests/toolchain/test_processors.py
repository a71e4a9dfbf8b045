import os

import pytest

from flashgen.toolchain.processors import processors


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
