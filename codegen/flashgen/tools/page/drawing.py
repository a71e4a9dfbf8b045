"""Shared memory drawn to scale, as SVG."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.source.sharedmemory import Region

WIDTH = 340
_HEIGHT = 300  # of all bytes
_BAR, _BAR_WIDTH = 8, 110  # left edge and width
_LINE = 17  # from the text of a region to the next one, at least
_TOP = 14
_COLOURS = 6


def shared_memory(regions: Sequence[Region]) -> str:
    """An SVG element. Its classes are `bar0` to `bar5`, `edge`, `leader` and `label`; a page has the colours.

    A region's height is its share of the bytes, and its buffers are divided by lines. Texts of small regions
    are moved down, and a line leads to them.
    """
    total = regions[-1].end
    parts: list[str] = []
    low = _TOP - _LINE
    for number, region in enumerate(regions):
        top, height = (_TOP + edge * _HEIGHT / total for edge in (region.begin, region.size))
        height -= _TOP
        colour = f"bar{number % _COLOURS}"
        if region.name == "alignment":
            colour = "edge"
        parts.append(
            f'<rect class="{colour}" x="{_BAR}" y="{top:.1f}" width="{_BAR_WIDTH}" height="{height:.1f}">'
            f"<title>{escape(_described(region))}</title></rect>"
        )
        for buffer in range(1, region.buffers):
            y = top + buffer * height / region.buffers
            parts.append(
                f'<line class="edge" x1="{_BAR}" x2="{_BAR + _BAR_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
        middle = top + height / 2
        low = max(middle, low + _LINE)
        right = _BAR + _BAR_WIDTH
        parts.append(
            f'<polyline class="leader" points="{right},{middle:.1f} {right + 10},{low:.1f} '
            f'{right + 16},{low:.1f}"/>'
        )
        parts.append(
            f'<text class="label" x="{right + 20}" y="{low + 4:.1f}">{escape(_described(region))}</text>'
        )
    height = max(_TOP + _HEIGHT, low + _LINE / 2) + 6
    return (
        f'<svg class="memory" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" '
        f'role="img" aria-label="shared memory, to scale">{"".join(parts)}</svg>'
    )


def _described(region: Region) -> str:
    buffers = f"{region.buffers} × {region.size // region.buffers:,}" if region.buffers > 1 else ""
    return f"{region.name}: {buffers or f'{region.size:,}'} bytes"
