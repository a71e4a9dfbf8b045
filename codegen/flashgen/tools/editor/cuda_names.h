// The names of CUDA that kernels of flashgen use, for an editor on a machine without CUDA's headers. Declarations alone: nothing here is
// compiled into a kernel.
#pragma once

#include "vectors.hpp"

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __cluster_dims__(...)
#define __grid_constant__

extern const __device__ uint3 threadIdx, blockIdx;
extern const __device__ dim3 blockDim, gridDim;

__device__ void __syncthreads();
__device__ void __syncwarp(unsigned mask = 0xffffffff);
__device__ int __any_sync(unsigned mask, int predicate);
__device__ int __all_sync(unsigned mask, int predicate);
__device__ unsigned __ballot_sync(unsigned mask, int predicate);
template <typename T> __device__ T __shfl_sync(unsigned mask, T value, int lane, int width = 32);
template <typename T> __device__ T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32);
template <typename T> __device__ T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32);
template <typename T> __device__ T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32);
template <typename T> __device__ T __reduce_add_sync(unsigned mask, T value);

__device__ float __uint_as_float(unsigned bits);
__device__ unsigned __float_as_uint(float value);
__device__ float __int_as_float(int bits);
__device__ int __float_as_int(float value);
__device__ float __fmul_ru(float a, float b);
__device__ float __fmaf_ru(float a, float b, float c);
__device__ float __fadd_rd(float a, float b);
__device__ float __fsub_ru(float a, float b);
__device__ float __fdividef(float a, float b);
__device__ int __ffs(int bits);
__device__ int __popc(unsigned bits);
__device__ int __dp4a(int a, int b, int sum);
__device__ unsigned __dp4a(unsigned a, unsigned b, unsigned sum);
__device__ unsigned __byte_perm(unsigned a, unsigned b, unsigned selector);
__device__ unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift);
__device__ unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift);
__device__ unsigned long __cvta_generic_to_shared(const void* pointer);

__device__ int min(int a, int b);
__device__ unsigned min(unsigned a, unsigned b);
__device__ long min(long a, long b);
__device__ long long min(long long a, long long b);
__device__ int max(int a, int b);
__device__ unsigned max(unsigned a, unsigned b);
__device__ long max(long a, long b);
__device__ long long max(long long a, long long b);
__device__ float fminf(float a, float b);
__device__ float fmaxf(float a, float b);
__device__ float fmaf(float a, float b, float c);
__device__ float fabsf(float value);
__device__ float copysignf(float value, float sign);
__device__ bool isnan(float value);
__device__ bool isinf(float value);
