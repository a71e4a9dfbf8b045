// flash_fwd_fp8_tiles_transpose_hdim128_e4m3_promoted_causal_sm90
//
// Rendered by flashgen: edit the spec or the template, not this file.
//
// axes      head_dim 128, head_dim_v 128, dtype e4m3, accumulate promoted, mask_type causal, sinks none, out_codes none,
//           gqa mha
// tile      block_m 128, block_n 128, q_stages 2, stages 4, panel 128, producer_registers 24
// block     128 threads, 33800 bytes of dynamic shared memory
// target    sm90: sm_90a alone, with 232448 bytes or more of shared memory per block
// spec      flash_fwd_fp8_tiles_sm90.yaml
// template  flash_fwd_fp8_tile_v_sm90.cu.j2
#include "flashgen/fp8_sm90.cuh"

// Transposes V for the main kernel. A thread block loads kBlockN keys of a head by TMA, and writes a tile of v_tiles: V^T in the layout of the main
// kernel's shared memory, so that the main kernel copies a tile as it is. Within every 16 keys and every 16 columns a tile has the order of the main
// kernel's MMAs. Keys that no query sees are 0, because V may be NaN there, and 0 * NaN is NaN.

using element = e4m3;

constexpr int kHeadDimV = 128;
constexpr int kBlockN = 128;  // keys of a tile
constexpr int kThreads = 128;
constexpr int kKeyPanel = 128;  // bytes of a row of V^T: the keys of a tile. The row is swizzled
constexpr int kTileBytes = kHeadDimV * kKeyPanel;
constexpr int kPanelColumns = 128;
constexpr int kPanelRowBytes = kPanelColumns * sizeof(element);
constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;
constexpr int kRowsBytes = kPanelsV * kBlockN * kPanelRowBytes;  // of V, which comes before V^T
constexpr int kTransposeWarps = kThreads / 32;

struct Params {
    tensor_map v;                         // (head_dim_v, seqlen_kv, num_heads_kv, batch)
    element* v_tiles;                     // (batch, num_heads_kv, blocks of keys): V^T of each, as shared memory has it
    int32_t num_heads_kv;
    int32_t num_row_blocks;               // blocks of rows, keys or tokens: the grid's first dimension
};

__device__ int mapped_row(const Params&, int key);  // The row of a key in the tensor maps of K and V
__device__ int swizzled(int row, int chunk);  // Where the swizzle puts a 16-byte chunk of a row
// Transposes V of a KV block, whose rows are keys, to V^T, whose rows are columns of V
__device__ void transpose_block(shared_address v_rows, shared_address v, int warp);
__device__ void load_v(const Params& params, shared_address smem, shared_address full, int row, int head, int batch);
__device__ void tile_v(element* tile, shared_address smem);  // Writes V^T

extern "C" __global__ void __launch_bounds__(kThreads)
flash_fwd_fp8_tiles_transpose_hdim128_e4m3_promoted_causal_sm90(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const shared_address smem = (to_shared(shared_memory) + 1023) / 1024 * 1024;
    const int kv_block = block_index() % params.num_row_blocks;
    const int head = block_index() / params.num_row_blocks;  // of all batch entries
    const shared_address loaded = smem + kRowsBytes + kTileBytes;

    if (threadIdx.x == 0) {
        mbarrier_init(loaded, 1);
        fence_mbarrier_init();
    }
    __syncthreads();

    // Programmatic dependent launch: wait for the previous grid. It may still write this grid's inputs, or read memory that this grid writes.
    griddepcontrol_wait();
    // Let the next grid start. This comes after the wait, so the next grid may assume that all earlier grids are done.
    griddepcontrol_launch_dependents();

    if (threadIdx.x == 0) {
        load_v(params, smem, loaded, mapped_row(params, kv_block * kBlockN), head % params.num_heads_kv, head / params.num_heads_kv);
    }
    mbarrier_wait(loaded, 0);
    tile_v(params.v_tiles + int64_t(block_index()) * kTileBytes, smem);
}

// The row of a key in the tensor maps of K and V. The maps end with the last key that any query attends to. For later keys TMA fills in zeros,
// because 0 times a NaN in memory would be NaN.
__device__ __forceinline__ int mapped_row(const Params&, int key) { return key; }

__device__ __forceinline__ int swizzled(int row, int chunk) { return chunk ^ row / (128 / kPanelRowBytes) % (kPanelRowBytes / 16); }

// Transposes V of a KV block, whose rows are keys, to V^T, whose rows are columns of V. wgmma reads e4m3 only with the summed dimension contiguous, and
// for P V the keys are summed. Within every 16 keys V^T has the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15, in which P is in
// registers. Within every 16 columns its rows are the even ones, then the odd ones, so that the eight rows of a stmatrix are neighbours,
// in different banks. O gets its own order of columns when it is stored.
//
// A step takes 32 keys of 16 columns. ldmatrix transposes pairs of columns: lane (g, t) = (lane / 4, lane % 4) gets columns 2 g and 2 g + 1 of
// keys 2 t and 2 t + 1 of every eight. Byte permutes separate even columns from odd ones.
__device__ __forceinline__ void transpose_block(shared_address v_rows, shared_address v, int warp) {
#pragma unroll 1
    for (int chunk = warp; chunk < kHeadDimV / 16; chunk += kTransposeWarps) {
        opaque(chunk);  // so that what follows from it is not kept in registers
        const int lane = threadIdx.x % 32;
        const int panel = 16 * chunk / kPanelColumns;
        const shared_address source = v_rows + (panel * kBlockN + lane) * kPanelRowBytes +
                                      16 * swizzled(lane, chunk - panel * (kPanelColumns / 16));
        // Lanes 0 to 7 give the rows of even columns, lanes 8 to 15 of odd ones, the others of the same rows 16 keys later.
        const shared_address target = v + (16 * chunk + lane % 16) * kKeyPanel + 16 * (lane / 16 ^ lane % 8);
#pragma unroll
        for (int key = 0; key < kBlockN; key += 32) {
            uint32_t pairs[4];
            ldmatrix_x4_trans(pairs, source + key * kPanelRowBytes);
            // Even and odd columns of 16 keys, then of the next 16.
            const uint32_t words[4] = {__byte_perm(pairs[0], pairs[1], 0x6420), __byte_perm(pairs[0], pairs[1], 0x7531),
                                       __byte_perm(pairs[2], pairs[3], 0x6420), __byte_perm(pairs[2], pairs[3], 0x7531)};
            stmatrix_x4(target ^ key, words);
        }
    }
}

__device__ __forceinline__ void load_v(const Params& params, shared_address smem, shared_address full, int row, int head, int batch) {
    mbarrier_arrive_expect_tx(full, kRowsBytes);
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel) {
        tma_load_4d(smem + panel * kBlockN * kPanelRowBytes, params.v, full, panel * kPanelColumns, row, head, batch);
    }
}

// Writes V^T. Chunks of 16 keys past the block are 0.
__device__ __forceinline__ void tile_v(element* tile, shared_address smem) {
    transpose_block(smem, smem + kRowsBytes, threadIdx.x / 32);
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < kTileBytes / 16; i += kThreads) {
        const int keys = 16 * (i % 8 ^ i / 8 % 8);
        store_global_128(tile + 16 * i, keys < kBlockN ? load_shared_128(smem + kRowsBytes + 16 * i) : uint4{});
    }
}

static_assert(kBlockN <= kKeyPanel && kBlockN % 32 == 0, "a row of V^T is one swizzled row");
static_assert(sizeof(Params) == 192 && offsetof(Params, v) == 0 && offsetof(Params, v_tiles) == 128);
static_assert(offsetof(Params, num_heads_kv) == 136 && offsetof(Params, num_row_blocks) == 140);
