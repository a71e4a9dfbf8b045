"""The C++ functions of integers that a mask by a line may call, by the operation of its formula."""

from __future__ import annotations

HELPERS = {
    "//": """\
// The quotient, rounded down, for a divisor above 0.
template <typename Int>
__device__ __forceinline__ Int floor_divide(Int a, Int b) {
    return a / b - Int(a % b < 0);
}""",
    "%": """\
// The remainder of floor_divide().
template <typename Int>
__device__ __forceinline__ Int floor_remainder(Int a, Int b) {
    const Int remainder = a % b;
    return remainder < 0 ? remainder + b : remainder;
}""",
    "min": """\
template <typename Int>
__device__ __forceinline__ Int smaller_of(Int a, Int b) {
    return a < b ? a : b;
}""",
    "max": """\
template <typename Int>
__device__ __forceinline__ Int larger_of(Int a, Int b) {
    return a > b ? a : b;
}""",
    "abs": """\
template <typename Int>
__device__ __forceinline__ Int magnitude_of(Int a) {
    return a < 0 ? -a : a;
}""",
}
# The name of each function.
CALLS = {
    "//": "floor_divide",
    "%": "floor_remainder",
    "min": "smaller_of",
    "max": "larger_of",
    "abs": "magnitude_of",
}
