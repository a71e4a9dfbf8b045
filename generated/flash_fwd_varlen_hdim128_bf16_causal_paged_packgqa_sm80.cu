// flash_fwd_varlen_hdim128_bf16_causal_paged_packgqa_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type causal, pages paged, kv_starts none, sinks none, dropout
//           none, kv_dtype none, gqa packed
// tile      block_m 128, block_n 32, warps 4, loop stages, min_blocks 2
// block     128 threads, 49168 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 101376 bytes or more of shared memory per block
// spec      flash_fwd_varlen_sm80.yaml
// template  flash_fwd_varlen_sm80.cu.j2
#include "flashgen/sm80.cuh"

// A thread block has kBlockM rows of queries that attend to the keys of one kv head. It visits the KV blocks that these rows attend to, the
// last one first:
//
//     S = Q K^T    P = 2^(scale_log2 S - row_max)    row_sum += sums of P's rows    O += P V
//
// row_max tracks the largest score of each row (online softmax). When it rises, row_sum and O are rescaled. At the end O is divided by row_sum.
//
// Map
//   warps             kWarps = 4. Each copies a share of Q, K and V (cp.async) and computes rows of the tile: main_loop()
//   shared memory     SharedStorage, 49168 bytes: Q, kBlockM = 128 rows of kRowBytes = 256; the stages of K and of V, kStageBytes = 8192 each.
//                     O is staged in the rows of Q
//   barrier           barrier_sync(kThreads): all warps, before they read data that other warps copied, and before it is overwritten

using element = bf16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kHeadDimV = 128;  // of V and O
constexpr int kBlockM = 128;  // query rows of a tile
constexpr int kBlockN = 32;  // keys of a KV block
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

constexpr int kWarpRows = kBlockM / kWarps;  // a warp has whole rows, so softmax needs no other warp
constexpr int kKeyTiles = kBlockN / 8;       // MMA tiles of S along the keys
constexpr int kDimTiles = kHeadDimV / 8;     // MMA tiles of O along the head dimension
constexpr int kRowTiles = kWarpRows / 16;    // MMA tiles of a warp along its rows
constexpr int kRowTileStep = 16;             // rows from a warp's MMA tile to its next

constexpr int kKStages = 1;                  // blocks of K in shared memory
constexpr int kVStages = 1;                  // and of V
constexpr int kCopyThreads = kThreads;       // all threads share the copy of a block of K or V

// Rows of V are as long as rows of K, also where V has fewer columns.
struct SharedStorage {
    element q[kBlockM][kHeadDim];
    element k[kKStages][kBlockN][kHeadDim];
    element v[kVStages][kBlockN][kHeadDim];
    int32_t tile[4];  // the Tile: stash_tile()
};
constexpr int kRowBytes = kHeadDim * sizeof(element);
constexpr int kStageBytes = kBlockN * kRowBytes;
constexpr int kKOffset = offsetof(SharedStorage, k);
constexpr int kVOffset = offsetof(SharedStorage, v);
constexpr int kTileOffset = offsetof(SharedStorage, tile);

struct Params {
    const element* q;                     // (batch_q, rows_q, num_heads_q, head_dim); rows 16-byte aligned
    const element* k;                     // (batch_kv, rows_kv, num_heads_kv, head_dim); rows 16-byte aligned
    const element* v;                     // (batch_kv, rows_kv, num_heads_kv, head_dim_v); rows 16-byte aligned
    element* out;                         // (batch_q, rows_q, num_heads_q, head_dim_v); rows 16-byte aligned
    float* lse;                           // (batch_q, num_heads_q, rows_q); may be null; natural logarithm
    const int32_t* cu_seqlens_q;          // (boundaries,); may be null; null where queries are padded
    const int32_t* kv_lengths;            // (batch,); may be null; null where cu_seqlens_kv has them, or all have seqlen_kv
    const int32_t* pages;                 // (batch, max_pages); entries past the last key are never read
    int64_t q_batch_stride;               // strides are in elements
    int64_t q_row_stride;
    int64_t q_head_stride;
    int64_t k_batch_stride;               // strides are in elements
    int64_t k_row_stride;
    int64_t k_head_stride;
    int64_t v_batch_stride;               // strides are in elements
    int64_t v_row_stride;
    int64_t v_head_stride;
    int64_t out_batch_stride;             // strides are in elements
    int64_t out_row_stride;
    int64_t out_head_stride;
    int64_t lse_batch_stride;             // strides are in elements
    int64_t lse_head_stride;
    int64_t pages_batch_stride;           // strides are in elements
    int32_t batch_size;                   // sequences
    int32_t num_heads_kv;
    int32_t group_size;                   // num_heads_q / num_heads_kv
    int32_t rows_q;                       // of an entry of q: all tokens where sequences are packed
    int32_t batch_kv;                     // entries of k: of a paged cache its pages
    int32_t page_size;                    // keys of a page
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    uint64_t num_heads_divisor;           // of the heads of a batch entry in the grid; see divide()
    uint64_t group_size_divisor;          // of group_size; see divide()
    uint64_t page_size_divisor;           // of page_size; see divide()
    int32_t diagonal_offset;              // query i is aligned with key i + diagonal_offset
    float scale_log2;                     // softmax_scale * log2(e), above 0
};

// A tile: kBlockM rows of queries that attend to the keys of one kv head.
// A row is a query. If the heads of a group are packed, it is a (query, head in group) pair, heads fastest. The heads of the grid are the query
// heads; if heads are packed, they are the kv heads.
struct Tile {
    int batch;
    int head;  // query head; if heads are packed, the first of the group
    int kv_head;
    int first_row;  // below 0 in a tile that begins before the head's first row
};

__device__ int divide(int n, uint64_t divisor);  // n / d for 0 <= n < 2^31
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
__device__ Params of_sequence(const Params& params, int sequence, const Lengths& lengths);  // The parameters of a call of one sequence alone
__device__ int sum_up_to_lane(int value, int lane);  // The sum over the lanes up to this one

// kBlockM rows of one sequence, and the head of the grid that a thread block takes them for.
struct RowBlock {
    int sequence;  // below 0: none
    int head;
    int index;  // in the sequence
};

__device__ RowBlock find_row_block(const Params& params, int index, int lane);  // The row block of a thread block
__device__ Tile tile_of(const Params& params, const RowBlock& row_block);
__device__ int num_rows(const Params& params);  // Rows of a head of the grid
__device__ int query_of_row(const Params& params, int row);  // The query of a row of a tile
// The offset of row `row` of the tile's head in an array, in elements from the start of the batch entry
__device__ int64_t row_offset(const Params& params, const Tile& tile, int row, int64_t row_stride, int64_t head_stride);
// Visits the scores of S with their rows and keys
template <int kTiles, typename AtRow> __device__ void for_each_score(float (&scores)[kTiles][kKeyTiles][4], int first_row, int first_key,
    int lane, AtRow at_row);

// ==== visible: which keys a row attends to, and which blocks of keys need a mask

// Keys [begin, end).
struct KeyRange {
    int begin;
    int end;
};

__device__ KeyRange keys_of_query(const Params& params, int query);  // The keys that a query attends to
// The union of the key ranges of rows [first_row, first_row + count)
__device__ KeyRange keys_of_some(const Params& params, int first_row, int count);
// The intersection of the key ranges of rows [first_row, first_row + count)
__device__ KeyRange keys_of_every(const Params& params, int first_row, int count);
// Masks the keys outside the range of their row
template <int kTiles> __device__ void apply_mask(const Params& params, const Tile&, float (&scores)[kTiles][kKeyTiles][4], int first_row,
    int first_key, int lane);
// ====

// Finishes the scores of a KV block between Q K^T and softmax
template <int kTiles> __device__ void finish_scores(const Params& params, const Tile& tile, float (&scores)[kTiles][kKeyTiles][4],
    int row_in_tile, int first_key, int lane);

// KV blocks, visited from the last to the first, so that a ragged last block comes before the steady state.
struct KvBlocks {
    int first;
    int last;  // less than `first` if there are no blocks
};

// The KV blocks that rows [first_row, first_row + count) attend to
__device__ KvBlocks kv_blocks_of(const Params& params, int first_row, int count);

// The rows of a block of keys that at least one query of the sequence attends to: the rows before `end`.
struct SeenRows {
    int end;

    __device__ __forceinline__ bool has(int row) const { return row < end; }

    // The same rows, counted from `row`.
    __device__ __forceinline__ SeenRows from(int row) const { return {end - row}; }

    // Only the rows before `count`.
    __device__ __forceinline__ SeenRows among(int count) const { return {min(end, count)}; }
};

__device__ SeenRows seen_rows(const Params& params, int first_key);  // The rows of the block that begins at `first_key`

// Shared memory is written and read in chunks of 16 bytes. The chunks of a row are permuted by its row number. ldmatrix reads one logical column
// of eight consecutive rows at a time; after the permutation these eight chunks are in eight different groups of banks.
constexpr int kChunkElements = 16 / sizeof(element);
constexpr int kSwizzleChunks = kRowBytes % 128 == 0 ? 8 : kRowBytes % 64 == 0 ? 4 : 2;
constexpr int kSwizzleBytes = 16 * kSwizzleChunks;

__device__ int swizzle_key(int row);  // The number by which the chunks of a row are permuted

// The address of a lane's part of the first MMA fragment in a row. Adding an offset to it must not change the bits that step_address() XORs.
using LaneAddress = shared_address;

__device__ LaneAddress lane_address(shared_address block, int row, int chunk);  // The address of a 16-byte chunk of a row
// The address `row_step` rows down (a multiple of 8) and `chunk_pair` pairs of chunks to the right
__device__ shared_address step_address(LaneAddress lane, int row_step, int chunk_pair);
__device__ LaneAddress qv_lane_address(shared_address block, int lane);  // For ldmatrix of Q and, transposed, of V
__device__ LaneAddress k_lane_address(shared_address block, int lane);  // For ldmatrix of K, whose rows are the columns of the MMA
__device__ int first_row_of(int warp);  // A warp's first row in the tile
__device__ const element* head_k(const Params& params, const Tile& tile);  // Where K of the tile's head begins in page 0
__device__ const element* head_v(const Params& params, const Tile& tile);  // Where V of the tile's head begins
// Starts the copy of the keys of a KV block of K or V, kColumns wide, into shared memory
template <int kColumns> __device__ void copy_rows(const Params& params, shared_address block, const element* head, int64_t page_stride,
    int64_t row_stride, int first_key, const SeenRows& rows, int head_dim);
// Starts the copy of KV block `block` of a head of K, and of V
__device__ void copy_k(const Params& params, const element* k, shared_address stage, int block);
__device__ void copy_v(const Params& params, const element* v, shared_address stage, int block);
__device__ void load_q(const Params& params, const Tile& tile, shared_address smem);  // Starts the copy of the tile's rows of Q
// Stashes the tile in shared memory, because registers have no room for it
__device__ void stash_tile(const Tile& tile, shared_address smem);
__device__ Tile stashed_tile(shared_address smem);  // The tile that was stashed

// Online softmax. An element of P is 2^(score * scale_log2 - row_max): one multiply-add and one exponential. scale_log2 includes log2(e).
// row_max is raised only when some row of the warp exceeds it by more than kSlack; then it is raised for all of the warp's rows. P can
// reach 2^kSlack. O and row_sum carry the same factor, so nothing is lost, and most blocks need no rescale and no quad reduction.
constexpr float kSlack = 8.0f;

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

__device__ float quad_max(float value);  // The maximum over the four lanes of a quad
__device__ float quad_sum(float value);  // The sum over the four lanes of a quad

// The state that a warp keeps of 16 of its rows, an MMA tile. The four lanes of quad g hold rows g and g + 8.
struct RowTile {
    float row_max[2];  // log2 domain
    float row_sum[2];  // this lane's share
    float output[kDimTiles][4];
};

__device__ void clear(RowTile (&rows)[kRowTiles]);  // Clears rows
__device__ void rescale(RowTile& rows, const float (&correction)[2]);  // Multiplies O and row_sum of both rows
// S = Q . K^T of kTiles MMA tiles of rows, in fp32
template <int kTiles> __device__ void mma_qk(float (&scores)[kTiles][kKeyTiles][4], const LaneAddress& q_lane, const LaneAddress& k_lane);

// P of kTiles MMA tiles of rows, rounded and packed as it comes out of softmax: the A fragment. The accumulator layout of two
// neighbouring key tiles is the A layout of one 16x16 tile.
template <int kTiles>
struct P {
    uint32_t fragment[kTiles][kKeyTiles / 2][4];

    __device__ __forceinline__ void set(int i, int j, const float (&values)[4]) {
        fragment[i][j / 2][j % 2 * 2] = pack<element>(values[0], values[1]);
        fragment[i][j / 2][j % 2 * 2 + 1] = pack<element>(values[2], values[3]);
    }
};

using VAddress = LaneAddress;

__device__ VAddress v_address(shared_address block, int lane);  // For the loads of V by mma_pv()
template <int kTiles> __device__ void mma_pv(RowTile* rows, const P<kTiles>& p, const VAddress& v_lane);  // O += P . V
// Computes, for each row, the row_max that this lane's scores need
template <int kTiles> __device__ bool exceeds_row_max(const float (&scores)[kTiles][kKeyTiles][4], const RowTile* rows, float scale_log2,
    float (&block_max)[kTiles][2]);
// Raises row_max to the maxima of a block, and rescales O and row_sum
template <int kTiles> __device__ void raise_row_max(const float (&block_max)[kTiles][2], RowTile* rows);
// Computes P of the scores, and adds it to row_sum
template <int kTiles> __device__ void exponentiate(const float (&scores)[kTiles][kKeyTiles][4], RowTile* rows, float scale_log2,
    P<kTiles>& p);
// A step of online softmax
template <int kTiles> __device__ void softmax_step(const float (&scores)[kTiles][kKeyTiles][4], RowTile* rows, float scale_log2,
    P<kTiles>& p);
__device__ void normalise(RowTile (&rows)[kRowTiles]);  // Divides O by the complete row_sum
// Writes the LSE of each row, natural logarithm; -inf for a row that attends to nothing
__device__ void store_lse(const Params& params, const Tile& tile, const RowTile (&rows)[kRowTiles], int warp, int lane);
// Rounds O and puts it into the Q tile
__device__ void stage_output(const RowTile (&rows)[kRowTiles], shared_address smem, int warp, int lane);
// Writes O by way of the Q tile, so that global memory sees whole rows in 16-byte vectors
__device__ void store_output(const Params& params, const Tile& tile, const RowTile (&rows)[kRowTiles], shared_address smem, int warp,
    int lane);

// The main loop: S, softmax and P V of one KV block after another. K and V have one stage each: V of a block is fetched
// while its scores are computed, K of the next block during P . V of this one. Other thread blocks of the SM, where there is room for
// them, fill the gaps.
__device__ __forceinline__ void main_loop(const Params& params, const Tile& tile, const KvBlocks& blocks, RowTile (&rows)[kRowTiles],
                                          shared_address smem, int warp, int lane) {
    const shared_address k_stage = smem + kKOffset;
    const shared_address v_stage = smem + kVOffset;
    const element* k = head_k(params, tile);
    const element* v = head_v(params, tile);
    const LaneAddress q_lane = qv_lane_address(smem + first_row_of(warp) * kRowBytes, lane);
    const LaneAddress k_lane = k_lane_address(k_stage, lane);
    const VAddress v_lane = v_address(v_stage, lane);
    // The blocks with a key that some row of this warp attends to.
    const KvBlocks warp_blocks = kv_blocks_of(params, min(tile.first_row + first_row_of(warp), num_rows(params) - 1), kWarpRows);

    auto fetch_k = [&](int block) {
        copy_k(params, k, k_stage, block);
        cp_async_commit();
    };
    auto compute_p = [&](P<kRowTiles>& p, int block) {
        float scores[kRowTiles][kKeyTiles][4];
        mma_qk(scores, q_lane, k_lane);
        finish_scores(params, tile, scores, first_row_of(warp), block * kBlockN, lane);
        softmax_step(scores, rows, params.scale_log2, p);
    };

    if (blocks.last >= blocks.first) {
        load_q(params, tile, smem);
        fetch_k(blocks.last);
    } else {
        barrier_sync(kThreads);  // the stash is written; a tile without keys passes no other barrier
    }

    for (int block = blocks.last; block >= blocks.first; --block) {
        // 1. Wait for K, and for every warp to finish with V of the previous block. Start the copy of V.
        cp_async_wait<0>();
        barrier_sync(kThreads);
        copy_v(params, v, v_stage, block);
        cp_async_commit();

        // 2. S = Q K^T, softmax, while V is copied. A warp whose rows see no key of the block skips it.
        P<kRowTiles> p;
        const bool sees = block >= warp_blocks.first && block <= warp_blocks.last;
        if (sees) compute_p(p, block);

        // 3. Wait for V, and for every warp to finish with K. Start the copy of the next K.
        cp_async_wait<0>();
        barrier_sync(kThreads);
        if (block > blocks.first) fetch_k(block - 1);

        // 4. O += P V, while the next K is copied.
        if (sees) mma_pv(rows, p, v_lane);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
flash_fwd_varlen_hdim128_bf16_causal_paged_packgqa_sm80(const __grid_constant__ Params all) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address smem = to_shared(shared_memory);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    // The wait comes first: lengths may be results of the grid before.
    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    const RowBlock row_block = find_row_block(all, block_index(), lane);
    if (row_block.sequence < 0) return;  // the grid is for the most row blocks that such arrays can have
    const Params params = of_sequence(all, row_block.sequence, lengths_of(all, row_block.sequence));
    const Tile tile = tile_of(params, row_block);
    if (threadIdx.x == 0) stash_tile(tile, smem);  // registers have no room for it during the loop
    const KvBlocks blocks = kv_blocks_of(params, tile.first_row, kBlockM);
    RowTile rows[kRowTiles];
    clear(rows);

    main_loop(params, tile, blocks, rows, smem, warp, lane);

    const Tile stored_tile = stashed_tile(smem);
    normalise(rows);
    store_lse(params, stored_tile, rows, warp, lane);
    store_output(params, stored_tile, rows, smem, warp, lane);
}

// n / d for 0 <= n < 2^31. The launcher computes `divisor` from d: a multiplier in the lower half, and in the upper half the shift that follows.
// Dividing by a number that the compiler does not know takes about 20 dependent instructions.
__device__ __forceinline__ int divide(int n, uint64_t divisor) {
    return uint64_t(uint32_t(n)) * uint32_t(divisor) >> (divisor >> 32);
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

// The parameters of a call of one sequence alone: its lengths, and pointers to its first rows.
__device__ __forceinline__ Params of_sequence(const Params& params, int sequence, const Lengths& lengths) {
    const int first_query = lengths.queries.begin;
    Params own = with_lengths(params, lengths);
    own.q += sequence * params.q_batch_stride + first_query * params.q_row_stride;
    own.out += sequence * params.out_batch_stride + first_query * params.out_row_stride;
    if (params.lse != nullptr) own.lse += sequence * params.lse_batch_stride + first_query;
    own.q_batch_stride = own.out_batch_stride = 0;  // the pointers begin with the sequence
    own.pages += sequence * params.pages_batch_stride;
    return own;
}

__device__ __forceinline__ int sum_up_to_lane(int value, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(0xffffffff, value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}

// The row block of a thread block.
// The row blocks of all sequences are numbered, one sequence after another. The thread blocks of a row block's heads come one after another, so
// that they share its keys, or its row of the page table, in L2. Each lane counts the row blocks of one of 32 sequences at a time.
__device__ __forceinline__ RowBlock find_row_block(const Params& params, int index, int lane) {
    const int num_heads = params.num_heads_kv;
    const int number = divide(index, params.num_heads_divisor);
    const int head = index - number * num_heads;
    int left = number;  // row blocks from the first one of these 32 sequences to row block `number`
    for (int first = 0; first < params.batch_size; first += 32) {
        int count = 0;
        if (first + lane < params.batch_size) {
            count = (queries_of(params, first + lane).count * params.group_size + kBlockM - 1) / kBlockM;
        }
        const int end = sum_up_to_lane(count, lane);
        const uint32_t beyond = __ballot_sync(0xffffffff, left < end);
        if (beyond != 0) {
            const int found = __ffs(beyond) - 1;
            const int row_blocks = __shfl_sync(0xffffffff, count, found);
            const int in_sequence = left - (__shfl_sync(0xffffffff, end, found) - row_blocks);
            // Under a diagonal the last rows of a sequence attend to the most keys, so they come first.
            return {first + found, head, row_blocks - 1 - in_sequence};
        }
        left -= __shfl_sync(0xffffffff, end, 31);
    }
    return {-1, 0, 0};
}

__device__ __forceinline__ Tile tile_of(const Params& params, const RowBlock& row_block) {
    Tile tile;
    tile.batch = row_block.sequence;
    const int head = row_block.head;
    tile.kv_head = head;
    tile.head = head * params.group_size;
    tile.first_row = row_block.index * kBlockM;
    return tile;
}

__device__ __forceinline__ int num_rows(const Params& params) { return params.seqlen_q * params.group_size; }

__device__ __forceinline__ int query_of_row(const Params& params, int row) {
    return divide(row, params.group_size_divisor);
}

__device__ __forceinline__ int64_t row_offset(const Params& params, const Tile& tile, int row, int64_t row_stride,
                                              int64_t head_stride) {
    const int query = query_of_row(params, row);
    const int head = tile.head + row - query * params.group_size;
    return query * row_stride + head * head_stride;
}

// Visits the scores of S with their rows and keys: kTiles MMA tiles from row `first_row` and key `first_key` on. For each row at_row(row, lane_key)
// returns a function, which is then called with (step, score) for each score that this lane has of the row. The key of the score is lane_key + step.
// The steps are constants, so that comparing one takes one instruction.
template <int kTiles, typename AtRow>
__device__ __forceinline__ void for_each_score(float (&scores)[kTiles][kKeyTiles][4], int first_row, int first_key, int lane,
                                               AtRow at_row) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            auto at_score = at_row(first_row + kRowTileStep * i + 8 * row8 + lane / 4, first_key + lane % 4 * 2);
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) at_score(8 * j + e, scores[i][j][2 * row8 + e]);
            }
        }
    }
}

// ==== visible: which keys a row attends to, and which blocks of keys need a mask

// The keys that a query attends to: those up to its diagonal.
__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int query) {
    return {0, max(0, min(params.seqlen_kv, query + params.diagonal_offset + 1))};
}

// The union of the key ranges of rows [first_row, first_row + count). A range never begins or ends before the range of the previous row. KV
// blocks outside of the union are not visited.
__device__ __forceinline__ KeyRange keys_of_some(const Params& params, int first_row, int count) {
    const int last_row = min(first_row + count, num_rows(params)) - 1;
    return {keys_of_query(params, query_of_row(params, first_row)).begin,
            keys_of_query(params, query_of_row(params, last_row)).end};
}

// The intersection of the key ranges of rows [first_row, first_row + count). A KV block within it needs no mask.
__device__ __forceinline__ KeyRange keys_of_every(const Params& params, int first_row, int count) {
    const int last_row = min(first_row + count, num_rows(params)) - 1;
    return {keys_of_query(params, query_of_row(params, last_row)).begin,
            keys_of_query(params, query_of_row(params, first_row)).end};
}

// Masks the keys outside the range of their row. In most blocks every row attends to all keys, and nothing is masked.
template <int kTiles>
__device__ __forceinline__ void apply_mask(const Params& params, const Tile&, float (&scores)[kTiles][kKeyTiles][4], int first_row,
                                           int first_key, int lane) {
    const KeyRange every = keys_of_every(params, min(first_row, num_rows(params) - 1), kRowTileStep * (kTiles - 1) + 16);
    if (first_key + 8 * kKeyTiles > every.end) {
        for_each_score(scores, first_row, first_key, lane, [&](int row, int lane_key) {
            const int end = keys_of_query(params, query_of_row(params, row)).end - lane_key;
            return [=](int step, float& score) {
                if (step >= end) score = -INFINITY;
            };
        });
    }
}
// ====

// Finishes the scores of a KV block between Q K^T and softmax. The mask comes last, so hidden scores stay hidden.
// The scores are a warp's MMA tiles from row `row_in_tile` of the tile and key `first_key` on.
template <int kTiles>
__device__ __forceinline__ void finish_scores(const Params& params, const Tile& tile, float (&scores)[kTiles][kKeyTiles][4],
                                              int row_in_tile, int first_key, int lane) {
    apply_mask(params, tile, scores, tile.first_row + row_in_tile, first_key, lane);
}

__device__ __forceinline__ KvBlocks kv_blocks_of(const Params& params, int first_row, int count) {
    const KeyRange keys = keys_of_some(params, first_row, count);
    return {keys.begin / kBlockN, (keys.end + kBlockN - 1) / kBlockN - 1};
}

// The rows of the block that begins at `first_key`. All other rows become zeros, whatever they hold: 0 * NaN would be NaN.
__device__ __forceinline__ SeenRows seen_rows(const Params& params, int first_key) {
    const int end = params.seqlen_kv;
    return {end - first_key};
}

// The number by which the chunks of a row are permuted.
// With 8 chunks every row starts at bank 0. With fewer, 8 / kSwizzleChunks rows start at different banks, and share a swizzle key.
__device__ __forceinline__ int swizzle_key(int row) { return row / (8 / kSwizzleChunks) % kSwizzleChunks; }

__device__ __forceinline__ LaneAddress lane_address(shared_address block, int row, int chunk) {
    return block + row * kRowBytes + 16 * (chunk ^ swizzle_key(row));
}

// The address `row_step` rows down (a multiple of 8) and `chunk_pair` pairs of chunks to the right. Blocks and rows begin at multiples
// of kSwizzleBytes, so that a step within the swizzle is an XOR of the address itself.
__device__ __forceinline__ shared_address step_address(LaneAddress lane, int row_step, int chunk_pair) {
    const int step_bytes = 32 * chunk_pair;
    return (lane ^ step_bytes % kSwizzleBytes) + row_step * kRowBytes + step_bytes / kSwizzleBytes * kSwizzleBytes;
}

// For ldmatrix of Q and, transposed, of V: the four 8x8 matrices of 16-bit halves are rows 0-7 and 8-15 of the left chunk, then of the right.
__device__ __forceinline__ LaneAddress qv_lane_address(shared_address block, int lane) {
    return lane_address(block, lane % 16, lane / 16);
}

// For ldmatrix of K, whose rows are the columns of the MMA: the left and the right chunk of rows 0-7, then of rows 8-15.
__device__ __forceinline__ LaneAddress k_lane_address(shared_address block, int lane) {
    return lane_address(block, lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

__device__ __forceinline__ int first_row_of(int warp) { return warp * kWarpRows; }

__device__ __forceinline__ const element* head_k(const Params& params, const Tile& tile) {
    return params.k + tile.kv_head * params.k_head_stride;
}

__device__ __forceinline__ const element* head_v(const Params& params, const Tile& tile) {
    return params.v + tile.kv_head * params.v_head_stride;
}

// Starts the copy of the keys of a KV block of K or V, kColumns wide, into shared memory. kSwizzleChunks neighbouring threads copy a row, and
// each takes every kSwizzleChunks-th chunk of it. `head` is where the head's rows begin in page 0. Rows that are not among `rows` and elements
// from `head_dim` on become zeros; the page table is not read for those rows.
template <int kColumns>
__device__ __forceinline__ void copy_rows(const Params& params, shared_address block, const element* head, int64_t page_stride,
                                          int64_t row_stride, int first_key, const SeenRows& rows, int head_dim) {
    constexpr int kRowsPerPass = kCopyThreads / kSwizzleChunks;
    constexpr int kRowsOfWarp = 32 / kSwizzleChunks;  // of a pass
    constexpr int kPanels = kColumns * sizeof(element) / kSwizzleBytes;
    constexpr int kPanelElements = kSwizzleChunks * kChunkElements;
    static_assert(kColumns * sizeof(element) % kSwizzleBytes == 0, "the swizzle permutes whole panels");
    static_assert(kRowsPerPass % 8 == 0, "the rows of a thread are swizzled alike");
    static_assert((kBlockN + kRowsPerPass - 1) / kRowsPerPass * kRowsOfWarp <= 32, "a warp has a lane for each of its rows");
    const int row = threadIdx.x / kSwizzleChunks;
    const int chunk = threadIdx.x % kSwizzleChunks;
    const shared_address destination = block + row * kRowBytes + 16 * (chunk ^ swizzle_key(row));

    // A page may be as small as one key. Each lane looks up one of the warp's rows, so that all look-ups of a warp are one load.
    const int lane = threadIdx.x % 32;
    const int own_row = lane / kRowsOfWarp * kRowsPerPass + threadIdx.x / 32 * kRowsOfWarp + lane % kRowsOfWarp;
    const int page_of_sequence = divide(first_key + own_row, params.page_size_divisor);
    const int page = rows.among(kBlockN).has(own_row) ? load_clamped(params.pages, page_of_sequence, params.batch_kv - 1) : 0;
    const int row_of_page = first_key + own_row - page_of_sequence * params.page_size;
    const int64_t own_offset = page * page_stride + row_of_page * row_stride;
#pragma unroll
    for (int pass = 0; pass * kRowsPerPass < kBlockN; ++pass) {
        const int first = pass * kRowsPerPass;
        const int64_t offset = __shfl_sync(0xffffffff, own_offset, pass * kRowsOfWarp + row % kRowsOfWarp);
        if (kBlockN % kRowsPerPass != 0 && first + row >= kBlockN) break;
        const element* source = head + offset + chunk * kChunkElements;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            const bool valid = rows.has(first + row) && panel * kPanelElements + chunk * kChunkElements < head_dim;
            cp_async_16(destination + first * kRowBytes + panel * kSwizzleBytes, source + panel * kPanelElements, valid ? 16 : 0);
        }
    }
}

__device__ __forceinline__ void copy_k(const Params& params, const element* k, shared_address stage, int block) {
    copy_rows<kHeadDim>(params, stage, k, params.k_batch_stride, params.k_row_stride, block * kBlockN,
                        seen_rows(params, block * kBlockN), params.head_dim);
}

__device__ __forceinline__ void copy_v(const Params& params, const element* v, shared_address stage, int block) {
    copy_rows<kHeadDimV>(params, stage, v, params.v_batch_stride, params.v_row_stride, block * kBlockN,
                         seen_rows(params, block * kBlockN), params.head_dim_v);
}

// Starts the copy of the tile's rows of Q. Rows past the last one, and elements from head_dim on, become zeros.
__device__ __forceinline__ void load_q(const Params& params, const Tile& tile, shared_address smem) {
    constexpr int kRowsPerPass = kThreads / kSwizzleChunks;
    static_assert(kBlockM % kRowsPerPass == 0, "every thread copies as many rows");
    static_assert(kRowsPerPass % 8 == 0, "the rows of a thread are swizzled alike");
    const element* q = params.q + tile.batch * params.q_batch_stride;
    const int row = threadIdx.x / kSwizzleChunks;
    const int chunk = threadIdx.x % kSwizzleChunks;
    const int rows_left = num_rows(params) - tile.first_row - row;
    const shared_address destination = smem + row * kRowBytes + 16 * (chunk ^ swizzle_key(row));
#pragma unroll
    for (int first = 0; first < kBlockM; first += kRowsPerPass) {
        const element* source =
            q + row_offset(params, tile, tile.first_row + first + row, params.q_row_stride, params.q_head_stride);
#pragma unroll
        for (int panel = 0; panel < kRowBytes / kSwizzleBytes; ++panel) {
            const int element_index = (panel * kSwizzleChunks + chunk) * kChunkElements;
            cp_async_16(destination + first * kRowBytes + panel * kSwizzleBytes, source + element_index,
                        first < rows_left && element_index < params.head_dim ? 16 : 0);
        }
    }
}

// Stashes the tile in shared memory, because registers have no room for it. The epilogue reads it back. In some kernels the mask of each block
// does, too.
__device__ __forceinline__ void stash_tile(const Tile& tile, shared_address smem) {
    store_shared_64(smem + kTileOffset, tile.batch, tile.head);
    store_shared_64(smem + kTileOffset + 8, tile.kv_head, tile.first_row);
}

__device__ __forceinline__ Tile stashed_tile(shared_address smem) {
    const uint4 words = load_shared_128(smem + kTileOffset);
    Tile tile;
    tile.batch = words.x;
    tile.head = words.y;
    tile.kv_head = words.z;
    tile.first_row = words.w;
    return tile;
}

// The factor of O and row_sum when row_max rises to `larger`. If both are infinite their difference is NaN; fminf makes the factor 1.
__device__ __forceinline__ float rescale_factor(float row_max, float larger) { return exp2_approx(fminf(row_max - larger, 0.0f)); }

// ==== row_end: the factor of O and the LSE, after the last key of a row

__device__ __forceinline__ RowEnd row_end(float row_max, float row_sum) { return {row_max, row_sum}; }
// ====

__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffff, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffff, value, 1);
    return value + __shfl_xor_sync(0xffffffff, value, 2);
}

// Clears rows: no key seen yet.
__device__ __forceinline__ void clear(RowTile (&rows)[kRowTiles]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        rows[i].row_max[0] = rows[i].row_max[1] = kNoRowMax;
        rows[i].row_sum[0] = rows[i].row_sum[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) rows[i].output[n][e] = 0.0f;
        }
    }
}

__device__ __forceinline__ void rescale(RowTile& rows, const float (&correction)[2]) {
#pragma unroll
    for (int row8 = 0; row8 < 2; ++row8) {
        rows.row_sum[row8] *= correction[row8];
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
            rows.output[n][2 * row8] *= correction[row8];
            rows.output[n][2 * row8 + 1] *= correction[row8];
        }
    }
}

// S = Q . K^T of kTiles MMA tiles of rows, in fp32. Element [i][j][e] of thread (g, t) = (lane / 4, lane % 4) is row g + 8 (e / 2) of
// tile i, key 8 j + 2 t + e % 2.
template <int kTiles>
__device__ __forceinline__ void mma_qk(float (&scores)[kTiles][kKeyTiles][4], const LaneAddress& q_lane, const LaneAddress& k_lane) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i][j][e] = 0.0f;
        }
    }
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        uint32_t q_fragment[kTiles][4];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) ldmatrix_x4(q_fragment[i], step_address(q_lane, kRowTileStep * i, step));
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
            uint32_t k_fragment[4];
            ldmatrix_x4(k_fragment, step_address(k_lane, 8 * j, step));
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                mma_m16n8k16<element>(scores[i][j], q_fragment[i], k_fragment[0], k_fragment[1]);
                mma_m16n8k16<element>(scores[i][j + 1], q_fragment[i], k_fragment[2], k_fragment[3]);
            }
        }
    }
}

__device__ __forceinline__ VAddress v_address(shared_address block, int lane) { return qv_lane_address(block, lane); }

template <int kTiles>
__device__ __forceinline__ void mma_pv(RowTile* rows, const P<kTiles>& p, const VAddress& v_lane) {
#pragma unroll
    for (int j = 0; j < kKeyTiles / 2; ++j) {
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 2) {
            uint32_t v_fragment[4];
            ldmatrix_x4_trans(v_fragment, step_address(v_lane, 16 * j, n / 2));
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                mma_m16n8k16<element>(rows[i].output[n], p.fragment[i][j], v_fragment[0], v_fragment[1]);
                mma_m16n8k16<element>(rows[i].output[n + 1], p.fragment[i][j], v_fragment[2], v_fragment[3]);
            }
        }
    }
}

// Computes, for each row, the row_max that this lane's scores need: `block_max`. True, for the whole warp, if it exceeds the row_max of any row
// by more than kSlack. block_max is rounded up and the limit down, so that P stays within its limit for scores of any size.
template <int kTiles>
__device__ __forceinline__ bool exceeds_row_max(const float (&scores)[kTiles][kKeyTiles][4], const RowTile* rows, float scale_log2,
                                                float (&block_max)[kTiles][2]) {
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            float value = fmaxf(scores[i][0][2 * row8], scores[i][0][2 * row8 + 1]);
#pragma unroll
            for (int j = 1; j < kKeyTiles; ++j) {
                value = fmaxf(value, fmaxf(scores[i][j][2 * row8], scores[i][j][2 * row8 + 1]));
            }
            block_max[i][row8] = __fmul_ru(value, scale_log2);
            exceeds |= block_max[i][row8] > __fadd_rd(rows[i].row_max[row8], kSlack);
        }
    }
    return __any_sync(0xffffffff, exceeds);
}

template <int kTiles>
__device__ __forceinline__ void raise_row_max(const float (&block_max)[kTiles][2], RowTile* rows) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        float correction[2];
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const float previous = rows[i].row_max[row8];
            rows[i].row_max[row8] = fmaxf(previous, quad_max(block_max[i][row8]));
            correction[row8] = rescale_factor(previous, rows[i].row_max[row8]);
        }
        rescale(rows[i], correction);
    }
}

template <int kTiles>
__device__ __forceinline__ void exponentiate(const float (&scores)[kTiles][kKeyTiles][4], RowTile* rows, float scale_log2,
                                             P<kTiles>& p) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
            float values[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                values[e] = exp2_approx(fmaf(scores[i][j][e], scale_log2, -rows[i].row_max[e / 2]));
                rows[i].row_sum[e / 2] += values[e];
            }
            p.set(i, j, values);
        }
    }
}

// A step of online softmax: from the scores of a block to P, with row_max and row_sum brought up to date.
template <int kTiles>
__device__ __forceinline__ void softmax_step(const float (&scores)[kTiles][kKeyTiles][4], RowTile* rows, float scale_log2,
                                             P<kTiles>& p) {
    float block_max[kTiles][2];
    if (exceeds_row_max(scores, rows, scale_log2, block_max)) raise_row_max(block_max, rows);
    exponentiate(scores, rows, scale_log2, p);
}

// Divides O by the complete row_sum. A row that attends to nothing has row_sum 0: its O becomes 0.
__device__ __forceinline__ void normalise(RowTile (&rows)[kRowTiles]) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            rows[i].row_sum[row8] = quad_sum(rows[i].row_sum[row8]);
            const float factor = row_end(rows[i].row_max[row8], rows[i].row_sum[row8]).factor();
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                rows[i].output[n][2 * row8] *= factor;
                rows[i].output[n][2 * row8 + 1] *= factor;
            }
        }
    }
}

// Writes the LSE of each row, natural logarithm; -inf for a row that attends to nothing.
// The layout is (batch, num_heads_q, seqlen_q), or (num_heads_q, rows) of the sequence.
__device__ __forceinline__ void store_lse(const Params& params, const Tile& tile, const RowTile (&rows)[kRowTiles], int warp,
                                          int lane) {
    if (params.lse == nullptr || lane % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const int row = tile.first_row + first_row_of(warp) + kRowTileStep * i + 8 * row8 + lane / 4;
            if (row < num_rows(params)) {
                store_global_32(params.lse + row_offset(params, tile, row, 1, params.lse_head_stride),
                                row_end(rows[i].row_max[row8], rows[i].row_sum[row8]).lse());
            }
        }
    }
}

// Rounds O and puts it into the Q tile: all reads of Q precede the last barrier of the loop.
__device__ __forceinline__ void stage_output(const RowTile (&rows)[kRowTiles], shared_address smem, int warp, int lane) {
    const shared_address warp_rows = smem + first_row_of(warp) * kRowBytes;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const int row = kRowTileStep * i + 8 * row8 + lane / 4;
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                const float low = rows[i].output[n][2 * row8];
                const float high = rows[i].output[n][2 * row8 + 1];
                store_shared_32(warp_rows + row * kRowBytes + 16 * (n ^ swizzle_key(row)) + lane % 4 * 4, pack<element>(low, high));
            }
        }
    }
}

__device__ __forceinline__ void store_output(const Params& params, const Tile& tile, const RowTile (&rows)[kRowTiles],
                                             shared_address smem, int warp, int lane) {
    stage_output(rows, smem, warp, lane);
    constexpr int kRowsPerPass = 32 / kSwizzleChunks;
    constexpr int kPanels = kHeadDimV * sizeof(element) / kSwizzleBytes;
    __syncwarp();  // the warp reads only rows it wrote itself
    constexpr int kPasses = kWarpRows / kRowsPerPass;
    const int first_row = first_row_of(warp);
    auto row_of_pass = [&](int pass) { return pass * kRowsPerPass + lane / kSwizzleChunks; };
    const shared_address warp_rows = smem + first_row * kRowBytes;
    const int chunk = lane % kSwizzleChunks;

    // Load all vectors before the first store, so that the latencies of the loads overlap. Otherwise each store would wait for its own load.
    uint4 vectors[kPasses][kPanels];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int row = row_of_pass(pass);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            vectors[pass][panel] =
                load_shared_128(warp_rows + row * kRowBytes + panel * kSwizzleBytes + 16 * (chunk ^ swizzle_key(row)));
        }
    }
    element* out = params.out + tile.batch * params.out_batch_stride;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int tile_row = tile.first_row + first_row + row_of_pass(pass);
        element* out_row = out + row_offset(params, tile, tile_row, params.out_row_stride, params.out_head_stride);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            const int element_index = (panel * kSwizzleChunks + chunk) * kChunkElements;
            if (tile_row < num_rows(params) && element_index < params.head_dim_v) {
                store_global_128(out_row + element_index, vectors[pass][panel]);
            }
        }
    }
}

static_assert(kWarpRows % 16 == 0, "a warp's rows are whole 16-row MMA tiles");
static_assert(kBlockN % 16 == 0, "P . V takes keys by 16");
static_assert(kHeadDimV <= kHeadDim, "rows of V and O fit into those of K and Q");
static_assert(kRowBytes % 32 == 0, "the swizzle permutes at least two 16-byte chunks");
static_assert(sizeof(SharedStorage) == 49168, "launcher and kernel agree on shared memory");
static_assert(sizeof(Params) == 256 && offsetof(Params, q) == 0 && offsetof(Params, k) == 8 && offsetof(Params, v) == 16);
static_assert(offsetof(Params, out) == 24 && offsetof(Params, lse) == 32 && offsetof(Params, cu_seqlens_q) == 40);
static_assert(offsetof(Params, kv_lengths) == 48 && offsetof(Params, pages) == 56 && offsetof(Params, q_batch_stride) == 64);
static_assert(offsetof(Params, q_row_stride) == 72 && offsetof(Params, q_head_stride) == 80);
static_assert(offsetof(Params, k_batch_stride) == 88 && offsetof(Params, k_row_stride) == 96);
static_assert(offsetof(Params, k_head_stride) == 104 && offsetof(Params, v_batch_stride) == 112);
static_assert(offsetof(Params, v_row_stride) == 120 && offsetof(Params, v_head_stride) == 128);
static_assert(offsetof(Params, out_batch_stride) == 136 && offsetof(Params, out_row_stride) == 144);
static_assert(offsetof(Params, out_head_stride) == 152 && offsetof(Params, lse_batch_stride) == 160);
static_assert(offsetof(Params, lse_head_stride) == 168 && offsetof(Params, pages_batch_stride) == 176);
static_assert(offsetof(Params, batch_size) == 184 && offsetof(Params, num_heads_kv) == 188);
static_assert(offsetof(Params, group_size) == 192 && offsetof(Params, rows_q) == 196 && offsetof(Params, batch_kv) == 200);
static_assert(offsetof(Params, page_size) == 204 && offsetof(Params, seqlen_q) == 208 && offsetof(Params, seqlen_kv) == 212);
static_assert(offsetof(Params, head_dim) == 216 && offsetof(Params, head_dim_v) == 220);
static_assert(offsetof(Params, num_heads_divisor) == 224 && offsetof(Params, group_size_divisor) == 232);
static_assert(offsetof(Params, page_size_divisor) == 240 && offsetof(Params, diagonal_offset) == 248);
static_assert(offsetof(Params, scale_log2) == 252);
