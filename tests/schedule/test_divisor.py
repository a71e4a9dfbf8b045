"""A divisor gives the quotient that division gives."""

from hypothesis import example, given
from hypothesis import strategies as st

from flashgen.schedule.fastdivision import LARGEST_DIVIDEND, divisor

numbers = st.one_of(
    st.integers(1, 200),
    st.integers(1, LARGEST_DIVIDEND),
    st.builds(lambda power, near: max(1, 2**power + near), st.integers(0, 30), st.integers(-1, 1)),
)


@given(numbers, st.integers(0, LARGEST_DIVIDEND))
@example(1, LARGEST_DIVIDEND)
@example(LARGEST_DIVIDEND, LARGEST_DIVIDEND)
def test_the_quotient_is_exact_and_fits(number, n):
    made = divisor(number)
    multiplier, shift = made & (1 << 32) - 1, made >> 32
    assert shift < 64
    # At the ends of each quotient, too: there a multiplier that is off by one shows.
    last = LARGEST_DIVIDEND // number * number
    for dividend in (n, n // number * number, last, max(0, last - 1)):
        product = dividend * multiplier
        assert product < 1 << 64
        assert product >> shift == dividend // number
