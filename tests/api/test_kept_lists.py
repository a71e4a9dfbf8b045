"""Masks by a line that keep their lists of blocks: calls of one kind share them."""

import copy
import itertools

import numpy as np
import pytest

import flashgen
from flashgen import Mask
from flashgen.errors import BadParam
from flashgen.runtime.cupykind import CupyKind
from flashgen.simulator import hostcompiler

needs_compiler = pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="there is no C++ compiler")


@pytest.fixture
def launches(fake_gpu, monkeypatch):
    """The names of the kernels that a call launches."""
    from fake_gpu import array

    places = itertools.count(1 << 45, 1 << 30)

    def empty(kind, shape, like, stream, dtype=None):
        return array(shape, dtype or like.dtype, address=next(places))

    monkeypatch.setattr(CupyKind, "empty", empty)
    monkeypatch.setattr(CupyKind, "is_capturing", lambda _: False)

    def of(call):
        fake_gpu.launches.clear()
        call()
        return [fake_gpu.variants[function].name for function, *_ in fake_gpu.launches]

    return of


def listing(names):
    return [name for name in names if name.startswith("mask_lists")]


def test_calls_of_one_kind_list_blocks_once(launches):
    from fake_gpu import array

    q, doc = array((2, 300, 4, 128)), array((2, 300), "int32")
    mask = Mask("documents", doc=doc).keep_lists()
    first = launches(lambda: flashgen.attention(q, q, q, mask=mask))
    assert len(listing(first)) == 3
    layer = array((2, 300, 4, 128), address=1 << 33)
    later = launches(lambda: flashgen.attention(layer, q, layer, mask=mask))
    assert later == ["flash_fwd_hdim128_fp16_blocks_documents_m64_sm90"]
    lse = array((2, 4, 300), "float32")
    gradients = [launches(lambda: flashgen.attention_backward(q, q, q, q, q, lse, mask=mask)) for _ in "ab"]
    assert len(gradients[1]) == len(gradients[0]) - len(listing(gradients[0]))
    assert not listing(gradients[1])
    # Another length is another kind, and a plan, a stream and another mask list blocks themselves.
    short = array((2, 200, 4, 128))
    other = Mask("documents", doc=array((2, 200), "int32")).keep_lists()
    assert listing(launches(lambda: flashgen.attention(short, short, short, mask=other)))
    assert listing(launches(lambda: flashgen.attention(q, q, q, mask=mask, window_size=(9, 9))))
    assert listing(launches(lambda: flashgen.attention(q, q, q, mask=mask, stream=5)))
    assert listing(launches(lambda: flashgen.attention(q, q, q, mask=mask.update(doc=doc))))
    assert len(flashgen.plan(q, q, q, mask=mask).steps) == 4


def test_layers_share_the_lists_of_an_array(launches):
    from fake_gpu import array

    q, hidden = array((2, 300, 4, 128)), array((2, 1, 300, 300), "bool")
    mask = Mask.from_array(hidden)
    assert mask.line == "not hidden[b, q, kv]"
    calls = [launches(lambda: flashgen.attention(q, q, q, mask=mask)) for _ in "ab"]
    assert [len(listing(names)) for names in calls] == [3, 0]
    plain = Mask(mask.line, **mask.arrays)
    assert len(listing(launches(lambda: flashgen.attention(q, q, q, mask=plain)))) == 3


def test_a_graph_lists_blocks_itself(launches, monkeypatch):
    from fake_gpu import array

    q, mask = array((1, 300, 4, 128)), Mask("kv <= q").keep_lists()
    launches(lambda: flashgen.attention(q, q, q, mask=mask))
    assert not listing(launches(lambda: flashgen.attention(q, q, q, mask=mask)))
    monkeypatch.setattr(CupyKind, "is_capturing", lambda _: True)
    assert listing(launches(lambda: flashgen.attention(q, q, q, mask=mask)))


@needs_compiler
def test_results_are_those_of_a_mask_without_and_stale_lists_are_found(fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    q, k, v = rng.standard_normal((3, 1, 150, 4, 32)).astype(np.float16)
    doc = np.sort(rng.integers(0, 4, (1, 150)), 1).astype(np.int32)
    mask = Mask("doc[b, q] == doc[b, kv] and kv <= q + 9 * h", doc=doc)
    keeping = mask.keep_lists()
    dout = rng.standard_normal(q.shape).astype(np.float16)
    for _ in range(2):
        results = []
        for one in (mask, keeping):
            options = {"mask": one, "backend": "simulator"}
            out, lse = flashgen.attention(q, k[..., :2, :], v[..., :2, :], return_lse=True, **options)
            call = (dout, q, k[..., :2, :], v[..., :2, :], out, lse)
            results.append((out, *flashgen.attention_backward(*call, deterministic=True, **options)))
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)
    keeping.check()
    doc[:] = np.arange(150) // 10
    with pytest.raises(BadParam, match=r"^an array of the mask .* was written to after a call"):
        keeping.check()
    assert mask.kept is None
    assert copy.copy(keeping).kept is not keeping.kept


def test_pytorch_counts_what_it_writes(fake_gpu):
    torch = pytest.importorskip("torch")
    from flashgen.call.keptlists import _version

    x = torch.zeros(3)
    before = _version(x)
    x.add_(1)
    assert _version(x) == before + 1
    with torch.inference_mode():
        assert _version(torch.zeros(3)) == 0
    assert _version(np.zeros(3)) == 0
