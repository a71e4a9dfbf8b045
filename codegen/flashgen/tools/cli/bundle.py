"""`flashgen bundle`: compiled kernels in one file or wheel, for machines without a compiler."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashgen.tools.cli.calls import calls_option
from flashgen.tools.cli.options import (
    OutputFile,
    archs_option,
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
    from flashgen.toolchain.bundle import Held, HeldSpec


@click.command(
    "bundle",
    short_help="Put compiled kernels into one file, to deploy.",
    epilog="""
\b
Examples:
  flashgen bundle --select 'head_dim=128 dtype=bf16' -o kernels.zip
  flashgen bundle --select head_dim=128 --score softcap -o softcap.zip
  flashgen bundle --calls calls.json --arch sm_90 -o kernels.zip
  flashgen bundle --models --wheel dist
  flashgen bundle --show kernels.zip
  FLASHGEN_BUNDLE=kernels.zip python serve.py

FLASHGEN_BUNDLE names bundles, separated as in PATH. A call takes its kernel from the disk cache, then from
the bundles, and only then compiles it. So a container needs neither NVRTC nor a writable folder. A bundle
serves the version of flashgen that made it, with the same specs and templates. A bundle that another
user could have written is an error, unless FLASHGEN_TRUST names it.

A bundle has the kernels that `flashgen build` compiles with the same options, and all other kernels of their
calls. They come from the disk cache, or are compiled; no GPU is needed. Exit code 1: a kernel does not
compile, or with --show the bundle cannot be used.
""",
)
@select_option
@calls_option
@click.option(
    "--models",
    is_flag=True,
    help="The kernels of common models (Llama, Qwen, Gemma, GPT-OSS, ViT, ...), by default for sm_80, sm_86, "
    "sm_89 and sm_90.",
)
@archs_option
@click.option("-o", "--out", type=OutputFile(), metavar="FILE", help="The bundle to write: kernels.zip.")
@click.option(
    "--wheel",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write a wheel of the package flashgen-kernels, with the bundle, into this folder.",
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
    models: bool,
    archs: tuple[str, ...],
    out: Path | None,
    wheel: Path | None,
    show: Path | None,
    jobs: int | None,
    specs: Path | None,
    score: str | None,
    as_json: bool,
) -> None:
    """Compile the kernels of --select, --calls or --models, and put them into one file; or show what a
    bundle holds.
    """
    from flashgen.families.snapshot import encode
    from flashgen.host import paths
    from flashgen.toolchain import atomic, bundle, kernelwheel
    from flashgen.toolchain.compile import compiler_version
    from flashgen.tools.cli.output import note

    if [out, wheel, show].count(None) != 2:
        raise click.UsageError(
            "either write a bundle, with -o FILE or --wheel FOLDER, or look into one, with --show FILE"
        )
    if show is not None:
        options = {
            "--select": selections,
            "--calls": calls,
            "--models": models or None,
            "--arch": archs,
            "--jobs": jobs,
            "--specs": specs,
            "--score": score,
        }
        refuse_beside("--show prints what a bundle holds", options)
        _show(show, as_json)
        return
    if models:
        from flashgen.tools.models import ARCHS

        archs = archs or ARCHS
    if models or calls is not None:
        others = {"--select": selections, "--specs": specs, "--score": score}
        which = "--models" if models else "--calls"
        refuse_beside(f"{which} says which kernels", others | ({"--calls": calls} if models else {}))
        if not archs:
            raise click.UsageError("say for which GPU the calls are: --arch sm_90, or native")
    elif not selections:
        raise click.UsageError("say which kernels: --select 'head_dim=128 dtype=bf16 mask_type=causal'")
    # What other bundles hold is not read: one that no longer serves is what this command is to replace.
    os.environ.pop(paths.BUNDLE_VARIABLE, None)
    if wheel is not None:
        wheel.mkdir(parents=True, exist_ok=True)
    atomic.check(out or wheel / kernelwheel.FILENAME)
    results, loaded = (
        _of_calls(calls, archs, jobs)
        if models or calls is not None
        else _built(selections, archs, jobs, specs, score)
    )
    failed = [built for built in results if built.error]
    if failed:
        raise click.ClickException(
            f"{len(failed)} of {len(results)} kernels failed, and nothing was written. "
            f"{failed[0].variant.name} for {failed[0].arch}: {failed[0].failure}"
        )
    # A call would run these as they are, so a bundle has them; `flashgen build` fails.
    for built in results:
        if built.failure:
            note(f"slower than it should be: {built.variant.name} for {built.arch} {built.failure}")
    held, checked = _kernels(results), _specs(loaded)
    entries = {entry.key: built.compiled.to_bytes() for entry, built in zip(held, results, strict=True)}
    entries |= {entry.key: encode(spec.content) for entry, spec in zip(checked, loaded, strict=True)}
    if wheel is not None:
        packed = bundle.packed(compiler_version(), entries, held, checked)
        _print_contents(kernelwheel.write(wheel, packed), compiler_version(), held, checked, "", as_json)
        return
    bundle.write(out, compiler_version(), entries, held, checked)
    _show(out, as_json)


def _built(
    selections: Sequence[str], archs: Sequence[str], jobs: int | None, specs: Path | None, score: str | None
) -> tuple[list[Built], tuple[Spec, ...]]:
    """Every kernel that a chosen variant launches, compiled; and the specs."""
    from flashgen.families.load import load_specs
    from flashgen.tools.cli.kernels import compiled
    from flashgen.tools.cli.options import chosen_variants

    loaded = load_specs(specs)
    chosen = chosen_variants(specs, selections, score=score)
    steps = dict.fromkeys(step for variant in chosen for step in variant.steps)
    return compiled([*steps], archs, jobs), loaded


def _of_calls(
    calls: Path | None, archs: Sequence[str], jobs: int | None
) -> tuple[list[Built], tuple[Spec, ...]]:
    """Every kernel that the calls launch on the architectures, compiled; and the specs. By default
    these are the calls of common models.
    """
    from flashgen.families.load import load_specs
    from flashgen.tools import models
    from flashgen.tools.cli.calls import kernels
    from flashgen.tools.cli.kernels import compiled

    results = []
    for arch in dict.fromkeys(archs):
        chosen = models.calls(arch) if calls is None else calls
        steps = dict.fromkeys(step for main in kernels(chosen, arch) for step in main.steps)
        results += compiled([*steps], [arch], jobs)
    return results, load_specs()


def _kernels(results: Sequence[Built]) -> list[Held]:
    from flashgen.toolchain.bundle import Held
    from flashgen.toolchain.obtain import cache_key

    return [Held(built.variant.name, built.arch, cache_key(built.variant, built.arch)) for built in results]


def _specs(specs: Sequence[Spec]) -> list[HeldSpec]:
    from flashgen.families.bases import whole_text
    from flashgen.families.snapshot import snapshot_key
    from flashgen.toolchain.bundle import HeldSpec

    return [HeldSpec(spec.name, snapshot_key(whole_text(spec.path, spec.text))) for spec in specs]


def _show(path: Path, as_json: bool) -> None:
    from flashgen.toolchain.bundle import Bundle
    from flashgen.toolchain.private import is_trusted

    bundle = Bundle(path)
    bundle.verify()
    refused = "" if is_trusted(path) else bundle.distrust
    _print_contents(path, bundle.compiler, bundle.kernels, bundle.specs, refused, as_json)
    if refused:
        sys.exit(1)


def _print_contents(
    path: Path,
    compiler: str,
    kernels: Sequence[Held],
    checked: Sequence[HeldSpec],
    refused: str,
    as_json: bool,
) -> None:
    from flashgen.toolchain.private import Distrusted
    from flashgen.tools.cli.output import Column, counted, note, print_json, print_table, size

    facts: dict[str, Any] = {"bundle": str(path), "bytes": path.stat().st_size, "compiler": compiler}
    specs = [entry.spec for entry in checked]
    if as_json:
        listed = [{"variant": entry.variant, "arch": entry.arch} for entry in kernels]
        print_json(facts | {"kernels": listed, "specs": specs, "refused": refused})
        return
    print_table([Column("variant"), Column("arch")], [[entry.variant, entry.arch] for entry in kernels])
    count = f"{counted(len(kernels), 'kernel')}, {counted(len(specs), 'checked spec')}"
    note(f"{path}: {count}, {size(facts['bytes'])}, compiled by {compiler}; every entry is intact")
    if refused:
        note(f"FLASHGEN_BUNDLE would not use it: {Distrusted(path, refused).strerror}")
