"""The drop-ins on a GPU, beside PyTorch's own attention in float64."""

import math

import pytest

from flashgen.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flashgen.errors import BadTensorShape

torch = pytest.importorskip("torch")

from flashgen.compat.torch import scaled_dot_product_attention  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def qkv(lengths, width, dtype, heads=6, kv_heads=6):
    shapes = (lengths[0], heads), (lengths[1], kv_heads), (lengths[1], kv_heads)
    return [torch.randn(2, n, length, width, device="cuda").to(dtype) for length, n in shapes]


def exact(query, key, value, **options):
    return torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), **options
    )


def close(found, right):
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 3e-5}[found.dtype]
    assert found.is_cuda
    torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", [(300, 500), (500, 300), (1, 500)], ids=str)
@pytest.mark.parametrize("width", [64, 100, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sdpa(dtype, width, lengths):
    query, key, value = qkv(lengths, width, dtype)
    close(
        scaled_dot_product_attention(query, key, value, is_causal=True),
        exact(query, key, value, is_causal=True),
    )
    seen = torch.rand(2, 1, *lengths, device="cuda") < 0.7
    close(scaled_dot_product_attention(query, key, value, seen), exact(query, key, value, attn_mask=seen))
    bias = torch.where(seen, torch.randn(seen.shape, device="cuda"), -math.inf)
    close(
        scaled_dot_product_attention(query, key, value, bias),
        exact(query, key, value, attn_mask=bias.double()),
    )


@pytest.mark.parametrize("width", [64, 100, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flash_attn(dtype, width):
    """Bottom right: of 300 queries on 500 keys the first sees 201."""
    query, key, value = qkv((300, 500), width, dtype, kv_heads=2)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    position, keys = torch.arange(300, device="cuda")[:, None] + 200, torch.arange(500, device="cuda")
    seen = (keys <= position) & (keys >= position - 150)
    slopes = torch.rand(6, device="cuda")
    bias = torch.where(seen, -slopes[:, None, None] * (position - keys).abs(), -math.inf)
    out, lse, _ = flash_attn_func(
        q, k, v, causal=True, window_size=(150, 20), alibi_slopes=slopes, return_attn_probs=True
    )
    right = exact(query, key, value, attn_mask=bias.double(), enable_gqa=True)
    close(out, right.transpose(1, 2))
    assert (lse.shape, lse.dtype) == ((2, 6, 300), torch.float32)
    if width * dtype.itemsize % 16:  # a cache is not copied to be padded
        with pytest.raises(BadTensorShape, match="k_cache has head_dim 100"):
            flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=321, causal=True)
        return
    decoded = flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=321, causal=True)
    right = exact(query[:, :, :1], key[:, :, :321], value[:, :, :321], enable_gqa=True)
    close(decoded, right.transpose(1, 2))


@pytest.mark.parametrize("page_size", [None, 16, 48, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flash_attn_packed(dtype, page_size):
    """Sequences of 3, 0, 200 and 60 queries; keys packed, or in pages whose last entries are garbage."""
    q_lengths, k_lengths = [3, 0, 200, 60], [500, 20, 0, 70]
    q = torch.randn(sum(q_lengths), 6, 64, device="cuda").to(dtype)
    k, v = (torch.randn(sum(k_lengths), 2, 64, device="cuda").to(dtype) for _ in "kv")
    cu_q, cu_k = (
        torch.tensor([0, *lengths], device="cuda").cumsum(0).int() for lengths in (q_lengths, k_lengths)
    )
    keys, values, table = k, v, None
    if page_size:
        columns = -(-500 // page_size) + 1
        keys, values = (
            torch.full((4 * columns, page_size, 2, 64), math.nan, dtype=dtype, device="cuda") for _ in "kv"
        )
        order = torch.randperm(4 * columns, dtype=torch.int32, device="cuda").view(4, columns)
        table = torch.full_like(order, 10**8)
        for b, length in enumerate(k_lengths):
            table[b, : -(-length // page_size)] = order[b, : -(-length // page_size)]
            for pages, x in ((keys, k), (values, v)):
                rows = pages[order[b].long()].flatten(0, 1)
                rows[:length] = x[cu_k[b] : cu_k[b + 1]]
                pages[order[b].long()] = rows.view(columns, page_size, 2, 64)
    out, lse, _ = flash_attn_varlen_func(
        q, keys, values, cu_q, cu_k, 200, 500, causal=True, return_attn_probs=True, block_table=table
    )
    assert (lse.shape, lse.dtype) == ((6, len(q)), torch.float32)
    for b, (rows, length) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        position = torch.arange(rows, device="cuda")[:, None] + length - rows
        seen = torch.arange(length, device="cuda") <= position
        query, key, value = (
            x[ends[b] : ends[b + 1]].transpose(0, 1)[None] for x, ends in ((q, cu_q), (k, cu_k), (v, cu_k))
        )
        right = exact(query, key, value, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
        close(out[cu_q[b] : cu_q[b + 1]], right.nan_to_num(0))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flash_attn_appends(dtype, interleaved):
    """Three new tokens of each sequence go into the cache, rotated, in a CUDA graph, at lengths that change
    between replays.
    """
    q, k_new, v_new = (x.transpose(1, 2).contiguous() for x in qkv((3, 3), 64, dtype, kv_heads=2))
    first = [torch.randn(5, 300, 2, 64, device="cuda").to(dtype) for _ in "kv"]
    caches = [x.clone() for x in first]
    angles = torch.rand(300, 16, device="cuda") * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    lengths, index = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 0], [4, 1]))

    def call():
        return flash_attn_with_kvcache(
            q,
            *caches,
            k_new,
            v_new,
            cos,
            sin,
            cache_seqlens=lengths,
            cache_batch_idx=index,
            causal=True,
            rotary_interleaved=interleaved,
        )

    def rotated(x, start):
        pair = (slice(0, 32, 2), slice(1, 32, 2)) if interleaved else (slice(16), slice(16, 32))
        c, s = (table[start : start + 3].double()[:, None] for table in (cos, sin))
        out, (a, b) = x.double(), (x.double()[..., each] for each in pair)
        out[..., pair[0]], out[..., pair[1]] = a * c - b * s, b * c + a * s
        return out

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for starts in ([0, 7], [297, 120]):
        for cache, x in zip(caches, first, strict=True):
            cache.copy_(x)
        lengths.copy_(torch.tensor(starts))
        graph.replay()
        for b, (start, entry) in enumerate(zip(starts, [4, 1], strict=True)):
            new = slice(start, start + 3)
            close(caches[0][entry, new], rotated(k_new[b], start))
            assert torch.equal(caches[1][entry, new], v_new[b])
            key, value = (cache[entry, : start + 3].transpose(0, 1)[None] for cache in caches)
            query = rotated(q[b], start).transpose(0, 1)[None]
            seen = torch.ones(3, start + 3, dtype=torch.bool, device="cuda").tril(start)
            right = exact(query, key, value, attn_mask=seen, enable_gqa=True)
            close(out[b], right[0].transpose(0, 1))
            for cache, x in zip(caches, first, strict=True):
                cache[entry, new] = x[entry, new]
        assert all(torch.equal(cache, x) for cache, x in zip(caches, first, strict=True))


@pytest.mark.parametrize("width", [64, 100])
def test_flash_attn_of_cupy(width):
    cupy = pytest.importorskip("cupy")
    q, k, v = (
        cupy.from_dlpack(x.transpose(1, 2).contiguous()) for x in qkv((300, 500), width, torch.float16)
    )
    torch.cuda.synchronize()
    out = flash_attn_func(q, k, v)
    assert isinstance(out, cupy.ndarray)
    tensors = [torch.from_dlpack(x).transpose(1, 2) for x in (q, k, v)]
    cupy.cuda.get_current_stream().synchronize()
    close(torch.from_dlpack(out), exact(*tensors).transpose(1, 2))
