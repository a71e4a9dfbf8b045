"""Attention of e4m3 codes on the GPU: within the bound of float64 of the same codes, and near its noise."""

import numpy as np
import pytest

import flashgen
from flashgen.operators import fp8_reference
from flashgen.operators.fp8 import SCALES, normalise
from flashgen.runtime.arrays import view
from flashgen.runtime.hostarrays import host_array

torch = pytest.importorskip("torch")

# Whole tiles; ragged ones and rows that see nothing; more keys than queries; a long sequence.
SHAPES = (
    (2, 512, 512, 4, 4),
    (1, 300, 200, 4, 2),
    (2, 65, 1000, 8, 2),
    (1, 128, 4096, 2, 1),
)


def codes(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def inputs(shape, width, generator, spread=1.0):
    batch, queries, keys, heads, kv_heads = shape
    sizes = (batch, queries, heads, width), (batch, keys, kv_heads, width), (batch, keys, kv_heads, width)
    q, k, v = (torch.randn(*size, device="cuda", generator=generator) for size in sizes)
    return codes(spread * q), codes(k), codes(v)


def scales(shape, generator):
    """Scales of q of each head, of k of each batch entry and head, and of v as a tensor."""
    batch, _, _, heads, kv_heads = shape
    sizes = (heads,), (batch, kv_heads), (1,)
    return [torch.rand(*size, device="cuda", generator=generator) + 0.5 for size in sizes]


def on_host(q, k, v, out, lse=None, scale=(), **options):
    """The problem of a call, with its arrays in host memory."""
    arrays = dict(zip(("q", "k", "v", "out", *SCALES), (q, k, v, out, *scale), strict=False))
    arrays = {name: x.cpu() for name, x in arrays.items()}
    views = {name: view(x, name) for name, x in arrays.items()}
    problem = normalise(**views, return_lse=lse is not None, **options)
    arrays = {name: host_array(x) for name, x in arrays.items()}
    return problem, arrays | ({} if lse is None else {"lse": host_array(lse.cpu())})


@pytest.mark.parametrize("out_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (100, 20)}], ids=str)
@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_within_the_bound(shape, width, mask, out_dtype):
    generator = torch.Generator("cuda").manual_seed(sum(shape) + width)
    arrays, scale = inputs(shape, width, generator, 2.0), scales(shape, generator)
    named = dict(zip(SCALES, scale, strict=True))
    options = {**mask, "out_dtype": out_dtype}
    out, lse = flashgen.attention(*arrays, **named, **options, return_lse=True)
    assert out.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[out_dtype]
    verdict = fp8_reference.judge(*on_host(*arrays, out, lse, scale, **mask))
    assert verdict.ok, verdict
    assert torch.equal(out, flashgen.attention(*arrays, **named, **options))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"out_dtype": "e4m3"}], ids=str)
@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_bits_do_not_depend_on_the_layout_of_v(width, accumulate, options):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels that read v with contiguous tokens are for Hopper")
    shape = (2, 300, 1008, 4, 2)
    generator = torch.Generator("cuda").manual_seed(width)
    (q, k, v), scale = inputs(shape, width, generator, 2.0), scales(shape, generator)
    columns = v.view(torch.uint8).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).view(v.dtype)
    named = dict(zip(SCALES, scale, strict=True)) | {"accumulate": accumulate, **options}
    assert "_vt_" in flashgen.plan(q, k, columns, **named).variant.name
    results = [flashgen.attention(q, k, x, **named, return_lse=True) for x in (v, columns)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9000, 300)}], ids=str)
@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_bits_do_not_depend_on_when_v_is_transposed(width, accumulate, options):
    """Many queries share a V that a step of its own transposes; contiguous tokens need no transposition.

    Heads are not grouped: kernels of contiguous tokens may pack them; then a tile has other rows and bits.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for Hopper")
    shape = (1, 16384, 16368, 8, 8)
    generator = torch.Generator("cuda").manual_seed(width)
    (q, k, v), scale = inputs(shape, width, generator, 2.0), scales(shape, generator)
    columns = v.view(torch.uint8).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).view(v.dtype)
    named = dict(zip(SCALES, scale, strict=True)) | {"accumulate": accumulate, **options}
    assert "_tiles_" in flashgen.plan(q, k, v, **named).variant.name
    assert "_vt_" in flashgen.plan(q, k, columns, **named).variant.name
    results = [flashgen.attention(q, k, x, **named, return_lse=True) for x in (v, columns)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def mask_of(kind, shape, generator):
    """A mask, and the same as a dense one."""
    batch, queries, keys, heads, _ = shape
    if kind == "array":
        mask = torch.rand(batch, heads, queries, keys, device="cuda", generator=generator) < 0.5
        return mask, mask
    if kind == "line":
        far = torch.arange(heads, dtype=torch.int32, device="cuda") * 40 - 50
        q, kv = torch.arange(queries, device="cuda")[:, None], torch.arange(keys, device="cuda")
        hidden = kv > q + keys - queries + far[:, None, None]
        return flashgen.Mask("kv <= q + far[h]", far=far), hidden
    side = kind
    listed = torch.rand(-(-queries // side), -(-keys // side), device="cuda", generator=generator) < 0.6
    ends = torch.zeros(len(listed) + 1, dtype=torch.int32, device="cuda")
    ends[1:] = listed.sum(1).cumsum(0)
    mask = flashgen.BlockMask(ends, listed.nonzero()[:, 1].to(torch.int32), (side, side))
    whole = listed.repeat_interleave(side, 0)[:queries].repeat_interleave(side, 1)[:, :keys]
    return mask, ~whole


@pytest.mark.parametrize("kind", ["array", "line", 128, 64])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_masks_of_all_kinds_are_within_the_bound(shape, width, kind):
    generator = torch.Generator("cuda").manual_seed(sum(shape) + width)
    arrays, scale = inputs(shape, width, generator), scales(shape, generator)
    mask, dense = mask_of(kind, shape, generator)
    out, lse = flashgen.attention(
        *arrays, **dict(zip(SCALES, scale, strict=True)), mask=mask, return_lse=True
    )
    dense = dense.expand(shape[0], shape[3], *shape[1:3]).contiguous().cpu()
    problem, host = on_host(*arrays, out, lse, scale, mask=view(dense, "mask"))
    verdict = fp8_reference.judge(problem, host | {"mask": host_array(dense)})
    assert verdict.ok, verdict


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (100, 20)}], ids=str)
@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_kernels_of_mma_sync_are_within_the_bound(shape, width, mask):
    generator = torch.Generator("cuda").manual_seed(sum(shape) + width)
    arrays, scale = inputs(shape, width, generator, 2.0), scales(shape, generator)
    named = dict(zip(SCALES, scale, strict=True))
    out, lse = flashgen.attention(*arrays, **named, **mask, return_lse=True, algorithm="v2")
    verdict = fp8_reference.judge(*on_host(*arrays, out, lse, scale, **mask))
    assert verdict.ok, verdict


MODIFIED = {"causal": True, "softcap": 4.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}
LENGTHS = ([300, 0, 65, 512], [300, 200, 1000, 1])


@pytest.mark.parametrize("options", [{}, {"window_size": (100, 20)}, MODIFIED], ids=len)
@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_packed_and_padded_sequences_are_calls_of_each_alone(width, options):
    """Slots past a length may be NaN."""
    generator = torch.Generator("cuda").manual_seed(width)
    q_lengths, kv_lengths = LENGTHS
    sizes = (sum(q_lengths), 4), (sum(kv_lengths), 2), (sum(kv_lengths), 2)
    q, k, v = (codes(torch.randn(*size, width, device="cuda", generator=generator)) for size in sizes)
    named = {"q_scale": torch.rand(4, 4, device="cuda", generator=generator) + 0.5}
    named |= {name: torch.rand(4, 2, device="cuda", generator=generator) + 0.5 for name in SCALES[1:]}
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    ends = [torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda") for lengths in LENGTHS]
    out, lse = flashgen.attention(
        q, k, v, **named, **options, cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1], return_lse=True
    )
    padded = [torch.full((4, 1003, 2, width), 0x7F, dtype=torch.uint8, device="cuda") for _ in "kv"]
    for b, (count, keys) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        of_q, of_k = slice(ends[0][b], ends[0][b + 1]), slice(ends[1][b], ends[1][b + 1])
        for whole, x in zip(padded, (k, v), strict=True):
            whole[b, :keys] = x.view(torch.uint8)[of_k]
        if not count:
            continue
        own = {name: x[b : b + 1] for name, x in named.items()}
        arrays = q[of_q][None], k[of_k][None], v[of_k][None]
        score = {name: x for name, x in options.items() if name in ("softcap", "sinks")}
        mask = {name: x for name, x in options.items() if name not in score}
        right = flashgen.attention(*arrays, **own, **options, return_lse=True)
        if not score:
            verdict = fp8_reference.judge(*on_host(*arrays, *right, own.values(), **mask))
            assert verdict.ok, verdict
            # Its kernel may have other tiles, and so round P in other places.
            found = out[of_q][None].contiguous(), lse[:, of_q][None].contiguous()
            verdict = fp8_reference.judge(*on_host(*arrays, *found, own.values(), **mask))
            assert verdict.ok, verdict
        else:
            torch.testing.assert_close(out[of_q], right[0][0], rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(lse[:, of_q], right[1][0], rtol=1e-5, atol=1e-4)
    used = torch.tensor(kv_lengths, dtype=torch.int32, device="cuda")
    first = torch.zeros_like(q[:4]).view(4, 1, 4, width).view(torch.uint8)
    for b in range(4):
        first[b] = q.view(torch.uint8)[b : b + 1]
    arrays = first.view(torch.float8_e4m3fn), *(x.view(torch.float8_e4m3fn) for x in padded)
    out = flashgen.attention(*arrays, **named, **options, kv_lengths=used)
    assert out.isfinite().all()
    again = [x.clone() for x in padded]
    for x in again:
        for b, length in enumerate(kv_lengths):
            x[b, length:] = 0
    arrays = arrays[0], *(x.view(torch.float8_e4m3fn) for x in again)
    assert torch.equal(out, flashgen.attention(*arrays, **named, **options, kv_lengths=used))


# Few queries of many heads: dispatch packs heads into rows, and a lane's rows are of different heads.
GROUPED = (64, 16, 600, 32, 2)
BANDS = ({}, {"causal": True}, {"window_size": (100, 20)})


def grouped_inputs(width):
    generator = torch.Generator("cuda").manual_seed(width)
    arrays = inputs(GROUPED, width, generator, 2.0)
    of_q = torch.rand(64, 32, device="cuda", generator=generator) * 2 + 0.1
    of_k, of_v = (torch.rand(64, 2, device="cuda", generator=generator) + 0.5 for _ in "kv")
    return arrays, (of_q, of_k, of_v)


def within_the_bound(arrays, scale, out, lse, entry, keys=None, **options):
    """Of one batch entry, with its first keys."""
    of_entry = slice(entry, entry + 1)
    q, k, v = (x[of_entry] for x in arrays)
    cut = q, k[:, :keys], v[:, :keys]
    scale = [x[of_entry] for x in scale]
    verdict = fp8_reference.judge(*on_host(*cut, out[of_entry], lse[of_entry], scale, **options))
    assert verdict.ok, verdict


@pytest.mark.parametrize("algorithm", [None, "v2"])
@pytest.mark.parametrize("mask", BANDS, ids=str)
@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_rows_of_packed_heads_have_the_scales_of_their_heads(width, mask, algorithm):
    arrays, scale = grouped_inputs(width)
    named = dict(zip(SCALES, scale, strict=True))
    options = {**mask, "return_lse": True, "algorithm": algorithm}
    assert flashgen.plan(*arrays, **named, **options).variant.gqa == "packed"
    out, lse = flashgen.attention(*arrays, **named, **options)
    for entry in (0, 63):
        within_the_bound(arrays, scale, out, lse, entry, **mask)
    named["q_scale"] = scale[0][:, ::16].contiguous()  # of each kv head
    out, lse = flashgen.attention(*arrays, **named, **options)
    within_the_bound(arrays, (named["q_scale"], *scale[1:]), out, lse, 5, **mask)


# On Hopper pages of 24 keys, and rows that batch entries share, take the kernels for Ada.
@pytest.mark.parametrize("page_size", [None, 16, 24, "shared"])
@pytest.mark.parametrize("mask", BANDS, ids=str)
@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_caches_of_codes_under_q_of_codes_are_within_the_bound(width, mask, page_size):
    """What is past a length may be NaN."""
    (q, k, v), scale = grouped_inputs(width)
    named = {"q_scale": scale[0], **mask, "return_lse": True}
    lengths = torch.arange(64, dtype=torch.int32, device="cuda") * 9 + 10
    if page_size == "shared":
        k, v = (x[:1].expand(64, -1, -1, -1) for x in (k, v))
        lengths = torch.full_like(lengths, 600)
    else:
        for x in (k, v):
            unused = torch.arange(600, device="cuda") >= lengths[:, None]
            x.view(torch.uint8)[unused] = 0x7F
    cached = {}
    rows = k, v
    if page_size in (16, 24):
        count = 624 // page_size
        order = torch.randperm(64 * count, device="cuda")
        pages = order.argsort().to(torch.int32).view(64, count)

        def paged(x):
            whole = torch.full((64, 624, 2, width), 0x7F, dtype=torch.uint8, device="cuda")
            whole[:, :600] = x.view(torch.uint8)
            return whole.view(64 * count, page_size, 2, width)[order].view(torch.float8_e4m3fn)

        rows, cached = (paged(k), paged(v)), {"pages": pages}
    cache = flashgen.KVCache(*rows, lengths, k_scale=scale[1], v_scale=scale[2], **cached)
    out, lse = flashgen.attention(q, cache, **named)
    for entry in (0, 40, 63):
        within_the_bound((q, k, v), scale, out, lse, entry, int(lengths[entry]), **mask)
    assert torch.equal(out, flashgen.attention(q, cache, **named)[0])


@pytest.mark.parametrize("width", [64, 256])
def test_a_dense_mask_of_padded_sequences_is_a_call_of_each_alone(width):
    arrays, scale = grouped_inputs(width)
    named = dict(zip(SCALES, scale, strict=True))
    generator = torch.Generator("cuda").manual_seed(8)
    mask = torch.rand(64, 1, 16, 600, device="cuda", generator=generator) < 0.5
    lengths = torch.arange(64, dtype=torch.int32, device="cuda") * 9 + 10
    options = {"mask": mask, "kv_lengths": lengths, "max_seqlen_kv": 600, "return_lse": True}
    out, lse = flashgen.attention(*arrays, **named, **options)
    for entry in (0, 63):
        keys, of_entry = int(lengths[entry]), slice(entry, entry + 1)
        cut = arrays[0][of_entry], *(x[of_entry, :keys] for x in arrays[1:])
        hidden = mask[of_entry, :, :, :keys].cpu().contiguous()
        found = out[of_entry], lse[of_entry], [x[of_entry] for x in scale]
        problem, host = on_host(*cut, *found, mask=view(hidden, "mask"))
        verdict = fp8_reference.judge(problem, host | {"mask": host_array(hidden)})
        assert verdict.ok, verdict


@pytest.mark.parametrize("width", [64, 256])
def test_a_result_of_codes_is_within_its_bound(width):
    generator = torch.Generator("cuda").manual_seed(width)
    arrays = inputs(SHAPES[2], width, generator)
    out_scale = torch.rand(8, device="cuda", generator=generator) / 100 + 0.001
    out = flashgen.attention(*arrays, dtype="e4m3", causal=True, out_dtype="e4m3", out_scale=out_scale)
    assert out.dtype == torch.float8_e4m3fn
    named = dict(zip(("q", "k", "v", "out", "out_scale"), (*arrays, out, out_scale), strict=True))
    host = {name: x.cpu() for name, x in named.items()}
    problem = normalise(**{name: view(x, name) for name, x in host.items()}, causal=True)
    verdict = fp8_reference.judge(problem, {name: host_array(x) for name, x in host.items()})
    assert verdict.ok, verdict


@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
def test_errors_of_normal_values_are_rounding_of_p(accumulate):
    generator = torch.Generator("cuda").manual_seed(1)
    arrays = inputs((1, 128, 8192, 2, 2), 128, generator)
    out = flashgen.attention(*arrays, dtype="e4m3", accumulate=accumulate)
    problem, host = on_host(*arrays, out)
    assert fp8_reference.error_over_noise(problem, host) < 0.04


@pytest.mark.parametrize("keys", [8192, 32768, 131072])
def test_values_of_one_sign_keep_their_size_where_sums_are_promoted(keys):
    generator = torch.Generator("cuda").manual_seed(2)
    q, k, v = inputs((1, 64, keys, 1, 1), 128, generator)
    v = codes(v.float().abs() + 0.5)
    weights = torch.softmax(q[0, :, 0].double() @ k[0, :, 0].double().T * 128**-0.5, -1)
    right = weights @ v[0, :, 0].double()
    promoted = flashgen.attention(q, k, v, dtype="e4m3")[0, :, 0].double()
    assert ((promoted - right).norm() / right.norm()).item() < 4e-3
    fast = flashgen.attention(q, k, v, dtype="e4m3", accumulate="fast")[0, :, 0].double()
    assert ((fast - right).norm() / right.norm()).item() > 0.05  # what `promoted` is for


def test_a_needle_among_65536_keys_is_found():
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v = inputs((1, 128, 65536, 2, 1), 128, generator)
    place = 12345
    k[0, place, 0] = codes(4 * q[0, 77, 1].float().sign())
    out = flashgen.attention(q, k, v, dtype="e4m3")
    scores = q[0, 77, 1].double() @ k[0, :, 0].double().T * 128**-0.5
    weights = torch.softmax(scores, -1)
    assert weights.argmax() == place
    assert weights[place] > 0.5
    right = weights @ v[0, :, 0].double()
    assert ((out[0, 77, 1].double() - right).norm() / right.norm()).item() < 0.05


@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_maximum_that_grows_step_by_step(width):
    """Each key has a larger score than the one before it in the order of visits, which is from the last."""
    keys = 2048
    q, k = torch.zeros(1, 64, 1, width, device="cuda"), torch.zeros(1, keys, 1, width, device="cuda")
    q[..., 0] = 1.0
    k[0, :, 0, 0] = torch.linspace(200, 0, keys, device="cuda")
    v = torch.randn(1, keys, 1, width, device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    q, k, v = codes(q), codes(k), codes(v)
    out, lse = flashgen.attention(q, k, v, dtype="e4m3", softmax_scale=1.0, return_lse=True)
    verdict = fp8_reference.judge(*on_host(q, k, v, out, lse, softmax_scale=1.0))
    assert verdict.ok, verdict


@pytest.mark.parametrize("width", [64, 128, 256])
def test_many_keys_of_the_smallest_weights_count(width):
    """1,023 weights near 2^-16, a few times the smallest that P has as a code, beside one of 1."""
    q, k = torch.zeros(1, 64, 1, width, device="cuda"), torch.zeros(1, 1024, 1, width, device="cuda")
    q[..., 0], k[..., 0] = 2.75, -4.0
    k[:, 700] = 0
    v = torch.randn(1, 1024, 1, width, device="cuda", generator=torch.Generator("cuda").manual_seed(9))
    q, k, v = codes(q), codes(k), codes(v.abs() + 0.5)
    out, lse = flashgen.attention(q, k, v, dtype="e4m3", softmax_scale=1.0, return_lse=True)
    verdict = fp8_reference.judge(*on_host(q, k, v, out, lse, softmax_scale=1.0))
    assert verdict.ok, verdict


def test_keys_that_no_query_sees_may_be_nan():
    generator = torch.Generator("cuda").manual_seed(5)
    q, k, v = inputs((1, 100, 300, 2, 2), 128, generator)
    expected = flashgen.attention(q, k, v, dtype="e4m3", mask_type="causal_top_left")
    for x in (k, v):
        x.view(torch.uint8)[:, 100:] = 0x7F
    out = flashgen.attention(q, k, v, dtype="e4m3", mask_type="causal_top_left")
    assert torch.equal(out, expected)


def test_scales_of_heads_are_those_of_the_numbers():
    generator = torch.Generator("cuda").manual_seed(6)
    shape = (2, 200, 200, 8, 2)
    q, k, v = inputs(shape, 64, generator)
    of_q, of_k, of_v = (2.0 ** torch.arange(n, device="cuda") / 8 for n in (8, 2, 2))
    out = flashgen.attention(q, k, v, q_scale=of_q, k_scale=of_k, v_scale=of_v)
    for head in range(8):
        one = flashgen.attention(
            q[:, :, head : head + 1],
            k[:, :, head // 4 : head // 4 + 1],
            v[:, :, head // 4 : head // 4 + 1],
            q_scale=of_q[head : head + 1] * of_k[head // 4],
            v_scale=of_v[head // 4 : head // 4 + 1],
        )
        assert torch.equal(out[:, :, head : head + 1], one)


def test_cupy_arrays_of_bytes_are_codes():
    cupy = pytest.importorskip("cupy")
    arrays = [
        cupy.asarray(np.random.default_rng(7).standard_normal((1, 200, 2, 64), np.float32)) for _ in range(3)
    ]
    pairs = [flashgen.quantize(x, per="head") for x in arrays]
    named = dict(zip(SCALES, (scale for _, scale in pairs), strict=True))
    out = flashgen.attention(*(x for x, _ in pairs), dtype="e4m3", **named, out_dtype="fp16")
    right = flashgen.attention(*(x.astype(np.float16) for x in arrays))
    assert float(abs(out.astype(np.float32) - right.astype(np.float32)).max()) < 0.2
