"""The masks of xformers' own classes, beside the formula with the mask that xformers writes out for each."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
masks = pytest.importorskip("xformers.ops.fmha.attn_bias")

from flashgen.compat.xformers import memory_efficient_attention  # noqa: E402

QUERIES, KEYS, ROOM = [3, 1, 6], [5, 2, 9], 12
HEADS, WIDTH = 4, 32


def blocks(keys=KEYS):
    return masks.BlockDiagonalMask.from_seqlens(QUERIES, keys)


OF_A_BATCH = {
    "triangle": masks.LowerTriangularMask(),
    "triangle and a bias": masks.LowerTriangularMask().add_bias(torch.randn(2, HEADS, 8, 12)),
    "bottom right": masks.LowerTriangularFromBottomRightMask(),
    "local": masks.LocalAttentionFromBottomRightMask(window_left=2, window_right=1),
    "window": masks.LowerTriangularFromBottomRightMask().make_local_attention(3),
}
OF_BLOCKS = {
    "blocks": blocks(),
    "bottom right": blocks().make_causal_from_bottomright(),
    "triangles": blocks(QUERIES).make_causal(),
    "windows": blocks(QUERIES).make_local_attention(2),
    "windows from bottom right": blocks().make_local_attention_from_bottomright(3),
    "padded keys": masks.BlockDiagonalPaddedKeysMask.from_seqlens(QUERIES, ROOM, KEYS),
    "padded keys, causal": masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        QUERIES, ROOM, KEYS
    ),
    "padded keys, window": masks.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
        QUERIES, ROOM, KEYS, 4
    ),
    "padded keys, local": masks.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(
        QUERIES, ROOM, KEYS, window_left=3, window_right=1
    ),
}


def check(batch, rows, keys, mask):
    """With float32 inputs the CPU path computes in fp32."""
    q, k, v = (torch.randn(batch, count, HEADS, WIDTH) for count in (rows, keys, keys))
    whole = mask.materialize((batch, HEADS, rows, keys), dtype=torch.float64)
    right = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), attn_mask=whole
    )
    found = memory_efficient_attention(q, k, v, mask)
    torch.testing.assert_close(found.transpose(1, 2).double(), right, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", OF_A_BATCH)
def test_masks_of_a_batch(name):
    check(2, 8, 12, OF_A_BATCH[name])


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_masks_of_packed_sequences(name):
    mask = OF_BLOCKS[name]
    check(1, sum(QUERIES), mask.k_seqinfo.seqstart_py[-1], mask)
