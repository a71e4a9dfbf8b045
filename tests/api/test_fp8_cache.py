"""KV caches of e4m3 codes through the API: every library, both kinds of caches, append, errors."""

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2

import flashgen
from flashgen import KVCache
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape

LENGTHS = np.array([120, 5, 0], np.int32)
SCALES = {"k_scale": np.array([0.03, 0.05], np.float32), "v_scale": np.float32(0.04)[None]}


@pytest.fixture
def arrays(rng):
    """q, and codes of k and v; after the lengths they are NaN."""
    q = rng.standard_normal((3, 2, 4, 64)).astype(np.float16)
    codes = (20 * rng.standard_normal((2, 3, 128, 2, 64))).astype(float8_e4m3fn)
    for b, length in enumerate(LENGTHS):
        codes.view(np.uint8)[:, b, length:] = 0x7F
    return q, *codes


@pytest.fixture
def rng(fresh_seed):
    return np.random.default_rng(fresh_seed)


def numbers(codes, scale):
    return codes.astype(np.float32) * np.broadcast_to(scale, codes.shape[2:3])[:, None]


def close(out, q, k, v, **options):
    """Whether a result is near attention over the numbers that the codes stand for, in float32."""
    whole = KVCache(numbers(k, SCALES["k_scale"]), numbers(v, SCALES["v_scale"]), LENGTHS)
    expected = flashgen.attention(q.astype(np.float32), whole, **options)
    return np.allclose(np.asarray(out).astype(np.float32), expected, atol=0.02)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}, {"window_size": (40, 0)}], ids=str)
def test_the_cpu_path_reads_codes(arrays, options):
    q, k, v = arrays
    out = flashgen.attention(q, KVCache(k, v, LENGTHS, **SCALES), **options)
    assert close(out, q, k, v, **options)
    as_bytes = KVCache(k.view(np.uint8), v.view(np.uint8), LENGTHS, **SCALES, kv_dtype="e4m3")
    assert (flashgen.attention(q, as_bytes, **options) == out).all()
    plan = flashgen.plan(q, KVCache(k, v, LENGTHS, **SCALES), **options)
    assert (plan(q, k, v, kv_lengths=LENGTHS, **SCALES) == out).all()


def test_pages_and_scales_of_each_sequence(arrays):
    q, k, v = arrays
    table = np.random.default_rng(1).permutation(3 * 8).reshape(3, 8).astype(np.int32)
    pools = [np.empty((24, 16, 2, 64), float8_e4m3fn) for _ in "kv"]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[table] = x.reshape(3, 8, 16, 2, 64)
    scales = {name: np.broadcast_to(x, (3, 2)).copy() for name, x in SCALES.items()}
    assert close(flashgen.attention(q, KVCache(*pools, LENGTHS, table, **scales)), q, k, v)
    scales["v_scale"][1] *= 2
    out = flashgen.attention(q, KVCache(*pools, LENGTHS, table, **scales)).astype(np.float32)
    plain = flashgen.attention(q, KVCache(k, v, LENGTHS, **SCALES)).astype(np.float32)
    assert np.allclose(out, plain * np.array([1, 2, 1])[:, None, None, None], rtol=0.01)


def test_parts_of_a_cascade_may_be_codes(arrays):
    q, k, v = arrays
    cache = KVCache(k, v, np.full(3, 5, np.int32), **SCALES)
    rest = KVCache(k[:, 5:], v[:, 5:], np.array([115, 0, 0], np.int32), **SCALES)
    out = flashgen.cascade(q[1:2], [KVCache(k[:1], v[:1], LENGTHS[1:2], **SCALES)])
    assert out.shape == q[1:2].shape
    both = flashgen.cascade(
        q[:1], [KVCache(*(x[:1] for x in (c.k, c.v)), c.lengths[:1], **SCALES) for c in (cache, rest)]
    )
    assert np.allclose(
        both.astype(np.float32), flashgen.attention(q, KVCache(k, v, LENGTHS, **SCALES))[:1], atol=0.01
    )


@pytest.mark.parametrize("element", [np.float16, bfloat16])
def test_append_quantises_as_quantize_does(arrays, rng, element):
    q, k, v = arrays
    new = rng.standard_normal((2, 3, 2, 2, 64)).astype(element)
    scales = {"k_scale": SCALES["k_scale"], "v_scale": np.broadcast_to(SCALES["v_scale"], 2)}
    total, _ = flashgen.append(KVCache(k, v, LENGTHS, **scales), *new)
    assert (total == LENGTHS + 2).all()
    for x, tokens, name in ((k, new[0], "k_scale"), (v, new[1], "v_scale")):
        codes, _ = flashgen.quantize(tokens, scale=np.ascontiguousarray(scales[name]))
        for b, length in enumerate(LENGTHS):
            assert (x[b, length : length + 2].view(np.uint8) == codes[b].view(np.uint8)).all()
    q = q.astype(element)
    out = flashgen.attention(q, KVCache(k, v, LENGTHS, **scales), append=tuple(new), causal=True)
    plan = flashgen.plan(q, KVCache(k, v, LENGTHS, **scales), append=tuple(new), causal=True)
    assert (plan(q, KVCache(k, v, LENGTHS, **scales), tuple(new)) == out).all()
    assert (out == flashgen.attention(q, KVCache(k, v, total, **scales), causal=True)).all()


def test_torch_tensors(arrays):
    torch = pytest.importorskip("torch")

    def tensor(x):
        return (
            torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
            if x.dtype == float8_e4m3fn
            else (torch.from_numpy(x))
        )

    q, k, v, lengths = (tensor(x) for x in (*arrays, LENGTHS))
    scales = {name: tensor(x) for name, x in SCALES.items()}

    def attend(q, k, v, lengths, scales):
        return flashgen.attention(q, KVCache(k, v, lengths, **scales), causal=True)

    out = attend(q, k, v, lengths, scales)
    assert close(out.numpy(), *arrays, causal=True)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, lengths, scales), out)
    as_bytes = KVCache(k.view(torch.uint8), v.view(torch.uint8), lengths, **scales, kv_dtype="e4m3")
    assert torch.equal(flashgen.attention(q, as_bytes, causal=True), out)
    with pytest.raises(BadParam, match="no gradients of calls with a KVCache"):
        attend(q.requires_grad_(), k, v, lengths, scales)


def test_jax_arrays(arrays):
    jax = pytest.importorskip("jax")
    as_jax = {name: jax.numpy.asarray(x) for name, x in SCALES.items()}
    q, k, v, lengths = (jax.numpy.asarray(x) for x in (*arrays, LENGTHS))
    cache = KVCache(k, v, lengths, **as_jax)
    assert close(flashgen.attention(q, cache), *arrays)
    assert close(jax.jit(flashgen.attention)(q, cache), *arrays)
    new = jax.numpy.ones((2, 3, 1, 2, 64), jax.numpy.float16)
    written = jax.jit(lambda cache, new: flashgen.append(cache, *new)[2])(cache, new)
    assert written.k.dtype == float8_e4m3fn
    assert float(written.v[1, 5, 0, 0]) == float(np.float32(25).astype(float8_e4m3fn))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": np.zeros((3, 128, 2, 64), np.float16)}, BadTensorDtype,
         "v has e4m3 codes but k has dtype fp16"),
        ({"both": lambda x: x.astype(float8_e5m2)}, BadTensorDtype,
         "k has dtype float8_e5m2; of 8-bit floats"),
        ({"both": lambda x: x.view(np.uint8)}, BadTensorDtype, r"k has dtype uint8; .*kv_dtype='e4m3'"),
        ({"both": lambda x: x.astype(np.float16)}, BadParam, "k_scale was given, and k and v are not e4m3"),
        ({"both": lambda x: x[..., :40], "q": 40}, BadTensorShape, "head_dim is 40; .* multiple of 16"),
        ({"kv_dtype": "e5m2"}, BadParam, "kv_dtype is 'e5m2'; expected 'e4m3' or None"),
        ({"k_scale": np.ones(3, np.float32)}, BadTensorShape, r"k_scale has shape \(3,\); .* = \(3, 2\)"),
        ({"v_scale": np.ones(2)}, BadTensorDtype, "v_scale has dtype float64; expected fp32"),
        ({"k_scale": np.float32([-1, 1])}, BadParam,
         "k_scale has an element that is not a finite number above 0"),
        ({"v_scale": np.float32([1, np.inf])}, BadParam, "v_scale has an element that is not"),
        ({"q": np.float32}, BadTensorDtype, "q has dtype fp32, and k and v are e4m3; expected fp16 or bf16"),
        ({"q": float8_e4m3fn}, BadTensorDtype, "q has dtype e4m3, and k and v are e4m3"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_is_wrong_is_said(arrays, changes, error, message):
    q, k, v = arrays
    both, of_q = changes.get("both", lambda x: x), changes.get("q")
    q = q if of_q is None else q[..., :of_q] if isinstance(of_q, int) else q.astype(of_q)
    named = {"k": both(k), "v": both(v), "lengths": LENGTHS, **SCALES}
    named |= {name: x for name, x in changes.items() if name not in ("both", "q")}
    with pytest.raises(error, match=message):
        flashgen.attention(q, KVCache(**named))


def test_codes_need_a_cache_and_have_no_gradients(arrays):
    q, k, v = arrays
    with pytest.raises(BadTensorDtype, match=r"reads from a KVCache alone; pass KVCache"):
        flashgen.attention(q, k, v)
    lse = np.zeros((3, 4, 2), np.float32)
    with pytest.raises(BadTensorDtype, match="k has dtype e4m3, and e4m3 codes have no gradients"):
        flashgen.attention_backward(q, q, k, v, q, lse, kv_lengths=LENGTHS)
