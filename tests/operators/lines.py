"""Random masks by a line, with arrays, for tests; and what Python makes of a line."""

import numpy as np

from flashgen.families.masks import rule_of_line
from flashgen.operators.visibility import visibility_on_host
from flashgen.simulator.randomlines import bools_of

BATCH, HEADS = 2, 3
# Arrays by name: how a line reads them, and their dimensions.
READS = (
    *("doc[b, q]", "doc[b, kv]", "start[q]", "last[kv]", "prefix[b]", "of_head[h]", "doc[b, kv + 1]"),
    *("table[q - kv]", "pair[q // 3, kv]", "square[q, kv]", "table[h + 1]"),
)
# The arrays of bools.
CONDITIONS = ("seen[b, q, kv]", "common[q, kv]", "padded[b, kv]", "on[h]", "odd[q % 3, kv]")
ORDERS = ("sorted", "shuffled", "constant", "distinct")


def elements(rng, order, length):
    """An array of one of ORDERS, with values near its positions."""
    values = rng.integers(0, max(1, length // 3) + 1, length)
    if order == "sorted":
        return np.sort(values)
    if order == "constant":
        return np.full(length, values[0] if length else 0)
    return rng.permutation(length) if order == "distinct" else values


def arrays(rng, seqlen_kv, order=None):
    """The arrays of READS, int32."""

    def one(length):
        return elements(rng, order or rng.choice(ORDERS), length).astype(np.int32)

    return {
        "doc": np.stack([one(seqlen_kv) for _ in range(BATCH)]),
        "start": one(seqlen_kv),
        "last": one(seqlen_kv),
        "prefix": rng.integers(0, seqlen_kv + 1, BATCH).astype(np.int32),
        "of_head": rng.integers(-3, seqlen_kv, HEADS).astype(np.int32),
        "table": one(max(1, seqlen_kv // 2)),
        "square": one(seqlen_kv)[None],
        "pair": np.stack([one(seqlen_kv) for _ in range(4)]),
        "seen": bools_of(rng, (BATCH, 1, seqlen_kv)),
        "common": bools_of(rng, (1, seqlen_kv)),
        "padded": bools_of(rng, (BATCH, seqlen_kv)),
        "on": bools_of(rng, (HEADS,)),
        "odd": bools_of(rng, (3, seqlen_kv)),
    }


def random_number(rng, length, depth=2):
    """The text of an integer."""
    if depth == 0 or rng.random() < 0.25:
        leaf = rng.choice(["q", "kv", "q", "kv", "number", "read", "h", "b", "n"])
        if leaf == "number":
            return str(rng.integers(0, length + 2))
        return str(rng.choice(READS)) if leaf == "read" else str(leaf)
    one, other = (random_number(rng, length, depth - 1) for _ in range(2))
    divisor = rng.choice(["n", str(rng.integers(1, 40))])
    return str(
        rng.choice(
            [
                f"({one} + {other})",
                f"({one} - {other})",
                f"({one} - {other})",
                f"({one} * {rng.integers(-3, 4)})",
                f"(-{one})",
                f"({one} // {divisor})",
                f"({one} % {divisor})",
                f"abs({one})",
                f"min({one}, {other})",
                f"max({one}, {other})",
                f"where({random_number(rng, length, 0)} < {random_number(rng, length, 0)}, {one}, {other})",
            ]
        )
    )


def random_line(rng, length, depth=2):
    """The text of a condition."""
    if depth == 0 or rng.random() < 0.2:
        if rng.random() < 0.15:
            return str(rng.choice(CONDITIONS))
        one, other = (random_number(rng, length, rng.integers(0, 3)) for _ in range(2))
        sign = rng.choice(["<", "<=", ">", ">=", "==", "!=", "<=", "<"])
        if rng.random() < 0.15:
            return f"({rng.integers(0, 3)} <= {one} {sign} {other})"
        return f"({one} {sign} {other})"
    one, other = (random_line(rng, length, depth - 1) for _ in range(2))
    return str(
        rng.choice([f"({one} and {other})", f"({one} or {other})", f"(not {one})", f"({one} & {other})"])
    )


def line_and_values(rng, seqlen_q, seqlen_kv, order=None):
    """A line, its visibility, and its arrays and integers by name."""
    line = random_line(rng, max(seqlen_kv, 4))
    rule = rule_of_line(line)
    values = arrays(rng, seqlen_kv, order) | {"n": int(rng.integers(1, 9))}
    return (
        line,
        *visibility_of_line(line, values, seqlen_q, seqlen_kv),
        {p.name: values[p.name] for p in rule.params},
    )


def visibility_of_line(line, values, seqlen_q, seqlen_kv):
    """The visibility of a line, alone in a tuple."""
    from flashgen.operators.rules import RuleOfCall

    rule = rule_of_line(line)
    numbers = tuple(values[param.name] for param in rule.scalars)
    sizes = {"batch": BATCH, "num_heads_q": HEADS, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv}
    own = {param.name: values[param.name] for param in rule.arrays}
    return (visibility_on_host(RuleOfCall(rule, numbers), own, sizes),)


class _Clamped:
    """An array whose index past an end stands for the last one there, as a line has it."""

    def __init__(self, array):
        self._array = array

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        at = tuple(min(max(i, 0), extent - 1) for i, extent in zip(index, self._array.shape, strict=True))
        return self._array[at] != 0 if self._array.itemsize == 1 else int(self._array[at])


def python_value(line, values, b, h, i, j, offset):
    """Whether row i sees key j, as Python computes the line."""
    names = {name: _Clamped(x) if isinstance(x, np.ndarray) else x for name, x in values.items()}
    names |= {"b": b, "h": h, "q": i + offset, "kv": j, "where": lambda c, x, y: x if c else y}
    return bool(eval(line, {"__builtins__": {"abs": abs, "min": min, "max": max}}, names))
