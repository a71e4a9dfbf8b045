"""The pages with tables say what the JSON of the last runs says, and benchmarks/report.py writes it so."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.tools.bench.grids import GRIDS
from flashgen.tools.bench.results import Measurement, Report, Row
from flashgen.tools.bench.timing import Timing

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"

_SPEC = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
report = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(report)


def timing(ms):
    return Timing(ms, 0.99 * ms, 1.01 * ms, 15, 1)


def saved(folder, name, cases, **peers):
    """A report of these cases as JSON in ``folder``, with a time in ms for each peer and a spread of 2 %."""
    rows = [
        Row(
            case,
            {
                peer: Measurement(
                    peer, Timing(ms, 0.99 * ms, 1.01 * ms, 15, 1), agrees=True, variant="a_kernel"
                )
                for peer, ms in peers.items()
            },
        )
        for case in cases
    ]
    Report("some", "TFLOP/s", {}, {"gpu": "H200", "driver": "1.2", "cudnn": 91902}, rows).save(folder / name)
    return rows


def page(*words):
    return "".join(f"Before.\n\n<!-- table: {each} -->\nstale\n<!-- end -->\n\nAfter.\n" for each in words)


def table(folder, words):
    """The lines between the comments, each as its cells."""
    text = report.renewed(page(words), folder)
    assert re.fullmatch(r"Before\.\n\n<!-- table: .* -->\n(.*)<!-- end -->\n\nAfter\.\n", text, re.S)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("path", report.PAGES, ids=lambda path: path.name)
def test_a_page_says_what_the_results_say(path):
    text = path.read_text(encoding="utf-8")
    assert report.renewed(text, RESULTS) == text, "run: python benchmarks/report.py"


def test_the_pages_show_every_result():
    text = "".join(path.read_text(encoding="utf-8") for path in report.PAGES)
    assert report.unused(text, RESULTS) == []
    assert PAGE in report.PAGES


def test_another_result_changes_the_page_and_nothing_but_its_tables(tmp_path):
    copy = tmp_path / "results"
    shutil.copytree(RESULTS, copy)
    data = json.loads((copy / "masks.json").read_text())
    for result in data["rows"][0]["peers"]:
        if result["peer"] == "flashgen":
            result["timing"][0] /= 2
    (copy / "masks.json").write_text(json.dumps(data))
    file = tmp_path / "page.md"
    shutil.copy(PAGE, file)
    others = [path for path in report.PAGES if path != PAGE]
    arguments = [word for path in (file, *others) for word in ("--page", str(path))]
    arguments += ["--results", str(copy)]
    assert report.main([*arguments, "--check"]) == 1
    assert file.read_text() == PAGE.read_text()
    assert report.main(arguments) == 0
    assert report.main([*arguments, "--check"]) == 0
    before, after = PAGE.read_text().splitlines(), file.read_text().splitlines()
    changed = [old for old, new in zip(before, after, strict=True) if old != new]
    assert changed
    assert all(line.startswith("|") for line in changed)


def test_a_result_that_the_page_leaves_out_is_named(tmp_path, capsys):
    copy = tmp_path / "results"
    shutil.copytree(RESULTS, copy)
    saved(copy / "more", "new.json", GRIDS["small"].cases, flashgen=1.0)
    assert report.main(["--check", "--results", str(copy)]) == 1
    assert "more/new.json" in capsys.readouterr().err


def test_cells_have_the_rate_the_ratios_and_the_best(tmp_path):
    cases = GRIDS["prefill"].choose(["fp16"], {"head_dim": [64], "mask": ["none"]}).cases
    saved(tmp_path, "r.json", cases, **{"flashgen": 2.0, "torch-cudnn": 2.5, "flash-attn-4": 1.8})
    header, _, first, *others = table(tmp_path, "cells r.json")
    assert header == ["case", "flashgen, TFLOP/s", "cuDNN", "FlashAttention-4", "best of these"]
    rate = f"{cases[0].flops / 2.0 / 1e9:.1f} ± 1.0 %"
    assert first == ["fp16 d64 full 1k", rate, "1.25", "0.90", "0.90 (FlashAttention-4)"]
    assert len(others) == 4


def test_cells_can_be_times_of_some_cases_with_the_kernel(tmp_path):
    saved(tmp_path, "r.json", GRIDS["prefill"].cases, **{"flashgen": 2.0, "torch-flash": 0.0054})
    lines = table(tmp_path, "cells r.json dtype=bf16 head_dim=64,256 seqlen_q=2048 as=µs with=variant")
    assert lines[0] == ["case", "flashgen, µs", "FlashAttention-2", "variant"]
    assert [line[0] for line in lines[2:]] == [
        f"bf16 d{d} {mask} 2k" for d in (64, 256) for mask in ("full", "causal")
    ]
    assert lines[2][1:] == ["2000 ± 1.0 %", "5.4", "`a_kernel`"]


def test_cells_can_have_the_share_of_the_limit(tmp_path):
    saved(tmp_path, "r.json", GRIDS["prefill"].cases[:1], flashgen=1.0)
    assert table(tmp_path, "cells r.json of=limit")[2][2] == "–"  # of an unknown GPU
    gpu = {"arch": "sm_90", "sms": 132, "clock_mhz": 1980, "memory_gbps": 4814.0}
    loaded = Report.load(tmp_path / "r.json")
    loaded.environment |= gpu
    loaded.save(tmp_path / "r.json")
    header, _, row = table(tmp_path, "cells r.json of=limit")
    assert header[2] == "of the limit"
    assert re.fullmatch(r"\d+% (matrix|exponentials|memory)", row[2])
    with pytest.raises(report.ReportError, match="cost"):
        report.renewed(page("cells r.json of=cost"), tmp_path)


def test_a_baseline_in_microseconds_is_a_difference(tmp_path):
    base, case, *_ = GRIDS["append"].cases
    rows = [
        Row(each, {"flashgen": Measurement("flashgen", timing(ms), agrees=True)})
        for each, ms in ((base, 0.02), (case, 0.0226))
    ]
    Report("append", "µs", {}, {}, rows).save(tmp_path / "r.json")
    assert table(tmp_path, "cells r.json")[2:] == [
        [base.name, "20.0 ± 1.0 %", "–"],
        [case.name, "22.6 ± 1.0 %", f"+2.6 µs ({base.name})"],
    ]


def test_a_kept_case_is_set_against_a_baseline_that_is_not_shown(tmp_path):
    base, ragged = GRIDS["ragged"].cases[:2]
    saved(tmp_path, "r.json", (base, ragged), flashgen=1.0)
    (*_, line) = table(tmp_path, "cells r.json seqlen_q=1000")
    share = (1000 / 1024) ** 2
    assert line[-1] == f"{share:.2f} ({base.name})"
    assert table(tmp_path, "losses r.json")[2] == [
        "fp16",
        "1",
        *[f"{100 * (1 - share):.1f} %"] * 2,
        "5.0 %",
        ragged.name,
    ]


def test_lengths_are_columns_in_order(tmp_path):
    cases = GRIDS["prefill"].choose(["fp16"]).cases
    saved(tmp_path, "r.json", reversed(cases), **{"flashgen": 1.0, "torch-flash": 1.5})
    header, _, *lines = table(tmp_path, "by-length r.json to=torch-flash")
    assert header == ["dtype", "head_dim", "mask", "1k", "2k", "4k", "8k", "16k"]
    assert {tuple(line[:3]) for line in lines} == {
        ("fp16", str(d), mask) for d in (64, 128, 256) for mask in ("full", "causal")
    }
    flops = next(c.flops for c in cases if c.seqlen_q == 2048 and c.mask == "none")
    assert next(line for line in lines if line[2] == "full")[4] == f"{flops / 1e9:.0f} (1.50)"


def test_lengths_are_columns_of_the_cases_that_are_kept(tmp_path):
    times = {"flashgen": 1.0, "flash-attn-4": 1.25, "torch-cudnn": 2.0}
    saved(tmp_path, "r.json", GRIDS["backward"].cases, **times)
    kept = "seqlen_q=1024,4096,16384 dtype=bf16 mask=none,causal score=none deterministic=False"
    header, _, *lines = table(tmp_path, f"by-length r.json to=flash-attn-4 {kept}")
    assert header[3:] == ["1k", "4k", "16k"]
    assert [line[1:3] for line in lines] == [
        [str(d), mask] for d in (32, 64, 96, 128, 192, 256) for mask in ("full", "causal")
    ]
    rates = {
        (str(c.head_dim), "causal" if c.is_causal else "full", c.seqlen_q): f"{c.flops / 1e9:.0f} (1.25)"
        for c in GRIDS["backward"].cases
        if c.name.startswith("bf16") and not c.deterministic
    }
    assert len(rates) == 36
    for _, head_dim, mask, *cells in lines:
        assert cells == [rates[head_dim, mask, n] for n in (1024, 4096, 16_384)]
    assert table(tmp_path, f"by-length r.json to=best {kept}")[2:] == lines
    with pytest.raises(report.ReportError, match="seqlen"):
        report.renewed(page("by-length r.json to=torch-flash seqlen=1024"), tmp_path)


def test_the_summary_has_names_that_people_know(tmp_path):
    cases = GRIDS["small"].cases
    saved(tmp_path, "r.json", cases, **{"flashgen": 2.0, "torch-cudnn": 3.0, "flash-attn-4": 2.2})
    lines = table(tmp_path, "summary r.json")[2:]
    assert [line[0] for line in lines[::2]] == [
        "cuDNN",
        "FlashAttention-4",
        "best of cuDNN, FlashAttention-4",
    ]
    assert lines[-1][1:5] == ["bf16", "4", "1.100", "1.100"]


def test_the_environment_leaves_out_what_is_not_known_and_looks_into_each_file(tmp_path):
    saved(tmp_path, "a.json", GRIDS["small"].cases, flashgen=1.0)
    saved(tmp_path, "b.json", GRIDS["small"].cases, flashgen=1.0)
    data = json.loads((tmp_path / "b.json").read_text())
    data["environment"] |= {"gpu": "other", "flash-attn-4": "4.0"}
    (tmp_path / "b.json").write_text(json.dumps(data))
    lines = table(tmp_path, "environment a.json b.json")[2:]
    assert lines == [["GPU, driver", "H200, 1.2"], ["cuDNN", "9.19.2"], ["flash-attn-4", "4.0"]]


def test_a_peer_that_disagreed_has_no_figure_of_speed(tmp_path):
    (row,) = saved(tmp_path, "r.json", GRIDS["small"].cases[:1], **{"flashgen": 1.0, "torch-cudnn": 2.0})
    row.measurements["torch-cudnn"] = replace(row.measurements["torch-cudnn"], agrees=False)
    Report("some", "TFLOP/s", {}, {}, [row]).save(tmp_path / "r.json")
    assert table(tmp_path, "cells r.json")[2][2] == "–"


def test_algorithms_stand_side_by_side(tmp_path):
    cases = GRIDS["lineage"].cases[:4]
    times = {f"flashgen-{name}": ms for name, ms in (("naive", 43.21), ("v1", 0.4567), ("v3", 0.0321))}
    rows = saved(tmp_path, "r.json", cases, flashgen=1.0, **times)
    for row in rows:
        given = {"workspace_bytes": 1 << 20, "extra_bytes": (1 << 20) + 512, "moved_bytes": 34_400_000_000}
        measured = row.measurements["flashgen-naive"]
        row.measurements["flashgen-naive"] = replace(measured, moved_by="formula", **given)
        row.measurements["flashgen-v3"] = replace(row.measurements["flashgen-v3"], extra_bytes=0)
    Report("some", "TFLOP/s", {}, {}, rows).save(tmp_path / "r.json")
    header, _, first, *others = table(tmp_path, "algorithms r.json show=time")
    assert header == ["case", "naive", "v1", "v3"]
    assert first == [cases[0].name, "43.2 ms", "457 µs", "32.1 µs"]
    assert len(others) == 3
    assert table(tmp_path, "algorithms r.json show=memory")[2][1:] == ["1.05 MB", "–", "0 B"]
    assert table(tmp_path, "algorithms r.json show=bytes num_heads_q=1")[2:] == [
        [case.name, "34.4 GB", "–", "–"] for case in cases[:3]
    ]
    with pytest.raises(report.ReportError, match="speed"):
        report.renewed(page("algorithms r.json show=speed"), tmp_path)


def test_a_chart_is_drawn_beside_its_results(tmp_path):
    saved(tmp_path, "r.json", GRIDS["lineage"].cases, flashgen=1.0, **{"flashgen-v1": 2.0})
    file = tmp_path / "page.md"
    file.write_text(page("chart r.json", "chart missing.json"))
    arguments = ["--page", str(file), "--results", str(tmp_path)]
    assert report.main([*arguments, "--check"]) == 1
    assert not (tmp_path / "r.png").exists()
    assert report.main(arguments) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "](../benchmarks/results/r.png)" in file.read_text()
    assert "Not measured yet: missing.json." in file.read_text()
    assert report.main([*arguments, "--check"]) == 0


def test_host_times_can_be_of_one_library(tmp_path):
    calls = {"attention(q)": [10.0, 9.0], "PyTorch: attention(q)": [11.0, 10.0]}
    (tmp_path / "r.json").write_text(json.dumps({"calls_us": calls}))
    assert len(table(tmp_path, "host-time r.json")) == 4
    lines = table(tmp_path, "host-time r.json library=PyTorch")[2:]
    assert lines == [["PyTorch: `attention(q)`", "11.0 µs", "10.0 µs"]]


def test_what_was_not_measured_is_said(tmp_path):
    assert "Not measured yet: r.json.\n<!-- end -->" in report.renewed(page("losses r.json"), tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (page("sells r.json"), "'sells' is none of environment, cells"),
        (page("cells r.json head_dims=64"), "head_dims"),
        (page("cells r.json with=colour"), "colour"),
        (page("cells r.json dtype=e4m3"), "e4m3"),
        (page("by-length r.json"), "'to'"),
        (page("cells r.json").replace("<!-- end -->", ""), "needs an <!-- end -->"),
        (page("cells r.json", "cells r.json").replace("<!-- end -->", "", 1), "needs an <!-- end -->"),
    ],
)
def test_a_wrong_marker_is_refused(tmp_path, text, said):
    saved(tmp_path, "r.json", GRIDS["small"].cases, flashgen=1.0)
    with pytest.raises(report.ReportError, match=re.escape(said)):
        report.renewed(text, tmp_path)
