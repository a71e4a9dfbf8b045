"""FLASHGEN_CHECK on a GPU: lengths that queued work has just written are read and named; a graph is captured
as without it."""

from functools import partial

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import flashgen  # noqa: E402
from flashgen import errors  # noqa: E402
from flashgen.runtime import check  # noqa: E402

pytestmark = pytest.mark.gpu
BATCH, PAGES, PAGE_SIZE = 3, 4, 16


@pytest.fixture(autouse=True)
def checking(forget_plans, monkeypatch):
    monkeypatch.setenv(check.SWITCH, "1")


def normal(*shape):
    return cupy.random.standard_normal(shape, cupy.float32).astype(cupy.float16)


@pytest.fixture
def cache():
    k, v = normal(20, PAGE_SIZE, 2, 64), normal(20, PAGE_SIZE, 2, 64)
    lengths = cupy.array([40, 0, 64], cupy.int32)
    # Rows of a larger table.
    pages = cupy.arange(BATCH * 6, dtype=cupy.int32).reshape(BATCH, 6)[:, :PAGES]
    return flashgen.KVCache(k, v, lengths, pages=pages)


def test_what_queued_work_writes_is_what_is_checked(cache, busy):
    q, stream = normal(BATCH, 1, 8, 64), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    right = flashgen.attention(q, cache, stream=stream)
    busy(stream)
    with stream:
        cache.lengths[2] = 65
        with pytest.raises(
            errors.BadParam, match=r"^lengths\[2\] is 65; expected 0 to 64, the capacity of k"
        ):
            flashgen.attention(q, cache)
        cache.lengths[2] = 64
        cache.pages[0, 2] = 20
        with pytest.raises(errors.BadParam, match=r"pages\[0, 2\] is 20; there are 20 pages"):
            flashgen.attention(q, cache)
        cache.pages[0, 2] = 2
        again = flashgen.attention(q, cache)
    stream.synchronize()
    assert np.array_equal(again.get(), right.get())


@pytest.mark.parametrize("held", [False, True])
def test_a_bound_below_what_an_append_leads_to_is_found_before_the_cache_is_written(held, cache):
    q, new, before = normal(BATCH, 1, 8, 64), normal(BATCH, 1, 2, 64), cache.k.get()
    cache.lengths[2] = 50
    options = {"append": (new, new), "max_seqlen_kv": 50}
    call = partial(flashgen.attention, q, cache, **options)
    if held:
        call = partial(flashgen.plan(q, cache, **options), q, cache, (new, new))
    with pytest.raises(errors.BadParam, match="sequence 2 has length 51; the bound max_seqlen_kv is 50"):
        call()
    assert np.array_equal(cache.k.get(), before)
    cache.lengths[2] = 49
    call()
    assert not np.array_equal(cache.k.get(), before)


def test_an_append_names_the_sequence_and_writes_nothing(cache):
    new, before = normal(BATCH, 1, 2, 64), cache.k.get()
    with pytest.raises(errors.BadTensorShape, match="sequence 2 has 64 tokens and gets 1"):
        flashgen.append(cache, new, new)
    assert np.array_equal(cache.k.get(), before)


def test_a_captured_call_is_not_checked(cache):
    q, stream = normal(BATCH, 1, 8, 64), cupy.cuda.Stream(non_blocking=True)
    plan = flashgen.plan(q, cache)
    out, memory = cupy.empty_like(q), cupy.empty(plan.workspace_bytes, cupy.uint8)
    arrays = {"kv_lengths": cache.lengths, "pages": cache.pages, "out": out, "workspace": memory}
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan(q, cache.k, cache.v, **arrays)
        graph = stream.end_capture()
        for lengths in ([40, 0, 64], [1, 17, 33]):
            cache.lengths[...] = cupy.array(lengths, cupy.int32)
            graph.launch(stream)
            expected = flashgen.attention(q, cache)
            stream.synchronize()
            assert np.array_equal(out.get(), expected.get())
