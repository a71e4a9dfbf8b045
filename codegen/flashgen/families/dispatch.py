"""What dispatch gets from a spec, beside the variants that it chooses among.

A number of the rule is one line here: the annotation says what a spec may give, and the record is carried
whole to `schedule.dispatch`, which reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

if TYPE_CHECKING:
    from flashgen.families.kinds import Choice, Decimal, Integer, optional


class Dispatch(NamedTuple):
    """Whether dispatch offers a family to calls (``prefer``), up to how many rows of a head, as its grid
    counts them (``rows_at_most``; None: any), and the numbers by which `schedule.cost` models time.

    ``efficiency`` is the measured rate of a tile relative to its siblings; ``streaming`` is the rate where a
    kernel streams an array of a score modification, None: ``efficiency``; ``streaming_fp32`` is the rate
    where it streams an fp32 array, None: ``streaming``. The others are of all tiles.
    """

    prefer: Annotated[str, Choice(("least_time", "on_request"))] = "least_time"
    start: Annotated[float, Decimal(least=0, most=100)] = 0.0
    fill: Annotated[float, Decimal(least=0, most=1)] = 0.0
    passes: Annotated[float, Decimal(least=0, most=10_000)] = 0.0
    alone_gbps: Annotated[float, Decimal(above=0, most=10_000)] = 50.0
    rows_at_most: Annotated[int | None, optional(Integer(1))] = None
    efficiency: Annotated[float, Decimal(above=0, most=1e6)] = 1.0
    streaming: Annotated[float | None, optional(Decimal(above=0, most=1e6))] = None
    streaming_fp32: Annotated[float | None, optional(Decimal(above=0, most=1e6))] = None

    @property
    def on_request(self) -> bool:
        """Whether only calls that name the algorithm get the family."""
        return self.prefer == "on_request"


# What a row of the tile table gives; the key `dispatch` of the file has the others.
OF_A_TILE = ("efficiency", "streaming", "streaming_fp32")
