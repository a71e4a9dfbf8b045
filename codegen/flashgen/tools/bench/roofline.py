"""The least time of a case on a GPU: by its matrix products, its exponentials and its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.operators.arguments import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.tools.bench.cases import Case

# FLOPs of dense 16-bit matrix products with fp32 sums, a clock and multiprocessor, by major and minor compute
# capability: NVIDIA's white papers of each architecture.
_MATRIX_FLOPS = {
    "sm_80": 2048,
    "sm_86": 512,
    "sm_87": 1024,
    "sm_89": 512,
    "sm_90": 4096,
    "sm_100": 8192,
    "sm_103": 8192,
    "sm_120": 512,
}
# Against 16-bit products: e4m3 runs at twice the rate; TF32 at half, and fp32 takes three TF32 products.
_SPEED = {"fp16": 1.0, "bf16": 1.0, "e4m3": 2.0, "fp32": 1 / 6}
# ex2.approx a clock and multiprocessor: CUDA C++ Programming Guide, "Throughput of Native Arithmetic
# Instructions".
_EXPONENTIALS = 16


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least milliseconds that each part of a case's work takes at the highest clock and rate of a GPU.

    Attributes:
        matrix: of its matrix products.
        exponentials: one for each pair and head, in each pass.
        memory: of what is read and written, each element once.
    """

    matrix: float
    exponentials: float
    memory: float

    @property
    def floor_ms(self) -> float:
        """The least time of a kernel in which these overlap perfectly."""
        return max(self.matrix, self.exponentials, self.memory)

    @property
    def limit(self) -> str:
        """Which part is the longest: ``matrix``, ``exponentials`` or ``memory``."""
        return max(("matrix", "exponentials", "memory"), key=lambda name: getattr(self, name))


def roofline(case: Case, environment: Mapping[str, Any]) -> Roofline | None:
    """The roofline of a case on the GPU that `environment.gpu` describes. None if a fact is missing, or the
    rates of the architecture are unknown.
    """
    arch, sms, mhz, gbps = (environment.get(key) for key in ("arch", "sms", "clock_mhz", "memory_gbps"))
    if arch not in _MATRIX_FLOPS or not (sms and mhz and gbps):
        return None
    clocks = sms * mhz * 1e3  # a millisecond, of all multiprocessors
    return Roofline(
        matrix=case.flops / (_MATRIX_FLOPS[arch] * _SPEED[case.dtype] * clocks),
        exponentials=case.batch * case.num_heads_q * case.pairs / (_EXPONENTIALS * clocks),
        memory=(case.bytes_moved - _unseen_bytes(case)) / gbps / 1e6,
    )


def _unseen_bytes(case: Case) -> int:
    """Bytes of k and v that no query sees because of a window."""
    if case.mask != "window":
        return 0
    unseen = max(0, case.seqlen_kv - case.window - case.seqlen_q)
    return case.batch * unseen * case.num_heads_kv * (case.head_dim + case.width_v) * DTYPE_BYTES[case.dtype]
