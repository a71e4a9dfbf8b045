"""Which mask the options of a call ask for, and what simplifying it keeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen import errors
from flashgen.operators.arguments import view_of_shape
from flashgen.operators.attention import normalise
from flashgen.operators.maskoptions import KernelMask, sees_no_later_key, simplify
from flashgen.operators.masks import UNBOUNDED, Band

MASK = view_of_shape((5, 7), "bool", 0)


def call(q=(2, 5, 4, 64), kv=(2, 7, 2, 64), **options):
    return normalise(*(view_of_shape(shape, "fp16", 0) for shape in (q, kv, kv)), **options)


def visible(mask_type, seqlen_q, seqlen_kv, offset, left, right):
    row = np.arange(seqlen_q)[:, None] + offset
    key = np.arange(seqlen_kv)
    seen = np.full((seqlen_q, seqlen_kv), True)
    if mask_type in ("causal", "local") and right < UNBOUNDED:
        seen &= key <= row + right
    if mask_type == "local" and left < UNBOUNDED:
        seen &= key >= row - left
    return seen


sides = st.integers(0, 12) | st.just(UNBOUNDED)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(-12, 12), sides, sides)
def test_simplify_hides_the_same_keys_and_leaves_no_side_that_hides_nothing(rows, keys, offset, left, right):
    before = visible("local", rows, keys, offset, left, right)
    kind, offset, left, right = simplify(KernelMask("local", offset, left, right), rows, keys)
    assert np.array_equal(visible(kind, rows, keys, offset, left, right), before)
    hides_late = ~visible("local", rows, keys, offset, UNBOUNDED, right)
    hides_early = ~visible("local", rows, keys, offset, left, UNBOUNDED)
    expected = "local" if hides_early.any() else "causal" if hides_late.any() else "none"
    assert kind == expected
    assert (kind != "causal") or (left, right) == (UNBOUNDED, 0)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(-12, 12), sides, sides)
def test_simplify_keeps_a_dense_mask_and_treats_its_band_alike(rows, keys, offset, left, right):
    local, dense = (KernelMask(kind, offset, left, right) for kind in ("local", "dense"))
    alone = simplify(local, rows, keys)
    assert simplify(dense, rows, keys) == alone._replace(mask_type="dense")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window_size": (True, 0)}, r"window_size is \(True, 0\); expected two integers"),
        ({"window_size": (3, False)}, r"window_size is \(3, False\); expected two integers"),
        ({"window_size": (1.0, 0)}, r"window_size is \(1\.0, 0\); expected two integers"),
        ({"mask_type": True}, "mask_type is True; allowed are 0 'none'"),
        ({"window_size": {3, 1}}, "window_size is {1, 3}; expected two integers"),
        ({"window_size": {3: 1, 1: 3}}, "window_size is {3: 1, 1: 3}; expected two integers"),
        ({"window_size": b"\x01\x02"}, "window_size is b'.*; expected two integers"),
        ({"window_size": iter((3, 1))}, "window_size is .*; expected two integers"),
    ],
)
def test_what_is_no_integer_is_refused(options, says):
    with pytest.raises(errors.BadParam, match=says):
        call(**options)


def test_a_band_beside_a_mask_that_hides_nothing_is_dropped():
    assert simplify(KernelMask("dense", 3, 4, 5), 1, 1) == ("dense", 0, UNBOUNDED, UNBOUNDED)
    one_query = {"q": (2, 1, 4, 64), "mask": view_of_shape((1, 7), "bool", 0)}
    assert call(causal=True, **one_query) == call(**one_query)
    assert call(mask=MASK, window_size=(11, 6)) == call(mask=MASK)


@given(st.integers(0, 6), st.integers(0, 6), st.integers(-1, 8), st.integers(-1, 8), st.booleans())
def test_window_is_aligned_bottom_right_and_causal_bounds_its_right(rows, keys, left, right, causal):
    if causal and right > 0:
        right = 0
    problem = call((1, rows, 2, 64), (1, keys, 2, 64), window_size=(left, right), causal=causal)
    seen = np.full((rows, keys), True)
    for i in range(rows):
        for j in range(keys):
            distance = j - (i + keys - rows)
            seen[i, j] = (left < 0 or distance >= -left) and (right < 0 or distance <= right)
            if causal:
                seen[i, j] &= distance <= 0
    got = visible(
        problem.mask_type, rows, keys, problem.diagonal_offset, problem.window_left, problem.window_right
    )
    assert np.array_equal(got, seen)


@pytest.mark.parametrize(
    ("number", "name"), list(enumerate(["none", "dense", "causal_top_left", "causal_bottom_right"]))
)
def test_mask_types_go_by_number_and_by_name(number, name):
    mask = MASK if name == "dense" else None
    assert call(mask_type=number, mask=mask) == call(mask_type=name, mask=mask)


def test_the_alignments_of_causal():
    assert call(mask_type="causal_top_left").diagonal_offset == 0
    assert call(mask_type="causal_bottom_right").diagonal_offset == 2
    assert call(causal=True) == call(mask_type=3) == call(mask_type="causal") == call(window_size=(-1, 0))


def test_causal_hides_later_keys_whatever_it_is_called():
    """What ALiBi's linear form rests on. From the top left, queries beyond the keys see later keys."""
    assert all(sees_no_later_key(False, each, (-1, -1)) for each in (3, "causal", "causal_bottom_right"))
    assert sees_no_later_key(False, np.int64(3), (-1, -1))
    assert not any(sees_no_later_key(False, each, (-1, -1)) for each in (None, 0, 2, "causal_top_left"))
    assert not sees_no_later_key(False, np.arange(3), (-1, -1))  # an error, which another function raises


def test_a_window_is_no_mask_type():
    with pytest.raises(errors.BadParam, match=r"mask_type is 'local'; .*a window is window_size"):
        call(mask_type="local")


@pytest.mark.parametrize("wrong", [np.zeros((5, 7), bool), np.arange(2), np.zeros(0), ["none"], "", 4, 1.0])
def test_what_is_no_mask_type_is_named(wrong):
    with pytest.raises(errors.BadParam, match=r"^mask_type is [^;]*; allowed are 0 'none'"):
        call(mask_type=wrong)


TOGETHER = [
    {"causal": True},
    {"mask_type": 2},
    {"mask_type": "causal_top_left"},
    {"mask_type": 3},
    {"mask_type": "causal_bottom_right"},
    {"mask_type": "causal"},
    {"window_size": (1, 0)},
    {"window_size": (-1, 1)},
    {"window_size": (1, -1)},
    {"causal": True, "window_size": (1, -1)},
]


@pytest.mark.parametrize("options", TOGETHER, ids=str)
def test_a_mask_goes_with_a_diagonal_and_with_a_window(options):
    alone, both = call(**options), call(mask=MASK, **options)
    assert alone.mask_type in ("causal", "local")
    assert both.mask_type == "dense"
    assert Band.of(both) == Band.of(alone)
    assert both.array("mask").strides == (0, 0, 7)
    if "mask_type" not in options:
        assert (
            call(mask=MASK, mask_type="dense", **options) == call(mask=MASK, mask_type=1, **options) == both
        )


CONTRADICTIONS = [
    {"mask": MASK, "mask_type": "none"},
    {"mask": MASK, "mask_type": 0, "causal": True},
    {"mask": MASK, "mask_type": 0, "window_size": (3, 0)},
    {"mask": MASK, "mask_type": 2, "causal": True},
    {"mask": MASK, "mask_type": 2, "window_size": (3, 0)},
    {"mask": MASK, "causal": True, "window_size": (3, 1)},
    {"mask": MASK, "mask_type": 3, "window_size": (-1, 4)},
    {"causal": True, "mask_type": 0},
    {"causal": True, "mask_type": "causal_top_left"},
    {"mask": MASK, "mask_type": "causal", "window_size": (-1, 4)},
    {"causal": True, "window_size": (3, 1)},
    {"mask_type": 3, "window_size": (-1, 4)},
    {"mask_type": 2, "window_size": (3, 0)},
    {"mask_type": 4},
    {"mask_type": -1},
    {"mask_type": 1.0},
    {"window_size": (-2, 0)},
    {"window_size": (1,)},
    {"window_size": 3},
    {"window_size": (1.5, 0)},
    {"window_size": None},
]


@pytest.mark.parametrize("options", CONTRADICTIONS, ids=str)
def test_options_that_contradict_each_other(options):
    with pytest.raises(errors.BadParam):
        call(**options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 0)}], ids=str)
def test_dense_without_a_mask(options):
    with pytest.raises(errors.NullPointer, match="mask"):
        call(mask_type="dense", **options)
