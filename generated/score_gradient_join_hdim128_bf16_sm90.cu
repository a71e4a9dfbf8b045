// score_gradient_join_hdim128_bf16_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type none, sums none
// tile      block_m 128, block_n 128, stages 6, producer_registers 24, consumer_registers 240
// block     256 threads, 0 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      score_gradient_sm90.yaml
// template  score_gradient_join.cu.j2
#include "flashgen/sm90.cuh"

// Adds up the sums that the main kernel has left for each part of the batch entries and heads, in the order of the parts, so that the gradient
// repeats to the bit.

using element = bf16;  // of q, k and v

constexpr int kThreads = 256;

struct Params {
    const float* dscore_parts;            // (pair_parts, dscore_elements): sums of each part; null where there is one part
    float* dscore;                        // (batch, num_heads_q, seqlen_q, seqlen_kv); the gradient, contiguous
    int64_t dscore_elements;              // of the gradient
    int32_t pair_parts;                   // parts of the batch entries and heads that share an element
};

// Stores an element of the gradient, rounded to the dtype of its array
__device__ void store_gradient(const Params& params, int64_t place, float value);

extern "C" __global__ void __launch_bounds__(kThreads)
score_gradient_join_hdim128_bf16_sm90(const __grid_constant__ Params params) {
    const int64_t place = int64_t(block_index()) * kThreads + threadIdx.x;

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    if (place >= params.dscore_elements) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int part = 0; part < params.pair_parts; ++part) {
        sum += __uint_as_float(load_global_32(params.dscore_parts + part * params.dscore_elements + place));
    }
    store_gradient(params, place, sum);
}

__device__ __forceinline__ void store_gradient(const Params& params, int64_t place, float value) {
    store_global_32(params.dscore + place, value);
}

static_assert(sizeof(Params) == 32 && offsetof(Params, dscore_parts) == 0 && offsetof(Params, dscore) == 8);
static_assert(offsetof(Params, dscore_elements) == 16 && offsetof(Params, pair_parts) == 24);
