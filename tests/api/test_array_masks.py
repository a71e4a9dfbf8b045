"""Masks of arrays: `Mask.from_array`, and arrays of bools in a line."""

import copy
import pickle

import numpy as np
import pytest

import flashgen
from flashgen import Mask
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape
from flashgen.operators.maskblocks import EMPTY, FULL, PARTIAL

BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 2, 4, 2, 300, 260
SHAPES = {
    (QUERIES, KEYS): "not hidden[q, kv]",
    (BATCH, 1, QUERIES, KEYS): "not hidden[b, q, kv]",
    (HEADS, QUERIES, KEYS): "not hidden[h, q, kv]",
    (BATCH, HEADS, QUERIES, KEYS): "not hidden[b, h, q, kv]",
    (BATCH, 1, 1, KEYS): "not hidden[b, kv]",
    (1, HEADS, 1, KEYS): "not hidden[h, kv]",
    (BATCH, HEADS, 1, KEYS): "not hidden[b, h, kv]",
    (KEYS,): "not hidden[kv]",
}


def hidden_of(rng, shape, dtype=bool):
    """An array with blocks that are all hidden, all visible and mixed."""
    hidden = rng.random(shape) < 0.3
    if len(shape) > 1 and shape[-2] > 1:
        hidden[..., :128, 128:] = True
        hidden[..., 128:256, :128] = False
    return hidden * rng.integers(1, 255, shape).astype(np.uint8) if dtype == np.uint8 else hidden


@pytest.fixture
def qkv():
    rng = np.random.default_rng(7)
    q, dout = rng.standard_normal((2, BATCH, QUERIES, HEADS, 32), np.float32)
    k, v = rng.standard_normal((2, BATCH, KEYS, KV_HEADS, 32), np.float32)
    return q, k, v, dout


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_those_of_the_dense_mask(shape, qkv, fresh_seed):
    q, k, v, dout = qkv
    hidden = hidden_of(np.random.default_rng(fresh_seed), shape, np.uint8 if len(shape) == 2 else bool)
    mask = Mask.from_array(hidden)
    assert mask.line == SHAPES[shape]
    results = []
    for of_call in (mask, hidden):
        out, lse = flashgen.attention(q, k, v, mask=of_call, causal=True, return_lse=True)
        gradients = flashgen.attention_backward(dout, q, k, v, out, lse, mask=of_call, causal=True)
        results.append((out, lse, *gradients))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_blocks_have_the_exact_verdicts(fresh_seed):
    hidden = hidden_of(np.random.default_rng(fresh_seed), (HEADS, QUERIES, KEYS))
    blocks = Mask.from_array(hidden).blocks(64, 32)
    for h in range(HEADS):
        verdicts = blocks.verdicts(h=h)
        for i, j in np.ndindex(*verdicts.shape):
            part = hidden[h, i * 64 : i * 64 + 64, j * 32 : j * 32 + 32]
            assert verdicts[i, j] == (EMPTY if part.all() else PARTIAL if part.any() else FULL)


def test_an_array_is_not_copied_and_lists_are_kept():
    hidden = np.zeros((1, 1, 60, 60), bool)
    mask = Mask.from_array(hidden)
    assert np.shares_memory(mask.arrays["hidden"], hidden)
    assert mask.kept is not None
    for other in (copy.copy(mask), pickle.loads(pickle.dumps(mask)), mask.update(hidden=hidden[0, 0])):
        assert (other.line, other.kept is not None) == (mask.line, True)


def test_a_line_reads_bools_as_conditions(qkv, fresh_seed):
    q, k, v, _ = qkv
    rng = np.random.default_rng(fresh_seed)
    seen, padding = rng.random((BATCH, QUERIES, KEYS)) < 0.6, rng.random((BATCH, KEYS)) < 0.3
    padding[:, 0] = False
    mask = Mask("(seen[b, q, kv] | (kv == 0)) & ~padding[b, kv]", seen=seen, padding=padding)
    hidden = ~((seen | (np.arange(KEYS) == 0)) & ~padding[:, None])
    out = flashgen.attention(q, k, v, mask=mask)
    np.testing.assert_allclose(out, flashgen.attention(q, k, v, mask=hidden[:, None]), rtol=1e-5, atol=1e-5)


def test_torch_and_jax_take_arrays(qkv):
    torch = pytest.importorskip("torch")
    hidden = hidden_of(np.random.default_rng(3), (BATCH, 1, QUERIES, KEYS))
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in qkv[:3])
    for of_call in (Mask.from_array(torch.from_numpy(hidden)), torch.from_numpy(hidden)):
        out = flashgen.attention(q, k, v, mask=of_call)
        out.square().sum().backward()
    expected = out.detach().numpy()
    jax = pytest.importorskip("jax")
    arrays = [jax.numpy.asarray(x) for x in qkv[:3]]
    mask = jax.jit(lambda q, k, v, x: flashgen.attention(q, k, v, mask=Mask.from_array(x)))
    np.testing.assert_allclose(mask(*arrays, jax.numpy.asarray(hidden)), expected, rtol=1e-5, atol=1e-5)


BAD = {
    "a list": ([True], BadTensorDtype, "hidden has type list"),
    "floats": (np.zeros((4, 4), np.float32), BadTensorDtype, "hidden has dtype float32; expected a bool"),
    "five dimensions": (np.zeros((1, 1, 1, 4, 4), bool), BadTensorShape, "hidden has shape (1, 1, 1, 4, 4)"),
    "a number": (np.zeros((), bool), BadTensorShape, "hidden has shape ()"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_mask_is_refused(case):
    array, error, message = BAD[case]
    with pytest.raises(error, match=message.replace("(", r"\(").replace(")", r"\)")):
        Mask.from_array(array)


@pytest.mark.parametrize(
    "shape", [(QUERIES, KEYS + 1), (QUERIES - 1, KEYS), (KV_HEADS, QUERIES, KEYS), (3, 1, 1, KEYS)]
)
def test_another_shape_is_refused_by_name(shape, qkv):
    q, k, v, _ = qkv
    with pytest.raises(BadTensorShape, match="hidden of the mask has shape"):
        flashgen.attention(q, k, v, mask=Mask.from_array(np.zeros(shape, bool)))


def test_dtypes_of_arrays_in_a_line_are_checked():
    with pytest.raises(BadTensorDtype, match=r"keep has dtype int32; .* needs a bool or uint8 array"):
        Mask("keep[q, kv]", keep=np.zeros((4, 4), np.int32))
    with pytest.raises(BadTensorDtype, match=r"doc has dtype bool; .* needs an int32 array"):
        Mask("doc[b, q] == doc[b, kv]", doc=np.zeros((4, 4), bool))
    with pytest.raises(BadParam, match=r"is a condition; .* needs a number"):
        Mask("keep[q, kv] and keep[q, kv] == 1", keep=np.zeros((4, 4), bool))
