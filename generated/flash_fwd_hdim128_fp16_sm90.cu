// flash_fwd_hdim128_fp16_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype fp16, mask_type none, sinks none, dropout none, gqa mha
// tile      block_m 192, block_n 80, q_stages 2, stages 3, panel 64, producer_registers 32
// block     512 threads, 222336 bytes of dynamic shared memory
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
//   warpgroup 0          the producer, kProducerRegisters = 32 a thread
//     thread 0           produce(): loads Q, K and V by TMA
//   warpgroup 1 + c      consume(): S, softmax and O of 64 rows, as consumer c of 3, kConsumerRegisters a thread
//
//   SharedStorage        bytes
//   q                    49152  x 2  Q of a tile, then its O on the way out
//   k                    20480  x 3  K of a KV block
//   v                    20480  x 3  V of a KV block
//   mbarriers            8 each; and 1024 more, so that SharedStorage begins at a multiple of 1024
//
//   barrier              arrivals of a phase                                              who waits
//   q_full               1: the producer, and the bytes of TMA                            consumers
//   q_empty              kConsumers: one thread of each, after TMA has read O from q      producer
//   k_full, v_full       1: the producer, and the bytes of TMA                            consumers
//   k_empty, v_empty     4 kConsumers: lane 0 of each warp, once its MMAs have read it    producer
//   kStoreBarrier        128: a consumer, when its O is in q                              the same consumer, before TMA reads O
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
constexpr int kBlockM = 192;  // query rows of a tile
constexpr int kBlockN = 80;  // keys of a KV block
constexpr int kQStages = 2;  // Q buffers
constexpr int kStages = 3;  // K buffers, and V buffers
constexpr int kConsumers = 3;  // consumer warpgroups, 64 rows each
constexpr int kThreads = 128 * (1 + kConsumers);  // warpgroup 0 is the producer

// Registers of a thread. At launch all threads have equal shares of 65,536 registers. setmaxnreg moves registers between warpgroups: consumers
// share the registers that the producer gives up, at most 240 a thread. If the share at launch is larger than kConsumerRegisters, ptxas lowers
// it to kConsumerRegisters.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = 32;
constexpr int kRegistersLeft = ((1 + kConsumers) * kLaunchRegisters - kProducerRegisters) / kConsumers / 8 * 8;
constexpr int kConsumerRegisters = kRegistersLeft < 240 ? kRegistersLeft : 240;

enum NamedBarrier : int {  // __syncthreads() has the number 0
    kTurnBarrier = 1,  // + consumer
    kLastTurnBarrier = kTurnBarrier + kConsumers - 1,  // of the last consumer
    kStoreBarrier,  // + consumer
};

// Shared memory holds panels of 64 columns. TMA swizzles the 128 bytes of each row.
constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = kPanelColumns * sizeof(element);
constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;  // of Q and K
constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;  // of V and O

// Begins at a multiple of 1024 bytes. The swizzle XORs bits of the address, so its pattern repeats every 1024 bytes.
struct SharedStorage {
    element q[kQStages][kPanels][kBlockM][kPanelColumns];
    element k[kStages][kPanels][kBlockN][kPanelColumns];
    element v[kStages][kPanelsV][kBlockN][kPanelColumns];
    uint64_t q_full[kQStages];
    uint64_t q_empty[kQStages];
    uint64_t k_full[kStages];
    uint64_t k_empty[kStages];
    uint64_t v_full[kStages];
    uint64_t v_empty[kStages];
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

    // Barriers.
    __device__ __forceinline__ shared_address q_full(int stage) const { return barrier(offsetof(SharedStorage, q_full), stage); }
    __device__ __forceinline__ shared_address q_empty(int stage) const { return barrier(offsetof(SharedStorage, q_empty), stage); }
    __device__ __forceinline__ shared_address k_full(int stage) const { return barrier(offsetof(SharedStorage, k_full), stage); }
    __device__ __forceinline__ shared_address k_empty(int stage) const { return barrier(offsetof(SharedStorage, k_empty), stage); }
    __device__ __forceinline__ shared_address v_full(int stage) const { return barrier(offsetof(SharedStorage, v_full), stage); }
    __device__ __forceinline__ shared_address v_empty(int stage) const { return barrier(offsetof(SharedStorage, v_empty), stage); }

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
    tensor_map out;                       // (head_dim_v, seqlen_q, num_heads_q, batch)
    float* lse;                           // (batch, num_heads_q, seqlen_q); may be null; natural logarithm
    int32_t batch_size;                   // sequences
    int32_t num_heads_q;
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t num_tiles;                    // tiles of the grid
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    int32_t heads_per_l2_group;           // heads of the grid whose tiles are launched together
    int32_t num_l2_groups;                // the last group has the remaining heads
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

__device__ KeyRange keys_of_query(const Params& params, int);  // The keys that a query attends to
// The union of the key ranges of rows [first_row, first_row + count)
__device__ KeyRange keys_of_some(const Params& params, int first_row, int count);

// A mask of a row is a word of bits, because one R2P instruction turns seven bits of a byte into predicates, and a comparison sets only one.
// A lane holds two of every eight keys of a row. The word has a bit for each of them; the top bit is the first key.
using key_word = uint32_t;  // a bit for each key of a lane

__device__ constexpr key_word key_bit(int key);  // The bit of a key
// The bits of the lane's keys from `key` on, in the KV block at `first_key`
__device__ key_word bits_from(int key, int first_key, int lane);
// Hides the keys of the last KV block, at `first_key`, that are past the sequence
__device__ void apply_mask(const Params& params, float (&scores)[kBlockN / 2], key_word hidden, int first_key);
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

    __device__ __forceinline__ TileSequence() : index(block_index()), step(gridDim.x) {}

    __device__ __forceinline__ void advance() { index += step; }
};

__device__ int mapped_row(const Params&, int key);  // The row of a key in the tensor maps of K and V
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
__device__ int swizzled(int row, int chunk);  // The place of a 16-byte chunk of a row under the swizzle of 128 bytes
// Normalises O, rounds it and lets TMA write it
__device__ void store_tile(const Params& params, const Tile& tile, const float (&output)[kHeadDimV / 2], const RowState& rows,
    int first_row, int lane, shared_address staging, int consumer);

// The producer thread: Q of each tile, and K and V of its KV blocks, as fast as buffers become empty.
__device__ __forceinline__ void produce(const Params& params, const SharedAddresses& shared) {
    // All buffers are empty at first. A wait for parity 1 of a new mbarrier returns at once.
    RingPosition<kStages> ring;
    RingPosition<kQStages> q_ring;
    for (TileSequence tiles; tiles.index < params.num_tiles; tiles.advance()) {
        const Tile tile = find_tile(params, tiles.index);
        mbarrier_wait(shared.q_empty(q_ring.stage), q_ring.parity ^ 1);
        load_q(params, tile, shared.q(q_ring.stage), shared.q_full(q_ring.stage));
        q_ring.advance();
        const KvBlocks blocks = find_kv_blocks(params, tile.first_row, kBlockM);
#pragma unroll 1  // the loop waits for copies: unrolling would only lengthen the compile
        for (int kv_block = blocks.last; kv_block >= blocks.first; --kv_block) produce_kv(params, tile, kv_block, shared, ring);
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

    // O of a tile is stored through the buffer of its Q. The buffer is empty once TMA has read O. The thread that started the stores waits for TMA
    // while the next tile's first MMA runs. This delays the load of Q of the tile after the next one, which no consumer needs yet.
    bool store_in_flight = false;
    auto release_previous_q = [&] {
        static_assert(kQStages == 2, "the previous tile's Q is in the other buffer");
        if (store_in_flight && threadIdx.x % 128 == 0) {
            tma_store_wait_read<0>();
            mbarrier_arrive(shared.q_empty(q_ring.stage ^ 1));
        }
        store_in_flight = false;
    };
    // The last KV block, in which a sequence may end, is the same for all tiles. seqlen_kv >= 1: an empty array has no tensor map.
    const int last_block = (params.seqlen_kv - 1) / kBlockN;
    const key_word hidden = bits_from(params.seqlen_kv, last_block * kBlockN, lane);

    TileSequence tiles;
    Tile tile = find_tile(params, tiles.index);
    shared_address q_smem;
    float scores[kBlockN / 2];
    float output[kHeadDimV / 2] = {};
    RowState rows;
    // Starts the first MMA of a tile.
    auto start_tile = [&] {
        q_smem = shared.q(q_ring.stage) + consumer * 64 * kPanelRowBytes;
        mbarrier_wait(shared.q_full(q_ring.stage), q_ring.parity);
        mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
        begin_turn();
        mma_qk(scores, q_smem, shared.k(k_ring.stage));
        end_turn();
    };
    // Finishes the scores of a KV block: once for each KV block, between Q K^T and softmax.
    auto finish_scores = [&](float (&scores)[kBlockN / 2], int kv_block) {
    };
    // Hides the keys past the sequence in the last KV block, which is the first to be visited. No other block needs a mask.
    auto hide_past_sequence = [&](float (&scores)[kBlockN / 2], int kv_block) {
        if ((kv_block + 1) * kBlockN > params.seqlen_kv) apply_mask(params, scores, hidden, kv_block * kBlockN);
    };

    start_tile();
    while (true) {
        int kv_block = last_block;
        // The first block, whose Q K^T is issued: wait for S, release K. Softmax turns S into P.
        wgmma_wait<0>();
        pin_registers(scores);
        release(shared.k_empty(k_ring.stage));
        k_ring.advance();
        finish_scores(scores, kv_block);
        hide_past_sequence(scores, kv_block);
        softmax_step(scores, rows, params.scale_log2);
        PackedScores<kBlockN> p;
        p.set(scores);
        release_previous_q();
        for (--kv_block; kv_block >= 0; --kv_block) {
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
        // P V of the last block: wait for V, issue outside of a turn, wait, release V.
        mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
        mma_pv(output, p, shared.v(v_ring.stage));
        wgmma_wait<0>();
        pin_registers(output);
        release(shared.v_empty(v_ring.stage));
        v_ring.advance();
        tiles.advance();
        if (tiles.index >= params.num_tiles) break;
        // The next tile's first MMA is under way while this one's O is stored.
        const Tile finished = tile;
        const shared_address staging = q_smem;
        tile = find_tile(params, tiles.index);
        q_ring.advance();
        start_tile();
        store_tile(params, finished, output, rows, finished.first_row + warp_row, lane, staging, consumer);
        store_in_flight = true;
        // Reconverge: one thread has started the TMA stores. Unless the compiler knows that the warp is together, it keeps what is the
        // same in all lanes, as the ring's stages are, in a register of each instead of a uniform one.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kHeadDimV / 2; ++i) output[i] = 0.0f;
        rows = RowState();
    }
    store_tile(params, tile, output, rows, tile.first_row + warp_row, lane, q_smem, consumer);
    // TMA must have read the staged O before the warpgroup exits. The end of the grid waits for the writes.
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
    if (consumer == 0) begin_turn();  // takes the last turn: no arrival may be pending on a named barrier at the exit
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
flash_fwd_hdim128_fp16_sm90(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const SharedAddresses shared((to_shared(shared_memory) + 1023) / 1024 * 1024);
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        prefetch_tensormap(params.q);
        prefetch_tensormap(params.k);
        prefetch_tensormap(params.v);
        prefetch_tensormap(params.out);
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
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(params, shared, warpgroup - 1);
    }
}

// Initialises each barrier with the number of arrivals that complete a phase. One thread calls it, before other threads use the barriers.
__device__ __forceinline__ void init_barriers(const SharedAddresses& shared) {
    for (int stage = 0; stage < kQStages; ++stage) {
        mbarrier_init(shared.q_full(stage), 1);
        mbarrier_init(shared.q_empty(stage), kConsumers);
    }
    for (int stage = 0; stage < kStages; ++stage) {
        mbarrier_init(shared.k_full(stage), 1);
        mbarrier_init(shared.v_full(stage), 1);
        mbarrier_init(shared.k_empty(stage), 4 * kConsumers);
        mbarrier_init(shared.v_empty(stage), 4 * kConsumers);
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
    tile.first_row = row_block * kBlockM;
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

// The keys that a query attends to: all.
__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int) { return {0, params.seqlen_kv}; }

// The union of the key ranges of rows [first_row, first_row + count). A range never begins or ends before the range of the previous row. KV
// blocks outside of the union are not visited.
__device__ __forceinline__ KeyRange keys_of_some(const Params& params, int first_row, int count) {
    const int last_row = min(first_row + count, num_rows(params)) - 1;
    return {keys_of_query(params, query_of_row(params, first_row)).begin,
            keys_of_query(params, query_of_row(params, last_row)).end};
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

// Hides the keys of the last KV block, at `first_key`, that are past the sequence: those in `hidden`.
__device__ __forceinline__ void apply_mask(const Params& params, float (&scores)[kBlockN / 2], key_word hidden, int first_key) {
    constexpr int kPart = kBlockN % 32 == 0 ? 32 : 16;  // keys, and those before them are left alone once all are visible
#pragma unroll
    for (int part = kBlockN - kPart; part >= 0; part -= kPart) {
        if (first_key + part + kPart <= params.seqlen_kv) break;
        for_each_score(scores, [&](int, int key, float& score) {
            if (key >= part && key < part + kPart && hidden & key_bit(key)) score = -INFINITY;
        });
    }
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

// The row of a key in the tensor maps of K and V. The maps end with the last key that any query attends to. For later keys TMA fills in zeros,
// because 0 times a NaN in memory would be NaN.
__device__ __forceinline__ int mapped_row(const Params&, int key) { return key; }

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

// wgmma.mma_async.m64n80k16: a and b in shared memory under descriptors, both with the K dimension contiguous.
__device__ __forceinline__ void wgmma_m64n80k16_fp16_ss(float (&d)[40], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39"
        "}, %40, %41, p, 1, 1, 0, 0;\n}\n"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
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
        wgmma_m64n80k16_fp16_ss(scores, q + ((panel * kBlockM * kPanelRowBytes + byte) >> 4),
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

__device__ __forceinline__ int swizzled(int row, int chunk) { return chunk ^ row % 8; }

// Normalises O, rounds it and lets TMA write it. `staging` is the warpgroup's rows of the Q buffer: only this warpgroup reads them, and it has
// finished. O is swizzled there as Q was. One thread of the warpgroup starts the TMA stores.
__device__ __forceinline__ void store_tile(const Params& params, const Tile& tile, const float (&output)[kHeadDimV / 2],
                                           const RowState& rows, int first_row, int lane, shared_address staging, int consumer) {
    float factor[2];
    finish_rows(params, tile, rows, first_row, lane, factor);
    const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;  // the row whose address this lane passes to stmatrix
#pragma unroll
    for (int n = 0; n < kHeadDimV / 8; n += 2) {
        // Rows 0 to 7 and 8 to 15 of eight columns, then of the next eight columns.
        uint32_t matrices[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            matrices[i] = pack<element>(output[4 * n + 2 * i] * factor[i % 2], output[4 * n + 2 * i + 1] * factor[i % 2]);
        }
        const shared_address panel = staging + 8 * n / kPanelColumns * kBlockM * kPanelRowBytes;
        // Lanes 0 to 15 give the rows of the first eight columns, lanes 16 to 31 the rows of the next eight.
        stmatrix_x4(panel + row * kPanelRowBytes + 16 * swizzled(row, 8 * n % kPanelColumns / 8 + lane / 16), matrices);
    }
    fence_proxy_async();  // TMA would not see the writes otherwise
    barrier_sync(kStoreBarrier + consumer, 128);
    const bool stores = threadIdx.x % 128 == 0;
    if (stores) {
#pragma unroll
        for (int panel = 0; panel < kPanelsV; ++panel) {
            tma_store_4d(params.out, staging + panel * kBlockM * kPanelRowBytes, panel * kPanelColumns,
                         tile.first_row + 64 * consumer, tile.head, tile.batch);
        }
        tma_store_commit();
    }
}

static_assert(kProducerRegisters <= kConsumerRegisters, "the producer gives registers to the consumers");
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * kLaunchRegisters, "consumers would wait for ever");
static_assert(sizeof(SharedStorage) + 1024 == 222336, "launcher and kernel agree on shared memory");
static_assert(kBlockM % 64 == 0 && kBlockN % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "whole wgmmas");
static_assert(kBlockN * kPanelRowBytes % 1024 == 0, "stages begin where the swizzle does");
static_assert(kHeadDimV <= kHeadDim, "O fits where its Q was");
static_assert(sizeof(Params) == 576 && offsetof(Params, q) == 0 && offsetof(Params, k) == 128 && offsetof(Params, v) == 256);
static_assert(offsetof(Params, out) == 384 && offsetof(Params, lse) == 512 && offsetof(Params, batch_size) == 520);
static_assert(offsetof(Params, num_heads_q) == 524 && offsetof(Params, seqlen_q) == 528 && offsetof(Params, seqlen_kv) == 532);
static_assert(offsetof(Params, num_tiles) == 536 && offsetof(Params, num_row_blocks) == 540);
static_assert(offsetof(Params, heads_per_l2_group) == 544 && offsetof(Params, num_l2_groups) == 548);
static_assert(offsetof(Params, scale_log2) == 552);
static_assert(kSlack + kPBias <= 15.0f, "P stays below 2^16, the end of fp16");
