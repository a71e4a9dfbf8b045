"""Processes that fork, and calls that are interrupted, while threads compute or hold locks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import pytest

from flashgen.host import forks

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

_CALL = """
    import os, random, signal, sys, threading, time
    import numpy as np
    from threadpoolctl import threadpool_info, threadpool_limits

    import flashgen
    from flashgen.cpu import threads

    def blas_threads():
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    q = np.random.default_rng().standard_normal((1, 300, 8, 64), np.float32)
    flashgen.attention(q, q, q, splits=1)
    threadpool_limits(2, "blas")  # not only for a while: the main thread stays the one that set it
    before = blas_threads()
"""


def printed(script, *, timeout=120):
    """What a new process that runs ``script`` after _CALL prints."""
    text = textwrap.dedent(_CALL) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_fork
@pytest.mark.parametrize("parallel", [False, True])
def test_a_child_of_a_process_that_computes_can_compute(parallel):
    """It does not hang, and its BLAS has the threads that the process's had."""
    script = f"""
        if {parallel}:
            threads._PARALLEL_WORK = 0
        ended = False

        def compute():
            while not ended:
                flashgen.attention(q, q, q, splits=1)

        thread = threading.Thread(target=compute)
        thread.start()
        children = []
        for _ in range(20):
            time.sleep(random.uniform(0.001, 0.02))
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                found = blas_threads()
                flashgen.attention(q, q, q, splits=1)
                os._exit(0 if found == blas_threads() == before else 1)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        ended = True
        thread.join()
        assert blas_threads() == before
        print(set(codes))
    """
    assert printed(script) == "{0}"


@needs_fork
@pytest.mark.parametrize("parallel", [False, True])
def test_interrupted_calls_leave_blas_its_threads(parallel):
    script = f"""
        if {parallel}:
            threads._PARALLEL_WORK = 0

        def interrupt(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        def seconds():
            start = time.perf_counter()
            flashgen.attention(q, q, q, splits=1)
            return time.perf_counter() - start

        took = min(seconds() for _ in range(10))  # in some of them other processes have the processor
        interrupted = calls = 0
        while interrupted < 20 and calls < 1000:
            calls += 1
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, took))
                flashgen.attention(q, q, q, splits=1)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
        assert blas_threads() == before, blas_threads()
        print(interrupted)
    """
    assert printed(script) == "20"


@pytest.mark.parametrize("parallel", [False, True])
def test_an_interrupt_at_any_step_leaves_blas_its_threads(parallel):
    script = f"""
        class At:
            def __init__(self, step):
                self.left = step

            def __call__(self, frame, event, argument):
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
                return self

        def call(step):
            sys.settrace(At(step))
            try:
                threads.for_each(lambda task: time.sleep(0.001), range(4), {1 << 40 if parallel else 0},
                    one_blas_thread=True)
            finally:
                sys.settrace(None)

        step, interrupted = 0, True
        while interrupted:
            step += 1
            try:
                call(step)
                interrupted = False
            except KeyboardInterrupt:
                for _ in range(3):  # neither at once nor when a helper that begins late has had its turn
                    assert blas_threads() == before, step
                    time.sleep(0.001)
        print(step > 10)
    """
    assert printed(script) == "True"


def test_no_task_begins_after_an_error_and_none_runs_when_it_is_raised(monkeypatch):
    from flashgen.cpu import threads

    monkeypatch.setattr(threads, "_PARALLEL_WORK", 0)
    monkeypatch.setattr(threads, "processors", lambda: 4)
    begun, ended = [], []

    def compute(task):
        begun.append(task)
        if task == 3:
            raise IndexError(task)
        threading.Event().wait(0.05)
        ended.append(task)

    with pytest.raises(IndexError, match="3"):
        threads.for_each(compute, range(100), 1)
    assert len(begun) < 12
    assert sorted(begun) == sorted([*ended, 3])


def test_overlapping_calls_of_threads_leave_blas_its_threads():
    """Also where the main thread is the one for which threadpoolctl sets threads."""
    script = """
        def compute():
            for _ in range(20):
                flashgen.attention(q, q, q, splits=1)

        several = [threading.Thread(target=compute) for _ in range(4)]
        inside = []
        attend = threads._ONE_BLAS_THREAD.__class__.__exit__
        threads._SharedLimit.__exit__ = lambda self, *e: (inside.append(blas_threads()), attend(self, *e))
        for each in several:
            each.start()
        for each in several:
            each.join()
        assert blas_threads() == before, blas_threads()
        assert all(set(each) == {1} for each in inside), inside
        print(len(inside))
    """
    assert printed(script) == "80"


def child_can(act):
    """Whether ``act`` ends in a forked child."""
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(10)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_fork
def test_a_fork_waits_for_a_guard():
    guard = forks.guard()
    held, state = threading.Event(), []

    def change():
        with guard:
            state.append("half")
            held.set()
            threading.Event().wait(0.2)
            state.append("whole")

    thread = threading.Thread(target=change)
    thread.start()
    held.wait()

    def look():
        with guard:
            assert state == ["half", "whole"]

    assert child_can(look)
    thread.join()
    with guard:
        assert child_can(look)  # of the thread that holds it, too


@needs_fork
def test_a_child_finds_no_lock_of_a_build_that_its_parent_is_at(tmp_path, monkeypatch):
    """Where the folder has no file locks, threads wait for each other by locks in memory."""
    import filelock

    from flashgen.toolchain.cache import CubinCache

    def refuse(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    cache, building, go_on = CubinCache(tmp_path), threading.Event(), threading.Event()
    key = "ab" * 32

    def build():
        building.set()
        go_on.wait(30)
        return b"parent"

    thread = threading.Thread(target=cache.get_or_build, args=(key, build))
    thread.start()
    building.wait()
    try:
        with cache._guard:
            assert child_can(lambda: cache.get_or_build(key, lambda: b"child"))
    finally:
        go_on.set()
        thread.join()


@needs_fork
def test_a_child_finds_no_lock_of_a_bundle_that_its_parent_reads(tmp_path, monkeypatch):
    """Neither of the bundle nor of the library that unpacks it, however far the parent is."""
    import zipfile

    from flashgen.toolchain import bundle

    key, reading = "ab" * 32, threading.Event()
    path = tmp_path / "kernels.zip"
    bundle.write(path, "nvrtc 13.0", {key: b"code"}, [bundle.Held("kernel", "sm_90", key)])
    opened = bundle.Bundle(path)
    read = zipfile._SharedFile.read

    def slow(self, count=-1):
        with self._lock:  # as it holds while it seeks and reads
            reading.set()
            threading.Event().wait(0.05)
            return read(self, count)

    monkeypatch.setattr(zipfile._SharedFile, "read", slow)
    thread = threading.Thread(target=opened.get, args=(key,))
    thread.start()
    reading.wait()
    assert child_can(lambda: opened.get(key))
    thread.join()


@needs_fork
def test_a_child_finds_no_lock_of_a_kernel_that_its_parent_loads():
    from flashgen.runtime import kernel

    held = kernel._loading.setdefault("a kernel", threading.Lock())
    try:
        with held:
            assert child_can(lambda: kernel._loading.setdefault("a kernel", threading.Lock()).acquire())
    finally:
        del kernel._loading["a kernel"]


def test_every_lock_of_a_module_is_one_that_forks_know():
    """A new one would hang the children of a fork."""
    from test_imports import MODULES

    plain = {
        name
        for name, path in MODULES.items()
        for line in path.read_text().splitlines()
        if line.startswith("_") and "Lock()" in line
    }
    assert not plain
