"""Plans for CuPy arrays, up to the launch, on a GPU that only keeps what it is asked to launch."""

import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fake_gpu
import flashgen
from flashgen import errors
from flashgen.runtime import arrays, plans

SHAPE, MASK = (1, 4, 2, 8), (4, 4)
SIZE = 4 * 2 * 8 * 4
ROOM = 1 << 20
Q, K, V, OUT = ((1 << 40) + place * ROOM for place in range(4))


def array(shape, dtype=np.float32, address=Q, **layout):
    """fp32 goes to a kernel whose parameters hold addresses as they are."""
    return fake_gpu.array(shape, dtype, address, **layout)


@pytest.fixture(autouse=True)
def gpu(fake_gpu):
    return fake_gpu


def plan_of(**options):
    return flashgen.plan(*(array(SHAPE, address=address) for address in (Q, K, V)), **options)


def test_every_launch_gets_the_pointers_and_the_stream_of_its_call(gpu):
    mask = array(MASK, bool)
    plan = plan_of(mask=mask, return_lse=True)
    for call in (0, 1, 0, 0, 2, 1):
        places = {name: 4096 * (10 * call + n + 1) for n, name in enumerate(("q", "k", "v", "out", "lse"))}
        given = {name: array(SHAPE, address=address) for name, address in places.items() if name != "lse"}
        given["lse"] = array((1, 2, 4), np.float32, places["lse"])
        places["mask"] = 4096 * 1000 + call
        given["mask"] = array(MASK, bool, places["mask"])
        out, lse = plan(**given, stream=call)
        assert (out, lse) == (given["out"], given["lse"]) or (out is given["out"] and lse is given["lse"])
        members = gpu.members()
        assert {name: int(members[name]) for name in places} == places
        assert members["mask_vector_width"] == (4 if call == 0 else 1)
        assert gpu.launches[-1][2] == call
    assert len(gpu.launches) == 6


def test_layouts_tell_strides_apart_but_those_that_nobody_uses():
    kind = arrays.kind_of(array(SHAPE))
    rows, heads = 2 * 8 * 4, 8 * 4
    plain, odd = array(SHAPE), array(SHAPE, strides=(12, rows, heads, 4))  # of one batch entry
    assert kind.layout(plain) == kind.layout(odd)
    for strides in ((12, 2 * rows, heads, 4), (12, heads, 4 * heads, 4), (12, 0, heads, 4)):
        assert kind.layout(array(SHAPE, strides=strides)) not in (kind.layout(plain), None)
    plan = plan_of()
    plan(odd, array(SHAPE, address=K), array(SHAPE, address=V), out=array(SHAPE, address=OUT))
    with pytest.raises(errors.BadTensorStrides, match="q has strides"):
        plan(array(SHAPE, strides=(12, 2 * rows, heads, 4)), *map(array, (SHAPE,) * 2))


# Addresses that are often misaligned, null or within reach of each other, and often those of the call before.
ADDRESSES = st.tuples(
    *[st.sampled_from([0, *range(1 << 20, (1 << 20) + 4 * SIZE, SIZE // 2), (1 << 20) + 8])] * 4
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(ADDRESSES, min_size=1, max_size=3).flatmap(
        lambda few: st.lists(st.sampled_from(few), max_size=8)
    )
)
def test_no_call_changes_what_a_plan_thinks_of_later_ones(gpu, calls):
    def verdict(plan, addresses):
        launched = len(gpu.launches)
        q, k, v, out = (array(SHAPE, address=address) for address in addresses)
        try:
            plan(q, k, v, out=out)
        except errors.FlashgenError as error:
            assert len(gpu.launches) == launched
            return type(error), str(error)
        assert len(gpu.launches) == launched + 1
        assert [int(gpu.members()[name]) for name in ("q", "k", "v", "out")] == list(addresses)
        return None

    held = plan_of()
    for addresses in calls:
        answer = verdict(held, addresses)
        assert answer == verdict(plan_of(), addresses)
        out = addresses[3]
        apart = all(abs(out - address) >= SIZE for address in addresses[:3])
        sound = all(address and address % 16 == 0 for address in addresses)
        assert (answer is None) == (apart and sound)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("calls", [1, 4])  # later calls of the same arrays take a shorter way
def test_each_property_of_a_layout_is_compared_on_each_call(calls, name, gpu):
    plan = plan_of()
    right = {n: array(SHAPE, address=a) for n, a in (("q", Q), ("k", K), ("v", V), ("out", OUT))}
    for _ in range(calls):
        plan(**right)
    address = right[name].data.ptr
    for error, wrong in (
        (errors.BadTensorShape, array((1, 2, 4, 8), address=address)),
        (errors.BadTensorDtype, array(SHAPE, np.float16, address)),
        (errors.BadTensorStrides, array(SHAPE, address=address, strides=(256, 32, 128, 4))),
        (errors.DeviceTypeNotSupported, array(SHAPE, address=address, device=1)),
    ):
        with pytest.raises(error) as caught:
            plan(**(right | {name: wrong}))
        assert str(caught.value).startswith(name)
    changed = right[name]
    changed.shape = (1, 2, 4, 8)
    with pytest.raises(errors.BadTensorShape, match=name):
        plan(**right)
    changed.shape = SHAPE
    plan(**right)
    assert len(gpu.launches) == calls + 1


def test_what_was_not_planned_for_is_refused(gpu):
    plan = plan_of()
    given = [array(SHAPE, address=address) for address in (Q, K, V)]
    for name, wrong in {"mask": array(MASK, bool), "lse": array((1, 2, 4), np.float32)}.items():
        with pytest.raises(errors.BadParam, match=f"{name} was given to a plan made without"):
            plan(*given, out=array(SHAPE, address=OUT), **{name: wrong})
    with pytest.raises(errors.BadParam, match=r"softcap is not an argument.*softmax_scale"):
        plan(*given, softcap=3.0)
    with pytest.raises(errors.BadParam, match="q was given twice"):
        plan(*given, q=given[0])
    assert not gpu.launches


@pytest.mark.parametrize(
    ("name", "wrong"), [("out", SHAPE[1:]), ("lse", (2, 4)), ("out", (1, *SHAPE)), ("lse", (1, 1, 2, 4))]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_result_has_a_batch_where_the_arrays_of_the_plan_have_one(batch, name, wrong, gpu):
    shape = (batch, *SHAPE[1:])
    given = [array(shape, address=address) for address in (Q, K, V)]
    plan = flashgen.plan(*given, return_lse=True)
    with pytest.raises(errors.BadTensorShape, match=f"^{name} has shape .* (for|expected) "):
        plan(*given, **{name: array(wrong, address=OUT)})
    assert not gpu.launches


def test_a_result_has_no_batch_where_the_arrays_of_the_plan_have_none(gpu):
    given = [array(SHAPE[1:], address=address) for address in (Q, K, V)]
    plan = flashgen.plan(*given, return_lse=True)
    for name, wrong in {"out": SHAPE, "lse": (1, 2, 4)}.items():
        with pytest.raises(errors.BadTensorShape, match=f"^{name} has shape .* (for|expected) "):
            plan(*given, **{name: array(wrong, address=OUT)})
    assert not gpu.launches


def test_a_result_that_no_new_array_lies_like_has_to_be_passed(gpu):
    """A new one would be contiguous, and the kernel writes with the strides of the plan: past its end."""
    spread = array(SHAPE, address=OUT, strides=(512, 128, 64, 4))
    plan = plan_of(out=spread)
    inputs = [array(SHAPE, address=address) for address in (Q, K, V)]
    wanted = (
        r"^out is None, but the plan was made with one of strides \(128, 32, 16, 1\) \(in elements\); pass"
    )
    with pytest.raises(errors.NullPointer, match=wanted):
        plan(*inputs)
    assert gpu.launches == []
    assert plan(*inputs, out=spread) is spread
    assert len(gpu.launches) == 1


def test_a_scalar_may_differ_from_call_to_call(gpu):
    plan = plan_of(softmax_scale=0.5)
    given = [array(SHAPE, address=address) for address in (Q, K, V)]
    for scale, expected in ((None, 0.5), (0.25, 0.25), (2, 2.0), (None, 0.5)):
        plan(*given, out=array(SHAPE, address=OUT), softmax_scale=scale)
        assert gpu.members()["scale_log2"] == np.float32(expected * np.log2(np.e))
    for wrong in (-1.0, float("nan"), [1.0], "1"):
        with pytest.raises(errors.BadParam, match="softmax_scale"):
            plan(*given, out=array(SHAPE, address=OUT), softmax_scale=wrong)
    assert len(gpu.launches) == 4


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_array_that_is_gone_is_not_taken_for_a_missing_one(name, gpu):
    plan = plan_of()
    given = {n: array(SHAPE, address=a) for n, a in (("q", Q), ("k", K), ("v", V), ("out", OUT))}
    for _ in range(4):
        plan(**given)
    seen = weakref.ref(given[name])
    given[name] = None
    assert seen() is None, "the plan keeps the array"
    with pytest.raises(errors.NullPointer, match=f"{name} is None"):
        plan(**given)
    assert len(gpu.launches) == 4


def test_what_a_plan_remembers_is_bounded(gpu):
    plan = plan_of()
    for n in range(plans.MAX_WORKS * 3):
        place = OUT + n * ROOM
        plan(*(array(SHAPE, address=address) for address in (Q, K, V)), out=array(SHAPE, address=place))
        assert int(gpu.members()["out"]) == place
        assert len(plan._works) <= plans.MAX_WORKS


def test_empty_calls_launch_nothing(gpu):
    for q_shape, kv_shape, launches in (
        ((0, 5, 2, 64), (0, 5, 2, 64), 0),
        ((2, 0, 2, 64), (2, 5, 2, 64), 0),
        ((2, 5, 2, 64), (2, 0, 2, 64), 1),  # whose result is zeros, to be written
    ):
        gpu.launches.clear()
        q, k = array(q_shape, address=Q), array(kv_shape, address=K)
        lse = array((q_shape[0], 2, q_shape[1]), np.float32, V)
        flashgen.plan(q, k, k, causal=True, return_lse=True)(
            q, k, k, out=array(q_shape, address=OUT), lse=lse
        )
        assert len(gpu.launches) == launches


class Stream:
    """A stream of another library."""

    def __cuda_stream__(self):
        return 0, 7


@pytest.mark.parametrize("stream", [7, SimpleNamespace(cuda_stream=7), SimpleNamespace(ptr=7), Stream()])
def test_streams_of_any_form_become_cupys_for_its_memory(stream):
    import cupy

    kind = arrays.kind_of(array(SHAPE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = kind.use(stream)
    assert isinstance(made, cupy.cuda.Stream)
    assert made.ptr == 7


def test_cupys_own_stream_stays_itself():
    import cupy

    assert arrays.kind_of(array(SHAPE)).use(cupy.cuda.Stream.null) is cupy.cuda.Stream.null
