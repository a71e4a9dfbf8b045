"""`flashgen bundle`: compiled kernels in one file, for machines without a compiler."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashgen.cli.calls import calls_option
from flashgen.cli.options import (
    Architecture,
    OutputFile,
    jobs_option,
    json_option,
    refuse_beside,
    score_option,
    select_option,
    specs_option,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.families.model import Spec
    from flashgen.toolchain.build import Built


@click.command(
    "bundle",
    short_help="Put compiled kernels into one file, to deploy.",
    epilog="""
\b
Examples:
  flashgen bundle --select 'head_dim=128 dtype=bf16' -o kernels.zip
  flashgen bundle --select head_dim=128 --score softcap -o softcap.zip
  flashgen bundle --calls calls.json --arch sm_90 -o kernels.zip
  flashgen bundle --show kernels.zip
  FLASHGEN_BUNDLE=kernels.zip python serve.py

FLASHGEN_BUNDLE names bundles, separated as in PATH. A call takes its kernel from the disk cache, then from
the bundles, and only then compiles it. So a container needs neither NVRTC nor a writable folder. A bundle
serves the version of flashgen that made it, with the same specs and templates. One that another user could
have written is refused, unless FLASHGEN_TRUST names it.

The kernels are those that `flashgen build` compiles with the same options, and whatever else a call of them
launches. They are taken from the disk cache, or compiled; no GPU is needed. Exit code 1: a kernel does not
compile, or with --show the bundle cannot be used.
""",
)
@select_option
@calls_option
@click.option(
    "--arch",
    "archs",
    type=Architecture(),
    multiple=True,
    help="Only for this architecture: sm_90, or native. Repeatable.",
)
@click.option(
    "-o",
    "--out",
    type=OutputFile(),
    metavar="FILE",
    help="The bundle to write: kernels.zip.",
)
@click.option(
    "--show",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Check this bundle and print what it holds; write nothing.",
)
@jobs_option
@specs_option
@score_option
@json_option
def command(
    selections: tuple[str, ...],
    calls: Path | None,
    archs: tuple[str, ...],
    out: Path | None,
    show: Path | None,
    jobs: int | None,
    specs: Path | None,
    score: str | None,
    as_json: bool,
) -> None:
    """Compile the kernels of --select, or of --calls, and put them into one file; or show what a bundle
    holds.
    """
    from flashgen.host import paths
    from flashgen.toolchain import atomic

    if (out is None) == (show is None):
        raise click.UsageError("either write a bundle, with -o FILE, or look into one, with --show FILE")
    if show is not None:
        options = {
            "--select": selections,
            "--calls": calls,
            "--arch": archs,
            "--jobs": jobs,
            "--specs": specs,
            "--score": score,
        }
        refuse_beside("--show prints what a bundle holds", options)
        _show(show, as_json)
        return
    if calls is not None:
        refuse_beside(
            "--calls says which kernels", {"--select": selections, "--specs": specs, "--score": score}
        )
        if not archs:
            raise click.UsageError("say for which GPU the calls are: --arch sm_90, or native")
    elif not selections:
        raise click.UsageError("say which kernels: --select 'head_dim=128 dtype=bf16 mask_type=causal'")
    # What other bundles hold is not read: one that no longer serves is what this command is to replace.
    os.environ.pop(paths.BUNDLE_VARIABLE, None)
    atomic.check(out)
    results, loaded = (
        _built(selections, archs, jobs, specs, score) if calls is None else _of_calls(calls, archs, jobs)
    )
    failed = [built for built in results if built.failure]
    if failed:
        raise click.ClickException(
            f"{len(failed)} of {len(results)} kernels failed, and nothing was written. "
            f"{failed[0].variant.name} for {failed[0].arch}: {failed[0].failure}"
        )
    _write(out, results, loaded)
    _show(out, as_json)


def _built(
    selections: Sequence[str],
    archs: Sequence[str],
    jobs: int | None,
    specs: Path | None,
    score: str | None,
) -> tuple[list[Built], tuple[Spec, ...]]:
    """Every kernel that a chosen variant launches, compiled; and the specs."""
    from flashgen.cli.kernels import compiled
    from flashgen.cli.options import chosen_variants
    from flashgen.families.load import load_specs

    loaded = load_specs(specs)
    chosen = chosen_variants(specs, selections, score=score)
    steps = dict.fromkeys(step for variant in chosen for step in variant.steps)
    return compiled([*steps], archs, jobs), loaded


def _of_calls(calls: Path, archs: Sequence[str], jobs: int | None) -> tuple[list[Built], tuple[Spec, ...]]:
    """Every kernel that the calls launch on the architectures, compiled; and the specs."""
    from flashgen.cli.calls import kernels
    from flashgen.cli.kernels import compiled
    from flashgen.families.load import load_specs

    results = []
    for arch in dict.fromkeys(archs):
        steps = dict.fromkeys(step for main in kernels(calls, arch) for step in main.steps)
        results += compiled([*steps], [arch], jobs)
    return results, load_specs()


def _write(out: Path, results: Sequence[Built], specs: Sequence[Spec]) -> None:
    from flashgen.families.bases import whole_text
    from flashgen.families.snapshot import encode, snapshot_key
    from flashgen.toolchain.bundle import Held, HeldSpec, write
    from flashgen.toolchain.compile import compiler_version
    from flashgen.toolchain.obtain import cache_key

    held = [Held(built.variant.name, built.arch, cache_key(built.variant, built.arch)) for built in results]
    entries = {entry.key: built.compiled.to_bytes() for entry, built in zip(held, results, strict=True)}
    checked = [HeldSpec(spec.name, snapshot_key(whole_text(spec.path, spec.text))) for spec in specs]
    entries |= {entry.key: encode(spec.content) for entry, spec in zip(checked, specs, strict=True)}
    write(out, compiler_version(), entries, held, checked)


def _show(path: Path, as_json: bool) -> None:
    from flashgen.cli.output import Column, counted, note, print_json, print_table, size
    from flashgen.toolchain.bundle import Bundle
    from flashgen.toolchain.private import Distrusted, is_trusted

    bundle = Bundle(path)
    bundle.verify()
    refused = "" if is_trusted(path) else bundle.distrust
    facts: dict[str, Any] = {"bundle": str(path), "bytes": path.stat().st_size, "compiler": bundle.compiler}
    specs = [entry.spec for entry in bundle.specs]
    if as_json:
        kernels = [{"variant": entry.variant, "arch": entry.arch} for entry in bundle.kernels]
        print_json(facts | {"kernels": kernels, "specs": specs, "refused": refused})
    else:
        print_table(
            [Column("variant"), Column("arch")], [[entry.variant, entry.arch] for entry in bundle.kernels]
        )
        count = f"{counted(len(bundle.kernels), 'kernel')}, {counted(len(specs), 'checked spec')}"
        note(f"{path}: {count}, {size(facts['bytes'])}, compiled by {bundle.compiler}; every entry is intact")
        if refused:
            note(f"FLASHGEN_BUNDLE would not use it: {Distrusted(path, refused).strerror}")
    if refused:
        sys.exit(1)
