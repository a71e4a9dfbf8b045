"""The least time of a case, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.tools.bench import Case
from flashgen.tools.bench.roofline import roofline

# An H200 as the driver describes it.
H200 = {"arch": "sm_90", "sms": 132, "clock_mhz": 1980, "memory_gbps": 4800.0}
PREFILL = Case("prefill", 4, 4096, 4096, 16, 16, 128, "bf16")


def test_each_part_of_a_prefill():
    limits = roofline(PREFILL, H200)
    pairs = 4 * 16 * 4096**2
    assert limits.matrix == pytest.approx(pairs * 4 * 128 / (4096 * 132 * 1.98e9) * 1e3)
    assert limits.exponentials == pytest.approx(pairs / (16 * 132 * 1.98e9) * 1e3)
    assert limits.memory == pytest.approx(4 * 4 * 4096 * 16 * 128 * 2 / 4.8e12 * 1e3, rel=0.01)  # and the LSE
    assert (limits.floor_ms, limits.limit) == (limits.matrix, "matrix")


def test_the_limit_is_the_longest_part():
    assert roofline(replace(PREFILL, head_dim=32), H200).limit == "exponentials"
    decoding = replace(PREFILL, seqlen_q=1, num_heads_q=8, num_heads_kv=8)
    assert roofline(decoding, H200).limit == "memory"
    window = roofline(replace(decoding, mask="window", window=255), H200)
    assert window.memory == pytest.approx(roofline(decoding, H200).memory * 256 / 4096, rel=0.01)


@pytest.mark.parametrize("change", [{"arch": "sm_75"}, {"clock_mhz": None}, {"memory_gbps": 0.0}])
def test_a_gpu_without_known_rates_has_none(change):
    assert roofline(PREFILL, H200 | change) is None
    assert roofline(PREFILL, {}) is None
