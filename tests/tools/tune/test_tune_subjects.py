"""What is tuned on which GPU."""

import pytest

from fake_gpu import H200
from flashgen.errors import BadParam, DeviceTypeNotSupported
from flashgen.families.arch import Device
from flashgen.families.load import load_specs
from flashgen.families.selection import select
from flashgen.schedule.dispatch import preferred, runs_on
from flashgen.tools.tune.subjects import subjects

L40S = Device(0, "sm_89", (8, 9), 142, 101376, 102400, 96 << 20, 864, "NVIDIA L40S")
TURING = Device(0, "sm_75", (7, 5), 40, 65536, 65536, 4 << 20, 320, "Tesla T4")


@pytest.fixture(scope="module")
def shipped():
    return load_specs()


def chosen(shipped, device, *selections):
    variants = [variant for spec in shipped for variant in spec.variants()]
    return subjects(shipped, select(variants, selections), device)


@pytest.mark.parametrize("device", [H200, L40S])
def test_each_combination_of_axes_once_where_dispatch_would_look_for_it(shipped, device):
    found = chosen(shipped, device, "head_dim=128")
    running: dict = {}
    attending = [spec for spec in shipped if spec.operator == "attention" and not spec.has_lengths]
    for variant in (v for spec in attending for v in spec.select(head_dim=128) if runs_on(v, device)):
        timed = variant.axis("sinks") == variant.axis("dropout") == "none" and variant.mask_type != "blocks"
        if variant.is_main and not variant.dispatch.on_request and timed:
            running.setdefault((variant.family, frozenset(variant.axes)), []).append(variant)
    assert len(found) == len(running)
    for subject in found:
        assert subject.ordinary in preferred(
            running.pop((subject.ordinary.family, frozenset(subject.ordinary.axes)))
        )
        assert not subject.ordinary.tile_name
        assert subject.point == (*(value for _, value in subject.ordinary.axes), subject.ordinary.target)
    assert not running


def test_a_target_that_is_asked_for_is_tuned_though_another_is_preferred(shipped):
    selection = "family=flash_fwd head_dim=128 dtype=fp16 mask_type=none gqa=mha target=sm86"
    (subject,) = chosen(shipped, H200, selection)
    assert subject.ordinary.target == "sm86"


@pytest.mark.parametrize("spec", ["merge_sm80", "append_sm80", "flash_varlen_decode_sm80"])
def test_only_attention_on_whole_arrays_is_timed(spec, shipped):
    with pytest.raises(BadParam, match="and tune times attention alone"):
        chosen(shipped, H200, f"spec={spec}")


def test_what_cannot_be_tuned_is_an_error(shipped, tiny_spec):
    with pytest.raises(DeviceTypeNotSupported, match=r"runs on GPU 0 \(Tesla T4"):
        chosen(shipped, TURING, "head_dim=128")
    with pytest.raises(BadParam, match="m64"):
        chosen(shipped, H200, "tile=m64")
    with pytest.raises(BadParam, match="only on request"):
        subjects([tiny_spec], tiny_spec.variants(), H200)


def test_of_a_call_of_several_kernels_the_main_one_is_tuned(shipped):
    (subject,) = chosen(shipped, H200, "flash_decode_hdim128_bf16_packgqa_sm80")
    assert subject.ordinary.is_main
    assert subject.ordinary.step == "decode"


def test_a_kernel_with_sinks_takes_the_tile_of_the_one_without(shipped):
    selection = "family=flash_fwd head_dim=128 dtype=fp16 mask_type=causal gqa=mha target=sm90"
    (subject,) = chosen(shipped, H200, selection)
    domain = (*subject.spec.axes, "target")
    own, with_sinks = (dict(zip(domain, point, strict=True)) for point in subject.points)
    assert own == dict(zip(domain, subject.point, strict=True))
    assert with_sinks == own | {"sinks": "sink"}
    with pytest.raises(BadParam, match=r"have sinks, and take the tiles .*sinks=none"):
        chosen(shipped, H200, f"{selection} sinks=sink")
