"""The file of a user's tuned tiles."""

import threading
from pathlib import Path

import pytest
import yaml

from fake_gpu import H200
from flashgen.errors import SpecError
from flashgen.families import tuned
from flashgen.families.load import load_spec
from flashgen.tools.tune.userfile import Measured, merge

TILE = {"block_m": 64, "block_n": 96, "warps": 4, "stages": 2, "min_blocks": 1}
HOW = {"compiler": "NVRTC 13.0", "gain": 1.25, "shapes": ["16x1k 32/32"]}
POINT = (64, "fp16", "causal", "mha", "sm80")
OTHER = (32, "fp32", "none", "gqa", "sm86")


@pytest.fixture
def spec(spec_file):
    return load_spec(spec_file)


def tuned_tiles(spec):
    found = load_spec(spec.path, gpu=H200.name).variants()
    return {
        (*(value for _, value in v.axes), v.target): (dict(v.tile), v.dispatch.efficiency)
        for v in found
        if v.tile_name == "tuned"
    }


def test_what_is_written_is_what_is_loaded(spec):
    written = merge(spec, H200.name, {POINT: Measured(TILE, 1.25, HOW)})
    assert written.path == tuned.path_for("tiny", H200.name)
    assert written.problems == ()
    assert tuned_tiles(spec) == {POINT: (TILE, 1.25)}
    (row,) = yaml.safe_load(written.path.read_text())["tiles"]
    assert row["measured"] == HOW


def test_a_row_replaces_that_of_its_point_and_leaves_the_others(spec):
    merge(spec, H200.name, {POINT: Measured(TILE, 1.25, HOW), OTHER: Measured(TILE, 1.1, HOW)})
    faster = TILE | {"block_n": 32}
    merge(spec, H200.name, {POINT: Measured(faster, 1.5, HOW)})
    assert tuned_tiles(spec) == {POINT: (faster, 1.5), OTHER: (TILE, 1.1)}


def test_where_the_ordinary_tile_won_the_row_goes_and_with_the_last_one_the_file(spec):
    merge(spec, H200.name, {POINT: Measured(TILE, 1.25, HOW), OTHER: Measured(TILE, 1.1, HOW)})
    path = merge(spec, H200.name, {POINT: None}).path
    assert tuned_tiles(spec) == {OTHER: (TILE, 1.1)}
    merge(spec, H200.name, {OTHER: None})
    assert not path.exists()
    merge(spec, H200.name, {OTHER: None})  # nothing was there
    assert tuned_tiles(spec) == {}


def test_rows_that_no_longer_fit_go_and_are_told(spec, edit_spec):
    merge(spec, H200.name, {POINT: Measured(TILE, 1.25, HOW), OTHER: Measured(TILE, 1.1, HOW)})
    edit_spec("  head_dim: [32, 64]", "  head_dim: [64]")
    edit_spec("  - {head_dim: 32, mask_type: causal, gqa: mha}\n", "")
    changed = load_spec(spec.path)
    written = merge(changed, H200.name, {POINT: Measured(TILE, 1.3, HOW)})
    (problem,) = written.problems
    assert problem.startswith("6: tiles[1].head_dim: ")
    assert tuned_tiles(changed) == {POINT: (TILE, 1.3)}


@pytest.mark.parametrize(
    "text", ["gpu: [", "gpu: NVIDIA H100\ntiles: []\n"], ids=["damaged", "of another GPU"]
)
def test_a_file_that_is_not_understood_stays_as_it_is(spec, text):
    path = tuned.path_for("tiny", H200.name)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(SpecError, match=str(path)):
        merge(spec, H200.name, {POINT: Measured(TILE, 1.25, HOW)})
    assert path.read_text() == text


def test_a_folder_of_ones_choice(spec, tmp_path):
    path = merge(spec, "NVIDIA L4", {POINT: Measured(TILE, 1.25, HOW)}, tmp_path / "mine").path
    assert path == tmp_path / "mine" / "nvidia-l4" / "tiny.yaml"


def test_writers_at_once_lose_nothing(spec):
    points = [point for point in spec.content.entries if point[-1] == "sm80"]
    threads = [
        threading.Thread(target=merge, args=(spec, H200.name, {point: Measured(TILE, 1.25, {})}))
        for point in points
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(tuned_tiles(spec)) == set(points)


def test_a_write_that_fails_leaves_the_old_file(spec, monkeypatch):
    path = merge(spec, H200.name, {POINT: Measured(TILE, 1.25, HOW)}).path
    before = path.read_bytes()

    def full(self, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        merge(spec, H200.name, {OTHER: Measured(TILE, 1.25, HOW)})
    assert path.read_bytes() == before
    assert {each.suffix for each in path.parent.iterdir()} <= {".yaml", ".lock"}
