"""`flashgen cache`: the compiled kernels that are kept on disk."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import click

from flashgen.tools.cli.options import chosen_variants, json_option, select_option, specs_option
from flashgen.tools.cli.output import plain, say

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
  flashgen cache clear --select head_dim=64 --older-than 30d

FLASHGEN_CACHE_DIR is its folder, FLASHGEN_CACHE_SIZE (500MB, 4GB) its largest size. It is
content-addressed, so an entry is never out of date: a kernel whose source, options, compiler or architecture
changed has another key.

A folder or an entry that another user could have written is not used, unless FLASHGEN_TRUST names the folder.
Files that the cache did not write are never removed.
""",
)
def command() -> None:
    """Look at, check or empty the disk cache of compiled kernels."""


@command.command(
    "info",
    epilog="""
\b
Examples:
  flashgen cache info
  flashgen cache info --json
""",
)
@json_option
def info(as_json: bool) -> None:
    """Where the cache is, how full, and whether it can be written.

    Exit code 1 if it cannot be written and has no entries, and so is of no use.
    """
    from flashgen.toolchain.cache import CubinCache
    from flashgen.tools.cli.output import print_json, print_pairs, size

    state = CubinCache().info()
    if as_json:
        print_json(state._asdict() | {"root": str(state.root)})
    else:
        print_pairs(
            [
                ("folder", str(state.root)),
                ("entries", str(state.entries)),
                ("size", f"{size(state.bytes)} of {size(state.max_bytes)}; the least recently used go first"),
                ("writable", _writable(state)),
            ]
        )
    if state.problem and not state.entries:
        sys.exit(1)


def _writable(state: CacheInfo) -> str:
    if not state.problem:
        return "yes"
    if not state.entries:
        return f"no: {state.problem}"
    return f"no: {state.problem}; its entries are used, other kernels are compiled anew by each process"


@command.command(
    "verify",
    epilog="""
\b
Examples:
  flashgen cache verify
  flashgen cache verify --json
""",
)
@json_option
def verify(as_json: bool) -> None:
    """Read every entry and check it.

    Damaged entries are removed, and built again when needed. Exit code 1 if there was one, or one that cannot
    be read or may be another user's.
    """
    from flashgen.toolchain.cache import CubinCache
    from flashgen.tools.cli.output import print_json

    report = CubinCache().verify()
    if as_json:
        print_json(
            {
                "intact": report.intact,
                "damaged": [str(path) for path in report.damaged],
                "left": [str(path) for path in report.left],
                "unreadable": [str(path) for path, _ in report.unreadable],
            }
        )
    else:
        for path in report.damaged:
            say(f"damaged, {'and cannot be removed' if path in report.left else 'removed'}: {path}")
        for path, why in report.unreadable:
            say(f"not used ({why}): {path}")
        say(f"{report.intact} entries are intact, {len(report.damaged)} were damaged")
    if report.damaged or report.unreadable:
        sys.exit(1)


class Age(click.ParamType):
    """A time span in seconds: `30d`, `12h`, `90m`."""

    name = "age"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", str(value))
        if match is None:
            self.fail(f"{value!r} is not a time span; write 30d, 12h or 90m", param, ctx)
        return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]]


@command.command(
    "clear",
    short_help="Remove every entry, or some.",
    epilog="""
\b
Examples:
  flashgen cache clear                               all of it, after a question
  flashgen cache clear --yes --older-than 30d
  flashgen cache clear --select 'head_dim=64 dtype=fp16'
""",
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@select_option
@click.option("--older-than", type=Age(), metavar="AGE", help="Only what nobody read for so long: 30d, 12h.")
@specs_option
@json_option
def clear(
    yes: bool, selections: tuple[str, ...], older_than: float | None, specs: Path | None, as_json: bool
) -> None:
    """Remove every entry, or with --select and --older-than those that fit both.

    Kernels that a running process has loaded keep working.
    """
    from flashgen.toolchain.cache import CubinCache
    from flashgen.tools.cli.output import print_json

    cache = CubinCache()
    serves: Callable[[bytes], bool] | None = None
    if selections:
        names = {variant.name for variant in chosen_variants(specs, selections)}

        def serves(payload: bytes) -> bool:
            return _kernel(payload) in names

    if not yes:
        which = "these" if serves or older_than else "all"
        click.confirm(plain(f"Remove {which} kernels in {cache.root}?"), abort=True, err=True)
    cleared = cache.clear(serves, older_than or 0.0)
    if as_json:
        print_json({"removed": cleared.removed, "left": cleared.left, "problem": cleared.problem})
    else:
        say(f"{cleared.removed} entries removed from {cache.root}")
        if cleared.left:
            say(f"{cleared.left} entries could not be removed: {cleared.problem}", err=True)
        elif cleared.problem:
            say(f"nothing was looked at: {cleared.problem}", err=True)
    if cleared.problem:
        sys.exit(1)


def _kernel(payload: bytes) -> str | None:
    """The name of the kernel that an entry holds; None for anything else, such as a checked spec."""
    from flashgen.toolchain.compile import Compiled

    try:
        return Compiled.from_bytes(payload).name
    except ValueError:
        return None
