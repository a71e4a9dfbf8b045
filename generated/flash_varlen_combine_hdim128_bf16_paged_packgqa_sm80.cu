// flash_varlen_combine_hdim128_bf16_paged_packgqa_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type none, pages paged, splits none, kv_starts none, sinks
//           none, kv_dtype none, gqa packed
// tile      block_m 16, block_n 64, warps 4, row_warps 1, stages 3, min_blocks 2
// block     128 threads, 2080 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 166912 bytes or more of shared memory per block
// spec      flash_varlen_decode_sm80.yaml
// template  flash_varlen_combine_sm80.cu.j2
#include "flashgen/sm80.cuh"

// Adds up the parts of a tile that several thread blocks of the previous kernel have left. Each part but the first has a thread block here, and
// these divide the tile's rows among them.

using element = bf16;

constexpr int kHeadDimV = 128;  // of O
constexpr int kBlockM = 16;  // query rows of a tile of the kernel before this one
constexpr int kBlockN = 64;  // keys of its KV blocks
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kMinBlocks = 7;  // 72 registers: two fit beside two thread blocks of the kernel before this one, if that has up to 184
constexpr int kVectors = kHeadDimV / 4;              // of a row of O in fp32
constexpr int kLaneVectors = (kVectors + 31) / 32;   // of them, the share of a lane
constexpr int kRowThreads = kHeadDimV / 8;           // threads that store a row, 16 bytes each
constexpr int kPartsAtOnce = 5;                      // parts that a warp has on their way from global memory

struct SharedStorage {
    float outputs[kWarps][kHeadDimV];  // what each warp has of O
    float sums[kWarps][2];             // its row_max and row_sum
};
constexpr int kSumsOffset = offsetof(SharedStorage, sums);

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
    int32_t group_size;                   // num_heads_q / num_heads_kv
    int32_t rows_q;                       // of an entry of q: all tokens where sequences are packed
    int32_t batch_size;                   // sequences
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_shares;                   // thread blocks of a set of heads in the main kernel
    int32_t head_sets_log2;               // of the number of sets of heads: 1, 2 or 4
    int32_t heads_per_set;                // heads of a batch entry in a set
    uint64_t group_size_divisor;          // of group_size; see divide()
};

// ==== visible: which keys a row attends to

// Keys [begin, end).
struct KeyRange {
    int begin;
    int end;
};

__device__ KeyRange keys_of_query(const Params& params, int);  // The keys that a query attends to
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

// A tile: kBlockM rows of queries that attend to the keys of one kv head.
// A row is a query. If the heads of a group are packed, it is a (query, head in group) pair, heads fastest. The heads of the grid are the query
// heads; if heads are packed, they are the kv heads.
struct Tile {
    int batch;
    int head;  // query head; if heads are packed, the first of the group
    int first_row;  // below 0 in a tile that begins before the head's first row
};

__device__ int divide(int n, uint64_t divisor);  // n / d for 0 <= n < 2^31
__device__ int query_of_row(const Params& params, int row);  // The query of a row of a tile
__device__ int num_rows(const Params& params);  // Rows of a head of the grid
// The offset of row `row` of the tile's head in an array, in elements from the start of the batch entry
__device__ int64_t row_offset(const Params& params, const Tile& tile, int row, int64_t row_stride, int64_t head_stride);
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

// The heads of the grid form 1, 2 or 4 sets: head h is in set h % sets, where sets is 2^head_sets_log2. The KV blocks of each set are numbered
// and cut into shares by themselves, all sets alike. Thread block b has share b / sets of set b % sets. So neighbouring thread blocks go
// through the same keys of neighbouring heads at about the same time, and in the usual layouts these rows are adjacent in memory.

__device__ int share_of(const Params& params, int thread_block);  // The number of a thread block's share in its set
// Head number `nth_head` of a thread block's set, in the grid
__device__ int head_of_set(const Params& params, int thread_block, int nth_head);
// How many KV blocks the tiles of a sequence have in a set of heads; `params` have the bounds of all sequences
__device__ int count_pieces(const Params& params, const Lengths& lengths);
// KV blocks of a thread block's share; `num_kv_blocks` becomes the sum over the sequences that shares are cut from
__device__ int kv_blocks_per_share(const Params& params, const Lengths& lane_lengths, int& num_kv_blocks, int lane);

// A sequence, its lengths, and the numbers [begin, end) of its pieces.
struct Place {
    int sequence;
    int begin;
    int end;
    Lengths lengths;
};

__device__ Lengths of_lane(const Lengths& lengths, int lane);  // What another lane has
__device__ Place find_place(const Params& params, Lengths lengths, int index, int lane);  // The sequence that piece `index` belongs to
// Tile `tile_index` of a sequence, whose parameters are `params`, among the tiles of the heads that the thread block computes
__device__ Tile find_tile(const Params& params, const Place& place, int tile_index);

// The parts [first, last] of a tile in the workspace, and the rows of the tile that this thread block combines: `count` of them, each step-th
// from `first_row` on. A part is a split, or what one share has of the tile.
struct Parts {
    Tile tile;
    int first;
    int last;
    int set;            // of heads; each set is cut into shares separately
    bool begins_share;  // whether share `first` begins with the tile
    int step;
    int first_row;
    int count;
};

// The rows that the thread block of part `index` of [first, last] combines
__device__ void divide_rows(const Params& params, Parts& parts, int index);
__device__ Params of_sequence(const Params& params, const Place& place);  // The parameters of a call of one sequence alone
// The parts of the tile with which, or within which, a share begins
__device__ Parts find_parts(const Params& params, const Place& place, int per_share, int share);
// Where a row of a share's part lies in the workspace
__device__ int64_t part_row(const Params& params, const Parts& parts, int share, int row);

// O, not divided by row_sum yet, and the row_max (log2 domain) and row_sum that go with it; of O a lane's share.
struct Sums {
    float row_max;
    float row_sum;
    float output[kLaneVectors][4];
};

__device__ void add(Sums& sums, float row_max, float row_sum, const uint4 (&output)[kLaneVectors]);
// Adds every kStep-th part of a row of the tile, from part `first_part` on, in order
template <int kStep> __device__ Sums add_parts(const Params& params, const Parts& parts, int row, int first_part, int lane);
__device__ void share_sums(const Sums& sums, shared_address smem, int warp, int lane);  // Leaves what a warp has of a row in shared memory
// Adds up the sums of a row that kTeam warps from `first` on have left, in the order of the warps
template <int kTeam> __device__ void store_row(const Params& params, const Tile& tile, int row, shared_address smem, int first, int thread);
// Every kTeam warps add up the parts of a row together
template <int kTeam> __device__ void combine_by(const Params& params, const Parts& parts, shared_address smem, int warp, int lane);
// Adds up the parts of the thread block's rows
__device__ void combine(const Params& params, const Parts& parts, shared_address smem, int warp, int lane);

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
flash_varlen_combine_hdim128_bf16_paged_packgqa_sm80(const __grid_constant__ Params all) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address smem = to_shared(shared_memory);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    // Which rows these are takes longer to find than to add up. The lengths are final: the kernel before this one lets it begin
    // only after its own griddepcontrol.wait.
    const Lengths lane_lengths = lengths_of(all, lane);
    int num_kv_blocks;
    const int per_share = kv_blocks_per_share(all, lane_lengths, num_kv_blocks, lane);
    const int share = share_of(all, block_index());
    const bool has_share = share * per_share < num_kv_blocks;  // not where the shares before have all KV blocks
    const Place place = has_share ? find_place(all, lane_lengths, share * per_share, lane) : Place{};
    const Params params = of_sequence(all, place);
    const Parts parts = has_share ? find_parts(params, place, per_share, share) : Parts{};

    // Programmatic dependent launch in the last step of a call: let the next grid start at once. It begins another call. Before its own wait it
    // only prefetches, or reads values that it reads again after the wait. Its wait ends when this grid has ended, which waits for all earlier
    // grids.
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();

    combine(params, parts, smem, warp, lane);
}

// ==== visible: which keys a row attends to

// The keys that a query attends to: all.
__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int) { return {0, params.seqlen_kv}; }
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

__device__ __forceinline__ int query_of_row(const Params& params, int row) {
    return divide(row, params.group_size_divisor);
}

__device__ __forceinline__ int num_rows(const Params& params) { return params.seqlen_q * params.group_size; }

__device__ __forceinline__ int64_t row_offset(const Params& params, const Tile& tile, int row, int64_t row_stride,
                                              int64_t head_stride) {
    const int query = query_of_row(params, row);
    const int head = tile.head + row - query * params.group_size;
    return query * row_stride + head * head_stride;
}

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

__device__ __forceinline__ int share_of(const Params& params, int thread_block) { return thread_block >> params.head_sets_log2; }

__device__ __forceinline__ int head_of_set(const Params& params, int thread_block, int nth_head) {
    return (nth_head << params.head_sets_log2) + (thread_block & ((1 << params.head_sets_log2) - 1));
}

__device__ __forceinline__ int count_pieces(const Params& params, const Lengths& lengths) {
    const Tiles tiles = tiles_of(with_lengths(params, lengths));
    return params.heads_per_set * tiles.row_blocks * tiles.kv_blocks;
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

__device__ __forceinline__ Lengths of_lane(const Lengths& lengths, int lane) {
    Lengths found;
    found.queries.begin = __shfl_sync(0xffffffff, lengths.queries.begin, lane);
    found.queries.count = __shfl_sync(0xffffffff, lengths.queries.count, lane);
    found.keys.begin = 0;
    found.keys.count = __shfl_sync(0xffffffff, lengths.keys.count, lane);
    return found;
}

// The sequence that piece `index` belongs to. `index` is less than the number of pieces. `lengths` are the lengths of the lane's sequence among
// the first 32.
__device__ __forceinline__ Place find_place(const Params& params, Lengths lengths, int index, int lane) {
    int begin = 0;  // of the first of these 32 sequences
    for (int first = 0;; first += 32) {
        const int count = count_pieces(params, lengths);
        const int end = begin + sum_up_to_lane(count, lane);
        const uint32_t beyond = __ballot_sync(0xffffffff, index < end);
        if (beyond != 0) {
            const int found = __ffs(beyond) - 1;
            const int end_of_found = __shfl_sync(0xffffffff, end, found);
            return {first + found, end_of_found - __shfl_sync(0xffffffff, count, found), end_of_found, of_lane(lengths, found)};
        }
        begin = __shfl_sync(0xffffffff, end, 31);
        lengths = lengths_of(params, first + 32 + lane);
    }
}

__device__ __forceinline__ Tile find_tile(const Params& params, const Place& place, int tile_index) {
    const int row_blocks = tiles_of(params).row_blocks;
    const int nth_head = tile_index / row_blocks;
    const int head = head_of_set(params, block_index(), nth_head);  // of the grid
    Tile tile;
    tile.batch = place.sequence;
    tile.head = head * params.group_size;
    tile.first_row = (tile_index - nth_head * row_blocks) * kBlockM;
    return tile;
}

// The rows that the thread block of part `index` of [first, last] combines. The first part has none.
__device__ __forceinline__ void divide_rows(const Params& params, Parts& parts, int index) {
    parts.step = parts.last - parts.first;
    parts.first_row = index - parts.first - 1;
    if (parts.first_row < 0) return;
    const int tile_rows = min(kBlockM, num_rows(params) - parts.tile.first_row);
    parts.count = (tile_rows - parts.first_row + parts.step - 1) / parts.step;
}

// The parameters of a call of one sequence alone: its lengths, and pointers to its first rows.
__device__ __forceinline__ Params of_sequence(const Params& params, const Place& place) {
    const int first_query = place.lengths.queries.begin;
    Params own = with_lengths(params, place.lengths);
    own.out += place.sequence * params.out_batch_stride + first_query * params.out_row_stride;
    if (params.lse != nullptr) own.lse += place.sequence * params.lse_batch_stride + first_query;
    own.out_batch_stride = 0;  // the pointer is for the sequence
    return own;
}

// The parts of the tile with which, or within which, a share begins. `params` are the parameters of its sequence.
__device__ __forceinline__ Parts find_parts(const Params& params, const Place& place, int per_share, int share) {
    const int kv_blocks = tiles_of(params).kv_blocks;
    const int tile = (share * per_share - place.begin) / kv_blocks;
    const int begin = place.begin + tile * kv_blocks;
    Parts parts = {find_tile(params, place, tile)};
    parts.first = begin / per_share;
    parts.last = (begin + kv_blocks - 1) / per_share;
    parts.set = block_index() - (share << params.head_sets_log2);
    parts.begins_share = parts.first * per_share == begin;
    divide_rows(params, parts, share);
    return parts;
}

// Where a row of a share's part lies in the workspace. A thread block leaves the first part of its share in one slot and the last in
// another; what it has of a tile is the first, unless its share begins before the tile.
__device__ __forceinline__ int64_t part_row(const Params& params, const Parts& parts, int share, int row) {
    const int block = (share << params.head_sets_log2) + parts.set;
    const int slot = 2 * block + (share == parts.first && !parts.begins_share ? 1 : 0);
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

__device__ __forceinline__ void share_sums(const Sums& sums, shared_address smem, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
        if (kVectors % 32 != 0 && 32 * i + lane >= kVectors) break;
        store_shared_128(smem + warp * kHeadDimV * 4 + (32 * i + lane) * 16,
                         {__float_as_uint(sums.output[i][0]), __float_as_uint(sums.output[i][1]), __float_as_uint(sums.output[i][2]),
                          __float_as_uint(sums.output[i][3])});
    }
    if (lane == 0) {
        store_shared_64(smem + kSumsOffset + warp * 8, __float_as_uint(sums.row_max), __float_as_uint(sums.row_sum));
    }
}

// Adds up the sums of a row that kTeam warps from `first` on have left, in the order of the warps. Each thread of the row writes eight
// elements of O, the first one LSE as well.
template <int kTeam>
__device__ __forceinline__ void store_row(const Params& params, const Tile& tile, int row, shared_address smem, int first, int thread) {
    const int first_element = thread * 8;
    if (first_element >= params.head_dim_v) return;
    float row_max = kNoRowMax;
#pragma unroll
    for (int i = 0; i < kTeam; ++i) {
        row_max = fmaxf(row_max, __uint_as_float(load_shared_32(smem + kSumsOffset + (first + i) * 8)));
    }
    float row_sum = 0.0f;
    float output[8] = {};
#pragma unroll
    for (int i = 0; i < kTeam; ++i) {
        const int warp = first + i;
        const float factor = rescale_factor(__uint_as_float(load_shared_32(smem + kSumsOffset + warp * 8)), row_max);
        row_sum += __uint_as_float(load_shared_32(smem + kSumsOffset + warp * 8 + 4)) * factor;
        const uint4 low = load_shared_128(smem + (warp * kHeadDimV + first_element) * 4);
        const uint4 high = load_shared_128(smem + (warp * kHeadDimV + first_element) * 4 + 16);
        const uint32_t values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) output[j] += __uint_as_float(values[j]) * factor;
    }
    const RowEnd end = row_end(row_max, row_sum);
    const float factor = end.factor();
    element* out = params.out + tile.batch * params.out_batch_stride +
                   row_offset(params, tile, row, params.out_row_stride, params.out_head_stride);
    store_global_128(out + first_element, {pack<element>(output[0] * factor, output[1] * factor),
                                           pack<element>(output[2] * factor, output[3] * factor),
                                           pack<element>(output[4] * factor, output[5] * factor),
                                           pack<element>(output[6] * factor, output[7] * factor)});
    if (params.lse != nullptr && thread == 0) {
        float* lse = params.lse + row_offset(params, tile, row, 1, params.lse_head_stride);
        store_global_32(lse, end.lse());
    }
}

template <int kTeam>
__device__ __forceinline__ void combine_by(const Params& params, const Parts& parts, shared_address smem, int warp, int lane) {
    constexpr int kRowsAtOnce = kWarps / kTeam;
    for (int first = 0; first < parts.count; first += kRowsAtOnce) {
        const int added = first + warp / kTeam;
        if (added < parts.count) {
            const int row = parts.first_row + added * parts.step;
            share_sums(add_parts<kTeam>(params, parts, row, parts.first + warp % kTeam, lane), smem, warp, lane);
        }
        barrier_sync(kThreads);
        const int team = threadIdx.x / kRowThreads;
        const int stored = first + team;
        if (team < kRowsAtOnce && stored < parts.count) {
            const int row = parts.tile.first_row + parts.first_row + stored * parts.step;
            store_row<kTeam>(params, parts.tile, row, smem, team * kTeam, threadIdx.x % kRowThreads);
        }
        barrier_sync(kThreads);  // the sums have been read
    }
}

// Adds up the parts of the thread block's rows.
// A single row may have many parts. A thread block has several rows only where a tile has more rows than thread blocks that share them,
// one for each part but the first: each of these rows has few parts.
__device__ __forceinline__ void combine(const Params& params, const Parts& parts, shared_address smem, int warp, int lane) {
    if (parts.count == 1) {
        combine_by<kWarps>(params, parts, smem, warp, lane);
    } else {
        combine_by<1>(params, parts, smem, warp, lane);
    }
}

static_assert(kHeadDimV % 8 == 0 && kRowThreads * kWarps <= kThreads, "a row for each warp can be stored at once");
static_assert(sizeof(SharedStorage) == 2080, "launcher and kernel agree on shared memory");
static_assert(sizeof(Params) == 136 && offsetof(Params, part_outputs) == 0 && offsetof(Params, part_sums) == 8);
static_assert(offsetof(Params, out) == 16 && offsetof(Params, lse) == 24 && offsetof(Params, cu_seqlens_q) == 32);
static_assert(offsetof(Params, kv_lengths) == 40 && offsetof(Params, out_batch_stride) == 48);
static_assert(offsetof(Params, out_row_stride) == 56 && offsetof(Params, out_head_stride) == 64);
static_assert(offsetof(Params, lse_batch_stride) == 72 && offsetof(Params, lse_head_stride) == 80);
static_assert(offsetof(Params, group_size) == 88 && offsetof(Params, rows_q) == 92 && offsetof(Params, batch_size) == 96);
static_assert(offsetof(Params, seqlen_q) == 100 && offsetof(Params, seqlen_kv) == 104 && offsetof(Params, head_dim_v) == 108);
static_assert(offsetof(Params, num_shares) == 112 && offsetof(Params, head_sets_log2) == 116);
static_assert(offsetof(Params, heads_per_set) == 120 && offsetof(Params, group_size_divisor) == 128);
