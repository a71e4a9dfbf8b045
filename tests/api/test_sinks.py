"""Sinks on the CPU, in every function that takes them."""

import ml_dtypes
import numpy as np
import pytest

import flashgen
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, BadTensorStrides
from flashgen.operators import gradients, reference
from flashgen.operators.masks import Band

HEADS, KV_HEADS = 4, 2
rng = np.random.default_rng()


def arrays(queries=6, keys=9, batch=2, dtype=np.float32):
    """q, k, v and sinks."""
    shapes = ((batch, queries, HEADS, 16), (batch, keys, KV_HEADS, 16), (batch, keys, KV_HEADS, 8))
    return (*(rng.standard_normal(shape).astype(dtype) for shape in shapes), random_sinks())


def random_sinks(dtype=np.float32):
    return (2 * rng.standard_normal(HEADS)).astype(dtype)


def close(result, expected, tolerance=2e-6):
    np.testing.assert_allclose(
        np.asarray(result, np.float64), np.asarray(expected, np.float64), tolerance, tolerance
    )


def with_a_key_more(q, k, v, sinks, **options):
    """The same by a key without a value, whose score is the sink: an element of q that only it reads."""
    q = np.concatenate([q, np.zeros_like(q)], -1)
    q[..., 16] = 4 * np.asarray(sinks, np.float32)
    widened = np.concatenate([k, np.zeros_like(k)], -1)
    key = np.zeros_like(widened[:, :1])
    key[..., 16] = 1
    k, v = np.concatenate([key, widened], 1), np.concatenate([np.zeros_like(v[:, :1]), v], 1)
    return flashgen.attention(q, k, v, softmax_scale=0.25, return_lse=True, **options)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_sink_is_a_key_without_a_value(dtype):
    q, k, v, _ = arrays()
    sinks = random_sinks(dtype)
    out, lse = flashgen.attention(q, k, v, sinks=sinks, return_lse=True)
    expected = with_a_key_more(q, k, v, sinks)
    close(out, expected[0])
    close(lse, expected[1])


def test_it_is_not_scaled_nor_modified():
    q, k, v, sinks = arrays()
    options = {"softmax_scale": 0.6, "softcap": 0.8}
    plain, plain_lse = flashgen.attention(q, k, v, return_lse=True, **options)
    out, lse = flashgen.attention(q, k, v, sinks=sinks, return_lse=True, **options)
    close(lse, np.logaddexp(plain_lse, sinks[:, None]))
    close(out, plain * np.exp(plain_lse - lse).swapaxes(1, 2)[..., None])


def test_minus_infinity_is_none():
    q, k, v, sinks = arrays(queries=9, keys=6)
    sinks[:] = -np.inf
    options = {"causal": True, "return_lse": True}
    for x, y in zip(
        flashgen.attention(q, k, v, sinks=sinks, **options),
        flashgen.attention(q, k, v, **options),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)
    out, lse = flashgen.attention(q, k, v, **options)
    dout, dlse = rng.standard_normal(out.shape, np.float32), np.ones_like(lse)
    *_, dsinks = flashgen.attention_backward(dout, q, k, v, out, lse, sinks=sinks, causal=True, dlse=dlse)
    assert not dsinks.any()


@pytest.mark.parametrize("keys", [0, 4])
def test_a_row_without_keys_is_0_with_its_sink_as_the_lse(keys):
    q, k, v, sinks = arrays(queries=6, keys=keys)
    out, lse = flashgen.attention(q, k, v, sinks=sinks, causal=True, return_lse=True)
    rows = slice(6 - keys)
    assert not out[:, rows].any()
    np.testing.assert_array_equal(lse[:, :, rows], np.broadcast_to(sinks[:, None], lse[:, :, rows].shape))
    dlse = rng.standard_normal(lse.shape, np.float32)
    dlse[:, :, rows.stop :] = 0
    dout = np.zeros_like(out)
    *_, dsinks = flashgen.attention_backward(dout, q, k, v, out, lse, sinks=sinks, causal=True, dlse=dlse)
    close(dsinks, dlse.sum((0, 2)))


def test_a_huge_sink_leaves_nothing_and_no_nan():
    q, k, v, _ = arrays()
    for value in (1e4, 3e38):
        sinks = np.full(HEADS, value, np.float32)
        out, lse = flashgen.attention(q, k, v, sinks=sinks, return_lse=True)
        assert not out.any()
        close(lse, np.full_like(lse, value))


@pytest.mark.parametrize("masked", ["none", "causal", "window"])
def test_gradients_in_float64_are_what_the_result_changes_by(masked):
    band = {"none": Band(), "causal": Band(-1, right=0), "window": Band(1, 2, 1)}[masked]
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 3)))
    dout, dlse, sinks = (
        rng.standard_normal((2, 5, 4, 3)),
        rng.standard_normal((2, 4, 5)),
        rng.standard_normal(4),
    )
    right = gradients.gradients(dout, q, k, v, "fp16", 0.6, band, None, dlse, None, sinks)

    def loss(*inputs):
        *qkv, moved = inputs
        result = reference.attention(*qkv, "fp16", 0.6, band, sinks=moved)
        return (dout * result.out).sum() + (dlse * result.lse).sum()

    inputs = [q, k, v, sinks]
    for i, (gradient, bound) in enumerate(right.values()):
        assert (bound >= 0).all()
        for at in np.ndindex(inputs[i].shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [x.copy() for x in inputs]
                moved[i][at] += step
                ends.append(loss(*moved))
            assert gradient[at] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-7)


def test_the_bound_tells_a_wrong_gradient(fixed_seed):
    rng = np.random.default_rng(fixed_seed)
    q, k, v = (rng.standard_normal((2, 60, 2, 16)) for _ in range(3))
    dout, dlse, sinks = rng.standard_normal(q.shape), rng.standard_normal((2, 2, 60)), rng.standard_normal(2)
    for dtype in ("fp16", "fp32"):  # in bf16 so few rows are within the error of delta
        rest = (dtype, 0.25, Band(right=0), None)
        right = gradients.gradients(dout, q, k, v, *rest, dlse, None, sinks)["dsinks"]
        without_dlse = gradients.gradients(dout, q, k, v, *rest, None, None, sinks)["dsinks"]
        assert gradients.largest(without_dlse.value, *right).share > 1
        cut = (dout[:, :-8], q[:, :-8], k, v)
        shorter = gradients.gradients(*cut, *rest, dlse[..., :-8], None, sinks)["dsinks"]
        assert gradients.largest(shorter.value, *right).share > 1


def test_lengths_pages_and_append():
    q, k, v, sinks = arrays(queries=1, keys=12, batch=3)
    lengths = np.array([12, 0, 5], np.int32)
    out, lse = flashgen.attention(q, k, v, kv_lengths=lengths, sinks=sinks, return_lse=True)
    for b, n in enumerate(lengths):
        expected = flashgen.attention(q[b], k[b, :n], v[b, :n], sinks=sinks, return_lse=True)
        close(out[b], expected[0])
        close(lse[b], expected[1])
    cache = flashgen.KVCache(k.reshape(9, 4, KV_HEADS, 16), v.reshape(9, 4, KV_HEADS, 8), lengths)
    cache = flashgen.KVCache(cache.k, cache.v, lengths, pages=np.arange(9, dtype=np.int32).reshape(3, 3))
    close(flashgen.attention(q, cache, sinks=sinks), out)
    room = flashgen.KVCache(*(np.concatenate([x, x], 1) for x in (k, v)), lengths)
    new = tuple(rng.standard_normal((3, 1, KV_HEADS, width), np.float32) for width in (16, 8))
    appended = flashgen.attention(q, room, append=new, sinks=sinks)
    after = flashgen.KVCache(room.k, room.v, lengths + 1)
    close(appended, flashgen.attention(q, after, sinks=sinks))


def test_packed_sequences():
    q, k, v, sinks = arrays(queries=20, keys=20, batch=1)
    q, k, v = q[0], k[0], v[0]
    ends = np.array([0, 7, 7, 18], np.int32)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "causal": True}
    out, lse = flashgen.attention(q, k, v, sinks=sinks, return_lse=True, **lengths)
    dout, dlse = rng.standard_normal(out.shape, np.float32), rng.standard_normal(lse.shape, np.float32)
    *_, dsinks = flashgen.attention_backward(dout, q, k, v, out, lse, sinks=sinks, dlse=dlse, **lengths)
    total = np.zeros(HEADS)
    for first, last in ((0, 7), (7, 18)):
        rows = slice(first, last)
        parts = flashgen.attention(q[rows], k[rows], v[rows], sinks=sinks, causal=True, return_lse=True)
        close(out[rows], parts[0])
        total += flashgen.attention_backward(
            *(dout[rows], q[rows], k[rows], v[rows], *parts),
            sinks=sinks,
            causal=True,
            dlse=np.ascontiguousarray(dlse[:, rows]),
        )[-1]
    close(dsinks, total, 1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_a_cascade_counts_them_once(shared):
    q, k, v, sinks = arrays(queries=3, keys=12)
    if shared:
        k[:, :5], v[:, :5] = k[:1, :5], v[:1, :5]
    prefix = tuple(x[:1, :5] if shared else x[:, :5] for x in (k, v))
    parts = [prefix, (k[:, 5:], v[:, 5:])]
    out, lse = flashgen.cascade(q, parts, causal=True, sinks=sinks, return_lse=True)
    expected = flashgen.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    close(out, expected[0])
    close(lse, expected[1])
    lengths = np.full(2, 7, np.int32)
    cache = flashgen.KVCache(np.ascontiguousarray(k[:, 5:]), np.ascontiguousarray(v[:, 5:]), lengths)
    close(flashgen.cascade(q, [prefix, cache], causal=True, sinks=sinks), expected[0])
    close(flashgen.cascade(q, [(k, v)], causal=True, sinks=sinks), expected[0])
    with pytest.raises(BadTensorShape, match=r"^sinks has shape \(3,\)"):
        flashgen.cascade(q, parts, sinks=sinks[:3])


def test_arrays_of_jax():
    jnp = pytest.importorskip("jax.numpy")
    q, k, v, sinks = arrays()
    out, lse = flashgen.attention(q, k, v, sinks=sinks, return_lse=True)
    of_jax = [jnp.asarray(x) for x in (out, q, k, v, out, lse)]
    expected = flashgen.attention_backward(out, q, k, v, out, lse, sinks=sinks)
    found = flashgen.attention_backward(*of_jax, sinks=jnp.asarray(sinks))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)
    parts = [tuple(of_jax[2:4])]
    close(np.asarray(flashgen.cascade(of_jax[1], parts, sinks=jnp.asarray(sinks))), out)


WRONG = (
    (lambda x: x[:3], BadTensorShape, r"^sinks has shape \(3,\); .*num_heads_q"),
    (lambda x: np.stack([x, x]), BadTensorShape, r"^sinks has shape \(2, 4\)"),
    (lambda x: x.astype(np.float16), BadTensorDtype, "^sinks has dtype fp16; expected bf16 or fp32"),
    (lambda x: x.astype(np.float64), BadTensorDtype, "^sinks has dtype .*; expected bf16 or fp32"),
    (lambda x: np.repeat(x, 2)[::2], BadTensorStrides, "^sinks has strides .*contiguous"),
)


@pytest.mark.parametrize(("change", "error", "match"), WRONG)
def test_wrong_sinks_are_refused_by_name(change, error, match):
    q, k, v, sinks = arrays()
    with pytest.raises(error, match=match):
        flashgen.attention(q, k, v, sinks=change(sinks))


def test_a_gradient_without_sinks_and_other_names():
    q, k, v, sinks = arrays()
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    with pytest.raises(BadParam, match=r"^dsinks was given without sinks"):
        flashgen.attention_backward(out, q, k, v, out, lse, dsinks=sinks)
    with pytest.raises(TypeError, match="sinks"):
        flashgen.attention(q, k, v, s_aux=sinks)


def test_kernels_that_have_none_are_not_chosen():
    call = {"dtype": "fp16", "arch": "sm_90"}
    q, k = (2, 300, 4, 64), (2, 300, 2, 64)
    assert "_sink" in str(flashgen.explain(q, k, sinks=(4,), **call))
    for algorithm in ("naive", "v1"):
        x = np.zeros(q, np.float16)
        with pytest.raises(BadParam, match=f"algorithm is '{algorithm}', which has no kernel for .* sinks;"):
            flashgen.attention(x, x, x, sinks=random_sinks(), algorithm=algorithm, backend="simulator")


def test_small_problems_take_kernels_that_keep_delta():
    q, call = (1, 128, 2, 64), {"dtype": "bf16", "arch": "sm_90", "operator": "attention_backward"}
    assert "direct" in str(flashgen.explain(q, q, **call).variant.axes)
    steps = str(flashgen.explain(q, q, sinks=(2,), **call))
    assert "flash_bwd_sinks" in steps
    assert "takes flash_bwd_hdim64_bf16_sm90" in steps
