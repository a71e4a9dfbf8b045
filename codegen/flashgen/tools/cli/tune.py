"""`flashgen tune`: find the best tiles on this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashgen.tools.cli.calls import calls_option
from flashgen.tools.cli.options import (
    OutputFolder,
    jobs_option,
    json_option,
    refuse_beside,
    select_option,
    specs_option,
)
from flashgen.tools.cli.output import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.tools.tune.ranking import Ranking, Trial
    from flashgen.tools.tune.subjects import Subject

_DROPPED_SHOWN = 3


@click.command(
    "tune",
    short_help="Find the best tiles for this GPU.",
    epilog="""
\b
Examples:
  flashgen tune --select 'head_dim=128 dtype=fp16 mask_type=causal'
  flashgen tune --select 'head_dim=128 dtype=fp16 mask_type=causal' --write
  flashgen tune --select head_dim=64 --shapes 1k,4k,8x2000x6000 --write
  flashgen tune --select 'gqa=packed dtype=bf16' --shapes 32x16x16k@32/4
  flashgen tune --calls calls.json --write
  flashgen tune --spec my-specs/mine.yaml --select head_dim=96

Without --write nothing changes.

Tiles: for each selected kernel that a call on this GPU could get, the tiles under `tune` in its spec compete
with the ordinary tile. A tile that does not compile, spills registers, or gives a wrong result is dropped,
with the reason. The others are timed on every shape in interleaved rounds, as in `flashgen bench`, and ranked
by the geometric mean over the shapes. Kernels with sinks get the tiles of the same kernels without.

Shapes: 4k is 4,096 queries and keys in a batch of 16,384 tokens. BATCHxSEQLEN_QxSEQLEN_KV says all three.
@HEADS_Q/HEADS_KV may follow either.

--write: a tile that gains at least 1 % goes into a file for this GPU and spec in your configuration folder,
or in FLASHGEN_TUNED. From the next process on attention() takes it instead of the ordinary tile, and
`flashgen list --select tile=tuned` shows it. Its kernel is compiled already. If the ordinary tile is best, an
earlier row is removed.

Needs a GPU that nothing else uses, and some tens of seconds for each kernel.
""",
)
@select_option
@calls_option
@click.option("--write", is_flag=True, help="Keep the winners, for this GPU.")
@click.option(
    "--out",
    type=OutputFolder(),
    metavar="FOLDER",
    help="With --write: a folder of tuned tiles other than your own.",
)
@click.option(
    "--spec",
    "spec_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Tune the rows of this spec file.",
)
@click.option(
    "--shapes",
    metavar="A,B,...",
    help="The problems to time. [default: 1k,4k,16k; 1x1x16k,8x1x8k,64x1x8k for families of few rows]",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=15, show_default=True, help="Rounds of all tiles."
)
@jobs_option
@specs_option
@json_option
def command(
    selections: tuple[str, ...],
    calls: Path | None,
    write: bool,
    out: Path | None,
    spec_file: Path | None,
    shapes: str | None,
    rounds: int,
    jobs: int | None,
    specs: Path | None,
    as_json: bool,
) -> None:
    """Find the best tiles for this GPU, and with --write keep them.

    Prints a ranking for each kernel: tile, registers, bytes of spilled registers, thread blocks that a
    multiprocessor holds, TFLOP/s on each shape, and the speed relative to the ordinary tile (marked *).
    """
    from flashgen.tools.cli.output import note, print_json
    from flashgen.tools.cli.progress import progress
    from flashgen.tools.tune import contest
    from flashgen.tools.tune.candidates import fields
    from flashgen.tools.tune.shapes import Unsuited, suited

    if calls is not None:
        refuse_beside("--calls says what to tune", {"--select": selections, "--spec": spec_file})
        selections, shapes = _of_calls(calls, shapes)
    if not selections:
        raise click.UsageError("say what to tune: --select 'head_dim=128 dtype=fp16 mask_type=causal'")
    if out is not None and not write:
        raise click.UsageError("--out goes with --write")
    if spec_file is not None and write:
        raise click.UsageError(
            "--write keeps tiles for this GPU, not in a spec: leave it out with --spec, and copy the tiles"
        )
    if spec_file is not None and specs is not None:
        raise click.UsageError("--spec names the one file to tune; leave --specs out")
    here, chosen = _subjects(selections, specs, spec_file)
    # Before the work: raise for a wrong shape, and for a file that cannot be read or written.
    texts = None if shapes is None else shapes.split(",")
    pairs = list(zip(chosen, suited([subject.ordinary for subject in chosen], texts), strict=True))
    for _, reason in pairs:
        if isinstance(reason, Unsuited):
            note(f"left out: {reason}")
    chosen = [subject for subject, problems in pairs if not isinstance(problems, Unsuited)]
    problems = dict(enumerate(entry for _, entry in pairs if not isinstance(entry, Unsuited)))
    if write:
        _check_files(chosen, here.name, out)
    competing = fields(chosen)
    bench = _bench(here, rounds)
    with progress(contest.steps(competing, problems), "compiling and timing tiles") as step:
        rankings = contest.hold(competing, problems, bench, jobs, step)
    if not as_json:
        for ranking in rankings:
            _print(ranking)
    written = _write(rankings, here.name, out) if write else []
    if as_json:
        report = [_as_dict(ranking) for ranking in rankings]
        print_json({"gpu": here.name, "kernels": report, "written": [str(path) for path in written]})
    elif (
        not write
        and spec_file is None
        and any(ranking.winner is not ranking.ordinary for ranking in rankings)
    ):
        say("nothing was written; --write keeps the winners", err=True)


def _of_calls(calls: Path, shapes: str | None) -> tuple[tuple[str, ...], str]:
    """The kernels that calls take on this GPU, as selections, and their shapes."""
    from flashgen.errors import DeviceTypeNotSupported
    from flashgen.runtime import device
    from flashgen.tools.cli.calls import kernels
    from flashgen.tools.cli.calls import shapes as shapes_of

    if not device.available():
        raise DeviceTypeNotSupported(f"tuning needs a GPU: {device.why_unavailable()}")
    plain = (variant for variant in kernels(calls, device.device(0).arch) if variant.score is None)
    return tuple(variant.name for variant in plain), shapes or shapes_of(calls)


def _subjects(
    selections: Sequence[str], specs: Path | None, spec_file: Path | None
) -> tuple[Any, list[Subject]]:
    """The GPU, and what is to be tuned on it."""
    from flashgen.errors import DeviceTypeNotSupported
    from flashgen.families.load import load_spec, load_specs
    from flashgen.families.selection import select
    from flashgen.runtime import device
    from flashgen.tools.tune.subjects import subjects

    if not device.available():
        raise DeviceTypeNotSupported(f"tuning needs a GPU: {device.why_unavailable()}")
    here = device.device(0)
    loaded = (load_spec(spec_file),) if spec_file else load_specs(specs, gpu=here.name)
    selected = select([variant for spec in loaded for variant in spec.variants()], selections)
    return here, subjects(loaded, selected, here)


def _bench(here: Any, rounds: int) -> Any:
    import numpy as np

    from flashgen.tools.bench.hosts import CupyHost
    from flashgen.tools.tune.gpu import GpuBench

    seed = int(np.random.SeedSequence().entropy % 2**32)
    return GpuBench(here, CupyHost(), rounds=rounds, seed=seed)


def _check_files(chosen: Sequence[Subject], gpu: str, out: Path | None) -> None:
    """Raise SpecError for a file of tuned tiles that is damaged, OSError for one that cannot be written."""
    from flashgen.families.tuned import path_for
    from flashgen.toolchain import atomic
    from flashgen.tools.tune.userfile import read

    for spec in {subject.spec.path: subject.spec for subject in chosen}.values():
        read(spec, gpu, out)
        path = path_for(spec.name, gpu, out)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.check(path)


def _write(rankings: Sequence[Ranking], gpu: str, out: Path | None) -> list[Path]:
    """Write the winners down; returns the files."""
    from flashgen.tools.cli.output import note
    from flashgen.tools.tune.save import in_users_files

    paths = []
    for path, problems in in_users_files(rankings, gpu, out):
        for problem in problems:
            note(f"gone from {path}: line {problem}")
        if path.exists():
            note(f"written: {path}")
            paths.append(path)
    if not paths:
        note("the ordinary tiles are best, so there is nothing to keep")
    return paths


def _print(ranking: Ranking) -> None:
    from flashgen.tools.cli.output import Column, note, print_table
    from flashgen.tools.tune.contest import tile_text

    ordinary = ranking.subject.ordinary
    say(f"{ordinary}: {len(ranking.trials)} tiles timed, {len(ranking.dropped)} dropped")
    columns = [
        *(Column(key, number=True) for key, _ in ordinary.tile),
        *(Column(name, number=True) for name in ("regs", "spills", "blocks/SM")),
        *(Column(f"{case.name} TFLOP/s", number=True) for case in ranking.cases),
        Column("speed", number=True),
    ]
    print_table(
        columns,
        [_row(ranking, trial) for trial in ranking.trials],
        ["green" if trial is ranking.winner else "" for trial in ranking.trials],
    )
    if ranking.winner is ranking.ordinary:
        say("the ordinary tile stays")
    else:
        say(f"best: {tile_text(dict(ranking.winner.variant.tile))} efficiency={ranking.efficiency}")
    for dropped in ranking.dropped[:_DROPPED_SHOWN]:
        note(f"dropped: {tile_text(dropped.tile)}: {_brief(dropped.why)}")
    if len(ranking.dropped) > _DROPPED_SHOWN:
        note(f"{len(ranking.dropped) - _DROPPED_SHOWN} more were dropped; --json has every reason")
    click.echo()


def _brief(why: str) -> str:
    """The line that says what is wrong: of a compiler's log the first error."""
    lines = why.splitlines()
    return next((line.strip() for line in lines if "error" in line), lines[0])


def _row(ranking: Ranking, trial: Trial) -> list[str]:
    kernel = trial.built.compiled
    mark = " *" if trial is ranking.ordinary else ""
    rates = (case.flops / trial.timings[case.name].median_ms / 1e9 for case in ranking.cases)
    return [
        *(str(value) for _, value in trial.variant.tile),
        str(kernel.registers) if kernel and kernel.registers is not None else "-",
        str(trial.built.spilled),
        "-" if trial.blocks_per_sm is None else str(trial.blocks_per_sm),
        *(f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}" for rate in rates),
        f"{trial.speed(ranking.ordinary):.3f}{mark}",
    ]


def _as_dict(ranking: Ranking) -> dict[str, Any]:
    """Plain types for JSON; times in milliseconds."""

    def trial(entry: Trial) -> dict[str, Any]:
        return {
            "tile": dict(entry.variant.tile),
            "ordinary": entry is ranking.ordinary,
            **{
                key: entry.built.as_dict()[key]
                for key in ("registers", "spill_stores", "spill_loads", "threads")
            },
            "smem_dynamic": entry.variant.smem_bytes,
            "blocks_per_sm": entry.blocks_per_sm,
            "ms": {name: timing.median_ms for name, timing in entry.timings.items()},
            "tflops": {
                case.name: case.flops / entry.timings[case.name].median_ms / 1e9 for case in ranking.cases
            },
            "speed": entry.speed(ranking.ordinary),
        }

    subject = ranking.subject
    return {
        "variant": subject.ordinary.name,
        "spec": str(subject.spec.path),
        "axes": dict(subject.ordinary.axes),
        "target": subject.ordinary.target,
        "ranking": [trial(entry) for entry in ranking.trials],
        "dropped": [{"tile": entry.tile, "why": entry.why} for entry in ranking.dropped],
        "best": dict(ranking.winner.variant.tile),
        "gain": ranking.gain,
        "efficiency": ranking.efficiency,
    }
