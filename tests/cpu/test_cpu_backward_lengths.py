"""``attention_backward`` with lengths, on the CPU: each sequence against float64, and nothing beside them."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen
from flashgen.operators.gradients import judge
from flashgen.operators.lengths import LENGTH_ARRAYS
from flashgen.operators.sequences import sequences

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
NAMES = ("dq", "dk", "dv")


def random(rng, *shape, dtype="fp32"):
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def sums(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class Batch:
    """Sequences of random lengths; what is no sequence's is NaN."""

    def __init__(self, rng, lengths, packed_q, packed_kv, heads=(4, 2), widths=(16, 8), dtype="fp32"):
        q_lengths, kv_lengths = (np.array(of_one, np.int32) for of_one in zip(*lengths, strict=True))
        batch, behind = len(q_lengths), 3
        self.lengths = dict.fromkeys(LENGTH_ARRAYS)
        if packed_q:
            self.lengths["cu_seqlens_q"] = sums(q_lengths)
            rows = (int(q_lengths.sum()) + behind,)
            used = np.arange(rows[0]) < rows[0] - behind
        else:
            rows = (batch, int(q_lengths.max(initial=0)))
            used = np.ones(rows, bool)
        if packed_kv:
            self.lengths["cu_seqlens_kv"] = sums(kv_lengths)
            keys = (int(kv_lengths.sum()) + behind,)
            seen = np.arange(keys[0]) < keys[0] - behind
        else:
            self.lengths["kv_lengths"] = kv_lengths
            keys = (batch, int(kv_lengths.max(initial=0)) + behind)
            seen = np.arange(keys[1]) < kv_lengths[:, None]
        self.q, self.dout = (random(rng, *rows, heads[0], width, dtype=dtype) for width in widths)
        self.k, self.v = (random(rng, *keys, heads[1], width, dtype=dtype) for width in widths)
        self.dlse = random(rng, *((heads[0], *rows) if packed_q else (rows[0], heads[0], *rows[1:])))
        for x, valid in ((self.q, used), (self.dout, used), (self.k, seen), (self.v, seen)):
            x[~valid] = np.nan
        self.given = {name: x for name, x in self.lengths.items() if x is not None}

    def check(self, dkv=None, **options):
        """``dkv`` is the dtype of dk and dv, if it is not the dtype of the call."""
        options |= self.given
        out, lse = flashgen.attention(self.q, self.k, self.v, return_lse=True, **options)
        inputs = self.dout, self.q, self.k, self.v, out, lse
        into = dict(zip(NAMES, (np.full_like(x, np.nan) for x in (self.q, self.k, self.v)), strict=True))
        if dkv is not None:
            into |= {f"d{x}": np.full(getattr(self, x).shape, np.nan, dkv) for x in ("k", "v")}
        found = flashgen.attention_backward(*inputs, dlse=self.dlse, **into, **options)
        problem = flashgen.plan_backward(*inputs, dlse=self.dlse, **into, **options).problem
        assert all(x is y for x, y in zip(found, into.values(), strict=True))
        of_q = {"dout": self.dout, "q": self.q, "out": out, "lse": lse, "dlse": self.dlse, "dq": found[0]}
        of_k = {"k": self.k, "v": self.v, "dk": found[1], "dv": found[2]}
        of_q = {name: x[None] if problem.lengths.packed_q else x for name, x in of_q.items()}
        of_k = {name: x[None] if problem.lengths.packed_kv else x for name, x in of_k.items()}
        for each in sequences(problem, self.lengths):
            entry, rows = each.queries()
            own = {name: x[entry, rows][None] for name, x in of_q.items() if "lse" not in name}
            own |= {name: of_q[name][entry, :, rows][None] for name in ("lse", "dlse")}
            own |= {name: each.keys(x)[None] for name, x in of_k.items()}
            verdict = judge(problem.of_sequence(each.q_length, each.kv_length), own)
            assert verdict.ok, f"sequence {each.number}: {verdict}"
            of_q["dq"][entry, rows] = 0
            each.keys(of_k["dk"])[...] = each.keys(of_k["dv"])[...] = 0
        # All else is written, as 0.
        assert not any(x.astype(np.float32).any() for x in (of_q["dq"], of_k["dk"], of_k["dv"]))
        return found


lengths = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5)
masks = st.one_of(
    st.just({}),
    st.just({"causal": True}),
    st.tuples(st.integers(-1, 12), st.integers(-1, 12)).map(lambda w: {"window_size": w}),
)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), lengths, st.booleans(), st.booleans(), masks)
def test_every_sequence_is_a_call_of_its_own(seed, pairs, packed_q, packed_kv, options):
    if not packed_q:  # then all have as many
        pairs = [(pairs[0][0], keys) for _, keys in pairs]
    Batch(np.random.default_rng(seed), pairs, packed_q, packed_kv).check(**options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_in_each_dtype(dtype):
    rng = np.random.default_rng()
    Batch(rng, [(100, 130), (0, 40), (70, 0), (60, 20)], True, True, dtype=dtype).check(causal=True)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_keys_in_fp32(packed):
    """For sums over several calls; rounded to the dtype of the call they are its gradients."""
    batch = Batch(np.random.default_rng(7), [(60, 130), (60, 0), (60, 20)], packed, packed, dtype="bf16")
    wide = batch.check(dkv=np.float32, causal=True)
    for x, y in zip(wide[1:], batch.check(causal=True)[1:], strict=True):
        assert x.dtype == np.float32
        assert (x.astype(y.dtype) == y).all()


def test_a_score_modification_counts_entries_and_positions():
    """ALiBi's slopes are those of a sequence, and its distances end with it."""
    rng = np.random.default_rng()
    batch = Batch(rng, [(5, 7), (9, 4), (3, 3)], True, True)
    slopes = rng.random((3, 4), np.float32)
    options = {"alibi_slopes": slopes, "softcap": 2.0}
    out, lse = flashgen.attention(batch.q, batch.k, batch.v, return_lse=True, **options, **batch.given)
    found = flashgen.attention_backward(
        batch.dout, batch.q, batch.k, batch.v, out, lse, **options, **batch.given
    )
    cu_q, cu_kv = batch.given["cu_seqlens_q"], batch.given["cu_seqlens_kv"]
    for b in range(3):
        rows, keys = (slice(cu[b], cu[b + 1]) for cu in (cu_q, cu_kv))
        own = batch.dout[rows], batch.q[rows], batch.k[keys], batch.v[keys], out[rows], lse[:, rows]
        expected = flashgen.attention_backward(
            *map(np.ascontiguousarray, own), alibi_slopes=slopes[b], softcap=2.0
        )
        for x, y, part in zip(found, expected, (rows, keys, keys), strict=True):
            np.testing.assert_array_equal(x[part], y)


def test_a_plan_takes_other_lengths():
    rng = np.random.default_rng()
    batch = Batch(rng, [(8, 8), (8, 8)], True, True)
    out, lse = flashgen.attention(batch.q, batch.k, batch.v, return_lse=True, **batch.given)
    plan = flashgen.plan_backward(batch.dout, batch.q, batch.k, batch.v, out, lse, **batch.given)
    cu = np.array([0, 3, 16], np.int32)
    arrays = batch.dout, batch.q, batch.k, batch.v, cu, cu, None
    out, lse = flashgen.attention(
        batch.q, batch.k, batch.v, return_lse=True, cu_seqlens_q=cu, cu_seqlens_kv=cu
    )
    expected = flashgen.attention_backward(
        *arrays[:4], out, lse, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=13
    )
    for x, y in zip(plan(*arrays, out, lse), expected, strict=True):
        np.testing.assert_array_equal(x, y)
