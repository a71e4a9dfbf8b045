"""What the tests of the simulator share: a compiler."""

from __future__ import annotations

import pytest

from flashgen.simulator import hostcompiler


@pytest.fixture
def compiler():
    """The host compiler; a test that asks for it is skipped where there is none."""
    reason = hostcompiler.why_unavailable()
    if reason:
        pytest.skip(reason)
    return hostcompiler.find()
