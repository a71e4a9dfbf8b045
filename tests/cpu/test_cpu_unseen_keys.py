"""Keys that no query of their sequence sees, on the CPU: they have no effect, whatever their bits, and
entries of the page table that have no other keys may hold anything.
"""

import numpy as np
import pytest

import flashgen
from flashgen import errors
from flashgen.runtime import check
from flashgen.simulator import hostcompiler

WIDTH = 32
# Keys that 4 queries of 100 keys see.
RANGES = {
    "window": ({"causal": True, "window_size": (10, 0)}, slice(86, 100)),
    "top left": ({"mask_type": "causal_top_left"}, slice(4)),
}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def with_garbage(x, seen, value):
    found = np.full_like(x, value)
    found[:, seen] = x[:, seen]
    return found


@pytest.mark.parametrize("masked", [False, True], ids=["alone", "dense"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", RANGES)
def test_they_have_no_effect_on_results_and_gradients(which, value, masked):
    options, seen = RANGES[which]
    if masked:
        mask = np.zeros((4, 100), bool)
        mask[:, ::3] = True
        options = options | {"mask": mask}
    q, dout = normal(0, 1, 4, 2, WIDTH), normal(1, 1, 4, 2, WIDTH)
    k, v = normal(2, 1, 100, 2, WIDTH), normal(3, 1, 100, 2, WIDTH)
    found = []
    for given in ((k, v), (with_garbage(k, seen, value), with_garbage(v, seen, value))):
        out, lse = flashgen.attention(q, *given, return_lse=True, **options)
        assert np.isfinite(out).all()
        found.append((out, lse, *flashgen.attention_backward(dout, q, *given, out, lse, **options)))
    for right, each in zip(*found, strict=True):
        assert np.array_equal(right, each)
    for gradient in found[1][-2:]:
        rest = gradient.copy()
        rest[:, seen] = 0
        assert not rest.any()


def cache(garbage, entries):
    """A sequence of 200 keys in pages of 16, of which 4 queries with a window of 19 see those from 177 on."""
    k, v = normal(4, 20, 16, 2, WIDTH), normal(5, 20, 16, 2, WIDTH)
    pages = np.random.default_rng(6).permutation(20)[None, :13].astype(np.int32)
    for x in (k, v):
        x[pages[0, :11]] = garbage
        x[pages[0, 11], :1] = garbage
    pages[0, :11] = entries
    return flashgen.KVCache(k, v, np.array([200], np.int32), pages=pages)


@pytest.mark.parametrize("backend", ["cpu", "simulator"])
@pytest.mark.parametrize("entry", [-1, 20, 2**31 - 1, -(2**31)])
def test_entries_of_pages_before_a_window_may_hold_anything(entry, backend, forget_plans, monkeypatch):
    monkeypatch.setenv(check.SWITCH, "1")
    if backend == "simulator" and (why := hostcompiler.why_unavailable()):
        pytest.skip(why)
    q = normal(0, 1, 4, 2, WIDTH)
    options = {"causal": True, "window_size": (19, 0), "backend": backend}
    right = flashgen.attention(q, cache(0.0, 0), **options)
    assert np.array_equal(flashgen.attention(q, cache(np.nan, entry), **options), right)


def test_an_entry_with_a_key_that_is_seen_is_checked():
    wrong = cache(0.0, 0)
    wrong.pages[0, 11] = -1
    with pytest.raises(errors.BadParam, match=r"pages\[0, 11\] is -1; there are 20 pages"):
        flashgen.attention(normal(0, 1, 4, 2, WIDTH), wrong, causal=True, window_size=(19, 0))
    with pytest.raises(errors.BadParam, match=r"pages\[0, 0\] is -1; there are 20 pages"):
        flashgen.attention(normal(0, 1, 4, 2, WIDTH), cache(0.0, -1), causal=True)
