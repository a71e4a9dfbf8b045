"""`flashgen cache`: the compiled kernels that are kept on disk."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from flashgen.cli.options import json_option

if TYPE_CHECKING:
    from flashgen.toolchain.cache import CacheInfo


@click.group(
    "cache",
    short_help="The disk cache of compiled kernels.",
    epilog="""
\b
Examples:
  flashgen cache info                 where it is and how full
  flashgen cache verify               read every entry and check it
  flashgen cache clear --yes          start afresh

FLASHGEN_CACHE_DIR puts it elsewhere. It is content-addressed, so an entry is never out of date: a kernel
whose source, options, compiler or architecture changed has another key.
""",
)
def command() -> None:
    """Look at, check or empty the disk cache of compiled kernels."""


@command.command("info")
@json_option
def info(as_json: bool) -> None:
    """Where the cache is, how full, and whether it can be written.

    Exit code 1 when it cannot and has no entries either, so that it is of no use.
    """
    from flashgen.cli.output import print_json, print_pairs, size
    from flashgen.toolchain.cache import CubinCache

    found = CubinCache().info()
    if as_json:
        print_json(found._asdict() | {"root": str(found.root)})
    else:
        print_pairs(
            [
                ("folder", str(found.root)),
                ("entries", str(found.entries)),
                ("size", f"{size(found.bytes)} of {size(found.max_bytes)}; the least recently used go first"),
                ("writable", _writable(found)),
            ]
        )
    if found.problem and not found.entries:
        sys.exit(1)


def _writable(found: CacheInfo) -> str:
    if not found.problem:
        return "yes"
    if not found.entries:
        return f"no: {found.problem}"
    return f"no: {found.problem}; its entries are used, other kernels are compiled anew by each process"


@command.command("verify")
@json_option
def verify(as_json: bool) -> None:
    """Read every entry and check it.

    Damaged ones are removed, and built again when they are needed. Exit code 1 when there was one.
    """
    from flashgen.cli.output import print_json
    from flashgen.toolchain.cache import CubinCache

    report = CubinCache().verify()
    if as_json:
        print_json({"intact": report.intact, "damaged": [str(path) for path in report.damaged]})
    else:
        for path in report.damaged:
            click.echo(f"damaged, removed: {path}")
        click.echo(f"{report.intact} entries are intact, {len(report.damaged)} were damaged")
    if report.damaged:
        sys.exit(1)


@command.command("clear")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
def clear(yes: bool, as_json: bool) -> None:
    """Remove every entry. Kernels that a running process has loaded keep working."""
    from flashgen.cli.output import print_json
    from flashgen.toolchain.cache import CubinCache

    cache = CubinCache()
    if not yes:
        click.confirm(f"Remove all kernels in {cache.root}?", abort=True, err=True)
    cleared = cache.clear()
    if as_json:
        print_json({"removed": cleared.removed, "left": cleared.left, "problem": cleared.problem})
    else:
        click.echo(f"{cleared.removed} entries removed from {cache.root}")
        if cleared.left:
            click.echo(f"{cleared.left} entries could not be removed: {cleared.problem}", err=True)
    if cleared.left:
        sys.exit(1)
