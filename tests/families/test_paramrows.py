"""Rows of `params`: names of what is declared for all families, and what a spec changes or adds."""

import re

import pytest

from flashgen.errors import SpecError
from flashgen.families import parameters
from flashgen.families.load import load_spec, load_specs
from flashgen.families.params import Box
from flashgen.operators import OPERATORS
from flashgen.source.params import layout


@pytest.fixture
def with_params(tiny_folder):
    """A spec with these rows of `params`."""
    path = tiny_folder / "specs" / "tiny.yaml"

    def write(rows, operator="attention"):
        text = path.read_text().replace("operator: attention", f"operator: {operator}")
        path.write_text(
            re.sub(r"^params:(?: \[.*\]\n|\n(?:  - .*\n)+)", f"params: [{rows}]\n", text, flags=re.M)
        )
        return path

    return write


def one(path, **axes):
    variants = load_spec(path).select(**axes, target="sm80")
    assert len({variant.params for variant in variants}) == 1
    return variants[0].params


def test_a_name_stands_for_what_is_declared(with_params):
    path = with_params("q, out, lse, mask, scale_log2, group_size_divisor, mask_vector_width")
    with pytest.raises(
        SpecError, match=r"params\[3\]: no variant has `mask`.* mask_type dense; leave it out"
    ):
        load_spec(path)
    path = with_params("q, out, lse, scale_log2, group_size_divisor, diagonal_offset, q_vector_width")
    plain = [("q", "const element*"), ("out", "element*"), ("lse", "float*"), ("scale_log2", "float")]
    width = ("q_vector_width", "int32_t")
    divisor, offset = ("group_size_divisor", "uint64_t"), ("diagonal_offset", "int32_t")
    for gqa in ("mha", "gqa"):
        for mask_type in ("none", "causal"):
            expected = [*plain, *[divisor] * (gqa == "gqa"), *[offset] * (mask_type == "causal"), width]
            assert [(p.name, p.ctype) for p in one(path, gqa=gqa, mask_type=mask_type)] == expected


def test_the_strides_of_an_array_are_one_name(with_params):
    params = one(with_params("k_strides, out_strides"), gqa="mha", mask_type="none")
    assert [p.name for p in params] == [
        f"{a}_{s}_stride" for a in ("k", "out") for s in ("batch", "row", "head")
    ]
    assert {p.ctype for p in params} == {"int64_t"}


def test_the_comment_has_the_shape_that_the_operator_gives(with_params):
    docs = {p.name: p.doc for p in one(with_params("q, out, lse"), gqa="mha", mask_type="none")}
    assert docs["q"].startswith("(batch, seqlen_q, num_heads_q, head_dim)")
    assert docs["out"].startswith("(batch, seqlen_q, num_heads_q, head_dim_v)")
    assert docs["lse"].startswith("(batch, num_heads_q, seqlen_q)")


def test_a_row_without_a_type_changes_what_is_declared(with_params):
    path = with_params(
        "{name: out, when: {warps: 8}}, {name: seqlen_q, doc: queries}, "
        "{name: diagonal_offset, when: {warps: 4}}"
    )
    for variant in load_spec(path).variants():
        expected = ["out"] * (variant.tile_value("warps") == 8) + ["seqlen_q"]
        expected += ["diagonal_offset"] * (variant.tile_value("warps") == 4 and variant.mask_type == "causal")
        assert [p.name for p in variant.params] == expected
        assert [p.doc for p in variant.params if p.name == "seqlen_q"] == ["queries"]


def test_a_condition_of_a_row_replaces_the_declared_one_of_its_axis(with_params):
    path = with_params("seqlen_q, {name: diagonal_offset, when: {mask_type: none}}")
    for variant in load_spec(path).variants():
        assert ("diagonal_offset" in [p.name for p in variant.params]) == (variant.mask_type == "none")


def test_a_row_with_a_type_takes_nothing_from_a_declaration(with_params):
    path = with_params("{name: diagonal_offset, type: int32_t}, {name: mine, type: float, doc: a number}")
    for variant in load_spec(path).variants():
        assert [(p.name, p.ctype, p.doc) for p in variant.params] == [
            ("diagonal_offset", "int32_t", ""),
            ("mine", "float", "a number"),
        ]


def test_a_box_makes_an_array_a_tensor_map(with_params):
    (q,) = one(with_params("{name: q, box: {columns: 32, rows: 16}}"), dtype="fp16", head_dim=32, gqa="mha")
    assert (q.ctype, q.box) == ("tensor_map", Box(32, 16))
    assert q.doc.startswith("(head_dim, seqlen_q, num_heads_q, batch)")


def test_a_step_that_only_reads_an_array_says_const():
    (spec,) = (spec for spec in load_specs() if spec.name == "flash_decode_sm80")
    decode, combine = spec.variants()[:2]
    types = [{p.name: p.ctype for p in v.params}["part_sums"] for v in (decode, combine)]
    assert types == ["float*", "const float*"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            "out, seqlen_qq",
            r"params\[1\]: `seqlen_qq` is neither a parameter of attention .*`seqlen_q`.*type: \.\.\.",
        ),
        ("out, dout", r"params\[1\]: `dout` is neither a parameter of attention"),
        ("out, Out", r"params\[1\]: found 'Out'; expected the name of a parameter, or const and a name"),
        ("out, 3", r"params\[1\]: found 3; expected a mapping"),
        ("out, out", r"params\[1\]\.name: a second parameter is called `out`"),
        ("q_strides, q_row_stride", r"params\[1\]\.name: a second parameter is called `q_row_stride`"),
        ("const q", r"params\[0\]: `q` is a const element\*; const is for an array that steps write"),
        ("const seqlen_q", r"params\[0\]: `seqlen_q` is a int32_t; const is for"),
        ("{name: lse, box: {columns: 32, rows: 1}}", r"params\[0\]\.box: only a tensor_map has a box"),
        (
            "{name: lse_strides, box: {columns: 32, rows: 1}}",
            r"params\[0\]\.box: only a tensor_map has a box",
        ),
        ("{name: nothing}", r"params\[0\]: `nothing` is neither a parameter"),
        ("{name: out, when: {mask_type: dense}}", r"params\[0\]\.when\.mask_type: found 'dense'; allowed"),
    ],
)
def test_a_wrong_row_names_the_line_and_what_would_do(rows, message, with_params):
    with pytest.raises(SpecError, match=rf"tiny\.yaml:\d+: {message}"):
        load_spec(with_params(rows))


def test_inherited_rows_that_no_variant_has_are_dropped(tiny_folder, with_params):
    with_params("out, diagonal_offset, group_size_divisor")
    child = tiny_folder / "specs" / "small.yaml"
    child.write_text("extends: tiny\naxes: {mask_type: [none], gqa: [mha]}\n")
    assert {tuple(p.name for p in v.params) for v in load_spec(child).variants()} == {("out",)}


def test_every_declaration_is_of_use():
    """A number, or a note on an array, that no shipped kernel takes is left over."""
    taken = {p.name for spec in load_specs() for v in spec.variants() for p in v.params}
    arrays = {argument.name for operator in OPERATORS.values() for argument in operator.arguments}
    assert parameters.NUMBERS.keys() <= taken
    assert parameters.ARRAYS.keys() <= taken | arrays


def test_long_and_short_rows_make_one_struct(with_params):
    """The rows of this test in their long form are what the short ones stand for, but for comments."""
    short = with_params("out, out_strides, seqlen_q, diagonal_offset, scale_log2")
    found = {v.name: layout(v.params).offsets for v in load_spec(short).variants()}
    strides = ", ".join(f"{{name: out_{s}_stride, type: int64_t}}" for s in ("batch", "row", "head"))
    long = with_params_long(short, strides)
    assert {v.name: layout(v.params).offsets for v in load_spec(long).variants()} == found


def with_params_long(path, strides):
    rows = f"{{name: out, type: element*}}, {strides}, {{name: seqlen_q, type: int32_t}}, "
    rows += (
        "{name: diagonal_offset, type: int32_t, when: {mask_type: causal}}, {name: scale_log2, type: float}"
    )
    path.write_text(re.sub(r"^params: \[.*\]$", f"params: [{rows}]", path.read_text(), flags=re.M))
    return path
