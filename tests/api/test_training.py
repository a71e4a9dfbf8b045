"""``attention_backward`` and ``plan_backward``: what a call may have wrong, and what a plan says."""

import numpy as np
import pytest

import flashgen
from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    BadTensorShape,
    BadTensorStrides,
    InsufficientWorkspace,
    NullPointer,
)
from flashgen.operators import OPERATORS
from flashgen.operators.backward import BACKWARD
from flashgen.operators.gradients import judge
from flashgen.simulator import hostcompiler
from named import by_name

NAMES = ("dout", "q", "k", "v", "out", "lse")


def arrays(**changes):
    q, k, v = np.ones((2, 5, 4, 16), np.float16), np.ones((2, 7, 2, 16), np.float16), None
    v = np.ones((2, 7, 2, 8), np.float16)
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    return dict(zip(NAMES, (out.copy(), q, k, v, out, lse), strict=True)) | changes


def called(**changes):
    return flashgen.attention_backward(**arrays(**changes))


def test_a_workspace_is_checked_also_where_none_is_needed():
    for workspace in (np.empty(0, np.uint8), np.empty(9, np.uint8)[1:]):
        called(workspace=workspace)
    with pytest.raises(BadTensorDtype, match="workspace has type str"):
        called(workspace="nonsense")
    with pytest.raises(BadParam, match="workspace must be a contiguous array"):
        called(workspace=np.empty(9)[::2])


@pytest.mark.parametrize(
    ("good", "bad"),
    [({"deterministic": True}, {"deterministic": 1.0}), ({}, {"window_size": (-1.0, -1.0)})],
    ids=str,
)
def test_what_is_refused_is_refused_after_what_equals_it(good, bad, forget_plans):
    called(**good)
    (name,) = bad
    with pytest.raises(BadParam, match=f"^{name} is"):
        called(**bad)


ROWS = np.ones((2, 5, 4, 8), np.float16)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"out": ROWS[:, :4]}, BadTensorShape, r"out has shape .*\(2, 5, 4, 8\)"),
        ({"out": ROWS.astype(np.float32)}, BadTensorDtype, "out has dtype fp32"),
        ({"dout": ROWS[..., :6]}, BadTensorShape, "dout has shape"),
        ({"dout": ROWS[0]}, BadTensorShape, "dout has shape"),
        ({"dout": None}, NullPointer, "dout is None"),
        ({"lse": None}, NullPointer, "lse is None"),
        ({"lse": np.ones((2, 5, 4), np.float32)}, BadTensorShape, "lse has shape"),
        ({"lse": np.ones((2, 4, 5), np.float16)}, BadTensorDtype, "lse has dtype fp16; expected fp32"),
        ({"lse": np.ones((2, 5, 4), np.float32).swapaxes(1, 2)}, BadTensorStrides, "lse has strides"),
        ({"dlse": np.ones((4, 5), np.float32)}, BadTensorShape, "dlse has shape"),
        ({"dq": np.ones((2, 5, 4, 8), np.float16)}, BadTensorShape, "dq has shape"),
        ({"dk": np.ones((2, 7, 4, 16), np.float16)}, BadTensorShape, "dk has shape"),
        ({"dv": np.ones((2, 7, 2, 8), np.float32)}, BadTensorDtype, "dv has dtype"),
        ({"deterministic": 2}, BadParam, "deterministic is 2"),
        ({"causal": None}, BadParam, "causal is None"),
        ({"splits": 2}, BadParam, "splits was given"),
        ({"splits": None}, BadParam, "splits was given"),
        ({"max_seqlen_q": 3}, BadParam, "max_seqlen_q is 3, but no lengths were given"),
        (
            {"k": flashgen.KVCache(ROWS, ROWS, None)},
            BadParam,
            "k is a KVCache, .* with kv_lengths if need be$",
        ),
        ({"softmax_scale": float("nan")}, BadParam, "softmax_scale is nan"),
    ],
)
def test_what_does_not_fit_is_named(changes, error, words):
    with pytest.raises(error, match=words):
        called(**changes)


def test_what_a_forward_pass_takes_by_default_is_no_demand():
    for x, y in zip(called(splits="auto", append=None, algorithm=None), called(), strict=True):
        np.testing.assert_array_equal(x, y)


PACKED = {
    "dout": np.ones((9, 4, 8), np.float16),
    "q": np.ones((9, 4, 16), np.float16),
    "k": np.ones((11, 2, 16), np.float16),
    "v": np.ones((11, 2, 8), np.float16),
    "out": np.ones((9, 4, 8), np.float16),
    "lse": np.ones((4, 9), np.float32),
    "cu_seqlens_q": np.array([0, 4, 9], np.int32),
    "cu_seqlens_kv": np.array([0, 11, 11], np.int32),
}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"dout": PACKED["dout"][None]}, BadTensorShape, r"dout has shape .*\(rows_q, .*\(9, 4, 8\)"),
        ({"lse": np.ones((1, 4, 9), np.float32)}, BadTensorShape, "lse has shape"),
        ({"dk": np.ones((1, 11, 2, 16), np.float16)}, BadTensorShape, "dk has shape"),
        ({"dv": np.ones((11, 2, 8), np.float32)}, BadTensorDtype, "dv has dtype"),
        ({"mask": np.zeros((9, 11), bool)}, BadParam, "cu_seqlens_q and mask were given"),
        ({"mask_type": 2}, BadParam, "take 'causal_bottom_right' or a window$"),
        ({"cu_seqlens_kv": np.array([0, 11], np.int32)}, BadTensorShape, "batch of 1"),
        ({"cu_seqlens_q": np.array([0, 4, 9])}, BadTensorDtype, "cu_seqlens_q has dtype int64"),
        ({"cu_seqlens_q": np.array([0, 4, 10], np.int32)}, BadParam, "in sequence 1"),
        ({"kv_lengths": np.ones(2, np.int32)}, BadParam, "cu_seqlens_kv and kv_lengths"),
        ({"max_seqlen_q": 4}, BadParam, "sequence 1 has length 5; the bound max_seqlen_q is 4"),
        ({"deterministic": 2}, BadParam, "deterministic is 2"),
    ],
)
def test_what_does_not_fit_lengths_is_named(changes, error, words):
    with pytest.raises(error, match=words):
        flashgen.attention_backward(**PACKED | changes)


def test_a_plan_of_packed_arrays_makes_results_of_their_shapes():
    plan = flashgen.plan_backward(**PACKED)
    order = ("dout", "q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")
    found = plan(*(PACKED[name] for name in order), out=PACKED["out"], lse=PACKED["lse"])
    assert [x.shape for x in found] == [PACKED[name].shape for name in "qkv"]
    padded = PACKED | {name: np.ones((2, 6, *PACKED[name].shape[1:]), np.float16) for name in "kv"}
    padded |= {"cu_seqlens_kv": None, "kv_lengths": np.array([6, 0], np.int32)}
    assert [x.shape for x in flashgen.attention_backward(**padded)] == [padded[name].shape for name in "qkv"]


@pytest.mark.parametrize("function", [flashgen.attention_backward, flashgen.plan_backward])
def test_an_unknown_option_is_a_type_error(function):
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got .* 'dropout'"):
        function(**arrays(dropout=0.1))
    with pytest.raises(BadParam, match=f"^append was given, which {function.__name__} does not take"):
        function(**arrays(append=()))


@pytest.mark.parametrize("gradient", ["dq", "dk", "dv"])
def test_a_gradient_may_overlap_nothing(gradient):
    """Whatever the argument: the check derives from the table."""
    given = arrays(dlse=np.ones((2, 4, 5), np.float32), mask=np.zeros((5, 7), bool))
    like = given[{"dq": "q", "dk": "k", "dv": "v"}[gradient]]
    for argument in BACKWARD.arguments:
        other = given.get(argument.name)
        if other is None:
            continue
        room = np.zeros(max(other.nbytes, like.nbytes) + 64, np.uint8)
        start = -room.ctypes.data % 16
        shared = room[start : start + other.nbytes].view(other.dtype).reshape(other.shape)
        into = room[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
        call = given | {argument.name: shared, gradient: into}
        with pytest.raises(BadTensorStrides, match=f"{gradient} overlaps {argument.name} in memory"):
            flashgen.attention_backward(**call)


def test_gradients_of_packed_arrays_may_lie_between_each_other():
    rng = np.random.default_rng()
    qkv = rng.standard_normal((2, 6, 3, 2, 8), np.float32)
    q, k, v = (qkv[:, :, part] for part in range(3))
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    gradient = np.full(qkv.shape, np.nan, np.float32)
    into = dict(zip(("dq", "dk", "dv"), (gradient[:, :, part] for part in range(3)), strict=True))
    flashgen.attention_backward(out, q, k, v, out, lse, **into)
    assert np.isfinite(gradient).all()


def test_a_plan_is_called_with_the_arrays_in_their_order():
    given = arrays(causal=True)
    plan = flashgen.plan_backward(**given)
    operator = OPERATORS["attention_backward"].without_lengths
    assert (plan.problem.operator, plan.variant, plan.workspace_bytes) == (operator, None, 0)
    assert OPERATORS["attention_backward"] is BACKWARD
    dout, q, k, v, out, lse, _ = given.values()
    expected = flashgen.attention_backward(**given)
    for found in (plan(dout, q, k, v, None, out, lse), plan(**{name: given[name] for name in NAMES})):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)
    with pytest.raises(BadTensorShape, match="dout has seqlen_q 4"):
        plan(dout[:, :4], q, k, v, None, out, lse)


def test_jax_arrays_get_gradients_of_their_own():
    jnp = pytest.importorskip("jax.numpy")
    given = arrays()
    expected = flashgen.attention_backward(**given)
    found = flashgen.attention_backward(**{name: jnp.asarray(x) for name, x in given.items()})
    for x, y in zip(found, expected, strict=True):
        assert isinstance(x, jnp.ndarray)
        np.testing.assert_array_equal(np.asarray(x), y)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_simulator_runs_the_kernels_of_a_call(deterministic):
    if hostcompiler.why_unavailable():
        pytest.skip(hostcompiler.why_unavailable())
    rng = np.random.default_rng()
    q, dout = (rng.standard_normal((40, 2, 32), np.float32).astype(np.float16) for _ in range(2))
    k, v = (rng.standard_normal((50, 2, 32), np.float32).astype(np.float16) for _ in range(2))
    out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    given = dout, q, k, v, out, lse
    options = {"causal": True, "deterministic": deterministic, "backend": "simulator"}
    plan = flashgen.plan_backward(*given, **options)
    assert dict(plan.variant.axes)["dq_order"] == ("ordered" if deterministic else "none")
    workspace = np.full(plan.workspace_bytes + 256, 0xFF, np.uint8)
    workspace = workspace[-workspace.ctypes.data % 256 :]
    found = flashgen.attention_backward(*given, workspace=workspace, **options)
    verdict = judge(plan.problem, by_name(plan.problem, *given[:4], None, out, lse, *(None,) * 5, *found))
    assert verdict.ok, verdict
    with pytest.raises(InsufficientWorkspace, match="workspace has 256 bytes"):
        flashgen.attention_backward(*given, workspace=workspace[:256], **options)
