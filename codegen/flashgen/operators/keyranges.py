"""The keys that a row sees under a mask by a line, as ranges of its own, or within one window of all rows,
where the line allows it.

A line does if it is made, by and and or, of comparisons that can be solved for ``kv``: then kernels compare a
key with bounds of its row, and read no array by keys. An element by a key that equals the element by the
query is a comparison that can be solved if equal elements follow one another: `RowKeys.runs`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from flashgen.operators.formula import MAX_VALUE, Node, bounds, number, text
from flashgen.operators.intervals import Interval, Intervals
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.rules import index_of_block

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.operators.rules import Rule, RuleOfCall

# A key past all keys.
_FAR = number(2**30)
_BEFORE = number(-(2**30))
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


class KeyRange(NamedTuple):
    """The keys from ``begin`` on that are before ``end``, formulas without ``kv``; None is no bound."""

    begin: Node | None = None
    end: Node | None = None


class RowKeys(NamedTuple):
    """The keys that a row sees: all keys of all ``ranges``, of which there are at most `MAX_RANGES`.

    Sides may read the first key of the run of equal elements that the row's position is in, and the key after
    the run: `run_begin` and `run_end` of an element of ``runs``. These elements are read by keys, and equal
    ones have to follow one another.
    """

    ranges: tuple[KeyRange, ...]
    runs: tuple[Node, ...] = ()


MAX_RANGES = 2


class Window(NamedTuple):
    """How many keys before and after its own position a row may see, UNBOUNDED for any number."""

    left: int
    right: int


# The distance of a key after a query; no parameter has such a name.
_DISTANCE = Node("name", (), "kv - q", "int")


@lru_cache(maxsize=64)
def window_of_line(rule: RuleOfCall) -> Window:
    """The smallest window that shows all that a mask by a line may show. Its arrays may have any elements, so
    ``doc[b, q] == doc[b, kv] and q - kv <= reach`` has a left side, ``reach``, and no right side.
    """
    numbers = rule.by_name()
    tree = _by_distance(rule.rule.tree)

    def shows(low: int, high: int) -> bool:
        """Whether a row may see a key at one of these distances."""

        def leaf(node: Node) -> Interval:
            if node is _DISTANCE:
                return Interval(low, high)
            value = numbers.get(str(node.value)) if node.op == "name" else None
            return bounds(node) if value is None else Interval(value, value)

        return bool(Intervals(leaf).truth(tree).can_be_true)

    return Window(
        _least(lambda side: shows(-UNBOUNDED, -side - 1)), _least(lambda side: shows(side + 1, UNBOUNDED))
    )


def _by_distance(node: Node) -> Node:
    """The formula with ``kv`` written as q + (kv - q), so that q cancels where only the distance matters."""
    if node.op == "name" and node.value == "kv":
        return _int("+", Node("name", (), "q", "int"), _DISTANCE)
    own = by_distance = Node(node.op, tuple(map(_by_distance, node.args)), node.value, node.type)
    for follows in _of_quotients(own, node.op):
        by_distance = Node("and", (by_distance, follows), None, "bool")
    for follows in _of_quotients(own, _NEGATED.get(node.op, "")):
        by_distance = Node("or", (by_distance, Node("not", (follows,), None, "bool")), None, "bool")
    return by_distance


def _of_quotients(node: Node, sign: str) -> tuple[Node, ...]:
    """What follows for x - y where x // size compares with y // size by ``sign``, of which ``node`` is a
    comparison by any sign: x exceeds y by less than ``size`` if its quotient is not larger.
    """
    if node.op not in _TURNED or {arg.op for arg in node.args} != {"//"}:
        return ()
    (one, size), (other, same) = (arg.args for arg in node.args)
    if size != same:
        return ()

    def exceeds_by_less(x: Node, y: Node, than: Node) -> Node:
        return Node("<", (_int("-", x, y), than), None, "bool")

    of_sign = {
        "==": (exceeds_by_less(one, other, size), exceeds_by_less(other, one, size)),
        "<=": (exceeds_by_less(one, other, size),),
        ">=": (exceeds_by_less(other, one, size),),
        "<": (exceeds_by_less(one, other, number(0)),),
        ">": (exceeds_by_less(other, one, number(0)),),
    }
    return of_sign.get(sign, ())


def _least(shows_beyond: Callable[[int], bool]) -> int:
    """The least side of a window past which a line shows nothing. One that is far longer than any sequence
    counts as none.
    """
    low, high = 0, UNBOUNDED // 2
    if shows_beyond(high):
        return UNBOUNDED
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if shows_beyond(middle) else (low, middle)
    return low


def key_range(tree: Node) -> KeyRange | None:
    """The keys that a row sees under a condition; None where they are no range, or this cannot tell."""
    keys = _row_keys(tree, with_runs=False)
    return keys.ranges[0] if keys is not None and len(keys.ranges) == 1 else None


@lru_cache(maxsize=256)
def row_keys(rule: Rule) -> RowKeys | None:
    """The keys that a row sees under a mask by a line; None where they are not a few ranges, or this cannot
    tell. Of packed sequences no element has runs.
    """
    return _row_keys(rule.tree, with_runs=rule.pack is None)


def num_ranges(rule: Rule) -> int:
    """How many ranges a row sees under a mask by a line, 0 where they are not a few."""
    keys = row_keys(rule)
    return 0 if keys is None else len(keys.ranges)


def run_begin(element: Node) -> Node:
    """The first key of the run of equal elements at a row's position. No parameter has such a name."""
    return Node("name", (), f"first key of {text(element)}", "int")


def run_end(element: Node) -> Node:
    """The key after the last one of the run."""
    return Node("name", (), f"last key of {text(element)}", "int")


def _row_keys(tree: Node, with_runs: bool) -> RowKeys | None:
    runs: dict[Node, None] | None = {} if with_runs else None
    ranges = _ranges(tree, False, runs)
    if ranges is None:
        return None
    intervals = Intervals(bounds)
    sides = [side for of_row in ranges for side in of_row if side is not None]
    numbers = (node for side in sides for node in side.walk() if node.type == "int")
    if any(intervals.magnitude(node) > MAX_VALUE for node in numbers):
        return None
    return RowKeys(ranges, tuple(runs or ()))


def _ranges(node: Node, negated: bool, runs: dict[Node, None] | None) -> tuple[KeyRange, ...] | None:
    """The ranges of a condition; adds to ``runs``, which is None where no element may have some."""
    if node.op == "not":
        return _ranges(node.args[0], not negated, runs)
    if "kv" not in node.reads():
        all_keys, none = (_BEFORE, _FAR) if negated else (_FAR, _BEFORE)
        return (KeyRange(None, Node("where", (node, all_keys, none), None, "int")),)
    if node.op in ("and", "or"):
        parts = [_ranges(arg, negated, runs) for arg in node.args]
        join = _all_of if (node.op == "and") != negated else _any_of
        joined = parts[0]
        for part in parts[1:]:
            joined = None if joined is None or part is None else join(joined, part)
        return joined
    if node.op not in _TURNED:
        return None
    left, right = node.args
    sign = _NEGATED[node.op] if negated else node.op
    if runs is not None and (element := _equal_element(left, right)) is not None:
        return _of_run(element, sign, runs)
    if "kv" in left.reads():
        one = None if "kv" in right.reads() else _solved(left, sign, right)
    else:
        one = _solved(right, _TURNED[sign], left)
    return None if one is None else (one,)


def _equal_element(left: Node, right: Node) -> Node | None:
    """The element by a key that is compared with the same array's element by the query, None if no such
    element is.
    """
    by_key = left if "kv" in left.reads() else right
    by_query = right if by_key is left else left
    if (by_key.op, by_query.op, by_key.type) != ("load", "load", "int") or "kv" in by_query.reads():
        return None
    if index_of_block(by_key) != "kv":
        return None
    q, kv = (Node("name", (), name, "int") for name in ("q", "kv"))
    same = by_query.replaced(lambda node: kv if node is q else None)
    return by_key if same is by_key and by_key is not by_query else None


def _of_run(element: Node, sign: str, runs: dict[Node, None]) -> tuple[KeyRange, ...] | None:
    """The keys whose element equals, or does not equal, the element of the row."""
    if sign not in ("==", "!="):
        return None
    runs[element] = None
    run = KeyRange(run_begin(element), run_end(element))
    return (run,) if sign == "==" else (KeyRange(None, run.begin), KeyRange(run.end))


def _all_of(some: tuple[KeyRange, ...], others: tuple[KeyRange, ...]) -> tuple[KeyRange, ...] | None:
    joined = tuple(_both(one, other) for one in some for other in others)
    return joined if len(joined) <= MAX_RANGES else None


def _any_of(some: tuple[KeyRange, ...], others: tuple[KeyRange, ...]) -> tuple[KeyRange, ...] | None:
    """All of the ranges, two of them as one where they are a range together."""
    joined = list(some)
    for other in others:
        for place, one in enumerate(joined):
            if (together := _either(one, other)) is not None:
                joined[place] = together
                break
        else:
            joined.append(other)
    return tuple(joined) if len(joined) <= MAX_RANGES else None


def _both(one: KeyRange, other: KeyRange) -> KeyRange:
    return KeyRange(_joined("max", one.begin, other.begin), _joined("min", one.end, other.end))


def _either(one: KeyRange, other: KeyRange) -> KeyRange | None:
    """A range again where both begin with the first key, or both end with the last."""
    if one.begin is None and other.begin is None:
        ends = one.end, other.end
        return KeyRange(None, None if None in ends else _int("max", *ends))
    if one.end is None and other.end is None:
        begins = one.begin, other.begin
        return KeyRange(None if None in begins else _int("min", *begins))
    return None


def _solved(left: Node, sign: str, right: Node) -> KeyRange | None:
    """The keys for which ``left``, which reads kv, compares so with ``right``, which does not."""
    one = number(1)
    if left.op == "name":
        after = _int("+", right, one)
        return {
            "<": KeyRange(None, right),
            "<=": KeyRange(None, after),
            ">": KeyRange(after),
            ">=": KeyRange(right),
            "==": KeyRange(right, after),
        }.get(sign)
    if left.op == "neg":
        return _solved(left.args[0], _TURNED[sign], _int("neg", right))
    if left.op == "abs" and sign in ("<", "<="):
        upper = _solved(left.args[0], sign, right)
        lower = _solved(left.args[0], _TURNED[sign], _int("neg", right))
        return None if upper is None or lower is None else _both(lower, upper)
    if left.op not in ("+", "-", "//") or all("kv" in arg.reads() for arg in left.args):
        return None
    first, second = left.args
    if left.op == "//":
        return None if "kv" in second.reads() else _solved_quotient(first, second, sign, right)
    if left.op == "+":
        inner, rest = (second, first) if "kv" in second.reads() else (first, second)
        return _solved(inner, sign, _int("-", right, rest))
    if "kv" in first.reads():
        return _solved(first, sign, _int("+", right, second))
    return _solved(second, _TURNED[sign], _int("-", first, right))


def _solved_quotient(dividend: Node, divisor: Node, sign: str, right: Node) -> KeyRange | None:
    """``dividend // divisor`` is at least x where the dividend is at least x * divisor."""
    at = _int("*", right, divisor)
    after = _int("*", _int("+", right, number(1)), divisor)
    match sign:
        case "<":
            return _solved(dividend, "<", at)
        case "<=":
            return _solved(dividend, "<", after)
        case ">":
            return _solved(dividend, ">=", after)
        case ">=":
            return _solved(dividend, ">=", at)
        case "==":
            begin, end = _solved(dividend, ">=", at), _solved(dividend, "<", after)
            return None if begin is None or end is None else _both(begin, end)
    return None


def _joined(op: str, one: Node | None, other: Node | None) -> Node | None:
    return other if one is None else one if other is None else _int(op, one, other)


def _int(op: str, *args: Node) -> Node:
    return Node(op, args, None, "int")
