"""Tiles that a user measured: how they join a spec, and what becomes of a file that does not fit."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fake_gpu import H200
from flashgen.errors import TunedWarning
from flashgen.families import tuned
from flashgen.families.load import load_spec, load_specs
from flashgen.families.params import Box
from flashgen.host import paths
from flashgen.operators.attention import normalise
from flashgen.runtime.arrays import view
from flashgen.schedule.dispatch import candidates, offers, select
from flashgen.source.render import render, source_digest
from flashgen.toolchain.cache import CubinCache

ROW = (
    "{head_dim: 64, dtype: fp16, mask_type: causal, gqa: mha, target: sm80, "
    "block_m: 64, block_n: 96, warps: 4, stages: 2, min_blocks: 1, efficiency: 1.25, measured: {gain: 1.25}}"
)
POINT = {"head_dim": 64, "dtype": "fp16", "mask_type": "causal", "gqa": "mha", "target": "sm80"}


@pytest.fixture
def tiny(tiny_folder):
    return tiny_folder / "specs" / "tiny.yaml"


@pytest.fixture
def write():
    """``write(*rows)`` makes the tuned file of the tiny spec for the H200."""

    def make(*rows, gpu=H200.name, spec="tiny"):
        path = tuned.path_for(spec, H200.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([f"gpu: {gpu}", "tiles:", *(f"  - {row}" for row in rows), ""]))
        return path

    return make


def test_a_tuned_tile_is_a_further_tile_of_its_point_alone(tiny, write):
    write(ROW)
    plain, spec = load_spec(tiny), load_spec(tiny, gpu=H200.name)
    (added,) = set(spec.variants()) - set(plain.variants())
    assert set(plain.variants()) < set(spec.variants())
    assert added.name == "tiny_fwd_hdim64_fp16_causal_tuned_sm80"
    assert dict(added.axes) | {"target": added.target} == POINT
    assert dict(added.tile) == {"block_m": 64, "block_n": 96, "warps": 4, "stages": 2, "min_blocks": 1}
    assert (added.threads, added.smem_bytes, added.dispatch.efficiency) == (128, (64 + 4 * 96) * 64 * 2, 1.25)
    assert added.no_spills
    assert not added.committed  # though the spec commits all tiles of some points
    assert added.name in render(added)


def test_rows_of_another_gpu_have_no_part(tiny, write):
    write(ROW)
    assert load_spec(tiny, gpu="NVIDIA H100 PCIe").variants() == load_spec(tiny).variants()


def test_the_efficiency_changes_no_kernel(tiny, write):
    digests = []
    for efficiency in ("1.25", "1.5"):
        write(ROW.replace("efficiency: 1.25", f"efficiency: {efficiency}"))
        digests.append(source_digest(load_spec(tiny, gpu=H200.name).select(**POINT)[-1]))
    assert digests[0] == digests[1]


WRONG = {
    "not a number of threads": (ROW.replace("warps: 4", "warps: 64"), 3, "2048 threads"),
    "too much shared memory": (ROW.replace("block_n: 96", "block_n: 960"), 3, "at most 166912"),
    "a tile key that the spec has no more": (ROW.replace("warps:", "groups:"), 3, "groups: unknown key"),
    "a tile key that is missing": (ROW.replace("stages: 2, ", ""), 3, "`stages` is missing"),
    "an axis value that went": (ROW.replace("causal", "local"), 3, "'local'; allowed: causal, none"),
    "an excluded point": (
        ROW.replace("fp16", "fp32").replace("gqa: mha", "gqa: packed"),
        3,
        "no kernel for this point",
    ),
    "a list of values": (ROW.replace("gqa: mha", "gqa: [mha]"), 3, "gqa"),
    "a rate of zero": (ROW.replace("efficiency: 1.25", "efficiency: 0"), 3, "efficiency"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_row_that_does_not_fit_is_left_out_with_its_line_and_the_others_stay(case, tiny, write, tmp_path):
    wrong, line, said = WRONG[case]
    good = ROW.replace("mask_type: causal", "mask_type: none")
    path = write(wrong, good)
    cache = CubinCache(tmp_path / "cache")
    for source in (None, cache, cache):  # checked, checked and stored, known again
        with pytest.warns(TunedWarning, match=re.escape(f"{path}:{line}: tiles[0]")) as caught:
            spec = load_spec(tiny, source, H200.name)
        (warning,) = caught
        assert said in str(warning.message)
        assert "flashgen tune" in str(warning.message)
        assert [v.mask_type for v in spec.variants() if v.tile_name == "tuned"] == ["none"]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "mapping"),
        ("gpu: [\n", 2, "not valid YAML"),
        (f"gpu: NVIDIA H100\ntiles:\n  - {ROW}\n", 1, "found 'NVIDIA H100'; the GPU is 'NVIDIA H200'"),
        (f"gpu: NVIDIA H200\nrows:\n  - {ROW}\n", 2, "rows: unknown key"),
    ],
)
def test_a_damaged_file_is_left_out(text, line, said, tiny, write):
    path = write(ROW)
    path.write_text(text)
    with pytest.warns(TunedWarning, match=re.escape(f"{path}:{line}: ")) as caught:
        spec = load_spec(tiny, gpu=H200.name)
    assert said in str(caught[0].message)
    assert spec.variants() == load_spec(tiny).variants()


def test_a_file_that_cannot_be_read_is_left_out(tiny):
    path = tuned.path_for("tiny", H200.name)
    path.mkdir(parents=True)  # a folder in its place
    with pytest.warns(TunedWarning, match=r"cannot be read"):
        assert load_spec(tiny, gpu=H200.name).variants() == load_spec(tiny).variants()


def test_two_rows_for_one_point_are_one_too_many(tiny, write):
    write(ROW, ROW.replace("block_n: 96", "block_n: 32"))
    with pytest.warns(TunedWarning, match="a second row for head_dim=64"):
        (*_, found) = load_spec(tiny, gpu=H200.name).select(**POINT)
    assert found.tile_value("block_n") == 96


def test_a_box_that_no_copy_can_bring_is_an_error_of_the_row(write):
    spec = Path(__file__).parents[1] / "fixtures" / "tma" / "specs" / "copy_tma.yaml"
    ordinary = load_spec(spec).variants()[0]
    tile = dict(ordinary.tile) | {"block_m": 512}
    members = dict(ordinary.axes) | {"target": ordinary.target} | tile | {"efficiency": 1.0}
    path = write("{" + ", ".join(f"{key}: {value}" for key, value in members.items()) + "}", spec="copy_tma")
    with pytest.warns(TunedWarning, match=re.escape(f"{path}:3: tiles[0]: ")):
        assert load_spec(spec, gpu=H200.name).variants() == load_spec(spec).variants()


def test_an_edited_file_is_seen_and_a_known_one_needs_no_parser(tiny, write, tmp_path):
    write(ROW)
    cache = CubinCache(tmp_path / "cache")
    before = load_spec(tiny, cache, H200.name)
    assert load_spec(tiny, cache).content != before.content
    write(ROW.replace("block_n: 96", "block_n: 32"))
    assert load_spec(tiny, cache, H200.name).select(**POINT)[-1].tile_value("block_n") == 32
    program = """
import sys
from pathlib import Path
from flashgen.toolchain.cache import CubinCache
from flashgen.families.load import load_spec
spec = load_spec(sys.argv[1], CubinCache(Path(sys.argv[2])), sys.argv[3])
print([v.tile_value("block_n") for v in spec.variants() if v.tile_name == "tuned"])
print({"yaml", "filelock", "flashgen.families.check"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tiny, cache.root, H200.name],
        env={**os.environ, "PYTHONPATH": str(Path(tuned.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["[32]", "set()"]


def call(seqlen=4096, batch=4, **changes):
    import numpy as np

    q = view(np.empty((batch, seqlen, 16, 128), np.float16), "q")
    kv = view(np.empty((batch, seqlen, changes.pop("heads_kv", 16), 128), np.float16), "k")
    return normalise(q, kv, kv, **changes)


@pytest.fixture
def shipped(write):
    """``shipped(gqa=...)``: the shipped specs, one point of the Hopper family tuned for the H200."""

    def load(gqa="mha", efficiency=1.05, head_dim=128, mask_type="local", q_stages=2):
        point = f"head_dim: {head_dim}, head_dim_v: {head_dim}, dtype: fp16, mask_type: {mask_type}"
        tile = f"block_m: 128, block_n: 64, q_stages: {q_stages}, stages: 2, efficiency: {efficiency}"
        tile += f", panel: 64, producer_registers: {88 if mask_type == 'dense' else 24}"
        write(f"{{{point}, gqa: {gqa}, target: sm90, {tile}}}", spec="flash_fwd_sm90")
        return load_specs(gpu=H200.name)

    return load


def test_dispatch_takes_the_tuned_tile_where_it_would_have_taken_the_ordinary_one(shipped):
    for efficiency in (1.05, 0.9):  # measured, so it stands in for the ordinary one whatever the figure
        specs = shipped(efficiency=efficiency)
        problem = call(window_size=(64, 0))
        chosen = select(problem, H200, offers(problem, H200, specs))
        assert chosen.tile_name == "tuned"
        left = candidates(problem, H200, offers(problem, H200, specs))
        assert "" not in {variant.tile_name for variant in left if variant.spec == "flash_fwd_sm90"}
    for other in (call(), call(window_size=(64, 0), heads_kv=2)):
        assert select(other, H200, offers(other, H200, specs)).tile_name != "tuned"


def test_a_tile_for_small_problems_still_serves_them(shipped):
    specs = shipped()
    small = call(seqlen=128, batch=1, window_size=(64, 0))
    assert select(small, H200, offers(small, H200, specs)).tile_name == "m64"


def test_a_tuned_grouping_replaces_only_its_own(shipped):
    problem = call(window_size=(64, 0), heads_kv=2)
    specs = shipped("packed")
    found = candidates(problem, H200, offers(problem, H200, specs))
    left = {(v.gqa, v.tile_name) for v in found if v.spec == "flash_fwd_sm90"}
    assert {("gqa", ""), ("packed", "tuned")} <= left
    assert ("packed", "") not in left


def test_a_tuned_tile_that_cannot_serve_leaves_the_ordinary_one_in(shipped):
    """A group of 128 heads fills the 128 rows of both, but not the 64 that a copy of the output writes."""
    import numpy as np

    specs = shipped("packed", head_dim=64, mask_type="dense")
    q = view(np.empty((1, 512, 128, 64), np.float16), "q")
    kv = view(np.empty((1, 512, 1, 64), np.float16), "k")
    problem = normalise(q, kv, kv, mask=view(np.zeros((512, 512), bool), "mask"))
    left = {(v.gqa, v.tile_name) for v in candidates(problem, H200, offers(problem, H200, specs))}
    assert ("packed", "") in left
    assert ("packed", "tuned") not in left


@pytest.mark.parametrize("q_stages", [1, 2])
def test_a_tuned_tile_has_the_parameters_of_its_own_tile_keys(q_stages, shipped, tmp_path):
    """With two tiles of Q the output leaves by a tensor map. The ordinary tile here has the other number."""
    point = {1: {"head_dim": 128, "mask_type": "local"}, 2: {"head_dim": 64, "mask_type": "dense"}}[q_stages]
    shipped(**point, q_stages=q_stages)
    cache = CubinCache(tmp_path / "cache")
    for source in (None, cache, cache):  # checked, checked and stored, known again
        spec = load_spec(paths.specs_dir() / "flash_fwd_sm90.yaml", source, H200.name)
        made = spec.select(**point, head_dim_v=point["head_dim"], dtype="fp16", gqa="mha")
        stages = {v.tile_name: v.tile_value("q_stages") for v in made}
        assert (stages[""], stages["tuned"]) == (3 - q_stages, q_stages)
        for variant in made:
            params = {param.name: param for param in variant.params}
            mapped = variant.tile_value("q_stages") == 2
            assert params["out"].ctype == ("tensor_map" if mapped else "element*")
            assert params["out"].box == (Box(64, 64) if mapped else None)
            assert ("out_row_stride" in params) == (not mapped)
            assert len(params) == len(variant.params)


def test_a_plan_takes_the_tuned_tile_and_an_unusable_one_is_passed_over(shipped, fake_gpu, monkeypatch):
    import flashgen
    from fake_gpu import array
    from flashgen.call import backends
    from flashgen.errors import CompileError
    from flashgen.runtime import kernel

    shipped()
    backends._specs.cache_clear()
    shape = (4, 4096, 16, 128)
    q, k, v, out = (array(shape, address=(n + 1) << 32) for n in range(4))
    plan = flashgen.plan(q, k, v, window_size=(1024, 0), out=out)
    assert plan.variant.tile_name == "tuned"

    load = kernel.load

    def refuse(variant, device):
        if variant.tile_name == "tuned":
            raise CompileError("static_assert")
        return load(variant, device)

    monkeypatch.setattr(kernel, "load", refuse)
    with pytest.warns(TunedWarning, match=r"flashgen tune --select.*static_assert"):
        plan = flashgen.plan(q, k, v, window_size=(1024, 0), out=out)
    assert plan.variant.tile_name == ""
    backends._specs.cache_clear()


def test_files_lie_by_gpu_in_the_users_folder(monkeypatch, tmp_path):
    assert tuned.slug("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"
    assert tuned.slug("../..") == "gpu"
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path))
    assert tuned.path_for("s", "NVIDIA H200") == tmp_path / "nvidia-h200" / "s.yaml"
    monkeypatch.delenv("FLASHGEN_TUNED")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    if sys.platform == "linux":
        assert paths.tuned_dir() == tmp_path / "config" / "flashgen" / "tuned"


def test_where_nothing_is_tuned_no_gpu_is_looked_for(monkeypatch):
    def unwanted():
        raise AssertionError("looked for a GPU")

    monkeypatch.setattr("flashgen.runtime.device.available", unwanted)
    assert tuned.present_gpu() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_specs(gpu=H200.name)
