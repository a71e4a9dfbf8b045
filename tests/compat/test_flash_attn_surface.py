"""The rest of flash-attn's names, FlashAttention-3's and xformers', beside formulas in float64."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

import flashgen  # noqa: E402
from flashgen.compat import flash_attn as fa2  # noqa: E402
from flashgen.compat import flash_attn_interface as fa3  # noqa: E402
from flashgen.compat import flash_attn_layers as layers  # noqa: E402
from flashgen.compat import xformers  # noqa: E402
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, NullPointer  # noqa: E402

CU_Q, CU_K = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 7, 7, 20], [0, 9, 14, 33]))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def packed(width=32):
    return [torch.randn(rows, heads, width) for rows, heads in ((20, 4), (33, 2), (33, 2))]


def padded(width=32):
    return [torch.randn(3, rows, heads, width) for rows, heads in ((8, 4), (12, 2), (12, 2))]


def formula(q, k, v, left=-1, right=-1, sinks=None, top_left=False):
    """Attention of one sequence, (rows, heads, width), in float64, and its LSE."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    i, j = torch.arange(len(q))[:, None] + (0 if top_left else len(k) - len(q)), torch.arange(len(k))
    hidden = ((left >= 0) & (j < i - left)) | ((right >= 0) & (j > i + right))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, extra), -1)
        v = torch.cat((v, torch.zeros_like(v[:1]))) if len(v) else v.new_zeros(1, *v.shape[1:])
    weights = scores.softmax(-1).nan_to_num(0)
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1)


def of_sequences(inputs, ends_q=CU_Q, ends_k=CU_K, **options):
    parts = []
    for b in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        q, k, v = inputs
        parts.append(formula(q[rows], k[keys], v[keys], **options))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses, 1)


def near(found, right, tolerance=3e-5):
    torch.testing.assert_close(found.double(), right.double(), rtol=tolerance, atol=tolerance)


def gradients(function, inputs, dout):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    (function(*inputs).double() * dout).sum().backward()
    return [x.grad for x in inputs]


# Passes below autograd.


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("width", [32, 36])
def test_both_passes_write_where_they_are_told(width, is_packed):
    inputs = packed(width) if is_packed else padded(width)
    into = [torch.full_like(x, torch.nan) for x in inputs]
    lengths = (CU_Q, CU_K, 13, 19) if is_packed else ()
    forward = fa2._flash_attn_varlen_forward if is_packed else fa2._flash_attn_forward
    backward = fa2._flash_attn_varlen_backward if is_packed else fa2._flash_attn_backward
    options = (0.0, None, True, 4, 0, 0.0, None)
    out, lse, mask, state = forward(*inputs, *lengths, *options, False)
    assert mask is None
    assert state is None
    dout = torch.randn_like(out)
    sums = backward(dout, *inputs, out, lse, *into, *lengths, *options, False)

    def right(*x):
        if is_packed:
            return of_sequences(x, left=4, right=0)[0]
        return torch.stack([formula(*one, left=4, right=0)[0] for one in zip(*x, strict=True)])

    near(out, right(*inputs))
    for x, y in zip(into, gradients(right, inputs, dout), strict=True):
        near(x, y)
    near(sums, (dout * out).sum(-1).transpose(-1, -2))


@pytest.mark.parametrize("is_packed", [False, True])
def test_passes_drop_the_same_scores(is_packed):
    """The backward pass by the state of the forward pass, beside `attention` with this seed and offset."""
    inputs = [x.requires_grad_() for x in (packed() if is_packed else padded())]
    lengths = (CU_Q, CU_K, 13, 19) if is_packed else ()
    forward = fa2._flash_attn_varlen_forward if is_packed else fa2._flash_attn_forward
    backward = fa2._flash_attn_varlen_backward if is_packed else fa2._flash_attn_backward
    out, lse, _, state = forward(*inputs, *lengths, 0.25, None, True)
    into = [torch.full_like(x, torch.nan) for x in inputs]
    dout = torch.randn_like(out)
    backward(dout, *inputs, out, lse, *into, *lengths, 0.25, None, True, rng_state=state)
    names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
    options = dict(zip(names, lengths, strict=False)) | {"dropout_p": 0.25, "dropout_seed": state}
    right = flashgen.attention(*inputs, causal=True, **options)
    assert torch.equal(out, right)
    for x, y in zip(into, torch.autograd.grad(right, inputs, dout), strict=True):
        near(x, y)


def test_passes_refuse_by_name():
    q, k, v = packed()
    arguments = (q, k, v, CU_Q, CU_K, 13, 19, 0.0, None, True)
    with pytest.raises(BadParam, match=r"^dropout_p is 1\.5"):
        fa2._flash_attn_forward(*padded(), 1.5, None, True)
    out, lse = torch.zeros(3, 8, 4, 32), torch.zeros(3, 4, 8)
    with pytest.raises(NullPointer, match=r"^rng_state is None and dropout_p is 0\.1"):
        fa2._flash_attn_backward(out, *padded(), out, lse, None, None, None, 0.1, None, True)
    with pytest.raises(NotImplementedError, match="return_softmax is True"):
        fa2._flash_attn_varlen_forward(*arguments, return_softmax=True)
    for name in ("block_table", "leftpad_k", "seqused_k"):
        with pytest.raises(NotImplementedError, match=f"{name} was given"):
            fa2._flash_attn_varlen_forward(*arguments, **{name: CU_K})
    with pytest.raises(AttributeError, match="has no attribute '_flash_attn_other'"):
        fa2._flash_attn_other  # noqa: B018


# FlashAttention-3.


@pytest.mark.parametrize("num_splits", [0, 1])
def test_fa3_with_sinks_and_hints(num_splits):
    q, k, v = padded()
    sinks = torch.randn(4)
    options = {"causal": True, "s_aux": sinks, "sm_margin": 8, "pack_gqa": True, "num_splits": num_splits}
    out, lse = fa3.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    for b in range(3):
        right, right_lse = formula(q[b], k[b], v[b], right=0, sinks=sinks)
        near(out[b], right)
        near(lse[b], right_lse)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    fa3.flash_attn_func(*leaves, **options).sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in leaves)


@pytest.mark.parametrize("keys", ["packed", "packed in part", "padded", "padded in part"])
@pytest.mark.parametrize("queries", ["packed", "packed in part", "padded", "padded in part"])
def test_fa3_with_rows_that_are_used_in_part(queries, keys):
    """The rows that do not count may be anything; those of queries have a result of 0."""
    (q, _, _), (_, k, v) = (packed() if "packed" in x else padded() for x in (queries, keys))
    options, rooms = {}, {}
    for side, kind, ends, room in (("q", queries, CU_Q, 8), ("k", keys, CU_K, 12)):
        if "packed" in kind:
            options |= {f"cu_seqlens_{side}": ends, f"max_seqlen_{side}": int(ends.diff().max())}
            rooms[side] = [(int(a), int(b)) for a, b in itertools.pairwise(ends)]
        else:
            rooms[side] = [(room * b, room * b + room) for b in range(3)]
        if "part" in kind:
            used = [min(b - a, n) for (a, b), n in zip(rooms[side], (5, 0, 7), strict=True)]
            options[f"seqused_{side}"] = torch.tensor(used, dtype=torch.int32)
            rooms[side] = [(a, a + n) for (a, _), n in zip(rooms[side], used, strict=True)]
    flat_q, flat_k, flat_v = (x.flatten(0, -3) for x in (q, k, v))
    unused = torch.ones(len(flat_k), dtype=torch.bool)
    for a, b in rooms["k"]:
        unused[a:b] = False
    flat_k[unused] = flat_v[unused] = torch.nan
    out, lse = fa3.flash_attn_varlen_func(q, k, v, **options, causal=True, return_attn_probs=True)
    flat = out.flatten(0, -3)
    lse = lse if lse.ndim == 2 else lse.transpose(0, 1).flatten(1)
    expected = torch.zeros_like(flat)
    for (a, b), (first, last) in zip(rooms["q"], rooms["k"], strict=True):
        expected[a:b], right = formula(flat_q[a:b], flat_k[first:last], flat_v[first:last], right=0)
        near(lse[:, a:b], right)
    near(flat, expected)


def test_fa3_packed_in_one_array_and_its_cache():
    qkv = torch.randn(2, 9, 8, 32)
    out = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
    near(out[0], formula(qkv[0, :, :4], qkv[0, :, 4:6], qkv[0, :, 6:], right=0)[0])
    with pytest.raises(BadTensorShape, match="qkv has 8 heads with num_heads_q=3"):
        fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=3)
    q, k, v = padded()
    pages = torch.arange(6, dtype=torch.int32).view(3, 2)
    pool = [x.reshape(6, 6, 2, 32) for x in (k, v)]
    used = torch.tensor([5, 12, 9], dtype=torch.int32)
    assert fa3.get_scheduler_metadata(3, 8) is None
    sinks = torch.randn(4)
    out = fa3.flash_attn_with_kvcache(
        q, *pool, cache_seqlens=used, page_table=pages, causal=True, s_aux=sinks
    )
    for b, count in enumerate(used):
        near(out[b], formula(q[b], k[b, :count], v[b, :count], right=0, sinks=sinks)[0])


@pytest.mark.parametrize("whole", [False, True])
def test_fa3_reads_a_cache_of_codes(whole):
    q, k, v = padded()
    codes = [(20 * x).to(torch.float8_e4m3fn) for x in (k, v)]
    descales = [torch.rand(3, 2) / 10 + 0.01 for _ in "kv"]
    used = torch.tensor([12, 12, 12] if whole else [5, 12, 9], dtype=torch.int32)
    out = fa3.flash_attn_with_kvcache(
        q.half(),
        *codes,
        cache_seqlens=None if whole else used,
        causal=True,
        k_descale=descales[0],
        v_descale=descales[1],
    )
    k, v = (x.float() * descale[:, None, :, None] for x, descale in zip(codes, descales, strict=True))
    for b, count in enumerate(used):
        near(out[b].float(), formula(q[b], k[b, :count], v[b, :count], right=0)[0], 5e-3)


def test_fa3_combines_parts():
    q, k, v = padded()
    halves = [
        fa3.flash_attn_func(q, k[:, part], v[:, part], return_attn_probs=True)
        for part in (slice(5), slice(5, 12))
    ]
    outs, lses = zip(*halves, strict=True)
    out, lse = fa3.flash_attn_combine(torch.stack(outs), torch.stack(lses).transpose(-1, -2))
    right, right_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    near(out, right)
    near(lse, right_lse.transpose(1, 2))


@pytest.mark.parametrize("name", ["qv", "q_descale", "k_descale", "v_descale", "attention_chunk"])
@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"])
def test_fa3_refuses_by_name(function, name):
    if function != "flash_attn_with_kvcache" and name.endswith("descale"):
        scale = {name: torch.ones(2, 2)}
        with pytest.raises(
            BadTensorDtype, match=r"q has dtype fp32; q_descale.* are for q, k and v that are"
        ):
            getattr(fa3, function)(*padded(), **scale)
        return
    with pytest.raises(NotImplementedError, match=f"{name} (was given|is 1)"):
        getattr(fa3, function)(*padded(), **{name: 1})
    with pytest.raises(BadParam, match="sm_margin is -1"):
        getattr(fa3, function)(*padded(), sm_margin=-1)
    with pytest.raises(BadParam, match="pack_gqa is 3"):
        getattr(fa3, function)(*padded(), pack_gqa=3)


def test_fa3_takes_descales_of_codes():
    q, k, v = (x.detach().clamp(-448, 448) for x in padded(width=32))
    scales = [torch.rand(q.shape[0], k.shape[2]) + 0.5 for _ in range(3)]
    names = ("q_descale", "k_descale", "v_descale")
    codes = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    named = dict(zip(names, scales, strict=True))
    out, lse = fa3.flash_attn_func(*codes, causal=True, **named, return_attn_probs=True)
    assert out.dtype == torch.bfloat16
    group = q.shape[2] // k.shape[2]
    of_heads = scales[0].repeat_interleave(group, 1), scales[1], scales[2]
    numbers = [x.float() * scale[:, None, :, None] for x, scale in zip(codes, of_heads, strict=True)]
    right, right_lse = fa3.flash_attn_func(*numbers, causal=True, return_attn_probs=True)
    assert (out.float() - right).abs().max() < 0.05
    assert (lse - right_lse).abs().max() < 1e-4
    # The same sequences packed, with a softcap and sinks.
    options = {"causal": True, "softcap": 3.0, "s_aux": torch.randn(q.shape[2]), "return_attn_probs": True}
    right, _ = fa3.flash_attn_func(*codes, **named, **options)
    ends = [torch.arange(0, len(x) + 1, dtype=torch.int32) * x.shape[1] for x in (q, k)]
    rows = [x.view(torch.uint8).flatten(0, 1).view(torch.float8_e4m3fn) for x in codes]
    packed, _ = fa3.flash_attn_varlen_func(*rows, *ends, q.shape[1], k.shape[1], **named, **options)
    assert (packed.view_as(right).float() - right.float()).abs().max() < 0.02
    used = torch.ones(len(q), dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="seqused_q was given"):
        fa3.flash_attn_varlen_func(*codes, seqused_q=used, **named)


# What is around the attention.


def test_padding_and_back():
    x = torch.randn(3, 6, 2, 5, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 1]])
    rows, indices, ends, longest, used = layers.unpad_input(x, mask)
    assert ends.tolist() == [0, 3, 5, 7]
    assert (ends.dtype, longest, used.tolist()) == (torch.int32, 3, [3, 2, 2])
    assert torch.equal(rows, x[mask.bool()])
    back = layers.pad_input(rows, indices, 3, 6)
    assert torch.equal(back, x * mask[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[..., None, None].expand_as(x).float())
    extra = torch.zeros_like(mask)
    extra[0, 3] = 1
    rows, _, ends, longest, used = layers.unpad_input(x, mask, extra)
    assert (ends.tolist(), longest, used.tolist()) == ([0, 4, 6, 8], 4, [3, 2, 2])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved):
    """A pair is a complex number, which a position turns."""
    x, angles = torch.randn(3, 6, 2, 20, dtype=torch.float64), torch.randn(40, 8, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    offsets = torch.tensor([0, 7, 31])

    def turned(rows, begin):
        pairs = rows[..., :16]
        pairs = pairs.unflatten(-1, (8, 2)) if interleaved else torch.stack(pairs.chunk(2, -1), -1)
        at = torch.polar(torch.ones_like(angles), angles)[begin : begin + len(rows), None]
        done = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * at)
        done = done.flatten(-2) if interleaved else torch.cat(done.unbind(-1), -1)
        return torch.cat((done, rows[..., 16:]), -1)

    right = torch.stack([turned(rows, int(begin)) for rows, begin in zip(x, offsets, strict=True)])
    near(layers.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets), right, 1e-12)
    ends = torch.tensor([0, 4, 4, 13], dtype=torch.int32)
    flat = x.flatten(0, 1)
    found = layers.apply_rotary_emb(
        flat, cos, sin, interleaved, seqlen_offsets=3, cu_seqlens=ends, max_seqlen=9
    )
    near(found[:13], torch.cat((turned(flat[:4], 3), turned(flat[4:13], 3))), 1e-12)
    copy = x.clone()
    assert layers.apply_rotary_emb(copy, cos, sin, interleaved, inplace=True, seqlen_offsets=offsets) is copy
    near(copy, right, 1e-12)
    qkv = torch.stack((x, x, x), 2)
    layers.apply_rotary_emb_qkv_(qkv, cos, sin, interleaved=interleaved, seqlen_offsets=offsets)
    near(qkv, torch.stack((right, right, x), 2), 1e-12)
    kv = torch.stack((x, x), 2)
    near(layers.apply_rotary_emb_kv_(kv, cos, sin, interleaved, offsets), torch.stack((right, x), 2), 1e-12)
    with pytest.raises(BadParam, match="seqlen_offsets is 35 for 6 tokens; cos and sin have 40 positions"):
        layers.apply_rotary_emb(x, cos, sin, seqlen_offsets=35)
    with pytest.raises(BadTensorShape, match=r"x has shape \(18, 2, 20\)"):
        layers.apply_rotary_emb(flat, cos, sin)


def test_modules_of_attention():
    attend = layers.FlashSelfAttention(causal=True, window_size=(4, 0))
    qkv = torch.randn(2, 9, 3, 4, 32)
    near(attend(qkv)[1], formula(*qkv[1].unbind(1), left=4, right=0)[0])
    ends = torch.tensor([0, 9, 18], dtype=torch.int32)
    near(attend(qkv.flatten(0, 1), cu_seqlens=ends, max_seqlen=9).view(2, 9, 4, 32), attend(qkv))
    cross = layers.FlashCrossAttention(attention_dropout=0.1)
    q, kv = torch.randn(2, 5, 4, 32), torch.randn(2, 9, 2, 4, 32)
    near(cross.eval()(q, kv)[0], formula(q[0], *kv[0].unbind(1))[0])
    torch.manual_seed(3)
    dropped = cross.train()(q, kv)
    torch.manual_seed(3)
    assert torch.equal(dropped, cross(q, kv))
    assert not torch.equal(dropped, cross.eval()(q, kv))


# xformers.

CASES = {
    "none": (None, {}),
    "triangle": (xformers.LowerTriangularMask(), {"right": 0, "top_left": True}),
    "bottom right": (xformers.LowerTriangularFromBottomRightMask(), {"right": 0}),
    "local": (xformers.LocalAttentionFromBottomRightMask(2, 1), {"left": 2, "right": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_xformers_of_a_batch(case):
    bias, options = CASES[case]
    q, k, v = (torch.randn(2, rows, 4, 32) for rows in (8, 12, 12))
    out = xformers.memory_efficient_attention(q, k, v, bias)
    near(out[1], formula(q[1], k[1], v[1], **options)[0])
    flat = [x[:, :, 0] for x in (q, k, v)]  # of one head
    near(
        xformers.memory_efficient_attention(*flat, bias)[0],
        formula(q[0, :, :1], k[0, :, :1], v[0, :, :1], **options)[0][:, 0],
    )
    groups = [q.unflatten(2, (2, 2)), *(x[:, :, :2, None].expand(-1, -1, -1, 2, -1) for x in (k, v))]
    out = xformers.memory_efficient_attention(*groups, bias)
    near(out[1].flatten(1, 2), formula(q[1], k[1, :, :2], v[1, :, :2], **options)[0])


def test_xformers_with_a_bias():
    q, k, v = (torch.randn(2, rows, 4, 32) for rows in (8, 12, 12))
    bias = torch.randn(2, 4, 8, 12)
    right = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), attn_mask=bias.double(), scale=0.2
    )
    near(xformers.memory_efficient_attention(q, k, v, bias, scale=0.2), right.transpose(1, 2))


BLOCKS = xformers.BlockDiagonalMask.from_seqlens([7, 0, 13], [9, 5, 19])
SELF = xformers.BlockDiagonalMask.from_seqlens([9, 5, 19])


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (BLOCKS, {}),
        (BLOCKS.make_causal_from_bottomright(), {"right": 0}),
        (SELF.make_causal(), {"right": 0}),
        (SELF.make_local_attention(4), {"left": 3, "right": 0}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_xformers_of_blocks(mask, options):
    q, k, v = (x.repeat_interleave(2, 1) if x.shape[1] == 2 else x for x in packed())
    ends = CU_Q if mask.q_seqinfo.seqstart_py[-1] == 20 else CU_K
    q = q if ends is CU_Q else torch.randn_like(k)
    inputs = [x[None] for x in (q, k, v)]
    near(xformers.memory_efficient_attention(*inputs, mask)[0], of_sequences((q, k, v), ends, **options)[0])
    dout = torch.randn(q.shape, dtype=torch.float64)
    found = gradients(lambda *x: xformers.memory_efficient_attention(*x, mask)[0], inputs, dout)
    right = gradients(lambda *x: of_sequences([one[0] for one in x], ends, **options)[0], inputs, dout)
    for x, y in zip(found, right, strict=True):
        near(x, y)


def test_xformers_of_padded_keys():
    lengths = [5, 0, 12]
    mask = xformers.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([3, 1, 4], 12, lengths)
    q, k, v = torch.randn(1, 8, 4, 32), *(torch.randn(1, 36, 4, 32) for _ in "kv")
    out = xformers.memory_efficient_attention(q, k, v, mask)
    for (a, b), begin, count in zip([(0, 3), (3, 4), (4, 8)], (0, 12, 24), lengths, strict=True):
        keys = slice(begin, begin + count)
        near(out[0, a:b], formula(q[0, a:b], k[0, keys], v[0, keys], right=0)[0])


class BlockDiagonalGappyKeysMask(xformers.BlockDiagonalMask):
    """A mask of xformers that is not served."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": object()}, "op was given"),
        ({"output_dtype": torch.float64}, r"output_dtype is torch\.float64"),
        ({"attn_bias": object()}, "attn_bias is a object; flashgen serves tensors"),
        ({"attn_bias": BLOCKS.make_causal()}, "aligned top left"),
        (
            {"attn_bias": BlockDiagonalGappyKeysMask(BLOCKS.q_seqinfo, BLOCKS.k_seqinfo)},
            "attn_bias is a BlockDiagonalGappyKeysMask",
        ),
        ({"attn_bias": torch.zeros(20, 33, requires_grad=True)}, "attn_bias requires a gradient"),
    ],
)
def test_xformers_refuses_by_name(options, message):
    q, k, v = (torch.randn(1, rows, 4, 32) for rows in (20, 33, 33))
    with pytest.raises(NotImplementedError, match=message):
        xformers.memory_efficient_attention(q, k, v, **options)
