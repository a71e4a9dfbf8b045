"""Compilers name lines of the rendered source; the author of a template needs its file and line."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flashgen.errors import CompileError
from flashgen.source.render import line_origins, render

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashgen.families.variant import Variant

_SHOWN = 4


@contextmanager
def template_lines_named(variant: Variant, source: str) -> Iterator[None]:
    """A CompileError of ``source``, the rendered ``variant``, also names the lines of the templates."""
    try:
        yield
    except CompileError as error:
        origins = _origins(variant, source, str(error))
        if not origins:
            raise
        raise CompileError("\n".join([str(error), "in the templates:", *origins])) from None


def _origins(variant: Variant, source: str, message: str) -> list[str]:
    """A line for each error whose template line is known: NVRTC writes file(9), a host compiler file:9:2."""
    file = rf"{re.escape(variant.name)}\.cu"
    numbers = re.findall(rf"^\S*{file}[(:](\d+)(?:\)|:\d+): .*error", message, re.MULTILINE)
    if not numbers or render(variant) != source:  # a template was edited in between
        return []
    places = line_origins(variant)
    return [
        f"  line {number} is made of {places[number - 1]}"
        for number in dict.fromkeys(map(int, numbers))
        if 0 < number <= len(places) and places[number - 1]
    ][:_SHOWN]
