// append_fp16_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      dtype fp16, rotary none, tables none, pages none
// tile      block_chunks 128
// block     128 threads, 0 bytes of dynamic shared memory
// target    sm80: GPUs of sm_80 or later whose blocks may have 101376 bytes of shared memory
// spec      append_sm80.yaml
// template  append_sm80.cu.j2
#include "flashgen/sm80.cuh"

// Writes new keys and values into a KV cache, behind those that each sequence has there.
//
// A thread has 16 bytes of a row.

using element = fp16;

constexpr int kThreads = 128;
constexpr int kVector = 16 / int(sizeof(element));  // elements of a thread

static_assert(kThreads == 128, "one chunk to a thread");

struct Params {
    const element* k_new;                 // (batch, seqlen_new, num_heads_kv, head_dim); rows of all arrays of elements are 16-byte aligned
    const element* v_new;                 // (batch, seqlen_new, num_heads_kv, head_dim_v)
    const int32_t* lengths;               // (sequences): the tokens that each has in the cache
    const int32_t* index;                 // (sequences): the row of the cache of each, or null: its own number
    const int32_t* cu_seqlens_new;        // (sequences + 1), or null: the first token of each sequence where all lie in one batch entry, and the end
    element* k_cache;                     // (num_pages, page_size, num_heads_kv, head_dim); without a page table a row of the cache is a page
    element* v_cache;                     // (num_pages, page_size, num_heads_kv, head_dim_v)
    int32_t* total_lengths;               // (sequences): lengths with the new tokens
    int64_t k_new_batch_stride;           // strides are in elements
    int64_t k_new_row_stride;
    int64_t k_new_head_stride;
    int64_t v_new_batch_stride;
    int64_t v_new_row_stride;
    int64_t v_new_head_stride;
    int64_t k_cache_page_stride;
    int64_t k_cache_row_stride;
    int64_t k_cache_head_stride;
    int64_t v_cache_page_stride;
    int64_t v_cache_row_stride;
    int64_t v_cache_head_stride;
    int32_t sequences;
    int32_t seqlen_new;                   // tokens of a batch entry of k_new
    int32_t num_heads_kv;
    int32_t head_dim;                     // a multiple of kVector
    int32_t head_dim_v;                   // a multiple of kVector
    int32_t num_pages;
    int32_t capacity;                     // tokens that a sequence may have
    int32_t row_chunks_log2;              // of the threads that a row has
    int32_t num_row_blocks;               // thread blocks of one batch entry
};
static_assert(sizeof(Params) == 200 && offsetof(Params, k_new) == 0 && offsetof(Params, v_new) == 8);
static_assert(offsetof(Params, lengths) == 16 && offsetof(Params, index) == 24 && offsetof(Params, cu_seqlens_new) == 32);
static_assert(offsetof(Params, k_cache) == 40 && offsetof(Params, v_cache) == 48 && offsetof(Params, total_lengths) == 56);
static_assert(offsetof(Params, k_new_batch_stride) == 64 && offsetof(Params, k_new_row_stride) == 72);
static_assert(offsetof(Params, k_new_head_stride) == 80 && offsetof(Params, v_new_batch_stride) == 88);
static_assert(offsetof(Params, v_new_row_stride) == 96 && offsetof(Params, v_new_head_stride) == 104);
static_assert(offsetof(Params, k_cache_page_stride) == 112 && offsetof(Params, k_cache_row_stride) == 120);
static_assert(offsetof(Params, k_cache_head_stride) == 128 && offsetof(Params, v_cache_page_stride) == 136);
static_assert(offsetof(Params, v_cache_row_stride) == 144 && offsetof(Params, v_cache_head_stride) == 152);
static_assert(offsetof(Params, sequences) == 160 && offsetof(Params, seqlen_new) == 164 && offsetof(Params, num_heads_kv) == 168);
static_assert(offsetof(Params, head_dim) == 172 && offsetof(Params, head_dim_v) == 176 && offsetof(Params, num_pages) == 180);
static_assert(offsetof(Params, capacity) == 184 && offsetof(Params, row_chunks_log2) == 188);
static_assert(offsetof(Params, num_row_blocks) == 192);

// The page that holds a place of a sequence; -1 where the cache has no room for it. What a page table says may be no page either.
__device__ __forceinline__ int page_of(int sequence, int place, const Params& params) {
    if (uint32_t(place) >= uint32_t(params.capacity)) return -1;
    return params.index ? int(load_global_32(params.index + sequence)) : sequence;
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

extern "C" __global__ void __launch_bounds__(kThreads)
append_fp16_sm80(const __grid_constant__ Params params) {
    const int batch = block_index() / params.num_row_blocks;
    const int chunk_index = block_index() % params.num_row_blocks * kThreads + threadIdx.x;
    const int column = (chunk_index & ((1 << params.row_chunks_log2) - 1)) * kVector;

    // Rows are those of k_new, then of v_new, heads fastest.
    int row = chunk_index >> params.row_chunks_log2;
    const int key_rows = params.seqlen_new * params.num_heads_kv;
    const bool is_key = row < key_rows;
    if (!is_key) row -= key_rows;
    const int rows = key_rows;
    const int heads = params.num_heads_kv;
    const int token = row / heads;
    const int head = row - token * heads;

    // Programmatic dependent launch: the grid before this one may still be running, reading what this one writes or writing what it
    // reads.
    griddepcontrol_wait();
    // Blocks of the next grid may now start wherever this one leaves room. Not before the wait: the next grid may count on every grid
    // before this one to have ended.
    griddepcontrol_launch_dependents();

    const int64_t thread = int64_t(block_index()) * kThreads + threadIdx.x;
    if (thread < params.sequences) {
        const int added = params.cu_seqlens_new ? int(load_global_32(params.cu_seqlens_new + thread + 1)) -
                                                      int(load_global_32(params.cu_seqlens_new + thread))
                                                : params.seqlen_new;
        const int total = int(load_global_32(params.lengths + thread)) + added;
        store_global_32(params.total_lengths + thread, uint32_t(min(total, params.capacity)));
    }
    if (row >= rows || column >= (is_key ? params.head_dim : params.head_dim_v)) return;

    const element* source;
    if (is_key) {
        source = params.k_new + batch * params.k_new_batch_stride + token * params.k_new_row_stride + head * params.k_new_head_stride;
    } else {
        source = params.v_new + batch * params.v_new_batch_stride + token * params.v_new_row_stride + head * params.v_new_head_stride;
    }
    uint4 chunk = load_global_128(source + column);

    // Whose token it is, and which of that sequence's.
    int sequence = batch, nth_token = token;
    if (params.cu_seqlens_new) {
        sequence = sequence_of(token, params);
        nth_token -= int(load_global_32(params.cu_seqlens_new + sequence));
        if (token >= int(load_global_32(params.cu_seqlens_new + params.sequences))) return;
    }
    const int length = int(load_global_32(params.lengths + sequence));

    const int place = length + nth_token;
    const int page = page_of(sequence, place, params);
    // A token without a page is left out.
    if (uint32_t(page) >= uint32_t(params.num_pages)) return;
    const int slot = place;
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
