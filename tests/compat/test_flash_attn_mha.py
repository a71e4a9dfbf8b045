"""flash-attn's module MHA beside its formula, and its cache beside the whole sequence."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as nn  # noqa: E402

from flashgen.compat.flash_attn_mha import MHA, InferenceParams, get_alibi_slopes  # noqa: E402
from flashgen.errors import BadParam, NullPointer  # noqa: E402


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def turned(x, width, interleaved):
    """The first ``width`` elements of (batch, seqlen, heads, head_dim), turned as complex numbers."""
    angles = torch.outer(torch.arange(x.shape[1]), 10000.0 ** (-torch.arange(0, width, 2) / width))
    pairs = x[..., :width]
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else torch.stack(pairs.chunk(2, -1), -1)
    at = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * at)
    return torch.cat(
        (pairs.flatten(-2) if interleaved else torch.cat(pairs.unbind(-1), -1), x[..., width:]), -1
    )


def formula(module, x, interleaved, slopes=None):
    """Causal self-attention of 4 heads of 32 between the projections of a module."""
    q, k, v = module.Wqkv(x).split([128, 32 * module.num_heads_kv, 32 * module.num_heads_kv], -1)
    q, k, v = (y.unflatten(-1, (-1, 32)) for y in (q, k, v))
    if module.rotary_emb_dim:
        q, k = (turned(y, module.rotary_emb_dim, interleaved) for y in (q, k))
    rows = torch.arange(x.shape[1])
    mask = torch.zeros(x.shape[1], x.shape[1]).masked_fill(rows > rows[:, None], -torch.inf)
    if slopes is not None:
        mask = mask + slopes[:, None, None] * -(rows[:, None] - rows).abs()
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    out = nn.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return module.out_proj(out.transpose(1, 2).flatten(-2))


CASES = {
    "plain": {},
    "gqa, kernels rotate": {"num_heads_kv": 2, "rotary_emb_dim": 16},
    "pairs": {"rotary_emb_dim": 32, "rotary_emb_interleaved": True},
    "mqa, torch rotates": {"num_heads_kv": 1, "rotary_emb_dim": 8},
    "alibi": {"use_alibi": True},
}


@pytest.mark.parametrize("case", CASES)
def test_training_and_generation(case):
    options = CASES[case]
    module = MHA(128, 4, causal=True, layer_idx=3, **options)
    assert set(module.state_dict()) == {f"{x}.{y}" for x in ("Wqkv", "out_proj") for y in ("weight", "bias")}
    slopes = torch.tensor(get_alibi_slopes(4)) if "use_alibi" in options else None
    x = torch.randn(2, 11, 128, requires_grad=True)
    right = formula(module, x, options.get("rotary_emb_interleaved", False), slopes)
    parameters = [x, *module.parameters()]
    gradients = torch.autograd.grad(right.square().sum(), parameters)
    for checkpointing in (False, True):
        module.checkpointing = checkpointing
        out = module(x)
        torch.testing.assert_close(out, right, atol=3e-5, rtol=3e-5)
        for y, z in zip(torch.autograd.grad(out.square().sum(), parameters), gradients, strict=True):
            torch.testing.assert_close(y, z, atol=3e-4, rtol=3e-4)
    if "rotary_emb_dim" not in options:
        ends = torch.tensor([0, 11, 22], dtype=torch.int32)
        rows = module(x.flatten(0, 1), cu_seqlens=ends, max_seqlen=11)
        torch.testing.assert_close(rows.view_as(right), right, atol=3e-5, rtol=3e-5)
    with torch.no_grad():
        state = InferenceParams(max_seqlen=16, max_batch_size=2)
        for begin, end in ((0, 7), (7, 8), (8, 11)):
            state.seqlen_offset = begin
            if begin == 8:  # of each sequence
                state.lengths_per_sample = torch.full((2,), 8, dtype=torch.int32)
            step = module(x[:, begin:end], inference_params=state)
            torch.testing.assert_close(step, right[:, begin:end], atol=3e-5, rtol=3e-5)
        assert state.key_value_memory_dict[3].shape == (2, 16, 2, module.num_heads_kv, 32)


def test_attention_on_another_sequence():
    module = MHA(64, 4, num_heads_kv=2, cross_attn=True, return_residual=True)
    x, other = torch.randn(2, 5, 64), torch.randn(2, 9, 64)
    out, residual = module(x, other, mixer_subset=slice(1, 3))
    assert residual is x
    q = module.Wq(x[:, 1:3]).unflatten(-1, (4, 16)).transpose(1, 2)
    k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in module.Wkv(other).chunk(2, -1))
    right = nn.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(out, module.out_proj(right), atol=3e-5, rtol=3e-5)


def test_slopes_of_any_number_of_heads():
    assert get_alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert get_alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


def test_what_is_not_served_is_named():
    for name in ("dwconv", "fused_bias_fc", "rotary_emb_scale_base"):
        with pytest.raises(NotImplementedError, match=f"^{name} is"):
            MHA(64, 4, **{name: 1})
    with pytest.raises(BadParam, match=r"^embed_dim is 64, num_heads 5"):
        MHA(64, 5)
    with pytest.raises(BadParam, match=r"^rotary_emb_dim is 16 with cross_attn"):
        MHA(64, 4, cross_attn=True, rotary_emb_dim=16)
    module, x = MHA(64, 4), torch.randn(2, 5, 64)
    with pytest.raises(NotImplementedError, match=r"^key_padding_mask was given"):
        module(x, key_padding_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(BadParam, match=r"^x_kv or mixer_subset was given"):
        module(x, x)
    with pytest.raises(NullPointer, match=r"^layer_idx is None"):
        module(x, inference_params=InferenceParams(8, 2))
