"""Running a grid: prepare every peer on a case, check it, time them all together, report."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.errors import BadParam
from flashgen.tools.bench import agreement
from flashgen.tools.bench.environment import describe
from flashgen.tools.bench.grids import find_grid
from flashgen.tools.bench.peers.registry import DROPPING, OURS, choose_peers
from flashgen.tools.bench.results import Measurement, Report, Row
from flashgen.tools.bench.table import line, print_tables
from flashgen.tools.bench.timing import Step, input_sets, step_of, time_interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.grids import Grid
    from flashgen.tools.bench.hosts import Host, Inputs
    from flashgen.tools.bench.peers.base import Peer


def run(
    grid: str | Grid = "prefill",
    *,
    peers: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    where: dict[str, Sequence[Any]] | None = None,
    rounds: int = 15,
    sample_ms: float = 4.0,
    seed: int | None = None,
    json_path: str | Path | None = None,
    png_path: str | Path | None = None,
    console: Console | None = None,
) -> Report:
    """Time flashgen and its peers on a grid, by its name or itself, on the current device.

    ``peers`` are names out of ``all_peers()``, by default the grid's peers, or every peer that can be used
    here; ``flashgen`` itself always runs. ``dtypes`` and ``where`` (field of a Case to the values kept, as in
    ``{"head_dim": [64]}``) narrow the grid. Each of the ``rounds`` times every peer for about ``sample_ms``
    milliseconds.
    ``seed`` fixes the inputs; they are fresh otherwise. A line per case and the final tables go to
    ``console``; ``json_path`` and ``png_path`` are written.

    Raises BadParam for an unknown grid, peer or filter, and DeviceTypeNotSupported without a CUDA device. A
    peer that fails on a case is noted in the report; flashgen failing is raised.
    """
    if rounds < 1 or not sample_ms > 0:
        raise BadParam(
            f"rounds must be at least 1 and sample_ms positive; they were {rounds} and {sample_ms}"
        )
    chosen_grid = (find_grid(grid) if isinstance(grid, str) else grid).choose(dtypes, where)
    chosen, left_out = choose_peers(peers or chosen_grid.peers or None, needed=bool(peers))
    host = _host(chosen)
    seed = int(np.random.SeedSequence().entropy % 2**32) if seed is None else seed
    report = Report(
        grid=chosen_grid.name,
        metric=chosen_grid.metric,
        protocol=_protocol(host, rounds, sample_ms, seed),
        environment=describe(),
        left_out=left_out,
    )
    for name, reason in left_out.items():
        _say(console, f"without {name}: {reason}")
    for group in chosen_grid.groups():
        first = len(report.rows)
        group_seed = seed + 1000 * first
        report.rows += measure(group, chosen, host, rounds=rounds, sample_ms=sample_ms, seed=group_seed)
        for index, row in enumerate(report.rows[first:], first + 1):
            _say(console, f"{index:>3}/{len(chosen_grid.cases)} {line(report, row)}")
            for failed in (m for m in row.measurements.values() if m.failed):
                _say(console, f"        {failed.peer} failed: {failed.note}")
        if json_path is not None:
            report.save(Path(json_path))
    if console is not None:
        print_tables(report, console)
    if png_path is not None:
        from flashgen.tools.bench.chart import draw

        draw(report, Path(png_path))
    return report


def measure(
    cases: Sequence[Case], peers: Sequence[Peer], host: Host, *, rounds: int, sample_ms: float, seed: int
) -> list[Row]:
    """Check and time every peer on every case, all in one set of interleaved rounds. Flashgen must be the
    first peer.
    """
    rows = []
    steps: dict[tuple[str, str], Step] = {}
    for index, case in enumerate(cases):
        measurements, prepared = _prepare(case, peers, host, seed + 1000 * index)
        rows.append(Row(case, measurements))
        steps |= {(case.name, peer): step for peer, step in prepared.items()}
    timings = time_interleaved(steps, host, rounds=rounds, sample_ms=sample_ms)
    for row in rows:
        for peer, measurement in row.measurements.items():
            if (timing := timings.get((row.case.name, peer))) is not None:
                row.measurements[peer] = replace(measurement, timing=timing)
    return rows


def _prepare(
    case: Case, peers: Sequence[Peer], host: Host, seed: int
) -> tuple[dict[str, Measurement], dict[str, Step]]:
    """Call every peer once and check it: what was found, without timings, and the steps to time."""
    rng = np.random.default_rng(seed)
    sets = input_sets(case, host, seed)
    measurements: dict[str, Measurement] = {}
    steps: dict[str, Step] = {}
    reference = None
    for peer in peers:
        reason = peer.declines(case)
        ours_alone = case.sinks or case.left_padding or case.codes or case.latent or case.mask == "tree"
        ours_alone = ours_alone or (case.line and case.lengths != "none")
        if ours_alone and not peer.name.startswith(OURS):
            reason = "timed without sinks, padding, codes, latent caches, trees, and lines on caches"
        if case.dropout_p and not peer.name.startswith((OURS, *DROPPING)):
            reason = "timed without dropout"
        if reason is not None:
            measurements[peer.name] = Measurement(peer.name, note=reason)
            continue
        # PyTorch says in warnings why a backend refuses a call.
        with warnings.catch_warnings(record=peer.name != OURS) as said:
            try:
                out, measurements[peer.name], steps[peer.name] = _first_call(
                    case, peer, sets, host, reference, rng
                )
            except Exception as error:
                if peer.name == OURS:
                    raise
                reasons = [
                    f"{type(error).__name__}: {error}",
                    *(str(warning.message) for warning in said or ()),
                ]
                measurements[peer.name] = Measurement(peer.name, note="; ".join(reasons), failed=True)
                continue
        if peer.name == OURS:
            reference = out
    return measurements, steps


def _first_call(
    case: Case,
    peer: Peer,
    sets: Sequence[Inputs],
    host: Host,
    reference: tuple[Any, ...] | None,
    rng: np.random.Generator,
) -> tuple[tuple[Any, ...], Measurement, Step]:
    """Prepare a peer, call it once on poisoned results, and compare: with float64 where there is no
    ``reference``.

    Returns a copy of its results, a Measurement without a timing, and the step to time.
    """
    for result in sets[0].results:
        host.poison(result)
    host.synchronize()
    start = time.perf_counter()
    call = peer.prepare(case, sets)
    output = call(0)
    results = output if isinstance(output, tuple) else (output,)
    host.synchronize()
    seconds = time.perf_counter() - start
    if reference is None:
        share, error = agreement.sampled_share(case, sets[0], results, host, rng), None
        agrees = share <= 1
    else:
        share = None
        errors = [host.relative_error(x, y) for x, y in zip(results, reference, strict=True)]
        error = float(np.max(errors))  # NaN where one is
        tolerance = getattr(peer, "tolerance", agreement.PEER_TOLERANCE[case.dtype])
        agrees = error <= tolerance  # False for NaN too
    measurement = Measurement(
        peer.name,
        error_share=share,
        relative_error=error,
        agrees=agrees,
        first_call_s=seconds,
        variant=getattr(peer, "variant", None),
    )
    if getattr(peer, "algorithm", None) is not None:
        measurement = replace(measurement, **_memory(case, peer, call, host))
    return tuple(host.copy(x) for x in results), measurement, step_of(case, call, len(sets), host)


def _memory(case: Case, peer: Any, call: Callable[[int], Any], host: Host) -> dict[str, Any]:
    """What a peer of one algorithm takes of memory, and how many bytes it moves."""
    from flashgen.tools.bench import traffic

    moved, by = traffic.moved(case, peer.variant)
    return {
        "workspace_bytes": peer.workspace_bytes,
        "extra_bytes": peer.workspace_bytes + host.growth(lambda: call(0)),
        "moved_bytes": moved,
        "moved_by": by,
    }


def _host(peers: Sequence[Peer]) -> Host:
    """CuPy where every peer takes its arrays, PyTorch otherwise."""
    from flashgen.tools.bench.hosts import CupyHost, TorchHost

    return CupyHost() if all("cupy" in peer.hosts for peer in peers) else TorchHost()


def _protocol(host: Host, rounds: int, sample_ms: float, seed: int) -> dict[str, Any]:
    """How the figures came about, for the JSON."""
    return {
        "arrays": host.name,
        "clock": "CUDA events on the current stream; around graph replays where a case says so",
        "order": "interleaved rounds in one process, in random order; an untimed call before each;"
        " a case in the rounds of its baseline",
        "statistic": "median and quartiles over rounds; ratios are of medians",
        "rounds": rounds,
        "sample_ms": sample_ms,
        "inputs": "normal, rotated among sets that exceed twice the L2 together",
        "flops": "2 · batch · heads · pairs · (head_dim + head_dim_v); causal: half of the pairs, "
        "window: the visible ones; backward: 2.5 times as many",
        "seed": seed,
    }


def _say(console: Console | None, text: str) -> None:
    if console is not None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
