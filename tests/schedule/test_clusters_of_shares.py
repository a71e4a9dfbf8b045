"""Clusters whose thread blocks have one share of neighbouring sets of heads: which calls take them."""

from dataclasses import replace

import pytest

from fake_gpu import H200
from flashgen.families.load import load_specs
from flashgen.operators.arguments import view_of_shape
from flashgen.operators.latent import normalise
from flashgen.schedule.dispatch import offers, select
from flashgen.schedule.explain import explain
from flashgen.schedule.plan import plan_steps
from flashgen.schedule.shares import shares_of

SPECS = tuple(spec for spec in load_specs() if spec.operator == "latent_attention")


def call(heads, batch=3, queries=1):
    def array(dtype, *shape):
        return view_of_shape(shape, dtype, 0)

    return normalise(
        array("bf16", batch, queries, heads, 576),
        array("e4m3", 300, 64, 1, 576),
        head_dim_v=512,
        kv_lengths=array("int32", batch),
        pages=array("int32", batch, 64),
        softmax_scale=0.1,
        causal=True,
    )


def selected(problem, device=H200):
    return select(problem, device, offers(problem, device, SPECS))


@pytest.mark.parametrize(
    ("heads", "cluster"), [(16, 1), (64, 1), (96, 1), (128, 2), (192, 1), (256, 2), (384, 2), (512, 2)]
)
def test_clusters_of_two_take_pairs_of_groups_of_heads(heads, cluster):
    assert selected(call(heads)).grid.cluster == cluster
    assert selected(call(heads, queries=2)).grid.cluster == cluster


@pytest.mark.parametrize("num_sms", [1, 2, 131, 132])
@pytest.mark.parametrize("heads", [128, 256, 384])
def test_thread_blocks_of_a_cluster_have_the_same_share(heads, num_sms):
    device = replace(H200, num_sms=num_sms)
    problem = call(heads, batch=5)
    variant = selected(problem, device)
    shares = shares_of(problem, variant, device)
    assert shares.head_sets % variant.grid.cluster == 0
    main = plan_steps(problem, variant, device).steps[0].launch
    assert main.cluster == 2
    assert main.blocks % main.cluster == 0
    assert main.blocks <= max(2, num_sms)


def test_an_explanation_says_why_a_cluster_is_not_taken():
    problem = call(64)
    judged = explain(problem, H200, SPECS).others
    (pair,) = (each for each in judged if each.variant.grid.cluster > 1 and each.rule == "cluster")
    assert "2 sets of heads" in pair.why
