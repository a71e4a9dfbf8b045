// flash_varlen_split_combine_hdim128_bf16_causal_paged_packgqa_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type causal, pages paged, splits none, kv_starts none, sinks
//           none, kv_dtype none, gqa packed
// tile      block_m 192, block_n 64, q_stages 2, stages 3, panel 64, producer_registers 56
// block     256 threads, 0 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      flash_varlen_split_sm90.yaml
// template  flash_combine_rows_sm90.cu.j2
#include "flashgen/sm90.cuh"

// Adds up what several thread blocks of the kernel before this one have left of a tile, and writes O and LSE. Rows are many and parts of a
// row few, so a warp has a row to itself.

using element = bf16;

constexpr int kHeadDimV = 128;  // of O
constexpr int kBlockM = 192;  // query rows of a tile of the kernel before this one
constexpr int kBlockN = 64;  // keys of its KV blocks
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVectors = kHeadDimV / 4;             // of a row of O in fp32
constexpr int kLaneVectors = (kVectors + 31) / 32;  // of them, the share of a lane
constexpr int kPartsAtOnce = 4;                     // parts that a warp has on their way from global memory

struct Params {
    const float* part_outputs;            // (parts, kBlockM, kHeadDimV): O, not divided by row_sum; null where no tile is split
    const float* part_sums;               // (parts, kBlockM, 2): row_max, log2 domain, and row_sum
    element* out;                         // (batch_q, rows_q, num_heads_q, head_dim_v); rows 16-byte aligned
    float* lse;                           // (batch_q, num_heads_q, rows_q); may be null; natural logarithm
    const int32_t* cu_seqlens_q;          // (boundaries,); may be null; null where queries are padded
    const int32_t* kv_lengths;            // (batch,); may be null; null where cu_seqlens_kv has them, or all have seqlen_kv
    int64_t out_batch_stride;             // strides are in elements
    int64_t out_row_stride;
    int64_t out_head_stride;
    int64_t lse_batch_stride;             // strides are in elements
    int64_t lse_head_stride;
    int32_t num_heads_kv;
    int32_t group_size;                   // num_heads_q / num_heads_kv
    int32_t rows_q;                       // of an entry of q: all tokens where sequences are packed
    int32_t batch_size;                   // sequences
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    int32_t num_tiles;                    // tiles of the grid
    int32_t num_shares;                   // thread blocks of a set of heads in the main kernel
    uint64_t num_heads_divisor;           // of the heads of a batch entry in the grid; see divide()
    uint64_t num_row_blocks_divisor;      // of num_row_blocks; see divide()
    uint64_t group_size_divisor;          // of group_size; see divide()
    int32_t diagonal_offset;              // query i is aligned with key i + diagonal_offset
};

// ==== visible: which keys a row attends to

// Keys [begin, end).
struct KeyRange {
    int begin;
    int end;
};

__device__ KeyRange keys_of_query(const Params& params, int query);  // The keys that a query attends to
// ====

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

__device__ int divide(int n, uint64_t divisor);  // n / d for 0 <= n < 2^31

// Which thread blocks of the kernel before this one had parts of a tile.
struct Parts {
    int first;
    int last;
    bool begins_share;  // whether the share of thread block `first` begins with the tile
};

// A row of the tiles of a head.
struct Row {
    int batch;
    int head;  // of the queries
    int row_in_tile;
    int row_in_entry;  // of out and lse, in which the sequence may be one of several
    Parts parts;  // of its tile
};

__device__ int num_rows(const Params& params);  // Rows of a head of the grid
__device__ int query_of_row(const Params& params, int row);  // The query of a row of a tile
__device__ int rows_of_head(const Params& params);  // The rows of a head in this grid
__device__ int load_clamped(const int32_t* values, int index, int most);  // A length, or the number of a row, from global memory

// Rows of an entry of an array: where they begin, and how many there are.
struct Rows {
    int begin;
    int count;
};

__device__ Rows packed_rows(const int32_t* cu_seqlens, int sequence, int rows, int most);  // The rows of a sequence among packed sequences
__device__ Rows queries_of(const Params& params, int sequence);  // The queries of a sequence
__device__ Rows keys_of(const Params& params, int sequence);  // The keys of a sequence
__device__ Params with_lengths(const Params& params, int seqlen_q, int seqlen_kv);  // The parameters for a sequence of these lengths

// Where the queries and the keys of a sequence are.
struct Lengths {
    Rows queries;
    Rows keys;
};

__device__ Lengths lengths_of(const Params& params, int sequence);  // The lengths of a sequence
__device__ Params with_lengths(const Params& params, const Lengths& lengths);  // The parameters for a sequence of these lengths
__device__ int sum_up_to_lane(int value, int lane);  // The sum over the lanes up to this one

// The tiles of a sequence: of each head of the grid `row_blocks`, each with KV blocks [first_kv_block, first_kv_block + kv_blocks).
// These are the KV blocks that some query of the sequence sees. The rows of one tile may see fewer.
struct Tiles {
    int row_blocks;
    int first_kv_block;
    int kv_blocks;  // at least one, so that a thread block writes the rows of a tile without keys

    __device__ __forceinline__ int pieces() const { return kv_blocks; }  // of a tile, as shares have them
};

__device__ Tiles tiles_of(const Params& params);  // The tiles of a sequence
__device__ int num_heads(const Params& params);
// How many pieces all tiles of a sequence have; `params` have the bounds of all sequences
__device__ int count_pieces(const Params& params, const Lengths& lengths);
// KV blocks of a thread block's share; `num_kv_blocks` becomes the sum over the sequences that shares are cut from
__device__ int kv_blocks_per_share(const Params& params, const Lengths& lane_lengths, int& num_kv_blocks, int lane);

// KV blocks of a share, and how many KV blocks all sequences before number `sequence` have.
struct KvBlockCounts {
    int per_share;
    int sequence;
    int before;
};

// Goes on to a sequence that is not before the last one
__device__ void advance_to(const Params& params, KvBlockCounts& counts, int sequence, int lane);
// Row `index` of the grid, which has num_row_blocks rows for each head of each sequence
__device__ Row find_row(const Params& params, KvBlockCounts& counts, int index, int lane);
// Where a row of a thread block's part lies in the workspace
__device__ int64_t part_row(const Params&, const Parts& parts, int block, int row);

// O, not divided by row_sum yet, and the row_max (log2 domain) and row_sum that go with it; of O a lane's share.
struct Sums {
    float row_max;
    float row_sum;
    float output[kLaneVectors][4];
};

__device__ void add(Sums& sums, float row_max, float row_sum, const uint4 (&output)[kLaneVectors]);
// Adds every kStep-th part of a row of the tile, from part `first_part` on, in order
template <int kStep> __device__ Sums add_parts(const Params& params, const Parts& parts, int row, int first_part, int lane);
// Writes O of a row, four elements a lane, and the first lane LSE
__device__ void store_row(const Params& params, const Row& row, const Sums& sums, int lane);

extern "C" __global__ void __launch_bounds__(kThreads)
flash_varlen_split_combine_hdim128_bf16_causal_paged_packgqa_sm90(const __grid_constant__ Params params) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    int num_kv_blocks;
    KvBlockCounts counts = {kv_blocks_per_share(params, lengths_of(params, lane), num_kv_blocks, lane), 0, 0};
    for (int index = block_index() * kWarps + warp; index < params.num_tiles; index += kWarps * int(gridDim.x)) {
        const Row row = find_row(params, counts, index, lane);
        if (row.parts.first == row.parts.last) continue;  // the one thread block that had the tile has written the row
        store_row(params, row, add_parts<1>(params, row.parts, row.row_in_tile, row.parts.first, lane), lane);
    }
}

// ==== visible: which keys a row attends to

// The keys that a query attends to: those up to its diagonal.
__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int query) {
    return {0, max(0, min(params.seqlen_kv, query + params.diagonal_offset + 1))};
}
// ====

// The factor of O and row_sum when row_max rises to `larger`. If both are infinite their difference is NaN; fminf makes the factor 1.
__device__ __forceinline__ float rescale_factor(float row_max, float larger) { return exp2_approx(fminf(row_max - larger, 0.0f)); }

// ==== row_end: the factor of O and the LSE, after the last key of a row

__device__ __forceinline__ RowEnd row_end(float row_max, float row_sum) { return {row_max, row_sum}; }
// ====

// n / d for 0 <= n < 2^31. The launcher computes `divisor` from d: a multiplier in the lower half, and in the upper half the shift that follows.
// Dividing by a number that the compiler does not know takes about 20 dependent instructions.
__device__ __forceinline__ int divide(int n, uint64_t divisor) {
    return uint64_t(uint32_t(n)) * uint32_t(divisor) >> (divisor >> 32);
}

__device__ __forceinline__ int num_rows(const Params& params) { return params.seqlen_q * params.group_size; }

__device__ __forceinline__ int query_of_row(const Params& params, int row) {
    return divide(row, params.group_size_divisor);
}

// The rows of a head in this grid. The launcher counts single rows as tiles here, so num_row_blocks is a number of rows.
__device__ __forceinline__ int rows_of_head(const Params& params) { return params.num_row_blocks; }

// A length, or the number of a row, from global memory. One out of range is clamped, so that it cannot reach other memory.
__device__ __forceinline__ int load_clamped(const int32_t* values, int index, int most) {
    return max(0, min(most, int(load_global_32(values + index))));
}

__device__ __forceinline__ Rows packed_rows(const int32_t* cu_seqlens, int sequence, int rows, int most) {
    const int begin = load_clamped(cu_seqlens, sequence, rows);
    return {begin, max(0, min(most, load_clamped(cu_seqlens, sequence + 1, rows) - begin))};
}

__device__ __forceinline__ Rows queries_of(const Params& params, int sequence) {
    if (params.cu_seqlens_q == nullptr) return {0, params.seqlen_q};
    return packed_rows(params.cu_seqlens_q, sequence, params.rows_q, params.seqlen_q);
}

__device__ __forceinline__ Rows keys_of(const Params& params, int sequence) {
    return {0, load_clamped(params.kv_lengths, sequence, params.seqlen_kv)};
}

// The parameters for a sequence of these lengths: under a diagonal its last query is aligned with its last key, shifted by the diagonal_offset of
// the call. `params` has the bounds of all sequences.
__device__ __forceinline__ Params with_lengths(const Params& params, int seqlen_q, int seqlen_kv) {
    Params own = params;
    own.seqlen_q = seqlen_q;
    own.seqlen_kv = seqlen_kv;
    own.diagonal_offset += seqlen_kv - seqlen_q;
    return own;
}

// The lengths of a sequence.
// All are 0 if there is no such sequence.
__device__ __forceinline__ Lengths lengths_of(const Params& params, int sequence) {
    if (sequence >= params.batch_size) return {};
    return {queries_of(params, sequence), keys_of(params, sequence)};
}

// The parameters for a sequence of these lengths. `params` has the bounds of all sequences.
__device__ __forceinline__ Params with_lengths(const Params& params, const Lengths& lengths) {
    return with_lengths(params, lengths.queries.count, lengths.keys.count);
}

__device__ __forceinline__ int sum_up_to_lane(int value, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(0xffffffff, value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}

// The tiles of a sequence.
// `params` are the parameters of the sequence.
__device__ __forceinline__ Tiles tiles_of(const Params& params) {
    if (params.seqlen_q == 0) return {0, 0, 1};
    const int begin = keys_of_query(params, 0).begin / kBlockN;
    const int end = (keys_of_query(params, params.seqlen_q - 1).end + kBlockN - 1) / kBlockN;
    return {(num_rows(params) + kBlockM - 1) / kBlockM, begin, max(1, end - begin)};
}

__device__ __forceinline__ int num_heads(const Params& params) {
    return params.num_heads_kv;
}

__device__ __forceinline__ int count_pieces(const Params& params, const Lengths& lengths) {
    const Tiles tiles = tiles_of(with_lengths(params, lengths));
    return num_heads(params) * tiles.row_blocks * tiles.pieces();
}

// KV blocks of a thread block's share; `num_kv_blocks` becomes the sum over the sequences that shares are cut from. Each lane counts every 32nd
// sequence; `lane_lengths` are the lengths of its first one.
__device__ __forceinline__ int kv_blocks_per_share(const Params& params, const Lengths& lane_lengths, int& num_kv_blocks, int lane) {
    int count = count_pieces(params, lane_lengths);
#pragma unroll 4  // several lengths on their way from global memory
    for (int sequence = lane + 32; sequence < params.batch_size; sequence += 32) {
        count += count_pieces(params, lengths_of(params, sequence));
    }
    num_kv_blocks = __shfl_sync(0xffffffff, sum_up_to_lane(count, lane), 31);
    return max(1, (num_kv_blocks + params.num_shares - 1) / params.num_shares);
}

// Goes on to a sequence that is not before the last one. All lanes of the warp call it.
__device__ __forceinline__ void advance_to(const Params& params, KvBlockCounts& counts, int sequence, int lane) {
    for (; counts.sequence < sequence; counts.sequence += 32) {
        const int other = counts.sequence + lane;
        const int count = other < sequence ? count_pieces(params, lengths_of(params, other)) : 0;
        counts.before += __shfl_sync(0xffffffff, sum_up_to_lane(count, lane), 31);
    }
    counts.sequence = sequence;
}

// Row `index` of the grid, which has num_row_blocks rows for each head of each sequence: the most that one may have. The shares are
// consecutive KV blocks of all tiles, one tile after the other. A row that its sequence does not have has one part, so nothing is added.
__device__ __forceinline__ Row find_row(const Params& params, KvBlockCounts& counts, int index, int lane) {
    const int head_of_batch = divide(index, params.num_row_blocks_divisor);
    const int row_of_head = index - head_of_batch * rows_of_head(params);
    Row row;
    row.batch = divide(head_of_batch, params.num_heads_divisor);
    const int grid_head = head_of_batch - row.batch * num_heads(params);
    advance_to(params, counts, row.batch, lane);
    const Lengths lengths = lengths_of(params, row.batch);
    const Params own = with_lengths(params, lengths);
    const Tiles tiles = tiles_of(own);
    const int query = query_of_row(params, row_of_head);
    row.head = grid_head * params.group_size + row_of_head - query * params.group_size;
    row.row_in_tile = row_of_head % kBlockM;
    const int begin = counts.before + (grid_head * tiles.row_blocks + row_of_head / kBlockM) * tiles.kv_blocks;
    Parts& parts = row.parts;
    parts.first = begin / counts.per_share;
    parts.last = row_of_head < num_rows(own) ? (begin + tiles.kv_blocks - 1) / counts.per_share : parts.first;
    parts.begins_share = parts.first * counts.per_share == begin;
    row.row_in_entry = lengths.queries.begin + query;
    return row;
}

// Where a row of a thread block's part lies in the workspace. A thread block leaves the first part of its share in one slot and the last
// in another; what it has of a tile is the first, unless its share begins before the tile.
__device__ __forceinline__ int64_t part_row(const Params&, const Parts& parts, int block, int row) {
    const int slot = 2 * block + (block == parts.first && !parts.begins_share ? 1 : 0);
    return int64_t(slot) * kBlockM + row;
}

__device__ __forceinline__ void add(Sums& sums, float row_max, float row_sum, const uint4 (&output)[kLaneVectors]) {
    const float larger = fmaxf(sums.row_max, row_max);
    const float own_factor = rescale_factor(sums.row_max, larger);
    const float other_factor = rescale_factor(row_max, larger);
    sums.row_max = larger;
    sums.row_sum = sums.row_sum * own_factor + row_sum * other_factor;
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
        sums.output[i][0] = sums.output[i][0] * own_factor + __uint_as_float(output[i].x) * other_factor;
        sums.output[i][1] = sums.output[i][1] * own_factor + __uint_as_float(output[i].y) * other_factor;
        sums.output[i][2] = sums.output[i][2] * own_factor + __uint_as_float(output[i].z) * other_factor;
        sums.output[i][3] = sums.output[i][3] * own_factor + __uint_as_float(output[i].w) * other_factor;
    }
}

template <int kStep>
__device__ __forceinline__ Sums add_parts(const Params& params, const Parts& parts, int row, int first_part, int lane) {
    Sums sums = {kNoRowMax, 0.0f, {}};
    for (int first = first_part; first <= parts.last; first += kStep * kPartsAtOnce) {
        // All loads are started before the first one is used.
        float2 loaded[kPartsAtOnce];
        uint4 output[kPartsAtOnce][kLaneVectors];
#pragma unroll
        for (int part = 0; part < kPartsAtOnce; ++part) {
            if (first + part * kStep > parts.last) break;
            const int64_t source = part_row(params, parts, first + part * kStep, row);
            loaded[part] = load_global_64(params.part_sums + source * 2);
#pragma unroll
            for (int i = 0; i < kLaneVectors; ++i) {
                if (kVectors % 32 != 0 && 32 * i + lane >= kVectors) break;
                output[part][i] = load_global_128(params.part_outputs + source * kHeadDimV + (32 * i + lane) * 4);
            }
        }
#pragma unroll
        for (int part = 0; part < kPartsAtOnce; ++part) {
            if (first + part * kStep > parts.last) break;
            add(sums, loaded[part].x, loaded[part].y, output[part]);
        }
    }
    return sums;
}

__device__ __forceinline__ void store_row(const Params& params, const Row& row, const Sums& sums, int lane) {
    const RowEnd end = row_end(sums.row_max, sums.row_sum);
    const float factor = end.factor();
    element* out = params.out + row.batch * params.out_batch_stride + row.row_in_entry * params.out_row_stride +
                   row.head * params.out_head_stride;
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
        const int column = (32 * i + lane) * 4;
        if (column >= params.head_dim_v) break;
        store_global_32(out + column, pack<element>(sums.output[i][0] * factor, sums.output[i][1] * factor));
        store_global_32(out + column + 2, pack<element>(sums.output[i][2] * factor, sums.output[i][3] * factor));
    }
    if (params.lse != nullptr && lane == 0) {
        const int64_t lse_row = row.batch * params.lse_batch_stride + row.head * params.lse_head_stride + row.row_in_entry;
        store_global_32(params.lse + lse_row, end.lse());
    }
}

static_assert(kHeadDimV % 4 == 0, "a lane stores four elements of a row");
static_assert(sizeof(Params) == 160 && offsetof(Params, part_outputs) == 0 && offsetof(Params, part_sums) == 8);
static_assert(offsetof(Params, out) == 16 && offsetof(Params, lse) == 24 && offsetof(Params, cu_seqlens_q) == 32);
static_assert(offsetof(Params, kv_lengths) == 40 && offsetof(Params, out_batch_stride) == 48);
static_assert(offsetof(Params, out_row_stride) == 56 && offsetof(Params, out_head_stride) == 64);
static_assert(offsetof(Params, lse_batch_stride) == 72 && offsetof(Params, lse_head_stride) == 80);
static_assert(offsetof(Params, num_heads_kv) == 88 && offsetof(Params, group_size) == 92 && offsetof(Params, rows_q) == 96);
static_assert(offsetof(Params, batch_size) == 100 && offsetof(Params, seqlen_q) == 104 && offsetof(Params, seqlen_kv) == 108);
static_assert(offsetof(Params, head_dim_v) == 112 && offsetof(Params, num_row_blocks) == 116);
static_assert(offsetof(Params, num_tiles) == 120 && offsetof(Params, num_shares) == 124);
static_assert(offsetof(Params, num_heads_divisor) == 128 && offsetof(Params, num_row_blocks_divisor) == 136);
static_assert(offsetof(Params, group_size_divisor) == 144 && offsetof(Params, diagonal_offset) == 152);
