"""Masks by a line on the CPU, in every function that takes them: each is what a mask array of it gives."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

import flashgen
from flashgen import Mask
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, DeviceTypeNotSupported
from flashgen.operators import gradients, reference
from flashgen.operators.visibility import Visibility
from flashgen.simulator import hostcompiler

HEADS, KV_HEADS = 4, 2
rng = np.random.default_rng()


def arrays(queries, keys, batch=2, dtype=np.float32):
    """q, k and v."""
    shapes = ((batch, queries, HEADS, 16), (batch, keys, KV_HEADS, 16), (batch, keys, KV_HEADS, 8))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def documents(keys, batch=2, count=5):
    return np.sort(rng.integers(0, count, (batch, keys)), 1).astype(np.int32)


def positions(queries, keys):
    """q, kv, h and b of all scores, to be broadcast."""
    q = (np.arange(queries) + keys - queries)[:, None]
    return q, np.arange(keys), np.arange(HEADS)[:, None, None], np.arange(2)[:, None, None, None]


def case_of(name, queries, keys):
    """A mask, and the array that is true where it hides."""
    q, kv, h, b = positions(queries, keys)
    at = np.clip(q, 0, max(keys - 1, 0))
    if name == "documents":
        doc = documents(keys)
        same = doc[:, at[:, 0], None] == doc[:, None]
        return Mask("documents", doc=doc), ~(same & (kv <= q))[:, None]
    if name == "prefix":
        prefix = np.array([keys // 3, 0], np.int32)
        return Mask("prefix_lm", prefix=prefix), ~((kv <= q) | (kv < prefix[b]))
    if name == "heads":
        far = rng.integers(0, keys + 1, HEADS).astype(np.int32)
        return Mask("q - kv <= far[h] and (kv + b) % 3 != 0", far=far), ~(
            (q - kv <= far[h]) & ((kv + b) % 3 != 0)
        )
    assert name == "nothing"
    return Mask("kv > 2 * n", n=keys), np.ones((queries, keys), bool)


def test_a_mask_by_its_text_alone_is_told_of_the_class():
    with pytest.raises(BadTensorDtype, match=r"mask is 'documents'; expected .*flashgen\.Mask\("):
        flashgen.attention(*arrays(4, 6), mask="documents")


CASES = ("documents", "prefix", "heads", "nothing")
OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (40, 9)},
    {"softcap": 3.0},
    {"score": "score + bias[b, h, q, kv]", "params": "bias"},
]


@pytest.mark.drawn
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "_".join(x) or "alone")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (127, 127), (129, 300), (300, 129), (1, 600)])
def test_it_is_what_the_array_of_it_gives(name, queries, keys, options):
    q, k, v = arrays(queries, keys)
    mask, hidden = case_of(name, queries, keys)
    if "params" in options:
        bias = rng.standard_normal((HEADS, queries, keys)).astype(np.float32)
        options = options | {"params": {"bias": bias}}
    results, lse = flashgen.attention(q, k, v, mask=mask, return_lse=True, **options)
    expected, expected_lse = flashgen.attention(q, k, v, mask=hidden, return_lse=True, **options)
    np.testing.assert_array_equal(results, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    dout = rng.standard_normal(results.shape).astype(np.float32)
    inputs = (dout, q, k, v, results, lse)
    for gradient, right in zip(
        flashgen.attention_backward(*inputs, mask=mask, **options),
        flashgen.attention_backward(*inputs, mask=hidden, **options),
        strict=True,
    ):
        np.testing.assert_array_equal(gradient, right)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("name", CASES)
def test_the_reference_computes_the_line(name, dtype):
    q, k, v = arrays(70, 150, dtype=dtype)
    mask, hidden = case_of(name, 70, 150)
    plan = flashgen.plan(q, k, v, mask=mask, return_lse=True)
    out, lse = plan(q, k, v, **mask.arguments)
    by_name = {"q": q, "k": k, "v": v, "out": out, "lse": lse} | mask.arguments
    assert reference.judge(plan.problem, by_name).ok
    dout = rng.standard_normal(out.shape).astype(dtype)
    backward = flashgen.plan_backward(dout, q, k, v, out, lse, mask=mask)
    dq, dk, dv = backward(dout=dout, q=q, k=k, v=v, out=out, lse=lse, **mask.arguments)
    by_name |= {"dout": dout, "dq": dq, "dk": dk, "dv": dv}
    assert gradients.judge(backward.problem, by_name).ok
    if name != "nothing":  # of another mask it is not
        wrong = flashgen.attention(q, k, v, mask=hidden[..., ::-1].copy())
        assert not reference.judge(plan.problem, by_name | {"out": wrong}).ok


def test_a_row_that_sees_nothing_has_its_sink_as_lse():
    q, k, v = arrays(5, 9)
    sinks = np.array([0.5, -1.0, 2.0, -np.inf], np.float32)
    mask = Mask("kv < 0")
    out, lse = flashgen.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    assert not out.any()
    np.testing.assert_allclose(lse, np.broadcast_to(sinks[:, None], lse.shape), rtol=1e-6)
    out, lse = flashgen.attention(q, k, v, mask=mask, return_lse=True)
    assert not out.any()
    assert np.isneginf(lse).all()


def test_only_partial_blocks_are_looked_at_element_by_element(monkeypatch):
    looked_at = []
    hides = Visibility.hides

    def counted(self, b, h, rows, keys, *xp):
        hidden = hides(self, b, h, rows, keys, *xp)
        looked_at.append(hidden.size)
        return hidden

    monkeypatch.setattr(Visibility, "hides", counted)
    q, k, v = arrays(4096, 4096, batch=1)
    doc = (np.arange(4096) // 1024).astype(np.int32)
    flashgen.attention(q, k, v, mask=Mask("documents", doc=doc))
    assert sum(looked_at) < 4096 * 4096 // 4
    looked_at.clear()
    flashgen.attention(q, k, v, mask=Mask("doc[q] >= 0", doc=doc))
    assert not looked_at


# Sequences of several lengths.
def test_packed_sequences_are_those_of_calls_by_themselves():
    ends = np.array([0, 40, 40, 100, 230], np.int32)
    q, k, v = (x[0] for x in arrays(230, 230, batch=1))
    doc = documents(230, batch=1)[0]
    limit = np.array([3, 9, 20, 50], np.int32)
    line = "doc[b, q] == doc[b, kv] and kv <= q + limit[b] + b"
    options = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 130, "max_seqlen_kv": 130}
    mask = Mask(line, doc=doc, limit=limit)
    out, lse = flashgen.attention(q, k, v, mask=mask, return_lse=True, **options)
    dout = rng.standard_normal(out.shape).astype(np.float32)
    all_gradients = flashgen.attention_backward(dout, q, k, v, out, lse, mask=mask, **options)
    for b, part in enumerate(map(slice, ends[:-1], ends[1:])):
        if part.start == part.stop:
            continue
        own = Mask(line.replace("+ b", "+ n"), doc=doc[None, part], limit=limit[b : b + 1], n=b)
        inputs = (q[None, part], k[None, part], v[None, part])
        right, right_lse = flashgen.attention(*inputs, mask=own, return_lse=True)
        np.testing.assert_array_equal(out[part], right[0])
        expected = flashgen.attention_backward(dout[None, part], *inputs, right, right_lse, mask=own)
        for gradient, own_gradient in zip(all_gradients, expected, strict=True):
            np.testing.assert_array_equal(gradient[part], own_gradient[0])


def test_a_cache_of_pages_has_arrays_over_logical_keys():
    lengths = np.array([37, 64], np.int32)
    pages = rng.permutation(8).reshape(2, 4).astype(np.int32)
    k, v = rng.standard_normal((2, 8, 16, KV_HEADS, 16)).astype(np.float32)
    q = rng.standard_normal((2, 1, HEADS, 16)).astype(np.float32)
    doc = documents(64)
    cache = flashgen.KVCache(k, v, lengths, pages=pages)
    out = flashgen.attention(q, cache, mask=Mask("documents_full", doc=doc), causal=True)
    for b, length in enumerate(lengths):
        keys, values = (x[pages[b]].reshape(1, 64, KV_HEADS, 16)[:, :length] for x in (k, v))
        own = Mask("documents_full", doc=doc[b : b + 1, :length])
        np.testing.assert_array_equal(out[b], flashgen.attention(q[b : b + 1], keys, values, mask=own)[0])


# The object.
def test_it_does_not_change_and_update_gives_another():
    doc = documents(20)
    mask = Mask("documents", doc=doc)
    with pytest.raises(AttributeError, match="cannot be changed"):
        mask.line = "kv <= q"
    with pytest.raises(TypeError):
        mask.arrays["doc"] = doc
    other = mask.update(doc=doc + 1)
    assert mask.arrays["doc"] is doc
    assert other.arrays["doc"][0, 0] == doc[0, 0] + 1
    assert other.rule.rule is mask.rule.rule
    chunks = Mask("chunks", size=4)
    assert chunks.update(size=8).numbers == {"size": 8}
    assert repr(mask) == "Mask('documents', doc=(2, 20))"
    assert repr(chunks) == "Mask('chunks', size=4)"
    for again in (pickle.loads(pickle.dumps(chunks)), copy.copy(chunks), copy.deepcopy(chunks)):
        assert again.line == "chunks"
        assert again.numbers == chunks.numbers


def test_a_call_reads_what_the_arrays_hold_and_check_tells_of_stale_blocks():
    q, k, v = arrays(40, 40)
    doc = documents(40)
    mask = Mask("documents", doc=doc)
    mask.check()
    mask.blocks(16, 16)
    mask.check()
    doc[:] = 0
    np.testing.assert_array_equal(
        flashgen.attention(q, k, v, mask=mask), flashgen.attention(q, k, v, mask=Mask("kv <= q"))
    )
    with pytest.raises(BadParam, match=r"^doc was written to after the blocks of the mask documents"):
        mask.check()


def test_it_is_drawn(tmp_path):
    path = tmp_path / "mask.svg"
    Mask("documents", doc=documents(1000)).show(path)
    text = path.read_text()
    assert text.startswith("<svg")
    assert "documents" in text
    Mask("kv <= q and kv < 3").show(path, 16, 16, seqlen_kv=100)
    assert "kv &lt;= q" in path.read_text()
    with pytest.raises(BadParam, match=r"^seqlen_kv is None"):
        Mask("kv <= q").show(path)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Mask("documens", doc=documents(4)), BadParam, "did you mean documents"),
        (lambda: Mask("documents"), BadParam,
         r"^doc is missing; .* needs an int32 array \(batch, seqlen_kv\)"),
        (lambda: Mask("documents", docs=documents(4)), BadParam,
         "no parameter docs; it has doc; did you mean doc"),
        (lambda: Mask("documents", doc=[1, 2]), BadTensorDtype, "^doc has type list"),
        (lambda: Mask("documents", doc=np.zeros(4)), BadTensorDtype, "^doc has dtype float64"),
        (lambda: Mask("documents", doc=np.zeros(4, np.int64)), BadTensorDtype, "^doc has dtype int64"),
        (lambda: Mask("documents", doc=np.zeros((1, 1, 4), np.int32)), BadTensorShape, "^doc has shape"),
        (lambda: Mask("documents", doc=np.zeros((), np.int32)), BadTensorShape, "^doc has shape"),
        (lambda: Mask("a[q] < c[kv]", a=documents(4), c=documents(5)[0]), BadTensorShape,
         r"^a has shape \(2, 4\)"),
        (lambda: Mask("a[q] < c[kv]", a=documents(4)[0], c=documents(5)[0]), BadTensorShape,
         "must have one seqlen_kv"),
        (lambda: Mask("chunks", size=0), BadParam, "^size is 0; .* as it divides"),
        (lambda: Mask("chunks", size=True), BadParam, "^size is True; .* needs an integer"),
        (lambda: Mask("kv <= n", n=2**31), BadParam, "^n is 2147483648"),
        (lambda: Mask(np.zeros((4, 4), bool)), BadParam, "a mask array is passed as mask= itself"),
        (lambda: Mask("kv <= q +"), BadParam, "^line is 'kv <= q \\+'; column"),
        (lambda: Mask("chunks", size=4).blocks(), BadParam, "^seqlen_kv is None"),
        (lambda: Mask("kv <= q + h").blocks(seqlen_kv=4), BadParam, "^num_heads is None"),
        (lambda: Mask("documents", doc=documents(4)).blocks(seqlen_kv=5), BadParam, "^seqlen_kv is 5"),
        (lambda: Mask("documents", doc=documents(4)).blocks(0), BadParam, "^rows is 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_mask_is_named(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    ("mask", "options", "error", "says"),
    [
        (Mask("documents", doc=documents(8)), {}, BadTensorShape, r"^doc of the mask has shape \(2, 8\)"),
        (Mask("kv <= q"), {"mask_type": "dense"}, BadParam, "^mask_type is 'dense', and mask is a Mask"),
        (Mask("kv <= q"), {"mask_type": 0}, BadParam, "^mask_type is 'none', and mask is a Mask"),
        (Mask("kv <= q"), {"return_weights": True}, BadParam, "^return_weights is True and mask is a Mask; "),
    ],
)
def test_what_is_wrong_with_a_call_is_named(mask, options, error, says):
    q, k, v = arrays(9, 9)
    with pytest.raises(error, match=says):
        flashgen.attention(q, k, v, mask=mask, **options)


@pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="there is no C++ compiler")
def test_a_call_in_the_simulator():
    q, k, v = (x.astype(np.float16) for x in arrays(40, 40))
    mask = Mask("documents", doc=documents(40))
    out = flashgen.attention(q, k, v, mask=mask, backend="simulator")
    np.testing.assert_allclose(out, flashgen.attention(q, k, v, mask=mask), atol=4e-3)


def test_arrays_of_two_libraries_are_refused():
    torch = pytest.importorskip("torch")
    q, k, v = arrays(9, 9)
    with pytest.raises(BadParam, match="doc of the mask"):
        flashgen.attention(q, k, v, mask=Mask("documents", doc=torch.from_numpy(documents(9))))


def test_a_gpu_refuses_by_name_what_no_kernel_has(fake_gpu):
    from fake_gpu import array

    q, seed = array((2, 64, 4, 64)), array((2,), "int64")
    lengths, tokens = array((2,), "int32"), array((128, 4, 64))
    refused = (
        "^mask is a Mask, `kv <= q`, of sequences of several lengths, and no kernel takes one with dropout_p"
    )
    options = {"mask": Mask("kv <= q"), "dropout_p": 0.5, "dropout_seed": seed}
    with pytest.raises(DeviceTypeNotSupported, match=refused):
        flashgen.attention(q, q, q, kv_lengths=lengths, **options)
    ends = array((3,), "int32")
    with pytest.raises(DeviceTypeNotSupported, match=refused):
        flashgen.attention(tokens, tokens, tokens, cu_seqlens_q=ends, cu_seqlens_kv=ends, **options)
    assert not fake_gpu.launches


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_dropout_goes_with_a_line_on_a_gpu(fake_gpu, dropout_p):
    from fake_gpu import array

    q, doc = array((2, 300, 4, 128)), array((2, 300), "int32")
    dropout = {"dropout_p": dropout_p, "dropout_seed": array((2,), "int64")} if dropout_p else {}
    mask = Mask("documents", doc=doc)
    plan = flashgen.plan(q, q, q, mask=mask, **dropout)
    assert plan.variant.axis("dropout") == ("dropout" if dropout_p else "none")
    lse = array((2, 4, 300), "float32")
    gradients = flashgen.plan_backward(q, q, q, q, q, lse, mask=mask, **dropout)
    assert gradients.variant.axis("dropout") == ("dropout" if dropout_p else "none")


def test_dropout_drops_the_scores_of_the_mask_as_an_array(fresh_seed):
    """V is the identity: out is 0 for a key that is hidden or dropped."""
    rng = np.random.default_rng(fresh_seed)
    q, k = rng.standard_normal((2, 2, 64, 3, 64), np.float32)
    v = np.broadcast_to(np.eye(64, dtype=np.float32)[:, None], q.shape).copy()
    doc = documents(64)
    mask, options = Mask("documents", doc=doc), {"dropout_p": 0.4, "dropout_seed": (11, 5)}
    hidden = (doc[:, :, None] != doc[:, None]) | ~np.tri(64, dtype=bool)
    out, lse = flashgen.attention(q, k, v, mask=mask, return_lse=True, **options)
    right = flashgen.attention(q, k, v, mask=hidden[:, None], **options)
    assert np.array_equal(out, right)
    found, expected = (
        flashgen.attention_backward(out, q, k, v, out, lse, mask=x, **options)
        for x in (mask, hidden[:, None])
    )
    assert all(map(np.array_equal, found, expected))


def test_a_gpu_lists_blocks_before_attention(fake_gpu):
    from fake_gpu import array

    q, doc = array((2, 300, 4, 128)), array((2, 300), "int32")
    plan = flashgen.plan(q, q, q, mask=Mask("documents", doc=doc))
    names = [step.variant.name for step in plan.steps]
    assert names == [
        "mask_lists_bounds_int32_documents_sm80",
        "mask_lists_counts_int32_documents_sm80",
        "mask_lists_int32_documents_sm80",
        "flash_fwd_hdim128_fp16_blocks_documents_m64_sm90",
    ]


def test_calls_share_a_plan_whatever_the_arrays_hold():
    from flashgen.call.compute import _plans

    q, k, v = arrays(33, 33)
    flashgen.attention(q, k, v, mask=Mask("documents", doc=documents(33)))
    before = len(_plans)
    for _ in range(3):
        flashgen.attention(q, k, v, mask=Mask("documents", doc=documents(33)))
    assert len(_plans) == before
