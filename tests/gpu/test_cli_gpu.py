"""The commands on a real GPU."""

import json

import pytest
from click.testing import CliRunner

from flashgen.runtime.device import available, device, why_unavailable
from flashgen.tools.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason=why_unavailable())]


@pytest.fixture
def flashgen(tmp_path, monkeypatch):
    """Run the command line with an empty cache."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    return lambda *args: CliRunner().invoke(main, [*args], prog_name="flashgen")


def test_demo_runs_generated_kernels_and_is_right(flashgen):
    result = flashgen("demo", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["place"] == device(0).name
    assert [each["variant"] for each in found["results"]] == [each["variant"] for each in found["kernels"]]
    assert all(0 < each["share"] <= 1 for each in found["results"])


def test_what_build_compiles_for_this_gpu_is_what_a_call_finds(flashgen):
    doctor = json.loads(flashgen("doctor", "--json").stdout)["attention"]["gpu"]
    assert doctor["path"] == "kernel"
    built = json.loads(flashgen("build", "--select", doctor["example"], "--arch", "native", "--json").stdout)
    assert [each["cached"] for each in built["kernels"]] == [False]

    import cupy

    import flashgen as package
    from flashgen.runtime import kernel

    kernel._kernels.clear()
    shape = (1, 4096, 16, 128)
    plan = package.plan(*(cupy.zeros(shape, cupy.float16) for _ in range(3)), causal=True)
    assert plan.variant.name == doctor["example"]
    assert kernel.load(plan.variant, device(0)).cached


def test_inspect_compiles_for_this_gpu(flashgen):
    found = json.loads(flashgen("inspect", "--head-dim", "64", "--resources", "--json").stdout)
    assert found["arch"].rstrip("af") == device(0).arch
