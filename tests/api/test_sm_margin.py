"""Multiprocessors that a call leaves to other kernels: ``sm_margin``."""

from __future__ import annotations

import numpy as np
import pytest

import flashgen
from flashgen.call.backends import specs_for
from flashgen.call.record import AttentionCall, call_of
from flashgen.call.request import request_of
from flashgen.errors import BadParam
from flashgen.families.arch import typical
from flashgen.operators.arguments import view_of_shape
from flashgen.schedule.dispatch import offers
from flashgen.schedule.plan import choices
from flashgen.simulator import hostcompiler

DEVICE = typical("sm_90")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv")


def problem_of(**options):
    """The problem of a call that fills the GPU several times; packed where ``options`` have bounds."""
    lead = () if LENGTHS[0] in options else (2,)
    shapes = {"q": (*lead, 8192, 16, 128), "k": (*lead, 8192, 4, 128), "v": (*lead, 8192, 4, 128)}
    request = request_of(call_of(AttentionCall, **shapes, **options))
    views = {
        name: None if x is None else view_of_shape(x, "int32" if name in LENGTHS else "bf16", 0)
        for name, x in request.by_name().items()
    }
    return request.operator.normalise(tuple(views.values()), request.options, (None,))


@pytest.mark.parametrize("lengths", [{}, dict.fromkeys(LENGTHS, (3,))], ids=["plain", "packed"])
def test_a_persistent_grid_starts_fewer_thread_blocks(lengths):
    blocks = []
    for margin in (0, 8):
        problem = problem_of(causal=True, sm_margin=margin, **lengths)
        specs = specs_for(DEVICE, "attention", bool(lengths))
        steps = next(choices(problem, DEVICE, offers(problem, DEVICE, specs)))
        assert steps.main.grid.persistent
        blocks.append(steps.steps[-1].launch.blocks)
    assert blocks == [DEVICE.num_sms, DEVICE.num_sms - 8]


def test_one_multiprocessor_is_left():
    assert DEVICE.without(0) is DEVICE
    assert DEVICE.without(131).num_sms == 1
    with pytest.raises(BadParam, match=r"sm_margin is 132; .* has 132 multiprocessors"):
        DEVICE.without(132)


@pytest.mark.parametrize("margin", [-1, 1.0, True, "8"])
def test_a_wrong_margin_is_refused(margin):
    q = np.zeros((1, 4, 2, 16), np.float32)
    with pytest.raises(BadParam, match=r"sm_margin is .*; expected an integer of 0 or more"):
        flashgen.attention(q, q, q, sm_margin=margin)


def test_results_and_gradients_stay_the_same():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 40, 2, 16, generator=torch.Generator().manual_seed(3)) for _ in "qkv")
    results = []
    for margin in (0, 8):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flashgen.attention(*inputs, causal=True, sm_margin=margin)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="needs a host compiler")
@pytest.mark.extra
def test_fewer_thread_blocks_take_all_tiles(monkeypatch):
    """In the simulator, of all multiprocessors but one."""
    monkeypatch.setenv("FLASHGEN_SIMULATOR_ARCH", "sm_90")
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 300, 2, 64)).astype(np.float16) for _ in "qkv")
    outs = [
        flashgen.attention(q, k, v, causal=True, backend="simulator", sm_margin=margin)
        for margin in (0, DEVICE.num_sms - 1)
    ]
    assert (outs[0] == outs[1]).all()
