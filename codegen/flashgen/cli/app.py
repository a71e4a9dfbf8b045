"""The command group; a command's module is imported when the command is asked for."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen import __version__
from flashgen.errors import FlashgenError
from flashgen.paths import specs_dir, unused_checkout

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = ("demo", "doctor", "list", "inspect", "simulate", "build", "tune", "cache", "bench")


class CommandGroup(click.Group):
    """A group of the modules beside this one; the module `list` holds a click command called `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which a newcomer meets them."""
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"flashgen.cli.{cmd_name}").command

    def resolve_command(
        self, ctx: click.Context, args: Sequence[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or fail with the one that was probably meant."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, [*args])

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; an error of flashgen or of the file system is one message and exit code 1."""
        _say_which_copy()
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except FlashgenError as error:
                raise click.ClickException(str(error)) from error
            except OSError as error:
                if error.filename is not None:
                    raise click.ClickException(f"{error.filename}: {error.strerror}") from error
                if error.errno == errno.EPIPE:  # the output's reader has gone, which click ends quietly
                    raise
                _drop_output()
                raise click.ClickException(f"cannot write the output: {error.strerror}") from error


def _say_which_copy() -> None:
    """A remark for whoever stands in a checkout and runs another copy: edits there would change nothing."""
    try:
        here = Path.cwd()
    except OSError:  # the folder was removed
        return
    root = unused_checkout(here)
    if root is not None:
        click.echo(
            f"Warning: {root} is a checkout of flashgen, but this command uses {specs_dir().parent}; "
            f"edits of the checkout's specs, templates and code have no effect. "
            f"To use the checkout: pip install -e {root}",
            err=True,
        )


def _drop_output() -> None:
    """Send what is left of the output nowhere: the interpreter would fail on it once more when it ends."""
    with contextlib.suppress(OSError), Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"Warning: {message}", err=True)


@click.command(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""
\b
Start here:
  flashgen demo                               see it work on this machine
  flashgen doctor                             what attention() would use here
  flashgen list --select head_dim=128         which kernels there are
  flashgen inspect --head-dim 128 --source    read one
  flashgen simulate NAME                      run its CUDA on the CPU
  flashgen build --arch native                compile before the first call
  flashgen tune --select head_dim=128         find better tiles for this GPU

Exit codes: 0 done, 1 failed, 2 not understood.
""",
)
@click.version_option(__version__, message="flashgen %(version)s")
def main() -> None:
    """A kernel compiler for attention.

    YAML specs say which kernels exist, Jinja templates say how one is written, and the one that a call needs
    is compiled when it is first needed, and kept.
    """
