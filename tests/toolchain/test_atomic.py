import errno
import os

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


def test_a_pipe_stays_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    atomic.check(path)
    atomic.replace(path, b"new")
    assert os.read(reader, 9) == b"new"
    os.close(reader)
    assert path.is_fifo()


def test_a_full_disk_is_reported_by_the_files_name(tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.Path, "chmod", write)  # a write of no file that has no name of its own
    path = tmp_path / "kernel.cu"
    with pytest.raises(OSError, match=r"kernel\.cu") as caught:
        atomic.replace(path, b"new")
    assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []
