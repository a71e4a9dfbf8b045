"""NVRTC without a GPU: what is compiled, what is read out of the log, and what a failure says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen.errors import CompileError
from flashgen.host.paths import checkout
from flashgen.toolchain import compile as fc

ADD = """#include "lib/add.cuh"
extern "C" __global__ void add(float* x) { x[threadIdx.x] = plus(x[threadIdx.x], 1.f); }
"""
HEADERS = {
    "lib/add.cuh": '#include "lib/base.cuh"\n__device__ float plus(element a, element b) { return a+b; }\n',
    "lib/base.cuh": "using element = float;\n",
}

SPILLING = """
__device__ __noinline__ float churn(float* a, int n) {
  float r[40], sum = 0;
  #pragma unroll
  for (int i = 0; i < 40; ++i) r[i] = a[i * n];
  for (int k = 0; k < n; ++k)
    #pragma unroll
    for (int i = 0; i < 40; ++i) sum += r[i] = r[i] * r[(i + 1) % 40] + 1;
  return sum;
}
extern "C" __global__ void spilling(float* a, int n) { a[0] = churn(a, n); }
extern "C" __global__ void frugal(float* a) {
  __shared__ float s[10];
  s[threadIdx.x] = a[threadIdx.x];
  a[0] = s[9];
}
"""


def tiny(name: str, body: str = "x[threadIdx.x] = 1;") -> str:
    return f'extern "C" __global__ void {name}(float* x) {{ {body} }}\n'


def python(script: str) -> str:
    """What ``script`` prints in a new process that imports the same flashgen."""
    env = os.environ | {"PYTHONPATH": str(Path(fc.__file__).parents[2])}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env
    ).stdout


def test_cubin_is_elf_for_the_asked_architecture():
    compiled = fc.compile_cubin(ADD, "add", "sm_90a", headers=HEADERS)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert b"sm_90a" in compiled.cubin
    program_headers, entry_size, entries = (
        int.from_bytes(compiled.cubin[start:end], "little") for start, end in ((32, 40), (54, 56), (56, 58))
    )
    assert len(compiled.cubin) >= program_headers + entry_size * entries
    assert compiled.arch == "sm_90a"
    assert not compiled.is_ptx
    assert 1 <= compiled.registers <= 255
    assert (compiled.spill_stores, compiled.spill_loads, compiled.stack, compiled.smem_static) == (0, 0, 0, 0)
    assert compiled.seconds > 0


def test_compilation_repeats_byte_for_byte():
    first, second = (fc.compile_cubin(ADD, "add", "sm_80", headers=HEADERS) for _ in range(2))
    assert first.cubin == second.cubin


def test_spills_of_functions_that_were_not_inlined_are_counted():
    compiled = fc.compile_cubin(SPILLING, "spilling", "sm_80", ["-maxrregcount=24"])
    assert compiled.registers == 24
    assert compiled.spill_stores > 0
    assert compiled.spill_loads > 0
    assert compiled.stack > 0


def test_each_kernel_of_a_source_has_its_own_resources():
    compiled = fc.compile_cubin(SPILLING, "frugal", "sm_80")
    other = fc.compile_cubin(SPILLING, "spilling", "sm_80")
    assert compiled.smem_static == 40
    assert other.smem_static == 0
    assert compiled.registers < other.registers


class CachingNvrtc:
    """NVRTC beside a driver: what was compiled before, with equal options, comes without a word of ptxas."""

    def __init__(self, binding, version):
        self.binding, self.version, self.known, self.silent = binding, version, set(), False
        self.flags = []

    def __getattr__(self, name):
        return getattr(self.binding, name)

    def getVersion(self):
        return self.version

    def compileProgram(self, program, flags):
        key = tuple(flags)
        self.flags = flags
        self.silent = "-no-cache" not in flags and key in self.known
        self.known.add(key)
        self.binding.compileProgram(program, flags)

    def getProgramLog(self, program):
        return "" if self.silent else self.binding.getProgramLog(program)


def test_resources_are_known_of_a_kernel_that_the_driver_has_kept(monkeypatch):
    binding = CachingNvrtc(fc.nvrtc(), (13, 0))
    monkeypatch.setattr(fc, "nvrtc", lambda: binding)
    first, second = (fc.compile_cubin(tiny("k"), "k", "sm_80") for _ in range(2))
    assert first.registers == second.registers > 0
    assert second.spill_stores == 0


@pytest.mark.parametrize(("version", "passed"), [((12, 8), False), ((12, 9), True), ((13, 0), True)])
def test_the_option_against_the_drivers_cache_goes_to_compilers_that_know_it(version, passed, monkeypatch):
    binding = CachingNvrtc(fc.nvrtc(), version)
    monkeypatch.setattr(fc, "nvrtc", lambda: binding)
    fc.compile_cubin(tiny("k"), "k", "sm_80")
    assert ("-no-cache" in binding.flags) is passed


LOG = """ptxas info    : 16 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_80'
ptxas info    : Function properties for b
    8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size, 4096 bytes smem
ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 7 registers, 356 bytes cmem[0]
"""


@pytest.mark.parametrize(("name", "expected"), [("b", (255, 12, 20, 8, 4096)), ("a", (7, 0, 0, 0, 0))])
def test_resources_in_the_layout_of_cuda_12(name, expected):
    assert tuple(fc.parse_resources(LOG, name).values()) == expected


def test_resources_that_the_log_does_not_give_are_unknown():
    assert set(fc.parse_resources(LOG, "c").values()) == {None}


def test_ptx_is_text_and_loads_as_a_virtual_architecture():
    ptx = fc.compile_ptx(tiny("k"), "k", "sm_90")
    assert ".target sm_90" in ptx
    assert ".entry k(" in ptx
    compiled = fc.compile_cubin(tiny("k"), "k", "compute_90")
    assert compiled.is_ptx
    assert compiled.cubin.decode() == ptx + "\0"
    assert compiled.registers is None


def test_error_shows_the_failing_line_of_the_source():
    source = "// first\n// second\n" + tiny("k", "x[0] = missing;")
    with pytest.raises(CompileError) as caught:
        fc.compile_cubin(source, "k", "sm_90")
    message = str(caught.value)
    assert "k.cu does not compile for sm_90 with nvrtc" in message
    assert 'k.cu(3): error: identifier "missing" is undefined' in message
    assert "  >     3 | " + source.splitlines()[2] in message
    assert "        2 | // second" in message


def test_error_in_a_header_shows_the_header():
    headers = HEADERS | {"lib/base.cuh": "using element = flaot;\n"}
    with pytest.raises(CompileError, match=r"(?s)base\.cuh\(1\): error.*>     1 \| using element = flaot;"):
        fc.compile_cubin(ADD, "add", "sm_90", headers=headers)


def test_error_of_the_assembler_shows_the_ptx():
    source = tiny("k", 'asm volatile("bogus.f32 %0;" : "=f"(x[0]));')
    with pytest.raises(
        CompileError, match=r"(?s)Not a name of any known instruction.*> +\d+ \| \tbogus\.f32"
    ):
        fc.compile_cubin(source, "k", "sm_90")


def test_many_errors_are_cut_short():
    source = tiny("k", "\n".join(f"x[0] = missing{i};" for i in range(30)))
    with pytest.raises(CompileError, match="and 22 errors more") as caught:
        fc.compile_cubin(source, "k", "sm_90")
    assert str(caught.value).count("identifier") == 8


@pytest.mark.parametrize(("arch", "options"), [("sm_33", ()), ("sm_90", ("--no-such-option",))])
def test_bad_options_are_compile_errors(arch, options):
    with pytest.raises(CompileError, match="nvrtc: error: "):
        fc.compile_cubin(tiny("k"), "k", arch, options)


def test_static_assert_message_survives():
    with pytest.raises(CompileError, match="rows must divide"):
        fc.compile_cubin('static_assert(3 % 2 == 0, "rows must divide");\n' + tiny("k"), "k", "sm_80")


def test_cuda_headers_are_found():
    source = "#include <cuda_fp16.h>\n" + tiny("k", "x[0] = __half2float(__float2half(x[1]));")
    assert fc.compile_cubin(source, "k", "sm_80").cubin


def test_round_trip_through_bytes():
    compiled = fc.compile_cubin(tiny("k"), "k", "sm_80")
    assert fc.Compiled.from_bytes(compiled.to_bytes()) == compiled


@pytest.mark.parametrize("data", [b"", b"\x00\x00\x00\x00", b"\x02\x00\x00\x00{}", b"\xff\xff\xff\xff123"])
def test_foreign_bytes_are_refused(data):
    with pytest.raises(ValueError):
        fc.Compiled.from_bytes(data)


def test_supported_architectures_include_every_target():
    assert {80, 86, 89, 90} <= set(fc.supported_archs())
    assert fc.compiler_version().startswith("nvrtc 1")


def test_the_installed_version_is_read_without_loading_the_library():
    script = """
from flashgen.toolchain import compile as fc
installed = fc.installed_version()
with open("/proc/self/maps") as maps:
    print("libnvrtc.so" in maps.read())
print(installed in (None, fc.compiler_version()))
"""
    assert python(script).split() == ["False", "True"]


@pytest.mark.parametrize(
    ("hide", "message"),
    [("sys.modules['cupy'] = None", "CuPy cannot be imported"), ("patch()", "NVRTC cannot be loaded")],
)
def test_missing_compiler_says_what_to_install(hide, message):
    script = f"""
import sys
def patch():
    import cupy.cuda, types
    def absent():
        raise RuntimeError("no libnvrtc")
    cupy.cuda.nvrtc = types.SimpleNamespace(getVersion=absent)
{hide}
from flashgen.toolchain import compile as fc
from flashgen.errors import NoCompilerError
try:
    fc.compile_cubin("", "k", "sm_80", headers={{}})
except NoCompilerError as error:
    print(error)
"""
    output = python(script)
    assert message in output
    assert f"pip install -e '{checkout()}[cuda13]'" in output


def test_importing_the_module_needs_no_cupy():
    code = "import sys, flashgen.toolchain.compile; print(bool({'cupy', 'numpy'} & set(sys.modules)))"
    assert python(code) == "False\n"
