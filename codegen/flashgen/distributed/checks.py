"""Checks that ranks agree on a call, under ``FLASHGEN_CHECK=1``: ranks exchange their arguments and errors.
So an error on one rank, or a difference between two, is an error on all ranks. Without the check such ranks
would wait for each other for ever.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from flashgen.errors import BadParam, FlashgenError, arg
from flashgen.runtime.check import enabled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flashgen.distributed.groups import Ranks

_LONGEST = 60


def agreed(ranks: Ranks, facts: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """The facts of this rank's call; ``facts`` raises the error of a wrong call. Under FLASHGEN_CHECK an
    error on one rank is raised on every rank, and BadParam if two ranks differ in a fact.
    """
    if not enabled():
        return facts()
    error: Exception | None = None
    values: Mapping[str, Any] = {}
    try:
        values = facts()
    except (FlashgenError, TypeError, ValueError, RuntimeError, AttributeError) as raised:
        # The other ranks must not wait for this one, whatever the error is.
        error = raised
    for group in ranks.groups:
        everyone: list[Any] = [None] * group.size()
        told = {name: _digest(value) for name, value in values.items()}, None if error is None else str(error)
        dist.all_gather_object(everyone, told, group=group)
        if error is None:
            error = _difference(everyone)
    if error is not None:
        raise error
    return values


def _digest(value: Any) -> str:
    """A value as text; of a long text only the beginning, with a hash of all."""
    text = repr(value)
    if len(text) <= _LONGEST:
        return text
    return (
        f"{text[:_LONGEST]}... ({len(text)} characters, {blake2b(text.encode(), digest_size=8).hexdigest()})"
    )


def _difference(everyone: list[tuple[dict[str, str], str | None]]) -> BadParam | None:
    """What is wrong between ranks, if anything."""
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            return BadParam(f"rank {rank} of the group has an error, so no rank computes: {message}")
    first, _ = everyone[0]
    for rank, (facts, _) in enumerate(everyone):
        for name in sorted(first.keys() | facts.keys()):  # the same message on all ranks
            ours, theirs = first.get(name), facts.get(name)
            if ours != theirs:
                return BadParam(
                    f"{arg(name)} differs between ranks: {ours} on rank 0 of the group, {theirs} on rank "
                    f"{rank}; all ranks have to call with the same"
                )
    return None
