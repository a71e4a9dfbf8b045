// flash_bwd_convert_hdim128_bf16_causal_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype bf16, mask_type causal, dropout none, gqa mha, dq_order none
// tile      block_m 64, block_n 128, stages 2, dout_stages 2, cluster 1, producer_registers 24, consumer_registers 240,
//           lse early, dv early, starts turns, held_k 0, held_v 0, dq_address free, mask_bounds computed, steps all
// block     256 threads, 0 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      flash_bwd_sm90.yaml
// template  flash_bwd_convert.cu.j2
#include "flashgen/sm90.cuh"

// dq = softmax_scale * dq_accum, rounded. A warp has 16 rows, and 32 columns at a time: a lane two rows of 8 columns.

using element = bf16;

constexpr int kHeadDim = 128;  // of Q and K
constexpr int kThreads = 256;
constexpr int kWarpColumns = 32;
constexpr int kPasses = kHeadDim / kWarpColumns;
// Passes whose loads are in flight together.
constexpr int kPassesAtOnce = kPasses <= 4 ? kPasses : kPasses % 4 == 0 ? 4 : kPasses % 3 == 0 ? 3 : 1;

struct Params {
    const float* dq_accum;                // (heads, unit_rows, kHeadDim): sums of dQ, in the order of dq_tiles
    const int32_t* added;                 // (heads of the main grid): CTAs that have added all their dQ to dq_accum
    element* dq;                          // (batch, seqlen_q, num_heads_q, head_dim); rows 16-byte aligned
    int64_t dq_batch_stride;              // strides are in elements
    int64_t dq_row_stride;
    int64_t dq_head_stride;
    int32_t num_heads_q;
    int32_t key_blocks_of_head;           // thread blocks of the main kernel for each head of its grid
    int32_t seqlen_q;                     // queries of a sequence; of the longest one if lengths vary
    int32_t head_dim;                     // of q and k in the call: whole chunks of 16 bytes
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
    float softmax_scale;                  // the factor of Q K^T in the scores
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
__device__ void load_rows(const float* tile, int g, float (&rows)[2][8]);  // Rows g and g + 8 of a tile
// Rounds and writes 8 elements of a row, times `scale`, as far as there are columns
__device__ void store(element* destination, const float (&values)[8], float scale, int columns_left);
__device__ void await_added(const Params& params, int head_of_batch);  // Waits until every thread block of the head has added to dQ

extern "C" __global__ void __launch_bounds__(kThreads)
flash_bwd_convert_hdim128_bf16_causal_sm90(const __grid_constant__ Params params) {
    const int head_of_batch = block_index() / params.num_row_blocks;
    const int batch = head_of_batch / params.num_heads_q;
    const int head = head_of_batch - batch * params.num_heads_q;
    const int first_row =
        (block_index() - head_of_batch * params.num_row_blocks) * kRowUnit + threadIdx.x / 32 * 16;
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int first_column = lane % 4 * 8;

    await_added(params, head_of_batch);

    const float* tiles = dq_tiles(params, batch, head, first_row);
    element* dq = params.dq + batch * params.dq_batch_stride + head * params.dq_head_stride;
    for (int first_pass = 0; first_pass < kPasses; first_pass += kPassesAtOnce) {
        float rows[kPassesAtOnce][2][8];
#pragma unroll
        for (int pass = 0; pass < kPassesAtOnce; ++pass) {
            load_rows(tiles + ((first_pass + pass) * kWarpColumns + first_column) / 8 * kTileElements, g, rows[pass]);
        }
#pragma unroll
        for (int pass = 0; pass < kPassesAtOnce; ++pass) {
            const int column = (first_pass + pass) * kWarpColumns + first_column;
#pragma unroll
            for (int row8 = 0; row8 < 2; ++row8) {
                const int row = first_row + 8 * row8 + g;
                if (row >= params.seqlen_q) continue;
                store(dq + row * params.dq_row_stride + column, rows[pass][row8], params.softmax_scale, params.head_dim - column);
            }
        }
    }
}

__device__ __forceinline__ int unit_rows(const Params& params) { return (params.seqlen_q + kRowUnit - 1) / kRowUnit * kRowUnit; }

__device__ __forceinline__ int64_t first_unit_row(const Params& params, int batch, int head) {
    return (int64_t(batch) * params.num_heads_q + head) * unit_rows(params);
}

__device__ __forceinline__ decltype(Params::dq_accum) dq_tiles(const Params& params, int batch, int head, int row) {
    return params.dq_accum + (first_unit_row(params, batch, head) + row) * kHeadDim;
}

// Rows g and g + 8 of a tile: the elements of four lanes, side by side.
__device__ __forceinline__ void load_rows(const float* tile, int g, float (&rows)[2][8]) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const uint4 words = load_global_128(tile + (16 * g + 4 * t));
        const uint32_t values[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) rows[e / 2][2 * t + e % 2] = __uint_as_float(values[e]);
    }
}

__device__ __forceinline__ void store(element* destination, const float (&values)[8], float scale, int columns_left) {
    if (columns_left <= 0) return;
    store_global_128(destination,
                     {pack<element>(scale * values[0], scale * values[1]), pack<element>(scale * values[2], scale * values[3]),
                      pack<element>(scale * values[4], scale * values[5]), pack<element>(scale * values[6], scale * values[7])});
}

// Waits until every thread block of the head has added to dQ.
// A thread block waits for the main kernel's thread blocks of its head, not for the whole grid. So dQ of most heads is rounded on multiprocessors
// that the last thread blocks of the main kernel leave idle. The acquire makes their additions to dQ visible here.
//
// The count must not be left over from an earlier call. The preprocess kernel resets the counters, and it has ended when this grid starts: each
// thread block of the main kernel reaches launch_dependents after its wait for the preprocess kernel. PTX promises that the zeros are visible
// after griddepcontrol.wait, which only the last thread block executes. The others rely on the hardware: the zeros are in L2 when the preprocess
// kernel has ended, and an acquire reads L2.
__device__ __forceinline__ void await_added(const Params& params, int head_of_batch) {
    if (threadIdx.x == 0) {
        const int32_t* added = params.added + head_of_batch;
        while (int(load_acquire_32(added)) != params.key_blocks_of_head) {}
    }
    __syncthreads();
    // The last thread block also waits for the whole main kernel. The next grid starts when all thread blocks of this one have come here, so
    // after the main kernel has ended.
    if (block_index() == int(gridDim.x) - 1) griddepcontrol_wait();
    griddepcontrol_launch_dependents();
}

static_assert(sizeof(Params) == 72 && offsetof(Params, dq_accum) == 0 && offsetof(Params, added) == 8);
static_assert(offsetof(Params, dq) == 16 && offsetof(Params, dq_batch_stride) == 24 && offsetof(Params, dq_row_stride) == 32);
static_assert(offsetof(Params, dq_head_stride) == 40 && offsetof(Params, num_heads_q) == 48);
static_assert(offsetof(Params, key_blocks_of_head) == 52 && offsetof(Params, seqlen_q) == 56 && offsetof(Params, head_dim) == 60);
static_assert(offsetof(Params, num_row_blocks) == 64 && offsetof(Params, softmax_scale) == 68);
static_assert(kThreads / 32 * 16 == kRowUnit, "each warp has 16 rows of a unit");
static_assert(kHeadDim % kWarpColumns == 0, "columns come by 32");
