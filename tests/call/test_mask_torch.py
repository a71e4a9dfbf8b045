"""Masks by a line in PyTorch's graphs: autograd and torch.compile."""

import numpy as np
import pytest

import flashgen
from flashgen.errors import BadParam

torch = pytest.importorskip("torch")
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

SEQLEN, HEADS, KV_HEADS = 90, 4, 2


def inputs(batch=2, requires_grad=True):
    shapes = ((batch, SEQLEN, HEADS, 16), (batch, SEQLEN, KV_HEADS, 16), (batch, SEQLEN, KV_HEADS, 8))
    return tuple(torch.randn(shape, requires_grad=requires_grad) for shape in shapes)


def documents(batch=2):
    return torch.randint(0, 4, (batch, SEQLEN), dtype=torch.int32).sort(1)[0]


def hidden(doc):
    return ~((doc[:, :, None] == doc[:, None]) & torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril())[:, None]


def gradients(attend, arrays, dout):
    return torch.autograd.grad((attend(*arrays) * dout).sum(), arrays)


def assert_equal(results, expected):
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result.detach().numpy(), right.detach().numpy())


def test_autograd_records_it():
    arrays, doc, dout = inputs(), documents(), torch.randn(2, SEQLEN, HEADS, 8)
    mask = flashgen.Mask("documents", doc=doc)
    found = gradients(lambda *x: flashgen.attention(*x, mask=mask), arrays, dout)
    assert_equal(found, gradients(lambda *x: flashgen.attention(*x, mask=hidden(doc)), arrays, dout))


def test_autograd_records_it_beside_a_score_and_packed():
    q, k, v = (x[0].detach().requires_grad_() for x in inputs())
    doc, ends = documents()[0], torch.tensor([0, 40, 90], dtype=torch.int32)
    slope, dout = torch.rand(HEADS), torch.randn(SEQLEN, HEADS, 8)
    mask = flashgen.Mask("documents", doc=doc)
    options = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "alibi_slopes": slope, "causal": True}
    found = gradients(lambda *x: flashgen.attention(*x, mask=mask, **options), (q, k, v), dout)

    def one_by_one(q, k, v):
        parts = (slice(0, 40), slice(40, 90))
        return torch.cat(
            [
                flashgen.attention(
                    *(q[i], k[i], v[i]),
                    mask=mask.update(doc=doc[i]),
                    alibi_slopes=slope,
                    causal=True,
                )
                for i in parts
            ]
        )

    assert_equal(found, gradients(one_by_one, (q, k, v), dout))


def test_an_array_that_is_written_to_before_the_backward_pass_is_an_error():
    arrays, doc = inputs(), documents()
    out = flashgen.attention(*arrays, mask=flashgen.Mask("documents", doc=doc))
    doc.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_compiled_call_takes_the_arrays_as_arguments():
    arrays, dout = inputs(), torch.randn(2, SEQLEN, HEADS, 8)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v, mask: flashgen.attention(q, k, v, mask=mask, window_size=(70, -1)) * 2,
        fullgraph=True,
        backend=backend,
    )
    for _ in range(2):
        doc = documents()
        mask = flashgen.Mask("documents", doc=doc)
        found = gradients(lambda *x, mask=mask: compiled(*x, mask), arrays, dout)
        options = {"mask": hidden(doc), "window_size": (70, -1)}
        expected = gradients(lambda *x, options=options: flashgen.attention(*x, **options) * 2, arrays, dout)
        assert_equal(found, expected)
    assert backend.frame_count == 1


def test_a_compiled_call_with_integers_and_out():
    arrays = inputs(requires_grad=False)
    mask, out = flashgen.Mask("window_first", width=9, first=2), torch.empty(2, SEQLEN, HEADS, 8)
    compiled = torch.compile(
        lambda q, k, v, out: flashgen.attention(q, k, v, mask=mask, out=out),
        fullgraph=True,
        backend="aot_eager",
    )
    compiled(*arrays, out)
    assert_equal((out,), (flashgen.attention(*arrays, mask=mask),))


def test_arrays_that_are_no_tensors_are_refused_where_a_call_is_recorded():
    mask = flashgen.Mask("documents", doc=documents().numpy())
    with pytest.raises(BadParam, match="doc of the mask has type ndarray"):
        flashgen.attention(*inputs(), mask=mask)
