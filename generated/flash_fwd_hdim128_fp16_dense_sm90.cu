// flash_fwd_hdim128_fp16_dense_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype fp16, mask_type dense, sinks none, dropout none, gqa mha
// tile      block_m 128, block_n 128, q_stages 1, stages 2, panel 64, producer_registers 88
// block     384 threads, 173232 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      flash_fwd_sm90.yaml
// template  flash_fwd_sm90.cu.j2
#include "flashgen/sm90.cuh"

// A tile is kBlockM rows of queries that attend to the keys of one kv head. Thread blocks are persistent: each computes one tile after another.
// For each KV block that the tile's rows attend to, from the last to the first:
//
//     S = Q K^T    P = 2^(scale_log2 S - row_max)    row_sum += sums of P's rows    O += P V
//
// row_max tracks the largest score of each row (online softmax). When it rises, row_sum and O are rescaled. At the end O is divided by row_sum.
//
// Map
//   warpgroup 0          the producer, kProducerRegisters = 88 a thread
//     thread 0           produce(): loads Q, K and V by TMA
//     masking warps      read_mask(): packs the mask into bits
//   warpgroup 1 + c      consume(): S, softmax and O of 64 rows, as consumer c of 2, kConsumerRegisters a thread
//
//   SharedStorage        bytes
//   q                    32768  x 1  Q of a tile
//   k                    32768  x 2  K of a KV block
//   v                    32768  x 2  V of a KV block
//   mask                 2056   x 4  the bits of a KV block
//   mbarriers            8 each; and 1024 more, so that SharedStorage begins at a multiple of 1024
//
//   barrier              arrivals of a phase                                              who waits
//   q_full               1: the producer, and the bytes of TMA                            consumers
//   q_empty              4 kConsumers: lane 0 of each warp, past the last Q K^T           producer
//   k_full, v_full       1: the producer, and the bytes of TMA                            consumers
//   k_empty, v_empty     4 kConsumers: lane 0 of each warp, once its MMAs have read it    producer
//   mask_full            32 kMaskWarps: each thread that packs                            consumers, producer
//   mask_empty           128 kConsumers + 1: each thread that reads                       read_mask()
//   kMaskBarrier         32 kMaskWarps: each thread that packs                            the same
//   kTurnBarrier         256: the previous consumer, and the consumer that waits          a consumer, before its MMAs
//
// Consumers take turns at issuing MMAs, so that the softmax of one runs while the tensor cores work for the next. S(n) is Q K^T and O(n) is P V
// of the n-th KV block visited:
//
//   consumer c           issue S(1) O(0) | softmax(1)                        | issue S(2) O(1) | softmax(2)
//   consumer c + 1       softmax(0)      | issue S(1) O(0) | softmax(1)                        | issue S(2) O(1)

using element = fp16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kHeadDimV = 128;  // of V and O
constexpr int kBlockM = 128;  // query rows of a tile
constexpr int kBlockN = 128;  // keys of a KV block
constexpr int kQStages = 1;  // Q buffers
constexpr int kStages = 2;  // K buffers, and V buffers
constexpr int kConsumers = 2;  // consumer warpgroups, 64 rows each
constexpr int kThreads = 128 * (1 + kConsumers);  // warpgroup 0 is the producer

// Registers of a thread. At launch all threads have equal shares of 65,536 registers. setmaxnreg moves registers between warpgroups: consumers
// share the registers that the producer gives up, at most 240 a thread. If the share at launch is larger than kConsumerRegisters, ptxas lowers
// it to kConsumerRegisters.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = 88;
constexpr int kRegistersLeft = ((1 + kConsumers) * kLaunchRegisters - kProducerRegisters) / kConsumers / 8 * 8;
constexpr int kConsumerRegisters = kRegistersLeft < 240 ? kRegistersLeft : 240;

constexpr int kMaskWarps = 3;  // of the producer warpgroup, warps that read the mask

enum NamedBarrier : int {  // __syncthreads() has the number 0
    kTurnBarrier = 1,  // + consumer
    kLastTurnBarrier = kTurnBarrier + kConsumers - 1,  // of the last consumer
    kMaskBarrier,
};

// Shared memory holds panels of 64 columns. TMA swizzles the 128 bytes of each row.
constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = kPanelColumns * sizeof(element);
constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;  // of Q and K
constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;  // of V and O
constexpr int kMaskStages = kStages + 2;  // K and V are loaded once the mask of their block is known, so masks are read earlier

struct alignas(8) MaskEntry {
    uint32_t hidden[kBlockM][4];  // the bits of a row, by lane % 4
    int32_t kv_block;             // below 0: the tile ends
};

// Begins at a multiple of 1024 bytes. The swizzle XORs bits of the address, so its pattern repeats every 1024 bytes.
struct SharedStorage {
    element q[kQStages][kPanels][kBlockM][kPanelColumns];
    element k[kStages][kPanels][kBlockN][kPanelColumns];
    element v[kStages][kPanelsV][kBlockN][kPanelColumns];
    MaskEntry mask[kMaskStages];
    uint64_t q_full[kQStages];
    uint64_t q_empty[kQStages];
    uint64_t k_full[kStages];
    uint64_t k_empty[kStages];
    uint64_t v_full[kStages];
    uint64_t v_empty[kStages];
    uint64_t mask_full[kMaskStages];
    uint64_t mask_empty[kMaskStages];
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
    __device__ __forceinline__ shared_address mask(int stage) const { return at(offsetof(SharedStorage, mask), stage, sizeof(MaskEntry)); }

    // Barriers.
    __device__ __forceinline__ shared_address q_full(int stage) const { return barrier(offsetof(SharedStorage, q_full), stage); }
    __device__ __forceinline__ shared_address q_empty(int stage) const { return barrier(offsetof(SharedStorage, q_empty), stage); }
    __device__ __forceinline__ shared_address k_full(int stage) const { return barrier(offsetof(SharedStorage, k_full), stage); }
    __device__ __forceinline__ shared_address k_empty(int stage) const { return barrier(offsetof(SharedStorage, k_empty), stage); }
    __device__ __forceinline__ shared_address v_full(int stage) const { return barrier(offsetof(SharedStorage, v_full), stage); }
    __device__ __forceinline__ shared_address v_empty(int stage) const { return barrier(offsetof(SharedStorage, v_empty), stage); }
    __device__ __forceinline__ shared_address mask_full(int stage) const { return barrier(offsetof(SharedStorage, mask_full), stage); }
    __device__ __forceinline__ shared_address mask_empty(int stage) const { return barrier(offsetof(SharedStorage, mask_empty), stage); }

    __device__ __forceinline__ shared_address at(int offset, int index, int element_bytes) const {
        return storage + offset + index * element_bytes;
    }

    __device__ __forceinline__ shared_address barrier(int offset, int index) const {
        return barriers + (offset - int(offsetof(SharedStorage, q_full)) + 8 * index);
    }
};

__device__ void init_barriers(const SharedAddresses& shared);  // Initialises each barrier with the number of arrivals that complete a phase

struct Params {
    tensor_map q;                         // (head_dim, seqlen_q, num_heads_q, batch)
    tensor_map k;                         // (head_dim, seqlen_kv, num_heads_kv, batch)
    tensor_map v;                         // (head_dim_v, seqlen_kv, num_heads_kv, batch)
    element* out;                         // (batch, seqlen_q, num_heads_q, head_dim_v); rows 16-byte aligned
    float* lse;                           // (batch, num_heads_q, seqlen_q); may be null; natural logarithm
    const uint8_t* mask;                  // (batch, num_heads_q, seqlen_q, seqlen_kv); not 0 = hidden
    int64_t out_batch_stride;             // strides are in elements
    int64_t out_row_stride;
    int64_t out_head_stride;
    int64_t mask_batch_stride;            // strides are in bytes, 0 where broadcast
    int64_t mask_row_stride;
    int64_t mask_head_stride;
    int32_t batch_size;                   // sequences
    int32_t num_heads_q;
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t head_dim_v;                   // of v and out in the call: whole chunks of 16 bytes
    int32_t num_tiles;                    // tiles of the grid
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    int32_t heads_per_l2_group;           // heads of the grid whose tiles are launched together
    int32_t num_l2_groups;                // the last group has the remaining heads
    int32_t diagonal_offset;              // query i is aligned with key i + diagonal_offset
    int32_t window_left;                  // keys before the diagonal that a query attends to
    int32_t window_right;                 // and after it
    int32_t mask_vector_width;            // bytes to which its rows are aligned: 16, 8, 4 or 1
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

__device__ Tile find_tile(const Params& params, int index);  // The tile with number `index` in launch order
__device__ int num_rows(const Params& params);  // Rows of a head of the grid
__device__ int query_of_row(const Params&, int row);  // The query of a row of a tile
// The offset of row `row` of the tile's head in an array, in elements from the start of the batch entry
__device__ int64_t row_offset(const Params&, const Tile& tile, int row, int64_t row_stride, int64_t head_stride);
// Visits the scores that a lane holds of a KV block
template <typename Visit> __device__ void for_each_score(float (&scores)[kBlockN / 2], Visit visit);

// ==== visible: which keys a row attends to, and which blocks of keys need a mask

// Keys [begin, end).
struct KeyRange {
    int begin;
    int end;
};

__device__ KeyRange keys_of_query(const Params& params, int query);  // The keys in the range of a query
// The union of the key ranges of rows [first_row, first_row + count)
__device__ KeyRange keys_of_some(const Params& params, int first_row, int count);
// The intersection of the key ranges of rows [first_row, first_row + count)
__device__ KeyRange keys_of_every(const Params& params, int first_row, int count);
__device__ uint32_t nonzero_bytes(uint32_t word);  // The top bit of each byte that is not 0

// A dense mask comes as bytes: not 0 hides the key. Warps of the producer warpgroup pack each block of the mask into bits and pass the bits
// to the consumers through a ring. A range of keys may go with the mask (keys_of_query): where it ends within a
// block, the bits of the keys outside are set as well, so that the consumers know of the mask alone. KV blocks of which no row of
// the tile sees a key are left out.
//
// Of every eight keys of a row, a lane holds the scores of two: 2 t and 2 t + 1, where t = lane % 4. An entry of the ring
// has a word for each row and t, so that a lane needs two words, and after them the index of the block. A negative index
// ends the tile.

// The bit, in the word of its row and t, of the key `key` (8 j or 8 j + 1) keys past the lane's first
__device__ constexpr int mask_bit(int key);
__device__ constexpr uint32_t mask_bits();  // The bits of a word that stand for a key

// An entry of the ring as a lane of a consumer warp needs it.
struct MaskedBlock {
    int index;
    uint32_t hidden[2];  // rows g and g + 8 of the warp's 16; bit set = hidden

    __device__ __forceinline__ void load(shared_address entry, int warp_row, int lane) {
        index = load_shared_32(entry + offsetof(MaskEntry, kv_block));
        if (index < 0) return;
        hidden[0] = load_shared_32(entry + 16 * warp_row + 4 * lane);
        hidden[1] = load_shared_32(entry + 16 * (warp_row + 8) + 4 * lane);
    }

    // Most KV blocks of some masks hide nothing of a warp's rows.
    __device__ __forceinline__ void apply_mask(float (&scores)[kBlockN / 2]) const {
        if (!__any_sync(0xffffffff, (hidden[0] | hidden[1]) & mask_bits())) return;
        for_each_score(scores, [&](int row, int key, float& score) {
            if (hidden[row / 8] & 1u << mask_bit(key)) score = -INFINITY;
        });
    }
};

constexpr int kMaskPieces = 2;  // of a row a lane reads 16 keys and 16 that come 64 later

// What a lane reads of a row of the mask in a block. kWhole: the row is aligned to 16 bytes, and every row's range has all keys of the
// block, so a piece is one load of 16 bytes. Otherwise a piece is loaded as five aligned words.
template <bool kWhole>
struct MaskRow {
    uint32_t words[kMaskPieces][5];
    int shift;  // bytes of a piece's first word before the piece

    // Reads the pieces from `key` on of the row at `source`, those before `end`. What is not read is hidden.
    __device__ __forceinline__ void load(const Params& params, const uint8_t* source, int key, int end) {
        shift = kWhole ? 0 : reinterpret_cast<uint64_t>(source) % 4;
#pragma unroll
        for (int piece = 0; piece < kMaskPieces; ++piece, key += 64) {
#pragma unroll
            for (int i = 0; i < 5; ++i) words[piece][i] = 0xffffffff;
            if (key >= end) continue;
            if constexpr (kWhole) {
                const uint4 loaded = load_global_128(source + key);
                words[piece][0] = loaded.x;
                words[piece][1] = loaded.y;
                words[piece][2] = loaded.z;
                words[piece][3] = loaded.w;
            } else {
#pragma unroll
                for (int i = 0; i < 5; ++i) words[piece][i] = load_word(params, source, key - shift + 4 * i);
            }
        }
    }

    // The four bytes from `first` on; those outside of the row, where nothing may be read, are hidden.
    static __device__ __forceinline__ uint32_t load_word(const Params& params, const uint8_t* source, int first) {
        if (first >= 0 && first + 4 <= params.seqlen_kv) return load_global_32(source + first);
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool inside = first + i >= 0 && first + i < params.seqlen_kv;
            const uint32_t byte = inside ? load_global_8(source + first + i) : 0xff;
            word |= byte << 8 * i;
        }
        return word;
    }

    // Hides the keys outside of [begin, end), both counted from the lane's first key.
    __device__ __forceinline__ void hide_outside(int begin, int end) {
#pragma unroll
        for (int piece = 0; piece < kMaskPieces; ++piece) {
#pragma unroll
            for (int i = 0; i < 5; ++i) {
                const int first = 64 * piece + 4 * i - shift;  // the key of the word's first byte
                words[piece][i] |= ~bytes_before(end - first) | bytes_before(begin - first);
            }
        }
    }

    // 0xff in the first n of four bytes.
    static __device__ __forceinline__ uint32_t bytes_before(int n) {
        return n <= 0 ? 0 : 0xffffffff >> 32 - 8 * min(n, 4);
    }

    // Byte t of the result is this lane's part of the word for lane t of four, in the order of mask_bit().
    __device__ __forceinline__ uint32_t pack() const {
        // Columns 0 to 3, and 4 to 7, of every eight: a byte for each, a bit in its upper half for each eight.
        uint32_t left = 0, right = 0;
#pragma unroll
        for (int piece = 0; piece < kMaskPieces; ++piece) {
            left |= nonzero_bytes(word(piece, 0)) >> 2 * piece | nonzero_bytes(word(piece, 2)) >> 2 * piece + 1;
            right |= nonzero_bytes(word(piece, 1)) >> 2 * piece | nonzero_bytes(word(piece, 3)) >> 2 * piece + 1;
        }
        // Bytes 2 t and 2 t + 1 share one; the bytes in between are not used.
        left = left & 0xf0f0f0f0 | left >> 12 & 0x0f0f0f0f;
        right = right & 0xf0f0f0f0 | right >> 12 & 0x0f0f0f0f;
        return __byte_perm(left, right, 0x6420);
    }

    __device__ __forceinline__ uint32_t word(int piece, int i) const {
        return __funnelshift_r(words[piece][i], words[piece][i + 1], 8 * shift);
    }
};

// Fills a warp's part of an entry, the groups of eight rows `warp`, `warp` + kMaskWarps and so on of the block at `first_key`
template <bool kWhole> __device__ bool pack_mask(const Params& params, const Tile& tile, shared_address entry, int first_key, bool inside,
    int warp, int lane);
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

__device__ int mapped_row(const Params& params, int key);  // The row of a key in the tensor maps of K and V
// Loads kBlockN rows of K or V of one head, panel by panel
template <int kPanelCount> __device__ void load_kv_block(shared_address destination, const tensor_map& map, shared_address full,
    int first_key, int head, int batch, int row_bytes = kPanelRowBytes);
// Loads K and V of a KV block, each when its buffer is empty
__device__ void produce_kv(const Params& params, const Tile& tile, int kv_block, const SharedAddresses& shared,
    RingPosition<kStages>& ring);
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

// The producer thread: Q of each tile, and K and V of its KV blocks, as fast as buffers become empty.
__device__ __forceinline__ void produce(const Params& params, const SharedAddresses& shared) {
    // All buffers are empty at first. A wait for parity 1 of a new mbarrier returns at once.
    RingPosition<kStages> ring;
    RingPosition<kQStages> q_ring;
    RingPosition<kMaskStages> mask_ring;
    // The KV block that the consumers visit next, as read_mask() says.
    auto next_block = [&] {
        mbarrier_wait(shared.mask_full(mask_ring.stage), mask_ring.parity);
        const int kv_block = load_shared_32(shared.mask(mask_ring.stage) + offsetof(MaskEntry, kv_block));
        mbarrier_arrive(shared.mask_empty(mask_ring.stage));
        mask_ring.advance();
        return kv_block;
    };
    for (TileSequence tiles; tiles.index < params.num_tiles; tiles.advance()) {
        const Tile tile = find_tile(params, tiles.index);
        mbarrier_wait(shared.q_empty(q_ring.stage), q_ring.parity ^ 1);
        load_q(params, tile, shared.q(q_ring.stage), shared.q_full(q_ring.stage));
        q_ring.advance();
        for (int kv_block = next_block(); kv_block >= 0; kv_block = next_block()) produce_kv(params, tile, kv_block, shared, ring);
    }
}

// A warp that reads the mask: an entry of the ring for each KV block with a visible key, and one that ends the tile. Blocks outside
// of the range of the tile's rows are not even read. It fills the ring before its readers need it: the producer thread and the consumer warps.
__device__ __forceinline__ void read_mask(const Params& params, const SharedAddresses& shared) {
    const int warp = threadIdx.x / 32 - 1;
    const int lane = threadIdx.x % 32;
    RingPosition<kMaskStages> ring;
    for (TileSequence tiles; tiles.index < params.num_tiles; tiles.advance()) {
        const Tile tile = find_tile(params, tiles.index);
        const KvBlocks blocks = find_kv_blocks(params, tile.first_row, kBlockM);
        const KeyRange every = keys_of_every(params, tile.first_row, kBlockM);
        const int end_of_tile = min(blocks.first, blocks.last + 1) - 1;  // past the last block to visit
        for (int kv_block = blocks.last; kv_block >= end_of_tile; --kv_block) {
            const shared_address entry = shared.mask(ring.stage);
            mbarrier_wait(shared.mask_empty(ring.stage), ring.parity ^ 1);
            if (kv_block > end_of_tile) {
                const int first_key = kv_block * kBlockN;
                const bool inside = first_key >= every.begin && first_key + kBlockN <= every.end;
                const bool visible = inside && params.mask_vector_width == 16
                                         ? pack_mask<true>(params, tile, entry, first_key, inside, warp, lane)
                                         : pack_mask<false>(params, tile, entry, first_key, inside, warp, lane);
                // An entry without a visible key is not passed on; the next block overwrites it.
                if (!barrier_red_or(kMaskBarrier, 32 * kMaskWarps, visible)) continue;
            }
            if (warp == 0 && lane == 0) store_shared_32(entry + offsetof(MaskEntry, kv_block), kv_block > end_of_tile ? kv_block : -1);
            mbarrier_arrive(shared.mask_full(ring.stage));
            ring.advance();
        }
    }
}

// A consumer warpgroup: 64 rows of each tile.
__device__ __forceinline__ void consume(const Params& params, const SharedAddresses& shared, int consumer) {
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

    RingPosition<kMaskStages> mask_ring;
    auto next_block = [&] {
        mbarrier_wait(shared.mask_full(mask_ring.stage), mask_ring.parity);
        MaskedBlock kv_block;
        kv_block.load(shared.mask(mask_ring.stage), warp_row, lane);
        mbarrier_arrive(shared.mask_empty(mask_ring.stage));
        mask_ring.advance();
        return kv_block;
    };

    for (TileSequence tiles; tiles.index < params.num_tiles; tiles.advance()) {
        const Tile tile = find_tile(params, tiles.index);
        MaskedBlock kv_block = next_block();
        const bool visible = kv_block.index >= 0;
        const int first_row = tile.first_row + warp_row;
        const shared_address q_smem = shared.q(q_ring.stage) + consumer * 64 * kPanelRowBytes;
        mbarrier_wait(shared.q_full(q_ring.stage), q_ring.parity);
        // All lanes must see this phase before lane 0 arrives on empty. A lane that still polls two phases later would wait forever.
        __syncwarp();
        float output[kHeadDimV / 2] = {};
        RowState rows;

        if (!visible) release(shared.q_empty(q_ring.stage));  // Q is loaded for every tile, even one without a visible block
        // Finishes the scores of a KV block: once for each KV block, between Q K^T and softmax.
        auto finish_scores = [&](float (&scores)[kBlockN / 2], const MaskedBlock& masked) {
            masked.apply_mask(scores);
        };

        if (visible) {
            float scores[kBlockN / 2];
            mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
            begin_turn();
            mma_qk(scores, q_smem, shared.k(k_ring.stage));
            end_turn();
            // The first block, whose Q K^T is issued: wait for S, release K. Softmax turns S into P.
            wgmma_wait<0>();
            pin_registers(scores);
            release(shared.k_empty(k_ring.stage));
            k_ring.advance();
            finish_scores(scores, kv_block);
            softmax_step(scores, rows, params.scale_log2);
            PackedScores<kBlockN> p;
            p.set(scores);
            for (kv_block = next_block(); kv_block.index >= 0; kv_block = next_block()) {
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
                const bool moved = softmax_step(scores, rows, params.scale_log2);
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
flash_fwd_hdim128_fp16_dense_sm90(const __grid_constant__ Params params) {
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
        if (threadIdx.x == 0) produce(params, shared);
        if (threadIdx.x >= 32) read_mask(params, shared);
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
        mbarrier_init(shared.k_full(stage), 1);
        mbarrier_init(shared.v_full(stage), 1);
        mbarrier_init(shared.k_empty(stage), 4 * kConsumers);
        mbarrier_init(shared.v_empty(stage), 4 * kConsumers);
    }
    for (int stage = 0; stage < kMaskStages; ++stage) {
        mbarrier_init(shared.mask_full(stage), 32 * kMaskWarps);
        mbarrier_init(shared.mask_empty(stage), 128 * kConsumers + 1);
    }
}

__device__ __forceinline__ Tile find_tile(const Params& params, int index) {
    // Heads are launched in L2 groups, so that tiles of a head run at about the same time and share its K and V in L2. Within an L2 group the last
    // row block of each head comes first. Under a diagonal it is the longest, so the grid ends with short tiles and few SMs are idle.
    const int num_heads = params.num_heads_q;
    const int l2_group = min(index / (params.heads_per_l2_group * params.num_row_blocks), params.num_l2_groups - 1);
    const int first_head = l2_group * params.heads_per_l2_group;
    const bool is_last = l2_group == params.num_l2_groups - 1;
    const int l2_group_heads = is_last ? num_heads * params.batch_size - first_head : params.heads_per_l2_group;
    const int index_in_l2_group = index - first_head * params.num_row_blocks;
    const int row_block = index_in_l2_group / l2_group_heads;
    const int head_of_batch = first_head + index_in_l2_group - row_block * l2_group_heads;

    Tile tile;
    tile.batch = head_of_batch / num_heads;
    const int head = head_of_batch - tile.batch * num_heads;  // of the grid
    tile.head = head;
    tile.kv_head = head;
    tile.first_row = (params.num_row_blocks - 1 - row_block) * kBlockM;
    return tile;
}

__device__ __forceinline__ int num_rows(const Params& params) { return params.seqlen_q; }

__device__ __forceinline__ int query_of_row(const Params&, int row) { return row; }

__device__ __forceinline__ int64_t row_offset(const Params&, const Tile& tile, int row, int64_t row_stride,
                                              int64_t head_stride) {
    return row * row_stride + tile.head * head_stride;
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

// The keys in the range of a query: a window around its diagonal. A side without a bound is past every key.
__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int query) {
    const int diagonal = query + params.diagonal_offset;
    return {max(0, diagonal - params.window_left), max(0, min(params.seqlen_kv, diagonal + params.window_right + 1))};
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

__device__ __forceinline__ uint32_t nonzero_bytes(uint32_t word) {
    // The sum carries into a byte's top bit exactly when one of its lower seven bits is set, and never out of it.
    return ((word & 0x7f7f7f7f) + 0x7f7f7f7f | word) & 0x80808080;
}

__device__ constexpr int mask_bit(int key) { return key % 64 / 16 * 8 + 7 - 4 * (key % 8) - key / 64 * 2 - key / 8 % 2; }

__device__ constexpr uint32_t mask_bits() {
    uint32_t bits = 0;
    for (int key = 0; key < kBlockN; key += 8) bits |= 1u << mask_bit(key) | 1u << mask_bit(key + 1);
    return bits;
}

// Fills a warp's part of an entry, the groups of eight rows `warp`, `warp` + kMaskWarps and so on of the block at
// `first_key`. That block is `inside` if every row's range has all of its keys. Returns whether this lane has met a visible key.
template <bool kWhole>
__device__ __forceinline__ bool pack_mask(const Params& params, const Tile& tile, shared_address entry, int first_key,
                                          bool inside, int warp, int lane) {
    // Groups that are read at once.
    constexpr int kBatch = kWhole ? (kBlockM == 128 && kHeadDim <= 128 ? 6 : 3) : (kHeadDim > 128 ? 1 : 2);
    const int end_row = min(tile.first_row + kBlockM, num_rows(params));
    const int end_key = min(first_key + kBlockN, params.seqlen_kv);
    const uint8_t* mask = params.mask + tile.batch * params.mask_batch_stride;
    bool visible = false;
#pragma unroll 1
    for (int first = warp; first < kBlockM / 8; first += kBatch * kMaskWarps) {
        MaskRow<kWhole> rows[kBatch];
        int lane_row = 8 * first + lane / 4;  // in the tile; the lane's others are a constant further
        opaque(lane_row);  // all rows follow from it here, else each is kept in a register from tile to tile
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = tile.first_row + lane_row + 8 * kMaskWarps * i;
            const int64_t offset = row_offset(params, tile, row, params.mask_row_stride, params.mask_head_stride);
            rows[i].load(params, mask + offset, first_key + 16 * (lane % 4), row < end_row ? end_key : 0);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = lane_row + 8 * kMaskWarps * i;
            if (!kWhole && !inside) {
                const KeyRange keys = keys_of_query(params, query_of_row(params, tile.first_row + row));
                const int lane_key = first_key + 16 * (lane % 4);
                rows[i].hide_outside(keys.begin - lane_key, keys.end - lane_key);
            }
            const uint32_t hidden = rows[i].pack();
            visible |= hidden != 0xffffffff;
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                if (row < kBlockM) store_shared_8(entry + 4 * (4 * row + t) + lane % 4, hidden >> 8 * t);
            }
        }
    }
    return visible;
}
// ====

__device__ __forceinline__ KvBlocks find_kv_blocks(const Params& params, int first_row, int count) {
    const KeyRange keys = keys_of_some(params, first_row, count);
    return {keys.begin / kBlockN, (keys.end + kBlockN - 1) / kBlockN - 1};
}

__device__ __forceinline__ void load_q(const Params& params, const Tile& tile, shared_address destination, shared_address full) {
    mbarrier_arrive_expect_tx(full, kQBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
        tma_load_4d(destination + panel * kBlockM * kPanelRowBytes, params.q, full, panel * kPanelColumns, tile.first_row,
                    tile.head, tile.batch);
    }
}

// The row of a key in the tensor maps of K and V. The maps have the keys that some query sees. For other keys TMA brings zeros, since a NaN in
// memory would give 0 * NaN, which is NaN.
__device__ __forceinline__ int mapped_row(const Params& params, int key) { return key - keys_of_query(params, 0).begin; }

// Loads kBlockN rows of K or V of one head, panel by panel. Rows and columns outside of the array become zeros.
template <int kPanelCount>
__device__ __forceinline__ void load_kv_block(shared_address destination, const tensor_map& map, shared_address full,
                                              int first_key, int head, int batch, int row_bytes) {
    mbarrier_arrive_expect_tx(full, kPanelCount * kBlockN * row_bytes);
#pragma unroll
    for (int panel = 0; panel < kPanelCount; ++panel) {
        tma_load_4d(destination + panel * kBlockN * row_bytes, map, full, panel * kPanelColumns, first_key, head, batch);
    }
}

__device__ __forceinline__ void produce_kv(const Params& params, const Tile& tile, int kv_block, const SharedAddresses& shared,
                                           RingPosition<kStages>& ring) {
    mbarrier_wait(shared.k_empty(ring.stage), ring.parity ^ 1);
    load_kv_block<kPanels>(shared.k(ring.stage), params.k, shared.k_full(ring.stage), mapped_row(params, kv_block * kBlockN), tile.kv_head,
                           tile.batch);
    mbarrier_wait(shared.v_empty(ring.stage), ring.parity ^ 1);
    load_kv_block<kPanelsV>(shared.v(ring.stage), params.v, shared.v_full(ring.stage), mapped_row(params, kv_block * kBlockN), tile.kv_head,
                            tile.batch);
    ring.advance();
}

// The wgmmas of this kernel. They compute d = a . b of a warpgroup, or d += a . b if `accumulate`: a is 64 x 16, b 16 x N, and the accumulator d
// 64 x N in fp32. Thread (g, t) = (lane / 4, lane % 4) of warp w holds d[4 j + e]: row 16 w + g + 8 (e / 2), column 8 j + 2 t + e % 2.
#ifndef FLASHGEN_SIMULATOR  // the simulator emulates them in C++

// wgmma.mma_async.m64n128k16: a and b in shared memory under descriptors, both with the K dimension contiguous.
__device__ __forceinline__ void wgmma_m64n128k16_fp16_ss(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
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
__device__ __forceinline__ void wgmma_m64n128k16_fp16_rs(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
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
        wgmma_m64n128k16_fp16_ss(scores, q + ((panel * kBlockM * kPanelRowBytes + byte) >> 4),
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
        wgmma_m64n128k16_fp16_rs(output, p.fragment[step], v + (16 * step * kPanelRowBytes >> 4), 1);
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
        moves |= block_max[half] > __fadd_rd(rows.row_max[half], kSlack + kPBias);
    }
    moves = __any_sync(0xffffffff, moves);
    if (moves) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float previous = rows.row_max[half];
            rows.row_max[half] = fmaxf(previous, quad_max(block_max[half]) - kPBias);
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
            const int64_t batch_offset = int64_t(tile.batch) * params.num_heads_q * params.seqlen_q;
            store_global_32(params.lse + batch_offset + row_offset(params, tile, row, 1, params.seqlen_q),
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

static_assert(kProducerRegisters <= kConsumerRegisters, "the producer gives registers to the consumers");
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * kLaunchRegisters, "consumers would wait for ever");
static_assert(sizeof(SharedStorage) + 1024 == 173232, "launcher and kernel agree on shared memory");
static_assert(kBlockM % 64 == 0 && kBlockN % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "whole wgmmas");
static_assert(kBlockN * kPanelRowBytes % 1024 == 0, "stages begin where the swizzle does");
static_assert(kBlockN <= 128, "a lane holds its share of a row of the mask in 32 bits");
static_assert(sizeof(Params) == 512 && offsetof(Params, q) == 0 && offsetof(Params, k) == 128 && offsetof(Params, v) == 256);
static_assert(offsetof(Params, out) == 384 && offsetof(Params, lse) == 392 && offsetof(Params, mask) == 400);
static_assert(offsetof(Params, out_batch_stride) == 408 && offsetof(Params, out_row_stride) == 416);
static_assert(offsetof(Params, out_head_stride) == 424 && offsetof(Params, mask_batch_stride) == 432);
static_assert(offsetof(Params, mask_row_stride) == 440 && offsetof(Params, mask_head_stride) == 448);
static_assert(offsetof(Params, batch_size) == 456 && offsetof(Params, num_heads_q) == 460 && offsetof(Params, seqlen_q) == 464);
static_assert(offsetof(Params, seqlen_kv) == 468 && offsetof(Params, head_dim_v) == 472 && offsetof(Params, num_tiles) == 476);
static_assert(offsetof(Params, num_row_blocks) == 480 && offsetof(Params, heads_per_l2_group) == 484);
static_assert(offsetof(Params, num_l2_groups) == 488 && offsetof(Params, diagonal_offset) == 492);
static_assert(offsetof(Params, window_left) == 496 && offsetof(Params, window_right) == 500);
static_assert(offsetof(Params, mask_vector_width) == 504 && offsetof(Params, scale_log2) == 508);
static_assert(kSlack + kPBias <= 15.0f, "P stays below 2^16, the end of fp16");
