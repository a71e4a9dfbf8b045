"""What is drawn from many tests: a part, with every trait, the same for the same seed."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import draw
from flashgen.families.load import load_specs
from simulator import faults, faults_sm90


def cases(name, values):
    """Items of a test of the simulator, one for each value of its parameter."""
    return [
        Item(f"tests/simulator/{name}[{at}]", SimpleNamespace(params={"value": value}))
        for at, value in enumerate(values)
    ]


class Item:
    path = Path("tests/simulator/test_some.py")

    def __init__(self, nodeid, callspec=None):
        self.nodeid = nodeid
        if callspec is not None:
            self.callspec = callspec

    def get_closest_marker(self, name):
        return None


FAULTS = (*faults.FAULTS, *faults_sm90.FAULTS)
VARIANTS = [variant for spec in load_specs() for variant in spec.variants()[::20]]


def test_a_part_is_drawn_and_another_seed_draws_another():
    items = cases("test.py::test_it", range(100))
    drawn = [draw.draw(items, seed) for seed in (1, 1, 2)]
    assert [len(each) for each in drawn] == [math.ceil(100 / draw.SHARE)] * 3
    assert drawn[0] == drawn[1] != drawn[2]


def test_each_file_keeps_a_test():
    items = [item for at in range(10) for item in cases(f"test_{at}.py::test_it", range(3))]
    drawn = [item.nodeid.partition("::")[0] for item in draw.draw(items, 1)]
    assert sorted(drawn) == [f"tests/simulator/test_{at}.py" for at in range(10)]


def test_each_check_and_each_spec_is_drawn_from_one_file_or_another():
    for values in (FAULTS, VARIANTS):
        items = [item for at in range(3) for item in cases(f"test_{at}.py::test_it", values)]
        for seed in range(5):
            drawn = draw.draw(items, seed)
            found, asked = (set().union(*map(draw.traits, each)) for each in (drawn, items))
            assert found == asked
            assert len(drawn) < len(items) / draw.SHARE + len(asked) + 3


def test_what_a_run_may_leave_out():
    """Any test of the simulator; of others the cases of those that are marked."""
    case, alone = cases("test.py::test_it", [1])[0], Item("tests/simulator/test.py::test_it")
    assert draw.is_drawn(case)
    assert draw.is_drawn(alone)
    for item in (case, alone):
        item.path = Path("tests/api/test_api.py")
        assert not draw.is_drawn(item)
        item.get_closest_marker = lambda name: object() if name == "drawn" else None
    assert draw.is_drawn(case)
    assert not draw.is_drawn(alone)


def test_tests_have_seeds_of_their_own_which_the_seed_of_the_run_repeats(monkeypatch):
    monkeypatch.setenv(draw.VARIABLE, "7")
    first, other = draw.seed_of("a test"), draw.seed_of("another")
    assert first == draw.seed_of("a test") != other
    monkeypatch.setenv(draw.VARIABLE, "8")
    assert draw.seed_of("a test") != first
    monkeypatch.setenv(draw.VARIABLE, "")
    assert draw.run_seed() == draw.run_seed() > 0


def test_cases_of_one_kernel_are_drawn_together():
    names = [f"flash_fwd_hdim{head_dim}_bf16_sm80" for head_dim in range(32, 512, 32)]
    items = cases("test.py::test_it", names * 3)
    for seed in range(5):
        drawn = draw.draw(items, seed, 5)
        of_kernel = Counter(item.callspec.params["value"] for item in drawn)
        assert len(of_kernel) == 3
        assert set(of_kernel.values()) == {3}


def test_each_function_keeps_a_case_and_each_family_a_kernel():
    names = [variant.name for variant in VARIANTS]
    items = [item for at in range(10) for item in cases(f"test.py::test_{at}", range(20))]
    items += cases("test.py::test_kernels", names)
    for seed in range(5):
        drawn = draw.draw(items, seed, 10, draw.function_of)
        count = Counter(map(draw.function_of, drawn))
        assert [count[f"tests/simulator/test.py::test_{at}"] for at in range(10)] == [2] * 10
        families = {
            draw.family_of(item.callspec.params["value"]) for item in drawn if "kernels" in item.nodeid
        }
        assert families == set(map(draw.family_of, names))


def test_every_variant_has_a_name_with_its_family():
    assert all(draw.kernel_of(name) == name for name in (variant.name for variant in VARIANTS))
    assert draw.family_of("flash_fwd_fp8_hdim64_e4m3_sm90") == "flash_fwd_fp8 sm90"
    assert not draw.kernel_of("64_bf16_causal")


def test_a_test_without_parameters_or_with_a_fixed_seed_is_no_case():
    case, alone = cases("test.py::test_it", [1])[0], Item("tests/simulator/test.py::test_it")
    case.fixturenames = ["fresh_seed"]
    assert draw.is_a_case(case)
    assert not draw.is_a_case(alone)
    case.fixturenames = ["fixed_seed"]
    assert not draw.is_a_case(case)


def test_a_larger_share_draws_more():
    items = cases("test.py::test_it", range(100))
    assert [len(draw.draw(items, 1, share)) for share in (1, 4, 100)] == [100, 25, 1]
