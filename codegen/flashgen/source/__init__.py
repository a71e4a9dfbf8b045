"""From a Variant to CUDA source."""
