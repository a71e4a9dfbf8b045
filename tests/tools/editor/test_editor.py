"""A kernel as a folder for an editor: Clang, which clangd is, finds no error in it."""

import json
import random
import shutil
import subprocess

import pytest

from flashgen.families.load import load_specs
from flashgen.source.render import render
from flashgen.tools import editor


def clang():
    names = ("clang++", *(f"clang++-{version}" for version in range(30, 16, -1)))
    return next(filter(None, map(shutil.which, names)), None)


def test_a_folder_has_the_source_its_headers_and_how_to_compile_it(tmp_path):
    variant = load_specs()[0].variants()[0]
    files = editor.write(variant, tmp_path / "kernel")
    assert all(file.is_file() for file in files)
    assert (tmp_path / "kernel" / f"{variant.name}.cu").read_text() == render(variant)
    (command,) = json.loads((tmp_path / "kernel" / "compile_commands.json").read_text())
    assert command["directory"] == str(tmp_path / "kernel")
    assert command["file"] == f"{variant.name}.cu"
    assert f"--cuda-gpu-arch={variant.min_arch}" in command["arguments"]
    assert editor.write(variant, tmp_path / "kernel") == files


@pytest.mark.parametrize("spec", load_specs(), ids=lambda spec: spec.name)
def test_clang_finds_no_error_in_a_kernel(spec, tmp_path, fresh_seed):
    program = clang()
    if program is None:
        pytest.skip("there is no Clang of version 17 or later")
    variant = random.Random(fresh_seed).choice(spec.variants())
    for step in variant.steps:
        folder = tmp_path / step.name
        editor.write(step, folder)
        (command,) = json.loads((folder / "compile_commands.json").read_text())
        done = subprocess.run(
            [program, *command["arguments"][1:]], cwd=command["directory"], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, ""), step.name
