"""The main kernels of the backward families, by name."""

from simulator.calls import main_kernels

MAIN = main_kernels(lambda spec: spec.operator == "attention_backward" and not spec.has_lengths)
