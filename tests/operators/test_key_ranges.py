"""The range of keys that a row sees under a line: it is what the line says, key by key."""

import dataclasses

import numpy as np
import pytest

from flashgen.families.masks import rule_of_line
from flashgen.operators.formula import Node
from flashgen.operators.keyranges import key_range, num_ranges, row_keys, window_of_line
from flashgen.operators.rules import RuleOfCall
from operators.lines import BATCH, HEADS, arrays, random_line, visibility_of_line

RANGES = (
    "kv <= q",
    "not kv > q + prefix[b] and kv >= 3 - q",
    "start[q] <= kv and (kv < last[q] or last[q] + 5 > kv and h == 1)",
    "abs(q - kv) <= n and -kv < 0",
    "kv // 7 == q // n and 5 >= (kv - 3) // n",
    "not (kv < start[q] or q % 3 == 0 or 2 + kv - q > n)",
    "kv < 4 or kv < q and 1 == 2",
    "kv // 7 <= doc[b, q] and where(q < 5, 1, 0) == 0",
)
NO_RANGES = (
    *("kv != 3", "doc[b, q] == doc[b, kv]", "kv < 4 or kv > q", "kv % 2 == 0", "kv * 2 <= q"),
    *("abs(q - kv) > 3", "min(kv, q) <= 5", "kv - kv == 0"),
)


def check(line, values, queries, keys):
    """That the range of the line, if it has one, shows the same keys."""
    (visibility,) = visibility_of_line(line, values, queries, keys)
    at = np.ix_(*map(np.arange, (BATCH, HEADS, queries, keys)))
    of_row = key_range(visibility.rule.tree)
    if of_row is None:
        return
    hidden = np.zeros((BATCH, HEADS, queries, keys), bool)
    for side, sign in zip(of_row, (">=", "<"), strict=True):
        if side is not None:
            kv = Node("name", (), "kv", "int")
            rule = dataclasses.replace(visibility.rule, tree=Node(sign, (kv, side), None, "bool"))
            hidden |= visibility._replace(rule=rule).hides(*at)
    np.testing.assert_array_equal(hidden, visibility.hides(*at) | np.zeros_like(hidden), line)


@pytest.mark.parametrize("line", RANGES)
def test_a_range_shows_the_keys_of_the_line(line, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    assert key_range(rule_of_line(line).tree) is not None
    for queries, keys in ((1, 1), (20, 33), (40, 17)):
        check(line, arrays(rng, keys) | {"n": int(rng.integers(1, 9))}, queries, keys)


@pytest.mark.parametrize("line", NO_RANGES)
def test_other_lines_have_none(line):
    assert key_range(rule_of_line(line).tree) is None


def test_random_lines(fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    for _ in range(300):
        check(random_line(rng, 20), arrays(rng, 20) | {"n": int(rng.integers(1, 9))}, 15, 20)


FEW_RANGES = {
    "kv <= q and (q - kv < n or kv < 4)": 2,
    "kv < 4 or kv > q": 2,
    "kv <= q or 5 < kv and kv < start[q] or kv < 3": 2,
    "doc[b, q] == doc[b, kv] and kv <= q": 1,
    "doc[b, q] != doc[b, kv]": 2,
    "not (doc[b, kv] == doc[b, q] or kv > q + 3)": 2,
    "last[kv] == last[q] and (kv < 9 or h == 1) or kv < 2": 2,
    "doc[b, q] == doc[b, kv] and last[q] == last[kv]": 1,
}
MANY_RANGES = (
    "kv < 4 or kv > q or kv == 9",
    "doc[b, kv] == last[q]",
    "doc[b, kv] < doc[b, q]",
    "kv % 2 == 0",
)


def check_ranges(line, values, queries, keys):
    """That the ranges of rows show the keys of the line, or say that they do not."""
    (visibility,) = visibility_of_line(line, values, queries, keys)
    everything = np.ix_(*map(np.arange, (BATCH, HEADS, queries, keys)))
    hides = visibility.hides(*everything) | np.zeros((BATCH, HEADS, queries, keys), bool)
    by_range = 0
    for b, h in np.ndindex(BATCH, HEADS):
        found = visibility.key_ranges(b, h, queries, keys)
        if found is None:
            return 0
        if found.by_element:
            assert row_keys(visibility.rule).runs
            continue
        begin, end = found.ranges[..., 0, None], found.ranges[..., 1, None]
        seen = ((begin <= np.arange(keys)) & (np.arange(keys) < end)).any(1)
        np.testing.assert_array_equal(seen, ~hides[b, h], line)
        by_range += 1
    return by_range


@pytest.mark.parametrize("line", FEW_RANGES)
def test_the_ranges_of_a_row_show_the_keys_of_the_line(line, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    assert num_ranges(rule_of_line(line)) == FEW_RANGES[line]
    for queries, keys in ((1, 1), (20, 33), (40, 17)):
        values = arrays(rng, keys) | {"n": int(rng.integers(1, 9))}
        check_ranges(line, values, queries, keys)
        # Equal elements that follow one another: they rise, from some element on and then from the least.
        for name in ("doc", "last"):
            ordered = np.sort(rng.integers(-3, 4, values[name].shape), -1)
            values[name] = np.roll(ordered, int(rng.integers(keys)), -1).astype(np.int32)
            away = (values[name][..., -1:] == values[name][..., :1]) & (ordered[..., :1] != ordered[..., -1:])
            values[name] = np.where(away, ordered, values[name]).astype(np.int32)
        assert check_ranges(line, values, queries, keys) == BATCH * HEADS


@pytest.mark.parametrize("line", MANY_RANGES)
def test_lines_without_a_few_ranges(line):
    assert row_keys(rule_of_line(line)) is None


def test_ranges_of_random_lines(fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    for _ in range(300):
        values = arrays(rng, 20) | {"n": int(rng.integers(1, 9))}
        check_ranges(random_line(rng, 20), values, 15, 20)


QUOTIENTS = (
    *("q // n == kv // n", "kv // n <= q // n and kv > q - 9", "not (q // 4 > (kv + 1) // 4 or kv > q)"),
    *("q // n != kv // n", "(q + 3) // n < kv // n", "not q // 5 == kv // 5 or kv == q"),
)


def test_a_window_has_all_keys_of_a_line(fresh_seed):
    rng, keys = np.random.default_rng(fresh_seed), 20
    distance = np.arange(keys)[:, None] - np.arange(keys)
    at = np.ix_(*map(np.arange, (BATCH, HEADS, keys, keys)))
    for line in (*QUOTIENTS, *(random_line(rng, keys) for _ in range(100))):
        values = arrays(rng, keys) | {"n": int(rng.integers(1, 9))}
        (visibility,) = visibility_of_line(line, values, keys, keys)
        numbers = tuple(visibility.numbers[param.name] for param in visibility.rule.scalars)
        left, right = window_of_line(RuleOfCall(visibility.rule, numbers))
        assert (visibility.hides(*at) | (distance <= left) & (-distance <= right)).all(), line
