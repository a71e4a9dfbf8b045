"""The program's cells, small and on the CPU, where peers may have no kernels."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

_SPEC = importlib.util.spec_from_file_location(
    "array_gradients", Path(__file__).resolve().parents[3] / "benchmarks" / "array_gradients.py"
)
array_gradients = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(array_gradients)


@pytest.mark.parametrize("cell", array_gradients.CELLS, ids=lambda cell: cell.name)
def test_a_cell_has_the_gradient_of_its_array(cell, monkeypatch):
    monkeypatch.delitem(array_gradients.PEERS, "FlexAttention")  # it would be compiled
    sizes = {cell.batch: 2, cell.seqlen: 20, cell.heads: 2}
    shape = tuple(sizes.get(extent, extent) for extent in cell.shape)
    small = replace(cell, batch=2, seqlen=20, heads=2, head_dim=16, shape=shape, array_dtype="float32")
    calls, failures = array_gradients.prepared(small, "cpu")
    assert {"flashgen", "flashgen, q, k and v alone"} <= calls.keys()
    assert calls.keys() | failures.keys() == array_gradients.PEERS.keys()
    *others, gradient = calls["flashgen"]()
    assert gradient.shape == shape
    for x, y in zip(others, calls["flashgen, q, k and v alone"](), strict=True):
        assert x.shape == y.shape
