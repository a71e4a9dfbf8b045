"""Who may have written what the cache and the bundles hold: other users' files are not used, unless the user
says so.
"""

import codecs
import os
import shutil
import stat
import tempfile
import threading
import warnings
import zipfile
from pathlib import Path

import filelock  # noqa: F401 - imported ahead of a change of the user, who may not read this installation
import pytest

from flashgen.errors import BadParam, CacheWarning
from flashgen.simulator import library
from flashgen.toolchain import bundle, private
from flashgen.toolchain.cache import CubinCache, key_for
from flashgen.toolchain.cacheentry import pack
from second_user import ANOTHER, OTHER, as_user, needs_root

codecs.lookup("cp437")  # zipfile needs this codec, and another user may not read this installation
KEY = key_for("source", "sm_90", (), "nvrtc 13.0")
SECOND = key_for("another source", "sm_90", (), "nvrtc 13.0")


@pytest.fixture
def common():
    """A folder that every user can enter; those of pytest are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="flashgen-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def path_in(root, key=KEY):
    return root / "entries" / key[:2] / key


def tree(root):
    return [root, *root.rglob("*")]


def filled(root):
    cache = CubinCache(root)
    cache.put(KEY, b"machine code")
    return cache.root


# What others can have done with a cache, by the part of it that is theirs or open to them.


def folder_of_another(root):
    for path in tree(root):
        os.chown(path, ANOTHER, ANOTHER)


def folder_open_to_the_group(root):
    root.chmod(0o770)


def folder_open_to_all(root):
    root.chmod(0o1777)


def entry_of_another(root):
    os.chown(path_in(root), ANOTHER, ANOTHER)


def entry_open_to_the_group(root):
    path_in(root).chmod(0o660)


def entry_of_another_behind_a_link(root):
    entry_of_another(root)
    shelf = path_in(root).parent
    shelf.rename(root / "elsewhere")
    shelf.symlink_to(root / "elsewhere")


OPEN = [folder_open_to_the_group, folder_open_to_all, entry_open_to_the_group]
THEIRS = [folder_of_another, entry_of_another]
BEHIND = [entry_of_another_behind_a_link]
planted = [*OPEN, *(pytest.param(plant, marks=needs_root) for plant in THEIRS)]


@pytest.mark.parametrize("plant", [*planted, *(pytest.param(plant, marks=needs_root) for plant in BEHIND)])
@pytest.mark.filterwarnings("ignore::flashgen.errors.CacheWarning")
def test_what_others_can_have_written_is_not_used(tmp_path, plant):
    root = filled(tmp_path / "cache")
    plant(root)
    cache = CubinCache(root)
    assert cache.get(KEY) is None
    assert not cache.keeps(KEY)
    assert cache.verify().intact == 0
    assert cache.get_or_build(KEY, lambda: b"built here") == b"built here"
    assert cache.get(KEY) == b"built here"


def test_a_folder_that_others_may_write_is_refused_with_a_sentence(tmp_path, monkeypatch):
    root = filled(tmp_path / "cache")
    root.chmod(0o770)
    cache = CubinCache(root)
    before = {path: path.lstat().st_mtime_ns for path in tree(root)}
    with pytest.warns(CacheWarning, match=r"group may write to it \(mode 770\).*FLASHGEN_TRUST") as said:
        assert (cache.get(KEY), cache.put(SECOND, b"kept in memory")) == (None, None)
    assert len(said) == 1
    assert cache.get(SECOND) == b"kept in memory"
    info = cache.info()
    assert info.entries == 0
    assert "its group may write to it" in info.problem
    assert "its group may write to it" in cache.clear().problem
    ((path, _),) = cache.verify().unreadable
    assert path == root / "entries"
    assert {path: path.lstat().st_mtime_ns for path in tree(root)} == before


@pytest.mark.parametrize("named", ["the folder", "the folder around it"])
@pytest.mark.parametrize("plant", planted)
def test_it_is_used_with_a_warning_where_the_user_says_so(tmp_path, monkeypatch, plant, named):
    root = filled(tmp_path / "cache")
    plant(root)
    trusted = root if named == "the folder" else root.parent
    monkeypatch.setenv("FLASHGEN_TRUST", os.pathsep.join(("/elsewhere", str(trusted))))
    cache = CubinCache(root)
    with pytest.warns(CacheWarning, match=r"is used, as FLASHGEN_TRUST says: ") as caught:
        assert [cache.get(KEY), cache.get(KEY)] == [b"machine code"] * 2
    assert len(caught) == 1
    assert cache.verify().intact == 1


def test_trust_is_of_what_it_names_alone(tmp_path, monkeypatch):
    root = filled(tmp_path / "cache")
    root.chmod(0o770)
    monkeypatch.setenv("FLASHGEN_TRUST", f"{root}2{os.pathsep}{root / 'entries' / 'no'}")
    with pytest.warns(CacheWarning, match="is not used"):
        assert CubinCache(root).get(KEY) is None


def test_an_empty_folder_that_others_may_write_gets_one_that_they_cannot(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    root = filled(tmp_path)
    assert root == tmp_path / "flashgen-cache"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert CubinCache(tmp_path).get(KEY) == b"machine code"


def test_one_that_the_user_trusts_is_taken_as_it_is(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("FLASHGEN_TRUST", str(tmp_path))
    with pytest.warns(CacheWarning, match="FLASHGEN_TRUST says"):
        assert filled(tmp_path) == tmp_path


@needs_root
def test_a_read_only_cache_of_root_serves_every_user(common):
    root = filled(common / "cache")
    for path in tree(root):
        path.chmod(0o755 if path.is_dir() else 0o644)

    def act():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            cache = CubinCache(root)
            found = [cache.get(KEY).decode(), cache.keeps(KEY), cache.info().entries, cache.verify().intact]
            cleared = cache.clear()
        return [*found, cleared.removed, cleared.problem, [str(each.message) for each in said]]

    assert as_user(OTHER, act) == ["machine code", True, 1, 1, 0, "Permission denied", []]


@needs_root
def test_a_user_takes_no_code_from_another(common):
    """The attack: a folder that both may enter, and one of them fills it before the other comes."""
    common.chmod(0o1777)
    root = common / "cache"

    def plant():
        filled(root)
        for path in tree(root):
            path.chmod(0o777 if path.is_dir() else 0o666)

    def call():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            built = CubinCache(root).get_or_build(KEY, lambda: b"built here").decode()
        return built, [str(each.message) for each in said]

    as_user(ANOTHER, plant)
    built, said = as_user(OTHER, call)
    assert built == "built here"
    assert f"it belongs to user {ANOTHER}, and this is user {OTHER}" in said[0]
    # Nor does the other get to read what this one makes.
    own = common / "own"
    own.mkdir()
    os.chown(own, OTHER, OTHER)
    own.chmod(0o755)
    as_user(OTHER, lambda: CubinCache(own / "cache").put(KEY, b"secret"))
    with pytest.raises(AssertionError, match="PermissionError"):
        as_user(ANOTHER, lambda: path_in(own / "cache").read_bytes().decode())


@needs_root
@pytest.mark.filterwarnings("ignore::flashgen.errors.CacheWarning")
def test_files_of_another_user_in_a_shared_folder_stay(common):
    common.chmod(0o1777)

    def write():
        for part in ("tmp", "entries/ab", "locks"):
            (common / part).mkdir(parents=True, exist_ok=True)
        for name in (f"tmp/{'0' * 24}", f"entries/ab/{'ab' * 32}", "thesis.tex"):
            (common / name).write_text("irreplaceable")
            os.utime(common / name, (0, 0))

    as_user(ANOTHER, write)
    before = [path for path in tree(common) if path.is_file()]
    cache = CubinCache(common, max_bytes=1)  # root, who could remove them
    assert cache.root == common / "flashgen-cache"
    cache.put(KEY, b"x")
    cache.put(SECOND, b"x")
    cache.verify()
    cache.clear()
    for path in before:
        assert path.read_text() == "irreplaceable"


# Links


def ways(folder):
    """Paths with links of all kinds, and the files that they lead to."""
    real = folder / "real" / "inner"
    real.mkdir(parents=True)
    (real / "file").write_bytes(b"content")
    (folder / "absolute").symlink_to(real)
    (folder / "relative").symlink_to("real/inner")
    (folder / "upwards").symlink_to("real/../relative/../inner/./")
    (folder / "chain").symlink_to(folder / "upwards")
    (real / "up").symlink_to("../../chain/file")
    return [
        real / "file",
        *(folder / name / "file" for name in ("absolute", "relative", "upwards", "chain")),
        folder / "chain" / "up",
        folder / "real" / ".." / "chain" / ".." / "inner" / "up",
    ]


def test_a_way_leads_where_the_system_goes(tmp_path, monkeypatch):
    paths = ways(tmp_path)
    monkeypatch.chdir(tmp_path)
    for path in (*paths, *(path.relative_to(tmp_path) for path in paths), *(path.parent for path in paths)):
        with private.reached(path) as way:
            status = os.stat(way.name, dir_fd=way.folder, follow_symlinks=False)
            assert (status.st_ino, way.distrust) == (path.stat().st_ino, "")


@needs_root
def test_a_link_of_another_user_on_the_way_is_seen_wherever_it_is(common):
    folder = common / "ways"
    links = [folder / name for name in ("absolute", "relative", "upwards", "chain")]
    for path in ways(folder):
        before = len(list(OPENED.iterdir()))
        for link in (*links, folder / "real" / "inner" / "up"):
            os.chown(link, ANOTHER, ANOTHER, follow_symlinks=False)
            with private.reached(path) as way:
                seen = way.distrust
            assert bool(seen) == goes_through(path, link), (path, link)
            assert not seen or f"{link.name}, on the way to it, is a link of user {ANOTHER}" in seen
            os.chown(link, 0, 0, follow_symlinks=False)
        assert len(list(OPENED.iterdir())) == before


def goes_through(path, link):
    """Whether the system needs ``link`` to get to ``path``."""
    target = link.readlink()
    link.unlink()
    try:
        return not path.exists()
    finally:
        link.symlink_to(target)


@pytest.fixture
def shared(common):
    """A folder to which two users may write, and the home of one of them, with a clone of the other's
    repository.
    """
    home, project = common / "home", common / "project"
    for folder in (home, project):
        folder.mkdir()
    os.chown(home, OTHER, OTHER)
    project.chmod(0o777)

    def clone():
        CubinCache(home / "clone").put(KEY, b"planted")
        bundle.write(home / "clone.zip", "nvrtc 13.0", {KEY: b"planted"}, [bundle.Held("v", "sm_90", KEY)])

    as_user(OTHER, clone)
    yield home, project
    shutil.rmtree(project)


def got(path):
    """What is under KEY in a cache or a bundle of that path, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if path.suffix == ".zip":
            content = bundle.active(str(path))[0].get(KEY)
        else:
            content = CubinCache(path).get_or_build(KEY, lambda: b"built here")
    return content.decode(), "".join(str(warning.message) for warning in caught)


@needs_root
@pytest.mark.parametrize("link", ["cache", "around"])
def test_no_link_of_another_user_leads_to_a_cache(shared, link, monkeypatch):
    """The folder is a user's, the files are the same user's, and another has written what is in them."""
    home, project = shared
    named, target = project / "cache", home / "clone"
    if link == "around":  # a folder around the cache
        (home / "around").mkdir()
        (home / "clone").rename(home / "around" / "cache")
        named, target = project / "around" / "cache", home / "around"
    as_user(ANOTHER, lambda: (project / link).symlink_to(target))
    content, warned = as_user(OTHER, lambda: got(named))
    assert content == "built here"
    assert f"{link}, on the way to it, is a link of user {ANOTHER}, and this is user {OTHER}" in warned
    monkeypatch.setenv("FLASHGEN_TRUST", str(named))
    content, warned = as_user(OTHER, lambda: got(named))
    assert content == "planted"
    assert "is used, as FLASHGEN_TRUST says" in warned


@needs_root
def test_a_link_that_comes_between_two_reads_is_seen_as_well(shared):
    home, project = shared
    as_user(OTHER, lambda: CubinCache(project / "cache").put(SECOND, b"own"))
    (read_first, first_is_read), (read_swapped, is_swapped) = os.pipe(), os.pipe()

    def act():
        cache = CubinCache(project / "cache")
        own = cache.get(SECOND).decode()
        os.write(first_is_read, b"x")
        os.read(read_swapped, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cache.put(SECOND, b"in memory")
            later = cache.get(KEY), cache.info().entries, cache.clear().removed
        return own, later, str(caught[0].message)

    def swap():
        (project / "cache").rename(project / "before")
        (project / "cache").symlink_to(home / "clone")

    def swap_after_first():
        os.read(read_first, 1)
        as_user(ANOTHER, swap)
        os.write(is_swapped, b"x")

    thread = threading.Thread(target=swap_after_first)
    thread.start()
    own, later, warned = as_user(OTHER, act)
    thread.join()
    for handle in (read_first, first_is_read, read_swapped, is_swapped):
        os.close(handle)
    assert (own, later) == ("own", [None, 0, 0])
    assert "is a link of user" in warned


@needs_root
def test_no_link_of_another_user_leads_to_a_bundle(shared, monkeypatch):
    home, project = shared
    as_user(ANOTHER, lambda: (project / "kernels.zip").symlink_to(home / "clone.zip"))
    with pytest.raises(AssertionError, match=rf"kernels\.zip, on the way to it, is a link of user {ANOTHER}"):
        as_user(OTHER, lambda: got(project / "kernels.zip"))
    as_user(OTHER, lambda: (project / "own.zip").symlink_to(home / "clone.zip"))
    assert as_user(OTHER, lambda: got(project / "own.zip")) == ["planted", ""]
    monkeypatch.setenv("FLASHGEN_TRUST", str(project / "kernels.zip"))
    content, warned = as_user(OTHER, lambda: got(project / "kernels.zip"))
    assert content == "planted"
    assert "is used, as FLASHGEN_TRUST says" in warned


@needs_root
@pytest.mark.parametrize("part", ["entries", f"entries/{KEY[:2]}"])
def test_a_part_of_a_cache_that_others_may_write_is_not_used(common, part):
    """They could move files of this user into it."""
    root = filled(common / "cache")
    (root / part).chmod(0o777)
    with pytest.warns(CacheWarning, match=r"every user may write to it \(mode 777\)"):
        assert CubinCache(root).get(KEY) is None


# Bundles


@pytest.fixture
def made(tmp_path):
    path = tmp_path / "kernels.zip"
    bundle.write(path, "nvrtc 13.0", {KEY: b"machine code"}, [bundle.Held("kernel", "sm_90", KEY)])
    return path


def test_a_bundle_is_readable_by_all_and_writable_by_its_owner(made):
    assert stat.S_IMODE(made.stat().st_mode) == 0o644
    assert bundle.active(str(made))[0].get(KEY) == b"machine code"


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_bundle_that_others_may_write_is_refused(made, mode, monkeypatch):
    made.chmod(mode)
    with pytest.raises(BadParam, match=rf"kernels\.zip is not used: .* \(mode {mode:o}\).*FLASHGEN_TRUST"):
        bundle.active(str(made))
    monkeypatch.setenv("FLASHGEN_TRUST", str(made))
    with pytest.warns(CacheWarning, match=r"kernels\.zip is used, as FLASHGEN_TRUST says"):
        assert bundle.active(str(made))[0].get(KEY) == b"machine code"


@needs_root
def test_a_bundle_of_another_user_is_refused_and_one_of_root_is_not(common):
    path = common / "kernels.zip"
    bundle.write(path, "nvrtc 13.0", {KEY: b"machine code"}, [bundle.Held("kernel", "sm_90", KEY)])
    assert as_user(OTHER, lambda: bundle.active(str(path))[0].get(KEY).decode()) == "machine code"
    os.chown(path, ANOTHER, ANOTHER)
    with pytest.raises(AssertionError, match=f"it belongs to user {ANOTHER}, and this is user {OTHER}"):
        as_user(OTHER, lambda: bundle.active(str(path)))


def test_a_bundle_serves_what_its_manifest_lists_and_no_more(made):
    with zipfile.ZipFile(made, "a") as file:
        file.writestr(f"entries/{SECOND}", pack(SECOND, b"planted"))
    opened = bundle.Bundle(made)
    assert opened.get(KEY) == b"machine code"
    assert opened.get(SECOND) is None


MADE = b"\x7fELF made here"
SOURCE = 'extern "C" __global__ void kernel(const Params params) {}'


@pytest.mark.parametrize("part", ["the kernel", "the engine"])
def test_the_simulator_takes_no_code_from_a_bundle(tmp_path, monkeypatch, part):
    made_here = []

    def build(compiler, options, inputs, output, name):
        made_here.append(name)
        output.write_bytes(MADE)

    compiler = library.hostcompiler.HostCompiler(("c++",), "1")
    monkeypatch.setattr(library.hostcompiler, "find", lambda: compiler)
    monkeypatch.setattr(library.hostcompiler, "build", build)
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(library, "Library", lambda path, name, digest: path.read_bytes())
    looked_for = []
    get = CubinCache.get

    def spied(self, key, *rest, **named):
        looked_for.append(key)
        return get(self, key, *rest, **named)

    monkeypatch.setattr(CubinCache, "get", spied)
    first = CubinCache(tmp_path / "first")
    assert library.load(SOURCE, "kernel", first) == MADE
    kernel, engine = looked_for[0], looked_for[-1]
    assert kernel != engine
    monkeypatch.setattr(library, "_loaded", {})
    planted = tmp_path / "planted.zip"
    key = kernel if part == "the kernel" else engine
    bundle.write(planted, "nvrtc 13.0", {key: b"planted"}, [bundle.Held("kernel", "sm_90", key)])
    del made_here[:]
    cache = CubinCache(tmp_path / "second", bundles=bundle.active(str(planted)))
    assert library.load(SOURCE, "kernel", cache) == MADE
    assert "kernel" in made_here
    assert "the simulator's engine" in made_here
    assert get(cache, key) == MADE
    assert get(CubinCache(tmp_path / "third", bundles=cache.bundles), key) == b"planted"


OPENED = Path("/proc/self/fd")


@pytest.mark.skipif(not OPENED.is_dir(), reason="this machine does not list the descriptors of a process")
def test_descriptors_are_closed_whatever_happens(tmp_path):
    before = len(list(OPENED.iterdir()))
    root = filled(tmp_path / "cache")
    (root / "entries" / KEY[:2]).rename(root / "gone")
    (root / "entries" / KEY[:2]).write_text("")
    cache = CubinCache(root)
    with pytest.warns(CacheWarning, match="cannot write"):
        cache.put(KEY, b"x")
    cache.clear()
    cache.verify()
    with private.opened(root.parent) as folder, pytest.raises(OSError, match="Is a directory"):
        private.read(root.name, 1000, folder)
    (tmp_path / "circle").symlink_to("circle")
    for path in (root / "none", root / "none" / "more", tmp_path / "circle", root / ".flashgen-cache" / "x"):
        with (
            pytest.raises(OSError, match=r"No such file|Too many levels|Not a directory"),
            private.reached(path),
        ):
            pass
    with private.reached(root):
        pass
    assert len(list(OPENED.iterdir())) == before
