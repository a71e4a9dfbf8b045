import textwrap

import pytest

from flashgen.errors import SpecError
from flashgen.families.load import load_spec, load_specs
from flashgen.host.paths import specs_dir
from flashgen.toolchain.cache import CubinCache

WIDE = """\
extends: flash_fwd_sm80
axes:
  head_dim: [224]
  dtype: [fp16, bf16]
tiles:
  - {head_dim: 224, block_m: 64, block_n: 32, warps: 4, loop: stages, min_blocks: 2}
"""


@pytest.fixture
def write(tmp_path):
    """``write(name, text)`` writes a spec into a folder of its own and returns its path."""

    def to(name, text):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return path

    return to


def test_only_what_differs_is_said(write):
    spec, base = load_spec(write("wide", WIDE)), load_spec(specs_dir() / "flash_fwd_sm80.yaml")
    assert spec.family == "wide"
    assert spec.axes == base.axes | {"head_dim": (224,), "head_dim_v": (224,), "dtype": ("fp16", "bf16")}
    assert spec.targets == base.targets
    names = {variant.name for variant in spec.variants()}
    assert "wide_hdim224_fp16_causal_packgqa_sm80" in names
    variant = next(v for v in spec.variants() if v.name == "wide_hdim224_fp16_sm80")
    like = next(
        v for v in base.variants() if v.head_dim == 256 and v.dtype == "fp16" and v.mask_type == "none"
    )
    assert (variant.template, variant.header, variant.params) == (like.template, like.header, like.params)
    assert dict(variant.tile) == {
        "block_m": 64, "block_n": 32, "warps": 4, "loop": "stages", "min_blocks": 2,
    }  # fmt: skip


# Of the parameter in the step preprocess of flash_bwd_sm90.
DELTA_LINE = next(
    number
    for number, line in enumerate((specs_dir() / "flash_bwd_sm90.yaml").read_text().splitlines(), 1)
    if "dlse, delta," in line
)

AXES = """\
extends: flash_fwd_sm80
axes:
  {}
"""
STEPS = """\
extends: flash_bwd_sm90
axes: {gqa: [mha], dq_order: [none]}
steps:
  - {name: preprocess}
  - name: main
    threads: 256 + block_n
  - name: convert
    threads: 128
"""


def test_values_and_defaults_of_tile_keys_that_are_left_out_are_dropped(write):
    base = """\
        extends: flash_fwd_v1
        tile_keys: [block_m, block_n, warps, turns]
        tile_values: {turns: [taken, none]}
        tile_defaults: {block_n: 64, turns: none}
        """
    write("wide", textwrap.dedent(base))
    narrow = """\
        extends: wide
        tile_keys: [block_m, block_n, warps]
        tiles: [{head_dim: 64, block_m: 64, warps: 4}]
        """
    spec = load_spec(write("narrow", textwrap.dedent(narrow)))
    tiles = {variant.tile for variant in spec.variants() if variant.head_dim == 64}
    assert tiles == {(("block_m", 64), ("block_n", 64), ("warps", 4))}


def test_a_step_has_what_it_does_not_say_from_the_one_of_its_name(write):
    found = {v.name: v for v in load_spec(write("flash_bwd_sm90", STEPS)).variants()}
    base = {v.name: v for v in load_spec(specs_dir() / "flash_bwd_sm90.yaml").variants()}
    assert {v.step for v in found.values()} == {"preprocess", "main", "convert"}
    for name, variant in found.items():
        assert variant.threads == {"preprocess": 256, "main": 384, "convert": 128}[variant.step]
        for what in ("template", "params", "grid", "smem_bytes", "dependent_launch"):
            assert getattr(variant, what) == getattr(base[name], what), (name, what)


def test_own_rows_win_and_the_others_stay(write):
    row = "  - {head_dim: 64, dtype: fp16, mask_type: causal, gqa: mha, target: sm80,\n"
    row += "     block_m: 64, block_n: 32, warps: 4, loop: stages, min_blocks: 2}\n"
    spec = load_spec(write("flash_fwd_sm80", f"extends: flash_fwd_sm80\ntiles:\n{row}"))
    base = load_spec(specs_dir() / "flash_fwd_sm80.yaml")
    assert spec.family == base.family
    changed = {v.name for v in spec.variants()} - {v.name for v in base.variants()}
    assert not changed
    tiles = {v.name: v.tile for v in base.variants()}
    differing = [v.name for v in spec.variants() if v.tile != tiles[v.name]]
    others = ("", "_dropout", "_sink", "_sink_dropout")
    assert differing == [f"flash_fwd_hdim64_fp16_causal{other}_sm80" for other in others]


def test_a_spec_of_ones_own_is_extended_and_both_are_loaded(tiny_folder, monkeypatch):
    monkeypatch.setenv("FLASHGEN_SPECS", str(tiny_folder / "specs"))
    child = tiny_folder / "specs" / "small.yaml"
    child.write_text("extends: tiny\naxes: {head_dim: [32]}\n")
    (small,) = (spec for spec in load_specs() if spec.name == "small")
    assert small.family == "small"
    assert {variant.head_dim for variant in small.variants()} == {32}
    (tiny_folder / "specs" / "smaller.yaml").write_text("extends: small\naxes: {dtype: [fp16]}\n")
    smaller = load_spec(tiny_folder / "specs" / "smaller.yaml")
    assert {(v.head_dim, v.dtype) for v in smaller.variants()} == {(32, "fp16")}


def test_a_changed_base_is_seen_through_the_cache(tiny_folder, edit_spec, tmp_path):
    child = tiny_folder / "specs" / "small.yaml"
    child.write_text("extends: tiny\naxes: {head_dim: [32]}\n")
    cache = CubinCache(tmp_path / "cache")
    before = load_spec(child, cache)
    assert load_spec(child, cache).content == before.content
    edit_spec("family: tiny_fwd", "family: other\ndescription: changed")
    assert load_spec(child, cache).description == "changed" != before.description


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: flash_fwd_sm70\n", r"wide.yaml:1: extends: no spec flash_fwd_sm70 in .*are .*fwd_sm80"),
        ("#\nextends: scores\n", r"wide.yaml:2: extends: no spec scores in .* are .*, score_gradient_sm90$"),
        ("#\n'extends': flash_fwd_sm80\n", r"wide.yaml:2: extends: .* line `extends: flash_fwd_sm80`"),
        ("#\nextends: >\n  flash_fwd_sm80\n", r"wide.yaml:2: extends: .* line `extends: flash_fwd_sm80` "),
        ("#\nextends:\naxes: {}\n", r"wide.yaml:2: extends: found None; expected a name"),
        ("axes: {}\nextends: wide\n", r"wide.yaml:2: extends: no spec wide in"),
        (WIDE.replace("block_n: 32", "blok_n: 32"), r"wide.yaml:6: tiles\[0\].blok_n: unknown key"),
        (WIDE.replace("loop: stages", "loop: no"), r"wide.yaml:6: tiles\[0\].loop"),
        (WIDE.replace("[fp16, bf16]", "[fp64]"), r"wide.yaml:4: axes.dtype: no call needs"),
        (WIDE + "  - {head_dim: 224, block_m: 128, block_n: 32, warps: 4, loop: stages, min_blocks: 2}\n",
         r"wide.yaml:7: tiles\[1\]: the row never applies"),
        (WIDE.partition("tiles:")[0], r"wide.yaml:1: tiles: found \[\]; expected a list that is not empty"),
        (STEPS.replace("128", "128\n    grid: {}"), r"wide.yaml:9: steps\[2\].grid"),
        (STEPS.replace("dq_order: [none]", "dq_order: [other]"), r"wide.yaml:2: axes.dq_order"),
        (AXES.format("head_dim: [-64]"), r"wide.yaml:3: axes.head_dim\[0\]: found -64; expected an integer"),
        (AXES.format("dtype: [fp17]"), r"wide.yaml:3: axes.dtype: no call needs `fp17`; allowed: fp16"),
        (AXES.format("head_dim: []"), r"wide.yaml:3: axes.head_dim: found \[\]; expected a list that is"),
        (AXES.format("head_dim: [72]"), r"wide.yaml:1: tiles: found \[\]; .*; no inherited row fits"),
        (AXES.format("head_dim: [64, wide]"), r"wide.yaml:3: axes.head_dim: `wide` stands in head_dim_v"),
        (AXES.format("head_dim_v: {default: head_dim, also: 3}"), r"wide.yaml:3: axes.head_dim_v.also"),
        (AXES.format("head_dim_v: {default: [64]}"), r"wide.yaml:3: axes.head_dim_v.default: found \[64\]"),
        (AXES.format("dtype: [fp32]").replace("sm80", "sm90"),
         r"wide.yaml:3: axes.dtype: the size of `fp32` is missing; give it in `element_bytes`"),
        (STEPS + "workspace: {}\n",
         rf"bwd_sm90.yaml:{DELTA_LINE}: steps\[2\].params\[4\]: `delta` is neither a parameter of"),
    ],
)  # fmt: skip
def test_an_error_names_the_file_and_line_that_is_wrong(text, message, write):
    with pytest.raises(SpecError, match=message):
        load_spec(write("wide", text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#\n'extends': flash_fwd_sm80\n", r"base.yaml:2: extends: write it as a line"),
        ("axes: [64]\n", r"base.yaml:1: axes: expected a mapping, found \[64\]"),
        (AXES.format("dtype: [fp17]"), r"base.yaml:3: axes.dtype: no call needs `fp17`"),
        (AXES.format("head_dim_v: {default: head_dim, also: 3}"), r"base.yaml:3: axes.head_dim_v.also"),
    ],
)
def test_an_error_names_the_base_that_is_wrong(text, message, write):
    write("base", text)
    with pytest.raises(SpecError, match=message):
        load_spec(write("wide", "extends: base\naxes: {mask_type: [none]}\n"))


def test_two_that_extend_each_other_are_refused(write):
    write("a", "extends: b\n")
    with pytest.raises(SpecError, match=r"a\.yaml:1: extends: b extends itself|b\.yaml:1: extends"):
        load_spec(write("b", "extends: a\n"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("a", r"c\.yaml:3: extends: a extends itself: a, b, c, a; name another spec, or leave it out"),
        ("b", r"a\.yaml:1: extends: b extends itself: b, c, a, b;"),
        ("outside", r"c\.yaml:3: extends: a extends itself: a, b, c, a;"),
    ],
)
def test_a_circle_is_told_at_the_line_that_closes_it(entry, message, write):
    texts = {"a": "extends: b", "b": "#\nextends: c", "c": "#\n#\nextends: a", "outside": "extends: a"}
    paths = {name: write(name, text) for name, text in texts.items()}
    with pytest.raises(SpecError, match=message):
        load_spec(paths[entry])


def test_only_a_file_itself_means_the_shipped_one_by_its_own_name(write):
    write("mine", "#\nextends: flash_fwd_sm80\n")
    with pytest.raises(SpecError, match=r"mine\.yaml:2: extends: flash_fwd_sm80 extends itself"):
        load_spec(write("flash_fwd_sm80", "extends: mine\n"))
    with pytest.raises(SpecError, match=rf"wide\.yaml:1: extends: no spec wide in {specs_dir()}; shipped"):
        load_spec(write("wide", "extends: wide\n"))


def test_what_is_committed_has_the_first_value_of_an_axis_that_is_added(write):
    variants = load_spec(write("wide", "extends: flash_fwd_v1\naxes: {sinks: [none, sink]}\n")).variants()
    assert {variant.axis("sinks") for variant in variants} == {"none", "sink"}
    assert {variant.axis("sinks") for variant in variants if variant.committed} == {"none"}
