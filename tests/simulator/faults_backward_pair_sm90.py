"""Faults to plant into the backward kernel for Hopper in clusters of two thread blocks: in what they send
each other, in the columns of dQ that each has, at their begin and end."""

from __future__ import annotations

from flashgen.simulator.example import Shape
from simulator.faults import ASYNC, WRONG
from simulator.faults_backward import Fault

PAIR = "flash_bwd_hdim192_bf16_causal_pair_sm90"
ONE_DOUT = "flash_bwd_hdim256_bf16_causal_pair_sm90"

# Three blocks of keys, and a fourth past the last key.
SHAPE = Shape(seqlen_q=200, seqlen_kv=150, heads=1)

# With phases out of step anything may come first.
PHASES = (*ASYNC, "proxy", "deadlock", "mbarrier", WRONG)


def fault(name: str, caught: tuple[str, ...], old: str, new: str, variant: str = PAIR) -> Fault:
    return Fault(name, variant, "main", SHAPE, caught, old, new)


RECEIVED = "        if (i > 0) mbarrier_wait(barriers.ds_received((i + 1) % 2), (i - 1) / 2 % 2);\n"
Q_FULL = "        mbarrier_wait(barriers.q_full(ring.stage), ring.parity);\n"
LAST_READY = (
    "        float dq[kDqColumnsOfDk / 2];\n        mbarrier_wait(barriers.ds_ready(), (count - 1) % 2);\n"
)
LAST_RECEIVED = "        mbarrier_wait(barriers.ds_received((count - 1) % 2), (count - 1) / 2 % 2);\n"
SENT = "if (threadIdx.x % 128 == 0) mbarrier_arrive_expect_tx(barriers.ds_received(i % 2), kOwnDsBytes);\n"

FAULTS = (
    # dS.
    fault("dS over what the peer has not read", PHASES,
          "        mbarrier_wait(barriers.slot_free(i % 2), (i / 2 + 1) % 2);\n", ""),
    fault("the dK consumer does not await dS of the peer", ASYNC, RECEIVED + Q_FULL, Q_FULL),
    fault("dS of the last step is not awaited", (*ASYNC, "mbarrier"), LAST_READY + LAST_RECEIVED, LAST_READY),
    fault("dS is sent without a proxy fence", ("proxy",),
          "        fence_proxy_async();\n        __syncwarp();", "        __syncwarp();"),
    fault("dS is sent when one lane has written it", (*ASYNC, "proxy"), "__syncwarp();\n" + SENT, SENT),
    fault("a barrier of the sender counts the bytes", ("operand",),
          "rows, map_shared(ds_received, peer), 16", "rows, ds_received, 16"),
    fault("one consumer alone frees a slot", PHASES,
          "mbarrier_init(slot_free(slot), 2 * kWarps);", "mbarrier_init(slot_free(slot), kWarps);"),
    # Columns of dQ.
    fault("the other half of the peer's K", (WRONG,),
          "(first_peer_panel(block) + panel) * kPanelColumns, row",
          "(kPanels - kPeerPanels - first_peer_panel(block) + panel) * kPanelColumns, row"),
    fault("the peer's K is not awaited", PHASES,
          "constexpr int kBytesWithDout = kVBytes + kPeerKBytes;", "constexpr int kBytesWithDout = kVBytes;"),
    # Begin and end.
    fault("each block takes steps of its own", PHASES,
          "return block.first_key - rank_of(block) * kBlockN;", "return block.first_key;"),
    fault("the peer's barriers are not awaited", ("race", "mbarrier"), "    cluster_wait();  //", "    //"),
    fault("barriers that no fence has made visible", ("race", "proxy"),
          "        fence_mbarrier_init();\n", ""),
    fault("a block leaves before its last copy has", ("copy in flight",),
          "    if (count > 0) mbarrier_wait(barriers.slot_free((count - 1) % 2), (count - 1) / 2 % 2);\n",
          ""),
    # The only buffer of dO.
    fault("dO of a step over that of the one before", PHASES,
          "    mbarrier_wait(barriers.dout_empty(), dout_ring.parity ^ 1);\n", "", ONE_DOUT),
    fault("one consumer alone frees dO", PHASES,
          "mbarrier_init(dout_empty(), 2 * kWarps);", "mbarrier_init(dout_empty(), kWarps);", ONE_DOUT),
    fault("dO is free when one lane has read delta", ASYNC,
          "        __syncwarp();  // all lanes have read delta\n        if (!is_last)",
          "        if (!is_last)", ONE_DOUT),
    fault("dS of the peer is not awaited behind dV", ASYNC,
          "        mma_gradient(dv, packed_p, dout_smem);\n" + RECEIVED,
          "        mma_gradient(dv, packed_p, dout_smem);\n", ONE_DOUT),
    fault("dQ is added while its MMA is under way", ("register in flight",),
          "dout_ring.stage * kDoutBytes);\n        wgmma_wait<1>();\n", "dout_ring.stage * kDoutBytes);\n",
          ONE_DOUT),
)  # fmt: skip
