// merge_bf16_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      dtype bf16
// tile      block_m 32, lanes 8
// block     256 threads, 0 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 101376 bytes or more of shared memory per block
// spec      merge_sm80.yaml
// template  merge_sm80.cu.j2
#include "flashgen/sm80.cuh"

// Merges two results of attention over disjoint sets of keys. With m the larger LSE of a row,
//
//     out = (o1 e^(lse1 - m) + o2 e^(lse2 - m)) / (e^(lse1 - m) + e^(lse2 - m))
//
// and lse_out is m plus the logarithm of the denominator.

using element = bf16;

constexpr int kBlockM = 32;  // rows of a thread block: (query, head) pairs of a batch entry, heads fastest
constexpr int kLanes = 8;  // threads of a row
constexpr int kThreads = 256;
constexpr int kVector = 16 / int(sizeof(element));  // elements that a thread loads at once

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct Params {
    const element* o1;                    // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    const float* lse1;                    // (batch, num_heads_q, seqlen_q); natural logarithm; -inf or +inf for a row without keys
    const element* o2;                    // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    const float* lse2;                    // (batch, num_heads_q, seqlen_q); as lse1
    element* out;                         // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    float* lse_out;                       // (batch, num_heads_q, seqlen_q); as lse1, but always -inf for a row without keys
    int64_t o1_batch_stride;              // strides are in elements
    int64_t o1_row_stride;
    int64_t o1_head_stride;
    int64_t o2_batch_stride;              // strides are in elements
    int64_t o2_row_stride;
    int64_t o2_head_stride;
    int64_t out_batch_stride;             // strides are in elements
    int64_t out_row_stride;
    int64_t out_head_stride;
    int32_t num_heads_q;
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
};

__device__ float load_lse(const float* lse);  // The LSE of a row
// Adds scale * values, elements as they lie in memory, to a sum
__device__ void add_scaled(float (&sum)[kVector], uint4 values, float scale);
__device__ void store(element* destination, const float (&values)[kVector]);

extern "C" __global__ void __launch_bounds__(kThreads)
merge_bf16_sm80(const __grid_constant__ Params params) {
    const int batch = block_index() / params.num_row_blocks;
    const int row = block_index() % params.num_row_blocks * kBlockM + threadIdx.x / kLanes;
    const int lane = threadIdx.x % kLanes;

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    if (row >= params.seqlen_q * params.num_heads_q) return;
    const int query = row / params.num_heads_q;
    const int head = row - query * params.num_heads_q;
    const int64_t lse_row = (int64_t(batch) * params.num_heads_q + head) * params.seqlen_q + query;
    const float lse1 = load_lse(params.lse1 + lse_row);
    const float lse2 = load_lse(params.lse2 + lse_row);

    // Where neither part saw a key the terms are 0 as well: -inf minus itself would be NaN.
    const float larger = fmaxf(lse1, lse2);
    const float base = larger == -INFINITY ? 0.0f : larger;
    const float term1 = exp2_approx((lse1 - base) * kLog2e);
    const float term2 = exp2_approx((lse2 - base) * kLog2e);
    const float sum = term1 + term2;
    const float factor = sum == 0.0f ? 0.0f : rcp_approx(sum);
    if (lane == 0) store_global_32(params.lse_out + lse_row, base + log2_approx(sum) * kLn2);

    const element* o1 = params.o1 + batch * params.o1_batch_stride + query * params.o1_row_stride + head * params.o1_head_stride;
    const element* o2 = params.o2 + batch * params.o2_batch_stride + query * params.o2_row_stride + head * params.o2_head_stride;
    element* out = params.out + batch * params.out_batch_stride + query * params.out_row_stride + head * params.out_head_stride;
    for (int column = lane * kVector; column < params.head_dim_v; column += kLanes * kVector) {
        // The row of a part that saw no key may be NaN, and 0 * NaN is NaN, so it is not read.
        uint4 values1 = {};
        uint4 values2 = {};
        if (lse1 != -INFINITY) values1 = load_global_128(o1 + column);
        if (lse2 != -INFINITY) values2 = load_global_128(o2 + column);
        float merged[kVector] = {};
        add_scaled(merged, values1, term1 * factor);
        add_scaled(merged, values2, term2 * factor);
        store(out + column, merged);
    }
}

// The LSE of a row: -inf where its part saw no key, which flash-attn marks with +inf.
__device__ __forceinline__ float load_lse(const float* lse) {
    const float loaded = __uint_as_float(load_global_32(lse));
    return loaded == INFINITY ? -INFINITY : loaded;
}

__device__ __forceinline__ void add_scaled(float (&sum)[kVector], uint4 values, float scale) {
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<element>(words[i]);
        sum[2 * i] = fmaf(scale, pair.x, sum[2 * i]);
        sum[2 * i + 1] = fmaf(scale, pair.y, sum[2 * i + 1]);
    }
}

__device__ __forceinline__ void store(element* destination, const float (&values)[kVector]) {
    store_global_128(destination, {pack<element>(values[0], values[1]), pack<element>(values[2], values[3]),
                                   pack<element>(values[4], values[5]), pack<element>(values[6], values[7])});
}

static_assert(kThreads == kBlockM * kLanes, "each row has its threads");
static_assert(sizeof(Params) == 136 && offsetof(Params, o1) == 0 && offsetof(Params, lse1) == 8 && offsetof(Params, o2) == 16);
static_assert(offsetof(Params, lse2) == 24 && offsetof(Params, out) == 32 && offsetof(Params, lse_out) == 40);
static_assert(offsetof(Params, o1_batch_stride) == 48 && offsetof(Params, o1_row_stride) == 56);
static_assert(offsetof(Params, o1_head_stride) == 64 && offsetof(Params, o2_batch_stride) == 72);
static_assert(offsetof(Params, o2_row_stride) == 80 && offsetof(Params, o2_head_stride) == 88);
static_assert(offsetof(Params, out_batch_stride) == 96 && offsetof(Params, out_row_stride) == 104);
static_assert(offsetof(Params, out_head_stride) == 112 && offsetof(Params, num_heads_q) == 120);
static_assert(offsetof(Params, seqlen_q) == 124 && offsetof(Params, head_dim_v) == 128);
static_assert(offsetof(Params, num_row_blocks) == 132);
