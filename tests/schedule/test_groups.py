"""Tiles of keys: the time that they take by the model, groups of query heads in parts, and what the plan then
has."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backward_variants import MAIN
from fake_gpu import H200
from flashgen.operators.arguments import view_of_shape
from flashgen.operators.backward import normalise
from flashgen.schedule.grid import tiles
from flashgen.schedule.groups import group_parts, rows_of_tiles
from flashgen.schedule.plan import plan_steps
from flashgen.schedule.sections import sections

CAUSAL = MAIN["flash_bwd_hdim128_bf16_causal_gqa_sm90"]
FULL = MAIN["flash_bwd_hdim128_bf16_gqa_sm90"]
ORDERED = MAIN["flash_bwd_hdim128_bf16_causal_ordered_gqa_sm90"]


def call(batch, seqlen_q, seqlen_kv, heads, kv_heads, **options):
    q, k = (batch, seqlen_q, heads, 128), (batch, seqlen_kv, kv_heads, 128)
    q, k = (view_of_shape(shape, "bf16", 0) for shape in (q, k))
    lse = view_of_shape((batch, heads, seqlen_q), "fp32", 0)
    return normalise(q, q, k, k, q, lse, **options)


@pytest.mark.parametrize(
    ("shape", "variant", "parts"),
    [
        ((2, 8192, 8192, 16, 1), CAUSAL, 4),  # 128 blocks of keys on 132 multiprocessors
        ((2, 8192, 8192, 16, 1), FULL, 1),
        ((2, 8192, 8192, 16, 1), ORDERED, 16),  # in turns a block waits in each head but one
        ((2, 8192, 8192, 32, 8), CAUSAL, 1),  # 1,024
        ((2, 8192, 8192, 32, 16), CAUSAL, 1),
        ((1, 8192, 8192, 32, 8), CAUSAL, 1),
        ((1, 128, 128, 6, 2), CAUSAL, 3),  # two blocks
        # What parts leave in memory takes longer than what they save.
        ((60, 23, 23, 8, 1), CAUSAL, 1),
        ((49, 43, 43, 16, 2), CAUSAL, 1),
        ((1, 128, 0, 6, 2), CAUSAL, 1),
        ((1, 0, 128, 6, 2), CAUSAL, 1),
    ],
)
def test_how_many_parts(shape, variant, parts):
    assert group_parts(call(*shape, causal=variant is not FULL), variant, H200) == parts


@given(
    st.sampled_from([CAUSAL, FULL, ORDERED]),
    st.integers(1, 4),
    st.integers(0, 3000),
    st.integers(1, 5000),
    st.integers(1, 3),
    st.integers(1, 24),
    st.integers(1, 200),
)
def test_the_fewest_parts_near_the_least_time(variant, batch, seqlen_q, seqlen_kv, kv_heads, group, num_sms):
    device = dataclasses.replace(H200, num_sms=num_sms)
    problem = call(batch, seqlen_q, seqlen_kv, kv_heads * group, kv_heads, causal=True)
    parts = group_parts(problem, variant, device)
    assert group % parts == 0

    def time(parts):
        return rows_of_tiles(problem, variant, num_sms, parts)

    others = [other for other in range(1, group + 1) if group % other == 0]
    near = 1.05 * min(map(time, others))
    assert time(parts) <= near
    assert all(time(other) > near for other in others if other < parts)


@given(
    st.sampled_from([CAUSAL, FULL, ORDERED]),
    st.integers(1, 4),
    st.integers(1, 5000),
    st.integers(1, 3),
    st.integers(1, 24),
    st.integers(1, 200),
)
def test_the_plan_has_a_block_for_each_part_and_memory_for_what_it_leaves(
    variant, batch, seqlen_kv, kv_heads, group, num_sms
):
    device = dataclasses.replace(H200, num_sms=num_sms)
    problem = call(batch, 100, seqlen_kv, kv_heads * group, kv_heads, causal=True)
    parts = group_parts(problem, variant, device)
    _, steps, workspace = plan_steps(problem, variant, device)
    names = ["preprocess", "main", "convert"] + ["sum"] * (parts > 1)
    assert [step.variant.step or "main" for step in steps] == names
    assert steps[1].launch.blocks == tiles(problem, variant) * parts
    rows = -(-seqlen_kv // 128) * 128
    sizes = {each.name: each.nbytes for each in workspace.slices}
    left = batch * kv_heads * parts * rows * 128 * 4 if parts > 1 else 0
    assert sizes["dk_parts"] == sizes["dv_parts"] == left
    assert workspace.nbytes >= sum(sizes.values())
    # Each part counts as a head where heads are launched in sections.
    cut = sections(problem, variant, device, parts)
    assert (cut.count - 1) * cut.heads < batch * kv_heads * parts <= cut.count * cut.heads


def test_one_query_head_to_a_kv_head_has_no_parts():
    variant = MAIN["flash_bwd_hdim128_bf16_causal_sm90"]
    problem = call(1, 100, 100, 2, 2, causal=True)
    assert group_parts(problem, variant, H200) == 1
    assert "sum" not in {step.step for step in variant.steps}
    assert "sum" in {step.step for step in CAUSAL.steps}
