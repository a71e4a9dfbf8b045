// PTX of compute capability 9.0a (Hopper) for kernels in clusters whose MMAs are mma.sync, as on Ampere.
//
// A kernel includes this header and nothing else, so that a header of the same name with other bodies (a simulator's, say) can stand in for
// it.
#pragma once

#include "flashgen/cluster.cuh"
#include "flashgen/sm80.cuh"
