"""Which of many tests that are alike a run has, and their seeds: the seed of the run repeats both."""

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

# One test of so many, and more where a trait would be missing.
SHARE = 12
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
    """Whether a run may leave the test out: a case of a test of the simulator, or of one marked ``drawn``."""
    alike = item.path.parent.name == "simulator" or item.get_closest_marker("drawn") is not None
    return alike and hasattr(item, "callspec")


def traits(values: Iterable[object]) -> set[tuple[str, str]]:
    """What a run has to have of a test with these parameters: each kernel with a fault, each check that finds
    one, each spec of kernels without one.
    """
    found = set()
    for value in values:
        if isinstance(value, Variant):
            found.add(("spec", value.spec))
        elif hasattr(value, "caught"):
            found |= {("kernel", value.variant), *(("check", check) for check in value.caught[:1])}
    return found


def draw(items: Iterable[pytest.Item], seed: int) -> set[pytest.Item]:
    """Of the cases of each test one in SHARE, at least one, and one with each of their traits."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    drawn = set()
    for name, alike in cases.items():
        random.Random(f"{seed} {name}").shuffle(alike)
        covered, chosen, others = set(), [], []
        for item in alike:
            new = traits(item.callspec.params.values()) - covered
            covered |= new
            (chosen if new else others).append(item)
        lacking = math.ceil(len(alike) / SHARE) - len(chosen)
        drawn.update(chosen, others[: max(0, lacking)])
    return drawn
