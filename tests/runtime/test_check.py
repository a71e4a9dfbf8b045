"""FLASHGEN_CHECK: lengths and tables are read and checked ahead of a call."""

import ctypes

import numpy as np
import pytest

import fake_gpu as gpus
import flashgen
from flashgen import errors
from flashgen.runtime import check
from flashgen.simulator import hostcompiler

HEADS, WIDTH = 2, 32
ADDRESS = 1 << 40


@pytest.fixture(autouse=True)
def checking(forget_plans, monkeypatch):
    monkeypatch.setenv(check.SWITCH, "1")


@pytest.fixture
def simulated(monkeypatch):
    if why := hostcompiler.why_unavailable():
        pytest.skip(why)
    monkeypatch.setenv("FLASHGEN_BACKEND", "simulator")


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(np.float16)


def paged(lengths, pages):
    k, v = normal(6, 16, HEADS, WIDTH), normal(6, 16, HEADS, WIDTH)
    return flashgen.KVCache(k, v, np.array(lengths, np.int32), pages=np.array(pages, np.int32))


@pytest.mark.parametrize(
    ("lengths", "pages", "message"),
    [
        ([17, 33], [[0, 1], [2, 3]], r"^lengths\[1\] is 33; expected 0 to 32, the capacity of k"),
        ([-1, 3], [[0, 1], [2, 3]], r"^lengths\[0\] is -1"),
        ([17, 3], [[0, 6], [2, 3]], r"pages\[0, 1\] is 6; there are 6 pages"),
    ],
)
def test_a_call_in_the_simulator_names_the_sequence_and_writes_nothing(lengths, pages, message, simulated):
    q = normal(2, 1, HEADS, WIDTH)
    out = np.full_like(q, np.nan)
    with pytest.raises(errors.BadParam, match=message):
        flashgen.attention(q, paged(lengths, pages), out=out)
    assert np.isnan(out).all()
    right = paged([17, 3], [[0, 1], [2, 99]])
    flashgen.attention(q, right, out=out)
    expected = flashgen.attention(q, right, backend="cpu")
    np.testing.assert_allclose(out.astype(float), expected.astype(float), atol=2e-3)


def test_packed_sequences_in_the_simulator(simulated):
    q = normal(20, HEADS, WIDTH)
    for cu_seqlens, message in (
        ([0, 9, 8, 20], "cu_seqlens_q goes from 9 to 8 in sequence 1"),
        ([0, 9, 12, 21], "cu_seqlens_q goes from 12 to 21 in sequence 2"),
        ([0, 12, 13, 20], "sequence 0 has length 12; the bound max_seqlen_q is 11"),
    ):
        cu = np.array(cu_seqlens, np.int32)
        with pytest.raises(errors.BadParam, match=message):
            flashgen.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=11)


def test_an_append_in_the_simulator(simulated):
    new = normal(2, 1, HEADS, WIDTH)
    for lengths, pages, error, message in (
        ([5, 32], [[0, 1], [2, 3]], errors.BadTensorShape, "sequence 1 has 32 tokens and gets 1"),
        ([16, 3], [[0, -1], [2, 3]], errors.BadParam, r"pages\[0, 1\] is -1"),
        ([17, 1], [[0, 2], [2, 3]], errors.BadParam, "token of sequence 0 and one of sequence 1; pages must"),
    ):
        cache = paged(lengths, pages)
        before = cache.k.copy()
        with pytest.raises(error, match=message):
            flashgen.append(cache, new, new)
        np.testing.assert_array_equal(cache.k, before)
    total, _ = flashgen.append(paged([15, 3], [[0, 1], [2, 99]]), new, new)
    assert total.tolist() == [16, 4]


def test_packed_tokens_of_an_append_name_the_sequence(simulated):
    new, cache = normal(4, HEADS, WIDTH), paged([5, 6], [[0, 1], [2, 3]])
    with pytest.raises(errors.BadParam, match="cu_seqlens_new goes from 3 to 2 in sequence 1"):
        flashgen.append(cache, new, new, cu_seqlens_new=np.array([0, 3, 2], np.int32))


def test_the_variable_is_read_when_a_plan_is_made(simulated, monkeypatch):
    q, wrong = normal(2, 1, HEADS, WIDTH), np.array([99, 1], np.int32)
    k = normal(2, 40, HEADS, WIDTH)
    held = flashgen.plan(q, k, k, kv_lengths=wrong)
    monkeypatch.delenv(check.SWITCH)
    with pytest.raises(errors.BadParam, match=r"kv_lengths\[0\] is 99"):
        held(q, k, k, kv_lengths=wrong)
    unchecked = flashgen.plan(q, k, k, kv_lengths=wrong)
    cut = unchecked(q, k, k, kv_lengths=wrong)
    whole = unchecked(q, k, k, kv_lengths=np.array([40, 1], np.int32))
    np.testing.assert_array_equal(cut, whole)


def test_a_cache_without_pages_is_not_read_and_has_room_for_no_key(simulated, forget_plans, monkeypatch):
    q, k = normal(2, 1, HEADS, WIDTH), normal(0, 16, HEADS, WIDTH)
    cache = flashgen.KVCache(k, k, np.array([5, 0], np.int32), pages=np.zeros((2, 4), np.int32))
    with pytest.raises(errors.BadParam, match=r"^lengths\[0\] is 5; expected 0 to 0, the capacity of k"):
        flashgen.attention(q, cache)
    monkeypatch.delenv(check.SWITCH)
    forget_plans()
    assert not flashgen.attention(q, cache).any()


@pytest.mark.parametrize("switch", ["yes", "2"])
def test_another_value_is_refused(switch, simulated, monkeypatch):
    monkeypatch.setenv(check.SWITCH, switch)
    q = normal(1, 8, HEADS, WIDTH)
    with pytest.raises(errors.BadParam, match=f"FLASHGEN_CHECK is '{switch}'; expected 0 or 1"):
        flashgen.attention(q, q, q)


class Memory:
    """That of a GPU, by address, and whether its streams are captured. ``waited`` has the streams."""

    def __init__(self, monkeypatch):
        from cupy.cuda import runtime

        self.arrays, self.captured, self.waited = {}, False, []
        monkeypatch.setattr(runtime, "memcpyAsync", self.copy)
        monkeypatch.setattr(runtime, "streamSynchronize", self.waited.append)
        monkeypatch.setattr(runtime, "streamIsCapturing", lambda stream: self.captured)

    def copy(self, destination, source, size, kind, stream):
        bits = self.arrays[source].tobytes()
        assert len(bits) == size
        ctypes.memmove(destination, bits, size)


def test_on_a_gpu_the_check_waits_for_the_stream_of_the_call_and_queues_nothing_on_an_error(
    fake_gpu, monkeypatch
):
    memory = Memory(monkeypatch)
    places = [ADDRESS + place * (1 << 24) for place in range(6)]
    q, k, v, out = (
        gpus.array(shape, np.float16, place)
        for shape, place in zip(
            ((2, 1, HEADS, WIDTH), *[(6, 16, HEADS, WIDTH)] * 2, (2, 1, HEADS, WIDTH)), places, strict=False
        )
    )
    # The page table is a part of a larger one.
    table = np.array([[0, 1, 77], [2, 3, 77]], np.int32)
    lengths = gpus.array((2,), np.int32, places[4])
    pages = gpus.array((2, 2), np.int32, places[5], strides=(12, 4))
    cache = flashgen.KVCache(k, v, lengths, pages=pages)

    def call(numbers):
        memory.arrays = {places[4]: np.array(numbers, np.int32), places[5]: table.ravel()[:5]}
        return flashgen.attention(q, cache, out=out, stream=9)

    with pytest.raises(errors.BadParam, match=r"^lengths\[1\] is 33"):
        call([17, 33])
    assert not fake_gpu.launches
    assert set(memory.waited) == {9}
    table[1, 1] = 6
    with pytest.raises(errors.BadParam, match=r"pages\[1, 1\] is 6"):
        call([17, 32])
    call([17, 16])
    assert len(fake_gpu.launches) == len(flashgen.plan(q, cache, out=out).steps)

    waits, launched = len(memory.waited), len(fake_gpu.launches)
    memory.captured = True
    call([17, 33])
    assert len(memory.waited) == waits
    assert len(fake_gpu.launches) > launched


def test_on_a_gpu_elements_that_are_no_integers_are_read_too(fake_gpu, monkeypatch):
    memory = Memory(monkeypatch)
    places = [ADDRESS + place * (1 << 24) for place in range(3)]
    dtypes = np.float16, np.uint8, np.float32
    shapes = (1, 5, HEADS, 64), (1, 5, HEADS, 64), (1,)
    x, out, scale = map(gpus.array, shapes, dtypes, places)
    memory.arrays = {places[2]: np.zeros(1, np.float32)}
    with pytest.raises(errors.BadParam, match="scale has an element"):
        flashgen.quantize(x, scale=scale, out=out)
    assert not fake_gpu.launches
