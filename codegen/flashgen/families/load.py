"""Loading spec files: which folders hold them, and what was checked before.

``check`` checks a file, which takes a YAML parser and a validator. This module needs neither for a text that
was checked before: the disk cache has its snapshot (``snapshot``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.errors import SpecError
from flashgen.families.bases import MAX_BYTES, NO_FAMILIES, is_of, whole_text
from flashgen.families.model import Spec
from flashgen.host.paths import expanded, read_file, specs_dir

if TYPE_CHECKING:
    from flashgen.families.model import Content
    from flashgen.toolchain.cache import CubinCache

__all__ = ["load_specs"]


def load_spec(path: str | os.PathLike[str], cache: CubinCache | None = None, gpu: str | None = None) -> Spec:
    """Load and check one spec file, or take its snapshot from ``cache`` if it was checked before.

    With the name of a ``gpu``, tiles that the user tuned on it are added; one that does not fit is left out
    with a TunedWarning. Raises SpecError; its message has the file, the line, the key, what was found and
    what is allowed.
    """
    path = Path(path).absolute()
    text = text_of(path)
    tuned = None
    if gpu is not None:
        from flashgen.families.tuned import find

        tuned = find(path.stem, gpu)

    def check() -> Content:
        from flashgen.families.check import check

        return check(path, text, tuned)

    if cache is None:
        content = check()
    else:
        from flashgen.families.snapshot import recall

        # Neither YAML nor a name holds a NUL, so these bytes stand for this name and these texts alone.
        whole = whole_text(path, text)
        known_by = whole if tuned is None else b"\0".join((whole, tuned.gpu.encode(), tuned.text))
        content = recall(known_by, cache, check)
    for problem in content.problems:
        tuned.warn(problem)
    return Spec(path, text, content)


def load_specs(
    extra: str | os.PathLike[str] | None = None,
    cache: CubinCache | None = None,
    gpu: str | None = None,
    operator: str | None = None,
    has_lengths: bool | None = None,
) -> tuple[Spec, ...]:
    """All specs, or an ``operator``'s specs, for calls with lengths, without, or (None) for either. Other
    specs are not checked. The shipped folder comes first, then the folders in ``FLASHGEN_SPECS``, then
    ``extra``.

    ``FLASHGEN_SPECS`` separates folders as ``PATH`` does. A file whose stem an earlier folder has as well
    takes its place; any other file adds a family. ``cache`` keeps what was checked for later processes;
    ``gpu`` is as for `load_spec`.
    Raises SpecError for a wrong file, for a folder without specs, and when two specs would give their kernels
    the same names.
    """
    paths: dict[str, Path] = {}
    for folder in spec_folders(extra):
        paths |= {path.stem: path for path in yaml_files(folder) if path.name not in NO_FAMILIES}
    if operator is not None:
        paths = {
            stem: path for stem, path in paths.items() if is_of(operator, path, text_of(path), has_lengths)
        }
    specs = tuple(load_spec(path, cache, gpu) for path in paths.values())
    owners: dict[tuple[str, str], list[Spec]] = {}
    for spec in specs:
        for target in spec.targets:
            earlier = owners.setdefault((spec.family, target), [])
            for owner in earlier:
                if _share_names(owner, spec):
                    why = f"{owner.path} has a family `{spec.family}` with a target `{target}` as well"
                    raise spec.error(
                        ("family",), f"{why}; rename one of them, or let an axis keep them apart"
                    )
            earlier.append(spec)
    return specs


def text_of(path: Path) -> bytes:
    """The bytes of a file. Raises SpecError."""
    try:
        return read_file(path, MAX_BYTES)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error}") from error


def _share_names(one: Spec, other: Spec) -> bool:
    """Whether kernels of two specs with the same family and target may have the same name: no axis of both
    keeps them apart.
    """
    return all(set(one.axes[axis]) & set(other.axes[axis]) for axis in one.axes.keys() & other.axes.keys())


def spec_folders(extra: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """The shipped folder, those in ``FLASHGEN_SPECS``, and ``extra``."""
    named = os.environ.get("FLASHGEN_SPECS", "").split(os.pathsep)
    folders = [expanded("FLASHGEN_SPECS", part) for part in named if part]
    if extra is not None:
        folders.append(expanded("the spec folder", extra))
    return (specs_dir(), *folders)


def yaml_files(folder: Path) -> list[Path]:
    """The files of a spec folder, at least one. Raises SpecError."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise SpecError(f"{folder}: this spec folder cannot be read: {error.strerror}") from error
    for path in paths:
        if path.suffix == ".yml":
            raise SpecError(f"{path}: spec files end in .yaml; rename it")
    files = [path for path in paths if path.suffix == ".yaml"]
    if not files:
        raise SpecError(f"{folder}: a spec folder needs at least one .yaml file; this one has none")
    return files
