"""Which scores dropout drops: the bits of FlashAttention-2, and how many of them."""

import numpy as np
import pytest

from flashgen.errors import BadParam
from flashgen.operators import dropout, gradients, reference
from flashgen.operators.dropout import Dropout, keep_scale, keep_threshold
from flashgen.operators.masks import Band

WORD = 0xFFFFFFFF


def philox_of_integers(seed, counter, rounds=7):
    """Philox4x32 of four words of a counter, in Python's integers."""
    c0, c1, c2, c3 = counter
    key0, key1 = seed & WORD, seed >> 32 & WORD
    for _ in range(rounds):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high >> 32 ^ c1 ^ key0, high & WORD, low >> 32 ^ c3 ^ key1, low & WORD
        key0, key1 = key0 + 0x9E3779B9 & WORD, key1 + 0xBB67AE85 & WORD
    return c0, c1, c2, c3


def byte_of(seed, offset, pair, query, key):
    """The random byte of a score, one at a time, by flash-attn's layout of a block."""
    lane = query % 8 * 4 + key % 8 // 2
    position = offset + pair * 32 + lane & (1 << 64) - 1
    words = philox_of_integers(seed, (position & WORD, position >> 32, query // 16, key // 32))
    return words[key % 32 // 8] >> 8 * (query % 16 // 8 * 2 + key % 2) & 0xFF


def test_known_answers_of_philox():
    # Of Random123's kat_vectors, philox4x32 with 7 rounds.
    assert philox_of_integers(0, (0, 0, 0, 0)) == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    ones = philox_of_integers((1 << 64) - 1, (WORD,) * 4)
    assert ones == (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (1234, -40), (2**62 + 1, 2**63 - 7)])
def test_each_score_has_the_byte_of_its_place(seed, offset):
    rng = np.random.default_rng()
    rows, keys = np.arange(3, 70), np.arange(29, 100)
    batch, head = np.array([0, 2, 5]), np.array([1, 0, 3])
    drawn = Dropout(seed, offset, 0, 1.0, 4)._bytes(batch * 4 + head, rows, keys)
    for _ in range(60):
        pair, row, key = (int(rng.integers(n)) for n in drawn.shape)
        expected = byte_of(seed, offset, int(batch[pair] * 4 + head[pair]), int(rows[row]), int(keys[key]))
        assert drawn[pair, row, key] == expected


def test_a_sequence_by_itself_keeps_its_numbers():
    seed = np.array([7, 2**63 - 1])
    whole = Dropout(7, 2**63 - 1, 200, 1.0, 3)
    moved = Dropout(*map(int, dropout.seed_of_sequence(seed, 5, 3)), 200, 1.0, 3)
    rows, keys = np.arange(40), np.arange(50)
    assert np.array_equal(whole.kept(5, 2, rows, keys), moved.kept(0, 2, rows, keys))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_as_many_are_kept_as_bytes_say_at_every_place(dropout_p):
    rate = (keep_threshold(dropout_p) + 1) / 256
    drawn = Dropout(11, 3, keep_threshold(dropout_p), keep_scale(dropout_p), 64)
    kept = drawn.kept(np.arange(4).repeat(64), np.tile(np.arange(64), 4), np.arange(64), np.arange(64))
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(kept.mean() - rate) < 5 * deviation / np.sqrt(kept.size)
    # Layouts that repeat or skip lanes show at a place of a block.
    of_places = kept.reshape(256, 4, 16, 2, 32).mean((0, 1, 3))
    assert np.abs(of_places - rate).max() < 5.5 * deviation / np.sqrt(256 * 8)
    first, second = kept[:, :-1].reshape(-1), kept[:, 1:].reshape(-1)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(len(first))


def test_rates_are_flash_attns():
    assert [keep_threshold(p) for p in (0.1, 0.2, 0.5, 0.8)] == [229, 204, 127, 50]
    assert keep_scale(0.5) == 2.0
    for p in (0.0, 1e-4, 0.1, 0.5, 0.8):
        dropout.check_bias(p)
    for p in (0.9, 0.99, 0.9999):
        with pytest.raises(BadParam, match=rf"^dropout_p is {p}; a score has one random byte, so 0\."):
            dropout.check_bias(p)


@pytest.mark.parametrize("wrong", [1, 1.0, -0.1, float("nan"), True, "0.1", None, np.zeros(3)])
def test_what_is_no_probability_is_named(wrong):
    with pytest.raises(BadParam, match=r"^dropout_p is .*; expected a number from 0"):
        dropout.probability_of(wrong)


@pytest.mark.parametrize("masked", ["none", "causal", "window"])
def test_gradients_in_float64_are_what_the_result_changes_by(masked):
    rng = np.random.default_rng()
    band = {"none": Band(), "causal": Band(right=0), "window": Band(1, 2, 1)}[masked]
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 3)))
    dout, dlse = rng.standard_normal((2, 5, 4, 3)), rng.standard_normal((2, 4, 5))
    drawn = Dropout(int(rng.integers(2**60)), 0, 127, 2.0, 4)
    right = gradients.gradients(dout, q, k, v, "fp16", 0.6, band, None, dlse, dropout=drawn)

    def loss(*inputs):
        result = reference.attention(*inputs, "fp16", 0.6, band, dropout=drawn)
        return (dout * result.out).sum() + (dlse * result.lse).sum()

    for i, (gradient, bound) in enumerate(right.values()):
        assert (bound >= 0).all()
        for at in np.ndindex(gradient.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [x.copy() for x in (q, k, v)]
                moved[i][at] += step
                ends.append(loss(*moved))
            assert gradient[at] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-7)


def test_the_bound_tells_a_score_that_is_dropped_wrongly():
    rng = np.random.default_rng()
    q, k, v = (rng.standard_normal((1, 64, 2, 16)) for _ in range(3))
    for dtype in ("fp16", "bf16"):
        right, wrong = (
            reference.attention(q, k, v, dtype, 0.25, dropout=Dropout(seed, 0, 229, 1 / 0.9, 2))
            for seed in (3, 4)
        )
        assert (reference.shares(wrong.out, right.out, right.out_bound) > 1).mean() > 0.5
