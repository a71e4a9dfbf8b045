"""Attention under the signatures of other libraries, one module for each.

A module computes what it is asked for as its library defines it, or raises NotImplementedError that names the
argument. It computes nothing itself: all goes to ``flashgen.attention``.
"""
