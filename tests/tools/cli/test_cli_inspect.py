import json
import subprocess
import sys

import pytest

from flashgen.families.load import load_specs
from flashgen.source.render import flatten, include_dirs, render
from flashgen.toolchain.disassemble import NoDisassemblerError, mnemonics

NAME = "tiny_fwd_hdim64_fp16_causal_sm80"


@pytest.fixture
def variant(tiny):
    return next(v for spec in load_specs() for v in spec.variants() if v.name == NAME)


def test_source_in_a_pipe_is_what_is_rendered_byte_for_byte(variant, flashgen):
    assert flashgen("inspect", NAME, "--source").stdout == render(variant)
    assert flashgen("inspect", f"generated/{NAME}.cu", "--flat").stdout == flatten(
        render(variant), include_dirs(variant)
    )


def test_source_in_a_terminal_is_coloured_and_whole(variant, in_terminal):
    import re

    result = in_terminal(40, "inspect", NAME, "--source")
    assert "\x1b[" in result.stdout
    assert re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).rstrip() == render(variant).rstrip()


def test_a_section_is_a_part_of_the_source(variant, flashgen):
    roles = flashgen("inspect", NAME, "--source", "--section", "roles").stdout
    assert "__global__" in roles
    assert roles in render(variant)
    both = json.loads(
        flashgen("inspect", NAME, "--source", "--section", "roles", "--section", "params", "--json").stdout
    )["source"]
    assert both.startswith("struct Params {\n")
    assert both.endswith(roles)


def test_the_algorithm_of_a_shipped_kernel(flashgen):
    shown = flashgen("inspect", "flash_decode_hdim128_bf16_packgqa_sm90", "--source", "--section", "roles")
    assert shown.stdout.startswith('extern "C" __global__')
    assert len(shown.stdout.splitlines()) < 80
    map_of_it = flashgen("inspect", "flash_fwd_hdim128_fp16_sm90", "--source", "--section", "map").stdout
    assert "arrivals of a phase" in map_of_it


def test_a_page_and_a_folder_are_written(variant, flashgen, tmp_path):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    page = tmp_path / "kernel.html"
    result = flashgen("inspect", NAME, "--html", page, "--arch", "sm_86")
    assert result.exit_code == 0, result.output
    assert (result.stdout, result.stderr) == ("", f"wrote {page}\n")
    assert f"<title>{NAME} for sm_86</title>" in page.read_text()
    folder = tmp_path / "kernel"
    files = json.loads(flashgen("inspect", NAME, "--out", folder, "--json").stdout)["files"]
    assert str(folder / "compile_commands.json") in files
    assert (folder / f"{NAME}.cu").read_text() == render(variant)


def test_axes_name_a_variant(tiny, flashgen):
    args = (
        "--head-dim",
        64,
        "--dtype",
        "fp16",
        "--mask-type",
        "causal",
        "--gqa",
        "packed",
        "--target",
        "sm86",
    )
    found = json.loads(flashgen("inspect", *args, "--json").stdout)
    assert found["name"] == "tiny_fwd_hdim64_fp16_causal_packgqa_sm86"
    tiled = json.loads(flashgen("inspect", *args, "--tile", "m64", "--json").stdout)
    assert tiled["name"] == "tiny_fwd_hdim64_fp16_causal_m64_packgqa_sm86"


@pytest.mark.parametrize(("tile", "schedule"), [("", "block"), ("_both", "block, one of each kind")])
def test_the_kinds_of_tiles_of_a_thread_block(tile, schedule, flashgen):
    shown = flashgen("inspect", f"flash_bwd_hdim64_bf16_causal_direct{tile}_sm90").stdout
    assert f"  schedule    tile per {schedule}\n" in shown


def test_ambiguous_axes_show_the_first_and_say_so(tiny, flashgen):
    result = flashgen("inspect", "--head-dim", 64, "--source")
    assert "tiny_fwd_hdim64_fp16_sm80(Params" in result.stdout
    assert "variants fit" in result.stderr


@pytest.mark.parametrize(("arch", "target"), [("sm_90", "sm90"), ("sm_80", "sm80"), ("sm_86", "sm86")])
def test_axes_mean_the_kernel_that_the_architecture_would_take(arch, target, flashgen):
    axes = ("--head-dim", 128, "--dtype", "fp16", "--mask-type", "causal", "--gqa", "mha", "--arch", arch)
    assert json.loads(flashgen("inspect", *axes, "--json").stdout)["target"] == target


def test_the_card_tells_where_it_comes_from(tiny, flashgen):
    card = flashgen("inspect", NAME).stdout
    assert str(tiny / "specs" / "tiny.yaml") in card
    assert str(tiny / "templates" / "tiny.cu.j2") in card
    assert "out, seqlen_q, out_row_stride, diagonal_offset, scale_log2" in card
    files = json.loads(flashgen("inspect", NAME, "--json").stdout)["files"]
    assert files["spec"] == str(tiny / "specs" / "tiny.yaml")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("tiny_fwd_hdim64_fp16_casual_sm80",), 2, ["did you mean", NAME]),
        (("--head-dim", 128), 2, ["head_dim=128", "32, 64"]),
        ((), 2, ["Which variant?"]),
        ((NAME, "--head-dim", 64), 2, ["leave out --head-dim"]),
        ((NAME, "--arch", "x"), 2, ["sm_90"]),
        ((NAME, "--source", "--ptx"), 2, ["one view at a time, not --source and --ptx"]),
        ((NAME, "--source", "--section", "rolls"), 2, ["no part 'rolls'; it has header"]),
        ((NAME, "--section", "roles"), 2, ["give it with --source"]),
        ((NAME, "--flat", "--html", "kernel.html"), 2, ["one view at a time, not --flat and --html"]),
        ((NAME, "--html", "no/such/kernel.html"), 2, ["there is no folder 'no/such'"]),
        (("--head-dim", 64, "--arch", "sm_75"), 1, ["runs on sm_75"]),
        ((NAME, "--ptx", "--arch", "sm_999"), 1, ["does not know sm_999; it compiles for", "sm_90"]),
        (("tiny_fwd_hdim64_fp16*",), 2, ["variants match 'tiny_fwd_hdim64_fp16*'", "flashgen list --select"]),
    ],
)
def test_a_wrong_name_gets_help(tiny, flashgen, args, code, words):
    result = flashgen("inspect", *args)
    assert result.exit_code == code
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr


def test_resources_and_ptx_need_no_gpu(tiny, flashgen):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    found = json.loads(flashgen("inspect", NAME, "--resources", "--arch", "sm_86", "--json").stdout)
    assert found["arch"] == "sm_86"
    assert found["registers"] > 0
    assert str(found["registers"]) in flashgen("inspect", NAME, "--resources", "--arch", "sm_86").stdout
    ptx = flashgen("inspect", NAME, "--ptx", "--arch", "sm_86").stdout
    assert ".target sm_86" in ptx
    assert f".entry {NAME}(" in ptx


@pytest.mark.parametrize("asked", ["sm_90", "sm_90a"])
@pytest.mark.parametrize(("needed", "target"), [("sm_90a", "sm_90a"), ("sm_80", "sm_90")])
def test_code_is_for_the_architecture_that_a_call_compiles_for(
    tiny, edit_spec, flashgen, asked, needed, target
):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    old = "sm80: {min_arch: sm_80, max_smem: 166912, compile_for: [sm_80, sm_90]}"
    edit_spec(old, f"sm80: {{min_arch: {needed}, max_smem: 166912, compile_for: [{target}]}}")
    ptx = flashgen("inspect", NAME, "--ptx", "--arch", asked).stdout
    assert f".target {target}\n" in ptx
    found = json.loads(flashgen("inspect", NAME, "--resources", "--arch", asked, "--json").stdout)
    assert (found["arch"], found["failure"]) == (target, None)


def test_an_architecture_that_the_variant_does_not_run_on_is_named(tiny, flashgen):
    result = flashgen("inspect", NAME, "--sass", "--arch", "sm_75")
    assert result.exit_code == 1
    assert "sm_75" in result.stderr
    assert "sm_80 or later" in result.stderr


def test_sass_counts_what_resources_counts(tiny, flashgen, disassembler):
    sass = flashgen("inspect", NAME, "--sass", "--arch", "sm_86")
    assert sass.exit_code == 0
    counts = json.loads(flashgen("inspect", NAME, "--resources", "--arch", "sm_86", "--json").stdout)[
        "instructions"
    ]
    assert counts["STG"] == mnemonics(sass.stdout)["STG"] > 0


def test_sass_without_a_disassembler_says_what_to_install(tiny, flashgen, monkeypatch):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")

    def missing():
        raise NoDisassemblerError("install it so")

    monkeypatch.setattr("flashgen.toolchain.disassemble.nvdisasm", missing)
    result = flashgen("inspect", NAME, "--sass", "--arch", "sm_86")
    assert result.exit_code == 1
    assert "Error: install it so" in result.stderr
    found = json.loads(flashgen("inspect", NAME, "--resources", "--json").stdout)
    assert (found["instructions"], found["no_instructions"]) == (None, "not counted: install it so")
    assert "instructions   not counted: install it so" in flashgen("inspect", NAME, "--resources").stdout


def test_output_that_cannot_be_written_is_an_error():
    done = subprocess.run(
        f"{sys.executable} -m flashgen inspect flash_fwd_hdim64_fp16_sm80 --source > /dev/full",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "Error: cannot write the output: No space left on device\n"


def test_a_kernel_that_does_not_compile_is_one_message(tiny, edit, flashgen):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    edit("templates/tiny.cu.j2", "// Keys behind the diagonal are hidden.", "no such thing;")
    for view in ("--ptx", "--resources"):
        result = flashgen("inspect", NAME, view)
        assert result.exit_code == 1
        assert "no such thing;" in result.stderr
        assert result.stdout == ""
        template = tiny / "templates" / "tiny.cu.j2"
        number = 1 + [line.strip() for line in template.read_text().splitlines()].index("no such thing;")
        assert f"is made of {template}:{number}\n" in result.stderr


@pytest.mark.drawn
@pytest.mark.parametrize(
    "axes",
    [
        {"head_dim": "128"},
        {"head_dim": "128", "dtype": "bf16", "mask_type": "causal"},
        {"head_dim": "64", "dtype": "fp16", "gqa": "packed"},
        {"dtype": "fp32"},
        {"target": "sm86"},
        {"tile": "m64"},
    ],
    ids=str,
)
def test_the_first_is_the_first_of_the_list(axes, flashgen):
    options = [each for key, value in axes.items() for each in (f"--{key.replace('_', '-')}", value)]
    shown = json.loads(flashgen("inspect", *options, "--json").stdout)["name"]
    select = " ".join(f"{key}={value}" for key, value in axes.items())
    assert shown == json.loads(flashgen("list", "--select", select, "--json").stdout)[0]["name"]
