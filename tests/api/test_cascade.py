"""cascade against one attention over all keys, in float64."""

import dataclasses

import numpy as np
import pytest

import flashgen
from api.parts import (
    BATCH,
    DTYPES,
    HEADS,
    KV_HEADS,
    ROWS,
    WIDTH,
    WIDTH_V,
    all_keys,
    assert_right,
    keys,
    normal,
)
from flashgen import errors
from flashgen.api import cascade
from flashgen.api import parts as parts_of_cascade
from flashgen.call import compute
from flashgen.operators import merge as operator
from flashgen.operators import reference
from flashgen.operators.masks import Band
from flashgen.operators.numbers import widened


@pytest.fixture(autouse=True)
def fresh_plans(forget_plans, monkeypatch):
    monkeypatch.setattr(parts_of_cascade, "_sound", {})
    monkeypatch.delenv("FLASHGEN_BACKEND", raising=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_prefix(dtype, causal):
    element = DTYPES[dtype]
    q = normal(BATCH, ROWS, HEADS, WIDTH, dtype=element)
    for given in (
        [keys(40, 1, element), keys(9, dtype=element)],
        [keys(12, 1, element), keys(7, 1, element), keys(6, dtype=element)],
        [keys(12, dtype=element), keys(7, 1, element)],  # the last one is shared: causal all the same
        [keys(17, 1, element)],
    ):
        out, lse = flashgen.cascade(q, given, causal=causal, return_lse=True)
        assert_right(out, lse, q, given, dtype, causal)
        np.testing.assert_array_equal(flashgen.cascade(q, given, causal=causal), out)


def test_results_of_an_example_that_is_folded_are_its_own():
    """Queries that differ by batch entry only, so that an entry in the wrong place shows."""
    q = np.zeros((BATCH, ROWS, HEADS, WIDTH), np.float32)
    q += np.arange(BATCH, dtype=np.float32)[:, None, None, None]
    given = [keys(20, 1), keys(1)]
    out, lse = flashgen.cascade(q, given, return_lse=True)
    assert_right(out, lse, q, given, "fp32")


def test_a_shared_part_is_read_once(monkeypatch):
    shapes, made = [], cascade.attention

    def recorded(q, k, v, **options):
        shapes.append((q.shape, k.shape, np.shares_memory(q, base)))
        return made(q, k, v, **options)

    monkeypatch.setattr(cascade, "attention", recorded)
    base = normal(BATCH, ROWS, HEADS, WIDTH)
    given = [keys(20, 1), keys(30, 1), keys(8)]
    flashgen.cascade(base, given)
    folded = (1, BATCH * ROWS, HEADS, WIDTH)
    assert [shape for shape, *_ in shapes] == [folded, folded, base.shape]
    assert [shares for *_, shares in shapes] == [True] * 3  # no copy
    shapes.clear()
    flashgen.cascade(np.ascontiguousarray(base.swapaxes(0, 1)).swapaxes(0, 1), given)
    assert [shape for shape, *_ in shapes] == [folded, folded, base.shape]


def test_options_and_out_of_a_cascade():
    q, given = normal(BATCH, ROWS, HEADS, WIDTH), [keys(20, 1), keys(9)]
    k, v = all_keys(given)
    out = np.full((BATCH, ROWS, HEADS, WIDTH_V), np.nan, np.float32)
    assert flashgen.cascade(q, given, softmax_scale=0.7, softcap=2.0, out=out) is out
    right = flashgen.attention(q, k, v, softmax_scale=0.7, softcap=2.0)
    np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-5)
    one = flashgen.cascade(
        q[0], [(k[0, :20], v[0, :20]), (k[0, 20:], v[0, 20:])], softmax_scale=0.7, softcap=2.0
    )
    np.testing.assert_allclose(one, right[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seqlen_q", [0, 1])
def test_few_queries_and_none(seqlen_q):
    q, given = normal(BATCH, seqlen_q, HEADS, WIDTH), [keys(20, 1), keys(0)]
    out, lse = flashgen.cascade(q, given, return_lse=True)
    assert (out.shape, lse.shape) == ((BATCH, seqlen_q, HEADS, WIDTH_V), (BATCH, HEADS, seqlen_q))
    if seqlen_q:
        assert_right(out, lse, q, given, "fp32")


POSITIONAL = {
    "mask": (np.zeros((2, 3), bool), [None]),
    "mask_type": ("causal_top_left", [None, 0, "none"]),
    "window_size": ((4, 0), [(-1, -1), [-1, -1], np.array([-1, -1])]),
    "alibi_slopes": (np.zeros(4, np.float32), [None]),
    "score": ("softcap", [None]),
    "params": ({"cap": 2.0}, [None, {}]),
}


@pytest.mark.parametrize("name", POSITIONAL)
def test_what_needs_positions_is_refused_by_name_but_where_it_does_nothing(name):
    q, given = normal(1, 2, 4, WIDTH), [keys(3, 1)]
    refused, nothing = POSITIONAL[name]
    with pytest.raises(errors.BadParam, match=f"{name} was given"):
        flashgen.cascade(q, given, **{name: refused})
    with pytest.raises(errors.BadParam, match=name):
        flashgen.cascade(q, given, **{name: np.zeros(3)})
    for value in nothing:
        np.testing.assert_array_equal(
            flashgen.cascade(q, given, **{name: value}), flashgen.attention(q, *given[0], **{name: value})
        )


@pytest.mark.parametrize("value", ["causal", "causal_bottom_right", 3])
def test_a_causal_mask_type_is_an_option_of_its_own(value):
    q = normal(1, 2, 4, WIDTH)
    with pytest.raises(errors.BadParam, match=r"^mask_type is .*pass causal=True$"):
        flashgen.cascade(q, [keys(3, 1)], mask_type=value)


def cache_of(lengths, dtype=np.float32, page_size=4):
    """A KVCache of pages in any order, with NaN in what no sequence has, and the keys of each sequence."""
    rng = np.random.default_rng()
    most = -(-max(lengths) // page_size) + 1
    table = rng.permutation(len(lengths) * most).astype(np.int32).reshape(len(lengths), most)
    cached = []
    for width in (WIDTH, WIDTH_V):
        x = normal(len(lengths), most * page_size, KV_HEADS, width, dtype=dtype)
        x[np.arange(x.shape[1]) >= np.array(lengths)[:, None]] = np.nan
        cached.append(x)
    there = [np.empty((table.size, page_size, *x.shape[2:]), dtype) for x in cached]
    for memory, x in zip(there, cached, strict=True):
        memory[table.reshape(-1)] = x.reshape(table.size, page_size, *x.shape[2:])
    return flashgen.KVCache(*there, np.array(lengths, np.int32), pages=table), cached


@pytest.mark.parametrize("backend", ["cpu", "simulator"])
@pytest.mark.parametrize("rows", [1, 3])
def test_caches_are_parts(rows, backend, request):
    """A prefix in pages or in an array that all share, and what each sequence has of its own, or has not."""
    if backend == "simulator":
        request.getfixturevalue("compiler_of_the_host")
    lengths, q = [5, 0, 9], normal(BATCH, rows, HEADS, WIDTH, dtype=np.float16)
    prefix, (prefix_k, prefix_v) = cache_of([10], np.float16)
    own, (k, v) = cache_of(lengths, np.float16)
    pair = prefix_k[:, :10], prefix_v[:, :10]
    for given in ([prefix, own], [pair, own], [own, pair]):
        causal = given[-1] is own
        out, lse = flashgen.cascade(q, given, causal=causal, return_lse=True, backend=backend)
        for b, length in enumerate(lengths):
            of_all = (np.concatenate([x[0], y[b, :length]])[None] for x, y in zip(pair, (k, v), strict=True))
            # Queries ahead of the own keys see all of the prefix, and no own one: below.
            band = Band(10 + length - rows, right=0) if causal else Band()
            wide = (widened(x, "fp16") for x in of_all)
            right = reference.attention(widened(q[b : b + 1], "fp16"), *wide, "fp16", WIDTH**-0.5, band)
            seen = slice(max(0, rows - length) if causal else 0, rows)
            for found, expected, bound in (
                (out[b : b + 1, seen], right.out[:, seen], right.out_bound[:, seen]),
                (lse[b : b + 1, :, seen], right.lse[..., seen], right.lse_bound[..., seen]),
            ):
                assert reference.largest(found.astype(float), expected, 4 * bound).share <= 1
            of_prefix = flashgen.attention(q[b : b + 1], *pair, backend=backend)
            np.testing.assert_array_equal(out[b, : seen.start], of_prefix[0, : seen.start])


def test_a_cache_alone_is_attention_with_it():
    q, (cache, _) = normal(BATCH, ROWS, HEADS, WIDTH), cache_of([5, 0, 9])
    np.testing.assert_array_equal(
        flashgen.cascade(q, [cache], causal=True), flashgen.attention(q, cache, causal=True)
    )


def test_a_call_over_a_cache_is_prepared_once(monkeypatch):
    prepared = []

    def recorded(*given):
        prepared.append(compute.ready(*given))
        return prepared[-1]

    monkeypatch.setattr(cascade, "ready", recorded)
    monkeypatch.setattr(cascade, "attention", None)  # it would prepare the call again
    q, prefix, own = normal(BATCH, ROWS, HEADS, WIDTH), cache_of([10])[0], cache_of([5, 0, 9])[0]
    flashgen.cascade(q, [prefix, own])
    assert len(prepared) == 2


def test_a_cache_that_is_no_part_is_named_before_anything_is_written(monkeypatch):
    q, (k, v), (own, _), (prefix, _) = (
        normal(BATCH, ROWS, HEADS, WIDTH),
        keys(9),
        cache_of([5, 0, 9]),
        cache_of([7]),
    )
    replaced = lambda **changes: dataclasses.replace(own, **changes)  # noqa: E731

    def between(x):
        """Rows of half an element more than their own."""
        strides = [x.itemsize // 2 + x.strides[0], *x.strides[1:]]
        return np.ndarray(x.shape, x.dtype, np.zeros(strides[0] * x.shape[0], np.uint8), strides=strides)

    monkeypatch.setattr(cascade, "attention", None)
    for given, error, words in (
        ([(k, v), (own, None)], errors.BadParam, r"^parts\[1\] is a pair with a KVCache"),
        ([prefix], errors.BadParam, r"^parts\[0\] is a KVCache of one length for 3 batch entries"),
        ([(k, v), prefix], errors.BadParam, r"^parts\[1\] is a KVCache of one length for 3"),
        (
            [(k, v), replaced(lengths=None)],
            errors.NullPointer,
            r"^parts\[1\]: lengths of the KVCache is None",
        ),
        ([(k, v), replaced(lengths=own.lengths[:2])], errors.BadTensorShape, r"^parts\[1\]: "),
        (
            [(k, v), replaced(lengths=own.lengths.astype(np.int64))],
            errors.BadTensorDtype,
            r"^parts\[1\]: lengths",
        ),
        ([replaced(v=own.v[..., :16]), (k, v)], errors.BadTensorShape, r"^parts\[1\]: v has head_dim_v 24"),
        ([(k, v), replaced(v=np.array(3.0))], errors.BadTensorShape, r"^parts\[1\]: v has no dimensions"),
        (
            [(k, v), replaced(k=own.k.astype(np.float64), v=own.v.astype(np.float64))],
            errors.BadTensorDtype,
            r"^parts\[1\]: k has dtype float64 but q has fp32",
        ),
        ([(k, v), replaced(v=between(own.v))], errors.BadTensorStrides, r"^parts\[1\]: v has rows that"),
        ([(k, v), replaced(pages=own.pages.astype(float))], errors.BadTensorDtype, r"^parts\[1\]: pages"),
        ([(k, v), replaced(lengths=own.lengths - 1)], errors.BadParam, r"^parts\[1\]: lengths\[1\] is -1"),
        (own, errors.BadParam, r"^parts is of type KVCache; expected a list of parts, each \(k, v\) or a"),
    ):
        with pytest.raises(error, match=words):
            flashgen.cascade(q, given, causal=True)
    for options, words in (
        ({"softcap": -1}, "^softcap is -1"),
        ({"softmax_scale": -1.0}, r"^softmax_scale is -1\.0"),
        ({"backend": "x"}, "^backend is 'x'"),
    ):
        with pytest.raises(errors.BadParam, match=words):
            flashgen.cascade(q, [own, (k, v)], **options)
    with pytest.raises(errors.NullPointer, match=r"^q is None"):
        flashgen.cascade(None, [own, prefix])
    with pytest.raises(errors.BadTensorShape, match=r"^q has shape \(4, 16\); expected \(batch"):
        flashgen.cascade(q[0, 0], [prefix, own], causal=True)
    with pytest.raises(errors.BadTensorShape, match=r"^parts\[0\]: out has shape"):
        flashgen.cascade(q, [prefix, own], out=np.empty((BATCH, ROWS, HEADS, 8), np.float32))
    within = own.v.reshape(-1)[: BATCH * ROWS * HEADS * WIDTH_V].reshape(BATCH, ROWS, HEADS, WIDTH_V)
    with pytest.raises(errors.BadTensorStrides, match=r"^out overlaps v of parts\[1\] in memory"):
        flashgen.cascade(q, [prefix, own], out=within)
    memory = np.zeros(BATCH * ROWS * HEADS * WIDTH_V, np.float32)
    for name in ("lengths", "pages"):
        table = memory.view(np.int32)[: getattr(own, name).size].reshape(getattr(own, name).shape)
        table[...] = getattr(own, name)
        with pytest.raises(errors.BadTensorStrides, match=rf"^parts\[1\]: out overlaps {name} in memory"):
            flashgen.cascade(q, [prefix, replaced(**{name: table})], out=memory.reshape(within.shape))


def test_a_cascade_names_the_part_that_does_not_fit_before_it_writes():
    q, (k, v) = normal(BATCH, ROWS, HEADS, WIDTH), keys(9)
    out = np.full((BATCH, ROWS, HEADS, WIDTH_V), np.nan, np.float32)
    wrong = [
        ([], errors.BadParam, "list of 0"),
        ([k], errors.BadParam, r"parts\[0\]"),
        ([(k, v), (k[:2], v[:2])], errors.BadTensorShape, r"parts\[1\]: k has batch 2"),
        ([(k, v), (k[:1], v)], errors.BadTensorShape, r"parts\[1\]: v has shape .* but k has \(1, 9"),
        ([(k, v), (k, v[..., :16])], errors.BadTensorShape, r"parts\[1\]: v has head_dim_v 16"),
        ([(k, v), (k, v.astype(np.float16))], errors.BadTensorDtype, r"parts\[1\]: v has dtype"),
        ([(k, v), (None, v)], errors.NullPointer, "k is None"),
    ]
    for given, error, words in wrong:
        with pytest.raises(error, match=words):
            flashgen.cascade(q, given, out=out)
    with pytest.raises(errors.BadTensorShape, match="out has shape"):
        flashgen.cascade(q, [(k, v)] * 2, out=np.empty((BATCH, ROWS, HEADS, 8), np.float32))
    own = np.zeros_like(out)
    within = own.reshape(-1)[: v.size].reshape(v.shape)
    for others in (within, v, within):  # the last time the layouts are known
        given = [(k, v), (k, others)]
        if others is v:
            flashgen.cascade(q, given, out=own)
            continue
        with pytest.raises(errors.BadTensorStrides, match=r"^out overlaps v of parts\[1\] in memory"):
            flashgen.cascade(q, given, out=own)
    with pytest.raises(errors.BadTensorStrides, match=r"^out overlaps q in memory"):
        flashgen.cascade(own[..., :WIDTH], [(k, v), (k, v)], out=own)
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        flashgen.cascade(q, [(k, v)], window=3)
    assert np.isnan(out).all()


def test_an_out_between_the_queries_and_keys_of_each_token():
    together = normal(BATCH, ROWS, 4, KV_HEADS, WIDTH)
    q, k, v, out = (together[:, :, each] for each in range(4))
    other, before = keys(9)[0], together[:, :, :3].copy()
    given = [(other, other), (k, v)]
    expected = flashgen.cascade(q, given, causal=True)
    for _ in range(2):  # the second time the layouts are known
        assert flashgen.cascade(q, given, causal=True, out=out) is out
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(together[:, :, :3], before)
        across = together.reshape(BATCH, ROWS, 4 * KV_HEADS, WIDTH)[:, :, 5 : 5 + KV_HEADS]
        with pytest.raises(errors.BadTensorStrides, match=r"^out overlaps v of parts\[1\] in memory"):
            flashgen.cascade(q, given, causal=True, out=across)


def test_an_out_between_the_rows_of_a_table():
    q, given = normal(BATCH, 1, HEADS, WIDTH), keys(40)
    row = HEADS * WIDTH_V
    together = np.zeros((BATCH, row + 4), np.float32)
    out, pages = together[:, :row].reshape(BATCH, 1, HEADS, WIDTH_V), together[:, row:].view(np.int32)[:, :2]
    k, v = (x.reshape(BATCH * 2, 20, KV_HEADS, -1) for x in given)
    pages[...] = np.arange(BATCH * 2).reshape(BATCH, 2)
    cache = flashgen.KVCache(k, v, np.full(BATCH, 40, np.int32), pages=pages)
    assert np.shares_memory(out, together)
    expected = flashgen.cascade(q, [given, cache])
    np.testing.assert_array_equal(flashgen.cascade(q, [given, cache], out=out), expected)
    with pytest.raises(errors.BadTensorStrides, match=r"^parts\[1\]: out overlaps pages in memory"):
        flashgen.cascade(q, [given, cache], out=together[:, 4:].reshape(out.shape))


def test_a_cascade_finds_a_misaligned_part_before_its_first_call(monkeypatch):
    q, (k, v) = normal(BATCH, ROWS, HEADS, WIDTH), keys(9)
    memory = np.zeros(v.size + 8, np.float32)
    begin = -(memory.ctypes.data // 4) % 4 + 1
    misaligned = memory[begin : begin + v.size].reshape(v.shape)
    flashgen.cascade(q, [(k, v), (k, v)])  # from here on the layouts are known
    for fresh in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(cascade, "attention", None)
            if fresh:
                patch.setattr(parts_of_cascade, "_sound", {})
            with pytest.raises(errors.BadTensorStrides, match=r"^parts\[1\]: v starts at address"):
                flashgen.cascade(q, [(k, v), (k, misaligned)])


class Cleared(dict):
    """What another thread clears right after it was looked at, or stored into."""

    def __contains__(self, key):
        found = super().__contains__(key)
        self.clear()
        return found

    def __setitem__(self, key, value):
        self.clear()


def test_known_layouts_may_be_forgotten_meanwhile(monkeypatch):
    q, given = normal(BATCH, ROWS, HEADS, WIDTH), [keys(9), keys(4)]
    expected = flashgen.cascade(q, given)
    for known in (parts_of_cascade._sound, {}):
        monkeypatch.setattr(parts_of_cascade, "_sound", Cleared(known))
        np.testing.assert_array_equal(flashgen.cascade(q, given), expected)


def test_arrays_of_other_libraries():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    q, cache = normal(BATCH, ROWS, HEADS, WIDTH), cache_of([7, 9, 12])[0]
    given = [keys(20, 1), cache, keys(9)]
    right, right_lse = flashgen.cascade(q, given, causal=True, return_lse=True)
    arrays = (cache.k, cache.v, cache.lengths, cache.pages)
    for convert in (torch.from_numpy, jax.numpy.asarray):
        there = [tuple(map(convert, given[0])), flashgen.KVCache(*map(convert, arrays))]
        there.append(tuple(map(convert, given[2])))
        out, lse = flashgen.cascade(convert(q), there, causal=True, return_lse=True)
        assert type(out) is type(lse) is type(convert(q))
        np.testing.assert_array_equal(np.asarray(out), right)
        np.testing.assert_array_equal(np.asarray(lse), right_lse)


def test_arrays_of_several_libraries_are_called_by_their_own():
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    q, first, last = torch.from_numpy(normal(BATCH, ROWS, HEADS, WIDTH)), keys(20), keys(9)
    cache = flashgen.KVCache(*map(torch.from_numpy, last), jnp.full(BATCH, 9, "int32"))
    first, last = tuple(map(torch.from_numpy, first)), tuple(map(jnp.asarray, last))
    with pytest.raises(errors.BadParam, match=r"^parts\[1\]: k is a jax array but q is a torch one"):
        flashgen.cascade(q, [first, last])
    with pytest.raises(errors.BadParam, match=r"^parts\[1\]: lengths is a jax array but q is a torch one"):
        flashgen.cascade(q, [first, cache])
    with pytest.raises(errors.BadParam, match=r"^parts\[0\]: k is a torch array but q is a jax one"):
        flashgen.cascade(jnp.asarray(q.numpy()), [first, last])


def test_the_simulator_serves_both(compiler_of_the_host):
    q, given = normal(2, 3, 4, WIDTH, dtype=np.float16), [keys(30, 1, np.float16), keys(5, 2, np.float16)]
    out = flashgen.cascade(q, given, causal=True, backend="simulator")
    right = flashgen.cascade(q, given, causal=True)
    np.testing.assert_allclose(out.astype(float), right.astype(float), atol=4e-3)
    assert operator.MERGE.name in {plan.problem.operator.name for plan in compute._plans.values()}


@pytest.fixture
def compiler_of_the_host():
    from flashgen.simulator import hostcompiler

    try:
        hostcompiler.find()
    except errors.NoHostCompilerError as error:
        pytest.skip(str(error))
