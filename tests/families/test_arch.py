import pytest

import flashgen
from flashgen.errors import BadParam
from flashgen.families.arch import KNOWN_ARCHS, range_of, reaches, typical


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


# Architectures since Ampere that NVRTC compiles for.
@pytest.mark.parametrize(
    ("arch", "target"),
    [
        ("sm_80", "sm80"),
        ("sm_86", "sm86"),
        ("sm_87", "sm80"),
        ("sm_89", "sm86"),
        ("sm_90", "sm90"),
        ("sm_100", "sm80"),
        ("sm_103", "sm80"),
        ("sm_110", "sm80"),
        ("sm_120", "sm86"),
        ("sm_121", "sm86"),
    ],
)
def test_a_gpu_of_each_architecture_is_known(arch, target):
    device = typical(arch)
    assert device.arch == arch
    assert device.smem_per_sm - device.smem_per_block == 1024
    major, minor = device.compute_capability
    assert f"sm_{major}{minor}" == arch
    assert flashgen.explain((1, 4096, 16, 128), arch=arch).variant.target == target


def test_an_architecture_without_a_gpu_is_refused_with_those_there_are():
    with pytest.raises(BadParam, match=f"no GPU of architecture 'sm_75' is known; .*{KNOWN_ARCHS[-1]}"):
        typical("sm_75")
