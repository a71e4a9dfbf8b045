"""From a plan and arrays to queued kernels: arrays, plans, launches, devices."""
