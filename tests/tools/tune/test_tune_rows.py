"""Sets of points as conditions of a few rows."""

import itertools

import yaml
from hypothesis import given
from hypothesis import strategies as st

from flashgen.families.model import as_values
from flashgen.tools.tune.rows import conditions, row_text

DOMAIN = {
    "head_dim": (64, 96, 128),
    "dtype": ("fp16", "bf16"),
    "mask_type": ("none", "causal"),
    "target": ("sm90",),
}
POINTS = [*itertools.product(*DOMAIN.values())]


def holding(condition):
    return [*itertools.product(*(as_values(condition.get(axis, values)) for axis, values in DOMAIN.items()))]


@given(st.sets(st.sampled_from(POINTS), min_size=1))
def test_conditions_hold_at_exactly_the_points_once_each(points):
    found = [point for condition in conditions([*points], DOMAIN) for point in holding(condition)]
    assert sorted(found) == sorted(points)


def test_conditions_are_as_few_and_as_short_as_they_can_be():
    assert conditions(POINTS, DOMAIN) == [{}]
    causal = [point for point in POINTS if point[2] == "causal" and point[0] != 96]
    assert conditions(causal[::-1], DOMAIN) == [{"head_dim": [64, 128], "mask_type": "causal"}]
    corner = [point for point in POINTS if point[0] == 64 or point[2] == "causal"]
    assert len(conditions(corner, DOMAIN)) == 2


def test_a_row_is_one_line_that_reads_back():
    row = {"head_dim": [64, 96], "gqa": "mha", "measured": {"shapes": ["1x4k 16/16"] * 40, "driver": "580.1"}}
    text = row_text(row)
    assert "\n" not in text
    assert yaml.safe_load(text) == row
