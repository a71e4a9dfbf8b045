import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_dispatch import CONTIGUOUS, GEFORCE, problem

from fake_gpu import H200
from flashgen.errors import BadTensorShape
from flashgen.families.features import HEAD_SETS
from flashgen.families.load import load_specs
from flashgen.operators.arguments import view_of_shape
from flashgen.operators.attention import normalise as varlen
from flashgen.operators.masks import UNBOUNDED, visible_keys
from flashgen.operators.splits import SplitEvery
from flashgen.schedule.cost import cost
from flashgen.schedule.dispatch import offers, select
from flashgen.schedule.grid import launch_of
from flashgen.schedule.parameters import parameters
from flashgen.schedule.plan import plan_steps
from flashgen.schedule.shares import shares_of
from flashgen.schedule.visited import kv_blocks

(SPEC,) = (spec for spec in load_specs() if spec.name == "flash_decode_sm80")
DECODE = {
    (variant.mask_type, variant.gqa, variant.tile_name): variant
    for variant in SPEC.select(head_dim=64, head_dim_v=64, dtype="fp16", sinks="none", target="sm80")
    if variant.is_main
}
PLAIN = DECODE["none", "mha", ""]
KEYS = PLAIN.visits.keys


def call(batch=1, heads=1, seqlen_kv=1000, **changes):
    return problem(
        **{
            "batch": batch,
            "seqlen_q": 1,
            "num_heads_q": heads,
            "num_heads_kv": heads,
            "seqlen_kv": seqlen_kv,
            **changes,
        }
    )


def device(num_sms):
    return replace(H200, num_sms=num_sms)


calls = st.builds(call, st.integers(0, 40), st.integers(1, 20), st.integers(0, 40_000))
gpus = st.integers(1, 150).map(device)


@given(calls, gpus)
def test_thread_blocks_have_equal_shares_of_all_kv_blocks_and_run_at_once(given_call, gpu):
    shares = shares_of(given_call, PLAIN, gpu)
    assert shares.kv_blocks == shares.tiles * max(1, -(-given_call.seqlen_kv // KEYS))
    at_a_time = gpu.num_sms * PLAIN.grid.blocks_per_sm
    assert shares.count <= at_a_time
    # Of each set of heads.
    for size in (at_a_time, given_call.sizes["num_heads_q"]):
        assert size % shares.head_sets == 0
    assert shares.head_sets in (1, 2, 4)
    assert shares.count == shares.head_sets * shares.of_a_set
    numbered = shares.kv_blocks // shares.head_sets
    assert (shares.of_a_set - 1) * shares.per_share < max(1, numbered)
    assert shares.of_a_set * shares.per_share >= numbered
    # The largest share is at most so much larger than it has to be.
    assert shares.per_share <= max(1, -(-shares.kv_blocks // at_a_time)) + PLAIN.grid.split_gain


@given(calls, gpus)
def test_a_tile_is_split_where_a_share_begins_within_it(given_call, gpu):
    shares = shares_of(given_call, PLAIN, gpu)
    begins = range(0, shares.kv_blocks // shares.head_sets, shares.per_share)
    assert shares.split == any(begin % shares.per_tile for begin in begins)
    assert shares.parts == (2 * shares.count if shares.split else 0)
    steps = plan_steps(given_call, PLAIN, H200 if gpu is H200 else gpu)
    assert [step.variant.step for step in steps.steps] == ["decode", *["combine"] * shares.split]
    assert (steps.workspace.nbytes > 0) == shares.split
    assert steps.steps[0].launch.blocks == shares.count


@given(
    st.sampled_from(["causal", "local"]),
    st.integers(1, 30),
    st.integers(0, 900),
    st.integers(0, 300),
    st.integers(0, 20),
    st.integers(-40, 40),
)
def test_tiles_have_the_kv_blocks_that_some_row_sees(mask_type, seqlen_q, seqlen_kv, left, right, beside):
    offset = seqlen_kv - seqlen_q + beside
    if mask_type == "causal":
        left, right = UNBOUNDED, 0
    masked = call(
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        mask_type=mask_type,
        diagonal_offset=offset,
        window_left=left,
        window_right=right,
    )
    shares = shares_of(masked, DECODE[mask_type, "mha", ""], H200)
    seen = np.flatnonzero(
        np.broadcast_to(visible_keys(masked, None), (1, 1, seqlen_q, seqlen_kv)).any(axis=(0, 1, 2))
    )
    if seen.size:
        assert shares.first == seen[0] // KEYS
        assert shares.first + shares.per_tile == seen[-1] // KEYS + 1
    else:
        assert shares.per_tile == 1


def test_up_to_four_sets_of_heads():
    """As many as divide both the heads and the thread blocks that run at a time, 264 of an H200."""
    found = {heads: shares_of(call(heads=heads), PLAIN, H200).head_sets for heads in range(1, 33)}
    assert [found[heads] for heads in (1, 2, 3, 4, 6, 8, 10, 12, 32)] == [1, 2, 1, 4, 2, 4, 2, 4, 4]
    split_call = call(batch=37, heads=12, seqlen_kv=10_000)
    shares = shares_of(split_call, PLAIN, H200)
    decode, combine = (parameters(split_call, variant, H200, shares) for variant in PLAIN.steps)
    assert decode["head_sets_log2"] == combine["head_sets_log2"] == 2
    assert decode["heads_per_set"] == combine["heads_per_set"] == 3
    assert decode["num_shares"] == shares.count // 4
    # An odd number of multiprocessors, and a kernel that is bound by its tensor cores.
    assert shares_of(call(heads=8), PLAIN, device(1)).head_sets == 2
    (split,) = (spec for spec in load_specs() if spec.name == "flash_varlen_split_sm90")
    assert not any(HEAD_SETS in v.features for v in split.variants())


def test_one_sequence_is_shared_by_all_multiprocessors_and_a_full_batch_is_not_split():
    one = shares_of(call(heads=8, seqlen_kv=131_072), PLAIN, H200)
    assert one.count > 1.9 * H200.num_sms
    assert one.split
    full = shares_of(call(batch=33, heads=8, seqlen_kv=4096), PLAIN, H200)
    assert not full.split
    assert full.count == 2 * H200.num_sms


def test_short_sequences_are_not_split_for_little():
    short = shares_of(call(batch=1, heads=16, seqlen_kv=KEYS * (1 + PLAIN.grid.split_gain)), PLAIN, H200)
    longer = shares_of(call(batch=1, heads=16, seqlen_kv=KEYS * (2 + PLAIN.grid.split_gain)), PLAIN, H200)
    assert not short.split
    assert longer.split


def test_thread_blocks_are_no_more_than_shared_memory_has_room_for():
    small = replace(H200, smem_per_sm=PLAIN.smem_bytes + 1024)
    assert shares_of(call(heads=8, seqlen_kv=131_072), PLAIN, small).count <= H200.num_sms


def test_too_many_kv_blocks_are_refused_and_go_to_another_family():
    """As keys that are broadcast over a batch may have them."""
    vast = call(batch=1 << 20, heads=64, seqlen_kv=1 << 20, **CONTIGUOUS)
    with pytest.raises(BadTensorShape, match="KV blocks"):
        shares_of(vast, PLAIN, H200)
    for gpu, family in ((H200, "flash_decode"), (GEFORCE, "flash_fwd")):  # which number no KV blocks
        assert select(vast, gpu, offers(vast, gpu, load_specs())).family == family


@given(calls, gpus)
def test_both_steps_are_told_of_the_same_shares(given_call, gpu):
    shares = shares_of(given_call, PLAIN, gpu)
    assume(shares.split)
    numbers = [parameters(given_call, variant, gpu, shares) for variant in PLAIN.steps]
    same = ("kv_blocks_per_tile", "kv_blocks_per_share", "num_kv_blocks", "first_kv_block", "heads_per_set")
    for name in same:
        assert numbers[0][name] == numbers[1][name]
    assert numbers[0]["kv_blocks_per_share"] == shares.per_share
    assert launch_of(given_call, PLAIN, gpu, shares.count).blocks == shares.count


@given(calls, gpus)
def test_the_cost_is_that_of_the_busiest_multiprocessor(given_call, gpu):
    """At least an equal share of all keys, at most that of whole tiles."""
    assume(given_call.batch and given_call.seqlen_kv)
    shares = shares_of(given_call, PLAIN, gpu)
    by_key = PLAIN.grid.covers[0][1] / PLAIN.dispatch.efficiency
    keys = cost(given_call, gpu, PLAIN) / by_key
    assert keys >= shares.kv_blocks * KEYS / gpu.num_sms
    free = dataclasses.replace(
        PLAIN, dispatch=PLAIN.dispatch._replace(start=0), grid=PLAIN.grid._replace(split_gain=0)
    )
    assert (
        cost(given_call, gpu, free) / by_key <= (shares.kv_blocks / gpu.num_sms + 2 * shares.per_share) * KEYS
    )


@given(calls, st.sampled_from(["", "m32", "m64"]))
def test_a_single_query_takes_the_fewest_rows(given_call, name):
    variants = [variant for (mask, gqa, _), variant in DECODE.items() if (mask, gqa) == ("none", "mha")]
    assume(given_call.batch)
    assert select(given_call, H200, variants) is PLAIN


def told(splits, **changes):
    return call(splits=splits, **changes)


every = st.integers(1, 30).map(lambda blocks: SplitEvery(blocks * KEYS))


@given(calls, gpus, st.one_of(st.integers(1, 200), every))
def test_fixed_splits_are_those_of_a_sequence_alone_on_any_gpu(given_call, gpu, splits):
    """Each a share of its own, and no share of two tiles."""
    shares = shares_of(dataclasses.replace(given_call, splits=splits), PLAIN, gpu)
    alone = shares_of(dataclasses.replace(given_call, splits=splits, batch=1), PLAIN, H200)
    assert shares._replace(tiles=0, head_sets=1) == alone._replace(tiles=0, head_sets=1)
    assert shares.per_tile % shares.per_share == 0
    blocks = max(1, -(-given_call.seqlen_kv // KEYS))
    of_a_tile = shares.per_tile // shares.per_share
    assert (of_a_tile - 1) * shares.per_share < blocks <= of_a_tile * shares.per_share
    assert shares.count == shares.tiles * of_a_tile
    assert shares.split == (of_a_tile > 1 and shares.tiles > 0)
    if isinstance(splits, SplitEvery):
        assert shares.per_share == splits.keys // KEYS or of_a_tile == 1
    else:
        assert shares.per_share == -(-blocks // splits)
        assert of_a_tile == splits or blocks < splits * shares.per_share


def test_one_split_leaves_the_combining_step_out():
    (step,) = plan_steps(told(1, seqlen_kv=100_000), PLAIN, H200).steps
    assert step.shares.count == step.launch.blocks == 1
    assert "no tile is split" in str(step.shares)
    decode, combine = plan_steps(told(4, seqlen_kv=100_000), PLAIN, H200).steps
    assert decode.shares.count == 4
    assert combine.shares is None


def test_too_many_kv_blocks_of_a_call_that_fixes_its_splits_go_to_no_other_family():
    """Its bits would be others than those of a smaller batch."""
    vast = told(SplitEvery(1024), batch=1 << 20, heads=64, seqlen_kv=1 << 20, **CONTIGUOUS)
    main = select(vast, H200, offers(vast, H200, load_specs()))
    assert main.family == "flash"
    with pytest.raises(BadTensorShape, match="KV blocks"):
        plan_steps(vast, main, H200)


OF_LENGTHS = {
    (variant.mask_type, variant.tile_name): variant
    for spec in load_specs()
    if spec.name == "flash_varlen_decode_sm80"
    for variant in spec.select(
        head_dim=64, head_dim_v=64, dtype="fp16", target="sm80", pages="none", splits="fixed", gqa="mha"
    )
    if variant.is_main
}


def with_lengths(batch, seqlen_q, seqlen_kv, splits, window=(-1, -1)):
    views = [view_of_shape((batch, n, 2, 64), "fp16", 0) for n in (seqlen_q, seqlen_kv, seqlen_kv)]
    lengths = view_of_shape((batch,), "int32", 0)
    return varlen(*views, kv_lengths=lengths, window_size=window, splits=splits)


# Around whole KV blocks.
lengths = st.builds(
    lambda blocks, beside: max(1, blocks * KEYS + beside), st.integers(1, 40), st.integers(-2, 2)
)


@settings(max_examples=500)
@given(
    st.integers(1, 9),
    st.integers(1, 30),
    lengths,
    st.integers(-1, 3000),
    st.integers(-1, 40),
    st.one_of(st.integers(1, 50), every),
    st.data(),
)
def test_no_sequence_has_more_splits_than_the_workspace_has_room_for(
    batch, seqlen_q, seqlen_kv, left, right, splits, data
):
    bounds = with_lengths(batch, seqlen_q, seqlen_kv, splits, (left, right))
    variant = OF_LENGTHS[bounds.mask_type, ""]
    shares = shares_of(bounds, variant, H200)
    numbers = parameters(bounds, variant, H200, shares)
    assert shares.parts in (0, shares.tiles * numbers["splits_per_tile"])
    assert shares.count * shares.per_share >= shares.tiles * shares.splits
    assert shares.count <= H200.num_sms * variant.grid.blocks_per_sm
    own = bounds.of_sequence(
        data.draw(st.integers(1, seqlen_q)), min(seqlen_kv, data.draw(st.just(0) | lengths))
    )
    begin, end = kv_blocks(own, KEYS, 0, own.seqlen_q - 1)
    blocks = max(1, end - begin)
    # What the kernel makes of the two numbers, and what the call asks for.
    per_split = max(numbers["kv_blocks_per_split"], -(-blocks // numbers["splits_per_tile"]))
    assert -(-blocks // per_split) <= shares.splits
    if isinstance(splits, SplitEvery):
        assert per_split == splits.keys // KEYS or blocks <= per_split
    else:
        assert per_split == -(-blocks // splits)
