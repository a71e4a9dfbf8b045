// flash_bwd_hdim192_bf16_causal_softcap_pair_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 192, head_dim_v 192, dtype bf16, mask_type causal, dropout none, gqa mha, dq_order none, score
//           softcap
// tile      block_m 64, block_n 64, stages 2, dout_stages 2, cluster 2, dq early, held_k 128, held_v 64,
//           producer_registers 24, consumer_registers 240 (pair)
// block     384 threads, 215136 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      flash_bwd_wide_sm90.yaml
// template  flash_bwd_wide_sm90.cu.j2
#include "flashgen/sm90.cuh"

// A thread block computes dK and dV of kBlockN keys of a head. It goes through the queries that attend to them, kBlockM a step:
//
//     S^T = K Q^T    P^T = 2^(scale_log2 S^T - lse_log2)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
//     dV += P^T dO   dK += dS^T Q                           dQ += dS K
//
// S is computed as its transpose, so that P^T and dS^T leave the MMA as the A operands of dV and dK. dV and dK stay in registers. All
// thread blocks of a head add their dQ to dq_accum in global memory, which is fp32. The convert kernel rounds it.
//
// Map
//   warpgroup 0          the producer, kProducerRegisters = 24 a thread
//     thread 0           start_loads(), produce(): load K and V, and Q, dO, LSE and delta of each step, by TMA
//     warp 3             clear_ahead(): clears dQ of a later head; then count_added(): counts this thread block
//   warpgroup 1          consume_dv(): S, P, dV and some columns of dQ. kConsumerRegisters = 240 a thread
//   warpgroup 2          consume_dk(): dP, dS, dK and other columns of dQ. kConsumerRegisters = 240 a thread
//
//   SharedStorage        bytes
//   k                    24576  x 1  K; at the end room to stage dK
//   v                    24576  x 1  V; at the end room to stage dV
//   q                    24576  x 2  Q of a step
//   dout                 24576  x 2  dO of a step
//   ds                   16384  x 2  dS^T of a step, and of the step before
//   peer_k               16384  x 1  the panels of the peer's K that have this thread block's columns of dQ
//   p                    16384  x 1  P of a step in fp32, from consume_dv() to consume_dk()
//   lse_log2             256    x 2  of the queries of a step
//   delta                256    x 2  of the queries of a step
//   mbarriers            8 each; and 1024 more, so that SharedStorage begins at a multiple of 1024
//
//   barrier              arrivals of a phase                                              who waits
//   q_full, dout_full    1: the producer, and the bytes of TMA                            consumers
//   empty                4 kConsumers: lane 0 of each warp, after its MMAs of a step      producer
//   p_full               4: lane 0 of each warp of consume_dv()                           consume_dk()
//   ds_ready             4 kConsumers: lane 0 of each warp; P, old dS read, dS written    consumers
//   kStoreBarrier        128: a consumer, once its dK or dV is staged                     the same consumer, before TMA reads it
//   kAddedBarrier        kAddedThreads: consumers, once all their dQ is added             count_added()
//   ds_received          1: a thread of consume_dk(), and the bytes that the peer sends   consumers
//   slot_free            4 kConsumers: lane 0 of each warp of the peer, its dS read       consume_dk(), before it overwrites dS
//
// Two thread blocks are a cluster. They have neighbouring blocks of keys, go through the same steps, and send each other their dS. Each
// computes half of the columns of dQ, over the keys of both, so a cluster adds half as much to memory.

using element = bf16;

constexpr int kHeadDim = 192;  // of Q and K
constexpr int kHeadDimV = 192;  // of V and dO
constexpr int kBlockM = 64;  // query rows of a step
constexpr int kBlockN = 64;  // keys of a thread block
constexpr int kStages = 2;  // buffers of Q
constexpr int kDoutStages = 2;  // buffers of dO
constexpr int kConsumers = 2;  // warpgroups 1 and 2
constexpr int kThreads = 128 * (1 + kConsumers);  // warpgroup 0 is the producer

// Registers of a thread. setmaxnreg moves registers between the warpgroups of a thread block. At launch a thread has at most an equal share of
// 65,536 registers, rounded down to a multiple of 8. ptxas lowers it to kConsumerRegisters where the share is larger.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

constexpr int kPanelColumns = 64;  // of a panel of shared memory
constexpr int kPanelRowBytes = kPanelColumns * sizeof(element);
constexpr int kPanels = kHeadDim / kPanelColumns;  // of Q and K
constexpr int kPanelsV = kHeadDimV / kPanelColumns;  // of V and dO

constexpr int kPeerPanels = 2;  // of the peer's K: the panels with this thread block's half of the columns of dQ

// The mbarriers of a thread block. The map above says who arrives and who waits.
struct Mbarriers {
    uint64_t p_full;                   // P of a step is written
    uint64_t ds_ready;                 // P is read, dS is written, dQ of the step before is computed
    uint64_t q_full[kStages];          // Q and LSE have arrived; with the first one K
    uint64_t dout_full[kDoutStages];   // dO and delta have arrived; with the first one V, and in a cluster the peer's K
    uint64_t empty[kStages];           // no warp reads the stage
    uint64_t ds_received[2];           // dS of a step has come from the peer; step i uses slot i % 2
    uint64_t slot_free[2];             // the peer has read dS that was sent to this slot
};

// Addresses of the mbarriers. A buffer is full when TMA has written its bytes, and empty when every consumer warp has released it.
struct Barriers {
    shared_address first;

    // Complete when the dV consumer has written P of a step.
    __device__ __forceinline__ shared_address p_full() const { return at(offsetof(Mbarriers, p_full) / 8); }
    // Complete when the dK consumer has read P of a step and has written its dS, and both have computed dQ of the step before. It completes once
    // more after the last step, when no warp reads K any longer.
    __device__ __forceinline__ shared_address ds_ready() const { return at(offsetof(Mbarriers, ds_ready) / 8); }
    __device__ __forceinline__ shared_address q_full(int stage) const { return at(offsetof(Mbarriers, q_full) / 8 + stage); }
    __device__ __forceinline__ shared_address dout_full(int stage) const { return at(offsetof(Mbarriers, dout_full) / 8 + stage); }
    __device__ __forceinline__ shared_address empty(int stage) const { return at(offsetof(Mbarriers, empty) / 8 + stage); }
    __device__ __forceinline__ shared_address ds_received(int slot) const { return at(offsetof(Mbarriers, ds_received) / 8 + slot); }
    // Complete when the peer has computed the dQ that reads dS of this slot. Then this thread block may overwrite the slot there, and the buffer
    // here that dS was copied from.
    __device__ __forceinline__ shared_address slot_free(int slot) const { return at(offsetof(Mbarriers, slot_free) / 8 + slot); }

    __device__ __forceinline__ shared_address at(int index) const { return first + 8 * index; }

    // One thread calls it, before other threads use the mbarriers.
    __device__ __forceinline__ void init() const {
        constexpr int kWarps = 4;  // of a consumer
        mbarrier_init(p_full(), kWarps);
        mbarrier_init(ds_ready(), 2 * kWarps);
        for (int slot = 0; slot < 2; ++slot) {
            mbarrier_init(ds_received(slot), 1);
            mbarrier_init(slot_free(slot), 2 * kWarps);
        }
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(q_full(stage), 1);
            mbarrier_init(dout_full(stage), 1);
            mbarrier_init(empty(stage), 2 * kWarps);
        }
    }
};

// Shared memory of a thread block. Rows of K, V, Q, dO and dS are in panels of 64 columns: 128 bytes a row, under the 128-byte swizzle. dS has
// two buffers, because dQ of a step is computed in the next step.
struct SharedStorage {
    element k[kPanels][kBlockN][kPanelColumns];
    element v[kPanelsV][kBlockN][kPanelColumns];
    element q[kStages][kPanels][kBlockM][kPanelColumns];
    element dout[kDoutStages][kPanelsV][kBlockM][kPanelColumns];
    element ds[2][2][kBlockN][kBlockM];  // dS^T of the thread block's keys, then of the peer's
    element peer_k[kPeerPanels][kBlockN][kPanelColumns];
    float p[kBlockM * kBlockN];  // P of a step, not yet rounded
    float lse_log2[kStages][kBlockM];
    float delta[kDoutStages][kBlockM];
    Mbarriers mbarriers;
};

// Sizes and byte offsets of these arrays, to be added to a shared_address, which is an integer.
constexpr int kKBytes = sizeof(SharedStorage::k);
constexpr int kVBytes = sizeof(SharedStorage::v), kVOffset = offsetof(SharedStorage, v);
constexpr int kQBytes = sizeof(SharedStorage::q) / kStages, kQOffset = offsetof(SharedStorage, q);
constexpr int kDoutBytes = sizeof(SharedStorage::dout) / kDoutStages, kDoutOffset = offsetof(SharedStorage, dout);
constexpr int kDsBytes = sizeof(SharedStorage::ds) / 2, kDsOffset = offsetof(SharedStorage, ds);
constexpr int kDsPanelBytes = kBlockN * kPanelRowBytes;  // of 64 queries
constexpr int kOwnDsBytes = kDsBytes / 2;  // of the thread block's keys
constexpr int kPeerKBytes = sizeof(SharedStorage::peer_k), kPeerKOffset = offsetof(SharedStorage, peer_k);
constexpr int kPOffset = offsetof(SharedStorage, p);
constexpr int kQueryValueBytes = kBlockM * sizeof(float);  // of lse_log2, and of delta
constexpr int kLseOffset = offsetof(SharedStorage, lse_log2);
constexpr int kDeltaOffset = offsetof(SharedStorage, delta);

enum NamedBarrier : int {  // __syncthreads() has the number 0
    kStoreBarrier = 1,  // + consumer: dK or dV of the warpgroup is in shared memory, 128 threads
    kAddedBarrier = 5,  // dQ is added: the consumers arrive, count_added() waits, kAddedThreads
};

struct Params {
    tensor_map q;                         // (head_dim, seqlen_q, num_heads_q, batch)
    tensor_map k;                         // (head_dim, seqlen_kv, num_heads_kv, batch)
    tensor_map v;                         // (head_dim_v, seqlen_kv, num_heads_kv, batch)
    tensor_map dout;                      // (head_dim_v, seqlen_q, num_heads_q, batch)
    tensor_map dk;                        // (head_dim, seqlen_kv, num_heads_kv, batch)
    tensor_map dv;                        // (head_dim_v, seqlen_kv, num_heads_kv, batch)
    const float* lse_log2;                // (heads, unit_rows): lse in log2 units; inf for a row that attends to no key
    const float* delta;                   // (heads, unit_rows): sum(dout * out) - dlse
    float* dq_accum;                      // (heads, unit_rows, kHeadDim): sums of dQ, in the order of dq_tiles
    int32_t* cleared;                     // (heads of the main grid): CTAs that have cleared their part of dq_accum
    int32_t* added;                       // (heads of the main grid): CTAs that have added all their dQ to dq_accum
    int32_t num_heads_q;
    int32_t num_heads_kv;
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t seqlen_kv;                    // keys of a sequence; of the longest one if lengths vary
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    int32_t batch_size;                   // sequences
    int32_t heads_per_l2_group;           // heads of the grid whose tiles are launched together
    int32_t clear_distance;               // CTAs of head h of the grid clear dq_accum of head h + clear_distance
    int32_t diagonal_offset;              // query i is aligned with key i + diagonal_offset
    float scale_log2;                     // softmax_scale * log2(e), above 0
    float softmax_scale;                  // the factor of Q K^T in the scores
    float score_constant_0;               // (softmax_scale / cap) * (sign(cap))
};

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

// The dV consumer passes P to the dK consumer in fp32, because dS needs P unrounded. If a score function has a derivative, the dV consumer
// passes P times the derivative. The accumulators of both have the same layout, so a thread reads what the same thread of the other warpgroup
// wrote: 16 bytes at a time, without bank conflicts.
constexpr int kVectorBytes = 4 * sizeof(float);

__device__ void store_p(const float (&p)[kBlockM / 2], shared_address p_smem);  // Stores P for the consumer of dK
__device__ void load_p(float (&p)[kBlockM / 2], shared_address p_smem);  // Reads P that the consumer of dV has stored

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
// Visits the scores that a lane holds of a step
template <typename Visit> __device__ void for_each_score(float (&scores)[kBlockM / 2], Visit visit);

// LSE or delta of the queries whose scores a lane holds, in pairs. They are loaded before the wait for the MMAs of these scores, so that the
// MMAs hide the latency of the loads.
struct QueryValues {
    float2 values[kBlockM / 8];

    __device__ __forceinline__ void load(shared_address smem, int lane) {
#pragma unroll
        for (int j = 0; j < kBlockM / 8; ++j) values[j] = load_shared_64(smem + (8 * j + lane % 4 * 2) * sizeof(float));
    }

    __device__ __forceinline__ float2 at(int j) const { return values[j]; }
};

// ==== score: changes q . k before the mask; its derivative is a factor of dS

// The score modification `softcap`: cap * tanh(score / cap)

// What all rows of a query head share: nothing.
struct ScoreHead {};

__device__ ScoreHead score_head(const Params&, int, int);

// What all keys of a row share.
struct ScoreRow {
    ScoreHead head;
};

__device__ ScoreRow score_row(const Params&, const ScoreHead& head, int);

struct ModifiedScore {
    float score;
    float derivative;  // d(score) / d(softmax_scale q . k), with all factors of the score
};

// The modified score and the derivative of key first_key + step, from q . k before any scale
__device__ ModifiedScore differentiated_score(const Params& params, const ScoreRow&, int, int, float product);

// The part of the modification that is equal for all scores of a row in a block. Here there is none.
struct ScoreOffset {
    __device__ __forceinline__ float add_to(float score) const { return score; }
};

__device__ ScoreOffset offset_of_row(const Params&, const ScoreRow&, int);  // The ScoreOffset of a row
// Replaces q . k by the modified scores of a query head, and writes the derivative of each score to `derivatives`
__device__ void modify_scores(const Params& params, int batch, int head, float (&scores)[kBlockM / 2], float (&derivatives)[kBlockM / 2],
    int lane_key, int lane_query);
__device__ void weigh(float (&derivatives)[kBlockM / 2], const float (&p)[kBlockM / 2]);  // Multiplies derivatives of scores by P^T
// ====

// ==== visible: which queries attend to a key, and which blocks of queries need a mask

// Queries [begin, end). Empty if begin >= end.
struct QueryRange {
    int begin;
    int end;
};

__device__ QueryRange queries_of_key(const Params& params, int key);  // The queries that attend to a key

// Blocks of kBlockM queries.
struct QueryBlocks {
    int first;
    int last;  // less than `first` if there are no blocks
};

// The blocks with a query that attends to a key of [first_key, first_key + kBlockN)
__device__ QueryBlocks find_query_blocks(const Params& params, int first_key);
// Masks the scores of queries that do not attend to their key
__device__ void apply_mask(const Params& params, float (&scores)[kBlockM / 2], int lane_key, int lane_query);
// ====

// Turns S^T into P^T = 2^(scale_log2 S - lse_log2)
__device__ void compute_p(float (&scores)[kBlockM / 2], const QueryValues& lse, float scale_log2);
// Turns dP^T into dS^T = P^T (dP^T - delta), without the factor softmax_scale
__device__ void compute_ds(float (&dp)[kBlockM / 2], const float (&p)[kBlockM / 2], const QueryValues& delta);

// The keys of a thread block, which computes their dK and dV and adds their share of dQ.
struct KeyBlock {
    int batch;
    int kv_head;
    int index;  // of the block in its head
    int first_key;
};

__device__ KeyBlock find_key_block(const Params& params, int index);  // The block of keys of a thread block

// A step of the main loop: a block of queries of a head.
struct Step {
    int block;
};

__device__ int kv_head_of(const Params&, const KeyBlock& block);  // The kv head of a block of keys
__device__ int head_of(const Params&, const KeyBlock& block, const Step&);  // The query head of a step
__device__ Step first_step(const Params&, const KeyBlock&, const QueryBlocks& queries);  // The first step of a thread block
__device__ Step next_step(const Step& step, const QueryBlocks&);  // The step after this one
// The wgmma descriptor of an operand in shared memory
__device__ uint64_t descriptor(shared_address start, int stride_bytes, int leading_bytes = 16);
__device__ int swizzled(int row, int chunk);  // The place of a 16-byte chunk of a row under the swizzle of 128 bytes
// Issues scores = A B^T of a warpgroup, 64 x kBlockM, over kColumns columns of A and B
template <int kColumns> __device__ void mma_scores(float (&scores)[kBlockM / 2], shared_address a_smem, shared_address b_smem);

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

// Issues sums += A B, 64 rows x 192 of a warpgroup, for example dV += P^T dO
__device__ void mma_gradient(float (&sums)[96], PackedScores<kBlockM>& scores, shared_address b_smem);
// Issues dQ (64 x 2 kCount) = dS K of a warpgroup over kBlockN keys, or += if `accumulate`
template <int kCount> __device__ void issue_dq(float (&dq)[kCount], uint64_t ds, uint64_t k, bool accumulate);
__device__ int mapped_row(const Params&, int key);  // The row of a key in the tensor maps of K and V
// Writes dS^T of a warp's 16 keys, which begin at `warp_key` of the block, to shared memory for the MMA of dQ
__device__ void store_ds(const PackedScores<kBlockM>& ds, shared_address ds_smem, int warp_key, int lane);
// Where a lane adds its elements of dQ of a step, from `first_column` on
__device__ float* dq_of(const Params& params, const KeyBlock& block, const Step& step, int first_column, int warp_row, int lane);
// Adds a warp's part of dQ, 16 rows x 2 * kCount columns, to tiles of dq_accum
template <int kCount> __device__ void add_dq(float* address, const float (&dq)[kCount]);
// Writes a warp's 16 rows of a gradient, times `factor` and rounded, to `staging`
template <int kColumns> __device__ void stage_gradient(const float (&sums)[kColumns / 2], float factor, shared_address staging, int lane);
// Lets TMA write a warpgroup's 64 rows of a gradient, times `factor` and rounded, from `staging`
template <int kColumns> __device__ void store_gradient(const tensor_map& map, const float (&sums)[kColumns / 2], float factor,
    shared_address staging, int first_row, int head, int batch, int barrier, int lane);
__device__ int head_of_grid(const Params& params, const KeyBlock& block);  // The index of a block's head in the grid, over all batch entries
__device__ int num_heads_of_grid(const Params& params);  // Heads of the grid, over the batch
__device__ int rows_of_head(const Params& params);  // Rows of dq_accum of a head of the grid
// Clears this thread block's part of dq_accum of a later head
__device__ void clear_ahead(const Params& params, const KeyBlock& block, int lane);
__device__ void await_cleared(const Params& params, const KeyBlock& block);  // Waits until dq_accum of the head is clear

constexpr int kAddedThreads = 128 * kConsumers + 32;  // at kAddedBarrier: the consumers, and the warp of count_added()

__device__ void count_added(const Params& params, const KeyBlock& block, int lane);  // Counts the thread block when all its dQ is added
__device__ int num_steps(const Params&, const QueryBlocks& queries);  // The number of steps of a thread block
// Starts loading kRows rows of a head, panel by panel
template <int kPanelCount, int kRows> __device__ void load_rows(shared_address destination, const tensor_map& map, shared_address full,
    int first_row, int head, int batch);

// Where TMA finds Q and dO of a step, and where their LSE and delta begin.
struct StepRows {
    int head;
    int batch;
    int row;
    int64_t unit_row;  // of lse_log2 and delta
};

__device__ StepRows rows_of(const Params& params, const KeyBlock& block, const Step& step);  // The rows of a step
// Starts loading Q and LSE of a step
__device__ void load_q(const Params& params, const StepRows& rows, shared_address shared, const Barriers& barriers, int stage,
    int more_bytes = 0);
// Starts loading dO and delta of a step
__device__ void load_dout(const Params& params, const StepRows& rows, shared_address shared, const Barriers& barriers, int stage,
    int more_bytes = 0);

// Bytes that dout_full(0) counts in its first phase besides dO and delta: V, and the peer's K for dQ.
constexpr int kBytesWithDout = kVBytes + kPeerKBytes;

// Starts the first loads of a thread block
__device__ void start_loads(const Params& params, const KeyBlock& block, shared_address shared, const Barriers& barriers);
// Whether the block that begins with `first_query` has a query that does not attend to all of a warp's 16 keys
__device__ bool needs_mask(const Params& params, int first_key, int first_query);
__device__ int rank_of(const KeyBlock& block);  // The rank of a thread block in its cluster
__device__ int peer_of(const KeyBlock& block);  // The rank of the other thread block of the cluster
__device__ int first_key_of_pair(const KeyBlock& block);  // The first key of the two thread blocks
__device__ int first_key_of_peer(const KeyBlock& block);  // The first key of the peer
// The blocks of queries that both thread blocks go through
__device__ QueryBlocks queries_of_block(const Params& params, const KeyBlock& block);
__device__ int first_peer_panel(const KeyBlock& block);  // The first panel of the peer's K that is loaded
// Starts loading kPeerPanels panels of the peer's K
__device__ void load_peer_k(const Params& params, const KeyBlock& block, shared_address shared, shared_address full);
// Tells the peer that this warp has read dS of a slot
__device__ void free_slot(const Barriers& barriers, int slot, const KeyBlock& block, int lane);

// A thread block computes half of the columns of dQ, over the keys of both. Its dK consumer has the outer panel of this half, its dV consumer
// the rest. Columns of the dK and the dV consumer, rank 0: [0, 64) and [64, 96); rank 1: [128, 192) and [96, 128).
constexpr int kDqColumnsOfDk = kPanelColumns;
constexpr int kDqColumnsOfDv = kHeadDim / 2 - kPanelColumns;

// The columns of dQ of a consumer: the first one, and its address in K and in the copy of the peer's K.
struct DqColumns {
    int first;
    shared_address k;
    shared_address peer_k;
};

__device__ DqColumns columns_from(int first, const KeyBlock& block, shared_address shared);  // The columns of dQ from `first` on
// Issues dQ = dS K over the keys of both thread blocks
template <int kCount> __device__ void mma_dq(float (&dq)[kCount], shared_address ds_smem, const DqColumns& columns);
__device__ void send_ds(shared_address rows, shared_address ds_received, int peer);  // Sends a warp's 16 keys of dS, at `rows`, to the peer
// Adds a warp's part of dQ of a step
template <int kCount> __device__ void add_dq_of_step(const Barriers&, int, float* own, const float (&dq)[kCount], int);

// Timeline of step i. Time runs down, an arrow is an mbarrier, a double one crosses the cluster. MMAs run in the order in which they are
// issued. The peer does the same with its keys.
//
//     consume_dv(), warpgroup 1                          consume_dk(), warpgroup 2                             peer
//     P^T(i) from S^T(i), write P(i)    -- p_full -->    wait for P(i)
//                                                        dS^T(i) from P^T(i) and dP^T(i)
//                                                        wait for the buffer of dS(i)    <== slot_free ==      has read dS(i - 2)
//     wait for the peer's dS(i - 1)                      write dS(i), wait for dS(i - 1) <== ds_received ==    has sent dS(i - 1)
//     issue dQ(i - 1)                                    issue dQ(i - 1)
//     issue dV += P^T(i) dO(i)                           issue dK += dS^T(i) Q(i)
//                                                        send dS(i)                       == ds_received ==>
//     wait for dQ(i - 1), add it       <- ds_ready ->    wait for dQ(i - 1), add it       == slot_free ==>     may overwrite dS(i - 1)
//     issue S^T(i + 1)                                   issue dP^T(i + 1)
//     wait for dV                       -- empty -->     wait for dK. The producer loads step i + 2
//     wait for S^T(i + 1)                                wait for dP^T(i + 1)

// The producer thread. start_loads() has loaded the first step.
//   each step   wait until the stage is empty; load Q, LSE, dO and delta.
__device__ __forceinline__ void produce(const Params& params, const KeyBlock& block, shared_address shared, const Barriers& barriers) {
    const QueryBlocks queries = queries_of_block(params, block);
    const int count = num_steps(params, queries);
    RingPosition<kStages> ring;
    Step step = first_step(params, block, queries);
    // Other thread blocks clear dq_accum. Wait for them before the load that lets the consumers add: Q of the second step, or dO if there is
    // only one step.
    await_cleared(params, block);
    if (count == 1) load_dout(params, rows_of(params, block, step), shared, barriers, 0, kBytesWithDout);
    // The wait for a stage that no step has used returns at once: the phase of parity 1 of a new mbarrier counts as ended.
#pragma unroll 1  // the producer warpgroup has few registers
    for (int left = count - 1; left > 0; --left) {
        step = next_step(step, queries);
        ring.advance();
        mbarrier_wait(barriers.empty(ring.stage), ring.parity ^ 1);
        const StepRows rows = rows_of(params, block, step);
        load_q(params, rows, shared, barriers, ring.stage);
        load_dout(params, rows, shared, barriers, ring.stage);  // dO and delta are in the stage of Q and LSE
    }
}

// The consumer of dV: warpgroup 1.
__device__ __forceinline__ void consume_dv(const Params& params, const KeyBlock& block, shared_address shared, const Barriers& barriers) {
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x % 128 / 32 * 16;  // the warp's first key of the block, and its first row of dQ
    auto release = [&](shared_address barrier) {  // once for the warp
        if (lane == 0) mbarrier_arrive(barrier);
    };
    const DqColumns columns = columns_from(kDqColumnsOfDk + rank_of(block) * kDqColumnsOfDv, block, shared);
    const QueryBlocks queries = queries_of_block(params, block);
    const int count = num_steps(params, queries);
    float dv[kHeadDimV / 2] = {};
    RingPosition<kStages> ring;
    Step step = first_step(params, block, queries);
    Step previous = step;
    float p[kBlockM / 2];  // S^T, then P^T
    QueryValues lse;
    const shared_address k_rows = shared;
    if (count > 0) {
        mbarrier_wait(barriers.q_full(0), 0);
        lse.load(shared + kLseOffset, lane);
        mma_scores<kHeadDim>(p, k_rows, shared + kQOffset);
        wgmma_wait<0>();
        pin_registers(p);
    }
    cluster_wait();  // the peer's barriers are initialised; p_full passes this on to the dK consumer

#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const shared_address dout_smem = shared + kDoutOffset + ring.stage * kDoutBytes;
        // 1. P^T from S^T.
        float derivatives[kBlockM / 2];  // of the scores, then times P^T
        modify_scores(params, block.batch, head_of(params, block, step), p, derivatives, block.first_key + warp_row + lane / 4,
                      step.block * kBlockM + lane % 4 * 2);
        if (needs_mask(params, block.first_key + warp_row, step.block * kBlockM)) {
            apply_mask(params, p, block.first_key + warp_row + lane / 4, step.block * kBlockM + lane % 4 * 2);
        }
        compute_p(p, lse, params.scale_log2);
        // 2. Write P for the dK consumer. Wait first until it has read P of the previous step. In the first step the wait returns at once: the phase
        // before the first one of a new mbarrier counts as complete.
        weigh(derivatives, p);
        mbarrier_wait(barriers.ds_ready(), (i + 1) % 2);
        store_p(derivatives, shared + kPOffset);
        __syncwarp();  // all lanes have written their P, and read LSE of the stage
        release(barriers.p_full());
        PackedScores<kBlockM> packed_p;
        packed_p.set(p);

        // 3. dQ = dS K of the previous step and dV += P^T dO: wait for the peer's dS and for dO, issue. The first step has no previous dS. It runs
        // the MMAs of dQ all the same, reads K as dS, and discards the result: with conditional MMAs ptxas would serialise all of them.
        const shared_address last_ds = i > 0 ? shared + kDsOffset + (i + 1) % 2 * kDsBytes : shared;
        if (i > 0) mbarrier_wait(barriers.ds_received((i + 1) % 2), (i - 1) / 2 % 2);
        mbarrier_wait(barriers.dout_full(ring.stage), ring.parity);
        float dq[kDqColumnsOfDv / 2];
        mma_dq(dq, last_ds, columns);
        mma_gradient(dv, packed_p, dout_smem);
        // 4. Wait for dQ, release dS of both thread blocks, add dQ to memory while dV runs.
        float* own_dq = dq_of(params, block, previous, columns.first, warp_row, lane);
        wgmma_wait<1>();
        release(barriers.ds_ready());
        if (i > 0) free_slot(barriers, (i + 1) % 2, block, lane);
        pin_registers(dq);
        if (i > 0) add_dq_of_step(barriers, i - 1, own_dq, dq, lane);

        // 5. S^T = K Q^T of the next step: wait for Q, issue. The last step has no next step. It runs the same MMAs, reads K as Q, and discards
        // the result.
        RingPosition<kStages> next = ring;
        next.advance();
        const bool is_last = i + 1 == count;
        if (!is_last) {
            mbarrier_wait(barriers.q_full(next.stage), next.parity);
            lse.load(shared + kLseOffset + next.stage * kQueryValueBytes, lane);
        }
        mma_scores<kHeadDim>(p, k_rows, is_last ? shared : shared + kQOffset + next.stage * kQBytes);
        // 6. Wait for dV, release Q and dO. Wait for S^T.
        wgmma_wait<1>();
        pin_registers(dv);
        release(barriers.empty(ring.stage));
        wgmma_wait<0>();
        pin_registers(p);
        ring = next;
        previous = step;
        step = next_step(step, queries);
    }

    if (count > 0) {
        float dq[kDqColumnsOfDv / 2];
        mbarrier_wait(barriers.ds_ready(), (count - 1) % 2);
        mbarrier_wait(barriers.ds_received((count - 1) % 2), (count - 1) / 2 % 2);
        mma_dq(dq, shared + kDsOffset + (count - 1) % 2 * kDsBytes, columns);
        wgmma_wait<0>();
        pin_registers(dq);
        free_slot(barriers, (count - 1) % 2, block, lane);
        add_dq_of_step(barriers, count - 1, dq_of(params, block, previous, columns.first, warp_row, lane), dq, lane);
    }
    barrier_arrive(kAddedBarrier, kAddedThreads);
    release(barriers.ds_ready());  // this warp no longer reads K
    // Write dV, staged over V. No warp reads V any longer: the dK consumer writes dS of the last step after its last MMA on V.
    store_gradient<kHeadDimV>(params.dv, dv, 1.0f, shared + kVOffset, block.first_key, kv_head_of(params, block), block.batch,
                              kStoreBarrier, lane);
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // TMA must read shared memory before the exit; the grid's end waits for the writes
}

// The consumer of dK: warpgroup 2.
__device__ __forceinline__ void consume_dk(const Params& params, const KeyBlock& block, shared_address shared, const Barriers& barriers) {
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x % 128 / 32 * 16;  // the warp's first key of the block, and its first row of dQ
    auto release = [&](shared_address barrier) {  // once for the warp
        if (lane == 0) mbarrier_arrive(barrier);
    };
    const int peer = peer_of(block);
    const DqColumns columns = columns_from(rank_of(block) * (kHeadDim - kDqColumnsOfDk), block, shared);
    const QueryBlocks queries = queries_of_block(params, block);
    const int count = num_steps(params, queries);
    float dk[kHeadDim / 2] = {};
    RingPosition<kStages> ring;
    Step step = first_step(params, block, queries);
    Step previous = step;
    float ds[kBlockM / 2];  // dP^T, then dS^T
    QueryValues delta;
    const shared_address v_rows = shared + kVOffset;
    if (count > 0) {
        mbarrier_wait(barriers.dout_full(0), 0);
        delta.load(shared + kDeltaOffset, lane);
        mma_scores<kHeadDimV>(ds, v_rows, shared + kDoutOffset);
        wgmma_wait<0>();
        pin_registers(ds);
    }

#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        // 1. Wait for P. dS^T = P^T (dP^T - delta).
        float p[kBlockM / 2];
        mbarrier_wait(barriers.p_full(), i % 2);
        load_p(p, shared + kPOffset);
        compute_ds(ds, p, delta);
        PackedScores<kBlockM> packed_ds;
        packed_ds.set(ds);
        // 2. Wait until the buffer is free, write dS. The buffer has dS of step i - 2. slot_free says that the peer has read its copy. The warps
        // of this thread block have read theirs: p_full of step i implies ds_ready of step i - 1, and so dQ of step i - 2 is computed. For i < 2
        // the wait returns at once.
        mbarrier_wait(barriers.slot_free(i % 2), (i / 2 + 1) % 2);
        const shared_address ds_smem = shared + kDsOffset + i % 2 * kDsBytes;
        store_ds(packed_ds, ds_smem, warp_row, lane);

        // 3. dQ = dS K of the previous step and dK += dS^T Q: wait for the peer's dS and for Q, issue. The first step has no previous dS. It runs
        // the MMAs of dQ all the same, reads K as dS, and discards the result: with conditional MMAs ptxas would serialise all of them.
        const shared_address last_ds = i > 0 ? shared + kDsOffset + (i + 1) % 2 * kDsBytes : shared;
        if (i > 0) mbarrier_wait(barriers.ds_received((i + 1) % 2), (i - 1) / 2 % 2);
        mbarrier_wait(barriers.q_full(ring.stage), ring.parity);
        mma_dq(ds, last_ds, columns);  // in the registers of dS, which is packed
        mma_gradient(dk, packed_ds, shared + kQOffset + ring.stage * kQBytes);
        // 4. Send dS to the peer while the MMAs run.
        // The copy and the MMAs of dQ in the next step read dS by the async proxy, so a fence comes first.
        fence_proxy_async();
        __syncwarp();  // all lanes have read P and delta, and written their dS
        // Announce the bytes that the peer sends. They may arrive before the announcement: the phase cannot complete without it.
        if (threadIdx.x % 128 == 0) mbarrier_arrive_expect_tx(barriers.ds_received(i % 2), kOwnDsBytes);
        if (lane == 0) send_ds(ds_smem + warp_row * kPanelRowBytes, barriers.ds_received(i % 2), peer);
        // 5. Wait for dQ, release P and dS of both thread blocks, add dQ to memory while dK runs.
        float* own_dq = dq_of(params, block, previous, columns.first, warp_row, lane);
        wgmma_wait<1>();
        release(barriers.ds_ready());
        if (i > 0) free_slot(barriers, (i + 1) % 2, block, lane);
        pin_registers(ds);
        if (i > 0) add_dq_of_step(barriers, i - 1, own_dq, ds, lane);

        // 6. dP^T = V dO^T of the next step: wait for dO, issue. The last step has no next step. It runs the same MMAs, reads K as V and as dO,
        // and discards the result: the dV consumer may be writing dV over V.
        RingPosition<kStages> next = ring;
        next.advance();
        const RingPosition<kStages>& dout_ring = next;
        const bool is_last = i + 1 == count;
        if (!is_last) {
            mbarrier_wait(barriers.dout_full(dout_ring.stage), dout_ring.parity);
            delta.load(shared + kDeltaOffset + dout_ring.stage * kQueryValueBytes, lane);
        }
        mma_scores<kHeadDimV>(ds, is_last ? shared : v_rows, is_last ? shared : shared + kDoutOffset + dout_ring.stage * kDoutBytes);
        // 7. Wait for dK, release Q and dO. Wait for dP^T.
        wgmma_wait<1>();
        pin_registers(dk);
        release(barriers.empty(ring.stage));
        wgmma_wait<0>();
        pin_registers(ds);
        ring = next;
        previous = step;
        step = next_step(step, queries);
    }

    if (count > 0) {
        float dq[kDqColumnsOfDk / 2];
        mbarrier_wait(barriers.ds_ready(), (count - 1) % 2);
        mbarrier_wait(barriers.ds_received((count - 1) % 2), (count - 1) / 2 % 2);
        mma_dq(dq, shared + kDsOffset + (count - 1) % 2 * kDsBytes, columns);
        wgmma_wait<0>();
        pin_registers(dq);
        free_slot(barriers, (count - 1) % 2, block, lane);
        add_dq_of_step(barriers, count - 1, dq_of(params, block, previous, columns.first, warp_row, lane), dq, lane);
    }
    barrier_arrive(kAddedBarrier, kAddedThreads);
    release(barriers.ds_ready());  // this warp no longer reads K
    mbarrier_wait(barriers.ds_ready(), count % 2);  // no warp reads K: dK is staged there
    // Wait until the peer has freed the last two slots: the copies of dS read this thread block's shared memory, and the peer arrives on slot_free
    // here. It is enough that this warpgroup waits, because shared memory lives until the last thread of the block exits.
    if (count > 1) mbarrier_wait(barriers.slot_free(count % 2), (count - 2) / 2 % 2);
    if (count > 0) mbarrier_wait(barriers.slot_free((count - 1) % 2), (count - 1) / 2 % 2);
    // Write dK, staged over K.
    store_gradient<kHeadDim>(params.dk, dk, params.softmax_scale, shared, block.first_key, kv_head_of(params, block), block.batch,
                             kStoreBarrier + 1, lane);
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // TMA must read shared memory before the exit; the grid's end waits for the writes
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
flash_bwd_hdim192_bf16_causal_softcap_pair_sm90(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const shared_address shared = (to_shared(shared_memory) + 1023) / 1024 * 1024;
    const Barriers barriers = {shared_address(shared + offsetof(SharedStorage, mbarriers))};
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        barriers.init();
        fence_mbarrier_init();
    } else if (threadIdx.x == 32) {
        prefetch_tensormap(params.q);
        prefetch_tensormap(params.k);
        prefetch_tensormap(params.v);
        prefetch_tensormap(params.dout);
        prefetch_tensormap(params.dk);
        prefetch_tensormap(params.dv);
    }
    cluster_arrive_relaxed();  // the dV consumer waits; the dK consumer waits for it (p_full); the producer sends nothing

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    const KeyBlock block = find_key_block(params, block_index());
    if (threadIdx.x == 0) start_loads(params, block, shared, barriers);
    __syncthreads();  // the barriers are initialised

    if (warpgroup == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x == 0) produce(params, block, shared, barriers);
        else if (threadIdx.x / 32 == 3) {
            clear_ahead(params, block, threadIdx.x % 32);  // clears dQ of a later head
            count_added(params, block, threadIdx.x % 32);  // counts this thread block when its dQ is added
        }
    } else if (warpgroup == 1) {
        setmaxnreg_inc<kConsumerRegisters>();
        consume_dv(params, block, shared, barriers);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume_dk(params, block, shared, barriers);
    }
}

__device__ __forceinline__ void store_p(const float (&p)[kBlockM / 2], shared_address p_smem) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; i += 4) {
        store_shared_128(p_smem + (i / 4 * 128 + threadIdx.x % 128) * kVectorBytes, p[i], p[i + 1], p[i + 2], p[i + 3]);
    }
}

__device__ __forceinline__ void load_p(float (&p)[kBlockM / 2], shared_address p_smem) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; i += 4) {
        const uint4 words = load_shared_128(p_smem + (i / 4 * 128 + threadIdx.x % 128) * kVectorBytes);
        p[i] = __uint_as_float(words.x);
        p[i + 1] = __uint_as_float(words.y);
        p[i + 2] = __uint_as_float(words.z);
        p[i + 3] = __uint_as_float(words.w);
    }
}

__device__ __forceinline__ int unit_rows(const Params& params) { return (params.seqlen_q + kRowUnit - 1) / kRowUnit * kRowUnit; }

__device__ __forceinline__ int64_t first_unit_row(const Params& params, int batch, int head) {
    return (int64_t(batch) * params.num_heads_q + head) * unit_rows(params);
}

__device__ __forceinline__ decltype(Params::dq_accum) dq_tiles(const Params& params, int batch, int head, int row) {
    return params.dq_accum + (first_unit_row(params, batch, head) + row) * kHeadDim;
}

// Visits the scores that a lane holds of a step. In visit(row, column, score), `row` is 0 or 8 and counts from the lane's first row: the warp's
// first row + lane / 4. `column` is 8 j or 8 j + 1 and counts from the lane's first column: the step's first column + lane % 4 * 2. Both are
// constants after unrolling. Rows of S^T are keys, and its columns queries. Rows of S are queries, and its columns keys.
template <typename Visit>
__device__ __forceinline__ void for_each_score(float (&scores)[kBlockM / 2], Visit visit) {
#pragma unroll
    for (int query = 0; query < kBlockM; query += 8) {
#pragma unroll
        for (int key = 0; key <= 8; key += 8) {
            visit(key, query, scores[query / 2 + key / 4]);
            visit(key, query + 1, scores[query / 2 + key / 4 + 1]);
        }
    }
}

// ==== score: changes q . k before the mask; its derivative is a factor of dS

__device__ __forceinline__ ScoreHead score_head(const Params&, int, int) {
    return {};
}

__device__ __forceinline__ ScoreRow score_row(const Params&, const ScoreHead& head, int) {
    ScoreRow row;
    row.head = head;
    return row;
}

// The modified score and the derivative of key first_key + step, from q . k before any scale.
// The exponent of P is this score times scale_log2, less row_max or the LSE.
__device__ __forceinline__ ModifiedScore differentiated_score(const Params& params, const ScoreRow&, int, int, float product) {
    const float tanh_0 = tanh_approx(product * params.score_constant_0);
    ModifiedScore modified;
    modified.score = tanh_0;
    modified.derivative = 1.0f - (tanh_0 * tanh_0);
    return modified;
}

// The ScoreOffset of a row. `lane_key` is the lane's first key of the block.
__device__ __forceinline__ ScoreOffset offset_of_row(const Params&, const ScoreRow&, int) { return {}; }

// Replaces q . k by the modified scores of a query head, and writes the derivative of each score to `derivatives`. `lane_key` and `lane_query` are the
// lane's first key and first query.
__device__ __forceinline__ void modify_scores(const Params& params, int batch, int head, float (&scores)[kBlockM / 2],
                                              float (&derivatives)[kBlockM / 2], int lane_key, int lane_query) {
    const ScoreHead of_head = score_head(params, batch, head);
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const ScoreRow of_query = score_row(params, of_head, min(lane_query + 8 * j + e, params.seqlen_q - 1));
            const ScoreOffset offset = offset_of_row(params, of_query, lane_key);
#pragma unroll
            for (int key8 = 0; key8 < 2; ++key8) {
                float& score = scores[4 * j + 2 * key8 + e];
                const ModifiedScore modified = differentiated_score(params, of_query, lane_key, 8 * key8, score);
                score = offset.add_to(modified.score);
                derivatives[4 * j + 2 * key8 + e] = modified.derivative;
            }
        }
    }
}

// Multiplies derivatives of scores by P^T. Where a key is hidden they may be infinite or NaN.
__device__ __forceinline__ void weigh(float (&derivatives)[kBlockM / 2], const float (&p)[kBlockM / 2]) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) derivatives[i] = p[i] == 0.0f ? 0.0f : p[i] * derivatives[i];
}
// ====

// ==== visible: which queries attend to a key, and which blocks of queries need a mask

// The queries that attend to a key: from its diagonal on; no queries for a key past the last.
__device__ __forceinline__ QueryRange queries_of_key(const Params& params, int key) {
    const int diagonal = key < params.seqlen_kv ? key - params.diagonal_offset : params.seqlen_q;
    return {max(diagonal, 0), params.seqlen_q};
}

__device__ __forceinline__ QueryBlocks find_query_blocks(const Params& params, int first_key) {
    const int begin = max(0, first_key - params.diagonal_offset);
    const int end = params.seqlen_q;
    if (begin >= end) return {0, -1};
    return {begin / kBlockM, (end - 1) / kBlockM};
}

// Masks the scores of queries that do not attend to their key. `lane_key` and `lane_query` are the lane's first key and first query.
__device__ __forceinline__ void apply_mask(const Params& params, float (&scores)[kBlockM / 2], int lane_key, int lane_query) {
    const QueryRange ranges[2] = {queries_of_key(params, lane_key), queries_of_key(params, lane_key + 8)};
    for_each_score(scores, [&](int key, int query, float& score) {
        const QueryRange& range = ranges[key / 8];
        if (query < range.begin - lane_query || query >= range.end - lane_query) score = -INFINITY;
    });
}
// ====

// Turns S^T into P^T = 2^(scale_log2 S - lse_log2). lse_log2 is +inf for queries that attend to no key and for queries past the last one: P is 0
// there, if S is finite.
__device__ __forceinline__ void compute_p(float (&scores)[kBlockM / 2], const QueryValues& lse, float scale_log2) {
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
        const float2 values = lse.at(j);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) scores[i] = exp2_approx(fmaf(scores[i], scale_log2, i % 2 ? -values.y : -values.x));
    }
}

__device__ __forceinline__ void compute_ds(float (&dp)[kBlockM / 2], const float (&p)[kBlockM / 2], const QueryValues& delta) {
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
        const float2 values = delta.at(j);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) dp[i] = p[i] * (dp[i] - (i % 2 ? values.y : values.x));
    }
}

// The block of keys of a thread block.
// Heads are launched in groups of heads_per_l2_group: about as many thread blocks as run at a time, but at least one head. The first blocks of all
// heads of a group are launched first, then the second ones. So the blocks of a head run at about the same time, and share its queries in L2.
__device__ __forceinline__ KeyBlock find_key_block(const Params& params, int index) {
    const int first_head = index / (params.heads_per_l2_group * params.num_row_blocks) * params.heads_per_l2_group;
    const int group_heads = min(params.heads_per_l2_group, params.batch_size * params.num_heads_kv - first_head);
    const int index_in_group = index - first_head * params.num_row_blocks;
    KeyBlock block;
    const int pair_in_group = index_in_group / 2;
    const int pairs_before = pair_in_group / group_heads;  // of its head
    const int head_of_batch = first_head + pair_in_group - pairs_before * group_heads;
    // Launch the first keys first: under a diagonal the most queries attend to them, so the grid ends with short blocks.
    block.index = 2 * pairs_before + index % 2;
    block.first_key = block.index * kBlockN;
    block.batch = head_of_batch / params.num_heads_kv;
    block.kv_head = head_of_batch - block.batch * params.num_heads_kv;
    return block;
}

__device__ __forceinline__ int kv_head_of(const Params&, const KeyBlock& block) { return block.kv_head; }

// The query head of a step: the same as the kv head, because each query head has its own kv head.
__device__ __forceinline__ int head_of(const Params&, const KeyBlock& block, const Step&) { return block.kv_head; }

// The first step of a thread block.
// Steps go from the last block of queries to the first. So all thread blocks of a head begin with the same block of queries, unless a left window
// ends earlier.
__device__ __forceinline__ Step first_step(const Params&, const KeyBlock&, const QueryBlocks& queries) { return {queries.last}; }

__device__ __forceinline__ Step next_step(const Step& step, const QueryBlocks&) { return {step.block - 1}; }

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

// wgmma.mma_async.m64n64k16: a and b in shared memory under descriptors, both MN-major: the M or N dimension is contiguous.
__device__ __forceinline__ void wgmma_m64n64k16_bf16_ss_mn(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 1, 1;\n}\n"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate));
}

// wgmma.mma_async.m64n32k16: a and b in shared memory under descriptors, both MN-major: the M or N dimension is contiguous.
__device__ __forceinline__ void wgmma_m64n32k16_bf16_ss_mn(float (&d)[16], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, p, 1, 1, 1, 1;\n}\n"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(accumulate));
}

// wgmma.mma_async.m64n192k16. A from registers: a[0] = (row g, columns 2 t, 2 t + 1), a[1] = (row g + 8, same columns), a[2], a[3] =
// columns 8 further: the accumulator layout, packed. b is MN-major.
__device__ __forceinline__ void wgmma_m64n192k16_bf16_rs(float (&d)[96], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, {"
        "%96, %97, %98, %99}, %100, p, 1, 1, 1;\n}\n"
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
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
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

__device__ __forceinline__ int swizzled(int row, int chunk) { return chunk ^ row % 8; }

// Issues scores = A B^T of a warpgroup, 64 x kBlockM, over kColumns columns of A and B: S^T = K Q^T, dP^T = V dO^T. A is 64 rows of kBlockN, B has
// kBlockM rows. Both operands are K-major: SBO leads to the next eight rows. A step of 16 along the K dimension is 32 bytes within the
// swizzled row.
template <int kColumns>
__device__ __forceinline__ void mma_scores(float (&scores)[kBlockM / 2], shared_address a_smem, shared_address b_smem) {
    const uint64_t a = descriptor(a_smem, 8 * kPanelRowBytes);
    const uint64_t b = descriptor(b_smem, 8 * kPanelRowBytes);
    pin_registers(scores);
    wgmma_fence();
#pragma unroll
    for (int column = 0; column < kColumns; column += 16) {
        const int panel = column / kPanelColumns, byte = column % kPanelColumns * sizeof(element);
        wgmma_m64n64k16_bf16_ss(scores, a + ((panel * kBlockN * kPanelRowBytes + byte) >> 4),
                                 b + ((panel * kBlockM * kPanelRowBytes + byte) >> 4), column > 0);
    }
    wgmma_commit();
}

// Issues sums += A B, 64 rows x 192 of a warpgroup, for example dV += P^T dO. `scores` is A. B is MN-major, its columns contiguous: SBO leads to
// the next eight rows of B, LBO to the next panel of columns.
__device__ __forceinline__ void mma_gradient(float (&sums)[96], PackedScores<kBlockM>& scores, shared_address b_smem) {
    const uint64_t b = descriptor(b_smem, 8 * kPanelRowBytes, kBlockM * kPanelRowBytes);
    pin_registers(sums);
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) pin_registers(scores.fragment[step]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) {
        wgmma_m64n192k16_bf16_rs(sums, scores.fragment[step], b + (16 * step * kPanelRowBytes >> 4), 1);
    }
    wgmma_commit();
}

// Issues dQ (64 x 2 kCount) = dS K of a warpgroup over kBlockN keys, or += if `accumulate`. Both operands are MN-major: each row is a key, with
// 64 queries in dS^T, and with the columns of a panel in K. SBO leads to the next eight keys.
template <int kCount>
__device__ __forceinline__ void issue_dq(float (&dq)[kCount], uint64_t ds, uint64_t k, bool accumulate) {
#pragma unroll
    for (int key = 0; key < kBlockN; key += 16) {
        const uint64_t ds_step = ds + (key * kPanelRowBytes >> 4), k_step = k + (key * kPanelRowBytes >> 4);
        if constexpr (2 * kCount == 64) wgmma_m64n64k16_bf16_ss_mn(dq, ds_step, k_step, accumulate || key > 0);
        if constexpr (2 * kCount == 32) wgmma_m64n32k16_bf16_ss_mn(dq, ds_step, k_step, accumulate || key > 0);
    }
}

// The row of a key in the tensor maps of K and V. The maps end with the last key that any query attends to. For later keys TMA fills in zeros,
// because 0 times a NaN in memory would be NaN.
__device__ __forceinline__ int mapped_row(const Params&, int key) { return key; }

__device__ __forceinline__ void store_ds(const PackedScores<kBlockM>& ds, shared_address ds_smem, int warp_key, int lane) {
    const int key = warp_key + lane % 16;  // stmatrix takes the address of a row from each lane
#pragma unroll
    for (int query = 0; query < kBlockM; query += 16) {
        // Keys 0 to 7 and 8 to 15 of eight queries, then of the next eight. Lanes 0 to 15 give the rows of the first eight.
        const shared_address row = ds_smem + query / 64 * kDsPanelBytes + key * kPanelRowBytes;
        stmatrix_x4(row + 16 * swizzled(key, query % 64 / 8 + lane / 16), ds.fragment[query / 16]);
    }
}

// Where a lane adds its elements of dQ of a step, from `first_column` on. `warp_row` is the warp's first row of the step.
__device__ __forceinline__ float* dq_of(const Params& params, const KeyBlock& block, const Step& step, int first_column, int warp_row,
                                        int lane) {
    const int row = step.block * kBlockM + warp_row;
    float* address = dq_tiles(params, block.batch, head_of(params, block, step), row) + first_column / 8 * kTileElements + 4 * lane;
    opaque(address);  // one address, computed while MMAs run; the reds add constant offsets to it
    return address;
}

// Adds a warp's part of dQ, 16 rows x 2 * kCount columns, to tiles of dq_accum. `address` is the lane's place in the first tile.
template <int kCount>
__device__ __forceinline__ void add_dq(float* address, const float (&dq)[kCount]) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
        red_add_128(address + j * kTileElements, {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]});
    }
}

// Writes a warp's 16 rows of a gradient, times `factor` and rounded, to `staging`: swizzled panels of kBlockN rows, from the warpgroup's row on.
template <int kColumns>
__device__ __forceinline__ void stage_gradient(const float (&sums)[kColumns / 2], float factor, shared_address staging, int lane) {
    const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;  // stmatrix takes the address of a row from each lane
#pragma unroll
    for (int column = 0; column < kColumns; column += 16) {
        uint32_t matrices[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            matrices[e] = pack<element>(sums[column / 2 + 2 * e] * factor, sums[column / 2 + 2 * e + 1] * factor);
        }
        const shared_address panel = staging + column / kPanelColumns * kBlockN * kPanelRowBytes;
        stmatrix_x4(panel + row * kPanelRowBytes + 16 * swizzled(row, column % kPanelColumns / 8 + lane / 16), matrices);
    }
}

// Lets TMA write a warpgroup's 64 rows of a gradient, times `factor` and rounded, from `staging`.
// Call it when no warp reads `staging` any more. `barrier` is the warpgroup's named barrier; one thread starts the TMA stores.
template <int kColumns>
__device__ __forceinline__ void store_gradient(const tensor_map& map, const float (&sums)[kColumns / 2], float factor, shared_address staging,
                                               int first_row, int head, int batch, int barrier, int lane) {
    stage_gradient<kColumns>(sums, factor, staging, lane);
    fence_proxy_async();  // TMA would not see the writes otherwise
    barrier_sync(barrier, 128);  // all rows of the warpgroup are written
    if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int panel = 0; panel < (kColumns + kPanelColumns - 1) / kPanelColumns; ++panel) {
            tma_store_4d(map, staging + panel * kBlockN * kPanelRowBytes, panel * kPanelColumns, first_row, head, batch);
        }
        tma_store_commit();
    }
}

__device__ __forceinline__ int head_of_grid(const Params& params, const KeyBlock& block) {
    return block.batch * params.num_heads_kv + block.kv_head;
}

__device__ __forceinline__ int num_heads_of_grid(const Params& params) { return params.batch_size * params.num_heads_kv; }

__device__ __forceinline__ int rows_of_head(const Params& params) { return unit_rows(params); }

// Clears this thread block's part of dq_accum of a later head.
// A warp of the producer warpgroup calls it. A part is whole rows of tiles.
// dq_accum must be 0 before dQ is added to it. The preprocess kernel clears dq_accum of the first clear_distance heads of the grid. CTAs of head
// h clear head h + clear_distance, one part each, while they compute.
// clear_distance is more than a group of heads that share L2, so the CTAs that clear have lower indices in the grid than the CTAs that wait, and
// clearing waits for nothing. So there is no deadlock if the hardware starts CTAs by increasing index. It does, but CUDA does not promise it.
// clear_distance is little more than such a group, so that most zeros are still in L2 when dQ is added to them.
__device__ __forceinline__ void clear_ahead(const Params& params, const KeyBlock& block, int lane) {
    const int head = head_of_grid(params, block) + params.clear_distance;
    if (head >= num_heads_of_grid(params)) return;
    const int tile_rows = rows_of_head(params) / 16;
    const int part_rows = (tile_rows + params.num_row_blocks - 1) / params.num_row_blocks;
    const int begin = block.first_key / kBlockN * part_rows;
    const int end = min(begin + part_rows, tile_rows);
    constexpr int kTilesPerRow = kHeadDim / 8;
    float* zeros = params.dq_accum + (int64_t(head) * tile_rows + begin) * (kTilesPerRow * kTileElements) + 4 * lane;
#pragma unroll 4
    for (int left = (end - begin) * kTilesPerRow; left > 0; --left) {
        store_global_128(zeros, {});
        zeros += kTileElements;
    }
    __syncwarp();  // the release covers what all lanes have written
    if (lane == 0) add_release_32(params.cleared + head, 1);
}

// Waits until dq_accum of the head is clear.
// The producer thread calls it before it loads Q of the second step, in which consumers add dQ of the first step. Their wait for that Q passes the
// acquire on to them. If there is only one step, their wait for its dO does.
__device__ __forceinline__ void await_cleared(const Params& params, const KeyBlock& block) {
    const int head = head_of_grid(params, block);
    if (head < params.clear_distance) return;
    while (int(load_acquire_32(params.cleared + head)) != params.num_row_blocks) {}
}

// Counts the thread block when all its dQ is added. A warp of the producer warpgroup calls it.
// The convert kernel rounds dQ of a head when all thread blocks of the head are counted, while thread blocks of later heads still run. A thread
// block without steps counts too.
// A full count implies cleared: the first query or the last one attends to a key, so some thread block has steps, and it waited for the clear.
__device__ __forceinline__ void count_added(const Params& params, const KeyBlock& block, int lane) {
    barrier_sync(kAddedBarrier, kAddedThreads);
    if (lane == 0) add_release_32(params.added + head_of_grid(params, block), 1);
}

__device__ __forceinline__ int num_steps(const Params&, const QueryBlocks& queries) { return queries.last - queries.first + 1; }

// Starts loading kRows rows of a head, panel by panel. Rows and columns outside of the array become zeros.
template <int kPanelCount, int kRows>
__device__ __forceinline__ void load_rows(shared_address destination, const tensor_map& map, shared_address full, int first_row,
                                          int head, int batch) {
#pragma unroll
    for (int panel = 0; panel < kPanelCount; ++panel) {
        tma_load_4d(destination + panel * kRows * kPanelRowBytes, map, full, panel * kPanelColumns, first_row, head, batch);
    }
}

__device__ __forceinline__ StepRows rows_of(const Params& params, const KeyBlock& block, const Step& step) {
    StepRows rows;
    rows.head = head_of(params, block, step);
    rows.batch = block.batch;
    rows.row = step.block * kBlockM;
    rows.unit_row = first_unit_row(params, block.batch, rows.head) + rows.row;
    return rows;
}

// Starts loading Q and LSE of a step. `more_bytes` are the bytes of other loads that complete on the same barrier.
__device__ __forceinline__ void load_q(const Params& params, const StepRows& rows, shared_address shared, const Barriers& barriers,
                                       int stage, int more_bytes) {
    const shared_address full = barriers.q_full(stage);
    mbarrier_arrive_expect_tx(full, kQBytes + kQueryValueBytes + more_bytes);
    load_rows<kPanels, kBlockM>(shared + kQOffset + stage * kQBytes, params.q, full, rows.row, rows.head, rows.batch);
    bulk_load(shared + kLseOffset + stage * kQueryValueBytes, params.lse_log2 + rows.unit_row, full, kQueryValueBytes);
}

__device__ __forceinline__ void load_dout(const Params& params, const StepRows& rows, shared_address shared, const Barriers& barriers,
                                          int stage, int more_bytes) {
    const shared_address full = barriers.dout_full(stage);
    mbarrier_arrive_expect_tx(full, kDoutBytes + kQueryValueBytes + more_bytes);
    load_rows<kPanelsV, kBlockM>(shared + kDoutOffset + stage * kDoutBytes, params.dout, full, rows.row, rows.head, rows.batch);
    bulk_load(shared + kDeltaOffset + stage * kQueryValueBytes, params.delta + rows.unit_row, full, kQueryValueBytes);
}

// Starts the first loads of a thread block: K and Q, V and dO of the first step.
// One thread calls it before __syncthreads(), so that the loads run meanwhile. The bytes of K count on q_full(0), the bytes of V on dout_full(0).
// load_q() and load_dout() announce these bytes. Bytes may arrive before they are announced: a phase does not end without the arrival of the
// thread that announces. A thread block without steps loads nothing.
__device__ __forceinline__ void start_loads(const Params& params, const KeyBlock& block, shared_address shared, const Barriers& barriers) {
    const QueryBlocks queries = queries_of_block(params, block);
    const int count = num_steps(params, queries);
    if (count == 0) return;
    const int batch = block.batch;
    const int row = mapped_row(params, block.first_key);
    const int kv_head = kv_head_of(params, block);
    const StepRows rows = rows_of(params, block, first_step(params, block, queries));
    load_rows<kPanels, kBlockN>(shared, params.k, barriers.q_full(0), row, kv_head, batch);
    load_q(params, rows, shared, barriers, 0, kKBytes);
    load_rows<kPanelsV, kBlockN>(shared + kVOffset, params.v, barriers.dout_full(0), row, kv_head, batch);
    load_peer_k(params, block, shared, barriers.dout_full(0));
    // If there is only one step, produce() loads dO after its wait for the zeros in dq_accum: the arrival of this dO lets the consumers add dQ.
    if (count > 1) load_dout(params, rows, shared, barriers, 0, kBytesWithDout);
}

__device__ __forceinline__ bool needs_mask(const Params& params, int first_key, int first_query) {
    opaque(first_key);  // the compiler would compute the ranges before the loop and hold them in registers
    if (first_query + kBlockM > queries_of_key(params, first_key).end) return true;
    return first_query < queries_of_key(params, first_key + 15).begin;
}

// The rank of a thread block in its cluster. A head has an even number of blocks of keys in the grid, so the parity of a block's index is its
// rank.
__device__ __forceinline__ int rank_of(const KeyBlock& block) { return block.index % 2; }

__device__ __forceinline__ int peer_of(const KeyBlock& block) { return rank_of(block) ^ 1; }

__device__ __forceinline__ int first_key_of_pair(const KeyBlock& block) { return block.first_key - rank_of(block) * kBlockN; }

__device__ __forceinline__ int first_key_of_peer(const KeyBlock& block) { return first_key_of_pair(block) + peer_of(block) * kBlockN; }

// The blocks of queries that both thread blocks go through: a query of the block attends to a key of at least one of the two.
__device__ __forceinline__ QueryBlocks queries_of_block(const Params& params, const KeyBlock& block) {
    return find_query_blocks(params, first_key_of_pair(block));  // a query that attends to a later key attends to the first one, too
}

// The first panel of the peer's K that is loaded. The thread block of rank 0 computes the first half of the columns of dQ, rank 1 the second.
__device__ __forceinline__ int first_peer_panel(const KeyBlock& block) { return rank_of(block) * (kPanels - kPeerPanels); }

__device__ __forceinline__ void load_peer_k(const Params& params, const KeyBlock& block, shared_address shared, shared_address full) {
    const int batch = block.batch;
    const int row = mapped_row(params, first_key_of_peer(block));
#pragma unroll
    for (int panel = 0; panel < kPeerPanels; ++panel) {
        tma_load_4d(shared + kPeerKOffset + panel * kBlockN * kPanelRowBytes, params.k, full,
                    (first_peer_panel(block) + panel) * kPanelColumns, row, kv_head_of(params, block), batch);
    }
}

// Tells the peer that this warp has read dS of a slot. Step i uses slot i % 2.
__device__ __forceinline__ void free_slot(const Barriers& barriers, int slot, const KeyBlock& block, int lane) {
    if (lane == 0) mbarrier_arrive_cluster(map_shared(barriers.slot_free(slot), peer_of(block)));
}

// The columns of dQ from `first` on. The copy of the peer's K begins with panel first_peer_panel().
__device__ __forceinline__ DqColumns columns_from(int first, const KeyBlock& block, shared_address shared) {
    const int byte = first % kPanelColumns * sizeof(element);  // under the swizzle an operand may begin within a row
    const shared_address k = shared + first / kPanelColumns * kBlockN * kPanelRowBytes + byte;
    return {first, k, k + kPeerKOffset - first_peer_panel(block) * kBlockN * kPanelRowBytes};
}

template <int kCount>
__device__ __forceinline__ void mma_dq(float (&dq)[kCount], shared_address ds_smem, const DqColumns& columns) {
    const uint64_t ds = descriptor(ds_smem, 8 * kPanelRowBytes);
    const uint64_t k = descriptor(columns.k, 8 * kPanelRowBytes);
    const uint64_t peer_k = descriptor(columns.peer_k, 8 * kPanelRowBytes);
    pin_registers(dq);
    wgmma_fence();
    issue_dq(dq, ds, k, false);
    issue_dq(dq, ds + (kOwnDsBytes >> 4), peer_k, true);
    wgmma_commit();
}

// Sends a warp's 16 keys of dS, at `rows`, to the peer: to the same place after dS of the peer's keys. One thread calls it.
__device__ __forceinline__ void send_ds(shared_address rows, shared_address ds_received, int peer) {
    bulk_send(map_shared(rows + kOwnDsBytes, peer), rows, map_shared(ds_received, peer), 16 * kPanelRowBytes);
}

// Adds a warp's part of dQ of a step. Thread blocks add in no fixed order, so there is no turn to wait for.
template <int kCount>
__device__ __forceinline__ void add_dq_of_step(const Barriers&, int, float* own, const float (&dq)[kCount], int) {
    add_dq(own, dq);
}

static_assert(kProducerRegisters <= kConsumerRegisters, "the producer gives registers to the consumers");
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * kLaunchRegisters, "consumers would wait for ever");
static_assert(sizeof(SharedStorage) + 1024 == 215136, "the launcher allocates this, and room to begin at a multiple of 1,024 bytes");
static_assert(kDsPanelBytes % 1024 == 0, "each panel begins at a multiple of 1,024 bytes, as its swizzle needs");
static_assert(kDsBytes <= kKBytes && kDoutBytes <= kKBytes && kQBytes <= kKBytes, "K is read in place of dS, dO and Q");
static_assert(kBlockN == 64 && kBlockM == 64, "a warpgroup computes all scores of a step, and all rows of dQ");
static_assert(kHeadDim % kPanelColumns == 0 && kHeadDimV % kPanelColumns == 0, "whole panels");
static_assert(sizeof(Params) == 896 && offsetof(Params, q) == 0 && offsetof(Params, k) == 128 && offsetof(Params, v) == 256);
static_assert(offsetof(Params, dout) == 384 && offsetof(Params, dk) == 512 && offsetof(Params, dv) == 640);
static_assert(offsetof(Params, lse_log2) == 768 && offsetof(Params, delta) == 776 && offsetof(Params, dq_accum) == 784);
static_assert(offsetof(Params, cleared) == 792 && offsetof(Params, added) == 800 && offsetof(Params, num_heads_q) == 808);
static_assert(offsetof(Params, num_heads_kv) == 812 && offsetof(Params, seqlen_q) == 816 && offsetof(Params, seqlen_kv) == 820);
static_assert(offsetof(Params, num_row_blocks) == 824 && offsetof(Params, batch_size) == 828);
static_assert(offsetof(Params, heads_per_l2_group) == 832 && offsetof(Params, clear_distance) == 836);
static_assert(offsetof(Params, diagonal_offset) == 840 && offsetof(Params, scale_log2) == 844);
static_assert(offsetof(Params, softmax_scale) == 848 && offsetof(Params, score_constant_0) == 852);
static_assert(kRowUnit % kBlockM == 0, "LSE and delta have the rows of a step");
static_assert(kDqColumnsOfDv > 0 && kPanelColumns % kDqColumnsOfDv == 0, "the columns of a consumer are in one panel");
