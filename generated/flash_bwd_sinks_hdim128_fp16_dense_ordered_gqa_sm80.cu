// flash_bwd_sinks_hdim128_fp16_dense_ordered_gqa_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype fp16, mask_type dense, dropout none, gqa gqa, dq_order ordered
// tile      block_m 32, block_n 128, warps 8, key_warps 4, stages 2, min_blocks 1
// block     1024 threads, 128 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 166912 bytes or more of shared memory per block
// spec      flash_bwd_sm80.yaml
// template  flash_bwd_sinks.cu.j2
#include "flashgen/sm80.cuh"

// The gradient of sinks, from the LSE and delta of the previous kernel:
//
//     dsink = -(sum over the rows of a head, of all sequences) of 2^((sink - lse) log2(e)) * delta
//
// A sink is a key without a value, so its dS is -P delta. A thread block has a head. Its threads take one row after another, and their sums are
// added in a fixed order, so that the gradient repeats to the bit.

using element = fp16;

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

struct SharedStorage {
    float sums[kWarps];
};

struct Params {
    const float* sinks;                   // (num_heads_q,); may be null; a logit of each query head, natural units; fp32, or bfloat16 with sink_bytes 2
    const float* lse;                     // (batch, num_heads_q, seqlen_q); natural logarithm
    const float* delta;                   // (heads, unit_rows): sum(dout * out) - dlse
    float* dsinks;                        // (num_heads_q,); may be null
    int32_t batch_size;                   // sequences
    int32_t num_heads_q;
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t sink_bytes;                   // of an element of sinks: 4, or 2 of bfloat16
};

// The workspace pads each head to a multiple of kRowUnit rows, so the last block of queries is within the array.
constexpr int kRowUnit = 128;

__device__ int unit_rows(const Params& params);  // Rows of a head in the workspace
__device__ int64_t first_unit_row(const Params& params, int batch, int head);  // The row of the workspace that a head begins with
__device__ float load_sink(const Params& params, int head);  // The sink of a query head, in natural units

constexpr float kLog2e = 1.4426950408889634f;

// Where a row of a head has its LSE and its delta.
struct SavedRow {
    int64_t lse;
    int64_t delta;
};

// The rows of a head that a thread adds up: every kThreads-th of all sequences, one sequence after another.
struct RowsOfThread {
    int sequence;
    int row;  // of the sequence

    __device__ __forceinline__ RowsOfThread() : sequence(0), row(threadIdx.x) {}

    // Goes on to the sequence of the row. False after the last one.
    __device__ __forceinline__ bool find(const Params& params) {
        for (; sequence < params.batch_size && row >= params.seqlen_q; row -= params.seqlen_q) ++sequence;
        return sequence < params.batch_size;
    }

    // Where the row has its values; below 0 for a row that no query has, past the bound of the call.
    __device__ __forceinline__ SavedRow place(const Params& params, int head) const {
        return {(int64_t(sequence) * params.num_heads_q + head) * params.seqlen_q + row, first_unit_row(params, sequence, head) + row};
    }

    __device__ __forceinline__ void advance() { row += kThreads; }
};

__device__ float term(const Params& params, const SavedRow& saved, float sink);  // The term of a row in the sum
__device__ float warp_sum(float value);

extern "C" __global__ void __launch_bounds__(kThreads)
flash_bwd_sinks_hdim128_fp16_dense_ordered_gqa_sm80(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address sums = to_shared(shared_memory);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int head = block_index();

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    const float sink = load_sink(params, head);
    float sum = 0.0f;
    for (RowsOfThread rows; rows.find(params); rows.advance()) sum += term(params, rows.place(params, head), sink);
    sum = warp_sum(sum);
    if (lane == 0) store_shared_32(sums + 4 * warp, __float_as_uint(sum));
    __syncthreads();
    if (warp != 0) return;
    sum = warp_sum(lane < kWarps ? __uint_as_float(load_shared_32(sums + 4 * lane)) : 0.0f);
    if (lane == 0) store_global_32(params.dsinks + head, -sum);
}

__device__ __forceinline__ int unit_rows(const Params& params) { return (params.seqlen_q + kRowUnit - 1) / kRowUnit * kRowUnit; }

__device__ __forceinline__ int64_t first_unit_row(const Params& params, int batch, int head) {
    return (int64_t(batch) * params.num_heads_q + head) * unit_rows(params);
}

__device__ __forceinline__ float load_sink(const Params& params, int head) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(params.sinks) + head * params.sink_bytes;
    // bfloat16 is the upper half of fp32.
    const uint32_t bits = params.sink_bytes == 2 ? load_global_8(bytes) << 16 | load_global_8(bytes + 1) << 24 : load_global_32(bytes);
    return __uint_as_float(bits);
}

// The term of a row in the sum. It is 0 if the LSE is -inf: the row has no key, and its sink is -inf.
__device__ __forceinline__ float term(const Params& params, const SavedRow& saved, float sink) {
    if (saved.lse < 0) return 0.0f;
    const float lse = __uint_as_float(load_global_32(params.lse + saved.lse));
    const float delta = __uint_as_float(load_global_32(params.delta + saved.delta));
    return lse == -INFINITY ? 0.0f : exp2_approx((sink - lse) * kLog2e) * delta;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffff, value, distance);
    return value;
}

static_assert(sizeof(SharedStorage) == 128, "launcher and kernel agree on shared memory");
static_assert(kWarps <= 32, "a warp adds the sums of all warps");
static_assert(sizeof(Params) == 48 && offsetof(Params, sinks) == 0 && offsetof(Params, lse) == 8);
static_assert(offsetof(Params, delta) == 16 && offsetof(Params, dsinks) == 24 && offsetof(Params, batch_size) == 32);
static_assert(offsetof(Params, num_heads_q) == 36 && offsetof(Params, seqlen_q) == 40 && offsetof(Params, sink_bytes) == 44);
