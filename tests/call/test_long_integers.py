"""Integers of thousands of digits, which Python refuses to print, anywhere in a call: errors with names."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import flashgen
from flashgen.compat import flash_attn
from flashgen.errors import FlashgenError

LONG = 10**5000
Q = np.ones((1, 8, 2, 64), np.float16)
LSE = np.ones((1, 2, 8), np.float32)
ROWS = np.array([0, 8], np.int32)
VALUES = (LONG, -LONG, (LONG, -LONG), [-LONG], {"softcap": -LONG}, ((LONG, (LONG,)), 1))
ARRAYS = {
    flashgen.attention: {"q": Q, "k": Q, "v": Q},
    flashgen.plan: {"q": Q, "k": Q, "v": Q},
    flashgen.attention_backward: dict.fromkeys(("q", "k", "v", "out", "dout"), Q) | {"lse": LSE},
    flashgen.append: {"cache": flashgen.KVCache(Q.copy(), Q.copy(), ROWS[:1]), "k_new": Q, "v_new": Q},
    flashgen.explain: {"q": Q.shape, "k": Q.shape},
    flash_attn.flash_attn_func: {"q": Q, "k": Q, "v": Q},
    flash_attn.flash_attn_varlen_func: dict.fromkeys(("q", "k", "v"), Q[0])
    | {"cu_seqlens_q": ROWS, "cu_seqlens_k": ROWS, "max_seqlen_q": 8, "max_seqlen_k": 8},
    flash_attn.flash_attn_with_kvcache: {"q": Q, "k_cache": Q, "v_cache": Q},
}
CASES = [
    pytest.param(function, name, id=f"{function.__name__}-{name}")
    for function in ARRAYS
    for name, parameter in inspect.signature(function).parameters.items()
    if parameter.kind is not inspect.Parameter.VAR_KEYWORD
]


def said(function, arguments):
    """The message of the error that a call raises; names of arguments where it takes them."""
    try:
        function(**arguments)
    except (FlashgenError, NotImplementedError, TypeError) as error:
        return str(error)
    return ", ".join(arguments)


@pytest.mark.parametrize(("function", "name"), CASES)
def test_a_long_integer_is_an_error_with_a_name(function, name):
    further = {"arch": "sm_90"} if function is flashgen.explain else {}
    for value in VALUES:
        arguments = further | ARRAYS[function] | {name: value}
        message = said(function, arguments)
        assert any(argument in message for argument in arguments)
        assert len(message) < 5000


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", range(4))
def test_a_shape_of_long_integers(place, sign):
    shape = [1, 8, 2, 64]
    shape[place] = sign * LONG
    with pytest.raises(FlashgenError, match=r"digits"):
        flashgen.explain(tuple(shape), tuple(shape), dtype="bf16", arch="sm_90")


@pytest.mark.parametrize("sign", [1, -1])
def test_a_split_of_a_long_integer(sign):
    message = said(lambda **_: flashgen.SplitEvery(sign * LONG), {})
    assert ("digits" in message) == (sign < 0)
