"""The disk cache under damage, kills, full disks, many processes and many threads."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.errors import BadParam, CacheWarning
from flashgen.toolchain import cache as fcache
from flashgen.toolchain import private
from flashgen.toolchain.cache import CubinCache, key_for


def key_of(n: int) -> str:
    return hashlib.sha256(str(n).encode()).hexdigest()


def payload_of(key: str, size: int = 40_000) -> bytes:
    return hashlib.shake_256(key.encode()).digest(size)


@pytest.fixture
def cache(tmp_path):
    return CubinCache(tmp_path / "cache")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return CubinCache(tmp_path_factory.mktemp("cache"))


def entry(cache: CubinCache, key: str) -> Path:
    (path,) = cache.root.rglob(key)
    return path


def python(script: str, *arguments: object) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(Path(fcache.__file__).parents[2])}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


@given(payload=st.binary(max_size=500))
def test_what_is_put_is_got(shared, payload):
    key = hashlib.sha256(payload).hexdigest()
    shared.put(key, payload)
    assert CubinCache(shared.root).get(key) == payload


def test_absent_is_none_and_creates_nothing(cache):
    assert cache.get(key_of(1)) is None
    assert not cache.root.exists()


@settings(deadline=None)
@given(position=st.integers(min_value=0), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(shared, position, bit):
    key = key_of(1)
    shared.put(key, payload_of(key, 300))
    path = entry(shared, key)
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.warns(CacheWarning, match="is damaged"):
        assert shared.get(key) is None
    assert not path.exists()


@settings(deadline=None)
@given(data=st.data())
def test_any_truncation_is_noticed_and_rebuilt(shared, data):
    key = key_of(2)
    shared.put(key, payload_of(key, 300))
    path = entry(shared, key)
    size = path.stat().st_size
    os.truncate(path, data.draw(st.integers(0, size - 1)))
    with pytest.warns(CacheWarning, match="is damaged"):
        assert shared.get_or_build(key, lambda: b"again") == b"again"
    assert shared.get(key) == b"again"


def test_an_entry_under_another_name_is_refused(cache):
    cache.put(key_of(1), b"one")
    cache.put(key_of(2), b"two")
    entry(cache, key_of(1)).replace(entry(cache, key_of(2)))
    with pytest.warns(CacheWarning, match="is damaged"):
        assert cache.get(key_of(2)) is None


def test_verify_finds_and_removes_exactly_the_damaged(cache):
    for n in range(10):
        cache.put(key_of(n), payload_of(key_of(n)))
    victim = entry(cache, key_of(3))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    report = cache.verify()
    assert report.intact == 9
    assert report.damaged == (victim,)
    assert not victim.exists()
    assert cache.verify().damaged == ()
    assert cache.info().entries == 9


@pytest.fixture
def foreign(cache, tmp_path):
    """A cache with files of others in and beside it, some of them behind links; ``foreign()`` is what is left
    of these, with their content and the time of the last change.
    """
    cache.put(key_of(0), payload_of(key_of(0)))
    key, other, temporary = key_of(60), key_of(61), "0" * 24
    theirs = tmp_path / "theirs"
    folders = {name: theirs / name for name in ("tmp", "shelf", "entry")}
    files = [
        folders["tmp"] / temporary,
        folders["shelf"] / other,
        folders["entry"] / "thesis.tex",
        cache.root / "thesis.tex",
        cache.root / "tmp" / "thesis.tex",
        cache.root / "tmp" / f"{temporary}.tex",
        cache.root / "tmp" / "folder" / temporary,
        cache.root / "entries" / "notes.txt",
        cache.root / "entries" / "2024" / "notes.txt",
        cache.root / "entries" / "2024" / key,
        cache.root / "entries" / key[:2] / "notes.txt",
        cache.root / "entries" / key[:2] / f"{key}.bak",
        cache.root / "entries" / key[:2] / other,
        cache.root / "locks" / "thesis.tex",
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("irreplaceable")
        os.utime(file, (0, 0))
    links = {
        cache.root / "entries" / key[:2] / key: folders["entry"] / "thesis.tex",
        cache.root / "entries" / other[:2]: folders["shelf"],
        cache.root / "tmp" / ("1" * 24): folders["entry"] / "thesis.tex",
    }
    for link, target in links.items():
        link.symlink_to(target)
    before = dict.fromkeys(files, ("irreplaceable", 0.0))

    def now():
        return {file: (file.read_text(), file.stat().st_mtime) for file in files if file.exists()}

    assert now() == before
    yield now
    assert now() == before
    assert all(link.is_symlink() for link in links)


def evict(cache):
    small = CubinCache(cache.root, max_bytes=1)
    for n in range(10, 14):
        small.put(key_of(n), payload_of(key_of(n)))
    assert small.info().entries == 1


ACTS = {
    "verify": lambda cache: cache.verify(),
    "clear": lambda cache: cache.clear(),
    "clear some": lambda cache: cache.clear(lambda payload: True, unused_for=60),
    "evict": evict,
    "write": lambda cache: CubinCache(cache.root).put(key_of(7), b"new"),
    "read": lambda cache: [cache.get(key_of(n)) for n in (0, 60, 61)],
    "look": lambda cache: cache.info(),
    "lock": lambda cache: cache.get_or_build(key_of(8), lambda: b"new"),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.filterwarnings("ignore::flashgen.errors.CacheWarning")
def test_files_of_others_stay(cache, foreign, act):
    ACTS[act](cache)


@pytest.mark.parametrize("part", ["tmp", "entries", "locks"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.filterwarnings("ignore::flashgen.errors.CacheWarning")
def test_no_part_of_a_cache_is_reached_through_a_link(cache, tmp_path, act, part):
    cache.get_or_build(key_of(0), lambda: b"x")
    theirs = tmp_path / "theirs"
    (cache.root / part).replace(theirs)
    files = [theirs / ("0" * 24), theirs / "abc.lock", theirs / key_of(1)[:2] / key_of(1)]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("irreplaceable")
        os.utime(file, (0, 0))
    (cache.root / part).symlink_to(theirs)
    before = {path: path.stat().st_mtime_ns for path in theirs.rglob("*")}
    ACTS[act](cache) if act != "evict" else CubinCache(cache.root, max_bytes=1).put(key_of(9), b"x")
    assert {path: path.stat().st_mtime_ns for path in theirs.rglob("*")} == before


def test_a_folder_with_other_files_gets_one_for_the_cache_within_it(tmp_path):
    for part in ("tmp", "entries/2024", "locks"):
        (tmp_path / part).mkdir(parents=True)
    files = [tmp_path / "tmp" / "thesis.tex", tmp_path / "entries" / "2024" / "notes.txt"]
    for file in files:
        file.write_text("irreplaceable")
        os.utime(file, (0, 0))
    cache = CubinCache(tmp_path)
    assert cache.root == tmp_path / "flashgen-cache"
    assert cache.get_or_build(key_of(1), lambda: b"x") == b"x"
    cache.verify()
    cache.clear()
    assert all(file.read_text() == "irreplaceable" for file in files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["entries", "flashgen-cache", "locks", "tmp"]
    assert CubinCache(tmp_path).root == cache.root
    assert CubinCache(cache.root).root == cache.root


def test_a_cache_stays_where_it_is_when_other_files_come(cache):
    cache.put(key_of(1), b"x")
    (cache.root / "notes.txt").write_text("irreplaceable")
    again = CubinCache(cache.root)
    assert again.root == cache.root
    assert again.get(key_of(1)) == b"x"


def test_where_even_that_folder_has_other_files_nothing_is_written(tmp_path):
    files = [tmp_path / "thesis.tex", tmp_path / "flashgen-cache" / "thesis.tex"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("irreplaceable")
    cache = CubinCache(tmp_path)
    with pytest.warns(CacheWarning, match=r"it holds other files.*FLASHGEN_CACHE_DIR"):
        cache.put(key_of(1), b"x")
    assert cache.get(key_of(1)) == b"x"
    assert "it holds other files" in cache.info().problem
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == files


def test_files_that_come_while_there_is_no_cache_yet_keep_it_out(cache):
    cache.root.mkdir()
    (cache.root / "thesis.tex").write_text("irreplaceable")
    with pytest.warns(CacheWarning, match="it holds other files"):
        cache.put(key_of(1), b"x")
    assert [path.name for path in cache.root.iterdir()] == ["thesis.tex"]


def test_the_cache_of_an_earlier_version_is_known(cache):
    cache.get_or_build(key_of(1), lambda: b"x")
    marker = cache.root / ".flashgen-cache"
    marker.unlink()
    again = CubinCache(cache.root)
    assert again.root == cache.root
    assert again.get(key_of(1)) == b"x"
    assert again.info().entries == 1
    assert again.clear() == (1, 0, "")
    assert marker.is_file()


def plain_file(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("irreplaceable")
    os.utime(path, (0, 0))


# What may be in a folder of somebody else that looks like a cache at first sight.


def marker_that_is_a_folder(root):
    CubinCache(root / ".flashgen-cache").put(key_of(1), b"x")
    plain_file(root / "tmp" / ("0" * 24))


def marker_that_is_a_link(root):
    root.mkdir()
    (root / ".flashgen-cache").symlink_to("/nowhere")
    plain_file(root / "tmp" / ("0" * 24))


def store_of_another_program(root):
    plain_file(root / "entries" / key_of(3)[:2] / key_of(3))


def store_of_other_names(root):
    plain_file(root / "entries" / "ab" / "notes.txt")


def store_with_an_empty_file(root):
    plain_file(root / "entries" / key_of(3)[:2] / key_of(3))
    (root / "entries" / key_of(3)[:2] / key_of(3)).write_bytes(b"")


def store_of_links(root):
    plain_file(root.with_name("theirs") / "thesis.tex")
    (root / "entries" / key_of(3)[:2]).mkdir(parents=True)
    (root / "entries" / key_of(3)[:2] / key_of(3)).symlink_to(root.with_name("theirs") / "thesis.tex")


def locks_of_another_program(root):
    (root / "locks" / "abc.lock").mkdir(parents=True)


ALIKE = [
    marker_that_is_a_folder,
    marker_that_is_a_link,
    store_of_another_program,
    store_of_other_names,
    store_with_an_empty_file,
    store_of_links,
    locks_of_another_program,
]


@pytest.mark.parametrize("look_alike", ALIKE)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.filterwarnings("ignore::flashgen.errors.CacheWarning")
def test_what_only_looks_like_a_cache_is_left_as_it_is(tmp_path, look_alike, act):
    root = tmp_path / "scratch"
    look_alike(root)
    before = {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in tmp_path.rglob("*")}
    cache = CubinCache(root)
    assert cache.root == root / "flashgen-cache"
    ACTS[act](cache)
    for path in before.keys() - {root}:
        assert (path.lstat().st_mtime_ns, path.lstat().st_size) == before[path], path


@pytest.mark.parametrize("plant", ["a link", "a folder", "a pipe"])
@pytest.mark.filterwarnings("ignore::flashgen.errors.CacheWarning")
def test_what_is_no_regular_file_stays_where_an_entry_would_be(cache, tmp_path, plant):
    cache.put(key_of(2), b"x")
    path = cache.root / "entries" / key_of(1)[:2] / key_of(1)
    path.parent.mkdir()
    plain_file(tmp_path / "thesis.tex")
    {"a link": lambda: path.symlink_to(tmp_path / "thesis.tex"), "a folder": path.mkdir}.get(
        plant, lambda: os.mkfifo(path)
    )()
    before = path.lstat().st_ino
    assert cache.get_or_build(key_of(1), lambda: b"built") == b"built"
    assert cache.get(key_of(1)) == b"built"
    cache.clear()
    assert path.lstat().st_ino == before
    assert (tmp_path / "thesis.tex").read_text() == "irreplaceable"


def test_no_part_of_a_cache_is_read_through_a_link(cache, tmp_path):
    for n in range(2):
        cache.put(key_of(n), b"x")
    (cache.root / "entries" / key_of(0)[:2]).replace(tmp_path / "shelf")
    (cache.root / "entries" / key_of(0)[:2]).symlink_to(tmp_path / "shelf")
    assert CubinCache(cache.root).get(key_of(0)) is None
    assert CubinCache(cache.root).get(key_of(1)) == b"x"
    (cache.root / "entries").replace(tmp_path / "entries")
    (cache.root / "entries").symlink_to(tmp_path / "entries")
    os.utime(tmp_path / "entries" / key_of(1)[:2] / key_of(1), (0, 0))
    assert CubinCache(cache.root).get(key_of(1)) is None
    assert (tmp_path / "entries" / key_of(1)[:2] / key_of(1)).stat().st_mtime == 0


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077, 0o277, 0o777], ids=oct)
def test_nobody_else_can_read_or_write_it_whatever_the_umask(tmp_path, umask):
    root = tmp_path / "new" / "folders" / "cache"
    before = os.umask(umask)
    try:
        CubinCache(root).get_or_build(key_of(1), lambda: b"x")
    finally:
        os.umask(before)
    made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert {path.name for path in made} >= {"folders", "cache", "entries", "tmp", "locks", ".flashgen-cache"}
    for path in made:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert CubinCache(root).get(key_of(1)) == b"x"


class Cleared(dict):
    """What another thread clears right after it was looked at."""

    def __contains__(self, key):
        found = super().__contains__(key)
        self.clear()
        return found


def test_what_is_kept_in_memory_may_be_cleared_meanwhile(cache):
    cache._memory = Cleared({key_of(1): b"kept"})
    assert cache.get(key_of(1)) == b"kept"


def test_clear_leaves_locks_that_are_held_and_files_that_are_being_written(cache):
    cache.put(key_of(1), b"1")
    with cache._locked(key_of(2)):
        held = list((cache.root / "locks").iterdir())
        written, left_over = cache.root / "tmp" / ("a" * 24), cache.root / "tmp" / ("b" * 24)
        for path in (written, left_over):
            path.write_bytes(b"")
        os.utime(left_over, (0, 0))
        assert cache.clear() == (1, 0, "")
        assert list((cache.root / "locks").iterdir()) == held != []
        assert list((cache.root / "tmp").iterdir()) == [written]


def test_clear_leaves_nothing_but_locks(cache):
    for n in range(3):
        cache.get_or_build(key_of(n), lambda: b"x")
    assert cache.clear() == (3, 0, "")
    left = {path for path in cache.root.rglob("*") if path.is_file()} - {cache.root / ".flashgen-cache"}
    assert {path.parent.name for path in left} == {"locks"}
    assert cache.info().bytes == 0


KILLED = """
import sys, hashlib
from pathlib import Path
from flashgen.toolchain.cache import CubinCache
cache = CubinCache(Path(sys.argv[1]), max_bytes=1_000_000)
n = first = int(sys.argv[2])
while True:
    key = hashlib.sha256(str(n % 50).encode()).hexdigest()
    cache.put(key, hashlib.shake_256(key.encode()).digest(40_000))
    if n == first:
        print("ready", flush=True)
    n += 1
"""


def test_kills_at_any_moment_leave_no_wrong_entry_and_touch_no_other_file(cache, foreign):
    for group in range(8):
        # Writers, which evict as well, side by side; each is killed a little later than the one before.
        processes = [python(KILLED, cache.root, n * 7) for n in range(group * 8, group * 8 + 8)]
        for process in processes:
            process.stdout.readline()
        for process in processes:
            time.sleep(0.001 + 0.0007 * group)
            process.send_signal(signal.SIGKILL)
            process.communicate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [key_of(n) for n in range(50) if cache.get(key_of(n)) is not None]
        assert found
        assert all(cache.get(key) == payload_of(key) for key in found)
    report = cache.verify()
    assert (report.damaged, report.unreadable) == ((), ())


def test_what_killed_writers_left_goes_when_it_is_old(cache):
    cache.put(key_of(1), b"x")
    old, fresh = cache.root / "tmp" / ("a" * 24), cache.root / "tmp" / ("b" * 24)
    old.write_bytes(b"half")
    fresh.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    CubinCache(cache.root).put(key_of(2), b"y")
    assert not old.exists()
    assert fresh.exists()


HOLDER = """
import sys, time
from pathlib import Path
from flashgen.toolchain.cache import CubinCache
def build():
    print("building", flush=True)
    time.sleep(60)
CubinCache(Path(sys.argv[1])).get_or_build(sys.argv[2], build)
"""


def test_a_builder_killed_while_others_wait_is_replaced(cache):
    process = python(HOLDER, cache.root, key_of(1))
    assert process.stdout.readline() == "building\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache.get_or_build, key_of(1), lambda: b"mine")
        time.sleep(0.1)
        assert not waiting.done()
        process.kill()
        process.communicate()
        assert waiting.result(timeout=120) == b"mine"


BUILDER = """
import os, sys, time
from pathlib import Path
from flashgen.toolchain.cache import CubinCache
def build():
    with open(sys.argv[3], "a") as log:
        log.write("built\\n")
    time.sleep(0.3)
    return b"payload"
sys.stdout.write(CubinCache(Path(sys.argv[1])).get_or_build(sys.argv[2], build).decode())
"""


def test_processes_that_ask_at_once_build_once(cache, tmp_path):
    log = tmp_path / "log"
    processes = [python(BUILDER, cache.root, key_of(1), log) for _ in range(4)]
    assert [process.communicate()[0] for process in processes] == ["payload"] * 4
    assert log.read_text() == "built\n"


@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.filterwarnings("ignore::flashgen.errors.CacheWarning")
def test_threads_that_ask_at_once_build_once(tmp_path, usable):
    if not usable:
        (tmp_path / "cache").write_text("a file where the folder should be")
    cache = CubinCache(tmp_path / "cache")
    built = []
    barrier = threading.Barrier(24)

    def ask(n: int) -> bytes:
        key = key_of(n % 3)

        def build() -> bytes:
            built.append(key)
            time.sleep(0.02)
            return payload_of(key)

        barrier.wait()
        return cache.get_or_build(key, build)

    with ThreadPoolExecutor(24) as pool:
        results = list(pool.map(ask, range(24)))
    assert results == [payload_of(key_of(n % 3)) for n in range(24)]
    assert sorted(built) == sorted({key_of(n) for n in range(3)})


def test_a_failed_build_passes_through_and_can_be_repeated(cache):
    def fail() -> bytes:
        raise KeyError("no")

    with pytest.raises(KeyError):
        cache.get_or_build(key_of(1), fail)
    assert cache.get_or_build(key_of(1), lambda: b"yes") == b"yes"


def test_eviction_under_many_threads_never_gives_a_wrong_payload(tmp_path):
    cache = CubinCache(tmp_path, max_bytes=100_000)

    def ask(n: int) -> bool:
        key = key_of(n % 20)
        return cache.get_or_build(key, lambda: payload_of(key, 10_000)) == payload_of(key, 10_000)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(400)))
    assert cache.info().bytes <= 100_000


def test_the_least_recently_read_go_first(tmp_path):
    cache = CubinCache(tmp_path, max_bytes=50_000)
    for n in range(4):
        cache.put(key_of(n), payload_of(key_of(n), 10_000))
        os.utime(entry(cache, key_of(n)), (time.time() - 20_000 + n,) * 2)
    cache.get(key_of(0))
    cache.put(key_of(4), payload_of(key_of(4), 10_000))
    assert [n for n in range(5) if cache.get(key_of(n))] == [0, 2, 3, 4]
    assert cache.info().bytes <= 50_000


def test_an_entry_larger_than_the_bound_is_still_kept_for_now(tmp_path):
    cache = CubinCache(tmp_path, max_bytes=1000)
    cache.put(key_of(1), payload_of(key_of(1)))
    assert cache.get(key_of(1)) == payload_of(key_of(1))


def test_reading_touches_at_most_once_an_hour(cache):
    cache.put(key_of(1), b"x")
    path = entry(cache, key_of(1))
    half_an_hour_ago = time.time() - 1800
    os.utime(path, (half_an_hour_ago,) * 2)
    cache.get(key_of(1))
    assert path.stat().st_mtime == pytest.approx(half_an_hour_ago, abs=1)
    os.utime(path, (time.time() - 4000,) * 2)
    cache.get(key_of(1))
    assert path.stat().st_mtime == pytest.approx(time.time(), abs=10)


def test_a_full_disk_warns_once_and_goes_on_in_memory(cache, monkeypatch):
    write = private.write

    def full(name: str, data: bytes, folder: int) -> None:
        write(name, data[:1], folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    cache.put(key_of(9), b"")
    cache.clear()
    monkeypatch.setattr(private, "write", full)
    with pytest.warns(CacheWarning, match="No space left on device") as caught:
        results = [cache.get_or_build(key_of(n), lambda n=n: payload_of(key_of(n))) for n in range(3)]
    assert results == [payload_of(key_of(n)) for n in range(3)]
    assert len(caught) == 1
    assert cache.get(key_of(2)) == payload_of(key_of(2))
    assert list((cache.root / "tmp").iterdir()) == []
    assert cache.info().entries == 0
    assert cache.info().problem == "No space left on device"


def test_a_read_only_folder_is_read_without_a_word(cache, monkeypatch):
    cache.put(key_of(1), b"x")
    os.utime(entry(cache, key_of(1)), (0, 0))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "unlink", "rename", "utime"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(private, "write", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_build(key_of(1), lambda: b"never") == b"x"
    with pytest.warns(CacheWarning, match=r"Read-only file system.*FLASHGEN_CACHE_DIR") as caught:
        results = [cache.get_or_build(key_of(n), lambda: b"y") for n in (2, 3)]
    assert results == [b"y", b"y"]
    assert len(caught) == 1
    assert cache.get(key_of(2)) == b"y"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_permission(cache):
    cache.put(key_of(1), b"x")
    entry(cache, key_of(1)).chmod(0)
    with pytest.warns(CacheWarning, match="cannot read"):
        assert cache.get(key_of(1)) is None


def test_info_of_a_good_folder(cache):
    cache.put(key_of(1), b"x" * 1000)
    info = cache.info()
    assert (info.root, info.entries, info.problem) == (cache.root, 1, "")
    assert 1000 < info.bytes < 1200
    assert list((cache.root / "tmp").iterdir()) == []


def test_place_by_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "there"))
    assert CubinCache().root == tmp_path / "there"
    assert fcache.default().root == tmp_path / "there"
    assert fcache.default() is fcache.default()


def test_a_hit_does_not_import_filelock(cache):
    cache.put(key_of(1), b"x")
    script = """
import sys
from flashgen.toolchain.cache import CubinCache
assert CubinCache().get_or_build(sys.argv[1], None) == b"x"
print({"filelock", "cupy", "numpy"} & set(sys.modules))
"""
    env = {"FLASHGEN_CACHE_DIR": str(cache.root), "PYTHONPATH": str(Path(fcache.__file__).parents[2])}
    command = [sys.executable, "-c", script, key_of(1)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | env)
    assert run.stdout == "set()\n"


def test_a_hit_is_quick(cache):
    cache.put(key_of(1), payload_of(key_of(1), 100_000))

    def seconds() -> float:
        start = time.thread_time()
        cache.get(key_of(1))
        return time.thread_time() - start

    assert statistics.median(seconds() for _ in range(30)) < 0.002


def test_every_part_of_a_key_counts():
    parts = [
        ("d", "sm_90", ("-a", "-b"), "nvrtc 13.0"),
        ("e", "sm_90", ("-a", "-b"), "nvrtc 13.0"),
        ("d", "sm_80", ("-a", "-b"), "nvrtc 13.0"),
        ("d", "sm_90", ("-a -b",), "nvrtc 13.0"),
        ("d", "sm_90", ("-a", "-b"), "nvrtc 13.1"),
    ]
    assert len({key_for(*part) for part in parts}) == len(parts)
    assert key_for("d", "sm_90", ["-a"], "v") == key_for("d", "sm_90", ("-a",), "v")


def test_clear_takes_what_is_wanted_and_what_is_old(cache):
    for n in range(4):
        cache.put(key_of(n), b"even" if n % 2 == 0 else b"odd")
    for n in (0, 1):
        os.utime(entry(cache, key_of(n)), (0, 0))
    assert cache.clear(lambda payload: payload == b"even", unused_for=3600) == (1, 0, "")
    assert [cache.get(key_of(n)) for n in range(4)] == [None, b"odd", b"even", b"odd"]
    assert cache.clear(lambda payload: payload == b"odd") == (2, 0, "")
    assert cache.get(key_of(2)) == b"even"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", 1 << 30),
        ("500MB", 500 << 20),
        ("4g", 4 << 30),
        ("1.5 GB", 3 << 29),
        ("123456", 123456),
        ("8k", 8192),
    ],
)
def test_the_size_of_the_cache_can_be_chosen(text, size, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHGEN_CACHE_SIZE", text)
    assert fcache.default().max_bytes == CubinCache().max_bytes == size


@pytest.mark.parametrize("text", ["much", "0", "-1", "4 apples", "1e9"])
def test_a_size_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_SIZE", text)
    with pytest.raises(BadParam, match=r"FLASHGEN_CACHE_SIZE is .*; expected a size such as"):
        fcache.default()
