"""``record``: the calls of a run in a file, and the same kernels by the file."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

import flashgen
from flashgen import errors
from flashgen.call import compute
from flashgen.call.recorded import problem_of, read


@pytest.fixture
def path(tmp_path):
    yield tmp_path / "calls.json"
    if compute.observer is not None:
        compute.observer.__self__.close()


def arrays(*shapes, dtype=np.float16):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


Q, K, V = arrays((2, 40, 4, 64), (2, 50, 2, 64), (2, 50, 2, 64))
LENGTHS = np.array([3, 50], np.int32)


def calls():
    """Calls of each operator, with each kind of option."""
    flashgen.attention(Q, K, V)
    out, lse = flashgen.attention(Q, K, V, causal=True, softcap=30.0, return_lse=True)
    flashgen.attention_backward(out, Q, K, V, out, lse, causal=True, softcap=30.0, deterministic=True)
    flashgen.attention(Q, K, V, score="score + s[h] * n", params={"s": np.ones(4, np.float32), "n": 3})
    flashgen.attention(Q[:, :1], K, V, kv_lengths=LENGTHS, splits=flashgen.SplitEvery(256), max_seqlen_kv=50)
    pages = np.arange(8, dtype=np.int32).reshape(2, 4)
    cache = flashgen.KVCache(*arrays((8, 16, 2, 64), (8, 16, 2, 64)), LENGTHS, pages=pages)
    flashgen.attention(Q[:, :1], cache, append=(K[:, :1].copy(), V[:, :1].copy()), window_size=(9, 0))
    flashgen.merge([(out, lse), (out, lse)])
    flashgen.attention(Q, K, V, mask=np.ones((40, 50), bool), return_weights=True)
    flashgen.plan(Q, K, V, sinks=np.ones(4, np.float32), window_size=[5, 5])


def test_the_file_has_the_problem_of_each_call_once(path, monkeypatch):
    problems = []
    observed = compute.make_plan

    def make_plan(request, keeps_scalars=True):
        plan = observed(request, keeps_scalars)
        problems.append(plan.problem)
        return plan

    calls()  # plans that are kept are made again
    with flashgen.record(path):
        monkeypatch.setattr(compute, "make_plan", make_plan)
        monkeypatch.setattr("flashgen.api.attention.make_plan", make_plan)
        calls()
        calls()
    recorded = [problem_of(call) for call in read(path)]
    distinct = list(dict.fromkeys(problems))
    assert len(recorded) == len(distinct) == 11
    for found, right in zip(recorded, distinct, strict=True):
        assert found.operator.name == right.operator.name
        assert (found.sizes, found.strides, found.dtype) == (right.sizes, right.strides, right.dtype)
        for name in (
            "mask_type",
            "window_left",
            "window_right",
            "splits",
            "lengths",
            "score",
            "deterministic",
        ):
            assert getattr(found, name, None) == getattr(right, name, None), name
        assert found.device == 0
    calls()  # of which nothing is kept any more
    assert len(read(path)) == len(distinct)


def test_warmup_takes_the_kernels_of_the_calls(path, fake_gpu, monkeypatch):
    monkeypatch.setattr("flashgen.runtime.device.available", lambda: True)
    with flashgen.record(path):
        flashgen.attention(Q, K, V, causal=True)
        flashgen.attention(Q[:, :1], K, V, kv_lengths=LENGTHS)
    explained = [
        flashgen.explain(Q.shape, K.shape, causal=True),
        flashgen.explain((2, 1, 4, 64), K.shape, kv_lengths=(2,)),
    ]
    assert flashgen.warmup(str(path)) == tuple(found.variant.name for found in explained)
    assert flashgen.warmup(read(path)) == flashgen.warmup(path)


def test_autograd_and_other_threads_are_recorded(path):
    torch = pytest.importorskip("torch")
    leaf = torch.randn(1, 8, 2, 32, requires_grad=True)
    recording = flashgen.record(path)
    thread = threading.Thread(target=lambda: flashgen.attention(leaf, leaf, leaf).sum().backward())
    thread.start()
    thread.join()
    doubles = leaf.double()
    flashgen.attention(doubles, doubles, doubles)  # which no kernel computes
    assert not path.exists()
    recording.close()
    recording.close()
    assert [call["operator"] for call in read(path)] == ["attention", "attention_backward"]


def test_a_call_that_the_file_cannot_hold_is_told(path, monkeypatch):
    monkeypatch.setattr("flashgen.call.text._option", lambda name, value: object())
    told = pytest.warns(
        UserWarning, match="leaves out a call of attention, which its file cannot hold: Object"
    )
    with told, flashgen.record(path):
        flashgen.attention(Q, K, V)
    assert read(path) == []


def test_what_is_wrong_is_named(path):
    with pytest.raises(errors.BadParam, match="path is 3; expected the path of a file"):
        flashgen.record(3)
    with flashgen.record(path), pytest.raises(errors.BadParam, match="calls are being recorded already"):
        flashgen.record(path)
    flashgen.record(path).close()
    assert read(path) == []
    for text in ("", "[]", '{"kind": "other", "calls": []}'):
        path.write_text(text)
        with pytest.raises(errors.BadParam, match=r"calls\.json holds no calls"):
            flashgen.warmup(path, arch="sm_90")
    path.write_text(
        json.dumps({"kind": "flashgen calls", "calls": [{"operator": "attention", "arrays": {}}]})
    )
    with pytest.raises(errors.BadParam, match=r"a recorded call of 'attention' is damaged.*record it anew"):
        flashgen.warmup(path, arch="sm_90")


def test_a_plan_pays_nothing_where_nothing_is_recorded():
    assert compute.observer is None
