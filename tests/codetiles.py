"""Specs in which kernels of e4m3 codes and of 16-bit elements have one tile."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from flashgen.host.paths import specs_dir

if TYPE_CHECKING:
    from pathlib import Path


def write_specs(folder: Path) -> None:
    """Write specs of decoding into a folder for FLASHGEN_SPECS: one tile for each head_dim, 64 and 128, with
    as many keys of a KV block for codes as for 16-bit elements. Calls that do not say their splits take
    clusters on Hopper.
    """
    for name in ("flash_varlen_decode_sm80", "flash_varlen_decode_sm90"):
        of_codes = name.replace("decode", "decode_e4m3")
        for stem in (name, of_codes, name.replace("decode", "decode_e4m3_tokens")):
            text = (specs_dir() / f"{stem}.yaml").read_text()
            text = re.sub(r"\n(tune|commit):\n(  - .*\n)*", "\n", text)
            text = text.replace("[112, 128]", "128").replace("also: {192: 128}", "also: {}")
            # Rows of one tile, of two widths, on GPUs with much shared memory.
            text = re.sub(r"\n  - \{(name: \w+|.*sm86|head_dim: (?!64,|128,)).*", "", text)
            text = re.sub(r"\n  sm86: .*", "", text)
            text = re.sub(r"\n  head_dim: \[.*", "\n  head_dim: [64, 128]", text)
            if stem == name:
                text = re.sub(r"block_n: (\d+)", lambda match: f"block_n: {2 * int(match[1])}", text)
            text = re.sub(r"stages: \d, min_blocks: \d", "stages: 2, min_blocks: 1", text)
            if name.endswith("sm80"):
                text = re.sub(r"efficiency: [\d.]+", "efficiency: 0.1", text)
            (folder / f"{stem}.yaml").write_text(text)
