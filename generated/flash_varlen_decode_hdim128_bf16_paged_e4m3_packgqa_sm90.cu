// flash_varlen_decode_hdim128_bf16_paged_e4m3_packgqa_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type none, pages paged, splits none, kv_starts none, sinks
//           none, kv_dtype e4m3, gqa packed, kv_scales none
// tile      block_m 16, block_n 128, warps 4, stages 3, min_blocks 2, cluster 8
// block     128 threads, 110728 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      flash_varlen_decode_e4m3_sm90.yaml
// template  flash_varlen_decode_e4m3_sm90.cu.j2
#include "flashgen/sm90_mma.cuh"

// Decoding: few query rows on many keys. Reading K and V once bounds the time. The thread blocks of a cluster share a tile. Each computes a part
// of the tile's KV blocks; parts differ by at most one block. For each KV block:
//
//     S = Q K^T    P = 2^(scale_log2 S - row_max)    row_sum += sums of P's rows    O += P V
//
// row_max tracks the largest score of each row (online softmax). When it rises, row_sum and O are rescaled. At the end one thread
// block of the cluster combines each row. The others send it their part of the row through shared memory, so no part goes to global memory,
// and there is no second kernel.
//
// Map
//   warps                kWarps = 4: each copies and computes its keys of each KV block, for all rows of the tile
//   cluster              kCluster = 8 thread blocks share a tile; row r is combined by the thread block of rank r % kCluster
//
//   shared memory        bytes
//   Q                    4096         kBlockM = 16 rows
//   stages               32768  x 3   codes of K and V of a KV block; in the end O, row_max and row_sum of all warps
//   received rows        8192         O of the rows combined here, from each thread block of the cluster
//   received sums        128          row_max and row_sum of these rows
//
//   barrier              arrivals of a phase                                            who waits
//   at kBarrierOffset    1: thread 0, and the bytes of st.async from the cluster        all threads, before they combine
//   cluster_wait()       all threads of the cluster, after mbarrier_init()              all threads, before they send
//   barrier_sync()       kThreads: Q is here; no warp reads the stages; O is in them    all threads
//
// The thread blocks of a cluster meet twice, without a barrier in the loop:
//
//   rank 0               KV blocks of part 0 | merge warps | send rows to their ranks | wait for the bytes | combine rows 0, kCluster, ...
//   rank 1               KV blocks of part 1 | merge warps | send rows to their ranks | wait for the bytes | combine rows 1, kCluster + 1, ...

using element = bf16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kHeadDimV = 128;  // of V and O
constexpr int kBlockM = 16;  // query rows of a tile
constexpr int kBlockN = 128;  // keys of a KV block
constexpr int kStages = 3;  // KV blocks in shared memory
constexpr int kCluster = 8;  // thread blocks of a cluster
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

// A group of warps copies its share of the keys and computes their scores for all rows of the tile. Here each warp is a group.
constexpr int kGroupThreads = 32;
constexpr int kGroups = kWarps;
constexpr int kGroupKeys = kBlockN / kGroups;  // keys of a KV block in a group's share
constexpr int kRowTiles = kBlockM / 16;        // MMA tiles along the rows
constexpr int kRowTileStep = 16;               // rows from an MMA tile to the next
constexpr int kKeyTiles = kGroupKeys / 8;      // MMA tiles of S along the keys
constexpr int kDimTiles = kHeadDimV / 8;       // MMA tiles of O along the head dimension

// Shared memory: Q, the stages, each with a KV block of K and one of V, then buffers for the data that thread blocks of the cluster send: O,
// row_max and row_sum of all parts of the rows that this thread block combines. Last is the barrier that counts these bytes. Rows of V are as
// long as rows of K.
constexpr int kQRowBytes = kHeadDim * sizeof(element);
constexpr int kRowBytes = kHeadDim * sizeof(e4m3);  // of K and V
constexpr int kStageOffset = kBlockM * kQRowBytes;
constexpr int kVOffset = kBlockN * kRowBytes;  // within a stage
constexpr int kStageBytes = 2 * kBlockN * kRowBytes;
constexpr int kReceivedRows = (kBlockM + kCluster - 1) / kCluster;  // rows that a thread block combines at most
constexpr int kReceivedOffset = kStageOffset + kStages * kStageBytes;
constexpr int kReceivedSumsOffset = kReceivedOffset + kReceivedRows * kCluster * kHeadDimV * 4;
constexpr int kBarrierOffset = kReceivedSumsOffset + kReceivedRows * kCluster * 8;
constexpr int kSharedBytes = kBarrierOffset + 8;

// After the last KV block the stages hold O, row_max and row_sum of all groups. A row of O is 8 floats longer, so that lanes of a warp store to
// different banks.
constexpr int kGroupRowFloats = kHeadDimV + 8;
constexpr int kGroupSumsOffset = kStageOffset + kGroups * kBlockM * kGroupRowFloats * 4;

struct Params {
    const element* q;                     // (batch_q, rows_q, num_heads_q, head_dim); rows 16-byte aligned
    const e4m3* k;                        // (batch_kv, rows_kv, num_heads_kv, head_dim); rows 16-byte aligned
    const e4m3* v;                        // (batch_kv, rows_kv, num_heads_kv, head_dim_v); rows 16-byte aligned
    const float* k_scale;                 // (batch, num_heads_kv): what a code of 1 in k stands for; null is 1
    const float* v_scale;                 // (batch, num_heads_kv): what a code of 1 in v stands for; null is 1
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
    int64_t k_scale_batch_stride;         // strides are in elements
    int64_t k_scale_head_stride;
    int64_t v_scale_batch_stride;         // strides are in elements
    int64_t v_scale_head_stride;
    int64_t out_batch_stride;             // strides are in elements
    int64_t out_row_stride;
    int64_t out_head_stride;
    int64_t lse_batch_stride;             // strides are in elements
    int64_t lse_head_stride;
    int64_t pages_batch_stride;           // strides are in elements
    int32_t group_size;                   // num_heads_q / num_heads_kv
    int32_t rows_q;                       // of an entry of q: all tokens where sequences are packed
    int32_t batch_kv;                     // entries of k: of a paged cache its pages
    int32_t page_size;                    // keys of a page
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_heads_kv;
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    uint64_t num_heads_divisor;           // of the heads of a batch entry in the grid; see divide()
    uint64_t num_row_blocks_divisor;      // of num_row_blocks; see divide()
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
constexpr int kChunkElements = 16 / sizeof(e4m3);
constexpr int kSwizzleChunks = kRowBytes % 128 == 0 ? 8 : kRowBytes % 64 == 0 ? 4 : 2;
constexpr int kSwizzleBytes = 16 * kSwizzleChunks;

__device__ int swizzle_key(int row);  // The number by which the chunks of a row are permuted

// The address of a lane's part of the first MMA fragment in a row. Adding an offset to it must not change the bits that step_address() XORs.
using LaneAddress = shared_address;

__device__ LaneAddress lane_address(shared_address block, int row, int chunk);  // The address of a 16-byte chunk of a row
// The address `row_step` rows down (a multiple of 8) and `chunk_pair` pairs of chunks to the right
__device__ shared_address step_address(LaneAddress lane, int row_step, int chunk_pair);
// For ldmatrix of V, transposed, whose elements of 16 bits are codes of two neighbouring dims
__device__ LaneAddress v_lane_address(shared_address block, int lane);
__device__ LaneAddress k_lane_address(shared_address block, int lane);  // For loads of K, a lane two codes each
// The address `row_step` rows down (a multiple of 8) and `chunk` chunks to the right
__device__ shared_address chunk_address(LaneAddress lane, int row_step, int chunk);
__device__ const e4m3* head_k(const Params& params, const Tile& tile);  // Where K of the tile's head begins in page 0
__device__ const e4m3* head_v(const Params& params, const Tile& tile);  // Where V of the tile's head begins

// kSwizzleChunks neighbouring threads copy a row, and each takes every kSwizzleChunks-th chunk of it.
constexpr int kRowsPerPass = kGroupThreads / kSwizzleChunks;
constexpr int kPasses = (kGroupKeys + kRowsPerPass - 1) / kRowsPerPass;

// The pages of a group's keys of a KV block, spread over the lanes of a warp: of_key[i] is the page of key 32 i + lane, as the page table has it.
// Each key may be in another page. K and V have the same layout.
struct Pages {
    int of_key[(kGroupKeys + 31) / 32];
};

// Loads them from a sequence's page table, which is read for keys among `rows` alone
__device__ Pages find_pages(const Params& params, const int32_t* pages, int first_key, const SeenRows& rows, bool early);

// The rows of a group's keys of a KV block, in K or V.
struct KeyRows {
    const e4m3* head;  // where the head's rows begin in page 0
    int64_t of_key[(kGroupKeys + 31) / 32];  // offsets from there, in elements, spread over the lanes of a warp like Pages

    // Where the thread's row in a pass begins. All lanes of the warp call it.
    __device__ __forceinline__ const e4m3* operator()(int pass) const {
        static_assert(32 % kRowsPerPass == 0, "the keys of a pass are in one register of a warp");
        const int row = pass * kRowsPerPass + threadIdx.x % kGroupThreads / kSwizzleChunks;
        return head + __shfl_sync(0xffffffff, of_key[pass * kRowsPerPass / 32], row % 32);
    }
};

// A lane computes the offsets of the keys that it looked up, since each key has kSwizzleChunks threads that copy its row
__device__ KeyRows find_key_rows(const Params& params, const Pages& pages, int first_key, const e4m3* head, int64_t page_stride,
    int64_t row_stride);
// Starts the copy of a group's keys of a KV block of K or V, kColumns wide
template <int kColumns, typename RowOfPass> __device__ void copy_keys(const RowOfPass& row_of_pass, shared_address keys,
    const SeenRows& rows, int head_dim);
// Prefetches a group's keys of a KV block of K or V, kColumns wide, into L2, as copy_keys() copies them
template <int kColumns, typename RowOfPass> __device__ void prefetch_keys(const RowOfPass& row_of_pass, const SeenRows& rows, int head_dim);

// Q has longer rows than K and V, and a swizzle of its own.
constexpr int kQRowChunks = kQRowBytes / 16;
constexpr int kQChunkElements = 16 / sizeof(element);
constexpr int kQSwizzleChunks = kQRowBytes % 128 == 0 ? 8 : 4;

__device__ int q_swizzle_key(int row);
__device__ LaneAddress q_lane_address(shared_address block, int lane);  // For ldmatrix of Q
// The address `row_step` rows down (a multiple of 8) and `chunk_pair` pairs of chunks to the right
__device__ shared_address q_step_address(LaneAddress lane, int row_step, int chunk_pair);
__device__ void copy_q(const Params& params, const Tile& tile, shared_address smem);  // Starts the copy of the tile's rows of Q
__device__ int cluster_rank();  // The rank of a thread block in its cluster
__device__ Tile find_tile(const Params& params);  // The tile of the thread block's cluster

// Where the thread's rows of a group's keys of a KV block begin, in K or V.
struct ThreadRows {
    const e4m3* begin[kPasses];

    __device__ __forceinline__ const e4m3* operator()(int pass) const { return begin[pass]; }
};

__device__ ThreadRows thread_rows(const KeyRows& rows);  // All lanes of the warp call it

// A group's progress through the KV blocks of its thread block's part of the tile.
struct Fetch {
    int left;           // KV blocks left to fetch
    int first_key;      // the group's first key in the next KV block
    int end_key;        // of the part
    const e4m3* k;   // where the head's rows begin in page 0
    const e4m3* v;
    // After the copies of KV block n the rows of n + 1 are found from their pages, then the pages of n + 2 are looked up.
    ThreadRows k_rows;  // of n, the KV block that comes next
    ThreadRows v_rows;
    Pages pages;        // of n + 1, on their way since n - 1 was fetched
};

__device__ int row_of_key(const Params&, int key);  // The row of the sequence that has a key
// Starts to load the pages of the group's keys from `first_key` on, as far as they are of the part
__device__ Pages find_pages(const Params& params, const Fetch& fetch, int first_key, bool early);
// The rows of the KV block that comes next, which has these pages
__device__ void find_rows(const Params& params, Fetch& fetch, const Pages& pages);
// Finds the rows of the part's first KV block, and looks up the pages of the second
__device__ void find_first_rows(const Params& params, Fetch& fetch);
// The thread block's part of the KV blocks that some row of the tile attends to; parts differ by one KV block at most
__device__ Fetch seek(const Params& params, const Tile& tile, int group);
__device__ void prefetch_next(const Params& params, const Fetch& fetch);  // Prefetches the next KV block into L2, if there is one
// Starts the copies of the next KV block, if there is one
__device__ void fetch_next(const Params& params, Fetch& fetch, shared_address stage, int group);
// load_clamped() for use before griddepcontrol.wait, while the grid before this one may still write the value
__device__ int load_early(const int32_t* values, int index, int most);
__device__ Lengths early_lengths_of(const Params& params, int sequence);  // lengths_of() before griddepcontrol.wait
__device__ bool differ(const Lengths& a, const Lengths& b);

// Where a thread block begins. `params` are the parameters of the sequence.
struct Start {
    Params params;
    Tile tile;
    Fetch fetch;
};

__device__ Start find_start(const Params& all, const Tile& tile, const Lengths& lengths, int group);
// find_start() from the final lengths, which the grid before this one may write until griddepcontrol.wait returns
__device__ Start await_start(const Params& all, int group);

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
// S = Q . K^T of kTiles MMA tiles of rows, in fp32, without the scale of K
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

// O += P . V, without the scale of V
template <int kTiles> __device__ void mma_pv(RowTile* rows, const P<kTiles>& p, const LaneAddress& v_lane);
// Exchanges `high` of the lanes whose bit is 0 for `low` of the lanes that differ from these in the bit alone
__device__ void exchange(float& low, float& high, int bit, int lane);
// Brings the columns of O into the order of dims, as accumulators of MMA tiles have them, and multiplies O by the scale of V
__device__ void order_columns(RowTile (&rows)[kRowTiles], float v_scale, int lane);

// The scales of K and of V of a tile's head.
struct KvScales {
    float k;
    float v;
};

// The scales of the sequence and the kv head; 1 where a call has none
__device__ KvScales load_scales(const Params& params, const Tile& tile);
// Multiplies S by the scale of K, before a score modification and the mask
template <int kTiles> __device__ void scale_scores(float (&scores)[kTiles][kKeyTiles][4], float k_scale);
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
// Writes O, row_max and row_sum of a group over the stages
__device__ void store_group_rows(const RowTile (&rows)[kRowTiles], shared_address smem, int group, int lane);
// Where the thread block that combines a row receives its O from thread block `rank`
__device__ shared_address received_row(shared_address smem, int received, int rank);
// Where the same thread block receives row_max and row_sum of that part
__device__ shared_address received_sums(shared_address smem, int received, int rank);
// Adds up the groups, in order, and sends each row of the tile to the thread block that combines it
__device__ void send_rows(shared_address smem, int num_rows_of_tile);
// Waits for all parts of the rows that this thread block combines, adds them up in the order of their ranks, divides O by row_sum and
// stores O and the LSE
__device__ void combine_rows(const Params& params, const Tile& tile, shared_address smem, int num_rows_of_tile);

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 2)
flash_varlen_decode_hdim128_bf16_paged_e4m3_packgqa_sm90(const __grid_constant__ Params all) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address smem = to_shared(shared_memory);
    const int group = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    auto stage_address = [&](int stage) { return smem + kStageOffset + stage * kStageBytes; };

    if (threadIdx.x == 0) {
        mbarrier_init(smem + kBarrierOffset, 1);
        fence_mbarrier_init();
    }
    cluster_arrive_relaxed();  // its wait is after the loop, before rows are sent

    Start start = await_start(all, group);
    const Params& params = start.params;
    // Programmatic dependent launch: the next grid may start once all thread blocks of this one have come here or ended. It may rely on every
    // grid before this one having ended.
    griddepcontrol_launch_dependents();
    if (start.tile.first_row >= num_rows(params)) {  // the other thread blocks of the cluster have no rows either
        cluster_wait();
        return;
    }
    const Tile tile = start.tile;
    Fetch fetch = start.fetch;

    // Q is copied before K and V, so that it does not wait for their copies.
    copy_q(params, tile, smem);
    const int blocks = fetch.left;  // of the thread block's part
    int first_key = fetch.first_key;
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) fetch_next(params, fetch, stage_address(stage), group);
    cp_async_wait<kStages - 1>();
    barrier_sync(kThreads);

    const KvScales scales = load_scales(params, tile);
    const LaneAddress q_lane = q_lane_address(smem, lane);
    const int group_offset = group * kGroupKeys * kRowBytes;
    RowTile rows[kRowTiles];
    clear(rows);
    int stage = 0;  // of the KV block to be computed next
    for (int block = 0; block < blocks; ++block) {
        // 1. Wait for the warp's keys of this KV block: a thread waits for its own copies, __syncwarp() for the copies of the warp. All lanes
        // have finished with the previous KV block: start the copy of a later one into its stage.
        cp_async_wait<kStages - 2>();
        __syncwarp();
        fetch_next(params, fetch, stage_address(stage == 0 ? kStages - 1 : stage - 1), group);

        // 2. S = Q K^T, softmax, O += P V, while later KV blocks are copied.
        float scores[kRowTiles][kKeyTiles][4];
        P<kRowTiles> p;
        mma_qk(scores, q_lane, k_lane_address(stage_address(stage) + group_offset, lane));
        scale_scores(scores, scales.k);
        finish_scores(params, tile, scores, 0, first_key, lane);
        softmax_step(scores, rows, params.scale_log2, p);
        mma_pv(rows, p, v_lane_address(stage_address(stage) + kVOffset + group_offset, lane));
        stage = stage == kStages - 1 ? 0 : stage + 1;
        first_key += kBlockN;
    }

    order_columns(rows, scales.v, lane);
    barrier_sync(kThreads);  // every group has finished with the stages
    store_group_rows(rows, smem, group, lane);
    barrier_sync(kThreads);
    cluster_wait();  // the barriers of all thread blocks are initialised
    const int num_rows_of_tile = min(kBlockM, num_rows(params) - tile.first_row);
    send_rows(smem, num_rows_of_tile);
    combine_rows(params, tile, smem, num_rows_of_tile);
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

__device__ __forceinline__ Lengths lengths_of(const Params& params, int sequence) {
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

// For ldmatrix of V, transposed, whose elements of 16 bits are codes of two neighbouring dims: the four 8x8 matrices are rows 0-7 and 8-15 of
// the left chunk, then of the right one.
__device__ __forceinline__ LaneAddress v_lane_address(shared_address block, int lane) {
    return lane_address(block, lane % 16, lane / 16);
}

// For loads of K, a lane two codes each: thread (g, t) = (lane / 4, lane % 4) has dims 2 t and 2 t + 1 of row g.
__device__ __forceinline__ LaneAddress k_lane_address(shared_address block, int lane) {
    return lane_address(block, lane / 4, 0) + lane % 4 * 2;
}

__device__ __forceinline__ shared_address chunk_address(LaneAddress lane, int row_step, int chunk) {
    const int step_bytes = 16 * chunk;
    return (lane ^ step_bytes % kSwizzleBytes) + row_step * kRowBytes + step_bytes / kSwizzleBytes * kSwizzleBytes;
}

__device__ __forceinline__ const e4m3* head_k(const Params& params, const Tile& tile) {
    return params.k + tile.kv_head * params.k_head_stride;
}

__device__ __forceinline__ const e4m3* head_v(const Params& params, const Tile& tile) {
    return params.v + tile.kv_head * params.v_head_stride;
}

// Loads them from a sequence's page table, which is read for keys among `rows` alone. Nothing here waits for the loads. An `early` one
// may come before griddepcontrol.wait, so it bypasses L1, where a later one would find what is stale.
__device__ __forceinline__ Pages find_pages(const Params& params, const int32_t* pages, int first_key, const SeenRows& rows, bool early) {
    Pages found;
#pragma unroll
    for (int first = 0; first < kGroupKeys; first += 32) {
        const int row = first + threadIdx.x % 32;
        const int32_t* entry = pages + divide(first_key + row, params.page_size_divisor);
        const bool valid = rows.among(kGroupKeys).has(row);
        found.of_key[first / 32] = !valid ? 0 : early ? load_relaxed_32(entry) : load_global_32(entry);
    }
    return found;
}

__device__ __forceinline__ KeyRows find_key_rows(const Params& params, const Pages& pages, int first_key, const e4m3* head,
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
    constexpr int kPanels = kColumns * sizeof(e4m3) / kSwizzleBytes;
    constexpr int kPanelElements = kSwizzleChunks * kChunkElements;
    static_assert(kColumns * sizeof(e4m3) % kSwizzleBytes == 0, "the swizzle permutes whole panels");
    const int row = threadIdx.x % kGroupThreads / kSwizzleChunks;
    const int chunk = threadIdx.x % kSwizzleChunks;
    const shared_address destination = keys + row * kRowBytes + 16 * (chunk ^ swizzle_key(row));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int first = pass * kRowsPerPass;
        const e4m3* source = row_of_pass(pass) + chunk * kChunkElements;
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
    constexpr int kLineElements = 128 / sizeof(e4m3);
    static_assert(kSwizzleChunks * kLineElements >= kColumns, "a row has a thread for each line");
    const int row = threadIdx.x % kGroupThreads / kSwizzleChunks;
    const int column = threadIdx.x % kSwizzleChunks * kLineElements;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const e4m3* source = row_of_pass(pass) + column;
        if (rows.among(kGroupKeys).has(pass * kRowsPerPass + row) && column < min(kColumns, head_dim)) prefetch_l2(source);
    }
}

__device__ __forceinline__ int q_swizzle_key(int row) { return row / (8 / kQSwizzleChunks) % kQSwizzleChunks; }

// For ldmatrix of Q: the four 8x8 matrices are rows 0-7 and 8-15 of the left chunk, then of the right one.
__device__ __forceinline__ LaneAddress q_lane_address(shared_address block, int lane) {
    return block + lane % 16 * kQRowBytes + 16 * (lane / 16 ^ q_swizzle_key(lane % 16));
}

__device__ __forceinline__ shared_address q_step_address(LaneAddress lane, int row_step, int chunk_pair) {
    constexpr int kPanelBytes = 16 * kQSwizzleChunks;
    const int step_bytes = 32 * chunk_pair;
    return (lane ^ step_bytes % kPanelBytes) + row_step * kQRowBytes + step_bytes / kPanelBytes * kPanelBytes;
}

// Starts the copy of the tile's rows of Q. Rows past the last one, and elements from head_dim on, become zeros.
__device__ __forceinline__ void copy_q(const Params& params, const Tile& tile, shared_address smem) {
    constexpr int kChunks = kBlockM * kQRowChunks;
    const element* q = params.q + tile.batch * params.q_batch_stride;
    const int rows_left = num_rows(params) - tile.first_row;
#pragma unroll
    for (int first = 0; first < kChunks; first += kThreads) {
        const int row = (first + threadIdx.x) / kQRowChunks;
        const int chunk = (first + threadIdx.x) % kQRowChunks;
        if (kChunks % kThreads != 0 && row >= kBlockM) break;
        const shared_address panel = smem + row * kQRowBytes + chunk / kQSwizzleChunks * (16 * kQSwizzleChunks);
        const element* source =
            q + row_offset(params, tile, tile.first_row + row, params.q_row_stride, params.q_head_stride) + chunk * kQChunkElements;
        cp_async_16(panel + 16 * (chunk % kQSwizzleChunks ^ q_swizzle_key(row)), source,
                    row < rows_left && chunk * kQChunkElements < params.head_dim ? 16 : 0);
    }
    cp_async_commit();
}

__device__ __forceinline__ int cluster_rank() { return block_index() % kCluster; }

// The tile of the thread block's cluster. With variable lengths every sequence has as many tiles as the longest one may need, so a tile may
// begin past the last row of its sequence, also if the sequence has no queries.
__device__ __forceinline__ Tile find_tile(const Params& params) {
    const int index = block_index() / kCluster;
    const int head_of_batch = divide(index, params.num_row_blocks_divisor);
    const int num_heads = params.num_heads_kv;
    Tile tile;
    tile.batch = divide(head_of_batch, params.num_heads_divisor);
    tile.kv_head = head_of_batch - tile.batch * num_heads;
    tile.head = tile.kv_head * params.group_size;
    tile.first_row = (index - head_of_batch * params.num_row_blocks) * kBlockM;
    return tile;
}

__device__ __forceinline__ ThreadRows thread_rows(const KeyRows& rows) {
    ThreadRows own;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) own.begin[pass] = rows(pass);
    return own;
}

__device__ __forceinline__ int row_of_key(const Params&, int key) { return key; }

__device__ __forceinline__ Pages find_pages(const Params& params, const Fetch& fetch, int first_key, bool early) {
    SeenRows rows = seen_rows(params, first_key);
    rows.end = fetch.end_key - first_key;
    return find_pages(params, params.pages, row_of_key(params, first_key), rows, early);
}

// The rows of the KV block that comes next, which has these pages. All lanes of the warp call it.
__device__ __forceinline__ void find_rows(const Params& params, Fetch& fetch, const Pages& pages) {
    const int first_row = row_of_key(params, fetch.first_key);
    fetch.k_rows = thread_rows(find_key_rows(params, pages, first_row, fetch.k, params.k_batch_stride, params.k_row_stride));
    fetch.v_rows = thread_rows(find_key_rows(params, pages, first_row, fetch.v, params.v_batch_stride, params.v_row_stride));
}

__device__ __forceinline__ void find_first_rows(const Params& params, Fetch& fetch) {
    const Pages pages = find_pages(params, fetch, fetch.first_key, false);
    fetch.pages = find_pages(params, fetch, fetch.first_key + kBlockN, false);
    find_rows(params, fetch, pages);
}

__device__ __forceinline__ Fetch seek(const Params& params, const Tile& tile, int group) {
    const int last_row = min(tile.first_row + kBlockM, num_rows(params)) - 1;
    const int first_block = keys_of_query(params, query_of_row(params, tile.first_row)).begin / kBlockN;
    const int end_block = (keys_of_query(params, query_of_row(params, last_row)).end + kBlockN - 1) / kBlockN;
    const int blocks = max(0, end_block - first_block);
    const int rank = cluster_rank();
    const int begin = first_block + blocks / kCluster * rank + min(rank, blocks % kCluster);
    Fetch fetch;
    fetch.left = blocks / kCluster + (rank < blocks % kCluster ? 1 : 0);
    fetch.first_key = begin * kBlockN + group * kGroupKeys;
    fetch.end_key = min(params.seqlen_kv, (begin + fetch.left) * kBlockN);
    fetch.k = head_k(params, tile);
    fetch.v = head_v(params, tile);
    return fetch;
}

__device__ __forceinline__ void prefetch_next(const Params& params, const Fetch& fetch) {
    if (fetch.left == 0) return;
    const SeenRows rows = seen_rows(params, fetch.first_key);
    prefetch_keys<kHeadDim>(fetch.k_rows, rows, params.head_dim);
    prefetch_keys<kHeadDimV>(fetch.v_rows, rows, params.head_dim_v);
}

// Starts the copies of the next KV block, if there is one. Each call is one group of copies.
__device__ __forceinline__ void fetch_next(const Params& params, Fetch& fetch, shared_address stage, int group) {
    if (fetch.left > 0) {
        const shared_address keys = stage + group * kGroupKeys * kRowBytes;
        const SeenRows rows = seen_rows(params, fetch.first_key);
        copy_keys<kHeadDim>(fetch.k_rows, keys, rows, params.head_dim);
        copy_keys<kHeadDimV>(fetch.v_rows, keys + kVOffset, rows, params.head_dim_v);
        --fetch.left;
        fetch.first_key += kBlockN;
        // Rows are found a KV block ahead, so that copies do not wait for it: where a warp is alone on its scheduler, nothing else would hide
        // what it takes. The look-up comes after find_rows(), the last use of the pages before: before it the compiler loads into another
        // register, and the move to the register of fetch.pages waits for the load.
        find_rows(params, fetch, fetch.pages);
        fetch.pages = find_pages(params, fetch, fetch.first_key + kBlockN, false);
    }
    cp_async_commit();
}

// load_clamped() for use before griddepcontrol.wait, while the grid before this one may still write the value. It bypasses L1, so that a load
// after the wait does not find the old value there.
__device__ __forceinline__ int load_early(const int32_t* values, int index, int most) {
    return max(0, min(most, int(load_relaxed_32(values + index))));
}

__device__ __forceinline__ Lengths early_lengths_of(const Params& params, int sequence) {
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

__device__ __forceinline__ Start find_start(const Params& all, const Tile& tile, const Lengths& lengths, int group) {
    Start start = {of_sequence(all, tile.batch, lengths), tile};
    if (tile.first_row < num_rows(start.params)) start.fetch = seek(start.params, tile, group);
    return start;
}

// find_start() from the final lengths, which the grid before this one may write until griddepcontrol.wait returns. They are read before the
// wait as well: the start that follows from them is found, and its first KV block prefetched into L2, while the other grid is still running.
// After the wait they are read again, and the start is found again if one has changed, which is rare: the layers of a model share their
// lengths. Stale values are clamped like others, so no address is out of bounds.
__device__ __forceinline__ Start await_start(const Params& all, int group) {
    const Tile tile = find_tile(all);
    const Lengths earlier = early_lengths_of(all, tile.batch);
    Start start = find_start(all, tile, earlier, group);
    // All lanes shuffle offsets, also of a sequence without rows: some may have read a length as it was, others as it is now.
    find_rows(start.params, start.fetch, find_pages(start.params, start.fetch, start.fetch.first_key, true));
    prefetch_next(start.params, start.fetch);
    griddepcontrol_wait();
    const Lengths lengths = lengths_of(all, tile.batch);
    find_first_rows(start.params, start.fetch);  // pages may have changed where lengths have not
    if (__any_sync(0xffffffff, differ(lengths, earlier))) {
        start = find_start(all, tile, lengths, group);
        find_first_rows(start.params, start.fetch);
    }
    return start;
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

// S = Q . K^T of kTiles MMA tiles of rows, in fp32, without the scale of K. Element [i][j][e] of thread (g, t) = (lane / 4, lane % 4) is row
// g + 8 (e / 2) of tile i, key 8 j + 2 t + e % 2. Codes become elements on their way into fragments; each lane loads what its fragments have,
// in the order of 16-bit rows, so that the sums equal the sums of rows that were converted before.
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
        for (int i = 0; i < kTiles; ++i) ldmatrix_x4(q_fragment[i], q_step_address(q_lane, kRowTileStep * i, step));
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
            const shared_address codes = chunk_address(k_lane, 8 * j, step);
            const uint32_t left = unpack_e4m3<element>(load_shared_16(codes));
            const uint32_t right = unpack_e4m3<element>(load_shared_16(codes + 8));
#pragma unroll
            for (int i = 0; i < kTiles; ++i) mma_m16n8k16<element>(scores[i][j], q_fragment[i], left, right);
        }
    }
}

// O += P . V, without the scale of V. ldmatrix moves two codes at a time, of dims 2 g and 2 g + 1 of two keys: of 16 dims the even ones make one
// MMA tile, the odd ones the next. So columns 2 t and 2 t + 1 of tile n are dims 4 t and 4 t + 2 of the 16 dims, and in tile n + 1 the dims
// after these, until order_columns() is called.
template <int kTiles>
__device__ __forceinline__ void mma_pv(RowTile* rows, const P<kTiles>& p, const LaneAddress& v_lane) {
    static_assert(kDimTiles % 4 == 0, "ldmatrix takes 32 dims");
#pragma unroll
    for (int j = 0; j < kKeyTiles / 2; ++j) {
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 4) {
            uint32_t codes[4];
            ldmatrix_x4_trans(codes, step_address(v_lane, 16 * j, n / 4));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t upper_keys = __byte_perm(codes[2 * half], 0, 0x3120);  // the even dim of both keys, then the odd one
                const uint32_t lower_keys = __byte_perm(codes[2 * half + 1], 0, 0x3120);
                const uint32_t even[2] = {unpack_e4m3<element>(upper_keys), unpack_e4m3<element>(lower_keys)};
                const uint32_t odd[2] = {unpack_e4m3<element>(upper_keys >> 16), unpack_e4m3<element>(lower_keys >> 16)};
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
                    mma_m16n8k16<element>(rows[i].output[n + 2 * half], p.fragment[i][j], even[0], even[1]);
                    mma_m16n8k16<element>(rows[i].output[n + 2 * half + 1], p.fragment[i][j], odd[0], odd[1]);
                }
            }
        }
    }
}

__device__ __forceinline__ void exchange(float& low, float& high, int bit, int lane) {
    const bool is_upper = (lane & bit) != 0;
    const float received = __shfl_xor_sync(0xffffffff, is_upper ? low : high, bit);
    (is_upper ? low : high) = received;
}

__device__ __forceinline__ void order_columns(RowTile (&rows)[kRowTiles], float v_scale, int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 2) {
#pragma unroll
            for (int row8 = 0; row8 < 2; ++row8) {
                float even[2] = {rows[i].output[n][2 * row8] * v_scale, rows[i].output[n][2 * row8 + 1] * v_scale};
                float odd[2] = {rows[i].output[n + 1][2 * row8] * v_scale, rows[i].output[n + 1][2 * row8 + 1] * v_scale};
                exchange(even[0], even[1], 1, lane);
                exchange(odd[0], odd[1], 1, lane);
                exchange(even[0], even[1], 2, lane);
                exchange(odd[0], odd[1], 2, lane);
                rows[i].output[n][2 * row8] = even[0];
                rows[i].output[n][2 * row8 + 1] = odd[0];
                rows[i].output[n + 1][2 * row8] = even[1];
                rows[i].output[n + 1][2 * row8 + 1] = odd[1];
            }
        }
    }
}

__device__ __forceinline__ KvScales load_scales(const Params& params, const Tile& tile) {
    KvScales scales = {1.0f, 1.0f};
    if (params.k_scale != nullptr) {
        const float* scale = params.k_scale + tile.batch * params.k_scale_batch_stride + tile.kv_head * params.k_scale_head_stride;
        scales.k = __uint_as_float(load_global_32(scale));
    }
    if (params.v_scale != nullptr) {
        const float* scale = params.v_scale + tile.batch * params.v_scale_batch_stride + tile.kv_head * params.v_scale_head_stride;
        scales.v = __uint_as_float(load_global_32(scale));
    }
    return scales;
}

template <int kTiles>
__device__ __forceinline__ void scale_scores(float (&scores)[kTiles][kKeyTiles][4], float k_scale) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i][j][e] *= k_scale;
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

// Writes O, row_max and row_sum of a group over the stages. The groups have different keys of the same rows.
__device__ __forceinline__ void store_group_rows(const RowTile (&rows)[kRowTiles], shared_address smem, int group, int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const float row_sum = quad_sum(rows[i].row_sum[row8]);
            const int row = group * kBlockM + kRowTileStep * i + 8 * row8 + lane / 4;
            if (lane % 4 == 0) {
                store_shared_64(smem + kGroupSumsOffset + row * 8, __float_as_uint(rows[i].row_max[row8]), __float_as_uint(row_sum));
            }
            const shared_address output = smem + kStageOffset + (row * kGroupRowFloats + lane % 4 * 2) * 4;
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                store_shared_64(output + n * 32, __float_as_uint(rows[i].output[n][2 * row8]),
                                __float_as_uint(rows[i].output[n][2 * row8 + 1]));
            }
        }
    }
}

// Where the thread block that combines a row receives its O from thread block `rank`. The row is the `received`-th that it combines.
__device__ __forceinline__ shared_address received_row(shared_address smem, int received, int rank) {
    return smem + kReceivedOffset + (received * kCluster + rank) * kHeadDimV * 4;
}

__device__ __forceinline__ shared_address received_sums(shared_address smem, int received, int rank) {
    return smem + kReceivedSumsOffset + (received * kCluster + rank) * 8;
}

// Adds up the groups, in order, and sends each row of the tile to the thread block that combines it: row r goes to rank r % kCluster. A thread
// has four elements of a row.
__device__ __forceinline__ void send_rows(shared_address smem, int num_rows_of_tile) {
    constexpr int kRowVectors = kHeadDimV / 4;
    const int rank = cluster_rank();
    for (int index = threadIdx.x; index < num_rows_of_tile * kRowVectors; index += kThreads) {
        const int row = index / kRowVectors;
        const int column = index % kRowVectors * 4;
        float2 sums[kGroups];
        float row_max = kNoRowMax;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            sums[group] = load_shared_64(smem + kGroupSumsOffset + (group * kBlockM + row) * 8);
            row_max = fmaxf(row_max, sums[group].x);
        }
        float row_sum = 0.0f;
        float output[4] = {};
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const float factor = rescale_factor(sums[group].x, row_max);
            const uint4 values = load_shared_128(smem + kStageOffset + ((group * kBlockM + row) * kGroupRowFloats + column) * 4);
            row_sum += sums[group].y * factor;
            output[0] += __uint_as_float(values.x) * factor;
            output[1] += __uint_as_float(values.y) * factor;
            output[2] += __uint_as_float(values.z) * factor;
            output[3] += __uint_as_float(values.w) * factor;
        }
        const int to = row % kCluster;
        const shared_address barrier = map_shared(smem + kBarrierOffset, to);
        store_async_128(map_shared(received_row(smem, row / kCluster, rank), to) + column * 4, output, barrier);
        if (column == 0) store_async_64(map_shared(received_sums(smem, row / kCluster, rank), to), row_max, row_sum, barrier);
    }
}

// Waits for all parts of the rows that this thread block combines, adds them up in the order of their ranks, divides O by row_sum and stores O
// and the LSE. A row that attends to nothing has row_sum 0: its O becomes 0, its LSE -inf. A thread has two elements of a row.
__device__ __forceinline__ void combine_rows(const Params& params, const Tile& tile, shared_address smem, int num_rows_of_tile) {
    constexpr int kRowPairs = kHeadDimV / 2;
    const int rank = cluster_rank();
    const int count = (num_rows_of_tile - rank + kCluster - 1) / kCluster;
    if (count <= 0) return;  // no thread block sends to this one, so it may exit
    // After this wait no thread block sends to this one any more.
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(smem + kBarrierOffset, count * kCluster * (kHeadDimV * 4 + 8));
    mbarrier_wait_cluster(smem + kBarrierOffset, 0);
    for (int index = threadIdx.x; index < count * kRowPairs; index += kThreads) {
        const int received = index / kRowPairs;
        const int column = index % kRowPairs * 2;
        float2 sums[kCluster];
        float row_max = kNoRowMax;
#pragma unroll
        for (int part = 0; part < kCluster; ++part) {
            sums[part] = load_shared_64(received_sums(smem, received, part));
            row_max = fmaxf(row_max, sums[part].x);
        }
        float row_sum = 0.0f;
        float output[2] = {};
#pragma unroll
        for (int part = 0; part < kCluster; ++part) {
            const float factor = rescale_factor(sums[part].x, row_max);
            const float2 values = load_shared_64(received_row(smem, received, part) + column * 4);
            row_sum += sums[part].y * factor;
            output[0] += values.x * factor;
            output[1] += values.y * factor;
        }
        const int row = tile.first_row + received * kCluster + rank;
        const RowEnd end = row_end(row_max, row_sum);
        const float factor = end.factor();
        if (column < params.head_dim_v) {
            element* out = params.out + tile.batch * params.out_batch_stride +
                           row_offset(params, tile, row, params.out_row_stride, params.out_head_stride);
            store_global_32(out + column, pack<element>(output[0] * factor, output[1] * factor));
        }
        if (column == 0 && params.lse != nullptr) {
            store_global_32(params.lse + row_offset(params, tile, row, 1, params.lse_head_stride), end.lse());
        }
    }
}

static_assert(sizeof(element) == 2, "the fragments of V are loaded by ldmatrix");
static_assert(kBlockN % kGroups == 0, "groups are alike");
static_assert(kBlockM % 16 == 0, "rows are whole 16-row MMA tiles");
static_assert(kGroupKeys % 16 == 0, "P . V takes keys by 16");
static_assert(kStages >= 2, "a KV block is on its way while another is computed");
static_assert(kHeadDimV <= kHeadDim, "rows of V fit into those of K");
static_assert(kRowBytes % 32 == 0, "the swizzle permutes at least two 16-byte chunks");
static_assert(kGroupSumsOffset + kGroups * kBlockM * 8 <= kReceivedOffset, "O of all groups fits into the stages");
static_assert(kSharedBytes == 110728, "launcher and kernel agree on shared memory");
static_assert(sizeof(Params) == 312 && offsetof(Params, q) == 0 && offsetof(Params, k) == 8 && offsetof(Params, v) == 16);
static_assert(offsetof(Params, k_scale) == 24 && offsetof(Params, v_scale) == 32 && offsetof(Params, out) == 40);
static_assert(offsetof(Params, lse) == 48 && offsetof(Params, cu_seqlens_q) == 56 && offsetof(Params, kv_lengths) == 64);
static_assert(offsetof(Params, pages) == 72 && offsetof(Params, q_batch_stride) == 80 && offsetof(Params, q_row_stride) == 88);
static_assert(offsetof(Params, q_head_stride) == 96 && offsetof(Params, k_batch_stride) == 104);
static_assert(offsetof(Params, k_row_stride) == 112 && offsetof(Params, k_head_stride) == 120);
static_assert(offsetof(Params, v_batch_stride) == 128 && offsetof(Params, v_row_stride) == 136);
static_assert(offsetof(Params, v_head_stride) == 144 && offsetof(Params, k_scale_batch_stride) == 152);
static_assert(offsetof(Params, k_scale_head_stride) == 160 && offsetof(Params, v_scale_batch_stride) == 168);
static_assert(offsetof(Params, v_scale_head_stride) == 176 && offsetof(Params, out_batch_stride) == 184);
static_assert(offsetof(Params, out_row_stride) == 192 && offsetof(Params, out_head_stride) == 200);
static_assert(offsetof(Params, lse_batch_stride) == 208 && offsetof(Params, lse_head_stride) == 216);
static_assert(offsetof(Params, pages_batch_stride) == 224 && offsetof(Params, group_size) == 232);
static_assert(offsetof(Params, rows_q) == 236 && offsetof(Params, batch_kv) == 240 && offsetof(Params, page_size) == 244);
static_assert(offsetof(Params, seqlen_q) == 248 && offsetof(Params, seqlen_kv) == 252 && offsetof(Params, head_dim) == 256);
static_assert(offsetof(Params, head_dim_v) == 260 && offsetof(Params, num_heads_kv) == 264);
static_assert(offsetof(Params, num_row_blocks) == 268 && offsetof(Params, num_heads_divisor) == 272);
static_assert(offsetof(Params, num_row_blocks_divisor) == 280 && offsetof(Params, group_size_divisor) == 288);
static_assert(offsetof(Params, page_size_divisor) == 296 && offsetof(Params, scale_log2) == 304);
static_assert(kQRowBytes % 64 == 0, "the swizzle permutes whole panels of Q");
