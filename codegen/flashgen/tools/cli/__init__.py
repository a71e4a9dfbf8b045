"""The command line: `flashgen`, also `python -m flashgen`. One module per command."""

from flashgen.tools.cli.app import main

__all__ = ["main"]
