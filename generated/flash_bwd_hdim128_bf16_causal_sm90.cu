// flash_bwd_hdim128_bf16_causal_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type causal, dropout none, gqa mha, dq_order none
// tile      block_m 64, block_n 128, stages 2, dout_stages 2, cluster 1, producer_registers 24, consumer_registers 240,
//           lse early, dv early, starts turns, held_k 0, held_v 0, dq_address free, mask_bounds computed, steps all
// block     384 threads, 165944 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      flash_bwd_sm90.yaml
// template  flash_bwd_sm90.cu.j2
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
//   warpgroups 1, 2      consume(): 64 keys each: dK, dV and a part of dQ. kConsumerRegisters = 240 a thread
//
//   SharedStorage        bytes
//   k                    32768  x 1  K; at the end room to stage dK
//   v                    32768  x 1  V; at the end room to stage dV
//   q                    16384  x 2  Q of a step
//   dout                 16384  x 2  dO of a step
//   ds                   16384  x 2  dS^T of a step, and of the step before
//   lse_log2, delta      256    x 2  of the queries of a step
//   mbarriers            8 each; and 1024 more, so that SharedStorage begins at a multiple of 1024
//
//   barrier              arrivals of a phase                                              who waits
//   q_full, dout_full    1: the producer, and the bytes of TMA                            consumers
//   empty                4 kConsumers: lane 0 of each warp, after its MMAs of a step      producer
//   ds_ready             4 kConsumers: lane 0 of each warp, new dS written, old read      consumers
//   kStoreBarrier        128: a consumer, once its dK or dV is staged                     the same consumer, before TMA reads it
//   kAddedBarrier        kAddedThreads: consumers, once all their dQ is added             count_added()
//   kStartBarrier        256: the consumer that waits; the other, after it issued S, dP   a consumer, before its S and dP

using element = bf16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kHeadDimV = 128;  // of V and dO
constexpr int kBlockM = 64;  // query rows of a step
constexpr int kBlockN = 128;  // keys of a thread block
constexpr int kStages = 2;  // buffers of Q, and of dO
constexpr int kConsumers = kBlockN / 64;  // consumer warpgroups, 64 keys each
constexpr int kThreads = 128 * (1 + kConsumers);  // warpgroup 0 is the producer

// Registers of a thread. setmaxnreg moves registers between the warpgroups of a thread block. At launch a thread has at most an equal share of
// 65,536 registers, rounded down to a multiple of 8. ptxas lowers it to kConsumerRegisters where the share is larger.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

// Shared memory holds panels of 64 columns: rows of 128 bytes, which TMA swizzles.
constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = kPanelColumns * sizeof(element);
constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;  // of Q and K
constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;  // of V and dO

enum NamedBarrier : int {  // __syncthreads() has the number 0
    kStoreBarrier = 1,  // + consumer: its 128 threads have staged dK or dV in k or v, for TMA
    kStartBarrier = 3,  // + consumer: the other consumer has issued its S and dP, so this consumer may issue its S and dP. 256 threads
    kAddedBarrier = 5,  // all dQ is added. Consumers arrive, count_added() waits: kAddedThreads
};

// The mbarriers. The map above says who arrives and who waits.
struct Mbarriers {
    uint64_t ds_ready;            // dS of a step is written, and dS of the step before is read
    uint64_t q_full[kStages];     // Q and LSE have arrived; with the first one K
    uint64_t dout_full[kStages];  // dO and delta have arrived; with the first one V
    uint64_t empty[kStages];      // no warp reads the stage
};

// Addresses of the mbarriers. A buffer is full when TMA has written its bytes. A stage holds Q and dO of a step. It is empty when every consumer
// warp has released it.
struct Barriers {
    shared_address first;

    // Complete when every consumer warp has written its part of a step's dS and has read dS of the step before. It completes once more after
    // the last step, when no warp reads K any longer.
    __device__ __forceinline__ shared_address ds_ready() const { return at(offsetof(Mbarriers, ds_ready) / 8); }
    __device__ __forceinline__ shared_address q_full(int stage) const { return at(offsetof(Mbarriers, q_full) / 8 + stage); }
    __device__ __forceinline__ shared_address dout_full(int stage) const { return at(offsetof(Mbarriers, dout_full) / 8 + stage); }
    __device__ __forceinline__ shared_address empty(int stage) const { return at(offsetof(Mbarriers, empty) / 8 + stage); }

    __device__ __forceinline__ shared_address at(int index) const { return first + 8 * index; }

    // One thread calls it, before other threads use the mbarriers.
    __device__ __forceinline__ void init() const {
        mbarrier_init(ds_ready(), 4 * kConsumers);
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(q_full(stage), 1);
            mbarrier_init(dout_full(stage), 1);
            mbarrier_init(empty(stage), 4 * kConsumers);
        }
    }
};

// Begins at a multiple of 1,024 bytes, as the pattern of the swizzle repeats every 1,024 bytes.
struct SharedStorage {
    element k[kPanels][kBlockN][kPanelColumns];   // at the end room to stage dK
    element v[kPanelsV][kBlockN][kPanelColumns];  // at the end room to stage dV
    element q[kStages][kPanels][kBlockM][kPanelColumns];
    element dout[kStages][kPanelsV][kBlockM][kPanelColumns];
    element ds[2][kBlockM / 64][kBlockN][64];  // dS^T of a step, and of the step before, whose dQ is computed meanwhile
    float lse_log2[kStages][kBlockM];
    float delta[kStages][kBlockM];
    Mbarriers mbarriers;
};

constexpr int kKBytes = sizeof(SharedStorage::k);
constexpr int kVBytes = sizeof(SharedStorage::v);
constexpr int kQBytes = sizeof(SharedStorage::q) / kStages;
constexpr int kDoutBytes = sizeof(SharedStorage::dout) / kStages;
constexpr int kDsBytes = sizeof(SharedStorage::ds) / 2;
constexpr int kDsPanelBytes = kDsBytes / (kBlockM / 64);  // of 64 queries
constexpr int kQueryValueBytes = kBlockM * sizeof(float);  // of lse_log2, and of delta
constexpr int kVOffset = offsetof(SharedStorage, v);
constexpr int kQOffset = offsetof(SharedStorage, q);
constexpr int kDoutOffset = offsetof(SharedStorage, dout);
constexpr int kDsOffset = offsetof(SharedStorage, ds);
constexpr int kLseOffset = offsetof(SharedStorage, lse_log2);
constexpr int kDeltaOffset = offsetof(SharedStorage, delta);

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

// ==== visible: which queries attend to a key, and which blocks of queries need a mask

__device__ int first_query_of_key(const Params& params, int key);  // The first query that attends to a key

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

// Issues sums += A B, 64 rows x 128 of a warpgroup, for example dV += P^T dO
__device__ void mma_gradient(float (&sums)[64], PackedScores<kBlockM>& scores, shared_address b_smem);
// Issues dQ (64 x 2 kCount) = dS K of a warpgroup over kBlockN keys, or += if `accumulate`
template <int kCount> __device__ void issue_dq(float (&dq)[kCount], uint64_t ds, uint64_t k, bool accumulate);
// Issues dQ = dS K over the keys of the thread block
template <int kCount> __device__ void mma_dq(float (&dq)[kCount], shared_address ds_smem, shared_address k_smem);
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
// The blocks of queries that a thread block goes through
__device__ QueryBlocks queries_of_block(const Params& params, const KeyBlock& block);
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

// Bytes that dout_full(0) counts in its first phase besides dO and delta: V.
constexpr int kBytesWithDout = kVBytes;

// Starts the first loads of a thread block
__device__ void start_loads(const Params& params, const KeyBlock& block, shared_address shared, const Barriers& barriers);

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

// A consumer warpgroup: dK and dV of 64 keys, and 64 rows by kDqColumns columns of each step's dQ.
template <int kDqColumns>
__device__ __forceinline__ void consume(const Params& params, const KeyBlock& block, shared_address shared, const Barriers& barriers, int consumer) {
    const int lane = threadIdx.x % 32;
    const int warp_key = 64 * consumer + threadIdx.x % 128 / 32 * 16;  // the warp's first key; its rows of dQ begin at warp_key % kBlockM
    const shared_address k_smem = shared + 64 * consumer * kPanelRowBytes;  // of the consumer's 64 keys
    const shared_address v_smem = k_smem + kVOffset;
    auto release = [&](shared_address barrier) {  // once for the warp
        if (lane == 0) mbarrier_arrive(barrier);
    };
    const QueryBlocks queries = queries_of_block(params, block);
    const int count = num_steps(params, queries);
    // All queries from this one on attend to all keys of the warp.
    const int unmasked_from = first_query_of_key(params, block.first_key + warp_key + 15);
    // Whether the warp has to mask S of the block of queries that begins with `first_query`.
    auto needs_mask = [&](int first_query) { return first_query < unmasked_from; };

    float dk[kHeadDim / 2] = {};
    float dv[kHeadDimV / 2] = {};
    RingPosition<kStages> ring;
    Step step = first_step(params, block, queries);
    Step previous = step;
    const shared_address k_rows = k_smem, v_rows = v_smem;  // operand A of S^T and dP^T
    // Issues dQ = dS K of the columns of this consumer's panel of K, with dS of both consumers.
    auto start_dq = [&](float (&dq)[kDqColumns / 2], shared_address ds_smem) {
        mma_dq(dq, ds_smem, shared + consumer * kBlockN * kPanelRowBytes);
    };

    // Where the lane adds its part of dQ of a step.
    auto dq_address_of = [&](const Step& done) {
        return dq_of(params, block, done, consumer * kPanelColumns, warp_key % 64, lane);
    };
    // Adds this warp's part of dQ of a step.
    auto add_dq_of_warp = [&](float* address, const float (&dq)[kDqColumns / 2]) {
        add_dq(address, dq);
    };

    // The consumers take turns at S and dP, so that the MMAs of one run while the other computes P and dS. If both computed at the same time, the
    // tensor cores would idle. dQ' is dQ of the step before:
    //
    //   consumer 0   S dP of step 0 | P, dV, dS      | dQ' dK         | S dP of step 1 | P, dV, dS    | dQ' dK         | ...
    //   consumer 1                  | S dP of step 0 | P, dV, dS      | dQ' dK         | S dP of step 1 | P, dV, dS    | ...
    if (consumer == 1 && count > 0) barrier_arrive(kStartBarrier, 128 * kConsumers);

#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const shared_address q_smem = shared + kQOffset + ring.stage * kQBytes;
        const shared_address dout_smem = shared + kDoutOffset + ring.stage * kDoutBytes;
        // 1. S^T = K Q^T: wait for Q, issue.
        barrier_sync(kStartBarrier + consumer, 128 * kConsumers);
        float p[kBlockM / 2];  // S^T, then P^T
        mbarrier_wait(barriers.q_full(ring.stage), ring.parity);
        QueryValues lse;
        lse.load(shared + kLseOffset + ring.stage * kQueryValueBytes, lane);
        mma_scores<kHeadDim>(p, k_rows, q_smem);
        // 2. dP^T = V dO^T: wait for dO, issue.
        float ds[kBlockM / 2];  // dP^T, then dS^T
        mbarrier_wait(barriers.dout_full(ring.stage), ring.parity);
        mma_scores<kHeadDimV>(ds, v_rows, dout_smem);
        // Let the other consumer start. Consumer 1 skips its last hand-off: consumer 0 has finished.
        if (consumer == 0 || i + 1 < count) barrier_arrive(kStartBarrier + 1 - consumer, 128 * kConsumers);
        // 3. Wait for S^T. P^T: score, mask, exponentials.
        wgmma_wait<1>();
        pin_registers(p);
        if (needs_mask(step.block * kBlockM)) {
            apply_mask(params, p, block.first_key + warp_key + lane / 4, step.block * kBlockM + lane % 4 * 2);
        }
        compute_p(p, lse, params.scale_log2);
        QueryValues delta;
        delta.load(shared + kDeltaOffset + ring.stage * kQueryValueBytes, lane);
        // 4. dV += P^T dO: issue. Wait for dP^T, with dV in flight. dS^T = P^T (dP^T - delta).
        PackedScores<kBlockM> packed_p, packed_ds;
        packed_p.set(p);
        mma_gradient(dv, packed_p, dout_smem);
        wgmma_wait<1>();
        pin_registers(ds);
        compute_ds(ds, p, delta);
        packed_ds.set(ds);
        // 5. dS^T to shared memory, for both consumers. Wait until all warps have written dS of step i - 1. By then they have read dS of step
        // i - 2, whose buffer this step takes. For i = 0 the wait returns at once: the phase of parity 1 of a new mbarrier counts as ended.
        mbarrier_wait(barriers.ds_ready(), (i + 1) % 2);
        store_ds(packed_ds, shared + kDsOffset + i % 2 * kDsBytes, warp_key, lane);
        // 6. dQ = dS K of the previous step: issue. The first step has no previous dS: it reads K as dS and discards the result. If some MMAs
        // were conditional, ptxas would serialise all of them.
        float dq[kDqColumns / 2];
        start_dq(dq, i > 0 ? shared + kDsOffset + (i + 1) % 2 * kDsBytes : shared);
        float* dq_sums = dq_address_of(previous);
        // 7. dK += dS^T Q: issue. Wait for dQ, with dK in flight. Arrive on ds_ready: dS of this step is written, dS of the previous step is
        // read.
        mma_gradient(dk, packed_ds, q_smem);
        fence_proxy_async();  // makes the writes of dS visible to the MMA of dQ in the next step; here it overlaps with MMAs
        wgmma_wait<1>();
        __syncwarp();  // all lanes have written their dS, and have read LSE and delta of the stage
        release(barriers.ds_ready());
        pin_registers(dq);
        // 8. Add dQ to memory while dK runs. Wait for dK. Release Q and dO.
        if (i > 0) add_dq_of_warp(dq_sums, dq);
        wgmma_wait<0>();
        pin_registers(dv);
        pin_registers(dk);
        release(barriers.empty(ring.stage));
        ring.advance();
        previous = step;
        step = next_step(step, queries);
    }

    // dQ of the last step.
    if (count > 0) {
        mbarrier_wait(barriers.ds_ready(), (count - 1) % 2);
        float dq[kDqColumns / 2];
        start_dq(dq, shared + kDsOffset + (count - 1) % 2 * kDsBytes);
        wgmma_wait<0>();
        pin_registers(dq);
        add_dq_of_warp(dq_address_of(previous), dq);
    }
    barrier_arrive(kAddedBarrier, kAddedThreads);
    // dV is staged in the consumer's part of V, which it last read for dP. dK is staged in K, which both consumers read for dQ: wait for one more
    // phase of ds_ready.
    release(barriers.ds_ready());  // this warp no longer reads K
    const int first_key = block.first_key + 64 * consumer;
    const int kv_head = kv_head_of(params, block);
    store_gradient<kHeadDimV>(params.dv, dv, 1.0f, v_smem, first_key, kv_head, block.batch, kStoreBarrier + consumer, lane);
    mbarrier_wait(barriers.ds_ready(), count % 2);  // no warp reads K
    store_gradient<kHeadDim>(params.dk, dk, params.softmax_scale, k_smem, first_key, kv_head, block.batch, kStoreBarrier + consumer, lane);
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // TMA must read shared memory before the exit; the grid's end waits for the writes
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
flash_bwd_hdim128_bf16_causal_sm90(const __grid_constant__ Params params) {
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
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume<64>(params, block, shared, barriers, warpgroup - 1);
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

// ==== visible: which queries attend to a key, and which blocks of queries need a mask

// The first query that attends to a key: the query on its diagonal. No query attends to a key past the last one.
__device__ __forceinline__ int first_query_of_key(const Params& params, int key) {
    const int diagonal = key < params.seqlen_kv ? key - params.diagonal_offset : params.seqlen_q;
    return max(diagonal, 0);
}

__device__ __forceinline__ QueryBlocks find_query_blocks(const Params& params, int first_key) {
    const int begin = max(0, first_key - params.diagonal_offset);
    const int end = params.seqlen_q;
    if (begin >= end) return {0, -1};
    return {begin / kBlockM, (end - 1) / kBlockM};
}

// Masks the scores of queries that do not attend to their key. `lane_key` and `lane_query` are the lane's first key and first query. Queries
// past the last are not masked: there lse_log2 is inf, so compute_p() makes P = 0.
__device__ __forceinline__ void apply_mask(const Params& params, float (&scores)[kBlockM / 2], int lane_key, int lane_query) {
    const int begin[2] = {first_query_of_key(params, lane_key) - lane_query, first_query_of_key(params, lane_key + 8) - lane_query};
    for_each_score(scores, [&](int key, int query, float& score) {
        if (query < begin[key / 8]) score = -INFINITY;
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
    const int blocks_before = index_in_group / group_heads;  // of its head
    const int head_of_batch = first_head + index_in_group - blocks_before * group_heads;
    // Launch the first keys first: under a diagonal the most queries attend to them, so the grid ends with short blocks.
    block.first_key = blocks_before * kBlockN;
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

// Issues sums += A B, 64 rows x 128 of a warpgroup, for example dV += P^T dO. `scores` is A. B is MN-major, its columns contiguous: SBO leads to
// the next eight rows of B, LBO to the next panel of columns.
__device__ __forceinline__ void mma_gradient(float (&sums)[64], PackedScores<kBlockM>& scores, shared_address b_smem) {
    const uint64_t b = descriptor(b_smem, 8 * kPanelRowBytes, kBlockM * kPanelRowBytes);
    pin_registers(sums);
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) pin_registers(scores.fragment[step]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) {
        wgmma_m64n128k16_bf16_rs(sums, scores.fragment[step], b + (16 * step * kPanelRowBytes >> 4), 1);
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
    }
}

template <int kCount>
__device__ __forceinline__ void mma_dq(float (&dq)[kCount], shared_address ds_smem, shared_address k_smem) {
    const uint64_t ds = descriptor(ds_smem, 8 * kPanelRowBytes);
    const uint64_t k = descriptor(k_smem, 8 * kPanelRowBytes);
    pin_registers(dq);
    wgmma_fence();
    issue_dq(dq, ds, k, false);
    wgmma_commit();
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

// The blocks of queries that a thread block goes through: some query of the block attends to some key.
__device__ __forceinline__ QueryBlocks queries_of_block(const Params& params, const KeyBlock& block) {
    return find_query_blocks(params, block.first_key);
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
    // If there is only one step, produce() loads dO after its wait for the zeros in dq_accum: the arrival of this dO lets the consumers add dQ.
    if (count > 1) load_dout(params, rows, shared, barriers, 0, kBytesWithDout);
}

static_assert(kProducerRegisters <= kConsumerRegisters, "the producer gives registers to the consumers");
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * kLaunchRegisters, "consumers would wait for ever");
static_assert(kBlockN == 128 && (kBlockM == 64 || kBlockM == 128), "two consumers");
static_assert(kBlockM % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "whole wgmmas");
static_assert(kBlockM == 128 ? kHeadDim <= kPanelColumns : kPanels == kConsumers, "a panel of K for the columns of a consumer");
static_assert(kDsPanelBytes % 1024 == 0 && kQBytes % 1024 == 0 && kDoutBytes % 1024 == 0, "panels begin where the swizzle does");
static_assert(kDsBytes <= kKBytes + kVBytes, "the first step reads what is loaded, K and perhaps V, as dS");
static_assert(sizeof(SharedStorage) + 1024 == 165944, "the launcher allocates this, and room to begin at a multiple of 1024");
static_assert(sizeof(Params) == 896 && offsetof(Params, q) == 0 && offsetof(Params, k) == 128 && offsetof(Params, v) == 256);
static_assert(offsetof(Params, dout) == 384 && offsetof(Params, dk) == 512 && offsetof(Params, dv) == 640);
static_assert(offsetof(Params, lse_log2) == 768 && offsetof(Params, delta) == 776 && offsetof(Params, dq_accum) == 784);
static_assert(offsetof(Params, cleared) == 792 && offsetof(Params, added) == 800 && offsetof(Params, num_heads_q) == 808);
static_assert(offsetof(Params, num_heads_kv) == 812 && offsetof(Params, seqlen_q) == 816 && offsetof(Params, seqlen_kv) == 820);
static_assert(offsetof(Params, num_row_blocks) == 824 && offsetof(Params, batch_size) == 828);
static_assert(offsetof(Params, heads_per_l2_group) == 832 && offsetof(Params, clear_distance) == 836);
static_assert(offsetof(Params, diagonal_offset) == 840 && offsetof(Params, scale_log2) == 844);
static_assert(offsetof(Params, softmax_scale) == 848);
static_assert(kRowUnit % kBlockM == 0, "LSE and delta have the rows of a step");
