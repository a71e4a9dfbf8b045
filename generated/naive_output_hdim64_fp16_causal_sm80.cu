// naive_output_hdim64_fp16_causal_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 64, dtype fp16, mask_type causal, gqa mha
// tile      block_m 64, block_n 64, warps 4
// block     128 threads, 16384 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 101376 bytes or more of shared memory per block
// spec      flash_fwd_naive.yaml
// template  naive_output.cu.j2
#include "flashgen/sm80.cuh"

// The third of three kernels: O = P V, divided by the sums of P's rows. P lies in the first half of each row of S, and is 0 for masked
// keys.

using element = fp16;

constexpr int kHeadDim = 64;
constexpr int kBlockM = 64;  // query rows of a tile
constexpr int kBlockN = 64;  // keys of a KV block
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = kBlockM / kWarps;
constexpr int kRowTiles = kWarpRows / 16;  // MMA tiles of a warp along its rows
constexpr int kDimTiles = kHeadDim / 8;    // MMA tiles along the head dimension

struct SharedStorage {
    element p[kBlockM][kBlockN];
    element v[kBlockN][kHeadDim];
};
constexpr int kVOffset = offsetof(SharedStorage, v);

struct Params {
    const float* scores;                  // (batch, num_heads_q, seqlen_q, row_keys(params)): S, and then P
    const float* row_sum;                 // (batch, num_heads_q, seqlen_q): the sum of each row of P
    const element* v;                     // (batch, seqlen_kv, num_heads_kv, head_dim_v); rows 16-byte aligned
    element* out;                         // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    int64_t v_batch_stride;               // strides are in elements
    int64_t v_row_stride;
    int64_t v_head_stride;
    int64_t out_batch_stride;             // strides are in elements
    int64_t out_row_stride;
    int64_t out_head_stride;
    int32_t num_heads_q;
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
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
__device__ int row_keys(const Params& params);  // Floats of a row of S
__device__ int64_t row_of_s(const Params& params, int head_of_batch, int row);  // Where a row of S begins, in floats
// The address of a chunk of a block in shared memory
template <int kColumns> __device__ shared_address chunk_address(shared_address block, int row, int chunk);
// Starts the copy of a block of kRows rows
template <int kRows, int kColumns> __device__ void copy_block(shared_address block, const element* source, int64_t row_stride, int rows,
    int columns);
// The A fragment of 16x16 elements
template <int kColumns> __device__ void load_a(uint32_t (&fragment)[4], shared_address block, int row, int step, int lane);

// ==== visible: which keys a row attends to

// Keys [begin, end).
struct KeyRange {
    int begin;
    int end;
};

__device__ KeyRange keys_of_query(const Params& params, int query);  // The keys that a query attends to
// ====

// The rows of a block of keys that at least one query of the sequence attends to: the rows before `end`.
struct SeenRows {
    int end;

    __device__ __forceinline__ bool has(int row) const { return row < end; }

    // The same rows, counted from `row`.
    __device__ __forceinline__ SeenRows from(int row) const { return {end - row}; }

    // Only the rows before `count`.
    __device__ __forceinline__ SeenRows among(int count) const { return {min(end, count)}; }
};

__device__ SeenRows seen_rows(const Params& params, int first_key);  // The rows of the block that begins at `first_key`

// ==== row_end: the factor of O and the LSE, after the last key of a row

constexpr float kLn2 = 0.6931471805599453f;

// A row that attends to no key has row_sum 0: its O becomes 0, its LSE -inf. Most threads need only the factor, so the LSE is computed on
// demand.
struct RowEnd {
    float row_max;  // log2 domain
    float row_sum;  // of all keys

    // The factor of O.
    __device__ __forceinline__ float factor() const { return row_sum == 0.0f ? 0.0f : __fdividef(1.0f, row_sum); }

    // ln(sum of exp(score)).
    __device__ __forceinline__ float lse() const { return row_sum == 0.0f ? -INFINITY : (row_max + log2_approx(row_sum)) * kLn2; }
};

__device__ RowEnd row_end(float row_max, float row_sum);  // The end of a row, from its row_max and its complete row_sum
// ====

// O += P V for this warp's rows and the keys of a block
__device__ void mma_pv(float (&output)[kRowTiles][kDimTiles][4], shared_address p_block, shared_address v_block, int warp, int lane);
// Divides O by the sums of P's rows and writes it
__device__ void store_output(const Params& params, const Tile& tile, const float (&output)[kRowTiles][kDimTiles][4], int warp, int lane);

extern "C" __global__ void __launch_bounds__(kThreads)
naive_output_hdim64_fp16_causal_sm80(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address p_block = to_shared(shared_memory);
    const shared_address v_block = p_block + kVOffset;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    const Tile tile = find_tile(params, block_index());
    const element* p = reinterpret_cast<const element*>(params.scores + row_of_s(params, tile.head_of_batch, tile.first_row));
    const int64_t p_row_stride = 2 * int64_t(row_keys(params));  // in elements: rows of P are as far apart as rows of S
    const element* v = params.v + tile.batch * params.v_batch_stride + tile.head * params.v_head_stride;

    float output[kRowTiles][kDimTiles][4] = {};
    for (int first_key = 0; first_key < params.seqlen_kv; first_key += kBlockN) {
        copy_block<kBlockM, kBlockN>(p_block, p + first_key, p_row_stride, params.seqlen_q - tile.first_row,
                                     row_keys(params) - first_key);
        copy_block<kBlockN, kHeadDim>(v_block, v + first_key * params.v_row_stride, params.v_row_stride,
                                      seen_rows(params, first_key).end, params.head_dim_v);
        cp_async_commit();
        cp_async_wait<0>();
        barrier_sync(kThreads);
        mma_pv(output, p_block, v_block, warp, lane);
        barrier_sync(kThreads);  // every warp has finished with P and V
    }
    store_output(params, tile, output, warp, lane);
}

__device__ __forceinline__ Tile find_tile(const Params& params, int index) {
    Tile tile;
    tile.head_of_batch = index / params.num_row_blocks;
    tile.batch = tile.head_of_batch / params.num_heads_q;
    tile.head = tile.head_of_batch % params.num_heads_q;
    tile.first_row = index % params.num_row_blocks * kBlockM;
    return tile;
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

// ==== visible: which keys a row attends to

// The keys that a query attends to: those up to its diagonal.
__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int query) {
    return {0, max(0, min(params.seqlen_kv, query + params.diagonal_offset + 1))};
}
// ====

// The rows of the block that begins at `first_key`. All other rows become zeros, whatever they hold: 0 * NaN would be NaN.
__device__ __forceinline__ SeenRows seen_rows(const Params& params, int first_key) {
    const int end = keys_of_query(params, params.seqlen_q - 1).end;
    return {end - first_key};
}

// ==== row_end: the factor of O and the LSE, after the last key of a row

__device__ __forceinline__ RowEnd row_end(float row_max, float row_sum) { return {row_max, row_sum}; }
// ====

// O += P V for this warp's rows and the keys of a block. Element [i][n][e] of thread (g, t) = (lane / 4, lane % 4) is row
// g + 8 (e / 2) of MMA tile i, column 8 n + 2 t + e % 2.
__device__ __forceinline__ void mma_pv(float (&output)[kRowTiles][kDimTiles][4], shared_address p_block, shared_address v_block,
                                       int warp, int lane) {
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
        uint32_t p_fragment[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) load_a<kBlockN>(p_fragment[i], p_block, warp * kWarpRows + 16 * i, step, lane);
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 2) {
            // Transposed on the way: keys 0-7 and 8-15 of the left chunk, then of the right one.
            uint32_t v_fragment[4];
            ldmatrix_x4_trans(v_fragment, chunk_address<kHeadDim>(v_block, 16 * step + lane % 16, n + lane / 16));
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_m16n8k16<element>(output[i][n], p_fragment[i], v_fragment[0], v_fragment[1]);
                mma_m16n8k16<element>(output[i][n + 1], p_fragment[i], v_fragment[2], v_fragment[3]);
            }
        }
    }
}

// Divides O by the sums of P's rows and writes it. A row that attends to nothing has row_sum 0: its O becomes 0.
__device__ __forceinline__ void store_output(const Params& params, const Tile& tile, const float (&output)[kRowTiles][kDimTiles][4],
                                             int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const int row = tile.first_row + warp * kWarpRows + 16 * i + 8 * row8 + lane / 4;
            if (row >= params.seqlen_q) continue;
            const int64_t sum_index = int64_t(tile.head_of_batch) * params.seqlen_q + row;
            const float sum = __uint_as_float(load_global_32(params.row_sum + sum_index));
            const float factor = row_end(0.0f, sum).factor();  // row_max is in the LSE alone, which has been written
            element* out = params.out + tile.batch * params.out_batch_stride + row * params.out_row_stride +
                           tile.head * params.out_head_stride + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                if (8 * n >= params.head_dim_v) break;
                store_global_32(out + 8 * n,
                                pack<element>(output[i][n][2 * row8] * factor, output[i][n][2 * row8 + 1] * factor));
            }
        }
    }
}

static_assert(kWarpRows % 16 == 0, "a warp's rows are whole 16-row MMA tiles");
static_assert(kBlockN % 16 == 0, "P V takes keys by 16");
static_assert(sizeof(SharedStorage) == 16384, "launcher and kernel agree on shared memory");
static_assert(sizeof(Params) == 104 && offsetof(Params, scores) == 0 && offsetof(Params, row_sum) == 8);
static_assert(offsetof(Params, v) == 16 && offsetof(Params, out) == 24 && offsetof(Params, v_batch_stride) == 32);
static_assert(offsetof(Params, v_row_stride) == 40 && offsetof(Params, v_head_stride) == 48);
static_assert(offsetof(Params, out_batch_stride) == 56 && offsetof(Params, out_row_stride) == 64);
static_assert(offsetof(Params, out_head_stride) == 72 && offsetof(Params, num_heads_q) == 80 && offsetof(Params, seqlen_q) == 84);
static_assert(offsetof(Params, seqlen_kv) == 88 && offsetof(Params, head_dim_v) == 92 && offsetof(Params, num_row_blocks) == 96);
static_assert(offsetof(Params, diagonal_offset) == 100);
