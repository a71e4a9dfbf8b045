"""The example in JAX runs, on the CPU and small."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.extra
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_a_gpt_in_jax_learns_alike_with_flashgen_and_with_jax():
    pytest.importorskip("jax")
    example = runpy.run_path(str(EXAMPLES / "train_gpt_jax.py"))
    size = example["Size"](layers=2, width=32, heads=4, kv_heads=2, context=24, batch=4)
    curves = [example["train"](size, name, steps=10)[0] for name in ("flashgen", "jax")]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert curves[0][-1] < curves[0][0] - 0.2
