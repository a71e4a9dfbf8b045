import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.errors import BadParam, FlashgenError
from flashgen.families.load import load_specs
from flashgen.families.selection import SelectionError, find_by_axes, find_one, keys_of, select
from flashgen.families.variant import Variant

AXES = {
    "head_dim": [64, 128],
    "dtype": ["fp16", "bf16"],
    "mask_type": ["none", "causal"],
    "gqa": ["mha", "packed"],
}


def make(target, tile_name, point):
    return Variant(
        family="flash_fwd",
        spec="flash_fwd_sm80",
        template="flash_fwd_sm80.cu.j2",
        target=target,
        min_arch="sm_80",
        archs=("sm_80", "sm_90"),
        max_smem=166912,
        axes=tuple(zip(AXES, point, strict=True)),
        tile=(("block_m", 64 if tile_name else 128), ("warps", 4)),
        tile_name=tile_name,
        threads=128,
        smem_bytes=65536,
        element_bytes=2,
        params=(),
        header="flashgen/sm80.cuh",
        committed=point[0] == 128,
    )


VARIANTS = tuple(
    make(target, tile_name, point)
    for point in itertools.product(*AXES.values())
    for target in ("sm80", "sm86")
    for tile_name in ("m64", "")
)


def test_no_selection_keeps_all():
    assert select(VARIANTS, []) == VARIANTS


@given(
    st.fixed_dictionaries(
        {}, optional={axis: st.lists(st.sampled_from(values), min_size=1) for axis, values in AXES.items()}
    ).filter(bool),
    st.booleans(),
)
def test_terms_filter_as_the_axes_do(wanted, negated):
    line = " ".join(
        f"{axis}{'!=' if negated else '='}{','.join(map(str, values))}" for axis, values in wanted.items()
    )
    expected = tuple(
        variant
        for variant in VARIANTS
        if all((variant.axis(axis) in values) != negated for axis, values in wanted.items())
    )
    if expected:
        assert select(VARIANTS, [line]) == expected
    else:
        with pytest.raises(SelectionError, match="none matches all"):
            select(VARIANTS, [line])


def test_several_selections_add_up_without_repeats():
    both = select(VARIANTS, ["head_dim=64", "head_dim=64,128 dtype=fp16"])
    assert both == tuple(v for v in VARIANTS if v.head_dim == 64 or v.dtype == "fp16")


@pytest.mark.parametrize(
    ("line", "predicate"),
    [
        ("target=sm86", lambda v: v.target == "sm86"),
        ("tile=default", lambda v: v.tile_name == ""),
        ("tile=m64", lambda v: v.tile_name == "m64"),
        ("committed=true", lambda v: v.committed),
        ("block_m=64", lambda v: v.tile_value("block_m") == 64),
        ("*_packgqa_sm80", lambda v: v.gqa == "packed" and v.target == "sm80"),
        ("flash_fwd_hdim64_fp16_sm80", lambda v: v.name == "flash_fwd_hdim64_fp16_sm80"),
    ],
)
def test_keys_beyond_the_axes_and_globs(line, predicate):
    expected = tuple(filter(predicate, VARIANTS))
    assert expected
    assert select(VARIANTS, [line]) == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("headdim=64", ["headdim", "did you mean 'head_dim'", "mask_type"]),
        ("head_dim=80", ["head_dim=80", "64, 128"]),
        ("dtype=fp61", ["did you mean 'fp16'", "bf16, fp16"]),
        ("dtype=", ["dtype=", "bf16, fp16"]),
        ("flash_bwd_*", ["flash_bwd_*", "flashgen list"]),
        ("flash_fwd_hdim64_fp16_sm8", ["did you mean\n", "flash_fwd_hdim64_fp16_sm80"]),
        ("  ", ["empty selection"]),
    ],
)
def test_a_wrong_term_is_an_error_that_names_what_there_is(line, words):
    with pytest.raises(SelectionError) as caught:
        select(VARIANTS, [line])
    assert isinstance(caught.value, BadParam)
    assert isinstance(caught.value, FlashgenError)
    for word in words:
        assert word in str(caught.value)


def test_find_one_takes_a_name_or_a_path_and_suggests():
    for variant in VARIANTS:
        assert find_one(VARIANTS, variant.name) is variant
        assert find_one(VARIANTS, f"generated/{variant.name}.cu") is variant
    with pytest.raises(
        SelectionError, match=r"(?s)no variant is called.*did you mean.*flash_fwd_hdim64_fp16_sm80"
    ):
        find_one(VARIANTS, "flash_fwd_hdim64_fp61_sm80")
    with pytest.raises(SelectionError, match="flashgen list"):
        find_one(VARIANTS, "zzz")


def test_find_by_axes_puts_the_default_tile_first():
    found = find_by_axes(VARIANTS, {"head_dim": "128", "dtype": "bf16"})
    assert found[0].tile_name == ""
    assert {v.name for v in found} == {v.name for v in VARIANTS if v.head_dim == 128 and v.dtype == "bf16"}


@pytest.fixture(scope="module")
def shipped():
    return [variant for spec in load_specs() for variant in spec.variants()]


@pytest.mark.parametrize(
    ("axes", "first"),
    [
        ({"head_dim": 128, "dtype": "fp16", "mask_type": "causal"}, "flash_fwd_hdim128_fp16_causal_sm80"),
        ({"head_dim": 64, "target": "sm86"}, "flash_fwd_hdim64_fp16_sm86"),
        ({"dtype": "fp32"}, "flash_fwd_hdim32_fp32_sm80"),
        ({"rotary": "halves"}, "append_fp16_halves_sm80"),
        ({"dq_order": "none", "head_dim": 128, "target": "sm80"}, "flash_bwd_hdim128_fp16_sm80"),
    ],
)
def test_find_by_axes_puts_attention_and_the_main_step_of_a_call_first(axes, first, shipped):
    assert find_by_axes(shipped, axes)[0].name == first


def test_keys_are_the_documented_ones():
    variant = dataclasses.replace(VARIANTS[0], committed=True)
    assert keys_of(variant)["committed"] == "true"
    assert {"family", "spec", "target", "tile", *AXES, "block_m"} <= keys_of(variant).keys()


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("head_dim>=128", "head_dim=128"),
        ("head_dim>64", "head_dim=128"),
        ("head_dim<128 dtype = fp16 , bf16", "head_dim=64"),
        ("head_dim <= 128", "head_dim=64,128"),
        ("head_dim = 128", "head_dim=128"),
        ("head_dim==128 dtype != bf16", "head_dim=128 dtype=fp16"),
        ("dtype=float16", "dtype=fp16"),
        ("mask_type=causal_bottom_right", "mask_type=causal"),
        ("mask_type!=causal_top_left", "mask_type!=causal"),
        ("dtype=half,bfloat16", "dtype=fp16,bf16"),
    ],
)
def test_other_ways_to_write_a_term(line, same):
    assert select(VARIANTS, [line]) == select(VARIANTS, [same])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("head_dim=127", r"did you mean '128'\?\nvalues of head_dim: 64, 128"),
        ("head_dim=70", r"did you mean '64'\?"),
        ("head_dim>=512", r"no variant has head_dim>=512\nvalues of head_dim: 64, 128"),
        ("dtype>=fp16", r"compares numbers; write dtype=a,b"),
        ("head_dim>=big", r"compares numbers"),
        ("head_dim=", r"no variant has head_dim= .*\nvalues of head_dim: 64, 128"),
        ("=128", r"'=128' is not a term"),
        ("head_dim=>128", r"is not a term"),
    ],
)
def test_what_is_wrong_with_a_term(line, message):
    with pytest.raises(SelectionError, match=message):
        select(VARIANTS, [line])


def test_a_glob_names_a_variant_if_it_is_the_only_one():
    (only,) = (v for v in VARIANTS if v.name == "flash_fwd_hdim64_bf16_causal_m64_packgqa_sm86")
    assert find_one(VARIANTS, "*hdim64_bf16_causal_m64_packgqa_sm86") is only
    with pytest.raises(SelectionError, match=r"^32 variants match 'flash_fwd_hdim64_\*'") as caught:
        find_one(VARIANTS, "flash_fwd_hdim64_*")
    assert "flashgen list --select 'flash_fwd_hdim64_*'" in str(caught.value)
    assert VARIANTS[0].name in str(caught.value)
