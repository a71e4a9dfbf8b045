"""Faults to plant into the main kernel of the backward pass for Hopper at wide head dims: in what its two
consumers hand to each other, in panels of dQ, in the epilogue."""

from __future__ import annotations

from flashgen.simulator.example import Shape
from simulator.faults import ASYNC, WRONG
from simulator.faults_backward import Fault

# Two panels of dQ to each consumer; and one to that of dV, two to that of dK.
PLAIN = "flash_bwd_hdim256_fp16_sm90"
CAUSAL = "flash_bwd_hdim192_bf16_causal_sm90"

SHAPE = Shape(seqlen_q=250, seqlen_kv=70, heads=1)
LONG = Shape(seqlen_q=250, seqlen_kv=100, heads=1)
# Blocks of keys that no query sees.
UNSEEN = Shape(seqlen_q=10, seqlen_kv=130, heads=1, top_left=True)

PROXY = ("proxy",)
# With phases out of step anything may come first.
PHASES = (*ASYNC, *PROXY, "deadlock", "mbarrier", WRONG)


def fault(name: str, variant: str, shape: Shape, caught: tuple[str, ...], old: str, new: str) -> Fault:
    return Fault(name, variant, "main", shape, caught, old, new)


LAST_DS = (
    "        const shared_address last_ds = i > 0 ? shared + kDsOffset + (i + 1) % 2 * kDsBytes : shared;\n"
)
PREVIOUS = "        previous = step;\n"
ADVANCE = (
    "        pin_registers(ds);\n        ring = next;\n"
    + PREVIOUS
    + "        step = next_step(step, queries);\n"
)

FAULTS = (
    # P, from consumer to consumer.
    fault("P is not awaited", PLAIN, SHAPE, ASYNC, "        mbarrier_wait(barriers.p_full(), i % 2);\n", ""),
    fault("P is written over while it is read", PLAIN, SHAPE, PHASES,
          "        mbarrier_wait(barriers.ds_ready(), (i + 1) % 2);\n", ""),
    fault("P of one lane", CAUSAL, LONG, ASYNC,
          "__syncwarp(); release(barriers.p_full());", "release(barriers.p_full());"),
    fault("P of the neighbouring warp", CAUSAL, LONG, (*ASYNC, WRONG),
          "load_shared_128(p_smem + (i / 4 * 128 + threadIdx.x % 128)",
          "load_shared_128(p_smem + (i / 4 * 128 + (threadIdx.x ^ 32) % 128)"),
    # dS.
    fault("one consumer alone releases dS", PLAIN, SHAPE, PHASES,
          "mbarrier_init(ds_ready(), 2 * kWarps);", "mbarrier_init(ds_ready(), kWarps);"),
    fault("dS over that of the step before", PLAIN, SHAPE, (*ASYNC, WRONG),
          "store_ds(packed_ds, shared + kDsOffset + i % 2 * kDsBytes,",
          "store_ds(packed_ds, shared + kDsOffset + (i + 1) % 2 * kDsBytes,"),
    fault("dS without a proxy fence", CAUSAL, LONG, PROXY,
          "fence_proxy_async(); float* own_dq", "float* own_dq"),
    fault("dS of one lane", CAUSAL, LONG, (*ASYNC, *PROXY),
          "__syncwarp(); release(barriers.ds_ready());", "release(barriers.ds_ready());"),
    fault("dP without its columns behind 128", CAUSAL, LONG, (WRONG,),
          "mma_scores<kHeadDimV>(ds, v_rows, is_last", "mma_scores<128>(ds, v_rows, is_last"),
    # Stages.
    fault("a stage that one consumer alone has released", PLAIN, SHAPE, PHASES,
          "mbarrier_init(empty(stage), 2 * kWarps);", "mbarrier_init(empty(stage), kWarps);"),
    fault("dO is not awaited for dV", PLAIN, SHAPE, ASYNC,
          LAST_DS + "        mbarrier_wait(barriers.dout_full(ring.stage), ring.parity);\n", LAST_DS),
    fault("a stage that dV still reads", PLAIN, SHAPE, (*ASYNC, WRONG),
          "        wgmma_wait<1>();\n        pin_registers(dv);\n", ""),
    # Scores of the next step.
    fault("Q of the next step is not awaited", PLAIN, SHAPE, ASYNC,
          "            mbarrier_wait(barriers.q_full(next.stage), next.parity);\n", ""),
    fault("dP behind the last step, of V", CAUSAL, LONG, ASYNC,
          "        if (is_last) v_rows.smem = shared;\n", ""),
    # dQ.
    fault("the second panel of dQ for the first", PLAIN, SHAPE, (*ASYNC, WRONG, "register in flight"),
          "            pin_registers(p);\n            if (i > 0) add_dq(own_dq, p);",
          "            if (i > 0) add_dq(own_dq, dq);"),
    fault("dQ of this step's block", CAUSAL, LONG, ("global bounds", WRONG), ADVANCE,
          ADVANCE.replace(PREVIOUS, "") + PREVIOUS),
    fault("a panel of dQ where its neighbour is", PLAIN, SHAPE, (WRONG, "global access"),
          "+ first_column / 8 * kTileElements", "+ (first_column ^ kDqColumns) / 8 * kTileElements"),
    # The epilogue.
    fault("dK over K that is still read", PLAIN, SHAPE, ASYNC,
          "    mbarrier_wait(barriers.ds_ready(), count % 2);  // no warp reads K: dK is staged there\n", ""),
    fault("V is loaded where no query sees it, over dV", CAUSAL, UNSEEN, (*ASYNC, WRONG),
          "    if (count == 0) return;\n", ""),
)  # fmt: skip
