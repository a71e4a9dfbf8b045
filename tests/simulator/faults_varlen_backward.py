"""Faults to plant into the backward kernels of sequences: in where a sequence begins and ends."""

from __future__ import annotations

from flashgen.simulator.example import Shape
from simulator.faults import ASYNC, BOUNDS, NUMBERS, WRONG
from simulator.faults_backward import Fault

PLAIN = "32_fp16_sm80"
CAUSAL = "32_fp16_causal_gqa_sm80"
ORDERED = "32_fp16_causal_ordered_sm80"
MANY = Shape(100, 150, 2, batch=5)
CROWD = Shape(5, 20, 1, batch=40)
IN_TURNS = Shape(100, 150, 1, batch=9)  # of so many sequences some have queries and keys, whatever the seed
GROUPS = Shape(100, 150, 4, 2, batch=5)
# On Hopper. One sequence, whose last blocks are not whole.
HOPPER = "32_fp16_sm90"
ALONE = Shape(100, 150, 1)
PAIR_OF_HEADS = Shape(100, 150, 2, 1)
PAIR = "192_128_fp16_pair_sm90"
TURNS = "32_fp16_causal_ordered_sm90"
WIDE, WIDE_GROUP = "192_128_fp16_sm90", "192_128_fp16_gqa_sm90"
SHARED = Shape(100, 150, 1, batch=8)
PADDED, PACKED = {"packed_q": False, "packed_kv": False}, {"packed_q": True, "packed_kv": True}

BEHIND = PACKED | {"behind": True}

STEP_CLEARED = "dout_ring.stage * kDoutBytes, queries_left);\n"

FAULTS = (
    (Fault("sequences without units of their own", PLAIN, "main", MANY, (WRONG,),
           "(rows_before / kUnit + sequence) * kUnit;", "rows_before / kUnit * kUnit;"),
     PACKED),
    (Fault("rows of the next sequence are written", PLAIN, "main", MANY, (WRONG, "race", *BOUNDS),
           "const int valid_rows = block.stored_rows - block.first_key;", "const int valid_rows = kBlockN;"),
     PACKED),
    (Fault("a key of the next sequence", PLAIN, "main", MANY, (WRONG, *BOUNDS),
           "own.seqlen_kv = seqlen_kv;", "own.seqlen_kv = seqlen_kv + 1;"),
     PACKED),
    (Fault("delta of all sequences in one place", PLAIN, "preprocess", MANY, (WRONG, "race"),
           "own.delta += unit_row;", ""),
     PACKED),
    (Fault("keys past the length", PLAIN, "main", MANY, (WRONG,),
           "block.seqlen_kv = keys_of(params, block.batch).count;", "block.seqlen_kv = rows.count;"),
     PADDED),
    (Fault("a diagonal that all sequences share", CAUSAL, "main", GROUPS, NUMBERS,
           "own.diagonal_offset += seqlen_kv - seqlen_q;", ""),
     PACKED),
    (Fault("dQ of all sequences in one place", PLAIN, "main", MANY, (WRONG, "race"),
           "unit_row_of_sequence<kDqRowUnit>(params, block.batch, block.first_row_q) * kHeadDim", "0"),
     PACKED),
    (Fault("dQ of a block of queries in the place of another's", PLAIN, "convert", MANY, (WRONG, *BOUNDS),
           "unit_row_of_sequence<kDqRowUnit>", "unit_row_of_sequence<kRowUnit>"),
     PACKED),
    (Fault("dK of all sequences in one place", PLAIN, "main", MANY, (WRONG, "race"),
           "own.dk += block.first_row_kv * params.dk_row_stride;", ""),
     PACKED),
    (Fault("LSEs of the first sequence", PLAIN, "preprocess", MANY, NUMBERS, "own.lse += lse_row;", ""),
     PACKED),
    (Fault("the batch of a padded LSE", PLAIN, "preprocess", MANY, NUMBERS,
           "unit.sequence * params.lse_batch_stride + unit.rows.begin", "unit.rows.begin"),
     PADDED),
    (Fault("keys behind the last sequence are left as they were", PLAIN, "main", MANY, (WRONG,),
           "find_block_of_sequence(params.batch_size + 1,", "find_block_of_sequence(params.batch_size,"),
     BEHIND),
    (Fault("queries behind the last sequence are left as they were", PLAIN, "convert", MANY, (WRONG,),
           "if (row >= unit.rows.count) continue;", "if (row >= params.seqlen_q) continue;"),
     BEHIND),
    (Fault("queries behind the last sequence have sums", PLAIN, "convert", MANY, (WRONG, *BOUNDS),
           "if (first_row >= params.seqlen_q) break;", ""),
     BEHIND),
    (Fault("the keys' first row is that of the queries", PLAIN, "main", MANY, (WRONG, *BOUNDS),
           "block.first_row_kv = rows.z;", "block.first_row_kv = rows.x;"),
     PACKED),
    (Fault("the first 32 sequences alone", PLAIN, "main", CROWD, (WRONG, "race"),
           "left -= __shfl_sync(0xffffffff, end, 31);", ""),
     PACKED),
    (Fault("no longer sequence among those that are not kept", HOPPER, "preprocess",
           Shape(3, 140, 1, batch=150), (WRONG, "race"),
           "count += query_blocks_of(params, sequence) > bound ? further : 0;", ""),
     PACKED),
    (Fault("a lane keeps the same sequences as another", HOPPER, "preprocess", Shape(300, 20, 1, batch=40),
           (WRONG, "race"),
           "const int sequence = 32 * i + lane;", "const int sequence = 32 * i;"),
     PACKED),
    (Fault("turns that all sequences share", ORDERED, "main", IN_TURNS, ("deadlock",),
           "own.turns += unit_row / kBlockM;", ""),
     PACKED),
    (Fault("lengths before the grid ahead has ended", PLAIN, "main", MANY, ("dependency",),
           "    griddepcontrol_wait();\n", ""),
     PACKED),
    (Fault("Q of no sequence", HOPPER, "main", ALONE, (WRONG,),
           "clear_rows<kPanels, kBlockM>(shared + kQOffset + ", "static_cast<void>("),
     BEHIND),
    (Fault("dO of no sequence", HOPPER, "main", ALONE, (WRONG,),
           "clear_rows<kPanelsV, kBlockM>(shared + kDoutOffset + ", "static_cast<void>("),
     BEHIND),
    (Fault("K of no sequence", HOPPER, "main", ALONE, (WRONG,),
           "clear_rows<kPanels, kBlockN>(shared, keys_left);", ""),
     BEHIND),
    (Fault("V of no sequence", HOPPER, "main", ALONE, (WRONG,),
           "clear_rows<kPanelsV, kBlockN>(shared + kVOffset, keys_left);", ""),
     BEHIND),
    (Fault("K is cleared ahead of its load", HOPPER, "main", ALONE, (*ASYNC, WRONG),
           "    mbarrier_wait(barriers.q_full(0), 0);\n    clear_rows", "    clear_rows"),
     BEHIND),
    (Fault("V is cleared ahead of its load", HOPPER, "main", ALONE, (*ASYNC, WRONG),
           "    mbarrier_wait(barriers.dout_full(0), 0);\n    clear_rows", "    clear_rows"),
     BEHIND),
    (Fault("rows that are cleared behind the reader's back", HOPPER, "main", ALONE, (*ASYNC, "proxy", WRONG),
           STEP_CLEARED + "    barrier_sync(kClearBarrier, 128 * kConsumers);", STEP_CLEARED),
     BEHIND),
    (Fault("rows that wgmma does not see cleared", HOPPER, "main", ALONE, ("proxy",),
           "0.0f, 0.0f, 0.0f, 0.0f);\n        }\n    }\n    fence_proxy_async();",
           "0.0f, 0.0f, 0.0f, 0.0f);\n        }\n    }"),
     BEHIND),
    (Fault("next rows are written, on Hopper", HOPPER, "main", SHARED, (WRONG, "race", *BOUNDS),
           "if (stored >= rows) break;", ""),
     PACKED),
    (Fault("queries of the first sequence", HOPPER, "main", SHARED, (WRONG,),
           "rows.row = block.first_row_q + step.block * kBlockM;",
           "rows.row = step.block * kBlockM;"),
     PACKED),
    (Fault("LSE and delta of the first sequence", HOPPER, "main", SHARED, (WRONG,),
           "unit_row_of_sequence<kRowUnit>(params, block.batch, block.first_row_q) + ", ""),
     PACKED),
    (Fault("keys of the first entry", HOPPER, "main", SHARED, (WRONG,),
           "params.cu_seqlens_kv == nullptr ? block.batch : 0", "0"),
     PADDED),
    (Fault("Q and dO of no sequence, of wide heads", WIDE, "main", ALONE, (WRONG,),
           "if (queries_left >= kBlockM) return;", "return;"),
     BEHIND),
    (Fault("Q and dO of no sequence, of a group's second head", WIDE_GROUP, "main", PAIR_OF_HEADS, (WRONG,),
           "if (queries_left >= kBlockM)", "if (queries_left >= kBlockM || ring.stage + ring.parity > 0)"),
     BEHIND),
    (Fault("K and V of no sequence, of wide heads", WIDE, "main", ALONE, (WRONG,),
           "return params.seqlen_kv - block.first_key < kBlockN;", "return false;"),
     BEHIND),
    (Fault("wide rows cleared behind the reader's back", WIDE, "main", ALONE, (*ASYNC, "proxy", WRONG),
           STEP_CLEARED + "    barrier_sync(kClearBarrier, 128 * kConsumers);", STEP_CLEARED),
     BEHIND),
    (Fault("dV of wide heads in rows of the next sequence", WIDE, "main", SHARED, (WRONG, "race", *BOUNDS),
           "if (stored >= rows) break;", ""),
     PACKED),
    (Fault("the peer's K of no sequence", PAIR, "main", ALONE, (WRONG,),
           "    clear_rows<kPeerPanels, kBlockN>", "    if (false) clear_rows<kPeerPanels, kBlockN>"),
     BEHIND),
    (Fault("the peer's K of the first sequence", PAIR, "main", SHARED, (WRONG,),
           "const int row = block.first_row_kv + first_key_of_peer(block);",
           "const int row = first_key_of_peer(block);"),
     PACKED),
    (Fault("clusters that are not whole", PAIR, "preprocess", ALONE, (WRONG, "deadlock", *ASYNC, *BOUNDS),
           "return (rows + 2 * kBlockN - 1) / (2 * kBlockN) * 2;",
           "return (rows + kBlockN - 1) / kBlockN;"),
     BEHIND),
    (Fault("turns that all sequences share, on Hopper", TURNS, "main", SHARED, ("deadlock", WRONG, "race"),
           "own.turns += unit_row / kBlockM;", ""),
     PACKED),
    (Fault("a block with the turns of another", TURNS, "main", Shape(100, 300, 1), ("deadlock", *BOUNDS),
           "block.index = block.first_key / kBlockN;", "block.index = 0;"),
     BEHIND),
    (Fault("blocks of more work count once more", HOPPER, "preprocess", ALONE, (WRONG,),
           "return {most, int(index - before)};", "return {most, index};"),
     BEHIND),
)  # fmt: skip

# Found where a sequence is NaN and the next one is not.
LEAKS = (
    Fault("dQ past a sequence is added to the next one", PLAIN, "main", MANY, (WRONG,),
          "if (first_query + 16 * i >= params.seqlen_q) break;", ""),
    Fault("dQ past a sequence is added to the next one, on Hopper", HOPPER, "main", MANY, (WRONG,),
          "if (row >= params.seqlen_q) address = nullptr;", ""),
    Fault("dQ past a sequence is added to the next one, of wide heads", WIDE, "main", MANY, (WRONG,),
          "if (row >= params.seqlen_q) address = nullptr;", ""),
    Fault("dQ past a sequence is added to the next one, by clusters", PAIR, "main", MANY, (WRONG,),
          "if (row >= params.seqlen_q) address = nullptr;", ""),
)  # fmt: skip
