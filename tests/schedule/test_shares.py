import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_dispatch import CONTIGUOUS, H200, problem

from flashgen.errors import BadTensorShape
from flashgen.operators.attention import UNBOUNDED
from flashgen.operators.masks import visible_keys
from flashgen.schedule.dispatch import cost, offers, select
from flashgen.schedule.grid import launch_of
from flashgen.schedule.parameters import parameters
from flashgen.schedule.plan import plan_steps
from flashgen.schedule.shares import shares_of
from flashgen.spec.load import load_specs

(SPEC,) = (spec for spec in load_specs() if spec.name == "flash_decode_sm80")
DECODE = {
    (variant.mask_type, variant.gqa, variant.tile_name): variant
    for variant in SPEC.select(head_dim=64, head_dim_v=64, dtype="fp16", target="sm80")
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
    return SimpleNamespace(**{**vars(H200), "num_sms": num_sms})


calls = st.builds(call, st.integers(0, 40), st.integers(1, 20), st.integers(0, 40_000))
gpus = st.integers(1, 150).map(device)


@given(calls, gpus)
def test_thread_blocks_have_equal_shares_of_all_kv_blocks_and_run_at_once(given_call, gpu):
    shares = shares_of(given_call, PLAIN, gpu)
    assert shares.kv_blocks == shares.tiles * max(1, -(-given_call.seqlen_kv // KEYS))
    assert (shares.count - 1) * shares.per_share < max(1, shares.kv_blocks)
    assert shares.count * shares.per_share >= shares.kv_blocks
    at_a_time = gpu.num_sms * PLAIN.grid.blocks_per_sm
    assert shares.count <= at_a_time
    # The largest share is at most so much larger than it has to be.
    assert shares.per_share <= max(1, -(-shares.kv_blocks // at_a_time)) + PLAIN.grid.split_gain


@given(calls, gpus)
def test_a_tile_is_split_where_a_share_begins_within_it(given_call, gpu):
    shares = shares_of(given_call, PLAIN, gpu)
    begins = range(0, shares.kv_blocks, shares.per_share)
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
    small = SimpleNamespace(**{**vars(H200), "smem_per_sm": PLAIN.smem_bytes + 1024})
    assert shares_of(call(heads=8, seqlen_kv=131_072), PLAIN, small).count <= H200.num_sms


def test_too_many_kv_blocks_are_refused_and_go_to_another_family():
    """As keys that are broadcast over a batch may have them."""
    vast = call(batch=1 << 20, heads=64, seqlen_kv=1 << 20, **CONTIGUOUS)
    with pytest.raises(BadTensorShape, match="KV blocks"):
        shares_of(vast, PLAIN, H200)
    assert select(vast, H200, offers(vast, H200, load_specs())).family == "flash_fwd"


@given(calls, gpus)
def test_both_steps_are_told_of_the_same_shares(given_call, gpu):
    shares = shares_of(given_call, PLAIN, gpu)
    assume(shares.split)
    numbers = [parameters(given_call, variant, gpu, shares) for variant in PLAIN.steps]
    for name in ("kv_blocks_per_tile", "kv_blocks_per_share", "num_kv_blocks", "first_kv_block"):
        assert numbers[0][name] == numbers[1][name]
    assert numbers[0]["kv_blocks_per_share"] == shares.per_share
    assert launch_of(given_call, PLAIN, gpu, shares).blocks == shares.count


@given(calls, gpus)
def test_the_cost_is_that_of_the_busiest_multiprocessor(given_call, gpu):
    """At least an equal share of all keys, at most that of whole tiles."""
    assume(given_call.batch and given_call.seqlen_kv)
    shares = shares_of(given_call, PLAIN, gpu)
    by_key = PLAIN.grid.covers[0][1] / PLAIN.efficiency
    keys = cost(given_call, gpu, PLAIN) / by_key
    assert keys >= shares.kv_blocks * KEYS / gpu.num_sms
    free = dataclasses.replace(PLAIN, start=0, grid=dataclasses.replace(PLAIN.grid, split_gain=0))
    assert (
        cost(given_call, gpu, free) / by_key <= (shares.kv_blocks / gpu.num_sms + 2 * shares.per_share) * KEYS
    )


@given(calls, st.sampled_from(["", "m32", "m64"]))
def test_a_single_query_takes_the_fewest_rows(given_call, name):
    variants = [variant for (mask, gqa, _), variant in DECODE.items() if (mask, gqa) == ("none", "mha")]
    assume(given_call.batch)
    assert select(given_call, H200, variants) is PLAIN
