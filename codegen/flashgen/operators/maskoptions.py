"""How a caller says which keys a row sees, and the cheapest mask for a kernel that hides the same ones."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

from flashgen.errors import BadParam, NullPointer, arg
from flashgen.operators.arguments import flag, shown
from flashgen.operators.masks import UNBOUNDED

MASK_TYPES = ("none", "dense", "causal_top_left", "causal_bottom_right")
NO_WINDOW = (-1, -1)


class MaskOptions(NamedTuple):
    """What a caller says of the mask, unchecked; ``has_mask`` is whether there is a dense mask."""

    causal: bool
    mask_type: int | str | None
    window_size: tuple[int, int]
    has_mask: bool


class KernelMask(NamedTuple):
    """The mask that a kernel must implement, by the fields of `AttentionProblem`."""

    mask_type: str
    diagonal_offset: int
    window_left: int
    window_right: int


def mask_semantics(options: MaskOptions, seqlen_q: int, seqlen_kv: int) -> KernelMask:
    """What the options of a call mean, not simplified yet: the mask type is "dense" or "local".

    Raises BadParam for options that contradict each other, and NullPointer for a missing mask.
    """
    causal, mask_type, window_size, has_mask = options
    name = mask_type_name(mask_type)
    if name == "dense" and not has_mask:
        raise NullPointer(f"{arg('mask_type')} 'dense' needs {arg('mask')}, which is None")
    if causal:
        if name not in (None, "dense", "causal_bottom_right"):
            raise BadParam(
                f"causal=True means {arg('mask_type')} 'causal_bottom_right', but {arg('mask_type')} is "
                f"{name!r}"
            )
        name = "causal_bottom_right"
    if name is None:
        name = "dense" if has_mask else "none"
    if has_mask and name == "none":
        raise BadParam(
            f"a {arg('mask')} was given, but {arg('mask_type')} 'none' takes none; leave {arg('mask_type')} "
            "out"
        )
    kind = "dense" if has_mask else "local"
    left, right = window_of(window_size)
    windowed = (left, right) != (-1, -1)
    if windowed and name == "causal_top_left":
        raise BadParam(
            f"{arg('window_size')} is {shown((left, right))}, but {arg('mask_type')} {name!r} takes no window"
        )
    if name == "causal_bottom_right":
        if right > 0:
            raise BadParam(
                f"{arg('window_size')} is {(left, right)}, but causal hides every later key: right must be 0 "
                "or -1"
            )
        right = 0
    elif name == "causal_top_left":
        return KernelMask(kind, 0, UNBOUNDED, 0)
    left = UNBOUNDED if left < 0 else min(left, UNBOUNDED)
    right = UNBOUNDED if right < 0 else min(right, UNBOUNDED)
    return KernelMask(kind, seqlen_kv - seqlen_q, left, right)


def mask_type_name(mask_type: int | str | None) -> str | None:
    """The one of ``MASK_TYPES`` that a caller means, or None for None. Raises BadParam."""
    if mask_type is None or (isinstance(mask_type, str) and mask_type in MASK_TYPES):
        return mask_type
    if isinstance(mask_type, str) and mask_type == "causal":
        return "causal_bottom_right"
    try:
        return MASK_TYPES[range(len(MASK_TYPES)).index(_integer(mask_type))]
    except (TypeError, ValueError):
        allowed = ", ".join(f"{number} {name!r}" for number, name in enumerate(MASK_TYPES))
        raise BadParam(
            f"{arg('mask_type')} is {shown(mask_type)}; allowed are {allowed}, and 'causal' for 3; a window "
            f"is {arg('window_size')}"
        ) from None


def _integer(x: Any) -> int:
    """An integer that is no truth value. Raises TypeError."""
    # Of a symbol of torch.compile operator.index makes a constant, and each one has a graph of its own.
    if type(x) is int or type(x).__name__ == "SymInt":
        return x
    if isinstance(x, bool):
        raise TypeError
    return operator.index(x)


# Iterables that are no pair: without an order, readable only once, or text.
_NO_PAIRS = Set, Mapping, Iterator, bytes, bytearray


def window_of(window_size: Any) -> tuple[int, int]:
    """Both sides of a caller's window; -1 is no bound. Raises BadParam."""
    try:
        if isinstance(window_size, _NO_PAIRS):
            raise TypeError
        left, right = (_integer(side) for side in window_size)
    except (TypeError, ValueError):
        raise BadParam(
            f"{arg('window_size')} is {shown(window_size)}; expected two integers (left, right), -1 for no "
            "bound"
        ) from None
    if left < -1 or right < -1:
        raise BadParam(
            f"{arg('window_size')} is {shown((left, right))}; each side must be -1 (no bound), 0 or more"
        )
    return left, right


def sees_no_later_key(causal: bool, mask_type: int | str | None, window_size: Any) -> bool:
    """Whether these options hide from each query the keys after its position. They need not be valid."""
    if flag("causal", causal):
        return True
    if isinstance(mask_type, (str, numbers.Integral)) and mask_type in (3, "causal", "causal_bottom_right"):
        return True
    return isinstance(window_size, (tuple, list)) and len(window_size) == 2 and window_size[1] == 0


def simplify(mask: KernelMask, seqlen_q: int, seqlen_kv: int) -> KernelMask:
    """The cheapest mask that hides exactly the same keys.

    A side of the band that hides no key from any row becomes unbounded. A band without a left side is causal,
    with its right side folded into the offset. A band without sides is no mask. So a causal call with one
    query, or a window longer than the keys, takes the kernel without masks. A dense mask, or a mask by a
    line, keeps its type; its band is simplified in the same way.
    """
    _, diagonal_offset, left, right = mask
    if seqlen_q == 0 or seqlen_kv == 0 or right >= UNBOUNDED or diagonal_offset + right >= seqlen_kv - 1:
        right = UNBOUNDED
    if seqlen_q == 0 or seqlen_kv == 0 or left >= UNBOUNDED or seqlen_q - 1 + diagonal_offset - left <= 0:
        left = UNBOUNDED
    if left < UNBOUNDED:
        kind, offset = "local", diagonal_offset
    elif right < UNBOUNDED:
        kind, offset, right = "causal", diagonal_offset + right, 0
    else:
        kind, offset = "none", 0
    kept = mask.mask_type in ("dense", "lines")
    return KernelMask(mask.mask_type if kept else kind, offset, left, right)
