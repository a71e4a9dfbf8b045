"""Parts of template files: how they are named and included, and what is said of wrong ones."""

import re
import shutil

import pytest

from flashgen.errors import SpecError
from flashgen.families.load import load_spec, load_specs
from flashgen.host.paths import specs_dir, templates_dir
from flashgen.source.closure import closure, folders_for, parts_read
from flashgen.source.files import parts_of
from flashgen.source.render import check_files, line_origins, render, source_digest

PARTS = """\
//# What a part has to say about its mask.
constexpr int kMain = 1;

//: of_causal
//# Hidden.
constexpr bool kCausal = true;

constexpr int kNone = ${ block_m };

//: of_none  //# Nothing is hidden.

//: of_packed
//% include "lib/masks.cuh.j2:of_causal"
constexpr bool kPacked = true;
"""


@pytest.fixture
def folder(tiny_folder, edit):
    """The tiny family, whose template includes parts of a file."""
    (tiny_folder / "templates" / "lib" / "masks.cuh.j2").write_text(PARTS)
    include = '//% include "lib/masks.cuh.j2:of_${ mask_type }"'
    edit("templates/tiny.cu.j2", "${ params_struct }", "${ params_struct }\n" + include)
    return tiny_folder


def variant_of(folder, mask_type="causal"):
    spec = load_spec(folder / "specs" / "tiny.yaml")
    return spec.select(head_dim=64, dtype="fp16", mask_type=mask_type, gqa="mha", target="sm80")[0]


def include(folder, name):
    path = folder / "templates" / "tiny.cu.j2"
    path.write_text(path.read_text().replace("lib/masks.cuh.j2:of_${ mask_type }", name))
    return variant_of(folder)


def test_a_part_ends_before_the_blank_line_of_the_next_one():
    parts = parts_of(PARTS, "masks.cuh.j2")
    assert {name: part.first_line for name, part in parts.items()} == {
        "": 1,
        "of_causal": 5,
        "of_none": 11,
        "of_packed": 13,
    }
    assert parts[""].text.endswith("kMain = 1;\n")
    assert parts["of_causal"].text.endswith("\n\nconstexpr int kNone = ${ block_m };\n")
    assert parts["of_none"].text == ""
    assert parts["of_packed"].text.endswith("kPacked = true;\n")


def test_a_file_without_parts_is_its_main_part():
    assert parts_of("a\n\n", "x")[""] == (1, "a\n\n")


def test_an_included_part_is_rendered_alone(folder):
    causal, none = render(variant_of(folder)), render(variant_of(folder, "none"))
    assert "constexpr bool kCausal = true;\n\nconstexpr int kNone = 128;\n\nextern" in causal
    assert "scale_log2) == 24);\n\nextern" in none
    for text in (causal, none):
        assert not re.search("kMain|kPacked|//:|Hidden", text)
    assert "kMain" in render(include(folder, "lib/masks.cuh.j2"))


def test_a_part_may_include_a_part_of_its_file(folder):
    text = render(include(folder, "lib/masks.cuh.j2:of_packed"))
    assert text.index("kCausal") < text.index("kPacked")


def test_lines_of_a_part_have_their_numbers_in_the_file(folder):
    variant = variant_of(folder)
    path = folder / "templates" / "lib" / "masks.cuh.j2"
    for text in ("constexpr bool kCausal = true;", "constexpr int kNone = 128;"):
        place = line_origins(variant)[render(variant).splitlines().index(text)]
        number = next(n for n, line in enumerate(PARTS.splitlines(), 1) if line.startswith(text[:20]))
        assert place == f"{path}:{number}"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("${ block_m }", "${ blockm }", "'blockm' is undefined"),
        ("${ block_m }", "${ block_m", "end of print statement"),
        ("${ block_m }", "{{ block_m }}", "${ name }"),
        ("constexpr int kNone", "//% if dtype = 2", "expected token"),
    ],
)
def test_an_error_in_a_part_names_its_line_in_the_file(old, new, said, folder, edit):
    path = edit("templates/lib/masks.cuh.j2", old, new)
    with pytest.raises(SpecError, match=re.escape(said)) as caught:
        render(variant_of(folder))
    assert str(caught.value).startswith(f"{path}:8: ")


@pytest.mark.parametrize("action", [render, source_digest])
@pytest.mark.parametrize("part", ["of_local", "hides_${ gqa }"])
def test_a_missing_part_is_an_error_that_names_those_there_are(part, action, folder):
    variant = include(folder, f"lib/masks.cuh.j2:{part}")
    with pytest.raises(SpecError) as caught:
        action(variant)
    template, file = folder / "templates" / "tiny.cu.j2", folder / "templates" / "lib" / "masks.cuh.j2"
    line = 1 + next(n for n, text in enumerate(template.read_text().splitlines()) if "masks.cuh.j2" in text)
    assert str(caught.value).startswith(f"{template}:{line}: {file} has no part {part[:5]}")
    assert str(caught.value).endswith("; its parts are of_causal, of_none, of_packed")


@pytest.mark.parametrize("action", [render, source_digest])
def test_a_file_of_parts_alone_is_not_included_whole(action, folder, edit):
    edit("templates/lib/masks.cuh.j2", "constexpr int kMain = 1;\n", "")
    with pytest.raises(SpecError, match="no text before its first part; its parts are of_causal"):
        action(include(folder, "lib/masks.cuh.j2"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("//: of_packed", "//: of_none", "a second part of_none; the first one begins in line 10"),
        ("//: of_packed", "//: of packed", "'//: of packed' begins no part"),
        ("//: of_packed", "  //:", "'//:' begins no part"),
    ],
)
def test_a_wrong_begin_of_a_part_is_an_error(old, new, said, folder, edit):
    path = edit("templates/lib/masks.cuh.j2", old, new)
    spec = load_spec(folder / "specs" / "tiny.yaml")
    for action in (lambda: render(variant_of(folder)), lambda: check_files([spec])):
        with pytest.raises(SpecError, match=rf"^{re.escape(str(path))}:12: {said}"):
            action()


def test_the_digest_reads_a_file_once_and_follows_the_parts_that_may_be_read(folder, edit):
    """A file goes into the digest as a whole: a change of a part that no kernel reads changes it, too. What
    such a part includes does not go in.
    """
    before = source_digest(variant_of(folder))
    spec, folders = str(folder / "specs" / "tiny.yaml"), folders_for(str(folder / "specs"))
    parts = parts_read("tiny.cu.j2", spec, folders)
    assert parts == {"tiny.cu.j2", "lib/names.j2"} | {
        f"lib/masks.cuh.j2:of_{name}" for name in ("causal", "none", "packed")
    }
    assert closure("tiny.cu.j2", (), spec, folders)["lib/masks.cuh.j2"] == PARTS
    edit("templates/lib/masks.cuh.j2", "kMain = 1;", 'kMain = 2;\n//% include "lib/not_there.cuh.j2"')
    assert source_digest(variant_of(folder)) != before


def test_a_file_of_the_user_replaces_all_parts(folder, monkeypatch):
    shipped, own = folder / "shipped", folder / "templates" / "lib" / "masks.cuh.j2"
    shutil.move(folder / "templates", shipped)
    for module in ("closure", "files"):
        monkeypatch.setattr(f"flashgen.source.{module}.templates_dir", lambda: shipped)
    before = render(variant_of(folder))
    own.parent.mkdir(parents=True)
    own.write_text(PARTS.replace("kCausal", "kBelow"))
    assert render(variant_of(folder)) == before.replace("kCausal", "kBelow")
    own.write_text("//: of_none\n")
    with pytest.raises(SpecError, match=f"{re.escape(str(own))} has no part of_causal; it"):
        render(variant_of(folder))


def test_each_part_of_the_shipped_templates_is_read():
    read = set()
    for spec in load_specs():
        for step in spec.content.steps:
            read |= parts_read(step.template, str(spec.path), folders_for(str(spec.path.parent)))
    there = set()
    for path in templates_dir().rglob("*.j2"):
        name = path.relative_to(templates_dir()).as_posix()
        there |= {f"{name}:{part}".rstrip(":") for part in parts_of(path.read_text(), str(path))}
    assert there == read


@pytest.mark.parametrize("spec", [spec.path.stem for spec in load_specs()])
def test_a_kernel_is_made_of_at_most_20_files(spec):
    """A reader who looks for a line of a kernel has few files to look in. Some variants with long names, so
    with many options, and some others.
    """
    variants = sorted(load_spec(specs_dir() / f"{spec}.yaml").variants(), key=lambda it: -len(it.name))
    for variant in {*variants[:3], *variants[:: max(1, len(variants) // 5)]}:
        for step in variant.steps:
            files = {origin.rpartition(":")[0] for origin in line_origins(step) if origin}
            assert len(files) <= 20, sorted(files)
