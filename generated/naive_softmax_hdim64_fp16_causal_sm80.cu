// naive_softmax_hdim64_fp16_causal_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 64, dtype fp16, mask_type causal, gqa mha
// tile      block_m 64, block_n 64, warps 4
// block     128 threads, 0 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 101376 bytes or more of shared memory per block
// spec      flash_fwd_naive.yaml
// template  naive_softmax.cu.j2
#include "flashgen/sm80.cuh"

// The second of three kernels: the softmax of each row of S, which was masked when it was written. P takes the first half of its row of
// S. It is not divided by its sum: the third kernel divides O instead.

using element = fp16;

constexpr int kWarps = 4;  // each has a row

// fp16 P loses bits below 2^-14. With row_max kPBias below the true maximum P is 2^kPBias larger, so fewer P are subnormal. The factor
// cancels in O / row_sum and in the LSE.
constexpr float kPBias = 7.0f;

struct Params {
    float* scores;                        // (batch, num_heads_q, seqlen_q, row_keys(params)): S, and then P
    float* row_sum;                       // (batch, num_heads_q, seqlen_q): the sum of each row of P
    float* lse;                           // (batch, num_heads_q, seqlen_q); may be null; natural logarithm
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    float scale_log2;                     // softmax_scale * log2(e), above 0
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

__device__ int row_keys(const Params& params);  // Floats of a row of S
__device__ int64_t row_of_s(const Params& params, int head_of_batch, int row);  // Where a row of S begins, in floats
__device__ void load_scores(float (&scores)[8], const float* source);  // Eight scores
__device__ float warp_max(float value);  // The maximum over the lanes of a warp
__device__ float warp_sum(float value);  // The sum over the lanes of a warp

extern "C" __global__ void __launch_bounds__(32 * kWarps)
naive_softmax_hdim64_fp16_causal_sm80(const __grid_constant__ Params params) {
    const int lane = threadIdx.x % 32;
    const int head_of_batch = block_index() / params.num_row_blocks;  // heads counted over the batch
    const int row = block_index() % params.num_row_blocks * kWarps + threadIdx.x / 32;
    if (row >= params.seqlen_q) return;  // the whole warp: nothing below waits for another one

    float* s = params.scores + row_of_s(params, head_of_batch, row);
    element* p = reinterpret_cast<element*>(s);
    const int chunks = row_keys(params) / 8;

    // The maximum, in the log2 domain: an element of P is 2^(score * scale_log2 - row_max). Rounded up, so that P stays within its limit
    // for scores of any size.
    float largest = -INFINITY;
    for (int chunk = lane; chunk < chunks; chunk += 32) {
        float scores[8];
        load_scores(scores, s + 8 * chunk);
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, scores[i]);
    }
    const float row_max = fmaxf(kNoRowMax, __fmaf_ru(warp_max(largest), params.scale_log2, -kPBias));

    // P and its sum. A masked score, and with it a key past the last one, becomes 0.
    float sum = 0.0f;
    for (int first = 0; first < chunks; first += 32) {
        const int chunk = first + lane;
        float scores[8];
        if (chunk < chunks) load_scores(scores, s + 8 * chunk);
        __syncwarp();  // P of the first lanes lies where other lanes have just read S
        if (chunk < chunks) {
            float values[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                values[i] = exp2_approx(fmaf(scores[i], params.scale_log2, -row_max));
                sum += values[i];
            }
            store_global_128(p + 8 * chunk, {pack<element>(values[0], values[1]), pack<element>(values[2], values[3]),
                                             pack<element>(values[4], values[5]), pack<element>(values[6], values[7])});
        }
    }
    sum = warp_sum(sum);

    if (lane == 0) {
        const int64_t index = int64_t(head_of_batch) * params.seqlen_q + row;
        store_global_32(params.row_sum + index, sum);
        // lse = ln(sum of exp(score * softmax_scale)), -inf for a row that attends to nothing.
        if (params.lse != nullptr) store_global_32(params.lse + index, row_end(row_max, sum).lse());
    }
}

// The factor of O and row_sum when row_max rises to `larger`. If both are infinite their difference is NaN; fminf makes the factor 1.
__device__ __forceinline__ float rescale_factor(float row_max, float larger) { return exp2_approx(fminf(row_max - larger, 0.0f)); }

// ==== row_end: the factor of O and the LSE, after the last key of a row

__device__ __forceinline__ RowEnd row_end(float row_max, float row_sum) { return {row_max, row_sum}; }
// ====

// Floats of a row of S: one for each key, rounded up to whole 16-byte chunks of P.
__device__ __forceinline__ int row_keys(const Params& params) { return (params.seqlen_kv + 7) / 8 * 8; }

// Where a row of S begins, in floats. Heads are counted over the batch.
__device__ __forceinline__ int64_t row_of_s(const Params& params, int head_of_batch, int row) {
    return (int64_t(head_of_batch) * params.seqlen_q + row) * row_keys(params);
}

__device__ __forceinline__ void load_scores(float (&scores)[8], const float* source) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 words = load_global_128(source + 4 * i);
        scores[4 * i] = __uint_as_float(words.x);
        scores[4 * i + 1] = __uint_as_float(words.y);
        scores[4 * i + 2] = __uint_as_float(words.z);
        scores[4 * i + 3] = __uint_as_float(words.w);
    }
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, step));
    return value;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}

static_assert(sizeof(Params) == 40 && offsetof(Params, scores) == 0 && offsetof(Params, row_sum) == 8);
static_assert(offsetof(Params, lse) == 16 && offsetof(Params, seqlen_q) == 24 && offsetof(Params, seqlen_kv) == 28);
static_assert(offsetof(Params, num_row_blocks) == 32 && offsetof(Params, scale_log2) == 36);
