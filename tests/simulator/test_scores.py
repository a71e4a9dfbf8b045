"""Score modifications in every loop of both families, against float64; and faults at the seam."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.families.scores import load_scores
from flashgen.operators.scores import chained
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make, run
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator import faults_scores
from simulator.covering import VARIANTS
from simulator.faults_scores import LINES
from simulator.test_faults import verdict_of

# Each loop of the Ampere-class family, and what a tile may be of the Hopper one.
KERNELS = {
    "stages": "flash_fwd_hdim32_bf16_causal_m64_sm80",
    "stages packed": "flash_fwd_hdim32_fp16_m64_packgqa_sm80",
    "stages dense packed": "flash_fwd_hdim32_fp16_dense_m64_packgqa_sm80",
    "stages fp32": "flash_fwd_hdim32_fp32_m64_sm80",
    "stages fp32 grouped": "flash_fwd_hdim32_fp32_causal_m64_gqa_sm80",
    "ahead": "flash_fwd_hdim32_fp16_sm80",
    "halves": "flash_fwd_hdim32_fp16_causal_sm80",
    "halves window": "flash_fwd_hdim32_bf16_local_sm80",
    "turns": "flash_fwd_hdim64_fp16_sm80",
    "turns causal packed": "flash_fwd_hdim64_fp16_causal_packgqa_sm80",
    "turns dense": "flash_fwd_hdim96_fp16_dense_sm80",
    "pairs": "flash_fwd_hdim192_fp16_causal_sm80",
    "one Q buffer": "flash_fwd_hdim64_fp16_m64_gqa_sm90",
    "overlapped": "flash_fwd_hdim64_fp16_sm90",
    "overlapped packed": "flash_fwd_hdim64_bf16_packgqa_sm90",
    "tiles": "flash_fwd_hdim64_bf16_causal_m64_sm90",
    "tiles packed": "flash_fwd_hdim64_fp16_causal_m64_packgqa_sm90",
    "tiles window": "flash_fwd_hdim64_fp16_local_m64_sm90",
    "tiles dense": "flash_fwd_hdim64_bf16_dense_sm90",
}
# What is left to the row together with a tanh in all of them; the others in turn.
CHAIN = ("softcap", "alibi")
OTHERS = (("by_key",), ("alibi",), ("hides",), ("softcap",), ("alibi_symmetric", "by_key"))
CASES = [(kernel, names) for n, kernel in enumerate(KERNELS) for names in (CHAIN, OTHERS[n % len(OTHERS)])]


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    (folder / "scores.yaml").write_text(LINES)
    return load_scores(folder, keywords=()).by_name


def shape_of(variant, **changes):
    heads = {"heads": 2} if variant.gqa == "mha" else {"heads": 4, "kv_heads": 1}
    window = {"window": (70, 5)} if variant.mask_type == "local" else {}
    return Shape(**({"seqlen_q": 75, "seqlen_kv": 2 * 64 + 9, "batch": 2} | heads | window | changes))


def check(variant, shape, seed):
    example = make(variant, shape, seed)
    device = dataclasses.replace(hardware.pretend_for(variant), num_sms=2)
    run(load(render(variant), variant.name), variant, example, seed=seed, device=device)
    verdict = example.judge()
    assert verdict.ok, f"{variant.name}, {shape}: {verdict}"


@pytest.mark.parametrize(("kernel", "names"), CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x))
def test_a_modified_kernel(kernel, names, scores, compiler, fresh_seed):
    plain = VARIANTS[KERNELS[kernel]]
    variant = plain.modified(chained([scores[name] for name in names]))
    check(variant, shape_of(variant), fresh_seed)


@pytest.mark.parametrize("kernel", ["stages", "tiles packed"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (3, 2), (1, 200), (200, 1), (64, 64), (129, 65)])
def test_lengths_at_the_edges_of_tiles(kernel, seqlen_q, seqlen_kv, scores, compiler, fresh_seed):
    variant = VARIANTS[KERNELS[kernel]].modified(chained([scores["by_key"], scores["alibi"]]))
    check(variant, shape_of(variant, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, batch=1), fresh_seed)


@pytest.mark.parametrize("kernel", ["stages", "stages packed"])
def test_twenty_seeds(kernel, scores, compiler, fresh_seed):
    variant = VARIANTS[KERNELS[kernel]].modified(chained([scores["softcap"], scores["alibi"]]))
    for seed in range(fresh_seed, fresh_seed + 20):
        check(variant, shape_of(variant, seqlen_q=40, seqlen_kv=70, batch=1), seed)


def modified(fault, scores):
    return VARIANTS[fault.variant].modified(scores[fault.score])


@pytest.mark.parametrize("fault", faults_scores.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_at_the_seam_is_found(fault, scores, compiler, fixed_seed):
    variant = modified(fault, scores)
    planted = fault.plant(render(variant))
    check, _ = verdict_of(planted, variant, fault.shape, fixed_seed, fault.multiprocessors)
    assert check in fault.caught


CLEAN = {(fault.variant, fault.score): fault for fault in faults_scores.FAULTS}


@pytest.mark.parametrize("fault", CLEAN.values(), ids=lambda fault: f"{fault.variant} {fault.score}")
def test_without_it_nothing_is_found(fault, scores, compiler, fresh_seed):
    variant = modified(fault, scores)
    source = render(variant)
    for seed in range(fresh_seed, fresh_seed + 5):
        assert verdict_of(source, variant, fault.shape, seed, fault.multiprocessors) == (None, None)


def test_a_modification_changes_no_bit_where_it_changes_no_score(scores, compiler, fresh_seed):
    """ALiBi with slopes of 0."""
    plain = VARIANTS[KERNELS["halves"]]
    variant = plain.modified(scores["alibi"])
    found = []
    for each in (plain, variant):
        example = make(each, shape_of(each), fresh_seed)
        for array in example.score_arrays:
            array[...] = 0
        run(load(render(each), each.name), each, example, seed=fresh_seed)
        assert example.judge().ok
        found.append(example.out.astype("f8"))
    assert abs(found[0] - found[1]).max() < 2e-3
