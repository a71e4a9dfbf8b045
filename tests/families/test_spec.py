import collections
import itertools
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.errors import BadParam, FlashgenError, SpecError
from flashgen.families.bases import is_of
from flashgen.families.expression import Expression
from flashgen.families.grid import GRID_NUMBERS, Visits
from flashgen.families.load import load_spec, load_specs
from flashgen.families.steps import StepTable
from flashgen.families.variant import Variant
from flashgen.families.yamlfile import Document
from flashgen.host.paths import specs_dir
from flashgen.operators import OPERATORS

FIXTURES = Path(__file__).parents[1] / "fixtures"
TARGETS = "  sm80: {min_arch: sm_80, max_smem: 166912, compile_for: [sm_80, sm_90]}"

# what stands in the file, what replaces it, the text at whose line the error points, what the message says
WRONG = {
    "unknown top-level key": (
        "no_spills: true", "no_spill: true", "no_spill:",
        ["no_spill: unknown key", "allowed: family, operator", "no_spills"]),
    "missing key": ("template: tiny.cu.j2\n", "", "family:", ["`template` is missing"]),
    "wrong type": (
        "family: tiny_fwd", "family: 7", "family:",
        ["family: found 7; expected a name of lower-case letters"]),
    "malformed name": ("family: tiny_fwd", "family: Tiny fwd", "family:", ["family: ", "found 'Tiny fwd'"]),
    "unknown operator": (
        "operator: attention", "operator: convolution", "operator:",
        ["operator: ", "'convolution'",
         "allowed: append, attention, attention_backward, attention_fp8, attention_weights, "
         "latent_attention, mask_lists, merge, quantize, score_gradient, sparse_latent_attention"]),
    "lengths of an operator without them": (
        "operator: attention", "operator: merge\nlengths: device", "lengths:",
        ["lengths: calls of merge have none; only calls of attention, attention_fp8, attention_backward, "
        "latent_attention do"]),
    "option that writes a file": (
        "no_spills: true", "options:\n  - -lineinfo\n  - --time=/tmp/written\nno_spills: true", "  - --time",
        ["options[1]: found '--time=/tmp/written'; expected an option of NVRTC that changes code alone"]),
    "template outside the folders": (
        "template: tiny.cu.j2", "template: /etc/passwd", "template:",
        ["template: found '/etc/passwd'; expected the name of a file below the folders of templates"]),
    "template above the folders": (
        "template: tiny.cu.j2", "template: lib/../../tiny.cu.j2", "template:",
        ["template: found 'lib/../../tiny.cu.j2'; expected the name of a file below"]),
    "header above the folders": (
        "header: flashgen/tiny.cuh", "header: ../tiny.cuh", "header:",
        ["header: found '../tiny.cuh'; expected the name of a file below"]),
    "axis that nobody claims": (
        "  gqa: [mha, gqa, packed]", "  gqa: [mha, gqa, packed]\n  cap: [tanh, none]", "  cap:",
        ["axes.cap: ", "does not say how a call chooses", "it claims head_dim, head_dim_v, dtype"]),
    "value that no call needs": (
        "mask_type: [none, causal]", "mask_type: [none, forest]", "  mask_type:",
        ["axes.mask_type: no call needs `forest`", "allowed: none, causal, local, dense"]),
    "grid that covers nothing": (
        "{query_rows: block_m, heads: 1, batch: 1}", "{}", "  covers:",
        ["grid.covers: found {}; expected a mapping that is not empty"]),
    "value in a mapping of names": (
        "covers: {query_rows: block_m, heads: 1, batch: 1}",
        "covers: {query_rows: block_m, heads: 1.5, batch: 1}", "  covers:",
        ["grid.covers.heads: found 1.5; expected an integer, or an expression"]),
    "malformed name in a mapping": (
        "tile_keys: [block_m, block_n, warps, stages, min_blocks]",
        "tile_keys: [block_m, block_n, warps, stages, min_blocks]\ntile_values:\n  stages: [a]\n  Loop: [a]",
        "  Loop:", ["tile_values.Loop: found 'Loop'; expected a name of lower-case letters"]),
    "malformed value in a mapping": (
        "tile_keys: [block_m, block_n, warps, stages, min_blocks]",
        "tile_keys: [block_m, block_n, warps, stages, min_blocks]\ntile_values:\n  stages: [one, Two]",
        "  stages:",
        ["tile_values.stages[1]: found 'Two'; expected a name of lower-case letters and digits that begins"]),
    "list for a text": ("threads: 32 * warps", "threads: [1]", "threads:", ["found [1]; expected"]),
    "number past its bounds": (
        "{prefer: on_request}", "{prefer: on_request, fill: 2}", "dispatch:",
        ["dispatch.fill: found 2; expected a number of 0 or more and at most 1"]),
    "type that an array's parameter cannot have": (
        "{name: out, type: element*,", "{name: out, type: int64_t,", "  - {name: out",
        ["params[0].type: found 'int64_t'; allowed: element*, tensor_map"]),
    "type that a number's parameter cannot have": (
        "{name: seqlen_q, type: int32_t,", "{name: seqlen_q, type: float*,", "  - {name: seqlen_q",
        ["params[1].type: found 'float*'; allowed: int64_t"]),
    "dimension that the operator does not have": (
        "{query_rows: block_m, heads: 1, batch: 1}", "{query_rows: block_m, heads: 1, batches: 1}",
        "  covers:", ["grid.covers.batches: ", "allowed: query_rows, key_rows, heads, kv_heads, batch"]),
    "algorithm that is no short name": (
        "family: tiny_fwd", "family: tiny_fwd\nalgorithm: flash_2", "algorithm:",
        ["algorithm: ", "'flash_2'"]),
    "unknown dispatch rule": (
        "{prefer: on_request}", "{prefer: newest}", "dispatch:",
        ["dispatch.prefer: ", "'newest'", "allowed: least_time, on_request"]),
    "dependent launch that is no boolean": (
        "no_spills: true", "dependent_launch: 1", "dependent_launch:",
        ["dependent_launch: found 1; expected true or false"]),
    "empty axis": ("[none, causal]", "[]", "  mask_type:", ["axes.mask_type: "]),
    "repeated axis value": ("[none, causal]", "[none, none]", "  mask_type:", ["axes.mask_type: ", "twice"]),
    "axis value of a wrong kind": (
        "[none, causal]", "[none, 1.5]", "  mask_type:", ["axes.mask_type[1]: ", "1.5"]),
    "axis with a reserved name": (
        "  head_dim: [32, 64]", "  threads: [32, 64]", "  threads:", ["`threads` is reserved"]),
    "tile key that is an axis": (
        "[block_m, block_n, warps, stages, min_blocks]",
        "[block_m, block_n, warps, stages, min_blocks, dtype]", "tile_keys:",
        ["tile_keys[5]: ", "`dtype` is already"]),
    "tile value of a key that is none": (
        "tile_keys: [block_m, block_n, warps, stages, min_blocks]",
        "tile_keys: [block_m, block_n, warps, stages, min_blocks]\ntile_values: {loop: [turns]}",
        "tile_values:", ["tile_values.loop: ", "no tile key", "block_m, block_n"]),
    "default of a tile key that is none": (
        "tile_keys: [block_m, block_n, warps, stages, min_blocks]",
        "tile_keys: [block_m, block_n, warps, stages, min_blocks]\ntile_defaults: {loop: 1}",
        "tile_defaults:", ["tile_defaults.loop: ", "no tile key", "block_m, block_n"]),
    "default that is no value of its tile key": (
        "tile_keys: [block_m, block_n, warps, stages, min_blocks]",
        "tile_keys: [block_m, block_n, warps, stages, min_blocks]\ntile_defaults: {stages: many}",
        "tile_defaults:", ["tile_defaults.stages: found 'many'; expected an integer"]),
    "tile value that is none of the names": (
        "tile_keys: [block_m, block_n, warps, stages, min_blocks]",
        "tile_keys: [block_m, block_n, warps, stages, min_blocks]\ntile_values: {stages: [one, two]}",
        "  - {", ["tiles[0].stages: "]),
    "value of two axes": (
        "[none, causal]", "[none, fp16]", "  mask_type:", ["`fp16` stands in dtype as well"]),
    "no dtype axis": (
        "  dtype: [fp16, fp32]", "  type: [fp16, fp32]", "axes:", ["axes: ", "`dtype` is missing"]),
    "value in exclude": (
        "{dtype: fp32, gqa: packed}", "{dtype: fp64, gqa: packed}", "  - {dtype: fp64",
        ["exclude[0].dtype: ", "'fp64'", "allowed: fp16, fp32"]),
    "unknown axis in exclude": (
        "{dtype: fp32, gqa: packed}", "{dtyp: fp32, gqa: packed}", "  - {dtyp:",
        ["exclude[0].dtyp: unknown key", "allowed: head_dim, dtype, mask_type, gqa, target"]),
    "unknown key of a target": (
        TARGETS, TARGETS.replace("max_smem", "smem"), "  sm80:",
        ["targets.sm80.smem: unknown key", "min_arch, max_smem, compile_for"]),
    "malformed architecture": (
        TARGETS, TARGETS.replace("sm_90]", "sm90]"), "  sm80:", ["compile_for[1]", "'sm90'"]),
    "element size of an unknown dtype": (
        "{fp16: 2, fp32: 4}", "{fp16: 2, fp32: 4, e4m3: 1}", "element_bytes:",
        ["element_bytes.e4m3: ", "allowed: fp16, fp32"]),
    "element size missing": ("{fp16: 2, fp32: 4}", "{fp16: 2}", "element_bytes:", ["`fp32` is missing"]),
    "unknown name in an expression": (
        "threads: 32 * warps", "threads: 32 * wraps", "threads:", ["threads: unknown name 'wraps'", "warps"]),
    "code in an expression": (
        "threads: 32 * warps", "threads: __import__('os').getpid()", "threads:",
        ["threads: ", "is not allowed", "min(), max()"]),
    "thread count that is no block": (
        "threads: 32 * warps", "threads: 33 * warps", "  - {block_m: 128, block_n: 32",
        ["tiles[1]: 132 threads", "head_dim=32", "multiples of 32"]),
    "division by zero": (
        "threads: 32 * warps", "threads: 32 * warps // (stages - 1)", "  - {block_m: 128, block_n: 32",
        ["tiles[1]: ", "cannot be computed"]),
    "unknown key of a row": (
        "block_m: 64, block_n: 32", "block_m: 64, blok_n: 32", "  - {name: m64",
        ["tiles[2].blok_n: unknown key", "allowed: head_dim", "block_n"]),
    "tile key missing": (
        "stages: 2, min_blocks", "min_blocks", "  - {target: sm80", ["tiles[0]: ", "`stages` is missing"]),
    "tile value of a wrong type": (
        "block_m: 64,", "block_m: big,", "  - {name: m64",
        ["tiles[2].block_m: found 'big'; expected an integer of 0 or more"]),
    "unknown target of a row": (
        "{target: sm80, head_dim: 64, block_m", "{target: sm90, head_dim: 64, block_m", "  - {target: sm90",
        ["tiles[0].target: ", "'sm90'", "allowed: sm80, sm86"]),
    "axis value of a row": (
        "{target: sm80, head_dim: 64, block_m", "{target: sm80, head_dim: [64, 96], block_m",
        "  - {target: sm80", ["tiles[0].head_dim[1]: ", "96", "allowed: 32, 64"]),
    "too much shared memory": (
        "block_m: 128, block_n: 32, warps", "block_m: 128, block_n: 512, warps",
        "  - {block_m: 128, block_n: 512",
        ["tiles[1]: 147456 bytes", "head_dim=32 dtype=fp32", "target=sm86", "at most 101376"]),
    "uncovered point": (
        "  - {block_m: 128, block_n: 32", "  - {head_dim: 32, block_m: 128, block_n: 32", "tiles:",
        ["no row without a name serves head_dim=64 dtype=fp16 mask_type=none gqa=mha target=sm86"]),
    "row that never applies": (
        "  - {name: m64",
        "  - {target: sm86, block_m: 64, block_n: 32, warps: 4, stages: 1, min_blocks: 2}\n  - {name: m64",
        "  - {target: sm86, block_m", ["tiles[2]: the row never applies"]),
    "promise for an architecture that is not compiled": (
        "efficiency: 0.75", "target: sm86, no_spills: [sm_86, sm_90]", "  - {name: m64",
        ["tiles[2].no_spills[1]: no target of the row is compiled for sm_90; allowed: sm_86"]),
    "rate without an end": (
        "efficiency: 0.75", "efficiency: .inf", "  - {name: m64", ["tiles[2].efficiency: "]),
    "promise made twice": (
        "efficiency: 0.75", "no_spills: [sm_80, sm_86, sm_80]", "  - {name: m64",
        ["tiles[2].no_spills[2]: sm_80 occurs twice"]),
    "promise for nothing": ("efficiency: 0.75", "no_spills: []", "  - {name: m64", ["tiles[2].no_spills: "]),
    "promise that is neither": (
        "efficiency: 0.75", "no_spills: some", "  - {name: m64", ["tiles[2].no_spills: ", "'some'"]),
    "rate of zero": ("efficiency: 0.75", "efficiency: 0", "  - {name: m64", ["efficiency: ", "above 0"]),
    "reserved tile name": (
        "name: m64", "name: default", "  - {name: default, dtype", ["tiles[2].name: `default`"]),
    "tile named as an axis value": (
        "name: m64", "name: causal", "  mask_type:", ["`causal` stands in tiles as well"]),
    "the name of tuned tiles": ("name: m64", "name: tuned", "  - {name: tuned", ["tiles[2].name: `tuned`"]),
    "axis value that would name a tuned tile": (
        "[none, causal]", "[none, tuned]", "  mask_type:", ["`tuned` stands in tiles as well"]),
    "unknown key of a range": (
        "{from: 32, to: 112, step: 40}", "{from: 32, to: 112, by: 40}", "  - {head_dim: 64, block_m: [64",
        ["tune[0].block_n.by: unknown key", "allowed: from, to, step"]),
    "empty range": (
        "{from: 32, to: 112, step: 40}", "{from: 112, to: 32, step: 40}", "  - {head_dim: 64, block_m: [64",
        ["tune[0].block_n: from 112 to 32 is empty"]),
    "step of zero": (
        "{from: 32, to: 112, step: 40}", "{from: 32, to: 112, step: 0}", "  - {head_dim: 64, block_m: [64",
        ["tune[0].block_n.step: "]),
    "value to try of a wrong type": (
        "warps: [4, 8]", "warps: [4, many]", "  - {head_dim: 64, block_m: [64",
        ["tune[0].warps[1]: ", "'many'"]),
    "nothing to try": (
        "{dtype: fp16, block_m: 64}", "{dtype: fp16}", "  - {dtype: fp16}",
        ["tune[1]: no values to try; name some of block_m, block_n"]),
    "search where there is no kernel": (
        "{dtype: fp16, block_m: 64}", "{dtype: fp32, gqa: packed, block_m: 64}",
        "  - {dtype: fp32, gqa: packed, block_m: 64}", ["tune[1]: the row never applies"]),
    "unknown C type": (
        "type: int32_t, doc: rows", "type: int16_t, doc: rows", "  - {name: seqlen_q",
        ["allowed: bf16*, const bf16*, const e4m3*, const element*"]),
    "repeated parameter": (
        "{name: scale_log2", "{name: out", "  - {name: out, type: float",
        ["params[4].name: a second parameter is called `out`", "no key of `when`"]),
    "repeated parameter where both exist": (
        "{name: scale_log2, type: float}",
        "{name: diagonal_offset, type: float, when: {mask_type: [none, causal], warps: 8}}",
        "  - {name: diagonal_offset, type: float",
        ["params[4].name: a second parameter is called `diagonal_offset`", "no key of `when`"]),
    "repeated parameter under conditions on different keys": (
        "{name: scale_log2, type: float}", "{name: diagonal_offset, type: float, when: {warps: 8, gqa: mha}}",
        "  - {name: diagonal_offset, type: float",
        ["params[4].name: a second parameter is called `diagonal_offset`"]),
    "parameter that a third one of its name meets": (
        "{name: scale_log2, type: float}",
        "{name: diagonal_offset, type: float, when: {mask_type: none}}\n"
        "  - {name: diagonal_offset, type: int64_t, when: {warps: 8}}",
        "  - {name: diagonal_offset, type: int64_t",
        ["params[5].name: a second parameter is called `diagonal_offset`"]),
    "condition of a parameter": (
        "when: {mask_type: causal}", "when: {mask_type: casual}", "  - {name: diagonal_offset",
        ["params[3].when.mask_type: ", "'casual'", "allowed: causal, none"]),
    "condition of a parameter on nothing": (
        "when: {mask_type: causal}", "when: {warp: 8}", "  - {name: diagonal_offset",
        ["params[3].when.warp: unknown key; allowed: head_dim, dtype, mask_type, gqa, block_m",
         "min_blocks"]),
    "condition of a parameter on a target": (
        "when: {mask_type: causal}", "when: {target: sm80}", "  - {name: diagonal_offset",
        ["params[3].when.target: unknown key"]),
    "tile value of a wrong type in a condition": (
        "when: {mask_type: causal}", "when: {warps: many}", "  - {name: diagonal_offset",
        ["params[3].when.warps: ", "found 'many'"]),
    "tile value below zero in a condition": (
        "when: {mask_type: causal}", "when: {warps: [8, -1]}", "  - {name: diagonal_offset",
        ["params[3].when.warps[1]: found -1; expected an integer of 0 or more"]),
    "range of tile values in a condition": (
        "when: {mask_type: causal}", "when: {warps: {from: 4, to: 8, step: 4}}", "  - {name: diagonal_offset",
        ["params[3].when.warps: "]),
    "condition with no tile value": (
        "when: {mask_type: causal}", "when: {warps: []}", "  - {name: diagonal_offset",
        ["params[3].when.warps: "]),
    "doc that would continue a comment": (
        "doc: rows", "doc: 'rows\\'", "  - {name: seqlen_q", ["params[1].doc: "]),
    "unknown tile in commit": (
        "name: default}", "name: m32}", "  - {head_dim: 64, dtype", ["allowed: default, m64"]),
    "repeated key": (
        "family: tiny_fwd", "family: tiny_fwd\nfamily: other", "family: other", ["family: ", "twice"]),
    "broken YAML": ("axes:", "axes: [", "  dtype:", ["not valid YAML"]),
    "a scalar that is not what its tag says": (
        "max_smem: 101376", "max_smem: !!int lots", "  sm86:", ["'lots'"]),
}  # fmt: skip

OPTIONS = [
    "--use_fast_math",
    "-use_fast_math",
    "--ftz=true",
    "--prec-div=false",
    "--prec-sqrt=false",
    "--fmad=false",
    "--maxrregcount=64",
    "-maxrregcount=64",
    "--restrict",
    "--extra-device-vectorization",
    "--device-int128",
    "--ptxas-options=-O1",
    "--ptxas-options=--allow-expensive-optimizations=true",
    "-DX",
    "-DX=3",
    "-D_x=1.5e-3f",
    "--define-macro=X=3",
    "-UX",
    "--undefine-macro=X",
    "--diag-suppress=177",
    "-w",
    "-lineinfo",
    "--generate-line-info",
    "-G",
    "--device-debug",
]
REFUSED = [
    *("--time=/tmp/x", "-time=/tmp/x", "--fdevice-time-trace=/tmp/x", "-fdevice-time-trace=/tmp/x"),
    *("--create-pch=/tmp/x", "--use-pch=/tmp/x", "--pch", "--pch-dir=/tmp", "-pch-dir=/tmp"),
    *("-I/tmp", "-I /tmp", "--include-path=/tmp", "--pre-include=/etc/passwd", "-include=/etc/passwd"),
    *("--ptxas-options=-o/tmp/x", "--ptxas-options=-v,-o,/tmp/x", "--ptxas-options=@/tmp/x", "-Xptxas=-o"),
    *("-lineinfo --time=/tmp/x", "-lineinfo\n", "\n-lineinfo", "-w\n--time=/tmp/x", "-DX=$(id)", "-DX=1 -I/"),
    *("-DX=/tmp/x", "-D", "--maxrregcount=", "--maxrregcount=64,1", "--ftz=maybe", "--std=c++20"),
    *("-arch=sm_80", "", " ", "@/tmp/options", "--options-file=/tmp/x", "-dlto"),
]


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_changes_code_alone_is_taken(option, edit_spec):
    path = edit_spec("no_spills: true", f"no_spills: true\noptions: [{json.dumps(option)}]")
    assert load_spec(path).variants()[0].options == (option,)


@pytest.mark.parametrize("option", REFUSED)
def test_every_other_option_is_refused(option, edit_spec):
    path = edit_spec("no_spills: true", f"no_spills: true\noptions: [{json.dumps(option)}]")
    with pytest.raises(
        SpecError, match=r"tiny\.yaml:\d+: options\[0\]: found .*; expected an option of NVRTC"
    ):
        load_spec(path)


def test_nvrtc_takes_the_options_and_writes_no_file(tmp_path, monkeypatch):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    from flashgen.toolchain.compile import compile_cubin

    monkeypatch.chdir(tmp_path)
    before = list(tmp_path.iterdir())
    for option in OPTIONS:
        assert compile_cubin('extern "C" __global__ void kernel() {}', "kernel", "sm_90", [option], {}).cubin
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_spec_names_file_line_and_key(case, tiny_folder, edit_spec):
    old, new, pointed, said = WRONG[case]
    # One quoting style for values keeps the table of cases readable.
    path = tiny_folder / "specs" / "tiny.yaml"
    path.write_text(path.read_text().replace('doc: "rows"', "doc: rows"))
    path = edit_spec(old, new)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    message = str(caught.value)
    for part in said:
        assert part in message
    file, line = re.match(r"(.*?):(\d+): ", message).groups()
    assert file == str(path)
    lines = path.read_text().splitlines()
    assert lines[int(line) - 1].startswith(pointed), f"line {line} of {message}"


def test_spec_error_is_what_callers_catch():
    assert issubclass(SpecError, FlashgenError)
    assert issubclass(SpecError, ValueError)


@pytest.mark.parametrize("text", ["", "- a list\n", "a: &a [*a]\n", "\xff"])
def test_a_file_that_is_no_mapping(text, tmp_path):
    path = tmp_path / "odd.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SpecError, match=re.escape(str(path))):
        load_spec(path)


def test_variants_are_the_product_without_the_excluded(tiny_spec):
    points = {
        (v.head_dim, v.dtype, v.mask_type, v.gqa, v.target) for v in tiny_spec.variants() if not v.tile_name
    }
    product = itertools.product(*tiny_spec.axes.values(), tiny_spec.targets)
    assert points == {point for point in product if (point[1], point[3]) != ("fp32", "packed")}


def test_names_are_unique_and_say_the_point(tiny_variants):
    names = [v.name for v in tiny_variants]
    assert len(set(names)) == len(names)
    assert "tiny_fwd_hdim32_fp16_causal_m64_packgqa_sm86" in names


def test_first_matching_row_wins_for_each_tile_name(tiny_spec):
    (default, m64) = tiny_spec.select(head_dim=64, dtype="fp16", mask_type="none", gqa="mha", target="sm80")
    assert (default.tile_name, default.tile_value("warps"), default.threads) == ("", 8, 256)
    assert (m64.tile_name, m64.tile_value("warps"), m64.dispatch.efficiency) == ("m64", 4, 0.75)
    (other, _) = tiny_spec.select(head_dim=64, dtype="fp16", mask_type="none", gqa="mha", target="sm86")
    assert other.tile_value("warps") == 4


def test_shared_memory_follows_the_expression(tiny_variants):
    for v in tiny_variants:
        tile = dict(v.tile)
        rows = tile["block_m"] + 2 * tile["stages"] * tile["block_n"]
        assert v.smem_bytes == rows * v.head_dim * {"fp16": 2, "fp32": 4}[v.dtype] <= v.max_smem


def test_parameters_exist_where_their_condition_holds(tiny_variants):
    for v in tiny_variants:
        assert ("diagonal_offset" in [p.name for p in v.params]) == (v.mask_type == "causal")


@given(
    params=st.lists(
        st.tuples(
            st.sampled_from(["seqlen_q", "seqlen_kv"]),
            st.sets(st.sampled_from(["none", "causal"])),
            st.sets(st.sampled_from([4, 8, 16])),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_two_parameters_of_one_name_need_conditions_that_keep_them_apart(params, tmp_path_factory):
    """An empty set stands for no condition. What is refused is decided by key, so it holds for any tile."""
    rows = []
    for name, masks, warps in params:
        when = {key: sorted(values) for key, values in (("mask_type", masks), ("warps", warps)) if values}
        rows.append(f"  - {{name: {name}, type: int32_t, when: {json.dumps(when)}}}")
    text = (FIXTURES / "specs" / "tiny.yaml").read_text()
    path = tmp_path_factory.mktemp("params") / "tiny.yaml"
    path.write_text(re.sub(r"(?<=^params:\n)(?:  - .*\n)+", "\n".join(rows) + "\n", text, flags=re.M))
    every = {"masks": {"none", "causal"}, "warps": {4, 8, 16}}
    meeting = [
        (i, j)
        for (j, (name, masks, warps)), (i, other) in itertools.combinations(enumerate(params), 2)
        if name == other[0]
        and (masks or every["masks"]) & (other[1] or every["masks"])
        and (warps or every["warps"]) & (other[2] or every["warps"])
    ]
    if meeting:
        at = min(i for i, _ in meeting)
        with pytest.raises(SpecError, match=rf"params\[{at}\].name: a second parameter"):
            load_spec(path)
        return
    for v in load_spec(path).variants():
        here = [p.name for p in v.params]
        assert len(set(here)) == len(here)
        assert here == [
            name
            for name, masks, warps in params
            if v.mask_type in (masks or every["masks"]) and v.tile_value("warps") in (warps or every["warps"])
        ]


def test_commit_marks_points_and_tiles(tiny_variants):
    for v in tiny_variants:
        first = (v.head_dim, v.dtype, v.target, v.tile_name) == (64, "fp16", "sm80", "")
        second = (v.head_dim, v.mask_type, v.gqa) == (32, "causal", "mha")
        assert v.committed == (first or second)


def test_priority_follows_the_order_of_targets(tiny_variants):
    assert {(v.target, v.priority) for v in tiny_variants} == {("sm80", 0), ("sm86", 1)}


def test_a_point_can_be_excluded_on_one_target(edit_spec):
    spec = load_spec(edit_spec("{dtype: fp32, gqa: packed}", "{dtype: fp32, head_dim: 64, target: sm86}"))
    assert spec.select(dtype="fp32", head_dim=64, target="sm80")
    assert not spec.select(dtype="fp32", head_dim=64, target="sm86")


@given(data=st.data())
def test_select_is_filtered_variants(data, tiny_spec):
    wanted = {}
    for axis, values in tiny_spec.axes.items():
        choice = data.draw(
            st.none() | st.sampled_from(values) | st.lists(st.sampled_from(values), unique=True)
        )
        if choice is not None:
            wanted[axis] = choice
    allowed = {axis: choice if isinstance(choice, list) else [choice] for axis, choice in wanted.items()}
    expected = [v for v in tiny_spec.variants() if all(v.axis(axis) in allowed[axis] for axis in allowed)]
    assert set(tiny_spec.select(**wanted)) == set(expected)


def test_select_knows_its_axes(tiny_spec):
    assert tiny_spec.select(head_dim=33) == ()
    with pytest.raises(BadParam, match="no axis headdim; it has head_dim"):
        tiny_spec.select(headdim=32)


def test_a_users_folder_adds_and_overrides(tiny_folder, edit_spec, monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHGEN_SPECS", raising=False)
    shipped = [spec.name for spec in load_specs()]
    assert [spec.name for spec in load_specs(tiny_folder / "specs")] == [*shipped, "tiny"]
    override = tmp_path / "mine"
    override.mkdir()
    text = (tiny_folder / "specs" / "tiny.yaml").read_text()
    (override / "tiny.yaml").write_text(
        text.replace("head_dim: [32, 64]", "head_dim: [64]").replace("head_dim: 32", "head_dim: 64")
    )
    monkeypatch.setenv("FLASHGEN_SPECS", os.pathsep.join([str(tiny_folder / "specs"), str(override)]))
    specs = {spec.name: spec for spec in load_specs()}
    assert list(specs) == [*shipped, "tiny"]
    assert specs["tiny"].axes["head_dim"] == (64,)
    assert load_specs(tiny_folder / "specs")[-1].axes["head_dim"] == (32, 64)


def test_specs_of_an_operator_are_read_without_the_others(tiny_folder, edit_spec, monkeypatch):
    monkeypatch.delenv("FLASHGEN_SPECS", raising=False)
    by_operator = collections.defaultdict(list)
    for spec in load_specs():
        for key in (spec.operator, (spec.operator, spec.has_lengths)):
            by_operator[key].append(spec.name)
    for operator in OPERATORS:
        assert [spec.name for spec in load_specs(operator=operator)] == by_operator[operator]
        for has_lengths in (False, True):
            specs = load_specs(operator=operator, has_lengths=has_lengths)
            assert [spec.name for spec in specs] == by_operator[operator, has_lengths]
    edit_spec("no_spills: true", "no_spill: true")
    folder = tiny_folder / "specs"
    load_specs(folder, operator="merge")
    with pytest.raises(SpecError, match="no_spill: unknown key"):
        load_specs(folder, operator="attention")


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("operator: attention", True),
        ("operator : 'attention'", True),
        ("operator: merge  # as attention", False),
        ("operator: attention_backward", False),
        ('"operator": merge', True),  # not said plainly: only a parser knows
    ],
)
def test_the_operator_of_a_text(line, read, tmp_path):
    text = f"family: mine\n{line}\n  operator: nested\n".encode()
    assert is_of("attention", tmp_path / "mine.yaml", text) is read
    (tmp_path / "base.yaml").write_bytes(text)
    assert is_of("attention", tmp_path / "other.yaml", b"extends: base\nfamily: other\n") is read


@pytest.mark.parametrize(
    ("line", "device"),
    [
        ("lengths: device", True),
        ("'lengths' : \"device\"  # of sequences", True),
        ("lengths: none", False),
        ("# lengths: device", False),
    ],
)
def test_whether_kernels_of_a_text_read_lengths(line, device, tmp_path):
    text = f"operator: attention\n{line}\n".encode()
    for has_lengths in (False, True):
        assert is_of("attention", tmp_path / "mine.yaml", text, has_lengths) is (has_lengths is device)
        assert not is_of("merge", tmp_path / "mine.yaml", text, has_lengths)
    (tmp_path / "base.yaml").write_bytes(text)
    assert is_of("attention", tmp_path / "other.yaml", b"extends: base\nfamily: other\n", device)
    assert is_of("attention", tmp_path / "other.yaml", b"extends: base\nlengths: device\n", True)
    assert is_of("attention", tmp_path / "other.yaml", b"extends: base\nlengths: none\n", False)


def test_two_families_must_not_share_names(tiny_folder):
    spec = tiny_folder / "specs" / "tiny.yaml"
    spec.with_name("twin.yaml").write_text(spec.read_text())
    with pytest.raises(SpecError, match=r"twin\.yaml:2: family: .*tiny\.yaml has a family `tiny_fwd`"):
        load_specs(spec.parent)


def test_an_axis_may_keep_two_files_of_a_family_apart(tiny_folder):
    spec = tiny_folder / "specs" / "tiny.yaml"
    text = re.sub(r"head_dim: (\[32, 64\]|32|64)", "head_dim: 96", spec.read_text())
    text = text.replace("head_dim: 96\n", "head_dim: [96]\n", 1)
    spec.with_name("twin.yaml").write_text(text)
    twins = [s for s in load_specs(spec.parent) if s.family == "tiny_fwd"]
    names = [variant.name for twin in twins for variant in twin.variants()]
    assert len(twins) == 2
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_specs(exists, tmp_path):
    folder = tmp_path / "empty"
    if exists:
        folder.mkdir()
    with pytest.raises(SpecError, match=re.escape(str(folder))):
        load_specs(folder)


def test_another_ending_is_not_passed_over(tiny_folder):
    (tiny_folder / "specs" / "tiny.yaml").rename(tiny_folder / "specs" / "tiny.yml")
    with pytest.raises(SpecError, match=r"tiny\.yml: .*rename"):
        load_specs(tiny_folder / "specs")


def test_shipped_specs_are_complete():
    """The product that the shipped family promises, and a committed slice that a person can review."""
    variants = [v for spec in load_specs() for v in spec.variants()]
    assert 1 <= sum(v.committed for v in variants) <= 60
    forward = [v for v in variants if v.spec == "flash_fwd_sm80"]
    points = {((v.head_dim, v.head_dim_v), v.dtype, v.mask_type, v.gqa, v.target) for v in forward}
    alike = [(width, width) for width in (32, 64, 96, 128, 192, 256)]
    masks = {
        *itertools.product(("none", "causal", "local", "dense"), ("mha", "gqa", "packed")),
        *itertools.product(("blocks",), ("mha", "gqa")),
    }
    widths = {
        *itertools.product(alike, ("fp16", "bf16", "fp32")),
        *itertools.product([(80, 80), (112, 112), (160, 160), (192, 128)], ("fp16", "bf16")),
    }
    assert points == {
        (*of_width, *mask, target)
        for of_width, mask, target in itertools.product(widths, masks, ("sm80", "sm86"))
    }


def test_what_a_step_takes_is_computed_once_for_the_points_at_which_it_is_the_same(monkeypatch):
    specs, computed, each = load_specs(), StepTable._computed, []

    def counted(*arguments):
        each.append(None)
        return computed(*arguments)

    monkeypatch.setattr(StepTable, "_computed", counted)
    load_specs()
    seldom = len(each)
    monkeypatch.setattr(StepTable, "at", counted)  # at every point anew
    assert [spec.content for spec in load_specs()] == [spec.content for spec in specs]
    assert len(each) - seldom > 5 * seldom


def test_loading_costs_by_the_line_and_makes_no_variant(monkeypatch):
    """However many variants a file describes, it is parsed once, each of its places is checked once, what a
    tile needs is computed once for the points at which it is the same, and no variant is made before someone
    asks for it."""
    calls = collections.defaultdict(list)

    def record(owner, name):
        """The arguments of each call of a method from now on."""
        method = getattr(owner, name)

        def recorded(self, *arguments, **members):
            calls[method].append(arguments)
            return method(self, *arguments, **members)

        monkeypatch.setattr(owner, name, recorded)
        return calls[method]

    parsed, checked = record(Document, "__init__"), record(Document, "convert")
    computed, made = record(Expression, "__call__"), record(Variant, "__init__")
    spec = load_spec(specs_dir() / "flash_fwd_sm80.yaml")
    assert len(parsed) == 1
    places = collections.Counter((place, type) for place, _, type in checked)
    assert set(places.values()) == {1}
    grid = next(iter(spec.content.entries.values()))[0].steps[0].grid
    of_a_tile = 2 + len(grid.covers) + len(GRID_NUMBERS) + len(Visits._fields)
    tiles = sum(map(len, spec.content.entries.values()))
    assert len(computed) % of_a_tile == 0
    assert len(computed) < of_a_tile * tiles / 2
    assert not made
    spec.select(
        head_dim=64, dtype="fp16", mask_type="none", sinks="none", dropout="none", gqa="mha", target="sm80"
    )
    assert len(made) == 3


SHARES = (specs_dir() / "flash_decode_sm80.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "place", "why"),
    [
        ("schedule: shares", "schedule: persistent", r"steps\[1\]\.combines", "only a step after a main one"),
        ("  - name: combine\n    combines: true", "  - name: combine", None, None),
        ("    main: true\n", "    main: true\n    combines: true\n", r"steps\[0\]\.combines",
         "only a step after"),
        ("rows_at_most: 64", "rows_at_most: 0", r"dispatch\.rows_at_most", "0"),
        ("split_gain: 4", "split_gain: 0 - 1", r"tiles\[0\]", "below 1"),
    ],
)  # fmt: skip
def test_what_a_family_of_shares_may_say(old, new, place, why, tmp_path):
    assert SHARES.count(old) == 1
    path = tmp_path / "flash_decode_sm80.yaml"
    path.write_text(SHARES.replace(old, new))
    if place is None:
        assert not any(variant.combines for variant in load_spec(path).variants())
        return
    with pytest.raises(SpecError, match=rf"{place}: .*{re.escape(why)}"):
        load_spec(path)


def test_a_step_may_stay_out_of_generated(tmp_path):
    path = tmp_path / "flash_decode_sm80.yaml"
    for text, steps in (
        (SHARES, {"decode", "combine"}),
        (SHARES.replace("combines:", "commit: false\n    combines:"), {"decode"}),
    ):
        path.write_text(text)
        assert {v.step for v in load_spec(path).variants() if v.committed} == steps


@pytest.mark.parametrize("name", ["flash_decode_sm80", "flash_decode_sm90"])
def test_parts_of_keys_are_of_kv_blocks(name, tmp_path):
    text = (specs_dir() / f"{name}.yaml").read_text(encoding="utf-8")
    path = tmp_path / f"{name}.yaml"
    path.write_text(re.sub(r"^( *)visits:\n(\1  .*\n)+", "", text, flags=re.MULTILINE))
    with pytest.raises(SpecError, match=r"grid\.schedule: .*`visits` is missing"):
        load_spec(path)


GROUPS = (specs_dir() / "flash_bwd_sm90.yaml").read_text(encoding="utf-8")
SUM_WHEN = "    when: {gqa: gqa}\n    template"
SUM_GRID = "{key_rows: 16, kv_heads: 1, batch: 1}"
STEP = "step_rows: block_m"
TURNS = "in_turns: 1 if dq_order == 'ordered' else 0"
PART = "part_time: 384"


@pytest.mark.parametrize(
    ("old", "new", "place", "why"),
    [
        (SUM_WHEN, "    template", None, None),
        (SUM_WHEN, "    when: {gqa: some}\n    template", r"steps\[6\]\.when\.gqa", "some"),
        ("    main: true\n", "    main: true\n    when: {gqa: gqa}\n", r"steps\[4\]\.when", "every variant"),
        (PART, "part_time: 0", r"steps\[6\]\.combines", "has parts"),
        (PART, "part_time: 0 - 1", r"tiles\[\d+\]", "below 1"),
        (PART, f"schedule: persistent\n      {PART}", r"part_time", "each tile and part"),
        (SUM_GRID, "{key_rows: 16}, part_time: 1", r"part_time", "only the main step"),
        (PART, f"{PART}\n      cluster: 0", r"tiles\[\d+\]", "below 1"),
        (STEP, "blocks_per_sm: 1", r"steps\[4\]\.grid", "how many rows one has"),
        (STEP, "step_rows: block_m - block_m", r"tiles\[\d+\]", "below 1"),
        (TURNS, "in_turns: 0 - 1", r"tiles\[\d+\]", "below 1"),
        (
            SUM_GRID,
            f"{SUM_GRID}, schedule: persistent, cluster: 2",
            r"tiles\[\d+\]",
            "only with one of the schedules",
        ),
    ],
)
def test_what_a_family_may_say_of_groups_in_parts(old, new, place, why, tmp_path):
    assert GROUPS.count(old) == 1
    path = tmp_path / "flash_bwd_sm90.yaml"
    path.write_text(GROUPS.replace(old, new))
    if place is None:
        assert all("sum" in {step.step for step in v.steps} for v in load_spec(path).variants() if v.is_main)
        return
    with pytest.raises(SpecError, match=rf"{place}: .*{re.escape(why)}"):
        load_spec(path)


BESIDE = "beside: {query_rows: block_n, heads: 1, batch: 1}"


@pytest.mark.parametrize(
    ("new", "place", "why"),
    [
        ("beside: {rows: 1}", r"grid\.beside\.rows", "no such dimension"),
        ("beside: {query_rows: 0}", r"tiles\[\d+\]", "below 1"),
        (f"{BESIDE}\n  schedule: persistent", r"grid\.beside", "one thread block to each tile"),
        ("", r"tiles\[\d+\]", "2 kinds of tiles for head_dim=32"),
    ],
)
def test_what_a_grid_may_have_beside_its_tiles(new, place, why, tmp_path):
    text = (specs_dir() / "flash_bwd_direct_sm90.yaml").read_text(encoding="utf-8")
    assert text.count(BESIDE) == 1
    path = tmp_path / "flash_bwd_direct_sm90.yaml"
    path.write_text(text.replace(BESIDE, new))
    with pytest.raises(SpecError, match=rf"{place}: .*{re.escape(why)}"):
        load_spec(path)


@pytest.mark.parametrize("kinds", [0, 3])
def test_a_thread_block_has_tiles_of_one_or_two_kinds(kinds, tmp_path):
    text = (specs_dir() / "flash_bwd_direct_sm90.yaml").read_text(encoding="utf-8")
    assert text.count("  kinds: kinds\n") == 1
    path = tmp_path / "flash_bwd_direct_sm90.yaml"
    path.write_text(text.replace("  kinds: kinds\n", f"  kinds: {kinds}\n"))
    with pytest.raises(SpecError, match=rf"{kinds} kinds of tiles for .*; allowed: 1 or 2"):
        load_spec(path)
