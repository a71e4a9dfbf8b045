import json

import pytest

from flashgen.tools.bench import GRIDS, Report


@pytest.fixture
def runs(monkeypatch):
    """What flashgen.tools.bench.run was called with."""
    calls = []

    def run(grid, **options):
        calls.append((grid, options))
        return Report("small", "µs", {}, {})

    monkeypatch.setattr("flashgen.tools.bench.run", run)
    return calls


def test_options_reach_the_run(runs, flashgen, tmp_path):
    arguments = "masks --peer torch-flash --peer flashinfer-fa2 --dtype bf16 --where head_dim=64,128"
    arguments += " --where mask=causal --rounds 3 --sample-ms 1.5 --seed 7"
    result = flashgen(
        "bench", *arguments.split(), "--save", tmp_path / "a.json", "--chart", tmp_path / "a.png"
    )
    assert result.exit_code == 0
    ((grid, options),) = runs
    assert grid == "masks"
    assert options.pop("console") is not None
    assert options == {
        "peers": ("torch-flash", "flashinfer-fa2"),
        "dtypes": ("bf16",),
        "where": {"head_dim": ["64", "128"], "mask": ["causal"]},
        "rounds": 3,
        "sample_ms": 1.5,
        "seed": 7,
        "json_path": tmp_path / "a.json",
        "png_path": tmp_path / "a.png",
    }


def test_json_is_the_report_alone(runs, flashgen):
    result = flashgen("bench", "small", "--json")
    assert json.loads(result.stdout)["grid"] == "small"
    assert runs[0][1]["console"] is None


def test_list_names_every_grid_and_peer(flashgen):
    found = json.loads(flashgen("bench", "--list", "--json").stdout)
    assert {name: len(grid["cases"]) for name, grid in found["grids"].items()} == {
        name: len(grid.cases) for name, grid in GRIDS.items()
    }
    text = flashgen("bench", "--list").stdout
    assert all(name in text for name in [*found["grids"], *found["peers"]])


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("nosuchgrid",), 1, "prefill"),
        (("--dtype", "fp8"), 1, "grid prefill has no case with dtype fp8; it has dtype bf16, fp16"),
        (("--where", "head_dim"), 2, "FIELD=VALUE"),
        (("--rounds", "0"), 2, "rounds"),
        (("--sample-ms", "0"), 2, "sample-ms"),
        (("--peer", "nobody"), 1, "torch-flash"),
        (("--chart", "nowhere/a.png"), 2, "there is no folder 'nowhere'"),
        (("--list", "decode", "--dtype", "bf16"), 2, "leave out GRID, --dtype"),
    ],
)
def test_wrong_options_are_told(flashgen, arguments, code, word):
    result = flashgen("bench", *arguments)
    assert result.exit_code == code
    assert word in result.stderr
    assert "Traceback" not in result.stderr


def test_a_disagreement_is_a_failure(runs, flashgen, monkeypatch):
    monkeypatch.setattr(Report, "disagreements", property(lambda self: [("fp16 1x128", "torch-flash")]))
    result = flashgen("bench")
    assert result.exit_code == 1
    assert "torch-flash on fp16 1x128" in result.stderr
