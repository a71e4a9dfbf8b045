"""Properties of the CUDA text itself: PTX in its place, loads where they are written, no parameter unread."""

import re

import pytest

from flashgen import paths

HEADERS = sorted((paths.templates_dir() / "include" / "flashgen").glob("*.cuh"))
ASM = re.compile(r"\basm\b( volatile)?\s*\((.*?)\);", re.DOTALL)


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_a_load_of_global_memory_stays_behind_the_wait_for_the_grids_ahead(header):
    """Those may write what is loaded, so a load is neither moved ahead of the wait nor served by the cache of
    read-only data.
    """
    for volatile, body in ASM.findall(header.read_text()):
        if "ld.global" in body:
            assert volatile, body
            assert '"memory"' in body
            assert ".nc" not in body
