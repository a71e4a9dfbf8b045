"""Caches of e4m3 codes with a scale for each token and head on a GPU: within the bound beside NaN scales in
unused slots, and to the bit what the 16-bit kernel of the same tile makes of codes times scales."""

import pytest

import flashgen
from codetiles import write_specs
from flashgen import KVCache
from flashgen.operators import reference
from flashgen.operators.masks import Band

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LENGTHS = (1.0, 0.3, 0.0, 0.77)
PAGE = 16


def inputs(shape, dtype, seed):
    """q, then codes and scales of k and of v, which are NaN after each length, and lengths."""
    queries, room, heads, kv_heads, width = shape
    options = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(seed)}
    batch = len(LENGTHS)
    q = torch.randn(batch, queries, heads, width, **options).to(DTYPES[dtype])
    lengths = torch.tensor([int(room * share) for share in LENGTHS], dtype=torch.int32, device="cuda")
    pairs = []
    for _ in range(2):
        codes, scale = flashgen.quantize(
            torch.randn(batch, room, kv_heads, width, **options).to(DTYPES[dtype]), per="token"
        )
        for b, length in enumerate(lengths.tolist()):
            codes.view(torch.uint8)[b, length:] = 0x7F
            scale[b, length:] = float("nan")
        pairs.append((codes, scale))
    return q, *pairs, lengths


def cache_of(k, v, k_scale, v_scale, lengths, pages):
    """A cache in rows, or in pages in another order."""
    if not pages:
        return KVCache(k, v, lengths, k_scale=k_scale, v_scale=v_scale)
    batch, count = k.shape[0], k.shape[1] // PAGE
    order = torch.randperm(batch * count, device="cuda")

    def pool(x):
        rows = x[:, : count * PAGE].reshape(batch * count, PAGE, *x.shape[2:])
        rows = rows.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else rows
        placed = torch.empty_like(rows)
        placed[order] = rows
        return placed.view(x.dtype)

    table = order.reshape(batch, count).to(torch.int32)
    lengths = lengths.clamp(max=count * PAGE)
    return KVCache(pool(k), pool(v), lengths, table, k_scale=pool(k_scale), v_scale=pool(v_scale))


@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((1, 5000, 8, 2, 128), "bf16", {}),
        ((1, 5000, 8, 2, 128), "fp16", {"causal": True, "splits": 3}),
        ((2, 3000, 32, 2, 64), "fp16", {"window_size": (300, 0)}),
        ((4, 700, 8, 8, 256), "bf16", {"causal": True}),
        ((300, 900, 8, 2, 128), "bf16", {"causal": True}),
        ((90, 700, 4, 4, 192), "fp16", {"window_size": (200, 0)}),
    ],
    ids=str,
)
def test_results_are_within_the_bound(shape, dtype, options, pages, fresh_seed):
    q, (k, k_scale), (v, v_scale), lengths = inputs(shape, dtype, fresh_seed)
    cache = cache_of(k, v, k_scale, v_scale, lengths, pages)
    out, lse = flashgen.attention(q, cache, return_lse=True, **options)
    for b, length in enumerate(cache.lengths.tolist()):
        left, _ = options.get("window_size", (1 << 30, 0))
        band = Band(length - q.shape[1], left, 0 if options else 1 << 30)
        numbers = (
            x[b : b + 1, :length].double() * scale[b : b + 1, :length, :, None].double()
            for x, scale in ((k, k_scale), (v, v_scale))
        )
        expected = reference.attention(
            q[b : b + 1].double(),
            *numbers,
            dtype,
            q.shape[-1] ** -0.5,
            band,
            scaled=True,
            rounds_v=True,
        )
        worst = reference.largest(out[b : b + 1].double(), expected.out, expected.out_bound)
        assert worst.share <= 1, worst
        assert reference.largest(lse[b : b + 1].double(), expected.lse, expected.lse_bound).share <= 1


@pytest.mark.parametrize("splits", ["auto", 3])
@pytest.mark.parametrize(("width", "dtype"), [(64, "fp16"), (128, "bf16")])
def test_bits_are_those_of_the_numbers_that_codes_stand_for(
    width, dtype, splits, fresh_seed, tmp_path, monkeypatch
):
    write_specs(tmp_path)
    monkeypatch.setenv("FLASHGEN_SPECS", str(tmp_path))
    q, (k, k_scale), (v, v_scale), lengths = inputs((2, 3000, 8, 2, width), dtype, fresh_seed)
    k_scale = k_scale.log2().round().exp2()
    numbers = ((x.float() * scale[..., None]).to(DTYPES[dtype]) for x, scale in ((k, k_scale), (v, v_scale)))
    caches = KVCache(k, v, lengths, k_scale=k_scale, v_scale=v_scale), KVCache(*numbers, lengths)
    options = {"splits": splits, "return_lse": True, "causal": True}
    names = [str(flashgen.plan(q, cache, **options).variant) for cache in caches]
    assert names[0].replace("_e4m3_token", "") == names[1]
    results = [flashgen.attention(q, cache, **options) for cache in caches]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_append_computes_scales_as_quantize_does(dtype, fresh_seed):
    _, (k, k_scale), (v, v_scale), lengths = inputs((1, 100, 8, 2, 96), dtype, fresh_seed)
    lengths = lengths.clamp(max=97)
    new = torch.randn(2, len(lengths), 3, 2, 96, device="cuda").to(DTYPES[dtype])
    flashgen.append(KVCache(k, v, lengths, k_scale=k_scale, v_scale=v_scale), *new)
    for x, scale, tokens in ((k, k_scale, new[0]), (v, v_scale, new[1])):
        codes, of_tokens = flashgen.quantize(tokens, per="token")
        for b, length in enumerate(lengths.tolist()):
            stored = x.view(torch.uint8)[b, length : length + 3]
            assert torch.equal(stored, codes.view(torch.uint8)[b])
            assert torch.equal(scale[b, length : length + 3], of_tokens[b])
