"""Faults to plant where the query heads of a kv head are split into parts: in what a thread block is for, in
what it leaves in the workspace, in the step that sums."""

from __future__ import annotations

from flashgen.simulator.example import Shape
from simulator.faults import WRONG
from simulator.faults_backward import Fault

AMPERE = "flash_bwd_hdim32_fp16_causal_gqa_sm80"
HOPPER = "flash_bwd_hdim64_fp16_causal_gqa_sm90"
# In two parts of two heads.
SHAPE = Shape(seqlen_q=70, seqlen_kv=150, heads=8, kv_heads=2, batch=2)
PARTS = 2

MEMORY = ("global bounds", "global access", "uninitialised global memory", WRONG)


def ampere(name, step, caught, old, new):
    return Fault(name, AMPERE, step, SHAPE, caught, old, new)


def hopper(name, step, caught, old, new):
    return Fault(name, HOPPER, step, SHAPE, caught, old, new)


FAULTS = (
    # What a thread block is for.
    ampere("one query head of a part", "main", (WRONG,),
           "Step{step.head + 1, queries.last}", "Step{step.head, queries.last}"),
    ampere("the first part for each of them", "main", MEMORY,
           "return block.group_part * params.heads_per_part;",
           "return kv_head_of(params, block) * params.group_parts * params.heads_per_part;"),
    hopper("keys of another kv head", "main", (WRONG,),
           "return block.group_part / params.group_parts;", "return block.group_part % params.num_heads_kv;"),
    hopper("parts not counted among the heads of a batch entry", "main", MEMORY,
           "head_of_batch / heads_of_grid(params);", "head_of_batch / params.num_heads_kv;"),
    # What it leaves.
    ampere("parts over each other", "main", MEMORY,
           "heads_of_grid(params) + block.group_part;", "heads_of_grid(params) + kv_head_of(params, block);"),
    ampere("columns of the warp beside", "main", MEMORY,
           "column_of(n, kQueryWarps, part) / 8) * kTileElements, sums",
           "column_of(n, kQueryWarps, 0) / 8) * kTileElements, sums"),
    hopper("keys of the consumer beside", "main", MEMORY,
           "        const int first_key = block.first_key + warp_key;",
           "        const int first_key = block.first_key + warp_key % 64;"),
    # The sum.
    ampere("a lost part", "sum", (WRONG,), "part < params.group_parts;", "part < params.group_parts - 1;"),
    ampere("a part summed twice", "sum", (WRONG,),
           "lanes + part * part_elements", "lanes + part / 2 * part_elements"),
    ampere("parts of the kv head beside", "sum", (WRONG,),
           "int64_t(head_of_batch) * params.group_parts * part_rows(params)",
           "int64_t(head_of_batch) * part_rows(params)"),
    ampere("dK without the scale", "sum", (WRONG,),
           "params.dk_row_stride, params.softmax_scale,", "params.dk_row_stride, 1.0f,"),
    ampere("keys past the end are written", "sum", ("global bounds", "global access"),
           "if (row < params.seqlen_kv) store", "store"),
    ampere("does not wait for the grid ahead", "sum", ("dependency",), "    griddepcontrol_wait();\n", ""),
)  # fmt: skip
