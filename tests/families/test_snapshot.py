import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from flashgen.errors import CacheWarning, SpecError
from flashgen.families import snapshot
from flashgen.families.bases import NO_FAMILIES, whole_text
from flashgen.families.load import load_spec, load_specs
from flashgen.host.paths import specs_dir
from flashgen.toolchain.cache import CubinCache

SHIPPED = [path for path in specs_dir().glob("*.yaml") if path.name not in NO_FAMILIES]


@pytest.fixture
def cache(tmp_path):
    return CubinCache(tmp_path / "cache")


@pytest.fixture
def tiny(tiny_folder):
    return tiny_folder / "specs" / "tiny.yaml"


def entry(cache, path):
    key = snapshot.snapshot_key(whole_text(path, path.read_bytes()))
    return cache.root / "entries" / key[:2] / key


def unchecked(*_):
    raise AssertionError("checked again")


@pytest.mark.drawn
@pytest.mark.parametrize("path", [*SHIPPED, None], ids=lambda p: p.stem if p else "tiny")
def test_a_hit_is_the_spec_that_was_checked(path, tiny, cache, monkeypatch):
    path = path or tiny
    checked = load_spec(path)
    assert load_spec(path, cache).content == checked.content
    monkeypatch.setattr("flashgen.families.check.check", unchecked)
    known = load_spec(path, cache)
    assert known.content == checked.content
    variants = known.variants()
    assert variants == checked.variants()
    # Not only equal: what is rendered, and hashed for the cache of kernels, is their repr.
    assert list(map(repr, variants)) == list(map(repr, checked.variants()))


def test_a_hit_needs_neither_parser_nor_validator(cache):
    load_specs(cache=cache)
    program = """
import sys
from pathlib import Path
from flashgen.toolchain.cache import CubinCache
from flashgen.families.load import load_specs
print(len([v for spec in load_specs(cache=CubinCache(Path(sys.argv[1]))) for v in spec.variants()]))
print({"yaml", "filelock", "flashgen.families.check"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, cache.root],
        env={**os.environ, "PYTHONPATH": str(Path(snapshot.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(sum(len(spec.variants()) for spec in load_specs())), "set()"]


def test_a_call_reads_the_entries_of_the_specs_that_it_looks_at(cache):
    load_specs(cache=cache)
    specs = load_specs(cache=cache)
    asked = next(spec for spec in specs if spec.name == "merge_sm80")
    assert asked.select(dtype="fp16") == load_spec(asked.path).select(dtype="fp16") != ()
    assert [spec for spec in specs if "_parsed" in vars(spec.content.entries)] == [asked]


def test_an_edit_is_seen_at_once(tiny, cache, edit_spec):
    before = load_spec(tiny, cache).content
    status = tiny.stat()
    edit_spec("efficiency: 0.75", "efficiency: 0.85")
    os.utime(tiny, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert tiny.stat().st_size == status.st_size
    after = load_spec(tiny, cache).content
    assert tuple(c.rows[-1].dispatch["efficiency"] for c in (before, after)) == (0.75, 0.85)
    edit_spec("efficiency: 0.85", "efficiency: 0.75")
    assert load_spec(tiny, cache).content == before


def test_equal_files_of_other_names_have_families_of_their_own(cache, tmp_path):
    paths = [tmp_path / "aaa.yaml", tmp_path / "bbb.yaml"]
    for path in paths:
        path.write_text("extends: merge_sm80\n")
    assert [load_spec(path, cache).family for path in paths] == ["aaa", "bbb"]
    assert [load_spec(path, cache).family for path in paths] == ["aaa", "bbb"]


def test_changed_code_checks_again(tiny, cache, monkeypatch):
    load_spec(tiny, cache)
    monkeypatch.setattr(snapshot, "code_digest", lambda *modules: b"new code")
    monkeypatch.setattr("flashgen.families.check.check", unchecked)
    with pytest.raises(AssertionError, match="checked again"):
        load_spec(tiny, cache)


def test_the_check_imports_nothing_but_the_rooms_that_count():
    program = (
        "import sys, flashgen.families.check; print(*(m for m in sys.modules if m.startswith('flashgen.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(snapshot.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    rooms = {name.split(".")[1] for name in done.stdout.split() if name.count(".") > 1}
    assert rooms <= {*snapshot._ROOMS, "host"}


@pytest.mark.parametrize("position", [0, 20, 60, 200, -1])
def test_a_damaged_snapshot_is_made_again(tiny, cache, position):
    checked = load_spec(tiny, cache).content
    path = entry(cache, tiny)
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[position] ^= 1
    path.write_bytes(damaged)
    with pytest.warns(CacheWarning, match="is damaged"):
        assert load_spec(tiny, cache).content == checked
    assert path.read_bytes() == sound


class Planted:
    def __reduce__(self):
        return os.mkdir, ("planted",)


@pytest.mark.parametrize(
    "payload",
    [b"", b"garbage", pickle.dumps({"axes": {}}), pickle.dumps(Planted()), pickle.dumps([1, 2])[:-3]],
    ids=["empty", "garbage", "mapping", "code", "cut"],
)
def test_what_is_no_snapshot_is_neither_run_nor_used(tiny, cache, payload, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cache.put(snapshot.snapshot_key(whole_text(tiny, tiny.read_bytes())), payload)
    checked = load_spec(tiny).content
    with pytest.warns(CacheWarning, match="is not a snapshot"):
        assert load_spec(tiny, cache).content == checked
    assert not Path("planted").exists()
    monkeypatch.setattr("flashgen.families.check.check", unchecked)
    assert load_spec(tiny, cache).content == checked


ENTRIES = {
    "nothing": b"",
    "no JSON": b"garbage",
    "deep": b"[" * 100_000,
    "numbers": b"[1, 2]",
    "one list": b"[[]]",
    "no points": b"[[], [3]]",
    "no tiles": b'[[], [[["POINT"], 3]]]',
    "no resources": b'[[], [[["POINT"], [[0, false, 7]]]]]',
    "other resources": b'[[[[1, 2]]], [[["POINT"], [[0, false, 0]]]]]',
    "no row": b'[[[]], [[["POINT"], [[999, false, 0]]]]]',
}


@pytest.mark.parametrize("entries", ENTRIES)
def test_entries_that_are_none_are_replaced(tiny, cache, entries):
    """They are read when a call looks at them, later than the rest."""
    key = snapshot.snapshot_key(whole_text(tiny, tiny.read_bytes()))
    checked = load_spec(tiny, cache).content
    first = cache.get(key).partition(b"\n")[0]
    point = next(iter(checked.entries))
    stored = ENTRIES[entries].replace(b'["POINT"]', json.dumps(point).encode())
    cache.put(key, first + b"\n" + stored)
    with pytest.warns(CacheWarning, match="is not a snapshot"):
        assert load_spec(tiny, cache).content.entries[point] == checked.entries[point]
    assert load_spec(tiny, cache).content == checked
    cache.put(key, b"[" * 100_000 + b"\n" + stored)
    with pytest.warns(CacheWarning, match="is not a snapshot"):
        assert load_spec(tiny, cache).content == checked


def test_a_folder_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "file").write_text("where the folder should be")
    cache = CubinCache(tmp_path / "file")
    with pytest.warns(CacheWarning, match="cannot write") as caught:
        contents = [load_spec(tiny, cache).content for _ in range(3)]
    assert contents == [load_spec(tiny).content] * 3
    assert len(caught) == 1


def test_a_wrong_spec_leaves_no_snapshot(tiny, cache, edit_spec):
    edit_spec("family: tiny_fwd", "family: 7")
    for _ in range(2):
        with pytest.raises(SpecError, match=re.escape(f"{tiny}:") + r"\d+: family: "):
            load_spec(tiny, cache)
    assert cache.info().entries == 0


def test_an_error_about_known_specs_still_names_the_line(tiny, cache):
    tiny.with_name("twin.yaml").write_text(tiny.read_text())
    for _ in range(2):
        with pytest.raises(SpecError, match=r"twin\.yaml:2: family: .*tiny\.yaml has a family `tiny_fwd`"):
            load_specs(tiny.parent, cache)


def test_one_text_in_two_files_gives_each_its_own_name(tiny, cache, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_bytes(tiny.read_bytes())
    load_spec(tiny, cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec = load_spec(other, cache)
    assert {(v.spec, v.spec_dir) for v in spec.variants()} == {("other", str(tmp_path))}
