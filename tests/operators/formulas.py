"""Random formulas of the language of score modifications, as texts, and what they read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from flashgen.operators.parser import FormulaError, parse
from flashgen.operators.scores import NAMES

if TYPE_CHECKING:
    from flashgen.operators.formula import Node

SCALARS = {"gain": "float", "n": "int"}
ARRAYS = {
    "slope": (("b", "h"), "float"),
    "row_bias": (("h", "q"), "float"),
    "bias": (("q", "kv"), "float"),
    "shift": (("b", "kv"), "int"),
    "table": (("h", "distance"), "float"),
}
LOADS = ("slope[b, h]", "row_bias[h, q]", "bias[q, kv]", "table[h, min(abs(q - kv), 5)]", "table[h, kv - q]")

_numbers = st.floats(-3, 3, allow_nan=False).map(lambda x: repr(round(x, 3)))
_int_leaves = st.sampled_from(["q", "kv", "h", "b", "n", "1", "7", "-3", "shift[b, kv]"])
_float_leaves = st.sampled_from(["score", "score", "gain", *LOADS]) | _numbers


def _ints(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(inner, inner)
    return st.one_of(
        st.tuples(two, st.sampled_from("+-")).map(lambda x: f"({x[0][0]} {x[1]} {x[0][1]})"),
        two.map(lambda x: f"min({x[0]}, {x[1]})"),
        two.map(lambda x: f"max({x[0]}, {x[1]})"),
        inner.map(lambda x: f"abs({x})"),
        inner.map(lambda x: f"(-{x})"),
    )


INTEGERS = st.recursive(_int_leaves, _ints, max_leaves=4)


def _conditions(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    compared = st.tuples(inner, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), inner)
    of_ints = st.tuples(INTEGERS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), INTEGERS)
    simple = (compared | of_ints).map(lambda x: f"({x[0]} {x[1]} {x[2]})")
    return st.one_of(
        simple,
        st.tuples(simple, st.sampled_from(["and", "or"]), simple).map(lambda x: f"({x[0]} {x[1]} {x[2]})"),
        simple.map(lambda x: f"(not {x})"),
    )


def _floats(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(inner, inner)
    return st.one_of(
        st.tuples(two, st.sampled_from(["+", "-", "*"])).map(lambda x: f"({x[0][0]} {x[1]} {x[0][1]})"),
        two.map(lambda x: f"({x[0]} / (abs({x[1]}) + 0.5))"),
        inner.map(lambda x: f"({x} / (abs(gain) + 0.25))"),
        inner.map(lambda x: f"tanh({x})"),
        inner.map(lambda x: f"exp(tanh({x}) * 3)"),
        inner.map(lambda x: f"log(abs({x}) + 0.125)"),
        inner.map(lambda x: f"abs({x})"),
        inner.map(lambda x: f"(-{x})"),
        two.map(lambda x: f"min({x[0]}, {x[1]})"),
        two.map(lambda x: f"max({x[0]}, {x[1]})"),
        st.tuples(_conditions(inner), inner, inner).map(lambda x: f"where({x[0]}, {x[1]}, {x[2]})"),
    )


FORMULAS = st.recursive(_float_leaves | INTEGERS.filter(lambda x: x != "1"), _floats, max_leaves=8)


def parsed(text: str) -> Node:
    return parse(text, NAMES | SCALARS, ARRAYS)


class Inputs:
    """Values for all that a formula may read: `count` scores at random places of one problem."""

    def __init__(self, seed: int, count: int = 40) -> None:
        rng = np.random.default_rng(seed)
        batch, heads, rows, keys, distances = 2, 3, 9, 14, 6
        arrays = {
            "slope": rng.standard_normal((batch, heads), np.float32),
            "row_bias": rng.standard_normal((heads, rows), np.float32),
            "bias": rng.standard_normal((rows, keys), np.float32),
            "shift": rng.integers(-4, 5, (batch, keys)),
            "table": rng.standard_normal((heads, distances), np.float32),
        }
        self.offset = keys - rows
        at = {"b": rng.integers(0, batch, count), "h": rng.integers(0, heads, count)}
        row, at["kv"] = rng.integers(0, rows, count), rng.integers(0, keys, count)
        at["q"] = row + self.offset
        self.product = rng.standard_normal(count, np.float32).astype(np.float64) * 8
        self.softmax_scale = 0.125
        self.scalars = {"gain": float(np.float32(rng.uniform(-2, 2))), "n": int(rng.integers(-5, 6))}
        # A lane's keys are those from `first_key` on, at even steps or not.
        self.first_key = at["kv"] - rng.integers(0, 3, count)
        self.step = at["kv"] - self.first_key
        self.at = at
        loads = {name: self._loader(name, arrays[name], row, at) for name in arrays}
        self.values = {**at, **self.scalars, **loads, "score": self.product * self.softmax_scale}

    @staticmethod
    def _loader(name, array, row, at):
        own = {"b": at["b"], "h": at["h"], "q": row, "kv": at["kv"]}

        def load(*given):
            index = tuple(
                own[dimension]
                if dimension in own
                else np.clip(i + np.zeros_like(row), 0, array.shape[place] - 1)
                for place, (dimension, i) in enumerate(zip(ARRAYS[name][0], given, strict=True))
            )
            found = array[index]
            return found if found.dtype.kind == "i" else found.astype(np.float64)

        return load


class _Array:
    """An array whose elements of one score Python finds by subscripts."""

    def __init__(self, load, score):
        self._load, self._score = load, score

    def __getitem__(self, indices):
        found = self._load(*indices)
        return found[self._score].item()


_PYTHON = {"abs": abs, "min": min, "max": max, "tanh": math.tanh, "exp": math.exp, "log": math.log}
_PYTHON |= {"where": lambda condition, a, b: a if condition else b, "inf": math.inf, "__builtins__": {}}


def python_value(text: str, values: dict) -> np.ndarray:
    """What Python itself makes of the text, score by score."""
    found = []
    for i in range(len(values["score"])):
        names = {
            name: _Array(x, i) if callable(x) else x[i].item() if hasattr(x, "dtype") else x
            for name, x in values.items()
        }
        found.append(float(eval(text, _PYTHON | names)))
    return np.array(found)


def parsed_or_none(text: str) -> Node | None:
    """The tree; None where constants alone cannot be computed, such as 1 / 0."""
    try:
        return parsed(text)
    except FormulaError as error:
        if "cannot be computed" in str(error):
            return None
        raise
