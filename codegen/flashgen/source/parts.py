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
    query_steps: str  # of backward kernels: by lists, or by the order of dQ and the heads of a step
    visits: str  # which KV blocks Hopper's forward kernels visit: of a range, a list, or a dense mask
    schedule: str  # of Hopper's consumers
    store: str  # how O leaves Hopper's consumers
    release_q: str  # when Hopper's consumers release Q
    key_rows: str  # where keys of calls with lengths are, for Hopper's producers: sequences or pages
    score_scale: str  # of what Hopper's scores of codes have a scale: none, a tile, rows or keys


def parts_of(form: Variant, has_derivative: bool, has_offset: bool) -> Parts:
    """The parts of a kernel. ``has_derivative`` is whether scores have a derivative to multiply by,
    ``has_offset`` whether a part of the score modification is left to the row.
    """
    axes, features = form.axis_values, form.features
    mask_type = axes.get("mask_type")
    packed = axes.get("gqa") == "packed"
    visits = _VISITS.get(str(mask_type), "range")
    # fp32 adds nothing after the XOR. With plain addresses ptxas would write other code for it, which has not
    # been timed.
    with_offset = dict(form.tile).get("loop") in ("halves", "turns") or form.dtype == "fp32"
    by_tma = "tma_stores" in features
    if visits != "range":
        schedule = visits
    elif "overlapped" in features:
        schedule = "overlapped"
    else:
        schedule = "diagonal" if "from_last_row" in features else "tiles"
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
        query_steps="listed" if visits == "listed" else f"{axes.get('dq_order')}_{axes.get('gqa')}",
        visits=visits,
        schedule=schedule,
        store="by_tma" if by_tma else "from_registers",
        release_q="after_store" if by_tma else "after_qk",
        key_rows="pages" if form.has_lengths and axes.get("pages") == "paged" else "sequences",
        score_scale=_score_scale(form),
    )


def _score_scale(form: Variant) -> str:
    """What Hopper's forward kernels multiply scores of codes by."""
    axes = form.axis_values
    if form.dtype == "e4m3":
        return "rows" if axes.get("gqa") == "packed" else "tile"
    if CONVERTS_CODES in form.features:
        return "keys" if axes.get("kv_scales") == "token" else "tile"
    return "none"


def _loop(form: Variant) -> str:
    """The main loop of mma.sync's forward kernels: of a list, of a dense mask, or the one of the tile."""
    loop = str(dict(form.tile).get("loop"))
    return {"blocks": "listed", "dense": f"{loop}_dense"}.get(str(form.axis_values.get("mask_type")), loop)


def _copy(form: Variant) -> str:
    """How mma.sync's forward kernels copy K and V."""
    axes = form.axis_values
    if axes.get("kv_dtype", "none") == "e4m3" and form.dtype != "e4m3":
        return "codes"
    return "pages" if form.has_lengths and axes.get("pages") == "paged" else "rows"


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
