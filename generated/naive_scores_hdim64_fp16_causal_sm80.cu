// naive_scores_hdim64_fp16_causal_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 64, dtype fp16, mask_type causal, gqa mha
// tile      block_m 64, block_n 64, warps 4
// block     128 threads, 16384 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 101376 bytes or more of shared memory per block
// spec      flash_fwd_naive.yaml
// template  naive_scores.cu.j2
#include "flashgen/sm80.cuh"

// The first of three kernels: S = Q K^T, masked, in fp32, to memory. The second makes P of S, the third O of P.

using element = fp16;

constexpr int kHeadDim = 64;
constexpr int kBlockM = 64;  // query rows of a tile
constexpr int kBlockN = 64;  // keys of a KV block
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = kBlockM / kWarps;
constexpr int kRowTiles = kWarpRows / 16;  // MMA tiles of a warp along its rows
constexpr int kRowTileStep = 16;           // rows from one of them to the next
constexpr int kKeyTiles = kBlockN / 8;     // MMA tiles along the keys

struct SharedStorage {
    element q[kBlockM][kHeadDim];
    element k[kBlockN][kHeadDim];
};
constexpr int kKOffset = offsetof(SharedStorage, k);

struct Params {
    const element* q;                     // (batch, seqlen_q, num_heads_q, head_dim); rows 16-byte aligned
    const element* k;                     // (batch, seqlen_kv, num_heads_kv, head_dim); rows 16-byte aligned
    float* scores;                        // (batch, num_heads_q, seqlen_q, row_keys(params)): S, and then P
    int64_t q_batch_stride;               // strides are in elements
    int64_t q_row_stride;
    int64_t q_head_stride;
    int64_t k_batch_stride;               // strides are in elements
    int64_t k_row_stride;
    int64_t k_head_stride;
    int32_t num_heads_q;
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    int32_t diagonal_offset;              // query i is aligned with key i + diagonal_offset
};

// A tile: kBlockM query rows of a head. The tiles of a head follow each other, so that they share its keys or values in L2.
struct Tile {
    int head_of_batch;  // heads counted over the batch
    int batch;
    int head;
    int first_row;
};

__device__ Tile find_tile(const Params& params, int index);
__device__ int num_rows(const Params& params);  // Rows of a head of the grid
__device__ int query_of_row(const Params&, int row);  // The query of a row of a tile
// The offset of row `row` of the tile's head in an array, in elements from the start of the batch entry
__device__ int64_t row_offset(const Params&, const Tile& tile, int row, int64_t row_stride, int64_t head_stride);
__device__ int row_keys(const Params& params);  // Floats of a row of S
__device__ int64_t row_of_s(const Params& params, int head_of_batch, int row);  // Where a row of S begins, in floats
// The address of a chunk of a block in shared memory
template <int kColumns> __device__ shared_address chunk_address(shared_address block, int row, int chunk);
// Starts the copy of a block of kRows rows
template <int kRows, int kColumns> __device__ void copy_block(shared_address block, const element* source, int64_t row_stride, int rows,
    int columns);
// The A fragment of 16x16 elements
template <int kColumns> __device__ void load_a(uint32_t (&fragment)[4], shared_address block, int row, int step, int lane);
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
// The union of the key ranges of rows [first_row, first_row + count)
__device__ KeyRange keys_of_some(const Params& params, int first_row, int count);
// The intersection of the key ranges of rows [first_row, first_row + count)
__device__ KeyRange keys_of_every(const Params& params, int first_row, int count);
// Masks the keys outside the range of their row
template <int kTiles> __device__ void apply_mask(const Params& params, const Tile&, float (&scores)[kTiles][kKeyTiles][4], int first_row,
    int first_key, int lane);
// ====

// Finishes the scores of a KV block between Q K^T and softmax
template <int kTiles> __device__ void finish_scores(const Params& params, const Tile& tile, float (&scores)[kTiles][kKeyTiles][4],
    int row_in_tile, int first_key, int lane);

// KV blocks, visited from the last to the first, so that a ragged last block comes before the steady state.
struct KvBlocks {
    int first;
    int last;  // less than `first` if there are no blocks
};

// The KV blocks that rows [first_row, first_row + count) attend to
__device__ KvBlocks kv_blocks_of(const Params& params, int first_row, int count);
// S of this warp's rows and the keys of a block
__device__ void mma_qk(float (&scores)[kRowTiles][kKeyTiles][4], shared_address q_block, shared_address k_block, int warp, int lane);
// Writes S of this warp's rows and the keys from `first_key` on
__device__ void store_scores(const Params& params, const Tile& tile, const float (&scores)[kRowTiles][kKeyTiles][4], int first_key,
    int warp, int lane);

extern "C" __global__ void __launch_bounds__(kThreads)
naive_scores_hdim64_fp16_causal_sm80(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address q_block = to_shared(shared_memory);
    const shared_address k_block = q_block + kKOffset;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    const Tile tile = find_tile(params, block_index());
    const KvBlocks blocks = kv_blocks_of(params, tile.first_row, kBlockM);
    const element* q = params.q + tile.batch * params.q_batch_stride +
                       row_offset(params, tile, tile.first_row, params.q_row_stride, params.q_head_stride);
    const element* k = params.k + tile.batch * params.k_batch_stride + tile.head * params.k_head_stride;

    // No row attends to a key of later blocks: their S takes no MMA, but it is written, and read, like any other.
    for (int first_key = (blocks.last + 1) * kBlockN; first_key < params.seqlen_kv; first_key += kBlockN) {
        float scores[kRowTiles][kKeyTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) scores[i][j][e] = -INFINITY;
            }
        }
        store_scores(params, tile, scores, first_key, warp, lane);
    }

    if (blocks.last >= blocks.first) {
        copy_block<kBlockM, kHeadDim>(q_block, q, params.q_row_stride, num_rows(params) - tile.first_row, params.head_dim);
    }
    for (int block = blocks.last; block >= blocks.first; --block) {
        const int first_key = block * kBlockN;
        copy_block<kBlockN, kHeadDim>(k_block, k + first_key * params.k_row_stride, params.k_row_stride,
                                      params.seqlen_kv - first_key, params.head_dim);
        cp_async_commit();
        cp_async_wait<0>();
        barrier_sync(kThreads);

        float scores[kRowTiles][kKeyTiles][4];
        mma_qk(scores, q_block, k_block, warp, lane);
        barrier_sync(kThreads);  // every warp has finished with K
        finish_scores(params, tile, scores, warp * kWarpRows, first_key, lane);
        store_scores(params, tile, scores, first_key, warp, lane);
    }
}

__device__ __forceinline__ Tile find_tile(const Params& params, int index) {
    Tile tile;
    tile.head_of_batch = index / params.num_row_blocks;
    tile.batch = tile.head_of_batch / params.num_heads_q;
    tile.head = tile.head_of_batch % params.num_heads_q;
    tile.first_row = index % params.num_row_blocks * kBlockM;
    return tile;
}

__device__ __forceinline__ int num_rows(const Params& params) { return params.seqlen_q; }

__device__ __forceinline__ int query_of_row(const Params&, int row) { return row; }

__device__ __forceinline__ int64_t row_offset(const Params&, const Tile& tile, int row, int64_t row_stride,
                                              int64_t head_stride) {
    return row * row_stride + tile.head * head_stride;
}

// Floats of a row of S: one for each key, rounded up to whole 16-byte chunks of P.
__device__ __forceinline__ int row_keys(const Params& params) { return (params.seqlen_kv + 7) / 8 * 8; }

// Where a row of S begins, in floats. Heads are counted over the batch.
__device__ __forceinline__ int64_t row_of_s(const Params& params, int head_of_batch, int row) {
    return (int64_t(head_of_batch) * params.seqlen_q + row) * row_keys(params);
}

// The address of a chunk of a block in shared memory.
// A block of a matrix in shared memory has rows of kColumns elements, which are written and read in chunks of 16 bytes. The chunks of
// a row are permuted by its row number, so that the eight rows that ldmatrix reads at a time lie in eight different groups of banks.
template <int kColumns>
__device__ __forceinline__ shared_address chunk_address(shared_address block, int row, int chunk) {
    static_assert(kColumns % 64 == 0, "eight chunks are permuted among each other");
    return block + row * (kColumns * int(sizeof(element))) + 16 * (chunk ^ row % 8);
}

// Starts the copy of a block of kRows rows. Rows from `rows` on, and columns from `columns` on (a multiple of 8), become zeros.
// `row_stride` is in elements.
template <int kRows, int kColumns>
__device__ __forceinline__ void copy_block(shared_address block, const element* source, int64_t row_stride, int rows, int columns) {
    constexpr int kRowChunks = kColumns / 8;
    static_assert(kRows * kRowChunks % kThreads == 0, "every thread copies as many chunks");
#pragma unroll
    for (int first = 0; first < kRows * kRowChunks; first += kThreads) {
        const int row = (first + int(threadIdx.x)) / kRowChunks;
        const int chunk = (first + int(threadIdx.x)) % kRowChunks;
        cp_async_16(chunk_address<kColumns>(block, row, chunk), source + row * row_stride + 8 * chunk,
                    row < rows && 8 * chunk < columns ? 16 : 0);
    }
}

// The A fragment of 16x16 elements: rows from `row` on, columns from 16 `step` on.
template <int kColumns>
__device__ __forceinline__ void load_a(uint32_t (&fragment)[4], shared_address block, int row, int step, int lane) {
    ldmatrix_x4(fragment, chunk_address<kColumns>(block, row + lane % 16, 2 * step + lane / 16));
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

__device__ __forceinline__ KvBlocks kv_blocks_of(const Params& params, int first_row, int count) {
    const KeyRange keys = keys_of_some(params, first_row, count);
    return {keys.begin / kBlockN, (keys.end + kBlockN - 1) / kBlockN - 1};
}

// S of this warp's rows and the keys of a block. Element [i][j][e] of thread (g, t) = (lane / 4, lane % 4) is row g + 8 (e / 2) of MMA
// tile i, key 8 j + 2 t + e % 2.
__device__ __forceinline__ void mma_qk(float (&scores)[kRowTiles][kKeyTiles][4], shared_address q_block, shared_address k_block,
                                       int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i][j][e] = 0.0f;
        }
    }
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        uint32_t q_fragment[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) load_a<kHeadDim>(q_fragment[i], q_block, warp * kWarpRows + kRowTileStep * i, step, lane);
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
            // Rows of K are the columns of the MMA: both chunks of keys 0-7, then of keys 8-15.
            uint32_t k_fragment[4];
            ldmatrix_x4(k_fragment, chunk_address<kHeadDim>(k_block, 8 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_m16n8k16<element>(scores[i][j], q_fragment[i], k_fragment[0], k_fragment[1]);
                mma_m16n8k16<element>(scores[i][j + 1], q_fragment[i], k_fragment[2], k_fragment[3]);
            }
        }
    }
}

// Writes S of this warp's rows and the keys from `first_key` on. A quad writes 32 bytes of a row, a sector.
__device__ __forceinline__ void store_scores(const Params& params, const Tile& tile, const float (&scores)[kRowTiles][kKeyTiles][4],
                                             int first_key, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const int row = tile.first_row + warp * kWarpRows + kRowTileStep * i + 8 * row8 + lane / 4;
            if (row >= num_rows(params)) continue;
            float* row_scores = params.scores + row_of_s(params, tile.head_of_batch, row) + first_key + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                if (first_key + 8 * j >= row_keys(params)) break;
                store_global_64(row_scores + 8 * j, scores[i][j][2 * row8], scores[i][j][2 * row8 + 1]);
            }
        }
    }
}

static_assert(kWarpRows % 16 == 0, "a warp's rows are whole 16-row MMA tiles");
static_assert(kBlockN % 16 == 0, "ldmatrix brings 16 keys at a time");
static_assert(sizeof(SharedStorage) == 16384, "launcher and kernel agree on shared memory");
static_assert(sizeof(Params) == 96 && offsetof(Params, q) == 0 && offsetof(Params, k) == 8 && offsetof(Params, scores) == 16);
static_assert(offsetof(Params, q_batch_stride) == 24 && offsetof(Params, q_row_stride) == 32);
static_assert(offsetof(Params, q_head_stride) == 40 && offsetof(Params, k_batch_stride) == 48);
static_assert(offsetof(Params, k_row_stride) == 56 && offsetof(Params, k_head_stride) == 64);
static_assert(offsetof(Params, num_heads_q) == 72 && offsetof(Params, seqlen_q) == 76 && offsetof(Params, seqlen_kv) == 80);
static_assert(offsetof(Params, head_dim) == 84 && offsetof(Params, num_row_blocks) == 88);
static_assert(offsetof(Params, diagonal_offset) == 92);
