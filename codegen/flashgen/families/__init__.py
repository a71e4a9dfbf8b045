"""Which kernels exist: specs, read from YAML and checked, and the variants they enumerate."""
