"""Whether every token of an append has a place, from lengths and tables that can be read on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.errors import BadParam, BadTensorShape
from flashgen.operators.append import new_tokens, queries, slots
from flashgen.operators.sequences import check_boundaries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.append import AppendProblem, Slots, Tokens

    Arrays = Mapping[str, np.ndarray | None]


def check_places(problem: AppendProblem, arrays: Arrays) -> None:
    """``arrays`` has lengths, pages, index, positions and cu_seqlens_new, by name.

    Raises BadTensorShape for a sequence that outgrows the cache or the tables of angles, and BadParam for
    lengths, pages and boundaries that are none.
    """
    if arrays["cu_seqlens_new"] is not None:
        check_boundaries(arrays["cu_seqlens_new"], "cu_seqlens_new", problem.seqlen_new, "tokens of k_new")
    if problem.empty:
        return
    new = new_tokens(problem, arrays)
    _check_room(problem, new, slots(problem, new, arrays), arrays)
    if problem.pairs != "none":
        _check_rows(problem, "k_new", new)
        if problem.num_heads_q:
            _check_rows(problem, "q", queries(problem, arrays))


def _check_room(problem: AppendProblem, new: Tokens, where: Slots, arrays: Arrays) -> None:
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
    if (lengths > capacity).any():
        sequence = int(np.argmax(lengths > capacity))
        raise BadParam(f"lengths[{sequence}] is {lengths[sequence]}; the cache has room for {capacity}")
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
