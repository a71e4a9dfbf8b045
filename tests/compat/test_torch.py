"""scaled_dot_product_attention beside PyTorch's own, on the CPU."""

from __future__ import annotations

import itertools
import math

import pytest

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from flashgen import errors  # noqa: E402
from flashgen.compat import widths  # noqa: E402
from flashgen.compat.torch import scaled_dot_product_attention  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def qkv(
    seqlen_q=23, seqlen_kv=41, heads=4, kv_heads=4, width=32, width_v=None, dtype=torch.float32, batch=(2,)
):
    shapes = (seqlen_q, heads, width), (seqlen_kv, kv_heads, width), (seqlen_kv, kv_heads, width_v or width)
    return [torch.randn(*batch, n, length, d).to(dtype) for length, n, d in shapes]


def same(query, key, value, **options):
    """That the result is PyTorch's of the same elements in float64."""
    found = scaled_dot_product_attention(query, key, value, **options)
    mask = options.get("attn_mask")
    exact = options | ({} if mask is None or mask.dtype == torch.bool else {"attn_mask": mask.double()})
    right = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), **exact
    )
    assert (type(found), found.dtype, found.shape) == (torch.Tensor, query.dtype, right.shape)
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 3e-5}[query.dtype]
    torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(23, 41), (41, 23), (1, 41)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_causal_is_aligned_top_left(is_causal, lengths, dtype):
    same(*qkv(*lengths, dtype=dtype), is_causal=is_causal)


@pytest.mark.parametrize("lengths", [(23, 41), (41, 23), (23, 23)], ids=str)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_causal_bias_is_the_mask_of_its_alignment(heads, lengths):
    """Its storage, (variants, seqlen_q, seqlen_kv), holds anything."""
    from torch.nn.attention import bias

    query, key, value = qkv(*lengths, heads=heads, kv_heads=heads)
    for name in ("upper_left", "lower_right"):
        mask = getattr(bias, f"causal_{name}")(*lengths)
        found = scaled_dot_product_attention(query, key, value, mask)
        seen = torch.ones(lengths, dtype=torch.bool)
        seen = seen.tril(0 if name == "upper_left" else lengths[1] - lengths[0])
        torch.testing.assert_close(found, scaled_dot_product_attention(query, key, value, seen))
        if lengths[0] <= lengths[1]:  # PyTorch's own is NaN where a query sees nothing
            same(query, key, value, attn_mask=seen)
        with pytest.raises(errors.BadTensorShape, match=r"^value has"):
            scaled_dot_product_attention(query, key, value[:, :, :5], mask)
    with pytest.raises(errors.BadTensorShape, match=r"^attn_mask is a CausalBias of 23 queries"):
        scaled_dot_product_attention(query, key, value, bias.causal_upper_left(23, 40))


@pytest.mark.parametrize(
    "shape", [(23, 41), (1, 41), (4, 23, 41), (2, 1, 1, 41), (2, 4, 23, 41), (23, 1)], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "float", "float of query"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_are_pytorchs(dtype, kind, shape):
    """True takes part; a float mask is added to the scaled scores, and -inf hides."""
    seen = torch.rand(shape) < 0.6
    mask = seen if kind == "bool" else torch.where(seen, torch.randn(shape), -math.inf)
    query, key, value = qkv(dtype=dtype)
    if kind == "float of query":
        mask = mask.to(dtype)
    before = mask.clone()
    found = same(query, key, value, attn_mask=mask)
    assert torch.equal(mask, before)
    assert not torch.allclose(
        found.float(), scaled_dot_product_attention(query, key, value).float(), atol=0.05
    )


@pytest.mark.parametrize(
    "mask", [torch.zeros(23, 41, dtype=torch.bool), torch.full((23, 41), -math.inf)], ids=str
)
def test_a_query_that_sees_nothing_is_zero(mask):
    assert not same(*qkv(), attn_mask=mask).any()


def test_a_mask_of_one_element_is_for_all():
    given = qkv(batch=())  # PyTorch takes one without dimensions here alone
    same(*given, attn_mask=torch.tensor(True))
    same(*given, attn_mask=torch.tensor(0.5))
    assert not same(*given, attn_mask=torch.tensor(False)).any()
    batched = [x[None] for x in given]
    assert not scaled_dot_product_attention(*batched, attn_mask=torch.tensor(False)).any()


def test_a_mask_by_strides():
    mask = torch.randn(41, 23).T
    same(*qkv(), attn_mask=mask)
    same(*qkv(), attn_mask=mask > 0)
    same(*qkv(), attn_mask=torch.randn(23, 50)[:, 3:44])


@pytest.mark.parametrize("width", [1, 20, 61])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_head_dim_is_served_with_its_own_scale(dtype, width):
    same(*qkv(width=width, dtype=dtype), is_causal=True)
    same(*qkv(width=width, width_v=width + 3, dtype=dtype), scale=0.3)


def test_grouped_heads():
    same(*qkv(heads=6, kv_heads=2), enable_gqa=True)
    same(*qkv(heads=6, kv_heads=2, batch=()), enable_gqa=True, is_causal=True)
    query, key, value = qkv(heads=6, kv_heads=2)
    same(query, key[:, :1], value, enable_gqa=True)
    with pytest.raises(errors.BadTensorShape, match=r"^key has 2 heads but query has 6; .*enable_gqa=True$"):
        scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 6), (6, 3), (2, 3), (12, 4), (1, 3)])
def test_key_and_value_may_be_grouped_differently(key_heads, value_heads):
    """Each is repeated to the heads of query, as in PyTorch; so are its gradients summed."""
    query, key, value = qkv(heads=12, kv_heads=12)
    given = query, key[:1, :key_heads], value[:, :value_heads]
    same(*given, enable_gqa=True, is_causal=True)
    same(*(x[0] for x in given), enable_gqa=True)
    leaves, weights = [x.requires_grad_() for x in given], torch.randn_like(query)
    torch.compiler.reset()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    attends = torch.nn.functional.scaled_dot_product_attention, scaled_dot_product_attention, compiled
    right, *found = (torch.autograd.grad(f(*leaves, enable_gqa=True), leaves, weights) for f in attends)
    for each in found:
        for x, y in zip(each, right, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_batches_and_heads_of_one_serve_all():
    """Those of each tensor, on its own; so do their gradients."""
    for ones in itertools.product((False, True), repeat=6):
        given = [
            x[: 1 if batch else 2, : 1 if head else 4].requires_grad_()
            for x, batch, head in zip(qkv(), ones[:3], ones[3:], strict=True)
        ]
        out = same(*given, is_causal=True)
        right = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
        weights = torch.randn_like(out)
        for x, y in zip(*(torch.autograd.grad(each, given, weights) for each in (out, right)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 20, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_of_a_row_that_lie_apart(dtype, width):
    """Heads, tokens and elements in another order in memory; those of the padding, too."""
    for seqlen in (1, 23):
        for order in ((2, 3), (1, 3)):
            same(
                *(
                    x.transpose(*order).contiguous().transpose(*order)
                    for x in qkv(seqlen, 41, width=width, dtype=dtype)
                )
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_no_kernel_could_read_are_copied(dtype):
    same(*(x[..., 1:33] for x in qkv(width=35, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_that_start_within_16_bytes_are_copied(dtype):
    """Rows are a multiple of 16 bytes apart, but the first is not at one."""
    given = [x[..., 1:33] for x in qkv(width=40, dtype=dtype)]
    same(*given, is_causal=True)
    weights, copies = torch.randn(2, 4, 23, 32, dtype=dtype), [x.clone() for x in given]
    found, expected = (
        torch.autograd.grad(scaled_dot_product_attention(*leaves), leaves, weights)
        for leaves in ([x.requires_grad_() for x in each] for each in (given, copies))
    )
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


class Plain(torch.Tensor):
    """Has memory of its own, and no operators."""


def test_so_are_those_of_a_subclass_and_in_a_mode_that_looks_at_operators():
    given = [x[..., 1:33] for x in qkv(width=36)]
    right = scaled_dot_product_attention(*given)
    found = scaled_dot_product_attention(*(x.as_subclass(Plain) for x in given))
    assert type(found) is Plain
    assert torch.equal(found, right)
    with FlopCounterMode(display=False):
        assert torch.equal(scaled_dot_product_attention(*given), right)


def test_a_graph_copies_tensors_that_start_within_16_bytes():
    """Where a tensor starts nothing can tell that traces it; the operator does when it runs."""
    torch.compiler.reset()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    given = [x[..., 1:33] for x in qkv(width=36)]
    assert torch.equal(compiled(*given), scaled_dot_product_attention(*given))


def test_without_batch():
    same(*qkv(batch=()), attn_mask=torch.rand(4, 23, 41) < 0.5)


def test_nothing_but_a_bool_mask_is_copied(monkeypatch):
    """attention() gets views of the memory of query, key, value and a float mask."""
    seen = []
    compute = widths.attention

    def recorded(q, k, v, **options):
        seen.append((q, k, v, *(options.get("params") or {}).values()))
        return compute(q, k, v, **options)

    monkeypatch.setattr(widths, "attention", recorded)
    given = (*qkv(), torch.randn(23, 41))
    out = scaled_dot_product_attention(*given)
    assert [x.data_ptr() for x in seen[0]] == [x.data_ptr() for x in given]
    assert out.transpose(1, 2).is_contiguous()
    given = [torch.randn(2, 9, 4, 32).transpose(1, 2) for _ in range(3)]
    same(*given)
    assert [x.data_ptr() for x in seen[1]] == [x.data_ptr() for x in given]
    assert all(x.is_contiguous() for x in seen[1])


@pytest.mark.parametrize("width", [32, 30])
@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"attn_mask": torch.rand(23, 41) < 0.9}], ids=["causal", "mask"]
)
def test_gradients_are_pytorchs(options, width):
    """Also where rows are padded."""
    given = [x.requires_grad_() for x in qkv(width=width)]
    weights = torch.randn(2, 4, 23, width)
    found, expected = (
        torch.autograd.grad((attend(*given, **options) * weights).sum(), given)
        for attend in (scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_compiled_into_one_graph():
    given = [x.requires_grad_() for x in qkv(kv_heads=2, width=30)]

    def attend(*x):
        return scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(*given).square().sum(), given) for f in (compiled, attend))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_under_autocast_it_computes_in_the_dtype_of_autocast():
    given = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        found = scaled_dot_product_attention(*given)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, scaled_dot_product_attention(*(x.bfloat16() for x in given)))


def test_autocast_leaves_what_pytorchs_leaves():
    """fp64, and integers, which have no kernel here."""
    given = [x.double() for x in qkv()]
    with torch.autocast("cpu", torch.bfloat16):
        found = scaled_dot_product_attention(*given)
    assert torch.equal(found, scaled_dot_product_attention(*given))
    refused = pytest.raises(errors.BadTensorDtype, match=r"^query has dtype int32")
    with torch.autocast("cpu", torch.bfloat16), refused:
        scaled_dot_product_attention(*(x.int() for x in given))


@pytest.mark.parametrize("shape", [(23, 41), (2, 1, 1, 41), (4, 23, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_has_a_gradient(dtype, shape):
    mask = torch.randn(shape, dtype=dtype, requires_grad=True)
    query, key, value = qkv(dtype=torch.float32)
    found = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    exact = mask.detach().double().requires_grad_()
    tensors = (x.double() for x in (query, key, value))
    right = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=exact)
    (gradient,) = torch.autograd.grad(found.square().sum(), mask)
    (expected,) = torch.autograd.grad(right.square().sum(), exact)
    assert gradient.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2  # sums of up to 82 rounded numbers
    torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "instead"), [(torch.float64, "float"), (torch.uint8, "bool"), (torch.int64, "bool")], ids=str
)
def test_a_mask_of_another_dtype_is_named(dtype, instead):
    """Of integers floats would be added to scores, where they say which keys take part."""
    words = rf"^attn_mask has dtype {dtype}; .*: pass attn_mask\.{instead}\(\)$"
    with pytest.raises(NotImplementedError, match=words):
        scaled_dot_product_attention(*qkv(dtype=torch.float16), attn_mask=torch.zeros(23, 41, dtype=dtype))


def test_what_is_not_there_is_named():
    query, key, value = qkv()
    with pytest.raises(errors.BadParam, match=r"^dropout_p is 1\.5"):
        scaled_dot_product_attention(query, key, value, dropout_p=1.5)
    with pytest.raises(NotImplementedError, match="query has 5 dimensions"):
        scaled_dot_product_attention(query[None], key[None], value[None])


QUERY, KEY, VALUE = qkv()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"scale": -0.5}, errors.BadParam, r"^scale is -0\.5; .*\(negate query instead\)$"),
        ({"is_causal": None}, errors.BadParam, "^is_causal is None; expected True or False"),
        ({"enable_gqa": "yes"}, errors.BadParam, "^enable_gqa is 'yes'; expected True or False"),
        ({"is_causal": True, "attn_mask": torch.zeros(23, 41)}, errors.BadParam,
         "^is_causal is True and attn_mask was given"),
        ({"value": None}, errors.BadTensorDtype, "^value has type NoneType; expected a torch.Tensor"),
        ({"key": KEY.numpy()}, errors.BadTensorDtype, "^key has type ndarray"),
        ({"key": KEY.half()}, errors.BadTensorDtype, "^key has dtype fp16 but query has fp32"),
        ({"query": QUERY.int(), "key": KEY.int(), "value": VALUE.int()}, errors.BadTensorDtype,
         r"^query has dtype int32; supported are"),
        ({"key": KEY[0]}, errors.BadTensorShape,
         r"^key has shape \(4, 41, 32\) but query has \(2, 4, 23, 32\)"),
        ({"key": KEY[..., :24]}, errors.BadTensorShape, "^key has head_dim 24 but query has 32"),
        ({"key": KEY[..., :30]}, errors.BadTensorShape, "^key has head_dim 30 but query has 32"),
        ({"value": VALUE[:, :, :40]}, errors.BadTensorShape,
         r"^value has shape \(2, 4, 40, 32\) but key has \(2, 4, 41, 32\); expected as many keys"),
        ({"key": KEY.repeat(2, 1, 1, 1)[:3]}, errors.BadTensorShape,
         "^key has 3 batch entries but query has 2; they must be the same, or 1"),
        ({"value": VALUE.repeat(2, 1, 1, 1)[:3]}, errors.BadTensorShape,
         "^value has 3 batch entries but query has 2"),
        ({"key": KEY[:, :3], "value": VALUE[:, :3], "enable_gqa": True}, errors.BadTensorShape,
         "^query has 4 heads, key has 3; the heads of query must be a positive multiple "
         "of the heads of key"),
        ({"key": KEY[:, :2], "value": VALUE[:, :3], "enable_gqa": True}, errors.BadTensorShape,
         "^query has 4 heads, value has 3; the heads of query must be a positive multiple "
         "of the heads of value$"),
        ({"key": KEY[:, :0], "enable_gqa": True}, errors.BadTensorShape,
         "^query has 4 heads, key has 0; the heads of query must be a positive multiple "
         "of the heads of key$"),
        ({name: torch.zeros(1, 1, 2, 301) for name in ("query", "key", "value")}, errors.BadTensorShape,
         "^query has head_dim 301; the largest is 256"),
        ({"attn_mask": torch.zeros(23, 40)}, errors.BadTensorShape,
         r"^attn_mask has shape \(23, 40\); it must broadcast to \(batch, heads, seqlen_q, seqlen_kv\) = "
         r"\(2, 4, 23, 41\)$"),
        ({"query": QUERY[0], "key": KEY[0], "value": VALUE[0], "attn_mask": torch.zeros(2, 4, 23, 41)},
         errors.BadTensorShape, r"^attn_mask has shape .*\(heads, seqlen_q, seqlen_kv\) = \(4, 23, 41\)$"),
        ({"attn_mask": torch.ones(2, 41, dtype=torch.bool)}, errors.BadTensorShape,
         r"^attn_mask has shape \(2, 41\).*; one of padding goes in as attn_mask\[:, None, None, :\]$"),
        ({"key": KEY.to("meta"), "value": VALUE.to("meta")}, errors.DeviceTypeNotSupported,
         "^key: a tensor is on meta"),
        ({"attn_mask": torch.zeros(23, 41, device="meta")}, errors.DeviceTypeNotSupported,
         "^attn_mask: a tensor is on meta"),
        ({"attn_mask": torch.ones(23, 41).to_sparse()}, errors.BadParam, "^attn_mask: a tensor of layout"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_of_what_was_given(given, error, message):
    """By the names of PyTorch, with the shapes of the caller."""
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**{"query": QUERY, "key": KEY, "value": VALUE} | given)


@pytest.mark.parametrize(
    ("layout", "device"), [(torch.strided, "cpu"), (torch.jagged, "cpu"), (torch.jagged, "meta")], ids=str
)
def test_a_nested_tensor_is_named(layout, device):
    x = torch.nested.nested_tensor([torch.randn(4, n, 32) for n in (3, 5)], layout=layout).to(device)
    for requires_grad in (False, True):
        with pytest.raises(errors.BadParam, match=r"^query: a nested tensor was given; expected a dense one"):
            scaled_dot_product_attention(*[x.detach().requires_grad_(requires_grad)] * 3)
    with pytest.raises(errors.BadParam, match=r"^attn_mask: a nested tensor was given"):
        scaled_dot_product_attention(*qkv(), attn_mask=x)
