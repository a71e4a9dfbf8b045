"""Write the tables of performance.md, feature-performance.md, lineage.md, training.md and
serving-performance.md in docs/ from the JSON of the last runs. Needs no GPU.

    python benchmarks/report.py            after a run with --save benchmarks/results/...
    python benchmarks/report.py --check    change nothing; exit code 1 where pages and results differ

A table stands in the page between two comments; everything else there is prose and stays as it is:

    <!-- table: KIND FILE [OPTION=VALUE ...] -->
    <!-- end -->

FILE lies in benchmarks/results; while it does not, the page says so. The kinds, with their options:

    environment   what was measured on; of several FILEs the first that knows a version
    cells         one line per case, flashgen's rate and its speed over each peer's. FIELD=A,B keeps the cases
                  with these values, as=µs shows times instead, with=variant names the kernel taken,
                  of=limit adds the share of the GPU's limit, and which limit it is
    by-length     one column per sequence length; to=PEER is who the ratio is to, to=best the fastest in each
                  cell. FIELD=A,B as above
    summary       geometric mean and lowest ratio per peer and dtype
    losses        what ragged lengths lose
    algorithms    one line per case, one column per algorithm: show=time, show=memory (beyond inputs and
                  outputs) or show=bytes (what its kernels move). FIELD=A,B as above
    chart         the picture of a grid, which this program draws beside FILE
    host-time     of host_time.py, the time of calls; library=PyTorch keeps the calls with its arrays
    first-use     of first_use.py, each variant; stages: what these times consist of
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flashgen.tools.bench.cases import Case, short_length
from flashgen.tools.bench.peers.registry import LINEAGE, OURS
from flashgen.tools.bench.results import Measurement, Report, Row, figure
from flashgen.tools.bench.table import of_limit

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
_NAMES = ("performance", "feature-performance", "lineage", "training", "serving-performance")
PAGES = tuple(HERE.parent / "docs" / f"{name}.md" for name in _NAMES)

_MARKER = re.compile(
    r"(?P<start>^<!-- table: (?P<words>[^\n]*?) -->\n)(?P<table>.*?)(?=^<!-- end -->$)", re.M | re.S
)
_PEERS = {
    "torch-flash": "FlashAttention-2",
    "torch-cudnn": "cuDNN",
    "torch-efficient": "SDPA efficient",
    "flash-attn-4": "FlashAttention-4",
    "flex-attention": "FlexAttention",
    "cudnn-flex": "cuDNN flex attention",
    "flashinfer-decode": "FlashInfer",
    "flashinfer-fa2": "FlashInfer (`mma.sync`)",
    "flashinfer-fa3": "FlashInfer (Hopper)",
    "torch-varlen": "FlashAttention-2 (varlen)",
    "flashgen-fixed": "without lengths",
    "flashgen-gqa": "`gqa` pinned",
    "flashgen-packed": "`packed` pinned",
    "flashgen-sm80": "for Ampere",
    "flash-attn-2": "FlashAttention-2 (its package)",
    "flash-attn-3": "FlashAttention-3",
}

Options = Mapping[str, str]


class ReportError(ValueError):
    """A marker in the page that asks for what there is not."""


def main(arguments: list[str] | None = None) -> int:
    """Renew the pages, or with ``--check`` say whether that would change one; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 on a difference")
    parser.add_argument(
        "--page",
        type=Path,
        action="append",
        help="a page; repeatable. By default all that show results",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON lies")
    options = parser.parse_args(arguments)
    pages = {path: path.read_text(encoding="utf-8") for path in options.page or PAGES}
    new = {path: renewed(page, options.results) for path, page in pages.items()}
    if not options.check:
        for path, page in new.items():
            path.write_text(page, encoding="utf-8")
        _draw("".join(pages.values()), options.results)
        return 0
    stale = [path.name for path in pages if new[path] != pages[path]]
    left_out = unused("".join(pages.values()), options.results)
    for name in left_out:
        print(f"no page shows anything of {name}", file=sys.stderr)
    for name in stale:
        print(f"{name} is not what the results say; run {Path(__file__).name}", file=sys.stderr)
    return int(bool(stale or left_out))


def renewed(page: str, results: Path) -> str:
    """The page with every table as ``results`` say. Raises ReportError for a marker that is wrong."""
    if not page.count("<!-- table:") == page.count("<!-- end -->") == len(_MARKER.findall(page)):
        raise ReportError("each <!-- table: ... --> line needs an <!-- end --> line before the next")
    return _MARKER.sub(lambda match: match["start"] + _table(match["words"], results), page)


def unused(pages: str, results: Path) -> list[str]:
    """The JSON files that no marker in the text of the pages names, relative to ``results``."""
    named = {word for match in _MARKER.finditer(pages) for word in match["words"].split()[1:]}
    there = {file.relative_to(results).as_posix() for file in results.rglob("*.json")}
    return sorted(there - named)


def _draw(pages: str, results: Path) -> None:
    """The pictures that the pages ask for, of the results that are there."""
    from flashgen.tools.bench.chart import draw

    for kind, *names in (match["words"].split() for match in _MARKER.finditer(pages)):
        for file in (results / name for name in names if kind == "chart"):
            if file.is_file():
                draw(Report.load(file), file.with_suffix(".png"))


def _table(words: str, results: Path) -> str:
    """The Markdown between a marker and its end."""
    kind, *rest = words.split()
    if kind not in KINDS:
        raise ReportError(f"<!-- table: {words} -->: {kind!r} is none of {', '.join(KINDS)}")
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    names = [word for word in rest if "=" not in word]
    missing = [name for name in names if not (results / name).is_file()]
    if missing or not names:
        return f"Not measured yet: {', '.join(missing)}.\n" if names else "Not measured yet.\n"
    try:
        lines = KINDS[kind]([results / name for name in names], options)
    except KeyError as error:
        raise ReportError(f"<!-- table: {words} -->: there is no {error}") from error
    return "".join(f"{line}\n" for line in lines)


def _markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _environment(files: list[Path], options: Options) -> list[str]:
    known: dict[str, object] = {}
    for file in files:
        for key, value in Report.load(file).environment.items():
            if known.get(key) is None:
                known[key] = value
    cudnn = known.get("cudnn")
    facts = {
        "GPU, driver": (known.get("gpu"), known.get("driver")),
        "CUDA, NVRTC": (known.get("torch_cuda"), str(known.get("nvrtc") or "").removeprefix("nvrtc ")),
        "PyTorch": (known.get("torch"),),
        "cuDNN": (cudnn and f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",),
        "flash-attn-4": (known.get("flash-attn-4"),),
        "FlashInfer": (known.get("flashinfer"),),
        "CuPy": (known.get("cupy"),),
    }
    return _markdown(("", ""), ((name, ", ".join(map(str, f))) for name, f in facts.items() if all(f)))


def _algorithms(files: list[Path], options: Options) -> list[str]:
    (file,) = files
    kinds = {
        "time": lambda m: m.timing and _duration(m.timing.median_ms),
        "memory": lambda m: m.extra_bytes is not None and _bytes(m.extra_bytes),
        "bytes": lambda m: m.moved_bytes is not None and _bytes(m.moved_bytes),
    }
    shown = kinds[options["show"]]
    rows = _kept(Report.load(file), {key: options[key] for key in options if key != "show"})
    columns = [name for name in LINEAGE if any(name in row.measurements for row in rows)]
    lines = (
        (row.case.name, *(shown(row.measurements[c]) if c in row.measurements else None for c in columns))
        for row in rows
    )
    return _markdown(("case", *(LINEAGE[c] for c in columns)), ([x or "–" for x in line] for line in lines))


def _kept(report: Report, conditions: Options) -> list[Row]:
    """The rows whose cases have one of the values given for each field. Raises KeyError where none has."""
    fields = {key: values.split(",") for key, values in conditions.items()}
    for name in fields:
        if name not in Case.__dataclass_fields__:
            raise KeyError(name)
    rows = [r for r in report.rows if all(str(getattr(r.case, key)) in fields[key] for key in fields)]
    if not rows:
        raise KeyError(f"case with {fields}")
    return rows


def _cells(files: list[Path], options: Options) -> list[str]:
    (file,) = files
    report = Report.load(file)
    extra = [options["with"]] if "with" in options else []
    for name in extra:
        if name not in Measurement.__dataclass_fields__:
            raise KeyError(name)
    if options.get("of", "limit") != "limit":
        raise KeyError(options["of"])
    rows = _kept(report, {key: values for key, values in options.items() if key not in ("as", "with", "of")})
    metric = options.get("as", report.metric)
    times = metric == "µs"
    shown = Report(report.grid, report.metric, {}, {}, rows)
    peers = [name for name in shown.peers if name != OURS]
    baselines = any(row.case.baseline for row in rows)
    best = shown.best_of and not times

    header = ["case", f"{OURS}, {metric}"]
    header += ["of the limit"] * ("of" in options)
    header += ["of its baseline"] * baselines + [_PEERS.get(name, name) for name in peers]
    header += ["best of these"] * bool(best) + extra
    lines = []
    for row in rows:
        cells = [row.case.name, _own(row, metric)]
        cells += [of_limit(report, row)] * ("of" in options)
        cells += [_baseline(report, row)] * baselines
        cells += [_microseconds(row, name) if times else _ratio(row.ratio(name)) for name in peers]
        cells += [_best(row)] * bool(best)
        cells += [f"`{getattr(row.measurements[OURS], key)}`" for key in extra]
        lines.append(cells)
    return _markdown(header, lines)


def _by_length(files: list[Path], options: Options) -> list[str]:
    (file,) = files
    peer, found = options["to"], {}
    for row in _kept(Report.load(file), {key: options[key] for key in options if key != "to"}):
        case = row.case
        line = found.setdefault((case.dtype, str(case.head_dim), _mask(case)), {})
        ratio = (row.best_rival() or (None,))[0] if peer == "best" else row.ratio(peer)
        line[case.seqlen_q] = f"{_rate(row)} ({_ratio(ratio)})"
    lengths = sorted({length for line in found.values() for length in line})
    header = ["dtype", "head_dim", "mask", *map(short_length, lengths)]
    return _markdown(header, ([*key, *(line.get(n, "–") for n in lengths)] for key, line in found.items()))


def _chart(files: list[Path], options: Options) -> list[str]:
    (file,) = files
    picture = f"../benchmarks/results/{file.with_suffix('.png').name}"
    return [f"![flashgen bench {file.stem}: the rate of each peer]({picture})"]


def _summary(files: list[Path], options: Options) -> list[str]:
    (file,) = files
    header = ("peer", "dtype", "cells", "geometric mean", "lowest", "where")
    rows = (
        (_named(s.peer), s.dtype, str(s.cases), f"{s.geometric_mean:.3f}", f"{s.lowest:.3f}", s.lowest_case)
        for s in Report.load(file).summaries()
    )
    return _markdown(header, rows)


def _losses(files: list[Path], options: Options) -> list[str]:
    (file,) = files
    header = ("dtype", "cells", "mean loss", "largest loss", "limit", "largest at")
    rows = (
        (x.dtype, str(x.cases), *(f"{100 * y:.1f} %" for y in (x.mean, x.largest, x.limit)), x.largest_case)
        for x in Report.load(file).losses()
    )
    return _markdown(header, rows)


def _host_time(files: list[Path], options: Options) -> list[str]:
    (file,) = files
    calls = json.loads(file.read_text(encoding="utf-8"))["calls_us"]
    kept = f"{options['library']}: " if "library" in options else ""
    rows = []
    for name, times in ((name, times) for name, times in calls.items() if name.startswith(kept)):
        prefix, colon, call = name.rpartition(": ")
        shown = f"`{call}`" if "(" in call else call
        rows.append((prefix + colon + shown, *(f"{us:.1f} µs" for us in times)))
    return _markdown(("", "median", "10th percentile"), rows)


_FIRST_USES = ("uncached", "cached", "no bytecode")


def _first_use(files: list[Path], options: Options) -> list[str]:
    uses = _uses(files)
    rows = [(f"`{use['variant']}`", *(_ms(use[kind]["ms"]) for kind in _FIRST_USES)) for use in uses]
    medians = (statistics.median(use[kind]["ms"] for use in uses) for kind in _FIRST_USES)
    rows.append(("median", *map(_ms, medians)))
    return _markdown(("", *_FIRST_USES), rows)


def _stages(files: list[Path], options: Options) -> list[str]:
    uses = _uses(files)

    def typical(stage: str, kind: str) -> str:
        return _ms(statistics.median(use[kind]["stages_ms"].get(stage, 0.0) for use in uses))

    stages = dict.fromkeys(stage for use in uses for stage in use["uncached"]["stages_ms"])
    rows = [(stage, *(typical(stage, kind) for kind in _FIRST_USES)) for stage in stages]
    return _markdown(("median over the variants", *_FIRST_USES), rows)


def _uses(files: list[Path]) -> list[dict[str, Any]]:
    (file,) = files
    return json.loads(file.read_text(encoding="utf-8"))["first_use"]


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


KINDS: dict[str, Callable[[list[Path], Options], list[str]]] = {
    "environment": _environment,
    "cells": _cells,
    "by-length": _by_length,
    "summary": _summary,
    "losses": _losses,
    "algorithms": _algorithms,
    "chart": _chart,
    "host-time": _host_time,
    "first-use": _first_use,
    "stages": _stages,
}


def _own(row: Row, metric: str) -> str:
    """Flashgen's figure, and half of the interquartile range in percent."""
    timing = row.measurements[OURS].timing
    if timing is None:
        return "–"
    value = _microseconds(row, OURS) if metric == "µs" else _digits(figure(metric, row.case, timing))
    return f"{value} ± {50 * timing.spread:.1f} %"


def _rate(row: Row) -> str:
    rate = row.measurements[OURS].tflops(row.case)
    return "–" if rate is None else _digits(rate)


def _digits(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"


def _microseconds(row: Row, peer: str) -> str:
    """The peer's time in µs."""
    measurement = row.measurements.get(peer)
    if measurement is None or measurement.timing is None:
        return "–"
    us = 1e3 * measurement.timing.median_ms
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def _duration(ms: float) -> str:
    return f"{1e3 * ms:.1f} µs" if ms < 0.1 else f"{1e3 * ms:.0f} µs" if ms < 1 else f"{ms:.1f} ms"


def _bytes(count: int) -> str:
    """In decimal units, three figures."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _best(row: Row) -> str:
    best = row.best_rival()
    return "–" if best is None else f"{best[0]:.2f} ({_named(best[1])})"


def _baseline(report: Report, row: Row) -> str:
    if report.metric == "µs":
        added = report.added_ms(row)
        return "–" if added is None else f"{1e3 * added:+.1f} µs ({row.case.baseline})"
    ratio = report.baseline_ratio(row)
    return "–" if ratio is None else f"{ratio:.2f} ({row.case.baseline})"


def _mask(case: Case) -> str:
    return "full" if case.mask == "none" else case.mask


def _named(peer: str) -> str:
    """A peer's name, or a list of them as in "best of A, B", as people know them."""
    return re.sub("|".join(_PEERS), lambda match: _PEERS[match[0]], peer)


if __name__ == "__main__":
    sys.exit(main())
