"""The chart at the top of the README is what the JSON of the last runs says."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"

_SPEC = importlib.util.spec_from_file_location("overview", ROOT / "benchmarks" / "overview.py")
overview = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(overview)


@pytest.fixture
def results(tmp_path):
    """A folder with the JSON files of the chart, and the chart."""
    for panel in overview.PANELS:
        shutil.copy(RESULTS / f"{panel.grid}.json", tmp_path)
    shutil.copy(RESULTS / overview.CHART, tmp_path)
    return tmp_path


def test_the_chart_shows_the_last_results():
    assert overview.main(["--check"]) == 0, "run: python benchmarks/overview.py"
    assert f"benchmarks/results/{overview.CHART}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_chart_shows_each_case_of_flashgen_and_of_peers():
    chart = ET.parse(RESULTS / overview.CHART).getroot()
    bars = [bar.text for bar in chart.iterfind(".//{*}rect/{*}title")]
    groups = sum(len(panel.groups) for panel in overview.PANELS)
    assert sum(bar.startswith("flashgen:") for bar in bars) == groups
    assert len(bars) > 2 * groups


def test_another_result_makes_the_chart_stale(results, capsys):
    path = results / "decode.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    for peer in data["rows"][0]["peers"]:
        if peer["peer"] == "flashgen":
            peer["timing"][0] /= 2
    path.write_text(json.dumps(data), encoding="utf-8")
    assert overview.main(["--check", "--results", str(results)]) == 1
    assert "run overview.py" in capsys.readouterr().err
    assert overview.main(["--results", str(results)]) == 0
    assert overview.main(["--check", "--results", str(results)]) == 0
