"""Attention under the signatures of other libraries, one module for each.

A module computes attention as its library defines it, or raises NotImplementedError that names the argument.
It computes nothing itself: it calls ``flashgen.attention``.
"""
