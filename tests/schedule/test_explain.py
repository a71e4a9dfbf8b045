import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen
from flashgen import KVCache
from flashgen.errors import BadParam, BadTensorShape, NullPointer
from flashgen.families.arch import KNOWN_ARCHS, typical
from flashgen.families.load import load_specs
from flashgen.schedule.dispatch import offers, select
from flashgen.schedule.explain import TIME, explain
from flashgen.schedule.plan import plan_steps

LOADED = load_specs()
SPECS = tuple(spec for spec in LOADED if spec.operator == "attention" and not spec.has_lengths)
GRADIENTS = tuple(spec for spec in LOADED if spec.operator == "attention_backward" and not spec.has_lengths)


@settings(max_examples=25)
@given(
    st.sampled_from(KNOWN_ARCHS),
    st.tuples(st.integers(1, 4), st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([1, 2, 6])),
    st.sampled_from([8, 64, 72, 128, 256]),
    st.sampled_from(["fp16", "bf16", "fp32"]),
    st.sampled_from([{}, {"causal": True}, {"window_size": (100, 0)}, {"mask": (1, 1)}]),
)
def test_the_choice_is_that_of_dispatch_and_every_other_variant_has_a_reason(arch, sizes, width, dtype, how):
    batch, seqlen_q, seqlen_kv, group = sizes
    if "mask" in how:
        how = {"mask": (seqlen_q, seqlen_kv)}
    kv = (batch, seqlen_kv, 2, width)
    found = flashgen.explain((batch, seqlen_q, 2 * group, width), kv, dtype=dtype, arch=arch, **how)
    device = typical(arch)
    assert found.device == device
    assert found.variant == select(found.problem, device, offers(found.problem, device, SPECS))
    names = [found.variant.name, *(judged.variant.name for judged in found.others)]
    assert sorted(names) == sorted(v.name for spec in SPECS for v in spec.variants() if v.is_main)
    assert all(judged.why for judged in found.others)
    times = [judged.time for judged in found.slower]
    assert times == sorted(times)
    assert all(time >= 1 for time in times)
    assert found.counts().keys().isdisjoint({TIME})
    assert str(found.variant) in str(found)


@pytest.mark.drawn
@pytest.mark.parametrize("splits", [1, 3, *(flashgen.SplitEvery(keys) for keys in (32, 64, 100, 128, 512))])
@pytest.mark.parametrize("width", [32, 64, 80, 160])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_keys_are_split_as_a_call_splits_them(arch, width, splits):
    given = (8, 1, 8, width), (8, 4000, 2, width)
    device, problem = typical(arch), flashgen.explain(*given, arch=arch).problem
    problem = dataclasses.replace(problem, splits=splits)

    def verdict(choose):
        try:
            return choose()
        except BadParam as error:
            return str(error)

    assert verdict(lambda: flashgen.explain(*given, arch=arch, splits=splits).variant) == verdict(
        lambda: select(problem, device, offers(problem, device, SPECS))
    )


def test_arrays_and_shapes_ask_for_the_same():
    q, k = np.zeros((1, 30, 4, 64), np.float16), np.zeros((1, 40, 2, 64), np.float16)
    by_array = flashgen.explain(q, k, causal=True, arch="sm_80")
    by_shape = flashgen.explain(q.shape, k.shape, k.shape, dtype="half", causal=True, arch="sm_80")
    assert by_array.problem == by_shape.problem
    assert by_array.variant == by_shape.variant


def test_a_template_of_ones_own_that_changes_nothing_is_a_warning(tiny_folder, monkeypatch):
    monkeypatch.setenv("FLASHGEN_SPECS", str(tiny_folder / "specs"))
    (tiny_folder / "templates" / "flash_fwd_sm80.cu.j2").write_text("${ header }")
    with pytest.warns(flashgen.TemplateWarning, match=r"no kernel uses .*sm80\.cu\.j2.*extends"):
        flashgen.explain((1, 8, 1, 64), arch="sm_80")


def test_nothing_serves_where_no_spec_does():
    problem = flashgen.explain((1, 8, 1, 64), arch="sm_80").problem
    nothing = explain(problem, typical("sm_80"), ())
    assert (nothing.variant, nothing.others) == (None, ())
    assert "no variant serves" in str(nothing)


def test_what_is_wrong_is_said_as_by_attention():
    with pytest.raises(BadParam, match=r"cuasal: no such option; there are .*causal"):
        flashgen.explain((1, 8, 1, 64), arch="sm_80", cuasal=True)
    with pytest.raises(BadParam, match="no GPU of architecture 'sm_10' is known; known are sm_80"):
        flashgen.explain((1, 8, 1, 64), arch="sm_10")
    with pytest.raises(BadTensorShape, match="head_dim is 36"):
        flashgen.explain((1, 8, 1, 36), arch="sm_80")


CACHE = (9, 16, 4, 64)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"q": None}, NullPointer, "^q is None; expected a shape or an array"),
        ({"q": (-1, 8, 4, 64)}, BadTensorShape, r"^q has shape \(-1, 8, 4, 64\); expected sizes of 0"),
        ({"k": (1, -8, 4, 64)}, BadTensorShape, r"^k has shape \(1, -8, 4, 64\); expected sizes"),
        ({"q": (8, 4, 64), "cu_seqlens_q": (-2,)}, BadTensorShape, "^cu_seqlens_q has shape"),
        ({"k": flashgen.KVCache(None, None, (1,))}, NullPointer, "^k is None"),
        ({"k": flashgen.KVCache(CACHE, CACHE, (2,))}, BadTensorShape, "^lengths is for a batch of 2"),
        ({"alibi_slopes": (5,)}, BadTensorShape, r"^alibi_slopes has shape \(5,\)"),
        ({"dtype": ["fp16"]}, BadParam, r"^dtype is \['fp16'\]; expected a name, such as 'fp16'"),
        ({"dtype": np.float16}, BadParam, "^dtype is <class 'numpy.float16'>; expected a name"),
        ({"operator": ["attention"]}, BadParam, r"^operator is \['attention'\]; allowed are"),
        ({"arch": ["sm_90"]}, BadParam, r"no GPU of architecture \['sm_90'\] is known"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_named(given, error, words):
    with pytest.raises(error, match=words):
        flashgen.explain(**{"q": (1, 8, 4, 64), "arch": "sm_80"} | given)


def test_a_modification_and_an_algorithm_have_their_say():
    shape = (1, 300, 4, 64)
    modified = flashgen.explain(shape, softcap=20.0, alibi_slopes=(4,), causal=True, arch="sm_90")
    assert modified.variant.name == "flash_fwd_hdim64_fp16_causal_softcap_alibi_m64_sm90"
    assert flashgen.explain(shape, arch="sm_90", algorithm="v2").variant.spec == "flash_fwd_sm80"
    naive = flashgen.explain(shape, arch="sm_90", algorithm="naive")
    assert {judged.variant.family for judged in naive.others} <= {"naive"}
    with pytest.raises(BadParam, match="algorithm is 'v9'"):
        flashgen.explain(shape, arch="sm_90", algorithm="v9")
    with pytest.raises(BadParam, match="softcap is -1"):
        flashgen.explain(shape, arch="sm_90", softcap=-1)


@settings(max_examples=10)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 700), st.integers(1, 700), st.sampled_from([1, 2, 4])),
    st.sampled_from([(64, 64), (128, 128), (192, 128)]),
    st.booleans(),
    st.sampled_from([{}, {"causal": True}, {"window_size": (100, 0)}, {"mask": (1, 1, 1, 1)}]),
    st.booleans(),
)
def test_gradients_are_explained_as_they_are_planned(sizes, widths, batched, how, deterministic):
    batch, seqlen_q, seqlen_kv, group = sizes
    batch = (batch,) if batched else ()
    if "mask" in how:
        how = {"mask": (1, 1, seqlen_q, seqlen_kv)}
    q, k, v = (
        (*batch, seqlen_q, 2 * group, widths[0]),
        (*batch, seqlen_kv, 2, widths[0]),
        (*batch, seqlen_kv, 2, widths[1]),
    )
    how = how | {"deterministic": deterministic}
    found = flashgen.explain(q, k, v, arch="sm_90", operator="attention_backward", **how)
    given = {"dout": (*q[:-1], widths[1]), "out": (*q[:-1], widths[1]), "lse": (*batch, q[-2], seqlen_q)}
    assert (
        found.problem
        == flashgen.explain(q, k, v, arch="sm_90", operator="attention_backward", **how, **given).problem
    )
    assert found.variant == select(
        found.problem, found.device, offers(found.problem, found.device, GRADIENTS)
    )
    if deterministic:
        assert dict(found.variant.axes)["dq_order"] in ("ordered", "direct")
    planned = plan_steps(found.problem, found.variant, found.device)
    assert found.steps == planned.steps
    assert found.workspace_bytes == planned.workspace.nbytes
    assert bool(found.workspace_bytes) == (dict(found.variant.axes)["dq_order"] != "direct")
    text = str(found)
    assert all(step.variant.name in text for step in found.steps)
    assert (f"workspace of {planned.workspace.nbytes:,} bytes" in text) == (planned.workspace.nbytes > 0)


def test_gradients_of_packed_sequences_take_their_inputs_from_the_table_as_well():
    packed = {"cu_seqlens_q": (9,), "cu_seqlens_kv": (9,), "max_seqlen_q": 700, "causal": True}
    found = flashgen.explain(
        (900, 8, 64), (900, 2, 64), arch="sm_90", operator="attention_backward", **packed
    )
    assert found.variant.family == "flash_bwd_varlen"
    given = {"dout": (900, 8, 64), "out": (900, 8, 64), "lse": (8, 900)} | packed
    again = flashgen.explain((900, 8, 64), (900, 2, 64), arch="sm_90", operator="attention_backward", **given)
    assert again.problem == found.problem


def test_a_wrong_call_of_gradients_is_said_as_by_attention_backward():
    shape, arch = (1, 8, 1, 64), {"arch": "sm_90"}
    with pytest.raises(BadParam, match="operator is 'gradients'; allowed are 'attention', 'attention_back"):
        flashgen.explain(shape, operator="gradients", **arch)
    with pytest.raises(BadParam, match=r"splits: no such option; there are .*dlse"):
        flashgen.explain(shape, operator="attention_backward", splits=2, **arch)
    with pytest.raises(BadTensorShape, match="lse has shape"):
        flashgen.explain(shape, operator="attention_backward", lse=(1, 2, 8), **arch)
    with pytest.raises(BadTensorShape, match="q has shape"):
        flashgen.explain((8, 64), operator="attention_backward", **arch)


CACHE = (8, 4096, 8, 128)


@pytest.mark.parametrize(
    ("call", "variant"),
    [
        ({"k": flashgen.KVCache(CACHE, CACHE, (8,))}, "flash_varlen_decode_hdim128_fp16_c3_packgqa_sm90"),
        (
            {"k": flashgen.KVCache((20, *CACHE[1:]), (20, *CACHE[1:]), (8,), index=(8,))},
            "flash_varlen_decode_hdim128_fp16_c3_packgqa_sm90",
        ),
        (
            {"k": flashgen.KVCache((400, 16, 8, 128), (400, 16, 8, 128), (8,), pages=(8, 256))},
            "flash_varlen_decode_hdim128_fp16_paged_c3_packgqa_sm90",
        ),
        ({"k": CACHE, "kv_lengths": (8,)}, "flash_varlen_decode_hdim128_fp16_c3_packgqa_sm90"),
        (
            {
                "q": (9000, 32, 128),
                "k": (9000, 8, 128),
                "cu_seqlens_q": (9,),
                "cu_seqlens_kv": (9,),
                "max_seqlen_q": 3000,
                "causal": True,
                "dtype": "bf16",
            },
            "flash_fwd_varlen_hdim128_bf16_causal_packgqa_sm90",
        ),
    ],
)
def test_shapes_of_lengths_and_caches(call, variant):
    found = flashgen.explain(**({"q": (8, 1, 32, 128)} | call), arch="sm_90")
    assert found.variant.name == variant
    assert all(judged.why for judged in found.others)
    names = [found.variant.name, *(judged.variant.name for judged in found.others)]
    specs = [spec for spec in load_specs() if spec.operator == "attention" and spec.has_lengths]
    assert sorted(names) == sorted(v.name for spec in specs for v in spec.variants() if v.is_main)


PACKED = {
    "q": (9000, 32, 128),
    "k": (9000, 8, 128),
    "cu_seqlens_q": (9,),
    "cu_seqlens_kv": (9,),
    "max_seqlen_q": 3000,
    "causal": True,
    "dtype": "bf16",
    "arch": "sm_90",
}
PAGED = [flashgen.KVCache((400, n, 8, 128), (400, n, 8, 128), (8,), pages=(8, 256)) for n in (24, 48)]


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({}, "sm90"),
        ({"window_size": (100, 0), "causal": False, "dtype": "fp16"}, "sm90"),
        ({"k": flashgen.KVCache(CACHE, CACHE, (8,)), "cu_seqlens_kv": None}, "sm90"),
        ({"q": (9000, 40, 128)}, "sm90"),  # a group that divides no tile: heads apart
        ({"arch": "sm_80"}, "sm80"),
        ({"arch": "sm_100"}, "sm80"),
        ({"dtype": "fp32"}, "sm80"),
        ({"k": PAGED[0], "cu_seqlens_kv": None}, "sm80"),  # pages that boxes of 16 keys do not fill
        ({"k": PAGED[1], "cu_seqlens_kv": None}, "sm90"),
        ({"k": (0, 8, 128)}, "sm80"),  # there is no tensor map of it
    ],
)
def test_hopper_takes_wgmma_for_prefills_that_it_serves(changes, target):
    found = flashgen.explain(**(PACKED | changes)).variant
    assert (found.family, found.target) == ("flash_fwd_varlen", target)


def test_arrays_of_a_cache_ask_for_the_same_as_their_shapes():
    k, lengths = np.zeros((8, 40, 2, 64), np.float16), np.zeros(8, np.int32)
    q = np.zeros((8, 1, 4, 64), np.float16)
    by_array = flashgen.explain(q, flashgen.KVCache(k, k, lengths), arch="sm_80")
    by_shape = flashgen.explain(q.shape, flashgen.KVCache(k.shape, k.shape, (8,)), arch="sm_80")
    assert by_array.problem == by_shape.problem


def test_shapes_of_caches_of_codes_have_the_dtype_that_the_cache_says():
    pair = [(40, 16, 2, 64)] * 2
    cache = KVCache(*pair, (4,), pages=(4, 10), kv_dtype="e4m3", k_scale=(), v_scale=())
    new = {"k_new": (4, 1, 2, 64), "v_new": (4, 1, 2, 64)}
    appended = flashgen.explain(operator="append", cache=cache, **new, dtype="bf16", arch="sm_90")
    assert "e4m3" in appended.variant.name
    rows = KVCache((40, 64, 1, 656), None, (4,), pages=(4, 10), head_dim_v=512, kv_dtype="fp8_ds_mla")
    found = flashgen.explain((4, 1, 16, 576), rows, dtype="bf16", softmax_scale=0.07, arch="sm_90")
    assert "fp8dsmla" in found.variant.name
