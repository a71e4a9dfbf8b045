// flash_fwd_hdim128_fp16_dense_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype fp16, mask_type dense, gqa mha
// tile      block_m 128, block_n 128, q_stages 1, stages 2
// block     384 threads, 173232 bytes of dynamic shared memory
// target    sm90: sm_90a alone, at most 232448 bytes a block
// spec      flash_fwd_sm90.yaml
// template  flash_fwd_sm90.cu.j2
#include "flashgen/sm90.cuh"

using element = fp16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kHeadDimV = 128;  // of V and the output
constexpr int kBlockM = 128;  // query rows of a tile
constexpr int kBlockN = 128;  // keys of a block
constexpr int kQStages = 1;  // tiles of Q in shared memory
constexpr int kStages = 2;   // blocks of K, and of V
constexpr int kConsumers = kBlockM / 64;  // warpgroups that compute, 64 rows each; one more fetches and reads the mask
constexpr int kMaskWarps = 3;  // of that one, warps that read the mask
constexpr int kMaskBarrier = 1 + kConsumers;  // theirs; those before it are for turns
constexpr int kThreads = 128 * (1 + kConsumers);

// Q, K and V lie in shared memory as panels of 64 columns, each row of 128 bytes swizzled by the copy engine.
constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = kPanelColumns * sizeof(element);
constexpr int kQBytes = kBlockM * kHeadDim * sizeof(element);
constexpr int kKBytes = kBlockN * kHeadDim * sizeof(element);   // of a stage
constexpr int kVBytes = kBlockN * kHeadDimV * sizeof(element);  // likewise
constexpr int kKOffset = kQStages * kQBytes;
constexpr int kVOffset = kKOffset + kStages * kKBytes;
constexpr int kMaskOffset = kVOffset + kStages * kVBytes;
// K and V are fetched once the mask of their block is known, so that its ring has to run ahead of theirs.
constexpr int kMaskStages = kStages + 2;
constexpr int kMaskStageBytes = 16 * kBlockM + 8;
constexpr int kBarrierOffset = kMaskOffset + kMaskStages * kMaskStageBytes;
constexpr int kSharedBytes = kBarrierOffset + 8 * (2 * kQStages + 4 * kStages + 2 * kMaskStages);

constexpr float kLn2 = 0.6931471805599453f;

static_assert(kBlockN % 16 == 0 && kBlockN * kPanelRowBytes % 1024 == 0, "stages begin where the swizzle does");
static_assert(kQStages == 1 || kQStages == 2, "the output leaves through the second tile of Q, or from registers");
static_assert(kHeadDim % kPanelColumns == 0 && kHeadDimV % kPanelColumns == 0, "panels are whole");
static_assert(kBlockN <= 128, "a lane holds its share of a row of the mask in 32 bits");
static_assert(kSharedBytes + 1024 == 173232, "launcher and kernel agree on shared memory");

struct Params {
    tensor_map q;                         // (head_dim, seqlen_q, num_heads_q, batch)
    tensor_map k;                         // (head_dim, seqlen_kv, num_heads_kv, batch)
    tensor_map v;                         // (head_dim_v, seqlen_kv, num_heads_kv, batch)
    element* out;                         // (batch, seqlen_q, num_heads_q, head_dim_v), rows 16-byte aligned
    float* lse;                           // (batch, num_heads_q, seqlen_q), contiguous; may be null
    const uint8_t* mask;                  // (batch, num_heads_q, seqlen_q, seqlen_kv); not 0 = hidden
    int64_t out_batch_stride;             // strides are in elements
    int64_t out_row_stride;
    int64_t out_head_stride;
    int64_t mask_batch_stride;            // 0 where the mask is broadcast
    int64_t mask_row_stride;
    int64_t mask_head_stride;
    int32_t batch_size;
    int32_t num_heads_q;
    int32_t num_heads_kv;
    int32_t seqlen_q;
    int32_t seqlen_kv;
    int32_t head_dim_v;                   // of the call, at most kHeadDimV
    int32_t num_tiles;
    int32_t num_row_blocks;               // tiles of one head
    int32_t heads_per_section;            // heads whose tiles are launched together
    int32_t num_sections;                 // the last has the heads that are left
    int32_t mask_vector_width;            // bytes to which the mask's rows are aligned: 16, 8, 4 or 1
    float scale_log2;                     // softmax_scale * log2(e)
};
static_assert(sizeof(Params) == 512);
static_assert(offsetof(Params, q) == 0);
static_assert(offsetof(Params, k) == 128);
static_assert(offsetof(Params, v) == 256);
static_assert(offsetof(Params, out) == 384);
static_assert(offsetof(Params, lse) == 392);
static_assert(offsetof(Params, mask) == 400);
static_assert(offsetof(Params, out_batch_stride) == 408);
static_assert(offsetof(Params, out_row_stride) == 416);
static_assert(offsetof(Params, out_head_stride) == 424);
static_assert(offsetof(Params, mask_batch_stride) == 432);
static_assert(offsetof(Params, mask_row_stride) == 440);
static_assert(offsetof(Params, mask_head_stride) == 448);
static_assert(offsetof(Params, batch_size) == 456);
static_assert(offsetof(Params, num_heads_q) == 460);
static_assert(offsetof(Params, num_heads_kv) == 464);
static_assert(offsetof(Params, seqlen_q) == 468);
static_assert(offsetof(Params, seqlen_kv) == 472);
static_assert(offsetof(Params, head_dim_v) == 476);
static_assert(offsetof(Params, num_tiles) == 480);
static_assert(offsetof(Params, num_row_blocks) == 484);
static_assert(offsetof(Params, heads_per_section) == 488);
static_assert(offsetof(Params, num_sections) == 492);
static_assert(offsetof(Params, mask_vector_width) == 496);
static_assert(offsetof(Params, scale_log2) == 500);

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

// The barriers between the warpgroup that fetches and those that compute: a buffer is full when its bytes have arrived,
// and empty when every computing warp has finished with it.
struct Barriers {
    shared_address first;

    __device__ __forceinline__ shared_address q_full(int stage) const { return at(stage); }
    __device__ __forceinline__ shared_address q_empty(int stage) const { return at(kQStages + stage); }
    __device__ __forceinline__ shared_address k_full(int stage) const { return at(2 * kQStages + stage); }
    __device__ __forceinline__ shared_address k_empty(int stage) const { return at(2 * kQStages + kStages + stage); }
    __device__ __forceinline__ shared_address v_full(int stage) const { return at(2 * kQStages + 2 * kStages + stage); }
    __device__ __forceinline__ shared_address v_empty(int stage) const { return at(2 * kQStages + 3 * kStages + stage); }
    // The fetching thread reads an entry of the mask's ring too, and lanes arrive for themselves.
    __device__ __forceinline__ shared_address mask_full(int stage) const { return at(2 * kQStages + 4 * kStages + stage); }
    __device__ __forceinline__ shared_address mask_empty(int stage) const { return at(2 * kQStages + 4 * kStages + kMaskStages + stage); }

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

// A dense mask comes as bytes: not 0 hides the key. Warps beside the one that fetches turn each block of it into bits and
// pass them on through a ring, ahead of the warps that compute. Blocks of which no row of the tile sees a key are left out.
//
// Of every eight keys of a row, a lane holds the scores of two: 2 t and 2 t + 1, where t = lane % 4. An entry of the ring
// has a word for each row and t, so that a lane needs two words, and behind them the index of the block. A negative index
// ends the tile.
constexpr int kMaskIndexOffset = 4 * 4 * kBlockM;

// The bit, in the word of its row and t, of column 8 j + 2 t + e.
__device__ constexpr int mask_bit(int j, int e) { return j % 8 / 2 * 8 + 7 - 4 * e - j / 8 * 2 - j % 2; }

// The bits of a word that stand for a key.
__device__ constexpr uint32_t mask_bits() {
    uint32_t bits = 0;
    for (int j = 0; j < kBlockN / 8; ++j) bits |= 1u << mask_bit(j, 0) | 1u << mask_bit(j, 1);
    return bits;
}

// An entry of the ring as a lane of a computing warp needs it.
struct MaskedBlock {
    int index;
    uint32_t hidden[2];  // rows g and g + 8 of the warp's 16; bit set = hidden

    __device__ __forceinline__ void load(shared_address entry, int warp_row, int lane) {
        index = load_shared_32(entry + kMaskIndexOffset);
        if (index < 0) return;
        hidden[0] = load_shared_32(entry + 16 * warp_row + 4 * lane);
        hidden[1] = load_shared_32(entry + 16 * (warp_row + 8) + 4 * lane);
    }

    // Most blocks of some masks hide nothing of a warp's rows.
    __device__ __forceinline__ void apply(float (&scores)[kBlockN / 2]) const {
        if (!__any_sync(0xffffffff, (hidden[0] | hidden[1]) & mask_bits())) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (hidden[half] & 1u << mask_bit(j, e)) scores[4 * j + 2 * half + e] = -INFINITY;
                }
            }
        }
    }
};

constexpr int kMaskPieces = 2;  // of a row a lane reads 16 keys and 16 that come 64 later

// What a lane reads of a row of the mask, of a block that is `kWhole`: its rows are aligned to 16 bytes, and its keys
// end within the sequence. Of any other it reads words, so that a piece begins up to three bytes into its first.
template <bool kWhole>
struct MaskRow {
    uint32_t words[kMaskPieces][5];
    int shift;

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

    // The top bit of each byte that is not 0.
    static __device__ __forceinline__ uint32_t nonzero_bytes(uint32_t word) {
        // The sum carries into a byte's top bit exactly when one of its lower seven bits is set, and never out of it.
        return ((word & 0x7f7f7f7f) + 0x7f7f7f7f | word) & 0x80808080;
    }
};

// Fills a warp's part of an entry, the groups of eight rows `warp`, `warp` + kMaskWarps and so on of the block at
// `first_key`. Returns whether this lane has met a visible key.
template <bool kWhole>
__device__ __forceinline__ bool pack_mask(const Params& params, const Tile& tile, shared_address entry, int first_key,
                                          int warp, int lane) {
    constexpr int kBatch = kWhole ? 6 : 2;  // groups that are read at once
    const int end_row = min(tile.first_row + kBlockM, num_rows(params));
    const int end_key = min(first_key + kBlockN, params.seqlen_kv);
    const uint8_t* mask = params.mask + tile.batch * params.mask_batch_stride;
    bool visible = false;
#pragma unroll 1
    for (int first = warp; first < kBlockM / 8; first += kBatch * kMaskWarps) {
        MaskRow<kWhole> rows[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = tile.first_row + 8 * (first + i * kMaskWarps) + lane / 4;
            const int64_t offset = row_offset(params, tile, row, params.mask_row_stride, params.mask_head_stride);
            rows[i].load(params, mask + offset, first_key + 16 * (lane % 4), row < end_row ? end_key : 0);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = 8 * (first + i * kMaskWarps) + lane / 4;
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

// Transposes a 4x4 matrix of words that four neighbouring lanes hold by rows: lane i gives word j to lane j, which has it
// as its word i.
__device__ __forceinline__ uint4 trade(const uint32_t (&mine)[4], int lane_of_four) {
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

// Rounds the output and writes it.
__device__ __forceinline__ void store_tile(const Params& params, const Tile& tile, const float (&output)[kHeadDimV / 2],
                                           const RowState& rows, int first_row, int lane) {
    float factor[2];
    finish_rows(params, tile, rows, first_row, lane, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half + lane / 4;
        element* out_row = params.out + tile.batch * params.out_batch_stride +
                           row_offset(params, tile, row, params.out_row_stride, params.out_head_stride);
        // A lane has two neighbouring columns of every eight. Four lanes trade, so that each gets eight of 32.
#pragma unroll
        for (int n = 0; n < kHeadDimV / 8; n += 4) {
            uint32_t mine[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                mine[i] = pack<element>(output[4 * (n + i) + 2 * half] * factor[half],
                                        output[4 * (n + i) + 2 * half + 1] * factor[half]);
            }
            const uint4 chunk = trade(mine, lane % 4);
            const int column = 8 * (n + lane % 4);
            if (row < num_rows(params) && column < params.head_dim_v) store_global_128(out_row + column, chunk);
        }
    }
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

// A warp that reads the mask: an entry of the ring for each block with a visible key, and one that ends the tile. It runs
// ahead of those who read the ring, the fetching thread and the computing warps.
__device__ __forceinline__ void read_mask(const Params& params, shared_address shared, const Barriers& barriers) {
    const int warp = threadIdx.x / 32 - 1;
    const int lane = threadIdx.x % 32;
    RingPosition<kMaskStages> ring;
    for (TileSequence tiles; tiles.index < params.num_tiles; tiles.advance()) {
        const Tile tile = find_tile(params, tiles.index);
        for (int block = (params.seqlen_kv + kBlockN - 1) / kBlockN - 1; block >= -1; --block) {
            const shared_address entry = shared + kMaskOffset + ring.stage * kMaskStageBytes;
            mbarrier_wait(barriers.mask_empty(ring.stage), ring.parity ^ 1);
            if (block >= 0) {
                const bool whole = params.mask_vector_width == 16 && (block + 1) * kBlockN <= params.seqlen_kv;
                const bool visible = whole ? pack_mask<true>(params, tile, entry, block * kBlockN, warp, lane)
                                           : pack_mask<false>(params, tile, entry, block * kBlockN, warp, lane);
                // An entry without a visible key is not passed on; the next block overwrites it.
                if (!barrier_red_or(kMaskBarrier, 32 * kMaskWarps, visible)) continue;
            }
            if (warp == 0 && lane == 0) store_shared_32(entry + kMaskIndexOffset, block);
            mbarrier_arrive(barriers.mask_full(ring.stage));
            ring.advance();
        }
    }
}

// The fetching warpgroup's one thread: Q of each tile, and K and V of its blocks, as fast as buffers become empty.
__device__ __forceinline__ void produce(const Params& params, shared_address shared, const Barriers& barriers) {
    // The buffers begin empty: of their barriers, the phase before the first has ended.
    RingPosition<kStages> ring;
    RingPosition<kQStages> q_ring;
    RingPosition<kMaskStages> mask_ring;
    auto next_block = [&] {
        mbarrier_wait(barriers.mask_full(mask_ring.stage), mask_ring.parity);
        const int block = load_shared_32(shared + kMaskOffset + mask_ring.stage * kMaskStageBytes + kMaskIndexOffset);
        mbarrier_arrive(barriers.mask_empty(mask_ring.stage));
        mask_ring.advance();
        return block;
    };
    for (TileSequence tiles; tiles.index < params.num_tiles; tiles.advance()) {
        const Tile tile = find_tile(params, tiles.index);
        mbarrier_wait(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
        fetch_queries(params, tile, shared + q_ring.stage * kQBytes, barriers.q_full(q_ring.stage));
        q_ring.advance();
        for (int block = next_block(); block >= 0; block = next_block()) {
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
    RingPosition<kMaskStages> mask_ring;
    auto next_block = [&] {
        mbarrier_wait(barriers.mask_full(mask_ring.stage), mask_ring.parity);
        MaskedBlock block;
        block.load(shared + kMaskOffset + mask_ring.stage * kMaskStageBytes, warp_row, lane);
        mbarrier_arrive(barriers.mask_empty(mask_ring.stage));
        mask_ring.advance();
        return block;
    };
    // The warpgroups take turns at issuing products, so that one multiplies while the others do their softmax.
    auto begin_turn = [&] { barrier_sync(1 + consumer, 256); };
    auto end_turn = [&] { barrier_arrive(1 + (consumer + 1) % kConsumers, 256); };
    if (consumer == kConsumers - 1) end_turn();

    for (TileSequence tiles; tiles.index < params.num_tiles; tiles.advance()) {
        const Tile tile = find_tile(params, tiles.index);
        MaskedBlock block = next_block();
        const int first_row = tile.first_row + warp_row;
        const shared_address q_tile = shared + q_ring.stage * kQBytes + consumer * 64 * kPanelRowBytes;
        mbarrier_wait(barriers.q_full(q_ring.stage), q_ring.parity);
        __syncwarp();  // no lane is left waiting for a phase that another lane lets end
        float output[kHeadDimV / 2] = {};
        RowState rows;
        const bool visible = block.index >= 0;
        if (!visible) release(barriers.q_empty(q_ring.stage));  // queries come for every tile, also where they see nothing
        if (visible) {
            float scores[kBlockN / 2];
            Weights weights;

            mbarrier_wait(barriers.k_full(k_ring.stage), k_ring.parity);
            begin_turn();
            start_qk(scores, q_tile, shared + kKOffset + k_ring.stage * kKBytes);
            end_turn();
            wgmma_wait<0>();
            pin_registers(scores);
            release(barriers.k_empty(k_ring.stage));
            k_ring.advance();
            block.apply(scores);
            softmax_step(scores, rows, params.scale_log2);
            weights.set(scores);

            for (block = next_block(); block.index >= 0; block = next_block()) {
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
                block.apply(scores);
                const bool moved = softmax_step(scores, rows, params.scale_log2);
                wgmma_wait<0>();
                pin_registers(output);
                release(barriers.v_empty(v_ring.stage));
                v_ring.advance();
                // Packed ahead of the branch, so that it fills the gaps between the exponentials.
                weights.set(scores);
                if (moved) rescale(output, rows);
            }
            release(barriers.q_empty(q_ring.stage));
            mbarrier_wait(barriers.v_full(v_ring.stage), v_ring.parity);
            start_pv(output, weights, shared + kVOffset + v_ring.stage * kVBytes);
            wgmma_wait<0>();
            pin_registers(output);
            release(barriers.v_empty(v_ring.stage));
            v_ring.advance();
        }
        store_tile(params, tile, output, rows, first_row, lane);
        q_ring.advance();
    }
    if (consumer == 0) begin_turn();  // the one that the last warpgroup passed on last
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
flash_fwd_hdim128_fp16_dense_sm90(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const shared_address shared = (to_shared(shared_memory) + 1023) / 1024 * 1024;
    const Barriers barriers = {shared + kBarrierOffset};
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        prefetch_tensormap(params.q);
        prefetch_tensormap(params.k);
        prefetch_tensormap(params.v);
        for (int stage = 0; stage < kQStages; ++stage) {
            mbarrier_init(barriers.q_full(stage), 1);
            mbarrier_init(barriers.q_empty(stage), 4 * kConsumers);
        }
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(barriers.k_full(stage), 1);
            mbarrier_init(barriers.v_full(stage), 1);
            mbarrier_init(barriers.k_empty(stage), 4 * kConsumers);
            mbarrier_init(barriers.v_empty(stage), 4 * kConsumers);
        }
        for (int stage = 0; stage < kMaskStages; ++stage) {
            mbarrier_init(barriers.mask_full(stage), 32 * kMaskWarps);
            mbarrier_init(barriers.mask_empty(stage), 128 * kConsumers + 1);
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
        setmaxnreg_dec<88>();
        if (threadIdx.x == 0) produce(params, shared, barriers);
        if (threadIdx.x >= 32) read_mask(params, shared, barriers);
    } else {
        setmaxnreg_inc<208>();
        consume(params, shared, barriers, warpgroup - 1);
    }
}
