"""The value of a lowered formula, operation by operation, as a kernel computes it: exactly, or in fp32."""

from __future__ import annotations

import math

import numpy as np

from flashgen.operators.formula import evaluate, operation
from flashgen.operators.lowering import key_slope

# Largest errors of the approximate functions: relative ones, and the absolute one of log2 near 1.
WORST = {"exp2": 2.0**-22, "rcp": 2.0**-23, "tanh": 2.0**-11, "log2": 2.0**-22}
_FUNCTIONS = {
    "exp2": np.exp2,
    "log2": np.log2,
    "rcp": lambda x: 1 / x,
    "tanh": np.tanh,
}


class Machine:
    """``exact``: float64. Else each operation is rounded to fp32, and approximate functions are wrong by as
    much as they may be, up or down as ``rng`` has it.
    """

    def __init__(self, inputs, exact=True, rng=None):
        self._inputs, self._exact, self._rng = inputs, exact, rng

    def score(self, lowered):
        """The modified score: the body with all that is left to softmax."""
        scalars = self._inputs.scalars | {"softmax_scale": self._inputs.softmax_scale}
        constants = {name: float(evaluate(node, scalars, math)) for name, node in lowered.constants.items()}
        self._names = scalars | constants | self._inputs.at
        self._names |= {"product": self._inputs.product, "step": self._inputs.step}
        found = self._of(lowered.body, self._inputs.at["kv"])
        if lowered.offset is not None:
            found = found + self._of(lowered.offset, self._inputs.first_key)
        return found * float(evaluate(lowered.factor, scalars, math))

    def _rounded(self, x):
        return x if self._exact else np.asarray(x, np.float32).astype(np.float64)

    def _of(self, node, key):
        if node.op == "number":
            return node.value if node.type == "int" else self._rounded(node.value)
        if node.op == "name":
            value = key if node.value == "kv" else self._names[node.value]
            return value if node.type == "int" else self._rounded(value)
        if node.op == "load":
            own = self._inputs.values[node.value]
            return own(*(self._of(index, key) for index in node.args))
        if node.op == "float":
            return self._converted(node.args[0], key)
        args = [self._of(arg, key) for arg in node.args]
        if node.type in ("int", "bool"):
            return operation(node.op, args, np)
        if node.op == "fma":
            return self._rounded(args[0] * args[1] + args[2])
        if node.op in _FUNCTIONS:
            exact = _FUNCTIONS[node.op](args[0])
            if self._exact:
                return exact
            wrong = WORST[node.op] * self._rng.choice([-1.0, 1.0], np.shape(exact))
            return self._rounded(exact * (1 + wrong) + (wrong if node.op == "log2" else 0.0))
        return self._rounded(operation(node.op, args, np))

    def _converted(self, node, key):
        """An integer that grows with the key is taken at the first one, and the rest added as a float."""
        slope = key_slope(node)
        if not slope or key is self._inputs.first_key:
            return self._rounded(self._of(node, key) + np.zeros(()))
        base = self._rounded(self._of(node, self._inputs.first_key) + np.zeros(()))
        return self._rounded(base + slope * self._inputs.step)
