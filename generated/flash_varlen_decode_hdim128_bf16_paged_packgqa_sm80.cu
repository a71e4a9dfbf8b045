// flash_varlen_decode_hdim128_bf16_paged_packgqa_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type none, pages paged, splits none, kv_starts none, sinks
//           none, kv_dtype none, gqa packed
// tile      block_m 16, block_n 64, warps 4, row_warps 1, stages 3, min_blocks 2
// block     128 threads, 103936 bytes of dynamic shared memory
// target    sm80: sm_80 or later, with 166912 bytes or more of shared memory per block
// spec      flash_varlen_decode_sm80.yaml
// template  flash_varlen_decode_sm80.cu.j2
#include "flashgen/sm80.cuh"

// Attention of few query rows over many keys is bound by the bandwidth of global memory. So each thread block keeps copies of K and V in flight,
// and thread blocks split the KV blocks of all tiles evenly. If the call fixes the splits of a sequence, they split these evenly instead.
// For each KV block:
//
//     S = Q K^T    P = 2^(scale_log2 S - row_max)    row_sum += sums of P's rows    O += P V
//
// row_max tracks the largest score of each row (online softmax). When it rises, row_sum and O are rescaled. A thread block that has all KV blocks
// of a tile divides O by row_sum at the end. Otherwise each part goes to the workspace, and the next kernel combines the parts of a tile.
//
// Map
//   warps             kWarps = 4, in groups of kGroupWarps = 1. A group copies its own keys of each KV block and computes their S and P V
//   shared memory     Q, kBlockM = 16 rows of kRowBytes = 256; kStages = 3 stages of K and V, kStageBytes = 32768 each
//   barriers          sync_group()            the warps of a group, before they read a stage
//                     barrier_sync(kThreads)  all warps, before Q is read or overwritten, and around the merge of groups

using element = bf16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kHeadDimV = 128;  // of V and O
constexpr int kBlockM = 16;  // query rows of a tile
constexpr int kBlockN = 64;  // keys of a KV block
constexpr int kStages = 3;  // KV blocks in shared memory
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

// The warps of a group have the same keys of each KV block, and different rows. A group of one warp has all rows of the tile.
constexpr int kGroupWarps = 1;
constexpr int kGroupThreads = 32 * kGroupWarps;
constexpr int kGroups = kWarps / kGroupWarps;
constexpr int kGroupKeys = kBlockN / kGroups;     // keys of a KV block in a group's share
constexpr int kWarpRows = kBlockM / kGroupWarps;  // rows of a warp
constexpr int kRowTiles = kWarpRows / 16;         // MMA tiles of a warp along its rows
constexpr int kRowTileStep = 16;                  // rows from a warp's MMA tile to its next
constexpr int kKeyTiles = kGroupKeys / 8;         // MMA tiles of S along the keys
constexpr int kDimTiles = kHeadDimV / 8;          // MMA tiles of O along the head dimension

// A KV block. Rows of V are as long as rows of K.
struct Stage {
    element k[kBlockN][kHeadDim];
    element v[kBlockN][kHeadDim];
};

struct SharedStorage {
    element q[kBlockM][kHeadDim];
    Stage stages[kStages];
    float sums[kGroups - 1][kGroupThreads][kRowTiles][4];  // row_max and row_sum of all groups but group 0
};
constexpr int kRowBytes = kHeadDim * sizeof(element);
constexpr int kStageOffset = offsetof(SharedStorage, stages);
constexpr int kVOffset = offsetof(Stage, v);  // within a stage
constexpr int kStageBytes = 2 * kBlockN * kRowBytes;

struct Params {
    const element* q;                     // (batch_q, rows_q, num_heads_q, head_dim); rows 16-byte aligned
    const element* k;                     // (batch_kv, rows_kv, num_heads_kv, head_dim); rows 16-byte aligned
    const element* v;                     // (batch_kv, rows_kv, num_heads_kv, head_dim_v); rows 16-byte aligned
    element* out;                         // (batch_q, rows_q, num_heads_q, head_dim_v); rows 16-byte aligned
    float* lse;                           // (batch_q, num_heads_q, rows_q); may be null; natural logarithm
    const int32_t* cu_seqlens_q;          // (boundaries,); may be null; null where queries are padded
    const int32_t* kv_lengths;            // (batch,); may be null; null where cu_seqlens_kv has them, or all have seqlen_kv
    const int32_t* pages;                 // (batch, max_pages); entries past the last key are never read
    float* part_outputs;                  // (parts, kBlockM, kHeadDimV): O, not divided by row_sum; null where no tile is split
    float* part_sums;                     // (parts, kBlockM, 2): row_max, log2 domain, and row_sum
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
    int32_t group_size;                   // num_heads_q / num_heads_kv
    int32_t rows_q;                       // of an entry of q: all tokens where sequences are packed
    int32_t batch_size;                   // sequences
    int32_t batch_kv;                     // entries of k: of a paged cache its pages
    int32_t page_size;                    // keys of a page
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_shares;                   // thread blocks of a set of heads in the main kernel
    int32_t head_sets_log2;               // of the number of sets of heads: 1, 2 or 4
    int32_t heads_per_set;                // heads of a batch entry in a set
    uint64_t group_size_divisor;          // of group_size; see divide()
    uint64_t page_size_divisor;           // of page_size; see divide()
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

// The work of a thread block: pieces [begin, end). The pieces, KV blocks or splits, are numbered tile after tile: see find_share().
struct Share {
    int begin;
    int end;
};

// What a thread block computes of one tile: KV blocks [first, end) of the sequence.
struct Part {
    int tile;  // its number: within its sequence if the device has lengths, else among all tiles
    int first;
    int end;
    int slot;  // of the workspace; below 0 if the part is the whole tile
};

__device__ int divide(int n, uint64_t divisor);  // n / d for 0 <= n < 2^31
__device__ int num_rows(const Params& params);  // Rows of a head of the grid
__device__ int query_of_row(const Params& params, int row);  // The query of a row of a tile
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
__device__ Share find_share(const Params& params, const Lengths& lane_lengths, int thread_block, int lane);  // The share of a thread block

// A sequence, its lengths, and the numbers [begin, end) of its pieces.
struct Place {
    int sequence;
    int begin;
    int end;
    Lengths lengths;
};

__device__ Lengths of_lane(const Lengths& lengths, int lane);  // What another lane has
__device__ Place find_place(const Params& params, Lengths lengths, int index, int lane);  // The sequence that piece `index` belongs to
__device__ Place next_place(const Params& params, const Place& place);  // The next sequence that has pieces
// The part that begins with KV block `index` of the share
__device__ Part find_part(const Params& params, const Share& share, const Place& place, int index);
// Tile `tile_index` of a sequence, whose parameters are `params`, among the tiles of the heads that the thread block computes
__device__ Tile find_tile(const Params& params, const Place& place, int tile_index);
__device__ Params of_sequence(const Params& params, int sequence, const Lengths& lengths);  // The parameters of a call of one sequence alone
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
// The intersection of the key ranges of rows [first_row, first_row + count)
__device__ KeyRange keys_of_every(const Params& params, int first_row, int count);
// Masks the keys outside the range of their row
template <int kTiles> __device__ void apply_mask(const Params& params, const Tile&, float (&scores)[kTiles][kKeyTiles][4], int first_row,
    int first_key, int lane);
// ====

// Finishes the scores of a KV block between Q K^T and softmax
template <int kTiles> __device__ void finish_scores(const Params& params, const Tile& tile, float (&scores)[kTiles][kKeyTiles][4],
    int row_in_tile, int first_key, int lane);

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

// kSwizzleChunks neighbouring threads copy a row, and each takes every kSwizzleChunks-th chunk of it.
constexpr int kRowsPerPass = kGroupThreads / kSwizzleChunks;
constexpr int kPasses = (kGroupKeys + kRowsPerPass - 1) / kRowsPerPass;

// The pages of a group's keys of a KV block, spread over the lanes of a warp: of_key[i] is the page of key 32 i + lane, as the page table has it.
// Each key may be in another page. K and V have the same layout.
struct Pages {
    int of_key[(kGroupKeys + 31) / 32];
};

// Loads them from a sequence's page table, which is read for keys among `rows` alone
__device__ Pages find_pages(const Params& params, const int32_t* pages, int first_key, const SeenRows& rows);

// The rows of a group's keys of a KV block, in K or V.
struct KeyRows {
    const element* head;  // where the head's rows begin in page 0
    int64_t of_key[(kGroupKeys + 31) / 32];  // offsets from there, in elements, spread over the lanes of a warp like Pages

    // Where the thread's row in a pass begins. All lanes of the warp call it.
    __device__ __forceinline__ const element* operator()(int pass) const {
        static_assert(32 % kRowsPerPass == 0, "the keys of a pass are in one register of a warp");
        const int row = pass * kRowsPerPass + threadIdx.x % kGroupThreads / kSwizzleChunks;
        return head + __shfl_sync(0xffffffff, of_key[pass * kRowsPerPass / 32], row % 32);
    }
};

// A lane computes the offsets of the keys that it looked up, since each key has kSwizzleChunks threads that copy its row
__device__ KeyRows find_key_rows(const Params& params, const Pages& pages, int first_key, const element* head, int64_t page_stride,
    int64_t row_stride);
// Starts the copy of a group's keys of a KV block of K or V, kColumns wide
template <int kColumns, typename RowOfPass> __device__ void copy_keys(const RowOfPass& row_of_pass, shared_address keys,
    const SeenRows& rows, int head_dim);
// Prefetches a group's keys of a KV block of K or V, kColumns wide, into L2, as copy_keys() copies them
template <int kColumns, typename RowOfPass> __device__ void prefetch_keys(const RowOfPass& row_of_pass, const SeenRows& rows, int head_dim);
__device__ void copy_q(const Params& params, const Tile& tile, shared_address smem);  // Starts the copy of the tile's rows of Q
__device__ int first_block_of(const Tiles&, int piece);  // The KV block of a tile with which a piece begins
__device__ int blocks_left(const Tiles& tiles, int block);  // KV blocks from one on, up to the end of its tile
__device__ bool ends_piece(int);  // Whether the piece ends with the KV block from which on `left` are left

// A group's progress through the KV blocks of its thread block's share, across tiles and sequences.
struct Fetch {
    Place place;
    int index;         // of the piece, a KV block or a split, that has the KV block that comes next
    int left;          // KV blocks from there on, of the split or else of the tile
    int first_key;     // the first of the group's keys of that KV block
    const element* k;  // where the head's rows begin in page 0
    const element* v;
    const int32_t* page_table;  // of the sequence
    Pages pages;       // of the KV block that comes next: loaded when the one before was fetched, so that nobody waits for them
};

__device__ SeenRows seen_rows(const Params& params, const Fetch& fetch);  // Which of the group's keys of the next KV block some query sees
__device__ int first_row_of(const Fetch& fetch);  // The row of the sequence that has the first of the group's keys
__device__ Pages find_pages(const Params& params, const Fetch& fetch);  // `params` have the bounds of all sequences
// Goes to the first KV block of number `index` of the pieces
__device__ Fetch seek(const Params& params, const Place& place, int index, int group);
// Prefetches the next KV block into L2, if the share has one left
__device__ void prefetch_next(const Params& params, const Share& share, const Fetch& fetch);
// Starts the copies of the next KV block, if the share has one left
__device__ void fetch_next(const Params& params, const Share& share, Fetch& fetch, shared_address stage, int group);

// Where a thread block begins: its share, the sequence and the tile of the share's first KV block, and how it is fetched.
struct Start {
    Share share;
    Place place;
    Tile tile;
    Fetch fetch;
};

// `lane_lengths` are the lengths of the lane's sequence among the first 32
__device__ Start find_start(const Params& all, const Lengths& lane_lengths, int group, int lane);
// load_clamped() for use before griddepcontrol.wait, while the grid before this one may still write the value
__device__ int load_early(const int32_t* values, int index, int most);
__device__ Lengths early_lengths_of(const Params& params, int sequence);  // lengths_of() before griddepcontrol.wait
__device__ bool differ(const Lengths& a, const Lengths& b);
// find_start() from the final lengths, which the grid before this one may write until griddepcontrol.wait returns
__device__ Start await_start(const Params& all, int group, int lane);
__device__ void sync_group(int);  // Waits for the lanes of the warp, and makes their writes visible

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

constexpr int kSumsOffset = offsetof(SharedStorage, sums);

// Where a group leaves its O for group 0
__device__ shared_address output_address(shared_address exchange, int group, int warp, int tile, int lane);
__device__ shared_address sums_address(shared_address sums, int group, int warp, int tile, int lane);
// Leaves the group's rows in shared memory for group 0
__device__ void send_rows(const RowTile (&rows)[kRowTiles], shared_address exchange, shared_address sums, int group, int warp, int lane);
// Adds the rows of the other groups to the rows of group 0, in the order of the groups
__device__ void receive_rows(RowTile (&rows)[kRowTiles], shared_address exchange, shared_address sums, int warp, int lane);
__device__ void normalise(RowTile (&rows)[kRowTiles]);  // Divides O by the complete row_sum
// Writes the LSE of each row, natural logarithm; -inf for a row that attends to nothing
__device__ void store_lse(const Params& params, const Tile& tile, const RowTile (&rows)[kRowTiles], int warp, int lane);
__device__ void store_output(const Params& params, const Tile& tile, const RowTile (&rows)[kRowTiles], int warp, int lane);  // Writes O
// Writes O, row_max and row_sum of a part to a slot of the workspace, for the kernel that combines the parts
__device__ void store_part(const Params& params, const Tile& tile, int slot, const RowTile (&rows)[kRowTiles], int warp, int lane);
// Writes O and the LSE of a whole tile, or a part for the next kernel
__device__ void store_results(const Params& params, const Tile& tile, const Part& part, RowTile (&rows)[kRowTiles], int warp, int lane);

extern "C" __global__ void __launch_bounds__(kThreads, 2)
flash_varlen_decode_hdim128_bf16_paged_packgqa_sm80(const __grid_constant__ Params all) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address smem = to_shared(shared_memory);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int group = warp / kGroupWarps;
    auto stage_address = [&](int stage) { return smem + kStageOffset + stage * kStageBytes; };

    const Start start = await_start(all, group, lane);
    // Programmatic dependent launch: let the next grid start, once all thread blocks have come here or ended. await_start() has waited for the
    // previous grid, so the next one may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    const Share share = start.share;
    if (share.begin == share.end) return;  // earlier shares have all KV blocks
    Place place = start.place;
    Params params = of_sequence(all, place.sequence, place.lengths);
    Fetch fetch = start.fetch;

    // Q is copied before K and V, so that it does not wait for their copies.
    copy_q(params, start.tile, smem);
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) fetch_next(all, share, fetch, stage_address(stage), group);
    cp_async_wait<kStages - 1>();
    barrier_sync(kThreads);

    const LaneAddress q_lane = qv_lane_address(smem + first_row_of(warp) * kRowBytes, lane);
    const int group_offset = group * kGroupKeys * kRowBytes;
    int stage = 0;  // of the KV block to be computed next
    for (int index = share.begin;;) {  // the parts of the share, tile after tile
        const Part part = find_part(params, share, place, index);
        const Tile tile = find_tile(params, place, part.tile);
        RowTile rows[kRowTiles];
        clear(rows);

        for (int block = part.first; block < part.end; ++block) {
            // 1. Wait for the group's keys of this KV block: cp_async_wait() for the thread's copies, sync_group() for the copies of other threads. By then
            // the group has finished with the previous KV block: start the copy of a later KV block into its stage.
            cp_async_wait<kStages - 2>();
            sync_group(group);
            fetch_next(all, share, fetch, stage_address(stage == 0 ? kStages - 1 : stage - 1), group);

            // 2. S = Q K^T, softmax, O += P V, while later KV blocks are copied.
            float scores[kRowTiles][kKeyTiles][4];
            P<kRowTiles> p;
            mma_qk(scores, q_lane, k_lane_address(stage_address(stage) + group_offset, lane));
            finish_scores(params, tile, scores, first_row_of(warp), block * kBlockN + group * kGroupKeys, lane);
            softmax_step(scores, rows, params.scale_log2, p);
            mma_pv(rows, p, v_address(stage_address(stage) + kVOffset + group_offset, lane));
            stage = stage == kStages - 1 ? 0 : stage + 1;
        }

        // While this part is finished, Q of the next tile and its first KV blocks are copied.
        index += part.end - part.first;
        const bool more = index < share.end;
        // The results of this tile still need the parameters of its own sequence.
        const bool same_sequence = index < place.end;
        const Place next_place_of_share = more && !same_sequence ? next_place(all, place) : place;
        const Params next_params =
            more && !same_sequence ? of_sequence(all, next_place_of_share.sequence, next_place_of_share.lengths) : params;
        const int next_tile = same_sequence ? part.tile + 1 : 0;
        // The stage of the last KV block is free: nothing is fetched into it before the next KV block is computed.
        const shared_address exchange = stage_address(stage == 0 ? kStages - 1 : stage - 1);
        barrier_sync(kThreads);  // every group has finished with that stage, and with Q
        if (more) copy_q(next_params, find_tile(next_params, next_place_of_share, next_tile), smem);
        if (group > 0) send_rows(rows, exchange, smem + kSumsOffset, group, warp, lane);
        barrier_sync(kThreads);
        if (group == 0) {
            receive_rows(rows, exchange, smem + kSumsOffset, warp, lane);
            store_results(params, tile, part, rows, warp, lane);
        }
        if (!more) break;
        place = next_place_of_share;
        params = next_params;
        cp_async_wait<0>();
        barrier_sync(kThreads);  // Q is here, and the stage may be fetched into again
    }
}

// n / d for 0 <= n < 2^31. The launcher computes `divisor` from d: a multiplier in the lower half, and in the upper half the shift that follows.
// Dividing by a number that the compiler does not know takes about 20 dependent instructions.
__device__ __forceinline__ int divide(int n, uint64_t divisor) {
    return uint64_t(uint32_t(n)) * uint32_t(divisor) >> (divisor >> 32);
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

// The share of a thread block. `lane_lengths` are the lengths of the lane's sequence among the first 32.
__device__ __forceinline__ Share find_share(const Params& params, const Lengths& lane_lengths, int thread_block, int lane) {
    // A share is a range of KV blocks. It may begin and end in the middle of a tile.
    int num_kv_blocks;
    const int per_share = kv_blocks_per_share(params, lane_lengths, num_kv_blocks, lane);
    // Thread blocks of a set of heads share the KV blocks of that set.
    const int begin = min(num_kv_blocks, share_of(params, thread_block) * per_share);
    return {begin, min(num_kv_blocks, begin + per_share)};
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

__device__ __forceinline__ Place next_place(const Params& params, const Place& place) {
    Place next = {place.sequence, place.end, place.end};
    while (next.end == next.begin) {
        next.lengths = lengths_of(params, ++next.sequence);
        next.end += count_pieces(params, next.lengths);
    }
    return next;
}

// The part that begins with KV block `index` of the share. A share leaves at most two parts in the workspace: its first, and its last.
// `params` are the parameters of the sequence. The launcher does not know how many KV blocks its tiles have, so this is a real division.
__device__ __forceinline__ Part find_part(const Params& params, const Share& share, const Place& place, int index) {
    const Tiles tiles = tiles_of(params);
    const int tile = (index - place.begin) / tiles.kv_blocks;
    const int tile_begin = place.begin + tile * tiles.kv_blocks;
    const int count = min(share.end, tile_begin + tiles.kv_blocks) - index;
    const int first = tiles.first_kv_block + index - tile_begin;
    const int slot = 2 * block_index() + (index == share.begin ? 0 : 1);
    return {tile, first, first + count, count == tiles.kv_blocks ? -1 : slot};
}

__device__ __forceinline__ Tile find_tile(const Params& params, const Place& place, int tile_index) {
    const int row_blocks = tiles_of(params).row_blocks;
    const int nth_head = tile_index / row_blocks;
    const int head = head_of_set(params, block_index(), nth_head);  // of the grid
    Tile tile;
    tile.batch = place.sequence;
    tile.kv_head = head;
    tile.head = head * params.group_size;
    tile.first_row = (tile_index - nth_head * row_blocks) * kBlockM;
    return tile;
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

__device__ __forceinline__ int first_row_of(int warp) { return warp % kGroupWarps * kWarpRows; }

__device__ __forceinline__ const element* head_k(const Params& params, const Tile& tile) {
    return params.k + tile.kv_head * params.k_head_stride;
}

__device__ __forceinline__ const element* head_v(const Params& params, const Tile& tile) {
    return params.v + tile.kv_head * params.v_head_stride;
}

// Loads them from a sequence's page table, which is read for keys among `rows` alone. Nothing here waits for the loads. The first ones may
// come before griddepcontrol.wait, so all bypass L1, where later ones would find what is stale.
__device__ __forceinline__ Pages find_pages(const Params& params, const int32_t* pages, int first_key, const SeenRows& rows) {
    Pages found;
#pragma unroll
    for (int first = 0; first < kGroupKeys; first += 32) {
        const int row = first + threadIdx.x % 32;
        const int32_t* entry = pages + divide(first_key + row, params.page_size_divisor);
        const bool valid = rows.among(kGroupKeys).has(row);
        found.of_key[first / 32] = valid ? load_relaxed_32(entry) : 0;
    }
    return found;
}

__device__ __forceinline__ KeyRows find_key_rows(const Params& params, const Pages& pages, int first_key, const element* head,
                                                 int64_t page_stride, int64_t row_stride) {
    KeyRows rows;
    rows.head = head;
#pragma unroll
    for (int first = 0; first < kGroupKeys; first += 32) {
        const int key = first_key + first + threadIdx.x % 32;
        const int row_of_page = key - divide(key, params.page_size_divisor) * params.page_size;
        const int page = max(0, min(pages.of_key[first / 32], params.batch_kv - 1));
        rows.of_key[first / 32] = page * page_stride + row_of_page * row_stride;
    }
    return rows;
}

// Starts the copy of a group's keys of a KV block of K or V, kColumns wide. `row_of_pass(pass)` is where the thread's row in a
// pass begins; all lanes call it, since it may shuffle. Rows that are not among `rows` and elements from `head_dim` on become zeros.
template <int kColumns, typename RowOfPass>
__device__ __forceinline__ void copy_keys(const RowOfPass& row_of_pass, shared_address keys, const SeenRows& rows, int head_dim) {
    constexpr int kPanels = kColumns * sizeof(element) / kSwizzleBytes;
    constexpr int kPanelElements = kSwizzleChunks * kChunkElements;
    static_assert(kColumns * sizeof(element) % kSwizzleBytes == 0, "the swizzle permutes whole panels");
    const int row = threadIdx.x % kGroupThreads / kSwizzleChunks;
    const int chunk = threadIdx.x % kSwizzleChunks;
    const shared_address destination = keys + row * kRowBytes + 16 * (chunk ^ swizzle_key(row));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int first = pass * kRowsPerPass;
        const element* source = row_of_pass(pass) + chunk * kChunkElements;
        if (kGroupKeys % kRowsPerPass != 0 && first + row >= kGroupKeys) break;
        // `row` is below kRowsPerPass, a power of two, so the swizzle key of first + row is the key of first XOR the key of row.
        const shared_address swizzled = (destination ^ 16 * swizzle_key(first)) + first * kRowBytes;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            const bool valid = rows.has(first + row) && panel * kPanelElements + chunk * kChunkElements < head_dim;
            cp_async_16(swizzled + panel * kSwizzleBytes, source + panel * kPanelElements, valid ? 16 : 0);
        }
    }
}

// Prefetches a group's keys of a KV block of K or V, kColumns wide, into L2, as copy_keys() copies them: the first threads of a row a line
// each. Skips rows that are not among `rows`, and elements from `head_dim` on. A row that begins within a line reaches into one more line, which
// is skipped, too.
template <int kColumns, typename RowOfPass>
__device__ __forceinline__ void prefetch_keys(const RowOfPass& row_of_pass, const SeenRows& rows, int head_dim) {
    constexpr int kLineElements = 128 / sizeof(element);
    static_assert(kSwizzleChunks * kLineElements >= kColumns, "a row has a thread for each line");
    const int row = threadIdx.x % kGroupThreads / kSwizzleChunks;
    const int column = threadIdx.x % kSwizzleChunks * kLineElements;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const element* source = row_of_pass(pass) + column;
        if (rows.among(kGroupKeys).has(pass * kRowsPerPass + row) && column < min(kColumns, head_dim)) prefetch_l2(source);
    }
}

// Starts the copy of the tile's rows of Q. Rows past the last one, and elements from head_dim on, become zeros.
__device__ __forceinline__ void copy_q(const Params& params, const Tile& tile, shared_address smem) {
    constexpr int kRowChunks = kRowBytes / 16;
    constexpr int kChunks = kBlockM * kRowChunks;
    const element* q = params.q + tile.batch * params.q_batch_stride;
    const int rows_left = num_rows(params) - tile.first_row;
#pragma unroll
    for (int first = 0; first < kChunks; first += kThreads) {
        const int row = (first + threadIdx.x) / kRowChunks;
        const int chunk = (first + threadIdx.x) % kRowChunks;
        if (kChunks % kThreads != 0 && row >= kBlockM) break;
        const shared_address panel = smem + row * kRowBytes + chunk / kSwizzleChunks * kSwizzleBytes;
        const element* source =
            q + row_offset(params, tile, tile.first_row + row, params.q_row_stride, params.q_head_stride) + chunk * kChunkElements;
        cp_async_16(panel + 16 * (chunk % kSwizzleChunks ^ swizzle_key(row)), source,
                    row < rows_left && chunk * kChunkElements < params.head_dim ? 16 : 0);
    }
    cp_async_commit();
}

__device__ __forceinline__ int first_block_of(const Tiles&, int piece) { return piece; }

__device__ __forceinline__ int blocks_left(const Tiles& tiles, int block) { return tiles.kv_blocks - block; }

__device__ __forceinline__ bool ends_piece(int) { return true; }

// Which of the group's keys of the next KV block some query sees. `params` have the bounds of all sequences.
__device__ __forceinline__ SeenRows seen_rows(const Params& params, const Fetch& fetch) {
    return seen_rows(with_lengths(params, fetch.place.lengths), fetch.first_key);
}

__device__ __forceinline__ int first_row_of(const Fetch& fetch) { return fetch.first_key; }

__device__ __forceinline__ Pages find_pages(const Params& params, const Fetch& fetch) {
    return find_pages(params, fetch.page_table, first_row_of(fetch), seen_rows(params, fetch));
}

// Goes to the first KV block of number `index` of the pieces. `params` are the parameters of the sequence at `place`.
__device__ __forceinline__ Fetch seek(const Params& params, const Place& place, int index, int group) {
    const Tiles tiles = tiles_of(params);
    const int tile_index = (index - place.begin) / tiles.pieces();
    const int block = first_block_of(tiles, index - place.begin - tile_index * tiles.pieces());
    const Tile tile = find_tile(params, place, tile_index);
    Fetch fetch;
    fetch.place = place;
    fetch.index = index;
    fetch.left = blocks_left(tiles, block);
    fetch.first_key = (tiles.first_kv_block + block) * kBlockN + group * kGroupKeys;
    fetch.k = head_k(params, tile);
    fetch.v = head_v(params, tile);
    fetch.page_table = params.pages;
    fetch.pages = find_pages(params, params.pages, first_row_of(fetch), seen_rows(params, fetch.first_key));
    return fetch;
}

// Prefetches the next KV block into L2, if the share has one left. `params` have the bounds of all sequences.
__device__ __forceinline__ void prefetch_next(const Params& params, const Share& share, const Fetch& fetch) {
    if (fetch.index >= share.end) return;
    const SeenRows rows = seen_rows(params, fetch);
    const KeyRows k_rows = find_key_rows(params, fetch.pages, first_row_of(fetch), fetch.k, params.k_batch_stride, params.k_row_stride);
    const KeyRows v_rows = find_key_rows(params, fetch.pages, first_row_of(fetch), fetch.v, params.v_batch_stride, params.v_row_stride);
    prefetch_keys<kHeadDim>(k_rows, rows, params.head_dim);
    prefetch_keys<kHeadDimV>(v_rows, rows, params.head_dim_v);
}

// Starts the copies of the next KV block, if the share has one left. Each call is one group of copies. `params` have the bounds of all
// sequences.
__device__ __forceinline__ void fetch_next(const Params& params, const Share& share, Fetch& fetch, shared_address stage, int group) {
    if (fetch.index < share.end) {
        const shared_address keys = stage + group * kGroupKeys * kRowBytes;
        const SeenRows rows = seen_rows(params, fetch);
        const KeyRows k_rows = find_key_rows(params, fetch.pages, first_row_of(fetch), fetch.k, params.k_batch_stride, params.k_row_stride);
        const KeyRows v_rows = find_key_rows(params, fetch.pages, first_row_of(fetch), fetch.v, params.v_batch_stride, params.v_row_stride);
        copy_keys<kHeadDim>(k_rows, keys, rows, params.head_dim);
        copy_keys<kHeadDimV>(v_rows, keys + kVOffset, rows, params.head_dim_v);
        if (ends_piece(fetch.left)) ++fetch.index;
        if (--fetch.left > 0) {
            fetch.first_key += kBlockN;
            fetch.pages = find_pages(params, fetch);
        } else if (fetch.index < share.end) {
            const Place place = fetch.index < fetch.place.end ? fetch.place : next_place(params, fetch.place);
            fetch = seek(of_sequence(params, place.sequence, place.lengths), place, fetch.index, group);
        }
    }
    cp_async_commit();
}

// `lane_lengths` are the lengths of the lane's sequence among the first 32. With an empty share all else is 0, and nothing is fetched.
__device__ __forceinline__ Start find_start(const Params& all, const Lengths& lane_lengths, int group, int lane) {
    Start start = {find_share(all, lane_lengths, block_index(), lane)};
    if (start.share.begin == start.share.end) return start;
    start.place = find_place(all, lane_lengths, start.share.begin, lane);
    const Params params = of_sequence(all, start.place.sequence, start.place.lengths);
    start.tile = find_tile(params, start.place, find_part(params, start.share, start.place, start.share.begin).tile);
    start.fetch = seek(params, start.place, start.share.begin, group);
    return start;
}

// load_clamped() for use before griddepcontrol.wait, while the grid before this one may still write the value. It bypasses L1, so that a load
// after the wait does not find the old value there.
__device__ __forceinline__ int load_early(const int32_t* values, int index, int most) {
    return max(0, min(most, int(load_relaxed_32(values + index))));
}

__device__ __forceinline__ Lengths early_lengths_of(const Params& params, int sequence) {
    if (sequence >= params.batch_size) return {};
    Lengths early = {{0, params.seqlen_q}, {0, params.seqlen_kv}};
    if (params.cu_seqlens_q != nullptr) {
        early.queries.begin = load_early(params.cu_seqlens_q, sequence, params.rows_q);
        const int end = load_early(params.cu_seqlens_q, sequence + 1, params.rows_q);
        early.queries.count = max(0, min(params.seqlen_q, end - early.queries.begin));
    }
    early.keys.count = load_early(params.kv_lengths, sequence, params.seqlen_kv);
    return early;
}

__device__ __forceinline__ bool differ(const Lengths& a, const Lengths& b) {
    return a.queries.begin != b.queries.begin || a.queries.count != b.queries.count || a.keys.begin != b.keys.begin ||
           a.keys.count != b.keys.count;
}

// find_start() from the final lengths, which the grid before this one may write until griddepcontrol.wait returns. Where grids overlap, a
// call of at most 32 sequences reads its lengths before the wait as well: the start that follows from them is found, and its first KV block
// prefetched into L2, while the other grid is still running. After the wait they are read again, and the start is found again if one has
// changed, which is rare: the layers of a model share their lengths. Stale values are clamped like others, so no address is out of bounds.
__device__ __forceinline__ Start await_start(const Params& all, int group, int lane) {
    bool awaited = !kGridsOverlap || all.batch_size > 32;
    if (awaited) griddepcontrol_wait();
    Lengths lane_lengths = awaited ? lengths_of(all, lane) : early_lengths_of(all, lane);
    for (;;) {  // twice at most; with two copies of find_start() registers would be spilled
        Start start = find_start(all, lane_lengths, group, lane);
        if (awaited) return start;
        prefetch_next(all, start.share, start.fetch);
        griddepcontrol_wait();
        awaited = true;
        start.fetch.pages = find_pages(all, start.fetch);  // pages may have changed where lengths have not
        const Lengths earlier = lane_lengths;
        lane_lengths = lengths_of(all, lane);
        if (!__any_sync(0xffffffff, differ(lane_lengths, earlier))) return start;
    }
}

__device__ __forceinline__ void sync_group(int) { __syncwarp(); }

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

// Where a group leaves its O for group 0. Groups have different keys of the same rows, so their results are added: for each lane and MMA tile of
// rows kDimTiles vectors of O, and one of row_max and row_sum.
__device__ __forceinline__ shared_address output_address(shared_address exchange, int group, int warp, int tile, int lane) {
    const int sender = (group - 1) * kGroupWarps + warp % kGroupWarps;
    return exchange + ((sender * kRowTiles + tile) * kDimTiles * 32 + lane) * 16;
}

__device__ __forceinline__ shared_address sums_address(shared_address sums, int group, int warp, int tile, int lane) {
    const int sender = (group - 1) * kGroupWarps + warp % kGroupWarps;
    return sums + ((sender * kRowTiles + tile) * 32 + lane) * 16;
}

__device__ __forceinline__ void send_rows(const RowTile (&rows)[kRowTiles], shared_address exchange, shared_address sums, int group,
                                          int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        store_shared_128(sums_address(sums, group, warp, i, lane),
                         {__float_as_uint(rows[i].row_max[0]), __float_as_uint(rows[i].row_max[1]),
                          __float_as_uint(rows[i].row_sum[0]), __float_as_uint(rows[i].row_sum[1])});
        const shared_address output = output_address(exchange, group, warp, i, lane);
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
            const float(&values)[4] = rows[i].output[n];
            store_shared_128(output + n * 512, {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                                                __float_as_uint(values[3])});
        }
    }
}

__device__ __forceinline__ void receive_rows(RowTile (&rows)[kRowTiles], shared_address exchange, shared_address sums, int warp,
                                             int lane) {
    for (int group = 1; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const uint4 received = load_shared_128(sums_address(sums, group, warp, i, lane));
            const float other_max[2] = {__uint_as_float(received.x), __uint_as_float(received.y)};
            const float other_sum[2] = {__uint_as_float(received.z), __uint_as_float(received.w)};
            float own_factor[2], other_factor[2];
#pragma unroll
            for (int row8 = 0; row8 < 2; ++row8) {
                const float row_max = fmaxf(rows[i].row_max[row8], other_max[row8]);
                own_factor[row8] = rescale_factor(rows[i].row_max[row8], row_max);
                other_factor[row8] = rescale_factor(other_max[row8], row_max);
                rows[i].row_max[row8] = row_max;
            }
            rescale(rows[i], own_factor);
#pragma unroll
            for (int row8 = 0; row8 < 2; ++row8) rows[i].row_sum[row8] += other_sum[row8] * other_factor[row8];
            const shared_address output = output_address(exchange, group, warp, i, lane);
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                const uint4 values = load_shared_128(output + n * 512);
                rows[i].output[n][0] += __uint_as_float(values.x) * other_factor[0];
                rows[i].output[n][1] += __uint_as_float(values.y) * other_factor[0];
                rows[i].output[n][2] += __uint_as_float(values.z) * other_factor[1];
                rows[i].output[n][3] += __uint_as_float(values.w) * other_factor[1];
            }
        }
    }
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

// Writes O. Lanes hold pairs of elements.
__device__ __forceinline__ void store_output(const Params& params, const Tile& tile, const RowTile (&rows)[kRowTiles], int warp,
                                             int lane) {
    element* out = params.out + tile.batch * params.out_batch_stride + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const int row = tile.first_row + first_row_of(warp) + kRowTileStep * i + 8 * row8 + lane / 4;
            if (row >= num_rows(params)) continue;
            element* out_row = out + row_offset(params, tile, row, params.out_row_stride, params.out_head_stride);
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                if (8 * n >= params.head_dim_v) break;
                store_global_32(out_row + 8 * n, pack<element>(rows[i].output[n][2 * row8], rows[i].output[n][2 * row8 + 1]));
            }
        }
    }
}

// Writes O, row_max and row_sum of a part to a slot of the workspace, for the kernel that combines the parts. O is not divided by row_sum yet.
__device__ __forceinline__ void store_part(const Params& params, const Tile& tile, int slot, const RowTile (&rows)[kRowTiles], int warp,
                                           int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const float row_sum = quad_sum(rows[i].row_sum[row8]);
            const int row_in_tile = first_row_of(warp) + kRowTileStep * i + 8 * row8 + lane / 4;
            if (tile.first_row + row_in_tile >= num_rows(params)) continue;
            const int64_t part_row = int64_t(slot) * kBlockM + row_in_tile;
            if (lane % 4 == 0) store_global_64(params.part_sums + part_row * 2, rows[i].row_max[row8], row_sum);
            float* output = params.part_outputs + part_row * kHeadDimV + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                store_global_64(output + 8 * n, rows[i].output[n][2 * row8], rows[i].output[n][2 * row8 + 1]);
            }
        }
    }
}

__device__ __forceinline__ void store_results(const Params& params, const Tile& tile, const Part& part, RowTile (&rows)[kRowTiles],
                                              int warp, int lane) {
    if (part.slot >= 0) {
        store_part(params, tile, part.slot, rows, warp, lane);
    } else {
        normalise(rows);
        store_lse(params, tile, rows, warp, lane);
        store_output(params, tile, rows, warp, lane);
    }
}

static_assert(sizeof(element) == 2, "the fragments of V are loaded by ldmatrix");
static_assert(kWarps % kGroupWarps == 0 && kBlockN % kGroups == 0, "groups are alike");
static_assert(kWarpRows % 16 == 0, "a warp's rows are whole 16-row MMA tiles");
static_assert(kGroupKeys % 16 == 0, "P . V takes keys by 16");
static_assert(kStages >= 2, "a KV block is on its way while another is computed");
static_assert(kHeadDimV <= kHeadDim, "rows of V fit into those of K");
static_assert(kRowBytes % 32 == 0, "the swizzle permutes at least two 16-byte chunks");
static_assert(sizeof(SharedStorage) == 103936, "launcher and kernel agree on shared memory");
static_assert(sizeof(Params) == 272 && offsetof(Params, q) == 0 && offsetof(Params, k) == 8 && offsetof(Params, v) == 16);
static_assert(offsetof(Params, out) == 24 && offsetof(Params, lse) == 32 && offsetof(Params, cu_seqlens_q) == 40);
static_assert(offsetof(Params, kv_lengths) == 48 && offsetof(Params, pages) == 56 && offsetof(Params, part_outputs) == 64);
static_assert(offsetof(Params, part_sums) == 72 && offsetof(Params, q_batch_stride) == 80);
static_assert(offsetof(Params, q_row_stride) == 88 && offsetof(Params, q_head_stride) == 96);
static_assert(offsetof(Params, k_batch_stride) == 104 && offsetof(Params, k_row_stride) == 112);
static_assert(offsetof(Params, k_head_stride) == 120 && offsetof(Params, v_batch_stride) == 128);
static_assert(offsetof(Params, v_row_stride) == 136 && offsetof(Params, v_head_stride) == 144);
static_assert(offsetof(Params, out_batch_stride) == 152 && offsetof(Params, out_row_stride) == 160);
static_assert(offsetof(Params, out_head_stride) == 168 && offsetof(Params, lse_batch_stride) == 176);
static_assert(offsetof(Params, lse_head_stride) == 184 && offsetof(Params, pages_batch_stride) == 192);
static_assert(offsetof(Params, group_size) == 200 && offsetof(Params, rows_q) == 204 && offsetof(Params, batch_size) == 208);
static_assert(offsetof(Params, batch_kv) == 212 && offsetof(Params, page_size) == 216 && offsetof(Params, seqlen_q) == 220);
static_assert(offsetof(Params, seqlen_kv) == 224 && offsetof(Params, head_dim) == 228 && offsetof(Params, head_dim_v) == 232);
static_assert(offsetof(Params, num_shares) == 236 && offsetof(Params, head_sets_log2) == 240);
static_assert(offsetof(Params, heads_per_set) == 244 && offsetof(Params, group_size_divisor) == 248);
static_assert(offsetof(Params, page_size_divisor) == 256 && offsetof(Params, scale_log2) == 264);
static_assert((kGroups - 1) * kGroupThreads * kRowTiles * kDimTiles * 16 <= kStageBytes, "O of all groups but one fits into a stage");
