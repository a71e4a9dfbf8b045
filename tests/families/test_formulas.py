"""Score modifications without a file: they are what the same line in a file is."""

import functools
import re

import pytest

from flashgen.errors import BadParam
from flashgen.families.formulas import score_of_formula
from flashgen.families.load import load_specs
from flashgen.families.scores import load_scores, read_scores
from flashgen.source.render import flatten, render

FORMULAS = {
    "cap * tanh(score / cap)": {"cap": "f32"},
    "score + slope[b, h] * (kv - q)": {"slope": ["b", "h", "f32"]},
    "score + bias[b, h, q, kv]": {"bias": ["b", "h", "q", "kv", "f32"]},
    "where(abs(kv - q) <= n, score, -inf)": {"n": "i32"},
    "score + gain * table[h, min(abs(q - kv), 15)]": {"gain": "f32", "table": ["h", "axis1", "f32"]},
    "where(ends[b, q] > kv, score, -inf)": {"ends": ["b", "q", "i32"]},
}


@functools.cache
def shipped():
    return {variant.name: variant for spec in load_specs() for variant in spec.variants()}


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("kernel", ["flash_fwd_hdim64_fp16_sm80", "flash_bwd_hdim64_bf16_causal_sm90"])
def test_a_formula_gives_the_kernel_of_its_line_in_a_file(formula, kernel, tmp_path):
    params = FORMULAS[formula]
    path = tmp_path / "scores.yaml"
    path.write_text(f"scores:\n  mine: {{score: {formula!r}, params: {params}}}\n".replace("'", '"'))
    named = read_scores(path, keywords=()).by_name["mine"]
    types = {
        name: declared if isinstance(declared, str) else declared[-1] for name, declared in params.items()
    }
    score = score_of_formula(formula, types, keywords=())
    assert score.params == named.params
    assert score.tree is named.tree  # equal trees are one object
    plain = shipped()[kernel]

    def text(score):
        source = re.sub(r"\s*\n// +", " ", flatten(render(plain.modified(score))))  # lines end by length
        return re.sub(rf"\b\w*{score.name}\w*|`[^`]*`: .*", "", source)

    assert text(score) == text(named)


def test_spaces_do_not_make_another_kernel_and_types_do():
    def name(formula, **types):
        return score_of_formula(formula, types, keywords=()).name

    assert name("score + n * h") == name("score+n*h") == name("(score + (n*h))")
    assert name("score + n * h") != name("score + n * h", n="i32")
    assert name("score + n * h") != name("score + m * h")


def test_no_line_of_a_file_has_the_name_of_a_formula(tmp_path):
    from flashgen.errors import SpecError

    score = score_of_formula("score * 2", {}, keywords=())
    path = tmp_path / "scores.yaml"
    path.write_text(f"scores:\n  {score.name}: {{score: score * 3}}\n")
    with pytest.raises(SpecError, match="belong to formulas without a file"):
        read_scores(path, keywords=())


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("soft-cap", "'soft-cap'; it does not read `score`"),
        ("score +", r"column \d+: it is not an expression"),
        ("score * out", "the parameter out: `out` is reserved"),
        ("score + mine", "the parameter mine: `mine` is reserved"),
        ("score + a[b, b]", "the dimension b occurs twice"),
        ("score + a[h] + a[b, h]", r"column 9: a has 2 dimensions, \(b, h\); 1 indices"),
        ("score + where", "column 9: unknown name 'where'"),
        ("score + a[a[h]]", "column 11"),
        ("__import__('os').system('ls')", "is not allowed"),
        ("score > 0", "is a condition"),
        ("(" * 300, "not an expression"),
        ("score" + " + score" * 100, "nested too deeply"),
        ("score + " + "x" * 10_000, "at most 10,000 are allowed"),
    ],
)
def test_what_is_wrong_with_a_formula_is_said_with_its_column(formula, message):
    with pytest.raises(BadParam, match=message):
        score_of_formula(formula, {}, keywords=("mine",))


def test_every_shipped_modification_can_be_written_as_its_formula():
    for score in load_scores(keywords=()).by_name.values():
        types = {param.name: param.type for param in score.params}
        assert score_of_formula(score.text, types, keywords=()).tree is score.tree
