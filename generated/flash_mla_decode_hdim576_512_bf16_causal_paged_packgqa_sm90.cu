// flash_mla_decode_hdim576_512_bf16_causal_paged_packgqa_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 576, head_dim_v 512, dtype bf16, mask_type causal, pages paged, splits none, kv_dtype none, q_rope
//           none, gqa packed
// tile      block_m 64, block_n 64, q_stages 2, stages 2, producer_registers 40
// block     384 threads, 231680 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      flash_mla_decode_sm90.yaml
// template  flash_mla_decode_sm90.cu.j2
#include "flashgen/sm90.cuh"

// Decoding in the latent space of MLA. A key is a row of the cache, its value the first kHeadDimV elements of that row: each KV block is loaded
// once, for both. A tile is kBlockM rows, (query, head) pairs, and thread blocks have equal shares of the KV blocks of all tiles. A thread block
// goes through the tiles of its share, and through its KV blocks of each tile, the last one first:
//
//     S = Q K^T    P = 2^(scale_log2 S - row_max)    row_sum += sums of P's rows    O += P V
//
// row_max tracks the largest score of each row (online softmax). When it rises, row_sum and O are rescaled. A thread block that
// has a whole tile divides O by row_sum in the end. Others leave their parts in the workspace, and the next kernel combines them.
//
// O of 64 rows takes half of the registers of two warpgroups, so each has kColumns columns of it. One computes S and P for both, and passes P
// on through shared memory.
//
// Map
//   warpgroup 0          kProducerRegisters = 40 a thread
//     warp 0             produce(): loads KV blocks by TMA
//     warp 1             find_tiles(): finds tile after tile, and passes each on to the other roles
//   warpgroup 1          consume_scores(): loads Q; S, softmax, and the first kColumns columns of O
//   warpgroup 2          consume_values(): the other columns of O
//
//   SharedStorage        bytes
//   q                    73728     Q of a tile
//   k                    73728  x 2  a KV block, K and V
//   p                    8192      P of a KV block, as the threads of a consumer hold it
//   factors              1024      the factors by which consume_values() multiplies its rows of O
//
//   barrier              arrivals of a phase                                              who waits
//   k_full[group]        1: the producer, and the bytes of TMA                            consumers
//   k_empty[group]       4: lane 0 of each warp of the consumer that reads it last        producer
//   tile_full            1: lane 0 of find_tiles()                                        producer, consumers
//   tile_empty           9: lane 0 of each warp that reads the tile                       find_tiles()
//   kScoresBarrier       128: consume_scores(), around its writes that wgmma reads        consume_scores()
//   kPFull               256: consume_scores(), once P is in p                            consume_values()
//   kPEmpty              256: consume_values(), once P is in registers                    consume_scores()
//   kScoresComplete      256: consume_scores(), once the next S is computed               consume_values()
//
// The columns of a KV block form three groups: the columns of V of consume_scores(), of consume_values(), and the columns of K that V lacks. Each
// group has its own barriers. S(n) is Q K^T and O(n) the consumer's columns of P V of the n-th KV block visited:
//
//   consume_scores()     O(0), S(1) | softmax(1), P(1) -> p | O(1), S(2) | softmax(2), P(2) -> p | O(2), S(3)
//   consume_values()                | O(0)                  |            | O(1)                  |
//
// So the tensor cores have work during softmax. The V columns of consume_scores() are released early: the producer loads into them while S is computed.

using element = bf16;

constexpr int kHeadDim = 576;  // of Q and K
constexpr int kHeadDimV = 512;  // of V and O
constexpr int kColumns = kHeadDimV / 2;  // of V and O, in a consumer
constexpr int kBlockM = 64;  // query rows of a tile
constexpr int kBlockN = 64;  // keys of a KV block
constexpr int kQStages = 2;  // stages of the ring of tiles that find_tiles() fills
constexpr int kStages = 2;  // KV blocks in shared memory
constexpr int kThreads = 384;  // the producer, and two consumers

// Registers of a thread. At launch all threads have equal shares of 65,536 registers. setmaxnreg moves registers between warpgroups: consumers
// share what the producer leaves.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = (3 * kLaunchRegisters - kProducerRegisters) / 2 / 8 * 8;

enum NamedBarrier : int {  // __syncthreads() has the number 0
    kScoresBarrier = 1,
    kPFull = 2,
    kPEmpty = 3,
    kScoresComplete = 4,
};

// A tile of a sequence, as the warp that finds it passes it to the producer and the consumers.
struct SequenceTile {
    int sequence;     // below 0: there are no more tiles
    int head;         // of the grid
    int first_row;    // below 0 in a tile that begins before the sequence's first row
    int first_query;  // the row of q where the sequence begins
    int seqlen_q;
    int seqlen_kv;
    int first_block;  // the KV blocks [first_block, end_block) are this thread block's
    int end_block;
    int slot;         // of the workspace, if other thread blocks also have KV blocks of the tile; otherwise below 0

    __device__ __forceinline__ void load(shared_address words) {
        sequence = load_shared_32(words + offsetof(SequenceTile, sequence));
        head = load_shared_32(words + offsetof(SequenceTile, head));
        first_row = load_shared_32(words + offsetof(SequenceTile, first_row));
        first_query = load_shared_32(words + offsetof(SequenceTile, first_query));
        seqlen_q = load_shared_32(words + offsetof(SequenceTile, seqlen_q));
        seqlen_kv = load_shared_32(words + offsetof(SequenceTile, seqlen_kv));
        first_block = load_shared_32(words + offsetof(SequenceTile, first_block));
        end_block = load_shared_32(words + offsetof(SequenceTile, end_block));
        slot = load_shared_32(words + offsetof(SequenceTile, slot));
    }

    __device__ __forceinline__ void store(shared_address words) const {
        store_shared_32(words + offsetof(SequenceTile, sequence), sequence);
        store_shared_32(words + offsetof(SequenceTile, head), head);
        store_shared_32(words + offsetof(SequenceTile, first_row), first_row);
        store_shared_32(words + offsetof(SequenceTile, first_query), first_query);
        store_shared_32(words + offsetof(SequenceTile, seqlen_q), seqlen_q);
        store_shared_32(words + offsetof(SequenceTile, seqlen_kv), seqlen_kv);
        store_shared_32(words + offsetof(SequenceTile, first_block), first_block);
        store_shared_32(words + offsetof(SequenceTile, end_block), end_block);
        store_shared_32(words + offsetof(SequenceTile, slot), slot);
    }
};

// Shared memory holds panels of 64 columns. TMA swizzles the 128 bytes of each row.
constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = kPanelColumns * sizeof(element);
constexpr int kPanels = kHeadDim / kPanelColumns;  // of Q and K
constexpr int kPanelsV = kHeadDimV / kPanelColumns;
// Columns of a KV block that become full, and empty, together: V of consume_scores(), V of consume_values(), the rest of K.
constexpr int kGroups = 3;
constexpr int kGroupPanels = kPanelsV / 2;  // of a group of V

__device__ constexpr int group_in_order(int i);  // The i-th group to become empty, to be loaded, and to be read

constexpr int kTileWords = (sizeof(SequenceTile) + 15) / 16 * 4;  // of a SequenceTile in shared memory
// TMA loads a KV block in boxes of 16 keys, all of one page.
constexpr int kBoxKeys = 16;
constexpr int kBoxes = kBlockN / kBoxKeys;  // of a panel of columns

struct Box {
    int32_t page;
    int32_t row;  // of the page, where the keys of the box begin
};

// Begins at a multiple of 1024 bytes, where the pattern of a swizzle does.
struct SharedStorage {
    element q[kPanels][kBlockM][kPanelColumns];
    element k[kStages][kPanels][kBlockN][kPanelColumns];
    uint32_t p[kBlockN / 16][128][4];
    float factors[128][2];
    uint64_t k_full[kStages][kGroups];
    uint64_t k_empty[kStages][kGroups];
    uint64_t tile_full[kQStages];
    uint64_t tile_empty[kQStages];
    int32_t tile[kQStages][kTileWords];  // a SequenceTile
    Box boxes[kBoxes];  // of the KV block that comes next
};
constexpr int kKBytes = sizeof(SharedStorage::k[0]);

// Addresses within the SharedStorage of the thread block.
struct SharedAddresses {
    shared_address storage;

    __device__ __forceinline__ SharedAddresses(shared_address begin) : storage(begin) {}

    // Buffers.
    __device__ __forceinline__ shared_address q() const { return storage + offsetof(SharedStorage, q); }
    __device__ __forceinline__ shared_address k(int stage) const { return storage + offsetof(SharedStorage, k) + stage * kKBytes; }
    __device__ __forceinline__ shared_address p() const { return storage + offsetof(SharedStorage, p) + threadIdx.x % 128 * 16; }
    __device__ __forceinline__ shared_address factors() const { return storage + offsetof(SharedStorage, factors) + threadIdx.x % 128 * 8; }
    __device__ __forceinline__ shared_address tile(int stage) const { return storage + offsetof(SharedStorage, tile) + stage * 4 * kTileWords; }
    __device__ __forceinline__ shared_address boxes() const { return storage + offsetof(SharedStorage, boxes); }

    // Barriers.
    __device__ __forceinline__ shared_address k_full(int stage, int group) const {
        return storage + offsetof(SharedStorage, k_full) + 8 * (stage * kGroups + group);
    }
    __device__ __forceinline__ shared_address k_empty(int stage, int group) const {
        return storage + offsetof(SharedStorage, k_empty) + 8 * (stage * kGroups + group);
    }
    __device__ __forceinline__ shared_address tile_full(int stage) const { return storage + offsetof(SharedStorage, tile_full) + 8 * stage; }
    __device__ __forceinline__ shared_address tile_empty(int stage) const { return storage + offsetof(SharedStorage, tile_empty) + 8 * stage; }
};

struct Params {
    tensor_map k;                         // (head_dim, rows_kv, num_heads_kv, batch_kv)
    const element* q;                     // (batch_q, rows_q, num_heads_q, head_dim); rows 16-byte aligned
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
    int64_t out_batch_stride;             // strides are in elements
    int64_t out_row_stride;
    int64_t out_head_stride;
    int64_t lse_batch_stride;             // strides are in elements
    int64_t lse_head_stride;
    int64_t pages_batch_stride;           // strides are in elements
    int32_t batch_size;                   // sequences
    int32_t group_size;                   // num_heads_q / num_heads_kv
    int32_t rows_q;                       // of an entry of q: all tokens where sequences are packed
    int32_t batch_kv;                     // entries of k: of a paged cache its pages
    int32_t page_size;                    // keys of a page
    uint64_t page_size_divisor;           // of page_size; see divide()
    uint64_t group_size_divisor;          // of group_size; see divide()
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_shares;                   // thread blocks of a set of heads in the main kernel
    int32_t head_sets_log2;               // of the number of sets of heads: 1, 2 or 4
    int32_t heads_per_set;                // heads of a batch entry in a set
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
__device__ void await_empty(shared_address empty, int parity);  // Waits until a buffer may be written to
// Passes a tile on to the producer and the consumers
__device__ void pass_on_tile(const SequenceTile& found, const SharedAddresses& shared, RingPosition<kQStages>& ring, int lane);
// The tile that comes next, as a producer warp reads it
__device__ SequenceTile take_tile(const SharedAddresses& shared, const RingPosition<kQStages>& ring, int lane);
// The KV blocks of a tile that are in the thread block's share and of which its rows see a key
__device__ KvBlocks find_kv_blocks(const Params& params, const SequenceTile& found);
__device__ KvBlocks kv_blocks_of(const Params& params, const SequenceTile& found);  // The KV blocks that the thread block visits of a tile
// The wgmma descriptor of an operand in shared memory
__device__ uint64_t descriptor(shared_address start, int stride_bytes, int leading_bytes = 16);
__device__ void await_full(shared_address full, int parity);  // Waits for a group of columns of a KV block
// Issues the part of S that a group of columns has
template <int kGroup> __device__ void add_group(float (&scores)[kBlockN / 2], const SharedAddresses& shared,
    const RingPosition<kStages>& ring, uint64_t q, uint64_t k);
// Starts S (64 x kBlockN) = Q . K^T, group of columns after group in the order in which they are loaded
__device__ void mma_qk(float (&scores)[kBlockN / 2], const SharedAddresses& shared, const RingPosition<kStages>& ring);

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

// Starts a consumer's columns of O (64 x kColumns) += P . V
__device__ void mma_pv(float (&output)[kColumns / 2], PackedScores<kBlockN>& p, shared_address v_smem);

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

struct RowState {  // of a lane's two rows: g and g + 8 of the warp's 16, where g = lane / 4
    float row_max[2] = {kNoRowMax, kNoRowMax};  // log2 domain
    float row_sum[2] = {0.0f, 0.0f};            // this lane's share of the sum of P
    float correction[2];                        // of O, if row_max has moved
};

// Turns S of a KV block into P and adds it to row_sum
__device__ bool softmax_step(float (&scores)[kBlockN / 2], RowState& rows, float scale_log2);
__device__ bool is_row(const Params& params, int row);  // Whether a row of a tile has a query
// Completes row_sum of the lane's two rows, and writes their LSE
__device__ void finish_rows(const Params& params, const Tile& tile, const RowState& rows, int first_row, int lane, float (&factor)[2]);
// Transposes a 4x4 matrix of words, a row in each of four neighbouring lanes
__device__ uint4 transpose_4x4(const uint32_t (&mine)[4], int lane_of_four);
__device__ void multiply(float (&output)[kColumns / 2], const float (&factor)[2]);  // Multiplies the rows of a consumer's columns of O
// Rounds O, whose rows are multiplied by `factor`, and writes it from registers
__device__ void store_tile(const Params& params, const Tile& tile, const float (&output)[kColumns / 2], const float (&factor)[2],
    int first_row, int first_column, int lane);
// Leaves a consumer's columns of O of a part in a slot of the workspace, not divided yet, for the kernel that combines the parts
__device__ void store_part(const Params& params, const Tile& tile, int slot, const float (&output)[kColumns / 2], int first_row,
    int first_column, int lane);
// Leaves row_max and row_sum of a part in its slot of the workspace
__device__ void store_sums(const Params& params, const Tile& tile, int slot, const RowState& rows, int first_row, int lane);

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

__device__ void init_barriers(const SharedAddresses& shared);  // Initialises the barriers with the arrivals that complete a phase of each

// The panels [begin, end) of a group of columns.
struct Panels {
    int begin;
    int end;
};

__device__ Panels panels_of(int group);
// The first KV block of the tile that has KV block `index` of all, in a sequence at `place`
__device__ int begin_of_tile(const Params& params, const Place& place, int index);
__device__ void release(shared_address empty, int lane);  // Arrives on a barrier for a warp that has finished with a buffer
// Loads Q of a tile of the sequence whose queries begin at `q`, rows past the last one and elements from head_dim on as zeros
__device__ void load_q(const Params& params, const Tile& tile, const element* q, shared_address q_smem);
__device__ void store_factor(const SharedAddresses& shared, const float (&factor)[2]);
// Passes P of a KV block on to consume_values(), and the factors by which it first multiplies its rows of O
__device__ void send(const SharedAddresses& shared, const PackedScores<kBlockN>& p, const float (&factor)[2]);
// Passes on the factors by which consume_values() multiplies its rows of O at the end
__device__ void send(const SharedAddresses& shared, const float (&factor)[2]);
// Takes P of a KV block, which consume_scores() has passed on
__device__ void receive(PackedScores<kBlockN>& p, const SharedAddresses& shared);
// Takes the factors by which consume_values() multiplies its rows of O
__device__ void receive(float (&factor)[2], const SharedAddresses& shared);
// Takes the next tile of find_tiles()
__device__ SequenceTile take_tile_as_consumer(const SharedAddresses& shared, RingPosition<kQStages>& ring, int lane);
__device__ void clear_rows(shared_address block, int begin);  // Writes zeros over the rows of V of a KV block from `begin` on

// Loads the KV blocks of tile after tile, as fast as buffers become empty. The groups are loaded in the order in which they become empty.
__device__ __forceinline__ void produce(const Params& params, const SharedAddresses& shared) {
    const int lane = threadIdx.x % 32;
    // All buffers are empty at first. A wait for parity 1 of a new mbarrier returns at once.
    RingPosition<kStages> ring;
    RingPosition<kQStages> tile_ring;
    while (true) {
        const SequenceTile found = take_tile(shared, tile_ring, lane);
        if (found.sequence < 0) return;
        tile_ring.advance();
        const KvBlocks blocks = kv_blocks_of(params, found);
        const int block_pages = divide(kBlockN, params.page_size_divisor);
        const int block_rows = kBlockN - block_pages * params.page_size;
        BoxKeys keys(params, found, blocks.last, lane);
#pragma unroll 1  // few registers are left to the producer
        for (int kv_block = blocks.last; kv_block >= blocks.first; --kv_block) {
            if (lane < kBoxes) keys.store(params, shared.boxes() + lane * sizeof(Box));
            keys.step_down(params, block_pages, block_rows, lane);  // its entry is under way while boxes are loaded
#pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                const int group = group_in_order(i);
                const shared_address full = shared.k_full(ring.stage, group);
                const Panels panels = panels_of(group);
                await_empty(shared.k_empty(ring.stage, group), ring.parity ^ 1);  // and all lanes have written their boxes
                if (elect_one()) {
                    mbarrier_arrive_expect_tx(full, (panels.end - panels.begin) * kBlockN * kPanelRowBytes);
#pragma unroll
                    for (int box = 0; box < kBoxes; ++box) {
                        const int page = load_shared_32(shared.boxes() + box * sizeof(Box) + offsetof(Box, page));
                        const int row = load_shared_32(shared.boxes() + box * sizeof(Box) + offsetof(Box, row));
#pragma unroll
                        for (int panel = panels.begin; panel < panels.end; ++panel) {
                            tma_load_4d(shared.k(ring.stage) + (panel * kBlockN + box * kBoxKeys) * kPanelRowBytes, params.k, full,
                                        panel * kPanelColumns, row, 0, page);
                        }
                    }
                }
            }
            __syncwarp();  // the boxes have been read
            ring.advance();
        }
        __syncwarp();
    }
}

// Finds the tiles of the thread block's share, each before the producer and the consumers need it. One warp calls it. The order is: the part
// that the share begins with, the part that it ends with, then the whole tiles between them. All tiles of a sequence are equally long, and each
// is visited from its last KV block on. Modulo the length of a tile, the lengths of the two parts add up to the same in all shares. So all
// thread blocks start whole tiles at about the same time and share K and V of a head in L2.
__device__ __forceinline__ void find_tiles(const Params& params, const SharedAddresses& shared) {
    const int lane = threadIdx.x % 32;
    RingPosition<kQStages> ring;
    auto pass_on = [&](const SequenceTile& found) { pass_on_tile(found, shared, ring, lane); };
    const Lengths lane_lengths = lengths_of(params, lane);
    const Share share = find_share(params, lane_lengths, block_index(), lane);
    // Passes on the part that begins with KV block `index` of all. Returns the KV block after it.
    auto pass_on_part = [&](const Place& place, int index) {
        const Params sequence_params = with_lengths(params, place.lengths);
        const Part part = find_part(sequence_params, share, place, index);
        const int row_blocks = tiles_of(sequence_params).row_blocks;
        const int nth_head = part.tile / row_blocks;
        const int head = head_of_set(params, block_index(), nth_head);  // of the grid
        const int first_row = (part.tile - nth_head * row_blocks) * kBlockM;
        SequenceTile found = tile_at(params, place.sequence, place.lengths.queries, place.lengths.keys, head, first_row);
        found.first_block = part.first;
        found.end_block = part.end;
        found.slot = part.slot;
        pass_on(found);
        return index + part.end - part.first;
    };
    if (share.begin < share.end) {
        Place place = find_place(params, lane_lengths, share.begin, lane);
        int index = pass_on_part(place, share.begin);
        if (index < share.end) {
            const Place last_place = find_place(params, lane_lengths, share.end - 1, lane);
            const int last = begin_of_tile(params, last_place, share.end - 1);
            pass_on_part(last_place, last);
            while (index < last) {
                if (index == place.end) place = next_place(params, place);
                index = pass_on_part(place, index);
            }
        }
    }
    pass_on({-1});
}

// The consumer that computes S and P, and the first half of the columns of O. `all` are the parameters of the call, params of the sequence of a tile.
__device__ __forceinline__ void consume_scores(const Params& all, const SharedAddresses& shared) {
    const int lane = threadIdx.x % 32;
    RingPosition<kQStages> tile_ring;
    RingPosition<kStages> ring;
    const bool memory_limits = all.head_sets_log2 == 0;  // at most 64 heads share each key: loads take longer than MMAs
    while (true) {
        const SequenceTile found = take_tile_as_consumer(shared, tile_ring, lane);
        if (found.sequence < 0) break;
        const Params params = of_sequence(all, found);
        const Tile tile = tile_of(params, found);
        const int first_row = tile.first_row + threadIdx.x % 128 / 32 * 16;  // of the warp
        const KvBlocks blocks = find_kv_blocks(params, found);
        float output[kColumns / 2] = {};
        RowState rows;
        // Rows outside the sequence have no score. With row_max infinite they never make the warp raise it.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (!is_row(params, first_row + 8 * half + lane / 4)) rows.row_max[half] = INFINITY;
        }
        // The keys that all 16 rows of the warp see: KV blocks within them need no mask. All rows of a warp may be past the last one, so clamp first_row.
        const KeyRange seen_by_all = keys_of_every(params, min(first_row, num_rows(params) - 1), 16);
        // Finishes the scores of a KV block: once for each KV block, between Q K^T and softmax.
        auto finish_scores = [&](float (&scores)[kBlockN / 2], int kv_block) {
            const bool whole = (kv_block + 1) * kBlockN <= seen_by_all.end;
            if (!whole) apply_mask(params, scores, first_row, kv_block * kBlockN, lane);
        };
        float factor[2] = {1.0f, 1.0f};

        if (blocks.last >= blocks.first) {
            load_q(params, tile, params.q + tile.batch * params.q_batch_stride + found.first_query * params.q_row_stride, shared.q());
            // The first block: S, softmax. Rows past the sequence may be NaN, and 0 * NaN is NaN, so they are cleared before P V.
            int kv_block = blocks.last;
            float scores[kBlockN / 2];
            PackedScores<kBlockN> p;
            mma_qk(scores, shared, ring);
            wgmma_wait<0>();
            pin_registers(scores);
            release(shared.k_empty(ring.stage, kGroups - 1), lane);
            if ((kv_block + 1) * kBlockN > params.seqlen_kv) {
                barrier_sync(kScoresBarrier, 128);  // all warps have computed S
                clear_rows(shared.k(ring.stage), params.seqlen_kv - kv_block * kBlockN);
                barrier_sync(kScoresBarrier, 128);
            }
            finish_scores(scores, kv_block);
            softmax_step(scores, rows, params.scale_log2);
            p.set(scores);
            send(shared, p, factor);
            int stage = ring.stage;  // of the block before, whose P V comes next
            ring.advance();
            for (--kv_block; kv_block >= blocks.first; --kv_block) {
                // 1. O += P V of the previous block: issue.
                mma_pv(output, p, shared.k(stage));
                if (memory_limits) {
                    // K of this block is still in flight. Both consumers release V before K arrives.
                    barrier_arrive(kScoresComplete, 256);
                    wgmma_wait<0>();
                    pin_registers(output);
                    release(shared.k_empty(stage, 0), lane);
                }
                // 2. S = Q K^T of this block: wait for K, issue.
                mma_qk(scores, shared, ring);
                if (!memory_limits) {
                    // Wait for P V, with S in flight. Release V: the KV block after the next one is loaded into it during S and softmax.
                    wgmma_wait<1>();
                    pin_registers(output);
                    release(shared.k_empty(stage, 0), lane);
                }
                // 3. Wait for S. Let consume_values() issue its P V, which runs during softmax. Release the columns that K alone has.
                wgmma_wait<0>();
                pin_registers(scores);
                if (!memory_limits) barrier_arrive(kScoresComplete, 256);
                release(shared.k_empty(ring.stage, kGroups - 1), lane);
                // 4. Softmax on S. Pass P on. Rescale O where row_max has moved.
                finish_scores(scores, kv_block);
                const bool moved = softmax_step(scores, rows, params.scale_log2);
                p.set(scores);
                factor[0] = moved ? rows.correction[0] : 1.0f;
                factor[1] = moved ? rows.correction[1] : 1.0f;
                send(shared, p, factor);
                if (moved) multiply(output, factor);
                stage = ring.stage;
                ring.advance();
            }
            // O += P V of the last block: issue, wait, release V.
            barrier_arrive(kScoresComplete, 256);  // there is no S after it
            mma_pv(output, p, shared.k(stage));
            wgmma_wait<0>();
            pin_registers(output);
            release(shared.k_empty(stage, 0), lane);
        }
        if (found.slot >= 0) {
            store_sums(params, tile, found.slot, rows, first_row, lane);
            store_part(params, tile, found.slot, output, first_row, 0, lane);
        } else {
            finish_rows(params, tile, rows, first_row, lane, factor);
            send(shared, factor);
            store_tile(params, tile, output, factor, first_row, 0, lane);
        }
    }
    barrier_sync(kPEmpty, 256);  // no named barrier has pending arrivals when the warpgroup ends
}

// The consumer that has the other half of the columns of O.
__device__ __forceinline__ void consume_values(const Params& all, const SharedAddresses& shared) {
    const int lane = threadIdx.x % 32;
    RingPosition<kQStages> tile_ring;
    RingPosition<kStages> ring;
    barrier_arrive(kPEmpty, 256);
    while (true) {
        const SequenceTile found = take_tile_as_consumer(shared, tile_ring, lane);
        if (found.sequence < 0) break;
        const Params params = of_sequence(all, found);
        const Tile tile = tile_of(params, found);
        const int first_row = tile.first_row + threadIdx.x % 128 / 32 * 16;  // of the warp
        const KvBlocks blocks = find_kv_blocks(params, found);
        float output[kColumns / 2] = {};
        float factor[2];
        for (int kv_block = blocks.last; kv_block >= blocks.first; --kv_block) {
            // 1. Wait for P. Rescale O where row_max has moved.
            barrier_sync(kPFull, 256);
            PackedScores<kBlockN> p;
            receive(p, shared);
            receive(factor, shared);
            if (__any_sync(0xffffffff, factor[0] != 1.0f || factor[1] != 1.0f)) multiply(output, factor);
            // 2. Wait for consume_scores(). It arrives when it has computed the next S, so this P V runs during the softmax of that S. If memory limits, it
            // arrives before it issues that S.
            barrier_sync(kScoresComplete, 256);
            barrier_arrive(kPEmpty, 256);
            // 3. O += P V: issue, wait, release V.
            await_full(shared.k_full(ring.stage, 1), ring.parity);
            mma_pv(output, p, shared.k(ring.stage) + kGroupPanels * kBlockN * kPanelRowBytes);
            wgmma_wait<0>();
            pin_registers(output);
            release(shared.k_empty(ring.stage, 1), lane);
            ring.advance();
        }
        if (found.slot >= 0) {
            store_part(params, tile, found.slot, output, first_row, kColumns, lane);
        } else {
            barrier_sync(kPFull, 256);
            receive(factor, shared);
            barrier_arrive(kPEmpty, 256);
            store_tile(params, tile, output, factor, first_row, kColumns, lane);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
flash_mla_decode_hdim576_512_bf16_causal_paged_packgqa_sm90(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const SharedAddresses shared((to_shared(shared_memory) + 1023) / 1024 * 1024);
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        prefetch_tensormap(params.k);
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
        }
    } else if (warpgroup == 1) {
        setmaxnreg_inc<kConsumerRegisters>();
        consume_scores(params, shared);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume_values(params, shared);
    }
}

// The i-th group to become empty, to be loaded, and to be read: the columns that K alone has, then V of either consumer.
__device__ constexpr int group_in_order(int i) { return i == 0 ? kGroups - 1 : i - 1; }

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
    const KeyRange keys = keys_of_some(params, first_row, count);
    return {keys.begin / kBlockN, (keys.end + kBlockN - 1) / kBlockN - 1};
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

__device__ __forceinline__ KvBlocks find_kv_blocks(const Params& params, const SequenceTile& found) {
    const KvBlocks blocks = find_kv_blocks(params, found.first_row, kBlockM);
    return {max(blocks.first, found.first_block), min(blocks.last, found.end_block - 1)};
}

__device__ __forceinline__ KvBlocks kv_blocks_of(const Params& params, const SequenceTile& found) {
    return find_kv_blocks(with_lengths(params, found.seqlen_q, found.seqlen_kv), found);
}

// The wgmmas of this kernel. They compute d = a . b of a warpgroup, or d += a . b if `accumulate`: a is 64 x 16, b 16 x N, and the accumulator d
// 64 x N in fp32. Thread (g, t) = (lane / 4, lane % 4) of warp w holds d[4 j + e]: row 16 w + g + 8 (e / 2), column 8 j + 2 t + e % 2.
#ifndef FLASHGEN_SIMULATOR  // the simulator emulates them in C++

// wgmma.mma_async.m64n64k16: a and b in shared memory under descriptors, both with the K dimension contiguous.
__device__ __forceinline__ void wgmma_m64n64k16_bf16_ss(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate));
}

// wgmma.mma_async.m64n256k16. A from registers: a[0] = (row g, columns 2 t, 2 t + 1), a[1] = (row g + 8, same columns), a[2], a[3] =
// columns 8 further: the accumulator layout, packed. b is MN-major.
__device__ __forceinline__ void wgmma_m64n256k16_bf16_rs(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {"
        "%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}\n"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
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

__device__ __forceinline__ void await_full(shared_address full, int parity) { mbarrier_wait(full, parity); }

// Issues the part of S that a group of columns has. Its columns are constants, so that descriptors need no arithmetic: a loop over them would take
// longer to issue a wgmma than the tensor cores to compute it.
template <int kGroup>
__device__ __forceinline__ void add_group(float (&scores)[kBlockN / 2], const SharedAddresses& shared, const RingPosition<kStages>& ring,
                                          uint64_t q, uint64_t k) {
    constexpr bool kFirst = kGroup == kGroups - 1;
    constexpr int kBegin = kGroup * kGroupPanels * kPanelColumns;
    constexpr int kEnd = kFirst ? kHeadDim : kBegin + kGroupPanels * kPanelColumns;
    await_full(shared.k_full(ring.stage, kGroup), ring.parity);
    wgmma_fence();  // for each group: after a wait ptxas would insert one, and wait for each wgmma
#pragma unroll
    for (int column = kBegin; column < kEnd; column += 16) {
        const int panel = column / kPanelColumns, byte = column % kPanelColumns * sizeof(element);
        wgmma_m64n64k16_bf16_ss(scores, q + ((panel * kBlockM * kPanelRowBytes + byte) >> 4),
                                 k + ((panel * kBlockN * kPanelRowBytes + byte) >> 4), !kFirst || column > kBegin);
    }
}

// Starts S (64 x kBlockN) = Q . K^T, group of columns after group in the order in which they are loaded. Both operands are K-major: SBO leads to
// the next eight rows. A step of 16 along the K dimension is 32 bytes within the swizzled row.
__device__ __forceinline__ void mma_qk(float (&scores)[kBlockN / 2], const SharedAddresses& shared, const RingPosition<kStages>& ring) {
    int q_smem = shared.q();
    opaque(q_smem);  // else the descriptors of all steps of Q would be kept in registers
    const uint64_t q = descriptor(q_smem, 8 * kPanelRowBytes);
    const uint64_t k = descriptor(shared.k(ring.stage), 8 * kPanelRowBytes);
    pin_registers(scores);
    add_group<kGroups - 1>(scores, shared, ring, q, k);
    add_group<0>(scores, shared, ring, q, k);
    add_group<1>(scores, shared, ring, q, k);
    wgmma_commit();
}

// Starts a consumer's columns of O (64 x kColumns) += P . V. V is MN-major: SBO leads to the next eight keys, LBO to the next panel of columns.
__device__ __forceinline__ void mma_pv(float (&output)[kColumns / 2], PackedScores<kBlockN>& p, shared_address v_smem) {
    const uint64_t v = descriptor(v_smem, 8 * kPanelRowBytes, kBlockN * kPanelRowBytes);
    pin_registers(output);
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) pin_registers(p.fragment[step]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
        wgmma_m64n256k16_bf16_rs(output, p.fragment[step], v + (16 * step * kPanelRowBytes >> 4), 1);
    }
    wgmma_commit();
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

__device__ __forceinline__ bool is_row(const Params& params, int row) {
    return row < num_rows(params);
}

// Completes row_sum of the lane's two rows, and writes their LSE. Sets `factor` to 1 / row_sum; the caller multiplies O by it.
__device__ __forceinline__ void finish_rows(const Params& params, const Tile& tile, const RowState& rows, int first_row, int lane,
                                            float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half + lane / 4;
        const float row_sum = quad_sum(rows.row_sum[half]);
        const RowEnd end = row_end(rows.row_max[half], row_sum);
        factor[half] = end.factor();
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

__device__ __forceinline__ void multiply(float (&output)[kColumns / 2], const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) output[4 * n + e] *= factor[e / 2];
    }
}

// Rounds O, whose rows are multiplied by `factor`, and writes it from registers: the columns from `first_column` on.
__device__ __forceinline__ void store_tile(const Params& params, const Tile& tile, const float (&output)[kColumns / 2],
                                           const float (&factor)[2], int first_row, int first_column, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half + lane / 4;
        element* out_row = params.out + tile.batch * params.out_batch_stride +
                           row_offset(params, tile, row, params.out_row_stride, params.out_head_stride) + first_column;
        opaque(out_row);  // else it is computed anew for each store
        // A lane has two neighbouring columns of every eight. Four lanes transpose, so that each gets eight of 32.
#pragma unroll
        for (int n = 0; n < kColumns / 8; n += 4) {
            uint32_t mine[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int first = 4 * (n + i) + 2 * half;
                mine[i] = pack<element>(output[first] * factor[half], output[first + 1] * factor[half]);
            }
            const uint4 chunk = transpose_4x4(mine, lane % 4);
            const int column = 8 * (n + lane % 4);
            if (is_row(params, row) && first_column + column < params.head_dim_v) store_global_128(out_row + column, chunk);
        }
    }
}

__device__ __forceinline__ void store_part(const Params& params, const Tile& tile, int slot, const float (&output)[kColumns / 2],
                                           int first_row, int first_column, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half + lane / 4;
        if (!is_row(params, row)) continue;
        const int64_t part_row = int64_t(slot) * kBlockM + row - tile.first_row;
        float* part_output = params.part_outputs + part_row * kHeadDimV + first_column + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
            store_global_64(part_output + 8 * n, output[4 * n + 2 * half], output[4 * n + 2 * half + 1]);
        }
    }
}

__device__ __forceinline__ void store_sums(const Params& params, const Tile& tile, int slot, const RowState& rows, int first_row, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float row_sum = quad_sum(rows.row_sum[half]);
        const int row = first_row + 8 * half + lane / 4;
        const int64_t part_row = int64_t(slot) * kBlockM + row - tile.first_row;
        if (lane % 4 == 0 && is_row(params, row)) store_global_64(params.part_sums + part_row * 2, rows.row_max[half], row_sum);
    }
}

// Initialises the barriers with the arrivals that complete a phase of each. One thread calls it, before any other uses them.
__device__ __forceinline__ void init_barriers(const SharedAddresses& shared) {
    for (int stage = 0; stage < kStages; ++stage) {
        for (int group = 0; group < kGroups; ++group) {
            mbarrier_init(shared.k_full(stage, group), 1);
            mbarrier_init(shared.k_empty(stage, group), 4);
        }
    }
    for (int stage = 0; stage < kQStages; ++stage) {
        mbarrier_init(shared.tile_full(stage), 1);
        mbarrier_init(shared.tile_empty(stage), 9);  // the producer, and 8 warps of consumers
    }
}

__device__ __forceinline__ Panels panels_of(int group) {
    const int begin = group * kGroupPanels;
    return {begin, group == kGroups - 1 ? kPanels : begin + kGroupPanels};
}

__device__ __forceinline__ int begin_of_tile(const Params& params, const Place& place, int index) {
    return index - (index - place.begin) % tiles_of(with_lengths(params, place.lengths)).kv_blocks;
}

__device__ __forceinline__ void release(shared_address empty, int lane) {
    if (lane == 0) mbarrier_arrive(empty);
}

// Loads Q of a tile of the sequence whose queries begin at `q`, rows past the last one and elements from head_dim on as zeros. The 128 threads of
// consume_scores() call it. They no longer read the previous Q: send() of the previous tile's last P synchronised them, after
// their last S.
__device__ __forceinline__ void load_q(const Params& params, const Tile& tile, const element* q, shared_address q_smem) {
    constexpr int kRowChunks = kHeadDim * sizeof(element) / 16;
    constexpr int kPanelChunks = kPanelRowBytes / 16;
    barrier_sync(kScoresBarrier, 128);  // else ptxas serialises the wgmmas
    const int rows_left = num_rows(params) - tile.first_row;
#pragma unroll 4
    for (int index = threadIdx.x % 128; index < kBlockM * kRowChunks; index += 128) {
        const int row = index / kRowChunks, chunk = index % kRowChunks;
        const int element_of_row = chunk * (16 / sizeof(element));
        const shared_address panel = q_smem + (chunk / kPanelChunks * kBlockM + row) * kPanelRowBytes;
        const bool valid = row < rows_left && element_of_row < params.head_dim;
        const element* source = q + row_offset(params, tile, tile.first_row + row, params.q_row_stride, params.q_head_stride) + element_of_row;
        cp_async_16(panel + 16 * ((chunk ^ row) % kPanelChunks), valid ? source : params.q, valid ? 16 : 0);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_proxy_async();  // wgmma would not see Q otherwise
    barrier_sync(kScoresBarrier, 128);
}

__device__ __forceinline__ void store_factor(const SharedAddresses& shared, const float (&factor)[2]) {
    store_shared_32(shared.factors(), __float_as_uint(factor[0]));
    store_shared_32(shared.factors() + 4, __float_as_uint(factor[1]));
}

__device__ __forceinline__ void send(const SharedAddresses& shared, const PackedScores<kBlockN>& p, const float (&factor)[2]) {
    barrier_sync(kPEmpty, 256);
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
        const uint32_t(&words)[4] = p.fragment[step];
        store_shared_128(shared.p() + step * 128 * 16, __uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]),
                         __uint_as_float(words[3]));
    }
    store_factor(shared, factor);
    barrier_arrive(kPFull, 256);
}

__device__ __forceinline__ void send(const SharedAddresses& shared, const float (&factor)[2]) {
    barrier_sync(kPEmpty, 256);
    store_factor(shared, factor);
    barrier_arrive(kPFull, 256);
}

__device__ __forceinline__ void receive(PackedScores<kBlockN>& p, const SharedAddresses& shared) {
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
        const uint4 words = load_shared_128(shared.p() + step * 128 * 16);
        p.fragment[step][0] = words.x;
        p.fragment[step][1] = words.y;
        p.fragment[step][2] = words.z;
        p.fragment[step][3] = words.w;
    }
}

__device__ __forceinline__ void receive(float (&factor)[2], const SharedAddresses& shared) {
    const float2 values = load_shared_64(shared.factors());
    factor[0] = values.x;
    factor[1] = values.y;
}

__device__ __forceinline__ SequenceTile take_tile_as_consumer(const SharedAddresses& shared, RingPosition<kQStages>& ring, int lane) {
    const SequenceTile found = take_tile(shared, ring, lane);
    ring.advance();
    return found;
}

// Writes zeros over the rows of V of a KV block from `begin` on. The 128 threads of consume_scores() share the work.
__device__ __forceinline__ void clear_rows(shared_address block, int begin) {
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel) {
        const shared_address rows = block + panel * kBlockN * kPanelRowBytes;
#pragma unroll 1
        for (int byte = begin * kPanelRowBytes + 16 * (threadIdx.x % 128); byte < kBlockN * kPanelRowBytes; byte += 16 * 128) {
            store_shared_128(rows + byte, 0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    fence_proxy_async();  // wgmma would not see the zeros otherwise
}

static_assert(kBlockM == 64 && kBlockN == 64, "a consumer has 64 rows, and P the layout of its accumulators");
static_assert(kHeadDim % kPanelColumns == 0 && kHeadDimV % (2 * kPanelColumns) == 0 && kHeadDimV < kHeadDim, "groups are whole panels");
static_assert(kColumns <= 256, "an accumulator of one wgmma");
static_assert(sizeof(SharedStorage) + 1024 == 231680, "launcher and kernel agree on shared memory");
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * kLaunchRegisters, "consumers would wait for ever");
static_assert(sizeof(Params) == 384 && offsetof(Params, k) == 0 && offsetof(Params, q) == 128 && offsetof(Params, out) == 136);
static_assert(offsetof(Params, lse) == 144 && offsetof(Params, cu_seqlens_q) == 152 && offsetof(Params, kv_lengths) == 160);
static_assert(offsetof(Params, pages) == 168 && offsetof(Params, part_outputs) == 176 && offsetof(Params, part_sums) == 184);
static_assert(offsetof(Params, q_batch_stride) == 192 && offsetof(Params, q_row_stride) == 200);
static_assert(offsetof(Params, q_head_stride) == 208 && offsetof(Params, out_batch_stride) == 216);
static_assert(offsetof(Params, out_row_stride) == 224 && offsetof(Params, out_head_stride) == 232);
static_assert(offsetof(Params, lse_batch_stride) == 240 && offsetof(Params, lse_head_stride) == 248);
static_assert(offsetof(Params, pages_batch_stride) == 256 && offsetof(Params, batch_size) == 264);
static_assert(offsetof(Params, group_size) == 268 && offsetof(Params, rows_q) == 272 && offsetof(Params, batch_kv) == 276);
static_assert(offsetof(Params, page_size) == 280 && offsetof(Params, page_size_divisor) == 288);
static_assert(offsetof(Params, group_size_divisor) == 296 && offsetof(Params, seqlen_q) == 304);
static_assert(offsetof(Params, seqlen_kv) == 308 && offsetof(Params, head_dim) == 312 && offsetof(Params, head_dim_v) == 316);
static_assert(offsetof(Params, num_shares) == 320 && offsetof(Params, head_sets_log2) == 324);
static_assert(offsetof(Params, heads_per_set) == 328 && offsetof(Params, diagonal_offset) == 332);
static_assert(offsetof(Params, scale_log2) == 336);
static_assert(kBlockN % kBoxKeys == 0 && kBoxes <= 32, "a lane finds the keys of a box");
