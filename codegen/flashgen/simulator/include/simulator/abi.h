/* The C interface of a simulated variant: one shared object per variant exports the functions at the end.
 *
 * Every call is independent of every other, so several threads may simulate at once, each a range of the grid's blocks,
 * with reports of their own. The blocks of one call run one after another.
 */
#ifndef FLASHGEN_SIMULATOR_ABI_H
#define FLASHGEN_SIMULATOR_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLASHGEN_SIMULATOR_ABI 7

/* What a region of global memory allows, as bits. */
enum SimRegionAccess {
    SIM_READABLE = 1,
    SIM_WRITABLE = 2,
    SIM_INITIALISED = 4, /* its bytes hold values before the launch */
    SIM_SETTLED = 8      /* no grid that a dependent launch may run beside writes there */
};

/* What stands in a kernel's parameters in place of a CUtensorMap: the arguments of cuTensorMapEncodeTiled. Dimension 0 is
 * the one whose elements are contiguous; `strides` are those of dimensions 1 and up, in bytes. */
#define FLASHGEN_TENSOR_MAP 0x70616d726f736e65ull
typedef struct SimTensorMap {
    uint64_t magic; /* FLASHGEN_TENSOR_MAP */
    uint64_t address;
    uint64_t strides[4];
    uint32_t extents[5];
    uint32_t box[5];
    uint32_t rank; /* 1 to 5 */
    uint32_t element_bytes;
    uint32_t swizzle; /* its period in bytes: 32, 64 or 128; 0: none */
    uint32_t reserved[7];
} SimTensorMap; /* 128 bytes */

/* Memory that the kernel may touch; anything else is out of bounds. */
typedef struct SimRegion {
    void* address;
    uint64_t bytes;
    const char* name;
    uint32_t access; /* SimRegionAccess */
    uint32_t reserved;
} SimRegion;

/* As bits. */
enum SimLaunchFlag {
    SIM_DEPENDENT = 1, /* the grid may begin before those ahead of it have ended */
    SIM_FOLLOWED = 2,  /* the grid behind it is another step of the call */
    SIM_EARLY = 4,     /* grids ahead of it have not ended: a block that has to wait for them ends the call with SIM_GIVEN_UP */
    SIM_ALONE = 8      /* no other call runs blocks of the grid meanwhile */
};

typedef struct SimLaunch {
    const void* params; /* the kernel's parameters as the driver would get them */
    uint64_t params_bytes;
    uint32_t grid[3];
    uint32_t block[3];
    uint64_t shared_bytes;     /* dynamic shared memory of a block */
    uint64_t max_shared_bytes; /* what the target allows a block; 0: all that the simulator has */
    uint64_t seed;             /* draws the order of threads; blocks do not depend on the range they are in */
    uint64_t first_block;      /* blocks to run, x fastest */
    uint64_t num_blocks;       /* 0: to the last one */
    const SimRegion* regions;
    uint64_t num_regions;
    uint64_t flags; /* SimLaunchFlag */
} SimLaunch;

enum SimError {
    SIM_OK = 0,
    SIM_LAUNCH = 1,               /* what a driver would refuse */
    SIM_DIVERGENCE = 2,           /* lanes of a warp that do not meet at a warp-wide operation */
    SIM_BARRIER = 3,              /* a barrier whose threads disagree, or that the block cannot fill */
    SIM_DEADLOCK = 4,             /* nobody can go on */
    SIM_UNINITIALISED_SHARED = 5, /* a read of shared memory that nothing wrote */
    SIM_SHARED_BOUNDS = 6,
    SIM_MISALIGNED = 7,
    SIM_RACE = 8,                 /* two accesses to shared memory that nothing orders, or a plain one to a word of global memory that others
                                   * acquire or release */
    SIM_COPY_IN_FLIGHT = 9,       /* touches memory on which a copy is at work that has not been waited for */
    SIM_GLOBAL_BOUNDS = 10,
    SIM_GLOBAL_ACCESS = 11,       /* a write of what may only be read, or the reverse */
    SIM_UNINITIALISED_GLOBAL = 12,
    SIM_OPERAND = 13,             /* a value that the instruction does not take */
    SIM_UNINITIALISED_REGISTER = 14,
    SIM_REGISTER_IN_FLIGHT = 15,  /* touches a register on which a wgmma is at work */
    SIM_MBARRIER = 16,            /* an mbarrier that is not there, or that gets more than it was made for */
    SIM_PROXY = 17,               /* crosses from the generic to the async proxy without a fence */
    SIM_REGISTER_POOL = 18,       /* setmaxnreg beyond what the block has, or not by the whole warpgroup */
    SIM_DEPENDENCY = 19,          /* of a dependent launch: does not wait for the grids ahead of it, or not in time */
    SIM_GIVEN_UP = 20             /* no error of the kernel: a block of a SIM_EARLY launch has to wait, and is to run again */
};

enum SimAccess {
    SIM_LDMATRIX = 0,
    SIM_SHARED_LOAD = 1,
    SIM_SHARED_STORE = 2,
    SIM_SHARED_COPY = 3, /* the destination of cp.async */
    SIM_GLOBAL_LOAD = 4,
    SIM_GLOBAL_STORE = 5,
    SIM_GLOBAL_COPY = 6,    /* the source of cp.async */
    SIM_MATRIX_PRODUCT = 7, /* wgmma, in shared memory */
    SIM_TENSOR_LOAD = 8,    /* in global memory */
    SIM_TENSOR_STORE = 9,   /* in global memory */
    SIM_GLOBAL_ADD = 10     /* red */
};

/* What one source line did with one kind of memory. A wavefront is a pass over the 32 banks of shared memory; `actual`
 * above `ideal` is bank conflicts there, and bytes fetched for nothing in global memory, where sectors of 32 bytes count. */
typedef struct SimSite {
    uint32_t line;
    uint32_t kind; /* SimAccess */
    uint64_t instructions; /* of warps; wgmma of warpgroups */
    uint64_t bytes;
    uint64_t ideal;
    uint64_t actual;
} SimSite;

/* Warp instructions, unless said otherwise. */
typedef struct SimCounters {
    uint64_t blocks; /* that ran to their end */
    uint64_t mma_m16n8k16_f16;
    uint64_t mma_m16n8k16_bf16;
    uint64_t mma_m16n8k8_tf32;
    uint64_t mma_m16n8k32_e4m3;
    uint64_t wgmma_f16;  /* of warpgroups */
    uint64_t wgmma_bf16; /* of warpgroups */
    uint64_t wgmma_e4m3; /* of warpgroups */
    uint64_t ldmatrix;
    uint64_t stmatrix;
    uint64_t cp_async;
    uint64_t cp_async_commit; /* of threads */
    uint64_t cp_async_wait;   /* of threads */
    uint64_t tensor_loads;    /* of threads */
    uint64_t tensor_stores;   /* of threads */
    uint64_t mbarrier_arrivals; /* of threads */
    uint64_t mbarrier_waits;    /* of threads */
    uint64_t barriers;
    uint64_t warp_syncs;
    uint64_t shuffles;
    uint64_t votes;
    uint64_t exp2; /* of threads */
    uint64_t log2; /* of threads */
    uint64_t global_bytes_read;
    uint64_t global_bytes_written;
    uint64_t shared_bytes_read;
    uint64_t shared_bytes_written;
    uint64_t shared_wavefronts;
    uint64_t shared_wavefronts_ideal;
    uint64_t global_sectors;
    uint64_t global_sectors_ideal;
    uint64_t grid_waits; /* blocks that have waited for the grids ahead, and have let no other step of the call begin before */
    uint64_t switches; /* from one thread to another: the simulator's own work */
} SimCounters;

typedef struct SimReport {
    int32_t error;       /* SimError */
    uint32_t line;       /* of the kernel's source; 0: unknown */
    uint32_t other_line; /* of the other party to a race, a meeting or a barrier */
    int32_t thread;      /* linear in its block; -1: none */
    int32_t other_thread;
    uint32_t block[3];
    char message[2048]; /* all of it in words */
    SimCounters counters;
    SimSite* sites; /* of the caller, `max_sites` long; may be null */
    uint64_t max_sites;
    uint64_t num_sites; /* how many were written */
} SimReport;

/* Runs the blocks and returns `error`. The first error ends the call; counters and sites are those up to it. */
int flashgen_simulate(const SimLaunch* launch, SimReport* report);

/* FLASHGEN_SIMULATOR_ABI of the object. */
uint32_t flashgen_simulator_abi(void);

/* Bytes of the kernel's parameters. */
uint64_t flashgen_params_size(void);

#ifdef __cplusplus
}
#endif

#endif
