// flash_fwd_hdim128_bf16_causal_gqa_sm80
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type causal, gqa gqa
// tile      block_m 128, block_n 64, warps 4, loop halves, min_blocks 2
// block     128 threads, 81952 bytes of dynamic shared memory
// target    sm80: sm_80 or later, at most 166912 bytes a block
// spec      flash_fwd_sm80.yaml
// template  flash_fwd_sm80.cu.j2
#include "flashgen/sm80.cuh"

using element = bf16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kHeadDimV = 128;  // of V and the output
constexpr int kBlockM = 128;  // query rows of a tile
constexpr int kBlockN = 64;  // keys of a tile
constexpr int kWarps = 4;
constexpr int kKStages = 2;  // blocks of K in shared memory
constexpr int kVStages = 1;  // and of V
constexpr int kThreads = 32 * kWarps;
constexpr int kCopyThreads = kThreads;  // threads that share the copy of a block of K or V
constexpr int kWarpRows = kBlockM / kWarps;  // a warp owns whole rows, so that softmax never leaves it
constexpr int kRowTiles = kWarpRows / 16;    // 16-row matrix tiles of a warp
constexpr int kRowTileStep = 16 * kWarps;    // rows of a half; from a warp's matrix tile in the upper one to that in the lower
constexpr int kKeyTiles = kBlockN / 8;       // 8-key matrix tiles of a key block
constexpr int kDimTiles = kHeadDimV / 8;     // 8-wide matrix tiles of the output's head dimension

constexpr int kRowBytes = kHeadDim * sizeof(element);  // from row to row in shared memory, of V as well
constexpr int kKOffset = kBlockM * kRowBytes;  // Q comes first, then the stages of K, then those of V
constexpr int kStageBytes = kBlockN * kRowBytes;
constexpr int kVOffset = kKOffset + kKStages * kStageBytes;
constexpr int kNoteOffset = kVOffset + kVStages * kStageBytes;
constexpr int kNoteBytes = 32;
constexpr int kSharedBytes = kNoteOffset + kNoteBytes;

constexpr float kLn2 = 0.6931471805599453f;

static_assert(kBlockM % (16 * kWarps) == 0, "a warp owns whole 16-row matrix tiles");
static_assert(kBlockN % 16 == 0, "keys are fetched by 16");
static_assert(kHeadDimV <= kHeadDim, "rows of V and of the output fit into those of K and Q");
static_assert(kRowBytes % 64 == 0, "the swizzle permutes at least four 16-byte chunks");
static_assert(kRowTiles == 2, "each half has a matrix tile of each warp");
static_assert(kBlockN <= kRowTileStep, "a block of keys is no wider than the rows of a half");
static_assert(kSharedBytes == 81952, "launcher and kernel agree on shared memory");

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
    uint64_t group_size_divisor;          // of num_heads_q / num_heads_kv
    uint64_t section_tiles_divisor;       // of the tiles of a section
    uint64_t section_heads_divisor;       // of heads_per_section
    uint64_t last_section_heads_divisor;  // of the heads of the last section
    int32_t diagonal_offset;              // query i is aligned with key i + diagonal_offset
    float scale_log2;                     // softmax_scale * log2(e)
};
static_assert(sizeof(Params) == 224);
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
static_assert(offsetof(Params, group_size_divisor) == 184);
static_assert(offsetof(Params, section_tiles_divisor) == 192);
static_assert(offsetof(Params, section_heads_divisor) == 200);
static_assert(offsetof(Params, last_section_heads_divisor) == 208);
static_assert(offsetof(Params, diagonal_offset) == 216);
static_assert(offsetof(Params, scale_log2) == 220);

// The matrix tiles [kBegin, kEnd) of a warp's rows: an empty argument that chooses them at compile time. The upper half is the
// first kRowTileStep rows of the tile.
template <int kBegin, int kEnd>
struct RowTiles {};
using LowerHalf = RowTiles<1, 2>;
using BothHalves = RowTiles<0, 2>;

// Whether all keys of a block exist: an empty argument that says so at compile time. Of the blocks that a tile visits only the
// last may reach past the sequence's end.
template <bool kWhole>
struct IsWhole {};
using Whole = IsWhole<true>;
using MaybeRagged = IsWhole<false>;

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
    tile.kv_head = divide(tile.head, params.group_size_divisor);
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
// along a row and each takes every kSwizzleChunks-th chunk of its rows. Rows from `valid_rows` on, of which a whole block has
// none, and elements from `head_dim` on, become zeros. `row_stride` is in elements.
template <int kColumns, bool kWhole>
__device__ __forceinline__ void copy_rows(IsWhole<kWhole>, shared_address tile, const element* source,
                                          int64_t row_stride, int valid_rows, int head_dim) {
    constexpr int kRowsPerPass = kCopyThreads / kSwizzleChunks;
    constexpr int kPanels = kColumns * sizeof(element) / kSwizzleBytes;
    static_assert(kColumns * sizeof(element) % kSwizzleBytes == 0, "the swizzle permutes whole panels");
    static_assert(kRowsPerPass % 8 == 0, "the rows of a thread are swizzled alike");
    const int row = threadIdx.x % kCopyThreads / kSwizzleChunks;
    const int chunk = threadIdx.x % kSwizzleChunks;
    const shared_address destination = tile + row * kRowBytes + 16 * (chunk ^ swizzle_key(row));
    source += row * row_stride + chunk * kChunkElements;
    constexpr int kPanelElements = kSwizzleChunks * kChunkElements;
    const int rows_left = valid_rows - row;
    // One pointer steps from row to row, an addition each. The compiler would work out an address for each copy, which takes
    // five, if it saw through the pointer.
#pragma unroll
    for (int first = 0; first < kBlockN; first += kRowsPerPass) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            cp_async_16(destination + first * kRowBytes + panel * kSwizzleBytes, source + panel * kPanelElements,
                        (kWhole || first < rows_left) && panel * kPanelElements + chunk * kChunkElements < head_dim ? 16 : 0);
        }
        if (first + kRowsPerPass < kBlockN) source += kRowsPerPass * row_stride;
        opaque(source);
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
template <int kBegin, int kEnd>
__device__ __forceinline__ void hide_late_keys(RowTiles<kBegin, kEnd>, const Params& params,
                                               float (&scores)[kRowTiles][kKeyTiles][4], int first_row,
                                               int first_key, int lane) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
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
template <int kBegin, int kEnd>
__device__ __forceinline__ void hide_keys(RowTiles<kBegin, kEnd> row_tiles, const Params& params,
                                          float (&scores)[kRowTiles][kKeyTiles][4], int tile_row, int warp, int lane,
                                          int block) {
    // Most blocks are seen by every row from the first key to the last.
    const KeyRange every = keys_of_every(params, tile_row + kBegin * kRowTileStep, (kEnd - kBegin) * kRowTileStep);
    const int warp_row = tile_row + warp * 16;
    const int first_key = block * kBlockN;
    if ((block + 1) * kBlockN > every.end) {
        hide_late_keys(row_tiles, params, scores, warp_row, first_key, lane);
    }
}

// scores = Q . K^T for the given matrix tiles of the warp's rows, in fp32. Element [i][j][e] of thread (g, t) = (lane / 4,
// lane % 4) is row g + 8 (e / 2) of tile i, key 8 j + 2 t + e % 2.
template <int kBegin, int kEnd>
__device__ __forceinline__ void multiply_qk(RowTiles<kBegin, kEnd>, float (&scores)[kRowTiles][kKeyTiles][4],
                                            const LaneAddress& q_lane, const LaneAddress& k_lane) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
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
        for (int i = kBegin; i < kEnd; ++i) ldmatrix_x4(q_fragment[i], step_address(q_lane, kRowTileStep * i, step));
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
            uint32_t k_fragment[4];
            ldmatrix_x4(k_fragment, step_address(k_lane, 8 * j, step));
#pragma unroll
            for (int i = kBegin; i < kEnd; ++i) {
                mma_m16n8k16<element>(scores[i][j], q_fragment[i], k_fragment[0], k_fragment[1]);
                mma_m16n8k16<element>(scores[i][j + 1], q_fragment[i], k_fragment[2], k_fragment[3]);
            }
        }
    }
}

// The weights P of a key block, rounded and packed as they come out of softmax. Two neighbouring key tiles of an
// accumulator, packed, are a left operand of the matrix instruction as they lie: P never leaves its registers.
struct Weights {
    uint32_t fragment[kRowTiles][kBlockN / 16][4];

    __device__ __forceinline__ void set(int i, int j, const float (&values)[4]) {
        fragment[i][j / 2][j % 2 * 2] = pack<element>(values[0], values[1]);
        fragment[i][j / 2][j % 2 * 2 + 1] = pack<element>(values[2], values[3]);
    }
};

// output += P . V for the given matrix tiles.
template <int kBegin, int kEnd>
__device__ __forceinline__ void multiply_pv(RowTiles<kBegin, kEnd>, float (&output)[kRowTiles][kDimTiles][4],
                                            const Weights& weights, const LaneAddress& v_lane) {
#pragma unroll
    for (int j = 0; j < kBlockN / 16; ++j) {
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 2) {
            uint32_t v_fragment[4];
            ldmatrix_x4_trans(v_fragment, step_address(v_lane, 16 * j, n / 2));
#pragma unroll
            for (int i = kBegin; i < kEnd; ++i) {
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
template <int kBegin, int kEnd>
__device__ __forceinline__ void softmax_step(RowTiles<kBegin, kEnd>, const float (&scores)[kRowTiles][kKeyTiles][4],
                                             RowState& rows, float (&output)[kRowTiles][kDimTiles][4],
                                             Weights& weights, float scale_log2) {
    float tile_max[kRowTiles][2];
    bool moves = false;
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
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
        for (int i = kBegin; i < kEnd; ++i) {
            float correction[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float previous = rows.reference[i][half];
                rows.reference[i][half] = fmaxf(previous, quad_max(tile_max[i][half]));
                correction[half] = exp2_approx(previous - rows.reference[i][half]);
            }
            rescale(i, correction, rows, output);
        }
    }
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
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
}

// Registers are too scarce to keep through the loop what is needed once a block or once a tile: it is noted down in shared
// memory. The sources are read back at each block after the first, the first row at each block, the rest by the epilogue.
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

__device__ __forceinline__ int noted_first_row(shared_address note) { return load_shared_32(note + 12); }

// The first keys and values of the tile's head.
struct Sources {
    const element* k;
    const element* v;
};

__device__ __forceinline__ void note_sources(const Sources& sources, shared_address note) {
    const uint64_t k = reinterpret_cast<uint64_t>(sources.k);
    const uint64_t v = reinterpret_cast<uint64_t>(sources.v);
    store_shared_64(note + 16, k, k >> 32);
    store_shared_64(note + 24, v, v >> 32);
}

__device__ __forceinline__ Sources noted_sources(shared_address note) {
    const uint4 words = load_shared_128(note + 16);
    return {reinterpret_cast<const element*>(uint64_t(words.y) << 32 | words.x),
            reinterpret_cast<const element*>(uint64_t(words.w) << 32 | words.z)};
}

// Completes the sums and divides the output by them. A row that attends to nothing has the sum 0 and becomes 0.
__device__ __forceinline__ void normalise(float (&output)[kRowTiles][kDimTiles][4], RowState& rows) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows.sum[i][half] = quad_sum(rows.sum[i][half]);
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
    if (params.lse == nullptr || lane % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = tile.first_row + warp * 16 + kRowTileStep * i + 8 * half + lane / 4;
            if (row < num_rows(params)) {
                const int64_t batch_offset = int64_t(tile.batch) * params.num_heads_q * params.seqlen_q;
                store_global_32(params.lse + batch_offset + row_offset(params, tile, row, 1, params.seqlen_q),
                                (rows.reference[i][half] + log2_approx(rows.sum[i][half])) * kLn2);
            }
        }
    }
}

// Rounds the output and writes it by way of the warp's own rows of the Q tile, which nobody reads any more, so that
// global memory sees whole rows in 16-byte pieces.
__device__ __forceinline__ void store_output(const Params& params, const Tile& tile,
                                             const float (&output)[kRowTiles][kDimTiles][4], shared_address q_tile,
                                             int warp, int lane) {
    const shared_address warp_tile = q_tile + warp * 16 * kRowBytes;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = kRowTileStep * i + 8 * half + lane / 4;
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                store_shared_32(warp_tile + row * kRowBytes + 16 * (n ^ swizzle_key(row)) + lane % 4 * 4,
                                pack<element>(output[i][n][2 * half], output[i][n][2 * half + 1]));
            }
        }
    }
    __syncwarp();

    // All pieces are fetched before the first is stored: their latencies overlap, where one by one each store would wait for
    // its own.
    constexpr int kRowsPerPass = 32 / kSwizzleChunks;
    constexpr int kPasses = kWarpRows / kRowsPerPass;
    constexpr int kPanels = kHeadDimV * sizeof(element) / kSwizzleBytes;
    const int chunk = lane % kSwizzleChunks;
    auto row_of_pass = [&](int pass) {
        return pass / (kPasses / 2) * kRowTileStep + pass % (kPasses / 2) * kRowsPerPass + lane / kSwizzleChunks;
    };
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
    const int first_row = tile.first_row + warp * 16;
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
flash_fwd_hdim128_bf16_causal_gqa_sm80(const __grid_constant__ Params params) {
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

    const LaneAddress q_lane = operand_address(q_tile + warp * 16 * kRowBytes, lane);
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

    static_assert(sizeof(element) == 2, "the fragments of V are loaded by ldmatrix");

    // K has two stages and V has one; block b of K lies in stage b % 2. While the scores of a block are computed, V of it and K
    // of the next block are on their way.
    //
    // Each warp has a matrix tile of rows in the upper half of the thread block's rows and one in the lower half. A block of
    // keys that matters to one half only then costs every warp half of the work. With its rows side by side a warp would
    // have all of it or none, and who has none waits for the others.
    auto copy_k = [&](auto is_whole, const element* k, shared_address stage, int block) {
        copy_rows<kHeadDim>(is_whole, stage, k + block * kBlockN * params.k_row_stride, params.k_row_stride,
                            params.seqlen_kv - block * kBlockN, params.head_dim);
        cp_async_commit();
    };
    auto copy_v = [&](auto is_whole, const element* v, shared_address stage, int block) {
        copy_rows<kHeadDimV>(is_whole, stage, v + block * kBlockN * params.v_row_stride, params.v_row_stride,
                             params.seqlen_kv - block * kBlockN, params.head_dim_v);
        cp_async_commit();
    };
    const element* first_k = head_k(params, tile);
    const element* first_v = head_v(params, tile);
    auto k_stage = [&](int block) { return k_tiles + (block & 1) * kStageBytes; };
    auto copy_next_k = [&](const element* k, int block) {
        if (block > first_block) {
            copy_k(Whole{}, k, k_stage(block - 1), block - 1);
        } else {
            cp_async_commit();  // nothing, so that V's is the last group but one here, too
        }
    };

    if (threadIdx.x == 0) note_sources({first_k, first_v}, note);
    if (last_block >= first_block) {
        copy_queries(params, tile, q_tile);
        copy_k(MaybeRagged{}, first_k, k_stage(last_block), last_block);
        copy_v(MaybeRagged{}, first_v, v_tiles, last_block);
        copy_next_k(first_k, last_block);
    } else {
        barrier_sync(kThreads);  // the note is written: a tile without keys meets no other barrier
    }

    // Addresses are worked out or read back for each block: there are no registers to keep them.
    auto visit = [&](auto row_tiles, int block) {
        // K of this block is here, at the first one with Q: a thread waits for its own copies, and the barrier for everybody's.
        // And every warp has finished with K and V of the block before. V of the first block and K of the one after it are on
        // their way already.
        if (block == last_block) {
            cp_async_wait<2>();
            barrier_sync(kThreads);
        } else {
            const Sources sources = noted_sources(note);
            cp_async_wait<0>();
            barrier_sync(kThreads);
            copy_v(Whole{}, sources.v, v_tiles, block);
            copy_next_k(sources.k, block);
        }

        float scores[kRowTiles][kKeyTiles][4];
        Weights weights;
        multiply_qk(row_tiles, scores, q_lane, transposed_operand_address(k_stage(block), lane));
        hide_keys(row_tiles, params, scores, noted_first_row(note), warp, lane, block);
        softmax_step(row_tiles, scores, rows, output, weights, params.scale_log2);

        // V of this block is here; K of the next may still be on its way.
        cp_async_wait<1>();
        barrier_sync(kThreads);
        multiply_pv(row_tiles, output, weights, operand_address(v_tiles, lane));
    };

    // Ranges of keys end further right from row to row: the last blocks matter to the lower half alone, the others to both. A
    // lower half that lies past the last row is multiplied all the same; its rows are zeros, and are not stored.
    const int upper_last = (keys_of_some(params, tile.first_row, kRowTileStep).end + kBlockN - 1) / kBlockN - 1;
    int block = last_block;
    for (; block >= first_block && block > upper_last; --block) visit(LowerHalf{}, block);
    for (; block >= first_block; --block) visit(BothHalves{}, block);

    const Tile stored_tile = noted_tile(note);
    normalise(output, rows);
    store_lse(params, stored_tile, rows, warp, lane);
    store_output(params, stored_tile, output, q_tile, warp, lane);
}
