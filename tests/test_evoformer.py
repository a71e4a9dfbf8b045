"""The example of a pair bias runs, on the CPU and small."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.extra
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_a_pair_bias_learns_alike_with_flashgen_and_with_sdpa():
    pytest.importorskip("torch")
    example = runpy.run_path(str(EXAMPLES / "evoformer.py"))
    size = example["Size"](width=32, heads=2, residues=12, rows=32)
    curves = [example["train"](size, name, steps=30) for name in ("flashgen", "sdpa")]
    assert curves[0] == pytest.approx(curves[1], abs=1e-2)
    assert curves[0][-1] < curves[0][0] - 0.3
