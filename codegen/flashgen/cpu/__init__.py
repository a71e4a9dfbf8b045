"""Attention on the CPU, with NumPy."""
