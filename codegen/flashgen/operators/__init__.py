"""What is computed: arguments, contracts, masks, and the problems that calls make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.operators.append import APPEND
from flashgen.operators.attention import ATTENTION
from flashgen.operators.backward import BACKWARD
from flashgen.operators.merge import MERGE
from flashgen.operators.varlen import VARLEN

if TYPE_CHECKING:
    from flashgen.operators.operator import Operator

# By the name that a spec gives under ``operator``.
OPERATORS: dict[str, Operator] = {
    operator.name: operator for operator in (ATTENTION, BACKWARD, VARLEN, MERGE, APPEND)
}
