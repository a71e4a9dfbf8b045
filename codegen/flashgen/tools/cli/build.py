"""`flashgen build`: render and compile kernels before anything calls them."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from flashgen.tools.cli.options import (
    OutputFolder,
    archs_option,
    chosen_variants,
    jobs_option,
    json_option,
    refuse_beside,
    score_option,
    select_option,
    specs_option,
)
from flashgen.tools.cli.output import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from flashgen.families.variant import Variant
    from flashgen.source.generated import Written
    from flashgen.toolchain.build import Built

_FAILURES_SHOWN = 3


@click.command(
    "build",
    short_help="Compile kernels before the first call; no GPU needed.",
    epilog="""
\b
Examples:
  flashgen build --arch native                  for the GPU of this machine
  flashgen build --select 'head_dim=128 dtype=bf16' --arch sm_90
  flashgen build --slice all --arch sm_80 --arch sm_90 --jobs 8 --json
  flashgen build --select head_dim=64 --out cuda --no-compile
  flashgen build --check                        is generated/ up to date?

Variants: those that the specs mark for generated/ (--slice committed), or all (--slice all). With --select,
all that match.

Each variant is compiled for the architectures that its spec lists; with --arch, only for the ones that you
name. If no chosen variant lists an --arch, every variant that runs on it is compiled for it.

Output: machine code goes into the cache that attention() reads (see `flashgen cache info`), sources into
--out. In a checkout of the repository `flashgen build` without options also updates generated/. Without
--select and --score, other sources there that flashgen rendered are stale: they are removed, and --check
reports them. Other files are kept.

Exit code 1: a kernel does not compile, spills registers although its spec says no_spills (marked ! in the
table), or could not be written to the cache, or --check found a difference.
""",
)
@select_option
@archs_option
@click.option(
    "--slice",
    "slice_",
    type=click.Choice(["committed", "all"]),
    help="Which variants. [default: committed, or all with --select]",
)
@jobs_option
@click.option(
    "--out",
    type=OutputFolder(),
    metavar="DIR",
    help="Write each source to DIR/<variant>.cu; with --check, the folder to compare.",
)
@click.option(
    "--no-compile", is_flag=True, help="Render, and write if there is a place to, but do not compile."
)
@click.option(
    "--check",
    is_flag=True,
    help="Write and compile nothing; fail if generated/ (or --out) differs from what would be rendered.",
)
@specs_option
@score_option
@json_option
def command(
    selections: tuple[str, ...],
    archs: tuple[str, ...],
    slice_: str | None,
    jobs: int | None,
    out: Path | None,
    no_compile: bool,
    check: bool,
    specs: Path | None,
    score: str | None,
    as_json: bool,
) -> None:
    """Render kernels and compile them in parallel, with no GPU needed.

    Prints a table: variant, architecture, registers, bytes of spilled registers, shared memory, and seconds,
    or "cached".
    """
    from flashgen.families.selection import SelectionError
    from flashgen.host.paths import generated_dir
    from flashgen.toolchain import cache as caches
    from flashgen.tools.cli.kernels import compiled
    from flashgen.tools.cli.output import counted, note, print_json

    if check or no_compile:
        option = "--check" if check else "--no-compile"
        refuse_beside(f"{option} compiles nothing", {"--arch": archs, "--jobs": jobs})
    if check and out is None:
        generated_dir()  # raises an error where there is none
    # All that a folder should hold: what else was rendered there is stale.
    complete = not selections and score is None
    whole = complete and slice_ != "all"
    # A first call needs the compiled kernels, and the checked specs as well.
    cache = None if check or no_compile else caches.default()
    variants = chosen_variants(specs, selections, cache, score)
    if whole or slice_ == "committed":
        variants = tuple(variant for variant in variants if variant.committed)
        if not variants:
            raise SelectionError(
                "none of the chosen variants is marked for generated/ (--slice committed); leave --slice "
                "out, or see: flashgen list --select committed=true"
            )
    if check:
        options = {"select": selections, "slice": slice_, "specs": specs, "score": score, "out": out}
        if out is None and not whole:
            options["out"] = generated_dir()  # where a build of a part writes only if told so
        _check(variants, complete, out, as_json, _options(options))
        return
    # generated/ is of the shipped specs.
    shipped = specs is None and not os.environ.get("FLASHGEN_SPECS")
    written = _write(variants, complete, out, whole and shipped)
    files = {"written": written.changed, "removed": written.removed}
    if no_compile:
        if as_json:
            print_json({"kernels": [], **files, "failures": 0, "not_kept": 0})
        else:
            say(f"{len(variants)} rendered, {_changed(written)}")
        return
    results = compiled(variants, archs, jobs)
    failed = [built for built in results if built.failure]
    lost = sum(built.compiled is not None and not built.kept for built in results)
    if as_json:
        print_json(
            {
                "kernels": [built.as_dict() for built in results],
                **files,
                "failures": len(failed),
                "not_kept": lost,
            }
        )
    else:
        _report(results, failed, written)
    if lost:
        note(
            f"{lost} of {counted(len(results), 'kernel')} could not be written to {caches.default().root}, "
            "or had to make room there for later ones (FLASHGEN_CACHE_SIZE)"
        )
    if failed or lost:
        sys.exit(1)


def _write(variants: Sequence[Variant], complete: bool, out: Path | None, committed: bool) -> Written:
    """Render all; bring --out up to date or, for the ``committed`` slice, generated/."""
    from flashgen.host.paths import checkout, generated_dir
    from flashgen.source.generated import Written, generated_files, write_generated

    files = generated_files(variants)
    if out is None and not (committed and checkout()):
        return Written((), ())
    return write_generated(files, out or generated_dir(), complete)


def _changed(written: Written) -> str:
    from flashgen.tools.cli.output import counted

    removed = f", {len(written.removed)} stale removed" if written.removed else ""
    return f"{counted(len(written.changed), 'file')} changed{removed}"


def _options(options: Mapping[str, Any]) -> str:
    """Options as a shell takes them, each after a space."""
    pairs = [(k, v) for k, of in options.items() for v in (of if isinstance(of, tuple) else (of,))]
    return "".join(f" --{name} {shlex.quote(str(value))}" for name, value in pairs if value is not None)


def _check(
    variants: Sequence[Variant], complete: bool, out: Path | None, as_json: bool, options: str
) -> None:
    """Compare, say how they differ, and exit with 1 if they do. ``options`` chose the variants."""
    from flashgen.host.paths import generated_dir
    from flashgen.source.generated import diff_generated, generated_files
    from flashgen.tools.cli.output import counted, print_json

    folder = out or generated_dir()
    differences = diff_generated(generated_files(variants), folder, complete)
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "files": len(variants),
                "differences": [asdict(difference) for difference in differences],
            }
        )
    elif differences:
        for difference in differences:
            say(str(difference))
        say(f"\n{counted(len(differences), 'file')} in {folder} not as the specs and templates say;")
        say(f"`flashgen build{options}` brings them up to date")
    else:
        say(f"{counted(len(variants), 'file')} in {folder} as the specs and templates say")
    if differences:
        sys.exit(1)


def _report(results: Sequence[Built], failed: Sequence[Built], written: Written) -> None:
    from flashgen.tools.cli.kernels import print_kernels
    from flashgen.tools.cli.output import counted, note

    print_kernels(results)
    cached = sum(built.cached for built in results)
    note(f"{counted(len(results), 'kernel')}, {cached} from the cache; {_changed(written)}")
    for built in failed[:_FAILURES_SHOWN]:
        note(f"\nfailed: {built.variant.name} for {built.arch}: {built.failure}")
    if len(failed) > _FAILURES_SHOWN:
        note(f"\n{len(failed) - _FAILURES_SHOWN} more failed; --json has every message")
