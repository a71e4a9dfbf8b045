import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.operators.numbers import bfloat16_bits, widened


@given(st.integers(0, 2**32 - 1))
def test_bfloat16_rounds_as_ml_dtypes_does(bits):
    numbers = np.array([bits, bits | 0xFFFF, bits & 0xFFFF8000, bits & 0xFFFF0000], np.uint32).view(
        np.float32
    )
    expected = numbers.astype(ml_dtypes.bfloat16)
    got = bfloat16_bits(numbers).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("to", [np.float32, np.float64])
def test_each_way_to_hold_bfloat16_widens_alike(to):
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & 0x7FFF) <= 0x7F80]  # casting a signalling NaN warns
    elements = bits.view(ml_dtypes.bfloat16)
    expected = elements.astype(to)
    for held in (bits, elements, elements.astype(np.float32)):
        got = widened(held, "bf16", to)
        assert got.dtype == to
        np.testing.assert_array_equal(got, expected)


def test_uint16_is_not_taken_for_bfloat16_in_another_dtype():
    assert widened(np.array([3], np.uint16), "fp16") == 3
