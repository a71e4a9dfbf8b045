"""The CUDA of score modifications: what is read, when, and where; and that NVRTC takes it."""

from __future__ import annotations

import re

import pytest

from flashgen.families.load import load_specs
from flashgen.families.scores import load_scores
from flashgen.source.render import include_dirs, render, source_digest
from flashgen.source.scores import score_functions
from flashgen.toolchain.obtain import obtain

LINES = """\
scores:
  mine: {score: "score * gain + bias[h, q, kv]", params: {gain: f32, bias: [h, q, kv, f32]}}
  near: {score: "score + table[h, min(abs(q - kv), 15)]", params: {table: [h, distance, f32]}}
  rows: {score: "score * gain[b, q] + slope[h] * (kv - q)", params: {gain: [b, q, f32], slope: [h, f32]}}
  twice: {score: "score + t[h, q - 1] + t[h, q] * t[h, 0]", params: {t: [h, place, f32]}}
  head: {score: "score + head[h, q] * query[q]", params: {head: [h, q, f32], query: [q, i32]}}
  hides:
    score: "where(not (kv - q > n or -(-kv) < starts[b, kv]), score, -inf)"
    params: {n: i32, starts: [b, kv, i32]}
  deep:
    score: "log(exp(score * s) + abs(q - kv)) / max(score, -(-s)) - min(-score, h * b)"
    params: {s: f32}
  signs:
    score: "score - -slope[h] * (q - kv) + -(-shift[kv])"
    params: {slope: [h, f32], shift: [kv, i32]}
  product: {score: "exp(score / 4) * gain[kv]", params: {gain: [kv, f32]}}
  chosen: {score: "where(q == kv, 2, 3) * score + where(b == 0, q, -kv)"}
"""
NAMES = re.findall(r"^  (\w+):", LINES, re.M)


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    (folder / "scores.yaml").write_text(LINES)
    return load_scores(folder, keywords=()).by_name


def parts(text):
    """Each struct and function by its name."""
    found = dict(re.findall(r"^struct (\w+) \{(.*?)\};?$", text, re.M | re.S))
    return found | dict(re.findall(r"^__device__ __forceinline__ \w+ (\w+)\((.*?^\})", text, re.M | re.S))


def loads(text):
    return re.findall(r"load_global_32\((?:row\.whole \? )?(?:params|row)\.(\w+)", text)


SOFTCAP = """\
struct ScoreHead {};

__device__ __forceinline__ ScoreHead score_head(const Params&, int, int) {
    return {};
}

struct ScoreRow {
    ScoreHead head;
};

__device__ __forceinline__ ScoreRow score_row(const Params&, const ScoreHead& head, int) {
    ScoreRow row;
    row.head = head;
    return row;
}

__device__ __forceinline__ float modified_score(const Params& params, const ScoreRow&, int, int, \
float product) {
    return tanh_approx(product * params.score_constant_0);
}"""


def test_the_cuda_of_softcap(scores):
    text = score_functions(scores["softcap"], "fp16")
    assert text.startswith("// The score modification `softcap`: cap * tanh(score / cap)\n")
    assert re.sub(r"^//.*\n", "", text, flags=re.M).strip() == SOFTCAP


def test_in_fp32_no_tanh_is_approximate(scores):
    text = score_functions(scores["softcap"], "fp32")
    assert "tanh_approx" not in text
    assert text.count("exp2_approx") == text.count("rcp_approx") == 1


def test_a_linear_bias_is_one_multiply_add_of_a_score(scores):
    found = parts(score_functions(scores["alibi"], "fp16"))
    (result,) = re.findall(r"return (.*);", found["modified_score"])
    assert result == "fmaf(product, params.softmax_scale, row.head.slope * float(step))"
    assert loads(found["score_head"]) == ["slope"]
    assert loads(found["score_row"] + found["modified_score"] + found["score_offset"]) == []
    assert "first_key" in found["score_offset"]


# By formula: what is read for a head, for a row, for a score.
READ = {
    "mine": ([], [], ["bias"]),
    "near": ([], [], ["table"]),
    "rows": (["slope"], ["gain"], []),
    "twice": (["t"], ["t", "t"], []),
    "head": ([], ["head", "query"], []),
    "hides": ([], [], ["starts"]),
    "deep": ([], [], []),
    "signs": (["slope"], [], ["shift"]),
    "product": ([], [], ["gain"]),
    "chosen": ([], [], []),
}


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_elements_are_read_where_they_are_known_first(name, dtype, scores):
    found = parts(score_functions(scores[name], dtype))
    read = [sorted(loads(found[function])) for function in ("score_head", "score_row", "modified_score")]
    assert read == [sorted(each) for each in READ[name]]
    assert not loads(found.get("score_offset", ""))
    for struct in ("ScoreHead", "ScoreRow"):
        members = re.findall(r"\w+ (\w+);", found.get(struct, ""))
        assert len(set(members)) == len(members)


@pytest.mark.parametrize("name", ["mine", "near", "hides", "signs", "twice"])
def test_no_index_leaves_its_array(name, scores):
    """Keys behind the last one and what a formula computes are clamped; q, h and b are the kernel's own."""
    text = score_functions(scores[name], "fp16")
    if "[h, q, kv]" in scores[name].text or "[b, kv]" in scores[name].text or "[kv]" in scores[name].text:
        assert "min(first_key + step, params.seqlen_kv - 1)" in text
    for param in scores[name].arrays:
        for symbol in param.symbols:
            if symbol.startswith(f"{param.name}_"):
                count = sum(array == param.name for array in loads(text))
                assert len(re.findall(rf"min\(max\(.*?, 0\), params\.{symbol} - 1\)", text)) == count


def test_code_has_no_decrements(scores):
    for name in NAMES:
        for dtype in ("fp16", "fp32"):
            text = "\n".join(
                line.split("//")[0] for line in score_functions(scores[name], dtype).splitlines()
            )
            assert "--" not in text


def test_chained_modifications_are_one_function(scores):
    from flashgen.operators.scores import chained

    text = score_functions(chained([scores["softcap"], scores["alibi"]]), "fp16")
    (result,) = re.findall(r"return (.*);", parts(text)["modified_score"])
    assert result.count("tanh_approx") == 1
    assert "slope * float(step)" in result


DIFFERENTIATED_SOFTCAP = """\
    const float tanh_0 = tanh_approx(product * params.score_constant_0);
    ModifiedScore modified;
    modified.score = tanh_0;
    modified.derivative = 1.0f - (tanh_0 * tanh_0);
    return modified;
}"""


def test_a_tanh_is_computed_once_for_a_score_and_its_derivative(scores):
    text = score_functions(scores["softcap"], "fp16", differentiated=True)
    assert text.endswith(DIFFERENTIATED_SOFTCAP)
    assert "modified_score(" not in text


@pytest.mark.parametrize("name", ["mine", "near", "alibi", "alibi_symmetric", "bias"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_where_the_derivative_is_plain_nothing_is_read_or_called_twice(name, dtype, scores):
    plain, text = (score_functions(scores[name], dtype, each) for each in (False, True))
    # That of a sum is 1 by itself, and no function of its own.
    assert (plain == text) == (name != "mine")
    assert loads(plain) == loads(text)


def test_what_a_score_and_its_derivative_both_need_has_a_name(scores):
    found = parts(score_functions(scores["product"], "fp16", differentiated=True))["differentiated_score"]
    assert loads(found) == ["gain"]
    assert found.count("exp2_approx") == 1


KERNELS = {
    "sm_80": "flash_fwd_hdim32_fp16_m64_gqa_sm80",
    "sm_90a": "flash_fwd_hdim64_fp16_causal_m64_packgqa_sm90",
}
BACKWARD = {"sm_80": "flash_bwd_hdim32_fp16_causal_gqa_sm80", "sm_90a": "flash_bwd_hdim64_bf16_sm90"}


@pytest.fixture(scope="module")
def variants():
    return {variant.name: variant for spec in load_specs() for variant in spec.variants()}


@pytest.mark.drawn
@pytest.mark.parametrize("arch", KERNELS)
@pytest.mark.parametrize("name", [*NAMES, "alibi_symmetric"])
def test_nvrtc_takes_it(name, arch, scores, variants):
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    compiled, _ = obtain(variants[KERNELS[arch]].modified(scores[name]), arch)
    assert compiled.cubin


@pytest.mark.parametrize(("arch", "name"), [("sm_80", "deep"), ("sm_80", "rows"), ("sm_90a", "hides")])
def test_nvrtc_takes_it_in_backward_kernels(name, arch, scores, variants):
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    compiled, _ = obtain(variants[BACKWARD[arch]].modified(scores[name]), arch)
    assert compiled.cubin


def test_fp32_kernels_compile_as_well(scores, variants):
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    compiled, _ = obtain(variants["flash_fwd_hdim32_fp32_m64_sm80"].modified(scores["deep"]), "sm_80")
    assert compiled.cubin


def test_a_plain_kernel_has_no_trace_of_the_seam(variants):
    for variant in (variants[name] for name in (*KERNELS.values(), *BACKWARD.values())):
        assert not re.search("modif|ScoreRow|score_offset|derivative", render(variant))


@pytest.mark.parametrize("name", ["softcap", "alibi", "alibi_symmetric", "mine", "rows", "head"])
@pytest.mark.parametrize("kernel", [*KERNELS.values(), *BACKWARD.values()])
def test_a_modified_kernel_reads_each_of_its_parameters(name, kernel, scores, variants):
    variant = variants[kernel].modified(scores[name])
    source = render(variant)
    assert all(re.search(rf"\bparams\.{param.name}\b", source) for param in variant.params)
    assert not re.search(r"\basm\b", source.split("#ifndef FLASHGEN_SIMULATOR")[0])


def test_the_code_that_lowers_a_formula_is_in_the_key_of_its_kernel(scores, variants, monkeypatch):
    """A kernel of another version of `operators/` is not taken from the cache."""
    plain = variants["flash_fwd_hdim32_fp16_m64_gqa_sm80"]
    modified = plain.modified(scores["softcap"])
    before = source_digest(plain), source_digest(modified)
    from flashgen.source import render as module

    real = module.code_digest
    monkeypatch.setattr(module, "code_digest", lambda *rooms: real(*rooms) + b"!" * ("operators" in rooms))
    assert source_digest(plain) == before[0]
    assert source_digest(modified) != before[1]
    assert source_digest(plain.modified(scores["alibi"])) != source_digest(modified)
    assert include_dirs(modified) == include_dirs(plain)
