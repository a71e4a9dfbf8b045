// flash_fwd_varlen_hdim128_bf16_causal_paged_e4m3_packgqa_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type causal, pages paged, sinks none, kv_dtype e4m3, kv_scales
//           none, gqa packed
// tile      block_m 128, block_n 128, q_stages 2, stages 2, code_stages 1, panel 64, producer_registers 40,
//           converter_registers 72
// block     512 threads, 230760 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      flash_fwd_varlen_e4m3_sm90.yaml
// template  flash_fwd_sequences_sm90.cu.j2
#include "flashgen/sm90.cuh"

// A tile is kBlockM rows of queries that attend to the keys of one kv head. Thread blocks are persistent: each computes one tile after another.
// For each KV block that the tile's rows attend to, from the last to the first:
//
//     S = Q K^T    P = 2^(scale_log2 S - row_max)    row_sum += sums of P's rows    O += P V
//
// row_max tracks the largest score of each row (online softmax). When it rises, row_sum and O are rescaled. At the end O is divided by row_sum.
//
// Map
//   warpgroup 0          the producer, kProducerRegisters = 40 a thread
//     warp 0             produce(): loads Q, K and V by TMA
//     warp 1             find_tiles(): finds tile after tile, and passes each on to the other roles
//     warp 2             produce_v(): loads V, whose rows are in pages, so that produce() loads only Q and K
//   warpgroup 1 + c      consume(): S, softmax and O of 64 rows, as consumer c of 2, kConsumerRegisters a thread
//   warpgroup 3          convert_codes(): turns codes of K and V into elements, kConverterRegisters = 72 a thread
//
//   SharedStorage        bytes
//   q                    32768  x 2  Q of a tile
//   k                    32768  x 2  K of a KV block
//   v                    32768  x 2  V of a KV block
//   k_codes              16384  x 1  K of a KV block, as codes
//   v_codes              16384  x 1  V of a KV block, as codes
//   mbarriers            8 each; and 1024 more, so that SharedStorage begins at a multiple of 1024
//
//   barrier              arrivals of a phase                                              who waits
//   q_full               1: the producer, and the bytes of TMA                            consumers
//   q_empty              4 kConsumers: lane 0 of each warp, past the last Q K^T           producer
//   k_full, v_full       kConverters: lane 0 of each warp of convert_codes()              consumers
//   k_empty, v_empty     4 kConsumers: lane 0 of each warp, once its MMAs have read it    convert_codes()
//   k_codes_full, v_...  1: the producer, and the bytes of TMA                            convert_codes()
//   k_codes_empty, v_... kConverters: lane 0 of each warp, once it has read its codes     producer
//   tile_full            1: lane 0 of find_tiles()                                        each role that reads the tile
//   tile_empty           lane 0 of each warp that reads the tile                          find_tiles()
//   rows_clear           4 kConsumers: lane 0 of each warp, once its rows of V are zero   consumers
//   kTurnBarrier         256: the previous consumer, and the consumer that waits          a consumer, before its MMAs
//
// Consumers take turns at issuing MMAs, so that the softmax of one runs while the tensor cores work for the next. S(n) is Q K^T and O(n) is P V
// of the n-th KV block visited:
//
//   consumer c           issue S(1) O(0) | softmax(1)                        | issue S(2) O(1) | softmax(2)
//   consumer c + 1       softmax(0)      | issue S(1) O(0) | softmax(1)                        | issue S(2) O(1)

using element = bf16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kHeadDimV = 128;  // of V and O
constexpr int kBlockM = 128;  // query rows of a tile
constexpr int kBlockN = 128;  // keys of a KV block
constexpr int kQStages = 2;  // Q buffers
constexpr int kStages = 2;  // K buffers, and V buffers
constexpr int kConsumers = 2;  // consumer warpgroups, 64 rows each
constexpr int kCodeStages = 1;  // buffers of K's codes, and of V's codes
constexpr int kConverters = 4;  // warps that convert codes, a warpgroup
constexpr int kThreads = 128 * (2 + kConsumers);  // warpgroup 0 is the producer, the last one converts

// Registers of a thread. At launch all threads have equal shares of 65,536 registers. setmaxnreg moves registers between warpgroups: consumers
// share the registers that the producer gives up, at most 240 a thread. If the share at launch is larger than kConsumerRegisters, ptxas lowers
// it to kConsumerRegisters.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = 40;
constexpr int kConverterRegisters = 72;
constexpr int kRegistersLeft = ((2 + kConsumers) * kLaunchRegisters - kProducerRegisters - kConverterRegisters) / kConsumers / 8 * 8;
constexpr int kConsumerRegisters = kRegistersLeft < 240 ? kRegistersLeft : 240;

enum NamedBarrier : int {  // __syncthreads() has the number 0
    kTurnBarrier = 1,  // + consumer
};

// A tile of a sequence, as the warp that finds it passes it to the producer and the consumers.
struct SequenceTile {
    int sequence;     // below 0: there are no more tiles
    int head;         // of the grid
    int first_row;    // below 0 in a tile that begins before the sequence's first row
    int first_query;  // the row of q where the sequence begins
    int seqlen_q;
    int seqlen_kv;

    __device__ __forceinline__ void load(shared_address words) {
        sequence = load_shared_32(words + offsetof(SequenceTile, sequence));
        head = load_shared_32(words + offsetof(SequenceTile, head));
        first_row = load_shared_32(words + offsetof(SequenceTile, first_row));
        first_query = load_shared_32(words + offsetof(SequenceTile, first_query));
        seqlen_q = load_shared_32(words + offsetof(SequenceTile, seqlen_q));
        seqlen_kv = load_shared_32(words + offsetof(SequenceTile, seqlen_kv));
    }

    __device__ __forceinline__ void store(shared_address words) const {
        store_shared_32(words + offsetof(SequenceTile, sequence), sequence);
        store_shared_32(words + offsetof(SequenceTile, head), head);
        store_shared_32(words + offsetof(SequenceTile, first_row), first_row);
        store_shared_32(words + offsetof(SequenceTile, first_query), first_query);
        store_shared_32(words + offsetof(SequenceTile, seqlen_q), seqlen_q);
        store_shared_32(words + offsetof(SequenceTile, seqlen_kv), seqlen_kv);
    }
};

// Shared memory holds panels of 64 columns. TMA swizzles the 128 bytes of each row.
constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = kPanelColumns * sizeof(element);
constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;  // of Q and K
constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;  // of V and O
constexpr int kProducers = 2;  // warps that load
constexpr int kTileWords = (sizeof(SequenceTile) + 15) / 16 * 4;  // of a SequenceTile in shared memory
// TMA loads K and V in boxes of 16 keys, all of one page.
constexpr int kBoxKeys = 16;
constexpr int kBoxes = kBlockN / kBoxKeys;  // of a panel of columns

struct Box {
    int32_t page;
    int32_t row;  // of the page, where the keys of the box begin
};
constexpr int kCodeRowBytes = kPanelColumns * sizeof(e4m3);  // of a panel of codes, which TMA swizzles, too

// Begins at a multiple of 1024 bytes. The swizzle XORs bits of the address, so its pattern repeats every 1024 bytes.
struct SharedStorage {
    element q[kQStages][kPanels][kBlockM][kPanelColumns];
    element k[kStages][kPanels][kBlockN][kPanelColumns];
    element v[kStages][kPanelsV][kBlockN][kPanelColumns];
    e4m3 k_codes[kCodeStages][kPanels][kBlockN][kPanelColumns];
    e4m3 v_codes[kCodeStages][kPanelsV][kBlockN][kPanelColumns];
    uint64_t q_full[kQStages];
    uint64_t q_empty[kQStages];
    uint64_t k_full[kStages];
    uint64_t k_empty[kStages];
    uint64_t v_full[kStages];
    uint64_t v_empty[kStages];
    uint64_t k_codes_full[kCodeStages];
    uint64_t k_codes_empty[kCodeStages];
    uint64_t v_codes_full[kCodeStages];
    uint64_t v_codes_empty[kCodeStages];
    uint64_t rows_clear;
    uint64_t tile_full[kQStages];
    uint64_t tile_empty[kQStages];
    int32_t tile[kQStages][kTileWords];  // a SequenceTile
    Box k_boxes[kBoxes];  // of the KV block that comes next
    Box v_boxes[kBoxes];
};
constexpr int kQBytes = sizeof(SharedStorage::q[0]);
constexpr int kKBytes = sizeof(SharedStorage::k[0]);
constexpr int kVBytes = sizeof(SharedStorage::v[0]);

// Addresses within the SharedStorage of the thread block.
struct SharedAddresses {
    shared_address storage;
    shared_address barriers;  // of the first barrier, kept in a register; the other barriers are at constant offsets from it

    __device__ __forceinline__ SharedAddresses(shared_address begin) : storage(begin), barriers(begin + offsetof(SharedStorage, q_full)) {}

    // Buffers.
    __device__ __forceinline__ shared_address q(int stage) const { return at(offsetof(SharedStorage, q), stage, kQBytes); }
    __device__ __forceinline__ shared_address k(int stage) const { return at(offsetof(SharedStorage, k), stage, kKBytes); }
    __device__ __forceinline__ shared_address v(int stage) const { return at(offsetof(SharedStorage, v), stage, kVBytes); }
    __device__ __forceinline__ shared_address tile(int stage) const { return at(offsetof(SharedStorage, tile), stage, 4 * kTileWords); }
    __device__ __forceinline__ shared_address k_boxes() const { return at(offsetof(SharedStorage, k_boxes), 0, 0); }
    __device__ __forceinline__ shared_address v_boxes() const { return at(offsetof(SharedStorage, v_boxes), 0, 0); }
    __device__ __forceinline__ shared_address k_codes(int stage) const {
        return at(offsetof(SharedStorage, k_codes), stage, sizeof(SharedStorage::k_codes[0]));
    }
    __device__ __forceinline__ shared_address v_codes(int stage) const {
        return at(offsetof(SharedStorage, v_codes), stage, sizeof(SharedStorage::v_codes[0]));
    }

    // Barriers.
    __device__ __forceinline__ shared_address q_full(int stage) const { return barrier(offsetof(SharedStorage, q_full), stage); }
    __device__ __forceinline__ shared_address q_empty(int stage) const { return barrier(offsetof(SharedStorage, q_empty), stage); }
    __device__ __forceinline__ shared_address k_full(int stage) const { return barrier(offsetof(SharedStorage, k_full), stage); }
    __device__ __forceinline__ shared_address k_empty(int stage) const { return barrier(offsetof(SharedStorage, k_empty), stage); }
    __device__ __forceinline__ shared_address v_full(int stage) const { return barrier(offsetof(SharedStorage, v_full), stage); }
    __device__ __forceinline__ shared_address v_empty(int stage) const { return barrier(offsetof(SharedStorage, v_empty), stage); }
    __device__ __forceinline__ shared_address rows_clear() const { return barrier(offsetof(SharedStorage, rows_clear), 0); }
    __device__ __forceinline__ shared_address tile_full(int stage) const { return barrier(offsetof(SharedStorage, tile_full), stage); }
    __device__ __forceinline__ shared_address tile_empty(int stage) const { return barrier(offsetof(SharedStorage, tile_empty), stage); }
    __device__ __forceinline__ shared_address k_codes_full(int stage) const { return barrier(offsetof(SharedStorage, k_codes_full), stage); }
    __device__ __forceinline__ shared_address k_codes_empty(int stage) const { return barrier(offsetof(SharedStorage, k_codes_empty), stage); }
    __device__ __forceinline__ shared_address v_codes_full(int stage) const { return barrier(offsetof(SharedStorage, v_codes_full), stage); }
    __device__ __forceinline__ shared_address v_codes_empty(int stage) const { return barrier(offsetof(SharedStorage, v_codes_empty), stage); }

    __device__ __forceinline__ shared_address at(int offset, int index, int element_bytes) const {
        return storage + offset + index * element_bytes;
    }

    __device__ __forceinline__ shared_address barrier(int offset, int index) const {
        return barriers + (offset - int(offsetof(SharedStorage, q_full)) + 8 * index);
    }
};

__device__ void init_barriers(const SharedAddresses& shared);  // Initialises each barrier with the number of arrivals that complete a phase

struct Params {
    tensor_map q;                         // (head_dim, rows_q, num_heads_q, batch_q)
    tensor_map k;                         // (head_dim, rows_kv, num_heads_kv, batch_kv)
    tensor_map v;                         // (head_dim_v, rows_kv, num_heads_kv, batch_kv)
    const float* k_scale;                 // (batch, num_heads_kv): what a code of 1 in k stands for; null is 1
    const float* v_scale;                 // (batch, num_heads_kv): what a code of 1 in v stands for; null is 1
    element* out;                         // (batch_q, rows_q, num_heads_q, head_dim_v); rows 16-byte aligned
    float* lse;                           // (batch_q, num_heads_q, rows_q); may be null; natural logarithm
    const int32_t* cu_seqlens_q;          // (boundaries,); may be null; null where queries are padded
    const int32_t* kv_lengths;            // (batch,); may be null; null where cu_seqlens_kv has them, or all have seqlen_kv
    const int32_t* pages;                 // (batch, max_pages); entries past the last key are never read
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
    int32_t batch_size;                   // sequences
    int32_t num_heads_kv;
    int32_t group_size;                   // num_heads_q / num_heads_kv
    int32_t rows_q;                       // of an entry of q: all tokens where sequences are packed
    int32_t batch_kv;                     // entries of k: of a paged cache its pages
    int32_t page_size;                    // keys of a page
    uint64_t page_size_divisor;           // of page_size; see divide()
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
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
__device__ int sum_up_to_lane(int value, int lane);  // The sum over the lanes up to this one
__device__ int num_rows(const Params& params);  // Rows of a head of the grid
__device__ int query_of_row(const Params& params, int row);  // The query of a row of a tile
// The offset of row `row` of the tile's head in an array, in elements from the start of the batch entry
__device__ int64_t row_offset(const Params& params, const Tile& tile, int row, int64_t row_stride, int64_t head_stride);
// The tile whose rows begin at `first_row` of a sequence, of a head of the grid; `queries` and `keys` are the rows of the sequence
__device__ SequenceTile tile_at(const Params&, int sequence, const Rows& queries, const Rows& keys, int head, int first_row);
__device__ Params of_sequence(const Params& params, const SequenceTile& found);  // The parameters of a call of one sequence alone
__device__ Tile tile_of(const Params& params, const SequenceTile& found);
// Visits the scores that a lane holds of a KV block
template <typename Visit> __device__ void for_each_score(float (&scores)[kBlockN / 2], Visit visit);

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

// A mask of a row is a word of bits, because one R2P instruction turns seven bits of a byte into predicates, and a comparison sets only one.
// A lane holds two of every eight keys of a row. The word has a bit for each of them; the top bit is the first key.
using key_word = uint32_t;  // a bit for each key of a lane

__device__ constexpr key_word key_bit(int key);  // The bit of a key
// The bits of the lane's keys from `key` on, in the KV block at `first_key`
__device__ key_word bits_from(int key, int first_key, int lane);
// Hides the keys of the KV block at `first_key` that are outside the range of their row; the warp's rows begin at `first_row`
__device__ void apply_mask(const Params& params, float (&scores)[kBlockN / 2], int first_row, int first_key, int lane);
// ====

// A place in a ring of stages. The parity of a stage's barriers changes each time the ring wraps.
template <int kLength>
struct RingPosition {
    int stage = 0;
    int parity = 0;

    __device__ __forceinline__ void advance() {
        stage = stage == kLength - 1 ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

// KV blocks, visited from the last to the first.
struct KvBlocks {
    int first;
    int last;
};

// The KV blocks that rows [first_row, first_row + count) attend to
__device__ KvBlocks find_kv_blocks(const Params& params, int first_row, int count);
__device__ void load_q(const Params& params, const Tile& tile, shared_address destination, shared_address full);  // Loads Q of a tile
// The wgmma descriptor of an operand in shared memory
__device__ uint64_t descriptor(shared_address start, int stride_bytes, int leading_bytes = 16);
// Starts S (64 x kBlockN) = Q . K^T of a warpgroup
__device__ void mma_qk(float (&scores)[kBlockN / 2], shared_address q_smem, shared_address k_smem);

// A score matrix of a warpgroup, 64 x kColumns, rounded and packed in pairs. Packed, an accumulator of wgmma has the layout of its operand A in
// registers.
template <int kColumns>
struct PackedScores {
    uint32_t fragment[kColumns / 16][4];

    __device__ __forceinline__ void set(const float (&scores)[kColumns / 2]) {
#pragma unroll
        for (int step = 0; step < kColumns / 16; ++step) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                fragment[step][e] = pack<element>(scores[8 * step + 2 * e], scores[8 * step + 2 * e + 1]);
            }
        }
    }
};

// Starts O (64 x kHeadDimV) += P . V
__device__ void mma_pv(float (&output)[kHeadDimV / 2], PackedScores<kBlockN>& p, shared_address v_smem);
// Writes zeros over the rows [begin, end) of a block of kRows
template <int kPanelCount, int kRows> __device__ void clear_rows(shared_address block, int begin, int end = kRows);

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

// The scales of K and of V of a tile's head.
struct KvScales {
    float k;
    float v;
};

// The scales of the sequence and the kv head; 1 where a call has none
__device__ KvScales load_scales(const Params& params, const Tile& tile);
// scale_log2 of a tile, whose scores are products of Q and codes of K
__device__ float scale_of_scores(const Params& params, const Tile& tile);
__device__ float scale_of_values(const Params& params, const Tile& tile);  // What O of a tile is multiplied by

struct RowState {  // of a lane's two rows: g and g + 8 of the warp's 16, where g = lane / 4
    float row_max[2] = {kNoRowMax, kNoRowMax};  // log2 domain
    float row_sum[2] = {0.0f, 0.0f};            // this lane's share of the sum of P
    float correction[2];                        // of O, if row_max has moved
};

// Turns S of a KV block into P and adds it to row_sum
__device__ bool softmax_step(float (&scores)[kBlockN / 2], RowState& rows, float scale_log2);
__device__ void rescale(float (&output)[kHeadDimV / 2], const RowState& rows);  // Multiplies O by the factors by which row_max has moved
__device__ bool is_row(const Params& params, int row);  // Whether a row of a tile has a query
// Completes row_sum of the lane's two rows, and writes their LSE
__device__ void finish_rows(const Params& params, const Tile& tile, const RowState& rows, int first_row, int lane, float (&factor)[2]);
// Transposes a 4x4 matrix of words, a row in each of four neighbouring lanes
__device__ uint4 transpose_4x4(const uint32_t (&mine)[4], int lane_of_four);
// Normalises O, rounds it and writes it from registers
__device__ void store_tile(const Params& params, const Tile& tile, const float (&output)[kHeadDimV / 2], const RowState& rows,
    int first_row, int lane);
__device__ void await_empty(shared_address empty, int parity);  // Waits until a buffer may be written to
// Passes a tile on to the producer and the consumers
__device__ void pass_on_tile(const SequenceTile& found, const SharedAddresses& shared, RingPosition<kQStages>& ring, int lane);
// The tile that comes next, as a producer warp reads it
__device__ SequenceTile take_tile(const SharedAddresses& shared, const RingPosition<kQStages>& ring, int lane);
__device__ KvBlocks kv_blocks_of(const Params& params, const SequenceTile& found);  // The KV blocks that the thread block visits of a tile
// Turns a tile of its sequence into the same one of the whole array, as TMA takes it
__device__ void to_whole_array(const Params& params, const SequenceTile& found, Tile& tile);
// Loads Q of a tile when its buffer is empty
__device__ void produce_q(const Params& params, const Tile& tile, const SharedAddresses& shared, const RingPosition<kQStages>& ring);
__device__ int divide(int n, uint64_t divisor);  // n / d for 0 <= n < 2^31

// Where the keys of a lane's box are, for one KV block after another, from the last to the first. Instructions of a producer warp take issue
// slots from the softmax of the consumers, so there is no division for each KV block: the index of the page's entry is counted down.
struct BoxKeys {
    const int32_t* entries;  // of the sequence's page table
    int index;               // of the page's entry
    int entry;               // which may still be under way
    int row;                 // in the page

    // Entries past the end of the sequence are not read. Keys there are of a page that does not exist, so that they become zeros.
    __device__ __forceinline__ BoxKeys(const Params& params, const SequenceTile& found, int last_block, int lane)
        : entries(params.pages + found.sequence * params.pages_batch_stride), entry(params.batch_kv) {
        opaque(entries);  // else its 64-bit product is computed anew for each load
        const int key = max(last_block, 0) * kBlockN + lane * kBoxKeys;
        index = divide(key, params.page_size_divisor);
        row = key - index * params.page_size;
        if (lane < kBoxes && key < found.seqlen_kv) entry = load_global_32(entries + index);
    }

    // Writes a Box to shared memory. An entry out of range is clamped: below 0 to page 0, above to the page that does not exist.
    __device__ __forceinline__ void store(const Params& params, shared_address box) const {
        store_shared_32(box + offsetof(Box, page), max(0, min(entry, params.batch_kv)));
        store_shared_32(box + offsetof(Box, row), row);
    }

    // Goes to the KV block before, `block_pages` whole pages and `block_rows` rows down, and does not wait for its entry. All keys of that
    // block are keys of the sequence; before the first one there is no entry. Where no entry is read, the entry of the last page stays: its rows
    // are cleared, or masked.
    __device__ __forceinline__ void step_down(const Params& params, int block_pages, int block_rows, int lane) {
        index -= block_pages;
        row -= block_rows;
        if (row < 0) {
            row += params.page_size;
            --index;
        }
        if (lane < kBoxes && index >= 0) entry = load_global_32(entries + index);
    }
};

// K or V as a producer warp brings it: where TMA finds the array, the buffers of its stages, the mbarriers of the first one, and the boxes of
// a KV block.
template <int kPanelCount, int kRing = kStages, int kRowBytes = kPanelRowBytes>
struct PagedArray {
    const tensor_map& map;
    shared_address buffers;
    shared_address full, empty;
    shared_address boxes;

    // Loads the KV blocks of a tile as fast as buffers become empty. The first kBoxes lanes find the keys of a box each, and one lane starts all
    // loads: TMA takes its operands from uniform registers, so lanes that start their own would do so one after the other, in a loop. Pages and
    // rows pass to that lane through shared memory. Shuffles need all lanes, so they would come before the branch, and what they bring
    // would take registers, of which few are left to the producer.
    __device__ __forceinline__ void load(const Params& params, const SequenceTile& found, RingPosition<kRing>& ring, int lane) const {
        constexpr int kBytes = kPanelCount * kBlockN * kRowBytes;  // of a buffer
        const Tile tile = tile_of(params, found);
        const KvBlocks blocks = kv_blocks_of(params, found);
        const int block_pages = divide(kBlockN, params.page_size_divisor);
        const int block_rows = kBlockN - block_pages * params.page_size;
        BoxKeys keys(params, found, blocks.last, lane);
#pragma unroll 1  // few registers are left to the producer
        for (int kv_block = blocks.last; kv_block >= blocks.first; --kv_block) {
            if (lane < kBoxes) keys.store(params, boxes + lane * sizeof(Box));
            keys.step_down(params, block_pages, block_rows, lane);  // its entry is under way while boxes are loaded
            await_empty(empty + 8 * ring.stage, ring.parity ^ 1);  // and all lanes have written their boxes
            if (elect_one()) {
                mbarrier_arrive_expect_tx(full + 8 * ring.stage, kBytes);
#pragma unroll
                for (int box = 0; box < kBoxes; ++box) {
                    const int page = load_shared_32(boxes + box * sizeof(Box) + offsetof(Box, page));
                    const int row = load_shared_32(boxes + box * sizeof(Box) + offsetof(Box, row));
#pragma unroll
                    for (int panel = 0; panel < kPanelCount; ++panel) {
                        tma_load_4d(buffers + ring.stage * kBytes + (panel * kBlockN + box * kBoxKeys) * kRowBytes, map,
                                    full + 8 * ring.stage, panel * kPanelColumns, row, tile.kv_head, page);
                    }
                }
            }
            __syncwarp();  // the boxes have been read
            ring.advance();
        }
    }
};

// What a lane converts of a panel: 16 codes in each of its warp's units. A unit is 8 rows, and a warp has every kConverters-th one.
constexpr int kOwnUnits = kBlockN / 8 / kConverters;

__device__ void store_chunk(shared_address chunk, uint32_t a, uint32_t b, uint32_t c, uint32_t d);  // Writes a chunk of eight elements
// Converts 16 codes, each once, to the two chunks of elements at `left` and `right`
template <typename Unpack> __device__ void convert_chunk(const uint4& words, shared_address left, shared_address right, Unpack unpack);

// Where a lane's codes and elements of a KV block are, in the first unit of its warp. Lane 8 c + r has the codes from column 16 c on of row r: eight
// lanes, which read and write together, have eight rows, whose chunks the swizzles bring to different banks.
struct ConverterLane {
    int row;             // of the KV block
    int codes;           // offsets within a buffer of codes,
    int elements;        // and within a buffer of elements, of the left chunk. The right chunk is its neighbour

    __device__ __forceinline__ ConverterLane() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kConverters;
        row = 8 * warp + lane % 8;
        codes = row * kCodeRowBytes + 16 * (lane / 8 ^ row / 2 % 4);
        elements = row * kPanelRowBytes + 16 * (lane / 8 * 2 ^ row % 8);
    }
};

// Converts a warp's part of a KV block of K or V by convert_one(words, i, left, right), where i is the number of the unit in the panel
template <int kPanelCount, typename Convert> __device__ void convert_block(shared_address codes, shared_address block,
    const ConverterLane& of_lane, Convert convert_one);
// Passes a KV block on for a warp, and the buffer of its codes back
__device__ void pass_on_block(shared_address full, shared_address codes_empty);

// The tiles that a thread block of the persistent grid takes, one after the other.
struct TileSequence {
    int index;
    int step;

    __device__ __forceinline__ TileSequence() : index(block_index()), step(2 * (gridDim.x - index) - 1) {}

    // Under a causal mask or a window the tiles of an L2 group become shorter from first to last. Thread blocks go back and forth, so a short tile
    // follows a long one: of G thread blocks, thread block b takes the tiles b, 2 G - 1 - b, 2 G + b, 4 G - 1 - b, ...
    __device__ __forceinline__ void advance() {
        index += step;
        step = 2 * gridDim.x - step;
    }
};

__device__ int rows_of(const Params& params, int sequence);  // Rows of all queries of a sequence, as tiles have them
__device__ int rows_ahead(const Params& params, int rows);  // The rows of a sequence's first tile that are before its first query

// Finds tile after tile, in rising order. The row blocks of sequences are numbered slice by slice, the last slice first: slice s has
// row blocks [s * slice_blocks, (s + 1) * slice_blocks) of each sequence. So the longest sequences come first, and the end of the grid
// is short, while tiles that share keys in L2 stay together. Within a slice the sequences come one after another, the last row block of each
// first, each row block for all heads. The whole warp works: a lane counts the row blocks of one of 32 sequences.
struct TileFinder {
    int slice_blocks;
    int slice;
    int first;       // of the 32 sequences
    int row_blocks;  // of the lane's sequence
    int before;      // row blocks with lower numbers than the row blocks that these sequences have in the slice

    __device__ __forceinline__ TileFinder(const Params& params, int lane) : first(0), before(0) {
        int most = 0;
        for (int sequence = lane; sequence < params.batch_size; sequence += 32) most = max(most, count(params, sequence));
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) most = max(most, __shfl_xor_sync(0xffffffff, most, distance));
        slice_blocks = 4;  // enough tiles that share keys
        slice = max(most - 1, 0) / slice_blocks;
        row_blocks = count(params, lane);
    }

    // The tile of this index. Indices rise from call to call.
    __device__ __forceinline__ SequenceTile find(const Params& params, int index, int lane) {
        const int num_heads = params.num_heads_kv;
        const int number = index / num_heads;
        while (true) {
            const int in_slice = min(max(row_blocks - slice * slice_blocks, 0), slice_blocks);
            const int end = before + sum_up_to_lane(in_slice, lane);
            const uint32_t beyond = __ballot_sync(0xffffffff, number < end);
            if (beyond != 0) {
                const int found = __ffs(beyond) - 1;
                const int later_row_blocks = __shfl_sync(0xffffffff, end, found) - 1 - number;  // of the sequence, in the order of the numbers
                const int row_block = slice * slice_blocks + later_row_blocks;
                const int sequence = first + found;
                const int row = first_row(params, sequence, row_block);
                return tile_at(params, sequence, queries_of(params, sequence), keys_of(params, sequence), index - number * num_heads, row);
            }
            before = __shfl_sync(0xffffffff, end, 31);
            first += 32;
            if (first >= params.batch_size) {
                if (slice == 0) return {-1};
                --slice;
                first = 0;
            }
            if (params.batch_size > 32) row_blocks = count(params, first + lane);
        }
    }

    // Row blocks of a sequence.
    __device__ static __forceinline__ int count(const Params& params, int sequence) {
        return sequence < params.batch_size ? (rows_of(params, sequence) + kBlockM - 1) / kBlockM : 0;
    }

    // Where rows_ahead() is not 0, the first tile is not whole, as its rows attend to the fewest keys. The last tile ends with the last 64 rows
    // that have a query.
    __device__ static __forceinline__ int first_row(const Params& params, int sequence, int row_block) {
        return row_block * kBlockM - rows_ahead(params, rows_of(params, sequence));
    }
};

// Two producer warps: one brings Q and K of each tile, the other V, since boxes of 16 keys make many TMA loads.
__device__ __forceinline__ void produce(const Params& params, const SharedAddresses& shared) {
    const int lane = threadIdx.x % 32;
    const PagedArray<kPanels, kCodeStages, kCodeRowBytes> k = {params.k, shared.k_codes(0), shared.k_codes_full(0), shared.k_codes_empty(0),
                                                               shared.k_boxes()};
    // All buffers are empty at first. A wait for parity 1 of a new mbarrier returns at once.
    RingPosition<kCodeStages> ring;
    RingPosition<kQStages> q_ring;
    while (true) {
        const SequenceTile found = take_tile(shared, q_ring, lane);
        if (found.sequence < 0) return;
        Tile tile = tile_of(params, found);
        to_whole_array(params, found, tile);
        produce_q(params, tile, shared, q_ring);
        q_ring.advance();
        k.load(params, found, ring, lane);
    }
}

__device__ __forceinline__ void produce_v(const Params& params, const SharedAddresses& shared) {
    const int lane = threadIdx.x % 32;
    const PagedArray<kPanelsV, kCodeStages, kCodeRowBytes> v = {params.v, shared.v_codes(0), shared.v_codes_full(0), shared.v_codes_empty(0),
                                                                shared.v_boxes()};
    RingPosition<kCodeStages> ring;
    RingPosition<kQStages> tile_ring;
    while (true) {
        const SequenceTile found = take_tile(shared, tile_ring, lane);
        if (found.sequence < 0) return;
        tile_ring.advance();
        v.load(params, found, ring, lane);
    }
}

// The warps that convert: K and V of each KV block, as codes come and as buffers of elements become empty.
__device__ __forceinline__ void convert_codes(const Params& params, const SharedAddresses& shared) {
    const int lane = threadIdx.x % 32;
    const ConverterLane of_lane;
    auto convert_one = [](const uint4& words, int, shared_address left, shared_address right) {
        convert_chunk(words, left, right, [](uint32_t codes) { return unpack_e4m3<element>(codes); });
    };
    // All buffers are empty at first. A wait for parity 1 of a new mbarrier returns at once.
    RingPosition<kStages> ring;
    RingPosition<kCodeStages> code_ring;
    RingPosition<kQStages> tile_ring;
    while (true) {
        const SequenceTile found = take_tile(shared, tile_ring, lane);
        if (found.sequence < 0) return;
        tile_ring.advance();
        const KvBlocks blocks = kv_blocks_of(params, found);
        auto block_before = [&](int kv_block) { return kv_block - 1; };
        int kv_block = block_before(blocks.last + 1);
#pragma unroll 1
        while (kv_block >= blocks.first) {
            kv_block = block_before(kv_block);
            // 1. K: wait for its codes and for a buffer, convert, pass on.
            mbarrier_wait(shared.k_codes_full(code_ring.stage), code_ring.parity);
            await_empty(shared.k_empty(ring.stage), ring.parity ^ 1);
            convert_block<kPanels>(shared.k_codes(code_ring.stage), shared.k(ring.stage), of_lane, convert_one);
            pass_on_block(shared.k_full(ring.stage), shared.k_codes_empty(code_ring.stage));
            // 2. V: the same.
            mbarrier_wait(shared.v_codes_full(code_ring.stage), code_ring.parity);
            await_empty(shared.v_empty(ring.stage), ring.parity ^ 1);
            convert_block<kPanelsV>(shared.v_codes(code_ring.stage), shared.v(ring.stage), of_lane, convert_one);
            pass_on_block(shared.v_full(ring.stage), shared.v_codes_empty(code_ring.stage));
            ring.advance();
            code_ring.advance();
        }
    }
}

// The warp that finds the thread block's tiles, before the producer and the consumers need them.
__device__ __forceinline__ void find_tiles(const Params& params, const SharedAddresses& shared) {
    const int lane = threadIdx.x % 32;
    RingPosition<kQStages> ring;
    TileFinder finder(params, lane);
    bool more = true;
    for (TileSequence tiles; more; tiles.advance()) {
        const SequenceTile found = finder.find(params, tiles.index, lane);
        more = found.sequence >= 0;
        pass_on_tile(found, shared, ring, lane);
    }
}

// A consumer warpgroup: 64 rows of each tile. `all` are the parameters of the call, params of the sequence of a tile.
__device__ __forceinline__ void consume(const Params& all, const SharedAddresses& shared, int consumer) {
    const int lane = threadIdx.x % 32;
    const int warp_row = 64 * consumer + threadIdx.x % 128 / 32 * 16;  // the warp's first row in the tile
    RingPosition<kQStages> q_ring;
    RingPosition<kStages> k_ring, v_ring;
    auto release = [&](shared_address empty) {
        if (lane == 0) mbarrier_arrive(empty);
    };

    // Consumers take turns at issuing MMAs, so that the MMAs of one run while the others do their softmax.
    auto begin_turn = [&] { barrier_sync(kTurnBarrier + consumer, 256); };
    auto end_turn = [&] { barrier_arrive(kTurnBarrier + (consumer + 1) % kConsumers, 256); };
    if (consumer == kConsumers - 1) end_turn();  // consumer 0 has the first turn

    // Skips a KV block that this warpgroup's rows do not attend to. It still releases K and V, because the barriers count every warp. It waits for
    // full first. Otherwise its arrival could count for the previous phase of empty, if another warp has not yet arrived for that phase.
    auto skip_block = [&] {
        mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
        // The next consumer waits for this turn. After its barrier all lanes have seen full.
        begin_turn();
        end_turn();
        release(shared.k_empty(k_ring.stage));
        k_ring.advance();
        mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
        // All lanes must see this phase before lane 0 arrives on empty. A lane that still polls two phases later would wait forever.
        __syncwarp();
        release(shared.v_empty(v_ring.stage));
        v_ring.advance();
    };

    int clear_parity = 0;
    while (true) {
        mbarrier_wait(shared.tile_full(q_ring.stage), q_ring.parity);
        SequenceTile found;
        found.load(shared.tile(q_ring.stage));
        __syncwarp();  // all lanes have read it
        release(shared.tile_empty(q_ring.stage));
        if (found.sequence < 0) break;
        const Params params = of_sequence(all, found);
        const Tile tile = tile_of(params, found);
        // V of the block in which the sequence ends is cleared past that end, by all consumers, also a consumer that skips the block. Each waits
        // for the others, so no consumer can be a phase ahead.
        auto has_tail = [&](int kv_block) { return (kv_block + 1) * kBlockN > params.seqlen_kv; };
        auto clear_tail = [&](int kv_block) {
            if (!has_tail(kv_block)) return;
            mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
            clear_rows<kPanelsV, kBlockN>(shared.v(v_ring.stage), params.seqlen_kv - kv_block * kBlockN);
            __syncwarp();
            release(shared.rows_clear());
        };
        auto await_clear_tail = [&](int kv_block) {
            if (!has_tail(kv_block)) return;
            mbarrier_wait(shared.rows_clear(), clear_parity);
            clear_parity ^= 1;
        };
        const KvBlocks blocks = find_kv_blocks(params, tile.first_row, kBlockM);
        int kv_block = blocks.last;
        // The KV blocks that this warpgroup's 64 rows attend to. The first tile of a head may begin before query 0, by a multiple of 64 rows. So either
        // all 64 rows are before query 0, and attend to no KV block, or no row is before it.
        const int warpgroup_row = tile.first_row + 64 * consumer;
        const bool has_rows = warpgroup_row >= 0 && warpgroup_row < num_rows(params);  // the rows may also be past the last
        const KvBlocks visible_blocks = has_rows ? find_kv_blocks(params, warpgroup_row, 64) : KvBlocks{0, -1};
        const bool visible = visible_blocks.last >= visible_blocks.first;
        const int first_block = visible_blocks.first;
        // Skips KV blocks past the last key that these rows attend to; all KV blocks if they attend to none.
#pragma unroll 1
        for (; kv_block > max(visible_blocks.last, blocks.first - 1); --kv_block) {
            clear_tail(kv_block);
            skip_block();
            await_clear_tail(kv_block);
        }
        const int first_row = tile.first_row + warp_row;
        const shared_address q_smem = shared.q(q_ring.stage) + consumer * 64 * kPanelRowBytes;
        mbarrier_wait(shared.q_full(q_ring.stage), q_ring.parity);
        // All lanes must see this phase before lane 0 arrives on empty. A lane that still polls two phases later would wait forever.
        __syncwarp();
        float output[kHeadDimV / 2] = {};
        RowState rows;
        const float tile_scale = scale_of_scores(params, tile);
        // Rows outside the sequence may be queries of another one. With row_max infinite they never make the warp raise it; otherwise
        // this sequence's result would depend on the other in its last bits.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (!is_row(params, first_row + 8 * half + lane / 4)) rows.row_max[half] = INFINITY;
        }

        if (!visible) release(shared.q_empty(q_ring.stage));  // Q is loaded for every tile, even one without a visible block
        // The keys that all 16 rows of the warp see: KV blocks within them need no mask. All rows of a warp may be past the last one, so clamp first_row.
        const KeyRange seen_by_all = keys_of_every(params, min(first_row, num_rows(params) - 1), 16);
        // Finishes the scores of a KV block: once for each KV block, between Q K^T and softmax.
        auto finish_scores = [&](float (&scores)[kBlockN / 2], int kv_block) {
            const bool whole = (kv_block + 1) * kBlockN <= seen_by_all.end;
            if (!whole) apply_mask(params, scores, first_row, kv_block * kBlockN, lane);
        };

        if (visible) {
            float scores[kBlockN / 2];
            mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
            begin_turn();
            mma_qk(scores, q_smem, shared.k(k_ring.stage));
            end_turn();
            clear_tail(kv_block);
            // The first block, whose Q K^T is issued: wait for S, release K. Softmax turns S into P.
            wgmma_wait<0>();
            pin_registers(scores);
            release(shared.k_empty(k_ring.stage));
            k_ring.advance();
            finish_scores(scores, kv_block);
            softmax_step(scores, rows, tile_scale);
            PackedScores<kBlockN> p;
            p.set(scores);
            await_clear_tail(kv_block);
            for (--kv_block; kv_block >= first_block; --kv_block) {
                // 1. S = Q K^T of this block: wait for K, issue.
                mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
                begin_turn();
                mma_qk(scores, q_smem, shared.k(k_ring.stage));
                // 2. P V of the previous block: wait for V, issue.
                mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
                mma_pv(output, p, shared.v(v_ring.stage));
                end_turn();
                // 3. Wait for S, with P V in flight. Release K.
                wgmma_wait<1>();
                pin_registers(scores);
                release(shared.k_empty(k_ring.stage));
                k_ring.advance();
                // 4. Softmax on S while P V runs.
                finish_scores(scores, kv_block);
                const bool moved = softmax_step(scores, rows, tile_scale);
                // 5. Wait for P V. Release V.
                wgmma_wait<0>();
                pin_registers(output);
                release(shared.v_empty(v_ring.stage));
                v_ring.advance();
                // 6. Pack P for the next P V, and update O.
                // The packing comes before the branch, in one basic block with the exponentials. Neither is volatile, so ptxas moves most exponentials below
                // the wait and interleaves them with the packing.
                p.set(scores);
                // Rescale O where row_max has moved.
                if (moved) rescale(output, rows);
            }
            release(shared.q_empty(q_ring.stage));
            // P V of the last block: wait for V, issue outside of a turn, wait, release V.
            mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
            mma_pv(output, p, shared.v(v_ring.stage));
            wgmma_wait<0>();
            pin_registers(output);
            release(shared.v_empty(v_ring.stage));
            v_ring.advance();
        }
        store_tile(params, tile, output, rows, first_row, lane);
        q_ring.advance();
    }
    // The warpgroup may exit: O leaves from registers, and all its MMAs and loads have been awaited.
    if (consumer == 0) begin_turn();  // takes the last turn: no arrival may be pending on a named barrier at the exit
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
flash_fwd_varlen_hdim128_bf16_causal_paged_e4m3_packgqa_sm90(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const SharedAddresses shared((to_shared(shared_memory) + 1023) / 1024 * 1024);
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        prefetch_tensormap(params.q);
        prefetch_tensormap(params.k);
        prefetch_tensormap(params.v);
        init_barriers(shared);
        fence_mbarrier_init();
    }
    __syncthreads();

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    if (warpgroup == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x / 32 == 0) {
            produce(params, shared);
        } else if (threadIdx.x / 32 == 1) {
            find_tiles(params, shared);
        } else if (threadIdx.x / 32 == 2) {
            produce_v(params, shared);
        }
    } else if (warpgroup > kConsumers) {
        setmaxnreg_dec<kConverterRegisters>();
        convert_codes(params, shared);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(params, shared, warpgroup - 1);
    }
}

// Initialises each barrier with the number of arrivals that complete a phase. One thread calls it, before other threads use the barriers.
__device__ __forceinline__ void init_barriers(const SharedAddresses& shared) {
    for (int stage = 0; stage < kQStages; ++stage) {
        mbarrier_init(shared.q_full(stage), 1);
        mbarrier_init(shared.q_empty(stage), 4 * kConsumers);
    }
    for (int stage = 0; stage < kStages; ++stage) {
        mbarrier_init(shared.k_full(stage), kConverters);
        mbarrier_init(shared.v_full(stage), kConverters);
        mbarrier_init(shared.k_empty(stage), 4 * kConsumers);
        mbarrier_init(shared.v_empty(stage), 4 * kConsumers);
    }
    for (int stage = 0; stage < kCodeStages; ++stage) {
        mbarrier_init(shared.k_codes_full(stage), 1);
        mbarrier_init(shared.v_codes_full(stage), 1);
        mbarrier_init(shared.k_codes_empty(stage), kConverters);
        mbarrier_init(shared.v_codes_empty(stage), kConverters);
    }
    mbarrier_init(shared.rows_clear(), 4 * kConsumers);
    for (int stage = 0; stage < kQStages; ++stage) {
        mbarrier_init(shared.tile_full(stage), 1);
        mbarrier_init(shared.tile_empty(stage), 4 * kConsumers + kConverters + kProducers);
    }
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

__device__ __forceinline__ int sum_up_to_lane(int value, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(0xffffffff, value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}

__device__ __forceinline__ int num_rows(const Params& params) { return params.seqlen_q * params.group_size; }

__device__ __forceinline__ int query_of_row(const Params& params, int row) {
    return row / params.group_size;
}

__device__ __forceinline__ int64_t row_offset(const Params& params, const Tile& tile, int row, int64_t row_stride,
                                              int64_t head_stride) {
    const int query = query_of_row(params, row);
    const int head = tile.head + row - query * params.group_size;
    return query * row_stride + head * head_stride;
}

__device__ __forceinline__ SequenceTile tile_at(const Params&, int sequence, const Rows& queries, const Rows& keys, int head, int first_row) {
    SequenceTile tile = {sequence, head, first_row, queries.begin, queries.count, keys.count};
    return tile;
}

// The parameters of a call of one sequence alone: its lengths, and pointers to its first rows.
__device__ __forceinline__ Params of_sequence(const Params& params, const SequenceTile& found) {
    Params sequence_params = with_lengths(params, found.seqlen_q, found.seqlen_kv);
    sequence_params.out += found.sequence * params.out_batch_stride + found.first_query * params.out_row_stride;
    if (params.lse != nullptr) sequence_params.lse += found.sequence * params.lse_batch_stride + found.first_query;
    sequence_params.out_batch_stride = 0;  // the pointer is for the sequence
    return sequence_params;
}

__device__ __forceinline__ Tile tile_of(const Params& params, const SequenceTile& found) {
    Tile tile;
    tile.batch = found.sequence;
    const int head = found.head;
    tile.kv_head = head;
    tile.head = head * params.group_size;
    tile.first_row = found.first_row;
    return tile;
}

// Visits the scores that a lane holds of a KV block: visit(row, key, score). `row` is 0 or 8, counted from the warp's first row + lane / 4. `key`
// is 8 j or 8 j + 1, counted from the block's first key + lane % 4 * 2. Both are constants after unrolling.
template <typename Visit>
__device__ __forceinline__ void for_each_score(float (&scores)[kBlockN / 2], Visit visit) {
#pragma unroll
    for (int row = 0; row <= 8; row += 8) {
#pragma unroll
        for (int key = 0; key < kBlockN; key += 8) {
            visit(row, key, scores[key / 2 + row / 4]);
            visit(row, key + 1, scores[key / 2 + row / 4 + 1]);
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

__device__ constexpr key_word key_bit(int key) {
    constexpr int kTopBit = 8 * sizeof(key_word) - 1;
    return key_word(1) << kTopBit - key / 8 * 2 - key % 8;
}

__device__ __forceinline__ key_word bits_from(int key, int first_key, int lane) {
    // Count the lane's keys before `key`. A lane has two of every eight keys: one term counts the first of each two, the other the second.
    // Adding 6 makes both terms round up.
    const int distance = max(key - first_key - lane % 4 * 2 + 6, 0);
    const int before = (distance + 1) / 8 + distance / 8;
    return __funnelshift_rc(0xffffffff, 0, before);  // unlike >>, it is defined for a shift of 32 or more
}

__device__ __forceinline__ void apply_mask(const Params& params, float (&scores)[kBlockN / 2], int first_row, int first_key,
                                           int lane) {
    key_word hidden[2];  // of the lane's two rows
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const KeyRange keys = keys_of_query(params, query_of_row(params, first_row + lane / 4 + 8 * i));
        hidden[i] = bits_from(keys.end, first_key, lane);
    }
    for_each_score(scores, [&](int row, int key, float& score) {
        if (hidden[row / 8] & key_bit(key)) score = -INFINITY;
    });
}
// ====

__device__ __forceinline__ KvBlocks find_kv_blocks(const Params& params, int first_row, int count) {
    const int skipped = max(-first_row, 0);
    const KeyRange keys = keys_of_some(params, first_row + skipped, count - skipped);
    return {keys.begin / kBlockN, (keys.end + kBlockN - 1) / kBlockN - 1};
}

__device__ __forceinline__ void load_q(const Params& params, const Tile& tile, shared_address destination, shared_address full) {
    mbarrier_arrive_expect_tx(full, kQBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
        // A box of kBlockM / group_size queries by group_size heads.
        tma_load_5d(destination + panel * kBlockM * kPanelRowBytes, params.q, full, panel * kPanelColumns, 0,
                    tile.first_row / params.group_size, tile.kv_head, tile.batch);
    }
}

// The wgmmas of this kernel. They compute d = a . b of a warpgroup, or d += a . b if `accumulate`: a is 64 x 16, b 16 x N, and the accumulator d
// 64 x N in fp32. Thread (g, t) = (lane / 4, lane % 4) of warp w holds d[4 j + e]: row 16 w + g + 8 (e / 2), column 8 j + 2 t + e % 2.
#ifndef FLASHGEN_SIMULATOR  // the simulator emulates them in C++

// wgmma.mma_async.m64n128k16: a and b in shared memory under descriptors, both with the K dimension contiguous.
__device__ __forceinline__ void wgmma_m64n128k16_bf16_ss(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(accumulate));
}

// wgmma.mma_async.m64n128k16. A from registers: a[0] = (row g, columns 2 t, 2 t + 1), a[1] = (row g + 8, same columns), a[2], a[3] =
// columns 8 further: the accumulator layout, packed. b is MN-major.
__device__ __forceinline__ void wgmma_m64n128k16_bf16_rs(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {"
        "%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

#endif

// The wgmma descriptor of an operand in shared memory: its address, the stride byte offset (SBO) and the leading byte offset (LBO) between its swizzle
// atoms of eight rows, and the kind of swizzle. LBO is read only for MN-major operands of several panels.
__device__ __forceinline__ uint64_t descriptor(shared_address start, int stride_bytes, int leading_bytes) {
    constexpr uint64_t kSwizzle = 1;  // of 128 bytes
    return uint64_t(start >> 4 & 0x3fff) | uint64_t(leading_bytes >> 4) << 16 | uint64_t(stride_bytes >> 4) << 32 |
           kSwizzle << 62;
}

// Starts S (64 x kBlockN) = Q . K^T of a warpgroup. Both operands are K-major: SBO leads to the next eight rows. A step of 16 along
// the K dimension is 32 bytes within the swizzled row.
__device__ __forceinline__ void mma_qk(float (&scores)[kBlockN / 2], shared_address q_smem, shared_address k_smem) {
    const uint64_t q = descriptor(q_smem, 8 * kPanelRowBytes);
    const uint64_t k = descriptor(k_smem, 8 * kPanelRowBytes);
    pin_registers(scores);
    wgmma_fence();
#pragma unroll
    for (int column = 0; column < kHeadDim; column += 16) {
        const int panel = column / kPanelColumns, byte = column % kPanelColumns * sizeof(element);
        wgmma_m64n128k16_bf16_ss(scores, q + ((panel * kBlockM * kPanelRowBytes + byte) >> 4),
                                 k + ((panel * kBlockN * kPanelRowBytes + byte) >> 4), column > 0);
    }
    wgmma_commit();
}

// Starts O (64 x kHeadDimV) += P . V. V is MN-major: SBO leads to the next eight keys, LBO to the next panel of columns.
__device__ __forceinline__ void mma_pv(float (&output)[kHeadDimV / 2], PackedScores<kBlockN>& p, shared_address v_smem) {
    const uint64_t v = descriptor(v_smem, 8 * kPanelRowBytes, kBlockN * kPanelRowBytes);
    pin_registers(output);
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) pin_registers(p.fragment[step]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
        wgmma_m64n128k16_bf16_rs(output, p.fragment[step], v + (16 * step * kPanelRowBytes >> 4), 1);
    }
    wgmma_commit();
}

// Writes zeros over the rows [begin, end) of a block of kRows: what lies there may be NaN, and 0 * NaN is NaN. All consumers share the work.
template <int kPanelCount, int kRows>
__device__ __forceinline__ void clear_rows(shared_address block, int begin, int end) {
#pragma unroll
    for (int panel = 0; panel < kPanelCount; ++panel) {
        const shared_address rows = block + panel * kRows * kPanelRowBytes;
#pragma unroll 1
        for (int byte = begin * kPanelRowBytes + 16 * (threadIdx.x - 128); byte < end * kPanelRowBytes; byte += 16 * 128 * kConsumers) {
            store_shared_128(rows + byte, 0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    fence_proxy_async();  // wgmma would not see the zeros otherwise
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

// scale_log2 of a tile, whose scores are products of Q and codes of K. A factor of 0 would turn the -inf of a hidden score into NaN.
__device__ __forceinline__ float scale_of_scores(const Params& params, const Tile& tile) {
    return fminf(fmaxf(params.scale_log2 * load_scales(params, tile).k, 0x1p-126f), 0x1.fffffep127f);
}

__device__ __forceinline__ float scale_of_values(const Params& params, const Tile& tile) { return load_scales(params, tile).v; }

// Turns S of a KV block into P and adds it to row_sum. Returns whether a row_max of the warp has moved, so that O must be rescaled
// before anything is added to it. The block's maximum is rounded up and the limit down, so that P stays within its limit for scores of
// any size. The launcher makes sure that scale_log2 > 0.
__device__ __forceinline__ bool softmax_step(float (&scores)[kBlockN / 2], RowState& rows, float scale_log2) {
    float block_max[2];
    bool moves = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float value = fmaxf(scores[2 * half], scores[2 * half + 1]);
#pragma unroll
        for (int j = 1; j < kBlockN / 8; ++j) {
            value = fmaxf(value, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
        }
        block_max[half] = __fmul_ru(value, scale_log2);
        moves |= block_max[half] > __fadd_rd(rows.row_max[half], kSlack);
    }
    moves = __any_sync(0xffffffff, moves);
    if (moves) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float previous = rows.row_max[half];
            rows.row_max[half] = fmaxf(previous, quad_max(block_max[half]));
            rows.correction[half] = rescale_factor(previous, rows.row_max[half]);
            rows.row_sum[half] *= rows.correction[half];
        }
    }
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            scores[4 * j + e] = exp2_approx(fmaf(scores[4 * j + e], scale_log2, -rows.row_max[e / 2]));
            rows.row_sum[e / 2] += scores[4 * j + e];
        }
    }
    return moves;
}

__device__ __forceinline__ void rescale(float (&output)[kHeadDimV / 2], const RowState& rows) {
#pragma unroll
    for (int n = 0; n < kHeadDimV / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) output[4 * n + e] *= rows.correction[e / 2];
    }
}

__device__ __forceinline__ bool is_row(const Params& params, int row) {
    return row >= 0 && row < num_rows(params);
}

// Completes row_sum of the lane's two rows, and writes their LSE. Sets `factor` to 1 / row_sum; the caller multiplies O by it.
__device__ __forceinline__ void finish_rows(const Params& params, const Tile& tile, const RowState& rows, int first_row, int lane,
                                            float (&factor)[2]) {
    const float value_scale = scale_of_values(params, tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half + lane / 4;
        const float row_sum = quad_sum(rows.row_sum[half]);
        const RowEnd end = row_end(rows.row_max[half], row_sum);
        factor[half] = end.factor();
        factor[half] *= value_scale;
        if (params.lse != nullptr && lane % 4 == 0 && is_row(params, row)) {
            store_global_32(params.lse + row_offset(params, tile, row, 1, params.lse_head_stride),
                            end.lse());
        }
    }
}

// Transposes a 4x4 matrix of words, a row in each of four neighbouring lanes: word j of lane i becomes word i of lane j.
__device__ __forceinline__ uint4 transpose_4x4(const uint32_t (&mine)[4], int lane_of_four) {
    // Distance 1, then distance 2: each lane keeps one of a pair of words and swaps the other.
    const bool odd = lane_of_four & 1;
    const bool upper = lane_of_four & 2;
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t received = __shfl_xor_sync(0xffffffff, odd ? mine[i] : mine[i + 1], 1);
        pairs[i] = odd ? received : mine[i];
        pairs[i + 1] = odd ? mine[i + 1] : received;
    }
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t received = __shfl_xor_sync(0xffffffff, upper ? pairs[i] : pairs[i + 2], 2);
        words[i] = upper ? received : pairs[i];
        words[i + 2] = upper ? pairs[i + 2] : received;
    }
    return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ void store_tile(const Params& params, const Tile& tile, const float (&output)[kHeadDimV / 2],
                                           const RowState& rows, int first_row, int lane) {
    float factor[2];
    finish_rows(params, tile, rows, first_row, lane, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half + lane / 4;
        element* out_row = params.out + tile.batch * params.out_batch_stride +
                           row_offset(params, tile, row, params.out_row_stride, params.out_head_stride);
        opaque(out_row);  // else it is computed anew for each store
        // A lane has two neighbouring columns of every eight. Four lanes transpose, so that each gets eight of 32.
#pragma unroll
        for (int n = 0; n < kHeadDimV / 8; n += 4) {
            uint32_t mine[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int first = 4 * (n + i) + 2 * half;  // past the last column where kHeadDimV is no multiple of 32
                mine[i] = first < kHeadDimV / 2 ? pack<element>(output[first] * factor[half], output[first + 1] * factor[half]) : 0;
            }
            const uint4 chunk = transpose_4x4(mine, lane % 4);
            const int column = 8 * (n + lane % 4);
            if (is_row(params, row) && column < params.head_dim_v) store_global_128(out_row + column, chunk);
        }
    }
}

// Waits until a buffer may be written to. The whole warp waits: if one lane polled alone, the scheduler would alternate between it and the
// others, which are at the next __syncwarp. Nothing is written before all lanes have seen the phase end: a later refill could flip the parity
// twice, and a lane still polling would wait forever.
__device__ __forceinline__ void await_empty(shared_address empty, int parity) {
    mbarrier_wait(empty, parity);
    __syncwarp();
}

// Passes a tile on to the producer and the consumers. The whole warp works.
__device__ __forceinline__ void pass_on_tile(const SequenceTile& found, const SharedAddresses& shared,
                                             RingPosition<kQStages>& ring, int lane) {
    await_empty(shared.tile_empty(ring.stage), ring.parity ^ 1);
    if (lane == 0) {
        found.store(shared.tile(ring.stage));
        mbarrier_arrive(shared.tile_full(ring.stage));
    }
    __syncwarp();
    ring.advance();
}

// The tile that comes next, as a producer warp reads it. The whole warp works.
__device__ __forceinline__ SequenceTile take_tile(const SharedAddresses& shared, const RingPosition<kQStages>& ring, int lane) {
    mbarrier_wait(shared.tile_full(ring.stage), ring.parity);
    SequenceTile found;
    found.load(shared.tile(ring.stage));
    __syncwarp();  // all lanes have read it
    if (lane == 0) mbarrier_arrive(shared.tile_empty(ring.stage));
    return found;
}

__device__ __forceinline__ KvBlocks kv_blocks_of(const Params& params, const SequenceTile& found) {
    return find_kv_blocks(with_lengths(params, found.seqlen_q, found.seqlen_kv), found.first_row, kBlockM);
}

// Turns a tile of its sequence into the same one of the whole array, as TMA takes it: packed sequences are rows of a single entry.
__device__ __forceinline__ void to_whole_array(const Params& params, const SequenceTile& found, Tile& tile) {
    tile.first_row += found.first_query * params.group_size;
    if (params.cu_seqlens_q != nullptr) tile.batch = 0;
}

// Loads Q of a tile when its buffer is empty. The whole warp works.
__device__ __forceinline__ void produce_q(const Params& params, const Tile& tile, const SharedAddresses& shared,
                                          const RingPosition<kQStages>& ring) {
    await_empty(shared.q_empty(ring.stage), ring.parity ^ 1);
    if (elect_one()) load_q(params, tile, shared.q(ring.stage), shared.q_full(ring.stage));
}

// n / d for 0 <= n < 2^31. The launcher computes `divisor` from d: a multiplier in the lower half, and in the upper half the shift that follows.
// Dividing by a number that the compiler does not know takes about 20 dependent instructions.
__device__ __forceinline__ int divide(int n, uint64_t divisor) {
    return uint64_t(uint32_t(n)) * uint32_t(divisor) >> (divisor >> 32);
}

__device__ __forceinline__ void store_chunk(shared_address chunk, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    store_shared_128(chunk, __uint_as_float(a), __uint_as_float(b), __uint_as_float(c), __uint_as_float(d));
}

// Converts 16 codes, each once, to the two chunks of elements at `left` and `right`. unpack(codes) converts the two codes in the lower half of a word.
template <typename Unpack>
__device__ __forceinline__ void convert_chunk(const uint4& words, shared_address left, shared_address right, Unpack unpack) {
    store_chunk(left, unpack(words.x), unpack(words.x >> 16), unpack(words.y), unpack(words.y >> 16));
    store_chunk(right, unpack(words.z), unpack(words.z >> 16), unpack(words.w), unpack(words.w >> 16));
}

// Converts a warp's part of a KV block of K or V by convert_one(words, i, left, right), where i is the number of the unit in the panel. The codes of
// the next panel are loaded before this one's are converted.
template <int kPanelCount, typename Convert>
__device__ __forceinline__ void convert_block(shared_address codes, shared_address block, const ConverterLane& of_lane, Convert convert_one) {
    constexpr int kStep = 8 * kConverters;  // rows from unit to unit
    const shared_address source = codes + of_lane.codes;
    const shared_address left = block + of_lane.elements;
    const shared_address right = left ^ 16;
    uint4 words[2][kOwnUnits];
    auto load = [&](int panel) {
#pragma unroll
        for (int i = 0; i < kOwnUnits; ++i) {
            words[panel % 2][i] = load_shared_128(source + (panel * kBlockN + i * kStep) * kCodeRowBytes);
        }
    };
    load(0);
#pragma unroll
    for (int panel = 0; panel < kPanelCount; ++panel) {
        if (panel + 1 < kPanelCount) load(panel + 1);
#pragma unroll
        for (int i = 0; i < kOwnUnits; ++i) {
            const int offset = (panel * kBlockN + i * kStep) * kPanelRowBytes;
            convert_one(words[panel % 2][i], i, left + offset, right + offset);
        }
    }
}

// Passes a KV block on for a warp, and the buffer of its codes back. wgmma would not see the elements without the fence.
__device__ __forceinline__ void pass_on_block(shared_address full, shared_address codes_empty) {
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(full);
        mbarrier_arrive(codes_empty);
    }
}

__device__ __forceinline__ int rows_of(const Params& params, int sequence) {
    return queries_of(params, sequence).count * params.group_size;
}

// The rows of a sequence's first tile that are before its first query. The last tile ends with the last 64 rows that have a query, counted
// from the first row in steps of 64.
__device__ __forceinline__ int rows_ahead(const Params& params, int rows) {
    if (64 % params.group_size != 0) return 0;  // 64 rows would split a query
    return (rows + kBlockM - 1) / kBlockM * kBlockM - (rows + 63) / 64 * 64;
}

static_assert(kProducerRegisters <= kConsumerRegisters, "the producer gives registers to the consumers");
static_assert(kProducerRegisters + kConverterRegisters + kConsumers * kConsumerRegisters <= (2 + kConsumers) * kLaunchRegisters,
              "consumers would wait for ever");
static_assert(sizeof(SharedStorage) + 1024 == 230760, "launcher and kernel agree on shared memory");
static_assert(kBlockM % 64 == 0 && kBlockN % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "whole wgmmas");
static_assert(kBlockN * kPanelRowBytes % 1024 == 0, "stages begin where the swizzle does");
static_assert(sizeof(Params) == 576 && offsetof(Params, q) == 0 && offsetof(Params, k) == 128 && offsetof(Params, v) == 256);
static_assert(offsetof(Params, k_scale) == 384 && offsetof(Params, v_scale) == 392 && offsetof(Params, out) == 400);
static_assert(offsetof(Params, lse) == 408 && offsetof(Params, cu_seqlens_q) == 416 && offsetof(Params, kv_lengths) == 424);
static_assert(offsetof(Params, pages) == 432 && offsetof(Params, k_scale_batch_stride) == 440);
static_assert(offsetof(Params, k_scale_head_stride) == 448 && offsetof(Params, v_scale_batch_stride) == 456);
static_assert(offsetof(Params, v_scale_head_stride) == 464 && offsetof(Params, out_batch_stride) == 472);
static_assert(offsetof(Params, out_row_stride) == 480 && offsetof(Params, out_head_stride) == 488);
static_assert(offsetof(Params, lse_batch_stride) == 496 && offsetof(Params, lse_head_stride) == 504);
static_assert(offsetof(Params, pages_batch_stride) == 512 && offsetof(Params, batch_size) == 520);
static_assert(offsetof(Params, num_heads_kv) == 524 && offsetof(Params, group_size) == 528 && offsetof(Params, rows_q) == 532);
static_assert(offsetof(Params, batch_kv) == 536 && offsetof(Params, page_size) == 540);
static_assert(offsetof(Params, page_size_divisor) == 544 && offsetof(Params, seqlen_q) == 552);
static_assert(offsetof(Params, seqlen_kv) == 556 && offsetof(Params, head_dim_v) == 560);
static_assert(offsetof(Params, diagonal_offset) == 564 && offsetof(Params, scale_log2) == 568);
static_assert(kBlockN % kBoxKeys == 0 && kBoxes <= 32, "a lane finds the keys of a box");
static_assert(kPanelColumns == 64 && kBlockN % (8 * kConverters) == 0, "a warp has units of its own of each panel");
