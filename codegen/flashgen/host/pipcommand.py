"""What to type to install a library that is missing."""

from __future__ import annotations

import re

from flashgen.host.paths import checkout


def command(extra: str) -> str:
    """The pip command for an extra of flashgen, such as "cuda13".

    It names the checkout, or the packages that the extra stands for: an index may not know flashgen itself.
    """
    root = checkout()
    if root is not None:
        return f"pip install -e '{root}[{extra}]'"
    # Imports a parser of e-mail, which costs a first call as much as the rest of flashgen.
    import importlib.metadata

    try:
        requirements = importlib.metadata.requires("flashgen") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    marked = re.compile(rf"extra == ['\"]{extra}['\"]")
    packages = [
        requirement.split(";")[0].strip() for requirement in requirements if marked.search(requirement)
    ]
    if not packages:
        return f"reinstall flashgen with its extra {extra}"
    return "pip install " + " ".join(f"'{package}'" for package in packages)


def compiler() -> str:
    """How to install CuPy and NVRTC."""
    return f"{command('cuda13')} installs it (cuda12 for a driver older than 580: {command('cuda12')})"
