"""SASS through nvdisasm, where there is one, and the counts of its instructions."""

from __future__ import annotations

import importlib.util

import pytest

from flashgen.errors import BadParam, InternalError
from flashgen.families.load import load_specs
from flashgen.source.render import render
from flashgen.toolchain import compile as fc
from flashgen.toolchain import disassemble
from flashgen.toolchain.disassemble import NoDisassemblerError, mnemonics, nvdisasm, sass, summary

SOURCE = """
extern "C" __global__ void k(float* x) {
  __shared__ float s[32];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = exp2f(s[31 - threadIdx.x]);
}
"""

SPILLING = """
extern "C" __global__ void k(float* x, int n) {
  float r[48], sum = 0;
  #pragma unroll
  for (int i = 0; i < 48; ++i) r[i] = x[i * n];
  for (int j = 0; j < n; ++j)
    #pragma unroll
    for (int i = 0; i < 48; ++i) sum += r[i] = r[i] * r[(i + 1) % 48] + 1;
  x[0] = sum;
}
"""

TEXT = """
        .global         k
k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0020*/              @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R5], desc[UR4][R2.64] ;
        /*0030*/             @UP1 BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/               @P0 HMMA.16816.F32 R4, R8, R12, R4 ;
.L_x_1:
        /*d050*/                   BRA `(.L_x_1);
        /*d060*/                   NOP;
"""


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A machine without nvdisasm."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(disassemble, "_folders", lambda: iter([tmp_path]))
    return tmp_path


@pytest.fixture(scope="module")
def tool():
    try:
        return nvdisasm()
    except NoDisassemblerError as error:
        pytest.skip(str(error))


def fake_tool(folder, script):
    file = folder / "nvdisasm"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def test_counts_ignore_predicates_and_modifiers():
    assert mnemonics(TEXT) == {"LDC": 1, "HMMA": 2, "LDGSTS": 1, "BAR": 1, "BRA": 1, "NOP": 1}
    assert summary(TEXT) == {
        "instructions": 6,
        "HMMA": 2,
        "LDGSTS": 1,
        "LDL": 0,
        "STL": 0,
        "BAR": 1,
        "BRA": 1,
    }


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_instructions_of_a_kernel(tool, arch):
    text = sass(fc.compile_cubin(SOURCE, "k", arch, headers={}).cubin)
    assert ".text.k" in text
    counts = summary(text)
    assert {"LDG", "STG", "LDS", "STS", "MUFU", "BAR"} <= {name for name in counts if counts[name]}
    assert counts["LDL"] == counts["STL"] == 0


def test_spills_are_seen(tool):
    compiled = fc.compile_cubin(SPILLING, "k", "sm_90", ["-maxrregcount=24"], headers={})
    counts = summary(sass(compiled.cubin))
    assert compiled.spill_stores > 0
    assert counts["STL"] > 0
    assert counts["LDL"] > 0


@pytest.mark.parametrize(
    ("name", "arch", "instruction"),
    [
        ("flash_fwd_fp8_hdim64_e4m3_promoted_sm90", "sm_90a", "QGMMA"),
        ("flash_fwd_fp8_hdim64_e4m3_promoted_sm89", "sm_89", "QMMA"),
    ],
)
def test_products_of_codes_are_of_e4m3(tool, name, arch, instruction):
    """Hopper computes the mma.sync of e4m3 with the instructions of fp16, at their rate."""
    variant = next(x for spec in load_specs() for x in spec.variants() if x.name == name)
    counts = mnemonics(sass(fc.compile_cubin(render(variant), name, arch).cubin))
    assert counts[instruction] > 0
    assert not counts.keys() & {"HMMA", "HGMMA"}


def test_a_missing_tool_says_what_to_install(nowhere):
    with pytest.raises(NoDisassemblerError, match=r"pip install .nvidia-cuda-nvdisasm"):
        sass(b"\x7fELF")


def test_a_failing_tool_passes_its_message_on(nowhere):
    fake_tool(nowhere, "echo unknown architecture >&2; exit 3")
    with pytest.raises(InternalError, match="unknown architecture; it may be older"):
        sass(b"\x7fELF")


def test_an_old_tool_gives_way_to_the_next(monkeypatch, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, script in ((old, "exit 3"), (new, "echo NOP")):
        folder.mkdir()
        fake_tool(folder, script)
    monkeypatch.setenv("PATH", f"{old}:/bin:/usr/bin")
    monkeypatch.setattr(disassemble, "_folders", lambda: iter([new]))
    assert sass(b"\x7fELF") == "NOP\n"


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_is_found(monkeypatch, tmp_path, variable):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "toolkit" / "bin").mkdir(parents=True)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "toolkit"))
    file = fake_tool(tmp_path / "toolkit" / "bin", "")
    assert nvdisasm() == file


@pytest.mark.parametrize("layout", ["cu13/bin", "cuda_nvdisasm/bin"])
def test_the_wheel_is_found(monkeypatch, tmp_path, layout):
    for variable in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
    place = tmp_path / "nvidia"
    (place / layout).mkdir(parents=True)
    file = fake_tool(place / layout, "")
    spec = importlib.util.spec_from_loader("nvidia", None)
    spec.submodule_search_locations = [str(place)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    if not (disassemble.Path("/usr/local/cuda/bin") / "nvdisasm").exists():
        assert nvdisasm() == file
    assert file.parent in list(disassemble._folders())


@pytest.mark.parametrize("data", [b"", b"//\n// Generated by NVIDIA NVVM Compiler\n.version 9.0"])
def test_only_machine_code_has_sass(data):
    with pytest.raises(BadParam, match="only machine code has SASS"):
        sass(data)
