"""What several commands do with kernels: compile many, print a table of them, find the files of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.tools.cli.output import Column, counted, kilobytes, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.families.variant import Variant
    from flashgen.toolchain.build import Built


@dataclass(frozen=True, slots=True)
class Places:
    """Paths of a variant's spec, its template, and its committed source where there is one."""

    spec: str
    template: str
    generated: str | None


def places(variant: Variant) -> Places:
    """Where a variant comes from."""
    from flashgen.host.paths import checkout
    from flashgen.source.closure import search_path

    folders = [Path(folder) for folder in search_path(variant)]
    template = next((path for folder in folders if (path := folder / variant.template).is_file()), None)
    root = checkout()
    generated = root / "generated" / variant.filename if root else None
    return Places(
        str(Path(variant.spec_dir) / f"{variant.spec}.yaml"),
        str(template or variant.template),
        str(generated) if generated and variant.committed and generated.is_file() else None,
    )


def compiled(variants: Sequence[Variant], archs: Sequence[str], jobs: int | None) -> list[Built]:
    """Each variant compiled for the architectures, by default for the ones in its spec; in parallel, with a
    progress bar.
    """
    from flashgen.toolchain.build import build, pairs
    from flashgen.toolchain.compile import check_known
    from flashgen.tools.cli.progress import progress

    check_known(archs)
    targets = pairs(variants, archs)
    with progress(len(targets), f"compiling {counted(len(targets), 'kernel')}") as step:
        return build(targets, jobs, lambda built: step(f"{built.variant.name} {built.arch}"))


def print_kernels(results: Sequence[Built]) -> None:
    """A table of kernels with their resources; one that is not acceptable is red, its spills marked !."""
    columns = [Column("variant"), Column("arch"), Column("regs", number=True), Column("spills", number=True)]
    columns += [Column("smem KB", number=True, optional=True), Column("seconds", number=True)]
    print_table(columns, [_row(built) for built in results], ["red" if b.failure else "" for b in results])


def _row(built: Built) -> list[str]:
    variant, kernel = built.variant, built.compiled
    if kernel is None:
        return [variant.name, built.arch, "-", "-", kilobytes(variant.smem_bytes), "failed"]
    seconds = "cached" if built.cached else f"{built.seconds:.2f}"
    if kernel.registers is None:  # PTX, whose registers the driver will assign
        return [variant.name, built.arch, "-", "-", kilobytes(variant.smem_bytes), seconds]
    return [
        variant.name,
        built.arch,
        str(kernel.registers),
        f"{built.spilled} !" if built.failure and built.spilled else str(built.spilled),
        kilobytes(variant.smem_bytes + (kernel.smem_static or 0)),
        seconds,
    ]
