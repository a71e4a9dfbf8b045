"""``attention_backward`` on the CPU, against float64."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import ThreadpoolController

import flashgen
from flashgen.cpu import keyspans, threads
from flashgen.operators.gradients import judge
from named import by_name

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}

windows = st.tuples(st.integers(-1, 30), st.integers(-1, 30)).map(lambda w: {"window_size": w})
OPTIONS = st.one_of(
    st.just({}), st.just({"causal": True}), st.just({"mask_type": "causal_top_left"}), windows
)


def random(rng, *shape, dtype="fp32"):
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def poisoned(x):
    return np.full(x.shape, np.nan, x.dtype)


def judged(q, k, v, dout, *, mask=None, dlse=None, **options):
    """The verdict on what a call writes into arrays of NaN."""
    out, lse = flashgen.attention(q, k, v, mask=mask, return_lse=True, **options)
    given = dout, q, k, v, out, lse
    results = [poisoned(x) for x in (q, k, v)]
    found = flashgen.attention_backward(
        *given, mask=mask, dlse=dlse, dq=results[0], dk=results[1], dv=results[2], **options
    )
    assert all(one is other for one, other in zip(found, results, strict=True))
    problem = flashgen.plan_backward(*given, mask=mask, dlse=dlse, **options).problem
    return judge(problem, by_name(problem, dout, q, k, v, mask, out, lse, *(None,) * 4, dlse, *results))


@settings(max_examples=100)
@given(
    st.data(),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]),
    OPTIONS,
    st.none() | st.sampled_from(["row", "rows", "heads", "batch"]),
)
def test_every_mask_in_blocks_of_any_size(data, rows, keys, heads, options, mask_shape):
    kv_heads, group = heads
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    q, k = random(rng, 2, rows, kv_heads * group, 8), random(rng, 2, keys, kv_heads, 8)
    v = random(rng, 2, keys, kv_heads, data.draw(st.sampled_from([4, 8, 20])))
    dout = random(rng, 2, rows, kv_heads * group, v.shape[-1])
    dlse = random(rng, 2, kv_heads * group, rows) if data.draw(st.booleans()) else None
    mask = None
    if mask_shape is not None:
        shapes = {"row": (keys,), "rows": (rows, keys), "heads": (kv_heads * group, 1, keys)}
        shape = shapes.get(mask_shape, (2, 1, rows, keys))
        mask = rng.integers(0, 256, shape).astype(np.uint8) * (rng.random(shape) < 0.7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyspans, "BLOCK_ROWS", data.draw(st.sampled_from([1, 4, 16, 512])))
        patch.setattr(keyspans, "BLOCK_KEYS", data.draw(st.sampled_from([1, 7, 16, 512])))
        verdict = judged(q, k, v, dout, mask=mask, dlse=dlse, **options)
    assert verdict.ok, verdict


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (90, 3)}], ids=str)
def test_error_in_each_dtype(dtype, options):
    rng = np.random.default_rng()
    q, k = random(rng, 2, 300, 4, 64, dtype=dtype), random(rng, 2, 350, 2, 64, dtype=dtype)
    v, dout = random(rng, 2, 350, 2, 40, dtype=dtype), random(rng, 2, 300, 4, 40, dtype=dtype)
    verdict = judged(q, k, v, dout, **options)
    assert verdict.ok, verdict


@pytest.mark.parametrize("options", [{"softcap": 1.5}, {"score": "bias"}, {"alibi_slopes": True}], ids=str)
def test_score_modifications(options):
    rng = np.random.default_rng()
    q, k, v = random(rng, 2, 30, 4, 16), random(rng, 2, 33, 2, 16), random(rng, 2, 33, 2, 8)
    dout, arrays = random(rng, 2, 30, 4, 8), ()
    if "alibi_slopes" in options:
        arrays = (rng.random(4, np.float32),)
        options = {"alibi_slopes": arrays[0], "softcap": 2.0, "causal": True}
    elif "score" in options:
        arrays = (random(rng, 2, 4, 30, 33),)
        options = {"score": "bias", "params": {"bias": arrays[0]}}
    out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
    results = flashgen.attention_backward(dout, q, k, v, out, lse, **options)
    plan = flashgen.plan_backward(dout, q, k, v, out, lse, **options)
    verdict = judge(
        plan.problem,
        by_name(plan.problem, dout, q, k, v, None, out, lse, *(None,) * 5, *results, None, *arrays),
    )
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    "formula", ["where(score < 0, q - kv, h)", "where(3 < 5, 1.0, score)"], ids=["integer", "constant"]
)
def test_scores_of_other_types_and_shapes(formula, tmp_path, monkeypatch):
    (tmp_path / "scores.yaml").write_text(f"scores: {{mine: {{score: '{formula}'}}}}")
    monkeypatch.setenv("FLASHGEN_SPECS", str(tmp_path))
    rng = np.random.default_rng()
    q, k, v = (random(rng, 9, 2, 8) for _ in range(3))
    verdict = judged(q, k, v, random(rng, 9, 2, 8), score="mine")
    assert verdict.ok, verdict


def test_what_nothing_sees_has_no_gradient():
    rng = np.random.default_rng()
    q, k = random(rng, 1, 9, 2, 8, dtype="fp16"), random(rng, 1, 4, 2, 8, dtype="fp16")
    out, lse = flashgen.attention(q, k, k, causal=True, return_lse=True)
    dq, dk, dv = flashgen.attention_backward(out, q, k, k, out, lse, causal=True)
    assert not dq[:, :5].any()
    assert dq[:, 6:].any()
    out, lse = flashgen.attention(k, q, q, mask_type="causal_top_left", return_lse=True)
    _, dk, dv = flashgen.attention_backward(out, k, q, q, out, lse, mask_type="causal_top_left")
    assert not dk[:, 4:].any()
    assert not dv[:, 4:].any()
    assert dv[:, :4].any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dlse", [np.inf, -np.inf, np.nan])
def test_the_gradient_of_an_lse_of_nothing_has_no_effect(dlse, packed):
    """Such as that of lse ** 2, at -inf."""
    rng = np.random.default_rng()
    q, k = random(rng, 9, 2, 8), random(rng, 4, 2, 8)
    options = {"causal": True}
    if packed:
        options |= {"cu_seqlens_q": np.array([0, 9], np.int32), "cu_seqlens_kv": np.array([0, 4], np.int32)}
    out, lse = flashgen.attention(q, k, k, return_lse=True, **options)
    expected = flashgen.attention_backward(out, q, k, k, out, lse, **options)
    of_nothing = np.where(np.isneginf(lse), np.float32(dlse), np.float32(0))
    found = flashgen.attention_backward(out, q, k, k, out, lse, dlse=of_nothing, **options)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_without_batch_and_at_any_strides_the_bits_are_the_same():
    rng = np.random.default_rng()
    packed = random(rng, 50, 3, 4, 16)
    q, k, v = (packed[:, part] for part in range(3))
    out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    expected = flashgen.attention_backward(out, q, k, v, out, lse, causal=True)
    gradient = np.full(packed.shape, np.nan, np.float32)
    into = dict(zip(("dq", "dk", "dv"), (gradient[:, part] for part in range(3)), strict=True))
    batched = (x[None] for x in (out, *(np.ascontiguousarray(x) for x in (q, k, v)), out, lse))
    flashgen.attention_backward(out, q, k, v, out, lse, causal=True, **into)
    for one, other, place in zip(
        expected, flashgen.attention_backward(*batched, causal=True), range(3), strict=True
    ):
        np.testing.assert_array_equal(one, other[0])
        np.testing.assert_array_equal(one, gradient[:, place])


def test_threads_give_the_bits_of_one_thread(monkeypatch):
    rng = np.random.default_rng()
    q, k, v, dout = (random(rng, 2, 100, 4, 32) for _ in range(4))
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    one = flashgen.attention_backward(dout, q, k, v, out, lse)
    monkeypatch.setattr(threads, "_PARALLEL_WORK", 0)
    monkeypatch.setattr(threads, "processors", lambda: 4)
    for x, y in zip(one, flashgen.attention_backward(dout, q, k, v, out, lse), strict=True):
        np.testing.assert_array_equal(x, y)


def test_deterministic_bits_do_not_depend_on_the_threads_of_blas():
    """Another call that runs at the same time may leave it one."""
    rng = np.random.default_rng()
    q, dout, k, v = (random(rng, rows, 1, 64) for rows in (476, 476, 256, 256))
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    found = []
    for count in (1, 2):
        with ThreadpoolController().limit(limits=count, user_api="blas"):
            found.append(flashgen.attention_backward(dout, q, k, v, out, lse, deterministic=True))
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [30.0, 300.0, 3000.0, 20000.0])
def test_p_stays_within_1_for_large_scores(dtype, size):
    """dv sums up P where dout is 1: over all keys no more than 1 for each row."""
    x = np.full((1, 50, 1, 64), size).astype(DTYPES[dtype])
    out, lse = flashgen.attention(x, x, x, return_lse=True)
    dout = np.ones_like(x)
    dq, dk, dv = (g.astype(np.float64) for g in flashgen.attention_backward(dout, x, x, x, out, lse))
    assert np.isfinite(dq).all()
    assert np.isfinite(dk).all()
    assert dv.min() >= 0
    assert dv.sum(axis=1).max() <= 50 * (1 + 2.0**-7)
