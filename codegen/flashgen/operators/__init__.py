"""What is computed: arguments, contracts, masks, and the problems that calls make."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashgen.operators.operator import Operator
    from flashgen.operators.rules import Rule
    from flashgen.operators.scores import Score

# The module of each operator, by the name that a spec gives under ``operator``, and its name there.
_PLACES = {
    "attention": ("attention", "ATTENTION"),
    "attention_fp8": ("fp8", "ATTENTION_FP8"),
    "attention_backward": ("backward", "BACKWARD"),
    "latent_attention": ("latent", "LATENT"),
    "sparse_latent_attention": ("sparse_latent", "SPARSE_LATENT"),
    "attention_weights": ("weights", "WEIGHTS"),
    "score_gradient": ("score_gradient", "SCORE_GRADIENT"),
    "merge": ("merge", "MERGE"),
    "append": ("append", "APPEND"),
    "quantize": ("quantize", "QUANTIZE"),
    "mask_lists": ("masklists", "MASK_LISTS"),
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


@functools.lru_cache(maxsize=256)
def operator_for(
    name: str, score: Score | None, has_lengths: bool = False, rule: Rule | None = None
) -> Operator:
    """The operator of that name with a score modification and a mask by a line, if any, as calls with or
    without lengths have it.
    """
    operator = operator_of(name, has_lengths)
    if score is None and rule is None:
        return operator
    from flashgen.operators.operator import extended

    return extended(operator, score, rule)


def operator_of(name: str, has_lengths: bool) -> Operator:
    """The operator of that name as calls with or without lengths have it."""
    operator = OPERATORS[name]
    return operator.with_lengths if has_lengths else operator.without_lengths
