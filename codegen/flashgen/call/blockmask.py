"""What a call says of a mask by lists of key blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.call.kvcache import ShapesShown
from flashgen.errors import BadTensorShape, arg, naming
from flashgen.operators.blocklists import block_size_of

if TYPE_CHECKING:
    from flashgen.call.record import Call

# The fields of a call that hold a BlockMask, and what its caller calls them, for messages.
FIELDS = {
    "block_indptr": "indptr of the BlockMask",
    "block_indices": "indices of the BlockMask",
    "block_size": "block of the BlockMask",
}


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class BlockMask(ShapesShown):
    """A mask by lists of visible key blocks: queries of block r attend to the keys of the blocks
    ``indices[indptr[r]:indptr[r + 1]]``, and to no others.

    indptr: int32 (seqlen_q / block[0] + 1,), rounded up, or (batch or 1, num_heads_kv or 1, as many): where
        the list of each block of queries begins and ends in ``indices``. It does not decrease.
    indices: int32, one dimension: numbers of key blocks. Each list is in ascending order without repetitions.
        Elements outside all lists may hold anything.
    block: (rows, keys) of a block, each 64 or 128. The last blocks may be ragged.

    Both arrays are on the device of q. The host does not read them, so a captured graph uses the lists at its
    replay. FLASHGEN_CHECK=1 checks them. The CPU path always does.
    """

    indptr: Any
    indices: Any
    block: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        """Raise BadParam for another size of blocks, BadTensorShape for an indptr of two dimensions."""
        with naming(FIELDS):
            object.__setattr__(self, "block", block_size_of(self.block))
            dimensions = len(self.indptr.shape)
            if dimensions not in (1, 3):
                raise BadTensorShape(
                    f"{arg('block_indptr')} has shape {tuple(self.indptr.shape)}; expected one dimension, or "
                    "three: batch entries, kv heads and ends"
                )
        if dimensions == 1:
            object.__setattr__(self, "indptr", self.indptr[None, None])


def with_arrays(call: Call) -> Call:
    """A call whose mask is a BlockMask, with what this holds as fields of the call."""
    mask: BlockMask = call.mask
    other: Any = call.copy()  # `replace` would take longer
    other.mask = None
    other.block_indptr, other.block_indices, other.block_size = mask.indptr, mask.indices, mask.block
    return other
