// flash_bwd_varlen_preprocess_hdim128_bf16_causal_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type causal, dropout none, gqa mha, dq_order none, kv_starts
//           none, dkv_dtype none
// tile      block_m 64, block_n 128, stages 2, dout_stages 2, cluster 1, producer_registers 24, consumer_registers 240,
//           lse early, dv early, starts turns, held_k 0, held_v 0, dq_address free, mask_bounds computed, steps all
// block     256 threads, 0 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      flash_bwd_varlen_sm90.yaml
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
    const element* dout;                  // (batch_q, rows_q, num_heads_q, head_dim_v); rows 16-byte aligned
    const element* out;                   // (batch_q, rows_q, num_heads_q, head_dim_v); rows 16-byte aligned
    const float* lse;                     // (batch_q, num_heads_q, rows_q); natural logarithm
    const float* dlse;                    // (batch_q, num_heads_q, rows_q); may be null; the gradient of lse
    const int32_t* cu_seqlens_q;          // (boundaries,); may be null; null where queries are padded
    const int32_t* cu_seqlens_kv;         // (boundaries,); may be null; null where keys are not packed
    const int32_t* kv_lengths;            // (batch,); may be null; null where cu_seqlens_kv has them, or all have seqlen_kv
    float* delta;                         // (heads, unit_rows): sum(dout * out) - dlse
    float* lse_log2;                      // (heads, unit_rows): lse in log2 units; inf for a row that attends to no key
    float* dq_accum;                      // (heads, unit_rows, kHeadDim): sums of dQ, in the order of dq_tiles
    int32_t* key_blocks;                  // (thread blocks, 8): the block of keys of each thread block of the main kernel
    int64_t dout_batch_stride;            // strides are in elements
    int64_t dout_row_stride;
    int64_t dout_head_stride;
    int64_t out_batch_stride;             // strides are in elements
    int64_t out_row_stride;
    int64_t out_head_stride;
    int64_t lse_batch_stride;             // strides are in elements
    int64_t lse_head_stride;
    int32_t batch_size;                   // sequences
    int32_t num_heads_q;
    int32_t num_heads_kv;
    int32_t rows_q;                       // of an entry of q: all tokens where sequences are packed
    int32_t rows_kv;                      // of an entry of k: all tokens where sequences are packed
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t num_key_blocks;               // entries of key_blocks, some of which may be empty
    int32_t blocks_together;              // about how many blocks of keys of a sequence are launched together
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
};

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

__device__ int load_clamped(const int32_t* values, int index, int most);  // A length, or the number of a row, from global memory

// Rows of an entry of an array: where they begin, and how many there are.
struct Rows {
    int begin;
    int count;
};

__device__ Rows packed_rows(const int32_t* cu_seqlens, int sequence, int rows, int most);  // The rows of a sequence among packed sequences
__device__ int sum_up_to_lane(int value, int lane);  // The sum over the lanes up to this one

// One of the blocks of a sequence. The blocks of all sequences are numbered, one sequence after another.
struct BlockOfSequence {
    int sequence;  // below 0: none
    int index;     // among the blocks of the sequence
    int count;     // how many it has
};

// The block of a number
template <typename CountOf> __device__ BlockOfSequence find_block_of_sequence(int sequences, int number, int lane, CountOf count_of);
// The rows of a sequence, whatever their bound
__device__ Rows rows_to_write(const int32_t* cu_seqlens, int sequence, int batch_size, int rows);

// kRowUnit rows of q of one sequence, of a head.
struct QueryUnit {
    int sequence;  // below 0: none; batch_size: of the rows after the last sequence
    int head;
    int first_row;
    Rows rows;     // of q that the sequence has, whatever the bound
    int seqlen_q;  // its queries
};

__device__ QueryUnit find_query_unit(const Params& params, int index, int lane);  // The unit of queries of a thread block
__device__ Params of_sequence(const Params& params, const QueryUnit& unit);  // The parameters of a call of the unit's sequence alone

constexpr int kBlockN = 128;  // keys of a thread block of the main kernel

__device__ Rows queries_of(const Params& params, int sequence);  // The queries of a sequence
__device__ Rows keys_of(const Params& params, int sequence);  // The keys of a sequence

// What a thread block of the main kernel computes: dK and dV of kBlockN keys of a kv head of a sequence, summed over its query heads, and
// their share of dQ.
struct KeyBlock {
    int batch;  // the sequence; below 0: none; batch_size: of the rows after the last sequence
    int kv_head;
    int first_key;
    int first_row_q;   // the rows of q and k that the sequence begins with
    int first_row_kv;
    int seqlen_q;
    int seqlen_kv;
    int stored_rows;  // of dK and dV: past the sequence's keys they are 0
};

constexpr int kKeyBlockWords = 8;  // 32-bit words of an entry of key_blocks: batch to stored_rows

__device__ Rows key_rows_of(const Params& params, int sequence);  // The rows of k of a sequence, whatever their bound
__device__ void set_rows(const Params& params, KeyBlock& block);  // Gives a block the rows and the lengths of its sequence
__device__ int key_blocks_of(int rows);  // The blocks of keys of a head
__device__ int query_blocks_of(const Params& params, int sequence);  // The length of a sequence in blocks of kBlockN queries

// A block of the main kernel's grid. The longest sequences come first, so that the grid ends with short ones.
struct LaunchedBlock {
    int query_blocks;  // of its sequence
    int index;         // among the blocks of sequences with this many query blocks
};

// Each lane keeps the blocks of this many sequences in registers, as the search goes through them many times.
constexpr int kKeptSequences = 4;

// The block of keys that is launched as number `index`
__device__ LaunchedBlock find_launched_block(const Params& params, int index, int lane);
__device__ KeyBlock find_key_block(const Params& params, int index, int lane);  // The block of keys of a thread block
// Finds the block of each thread block of the main kernel, which reads it from key_blocks
__device__ void place_key_blocks(const Params& params);

// The same at all head dims: left to choose, ptxas makes room for more thread blocks at 32, and at 64 with turns, and spills there.
extern "C" __global__ void __launch_bounds__(kThreads, 3)
flash_bwd_varlen_preprocess_hdim128_bf16_causal_sm90(const __grid_constant__ Params all) {
    // The wait comes first: lengths may be results of the grid before.
    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    place_key_blocks(all);
    const QueryUnit unit = find_query_unit(all, block_index(), threadIdx.x % 32);
    // The grid is for the most units that such arrays can have; rows of no sequence, and past the bound, are left to the last kernel.
    if (unit.sequence < 0 || unit.first_row >= unit.seqlen_q) return;
    const Params params = of_sequence(all, unit);
    const int first_row = unit.first_row;
    const int batch = unit.sequence;
    const int head = unit.head;
    const int lane = threadIdx.x % kLanes;

    const int64_t unit_row = first_unit_row(params, batch, head) + first_row;
    float* dq = params.dq_accum + (first_dq_row(params, head) + first_row) * kHeadDim;

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
            const int64_t lse_row = head * params.lse_head_stride + row;
            lse[pass] = valid ? __uint_as_float(load_global_32(params.lse + lse_row)) : -INFINITY;
            dlse[pass] = valid && params.dlse != nullptr ? __uint_as_float(load_global_32(params.dlse + lse_row)) : 0.0f;
        }
        // Stores for which nothing waits, while the loads are on their way.
        // Past the sequence's last tile lie rows of others, or the end of dq_accum.
        const int tile_rows = (params.seqlen_q - first_row + kDqRowUnit - 1) / kDqRowUnit * kDqRowUnit;
        const int elements = min(kPassesAtOnce * kRowsPerPass, tile_rows - first_pass * kRowsPerPass) * kHeadDim;
        float* cleared = dq + first_pass * kRowsPerPass * kHeadDim;
#pragma unroll 4
        for (int i = 4 * threadIdx.x; i < elements; i += 4 * kThreads) store_global_128(cleared + i, {});
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

__device__ __forceinline__ int64_t first_unit_row(const Params& params, int, int head) { return head * unit_rows<kRowUnit>(params); }

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

// A length, or the number of a row, from global memory. One out of range is clamped, so that it cannot reach other memory.
__device__ __forceinline__ int load_clamped(const int32_t* values, int index, int most) {
    return max(0, min(most, int(load_global_32(values + index))));
}

__device__ __forceinline__ Rows packed_rows(const int32_t* cu_seqlens, int sequence, int rows, int most) {
    const int begin = load_clamped(cu_seqlens, sequence, rows);
    return {begin, max(0, min(most, load_clamped(cu_seqlens, sequence + 1, rows) - begin))};
}

__device__ __forceinline__ int sum_up_to_lane(int value, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(0xffffffff, value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}

// The block of a number. Each lane counts the blocks of one of 32 sequences at a time, which is what count_of(sequence) returns.
template <typename CountOf>
__device__ __forceinline__ BlockOfSequence find_block_of_sequence(int sequences, int number, int lane, CountOf count_of) {
    int left = number;  // blocks from the first block of these 32 sequences to block `number`
    for (int first = 0; first < sequences; first += 32) {
        const int count = first + lane < sequences ? count_of(first + lane) : 0;
        const int end = sum_up_to_lane(count, lane);
        const uint32_t beyond = __ballot_sync(0xffffffff, left < end);
        if (beyond != 0) {
            const int found = __ffs(beyond) - 1;
            const int blocks = __shfl_sync(0xffffffff, count, found);
            return {first + found, left - (__shfl_sync(0xffffffff, end, found) - blocks), blocks};
        }
        left -= __shfl_sync(0xffffffff, end, 31);
    }
    return {-1, 0, 0};
}

// The rows of a sequence, whatever their bound. Rows after the last packed sequence count as one more, number batch_size.
__device__ __forceinline__ Rows rows_to_write(const int32_t* cu_seqlens, int sequence, int batch_size, int rows) {
    if (cu_seqlens == nullptr) return {0, sequence < batch_size ? rows : 0};
    if (sequence < batch_size) return packed_rows(cu_seqlens, sequence, rows, rows);
    const int begin = load_clamped(cu_seqlens, batch_size, rows);
    return {begin, rows - begin};
}

// The unit of queries of a thread block.
// The units of a head of a sequence follow each other, then come the units of its next head.
__device__ __forceinline__ QueryUnit find_query_unit(const Params& params, int index, int lane) {
    const auto rows_of = [&](int sequence) {
        return rows_to_write(params.cu_seqlens_q, sequence, params.batch_size, params.rows_q);
    };
    const auto units_of = [&](int sequence) { return (rows_of(sequence).count + kRowUnit - 1) / kRowUnit; };
    const BlockOfSequence found = find_block_of_sequence(params.batch_size + 1, index, lane, [&](int sequence) {
        return units_of(sequence) * params.num_heads_q;
    });
    if (found.sequence < 0) return {-1};
    const int units = found.count / params.num_heads_q;
    const Rows rows = rows_of(found.sequence);
    const int head = found.index / units;
    const int queries = found.sequence < params.batch_size ? min(rows.count, params.seqlen_q) : 0;
    return {found.sequence, head, (found.index - head * units) * kRowUnit, rows, queries};
}

// The parameters of a call of the unit's sequence alone: its length, and pointers to its first rows.
__device__ __forceinline__ Params of_sequence(const Params& params, const QueryUnit& unit) {
    Params own = params;
    own.seqlen_q = unit.seqlen_q;
    own.dout += unit.rows.begin * params.dout_row_stride;
    own.out += unit.rows.begin * params.out_row_stride;
    const int64_t lse_row = unit.sequence * params.lse_batch_stride + unit.rows.begin;
    own.lse += lse_row;
    if (params.dlse != nullptr) own.dlse += lse_row;
    const int64_t unit_row = unit_row_of_sequence<kRowUnit>(params, unit.sequence, unit.rows.begin);
    own.delta += unit_row;
    own.lse_log2 += unit_row;
    own.dq_accum += unit_row_of_sequence<kDqRowUnit>(params, unit.sequence, unit.rows.begin) * kHeadDim;
    return own;
}

__device__ __forceinline__ Rows queries_of(const Params& params, int sequence) {
    if (params.cu_seqlens_q == nullptr) return {0, params.seqlen_q};
    return packed_rows(params.cu_seqlens_q, sequence, params.rows_q, params.seqlen_q);
}

__device__ __forceinline__ Rows keys_of(const Params& params, int sequence) {
    if (params.cu_seqlens_kv != nullptr) return packed_rows(params.cu_seqlens_kv, sequence, params.rows_kv, params.seqlen_kv);
    return {0, params.kv_lengths == nullptr ? params.seqlen_kv : load_clamped(params.kv_lengths, sequence, params.seqlen_kv)};
}

__device__ __forceinline__ Rows key_rows_of(const Params& params, int sequence) {
    return rows_to_write(params.cu_seqlens_kv, sequence, params.batch_size, params.rows_kv);
}

// Gives a block the rows and the lengths of its sequence. Rows after the last sequence have neither queries nor keys.
__device__ __forceinline__ void set_rows(const Params& params, KeyBlock& block) {
    const Rows rows = key_rows_of(params, block.batch);
    block.first_row_kv = rows.begin;
    block.stored_rows = rows.count;
    if (block.batch < params.batch_size) {
        const Rows queries = queries_of(params, block.batch);
        block.first_row_q = queries.begin;
        block.seqlen_q = queries.count;
        block.seqlen_kv = keys_of(params, block.batch).count;
    }
}

__device__ __forceinline__ int key_blocks_of(int rows) { return (rows + kBlockN - 1) / kBlockN; }

// The length of a sequence in blocks of kBlockN queries. Rows after the last sequence have none.
__device__ __forceinline__ int query_blocks_of(const Params& params, int sequence) {
    return sequence < params.batch_size ? (queries_of(params, sequence).count + kBlockN - 1) / kBlockN : 0;
}

// The block of keys that is launched as number `index`.
// Finds the smallest number of query blocks such that at most `index` blocks belong to longer sequences. The search doubles from 1, then
// bisects: short sequences are many. Sums are unsigned, as lengths that contradict the arrays may add up to more than an int holds.
__device__ __forceinline__ LaunchedBlock find_launched_block(const Params& params, int index, int lane) {
    int query_blocks[kKeptSequences], blocks[kKeptSequences];
#pragma unroll
    for (int i = 0; i < kKeptSequences; ++i) {
        const int sequence = 32 * i + lane;
        query_blocks[i] = query_blocks_of(params, sequence);
        blocks[i] = sequence < params.batch_size ? key_blocks_of(key_rows_of(params, sequence).count) : 0;
    }
    int least = 0, most = 1 << 30;
    uint32_t before = 0;
    for (int bound = 1; least < most; bound = min(2 * bound, (least + most) / 2)) {
        uint32_t count = 0;
#pragma unroll
        for (int i = 0; i < kKeptSequences; ++i) count += query_blocks[i] > bound ? blocks[i] : 0;
#pragma unroll 1
        for (int sequence = 32 * kKeptSequences + lane; sequence < params.batch_size; sequence += 32) {
            const int further = key_blocks_of(key_rows_of(params, sequence).count);
            count += query_blocks_of(params, sequence) > bound ? further : 0;
        }
        const uint32_t longer = __reduce_add_sync(0xffffffff, count) * params.num_heads_kv;
        if (int(longer) > index) {
            least = bound + 1;
        } else {
            most = bound;
            before = longer;
        }
    }
    return {most, int(index - before)};
}

// The block of keys of a thread block.
// The heads of a sequence are launched in groups that have about blocks_together blocks in all. In a group the first block of each head comes first
// (in clusters the first pair), then the second block. Few heads at a time leave room in L2 for their Q, dO and dq_accum, which all blocks of a
// head use. Ordered additions to dQ begin with the last keys (turn_of in the main kernel), so that when a block starts, the earlier blocks of its
// head have a lead, and it seldom waits. Otherwise the first keys come first: under a diagonal the most queries attend to them.
__device__ __forceinline__ KeyBlock find_key_block(const Params& params, int index, int lane) {
    const LaunchedBlock launched = find_launched_block(params, index, lane);
    // Lengths that contradict the arrays may add up to more blocks than an int counts, and the search below find a sequence without blocks.
    if (launched.index < 0) return {-1};
    const BlockOfSequence found = find_block_of_sequence(params.batch_size + 1, launched.index, lane, [&](int sequence) {
        if (query_blocks_of(params, sequence) != launched.query_blocks) return 0;
        return key_blocks_of(key_rows_of(params, sequence).count) * params.num_heads_kv;
    });
    KeyBlock block = {found.sequence};
    if (found.sequence < 0) return block;
    const int blocks = found.count / params.num_heads_kv;
    const int together = max(1, params.blocks_together / blocks);  // heads
    const int first_head = found.index / (together * blocks) * together;
    const int heads = min(together, params.num_heads_kv - first_head);
    const int index_of_heads = found.index - first_head * blocks;
    const int blocks_before = index_of_heads / heads;  // of its head
    block.kv_head = first_head + index_of_heads - blocks_before * heads;
    block.first_key = blocks_before * kBlockN;
    set_rows(params, block);
    return block;
}

// Finds the block of each thread block of the main kernel, which reads it from key_blocks. Each warp finds one at a time. Entries are spread
// over all thread blocks of this kernel, so that none has many more than another.
__device__ __forceinline__ void place_key_blocks(const Params& params) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, grid_blocks = gridDim.x;
    for (int index = block_index() + warp * grid_blocks; index < params.num_key_blocks; index += kThreads / 32 * grid_blocks) {
        const KeyBlock block = find_key_block(params, index, lane);
        if (lane != 0) continue;
        int32_t* words = params.key_blocks + int64_t(index) * kKeyBlockWords;
        store_global_128(words, {uint32_t(block.batch), uint32_t(block.kv_head), uint32_t(block.first_key), uint32_t(block.first_row_q)});
        store_global_128(words + 4, {uint32_t(block.first_row_kv), uint32_t(block.seqlen_q), uint32_t(block.seqlen_kv), uint32_t(block.stored_rows)});
    }
}

static_assert(sizeof(Params) == 192 && offsetof(Params, dout) == 0 && offsetof(Params, out) == 8 && offsetof(Params, lse) == 16);
static_assert(offsetof(Params, dlse) == 24 && offsetof(Params, cu_seqlens_q) == 32 && offsetof(Params, cu_seqlens_kv) == 40);
static_assert(offsetof(Params, kv_lengths) == 48 && offsetof(Params, delta) == 56 && offsetof(Params, lse_log2) == 64);
static_assert(offsetof(Params, dq_accum) == 72 && offsetof(Params, key_blocks) == 80);
static_assert(offsetof(Params, dout_batch_stride) == 88 && offsetof(Params, dout_row_stride) == 96);
static_assert(offsetof(Params, dout_head_stride) == 104 && offsetof(Params, out_batch_stride) == 112);
static_assert(offsetof(Params, out_row_stride) == 120 && offsetof(Params, out_head_stride) == 128);
static_assert(offsetof(Params, lse_batch_stride) == 136 && offsetof(Params, lse_head_stride) == 144);
static_assert(offsetof(Params, batch_size) == 152 && offsetof(Params, num_heads_q) == 156);
static_assert(offsetof(Params, num_heads_kv) == 160 && offsetof(Params, rows_q) == 164 && offsetof(Params, rows_kv) == 168);
static_assert(offsetof(Params, seqlen_q) == 172 && offsetof(Params, seqlen_kv) == 176 && offsetof(Params, num_key_blocks) == 180);
static_assert(offsetof(Params, blocks_together) == 184 && offsetof(Params, head_dim_v) == 188);
static_assert(kRowUnit % kRowsPerPass == 0 && kPasses % kPassesAtOnce == 0, "each pass has its rows");
