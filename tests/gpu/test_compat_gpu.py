"""The drop-ins on a GPU, beside PyTorch's own attention in float64."""

import math

import pytest

from flashgen.compat.flash_attn import flash_attn_func, flash_attn_with_kvcache

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
    decoded = flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=321, causal=True)
    right = exact(query[:, :, :1], key[:, :, :321], value[:, :, :321], enable_gqa=True)
    close(decoded, right.transpose(1, 2))


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
