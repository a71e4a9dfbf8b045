"""The order of modules: what one imports never leads back to it."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

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
