// flash_combine_hdim128_bf16_packgqa_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type none, sinks none, gqa packed
// tile      block_m 16, block_n 64, warps 4, row_warps 1, stages 3, min_blocks 2
// block     256 threads, 4160 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 166912 bytes or more of shared memory per block
// spec      flash_decode_sm80.yaml
// template  flash_combine_sm80.cu.j2
#include "flashgen/sm80.cuh"

// Adds up what several thread blocks of the kernel before this one have left of a tile, and writes O and LSE. Rows are few and parts of a
// row many, so all warps of a thread block share the parts of a row.

using element = bf16;

constexpr int kHeadDimV = 128;  // of O
constexpr int kBlockM = 16;  // query rows of a tile of the kernel before this one
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVectors = kHeadDimV / 4;              // of a row of O in fp32
constexpr int kLaneVectors = (kVectors + 31) / 32;   // of them, the share of a lane
constexpr int kRowThreads = kHeadDimV / 8;           // threads that store a row, 16 bytes each
constexpr int kPartsAtOnce = 5;                      // parts that a warp has on their way from global memory

struct SharedStorage {
    float outputs[kWarps][kHeadDimV];  // what each warp has of O
    float sums[kWarps][2];             // its row_max and row_sum
};
constexpr int kSumsOffset = offsetof(SharedStorage, sums);

struct Params {
    const float* part_outputs;            // (parts, kBlockM, kHeadDimV): O, not divided by row_sum; null where no tile is split
    const float* part_sums;               // (parts, kBlockM, 2): row_max, log2 domain, and row_sum
    element* out;                         // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    float* lse;                           // (batch, num_heads_q, seqlen_q); may be null; natural logarithm
    int64_t out_batch_stride;             // strides are in elements
    int64_t out_row_stride;
    int64_t out_head_stride;
    int32_t num_heads_q;
    int32_t num_heads_kv;
    int32_t group_size;                   // num_heads_q / num_heads_kv
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    int32_t num_tiles;                    // tiles of the grid
    int32_t kv_blocks_per_tile;
    int32_t kv_blocks_per_share;          // of a thread block; the last may have fewer
    int32_t head_sets_log2;               // of the number of sets of heads: 1, 2 or 4
    int32_t heads_per_set;                // heads of a batch entry in a set
    uint64_t num_heads_divisor;           // of the heads of a batch entry in the grid; see divide()
    uint64_t num_row_blocks_divisor;      // of num_row_blocks; see divide()
    uint64_t group_size_divisor;          // of group_size; see divide()
    uint64_t kv_blocks_per_share_divisor; // of kv_blocks_per_share; see divide()
};

constexpr float kNoRowMax = -3.4e38f;  // below any score; finite, so that a masked score minus it is -inf, not NaN

__device__ float rescale_factor(float row_max, float larger);  // The factor of O and row_sum when row_max rises to `larger`

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

// A tile: kBlockM rows of queries that attend to the keys of one kv head.
// A row is a query. If the heads of a group are packed, it is a (query, head in group) pair, heads fastest. The heads of the grid are the query
// heads; if heads are packed, they are the kv heads.
struct Tile {
    int batch;
    int head;  // query head; if heads are packed, the first of the group
    int first_row;  // below 0 in a tile that begins before the head's first row
};

__device__ int divide(int n, uint64_t divisor);  // n / d for 0 <= n < 2^31
__device__ int query_of_row(const Params& params, int row);  // The query of a row of a tile
// The offset of row `row` of the tile's head in an array, in elements from the start of the batch entry
__device__ int64_t row_offset(const Params& params, const Tile& tile, int row, int64_t row_stride, int64_t head_stride);
__device__ int rows_of_head(const Params& params);  // The rows of a head in this grid

// A row of a tile, and the shares [first, last] that had KV blocks of the tile, in the kernel before this one.
struct Parts {
    Tile tile;
    int row;
    int set;  // of heads; each set is cut into shares separately
    int first;
    int last;
    bool begins_share;  // whether share `first` begins with the tile
};

__device__ Parts find_parts(const Params& params, int index);  // Row `index` of all heads
// Where a row of a share's part lies in the workspace
__device__ int64_t part_row(const Params& params, const Parts& parts, int share, int row);

// O, not divided by row_sum yet, and the row_max (log2 domain) and row_sum that go with it; of O a lane's share.
struct Sums {
    float row_max;
    float row_sum;
    float output[kLaneVectors][4];
};

__device__ void add(Sums& sums, float row_max, float row_sum, const uint4 (&output)[kLaneVectors]);
// Adds every kStep-th part of a row of the tile, from part `first_part` on, in order
template <int kStep> __device__ Sums add_parts(const Params& params, const Parts& parts, int row, int first_part, int lane);
__device__ void share_sums(const Sums& sums, shared_address smem, int warp, int lane);  // Leaves what a warp has of a row in shared memory
// Adds up the sums of a row that kTeam warps from `first` on have left, in the order of the warps
template <int kTeam> __device__ void store_row(const Params& params, const Tile& tile, int row, shared_address smem, int first, int thread);

extern "C" __global__ void __launch_bounds__(kThreads)
flash_combine_hdim128_bf16_packgqa_sm80(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address smem = to_shared(shared_memory);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    // Programmatic dependent launch in the last step of a call: let the next grid start at once. It begins another call. Before its own wait it
    // only prefetches, or reads values that it reads again after the wait. Its wait ends when this grid has ended, which waits for all earlier
    // grids.
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();

    for (int index = block_index(); index < params.num_tiles; index += gridDim.x) {
        const Parts parts = find_parts(params, index);
        if (parts.first == parts.last) continue;  // the thread block that had all of the tile has written the row
        share_sums(add_parts<kWarps>(params, parts, parts.row, parts.first + warp, lane), smem, warp, lane);
        barrier_sync(kThreads);
        if (threadIdx.x < kRowThreads) {
            store_row<kWarps>(params, parts.tile, parts.tile.first_row + parts.row, smem, 0, threadIdx.x);
        }
        barrier_sync(kThreads);  // the sums have been read
    }
}

// The factor of O and row_sum when row_max rises to `larger`. If both are infinite their difference is NaN; fminf makes the factor 1.
__device__ __forceinline__ float rescale_factor(float row_max, float larger) { return exp2_approx(fminf(row_max - larger, 0.0f)); }

// ==== row_end: the factor of O and the LSE, after the last key of a row

__device__ __forceinline__ RowEnd row_end(float row_max, float row_sum) { return {row_max, row_sum}; }
// ====

// n / d for 0 <= n < 2^31. The launcher computes `divisor` from d: a multiplier in the lower half, and in the upper half the shift that follows.
// Dividing by a number that the compiler does not know takes about 20 dependent instructions.
__device__ __forceinline__ int divide(int n, uint64_t divisor) {
    return uint64_t(uint32_t(n)) * uint32_t(divisor) >> (divisor >> 32);
}

__device__ __forceinline__ int query_of_row(const Params& params, int row) {
    return divide(row, params.group_size_divisor);
}

__device__ __forceinline__ int64_t row_offset(const Params& params, const Tile& tile, int row, int64_t row_stride,
                                              int64_t head_stride) {
    const int query = query_of_row(params, row);
    const int head = tile.head + row - query * params.group_size;
    return query * row_stride + head * head_stride;
}

// The rows of a head in this grid. The launcher counts single rows as tiles here, so num_row_blocks is a number of rows.
__device__ __forceinline__ int rows_of_head(const Params& params) { return params.num_row_blocks; }

// Row `index` of all heads. Shares are consecutive KV blocks of the tiles of a set of heads, one tile after the other: every
// 2^head_sets_log2-th head.
__device__ __forceinline__ Parts find_parts(const Params& params, int index) {
    const int head_of_batch = divide(index, params.num_row_blocks_divisor);
    const int row_of_head = index - head_of_batch * rows_of_head(params);
    Parts parts;
    parts.tile.batch = divide(head_of_batch, params.num_heads_divisor);
    const int head = head_of_batch - parts.tile.batch * params.num_heads_kv;  // of the grid
    parts.tile.head = head * params.group_size;
    const int nth_head = head >> params.head_sets_log2;  // in its set
    parts.set = head - (nth_head << params.head_sets_log2);
    parts.row = row_of_head % kBlockM;
    parts.tile.first_row = row_of_head - parts.row;
    const int tiles_of_head = (rows_of_head(params) + kBlockM - 1) / kBlockM;
    const int tile = (parts.tile.batch * params.heads_per_set + nth_head) * tiles_of_head + row_of_head / kBlockM;
    const int begin = tile * params.kv_blocks_per_tile;
    parts.first = divide(begin, params.kv_blocks_per_share_divisor);
    parts.last = divide(begin + params.kv_blocks_per_tile - 1, params.kv_blocks_per_share_divisor);
    parts.begins_share = parts.first * params.kv_blocks_per_share == begin;
    return parts;
}

// Where a row of a share's part lies in the workspace. A thread block leaves the first part of its share in one slot and the last in
// another; what it has of a tile is the first, unless its share begins before the tile.
__device__ __forceinline__ int64_t part_row(const Params& params, const Parts& parts, int share, int row) {
    const int block = (share << params.head_sets_log2) + parts.set;
    const int slot = 2 * block + (share == parts.first && !parts.begins_share ? 1 : 0);
    return int64_t(slot) * kBlockM + row;
}

__device__ __forceinline__ void add(Sums& sums, float row_max, float row_sum, const uint4 (&output)[kLaneVectors]) {
    const float larger = fmaxf(sums.row_max, row_max);
    const float own_factor = rescale_factor(sums.row_max, larger);
    const float other_factor = rescale_factor(row_max, larger);
    sums.row_max = larger;
    sums.row_sum = sums.row_sum * own_factor + row_sum * other_factor;
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
        sums.output[i][0] = sums.output[i][0] * own_factor + __uint_as_float(output[i].x) * other_factor;
        sums.output[i][1] = sums.output[i][1] * own_factor + __uint_as_float(output[i].y) * other_factor;
        sums.output[i][2] = sums.output[i][2] * own_factor + __uint_as_float(output[i].z) * other_factor;
        sums.output[i][3] = sums.output[i][3] * own_factor + __uint_as_float(output[i].w) * other_factor;
    }
}

template <int kStep>
__device__ __forceinline__ Sums add_parts(const Params& params, const Parts& parts, int row, int first_part, int lane) {
    Sums sums = {kNoRowMax, 0.0f, {}};
    for (int first = first_part; first <= parts.last; first += kStep * kPartsAtOnce) {
        // All loads are started before the first one is used.
        float2 loaded[kPartsAtOnce];
        uint4 output[kPartsAtOnce][kLaneVectors];
#pragma unroll
        for (int part = 0; part < kPartsAtOnce; ++part) {
            if (first + part * kStep > parts.last) break;
            const int64_t source = part_row(params, parts, first + part * kStep, row);
            loaded[part] = load_global_64(params.part_sums + source * 2);
#pragma unroll
            for (int i = 0; i < kLaneVectors; ++i) {
                if (kVectors % 32 != 0 && 32 * i + lane >= kVectors) break;
                output[part][i] = load_global_128(params.part_outputs + source * kHeadDimV + (32 * i + lane) * 4);
            }
        }
#pragma unroll
        for (int part = 0; part < kPartsAtOnce; ++part) {
            if (first + part * kStep > parts.last) break;
            add(sums, loaded[part].x, loaded[part].y, output[part]);
        }
    }
    return sums;
}

__device__ __forceinline__ void share_sums(const Sums& sums, shared_address smem, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
        if (kVectors % 32 != 0 && 32 * i + lane >= kVectors) break;
        store_shared_128(smem + warp * kHeadDimV * 4 + (32 * i + lane) * 16,
                         {__float_as_uint(sums.output[i][0]), __float_as_uint(sums.output[i][1]), __float_as_uint(sums.output[i][2]),
                          __float_as_uint(sums.output[i][3])});
    }
    if (lane == 0) {
        store_shared_64(smem + kSumsOffset + warp * 8, __float_as_uint(sums.row_max), __float_as_uint(sums.row_sum));
    }
}

// Adds up the sums of a row that kTeam warps from `first` on have left, in the order of the warps. Each thread of the row writes eight
// elements of O, the first one LSE as well.
template <int kTeam>
__device__ __forceinline__ void store_row(const Params& params, const Tile& tile, int row, shared_address smem, int first, int thread) {
    const int first_element = thread * 8;
    if (first_element >= params.head_dim_v) return;
    float row_max = kNoRowMax;
#pragma unroll
    for (int i = 0; i < kTeam; ++i) {
        row_max = fmaxf(row_max, __uint_as_float(load_shared_32(smem + kSumsOffset + (first + i) * 8)));
    }
    float row_sum = 0.0f;
    float output[8] = {};
#pragma unroll
    for (int i = 0; i < kTeam; ++i) {
        const int warp = first + i;
        const float factor = rescale_factor(__uint_as_float(load_shared_32(smem + kSumsOffset + warp * 8)), row_max);
        row_sum += __uint_as_float(load_shared_32(smem + kSumsOffset + warp * 8 + 4)) * factor;
        const uint4 low = load_shared_128(smem + (warp * kHeadDimV + first_element) * 4);
        const uint4 high = load_shared_128(smem + (warp * kHeadDimV + first_element) * 4 + 16);
        const uint32_t values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) output[j] += __uint_as_float(values[j]) * factor;
    }
    const RowEnd end = row_end(row_max, row_sum);
    const float factor = end.factor();
    element* out = params.out + tile.batch * params.out_batch_stride +
                   row_offset(params, tile, row, params.out_row_stride, params.out_head_stride);
    store_global_128(out + first_element, {pack<element>(output[0] * factor, output[1] * factor),
                                           pack<element>(output[2] * factor, output[3] * factor),
                                           pack<element>(output[4] * factor, output[5] * factor),
                                           pack<element>(output[6] * factor, output[7] * factor)});
    if (params.lse != nullptr && thread == 0) {
        float* lse = params.lse + int64_t(tile.batch) * params.num_heads_q * params.seqlen_q +
                     row_offset(params, tile, row, 1, params.seqlen_q);
        store_global_32(lse, end.lse());
    }
}

static_assert(kHeadDimV % 8 == 0 && kRowThreads <= kThreads, "a thread stores 16 bytes of a row");
static_assert(sizeof(SharedStorage) == 4160, "launcher and kernel agree on shared memory");
static_assert(sizeof(Params) == 136 && offsetof(Params, part_outputs) == 0 && offsetof(Params, part_sums) == 8);
static_assert(offsetof(Params, out) == 16 && offsetof(Params, lse) == 24 && offsetof(Params, out_batch_stride) == 32);
static_assert(offsetof(Params, out_row_stride) == 40 && offsetof(Params, out_head_stride) == 48);
static_assert(offsetof(Params, num_heads_q) == 56 && offsetof(Params, num_heads_kv) == 60 && offsetof(Params, group_size) == 64);
static_assert(offsetof(Params, seqlen_q) == 68 && offsetof(Params, head_dim_v) == 72 && offsetof(Params, num_row_blocks) == 76);
static_assert(offsetof(Params, num_tiles) == 80 && offsetof(Params, kv_blocks_per_tile) == 84);
static_assert(offsetof(Params, kv_blocks_per_share) == 88 && offsetof(Params, head_sets_log2) == 92);
static_assert(offsetof(Params, heads_per_set) == 96 && offsetof(Params, num_heads_divisor) == 104);
static_assert(offsetof(Params, num_row_blocks_divisor) == 112 && offsetof(Params, group_size_divisor) == 120);
static_assert(offsetof(Params, kv_blocks_per_share_divisor) == 128);
