"""Which parts of the files below ``templates/lib`` a kernel is made of, where one of several is taken.

A file has the forms of one purpose, each after a line ``//: name``. A template names the part that it takes
by a field of ``parts``:

    //% include "lib/forward_sm80/mma.cuh.j2:${ parts.mma }"

So the choice is made here, once, and not in each template that includes the part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashgen.families.features import CONVERTS_CODES, TILED_V

if TYPE_CHECKING:
    from flashgen.families.variant import Variant

# Headers of some kernels of a family, after the header of the family.
HALF = "flashgen/half.cuh"  # loads and stores of 16 bits, for arrays of a score modification
DROPOUT = "flashgen/dropout.cuh"
STAGED = "flashgen/staged.cuh"  # copies of elements of a score modification to shared memory
SOME_HEADERS = (HALF, DROPOUT, STAGED)

_MMAS = {"fp32": "tf32x3", "e4m3": "fp8"}
# By whether thread blocks take turns to add dQ, and whether a mask is dense.
_BARRIERS = {
    (False, False): "plain",
    (True, False): "turns",
    (False, True): "mask",
    (True, True): "turns_and_mask",
}
_VISITS = {"dense": "dense", "blocks": "listed"}


class Parts(NamedTuple):
    """The parts of a kernel, by what they do."""

    headers: str  # the lines that include the headers
    mma: str  # the MMAs of a dtype: f16, tf32x3 or fp8
    rows: str  # what a row of a tile is: a query, or where heads are packed a pair of query and head
    heads_of_grid: str  # the parameter that counts them: heads of keys where query heads are packed
    score_offset: str  # whether a part of a score modification is left to the row: some or none
    elements: str  # how elements of a score modification come: loaded, or staged in shared memory
    key_rows: str  # where the keys of calls with lengths are: sequences or pages
    visits: str  # which KV blocks a kernel visits: of a range, a list, or a dense mask

    # Of mma.sync's forward kernels.
    loop: str
    copy: str  # how they copy K and V: rows, rows of pages, or codes
    lane_address: str  # how a lane's addresses are computed: a sum after the XOR of the swizzle, or none

    epilogue: str  # how they write O: rows of 16 bits, words of 32, or by the main loop, halves or pairs

    # Of Hopper's forward kernels.
    plan: str  # the map and the shared memory
    plan_of: str  # the part of the plan that follows from the operands of the MMAs, and from how O is stored
    schedule: str  # of consumers
    walk: str  # which KV blocks of a tile they visit: all, or those seen by a line
    tiles_from: str  # the row that tiles of a sequence are counted from: the first or the last
    store: str  # how O leaves consumers
    release_q: str  # when they release Q
    turns: str  # whether they take turns at issuing MMAs: taken or none
    score: str  # q . k, or modified
    finish: str  # what rows see: all keys, a range of keys, or keys by a dense mask
    pv: str  # MMAs of codes: the same as `sums`, or whole, where P V follows its softmax at once
    sums: str  # of P V: added to O by the MMAs, or promoted to fp32 first
    order: str  # of the keys and columns of V^T of codes: as P is in registers, e4m3, or as in v, e4m3_vt
    score_scale: str  # of what scores of codes have a scale: none, a tile, rows or keys
    softmax: str  # what softmax multiplies scores by: by_scale, or by_row_scales
    softmax_step: str  # the same, or with_offset, where rows add a part of the score

    # Of split KV.
    pieces: str  # what the tiles of a sequence are cut into: splits or blocks; batch if all tiles are alike
    shares: str  # what a thread block has a share of: splits or blocks
    fetch: str  # where its keys come from: a batch, sequences or pages, and the scales of these
    sequences: str  # which KV blocks of sequences it fetches: all, or by a line the ones that rows may see
    cluster: str  # the same for the thread blocks of a cluster

    # Of backward kernels.
    derivative: str  # whether dP - delta has the derivative of scores as a factor: derivative or plain
    modification: str  # how a step modifies scores; none if it does not
    query_steps: str  # the steps of a block of keys: by lists, or by the order of dQ and the heads of a step
    steps_from: str  # how consumers on Hopper know a step: by the order of steps, or from the producer
    step_heads: str  # how a step names its query head: mha, gqa_sm80 or gqa_sm90
    cleared: str  # when dq_accum is cleared: ahead, by thread blocks of the main kernel, or before it
    queries: str  # how the queries of a key are found on Hopper
    masking: str  # the mask type whose apply_mask() a kernel has
    mask_bounds: str  # how a consumer on Hopper knows what to mask: by words, held bounds, a range, a start
    turn_threads: str  # how many threads on Hopper keep turns to add dQ: none, one or two
    turn_counters: str  # how many counters of turns a block of queries has: none, one or two
    barriers: str  # mbarriers besides the loads' own, on Hopper: plain, turns, mask or turns_and_mask
    gradient_rows: str  # whose dK and dV a thread block computes: of a batch, of groups, of sequences
    stored_rows: str  # which it writes: these, the rows of entries of a cache, or fp32 sums
    head_of_block: str  # the member of a block of keys that is its head, or its part of a group

    codes: str  # whose scale the codes have that append writes: of a token, a sequence, or a fp8dsmla row


def parts_of(form: Variant, has_derivative: bool, has_offset: bool) -> Parts:
    """The parts of a kernel. ``has_derivative`` is whether scores have a derivative to multiply by,
    ``has_offset`` whether a part of the score modification is left to the row.
    """
    axes, features = form.axis_values, form.features
    mask_type = axes.get("mask_type")
    packed = axes.get("gqa") == "packed"
    scored = form.score is not None
    dense = mask_type == "dense"
    ordered = axes.get("dq_order") == "ordered"
    # With a score modification queries past the last are masked as well, as a window masks them.
    to_last = scored and mask_type in ("none", "causal")
    visits = _VISITS.get(str(mask_type), "range")
    # fp32 adds nothing after the XOR. With plain addresses ptxas would write other code for it, which has not
    # been timed.
    with_offset = dict(form.tile).get("loop") in ("halves", "turns") or form.dtype == "fp32"
    if form.has_lengths:
        gradient_rows = "sequences"
    else:
        gradient_rows = "groups" if axes.get("gqa") == "gqa" else "batch"
    family = "sm90" if form.target == "sm90" else "sm80"
    shares = "splits" if "fixed_splits" in features else "blocks"
    skips = skips_by_line(form)
    by_line = "_by_line" if skips else ""
    key_rows = _key_rows(form)
    sums = "promoted" if "promoted" in features else "added"
    by_tma = "tma_stores" in features
    # Modified scores have the scales of their codes in them.
    softmax = "by_row_scales" if _score_scale(form) == "rows" and form.score is None else "by_scale"
    return Parts(
        headers="\n".join(f'#include "{name}"' for name in (form.header, *some_headers(form))),
        mma=_MMAS.get(form.dtype, "f16"),
        rows="pairs" if packed else "queries",
        heads_of_grid="num_heads_kv" if packed else "num_heads_q",
        derivative="derivative" if has_derivative and not _has_two_roles(form) else "plain",
        score_offset="some" if has_offset else "none",
        elements="staged" if _stages(form) else "loaded",
        loop=_loop(form),
        copy=_copy(form),
        lane_address="with_offset" if with_offset else "plain",
        epilogue=_epilogue(form),
        modification=_modification(form, has_derivative),
        steps_from="producer" if visits == "listed" else "order",
        step_heads="mha" if axes.get("gqa") == "mha" else f"gqa_{family}",
        cleared="ahead" if "clears_ahead" in features else "before",
        queries=f"{mask_type}_to_last" if to_last else str(mask_type),
        masking="local" if to_last else str(mask_type),
        mask_bounds=_mask_bounds(form),
        turn_threads=("one" if dense else "two") if ordered else "none",
        turn_counters=("two" if _clusters(form) else "one") if ordered else "none",
        gradient_rows=gradient_rows,
        stored_rows=_stored_rows(form, gradient_rows),
        head_of_block="group_part" if gradient_rows == "groups" else "kv_head",
        barriers=_BARRIERS[ordered, dense],
        query_steps="listed" if visits == "listed" else f"{axes.get('dq_order')}_{axes.get('gqa')}",
        visits=visits,
        plan=_plan(form, visits),
        plan_of=_plan_of(form),
        schedule=_schedule(form, visits, skips),
        walk="seen" if skips else "all",
        tiles_from="last" if "from_last_row" in features else "first",
        store="by_tma" if by_tma else "from_registers",
        release_q="after_store" if by_tma else "after_qk",
        codes=_codes(form),
        pieces=shares if form.has_lengths else "batch",
        shares=shares,
        fetch=_fetch(form, key_rows, by_line),
        sequences=f"sequences{by_line}",
        cluster=f"cluster{by_line}",
        key_rows=key_rows,
        turns=_turns(form),
        score="modified" if form.score else "plain",
        finish={"none": "none", "dense": "dense"}.get(str(mask_type), "range"),
        pv="whole" if "wide" in features else sums,
        sums=sums,
        order="e4m3" if TILED_V in features else _plan_of(form),
        score_scale=_score_scale(form),
        softmax=softmax,
        softmax_step="with_offset" if has_offset else softmax,
    )


def _has_two_roles(form: Variant) -> bool:
    """Whether one consumer of a backward kernel has S and another dP: head dims above 128 on Hopper."""
    return "dq" in dict(form.tile)


def _clusters(form: Variant) -> bool:
    """Whether thread blocks of the main backward kernel form clusters, whose halves of dQ have turns each."""
    return form.target == "sm90" and dict(form.tile).get("cluster") == 2


def _modification(form: Variant, has_derivative: bool) -> str:
    """How a backward step modifies scores. With two roles the one that has S hands over P times the
    derivative; else the derivative goes into dP at once, for want of registers.
    """
    if form.score is None:
        return "none"
    elements = "staged" if _stages(form) else "loaded"
    if not has_derivative:
        return elements
    return f"{elements}_weights" if _has_two_roles(form) else f"{elements}_derivative"


def _mask_bounds(form: Variant) -> str:
    """By what a backward step on Hopper knows which blocks of queries it masks."""
    mask_type = form.axis_values.get("mask_type")
    if mask_type == "dense":
        return "words"
    if form.score is not None:
        return "range"
    if dict(form.tile).get("mask_bounds") == "held":
        return "held"
    return "range" if mask_type in ("local", "tree", "blocks") else "start"


def _stored_rows(form: Variant, gradient_rows: str) -> str:
    """Which rows of dK and dV a thread block of the main backward kernel writes."""
    axes = form.axis_values
    if axes.get("dkv_dtype") == "fp32dkv":
        return "sums"
    return "entries" if axes.get("kv_starts") == "starts" else gradient_rows


def _codes(form: Variant) -> str:
    """As what append writes elements into a cache: none if it has elements."""
    axes = form.axis_values
    if axes.get("kv_dtype", "none") == "none":
        return "none"
    if axes.get("kv_scales") == "token":
        return "token"
    return "fp8dsmla" if axes.get("kv_dtype") == "fp8dsmla" else "sequence"


def _fetch(form: Variant, key_rows: str, by_line: str) -> str:
    """From where decoding fetches keys across the tiles of a share."""
    if not form.has_lengths:
        return "batch"
    if form.axis_values.get("kv_scales") == "token":
        return f"{key_rows}_and_scales"
    return key_rows if key_rows == "pages" else f"{key_rows}{by_line}"


def skips_by_line(form: Variant) -> bool:
    """Whether a kernel with lengths has verdicts of KV blocks by the line of a mask: if rows of a tile are of
    one query head, or the line is the same for all.
    """
    if form.rule is None or not form.has_lengths:
        return False
    return form.axis_values.get("gqa") != "packed" or "h" not in form.rule.tree.reads()


def _score_scale(form: Variant) -> str:
    """What forward kernels multiply scores of codes by."""
    axes = form.axis_values
    if form.dtype == "e4m3":
        return "rows" if axes.get("gqa") == "packed" else "tile"
    if CONVERTS_CODES in form.features:
        return "keys" if axes.get("kv_scales") == "token" else "tile"
    return "none"


def _key_rows(form: Variant) -> str:
    paged = form.has_lengths and form.axis_values.get("pages") == "paged"
    return "pages" if paged else "sequences"


def _plan(form: Variant, visits: str) -> str:
    """The map and the shared memory of Hopper's forward kernels: by the roles of their warps, and by what
    these pass on to each other.
    """
    codes = form.dtype == "e4m3"
    if "by_sequence" in form.features:
        if CONVERTS_CODES in form.features:
            return "codes"
        return f"e4m3_{_key_rows(form)}" if codes else _key_rows(form)
    if visits == "dense":
        return "e4m3_dense" if codes else "dense"
    return "plain"


def _schedule(form: Variant, visits: str, skips_by_line: bool) -> str:
    """The order of work of Hopper's consumers: what they visit, and which MMAs run beside a softmax."""
    features = form.features
    diagonal = "from_last_row" in features
    if visits != "range":
        return visits
    if "wide" in features:
        return "wide"
    if "shares" in features:
        return "shares"
    if "by_sequence" in features:
        mask = "causal" if form.axis_values.get("mask_type") == "causal" else "local"
        return f"sequences_{mask}" if diagonal and not skips_by_line else "sequences"
    if "overlapped" in features:
        return "overlapped"
    return "diagonal" if diagonal else "tiles"


def _plan_of(form: Variant) -> str:
    """The part of the plan that all kernels have: of elements of 16 bits, with O stored by TMA or not, or of
    codes, with V in rows or transposed.
    """
    if form.dtype != "e4m3":
        return "f16_by_tma" if "tma_stores" in form.features else "f16"
    transposed = TILED_V in form.features or form.axis_values.get("v_layout") == "vt"
    return "e4m3_vt" if transposed else "e4m3"


def _turns(form: Variant) -> str:
    """Whether Hopper's consumers, several warpgroups, take turns at issuing MMAs."""
    several = int(dict(form.tile).get("block_m", 0)) > 64
    return "taken" if several and "without_turns" not in form.features else "none"


def _loop(form: Variant) -> str:
    """The main loop of mma.sync's forward kernels: of a list, of a dense mask, or the one of the tile."""
    loop = str(dict(form.tile).get("loop"))
    return {"blocks": "listed", "dense": f"{loop}_dense"}.get(str(form.axis_values.get("mask_type")), loop)


def _epilogue(form: Variant) -> str:
    """How mma.sync's forward kernels write O."""
    loop = str(dict(form.tile).get("loop"))
    if loop in ("halves", "pairs"):
        return loop
    return "words" if form.dtype == "fp32" else "rows"


def _copy(form: Variant) -> str:
    """How mma.sync's forward kernels copy K and V."""
    axes = form.axis_values
    if axes.get("kv_dtype", "none") == "e4m3" and form.dtype != "e4m3":
        return "codes"
    return "pages" if form.has_lengths and axes.get("pages") == "paged" else "rows"


def pv_columns(form: Variant) -> int:
    """The columns of O that an MMA of Hopper's forward kernels has."""
    if "wide" in form.features:
        return 64  # two such pieces are in registers
    # If a warpgroup converts codes, ptxas takes no wgmma of 256 columns: with 512 threads it counts on 128
    # registers.
    dims = int(form.axis_values.get("head_dim_v", 0))
    return 128 if dims == 256 and CONVERTS_CODES in form.features else dims


def some_headers(form: Variant) -> tuple[str, ...]:
    """The headers that a kernel includes after the header of its family."""
    score = form.score
    takes = {
        HALF: score is not None and score.reads_half,
        DROPOUT: form.axis_values.get("dropout") == "dropout",
        STAGED: _stages(form),
    }
    return tuple(name for name in SOME_HEADERS if takes[name])


def _stages(form: Variant) -> bool:
    """Whether the kernel copies elements of a score modification to shared memory."""
    return form.staged is not None
