import json
import re

import pytest

CALL = ("explain", "--shape", "1x4096x16x128", "--kv", "1x8192x4x128", "--dtype", "bf16", "--causal")


def test_says_which_and_why_not_the_others(flashgen):
    found = json.loads(flashgen(*CALL, "--arch", "sm_90", "--json").stdout)
    assert (found["arch"], found["gpu"]) == ("sm_90", "H100")
    assert found["variant"].startswith("flash_fwd_hdim128_bf16_causal")
    assert found["variant"].endswith("_sm90")
    text = flashgen(*CALL, "--arch", "sm_90").stdout
    assert re.search(rf"takes +{found['variant']}\n", text)
    for each in found["others"]:
        assert (each["rule"] == "time") == (each["time"] is not None) == (each["variant"] in text)
    everything = flashgen(*CALL, "--arch", "sm_90", "--all").stdout
    assert all(each["variant"] in everything for each in found["others"])
    assert "by dtype" in text


@pytest.mark.parametrize("order", ["none", "ordered"])
def test_gradients_go_by_the_operator(order, flashgen):
    options = ("--operator", "attention_backward", *(["--deterministic"] if order == "ordered" else []))
    found = json.loads(flashgen(*CALL, *options, "--arch", "sm_90", "--json").stdout)
    orders = "ordered or direct" if order == "ordered" else "none, ordered or direct"
    assert found["problem"].endswith(f"dq_order {orders}")
    steps = found["steps"]
    assert [step["variant"].partition("_hdim")[0] for step in steps] == [
        "flash_bwd_preprocess",
        "flash_bwd",
        "flash_bwd_convert",
        "flash_bwd_sum",  # of the parts of a group
    ]
    assert steps[1]["variant"] == found["variant"]
    text = flashgen(*CALL, *options, "--arch", "sm_90").stdout
    assert f"{steps[1]['blocks']:,} thread blocks of {steps[1]['threads']} threads" in text
    assert f"block_m {found['tile']['block_m']}," in text
    assert f"workspace  {found['workspace_bytes']:,} bytes" in text


def test_a_grid_in_clusters_says_so(flashgen):
    call = ("explain", "--shape", "1x4097x2x192", "--dtype", "bf16", "--operator", "attention_backward")
    found = json.loads(flashgen(*call, "--arch", "sm_90", "--json").stdout)
    assert [step["cluster"] for step in found["steps"]] == [1, 2, 1]
    assert found["steps"][1]["blocks"] == 2 * 2 * 33  # heads, blocks of 128 keys
    lines = flashgen(*call, "--arch", "sm_90").stdout.splitlines()
    (line,) = (line for line in lines if "clusters" in line)
    assert f"{found['variant']}: 132 thread blocks of 384 threads in clusters of 2, " in line


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--shape", "1x16x4x64", "--kv", "1x16x3x64"), 1, "positive multiple"),
        (("--shape", "1x16x4x64", "--dtype", "int8"), 1, "q has dtype int8; supported are"),
        (("--shape", "4096"), 1, "q has shape (4096,)"),
        (("--shape", "1x16x4x64", "--operator", "append"), 2, "'attention', 'attention_backward'"),
        (("--shape", "1 4096"), 2, "'1 4096' is not a shape"),
        (("--shape", "1x16x4x64", "--arch", "sm_70"), 1, "no GPU of architecture 'sm_70' is known"),
    ],
)
def test_what_is_no_call(arguments, code, message, flashgen):
    arch = () if "--arch" in arguments else ("--arch", "sm_90")
    result = flashgen("explain", *arguments, *arch)
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("options", "option", "rows", "meant"),
    [
        (("--shape", "1x4096x16"), "--shape", "1 row of 4096 heads of 16", "1x1x4096x16"),
        (("--shape", "1x4x16x64", "--kv", "32x16x64"), "--kv", "32 rows of 16 heads of 64", "1x32x16x64"),
        (("--shape", "1x4x16x64", "--v", "4x16x64"), "--v", "4 rows of 16 heads of 64", "1x4x16x64"),
    ],
)
def test_a_shape_without_a_batch_has_to_be_meant(options, option, rows, meant, flashgen):
    result = flashgen("explain", *options, "--arch", "sm_90")
    assert result.exit_code == 2
    assert result.stdout == ""
    said = " ".join(result.stderr.split())
    assert f"'{option}'" in said or f"{option}:" in said
    assert rows in said
    assert f"write {meant}" in said


@pytest.mark.parametrize("word", ["causal", "causal_bottom_right", "3"])
def test_mask_types_go_by_the_words_of_attention(word, flashgen):
    shown = [
        flashgen("explain", "--shape", "1x64x4x64", "--arch", "sm_90", *options).stdout
        for options in (("--mask-type", word), ("--causal",))
    ]
    assert shown[0] == shown[1]
    assert "causal" in shown[0]


def test_a_window_is_no_mask_type(flashgen):
    result = flashgen("explain", "--shape", "1x64x4x64", "--arch", "sm_90", "--mask-type", "local")
    assert result.exit_code == 2
    assert "a window is window_size" in " ".join(result.stderr.split())


def test_a_call_that_nothing_serves(tiny, edit_spec, flashgen):
    result = flashgen(*CALL, "--arch", "sm_90")
    assert result.exit_code == 1
    assert "no variant serves this call here" in result.stdout


def test_without_a_gpu_an_architecture_is_asked_for(flashgen, monkeypatch):
    monkeypatch.setattr("flashgen.runtime.device.available", lambda: False)
    monkeypatch.setattr("flashgen.runtime.device.why_unavailable", lambda: "there is none")
    result = flashgen(*CALL)
    assert result.exit_code == 1
    assert "pass another, for example arch='sm_90' (--arch sm_90)" in result.stderr
    assert "The GPU cannot be used: there is none" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "family", "pages"),
    [
        (("64x1x32x128", "--kv", "64x8192x8x128", "--kv-lengths"), "flash_varlen_decode", "none"),
        (("64x1x32x128", "--kv", "9000x16x8x128", "--pages", "64x512"), "flash_varlen_decode", "paged"),
        (
            ("9000x32x128", "--kv", "9000x8x128", "--packed", "12", "--max-seqlen-q", "2048", "--causal"),
            "flash_fwd_varlen",
            "none",
        ),
        (("900x32x128", "--kv", "99x16x8x128", "--packed", "12", "--pages", "12x8"), "flash", "paged"),
        (("900x32x128", "--kv", "12x160x8x128", "--packed", "12", "--kv-lengths"), "flash", "none"),
    ],
)
def test_calls_with_lengths(arguments, family, pages, flashgen):
    found = json.loads(flashgen("explain", "--shape", *arguments, "--arch", "sm_90", "--json").stdout)
    assert found["variant"].startswith(family)
    assert found["problem"].endswith(f"pages {pages}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pages", "8x4"), "--pages needs --kv"),
        (("--pages", "8x4", "--kv", "9x16x4x64", "--kv-lengths"), "leave out --kv-lengths"),
        (("--max-seqlen-q", "4"), "give --packed"),
        (("--packed", "-3"), "-3 is not in the range x>=0"),
    ],
)
def test_what_belongs_together(arguments, message, flashgen):
    result = flashgen("explain", "--shape", "8x1x4x64", "--arch", "sm_90", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_errors_name_the_options_of_the_command(flashgen):
    result = flashgen("explain", "--shape", "8x1x4x64", "--arch", "sm_90", "--packed", "3")
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "q has shape (8, 1, 4, 64); with --packed it is (tokens, num_heads_q, head_dim)" in said


@pytest.mark.parametrize(
    ("splits", "blocks"), [("1", 8 * 8), ("3", 3 * 8 * 8), ("every:512", 8 * 8 * 8), ("auto", None)]
)
def test_splits(splits, blocks, flashgen):
    arch = "sm_80" if splits == "auto" else "sm_90"  # on sm_90 a cluster has each tile
    call = ("explain", "--shape", "8x1x32x128", "--kv", "8x4000x8x128", "--arch", arch, "--splits", splits)
    found = json.loads(flashgen(*call, "--json").stdout)
    assert found["variant"].startswith("flash_decode")
    assert found["shares"] in flashgen(*call).stdout
    assert blocks is None or found["shares"].startswith(f"{blocks} thread blocks")


@pytest.mark.parametrize("splits", ["0", "every:0", "many", "every:", "xevery:3"])
def test_splits_that_are_none(splits, flashgen):
    result = flashgen("explain", "--shape", "8x1x4x64", "--arch", "sm_90", "--splits", splits)
    assert result.exit_code == 2
    assert "expected an integer of 1 or more" in " ".join(result.stderr.split())
