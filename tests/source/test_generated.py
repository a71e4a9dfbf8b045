import os
import stat

import pytest

from flashgen.errors import SpecError
from flashgen.source import generated as generate
from flashgen.source.generated import diff_generated, generated_files, write_generated


@pytest.fixture(scope="module")
def files(tiny_variants):
    return generated_files([v for v in tiny_variants if v.committed][:4])


def test_files_are_named_for_their_variants(files, tiny_variants):
    names = {v.filename for v in tiny_variants}
    assert set(files) <= names
    assert all(text.startswith(f"// {name.removesuffix('.cu')}\n") for name, text in files.items())


def test_equal_names_are_refused(tiny_variants):
    with pytest.raises(SpecError, match=tiny_variants[0].name):
        generated_files([tiny_variants[0]] * 2)


def test_written_files_are_what_was_rendered(files, tmp_path):
    folder = tmp_path / "new" / "generated"
    assert [d.kind for d in diff_generated(files, folder)] == ["missing"] * len(files)
    assert set(write_generated(files, folder).changed) == set(files)
    assert diff_generated(files, folder) == []
    assert {path.name: path.read_bytes().decode() for path in folder.iterdir()} == files
    assert stat.S_IMODE((folder / next(iter(files))).stat().st_mode) == 0o644


def test_files_that_are_right_are_not_touched(files, tmp_path):
    write_generated(files, tmp_path)
    first, second, *_ = files
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    (tmp_path / second).write_text("int x;\n")
    assert write_generated(files, tmp_path).changed == (second,)
    assert (tmp_path / first).stat().st_mtime == 1


def test_differences_are_named_counted_and_shown(files, tmp_path):
    write_generated(files, tmp_path)
    first, second, third, _ = sorted(files)
    (tmp_path / first).unlink()
    text = files[second].replace("struct Params {", "struct Parameters {\n  int extra;")
    (tmp_path / second).write_text(text)
    (tmp_path / third).write_bytes(files[third].replace("\n", "\r\n").encode())
    stale = first.replace("tiny_fwd", "old_fwd")
    (tmp_path / stale).write_text(files[first].replace("tiny_fwd", "old_fwd"))
    differences = {d.file: d for d in diff_generated(files, tmp_path)}
    assert {name: d.kind for name, d in differences.items()} == {
        first: "missing",
        second: "changed",
        third: "changed",
        stale: "stale",
    }
    changed = differences[second]
    assert (changed.added, changed.removed) == (1, 2)
    assert "-  int extra;" in changed.diff
    assert "+struct Params {" in changed.diff
    assert f"{second} (+1 -2)" in str(changed)
    assert "line endings" in differences[third].diff
    assert [d.file for d in diff_generated(files, tmp_path, complete=False)] == sorted((first, second, third))


def test_only_rendered_files_are_removed(files, tmp_path):
    write_generated(files, tmp_path)
    (tmp_path / "mine.cu").write_text("// by hand\n")
    (first, *rest) = files
    (tmp_path / "README.md").write_text(files[first])
    (tmp_path / "copy.cu").write_text(files[first])
    kept = {name: files[name] for name in rest}
    assert write_generated(kept, tmp_path).removed == ()
    assert write_generated(kept, tmp_path, complete=True).removed == (first,)
    assert {path.name for path in tmp_path.iterdir()} == {*rest, "mine.cu", "README.md", "copy.cu"}
    assert diff_generated(kept, tmp_path) == []


def test_a_failed_write_leaves_the_old_file_and_no_litter(files, tmp_path, monkeypatch):
    write_generated(files, tmp_path)
    name = next(iter(files))
    (tmp_path / name).write_text("old\n")

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(generate.Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_generated(files, tmp_path)
    assert (tmp_path / name).read_text() == "old\n"
    assert {path.name for path in tmp_path.iterdir()} == set(files)
