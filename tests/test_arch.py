import pytest

from flashgen.arch import range_of, reaches


@pytest.mark.parametrize(
    ("min_arch", "runs", "does_not", "words"),
    [
        ("sm_80", (80, 86, 90, 120), (75,), "sm_80 or later"),
        ("sm_90a", (90,), (80, 89, 100, 120), "sm_90a alone"),
        ("sm_100f", (100, 103), (90, 110, 120), "sm_100f or later of its family"),
    ],
)
def test_which_architectures_run_what_needs_one(min_arch, runs, does_not, words):
    assert all(reaches(number, min_arch) for number in runs)
    assert not any(reaches(number, min_arch) for number in does_not)
    assert range_of(min_arch) == words
