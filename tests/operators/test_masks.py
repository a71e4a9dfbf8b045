import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.operators import masks
from flashgen.operators.masks import UNBOUNDED, Band, hidden_keys, visible_keys

sides = st.integers(0, 12) | st.just(UNBOUNDED)
bands = st.builds(Band, st.integers(-12, 12), sides, sides)


def sees(band, row, key):
    """The definition, for one row and one key."""
    distance = key - (row + band.diagonal_offset)
    return (band.left == UNBOUNDED or distance >= -band.left) and (
        band.right == UNBOUNDED or distance <= band.right
    )


@given(bands, st.integers(0, 9), st.integers(0, 9), st.data())
def test_band_and_dense_mask_hide_together(band, rows, keys, data):
    dense = data.draw(st.none() | st.lists(st.integers(0, 255), min_size=rows * keys, max_size=rows * keys))
    if dense is not None:
        dense = np.reshape(np.array(dense, np.uint8), (rows, keys))
    found = hidden_keys(band, dense, np.arange(rows)[:, None], np.arange(keys))
    if found is None:
        assert dense is None
        found = np.zeros((rows, keys), bool)
    for i, j in np.ndindex(rows, keys):
        assert found[i, j] == (not sees(band, i, j) or (dense is not None and dense[i, j] != 0))


@given(bands, st.integers(0, 9), st.integers(1, 5), st.integers(0, 15))
def test_ranges_of_keys_are_those_of_their_rows(band, first, count, keys):
    seen = np.array([[sees(band, i, j) for j in range(keys)] for i in range(first, first + count)], bool)
    seen = seen.reshape(count, keys)
    for some, found in ((seen.any(axis=0), band.keys_of_some), (seen.all(axis=0), band.keys_of_every)):
        begin, end = found(first, first + count, keys)
        assert 0 <= begin <= end <= keys
        if found == band.keys_of_every:
            assert list(np.flatnonzero(some)) == list(range(begin, end))
        else:  # the rows' own ranges may leave gaps only where a row sees nothing
            assert not some[:begin].any()
            assert not some[end:].any()
            assert begin == end or (some[begin] and some[end - 1])


@pytest.mark.parametrize("row", [0, 2**30 - 1, 2**31 - 1])
def test_an_unbounded_side_hides_nothing_from_any_row(row):
    assert Band().hides(row, 0) is None
    assert Band().keys_of_every(row, row + 1, 7) == (0, 7)
    assert not Band(right=0).hides(row, 0)
    assert not Band(left=0).hides(0, row)


def test_a_problem_may_have_a_band_and_a_dense_mask():
    class Problem:
        seqlen_q, seqlen_kv, diagonal_offset, window_left, window_right = 2, 3, 1, UNBOUNDED, 0

    dense = np.array([[[1, 0, 0]], [[0, 0, 2]]], np.uint8)[:, None]
    expected = [[[False, True, False], [False, True, True]], [[True, True, False], [True, True, False]]]
    np.testing.assert_array_equal(visible_keys(Problem, dense)[:, 0], expected)


def test_masks_need_no_numpy():
    code = "import sys, flashgen.operators.masks; print('numpy' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(Path(masks.__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert result.stdout == "False\n"
