"""The file scores.yaml: errors name file, line and column; folders add and replace lines."""

import os
from pathlib import Path

import pytest

from flashgen.call.fields import PLAN_KEYWORDS
from flashgen.errors import SpecError
from flashgen.families.load import load_specs
from flashgen.families.params import C_TYPES
from flashgen.families.scores import load_scores, read_scores

DTYPES = ("fp16", "bf16", "fp32")


def written(folder, text):
    folder.mkdir(exist_ok=True)
    path = folder / "scores.yaml"
    path.write_text(text)
    return path


def test_the_shipped_modifications():
    found = load_scores(keywords=())
    assert set(found.by_name) >= {"softcap", "alibi", "alibi_symmetric", "bias"}
    variants = [variant for spec in load_specs() for variant in spec.variants()]
    assert len(found.of(variants)) == len(found.committed) > 0
    assert all(variant.committed and variant.score for variant in found.of(variants))


# (a line of scores.yaml, what the message ends with). `^` stands under the character that is named.
WRONG = [
    ('mine: {score: "score + speed"}',
     '                       ^', "unknown name 'speed'"),
    ("mine: {score: 'score ** 2'}",
     "               ^", "not allowed; allowed: names"),
    ("mine: {score: score + log(0)}",
     "                      ^", "cannot be computed"),
    ('mine: {params: {a: f32}, score: "score + a[b]"}',
     "                                         ^", "'a' is not a declared array"),
    ('mine: {params: {a: [h, f32]}, score: "score + a[q]"}',
     "                                                ^", "the index of dimension h of a is h itself"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "mark", "says"), WRONG, ids=lambda x: "" if "^" in x else None)
def test_what_is_wrong_with_a_formula_is_named_to_the_character(line, mark, says, tmp_path):
    path = written(tmp_path, f"# a comment\nscores:\n  {line}\n")
    with pytest.raises(SpecError) as caught:
        read_scores(path, keywords=())
    assert str(caught.value).startswith(f"{path}:3:{mark.index('^') + 3}: scores.mine.score: ")
    assert says in str(caught.value)


def test_of_a_block_the_line_is_named(tmp_path):
    path = written(tmp_path, "scores:\n  mine:\n    score: >-\n      score + speed\n")
    with pytest.raises(SpecError, match=r":3: scores\.mine\.score: unknown name 'speed'"):
        read_scores(path, keywords=())


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "scores"),
        ("scores: 3\n", 1, "scores"),
        ("scores:\n  mine: 3\n", 2, "scores.mine"),
        ("scores:\n  mine: {}\n", 2, "`score`"),
        ("scores:\n  Mine: {score: score}\n", 2, "scores.Mine: found 'Mine'; expected a name"),
        ('scores:\n  mine: {score: "1.0"}\n', 2, "does not read `score`"),
        ("scores:\n  mine: {score: score, params: {a: f32}}\n", 2, "does not read `a`"),
        ("scores:\n  mine: {score: score + a, params: {a: f16}}\n", 2, "f32"),
        ("scores:\n  mine: {score: score + a, params: {a: 3}}\n", 2, "params"),
        ("scores:\n  mine: {score: score + a, params: {a: []}}\n", 2, "an array has dimensions"),
        ('scores:\n  mine: {score: "score + a[b]", params: {a: [f32]}}\n', 2, "an array has dimensions"),
        ('scores:\n  mine: {score: "score + a[b]", params: {a: [b, b, f32]}}\n', 2, "occurs twice"),
        ('scores:\n  mine: {score: "score + a[b]", params: {a: [b, h]}}\n', 2, "f32"),
        ('scores:\n  mine: {score: "score + a[b]", params: {a: [score, f32]}}\n', 2, "called `score`"),
        ('scores:\n  mine: {score: "score + a[q, kv, h]", params: {a: [q, kv, h, f32]}}\n', 2, "q and kv"),
        ('scores:\n  mine: {score: "score + head[q]", params: {head: [dim, f32]}}\n', 2, "head_dim"),
        ('scores:\n  mine: {score: "score", parms: {}}\n', 2, "parms"),
        ('scores:\n  mine: {score: "score", score: "score"}\n', 2, "twice"),
        ("scores:\n  none: {score: score}\n", 2, "`none` is a value of an axis"),
        ("scores:\n  causal: {score: score}\n", 2, "`causal` is a value of an axis"),
        ("scores:\n  packed: {score: score}\n", 2, "`packed` is a value of an axis"),
        ("scores: {}\ncommit:\n  - {variant: a, score: mine}\n", 3, "no modification is called `mine`"),
        ("scores: {}\ncommit:\n  - {variant: a}\n", 3, "score"),
        ("score: {}\n", 1, "score"),
        ("scores: {\n", None, "scores.yaml"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_named_with_its_line(text, line, says, tmp_path):
    path = written(tmp_path, text)
    with pytest.raises(SpecError, match=f"^{path}:{line if line else ''}") as caught:
        read_scores(path, keywords=())
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("q", "kv", "h", "b", "score", "k", "v", "mask", "out", "lse", "causal", "softmax_scale", "stream"),
        *("tanh", "where", "inf", "step", "product", "params", "row", "float", "int", "class", "element"),
        *("score_constant_0", "dout", "delta", "turns", "kv_lengths", "index", "pages", "cache", "q_rotated"),
    ],
)
def test_a_parameter_has_no_name_that_means_something_else(name, tmp_path):
    path = written(tmp_path, f"scores:\n  mine: {{score: score + {name}, params: {{{name}: f32}}}}\n")
    with pytest.raises(SpecError, match=rf":2: scores\.mine\.params\.{name}: .*is reserved"):
        read_scores(path, keywords=PLAN_KEYWORDS)


def test_two_members_of_the_parameter_struct_have_two_names(tmp_path):
    formula, params = "score + s[b, h] + s_batch_stride", "{s: [b, h, f32], s_batch_stride: f32}"
    path = written(tmp_path, f'scores:\n  mine: {{score: "{formula}", params: {params}}}\n')
    with pytest.raises(SpecError, match="two members would be called s_batch_stride"):
        read_scores(path, keywords=())


def test_a_parameter_that_a_kernel_has_already_is_refused_when_they_meet(tmp_path):
    path = written(tmp_path, "scores:\n  mine: {score: score + group_size, params: {group_size: f32}}\n")
    score = read_scores(path, keywords=()).by_name["mine"]
    (variant, *_) = (
        v for spec in load_specs() if "gqa" in spec.axes for v in spec.select(head_dim=64, gqa="packed")
    )
    with pytest.raises(SpecError, match=r"the score mine: .* already has parameters called group_size"):
        variant.modified(score)


def test_folders_add_and_replace_line_by_line(tmp_path, monkeypatch):
    shipped = [spec.name for spec in load_specs()]
    first = written(tmp_path / "first", "scores:\n  one: {score: score * 2}\n  softcap: {score: score * 3}\n")
    second = written(tmp_path / "second", "scores:\n  one: {score: score * 4}\n")
    monkeypatch.setenv("FLASHGEN_SPECS", os.pathsep.join([str(first.parent), str(second.parent)]))
    found = load_scores(keywords=()).by_name
    assert [found[name].text for name in ("one", "softcap")] == ["score * 4", "score * 3"]
    assert found["alibi"].arrays
    # Beside specs, and without any.
    assert [spec.name for spec in load_specs()] == shipped
    monkeypatch.delenv("FLASHGEN_SPECS")
    assert load_scores(second.parent, keywords=()).by_name["one"].text == "score * 4"
    assert "one" not in load_scores(keywords=()).by_name


def test_a_folder_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_SPECS", str(tmp_path / "nowhere"))
    with pytest.raises(SpecError, match="cannot be read"):
        load_scores(keywords=())
    monkeypatch.delenv("FLASHGEN_SPECS")
    (tmp_path / "scores.yml").write_text("scores: {}\n")
    with pytest.raises(SpecError, match=r"end in \.yaml"):
        load_scores(tmp_path, keywords=())


def test_committed_rows_name_variants_of_the_specs_at_hand(tmp_path):
    name = "flash_fwd_hdim32_fp16_m64_sm80"
    rows = f"commit:\n  - {{variant: {name}, score: mine}}\n  - {{variant: elsewhere, score: mine}}\n"
    path = written(tmp_path, "scores:\n  mine: {score: score * 2}\n" + rows)
    (variant,) = read_scores(path, keywords=()).of(v for spec in load_specs() for v in spec.variants())
    assert variant.name == "flash_fwd_hdim32_fp16_mine_m64_sm80"
    assert variant.committed
    assert not variant.no_spills


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_parameters_that_a_kernel_takes_besides(dtype, tmp_path):
    path = written(
        tmp_path,
        "scores:\n  mine:\n    params: {t: [b, h, far, f32], n: i32, g: f32, s: [kv, i32]}\n"
        '    score: "where(kv < n, score * g, score) + t[b, h, min(q - kv, n)] + s[kv] * g"\n',
    )
    (spec,) = (spec for spec in load_specs() if spec.name == "flash_fwd_sm80")
    plain = spec.select(head_dim=64, dtype=dtype)[0]
    variant = plain.modified(read_scores(path, keywords=()).by_name["mine"])
    added = {p.name: p.ctype for p in variant.params[len(plain.params) :]}
    assert variant.params[: len(plain.params)] == plain.params
    expected = {"t": "const float*", "t_batch_stride": "int64_t", "t_head_stride": "int64_t"}
    expected |= {"t_far": "int32_t", "n": "int32_t", "g": "float", "s": "const int32_t*"}
    assert expected.items() <= added.items()
    assert set(added.values()) <= set(C_TYPES)
    assert "_mine_" in variant.name
    assert variant.axis("score") == "mine"


def test_a_kernel_without_a_seam_is_left_as_it_is(tiny_variants):
    softcap = load_scores(keywords=()).by_name["softcap"]
    assert all(variant.modified(softcap) is variant for variant in tiny_variants)


def test_specs_is_the_only_place_with_the_shipped_lines():
    """One line of YAML each: no Python and no template knows a modification."""
    root = Path(__file__).parents[2]
    for path in (root / "templates").rglob("*"):
        assert path.is_dir() or not {"softcap", "alibi"} & set(path.read_text().lower().split())
