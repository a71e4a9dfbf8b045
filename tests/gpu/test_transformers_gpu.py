"""The example of generation by transformers, on a GPU in a CUDA graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


def test_generation_by_transformers_has_the_tokens_of_sdpa():
    command = [sys.executable, ROOT / "examples" / "transformers_generate.py", "--tiny", "--new-tokens", "24"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens as with SDPA, 3 prompts, 24 tokens each" in done.stdout
    assert "flashgen, a CUDA graph" in done.stdout
