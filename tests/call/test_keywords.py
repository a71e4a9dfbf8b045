"""Keywords that a public function does not have: what the caller may have meant."""

import inspect
import re

import numpy as np
import pytest

import flashgen
from flashgen.call import keywords
from flashgen.errors import BadParam

Q = np.ones((1, 4, 2, 8), np.float16)
LSE = np.zeros((1, 2, 4), np.float32)
CACHE = flashgen.KVCache(Q.copy(), Q.copy(), np.zeros(1, np.int32))
CALLS = {
    "attention": lambda **given: flashgen.attention(Q, Q, Q, **given),
    "plan": lambda **given: flashgen.plan(Q, Q, Q, **given),
    "attention_backward": lambda **given: flashgen.attention_backward(Q, Q, Q, Q, Q, LSE, **given),
    "plan_backward": lambda **given: flashgen.plan_backward(Q, Q, Q, Q, Q, LSE, **given),
    "append": lambda **given: flashgen.append(CACHE, Q, Q, **given),
    "merge": lambda **given: flashgen.merge([(Q, LSE)] * 2, **given),
    "quantize": lambda **given: flashgen.quantize(Q, **given),
    "cascade": lambda **given: flashgen.cascade(Q, [(Q, Q)], **given),
    "warmup": lambda **given: flashgen.warmup([], **given),
}
DESCRIBED = {
    "explain": lambda **given: flashgen.explain((1, 4, 2, 8), arch="sm_90", **given),
    "warmup": lambda **given: flashgen.warmup([{"q": (1, 4, 2, 8), **given}], arch="sm_90"),
}
OF_ATTENTION = {
    "is_causal": "causal",
    "scale": "softmax_scale",
    "sm_scale": "softmax_scale",
    "attn_mask": "mask, which hides where it is nonzero",
    "cu_seqlens_k": "cu_seqlens_kv",
    "max_seqlen_k": "max_seqlen_kv",
    "cuasal": "causal",
    "window_sizes": "window_size",
    "softmaxscale": "softmax_scale",
}


@pytest.mark.parametrize(("given", "meant"), OF_ATTENTION.items())
@pytest.mark.parametrize("name", ["attention", "plan", "attention_backward", "plan_backward"])
def test_attention_says_what_was_meant(name, given, meant):
    words = f"{name}() got an unexpected keyword argument {given!r}; did you mean {meant}?"
    with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
        CALLS[name](**{given: 1})


@pytest.mark.parametrize(("given", "meant"), OF_ATTENTION.items())
@pytest.mark.parametrize("name", DESCRIBED)
def test_descriptions_of_calls_say_what_was_meant(name, given, meant):
    words = rf"^{given}: no such option; there are .*; did you mean {meant}\?"
    with pytest.raises(BadParam, match=words):
        DESCRIBED[name](**{given: 1})


@pytest.mark.parametrize("call", [CALLS["attention"], CALLS["plan"], DESCRIBED["explain"]])
def test_what_has_no_name_here_is_to_be_left_out(call):
    with pytest.raises((TypeError, BadParam), match=r"enable_gqa.*; heads are grouped .*; leave it out"):
        call(enable_gqa=True)
    with pytest.raises((TypeError, BadParam), match=r"block_table.*; pass k as a .*KVCache with pages"):
        call(block_table=Q)


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("append", "rotary_cos", "rotary"),
        ("append", "cu_seqlens_q", "cu_seqlens_new"),
        ("append", "q_position", "q_positions"),
        ("merge", "lse", "lse_out"),
        ("merge", "output", "out"),
        ("merge", "steam", "stream"),
        ("quantize", "output", "out"),
        ("quantize", "scales", "scale"),
        ("cascade", "is_causal", "causal"),
        ("cascade", "scale", "softmax_scale"),
        ("cascade", "part", "parts"),
        ("warmup", "job", "jobs"),
    ],
)
def test_others_say_what_was_meant(name, given, meant):
    words = f"{name}() got an unexpected keyword argument {given!r}; did you mean {meant}?"
    with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
        CALLS[name](**{given: 1})


@pytest.mark.parametrize("name", CALLS)
def test_a_word_like_no_other_has_pythons_message(name):
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'zzzz'$"):
        CALLS[name](zzzz=1)


def test_every_name_that_is_meant_is_one_of_a_public_function():
    functions = [getattr(flashgen, name) for name in (*CALLS, "explain")]
    names = {each for function in functions for each in inspect.signature(function).parameters}
    assert keywords._ELSEWHERE.keys() <= names
    for elsewhere in keywords._ELSEWHERE.values():
        assert not set(elsewhere) & set(inspect.signature(flashgen.attention).parameters) - {"cu_seqlens_q"}
