"""Arrays of a score modification that kernels stage in shared memory: every alignment, and faults."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from backward_variants import MAIN
from flashgen.families.scores import load_scores
from flashgen.operators.scores import chained
from flashgen.simulator import hardware, randomarrays
from flashgen.simulator.example import Shape
from flashgen.source.render import render
from simulator.calls import check_of
from simulator.covering import VARIANTS
from simulator.edits import replace
from simulator.faults import ASYNC, BOUNDS, NUMBERS

TILES = "flash_fwd_hdim64_bf16_causal_m64_sm90"
OVERLAPPED = "flash_fwd_hdim64_fp16_sm90"
PACKED = "flash_fwd_hdim64_fp16_causal_m64_packgqa_sm90"
ROOMY = "flash_fwd_hdim64_fp16_n128_sm90"  # fp32 elements fit
TWO_BUFFERS = "flash_fwd_hdim64_bf16_n64_sm90"  # also of fp32
PACKED_OVERLAPPED = "flash_fwd_hdim64_fp16_packgqa_sm90"
DIAGONAL = "flash_fwd_hdim64_bf16_causal_m128_sm90"
LISTED = "flash_fwd_hdim64_bf16_blocks_m64_sm90"
DENSE = "flash_fwd_hdim64_bf16_dense_sm90"
ODD_CHUNKS = "flash_fwd_hdim64_bf16_n80_sm90"  # 80 keys are 10 chunks
BACKWARD = "flash_bwd_hdim64_bf16_causal_sm90"
STEPS_OF_64 = "flash_bwd_hdim128_fp16_gqa_sm90"
# Rows of 8 n keys, of 2 n, and an odd number.
LENGTHS = [(200, 144), (75, 150), (70, 137), (1, 1)]


def modified(name, *, dtype="bf16", chain=False):
    """The kernel with a bias, or with a bias of scores that a tanh has bounded."""
    scores = load_scores(keywords=()).by_name
    bias = scores["bias"] if dtype == "f32" else scores["bias"].with_types({"bias": dtype})
    variant = {**MAIN, **VARIANTS}[name].modified(chained([scores["softcap"], bias]) if chain else bias)
    assert "stages_scores" in variant.features
    return variant


def shape_of(variant, seqlen_q, seqlen_kv):
    heads = {"heads": 2} if variant.gqa == "mha" else {"heads": 4, "kv_heads": 2}
    return Shape(seqlen_q, seqlen_kv, batch=2, spread=2.0, **heads)


def in_rows(x, pitch, offset):
    """The elements in rows of ``pitch`` elements, the first ``offset`` elements past a multiple of 16 bytes.
    Between the rows are NaNs.
    """
    *outer, keys = x.shape
    rows = int(np.prod(outer))
    memory = np.full(rows * pitch + 16, 0x7FC0 if x.dtype == np.uint16 else np.nan, x.dtype)
    begin = -memory.ctypes.data % 16 // x.itemsize + offset
    spaced = memory[begin : begin + rows * pitch].reshape(*outer, pitch)[..., :keys]
    spaced[...] = x
    return spaced


LAYOUTS = {
    "contiguous": lambda x: x,
    "by 16 bytes": lambda x: in_rows(x, -(-x.shape[-1] // 8) * 8, 0),
    "by 4 bytes": lambda x: in_rows(x, x.shape[-1] // 2 * 2 + 4, 2),
    "by 2 bytes": lambda x: in_rows(x, -(-x.shape[-1] // 8) * 8, 1),
    "each row another": lambda x: in_rows(x, x.shape[-1] // 2 * 2 + 3, 0),
    "one row": lambda x: np.broadcast_to(x[:1, :, :1], x.shape),
    "rows backwards": lambda x: in_rows(x, -(-x.shape[-1] // 8) * 8, 0)[:, :, ::-1],
    "floats": lambda x: x,
    "floats by 4 bytes": lambda x: in_rows(x, x.shape[-1] + 1, 1),
}
CASES = [
    (TILES, "contiguous"),
    (TILES, "by 4 bytes"),
    (TILES, "each row another"),
    (OVERLAPPED, "by 16 bytes"),
    (OVERLAPPED, "by 2 bytes"),
    (DIAGONAL, "each row another"),
    (DIAGONAL, "rows backwards"),
    (LISTED, "contiguous"),
    (PACKED_OVERLAPPED, "contiguous"),
    (PACKED, "by 16 bytes"),
    (DENSE, "one row"),
    (ROOMY, "floats"),
    (TWO_BUFFERS, "floats"),
    (DIAGONAL, "floats by 4 bytes"),
    (ODD_CHUNKS, "by 16 bytes"),
    (BACKWARD, "by 16 bytes"),
    (BACKWARD, "each row another"),
    (BACKWARD, "rows backwards"),
    (STEPS_OF_64, "by 4 bytes"),
    (STEPS_OF_64, "one row"),
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_bias_of_any_layout(name, layout, monkeypatch, compiler, fresh_seed):
    drawn = randomarrays.score_arrays_of
    monkeypatch.setattr(
        randomarrays,
        "score_arrays_of",
        lambda *of: tuple(LAYOUTS[layout](x) if x.ndim == 4 else x for x in drawn(*of)),
    )
    dtype = "f32" if layout.startswith("floats") else "f16" if layout == "by 2 bytes" else "bf16"
    variant = modified(name, dtype=dtype, chain=layout in ("by 4 bytes", "each row another"))
    for lengths in LENGTHS:
        assert check_of(variant, shape_of(variant, *lengths), fresh_seed) is None, lengths


class Fault(NamedTuple):
    name: str
    variant: str
    seqlen_kv: int
    old: str
    new: str
    caught: tuple[str, ...] = NUMBERS
    dtype: str = "bf16"


AWAITED = "cp_async_wait<0>(); __syncwarp(); "
EMPTY = "mbarrier_wait(shared.elements_empty(ring.stage, consumer), ring.parity ^ 1);"
FULL = "mbarrier_wait(shared.elements_full(element_ring.stage, consumer), element_ring.parity);"
LOAD = "load_elements(elements, shared.elements(element_ring.stage, warp_row / 16), lane); __syncwarp();"
RELEASE = "release(shared.elements_empty(element_ring.stage, consumer));"
FAULTS = [
    Fault("copies not awaited", PACKED, 144,
          "cp_async_wait<0>(); __syncwarp();", "__syncwarp();", (*ASYNC, *NUMBERS)),
    Fault("copies of other lanes not awaited", PACKED, 144, AWAITED,
          "cp_async_wait<0>();", (*ASYNC, *NUMBERS)),
    Fault("copies not awaited, backward", BACKWARD, 144,
          "cp_async_wait<0>(); __syncwarp();", "__syncwarp();", (*ASYNC, *NUMBERS)),
    Fault("rows taken for aligned", TILES, 137,
          "return reinterpret_cast<uint64_t>(row) % 16 == 0;", "return true;", ("alignment",)),
    Fault("elements past the last key", TILES, 137,
          "min(max(seqlen_kv - key, 0), kChunk);", "kChunk;", BOUNDS),
    Fault("elements past the last key, backward", STEPS_OF_64, 137,
          "min(max(seqlen_kv - key, 0), kChunk);", "kChunk;", BOUNDS),
    Fault("rows past the last", BACKWARD, 144,
          "row_of(min(row, params.seqlen_q - 1 - first_query))", "row_of(row)", BOUNDS),
    Fault("second half of the rows read as the first", OVERLAPPED, 144,
          "chunk_offset(lane % 16,", "chunk_offset(lane % 8,"),
    Fault("chunks of another order", OVERLAPPED, 144, "j + lane / 16)", "j + 1 - lane / 16)"),
    Fault("floats of another order", TWO_BUFFERS, 144,
          "chunk = i / 4 * 2 + lane % 4 / 2;", "chunk = i / 4 * 2 + 1 - lane % 4 / 2;", dtype="f32"),
    Fault("floats permuted by copies alone", TWO_BUFFERS, 144,
          "buffer + chunk_offset(row, chunk) + lane % 2 * 8",
          "buffer + 16 * (row * kElementChunks + chunk) + lane % 2 * 8", dtype="f32"),
    Fault("elements of the last tile", PACKED_OVERLAPPED, 144,
          "q_ring.advance(); copy_elements(params, score_rows, score_buffer, last_block * kBlockN, lane);",
          "q_ring.advance();"),
    Fault("full buffer not awaited", OVERLAPPED, 144, FULL, "", (*ASYNC, *NUMBERS)),
    Fault("buffer released before it is read", DIAGONAL, 600,
          f"{LOAD} {RELEASE}", f"{RELEASE} {LOAD}", (*ASYNC, *NUMBERS)),
    Fault("empty buffer not awaited", TILES, 600, EMPTY, "", (*ASYNC, *NUMBERS, "deadlock")),
    Fault("copies that full does not wait for", OVERLAPPED, 144,
          "cp_async_mbarrier_arrive(shared.elements_full(ring.stage, consumer));",
          "mbarrier_arrive(shared.elements_full(ring.stage, consumer));", (*ASYNC, *NUMBERS)),
    Fault("elements of the wrong block", OVERLAPPED, 300,
          "4 * consumer), kv_block * kBlockN);", "4 * consumer), 0);"),
    Fault("copied rows too close", OVERLAPPED, 144, "next += step;", "next += step / 2;"),
    Fault("elements of the wrong consumer", OVERLAPPED, 144,
          "consumer_row = tile.first_row + 64 * consumer;", "consumer_row = tile.first_row;"),
    Fault("tiles in another order than the heads", OVERLAPPED, 144,
          "place % params.batch_size * num_heads + place / params.batch_size;",
          "place % params.batch_size * num_heads;", (*ASYNC, *NUMBERS)),
    Fault("queries exchanged", BACKWARD, 144,
          "e == 0 ? elements.x : elements.y", "e == 1 ? elements.x : elements.y"),
    Fault("keys exchanged", STEPS_OF_64, 144, "lane / 8 % 2)", "1 - lane / 8 % 2)"),
    Fault("row stride ignored", STEPS_OF_64, 144, "source += 16 * params.bias_row_stride;", "source += 16;"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    variant = modified(fault.variant, dtype=fault.dtype)

    def planted(step):
        return replace(render(step), fault.old, fault.new, fault.name) if step.is_main else render(step)

    # Several tiles of a thread block, of 192 rows each.
    shape = shape_of(variant, 500 if fault.variant == OVERLAPPED else 150, fault.seqlen_kv)
    device = dataclasses.replace(hardware.pretend_for(variant), num_sms=2)
    assert check_of(variant, shape, fixed_seed, planted, device=device) in fault.caught
