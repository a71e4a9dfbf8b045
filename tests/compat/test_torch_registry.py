"""flashgen in PyTorch's registry of flash attention, beside PyTorch's own kernels, on the CPU."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch")
from torch.nn import attention as registry  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

import flashgen  # noqa: E402
from flashgen import errors  # noqa: E402
from flashgen.compat.torch import register  # noqa: E402

if not hasattr(registry, "register_flash_attention_impl"):
    pytest.skip("PyTorch 2.11 and later have the registry", allow_module_level=True)

from torch.nn.attention.varlen import varlen_attn  # noqa: E402

from flashgen.compat import torch_operators  # noqa: E402

ATTENTION = torch.ops.aten._flash_attention_forward
CU_Q, CU_K = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 7, 7, 20], [0, 9, 14, 33]))


@pytest.fixture
def calls(monkeypatch):
    """Activates flashgen, and lists the calls of its forward and backward kernels."""
    seen = []
    for name in ("attention", "attention_of_any_width", "gradients_of_any_width"):
        function = getattr(torch_operators, name)

        def spy(*args, _name=name, _function=function, **options):
            seen.append("backward" if "gradients" in _name else "forward")
            return _function(*args, **options)

        monkeypatch.setattr(torch_operators, name, spy)
    register(cpu=True)
    registry.activate_flash_attention_impl("flashgen")
    yield seen
    if registry.current_flash_attention_impl():
        registry.restore_flash_attention_impl()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tensors(*shapes, dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def with_gradients(function, inputs, **options):
    """The result, and the gradients of its inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs, **options)
    (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


def same(found, right, tolerance=3e-5):
    for x, y in zip(found, right, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.double(), y.double(), rtol=tolerance, atol=tolerance)


def exact(inputs, **options):
    """PyTorch's own, in float64 by its formula."""
    with registry.sdpa_kernel(registry.SDPBackend.MATH):
        return with_gradients(sdpa, [x.double() for x in inputs], **options)


CASES = {
    "plain": ((2, 4, 16, 32), (2, 4, 29, 32), {}),
    "causal": ((2, 4, 29, 32), (2, 4, 16, 32), {"is_causal": True}),
    "odd width": ((2, 4, 16, 37), (2, 4, 16, 37), {"is_causal": True, "scale": 0.3}),
    "gqa": ((1, 6, 16, 40), (1, 2, 16, 40), {"enable_gqa": True}),
    "float mask": ((2, 4, 16, 32), (2, 4, 20, 32), {"attn_mask": torch.linspace(-3, 3, 320).view(16, 20)}),
    "bool mask": ((2, 4, 16, 32), (2, 4, 16, 32), {"attn_mask": torch.ones(16, 16, dtype=torch.bool).tril()}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sdpa_and_its_gradients_are_flashgens(case, dtype, calls):
    shape, shape_kv, options = CASES[case]
    inputs = tensors(shape, shape_kv, shape_kv, dtype=dtype)
    found = with_gradients(sdpa, inputs, **options)
    assert calls == ["forward", "backward"]
    same(found, exact(inputs, **options), 3e-5 if dtype == torch.float32 else 6e-2)


def test_restore_brings_pytorchs_own_back(calls):
    inputs = tensors(*[(2, 4, 16, 32)] * 3)
    assert registry.current_flash_attention_impl() == "flashgen"
    assert "flashgen" in registry.list_flash_attention_impls()
    registry.restore_flash_attention_impl()
    right = with_gradients(sdpa, inputs)
    assert not calls
    registry.activate_flash_attention_impl("flashgen")
    same(with_gradients(sdpa, inputs), right)
    assert calls


def test_a_transposed_layout_is_kept(calls):
    inputs = [x.transpose(1, 2) for x in tensors(*[(2, 16, 4, 32)] * 3)]
    out = sdpa(*inputs)
    assert calls == ["forward"]
    assert out.stride() == inputs[0].stride()
    rows = [x.transpose(2, 3) for x in tensors(*[(2, 4, 32, 16)] * 3)]  # elements of a row are not adjacent
    same(with_gradients(sdpa, rows), exact(rows))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.extra)])
def test_a_compiled_call_runs_flashgen_in_both_passes(backend, calls):
    inputs = tensors(*[(2, 4, 16, 32)] * 3)
    compiled = torch.compile(
        lambda q, k, v: sdpa(2 * q, k, v, is_causal=True), backend=backend, fullgraph=True
    )
    right = with_gradients(lambda q, k, v: sdpa(2 * q, k, v, is_causal=True), inputs)
    calls.clear()
    same(with_gradients(compiled, inputs), right)
    assert calls == ["forward", "backward"]


def of_sequences(function, inputs, ends_q=CU_Q, ends_k=CU_K):
    """``function`` of the sequences one after another, (tokens, heads, head_dim)."""
    q, k, v = inputs
    parts = []
    for b in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        parts.append(function(q[rows], k[keys], v[keys]))
    return torch.cat(parts)


def by_formula(left, right, lengths=None):
    """Attention of one sequence in a window that is aligned bottom right; repeats kv heads."""

    def attend(q, k, v):
        if not len(q):
            return q
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
        hidden = ((left >= 0) & (j < i - left)) | ((right >= 0) & (j > i + right))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    return attend


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 1)], ids=str)
def test_packed_sequences_and_their_gradients(window, calls):
    inputs = tensors((20, 4, 32), (33, 2, 32), (33, 2, 32))
    options = {"window_size": window}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # PyTorch 2.11 takes any heads
        options["enable_gqa"] = True
    found = with_gradients(lambda *x: varlen_attn(*x, CU_Q, CU_K, 13, 19, **options), inputs)
    assert calls == ["forward", "backward"]
    doubles = [x.double() for x in inputs]
    same(found, with_gradients(lambda *x: of_sequences(by_formula(*window), x), doubles))


def forward(q, k, v, cu_k=CU_K, causal=True, most_keys=19, **options):
    return ATTENTION(q, k, v, CU_Q, cu_k, 13, most_keys, 0.0, causal, False, **options)


@pytest.mark.parametrize("source", ["packed", "pages"])
def test_keys_that_are_used_in_part(source, calls):
    """``seqused_k`` keys of each part of packed keys, or of its pages; the others may be anything."""
    q, k, v = tensors((20, 4, 32), (33, 2, 32), (33, 2, 32))
    used = torch.tensor([8, 0, 15], dtype=torch.int32)
    ends = [slice(int(CU_K[b]), int(CU_K[b] + used[b])) for b in range(3)]
    keep = torch.cat([torch.arange(33)[part] for part in ends])
    k[~torch.isin(torch.arange(33), keep)] = v[~torch.isin(torch.arange(33), keep)] = torch.nan
    short = torch.tensor([0, *used.cumsum(0)])
    right = of_sequences(by_formula(-1, 0), [x.double() for x in (q, k[keep], v[keep])], CU_Q, short)
    if source == "packed":
        out, lse, *_ = forward(q, k, v, seqused_k=used)
    else:
        if "block_table" not in str(ATTENTION.default._schema):
            pytest.skip("the operator takes pages from PyTorch 2.12 on")
        pages = torch.full((3, 4), 9999, dtype=torch.int32)
        pool = [x.new_full((7, 5, 2, 32), torch.nan) for x in (k, v)]
        free = iter(torch.randperm(7).tolist())
        for b, part in enumerate(ends):
            for number, begin in enumerate(range(part.start, part.stop, 5)):
                pages[b, number] = page = next(free)
                count = min(5, part.stop - begin)
                for x, to in zip((k, v), pool, strict=True):
                    to[page, :count] = x[begin : begin + count]
        out, lse, *_ = forward(q, *pool, None, most_keys=20, seqused_k=used, block_table=pages)
    assert calls == ["forward"]
    assert lse.shape == (4, 20)
    same([out], [right])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes was given"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, "block_table was given without seqused_k"),
        ({"return_debug_mask": True}, "return_debug_mask is True"),
        (
            {"dropout_p": 0.1, "seqused_k": torch.ones(3, dtype=torch.int32)},
            r"dropout_p is 0\.1 and seqused_k",
        ),
    ],
)
def test_what_the_hook_does_not_serve_is_refused_by_name(options, message, calls):
    if "block_table" in options and "block_table" not in str(ATTENTION.default._schema):
        pytest.skip("the operator takes pages from PyTorch 2.12 on")
    q, k, v = tensors((20, 4, 32), (33, 2, 32), (33, 2, 32))
    dropout_p, mask = options.pop("dropout_p", 0.0), options.pop("return_debug_mask", False)
    with pytest.raises(NotImplementedError, match=message):
        ATTENTION(q, k, v, CU_Q, CU_K, 13, 19, dropout_p, True, mask, **options)
    assert not calls


def of_mask(mask, v):
    """What a debug mask, (..., heads, queries, keys), makes of v, (..., heads, keys, head_dim)."""
    return mask.clamp(min=0) / 0.75 @ v.repeat_interleave(mask.shape[-3] // v.shape[-3], -3)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 50, 70), (1, 2, 16, 32), (3, 1, 33, 129)])
def test_the_debug_mask_says_what_is_dropped(shape, is_causal, calls):
    batch, heads, queries, keys = shape
    q, k, v = tensors((batch, 4, queries, 32), (batch, heads, keys, 32), (batch, heads, keys, 32))
    out, *others = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.25, is_causal, True)
    mask = others[-1]
    assert mask.shape == (batch, 4, 128, 128 if keys <= 128 else 256)  # rounded up as FA2's is
    assert not mask[:, :, queries:].any()
    assert not mask[..., keys:].any()
    mask = mask[:, :, :queries, :keys]
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if is_causal else keys)
    dropped = float((mask < 0).sum() / visible.expand_as(mask).sum())
    assert 0.15 < dropped < 0.35
    torch.testing.assert_close(out, of_mask(mask, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [(None, None), (5, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_debug_mask_of_packed_sequences(is_causal, window, calls):
    """PyTorch's nested tensors call this operator; the third sequence is the longest, the second is empty."""
    q, k, v = tensors((23, 4, 32), (36, 2, 32), (36, 2, 32))  # three rows that belong to no sequence
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    out, *_, mask = ATTENTION(q, k, v, CU_Q, CU_K, 13, 19, 0.25, is_causal, True, scale=0.2, **sides)
    assert mask.shape == (3, 4, 128, 128)
    assert (mask < 0).any()
    for b in range(3):
        rows, keys = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
        count, of_keys = CU_Q[b + 1] - CU_Q[b], CU_K[b + 1] - CU_K[b]
        right = of_mask(mask[b, :, :count, :of_keys], v[keys].transpose(0, 1)).transpose(0, 1)
        torch.testing.assert_close(out[rows], right, rtol=1e-4, atol=1e-5)
        assert not mask[b, :, count:].any()
        assert not mask[b, ..., of_keys:].any()


def test_the_debug_mask_of_padded_sequences(calls):
    """One state: the operator below SDPA gets the same mask as SDPA's own. A query without a key has 0."""
    q, k, v = tensors((2, 40, 4, 32), (2, 21, 2, 32), (2, 21, 2, 32))
    torch.manual_seed(1)
    out, *_, mask = ATTENTION(q, k, v, None, None, 40, 21, 0.25, True, True)
    torch.manual_seed(1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    of_sdpa, *_, same_mask = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.25, True, True)
    assert torch.equal(mask, same_mask)
    assert torch.equal(out, of_sdpa.transpose(1, 2))
    assert not mask[:, :, :19].any()


def codes(*shapes):
    """e4m3 codes and their scales, (batch, kv heads) of the last shape, with the numbers that they mean."""
    batch, heads = (shapes[-1][0], shapes[-1][1])
    found = [x.to(torch.float8_e4m3fn) for x in tensors(*shapes)]
    scales = [torch.rand(batch, heads) + 0.5 for _ in shapes]
    numbers = [
        x.double() * scale.double().repeat_interleave(x.shape[1] // heads, 1)[..., None, None]
        for x, scale in zip(found, scales, strict=True)
    ]
    return found, scales, numbers


@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("is_causal", [False, True])
def test_codes_of_e4m3_with_their_scales(is_causal, width, calls):
    """What ``torch.nn.attention.experimental`` calls for fp8, which otherwise needs FlashAttention-3."""
    found, scales, numbers = codes((2, 4, 24, width), (2, 2, 24, width), (2, 2, 24, width))
    operator = torch.ops.aten._scaled_dot_product_flash_attention.quantized
    out, *_ = operator(*found, *scales, 0.0, is_causal, scale=0.2)
    assert calls == ["forward"]
    assert out.dtype == torch.bfloat16
    options = {"is_causal": is_causal, "scale": 0.2, "enable_gqa": True}
    same([out], exact(numbers, **options)[:1], 0.1)
    plain, *_ = operator(*found, None, None, None, 0.0, is_causal, scale=0.2)
    same([plain], exact(found, **options)[:1], 0.1)


def test_packed_codes_of_e4m3(calls):
    found = [x.to(torch.float8_e4m3fn) for x in tensors((20, 4, 64), (33, 2, 64), (33, 2, 64))]
    scales = [torch.rand(3, 2) + 0.5 for _ in found]
    operator = torch.ops.aten._flash_attention_forward.quantized
    window = {"window_size_left": 6, "window_size_right": 0}
    out, lse, *_ = operator(*found, CU_Q, CU_K, 13, 19, 0.0, False, False, *scales, **window)
    assert calls == ["forward"]
    assert out.dtype == torch.bfloat16
    assert lse.shape == (4, 20)
    numbers = []
    for x, scale, ends in zip(found, scales, (CU_Q, CU_K, CU_K), strict=True):
        of_rows = scale.double().repeat_interleave(x.shape[1] // 2, 1).repeat_interleave(ends.diff(), 0)
        numbers.append(x.double() * of_rows[..., None])
    same([out], [of_sequences(by_formula(6, 0), numbers)], 0.1)


def test_tensors_of_16_bits_go_into_the_operators_of_codes(calls):
    inputs = tensors((20, 4, 32), (33, 2, 32), (33, 2, 32), dtype=torch.bfloat16)
    arguments = CU_Q, CU_K, 13, 19, 0.0, True, False
    found = torch.ops.aten._flash_attention_forward.quantized(*inputs, *arguments, None, None, None)
    same(found[:2], ATTENTION(*inputs, *arguments)[:2])
    inputs = tensors(*[(2, 4, 16, 32)] * 3, dtype=torch.bfloat16)
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    same(operator.quantized(*inputs, None, None, None)[:2], operator(*inputs)[:2])
    assert calls == ["forward"] * 4


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dropout_p": 0.1}, NotImplementedError, r"dropout_p is 0\.1"),
        ({"return_debug_mask": True}, NotImplementedError, "return_debug_mask is True"),
        ({"seqused_k": CU_Q[1:]}, NotImplementedError, "seqused_k and cum_seq_k were given with e4m3 codes"),
        ({"q_descale": torch.ones(3, 3)}, errors.BadTensorShape, "^q_descale has shape"),
        ({"dtype": torch.bfloat16, "q_descale": torch.ones(3, 2)}, errors.FlashgenError, "q_descale"),
    ],
)
def test_what_the_operators_of_codes_do_not_serve_is_refused_by_name(changes, error, message, calls):
    dtype = changes.pop("dtype", torch.float8_e4m3fn)
    found = [x.to(dtype) for x in tensors((20, 4, 64), (33, 2, 64), (33, 2, 64))]
    options = {"dropout_p": 0.0, "return_debug_mask": False, "q_descale": None} | changes
    dropout_p, mask, scale = (options.pop(x) for x in ("dropout_p", "return_debug_mask", "q_descale"))
    operator = torch.ops.aten._flash_attention_forward.quantized
    with pytest.raises(error, match=message):
        operator(*found, CU_Q, CU_K, 13, 19, dropout_p, True, mask, scale, None, None, **options)


@pytest.mark.parametrize("operator", ["sdpa", "varlen", "compiled"])
def test_dropout_and_its_gradients_by_one_state(operator, calls):
    """The operators below SDPA and `varlen_attn`, beside `attention` with the state that they return."""
    if operator == "varlen":
        inputs = tensors((20, 4, 32), (33, 2, 32), (33, 2, 32))
        lengths = {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_K, "max_seqlen_q": 13, "max_seqlen_kv": 19}
    else:
        inputs, lengths = tensors(*[(2, 4, 16, 32)] * 3), {}

    def attend(q, k, v):
        if operator == "varlen":
            return ATTENTION(q, k, v, CU_Q, CU_K, 13, 19, 0.25, True, False)
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.25, True)

    function = (
        torch.compile(attend, backend="aot_eager", fullgraph=True) if operator == "compiled" else attend
    )
    states = []

    def result(*x):
        out, *others = function(*x)
        states.append(next(x for x in others if torch.is_tensor(x) and x.dtype == torch.uint64))
        return out

    found = with_gradients(result, inputs)
    assert calls == ["forward", "backward"]
    state = states[0].view(torch.int64)
    assert state.shape == (2,)

    def right(*x):
        if operator != "varlen":
            x = [y.transpose(1, 2) for y in x]
        out = flashgen.attention(*x, causal=True, dropout_p=0.25, dropout_seed=state, **lengths)
        return out if operator == "varlen" else out.transpose(1, 2)

    same(found, with_gradients(right, inputs))
    result(*inputs)
    assert not torch.equal(states[0], states[1])


def test_errors_have_the_names_of_the_operator(calls):
    q, k, v = tensors((20, 4, 32), (33, 2, 32), (33, 2, 32))
    with pytest.raises(errors.BadTensorDtype, match=r"^key has dtype fp16 but query has fp32"):
        forward(q, k.half(), v.half())
    with pytest.raises(errors.BadTensorDtype, match=r"^cum_seq_k has dtype int64; expected int32"):
        forward(q, k, v, CU_K.long())


def test_pytorchs_own_samples_pass_through_the_hook(calls):
    """The inputs with which PyTorch tests ``scaled_dot_product_attention``; what is no call of flash
    attention, such as one with dropout, stays PyTorch's.
    """
    samples = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    (operator,) = (x for x in samples.op_db if x.name == "nn.functional.scaled_dot_product_attention")
    served = 0
    for sample in operator.sample_inputs("cpu", torch.float32, requires_grad=True):
        inputs = (sample.input, *sample.args[:2])
        options = dict(sample.kwargs)
        if options.get("dropout_p"):
            continue
        calls.clear()
        found = with_gradients(sdpa, inputs, **options)
        if calls:
            served += 1
            same(found, exact(inputs, **options), 1e-4)
    assert served >= 4


def test_the_cuda_kernels_are_registered_and_removed(monkeypatch):
    """Without a GPU: the dispatcher has flashgen's kernels for CUDA exactly while it is active."""
    name = "aten::_flash_attention_forward"
    before = torch._C._dispatch_dump(name)
    register()
    registry.activate_flash_attention_impl("flashgen")
    during = torch._C._dispatch_dump(name)
    registry.restore_flash_attention_impl()
    assert "CUDA: registered at" in during.replace(" (inactive)", "")
    assert "torch_registry" in during
    assert torch._C._dispatch_dump(name) == before


def test_pytorch_without_a_registry_is_named(monkeypatch):
    monkeypatch.delattr(registry, "register_flash_attention_impl")
    with pytest.raises(NotImplementedError, match="has no registry of flash attention"):
        register()
