// One simulated variant: its rendered source as it lies on disk, and the functions of simulator/abi.h around it.
//
// FLASHGEN_SOURCE is the path of the source as a string, FLASHGEN_KERNEL the kernel's name, FLASHGEN_SHARED_MEMORY the
// name of its array of dynamic shared memory, FLASHGEN_LAUNCH_BOUNDS what stands between the parentheses of its
// __launch_bounds__, FLASHGEN_CLUSTER_DIMS between those of its __cluster_dims__. The last three are left out where the kernel has none.
#include "simulator/cuda.hpp"
#include "simulator/kernel.hpp"

#define FLASHGEN_TEXT(...) #__VA_ARGS__
#define FLASHGEN_TEXT_OF(name) FLASHGEN_TEXT(name)

#ifndef FLASHGEN_SHARED_MEMORY
#define FLASHGEN_SHARED_MEMORY flashgen_no_dynamic_shared_memory
#endif
#ifndef FLASHGEN_LAUNCH_BOUNDS
#define FLASHGEN_LAUNCH_BOUNDS 1024
#endif

#ifndef FLASHGEN_CLUSTER_DIMS
#define FLASHGEN_CLUSTER_DIMS 1, 1, 1
#endif

#include FLASHGEN_SOURCE

// The kernel declares the array with a type of its own and without a size: they are one by the symbol's name.
alignas(1024) thread_local unsigned char
    flashgen_dynamic_shared_memory[flashgen::simulator::kMaxSharedBytes] __asm__(FLASHGEN_TEXT_OF(FLASHGEN_SHARED_MEMORY));

#define FLASHGEN_EXPORT extern "C" __attribute__((visibility("default")))

FLASHGEN_EXPORT uint32_t flashgen_simulator_abi() { return FLASHGEN_SIMULATOR_ABI; }

FLASHGEN_EXPORT uint64_t flashgen_params_size() {
    return flashgen::simulator::Parameters<&FLASHGEN_KERNEL>::kBytes;
}

FLASHGEN_EXPORT int flashgen_simulate(const SimLaunch* launch, SimReport* report) {
    using Parameters = flashgen::simulator::Parameters<&FLASHGEN_KERNEL>;
    static constexpr int kLaunchBounds[2] = {FLASHGEN_LAUNCH_BOUNDS};
    static constexpr int kClusterDims[] = {FLASHGEN_CLUSTER_DIMS};
    static_assert(kClusterDims[1] == 1 && kClusterDims[2] == 1, "the simulator knows clusters along x");
    static constexpr flashgen::simulator::Kernel kKernel = {FLASHGEN_TEXT_OF(FLASHGEN_KERNEL),
                                                            &Parameters::call,
                                                            Parameters::kBytes,
                                                            Parameters::kAlign,
                                                            kLaunchBounds[0],
                                                            kLaunchBounds[1] > 0 ? kLaunchBounds[1] : 1,
                                                            kClusterDims[0]};
    return flashgen::simulator::simulate(kKernel, flashgen_dynamic_shared_memory, *launch, *report);
}
