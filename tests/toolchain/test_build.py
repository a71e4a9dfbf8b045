import dataclasses

import pytest

from flashgen.errors import BadParam, NoCompilerError
from flashgen.families.load import load_specs
from flashgen.families.selection import find_one
from flashgen.toolchain.build import Built, arch_number, build, pairs
from flashgen.toolchain.compile import Compiled

MADE = Compiled("k", "sm_90", b"", "", 40, 0, 0, 0, 16, 0.5)


def test_each_variant_is_built_for_what_its_spec_lists(tiny_variants):
    assert pairs(tiny_variants) == [(v, arch) for v in tiny_variants for arch in v.archs]


@pytest.mark.parametrize("archs", [["sm_86"], ["sm_90", "sm_80"], ["sm_86", "sm_86", "sm_80"]])
def test_given_architectures_restrict_the_lists(tiny_variants, archs):
    expected = {(v, arch) for v in tiny_variants for arch in v.archs if arch in archs}
    found = pairs(tiny_variants, archs)
    assert set(found) == expected
    assert len(found) == len(expected)
    order = [(tiny_variants.index(v), arch_number(arch)) for v, arch in found]
    assert order == sorted(order)


def test_an_unlisted_architecture_gets_every_variant_that_it_reaches(tiny_variants):
    newer = dataclasses.replace(tiny_variants[0], min_arch="sm_100", archs=("sm_100",))
    assert pairs([*tiny_variants, newer], ["sm_89"]) == [(v, "sm_89") for v in tiny_variants]
    with pytest.raises(BadParam, match="need sm_80 or later"):
        pairs(tiny_variants, ["sm_75"])


def test_a_listed_feature_set_answers_to_its_architecture(tiny_variants):
    hopper = dataclasses.replace(tiny_variants[0], min_arch="sm_90a", archs=("sm_90a",))
    assert pairs([hopper], ["sm_90"]) == [(hopper, "sm_90a")]
    assert pairs([hopper], ["sm_90a"]) == [(hopper, "sm_90a")]
    assert pairs([hopper], ["sm_90", "sm_90a"]) == [(hopper, "sm_90a")]
    for other in ("sm_80", "sm_100"):
        with pytest.raises(BadParam, match="need sm_90a"):
            pairs([hopper], [other])
    assert pairs([hopper, tiny_variants[0]], ["sm_100"]) == [(tiny_variants[0], "sm_100")]


def test_wgmmas_that_wait_for_one_another_are_a_failure(tiny_variants):
    log = (
        "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due "
        "to insufficient register resources for the function 'kernel'"
    )
    variant = dataclasses.replace(tiny_variants[0], no_spills=True)
    built = Built(variant, "sm_90a", 1.0, compiled=MADE._replace(log=log))
    assert built.failure.endswith("due to insufficient register resources")
    assert not Built(variant, "sm_90a", 1.0, compiled=MADE).failure
    lax = dataclasses.replace(variant, no_spills=False)  # it has too few registers, and says so
    assert not Built(lax, "sm_90a", 1.0, compiled=MADE._replace(log=log)).failure


def test_only_a_forbidden_spill_is_a_failure(tiny_variants):
    strict = tiny_variants[0]
    lax = dataclasses.replace(strict, no_spills=False)
    spilled = MADE._replace(spill_stores=8, spill_loads=4)
    assert not Built(strict, "sm_90", 1.0, compiled=MADE).failure
    some = dataclasses.replace(strict, no_spills=("sm_80", "sm_90"))
    assert not Built(lax, "sm_90", 1.0, compiled=spilled).failure
    assert not Built(some, "sm_100", 1.0, compiled=spilled).failure
    assert "spills 12 bytes" in Built(some, "sm_80", 1.0, compiled=spilled).failure
    assert "spills 12 bytes" in Built(strict, "sm_90", 1.0, compiled=spilled).failure
    assert Built(lax, "sm_90", 1.0, error="no").failure == "no"


def test_ptx_has_no_resources_and_no_failure(tiny_variants):
    unknown = dict.fromkeys(("registers", "spill_stores", "spill_loads", "stack", "smem_static"))
    built = Built(tiny_variants[0], "compute_90", 1.0, compiled=MADE._replace(**unknown))
    assert built.spilled == 0
    assert built.as_dict()["registers"] is None


def test_results_keep_the_order_and_each_is_heard_of_once(tiny_variants, tmp_path, monkeypatch):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    wanted = pairs(tiny_variants[:4])
    heard = []
    results = build(wanted, jobs=3, on_done=heard.append)
    assert [(built.variant, built.arch) for built in results] == wanted
    assert sorted(map(id, heard)) == sorted(map(id, results))
    assert not any(built.cached or built.failure for built in results)


def test_a_missing_template_stops_no_other_kernel(tiny_variants, tmp_path, monkeypatch):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    missing = dataclasses.replace(tiny_variants[0], template="missing.cu.j2")
    failed, built = build([(missing, "sm_80"), (tiny_variants[0], "sm_80")], jobs=1)
    assert "missing.cu.j2" in failed.failure
    assert not built.failure


def test_a_missing_compiler_is_one_error(tiny_variants, monkeypatch):
    def missing():
        raise NoCompilerError("install it")

    monkeypatch.setattr("flashgen.toolchain.compile.nvrtc", missing)
    with pytest.raises(NoCompilerError, match="install it"):
        build(pairs(tiny_variants))


@pytest.mark.parametrize(
    "name",
    [
        "flash_mla_decode_hdim576_512_bf16_paged_e4m3_packgqa_sm90",
        "flash_mla_decode_hdim576_512_bf16_paged_fp8dsmla_pair_packgqa_sm90",
    ],
)
def test_kernels_that_may_spill_keep_their_wgmmas_in_flight(name):
    """Their speed depends on it more than on some bytes of spills."""
    variants = [variant for spec in load_specs() for variant in spec.variants()]
    (built,) = build(pairs([find_one(variants, name)], ["sm_90"]))
    assert built.compiled is not None
    assert not built.serialized
