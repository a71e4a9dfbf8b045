"""How fast a GPU computes, and how fast its links and its memory move bytes."""

from __future__ import annotations

import math
from typing import NamedTuple

# The backward pass has five matrix products, the forward pass two.
_BACKWARD_WORK = 2.5


class Rates(NamedTuple):
    """Rates of one GPU in bf16, and of its links in a direction. The defaults were measured on H200: causal
    attention of 131,072 tokens, heads 32 and 8 of 128, and collectives of 256 MiB on two GPUs.

    A GPU that is not yet at its power limit computes at up to the ``cool`` rates, which fade with
    ``cool_ms``. ``inside_gbps`` is the link between the GPUs of a node, ``between_gbps`` the link between
    nodes. ``host_us`` is how long a GPU waits for the host when a call begins that follows other calls.
    """

    forward_tflops: float = 690.0
    backward_tflops: float = 605.0
    inside_gbps: float = 250.0
    between_gbps: float = 50.0
    ranks_per_node: int = 8
    collective_us: float = 30.0
    cool_forward_tflops: float = 840.0
    cool_backward_tflops: float = 730.0
    cool_ms: float = 40.0
    memory_gbps: float = 3000.0
    host_us: float = 100.0

    def link_gbps(self, ranks: int) -> float:
        """The rate of the slowest link between this many ranks."""
        return self.between_gbps if ranks > self.ranks_per_node else self.inside_gbps

    def forward_ms(self, flops: float) -> float:
        """How long forward kernels compute."""
        return self._ms(flops, self.forward_tflops, self.cool_forward_tflops)

    def backward_ms(self, flops: float) -> float:
        """How long backward kernels compute; ``flops`` are of the forward pass."""
        return self._ms(_BACKWARD_WORK * flops, self.backward_tflops, self.cool_backward_tflops)

    def _ms(self, flops: float, tflops: float, cool_tflops: float) -> float:
        ms = flops / tflops / 1e9
        return ms / (1 + max(0.0, cool_tflops / tflops - 1) * math.exp(-ms / self.cool_ms))


H200 = Rates()
