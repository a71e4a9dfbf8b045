import pytest

from flashgen.toolchain import atomic


def test_a_folder_that_is_not_there_is_reported_by_the_files_name(tmp_path):
    path = tmp_path / "gone" / "kernel.cu"
    with pytest.raises(FileNotFoundError) as caught:
        atomic.replace(path, b"")
    assert caught.value.filename == str(path)


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "kernel.cu"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        atomic.replace(path, "not bytes")
    assert path.read_bytes() == b"old"
    atomic.replace(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_files_place_is_reported_by_its_name(tmp_path):
    path = tmp_path / "kernel.cu"
    path.mkdir()
    with pytest.raises(OSError) as caught:
        atomic.replace(path, b"new")
    assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == [path]
