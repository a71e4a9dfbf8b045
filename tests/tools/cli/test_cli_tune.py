import errno
import json

import pytest
import yaml

from fake_bench import FakeBench
from fake_gpu import H200

SELECT = "head_dim=64 dtype=fp16 mask_type=causal gqa=mha"
POINT = {"head_dim": 64, "dtype": "fp16", "mask_type": "causal", "gqa": "mha", "target": "sm80"}


@pytest.fixture
def bench(tiny, edit_spec, monkeypatch):
    """The tiny family as that of the front door, on an H200 where 72 keys a block are best."""
    edit_spec("{prefer: on_request}", "{prefer: least_time}")
    monkeypatch.setattr("flashgen.runtime.device.available", lambda: True)
    monkeypatch.setattr("flashgen.runtime.device.device", lambda ordinal: H200)
    fake = FakeBench()
    fake.ms = lambda variant, case: 0.8 if dict(variant.tile)["block_n"] == 72 else 1.0
    monkeypatch.setattr("flashgen.tools.tune.contest.build", fake.build)
    monkeypatch.setattr("flashgen.tools.cli.tune._bench", lambda *_: fake)
    monkeypatch.setattr("flashgen.tools.tune.save.compiler_version", lambda: "NVRTC 13.0")
    monkeypatch.setattr("flashgen.tools.bench.environment.gpu", lambda: {"driver": "580.10"})
    return fake


def tuned(flashgen):
    listed = json.loads(flashgen("list", "--json").stdout)
    return [each for each in listed if each["tile_name"] == "tuned"]


def test_without_write_nothing_changes(bench, flashgen, tmp_path):
    result = flashgen("tune", "--select", SELECT, "--shapes", "1k,4k")
    assert result.exit_code == 0, result.output
    title, header, *rows, best = [line for line in result.stdout.splitlines() if line]
    assert title == "tiny_fwd_hdim64_fp16_causal_sm80: 14 tiles timed, 0 dropped"
    assert header.split()[:5] == ["block_m", "block_n", "warps", "stages", "min_blocks"]
    assert all(name in header for name in ("regs", "spills", "blocks/SM", "16x1k 32/32 TFLOP/s", "speed"))
    assert [row.split()[-1] for row in rows[:5]] == ["1.250"] * 4 + ["*"]
    assert best == "best: block_m=64 block_n=72 warps=4 stages=2 min_blocks=1 efficiency=1.25"
    assert "--write keeps" in result.stderr
    assert [name for name, _ in bench.timed] == ["16x1k 32/32", "4x4k 32/32"]
    assert not (tmp_path / "tuned").exists()
    assert tuned(flashgen) == []


def test_write_keeps_the_winner_for_this_gpu_and_list_and_doctor_show_it(bench, flashgen, tmp_path):
    found = json.loads(flashgen("tune", "--select", SELECT, "--shapes", "1k,4k", "--write", "--json").stdout)
    path = tmp_path / "tuned" / "nvidia-h200" / "tiny.yaml"
    assert (found["gpu"], found["written"]) == (H200.name, [str(path)])
    (kernel,) = found["kernels"]
    assert kernel["axes"] | {"target": kernel["target"]} == POINT
    assert kernel["best"]["block_n"] == 72
    assert (kernel["gain"], kernel["efficiency"]) == (pytest.approx(1.25), 1.25)
    assert [each["ordinary"] for each in kernel["ranking"]].count(True) == 1
    assert kernel["ranking"][0]["registers"] == 128
    (row,) = yaml.safe_load(path.read_text())["tiles"]
    assert row["measured"]["shapes"] == ["16x1k 32/32", "4x4k 32/32"]
    assert (row["measured"]["compiler"], row["measured"]["driver"]) == ("NVRTC 13.0", "580.10")

    (listed,) = tuned(flashgen)
    assert listed["name"] == "tiny_fwd_hdim64_fp16_causal_tuned_sm80"
    assert listed["tile"] == kernel["best"]
    assert "1 tuned on this GPU" in flashgen("list").stderr
    facts = json.loads(flashgen("doctor", "--json").stdout)["tuned"]
    assert facts["files"] == [str(path)]
    assert facts["variants"] == [listed["name"]]
    assert f"1 tile in use on {H200.name}" in flashgen("doctor").stdout


def test_a_row_goes_when_the_ordinary_tile_wins_it_back(bench, flashgen, tmp_path):
    flashgen("tune", "--select", SELECT, "--write")
    assert tuned(flashgen)
    bench.ms = lambda variant, case: 1.0 if not variant.tile_name else 2.0
    result = flashgen("tune", "--select", "tile=tuned", "--write")  # the point of what is tuned
    assert "the ordinary tile stays" in result.stdout
    assert "nothing to keep" in result.stderr
    assert tuned(flashgen) == []


def test_out_names_another_folder(bench, flashgen, tmp_path):
    flashgen("tune", "--select", SELECT, "--write", "--out", tmp_path / "other")
    assert (tmp_path / "other" / "nvidia-h200" / "tiny.yaml").is_file()
    assert tuned(flashgen) == []
    assert flashgen("list", "--select", "tile=tuned", FLASHGEN_TUNED=str(tmp_path / "other")).exit_code == 0


def test_the_rows_of_a_spec_file_are_tuned_and_stay(bench, tiny, flashgen, tmp_path):
    path = tiny / "specs" / "tiny.yaml"
    before = path.read_text()
    result = flashgen("tune", "--spec", path, "--select", SELECT)
    assert result.exit_code == 0, result.output
    assert "best: " in result.stdout
    assert "nothing was written" not in result.stderr
    assert path.read_text() == before
    refused = flashgen("tune", "--spec", path, "--select", SELECT, "--write")
    assert (refused.exit_code, tuned(flashgen)) == (2, [])
    assert "--write keeps tiles for this GPU" in refused.stderr


def test_what_was_dropped_is_told(bench, flashgen):
    bench.faults = {32: "wrong result: error 3"}
    bench.spilling = (8,)
    result = flashgen("tune", "--select", SELECT)
    assert "wrong result: error 3" in result.stderr
    assert "more were dropped" in result.stderr
    (kernel,) = json.loads(flashgen("tune", "--select", SELECT, "--json").stdout)["kernels"]
    assert {each["tile"]["block_n"] for each in kernel["ranking"]} == {64, 72, 112}
    assert any("spills" in each["why"] for each in kernel["dropped"])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "say what to tune: --select"),
        (["--select", SELECT, "--out", "x"], 2, "--out goes with --write"),
        (["--select", SELECT, "--shapes", "1k,4q"], 1, "'4q' is not a shape"),
        (["--select", "head_dim=65"], 2, "no variant has head_dim=65"),
        (["--select", "tile=m64"], 1, "nothing to tune"),
    ],
)
def test_what_is_not_understood_is_one_message(arguments, code, said, bench, flashgen):
    result = flashgen("tune", *arguments)
    assert result.exit_code == code
    assert said in result.stderr
    assert bench.timed == []


def test_a_damaged_file_stops_the_command_ahead_of_the_work(bench, flashgen, tmp_path):
    path = tmp_path / "other" / "nvidia-h200" / "tiny.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("gpu: [")
    result = flashgen("tune", "--select", SELECT, "--write", "--out", tmp_path / "other")
    assert result.exit_code == 1
    assert f"{path}:2: not valid YAML" in result.stderr
    assert bench.timed == []
    assert path.read_text() == "gpu: ["


def test_what_cannot_be_written_is_told_ahead_of_the_work(bench, tiny, flashgen, tmp_path, monkeypatch):
    path = tmp_path / "other" / "nvidia-h200" / "tiny.yaml"

    def refuse(prefix, dir):
        raise PermissionError(errno.EACCES, "Permission denied", f"{dir}/{prefix}xyz")

    monkeypatch.setattr("flashgen.toolchain.atomic.tempfile.mkstemp", refuse)
    result = flashgen("tune", "--select", SELECT, "--write", "--out", tmp_path / "other")
    assert result.exit_code == 1
    assert f"{path}: Permission denied" in result.stderr
    assert bench.timed == []


def test_a_file_where_a_folder_is_to_be_stops_the_command(bench, flashgen, tmp_path):
    (tmp_path / "file").write_text("")
    result = flashgen("tune", "--select", SELECT, "--write", "--out", tmp_path / "file" / "tuned")
    assert result.exit_code == 1
    assert str(tmp_path / "file") in result.stderr
    assert bench.timed == []


def test_without_a_gpu_the_command_says_so(tiny, flashgen, monkeypatch):
    monkeypatch.setattr("flashgen.runtime.device.available", lambda: False)
    monkeypatch.setattr("flashgen.runtime.device.why_unavailable", lambda: "no such luck")
    result = flashgen("tune", "--select", "head_dim=64")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "tuning needs a GPU: no such luck" in result.stderr


def test_a_row_that_no_longer_fits_is_a_problem_for_the_doctor(bench, flashgen, edit_spec):
    flashgen("tune", "--select", SELECT, "--write")
    edit_spec(
        "{dtype: fp32, gqa: packed}", "{dtype: fp32, gqa: packed}\n  - {mask_type: causal, head_dim: 64}"
    )
    result = flashgen("doctor", "--json")
    assert result.exit_code == 1
    (problem,) = (each for each in json.loads(result.stdout)["problems"] if "tiny.yaml:5: tiles[0]" in each)
    assert "no kernel for this point" in problem
    assert "Warning: " in flashgen("list").stderr
