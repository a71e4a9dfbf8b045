"""A tiny family of kernels (tests/fixtures) to load, change and render, apart from the shipped ones."""

import shutil
from pathlib import Path

import pytest

from flashgen.spec import load_spec

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def tiny_folder(tmp_path):
    """A copy of the fixtures to change: ``specs/tiny.yaml`` and its ``templates/``."""
    return Path(shutil.copytree(FIXTURES, tmp_path / "tiny"))


@pytest.fixture
def edit(tiny_folder):
    """``edit(file, old, new)`` replaces the only ``old`` in ``file`` and returns its path."""

    def replace(file, old, new):
        path = tiny_folder / file
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        path.write_text(text.replace(old, new))
        return path

    return replace


@pytest.fixture
def edit_spec(edit):
    """``edit_spec(old, new)`` is ``edit`` for the tiny spec."""
    return lambda old, new: edit("specs/tiny.yaml", old, new)


@pytest.fixture(scope="session")
def tiny_spec():
    """The tiny spec as it is."""
    return load_spec(FIXTURES / "specs" / "tiny.yaml")


@pytest.fixture(scope="session")
def tiny_variants(tiny_spec):
    return tiny_spec.variants()
