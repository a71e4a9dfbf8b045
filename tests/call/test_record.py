"""The fields of a call, and what is made of them: records, signatures, the stub of the package."""

import ast
import inspect
import traceback

import numpy as np
import pytest

import flashgen
from flashgen import errors
from flashgen.api import stub
from flashgen.call import fields, request, signature
from flashgen.call.fields import FIELDS
from flashgen.call.parameters import POSITIONAL, REQUIRED
from flashgen.call.record import AttentionCall, GradientCall, call_of
from flashgen.operators.attention import ATTENTION
from flashgen.operators.backward import BACKWARD as OF_GRADIENTS

FUNCTIONS = {name: getattr(flashgen, name) for name in POSITIONAL}
TREE = ast.parse(stub.PATH.read_text(encoding="utf-8"))


def test_each_field_is_declared_once():
    names = [field.name for field in FIELDS]
    assert len(names) == len(set(names))
    for field in FIELDS:
        assert {*field.functions} <= FUNCTIONS.keys()
        assert (field.kind == "score") >= (field.shorthand is not None)
        assert field.doc or "attention" not in field.functions, field.name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_those_of_the_fields(name):
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    *names, unknown = parameters
    assert (unknown, parameters[unknown].kind) == ("unknown", inspect.Parameter.VAR_KEYWORD)
    assert set(names) == {field.name for field in FIELDS if name in field.functions}
    for place, parameter in enumerate(list(parameters.values())[:-1]):
        by_position = place < len(POSITIONAL[name])
        assert (parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD) == by_position
        assert (parameter.default is parameter.empty) == (place < REQUIRED[name])
    with pytest.raises(TypeError, match=rf"^{name}\(\) missing \d required positional arguments?: '"):
        FUNCTIONS[name]()


def test_each_parameter_is_documented():
    text = inspect.getdoc(flashgen.attention)
    for name in list(inspect.signature(flashgen.attention).parameters)[:-1]:
        assert f"\n{name}: " in text
    assert flashgen.attention.__module__ == "flashgen.api.attention"


def test_what_a_function_made_of_fields_does_is_in_tracebacks():
    with pytest.raises(errors.BadParam) as caught:
        flashgen.attention(*[np.ones((1, 2, 1, 8), np.float16)] * 3, window_size=3)
    frames = traceback.extract_tb(caught.tb)
    assert frames[1].name == "attention"
    assert frames[1].line == "return compute(call)"


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), AttentionCall.of_defaults, AttentionCall.copy])
def test_torch_can_trace_how_a_record_is_made(function):
    # torch.compile of PyTorch 2.11 traces Record(), and refuses object.__new__(Record).
    assert object.__new__ not in function.__globals__.values()
    pack = request.packing(ATTENTION, AttentionCall)
    assert object.__new__ not in pack.__globals__.values()


def test_a_record_has_defaults_and_gives_others():
    call = call_of(AttentionCall, q=np.ones((2, 3)), causal=True)
    assert (call.causal, call.splits, call.k) == (True, "auto", None)
    other = call.replace(window_size=(3, 0))
    assert (call.window_size, other.window_size, other.q is call.q) == ((-1, -1), (3, 0), True)
    assert repr(other) == "AttentionCall(q=(2, 3), causal=True, window_size=(3, 0))"
    with pytest.raises(AttributeError):
        call.replace(windows=3)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"causal": 1}, {"causal": True}),
        ({"return_lse": np.bool_(True)}, {"return_lse": True}),
        ({"mask_type": 3}, {"mask_type": "causal_bottom_right"}),
        ({"window_size": [np.int64(3), 0]}, {"window_size": (3, 0)}),
        ({"max_seqlen_q": np.int32(7)}, {"max_seqlen_q": 7}),
        ({"splits": np.int64(4)}, {"splits": 4}),
    ],
)
def test_options_are_normalised_by_their_kinds(options, changes):
    call = call_of(AttentionCall, **options)
    assert not call.is_normal()
    normalised = call.normalised()
    for name, value in changes.items():
        found = getattr(normalised, name)
        assert (type(found), found) == (type(value), value)
    assert call_of(AttentionCall).is_normal()


@pytest.mark.parametrize(
    "name",
    [x.name for x in AttentionCall.fields if x.kind in ("flag", "mask_type", "window", "bound", "splits")],
)
def test_an_option_that_is_wrong_by_itself_is_named(name):
    call = call_of(AttentionCall, **{name: "auto flash"})
    assert not call.is_normal()
    with pytest.raises(errors.BadParam) as caught:
        call.normalised()
    assert caught.value.subject == name


def test_operators_take_all_of_their_arrays_and_options_from_a_record():
    for operator, of in ((ATTENTION, AttentionCall), (OF_GRADIENTS, GradientCall)):
        names = [x.name for x in of.fields]
        call = call_of(of, **{name: name for name in names})
        found = request.packing(operator, of)(call, operator, 3, (0.5,))
        expected = request.Request(
            operator,
            tuple(name if name in names else None for name in operator.positions),
            tuple(3 if name == "score" else name for name in operator.options),
            (0.5,),
            "stream" if "stream" in names else None,
            "backend",
            "algorithm" if "algorithm" in names else None,
            "workspace" if "workspace" in names else None,
        )
        for name in request.Request.__slots__:
            assert getattr(found, name) == getattr(expected, name), name


def test_gradients_come_for_the_arrays_that_have_one():
    results = [x.name for x in OF_GRADIENTS.arguments if x.is_output]
    assert results == [f"d{name}" for name in fields.DIFFERENTIABLE]


def test_the_stub_is_what_the_fields_say():
    assert stub.PATH.read_text(encoding="utf-8") == stub.text(), "run python -m flashgen.api.stub"


@pytest.mark.parametrize("name", [*FUNCTIONS, "cascade", "explain", "warmup"])
def test_the_stub_has_the_signatures_of_the_functions(name):
    parameters = inspect.signature(getattr(flashgen, name)).parameters.values()
    parameters = [x for x in parameters if x.kind is not x.VAR_KEYWORD]
    found = [node for node in TREE.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found
    for node in found:
        names = [x.arg for x in node.args.args], [x.arg for x in node.args.kwonlyargs]
        assert names[0] + names[1] == [x.name for x in parameters]
        assert names[1] == [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
        defaults = (x for x in (*node.args.defaults, *node.args.kw_defaults) if x is not None)
        values = {x.default for x in parameters}
        assert all(ast.literal_eval(x) in values for x in defaults)


def test_the_stub_has_the_arguments_of_plans():
    (plan,) = (x for x in TREE.body if isinstance(x, ast.ClassDef) and x.name == "_AttentionPlan")
    names = {x.arg for x in plan.body[0].args.kwonlyargs}
    assert names >= {*ATTENTION.positions, *ATTENTION.scalars, "kv_lengths", "stream", "workspace"}


def test_explain_lists_its_options():
    parameters = inspect.signature(flashgen.explain).parameters
    assert {"causal", "dout", "deterministic", "algorithm", "cache"} <= parameters.keys()
    assert not {"stream", "append", "workspace"} & parameters.keys()
    assert signature.described("attention").startswith("q: (batch, seqlen_q")
