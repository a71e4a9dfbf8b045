"""What a kernel's grid covers, and how a tile of it walks the scores: what a spec says of a step's launch.

Scheduling reads these numbers; nothing there repeats what a template decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

if TYPE_CHECKING:
    from flashgen.families.kinds import EXPRESSION, Choice, MapOf

# What the blocks of a launch do: one tile each; or a part of their cluster's tile each; one tile each,
# of sequences whose lengths the kernel finds; or, no more of them than run at a time, tile after tile; the
# same of sequences; or each an equal share of the KV blocks of all tiles, and of a step that combines, one
# for each share of the main step.
SCHEDULES = (
    "tile_per_block",
    "tile_per_cluster",
    "sequences",
    "persistent",
    "persistent_sequences",
    "shares",
)

# In the shape of a workspace array: the parts of tiles that the main step's shares may leave to combine.
NUM_PARTS = "num_parts"
# In such a shape: the parts of a kv head's query heads, each with its own thread blocks (`Grid.part_time`).
GROUP_PARTS = "group_parts"

Extents = tuple[tuple[str, int], ...]


class Grid(NamedTuple):
    """The work tiles of a launch. A number is at least what it is by default. In a
    spec, numbers and extents are expressions.

    ``covers`` names the dimensions of the operator that are cut into tiles, with a tile's extent in each;
    their product is the number of tiles. ``schedule`` is one of SCHEDULES. ``blocks_per_sm`` is the
    thread blocks that a multiprocessor has room for. ``from_last_row`` is 0 where tiles are counted from
    the first row of a head; else they are counted from the last one, in multiples of this many rows.
    ``split_gain`` is the KV blocks that the largest share must lose for shares to begin within tiles.
    ``part_time`` is the time, in query rows, that memory takes for what a tile of keys leaves of a part
    of its query heads (0: groups of query heads are never split). ``cluster`` is the thread blocks of a
    cluster, which share a tile, have neighbouring ones of the first dimension, or the same share of
    neighbouring sets of heads. ``step_rows`` is the query rows of a step of tiles of keys; they add to dq
    ``in_turns`` unless it is 0. ``beside`` cuts further dimensions into tiles of a second kind. With one
    of the ``kinds`` to a thread block, tiles of the second kind come after the others; with two, thread
    block i has tile i of each kind that has more than i.
    """

    covers: Annotated[Extents, MapOf(EXPRESSION, least=1)] = ()
    schedule: Annotated[str, Choice(SCHEDULES)] = "tile_per_block"
    blocks_per_sm: Annotated[int, EXPRESSION] = 1
    from_last_row: Annotated[int, EXPRESSION] = 0
    split_gain: Annotated[int, EXPRESSION] = 0
    part_time: Annotated[int, EXPRESSION] = 0
    cluster: Annotated[int, EXPRESSION] = 1
    step_rows: Annotated[int, EXPRESSION] = 0
    in_turns: Annotated[int, EXPRESSION] = 0
    beside: Annotated[Extents, MapOf(EXPRESSION)] = ()
    kinds: Annotated[int, EXPRESSION] = 1

    @property
    def persistent(self) -> bool:
        return self.schedule in ("persistent", "persistent_sequences")

    @property
    def of_sequences(self) -> bool:
        return self.schedule in ("sequences", "persistent_sequences")

    @property
    def shared_tiles(self) -> bool:
        """Whether the thread blocks of a cluster share a tile."""
        return self.schedule == "tile_per_cluster"

    @property
    def shares(self) -> bool:
        return self.schedule == "shares"

    def tile(self, dimension: str) -> int:
        """A tile's extent in a dimension; 0 where the grid does not cover it."""
        return dict(self.covers).get(dimension, 0)


# The fields of a grid that are numbers.
GRID_NUMBERS = tuple(name for name, default in Grid._field_defaults.items() if isinstance(default, int))


class Visits(NamedTuple):
    """How a work tile walks the scores: ``rows`` of it visit the same KV blocks, of ``keys`` keys each. A
    warp (``wgmma``: a warpgroup) multiplies ``mma_rows`` rows as one, and takes ``mma`` matrix instructions
    for them and a KV block.
    """

    rows: Annotated[int, EXPRESSION]
    keys: Annotated[int, EXPRESSION]
    mma_rows: Annotated[int, EXPRESSION]
    mma: Annotated[int, EXPRESSION]


class Buffer(NamedTuple):
    """A slice of the workspace: an array of the family's own that its steps share. The extents in ``shape``
    are expressions over sizes of the call, axes, tile keys, the dimensions of grids, ``num_parts`` and
    ``group_parts``.
    """

    name: str
    dtype: str
    shape: tuple[str, ...]
