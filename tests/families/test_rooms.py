"""The modules of families/ import one way, imports for annotations included."""

import ast
import graphlib
from pathlib import Path

from flashgen.families import check


def imported(path):
    """The modules of the room that a module imports, wherever it does so."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
            for name in names:
                if name.startswith("flashgen.families."):
                    yield name.split(".")[2]


def test_no_two_modules_import_each_other():
    paths = {path.stem: path for path in Path(check.__file__).parent.glob("*.py")}
    graph = {stem: set(imported(path)) & paths.keys() for stem, path in paths.items()}
    assert len(graph) > 10
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the modules of a circle
