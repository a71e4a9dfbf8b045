"""Plans for caches that grow: what follows from an earlier plan is what a new plan has."""

import random

import numpy as np
import pytest

from flashgen.call import compute, growing
from flashgen.call.record import AttentionCall, call_of
from flashgen.call.request import request_of
from flashgen.runtime import arrays

pytest.importorskip("cupy")

HEADS_OUTSIDE, ROWS_OUTSIDE = "batch heads rows", "batch rows heads"


def cache(batch, keys, heads, width, order, dtype=np.float16):
    from fake_gpu import array

    size = np.dtype(dtype).itemsize
    steps = (
        (heads * keys * width, width, keys * width)
        if order == HEADS_OUTSIDE
        else (keys * heads * width, heads * width, width)
    )
    return array((batch, keys, heads, width), dtype, strides=tuple(size * x for x in (*steps, 1)))


def query(batch, rows, heads, width, dtype=np.float16):
    from fake_gpu import array

    return array((batch, rows, heads, width), dtype, address=1 << 41)


def request(q, k, v, **options):
    return request_of(call_of(AttentionCall, q=q, k=k, v=v, **options))


def planned(of):
    """The plan of a call as `attention` finds it, and as it is made anew."""
    kind = arrays.kind_of(of.arrays[0])
    return compute._plan_of(of, kind)[0], compute.make_plan(of, keeps_scalars=False)


def same(plan, new):
    assert plan.problem == new.problem
    assert plan.steps == new.steps
    assert plan.workspace_bytes == new.workspace_bytes
    assert plan.variant == new.variant


def made(monkeypatch):
    """The requests of plans that are made anew by calls."""
    requests, make = [], compute.make_plan
    monkeypatch.setattr(
        compute, "make_plan", lambda of, **options: requests.append(of) or make(of, **options)
    )
    return requests


@pytest.mark.parametrize("order", [HEADS_OUTSIDE, ROWS_OUTSIDE])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_plan_for_more_keys_is_the_plan_that_is_made_anew(order, rows, fake_gpu, fresh_seed, forget_plans):
    rng = random.Random(fresh_seed)
    for _ in range(6):
        forget_plans()
        batch, heads, group = rng.choice([1, 2, 7]), rng.choice([1, 2, 8]), rng.choice([1, 4, 8])
        width = rng.choice([40, 64, 96, 128, 256])
        first = rng.choice([2, 60, 500, 2000, 9000]) + rng.randrange(64)
        options = {"causal": rows == 1, "return_lse": rng.random() < 0.5}
        for keys in range(first, first + 12):
            k = cache(batch, keys, heads, width, order)
            same(*planned(request(query(batch, rows, heads * group, width), k, k, **options)))


@pytest.mark.parametrize("step", [1, 5])
def test_few_plans_are_made_anew(step, fake_gpu, monkeypatch):
    requests = made(monkeypatch)
    for keys in range(1024, 1280, step):
        k = cache(2, keys, 4, 64, HEADS_OUTSIDE)
        compute._plan_of(request(query(2, 1, 16, 64), k, k, causal=True), arrays.kind_of(k))
    assert 4 <= len(requests) <= 16


def test_a_window_and_a_causal_mask_are_planned_anew(fake_gpu, monkeypatch):
    requests = made(monkeypatch)
    for options in ({"window_size": (100, 0)}, {"causal": True}):
        before = len(requests)
        for keys in range(90, 96):
            k = cache(2, keys, 4, 64, HEADS_OUTSIDE)
            compute._plan_of(request(query(2, 2, 16, 64), k, k, **options), arrays.kind_of(k))
        assert len(requests) == before + 6


def test_keys_that_are_broadcast_or_of_another_layout_are_planned_anew(fake_gpu):
    q = query(2, 1, 8, 64)
    for keys in range(200, 206):
        k = cache(2, keys, 8, 64, HEADS_OUTSIDE)
        v = cache(2, keys, 8, 64, (ROWS_OUTSIDE, HEADS_OUTSIDE)[keys % 2])
        same(*planned(request(q, k, v)))
        from fake_gpu import array

        wide = array((2, keys, 8, 64), strides=(0, 128, 128 * keys, 2))
        same(*planned(request(q, wide, wide)))


def test_the_launched_struct_has_the_new_length(fake_gpu):
    import flashgen
    from fake_gpu import array

    for keys in (300, 301, 302):
        k = cache(1, keys, 4, 64, ROWS_OUTSIDE)
        flashgen.attention(query(1, 1, 4, 64), k, k, out=array((1, 1, 4, 64), address=1 << 42))
        seen = [fake_gpu.members(-1 - place) for place in range(len(fake_gpu.launches))]
        assert any("seqlen_kv" in x.dtype.names and x["seqlen_kv"] == keys for x in seen[:2])


def test_forget_drops_what_others_follow_from(fake_gpu):
    k = cache(2, 300, 4, 64, HEADS_OUTSIDE)
    compute._plan_of(request(query(2, 1, 16, 64), k, k), arrays.kind_of(k))
    assert compute._relatives
    compute.forget()
    assert not compute._relatives


def test_calls_with_other_widths_have_nothing_in_common():
    settings = ("attention", (), None, None)

    def layouts(width, keys):
        return "q", ((2, keys, 4, width), True, "d"), ((2, keys, 4, width), True, "d")

    assert growing.key_of(settings, layouts(64, 5)) == growing.key_of(settings, layouts(64, 6))
    assert growing.key_of(settings, layouts(64, 5)) != growing.key_of(settings, layouts(32, 5))
    assert growing.key_of(("append", (), None, None), layouts(64, 5)) is None
