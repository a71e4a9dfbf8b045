"""Where the tokens of an append go, and whether there is such a place, from lengths and tables that can be
read on the host; and which elements of a row are rotated together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from flashgen.errors import BadParam, BadTensorShape, arg
from flashgen.operators.sequences import check_boundaries

if TYPE_CHECKING:
    from collections.abc import Mapping

    Arrays = Mapping[str, np.ndarray | None]


class Sizes(Protocol):
    """How many tokens an append has, and where they may go; see `AppendProblem`."""

    batch: int
    batched: bool
    sequences: int
    seqlen_new: int
    seqlen_q: int
    num_heads_q: int
    head_dim: int
    num_pages: int
    page_size: int
    max_pages: int
    paged: bool
    pairs: str
    num_positions: int
    rotary_half: int
    q_positions: str

    @property
    def capacity(self) -> int:
        """The tokens that a sequence may have."""

    @property
    def empty(self) -> bool:
        """Whether there are no sequences."""

    @property
    def latent(self) -> bool:
        """Whether the last elements of a row are rotated, not the first."""


def pair_slices(problem: Sizes) -> tuple[slice, slice]:
    """The first elements of the pairs of a row, and the second ones, in the order of the columns of cos."""
    half = problem.rotary_half
    begin = problem.head_dim - 2 * half if problem.latent else 0
    end = begin + 2 * half
    if problem.pairs == "interleaved":
        return slice(begin, end, 2), slice(begin + 1, end, 2)
    return slice(begin, begin + half), slice(begin + half, end)


class Tokens(NamedTuple):
    """New tokens, or queries, as NumPy arrays (batch, tokens): the ``sequence`` of each, its ``position``
    there, the ``row`` of the tables that it takes. ``real`` is false for tokens after the last sequence,
    whose ``sequence`` is 0.
    """

    sequence: np.ndarray
    position: np.ndarray
    row: np.ndarray
    real: np.ndarray


def new_tokens(problem: Sizes, arrays: Arrays) -> Tokens:
    """The tokens of k_new and v_new; ``arrays`` has lengths, positions and cu_seqlens_new."""
    return _tokens(problem, arrays, problem.seqlen_new, 1)


def queries(problem: Sizes, arrays: Arrays) -> Tokens:
    """The queries of q; ``arrays`` as in `new_tokens`."""
    return _tokens(problem, arrays, problem.seqlen_q, 1 if problem.q_positions == "each" else 0)


def _tokens(problem: Sizes, arrays: Arrays, count: int, step: int) -> Tokens:
    number = np.arange(count)
    if problem.batched:
        sequence, offset = np.broadcast_arrays(np.arange(problem.batch)[:, None], number[None])
        real = np.ones(sequence.shape, bool)
    else:
        boundaries = arrays["cu_seqlens_new"].astype(np.int64)
        sequence = (np.searchsorted(boundaries, number, "right") - 1)[None]
        real = (sequence >= 0) & (sequence < problem.sequences)
        sequence = np.where(real, sequence, 0)
        offset = number - boundaries[sequence]
    position = arrays["lengths"].astype(np.int64)[sequence] + step * offset
    positions = arrays["positions"]
    row = position if positions is None else positions.reshape(position.shape).astype(np.int64)
    return Tokens(sequence, position, row, real)


class Slots(NamedTuple):
    """Where tokens go in a cache: the ``page``, the ``slot`` in it; ``there`` is false where there is no such
    place, and both are 0 then.
    """

    page: np.ndarray
    slot: np.ndarray
    there: np.ndarray


def slots(problem: Sizes, tokens: Tokens, arrays: Arrays) -> Slots:
    """Where new tokens go; ``arrays`` has pages and index."""
    there = (tokens.position >= 0) & (tokens.position < problem.capacity)
    nth, slot = np.divmod(np.where(there, tokens.position, 0), max(1, problem.page_size))
    if problem.paged:
        page = arrays["pages"][tokens.sequence, nth] if problem.max_pages else nth
    else:
        page = tokens.sequence if arrays["index"] is None else arrays["index"][tokens.sequence]
    there = there & (page >= 0) & (page < problem.num_pages)
    return Slots(np.where(there, page, 0), np.where(there, slot, 0), there)


def total_lengths(problem: Sizes, arrays: Arrays) -> np.ndarray:
    """The lengths with the new tokens, as far as there is room for them."""
    boundaries = arrays["cu_seqlens_new"]
    added = problem.seqlen_new if boundaries is None else np.diff(boundaries)
    return np.minimum(arrays["lengths"] + added, problem.capacity).astype(np.int32)


def check_places(problem: Sizes, arrays: Arrays) -> None:
    """``arrays`` has lengths, pages, index, positions and cu_seqlens_new, by name.

    Raises BadTensorShape for a sequence that outgrows the cache or the tables of angles, and BadParam for
    lengths, pages, positions and boundaries that are none, for two tokens that go to one place, and for one
    that goes to the place of a key.
    """
    if arrays["cu_seqlens_new"] is not None:
        check_boundaries(
            arrays["cu_seqlens_new"], "cu_seqlens_new", problem.seqlen_new, f"tokens of {arg('k_new')}"
        )
    if problem.empty:
        return
    new = new_tokens(problem, arrays)
    where = slots(problem, new, arrays)
    _check_room(problem, new, where, arrays)
    _check_own(problem, new, where)
    _check_free(problem, new, where, arrays)
    if problem.pairs != "none":
        _check_rows(problem, "k_new", new)
        if problem.num_heads_q:
            _check_rows(problem, "q", queries(problem, arrays))


def _check_room(problem: Sizes, new: Tokens, where: Slots, arrays: Arrays) -> None:
    lengths, capacity = arrays["lengths"], problem.capacity
    if (lengths < 0).any():
        sequence = int(np.argmax(lengths < 0))
        raise BadParam(f"{arg('lengths')}[{sequence}] is {lengths[sequence]}; expected 0 or more")
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
        raise BadParam(
            f"{arg('lengths')}[{sequence}] is {lengths[sequence]}; the cache has room for {capacity}"
        )
    missing = new.real & ~where.there
    if missing.any():
        sequence, position = int(new.sequence[missing][0]), int(new.position[missing][0])
        if problem.paged:
            place = f"{arg('pages')}[{sequence}, {position // problem.page_size}]"
            entry = arrays["pages"][sequence, position // problem.page_size]
        else:
            place, entry = f"{arg('index')}[{sequence}]", arrays["index"][sequence]
        raise BadParam(
            f"{place} is {entry}; expected 0 to {problem.num_pages - 1}, as {arg('k_cache')} has them"
        )


def _check_own(problem: Sizes, new: Tokens, where: Slots) -> None:
    """That each new token has a place of its own; without pages and index a sequence has a row of its own."""
    place = (where.page.astype(np.int64) * problem.page_size + where.slot)[new.real]
    order = np.argsort(place, kind="stable")
    twice = np.flatnonzero(np.diff(place[order]) == 0)
    if twice.size:
        first, second = (int(new.sequence[new.real][order[nth]]) for nth in (twice[0], twice[0] + 1))
        page, slot = divmod(int(place[order[twice[0]]]), problem.page_size)
        unit, table = ("page", "pages") if problem.paged else ("row", "index")
        raise BadParam(
            f"slot {slot} of {unit} {page} of the cache would get a new token of sequence {first} and one of "
            f"sequence {second}; {arg(table)} must give each token its own place"
        )


def _check_free(problem: Sizes, new: Tokens, where: Slots, arrays: Arrays) -> None:
    """That no new token overwrites a key of another sequence to which tokens are appended, on a page or a row
    which two share. What other sequences say may be of calls before.
    """
    if not new.real.any():
        return
    lengths, table = arrays["lengths"].astype(np.int64), arrays["pages"]
    lengths[np.bincount(new.sequence[new.real], minlength=problem.sequences) == 0] = 0
    if table is None:
        index = arrays["index"]
        table = (np.arange(problem.sequences) if index is None else index)[:, None]
    # The first slots of a page, of which some sequence has keys.
    begins = problem.page_size * np.arange(table.shape[1])
    keys = (lengths[:, None] - begins).clip(0, problem.page_size)
    in_use = (keys > 0) & (table >= 0) & (table < problem.num_pages)
    filled = np.zeros(problem.num_pages, np.int64)
    np.maximum.at(filled, table[in_use], keys[in_use])
    taken = new.real & (where.slot < filled[where.page])
    if taken.any():
        page, slot = int(where.page[taken][0]), int(where.slot[taken][0])
        owner = int(np.argwhere(in_use & (table == page) & (keys > slot))[0, 0])
        unit = "page" if problem.paged else "row"
        raise BadParam(
            f"slot {slot} of {unit} {page} of the cache would get a new token of sequence "
            f"{int(new.sequence[taken][0])}, and has a key of sequence {owner}; copy a {unit} that two share "
            "before tokens are appended to it"
        )


def _check_rows(problem: Sizes, name: str, tokens: Tokens) -> None:
    before = np.argwhere(tokens.real & (tokens.row < 0))
    if before.size:  # lengths are 0 or more, so the caller said so
        nth = tuple(before[0].tolist())
        place = ", ".join(map(str, nth if problem.batched else nth[1:]))
        raise BadParam(
            f"{arg('positions')}[{place}] is {tokens.row[nth]}; expected 0 to {problem.num_positions - 1}"
        )
    past = tokens.real & (tokens.row >= problem.num_positions)
    if past.any():
        raise BadTensorShape(
            f"sequence {int(tokens.sequence[past][0])} has a token of {arg(name)} at position "
            f"{int(tokens.row[past][0])}, and {arg('cos')} has {problem.num_positions} rows; pass longer "
            "tables"
        )
