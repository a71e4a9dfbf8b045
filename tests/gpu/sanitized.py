"""A program for compute-sanitizer to watch: variants on problems of a few tiles, each result checked.

    compute-sanitizer --tool racecheck python tests/gpu/sanitized.py flash_fwd_hdim64_fp16_sm90 ...

A line "done NAME" per variant says that its kernels ran and were right. The names in PLANTED are kernels with
a fault, to see that the tool would find one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import secrets
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.families.load import load_specs
from flashgen.simulator.example import Example, Shape, make

if TYPE_CHECKING:
    from flashgen.families.variant import Variant

VARIANTS = {
    v.name: v
    for spec in load_specs()
    if spec.operator == "attention" and not spec.has_lengths and not spec.on_request
    for v in spec.variants()
    if v.is_main
}
# Few enough that a persistent block takes several tiles of the problems below.
MULTIPROCESSORS = 2
# Heads on kv heads. A group of four divides every tile, which a tensor map of packed rows needs.
HEADS = {"mha": (3, 3), "gqa": (6, 2), "packed": (8, 2)}
PLANTED = {
    # Writes the byte behind an array.
    "planted-memcheck": r"""
        extern "C" __global__ void planted(unsigned char* x, int size) {
          if (threadIdx.x == 0) x[size] = 1;
        }""",
    # Reads what another warp writes, with no barrier between.
    "planted-racecheck": r"""
        extern "C" __global__ void planted(unsigned char* x, int size) {
          __shared__ volatile unsigned char y[64];
          y[threadIdx.x] = threadIdx.x;
          x[threadIdx.x] = y[63 - threadIdx.x];
        }""",
}


def shapes(variant: Variant) -> list[Shape]:
    """Ragged tiles and several blocks of keys, with a head dim short of the variant's; few queries in a batch
    on less than a block of keys, without log-sum-exp. Where thread blocks share KV blocks out, some more of
    these, so that tiles are split.
    """
    rows, keys = variant.tile_value("block_m"), variant.tile_value("block_n")
    heads, kv_heads = HEADS[variant.gqa]
    folded = heads // kv_heads if variant.gqa == "packed" else 1
    narrow = variant.head_dim - (4 if variant.dtype == "fp32" else 8)
    grouped: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads}
    if variant.mask_type == "local":
        grouped["window"] = (keys, 3)
    found = [
        Shape(rows // folded + 17, 3 * keys + 5, head_dim=narrow, mask="hqk", mask_alignment=1, **grouped),
        Shape(7, keys // 2 + 3, batch=2, mask="k", mask_alignment=4, return_lse=False, **grouped),
    ]
    if variant.grid.shares:
        three = {"heads": 3 * heads // kv_heads, "kv_heads": 3}
        window = (23 * keys, 0) if variant.mask_type == "local" else None
        found.append(Shape(3, 24 * keys + 5, window=window, **three))
    return found


def extent(x: np.ndarray) -> int:
    """Bytes from the first to behind the last element."""
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)) + x.itemsize


def launch(variant: Variant, example: Example) -> None:
    """Run the variant on copies of the example's arrays that end with their last elements, and bring the
    outputs back.
    """
    import cupy

    from flashgen.runtime.device import device
    from flashgen.runtime.launch import bind
    from flashgen.schedule.plan import plan_steps

    gpu = device(0)
    few = dataclasses.replace(gpu, num_sms=MULTIPROCESSORS)
    launcher = bind(plan_steps(example.problem, variant, few), few)
    memory = [None if x is None else _bytes(x) for x in example.arrays]
    if memory[3] is not None and variant.spec == "flash_fwd_sm80":
        # Of a cp.async that is told to read fewer than its 16 bytes, the tools count all.
        memory[3] = np.append(memory[3], np.zeros(-memory[3].size % 16, np.uint8))
    copies = [None if x is None else cupy.asarray(x) for x in memory]
    workspace = cupy.full(max(1, launcher.workspace_bytes), 0xFF, cupy.uint8)
    pointers = (*(0 if copy is None else copy.data.ptr for copy in copies), workspace.data.ptr)
    launcher.at(pointers, example.problem)((None,) * 6, cupy.cuda.get_current_stream().ptr)
    for own, copy in zip(memory[4:], copies[4:], strict=True):
        if copy is not None:
            own[:] = copy.get()


def _bytes(x: np.ndarray) -> np.ndarray:
    """The memory of ``x`` from its first to its last element, writable."""
    return np.frombuffer((ctypes.c_uint8 * extent(x)).from_address(x.ctypes.data), np.uint8)


def run(name: str) -> None:
    """Raise AssertionError if a result is wrong."""
    variant = VARIANTS[name]
    for shape in shapes(variant):
        seed = secrets.randbits(32)
        example = make(variant, shape, seed)
        launch(variant, example)
        verdict = example.judge()
        assert verdict.ok, f"{name} on {shape}, seed {seed}: {verdict}"


def plant(name: str) -> None:
    """Run a kernel with a fault."""
    import cupy

    x = cupy.zeros(64, cupy.uint8)
    cupy.RawKernel(PLANTED[name], "planted")((1,), (64,), (x, np.int32(x.size)))
    cupy.cuda.Device().synchronize()


def main(names: list[str]) -> None:
    """Run each in turn."""
    import cupy

    # Every array is an allocation of its own: in a pool's block the tool would not see where it ends.
    cupy.cuda.set_allocator(None)
    for name in names:
        (plant if name in PLANTED else run)(name)
        print(f"done {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
