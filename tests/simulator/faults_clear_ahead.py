"""Faults to plant into how thread blocks clear dQ of later heads.

Blocks run one after the other, so a missing wait shows only where they are launched in the opposite order:
those that clear come after those that add.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.simulator.example import Shape
from simulator.faults import WRONG
from simulator.faults_backward import Fault

PLAIN = "flash_bwd_hdim64_bf16_sm90"
GROUPS = "flash_bwd_hdim64_fp16_causal_gqa_sm90"
PAIR = "flash_bwd_hdim192_128_bf16_causal_pair_sm90"
# On one multiprocessor the preprocess kernel clears the first two heads.
SHAPE = Shape(seqlen_q=150, seqlen_kv=300, heads=4)
STUCK = ("deadlock",)

_LAUNCHED = "find_key_block(params, block_index())"
_BACKWARDS = "find_key_block(params, int(gridDim.x) - 1 - block_index())"


@dataclass(frozen=True)
class ClearingFault(Fault):
    """``backwards``: blocks are launched in the opposite order."""

    backwards: bool = False

    def sources(self, step):
        source = super().sources(step)
        if step.step == "main" and self.backwards:
            assert source.count(_LAUNCHED) == 1
            source = source.replace(_LAUNCHED, _BACKWARDS)
        return source


def plain(name, caught, old, new, step="main", backwards=False):
    return ClearingFault(name, PLAIN, step, SHAPE, caught, old, new, backwards)


_AWAITS = "    await_cleared(params, block);"

FAULTS = (
    plain("nobody clears the last rows of a head", (WRONG,),
          "min(begin + part_rows, tile_rows);", "min(begin + part_rows, tile_rows - 8);"),
    plain("a part is cleared past the end of its head", (WRONG, "global bounds", "global access"),
          "min(begin + part_rows, tile_rows);", "begin + part_rows;"),
    plain("another head is cleared", STUCK, "+ params.clear_distance;", "+ params.clear_distance + 1;"),
    plain("who has cleared does not count", STUCK,
          "if (lane == 0) add_release_32(params.cleared", "if (lane == 32) add_release_32(params.cleared"),
    plain("all lanes count", STUCK,
          "if (lane == 0) add_release_32(params.cleared", "add_release_32(params.cleared"),
    plain("zeros are found without an acquire", ("race",),
          "int(load_acquire_32(params.cleared", "int(load_relaxed_32(params.cleared"),
    plain("nobody waits for zeros", (WRONG,), _AWAITS, "", backwards=True),
    ClearingFault("a single step does not wait for zeros", PLAIN, "main",
                  Shape(seqlen_q=100, seqlen_kv=300, heads=4), (WRONG,),
                  _AWAITS + "\n    if (count == 1) load_dout(",
                  "    if (count != 1) await_cleared(params, block);\n    if (count == 1) load_dout(",
                  backwards=True),
    plain("heads that are launched later are waited for", STUCK, _AWAITS, _AWAITS, backwards=True),
    plain("counters are not cleared", STUCK,
          "        store_global_32(params.cleared + head_of_batch, 0u);\n", "", "preprocess"),
    plain("the preprocess kernel leaves out a head", (WRONG,),
          "head_of_batch < params.cleared_heads;", "head_of_batch + 1 < params.cleared_heads;", "preprocess"),
    ClearingFault("one query head of a group is cleared", GROUPS, "main",
                  Shape(seqlen_q=150, seqlen_kv=300, heads=8, kv_heads=4), (WRONG,),
                  "return heads_of_block(params) * unit_rows(params);", "return unit_rows(params);"),
    ClearingFault("a thread block of a pair clears nothing", PAIR, "main", SHAPE, STUCK,
                  "            clear_ahead(params, block, threadIdx.x % 32);\n",
                  "            if (block.index % 2 == 0) clear_ahead(params, block, threadIdx.x % 32);\n"),
)  # fmt: skip
