"""Spec files that would take all memory or hours: each is a SpecError with file and line, at once."""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path

import pytest

from flashgen.errors import SpecError
from flashgen.families.expression import MAX_DEPTH, MAX_TEXT, Expression
from flashgen.families.load import load_spec
from flashgen.families.scores import read_scores
from flashgen.families.yamlfile import Document

PATH = Path("x.yaml")
BILLION = "a: &a0 [x, x, x]\n" + "".join(
    f"b{i}: &a{i + 1} [*a{i}, *a{i}, *a{i}, *a{i}, *a{i}, *a{i}, *a{i}, *a{i}]\n" for i in range(10)
)


@pytest.fixture(autouse=True)
def little_time_and_memory():
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - begin < 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BILLION, r"x.yaml:1: more than 100,000 values"),
        ("a: &a [*a]", r"x.yaml:1: nested more than 30 deep, or an anchor contains itself"),
        ("a: " + "[" * 400 + "]" * 400, r"x.yaml:1: nested more than 30 deep"),
        ("a: " + "[" * 40_000, r"x.yaml:\d+: not valid YAML"),
        ("a: " + "x" * 2_000_000, r"x.yaml:1: has 2,000,003 bytes"),
        ("a: " + "9" * 5000, r"x.yaml:1: .*digits"),
    ],
    ids=lambda text: text[:12],
)
def test_a_file_that_is_too_large_or_deep(text, says):
    with pytest.raises(SpecError, match=says):
        Document(PATH, text.encode())


def test_without_the_yaml_library_in_c(monkeypatch):
    import yaml

    monkeypatch.setattr("flashgen.families.yamlfile._Loader", yaml.SafeLoader)
    with pytest.raises(SpecError, match=r"x.yaml:1: values are nested too deeply, at most 30 deep"):
        Document(PATH, ("a: " + "[" * 2000 + "]" * 2000).encode())


NAMES = frozenset(("block_m", "dtype"))


@pytest.mark.parametrize(
    "text",
    [
        "'%3000000000d' % 1",
        "'a' * 3000000000",
        "'a' + 'b'",
        "-'a'",
        "min('a', 'b')",
        "('a' if block_m else 'b') * 3000000000",
        "(block_m or 'a') * 3000000000",
        "dtype * 3000000000",
        "dtype % 3",
        "(dtype if block_m else 3) * 3000000000",
        "max(dtype, block_m)",
    ],
)
def test_a_string_has_no_arithmetic(text):
    with pytest.raises(ValueError, match=r"cannot be computed: .* only compared"):
        Expression(text, NAMES)({"block_m": 64, "dtype": "%3000000000d"})


def test_no_expression_gives_more_than_64_bits():
    text = " * ".join(["block_m"] * 12)
    with pytest.raises(ValueError, match="gives an integer of more than 64 bits"):
        Expression(text, NAMES)({"block_m": 64})


def test_strings_are_compared():
    values = {"block_m": 64, "dtype": "fp16"}
    assert Expression("block_m + (2 if dtype == 'fp16' else 4)", NAMES)(values) == 66
    assert Expression("1 if dtype != 'fp16' or block_m > 3 else 0", NAMES)(values) == 1


@pytest.mark.parametrize(
    "text",
    [
        "-" * 900 + "block_m",
        "-" * 200_000 + "block_m",
        "(" * 180 + "block_m" + ")" * 180 + "+ (" * 60 + "1" + ")" * 60,
        "block_m" + " + 1" * 100,
        "not " * 200 + "block_m",
        "9" * 5000,
    ],
    ids=lambda text: text[:12],
)
def test_an_expression_that_is_too_long_or_deep(text):
    says = f"at most {MAX_DEPTH} parts deep|at most {MAX_TEXT:,} are allowed|is not an expression"
    with pytest.raises(ValueError, match=says):
        Expression(text, NAMES)


def test_too_many_combinations_of_axes(edit_spec):
    """With a default of 3,000 values and as many of another axis there are 9,000,000."""
    many = ", ".join(map(str, range(8, 24_008, 8)))
    also = f"  head_dim_v: {{default: head_dim, also: {{8: [{many[3:]}]}}}}\n"
    path = edit_spec("head_dim: [32, 64]\n", f"head_dim: [{many}]\n{also}")
    with pytest.raises(
        SpecError, match=r"tiny.yaml:8: axes.head_dim_v: .* make more than 50,000 combinations"
    ):
        load_spec(path)


def many(count, text):
    return "".join(f"  - {text}\n".replace("N", str(n)) for n in range(count))


BOMBS = {
    "targets": (
        "targets:\n",
        "targets:\n"
        + "".join(f"  t{n}: {{min_arch: sm_80, max_smem: 1, compile_for: [sm_80]}}\n" for n in range(9999)),
        r"tiny.yaml:\d+: tiles: 24 combinations of axes, 10,001 targets",
    ),
    "names of tiles": (
        "tiles:\n",
        "tiles:\n" + many(12000, "{name: nN, block_m: 64, block_n: 32, warps: 4, stages: 1, min_blocks: 2}"),
        r"tiny.yaml:\d+: tiles: 24 combinations of axes, 2 targets, 12,002 names of tiles",
    ),
    "a range": (
        "block_m: [64, 128]",
        f"block_m: {{from: 0, to: {(1 << 63) - 1}, step: 1}}",
        r"tune\[0\]: .* tiles to try",
    ),
    "values": (
        "block_m: [64, 128], block_n: {from: 32, to: 112, step: 40}",
        f"block_m: {list(range(3000))}, block_n: {list(range(3000))}",
        r"tune\[0\]: .* 18,000,000 tiles to try; at most 10,000",
    ),
    "rows": ("tune:\n", "tune:\n" + many(9000, "{warps: [1, 2]}"), r"tune\[5000\]: .* 10,002 tiles to try"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_too_many_kernels(bomb, edit_spec):
    old, new, says = BOMBS[bomb]
    with pytest.raises(SpecError, match=says):
        load_spec(edit_spec(old, new))


def test_many_rows_of_one_name_take_a_moment(edit_spec):
    row = "{head_dim: 64, dtype: fp16, block_m: 64, block_n: 32, warps: 4, stages: 1, min_blocks: 2}"
    with pytest.raises(SpecError, match="the row never applies"):
        load_spec(edit_spec("tiles:\n", "tiles:\n" + many(5000, row)))


def test_integers_of_many_digits(edit_spec):
    path = edit_spec("threads: 32 * warps", f"threads: {'9' * 400}")
    with pytest.raises(SpecError, match=r"tiny.yaml:\d+: the integer 9+... has more than 64 bits"):
        load_spec(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{prefer: on_request}", "{rows_at_most: HUGE}"),
        ("block_n: 64", "block_n: HUGE"),
        ("max_smem: 166912", "max_smem: HUGE"),
        ("[mha, gqa, packed]", "[mha, HUGE]"),
        ("fp32: 4", "fp32: HUGE"),
    ],
)
def test_integers_of_many_digits_anywhere(old, new, edit_spec):
    with pytest.raises(SpecError, match=r"tiny.yaml:\d+: the integer 9+\.\.\. has more"):
        load_spec(edit_spec(old, new.replace("HUGE", "9" * 400))).variants()


def test_a_formula_that_is_too_deep_in_a_file(tmp_path):
    path = tmp_path / "scores.yaml"
    path.write_text(f"scores:\n  deep: {{score: '{'abs(' * 60}score{')' * 60}'}}\n")
    with pytest.raises(SpecError, match=re.escape(str(path)) + r":2:\d+: .*nested too deeply"):
        read_scores(path, keywords=())


def test_every_shipped_spec_is_well_below_the_limits():
    from flashgen.families.axes import MAX_POINTS
    from flashgen.families.yamlfile import MAX_BYTES, MAX_VALUES
    from flashgen.host.paths import specs_dir

    for path in specs_dir().glob("*.yaml"):
        document = Document(path, path.read_bytes())
        assert path.stat().st_size < MAX_BYTES / 4
        assert document._values < MAX_VALUES / 4
        if path.name not in ("scores.yaml", "masks.yaml"):
            assert len(load_spec(path).content.entries) < MAX_POINTS / 4
