// quantize_bf16_token_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      dtype bf16, per token
// tile      block_m 32, lanes 8, tokens 256
// block     256 threads, 0 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 101376 bytes or more of shared memory per block
// spec      quantize_sm80.yaml
// template  quantize_sm80.cu.j2
#include "flashgen/sm80.cuh"

// e4m3 codes of x / scale, limited to 448. Stage 2 says where the scale comes from.
//
// Roles: all warps are alike. kLanes lanes have a row: a token of a head.

using element = bf16;

constexpr int kBlockM = 32;  // tokens of a thread block, of one head
constexpr int kLanes = 8;  // threads of a row
constexpr int kThreads = 256;
constexpr int kVectors = 256 / 8 / kLanes;  // of a lane at most: 256 is the largest head dim
constexpr float kLargestCode = 448.0f;

struct Params {
    const element* x;                     // (batch, seqlen, num_heads, head_dim); rows 16-byte aligned
    float* scale_out;                     // (scale_batch, scale_seqlen, scale_heads); what a code of 1 stands for
    uint8_t* codes;                       // (batch, seqlen, num_heads, head_dim); e4m3
    int64_t x_batch_stride;               // strides are in elements
    int64_t x_row_stride;
    int64_t x_head_stride;
    int64_t codes_batch_stride;           // strides are in elements
    int64_t codes_row_stride;
    int64_t codes_head_stride;
    int64_t scale_batch_step;             // from the scale of a batch entry to the next one's; 0 where they share it
    int64_t scale_row_step;               // the same of tokens
    int64_t scale_head_step;              // the same of heads
    int32_t num_heads;
    int32_t seqlen;
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
};

// The 8 elements that a lane takes at once, as they are in memory.
struct Words {
    uint4 all;
};

// The same as floats.
struct Vector {
    float values[8];
};

__device__ Words load_words(const element* source);
__device__ Vector unpacked(const Words& loaded);
__device__ float larger(float largest, const Vector& vector);  // The larger of `largest` and the finite sizes of a vector
template <int kCount> __device__ float largest_of_lanes(float value);  // The largest number of kCount lanes that follow each other
__device__ float scale_of(float largest);  // The scale of numbers whose largest finite size this is
__device__ void store_codes(uint8_t* destination, const Vector& vector, float inverse_scale);

extern "C" __global__ void __launch_bounds__(kThreads)
quantize_bf16_token_sm80(const __grid_constant__ Params params) {
    // All heads of a tile of tokens run together: their rows, codes and scales are neighbours in memory.
    const int head = block_index() % params.num_heads;
    const int tile = block_index() / params.num_heads;
    const int batch = tile / params.num_row_blocks;
    const int row = tile % params.num_row_blocks * kBlockM + threadIdx.x / kLanes;
    const int lane = threadIdx.x % kLanes;
    // The lanes of rows past the last one stay: they take part in the exchanges of their warp.
    const bool is_row = row < params.seqlen;

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    // 1. Load the row, all of it before anything waits. Lanes without a row or a column load another lane's, which does no harm.
    const element* x = params.x + batch * params.x_batch_stride + min(row, params.seqlen - 1) * params.x_row_stride + head * params.x_head_stride;
    Words loaded[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        if (i * kLanes * 8 < params.head_dim) loaded[i] = load_words(x + min((i * kLanes + lane) * 8, params.head_dim - 8));
    }

    // 2. Its scale: from its own largest element, or as the caller or the kernel before has left it.
    const int64_t scale_place =
        batch * params.scale_batch_step + row * params.scale_row_step + head * params.scale_head_step;
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        if (i * kLanes * 8 < params.head_dim) largest = larger(largest, unpacked(loaded[i]));
    }
    const float scale = scale_of(largest_of_lanes<kLanes>(largest));
    if (!is_row) return;
    if (lane == 0) store_global_32(params.scale_out + scale_place, scale);

    // 3. The codes.
    const float inverse_scale = 1.0f / scale;
    uint8_t* codes = params.codes + batch * params.codes_batch_stride + row * params.codes_row_stride + head * params.codes_head_stride;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int column = (i * kLanes + lane) * 8;
        if (column < params.head_dim) store_codes(codes + column, unpacked(loaded[i]), inverse_scale);
    }
}

__device__ __forceinline__ Words load_words(const element* source) {
    return {load_global_128(source)};
}

__device__ __forceinline__ Vector unpacked(const Words& loaded) {
    Vector vector;
    const uint32_t words[4] = {loaded.all.x, loaded.all.y, loaded.all.z, loaded.all.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<element>(words[i]);
        vector.values[2 * i] = pair.x;
        vector.values[2 * i + 1] = pair.y;
    }
    return vector;
}

// The larger of `largest` and the finite sizes of a vector: neither NaN nor an infinite element decides a scale.
__device__ __forceinline__ float larger(float largest, const Vector& vector) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float size = fabsf(vector.values[i]);
        largest = size < INFINITY ? fmaxf(largest, size) : largest;
    }
    return largest;
}

template <int kCount>
__device__ __forceinline__ float largest_of_lanes(float value) {
#pragma unroll
    for (int distance = kCount / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, distance));
    }
    return value;
}

// The scale of numbers whose largest finite size this is. 2^-126 is the least scale with a finite reciprocal.
__device__ __forceinline__ float scale_of(float largest) {
    return largest == 0.0f ? 1.0f : fmaxf(largest / kLargestCode, 0x1p-126f);
}

__device__ __forceinline__ void store_codes(uint8_t* destination, const Vector& vector, float inverse_scale) {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float* values = vector.values + 4 * i;
        words[i] = pack_e4m3(values[0] * inverse_scale, values[1] * inverse_scale) |
                   pack_e4m3(values[2] * inverse_scale, values[3] * inverse_scale) << 16;
    }
    store_global_64(destination, uint2{words[0], words[1]});
}

static_assert(kThreads == kBlockM * kLanes, "each row has its threads");
static_assert(sizeof(Params) == 112 && offsetof(Params, x) == 0 && offsetof(Params, scale_out) == 8);
static_assert(offsetof(Params, codes) == 16 && offsetof(Params, x_batch_stride) == 24 && offsetof(Params, x_row_stride) == 32);
static_assert(offsetof(Params, x_head_stride) == 40 && offsetof(Params, codes_batch_stride) == 48);
static_assert(offsetof(Params, codes_row_stride) == 56 && offsetof(Params, codes_head_stride) == 64);
static_assert(offsetof(Params, scale_batch_step) == 72 && offsetof(Params, scale_row_step) == 80);
static_assert(offsetof(Params, scale_head_step) == 88 && offsetof(Params, num_heads) == 96 && offsetof(Params, seqlen) == 100);
static_assert(offsetof(Params, head_dim) == 104 && offsetof(Params, num_row_blocks) == 108);
