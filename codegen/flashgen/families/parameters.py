"""Every kernel parameter, declared once for all families: its type, its comment, and which variants have it.

Pointers and strides follow from the operator's argument table, pointers to the workspace from the spec. Other
numbers are the rows of `NUMBERS`. `schedule.parameters` gives their values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashgen.families.features import CLEARS_AHEAD, HEAD_SETS, PLACES_BLOCKS
from flashgen.families.params import TENSOR_MAP, VECTOR_WIDTH
from flashgen.operators.arguments import ROW_ALIGNMENT, shown_shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.families.schema import BufferRow
    from flashgen.operators.arguments import Argument
    from flashgen.operators.operator import Operator

DIVISOR = "_divisor"
# What follows the name of an array in the name of all of its strides.
STRIDES = "_strides"
# The types of pointers to arrays of a dtype; `element` is the dtype of the call.
POINTERS = {
    "bf16": "bf16*",
    "fp32": "float*",
    "uint8": "uint8_t*",
    "bool": "uint8_t*",
    "int32": "int32_t*",
    "int64": "int64_t*",
}
ELEMENT = "element*"
# Of an array of elements of which a kernel reads e4m3 codes.
CODES = "e4m3*"

# In a declaration: for variants that have a feature.
FEATURE = "feature"
When = dict[str, tuple[str, ...]]

_DENSE: When = {"mask_type": ("dense",)}
_DIAGONAL: When = {"mask_type": ("causal", "local", "dense", "blocks", "tree")}
_WINDOW: When = {"mask_type": ("local", "dense", "blocks", "tree")}
_BLOCKS: When = {"mask_type": ("blocks",)}
_GROUPED: When = {"gqa": ("gqa", "packed")}
_PAGED: When = {"pages": ("paged",)}
_UNPAGED: When = {"pages": ("none",)}
_STARTS: When = {"kv_starts": ("starts",)}
_ROPE: When = {"q_rope": ("rope",)}
_TREE: When = {"mask_type": ("tree",)}
_CODES: When = {"kv_dtype": ("e4m3",)}
_ROTATED: When = {"rotary": ("halves", "interleaved")}
_ORDERED: When = {"dq_order": ("ordered",)}
_FIXED_SPLITS: When = {"splits": ("fixed",)}
_CLEARS_AHEAD: When = {FEATURE: (CLEARS_AHEAD,)}
_PLACES_BLOCKS: When = {FEATURE: (PLACES_BLOCKS,)}
_HEAD_SETS: When = {FEATURE: (HEAD_SETS,)}


class Declared(NamedTuple):
    """A parameter. ``when`` lists, per axis, the values for which variants have it; an axis that a spec lacks
    has the operator's default, and one that the operator lacks says nothing. Of `FEATURE` it has the one that
    the spec must say they have.
    """

    ctype: str
    doc: str = ""
    when: Mapping[str, tuple[str, ...]] = {}


class Note(NamedTuple):
    """What neither the argument table nor a workspace says of an array: its comment, and ``when`` as in
    `Declared`. ``required`` is whether calls of these variants have it, where it is optional for others.
    """

    doc: str = ""
    when: Mapping[str, tuple[str, ...]] = {}
    required: bool = False


ARRAYS = {
    "lse": Note("natural logarithm"),
    "sinks": Note("a logit of each query head, natural units; fp32, or bfloat16 with sink_bytes 2"),
    "dropout_seed": Note("seed and offset of the random numbers of dropout", required=True),
    "k_scale": Note("what a code of 1 in k stands for; null is 1", _CODES),
    "v_scale": Note("what a code of 1 in v stands for; null is 1", _CODES),
    "k_scale_out": Note("what a code of 1 in k stands for", _CODES),
    "v_scale_out": Note("what a code of 1 in v stands for", _CODES),
    "q_scale": Note("what a code of 1 in q stands for; null is 1"),
    "out_scale": Note("what a code of 1 in out stands for; null is 1"),
    "dlse": Note("the gradient of lse"),
    "mask": Note("not 0 = hidden", _DENSE, required=True),
    "block_indptr": Note(
        "where the list of each block of queries begins, and the end", _BLOCKS, required=True
    ),
    "block_indices": Note("blocks of keys, ascending in each list", _BLOCKS, required=True),
    "line_indptr": Note("for each list a table: ends, tiles in order, keys of queries"),
    "line_indices": Note("blocks of keys, ascending in each list; ~n where the line decides"),
    "line_totals": Note("entries that each list has, which may be more than it has room for"),
    "line_key_bounds": Note("(lists, arrays of keys, 2, blocks of keys): least and largest element"),
    "line_counts": Note("(lists, blocks of queries): entries of each"),
    "cu_seqlens_q": Note("null where queries are padded"),
    "cu_seqlens_kv": Note("null where keys are not packed", _UNPAGED),
    "kv_lengths": Note("null where cu_seqlens_kv has them, or all have seqlen_kv"),
    "kv_starts": Note("the first key of each sequence", _STARTS, required=True),
    "tree": Note("bit j: the query sees draft j, of the last keys, one a query", _TREE, required=True),
    "indices": Note("tokens of its sequence that each query attends to; -1: none"),
    "q_rope": Note("the elements of q after the first head_dim_v", _ROPE, required=True),
    "index": Note("the entry of the keys of each sequence; null: its number", _UNPAGED),
    "pages": Note("entries past the last key are never read", _PAGED, required=True),
    "lengths": Note("tokens of each sequence in the cache"),
    "total_lengths": Note("lengths with the new tokens"),
    "cu_seqlens_new": Note("where each sequence begins in packed tokens, and the end"),
    "cos": Note("", _ROTATED),
    "sin": Note("", _ROTATED),
    "positions": Note("the row of cos and sin of each token; null: its position", _ROTATED),
    "q_rotated": Note("", _ROTATED),
    "largest": Note("(num_heads, batch, blocks of tokens): the largest finite |x|"),
    "scale": Note("what a code of 1 stands for; broadcast"),
    "scale_out": Note("what a code of 1 stands for"),
    "codes": Note("e4m3"),
    "lse1": Note("natural logarithm; -inf or +inf for a row without keys"),
    "lse2": Note("as lse1"),
    "lse_out": Note("as lse1, but always -inf for a row without keys"),
    # Of workspaces. Gradients have whole units of rows of each head of the batch: unit_rows().
    "delta": Note("(heads, unit_rows): sum(dout * out) - dlse"),
    "lse_log2": Note("(heads, unit_rows): lse in log2 units; inf for a row that attends to no key"),
    "dq_accum": Note("(heads, unit_rows, kHeadDim): sums of dQ, in the order of dq_tiles"),
    "turns": Note("(heads, blocks of queries): blocks of keys that have added to dq_accum", _ORDERED),
    "cleared": Note("(heads of the main grid): CTAs that have cleared their part of dq_accum", _CLEARS_AHEAD),
    "added": Note("(heads of the main grid): CTAs that have added all their dQ to dq_accum", _CLEARS_AHEAD),
    "v_tiles": Note("(batch, num_heads_kv, blocks of keys): V^T of each, as shared memory has it"),
    "tile_order": Note(
        "how many tiles are taken; for each list its tiles, the longest first: see place_of_tile()", _BLOCKS
    ),
    "key_order": Note(
        "how many blocks are long; for each list its blocks of keys, the longest first, and their lists",
        _BLOCKS,
    ),
    "key_list_ends": Note("(lists, num_listed_keys, 2): begin and end of each list by keys", _BLOCKS),
    "key_lists": Note(
        "(block_entries, 2): a block of queries; how many thread blocks have later keys that it sees",
        _BLOCKS,
    ),
    "dk_parts": Note("dK of each part of a group, in tiles of 16 rows by 8 columns", _GROUPED),
    "dv_parts": Note("dV of each part of a group, in the same tiles", _GROUPED),
    "key_blocks": Note(
        "(thread blocks, 8): the block of keys of each thread block of the main kernel", _PLACES_BLOCKS
    ),
    "tiles_taken": Note("tiles that thread blocks have taken after their first ones", _STARTS, required=True),
    "part_outputs": Note(
        "(parts, kBlockM, kHeadDimV): O, not divided by row_sum; null where no tile is split"
    ),
    "part_sums": Note("(parts, kBlockM, 2): row_max, log2 domain, and row_sum"),
    "scores": Note("(batch, num_heads_q, seqlen_q, row_keys(params)): S, and then P"),
    "row_sum": Note("(batch, num_heads_q, seqlen_q): the sum of each row of P"),
    "row_max": Note("(batch, num_heads_q, seqlen_q): the maximum of each row of S"),
    "dscore": Note("the gradient, contiguous"),
    "tile_sums": Note("sums of dS of each tile of scores, rows of tiles first"),
    "dscore_parts": Note("(pair_parts, dscore_elements): sums of each part; null where there is one part"),
    "place_sums": Note("(kept_batch, kept_heads, places): null where they are the gradient itself"),
    "running_o": Note("(batch, num_heads_q, seqlen_q, head_dim_v): O so far"),
}

# What kernels of gradients keep between steps beside arguments: no parameter of a score modification is
# called so.
KEPT = ("dq_accum", "delta", "lse_log2", "turns", "key_list_ends", "key_lists", "key_order")

NUMBERS = {
    # Sizes of the call. If lengths vary, sizes of a sequence are bounds for all sequences.
    "batch_size": Declared("int32_t", "sequences"),
    "num_heads_q": Declared("int32_t"),
    "num_heads_kv": Declared("int32_t"),
    "group_size": Declared("int32_t", "num_heads_q / num_heads_kv", _GROUPED),
    "seqlen_q": Declared("int32_t", "queries of a sequence; of the longest one if lengths vary"),
    "seqlen_kv": Declared("int32_t", "keys of a sequence; of the longest one if lengths vary"),
    "topk": Declared("int32_t", "entries of the list of a query"),
    "rows_q": Declared("int32_t", "of an entry of q: all tokens where sequences are packed"),
    "rows_kv": Declared("int32_t", "of an entry of k: all tokens where sequences are packed", _UNPAGED),
    "sink_bytes": Declared("int32_t", "of an element of sinks: 4, or 2 of bfloat16"),
    "batch_kv": Declared("int32_t", "entries of k: of a paged cache its pages"),
    "kv_start": Declared("int32_t", "0; of a sequence, its first key", _STARTS | _PAGED),
    "page_size": Declared("int32_t", "keys of a page", _PAGED),
    "head_dim": Declared("int32_t", "of q and k in the call: whole chunks of 16 bytes"),
    "head_dim_v": Declared("int32_t", "of v and out in the call: whole chunks of 16 bytes"),
    # Of a call that appends to a cache.
    "sequences": Declared("int32_t"),
    "seqlen_new": Declared("int32_t", "tokens of a batch entry of k_new"),
    "num_pages": Declared("int32_t"),
    "capacity": Declared("int32_t", "tokens that a sequence may have"),
    "num_positions": Declared("int32_t", "rows of cos and sin", _ROTATED),
    "rotary_dim": Declared(
        "int32_t", "elements of a row that are rotated: the first, a multiple of 16", _ROTATED
    ),
    "q_step": Declared("int32_t", "1: query i is at lengths + i; 0: all are at lengths", _ROTATED),
    "row_chunks_log2": Declared("int32_t", "of the threads of a row: its 16-byte chunks, rounded up to 2^n"),
    # Of a call that quantises.
    "scale_batch_step": Declared(
        "int64_t", "from the scale of a batch entry to the next one's; 0 where they share it"
    ),
    "scale_row_step": Declared("int64_t", "the same of tokens"),
    "scale_head_step": Declared("int64_t", "the same of heads"),
    # The grid.
    "num_row_blocks": Declared("int32_t", "blocks of rows, keys or tokens: the grid's first dimension"),
    "num_row_blocks_beside": Declared("int32_t", "the same of the second kind of tiles"),
    "num_tiles": Declared("int32_t", "tiles of the grid"),
    "rows_ahead": Declared("int32_t", "a head's first tile begins this many rows before query 0"),
    "heads_per_l2_group": Declared("int32_t", "heads of the grid whose tiles are launched together"),
    "num_l2_groups": Declared("int32_t", "the last group has the remaining heads"),
    "num_heads_divisor": Declared("uint64_t", "of the heads of a batch entry in the grid; see divide()"),
    "l2_group_tiles_divisor": Declared("uint64_t", "of the tiles of an L2 group; see divide()"),
    "l2_group_heads_divisor": Declared("uint64_t", "of heads_per_l2_group; see divide()"),
    "last_l2_group_heads_divisor": Declared("uint64_t", "of the heads of the last L2 group; see divide()"),
    # Shares and splits of the keys.
    "first_kv_block": Declared("int32_t", "KV block of a sequence with which its tiles begin"),
    "num_kv_blocks": Declared("int32_t", "of the tiles of a set of heads; see share_of()"),
    "kv_blocks_per_tile": Declared("int32_t"),
    "kv_blocks_per_share": Declared("int32_t", "of a thread block; the last may have fewer"),
    "num_shares": Declared("int32_t", "thread blocks of a set of heads in the main kernel"),
    "kv_blocks_per_split": Declared("int32_t", "at least; the last of a tile may have fewer", _FIXED_SPLITS),
    "splits_per_tile": Declared("int32_t", "at most", _FIXED_SPLITS),
    "head_sets_log2": Declared("int32_t", "of the number of sets of heads: 1, 2 or 4", _HEAD_SETS),
    "heads_per_set": Declared("int32_t", "heads of a batch entry in a set", _HEAD_SETS),
    # Tiles of keys, in gradients.
    "group_parts": Declared("int32_t", "parts of the query heads of a kv head", _GROUPED),
    "heads_per_part": Declared("int32_t", "num_heads_q / num_heads_kv / group_parts", _GROUPED),
    "cleared_heads": Declared(
        "int32_t", "query heads, over the batch, whose dq_accum this kernel clears", _CLEARS_AHEAD
    ),
    "clear_distance": Declared(
        "int32_t", "CTAs of head h of the grid clear dq_accum of head h + clear_distance", _CLEARS_AHEAD
    ),
    "key_blocks_of_head": Declared(
        "int32_t", "thread blocks of the main kernel for each head of its grid", _CLEARS_AHEAD
    ),
    "num_key_blocks": Declared(
        "int32_t", "entries of key_blocks, some of which may be empty", _PLACES_BLOCKS
    ),
    "blocks_together": Declared(
        "int32_t", "about how many blocks of keys of a sequence are launched together", _PLACES_BLOCKS
    ),
    # Of the gradient of an array of a score modification. Batch entries and heads that the array does not
    # tell apart count as one.
    "kept_batch": Declared("int32_t", "batch entries that have sums of their own"),
    "kept_heads": Declared("int32_t", "query heads that have sums of their own"),
    "places": Declared("int32_t", "sums of a batch entry and head: of queries, keys, distances, or one"),
    "pair_parts": Declared("int32_t", "parts of the batch entries and heads that share an element"),
    "dscore_elements": Declared("int64_t", "of the gradient"),
    "dscore_batch_step": Declared("int64_t", "elements to the next batch entry; 0: all share an element"),
    "dscore_head_step": Declared("int64_t", "the same for heads"),
    "dscore_query_step": Declared("int64_t", "for queries"),
    "dscore_key_step": Declared("int64_t", "for keys"),
    # Lists of key blocks.
    "block_rows": Declared("int32_t", "queries of a block", _BLOCKS),
    "block_rows_log2": Declared("int32_t", "of the queries of a block", _BLOCKS),
    "block_keys_log2": Declared("int32_t", "of the keys of a block", _BLOCKS),
    "num_listed_keys": Declared("int32_t", "blocks of keys that lists may have", _BLOCKS),
    "block_entries": Declared("int32_t", "of block_indices", _BLOCKS),
    "block_indptr_batch": Declared("int32_t", "batch entries that have lists, 1 if all share them", _BLOCKS),
    "block_indptr_num_heads": Declared("int32_t", "kv heads that have lists, 1 if all share them", _BLOCKS),
    "block_indptr_ends": Declared("int32_t", "blocks of queries, and one more", _BLOCKS),
    "block_indptr_size": Declared("int32_t", "elements of block_indptr for each list", _BLOCKS),
    # The mask and the scale.
    "diagonal_offset": Declared("int32_t", "query i is aligned with key i + diagonal_offset", _DIAGONAL),
    "window_left": Declared("int32_t", "keys before the diagonal that a query attends to", _WINDOW),
    "window_right": Declared("int32_t", "and after it", _WINDOW),
    "softmax_scale": Declared("float", "the factor of Q K^T in the scores"),
    "scale_log2": Declared("float", "softmax_scale * log2(e), above 0"),
    # Codes of e4m3.
    "out_is_fp16": Declared("int32_t", "elements of out are fp16, not bfloat16"),
    # Dropout.
    "dropout_row": Declared("int32_t", "the row of random numbers of query 0; a multiple of 16"),
    "keep_threshold": Declared("int32_t", "the largest random byte of a score that counts"),
    "keep_scale": Declared("float", "1 / (1 - dropout_p)"),
}


def declared(name: str, operator: Operator, workspace: Mapping[str, BufferRow]) -> dict[str, Declared]:
    """The parameter called ``name``, or all those that ``ARRAY_strides`` stands for; empty: there is none."""
    argument = _argument(name.removesuffix(STRIDES), operator)
    if argument is not None and name.endswith(STRIDES):
        return _strides(argument)
    single = _one(name, operator, workspace)
    return {} if single is None else {name: single}


def tensor_map(name: str, operator: Operator) -> Declared:
    """The declaration of an array of elements where a tensor map describes it: dimensions in TMA's order."""
    outer, *middle, last = _argument(name, operator).symbols
    note = ARRAYS.get(name, Note())
    return Declared(TENSOR_MAP, _comment(shown_shape((last, *middle, outer)), note.doc), note.when)


def takes_tensor_map(name: str, operator: Operator) -> bool:
    """Whether a tensor map can describe the array: it has elements of the call."""
    argument = _argument(name, operator)
    return argument is not None and not argument.dtypes


def names(operator: Operator, workspace: Mapping[str, BufferRow]) -> tuple[str, ...]:
    """What a spec may name: arrays, all strides of one, and numbers."""
    arrays = tuple(argument.name for argument in operator.arguments)
    strides = tuple(name + STRIDES for name in arrays if _strides(_argument(name, operator)))
    return (*arrays, *workspace, *strides, *NUMBERS)


def _one(name: str, operator: Operator, workspace: Mapping[str, BufferRow]) -> Declared | None:
    if name in workspace:
        note = ARRAYS.get(name, Note())
        return Declared(POINTERS.get(workspace[name].dtype, ELEMENT), note.doc, note.when)
    argument = _argument(name, operator)
    if argument is not None:
        return _pointer(argument)
    if name in NUMBERS:
        return NUMBERS[name]
    argument = _argument(name.removesuffix(VECTOR_WIDTH), operator)
    if argument is not None:
        note = ARRAYS.get(argument.name, Note())
        return Declared("int32_t", "bytes to which its rows are aligned: 16, 8, 4 or 1", note.when)
    if name.endswith(DIVISOR):
        base = name.removesuffix(DIVISOR)
        number = _one(base, operator, workspace)
        if number is None or number.ctype != "int32_t":
            return None
        return Declared("uint64_t", f"of {base}; see divide()", number.when)
    if name in operator.symbols:
        return Declared("int32_t")
    strides = (of_array for of_array in map(_strides, operator.arguments) if name in of_array)
    return next(strides, {}).get(name)


def _argument(name: str, operator: Operator) -> Argument | None:
    position = operator.positions.get(name)
    return None if position is None else operator.arguments[position]


def _pointer(argument: Argument) -> Declared:
    note = ARRAYS.get(argument.name, Note())
    ctype = POINTERS.get(argument.dtype(""), ELEMENT)
    parts = [shown_shape(argument.symbols)]
    if argument.layout == "rows" and argument.alignment == ROW_ALIGNMENT:
        parts.append("rows 16-byte aligned")
    if argument.optional and not note.required:
        parts.append("may be null")
    parts.append(note.doc)
    return Declared(ctype if argument.is_output else f"const {ctype}", _comment(*parts), note.when)


def _strides(argument: Argument) -> dict[str, Declared]:
    """The strides of an array in the order of the struct: heads come last."""
    ordered = sorted(argument.stride_names(), key=lambda name: name.endswith("_head_stride"))
    doc = (
        "strides are in bytes, 0 where broadcast"
        if argument.layout == "broadcast"
        else "strides are in elements"
    )
    when = ARRAYS.get(argument.name, Note()).when
    return {name: Declared("int64_t", "" if i else doc, when) for i, name in enumerate(ordered)}


def _comment(*parts: str) -> str:
    return "; ".join(filter(None, parts))
