import json
import re
import shutil

import pytest

from flashgen.families.load import load_specs
from flashgen.families.selection import in_order

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def names(tiny):
    return [variant.name for variant in in_order(v for spec in load_specs() for v in spec.variants())]


def test_a_pipe_gets_every_name_whole_and_no_colours(tiny, flashgen):
    result = flashgen("list")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["variant", "block", "threads", "smem", "KB", "tile", "from"]
    assert [row.split()[0] for row in rows] == names(tiny)
    assert all(len(row.split()) == len(rows[0].split()) for row in rows)
    assert f"{len(rows)} variants" in result.stderr


def test_json_is_what_the_variants_say(tiny, flashgen):
    found = json.loads(flashgen("list", "--json").stdout)
    assert [each["name"] for each in found] == names(tiny)
    first = found[0]
    assert first["threads"] == 32 * first["tile"]["warps"]


def test_select_narrows_and_a_wrong_term_is_one_message(tiny, flashgen):
    chosen = json.loads(flashgen("list", "--select", "head_dim=64 dtype=fp32", "--json").stdout)
    assert chosen
    assert all(each["axes"]["head_dim"] == 64 and each["axes"]["dtype"] == "fp32" for each in chosen)
    wrong = flashgen("list", "--select", "dtype=int8")
    assert wrong.exit_code == 2
    assert wrong.stdout == ""
    assert "Error: no variant has dtype=int8" in wrong.stderr
    assert "fp16, fp32" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_a_terminal_is_never_overrun(tiny, in_terminal):
    for columns in (80, 120):
        result = in_terminal(columns, "list")
        assert result.exit_code == 0
        lines = [ANSI.sub("", line).rstrip() for line in result.stdout.splitlines()]
        assert max(map(len, lines)) <= columns
        for name in names(tiny):
            assert any(line.startswith(name + " ") for line in lines)
    assert "min_blocks" in result.stdout


def test_a_terminal_of_100_columns_shows_threads_and_the_tile_of_each_family(in_terminal):
    result = in_terminal(
        100,
        "list",
        "--select",
        "family=flash_fwd head_dim=128 dtype=fp16 mask_type=causal sinks=none dropout=none",
    )
    lines = [ANSI.sub("", line).rstrip() for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= 100
    rows = {line.split()[0]: line for line in lines if line.startswith("flash_fwd")}
    for variant in (v for spec in load_specs() for v in spec.variants()):
        if variant.name in rows:
            assert rows[variant.name].split()[2] == str(variant.threads)
    assert "loop=halves" in rows["flash_fwd_hdim128_fp16_causal_sm80"]
    assert "stages=" in rows["flash_fwd_hdim128_fp16_causal_sm90"]


def test_a_template_that_changes_nothing_is_said(tiny_folder, flashgen):
    own = ("list", "--specs", tiny_folder / "specs", "--select", "spec=tiny")
    assert "no kernel uses" not in flashgen(*own).stderr
    path = tiny_folder / "templates" / "flash_fwd_sm80.cu.j2"
    path.write_text("${ header }")
    result = flashgen(*own)
    assert result.exit_code == 0
    assert f"Warning: no kernel uses {path}" in result.stderr


@pytest.mark.parametrize(
    "arguments", ["list", "explain --shape 1x64x4x64 --arch sm_90", "inspect --dtype fp16"]
)
def test_a_template_that_is_not_there_is_an_error(arguments, tiny, edit_spec, flashgen):
    edit_spec("template: tiny.cu.j2", "template: tinny.cu.j2")
    result = flashgen(*arguments.split())
    assert result.exit_code == 1
    assert f"{tiny}/specs/tiny.yaml:3: template: tinny.cu.j2 is in none of" in result.stderr
    assert result.stdout == ""


def test_a_template_with_the_usual_delimiters_of_jinja_is_an_error(tiny, edit, flashgen):
    path = edit("templates/tiny.cu.j2", "${ header }", "{{ header }}")
    result = flashgen("list")
    assert result.exit_code == 1
    assert f"{path}:1: " in result.stderr
    assert "${ name }" in result.stderr


def test_specs_of_ones_own_are_added(tiny, flashgen, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(tiny / "templates", own)
    text = (tiny / "specs/tiny.yaml").read_text()
    (own / "mine.yaml").write_text(text.replace("family: tiny_fwd", "family: mine"))
    result = flashgen("list", "--specs", own, "--select", "family=mine", "--json")
    assert {each["spec"] for each in json.loads(result.stdout)} == {"mine"}
    (own / "mine.yaml").write_text(text.replace("threads:", "treads:"))
    broken = flashgen("list", "--specs", own)
    assert broken.exit_code == 1
    assert "mine.yaml" in broken.stderr
    assert "treads" in broken.stderr
