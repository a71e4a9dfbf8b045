"""Environment variables that turn something on or off."""

from __future__ import annotations

import os

from flashgen.errors import BadParam


def switched(variable: str) -> bool | None:
    """Whether an environment variable is 1 or 0; None where it is not set, or empty. Raises BadParam for
    another value.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise BadParam(f"{variable} is {value!r}; expected 0 or 1")
    return value == "1" if value else None
