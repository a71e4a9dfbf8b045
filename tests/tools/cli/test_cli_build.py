import json
import re
import shlex
import shutil

import pytest

from flashgen.errors import BadParam
from flashgen.families.load import load_specs
from flashgen.host import paths
from flashgen.host.paths import templates_dir
from flashgen.toolchain.cache import default
from flashgen.toolchain.obtain import recall
from flashgen.tools.cli import build

ANSI = re.compile(r"\x1b\[[0-9;]*m")
ONE = ("--select", "tiny_fwd_hdim64_fp16_sm80")

SPILLS = ("--select", "tiny_fwd_hdim64_fp32_sm80")

pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")


def kernels(result):
    return json.loads(result.stdout)["kernels"]


def test_compiles_then_finds_in_the_cache(tiny, flashgen):
    first = flashgen("build", *ONE, "--json")
    assert first.exit_code == 0
    assert [(k["variant"], k["arch"], k["cached"]) for k in kernels(first)] == [
        ("tiny_fwd_hdim64_fp16_sm80", "sm_80", False),
        ("tiny_fwd_hdim64_fp16_sm80", "sm_90", False),
    ]
    assert all(k["registers"] > 0 and k["spill_stores"] == 0 and k["failure"] is None for k in kernels(first))
    again = kernels(flashgen("build", *ONE, "--json"))
    assert all(k["cached"] for k in again)
    assert [k["registers"] for k in again] == [k["registers"] for k in kernels(first)]


def test_a_kernel_that_made_room_for_a_later_one_is_a_failure(tiny, flashgen):
    found = flashgen("build", *ONE, "--json", "-j", "1", FLASHGEN_CACHE_SIZE="1KB")
    assert (found.exit_code, json.loads(found.stdout)["not_kept"]) == (1, 1)
    assert [kernel["kept"] for kernel in kernels(found)] == [False, True]


def test_specs_of_the_users_own_leave_the_committed_slice_alone(tiny, flashgen, tmp_path, monkeypatch):
    monkeypatch.setattr("flashgen.host.paths.generated_dir", lambda: tmp_path / "generated")
    given = {"FLASHGEN_SPECS": str(tiny / "specs")}
    result = flashgen("build", "--no-compile", "--json", **given)
    assert json.loads(result.stdout)["written"] == []
    assert not (tmp_path / "generated").exists()


def test_a_kernel_that_could_not_be_kept_is_a_failure(tiny, flashgen, tmp_path):
    (tmp_path / "file").write_text("")
    result = flashgen("build", *ONE, FLASHGEN_CACHE_DIR=str(tmp_path / "file"))
    assert result.exit_code == 1
    assert f"2 of 2 kernels could not be written to {tmp_path / 'file'}" in result.stderr
    found = flashgen("build", *ONE, "--json", FLASHGEN_CACHE_DIR=str(tmp_path / "file"))
    assert found.exit_code == 1
    assert json.loads(found.stdout)["not_kept"] == 2


def test_what_is_built_is_all_that_a_first_call_looks_for(tiny, flashgen, monkeypatch):
    flashgen("build", *ONE)

    def unchecked(*_):
        raise AssertionError("checked again")

    monkeypatch.setattr("flashgen.families.check.check", unchecked)
    spec = load_specs(cache=default())[-1]
    (variant,) = (v for v in spec.variants() if v.name == ONE[1])
    assert recall(variant, "sm_90").name == variant.name


def test_the_table_has_what_the_json_has(tiny, flashgen):
    found = kernels(flashgen("build", *ONE, "--arch", "sm_90", "--json"))
    result = flashgen("build", *ONE, "--arch", "90")
    header, row = result.stdout.splitlines()
    assert header.split() == ["variant", "arch", "regs", "spills", "smem", "KB", "seconds"]
    assert row.split() == [found[0]["variant"], "sm_90", str(found[0]["registers"]), "0", "48", "cached"]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_a_terminal(tiny, in_terminal, columns):
    result = in_terminal(
        columns, "build", "--select", "head_dim=32 dtype=fp16 mask_type=causal", "--arch", "sm_86"
    )
    lines = [ANSI.sub("", line).rstrip() for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("tiny_fwd_hdim32_fp16_causal_m64_packgqa_sm86 ") for line in lines)


def test_the_default_is_the_committed_slice_for_the_listed_architectures(tiny, flashgen):
    committed = json.loads(flashgen("list", "--select", "committed=true", "--json").stdout)
    expected = {(v["name"], arch) for v in committed for arch in v["archs"]}
    assert {
        (k["variant"], k["arch"]) for k in kernels(flashgen("build", "--json", "--specs", tiny / "specs"))
    } == expected


@pytest.mark.parametrize("arch", [(), ("--arch", "sm_90")])
def test_a_selection_without_committed_variants_is_refused(arch, tiny, flashgen):
    result = flashgen("build", "--select", "committed=false", "--slice", "committed", *arch)
    assert result.exit_code == 2
    assert "none of the chosen variants is marked for generated/" in result.stderr


def test_slice_all_with_architectures(tiny, flashgen):
    everything = json.loads(flashgen("list", "--json").stdout)
    built = kernels(flashgen("build", "--slice", "all", "--arch", "sm_86", "--arch", "sm_80", "--json"))
    expected = {(v["name"], arch) for v in everything for arch in v["archs"] if arch in ("sm_80", "sm_86")}
    assert {(k["variant"], k["arch"]) for k in built} == expected


def test_an_architecture_that_the_compiler_does_not_know_is_one_error(tiny, flashgen):
    result = flashgen("build", *ONE, "--arch", "sm_999")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert re.fullmatch(r"Error: nvrtc \S+ does not know sm_999; it compiles for .*sm_90 .*\n", result.stderr)


def test_an_unreachable_architecture_is_an_error(tiny, flashgen):
    result = flashgen("build", *ONE, "--arch", "sm_75")
    assert result.exit_code == 1
    assert "need sm_80 or later" in result.stderr
    assert flashgen("build", *ONE, "--arch", "hopper").exit_code == 2


def test_spills_fail_where_the_spec_forbids_them(spilling, flashgen):
    result = flashgen("build", *SPILLS, "--arch", "sm_80", "--json")
    (kernel,) = kernels(result)
    assert result.exit_code == 1
    assert kernel["spill_stores"] > 0
    assert "no_spills" in kernel["failure"]
    table = flashgen("build", *SPILLS, "--arch", "sm_80")
    assert table.exit_code == 1
    assert re.search(r" \d+ ! ", table.stdout)
    assert "says no_spills" in table.stderr


def test_spills_pass_where_the_spec_allows_them(spilling, edit_spec, flashgen):
    edit_spec("no_spills: true", "no_spills: false")
    result = flashgen("build", *SPILLS, "--arch", "sm_80", "--json")
    assert result.exit_code == 0
    assert kernels(result)[0]["spill_stores"] > 0


def test_a_row_may_forbid_them_on_some_architectures(spilling, edit_spec, flashgen):
    edit_spec("stages: 2, min_blocks: 1}", "stages: 2, min_blocks: 1, no_spills: [sm_90]}")
    for arch, failures in (("sm_80", 0), ("sm_90", 1)):
        result = flashgen("build", *SPILLS, "--arch", arch, "--json")
        assert kernels(result)[0]["spill_stores"] > 0
        assert result.exit_code == json.loads(result.stdout)["failures"] == failures


def test_a_kernel_that_does_not_compile_fails_alone(tiny, edit, flashgen):
    edit("templates/tiny.cu.j2", "// Keys behind the diagonal are hidden.", "no such thing;")
    result = flashgen(
        "build", "--select", "head_dim=64 dtype=fp16 gqa=mha tile=default target=sm80", "--json"
    )
    assert result.exit_code == 1
    failed = {k["variant"] for k in kernels(result) if k["failure"]}
    assert failed == {"tiny_fwd_hdim64_fp16_causal_sm80"}
    assert len(kernels(result)) == 4
    assert "no such thing;" in next(k["failure"] for k in kernels(result) if k["failure"])


def test_out_gets_the_sources_and_no_compile_compiles_nothing(tiny, flashgen, tmp_path):
    out = tmp_path / "out"
    result = flashgen("build", *ONE, "--out", out, "--no-compile", "--json")
    assert json.loads(result.stdout) == {
        "kernels": [],
        "written": ["tiny_fwd_hdim64_fp16_sm80.cu"],
        "removed": [],
        "failures": 0,
        "not_kept": 0,
    }
    assert (
        flashgen("inspect", ONE[1], "--source").stdout == (out / "tiny_fwd_hdim64_fp16_sm80.cu").read_text()
    )
    assert not (tmp_path / "cache").exists()
    again = flashgen("build", *ONE, "--out", out, "--no-compile", "--json")
    assert json.loads(again.stdout)["written"] == []


@pytest.mark.parametrize("option", ["--check", "--no-compile"])
def test_what_compiles_nothing_takes_no_architecture(flashgen, option):
    result = flashgen("build", option, "--arch", "sm_90", "--jobs", "2")
    assert result.exit_code == 2
    assert f"{option} compiles nothing; leave out --arch, --jobs" in result.stderr


def test_check_passes_after_a_build_and_fails_after_a_change(tiny, edit, flashgen, tmp_path):
    out = tmp_path / "out"
    assert flashgen("build", "--out", out, "--no-compile").exit_code == 0
    passed = flashgen("build", "--check", "--out", out)
    assert passed.exit_code == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    edit("templates/tiny.cu.j2", "// Keys behind the diagonal are hidden.", "// Later keys are hidden.")
    failed = flashgen("build", "--check", "--out", out)
    assert failed.exit_code == 1
    assert "+// Later keys are hidden." in failed.stdout
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    differences = json.loads(flashgen("build", "--check", "--out", out, "--json").stdout)["differences"]
    assert differences
    assert all("causal" in each["file"] and each["kind"] == "changed" for each in differences)


def test_stale_sources_leave_out_and_all_else_stays(tiny, flashgen, tmp_path):
    out = tmp_path / "out"
    build = ("build", "--out", out, "--no-compile", "--json")
    committed = json.loads(flashgen(*build).stdout)["written"]
    everything = json.loads(flashgen(*build, "--slice", "all").stdout)
    assert everything["removed"] == []
    more = set(everything["written"])
    (out / "mine.cu").write_text((out / committed[0]).read_text())
    # A part of the sources says nothing about the others.
    assert json.loads(flashgen(*build, *ONE).stdout)["removed"] == []
    checked = flashgen("build", "--check", "--out", out)
    assert checked.exit_code == 1
    assert all(f"stale: {name}" in checked.stdout for name in more)
    assert f"`flashgen build --out {out}` brings" in checked.stdout
    result = flashgen(*build[:-1])
    assert f"0 files changed, {len(more)} stale removed" in result.stdout
    assert {path.name for path in out.iterdir()} == {*committed, "mine.cu"}
    assert flashgen("build", "--check", "--out", out).exit_code == 0


def test_check_advises_what_was_checked(tiny, flashgen, tmp_path):
    options = ("--select", "dtype=fp16 head_dim=64", "--slice", "all", "--out", tmp_path / "a folder")
    checked = flashgen("build", "--check", *options)
    advice = re.search("`flashgen (.*)` brings", checked.stdout)[1]
    assert flashgen(*shlex.split(advice), "--no-compile").exit_code == 0
    assert flashgen("build", "--check", *options).exit_code == 0


def test_a_checkout_keeps_generated_up_to_date(tiny, flashgen, monkeypatch):
    generated = tiny / "generated"
    generated.mkdir()
    # Its templates are then the shipped ones, which have all headers.
    shutil.copytree(templates_dir() / "include", tiny / "templates" / "include", dirs_exist_ok=True)
    monkeypatch.setattr("flashgen.host.paths.checkout", lambda: tiny)
    (generated / "README.md").write_text("kept")
    assert flashgen("build", "--no-compile").exit_code == 0
    written = {path.name for path in generated.glob("*.cu")}
    assert written
    stale = generated / "tiny_fwd_hdim8_fp16_sm80.cu"
    stale.write_text((generated / min(written)).read_text().replace(min(written)[:-3], stale.stem))
    assert flashgen("build", "--check").exit_code == 1
    assert flashgen("build", "--no-compile", "--select", "head_dim=32").exit_code == 0
    assert {path.name for path in generated.glob("*.cu")} == written | {stale.name}
    assert flashgen("build", "--no-compile").exit_code == 0
    assert {path.name for path in generated.iterdir()} == written | {"README.md"}
    assert flashgen("build", "--check").exit_code == 0


def test_an_unwritable_out_is_one_message(tiny, flashgen, tmp_path):
    (tmp_path / "file").write_text("")
    result = flashgen("build", *ONE, "--no-compile", "--out", tmp_path / "file" / "below")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr


def test_a_check_outside_a_checkout_fails_before_it_makes_variants(flashgen, monkeypatch):
    def outside():
        raise BadParam("no checkout")

    monkeypatch.setattr(paths, "generated_dir", outside)
    monkeypatch.setattr(build, "chosen_variants", lambda *_: pytest.fail("variants were made"))
    failed = flashgen("build", "--check")
    assert failed.exit_code == 1
    assert "no checkout" in failed.stderr
