"""Features: what some variants of a family do, by names that templates and the launcher find."""

import re

import pytest

from flashgen.errors import SpecError
from flashgen.families.features import CLEARS_AHEAD, HEAD_SETS, PLACES_BLOCKS
from flashgen.families.load import load_spec, load_specs
from flashgen.source.render import render

FEATURES = "features:\n  swift: {mask_type: causal, warps: [4]}\n  head_sets: {}\ntile_keys:"


@pytest.fixture
def spec_file(tiny_folder):
    path = tiny_folder / "specs" / "tiny.yaml"
    path.write_text(path.read_text().replace("tile_keys:", FEATURES))
    return path


def test_a_variant_has_the_features_whose_conditions_hold(spec_file):
    for variant in load_spec(spec_file).variants():
        swift = variant.mask_type == "causal" and variant.tile_value("warps") == 4
        assert variant.features == (*["swift"] * swift, HEAD_SETS)


def test_a_template_sees_their_names(spec_file, tiny_folder):
    template = tiny_folder / "templates" / "tiny.cu.j2"
    line = '//% if "swift" in features\n// it is swift\n//% endif\n'
    template.write_text(re.sub(r"(\$\{ header \}\n)", rf"\1{line}", template.read_text()))
    variants = load_spec(spec_file).variants()
    assert {variant.features for variant in variants} == {("swift", HEAD_SETS), (HEAD_SETS,)}
    for variant in variants:
        assert ("it is swift" in render(variant)) == ("swift" in variant.features)


def test_a_feature_brings_the_parameters_that_are_declared_for_it(spec_file):
    text = spec_file.read_text()
    spec_file.write_text(
        re.sub(r"^params:\n(?:  - .*\n)+", "params: [out, head_sets_log2]\n", text, flags=re.M)
    )
    assert {tuple(p.name for p in v.params) for v in load_spec(spec_file).variants()} == {
        ("out", "head_sets_log2")
    }
    spec_file.write_text(spec_file.read_text().replace("head_sets: {}", "head_sets: {gqa: packed}"))
    for variant in load_spec(spec_file).variants():
        assert ("head_sets_log2" in [p.name for p in variant.params]) == (variant.gqa == "packed")
    spec_file.write_text(spec_file.read_text().replace("  head_sets: {gqa: packed}\n", ""))
    why = r"params\[1\]: no variant has `head_sets_log2`, which is of feature head_sets; leave it out"
    with pytest.raises(SpecError, match=why):
        load_spec(spec_file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("swift", "Swift", r"features\.Swift: found 'Swift'; expected a name of lower-case letters"),
        (
            "causal, warps",
            "dense, warps",
            r"features\.swift\.mask_type: found 'dense'; allowed: causal, none",
        ),
        ("warps: [4]", "warp: 4", r"features\.swift\.warp: unknown key; allowed: head_dim, dtype"),
        ("head_sets: {}", "head_sets: true", r"features\.head_sets: found True; expected a mapping"),
    ],
)
def test_a_wrong_feature_names_the_line_and_what_would_do(old, new, message, spec_file):
    spec_file.write_text(spec_file.read_text().replace(FEATURES, FEATURES.replace(old, new)))
    with pytest.raises(SpecError, match=rf"tiny\.yaml:\d+: {message}"):
        load_spec(spec_file)


def test_inherited_features_are_restricted_to_the_axes_that_are_left(spec_file):
    child = spec_file.with_name("small.yaml")
    child.write_text("extends: tiny\naxes: {mask_type: [none]}\n")
    assert {variant.features for variant in load_spec(child).variants()} == {(HEAD_SETS,)}
    child.write_text("extends: tiny\nfeatures: {swift: {gqa: mha}}\n")
    found = {(variant.gqa, variant.features) for variant in load_spec(child).variants()}
    assert found == {("mha", ("swift",)), ("gqa", ()), ("packed", ())}


def test_shipped_kernels_have_the_features_of_which_their_structs_speak():
    """The launcher goes by features; the members that it fills in for them are in the structs of the call."""
    of = {CLEARS_AHEAD: "clear_distance", PLACES_BLOCKS: "num_key_blocks", HEAD_SETS: "head_sets_log2"}
    for spec in load_specs():
        for variant in spec.variants():
            if variant.is_main:
                taken = {param.name for step in variant.steps for param in step.params}
                assert {name for name, param in of.items() if param in taken} == of.keys() & {
                    *variant.features
                }
