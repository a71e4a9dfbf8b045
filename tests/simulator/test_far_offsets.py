"""Caches whose pages, or rows, lie further apart than 2^31 elements, in the simulator."""

from __future__ import annotations

import numpy as np
import pytest

import flashgen
from flashgen import KVCache
from flashgen.simulator import hardware

ENTRIES, SLOTS, HEADS, WIDTH = 2, 304, 2, 32
# Elements between entries: as a 32-bit int it is negative.
STRIDE = 2**31 + 64
PAGES = np.array([[1, 0], [0, 1]], np.int32)
INDEX = np.array([1, 0], np.int32)


def numbers(rng, *shape):
    return rng.standard_normal((*shape, WIDTH), np.float32).astype(np.float16)


def far(near):
    """A copy whose entries lie far apart; of the memory between them nothing is ever touched."""
    entry = SLOTS * HEADS * WIDTH
    memory = np.zeros((ENTRIES - 1) * STRIDE + entry, near.dtype)
    copy = np.lib.stride_tricks.as_strided(memory, near.shape, (STRIDE * near.itemsize, *near.strides[1:]))
    copy[...] = near
    return copy


def caches(rng, lengths, places):
    """Keys and values close together, and the same far apart."""
    near = [numbers(rng, ENTRIES, SLOTS, HEADS) for _ in "kv"]
    lengths = np.array(lengths, np.int32)
    return [KVCache(*arrays, lengths, **places) for arrays in (near, [far(x) for x in near])]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("seqlen_q", "splits"), [(1, 2), (100, 1)], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("lengths", "places"),
    [((600, 321), {"pages": PAGES}), ((304, 99), {"index": INDEX})],
    ids=["pages", "index"],
)
def test_attention_is_that_of_entries_close_together(
    arch, seqlen_q, splits, lengths, places, compiler, forget_plans, monkeypatch, fresh_seed
):
    monkeypatch.setenv(hardware.ARCH_VARIABLE, arch)
    rng = np.random.default_rng(fresh_seed)
    q = numbers(rng, 2, seqlen_q, 2 * HEADS)
    options = {"causal": True, "splits": splits, "backend": "simulator"}
    near, distant = caches(rng, lengths, places)
    assert (flashgen.plan(q, near, **options).steps[0].shares is not None) == (splits > 1)
    found = [flashgen.attention(q, cache, **options) for cache in (near, distant)]
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize(
    ("lengths", "places"),
    [((303, 500), {"pages": PAGES}), ((12, 300), {"index": INDEX})],
    ids=["pages", "index"],
)
def test_tokens_go_where_they_go_in_entries_close_together(lengths, places, compiler, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    new = [numbers(rng, 2, 2, HEADS) for _ in "kv"]
    near, distant = caches(rng, lengths, places)
    for cache in (near, distant):
        flashgen.append(cache, *new, backend="simulator")
    for name in "kv":
        assert np.array_equal(getattr(near, name), getattr(distant, name))
