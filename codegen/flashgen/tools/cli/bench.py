"""`flashgen bench`: time flashgen beside its peers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from flashgen.tools.cli.calls import calls_option
from flashgen.tools.cli.options import OutputFile, json_option, refuse_beside

if TYPE_CHECKING:
    from pathlib import Path


_GRID = "prefill"


@click.command(
    "bench",
    short_help="Time flashgen beside its peers.",
    epilog="""
\b
Examples:
  flashgen bench --list                    the grids and the peers
  flashgen bench                           the grid `prefill`, every peer
  flashgen bench masks --save masks.json --chart masks.png
  flashgen bench --dtype bf16 --where head_dim=64,128 --where mask=causal
  flashgen bench --calls calls.json        the calls of a run
  flashgen bench small --peer torch-flash --json > small.json

All peers run in one process, in interleaved rounds, timed with CUDA events on inputs that are not in L2;
figures are medians. Compare ratios, not rates. Needs a GPU.
""",
)
@click.argument("grid", required=False)
@calls_option
@click.option("--list", "listing", is_flag=True, help="Print the grids and the peers, and run nothing.")
@click.option(
    "--peer", "peers", multiple=True, metavar="NAME", help="Only this peer, beside flashgen. Repeatable."
)
@click.option(
    "--dtype", "dtypes", multiple=True, metavar="NAME", help="Only cases of this dtype. Repeatable."
)
@click.option(
    "--where", multiple=True, metavar="FIELD=A,B", help="Only cases with these values: head_dim=64,128."
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=15, show_default=True, help="Rounds of all peers."
)
@click.option(
    "--sample-ms",
    type=click.FloatRange(min=0, min_open=True),
    default=4.0,
    show_default=True,
    help="Milliseconds that each peer is timed for in a round.",
)
@click.option("--seed", type=click.IntRange(0), help="Fix the inputs; they are fresh otherwise.")
@click.option("--save", type=OutputFile(), metavar="FILE", help="Also write the results as JSON.")
@click.option(
    "--chart",
    type=OutputFile(),
    metavar="FILE",
    help="Also draw TFLOP/s against sequence length, a PNG for each dtype.",
)
@json_option
def command(
    grid: str | None,
    calls: Path | None,
    listing: bool,
    peers: tuple[str, ...],
    dtypes: tuple[str, ...],
    where: tuple[str, ...],
    rounds: int,
    sample_ms: float,
    seed: int | None,
    save: Path | None,
    chart: Path | None,
    as_json: bool,
) -> None:
    """Time flashgen and every peer that is installed on a GRID of shapes, and print rates and ratios.

    Exit code 1 if a result disagrees with its reference.
    """
    from flashgen.tools.bench import run
    from flashgen.tools.cli.calls import grid as calls_grid
    from flashgen.tools.cli.output import console, note, print_json

    if listing:
        options = {"GRID": grid, "--calls": calls, "--peer": peers, "--dtype": dtypes, "--where": where}
        refuse_beside("--list prints all grids and peers", options | {"--save": save, "--chart": chart})
        _list(as_json)
        return
    if calls is not None:
        refuse_beside("--calls has the cases", {"GRID": grid})
    report = run(
        calls_grid(calls) if calls is not None else grid or _GRID,
        peers=peers or None,
        dtypes=dtypes or None,
        where=_conditions(where),
        rounds=rounds,
        sample_ms=sample_ms,
        seed=seed,
        json_path=save,
        png_path=chart,
        console=None if as_json else console(),
    )
    if as_json:
        print_json(report.as_dict())
    for case, peer in report.disagreements:
        note(f"disagrees: {peer} on {case}")
    if report.disagreements:
        sys.exit(1)


def _conditions(where: tuple[str, ...]) -> dict[str, list[str]]:
    """Each FIELD=A,B as a field and its values."""
    conditions: dict[str, list[str]] = {}
    for text in where:
        key, equals, values = text.partition("=")
        if not (key and equals and values):
            raise click.BadParameter(f"{text!r} is not FIELD=VALUE[,VALUE...]", param_hint="--where")
        conditions.setdefault(key, []).extend(values.split(","))
    return conditions


def _list(as_json: bool) -> None:
    """Grids with their cases, and peers with the reason why one cannot run here."""
    from flashgen.tools.bench import GRIDS
    from flashgen.tools.bench.peers.registry import all_peers
    from flashgen.tools.cli.output import print_json, print_pairs

    peers = {name: peer.unavailable() for name, peer in all_peers().items()}
    if as_json:
        grids = {
            name: {"doc": grid.doc, "cases": [case.name for case in grid.cases]}
            for name, grid in GRIDS.items()
        }
        print_json(
            {"grids": grids, "peers": {name: {"unavailable": reason} for name, reason in peers.items()}}
        )
        return
    print_pairs(
        [(name, f"{len(grid.cases)} cases: {grid.doc}") for name, grid in GRIDS.items()], title="grids"
    )
    click.echo()
    print_pairs([(name, reason or "can run here") for name, reason in peers.items()], title="peers")
