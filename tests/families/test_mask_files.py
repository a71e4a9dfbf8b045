"""The file masks.yaml, and lines that a call passes: errors name file, line and column."""

import pytest

from flashgen.errors import BadParam, SpecError
from flashgen.families.masks import load_masks, read_masks, rule_of_line


def written(folder, text):
    folder.mkdir(exist_ok=True)
    path = folder / "masks.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("line", "mark", "says"),
    [
        ('mine: {visible: "kv <= q + speed"}',
         "                           ^", "unknown name 'speed'"),
        ('mine: {params: {a: [b, token, i32]}, visible: "a[b, q] / 2 == kv"}',
         "                                               ^", "integers are divided by //"),
        ('mine: {params: {a: [b, token, i32]}, visible: "a[q] == kv"}',
         "                                               ^", "a has 2 dimensions, (b, token)"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_line_is_named_to_the_character(line, mark, says, tmp_path):
    path = written(tmp_path, f"# a comment\nmasks:\n  {line}\n")
    with pytest.raises(SpecError) as caught:
        read_masks(path)
    assert str(caught.value).startswith(f"{path}:3:{mark.index('^') + 3}: masks.mine.visible: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "masks"),
        ("masks: 3\n", 1, "masks"),
        ("masks:\n  mine: {}\n", 2, "`visible`"),
        ("masks:\n  Mine: {visible: q < kv}\n", 2, "expected a name"),
        ("masks:\n  line_a: {visible: q < kv}\n", 2, "belong to masks without a file"),
        ("masks:\n  mine: {visible: q}\n", 2, "a mask is a condition"),
        ("masks:\n  mine: {visible: q < kv, params: {a: i32}}\n", 2, "does not read `a`"),
        ("masks:\n  mine: {visible: q < a, params: {a: f32}}\n", 2, "i32"),
        ("masks:\n  mine: {visible: 'q < a[b]', params: {a: [i32]}}\n", 2, "an array has dimensions"),
        ("masks:\n  mine: {visible: 'q < a[b]', params: {a: [b, b, i32]}}\n", 2, "occurs twice"),
        ("masks:\n  mine: {visible: 'q < kv', params: {where: i32}}\n", 2, "is reserved"),
        ("masks:\n  mine: {visible: 'a[q, kv, h] > 0', params: {a: [q, kv, h, i32]}}\n", 2, "one name"),
        ("masks:\n  mine: {hidden: q < kv}\n", 2, "hidden"),
        ("masks: {\n", None, "masks.yaml"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_named_with_its_line(text, line, says, tmp_path):
    path = written(tmp_path, text)
    with pytest.raises(SpecError, match=f"^{path}:{line if line else ''}") as caught:
        read_masks(path)
    assert says in str(caught.value)


def test_a_folder_adds_masks_and_replaces_them(tmp_path, monkeypatch):
    path = written(tmp_path, "masks:\n  mine: {visible: q < kv}\n  chunks: {visible: q == kv}\n")
    monkeypatch.setenv("FLASHGEN_SPECS", str(path.parent))
    rules = load_masks(str(path.parent))
    assert rules["mine"].text == "q < kv"
    assert rules["chunks"].text == "q == kv"
    assert "documents" in rules


@pytest.mark.parametrize(
    ("line", "dimensions"),
    [
        ("doc[b, q] == doc[b, kv]", {"doc": ("b", "token")}),
        ("doc[b, kv + 1] == doc[b, kv]", {"doc": ("b", "token")}),
        ("keep[h, q // 16, kv // 16] > 0", {"keep": ("h", "axis1", "axis2")}),
        ("near[b, q, kv] > n", {"near": ("b", "q", "kv"), "n": ()}),
        ("kv < prefix[b] + k", {"prefix": ("b",), "k": ()}),
    ],
)
def test_dimensions_follow_from_indices(line, dimensions):
    assert {param.name: param.dimensions for param in rule_of_line(line).params} == dimensions


def test_spaces_do_not_make_another_line():
    assert rule_of_line("kv<=q and kv<n") == rule_of_line("kv <= q and (kv < n)")
    assert rule_of_line("kv <= q").name != rule_of_line("kv < q").name
    assert hash(rule_of_line("kv<=q")) == hash(rule_of_line("kv <= q"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("kv <", r"^line is 'kv <'; column 1: it is not an expression"),
        ("kv <= q and kv / 2 < n", r"column 13: 'kv / 2' is not allowed: integers are divided by //"),
        ("a[b] < 1 and a[b, q] < 2", r"column 14: a has 1 dimensions"),
        ("abs < 2", r"unknown name 'abs'"),
        ("kv <= q or (a[b, b] == 1)", r"the parameter a: the dimension b occurs twice"),
    ],
)
def test_what_is_wrong_with_a_line_in_a_call_is_named_with_its_column(line, says):
    with pytest.raises(BadParam, match=says):
        rule_of_line(line)
