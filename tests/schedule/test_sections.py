import heapq

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from backward_variants import MAIN
from fake_gpu import H200
from flashgen.families.load import load_specs
from flashgen.operators.arguments import view_of_shape
from flashgen.operators.backward import normalise
from flashgen.operators.blocklists import BlockLists
from flashgen.operators.masks import UNBOUNDED
from flashgen.schedule.grid import heads, row_blocks, rows
from flashgen.schedule.sections import clear_distance, sections
from problems import problem, replace

CALL = problem(
    batch=1,
    seqlen_q=4096,
    seqlen_kv=4096,
    num_heads_q=16,
    num_heads_kv=16,
    head_dim=128,
    mask_type="causal",
    window_right=0,
    q_strides=(4096 * 2048, 2048, 128),
    k_strides=(4096 * 2048, 2048, 128),
    v_strides=(4096 * 2048, 2048, 128),
    out_strides=(4096 * 2048, 2048, 128),
)
SHIPPED = [
    variant
    for spec in load_specs()
    if spec.operator == "attention" and not spec.has_lengths and not spec.on_request
    for variant in spec.variants()
    if variant.dtype != "bf16" and variant.is_main  # the tiles of a step that combines have no order
]
UNEVEN = [
    v for v in SHIPPED if not v.grid.persistent and v.gqa == "mha" and v.mask_type in ("causal", "local")
]
PERSISTENT = [v for v in SHIPPED if v.grid.persistent and v.gqa == "mha" and v.mask_type == "causal"]


def call_for(variant, batch, kv_heads, seqlen, group=1):
    return replace(
        CALL,
        batch=batch,
        seqlen_q=seqlen,
        num_heads_kv=kv_heads,
        num_heads_q=kv_heads * group,
        mask_type=variant.mask_type,
        window_left=1024 if variant.mask_type == "local" else UNBOUNDED,
        window_right=0 if variant.mask_type in ("causal", "local") else UNBOUNDED,
        mask_strides=(0, 0, 4096) if variant.mask_type == "dense" else None,
        block_lists=BlockLists(128, 128, 1, 1, 99) if variant.mask_type == "blocks" else None,
    )


def backward_call(batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim):
    q, k = (batch, seqlen_q, num_heads_q, head_dim), (batch, seqlen_kv, num_heads_kv, head_dim)
    q, k = (view_of_shape(shape, "bf16", 0) for shape in (q, k))
    return normalise(q, q, k, k, q, view_of_shape((batch, num_heads_q, seqlen_q), "fp32", 0))


def row_blocks_of(call, variant):
    return max(1, -(-rows(call, variant) // variant.tile_value("block_m")))


def order(call, variant):
    """Head and row block of each tile, as find_tile in the kernels numbers them."""
    size, count = sections(call, variant, H200)
    total, row_blocks = heads(call, variant) * call.batch, row_blocks_of(call, variant)
    for section in range(count):
        first = section * size
        last = total if section == count - 1 else first + size
        for block in reversed(range(row_blocks)):
            for head in range(first, last):
                yield head, block


@given(
    st.sampled_from(SHIPPED), st.integers(0, 9), st.integers(1, 40), st.integers(0, 9000), st.integers(1, 8)
)
def test_sections_are_none_empty_and_hold_every_head_once(variant, batch, kv_heads, seqlen, group):
    call = call_for(variant, batch, kv_heads, seqlen, 1 if variant.gqa == "mha" else group)
    size, count = sections(call, variant, H200)
    total = max(1, heads(call, variant) * batch)
    assert size >= 1
    assert count >= 1
    # The last section of lists has all that is left over, of other masks at most half of one.
    most_left_over = size - 1 if variant.mask_type == "blocks" else size // 2
    assert (count - 1) * size < total <= count * size + most_left_over


@given(st.sampled_from(UNEVEN), st.integers(1, 64), st.integers(1, 32), st.integers(1, 16384))
def test_a_section_is_small_or_its_keys_stay_in_l2(variant, batch, num_heads, seqlen):
    """And enough tiles of a head run at a time to share them."""
    call = replace(call_for(variant, batch, num_heads, seqlen), seqlen_kv=seqlen)
    size, _ = sections(call, variant, H200)
    tiles = -(-H200.num_sms // row_blocks_of(call, variant))
    if size > max(tiles, H200.num_sms // 3):
        assert call.mask_type == "causal"
        assert size * seqlen * 2 * CALL.head_dim * variant.element_bytes <= H200.l2_bytes
        running = H200.num_sms * variant.tile_value("min_blocks")
        assert running / size >= 3
        assert running / size * variant.tile_value("block_m") >= 384


@pytest.mark.parametrize(("seqlen", "expected"), [(1024, (86, 3)), (2048, (43, 3)), (4096, (32, 2))])
def test_short_causal_sequences_come_in_large_sections(seqlen, expected):
    """Which balance better, as long as L2 holds the keys."""
    (variant,) = (v for v in UNEVEN if v.name == "flash_fwd_hdim128_fp16_causal_sm80")
    call = replace(call_for(variant, 16384 // seqlen, 16, seqlen), seqlen_kv=seqlen)
    assert sections(call, variant, H200) == expected


@given(st.sampled_from(PERSISTENT), st.integers(1, 64), st.integers(1, 32), st.integers(600, 16384))
def test_thread_blocks_of_a_persistent_causal_grid_have_the_same_work(variant, batch, num_heads, seqlen):
    call = call_for(variant, batch, num_heads, seqlen)
    row_blocks = row_blocks_of(call, variant)
    assume(6 * H200.num_sms <= batch * num_heads * row_blocks <= 20000)
    load = [0] * H200.num_sms
    for index, (_, block) in enumerate(order(call, variant)):
        turn, place = divmod(index, H200.num_sms)
        load[place if turn % 2 == 0 else -1 - place] += block + 1
    # What is left over at the end may cost the longest tile.
    assert max(load) <= 1.03 * sum(load) / len(load) + row_blocks


@pytest.mark.parametrize("seqlen", [1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_common_shapes_balance_within_five_percent(head_dim, seqlen):
    variant = next(v for v in PERSISTENT if v.head_dim == head_dim and v.tile_name == "")
    call = call_for(variant, 16384 // seqlen, 2048 // head_dim, seqlen)
    load = [0] * H200.num_sms
    for index, (_, block) in enumerate(order(call, variant)):
        turn, place = divmod(index, H200.num_sms)
        load[place if turn % 2 == 0 else -1 - place] += block + 1
    assert max(load) <= 1.05 * sum(load) / len(load)


def test_tiles_that_are_equally_long_go_in_sections_of_one_wave():
    variant = next(
        v for v in SHIPPED if v.is_main and v.grid.persistent and v.mask_type == "none" and v.head_dim == 256
    )
    call = call_for(variant, 16, 16, 1024)
    size, count = sections(call, variant, H200)
    # 17 heads would be the first to fill the device; 256 of them are cut evenly.
    assert (size, count, row_blocks_of(call, variant)) == (16, 16, 8)


@given(
    st.sampled_from([v for v in SHIPPED if v.mask_type == "dense"]), st.integers(1, 64), st.integers(1, 9000)
)
def test_a_diagonal_beside_a_mask_cuts_the_grid_as_it_does_alone(variant, kv_heads, seqlen):
    """And a mask alone as none."""
    alone = call_for(variant, 2, kv_heads, seqlen)
    diagonal = replace(alone, window_right=0)
    for call, mask_type in ((alone, "none"), (diagonal, "causal")):
        assert sections(call, variant, H200) == sections(replace(call, mask_type=mask_type), variant, H200)


@pytest.mark.parametrize(
    ("name", "batch", "seqlens", "heads", "expected"),
    [
        ("256_bf16_ordered", 4, (4096, 4096), (8, 8), 4),  # 33 tiles of a head at a time, 64 steps
        ("256_bf16_ordered", 16, (1024, 1024), (8, 8), 16),
        ("192_bf16_ordered_pair", 4, (4096, 4096), (10, 10), 3),  # 22 clusters, 64 steps
        ("256_bf16_ordered_pair", 4, (4096, 4096), (8, 8), 3),  # likewise
        ("128_bf16_causal_ordered", 4, (4096, 4096), (16, 16), 5),
        ("64_bf16_ordered", 4, (4096, 4096), (32, 32), 8),  # 16 tiles, 32 steps
        # L2 has room for 16 of these heads, 8 tiles of each at a time, but not for 32 of the next ones.
        ("32_bf16_ordered", 4, (4096, 4096), (64, 64), 16),
        ("96_bf16_ordered", 16, (1024, 1024), (20, 20), 17),
        ("128_bf16_ordered", 1, (512, 16384), (64, 64), 32),  # 4 tiles, 8 steps
        ("128_bf16_ordered_gqa", 1, (512, 16384), (64, 8), 4),
        ("128_bf16_ordered", 1, (512, 16384), (2, 2), 2),
    ],
)
def test_a_head_has_twice_as_many_steps_as_tiles_of_keys_in_turn(name, batch, seqlens, heads, expected):
    variant = MAIN[f"flash_bwd_hdim{name}_sm90"]
    problem = backward_call(batch, *seqlens, *heads, variant.head_dim)
    size, count = sections(problem, variant, H200)
    assert size == expected
    assert (count - 1) * size < batch * heads[1] <= count * size


@pytest.mark.parametrize(
    ("batch", "seqlen", "num_heads", "kv_heads", "most"),
    [
        (16, 2048, 16, 16, 1.025),
        (4, 4096, 16, 16, 1.025),
        (1, 16384, 16, 16, 1.025),
        (2, 8192, 32, 8, 1.025),
        (2, 8192, 32, 4, 1.025),
        (4, 4096, 32, 8, 1.025),
        (4, 3000, 64, 8, 1.06),  # 1.25 with sections of five heads, of which the last would have two
        (4, 2500, 40, 8, 1.07),
        (3, 5000, 28, 4, 1.08),
    ],
)
def test_a_causal_grid_of_tiles_of_keys_ends_evenly(batch, seqlen, num_heads, kv_heads, most):
    variant = MAIN[f"flash_bwd_hdim128_bf16_causal_{'' if num_heads == kv_heads else 'gqa_'}sm90"]
    q, k = ((batch, seqlen, count, 128) for count in (num_heads, kv_heads))
    q, k = (view_of_shape(shape, "bf16", 0) for shape in (q, k))
    lse = view_of_shape((batch, num_heads, seqlen), "fp32", 0)
    size, count = sections(normalise(q, q, k, k, q, lse, causal=True), variant, H200)
    total, group = batch * kv_heads, num_heads // kv_heads
    free = [0.0] * H200.num_sms
    work = 0.0
    for section in range(count):
        for first_key in range(0, seqlen, 128):
            for _ in range(min(size, total - section * size)):
                steps = (
                    3 + group * (seqlen - first_key) // 64
                )  # the start and the end of a thread block take three
                heapq.heappush(free, heapq.heappop(free) + steps)
                work += steps
    assert max(free) < most * work / len(free)  # head by head 1.00 to 1.14


@given(
    name=st.sampled_from(
        ["64_bf16", "128_fp16_causal_ordered", "96_bf16_local_gqa", "192_bf16_causal_pair_gqa"]
    ),
    batch=st.integers(1, 20),
    seqlens=st.tuples(st.integers(1, 9000), st.integers(1, 9000)),
    kv_heads=st.integers(1, 20),
    parts=st.sampled_from([1, 2, 4]),
)
def test_a_head_is_cleared_by_tiles_that_are_launched_before_its_own(name, batch, seqlens, kv_heads, parts):
    """So whoever waits for zeros waits for tiles that run. In sections of one head 16 tiles lie between."""
    variant = MAIN[f"flash_bwd_hdim{name}_sm90"]
    group, parts = (4, parts) if variant.gqa == "gqa" else (1, 1)
    problem = backward_call(batch, *seqlens, group * kv_heads, kv_heads, variant.head_dim)
    size = sections(problem, variant, H200, parts).heads
    distance = clear_distance(problem, variant, H200, parts)
    blocks, total = row_blocks(problem, variant), batch * kv_heads * parts

    def index(head, block):
        """In the grid: in a section one block, or cluster, of each head after the other."""
        first, cluster = head // size * size, variant.grid.cluster
        place = block // cluster * min(size, total - first) + head - first
        return first * blocks + place * cluster + block % cluster

    for head in range(distance, total):
        lead = index(head, 0) - index(head - distance, blocks - 1)
        assert lead > 16 if size == 1 else lead >= distance


@pytest.mark.parametrize(
    ("seqlen", "heads", "kv_heads", "expected"),
    [(32768, 16, 16, (1, 16)), (16384, 16, 16, (3, 5)), (32768, 32, 8, (4, 8)), (1024, 16, 16, (16, 1))],
)
def test_half_of_l2_holds_the_keys_of_a_section_of_lists(seqlen, heads, kv_heads, expected):
    """At 16k the last section has four heads, as one head alone would end later than its mean."""
    (listed,) = (variant for variant in SHIPPED if variant.name == "flash_fwd_hdim128_fp16_blocks_gqa_sm90")
    call = replace(
        call_for(listed, 1, kv_heads, seqlen, heads // kv_heads),
        seqlen_kv=seqlen,
        batch=1,
        mask_type="blocks",
    )
    assert sections(call, listed, H200) == expected
