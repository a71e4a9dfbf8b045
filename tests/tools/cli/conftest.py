"""The commands, run on the tiny family instead of the shipped ones."""

import pytest
from click.testing import CliRunner

from flashgen.tools.cli import main

# Keeps 400 values alive across a barrier, more than the registers of a thread hold.
SPILLING = """
  float kept[400];
#pragma unroll
  for (int i = 0; i < 400; ++i) kept[i] = params.scale_log2 * params.out[i * threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 400; ++i) params.out[i] = element(kept[i] * kept[(i * 7) % 400]);
  const int64_t row ="""


@pytest.fixture
def tiny(tiny_folder, tmp_path, monkeypatch):
    """The folder of the tiny family, whose specs replace the shipped ones; an empty cache."""
    monkeypatch.setattr("flashgen.families.load.specs_dir", lambda: tiny_folder / "specs")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHGEN_SPECS", raising=False)
    return tiny_folder


@pytest.fixture
def spilling(tiny, edit):
    """The tiny family with a kernel that spills."""
    edit("templates/tiny.cu.j2", "  const int64_t row =", SPILLING)
    return tiny


@pytest.fixture
def flashgen():
    """Run the command line in this process; the result has exit_code, stdout and stderr."""

    def run(*args, **env):
        return CliRunner().invoke(main, [*map(str, args)], env=env, prog_name="flashgen")

    return run


@pytest.fixture
def in_terminal(flashgen):
    """Run as in a terminal that many columns wide."""

    def run(columns, *args):
        return flashgen(*args, FORCE_COLOR="1", COLUMNS=str(columns), TERM="xterm-256color", NO_COLOR=None)

    return run
