"""Which of many tests a run has, and their seeds: the seed of the run repeats both."""

from __future__ import annotations

import math
import os
import random
import secrets
from collections import defaultdict
from typing import TYPE_CHECKING

from flashgen.families.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

# Of each file one test of so many.
SHARE = 10
VARIABLE = "FLASHGEN_TEST_SEED"


def run_seed() -> int:
    """The seed of this run. Worker processes inherit it, since they have to draw the same tests."""
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = str(secrets.randbits(32))
    return int(os.environ[VARIABLE])


def seed_of(name: str) -> int:
    """The seed of a test in this run."""
    return random.Random(f"{run_seed()} {name}").getrandbits(32)


def is_drawn(item: pytest.Item) -> bool:
    """Whether a run may leave the test out: a test of the simulator, or a case of one marked ``drawn``."""
    if item.path.parent.name == "simulator":
        return True
    return item.get_closest_marker("drawn") is not None and hasattr(item, "callspec")


def looks_for_a_fault(item: pytest.Item) -> bool:
    """Whether a test has the same seed in every run, so that it tells something new after a change alone."""
    return "fixed_seed" in item.fixturenames


def traits(item: pytest.Item) -> set[tuple[str, str]]:
    """What a run has to have of a test with these parameters: each check that finds a fault, each spec of
    kernels.
    """
    found = set()
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        if isinstance(value, Variant):
            found.add(("spec", value.spec))
        elif hasattr(value, "caught"):
            found |= {("check", check) for check in value.caught[:1]}
    return found


def draw(items: Iterable[pytest.Item], seed: int, share: int = SHARE) -> set[pytest.Item]:
    """Of the tests of each file one in ``share``, at least one; and of all tests one with each of the
    traits.
    """
    files = defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    drawn, others = set(), []
    for name, tests in files.items():
        random.Random(f"{seed} {name}").shuffle(tests)
        count = math.ceil(len(tests) / share)
        drawn.update(tests[:count])
        others += tests[count:]
    covered = set().union(*map(traits, drawn))
    random.Random(seed).shuffle(others)
    for item in others:
        if not traits(item) <= covered:
            covered |= traits(item)
            drawn.add(item)
    return drawn
