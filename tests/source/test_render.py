import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen.errors import InternalError, SpecError
from flashgen.families.formulas import score_of_formula
from flashgen.families.load import load_spec, load_specs
from flashgen.host.paths import specs_dir, templates_dir
from flashgen.source.render import (
    check_files,
    flatten,
    header_comment,
    headers,
    include_dirs,
    line_origins,
    render,
    search_path,
    source_digest,
    unused_overrides,
)
from flashgen.toolchain.compile import compile_cubin

TEMPLATE = "templates/tiny.cu.j2"


@pytest.fixture
def variant(tiny_folder):
    """A causal variant of the copy that a test may change."""
    return load_variant(tiny_folder)


def load_variant(folder, **axes):
    point = {"head_dim": 64, "dtype": "fp16", "mask_type": "causal", "gqa": "mha", **axes}
    return load_spec(folder / "specs" / "tiny.yaml").select(**point, target="sm80")[0]


def test_every_variant_renders_only_its_branches(tiny_variants):
    for v in tiny_variants:
        text = render(v)
        assert text.startswith(f"// {v.name}\n")
        assert text.endswith("}\n")
        assert f"constexpr int kHeadDim = {v.head_dim};" in text
        assert ("behind the diagonal" in text) == (v.mask_type == "causal")
        assert ("kPacked" in text) == (v.gqa == "packed")
        assert not re.search(r"//[%#]|\{%|\$\{|Never rendered", text)
        assert "\n\n\n" not in text


def test_blank_lines_stay_where_the_template_has_them(variant):
    lines = render(variant).splitlines()
    first = lines.index('#include "flashgen/tiny.cuh"')
    assert lines[first : first + 12] == [
        '#include "flashgen/tiny.cuh"',
        "",
        "using element = fp16;",
        "",
        "constexpr int kHeadDim = 64;",
        "constexpr int kBlockM = 128;",
        "",
        "// Keys behind the diagonal are hidden.",
        "",
        "struct Params {",
        "    element* out;                         // (batch, seqlen_q, num_heads_q, head_dim)",
        "    int32_t seqlen_q;                     // rows",
    ]


def test_the_header_says_what_the_kernel_is(variant):
    text = header_comment(variant)
    for part in (
        "axes      head_dim 64, dtype fp16, mask_type causal, gqa mha",
        "tile      block_m 128, block_n 64, warps 8, stages 2, min_blocks 1",
        "256 threads, 49152 bytes",
        f"sm80: sm_80 or later, with {variant.max_smem} bytes or more of shared memory per block",
        "tiny.yaml",
        "tiny.cu.j2",
    ):
        assert part in text
    assert all(line.startswith("//") for line in text.splitlines())


def test_rendering_is_a_function_of_the_variant(tiny_folder, variant):
    steering = {"efficiency": 0.5, "start": 2.0, "fill": 0.5, "passes": 4.0, "rows_at_most": 8}
    changes = {"dispatch": variant.dispatch._replace(**steering), "priority": 3, "committed": False}
    changes |= {"archs": ("sm_90",), "no_spills": ("sm_90",), "dependent_launch": True}
    tuned = dataclasses.replace(variant, **changes)
    assert render(tuned) == render(variant)
    assert source_digest(tuned) == source_digest(variant)
    elsewhere = shutil.copytree(tiny_folder, tiny_folder.parent / "elsewhere")
    moved = load_variant(elsewhere)
    assert moved != variant
    assert (render(moved), source_digest(moved)) == (render(variant), source_digest(variant))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (TEMPLATE, "Keys behind the diagonal", "The keys behind the diagonal"),
        ("templates/lib/names.j2", "constexpr int ${", "constexpr auto ${"),
        ("templates/include/flashgen/tiny.cuh", "int block,", "int block_index,"),
        ("specs/tiny.yaml", 'doc: "rows"', 'doc: "rows of q"'),
        ("specs/tiny.yaml", "block_m: 128, block_n: 64", "block_m: 64, block_n: 64"),
    ],
)
def test_the_digest_follows_all_that_goes_in(file, old, new, tiny_folder, variant, edit):
    before = source_digest(variant), flatten(render(variant), include_dirs(variant))
    edit(file, old, new)
    variant = load_variant(tiny_folder)
    after = source_digest(variant), flatten(render(variant), include_dirs(variant))
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_the_digest_of_a_kernel_that_reads_16_bit_arrays_has_their_header(monkeypatch):
    variant = load_spec(specs_dir() / "score_gradient_sm80.yaml").variants()[0]
    score = score_of_formula("score + a[h]", {"a": "bf16"}, keywords=()).with_respect_to("a")
    variant = dataclasses.replace(variant, score=score)
    before = source_digest(variant)
    monkeypatch.setattr("flashgen.source.parts.HALF", "flashgen/types.cuh")
    monkeypatch.setattr("flashgen.source.parts.SOME_HEADERS", ("flashgen/types.cuh",))
    assert source_digest(variant) != before


def test_a_template_that_comes_ahead_of_one_in_use_is_taken(tiny_folder, variant, monkeypatch):
    own = tiny_folder / "templates" / "lib" / "names.j2"
    shipped = tiny_folder / "shipped"
    shutil.move(tiny_folder / "templates" / "lib", shipped / "lib")
    for module in ("closure", "files"):
        monkeypatch.setattr(f"flashgen.source.{module}.templates_dir", lambda: shipped)
    before = render(variant)
    own.parent.mkdir()
    own.write_text(
        (shipped / "lib" / "names.j2").read_text().replace("constexpr int ${", "constexpr auto ${")
    )
    assert render(variant) == before.replace("constexpr int ", "constexpr auto ") != before


def test_a_header_of_the_current_directory_is_refused(variant, edit):
    include = '#include "${ variant.header }"'
    path = edit(TEMPLATE, include, f'{include}\n#include "cuda_fp16.h"')
    with pytest.raises(
        SpecError, match=rf"{re.escape(str(path))}:\d+: #include \"cuda_fp16.h\": in quotes only"
    ):
        source_digest(variant)


def test_digests_of_variants_differ(tiny_variants):
    assert len({source_digest(v) for v in tiny_variants}) == len(tiny_variants)


def test_the_digest_needs_no_jinja():
    code = (
        "import sys\nfrom flashgen.families.load import load_specs\n"
        "from flashgen.source.render import source_digest\n"
        "source_digest(load_specs()[0].select(dtype='fp16')[0]); print('jinja2' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


def test_a_computed_template_name_is_refused_where_it_would_escape_the_digest(variant, edit):
    path = edit(TEMPLATE, '//% from "lib/names.j2" import constant', "//% from name_of_it import constant")
    with pytest.raises(SpecError, match=rf"{re.escape(str(path))}:5: .*plain string"):
        source_digest(variant)


@pytest.mark.parametrize("quote", ['"', "'"])
def test_an_included_name_may_print_a_value(quote, variant, edit):
    include = f"//% include {quote}lib/of_${{ gqa }}.j2{quote}"
    path = edit(TEMPLATE, "${ params_struct }", "${ params_struct }\n" + include)
    folder = path.parent / "lib"
    folder.mkdir(exist_ok=True)
    (folder / "of_mha.j2").write_text("// its part\n")
    assert "// its part\n" in render(variant)
    before = source_digest(variant)
    (folder / "of_mha.j2").write_text("// its other part\n")
    assert source_digest(variant) != before


def test_an_included_name_of_which_there_is_none_is_an_error(variant, edit):
    path = edit(TEMPLATE, "${ params_struct }", '${ params_struct }\n//% include "lib/of_${ gqa }.j2"')
    for call in (render, source_digest):
        with pytest.raises(SpecError, match=rf"{re.escape(str(path))}:\d+: template lib/of_"):
            call(variant)


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("${ dtype }", "${ dtyp }", 6, "'dtyp' is undefined"),
        ("${ dtype }", "${ dtype", 6, "end of print statement"),
        ("${ dtype }", "${ variant.tile_value('k') }", 6, "'k'"),
        ('//% if gqa == "packed"', '//% if gqa = "packed"', 15, "expected token"),
    ],
)
def test_a_wrong_template_names_its_line(old, new, line, said, variant, edit):
    path = edit(TEMPLATE, old, new)
    with pytest.raises(SpecError) as caught:
        render(variant)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize("new", ["${ dtyp }", "${ dtype"])
def test_a_shipped_template_is_not_the_users_mistake(new, variant, edit, monkeypatch):
    path = edit(TEMPLATE, "${ dtype }", new)
    for module in ("closure", "files"):
        monkeypatch.setattr(f"flashgen.source.{module}.templates_dir", lambda: path.parent)
    with pytest.raises(InternalError, match=rf"^{re.escape(str(path))}:6: "):
        render(variant)


def test_a_macro_error_names_the_macros_line(variant, edit):
    path = edit("templates/lib/names.j2", "${ value }", "${ valeu }")
    with pytest.raises(SpecError, match=rf"^{re.escape(str(path))}:2: 'valeu' is undefined"):
        render(variant)


def test_a_template_without_the_header_is_refused(variant, edit):
    edit(TEMPLATE, "${ header }\n", "")
    with pytest.raises(SpecError, match=r"tiny\.cu\.j2: .*\$\{ header \}"):
        render(variant)


@pytest.mark.parametrize("action", [render, source_digest])
def test_a_missing_template_says_where_it_was_sought(action, tiny_folder, variant):
    (tiny_folder / "templates" / "lib" / "names.j2").unlink()
    with pytest.raises(SpecError, match=r"names\.j2 is in none of") as caught:
        action(variant)
    assert all(folder in str(caught.value) for folder in search_path(variant))
    template = tiny_folder / "templates" / "tiny.cu.j2"
    line = 1 + next(n for n, text in enumerate(template.read_text().splitlines()) if "lib/names.j2" in text)
    assert str(caught.value).startswith(f"{template}:{line}: template lib/names.j2 is in none of")


@pytest.mark.parametrize("action", [render, source_digest])
def test_a_template_that_only_the_spec_names(action, tiny_folder, variant):
    (tiny_folder / "templates" / "tiny.cu.j2").unlink()
    with pytest.raises(SpecError, match=r"specs/tiny\.yaml:3: template: tiny\.cu\.j2 is in none of"):
        action(variant)


@pytest.mark.parametrize("action", [render, source_digest])
@pytest.mark.parametrize("file", ["tiny.cu.j2", "lib/names.j2"])
def test_a_template_that_is_no_text_is_named(action, file, tiny_folder, variant):
    path = tiny_folder / "templates" / file
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match=rf"^{re.escape(str(path))}: cannot be read: 'utf-8' codec"):
        action(variant)


OUTSIDE = ["/etc/passwd", "../../secret.j2", "lib/../../../secret.j2", "..", "lib/.."]


@pytest.mark.parametrize("action", [render, source_digest])
@pytest.mark.parametrize("name", [*OUTSIDE, "{folder}/../secret.j2"])
@pytest.mark.parametrize("how", ['//% include "{name}"', '//% import "{name}" as x'])
def test_a_template_includes_nothing_outside_its_folders(action, how, name, tiny_folder, variant):
    (tiny_folder / "secret.j2").write_text("secret")
    (tiny_folder.parent / "secret.j2").write_text("secret")
    template = tiny_folder / "templates" / "tiny.cu.j2"
    name = name.format(folder=tiny_folder / "templates")
    text = template.read_text()
    template.write_text(text + how.format(name=name) + "\n")
    line = text.count("\n") + 1
    with pytest.raises(SpecError) as caught:
        action(variant)
    said = (
        f"{template}:{line}: {name!r} is not the name of a file below the folders {tiny_folder / 'templates'}"
    )
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_computed_name_leads_no_further(name, tiny_folder, variant):
    (tiny_folder.parent / "secret.j2").write_text("secret")
    template = tiny_folder / "templates" / "tiny.cu.j2"
    template.write_text(template.read_text() + f'//% include "{name[:2]}" ~ "{name[2:]}"\n')
    with pytest.raises(SpecError, match=r"tiny\.cu\.j2:\d+: .* is not the name of a file below the folders"):
        render(variant)


def test_a_header_includes_nothing_outside_its_folder(tiny_folder, variant, edit):
    (tiny_folder / "secret.cuh").write_text("secret")
    path = edit("templates/include/flashgen/tiny.cuh", "flashgen/types.cuh", "flashgen/../../../secret.cuh")
    for action in (source_digest, lambda v: headers(render(v), include_dirs(v))):
        with pytest.raises(
            SpecError, match=rf"^{re.escape(str(path))}:\d+: 'flashgen/\.\./.* is not the name"
        ):
            action(variant)


@pytest.mark.parametrize(
    "link", ["lib/names.j2", "lib", "include/flashgen/tiny.cuh", "include/flashgen", "include"]
)
def test_a_link_leads_nowhere_outside(link, tiny_folder, variant):
    path = tiny_folder / "templates" / link
    elsewhere = tiny_folder / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(SpecError, match=rf"{re.escape(str(path))} is a link out of .*; put the file itself"):
        source_digest(variant)
    with pytest.raises(SpecError, match="is a link out of"):
        headers(render(variant), include_dirs(variant))


def test_a_link_within_the_folder_and_a_linked_folder_are_as_good_as_a_file(tiny_folder, variant):
    expected = render(variant)
    path = tiny_folder / "templates" / "lib" / "names.j2"
    path.rename(path.with_name("others.j2"))
    path.symlink_to("others.j2")
    assert render(variant) == expected
    (tiny_folder / "templates").rename(tiny_folder / "elsewhere")
    (tiny_folder / "templates").symlink_to(tiny_folder / "elsewhere")
    assert render(variant) == expected
    source_digest(variant)


def test_an_installer_may_link_the_shipped_templates(tiny_folder, variant, monkeypatch):
    shipped = tiny_folder / "shipped"
    header = Path("include/flashgen/types.cuh")
    shutil.copy(templates_dir() / header, tiny_folder / "templates" / header)
    for file in [path for path in (tiny_folder / "templates").rglob("*") if path.is_file()]:
        link = shipped / file.relative_to(tiny_folder / "templates")
        link.parent.mkdir(parents=True, exist_ok=True)
        store = tiny_folder / "store" / link.name
        store.parent.mkdir(exist_ok=True)
        file.rename(store)
        link.symlink_to(store)
    for module in ("closure", "files"):
        monkeypatch.setattr(f"flashgen.source.{module}.templates_dir", lambda: shipped)
    assert headers(render(variant), include_dirs(variant))
    source_digest(variant)


@pytest.mark.parametrize("action", [render, source_digest])
@pytest.mark.parametrize("what", ["a link to nothing", "no file"])
def test_what_is_no_file_does_not_give_way_to_a_shipped_template(action, what, tiny_folder, variant):
    shipped = next(path for path in templates_dir().glob("lib/*.j2"))
    path = tiny_folder / "templates" / "lib" / shipped.name
    if what == "no file":
        path.mkdir()
    else:
        path.symlink_to("/nowhere/at/all")
    template = tiny_folder / "templates" / "tiny.cu.j2"
    template.write_text(template.read_text() + f'//% include "lib/{shipped.name}"\n')
    with pytest.raises(SpecError, match=f"^{re.escape(str(path))} is {what}; put a file there, or remove it"):
        action(variant)


def test_each_line_has_the_template_line_that_it_is_made_of(tiny_variants):
    """In all variants of the tiny family and a kernel of each shipped one: with lines that occur twice,
    loops, macros and values of several lines. A prototype is made of the line that begins its function.
    """
    shipped = [step for spec in load_specs() for step in spec.variants()[-1].steps]
    for each in (*tiny_variants, *shipped):
        lines, places = render(each).splitlines(), line_origins(each)
        assert len(places) == len(lines)
        for line, place in zip(lines, places, strict=True):
            assert bool(place) == bool(line.strip())
            file, _, number = place.rpartition(":")
            text = Path(file).read_text().splitlines()[int(number) - 1] if place else ""
            text, *_ = text.strip().partition("//#")
            pieces = re.split(r"\$\{[^}]*\}", text.strip())
            if any(pieces):  # not a value alone, which may have several lines
                begins_function = text.startswith(("__device__ ", "template <"))
                # A value at the begin of the line may end with a line break.
                pattern = ".*".join(re.escape(piece.strip()) for piece in pieces)
                # A default argument stays on the prototype.
                plain = re.sub(r"\\ =\\ \w+(?=,|\\\))", "", pattern)
                assert re.fullmatch(f"{pattern}|{plain}", line.strip()) or begins_function


def test_lines_that_occur_twice_have_places_of_their_own(variant, tiny_folder, edit):
    twice = "\n".join(f"__device__ void {name}() {{\n    nothing();\n}}" for name in ("one", "two"))
    path = edit(TEMPLATE, 'extern "C"', f'{twice}\nextern "C"')
    numbers = [n for n, line in enumerate(path.read_text().splitlines(), 1) if line == "    nothing();"]
    variant = load_variant(tiny_folder)
    places = line_origins(variant)
    found = [places[n] for n, line in enumerate(render(variant).splitlines()) if line == "    nothing();"]
    assert found == [f"{path}:{number}" for number in numbers]


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("{% if causal %}", "//%"),
        ("{%- for i in range(3) -%}", "//%"),
        ("    {% endif %}", "//%"),
        ("int x = {{ block_n }};", "${ name }"),
        ("int x = {{ block_n * 2 | int }};", "${ name }"),
        ("int x = {{- block_n -}};", "${ name }"),
        ("int x = {{ max(block_m, block_n) }};", "${ name }"),
        ("{# never rendered #}", "//#"),
    ],
)
@pytest.mark.parametrize("file", [TEMPLATE, "templates/lib/names.j2"])
def test_delimiters_of_jinja_that_are_not_ours_are_refused(text, instead, file, tiny_folder, edit):
    path = tiny_folder / file
    path.write_text(path.read_text() + f"\n{text}\n")
    line = len(path.read_text().splitlines())
    spec = load_spec(tiny_folder / "specs" / "tiny.yaml")
    for action in (lambda: render(load_variant(tiny_folder)), lambda: check_files([spec])):
        with pytest.raises(SpecError) as caught:
            action()
        assert str(caught.value).startswith(f"{path}:{line}: ")
        assert instead in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "Lengths early = {{0, 1}, {2, 3}};",
        "constexpr Pair pair = {{kOne}};",
        "constexpr Pair pair{{ kOne, kTwo }, { kOne }};",
        "int x[1][2] = {{ f(1, 2), g(2) }};",
        'asm("mma.sync {%0, %1}, {%2, %3};");',
        'asm("{%r0, %1}");',
        "int y[] = {{}};",
        "#define TEXT(x) {#x}",
        "// {{ in a comment",
    ],
)
def test_braces_of_cpp_stay_as_they_are(text, tiny_folder):
    path = tiny_folder / TEMPLATE
    path.write_text(path.read_text() + f"\n{text}\n")
    assert render(load_variant(tiny_folder)).splitlines()[-1] == text
    check_files([load_spec(tiny_folder / "specs" / "tiny.yaml")])


def test_a_template_that_is_not_there_is_told_with_the_line_of_the_spec(tiny_folder, edit_spec):
    edit_spec("template: tiny.cu.j2", "template: tinny.cu.j2")
    path = tiny_folder / "specs" / "tiny.yaml"
    line = 1 + next(n for n, text in enumerate(path.read_text().splitlines()) if "tinny.cu.j2" in text)
    for action in (lambda: check_files([load_spec(path)]), lambda: render(load_variant(tiny_folder))):
        with pytest.raises(SpecError) as caught:
            action()
        assert str(caught.value).startswith(f"{path}:{line}: template: tinny.cu.j2 is in none of")


def test_templates_that_no_kernel_reads_are_found(tiny_folder):
    spec = load_spec(tiny_folder / "specs" / "tiny.yaml")
    assert unused_overrides([spec]) == []
    templates = tiny_folder / "templates"
    (templates / "lib" / "softmax.cuh.j2").write_text("")
    (templates / "include" / "flashgen" / "sm80.cuh").write_text("")
    assert unused_overrides([spec]) == [
        templates / "include" / "flashgen" / "sm80.cuh",
        templates / "lib" / "softmax.cuh.j2",
    ]


def test_a_spec_folder_may_hold_its_own_templates(tiny_folder):
    """Files beside the spec serve as well as a sibling folder does, which goes first."""
    flat = tiny_folder.parent / "flat"
    shutil.copytree(tiny_folder / "templates", flat)
    shutil.copy(tiny_folder / "specs" / "tiny.yaml", flat / "tiny.yaml")
    variant = load_spec(flat / "tiny.yaml").variants()[0]
    assert include_dirs(variant)[0] == str(flat / "include")
    assert render(variant) == render(load_spec(tiny_folder / "specs" / "tiny.yaml").variants()[0])
    assert search_path(variant)[:2] == (str(tiny_folder.parent / "templates"), str(flat))


def test_flatten_inlines_each_header_once(variant):
    folders = include_dirs(variant)
    source = render(variant)
    twice = source.replace(
        '#include "flashgen/tiny.cuh"', '#include "flashgen/types.cuh"\n#include "flashgen/tiny.cuh"'
    )
    for text in (source, twice):
        flat = flatten(text, folders)
        assert '#include "flashgen' not in flat
        assert "#pragma once" not in flat
        assert flat.count("row_of(int block") == flat.count("struct fp16") == 1
        assert flat.index("struct fp16") < flat.index("row_of(int block") < flat.index("struct Params")
    assert set(headers(source, folders)) == {"flashgen/tiny.cuh", "flashgen/types.cuh"}


def test_a_missing_header_is_named(variant, edit):
    edit("templates/include/flashgen/tiny.cuh", "flashgen/types.cuh", "flashgen/tipes.cuh")
    (header,) = (
        path for path in (Path(f, "flashgen/tiny.cuh") for f in include_dirs(variant)) if path.exists()
    )
    line = 1 + header.read_text().splitlines().index('#include "flashgen/tipes.cuh"')
    said = rf"^{re.escape(str(header))}:{line}: #include \"flashgen/tipes\.cuh\": no such header"
    for action in (lambda: flatten(render(variant), include_dirs(variant)), lambda: source_digest(variant)):
        with pytest.raises(SpecError, match=said):
            action()


def test_flat_and_plain_source_compile(tiny_folder):
    variant = load_variant(tiny_folder, dtype="fp32", gqa="gqa")
    source, folders = render(variant), include_dirs(variant)
    plain = compile_cubin(source, variant.name, "sm_80", headers=headers(source, folders))
    flat = compile_cubin(flatten(source, folders), variant.name, "sm_80", headers={})
    assert plain.registers == flat.registers > 0


@pytest.mark.drawn
@pytest.mark.parametrize("spec", load_specs(), ids=lambda spec: spec.name)
def test_shipped_templates_render_for_every_variant(spec):
    for v in spec.variants():
        text = render(v)
        assert f"{v.name}(" in text
        assert "\t" not in text
