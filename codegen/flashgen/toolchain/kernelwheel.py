"""The wheel `flashgen-kernels`: a bundle as a Python package, which flashgen finds where it is installed.

A wheel is a zip file of a package and its metadata (https://packaging.python.org/specifications, "Binary
distribution format"). This one has no code. It requires the version of flashgen that made the bundle.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from typing import TYPE_CHECKING

from flashgen import __version__
from flashgen.host.paths import KERNELS_BUNDLE, KERNELS_PACKAGE
from flashgen.toolchain import atomic
from flashgen.toolchain.bundle import LONG_AGO

if TYPE_CHECKING:
    from pathlib import Path

FILENAME = f"{KERNELS_PACKAGE}-{__version__}-py3-none-any.whl"
_INFO = f"{KERNELS_PACKAGE}-{__version__}.dist-info"
_TEXTS = {
    f"{KERNELS_PACKAGE}/__init__.py": '"""Compiled kernels, which flashgen looks for here."""\n',
    f"{_INFO}/METADATA": f"""\
Metadata-Version: 2.1
Name: flashgen-kernels
Version: {__version__}
Summary: Compiled kernels of flashgen, for calls without NVRTC
License: BSD-3-Clause
Requires-Python: >=3.11
Requires-Dist: flashgen=={__version__}
""",
    f"{_INFO}/WHEEL": f"""\
Wheel-Version: 1.0
Generator: flashgen {__version__}
Root-Is-Purelib: true
Tag: py3-none-any
""",
}


def write(folder: Path, bundle: bytes) -> Path:
    """Write the wheel of a bundle into ``folder``; the path of the wheel. It appears when it is whole."""
    members = {name: text.encode() for name, text in _TEXTS.items()} | {
        f"{KERNELS_PACKAGE}/{KERNELS_BUNDLE}": bundle
    }
    record = f"{_INFO}/RECORD"
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in members.items()]
    members[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:  # a bundle is packed already
        for name, data in members.items():
            member = zipfile.ZipInfo(name, LONG_AGO)
            member.external_attr = 0o100644 << 16
            file.writestr(member, data)
    path = folder / FILENAME
    atomic.replace(path, archive.getvalue())
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
