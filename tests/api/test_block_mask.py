"""BlockMask on the CPU and in PyTorch's graphs: against the same mask as an array; what is wrong with lists;
which kernels take them.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import flashgen
from flashgen.families.load import load_specs
from flashgen.operators import attention, backward
from flashgen.operators.arguments import view_of_shape
from flashgen.operators.blocklists import SIDES
from flashgen.schedule.dispatch import offers, select

BLOCKS = tuple(itertools.product(SIDES, SIDES))
BATCH, QUERIES, KEYS, HEADS, KV_HEADS, WIDTH = 2, 300, 330, 4, 2, 32


def lists_of(listed):
    """indptr and indices of listed blocks, (batch, heads, blocks of queries, blocks of keys)."""
    counts = listed.sum(-1).reshape(-1)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    rows = listed.shape[2]
    begins = np.arange(listed.shape[0] * listed.shape[1])[:, None] * rows + np.arange(rows + 1)
    return ends[begins].reshape(*listed.shape[:2], rows + 1), np.nonzero(listed)[3].astype(np.int32)


def call_of(block, seed, shared=(False, False), width=WIDTH):
    """Arrays, listed blocks, and the same as a dense mask. The first block of queries has no keys."""
    rng = np.random.default_rng(seed)
    rows, keys = block
    lists = (1 if shared[0] else BATCH, 1 if shared[1] else KV_HEADS)
    listed = rng.random((*lists, -(-QUERIES // rows), -(-KEYS // keys))) < 0.5
    listed[:, :, 0] = False
    hidden = np.broadcast_to(~listed, (BATCH, KV_HEADS, *listed.shape[2:]))
    hidden = hidden.repeat(HEADS // KV_HEADS, 1).repeat(rows, 2)[:, :, :QUERIES].repeat(keys, 3)[..., :KEYS]
    q = rng.standard_normal((BATCH, QUERIES, HEADS, width), np.float32)
    k, v = (rng.standard_normal((BATCH, KEYS, KV_HEADS, width), np.float32) for _ in range(2))
    return (q, k, v), listed, np.ascontiguousarray(hidden)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (90, 20)}], ids=str)
def test_results_and_gradients_are_those_of_the_mask_as_an_array(block, options, fresh_seed):
    shared = fresh_seed % 2 == 0, fresh_seed % 3 == 0
    arrays, listed, hidden = call_of(block, fresh_seed, shared)
    mask = flashgen.BlockMask(*lists_of(listed), block)
    out, lse = flashgen.attention(*arrays, mask=mask, return_lse=True, **options)
    right = flashgen.attention(*arrays, mask=hidden, return_lse=True, **options)
    np.testing.assert_allclose(out, right[0], atol=2e-6)
    np.testing.assert_allclose(lse, right[1], atol=4e-6)
    assert np.isneginf(lse[:, :, : block[0]]).all()
    assert (out[:, : block[0]] == 0).all()
    dout = np.random.default_rng(fresh_seed).standard_normal(out.shape, np.float32)
    gradients = flashgen.attention_backward(dout, *arrays, out, lse, mask=mask, **options)
    expected = flashgen.attention_backward(dout, *arrays, *right, mask=hidden, **options)
    for gradient, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, other, atol=1e-5)
    assert (gradients[0][:, : block[0]] == 0).all()


def test_a_block_that_no_list_has_is_not_read(fresh_seed):
    (q, k, v), listed, _ = call_of((64, 64), fresh_seed, (True, True))
    listed[..., 2] = False
    mask = flashgen.BlockMask(*lists_of(listed), (64, 64))
    right = flashgen.attention(q, k, v, mask=mask)
    k[:, 128:192] = v[:, 128:192] = np.nan
    assert (flashgen.attention(q, k, v, mask=mask) == right).all()


def test_one_list_may_have_one_dimension_and_room_after_its_end(fresh_seed):
    arrays, listed, hidden = call_of((128, 64), fresh_seed, (True, True))
    indptr, indices = lists_of(listed)
    mask = flashgen.BlockMask(indptr[0, 0], np.append(indices, [-7, 1 << 30]).astype(np.int32), (128, 64))
    out = flashgen.attention(*arrays, mask=mask)
    np.testing.assert_allclose(out, flashgen.attention(*arrays, mask=hidden), atol=2e-6)
    assert "indices=" in repr(mask)


def test_no_entries_at_all():
    arrays, *_ = call_of((128, 128), 0)
    mask = flashgen.BlockMask(np.zeros(4, np.int32), np.zeros(0, np.int32))
    out, lse = flashgen.attention(*arrays, mask=mask, return_lse=True)
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    for gradient in flashgen.attention_backward(np.ones_like(out), *arrays, out, lse, mask=mask):
        assert (gradient == 0).all()


def wrong_calls():
    arrays, listed, _ = call_of((64, 64), 1)
    indptr, indices = lists_of(listed)
    (row, *_) = np.flatnonzero(np.diff(indptr[0, 0]) > 1)
    place = indptr[0, 0, row]
    doubled, unsorted, outside, below = (indices.copy() for _ in range(4))
    doubled[place + 1] = doubled[place]
    unsorted[place : place + 2] = unsorted[place : place + 2][::-1]
    outside[place], below[place] = 6, -1
    falling = indptr.copy()
    falling[1, 0, 2] = falling[1, 0, 1] - 1

    def attend(*lists, block=(64, 64), **options):
        return lambda: flashgen.attention(*arrays, mask=flashgen.BlockMask(*lists, block), **options)

    return {
        "another size": (attend(indptr, indices, block=(32, 64)), "block of the BlockMask is"),
        "no size": (attend(indptr, indices, block=64), "each of them 64 or 128"),
        "blocks of other rows": (
            attend(indptr, indices, block=(128, 64)),
            "indptr of the BlockMask has shape",
        ),
        "lists of query heads": (attend(indptr.repeat(2, 1), indices), "kv heads"),
        "two dimensions": (attend(indptr[0], indices), "expected one dimension, or three"),
        "entries in two dimensions": (attend(indptr, indices[None]), "indices of the BlockMask has shape"),
        "int64": (attend(indptr.astype(np.int64), indices), "has dtype int64; expected int32"),
        "floats": (attend(indptr, indices.astype(np.float32)), "indices of the BlockMask has dtype"),
        "a block twice": (attend(indptr, doubled), "has a block once"),
        "not in order": (attend(indptr, unsorted), "in ascending order"),
        "past the last block": (attend(indptr, outside), "is 6; expected a block of keys, 0 to 5"),
        "below 0": (attend(indptr, below), "is -1; expected a block of keys"),
        "a falling indptr": (attend(falling, indices), "it must not decrease"),
        "past the end of indices": (attend(indptr, indices[:-1]), "the length of"),
        "a dense mask type": (attend(indptr, indices, mask_type="dense"), "mask is a BlockMask"),
        "lengths": (
            attend(indptr, indices, kv_lengths=np.full(2, 9, np.int32)),
            "kv_lengths was given and mask is a BlockMask",
        ),
        "weights": (
            attend(indptr, indices, return_weights=True),
            "return_weights is True and mask is a BlockMask",
        ),
    }


@pytest.mark.parametrize("wrong", wrong_calls())
def test_what_is_wrong_with_lists_is_said(wrong):
    call, message = wrong_calls()[wrong]
    with pytest.raises(flashgen.FlashgenError, match=message):
        call()


def test_pytorch_records_a_call_and_compiles_it(fresh_seed):
    torch = pytest.importorskip("torch")
    arrays, listed, hidden = call_of((64, 128), fresh_seed)
    indptr, indices = map(torch.from_numpy, lists_of(listed))
    mask = flashgen.BlockMask(indptr, indices, (64, 128))
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays]

    def attend(q, k, v, mask):
        return flashgen.attention(q, k, v, mask=mask, causal=True)

    expected = torch.autograd.grad(attend(*leaves, torch.from_numpy(hidden)).square().sum(), leaves)
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        gradients = torch.autograd.grad(function(*leaves, mask).square().sum(), leaves)
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, atol=1e-4, rtol=1e-4)


def gpu(arch, smem):
    major, minor = divmod(int(arch), 10)
    return SimpleNamespace(
        name=f"sm_{arch}",
        ordinal=0,
        arch=f"sm_{arch}",
        compute_capability=(major, minor),
        num_sms=108,
        smem_per_block=smem,
        smem_per_sm=smem + 1024,
        l2_bytes=40 << 20,
        memory_gbps=2000,
    )


WIDTHS = (*((width, width) for width in (32, 64, 80, 96, 112, 128, 160, 192, 256)), (192, 128))
GPUS = gpu("80", 166912), gpu("89", 101376), gpu("90", 232448)
SPECS = load_specs()


def chosen(device, widths, dtype, block, gradients, kv_heads=2, **options):
    rows, keys = (2, 1000, 4), (2, 1000, kv_heads)
    q, k = (view_of_shape((*of, widths[0]), dtype, 0) for of in (rows, keys))
    out, v = (view_of_shape((*of, widths[1]), dtype, 0) for of in (rows, keys))
    lists = {
        "block_indptr": view_of_shape((2, kv_heads, -(-1000 // block[0]) + 1), "int32", 0),
        "block_indices": view_of_shape((300,), "int32", 0),
        "block_size": block,
    }
    if gradients:
        lse = view_of_shape((2, 4, 1000), "fp32", 0)
        problem = backward.normalise(out, q, k, v, out, lse, **lists, **options)
    else:
        problem = attention.normalise(q, k, v, **lists, **options)
    return select(problem, device, offers(problem, device, SPECS))


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_size_of_blocks_has_kernels(device, block, fresh_seed):
    of_heads = WIDTHS[fresh_seed % len(WIDTHS)]
    for dtype in ("fp16", "bf16", "fp32"):
        kv_heads = 2 + 2 * (fresh_seed % 2)
        variant = chosen(device, of_heads, dtype, block, gradients=False, kv_heads=kv_heads)
        assert block[0] % variant.grid.covers[0][1] == block[1] % variant.visits.keys == 0
        if dtype == "fp32" and of_heads[0] == 256 and device is GPUS[1]:
            continue  # no gradients
        variant = chosen(device, of_heads, dtype, block, True, kv_heads, deterministic=fresh_seed % 3 == 0)
        assert block[0] % variant.grid.step_rows == block[1] % variant.grid.covers[0][1] == 0


def test_hopper_has_kernels_of_its_own():
    assert chosen(GPUS[2], (128, 128), "bf16", (128, 128), gradients=False).target == "sm90"
    assert chosen(GPUS[2], (128, 128), "bf16", (64, 64), gradients=False).target == "sm90"
    assert chosen(GPUS[2], (128, 128), "bf16", (64, 128), gradients=True).target == "sm90"


def test_a_size_without_a_kernel_is_refused_by_name():
    specs = [spec for spec in SPECS if spec.name == "flash_bwd_sm90"]
    rows = view_of_shape((1, 1000, 2, 128), "bf16", 0)
    problem = backward.normalise(
        *(rows,) * 5,
        view_of_shape((1, 2, 1000), "fp32", 0),
        block_indptr=view_of_shape((1, 1, 17), "int32", 0),
        block_indices=view_of_shape((100,), "int32", 0),
        block_size=(64, 64),
    )
    with pytest.raises(flashgen.SpecError, match="blocks of 64 queries and 64 keys"):
        select(problem, GPUS[2], offers(problem, GPUS[2], specs))
