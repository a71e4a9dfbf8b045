"""Faults to plant into the turns in which thread blocks add to dQ.

Blocks run one after the other, and each looks, where it adds, whether it has its turn. So a turn that
is passed too early is seen. One that is not awaited is seen where the blocks ahead of it are launched
after it, and never run.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.simulator.example import Shape
from flashgen.source.render import render
from simulator.faults_backward import Fault

AMPERE = "flash_bwd_hdim32_fp16_causal_ordered_sm80"
HOPPER = "flash_bwd_hdim64_bf16_causal_ordered_sm90"
WIDE = "flash_bwd_hdim192_bf16_causal_ordered_sm90"
SHAPE = Shape(seqlen_q=300, seqlen_kv=330, heads=1)
NARROW = Shape(seqlen_q=200, seqlen_kv=180, heads=1)

OUT_OF_TURN = ("global bounds", "global access")
STUCK = ("deadlock",)

_LAUNCHED = "params.num_row_blocks - 1 - blocks_ahead"
_POLLS = "while (!has_turn(params, tile, step)) {}"
# It would be found polling, before a consumer that does not await its turn has added.
_GIVES_UP = "if (!has_turn(params, tile, step)) return;"
_ADDS = {
    AMPERE: ("        add_dq(dq_tiles(params", "block, step"),
    HOPPER: ("        add_dq(own, dq", "tile, previous"),
    WIDE: ("if (i > 0) add_dq(own_dq", "tile, previous"),
}


def watched(source: str, name: str) -> str:
    """The source, in which a warp that adds out of turn writes where nothing is."""
    adds, step = _ADDS[name]
    assert adds in source
    adding = "i > 0 && " if adds.startswith("if (i > 0)") else ""
    late = f"{adding}lane == 0 && !has_turn(params, {step})"
    look = f"        if ({late}) store_global_32(params.turns - 1, 0u);\n"
    return source.replace(adds, look + adds)


@dataclass(frozen=True)
class TurnFault(Fault):
    """``backwards``: blocks are launched in the opposite order, so that those ahead never run."""

    backwards: bool = False

    def sources(self, step):
        source = render(step)
        if step.step == self.step:
            source = self.plant(source)
        if step.step == "main":
            source = watched(source, self.variant)
            if self.backwards:
                assert source.count(_LAUNCHED) == 1
                source = source.replace(_LAUNCHED, "blocks_ahead").replace(_POLLS, _GIVES_UP)
        return source


def ampere(name, caught, old, new, step="main", backwards=False):
    return TurnFault(name, AMPERE, step, SHAPE, caught, old, new, backwards)


def hopper(name, caught, old, new, step="main", backwards=False):
    return TurnFault(name, HOPPER, step, SHAPE, caught, old, new, backwards)


def wide(name, caught, old, new, backwards=False):
    return TurnFault(name, WIDE, "main", NARROW, caught, old, new, backwards)


AWAITS = "        if (i > 0) mbarrier_wait(barriers.turn(), (i + 1) % 2);\n"
AWAITS_OF_DV = "dq_of_panel(params, tile, previous, 0, warp_row, lane);\n" + AWAITS
AWAITS_OF_DK = "dq_of_panel(params, tile, previous, kDqPanelsOfDv, warp_row, lane);\n" + AWAITS
LAST_BLOCK = "    return min(last_query + params.diagonal_offset, params.seqlen_kv - 1) / kBlockN;\n"
EVERY_BLOCK = "    return (params.seqlen_kv - 1) / kBlockN;\n"

FAULTS = (
    ampere("a turn is not awaited", OUT_OF_TURN,
           "        while (!is_turn) is_turn = has_turn(params, block, step);", "",
           backwards=True),
    ampere("a turn is passed before all have added", (*OUT_OF_TURN, "barrier"),
           "            barrier_sync(2, kThreads);\n", ""),
    ampere("a turn is not passed on", STUCK,
           "if (lane == 0) pass_turn(", "if (lane == 32) pass_turn("),
    ampere("keys past the diagonal are waited for", STUCK, LAST_BLOCK, EVERY_BLOCK),
    ampere("those waited for are launched later", STUCK, _LAUNCHED, "blocks_ahead"),
    ampere("turns are not cleared", STUCK, "if (threadIdx.x < kBlocks)", "if (threadIdx.x < 0)",
           "preprocess"),
    hopper("a turn is not awaited", OUT_OF_TURN, "        while (!has_turn(params, tile, step)) {}\n", "",
           backwards=True),
    hopper("a turn is passed before anything is added", OUT_OF_TURN,
           "        mbarrier_wait(barriers.dq_added(), i % 2);\n        pass_turn(params, tile, step);\n",
           "        pass_turn(params, tile, step);\n        mbarrier_wait(barriers.dq_added(), i % 2);\n"),
    hopper("a turn is not passed on", STUCK, "        pass_turn(params, tile, step);\n", ""),
    hopper("consumers do not say what they have added", STUCK, "        release(barriers.dq_added());\n", ""),
    hopper("keys past the diagonal are waited for", STUCK, LAST_BLOCK, EVERY_BLOCK),
    hopper("turns are not cleared", STUCK, "if (threadIdx.x < kBlocks)", "if (threadIdx.x < 0)",
           "preprocess"),
    wide("the consumer of dV does not await its turn", OUT_OF_TURN,
         AWAITS_OF_DV, AWAITS_OF_DV.replace(AWAITS, ""), backwards=True),
    wide("the consumer of dK does not await its turn", OUT_OF_TURN,
         AWAITS_OF_DK, AWAITS_OF_DK.replace(AWAITS, ""), backwards=True),
    wide("a turn is passed when one consumer has added", (*OUT_OF_TURN, *STUCK),
         "mbarrier_init(dq_added(), 2 * kWarps);", "mbarrier_init(dq_added(), kWarps);"),
)  # fmt: skip
