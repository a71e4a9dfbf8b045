"""Charts of a report: lines over sequence length for a sweep, bars for any other grid."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam
from flashgen.tools.bench.cases import short_length
from flashgen.tools.bench.peers.registry import OURS, all_peers
from flashgen.tools.bench.results import figure as figure_of

if TYPE_CHECKING:
    from pathlib import Path

    from flashgen.tools.bench.results import Report, Row

# Tells lines apart in colour and in grey; flashgen takes the first and the thickest.
_STYLES = [
    ("#d1495b", "o"), ("#30638e", "s"), ("#00798c", "^"), ("#edae49", "D"), ("#6a4c93", "v"),
    ("#7f7f7f", "P"), ("#8c564b", "X"), ("#1b998b", "*"), ("#444444", "h"), ("#bcbd22", "<"),
    ("#30638e", ">"), ("#00798c", "p"), ("#edae49", "d"), ("#6a4c93", "H"), ("#9e2a9b", ">"),
    ("#1b998b", "<"), ("#8c564b", "^"), ("#7f7f7f", "v"), ("#6a4c93", "X"), ("#444444", "D"),
    ("#d1495b", "*"), ("#1b998b", "o"), ("#9e2a9b", "s"), ("#9e2a9b", "o"), ("#8c564b", "8"),
]  # fmt: skip


def draw(report: Report, path: Path) -> list[Path]:
    """Write one PNG per dtype and return their paths: ``path`` for the first, ``<stem>-<dtype>`` for the
    others.

    Raises BadParam when nothing was timed or matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadParam("a chart needs matplotlib: pip install matplotlib") from error
    if not report.peers:
        raise BadParam("nothing was timed, so there is nothing to draw")

    written = []
    for dtype in dict.fromkeys(row.case.dtype for row in report.rows):
        rows = [row for row in report.rows if row.case.dtype == dtype]
        target = path if not written else path.with_stem(f"{path.stem}-{dtype}")
        # Beside longer ones, what is too short to be timed but in a graph is no part of a sweep.
        panels = _panels([row for row in rows if row.case.clock == "stream"] or rows)
        figure = _sweep(Figure, report, panels) if panels else _bars(Figure, report, rows)
        environment = report.environment
        heading = f"flashgen bench {report.grid}, {dtype}, {environment.get('gpu') or 'unknown GPU'}"
        figure.suptitle(f"{heading}, {environment.get('date') or ''}".rstrip(", "), fontsize=11)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
        written.append(target)
    return written


def _panels(rows: list[Row]) -> dict[tuple[int, bool], list[Row]]:
    """Rows by (head_dim, causal) where all are sweeps over the length of self-attention, none set against
    another; else nothing."""
    panels: dict[tuple[int, bool], list[Row]] = {}
    for row in sorted(
        rows, key=lambda row: (row.case.mask == "causal", row.case.head_dim, row.case.seqlen_q)
    ):
        panels.setdefault((row.case.head_dim, row.case.mask == "causal"), []).append(row)
    self_attention = all(
        r.case.mask in ("none", "causal") and r.case.seqlen_q == r.case.seqlen_kv and not r.case.baseline
        for r in rows
    )
    swept = all(len({r.case.seqlen_q for r in panel}) == len(panel) > 1 for panel in panels.values())
    return panels if self_attention and swept else {}


def _styles(report: Report) -> dict[str, tuple[str, str]]:
    """Colour and marker by peer, the same in every chart for a known peer."""
    names = dict.fromkeys([*all_peers(), *report.peers])
    return dict(zip(names, itertools.cycle(_STYLES), strict=False))


def _value(report: Report, row: Row, peer: str) -> float:
    """The figure of the report's metric, NaN where there is none."""
    measurement = row.measurements.get(peer)
    if measurement is None or measurement.timing is None:
        return float("nan")
    return figure_of(report.metric, row.case, measurement.timing)


def _sweep(figure_class: type, report: Report, panels: dict[tuple[int, bool], list[Row]]) -> Any:
    """One panel per head_dim (columns) and mask (rows), one line per peer."""
    columns = sorted({head_dim for head_dim, _ in panels})
    masks = sorted({causal for _, causal in panels})
    figure = figure_class(figsize=(3.6 * len(columns) + 0.6, 3.0 * len(masks) + 1.1), layout="constrained")
    axes = figure.subplots(len(masks), len(columns), squeeze=False, sharey="row")
    styles = _styles(report)
    for axis in axes.flat:
        axis.set_visible(False)
    for (head_dim, causal), rows in panels.items():
        axis = axes[masks.index(causal)][columns.index(head_dim)]
        axis.set_visible(True)
        lengths = [row.case.seqlen_q for row in rows]
        for peer in report.peers:
            colour, marker = styles[peer]
            values = [_value(report, row, peer) for row in rows]
            if any(value == value for value in values):
                width = 2.4 if peer == OURS else 1.4
                axis.plot(
                    lengths, values, color=colour, marker=marker, markersize=5, linewidth=width, label=peer
                )
        axis.set_title(f"head_dim {head_dim}, {'causal' if causal else 'full'}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [short_length(length) for length in lengths])
        axis.minorticks_off()
        axis.tick_params(labelleft=True)
        if causal == masks[-1]:
            axis.set_xlabel("sequence length", fontsize=10)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=9)
    for axis in axes[:, 0]:
        # Only now: fixing one end stops the shared axis from growing with the panels beside it.
        axis.set_ylim(bottom=0)
    figure.supylabel(report.metric, fontsize=10)
    labels = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        labels.values(), labels.keys(), loc="outside lower center", ncols=min(5, len(labels)), fontsize=9
    )
    return figure


def _bars(figure_class: type, report: Report, rows: list[Row]) -> Any:
    """Horizontal bars, grouped by case, one per peer that was timed on it."""
    counts = [
        sum(_value(report, row, peer) == _value(report, row, peer) for peer in report.peers) for row in rows
    ]
    figure = figure_class(figsize=(8.0, 1.4 + 0.24 * sum(counts) + 0.22 * len(rows)), layout="constrained")
    axis = figure.subplots()
    styles = _styles(report)
    position, ticks = 0.0, []
    labelled: set[str] = set()
    for row, count in zip(rows, counts, strict=True):
        ticks.append(position + (count - 1) / 2)
        for peer in report.peers:
            value = _value(report, row, peer)
            if value != value:
                continue
            axis.barh(
                position, value, color=styles[peer][0], height=0.9, label=None if peer in labelled else peer
            )
            axis.annotate(f" {value:.3g}", (value, position), va="center", fontsize=7)
            labelled.add(peer)
            position += 1
        position += 0.9
    axis.set_yticks(ticks, [row.case.name for row in rows], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel(report.metric)
    axis.margins(x=0.08, y=0.01)
    axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=min(5, len(labelled)), fontsize=9)
    return figure
