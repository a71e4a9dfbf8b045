"""Where the parts of a table of a mask by a line are."""

import numpy as np
import pytest

from flashgen.operators.linetable import LineTable


@pytest.mark.parametrize("queries", [1, 127, 128, 1000])
@pytest.mark.parametrize("ranges", [0, 1, 2])
def test_each_query_has_its_ranges(ranges, queries):
    """Also where a line has none, as the line of an array has."""
    layout = LineTable(-(-queries // 128), queries, ranges)
    table = np.arange(layout.size, dtype=np.int32)
    found = layout.of_queries(table)
    assert found.shape[0] >= queries
    assert found.shape[1:] == (ranges, 2)
    assert found.ravel().tolist() == list(range(layout.first_range, layout.first_range + found.size))
