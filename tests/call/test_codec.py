"""The codec of a call for PyTorch's schemas: what goes in comes out, and other versions are refused."""

import json
import math

import pytest

from flashgen.errors import BadParam
from flashgen.operators.arguments import Expected
from flashgen.operators.splits import SplitEvery

torch = pytest.importorskip("torch")

from flashgen.call import codec  # noqa: E402
from flashgen.call.record import AttentionCall, GradientCall, call_of  # noqa: E402

Q, SLOPES = torch.zeros(2, 3, 4, 16), torch.ones(4)
CALLS = {
    "plain": {},
    "options": {
        "causal": True,
        "mask_type": "dense",
        "window_size": (3, -1),
        "softmax_scale": 0.3,
        "deterministic": True,
        "backend": "cpu",
        "algorithm": "v2",
    },
    "bounds": {"max_seqlen_q": 3, "max_seqlen_kv": 2**40},
    "expected bounds": {"max_seqlen_q": Expected(3), "max_seqlen_kv": Expected(None)},
    "splits": {"splits": 4},
    "splits of a length": {"splits": SplitEvery(256)},
    "shorthand": {"softcap": 30.0, "alibi_slopes": SLOPES},
    "score": {"score": ["mine", "other"], "params": {"a": SLOPES, "b": 3, "c": -2.5e-7}},
    "numbers beyond JSON": {"score": ["mine"], "params": {"a": math.inf, "b": -math.inf, "c": 2**127}},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_comes_back(name):
    call = call_of(AttentionCall, q=Q, **CALLS[name])
    score_arrays, entries = codec.encode(call)
    assert len(entries) == codec.SCHEMA.count(",") + 1
    assert all(x is None or isinstance(x, (bool, int, float, str)) for x in entries)
    decoded = codec.decode(AttentionCall, {"q": Q}, score_arrays, entries)
    for field in call.fields:
        value, expected = getattr(decoded, field.name), getattr(call, field.name)
        assert value is expected or value == expected, field.name
        if isinstance(expected, dict):
            assert [type(x) for x in value.values()] == [type(x) for x in expected.values()]


def test_gradients_have_the_options_that_they_take():
    call = call_of(AttentionCall, q=Q, causal=True, softcap=2.0, splits=4, algorithm="v2")
    score_arrays, entries = codec.encode(call)
    decoded = codec.decode(GradientCall, {"q": Q, "dout": Q}, score_arrays, entries)
    assert (decoded.causal, decoded.softcap, decoded.dout is Q) == (True, 2.0, True)
    other = codec.encode(call_of(GradientCall, q=Q, causal=True, softcap=2.0))
    assert codec.decode(GradientCall, {}, *other).softcap == 2.0


def test_another_version_is_refused():
    _, (*entries, rest) = codec.encode(call_of(AttentionCall, q=Q))
    assert json.loads(rest)["version"] == codec.VERSION
    for values in ({**json.loads(rest), "version": codec.VERSION + 1}, {}):
        with pytest.raises(BadParam, match=rf"this flashgen reads version {codec.VERSION}: export .* anew"):
            codec.decode(AttentionCall, {}, [], (*entries, json.dumps(values)))


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\x00b"])
def test_a_name_that_would_end_a_string_is_refused(name):
    with pytest.raises(BadParam, match="neither a name nor a formula has such characters"):
        codec.encode(call_of(AttentionCall, q=Q, score=name))
    with pytest.raises(BadParam, match="has no parameter"):
        codec.encode(call_of(AttentionCall, q=Q, score="mine", params={name: 3.0}))


def test_the_schemas_are_those_of_the_fields():
    from flashgen.call import autograd, compiled  # noqa: F401

    schema = torch.ops.flashgen.attention.default._schema
    names = [x.name for x in schema.arguments]
    assert names[: len(codec.INPUTS)] == [*codec.INPUTS]
    assert names[-1] == "rest"
    assert {field.name for field in codec.OPTIONS} - {*names} == {"window_size"}
    types = {x.name: str(x.type) for x in schema.arguments}
    assert {types[x] for x in ("max_seqlen_q", "max_seqlen_kv")} == {"Optional[int]"}
    backward = torch.ops.flashgen.attention_backward_into.default._schema
    assert [x.name for x in backward.arguments if x.is_write] == ["dq", "dk", "dv", "dsinks"]
