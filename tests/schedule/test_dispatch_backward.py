"""Which of the shipped kernels the backward pass takes on Hopper."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_gpu import H200
from flashgen.families.load import load_specs
from flashgen.families.scores import load_scores
from flashgen.operators.arguments import view_of_shape
from flashgen.operators.backward import normalise
from flashgen.schedule.cost import cost
from flashgen.schedule.dispatch import offers, select
from flashgen.schedule.fastdivision import divisor
from flashgen.schedule.grid import expected_tiles, launch_of, row_blocks, tiles
from flashgen.schedule.parameters import parameters
from flashgen.schedule.plan import plan_steps
from flashgen.source.params import layout

SPECS = load_specs()
PACKED = {
    variant.name: variant
    for spec in SPECS
    if spec.operator == "attention_backward" and spec.has_lengths
    for variant in spec.variants()
    if variant.is_main
}


def problem_of(head_dim, head_dim_v, dtype="bf16", seqlen=1000, batch=2, **options):
    rows, keys = (batch, seqlen, 4), (batch, seqlen, 2)
    q, k = (view_of_shape((*of, head_dim), dtype, 0) for of in (rows, keys))
    dout, v = (view_of_shape((*of, head_dim_v), dtype, 0) for of in (rows, keys))
    lse = view_of_shape((batch, 4, seqlen), "fp32", 0)
    return normalise(dout, q, k, v, dout, lse, **options)


def taken(*head_dims, **options):
    problem = problem_of(*head_dims, **options)
    return select(problem, H200, offers(problem, H200, SPECS))


@pytest.mark.parametrize(
    ("head_dims", "held"),
    [
        ((128, 128), (128, 128)),
        ((136, 8), (192, 128)),
        ((192, 96), (192, 128)),
        ((160, 160), (192, 192)),
        ((192, 136), (192, 192)),
        ((200, 128), (256, 256)),
        ((248, 248), (256, 256)),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 0)}], ids=str)
@pytest.mark.parametrize("seqlen", [1, 16384])
def test_kernels_for_hopper_hold_both_head_dims(head_dims, held, options, seqlen):
    variant = taken(*head_dims, seqlen=seqlen, **options)
    assert (variant.target, variant.head_dim, variant.head_dim_v) == ("sm90", *held)


@pytest.mark.parametrize(("seqlen", "blocks"), [(1, 2), (64, 2), (65, 2), (129, 4), (1000, 16)])
def test_each_head_has_whole_clusters(seqlen, blocks):
    heads = 4  # two kv heads in each of two entries; both query heads of a group in one part or two
    problem = problem_of(192, 192, seqlen=seqlen)
    variant = next(v for v in offers(problem, H200, SPECS) if v.grid.cluster == 2)
    assert row_blocks(problem, variant) == blocks
    assert tiles(problem, variant) == heads * blocks
    assert launch_of(problem, variant, H200, parts=2).blocks == 2 * heads * blocks


@pytest.mark.parametrize(
    ("batch", "seqlen", "cluster"), [(400, 190, 1), (400, 200, 2), (4, 16384, 2), (1, 64, 2)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_block_of_a_cluster_is_worth_its_time_or_not(batch, seqlen, cluster, causal):
    """And no order of additions is taken that was not asked for."""
    for of_v in (192, 128):
        variant = taken(192, of_v, batch=batch, seqlen=seqlen, causal=causal)
        assert (variant.grid.cluster, dict(variant.axes)["dq_order"]) == (cluster, "none")
    ordered = taken(192, 192, batch=batch, seqlen=seqlen, causal=causal, deterministic=True)
    assert (ordered.grid.cluster, dict(ordered.axes)["dq_order"]) == (cluster, "ordered")


@pytest.mark.parametrize("head_dim", [192, 256])
def test_what_they_have_no_kernel_of_is_left_to_those_for_every_gpu(head_dim):
    assert taken(head_dim, head_dim, dtype="fp32").target == "sm80"


@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_deterministic_and_modified_scores_have_kernels_for_hopper(head_dim):
    softcap = {"score": load_scores(keywords=()).by_name["softcap"], "score_scalars": (30.0,)}
    for options in ({}, softcap):
        variant = taken(head_dim, head_dim, seqlen=4096, deterministic=True, **options)
        assert variant.target == "sm90"
        assert dict(variant.axes)["dq_order"] == "ordered"


def taken_of_heads(batch, seqlen, heads, kv_heads=None, head_dim=64, **options):
    q, k = (view_of_shape((batch, seqlen, of, head_dim), "bf16", 0) for of in (heads, kv_heads or heads))
    lse = view_of_shape((batch, heads, seqlen), "fp32", 0)
    problem = normalise(q, q, k, k, q, lse, **options)
    variant = select(problem, H200, offers(problem, H200, SPECS))
    return variant, launch_of(problem, variant, H200).blocks


@pytest.mark.parametrize(
    ("head_dim", "sizes", "tile", "blocks"),
    [
        *((head_dim, (1, 512, 16), "both", 128) for head_dim in (32, 64)),
        *((head_dim, (1, 320, 16), "both", 80) for head_dim in (32, 64)),
        # No more tiles than there are multiprocessors.
        *((head_dim, (1, 256, 16), "", 128) for head_dim in (32, 64)),
        *((head_dim, (1, 512, 16), "", 128) for head_dim in (96, 128)),
        # In rounds, each so short that three kernels take longer.
        *((head_dim, (16, 128, 16), "", 1024) for head_dim in (32, 64)),
        *((head_dim, (16, 128, 16), "", 512) for head_dim in (96, 128)),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"deterministic": True}], ids=str)
def test_small_problems_take_one_kernel_with_tiles_of_both_kinds(head_dim, options, sizes, tile, blocks):
    variant, launched = taken_of_heads(*sizes, head_dim=head_dim, **options)
    assert (variant.spec, len(variant.steps), launched) == ("flash_bwd_direct_sm90", 1, blocks)
    assert variant.tile_name == tile


def direct(problem, tile):
    (found,) = (
        v for v in offers(problem, H200, SPECS) if v.spec == "flash_bwd_direct_sm90" and v.tile_name == tile
    )
    return found


@pytest.mark.parametrize(("tile", "of_keys", "of_queries"), [("", 40, 24), ("both", 28, 16)])
def test_a_grid_of_two_kinds_of_tiles(tile, of_keys, of_queries):
    """140 queries and 400 keys in tiles of 64: 3 tiles of queries and 7 of keys for a head of each."""
    q, k = view_of_shape((1, 140, 4, 64), "bf16", 0), view_of_shape((1, 400, 4, 64), "bf16", 0)
    problem = normalise(q, q, k, k, q, view_of_shape((1, 4, 140), "fp32", 0))
    assert launch_of(problem, direct(problem, tile), H200).blocks == of_keys
    values = parameters(problem, direct(problem, tile), H200)
    assert (values["num_row_blocks"], values["num_row_blocks_beside"]) == (7, 3)
    assert values["num_row_blocks_beside_divisor"] == divisor(3)

    q, k = view_of_shape((2, 200, 2, 64), "bf16", 0), view_of_shape((2, 250, 1, 64), "bf16", 0)
    problem = normalise(q, q, k, k, q, view_of_shape((2, 2, 200), "fp32", 0))
    assert launch_of(problem, direct(problem, tile), H200).blocks == of_queries


@pytest.mark.parametrize(
    ("sizes", "kv_heads"),
    [((8, 320, 16), 2), ((4, 384, 16), 4), ((16, 256, 16), 16), ((3, 256, 16), 16), ((64, 128, 16), 16)],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_no_round_has_thread_blocks_with_a_tile_of_each_kind(sizes, kv_heads, causal):
    variant, _ = taken_of_heads(*sizes, kv_heads, causal=causal)
    assert variant.tile_name != "both"


def test_a_tile_that_has_a_multiprocessor_to_itself_is_faster():
    """0.5 ** 0.3 of the time of two that share one, for the same steps."""
    times = []
    for heads in (8, 16):
        x = view_of_shape((1, 512, heads, 64), "bf16", 0)
        problem = normalise(x, x, x, x, x, view_of_shape((1, heads, 512), "fp32", 0))
        times.append(cost(problem, H200, direct(problem, "")))
    assert times[0] / times[1] == pytest.approx(0.5**0.3)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 1024, 16), {}),  # twice as many tiles as there are multiprocessors
        ((16, 4096, 16), {"causal": True}),
        ((1, 512, 16, 4), {}),  # its tiles of keys would have four times as many steps
        ((1, 512, 16), {"score": load_scores(keywords=()).by_name["softcap"], "score_scalars": (30.0,)}),
    ],
    ids=str,
)
def test_others_are_left_to_three_kernels(sizes, options):
    variant, _ = taken_of_heads(*sizes, **options)
    assert variant.spec == "flash_bwd_sm90"


def packed(head_dim, dtype="bf16", tokens=1000, sequences=8, bound=None, **options):
    q, k = (view_of_shape((tokens, heads, head_dim), dtype, 0) for heads in (4, 2))
    lse = view_of_shape((4, tokens), "fp32", 0)
    cu = view_of_shape((sequences + 1,), "int32", 0)
    given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": bound, "max_seqlen_kv": bound}
    return normalise(q, q, k, k, q, lse, **given, **options)


def taken_packed(head_dim, **options):
    problem = packed(head_dim, **options)
    return select(problem, H200, offers(problem, H200, SPECS))


@given(
    name=st.sampled_from(
        ["hdim64_bf16_gqa", "hdim192_bf16_gqa", "hdim192_bf16_pair_gqa", "hdim256_bf16_pair_gqa"]
    ),
    tokens=st.integers(1, 300_000),
    sequences=st.integers(1, 500),
    bound=st.one_of(st.none(), st.integers(1, 3000)),
)
def test_the_table_of_key_blocks_has_an_entry_for_each_thread_block(name, tokens, sequences, bound):
    variant = PACKED[f"flash_bwd_varlen_{name}_sm90"]
    problem = packed(variant.head_dim, tokens=tokens, sequences=sequences, bound=bound)
    _, (preprocess, main, *_), workspace = plan_steps(problem, variant, H200)
    table = next(each for each in workspace.slices if each.name == "key_blocks")
    assert 32 * main.launch.blocks <= table.nbytes
    offset = layout(preprocess.variant.params).offsets["num_key_blocks"]
    assert struct.unpack_from("<i", preprocess.struct.template, offset) == (main.launch.blocks,)


@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 136, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 0)}], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_packed_sequences_have_kernels_for_hopper(head_dim, options, dtype, deterministic):
    variant = taken_packed(head_dim, dtype=dtype, deterministic=deterministic, **options)
    spec = "flash_bwd_varlen_sm90" if head_dim <= 128 else "flash_bwd_varlen_wide_sm90"
    assert (variant.spec, variant.head_dim) == (spec, {8: 32, 136: 192}.get(head_dim, head_dim))
    assert dict(variant.axes)["dq_order"] == ("ordered" if deterministic else "none")


@pytest.mark.parametrize(
    "options",
    [{"dtype": "fp32"}, {"tokens": 0}],
    ids=str,
)
def test_other_gradients_of_packed_sequences_are_left_to_those_for_every_gpu(options):
    assert taken_packed(**{"head_dim": 128} | options).spec == "flash_bwd_varlen_sm80"


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("longest", [100, 1000, 20_000])
def test_tiles_of_packed_sequences_are_expected_as_random_lengths_make_them(cluster, longest):
    lengths = np.random.default_rng(longest).integers(1, longest, size=300, endpoint=True)
    problem = packed(192, tokens=int(lengths.sum()), sequences=300, bound=longest)
    variant = next(v for v in offers(problem, H200, SPECS) if v.grid.cluster == cluster)
    keys = cluster * variant.tile_value("block_n")
    made = 2 * cluster * sum(-(-lengths // keys))  # of two kv heads
    assert expected_tiles(problem, variant) == pytest.approx(made, rel=0.05)
    assert made <= tiles(problem, variant)


@pytest.mark.parametrize(
    ("sequences", "tokens", "cluster"),
    [
        (64, 32_768, 2),
        (4, 16_384, 2),
        (256, 32_768, 1),
        (200, 12_800, 1),
    ],  # 512, 4,096, 128 and 64 in the mean
)
def test_short_packed_sequences_have_no_clusters(sequences, tokens, cluster):
    assert taken_packed(192, sequences=sequences, tokens=tokens, causal=True).grid.cluster == cluster
