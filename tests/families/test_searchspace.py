"""Which tiles a spec wants tried at a point."""

import itertools

from flashgen.families.check import examine

POINT = (64, "fp16", "none", "mha", "sm80")
TILE = {"block_m": 128, "block_n": 64, "warps": 8, "stages": 2, "min_blocks": 1}


def space(folder):
    path = folder / "specs" / "tiny.yaml"
    return examine(path, path.read_bytes()).space


def test_rows_that_match_add_all_their_combinations_and_leave_other_keys_as_they_are(tiny_folder):
    found = space(tiny_folder).at(POINT, TILE)
    first = [
        {**TILE, "block_m": m, "block_n": n, "warps": warps, "stages": 2}
        for m, n, warps in itertools.product((64, 128), (32, 72, 112), (4, 8))
    ]
    assert found == [*first, {**TILE, "block_m": 64}]
    fp32 = (64, "fp32", "none", "mha", "sm80")
    assert space(tiny_folder).at(fp32, TILE) == first
    assert space(tiny_folder).at((32, *fp32[1:]), TILE) == []


def test_a_tile_of_two_rows_is_tried_once(tiny_folder, edit_spec):
    before = space(tiny_folder).at(POINT, TILE)
    edit_spec("{dtype: fp16, block_m: 64}", "{dtype: fp16, block_m: 64, block_n: 32, warps: 4}")
    after = space(tiny_folder).at(POINT, TILE)
    assert len(after) == len(before) - 1
    assert len({tuple(tile.items()) for tile in after}) == len(after)
