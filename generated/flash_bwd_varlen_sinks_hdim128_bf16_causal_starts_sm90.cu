// flash_bwd_varlen_sinks_hdim128_bf16_causal_starts_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type causal, dropout none, gqa mha, dq_order none, kv_starts
//           starts
// tile      block_m 64, block_n 128, stages 2, dout_stages 2, cluster 1, producer_registers 24, consumer_registers 240,
//           lse early, dv early, starts turns, held_k 0, held_v 0, dq_address free, mask_bounds computed, steps all
// block     1024 threads, 128 bytes of dynamic shared memory
// target    sm90: GPUs of sm_90a alone whose blocks may have 232448 bytes of shared memory
// spec      flash_bwd_varlen_sm90.yaml
// template  flash_bwd_sinks.cu.j2
#include "flashgen/sm90.cuh"

// The gradient of sinks, from what the kernel before this one has left:
//
//     dsink = -(sum over the rows of a head, of all sequences) of 2^((sink - lse) log2(e)) * delta
//
// A sink is a key without a value, so its dS is -P delta. A thread block has a head. Its threads take rows in turn, and their sums are added
// in a fixed order, so that the gradient repeats to the bit.

using element = bf16;

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

struct SharedStorage {
    float sums[kWarps];
};

struct Params {
    const float* sinks;                   // (num_heads_q,); may be null; a logit of each query head, natural units; fp32, or bfloat16 with sink_bytes 2
    const float* lse;                     // (batch_q, num_heads_q, rows_q); natural logarithm
    const int32_t* cu_seqlens_q;          // (boundaries,); may be null; null where queries are padded
    const float* delta;                   // (heads, unit_rows): sum(dout * out) - dlse
    float* dsinks;                        // (num_heads_q,); may be null
    int64_t lse_batch_stride;             // strides are in elements
    int64_t lse_head_stride;
    int32_t batch_size;                   // sequences
    int32_t rows_q;                       // of an entry of q: all tokens where sequences are packed
    int32_t seqlen_q;                     // queries of a sequence; where lengths vary, the most
    int32_t sink_bytes;                   // of an element of sinks: 4, or 2 of bfloat16
};

__device__ int load_clamped(const int32_t* values, int index, int most);  // A length, or the number of a row, from global memory

// Rows of an entry of an array: where they begin, and how many there are.
struct Rows {
    int begin;
    int count;
};

__device__ Rows packed_rows(const int32_t* cu_seqlens, int sequence, int rows, int most);  // The rows of a sequence among packed sequences

// In the workspace each sequence of a head has whole units of rows. LSE and delta are read by blocks of queries, so their units are whole blocks,
// and no block reads rows of another sequence. dQ takes kHeadDim times the memory, so its units are the 16 rows of a tile. Tiles past the sequence
// are neither cleared nor added to.
constexpr int kRowUnit = 128;
constexpr int kDqRowUnit = 16;

template <int kUnit> __device__ int64_t unit_rows(const Params& params);  // Rows of a head in the workspace
// The row of a head that a sequence begins with
template <int kUnit> __device__ int64_t unit_row_of_sequence(const Params& params, int sequence, int begin);
__device__ int64_t first_dq_row(const Params& params, int head);  // The row of dQ that a head begins with
__device__ int64_t first_unit_row(const Params& params, int, int head);  // The row of LSE and delta that a head begins with
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
    int row;  // of the sequence; of packed sequences, of all

    __device__ __forceinline__ RowsOfThread() : sequence(0), row(threadIdx.x) {}

    // Goes on to the sequence of the row. False after the last one.
    __device__ __forceinline__ bool find(const Params& params) {
        if (params.cu_seqlens_q != nullptr) {
            while (sequence < params.batch_size && row >= load_clamped(params.cu_seqlens_q, sequence + 1, params.rows_q)) ++sequence;
            return sequence < params.batch_size;
        }
        for (; sequence < params.batch_size && row >= params.seqlen_q; row -= params.seqlen_q) ++sequence;
        return sequence < params.batch_size;
    }

    // Where the row has its values; below 0 for a row that no query has, past the bound of the call.
    __device__ __forceinline__ SavedRow place(const Params& params, int head) const {
        const int begin = params.cu_seqlens_q == nullptr ? 0 : load_clamped(params.cu_seqlens_q, sequence, params.rows_q);
        const int query = row - begin;
        if (query < 0 || query >= params.seqlen_q) return {-1, -1};
        return {sequence * params.lse_batch_stride + head * params.lse_head_stride + row,
                first_unit_row(params, sequence, head) + unit_row_of_sequence<kRowUnit>(params, sequence, begin) + query};
    }

    __device__ __forceinline__ void advance() { row += kThreads; }
};

__device__ float term(const Params& params, const SavedRow& saved, float sink);  // What a row adds
__device__ float warp_sum(float value);

extern "C" __global__ void __launch_bounds__(kThreads)
flash_bwd_varlen_sinks_hdim128_bf16_causal_starts_sm90(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address sums = to_shared(shared_memory);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int head = block_index();

    // Programmatic dependent launch: wait for the previous grid, which may still write what this one reads, or read what it writes.
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

// A length, or the number of a row, from global memory. One out of range is clamped, so that it cannot reach other memory.
__device__ __forceinline__ int load_clamped(const int32_t* values, int index, int most) {
    return max(0, min(most, int(load_global_32(values + index))));
}

// The rows of a sequence among packed sequences.
__device__ __forceinline__ Rows packed_rows(const int32_t* cu_seqlens, int sequence, int rows, int most) {
    const int begin = load_clamped(cu_seqlens, sequence, rows);
    return {begin, max(0, min(most, load_clamped(cu_seqlens, sequence + 1, rows) - begin))};
}

// Rows of a head in the workspace.
template <int kUnit>
__device__ __forceinline__ int64_t unit_rows(const Params& params) {
    const int64_t rows = int64_t(params.cu_seqlens_q == nullptr ? params.batch_size : 1) * params.rows_q;
    return (rows / kUnit + params.batch_size) * kUnit;
}

// The row of a head that a sequence begins with. `begin` is its first row in q.
// The sequences before it fill at most (rows before) / kUnit + (sequences before) units, so no sum over sequences is needed.
template <int kUnit>
__device__ __forceinline__ int64_t unit_row_of_sequence(const Params& params, int sequence, int begin) {
    const int64_t rows_before = params.cu_seqlens_q == nullptr ? int64_t(sequence) * params.rows_q : begin;
    return (rows_before / kUnit + sequence) * kUnit;
}

// The row of dQ that a head begins with. A sequence begins unit_row_of_sequence() rows later.
__device__ __forceinline__ int64_t first_dq_row(const Params& params, int head) { return head * unit_rows<kDqRowUnit>(params); }

// The row of LSE and delta that a head begins with.
__device__ __forceinline__ int64_t first_unit_row(const Params& params, int, int head) { return head * unit_rows<kRowUnit>(params); }

// The sink of a query head, in natural units.
__device__ __forceinline__ float load_sink(const Params& params, int head) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(params.sinks) + head * params.sink_bytes;
    // bfloat16 is the upper half of fp32.
    const uint32_t bits = params.sink_bytes == 2 ? load_global_8(bytes) << 16 | load_global_8(bytes + 1) << 24 : load_global_32(bytes);
    return __uint_as_float(bits);
}

// What a row adds. Of an LSE of -inf, which a sink of -inf leaves, it is 0.
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
static_assert(sizeof(Params) == 72 && offsetof(Params, sinks) == 0 && offsetof(Params, lse) == 8);
static_assert(offsetof(Params, cu_seqlens_q) == 16 && offsetof(Params, delta) == 24 && offsetof(Params, dsinks) == 32);
static_assert(offsetof(Params, lse_batch_stride) == 40 && offsetof(Params, lse_head_stride) == 48);
static_assert(offsetof(Params, batch_size) == 56 && offsetof(Params, rows_q) == 60 && offsetof(Params, seqlen_q) == 64);
static_assert(offsetof(Params, sink_bytes) == 68);
