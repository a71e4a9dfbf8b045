"""KV caches of e4m3 codes with a scale for each token and head, through the API on the CPU path."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

import flashgen
from flashgen import KVCache
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, NullPointer

LENGTHS = np.array([120, 5, 0], np.int32)


@pytest.fixture
def rng(fresh_seed):
    return np.random.default_rng(fresh_seed)


@pytest.fixture
def arrays(rng):
    """q, then codes and scales of k and of v; in slots that no sequence uses all are NaN."""
    q = rng.standard_normal((3, 2, 4, 64)).astype(np.float16)
    pairs = [
        flashgen.quantize(rng.standard_normal((3, 128, 2, 64)).astype(np.float16), per="token") for _ in "kv"
    ]
    for codes, scale in pairs:
        for b, length in enumerate(LENGTHS):
            codes.view(np.uint8)[b, length:] = 0x7F
            scale[b, length:] = np.nan
    return q, *pairs


def numbers(codes, scale):
    return codes.astype(np.float32) * scale[..., None]


def in_pages(table, x):
    pool = np.empty((table.size, 16, *x.shape[2:]), x.dtype)
    pool[table] = x.reshape(3, 8, 16, *x.shape[2:])
    return pool


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}, {"window_size": (40, 0)}], ids=str)
def test_rows_and_pages(arrays, options):
    q, (k, k_scale), (v, v_scale) = arrays
    whole = KVCache(numbers(k, k_scale), numbers(v, v_scale), LENGTHS)
    expected = flashgen.attention(q.astype(np.float32), whole, **options)
    if "window_size" in options:  # keys before the window count as unused
        k_scale[0, :70] = np.nan
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    out = flashgen.attention(q, KVCache(k, v, LENGTHS, **scales), **options)
    assert np.allclose(out.astype(np.float32), expected, atol=0.02)
    plan = flashgen.plan(q, KVCache(k, v, LENGTHS, **scales), **options)
    assert (plan(q, k, v, kv_lengths=LENGTHS, **scales) == out).all()
    table = np.random.default_rng(1).permutation(24).reshape(3, 8).astype(np.int32)
    pools = [in_pages(table, x) for x in (k, v)]
    scales = {name: in_pages(table, x) for name, x in scales.items()}
    assert (flashgen.attention(q, KVCache(*pools, LENGTHS, table, **scales), **options) == out).all()


def test_one_scale_may_be_of_all_tokens(arrays):
    q, (k, k_scale), (v, _) = arrays
    of_heads = np.array([0.03, 0.05], np.float32)
    out = flashgen.attention(q, KVCache(k, v, LENGTHS, k_scale=k_scale, v_scale=of_heads))
    of_tokens = np.broadcast_to(of_heads, k_scale.shape)
    assert (flashgen.attention(q, KVCache(k, v, LENGTHS, k_scale=k_scale, v_scale=of_tokens)) == out).all()


def test_torch_compiles_a_call(arrays):
    torch = pytest.importorskip("torch")
    q, *pairs = arrays
    q, lengths = torch.from_numpy(q), torch.from_numpy(LENGTHS)
    (k, k_scale), (v, v_scale) = (
        (torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn), torch.from_numpy(scale))
        for codes, scale in pairs
    )

    def attend(q, k, v, k_scale, v_scale):
        return flashgen.attention(q, KVCache(k, v, lengths, k_scale=k_scale, v_scale=v_scale), causal=True)

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, k_scale, v_scale), attend(q, k, v, k_scale, v_scale))


@pytest.mark.parametrize("element", [np.float16, bfloat16])
def test_append_computes_scales_as_quantize_does(arrays, rng, element):
    q, (k, k_scale), (v, v_scale) = arrays
    cache = KVCache(k, v, LENGTHS, k_scale=k_scale, v_scale=v_scale)
    new = rng.standard_normal((2, 3, 2, 2, 64)).astype(element)
    total, rotated = flashgen.append(cache, *new)
    assert rotated is None
    for x, scale, tokens in ((k, k_scale, new[0]), (v, v_scale, new[1])):
        codes, of_tokens = flashgen.quantize(tokens, per="token")
        for b, length in enumerate(LENGTHS):
            assert (x[b, length : length + 2].view(np.uint8) == codes[b].view(np.uint8)).all()
            assert (scale[b, length : length + 2] == of_tokens[b]).all()
            assert np.isnan(scale[b, length + 2 :]).all()
    q = q.astype(element)
    k_scale[0, 120:] = k_scale[1, 5:] = k_scale[2] = np.nan
    out = flashgen.attention(q, cache, append=tuple(new), causal=True)
    plan = flashgen.plan(q, cache, append=tuple(new), causal=True)
    assert (plan(q, cache, tuple(new)) == out).all()
    after = KVCache(k, v, total, k_scale=k_scale, v_scale=v_scale)
    assert (out == flashgen.attention(q, after, causal=True)).all()


def test_append_inside_compiled_functions(arrays):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    _, *pairs = arrays
    new = np.ones((2, 3, 1, 2, 64), np.float16)
    (k, k_scale), (v, v_scale) = (
        (
            torch.from_numpy(codes.view(np.uint8).copy()).view(torch.float8_e4m3fn),
            torch.from_numpy(scale.copy()),
        )
        for codes, scale in pairs
    )
    lengths = torch.from_numpy(LENGTHS)

    def append(k, v, k_scale, v_scale, new):
        return flashgen.append(KVCache(k, v, lengths, k_scale=k_scale, v_scale=v_scale), new[0], new[1])[0]

    torch.compile(append, backend="eager", fullgraph=True)(k, v, k_scale, v_scale, torch.from_numpy(new))
    (k, of_k), (v, of_v) = (tuple(map(jax.numpy.asarray, pair)) for pair in pairs)
    cache = KVCache(k, v, jax.numpy.asarray(LENGTHS), k_scale=of_k, v_scale=of_v)
    written = jax.jit(lambda cache, new: flashgen.append(cache, *new)[2])(cache, jax.numpy.asarray(new))
    for scale in (k_scale.numpy(), np.asarray(written.k_scale), v_scale.numpy(), np.asarray(written.v_scale)):
        for b, length in enumerate(LENGTHS):
            assert (scale[b, length] == np.float32(1) / np.float32(448)).all()


def test_append_writes_both_arrays_of_scales_or_none(arrays):
    _, (k, k_scale), (v, _) = arrays
    new = np.ones((2, 3, 1, 2, 64), np.float16)
    with pytest.raises(BadTensorShape, match=r"v_scale has shape \(2,\); the scales of tokens need"):
        flashgen.append(KVCache(k, v, LENGTHS, k_scale=k_scale, v_scale=np.ones(2, np.float32)), *new)
    with pytest.raises(NullPointer, match="v_scale has no scale for each token and k_scale has"):
        flashgen.append(KVCache(k, v, LENGTHS, k_scale=k_scale), *new)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"v_scale": None}, NullPointer, "v_scale is None and k_scale has a scale for each token; pass both"),
        ({"v_scale": np.ones((3, 2), np.float32)}, BadTensorShape, r"v_scale has shape \(3, 2\); .*\(rows, "),
        ({"k_scale": np.ones((3, 2, 128), np.float32)}, BadTensorShape, r"k_scale has .* = \(3, 128, 2\)"),
        ({"k_scale": np.ones((3, 128, 2), np.float16)}, BadTensorDtype, "k_scale has dtype fp16"),
        ({"k_scale": np.zeros((3, 128, 2), np.float32)}, BadParam, "k_scale has an element that is not"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_wrong_is_said(arrays, changes, error, message):
    q, (k, k_scale), (v, v_scale) = arrays
    with pytest.raises(error, match=message):
        flashgen.attention(q, KVCache(k, v, LENGTHS, **({"k_scale": k_scale, "v_scale": v_scale} | changes)))
