// flash_fwd_hdim64_fp16_m64_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 64, head_dim_v 64, dtype fp16, mask_type none, sinks none, dropout none, gqa mha
// tile      block_m 64, block_n 64, warps 4, loop stages, min_blocks 3 (m64)
// block     128 threads, 24592 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 166912 bytes or more of shared memory per block
// spec      flash_fwd_sm80.yaml
// template  flash_fwd_sm80.cu.j2
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
//   shared memory     SharedStorage, 24592 bytes: Q, kBlockM = 64 rows of kRowBytes = 128; the stages of K and of V, kStageBytes = 8192 each.
//                     O is staged in the rows of Q
//   barrier           barrier_sync(kThreads): all warps, before they read data that other warps copied, and before it is overwritten

using element = fp16;

constexpr int kHeadDim = 64;  // of Q and K
constexpr int kHeadDimV = 64;  // of V and O
constexpr int kBlockM = 64;  // query rows of a tile
constexpr int kBlockN = 64;  // keys of a KV block
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
    const element* q;                     // (batch, seqlen_q, num_heads_q, head_dim); rows 16-byte aligned
    const element* k;                     // (batch, seqlen_kv, num_heads_kv, head_dim); rows 16-byte aligned
    const element* v;                     // (batch, seqlen_kv, num_heads_kv, head_dim_v); rows 16-byte aligned
    element* out;                         // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    float* lse;                           // (batch, num_heads_q, seqlen_q); may be null; natural logarithm
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
    int32_t batch_size;                   // sequences
    int32_t num_heads_q;
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    int32_t heads_per_l2_group;           // heads of the grid whose tiles are launched together
    int32_t num_l2_groups;                // the last group has the remaining heads
    uint64_t num_heads_divisor;           // of the heads of a batch entry in the grid; see divide()
    uint64_t l2_group_tiles_divisor;      // of the tiles of an L2 group; see divide()
    uint64_t l2_group_heads_divisor;      // of heads_per_l2_group; see divide()
    uint64_t last_l2_group_heads_divisor; // of the heads of the last L2 group; see divide()
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
__device__ Tile find_tile(const Params& params, int index);  // The tile with number `index` in launch order
__device__ int num_rows(const Params& params);  // Rows of a head of the grid
__device__ int query_of_row(const Params&, int row);  // The query of a row of a tile
// The offset of row `row` of the tile's head in an array, in elements from the start of the batch entry
__device__ int64_t row_offset(const Params&, const Tile& tile, int row, int64_t row_stride, int64_t head_stride);
// Visits the scores of S with their rows and keys
template <int kTiles, typename AtRow> __device__ void for_each_score(float (&scores)[kTiles][kKeyTiles][4], int first_row, int first_key,
    int lane, AtRow at_row);

// ==== visible: which keys a row attends to, and which blocks of keys need a mask

// Keys [begin, end).
struct KeyRange {
    int begin;
    int end;
};

__device__ KeyRange keys_of_query(const Params& params, int);  // The keys that a query attends to
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
__device__ const element* head_k(const Params& params, const Tile& tile);  // Where K of the tile's head begins
__device__ const element* head_v(const Params& params, const Tile& tile);  // Where V of the tile's head begins
// Starts the copy of a KV block of K or V, kColumns wide, into shared memory
template <int kColumns> __device__ void copy_rows(shared_address block, const element* source, int64_t row_stride, const SeenRows& rows,
    int head_dim);
// Starts the copy of KV block `block` of a head of K, and of V
__device__ void copy_k(const Params& params, const element* k, shared_address stage, int block);
__device__ void copy_v(const Params& params, const element* v, shared_address stage, int block);
__device__ void load_q(const Params& params, const Tile& tile, shared_address smem);  // Starts the copy of the tile's rows of Q
// Stashes the tile in shared memory, because registers have no room for it
__device__ void stash_tile(const Tile& tile, shared_address smem);
__device__ Tile stashed_tile(shared_address smem);  // The tile that was stashed

// Online softmax. An element of P is 2^(score * scale_log2 - row_max): one multiply-add and one exponential. scale_log2 includes log2(e).
// row_max is raised, for all rows of the warp, only when some row exceeds it by more than kSlack + kPBias. P can reach 2^(kPBias + kSlack). O and
// row_sum carry the same factor, so nothing is lost, and most blocks need no rescale and no quad reduction.
constexpr float kSlack = 8.0f;
// fp16 P loses bits below 2^-14. Keeping row_max kPBias below the true maximum makes P 2^kPBias larger, so fewer P are subnormal. The
// factor cancels in O / row_sum and in the LSE.
constexpr float kPBias = 7.0f;

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
        compute_p(p, block);

        // 3. Wait for V, and for every warp to finish with K. Start the copy of the next K.
        cp_async_wait<0>();
        barrier_sync(kThreads);
        if (block > blocks.first) fetch_k(block - 1);

        // 4. O += P V, while the next K is copied.
        mma_pv(rows, p, v_lane);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3)
flash_fwd_hdim64_fp16_m64_sm80(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address smem = to_shared(shared_memory);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    const Tile tile = find_tile(params, block_index());
    if (threadIdx.x == 0) stash_tile(tile, smem);  // registers have no room for it during the loop
    const KvBlocks blocks = kv_blocks_of(params, tile.first_row, kBlockM);
    RowTile rows[kRowTiles];
    clear(rows);

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

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

__device__ __forceinline__ Tile find_tile(const Params& params, int index) {
    // Heads are launched in L2 groups, so that tiles of a head run at about the same time and share its K and V in L2. Within an L2 group the last
    // row block of each head comes first. Under a diagonal it is the longest, so the grid ends with short tiles and few SMs are idle.
    const int num_heads = params.num_heads_q;
    const int l2_group = min(divide(index, params.l2_group_tiles_divisor), params.num_l2_groups - 1);
    const int first_head = l2_group * params.heads_per_l2_group;
    const bool is_last = l2_group == params.num_l2_groups - 1;
    const int l2_group_heads = is_last ? num_heads * params.batch_size - first_head : params.heads_per_l2_group;
    const int index_in_l2_group = index - first_head * params.num_row_blocks;
    const int row_block = divide(index_in_l2_group, is_last ? params.last_l2_group_heads_divisor : params.l2_group_heads_divisor);
    const int head_of_batch = first_head + index_in_l2_group - row_block * l2_group_heads;

    Tile tile;
    tile.batch = divide(head_of_batch, params.num_heads_divisor);
    const int head = head_of_batch - tile.batch * num_heads;  // of the grid
    tile.head = head;
    tile.kv_head = head;
    tile.first_row = row_block * kBlockM;
    return tile;
}

__device__ __forceinline__ int num_rows(const Params& params) { return params.seqlen_q; }

__device__ __forceinline__ int query_of_row(const Params&, int row) { return row; }

__device__ __forceinline__ int64_t row_offset(const Params&, const Tile& tile, int row, int64_t row_stride,
                                              int64_t head_stride) {
    return row * row_stride + tile.head * head_stride;
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

// The keys that a query attends to: all.
__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int) { return {0, params.seqlen_kv}; }

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
    return params.k + tile.batch * params.k_batch_stride + tile.kv_head * params.k_head_stride;
}

__device__ __forceinline__ const element* head_v(const Params& params, const Tile& tile) {
    return params.v + tile.batch * params.v_batch_stride + tile.kv_head * params.v_head_stride;
}

// Starts the copy of a KV block of K or V, kColumns wide, into shared memory. kCopyThreads threads call it together. kSwizzleChunks neighbouring
// threads copy a row, and each takes every kSwizzleChunks-th chunk of it. Rows outside of `rows`, and elements from `head_dim` on, become zeros.
// `row_stride` is in elements.
template <int kColumns>
__device__ __forceinline__ void copy_rows(shared_address block, const element* source, int64_t row_stride, const SeenRows& rows,
                                          int head_dim) {
    constexpr int kRowsPerPass = kCopyThreads / kSwizzleChunks;
    constexpr int kPanels = kColumns * sizeof(element) / kSwizzleBytes;
    constexpr int kPanelElements = kSwizzleChunks * kChunkElements;
    static_assert(kColumns * sizeof(element) % kSwizzleBytes == 0, "the swizzle permutes whole panels");
    static_assert(kRowsPerPass % 8 == 0, "the rows of a thread are swizzled alike");
    const int row = threadIdx.x % kCopyThreads / kSwizzleChunks;
    const int chunk = threadIdx.x % kSwizzleChunks;
    const SeenRows rows_left = rows.from(row);
    const shared_address destination = block + row * kRowBytes + 16 * (chunk ^ swizzle_key(row));
    source += row * row_stride + chunk * kChunkElements;
    // One pointer steps from row to row, with one addition a row. If the compiler saw through the pointer, it would compute an address for each
    // copy, with five additions.
#pragma unroll
    for (int first = 0; first < kBlockN; first += kRowsPerPass) {
        if (kBlockN % kRowsPerPass != 0 && first + row >= kBlockN) break;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            const bool valid = rows_left.has(first) && panel * kPanelElements + chunk * kChunkElements < head_dim;
            cp_async_16(destination + first * kRowBytes + panel * kSwizzleBytes, source + panel * kPanelElements, valid ? 16 : 0);
        }
        if (first + kRowsPerPass < kBlockN) source += kRowsPerPass * row_stride;
        opaque(source);
    }
}

__device__ __forceinline__ void copy_k(const Params& params, const element* k, shared_address stage, int block) {
    copy_rows<kHeadDim>(stage, k + block * kBlockN * params.k_row_stride, params.k_row_stride, seen_rows(params, block * kBlockN),
                        params.head_dim);
}

__device__ __forceinline__ void copy_v(const Params& params, const element* v, shared_address stage, int block) {
    copy_rows<kHeadDimV>(stage, v + block * kBlockN * params.v_row_stride, params.v_row_stride, seen_rows(params, block * kBlockN),
                         params.head_dim_v);
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
    // One pointer steps from row to row. Otherwise the compiler would compute the addresses of all copies in advance.
    const element* source = q + row_offset(params, tile, tile.first_row + row, params.q_row_stride, params.q_head_stride);
#pragma unroll
    for (int first = 0; first < kBlockM; first += kRowsPerPass) {
#pragma unroll
        for (int panel = 0; panel < kRowBytes / kSwizzleBytes; ++panel) {
            const int element_index = (panel * kSwizzleChunks + chunk) * kChunkElements;
            cp_async_16(destination + first * kRowBytes + panel * kSwizzleBytes, source + element_index,
                        first < rows_left && element_index < params.head_dim ? 16 : 0);
        }
        if (first + kRowsPerPass < kBlockM) source += kRowsPerPass * params.q_row_stride;
        opaque(source);
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
            block_max[i][row8] = __fmaf_ru(value, scale_log2, -kPBias);
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
                const int64_t batch_offset = int64_t(tile.batch) * params.num_heads_q * params.seqlen_q;
                store_global_32(params.lse + batch_offset + row_offset(params, tile, row, 1, params.seqlen_q),
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
    // One pointer steps from row to row. Otherwise the compiler would compute the addresses of all stores in advance.
    element* out_row = out + row_offset(params, tile, tile.first_row + first_row + row_of_pass(0), params.out_row_stride,
                                        params.out_head_stride);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int tile_row = tile.first_row + first_row + row_of_pass(pass);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            const int element_index = (panel * kSwizzleChunks + chunk) * kChunkElements;
            if (tile_row < num_rows(params) && element_index < params.head_dim_v) {
                store_global_128(out_row + element_index, vectors[pass][panel]);
            }
        }
        if (pass + 1 < kPasses) out_row += (row_of_pass(pass + 1) - row_of_pass(pass)) * params.out_row_stride;
        opaque(out_row);
    }
}

static_assert(kWarpRows % 16 == 0, "a warp's rows are whole 16-row MMA tiles");
static_assert(kBlockN % 16 == 0, "P . V takes keys by 16");
static_assert(kHeadDimV <= kHeadDim, "rows of V and O fit into those of K and Q");
static_assert(kRowBytes % 32 == 0, "the swizzle permutes at least two 16-byte chunks");
static_assert(sizeof(SharedStorage) == 24592, "launcher and kernel agree on shared memory");
static_assert(sizeof(Params) == 216 && offsetof(Params, q) == 0 && offsetof(Params, k) == 8 && offsetof(Params, v) == 16);
static_assert(offsetof(Params, out) == 24 && offsetof(Params, lse) == 32 && offsetof(Params, q_batch_stride) == 40);
static_assert(offsetof(Params, q_row_stride) == 48 && offsetof(Params, q_head_stride) == 56);
static_assert(offsetof(Params, k_batch_stride) == 64 && offsetof(Params, k_row_stride) == 72);
static_assert(offsetof(Params, k_head_stride) == 80 && offsetof(Params, v_batch_stride) == 88);
static_assert(offsetof(Params, v_row_stride) == 96 && offsetof(Params, v_head_stride) == 104);
static_assert(offsetof(Params, out_batch_stride) == 112 && offsetof(Params, out_row_stride) == 120);
static_assert(offsetof(Params, out_head_stride) == 128 && offsetof(Params, batch_size) == 136);
static_assert(offsetof(Params, num_heads_q) == 140 && offsetof(Params, seqlen_q) == 144 && offsetof(Params, seqlen_kv) == 148);
static_assert(offsetof(Params, head_dim) == 152 && offsetof(Params, head_dim_v) == 156);
static_assert(offsetof(Params, num_row_blocks) == 160 && offsetof(Params, heads_per_l2_group) == 164);
static_assert(offsetof(Params, num_l2_groups) == 168 && offsetof(Params, num_heads_divisor) == 176);
static_assert(offsetof(Params, l2_group_tiles_divisor) == 184 && offsetof(Params, l2_group_heads_divisor) == 192);
static_assert(offsetof(Params, last_l2_group_heads_divisor) == 200 && offsetof(Params, scale_log2) == 208);
static_assert(kSlack + kPBias <= 15.0f, "P stays below 2^16, the end of fp16");
