"""The C++ of masks by a line: it shows the keys that Python shows, and gives the verdicts of blocks."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from flashgen.call.mask import rule_of
from flashgen.families.load import load_specs
from flashgen.families.masks import load_masks, rule_of_line
from flashgen.families.params import C_TYPES, rule_params
from flashgen.operators.maskblocks import blocks_of
from flashgen.operators.packedrules import packed
from flashgen.operators.rules import RuleOfCall
from flashgen.operators.visibility import visibility_on_host
from flashgen.source.render import render
from flashgen.source.rules import range_function, ranges_functions, rule_functions, runs_of
from flashgen.source.verdicts import spans_of, verdict_functions
from flashgen.toolchain.compile import compile_cubin
from operators.lines import BATCH, HEADS, arrays, random_line

ROWS, KEYS = 16, 24
HOST = """\
#include <cstdint>
#define __device__
#define __forceinline__ inline
struct KeyRange { int begin, end; };
template <typename T> T min(T a, T b) { return a < b ? a : b; }
template <typename T> T max(T a, T b) { return a > b ? a : b; }
inline uint32_t load_global_32(const void* source) { return *static_cast<const uint32_t*>(source); }
inline uint32_t load_global_8(const uint8_t* source) { return *source; }
"""


def struct(rule):
    members = (
        "".join(f"    {param.ctype} {param.name};\n" for param in rule_params(rule)) or "    int none;\n"
    )
    return f"struct Params {{\n{members}}};\n"


def program(rule, number):
    """A function that fills in what each pair sees and the verdict of each block."""
    fill = {"q": "", "kv": "", "block": ""}
    for span in spans_of(rule):
        block, at = {"q": ("rows", "at"), "kv": ("keys", "at"), "block": ("block", "row, key")}[span.position]
        x = f"line_{block}_{span.name}(params, head, {at})"
        if span.row_stride:
            x = f"*line_block_{span.name}_address(params, head, {at}) != 0"
        fill[span.position] += (
            f"const int x = {x};"
            f"{block}.{span.name}_low = is_first ? x : min({block}.{span.name}_low, x);"
            f"{block}.{span.name}_high = is_first ? x : max({block}.{span.name}_high, x);"
        ).join("{}")
    of_scores = ""
    if fill["block"]:
        of_scores = f"""LineBlock block; bool is_first = true;
            for (int row = i; row < min(i + {ROWS}, seqlen_q); ++row)
                for (int key = begin; key < end; ++key, is_first = false) {{ {fill["block"]} }}"""
    in_range = "line_range(params, head, line_row(params, head, i))"
    of_score = "visible(params, head, line_row(params, head, i), line_key(params, head, j))"
    # Where rows and keys that exist, counted from others, or the ranges of a row say something else.
    inside = "visible(params, head, {}, line_key_inside(params, head, j / 8 * 8, j % 8))"
    query = "line_row{}(params, head, i)", "line_row_inside(params, head, i / 8 * 8, i % 8)"
    wrong = f" ^ ({of_score} != (i + seqlen_kv < seqlen_q ? {inside.format(query[0].format(''))} : "
    wrong += f"{inside.format(query[1])}))"
    if range_function(rule):
        wrong += f" ^ ({of_score} != ({in_range}.begin <= j && j < {in_range}.end))"
    functions = ranges_functions(rule)
    if functions and not runs_of(rule):
        of_ranges = [
            f"line_range_{number}(params, head, line_row(params, head, i))"
            for number in range(len(functions))
        ]
        wrong += f" ^ ({of_score} != ({' || '.join(f'({x}.begin <= j && j < {x}.end)' for x in of_ranges)}))"
    if runs_of(rule):
        functions = ()
    return f"""
namespace line_{number} {{
{struct(rule)}
{rule_functions(rule)}

{range_function(rule)}

{"".join(functions)}

{verdict_functions(rule)}

extern "C" void run_{number}(const Params& params, const int* sizes, uint8_t* seen, uint8_t* verdicts) {{
    const int b = sizes[0], h = sizes[1], seqlen_q = sizes[2], seqlen_kv = sizes[3];
    const LineHead head = line_head(params, b, h, seqlen_q, seqlen_kv, sizes[4], sizes[5]);
    for (int i = 0; i < seqlen_q; ++i)
        for (int j = 0; j < seqlen_kv; ++j)
            *seen++ = {of_score}{wrong};
    for (int i = 0; i < seqlen_q; i += {ROWS}) {{
        LineRows rows;
        const int begin = i, end = min(i + {ROWS}, seqlen_q);
        rows.q_low = begin + seqlen_kv - seqlen_q;
        rows.q_high = end - 1 + seqlen_kv - seqlen_q;
        for (int at = begin; at < end; ++at) {{ const bool is_first = at == begin; {fill["q"]} }}
        for (int j = 0; j < seqlen_kv; j += {KEYS}) {{
            LineKeys keys;
            const int begin = j, end = min(j + {KEYS}, seqlen_kv);
            keys.kv_low = begin;
            keys.kv_high = end - 1;
            for (int at = begin; at < end; ++at) {{ const bool is_first = at == begin; {fill["kv"]} }}
            {of_scores}
            *verdicts++ = line_verdict(params, head, rows, keys{", block" if of_scores else ""});
        }}
    }}
}}
}}
"""


def compiled(rules, folder):
    """The programs of several rules, as a library."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    source, library = folder / "lines.cc", folder / "lines.so"
    source.write_text(HOST + "".join(program(rule, number) for number, rule in enumerate(rules)))
    options = (
        "-std=c++17",
        "-O0",
        "-fwrapv",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        "-Wno-unused",
        "-Wno-tautological-compare",
    )
    subprocess.run(["g++", *options, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


def params_of(rule, values, keep):
    """The bytes of the parameter struct. Arrays are contiguous; ``keep`` keeps them alive."""
    numbers: dict[str, int] = {}
    kinds = {"Q": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32}
    for array in rule.arrays:
        x = np.ascontiguousarray(values[array.name], None if array.is_bool else np.int32)
        x = x.reshape((1,) * (len(array.dimensions) - x.ndim) + x.shape)
        keep.append(x)
        names = array.argument().stride_names()
        numbers[f"mask_{array.name}"] = x.ctypes.data
        strides = (
            0 if size == 1 else stride // x.itemsize for size, stride in zip(x.shape, x.strides, strict=True)
        )
        numbers |= dict(zip(names, strides, strict=False))
        numbers |= dict(zip(array.symbols, x.shape, strict=True))
    numbers |= {f"mask_{param.name}": values[param.name] for param in rule.scalars}
    fields = [(param.name, kinds[C_TYPES[param.ctype][1]]) for param in rule_params(rule)]
    kind = type("Params", (ctypes.Structure,), {"_fields_": fields or [("none", ctypes.c_int)]})
    return kind(**{name: numbers[name] for name, _ in fields})


def check(library, number, rule, values, seqlen_q, seqlen_kv):
    sizes = {"batch": BATCH, "num_heads_q": HEADS, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv}
    own = {param.name: values[param.name] for param in rule.arrays}
    integers = tuple(values[param.name] for param in rule.scalars)
    visibility = visibility_on_host(RuleOfCall(rule, integers), own, sizes)
    blocks = blocks_of(visibility, BATCH, HEADS, seqlen_q, seqlen_kv, ROWS, KEYS)
    keep: list[np.ndarray] = []
    params = params_of(rule, values, keep)
    for b, h in ((0, 0), (BATCH - 1, HEADS - 1)):
        seen = np.zeros((seqlen_q, seqlen_kv), np.uint8)
        verdicts = np.zeros((blocks.num_row_blocks, blocks.num_key_blocks), np.uint8)
        numbers = (ctypes.c_int * 6)(b, h, seqlen_q, seqlen_kv, 0, 0)
        run = getattr(library, f"run_{number}")
        run(
            ctypes.byref(params),
            numbers,
            ctypes.c_void_p(seen.ctypes.data),
            ctypes.c_void_p(verdicts.ctypes.data),
        )
        hidden = visibility.hides(b, h, np.arange(seqlen_q)[:, None], np.arange(seqlen_kv))
        np.testing.assert_array_equal(seen != 0, ~np.broadcast_to(hidden, seen.shape), rule.text)
        np.testing.assert_array_equal(verdicts, blocks.verdicts(b, h), rule.text)


def test_random_lines_are_what_python_makes_of_them(tmp_path):
    rng = np.random.default_rng()
    rules = [rule_of_line(random_line(rng, 40)) for _ in range(25)]
    # Products and sums that 32 bits do not hold.
    rules += [
        rule_of_line("q * kv > start[q] * 100000 + n"),
        rule_of_line("abs(start[q] - last[kv]) - -2000000000 < 2147483647 + q + kv"),
        rule_of_line("min(start[q] * 3, last[kv] + last[kv]) % n <= (q - 7) // n"),
        # The remainder is the first member of a row, and reads the second one.
        rule_of_line("start[q] % 31 < kv or start[q] < kv"),
        rule_of_line("kv <= q and (q - kv < n or kv < start[q])"),
    ]
    library = compiled(rules, tmp_path)
    for number, rule in enumerate(rules):
        for seqlen_q, seqlen_kv in ((60, 60), (9, 71), (70, 33)):
            values = arrays(rng, seqlen_kv) | {"n": int(rng.integers(1, 9))}
            if number >= 25:
                large = rng.integers(-(2**31), 2**31, (2, seqlen_kv)).astype(np.int32)
                values |= {"start": large[0], "last": large[1]}
            check(library, number, rule, values, seqlen_q, seqlen_kv)


def test_packed_sequences_read_their_own_tokens(tmp_path):
    rule = rule_of_line("doc[b, q] == doc[b, kv] and kv <= q")
    library = compiled([rule], tmp_path)
    doc = np.sort(np.random.default_rng().integers(0, 9, 100)).astype(np.int32)
    keep: list[np.ndarray] = []
    params = params_of(rule, {"doc": doc[None]}, keep)
    seen, verdicts = np.zeros((30, 30), np.uint8), np.zeros((2, 2), np.uint8)
    numbers = (ctypes.c_int * 6)(1, 0, 30, 30, 50, 50)
    library.run_0(
        ctypes.byref(params),
        numbers,
        ctypes.c_void_p(seen.ctypes.data),
        ctypes.c_void_p(verdicts.ctypes.data),
    )
    own = doc[50:80]
    np.testing.assert_array_equal(seen != 0, (own[:, None] == own) & np.tri(30, dtype=bool))


@pytest.mark.drawn
@pytest.mark.parametrize("name", load_masks(""))
def test_shipped_masks_compile_for_a_gpu(name):
    rule = load_masks("")[name]
    spans = [f"line_{'rows' if x.position == 'q' else 'keys'}_{x.name}" for x in spans_of(rule)]
    reads = "".join(f"    sum += {function}(params, head, threadIdx.x);\n" for function in spans)
    source = f"""\
#include "flashgen/types.cuh"
#include "flashgen/ptx.cuh"
{struct(rule)}
{rule_functions(rule)}

{verdict_functions(rule)}

extern "C" __global__ void probe(Params params, LineRows rows, LineKeys keys, int* out) {{
    const LineHead head = line_head(params, blockIdx.x, blockIdx.y, 77, 99, 0, 0);
    const LineRow row = line_row(params, head, threadIdx.x);
    const LineKey key = line_key(params, head, threadIdx.y);
    int sum = visible(params, head, row, key) + line_verdict(params, head, rows, keys);
{reads}    out[threadIdx.x] = sum;
}}
"""
    assert compile_cubin(source, "probe", "sm_80").spill_stores in (0, None)


# Kernels of masks by a line: both ways to look at a partial block, and packed sequences.
COMPILED = (
    ("flash_fwd_hdim128_bf16_blocks_sm90", "documents", False),
    ("flash_fwd_hdim128_bf16_blocks_gqa_sm90", "window_first", True),
    ("flash_fwd_hdim256_bf16_blocks_gqa_sm90", "documents", True),
    ("flash_bwd_hdim128_bf16_blocks_sm90", "documents", False),
    ("flash_bwd_hdim128_bf16_blocks_ordered_gqa_sm90", "prefix_lm", True),
    ("flash_bwd_hdim64_bf16_blocks_sm90", "neighbourhood", False),
    ("flash_fwd_hdim128_bf16_blocks_sm80", "documents", True),
    ("flash_fwd_hdim64_fp32_blocks_m64_gqa_sm80", "chunks", False),
    ("flash_bwd_hdim128_bf16_blocks_gqa_sm80", "kv <= q + far[h] and doc[b, kv] <= q", False),
    ("flash_bwd_hdim256_bf16_blocks_sm80", "documents", True),
)


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "line", "is_packed"), COMPILED, ids=lambda x: x if type(x) is str else "")
def test_kernels_of_a_line_compile_and_spill_few_registers(name, line, is_packed):
    rule = rule_of(line)
    main = next(x for spec in load_specs() for x in spec.variants() if x.name == name and x.is_main)
    variant = main.lined(packed(rule, False, True) if is_packed else rule)
    resources = compile_cubin(render(variant), variant.name, variant.code_for(variant.min_arch))
    assert resources.spill_stores <= 64  # bytes: none at head_dim 128
