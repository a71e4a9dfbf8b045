"""Which of many tests a run has, and their seeds: the seed of the run repeats both."""

from __future__ import annotations

import math
import os
import random
import re
import secrets
from collections import defaultdict
from typing import TYPE_CHECKING

from flashgen.families.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pytest

# Of each file one test of so many.
SHARE = 20
VARIABLE = "FLASHGEN_TEST_SEED"

# The name of a kernel: what its spec computes, then a head dim or a dtype; the GPU is last.
_KERNEL = re.compile(r"([a-z]\w*?)_(?:hdim\d+|fp16|bf16|fp32|int32)_(?:\w+_)?sm\d+$")


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


def is_a_case(item: pytest.Item) -> bool:
    """Whether the test is one of several that do the same with other parameters, and may be left out."""
    return is_drawn(item) and hasattr(item, "callspec") and not looks_for_a_fault(item)


def kernel_of(value: object) -> str:
    """The kernel that a parameter stands for, by its name; "" if it stands for none."""
    if isinstance(value, Variant):
        return value.name
    return value if isinstance(value, str) and _KERNEL.match(value) else ""


def family_of(kernel: str) -> str:
    """What kernels of one spec share of their names: ``flash_fwd sm80``."""
    return f"{_KERNEL.match(kernel)[1]} {kernel.rpartition('_')[2]}"


def traits(item: pytest.Item) -> set[tuple[str, str]]:
    """What a run has to have of a test with these parameters: each check that finds a fault, each family of
    kernels for each architecture.
    """
    found = set()
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        if isinstance(value, Variant):
            found.add(("spec", value.spec))
        elif kernel := kernel_of(value):
            found.add(("family", family_of(kernel)))
        elif hasattr(value, "caught"):
            found |= {("check", check) for check in value.caught[:1]}
    return found


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def draw(
    items: Iterable[pytest.Item],
    seed: int,
    share: int = SHARE,
    of: Callable[[pytest.Item], str] = file_of,
) -> set[pytest.Item]:
    """Of the tests of each file, or of what ``of`` gives, one in ``share``, at least one; and of all tests
    one with each of the traits.

    The cases of a function that compile the same kernel are drawn together, since the kernel takes most of
    their time.
    """
    files = defaultdict(lambda: defaultdict(list))
    for item in items:
        files[of(item)][_together(item)].append(item)
    drawn, others = set(), []
    for name, groups in files.items():
        tests = list(groups.values())
        random.Random(f"{seed} {name}").shuffle(tests)
        count = math.ceil(sum(map(len, tests)) / share)
        for group in tests:
            if count > 0:
                drawn.update(group)
                count -= len(group)
            else:
                others += group
    covered = set().union(*map(traits, drawn))
    random.Random(seed).shuffle(others)
    for item in others:
        if not traits(item) <= covered:
            covered |= traits(item)
            drawn.add(item)
    return drawn


def _together(item: pytest.Item) -> tuple[str, ...]:
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    kernels = tuple(filter(None, map(kernel_of, values)))
    return (function_of(item), *kernels) if kernels else (item.nodeid,)
