import dataclasses
import json
import pickle

import pytest

from flashgen.families.dispatch import OF_A_TILE, Dispatch
from flashgen.families.load import load_spec
from flashgen.families.selection import find_by_axes
from flashgen.families.variant import Variant, variant_name

POINT = {"head_dim": 128, "head_dim_v": 128, "dtype": "fp16", "mask_type": "causal", "gqa": "gqa"}


@pytest.mark.parametrize(
    ("axes", "tile", "name"),
    [
        ({}, "", "flash_fwd_hdim128_fp16_causal_gqa_sm80"),
        ({}, "m64", "flash_fwd_hdim128_fp16_causal_m64_gqa_sm80"),
        ({"gqa": "packed"}, "", "flash_fwd_hdim128_fp16_causal_packgqa_sm80"),
        ({"gqa": "mha", "mask_type": "none"}, "", "flash_fwd_hdim128_fp16_sm80"),
        ({"layout": "varlen", "splits": 4}, "", "flash_fwd_hdim128_fp16_causal_varlen_splits4_gqa_sm80"),
        ({"head_dim": 192, "head_dim_v": 128}, "", "flash_fwd_hdim192_128_fp16_causal_gqa_sm80"),
        ({"head_dim_v": 128}, "", "flash_fwd_hdim128_fp16_causal_gqa_sm80"),
        ({"layout": "none"}, "", "flash_fwd_hdim128_fp16_causal_gqa_sm80"),
    ],
)
def test_names_follow_the_upstream_files(axes, tile, name):
    assert variant_name("flash_fwd", {**POINT, **axes}, "sm80", tile) == name


def test_a_variant_is_a_value(tiny_spec, tiny_variants):
    again = load_spec(tiny_spec.path).variants()
    assert again == tiny_variants
    assert {variant: i for i, variant in enumerate(tiny_variants)} == {v: i for i, v in enumerate(again)}
    assert pickle.loads(pickle.dumps(tiny_variants)) == tiny_variants
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_variants[0].threads = 1


@pytest.mark.parametrize(
    "change", [{"threads": 64}, {"tile_name": "x"}, {"options": ("-G",)}, {"spec_dir": "/"}]
)
def test_variants_that_differ_are_not_equal(change, tiny_variants):
    assert dataclasses.replace(tiny_variants[0], **change) != tiny_variants[0]


def test_look_ups(tiny_variants):
    (variant, *_) = find_by_axes(
        tiny_variants, {"head_dim": 64, "dtype": "fp32", "mask_type": "causal", "gqa": "gqa"}
    )
    assert (variant.head_dim, variant.dtype, variant.mask_type, variant.gqa) == (64, "fp32", "causal", "gqa")
    assert variant.axis("head_dim") == 64
    assert variant.tile_value("block_m") == 128
    with pytest.raises(KeyError, match="there are block_m, block_n"):
        variant.tile_value("blockm")


def test_as_dict_is_json_and_has_every_field(tiny_variants):
    for variant in tiny_variants:
        described = variant.as_dict()
        assert json.loads(json.dumps(described)) == described
    left_out = {"element_bytes", "header", "priority", "spec_dir", "visits", "workspace"}
    left_out |= {"dispatch", "is_main", "before", "after"}
    assert {field.name for field in dataclasses.fields(Variant)} - set(described) == left_out
    assert set(Dispatch._fields) - set(described) == {"prefer"}


@pytest.mark.parametrize(
    ("min_arch", "archs", "gpu", "code"),
    [
        ("sm_90a", ("sm_90a",), "sm_90", "sm_90a"),
        ("sm_90a", ("sm_90",), "sm_90", "sm_90a"),
        ("sm_80", ("sm_90", "sm_90a"), "sm_90", "sm_90a"),
        ("sm_80", ("sm_80", "sm_90"), "sm_90", "sm_90"),
        ("sm_80", ("sm_80",), "sm_90a", "sm_90"),
        ("sm_80", ("sm_80",), "sm_89", "sm_89"),
        ("sm_80", ("sm_100f",), "sm_100", "sm_100f"),
        ("sm_90a", ("sm_90a",), "sm_100", None),
        ("sm_80", ("sm_80",), "sm_75", None),
    ],
)
def test_what_to_compile_for_a_gpu(tiny_variants, min_arch, archs, gpu, code):
    variant = dataclasses.replace(tiny_variants[0], min_arch=min_arch, archs=archs)
    assert variant.code_for(gpu) == code
    if gpu == "sm_90":
        assert variant.code_for("sm_90a") == code


def test_what_dispatch_gets_from_a_spec_is_beside_the_kernel(tiny_folder):
    """A number of the record is named in one place: a spec gives it, the variant carries it, and neither the
    source nor its digest depends on it.
    """
    path = tiny_folder / "specs" / "tiny.yaml"
    text, plain = path.read_text(), load_spec(path).variants()[0]
    given = {"prefer": "on_request", "rows_at_most": 3}
    given |= {name: 0.5 for name in Dispatch._fields if name not in (*given, *OF_A_TILE)}
    rows = ", ".join(f"{name}: {value}" for name, value in given.items())
    text = text.replace("dispatch: {prefer: on_request}", f"dispatch: {{{rows}}}")
    tile = "".join(f"{name}: 0.5, " for name in OF_A_TILE)
    path.write_text(text.replace("- {target: sm80, head_dim: 64,", f"- {{target: sm80, {tile}head_dim: 64,"))
    variant = load_spec(path).select(head_dim=64, target="sm80")[0]
    assert variant.dispatch._asdict() == given | dict.fromkeys(OF_A_TILE, 0.5)
    like = load_spec(path).variants()[0]
    assert like.dispatch != plain.dispatch
    assert like.rendered_form() == plain.rendered_form()
