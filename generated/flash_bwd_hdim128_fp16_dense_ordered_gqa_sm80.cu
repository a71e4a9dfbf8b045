// flash_bwd_hdim128_fp16_dense_ordered_gqa_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype fp16, mask_type dense, dropout none, gqa gqa, dq_order ordered
// tile      block_m 32, block_n 128, warps 8, key_warps 4, stages 2, min_blocks 1
// block     256 threads, 124432 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 166912 bytes or more of shared memory per block
// spec      flash_bwd_sm80.yaml
// template  flash_bwd_sm80.cu.j2
#include "flashgen/sm80.cuh"

// A thread block computes dK and dV of kBlockN keys of a head. It goes through the queries that attend to them, kBlockM a step:
//
//     S^T = K Q^T    P^T = 2^(scale_log2 S^T - lse_log2)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
//     dV += P^T dO   dK += dS^T Q                           dQ += dS K
//
// S is computed as its transpose, so that P^T and dS^T leave the MMA as the A operands of dV and dK. dV and dK stay in registers. All
// thread blocks of a head add their dQ to dq_accum in global memory, which is fp32. The convert kernel rounds it.
//
// Map
//   warps             kWarps = 8, a grid of kKeyWarps = 4 by kQueryWarps = 2. Each copies a share of Q and dO (cp.async) and computes S^T of
//                     some keys and some queries of a step. For dV and dK it has P^T and dS^T of its queries in registers, and reads those
//                     of other queries from shared memory
//   shared memory     K, kBlockN = 128 rows of kRowBytes = 256; V, of kRowBytesV = 256; dS^T and P^T of a step; then kStages = 2 stages of Q, dO, LSE and delta
//   barrier           barrier_sync(kThreads): all warps, before they read data that other warps copied or stored, and before it is overwritten

using element = fp16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kHeadDimV = 128;  // of V and dO
constexpr int kBlockM = 32;  // queries of a step
constexpr int kBlockN = 128;  // keys of a thread block
constexpr int kStages = 2;  // blocks of queries in shared memory
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

enum NamedBarrier : int {  // barrier_sync(threads) has the number 1
    kAddedBarrier = 2,  // all warps have added their part of dQ: the first one waits, kThreads
};

// Warps form a grid of kKeyWarps by kQueryWarps. A warp computes kWarpKeys by kWarpQueries of S^T. It sums a part of dK and dV of its keys over
// all queries: one of kQueryWarps equal parts of the columns.
constexpr int kKeyWarps = 4;
constexpr int kQueryWarps = 2;
constexpr int kWarpKeys = kBlockN / kKeyWarps;
constexpr int kWarpQueries = kBlockM / kQueryWarps;
constexpr int kKeyTiles = kWarpKeys / 16;                  // MMA tiles of S^T along the keys
constexpr int kQueryTiles = kWarpQueries / 8;              // and along the queries
constexpr int kDkTiles = kHeadDim / kQueryWarps / 8;       // MMA tiles of dK along the head dimension
constexpr int kDvTiles = kHeadDimV / kQueryWarps / 8;      // and of dV

// A warp computes 32 rows of dQ where rows, warps and pairs of chunks can be divided so, else 16. A pair is two chunks of 16 bytes, side by side in a row.
constexpr int kPairColumns = 32 / sizeof(element);  // that a warp fetches at a time
constexpr bool kTallDq = kBlockM % 32 == 0 && kWarps % (kBlockM / 32) == 0 && kHeadDim / kPairColumns % (kWarps / (kBlockM / 32)) == 0;
constexpr int kDqRowWarps = kTallDq ? kBlockM / 32 : kBlockM / 16;
constexpr int kDqColumnWarps = kWarps / kDqRowWarps;
constexpr int kDqRowTiles = kBlockM / kDqRowWarps / 16;
constexpr int kDqColumnTiles = kHeadDim / kDqColumnWarps / 8;
constexpr int kDqPairs = kHeadDim / kDqColumnWarps / kPairColumns;
// SwizzledRows::step() is an addition only where start and step have no bit in common. So warps take pairs in turn where the number of warps
// is a power of two. Elsewhere a warp's pairs are side by side, and their number is a power of two.
constexpr bool kDqInTurn = (kDqColumnWarps & (kDqColumnWarps - 1)) == 0;
constexpr int kDqPairStride = kDqInTurn ? kDqColumnWarps : 1;  // from one pair of a warp to the next
constexpr int kDqWarpStride = kDqInTurn ? 1 : kDqPairs;        // from the first pair of a warp to the first pair of the next

constexpr int kRowBytes = kHeadDim * sizeof(element);
constexpr int kRowBytesV = kHeadDimV * sizeof(element);
constexpr int kMaskRowBytes = kBlockN + 16;  // the rows of a quad's queries are in different banks

// A block of queries.
struct Stage {
    element q[kBlockM][kHeadDim];
    element dout[kBlockM][kHeadDimV];
    float lse_log2[kBlockM];
    float delta[kBlockM];
    uint8_t mask[kBlockM][kMaskRowBytes];
};

struct SharedStorage {
    element k[kBlockN][kHeadDim];
    element v[kBlockN][kHeadDimV];
    element ds[kBlockN][kBlockM];  // of a step, transposed
    element p[kBlockN][kBlockM];   // the same of P, which other warps read
    Stage stages[kStages];
    int32_t block[4];  // the KeyBlock: stash_block()
};
constexpr int kKOffset = offsetof(SharedStorage, k);
constexpr int kVOffset = offsetof(SharedStorage, v);
constexpr int kDsOffset = offsetof(SharedStorage, ds);
constexpr int kDsBytes = sizeof(SharedStorage::ds);
constexpr int kPOffset = offsetof(SharedStorage, p);
constexpr int kStagesOffset = offsetof(SharedStorage, stages);
constexpr int kBlockOffset = offsetof(SharedStorage, block);
constexpr int kStageBytes = sizeof(Stage);
constexpr int kQOffset = offsetof(Stage, q);
constexpr int kDoutOffset = offsetof(Stage, dout);
constexpr int kLseOffset = offsetof(Stage, lse_log2);
constexpr int kDeltaOffset = offsetof(Stage, delta);
constexpr int kMaskOffset = offsetof(Stage, mask);

struct Params {
    const element* dout;                  // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    const element* q;                     // (batch, seqlen_q, num_heads_q, head_dim); rows 16-byte aligned
    const element* k;                     // (batch, seqlen_kv, num_heads_kv, head_dim); rows 16-byte aligned
    const element* v;                     // (batch, seqlen_kv, num_heads_kv, head_dim_v); rows 16-byte aligned
    element* dk;                          // (batch, seqlen_kv, num_heads_kv, head_dim); rows 16-byte aligned
    element* dv;                          // (batch, seqlen_kv, num_heads_kv, head_dim_v); rows 16-byte aligned
    const float* delta;                   // (heads, unit_rows): sum(dout * out) - dlse
    const float* lse_log2;                // (heads, unit_rows): lse in log2 units; inf for a row that attends to no key
    float* dq_accum;                      // (heads, unit_rows, kHeadDim): sums of dQ, in the order of dq_tiles
    int32_t* turns;                       // (heads, blocks of queries): blocks of keys that have added to dq_accum
    float* dk_parts;                      // dK of each part of a group, in tiles of 16 rows by 8 columns
    float* dv_parts;                      // dV of each part of a group, in the same tiles
    const uint8_t* mask;                  // (batch, num_heads_q, seqlen_q, seqlen_kv); not 0 = hidden
    int64_t dout_batch_stride;            // strides are in elements
    int64_t dout_row_stride;
    int64_t dout_head_stride;
    int64_t q_batch_stride;               // strides are in elements
    int64_t q_row_stride;
    int64_t q_head_stride;
    int64_t k_batch_stride;               // strides are in elements
    int64_t k_row_stride;
    int64_t k_head_stride;
    int64_t v_batch_stride;               // strides are in elements
    int64_t v_row_stride;
    int64_t v_head_stride;
    int64_t dk_batch_stride;              // strides are in elements
    int64_t dk_row_stride;
    int64_t dk_head_stride;
    int64_t dv_batch_stride;              // strides are in elements
    int64_t dv_row_stride;
    int64_t dv_head_stride;
    int64_t mask_batch_stride;            // strides are in bytes, 0 where broadcast
    int64_t mask_row_stride;
    int64_t mask_head_stride;
    int32_t num_heads_q;
    int32_t num_heads_kv;
    int32_t group_parts;                  // parts of the query heads of a kv head
    int32_t heads_per_part;               // num_heads_q / num_heads_kv / group_parts
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    int32_t batch_size;                   // sequences
    int32_t heads_per_l2_group;           // heads of the grid whose tiles are launched together
    int32_t diagonal_offset;              // query i is aligned with key i + diagonal_offset
    int32_t window_left;                  // keys before the diagonal that a query attends to
    int32_t window_right;                 // and after it
    int32_t mask_vector_width;            // bytes to which its rows are aligned: 16, 8, 4 or 1
    float softmax_scale;                  // the factor of Q K^T in the scores
    float scale_log2;                     // softmax_scale * log2(e), above 0
};

// The workspace pads each head to a multiple of kRowUnit rows, so the last block of queries is within the array.
constexpr int kRowUnit = 128;

__device__ int unit_rows(const Params& params);  // Rows of a head in the workspace
__device__ int64_t first_unit_row(const Params& params, int batch, int head);  // The row of the workspace that a head begins with

// dq_accum has the layout of MMA accumulators: tiles of 16 rows by 8 columns, and the tiles of 16 rows are contiguous. Element e of lane
// (g, t) = (lane / 4, lane % 4) is row g + 8 (e / 2), column 2 t + e % 2.
// So the red instructions of a warp fill whole lines of 128 bytes. If one red adds four elements (kRedWidth of flashgen/ptx.cuh), the four
// elements of a lane are contiguous. Otherwise element e of all 32 lanes is contiguous.
constexpr int kTileElements = 128;

// The tiles of the 16 rows that begin at `row`
__device__ decltype(Params::dq_accum) dq_tiles(const Params& params, int batch, int head, int row);

// Of a warp's keys and queries. Element [i][j][e] of thread (g, t) = (lane / 4, lane % 4) is key 16 i + 8 (e / 2) + g, query
// 8 j + 2 t + e % 2.
using Scores = float[kKeyTiles][kQueryTiles][4];

// Visits the scores of S^T with their queries and keys
template <typename AtQuery> __device__ void for_each_score(Scores& scores, int first_query, int first_key, int lane, AtQuery at_query);

// ==== visible: which keys a query attends to, and which blocks of queries need a mask

// Keys [begin, end).
struct KeyRange {
    int begin;
    int end;
};

__device__ KeyRange keys_of_query(const Params& params, int query);  // The keys in the range of a query

// Blocks of kBlockM queries.
struct QueryBlocks {
    int first;
    int last;  // less than `first` if there are no blocks
};

// The blocks with a query that attends to a key of [first_key, first_key + kBlockN)
__device__ QueryBlocks find_query_blocks(const Params& params, int first_key);
// Masks the keys that the mask hides from their query, and those outside the range of their query
__device__ void apply_mask(const Params& params, Scores& scores, shared_address tile, int warp_key, int warp_query, int first_key,
    int first_query, int lane);
// ====

// P^T = 2^(scale_log2 * S^T - lse_log2), in place
__device__ void exponentiate(Scores& scores, float scale_log2, shared_address lse, int lane);
__device__ void differentiate(Scores& dp, const Scores& p, shared_address delta, int lane);  // Turns dP^T into dS^T = P^T * (dP^T - delta)

// The keys of a thread block, which computes their dK and dV and adds their share of dQ. dK and dV are sums over the query heads that share
// the kv head, or over a part of these heads.
struct KeyBlock {
    int batch;
    int group_part;  // of heads_per_part query heads, counted over the kv heads of the batch entry
    int index;  // of the block in its head
    int first_key;
};

__device__ int heads_of_grid(const Params& params);  // Heads of a batch entry in the grid
__device__ KeyBlock find_key_block(const Params& params, int index);  // The block of keys of a thread block

// A step of the main loop: a block of queries of a head.
struct Step {
    int head;  // see head_of()
    int block;
};

__device__ int kv_head_of(const Params& params, const KeyBlock& block);  // The kv head of a block of keys
__device__ int heads_of_block(const Params& params);  // How many query heads a thread block goes through, beginning with first_head_of()
__device__ int first_head_of(const Params& params, const KeyBlock& block);  // The first query head that a thread block goes through
__device__ int head_of(const Params& params, const KeyBlock& block, const Step& step);  // The query head of a step
__device__ int first_step_head(const Params&, const KeyBlock&);  // The head of the first step
__device__ Step first_step(const Params& params, const KeyBlock& block, const QueryBlocks& queries);  // The first step of a thread block
__device__ Step next_step(const Step& step, const QueryBlocks& queries);  // The step after this one

// The rows of a block of keys that at least one query of the sequence attends to: [begin, end).
struct SeenRows {
    int begin;
    int end;

    __device__ __forceinline__ bool has(int row) const { return row >= begin && row < end; }

    // The same rows, counted from `row`.
    __device__ __forceinline__ SeenRows from(int row) const { return {begin - row, end - row}; }

    // Only the rows before `count`.
    __device__ __forceinline__ SeenRows among(int count) const { return {begin, min(end, count)}; }
};

__device__ SeenRows seen_rows(const Params& params, int first_key);  // The rows of the block that begins at `first_key`
__device__ int count_steps(const Params& params, const QueryBlocks& queries);  // How many steps a thread block has
__device__ Step step_after(const Params& params, const KeyBlock& block, const Step& step, const QueryBlocks&);  // The step after this one
__device__ void stash_block(const KeyBlock& block, shared_address smem);  // Keeps the block in shared memory
__device__ KeyBlock stashed_block(shared_address smem);  // The block that stash_block() has kept

constexpr int kChunkElements = 16 / sizeof(element);

// Rows of a block in shared memory, written and read in chunks of 16 bytes. The chunks of a row are permuted by its row number, so that
// the eight consecutive rows of one logical column that ldmatrix reads at a time lie in eight different groups of banks. Blocks begin
// at multiples of 128 bytes.
template <int kBytes>
struct SwizzledRows {
    static constexpr int kRowBytes = kBytes;
    static constexpr int kChunks = kRowBytes % 128 == 0 ? 8 : kRowBytes % 64 == 0 ? 4 : 2;  // that are permuted
    static constexpr int kPeriod = 16 * kChunks;
    static_assert(kRowBytes % 32 == 0, "the swizzle permutes at least two chunks");

    // With 8 chunks every row starts at bank 0. With fewer, 8 / kChunks rows start at different banks, and share a swizzle key.
    static __device__ __forceinline__ int swizzle_key(int row) { return row / (8 / kChunks) % kChunks; }

    shared_address at;

    __device__ __forceinline__ SwizzledRows(shared_address block, int row, int chunk)
        : at(block + row * kRowBytes + 16 * (chunk ^ swizzle_key(row))) {}

    // The address `rows` rows down, a multiple of 8, and `chunks` chunks to the right. Within the period the step to the right is an XOR, as the
    // number of the first chunk has no bit in common with `chunks`.
    __device__ __forceinline__ shared_address step(int rows, int chunks) const {
        return (at ^ 16 * chunks % kPeriod) + rows * kRowBytes + 16 * chunks / kPeriod * kPeriod;
    }
};

// Where a lane finds its part of what ldmatrix reads
template <typename Rows> __device__ Rows down_first(shared_address block, int row, int chunk, int lane);
// Where a lane finds its part of what ldmatrix reads, the other way round
template <typename Rows> __device__ Rows right_first(shared_address block, int row, int chunk, int lane);

using RowsOfK = SwizzledRows<kRowBytes>;  // of Q, too
using RowsOfV = SwizzledRows<kRowBytesV>;  // of dO, too
using RowsOfScores = SwizzledRows<kBlockM * sizeof(element)>;  // of P^T and dS^T, a row for each key

// Starts the copy of kBytes of a row of the mask, of which the array has `left`
template <int kBytes> __device__ void copy_mask_bytes(shared_address destination, const uint8_t* source, int left, bool valid);
// Starts the copy of a block of the mask, kBytes at a time
template <int kBytes> __device__ void copy_mask_by(const Params& params, const KeyBlock& block, int head, int first_query,
    shared_address tile);
// The widest copy that the alignment of the mask's rows allows
__device__ void copy_mask(const Params& params, const KeyBlock& block, int head, int first_query, shared_address tile);
// Starts the copy of kCount rows into shared memory
template <typename Rows, int kCount> __device__ void copy_rows(shared_address block, const element* source, int64_t row_stride,
    int first_row, int end_row, int columns);
__device__ void copy_keys(const Params& params, const KeyBlock& block, shared_address smem);  // Starts the copy of K and V of the block
// Starts the copy of a step's Q, dO, lse_log2 and delta into a stage
__device__ void copy_queries(const Params& params, const KeyBlock& block, const Step& step, shared_address stage);

// Of a warp's keys and columns, in fp32.
struct Gradients {
    float dk[kKeyTiles][kDkTiles][4];
    float dv[kKeyTiles][kDvTiles][4];
};

// scores = keys . queries^T over kDim columns, for the warp's keys and queries
template <int kDim, typename Rows> __device__ void mma_scores(Scores& scores, const Rows& keys, const Rows& queries);

// P^T or dS^T of the warp's keys and some queries, rounded and packed: an A operand. The accumulator layout of two neighbouring
// tiles is the A layout of one 16x16 tile.
struct Operand {
    uint32_t fragment[kKeyTiles][kQueryTiles / 2][4];

    __device__ __forceinline__ explicit Operand(const Scores& scores) {
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
            for (int j = 0; j < kQueryTiles; ++j) {
                fragment[i][j / 2][j % 2 * 2] = pack<element>(scores[i][j][0], scores[i][j][1]);
                fragment[i][j / 2][j % 2 * 2 + 1] = pack<element>(scores[i][j][2], scores[i][j][3]);
            }
        }
    }

    // The operand of other queries, from a block of P^T or dS^T in shared memory.
    __device__ __forceinline__ Operand(shared_address block, int first_key, int first_query, int lane) {
        const auto rows = down_first<RowsOfScores>(block, first_key, first_query / 8, lane);
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
            for (int j = 0; j < kQueryTiles / 2; ++j) ldmatrix_x4(fragment[i][j], rows.step(16 * i, 2 * j));
        }
    }

    // Puts them into a block of P^T or dS^T in shared memory, a row for each key.
    __device__ __forceinline__ void store(shared_address block, int first_key, int first_query, int lane) const {
        const RowsOfScores rows(block, first_key + lane / 4, first_query / 8);
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
            for (int j = 0; j < kQueryTiles; ++j) {
#pragma unroll
                for (int key8 = 0; key8 < 2; ++key8) {
                    store_shared_32(rows.step(16 * i + 8 * key8, j) + lane % 4 * 4, fragment[i][j / 2][j % 2 * 2 + key8]);
                }
            }
        }
    }
};

using ColumnsOfK = RowsOfK;  // of dQ, which sums over keys

// Where a lane finds its part of a B operand whose rows are summed over
template <typename Rows> __device__ Rows summed_rows(shared_address block, int row, int column_pair, int lane);
// The first column of accumulator tile n of a warp whose first pair of chunks is `column_pair`, and whose pairs are `stride` apart
__device__ int column_of(int n, int stride, int column_pair);
// sums += operand . rows
template <typename Rows, int kTiles> __device__ void mma_gradients(float (&sums)[kKeyTiles][kTiles][4], const Operand& operand,
    const Rows& rows);
// dQ = dS . K of the warp's queries and columns; `ds` has dS^T, a row for each key
__device__ void mma_dq(float (&dq)[kDqRowTiles][kDqColumnTiles][4], shared_address ds, int first_query, const RowsOfK& keys, int lane);

// Thread blocks, or clusters, add to a block of queries one after another, later keys first, so that the sums repeat to the bit. A counter says how
// many have added. In a cluster the two halves of the columns of dQ have a counter each, so the turns of one half do not wait for the other half.
// A thread block waits only for thread blocks of its head with a lower index in the grid. So the unfinished thread block with the lowest index
// waits for none, and there is no deadlock if it runs. It runs because the hardware starts thread blocks by increasing index. CUDA does not
// promise that.

// The last block of keys with a key in the range of some query of a block
__device__ int last_key_block(const Params& params, int query_block);
// How many thread blocks add to a step's block of queries before this one
__device__ uint32_t turn_of(const Params& params, const KeyBlock& block, const Step& step);
__device__ uint32_t* turns_of(const Params& params, const KeyBlock& block, const Step& step);  // The counter of a step's block of queries
// Whether all earlier thread blocks have added to a step's block of queries
__device__ bool has_turn(const Params& params, const KeyBlock& block, const Step& step);
__device__ void pass_turn(const Params& params, const KeyBlock& block, const Step& step);  // Passes the turn to the next thread block
// Computes dQ of a warp's queries and columns in a step, and adds it to dq_accum
__device__ void add_dq(const Params& params, const KeyBlock& block, const Step& step, const ColumnsOfK& k_columns, shared_address smem,
    int first_row, int column_warp, int lane);
// Adds to dV and dK of a warp's keys what the queries of other warps contribute
__device__ void mma_other_queries(Gradients& gradients, shared_address smem, shared_address q, shared_address dout, int warp_key, int part,
    int lane);
// Rounds the gradients of the warp's keys and puts them into a block of shared memory
template <typename Rows, int kTiles> __device__ void stage_gradients(shared_address block, const float (&sums)[kKeyTiles][kTiles][4],
    float scale, int warp_key, int part, int lane);

// With group_parts above 1, a thread block sums dK and dV over a part of the query heads and writes them to the workspace in fp32. The sum kernel
// adds the parts. Tiles are 16 keys by 8 columns, and the elements of a lane are contiguous.

// The tiles of the 16 keys that begin at `key`
template <int kColumns> __device__ float* part_tiles(const Params& params, float* parts, const KeyBlock& block, int key);
__device__ void store_tile(float* tile, const float (&values)[4], int lane);  // Writes a warp's tile, of which each lane has four elements
// Writes the gradients of the warp's keys, summed over a part of the query heads, to the tiles of its first key
template <int kColumns, int kTiles> __device__ void store_part(float* tiles, const float (&sums)[kKeyTiles][kTiles][4], int part, int lane);
// Writes a block of gradients, so that global memory sees whole rows in 16-byte vectors
template <typename Rows> __device__ void store_rows(shared_address block, element* destination, int64_t row_stride, int valid_rows,
    int columns);
// Writes dK and dV, staged in the shared memory of K and V, which no warp reads any longer
__device__ void store_gradients(const Params& params, const KeyBlock& block, const Gradients& gradients, shared_address smem, int warp_key,
    int part, int lane);

extern "C" __global__ void __launch_bounds__(kThreads, 1)
flash_bwd_hdim128_fp16_dense_ordered_gqa_sm80(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address smem = to_shared(shared_memory);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int warp_key = warp / kQueryWarps * kWarpKeys;
    const int part = warp % kQueryWarps;  // of queries, and of columns of dK and dV
    const int warp_query = part * kWarpQueries;
    const int dq_row = warp / kDqColumnWarps * (16 * kDqRowTiles);
    const int dq_column_warp = warp % kDqColumnWarps;

    const KeyBlock found_block = find_key_block(params, block_index());
    if (threadIdx.x == 0) stash_block(found_block, smem);
    const QueryBlocks queries = find_query_blocks(params, found_block.first_key);
    Step step = first_step(params, found_block, queries);
    const int num_steps = count_steps(params, queries);
    const auto k_rows = down_first<RowsOfK>(smem + kKOffset, warp_key, 0, lane);
    const auto v_rows = down_first<RowsOfV>(smem + kVOffset, warp_key, 0, lane);
    const auto k_columns = summed_rows<RowsOfK>(smem + kKOffset, 0, dq_column_warp * kDqWarpStride, lane);
    Gradients gradients = {};

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    if (num_steps > 0) {
        copy_keys(params, found_block, smem);
        copy_queries(params, found_block, step, smem + kStagesOffset + num_steps % kStages * kStageBytes);
        cp_async_commit();
    }
    for (int left = num_steps; left > 0; --left) {
        const shared_address stage = smem + kStagesOffset + left % kStages * kStageBytes;
        const shared_address q = stage + kQOffset;
        const shared_address dout = stage + kDoutOffset;
        // 1. Wait for Q and dO. After the barrier every warp has finished with the buffers of the previous step, which are written next. Start
        // the copies of the next step where there is a second stage.
        cp_async_wait<0>();
        barrier_sync(kThreads);
        const KeyBlock block = stashed_block(smem);
        const Step next = step_after(params, block, step, queries);
        if (left > 1) {
            copy_queries(params, block, next, smem + kStagesOffset + (left - 1) % kStages * kStageBytes);
            cp_async_commit();
        }
        // One thread reads the counter early: the load is a round trip to L2.
        bool is_turn = threadIdx.x != kThreads - 32 || has_turn(params, block, step);

        // 2. S^T = K Q^T, P^T: score, mask, exponentials. dP^T = V dO^T, dS^T = P^T (dP^T - delta).
        Scores p;
        mma_scores<kHeadDim>(p, k_rows, right_first<RowsOfK>(q, warp_query, 0, lane));
        const int first_query = step.block * kBlockM;
        apply_mask(params, p, stage + kMaskOffset, warp_key, warp_query, block.first_key + warp_key, first_query + warp_query, lane);
        exponentiate(p, params.scale_log2, stage + kLseOffset + 4 * warp_query, lane);
        Scores ds;
        mma_scores<kHeadDimV>(ds, v_rows, right_first<RowsOfV>(dout, warp_query, 0, lane));
        differentiate(ds, p, stage + kDeltaOffset + 4 * warp_query, lane);
        // 3. P^T and dS^T to shared memory. dV += P^T dO and dK += dS^T Q over the warp's queries.
        const Operand p_operand(p);
        const Operand ds_operand(ds);
        p_operand.store(smem + kPOffset, warp_key, warp_query, lane);
        ds_operand.store(smem + kDsOffset, warp_key, warp_query, lane);
        mma_gradients(gradients.dv, p_operand, summed_rows<RowsOfV>(dout, warp_query, part, lane));
        mma_gradients(gradients.dk, ds_operand, summed_rows<RowsOfK>(q, warp_query, part, lane));

        while (!is_turn) is_turn = has_turn(params, block, step);  // the others wait at the barrier
        // 4. Wait for P and dS of all warps. dV and dK over the queries of other warps, dQ += dS K in memory.
        barrier_sync(kThreads);
        add_dq(params, block, step, k_columns, smem, dq_row, dq_column_warp, lane);
        // Only the first warp waits until all have added.
        if (warp == 0) {
            barrier_sync(kAddedBarrier, kThreads);
            if (lane == 0) pass_turn(params, block, step);
        } else {
            barrier_arrive(kAddedBarrier, kThreads);
        }
        mma_other_queries(gradients, smem, q, dout, warp_key, part, lane);
        step = next;
    }

    barrier_sync(kThreads);  // every warp has finished with K and V
    store_gradients(params, stashed_block(smem), gradients, smem, warp_key, part, lane);
}

__device__ __forceinline__ int unit_rows(const Params& params) { return (params.seqlen_q + kRowUnit - 1) / kRowUnit * kRowUnit; }

__device__ __forceinline__ int64_t first_unit_row(const Params& params, int batch, int head) {
    return (int64_t(batch) * params.num_heads_q + head) * unit_rows(params);
}

__device__ __forceinline__ decltype(Params::dq_accum) dq_tiles(const Params& params, int batch, int head, int row) {
    return params.dq_accum + (first_unit_row(params, batch, head) + row) * kHeadDim;
}

// Visits the scores of S^T with their queries and keys. The warp's MMA tiles begin at key `first_key` and query `first_query`. For each query
// of this lane at_query(query, lane_key) returns a function. It is called with (step, score) for each score that the lane has of the query: the
// score of key lane_key + step. Steps are constants, so that a comparison with one takes one instruction.
template <typename AtQuery>
__device__ __forceinline__ void for_each_score(Scores& scores, int first_query, int first_key, int lane, AtQuery at_query) {
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            auto at_score = at_query(first_query + 8 * j + lane % 4 * 2 + e, first_key + lane / 4);
#pragma unroll
            for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
                for (int key8 = 0; key8 < 2; ++key8) at_score(16 * i + 8 * key8, scores[i][j][2 * key8 + e]);
            }
        }
    }
}

// ==== visible: which keys a query attends to, and which blocks of queries need a mask

// The keys in the range of a query: a window around its diagonal. A side without a bound is past every key.
__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int query) {
    const int diagonal = query + params.diagonal_offset;
    return {max(0, diagonal - params.window_left), max(0, min(params.seqlen_kv, diagonal + params.window_right + 1))};
}

__device__ __forceinline__ QueryBlocks find_query_blocks(const Params& params, int first_key) {
    const int last_key = min(first_key + kBlockN, params.seqlen_kv) - 1;
    const int begin = max(0, first_key - params.diagonal_offset - params.window_right);
    // A side without a bound is 2^30 keys away.
    const int64_t last_query = int64_t(last_key) - params.diagonal_offset + params.window_left;
    const int end = last_query < params.seqlen_q ? int(last_query) + 1 : params.seqlen_q;
    if (begin >= end) return {0, -1};
    return {begin / kBlockM, (end - 1) / kBlockM};
}

__device__ __forceinline__ void apply_mask(const Params& params, Scores& scores, shared_address tile, int warp_key, int warp_query,
                                           int first_key, int first_query, int lane) {
    for_each_score(scores, first_query, first_key, lane, [&](int query, int lane_key) {
        const KeyRange keys = keys_of_query(params, query);
        const int begin = keys.begin - lane_key;
        const int end = keys.end - lane_key;
        const shared_address row = tile + (warp_query + query - first_query) * kMaskRowBytes + warp_key + lane_key - first_key;
        return [=](int step, float& score) {
            if (load_shared_8(row + step) != 0 || step < begin || step >= end) score = -INFINITY;
        };
    });
}
// ====

__device__ __forceinline__ void exponentiate(Scores& scores, float scale_log2, shared_address lse, int lane) {
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j) {
        const float2 of_queries = load_shared_64(lse + 4 * (8 * j + lane % 4 * 2));
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                scores[i][j][e] = exp2_approx(fmaf(scores[i][j][e], scale_log2, e % 2 == 0 ? -of_queries.x : -of_queries.y));
            }
        }
    }
}

__device__ __forceinline__ void differentiate(Scores& dp, const Scores& p, shared_address delta, int lane) {
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j) {
        const float2 of_queries = load_shared_64(delta + 4 * (8 * j + lane % 4 * 2));
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) dp[i][j][e] = p[i][j][e] * (dp[i][j][e] - (e % 2 == 0 ? of_queries.x : of_queries.y));
        }
    }
}

// Heads of a batch entry in the grid: each kv head, or each part of its query heads.
__device__ __forceinline__ int heads_of_grid(const Params& params) { return params.num_heads_kv * params.group_parts; }

// The block of keys of a thread block.
// Heads are launched in groups of heads_per_l2_group: about as many thread blocks as run at a time, but at least one head. The first blocks of all
// heads of a group are launched first, then the second ones. So the blocks of a head run at about the same time, and share its queries in L2.
__device__ __forceinline__ KeyBlock find_key_block(const Params& params, int index) {
    const int first_head = index / (params.heads_per_l2_group * params.num_row_blocks) * params.heads_per_l2_group;
    const int group_heads = min(params.heads_per_l2_group, params.batch_size * heads_of_grid(params) - first_head);
    const int index_in_group = index - first_head * params.num_row_blocks;
    KeyBlock block;
    const int blocks_before = index_in_group / group_heads;  // of its head
    const int head_of_batch = first_head + index_in_group - blocks_before * group_heads;
    // The last keys first, the order in which a head adds to dQ (turn_of): when a block starts, the earlier ones of its head have a lead.
    block.index = params.num_row_blocks - 1 - blocks_before;
    block.first_key = block.index * kBlockN;
    block.batch = head_of_batch / heads_of_grid(params);
    block.group_part = head_of_batch - block.batch * heads_of_grid(params);
    return block;
}

__device__ __forceinline__ int kv_head_of(const Params& params, const KeyBlock& block) { return block.group_part / params.group_parts; }

__device__ __forceinline__ int heads_of_block(const Params& params) { return params.heads_per_part; }

__device__ __forceinline__ int first_head_of(const Params& params, const KeyBlock& block) {
    return block.group_part * params.heads_per_part;
}

__device__ __forceinline__ int head_of(const Params& params, const KeyBlock& block, const Step& step) {
    return first_head_of(params, block) + step.head;
}

__device__ __forceinline__ int first_step_head(const Params&, const KeyBlock&) { return 0; }

// The first step of a thread block.
// Steps go from the first block of queries to the last. Under a diagonal a thread block begins with query 0, or with queries that see no
// later keys. There it has the first turn. After that it follows the thread blocks of later keys.
// A thread block goes through one query head after another, and so sums the gradients of their keys.
__device__ __forceinline__ Step first_step(const Params& params, const KeyBlock& block, const QueryBlocks& queries) {
    return {first_step_head(params, block), queries.first};
}

__device__ __forceinline__ Step next_step(const Step& step, const QueryBlocks& queries) {
    return step.block < queries.last ? Step{step.head, step.block + 1} : Step{step.head + 1, queries.first};
}

// The rows of the block that begins at `first_key`. All other rows become zeros, whatever they hold: 0 * NaN would be NaN.
__device__ __forceinline__ SeenRows seen_rows(const Params& params, int first_key) {
    const int end = keys_of_query(params, params.seqlen_q - 1).end;
    return {keys_of_query(params, 0).begin - first_key, end - first_key};
}

// How many steps a thread block has: the blocks of queries, for each of its query heads.
__device__ __forceinline__ int count_steps(const Params& params, const QueryBlocks& queries) {
    return (queries.last - queries.first + 1) * heads_of_block(params);
}

// The step after this one. The blocks of queries are found again: held from step to step they would take registers.
__device__ __forceinline__ Step step_after(const Params& params, const KeyBlock& block, const Step& step, const QueryBlocks&) {
    return next_step(step, find_query_blocks(params, block.first_key));
}

// Keeps the block in shared memory.
// Each step and the epilogue read it from there, so that neither the block nor the addresses that follow from it take registers.
__device__ __forceinline__ void stash_block(const KeyBlock& block, shared_address smem) {
    store_shared_64(smem + kBlockOffset, block.batch, block.group_part);
    store_shared_64(smem + kBlockOffset + 8, block.index, block.first_key);
}

__device__ __forceinline__ KeyBlock stashed_block(shared_address smem) {
    const uint4 words = load_shared_128(smem + kBlockOffset);
    KeyBlock block;
    block.batch = words.x;
    block.group_part = words.y;
    block.index = words.z;
    block.first_key = words.w;
    return block;
}

// Where a lane finds its part of what ldmatrix reads: the four 8x8 matrices are rows 0-7 and 8-15 of the left chunk, then of the right
// one.
template <typename Rows>
__device__ __forceinline__ Rows down_first(shared_address block, int row, int chunk, int lane) {
    return Rows(block, row + lane % 16, chunk + lane / 16);
}

// Where a lane finds its part of what ldmatrix reads, the other way round: the left and the right chunk of rows 0-7, then of rows 8-15.
template <typename Rows>
__device__ __forceinline__ Rows right_first(shared_address block, int row, int chunk, int lane) {
    return Rows(block, row + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2);
}

// Starts the copy of kBytes of a row of the mask, of which the array has `left`: the others become zeros, as all do unless `valid`.
template <int kBytes>
__device__ __forceinline__ void copy_mask_bytes(shared_address destination, const uint8_t* source, int left, bool valid) {
    // A copy that begins before the last key may not read past it.
    const int bytes = valid ? min(kBytes, left) : 0;
    if constexpr (kBytes == 16) {
        cp_async_16(destination, source, bytes);
    } else if constexpr (kBytes == 4) {
        cp_async_4(destination, source, bytes);
    } else {
        store_shared_8(destination, valid ? load_global_8(source) : 0);
    }
}

// Starts the copy of a block of the mask, kBytes at a time. Bytes past the ends are of hidden keys, or of queries that have lse_log2 inf.
template <int kBytes>
__device__ __forceinline__ void copy_mask_by(const Params& params, const KeyBlock& block, int head, int first_query, shared_address tile) {
    constexpr int kUnitsPerRow = kBlockN / kBytes;
    const uint8_t* mask = params.mask + block.batch * params.mask_batch_stride + head * params.mask_head_stride;
#pragma unroll 4
    for (int unit = threadIdx.x; unit < kBlockM * kUnitsPerRow; unit += kThreads) {
        const int row = unit / kUnitsPerRow;
        const int key = unit % kUnitsPerRow * kBytes;
        const int query = first_query + row;
        const bool valid = query < params.seqlen_q && block.first_key + key < params.seqlen_kv;
        const uint8_t* source = valid ? mask + query * params.mask_row_stride + block.first_key + key : mask;
        const shared_address destination = tile + row * kMaskRowBytes + key;
        copy_mask_bytes<kBytes>(destination, source, params.seqlen_kv - block.first_key - key, valid);
    }
}

__device__ __forceinline__ void copy_mask(const Params& params, const KeyBlock& block, int head, int first_query, shared_address tile) {
    if (params.mask_vector_width >= 16) {
        copy_mask_by<16>(params, block, head, first_query, tile);
    } else if (params.mask_vector_width >= 4) {
        copy_mask_by<4>(params, block, head, first_query, tile);
    } else {
        copy_mask_by<1>(params, block, head, first_query, tile);
    }
}

// Starts the copy of kCount rows into shared memory. kChunks neighbouring threads share a row: each copies every kChunks-th
// chunk of it. Rows outside of [first_row, end_row) and elements from `columns` on become zeros. `row_stride` is in elements.
template <typename Rows, int kCount>
__device__ __forceinline__ void copy_rows(shared_address block, const element* source, int64_t row_stride, int first_row, int end_row,
                                          int columns) {
    constexpr int kRowsPerPass = kThreads / Rows::kChunks;
    static_assert(kRowsPerPass % 8 == 0, "the rows of a thread are swizzled alike");
    const int row = threadIdx.x / Rows::kChunks;
    const int chunk = threadIdx.x % Rows::kChunks;
    const Rows destination(block, row, chunk);
    source += row * row_stride + chunk * kChunkElements;
    // One pointer steps from row to row, by one addition. It is opaque, as the compiler would otherwise compute an address for each copy,
    // with five instructions.
#pragma unroll
    for (int first = 0; first < kCount; first += kRowsPerPass) {
        if (kCount % kRowsPerPass != 0 && first + row >= kCount) break;
#pragma unroll
        for (int panel = 0; panel < Rows::kRowBytes / Rows::kPeriod; ++panel) {
            const int column = (panel * Rows::kChunks + chunk) * kChunkElements;
            cp_async_16(destination.step(first, panel * Rows::kChunks), source + panel * Rows::kChunks * kChunkElements,
                        first + row >= first_row && first + row < end_row && column < columns ? 16 : 0);
        }
        if (first + kRowsPerPass < kCount) source += kRowsPerPass * row_stride;
        opaque(source);
    }
}

__device__ __forceinline__ void copy_keys(const Params& params, const KeyBlock& block, shared_address smem) {
    const SeenRows seen = seen_rows(params, block.first_key);
    const int first_row = seen.begin;
    const int kv_head = kv_head_of(params, block);
    copy_rows<RowsOfK, kBlockN>(smem + kKOffset,
                                params.k + block.batch * params.k_batch_stride + kv_head * params.k_head_stride +
                                    block.first_key * params.k_row_stride,
                                params.k_row_stride, first_row, seen.end, params.head_dim);
    copy_rows<RowsOfV, kBlockN>(smem + kVOffset,
                                params.v + block.batch * params.v_batch_stride + kv_head * params.v_head_stride +
                                    block.first_key * params.v_row_stride,
                                params.v_row_stride, first_row, seen.end, params.head_dim_v);
}

__device__ __forceinline__ void copy_queries(const Params& params, const KeyBlock& block, const Step& step, shared_address stage) {
    const int head = head_of(params, block, step);
    const int first_query = step.block * kBlockM;
    const int valid_rows = params.seqlen_q - first_query;
    copy_rows<RowsOfK, kBlockM>(stage + kQOffset,
                                params.q + block.batch * params.q_batch_stride + head * params.q_head_stride +
                                    first_query * params.q_row_stride,
                                params.q_row_stride, 0, valid_rows, params.head_dim);
    copy_rows<RowsOfV, kBlockM>(stage + kDoutOffset,
                                params.dout + block.batch * params.dout_batch_stride + head * params.dout_head_stride +
                                    first_query * params.dout_row_stride,
                                params.dout_row_stride, 0, valid_rows, params.head_dim_v);
    // LSE and delta have all rows of the block. Four floats a thread.
    const int row = threadIdx.x % (kBlockM / 4) * 4;
    const int64_t unit_row = first_unit_row(params, block.batch, head) + first_query + row;
    if (threadIdx.x < kBlockM / 4) {
        cp_async_16(stage + kLseOffset + 4 * row, params.lse_log2 + unit_row, 16);
    } else if (threadIdx.x < kBlockM / 2) {
        cp_async_16(stage + kDeltaOffset + 4 * row, params.delta + unit_row, 16);
    }
    copy_mask(params, block, head, first_query, stage + kMaskOffset);
}

template <int kDim, typename Rows>
__device__ __forceinline__ void mma_scores(Scores& scores, const Rows& keys, const Rows& queries) {
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kQueryTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i][j][e] = 0.0f;
        }
    }
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        uint32_t a[kKeyTiles][4];
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) ldmatrix_x4(a[i], keys.step(16 * i, 2 * step));
#pragma unroll
        for (int j = 0; j < kQueryTiles; j += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, queries.step(8 * j, 2 * step));
#pragma unroll
            for (int i = 0; i < kKeyTiles; ++i) {
                mma_m16n8k16<element>(scores[i][j], a[i], b[0], b[1]);
                mma_m16n8k16<element>(scores[i][j + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// Where a lane finds its part of a B operand whose rows are summed over: 16 columns, pair `column_pair` of the row's chunks.
template <typename Rows>
__device__ __forceinline__ Rows summed_rows(shared_address block, int row, int column_pair, int lane) {
    return down_first<Rows>(block, row, 2 * column_pair, lane);
}

__device__ __forceinline__ int column_of(int n, int stride, int column_pair) { return 16 * (n / 2 * stride + column_pair) + n % 2 * 8; }

// sums += operand . rows: the gradients of the warp's keys.
template <typename Rows, int kTiles>
__device__ __forceinline__ void mma_gradients(float (&sums)[kKeyTiles][kTiles][4], const Operand& operand, const Rows& rows) {
#pragma unroll
    for (int j = 0; j < kQueryTiles / 2; ++j) {
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, rows.step(16 * j, n * kQueryWarps));
#pragma unroll
            for (int i = 0; i < kKeyTiles; ++i) {
                mma_m16n8k16<element>(sums[i][n], operand.fragment[i][j], b[0], b[1]);
                mma_m16n8k16<element>(sums[i][n + 1], operand.fragment[i][j], b[2], b[3]);
            }
        }
    }
}

__device__ __forceinline__ void mma_dq(float (&dq)[kDqRowTiles][kDqColumnTiles][4], shared_address ds, int first_query,
                                       const RowsOfK& keys, int lane) {
    const auto ds_rows = right_first<RowsOfScores>(ds, 0, first_query / 8, lane);
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
        uint32_t a[kDqRowTiles][4];
#pragma unroll
        for (int i = 0; i < kDqRowTiles; ++i) ldmatrix_x4_trans(a[i], ds_rows.step(16 * step, 2 * i));
#pragma unroll
        for (int n = 0; n < kDqColumnTiles; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, keys.step(16 * step, n * kDqPairStride));
#pragma unroll
            for (int i = 0; i < kDqRowTiles; ++i) {
                mma_m16n8k16<element>(dq[i][n], a[i], b[0], b[1]);
                mma_m16n8k16<element>(dq[i][n + 1], a[i], b[2], b[3]);
            }
        }
    }
}

__device__ __forceinline__ int last_key_block(const Params& params, int query_block) {
    const int last_query = min((query_block + 1) * kBlockM, params.seqlen_q) - 1;
    // A side without a bound is 2^30 keys away.
    const int64_t last_key = int64_t(last_query) + params.diagonal_offset + params.window_right;
    return int(min(last_key, int64_t(params.seqlen_kv - 1)) / kBlockN);
}

__device__ __forceinline__ uint32_t turn_of(const Params& params, const KeyBlock& block, const Step& step) {
    return last_key_block(params, step.block) - block.index;
}

__device__ __forceinline__ uint32_t* turns_of(const Params& params, const KeyBlock& block, const Step& step) {
    const int64_t unit_row = first_unit_row(params, block.batch, head_of(params, block, step));
    return reinterpret_cast<uint32_t*>(params.turns) + unit_row / kBlockM + step.block;
}

// Whether all earlier thread blocks have added to a step's block of queries. The acquire orders their additions before ours.
__device__ __forceinline__ bool has_turn(const Params& params, const KeyBlock& block, const Step& step) {
    return load_acquire_32(turns_of(params, block, step)) == turn_of(params, block, step);
}

// Passes the turn to the next thread block.
// Called by one thread after a barrier that follows the additions of all: the release covers them.
__device__ __forceinline__ void pass_turn(const Params& params, const KeyBlock& block, const Step& step) {
    store_release_32(turns_of(params, block, step), turn_of(params, block, step) + 1);
}

// Computes dQ of a warp's queries and columns in a step, and adds it to dq_accum. `k_columns` are the warp's columns of K.
__device__ __forceinline__ void add_dq(const Params& params, const KeyBlock& block, const Step& step, const ColumnsOfK& k_columns,
                                       shared_address smem, int first_row, int column_warp, int lane) {
    float dq[kDqRowTiles][kDqColumnTiles][4] = {};
    mma_dq(dq, smem + kDsOffset, first_row, k_columns, lane);
    const int first_query = step.block * kBlockM + first_row;
    float* tiles = dq_tiles(params, block.batch, head_of(params, block, step), first_query) + kRedWidth * lane;
#pragma unroll
    for (int i = 0; i < kDqRowTiles; ++i) {
#pragma unroll
        for (int n = 0; n < kDqColumnTiles; ++n) {
            float* tile = tiles + (i * (kHeadDim / 8) + column_of(n, kDqPairStride, column_warp * kDqWarpStride) / 8) * kTileElements;
            if constexpr (kRedWidth == 4) {
                red_add_128(tile, dq[i][n]);
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) red_add(tile + 32 * e, dq[i][n][e]);
            }
        }
    }
}

// Adds to dV and dK of a warp's keys what the queries of other warps contribute. P and dS of these come from shared memory.
__device__ __forceinline__ void mma_other_queries(Gradients& gradients, shared_address smem, shared_address q, shared_address dout,
                                                  int warp_key, int part, int lane) {
#pragma unroll
    for (int other = 1; other < kQueryWarps; ++other) {
        const int query = (part + other) % kQueryWarps * kWarpQueries;
        mma_gradients(gradients.dv, Operand(smem + kPOffset, warp_key, query, lane), summed_rows<RowsOfV>(dout, query, part, lane));
        mma_gradients(gradients.dk, Operand(smem + kDsOffset, warp_key, query, lane), summed_rows<RowsOfK>(q, query, part, lane));
    }
}

template <typename Rows, int kTiles>
__device__ __forceinline__ void stage_gradients(shared_address block, const float (&sums)[kKeyTiles][kTiles][4], float scale, int warp_key,
                                                int part, int lane) {
    const Rows rows(block, warp_key + lane / 4, 2 * part);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const int chunk = column_of(n, kQueryWarps, 0) / kChunkElements;
#pragma unroll
            for (int key8 = 0; key8 < 2; ++key8) {
                const float low = scale * sums[i][n][2 * key8];
                const float high = scale * sums[i][n][2 * key8 + 1];
                store_shared_32(rows.step(16 * i + 8 * key8, chunk) + lane % 4 * 4, pack<element>(low, high));
            }
        }
    }
}

template <int kColumns>
__device__ __forceinline__ float* part_tiles(const Params& params, float* parts, const KeyBlock& block, int key) {
    const int64_t part = int64_t(block.batch) * heads_of_grid(params) + block.group_part;
    return parts + (part * params.num_row_blocks * kBlockN + key) * kColumns;
}

__device__ __forceinline__ void store_tile(float* tile, const float (&values)[4], int lane) {
    store_global_128(tile + 4 * lane, {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                                       __float_as_uint(values[3])});
}

template <int kColumns, int kTiles>
__device__ __forceinline__ void store_part(float* tiles, const float (&sums)[kKeyTiles][kTiles][4], int part, int lane) {
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            store_tile(tiles + (i * (kColumns / 8) + column_of(n, kQueryWarps, part) / 8) * kTileElements, sums[i][n], lane);
        }
    }
}

template <typename Rows>
__device__ __forceinline__ void store_rows(shared_address block, element* destination, int64_t row_stride, int valid_rows, int columns) {
    constexpr int kRowsPerPass = kThreads / Rows::kChunks;
    static_assert(kBlockN % kRowsPerPass == 0, "each pass has its rows");
    const int row = threadIdx.x / Rows::kChunks;
    const int chunk = threadIdx.x % Rows::kChunks;
    const Rows source(block, row, chunk);
    destination += row * row_stride + chunk * kChunkElements;
#pragma unroll
    for (int first = 0; first < kBlockN; first += kRowsPerPass) {
        if (first + row >= valid_rows) break;
#pragma unroll
        for (int panel = 0; panel < Rows::kRowBytes / Rows::kPeriod; ++panel) {
            const int first_column = panel * Rows::kChunks * kChunkElements;
            if (first_column + chunk * kChunkElements >= columns) break;
            store_global_128(destination + first_column, load_shared_128(source.step(first, panel * Rows::kChunks)));
        }
        destination += kRowsPerPass * row_stride;
    }
}

// Writes dK and dV, staged in the shared memory of K and V, which no warp reads any longer. Sums over a part of a group's query heads go to the
// workspace instead.
__device__ __forceinline__ void store_gradients(const Params& params, const KeyBlock& block, const Gradients& gradients,
                                                shared_address smem, int warp_key, int part, int lane) {
    if (params.group_parts > 1) {
        const int first_key = block.first_key + warp_key;
        store_part<kHeadDim>(part_tiles<kHeadDim>(params, params.dk_parts, block, first_key), gradients.dk, part, lane);
        store_part<kHeadDimV>(part_tiles<kHeadDimV>(params, params.dv_parts, block, first_key), gradients.dv, part, lane);
        return;
    }
    stage_gradients<RowsOfK>(smem + kKOffset, gradients.dk, params.softmax_scale, warp_key, part, lane);
    stage_gradients<RowsOfV>(smem + kVOffset, gradients.dv, 1.0f, warp_key, part, lane);
    barrier_sync(kThreads);
    const int valid_rows = params.seqlen_kv - block.first_key;
    const int kv_head = kv_head_of(params, block);
    store_rows<RowsOfK>(smem + kKOffset,
                        params.dk + block.batch * params.dk_batch_stride + kv_head * params.dk_head_stride +
                            block.first_key * params.dk_row_stride,
                        params.dk_row_stride, valid_rows, params.head_dim);
    store_rows<RowsOfV>(smem + kVOffset,
                        params.dv + block.batch * params.dv_batch_stride + kv_head * params.dv_head_stride +
                            block.first_key * params.dv_row_stride,
                        params.dv_row_stride, valid_rows, params.head_dim_v);
}

static_assert(kWarps == kKeyWarps * kQueryWarps && kWarps == kDqRowWarps * kDqColumnWarps, "every warp has a part");
static_assert(kWarpKeys % 16 == 0 && kWarpQueries % 16 == 0, "a warp has whole MMA tiles of P^T, also as an A operand");
static_assert(kHeadDim / kPairColumns % kQueryWarps == 0 && kHeadDimV / kPairColumns % kQueryWarps == 0,
              "warps have equal parts of the columns of dK, and of dV");
static_assert(kHeadDim / kPairColumns % kDqColumnWarps == 0, "and of dQ");
static_assert(kDqInTurn || (kDqPairs & (kDqPairs - 1)) == 0, "pairs side by side are a power of two");
static_assert(kStageBytes % 128 == 0 && kDsBytes % 128 == 0, "blocks begin at multiples of 128 bytes");
static_assert(sizeof(SharedStorage) == 124432, "launcher and kernel agree on shared memory");
static_assert(sizeof(Params) == 344 && offsetof(Params, dout) == 0 && offsetof(Params, q) == 8 && offsetof(Params, k) == 16);
static_assert(offsetof(Params, v) == 24 && offsetof(Params, dk) == 32 && offsetof(Params, dv) == 40);
static_assert(offsetof(Params, delta) == 48 && offsetof(Params, lse_log2) == 56 && offsetof(Params, dq_accum) == 64);
static_assert(offsetof(Params, turns) == 72 && offsetof(Params, dk_parts) == 80 && offsetof(Params, dv_parts) == 88);
static_assert(offsetof(Params, mask) == 96 && offsetof(Params, dout_batch_stride) == 104);
static_assert(offsetof(Params, dout_row_stride) == 112 && offsetof(Params, dout_head_stride) == 120);
static_assert(offsetof(Params, q_batch_stride) == 128 && offsetof(Params, q_row_stride) == 136);
static_assert(offsetof(Params, q_head_stride) == 144 && offsetof(Params, k_batch_stride) == 152);
static_assert(offsetof(Params, k_row_stride) == 160 && offsetof(Params, k_head_stride) == 168);
static_assert(offsetof(Params, v_batch_stride) == 176 && offsetof(Params, v_row_stride) == 184);
static_assert(offsetof(Params, v_head_stride) == 192 && offsetof(Params, dk_batch_stride) == 200);
static_assert(offsetof(Params, dk_row_stride) == 208 && offsetof(Params, dk_head_stride) == 216);
static_assert(offsetof(Params, dv_batch_stride) == 224 && offsetof(Params, dv_row_stride) == 232);
static_assert(offsetof(Params, dv_head_stride) == 240 && offsetof(Params, mask_batch_stride) == 248);
static_assert(offsetof(Params, mask_row_stride) == 256 && offsetof(Params, mask_head_stride) == 264);
static_assert(offsetof(Params, num_heads_q) == 272 && offsetof(Params, num_heads_kv) == 276);
static_assert(offsetof(Params, group_parts) == 280 && offsetof(Params, heads_per_part) == 284);
static_assert(offsetof(Params, seqlen_q) == 288 && offsetof(Params, seqlen_kv) == 292 && offsetof(Params, head_dim) == 296);
static_assert(offsetof(Params, head_dim_v) == 300 && offsetof(Params, num_row_blocks) == 304);
static_assert(offsetof(Params, batch_size) == 308 && offsetof(Params, heads_per_l2_group) == 312);
static_assert(offsetof(Params, diagonal_offset) == 316 && offsetof(Params, window_left) == 320);
static_assert(offsetof(Params, window_right) == 324 && offsetof(Params, mask_vector_width) == 328);
static_assert(offsetof(Params, softmax_scale) == 332 && offsetof(Params, scale_log2) == 336);
static_assert(kBlockM % 16 == 0 && kRowUnit % kBlockM == 0, "LSE and delta have the rows of whole blocks");
