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
PAIR = "flash_bwd_hdim192_bf16_causal_ordered_pair_sm90"
NARROW = Shape(seqlen_q=200, seqlen_kv=180, heads=1)
TWO_PAIRS = Shape(seqlen_q=200, seqlen_kv=250, heads=1)

OUT_OF_TURN = ("global bounds", "global access")
STUCK = ("deadlock",)
UNORDERED = ("race",)

_LAUNCHED = "params.num_row_blocks - 1 - blocks_before"
_LAUNCHED_PAIR = "params.num_row_blocks - 2 - 2 * pairs_before"
_POLLS = "while (!has_turn(params, block, step)) {}"
# It would be found polling, before a consumer that does not await its turn has added.
_GIVES_UP = "if (!has_turn(params, block, step)) return;"
_ADDS = {
    AMPERE: ("        add_dq(params, block, step", "block, step"),
    HOPPER: ("        add_dq(address, dq", "block, previous"),
    WIDE: ("if (i > 0) add_", "block, previous"),
    PAIR: ("    add_dq(own, dq", "block, step"),
}


def watched(source: str, name: str) -> str:
    """The source, in which a warp that adds out of turn writes where nothing is."""
    adds, step = _ADDS[name]
    assert adds in source
    if name == PAIR:  # adds in a function, which needs to know whose turn it is
        of_step = "const Params& params, const KeyBlock& block, const Step& step, "
        source = source.replace("add_dq_of_step(const", f"add_dq_of_step({of_step}const")
        source = source.replace("add_dq_of_step(barriers", "add_dq_of_step(params, block, previous, barriers")
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
                launched, opposite = _LAUNCHED, "blocks_before"
                if self.variant == PAIR:
                    launched, opposite = _LAUNCHED_PAIR, "2 * pairs_before"
                assert source.count(launched) == 1
                source = source.replace(launched, opposite).replace(_POLLS, _GIVES_UP)
        return source


def ampere(name, caught, old, new, step="main", backwards=False):
    return TurnFault(name, AMPERE, step, SHAPE, caught, old, new, backwards)


def hopper(name, caught, old, new, step="main", backwards=False):
    return TurnFault(name, HOPPER, step, SHAPE, caught, old, new, backwards)


def wide(name, caught, old, new, backwards=False):
    return TurnFault(name, WIDE, "main", NARROW, caught, old, new, backwards)


def pair(name, caught, old, new, step="main", backwards=False):
    return TurnFault(name, PAIR, step, TWO_PAIRS, caught, old, new, backwards)


AWAITS = "        if (i > 0) mbarrier_wait(barriers.turn(), (i + 1) % 2);\n"
AWAITS_OF_DV = "dq_of(params, block, previous, 0, warp_row, lane);\n" + AWAITS
AWAITS_OF_DK = "dq_of(params, block, previous, kDqPanelsOfDv * kDqColumns, warp_row, lane);\n" + AWAITS
ADDED = "        mbarrier_wait(barriers.dq_added(), i % 2);\n"
NEXT = "        mbarrier_arrive(barriers.turn());  // of the next step\n"
# Behind it the poll has found the turn: one that is passed ahead of the poll would be waited for in vain.
BEGUN = "        mbarrier_wait(barriers.turn(), i % 2);\n"
PASSES = "        pass_turn(params, block, step);\n"
IN_TURN_OF_DV = "        if (i > 0) add_dq_of_step(barriers, i - 1, own_dq, dq, lane);\n"
IN_TURN_OF_DK = IN_TURN_OF_DV.replace("dq, lane", "ds, lane")
AT_ANY_TIME = """        if (i > 0) {
            if (lane == 0 && !has_turn(params, block, previous)) store_global_32(params.turns - 1, 0u);
            add_dq(own_dq, dq);
            __syncwarp();
            release(barriers.dq_added());
        }
"""
OF_PAIR = """    const QueryBlocks queries = queries_of_block(params, block);
    const int count = num_steps(params, queries);
    Step step = first_step(params, block, queries);
    mbarrier_arrive("""
LAST_BLOCK = "    return min(last_query + params.diagonal_offset, params.seqlen_kv - 1) / kBlockN;\n"
EVERY_BLOCK = "    return (params.seqlen_kv - 1) / kBlockN;\n"

FAULTS = (
    ampere("a turn is not awaited", OUT_OF_TURN,
           "        while (!is_turn) is_turn = has_turn(params, block, step);", "",
           backwards=True),
    ampere("a turn is passed before all have added", (*OUT_OF_TURN, "barrier"),
           "            barrier_sync(kAddedBarrier, kThreads);\n", ""),
    ampere("a turn is not passed on", STUCK,
           "if (lane == 0) pass_turn(", "if (lane == 32) pass_turn("),
    ampere("keys past the diagonal are waited for", STUCK, LAST_BLOCK, EVERY_BLOCK),
    ampere("those waited for are launched later", STUCK, _LAUNCHED, "blocks_before"),
    ampere("a turn is passed without a release", UNORDERED,
           "store_release_32(turns_of(", "store_global_32(turns_of("),
    ampere("a turn is found without an acquire", UNORDERED,
           "return load_acquire_32(turns_of(", "return load_relaxed_32(turns_of("),
    ampere("turns are not cleared", STUCK, "if (threadIdx.x < kTurns)", "if (threadIdx.x < 0)",
           "preprocess"),
    hopper("a turn is not awaited", OUT_OF_TURN, "        while (!has_turn(params, block, step)) {}\n", "",
           backwards=True),
    hopper("a turn is passed before anything is added", OUT_OF_TURN,
           ADDED + NEXT + PASSES, BEGUN + PASSES + ADDED + NEXT),
    hopper("dQ of a step is added over that of the step before", (*OUT_OF_TURN, *STUCK),
           ADDED + NEXT, NEXT + ADDED),
    hopper("a turn counts for two steps", (*OUT_OF_TURN, *STUCK),
           "        if (i > 0) mbarrier_wait(barriers.turn(), (i - 1) % 2);", "       "),
    hopper("the first step is not begun", STUCK,
           "mbarrier_arrive(barriers.turn());\n#pragma unroll 1\n", "#pragma unroll 1\n"),
    hopper("a turn is not passed on", STUCK, "        pass_turn(params, block, step);\n", ""),
    hopper("consumers do not say what they have added", STUCK, "        release(barriers.dq_added());\n", ""),
    hopper("keys past the diagonal are waited for", STUCK, LAST_BLOCK, EVERY_BLOCK),
    hopper("a turn is passed without a release", UNORDERED,
           "store_release_32(turns_of(", "store_global_32(turns_of("),
    hopper("a turn is found without an acquire", UNORDERED,
           "return load_acquire_32(turns_of(", "return load_relaxed_32(turns_of("),
    hopper("turns are not cleared", STUCK, "if (threadIdx.x < kTurns)", "if (threadIdx.x < 0)",
           "preprocess"),
    wide("the consumer of dV does not await its turn", OUT_OF_TURN,
         AWAITS_OF_DV, AWAITS_OF_DV.replace(AWAITS, ""), backwards=True),
    wide("the consumer of dK does not await its turn", OUT_OF_TURN,
         AWAITS_OF_DK, AWAITS_OF_DK.replace(AWAITS, ""), backwards=True),
    wide("a turn is passed when one consumer has added", (*OUT_OF_TURN, *STUCK),
         "mbarrier_init(dq_added(), 2 * kWarps);", "mbarrier_init(dq_added(), kWarps);"),
    pair("the consumer of dV does not await its turn", OUT_OF_TURN,
         IN_TURN_OF_DV, AT_ANY_TIME, backwards=True),
    pair("the consumer of dK does not await its turn", OUT_OF_TURN,
         IN_TURN_OF_DK, AT_ANY_TIME.replace("own_dq, dq", "own_dq, ds"), backwards=True),
    pair("one turn for both halves of the columns", (*OUT_OF_TURN, *STUCK), " * 2 + rank_of(block);", ";"),
    pair("turns of blocks, not of pairs", STUCK, "/ 2 - block.index / 2;", "- block.index;"),
    pair("a block of a pair that sees nothing of a step takes no turn", (*OUT_OF_TURN, *STUCK),
         OF_PAIR, OF_PAIR.replace("queries_of_block(params, block)",
                                  "find_query_blocks(params, block.first_key)")),
    pair("counters of one half are not cleared", STUCK, "kTurns = 2 * ", "kTurns = ", "preprocess"),
)  # fmt: skip
