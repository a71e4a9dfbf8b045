// score_gradient_hdim256_bf16_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 256, dtype bf16, mask_type none, sums none
// tile      block_m 128, block_n 64, warps 8, stages 4
// block     256 threads, 98304 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 101376 bytes or more of shared memory per block
// spec      score_gradient_sm80.yaml
// template  score_gradient_sm80.cu.j2
#include "flashgen/sm80.cuh"

// Computes the gradient of an array that a score modification reads; later steps sum over tiles. f' is the derivative of a modified score by
// the array's element:
//
//     dS = P * (dP - delta) * f',  S = Q K^T,  P = 2^(scale_log2 S - lse_log2),  dP = dO V^T
//
// Roles: all warps are alike; a warp has kWarpRows query rows. A thread block owns kBlockM queries and kBlockN keys for one batch index and
// head index of the array. It adds up dS in registers over the batch entries and heads that share an element of the array, one
// after another, so that the gradient repeats to the bit. Slices of 128 bytes of rows go through a ring of kStages: Q and K for S, then
// dO and V for dP.

using element = bf16;

constexpr int kBlockM = 128;  // query rows of a tile
constexpr int kBlockN = 64;  // keys of a tile
constexpr int kWarps = 8;
constexpr int kStages = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = kBlockM / kWarps;
constexpr int kRowTileStep = 16;                       // rows of an MMA tile
constexpr int kKeyTiles = kBlockN / 8;                 // MMA tiles along the keys
constexpr int kChunkDims = 16 / int(sizeof(element));  // elements of a 16-byte chunk
constexpr int kSliceChunks = 8;                        // chunks of a slice: 128 bytes of a row
constexpr int kSliceDims = kSliceChunks * kChunkDims;
constexpr int kSliceSteps = kSliceChunks / 2;  // MMA steps of a slice, of two chunks each

struct Stage {
    element of_rows[kBlockM][kSliceDims];  // of Q or dO
    element of_keys[kBlockN][kSliceDims];  // of K or V
};
struct SharedStorage {
    Stage stages[kStages];
};
constexpr int kKeysOffset = offsetof(Stage, of_keys);

struct Params {
    const element* dout;                  // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    const element* q;                     // (batch, seqlen_q, num_heads_q, head_dim); rows 16-byte aligned
    const element* k;                     // (batch, seqlen_kv, num_heads_kv, head_dim); rows 16-byte aligned
    const element* v;                     // (batch, seqlen_kv, num_heads_kv, head_dim_v); rows 16-byte aligned
    const float* delta;                   // (heads, unit_rows): sum(dout * out) - dlse
    const float* lse_log2;                // (heads, unit_rows): lse in log2 units; inf for a row that attends to no key
    float* dscore;                        // (batch, num_heads_q, seqlen_q, seqlen_kv); the gradient, contiguous
    int64_t dout_batch_stride;            // strides are in elements
    int64_t dout_row_stride;
    int64_t dout_head_stride;
    int64_t q_batch_stride;               // strides are in elements
    int64_t q_row_stride;
    int64_t q_head_stride;
    int64_t k_batch_stride;               // strides are in elements
    int64_t k_row_stride;
    int64_t k_head_stride;
    int64_t v_batch_stride;               // strides are in elements
    int64_t v_row_stride;
    int64_t v_head_stride;
    int64_t dscore_batch_step;            // elements to the next batch entry; 0: all share an element
    int64_t dscore_head_step;             // the same for heads
    int64_t dscore_query_step;            // for queries
    int64_t dscore_key_step;              // for keys
    int32_t batch_size;                   // sequences
    int32_t num_heads_q;
    int32_t group_size;                   // num_heads_q / num_heads_kv
    int32_t kept_batch;                   // batch entries that have sums of their own
    int32_t kept_heads;                   // query heads that have sums of their own
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
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
__device__ shared_address chunk_address(shared_address slice, int row, int chunk);  // The address of a chunk of a slice in shared memory
// Starts the copy of a slice of kRows rows
template <int kRows> __device__ void copy_slice(shared_address slice, const element* source, int64_t row_stride, int rows, int dims);

// The slices of the pairs of a tile, in the order in which they go through the ring: of Q and K, then of dO and V, pair after pair.
struct Slices {
    int of_scores;  // slices of Q and K
    int of_pair;    // slices of a pair: of Q and K, then of dO and V
    int pair;
    int slice;

    __device__ __forceinline__ explicit Slices(const Params& params)
        : of_scores((params.head_dim + kSliceDims - 1) / kSliceDims),
          of_pair(of_scores + (params.head_dim_v + kSliceDims - 1) / kSliceDims),
          pair(0),
          slice(0) {}

    // Starts the copy of the next slice into a stage, and goes on to the one after it. After the last one there is nothing to copy.
    __device__ __forceinline__ void copy(const Params& params, const Tile& tile, const Pairs& pairs, int num_pairs, shared_address stage) {
        if (pair < num_pairs) {
            const Tile of_pair_tile = pairs.at(tile, pair);
            const int kv_head = of_pair_tile.head / params.group_size;
            const int rows = params.seqlen_q - tile.first_row;
            const int keys = params.seqlen_kv - tile.first_key;
            if (slice < of_scores) {
                const int dim = slice * kSliceDims;
                const element* q = params.q + of_pair_tile.batch * params.q_batch_stride + of_pair_tile.head * params.q_head_stride +
                                   tile.first_row * params.q_row_stride + dim;
                const element* k = params.k + of_pair_tile.batch * params.k_batch_stride + kv_head * params.k_head_stride +
                                   tile.first_key * params.k_row_stride + dim;
                copy_slice<kBlockM>(stage, q, params.q_row_stride, rows, params.head_dim - dim);
                copy_slice<kBlockN>(stage + kKeysOffset, k, params.k_row_stride, keys, params.head_dim - dim);
            } else {
                const int dim = (slice - of_scores) * kSliceDims;
                const element* dout = params.dout + of_pair_tile.batch * params.dout_batch_stride +
                                      of_pair_tile.head * params.dout_head_stride + tile.first_row * params.dout_row_stride + dim;
                const element* v = params.v + of_pair_tile.batch * params.v_batch_stride + kv_head * params.v_head_stride +
                                   tile.first_key * params.v_row_stride + dim;
                copy_slice<kBlockM>(stage, dout, params.dout_row_stride, rows, params.head_dim_v - dim);
                copy_slice<kBlockN>(stage + kKeysOffset, v, params.v_row_stride, keys, params.head_dim_v - dim);
            }
            if (++slice == of_pair) {
                slice = 0;
                ++pair;
            }
        }
        cp_async_commit();
    }
};

// Adds A B^T over a slice, for this warp's rows of A and the keys of B
__device__ void add_mma(SumsOfTile& products, shared_address stage, int warp, int lane);

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

// Adds P times ds
__device__ void add_ds(const Params& params, SumsOfTile& sums, const SumsOfTile& scores, const SumsOfTile& ds, const SavedRows& rows);
// Stores an element of the gradient, rounded to the dtype of its array
__device__ void store_gradient(const Params& params, int64_t place, float value);
// Stores the sums of a tile
__device__ void leave_sums(const Params& params, const Tile& tile, const SumsOfTile& sums, shared_address, int warp, int lane);

extern "C" __global__ void __launch_bounds__(kThreads)
score_gradient_hdim256_bf16_sm80(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address shared = to_shared(shared_memory);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    const Tile tile = find_tile(params, block_index());
    const int first_row = tile.first_row + warp * kWarpRows;
    const KvBlocks blocks = kv_blocks_of(params, tile.first_row, kBlockM);
    const int kv_block = tile.first_key / kBlockN;
    const Pairs pairs(params);
    // Where no row sees a key of the tile, its sums are 0.
    const int num_pairs = blocks.first <= kv_block && kv_block <= blocks.last ? pairs.count : 0;

    SumsOfTile sums = {};
    Slices slices(params);
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) slices.copy(params, tile, pairs, num_pairs, shared + stage * int(sizeof(Stage)));
    int stage = 0;
    // 1. Wait for a slice. All warps have read the slice before it, whose stage takes the slice that is copied next.
    auto next_stage = [&]() {
        cp_async_wait<kStages - 2>();
        barrier_sync(kThreads);
        const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
        slices.copy(params, tile, pairs, num_pairs, shared + free_stage * int(sizeof(Stage)));
        const shared_address filled = shared + stage * int(sizeof(Stage));
        stage = stage == kStages - 1 ? 0 : stage + 1;
        return filled;
    };
    for (int pair = 0; pair < num_pairs; ++pair) {
        const Tile of_pair = pairs.at(tile, pair);
        const SavedRows rows(params, of_pair, first_row, lane);
        // 2. S = Q K^T, and dP = dO V^T.
        SumsOfTile scores = {};
        SumsOfTile ds = {};
        for (int slice = 0; slice < slices.of_scores; ++slice) add_mma(scores, next_stage(), warp, lane);
        for (int slice = slices.of_scores; slice < slices.of_pair; ++slice) add_mma(ds, next_stage(), warp, lane);
        // 3. dP - delta; modify S, and multiply by the derivative; mask S.
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) ds[0][j][e] -= rows.delta[e / 2];
        }
        apply_mask(params, of_pair, scores, first_row, tile.first_key, lane);
        // 4. Add dS.
        add_ds(params, sums, scores, ds, rows);
    }
    // The ring becomes memory for sums.
    cp_async_wait<0>();
    barrier_sync(kThreads);
    leave_sums(params, tile, sums, shared, warp, lane);
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

// The address of a chunk of a slice in shared memory. The chunks of a row are permuted by its number, so that the eight rows that ldmatrix
// reads at a time are in eight different groups of banks.
__device__ __forceinline__ shared_address chunk_address(shared_address slice, int row, int chunk) {
    return slice + row * (16 * kSliceChunks) + 16 * (chunk ^ row % 8);
}

// Starts the copy of a slice of kRows rows. Rows from `rows` on, and dimensions from `dims` on, become zeros. `row_stride` is in elements.
template <int kRows>
__device__ __forceinline__ void copy_slice(shared_address slice, const element* source, int64_t row_stride, int rows, int dims) {
    static_assert(kRows * kSliceChunks % kThreads == 0, "every thread copies as many chunks");
#pragma unroll
    for (int first = 0; first < kRows * kSliceChunks; first += kThreads) {
        const int row = (first + int(threadIdx.x)) / kSliceChunks;
        const int chunk = (first + int(threadIdx.x)) % kSliceChunks;
        const bool is_inside = row < rows && chunk * kChunkDims < dims;
        cp_async_16(chunk_address(slice, row, chunk), is_inside ? source + row * row_stride + chunk * kChunkDims : source,
                    is_inside ? 16 : 0);
    }
}

// Adds A B^T over a slice, for this warp's rows of A and the keys of B: of Q K^T or of dO V^T.
__device__ __forceinline__ void add_mma(SumsOfTile& products, shared_address stage, int warp, int lane) {
    SumsOfTile& sums = products;
#pragma unroll
    for (int step = 0; step < kSliceSteps; ++step) {
        uint32_t values[4];
        ldmatrix_x4(values, chunk_address(stage, warp * kWarpRows + lane % 16, 2 * step + lane / 16));
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
            // Rows of B are the columns of the MMA: both chunks of keys 0-7, then of keys 8-15.
            uint32_t of_keys[4];
            ldmatrix_x4(of_keys, chunk_address(stage + kKeysOffset, 8 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                mma_m16n8k16<element>(sums[0][j + pair], values, of_keys[2 * pair], of_keys[2 * pair + 1]);
            }
        }
    }
}

// Adds P times ds. Where a key is hidden ds may be infinite or NaN, and so may the score of a row past the last one.
__device__ __forceinline__ void add_ds(const Params& params, SumsOfTile& sums, const SumsOfTile& scores, const SumsOfTile& ds,
                                       const SavedRows& rows) {
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float lse_log2 = rows.lse_log2[e / 2];
            const float p = lse_log2 == INFINITY ? 0.0f : exp2_approx(fmaf(scores[0][j][e], params.scale_log2, -lse_log2));
            sums[0][j][e] += p == 0.0f ? 0.0f : p * ds[0][j][e];
        }
    }
}

__device__ __forceinline__ void store_gradient(const Params& params, int64_t place, float value) {
    store_global_32(params.dscore + place, value);
}

// Stores the sums of a tile: each is an element of the gradient.
__device__ __forceinline__ void leave_sums(const Params& params, const Tile& tile, const SumsOfTile& sums, shared_address, int warp, int lane) {
    const int64_t first = tile.kept_batch * params.dscore_batch_step + tile.kept_head * params.dscore_head_step;
#pragma unroll
    for (int row8 = 0; row8 < 2; ++row8) {
        const int row = tile.first_row + warp * kWarpRows + 8 * row8 + lane / 4;
        const int first_key = tile.first_key + lane % 4 * 2;
        const int keys = row < params.seqlen_q ? params.seqlen_kv - first_key : 0;
        const int64_t place = first + row * params.dscore_query_step + first_key * params.dscore_key_step;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int step = 8 * j + e;
                if (step < keys) store_gradient(params, place + step * params.dscore_key_step, sums[0][j][2 * row8 + e]);
            }
        }
    }
}

static_assert(kWarpRows == 16, "a warp has one 16-row MMA tile");
static_assert(kBlockN % 16 == 0, "ldmatrix brings 16 keys at a time");
static_assert(sizeof(SharedStorage) == 98304, "launcher and kernel agree on shared memory");
static_assert(sizeof(Params) == 232 && offsetof(Params, dout) == 0 && offsetof(Params, q) == 8 && offsetof(Params, k) == 16);
static_assert(offsetof(Params, v) == 24 && offsetof(Params, delta) == 32 && offsetof(Params, lse_log2) == 40);
static_assert(offsetof(Params, dscore) == 48 && offsetof(Params, dout_batch_stride) == 56);
static_assert(offsetof(Params, dout_row_stride) == 64 && offsetof(Params, dout_head_stride) == 72);
static_assert(offsetof(Params, q_batch_stride) == 80 && offsetof(Params, q_row_stride) == 88);
static_assert(offsetof(Params, q_head_stride) == 96 && offsetof(Params, k_batch_stride) == 104);
static_assert(offsetof(Params, k_row_stride) == 112 && offsetof(Params, k_head_stride) == 120);
static_assert(offsetof(Params, v_batch_stride) == 128 && offsetof(Params, v_row_stride) == 136);
static_assert(offsetof(Params, v_head_stride) == 144 && offsetof(Params, dscore_batch_step) == 152);
static_assert(offsetof(Params, dscore_head_step) == 160 && offsetof(Params, dscore_query_step) == 168);
static_assert(offsetof(Params, dscore_key_step) == 176 && offsetof(Params, batch_size) == 184);
static_assert(offsetof(Params, num_heads_q) == 188 && offsetof(Params, group_size) == 192 && offsetof(Params, kept_batch) == 196);
static_assert(offsetof(Params, kept_heads) == 200 && offsetof(Params, seqlen_q) == 204 && offsetof(Params, seqlen_kv) == 208);
static_assert(offsetof(Params, head_dim) == 212 && offsetof(Params, head_dim_v) == 216);
static_assert(offsetof(Params, num_row_blocks) == 220 && offsetof(Params, scale_log2) == 224);
