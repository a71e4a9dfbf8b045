"""The range of keys that a row sees under a line: it is what the line says, key by key."""

import dataclasses

import numpy as np
import pytest

from flashgen.families.masks import rule_of_line
from flashgen.operators.formula import Node
from flashgen.operators.keyranges import key_range, window_of_line
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
