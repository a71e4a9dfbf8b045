"""Where the arrays of a call of attention_backward may lie."""

import pytest

from flashgen.errors import BadParam, BadTensorDtype, DeviceTypeNotSupported
from flashgen.operators.arguments import Argument, view_of_shape
from flashgen.operators.attention import ATTENTION
from flashgen.operators.attention import normalise as attention
from flashgen.operators.backward import INPUT_OF, gradient_arguments, normalise, with_gradients

ARGUMENTS = ATTENTION.without_lengths.arguments
ROWS, LSE = (9, 4, 16), (4, 9)
SHAPES = dict.fromkeys(("dout", "q", "k", "v", "out", "dq", "dk", "dv"), ROWS) | {"lse": LSE, "dlse": LSE}


@pytest.mark.parametrize("other", [None, 1])
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "q"])
@pytest.mark.parametrize("packed", [False, True])
def test_all_arrays_are_on_one_device(packed, name, other):
    views = {x: view_of_shape(shape, "fp32" if "lse" in x else "bf16", 0) for x, shape in SHAPES.items()}
    if packed:
        cu = view_of_shape((3,), "int32", 0)
        views |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    normalise(**views)
    views[name] = view_of_shape(SHAPES[name], views[name].dtype, other)
    with pytest.raises(DeviceTypeNotSupported, match=f"^{name} is .* but q is on GPU 0"):
        normalise(**views)


def test_a_row_that_is_appended_to_the_forward_table_moves_nothing_before_it():
    added = Argument("scale", "input", "num_heads_q", ("fp32",), "contiguous", 4, True, differentiable=True)
    now, then = (gradient_arguments(rows, ()) for rows in (ARGUMENTS, (*ARGUMENTS, added)))
    inputs = [x.name for x in now if not x.is_output]
    assert [x.name for x in then][: len(inputs)] == [*inputs[:-1], "scale"]  # dlse comes after it
    assert [x.name for x in then if x.is_output] == [*(x.name for x in now if x.is_output), "dscale"]
    assert then[-1] == added._replace(name="dscale", role="output", differentiable=False)


def test_an_optional_gradient_is_there_where_its_input_is(monkeypatch):
    added = Argument("scale", "input", "num_heads_q", ("fp32",), "contiguous", 4, True, differentiable=True)
    arguments = gradient_arguments((*ARGUMENTS, added), ())
    monkeypatch.setitem(INPUT_OF, "dscale", "scale")
    q = view_of_shape((2, 5, 4, 64), "fp16", 0)
    forward = attention(q, q, q)
    for views in ({}, {"scale": None}):
        strides = forward.fields_of(arguments, with_gradients(views))["strides"]
        by_name = dict(zip((x.name for x in arguments), strides, strict=True))
        assert (by_name["dscale"] is not None) == (by_name["scale"] is not None) == bool(views)


def test_gradients_of_keys_may_be_fp32_in_calls_with_lengths():
    views = {x: view_of_shape(shape, "fp32" if "lse" in x else "bf16", 0) for x, shape in SHAPES.items()}
    views |= {x: view_of_shape(ROWS, "fp32", 0) for x in ("dk", "dv")}
    cu = view_of_shape((3,), "int32", 0)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    assert normalise(**views, **packed).dkv_dtype == "fp32"
    assert normalise(**views, **packed).of_sequence(5, 7).dkv_dtype == "fp32"
    with pytest.raises(BadTensorDtype, match=r"dk has dtype fp32; expected bf16.* only calls with lengths"):
        normalise(**{name: x for name, x in views.items() if name != "dlse"})
    for dv, what in ((None, "is None"), (view_of_shape(ROWS, "bf16", 0), "has dtype bf16")):
        with pytest.raises(BadTensorDtype, match=f"dk has dtype fp32 and dv {what}; pass both as fp32"):
            normalise(**views | packed | {"dv": dv})
    with pytest.raises(BadTensorDtype, match="dq has dtype fp32; expected bf16"):
        normalise(**views | packed | {"dq": view_of_shape(ROWS, "fp32", 0)})
    with pytest.raises(BadParam, match="dk has dtype fp32 and dropout_seed was given"):
        normalise(**views, **packed, dropout_p=0.25, dropout_seed=view_of_shape((2,), "int64", 0))
