"""The order of modules: what one imports never leads back to it, and a call goes one way through rooms."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

import flashgen

PACKAGE = Path(flashgen.__file__).parent
MODULES = {
    ".".join(("flashgen", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imported(node):
    """Modules of the package that code under ``node`` imports, at once or when a function is called. What is
    imported for annotations alone does not count.
    """
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names if each.name in MODULES)
    if isinstance(node, ast.ImportFrom) and node.module in MODULES:
        for each in node.names:
            name = f"{node.module}.{each.name}"
            yield name if name in MODULES else node.module
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def test_no_circle_of_imports():
    graph = {name: set(imported(ast.parse(path.read_text()))) - {name} for name, path in MODULES.items()}
    assert len(graph) > 100
    assert sum(map(len, graph.values())) > 500
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the modules of a circle


# The rooms that a call passes on its first way to a launch, in order, and the rooms that the code of each
# calls. No room calls a later one, and `runtime` does not call back: it takes the steps that `schedule` made.
WAY = {
    "call": {
        "host",
        "operators",
        "families",
        "source",
        "toolchain",
        "schedule",
        "runtime",
        "cpu",
        "simulator",
    },
    "operators": {"host"},
    "schedule": {"families", "operators", "source"},
    "runtime": {"families", "host", "operators", "source", "toolchain"},
}


@pytest.mark.parametrize("room", WAY)
def test_a_call_goes_one_way(room):
    inside = f"flashgen.{room}."
    modules = {name: path for name, path in MODULES.items() if name.startswith(inside)}
    used = {other for path in modules.values() for other in imported(ast.parse(path.read_text()))}
    rooms = {name.split(".")[1] for name in used if not name.startswith(inside)}
    assert rooms - {"errors", room} == WAY[room]  # a module may import its room, which is a package
