// flash_bwd_hdim64_bf16_causal_direct_both_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 64, head_dim_v 64, dtype bf16, mask_type causal, gqa mha, dq_order direct
// tile      block_m 64, block_n 64, stages 3, min_blocks 1, kinds 2, dv early, lse early, producer_registers 56 (both)
// block     512 threads, 185344 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      flash_bwd_direct_sm90.yaml
// template  flash_bwd_direct_sm90.cu.j2
#include "flashgen/sm90.cuh"

// A tile is kBlockN keys or kBlockN queries of a head. It has warpgroups and shared memory of its own. A thread block has one tile, or two: one
// of keys and one of queries. Two tiles of keys on a multiprocessor would take longest, and a thread block with both kinds avoids them. A tile of
// keys goes through the queries that attend to them, a tile of queries through the keys that they attend to, kBlockM a step. A tile of keys, with
// rows of K and V:
//
//     S^T = K Q^T    P^T = 2^(scale_log2 S^T - lse_log2)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
//     dV += P^T dO   dK += dS^T Q
//
// A tile of queries, with rows of Q and dO:
//
//     S = Q K^T      P = 2^(scale_log2 S - lse_log2)        dP = dO V^T      dS = P (dP - delta)
//     dQ += dS K
//
// S and dP are computed twice: seven MMAs instead of five. In return dQ is summed in registers, as dK and dV are. So no thread block waits for
// another, nothing is added in memory, and one launch computes all. P and dS leave the MMA as A operands.
//
// Map, of the warpgroups of a tile
//   warpgroup 0       thread 0: produce_of_keys() or produce_of_queries() loads by TMA. The last kValueWarps = 2 warps: put_values_of_steps() or
//                     put_values_of_tile() computes LSE and delta. kProducerRegisters = 56 a thread
//   warpgroups 1 ...  consume_keys() or consume_queries(): 64 rows each
//   shared memory     SharedStorage: rows of the tile, 8192 bytes and 8192; 3 x rows of a step, 8192 and 8192; 3 x O, 8192;
//                     LSE and delta; mbarriers. At the end gradients are staged over the rows of the tile
//   mbarrier          arrivals of a phase                                 who waits
//   tile_full         1, and the bytes of TMA: the producer               consumers
//   tile_full_v       1, and the bytes of TMA: the producer               consumers, put_values_of_tile()
//   full              1, and the bytes of TMA: the producer               consumers
//   full_v            1, and the bytes of TMA: the producer               consumers, put_values_of_steps()
//   lse_full          32 kValueWarps: every lane of these warps           consumers
//   delta_full        32 kValueWarps: every lane of these warps           consumers
//   empty             4 kConsumers: lane 0 of each consumer warp          producer, put_values_of_steps()
//   named barriers    see NamedBarrier

using element = bf16;

constexpr int kHeadDim = 64;  // of Q and K
constexpr int kHeadDimV = 64;  // of V, O and dO
constexpr int kBlockM = 64;  // rows of a step
constexpr int kBlockN = 64;  // rows of a tile
constexpr int kStages = 3;  // buffers of Q, dO and O, or of K and V
constexpr int kConsumers = kBlockN / 64;  // consumer warpgroups, 64 rows each
constexpr int kTileThreads = 128 * (1 + kConsumers);  // of a tile, whose warpgroup 0 is the producer
constexpr int kThreads = 2 * kTileThreads;
constexpr int kMinBlocks = 1;  // thread blocks of a multiprocessor that registers leave room for
constexpr int kValueWarps = 2;  // the last ones of the producer, which prepare lse_log2 and delta

// Registers of a thread. setmaxnreg moves registers between the warpgroups of a tile. At launch each thread of the multiprocessor's
// kMinBlocks thread blocks has an equal share of 65,536 registers, rounded down to a multiple of 8.
constexpr int kLaunchRegisters = 65536 / (kMinBlocks * kThreads) / 8 * 8;
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = ((1 + kConsumers) * kLaunchRegisters - kProducerRegisters) / kConsumers / 8 * 8;

constexpr int kPanelColumns = 64;  // of a panel of shared memory
constexpr int kPanelRowBytes = kPanelColumns * sizeof(element);
constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;  // of Q and K
constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;  // of V, O and dO

// The mbarriers of a tile, in shared memory. The table above says who arrives and who waits.
struct Mbarriers {
    uint64_t tile_full;            // rows of K, or of Q, have arrived
    uint64_t tile_full_v;          // rows of V, or of dO and O
    uint64_t full[kStages];        // Q, or K, of a step has arrived
    uint64_t full_v[kStages];      // dO and O, or V
    uint64_t lse_full[kStages];    // LSE of the queries of a step is written; of a tile of queries all LSE, in stage 0
    uint64_t delta_full[kStages];  // delta of the same queries is written
    uint64_t empty[kStages];       // no warp reads the stage
};

// Shared memory of a tile. Rows are in panels of 64 columns: 128 bytes a row, under the 128-byte swizzle, which repeats every 1,024 bytes.
// Q K^T and dO V^T are the same MMAs as K Q^T and V dO^T with the operands exchanged. So both kinds of tile share one layout: the tile has
// rows of K and V, or of Q and dO; a stage has rows of Q and dO, or of K and V.
struct alignas(1024) SharedStorage {
    element tile[kPanels][kBlockN][kPanelColumns];             // K, or Q
    element tile_v[kPanelsV][kBlockN][kPanelColumns];          // V, or dO
    element step[kStages][kPanels][kBlockM][kPanelColumns];    // Q, or K
    element step_v[kStages][kPanelsV][kBlockM][kPanelColumns]; // dO, or V
    element out[kStages][kPanelsV][kBlockM][kPanelColumns];    // O of each step, or O of the tile
    float lse_log2[kStages][kBlockM];                          // of each step, or of the tile
    float delta[kStages][kBlockM];
    Mbarriers mbarriers;
};

// Sizes and byte offsets of these arrays, to be added to a shared_address, which is an integer.
constexpr int kTileBytes = sizeof(SharedStorage::tile);
constexpr int kTileBytesV = sizeof(SharedStorage::tile_v), kTileOffsetV = offsetof(SharedStorage, tile_v);
constexpr int kStepBytes = sizeof(SharedStorage::step) / kStages, kStepOffset = offsetof(SharedStorage, step);
constexpr int kStepBytesV = sizeof(SharedStorage::step_v) / kStages, kStepOffsetV = offsetof(SharedStorage, step_v);
constexpr int kOutOffset = offsetof(SharedStorage, out);
constexpr int kQueryValueBytes = kBlockM * sizeof(float);  // of lse_log2, and of delta, of the queries of a step
constexpr int kLseOffset = offsetof(SharedStorage, lse_log2);
constexpr int kDeltaOffset = offsetof(SharedStorage, delta);
constexpr int kTileSharedBytes = sizeof(SharedStorage);

enum NamedBarrier : int {  // __syncthreads() has the number 0
    kStoreBarrier = 1,  // + warpgroup: its gradients are in shared memory, 128 threads
};

struct Params {
    tensor_map q;                         // (head_dim, seqlen_q, num_heads_q, batch)
    tensor_map k;                         // (head_dim, seqlen_kv, num_heads_kv, batch)
    tensor_map v;                         // (head_dim_v, seqlen_kv, num_heads_kv, batch)
    tensor_map dout;                      // (head_dim_v, seqlen_q, num_heads_q, batch)
    tensor_map out;                       // (head_dim_v, seqlen_q, num_heads_q, batch)
    tensor_map dq;                        // (head_dim, seqlen_q, num_heads_q, batch)
    tensor_map dk;                        // (head_dim, seqlen_kv, num_heads_kv, batch)
    tensor_map dv;                        // (head_dim_v, seqlen_kv, num_heads_kv, batch)
    const float* lse;                     // (batch, num_heads_q, seqlen_q); natural logarithm
    const float* dlse;                    // (batch, num_heads_q, seqlen_q); may be null; the gradient of lse
    int32_t batch_size;                   // sequences
    int32_t num_heads_q;
    int32_t num_heads_kv;
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    int32_t num_row_blocks_beside;        // the same of the second kind of tiles
    uint64_t num_row_blocks_divisor;      // of num_row_blocks; see divide()
    uint64_t num_row_blocks_beside_divisor;// of num_row_blocks_beside; see divide()
    uint64_t num_heads_q_divisor;         // of num_heads_q; see divide()
    uint64_t num_heads_kv_divisor;        // of num_heads_kv; see divide()
    int32_t diagonal_offset;              // query i is aligned with key i + diagonal_offset
    float scale_log2;                     // softmax_scale * log2(e), above 0
    float softmax_scale;                  // the factor of Q K^T in the scores
};

__device__ int divide(int n, uint64_t divisor);  // n / d for 0 <= n < 2^31
// Visits the scores that a lane holds of a step
template <typename Visit> __device__ void for_each_score(float (&scores)[kBlockM / 2], Visit visit);

// LSE or delta of the queries whose scores a lane holds, in pairs. They are loaded before the wait for the MMAs of these scores, so that the
// MMAs hide the latency of the loads.
struct QueryValues {
    float2 values[kBlockM / 8];

    __device__ __forceinline__ void load(shared_address smem, int lane) {
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) values[j] = load_shared_64(smem + (8 * j + lane % 4 * 2) * sizeof(float));
    }

    __device__ __forceinline__ float2 at(int j) const { return values[j]; }
};

// ==== visible: which queries attend to a key, and which blocks of queries need a mask

__device__ int first_query_of_key(const Params& params, int key);  // The first query that attends to a key

// Blocks of kBlockM queries.
struct QueryBlocks {
    int first;
    int last;  // less than `first` if there are no blocks
};

// The blocks with a query that attends to a key of [first_key, first_key + kBlockN)
__device__ QueryBlocks find_query_blocks(const Params& params, int first_key);
// Masks the scores of queries that do not attend to their key
__device__ void apply_mask(const Params& params, float (&scores)[kBlockM / 2], int lane_key, int lane_query);
// ====

// Turns S^T into P^T = 2^(scale_log2 S - lse_log2)
__device__ void compute_p(float (&scores)[kBlockM / 2], const QueryValues& lse, float scale_log2);
// Turns dP^T into dS^T = P^T (dP^T - delta), without the factor softmax_scale
__device__ void compute_ds(float (&dp)[kBlockM / 2], const float (&p)[kBlockM / 2], const QueryValues& delta);

// A tile: dK and dV of kBlockN keys of a kv head, summed over the query heads of its group, or dQ of kBlockN queries of a query head.
struct Tile {
    bool of_keys;
    int batch;
    int head;  // of K and V, or of Q
    int first_row;
};

__device__ int tiles_of_kind(const Params& params, bool of_keys);  // The tiles of one kind in the grid
__device__ Tile find_tile(const Params& params, int index, bool of_keys);  // Tile `index` of one kind
__device__ int num_rows(const Params& params);  // Rows of a head of the grid
__device__ int query_of_row(const Params&, int row);  // The query of a row of a tile

// ==== visible, in a tile of queries: which keys a query attends to, and which blocks of keys need a mask

// Keys [begin, end).
struct KeyRange {
    int begin;
    int end;
};

__device__ KeyRange keys_of_query(const Params& params, int query);  // The keys that a query attends to
// The union of the key ranges of rows [first_row, first_row + count)
__device__ KeyRange keys_of_some(const Params& params, int first_row, int count);
// The intersection of the key ranges of rows [first_row, first_row + count)
__device__ KeyRange keys_of_every(const Params& params, int first_row, int count);
// Masks the scores of keys that their query does not attend to
__device__ void apply_mask_of_rows(const Params& params, float (&scores)[kBlockM / 2], int lane_query, int lane_key);
// ====

// The steps of a tile of keys: blocks of kBlockM queries, from the last to the first.
struct QuerySteps {
    QueryBlocks blocks;
    int count;
    int head;
    int block;

    __device__ __forceinline__ QuerySteps(const Params& params, const Tile& tile) : blocks(find_query_blocks(params, tile.first_row)) {
        count = blocks.last - blocks.first + 1;
        head = tile.head;
        block = blocks.last;
    }

    __device__ __forceinline__ void advance() {
        --block;
    }
};

// The steps of a tile of queries: blocks of kBlockM keys, from the last to the first.
struct KeySteps {
    int last;   // the first to be visited
    int count;  // not above 0 where no query of the tile attends to a key

    __device__ __forceinline__ KeySteps(const Params& params, const Tile& tile) {
        const KeyRange keys = keys_of_some(params, tile.first_row, kBlockN);
        last = (keys.end + kBlockM - 1) / kBlockM - 1;
        count = last - keys.begin / kBlockM + 1;
    }
};

// The wgmma descriptor of an operand in shared memory
__device__ uint64_t descriptor(shared_address start, int stride_bytes, int leading_bytes = 16);
__device__ int swizzled(int row, int chunk);  // The place of a 16-byte chunk of a row under the swizzle of 128 bytes
// Issues scores = A B^T of a warpgroup, 64 x kBlockM, over kColumns columns of A and B
template <int kColumns> __device__ void mma_scores(float (&scores)[kBlockM / 2], shared_address a_smem, shared_address b_smem);

// A score matrix of a warpgroup, 64 x kColumns, rounded and packed in pairs. Packed, an accumulator of wgmma has the layout of its operand A in
// registers.
template <int kColumns>
struct PackedScores {
    uint32_t fragment[kColumns / 16][4];

    __device__ __forceinline__ void set(const float (&scores)[kColumns / 2]) {
#pragma unroll
        for (int step = 0; step < kColumns / 16; ++step) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                fragment[step][e] = pack<element>(scores[8 * step + 2 * e], scores[8 * step + 2 * e + 1]);
            }
        }
    }
};

// Issues sums += A B, 64 rows x 64 of a warpgroup, for example dV += P^T dO
__device__ void mma_gradient(float (&sums)[32], PackedScores<kBlockM>& scores, shared_address b_smem);
// Writes a warp's 16 rows of a gradient, times `factor` and rounded, to `staging`
template <int kColumns> __device__ void stage_gradient(const float (&sums)[kColumns / 2], float factor, shared_address staging, int lane);
// Lets TMA write a warpgroup's 64 rows of a gradient, times `factor` and rounded, from `staging`
template <int kColumns> __device__ void store_gradient(const tensor_map& map, const float (&sums)[kColumns / 2], float factor,
    shared_address staging, int first_row, int head, int batch, int barrier, int lane);
__device__ int mapped_row(const Params&, int key);  // The row of a key in the tensor maps of K and V

// Addresses of the mbarriers. A buffer is full when TMA has written its bytes. A stage is empty when every consumer warp has released it. The
// warps that compute delta do not arrive there: consumers of a tile of keys wait for delta before they release a stage, so its dO and O have
// been read by then. A tile of queries has no O in its stages.
struct Barriers {
    shared_address first;

    __device__ __forceinline__ shared_address tile_full() const { return at(offsetof(Mbarriers, tile_full) / 8); }
    __device__ __forceinline__ shared_address tile_full_v() const { return at(offsetof(Mbarriers, tile_full_v) / 8); }
    __device__ __forceinline__ shared_address full(int stage) const { return at(offsetof(Mbarriers, full) / 8 + stage); }
    __device__ __forceinline__ shared_address full_v(int stage) const { return at(offsetof(Mbarriers, full_v) / 8 + stage); }
    __device__ __forceinline__ shared_address lse_full(int stage) const { return at(offsetof(Mbarriers, lse_full) / 8 + stage); }
    __device__ __forceinline__ shared_address delta_full(int stage) const { return at(offsetof(Mbarriers, delta_full) / 8 + stage); }
    __device__ __forceinline__ shared_address empty(int stage) const { return at(offsetof(Mbarriers, empty) / 8 + stage); }

    __device__ __forceinline__ shared_address at(int index) const { return first + 8 * index; }

    // One thread calls it, before other threads use the mbarriers.
    __device__ __forceinline__ void init() const {
        mbarrier_init(tile_full(), 1);
        mbarrier_init(tile_full_v(), 1);
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(full(stage), 1);
            mbarrier_init(full_v(stage), 1);
            mbarrier_init(lse_full(stage), 32 * kValueWarps);
            mbarrier_init(delta_full(stage), 32 * kValueWarps);
            mbarrier_init(empty(stage), 4 * kConsumers);
        }
    }
};

// A place in a ring of stages. The parity of a stage's barriers changes each time the ring wraps.
template <int kLength>
struct RingPosition {
    int stage = 0;
    int parity = 0;

    __device__ __forceinline__ void advance() {
        stage = stage == kLength - 1 ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

// Starts loading kRows rows of a head, panel by panel, kBlockM rows at a time
template <int kPanelCount, int kRows> __device__ void load_rows(shared_address destination, const tensor_map& map, shared_address full,
    int first_row, int head, int batch);

// lse_log2 and delta = sum(dO * O) - dlse of the queries. They are computed here, so that no kernel has to end before this one. A thread has
// every kValueThreads-th row. For a row that attends to no key, and past the last row, lse_log2 is +inf, so that P is 0 there.

constexpr int kValueThreads = 32 * kValueWarps;

// What a thread loads from global memory, before its use, for its rows of kRows that begin with `first_row`.
template <int kRows>
struct RowValues {
    float lse[kRows / kValueThreads];
    float dlse[kRows / kValueThreads];

    __device__ __forceinline__ RowValues(const Params& params, int batch, int head, int first_row, int value_thread) {
#pragma unroll
        for (int i = 0; i < kRows / kValueThreads; ++i) {
            const int row = first_row + value_thread + i * kValueThreads;
            const bool valid = row < params.seqlen_q;
            const int64_t index = (int64_t(batch) * params.num_heads_q + head) * params.seqlen_q + row;
            lse[i] = valid ? __uint_as_float(load_global_32(params.lse + index)) : -INFINITY;
            dlse[i] = valid && params.dlse != nullptr ? __uint_as_float(load_global_32(params.dlse + index)) : 0.0f;
        }
    }
};

__device__ float dot(uint4 a, uint4 b);  // The dot product of 16 bytes of elements with 16 bytes of elements

// ==== row_end, in the backward pass: what P and dS take from the end of a row

constexpr float kLog2e = 1.4426950408889634f;

// The LSE in the log2 domain, rounded up so that P = 2^(scale_log2 S - lse_log2) does not exceed 1
__device__ float rounded_lse_log2(float lse);
__device__ float row_delta(const float& lse, float sum, const float& dlse);  // delta of a row
// ====

// Writes lse_log2 of a thread's rows
template <int kRows> __device__ void put_lse(const RowValues<kRows>& values, int value_thread, shared_address lse_smem);
// Writes delta of a thread's rows of dO and O, which are in panels of kRows rows
template <int kRows> __device__ void put_delta(const RowValues<kRows>& values, shared_address dout_smem, shared_address out_smem,
    int value_thread, shared_address delta_smem);
// Whether the block that begins with `first_query` has a query that does not attend to all of a warp's 16 keys
__device__ bool needs_mask(const Params& params, int first_key, int first_query);

// Timeline of step i of a tile of keys. Time runs down, an arrow is an mbarrier. The consumers have S^T(i) from the step before.
//
//     produce_of_keys()                      put_values_of_steps()                        consume_keys()
//     load Q(i)              -- full -->
//     load dO(i), O(i)       -- full_v -->                                                wait for dO(i), issue dP^T(i)
//                                            write lse_log2(i)      -- lse_full -->       P^T(i) from S^T(i)
//                                            wait for dO(i), O(i)
//                                            write delta(i)         -- delta_full -->     wait for dP^T(i), dS^T(i) from P^T(i) and dP^T(i)
//                                                                                         issue dV += P^T(i) dO(i), dK += dS^T(i) Q(i)
//                                                                                         wait for Q(i + 1), issue S^T(i + 1)
//     load step i + kStages                                         <-- empty --          wait for dV and dK
//                                                                                         wait for S^T(i + 1)

// The producer thread of a tile of keys: K and V of the tile, and Q, dO and O of each step as fast as buffers become empty. The operands
// of the first MMAs come first.
__device__ __forceinline__ void produce_of_keys(const Params& params, const Tile& tile, shared_address shared, const Barriers& barriers) {
    mbarrier_arrive_expect_tx(barriers.tile_full(), kTileBytes);
    load_rows<kPanels, kBlockN>(shared, params.k, barriers.tile_full(), mapped_row(params, tile.first_row), tile.head, tile.batch);

    // The buffers begin empty: of their barriers, the phase before the first has ended.
    RingPosition<kStages> ring;
    QuerySteps steps(params, tile);
#pragma unroll 1
    for (int i = 0; i < steps.count; ++i) {
        const int row = steps.block * kBlockM;
        const shared_address full = barriers.full(ring.stage), full_v = barriers.full_v(ring.stage);
        mbarrier_wait(barriers.empty(ring.stage), ring.parity ^ 1);
        mbarrier_arrive_expect_tx(full, kStepBytes);
        load_rows<kPanels, kBlockM>(shared + kStepOffset + ring.stage * kStepBytes, params.q, full, row, steps.head, tile.batch);
        mbarrier_arrive_expect_tx(full_v, 2 * kStepBytesV);
        load_rows<kPanelsV, kBlockM>(shared + kStepOffsetV + ring.stage * kStepBytesV, params.dout, full_v, row, steps.head, tile.batch);
        load_rows<kPanelsV, kBlockM>(shared + kOutOffset + ring.stage * kStepBytesV, params.out, full_v, row, steps.head, tile.batch);
        if (i == 0) {
            mbarrier_arrive_expect_tx(barriers.tile_full_v(), kTileBytesV);
            load_rows<kPanelsV, kBlockN>(shared + kTileOffsetV, params.v, barriers.tile_full_v(), mapped_row(params, tile.first_row),
                                         tile.head, tile.batch);
        }
        steps.advance();
        ring.advance();
    }
}

// The producer thread of a tile of queries: Q, dO and O of the tile, and K and V of each step as fast as buffers become empty.
__device__ __forceinline__ void produce_of_queries(const Params& params, const Tile& tile, shared_address shared, const Barriers& barriers) {
    mbarrier_arrive_expect_tx(barriers.tile_full(), kTileBytes);
    load_rows<kPanels, kBlockN>(shared, params.q, barriers.tile_full(), tile.first_row, tile.head, tile.batch);
    mbarrier_arrive_expect_tx(barriers.tile_full_v(), 2 * kTileBytesV);
    load_rows<kPanelsV, kBlockN>(shared + kOutOffset, params.out, barriers.tile_full_v(), tile.first_row, tile.head, tile.batch);
    load_rows<kPanelsV, kBlockN>(shared + kTileOffsetV, params.dout, barriers.tile_full_v(), tile.first_row, tile.head, tile.batch);

    const int kv_head = tile.head;
    RingPosition<kStages> ring;
    const KeySteps steps(params, tile);
#pragma unroll 1
    for (int i = 0; i < steps.count; ++i) {
        const int row = mapped_row(params, (steps.last - i) * kBlockM);
        const shared_address full = barriers.full(ring.stage), full_v = barriers.full_v(ring.stage);
        mbarrier_wait(barriers.empty(ring.stage), ring.parity ^ 1);
        mbarrier_arrive_expect_tx(full, kStepBytes);
        load_rows<kPanels, kBlockM>(shared + kStepOffset + ring.stage * kStepBytes, params.k, full, row, kv_head, tile.batch);
        mbarrier_arrive_expect_tx(full_v, kStepBytesV);
        load_rows<kPanelsV, kBlockM>(shared + kStepOffsetV + ring.stage * kStepBytesV, params.v, full_v, row, kv_head, tile.batch);
        ring.advance();
    }
}

// The warps of a tile of keys that compute LSE and delta: of the queries of each step.
__device__ __forceinline__ void put_values_of_steps(const Params& params, const Tile& tile, shared_address shared, const Barriers& barriers,
                                                    int value_thread) {
    RingPosition<kStages> ring;
    QuerySteps steps(params, tile);
    if (steps.count == 0) return;
    RowValues<kBlockM> next_values(params, tile.batch, steps.head, steps.block * kBlockM, value_thread);
#pragma unroll 1
    for (int i = 0; i < steps.count; ++i) {
        const RowValues<kBlockM> values = next_values;
        steps.advance();
        // Load LSE of the next step while delta of this one is computed: consumers wait for these warps.
        if (i + 1 < steps.count) next_values = RowValues<kBlockM>(params, tile.batch, steps.head, steps.block * kBlockM, value_thread);
        mbarrier_wait(barriers.empty(ring.stage), ring.parity ^ 1);
        put_lse(values, value_thread, shared + kLseOffset + ring.stage * kQueryValueBytes);
        mbarrier_arrive(barriers.lse_full(ring.stage));
        mbarrier_wait(barriers.full_v(ring.stage), ring.parity);
        put_delta(values, shared + kStepOffsetV + ring.stage * kStepBytesV, shared + kOutOffset + ring.stage * kStepBytesV, value_thread,
                  shared + kDeltaOffset + ring.stage * kQueryValueBytes);
        mbarrier_arrive(barriers.delta_full(ring.stage));
        ring.advance();
    }
}

// The warps of a tile of queries that compute LSE and delta: of all its rows.
__device__ __forceinline__ void put_values_of_tile(const Params& params, const Tile& tile, shared_address shared, const Barriers& barriers,
                                                   int value_thread) {
    const RowValues<kBlockN> values(params, tile.batch, tile.head, tile.first_row, value_thread);
    put_lse(values, value_thread, shared + kLseOffset);
    mbarrier_arrive(barriers.lse_full(0));
    mbarrier_wait(barriers.tile_full_v(), 0);
    put_delta(values, shared + kTileOffsetV, shared + kOutOffset, value_thread, shared + kDeltaOffset);
    mbarrier_arrive(barriers.delta_full(0));
}

// A consumer warpgroup of a tile of keys: dK and dV of 64 keys.
__device__ __forceinline__ void consume_keys(const Params& params, const Tile& tile, shared_address shared, const Barriers& barriers,
                                             int consumer) {
    const int lane = threadIdx.x % 32;
    const int warp_key = tile.first_row + 64 * consumer + threadIdx.x % 128 / 32 * 16;  // the warp's first key
    const shared_address k_own = shared + 64 * consumer * kPanelRowBytes;
    const shared_address v_own = k_own + kTileOffsetV;
    QuerySteps steps(params, tile);
    float dk[kHeadDim / 2] = {};
    float dv[kHeadDimV / 2] = {};
    float p[kBlockM / 2];  // S^T, then P^T
    QueryValues lse;
    RingPosition<kStages> ring;
    mbarrier_wait(barriers.tile_full(), 0);
    if (steps.count > 0) {
        mbarrier_wait(barriers.full(0), 0);
        mma_scores<kHeadDim>(p, k_own, shared + kStepOffset);
        wgmma_wait<0>();
        pin_registers(p);
        mbarrier_wait(barriers.tile_full_v(), 0);
        mbarrier_wait(barriers.lse_full(0), 0);
        lse.load(shared + kLseOffset, lane);
    }

#pragma unroll 1
    for (int i = 0; i < steps.count; ++i) {
        const shared_address q_smem = shared + kStepOffset + ring.stage * kStepBytes;
        const shared_address dout_smem = shared + kStepOffsetV + ring.stage * kStepBytesV;
        // 1. dP^T = V dO^T: wait for dO, issue. P^T from S^T while it runs.
        float ds[kBlockM / 2];  // dP^T, then dS^T
        mbarrier_wait(barriers.full_v(ring.stage), ring.parity);
        mma_scores<kHeadDimV>(ds, v_own, dout_smem);
        const int first_query = steps.block * kBlockM;
        if (needs_mask(params, warp_key, first_query)) apply_mask(params, p, warp_key + lane / 4, first_query + lane % 4 * 2);
        compute_p(p, lse, params.scale_log2);
        // 2. dV += P^T dO, dS^T = P^T (dP^T - delta), dK += dS^T Q: wait for delta and dP^T, issue.
        PackedScores<kBlockM> packed_p, packed_ds;
        mbarrier_wait(barriers.delta_full(ring.stage), ring.parity);
        QueryValues delta;
        delta.load(shared + kDeltaOffset + ring.stage * kQueryValueBytes, lane);
        packed_p.set(p);
        mma_gradient(dv, packed_p, dout_smem);
        wgmma_wait<1>();
        pin_registers(ds);
        compute_ds(ds, p, delta);
        packed_ds.set(ds);
        mma_gradient(dk, packed_ds, q_smem);

        // 3. S^T = K Q^T of the next step: wait for Q, issue. Wait for dV and dK, release Q and dO, then wait for S^T. The last step computes its
        // S^T again and discards it: with conditional MMAs ptxas would serialise all of them.
        RingPosition<kStages> next = ring;
        if (i + 1 < steps.count) next.advance();
        mbarrier_wait(barriers.full(next.stage), next.parity);
        mma_scores<kHeadDim>(p, k_own, shared + kStepOffset + next.stage * kStepBytes);
        wgmma_wait<1>();
        pin_registers(dv);
        pin_registers(dk);
        __syncwarp();  // all lanes have read LSE and delta of the stage
        if (lane == 0) mbarrier_arrive(barriers.empty(ring.stage));
        mbarrier_wait(barriers.lse_full(next.stage), next.parity);
        lse.load(shared + kLseOffset + next.stage * kQueryValueBytes, lane);
        wgmma_wait<0>();
        pin_registers(p);
        ring = next;
        steps.advance();
    }

    const int first_row = tile.first_row + 64 * consumer;
    const int barrier = kStoreBarrier + threadIdx.x / 128;
    barrier_sync(barrier, 128);  // no warp of the warpgroup reads its K and V any longer: dK and dV are staged there
    store_gradient<kHeadDimV>(params.dv, dv, 1.0f, v_own, first_row, tile.head, tile.batch, barrier, lane);
    store_gradient<kHeadDim>(params.dk, dk, params.softmax_scale, k_own, first_row, tile.head, tile.batch, barrier, lane);
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // TMA must read shared memory before the exit; the grid's end waits for the writes
}

// A consumer warpgroup of a tile of queries: dQ of 64 queries.
__device__ __forceinline__ void consume_queries(const Params& params, const Tile& tile, shared_address shared, const Barriers& barriers,
                                                int consumer) {
    const int lane = threadIdx.x % 32;
    const int warp_row = 64 * consumer + threadIdx.x % 128 / 32 * 16;  // the warp's first query in the tile
    const shared_address q_own = shared + 64 * consumer * kPanelRowBytes;
    const shared_address dout_own = q_own + kTileOffsetV;
    const KeySteps steps(params, tile);
    const KeyRange every = keys_of_every(params, min(tile.first_row + warp_row, params.seqlen_q - 1), 16);  // every query of the warp

    float dq[kHeadDim / 2] = {};
    float p[kBlockM / 2];  // S, then P
    RingPosition<kStages> ring;
    mbarrier_wait(barriers.tile_full(), 0);
    if (steps.count > 0) {
        mbarrier_wait(barriers.full(0), 0);
        mma_scores<kHeadDim>(p, q_own, shared + kStepOffset);
        wgmma_wait<0>();
        pin_registers(p);
        mbarrier_wait(barriers.tile_full_v(), 0);
    }
    float lse[2], delta[2];  // of the lane's rows, 8 apart
    mbarrier_wait(barriers.lse_full(0), 0);
    mbarrier_wait(barriers.delta_full(0), 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int place = (warp_row + lane / 4 + 8 * i) * sizeof(float);
        lse[i] = __uint_as_float(load_shared_32(shared + kLseOffset + place));
        delta[i] = __uint_as_float(load_shared_32(shared + kDeltaOffset + place));
    }

#pragma unroll 1
    for (int i = 0; i < steps.count; ++i) {
        const int first_key = (steps.last - i) * kBlockM;
        // 1. dP = dO V^T: wait for V, issue. P from S while it runs.
        float ds[kBlockM / 2];  // dP, then dS
        mbarrier_wait(barriers.full_v(ring.stage), ring.parity);
        mma_scores<kHeadDimV>(ds, dout_own, shared + kStepOffsetV + ring.stage * kStepBytesV);
        const bool has_hidden = first_key + kBlockM > every.end;
        if (has_hidden) {
            apply_mask_of_rows(params, p, tile.first_row + warp_row + lane / 4, first_key + lane % 4 * 2);
        }
        for_each_score(p, [&](int query, int, float& score) { score = exp2_approx(fmaf(score, params.scale_log2, -lse[query / 8])); });
        // 2. Wait for dP. dS = P (dP - delta). dQ += dS K: issue. The wait for K of the next step comes first because ptxas moves exponentials
        // after the wait for dP, but not past a branch.
        pin_registers(p);
        RingPosition<kStages> next = ring;
        if (i + 1 < steps.count) next.advance();
        mbarrier_wait(barriers.full(next.stage), next.parity);
        wgmma_wait<0>();
        pin_registers(ds);
#pragma unroll
        for (int j = 0; j < kBlockM / 2; ++j) ds[j] = p[j] * (ds[j] - delta[j / 2 % 2]);
        PackedScores<kBlockM> packed_ds;
        packed_ds.set(ds);
        mma_gradient(dq, packed_ds, shared + kStepOffset + ring.stage * kStepBytes);

        // 3. S = Q K^T of the next step: issue. Wait for dQ, release K and V, then wait for S. The last step computes its S again and discards it:
        // with conditional MMAs ptxas would serialise all of them.
        mma_scores<kHeadDim>(p, q_own, shared + kStepOffset + next.stage * kStepBytes);
        wgmma_wait<1>();
        pin_registers(dq);
        if (lane == 0) mbarrier_arrive(barriers.empty(ring.stage));
        wgmma_wait<0>();
        pin_registers(p);
        ring = next;
    }

    const int first_row = tile.first_row + 64 * consumer;
    const int barrier = kStoreBarrier + threadIdx.x / 128;
    barrier_sync(barrier, 128);  // no warp of the warpgroup reads its Q any longer: dQ is staged there
    store_gradient<kHeadDim>(params.dq, dq, params.softmax_scale, q_own, first_row, tile.head, tile.batch, barrier, lane);
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // TMA must read shared memory before the exit; the grid's end waits for the writes
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
flash_bwd_hdim64_bf16_causal_direct_both_sm90(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    // The first half of the threads has the tile of keys, the second half the tile of queries.
    const int kind = __shfl_sync(0xffffffff, threadIdx.x / kTileThreads, 0);
    const int thread = threadIdx.x % kTileThreads;
    const shared_address shared = (to_shared(shared_memory) + 1023) / 1024 * 1024 + kind * kTileSharedBytes;
    const Barriers barriers = {shared_address(shared + offsetof(SharedStorage, mbarriers))};
    const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
    const int warpgroup = warp / 4;

    if (thread == 0) {
        barriers.init();
        fence_mbarrier_init();
        prefetch_tensormap(params.q);
        prefetch_tensormap(params.k);
        prefetch_tensormap(params.v);
        prefetch_tensormap(params.dout);
        prefetch_tensormap(params.out);
    }
    // Before the wait for the previous grid: find_tile() reads parameters alone.
    const Tile tile = find_tile(params, block_index(), kind == 0);
    __syncthreads();

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    // There are more tiles of the other kind. No barrier of all threads follows, and registers are traded within a half.
    if (block_index() >= tiles_of_kind(params, tile.of_keys)) return;

    if (warpgroup == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        if (thread == 0) {
            if (tile.of_keys) {
                produce_of_keys(params, tile, shared, barriers);
            } else {
                produce_of_queries(params, tile, shared, barriers);
            }
        } else if (warp >= 4 - kValueWarps) {
            const int value_thread = thread - 32 * (4 - kValueWarps);
            if (tile.of_keys) {
                put_values_of_steps(params, tile, shared, barriers, value_thread);
            } else {
                put_values_of_tile(params, tile, shared, barriers, value_thread);
            }
        }
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        if (tile.of_keys) {
            consume_keys(params, tile, shared, barriers, warpgroup - 1);
        } else {
            consume_queries(params, tile, shared, barriers, warpgroup - 1);
        }
    }
}

// n / d for 0 <= n < 2^31. The launcher computes `divisor` from d: a multiplier in the lower half, and in the upper half the shift that follows.
// Dividing by a number that the compiler does not know takes about 20 dependent instructions.
__device__ __forceinline__ int divide(int n, uint64_t divisor) {
    return uint64_t(uint32_t(n)) * uint32_t(divisor) >> (divisor >> 32);
}

// Visits the scores that a lane holds of a step. In visit(row, column, score), `row` is 0 or 8 and counts from the lane's first row: the warp's
// first row + lane / 4. `column` is 8 j or 8 j + 1 and counts from the lane's first column: the step's first column + lane % 4 * 2. Both are
// constants after unrolling. Rows of S^T are keys, and its columns queries. Rows of S are queries, and its columns keys.
template <typename Visit>
__device__ __forceinline__ void for_each_score(float (&scores)[kBlockM / 2], Visit visit) {
#pragma unroll
    for (int query = 0; query < kBlockM; query += 8) {
#pragma unroll
        for (int key = 0; key <= 8; key += 8) {
            visit(key, query, scores[query / 2 + key / 4]);
            visit(key, query + 1, scores[query / 2 + key / 4 + 1]);
        }
    }
}

// ==== visible: which queries attend to a key, and which blocks of queries need a mask

// The first query that attends to a key: the query on its diagonal. No query attends to a key past the last one.
__device__ __forceinline__ int first_query_of_key(const Params& params, int key) {
    const int diagonal = key < params.seqlen_kv ? key - params.diagonal_offset : params.seqlen_q;
    return max(diagonal, 0);
}

__device__ __forceinline__ QueryBlocks find_query_blocks(const Params& params, int first_key) {
    const int begin = max(0, first_key - params.diagonal_offset);
    const int end = params.seqlen_q;
    if (begin >= end) return {0, -1};
    return {begin / kBlockM, (end - 1) / kBlockM};
}

// Masks the scores of queries that do not attend to their key. `lane_key` and `lane_query` are the lane's first key and first query. Queries
// past the last are not masked: there lse_log2 is inf, so compute_p() makes P = 0.
__device__ __forceinline__ void apply_mask(const Params& params, float (&scores)[kBlockM / 2], int lane_key, int lane_query) {
    const int begin[2] = {first_query_of_key(params, lane_key) - lane_query, first_query_of_key(params, lane_key + 8) - lane_query};
    for_each_score(scores, [&](int key, int query, float& score) {
        if (query < begin[key / 8]) score = -INFINITY;
    });
}
// ====

// Turns S^T into P^T = 2^(scale_log2 S - lse_log2). lse_log2 is +inf for queries that attend to no key and for queries past the last one: P is 0
// there, if S is finite.
__device__ __forceinline__ void compute_p(float (&scores)[kBlockM / 2], const QueryValues& lse, float scale_log2) {
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
        const float2 values = lse.at(j);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) scores[i] = exp2_approx(fmaf(scores[i], scale_log2, i % 2 ? -values.y : -values.x));
    }
}

__device__ __forceinline__ void compute_ds(float (&dp)[kBlockM / 2], const float (&p)[kBlockM / 2], const QueryValues& delta) {
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
        const float2 values = delta.at(j);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) dp[i] = p[i] * (dp[i] - (i % 2 ? values.y : values.x));
    }
}

// The tiles of one kind in the grid: fewer than 2^31.
__device__ __forceinline__ int tiles_of_kind(const Params& params, bool of_keys) {
    const int tiles_of_batch = of_keys ? params.num_heads_kv * params.num_row_blocks : params.num_heads_q * params.num_row_blocks_beside;
    return params.batch_size * tiles_of_batch;
}

// Tile `index` of one kind. The tiles of a head follow each other. Under a diagonal the first keys have the most steps and the first queries
// the fewest. They share a thread block where a head has equally many tiles of both kinds.
__device__ __forceinline__ Tile find_tile(const Params& params, int index, bool of_keys) {
    const int heads = of_keys ? params.num_heads_kv : params.num_heads_q;
    const int tiles_of_head = of_keys ? params.num_row_blocks : params.num_row_blocks_beside;
    const int head_of_batch = divide(index, of_keys ? params.num_row_blocks_divisor : params.num_row_blocks_beside_divisor);
    const int index_in_head = index - head_of_batch * tiles_of_head;
    Tile tile;
    tile.of_keys = of_keys;
    tile.batch = divide(head_of_batch, of_keys ? params.num_heads_kv_divisor : params.num_heads_q_divisor);
    tile.head = head_of_batch - tile.batch * heads;
    tile.first_row = index_in_head * kBlockN;
    return tile;
}

__device__ __forceinline__ int num_rows(const Params& params) { return params.seqlen_q; }

__device__ __forceinline__ int query_of_row(const Params&, int row) { return row; }

// ==== visible, in a tile of queries: which keys a query attends to, and which blocks of keys need a mask

// The keys that a query attends to: those up to its diagonal.
__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int query) {
    return {0, max(0, min(params.seqlen_kv, query + params.diagonal_offset + 1))};
}

// The union of the key ranges of rows [first_row, first_row + count). A range never begins or ends before the range of the previous row. KV
// blocks outside of the union are not visited.
__device__ __forceinline__ KeyRange keys_of_some(const Params& params, int first_row, int count) {
    const int last_row = min(first_row + count, num_rows(params)) - 1;
    return {keys_of_query(params, query_of_row(params, first_row)).begin,
            keys_of_query(params, query_of_row(params, last_row)).end};
}

// The intersection of the key ranges of rows [first_row, first_row + count). A KV block within it needs no mask.
__device__ __forceinline__ KeyRange keys_of_every(const Params& params, int first_row, int count) {
    const int last_row = min(first_row + count, num_rows(params)) - 1;
    return {keys_of_query(params, query_of_row(params, last_row)).begin,
            keys_of_query(params, query_of_row(params, first_row)).end};
}

// Masks the scores of keys that their query does not attend to. `lane_query` and `lane_key` are the lane's first ones.
__device__ __forceinline__ void apply_mask_of_rows(const Params& params, float (&scores)[kBlockM / 2], int lane_query, int lane_key) {
    const KeyRange ranges[2] = {keys_of_query(params, lane_query), keys_of_query(params, lane_query + 8)};
    for_each_score(scores, [&](int query, int key, float& score) {
        const KeyRange& range = ranges[query / 8];
        if (key >= range.end - lane_key) score = -INFINITY;
    });
}
// ====

// The wgmmas of this kernel. They compute d = a . b of a warpgroup, or d += a . b if `accumulate`: a is 64 x 16, b 16 x N, and the accumulator d
// 64 x N in fp32. Thread (g, t) = (lane / 4, lane % 4) of warp w holds d[4 j + e]: row 16 w + g + 8 (e / 2), column 8 j + 2 t + e % 2.
#ifndef FLASHGEN_SIMULATOR  // the simulator emulates them in C++

// wgmma.mma_async.m64n64k16: a and b in shared memory under descriptors, both with the K dimension contiguous.
__device__ __forceinline__ void wgmma_m64n64k16_bf16_ss(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate));
}

// wgmma.mma_async.m64n64k16. A from registers: a[0] = (row g, columns 2 t, 2 t + 1), a[1] = (row g + 8, same columns), a[2], a[3] =
// columns 8 further: the accumulator layout, packed. b is MN-major.
__device__ __forceinline__ void wgmma_m64n64k16_bf16_rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {"
        "%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

#endif

// The wgmma descriptor of an operand in shared memory: its address, the stride byte offset (SBO) and the leading byte offset (LBO) between its swizzle
// atoms of eight rows, and the kind of swizzle. LBO is read only for MN-major operands of several panels.
__device__ __forceinline__ uint64_t descriptor(shared_address start, int stride_bytes, int leading_bytes) {
    constexpr uint64_t kSwizzle = 1;  // of 128 bytes
    return uint64_t(start >> 4 & 0x3fff) | uint64_t(leading_bytes >> 4) << 16 | uint64_t(stride_bytes >> 4) << 32 |
           kSwizzle << 62;
}

__device__ __forceinline__ int swizzled(int row, int chunk) { return chunk ^ row % 8; }

// Issues scores = A B^T of a warpgroup, 64 x kBlockM, over kColumns columns of A and B: S^T = K Q^T, dP^T = V dO^T. A is 64 rows of kBlockN, B has
// kBlockM rows. Both operands are K-major: SBO leads to the next eight rows. A step of 16 along the K dimension is 32 bytes within the
// swizzled row.
template <int kColumns>
__device__ __forceinline__ void mma_scores(float (&scores)[kBlockM / 2], shared_address a_smem, shared_address b_smem) {
    const uint64_t a = descriptor(a_smem, 8 * kPanelRowBytes);
    const uint64_t b = descriptor(b_smem, 8 * kPanelRowBytes);
    pin_registers(scores);
    wgmma_fence();
#pragma unroll
    for (int column = 0; column < kColumns; column += 16) {
        const int panel = column / kPanelColumns, byte = column % kPanelColumns * sizeof(element);
        wgmma_m64n64k16_bf16_ss(scores, a + ((panel * kBlockN * kPanelRowBytes + byte) >> 4),
                                 b + ((panel * kBlockM * kPanelRowBytes + byte) >> 4), column > 0);
    }
    wgmma_commit();
}

// Issues sums += A B, 64 rows x 64 of a warpgroup, for example dV += P^T dO. `scores` is A. B is MN-major, its columns contiguous: SBO leads to
// the next eight rows of B, LBO to the next panel of columns.
__device__ __forceinline__ void mma_gradient(float (&sums)[32], PackedScores<kBlockM>& scores, shared_address b_smem) {
    const uint64_t b = descriptor(b_smem, 8 * kPanelRowBytes, kBlockM * kPanelRowBytes);
    pin_registers(sums);
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) pin_registers(scores.fragment[step]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) {
        wgmma_m64n64k16_bf16_rs(sums, scores.fragment[step], b + (16 * step * kPanelRowBytes >> 4), 1);
    }
    wgmma_commit();
}

// Writes a warp's 16 rows of a gradient, times `factor` and rounded, to `staging`: swizzled panels of kBlockN rows, from the warpgroup's row on.
template <int kColumns>
__device__ __forceinline__ void stage_gradient(const float (&sums)[kColumns / 2], float factor, shared_address staging, int lane) {
    const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;  // stmatrix takes the address of a row from each lane
#pragma unroll
    for (int column = 0; column < kColumns; column += 16) {
        uint32_t matrices[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            matrices[e] = pack<element>(sums[column / 2 + 2 * e] * factor, sums[column / 2 + 2 * e + 1] * factor);
        }
        const shared_address panel = staging + column / kPanelColumns * kBlockN * kPanelRowBytes;
        stmatrix_x4(panel + row * kPanelRowBytes + 16 * swizzled(row, column % kPanelColumns / 8 + lane / 16), matrices);
    }
}

// Lets TMA write a warpgroup's 64 rows of a gradient, times `factor` and rounded, from `staging`.
// Call it when no warp reads `staging` any more. `barrier` is the warpgroup's named barrier; one thread starts the TMA stores.
template <int kColumns>
__device__ __forceinline__ void store_gradient(const tensor_map& map, const float (&sums)[kColumns / 2], float factor, shared_address staging,
                                               int first_row, int head, int batch, int barrier, int lane) {
    stage_gradient<kColumns>(sums, factor, staging, lane);
    fence_proxy_async();  // TMA would not see the writes otherwise
    barrier_sync(barrier, 128);  // all rows of the warpgroup are written
    if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int panel = 0; panel < (kColumns + kPanelColumns - 1) / kPanelColumns; ++panel) {
            tma_store_4d(map, staging + panel * kBlockN * kPanelRowBytes, panel * kPanelColumns, first_row, head, batch);
        }
        tma_store_commit();
    }
}

// The row of a key in the tensor maps of K and V. The maps end with the last key that any query attends to. For later keys TMA fills in zeros,
// because 0 times a NaN in memory would be NaN.
__device__ __forceinline__ int mapped_row(const Params&, int key) { return key; }

// Starts loading kRows rows of a head, panel by panel, kBlockM rows at a time. Rows and columns outside of the array become zeros.
template <int kPanelCount, int kRows>
__device__ __forceinline__ void load_rows(shared_address destination, const tensor_map& map, shared_address full, int first_row, int head,
                                          int batch) {
#pragma unroll
    for (int panel = 0; panel < kPanelCount; ++panel) {
#pragma unroll
        for (int row = 0; row < kRows; row += kBlockM) {
            tma_load_4d(destination + (panel * kRows + row) * kPanelRowBytes, map, full, panel * kPanelColumns, first_row + row, head, batch);
        }
    }
}

__device__ __forceinline__ float dot(uint4 a, uint4 b) {
    const uint32_t a_words[4] = {a.x, a.y, a.z, a.w};
    const uint32_t b_words[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 a_pair = unpack<element>(a_words[i]);
        const float2 b_pair = unpack<element>(b_words[i]);
        sum = fmaf(a_pair.x, b_pair.x, fmaf(a_pair.y, b_pair.y, sum));
    }
    return sum;
}

// ==== row_end, in the backward pass: what P and dS take from the end of a row

// The LSE in the log2 domain, rounded up so that P = 2^(scale_log2 S - lse_log2) does not exceed 1. On its way here the LSE is rounded
// a few times, by less than 2^-21 of it in all; large scores would make P many powers of 2 too large. The first 2^-18 are left out: small
// LSEs stay as they are. A row that attends to no key has the LSE -inf; it gets +inf, which makes its P 0.
__device__ __forceinline__ float rounded_lse_log2(float lse) {
    const float lse_log2 = lse * kLog2e;
    if (lse_log2 == -INFINITY) return INFINITY;
    return lse_log2 + fmaxf(fmaf(fabsf(lse_log2), 0x1p-21f, -0x1p-18f), 0.0f);
}

// delta of a row: the sum of dO times O, less dlse. A row that attends to no key has no gradients, whatever dO and O of it are: its delta is 0.
// References: with values ptxas writes other code for a kernel.
__device__ __forceinline__ float row_delta(const float& lse, float sum, const float& dlse) { return lse == -INFINITY ? 0.0f : sum - dlse; }
// ====

template <int kRows>
__device__ __forceinline__ void put_lse(const RowValues<kRows>& values, int value_thread, shared_address lse_smem) {
#pragma unroll
    for (int i = 0; i < kRows / kValueThreads; ++i) {
        store_shared_32(lse_smem + (value_thread + i * kValueThreads) * sizeof(float), __float_as_uint(rounded_lse_log2(values.lse[i])));
    }
}

template <int kRows>
__device__ __forceinline__ void put_delta(const RowValues<kRows>& values, shared_address dout_smem, shared_address out_smem, int value_thread,
                                          shared_address delta_smem) {
    constexpr int kVectorElements = 8;
#pragma unroll
    for (int i = 0; i < kRows / kValueThreads; ++i) {
        const int row = value_thread + i * kValueThreads;
        float sum = 0.0f;
#pragma unroll 4  // so that up to eight loads are under way
        for (int column = 0; column < kHeadDimV; column += kVectorElements) {
            // Eight lanes read eight different chunks: no bank conflicts.
            const int chunk = swizzled(row, column % kPanelColumns / kVectorElements);
            const int offset = (column / kPanelColumns * kRows + row) * kPanelRowBytes + 16 * chunk;
            sum += dot(load_shared_128(dout_smem + offset), load_shared_128(out_smem + offset));
        }
        const float delta = row_delta(values.lse[i], sum, values.dlse[i]);
        store_shared_32(delta_smem + row * sizeof(float), __float_as_uint(delta));
    }
}

__device__ __forceinline__ bool needs_mask(const Params& params, int first_key, int first_query) {
    opaque(first_key);  // the compiler would compute the ranges before the loop and hold them in registers
    return first_query < first_query_of_key(params, first_key + 15);
}

static_assert(2 * kTileSharedBytes + 1024 == 185344, "the launcher allocates two of these, and room to begin at a multiple of 1,024 bytes");
static_assert(kBlockM % (32 * kValueWarps) == 0 && kBlockN % kBlockM == 0, "threads have equally many rows to compute delta of");
static_assert(kStages >= 2, "rows of the next step are awaited before those of this one are released");
static_assert(kStages * kBlockM >= kBlockN, "O, LSE and delta of a tile of queries fit where those of the stages are");
static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "whole wgmmas");
static_assert(kConsumerRegisters >= kProducerRegisters && kConsumerRegisters <= 256, "what setmaxnreg takes");
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * kLaunchRegisters, "consumers would wait for ever");
static_assert(sizeof(Params) == 1152 && offsetof(Params, q) == 0 && offsetof(Params, k) == 128 && offsetof(Params, v) == 256);
static_assert(offsetof(Params, dout) == 384 && offsetof(Params, out) == 512 && offsetof(Params, dq) == 640);
static_assert(offsetof(Params, dk) == 768 && offsetof(Params, dv) == 896 && offsetof(Params, lse) == 1024);
static_assert(offsetof(Params, dlse) == 1032 && offsetof(Params, batch_size) == 1040 && offsetof(Params, num_heads_q) == 1044);
static_assert(offsetof(Params, num_heads_kv) == 1048 && offsetof(Params, seqlen_q) == 1052);
static_assert(offsetof(Params, seqlen_kv) == 1056 && offsetof(Params, num_row_blocks) == 1060);
static_assert(offsetof(Params, num_row_blocks_beside) == 1064 && offsetof(Params, num_row_blocks_divisor) == 1072);
static_assert(offsetof(Params, num_row_blocks_beside_divisor) == 1080 && offsetof(Params, num_heads_q_divisor) == 1088);
static_assert(offsetof(Params, num_heads_kv_divisor) == 1096 && offsetof(Params, diagonal_offset) == 1104);
static_assert(offsetof(Params, scale_log2) == 1108 && offsetof(Params, softmax_scale) == 1112);
