"""Recorded calls as the list of `flashgen bundle`, `tune` and `bench`."""

from __future__ import annotations

import json

import numpy as np
import pytest

import flashgen as package
from flashgen.tools.cli import calls


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "calls.json"
    q, k, v = (np.zeros((2, 40, heads, 64), np.float16) for heads in (4, 2, 2))
    with package.record(path):
        package.attention(q, k, v)
        out, lse = package.attention(q, k, v, window_size=(8, 0), return_lse=True)
        package.attention(q, k, v, causal=True, softcap=9.0)
        package.attention(q, k, v, window_size=(8, 8))
        package.attention_backward(out, q, k, v, out, lse, deterministic=True)
        package.merge([(out, lse), (out, lse)])
        package.attention(q[:, :1], k, v, kv_lengths=np.array([3, 40], np.int32))
    return path


def test_a_bundle_has_the_kernels_of_the_calls(path, flashgen, tmp_path, monkeypatch):
    compiled = []

    def stub(variants, archs, jobs):
        compiled.append((set(variants), archs))
        raise SystemExit(3)

    monkeypatch.setattr("flashgen.tools.cli.kernels.compiled", stub)
    result = flashgen("bundle", "--calls", path, "--arch", "sm_80", "-o", tmp_path / "kernels.zip")
    assert result.exit_code == 3, result.stderr
    ((variants, archs),) = compiled
    assert archs == ["sm_80"]
    mains = {main.name for main in calls.kernels(path, "sm_80")}
    assert mains <= {variant.name for variant in variants}
    assert {"merge_fp16_sm80"} < mains


def test_a_bundle_says_what_goes_with_calls(path, flashgen, tmp_path):
    out = tmp_path / "kernels.zip"
    result = flashgen("bundle", "--calls", path, "-o", out)
    assert (result.exit_code, "say for which GPU the calls are: --arch sm_90" in result.stderr) == (2, True)
    result = flashgen("bundle", "--calls", path, "--select", "head_dim=64", "--arch", "sm_80", "-o", out)
    assert (result.exit_code, "leave out --select" in result.stderr) == (2, True)


def test_tuning_has_the_shapes_of_the_calls(path, capsys):
    assert calls.shapes(path) == "2x40x40@4/2"
    assert "left out: 2 calls with lengths, or of other operators" in capsys.readouterr().err


def test_the_bench_has_the_cases_of_the_calls(path, capsys):
    grid = calls.grid(path)
    found = [(case.mask, case.window, case.direction, case.deterministic) for case in grid.cases]
    assert found == [
        ("none", 0, "forward", False),
        ("window", 8, "forward", False),
        ("none", 0, "backward", True),
    ]
    assert {(case.batch, case.seqlen_q, case.num_heads_kv, case.dtype) for case in grid.cases} == {
        (2, 40, 2, "fp16")
    }
    assert len({case.name for case in grid.cases}) == 3
    assert "left out: 2 calls with a dense mask, another window" in capsys.readouterr().err


def test_a_file_without_such_calls_is_named(path, flashgen):
    path.write_text(json.dumps({"kind": "flashgen calls", "calls": []}))
    result = flashgen("bench", "--calls", path)
    assert (result.exit_code, "has no calls that the bench times" in result.stderr) == (1, True)
    result = flashgen("bench", "prefill", "--calls", path)
    assert (result.exit_code, "leave out GRID" in result.stderr) == (2, True)
