"""The modules of tests/gpu can be imported, and choose their cases, on a machine without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="many of these modules need PyTorch")

TESTS = Path(__file__).parent


def test_tests_on_a_gpu_are_collected():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--collect-only"]
    done = subprocess.run(
        [*command, str(TESTS / "gpu")], cwd=TESTS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    modules = {
        line.partition("::")[0].rpartition("/")[2] for line in done.stdout.splitlines() if "::" in line
    }
    assert len(modules) > len(list((TESTS / "gpu").glob("test_*.py"))) / 2
