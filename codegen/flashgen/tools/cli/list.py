"""`flashgen list`: which kernels there are, and with which tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flashgen.families.selection import in_order
from flashgen.families.variant import TUNED_TILE
from flashgen.tools.cli.options import chosen_variants, json_option, score_option, select_option, specs_option

if TYPE_CHECKING:
    from pathlib import Path

    from flashgen.families.variant import Variant


@click.command(
    "list",
    short_help="Which kernels there are.",
    epilog="""
\b
Examples:
  flashgen list
  flashgen list --select 'head_dim=128 dtype=fp16,bf16 mask_type=causal'
  flashgen list --select 'flash_fwd_hdim64_*' --select 'target=sm86 gqa!=mha'
  flashgen list --json | jq '.[] | select(.smem_bytes > 100000).name'
""",
)
@select_option
@specs_option
@score_option
@json_option
def command(selections: tuple[str, ...], specs: Path | None, score: str | None, as_json: bool) -> None:
    """List the variants that the specs describe, with their tiles.

    A variant is one kernel: a point of the spec's axes (head_dim, dtype, mask_type, gqa) with a tile and a
    target, the class of GPUs whose shared memory it fits. Tiles that `flashgen tune` found for this machine's
    GPU are called `tuned`. Nothing is rendered or compiled.

    Kernels of attention() come first, families on request last, default tiles before others.
    """
    from flashgen.host.paths import checkout
    from flashgen.tools.cli.output import counted, note, print_json, print_table

    variants = in_order(chosen_variants(specs, selections, score=score))
    if as_json:
        print_json([variant.as_dict() for variant in variants])
        return
    print_table(*_table(variants))
    committed = sum(variant.committed for variant in variants)
    files = len({variant.spec for variant in variants})
    tuned = sum(variant.tile_name == TUNED_TILE for variant in variants)
    note(
        f"{counted(len(variants), 'variant')} of {counted(files, 'spec')}"
        # An installation has no such folder.
        + (f", {committed} of them in generated/" if checkout() else "")
        + (f", {tuned} tuned on this GPU" if tuned else "")
    )


def _table(variants: tuple[Variant, ...]) -> tuple[list, list[list[str]]]:
    """Columns and rows. Families have tile keys of their own: all but the block's size are in one column."""
    from flashgen.tools.cli.output import Column, kilobytes

    columns = [
        Column("variant"),
        Column("block"),
        Column("threads", number=True, optional=True),
        Column("smem KB", number=True, optional=True),
        Column("tile", wraps=True, optional=True),
        Column("from", optional=True),
    ]
    rows = []
    for variant in variants:
        tile = dict(variant.tile)
        block = [str(tile.pop(key)) for key in ("block_m", "block_n") if key in tile]
        if tile.get("warps") == variant.threads // 32:
            del tile["warps"]  # the threads say it
        rows.append(
            [
                variant.name,
                "x".join(block),
                str(variant.threads),
                kilobytes(variant.smem_bytes),
                " ".join(f"{key}={value}" for key, value in tile.items()),
                variant.min_arch,
            ]
        )
    return columns, rows
