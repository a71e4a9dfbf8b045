"""Dropout in the simulator: every family, forward and backward, and planted faults."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.simulator.example import Shape, make
from flashgen.source.render import render
from simulator.calls import check_on, main_kernels, with_fault, within_the_bound
from simulator.edits import replace
from simulator.faults import WRONG

MAIN = main_kernels(
    lambda spec: spec.operator in ("attention", "attention_backward"),
    lambda variant: variant.axis("dropout") == "dropout",
)
# Ragged blocks of queries and keys; several batch entries; rows that see nothing.
RAGGED = Shape(70, 100, 2, 2, batch=2)
GROUPS = Shape(70, 100, 4, 2, batch=2)
SEQUENCES = Shape(40, 90, 4, 2, batch=4)
LISTED = Shape(200, 300, 4, 2, batch=2, window=(-1, 0))
FORWARD = (
    ("flash_fwd_hdim32_fp16_causal_dropout_m64_sm80", RAGGED),
    ("flash_fwd_hdim32_bf16_dense_sink_dropout_gqa_sm80", GROUPS),
    ("flash_fwd_hdim32_fp32_local_dropout_gqa_sm80", GROUPS),
    ("flash_fwd_hdim192_fp32_dropout_sm80", Shape(40, 70, 2)),
    ("flash_fwd_hdim128_fp16_dropout_sm80", RAGGED),
    ("flash_fwd_hdim64_fp16_dropout_sm90", Shape(200, 300, 2, batch=2)),
    ("flash_fwd_hdim64_bf16_causal_dropout_gqa_sm90", GROUPS),
    ("flash_fwd_hdim32_fp16_dense_dropout_m64_sm90", RAGGED),
    ("flash_fwd_hdim64_bf16_local_dropout_m64_gqa_sm90", GROUPS),
    ("flash_fwd_varlen_hdim32_fp16_causal_dropout_m64_gqa_sm80", SEQUENCES),
    ("flash_fwd_varlen_hdim32_bf16_dropout_gqa_sm90", SEQUENCES),
    ("flash_fwd_varlen_hdim64_fp16_causal_dropout_gqa_sm90", SEQUENCES),
    ("flash_fwd_hdim32_fp16_blocks_dropout_gqa_sm80", LISTED),
    ("flash_fwd_hdim64_bf16_blocks_sink_dropout_m64_gqa_sm90", LISTED),
)
BACKWARD = (
    ("flash_bwd_hdim32_fp16_causal_dropout_gqa_sm80", GROUPS),
    ("flash_bwd_hdim32_fp32_dropout_sm80", RAGGED),
    ("flash_bwd_hdim192_fp32_dropout_sm86", Shape(40, 70, 2)),
    ("flash_bwd_hdim128_bf16_dense_dropout_ordered_gqa_sm86", GROUPS),
    ("flash_bwd_hdim64_bf16_causal_dropout_gqa_sm90", GROUPS),
    ("flash_bwd_hdim128_fp16_dropout_ordered_sm90", RAGGED),
    ("flash_bwd_hdim96_bf16_local_dropout_gqa_sm90", GROUPS),
    ("flash_bwd_hdim32_fp16_dense_dropout_sm90", RAGGED),
    ("flash_bwd_hdim192_128_fp16_dropout_sm90", RAGGED),
    ("flash_bwd_hdim192_bf16_causal_dropout_pair_gqa_sm90", GROUPS),
    ("flash_bwd_hdim256_fp16_dropout_pair_sm90", RAGGED),
    ("flash_bwd_varlen_hdim32_fp16_causal_dropout_gqa_sm80", SEQUENCES),
    ("flash_bwd_varlen_hdim128_bf16_dropout_gqa_sm90", SEQUENCES),
    ("flash_bwd_varlen_hdim192_128_fp16_causal_dropout_gqa_sm90", SEQUENCES),
    ("flash_bwd_hdim64_bf16_blocks_dropout_n64_gqa_sm80", LISTED),
    ("flash_bwd_hdim128_fp16_blocks_dropout_gqa_sm90", LISTED),
)
CALLS = FORWARD + BACKWARD


@pytest.mark.parametrize(("name", "shape"), CALLS, ids=[name for name, _ in CALLS])
def test_results_are_within_the_bound(name, shape, compiler, fresh_seed):
    within_the_bound(MAIN[name], shape, fresh_seed)


def test_an_offset_near_its_end_carries_into_the_high_word(compiler, fresh_seed):
    for name, shape in (FORWARD[0], BACKWARD[4]):
        example = make(MAIN[name], shape, fresh_seed)
        seed = example.others["dropout_seed"] if hasattr(example, "others") else example.array("dropout_seed")
        seed[...] = -1, 2**32 - 40
        if hasattr(example, "forward"):
            example.forward()
        assert check_on(MAIN[name], example, fresh_seed, render) is None


SCORES, WIDE, PAIRS = FORWARD[0], BACKWARD[8], FORWARD[5]
SM80, SM90, SEQUENCES_SM80 = BACKWARD[0], BACKWARD[4], BACKWARD[11]
FAULTS = {
    "six rounds": (*SCORES, "round < 7", "round < 6"),
    "the words of the key swapped": (
        *SCORES, "{{words[0], words[1]}, offset", "{{words[1], words[0]}, offset"),
    "the low word of the offset alone": (*SCORES, "uint64_t(words[3]) << 32 | words[2]", "words[2]"),
    "a counter moved by a lane": (*SCORES, "* 32 + lane}", "* 32 + lane + 1}"),
    "the same numbers in each batch entry": (*SCORES, "int64_t(batch) * params.num_heads_q", "int64_t(0)"),
    "queries counted from the first one of the call": (*SCORES, "params.dropout_row + ", ""),
    "those of a gradient": (*SM90, "params.dropout_row + ", ""),
    "those of a gradient by mma.sync": (*SM80, "params.dropout_row + ", ""),
    "the same numbers in each head": (*SM90, "first.position + 32 * head", "first.position"),
    "blocks of 16 keys": (*SCORES, "first_key / 32 + block", "first_key / 16 + block"),
    "blocks counted from the tile": (*SCORES, "(first_row + kRowTileStep * i) / 16", "i"),
    "the words of key tiles swapped": (*PAIRS, "word_of(words, k8)", "word_of(words, k8 ^ 1)"),
    "bytes of the other query": (*PAIRS, "__byte_perm(word, 0, 0x4342)", "__byte_perm(word, 0, 0x4140)"),
    "a threshold that is one less": (
        *PAIRS, "threshold << 16 | threshold, pairs", "threshold - 1 << 16 | threshold - 1, pairs"),
    "O not scaled": (*PAIRS, "factor[half] *= params.keep_scale;", ""),
    "not transposed": (
        *SM90, "transpose_matrix(__byte_perm(bytes, 0, 0x3120))", "__byte_perm(bytes, 0, 0x3120)"),
    "bytes of a pair not sorted": (*SM90, "__byte_perm(bytes, 0, 0x3120)", "bytes"),
    "the lower keys for the upper": (*SM90, "upper ? words.z : words.x", "words.x"),
    "a carry between bytes": (*SM80, "(word & 0x7f7f7f7f) +", "word +"),
    "thresholds as if below 128": (*SM80, "threshold < 128 ? 0xffffffff : 0", "0xffffffff"),
    "P of dV not dropped": (*SM80, "drop(p, kept, params.keep_scale);", ""),
    "dP not dropped": (*SM80, "drop(ds, kept, params.keep_scale);", ""),
    "dV not scaled": (*SM90, "scale_dv(dv, params.keep_scale);", ""),
    "dP of a wide kernel not scaled": (*WIDE, "drop(ds, kept, params.keep_scale);", "drop(ds, kept, 1.0f);"),
    "queries of the first step in each": (*WIDE, "first_query / 16 + 4 * i", "4 * i"),
    "the first sequence's numbers": (*SEQUENCES_SM80, "int64_t(batch) * params.num_heads_q", "int64_t(0)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    name, shape, old, new = FAULTS[fault]
    variant, checks = MAIN[name], set()
    planted = with_fault(lambda source: replace(source, old, new, fault))
    for seed in range(fixed_seed, fixed_seed + 6):
        example = make(variant, shape, seed)
        checks.add(check_on(variant, example, seed, planted))
        if WRONG in checks:
            break
    assert checks <= {None, WRONG}
    assert WRONG in checks


def test_forward_kernels_agree_to_the_score(compiler, fresh_seed):
    """Both families drop the same scores: V is the identity, so that out is P of each key."""
    shape = Shape(100, 64, 2, batch=2)
    kept = []
    for name in ("flash_fwd_hdim64_fp16_dropout_sm80", "flash_fwd_hdim64_fp16_dropout_sm90"):
        example = make(MAIN[name], shape, fresh_seed)
        example.q[...] = 0
        example.v[...] = np.eye(64, dtype=np.float16)[:, None]
        example.others["dropout_seed"][...] = 17, 99
        assert check_on(MAIN[name], example, fresh_seed, render) is None
        kept.append(example.out != 0)
    assert np.array_equal(*kept)
    assert 0.4 < kept[0].mean() < 0.95
