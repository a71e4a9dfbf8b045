"""The command group; a command's module is imported when the command is used."""

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
from flashgen.host.paths import specs_dir, unused_checkout

if TYPE_CHECKING:
    from collections.abc import Sequence

_AS_JSON = "flashgen.errors_as_json"
COMMANDS = (
    "demo",
    "doctor",
    "list",
    "explain",
    "inspect",
    "simulate",
    "schema",
    "build",
    "bundle",
    "tune",
    "cache",
    "bench",
)


class CommandGroup(click.Group):
    """A group of the modules beside this one; the module `list` holds a click command called `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which a newcomer meets them."""
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"flashgen.tools.cli.{cmd_name}").command

    def resolve_command(
        self, ctx: click.Context, args: Sequence[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or fail with the one that was probably meant."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, [*args])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remember whether errors are to be JSON as well."""
        ctx.meta[_AS_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; an error of flashgen or of the file system is one message and exit code 1, or 2
        where it is about which variants are meant. With --json it is one document on standard output.
        """
        _say_which_copy()
        from flashgen.tools.cli.output import as_json, plain

        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return self._invoke(ctx)
            except click.ClickException as error:
                if not ctx.meta[_AS_JSON]:
                    error.message = plain(error.message)
                    raise
                cause = error.__cause__ or error
                message = str(cause) if isinstance(cause, FlashgenError) else error.format_message()
                said = {"error": message, "kind": type(cause).__name__}
                click.echo(as_json(said))
                ctx.exit(error.exit_code)

    def _invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.Abort as error:
            if not ctx.meta[_AS_JSON]:
                raise
            raise click.ClickException("the question was not answered with yes") from error
        except FlashgenError as error:
            from flashgen.families.selection import SelectionError
            from flashgen.tools.cli.output import fitted

            failure = click.ClickException(fitted(str(error)))
            failure.exit_code = 2 if isinstance(error, SelectionError) else 1
            raise failure from error
        except OSError as error:
            if error.filename is not None:
                raise click.ClickException(f"{error.filename}: {error.strerror}") from error
            if error.errno == errno.EPIPE:  # the output's reader has gone, which click ends quietly
                raise
            _drop_output()
            raise click.ClickException(f"cannot write the output: {error.strerror}") from error


def _say_which_copy() -> None:
    """Print a remark if the user is in a checkout but runs another copy: edits there would change nothing."""
    try:
        here = Path.cwd()
    except OSError:  # the folder was removed
        return
    root = unused_checkout(here)
    if root is not None:
        _show_warning(
            f"{root} is a checkout of flashgen, but this command uses {specs_dir().parent}; "
            f"edits of the checkout's specs, templates and code have no effect. "
            f"To use the checkout: pip install -e {root}"
        )


def _drop_output() -> None:
    """Send what is left of the output nowhere: the interpreter would fail on it once more when it ends."""
    with contextlib.suppress(OSError), Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    from flashgen.tools.cli.output import fitted

    click.echo(fitted(f"Warning: {message}"), err=True)


@click.command(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""
\b
Start here:
  flashgen demo                               see it work on this machine
  flashgen doctor                             what attention() would use here
  flashgen list --select head_dim=128         which kernels there are
  flashgen explain --shape 1x4096x16x128 --arch sm_90
                                              which one a call takes, and why
  flashgen inspect --head-dim 128 --source    read one
  flashgen simulate NAME                      run its CUDA on the CPU
  flashgen build --arch sm_90                 compile before the first call
  flashgen tune --select head_dim=128         find better tiles for this GPU

tune, bench and --arch native need a GPU, and so does explain without --arch; simulate needs a C++ compiler,
inspect --sass nvdisasm. All else runs anywhere.

Exit codes: 0 success, 1 failure, 2 wrong usage. With --json errors are JSON, too.
""",
)
@click.version_option(__version__, message="flashgen %(version)s")
def main() -> None:
    """A kernel compiler for attention.

    YAML specs say which kernels exist. Jinja templates say how a kernel is written. A call compiles the
    kernel that it needs, once; the disk cache keeps it.
    """
