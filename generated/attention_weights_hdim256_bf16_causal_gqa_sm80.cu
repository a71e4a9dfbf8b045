// attention_weights_hdim256_bf16_causal_gqa_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 256, dtype bf16, mask_type causal, gqa gqa
// tile      block_m 64, block_n 64, warps 4
// block     128 threads, 16384 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 101376 bytes or more of shared memory per block
// spec      attention_weights_sm80.yaml
// template  attention_weights_sm80.cu.j2
#include "flashgen/sm80.cuh"

// The attention weights: P = 2^(scale_log2 S - lse_log2), in fp32, with the LSE of the forward call. Each element is written; a hidden key
// has the weight 0.
//
// Roles: all warps are alike; a warp has kWarpRows query rows. For each KV block the thread block copies Q and K in slices of the head dim
// and adds up S over the slices, so that one kernel serves all head dims.

using element = bf16;

constexpr int kBlockM = 64;  // query rows of a tile
constexpr int kBlockN = 64;  // keys of a KV block
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = kBlockM / kWarps;
constexpr int kRowTiles = kWarpRows / 16;  // MMA tiles of a warp along its rows
constexpr int kRowTileStep = 16;           // rows from one of them to the next
constexpr int kKeyTiles = kBlockN / 8;     // MMA tiles along the keys
constexpr int kChunkDims = 16 / int(sizeof(element));  // elements of a 16-byte chunk
constexpr int kSliceChunks = 8;                        // chunks of a slice: 128 bytes of a row
constexpr int kSliceDims = kSliceChunks * kChunkDims;
constexpr int kSliceSteps = kSliceChunks / 2;  // MMA steps of a slice, of two chunks each
constexpr float kLog2e = 1.4426950408889634f;

struct SharedStorage {
    element q[kBlockM][kSliceDims];
    element k[kBlockN][kSliceDims];
};
constexpr int kKOffset = offsetof(SharedStorage, k);

struct Params {
    const element* q;                     // (batch, seqlen_q, num_heads_q, head_dim); rows 16-byte aligned
    const element* k;                     // (batch, seqlen_kv, num_heads_kv, head_dim); rows 16-byte aligned
    const float* lse;                     // (batch, num_heads_q, seqlen_q); natural logarithm
    float* weights;                       // (batch, num_heads_q, seqlen_q, seqlen_kv)
    int64_t q_batch_stride;               // strides are in elements
    int64_t q_row_stride;
    int64_t q_head_stride;
    int64_t k_batch_stride;               // strides are in elements
    int64_t k_row_stride;
    int64_t k_head_stride;
    int32_t num_heads_q;
    int32_t group_size;                   // num_heads_q / num_heads_kv
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    int32_t diagonal_offset;              // query i is aligned with key i + diagonal_offset
    float scale_log2;                     // softmax_scale * log2(e), above 0
};

// A tile: kBlockM query rows of a head.
struct Tile {
    int batch;
    int head;
    int kv_head;
    int first_row;
};

__device__ Tile find_tile(const Params& params, int index);
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

__device__ KeyRange keys_of_query(const Params& params, int query);  // The keys that a query attends to
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
// S += Q K^T over a slice, for this warp's rows and the keys of a block
__device__ void add_mma_qk(float (&scores)[kRowTiles][kKeyTiles][4], shared_address q_slice, shared_address k_slice, int warp, int lane);
__device__ float lse_log2_of(const Params& params, const Tile& tile, int row);  // The LSE of a row in the log2 domain
__device__ float weight_of(const Params& params, float score, float lse_log2);  // The weight of a key
// Writes the weights of this warp's rows and the keys from `first_key` on, of finished scores
__device__ void store_weights(const Params& params, const Tile& tile, float (&scores)[kRowTiles][kKeyTiles][4], int first_key, int warp,
    int lane);

extern "C" __global__ void __launch_bounds__(kThreads)
attention_weights_hdim256_bf16_causal_gqa_sm80(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address q_slice = to_shared(shared_memory);
    const shared_address k_slice = q_slice + kKOffset;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    const Tile tile = find_tile(params, block_index());
    const KvBlocks blocks = kv_blocks_of(params, tile.first_row, kBlockM);
    const element* q = params.q + tile.batch * params.q_batch_stride +
                       row_offset(params, tile, tile.first_row, params.q_row_stride, params.q_head_stride);
    const element* k = params.k + tile.batch * params.k_batch_stride + tile.kv_head * params.k_head_stride;

    for (int block = 0; block * kBlockN < params.seqlen_kv; ++block) {
        const int first_key = block * kBlockN;
        float scores[kRowTiles][kKeyTiles][4];
        // No row sees a key of a block outside of `blocks`: its scores need no MMA.
        const bool is_seen = blocks.first <= block && block <= blocks.last;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) scores[i][j][e] = is_seen ? 0.0f : -INFINITY;
            }
        }
        if (is_seen) {
            for (int first_dim = 0; first_dim < params.head_dim; first_dim += kSliceDims) {
                // 1. Copy a slice of Q and of K, and wait for it.
                const int dims = params.head_dim - first_dim;
                copy_slice<kBlockM>(q_slice, q + first_dim, params.q_row_stride, num_rows(params) - tile.first_row, dims);
                copy_slice<kBlockN>(k_slice, k + first_key * params.k_row_stride + first_dim, params.k_row_stride,
                                    params.seqlen_kv - first_key, dims);
                cp_async_commit();
                cp_async_wait<0>();
                barrier_sync(kThreads);
                // 2. S += Q K^T; then every warp has read the slices.
                add_mma_qk(scores, q_slice, k_slice, warp, lane);
                barrier_sync(kThreads);
            }
            // 3. Modify and mask S.
            finish_scores(params, tile, scores, warp * kWarpRows, first_key, lane);
        }
        // 4. Store the weights.
        store_weights(params, tile, scores, first_key, warp, lane);
    }
}

__device__ __forceinline__ Tile find_tile(const Params& params, int index) {
    Tile tile;
    const int head_of_batch = index / params.num_row_blocks;
    tile.batch = head_of_batch / params.num_heads_q;
    tile.head = head_of_batch % params.num_heads_q;
    tile.kv_head = tile.head / params.group_size;
    tile.first_row = index % params.num_row_blocks * kBlockM;
    return tile;
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

// The keys that a query attends to: those up to its diagonal.
__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int query) {
    return {0, max(0, min(params.seqlen_kv, query + params.diagonal_offset + 1))};
}

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

// S += Q K^T over a slice, for this warp's rows and the keys of a block. Element [i][j][e] of thread (g, t) = (lane / 4, lane % 4) is row
// g + 8 (e / 2) of MMA tile i, key 8 j + 2 t + e % 2. Tensor cores cut their sums off, so they sum one slice, and ordinary additions the
// slices.
__device__ __forceinline__ void add_mma_qk(float (&scores)[kRowTiles][kKeyTiles][4], shared_address q_slice, shared_address k_slice,
                                           int warp, int lane) {
    float sums[kRowTiles][kKeyTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSliceSteps; ++step) {
        uint32_t q_fragment[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const int row = warp * kWarpRows + kRowTileStep * i + lane % 16;
            ldmatrix_x4(q_fragment[i], chunk_address(q_slice, row, 2 * step + lane / 16));
        }
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
            // Rows of K are the columns of the MMA: both chunks of keys 0-7, then of keys 8-15.
            uint32_t k_fragment[4];
            ldmatrix_x4(k_fragment, chunk_address(k_slice, 8 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
                    mma_m16n8k16<element>(sums[i][j + pair], q_fragment[i], k_fragment[2 * pair], k_fragment[2 * pair + 1]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i][j][e] += sums[i][j][e];
        }
    }
}

// The LSE of a row in the log2 domain. A row that attends to no key has the LSE -inf; it gets +inf, which makes its weights 0.
__device__ __forceinline__ float lse_log2_of(const Params& params, const Tile& tile, int row) {
    if (row >= num_rows(params)) return INFINITY;
    const int64_t head_of_batch = int64_t(tile.batch) * params.num_heads_q + tile.head;
    const float lse = __uint_as_float(load_global_32(params.lse + head_of_batch * params.seqlen_q + row));
    return lse == -INFINITY ? INFINITY : lse * kLog2e;
}

// The weight of a key. A hidden key has the score -inf, and the weight 0 whatever the LSE is. The LSE is rounded, so the power may exceed
// 1 by a little. NaN stays NaN.
__device__ __forceinline__ float weight_of(const Params& params, float score, float lse_log2) {
    const float weight = exp2_approx(fmaf(score, params.scale_log2, -lse_log2));
    return score == -INFINITY ? 0.0f : weight > 1.0f ? 1.0f : weight;
}

__device__ __forceinline__ void store_weights(const Params& params, const Tile& tile, float (&scores)[kRowTiles][kKeyTiles][4],
                                              int first_key, int warp, int lane) {
    const int64_t first_row_of_head = (int64_t(tile.batch) * params.num_heads_q + tile.head) * params.seqlen_q;
    for_each_score(scores, tile.first_row + warp * kWarpRows, first_key, lane, [&](int row, int lane_key) {
        const float lse_log2 = lse_log2_of(params, tile, row);
        float* row_weights = params.weights + (first_row_of_head + row) * params.seqlen_kv + lane_key;
        const int end = row < num_rows(params) ? params.seqlen_kv - lane_key : 0;
        return [=, &params](int step, float& score) {
            if (step < end) store_global_32(row_weights + step, weight_of(params, score, lse_log2));
        };
    });
}

static_assert(kWarpRows % 16 == 0, "a warp's rows are whole 16-row MMA tiles");
static_assert(kBlockN % 16 == 0, "ldmatrix brings 16 keys at a time");
static_assert(sizeof(SharedStorage) == 16384, "launcher and kernel agree on shared memory");
static_assert(sizeof(Params) == 112 && offsetof(Params, q) == 0 && offsetof(Params, k) == 8 && offsetof(Params, lse) == 16);
static_assert(offsetof(Params, weights) == 24 && offsetof(Params, q_batch_stride) == 32 && offsetof(Params, q_row_stride) == 40);
static_assert(offsetof(Params, q_head_stride) == 48 && offsetof(Params, k_batch_stride) == 56);
static_assert(offsetof(Params, k_row_stride) == 64 && offsetof(Params, k_head_stride) == 72);
static_assert(offsetof(Params, num_heads_q) == 80 && offsetof(Params, group_size) == 84 && offsetof(Params, seqlen_q) == 88);
static_assert(offsetof(Params, seqlen_kv) == 92 && offsetof(Params, head_dim) == 96 && offsetof(Params, num_row_blocks) == 100);
static_assert(offsetof(Params, diagonal_offset) == 104 && offsetof(Params, scale_log2) == 108);
