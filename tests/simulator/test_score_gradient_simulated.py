"""score_gradient in the simulator: every variant, arrays of all kinds, planted faults."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import numpy as np
import pytest

import flashgen
from flashgen.call.fields import PLAN_KEYWORDS
from flashgen.errors import SimulationError
from flashgen.families.formulas import modification
from flashgen.families.scores import load_scores
from flashgen.simulator.example import Shape, make, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator.calls import main_kernels
from simulator.faults import ASYNC, NUMBERS, WRONG, fault

VARIANTS = main_kernels(lambda spec: spec.operator == "score_gradient")
RAGGED = Shape(140, 70, heads=2, kv_heads=1, batch=2, head_dim=24)
GROUPED = Shape(20, 70, heads=4, kv_heads=2, head_dim=24)
FEW_KEYS = Shape(40, 25, heads=1, head_dim=8, mask="k", mask_alignment=1)
LONG = Shape(20, 70, heads=2, kv_heads=1, head_dim=24, head_dim_v=136, spread=4.0)
NAME = "score_gradient_hdim256_{}_sm80"
PLAIN, CAUSAL, DENSE = (NAME.format(f"fp16{mask}") for mask in ("", "_causal", "_dense"))
FP32 = NAME.format("fp32")
HOPPER = "score_gradient_hdim{}_{}_sm90"
WGMMA = HOPPER.format(64, "bf16")
# More than a tile of queries, and two tiles of keys, for several batch entries; pairs for more than one part.
TILES = Shape(140, 150, heads=2, kv_heads=1, batch=3, head_dim=40)
PARTS = Shape(20, 70, heads=2, kv_heads=1, batch=20, head_dim=24)
WIDE = Shape(40, 150, heads=2, kv_heads=1, batch=2, head_dim=200, head_dim_v=256)
# Formulas with the array that they are differentiated by, and variants that sum it.
SCORES = {
    "bias": ("bias", "bias", (PLAIN, DENSE, FP32)),
    "capped bias": ("3 * tanh((score + a[h, q, kv]) / 3)", "a", (CAUSAL,)),
    "turned bias": ("score + a[kv, q]", "a", (PLAIN,)),
    "keys": ("bias", "bias", (NAME.format("bf16_columns"),)),
    "gain of rows": ("score * a[h, q]", "a", (NAME.format("bf16_causal_rows"),)),
    "alibi": ("alibi", "slope", (NAME.format("fp16_causal_all"),)),
    "symmetric": ("alibi_symmetric", "slope", (NAME.format("fp32_all"),)),
    "distances": ("score + a[h, min(abs(kv - q), 15)]", "a", (NAME.format("bf16_diagonals"),)),
    "two indices": ("score + a[b, kv - q + 9, min(q - kv, h)]", "a", (NAME.format("fp32_local_diagonals"),)),
    "table of keys": ("score * a[min(h, 1), min(kv, 7)]", "a", (NAME.format("fp16_columns"),)),
    "table of rows": ("score + n * a[q - 5]", "a", (NAME.format("fp16_dense_rows"),)),
    "one element": ("where(kv < q, score, -a[0] * score)", "a", (NAME.format("bf16_local_all"),)),
}
# The same for Hopper, with the types of arrays.
HALF_BIAS = ("score + a[b, h, q, kv]", "a", {"a": "bf16"})
TWO_ARRAYS = (
    "score * a[q, kv] + c[h, q, kv]",
    "a",
    {"c": "f16"},
)  # c is staged, and differs from head to head
ON_HOPPER = {
    "bias": ("bias", "bias", {}, (WGMMA, HOPPER.format(64, "fp16_dense"))),
    "half bias": (*HALF_BIAS, (WGMMA, HOPPER.format(128, "fp16_causal"), HOPPER.format(96, "bf16_local"))),
    "capped bias": (*SCORES["capped bias"][:2], {"a": "bf16"}, (HOPPER.format(64, "fp16_causal"),)),
    "turned bias": (*SCORES["turned bias"][:2], {"a": "f16"}, (WGMMA,)),
    "two arrays": (*TWO_ARRAYS, (WGMMA,)),
    "keys": ("bias", "bias", {"bias": "bf16"}, (HOPPER.format(64, "bf16_columns"),)),
    "gain of rows": (*SCORES["gain of rows"][:2], {}, (HOPPER.format(64, "bf16_causal_rows"),)),
    "alibi": ("alibi", "slope", {}, (HOPPER.format(128, "fp16_causal_all"),)),
    "distances": (*SCORES["distances"][:2], {}, (HOPPER.format(64, "bf16_diagonals"),)),
}


def modified(variant, formula, array, types=MappingProxyType({})):
    by_name = load_scores(keywords=PLAN_KEYWORDS).by_name
    score = modification(formula, by_name, types, keywords=PLAN_KEYWORDS).with_types(types)
    return variant.modified(score.with_respect_to(array))


def verdict_of(variant, sources, shape, seed):
    """The check that found something, or None."""
    example = make(variant, shape, seed)
    libraries = [load(source, step.name) for source, step in zip(sources, variant.steps, strict=True)]
    try:
        run_steps(libraries, variant, example, seed=seed, overlap=True)
    except SimulationError as error:
        return error.check
    return None if example.judge().ok else WRONG


def sources_of(variant, planted=None):
    """The source of each step, with a fault planted in the one step that has its place."""
    sources = [render(step) for step in variant.steps]
    if planted is None:
        return sources
    with_fault = []
    for source in sources:
        try:
            with_fault.append(planted.plant(source))
        except AssertionError:
            with_fault.append(source)
    assert sum(x != y for x, y in zip(sources, with_fault, strict=True)) == 1
    return with_fault


@pytest.mark.parametrize("name", [name for name in VARIANTS if "diagonals" not in name])
def test_the_gradient_of_the_scores(name, compiler, fresh_seed):
    variant = VARIANTS[name]
    for shape in (RAGGED, FEW_KEYS, LONG):
        if shape is LONG and variant.axis("head_dim_v") < LONG.head_dim_v:
            continue
        assert verdict_of(variant, sources_of(variant), shape, fresh_seed) is None, shape


@pytest.mark.parametrize("case", SCORES)
def test_the_gradient_of_an_array(case, compiler, fresh_seed):
    formula, array, names = SCORES[case]
    for name in names:
        variant = modified(VARIANTS[name], formula, array)
        for shape in (RAGGED, GROUPED):
            assert verdict_of(variant, sources_of(variant), shape, fresh_seed) is None, (name, shape)


@pytest.mark.parametrize("case", ON_HOPPER)
def test_the_gradient_of_an_array_on_hopper(case, compiler, fresh_seed):
    formula, array, types, names = ON_HOPPER[case]
    for name in names:
        variant = modified(VARIANTS[name], formula, array, types)
        for shape in (TILES, GROUPED):
            assert verdict_of(variant, sources_of(variant), shape, fresh_seed) is None, (name, shape)


@pytest.mark.parametrize("name", [HOPPER.format(256, "bf16"), HOPPER.format(256, "fp16_diagonals")])
def test_more_slices_than_stages(name, compiler, fresh_seed):
    """Q and K leave their stages before V arrives."""
    case = "distances" if "diagonals" in name else "bias"
    variant = modified(VARIANTS[name], *SCORES[case][:2])
    assert verdict_of(variant, sources_of(variant), WIDE, fresh_seed) is None


def test_parts_of_batch_entries(compiler):
    """The join kernel adds the parts up. A seed decides how the array is broadcast."""
    variant = modified(VARIANTS[WGMMA], *HALF_BIAS)
    parts = set()
    for seed in range(4):
        parts.add(make(variant, PARTS, seed).problem.pair_parts)
        assert verdict_of(variant, sources_of(variant), PARTS, seed) is None, seed
    assert max(parts) > 1


@pytest.mark.parametrize(
    ("name", "formula", "type"),
    [
        (PLAIN, "score + a[h, q, kv]", "bf16"),
        (NAME.format("bf16_columns"), "score + a[h, kv]", "f16"),
        (NAME.format("fp32_diagonals"), "score * a[h, max(kv - q, 0)]", "bf16"),
    ],
)
def test_the_gradient_of_an_array_of_16_bits(name, formula, type, compiler, fresh_seed):
    variant = modified(VARIANTS[name], formula, "a", {"a": type})
    assert variant.score.reads_half
    assert verdict_of(variant, sources_of(variant), RAGGED, fresh_seed) is None


SQUARE = Shape(140, 140, heads=2, kv_heads=1, head_dim=24)
FAULTS = (
    fault("the query head as kv head", PLAIN, GROUPED,
          (WRONG, "global bounds", "uninitialised global memory"),
          "const int kv_head = of_pair_tile.head / params.group_size;",
          "const int kv_head = of_pair_tile.head;"),
    fault("the kv head of another group", PLAIN, GROUPED, NUMBERS,
          "const int kv_head = of_pair_tile.head / params.group_size;",
          "const int kv_head = of_pair_tile.head % (params.num_heads_q / params.group_size);"),
    fault("the last pair left out", PLAIN, RAGGED, NUMBERS,
          "count(params.batch_size / params.kept_batch * heads) {}",
          "count(max(1, params.batch_size / params.kept_batch * heads - 1)) {}"),
    fault("one batch entry alone", PLAIN, RAGGED, NUMBERS,
          "tile.kept_batch + pair / heads;", "tile.kept_batch;"),
    fault("a shifted row", PLAIN, RAGGED, (WRONG, "global bounds"),
          "row * params.dscore_query_step", "(row + 1) * params.dscore_query_step"),
    fault("the element of another head", PLAIN, RAGGED, (WRONG, "global bounds", "race"),
          "tile.kept_head * params.dscore_head_step;", "0 * params.dscore_head_step;"),
    fault("delta of another head", PLAIN, RAGGED, NUMBERS,
          "const int64_t first = first_unit_row(params, tile.batch, tile.head);",
          "const int64_t first = first_unit_row(params, tile.batch, 0);"),
    fault("delta left out", PLAIN, RAGGED, NUMBERS,
          "ds[0][j][e] -= rows.delta[e / 2];", "ds[0][j][e] -= 0.0f;"),
    fault("dlse left out", PLAIN, RAGGED, NUMBERS, "row_delta(lse, sum, dlse)", "row_delta(lse, sum, 0.0f)"),
    fault("half of a row of O", PLAIN, RAGGED, NUMBERS, "column < columns;", "column < columns / 2;"),
    fault("the diagonal one key late", CAUSAL, SQUARE, NUMBERS,
          "query + params.diagonal_offset + 1)", "query + params.diagonal_offset + 2)"),
    fault("a slice read before it is there", PLAIN, RAGGED, ASYNC,
          "cp_async_wait<kStages - 2>();", "cp_async_wait<kStages - 1>();"),
    fault("a slice over one that other warps read", PLAIN, RAGGED, ASYNC,
          "cp_async_wait<kStages - 2>();\n        barrier_sync(kThreads);", "cp_async_wait<kStages - 2>();"),
    fault("the first slice of V alone", PLAIN, LONG, NUMBERS,
          "(params.head_dim_v + kSliceDims - 1) / kSliceDims),", "1),"),
    fault("TF32 without the low part of keys", FP32, LONG, NUMBERS,
          "mma_m16n8k8_tf32(accumulator, a.high, b_low[0], b_low[1]);", ""),
    fault("without the derivative", CAUSAL, SQUARE, NUMBERS,
          "ds[0][j][2 * row8 + e] *= modified.derivative;", ""),
    fault("columns of one warp alone", NAME.format("bf16_columns"), RAGGED, NUMBERS,
          "for (int i = 0; i < kWarps; ++i) sum +=", "for (int i = 0; i < 1; ++i) sum +="),
    fault("a sum that misses the last block", NAME.format("bf16_columns"), RAGGED, NUMBERS,
          "block < tiles.row_blocks;", "block < tiles.row_blocks - 1;"),
    fault("a sum of rows that misses the last block", NAME.format("bf16_causal_rows"), SQUARE, NUMBERS,
          "block < tiles.key_blocks;", "block < tiles.key_blocks - 1;"),
    fault("the first warp alone", NAME.format("fp16_causal_all"), SQUARE, NUMBERS,
          "for (int i = 0; i < kWarps; ++i) sum +=", "for (int i = 0; i < 1; ++i) sum +="),
    fault("a diagonal that ends early", NAME.format("bf16_diagonals"), RAGGED, NUMBERS,
          "min(kBlockM, kDiagonals - 1 - diagonal)", "min(kBlockM, kDiagonals - 2 - diagonal)"),
    fault("the diagonal of the next distance", NAME.format("bf16_diagonals"), RAGGED, NUMBERS,
          "distance - (params.seqlen_q - 1);", "distance - params.seqlen_q;"),
    fault("a block too few of a diagonal", NAME.format("bf16_diagonals"), SQUARE, NUMBERS,
          "(first_key + kBlockM - 1 + kBlockN) / kBlockN)", "(first_key + kBlockM - 1) / kBlockN)"),
    fault("distances one too early", NAME.format("bf16_diagonals"), RAGGED, NUMBERS,
          "place - (params.seqlen_kv - 1));", "place - params.seqlen_kv);"),
    fault("the first head alone", NAME.format("fp16_columns"), RAGGED, NUMBERS,
          "is_of_head ? first_head + 1 : params.kept_heads;", "first_head + 1;"),
    fault("a stage released while its MMAs run", WGMMA, TILES, ("register in flight", *ASYNC),
          "await_mma<1>(scores);\n", "await_mma<2>(scores);\n"),
    fault("a stage filled while MMAs read it", WGMMA, TILES, ("mbarrier", *ASYNC),
          "ring.parity ^ 1);\n    mbarrier_arrive_expect_tx", "1);\n    mbarrier_arrive_expect_tx"),
    fault("dP of the second consumer for the first", WGMMA, TILES, NUMBERS,
          "warp / 4 * 64 * kPanelRowBytes", "0 * 64 * kPanelRowBytes"),
    fault("the elements of another head", WGMMA, GROUPED, NUMBERS,
          "if (of_lane.rows[0].c == row) return;", "if (row != nullptr) return;"),
    fault("a part left out", WGMMA, PARTS, NUMBERS,
          "part < params.pair_parts;", "part < max(1, params.pair_parts - 1);"),
    fault("pairs in two parts", WGMMA, PARTS, NUMBERS,
          "work.first_pair = work.part * pairs_of_part;", "work.first_pair = 0;"),
    fault("a turn that both consumers have", WGMMA, TILES, ("barrier", "deadlock", WRONG),
          "if (consumer == 1) end_turn();", "end_turn();"),
    fault("a chunk of other keys", WGMMA, TILES, (WRONG, "race"),
          "return lane % 4 * 8;", "return lane % 4 * 4;"),
)  # fmt: skip
# The modification of SCORES that a fault is planted for; the scores themselves without an entry.
MODIFIED = {
    "the last pair left out": "bias",
    "one batch entry alone": "turned bias",
    "a shifted row": "bias",
    "the element of another head": "bias",
    "without the derivative": "capped bias",
    "columns of one warp alone": "keys",
    "a sum that misses the last block": "keys",
    "a sum of rows that misses the last block": "gain of rows",
    "the first warp alone": "alibi",
    "a diagonal that ends early": "distances",
    "the diagonal of the next distance": "distances",
    "a block too few of a diagonal": "distances",
    "distances one too early": "distances",
    "the first head alone": "table of keys",
}
TYPED = {
    "the elements of another head": TWO_ARRAYS,
    "a part left out": HALF_BIAS,
    "pairs in two parts": HALF_BIAS,
    "a chunk of other keys": HALF_BIAS,
}


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted, compiler, fixed_seed):
    variant = VARIANTS[planted.variant]
    if planted.name in MODIFIED:
        variant = modified(variant, *SCORES[MODIFIED[planted.name]][:2])
    if planted.name in TYPED:
        variant = modified(variant, *TYPED[planted.name])
    sources = sources_of(variant, planted)
    # An array that is broadcast over heads, as some seeds have it, does not show a fault of its heads.
    found = (verdict_of(variant, sources, planted.shape, fixed_seed + more) for more in range(12))
    assert next((check for check in found if check is not None), None) in planted.caught


def test_the_steps_of_a_call():
    """A gradient that needs no sum, or no gathering, leaves these steps out."""
    from flashgen.schedule.plan import plan_steps
    from flashgen.simulator import hardware

    for case, expected in (
        ("bias", ["rows", "main"]),
        ("alibi", ["rows", "main", "sum"]),
        ("distances", ["rows", "main", "sum", "gather"]),
    ):
        formula, array, (name, *_) = SCORES[case]
        variant = modified(VARIANTS[name], formula, array)
        problem = make(variant, dataclasses.replace(RAGGED, batch=1), 0).problem
        steps = plan_steps(problem, variant, hardware.pretend_for(variant)).steps
        assert [step.variant.step for step in steps] == expected


def test_a_call_takes_these_kernels(compiler):
    """By dispatch, on a GPU that the simulator pretends."""
    rng = np.random.default_rng()
    q, k, v = (rng.standard_normal((1, rows, 2, 16), np.float32) for rows in (20, 30, 30))
    table = rng.standard_normal((2, 8), np.float32)
    options = {"score": "score + t[h, min(abs(kv - q), 7)]", "params": {"t": table}}
    out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
    results = [
        flashgen.attention_backward(out, q, k, v, out, lse, dparams=("t",), backend=backend, **options)[-1]
        for backend in ("cpu", "simulator")
    ]
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-4)
