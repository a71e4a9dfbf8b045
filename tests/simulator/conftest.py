"""What the tests of the simulator share: a compiler and fresh seeds."""

from __future__ import annotations

import os
import secrets

import pytest

from flashgen.simulator import hostcompiler


@pytest.fixture
def compiler():
    """The host compiler; a test that asks for it is skipped where there is none."""
    reason = hostcompiler.why_unavailable()
    if reason:
        pytest.skip(reason)
    return hostcompiler.find()


@pytest.fixture
def fresh_seed():
    """A fresh seed, which pytest shows where a test fails; or FLASHGEN_TEST_SEED, to see a failure again."""
    seed = int(os.environ.get("FLASHGEN_TEST_SEED") or secrets.randbits(32))
    print(f"FLASHGEN_TEST_SEED={seed}")
    return seed
