"""What is computed: arguments, contracts, masks, and the problems that calls make."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashgen.operators.operator import Operator
    from flashgen.operators.scores import Score

# The module of each operator, by the name that a spec gives under ``operator``, and its name there.
_PLACES = {
    "attention": ("attention", "ATTENTION"),
    "attention_backward": ("backward", "BACKWARD"),
    "attention_weights": ("weights", "WEIGHTS"),
    "score_gradient": ("score_gradient", "SCORE_GRADIENT"),
    "merge": ("merge", "MERGE"),
    "append": ("append", "APPEND"),
    "quantize": ("quantize", "QUANTIZE"),
}


class _Operators(Mapping[str, "Operator"]):
    """The operators by name. A module is imported when its operator is first used: a first call waits for
    imports, and uses one of them.
    """

    def __getitem__(self, name: str) -> Operator:
        module, attribute = _PLACES[name]
        return getattr(importlib.import_module(f"flashgen.operators.{module}"), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)


OPERATORS: Mapping[str, Operator] = _Operators()


def modified_operator(name: str, has_lengths: bool, score: Score) -> Operator:
    """The operator of that name with a score modification, as calls with or without lengths have it."""
    module = importlib.import_module(f"flashgen.operators.{_PLACES[name][0]}")
    return module.operator_for(score, has_lengths)


def operator_of(name: str, has_lengths: bool) -> Operator:
    """The operator of that name as calls with or without lengths have it."""
    operator = OPERATORS[name]
    return operator.with_lengths if has_lengths else operator.without_lengths
