import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sections import CALL

from flashgen.families.load import load_specs
from flashgen.operators.masks import UNBOUNDED
from flashgen.schedule.grid import rows_ahead
from flashgen.schedule.visited import visited_keys
from problems import replace

VARIANTS = {
    (variant.target, variant.head_dim, variant.mask_type, variant.gqa): variant
    for spec in load_specs()
    if spec.operator == "attention" and not spec.has_lengths and spec.name != "flash_split_sm90"
    for variant in spec.variants()
    if variant.dtype == "fp16" and variant.head_dim == variant.head_dim_v and not variant.tile_name
    if variant.axis("sinks") == variant.axis("dropout") == "none"
}


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("gqa", ["gqa", "packed"])
@given(st.integers(1, 700), st.integers(1, 900), st.integers(0, 300), st.integers(0, 50), st.booleans())
def test_it_counts_the_blocks_with_a_visible_key(target, gqa, seqlen_q, seqlen_kv, left, right, causal):
    group = 2
    call = replace(
        CALL,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        num_heads_kv=8,
        mask_type="causal" if causal else "local",
        diagonal_offset=seqlen_kv - seqlen_q,
        window_left=UNBOUNDED if causal else left,
        window_right=0 if causal else right,
    )
    variant = VARIANTS[target, 32 if target == "sm80" else 128, call.mask_type, gqa]
    block_m, block_n = variant.tile_value("block_m"), variant.tile_value("block_n")
    rows = seqlen_q * (group if gqa == "packed" else 1)
    lengths, tile_blocks = [], []
    # Tiles begin with the first row, or end with the last warpgroup that has a row. Each half of the ones and
    # each warpgroup of the others visits what its own rows see.
    unit = block_m if target == "sm80" else 64
    for end in range(-(-rows // unit) * unit, 0, -block_m):
        lengths.append(0)
        seen, blocks = set(), range(0)
        for first in range(max(0, end - block_m), end, 64):
            queries = {
                row // (group if gqa == "packed" else 1) for row in range(first, min(rows, first + 64))
            }
            # Without rows, a half is left out under a window, and goes with the other one under causal masks.
            if not queries:
                lengths[-1] += len(blocks) * block_n * 64 / block_m if causal else 0
                continue
            diagonals = [query + call.diagonal_offset for query in queries]
            low = 0 if causal else max(0, min(diagonals) - left)
            high = min(seqlen_kv, max(diagonals) + (0 if causal else right) + 1)
            blocks = range(low // block_n, -(-high // block_n)) if high > low else ()
            lengths[-1] += len(blocks) * block_n * 64 / block_m
            seen.update(blocks)
        tile_blocks.append(len(seen))
    mean, of_tile, most = visited_keys(call, variant)
    # A window that begins behind the last key visits nothing; the model may count the block at its edge.
    most_blocks = max(tile_blocks)
    assert most in (most_blocks * block_n, (most_blocks + 1) * block_n)
    assert mean == pytest.approx(sum(lengths) / len(lengths), abs=block_n)
    assert of_tile == pytest.approx(sum(tile_blocks) / len(tile_blocks) * block_n, abs=block_n)


FROM_LAST_ROW = {
    (v.spec, v.gqa, v.tile_value("block_m")): v
    for spec in load_specs()
    for v in spec.variants()
    if v.grid.from_last_row
}


@pytest.mark.parametrize("variant", FROM_LAST_ROW.values(), ids=str)
@given(st.integers(1, 700), st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 64]))
def test_whole_warpgroups_of_the_first_tile_lie_ahead_of_its_first_query(variant, seqlen_q, group):
    """The kernels take a warpgroup's 64 rows for rows of queries if the first one is."""
    call = replace(CALL, seqlen_q=seqlen_q, num_heads_q=64 * group, num_heads_kv=64)
    assert rows_ahead(call, variant) % 64 == 0
    assert 0 <= rows_ahead(call, variant) < variant.tile_value("block_m")


def test_of_many_row_blocks_a_sample_is_enough():
    call = replace(CALL, seqlen_q=60000, seqlen_kv=60000)
    variant = VARIANTS["sm90", 128, "causal", "mha"]
    mean, _, most = visited_keys(call, variant)
    assert mean == pytest.approx(30000, rel=0.02)
    assert most == pytest.approx(60000, rel=0.05)


def test_every_tile_visits_all_keys_of_a_call_that_hides_none():
    call = replace(CALL, mask_type="none", window_right=UNBOUNDED, seqlen_q=4096, seqlen_kv=1000)
    variant = VARIANTS["sm90", 256, "none", "mha"]
    keys = -(-1000 // variant.tile_value("block_n")) * variant.tile_value("block_n")
    assert visited_keys(call, variant) == (keys, keys, keys)


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("gqa", ["gqa", "packed"])
@given(
    st.integers(1, 700), st.integers(1, 900), st.integers(0, 300), st.integers(0, 50), st.integers(-300, 300)
)
def test_of_a_mask_it_counts_the_blocks_of_its_band(target, gqa, seqlen_q, seqlen_kv, left, right, offset):
    group = 2 if gqa == "packed" else 1
    band = {"diagonal_offset": offset, "window_left": left, "window_right": right}
    sizes = {"seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "num_heads_kv": 8}
    call = replace(CALL, mask_type="dense", **sizes, **band)
    variant = VARIANTS[target, 128, "dense", gqa]
    block_m, block_n = variant.tile_value("block_m"), variant.tile_value("block_n")
    blocks = []
    for first in range(0, seqlen_q * group, block_m):
        queries = range(first // group, -(-min(first + block_m, seqlen_q * group) // group))
        low = max(0, queries[0] + offset - left)
        high = min(seqlen_kv, queries[-1] + offset + right + 1)
        blocks.append(max(0, -(-high // block_n) - low // block_n))
    mean, _, most = visited_keys(call, variant)
    assert most == max(blocks) * block_n
    assert mean == pytest.approx(sum(blocks) / len(blocks) * block_n)


def test_a_mask_alone_counts_as_one_that_hides_nothing():
    call = replace(CALL, mask_type="dense", window_right=UNBOUNDED, seqlen_q=4096, seqlen_kv=1000)
    variant = VARIANTS["sm90", 128, "dense", "mha"]
    assert visited_keys(call, variant) == (1024, 1024, 1024)
