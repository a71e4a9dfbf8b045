"""Faults to plant into how the main kernel counts thread blocks that have added to dQ, and how the convert
kernel waits for them.

A thread block runs to its end before another begins, so what it does too early within itself does not show.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.simulator.example import Shape
from simulator.faults import WRONG
from simulator.faults_backward import Fault

PLAIN = "flash_bwd_hdim64_bf16_sm90"
ORDERED = "flash_bwd_hdim64_bf16_ordered_sm90"
GROUPS = "flash_bwd_hdim64_fp16_causal_gqa_sm90"
WIDE = "flash_bwd_hdim192_128_bf16_causal_pair_sm90"
SHAPE = Shape(seqlen_q=150, seqlen_kv=300, heads=4)
GROUPED = Shape(seqlen_q=150, seqlen_kv=300, heads=8, kv_heads=4)
STUCK = ("deadlock",)
TOO_EARLY = ("dependency",)


@dataclass(frozen=True)
class CountingFault(Fault):
    """``multiprocessors`` of the pretended GPU: with more than a few, groups of query heads are split."""

    multiprocessors: int = 1


def plain(name, step, caught, old, new):
    return CountingFault(name, PLAIN, step, SHAPE, caught, old, new)


def groups(name, caught, old, new, multiprocessors=1):
    return CountingFault(name, GROUPS, "convert", GROUPED, caught, old, new, multiprocessors)


def wide(name, follows):
    """A consumer does not arrive: that which does ``follows`` behind it."""
    old = f"    barrier_arrive(kAddedBarrier, kAddedThreads);\n{_RELEASES}{follows}"
    return CountingFault(name, WIDE, "main", SHAPE, (*STUCK, "barrier"), old, _RELEASES + follows)


_RELEASES = "    release(barriers.ds_ready());  // this warp no longer reads K\n"
_COUNTS = "if (lane == 0) add_release_32(params.added"
_POLLS = "        while (int(load_acquire_32(added)) != params.key_blocks_of_head) {}\n"
_WAITS = "    if (block_index() == int(gridDim.x) - 1) griddepcontrol_wait();\n"
_LAUNCHES = "    griddepcontrol_launch_dependents();\n"

FAULTS = (
    # The main kernel.
    plain("thread blocks do not count", "main", STUCK, _COUNTS,
          "if (lane == 32) add_release_32(params.added"),
    plain("one thread block does not count", "main", STUCK, _COUNTS,
          "if (lane == 0 && block_index() != 4) add_release_32(params.added"),
    plain("all lanes count", "main", STUCK, _COUNTS, "add_release_32(params.added"),
    plain("consumers do not arrive", "main", (*STUCK, "barrier"),
          "    barrier_arrive(kAddedBarrier, kAddedThreads);\n", ""),
    wide("the consumer of dK does not arrive", "    mbarrier_wait(barriers.ds_ready()"),
    wide("the consumer of dV does not arrive", "    store_gradient<kHeadDimV>(params.dv, dv, 1.0f,"),
    plain("another head is counted", "main", STUCK,
          "params.added + head_of_grid(params, block), 1",
          "params.added + head_of_grid(params, block) / 2, 1"),
    plain("counters are not cleared", "preprocess", STUCK,
          "        store_global_32(params.added + head_of_batch, 0u);\n", ""),
    # It polls, and touches no other global memory. The next statement is launch_dependents.
    CountingFault("the thread that awaits turns does not wait for grids", ORDERED, "main", SHAPE, TOO_EARLY,
                  "    griddepcontrol_wait();\n",
                  "    if (threadIdx.x != 32) griddepcontrol_wait();\n    if (threadIdx.x != 32)\n"),
    # The convert kernel.
    plain("nothing is awaited", "convert", TOO_EARLY, _POLLS, ""),
    plain("the counter is looked at once", "convert", (WRONG,), _POLLS, "        load_acquire_32(added);\n"),
    plain("dQ is read ahead of the barrier", "convert", TOO_EARLY, "    __syncthreads();\n", ""),
    plain("the head before is awaited", "convert", (WRONG,),
          "params.added + head_of_batch;", "params.added + max(0, head_of_batch - 1);"),
    plain("the head behind is awaited", "convert", (*STUCK, "global bounds"),
          "params.added + head_of_batch;", "params.added + head_of_batch + 1;"),
    groups("a query head is taken for one of the grid", STUCK, " / params.heads_per_part;", ";"),
    groups("a later query head of a group awaits the group before", (WRONG,),
           "params.added + head_of_batch / params", "params.added + max(0, head_of_batch - 1) / params"),
    plain("one thread block fewer is awaited", "convert", (WRONG,),
          "!= params.key_blocks_of_head", "< params.key_blocks_of_head - 1"),
    plain("the counter is found without an acquire", "convert", TOO_EARLY,
          "load_acquire_32(added)", "load_relaxed_32(added)"),
    plain("no thread block awaits the grid", "convert", TOO_EARLY, _WAITS, ""),
    # Where another step follows.
    groups("no thread block awaits the grid, ahead of the sum", TOO_EARLY, _WAITS, "", multiprocessors=132),
    groups("the next step begins ahead of the wait", TOO_EARLY,
           _WAITS + _LAUNCHES, _LAUNCHES + _WAITS, multiprocessors=132),
    groups("the next step begins ahead of the counter", TOO_EARLY,
           "    if (threadIdx.x == 0) {\n", _LAUNCHES + "    if (threadIdx.x == 0) {\n", multiprocessors=132),
)  # fmt: skip
