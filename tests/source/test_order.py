"""A kernel in reading order: prototypes, roles, kernel, functions, assertions."""

from __future__ import annotations

import contextlib
import random
import re
import time

import pytest

from flashgen.families.load import load_specs
from flashgen.source.order import SECTIONS, from_the_top, seams, sections
from flashgen.source.render import render

TEMPLATE = """\
// Constants.
constexpr int kRows = 4;
static_assert(kRows == 4, "rows { are few");

struct Tile {
    int row;

    __device__ __forceinline__ int last() const { return row + kRows; }
};

// Adds a row. The sum is
// in fp32.
template <int kColumns>
__device__ __forceinline__ void add(Tile& tile, int count = kRows,
                                    int step = 1) {
#pragma unroll
    for (int i = 0; i < count; ++i) tile.row += step;  // } is no end
}

__device__ constexpr int twice(int n) { return 2 * n; }

#ifndef FLASHGEN_SIMULATOR
__device__ __forceinline__ void wgmma() {
    asm volatile("{\\n");
}
#endif

// The producer.
__device__ void produce(Tile& tile) {
    add<2>(tile);
}

extern "C" __global__ void __launch_bounds__(32)
kernel(int n) {
    Tile tile = {twice(n)};
    produce(tile);
}
"""
ORDERED = """\
// Constants.
constexpr int kRows = 4;

struct Tile {
    int row;

    __device__ __forceinline__ int last() const { return row + kRows; }
};

template <int kColumns> __device__ void add(Tile& tile, int count = kRows, int step = 1);  // Adds a row
__device__ constexpr int twice(int n);

// The producer.
__device__ void produce(Tile& tile) {
    add<2>(tile);
}

extern "C" __global__ void __launch_bounds__(32)
kernel(int n) {
    Tile tile = {twice(n)};
    produce(tile);
}

// Adds a row. The sum is
// in fp32.
template <int kColumns>
__device__ __forceinline__ void add(Tile& tile, int count,
                                    int step) {
#pragma unroll
    for (int i = 0; i < count; ++i) tile.row += step;  // } is no end
}

__device__ constexpr int twice(int n) { return 2 * n; }

#ifndef FLASHGEN_SIMULATOR
__device__ __forceinline__ void wgmma() {
    asm volatile("{\\n");
}
#endif

static_assert(kRows == 4, "rows { are few");
"""


def test_the_algorithm_comes_before_the_functions_that_it_calls():
    text = re.sub(r"\n{3,}", "\n\n", from_the_top(TEMPLATE, "produce"))
    assert text == ORDERED


def test_a_section_keeps_its_prototypes_and_its_functions_under_its_heading():
    template = """\
__device__ int before() { return 0; }

// ==== visible: which keys a row attends to

struct Range {
    int end;
};

// The keys of a row.
__device__ Range keys_of(int row) { return {row}; }
// ====

__device__ int after() { return 1; }

extern "C" __global__ void kernel() {}
"""
    text = re.sub(r"\n{3,}", "\n\n", from_the_top(template))
    assert (
        text
        == """\
__device__ int before();

// ==== visible: which keys a row attends to

struct Range {
    int end;
};

__device__ Range keys_of(int row);  // The keys of a row
// ====

__device__ int after();

extern "C" __global__ void kernel() {}

__device__ int before() { return 0; }

// ==== visible: which keys a row attends to

__device__ Range keys_of(int row) { return {row}; }
// ====

__device__ int after() { return 1; }

"""
    )


def test_a_section_of_types_alone_has_one_heading():
    text = from_the_top("// ==== score: nothing\n\nstruct Row {};\n\n// ====\n\n__device__ void f() {}\n")
    assert text.count("// ====") == 2


def test_a_section_without_an_end_is_an_error():
    with pytest.raises(ValueError, match=r"the section '// ==== score: s' has no end, a line '// ===='"):
        from_the_top("// ==== score: s\n\n__device__ void f() {}\n")


def test_a_long_prototype_breaks_between_parameters():
    parameters = ", ".join(f"const float (&parameter_{i})[kHeadDim / 2]" for i in range(8))
    text = from_the_top(f"// Many.\n__device__ __forceinline__ void f({parameters}) {{\n}}\n")
    comment, *lines = text.split("\n\n")[0].splitlines()
    assert comment == "// Many"
    assert len(lines) > 1
    assert all(len(line) <= 140 for line in lines)
    assert all(line.endswith((",", ");")) for line in lines)


@pytest.mark.parametrize("spec", load_specs(), ids=lambda spec: spec.name)
def test_shipped_kernels_have_no_function_before_the_roles(spec):
    for step in spec.variants()[0].steps:
        source = render(step)
        before = source[: source.index("__global__")]
        names = re.findall(r"^__device__ [^;{]*?(\w+)\([^;{]*\{", before, re.MULTILINE)
        roles = (
            "produce",
            "consume",
            "transpose_v",
            "put_values",
            "find_tiles",
            "read_mask",
            "main_loop",
            "convert_codes",
        )
        assert [name for name in names if not name.startswith(roles)] == []


@pytest.mark.parametrize("spec", load_specs(), ids=lambda spec: spec.name)
def test_every_line_of_a_shipped_kernel_is_in_one_section(spec, fresh_seed):
    for step in random.Random(fresh_seed).choice(spec.variants()).steps:
        source = render(step)
        parts = sections(source)
        texts = {part.name: part.text for part in parts}
        # A kernel of a few lines has no functions.
        absent = set() if "definitions" in texts else {"verbs", "definitions"}
        assert [part.name for part in parts] == [name for name in SECTIONS if name not in absent]
        assert "".join(part.text for part in parts) == source
        assert all(source.splitlines()[part.first_line - 1] in part.text.split("\n")[0] for part in parts)
        assert f"// {step.name}\n" in texts["header"]
        assert texts["header"].endswith('.cuh"\n\n')
        assert all(line.startswith("//") for line in texts["map"].split("\n") if line)
        assert texts["params"].startswith("struct Params {\n")
        assert "using element" in texts["constants"] or "constexpr" in texts["constants"]
        assert 'extern "C" __global__' in texts["roles"]
        assert not re.search(r"^(__device__|template).*\{$", texts.get("verbs", ""), re.MULTILINE)
        assert texts["assertions"].startswith("static_assert(")


def test_a_seam_is_what_is_between_its_marks():
    text = "// one\n// ==== visible: which keys\nint a;\n\n// ====\n// ====\nint b;\n// ==== score\n// ====\n"
    parts = seams(text)
    assert [(part.name, part.first_line) for part in parts] == [("visible", 2), ("score", 8)]
    assert parts[0].text == "// ==== visible: which keys\nint a;\n\n// ====\n"
    assert seams("// ==== visible: without an end\n") == ()


def test_sections_of_a_kernel_that_is_not_in_reading_order():
    parts = sections(f"// kernel\n#include <cuda_fp16.h>\n\n// Adds.\n\n{TEMPLATE}")
    names = [part.name for part in parts]
    assert names[:4] == ["header", "map", "constants", "assertions"]
    assert "roles" in names
    assert "".join(part.text for part in parts).endswith(TEMPLATE)
    assert sections("") == sections("")
    assert [part.text for part in sections("// words\n")] == ["// words\n"]


def constants(source, element_bytes):
    """The values of the constants of a kernel that are sums, products and quotients of whole numbers."""
    values = {}
    for name, text in re.findall(r"^constexpr int (\w+) = (.*?);", source, re.MULTILINE):
        text = re.sub(r"sizeof\(element\)", str(element_bytes), text).replace("sizeof(float)", "4")
        text = text.replace("sizeof(e4m3)", "1")
        if re.fullmatch(r"[\w+*/() -]+", text):
            with contextlib.suppress(NameError):  # it has a constant of another kind
                values[name] = eval(text.replace("/", "//"), {}, values)
    return values


@pytest.mark.parametrize("spec", load_specs(), ids=lambda spec: spec.name)
def test_the_numbers_of_a_map_are_those_of_the_kernel(spec, fresh_seed):
    for variant in random.Random(fresh_seed).sample(list(spec.variants()), 3):
        for step in variant.steps:
            source = render(step)
            named = re.findall(
                r"^// .*$",
                source[: re.search("^(using|constexpr) ", source, re.MULTILINE).start()],
                re.MULTILINE,
            )
            stated = re.findall(r"\b(k[A-Z]\w+) = (\d+)", "\n".join(named))
            values = constants(source, step.element_bytes)
            assert [(name, values[name]) for name, _ in stated] == [(name, int(n)) for name, n in stated]


@pytest.mark.parametrize("line", ["    f();", "    // words", "    {", "#define x", "// words", "template <"])
def test_it_takes_linear_time(line):
    begin = time.process_time()
    from_the_top("__device__ void f() {\n" + f"{line}\n" * 20_000 + "}\n" + f"{line}\n" * 20_000)
    assert time.process_time() - begin < 2
