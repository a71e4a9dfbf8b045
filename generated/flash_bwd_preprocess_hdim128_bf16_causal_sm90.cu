// flash_bwd_preprocess_hdim128_bf16_causal_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type causal, dropout none, gqa mha, dq_order none
// tile      block_m 64, block_n 128, stages 2, dout_stages 2, cluster 1, producer_registers 24, consumer_registers 240,
//           lse early, dv early, starts turns, held_k 0, held_v 0, dq_address free, mask_bounds computed, steps all
// block     256 threads, 0 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      flash_bwd_sm90.yaml
// template  flash_bwd_preprocess.cu.j2
#include "flashgen/sm90.cuh"

// For each row, two values of the forward call that the main kernel reads, in fp32:
//
//     delta = sum(dout * out) - dlse      lse_log2 = lse * log2(e), rounded up
//
// so that P = 2^(scale_log2 * S - lse_log2) and dS = P * (dP - delta). A row that attends to no key, or is past the last one, has lse_log2 = inf
// and delta = 0, which makes P and dS 0 if S and dP are finite. This kernel also clears dq_accum, or the heads of it that the main kernel does
// not clear itself, and the counters.

using element = bf16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kHeadDimV = 128;  // of O and dO
constexpr int kThreads = 256;
constexpr int kVector = 16 / int(sizeof(element));        // elements that a thread loads at once
constexpr int kVectors = kHeadDimV / kVector;             // of a row
constexpr int kLanes = kVectors < 8 ? 4 : 8;              // threads of a row; 8 of them read 128 bytes at a time, a cache line
constexpr int kSteps = (kVectors + kLanes - 1) / kLanes;  // vectors of a thread in a row

struct Params {
    const element* dout;                  // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    const element* out;                   // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    const float* lse;                     // (batch, num_heads_q, seqlen_q); natural logarithm
    const float* dlse;                    // (batch, num_heads_q, seqlen_q); may be null; the gradient of lse
    float* delta;                         // (heads, unit_rows): sum(dout * out) - dlse
    float* lse_log2;                      // (heads, unit_rows): lse in log2 units; inf for a row that attends to no key
    float* dq_accum;                      // (heads, unit_rows, kHeadDim): sums of dQ, in the order of dq_tiles
    int32_t* cleared;                     // (heads of the main grid): CTAs that have cleared their part of dq_accum
    int32_t* added;                       // (heads of the main grid): CTAs that have added all their dQ to dq_accum
    int64_t dout_batch_stride;            // strides are in elements
    int64_t dout_row_stride;
    int64_t dout_head_stride;
    int64_t out_batch_stride;             // strides are in elements
    int64_t out_row_stride;
    int64_t out_head_stride;
    int32_t cleared_heads;                // query heads, over the batch, whose dq_accum this kernel clears
    int32_t num_heads_q;
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
};

// The workspace pads each head to a multiple of kRowUnit rows, so the last block of queries is within the array.
constexpr int kRowUnit = 128;

__device__ int unit_rows(const Params& params);  // Rows of a head in the workspace
__device__ int64_t first_unit_row(const Params& params, int batch, int head);  // The row of the workspace that a head begins with

constexpr int kRowsPerPass = kThreads / kLanes;
constexpr int kPasses = kRowUnit / kRowsPerPass;
// A thread has up to four vectors of dO and four of O in flight, or the vectors of a row.
constexpr int kPassesAtOnce = kSteps > 2 ? 1 : kSteps == 2 ? 2 : kPasses;

__device__ float dot(uint4 a, uint4 b);  // The dot product of 16 bytes of elements with 16 bytes of elements

// ==== row_end, in the backward pass: what P and dS take from the end of a row

constexpr float kLog2e = 1.4426950408889634f;

// The LSE in the log2 domain, rounded up so that P = 2^(scale_log2 S - lse_log2) does not exceed 1
__device__ float rounded_lse_log2(float lse);
__device__ float row_delta(const float& lse, float sum, const float& dlse);  // delta of a row
// ====

extern "C" __global__ void __launch_bounds__(kThreads)
flash_bwd_preprocess_hdim128_bf16_causal_sm90(const __grid_constant__ Params params) {
    const int head_of_batch = block_index() / params.num_row_blocks;
    const int first_row = (block_index() - head_of_batch * params.num_row_blocks) * kRowUnit;
    const int batch = head_of_batch / params.num_heads_q;
    const int head = head_of_batch - batch * params.num_heads_q;
    const int lane = threadIdx.x % kLanes;

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    const int64_t unit_row = first_unit_row(params, batch, head) + first_row;
    float* dq = params.dq_accum + unit_row * kHeadDim;
    // The main kernel has two counters for each head of its grid: no more heads than query heads.
    if (first_row == 0 && threadIdx.x == 0) {
        store_global_32(params.cleared + head_of_batch, 0u);
        store_global_32(params.added + head_of_batch, 0u);
    }
    const bool clears = head_of_batch < params.cleared_heads;

    const element* dout = params.dout + batch * params.dout_batch_stride + head * params.dout_head_stride;
    const element* out = params.out + batch * params.out_batch_stride + head * params.out_head_stride;
    for (int first_pass = 0; first_pass < kPasses; first_pass += kPassesAtOnce) {
        uint4 dout_vectors[kPassesAtOnce][kSteps], out_vectors[kPassesAtOnce][kSteps];
        float lse[kPassesAtOnce], dlse[kPassesAtOnce];
#pragma unroll
        for (int pass = 0; pass < kPassesAtOnce; ++pass) {
            const int row = first_row + (first_pass + pass) * kRowsPerPass + threadIdx.x / kLanes;
            const bool valid = row < params.seqlen_q;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const int column = (step * kLanes + lane) * kVector;
                dout_vectors[pass][step] = out_vectors[pass][step] = {};
                if (valid && column < params.head_dim_v) {
                    dout_vectors[pass][step] = load_global_128(dout + row * params.dout_row_stride + column);
                    out_vectors[pass][step] = load_global_128(out + row * params.out_row_stride + column);
                }
            }
            const int64_t lse_row = int64_t(head_of_batch) * params.seqlen_q + row;
            lse[pass] = valid ? __uint_as_float(load_global_32(params.lse + lse_row)) : -INFINITY;
            dlse[pass] = valid && params.dlse != nullptr ? __uint_as_float(load_global_32(params.dlse + lse_row)) : 0.0f;
        }
        // Stores for which nothing waits, while the loads are on their way.
        constexpr int kElements = kPassesAtOnce * kRowsPerPass * kHeadDim;
        float* cleared = dq + first_pass * kRowsPerPass * kHeadDim;
#pragma unroll 4
        for (int i = clears ? 4 * threadIdx.x : kElements; i < kElements; i += 4 * kThreads) store_global_128(cleared + i, {});
#pragma unroll
        for (int pass = 0; pass < kPassesAtOnce; ++pass) {
            const int row_of_unit = (first_pass + pass) * kRowsPerPass + threadIdx.x / kLanes;
            float sum = 0.0f;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) sum += dot(dout_vectors[pass][step], out_vectors[pass][step]);
#pragma unroll
            for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
            if (lane != 0) continue;
            store_global_32(params.delta + unit_row + row_of_unit, row_delta(lse[pass], sum, dlse[pass]));
            store_global_32(params.lse_log2 + unit_row + row_of_unit, rounded_lse_log2(lse[pass]));
        }
    }
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

static_assert(sizeof(Params) == 144 && offsetof(Params, dout) == 0 && offsetof(Params, out) == 8 && offsetof(Params, lse) == 16);
static_assert(offsetof(Params, dlse) == 24 && offsetof(Params, delta) == 32 && offsetof(Params, lse_log2) == 40);
static_assert(offsetof(Params, dq_accum) == 48 && offsetof(Params, cleared) == 56 && offsetof(Params, added) == 64);
static_assert(offsetof(Params, dout_batch_stride) == 72 && offsetof(Params, dout_row_stride) == 80);
static_assert(offsetof(Params, dout_head_stride) == 88 && offsetof(Params, out_batch_stride) == 96);
static_assert(offsetof(Params, out_row_stride) == 104 && offsetof(Params, out_head_stride) == 112);
static_assert(offsetof(Params, cleared_heads) == 120 && offsetof(Params, num_heads_q) == 124);
static_assert(offsetof(Params, seqlen_q) == 128 && offsetof(Params, head_dim_v) == 132);
static_assert(offsetof(Params, num_row_blocks) == 136);
static_assert(kRowUnit % kRowsPerPass == 0 && kPasses % kPassesAtOnce == 0, "each pass has its rows");
