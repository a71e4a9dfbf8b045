"""Winners in a spec file: rows change where they stand, and everything else stays."""

import difflib
import random

import pytest

from flashgen.errors import SpecError
from flashgen.families.load import load_spec
from flashgen.host.paths import specs_dir
from flashgen.tools.tune.specedit import edited
from flashgen.tools.tune.userfile import Measured

FOLLOWING_ROW = "block_n: 32, warps: 4, stages: *two, min_blocks: 2}\n  - {name"
TILE = {"block_m": 64, "block_n": 96, "warps": 4, "stages": 2, "min_blocks": 1}


def served(spec, row):
    return [point for point, entries in spec.content.entries.items() if entries[0].row == row]


def won(tile=TILE, efficiency=1.25):
    return Measured(tile, efficiency, {})


def apply(path, winners):
    path.write_bytes(edited(path, path.read_bytes(), winners))
    return load_spec(path)


def changes(before, after):
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]


def test_a_row_whose_points_all_agree_changes_where_it_stands(spec_file, edit_spec):
    edit_spec("warps: 8, stages: 2, min_blocks: 1}", "warps: 8, stages: 2, min_blocks: 1}  # two stages")
    before = spec_file.read_text()
    points = served(load_spec(spec_file), 0)
    apply(spec_file, dict.fromkeys(points, won()))
    assert changes(before, spec_file.read_text()) == [
        "-  - {target: sm80, head_dim: 64, block_m: 128, block_n: 64, warps: 8, stages: 2, min_blocks: 1}"
        "  # two stages",
        "+  - {target: sm80, head_dim: 64, block_m: 64, block_n: 96, warps: 4, stages: 2, min_blocks: 1, "
        "efficiency: 1.25}  # two stages",
    ]


def test_an_efficiency_that_is_there_is_replaced_by_the_mean(spec_file, edit_spec):
    edit_spec("stages: 2, min_blocks: 1}", "stages: 2, efficiency: 1.0, min_blocks: 1}")
    points = served(load_spec(spec_file), 0)
    winners = {point: won(efficiency=1.21 if point[1] == "fp16" else 1.0) for point in points}
    spec = apply(spec_file, winners)
    assert 1.0 < spec.content.rows[0].dispatch["efficiency"] < 1.21
    assert spec_file.read_text().count("efficiency: ") == 2  # of this row, and of m64


def test_some_points_of_a_row_get_rows_of_their_own_above_it(spec_file, edit_spec):
    edit_spec("stages: 2, min_blocks: 1}", "stages: 2, min_blocks: 1, no_spills: false}")
    before = spec_file.read_text()
    points = [p for p in served(load_spec(spec_file), 0) if p[1] == "fp16" and p[2] == "causal"]
    spec = apply(spec_file, dict.fromkeys(points, won()))
    assert changes(before, spec_file.read_text()) == [
        "+  - {head_dim: 64, dtype: fp16, mask_type: causal, target: sm80, block_m: 64, block_n: 96, "
        "warps: 4, stages: 2, min_blocks: 1, no_spills: false, efficiency: 1.25}"
    ]
    tuned = spec.select(head_dim=64, target="sm80", dtype="fp16", mask_type="causal")
    assert {v.no_spills for v in tuned if not v.tile_name} == {False}


def test_where_points_of_a_row_disagree_it_takes_what_most_of_them_want(spec_file):
    points = served(load_spec(spec_file), 0)
    rare = [point for point in points if point[1:4] == ("fp16", "none", "packed")]
    other = TILE | {"block_n": 32}
    spec = apply(spec_file, {point: won(other if point in rare else TILE) for point in points})
    assert len(spec.content.rows) == 4
    assert dict(spec.content.rows[1].tile) == TILE
    assert served(spec, 0) == rare


def test_points_whose_ordinary_tile_won_keep_it(spec_file):
    before = spec_file.read_bytes()
    points = served(load_spec(spec_file), 0)
    assert edited(spec_file, before, dict.fromkeys(points)) == before
    fp16 = [point for point in points if point[1] == "fp16"]
    spec = apply(spec_file, dict.fromkeys(points) | dict.fromkeys(fp16, won()))
    assert {dict(v.tile)["block_n"] for v in spec.select(head_dim=64, target="sm80", dtype="fp32")} == {64}


def test_rows_in_block_style_are_edited_too(spec_file, edit_spec):
    edit_spec(
        "  - {target: sm80, head_dim: 64, block_m: 128, block_n: 64, warps: 8, stages: 2, min_blocks: 1}\n",
        "  - target: sm80\n    head_dim: 64\n    block_m: 128  # rows\n    block_n: 64\n    warps: 8\n"
        "    stages: 2\n    min_blocks: 1\n",
    )
    points = served(load_spec(spec_file), 0)
    apply(spec_file, dict.fromkeys(points, won()))
    text = spec_file.read_text()
    assert "    block_m: 64  # rows\n    block_n: 96\n" in text
    assert "    min_blocks: 1\n    efficiency: 1.25\n" in text
    apply(spec_file, dict.fromkeys(points[:1], won(TILE | {"block_n": 32})))
    assert "  - {head_dim: 64, dtype: fp16, mask_type: none, gqa: mha, target: sm80," in spec_file.read_text()


def test_an_anchor_is_no_reason_for_a_wrong_file(spec_file, edit_spec):
    """The place of an alias is that of its anchor, in another row."""
    edit_spec("stages: 2, min_blocks: 1}", "stages: &two 2, min_blocks: 1}")
    edit_spec("block_n: 32, warps: 4, stages: 1, min_blocks: 2}\n  - {name", FOLLOWING_ROW)
    before = spec_file.read_bytes()
    points = served(load_spec(spec_file), 1)
    with pytest.raises(SpecError, match="cannot be edited as text"):
        edited(spec_file, before, dict.fromkeys(points, won(TILE | {"stages": 1})))


def test_rows_that_share_a_line_cannot_get_more(spec_file):
    text = spec_file.read_text()
    start, end = text.index("tiles:\n"), text.index("tune:\n")
    rows = [line.strip().removeprefix("- ") for line in text[start:end].splitlines()[1:]]
    spec_file.write_text(text[:start] + "tiles: [" + ", ".join(rows) + "]\n" + text[end:])
    point = served(load_spec(spec_file), 0)[0]
    with pytest.raises(SpecError, match="lines of its own"):
        edited(spec_file, spec_file.read_bytes(), {point: won()})


@pytest.mark.parametrize("name", ["flash_fwd_sm80", "flash_fwd_sm90"])
@pytest.mark.parametrize("seed", range(3))
def test_shipped_files_keep_their_comments_and_all_tiles_that_were_not_tuned(name, seed, tmp_path):
    shipped = specs_dir() / f"{name}.yaml"
    path = tmp_path / shipped.name
    path.write_bytes(shipped.read_bytes())
    spec = load_spec(path)
    rng = random.Random(seed)
    keys = [key for key, _ in spec.content.rows[0].tile]
    small = {"block_m": 32, "block_n": 16, "warps": 1, "loop": "stages", "min_blocks": 1}
    if name == "flash_fwd_sm90":
        small = {"block_m": 64, "block_n": 64, "stages": 2}
    tile = dict(spec.content.rows[0].tile) | {key: small[key] for key in small if key in keys}
    points = rng.sample([*spec.content.entries], 25)
    found = apply(path, {point: won(tile) if rng.random() < 0.8 else None for point in points})
    old, new = shipped.read_text().splitlines(), path.read_text().splitlines()
    comments = [line[line.index("#") :] for line in old if "#" in line]
    assert [line[line.index("#") :] for line in new if "#" in line] == comments
    for point, entries in spec.content.entries.items():
        if point not in points:
            before = spec.content.rows[entries[0].row]
            after = found.content.rows[found.content.entries[point][0].row]
            assert after == before
