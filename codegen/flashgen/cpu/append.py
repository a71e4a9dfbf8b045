"""Appending to a KV cache on the CPU, rotations in float32. Lengths can be read here, so what has no place is
an error."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flashgen.errors import BadParam, BadTensorShape
from flashgen.operators.append import ARGUMENTS, new_tokens, pair_slices, queries, slots, total_lengths
from flashgen.operators.numbers import bfloat16_bits, widened
from flashgen.runtime.arrays import check_writable, host_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.append import AppendProblem, Slots, Tokens
    from flashgen.runtime.plans import Arrays, Pointers, Work

    Named = Mapping[str, np.ndarray | None]


class Runner:
    """Computes a problem at once, in the calling thread; see ``plans.Runner``."""

    variant = None
    steps = ()
    workspace_bytes = 0

    def at(self, pointers: Pointers, problem: AppendProblem) -> Work:
        return partial(_run, problem)


def _run(problem: AppendProblem, arrays: Arrays, stream: int) -> None:
    check_writable(problem, arrays)
    on_host = (None if x is None else host_array(x) for x in arrays)
    append(problem, dict(zip((argument.name for argument in ARGUMENTS), on_host, strict=True)))


def append(problem: AppendProblem, arrays: Named) -> None:
    """Fill the outputs. ``arrays`` has all arguments by name, None for what is absent, with the shapes of the
    contract; bfloat16 elements are their bits in uint16.

    Raises, before anything is written, BadTensorShape for a sequence that outgrows the cache or the tables,
    and BadParam for lengths, pages and boundaries that are none.
    """
    _check_boundaries(problem, arrays)
    new = new_tokens(problem, arrays)
    where = slots(problem, new, arrays)
    _check_room(problem, new, where, arrays)
    tokens_of = {"k_new": new} | ({"q": queries(problem, arrays)} if arrays["q"] is not None else {})
    if problem.pairs != "none":
        for name, tokens in tokens_of.items():
            _check_rows(problem, name, tokens)
    at = where.page[new.real], where.slot[new.real]
    arrays["k_cache"][at] = _rotated(problem, "k_new", new, arrays)[new.real]
    arrays["v_cache"][at] = _batched(problem, arrays["v_new"])[new.real]
    if arrays["q"] is not None:
        of_q = tokens_of["q"]
        _batched(problem, arrays["q_rotated"])[of_q.real] = _rotated(problem, "q", of_q, arrays)[of_q.real]
    arrays["total_lengths"][...] = total_lengths(problem, arrays)


def _batched(problem: AppendProblem, x: np.ndarray) -> np.ndarray:
    return x if problem.batched else x[None]


def _rotated(problem: AppendProblem, name: str, tokens: Tokens, arrays: Named) -> np.ndarray:
    """An array as it is to be stored."""
    x = _batched(problem, arrays[name])
    if problem.pairs == "none":
        return x
    row = np.where(tokens.real, tokens.row, 0)
    c, s = (
        widened(arrays[table][row], problem.table_dtype, np.float32)[:, :, None] for table in ("cos", "sin")
    )
    first, second = pair_slices(problem)
    numbers = widened(x, problem.dtype, np.float32)
    out = x.copy()
    for own, other, sine in ((first, second, -s), (second, first, s)):
        rotated = c * numbers[..., own] + sine * numbers[..., other]
        out[..., own] = bfloat16_bits(rotated) if problem.dtype == "bf16" else rotated
    return out


def _check_boundaries(problem: AppendProblem, arrays: Named) -> None:
    boundaries = arrays["cu_seqlens_new"]
    if boundaries is None:
        return
    if boundaries[0] != 0 or (np.diff(boundaries) < 0).any() or boundaries[-1] > problem.seqlen_new:
        raise BadParam(
            f"cu_seqlens_new is {boundaries.tolist()}; it must begin with 0, not decrease, and end at the "
            f"{problem.seqlen_new} tokens of k_new or before"
        )


def _check_room(problem: AppendProblem, new: Tokens, where: Slots, arrays: Named) -> None:
    lengths, capacity = arrays["lengths"], problem.capacity
    if (lengths < 0).any():
        sequence = int(np.argmax(lengths < 0))
        raise BadParam(f"lengths[{sequence}] is {lengths[sequence]}; expected 0 or more")
    outgrown = new.real & (new.position >= capacity)
    if outgrown.any():
        sequence = int(new.sequence[outgrown][0])
        count = int((new.real & (new.sequence == sequence)).sum())
        raise BadTensorShape(
            f"sequence {sequence} has {lengths[sequence]} tokens and gets {count}, and the cache has room "
            f"for {capacity}; pass fewer, or a larger cache"
        )
    missing = new.real & ~where.there
    if missing.any():
        sequence, position = int(new.sequence[missing][0]), int(new.position[missing][0])
        if problem.paged:
            place = f"pages[{sequence}, {position // problem.page_size}]"
            entry = arrays["pages"][sequence, position // problem.page_size]
        else:
            place, entry = f"index[{sequence}]", arrays["index"][sequence]
        raise BadParam(f"{place} is {entry}; expected 0 to {problem.num_pages - 1}, as k_cache has them")


def _check_rows(problem: AppendProblem, name: str, tokens: Tokens) -> None:
    past = tokens.real & ((tokens.row < 0) | (tokens.row >= problem.num_positions))
    if past.any():
        raise BadTensorShape(
            f"sequence {int(tokens.sequence[past][0])} has a token of {name} at position "
            f"{int(tokens.row[past][0])}, and cos has {problem.num_positions} rows; pass longer tables"
        )
