// score_gradient_rows_hdim256_bf16_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 256, dtype bf16, mask_type none, sums none
// tile      block_m 128, block_n 64, warps 8, stages 4
// block     256 threads, 0 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 101376 bytes or more of shared memory per block
// spec      score_gradient_sm80.yaml
// template  score_gradient_rows.cu.j2
#include "flashgen/sm80.cuh"

// delta = sum(dO * O) - dlse, and the LSE in log2 units, of each row of Q. A row that attends to no key, or is past the last one, has lse_log2 =
// inf and delta = 0, which makes its P 0. A row has kLanes threads.

using element = bf16;

constexpr int kThreads = 256;
constexpr int kVector = 16 / int(sizeof(element));  // elements that a thread loads at once
constexpr int kLanes = 8;                           // threads of a row: they read 128 bytes at a time
constexpr int kRows = kThreads / kLanes;            // rows of a thread block

struct Params {
    const element* dout;                  // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    const element* out;                   // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    const float* lse;                     // (batch, num_heads_q, seqlen_q); natural logarithm
    const float* dlse;                    // (batch, num_heads_q, seqlen_q); may be null; the gradient of lse
    float* delta;                         // (heads, unit_rows): sum(dout * out) - dlse
    float* lse_log2;                      // (heads, unit_rows): lse in log2 units; inf for a row that attends to no key
    int64_t dout_batch_stride;            // strides are in elements
    int64_t dout_row_stride;
    int64_t dout_head_stride;
    int64_t out_batch_stride;             // strides are in elements
    int64_t out_row_stride;
    int64_t out_head_stride;
    int32_t num_heads_q;
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
};

// The workspace pads each head to a multiple of kRowUnit rows, so the last block of queries is within the array.
constexpr int kRowUnit = 128;

__device__ int unit_rows(const Params& params);  // Rows of a head in the workspace
__device__ int64_t first_unit_row(const Params& params, int batch, int head);  // The row of the workspace that a head begins with
__device__ float dot(uint4 a, uint4 b);  // The dot product of 16 bytes of elements with 16 bytes of elements

// ==== row_end, in the backward pass: what P and dS take from the end of a row

constexpr float kLog2e = 1.4426950408889634f;

// The LSE in the log2 domain, rounded up so that P = 2^(scale_log2 S - lse_log2) does not exceed 1
__device__ float rounded_lse_log2(float lse);
__device__ float row_delta(const float& lse, float sum, const float& dlse);  // delta of a row
// ====

extern "C" __global__ void __launch_bounds__(kThreads)
score_gradient_rows_hdim256_bf16_sm80(const __grid_constant__ Params params) {
    const int head_of_batch = block_index() / params.num_row_blocks;
    const int row = block_index() % params.num_row_blocks * kRows + threadIdx.x / kLanes;
    const int batch = head_of_batch / params.num_heads_q;
    const int head = head_of_batch % params.num_heads_q;
    const int lane = threadIdx.x % kLanes;
    const bool is_inside = row < params.seqlen_q;

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    const element* dout = params.dout + batch * params.dout_batch_stride + head * params.dout_head_stride + row * params.dout_row_stride;
    const element* out = params.out + batch * params.out_batch_stride + head * params.out_head_stride + row * params.out_row_stride;
    float sum = 0.0f;
    const int columns = is_inside ? params.head_dim_v : 0;
    // More at once make ptxas spill in fp32.
#pragma unroll 2
    for (int column = lane * kVector; column < columns; column += kLanes * kVector) {
        sum += dot(load_global_128(dout + column), load_global_128(out + column));
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (lane != 0) return;
    const int64_t lse_row = int64_t(head_of_batch) * params.seqlen_q + row;
    const float lse = is_inside ? __uint_as_float(load_global_32(params.lse + lse_row)) : -INFINITY;
    const float dlse = is_inside && params.dlse != nullptr ? __uint_as_float(load_global_32(params.dlse + lse_row)) : 0.0f;
    const int64_t unit_row = first_unit_row(params, batch, head) + row;
    store_global_32(params.delta + unit_row, row_delta(lse, sum, dlse));
    store_global_32(params.lse_log2 + unit_row, rounded_lse_log2(lse));
}

__device__ __forceinline__ int unit_rows(const Params& params) { return (params.seqlen_q + kRowUnit - 1) / kRowUnit * kRowUnit; }

__device__ __forceinline__ int64_t first_unit_row(const Params& params, int batch, int head) {
    return (int64_t(batch) * params.num_heads_q + head) * unit_rows(params);
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

static_assert(sizeof(Params) == 112 && offsetof(Params, dout) == 0 && offsetof(Params, out) == 8 && offsetof(Params, lse) == 16);
static_assert(offsetof(Params, dlse) == 24 && offsetof(Params, delta) == 32 && offsetof(Params, lse_log2) == 40);
static_assert(offsetof(Params, dout_batch_stride) == 48 && offsetof(Params, dout_row_stride) == 56);
static_assert(offsetof(Params, dout_head_stride) == 64 && offsetof(Params, out_batch_stride) == 72);
static_assert(offsetof(Params, out_row_stride) == 80 && offsetof(Params, out_head_stride) == 88);
static_assert(offsetof(Params, num_heads_q) == 96 && offsetof(Params, seqlen_q) == 100 && offsetof(Params, head_dim_v) == 104);
static_assert(offsetof(Params, num_row_blocks) == 108);
static_assert(kRowUnit % kRows == 0, "a thread block stays within the rows of a head in the workspace");
