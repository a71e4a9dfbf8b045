"""The sizes of a call of ``append``, and the checks of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.errors import (
    BadTensorShape,
    arg,
)
from flashgen.operators import kvcodes
from flashgen.operators.arguments import (
    DTYPE_BYTES,
    ROW_ALIGNMENT,
    Argument,
    shown_shape,
)
from flashgen.operators.contract import MAX_SEQLEN, check_head_dim
from flashgen.operators.latent import check_widths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.arguments import ArrayView


ROTARY_STEP = 16  # what rotary_dim is a multiple of


def sizes_of(arguments: Sequence[Argument], views: Mapping[str, ArrayView | None]) -> dict[str, int]:
    """The size of each symbol; each array has the rank of its argument, without batch where tokens are
    packed.
    """
    boundaries = views["cu_seqlens_new"]
    packed = boundaries is not None
    for argument in arguments:
        view, symbols = views[argument.name], symbols_of(argument, packed)
        if (
            view is not None
            and len(view.shape) != len(symbols)
            and argument.name not in (*kvcodes.SCALES, *kvcodes.SCALES_OUT)
        ):
            hint = ""
            if len(view.shape) == 3 and len(symbols) == 4 and not packed and symbols[0] == "batch":
                hint = f"; packed tokens need {arg('cu_seqlens_new')}"
                if view.shape[:1] == views["lengths"].shape:
                    hint += f", and one token of each sequence goes in as {arg(argument.name)}[:, None]"
            elif packed and argument.leads_with_batch:
                hint = f"; {arg('cu_seqlens_new')} was given, so tokens are packed, without batch"
            raise BadTensorShape(
                f"{arg(argument.name)} has shape {view.shape}; expected {shown_shape(symbols)}{hint}"
            )
    if packed and boundaries.shape == (0,):
        raise BadTensorShape(
            f"{arg('cu_seqlens_new')} has shape (0,); expected one element more than sequences"
        )
    seqlen_new, heads, head_dim = views["k_new"].shape[-3:]
    batch = 1 if packed else views["k_new"].shape[0]
    sequences = boundaries.shape[0] - 1 if packed else batch
    if views["lengths"].shape[0] != sequences:
        new = "cu_seqlens_new" if packed else "k_new"
        raise BadTensorShape(
            f"{arg('lengths')} has shape {views['lengths'].shape} but {arg(new)} is for {sequences} sequences"
        )
    head_dim_v = 0 if views["v_new"] is None else views["v_new"].shape[-1]
    num_pages, page_size = views["k_cache"].shape[:2]
    for new, cache in (("k_new", "k_cache"), ("v_new", "v_cache")):
        if views[new] is not None and views[new].shape[-2:] != views[cache].shape[-2:]:
            raise BadTensorShape(
                f"{arg(new)} has {views[new].shape[-2]} heads of {views[new].shape[-1]} elements but "
                f"{arg(cache)} has {views[cache].shape[-2]} of {views[cache].shape[-1]}; they must be the "
                "same"
            )
    q, pages, cos, positions = (views[name] for name in ("q", "pages", "cos", "positions"))
    sizes = {
        "batch": batch,
        "sequences": sequences,
        "boundaries": sequences + 1,
        "seqlen_new": seqlen_new,
        "seqlen_q": 0 if q is None else q.shape[-3],
        "num_heads_q": 0 if q is None else q.shape[-2],
        "num_heads_kv": heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "num_pages": num_pages,
        "page_size": page_size,
        "max_pages": 1 if pages is None else pages.shape[1],
        "num_positions": 0 if cos is None else cos.shape[0],
        "rotary_half": 0 if cos is None else cos.shape[1],
    }
    if q is not None and (positions is not None or packed) and sizes["seqlen_q"] != seqlen_new:
        why = f"{arg('cu_seqlens_new')} counts" if packed else f"{arg('positions')} place"
        raise BadTensorShape(
            f"{arg('q')} has {sizes['seqlen_q']} tokens but {arg('k_new')} has {seqlen_new}; {why} the "
            "tokens of both, so their numbers must be equal"
        )
    if pages is None and views["index"] is None and num_pages < sequences:
        raise BadTensorShape(
            f"{arg('k_cache')} has {num_pages} rows, fewer than the {sequences} sequences; pass a larger "
            f"cache, or {arg('index')} or {arg('pages')} to say where each sequence is"
        )
    return sizes


def symbols_of(argument: Argument, packed: bool) -> tuple[str, ...]:
    """The symbols of an argument's dimensions as the caller has them."""
    return argument.symbols[1:] if packed and argument.symbols[0] == "batch" else argument.symbols


def check_sizes(sizes: Mapping[str, int], dtype: str, *, tables: bool, of_latent: int | None) -> None:
    """Limits of the sizes themselves. ``of_latent`` is head_dim_v of a latent cache, else None."""
    if of_latent is None:
        for name in ("head_dim", "head_dim_v"):
            check_head_dim(name, sizes[name], dtype)
    else:
        _check_latent(sizes, of_latent, dtype)
    if sizes["num_heads_kv"] < 1:
        raise BadTensorShape(f"{arg('k_new')} has no heads; it needs one at least")
    capacity = sizes["max_pages"] * sizes["page_size"]
    for name, length in (("k_new", sizes["seqlen_new"]), ("q", sizes["seqlen_q"]), ("k_cache", capacity)):
        if length > MAX_SEQLEN:
            raise BadTensorShape(
                f"{arg(name)} has sequence length {length}; the longest supported is {MAX_SEQLEN}"
            )
    rotary_dim = 2 * sizes["rotary_half"]
    if tables and (rotary_dim % ROTARY_STEP or not ROTARY_STEP <= rotary_dim <= sizes["head_dim"]):
        raise BadTensorShape(
            f"{arg('cos')} has {sizes['rotary_half']} columns, for a rotary_dim of {rotary_dim}; it must be "
            f"a multiple of {ROTARY_STEP} up to head_dim, {sizes['head_dim']}"
        )


def _check_latent(sizes: Mapping[str, int], head_dim_v: int, dtype: str) -> None:
    """Limits of a latent cache, whose values are the first ``head_dim_v`` elements of its rows."""
    check_widths(sizes["head_dim"], head_dim_v, ROW_ALIGNMENT // DTYPE_BYTES[dtype])
    if sizes["num_heads_kv"] != 1:
        raise BadTensorShape(f"{arg('k_new')} has {sizes['num_heads_kv']} heads; a latent cache has one")
    rest = sizes["head_dim"] - head_dim_v
    if 2 * sizes["rotary_half"] > rest:
        raise BadTensorShape(
            f"{arg('cos')} has {sizes['rotary_half']} columns, for a rotary_dim of "
            f"{2 * sizes['rotary_half']}; {rest} elements of a row of the latent cache are not of its value, "
            "and only these may be rotated"
        )


def check_room(sizes: Mapping[str, int], *, paged: bool) -> None:
    """That there is room for the new tokens of a sequence that has none yet."""
    seqlen_new, page_size = sizes["seqlen_new"], sizes["page_size"]
    if seqlen_new > sizes["max_pages"] * page_size:
        room = f"pages has room for {sizes['max_pages']} pages of" if paged else "k_cache has room for"
        raise BadTensorShape(
            f"{arg('k_new')} has {seqlen_new} tokens of a sequence but {room} {page_size}; pass fewer, or a "
            "larger cache"
        )


def check_table(sizes: Mapping[str, int], q_positions: str) -> None:
    """That the tables have the positions of a sequence that has no tokens yet."""
    for name, count in (
        ("k_new", sizes["seqlen_new"]),
        ("q", sizes["seqlen_q"] if q_positions == "each" else 0),
    ):
        if sizes["num_positions"] < count:
            raise BadTensorShape(
                f"{arg('cos')} has {sizes['num_positions']} rows but {arg(name)} has {count} tokens of a "
                "sequence; the tables need a row for each position"
            )
