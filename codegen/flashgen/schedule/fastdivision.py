"""Division by a number that a kernel learns at launch: one multiplication and a shift instead of twenty
instructions."""

from __future__ import annotations

LARGEST_DIVIDEND = 2**31 - 1


def divisor(number: int) -> int:
    """What a parameter of type ``uint64_t`` holds for a kernel to divide by ``number``, which is at least 1.

    For n up to `LARGEST_DIVIDEND`, ``n // number`` is ``n * multiplier >> shift``, with the multiplier in the
    lower 32 bits and the shift in the upper ones; the product fits 64 bits. Exact because the multiplier
    exceeds 2**shift / number by less than 1, which n times is less than the 2**shift / number that would
    carry the quotient to the next whole number (Granlund and Montgomery, Division by Invariant Integers using
    Multiplication, 1994).
    """
    shift = 31 + (number - 1).bit_length()
    multiplier = -(-(1 << shift) // number)
    return shift << 32 | multiplier
