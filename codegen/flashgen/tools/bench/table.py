"""The tables of a report, for a terminal or a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from flashgen.tools.bench.peers.registry import OURS
from flashgen.tools.bench.results import figure
from flashgen.tools.bench.roofline import roofline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import Console

    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.results import Report, Row
    from flashgen.tools.bench.timing import Timing

_WIDEST = 1000


def tables(report: Report) -> Iterator[Table]:
    """The cases, then the summary where there are peers, and the losses where cases have a limit."""
    yield cases_table(report)
    if report.summaries():
        yield summary_table(report)
    if report.losses():
        yield losses_table(report)


def print_tables(report: Report, console: Console) -> None:
    """Print the tables, with no figure cut off: where the console is narrower than a table, a line holds one
    figure of a row.
    """
    for table in tables(report):
        table.width = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
        if table.width <= console.width:
            console.print(table)
        else:
            console.print("\n".join(_one_figure_a_line(table)), markup=False, soft_wrap=True)


def _one_figure_a_line(table: Table) -> Iterator[str]:
    """The text of a table. Under the first cell of a row are its other cells, each with its header."""
    yield str(table.title)
    headers = [str(column.header) for column in table.columns[1:]]
    for first, *cells in zip(*(column.cells for column in table.columns), strict=True):
        yield str(first)
        for header, cell in zip(headers, cells, strict=True):
            yield f"  {header:<{max(map(len, headers))}}  {cell}"
    if table.caption:
        yield str(table.caption)
    yield ""


def cases_table(report: Report) -> Table:
    """One line per case: flashgen's figure with its spread, then each peer's with flashgen's ratio to it."""
    environment = report.environment
    with_baselines = any(row.case.baseline for row in report.rows)
    with_limits = any(roofline(row.case, environment) for row in report.rows)
    columns: dict[str, Callable[[Row], str]] = {f"{OURS} ± IQR": lambda row: cell(report, row, OURS)}
    if with_baselines:
        columns["of its baseline"] = lambda row: _baseline(report, row)
    if with_limits:
        columns["of the limit"] = lambda row: of_limit(report, row)
    for name in report.peers:
        if name != OURS:
            columns[f"{name} (ratio)"] = lambda row, name=name: cell(report, row, name)
    if report.best_of:
        columns[report.best_of] = _best
    title = f"{report.grid}: {report.metric} on {environment.get('gpu') or 'an unknown GPU'}"
    table = _table(title, ("case",), columns)
    for row in report.rows:
        table.add_row(row.case.name, *(text_of(row) for text_of in columns.values()))
    table.caption = "ratio: flashgen's speed over the peer's; ≠: disagrees, so no ratio; –: does not apply"
    if with_limits:
        table.caption += (
            "; of the limit: the share of what the GPU's highest clock and memory rate allow, and which"
        )
    return table


def summary_table(report: Report) -> Table:
    """Geometric mean and lowest ratio per peer and dtype."""
    figures = ("cases", "geometric mean", "lowest")
    table = _table(f"{report.grid}: flashgen / peer", ("peer", "dtype"), figures, ("lowest at",))
    for s in report.summaries():
        mean, lowest = f"{s.geometric_mean:.3f}×", f"{s.lowest:.3f}×"
        table.add_row(s.peer, s.dtype, str(s.cases), mean, lowest, s.lowest_case)
    return table


def losses_table(report: Report) -> Table:
    """Mean and largest loss against the baselines per dtype, beside the limit."""
    title = f"{report.grid}: {OURS}'s rate, less than on the baseline by"
    table = _table(title, ("dtype",), ("cases", "mean", "largest", "limit"), ("largest at",))
    for loss in report.losses():
        figures = (f"{loss.mean:.1%}", f"{loss.largest:.1%}", f"{loss.limit:.0%}")
        table.add_row(loss.dtype, str(loss.cases), *figures, loss.largest_case)
    return table


def _table(title: str, words: Iterable[str], figures: Iterable[str], more: Iterable[str] = ()) -> Table:
    """An empty table with columns of words, of figures, and of more words."""
    table = Table(title=title)
    for headers, justify in ((words, "left"), (figures, "right"), (more, "left")):
        for header in headers:
            table.add_column(header, justify=justify, no_wrap=True)
    return table


def line(report: Report, row: Row) -> str:
    """One case as a line of text, printed as soon as it is measured."""
    parts = [
        f"{name} {cell(report, row, name)}"
        for name, m in row.measurements.items()
        if m.timing or name == OURS
    ]
    return f"{row.case.name:<22} " + " | ".join(parts)


def cell(report: Report, row: Row, peer: str) -> str:
    """One figure, with the spread for flashgen and the ratio for a peer."""
    measurement = row.measurements.get(peer)
    if measurement is None or measurement.timing is None:
        return "–"
    figure = _figure(report, row.case, measurement.timing)
    if not measurement.agrees:
        return f"{figure} ≠"
    if peer == OURS:
        return f"{figure} ±{measurement.timing.spread:.1%}"
    ratio = row.ratio(peer)
    return figure if ratio is None else f"{figure} ({ratio:.2f}×)"


def _figure(report: Report, case: Case, timing: Timing) -> str:
    """The report's metric, to the digits that it can bear."""
    value = figure(report.metric, case, timing)
    return f"{value:.1f}" if report.metric == "µs" or value < 100 else f"{value:.0f}"


def _best(row: Row) -> str:
    best = row.best_rival()
    return "–" if best is None else f"{best[0]:.2f}× {best[1]}"


def of_limit(report: Report, row: Row) -> str:
    """The share of the GPU's limit that flashgen reaches, and what the limit is."""
    limits, ours = roofline(row.case, report.environment), row.measurements[OURS].timing
    return "–" if limits is None or ours is None else f"{limits.floor_ms / ours.median_ms:.0%} {limits.limit}"


def _baseline(report: Report, row: Row) -> str:
    if report.metric == "µs":
        added = report.added_ms(row)
        return "–" if added is None else f"{1e3 * added:+.1f} µs on {row.case.baseline}"
    ratio = report.baseline_ratio(row)
    if ratio is None:
        return "–"
    if row.case.loss_limit is not None:
        return f"{ratio - 1:+.1%} on {row.case.baseline}"
    return f"{ratio:.2f} × {row.case.baseline}"
