// flash_bwd_varlen_convert_hdim128_bf16_causal_sm90
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
// template  flash_bwd_convert.cu.j2
#include "flashgen/sm90.cuh"

// dq = softmax_scale * dq_accum, rounded. A warp has 16 rows, and 32 columns at a time: a lane two rows of 8 columns.

using element = bf16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kThreads = 256;
constexpr int kWarpColumns = 32;
constexpr int kPasses = kHeadDim / kWarpColumns;
// Passes whose loads are in flight together.
constexpr int kPassesAtOnce = kPasses <= 4 ? kPasses : kPasses % 4 == 0 ? 4 : kPasses % 3 == 0 ? 3 : 1;

struct Params {
    const float* dq_accum;                // (heads, unit_rows, kHeadDim): sums of dQ, in the order of dq_tiles
    element* dq;                          // (batch_q, rows_q, num_heads_q, head_dim); rows 16-byte aligned
    const int32_t* cu_seqlens_q;          // (boundaries,); may be null; null where queries are padded
    int64_t dq_batch_stride;              // strides are in elements
    int64_t dq_row_stride;
    int64_t dq_head_stride;
    int32_t batch_size;                   // sequences
    int32_t num_heads_q;
    int32_t rows_q;                       // of an entry of q: all tokens where sequences are packed
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    float softmax_scale;                  // the factor of Q K^T in the scores
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

// dq_accum has the layout of MMA accumulators: tiles of 16 rows by 8 columns, and the tiles of 16 rows are contiguous. Element e of lane
// (g, t) = (lane / 4, lane % 4) is row g + 8 (e / 2), column 2 t + e % 2.
// So the red instructions of a warp fill whole lines of 128 bytes. If one red adds four elements (kRedWidth of flashgen/ptx.cuh), the four
// elements of a lane are contiguous. Otherwise element e of all 32 lanes is contiguous.
constexpr int kTileElements = 128;

// The tiles of the 16 rows that begin at `row`
__device__ decltype(Params::dq_accum) dq_tiles(const Params& params, int, int head, int row);
__device__ void load_rows(const float* tile, int g, float (&rows)[2][8]);  // Rows g and g + 8 of a tile
// Rounds and writes 8 elements of a row, times `scale`, as far as there are columns
__device__ void store(element* destination, const float (&values)[8], float scale, int columns_left);
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

extern "C" __global__ void __launch_bounds__(kThreads)
flash_bwd_varlen_convert_hdim128_bf16_causal_sm90(const __grid_constant__ Params all) {
    // The wait comes first: lengths may be results of the grid before.
    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    const QueryUnit unit = find_query_unit(all, block_index(), threadIdx.x % 32);
    if (unit.sequence < 0) return;  // the grid is for the most units that such arrays can have
    const Params params = of_sequence(all, unit);
    const int batch = unit.sequence;
    const int head = unit.head;
    const int first_row = unit.first_row + threadIdx.x / 32 * 16;
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int first_column = lane % 4 * 8;

    const float* tiles = dq_tiles(params, batch, head, first_row);
    element* dq = params.dq + batch * params.dq_batch_stride + head * params.dq_head_stride;
    for (int first_pass = 0; first_pass < kPasses; first_pass += kPassesAtOnce) {
        // Tiles of 16 rows past the sequence's queries are not read: their gradient is 0.
        float rows[kPassesAtOnce][2][8] = {};
#pragma unroll
        for (int pass = 0; pass < kPassesAtOnce; ++pass) {
            if (first_row >= params.seqlen_q) break;
            load_rows(tiles + ((first_pass + pass) * kWarpColumns + first_column) / 8 * kTileElements, g, rows[pass]);
        }
#pragma unroll
        for (int pass = 0; pass < kPassesAtOnce; ++pass) {
            const int column = (first_pass + pass) * kWarpColumns + first_column;
#pragma unroll
            for (int row8 = 0; row8 < 2; ++row8) {
                const int row = first_row + 8 * row8 + g;
                if (row >= unit.rows.count) continue;
                store(dq + row * params.dq_row_stride + column, rows[pass][row8], params.softmax_scale, params.head_dim - column);
            }
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

__device__ __forceinline__ decltype(Params::dq_accum) dq_tiles(const Params& params, int, int head, int row) {
    return params.dq_accum + (first_dq_row(params, head) + row) * kHeadDim;
}

// Rows g and g + 8 of a tile: the elements of four lanes, side by side.
__device__ __forceinline__ void load_rows(const float* tile, int g, float (&rows)[2][8]) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const uint4 words = load_global_128(tile + (16 * g + 4 * t));
        const uint32_t values[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) rows[e / 2][2 * t + e % 2] = __uint_as_float(values[e]);
    }
}

__device__ __forceinline__ void store(element* destination, const float (&values)[8], float scale, int columns_left) {
    if (columns_left <= 0) return;
    store_global_128(destination,
                     {pack<element>(scale * values[0], scale * values[1]), pack<element>(scale * values[2], scale * values[3]),
                      pack<element>(scale * values[4], scale * values[5]), pack<element>(scale * values[6], scale * values[7])});
}

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
    own.dq += unit.rows.begin * params.dq_row_stride;
    own.dq_accum += unit_row_of_sequence<kDqRowUnit>(params, unit.sequence, unit.rows.begin) * kHeadDim;
    return own;
}

static_assert(sizeof(Params) == 72 && offsetof(Params, dq_accum) == 0 && offsetof(Params, dq) == 8);
static_assert(offsetof(Params, cu_seqlens_q) == 16 && offsetof(Params, dq_batch_stride) == 24);
static_assert(offsetof(Params, dq_row_stride) == 32 && offsetof(Params, dq_head_stride) == 40);
static_assert(offsetof(Params, batch_size) == 48 && offsetof(Params, num_heads_q) == 52 && offsetof(Params, rows_q) == 56);
static_assert(offsetof(Params, seqlen_q) == 60 && offsetof(Params, head_dim) == 64 && offsetof(Params, softmax_scale) == 68);
static_assert(kThreads / 32 * 16 == kRowUnit, "each warp has 16 rows of a unit");
static_assert(kHeadDim % kWarpColumns == 0, "columns come by 32");
