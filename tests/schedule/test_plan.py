"""The steps of a call and the workspace that they share."""

import math

from hypothesis import given
from hypothesis import strategies as st

from fake_gpu import H200
from family_of_steps import MAIN, SPEC
from flashgen.operators.arguments import WORKSPACE_ALIGNMENT
from flashgen.schedule.plan import plan_steps
from flashgen.source.params import layout
from problems import NAMES, problem


def call(batch=2, seqlen_q=100, heads=3):
    shape = {
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_kv": 7,
        "num_heads_q": heads,
        "num_heads_kv": heads,
    }
    strides = {f"{name}_strides": (seqlen_q * heads * 64, heads * 64, 64) for name in ("q", "k", "v", "out")}
    return problem(**shape, **strides, head_dim=64, dtype="fp32", softmax_scale=0.5)


def test_a_family_has_a_kernel_for_each_step_and_dispatch_chooses_the_main_one():
    names = [variant.name for variant in SPEC.variants()]
    assert names == [f"row_sums_{step}_hdim64_fp32_sm90" for step in ("sum", "fill", "double")]
    assert [variant.name for variant in MAIN.steps] == names
    assert [variant.is_main for variant in SPEC.variants()] == [False, True, False]


def test_each_step_has_its_own_grid_and_parameters():
    steps = plan_steps(call(), MAIN, H200).steps
    assert [step.launch.blocks for step in steps] == [2 * 2 * 3, 2 * 3, 2 * 3]
    assert [step.launch.threads for step in steps] == [64, 64, 64]
    workspace = len(NAMES)  # the source behind the operator's arguments
    sources = [{source: distance for _, source, distance in step.struct.pointers} for step in steps]
    assert sources[0] == {NAMES.index("q"): 0, workspace: WORKSPACE_ALIGNMENT}
    assert sources[1] == {NAMES.index("out"): 0, workspace: WORKSPACE_ALIGNMENT}
    assert sources[2] == {NAMES.index("out"): 0}
    for step in steps:
        offsets = layout(step.variant.params).offsets
        assert {offset for offset, *_ in step.struct.pointers} == {
            offsets[param.name] for param in step.variant.params if param.ctype.endswith("*")
        }


@given(st.integers(0, 5), st.integers(0, 700), st.integers(1, 4))
def test_slices_are_aligned_and_hold_their_arrays_without_overlap(batch, seqlen_q, heads):
    workspace = plan_steps(call(batch, seqlen_q, heads), MAIN, H200).workspace
    sizes = {"counts": 4 * batch * 3, "sums": 4 * batch * heads * math.ceil(seqlen_q / 64) * 64}
    assert {each.name: each.nbytes for each in workspace.slices} == sizes
    end = 0
    for each in workspace.slices:
        assert each.offset % WORKSPACE_ALIGNMENT == 0
        assert each.offset >= end
        end = each.offset + each.nbytes
    assert end <= workspace.nbytes
