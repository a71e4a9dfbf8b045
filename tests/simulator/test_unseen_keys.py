"""Keys that no query of their sequence sees, in the simulator: under a length, a diagonal or a window they
have no effect on any result, whatever their bits in K and V.
"""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.errors import SimulationError
from flashgen.families.load import load_specs
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator.faults import NUMBERS, WRONG, Fault, fault
from unseen import differing

MAIN = {
    step.name: variant
    for spec in load_specs()
    if spec.operator not in ("append", "merge", "quantize", "mask_lists")
    for variant in spec.variants()
    if variant.is_main
    for step in variant.steps
}
# Before a window, past a diagonal that starts top left, and with a dense mask beside both.
WINDOW = Shape(37, 300, heads=1, window=(50, 3))
TOP_LEFT = Shape(37, 300, heads=1, top_left=True)
MASKED_WINDOW = Shape(37, 300, heads=1, window=(50, 3), mask="qk")
MASKED_TOP_LEFT = Shape(37, 300, heads=1, window=(-1, 0), top_left=True, mask="qk")
# Tiles that see a part of the keys, more queries than a tile has, two heads to a kv head.
LONG_WINDOW = Shape(200, 400, heads=2, kv_heads=1, window=(90, 0))
LONG_WINDOW_MHA = Shape(200, 400, heads=1, window=(90, 0))
CHUNKS = Shape(70, 900, heads=1, batch=3, window=(300, 0))
SEQUENCES = Shape(37, 300, heads=1, batch=4, window=(50, 3))
LONG_SEQUENCES = Shape(200, 400, heads=2, kv_heads=1, batch=3, window=(90, 0))
LONG_SEQUENCES_MHA = Shape(200, 400, heads=1, batch=3, window=(90, 0))
MASKED_SEQUENCES = Shape(37, 300, heads=1, batch=4, window=(50, 3), mask="qk")
FEW = Shape(3, 700, heads=1, window=(300, 0))
FEW_TOP_LEFT = Shape(3, 700, heads=1, top_left=True)
FEW_SEQUENCES = Shape(3, 700, heads=1, batch=4, window=(300, 0))
FEW_MASKED = Shape(3, 700, heads=1, batch=4, window=(300, 0), mask="qk")

WINDOW_SM90 = "flash_fwd_varlen_hdim32_bf16_local_sm90"  # several consumers
CODES = "flash_fwd_varlen_fp8_hdim64_e4m3_promoted_local_gqa_sm90"
WINDOW_BACKWARD = "flash_bwd_varlen_hdim64_fp16_local_sm90"

FORWARD_SM80 = (
    ("flash_fwd_hdim32_fp16_local_m64_sm80", WINDOW),  # loop stages
    ("flash_fwd_hdim32_bf16_local_m64_packgqa_sm80", LONG_WINDOW),
    ("flash_fwd_hdim32_fp16_local_sm80", WINDOW),  # halves
    ("flash_fwd_hdim64_fp16_local_packgqa_sm80", LONG_WINDOW),
    ("flash_fwd_hdim192_fp16_local_sm80", WINDOW),  # pairs
    ("flash_fwd_hdim32_fp32_local_m64_sm80", WINDOW),
    ("flash_fwd_hdim32_fp16_causal_m64_sm80", TOP_LEFT),
    ("flash_fwd_hdim32_fp16_causal_sm80", TOP_LEFT),
    ("flash_fwd_hdim64_fp16_causal_sm80", TOP_LEFT),  # turns
    ("flash_fwd_hdim192_fp16_causal_sm80", TOP_LEFT),
    ("flash_fwd_hdim32_fp16_dense_m64_sm80", MASKED_WINDOW),
    ("flash_fwd_hdim32_fp16_dense_m64_sm80", MASKED_TOP_LEFT),
    ("flash_fwd_hdim96_fp16_dense_sm80", MASKED_WINDOW),  # turns
    ("flash_fwd_varlen_hdim32_bf16_local_m64_sm80", SEQUENCES),
    ("flash_fwd_varlen_hdim32_fp16_local_paged_m64_packgqa_sm80", LONG_SEQUENCES),
    ("flash_fwd_varlen_hdim32_fp16_dense_m64_sm80", MASKED_SEQUENCES),
    ("flash_fwd_varlen_hdim32_bf16_dense_paged_m64_sm80", MASKED_SEQUENCES),
)
DECODE = (
    ("flash_decode_hdim64_fp16_local_sm80", FEW),
    ("flash_decode_hdim64_bf16_causal_packgqa_sm80", FEW_TOP_LEFT),
    ("flash_decode_hdim64_bf16_local_c4_sm90", FEW),
    ("flash_decode_hdim32_fp16_causal_sm90", FEW_TOP_LEFT),
    ("flash_varlen_decode_hdim32_fp16_local_sm80", FEW_SEQUENCES),
    ("flash_varlen_decode_hdim64_bf16_local_paged_packgqa_sm80", FEW_SEQUENCES),
    ("flash_varlen_decode_hdim32_fp16_local_paged_fixed_sm80", FEW_SEQUENCES),
    ("flash_varlen_decode_hdim32_fp16_dense_packgqa_sm80", FEW_MASKED),
    ("flash_varlen_decode_hdim64_bf16_dense_paged_fixed_m32_sm80", FEW_MASKED),
    ("flash_varlen_decode_hdim64_fp16_local_c4_sm90", FEW_SEQUENCES),
    ("flash_varlen_decode_hdim64_bf16_local_paged_c2_packgqa_sm90", FEW_SEQUENCES),
    ("flash_varlen_decode_hdim64_fp16_dense_paged_c2_sm90", FEW_MASKED),
)
LINEAGE = (("naive_output_hdim64_fp16_causal_sm80", TOP_LEFT), ("flash_v1_hdim64_fp16_causal_sm80", TOP_LEFT))
FORWARD_SM90 = (
    ("flash_fwd_hdim64_fp16_local_m64_sm90", WINDOW),
    ("flash_fwd_hdim32_bf16_local_sm90", LONG_WINDOW_MHA),
    ("flash_fwd_hdim64_bf16_local_packgqa_sm90", LONG_WINDOW),
    ("flash_fwd_hdim32_fp16_causal_m64_sm90", TOP_LEFT),
    ("flash_fwd_hdim64_fp16_causal_sm90", TOP_LEFT),
    ("flash_fwd_hdim32_bf16_dense_m64_sm90", MASKED_WINDOW),
    ("flash_fwd_hdim64_bf16_dense_sm90", MASKED_TOP_LEFT),
    ("flash_split_hdim64_fp16_local_m128_sm90", LONG_WINDOW_MHA),
    ("flash_split_hdim64_bf16_causal_m128_packgqa_sm90", TOP_LEFT),
)
FORWARD_VARLEN_SM90 = (
    ("flash_fwd_varlen_hdim32_fp16_local_m64_sm90", SEQUENCES),
    ("flash_fwd_varlen_hdim32_bf16_local_sm90", LONG_SEQUENCES_MHA),
    ("flash_fwd_varlen_hdim64_fp16_local_m64_packgqa_sm90", LONG_SEQUENCES),
    ("flash_fwd_varlen_hdim32_bf16_local_paged_sm90", SEQUENCES),
    ("flash_fwd_varlen_hdim64_fp16_local_paged_m128_packgqa_sm90", LONG_SEQUENCES),
    ("flash_varlen_split_hdim64_fp16_local_m128_sm90", CHUNKS),
    ("flash_varlen_split_hdim64_fp16_local_paged_m128_gqa_sm90", CHUNKS),
    (CODES, LONG_SEQUENCES),
)
BACKWARD = (
    ("flash_bwd_hdim32_fp16_local_sm80", WINDOW),
    ("score_gradient_hdim256_fp16_local_sm80", WINDOW),
    ("score_gradient_hdim256_bf16_causal_columns_sm80", TOP_LEFT),
    ("flash_bwd_hdim64_bf16_local_ordered_gqa_sm80", LONG_WINDOW),
    ("flash_bwd_hdim32_fp32_local_sm80", WINDOW),
    ("flash_bwd_hdim32_fp16_causal_sm80", TOP_LEFT),
    ("flash_bwd_hdim32_fp16_dense_sm80", MASKED_WINDOW),
    ("flash_bwd_hdim32_fp16_dense_sm80", MASKED_TOP_LEFT),
    ("flash_bwd_hdim64_fp16_local_sm90", WINDOW),
    ("flash_bwd_hdim96_bf16_local_sm90", LONG_WINDOW_MHA),
    ("flash_bwd_hdim64_fp16_local_ordered_gqa_sm90", LONG_WINDOW),
    ("flash_bwd_hdim64_fp16_causal_sm90", TOP_LEFT),
    ("flash_bwd_hdim32_fp16_dense_sm90", MASKED_WINDOW),
    ("flash_bwd_hdim192_fp16_local_sm90", WINDOW),
    ("flash_bwd_hdim192_fp16_local_pair_sm90", WINDOW),
    ("flash_bwd_hdim192_fp16_causal_pair_sm90", TOP_LEFT),
    ("flash_bwd_hdim64_fp16_local_direct_sm90", WINDOW),
    ("flash_bwd_hdim64_fp16_local_direct_both_gqa_sm90", LONG_WINDOW),
    ("flash_bwd_hdim64_fp16_causal_direct_sm90", TOP_LEFT),
)
BACKWARD_VARLEN = (
    ("flash_bwd_varlen_hdim32_fp16_local_sm80", SEQUENCES),
    ("flash_bwd_varlen_hdim64_fp16_local_ordered_gqa_sm80", LONG_SEQUENCES),
    ("flash_bwd_varlen_hdim64_fp16_local_sm90", SEQUENCES),
    ("flash_bwd_varlen_hdim64_bf16_local_ordered_gqa_sm90", LONG_SEQUENCES),
    ("flash_bwd_varlen_hdim96_bf16_local_sm90", LONG_SEQUENCES_MHA),
    ("flash_bwd_varlen_hdim192_fp16_local_sm90", SEQUENCES),
    ("flash_bwd_varlen_hdim192_fp16_local_pair_sm90", LONG_SEQUENCES_MHA),
)
STARTS = (
    ("flash_fwd_varlen_hdim32_fp16_local_paged_starts_m64_packgqa_sm80", LONG_SEQUENCES),
    ("flash_fwd_varlen_hdim32_bf16_local_starts_sm90", LONG_SEQUENCES_MHA),
    ("flash_varlen_decode_hdim32_fp16_local_paged_fixed_starts_sm80", FEW_SEQUENCES),
    ("flash_varlen_decode_hdim64_bf16_local_paged_starts_c2_packgqa_sm90", FEW_SEQUENCES),
    ("flash_bwd_varlen_hdim32_fp16_local_starts_sm80", SEQUENCES),
    ("flash_bwd_varlen_hdim64_bf16_local_ordered_starts_gqa_sm90", LONG_SEQUENCES),
)
CASES = FORWARD_SM80 + DECODE + LINEAGE + FORWARD_SM90 + FORWARD_VARLEN_SM90 + BACKWARD + BACKWARD_VARLEN
CASES += STARTS


def simulated(variant, example, seed, source_of=render):
    """One thread block after another, so that sums in memory have the same bits each time."""
    libraries = [load(source_of(step), step.name) for step in variant.steps]
    device = dataclasses.replace(hardware.pretend_for(variant), num_sms=7)
    run_steps(libraries, variant, example, seed=seed, device=device, threads=1)


def ids(cases):
    return [f"{name}-{'top_left' if shape.top_left else 'window'}" for name, shape in cases]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=ids(CASES))
def test_they_have_no_effect(name, shape, compiler, fresh_seed):
    variant = MAIN[name]
    example = make(variant, shape, fresh_seed)
    assert not differing(example, lambda each: simulated(variant, each, fresh_seed))


BEGIN = ("row >= begin && row < end", "row < end")
END = ("const int end = keys_of_query(params, params.seqlen_q - 1).end;", "const int end = params.seqlen_kv;")
AWAIT_CLEAR_HEAD = """\
            if (rows_before_window(kv_block) <= 0) return;
            mbarrier_wait(shared.rows_clear(), clear_parity);
            clear_parity ^= 1;
        };
"""
SKIP_FIRST_BLOCK = """\
            skip_block([&] {
                clear_head(kv_block);
                await_clear_head(kv_block);
            });
"""
SKIP_LAST_BLOCK = """\
            skip_block([&] {
                await_clear_tail(kv_block);
                clear_head(kv_block);
                await_clear_head(kv_block);
            });
"""
CLEAR_AHEAD_OF_TURN = """\
            await_clear_tail(kv_block);
            clear_head(kv_block);
            await_clear_head(kv_block);
            skip_block([] {});
"""
FAULTS = (
    # Copies of the threads themselves.
    fault("rows before a window copied", "flash_fwd_hdim32_fp16_local_m64_sm80", WINDOW, NUMBERS, *BEGIN),
    fault("rows before a window copied in whole blocks",
          "flash_fwd_hdim32_fp16_local_sm80", dataclasses.replace(WINDOW, seqlen_kv=250), NUMBERS,
          "{seen_rows(params, block * kBlockN).begin, kBlockN}", "{0, kBlockN}"),
    fault("rows past a diagonal copied", "flash_fwd_hdim32_fp16_causal_m64_sm80", TOP_LEFT, NUMBERS, *END),
    fault("pages before a window copied",
          "flash_varlen_decode_hdim64_bf16_local_paged_c2_packgqa_sm90", FEW_SEQUENCES, NUMBERS, *BEGIN),
    fault("rows past a diagonal copied to decode",
          "flash_decode_hdim64_bf16_causal_packgqa_sm80", FEW_TOP_LEFT, NUMBERS, *END),
    # Tensor maps that begin with the first key that is seen.
    fault("keys before a window taken for those in it, by TMA",
          "flash_fwd_hdim64_fp16_local_m64_sm90", WINDOW, NUMBERS,
          "return key - keys_of_query(params, 0).begin;", "return key;"),
    # Rows that consumers clear.
    fault("rows before a window as they are", WINDOW_SM90, LONG_SEQUENCES_MHA, NUMBERS,
          "shared.v(v_ring.stage), 0, rows);", "shared.v(v_ring.stage), 0, 0);"),
    fault("the first key of a window is cleared as well", WINDOW_SM90, LONG_SEQUENCES_MHA, NUMBERS,
          "shared.v(v_ring.stage), 0, rows);", "shared.v(v_ring.stage), 0, rows + 1);"),
    fault("zeros before a window without a proxy fence", WINDOW_SM90, LONG_SEQUENCES_MHA, ("proxy",),
          "    fence_proxy_async();  // wgmma would not see the zeros otherwise\n", ""),
    fault("V is multiplied before all consumers have cleared it before a window", WINDOW_SM90,
          LONG_SEQUENCES_MHA, ("race",), AWAIT_CLEAR_HEAD, "        };\n"),
    fault("a consumer that skips the first KV block of a window does not clear its share", WINDOW_SM90,
          LONG_SEQUENCES_MHA, ("deadlock",), SKIP_FIRST_BLOCK, "            skip_block([] {});\n"),
    fault("rows before a window are cleared ahead of the turn that others wait for", WINDOW_SM90,
          LONG_SEQUENCES_MHA, ("deadlock",), SKIP_LAST_BLOCK, CLEAR_AHEAD_OF_TURN),
    fault(
        "V of codes before a window as it is",
        CODES,
        LONG_SEQUENCES,
        (*NUMBERS, "uninitialised register"),  # as which four NaN codes count
        "row >= int(word & 0xffff) && ",
        "",
    ),
    # The backward pass, in which K is multiplied by dS, too.
    fault("rows before a window copied for gradients",
          "flash_bwd_hdim32_fp16_local_sm80", WINDOW, NUMBERS, "first + row >= first_row && ", ""),
    fault("rows past a diagonal copied for gradients",
          "flash_bwd_hdim32_fp16_causal_sm80", TOP_LEFT, NUMBERS, *END),
    fault("keys before a window taken for those in it, by TMA, for gradients",
          "flash_bwd_hdim64_fp16_local_sm90", WINDOW, NUMBERS,
          "const int row = mapped_row(params, block.first_key);", "const int row = block.first_key;"),
    fault("steps over the keys before a window, by TMA",
          "flash_bwd_hdim64_fp16_local_direct_sm90", WINDOW, NUMBERS,
          "const int row = mapped_row(params, (steps.last - i) * kBlockM);",
          "const int row = (steps.last - i) * kBlockM;"),
    fault("no block of keys begins before a window", WINDOW_BACKWARD, SEQUENCES, NUMBERS,
          " || rows_before_window(params, block.first_key) > 0;", ";"),
    fault("K before a window as it is", WINDOW_BACKWARD, SEQUENCES, NUMBERS,
          "    clear_rows<kPanels, kBlockN>(shared, 0, before_window);\n", ""),
    fault("V before a window as it is", WINDOW_BACKWARD, SEQUENCES, NUMBERS,
          "    clear_rows<kPanelsV, kBlockN>(shared + kVOffset, 0, before_window);\n", ""),
    fault("the peer's K before a window as it is",
          "flash_bwd_varlen_hdim192_fp16_local_pair_sm90", LONG_SEQUENCES_MHA, NUMBERS,
          "shared + kPeerKOffset, 0, rows_before_window(params, first_key_of_peer(block)));",
          "shared + kPeerKOffset, 0, 0);"),
    fault("zeros before a window without a proxy fence, for gradients", WINDOW_BACKWARD, SEQUENCES,
          ("proxy",),
          "0.0f, 0.0f, 0.0f, 0.0f);\n        }\n    }\n    fence_proxy_async();",
          "0.0f, 0.0f, 0.0f, 0.0f);\n        }\n    }"),
)  # fmt: skip


@pytest.mark.parametrize("planted", FAULTS, ids=[each.name for each in FAULTS])
def test_a_planted_fault_is_found(planted: Fault, compiler, fixed_seed):
    """By one of a few examples: the lengths of one may leave no unseen key in a block that is read."""
    verdicts = []
    for seed in range(fixed_seed, fixed_seed + 4):
        verdicts.append(verdict_of(planted, seed))
        if verdicts[-1] in planted.caught:
            return
    raise AssertionError(f"found {verdicts}")


def verdict_of(planted: Fault, seed: int) -> str | None:
    """What finds the fault with this example, None where nothing does."""
    variant = MAIN[planted.variant]
    example = make(variant, planted.shape, seed)

    def source_of(step):
        return planted.plant(render(step)) if step.name == planted.variant else render(step)

    try:
        is_different = differing(example, lambda each: simulated(variant, each, seed, source_of))
    except SimulationError as error:
        return error.check
    except AssertionError:  # wrong even where unseen keys are 0
        return WRONG
    return WRONG if is_different else None
