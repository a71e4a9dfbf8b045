"""Which scores of a KV block the range masks of Hopper kernels hide, for every place of a range's ends."""

import dataclasses
import re

import numpy as np
import pytest

from flashgen.source.render import render
from simulator.covering import VARIANTS
from simulator.kernels import run

pytestmark = pytest.mark.usefixtures("compiler")

# What the functions of the mask ask for, with ranges that a test chooses.
RANGES = """
struct Ranges {
    int seqlen_kv;
    const int32_t* begin;
    const int32_t* end;
};
struct KeyRange {
    int begin, end;
};
inline int query_of_row(const Ranges&, int row) { return row; }
inline KeyRange keys_of_query(const Ranges& ranges, int row) {
    return {ranges.begin[row], ranges.end[row]};
}
"""

BODY = """
for (int first_row = 0; first_row < kRows; first_row += 16) {
    const Ranges ranges = {params.end[first_row], params.begin, params.end};
    float scores[kBlockN / 2];
    for (float& score : scores) score = 1.0f;
    HIDE;
    for (int i = 0; i < kBlockN / 2; ++i) {
        const int row = first_row + i / 2 % 2 * 8 + lane / 4;
        params.scores[row * kBlockN + i / 4 * 8 + lane % 4 * 2 + i % 2] = scores[i];
    }
}
"""

# A kernel without a mask makes the word of hidden keys once.
HIDE = {
    "none": "apply_mask(ranges, scores, bits_from(ranges.seqlen_kv, kFirstKey, lane), kFirstKey)",
    "causal": "apply_mask(ranges, scores, first_row, kFirstKey, lane)",
    "local": "apply_mask(ranges, scores, first_row, kFirstKey, lane)",
}


def mask_functions(mask_type, block_n):
    """The functions of the mask of a kernel with ``block_n`` keys in a KV block, on ``Ranges``."""
    of_mask = (v for v in VARIANTS.values() if v.spec == "flash_fwd_sm90" and v.mask_type == mask_type)
    variant = next(of_mask)
    tile = {**dict(variant.tile), "block_n": block_n}
    source = render(dataclasses.replace(variant, tile=tuple(tile.items())))
    types = re.findall(r"^using key_word = .*\n", source, re.MULTILINE)
    visit = source[source.rindex("// Visits the scores that") :]
    mask = source[source.rindex("__device__ constexpr key_word key_bit(int key)") :]
    definitions = visit[: visit.index("// ====")] + mask[: mask.index("// ====")]
    return "".join(types) + definitions.replace("const Params&", "const Ranges&")


@pytest.mark.parametrize("mask_type", ["none", "causal", "local"])
@pytest.mark.parametrize("block_n", [16, 80, 96, 128, 144, 192])
def test_what_lies_outside_of_a_range_is_hidden(mask_type, block_n, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    first_key = 3 * block_n
    # Ends before the block, in it and behind it; and of rows without a key. Without a mask rows share one.
    places = np.arange(-9, block_n + 10) + first_key
    end = rng.permutation([*places, 0, 1 << 30]).repeat(16 if mask_type == "none" else 1)
    end = np.resize(end, -(-len(end) // 16) * 16).astype(np.int32)
    begin = rng.choice([*places, 0], len(end)) if mask_type == "local" else np.zeros(len(end))
    begin = begin.astype(np.int32)
    scores = np.zeros((len(end), block_n), np.float32)
    sizes = f"constexpr int kBlockN = {block_n}, kFirstKey = {first_key}, kRows = {len(end)};\n"
    functions = RANGES + sizes + mask_functions(mask_type, block_n)
    body = BODY.replace("HIDE", HIDE[mask_type])
    run(body, {"begin": begin, "end": end}, {"scores": scores}, functions=functions, header="sm90")
    keys = np.arange(block_n) + first_key
    seen = (keys >= begin[:, None]) & (keys < end[:, None])
    assert (scores == np.where(seen, np.float32(1), np.float32(-np.inf))).all()
