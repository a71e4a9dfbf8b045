// flash_v1_hdim64_fp16_causal_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 64, dtype fp16, mask_type causal, gqa mha
// tile      block_m 128, block_n 128, warps 8
// block     256 threads, 49152 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 101376 bytes or more of shared memory per block
// spec      flash_fwd_v1.yaml
// template  flash_fwd_v1.cu.j2
#include "flashgen/sm80.cuh"

// FlashAttention-1 (Dao et al. 2022, https://arxiv.org/abs/2205.14135, algorithm 1). A thread block takes one head: KV blocks in the
// outer loop, Q blocks in the inner one. So K and V are read once, while O, its row sums l and its row maxima m travel from global memory
// to registers and back for each pair of a KV block and a Q block. The running O is kept in fp32 beside l and m, and becomes `out` at the
// end: to round it to 16 bits once a KV block would add up.

using element = fp16;

constexpr int kHeadDim = 64;  // of Q and K
constexpr int kHeadDimV = kHeadDim;  // of V and O
constexpr int kBlockM = 128;  // rows of a Q block
constexpr int kBlockN = 128;  // keys of a KV block
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kCopyThreads = kThreads;       // all threads share the copy of a block
constexpr int kWarpRows = kBlockM / kWarps;  // a warp owns whole rows, so that softmax never leaves it
constexpr int kRowTiles = kWarpRows / 16;    // MMA tiles of a warp along its rows
constexpr int kRowTileStep = 16;             // rows from one of them to the next
constexpr int kKeyTiles = kBlockN / 8;       // MMA tiles of S along the keys
constexpr int kDimTiles = kHeadDimV / 8;     // MMA tiles of O along the head dimension

// A block each of Q, K and V. Rows of V are as long as rows of K.
struct SharedStorage {
    element q[kBlockM][kHeadDim];
    element k[kBlockN][kHeadDim];
    element v[kBlockN][kHeadDim];
};
constexpr int kRowBytes = kHeadDim * sizeof(element);
constexpr int kKOffset = offsetof(SharedStorage, k);
constexpr int kVOffset = offsetof(SharedStorage, v);

// fp16 P loses bits below 2^-14. Keeping row_max kPBias below the true maximum makes P 2^kPBias larger, so fewer P are subnormal. The
// factor cancels in O / row_sum and in the LSE.
constexpr float kPBias = 7.0f;

struct Params {
    const element* q;                     // (batch, seqlen_q, num_heads_q, head_dim); rows 16-byte aligned
    const element* k;                     // (batch, seqlen_kv, num_heads_kv, head_dim); rows 16-byte aligned
    const element* v;                     // (batch, seqlen_kv, num_heads_kv, head_dim_v); rows 16-byte aligned
    element* out;                         // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    float* lse;                           // (batch, num_heads_q, seqlen_q); may be null; natural logarithm
    float* running_o;                     // (batch, num_heads_q, seqlen_q, head_dim_v): O so far
    float* row_sum;                       // (batch, num_heads_q, seqlen_q): the sum of each row of P
    float* row_max;                       // (batch, num_heads_q, seqlen_q): the maximum of each row of S
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
    int32_t num_heads_q;
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t diagonal_offset;              // query i is aligned with key i + diagonal_offset
    float scale_log2;                     // softmax_scale * log2(e), above 0
};

// A Q block: kBlockM rows of queries of the thread block's head.
struct Tile {
    int batch;
    int head;
    int kv_head;
    int first_row;
};

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
__device__ const element* head_k(const Params& params, const Tile& tile);  // Where K of the tile's head begins
__device__ const element* head_v(const Params& params, const Tile& tile);  // Where V of the tile's head begins
// Starts the copy of a KV block of K or V, kColumns wide, into shared memory
template <int kColumns> __device__ void copy_rows(shared_address block, const element* source, int64_t row_stride, const SeenRows& rows,
    int head_dim);
// Starts the copy of KV block `block` of a head of K, and of V
__device__ void copy_k(const Params& params, const element* k, shared_address stage, int block);
__device__ void copy_v(const Params& params, const element* v, shared_address stage, int block);
__device__ void load_q(const Params& params, const Tile& tile, shared_address smem);  // Starts the copy of the tile's rows of Q

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
    float row_max[2];  // m, in the log2 domain
    float row_sum[2];  // l, of the whole row in each lane
    float output[kDimTiles][4];
};

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
__device__ void clear(RowTile (&rows)[kRowTiles]);  // Clears rows
// Multiplies O of each row by a function of the row's l
template <typename Factor> __device__ void scale_output(RowTile (&rows)[kRowTiles], Factor factor);
// Calls at_row(row, rows[i], row8) for each row of this warp's MMA tiles that exists; the row counts within the head
template <typename Rows, typename AtRow> __device__ void for_each_row(const Params& params, const Tile& tile, Rows& rows, int warp,
    int lane, AtRow at_row);
__device__ int64_t row_index(const Params& params, const Tile& tile, int row);  // The index of l, m and the LSE of a row
// Loads O, l and m of a tile's rows
__device__ void load_rows(const Params& params, const Tile& tile, RowTile (&rows)[kRowTiles], int warp, int lane);
// Stores O, l and m of a tile's rows
__device__ void store_rows(const Params& params, const Tile& tile, const RowTile (&rows)[kRowTiles], int warp, int lane);
// Rounds O to `out`, and writes lse = ln(sum of exp(score * softmax_scale)), -inf for a row that attends to nothing
__device__ void store_results(const Params& params, const Tile& tile, const RowTile (&rows)[kRowTiles], int warp, int lane);
// Brings m, l and O up to date with the scores of a KV block
__device__ void softmax_step(const float (&scores)[kRowTiles][kKeyTiles][4], RowTile (&rows)[kRowTiles], float scale_log2, P<kRowTiles>& p);

extern "C" __global__ void __launch_bounds__(kThreads)
flash_v1_hdim64_fp16_causal_sm80(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address q_block = to_shared(shared_memory);
    const shared_address k_block = q_block + kKOffset;
    const shared_address v_block = q_block + kVOffset;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const LaneAddress q_lane = qv_lane_address(q_block + first_row_of(warp) * kRowBytes, lane);
    const LaneAddress k_lane = k_lane_address(k_block, lane);
    const VAddress v_lane = v_address(v_block, lane);

    Tile tile;
    tile.batch = block_index() / params.num_heads_q;
    tile.head = block_index() % params.num_heads_q;
    tile.kv_head = tile.head;
    const element* k = head_k(params, tile);
    const element* v = head_v(params, tile);

    // Line 2 of the algorithm: O = 0, l = 0, m = -inf.
    for (tile.first_row = 0; tile.first_row < num_rows(params); tile.first_row += kBlockM) {
        RowTile rows[kRowTiles];
        clear(rows);
        store_rows(params, tile, rows, warp, lane);
    }
    barrier_sync(kThreads);  // one lane of a quad has stored l and m for all

    // Line 5, from the last KV block to the first.
    for (int block = kv_blocks_of(params, 0, num_rows(params)).last; block >= 0; --block) {
        copy_k(params, k, k_block, block);
        copy_v(params, v, v_block, block);
        cp_async_commit();

        // Line 7.
        for (tile.first_row = 0; tile.first_row < num_rows(params); tile.first_row += kBlockM) {
            if (block > kv_blocks_of(params, tile.first_row, kBlockM).last) continue;  // no row of the Q block attends to a key of the KV block
            load_q(params, tile, q_block);
            cp_async_commit();
            RowTile rows[kRowTiles];
            load_rows(params, tile, rows, warp, lane);
            cp_async_wait<0>();
            barrier_sync(kThreads);

            float scores[kRowTiles][kKeyTiles][4];
            mma_qk(scores, q_lane, k_lane);
            finish_scores(params, tile, scores, first_row_of(warp), block * kBlockN, lane);
            // O is kept divided by l: it is multiplied by l, brought up to date, and divided by the new l, once for each KV block.
            scale_output(rows, [](float row_sum) { return row_sum; });
            P<kRowTiles> p;
            softmax_step(scores, rows, params.scale_log2, p);
            mma_pv(rows, p, v_lane);
            // A row that attends to nothing so far has the sum 0, and stays 0.
            scale_output(rows, [](float row_sum) { return row_sum == 0.0f ? 0.0f : 1.0f / row_sum; });
            store_rows(params, tile, rows, warp, lane);
            barrier_sync(kThreads);  // every warp has finished with Q, and after the last Q block with K and V
        }
    }

    // O to 16 bits, and lse = m + ln(l).
    for (tile.first_row = 0; tile.first_row < num_rows(params); tile.first_row += kBlockM) {
        RowTile rows[kRowTiles];
        load_rows(params, tile, rows, warp, lane);
        store_results(params, tile, rows, warp, lane);
    }
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
    const int end = keys_of_query(params, params.seqlen_q - 1).end;
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

template <typename Factor>
__device__ __forceinline__ void scale_output(RowTile (&rows)[kRowTiles], Factor factor) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const float by = factor(rows[i].row_sum[row8]);
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                rows[i].output[n][2 * row8] *= by;
                rows[i].output[n][2 * row8 + 1] *= by;
            }
        }
    }
}

template <typename Rows, typename AtRow>
__device__ __forceinline__ void for_each_row(const Params& params, const Tile& tile, Rows& rows, int warp, int lane, AtRow at_row) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const int row = tile.first_row + first_row_of(warp) + kRowTileStep * i + 8 * row8 + lane / 4;
            if (row < num_rows(params)) at_row(row, rows[i], row8);
        }
    }
}

// The index of l, m and the LSE of a row. O of the row begins at head_dim_v times this index.
__device__ __forceinline__ int64_t row_index(const Params& params, const Tile& tile, int row) {
    return (int64_t(tile.batch) * params.num_heads_q + tile.head) * params.seqlen_q + row;
}

// Loads O, l and m of a tile's rows.
// Line 8 of the algorithm: m, l and O from global memory. Rows past the last one stay clear, and are never stored.
__device__ __forceinline__ void load_rows(const Params& params, const Tile& tile, RowTile (&rows)[kRowTiles], int warp, int lane) {
    clear(rows);
    for_each_row(params, tile, rows, warp, lane, [&](int row, RowTile& of_row, int row8) {
        const int64_t index = row_index(params, tile, row);
        of_row.row_max[row8] = __uint_as_float(load_global_32(params.row_max + index));
        of_row.row_sum[row8] = __uint_as_float(load_global_32(params.row_sum + index));
        const float* o = params.running_o + index * params.head_dim_v + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
            if (8 * n >= params.head_dim_v) break;
            const float2 pair = load_global_64(o + 8 * n);
            of_row.output[n][2 * row8] = pair.x;
            of_row.output[n][2 * row8 + 1] = pair.y;
        }
    });
}

// Stores O, l and m of a tile's rows.
// Lines 12 and 13 of the algorithm: m, l and O to global memory. Each lane loads again what it stored of O. One lane of a quad stores m and l
// for all four; barriers separate that from the next load.
__device__ __forceinline__ void store_rows(const Params& params, const Tile& tile, const RowTile (&rows)[kRowTiles], int warp,
                                           int lane) {
    for_each_row(params, tile, rows, warp, lane, [&](int row, const RowTile& of_row, int row8) {
        const int64_t index = row_index(params, tile, row);
        if (lane % 4 == 0) {
            store_global_32(params.row_max + index, of_row.row_max[row8]);
            store_global_32(params.row_sum + index, of_row.row_sum[row8]);
        }
        float* o = params.running_o + index * params.head_dim_v + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
            if (8 * n >= params.head_dim_v) break;
            store_global_64(o + 8 * n, of_row.output[n][2 * row8], of_row.output[n][2 * row8 + 1]);
        }
    });
}

__device__ __forceinline__ void store_results(const Params& params, const Tile& tile, const RowTile (&rows)[kRowTiles], int warp,
                                              int lane) {
    for_each_row(params, tile, rows, warp, lane, [&](int row, const RowTile& of_row, int row8) {
        if (params.lse != nullptr && lane % 4 == 0) {
            store_global_32(params.lse + row_index(params, tile, row),
                            row_end(of_row.row_max[row8], of_row.row_sum[row8]).lse());
        }
        element* out = params.out + tile.batch * params.out_batch_stride +
                       row_offset(params, tile, row, params.out_row_stride, params.out_head_stride) + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
            if (8 * n >= params.head_dim_v) break;
            store_global_32(out + 8 * n, pack<element>(of_row.output[n][2 * row8], of_row.output[n][2 * row8 + 1]));
        }
    });
}

// Brings m, l and O up to date with the scores of a KV block: m_new = max(m, row maximum), P = exp(S - m_new), l and O times
// exp(m - m_new), l_new = l + row sum of P. P V is left to the caller. The paper subtracts the block's own maximum from S and corrects P V
// for it afterwards; with m_new in its place that correction is 1.
__device__ __forceinline__ void softmax_step(const float (&scores)[kRowTiles][kKeyTiles][4], RowTile (&rows)[kRowTiles],
                                             float scale_log2, P<kRowTiles>& p) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            float largest = scores[i][0][2 * row8];
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                largest = fmaxf(largest, fmaxf(scores[i][j][2 * row8], scores[i][j][2 * row8 + 1]));
            }
            const float previous = rows[i].row_max[row8];
            rows[i].row_max[row8] = fmaxf(previous, __fmaf_ru(quad_max(largest), scale_log2, -kPBias));
            const float correction = rescale_factor(previous, rows[i].row_max[row8]);
            rows[i].row_sum[row8] *= correction;
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                rows[i].output[n][2 * row8] *= correction;
                rows[i].output[n][2 * row8 + 1] *= correction;
            }
        }
        float block_sum[2] = {};  // this lane's share
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
            float values[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                values[e] = exp2_approx(fmaf(scores[i][j][e], scale_log2, -rows[i].row_max[e / 2]));
                block_sum[e / 2] += values[e];
            }
            p.set(i, j, values);
        }
        rows[i].row_sum[0] += quad_sum(block_sum[0]);
        rows[i].row_sum[1] += quad_sum(block_sum[1]);
    }
}

static_assert(kWarpRows % 16 == 0, "a warp's rows are whole 16-row MMA tiles");
static_assert(kBlockN % 16 == 0, "P . V takes keys by 16");
static_assert(sizeof(SharedStorage) == 49152, "launcher and kernel agree on shared memory");
static_assert(sizeof(Params) == 192 && offsetof(Params, q) == 0 && offsetof(Params, k) == 8 && offsetof(Params, v) == 16);
static_assert(offsetof(Params, out) == 24 && offsetof(Params, lse) == 32 && offsetof(Params, running_o) == 40);
static_assert(offsetof(Params, row_sum) == 48 && offsetof(Params, row_max) == 56 && offsetof(Params, q_batch_stride) == 64);
static_assert(offsetof(Params, q_row_stride) == 72 && offsetof(Params, q_head_stride) == 80);
static_assert(offsetof(Params, k_batch_stride) == 88 && offsetof(Params, k_row_stride) == 96);
static_assert(offsetof(Params, k_head_stride) == 104 && offsetof(Params, v_batch_stride) == 112);
static_assert(offsetof(Params, v_row_stride) == 120 && offsetof(Params, v_head_stride) == 128);
static_assert(offsetof(Params, out_batch_stride) == 136 && offsetof(Params, out_row_stride) == 144);
static_assert(offsetof(Params, out_head_stride) == 152 && offsetof(Params, num_heads_q) == 160);
static_assert(offsetof(Params, seqlen_q) == 164 && offsetof(Params, seqlen_kv) == 168 && offsetof(Params, head_dim) == 172);
static_assert(offsetof(Params, head_dim_v) == 176 && offsetof(Params, diagonal_offset) == 180);
static_assert(offsetof(Params, scale_log2) == 184);
