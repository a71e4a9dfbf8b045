"""Writing such a folder.

clangd reads compile_commands.json and parses the kernel as Clang's CUDA. CUDA's qualifiers, variables and
functions come from headers, and Clang does not read the headers of every CUDA release. So `cuda_names.h`
declares the names that kernels use, and the machine needs no CUDA.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.source.render import headers, include_dirs, render
from flashgen.toolchain.atomic import replace

if TYPE_CHECKING:
    from flashgen.families.variant import Variant

_NAMES = Path(__file__).with_name("cuda_names.h")
_VECTORS = Path(__file__).parents[2] / "simulator" / "include" / "simulator" / "vectors.hpp"
# Warnings that NVRTC does not have.
_QUIET = ("-Wno-unknown-cuda-version", "-Wno-shift-op-parentheses", "-Wno-undefined-internal")


def write(variant: Variant, folder: Path) -> list[Path]:
    """Write the kernel, its headers and compile_commands.json into ``folder``; returns the files.

    Files of these names are replaced. The architecture is the variant's lowest, which older versions of Clang
    know. Raises OSError, and as `render`.
    """
    source = render(variant)
    include = folder / "include"
    kernel = folder / f"{variant.name}.cu"
    texts = {
        kernel: source,
        **{include / name: text for name, text in headers(source, include_dirs(variant)).items()},
        **{include / file.name: file.read_text("utf-8") for file in (_NAMES, _VECTORS)},
    }
    commands = folder / "compile_commands.json"
    texts[commands] = _commands(folder, kernel, variant.min_arch)
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text.encode())
    return [*texts]


def _commands(folder: Path, kernel: Path, arch: str) -> str:
    arguments = ["clang++", "-x", "cuda", f"--cuda-gpu-arch={arch}"]
    arguments += ["--cuda-device-only", "-nocudainc", "-nocudalib", "-std=c++17"]
    arguments += [*_QUIET, "-Iinclude", "-include", "cuda_names.h", "-fsyntax-only", kernel.name]
    entry = {"directory": str(folder.resolve()), "file": kernel.name, "arguments": arguments}
    return json.dumps([entry], indent=2) + "\n"
