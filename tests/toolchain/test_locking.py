import os
import signal

import pytest

from flashgen.toolchain.locking import acquired


def test_one_holds_it_at_a_time(tmp_path):
    with acquired(tmp_path / "lock"), pytest.raises(BlockingIOError):
        acquired(tmp_path / "lock", timeout=0.05)
    with acquired(tmp_path / "lock", timeout=0):
        pass


def test_a_process_that_was_forked_does_not_keep_it(tmp_path):
    with acquired(tmp_path / "lock"):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        with acquired(tmp_path / "lock", timeout=0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
