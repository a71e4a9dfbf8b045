"""Masks of arrays on the GPU: both families within the bound, the bits of the same mask by a line, kept
lists, and captured graphs.
"""

import numpy as np
import pytest

import flashgen

torch = pytest.importorskip("torch")

from gpu.test_masks_gpu import SHAPES, check, inputs, mask_of  # noqa: E402


def array_of(shape, rng, heads, aligned=True):
    """An array with large boxes that are hidden, and some single keys."""
    batch, queries, keys, *_ = shape
    hidden = torch.zeros(batch, heads, queries, keys + (-keys % 16 if aligned else 1), dtype=torch.bool)[
        ..., :keys
    ]
    for _ in range(20):
        (i, j), (k, n) = (np.sort(rng.integers(0, extent + 1, 2)) for extent in (queries, keys))
        hidden[..., i:j, k:n] = bool(rng.integers(0, 2))
    hidden[torch.from_numpy(rng.random(hidden.shape) < 0.001)] ^= True
    return hidden.cuda()


@pytest.mark.parametrize("algorithm", ["v2", None])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_array_is_within_the_bound(shape, aligned, algorithm, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    hidden = array_of(shape, rng, shape[3] if aligned else 1, aligned)
    check(shape, "bf16", flashgen.Mask.from_array(hidden), fresh_seed, algorithm=algorithm)


def test_an_array_has_the_bits_of_its_line_and_lists_are_kept(fresh_seed):
    shape, rng = (2, 1000, 1000, 8, 2, 128, False), np.random.default_rng(fresh_seed)
    arrays = inputs(shape, "bf16", fresh_seed)
    for _ in range(2):
        line = mask_of("documents", shape, rng)
        doc = line.arrays["doc"]
        hidden = (doc[:, :, None] != doc[:, None]) | torch.ones(1000, 1000, device="cuda").triu(1).bool()
        mask = flashgen.Mask.from_array(hidden[:, None])
        right = flashgen.attention(*arrays, mask=line)
        assert torch.equal(flashgen.attention(*arrays, mask=mask), right)
        assert torch.equal(flashgen.attention(*arrays, mask=mask), right)  # by the kept lists
        mask.check()
        hidden[:, 5] = True  # PyTorch counts it
        assert not flashgen.attention(*arrays, mask=mask)[:, 5].any()


def test_a_captured_graph_reads_the_array_of_its_replay(fresh_seed):
    shape, rng = (2, 1000, 1000, 8, 2, 128, False), np.random.default_rng(fresh_seed)
    arrays, hidden = inputs(shape, "bf16", fresh_seed), array_of(shape, rng, 1)
    mask = flashgen.Mask.from_array(hidden)
    flashgen.attention(*arrays, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashgen.attention(*arrays, mask=mask)
    hidden.copy_(array_of(shape, rng, 1))
    graph.replay()
    assert torch.equal(captured, flashgen.attention(*arrays, mask=mask))
