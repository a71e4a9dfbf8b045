"""The examples run, on the CPU and small."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.extra
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_a_gpt_learns_alike_with_flashgen_and_with_sdpa():
    pytest.importorskip("torch")
    example = runpy.run_path(str(EXAMPLES / "train_gpt.py"))
    size = example["Size"](layers=1, width=32, heads=4, kv_heads=2, context=24, batch=4)
    curves = [example["train"](size, name, steps=10)[0] for name in ("flashgen", "sdpa")]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert curves[0][-1] < curves[0][0] - 0.2


def test_the_loss_curves_are_drawn(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    draw = runpy.run_path(str(EXAMPLES / "train_gpt.py"))["draw"]
    draw({"flashgen": [3.0, 2.0], "sdpa": [3.0, 2.1]}, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000
