"""What tuning has written is what a plan takes."""

import pytest

import slow_tile
from fake_gpu import H200, array
from flashgen.families.load import load_specs
from flashgen.tools.tune.ranking import MIN_GAIN
from flashgen.tools.tune.userfile import Measured, merge


@pytest.mark.parametrize("gain", [MIN_GAIN, 1.15, 3.0])
def test_a_plan_takes_the_winner_however_little_it_gains(gain, fake_gpu, tmp_path, monkeypatch):
    import numpy as np

    import flashgen

    slow_tile.write(tmp_path / "specs")
    monkeypatch.setenv("FLASHGEN_SPECS", str(tmp_path / "specs"))
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    arrays = [array((4, 700, 32, 64), np.float32, (n + 1) << 32) for n in range(4)]

    def tile():
        return dict(flashgen.plan(*arrays[:3], causal=True, out=arrays[3]).variant.tile)

    assert tile() == slow_tile.SLOW
    (spec,) = (spec for spec in load_specs() if spec.name == "flash_fwd_sm80")
    ordinary = spec.select(target="sm80", **slow_tile.POINT)[0]
    point = (*(value for _, value in ordinary.axes), "sm80")
    merge(spec, H200.name, {point: Measured(slow_tile.FAST, gain, {})}, tmp_path / "mine")
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path / "mine"))
    assert tile() == slow_tile.FAST
