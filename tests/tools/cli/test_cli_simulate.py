import json
import re

import numpy as np
import pytest

from flashgen.errors import SimulationError
from flashgen.simulator import hostcompiler
from flashgen.tools.cli.simulate import command

NAME = "flash_fwd_hdim64_fp16_causal_m64_sm80"


@pytest.fixture(autouse=True)
def compiler():
    reason = hostcompiler.why_unavailable()
    if reason:
        pytest.skip(reason)


def test_a_variant_is_run_and_described(flashgen):
    result = flashgen("simulate", NAME, "--seqlen-q", 100, "--seqlen-kv", 200, "--seed", 7, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["variant"], found["seed"], found["shape"], found["seqlen_kv"]) == (
        NAME,
        7,
        [1, 100, 2, 64],
        200,
    )
    for name in ("out", "lse"):
        assert 0 < found[name]["error"] < found[name]["bound"]
        assert 0 < found[name]["share"] < 1
    assert found["counters"]["mma_m16n8k16_f16"] > 0
    assert found["counters"]["global_bytes_written"] == 100 * 2 * (64 * 2 + 4)
    assert found["tiles"]["skipped_share"] == 1
    kinds = {access["kind"]: access for access in found["accesses"]}
    assert "ldmatrix" in kinds["ldmatrix"]["source"]
    assert kinds["ldmatrix"]["conflicts"] == 0


def test_a_person_reads_the_same(flashgen):
    text = flashgen("simulate", NAME, "--seeds", 3).stdout
    assert re.search(r"^  repeatable +yes$", text, re.MULTILINE)
    for part in (NAME, "1x128x2x64", "3 seeds", "mma", "masked ones skipped", "conflicts", "of its bound"):
        assert part in text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flash_fwd_hdim32_fp16_local_m64_sm80", ("--window", 20, 3)),
        ("flash_fwd_hdim32_bf16_dense_m64_packgqa_sm80", ("--heads", 6, "--kv-heads", 2, "--batch", 2)),
        ("flash_fwd_hdim32_fp32_m64_gqa_sm80", ("--head-dim", 20, "--seqlen-kv", 0)),
    ],
)
def test_options_of_other_variants(name, options, flashgen):
    result = flashgen("simulate", name, "--seqlen-q", 50, *options, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ok"]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("append_fp16_sm80", ("--heads", 6), (3, [3, 128])),
        ("append_fp16_sm80", ("--kv-heads", 3), (3, [3, 128])),
        ("append_fp16_sm80", (), (1, [1, 128])),
        ("merge_fp16_sm80", (), (None, [2, 128])),
        ("merge_fp16_sm80", ("--kv-heads", 3), (None, [3, 128])),
        ("flash_fwd_hdim32_fp16_gqa_sm80", (), (1, [4, 32])),
        ("flash_fwd_hdim32_fp16_sm80", ("--heads", 3), (3, [3, 32])),
    ],
)
def test_heads_are_those_that_the_help_says(name, options, expected, flashgen):
    found = json.loads(
        flashgen("simulate", name, "--seqlen-q", 4, "--seqlen-kv", 4, *options, "--json").stdout
    )
    assert (found.get("num_heads_kv"), found["shape"][2:]) == expected
    said = {option.name: option.help for option in command.params if hasattr(option, "help")}
    assert "[default: --kv-heads, if given; else 2, or 4 for grouped heads]" in said["heads"]
    assert "[default: --heads; 1 for grouped heads, half of --heads for append]" in said["kv_heads"]
    assert "[default: from NAME; 128 for append and merge]" in said["head_dim"]


@pytest.mark.parametrize("options", [("--mask-type", "causal"), ("--window", 1, 1)], ids=lambda x: x[0])
@pytest.mark.parametrize("name", ["merge_fp16_sm80", "append_bf16_halves_wide_paged_sm80"])
def test_a_kernel_without_masks_takes_none(name, options, flashgen):
    result = flashgen("simulate", name, *options)
    assert result.exit_code == 1
    assert f"{name} has no masks, so {options[0]} does not fit" in " ".join(result.output.split())


def test_a_diagonal_may_start_top_left(flashgen):
    """With 40 keys more than queries, that hides so many tiles more."""
    shown = [
        json.loads(flashgen("simulate", NAME, "--seqlen-kv", 168, *options, "--seed", 7, "--json").stdout)
        for options in ((), ("--mask-type", "causal"), ("--mask-type", "causal_top_left"))
    ]
    assert all(found["ok"] for found in shown)
    tiles = [found["tiles"]["masked"] for found in shown]
    assert tiles[0] == tiles[1] < tiles[2]


def test_debugging_keeps_source_and_object(flashgen, tmp_path):
    result = flashgen("simulate", NAME, "--seqlen-q", 16, "--seqlen-kv", 16, "--debug", tmp_path)
    assert result.exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} >= {f"{NAME}.cu", f"{NAME}.so"}


@pytest.mark.parametrize("command", [("simulate", NAME), ("bench",)])
def test_a_seed_is_no_negative_number(command, flashgen):
    result = flashgen(*command, "--seed", -5)
    assert result.exit_code == 2
    assert "Invalid value for '--seed': -5 is not in the range x>=0" in " ".join(result.stderr.split())


def test_what_a_gpu_forbids_is_one_message_and_a_failure(flashgen, monkeypatch):
    def fault(*arguments, seed, **options):
        raise SimulationError("block 0, thread 5: race", check="race")

    monkeypatch.setattr("flashgen.simulator.example.run_steps", fault)
    result = flashgen("simulate", NAME, "--seed", 11)
    assert result.exit_code == 1
    # A slow compile is announced.
    said = [line for line in result.stderr.splitlines() if not line.startswith("compiling ")]
    assert said == ["Error: block 0, thread 5: race", "seed 11"]


@pytest.fixture
def spoil(monkeypatch):
    """``spoil(output)``: element [0, 3, 1, 5] of it, counted among the outputs, depends on the seed."""
    from flashgen.simulator import example

    right = example.run_steps

    def spoilt(output):
        def run_steps(libraries, main, given, *, seed, device):
            reports = right(libraries, main, given, seed=seed, device=device)
            example.outputs(given)[output][0, 3, 1, 5] += np.float16(seed)
            return reports

        monkeypatch.setattr(example, "run_steps", run_steps)

    return spoilt


def test_wrong_and_unrepeatable_results_are_failures(flashgen, spoil):
    spoil(0)
    found = json.loads(flashgen("simulate", NAME, "--seed", 1, "--seeds", 2, "--json").stdout)
    assert not found["ok"]
    assert not found["repeatable"]
    assert found["out"]["error"] > found["out"]["bound"]
    result = flashgen("simulate", NAME, "--seed", 1, "--seeds", 2)
    assert result.exit_code == 1
    assert "the order of threads shows" in result.stdout


@pytest.mark.parametrize("output", [0, 1, 2])
def test_every_gradient_has_to_repeat(output, flashgen, spoil):
    spoil(output)
    name = "flash_bwd_hdim32_fp16_ordered_sm80"
    arguments = ("--seed", 1, "--seeds", 2, "--seqlen-q", 16, "--seqlen-kv", 16, "--json")
    assert not json.loads(flashgen("simulate", name, *arguments).stdout)["repeatable"]


@pytest.mark.parametrize("name", ["naive_scores", "naive_softmax", "naive_output", "flash_v1"])
def test_a_kernel_of_several_runs_with_the_others_of_its_call(name, flashgen):
    name = f"{name}_hdim64_bf16_causal_sm80"
    arguments = ("simulate", name, "--seqlen-q", 70, "--seqlen-kv", 90)
    found = json.loads(flashgen(*arguments, "--json").stdout)
    assert found["ok"]
    assert found["variant"] == name
    # Of the steps only the one that was asked for is described: 2 heads, tiles of 64 rows, 4 rows, a head.
    blocks = {"naive_softmax": 2 * 18, "flash_v1": 2}
    assert found["counters"]["blocks"] == blocks.get(name[: name.index("_hdim")], 2 * 2)
    text = flashgen(*arguments).stdout
    assert ("masked ones skipped" in text) == ("tiles" in found) == name.startswith("naive_scores")


def test_a_step_that_combines_runs_behind_the_one_whose_parts_it_takes(flashgen):
    arguments = ("simulate", "flash_combine_hdim64_bf16_sm80", "--seqlen-q", 1, "--multiprocessors", 3)
    found = json.loads(flashgen(*arguments, "--seqlen-kv", 5000, "--json").stdout)
    assert found["ok"]
    assert found["counters"]["blocks"] == 2  # a row of each head
    assert found["counters"]["mma_m16n8k16_bf16"] == 0
    result = flashgen(*arguments, "--seqlen-kv", 100)
    assert result.exit_code == 1
    assert "no tile is split here" in result.stderr


@pytest.mark.parametrize(
    "name",
    [
        "flash_fwd_varlen_hdim32_fp16_causal_m64_sm80",
        "flash_varlen_decode_hdim32_fp16_paged_packgqa_sm80",
        "flash_varlen_decode_hdim32_fp16_paged_packgqa_sm90",
    ],
)
def test_sequences_of_several_lengths(name, flashgen):
    result = flashgen("simulate", name, "--seqlen-q", 3, "--seqlen-kv", 500, "--batch", 4)
    assert result.exit_code == 0, result.output
    assert "4 sequences of random lengths up to that" in result.stdout


def test_a_hopper_kernel_on_few_multiprocessors(flashgen):
    arguments = ("simulate", "flash_fwd_hdim64_fp16_causal_m64_sm90", "--seqlen-q", 200, "--seqlen-kv", 300)
    found = json.loads(flashgen(*arguments, "--multiprocessors", 3, "--json").stdout)
    assert found["ok"]
    assert found["counters"]["blocks"] == 3
    # Two heads, four tiles of 64 rows each; a tile's rows end where their last key does.
    keys = [-(-(min(row + 64, 200) + 100) // 128) for row in range(0, 200, 64)]
    assert found["counters"]["tensor_loads"] == 2 * sum(1 + 2 * count for count in keys)
    assert found["counters"]["wgmma_f16"] == 2 * sum(keys) * (64 + 128) // 16
    assert found["tiles"]["skipped_share"] == 1
    products = [access for access in found["accesses"] if access["kind"] == "wgmma"]
    assert [access["conflicts"] for access in products] == [0, 0]
    text = flashgen(*arguments).stdout
    assert "wgmma" in text
    assert "of a warpgroup and a block of keys" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((NAME, "--heads", 4, "--kv-heads", 2), "one query head to a kv head"),
        ((NAME, "--head-dim", 72), "holds at most 64"),
        ((NAME, "--head-dim", 12), "needs a multiple of 8"),
        ((NAME, "--mask-type", "dense"), "has mask type causal; dense does not fit"),
        ((NAME, "--window", 20, 0), "a window needs a variant of mask type local"),
        (("flash_fwd_hdim32_fp16_local_m64_sm80", "--window", -5, 0), "window is (-5, 0); each side must be"),
    ],
)
def test_what_does_not_fit_the_variant_is_told_ahead_of_compiling(arguments, message, flashgen, monkeypatch):
    monkeypatch.setattr("flashgen.simulator.library.load", None)
    result = flashgen("simulate", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr


def test_inputs_that_do_not_fit_into_memory_are_one_message(flashgen, monkeypatch):
    def make(*arguments):
        raise MemoryError("Unable to allocate 1. TiB")

    monkeypatch.setattr("flashgen.simulator.example.make", make)
    result = flashgen("simulate", NAME, "--seqlen-kv", 2**31 - 1)
    assert result.exit_code == 1
    assert "Unable to allocate 1. TiB; make them smaller" in result.stderr
    assert flashgen("simulate", NAME, "--seqlen-kv", 2**31).exit_code == 2


def test_a_kernel_of_instructions_without_host_bodies_is_refused(flashgen, monkeypatch, tmp_path):
    monkeypatch.setattr("flashgen.simulator.library.INCLUDE", tmp_path)
    result = flashgen("simulate", NAME)
    assert result.exit_code == 1
    assert "flashgen/sm80.cuh, which has no host bodies" in result.stderr
