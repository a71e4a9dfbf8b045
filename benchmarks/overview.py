"""Draw benchmarks/results/overview.svg, the chart at the top of the README, from the JSON of the last runs.

    python benchmarks/overview.py            after a run with --save benchmarks/results/...
    python benchmarks/overview.py --check    change nothing; exit code 1 if the chart is out of date

Three panels of bars: the forward pass, the backward pass, and decoding. Needs no GPU and no matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

from flashgen.tools.bench.peers.registry import OURS
from flashgen.tools.bench.results import Report, Row, figure

RESULTS = Path(__file__).resolve().parent / "results"
CHART = "overview.svg"


class Panel(NamedTuple):
    """One grid's bars: the label of each group, and the case that it shows.

    A bar shows the figure of the grid's metric divided by ``unit``, with ``digits`` after the point.
    """

    title: str
    subtitle: str
    grid: str
    groups: dict[str, str]
    unit: float = 1.0
    digits: int = 0


PANELS = (
    Panel(
        "Forward, TFLOP/s",
        "head_dim 128, causal, by sequence length",
        "prefill",
        {"1k": "bf16 d128 causal 1k", "4k": "bf16 d128 causal 4k", "16k": "bf16 d128 causal 16k"},
    ),
    Panel(
        "Backward, TFLOP/s",
        "head_dim 128, causal, by sequence length",
        "backward",
        {"1k": "bf16 d128 causal 1k", "4k": "bf16 d128 causal 4k", "16k": "bf16 d128 causal 16k"},
    ),
    Panel(
        "Decoding, TB/s of K and V",
        "head_dim 128, 32 heads on 8, by batch × keys",
        "decode",
        {"1 × 4k": "1 × 4k, 32/8, d128", "8 × 8k": "8 × 8k, 32/8, d128", "64 × 32k": "64 × 32k, 32/8, d128"},
        unit=1000.0,
        digits=2,
    ),
)
# The peers of the chart, by their names in the JSON: a name to show, a colour.
PEERS = {
    OURS: ("flashgen", "#d1495b"),
    "flash-attn-4": ("FlashAttention-4", "#8c564b"),
    "torch-cudnn": ("cuDNN", "#30638e"),
    "torch-flash": ("FlashAttention-2", "#edae49"),
}

WIDTH, HEIGHT = 960, 330
_LEFT, _PANEL, _GAP = 16, 296, 20  # pixels: the margin, the width of a panel, the space between two
_TOP, _BOTTOM = 104, 262  # of the bars
_PAGE, _TEXT, _FAINT = "#ffffff", "#222222", "#555555"
# What these colours are on a dark screen.
_DARK = (
    "@media (prefers-color-scheme: dark) {"
    + "".join(
        f' [fill="{light}"] {{ fill: {dark}; }}'
        for light, dark in ((_PAGE, "#16181b"), (_TEXT, "#e4e6e8"), (_FAINT, "#9aa3ab"))
    )
    + " }"
)
_BAR, _SPACE = 20, 10  # the width of a bar, and half of the space between two groups


def svg(results: Path) -> str:
    """The chart of the JSON files in ``results``."""
    reports = {panel.grid: Report.load(results / f"{panel.grid}.json") for panel in PANELS}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="system-ui, sans-serif" font-size="12">',
        "<title>flashgen beside other libraries: forward, backward, decoding</title>",
        f"<style>{_DARK}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{_PAGE}"/>',
    ]
    x = _LEFT
    for label, colour in PEERS.values():
        lines.append(f'<rect x="{x}" y="16" width="14" height="14" fill="{colour}"/>')
        lines.append(_text(x + 20, 28, label))
        x += 56 + 7 * len(label)
    for number, panel in enumerate(PANELS):
        lines += _panel(panel, reports[panel.grid], _LEFT + number * (_PANEL + _GAP))
    runs = ", ".join(
        f"{panel.title.split(',')[0].lower()} {str(reports[panel.grid].environment['date']).split()[0]}"
        for panel in PANELS
    )
    gpu = reports[PANELS[0].grid].environment["gpu"]
    lines.append(_text(_LEFT, HEIGHT - 12, f"bf16, {gpu}. Taller is faster. Runs: {runs}", colour=_FAINT))
    return "\n".join([*lines, "</svg>\n"])


def _panel(panel: Panel, report: Report, left: int) -> list[str]:
    rows = {row.case.name: row for row in report.rows}
    groups = {label: _values(report, rows[case]) for label, case in panel.groups.items()}
    highest = max(value for values in groups.values() for value in values.values())
    lines = [
        _text(left, 62, panel.title, weight="bold", size=14),
        _text(left, 80, panel.subtitle, colour=_FAINT),
        f'<line x1="{left}" y1="{_BOTTOM}" x2="{left + _PANEL}" y2="{_BOTTOM}" stroke="#999999"/>',
    ]
    x = float(left)
    for label, values in groups.items():
        width = len(PEERS) * _BAR
        lines.append(_text(x + _SPACE + width / 2, _BOTTOM + 18, label, anchor="middle"))
        for place, (peer, value) in enumerate(values.items()):
            height = round((_BOTTOM - _TOP) * value / highest, 1)
            at = x + _SPACE + place * _BAR + (len(PEERS) - len(values)) * _BAR / 2
            top = round(_BOTTOM - height, 1)
            shown = f"{value / panel.unit:.{panel.digits}f}"
            lines.append(
                f'<rect x="{at:g}" y="{top:g}" width="{_BAR - 3}" height="{height:g}" '
                f'fill="{PEERS[peer][1]}"><title>{PEERS[peer][0]}: {shown}</title></rect>'
            )
            lines.append(_text(at + (_BAR - 3) / 2, top - 4, shown, anchor="middle", size=9))
        x += width + 2 * _SPACE
    return lines


def _values(report: Report, row: Row) -> dict[str, float]:
    """The figure of each peer of the chart that was timed on a case."""
    timings = {peer: row.measurements[peer].timing for peer in PEERS if peer in row.measurements}
    return {peer: figure(report.metric, row.case, timing) for peer, timing in timings.items() if timing}


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = _TEXT,
    weight: str = "normal",
    size: int = 12,
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" '
        f'font-weight="{weight}" font-size="{size}">{escape(text)}</text>'
    )


def main(arguments: list[str] | None = None) -> int:
    """Write the chart, or with ``--check`` say whether it is what the results say; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 on a difference")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the JSON and the chart")
    options = parser.parse_args(arguments)
    path, chart = options.results / CHART, svg(options.results)
    if not options.check:
        path.write_text(chart, encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == chart:
        return 0
    print(f"{CHART} is not what the results say; run {Path(__file__).name}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
