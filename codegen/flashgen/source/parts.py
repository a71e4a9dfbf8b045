"""Which of the files below ``templates/lib`` a kernel is made of, where one of several is taken.

A template names such a part by a field of ``parts``:

    //% include "lib/forward_sm80/mma_${ parts.mma }.cuh.j2"

So the choice is made here, once, and not in each template that includes the part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashgen.families.features import CONVERTS_CODES

if TYPE_CHECKING:
    from flashgen.families.variant import Variant

# Headers of some kernels of a family, after the header of the family.
HALF = "flashgen/half.cuh"  # loads and stores of 16 bits, for arrays of a score modification
DROPOUT = "flashgen/dropout.cuh"
STAGED = "flashgen/staged.cuh"  # copies of elements of a score modification to shared memory
SOME_HEADERS = (HALF, DROPOUT, STAGED)

_MMAS = {"fp32": "tf32x3", "e4m3": "fp8"}
_VISITS = {"dense": "dense", "blocks": "listed"}


class Parts(NamedTuple):
    """The parts of a kernel, by what they do."""

    headers: str  # the lines that include the headers
    mma: str  # the MMAs of a dtype: f16, tf32x3 or fp8
    rows: str  # what a row of a tile is: a query, or where heads are packed a pair of query and head
    heads_of_grid: str  # the parameter that counts them: heads of keys where query heads are packed
    derivative: str  # of a backward step: whether scores have a derivative to multiply by
    score_offset: str  # whether a part of a score modification is left to the row: some or none
    elements: str  # how elements of a score modification come: loaded, or staged in shared memory
    loop: str  # of mma.sync's forward kernels
    copy: str  # how they copy K and V: rows, rows of pages, or codes
    lane_address: str  # how a lane's addresses are computed: a sum after the XOR of the swizzle, or none
    epilogue: (
        str  # how they write O: rows of 16 bits, words of 32, or rows of halves or pairs, by the main loop
    )
    query_steps: str  # of backward kernels: by lists, or by the order of dQ and the heads of a step
    visits: str  # which KV blocks Hopper's forward kernels visit: of a range, a list, or a dense mask
    plan: str  # the map and the shared memory of Hopper's forward kernels
    schedule: str  # of Hopper's consumers
    walk: str  # which KV blocks of a tile they visit: all, or those seen by a line
    tiles_from: str  # the row that tiles of a sequence are counted from: the first or the last
    store: str  # how O leaves Hopper's consumers
    release_q: str  # when Hopper's consumers release Q
    key_rows: str  # where keys of calls with lengths are, for Hopper's producers: sequences or pages
    plan_of: str  # the part of the plan that follows from the operands of the MMAs, and from how O is stored
    turns: str  # whether Hopper's consumers take turns at issuing MMAs: taken or none
    score: str  # of Hopper's consumers: q . k, or modified
    finish: str  # what their rows see: all keys, a range of keys, or keys by a dense mask
    pv: str  # their MMAs of codes: the same as `sums`, or whole, where P V follows its softmax at once
    sums: str  # of their P V: added to O by the MMAs, or promoted to fp32 first
    score_scale: str  # of what scores of codes have a scale: none, a tile, rows or keys
    softmax: str  # what softmax multiplies scores by: by_scale, or by_row_scales
    softmax_step: str  # of Hopper's consumers: the same, or with_offset, where rows add a part of the score


def parts_of(form: Variant, has_derivative: bool, has_offset: bool, skips_by_line: bool) -> Parts:
    """The parts of a kernel. ``has_derivative`` is whether scores have a derivative to multiply by,
    ``has_offset`` whether a part of the score modification is left to the row, ``skips_by_line`` whether the
    kernel skips KV blocks that a line hides.
    """
    axes, features = form.axis_values, form.features
    mask_type = axes.get("mask_type")
    packed = axes.get("gqa") == "packed"
    visits = _VISITS.get(str(mask_type), "range")
    # fp32 adds nothing after the XOR. With plain addresses ptxas would write other code for it, which has not
    # been timed.
    with_offset = dict(form.tile).get("loop") in ("halves", "turns") or form.dtype == "fp32"
    sums = "promoted" if "promoted" in features else "added"
    by_tma = "tma_stores" in features
    # Modified scores have the scales of their codes in them.
    softmax = "by_row_scales" if _score_scale(form) == "rows" and form.score is None else "by_scale"
    return Parts(
        headers="\n".join(f'#include "{name}"' for name in (form.header, *some_headers(form))),
        mma=_MMAS.get(form.dtype, "f16"),
        rows="pairs" if packed else "queries",
        heads_of_grid="num_heads_kv" if packed else "num_heads_q",
        derivative="derivative" if has_derivative else "plain",
        score_offset="some" if has_offset else "none",
        elements="staged" if _stages(form) else "loaded",
        loop=_loop(form),
        copy=_copy(form),
        lane_address="with_offset" if with_offset else "plain",
        epilogue=_epilogue(form),
        query_steps="listed" if visits == "listed" else f"{axes.get('dq_order')}_{axes.get('gqa')}",
        visits=visits,
        plan=_plan(form, visits),
        schedule=_schedule(form, visits, skips_by_line),
        walk="seen" if skips_by_line else "all",
        tiles_from="last" if "from_last_row" in features else "first",
        store="by_tma" if by_tma else "from_registers",
        release_q="after_store" if by_tma else "after_qk",
        key_rows=_key_rows(form),
        plan_of=_plan_of(form),
        turns=_turns(form),
        score="modified" if form.score else "plain",
        finish={"none": "none", "dense": "dense"}.get(str(mask_type), "range"),
        pv="whole" if "wide" in features else sums,
        sums=sums,
        score_scale=_score_scale(form),
        softmax=softmax,
        softmax_step="with_offset" if has_offset else softmax,
    )


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
    return f"of_{_plan_of(form)}"


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
    return "e4m3_vt" if form.axis_values.get("v_layout") == "vt" else "e4m3"


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
