"""Operators on the CPU, with NumPy: a module for each, of its name, with a function `run`."""

from __future__ import annotations

import importlib

from flashgen.cpu.runner import Runner


def runner_of(operator: str) -> Runner:
    """What computes the problems of the operator of that name."""
    return Runner(importlib.import_module(f"flashgen.cpu.{operator}").run)
