"""A kernel as a folder that an editor understands: its source, its headers, and a compile_commands.json."""

from flashgen.tools.editor.folder import write

__all__ = ["write"]
