import math
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import flashgen
from flashgen.cpu import attention as cpu
from flashgen.cpu import keyspans, threads
from flashgen.errors import BadParam
from flashgen.operators import reference
from flashgen.operators.attention import normalise
from flashgen.operators.contract import MAX_SCALE
from flashgen.operators.masks import Band
from flashgen.operators.numbers import widened
from flashgen.operators.reference import judge
from flashgen.operators.splits import SplitEvery
from flashgen.runtime.arrays import view
from named import by_name

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}


windows = st.tuples(st.integers(-1, 30), st.integers(-1, 30)).map(lambda w: {"window_size": w})
OPTIONS = st.one_of(
    st.just({}),
    st.just({"causal": True}),
    st.just({"mask_type": "causal_top_left"}),
    windows,
    st.integers(0, 30).map(lambda left: {"causal": True, "window_size": (left, 0)}),
)
SHAPES_OF_MASKS = st.none() | st.sampled_from(["row", "rows", "heads", "batch"])


@settings(max_examples=200, deadline=None)
@given(
    st.data(),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]),
    OPTIONS,
    SHAPES_OF_MASKS,
)
def test_every_mask_in_blocks_of_any_size(data, rows, keys, heads, options, mask_shape):
    kv_heads, group = heads
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    q = rng.standard_normal((2, rows, kv_heads * group, 8), np.float32)
    k = rng.standard_normal((2, keys, kv_heads, 8), np.float32)
    v = rng.standard_normal((2, keys, kv_heads, data.draw(st.sampled_from([4, 8, 20]))), np.float32)
    mask = None
    if mask_shape is not None:
        shapes = {"row": (keys,), "rows": (rows, keys), "heads": (kv_heads * group, 1, keys)}
        shape = shapes.get(mask_shape, (2, 1, rows, keys))
        mask = rng.integers(0, 256, shape).astype(np.uint8) * (rng.random(shape) < 0.7)
    views = {} if mask is None else {"mask": view(mask, "mask")}
    problem = normalise(view(q, "q"), view(k, "k"), view(v, "v"), **views, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyspans, "BLOCK_ROWS", data.draw(st.sampled_from([1, 4, 16, 512])))
        patch.setattr(keyspans, "BLOCK_KEYS", data.draw(st.sampled_from([1, 7, 16, 512])))
        out, lse = cpu.attention(problem, {"q": q, "k": k, "v": v, "mask": mask})
    verdict = judge(problem, by_name(problem, q, k, v, mask, out, lse))
    assert verdict.ok, verdict


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (200, 3)}], ids=str)
def test_error_in_each_dtype(dtype, options):
    rng = np.random.default_rng(sum(map(ord, dtype)))
    q = rng.standard_normal((2, 600, 4, 64), np.float32).astype(DTYPES[dtype])
    k, v = (rng.standard_normal((2, 700, 2, d), np.float32).astype(DTYPES[dtype]) for d in (64, 40))
    out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
    assert (out.dtype, lse.dtype) == (DTYPES[dtype], np.float32)
    problem = flashgen.plan(q, k, v, **options).problem
    verdict = judge(problem, by_name(problem, q, k, v, None, out, lse))
    assert verdict.ok, verdict
    # P stays in float32, so that rounding the result is nearly all.
    if dtype != "fp32":
        exact = reference.attention(
            *(widened(x, dtype) for x in (q, k, v)), dtype, problem.softmax_scale, Band.of(problem)
        ).out
        rounding = reference.UNIT_ROUNDOFF[dtype] * np.abs(exact) + 1e-6
        assert np.all(np.abs(out.astype(np.float64) - exact) <= rounding)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing_are_zero(dtype):
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, 9, 2, 8)).astype(DTYPES[dtype])
    k = rng.standard_normal((1, 4, 2, 8)).astype(DTYPES[dtype])
    out, lse = flashgen.attention(q, k, k, causal=True, return_lse=True)
    assert np.all(out[:, :5].astype(np.float32) == 0)
    assert np.all(np.isneginf(lse[..., :5]))
    assert np.all(np.isfinite(lse[..., 5:]))
    nothing = k[:, :0]
    out, lse = flashgen.attention(q, nothing, nothing, return_lse=True)
    assert np.all(out.astype(np.float32) == 0)
    assert np.all(np.isneginf(lse))


def test_scores_far_apart_do_not_overflow():
    q = np.full((1, 3, 1, 8), 100, np.float32)
    k = np.stack([np.full((1, 1, 8), scale, np.float32) for scale in (-100, 0, 100)], axis=1)
    v = np.arange(24, dtype=np.float32).reshape(1, 3, 1, 8)
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    np.testing.assert_array_equal(out, np.broadcast_to(v[:, 2:], out.shape))
    np.testing.assert_allclose(lse, 80000 / math.sqrt(8), rtol=1e-6)


def test_the_largest_scale_of_small_scores():
    rng = np.random.default_rng(3)
    q, k = 1e-19 * rng.standard_normal((2, 1, 9, 2, 16)).astype(np.float32)
    v = rng.standard_normal((1, 9, 2, 16), np.float32)
    out, lse = flashgen.attention(q, k, v, softmax_scale=MAX_SCALE, return_lse=True)
    problem = flashgen.plan(q, k, v, softmax_scale=MAX_SCALE).problem
    verdict = judge(problem, by_name(problem, q, k, v, None, out, lse))
    assert verdict.ok, verdict


def test_a_scale_of_zero_weighs_all_visible_keys_alike():
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 1, 6, 1, 8), np.float32)
    out, lse = flashgen.attention(q, k, v, softmax_scale=0, causal=True, return_lse=True)
    counts = np.arange(1, 7)
    np.testing.assert_allclose(
        out[0, :, 0], np.cumsum(v[0, :, 0], axis=0) / counts[:, None], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(lse[0, 0], np.log(counts), rtol=1e-6, atol=1e-30)


def test_a_nan_stays_in_its_row():
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((3, 1, 6, 1, 8), np.float32)
    q[0, 2] = np.nan
    out = flashgen.attention(q, k, v)
    assert np.isnan(out[0, 2]).all()
    assert np.isfinite(np.delete(out, 2, axis=1)).all()


def test_any_strides_give_the_same_bits():
    rng = np.random.default_rng(4)
    packed = rng.standard_normal((2, 50, 3, 4, 16), np.float32)
    q, k, v = (packed[:, :, part] for part in range(3))
    expected = flashgen.attention(*(np.ascontiguousarray(x) for x in (q, k, v)), causal=True)
    np.testing.assert_array_equal(flashgen.attention(q, k, v, causal=True), expected)
    turned = [x.transpose(1, 0, 2, 3).copy().transpose(1, 0, 2, 3)[::-1] for x in (q, k, v)]
    out = np.full((50, 2, 4, 16), np.nan, np.float32).transpose(1, 0, 2, 3)
    assert flashgen.attention(*turned, causal=True, out=out) is out
    np.testing.assert_array_equal(out[::-1], expected)


def test_threads_give_the_bits_of_one_thread(monkeypatch):
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 2, 300, 4, 32), np.float32)
    with threadpool_limits(1, "blas"):  # with more, some BLAS gives other bits by itself
        alone = flashgen.attention(q, k, v, causal=True)
    monkeypatch.setattr(threads, "_PARALLEL_WORK", 0)
    monkeypatch.setattr(threads, "processors", lambda: 4)
    np.testing.assert_array_equal(flashgen.attention(q, k, v, causal=True), alone)


def test_fixed_splits_leave_blas_one_thread_as_a_large_batch_does(monkeypatch):
    """So that the bits of a sequence do not depend on its batch; they are those of any splits."""
    rng = np.random.default_rng()
    q, k, v = rng.standard_normal((3, 4, 300, 4, 64), np.float32)
    limited, inside = [], threads._ONE_BLAS_THREAD
    attend = cpu._attend
    monkeypatch.setattr(cpu, "_attend", lambda *args: (limited.append(inside._inside > 0), attend(*args)))
    results = {}
    for splits in ("auto", 1, SplitEvery(256)):
        limited.clear()
        one = flashgen.attention(q[1:2], k[1:2], v[1:2], causal=True, splits=splits)
        assert set(limited) == {splits != "auto"}
        with monkeypatch.context() as large:
            large.setattr(threads, "_PARALLEL_WORK", 0)
            whole = flashgen.attention(q, k, v, causal=True, splits=splits)
        if splits != "auto":
            np.testing.assert_array_equal(whole[1:2], one)
            results[splits] = one.tobytes()
    assert len(set(results.values())) == 1


@pytest.mark.drawn
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("rows", [1, 65])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("splits", [1, 3, SplitEvery(7), SplitEvery(256)], ids=str)
def test_splits_that_no_gpu_makes_are_refused(splits, dtype, rows, lengths):
    q, k = np.zeros((2, rows, 1, 64), dtype), np.zeros((2, 600, 1, 64), dtype)
    options = {"kv_lengths": np.full(2, 600, np.int32)} if lengths else {}
    found = set()
    for call in (flashgen.attention, *(partial(flashgen.explain, arch=arch) for arch in ("sm_80", "sm_90"))):
        try:
            call(q, k, k, splits=splits, **options)
            found.add(True)
        except BadParam:
            found.add(False)
    few = rows <= 64 and dtype == np.float16
    assert found == {few if splits == 3 else splits != SplitEvery(7) or not few}


def test_memory_does_not_grow_with_the_matrix_of_scores():
    import tracemalloc

    q, k, v = np.random.default_rng(6).standard_normal((3, 1, 4096, 1, 8), np.float32)
    tracemalloc.start()
    try:
        flashgen.attention(q, k, v)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4096 * 4096 * 4 / 4


def test_blas_gets_its_threads_back_after_calls_that_overlap():
    from threadpoolctl import threadpool_info

    with threadpool_limits(2, "blas"):
        before = threadpool_info()
        limit = threads._SharedLimit()
        limit.__enter__()
        limit.__enter__()
        limit.__exit__(None, None, None)
        assert {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"} == {1}
        limit.__exit__(None, None, None)
        assert threadpool_info() == before
