// score_gradient_hdim128_bf16_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type none, sums none
// tile      block_m 128, block_n 128, stages 6, producer_registers 24, consumer_registers 240
// block     384 threads, 197728 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      score_gradient_sm90.yaml
// template  score_gradient_sm90.cu.j2
#include "flashgen/sm90.cuh"

// Computes the gradient of an array that a score modification reads; later steps sum over tiles. f' is the derivative of a modified score by
// the array's element:
//
//     dS = P * (dP - delta) * f',  S = Q K^T,  P = 2^(scale_log2 S - lse_log2),  dP = dO V^T
//
// A tile is kBlockM queries by kBlockN keys for one batch index and head index of the array. A thread block computes one tile after
// another. It adds up dS in registers over the batch entries and heads that share an element of the array (the pairs of a tile), one after
// another, so that the gradient repeats to the bit. Where there are few tiles, thread blocks also split the pairs of a tile.
//
// Map
//   warpgroups 0, 1      consume(): S, dP and sums of 64 rows of a tile each, kConsumerRegisters = 240 a thread
//   warpgroup 2          the producer, kProducerRegisters = 24 a thread
//     thread 0             produce(): loads slices of 64 columns by TMA: of each pair Q and K, then dO and V
//
//   SharedStorage        bytes
//   stages               32768  x 6  a slice: rows of Q and K, or of dO and V
//
//   barrier              arrivals of a phase                                          who waits
//   full                 1: the producer, and the bytes of TMA                        consumers
//   empty                kWarps: lane 0 of each consumer warp, after its MMAs         producer
//   kTurnBarrier         256: the other consumer, and the consumer that waits         a consumer, before its MMAs
//   kSumsBarrier         256: consumers, around their use of shared memory for sums   consumers
//
// Consumers take turns at issuing MMAs, so that the tensor cores work for one while the other computes P and dS. S(n) is Q K^T and dP(n) is
// dO V^T of the n-th pair:
//
//   consumer 0           issue S(0) dP(0) | P(0), dS(0)                       | issue S(1) dP(1) | P(1), dS(1)
//   consumer 1                            | issue S(0) dP(0) | P(0), dS(0)                       | issue S(1) dP(1)

using element = bf16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kHeadDimV = 128;  // of V and dO
constexpr int kBlockM = 128;  // query rows of a tile
constexpr int kBlockN = 128;  // keys of a tile
constexpr int kStages = 6;
constexpr int kConsumers = kBlockM / 64;  // consumer warpgroups, 64 rows each
constexpr int kWarps = 4 * kConsumers;  // consumer warps
constexpr int kThreads = 128 * (kConsumers + 1);  // the last warpgroup is the producer
constexpr int kWarpRows = 16;
constexpr int kRowTileStep = 16;                  // rows of an MMA tile
constexpr int kKeyTiles = kBlockN / 8;            // groups of 8 keys
constexpr int kPanelColumns = 64;                 // of a slice
constexpr int kPanelRowBytes = kPanelColumns * sizeof(element);
constexpr int kSlices = (kHeadDim + kPanelColumns - 1) / kPanelColumns;    // of Q and K
constexpr int kSlicesV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;  // of dO and V
constexpr bool kReleaseEarly = kSlices + kSlicesV > kStages;  // the slices of dO and V need the stages of Q and K

// Registers of a thread. setmaxnreg moves registers between the warpgroups of a thread block. At launch a thread has at most an equal share of
// 65,536 registers, rounded down to a multiple of 8. ptxas lowers it to kConsumerRegisters where the share is larger.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

struct Stage {
    element of_rows[kBlockM][kPanelColumns];  // of Q or dO
    element of_keys[kBlockN][kPanelColumns];  // of K or V
};

// Begins at a multiple of 1,024 bytes, as the pattern of the swizzle repeats every 1,024 bytes.
struct SharedStorage {
    Stage stages[kStages];
    uint64_t full[kStages];
    uint64_t empty[kStages];
};
constexpr int kStageBytes = sizeof(Stage);
constexpr int kKeysOffset = offsetof(Stage, of_keys);
constexpr int kFullOffset = offsetof(SharedStorage, full);
constexpr int kEmptyOffset = offsetof(SharedStorage, empty);

enum NamedBarrier : int {  // __syncthreads() has the number 0
    kTurnBarrier = 1,  // + consumer
    kSumsBarrier = kTurnBarrier + kConsumers,
};

struct Params {
    tensor_map dout;                      // (head_dim_v, seqlen_q, num_heads_q, batch)
    tensor_map q;                         // (head_dim, seqlen_q, num_heads_q, batch)
    tensor_map k;                         // (head_dim, seqlen_kv, num_heads_kv, batch)
    tensor_map v;                         // (head_dim_v, seqlen_kv, num_heads_kv, batch)
    const float* delta;                   // (heads, unit_rows): sum(dout * out) - dlse
    const float* lse_log2;                // (heads, unit_rows): lse in log2 units; inf for a row that attends to no key
    float* dscore;                        // (batch, num_heads_q, seqlen_q, seqlen_kv); the gradient, contiguous
    float* dscore_parts;                  // (pair_parts, dscore_elements): sums of each part; null where there is one part
    int64_t dscore_batch_step;            // elements to the next batch entry; 0: all share an element
    int64_t dscore_head_step;             // the same for heads
    int64_t dscore_query_step;            // for queries
    int64_t dscore_key_step;              // for keys
    int64_t dscore_elements;              // of the gradient
    int32_t pair_parts;                   // parts of the batch entries and heads that share an element
    int32_t batch_size;                   // sequences
    int32_t num_heads_q;
    int32_t group_size;                   // num_heads_q / num_heads_kv
    int32_t kept_batch;                   // batch entries that have sums of their own
    int32_t kept_heads;                   // query heads that have sums of their own
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t num_tiles;                    // tiles of the grid
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    float scale_log2;                     // softmax_scale * log2(e), above 0
};

// Scores of a warp's rows and the keys of a tile, or sums over such scores. Element [0][j][e] of thread (g, t) = (lane / 4, lane % 4) is
// row g + 8 (e / 2), key 8 j + 2 t + e % 2.
using SumsOfTile = float[1][kKeyTiles][4];

// A tile: kBlockM query rows by kBlockN keys, of one batch entry and head after another.
struct Tile {
    int64_t index;
    int kept_batch;  // the batch index in the array
    int kept_head;
    int batch;
    int head;
    int first_row;
    int first_key;
};

__device__ Tile find_tile(const Params& params, int index);

// The batch entries and heads whose scores are added up, as pairs: heads of a batch entry one after another.
struct Pairs {
    int heads;  // of a batch entry
    int count;

    __device__ __forceinline__ explicit Pairs(const Params& params)
        : heads(params.num_heads_q / params.kept_heads), count(params.batch_size / params.kept_batch * heads) {}

    // The tile in a pair's batch entry and head.
    __device__ __forceinline__ Tile at(const Tile& tile, int pair) const {
        Tile of_pair = tile;
        of_pair.batch = tile.kept_batch + pair / heads;
        of_pair.head = tile.kept_head + pair % heads;
        return of_pair;
    }
};

// The workspace pads each head to a multiple of kRowUnit rows, so the last block of queries is within the array.
constexpr int kRowUnit = 128;

__device__ int unit_rows(const Params& params);  // Rows of a head in the workspace
__device__ int64_t first_unit_row(const Params& params, int batch, int head);  // The row of the workspace that a head begins with
__device__ int num_rows(const Params& params);  // Rows of a head of the grid
__device__ int query_of_row(const Params&, int row);  // The query of a row of a tile
// The offset of row `row` of the tile's head in an array, in elements from the start of the batch entry
__device__ int64_t row_offset(const Params&, const Tile& tile, int row, int64_t row_stride, int64_t head_stride);
// Visits the scores of S with their rows and keys
template <int kTiles, typename AtRow> __device__ void for_each_score(float (&scores)[kTiles][kKeyTiles][4], int first_row, int first_key,
    int lane, AtRow at_row);

// ==== visible: which keys a row attends to, and which blocks of keys need a mask

// Keys [begin, end).
struct KeyRange {
    int begin;
    int end;
};

__device__ KeyRange keys_of_query(const Params& params, int);  // The keys that a query attends to
// The intersection of the key ranges of rows [first_row, first_row + count)
__device__ KeyRange keys_of_every(const Params& params, int first_row, int count);
// Masks the keys outside the range of their row
template <int kTiles> __device__ void apply_mask(const Params& params, const Tile&, float (&scores)[kTiles][kKeyTiles][4], int first_row,
    int first_key, int lane);
// ====

// Finishes the scores of a KV block between Q K^T and softmax
template <int kTiles> __device__ void finish_scores(const Params& params, const Tile& tile, float (&scores)[kTiles][kKeyTiles][4],
    int row_in_tile, int first_key, int lane);
// The union of the key ranges of rows [first_row, first_row + count)
__device__ KeyRange keys_of_some(const Params& params, int first_row, int count);

// KV blocks, visited from the last to the first, so that a ragged last block comes before the steady state.
struct KvBlocks {
    int first;
    int last;  // less than `first` if there are no blocks
};

// The KV blocks that rows [first_row, first_row + count) attend to
__device__ KvBlocks kv_blocks_of(const Params& params, int first_row, int count);

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

__device__ int mapped_row(const Params&, int key);  // The row of a key in the tensor maps of K and V
__device__ bool is_visible(const Params& params, const Tile& tile);  // Whether some row of a tile attends to some of its keys

// What a thread block computes at a time: the sums of a tile over a part of its pairs.
struct Work {
    Tile tile;
    int part;
    int first_pair;
    int end_pair;  // at most first_pair if the part has no pairs
};

__device__ Work find_work(const Params& params, const Pairs& pairs, int index);  // The work with number `index` in launch order
// The wgmma descriptor of an operand in shared memory
__device__ uint64_t descriptor(shared_address start, int stride_bytes, int leading_bytes = 16);
// Issues products (64 x kBlockN) += A B^T of a warpgroup over `columns` columns of a slice; = if it is the first slice
__device__ void mma_slice(SumsOfTile& products, shared_address a_smem, shared_address b_smem, int columns, bool is_first);
// Waits until at most kPending groups of wgmmas are in flight, so `products` is complete
template <int kPending> __device__ void await_mma(SumsOfTile& products);

// LSE and delta of the lane's two rows, from the forward pass. A row past the last one has lse_log2 = inf, which makes its P 0.
struct SavedRows {
    float lse_log2[2];
    float delta[2];

    __device__ __forceinline__ SavedRows(const Params& params, const Tile& tile, int first_row, int lane) {
        const int64_t first = first_unit_row(params, tile.batch, tile.head);
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const int row = first_row + 8 * row8 + lane / 4;
            const bool is_inside = row < params.seqlen_q;
            lse_log2[row8] = is_inside ? __uint_as_float(load_global_32(params.lse_log2 + first + row)) : INFINITY;
            delta[row8] = is_inside ? __uint_as_float(load_global_32(params.delta + first + row)) : 0.0f;
        }
    }
};

__device__ bool is_whole(const Params& params, const Tile& tile);  // Whether all rows of a tile exist and attend to all of its keys
// Replaces scores by P
template <bool kWhole> __device__ void exponentials(const Params& params, SumsOfTile& scores, const SavedRows& rows);
template <bool kWhole> __device__ void add_ds(SumsOfTile& sums, const SumsOfTile& p, const SumsOfTile& ds);  // Adds P times ds
__device__ void subtract_delta(SumsOfTile& ds, const SavedRows& rows);  // dP - delta
// Stores an element of the gradient, rounded to the dtype of its array
__device__ void store_gradient(const Params& params, int64_t place, float value);

constexpr int kChunkKeys = 4;  // of 16 bytes

// The chunk of four neighbouring keys that a lane stores, of two groups of 8 keys
__device__ uint4 chunk_of_lane(const float (&sums)[2][2], int lane);
__device__ int key_of_chunk(int lane);  // The first key of the chunk, from the first key of its two groups on
// Stores a chunk of a row whose elements are not adjacent, or that the last key ends
__device__ void store_some(const Params& params, int64_t place, const uint4& chunk, int keys);
constexpr int kChunkGroups = kChunkKeys / 2;  // groups of 8 keys that the lanes of a quad exchange

// Stores the sums of a tile
__device__ void leave_sums(const Params& params, const Tile& tile, const SumsOfTile& sums, shared_address, int warp, int lane);
// Stores the sums of a tile over a part of its pairs, which the join kernel adds up
__device__ void leave_part(const Params& params, const Tile& tile, const SumsOfTile& sums, int part, int warp, int lane);
// Leaves the sums of a thread block's work
__device__ void leave_sums_of(const Params& params, const Work& work, const SumsOfTile& sums, shared_address shared, int warp, int lane);
// Loads a slice of rows and of keys, the columns from `column` on, as soon as the stage is empty
__device__ void load_slice(shared_address shared, RingPosition<kStages>& ring, const tensor_map& of_rows, const tensor_map& of_keys,
    int column, int row, int key, int head, int kv_head, int batch);

// The producer thread: the slices of all tiles and pairs.
__device__ __forceinline__ void produce(const Params& params, shared_address shared) {
    RingPosition<kStages> ring;
    const Pairs pairs(params);
    for (int index = block_index(); index < params.num_tiles; index += gridDim.x) {
        const Work work = find_work(params, pairs, index);
        const Tile& tile = work.tile;
        const int key = mapped_row(params, tile.first_key);
#pragma unroll 1
        for (int pair = work.first_pair; pair < work.end_pair; ++pair) {
            const Tile of_pair = pairs.at(tile, pair);
            const int kv_head = of_pair.head / params.group_size;
#pragma unroll
            for (int slice = 0; slice < kSlices; ++slice) {
                load_slice(shared, ring, params.q, params.k, slice * kPanelColumns, tile.first_row, key, of_pair.head, kv_head,
                           of_pair.batch);
            }
#pragma unroll
            for (int slice = 0; slice < kSlicesV; ++slice) {
                load_slice(shared, ring, params.dout, params.v, slice * kPanelColumns, tile.first_row, key, of_pair.head, kv_head,
                           of_pair.batch);
            }
        }
    }
}

// A consumer warpgroup: 64 rows of each tile.
__device__ __forceinline__ void consume(const Params& params, shared_address shared) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int rows_offset = warp / 4 * 64 * kPanelRowBytes;  // of the warpgroup's rows in a stage
    const Pairs pairs(params);
    const int consumer = warp / 4;
    // With kReleaseEarly there are no turns: the slices of dP come after both consumers have computed S.
    auto begin_turn = [&] {
        if constexpr (!kReleaseEarly) barrier_sync(kTurnBarrier + consumer, 256);
    };
    auto end_turn = [&] {
        if constexpr (!kReleaseEarly) barrier_arrive(kTurnBarrier + 1 - consumer, 256);
    };
    if (consumer == 1) end_turn();  // consumer 0 has the first turn
    RingPosition<kStages> ring;     // the next slice
    // Releases slices, beginning `distance` slices before the next one.
    auto release = [&](int distance, int slices) {
#pragma unroll
        for (int i = 0; i < slices; ++i) {
            const int stage = ring.stage - distance + i;
            if (lane == 0) mbarrier_arrive(shared + kEmptyOffset + 8 * (stage < 0 ? stage + kStages : stage));
        }
    };
    for (int index = block_index(); index < params.num_tiles; index += gridDim.x) {
        const Work work = find_work(params, pairs, index);
        const Tile& tile = work.tile;
        const int first_row = tile.first_row + warp * kWarpRows;
        const bool whole = is_whole(params, tile);
        SumsOfTile sums = {};
#pragma unroll 1
        for (int pair = work.first_pair; pair < work.end_pair; ++pair) {
            const Tile of_pair = pairs.at(tile, pair);
            const SavedRows rows(params, of_pair, first_row, lane);
            // 1. Issue S = Q K^T: wait for each slice.
            begin_turn();
            SumsOfTile scores;
#pragma unroll
            for (int slice = 0; slice < kSlices; ++slice) {
                mbarrier_wait(shared + kFullOffset + 8 * ring.stage, ring.parity);
                const shared_address stage = shared + ring.stage * kStageBytes;
                mma_slice(scores, stage + rows_offset, stage + kKeysOffset, kHeadDim - slice * kPanelColumns, slice == 0);
                ring.advance();
            }
            wgmma_commit();
            if constexpr (kReleaseEarly) {
                await_mma<0>(scores);
                release(kSlices, kSlices);
            }
            // 2. Issue dP = dO V^T.
            SumsOfTile ds;
#pragma unroll
            for (int slice = 0; slice < kSlicesV; ++slice) {
                mbarrier_wait(shared + kFullOffset + 8 * ring.stage, ring.parity);
                const shared_address stage = shared + ring.stage * kStageBytes;
                mma_slice(ds, stage + rows_offset, stage + kKeysOffset, kHeadDimV - slice * kPanelColumns, slice == 0);
                ring.advance();
            }
            wgmma_commit();
            end_turn();
            // 3. Wait for S, leave dP in flight; modify and mask S, and turn it into P.
            await_mma<1>(scores);
            if constexpr (!kReleaseEarly) release(kSlices + kSlicesV, kSlices);
            apply_mask(params, of_pair, scores, first_row, tile.first_key, lane);
            if (whole) exponentials<true>(params, scores, rows);
            else exponentials<false>(params, scores, rows);
            // 4. Wait for dP. Add P (dP - delta).
            await_mma<0>(ds);
            release(kSlicesV, kSlicesV);
            subtract_delta(ds, rows);
            if (whole) add_ds<true>(sums, scores, ds);
            else add_ds<false>(sums, scores, ds);
        }
        leave_sums_of(params, work, sums, shared, warp, lane);
    }
    if (consumer == 0) begin_turn();  // consumer 1 has ended its last turn
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
score_gradient_hdim128_bf16_sm90(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const shared_address shared = (to_shared(shared_memory) + 1023) / 1024 * 1024;
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(shared + kFullOffset + 8 * stage, 1);
            mbarrier_init(shared + kEmptyOffset + 8 * stage, kWarps);
        }
        fence_mbarrier_init();
    } else if (threadIdx.x == 32) {
        prefetch_tensormap(params.q);
        prefetch_tensormap(params.k);
        prefetch_tensormap(params.dout);
        prefetch_tensormap(params.v);
    }
    __syncthreads();

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    if (warpgroup == kConsumers) {
        setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x == 128 * kConsumers) produce(params, shared);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(params, shared);
    }
}

__device__ __forceinline__ Tile find_tile(const Params& params, int index) {
    const int key_blocks = (params.seqlen_kv + kBlockN - 1) / kBlockN;
    const int column = index / params.num_row_blocks;
    const int kept = column / key_blocks;
    Tile tile;
    tile.index = index;
    tile.kept_batch = kept / params.kept_heads;
    tile.kept_head = kept % params.kept_heads;
    tile.batch = tile.kept_batch;
    tile.head = tile.kept_head;
    tile.first_row = index % params.num_row_blocks * kBlockM;
    tile.first_key = column % key_blocks * kBlockN;
    return tile;
}

__device__ __forceinline__ int unit_rows(const Params& params) { return (params.seqlen_q + kRowUnit - 1) / kRowUnit * kRowUnit; }

__device__ __forceinline__ int64_t first_unit_row(const Params& params, int batch, int head) {
    return (int64_t(batch) * params.num_heads_q + head) * unit_rows(params);
}

__device__ __forceinline__ int num_rows(const Params& params) { return params.seqlen_q; }

__device__ __forceinline__ int query_of_row(const Params&, int row) { return row; }

__device__ __forceinline__ int64_t row_offset(const Params&, const Tile& tile, int row, int64_t row_stride,
                                              int64_t head_stride) {
    return row * row_stride + tile.head * head_stride;
}

// Visits the scores of S with their rows and keys: kTiles MMA tiles from row `first_row` and key `first_key` on. For each row at_row(row, lane_key)
// returns a function, which is then called with (step, score) for each score that this lane has of the row. The key of the score is lane_key + step.
// The steps are constants, so that comparing one takes one instruction.
template <int kTiles, typename AtRow>
__device__ __forceinline__ void for_each_score(float (&scores)[kTiles][kKeyTiles][4], int first_row, int first_key, int lane,
                                               AtRow at_row) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            auto at_score = at_row(first_row + kRowTileStep * i + 8 * row8 + lane / 4, first_key + lane % 4 * 2);
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) at_score(8 * j + e, scores[i][j][2 * row8 + e]);
            }
        }
    }
}

// ==== visible: which keys a row attends to, and which blocks of keys need a mask

// The keys that a query attends to: all.
__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int) { return {0, params.seqlen_kv}; }

// The intersection of the key ranges of rows [first_row, first_row + count). A KV block within it needs no mask.
__device__ __forceinline__ KeyRange keys_of_every(const Params& params, int first_row, int count) {
    const int last_row = min(first_row + count, num_rows(params)) - 1;
    return {keys_of_query(params, query_of_row(params, last_row)).begin,
            keys_of_query(params, query_of_row(params, first_row)).end};
}

// Masks the keys outside the range of their row. In most blocks every row attends to all keys, and nothing is masked.
template <int kTiles>
__device__ __forceinline__ void apply_mask(const Params& params, const Tile&, float (&scores)[kTiles][kKeyTiles][4], int first_row,
                                           int first_key, int lane) {
    const KeyRange every = keys_of_every(params, min(first_row, num_rows(params) - 1), kRowTileStep * (kTiles - 1) + 16);
    if (first_key + 8 * kKeyTiles > every.end) {
        for_each_score(scores, first_row, first_key, lane, [&](int row, int lane_key) {
            const int end = keys_of_query(params, query_of_row(params, row)).end - lane_key;
            return [=](int step, float& score) {
                if (step >= end) score = -INFINITY;
            };
        });
    }
}
// ====

// Finishes the scores of a KV block between Q K^T and softmax. The mask comes last, so hidden scores stay hidden.
// The scores are a warp's MMA tiles from row `row_in_tile` of the tile and key `first_key` on.
template <int kTiles>
__device__ __forceinline__ void finish_scores(const Params& params, const Tile& tile, float (&scores)[kTiles][kKeyTiles][4],
                                              int row_in_tile, int first_key, int lane) {
    apply_mask(params, tile, scores, tile.first_row + row_in_tile, first_key, lane);
}

// The union of the key ranges of rows [first_row, first_row + count). A range never begins or ends before the range of the previous row. KV
// blocks outside of the union are not visited.
__device__ __forceinline__ KeyRange keys_of_some(const Params& params, int first_row, int count) {
    const int last_row = min(first_row + count, num_rows(params)) - 1;
    return {keys_of_query(params, query_of_row(params, first_row)).begin,
            keys_of_query(params, query_of_row(params, last_row)).end};
}

__device__ __forceinline__ KvBlocks kv_blocks_of(const Params& params, int first_row, int count) {
    const KeyRange keys = keys_of_some(params, first_row, count);
    return {keys.begin / kBlockN, (keys.end + kBlockN - 1) / kBlockN - 1};
}

// The row of a key in the tensor maps of K and V. The maps end with the last key that any query attends to. For later keys TMA fills in zeros,
// because 0 times a NaN in memory would be NaN.
__device__ __forceinline__ int mapped_row(const Params&, int key) { return key; }

// Whether some row of a tile attends to some of its keys. Otherwise its sums are 0.
__device__ __forceinline__ bool is_visible(const Params& params, const Tile& tile) {
    const KvBlocks blocks = kv_blocks_of(params, tile.first_row, kBlockM);
    const int kv_block = tile.first_key / kBlockN;
    return blocks.first <= kv_block && kv_block <= blocks.last;
}

// The work with number `index` in launch order: the tiles of a part one after another.
__device__ __forceinline__ Work find_work(const Params& params, const Pairs& pairs, int index) {
    const int tiles = params.num_tiles / params.pair_parts;
    const int pairs_of_part = (pairs.count + params.pair_parts - 1) / params.pair_parts;
    Work work;
    work.part = index / tiles;
    work.tile = find_tile(params, index % tiles);
    work.first_pair = work.part * pairs_of_part;
    work.end_pair = is_visible(params, work.tile) ? min(work.first_pair + pairs_of_part, pairs.count) : 0;
    return work;
}

// The wgmma of this kernel. It computes d = a . b of a warpgroup, or d += a . b if `accumulate`: a is 64 x 16, b 16 x N, and the accumulator d
// 64 x N in fp32. Thread (g, t) = (lane / 4, lane % 4) of warp w holds d[4 j + e]: row 16 w + g + 8 (e / 2), column 8 j + 2 t + e % 2.
#ifndef FLASHGEN_SIMULATOR  // the simulator emulates it in C++

// wgmma.mma_async.m64n128k16: a and b in shared memory under descriptors, both with the K dimension contiguous.
__device__ __forceinline__ void wgmma_m64n128k16_bf16_ss(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(accumulate));
}

#endif

// The wgmma descriptor of an operand in shared memory: its address, the stride byte offset (SBO) and the leading byte offset (LBO) between its swizzle
// atoms of eight rows, and the kind of swizzle. LBO is read only for MN-major operands of several panels.
__device__ __forceinline__ uint64_t descriptor(shared_address start, int stride_bytes, int leading_bytes) {
    constexpr uint64_t kSwizzle = 1;  // of 128 bytes
    return uint64_t(start >> 4 & 0x3fff) | uint64_t(leading_bytes >> 4) << 16 | uint64_t(stride_bytes >> 4) << 32 |
           kSwizzle << 62;
}

// Issues products (64 x kBlockN) += A B^T of a warpgroup over `columns` columns of a slice; = if it is the first slice. Both operands are K-major:
// SBO leads to the next eight rows. A step of 16 along the K dimension is 32 bytes within the swizzled row.
__device__ __forceinline__ void mma_slice(SumsOfTile& products, shared_address a_smem, shared_address b_smem, int columns, bool is_first) {
    float(&sums)[kBlockN / 2] = *reinterpret_cast<float(*)[kBlockN / 2]>(&products[0][0][0]);
    const uint64_t a = descriptor(a_smem, 8 * kPanelRowBytes);
    const uint64_t b = descriptor(b_smem, 8 * kPanelRowBytes);
    pin_registers(sums);
    wgmma_fence();
#pragma unroll
    for (int column = 0; column < kPanelColumns; column += 16) {
        const int bytes = column * sizeof(element);
        if (column < columns) wgmma_m64n128k16_bf16_ss(sums, a + (bytes >> 4), b + (bytes >> 4), !is_first || column > 0);
    }
}

template <int kPending>
__device__ __forceinline__ void await_mma(SumsOfTile& products) {
    wgmma_wait<kPending>();
    pin_registers(*reinterpret_cast<float(*)[kBlockN / 2]>(&products[0][0][0]));
}

__device__ __forceinline__ bool is_whole(const Params& params, const Tile& tile) {
    const KeyRange every = keys_of_every(params, tile.first_row, kBlockM);
    return tile.first_row + kBlockM <= params.seqlen_q && every.begin <= tile.first_key && tile.first_key + kBlockN <= every.end;
}

// Replaces scores by P. Rows past the last one have lse_log2 = inf; unless the tile is whole, their scores may be NaN.
template <bool kWhole>
__device__ __forceinline__ void exponentials(const Params& params, SumsOfTile& scores, const SavedRows& rows) {
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float lse_log2 = rows.lse_log2[e / 2];
            const float p = exp2_approx(fmaf(scores[0][j][e], params.scale_log2, -lse_log2));
            scores[0][j][e] = !kWhole && lse_log2 == INFINITY ? 0.0f : p;
        }
    }
}

// Adds P times ds. Where a key is hidden ds may be infinite or NaN; in a whole tile no key is.
template <bool kWhole>
__device__ __forceinline__ void add_ds(SumsOfTile& sums, const SumsOfTile& p, const SumsOfTile& ds) {
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float weight = p[0][j][e];
            if (kWhole) sums[0][j][e] = fmaf(weight, ds[0][j][e], sums[0][j][e]);
            else sums[0][j][e] += weight == 0.0f ? 0.0f : weight * ds[0][j][e];
        }
    }
}

__device__ __forceinline__ void subtract_delta(SumsOfTile& ds, const SavedRows& rows) {
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) ds[0][j][e] -= rows.delta[e / 2];
    }
}

__device__ __forceinline__ void store_gradient(const Params& params, int64_t place, float value) {
    store_global_32(params.dscore + place, value);
}

// The chunk of four neighbouring keys that a lane stores, of two groups of 8 keys: an even lane of the first group, an odd lane of the second.
// `sums` are the two keys of the lane in each group.
__device__ __forceinline__ uint4 chunk_of_lane(const float (&sums)[2][2], int lane) {
    const bool odd = lane & 1;
    uint32_t received[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) received[e] = __shfl_xor_sync(0xffffffff, __float_as_uint(odd ? sums[0][e] : sums[1][e]), 1);
    if (odd) return {received[0], received[1], __float_as_uint(sums[1][0]), __float_as_uint(sums[1][1])};
    return {__float_as_uint(sums[0][0]), __float_as_uint(sums[0][1]), received[0], received[1]};
}

__device__ __forceinline__ int key_of_chunk(int lane) { return lane % 2 * 8 + lane % 4 / 2 * 4; }

__device__ __forceinline__ void store_some(const Params& params, int64_t place, const uint4& chunk, int keys) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < kChunkKeys; ++i) {
        if (i >= keys) break;
        store_global_32(params.dscore + place + i * params.dscore_key_step, __uint_as_float(words[i]));
    }
}

// Stores the sums of a tile: each is an element of the gradient.
__device__ __forceinline__ void leave_sums(const Params& params, const Tile& tile, const SumsOfTile& sums, shared_address, int warp, int lane) {
    const int64_t first = tile.kept_batch * params.dscore_batch_step + tile.kept_head * params.dscore_head_step;
#pragma unroll
    for (int row8 = 0; row8 < 2; ++row8) {
        const int row = tile.first_row + warp * kWarpRows + 8 * row8 + lane / 4;
        const int first_key = tile.first_key + key_of_chunk(lane);
        const int keys = row < params.seqlen_q ? params.seqlen_kv - first_key : 0;
        const int64_t place = first + row * params.dscore_query_step + first_key * params.dscore_key_step;
        fp32* const source = reinterpret_cast<fp32*>(params.dscore) + place;
        const bool in_chunks = params.dscore_key_step == 1 && reinterpret_cast<uint64_t>(source) % 16 == 0;
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += kChunkGroups) {
            float of_lane[kChunkGroups][2];
#pragma unroll
            for (int i = 0; i < kChunkGroups; ++i) {
                of_lane[i][0] = sums[0][j + i][2 * row8];
                of_lane[i][1] = sums[0][j + i][2 * row8 + 1];
            }
            const uint4 chunk = chunk_of_lane(of_lane, lane);
            if (in_chunks && 8 * j + kChunkKeys <= keys) store_global_128(source + 8 * j, chunk);
            else store_some(params, place + 8 * j * params.dscore_key_step, chunk, keys - 8 * j);
        }
    }
}

__device__ __forceinline__ void leave_part(const Params& params, const Tile& tile, const SumsOfTile& sums, int part, int warp, int lane) {
    const int64_t first =
        part * params.dscore_elements + tile.kept_batch * params.dscore_batch_step + tile.kept_head * params.dscore_head_step;
#pragma unroll
    for (int row8 = 0; row8 < 2; ++row8) {
        const int row = tile.first_row + warp * kWarpRows + 8 * row8 + lane / 4;
        const int first_key = tile.first_key + lane % 4 * 2;
        const int keys = row < params.seqlen_q ? params.seqlen_kv - first_key : 0;
        float* const of_row = params.dscore_parts + first + row * params.dscore_query_step + first_key * params.dscore_key_step;
        const bool in_pairs = params.dscore_key_step == 1 && reinterpret_cast<uint64_t>(of_row) % 8 == 0;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
            const float two[2] = {sums[0][j][2 * row8], sums[0][j][2 * row8 + 1]};
            if (in_pairs && 8 * j + 1 < keys) {
                store_global_64(of_row + 8 * j, two[0], two[1]);
            } else {
                if (8 * j < keys) store_global_32(of_row + 8 * j * params.dscore_key_step, two[0]);
                if (8 * j + 1 < keys) store_global_32(of_row + (8 * j + 1) * params.dscore_key_step, two[1]);
            }
        }
    }
}

// Leaves the sums of a thread block's work: the gradient, or what a part of its pairs adds to it.
__device__ __forceinline__ void leave_sums_of(const Params& params, const Work& work, const SumsOfTile& sums, shared_address shared, int warp,
                                              int lane) {
    if (params.pair_parts > 1) leave_part(params, work.tile, sums, work.part, warp, lane);
    else leave_sums(params, work.tile, sums, shared, warp, lane);
}

// Loads a slice of rows and of keys, the columns from `column` on, as soon as the stage is empty. Elements outside of the arrays become zeros.
__device__ __forceinline__ void load_slice(shared_address shared, RingPosition<kStages>& ring, const tensor_map& of_rows,
                                           const tensor_map& of_keys, int column, int row, int key, int head, int kv_head, int batch) {
    const shared_address stage = shared + ring.stage * kStageBytes;
    const shared_address full = shared + kFullOffset + 8 * ring.stage;
    mbarrier_wait(shared + kEmptyOffset + 8 * ring.stage, ring.parity ^ 1);
    mbarrier_arrive_expect_tx(full, kStageBytes);
    tma_load_4d(stage, of_rows, full, column, row, head, batch);
    tma_load_4d(stage + kKeysOffset, of_keys, full, column, key, kv_head, batch);
    ring.advance();
}

static_assert(kProducerRegisters <= kConsumerRegisters, "the producer gives registers to the consumers");
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * kLaunchRegisters, "consumers would wait for ever");
static_assert(kConsumers == 2, "two consumers take turns");
static_assert(kBlockM % 64 == 0 && kBlockN % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "whole wgmmas");
static_assert(kSlices <= kStages && kSlicesV <= kStages, "all slices of S, or of dP, are in shared memory at once");
static_assert(kKeysOffset % 1024 == 0 && kStageBytes % 1024 == 0, "panels begin where the swizzle does");
static_assert(sizeof(SharedStorage) + 1024 == 197728, "the launcher allocates this, and room to begin at a multiple of 1024");
static_assert(sizeof(Params) == 640 && offsetof(Params, dout) == 0 && offsetof(Params, q) == 128 && offsetof(Params, k) == 256);
static_assert(offsetof(Params, v) == 384 && offsetof(Params, delta) == 512 && offsetof(Params, lse_log2) == 520);
static_assert(offsetof(Params, dscore) == 528 && offsetof(Params, dscore_parts) == 536);
static_assert(offsetof(Params, dscore_batch_step) == 544 && offsetof(Params, dscore_head_step) == 552);
static_assert(offsetof(Params, dscore_query_step) == 560 && offsetof(Params, dscore_key_step) == 568);
static_assert(offsetof(Params, dscore_elements) == 576 && offsetof(Params, pair_parts) == 584);
static_assert(offsetof(Params, batch_size) == 588 && offsetof(Params, num_heads_q) == 592 && offsetof(Params, group_size) == 596);
static_assert(offsetof(Params, kept_batch) == 600 && offsetof(Params, kept_heads) == 604 && offsetof(Params, seqlen_q) == 608);
static_assert(offsetof(Params, seqlen_kv) == 612 && offsetof(Params, num_tiles) == 616);
static_assert(offsetof(Params, num_row_blocks) == 620 && offsetof(Params, scale_log2) == 624);
