// flash_fwd_hdim192_bf16_causal_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 192, head_dim_v 192, dtype bf16, mask_type causal, gqa mha
// tile      block_m 64, block_n 64, warps 4, loop pairs, min_blocks 2
// block     128 threads, 82512 bytes of dynamic shared memory
// target    sm80: sm_80 or later, at most 166912 bytes a block
// spec      flash_fwd_sm80.yaml
// template  flash_fwd_sm80.cu.j2
#include "flashgen/sm80.cuh"

using element = bf16;

constexpr int kHeadDim = 192;  // of Q and K
constexpr int kHeadDimV = 192;  // of V and the output
constexpr int kBlockM = 64;  // query rows of a tile
constexpr int kBlockN = 64;  // keys of a tile
constexpr int kWarps = 4;
constexpr int kKStages = 1;  // blocks of K in shared memory
constexpr int kVStages = 1;  // and of V
constexpr int kThreads = 32 * kWarps;
constexpr int kCopyThreads = kThreads;  // threads that share the copy of a block of K or V
constexpr int kPairs = kWarps / 2;           // of warps that share their rows: warps p and p + kPairs
constexpr int kWarpRows = kBlockM / kPairs;  // rows of a warp, which it shares with its partner
constexpr int kRowTiles = kWarpRows / 16;    // 16-row matrix tiles of a warp
constexpr int kRowTileStep = 16;             // rows from a warp's matrix tile to its next
constexpr int kPartKeys = kBlockN / 2;       // keys of a block whose scores a warp has
constexpr int kPartDims = kHeadDimV / 2;     // columns of the output that it has
constexpr int kKeyTiles = kPartKeys / 8;     // 8-key matrix tiles of its scores
constexpr int kDimTiles = kPartDims / 8;     // 8-wide matrix tiles of its output

constexpr int kRowBytes = kHeadDim * sizeof(element);  // from row to row in shared memory, of V as well
constexpr int kKOffset = kBlockM * kRowBytes;  // Q comes first, then the stages of K, then those of V
constexpr int kStageBytes = kBlockN * kRowBytes;
constexpr int kVOffset = kKOffset + kKStages * kStageBytes;
constexpr int kNoteOffset = kVOffset + kVStages * kStageBytes;
constexpr int kNoteBytes = 16;
constexpr int kWeightsOffset = kNoteOffset + kNoteBytes;
constexpr int kWeightsRowBytes = kBlockN * sizeof(element);
constexpr int kMovesOffset = kWeightsOffset + kBlockM * kWeightsRowBytes;
constexpr int kMovesBytes = 16 + kWarpRows * 4;  // of a warp
constexpr int kSharedBytes = kMovesOffset + kWarps * kMovesBytes;

constexpr float kLn2 = 0.6931471805599453f;

static_assert(kWarps % 2 == 0 && kBlockM % (16 * kPairs) == 0, "a pair of warps owns whole 16-row matrix tiles");
static_assert(kWeightsRowBytes % 128 == 0, "a row of weights spans all 32 banks a whole number of times");
static_assert(kRowTiles == 2, "each lane of a quad keeps a reference of one of its rows");
static_assert(kHeadDimV * sizeof(element) == 3 * 128, "a row of V is three swizzled panels, the middle one for both parts");
static_assert(kBlockN % 16 == 0, "keys are fetched by 16");
static_assert(kHeadDimV <= kHeadDim, "rows of V and of the output fit into those of K and Q");
static_assert(kRowBytes % 64 == 0, "the swizzle permutes at least four 16-byte chunks");
static_assert(kSharedBytes == 82512, "launcher and kernel agree on shared memory");

struct Params {
    const element* q;                     // (batch, seqlen_q, num_heads_q, head_dim), rows 16-byte aligned
    const element* k;                     // (batch, seqlen_kv, num_heads_kv, head_dim), likewise
    const element* v;                     // (batch, seqlen_kv, num_heads_kv, head_dim_v), likewise
    element* out;                         // (batch, seqlen_q, num_heads_q, head_dim_v), likewise
    float* lse;                           // (batch, num_heads_q, seqlen_q), contiguous; may be null
    int64_t q_batch_stride;               // strides are in elements
    int64_t q_row_stride;
    int64_t q_head_stride;
    int64_t k_batch_stride;
    int64_t k_row_stride;
    int64_t k_head_stride;
    int64_t v_batch_stride;
    int64_t v_row_stride;
    int64_t v_head_stride;
    int64_t out_batch_stride;
    int64_t out_row_stride;
    int64_t out_head_stride;
    int32_t batch_size;
    int32_t num_heads_q;
    int32_t num_heads_kv;
    int32_t seqlen_q;
    int32_t seqlen_kv;
    int32_t head_dim;                     // of the call, at most kHeadDim; the rest is predicated
    int32_t head_dim_v;                   // likewise, of v and out
    int32_t num_row_blocks;               // tiles of one head
    int32_t heads_per_section;            // heads whose tiles are launched together
    int32_t num_sections;                 // the last has the heads that are left
    uint64_t num_heads_divisor;           // of the heads of a batch entry in the grid; for divisors see divide()
    uint64_t section_tiles_divisor;       // of the tiles of a section
    uint64_t section_heads_divisor;       // of heads_per_section
    uint64_t last_section_heads_divisor;  // of the heads of the last section
    int32_t diagonal_offset;              // query i is aligned with key i + diagonal_offset
    float scale_log2;                     // softmax_scale * log2(e)
};
static_assert(sizeof(Params) == 216);
static_assert(offsetof(Params, q) == 0);
static_assert(offsetof(Params, k) == 8);
static_assert(offsetof(Params, v) == 16);
static_assert(offsetof(Params, out) == 24);
static_assert(offsetof(Params, lse) == 32);
static_assert(offsetof(Params, q_batch_stride) == 40);
static_assert(offsetof(Params, q_row_stride) == 48);
static_assert(offsetof(Params, q_head_stride) == 56);
static_assert(offsetof(Params, k_batch_stride) == 64);
static_assert(offsetof(Params, k_row_stride) == 72);
static_assert(offsetof(Params, k_head_stride) == 80);
static_assert(offsetof(Params, v_batch_stride) == 88);
static_assert(offsetof(Params, v_row_stride) == 96);
static_assert(offsetof(Params, v_head_stride) == 104);
static_assert(offsetof(Params, out_batch_stride) == 112);
static_assert(offsetof(Params, out_row_stride) == 120);
static_assert(offsetof(Params, out_head_stride) == 128);
static_assert(offsetof(Params, batch_size) == 136);
static_assert(offsetof(Params, num_heads_q) == 140);
static_assert(offsetof(Params, num_heads_kv) == 144);
static_assert(offsetof(Params, seqlen_q) == 148);
static_assert(offsetof(Params, seqlen_kv) == 152);
static_assert(offsetof(Params, head_dim) == 156);
static_assert(offsetof(Params, head_dim_v) == 160);
static_assert(offsetof(Params, num_row_blocks) == 164);
static_assert(offsetof(Params, heads_per_section) == 168);
static_assert(offsetof(Params, num_sections) == 172);
static_assert(offsetof(Params, num_heads_divisor) == 176);
static_assert(offsetof(Params, section_tiles_divisor) == 184);
static_assert(offsetof(Params, section_heads_divisor) == 192);
static_assert(offsetof(Params, last_section_heads_divisor) == 200);
static_assert(offsetof(Params, diagonal_offset) == 208);
static_assert(offsetof(Params, scale_log2) == 212);

// A tile: kBlockM rows of queries that one thread block takes through all the keys they attend to.
struct Tile {
    int batch;
    int head;
    int kv_head;
    int first_row;  // rows are queries
};

// n / d for 0 <= n < 2^31. The launcher makes `divisor` from d: a multiplier in the lower half, and in the upper half the shift
// that follows. Dividing by a number that the compiler does not know takes about 20 dependent instructions.
__device__ __forceinline__ int divide(int n, uint64_t divisor) {
    return uint64_t(uint32_t(n)) * uint32_t(divisor) >> (divisor >> 32);
}

__device__ __forceinline__ Tile find_tile(const Params& params, int index) {
    // Heads are launched in sections, so that the tiles of a head, which share its keys and values in L2, run at about
    // the same time. Within a section the row blocks come
    // one after another for all heads, last block first: the first rows attend to the fewest keys, and short tiles at
    // the end leave the fewest multiprocessors idle.
    const int num_heads = params.num_heads_q;
    const int section = min(divide(index, params.section_tiles_divisor), params.num_sections - 1);
    const int first_head = section * params.heads_per_section;
    const bool is_last = section == params.num_sections - 1;
    const int section_heads = is_last ? num_heads * params.batch_size - first_head : params.heads_per_section;
    const int index_in_section = index - first_head * params.num_row_blocks;
    const int row_block = divide(index_in_section, is_last ? params.last_section_heads_divisor : params.section_heads_divisor);
    const int head_of_batch = first_head + index_in_section - row_block * section_heads;

    Tile tile;
    tile.batch = divide(head_of_batch, params.num_heads_divisor);
    tile.head = head_of_batch - tile.batch * num_heads;
    tile.kv_head = tile.head;
    tile.first_row = (params.num_row_blocks - 1 - row_block) * kBlockM;
    return tile;
}

__device__ __forceinline__ int num_rows(const Params& params) { return params.seqlen_q; }

__device__ __forceinline__ int query_of_row(const Params&, int row) { return row; }

// Offset in elements, from the start of the batch entry, of the row of q or out that belongs to `row`.
__device__ __forceinline__ int64_t row_offset(const Params&, const Tile& tile, int row, int64_t row_stride,
                                              int64_t head_stride) {
    return row * row_stride + tile.head * head_stride;
}

// Shared memory is written and read in chunks of 16 bytes. The chunks of a row are permuted by its row number, so that
// eight consecutive rows of one logical column, which is what ldmatrix reads at a time, lie in eight different groups
// of banks.
constexpr int kChunkElements = 16 / sizeof(element);
constexpr int kSwizzleChunks = 8;  // a row spans all 32 banks a whole number of times: permute by the row modulo 8

__device__ __forceinline__ int swizzle_key(int row) { return row % 8; }
constexpr int kSwizzleBytes = 16 * kSwizzleChunks;

// Where a lane finds its part of a matrix fragment, before any step along the row.
using LaneAddress = shared_address;

__device__ __forceinline__ LaneAddress lane_address(shared_address tile, int row, int chunk) {
    return tile + row * kRowBytes + 16 * (chunk ^ swizzle_key(row));
}

// The same address. The compiler would work it out anew for each block; the result of a shuffle, even from the lane itself, it has
// to keep.
__device__ __forceinline__ LaneAddress kept(LaneAddress address, int lane) { return __shfl_sync(0xffffffff, address, lane); }

// A 16x16 operand of which ldmatrix fetches the four 8x8 quarters: downwards first for Q and (transposed on the way) V,
__device__ __forceinline__ LaneAddress operand_address(shared_address tile, int lane) {
    return lane_address(tile, lane % 16, lane / 16);
}

// and along the rows first for K, whose rows are the matrix instruction's columns.
__device__ __forceinline__ LaneAddress transposed_operand_address(shared_address tile, int lane) {
    return lane_address(tile, lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// The lane's address `row_step` rows down (a multiple of 8) and `chunk_pair` pairs of chunks to the right. Tiles and rows
// begin at multiples of kSwizzleBytes, so that a step within the swizzle is an exclusive or of the address itself.
__device__ __forceinline__ shared_address step_address(const LaneAddress& lane, int row_step, int chunk_pair) {
    const int step_bytes = 32 * chunk_pair;
    return (lane ^ step_bytes % kSwizzleBytes) + row_step * kRowBytes + step_bytes / kSwizzleBytes * kSwizzleBytes;
}

// Where the queries of the tile's batch entry begin, and the keys and values of its head.
__device__ __forceinline__ const element* batch_q(const Params& params, const Tile& tile) {
    return params.q + tile.batch * params.q_batch_stride;
}

__device__ __forceinline__ const element* head_k(const Params& params, const Tile& tile) {
    return params.k + tile.batch * params.k_batch_stride + tile.kv_head * params.k_head_stride;
}

__device__ __forceinline__ const element* head_v(const Params& params, const Tile& tile) {
    return params.v + tile.batch * params.v_batch_stride + tile.kv_head * params.v_head_stride;
}

// Starts the copy of kBlockN rows of K or V, kColumns wide, into shared memory. kSwizzleChunks threads stand side by side
// along a row and each takes every kSwizzleChunks-th chunk of its rows. Rows from `valid_rows` on
// and elements from `head_dim` on become zeros. `row_stride` is in elements.
template <int kColumns>
__device__ __forceinline__ void copy_rows(shared_address tile, const element* source,
                                          int64_t row_stride, int valid_rows, int head_dim) {
    constexpr int kRowsPerPass = kCopyThreads / kSwizzleChunks;
    constexpr int kPanels = kColumns * sizeof(element) / kSwizzleBytes;
    static_assert(kColumns * sizeof(element) % kSwizzleBytes == 0, "the swizzle permutes whole panels");
    static_assert(kRowsPerPass % 8 == 0, "the rows of a thread are swizzled alike");
    const int row = threadIdx.x % kCopyThreads / kSwizzleChunks;
    const int chunk = threadIdx.x % kSwizzleChunks;
    const shared_address destination = tile + row * kRowBytes + 16 * (chunk ^ swizzle_key(row));
    source += row * row_stride + chunk * kChunkElements;
    const int rows_left = valid_rows - row;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
        constexpr int kPanelElements = kSwizzleChunks * kChunkElements;
        const element* from = source + panel * kPanelElements;
#pragma unroll
        for (int first = 0; first < kBlockN; first += kRowsPerPass) {
            cp_async_16(destination + first * kRowBytes + panel * kSwizzleBytes, from,
                        first < rows_left && panel * kPanelElements + chunk * kChunkElements < head_dim ? 16 : 0);
            from += kRowsPerPass * row_stride;  // one addition a row; worked out anew, an address takes five
        }
    }
}

// Starts the copy of the tile's queries, rows past the last one and elements from head_dim on as zeros.
__device__ __forceinline__ void copy_queries(const Params& params, const Tile& tile, shared_address q_tile) {
    const element* q = batch_q(params, tile);
    constexpr int kRowsPerPass = kThreads / kSwizzleChunks;
    static_assert(kBlockM % kRowsPerPass == 0, "every thread copies as many rows");
    static_assert(kRowsPerPass % 8 == 0, "the rows of a thread are swizzled alike");
    const int row = threadIdx.x / kSwizzleChunks;
    const int chunk = threadIdx.x % kSwizzleChunks;
    const int rows_left = num_rows(params) - tile.first_row - row;
    const shared_address destination = q_tile + row * kRowBytes + 16 * (chunk ^ swizzle_key(row));
    // One pointer steps from row to row; the compiler would work out the addresses of all copies ahead.
    const element* source = q + row_offset(params, tile, tile.first_row + row, params.q_row_stride, params.q_head_stride);
#pragma unroll
    for (int first = 0; first < kBlockM; first += kRowsPerPass) {
#pragma unroll
        for (int panel = 0; panel < kRowBytes / kSwizzleBytes; ++panel) {
            const int element_index = (panel * kSwizzleChunks + chunk) * kChunkElements;
            cp_async_16(destination + first * kRowBytes + panel * kSwizzleBytes, source + element_index,
                        first < rows_left && element_index < params.head_dim ? 16 : 0);
        }
        if (first + kRowsPerPass < kBlockM) source += kRowsPerPass * params.q_row_stride;
        opaque(source);
    }
}

// Keys [begin, end).
struct KeyRange {
    int begin;
    int end;
};

// The keys that a query attends to: those up to its diagonal.
__device__ __forceinline__ KeyRange keys_of_query(const Params& params, int query) {
    return {0, max(0, min(params.seqlen_kv, query + params.diagonal_offset + 1))};
}

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

__device__ __forceinline__ KeyRange find_keys(const Params& params, const Tile& tile) {
    return keys_of_some(params, tile.first_row, kBlockM);
}

// Hides keys that lie behind the range of their row. The warp's keys begin at `first_key`, its rows at `first_row`.
__device__ __forceinline__ void hide_late_keys(const Params& params,
                                               float (&scores)[kRowTiles][kKeyTiles][4], int first_row,
                                               int first_key, int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + kRowTileStep * i + 8 * half + lane / 4;
            const int end = keys_of_query(params, query_of_row(params, row)).end - first_key - lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
                if (8 * j >= end) scores[i][j][2 * half] = -INFINITY;
                if (8 * j + 1 >= end) scores[i][j][2 * half + 1] = -INFINITY;
            }
        }
    }
}

// Hides the keys of a block that lie outside the range of their row. `tile_row` is the tile's first row.
__device__ __forceinline__ void hide_keys(const Params& params,
                                          float (&scores)[kRowTiles][kKeyTiles][4], int tile_row, int warp, int lane,
                                          int block) {
    // Most blocks are seen by every row from the first key to the last.
    const int warp_row = tile_row + warp % kPairs * kWarpRows;
    const KeyRange every = keys_of_every(params, min(warp_row, num_rows(params) - 1), kWarpRows);
    const int first_key = block * kBlockN + warp / kPairs * kPartKeys;
    if ((block + 1) * kBlockN > every.end) {
        hide_late_keys(params, scores, warp_row, first_key, lane);
    }
}

// scores (kWarpRows x kPartKeys) = Q . K^T for the warp's rows and keys, in fp32. Element [i][j][e] of thread (g, t) = (lane / 4,
// lane % 4) is row 16 i + g + 8 (e / 2), key 8 j + 2 t + e % 2.
__device__ __forceinline__ void multiply_qk(float (&scores)[kRowTiles][kKeyTiles][4],
                                            const LaneAddress& q_lane, const LaneAddress& k_lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i][j][e] = 0.0f;
        }
    }
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        uint32_t q_fragment[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) ldmatrix_x4(q_fragment[i], step_address(q_lane, kRowTileStep * i, step));
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
            uint32_t k_fragment[4];
            ldmatrix_x4(k_fragment, step_address(k_lane, 8 * j, step));
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_m16n8k16<element>(scores[i][j], q_fragment[i], k_fragment[0], k_fragment[1]);
                mma_m16n8k16<element>(scores[i][j + 1], q_fragment[i], k_fragment[2], k_fragment[3]);
            }
        }
    }
}

// The weights P of half of a block's keys, rounded and packed as they come out of softmax. Two neighbouring key tiles of an
// accumulator, packed, are a left operand of the matrix instruction as they lie. The partner gets them through shared memory.
struct Weights {
    uint32_t fragment[kRowTiles][kPartKeys / 16][4];

    __device__ __forceinline__ void set(int i, int j, const float (&values)[4]) {
        fragment[i][j / 2][j % 2 * 2] = pack<element>(values[0], values[1]);
        fragment[i][j / 2][j % 2 * 2 + 1] = pack<element>(values[2], values[3]);
    }

    // Multiplies the rows g and g + 8 of tile i by factors up to 1.
    __device__ __forceinline__ void scale(int i, const float (&factors)[2]) {
#pragma unroll
        for (int j = 0; j < kKeyTiles / 2; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 pair = unpack<element>(fragment[i][j][e]);
                fragment[i][j][e] = pack<element>(pair.x * factors[e % 2], pair.y * factors[e % 2]);
            }
        }
    }
};

// Half of V's columns is one and a half panels: a part has a panel of its own and half of the middle one. Where a lane finds its
// part of a fragment in each of the two, before any step.
struct PartAddress {
    LaneAddress own_panel;
    LaneAddress split_panel;

    __device__ __forceinline__ PartAddress operator+(int bytes) const { return {own_panel + bytes, split_panel + bytes}; }
};

__device__ __forceinline__ shared_address step_address(const PartAddress& lane, int row_step, int chunk_pair) {
    constexpr int kOwnPairs = kSwizzleChunks / 2;  // of chunks
    return chunk_pair < kOwnPairs ? step_address(lane.own_panel, row_step, chunk_pair)
                                  : step_address(lane.split_panel, row_step, chunk_pair - kOwnPairs);
}

// output (kWarpRows x kPartDims) += P . V for the kPartKeys keys of some weights.
__device__ __forceinline__ void multiply_pv(float (&output)[kRowTiles][kDimTiles][4],
                                            const Weights& weights, const PartAddress& v_lane) {
#pragma unroll
    for (int j = 0; j < kPartKeys / 16; ++j) {
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 2) {
            uint32_t v_fragment[4];
            ldmatrix_x4_trans(v_fragment, step_address(v_lane, 16 * j, n / 2));
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                mma_m16n8k16<element>(output[i][n], weights.fragment[i][j], v_fragment[0], v_fragment[1]);
                mma_m16n8k16<element>(output[i][n + 1], weights.fragment[i][j], v_fragment[2], v_fragment[3]);
            }
        }
    }
}

// Online softmax. Scores are kept as the matrix product left them; the scale and log2(e) are folded into one factor, so
// that weight = 2^(score * scale_log2 - reference) with one multiply-add and one exponential an element.
//
// `reference` is a row's running maximum, except that it moves only when a score exceeds it by more than kSlack. Weights
// may then reach 2^kSlack, which costs no accuracy (they are floating-point numbers, and numerator and denominator share
// the factor) and spares nearly all rescaling of the output and the exchange of maxima between lanes.
constexpr float kSlack = 8.0f;
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
    float reference[kRowTiles][2];  // log2 domain; rows g and g + 8 of a 16-row tile
    float sum[kRowTiles][2];        // this lane's share of the row's sum of weights
};

// Multiplies what has been summed up for the rows g and g + 8 of matrix tile i.
__device__ __forceinline__ void rescale(int i, const float (&correction)[2], RowState& rows,
                                        float (&output)[kRowTiles][kDimTiles][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rows.sum[i][half] *= correction[half];
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
            output[i][n][2 * half] *= correction[half];
            output[i][n][2 * half + 1] *= correction[half];
        }
    }
}

// Turns the scores of a tile into weights, adds them to the rows' sums and rescales the output where a reference moves.
// Returns whether one does, the same for all lanes. If so, the new references of all rows are noted down. Of a quad's four rows
// lane t keeps the reference that row t had before, in `previous_reference`.
__device__ __forceinline__ bool softmax_step(const float (&scores)[kRowTiles][kKeyTiles][4],
                                             RowState& rows, float (&output)[kRowTiles][kDimTiles][4],
                                             Weights& weights, float scale_log2, float& previous_reference, shared_address noted_references, int lane) {
    float tile_max[kRowTiles][2];
    bool moves = false;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float value = fmaxf(scores[i][0][2 * half], scores[i][0][2 * half + 1]);
#pragma unroll
            for (int j = 1; j < kKeyTiles; ++j) {
                value = fmaxf(value, fmaxf(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
            }
            tile_max[i][half] = value * scale_log2;
            moves |= tile_max[i][half] > rows.reference[i][half] + kSlack;
        }
    }
    moves = __any_sync(0xffffffff, moves);
    if (moves) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            float correction[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float previous = rows.reference[i][half];
                rows.reference[i][half] = fmaxf(previous, quad_max(tile_max[i][half]));
                correction[half] = exp2_approx(previous - rows.reference[i][half]);
                if (lane % 4 == 2 * i + half) {
                    previous_reference = previous;
                    store_shared_32(noted_references + 4 * (16 * i + 8 * half + lane / 4), __float_as_uint(rows.reference[i][half]));
                }
            }
            rescale(i, correction, rows, output);
        }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
            float values[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                values[e] = exp2_approx(fmaf(scores[i][j][e], scale_log2, -rows.reference[i][e / 2]));
                rows.sum[i][e / 2] += values[e];
            }
            weights.set(i, j, values);
        }
    }
    return moves;
}

// Registers are too scarce to keep the tile through the loop: it is noted down in shared memory for the epilogue. Reading it
// back takes less than working it out again.
__device__ __forceinline__ void note_tile(const Tile& tile, shared_address note) {
    store_shared_64(note, tile.batch, tile.head);
    store_shared_64(note + 8, tile.kv_head, tile.first_row);
}

__device__ __forceinline__ Tile noted_tile(shared_address note) {
    const uint4 numbers = load_shared_128(note);
    Tile tile;
    tile.batch = numbers.x;
    tile.head = numbers.y;
    tile.kv_head = numbers.z;
    tile.first_row = numbers.w;
    return tile;
}

// Divides the output by the sums. A row that attends to nothing has the sum 0 and becomes 0.
__device__ __forceinline__ void normalise(float (&output)[kRowTiles][kDimTiles][4], RowState& rows) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = rows.sum[i][half];
            const float factor = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                output[i][n][2 * half] *= factor;
                output[i][n][2 * half + 1] *= factor;
            }
        }
    }
}

// lse = ln(sum of exp(score * softmax_scale)), -inf for a row that attends to nothing. (batch, num_heads_q, seqlen_q).
__device__ __forceinline__ void store_lse(const Params& params, const Tile& tile, const RowState& rows, int warp, int lane) {
    if (params.lse == nullptr || lane % 4 != 0 || warp >= kPairs) return;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = tile.first_row + warp % kPairs * kWarpRows + kRowTileStep * i + 8 * half + lane / 4;
            if (row < num_rows(params)) {
                const int64_t batch_offset = int64_t(tile.batch) * params.num_heads_q * params.seqlen_q;
                store_global_32(params.lse + batch_offset + row_offset(params, tile, row, 1, params.seqlen_q),
                                (rows.reference[i][half] + log2_approx(rows.sum[i][half])) * kLn2);
            }
        }
    }
}

// Rounds the output and writes it by way of the Q tile, which nobody reads any more, so that global memory sees whole rows in
// 16-byte pieces: a pair of warps puts the columns of its rows together, and each warp stores half of the rows.
__device__ __forceinline__ void store_output(const Params& params, const Tile& tile,
                                             const float (&output)[kRowTiles][kDimTiles][4], shared_address q_tile,
                                             int warp, int lane) {
    const int part = warp / kPairs;
    const shared_address pair_tile = q_tile + warp % kPairs * kWarpRows * kRowBytes;
    // Where the lane's first row of the output goes, in either panel of the part.
    const shared_address lane_row = pair_tile + lane / 4 * kRowBytes + 16 * swizzle_key(lane / 4) + lane % 4 * 4;
    const shared_address own_panel = lane_row + part * 2 * kSwizzleBytes;
    const shared_address split_panel = (lane_row ^ part * kSwizzleBytes / 2) + kSwizzleBytes;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                const shared_address panel = n < kSwizzleChunks ? own_panel : split_panel;
                store_shared_32((panel ^ 16 * (n % kSwizzleChunks)) + (kRowTileStep * i + 8 * half) * kRowBytes,
                                pack<element>(output[i][n][2 * half], output[i][n][2 * half + 1]));
            }
        }
    }
    barrier_sync(kThreads);
    constexpr int kStoredRows = kWarpRows / 2;
    const int first_stored_row = warp % kPairs * kWarpRows + part * kStoredRows;
    const shared_address warp_tile = q_tile + first_stored_row * kRowBytes;

    // All pieces are fetched before the first is stored: their latencies overlap, where one by one each store would wait for
    // its own.
    constexpr int kRowsPerPass = 32 / kSwizzleChunks;
    constexpr int kPasses = kStoredRows / kRowsPerPass;
    constexpr int kPanels = kHeadDimV * sizeof(element) / kSwizzleBytes;
    const int chunk = lane % kSwizzleChunks;
    auto row_of_pass = [&](int pass) { return pass * kRowsPerPass + lane / kSwizzleChunks; };
    uint4 pieces[kPasses][kPanels];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int row = row_of_pass(pass);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            pieces[pass][panel] = load_shared_128(warp_tile + row * kRowBytes + panel * kSwizzleBytes +
                                                  16 * (chunk ^ swizzle_key(row)));
        }
    }
    const int first_row = tile.first_row + first_stored_row;
    element* out = params.out + tile.batch * params.out_batch_stride;
    // One pointer steps from row to row; the compiler would work out the addresses of all stores ahead.
    element* out_row =
        out + row_offset(params, tile, first_row + row_of_pass(0), params.out_row_stride, params.out_head_stride);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int tile_row = first_row + row_of_pass(pass);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            const int element_index = (panel * kSwizzleChunks + chunk) * kChunkElements;
            if (tile_row < num_rows(params) && element_index < params.head_dim_v) {
                store_global_128(out_row + element_index, pieces[pass][panel]);
            }
        }
        if (pass + 1 < kPasses) out_row += (row_of_pass(pass + 1) - row_of_pass(pass)) * params.out_row_stride;
        opaque(out_row);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
flash_fwd_hdim192_bf16_causal_sm80(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const shared_address q_tile = to_shared(shared_memory);
    const shared_address k_tiles = q_tile + kKOffset;
    const shared_address v_tiles = q_tile + kVOffset;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    const Tile tile = find_tile(params, block_index());
    const shared_address note = q_tile + kNoteOffset;
    if (threadIdx.x == 0) note_tile(tile, note);
    const KeyRange keys = find_keys(params, tile);
    // Blocks of keys are visited from the last to the first, so that a ragged last block comes before the steady state.
    const int first_block = keys.begin / kBlockN;
    const int last_block = (keys.end + kBlockN - 1) / kBlockN - 1;

    const LaneAddress q_lane = operand_address(q_tile + warp % kPairs * kWarpRows * kRowBytes, lane);
    float output[kRowTiles][kDimTiles][4] = {};
    RowState rows;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        rows.reference[i][0] = rows.reference[i][1] = kNoReference;
        rows.sum[i][0] = rows.sum[i][1] = 0.0f;
    }

    // From sm_90 on the grid before this one in the stream may still be writing what this one reads, or reading what this one writes.
    griddepcontrol_wait();
    // Blocks of the next grid may now come wherever this one leaves room. Not ahead of the wait, for the next may count on every
    // grid before this one to have ended.
    griddepcontrol_launch_dependents();

    static_assert(sizeof(element) == 2, "weights are the left operand as they lie in shared memory");

    // K and V have one stage each: V of a block is fetched while its scores are computed, K of the next block while P and V of this
    // one are multiplied. At a large head dimension shared memory is the limit: a warp with rows of its own would read all of K and V
    // for them. Here two warps share twice as many rows. Each computes the scores of half of the keys of a block, and half of the
    // output's columns: it reads half of the rows of K, half of the columns of V, and the weights of the other's keys.
    auto copy_k = [&](const element* k, shared_address stage, int block) {
        copy_rows<kHeadDim>(stage, k + block * kBlockN * params.k_row_stride, params.k_row_stride,
                            params.seqlen_kv - block * kBlockN, params.head_dim);
        cp_async_commit();
    };
    auto copy_v = [&](const element* v, shared_address stage, int block) {
        copy_rows<kHeadDimV>(stage, v + block * kBlockN * params.v_row_stride, params.v_row_stride,
                             params.seqlen_kv - block * kBlockN, params.head_dim_v);
        cp_async_commit();
    };
    const element* first_k = head_k(params, tile);
    const element* first_v = head_v(params, tile);
    if (last_block >= first_block) {
        copy_queries(params, tile, q_tile);
        copy_k(first_k, k_tiles, last_block);
    }
    barrier_sync(kThreads);  // the note is written

    const int pair = warp % kPairs;
    const int part = warp / kPairs;
    const int partner = (1 - part) * kPairs + pair;
    const LaneAddress k_lane = transposed_operand_address(k_tiles, lane) + part * kPartKeys * kRowBytes;
    // Half of V's columns: panel 0 with the first half of panel 1, or panel 2 with the second half.
    const PartAddress v_lane = {kept(operand_address(v_tiles, lane) + part * 2 * kSwizzleBytes, lane),
                                kept((operand_address(v_tiles, lane) ^ part * kSwizzleBytes / 2) + kSwizzleBytes, lane)};

    // Weights of the pair's rows, all keys of a block side by side. Chunks of 16 bytes are permuted by the row modulo 8. A lane stores
    // as an accumulator lies (rows g and g + 8, keys 2 t and 2 t + 1 of every eight) and fetches as ldmatrix does.
    const shared_address pair_weights = q_tile + kWeightsOffset + pair * kWarpRows * kWeightsRowBytes;

    // Moves of a warp: the first word says whether references moved in this block; if so, the new ones of its rows begin 16 bytes in.
    const shared_address own_moves = q_tile + kMovesOffset + warp * kMovesBytes;
    const shared_address partner_moves = q_tile + kMovesOffset + partner * kMovesBytes;
    auto row_in_pair = [&](int i, int half) { return 16 * i + 8 * half + lane / 4; };
    float previous_reference = 0.0f;  // of row t of the quad's four, in its lane t: from before the last move

    for (int block = last_block; block >= first_block; --block) {
        // K of this block is here, and every warp has finished with V, weights and moves of the block before.
        cp_async_wait<0>();
        barrier_sync(kThreads);
        copy_v(first_v, v_tiles, block);

        float scores[kRowTiles][kKeyTiles][4];
        Weights weights;
        multiply_qk(scores, q_lane, k_lane);
        hide_keys(params, scores, tile.first_row, warp, lane, block);
        const bool moved = softmax_step(scores, rows, output, weights, params.scale_log2, previous_reference, own_moves + 16, lane);

        const shared_address stored_weights = pair_weights + lane / 4 * kWeightsRowBytes + lane % 4 * 4;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    store_shared_32(stored_weights + (16 * i + 8 * half) * kWeightsRowBytes +
                                        16 * ((part * kKeyTiles + j) ^ lane / 4),
                                    weights.fragment[i][j / 2][j % 2 * 2 + half]);
                }
            }
        }
        if (lane == 0) store_shared_32(own_moves, moved);

        // V of this block is here, every warp has finished with K, and weights and moves are complete.
        cp_async_wait<0>();
        barrier_sync(kThreads);

        const shared_address fetched_weights = pair_weights + lane % 16 * kWeightsRowBytes;
        Weights partner_weights;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int j = 0; j < kKeyTiles / 2; ++j) {
                ldmatrix_x4(partner_weights.fragment[i][j],
                            fetched_weights + 16 * i * kWeightsRowBytes +
                                16 * (((1 - part) * kKeyTiles + 2 * j + lane / 16) ^ lane % 8));
            }
        }
        const bool partner_moved = load_shared_32(partner_moves);
        if (block > first_block) copy_k(first_k, k_tiles, block - 1);
        if (moved || partner_moved) {
            // Both had the same references before the block, and take the greater ones now. A partner that has not moved still has
            // those from before: the lanes of a quad have kept one each.
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                float correction[2], partner_correction[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float partner_reference =
                        partner_moved ? __uint_as_float(load_shared_32(partner_moves + 16 + 4 * row_in_pair(i, half)))
                                      : __shfl_sync(0xffffffff, previous_reference, 2 * i + half, 4);
                    const float reference = fmaxf(rows.reference[i][half], partner_reference);
                    correction[half] = exp2_approx(rows.reference[i][half] - reference);
                    partner_correction[half] = exp2_approx(partner_reference - reference);
                    rows.reference[i][half] = reference;
                }
                rescale(i, correction, rows, output);
                weights.scale(i, correction);
                partner_weights.scale(i, partner_correction);
            }
        }
        multiply_pv(output, weights, v_lane + part * kPartKeys * kRowBytes);
        multiply_pv(output, partner_weights, v_lane + (1 - part) * kPartKeys * kRowBytes);
    }

    // Each warp has summed up the weights of its keys. Nobody reads K any more, and the sums pass through its place.
    const shared_address own_sums = k_tiles + warp * kWarpRows * 4;
    const shared_address partner_sums = k_tiles + partner * kWarpRows * 4;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows.sum[i][half] = quad_sum(rows.sum[i][half]);
            if (lane % 4 == 0) store_shared_32(own_sums + 4 * row_in_pair(i, half), __float_as_uint(rows.sum[i][half]));
        }
    }
    barrier_sync(kThreads);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows.sum[i][half] += __uint_as_float(load_shared_32(partner_sums + 4 * row_in_pair(i, half)));
        }
    }

    const Tile stored_tile = noted_tile(note);
    normalise(output, rows);
    store_lse(params, stored_tile, rows, warp, lane);
    store_output(params, stored_tile, output, q_tile, warp, lane);
}
