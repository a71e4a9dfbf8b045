// flash_fwd_hdim64_fp16_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 64, head_dim_v 64, dtype fp16, mask_type none, gqa mha
// tile      block_m 192, block_n 128, q_stages 2, stages 3
// block     512 threads, 148608 bytes of dynamic shared memory
// target    sm90: sm_90a alone, at most 232448 bytes a block
// spec      flash_fwd_sm90.yaml
// template  flash_fwd_sm90.cu.j2
#include "flashgen/sm90.cuh"

using element = fp16;

constexpr int kHeadDim = 64;  // of Q and K
constexpr int kHeadDimV = 64;  // of V and the output
constexpr int kBlockM = 192;  // query rows of a tile
constexpr int kBlockN = 128;  // keys of a block
constexpr int kQStages = 2;  // tiles of Q in shared memory; the output of each leaves through its place
constexpr int kStages = 3;   // blocks of K, and of V
constexpr int kConsumers = kBlockM / 64;  // warpgroups that compute, 64 rows each; one more fetches
constexpr int kStoreBarrier = 1 + kConsumers;  // where the first warpgroup meets when its output is to be copied; the others follow
constexpr int kThreads = 128 * (1 + kConsumers);

// Q, K, V and the output lie in shared memory as panels of 64 columns, each row of 128 bytes swizzled by the copy engine.
constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = kPanelColumns * sizeof(element);
constexpr int kQBytes = kBlockM * kHeadDim * sizeof(element);
constexpr int kKBytes = kBlockN * kHeadDim * sizeof(element);   // of a stage
constexpr int kVBytes = kBlockN * kHeadDimV * sizeof(element);  // likewise
constexpr int kKOffset = kQStages * kQBytes;
constexpr int kVOffset = kKOffset + kStages * kKBytes;
constexpr int kBarrierOffset = kVOffset + kStages * kVBytes;
constexpr int kSharedBytes = kBarrierOffset + 8 * (2 * kQStages + 4 * kStages);

constexpr float kLn2 = 0.6931471805599453f;

static_assert(kBlockN % 16 == 0 && kBlockN * kPanelRowBytes % 1024 == 0, "stages begin where the swizzle does");
static_assert(kHeadDimV <= kHeadDim, "the output fits where its queries lay");
static_assert(kQStages == 1 || kQStages == 2, "the output leaves through the second tile of Q, or from registers");
static_assert(kHeadDim % kPanelColumns == 0 && kHeadDimV % kPanelColumns == 0, "panels are whole");
static_assert(kSharedBytes + 1024 == 148608, "launcher and kernel agree on shared memory");

struct Params {
    tensor_map q;                         // (head_dim, seqlen_q, num_heads_q, batch)
    tensor_map k;                         // (head_dim, seqlen_kv, num_heads_kv, batch)
    tensor_map v;                         // (head_dim_v, seqlen_kv, num_heads_kv, batch)
    tensor_map out;                       // (head_dim_v, seqlen_q, num_heads_q, batch)
    float* lse;                           // (batch, num_heads_q, seqlen_q), contiguous; may be null
    int32_t batch_size;
    int32_t num_heads_q;
    int32_t num_heads_kv;
    int32_t seqlen_q;
    int32_t seqlen_kv;
    int32_t num_tiles;
    int32_t num_row_blocks;               // tiles of one head
    int32_t heads_per_section;            // heads whose tiles are launched together
    int32_t num_sections;                 // the last has the heads that are left
    float scale_log2;                     // softmax_scale * log2(e)
};
static_assert(sizeof(Params) == 576);
static_assert(offsetof(Params, q) == 0);
static_assert(offsetof(Params, k) == 128);
static_assert(offsetof(Params, v) == 256);
static_assert(offsetof(Params, out) == 384);
static_assert(offsetof(Params, lse) == 512);
static_assert(offsetof(Params, batch_size) == 520);
static_assert(offsetof(Params, num_heads_q) == 524);
static_assert(offsetof(Params, num_heads_kv) == 528);
static_assert(offsetof(Params, seqlen_q) == 532);
static_assert(offsetof(Params, seqlen_kv) == 536);
static_assert(offsetof(Params, num_tiles) == 540);
static_assert(offsetof(Params, num_row_blocks) == 544);
static_assert(offsetof(Params, heads_per_section) == 548);
static_assert(offsetof(Params, num_sections) == 552);
static_assert(offsetof(Params, scale_log2) == 556);

// A tile: kBlockM rows of queries that one thread block takes through all the keys they attend to.
struct Tile {
    int batch;
    int head;
    int kv_head;
    int first_row;  // rows are queries
};

__device__ __forceinline__ Tile find_tile(const Params& params, int index) {
    // Heads are launched in sections, so that the tiles of a head, which share its keys and values in L2, run at about
    // the same time. Within a section the row blocks come
    // one after another for all heads.
    const int num_heads = params.num_heads_q;
    const int section = min(index / (params.heads_per_section * params.num_row_blocks), params.num_sections - 1);
    const int first_head = section * params.heads_per_section;
    const bool is_last = section == params.num_sections - 1;
    const int section_heads = is_last ? num_heads * params.batch_size - first_head : params.heads_per_section;
    const int index_in_section = index - first_head * params.num_row_blocks;
    const int row_block = index_in_section / section_heads;
    const int head_of_batch = first_head + index_in_section - row_block * section_heads;

    Tile tile;
    tile.batch = head_of_batch / num_heads;
    tile.head = head_of_batch - tile.batch * num_heads;
    tile.kv_head = tile.head;
    tile.first_row = row_block * kBlockM;
    return tile;
}

__device__ __forceinline__ int num_rows(const Params& params) { return params.seqlen_q; }

__device__ __forceinline__ int query_of_row(const Params&, int row) { return row; }

// Offset in elements, from the start of the batch entry, of the row of q or out that belongs to `row`.
__device__ __forceinline__ int64_t row_offset(const Params&, const Tile& tile, int row, int64_t row_stride,
                                              int64_t head_stride) {
    return row * row_stride + tile.head * head_stride;
}

// Keys [begin, end).
struct KeyRange {
    int begin;
    int end;
};

__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int) { return {0, params.seqlen_kv}; }

// The keys that some row of [first_row, first_row + count) attends to. Ranges move to the right from row to row.
__device__ __forceinline__ KeyRange keys_of_some(const Params& params, int first_row, int count) {
    const int last_row = min(first_row + count, num_rows(params)) - 1;
    return {keys_of_query(params, query_of_row(params, first_row)).begin,
            keys_of_query(params, query_of_row(params, last_row)).end};
}

// The keys that every row of [first_row, first_row + count) attends to.
__device__ __forceinline__ KeyRange keys_of_every(const Params& params, int first_row, int count) {
    const int last_row = min(first_row + count, num_rows(params)) - 1;
    return {keys_of_query(params, query_of_row(params, last_row)).begin,
            keys_of_query(params, query_of_row(params, first_row)).end};
}

// The barriers between the warpgroup that fetches and those that compute: a buffer is full when its bytes have arrived,
// and empty when those that compute have finished with it: of K and V every warp says so, of Q one thread of each warpgroup,
// which has seen the output leave through it.
struct Barriers {
    shared_address first;

    __device__ __forceinline__ shared_address q_full(int stage) const { return at(stage); }
    __device__ __forceinline__ shared_address q_empty(int stage) const { return at(kQStages + stage); }
    __device__ __forceinline__ shared_address k_full(int stage) const { return at(2 * kQStages + stage); }
    __device__ __forceinline__ shared_address k_empty(int stage) const { return at(2 * kQStages + kStages + stage); }
    __device__ __forceinline__ shared_address v_full(int stage) const { return at(2 * kQStages + 2 * kStages + stage); }
    __device__ __forceinline__ shared_address v_empty(int stage) const { return at(2 * kQStages + 3 * kStages + stage); }

    __device__ __forceinline__ shared_address at(int index) const { return first + 8 * index; }
};

// A place in a ring of stages. The parity of a stage's barriers changes each time round.
template <int kLength>
struct RingPosition {
    int stage = 0;
    int parity = 0;

    __device__ __forceinline__ void advance() {
        stage = stage == kLength - 1 ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

// Fetches kBlockN rows of K or V of one head, panel by panel; what lies outside of the array becomes zeros.
template <int kColumns>
__device__ __forceinline__ void fetch_block(shared_address destination, const tensor_map& map, shared_address full,
                                            int first_row, int head, int batch) {
    mbarrier_arrive_expect_tx(full, kBlockN * kColumns * sizeof(element));
#pragma unroll
    for (int panel = 0; panel < kColumns / kPanelColumns; ++panel) {
        tma_load_4d(destination + panel * kBlockN * kPanelRowBytes, map, full, panel * kPanelColumns, first_row, head, batch);
    }
}

// Fetches the queries of a tile.
__device__ __forceinline__ void fetch_queries(const Params& params, const Tile& tile, shared_address destination,
                                              shared_address full) {
    mbarrier_arrive_expect_tx(full, kQBytes);
#pragma unroll
    for (int panel = 0; panel < kHeadDim / kPanelColumns; ++panel) {
        tma_load_4d(destination + panel * kBlockM * kPanelRowBytes, params.q, full, panel * kPanelColumns, tile.first_row,
                    tile.head, tile.batch);
    }
}

// Of every eight keys of a row, a lane holds the scores of two: 2 t and 2 t + 1, where t = lane % 4. A word has a bit for each
// of them, the first key's on top. One instruction makes predicates of seven bits of a byte; a comparison makes one.
__device__ constexpr uint32_t key_bit(int j, int e) { return uint32_t(1) << 31 - 2 * j - e; }

// The bits of the lane's keys from `key` on, in the block at `first_key`.
__device__ __forceinline__ uint32_t bits_from(int key, int first_key, int lane) {
    const int distance = max(key - first_key - lane % 4 * 2 + 6, 0);
    const int before = (distance + 1) / 8 + distance / 8;  // the lane's keys before `key`: 2 t's, and 2 t + 1's
    return __funnelshift_rc(0xffffffff, 0, before);  // a shift that is defined for 32, too, and more
}

// Hides the keys of the last block, at `first_key`, that lie behind the sequence: those of `hidden`.
__device__ __forceinline__ void hide_keys(const Params& params, float (&scores)[kBlockN / 2], uint32_t hidden, int first_key) {
    constexpr int kPart = kBlockN % 32 == 0 ? 32 : 16;  // keys, of which those ahead are left alone once all are there
#pragma unroll
    for (int part = kBlockN - kPart; part >= 0; part -= kPart) {
        if (first_key + part + kPart <= params.seqlen_kv) break;
#pragma unroll
        for (int j = part / 8; j < (part + kPart) / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (hidden & key_bit(j, e % 2)) scores[4 * j + e] = -INFINITY;
            }
        }
    }
}

// A matrix descriptor: where an operand lies in shared memory, and the distances between its swizzle atoms of eight rows.
__device__ __forceinline__ uint64_t descriptor(shared_address start, int leading_bytes, int stride_bytes) {
    constexpr uint64_t kSwizzle = 1;  // 128 bytes
    return uint64_t(start >> 4 & 0x3fff) | uint64_t(leading_bytes >> 4) << 16 | uint64_t(stride_bytes >> 4) << 32 |
           kSwizzle << 62;
}

// Starts scores (64 x kBlockN) = Q . K^T of a warpgroup. Both operands have the head dimension contiguous; a step of 16
// along it is 32 bytes within the swizzled row.
__device__ __forceinline__ void start_qk(float (&scores)[kBlockN / 2], shared_address q_tile, shared_address k_tile) {
    const uint64_t q = descriptor(q_tile, 16, 8 * kPanelRowBytes);
    const uint64_t k = descriptor(k_tile, 16, 8 * kPanelRowBytes);
    pin_registers(scores);
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < kHeadDim / kPanelColumns; ++panel) {
#pragma unroll
        for (int step = 0; step < kPanelColumns / 16; ++step) {
            wgmma_ss<element>(scores, q + ((panel * kBlockM * kPanelRowBytes + 32 * step) >> 4),
                              k + ((panel * kBlockN * kPanelRowBytes + 32 * step) >> 4), panel + step > 0);
        }
    }
    wgmma_commit();
}

// The weights P of a block, rounded and packed: an accumulator's pairs are the left operand as they lie.
struct Weights {
    uint32_t fragment[kBlockN / 16][4];

    __device__ __forceinline__ void set(const float (&values)[kBlockN / 2]) {
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                fragment[step][e] = pack<element>(values[8 * step + 2 * e], values[8 * step + 2 * e + 1]);
            }
        }
    }
};

// Starts output (64 x kHeadDimV) += P . V. V has the output's columns contiguous: its atoms follow each other by panel along
// them, and by eight keys down a panel.
__device__ __forceinline__ void start_pv(float (&output)[kHeadDimV / 2], const Weights& weights, shared_address v_tile) {
    const uint64_t v = descriptor(v_tile, kBlockN * kPanelRowBytes, 8 * kPanelRowBytes);
    pin_registers(output);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
        wgmma_rs<element>(output, weights.fragment[step], v + (16 * step * kPanelRowBytes >> 4), 1);
    }
    wgmma_commit();
}

// Online softmax. Scores are kept as the matrix product left them; the scale and log2(e) are folded into one factor, so
// that weight = 2^(score * scale_log2 - reference) with one multiply-add and one exponential an element.
//
// `reference` is a row's running maximum, except that it moves only when a score exceeds it by more than kSlack. Weights
// may then reach 2^kSlack, which costs no accuracy (they are floating-point numbers, and numerator and denominator share
// the factor) and spares nearly all rescaling of the output and the exchange of maxima between lanes.
constexpr float kSlack = 8.0f;
// row_max is kept kPBias below the maximum, so that P, which is rounded to fp16, uses the upper half of its exponents: what is
// below its normal numbers, 2^-14, is that much less of the row. O, row_sum and the LSE come out the same.
constexpr float kPBias = 7.0f;
static_assert(kSlack + kPBias <= 15.0f, "fp16 ends below 2^16");
constexpr float kNoReference = -3.4e38f;  // below any score; finite, so that a masked score minus it is -inf, not NaN

__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffff, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffff, value, 1);
    return value + __shfl_xor_sync(0xffffffff, value, 2);
}

struct RowState {
    float reference[2] = {kNoReference, kNoReference};  // log2 domain; rows g and g + 8 of the warp's 16
    float sum[2] = {0.0f, 0.0f};                        // this lane's share of the row's sum of weights
    float correction[2];                                // of the output, if the reference has moved
};

// Turns the scores of a block into weights and adds them to the rows' sums. Returns whether a reference of the warp has
// moved, so that the output must be rescaled before anything is added to it.
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
        block_max[half] = value * scale_log2;
        moves |= block_max[half] > rows.reference[half] + kSlack;
    }
    moves = __any_sync(0xffffffff, moves);
    if (moves) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float previous = rows.reference[half];
            rows.reference[half] = fmaxf(previous, quad_max(block_max[half]));
            rows.correction[half] = exp2_approx(previous - rows.reference[half]);
            rows.sum[half] *= rows.correction[half];
        }
    }
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            scores[4 * j + e] = exp2_approx(fmaf(scores[4 * j + e], scale_log2, -rows.reference[e / 2]));
            rows.sum[e / 2] += scores[4 * j + e];
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

// What the output of rows g and g + 8 of the warp's 16 is multiplied by, now that their sums are complete. Writes the LSE.
// A row that attends to nothing has the sum 0: its output becomes 0, its LSE -inf.
__device__ __forceinline__ void finish_rows(const Params& params, const Tile& tile, const RowState& rows, int first_row, int lane,
                                            float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half + lane / 4;
        const float sum = quad_sum(rows.sum[half]);
        factor[half] = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
        if (params.lse != nullptr && lane % 4 == 0 && row < num_rows(params)) {
            const int64_t batch_offset = int64_t(tile.batch) * params.num_heads_q * params.seqlen_q;
            store_global_32(params.lse + batch_offset + row_offset(params, tile, row, 1, params.seqlen_q),
                            (rows.reference[half] + log2_approx(sum)) * kLn2);
        }
    }
}

// Rounds the output and lets the copy engine write it: through `staging`, the warpgroup's rows of the tile of Q, which are
// done with and which only it has read; swizzled as those were. One thread of the warpgroup starts the copies.
__device__ __forceinline__ void store_tile(const Params& params, const Tile& tile, const float (&output)[kHeadDimV / 2],
                                           const RowState& rows, int first_row, int lane, shared_address staging, int consumer) {
    float factor[2];
    finish_rows(params, tile, rows, first_row, lane, factor);
    const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;  // whose address this lane gives
#pragma unroll
    for (int n = 0; n < kHeadDimV / 8; n += 2) {
        // Rows 0 to 7 and 8 to 15 of eight columns, then of the next eight.
        uint32_t matrices[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            matrices[i] = pack<element>(output[4 * n + 2 * i] * factor[i % 2], output[4 * n + 2 * i + 1] * factor[i % 2]);
        }
        const int chunk = (8 * n % kPanelColumns / 8 + lane / 16) ^ row % 8;
        const shared_address panel = staging + 8 * n / kPanelColumns * kBlockM * kPanelRowBytes;
        stmatrix_x4(panel + row * kPanelRowBytes + 16 * chunk, matrices);
    }
    fence_proxy_async();  // the copy engine would not see the writes otherwise
    barrier_sync(kStoreBarrier + consumer, 128);
    if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int panel = 0; panel < kHeadDimV / kPanelColumns; ++panel) {
            tma_store_4d(params.out, staging + panel * kBlockM * kPanelRowBytes, panel * kPanelColumns,
                         tile.first_row + 64 * consumer, tile.head, tile.batch);
        }
        tma_store_commit();
    }
}

// Blocks of keys, visited from the last to the first.
struct Blocks {
    int first;
    int last;
};

// Those of which one of `count` rows from `first_row` on sees a key.
__device__ __forceinline__ Blocks find_blocks(const Params& params, int first_row, int count) {
    const KeyRange keys = keys_of_some(params, first_row, count);
    return {keys.begin / kBlockN, (keys.end + kBlockN - 1) / kBlockN - 1};
}

// The tiles that a thread block of the persistent grid takes, one after the other.
struct TileSequence {
    int index;
    int step;

    __device__ __forceinline__ TileSequence() : index(block_index()) {
        step = gridDim.x;
    }

    __device__ __forceinline__ void advance() {
        index += step;
    }
};

// The fetching warpgroup's one thread: Q of each tile, and K and V of its blocks, as fast as buffers become empty.
__device__ __forceinline__ void produce(const Params& params, shared_address shared, const Barriers& barriers) {
    // The buffers begin empty: of their barriers, the phase before the first has ended.
    RingPosition<kStages> ring;
    RingPosition<kQStages> q_ring;
    for (TileSequence tiles; tiles.index < params.num_tiles; tiles.advance()) {
        const Tile tile = find_tile(params, tiles.index);
        mbarrier_wait(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
        fetch_queries(params, tile, shared + q_ring.stage * kQBytes, barriers.q_full(q_ring.stage));
        q_ring.advance();
        const Blocks blocks = find_blocks(params, tile.first_row, kBlockM);
        for (int block = blocks.last; block >= blocks.first; --block) {
            mbarrier_wait(barriers.k_empty(ring.stage), ring.parity ^ 1);
            fetch_block<kHeadDim>(shared + kKOffset + ring.stage * kKBytes, params.k, barriers.k_full(ring.stage),
                                  block * kBlockN, tile.kv_head, tile.batch);
            mbarrier_wait(barriers.v_empty(ring.stage), ring.parity ^ 1);
            fetch_block<kHeadDimV>(shared + kVOffset + ring.stage * kVBytes, params.v, barriers.v_full(ring.stage),
                                   block * kBlockN, tile.kv_head, tile.batch);
            ring.advance();
        }
    }
}

// A computing warpgroup: 64 rows of each tile.
__device__ __forceinline__ void consume(const Params& params, shared_address shared, const Barriers& barriers,
                                        int consumer) {
    const int lane = threadIdx.x % 32;
    const int warp_row = 64 * consumer + threadIdx.x % 128 / 32 * 16;  // the warp's first row in the tile
    auto release = [&](shared_address empty) {
        if (lane == 0) mbarrier_arrive(empty);
    };
    RingPosition<kQStages> q_ring;
    RingPosition<kStages> k_ring, v_ring;
    // The output of a tile leaves through the buffer of its queries, which is empty once the copies have read it. The thread
    // that started them waits for that after the next tile's first softmax: what comes into that buffer are the queries of
    // the tile after it.
    bool output_leaving = false;
    auto release_previous_queries = [&] {
        if (output_leaving && threadIdx.x % 128 == 0) {
            tma_store_wait_read<0>();
            mbarrier_arrive(barriers.q_empty(q_ring.stage ^ 1));
        }
        output_leaving = false;
    };
    // The warpgroups take turns at issuing products, so that one multiplies while the others do their softmax.
    auto begin_turn = [&] { barrier_sync(1 + consumer, 256); };
    auto end_turn = [&] { barrier_arrive(1 + (consumer + 1) % kConsumers, 256); };
    if (consumer == kConsumers - 1) end_turn();
    // The last block of keys, in which a sequence may end, is the same for all tiles.
    const int last_block = (params.seqlen_kv - 1) / kBlockN;
    const uint32_t hidden = bits_from(params.seqlen_kv, last_block * kBlockN, lane);

    shared_address q_tile;
    float scores[kBlockN / 2];
    // Starts the first product of a tile.
    auto start_tile = [&] {
        q_tile = shared + q_ring.stage * kQBytes + consumer * 64 * kPanelRowBytes;
        mbarrier_wait(barriers.q_full(q_ring.stage), q_ring.parity);
        mbarrier_wait(barriers.k_full(k_ring.stage), k_ring.parity);
        begin_turn();
        start_qk(scores, q_tile, shared + kKOffset + k_ring.stage * kKBytes);
        end_turn();
    };

    TileSequence tiles;
    Tile tile = find_tile(params, tiles.index);
    float output[kHeadDimV / 2] = {};
    RowState rows;
    start_tile();
    while (true) {
        Weights weights;
        wgmma_wait<0>();
        pin_registers(scores);
        release(barriers.k_empty(k_ring.stage));
        k_ring.advance();
        if ((last_block + 1) * kBlockN > params.seqlen_kv) hide_keys(params, scores, hidden, last_block * kBlockN);
        softmax_step(scores, rows, params.scale_log2);
        weights.set(scores);
        release_previous_queries();

        for (int block = last_block - 1; block >= 0; --block) {
            // Q . K^T of this block and P . V of the one before are under way while softmax waits for the first only.
            mbarrier_wait(barriers.k_full(k_ring.stage), k_ring.parity);
            begin_turn();
            start_qk(scores, q_tile, shared + kKOffset + k_ring.stage * kKBytes);
            mbarrier_wait(barriers.v_full(v_ring.stage), v_ring.parity);
            start_pv(output, weights, shared + kVOffset + v_ring.stage * kVBytes);
            end_turn();
            wgmma_wait<1>();
            pin_registers(scores);
            release(barriers.k_empty(k_ring.stage));
            k_ring.advance();
            const bool moved = softmax_step(scores, rows, params.scale_log2);
            wgmma_wait<0>();
            pin_registers(output);
            release(barriers.v_empty(v_ring.stage));
            v_ring.advance();
            // Packed ahead of the branch, so that it fills the gaps between the exponentials.
            weights.set(scores);
            if (moved) rescale(output, rows);
        }
        mbarrier_wait(barriers.v_full(v_ring.stage), v_ring.parity);
        start_pv(output, weights, shared + kVOffset + v_ring.stage * kVBytes);
        wgmma_wait<0>();
        pin_registers(output);
        release(barriers.v_empty(v_ring.stage));
        v_ring.advance();
        tiles.advance();
        if (tiles.index >= params.num_tiles) break;
        // The next tile's first product is under way while this one's output is stored.
        const Tile finished = tile;
        const shared_address staging = q_tile;
        tile = find_tile(params, tiles.index);
        q_ring.advance();
        start_tile();
        store_tile(params, finished, output, rows, finished.first_row + warp_row, lane, staging, consumer);
        output_leaving = true;
        // One thread has started the copies: unless the warp is together again here, the compiler keeps what is the same in all
        // of its lanes, as the stages are, in a register of each.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kHeadDimV / 2; ++i) output[i] = 0.0f;
        rows = RowState();
    }
    store_tile(params, tile, output, rows, tile.first_row + warp_row, lane, q_tile, consumer);
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // shared memory is there until the last copy has read it; the end of the grid awaits the writes
    if (consumer == 0) begin_turn();  // the one that the last warpgroup passed on last
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
flash_fwd_hdim64_fp16_sm90(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const shared_address shared = (to_shared(shared_memory) + 1023) / 1024 * 1024;
    const Barriers barriers = {shared + kBarrierOffset};
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        prefetch_tensormap(params.q);
        prefetch_tensormap(params.k);
        prefetch_tensormap(params.v);
        prefetch_tensormap(params.out);
        for (int stage = 0; stage < kQStages; ++stage) {
            mbarrier_init(barriers.q_full(stage), 1);
            mbarrier_init(barriers.q_empty(stage), kConsumers);
        }
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(barriers.k_full(stage), 1);
            mbarrier_init(barriers.v_full(stage), 1);
            mbarrier_init(barriers.k_empty(stage), 4 * kConsumers);
            mbarrier_init(barriers.v_empty(stage), 4 * kConsumers);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    // From sm_90 on the grid before this one in the stream may still be writing what this one reads, or reading what this one writes.
    griddepcontrol_wait();
    // Blocks of the next grid may now come wherever this one leaves room. Not ahead of the wait, for the next may count on every
    // grid before this one to have ended.
    griddepcontrol_launch_dependents();

    if (warpgroup == 0) {
        setmaxnreg_dec<32>();
        if (threadIdx.x == 0) produce(params, shared, barriers);
    } else {
        setmaxnreg_inc<160>();
        consume(params, shared, barriers, warpgroup - 1);
    }
}
