import math
import struct
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import errors
from flashgen.operators import operator_of
from flashgen.operators.arguments import ArrayView
from flashgen.operators.attention import normalise
from flashgen.operators.contract import MAX_SCALE, MAX_SEQLEN, MIN_SCALE
from flashgen.operators.overlaps import check_memory

ARGUMENTS = operator_of("attention", has_lengths=False).arguments


def view(shape, dtype="fp16", *, strides=None, device=0):
    if strides is None:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return ArrayView("cupy", 4096, shape, strides, dtype, device)


def call(q=(2, 5, 4, 64), kv=(2, 7, 2, 64), dtype="fp16", **options):
    return normalise(view(q, dtype), view(kv, dtype), view(kv, dtype), **options)


def test_positions_windows_and_offsets_fit_in_32_bits_at_the_longest_sequences():
    most = MAX_SEQLEN
    for rows, keys in ((most, 1), (1, most), (most, most)):
        problem = call(
            (1, rows, 1, 64), (1, keys, 1, 64), window_size=(1 << 40, 1 << 40) if rows < keys else (3, most)
        )
        last = rows + 1024 + problem.diagonal_offset
        for number in (problem.diagonal_offset - problem.window_left, last + problem.window_right):
            assert -(2**31) <= number < 2**31


def test_scale():
    assert call().softmax_scale == 64**-0.5
    assert call(softmax_scale=0).softmax_scale == MIN_SCALE
    assert call(softmax_scale=np.float32(0.5)).softmax_scale == 0.5
    for scale in (math.nan, math.inf, -math.inf, -1.0, 1e39, 2.5e38, -(10**5000), "1", 1j, True):
        with pytest.raises(errors.BadParam, match="softmax_scale"):
            call(softmax_scale=scale)
    with pytest.raises(
        errors.BadParam, match=r"softmax_scale is an integer of 401 digits; it must be at most 2e\+38"
    ):
        call(softmax_scale=10**400)


def test_a_kernel_can_hold_the_largest_scale():
    packed = struct.pack("f", call(softmax_scale=MAX_SCALE).scalar_values()["scale_log2"])
    assert math.isfinite(struct.unpack("f", packed)[0])


def test_a_problem_is_a_key():
    assert len({call(), call(), call(causal=True), call(return_lse=True)}) == 3


def test_strides_of_extents_of_one_do_not_matter():
    shape = (1, 5, 1, 64)
    odd = normalise(view(shape, strides=(3, 64, 7, 1)), view(shape), view(shape))
    assert odd == normalise(view(shape), view(shape), view(shape))


def test_shapes_without_batch():
    problem = call((5, 4, 64), (7, 2, 64))
    assert (problem.batch, problem.out_shape, problem.lse_shape) == (1, (5, 4, 64), (4, 5))
    assert problem.array("q").strides == (0, 256, 64)


MASKS = [
    ((7,), (0, 0, 0)),
    ((5, 7), (0, 0, 7)),
    ((1, 7), (0, 0, 0)),
    ((4, 5, 7), (0, 35, 7)),
    ((1, 5, 7), (0, 0, 7)),
    ((2, 4, 5, 7), (140, 35, 7)),
    ((2, 1, 5, 7), (35, 0, 7)),
    ((2, 1, 1, 7), (7, 0, 0)),
]


@pytest.mark.parametrize(("shape", "strides"), MASKS)
@pytest.mark.parametrize("dtype", ["bool", "uint8"])
def test_masks_broadcast_from_the_right(shape, strides, dtype):
    problem = call(mask=view(shape, dtype))
    assert (problem.mask_type, problem.array("mask").strides) == ("dense", strides)


@pytest.mark.parametrize("shape", [(), (1,), (6,), (5, 1), (7, 5), (2, 5, 7), (4, 4, 5, 7), (1, 2, 4, 5, 7)])
def test_masks_of_another_shape_are_refused(shape):
    with pytest.raises(errors.BadTensorShape, match="mask"):
        call(mask=view(shape, "bool"))


def test_a_mask_of_padding_is_told_how_to_go():
    """(batch, seqlen_kv), as other libraries take it."""
    with pytest.raises(errors.BadTensorShape, match=r"kv_lengths=.*mask\[:, None, None, :\]"):
        call(mask=view((2, 7), "bool"))
    with pytest.raises(errors.BadTensorShape) as raised:
        call(mask=view((3, 7), "bool"))
    assert "None" not in str(raised.value)


SHAPE_ERRORS = [
    ((5, 64), (7, 64), "q has shape"),
    ((2, 5, 4, 64), (7, 2, 64), "k has shape"),
    ((2, 5, 4, 64), (3, 7, 2, 64), "batch"),
    ((2, 5, 4, 64), (2, 7, 3, 64), "heads"),
    ((2, 5, 4, 64), (2, 7, 8, 64), "heads"),
    ((2, 5, 0, 64), (2, 7, 2, 64), "heads"),
    ((2, 5, 4, 64), (2, 7, 0, 64), "heads"),
    ((2, 5, 4, 64), (2, 7, 2, 32), "head_dim"),
    ((2, 5, 4, 0), (2, 7, 2, 0), "head_dim"),
    ((2, 5, 4, 20), (2, 7, 2, 20), "multiple of 8"),
    ((2, 5, 4, 264), (2, 7, 2, 264), "256"),
    ((1, (1 << 30) + 1, 4, 64), (1, 7, 2, 64), "longest"),
]


@pytest.mark.parametrize(("q", "kv", "says"), SHAPE_ERRORS)
def test_wrong_shapes(q, kv, says):
    with pytest.raises(errors.BadTensorShape, match=says):
        call(q, kv)


def test_k_and_v_agree():
    with pytest.raises(errors.BadTensorShape, match="v has shape"):
        normalise(view((2, 5, 4, 64)), view((2, 7, 2, 64)), view((2, 8, 2, 64)))


def test_v_and_out_have_a_head_dim_of_their_own():
    q, k, v = (2, 5, 4, 192), (2, 7, 2, 192), (2, 7, 2, 128)
    problem = normalise(view(q), view(k), view(v))
    assert (problem.head_dim, problem.head_dim_v) == (192, 128)
    assert problem.softmax_scale == 192**-0.5
    assert problem.out_shape == (2, 5, 4, 128)
    assert problem.array("out").strides == (5 * 4 * 128, 4 * 128, 128)
    assert problem == normalise(view(q), view(k), view(v), out=view((2, 5, 4, 128)))
    ends = dict(zip((x.name for x in ARGUMENTS), problem.spans(), strict=True))
    sizes = {"q": 2 * 5 * 4 * 192, "k": 2 * 7 * 2 * 192, "v": 2 * 7 * 2 * 128, "out": 2 * 5 * 4 * 128}
    assert {name: ends[name] for name in sizes} == {name: (0, 2 * size) for name, size in sizes.items()}
    with pytest.raises(errors.BadTensorShape, match=r"out has shape .*192.*last dimension of v, .*128"):
        normalise(view(q), view(k), view(v), out=view(q))


@pytest.mark.parametrize(
    ("width", "dtype", "step"), [(0, "fp16", 8), (260, "bf16", 8), (20, "fp16", 8), (6, "fp32", 4)]
)
def test_the_head_dim_of_v_has_the_rules_of_q(width, dtype, step):
    with pytest.raises(
        errors.BadTensorShape, match=f"^head_dim_v is {width}; {dtype} needs a multiple of {step}"
    ):
        normalise(*(view((2, 5, 4, last), dtype) for last in (64, 64, width)))


def test_head_dim_in_steps_of_16_bytes():
    assert call((1, 5, 1, 20), (1, 7, 1, 20), "fp32").head_dim == 20
    with pytest.raises(errors.BadTensorShape, match="multiple of 4"):
        call((1, 5, 1, 18), (1, 7, 1, 18), "fp32")


def test_dtypes():
    with pytest.raises(errors.BadTensorDtype, match="float64"):
        call(dtype="float64")
    q, kv = (2, 5, 4, 64), (2, 7, 2, 64)
    with pytest.raises(errors.BadTensorDtype, match="v has dtype bf16"):
        normalise(view(q), view(kv), view(kv, "bf16"))
    with pytest.raises(errors.BadTensorDtype, match="out has dtype fp32"):
        call(out=view(q, "fp32"))
    with pytest.raises(errors.BadTensorDtype, match="mask has dtype int32"):
        call(mask=view((5, 7), "int32"))


def test_devices():
    with pytest.raises(errors.DeviceTypeNotSupported, match="k is on GPU 1 but q is on GPU 0"):
        normalise(view((2, 5, 4, 64)), view((2, 7, 2, 64), device=1), view((2, 7, 2, 64)))
    with pytest.raises(errors.DeviceTypeNotSupported, match="mask is in host memory"):
        call(mask=view((5, 7), "bool", device=None))


STRIDE_ERRORS = [
    ((1280, 256, 64, 2), "contiguous"),
    ((1280, 260, 64, 1), "16 bytes"),
    ((1280, 256, 68, 1), "16 bytes"),
    ((1284, 256, 64, 1), "16 bytes"),
    (None, "whole number"),
]


@pytest.mark.parametrize(("strides", "says"), STRIDE_ERRORS)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_wrong_strides(name, strides, says):
    shape = (2, 5, 4, 64)
    views = {which: view(shape) for which in ("q", "k", "v", "out")}
    views[name] = ArrayView("cupy", 4096, shape, strides, "fp16", 0)
    with pytest.raises(errors.BadTensorStrides, match=rf"^{name} .*{says}"):
        normalise(**views)


def test_broadcast_and_reversed_inputs_are_read_in_place():
    strides = (0, -256, 0, 1)
    problem = normalise(
        view((2, 5, 4, 64), strides=strides), *[view((2, 7, 2, 64), strides=(2**33, -64, 0, 1))] * 2
    )
    assert problem.array("q").strides == (0, -256, 0)
    assert problem.array("k").strides == (2**33, -64, 0)


@pytest.mark.parametrize(
    "strides", [(0, 256, 64, 1), (1280, 0, 64, 1), (1280, 256, 32, 1), (1280, 192, 64, 1)]
)
def test_out_must_not_share_elements(strides):
    with pytest.raises(errors.BadTensorStrides, match="share one address"):
        call(out=view((2, 5, 4, 64), strides=strides))


@pytest.mark.parametrize("strides", [(-1280, 256, 64, 1), (64, 512, 128, 1), (320, 64, 640, 1)])
def test_out_may_have_any_order(strides):
    assert call(out=view((2, 5, 4, 64), strides=strides)).array("out").strides == strides[:3]


def test_out_has_the_shape_of_q():
    with pytest.raises(errors.BadTensorShape, match="out has shape"):
        call(out=view((2, 5, 4, 32)))


def test_mask_strides():
    assert call(mask=view((5, 7), "bool", strides=(-9, 1))).array("mask").strides == (0, 0, -9)
    with pytest.raises(errors.BadTensorStrides, match="mask"):
        call(mask=view((5, 7), "bool", strides=(7, 0)))
    assert (
        call((1, 5, 1, 64), (1, 1, 1, 64), mask=view((5, 1), "bool", strides=(3, 0))).array("mask").strides[2]
        == 3
    )


def test_every_error_is_the_builtin_that_a_caller_would_catch():
    assert issubclass(errors.BadTensorShape, ValueError)
    assert issubclass(errors.BadTensorDtype, TypeError)
    assert issubclass(errors.DeviceTypeNotSupported, RuntimeError)


@settings(max_examples=50)
@given(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)),
    st.permutations(range(3)),
    st.tuples(*[st.sampled_from([1, -1])] * 3),
)
def test_extents_are_the_bytes_that_numpy_touches(counts, order, signs):
    shape = (*counts, 8)
    base = np.zeros([*(counts[axis] for axis in order), 8], np.float16)
    array = base.transpose([*np.argsort(order), 3])[tuple(slice(None, None, sign) for sign in signs)]
    pointer = array.__array_interface__["data"][0]
    q = ArrayView("numpy", pointer, shape, tuple(s // 2 for s in array.strides), "fp16", None)
    problem = normalise(q, q, q)
    low, high = problem.spans()[0]
    if array.size:
        bounds = np.lib.array_utils.byte_bounds(array)
        assert (pointer + low, pointer + high) == bounds
    else:
        assert (low, high) == (0, 0)


def test_overlap_is_found_exactly_where_address_ranges_meet():
    extents = call(return_lse=True, mask=view((2, 4, 5, 7), "bool")).spans()
    sizes = [high for _, high in extents]
    for target, other in combinations(range(6), 2):
        if not {target, other} & {4, 5}:
            continue
        pointers = [(1 << 20) * (n + 1) for n in range(len(ARGUMENTS))]
        written = tuple({target, other} & {4, 5})
        pointers[target] = pointers[other] - sizes[target] // 16 * 16 - (16 if sizes[target] % 16 else 0)
        check_memory(ARGUMENTS, extents, tuple(pointers), written)
        pointers[target] += 16
        with pytest.raises(errors.BadTensorStrides, match="overlaps"):
            check_memory(ARGUMENTS, extents, tuple(pointers), written)


def test_pointers():
    extents = call(mask=view((5, 7), "bool")).spans()
    good = (4096, 8192, 16384, 3, 1 << 20, *(0,) * (len(ARGUMENTS) - 5))
    check_memory(ARGUMENTS, extents, good, (4,))
    for position, name in enumerate(["q", "k", "v", None, "out"]):
        if name is None:
            continue
        for value, error in ((0, errors.NullPointer), (good[position] + 8, errors.BadTensorStrides)):
            with pytest.raises(error, match=f"^{name} "):
                check_memory(
                    ARGUMENTS,
                    extents,
                    (*good[:position], value, *good[position + 1 :]),
                    (4,),
                )


def test_an_empty_array_needs_no_memory():
    extents = call((2, 0, 4, 64), (2, 0, 2, 64)).spans()
    check_memory(ARGUMENTS, extents, (0,) * len(ARGUMENTS), ())


@pytest.mark.parametrize("name", ["causal", "return_lse"])
def test_a_flag_is_a_truth_value_and_nothing_that_merely_has_one(name):
    for on in (True, 1, np.True_, np.bool_(1)):
        assert call(**{name: on}) == call(**{name: True})
    for off in (False, 0, np.False_):
        assert call(**{name: off}) == call(**{name: False})
    for wrong in ("false", "True", "", None, 2, 0.5, [], np.array([True, False]), np.array(True)):
        with pytest.raises(errors.BadParam, match=f"^{name} is .*; expected True or False$"):
            call(**{name: wrong})
