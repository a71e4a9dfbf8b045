// append_bf16_halves_wide_paged_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      dtype bf16, rotary halves, tables wide, pages paged, kv_dtype none, latent none, kv_scales none
// tile      block_chunks 128
// block     128 threads, 0 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 101376 bytes or more of shared memory per block
// spec      append_sm80.yaml
// template  append_sm80.cu.j2
#include "flashgen/sm80.cuh"

// Writes new keys and values into a KV cache, after the keys and values that each sequence has there. A thread has 16 bytes of a row.

using element = bf16;

constexpr int kThreads = 128;
constexpr int kVector = 16 / int(sizeof(element));  // elements of a thread

struct Params {
    const element* k_new;                 // (batch, seqlen_new, num_heads_kv, head_dim); rows 16-byte aligned
    const element* v_new;                 // (batch, seqlen_new, num_heads_kv, head_dim_v); rows 16-byte aligned; may be null
    const int32_t* lengths;               // (sequences,); tokens of each sequence in the cache
    const element* q;                     // (batch, seqlen_q, num_heads_q, head_dim); rows 16-byte aligned; may be null
    const int32_t* pages;                 // (sequences, max_pages); entries past the last key are never read
    const float* cos;                     // (num_positions, rotary_half); rows 16-byte aligned; may be null
    const float* sin;                     // (num_positions, rotary_half); rows 16-byte aligned; may be null
    const int32_t* positions;             // (batch, seqlen_new); may be null; the row of cos and sin of each token; null: its position
    const int32_t* cu_seqlens_new;        // (boundaries,); may be null; where each sequence begins in packed tokens, and the end
    element* k_cache;                     // (num_pages, page_size, num_heads_kv, head_dim); rows 16-byte aligned
    element* v_cache;                     // (num_pages, page_size, num_heads_kv, head_dim_v); rows 16-byte aligned
    int32_t* total_lengths;               // (sequences,); lengths with the new tokens
    element* q_rotated;                   // (batch, seqlen_q, num_heads_q, head_dim); rows 16-byte aligned
    int64_t k_new_batch_stride;           // strides are in elements
    int64_t k_new_row_stride;
    int64_t k_new_head_stride;
    int64_t v_new_batch_stride;           // strides are in elements
    int64_t v_new_row_stride;
    int64_t v_new_head_stride;
    int64_t q_batch_stride;               // strides are in elements
    int64_t q_row_stride;
    int64_t q_head_stride;
    int64_t pages_sequence_stride;        // strides are in elements
    int64_t cos_row_stride;               // strides are in elements
    int64_t sin_row_stride;               // strides are in elements
    int64_t positions_batch_stride;       // strides are in elements
    int64_t k_cache_page_stride;          // strides are in elements
    int64_t k_cache_row_stride;
    int64_t k_cache_head_stride;
    int64_t v_cache_page_stride;          // strides are in elements
    int64_t v_cache_row_stride;
    int64_t v_cache_head_stride;
    int64_t q_rotated_batch_stride;       // strides are in elements
    int64_t q_rotated_row_stride;
    int64_t q_rotated_head_stride;
    int32_t sequences;
    int32_t seqlen_new;                   // tokens of a batch entry of k_new
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t num_heads_q;
    int32_t num_heads_kv;
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_pages;
    int32_t page_size;                    // keys of a page
    int32_t capacity;                     // tokens that a sequence may have
    int32_t num_positions;                // rows of cos and sin
    int32_t rotary_dim;                   // elements of a row that are rotated: the first, a multiple of 16
    int32_t q_step;                       // 1: query i is at lengths + i; 0: all are at lengths
    int32_t row_chunks_log2;              // of the threads of a row: its 16-byte chunks, rounded up to 2^n
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
};

using angle = fp32;  // of cos and sin
constexpr int kAngles = kVector;  // cosines, and sines, of a thread's elements
constexpr int kAngleWords = kAngles * int(sizeof(angle)) / 4;

__device__ void widen(float (&values)[kVector], uint4 chunk);  // The elements of a chunk as numbers, and back
__device__ uint4 narrow(const float (&values)[kVector]);
__device__ void load_angles(float (&angles)[kAngles], const angle* source);  // Cosines or sines of successive columns
// The chunk of a row that begins at `column`, below rotary_dim, rotated to `position`
__device__ uint4 rotate(uint4 chunk, const element* row, int column, int position, const Params& params);
// The page, or the row of the cache, that holds a place of a sequence; -1 for a place that the sequence does not have
__device__ int page_of(int sequence, int place, const Params& params);
__device__ int sequence_of(int token, const Params& params);  // The sequence of a packed token

extern "C" __global__ void __launch_bounds__(kThreads)
append_bf16_halves_wide_paged_sm80(const __grid_constant__ Params params) {
    const int batch = block_index() / params.num_row_blocks;
    const int chunk_index = block_index() % params.num_row_blocks * kThreads + threadIdx.x;
    const int column = (chunk_index & ((1 << params.row_chunks_log2) - 1)) * kVector;

    int row = chunk_index >> params.row_chunks_log2;
    const int key_rows = params.seqlen_new * params.num_heads_kv;
    // Rows are the rows of q, then of k_new, then of v_new, heads fastest.
    const int query_rows = params.seqlen_q * params.num_heads_q;
    const bool is_query = row < query_rows;
    if (!is_query) row -= query_rows;
    const bool is_key = !is_query && row < key_rows;
    const bool is_value = !is_query && !is_key;
    if (is_value) row -= key_rows;
    const int rows = is_query ? query_rows : key_rows;
    const int heads = is_query ? params.num_heads_q : params.num_heads_kv;
    const int token = row / heads;
    const int head = row - token * heads;

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    const int64_t thread = int64_t(block_index()) * kThreads + threadIdx.x;
    if (thread < params.sequences) {
        const int added = params.cu_seqlens_new ? int(load_global_32(params.cu_seqlens_new + thread + 1)) -
                                                      int(load_global_32(params.cu_seqlens_new + thread))
                                                : params.seqlen_new;
        const int total = min(int(load_global_32(params.lengths + thread)), params.capacity) + max(0, added);
        store_global_32(params.total_lengths + thread, uint32_t(min(total, params.capacity)));
    }
    if (row >= rows || column >= (is_value ? params.head_dim_v : params.head_dim)) return;

    const element* source;
    if (is_query) {
        source = params.q + batch * params.q_batch_stride + token * params.q_row_stride + head * params.q_head_stride;
    } else if (is_key) {
        source = params.k_new + batch * params.k_new_batch_stride + token * params.k_new_row_stride + head * params.k_new_head_stride;
    } else {
        source = params.v_new + batch * params.v_new_batch_stride + token * params.v_new_row_stride + head * params.v_new_head_stride;
    }
    uint4 chunk = load_global_128(source + column);

    // The token's sequence, and its index there.
    int sequence = batch, nth_token = token;
    if (params.cu_seqlens_new) {
        sequence = sequence_of(token, params);
        nth_token -= int(load_global_32(params.cu_seqlens_new + sequence));
        if (nth_token < 0 || token >= int(load_global_32(params.cu_seqlens_new + params.sequences))) return;  // of no sequence
    }
    const int length = int(load_global_32(params.lengths + sequence));

    const int place = length + nth_token;
    // The page is loaded before the angles, so that both loads are in flight together.
    const int page = is_query ? 0 : page_of(sequence, place, params);

    // A row without an angle is left out: as unsigned numbers, positions below 0 are past the tables as well.
    int position = is_query ? length + nth_token * params.q_step : place;
    if (params.positions) position = int(load_global_32(params.positions + batch * params.positions_batch_stride + token));
    if (uint32_t(position) >= uint32_t(params.num_positions)) return;
    if (!is_value && column < params.rotary_dim) chunk = rotate(chunk, source, column, position, params);
    if (is_query) {
        store_global_128(params.q_rotated + batch * params.q_rotated_batch_stride + token * params.q_rotated_row_stride +
                             head * params.q_rotated_head_stride + column,
                         chunk);
        return;
    }

    // A token without a page is left out.
    if (uint32_t(page) >= uint32_t(params.num_pages)) return;
    const int slot = place % params.page_size;
    if (is_key) {
        store_global_128(params.k_cache + page * params.k_cache_page_stride + slot * params.k_cache_row_stride +
                             head * params.k_cache_head_stride + column,
                         chunk);
    } else {
        store_global_128(params.v_cache + page * params.v_cache_page_stride + slot * params.v_cache_row_stride +
                             head * params.v_cache_head_stride + column,
                         chunk);
    }
}

__device__ __forceinline__ void widen(float (&values)[kVector], uint4 chunk) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<element>(words[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}

__device__ __forceinline__ uint4 narrow(const float (&values)[kVector]) {
    return {pack<element>(values[0], values[1]), pack<element>(values[2], values[3]), pack<element>(values[4], values[5]),
            pack<element>(values[6], values[7])};
}

__device__ __forceinline__ void load_angles(float (&angles)[kAngles], const angle* source) {
    uint32_t words[kAngleWords];
    static_assert(kAngleWords % 4 == 0, "whole chunks");
#pragma unroll
    for (int i = 0; i < kAngleWords; i += 4) {
        const uint4 chunk = load_global_128(source + i * kAngles / kAngleWords);
        words[i] = chunk.x;
        words[i + 1] = chunk.y;
        words[i + 2] = chunk.z;
        words[i + 3] = chunk.w;
    }
#pragma unroll
    for (int i = 0; i < kAngleWords; ++i) {
        angles[i] = __uint_as_float(words[i]);
    }
}

// The chunk of a row that begins at `column`, below rotary_dim, rotated to `position`: with its cosine c and sine s, a pair (x, y)
// of elements i and i + rotary_dim / 2 becomes (c x - s y, c y + s x).
__device__ __forceinline__ uint4 rotate(uint4 chunk, const element* row, int column, int position, const Params& params) {
    // The other elements of the pairs lie half of rotary_dim away; another thread rotates those.
    const int half = params.rotary_dim / 2;
    const bool upper = column >= half;
    const int first_angle = upper ? column - half : column;
    const uint4 other_chunk = load_global_128(row + (upper ? first_angle : column + half));
    float cosines[kAngles], sines[kAngles], values[kVector], others[kVector];
    load_angles(cosines, params.cos + position * params.cos_row_stride + first_angle);
    load_angles(sines, params.sin + position * params.sin_row_stride + first_angle);
    widen(values, chunk);
    widen(others, other_chunk);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        values[i] = fmaf(cosines[i], values[i], sines[i] * (upper ? others[i] : -others[i]));
    }
    return narrow(values);
}

// The page, or the row of the cache, that holds a place of a sequence; -1 for a place that the sequence does not have. The entry that is read
// may be out of range, which the caller checks.
__device__ __forceinline__ int page_of(int sequence, int place, const Params& params) {
    if (uint32_t(place) >= uint32_t(params.capacity)) return -1;
    return int(load_global_32(params.pages + sequence * params.pages_sequence_stride + place / params.page_size));
}

// The sequence of a packed token: the last one that begins there or before.
__device__ __forceinline__ int sequence_of(int token, const Params& params) {
    int first = 0, end = params.sequences;
    while (end - first > 1) {
        const int middle = first + (end - first) / 2;
        if (int(load_global_32(params.cu_seqlens_new + middle)) <= token) {
            first = middle;
        } else {
            end = middle;
        }
    }
    return first;
}

static_assert(kThreads == 128, "one chunk to a thread");
static_assert(sizeof(Params) == 344 && offsetof(Params, k_new) == 0 && offsetof(Params, v_new) == 8);
static_assert(offsetof(Params, lengths) == 16 && offsetof(Params, q) == 24 && offsetof(Params, pages) == 32);
static_assert(offsetof(Params, cos) == 40 && offsetof(Params, sin) == 48 && offsetof(Params, positions) == 56);
static_assert(offsetof(Params, cu_seqlens_new) == 64 && offsetof(Params, k_cache) == 72 && offsetof(Params, v_cache) == 80);
static_assert(offsetof(Params, total_lengths) == 88 && offsetof(Params, q_rotated) == 96);
static_assert(offsetof(Params, k_new_batch_stride) == 104 && offsetof(Params, k_new_row_stride) == 112);
static_assert(offsetof(Params, k_new_head_stride) == 120 && offsetof(Params, v_new_batch_stride) == 128);
static_assert(offsetof(Params, v_new_row_stride) == 136 && offsetof(Params, v_new_head_stride) == 144);
static_assert(offsetof(Params, q_batch_stride) == 152 && offsetof(Params, q_row_stride) == 160);
static_assert(offsetof(Params, q_head_stride) == 168 && offsetof(Params, pages_sequence_stride) == 176);
static_assert(offsetof(Params, cos_row_stride) == 184 && offsetof(Params, sin_row_stride) == 192);
static_assert(offsetof(Params, positions_batch_stride) == 200 && offsetof(Params, k_cache_page_stride) == 208);
static_assert(offsetof(Params, k_cache_row_stride) == 216 && offsetof(Params, k_cache_head_stride) == 224);
static_assert(offsetof(Params, v_cache_page_stride) == 232 && offsetof(Params, v_cache_row_stride) == 240);
static_assert(offsetof(Params, v_cache_head_stride) == 248 && offsetof(Params, q_rotated_batch_stride) == 256);
static_assert(offsetof(Params, q_rotated_row_stride) == 264 && offsetof(Params, q_rotated_head_stride) == 272);
static_assert(offsetof(Params, sequences) == 280 && offsetof(Params, seqlen_new) == 284 && offsetof(Params, seqlen_q) == 288);
static_assert(offsetof(Params, num_heads_q) == 292 && offsetof(Params, num_heads_kv) == 296 && offsetof(Params, head_dim) == 300);
static_assert(offsetof(Params, head_dim_v) == 304 && offsetof(Params, num_pages) == 308 && offsetof(Params, page_size) == 312);
static_assert(offsetof(Params, capacity) == 316 && offsetof(Params, num_positions) == 320 && offsetof(Params, rotary_dim) == 324);
static_assert(offsetof(Params, q_step) == 328 && offsetof(Params, row_chunks_log2) == 332);
static_assert(offsetof(Params, num_row_blocks) == 336);
static_assert(16 / 2 % kVector == 0, "a thread's elements are of one half: rotary_dim is a multiple of 16");
