"""Operators on the CPU, with NumPy: a module for each, of its name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashgen.runtime.plans import Runner


def runner_of(operator: str) -> Runner:
    """What computes the problems of the operator of that name."""
    return importlib.import_module(f"flashgen.cpu.{operator}").Runner()
