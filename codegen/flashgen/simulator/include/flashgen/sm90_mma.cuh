// The functions of templates/include/flashgen/sm90_mma.cuh.
#pragma once

#include "flashgen/cluster.cuh"
#include "flashgen/sm80.cuh"
