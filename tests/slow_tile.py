"""The shipped spec of Ampere-class kernels, but one point has a slow ordinary tile, and a fast one is there
to be tried: for tests of tuning.
"""

import re

from flashgen.host.paths import specs_dir

POINT = {"head_dim": 64, "dtype": "fp32", "mask_type": "causal", "gqa": "mha"}
SLOW = {"block_m": 32, "block_n": 16, "warps": 2, "loop": "stages", "min_blocks": 2}
FAST = {"block_m": 128, "block_n": 32, "warps": 4, "loop": "stages", "min_blocks": 2}


def write(folder):
    """Write it into ``folder``, which is made.

    Without the tiles of fp32 that have names: they compete with a tuned one by their own efficiency, so that
    a call might take one of them, depending on how much the tuned one happened to gain.
    """
    text = (specs_dir() / "flash_fwd_sm80.yaml").read_text()
    before, after = text[: text.index("tune:\n")], text[text.index("params: [\n") :]
    before = re.sub(r"^  - \{name: \w+, dtype: fp32,.*\n", "", before, flags=re.MULTILINE)
    before = before.replace("tiles:\n", f"tiles:\n  - {_row(POINT | SLOW)}\n")
    folder.mkdir()
    (folder / "flash_fwd_sm80.yaml").write_text(f"{before}tune:\n  - {_row(POINT | FAST)}\n\n{after}")


def _row(members):
    return "{" + ", ".join(f"{key}: {value}" for key, value in members.items()) + "}"
