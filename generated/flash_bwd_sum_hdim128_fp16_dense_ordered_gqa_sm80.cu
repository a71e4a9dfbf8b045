// flash_bwd_sum_hdim128_fp16_dense_ordered_gqa_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype fp16, mask_type dense, dropout none, gqa gqa, dq_order ordered
// tile      block_m 32, block_n 128, warps 8, key_warps 4, stages 2, min_blocks 1
// block     256 threads, 0 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 166912 bytes or more of shared memory per block
// spec      flash_bwd_sm80.yaml
// template  flash_bwd_sum.cu.j2
#include "flashgen/sm80.cuh"

// dK and dV of keys whose query heads were split into parts: the sum of what the parts have left, rounded; dK also times softmax_scale.
// Parts are added in their order, so that the sums repeat to the bit. A thread block has 16 rows, and a warp 32 columns of dK or dV at a
// time: a lane two rows of 8 columns.

using element = fp16;

constexpr int kHeadDim = 128;  // of K
constexpr int kHeadDimV = 128;  // of V
constexpr int kKeyUnit = 128;  // a part has whole units of keys: of a thread block of the main kernel, or of a cluster
constexpr int kThreads = 256;
constexpr int kRows = 16;
constexpr int kWarpColumns = 32;
constexpr int kTileElements = 128;  // 16 rows by 8 columns

struct Params {
    const float* dk_parts;                // dK of each part of a group, in tiles of 16 rows by 8 columns
    const float* dv_parts;                // dV of each part of a group, in the same tiles
    element* dk;                          // (batch, seqlen_kv, num_heads_kv, head_dim); rows 16-byte aligned
    element* dv;                          // (batch, seqlen_kv, num_heads_kv, head_dim_v); rows 16-byte aligned
    int64_t dk_batch_stride;              // strides are in elements
    int64_t dk_row_stride;
    int64_t dk_head_stride;
    int64_t dv_batch_stride;              // strides are in elements
    int64_t dv_row_stride;
    int64_t dv_head_stride;
    int32_t num_heads_kv;
    int32_t group_parts;                  // parts of the query heads of a kv head
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    float softmax_scale;                  // the factor of Q K^T in the scores
};

__device__ int part_rows(const Params& params);  // Keys of a part in the workspace
// Rounds and writes 8 elements of a row, times `scale`, as far as there are columns
__device__ void store(element* destination, const float (&values)[8], float scale, int columns_left);
// Sums a lane's elements over the parts of a kv head, whose first one begins at `parts`, and writes them
template <int kColumns> __device__ void sum_parts(const Params& params, const float* parts, element* gradient, int64_t row_stride,
    float scale, int first_row, int column, int columns, int lane);

extern "C" __global__ void __launch_bounds__(kThreads)
flash_bwd_sum_hdim128_fp16_dense_ordered_gqa_sm80(const __grid_constant__ Params params) {
    const int head_of_batch = block_index() / params.num_row_blocks;
    const int batch = head_of_batch / params.num_heads_kv;
    const int head = head_of_batch - batch * params.num_heads_kv;
    const int first_row = (block_index() - head_of_batch * params.num_row_blocks) * kRows;
    const int lane = threadIdx.x % 32;

    const int64_t first_key = int64_t(head_of_batch) * params.group_parts * part_rows(params);
    element* dk = params.dk + batch * params.dk_batch_stride + head * params.dk_head_stride;
    element* dv = params.dv + batch * params.dv_batch_stride + head * params.dv_head_stride;

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    // The columns of dK, then the columns of dV.
    for (int first = threadIdx.x / 32 * kWarpColumns; first < kHeadDim + kHeadDimV; first += kThreads / 32 * kWarpColumns) {
        const int column = first + lane % 4 * 8;
        if (first < kHeadDim) {
            sum_parts<kHeadDim>(params, params.dk_parts + first_key * kHeadDim, dk, params.dk_row_stride, params.softmax_scale, first_row,
                                column, params.head_dim, lane);
        } else {
            sum_parts<kHeadDimV>(params, params.dv_parts + first_key * kHeadDimV, dv, params.dv_row_stride, 1.0f, first_row,
                                 column - kHeadDim, params.head_dim_v, lane);
        }
    }
}

__device__ __forceinline__ int part_rows(const Params& params) { return (params.seqlen_kv + kKeyUnit - 1) / kKeyUnit * kKeyUnit; }

__device__ __forceinline__ void store(element* destination, const float (&values)[8], float scale, int columns_left) {
    if (columns_left <= 0) return;
    store_global_128(destination,
                     {pack<element>(scale * values[0], scale * values[1]), pack<element>(scale * values[2], scale * values[3]),
                      pack<element>(scale * values[4], scale * values[5]), pack<element>(scale * values[6], scale * values[7])});
}

template <int kColumns>
__device__ __forceinline__ void sum_parts(const Params& params, const float* parts, element* gradient, int64_t row_stride, float scale,
                                          int first_row, int column, int columns, int lane) {
    const int g = lane / 4;
    const int64_t part_elements = int64_t(part_rows(params)) * kColumns;
    // Of a tile, four lanes of an MMA have rows g and g + 8: two elements of each row, side by side.
    const float* lanes = parts + int64_t(first_row) * kColumns + column / 8 * kTileElements + 16 * g;
    float rows[2][8] = {};
    // The loads of several parts are in flight together.
#pragma unroll 4
    for (int part = 0; part < params.group_parts; ++part) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const uint4 words = load_global_128(lanes + part * part_elements + 4 * t);
            rows[0][2 * t] += __uint_as_float(words.x);
            rows[0][2 * t + 1] += __uint_as_float(words.y);
            rows[1][2 * t] += __uint_as_float(words.z);
            rows[1][2 * t + 1] += __uint_as_float(words.w);
        }
    }
#pragma unroll
    for (int row8 = 0; row8 < 2; ++row8) {
        const int row = first_row + 8 * row8 + g;
        if (row < params.seqlen_kv) store(gradient + row * row_stride + column, rows[row8], scale, columns - column);
    }
}

static_assert(sizeof(Params) == 112 && offsetof(Params, dk_parts) == 0 && offsetof(Params, dv_parts) == 8);
static_assert(offsetof(Params, dk) == 16 && offsetof(Params, dv) == 24 && offsetof(Params, dk_batch_stride) == 32);
static_assert(offsetof(Params, dk_row_stride) == 40 && offsetof(Params, dk_head_stride) == 48);
static_assert(offsetof(Params, dv_batch_stride) == 56 && offsetof(Params, dv_row_stride) == 64);
static_assert(offsetof(Params, dv_head_stride) == 72 && offsetof(Params, num_heads_kv) == 80);
static_assert(offsetof(Params, group_parts) == 84 && offsetof(Params, seqlen_kv) == 88 && offsetof(Params, head_dim) == 92);
static_assert(offsetof(Params, head_dim_v) == 96 && offsetof(Params, num_row_blocks) == 100);
static_assert(offsetof(Params, softmax_scale) == 104);
static_assert(kHeadDim % kWarpColumns == 0 && kHeadDimV % kWarpColumns == 0, "columns come by 32");
static_assert(kKeyUnit % kRows == 0, "the rows of a thread block lie in one unit");
