"""A picture of a mask by a line: its blocks, empty, partial or full, as SVG."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashgen.operators.maskblocks import Blocks

# Blocks to a side, by default, and the width of a picture.
_BLOCKS, _WIDTH = 64, 480
_STYLE = """
svg { --page: #ffffff; --text: #1c1e21; --line: #8a939c; --full: #2f7fb5; --partial: #a9d3ea; }
@media (prefers-color-scheme: dark) {
  svg { --page: #16181b; --text: #e4e6e8; --line: #79828b; --full: #5fb0e0; --partial: #2b566e; }
}
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--text); }
.page { fill: var(--page); } .full { fill: var(--full); } .partial { fill: var(--partial); }
.frame { fill: none; stroke: var(--line); }
"""


def draw(blocks: Blocks, title: str, path: str | Path) -> None:
    """Write a picture of the first batch entry and head."""
    Path(path).write_text(_svg(blocks, title), encoding="utf-8")


def block_size(length: int) -> int:
    """Of how many queries or keys the blocks of a picture are by default."""
    return max(1, -(-length // _BLOCKS))


def _svg(blocks: Blocks, title: str) -> str:
    size = _WIDTH / max(blocks.num_key_blocks, blocks.num_row_blocks, 1)
    width, height = size * blocks.num_key_blocks, size * blocks.num_row_blocks
    counts = f"{blocks} (full dark, partial light; queries down, keys to the right)"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + 20} {height + 60:g}" role="img" '
            f'aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{_WIDTH + 20}" height="{height + 60:g}"/>',
            f'<text x="10" y="18">{escape(title)}</text>',
            *rectangles(blocks, 10, 28, size),
            f'<rect class="frame" x="10" y="28" width="{width:g}" height="{height:g}"/>',
            f'<text x="10" y="{height + 48:g}" font-size="10">{escape(counts)}</text>',
            "</svg>",
            "",
        ]
    )


def rectangles(blocks: Blocks, x: float, y: float, size: float) -> Iterator[str]:
    """The runs of the first batch entry and head as rectangles, whose corner is at (x, y)."""
    for i in range(blocks.num_row_blocks):
        for run in blocks.of_row(i):
            kind = "full" if run.is_full else "partial"
            yield (
                f'<rect class="{kind}" x="{x + size * run.begin:g}" y="{y + size * i:g}" '
                f'width="{size * (run.end - run.begin):g}" height="{size:g}"/>'
            )
