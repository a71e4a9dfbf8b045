"""merge against one attention over all keys, in float64."""

import numpy as np
import pytest

import flashgen
from api.parts import BATCH, DTYPES, HEADS, ROWS, WIDTH, assert_right, keys, normal
from flashgen import errors


@pytest.fixture(autouse=True)
def fresh_plans(forget_plans, monkeypatch):
    monkeypatch.delenv("FLASHGEN_BACKEND", raising=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(20, 9), (1, 30, 7), (0, 12), (5, 0, 0, 8)])
def test_merge_is_attention_over_all_keys(counts, dtype):
    q = normal(BATCH, ROWS, HEADS, WIDTH, dtype=DTYPES[dtype])
    given = [keys(count, dtype=DTYPES[dtype]) for count in counts]
    results = [flashgen.attention(q, k, v, return_lse=True) for k, v in given]
    out, lse = flashgen.merge(results)
    assert (out.dtype, lse.dtype) == (q.dtype, np.float32)
    assert_right(out, lse, q, given, dtype)


def test_several_parts_are_merged_in_order():
    q = normal(BATCH, ROWS, HEADS, WIDTH, dtype=np.float16)
    three = [flashgen.attention(q, *keys(9, dtype=np.float16), return_lse=True) for _ in range(3)]
    stepwise = flashgen.merge([flashgen.merge(three[:2]), three[2]])
    out, lse_out = np.empty_like(three[0][0]), np.empty_like(three[0][1])
    at_once = flashgen.merge(three, out=out, lse_out=lse_out)
    assert at_once[0] is out
    assert at_once[1] is lse_out
    for found, right in zip(at_once, stepwise, strict=True):
        np.testing.assert_array_equal(found, right)


def test_one_part_is_returned_as_it_is():
    o, lse = flashgen.attention(normal(2, 5, 2, 8), *(normal(2, 5, 2, 8) for _ in "kv"), return_lse=True)
    found = flashgen.merge([(o, lse)])
    assert found[0] is o
    assert found[1] is lse
    with pytest.raises(errors.BadParam, match="out was given with one part"):
        flashgen.merge([(o, lse)], out=np.empty_like(o))
    with pytest.raises(errors.BadTensorDtype, match=r"^lse of parts\[0\] has dtype"):
        flashgen.merge([(o, lse.astype(np.float16))])


@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_several_libraries_are_called_by_their_own(count):
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    part = flashgen.attention(normal(2, 5, 2, 8), *(normal(2, 5, 2, 8) for _ in "kv"), return_lse=True)
    parts = [tuple(map(torch.from_numpy, part))] * (count - 1) + [tuple(map(jnp.asarray, part))]
    with pytest.raises(
        errors.BadParam,
        match=rf"^o of parts\[{count - 1}\] is a jax array but o of parts\[0\] is a torch one",
    ):
        flashgen.merge(parts)


def test_merge_names_what_is_wrong_before_it_writes():
    o, lse = normal(2, 5, 2, 8), normal(2, 2, 5)
    whole = [(o, lse)] * 3
    out, lse_out = np.full_like(o, np.nan), np.full_like(lse, np.nan)
    wrong = [
        ([], errors.BadParam, "a list of 0"),
        (None, errors.BadParam, "None"),
        ([(o, lse, o)], errors.BadParam, r"parts\[0\]"),
        (
            [(o, lse), (o[:1], lse)],
            errors.BadTensorShape,
            r"^o of parts\[1\] has shape .* but o of parts\[0\] has",
        ),
        ([*whole, (o[:1], lse)], errors.BadTensorShape, r"^o of parts\[3\] has shape"),
        ([*whole, (o, lse.astype(np.float16))], errors.BadTensorDtype, r"^lse of parts\[3\]"),
        ([*whole, (o, None)], errors.NullPointer, r"^lse of parts\[3\] is None"),
        ([*whole, (o, "lse")], errors.BadTensorDtype, r"^lse of parts\[3\]"),
    ]
    for given, error, words in wrong:
        with pytest.raises(error, match=words):
            flashgen.merge(given, out=out, lse_out=lse_out)
    with pytest.raises(errors.BadTensorStrides, match="out overlaps"):
        flashgen.merge([(o, lse)] * 3, out=o)
    third = o.copy(), lse.copy()
    for name, x, other in (("out", third[0], "o"), ("lse_out", third[1], "lse")):
        with pytest.raises(
            errors.BadTensorStrides, match=rf"^{name} overlaps {other} of parts\[2\] in memory"
        ):
            flashgen.merge([(o, lse), (o, lse), third], **{name: x})
    assert np.isnan(out).all()
    assert np.isnan(lse_out).all()


@pytest.mark.parametrize("count", [2, 3])
def test_an_out_between_the_rows_of_the_parts(count):
    together, lse = normal(2, 5, count + 1, 2, 8), normal(2, 2, 5)
    given, out = [(together[:, :, each], lse) for each in range(count)], together[:, :, count]
    before = together[:, :, :count].copy()
    expected, _ = flashgen.merge(given)
    assert flashgen.merge(given, out=out)[0] is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(together[:, :, :count], before)
    across = together.reshape(2, 5, -1, 8)[:, :, 2 * count - 1 : 2 * count + 1]
    with pytest.raises(errors.BadTensorStrides, match=rf"^out overlaps o of parts\[{count - 1}\] in memory"):
        flashgen.merge(given, out=across)


def test_libraries_do_not_mix():
    torch = pytest.importorskip("torch")
    o, lse = normal(2, 5, 2, 8), normal(2, 2, 5)
    for given in ([(o, lse), (torch.from_numpy(o), lse)], [(o, lse), (o, lse), (o, torch.from_numpy(lse))]):
        with pytest.raises(errors.BadParam, match="is a torch array"):
            flashgen.merge(given)


@pytest.mark.parametrize("count", [2, 3])
def test_parts_the_other_way_round_are_named(count):
    o, lse = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 4, 5), np.float32)
    with pytest.raises(
        errors.BadTensorShape, match=r"^o of parts\[0\] has shape .* a part is \(o, lse\), not \(lse, o\)$"
    ):
        flashgen.merge([(lse, o)] * count)
    with pytest.raises(errors.BadTensorShape, match=r"^o of parts\[1\] has shape .* not \(lse, o\)$"):
        flashgen.merge([(o, lse), (lse, o)])
