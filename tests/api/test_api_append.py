"""attention(..., append=, rotary=): the same as append() and then attention over the lengths it gives."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

import flashgen
from flashgen import errors
from flashgen.simulator import hostcompiler

pytestmark = pytest.mark.once

simulated = pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="there is no C++ compiler")
ON = ("cpu", pytest.param("simulator", marks=simulated))
LENGTHS = np.array([5, 0, 19], np.int32)


def numbers(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(np.float16)


def cache_of(rng, pages):
    """A cache with room for 24 tokens a sequence, of rows or of pages of 8; unused slots are NaN."""
    k, v = (np.full((3, 24, 2, 32), np.nan, np.float16) for _ in "kv")
    for row, length in enumerate(LENGTHS):
        k[row, :length], v[row, :length] = numbers(rng, length, 2, 32), numbers(rng, length, 2, 32)
    if not pages:
        return flashgen.KVCache(k, v, LENGTHS)
    table = rng.permutation(9).astype(np.int32).reshape(3, 3)
    order = np.argsort(table.reshape(-1))
    k, v = (x.reshape(9, 8, 2, 32)[order] for x in (k, v))
    return flashgen.KVCache(k, v, LENGTHS, pages=table)


def copied(cache):
    return flashgen.KVCache(cache.k.copy(), cache.v.copy(), cache.lengths, cache.pages)


def tables(rng):
    angles = rng.uniform(-3, 3, (32, 8))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@pytest.mark.drawn
@pytest.mark.parametrize("backend", ON)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (6, 0)}], ids=str)
@pytest.mark.parametrize("rotates", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
def test_it_is_append_and_then_attention(pages, rotates, options, backend):
    rng = np.random.default_rng()
    cache, q, k_new, v_new = cache_of(rng, pages), *(numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2))
    rotary = flashgen.Rotary(*tables(rng)) if rotates else None
    other = copied(cache)
    out = flashgen.attention(q, cache, append=(k_new, v_new), rotary=rotary, backend=backend, **options)

    positions = "each" if options or not rotates else "first"
    total, rotated = flashgen.append(
        other, k_new, v_new, rotary=rotary, q=q if rotates else None, q_positions=positions, backend=backend
    )
    after = flashgen.KVCache(other.k, other.v, total, other.pages)
    np.testing.assert_array_equal(total, LENGTHS + 3)
    np.testing.assert_array_equal(LENGTHS, [5, 0, 19])
    expected = flashgen.attention(rotated if rotates else q, after, backend=backend, **options)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(cache.k.view(np.uint16), other.k.view(np.uint16))
    np.testing.assert_array_equal(cache.v.view(np.uint16), other.v.view(np.uint16))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("name", ["q", "mask", "alibi_slopes"])
def test_what_attention_reads_has_no_memory_in_the_cache(name, held):
    """It is read after the new tokens are there, so the result would be that of other queries or masks."""
    rng = np.random.default_rng()
    cache, q, *new = cache_of(rng, False), *(numbers(rng, 3, 1, heads, 32) for heads in (2, 2, 2))
    inside = {
        "q": cache.k[:, 4:5],
        "mask": cache.v.view(bool).reshape(-1)[: 3 * 24].reshape(3, 1, 1, 24),
        "alibi_slopes": cache.k.reshape(-1)[:4].view(np.float32),
    }
    given = {"q": q, name: inside[name]}
    before = copied(cache)
    seen = "slope" if held and name == "alibi_slopes" else name  # a plan speaks of the score's own arrays

    def call(q, **options):
        if not held:
            return flashgen.attention(q, cache, append=new, **options)
        plan = flashgen.plan(q, cache, append=new, **options)
        named = {"slope" if name == "alibi_slopes" else name: x for name, x in options.items()}
        return plan(q, cache, new, **named)

    with pytest.raises(flashgen.BadTensorStrides, match=f"^[kv] overlaps {seen} in memory; pass separate"):
        call(**given)
    np.testing.assert_array_equal(cache.k.view(np.uint16), before.k.view(np.uint16))
    call(**given | {name: inside[name].copy()})


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("name", ["k_new", "v_new", "lengths", "q", "cos", "sin", "positions"])
def test_results_have_no_memory_in_what_is_appended(name, held):
    """Nothing is written then, not even the cache."""
    rng = np.random.default_rng()
    cache, q, *new = cache_of(rng, False), *(numbers(rng, 3, 3, heads, 32) for heads in (4, 4, 4))
    cache = dataclasses.replace(cache, k=numbers(rng, 3, 24, 4, 32), v=numbers(rng, 3, 24, 4, 32))
    out = numbers(rng, 3, 3, 4, 32)
    inside = out.reshape(-1)
    cos, sin = (table.astype(np.float16) for table in tables(rng))
    places = np.tile(np.arange(3, dtype=np.int32), (3, 1))
    given = {"q": q, "k_new": new[0], "v_new": new[1], "cos": cos, "sin": sin, "lengths": LENGTHS.copy()}
    given["positions"] = places
    x = given[name]
    given[name] = inside.view(x.dtype)[: x.size].reshape(x.shape)
    given[name][:] = x
    cache = dataclasses.replace(cache, lengths=given["lengths"])
    rotary = flashgen.Rotary(given["cos"], given["sin"], positions=given["positions"])
    before = copied(cache)

    def call(**options):
        pair = given["k_new"], given["v_new"]
        if held:
            plan = flashgen.plan(given["q"], cache, append=pair, rotary=rotary)
            return plan(given["q"], cache, pair, rotary=rotary, **options)
        return flashgen.attention(given["q"], cache, append=pair, rotary=rotary, **options)

    with pytest.raises(flashgen.BadTensorStrides, match=f"^out overlaps {name} in memory; pass separate"):
        call(out=out)
    np.testing.assert_array_equal(cache.k, before.k)
    np.testing.assert_array_equal(given[name], x)
    call(out=np.empty_like(out))


@pytest.mark.parametrize("held", [False, True])
def test_a_result_may_lie_between_what_is_appended_and_queries_between_the_keys(held):
    """Of each token: q, k_new, v_new and out; of each slot: a key, and where there is a query, that."""
    rng = np.random.default_rng()
    cache, together, slots = cache_of(rng, False), numbers(rng, 3, 3, 4, 2, 32), numbers(rng, 3, 24, 4, 32)
    between, *new, out = (together[:, :, each] for each in range(4))
    within, slots[:, :, 2:] = slots[:, :3, :2], cache.k

    def call(q, cache, **options):
        if not held:
            return flashgen.attention(q, cache, append=new, **options)
        return flashgen.plan(q, cache, append=new, **options)(q, cache, new, **options)

    for q in (between, within):
        kept, own = together[:, :, :3].copy(), dataclasses.replace(copied(cache), k=slots[:, :, 2:])
        queries = slots[:, :, :2].copy()
        expected = call(q.copy(), copied(cache))
        assert call(q, own, out=out) is out
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(together[:, :, :3], kept)
        np.testing.assert_array_equal(slots[:, :, :2], queries)
        across = together.reshape(3, 3, 8, 32)[:, :, 5:7]
        with pytest.raises(flashgen.BadTensorStrides, match=r"^out overlaps v_new in memory; pass separate"):
            call(q, own, out=across)
    with pytest.raises(flashgen.BadTensorStrides, match=r"^k overlaps q in memory; pass separate"):
        call(slots[:, :3, 1:3], own)


@pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="there is no C++ compiler")
def test_memory_that_a_held_plan_is_given_is_that_of_no_input():
    rng = np.random.default_rng()
    cache = flashgen.KVCache(*(numbers(rng, 3, 512, 2, 32) for _ in "kv"), LENGTHS)
    q, *new = (numbers(rng, 3, 1, heads, 32) for heads in (4, 2, 2))
    mask, rotary = np.zeros((1, 512), np.uint8), flashgen.Rotary(*tables(rng))
    options = {"splits": 2, "backend": "simulator", "mask": mask, "rotary": rotary}
    plan = flashgen.plan(q, cache, append=new, **options)
    room = np.empty(plan.workspace_bytes + 512, np.uint8)
    workspace = room[-room.ctypes.data % 256 :][: plan.workspace_bytes]
    own = workspace[: new[0].nbytes].view(np.float16).reshape(new[0].shape)
    own[:] = new[0]
    total = np.empty(128, np.int32)
    hidden = total.view(np.uint8).reshape(1, 512)
    before = copied(cache)
    for message, given in (
        ("^workspace overlaps k_new in memory", {"append": (own, new[1]), "workspace": workspace}),
        ("^total_lengths overlaps mask in memory", {"mask": hidden, "total_lengths": total[:3]}),
    ):
        with pytest.raises(flashgen.BadTensorStrides, match=message):
            plan(**({"q": q, "cache": cache, "append": new, "rotary": rotary, "mask": mask} | given))
    np.testing.assert_array_equal(cache.k.view(np.uint16), before.k.view(np.uint16))


@pytest.mark.parametrize("held", [False, True])
def test_pairs_that_are_refused_are_refused_after_what_equals_them(held, forget_plans):
    rng = np.random.default_rng()
    cache, q, k_new, v_new = cache_of(rng, False), *(numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2))
    good, bad = (flashgen.Rotary(*tables(rng), interleaved=value) for value in (True, 1.0))
    call = flashgen.attention
    if held:
        plan = flashgen.plan(q, cache, append=(k_new, v_new), rotary=good)
        call = plan
    call(q, cache, append=(k_new, v_new), rotary=good)
    with pytest.raises(errors.BadParam, match=r"^interleaved is 1\.0"):
        call(q, cache, append=(k_new, v_new), rotary=bad)


@pytest.mark.parametrize("backend", ON)
@pytest.mark.parametrize("options", [{}, {"causal": True, "return_lse": True}], ids=str)
@pytest.mark.parametrize("rotates", [False, True], ids=["plain", "rotary"])
def test_a_held_plan_does_what_the_call_does(rotates, options, backend):
    """Of other arrays than it was made with, over several steps, with outputs of the caller's or its own."""
    rng = np.random.default_rng()
    examples = [numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2)]
    rotary = flashgen.Rotary(*tables(rng), interleaved=True) if rotates else None
    made_with = cache_of(rng, pages=True)
    before = copied(made_with)
    options = options | {"softcap": 5.0}
    plan = flashgen.plan(
        examples[0], made_with, append=examples[1:], rotary=rotary, backend=backend, **options
    )
    np.testing.assert_array_equal(made_with.k.view(np.uint16), before.k.view(np.uint16))
    steps = [step.variant.spec for step in plan.steps]
    assert steps[:1] == ([] if backend == "cpu" else ["append_sm80"])
    assert plan.source == plan.attention.source

    first, out, total = cache_of(rng, pages=True), np.empty_like(examples[0]), np.empty(3, np.int32)
    for lengths, given in ((LENGTHS, {}), ([3, 1, 2], {"out": out, "total_lengths": total})):
        cache = flashgen.KVCache(first.k, first.v, np.array(lengths, np.int32), first.pages)
        other = copied(cache)
        q, *new = (numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2))
        found = plan(q, cache, new, rotary=rotary, softmax_scale=0.3, **given)
        expected = flashgen.attention(
            q, other, append=new, rotary=rotary, backend=backend, softmax_scale=0.3, **options
        )
        np.testing.assert_equal(found, expected)
        np.testing.assert_array_equal(cache.k.view(np.uint16), other.k.view(np.uint16))
    assert (found[0] if "return_lse" in options else found) is out
    assert total.tolist() == [6, 4, 5]


def test_a_held_plan_refuses_what_it_was_not_made_for_and_writes_nothing():
    rng = np.random.default_rng()
    cache, q, *new = cache_of(rng, pages=False), *(numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2))
    rotary = flashgen.Rotary(*tables(rng))
    plan = flashgen.plan(q, cache, append=new, rotary=rotary)
    before = copied(cache)
    for error, message, given in (
        (errors.BadParam, "made with interleaved=False", {"rotary": flashgen.Rotary(*tables(rng), True)}),
        (
            errors.BadParam,
            "None; the plan was made with interleaved=False; pass such a Rot",
            {"rotary": None},
        ),
        (errors.BadParam, "rotary has type tuple; expected a flashgen.Rotary", {"rotary": tables(rng)}),
        (errors.BadTensorShape, "out has", {"out": q[:, :2]}),
        (errors.BadParam, "lse was given to a plan made without", {"lse": np.zeros((3, 4, 3), np.float32)}),
        (errors.BadParam, "softmax_scale is -1", {"softmax_scale": -1.0}),
        (errors.BadTensorShape, "k_new has", {"append": [x[:, :2] for x in new]}),
        (errors.BadParam, "append has type ndarray", {"append": q}),
        (errors.BadParam, r"append is a tuple of 3; expected \(k_new, v_new\)", {"append": (q, q, q)}),
        (errors.BadParam, "cache has type ndarray", {"cache": q}),
    ):
        with pytest.raises(error, match=message):
            plan(**({"q": q, "cache": cache, "append": new, "rotary": rotary} | given))
    np.testing.assert_array_equal(cache.k.view(np.uint16), before.k.view(np.uint16))
    with pytest.raises(errors.BadParam, match="rotary was given without append"):
        flashgen.plan(q, cache, rotary=rotary)
    with pytest.raises(errors.BadTensorShape, match=r"^q has seqlen_q 2; the plan was made for 3$"):
        flashgen.plan(q, cache, append=new)(q[:, :2], cache, new)
    with pytest.raises(errors.BadParam, match="q_rotated was given to a plan made without one"):
        flashgen.plan(q, cache, append=new)(q, cache, new, q_rotated=np.zeros_like(q))


@pytest.mark.parametrize("backend", ON)
@pytest.mark.parametrize("made", ["held", "call"])
@pytest.mark.usefixtures("forget_plans")
def test_what_lengths_contradict_is_found_before_the_cache_is_written(made, backend, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    rng = np.random.default_rng()
    cache, q, *new = cache_of(rng, pages=True), *(numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2))
    before = copied(cache)
    options = {"append": new, "max_seqlen_kv": 21, "backend": backend}
    call = partial(flashgen.attention, q, cache, **options)
    if made == "held":
        call = partial(flashgen.plan(q, cache, **options), q, cache, new)
    with pytest.raises(errors.BadParam, match="sequence 2 has length 22; the bound max_seqlen_kv is 21"):
        call()
    np.testing.assert_array_equal(cache.k.view(np.uint16), before.k.view(np.uint16))


@pytest.mark.parametrize("made", ["held", "plan", "call", "append"])
def test_errors_name_the_fields_of_the_cache(made):
    rng = np.random.default_rng()
    cache, q, *new = cache_of(rng, pages=True), *(numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2))
    wrong = flashgen.KVCache(cache.k[:, :, :1], cache.v, cache.lengths, cache.pages)
    call = {
        "held": lambda: flashgen.plan(q, cache, append=new)(q, wrong, new),
        "plan": lambda: flashgen.plan(q, wrong, append=new),
        "call": lambda: flashgen.attention(q, wrong, append=new),
        "append": lambda: flashgen.append(wrong, *new),
    }[made]
    with pytest.raises(errors.BadTensorShape, match=r"^k has num_heads_kv 1|but k has 1 of 32"):
        call()


def test_errors_of_a_held_plan_name_what_its_caller_gave():
    """Not what the two plans in it take."""
    rng = np.random.default_rng()
    cache, q, *new = cache_of(rng, pages=False), *(numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2))
    rotary, mask = flashgen.Rotary(*tables(rng)), np.zeros((3, 24), bool)
    plan = flashgen.plan(q, cache, append=new, rotary=rotary, mask=mask, causal=True)
    before = copied(cache)
    takes = (
        r"the plan takes q, a KVCache with lengths, append=\(k_new, v_new\), rotary with cos and sin, mask$"
    )
    names = (
        "is not an argument; the arguments are q, cache, append, rotary, cu_seqlens_q, total_lengths, "
        "q_rotated, mask, out, lse, sinks, dropout_seed, tree, softmax_scale, stream, workspace$"
    )
    total, shared = np.empty(3, np.int32), np.empty_like(q)

    def other(**fields):
        return {"cache": dataclasses.replace(cache, **fields)}

    for error, message, given in (
        (errors.NullPointer, "^lengths is None; expected an array; " + takes, other(lengths=None)),
        (errors.BadParam, "^index was given to a plan made without one; " + takes, other(index=total)),
        (errors.NullPointer, "^mask is None, but the plan was made with one; " + takes, {"mask": None}),
        (errors.NullPointer, "^k is None; expected an array$", other(k=None)),
        (errors.NullPointer, "^v is None; expected an array$", other(v=None)),
        (errors.BadTensorShape, "^k has capacity 23; the plan was made for 24$", other(k=cache.k[:, :23])),
        (errors.BadParam, "^kv_lengths " + names, {"kv_lengths": total}),
        (errors.BadParam, "^k_cache " + names, {"k_cache": cache.k}),
        (errors.BadParam, "^cu_seqlens_new " + names, {"cu_seqlens_new": total}),
        (errors.BadTensorStrides, "^out overlaps q_rotated in memory", {"out": shared, "q_rotated": shared}),
        (
            errors.BadTensorStrides,
            "^out overlaps total_lengths in memory",
            {"out": shared, "total_lengths": shared.reshape(-1)[:6].view(np.int32)},
        ),
        (errors.BadParam, r"^softmax_scale is -1.0; .* \(negate q instead\)$", {"softmax_scale": -1.0}),
    ):
        with pytest.raises(error, match=message):
            plan(**({"q": q, "cache": cache, "append": new, "rotary": rotary, "mask": mask} | given))
    np.testing.assert_array_equal(cache.k.view(np.uint16), before.k.view(np.uint16))
    plan(q, cache, new, rotary=rotary, mask=mask)


def test_packed_tokens_are_appended_to_their_sequences():
    rng = np.random.default_rng()
    cache, cu = cache_of(rng, pages=True), np.array([0, 2, 2, 5], np.int32)
    q, k_new, v_new = (numbers(rng, 5, heads, 32) for heads in (4, 2, 2))
    out = flashgen.attention(q, cache, causal=True, append=(k_new, v_new), cu_seqlens_q=cu)
    total = np.array([7, 0, 22], np.int32)
    after = flashgen.KVCache(cache.k, cache.v, total, cache.pages)
    np.testing.assert_array_equal(out, flashgen.attention(q, after, causal=True, cu_seqlens_q=cu))


@pytest.mark.parametrize("made", ["held", "plan", "call"])
def test_errors_name_the_lengths_that_the_caller_gave(made):
    """`cu_seqlens_new` is an argument of append() alone."""
    rng = np.random.default_rng()
    cache, q, *new = cache_of(rng, pages=True), *(numbers(rng, 5, heads, 32) for heads in (4, 2, 2))
    cu = np.array([0, 2, 2, 5], np.int32)
    function = flashgen.plan if made == "plan" else flashgen.attention
    call = partial(function, q, cache, append=new)
    if made == "held":
        call = partial(flashgen.plan(q, cache, append=new, cu_seqlens_q=cu), q, cache, new)
    for wrong in (None, cu[:3], cu.astype(np.int64), cu[::-1].copy()):
        if made == "plan" and wrong is not None and wrong[0]:  # elements are looked at by calls
            continue
        with pytest.raises(errors.FlashgenError, match="cu_seqlens_q") as caught:
            call(cu_seqlens_q=wrong)
        assert "cu_seqlens_new" not in str(caught.value)


def test_packed_tokens_of_no_sequence_are_left_out():
    none = np.zeros(0, np.int32)
    cache = flashgen.KVCache(*(np.zeros((1, 8, 2, 32), np.float16) for _ in "kv"), none, index=none)
    q, k_new, v_new = (np.full((3, heads, 32), np.nan, np.float16) for heads in (4, 2, 2))
    rotary, cu = flashgen.Rotary(*tables(np.random.default_rng())), np.zeros(1, np.int32)
    out = flashgen.attention(q, cache, append=(k_new, v_new), rotary=rotary, cu_seqlens_q=cu)
    assert out.shape == q.shape
    assert not cache.k.any()
    assert not cache.v.any()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("tokens", [2, 4])
def test_packed_queries_are_as_many_as_new_tokens(tokens, rotates, held):
    rng = np.random.default_rng()
    cache = flashgen.KVCache(*(np.zeros((2, 8, 2, 32), np.float16) for _ in "kv"), np.zeros(2, np.int32))
    new, cu = (numbers(rng, tokens, 2, 32), numbers(rng, tokens, 2, 32)), np.array([0, 1, 2], np.int32)
    rotary = flashgen.Rotary(*tables(rng)) if rotates else None
    message = f"^q has 3 tokens but k_new has {tokens}; cu_seqlens_q counts the tokens of both, so their"
    with pytest.raises(errors.BadTensorShape, match=message):
        (flashgen.plan if held else flashgen.attention)(
            numbers(rng, 3, 4, 32), cache, append=new, rotary=rotary, cu_seqlens_q=cu
        )
    assert not cache.k.any()


def test_a_page_or_a_position_for_each_sequence_as_a_column():
    """``x[:, None]`` has another stride along its one column than an array that was made so."""
    rng = np.random.default_rng()
    cache, q, *new = cache_of(rng, pages=False), *(numbers(rng, 3, 1, heads, 32) for heads in (4, 2, 2))
    table, angles = rng.permutation(3).astype(np.int32), tables(rng)

    def found(column):
        own = flashgen.KVCache(cache.k.copy(), cache.v.copy(), LENGTHS, pages=column(table))
        rotary = flashgen.Rotary(*angles, positions=column(LENGTHS))
        return flashgen.attention(q, own, append=new, rotary=rotary)

    np.testing.assert_array_equal(found(lambda x: x[:, None]), found(lambda x: x.reshape(3, 1).copy()))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"append": None, "rotary": "tables"}, errors.BadParam, "rotary was given without append"),
        ({"rotary": flashgen.Rotary(None, None)}, errors.NullPointer, "cos is None"),
        ({"append": np.zeros(3)}, errors.BadParam, r"append has type ndarray; expected \(k_new, v_new\)"),
        ({"softmax_scale": -1.0}, errors.BadParam, "softmax_scale is -1"),
        ({"causal": "yes"}, errors.BadParam, "causal is 'yes'"),
        ({"max_seqlen_kv": 2}, errors.BadParam, "max_seqlen_kv is 2 but k_new has 3 tokens"),
        ({"q": np.zeros((3, 3, 3, 32), np.float16)}, errors.BadTensorShape, "q has 3 heads"),
        ({"append": (np.zeros((3, 3, 2, 32), np.float32),) * 2}, errors.BadTensorDtype,
         "^k_new has dtype fp32; expected fp16, as the cache has dtype fp16$"),
        ({"q": np.zeros((3, 3, 4, 32), np.float32)}, errors.BadTensorDtype,
         "^q has dtype fp32; expected fp16, as the cache has dtype fp16$"),
        ({"out": np.zeros((3, 3, 4, 8), np.float16)}, errors.BadTensorShape, "out has shape"),
        ({"out": np.lib.stride_tricks.as_strided(np.zeros((3, 3, 4, 32), np.float16), writeable=False)},
         errors.BadParam, "out is read-only"),
    ],
)  # fmt: skip
def test_a_wrong_call_leaves_the_cache_as_it_was(changes, error, message):
    rng = np.random.default_rng()
    cache = cache_of(rng, pages=False)
    before = copied(cache)
    given = {"q": numbers(rng, 3, 3, 4, 32), "append": (numbers(rng, 3, 3, 2, 32),) * 2} | changes
    if changes.get("rotary") == "tables":
        given["rotary"] = flashgen.Rotary(*tables(rng))
    q = given.pop("q")
    with pytest.raises(error, match=message):
        flashgen.attention(q, cache, **given)
    np.testing.assert_array_equal(cache.k.view(np.uint16), before.k.view(np.uint16))
    np.testing.assert_array_equal(cache.v.view(np.uint16), before.v.view(np.uint16))
    if "max_seqlen_kv" in changes or error is errors.BadTensorDtype:
        with pytest.raises(error, match=message):
            flashgen.plan(q, cache, **given)


@pytest.mark.parametrize(
    ("queries", "options", "error", "message"),
    [
        (
            1,
            {"causal": True},
            errors.BadTensorShape,
            "q has seqlen_q 1 but k_new has seqlen_new 3; with rotary",
        ),
        (5, {"window_size": (6, 0)}, errors.BadTensorShape, "q has seqlen_q 5 but k_new has seqlen_new 3"),
        (3, {"mask": np.zeros((3, 24), bool)}, errors.BadParam, "mask and rotary were given, with 3 queries"),
        (1, {"mask": np.zeros((1, 24), bool)}, None, ""),
        (3, {"mask": np.zeros((3, 24), bool), "causal": True}, None, ""),
        (1, {}, None, ""),
    ],
    ids=[
        "the last query",
        "more queries",
        "a mask alone",
        "a mask, one query",
        "a mask and causal",
        "one query",
    ],
)
def test_queries_are_rotated_to_positions_that_the_call_says(queries, options, error, message):
    """Else they were rotated to others than those at which causal masks have them, or all to the first."""
    rng = np.random.default_rng()
    cache, q = cache_of(rng, pages=False), numbers(rng, 3, queries, 4, 32)
    new = numbers(rng, 3, 3, 2, 32), numbers(rng, 3, 3, 2, 32)
    given = {"append": new, "rotary": flashgen.Rotary(*tables(rng))} | options
    if error is None:
        flashgen.attention(q, cache, **given)
        return
    before = copied(cache)
    with pytest.raises(error, match=f"^{message}"):
        flashgen.attention(q, cache, **given)
    np.testing.assert_array_equal(cache.k.view(np.uint16), before.k.view(np.uint16))
    flashgen.attention(q, cache, **given | {"rotary": None})
    if queries == 3:
        places = np.arange(3, dtype=np.int32) + LENGTHS[:, None]
        flashgen.attention(q, cache, **given | {"rotary": flashgen.Rotary(*tables(rng), positions=places)})


def test_a_window_in_an_array():
    rng = np.random.default_rng()
    cache, q, *new = cache_of(rng, pages=False), *(numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2))
    rotary = flashgen.Rotary(*tables(rng))
    for window in ((-1, -1), (6, 0)):
        both = (
            flashgen.attention(q, copied(cache), append=new, rotary=rotary, window_size=x)
            for x in (window, np.array(window))
        )
        np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_other_libraries(library, held):
    """The result is of the library of q; a cache of NumPy is written to where the others are JAX's."""
    module = pytest.importorskip("torch" if library == "torch" else "jax.numpy")
    into = module.from_numpy if library == "torch" else module.asarray
    rng = np.random.default_rng()
    cache, q, *new = cache_of(rng, pages=True), *(numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2))
    angles, slopes = tables(rng), rng.random(4, np.float32)
    expected, lse = flashgen.attention(
        q, copied(cache), append=new, rotary=flashgen.Rotary(*angles), alibi_slopes=slopes, return_lse=True
    )
    rotary, slopes = flashgen.Rotary(*map(into, angles)), into(slopes)
    given = into(q), cache
    if library == "torch":
        given = into(q), flashgen.KVCache(*(into(getattr(cache, f)) for f in ("k", "v", "lengths", "pages")))
    options = {"append": tuple(map(into, new)), "rotary": rotary}
    if held:
        plan = flashgen.plan(*given, **options, alibi_slopes=slopes, return_lse=True)
        found = plan(*given, **options, slope=slopes)
    else:
        found = flashgen.attention(*given, **options, alibi_slopes=slopes, return_lse=True)
    for array, like in zip(found, (expected, lse), strict=True):
        assert type(array) is type(given[0])
        np.testing.assert_array_equal(np.asarray(array), like)


def test_positions_of_queries_that_nothing_would_look_at_are_refused():
    rng = np.random.default_rng()
    cache, q, *new = cache_of(rng, pages=False), *(numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2))
    before, angles = copied(cache), tables(rng)
    placed = flashgen.Rotary(*angles, positions=np.zeros((3, 3), np.int32))
    for given, message in (
        ({}, "q is None"),
        ({"rotary": flashgen.Rotary(*angles)}, "q is None"),
        ({"rotary": placed, "q": q}, "rotary has positions"),
    ):
        with pytest.raises(errors.BadParam, match=f"^q_positions is 'first' and {message}"):
            flashgen.append(cache, *new, q_positions="first", **given)
    np.testing.assert_array_equal(cache.k.view(np.uint16), before.k.view(np.uint16))
    flashgen.append(cache, *new, q=q, rotary=placed)
    flashgen.attention(q, before, append=new, rotary=placed)


def test_append_needs_a_cache():
    q = np.zeros((1, 1, 2, 32), np.float16)
    for call in (flashgen.attention, flashgen.plan):
        with pytest.raises(errors.BadParam, match=r"k has type ndarray; .* k to be a flashgen\.KVCache"):
            call(q, q, q, append=(q, q))


def test_a_cache_and_angles_are_printed_as_shapes():
    cache = flashgen.KVCache(np.zeros((2, 8, 1, 8)), np.zeros((2, 8, 1, 8)), LENGTHS)
    assert repr(cache) == "KVCache(k=(2, 8, 1, 8), v=(2, 8, 1, 8), lengths=(3,))"
    assert repr(flashgen.Rotary(np.zeros((4, 8)), None)) == "Rotary(cos=(4, 8), interleaved=False)"


def test_arrays_of_several_libraries_are_called_by_their_own():
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    rng = np.random.default_rng()
    cache, *given = cache_of(rng, pages=False), *(numbers(rng, 3, 3, heads, 32) for heads in (4, 2, 2))
    cache = flashgen.KVCache(*map(torch.from_numpy, (cache.k, cache.v, cache.lengths)))
    q, *new = map(torch.from_numpy, given)
    with pytest.raises(errors.BadParam, match=r"^v_new is a jax array but k_new is a torch one"):
        flashgen.append(cache, new[0], jnp.asarray(given[2]))
    with pytest.raises(errors.BadParam, match=r"^k_new is a torch array but q is a jax one"):
        flashgen.attention(jnp.asarray(given[0]), cache, append=new)
    slopes = torch.ones(4)
    plan = flashgen.plan(q, cache, append=new, alibi_slopes=slopes)
    with pytest.raises(errors.BadParam, match=r"^lengths is a torch array but k_new is a jax one"):
        plan(q, cache, (jnp.asarray(given[1]), jnp.asarray(given[2])), slope=slopes)
    for changed in ({"q": jnp.asarray(given[0])}, {"slope": jnp.ones(4)}):
        (name,) = changed
        with pytest.raises(errors.BadParam, match=f"^{name} is a jax array but k_new is a torch one"):
            plan(**{"q": q, "cache": cache, "append": new, "slope": slopes} | changed)
