"""Attention of e4m3 codes whose V a step transposes before the main one, in the simulator."""

from __future__ import annotations

import pytest

from flashgen.operators.fp8 import ALL_SCALES
from flashgen.simulator.example import Shape, make
from simulator.calls import check_of, main_kernels, simulated, with_fault, within_the_bound
from simulator.edits import replace
from simulator.faults import WRONG

pytestmark = pytest.mark.usefixtures("compiler")

FAMILY = "flash_fwd_fp8_tiles"
KERNELS = main_kernels(lambda spec: spec.family == FAMILY)
ROWS = f"{FAMILY}_hdim128_e4m3_promoted_sm90"
# A tile of 96 keys, and two panels of V.
NARROW, WIDE = f"{FAMILY}_hdim64_e4m3_promoted_local_gqa_sm90", f"{FAMILY}_hdim256_e4m3_promoted_sm90"
LONG, BLIND = Shape(130, 800, 2), Shape(300, 200, 6, 2, batch=2, gap=16)
GROUPED = Shape(100, 300, 4, 2, batch=2)
WINDOW = Shape(200, 500, 4, 2, batch=2, window=(90, 20))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (ROWS, LONG),
        (NARROW, WINDOW),
        (NARROW, BLIND),
        (WIDE, Shape(100, 600, 2, head_dim_v=208)),
        (f"{FAMILY}_hdim256_e4m3_fast_causal_codes_gqa_sm90", GROUPED),
        (f"{FAMILY}_hdim64_e4m3_promoted_local_sm90", Shape(200, 512, 2, window=(90, 20))),
        (f"{FAMILY}_hdim64_e4m3_fast_gqa_sm90", GROUPED),
        (f"{FAMILY}_hdim96_e4m3_promoted_sink_gqa_sm90", Shape(100, 300, 4, 2, head_dim_v=80)),
        (f"{FAMILY}_hdim192_e4m3_promoted_causal_sm90", Shape(200, 300, 1)),
        (f"{FAMILY}_hdim192_128_e4m3_fast_local_sink_codes_sm90", Shape(200, 300, 2, window=(90, 10))),
    ],
)
def test_results_are_within_the_bound(name, shape, fresh_seed):
    within_the_bound(KERNELS[name], shape, fresh_seed)


@pytest.mark.parametrize("name", [ROWS, f"{FAMILY}_hdim64_e4m3_fast_causal_gqa_sm90"])
def test_bits_do_not_depend_on_when_v_is_transposed(name, fresh_seed):
    """Dispatch may take either kernel."""
    beside = main_kernels(lambda spec: spec.family == "flash_fwd_fp8")[name.replace("_tiles", "")]
    shape = Shape(100, 304, 2, batch=2) if "gqa" not in name else GROUPED
    example, other = make(KERNELS[name], shape, fresh_seed), make(beside, shape, fresh_seed)
    assert (example.q == other.q).all()
    assert (example.v == other.v).all()
    assert all((example.others[x] == other.others[x]).all() for x in ALL_SCALES if x in example.others)
    simulated(KERNELS[name], example, fresh_seed)
    simulated(beside, other, fresh_seed)
    assert (example.out == other.out).all()


# Planted faults: kernel, shape, step, what finds it, old text, new text.
NUMBERS, RACE = {WRONG}, {"race", "copy in flight", "uninitialised shared memory"}
PHASES = RACE | {"deadlock", "mbarrier", "proxy", WRONG}
FAULTS = {
    "V^T written over while it is read": (
        ROWS, LONG, "main", PHASES, "mbarrier_wait(shared.v_empty(ring.stage), ring.parity ^ 1);", ""),
    "V^T not announced": (
        ROWS, LONG, "main", PHASES, "mbarrier_arrive_expect_tx(shared.v_full(ring.stage), kVBytes);", ""),
    "V^T of the first KV block": (ROWS, LONG, "main", NUMBERS, "num_kv_blocks + kv_block;", "num_kv_blocks;"),
    "V^T of another head": (
        ROWS, LONG, "main", NUMBERS, "params.num_heads_kv + tile.kv_head) * num_kv_blocks",
        "params.num_heads_kv + (tile.kv_head ^ 1)) * num_kv_blocks"),
    "V^T of the first batch entry": (
        ROWS, Shape(100, 300, 2, batch=2), "main", NUMBERS, "int64_t(tile.batch) * params.num_heads_kv", "0"),
    "tiles of whole KV blocks alone": (
        ROWS, LONG, "main", NUMBERS | {"global bounds"},
        "(params.seqlen_kv + kBlockN - 1) / kBlockN; const int64_t index",
        "params.seqlen_kv / kBlockN; const int64_t index"),
    "tiles read before they are written": (
        ROWS, LONG, "main", {"dependency"}, "griddepcontrol_wait();", ""),
    "V transposed before it is there": (ROWS, LONG, "transpose", PHASES, "mbarrier_wait(loaded, 0);", ""),
    "a tile copied before it is written": (
        ROWS, LONG, "transpose", PHASES, "threadIdx.x / 32); __syncthreads();", "threadIdx.x / 32);"),
    "a warp too few": (
        ROWS, LONG, "transpose", PHASES, "transpose_block(smem, smem + kRowsBytes, threadIdx.x / 32);",
        "if (threadIdx.x >= 32) transpose_block(smem, smem + kRowsBytes, threadIdx.x / 32);"),
    "keys past the block not cleared": (
        NARROW, WINDOW, "transpose", RACE, "keys < kBlockN ? load_shared_128", "keys >= 0 ? load_shared_128"),
    "the window of the first key": (
        NARROW, WINDOW, "transpose", NUMBERS, "mapped_row(params, kv_block * kBlockN)", "kv_block * kBlockN"),
    "V of another head": (
        ROWS, LONG, "transpose", NUMBERS, "head % params.num_heads_kv, head",
        "(head + 1) % params.num_heads_kv, head"),
    "one panel of V": (
        WIDE, LONG, "transpose", PHASES, "panel * kPanelColumns, row, head, batch", "0, row, head, batch"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, fixed_seed):
    name, shape, step, caught, old, new = FAULTS[fault]
    planted = with_fault(
        lambda source: replace(source, old, new, fault),
        lambda of_step: of_step.is_main if step == "main" else of_step.step == step,
    )
    checks = {check_of(KERNELS[name], shape, seed, planted) for seed in range(fixed_seed, fixed_seed + 3)}
    assert checks - {None} <= caught
    assert checks - {None}
