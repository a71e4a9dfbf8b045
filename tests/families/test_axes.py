import pytest

from flashgen.errors import SpecError
from flashgen.families.load import load_spec

AXIS = "  head_dim: [32, 64]\n"
WITH_DEFAULT = AXIS + "  head_dim_v: {default: head_dim, also: {64: [32, 16]}}\n"


def test_an_axis_with_a_default_adds_only_the_points_that_it_lists(edit_spec, tiny_spec):
    spec = load_spec(edit_spec(AXIS, WITH_DEFAULT))
    pairs = {(v.head_dim, v.head_dim_v) for v in spec.variants()}
    assert pairs == {(32, 32), (64, 64), (64, 32), (64, 16)}
    assert spec.axes["head_dim_v"] == (32, 64, 16)
    # All else is crossed with them as before, and the default keeps its place and its name.
    plain = [v for v in spec.variants() if v.head_dim == v.head_dim_v]
    assert [v.name for v in plain] == [v.name for v in tiny_spec.variants()]
    for pair in pairs:
        found = spec.select(head_dim=pair[0], head_dim_v=pair[1])
        assert {(v.dtype, v.mask_type, v.gqa, v.target) for v in found} == {
            (v.dtype, v.mask_type, v.gqa, v.target) for v in tiny_spec.select(head_dim=pair[0])
        }
    assert spec.select(head_dim=32, head_dim_v=64) == ()
    assert len({v.name for v in spec.variants()}) == len(spec.variants())
    assert "tiny_fwd_hdim64_16_fp16_causal_sm80" in {v.name for v in spec.variants()}


def test_conditions_and_expressions_know_the_axis(edit_spec):
    path = edit_spec(AXIS, WITH_DEFAULT)
    text = path.read_text()
    text = text.replace("* head_dim * element_bytes", "* head_dim_v * element_bytes")
    path.write_text(text.replace("  - {target: sm80, head_dim: 64,", "  - {target: sm80, head_dim_v: 16,"))
    spec = load_spec(path)
    by_width = {
        v.head_dim_v: v for v in spec.select(head_dim=64, target="sm80", dtype="fp16") if not v.tile_name
    }
    assert {width: v.tile_value("warps") for width, v in by_width.items()} == {64: 4, 32: 4, 16: 8}
    assert by_width[64].smem_bytes == 2 * by_width[32].smem_bytes


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "{default: hed_dim}",
            r"axes.head_dim_v.default: `hed_dim` is not an earlier axis .*allowed: head_dim$",
        ),
        ("{default: dtype}", r"axes.head_dim_v.default: `dtype` is not an earlier axis"),
        ("{also: {64: 32}}", r"axes.head_dim_v: the key `default` is missing"),
        ("{default: head_dim, or: {64: 32}}", r"axes.head_dim_v.or: unknown key; allowed: default, also"),
        ("{default: head_dim, also: {48: 32}}", r"also.48: not a value of axes.head_dim; allowed: 32, 64"),
        ("{default: head_dim, also: {64: 64}}", r"also.64: `64` is the default here already"),
        ("{default: head_dim, also: {64: [16, 16]}}", r"also.64: a value occurs twice"),
        ("{default: head_dim, also: {64: []}}", r"also.64: "),
        ("{default: head_dim, also: {64: 1.5}}", r"also.64\[0\]: .*1.5"),
    ],
)
def test_a_wrong_default_is_explained(given, says, edit_spec):
    path = edit_spec(AXIS, AXIS + f"  head_dim_v: {given}\n")
    line = path.read_text().splitlines().index(f"  head_dim_v: {given}") + 1
    with pytest.raises(SpecError, match=rf"tiny\.yaml:{line}: .*{says}"):
        load_spec(path)
