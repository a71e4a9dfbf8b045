"""Calls that JAX traces: requests as text in a program of XLA, and what runs them there."""
