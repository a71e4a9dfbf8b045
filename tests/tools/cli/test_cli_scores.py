"""--score: kernels with a score modification, in every command that shows or runs kernels."""

import json

import pytest

from flashgen.simulator import hostcompiler

NAME = "flash_fwd_hdim32_fp16_m64_sm80"
CAPPED = "flash_fwd_hdim32_fp16_softcap_m64_sm80"


def test_list_shows_the_modified_variants(flashgen):
    found = json.loads(flashgen("list", "--select", NAME, "--score", "softcap", "--json").stdout)
    assert [each["name"] for each in found] == [CAPPED]
    assert found[0]["score"] == {"name": "softcap", "formula": "cap * tanh(score / cap)"}
    assert found[0]["axes"]["score"] == "softcap"
    assert "score_constant_0" in found[0]["params"]


def test_inspect_prints_the_modified_source(flashgen):
    result = flashgen("inspect", NAME, "--score", "softcap", "--source")
    assert result.exit_code == 0
    assert f"{CAPPED}(const __grid_constant__ Params params)" in result.stdout
    assert "tanh_approx(product * params.score_constant_0)" in result.stdout


def test_a_committed_modification_is_found_by_its_own_name(flashgen):
    result = flashgen("inspect", "flash_fwd_hdim128_fp16_causal_alibi_sm90", "--source")
    assert result.exit_code == 0
    again = flashgen("inspect", "flash_fwd_hdim128_fp16_causal_alibi_sm90", "--score", "softcap")
    assert again.exit_code == 2
    assert "none of the chosen kernels takes a score modification" in again.stderr


@pytest.mark.parametrize(
    "command", [["list"], ["inspect", NAME], ["build", "--no-compile"], ["simulate", NAME]]
)
def test_an_unknown_modification_is_one_message(command, flashgen):
    result = flashgen(*command, "--score", "softmax")
    assert result.exit_code == 2
    assert "there is no score modification 'softmax'; there are softcap, alibi" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_line_of_ones_own(flashgen, tmp_path):
    (tmp_path / "scores.yaml").write_text("scores:\n  mine: {score: score * 2}\n")
    found = flashgen("list", "--specs", str(tmp_path), "--select", NAME, "--score", "mine", "--json")
    assert json.loads(found.stdout)[0]["score"]["formula"] == "score * 2"


def test_a_wrong_line_is_one_message_with_its_place(flashgen, tmp_path):
    path = tmp_path / "scores.yaml"
    path.write_text('scores:\n  mine: {score: "score * speed"}\n')
    result = flashgen("list", "--specs", str(tmp_path))
    assert result.exit_code == 1
    assert f"{path}:2:26: scores.mine.score: unknown name 'speed'" in result.stderr.replace("\n", "")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [["list"], ["doctor"], ["inspect", NAME, "--score", "softcap"]])
@pytest.mark.parametrize("name", ["stream", "append", "q_rotated"])
def test_no_parameter_has_the_name_of_a_keyword(name, command, flashgen, tmp_path):
    path = tmp_path / "scores.yaml"
    path.write_text(f"scores:\n  mine: {{score: score + {name}, params: {{{name}: f32}}}}\n")
    result = flashgen(*command, FLASHGEN_SPECS=str(tmp_path))
    message = f"{path}:2: scores.mine.params.{name}: `{name}` is reserved"
    assert result.exit_code == 1
    assert message in (result.stdout + result.stderr).replace("\n", "")


def test_build_renders_the_modified_sources(flashgen, tmp_path):
    arguments = ("--select", NAME, "--score", "alibi", "--no-compile", "--out", str(tmp_path / "out"))
    assert flashgen("build", *arguments).exit_code == 0
    assert [path.name for path in (tmp_path / "out").glob("*.cu")] == [f"{NAME[:-9]}_alibi_m64_sm80.cu"]


@pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="there is no C++ compiler")
def test_simulate_compares_with_the_modified_reference(flashgen):
    result = flashgen("simulate", NAME, "--score", "alibi_symmetric", "--seqlen-q", "40", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["variant"] == f"{NAME[:-9]}_alibi_symmetric_m64_sm80"
