import json
import re
from pathlib import Path

import pytest

from flashgen import KVCache
from flashgen import errors as flashgen_errors
from flashgen import explain as flashgen_explain
from flashgen.toolchain.build import Built
from flashgen.toolchain.bundle import Bundle, Held, write
from flashgen.toolchain.compile import Compiled
from flashgen.tools import models
from flashgen.tools.cli.calls import kernels

WANTED = ("--select", "tiny_fwd_hdim64_fp16_sm80", "--arch", "sm_90", "--arch", "sm_80")


def test_a_bundle_says_what_it_holds(tiny, flashgen, tmp_path):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    path = tmp_path / "kernels.zip"
    made = flashgen("bundle", *WANTED, "-o", path)
    assert made.exit_code == 0, made.stderr
    assert "2 kernels" in made.stderr
    shown = json.loads(flashgen("bundle", "--show", path, "--json").stdout)
    assert shown["kernels"] == [
        {"variant": "tiny_fwd_hdim64_fp16_sm80", "arch": arch} for arch in ("sm_80", "sm_90")
    ]
    assert shown["compiler"] == Bundle(path).compiler
    assert (shown["specs"], shown["refused"]) == (["tiny"], "")
    found = json.loads(flashgen("doctor", "--json", FLASHGEN_BUNDLE=str(path)).stdout)
    assert found["bundles"] == [{"path": str(path), "kernels": 2, "compiler": shown["compiler"]}]
    built = json.loads(
        flashgen(
            "build", *WANTED, "--json", FLASHGEN_BUNDLE=str(path), FLASHGEN_CACHE_DIR=str(tmp_path / "new")
        ).stdout
    )
    assert [each["cached"] and each["kept"] for each in built["kernels"]] == [True, True]


def test_a_bundle_that_others_may_write_is_shown_and_said_to_be_refused(flashgen, tmp_path):
    path = tmp_path / "kernels.zip"
    key = "0" * 64
    write(path, "nvrtc 13.0", {key: b"machine code"}, [Held("kernel", "sm_90", key)])
    path.chmod(0o666)
    result = flashgen("bundle", "--show", path)
    assert result.exit_code == 1
    assert "1 kernel, 0 checked specs" in result.stderr
    assert "FLASHGEN_BUNDLE would not use it: every user may write to it (mode 666)" in result.stderr
    assert json.loads(flashgen("bundle", "--show", path, "--json").stdout)["refused"]
    assert flashgen("bundle", "--show", path, FLASHGEN_TRUST=str(path)).exit_code == 0
    doctor = flashgen("doctor", FLASHGEN_BUNDLE=str(path))
    assert doctor.exit_code == 1
    assert "every user may write to it" in doctor.stdout


def test_kernels_with_a_score_modification_go_into_a_bundle(flashgen, tmp_path):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    path = tmp_path / "softcap.zip"
    wanted = ("--select", "flash_fwd_hdim32_fp16_m64_sm80", "--arch", "sm_80", "--score", "softcap")
    made = flashgen("bundle", *wanted, "-o", path)
    assert made.exit_code == 0, made.stderr
    assert [each.variant for each in Bundle(path).kernels] == ["flash_fwd_hdim32_fp16_softcap_m64_sm80"]


def test_a_bundle_that_cannot_be_used_is_a_problem(tiny, flashgen, tmp_path):
    path = tmp_path / "kernels.zip"
    path.write_text("no zip")
    assert "is not a bundle, or is damaged" in flashgen("bundle", "--show", path).stderr
    assert "nope.zip does not exist" in flashgen("bundle", "--show", tmp_path / "nope.zip").stderr
    result = flashgen("doctor", FLASHGEN_BUNDLE=str(path))
    assert result.exit_code == 1
    assert "FLASHGEN_BUNDLE is set" in result.stdout


def test_a_bundle_is_made_anew_where_it_is_named_and_serves_no_more(tiny, flashgen, tmp_path):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    path = tmp_path / "kernels.zip"
    made = flashgen("bundle", *WANTED, "-o", path, FLASHGEN_BUNDLE=str(path))
    assert made.exit_code == 0, made.stderr
    path.write_text("no zip")
    assert flashgen("bundle", *WANTED, "-o", path, FLASHGEN_BUNDLE=str(path)).exit_code == 0
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 3] + b"\0" * 64 + whole[len(whole) // 3 + 64 :])
    result = flashgen("doctor", FLASHGEN_BUNDLE=str(path))
    assert (result.exit_code, "damaged" in result.stdout) == (1, True)


def test_a_kernel_that_does_not_compile_leaves_no_bundle(tiny, edit, flashgen, tmp_path):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    edit("templates/tiny.cu.j2", "// Keys behind the diagonal are hidden.", "no such thing;")
    causal = ("--select", "tiny_fwd_hdim64_fp16_causal_sm80", "--arch", "sm_90")
    result = flashgen("bundle", *causal, "-o", tmp_path / "kernels.zip")
    assert result.exit_code == 1
    assert "nothing was written" in result.stderr
    assert "no such thing;" in result.stderr
    assert not (tmp_path / "kernels.zip").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either write a bundle, with -o FILE"),
        (("-o", "a.zip", "--wheel", "."), "either write a bundle, with -o FILE"),
        (("-o", "a.zip", "--models", "--score", "softcap"), "--models says which kernels; leave out --score"),
        (("-o", "a.zip"), "say which kernels"),
        (("-o", "a.zip", "--show", __file__), "either write a bundle"),
        (("--show", __file__, "--arch", "sm_90", "--score", "softcap"), "leave out --arch, --score"),
        (
            ("--select", "head_dim=64", "-o", "nowhere/a.zip"),
            "there is no folder 'nowhere' to write 'a.zip' into",
        ),
    ],
)
def test_what_is_not_understood(arguments, message, flashgen):
    result = flashgen("bundle", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


README = (Path(__file__).parents[3] / "README.md").read_text()
SELECTIONS = sorted({*re.findall(r"flashgen (?:build|bundle) --select '([^']*)'", README)})


@pytest.mark.drawn
@pytest.mark.parametrize("more", [(), ("--score", "softcap"), ("--arch", "sm_80")], ids=" ".join)
@pytest.mark.parametrize("select", [*SELECTIONS, "head_dim=64 dtype=fp16 mask_type=none"])
def test_build_and_bundle_take_the_same_kernels(select, more, flashgen, monkeypatch, tmp_path):
    """Those of the README, and others of several families. With a modification a bundle also has the kernels
    of the same calls that have no seam for it.
    """
    asked = []

    def compiled(variants, archs, jobs):
        seams = [variant for variant in variants if variant.score_seam or "--score" not in more]
        asked.append(({variant.name for variant in seams}, archs))
        raise flashgen_errors.CompileError("not tried")

    monkeypatch.setattr("flashgen.tools.cli.kernels.compiled", compiled)
    assert flashgen("build", "--select", select, *more).exit_code == 1
    assert flashgen("bundle", "--select", select, *more, "-o", tmp_path / "kernels.zip").exit_code == 1
    built, bundled = asked
    assert len(built[0]) > 3
    assert built == bundled


def test_a_kernel_that_spills_is_in_the_bundle_and_is_named(tiny, flashgen, monkeypatch, tmp_path):
    """A call would run it, too."""
    code = Compiled("kernel", "sm_80", b"\x7fELF", *[None] * (len(Compiled._fields) - 3))

    def build(variants, archs, jobs):
        slow = code._replace(spill_stores=8, spill_loads=12)
        return [Built(variant, archs[0], 0.0, compiled=slow) for variant in variants]

    monkeypatch.setattr("flashgen.tools.cli.kernels.compiled", build)
    monkeypatch.setattr("flashgen.families.variant.Variant.must_not_spill", lambda *_: True)
    made = flashgen("bundle", *WANTED, "-o", tmp_path / "kernels.zip")
    assert made.exit_code == 0, made.output
    assert re.search(r"slower than it should be: \w+ for sm_90 spills 20 bytes of registers", made.stderr)


def test_the_kernels_of_models_go_into_a_wheel(flashgen, monkeypatch, tmp_path):
    """Of each model and architecture; a call that is near to a model's takes a kernel among them."""
    monkeypatch.setattr(models, "MODELS", models.MODELS[:1])
    compiled = []

    def build(variants, archs, jobs):
        compiled.extend((variant.name, arch) for variant in variants for arch in archs)
        code = Compiled(variants[0].name, "sm_80", b"\x7fELF", *[None] * (len(Compiled._fields) - 3))
        return [Built(variant, archs[0], 0.0, compiled=code) for variant in variants]

    monkeypatch.setattr("flashgen.tools.cli.kernels.compiled", build)
    made = flashgen("bundle", "--models", "--wheel", tmp_path)
    assert made.exit_code == 0, made.output
    assert [*tmp_path.glob("flashgen_kernels-*-py3-none-any.whl")]
    assert {arch for _, arch in compiled} == {*models.ARCHS}
    decoded = flashgen_explain(
        (32, 1, 32, 128),
        KVCache(*[(9000, 16, 8, 128)] * 2, (32,), pages=(32, 512)),
        dtype="bf16",
        causal=True,
        arch="sm_90",
    )
    trained = flashgen_explain((2, 3000, 32, 128), (2, 3000, 8, 128), dtype="bf16", causal=True, arch="sm_90")
    for found in (decoded, trained):
        assert (found.variant.name, "sm_90") in compiled


def test_the_kernels_of_models_are_for_latent_caches_and_codes_too(monkeypatch):
    """Each kind of call takes the kernel that is made for it, and e4m3 attention is left out below sm_89."""
    deepseek = [model for model in models.MODELS if model.of in ("DeepSeek V3", "DeepSeek V3.2")]
    monkeypatch.setattr(models, "MODELS", (models.MODELS[1], *deepseek))
    monkeypatch.setattr(models, "_LONG", ((8, 2048),))
    monkeypatch.setattr(models, "_DECODED", ((8, 8192),))
    found = {arch: kernels(models.calls(arch), arch) for arch in ("sm_80", "sm_90")}
    families = {arch: {variant.spec for variant in variants} for arch, variants in found.items()}
    assert families["sm_90"] >= {
        "append_sm80",
        "flash_fwd_fp8_tiles_sm90",
        "flash_mla_decode_e4m3_sm90",
        "flash_mla_decode_sm90",
        "flash_mla_sparse_sm90",
        "flash_mla_wide_sm90",
        "flash_varlen_decode_e4m3_sm90",
    }
    latent = {"flash_mla_decode_sm80", "flash_mla_sparse_sm80", "flash_mla_decode_e4m3_sm80"}
    assert families["sm_80"] >= latent
    assert not any("fp8" in family for family in families["sm_80"])
    for variants in found.values():
        appended = [variant.name for variant in variants if variant.spec == "append_sm80"]
        for kind in ("e4m3", "latent"):
            assert any(kind in name for name in appended), appended
        assert any("fp8dsmla" in variant.name for variant in variants)
