"""``from module import *`` gives what is documented of a public module, and nothing else."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import flashgen
from flashgen import errors

ROOT = Path(__file__).parents[1]
TEXT = "\n".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
DOCUMENTED: dict[str, set[str]] = {}
IMPORT = r"^(?:>>> )?from (flashgen[\w.]*) import (?:\(([\w,\s]+)\)|([\w, ]+))$"
for module, in_brackets, on_the_line in re.findall(IMPORT, TEXT, re.MULTILINE):
    DOCUMENTED.setdefault(module, set()).update(re.findall(r"\w+", in_brackets or on_the_line))
# Of these the text names functions, and shows a few of them at work.
for module, pattern in (
    ("flashgen.compat.flash_attn", r"`(flash_attn_\w+)`"),
    ("flashgen.compat.torch", r"`(scaled_dot_product_attention)`"),
):
    DOCUMENTED[module].update(re.findall(pattern, TEXT))
NAMED = set(re.findall(r"\w+", TEXT))


def star(module: str) -> set[str]:
    names: dict[str, object] = {}
    exec(f"from {module} import *", names)
    return names.keys() - {"__builtins__"}


def test_the_text_documents_modules():
    assert DOCUMENTED.keys() > {
        "flashgen.compat.flash_attn",
        "flashgen.compat.torch",
        "flashgen.families.load",
    }


@pytest.mark.parametrize("module", sorted(DOCUMENTED.keys() - {"flashgen"}))
def test_a_star_gives_what_is_documented(module):
    libraries = {"flashgen.compat.torch": "torch", "flashgen.distributed.shardmap": "jax"}
    if module in libraries:
        pytest.importorskip(libraries[module])
    assert star(module) == DOCUMENTED[module]
    assert importlib.import_module(module).__all__ == sorted(DOCUMENTED[module])


def test_the_package_gives_its_documented_names():
    assert star("flashgen") == set(flashgen.__all__)
    assert set(flashgen.__all__) <= NAMED


def test_errors_are_those_of_the_package():
    classes = {name for name, x in vars(errors).items() if isinstance(x, type) and issubclass(x, Exception)}
    assert star("flashgen.errors") == classes
    assert classes <= set(flashgen.__all__)
