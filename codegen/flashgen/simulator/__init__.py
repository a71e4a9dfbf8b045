"""The generated CUDA on the CPU: the rendered file of a variant, byte for byte, compiled by the system's C++
compiler against headers in which the PTX wrappers have host bodies, and run block by block.
"""
