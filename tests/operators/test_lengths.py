import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen import errors
from flashgen.operators.arguments import ArrayView, Expected
from flashgen.operators.attention import normalise
from flashgen.operators.masks import UNBOUNDED, Band
from flashgen.operators.sequences import sequences


def view(*shape, dtype="fp16", device=0):
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return ArrayView("cupy", 4096, shape, strides, dtype, device)


def integers(*shape, **changes):
    return view(*shape, **({"dtype": "int32"} | changes))


PADDED = {"q": view(3, 5, 4, 64), "k": view(3, 7, 2, 64), "v": view(3, 7, 2, 64), "kv_lengths": integers(3)}
PACKED = {
    "q": view(20, 4, 64),
    "k": view(30, 2, 64),
    "v": view(30, 2, 64),
    "cu_seqlens_q": integers(4),
    "cu_seqlens_kv": integers(4),
}
PAGED = PADDED | {"k": view(9, 16, 2, 64), "v": view(9, 16, 2, 64), "pages": integers(3, 4)}


def call(given, **changes):
    given = {name: x for name, x in (given | changes).items() if x is not None}
    return normalise(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def capacity(problem):
    return problem.lengths.capacity(problem.batch)


def test_sizes_are_called_what_callers_call_them():
    spoken = {
        kind: [
            call(given).symbol_name(symbol)
            for symbol in ("batch_q", "rows_q", "batch_kv", "rows_kv", "head_dim")
        ]
        for kind, given in (("padded", PADDED), ("packed", PACKED), ("paged", PAGED))
    }
    assert spoken == {
        "padded": ["batch", "seqlen_q", "batch", "seqlen_kv", "head_dim"],
        "packed": ["batch", "tokens", "batch", "tokens", "head_dim"],
        "paged": ["batch", "seqlen_q", "pages", "page_size", "head_dim"],
    }


def hidden(problem, q_length, kv_length):
    """What a problem of one sequence hides, as attention of the two lengths alone would."""
    own = problem.of_sequence(q_length, kv_length)
    rows, keys = np.arange(q_length)[:, None], np.arange(kv_length)
    found = Band.of(own).hides(rows, keys)
    return np.zeros((q_length, kv_length), bool) if found is None else found


@given(st.integers(0, 6), st.integers(0, 8), st.integers(-1, 8), st.integers(-1, 8), st.booleans())
def test_masks_align_with_the_end_of_each_sequence(q_length, kv_length, left, right, causal):
    right = min(right, 0) if causal else right
    problem = call(PACKED, causal=causal, window_size=(left, right), max_seqlen_q=6, max_seqlen_kv=8)
    seen = np.full((q_length, kv_length), True)
    for i in range(q_length):
        for j in range(kv_length):
            distance = j - (i + kv_length - q_length)
            seen[i, j] = (left < 0 or distance >= -left) and (right < 0 or distance <= right)
            seen[i, j] &= not causal or distance <= 0
    assert np.array_equal(~hidden(problem, q_length, kv_length), seen)


def test_bounds_choose_the_cheapest_mask_and_no_bound_hides_a_key():
    assert call(PACKED, causal=True).mask_type == "causal"
    assert call(PACKED, causal=True, max_seqlen_q=1).mask_type == "none"
    assert call(PACKED, window_size=(29, 19)).mask_type == "none"
    assert call(PACKED, window_size=(28, -1)).mask_type == "local"
    assert call(PADDED, causal=True).values({"gqa": "packed"})["diagonal_offset"] == 0
    assert call(PADDED, window_size=(-1, 2)).values({"gqa": "packed"})["diagonal_offset"] == 2


@given(st.integers(1, 6), st.integers(0, 8), st.integers(-1, 8), st.booleans())
def test_a_band_beside_a_dense_mask_aligns_with_the_end_of_each_sequence(q_length, kv_length, left, causal):
    mask = view(q_length, 8, dtype="bool")
    problem = call(
        PADDED | {"q": view(3, q_length, 4, 64)},
        mask=mask,
        max_seqlen_kv=8,
        k=view(3, 9, 2, 64),
        v=view(3, 9, 2, 64),
        causal=causal,
        window_size=(left, -1),
    )
    assert problem.mask_type == problem.of_sequence(q_length, kv_length).mask_type == "dense"
    distance = np.arange(kv_length) - np.arange(q_length)[:, None] - (kv_length - q_length)
    seen = ((left < 0) | (distance >= -left)) & (not causal or distance <= 0)
    assert np.array_equal(~hidden(problem, q_length, kv_length), seen)


@pytest.mark.parametrize("given", [PADDED, PACKED, PAGED])
def test_equal_layouts_make_equal_problems_and_results_have_the_shape_of_q(given):
    problem = call(given, return_lse=True)
    assert problem == call(given, return_lse=True)
    assert problem.out_shape == given["q"].shape
    *batch, rows, heads, _ = given["q"].shape
    assert problem.lse_shape == (*batch, heads, rows)


def test_what_arrays_hold_bounds_lengths():
    assert (call(PADDED).seqlen_q, call(PADDED).seqlen_kv) == (5, 7)
    assert (call(PACKED).seqlen_q, call(PACKED).seqlen_kv) == (20, 30)
    assert call(PAGED).seqlen_kv == capacity(call(PAGED)) == 64
    nothing = call(PAGED, k=view(0, 16, 2, 64), v=view(0, 16, 2, 64))
    assert nothing.seqlen_kv == capacity(nothing) == 0
    none = {"q": view(0, 5, 4, 64), "k": view(0, 7, 2, 64), "v": view(0, 7, 2, 64), "kv_lengths": integers(0)}
    assert call(none, mask=view(5, 7, dtype="bool")).empty
    assert (
        call(PACKED, max_seqlen_q=99, max_seqlen_kv=12).sizes.items()
        >= {"seqlen_q": 20, "seqlen_kv": 12}.items()
    )


@pytest.mark.parametrize("given", [PADDED, PACKED, PAGED])
def test_an_expected_bound_chooses_the_kernel_and_cuts_no_key(given):
    without = call(given)
    for bound in (0, 3, 7, 99):
        problem = call(given, max_seqlen_kv=Expected(bound))
        assert problem.seqlen_kv == min(bound, capacity(without))
        assert problem.values({})["seqlen_kv"] == problem.lengths.most_keys == capacity(without)
        fixed = call(given, max_seqlen_kv=bound)
        assert (
            fixed.values({})["seqlen_kv"] == fixed.lengths.most_keys == fixed.seqlen_kv == problem.seqlen_kv
        )
    assert call(given, max_seqlen_kv=Expected(None)) == without


@pytest.mark.parametrize(("bound", "seqlen_q"), [(None, 20), (0, 20), (6, 20), (7, 7), (19, 19), (99, 20)])
def test_an_expected_bound_cuts_queries_only_where_the_tokens_do_not_contradict_it(bound, seqlen_q):
    assert call(PACKED, max_seqlen_q=Expected(bound)).seqlen_q == seqlen_q


@given(st.integers(0, 6), st.integers(0, 30), st.integers(-1, 8), st.integers(-1, 8), st.booleans())
def test_an_expected_bound_hides_the_keys_of_the_window(q_length, kv_length, left, right, causal):
    options = {"causal": causal, "window_size": (left, min(right, 0) if causal else right)}
    fixed = call(PACKED, max_seqlen_q=6, **options)
    expected = call(PACKED, max_seqlen_q=6, max_seqlen_kv=Expected(5), **options)
    np.testing.assert_array_equal(hidden(expected, q_length, kv_length), hidden(fixed, q_length, kv_length))


@pytest.mark.parametrize(
    ("given", "changes", "error", "message"),
    [
        (PADDED, {"kv_lengths": integers(3, dtype="int64")}, errors.BadTensorDtype,
         "kv_lengths has dtype int64; expected int32"),
        (PADDED, {"kv_lengths": integers(3, device=None)}, errors.DeviceTypeNotSupported,
         "kv_lengths is in host memory but q is on GPU 0"),
        (PADDED, {"kv_lengths": integers(4)}, errors.BadTensorShape,
         "kv_lengths is for a batch of 4 but q for one of 3"),
        (PADDED, {"kv_lengths": integers(3, 1)}, errors.BadTensorShape,
         r"kv_lengths has shape \(3, 1\); expected \(batch,\)$"),
        (PACKED, {"cu_seqlens_q": integers(2, 2)}, errors.BadTensorShape,
         r"cu_seqlens_q has shape \(2, 2\); expected \(batch \+ 1,\)$"),
        (PADDED, {"index": integers(2)}, errors.BadTensorShape, "index is for a batch of 2"),
        (PADDED, {"k": view(4, 7, 2, 64), "v": view(4, 7, 2, 64)}, errors.BadTensorShape,
         "k has batch 4, and there are 3 sequences; index"),
        (PADDED, {"q": view(5, 4, 64)}, errors.BadTensorShape,
         r"with kv_lengths it is \(batch, seqlen_q, num_heads_q, head_dim\); packed .* need cu_seqlens_q$"),
        (PADDED, {"q": view(3, 4, 64)}, errors.BadTensorShape,
         r"packed queries need cu_seqlens_q, and one query of each sequence goes in as q\[:, None\]$"),
        (PACKED, {"cu_seqlens_kv": None}, errors.BadTensorShape,
         r"k has shape \(30, 2, 64\); with cu_seqlens_q it is .* packed keys need cu_seqlens_kv"),
        (PADDED, {"kv_lengths": None, "index": integers(3)}, errors.NullPointer, "index needs kv_lengths"),
        (PADDED, {"max_seqlen_q": 4}, errors.BadParam,
         "max_seqlen_q is 4; expected 5, the queries of each sequence"),
        (PADDED, {"max_seqlen_kv": -1}, errors.BadParam, "max_seqlen_kv is -1; expected 0 or more"),
        (PADDED, {"max_seqlen_kv": 2.5}, errors.BadParam, "max_seqlen_kv is 2.5; expected an integer"),
        (PADDED, {"max_seqlen_kv": True}, errors.BadParam, "max_seqlen_kv is True; expected an integer"),
        (PADDED, {"mask_type": "causal_top_left"}, errors.BadParam,
         "mask_type is 'causal_top_left'; sequences"),
        (PACKED, {"mask": view(20, 30, dtype="bool")}, errors.BadParam,
         "mask and cu_seqlens_q were given; a mask needs as many rows"),
        (PAGED, {"mask": view(5, 63, dtype="bool")}, errors.BadTensorShape,
         r"mask has shape \(5, 63\); it must broadcast, from the right, to .* = \(3, 4, 5, 64\), .* "
         "must be the keys that a sequence has room for, 64$"),
        (PAGED, {"mask": view(5, 64, dtype="bool"), "max_seqlen_kv": 63}, errors.BadTensorShape,
         "its last dimension must be max_seqlen_kv, 63$"),
        (PADDED, {"mask": view(3, 7, dtype="bool")}, errors.BadTensorShape,
         "leave it out, as kv_lengths say the same: keys after them are not read"),
        (PADDED, {"mask": view(5, 7)}, errors.BadTensorDtype, "mask has dtype fp16; expected bool"),
        (PADDED, {"mask": view(5, 7, dtype="bool", device=1)}, errors.DeviceTypeNotSupported,
         "mask is on GPU 1"),
        (PADDED, {"mask_type": "dense"}, errors.NullPointer, "mask_type 'dense' needs mask"),
        (PADDED, {"out": view(3, 5, 4, 32)}, errors.BadTensorShape, "out has shape"),
        (PADDED, {"v": view(3, 6, 2, 64)}, errors.BadTensorShape, "v has shape"),
        (PADDED, {"q": view(3, 5, 3, 64)}, errors.BadTensorShape, "q has 3 heads, k has 2"),
        (PACKED, {"cu_seqlens_q": integers(5)}, errors.BadTensorShape,
         "cu_seqlens_kv is for a batch of 3 but cu_seqlens_q for one of 4"),
        (PACKED, {"cu_seqlens_q": integers(0)}, errors.BadTensorShape, "cu_seqlens_q has shape"),
        (PACKED, {"kv_lengths": integers(3)}, errors.BadParam, "packed keys have no kv_lengths"),
        (PACKED, {"k": view(1, 30, 2, 64)}, errors.BadTensorShape,
         r"it is \(tokens, num_heads_kv, head_dim\)"),
        (PAGED, {"index": integers(3)}, errors.BadParam, "pages and index were given"),
        (PAGED, {"pages": integers(12)}, errors.BadTensorShape, r"expected \(batch, max_pages\)"),
        (PAGED, {"pages": integers(3, 4, dtype="uint8")}, errors.BadTensorDtype, "pages has dtype uint8"),
        (PAGED, {"k": view(144, 2, 64), "v": view(144, 2, 64)}, errors.BadTensorShape,
         r"\(pages, page_size, num_heads_kv, head_dim\)"),
    ],
)  # fmt: skip
def test_bad_input_is_named(given, changes, error, message):
    with pytest.raises(error, match=message):
        call(given, **changes)


def lengths(**given):
    names = ("cu_seqlens_q", "cu_seqlens_kv", "kv_lengths", "index", "pages")
    return {name: None if name not in given else np.array(given[name], np.int32) for name in names}


@pytest.mark.parametrize(
    ("given", "arrays", "message"),
    [
        (PADDED, {"kv_lengths": [1, 8, 2]}, r"kv_lengths\[1\] is 8; expected 0 to 7, the capacity of k"),
        (PADDED, {"kv_lengths": [1, 2, -1]}, r"kv_lengths\[2\] is -1"),
        (PACKED, {"cu_seqlens_q": [0, 4, 3, 20], "cu_seqlens_kv": [0, 1, 2, 3]},
         "cu_seqlens_q goes from 4 to 3 in sequence 1"),
        (PACKED, {"cu_seqlens_q": [0, 4, 5, 21], "cu_seqlens_kv": [0, 1, 2, 3]},
         "must not decrease, or exceed the 20 tokens"),
        (PACKED, {"cu_seqlens_q": [1, 4, 5, 20], "cu_seqlens_kv": [0, 1, 2, 3]},
         r"cu_seqlens_q\[0\] is 1; expected 0"),
        (PAGED, {"kv_lengths": [64, 17, 0], "pages": [[0, 1, 2, 3], [4, 9, -1, -1], [-1] * 4]},
         r"pages\[1, 1\] is 9; there are 9 pages"),
    ],
)  # fmt: skip
def test_lengths_that_the_host_can_read_are_checked(given, arrays, message):
    with pytest.raises(errors.BadParam, match=message):
        sequences(call(given), lengths(**arrays))


def test_a_bound_below_a_length_and_a_wrong_row_of_a_cache_are_found():
    with pytest.raises(errors.BadParam, match="sequence 2 has length 6; the bound max_seqlen_kv is 5"):
        sequences(call(PADDED, max_seqlen_kv=5), lengths(kv_lengths=[5, 0, 6]))
    with pytest.raises(errors.BadParam, match=r"index\[0\] is 3; k has 3 rows"):
        sequences(call(PADDED, index=integers(3)), lengths(kv_lengths=[5, 0, 6], index=[3, 0, 0]))


def test_entries_of_the_page_table_past_a_length_are_not_looked_at():
    found = sequences(
        call(PAGED), lengths(kv_lengths=[0, 16, 17], pages=[[99] * 4, [8, 99, 99, 99], [7, 6, 99, 99]])
    )
    assert [each.pages.tolist() for each in found] == [[], [8], [7, 6]]


def test_a_side_that_no_length_reaches_is_unbounded():
    problem = call(PADDED, window_size=(6, 4))
    assert (problem.window_left, problem.window_right) == (UNBOUNDED, UNBOUNDED)
