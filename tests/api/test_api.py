import copy
import pickle
import re
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import flashgen
from flashgen import errors
from flashgen.api import attention, explain
from flashgen.call import compute
from flashgen.runtime import device, kernel
from flashgen.runtime.arrays import kind_of

# Ahead of what `fake_gpu` puts in their place.
REAL_LOAD, REAL_LOAD_ALL = kernel.load, kernel.load_all


@pytest.fixture(autouse=True)
def fresh_plans(forget_plans, monkeypatch):
    monkeypatch.delenv("FLASHGEN_BACKEND", raising=False)


def arrays(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def qkv(dtype=np.float32, seed=0):
    return arrays((2, 30, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16), dtype=dtype, seed=seed)


def test_results_are_of_the_callers_kind_and_equal_across_kinds():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    for name in ("float16", "bfloat16", "float32"):
        q, k, v = qkv(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        expected, expected_lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
        assert expected.dtype == q.dtype

        on_jax = [jax.numpy.asarray(x) for x in (q, k, v)]
        out, lse = flashgen.attention(*on_jax, causal=True, return_lse=True)
        assert (type(out), out.dtype, out.device) == (type(on_jax[0]), q.dtype, on_jax[0].device)
        np.testing.assert_array_equal(np.asarray(out), expected)
        np.testing.assert_array_equal(np.asarray(lse), expected_lse)

        on_torch = [torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) for x in (q, k, v)]
        if name != "bfloat16":
            on_torch = [torch.from_numpy(x) for x in (q, k, v)]
        out, lse = flashgen.attention(*on_torch, causal=True, return_lse=True)
        assert (type(out), out.dtype, lse.dtype) == (torch.Tensor, on_torch[0].dtype, torch.float32)
        np.testing.assert_array_equal(out.float().numpy(), expected.astype(np.float32))


def test_out_has_the_head_dim_of_v():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 9, 2, width), np.float32) for width in (24, 24, 40))
    out = flashgen.attention(q, k, v)
    assert out.shape == (2, 9, 2, 40)
    np.testing.assert_allclose(out[..., :24], flashgen.attention(q, k, v[..., :24]), rtol=1e-6, atol=1e-6)
    assert np.array_equal(flashgen.plan(q, k, v)(q, k, v), out)
    given = np.full_like(out, np.nan)
    assert flashgen.attention(q, k, v, out=given) is given
    assert np.array_equal(given, out)
    torch = pytest.importorskip("torch")
    assert np.array_equal(flashgen.attention(*map(torch.from_numpy, (q, k, v))).numpy(), out)


def test_without_batch():
    q, k, v = qkv()
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    for item in range(2):
        one, one_lse = flashgen.attention(q[item], k[item], v[item], return_lse=True)
        np.testing.assert_array_equal(one, out[item])
        np.testing.assert_array_equal(one_lse, lse[item])


def test_out_is_written_and_returned():
    q, k, v = qkv()
    out = np.full((2, 4, 30, 16), np.nan, np.float32).transpose(0, 2, 1, 3)
    assert flashgen.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, flashgen.attention(q, k, v))
    torch = pytest.importorskip("torch")
    on_torch = torch.full(q.shape, torch.nan)
    assert flashgen.attention(*map(torch.from_numpy, (q, k, v)), out=on_torch) is on_torch
    np.testing.assert_array_equal(on_torch.numpy(), out)


def test_no_output_is_touched_by_an_error():
    q, k, v = qkv()
    out = np.full_like(q, 7)
    frozen = out.copy()
    frozen.flags.writeable = False
    for error, wrong in (
        (errors.BadTensorDtype, {"q": q.astype(np.float64)}),
        (errors.BadTensorShape, {"k": k[:, :, :1]}),
        (errors.BadParam, {"softmax_scale": np.nan}),
        (errors.BadParam, {"stream": 0}),
        (errors.NullPointer, {"v": None}),
        (errors.BadParam, {"out": frozen}),
        (errors.DeviceTypeNotSupported, {"backend": "cuda"}),
    ):
        with pytest.raises(error):
            flashgen.attention(**({"q": q, "k": k, "v": v, "out": out} | wrong))
    assert np.all(out == 7)
    assert np.all(frozen == 7)


def test_an_out_that_lies_between_the_inputs_of_each_token():
    rng = np.random.default_rng()
    together = rng.standard_normal((2, 40, 4, 2, 32)).astype(np.float16)
    q, k, v, out = (together[:, :, each] for each in range(4))
    expected = flashgen.attention(q.copy(), k.copy(), v.copy(), causal=True)
    before = together[:, :, :3].copy()
    assert flashgen.attention(q, k, v, causal=True, out=out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(together[:, :, :3], before)
    with pytest.raises(errors.BadTensorStrides, match=r"^out overlaps v in memory"):
        flashgen.attention(q, k, v, out=together.reshape(2, 40, 8, 32)[:, :, 5:7])


def test_an_out_that_overlaps_an_input():
    packed = arrays((2, 30, 3, 4, 16))[0]
    q, k, v = (packed[:, :, part] for part in range(3))
    with pytest.raises(errors.BadTensorStrides, match=r"out overlaps q"):
        flashgen.attention(q, k, v, out=q)
    with pytest.raises(errors.BadTensorStrides, match="overlaps"):
        flashgen.attention(q.copy(), k.copy(), v, out=packed.reshape(2, 30, 12, 16)[:, :, 5:9])
    mask = np.zeros((30, 2, 30), bool)
    buffer = mask.view(np.uint8)[: 30 * 60].ravel()[:1536].view(np.float32).reshape(1, 6, 4, 16)
    other = arrays((1, 6, 4, 16), (1, 30, 4, 16), (1, 30, 4, 16))
    with pytest.raises(errors.BadTensorStrides, match="out overlaps mask"):
        flashgen.attention(*other, mask=mask.reshape(-1)[:180].reshape(6, 30), out=buffer)


def test_a_misaligned_array_is_found_on_every_call():
    q, k, v = qkv(np.float16)
    shifted = np.zeros(q.size + 1, np.float16)[1:].reshape(q.shape)
    flashgen.attention(q, k, v)
    for _ in range(2):
        with pytest.raises(errors.BadTensorStrides, match=r"^q starts at address"):
            flashgen.attention(shifted, k, v)


def test_kinds_are_not_mixed():
    torch = pytest.importorskip("torch")
    q, k, v = qkv()
    with pytest.raises(errors.BadParam, match="v is a torch array but q is a numpy one"):
        flashgen.attention(q, k, torch.from_numpy(v))


def test_kinds_that_are_mixed_are_called_by_their_own_libraries():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    tensors, others = ([convert(x) for x in qkv()] for convert in (torch.from_numpy, jax.numpy.asarray))
    for call in (flashgen.attention, flashgen.plan):
        with pytest.raises(errors.BadParam, match=r"^k is a jax array but q is a torch one"):
            call(tensors[0], *others[1:])
        with pytest.raises(errors.BadParam, match=r"^k is a torch array but q is a jax one"):
            call(others[0], *tensors[1:])
    with pytest.raises(errors.BadParam, match=r"^alibi_slopes is a jax array but q is a torch one"):
        flashgen.attention(*tensors, alibi_slopes=jax.numpy.ones(4))
    plan = flashgen.plan(*tensors)
    with pytest.raises(errors.BadParam, match=r"^q is a jax array, but the plan was made for torch"):
        plan(*others)
    with pytest.raises(errors.BadParam, match=r"^v is a jax array but q is a torch one"):
        plan(*tensors[:2], others[2])


def test_kinds_that_nothing_refuses_are_a_fault_of_flashgen(monkeypatch):
    torch = pytest.importorskip("torch")
    q, k, v = qkv()
    monkeypatch.setattr(compute, "make_plan", lambda *_, **__: None)
    with pytest.raises(errors.InternalError, match="several libraries: numpy, numpy, torch"):
        flashgen.attention(q, k, torch.from_numpy(v))


def test_jax_arrays_cannot_be_written_to():
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x) for x in qkv())
    with pytest.raises(errors.BadParam, match=r"^out .*cannot be written"):
        flashgen.attention(q, k, v, out=q + 1)


def test_tensors_that_require_gradients():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in qkv())
    expected = flashgen.attention(q, k, v)
    q.requires_grad_()
    plan = flashgen.plan(q.detach(), k, v)
    with pytest.raises(errors.BadParam, match=r"^q: .*gradient"):
        plan(q, k, v)
    with torch.no_grad():
        assert not flashgen.attention(q, k, v).requires_grad
        assert torch.equal(plan(q, k, v), expected)


def odd_tensors(torch):
    """By what a message calls them, calls of a function with such a tensor in place of ``x``."""
    func, ad = torch.func, torch.autograd.forward_ad

    def dual(f, x):
        with ad.dual_level():
            f(ad.make_dual(x, torch.ones_like(x)))

    return {
        "torch.func": (
            lambda f, x: torch.vmap(f)(x[None]),
            lambda f, x: func.grad(lambda y: f(y).sum())(x),
            lambda f, x: func.jvp(f, (x,), (x,)),
            lambda f, x: func.functionalize(f)(x),
        ),
        "nested": (
            lambda f, x: f(torch.nested.nested_tensor([x[0], x[1][:5]])),
            lambda f, x: f(torch.nested.nested_tensor([x[0], x[1][:5]], layout=torch.jagged)),
        ),
        r"torch\.sparse_coo": (lambda f, x: f(x.to_sparse()),),
        r"torch\.sparse_csr": (lambda f, x: f(x[0, 0].to_sparse_csr()),),
        "pending negation": (lambda f, x: f(torch._neg_view(x)),),
        "forward-mode": (dual,),
    }


def test_tensors_without_elements_of_their_own_are_refused():
    torch = pytest.importorskip("torch")
    given = [torch.from_numpy(x) for x in qkv()]
    out = torch.full_like(given[0], torch.nan)
    plan = flashgen.plan(*given)
    for said, functions in odd_tensors(torch).items():
        for call in functions:
            for place, name in enumerate("qkv"):

                def attention(x, place=place):
                    return flashgen.attention(*given[:place], x, *given[place + 1 :])

                def planned(x, place=place):
                    return plan(*given[:place], x, *given[place + 1 :], out=out)

                for function in (attention, planned):
                    with pytest.raises(errors.BadParam, match=f"^{name}: .*{said}"):
                        call(function, given[place])
    assert out.isnan().all()
    with torch.autograd.forward_ad.dual_level():
        np.testing.assert_array_equal(plan(*given).numpy(), flashgen.attention(*given).numpy())


def test_masked_arrays_of_numpy_are_refused():
    q, k, v = qkv()
    plan = flashgen.plan(q, k, v)
    flashgen.attention(q, k, v)  # a plan of these layouts is there
    for place, name in enumerate("qkv"):
        given = [q, k, v]
        given[place] = np.ma.masked_less(given[place], 0)
        for function in (flashgen.attention, flashgen.plan, plan):
            with pytest.raises(errors.BadParam, match=rf"^{name} is a masked array.*{name}\.data"):
                function(*given)
    with pytest.raises(errors.BadParam, match="mask is a masked array"):
        flashgen.attention(q, k, v, mask=np.ma.masked_array(np.zeros((30, 40), bool)))


def test_options_in_any_form_are_one_plan(monkeypatch):
    made = []
    plan = compute.make_plan
    monkeypatch.setattr(compute, "make_plan", lambda *a, **options: made.append(1) or plan(*a, **options))
    q, k, v = qkv()
    expected = flashgen.attention(q, k, v, window_size=(5, 0))
    for window in ([5, 0], np.array([5, 0]), (np.int64(5), 0)):
        np.testing.assert_array_equal(flashgen.attention(q, k, v, window_size=window), expected)
    assert len(made) == 1


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"causal": True}, {"causal": 1.0}),
        ({"window_size": (7, 0)}, {"window_size": (7.0, 0)}),
        ({"window_size": (7, 0)}, {"window_size": (7, False)}),
        ({"mask_type": 0}, {"mask_type": False}),
        ({}, {"window_size": (-1.0, -1.0)}),
        ({}, {"window_size": (np.array([3, 3]), 0)}),
        ({"splits": 1}, {"splits": True}),
        ({"mask_type": 2}, {"mask_type": 2.0}),
    ],
)
def test_what_is_refused_is_refused_after_what_equals_it(good, bad, forget_plans):
    q, k, v = qkv()
    flashgen.attention(q, k, v, **good)
    (name,) = bad
    for known in (True, False):
        if not known:
            forget_plans()
        with pytest.raises(errors.BadParam, match=f"^{name} is"):
            flashgen.attention(q, k, v, **bad)


def test_a_bound_that_is_true_is_refused_after_one_that_is_1():
    q, k, v = (x[:, :1] for x in qkv())
    lengths = np.ones(len(q), np.int32)
    flashgen.attention(q, k, v, kv_lengths=lengths, max_seqlen_kv=1)
    with pytest.raises(errors.BadParam, match=r"^max_seqlen_kv is True; expected an integer"):
        flashgen.attention(q, k, v, kv_lengths=lengths, max_seqlen_kv=True)


def test_a_window_in_an_array_is_that_of_its_call():
    q, k, v = qkv()
    window = np.array([5, 0])
    flashgen.attention(q, k, v, window_size=window)
    window[:] = 2, 0
    expected = flashgen.attention(q, k, v, window_size=(2, 0))
    np.testing.assert_array_equal(flashgen.attention(q, k, v, window_size=window), expected)


def test_an_option_that_is_no_key_is_refused_by_its_name():
    q, k, v = qkv()
    with pytest.raises(errors.BadParam, match="mask_type"):
        flashgen.attention(q, k, v, mask_type=[1])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_bound_in_a_tensor_is_that_of_its_call(library):
    """A tensor is its own key, whatever is in it."""
    array = np.array if library == "numpy" else pytest.importorskip("torch").tensor
    q, k, v = arrays((5, 4, 32), (9, 2, 32), (9, 2, 32))
    ends = {"cu_seqlens_q": np.array([0, 2, 5], np.int32), "cu_seqlens_kv": np.array([0, 4, 9], np.int32)}
    bound = array(3)
    expected = flashgen.attention(q, k, v, **ends)
    for value in (3, 2, 3):
        bound[...] = value
        if value == 3:
            assert np.array_equal(flashgen.attention(q, k, v, **ends, max_seqlen_q=bound), expected)
        else:
            with pytest.raises(errors.BadParam, match="the bound max_seqlen_q is 2"):
                flashgen.attention(q, k, v, **ends, max_seqlen_q=bound)


def test_plans_are_kept_per_layout_and_options(monkeypatch):
    made = []
    plan = compute.make_plan
    monkeypatch.setattr(compute, "make_plan", lambda *a, **options: made.append(1) or plan(*a, **options))
    q, k, v = qkv()
    for seed in range(3):
        flashgen.attention(*qkv(seed=seed))
    assert len(made) == 1
    flashgen.attention(q, k, v, causal=True)
    flashgen.attention(q[:, :29], k, v)
    flashgen.attention(q, k[:, ::2], v[:, ::2])
    flashgen.attention(q, k, v, softmax_scale=0.5)  # a scalar, which a plan takes with each call
    flashgen.attention(q, k, v, out=np.empty_like(q))
    assert len(made) == 5
    monkeypatch.setattr(compute, "MAX_PLANS", 4)
    for length in range(1, 9):
        flashgen.attention(q[:, :length], k, v)
    assert len(compute._plans) == 4


@pytest.mark.parametrize("backend", ["cuda", "tpu"])
def test_backends(backend, monkeypatch):
    q, k, v = qkv()
    error = errors.DeviceTypeNotSupported if backend == "cuda" else errors.BadParam
    with pytest.raises(error, match=backend):
        flashgen.attention(q, k, v, backend=backend)
    flashgen.attention(q, k, v)
    monkeypatch.setenv("FLASHGEN_BACKEND", backend)
    with pytest.raises(error, match=backend):
        flashgen.attention(q, k, v)
    flashgen.attention(q, k, v, backend="cpu")


def test_a_backend_is_forbidden_to_gpu_arrays_when_a_plan_is_made(fake_gpu, monkeypatch):
    from fake_gpu import array

    q, k, v, out = (array((1, 64, 2, 64), np.float16, (n + 1) << 32) for n in range(4))
    flashgen.attention(q, k, v, out=out)
    monkeypatch.setenv("FLASHGEN_BACKEND", "simulator")
    flashgen.attention(q, k, v, out=out)
    assert len(fake_gpu.launches) == 2
    with pytest.raises(errors.DeviceTypeNotSupported, match="simulator"):
        flashgen.attention(q, k, v, out=out, causal=True)


def test_gpu_arrays_never_fall_back_to_the_cpu():
    cupy = pytest.importorskip("cupy")
    if device.available():
        pytest.skip("there is a GPU")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(4096, 1 << 20, None, 0), 0)
    q = cupy.ndarray((2, 8, 4, 16), np.float16, memory)
    for options in ({}, {"backend": "cpu"}):
        with pytest.raises(errors.DeviceTypeNotSupported):
            flashgen.attention(q, q, q, **options)


def test_a_plan():
    q, k, v = qkv()
    mask = np.random.default_rng(1).random((30, 40)) < 0.5
    plan = flashgen.plan(q, k, v, mask=mask, return_lse=True)
    assert (plan.variant, plan.workspace_bytes, plan.source) == (None, 0, "")
    q, k, v = qkv(seed=1)
    expected = flashgen.attention(q, k, v, mask=mask, return_lse=True)
    out, lse = np.full_like(q, np.nan), np.full((2, 4, 30), np.nan, np.float32)
    for given in ({}, {"out": out}, {"out": out, "lse": lse}, {"lse": lse}):
        result = plan(q, k, v, mask=mask, **given)
        np.testing.assert_array_equal(result[0], expected[0])
        np.testing.assert_array_equal(result[1], expected[1])
        assert all(result[n] is given[name] for n, name in enumerate(("out", "lse")) if name in given)


def test_ready_raises_what_attention_would_and_computes_nothing(forget_plans):
    def ready(q, k, v, **options):
        defaults, _ = explain._function("attention")
        call = {**defaults, "q": q, "k": k, "v": v, **options}
        return compute.ready(attention.request_by_name(call))

    q, k, v = qkv()
    wrong = [
        ({"window_size": 5}, errors.BadParam),
        ({"softmax_scale": [1]}, errors.BadParam),
        ({"softmax_scale": -1.0}, errors.BadParam),
        ({"softcap": 0.0}, errors.BadParam),
        ({"alibi_slopes": np.ones(3, np.float32)}, errors.BadTensorShape),
        ({"v": v[:, :7]}, errors.BadTensorShape),
        ({"q": np.zeros(q.size + 1, np.float32)[1:].reshape(q.shape)}, errors.BadTensorStrides),
    ]
    for options, error in wrong:
        call = {"q": q, "k": k, "v": v, **options}
        for function in (ready, flashgen.attention):
            with pytest.raises(error):
                function(**call)
    forget_plans()
    for options in ({}, {"causal": True, "softcap": 3.0, "return_lse": True}):
        out = np.full_like(q, np.nan)
        plan, (work, given, _, stream, _) = ready(q, k, v, out=out, **options)
        count = len(compute._plans)
        assert np.isnan(out).all()
        expected = flashgen.attention(q, k, v, out=np.empty_like(q), **options)
        assert len(compute._plans) == count  # the plan that ready has made
        work(given, stream)
        np.testing.assert_equal(plan.results_of(given), expected)


def test_a_plan_is_copied_and_not_pickled():
    q, k, v = qkv()
    plan = flashgen.plan(q, k, v)
    assert copy.copy(plan) is plan
    assert copy.deepcopy({"plan": plan})["plan"] is plan
    with pytest.raises(TypeError, match=r"make one in the other process with flashgen\.plan"):
        pickle.dumps(plan)


def test_a_plan_refuses_arrays_that_are_not_its_own():
    q, k, v = qkv()
    mask = np.zeros((30, 40), bool)
    plan = flashgen.plan(q, k, v, return_lse=True)
    for error, wrong in (
        (errors.BadTensorShape, {"q": q[:, :-1]}),
        (errors.BadTensorStrides, {"k": k[:, ::-1]}),
        (errors.BadTensorDtype, {"v": v.astype(np.float16)}),
        (errors.BadParam, {"mask": mask}),
        (errors.BadTensorStrides, {"out": np.empty((2, 4, 30, 16), np.float32).transpose(0, 2, 1, 3)}),
        (errors.BadTensorDtype, {"out": np.empty(q.shape, np.float16)}),
        (errors.BadTensorShape, {"lse": np.empty((2, 30, 4), np.float32)}),
        (errors.BadTensorDtype, {"lse": np.empty((2, 4, 30), np.float64)}),
        (errors.BadTensorStrides, {"lse": np.empty((2, 30, 4), np.float32).transpose(0, 2, 1)}),
        (errors.BadTensorStrides, {"lse": q.ravel()[:240].reshape(2, 4, 30)}),
        (errors.NullPointer, {"k": None}),
        (errors.BadTensorDtype, {"k": "k"}),
    ):
        with pytest.raises(error):
            plan(**({"q": q, "k": k, "v": v} | wrong))
    with pytest.raises(errors.BadTensorShape, match=r"^q has seqlen_q 29; the plan was made for 30$"):
        plan(q[:, :-1], k, v)
    with pytest.raises(errors.BadTensorStrides, match=r"^k has strides \(1280, -32, 16, 1\)"):
        plan(q, k[:, ::-1], v)
    with pytest.raises(errors.BadParam, match="return_lse"):
        flashgen.plan(q, k, v)(q, k, v, lse=np.empty((2, 4, 30), np.float32))
    with pytest.raises(errors.NullPointer, match="mask"):
        flashgen.plan(q, k, v, mask=mask)(q, k, v)
    torch = pytest.importorskip("torch")
    for wrong in ({"q": torch.from_numpy(q)}, {"lse": torch.empty(2, 4, 30)}):
        with pytest.raises(errors.BadParam):
            plan(**({"q": q, "k": k, "v": v} | wrong))


def test_a_plan_says_what_it_takes_in_place_of_a_cache():
    q, k, v = qkv()
    cache = flashgen.KVCache(k, v, np.full(2, 40, np.int32))
    of_cache, of_arrays = flashgen.plan(q, cache), flashgen.plan(q, k, v)
    takes, of = "the plan takes arrays by name: q, k, v", "; of a KVCache pass cache.k, cache.v, kv_lengths="
    with pytest.raises(
        errors.BadTensorDtype, match=f"^k has type KVCache; {takes}, kv_lengths{of}cache.lengths$"
    ):
        of_cache(q, cache)
    with pytest.raises(errors.NullPointer, match=f"kv_lengths is None.*; {takes}, kv_lengths{of}"):
        of_cache(q, k, v)
    paged = flashgen.KVCache(k, v, cache.lengths, pages=np.zeros((2, 1), np.int32))
    with pytest.raises(errors.BadTensorDtype, match=f"{of}cache.lengths, pages=cache.pages$"):
        flashgen.plan(q, paged)(q, paged)
    with pytest.raises(errors.BadTensorDtype, match=f"^k has type KVCache; {takes}$"):
        of_arrays(q, cache)
    with pytest.raises(errors.BadParam, match=f"^index was given to a plan made without one; {takes}, kv_"):
        of_cache(q, k, v, kv_lengths=cache.lengths, index=cache.lengths)


@pytest.mark.parametrize("at_a_glance", [True, False])
def test_a_plan_goes_on_refusing_tensors_after_calls_that_fit(at_a_glance, monkeypatch):
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, qkv())
    kind = kind_of(q)
    assert kind.expecting is not None
    if not at_a_glance:
        monkeypatch.setattr(kind, "expecting", None)
    plan, out = flashgen.plan(q, k, v), torch.empty_like(q)
    for error, wrong in (
        (errors.BadTensorShape, {"q": q[:, :-1]}),
        (errors.BadTensorStrides, {"k": k.transpose(1, 2).contiguous().transpose(1, 2)}),
        (errors.BadTensorDtype, {"v": v.bfloat16()}),
        (errors.BadTensorDtype, {"out": out.half()}),
        (errors.DeviceTypeNotSupported, {"v": v.to("meta")}),
        (errors.BadParam, {"k": torch._neg_view(k)}),
        (errors.BadParam, {"k": k.clone().requires_grad_()}),
        (errors.BadParam, {"mask": torch.zeros(30, 40, dtype=torch.bool)}),
        (errors.BadParam, {"lse": torch.empty(2, 4, 30)}),
        (errors.NullPointer, {"k": None}),
    ):
        for _ in range(2):
            expected = plan(q, k, v, out=out)
        with pytest.raises(error):
            plan(**({"q": q, "k": k, "v": v, "out": out} | wrong))
    with torch.inference_mode():
        assert torch.equal(plan(q, k, v), expected)


def test_calls_of_one_layout_take_one_plan_and_others_their_own():
    """Whichever plan the last call had."""
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, qkv())
    shorter = k[:, :20], v[:, :20]
    found = {rows: [] for rows in (k.shape[1], 20)}
    for given in ((k, v), (k, v), (k, v), shorter, (k, v), shorter, shorter, shorter, (k, v)):
        found[given[0].shape[1]].append(flashgen.attention(q, *given))
    for results in found.values():
        assert all(torch.equal(x, results[0]) for x in results)
    assert len(compute._plans) == 2
    with pytest.raises(errors.BadTensorDtype):
        flashgen.attention(q, k, v.bfloat16())


def test_a_stride_that_is_never_used_may_differ_from_the_plan_s():
    q, k, v = (x[:1] for x in qkv())
    plan = flashgen.plan(q, k, v)
    far = np.lib.stride_tricks.as_strided(q, q.shape, (64 * 4, *q.strides[1:]))
    assert far.strides != q.strides
    np.testing.assert_array_equal(plan(far, k, v), plan(q, k, v))


def test_a_plan_with_a_layout_of_out_of_its_own():
    q, k, v = qkv()
    turned = np.empty((2, 4, 30, 16), np.float32).transpose(0, 2, 1, 3)
    plan = flashgen.plan(q, k, v, out=turned)
    np.testing.assert_array_equal(plan(q, k, v, out=turned), flashgen.attention(q, k, v))
    with pytest.raises(errors.NullPointer, match="out is None, but the plan was made with one of strides"):
        plan(q, k, v)
    with pytest.raises(errors.BadTensorStrides, match="out"):
        plan(q, k, v, out=np.empty_like(q))


def test_a_plan_takes_subclasses_and_other_libraries_of_its_layout():
    torch = pytest.importorskip("torch")
    q, k, v = qkv()
    plan = flashgen.plan(*map(torch.from_numpy, (q, k, v)))
    parameter = torch.nn.Parameter(torch.from_numpy(q), requires_grad=False)
    expected = flashgen.attention(q, k, v)
    np.testing.assert_array_equal(plan(parameter, *map(torch.from_numpy, (k, v))).numpy(), expected)
    with pytest.raises(errors.BadParam, match="return_lse"):
        plan(parameter, *map(torch.from_numpy, (k, v)), lse=torch.empty(2, 4, 30))
    jax = pytest.importorskip("jax")
    plan = flashgen.plan(q, k, v)
    result = plan(*map(jax.numpy.asarray, (q, k, v)))
    assert isinstance(result, jax.Array)
    np.testing.assert_array_equal(np.asarray(result), expected)


def test_empty_calls():
    for shape, kv in (
        ((0, 5, 2, 16), (0, 5, 2, 16)),
        ((2, 0, 2, 16), (2, 5, 2, 16)),
        ((2, 5, 2, 16), (2, 0, 2, 16)),
    ):
        q, k, v = arrays(shape, kv, kv)
        out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
        assert out.shape == shape
        assert lse.shape == (shape[0], 2, shape[1])
        assert np.all(out == 0)
        assert np.all(np.isneginf(lse))


def test_many_threads():
    expected = [flashgen.attention(*qkv(seed=seed), causal=True) for seed in range(8)]
    wrong = []

    def work(seed):
        results = [flashgen.attention(*qkv(seed=seed), causal=True) for _ in range(20)]
        wrong.extend(seed for result in results if not np.array_equal(result, expected[seed]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_importing_flashgen_imports_nothing_heavy():
    code = "import sys, flashgen; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    ).stdout.split()
    assert "flashgen" in modules
    assert not {"numpy", "cupy", "torch", "jax", "jinja2", "yaml", "click", "rich"} & set(modules)


def test_every_public_name_is_there():
    for name in flashgen.__all__:
        assert getattr(flashgen, name).__name__.removeprefix("flashgen.").lower() == name.lower()
    assert set(flashgen.__all__) <= set(dir(flashgen))
    with pytest.raises(AttributeError, match="flash_attention"):
        _ = flashgen.flash_attention


def test_on_the_cpu_an_algorithm_changes_nothing_but_must_be_one():
    q, k, v = arrays((2, 30, 4, 16), (2, 40, 4, 16), (2, 40, 4, 16))
    expected = flashgen.attention(q, k, v, causal=True)
    for algorithm in ("naive", "v1", "v2", "v3", None):
        for _ in range(2):
            found = flashgen.attention(q, k, v, causal=True, algorithm=algorithm)
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(
            flashgen.plan(q, k, v, causal=True, algorithm=algorithm)(q, k, v), expected
        )
    for unknown in ("v4", "", 3, ["v1"], np.arange(2)):
        for call in (flashgen.attention, flashgen.plan):
            with pytest.raises(errors.BadParam, match=r"algorithm is .*'naive', 'v1', 'v2', 'v3'"):
                call(q, k, v, algorithm=unknown)


@pytest.mark.parametrize("unknown", ["gpu", "", 0, False, [], np.arange(2), np.zeros(0)])
@pytest.mark.parametrize("call", [flashgen.attention, flashgen.plan])
def test_what_is_no_backend_is_named(call, unknown):
    with pytest.raises(errors.BadParam, match=r"^backend is .*; allowed are 'cuda', 'cpu', 'simulator'"):
        call(*qkv(), backend=unknown)


def test_a_variable_that_names_no_backend_is_named_itself(monkeypatch):
    monkeypatch.setenv("FLASHGEN_BACKEND", "CPU")
    for call in (flashgen.attention, flashgen.plan):
        with pytest.raises(errors.BadParam, match=r"^FLASHGEN_BACKEND is 'CPU'; allowed are 'cuda', 'cpu'"):
            call(*qkv())


def test_an_empty_variable_names_no_backend(monkeypatch):
    monkeypatch.setenv("FLASHGEN_BACKEND", "")
    for call in (flashgen.attention, flashgen.plan):
        call(*qkv())


def test_calls_with_lengths_have_no_algorithm():
    q, k, v = qkv()
    with pytest.raises(
        errors.BadParam, match=r"algorithm is 'v2'; a call with lengths .*leave algorithm out"
    ):
        flashgen.attention(q, flashgen.KVCache(k, v, np.full(2, 40, np.int32)), algorithm="v2")


def test_plans_of_each_algorithm_are_kept_apart():
    q, k, v = qkv()
    for algorithm in (None, "naive", "v2", None, "naive"):
        flashgen.attention(q, k, v, algorithm=algorithm)
    assert len(compute._plans) == 3
    shown = [name for name in dir(flashgen) if not name.startswith("__")]
    assert shown == sorted(flashgen.__all__)
    raised = {name for name, x in vars(errors).items() if isinstance(x, type) and issubclass(x, Exception)}
    assert raised <= set(shown)


def test_warmup_compiles_what_the_calls_will_take(tmp_path, monkeypatch):
    pytest.importorskip("cupy", reason="kernels need CuPy and NVRTC")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    calls = [
        {"q": (2, 300, 4, 32), "dtype": "half"},
        {"q": (1, 100, 4, 32), "k": (1, 100, 2, 32), "dtype": "bf16"},
        {"q": (2, 300, 4, 32)},
        {"q": (2, 1, 4, 32), "k": flashgen.KVCache((9, 16, 2, 32), (9, 16, 2, 32), (2,), pages=(2, 4))},
        {"q": (50, 4, 32), "cu_seqlens_q": (3,), "cu_seqlens_kv": (3,), "max_seqlen_q": 40},
        {"q": (2, 300, 4, 32), "operator": "attention_backward"},
        {"k_new": (2, 1, 2, 32), "cache": CACHE_SHAPES, "operator": "append"},
    ]
    names = flashgen.warmup(calls, arch="sm_80", jobs=2)
    assert names == tuple(flashgen.explain(**call, arch="sm_80").variant.name for call in calls)
    monkeypatch.setattr("flashgen.toolchain.compile.compile_cubin", None)
    assert flashgen.warmup(calls, arch="sm_80") == names
    with pytest.raises(errors.BadParam, match="has no q"):
        flashgen.warmup([{"k": (1, 2, 3, 64)}], arch="sm_80")
    with pytest.raises(errors.BadTensorShape, match="head_dim is 36"):
        flashgen.warmup([{"q": (1, 2, 3, 36)}], arch="sm_80")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (({"q": (1, 2, 4, 64)},), r"^calls has type dict; expected a list .*\[\{'q': "),
        (([(1, 2, 4, 64)],), r"^calls\[0\] is \(1, 2, 4, 64\); expected the arguments of a call by name"),
        (([{"q": (1, 2, 4, 64)}, None],), r"^calls\[1\] is None"),
        ((None,), "^calls has type NoneType"),
        (("flash",), r"^calls is 'flash', and there is no such file; expected .*\[\{'q': "),
        ((np.array(3),), "^calls has type ndarray"),
    ],
)
def test_what_is_no_list_of_calls_is_named(given, says):
    with pytest.raises(errors.BadParam, match=says):
        flashgen.warmup(*given, arch="sm_80")


@pytest.mark.parametrize("jobs", ["x", 0, -1, 2.0, True])
def test_what_is_no_number_of_jobs_is_named(jobs):
    with pytest.raises(errors.BadParam, match=r"^jobs is .*; expected an integer of 1 or more, or None"):
        flashgen.warmup([], arch="sm_80", jobs=jobs)


@pytest.mark.parametrize("q", [(1, 4096.0, 16, 128), "1x4096x16x128", [[1, 2], [3, 4]], (1, None, 16, 128)])
def test_what_is_no_shape_of_integers_is_named(q):
    with pytest.raises(errors.BadParam, match=r"^q is .*; expected a shape of integers, such as \(1, 4096, "):
        flashgen.explain(q, arch="sm_90")


def test_sizes_of_a_shape_may_be_integers_of_numpy():
    shape = tuple(np.array([1, 4096, 16, 128]))
    assert (
        flashgen.explain(shape, arch="sm_90").variant
        == flashgen.explain(q=(1, 4096, 16, 128), arch="sm_90").variant
    )


CACHE_SHAPES = flashgen.KVCache((9, 16, 2, 32), (9, 16, 2, 64), (2,), pages=(2, 4))


@pytest.mark.parametrize(
    ("call", "variant"),
    [
        ({"k_new": (2, 1, 2, 32)}, "append_bf16_paged_sm80"),
        ({"k_new": (7, 2, 32), "v_new": (7, 2, 64), "cu_seqlens_new": (3,)}, "append_bf16_paged_sm80"),
        (
            {"k_new": (2, 1, 2, 32), "q": (2, 1, 4, 32), "rotary": flashgen.Rotary((64, 16), (64, 16))},
            "append_bf16_halves_wide_paged_sm80",
        ),
        (
            {
                "k_new": (2, 1, 2, 32),
                "rotary": flashgen.Rotary(*np.ones((2, 64, 16), np.float32), True, (2, 1)),
            },
            "append_bf16_interleaved_wide_paged_sm80",
        ),
        (
            {
                "cache": flashgen.KVCache((9, 16, 1, 96), None, (2,), (2, 4), head_dim_v=64),
                "k_new": (2, 1, 1, 96),
                "rotary": flashgen.Rotary((64, 16), (64, 16)),
            },
            "append_bf16_halves_wide_paged_latent_sm80",
        ),
    ],
)
def test_append_is_explained_by_the_shapes_of_its_arrays(call, variant):
    call = {"cache": CACHE_SHAPES} | call
    found = flashgen.explain(operator="append", dtype="bf16", arch="sm_90", **call)
    assert found.variant.name == variant
    assert f"takes {variant}" in str(found)


def test_a_scale_that_is_no_number_is_refused_after_an_equal_one_that_is():
    q, k, v = qkv()
    flashgen.attention(q, k, v, softmax_scale=1)
    with pytest.raises(errors.BadParam, match="softmax_scale is True"):
        flashgen.attention(q, k, v, softmax_scale=True)


def test_a_cache_may_be_of_a_class_of_the_callers():
    class Mine(flashgen.KVCache):
        pass

    q, k, v = qkv()
    given = k, v, np.full(len(k), k.shape[1], np.int32)
    np.testing.assert_array_equal(
        flashgen.attention(q, Mine(*given)), flashgen.attention(q, flashgen.KVCache(*given))
    )
    np.testing.assert_array_equal(
        flashgen.cascade(q, [Mine(*given)]), flashgen.cascade(q, [flashgen.KVCache(*given)])
    )


def test_an_option_of_warmup_whose_name_is_no_string_is_named():
    with pytest.raises(errors.BadParam, match=r"^1: no such option"):
        flashgen.warmup([{1: True, "q": (1, 2, 2, 64)}], arch="sm_90")


@pytest.mark.parametrize("name", ["mask", "kv_lengths"])
def test_an_optional_array_without_memory_is_named(name):
    torch = pytest.importorskip("torch")
    q, k = torch.zeros(1, 2, 2, 32), torch.zeros(1, 5, 2, 32)
    given = {
        "mask": torch.zeros(2, 5, dtype=torch.bool),
        "kv_lengths": torch.full((1,), 5, dtype=torch.int32),
    }
    given[name].untyped_storage().resize_(0)
    with pytest.raises(errors.NullPointer, match=f"^{name} has no memory"):
        flashgen.attention(q, k, k, **{name: given[name]})


def test_nested_tensors_are_named_by_every_function():
    torch = pytest.importorskip("torch")
    nested = torch.nested.nested_tensor([torch.zeros(3, 2, 32), torch.zeros(4, 2, 32)])
    q = torch.zeros(2, 3, 2, 32)
    cache = flashgen.KVCache(q.clone(), q.clone(), torch.zeros(2, dtype=torch.int32))
    rotary = flashgen.Rotary(torch.zeros(8, 16), torch.zeros(8, 16))
    for name, call in (
        ("q", lambda: flashgen.cascade(nested, [(q, q)])),
        ("lengths", lambda: flashgen.cascade(q, [(q[:1], q[:1]), flashgen.KVCache(q, q, nested)])),
        ("q", lambda: flashgen.attention(nested, cache, append=(q, q), rotary=rotary)),
        ("q", lambda: flashgen.explain(nested, arch="sm_90")),
        ("workspace", lambda: flashgen.plan(q, q, q)(q, q, q, workspace=nested)),
    ):
        with pytest.raises(errors.BadParam, match=f"^{name}: .*nested"):
            call()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"operator": "append", "cache": CACHE_SHAPES}, errors.NullPointer, "^k_new is None"),
        ({"operator": "append", "k_new": (2, 1, 2, 32)}, errors.BadParam, "^cache has type NoneType"),
        (
            {"operator": "append", "cache": CACHE_SHAPES, "k_new": (2, 1, 2, 32), "causal": True},
            errors.BadParam,
            "^causal: no such option; there are cache, cu_seqlens_new, ",
        ),
        (
            {"q": (2, 1, 4, 32), "k": CACHE_SHAPES, "append": ((2, 1, 2, 32), (2, 1, 2, 64))},
            errors.BadParam,
            "^append: no such option.* is a separate call, with operator 'append'$",
        ),
        ({}, errors.NullPointer, "^q is None"),
        ({"q": (2, 4, 2, 16), "deterministic": "x"}, errors.BadParam, "^deterministic is 'x'"),
    ],
)
def test_what_is_wrong_with_shapes_to_explain_is_named(call, error, message):
    with pytest.raises(error, match=message):
        flashgen.explain(arch="sm_90", **call)


def test_warmup_loads_on_the_gpu_of_this_machine(fake_gpu, monkeypatch):
    monkeypatch.setattr(device, "available", lambda: True)
    loaded = []
    monkeypatch.setattr(
        "flashgen.runtime.kernel.load",
        lambda variant, gpu: loaded.append(variant.name) or fake_gpu.load(variant, gpu),
    )
    call = {"q": (2, 300, 4, 64), "causal": True}
    (name,) = flashgen.warmup([call])
    assert set(loaded) == {name}
    assert name == flashgen.explain(**call).variant.name
    assert name.endswith("_sm90")


@pytest.mark.parametrize("jobs", [1, 2])
def test_warmup_compiles_no_more_kernels_at_once_than_it_was_told(jobs, fake_gpu, monkeypatch):
    monkeypatch.setattr(device, "available", lambda: True)
    monkeypatch.setattr("flashgen.toolchain.parallel.processors", lambda: 8)
    monkeypatch.setattr(kernel, "load", REAL_LOAD)
    monkeypatch.setattr(kernel, "load_all", REAL_LOAD_ALL)
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(kernel, "_recalled", lambda variant, gpu: None)
    compiled, running, most = [], [], []
    first = threading.Barrier(jobs, timeout=120)

    def obtained(variant, gpu):
        compiled.append(variant)
        running.append(variant)
        most.append(len(running))
        if len(compiled) <= jobs:
            first.wait()
        time.sleep(0.02)
        running.remove(variant)
        return None, False

    def load(variant, gpu, found):
        found or obtained(variant, gpu)
        return fake_gpu.load(variant, gpu)

    monkeypatch.setattr(kernel, "_obtained", obtained)
    monkeypatch.setattr(kernel, "_load", load)
    call = {"q": (4, 4096, 16, 128), "operator": "attention_backward"}
    names = flashgen.warmup([call, call, call | {"causal": True}], jobs=jobs)
    assert names[0] == names[1] != names[2]
    assert len(compiled) == len(set(compiled)) > 3
    assert max(most) == jobs


LOGGED = """
import numpy as np, flashgen
q = np.zeros((1, 8, 2, 16), np.float32)
for _ in range(2):
    flashgen.attention(q, q, q)
"""


@pytest.mark.parametrize(("level", "lines"), [("info", 1), ("error", 0), ("", 0)])
def test_a_new_shape_is_logged_once(level, lines):
    environment = {"PYTHONPATH": ":".join(sys.path), "FLASHGEN_LOG": level}
    done = subprocess.run(
        [sys.executable, "-c", LOGGED], capture_output=True, text=True, check=True, env=environment
    )
    assert len(done.stderr.splitlines()) == lines
    if lines:
        assert "flashgen.api INFO: attention of batch 1, seqlen_q 8, " in done.stderr
        assert "takes the CPU path" in done.stderr


def test_a_level_that_is_none_is_refused():
    environment = {"PYTHONPATH": ":".join(sys.path), "FLASHGEN_LOG": "loud"}
    done = subprocess.run([sys.executable, "-c", LOGGED], capture_output=True, text=True, env=environment)
    assert "FLASHGEN_LOG is 'loud'; expected one of debug, info, warning, error" in done.stderr
    assert done.returncode == 1


def _calls_on_the_cpu():
    """A call of each function on arrays in host memory. Their shapes are new, so that each makes a plan."""
    q = np.zeros((1, 5, 2, 40), np.float32)
    out, lse = flashgen.attention(q[:, :4], q, q, return_lse=True)
    cache = flashgen.KVCache(*np.zeros((2, 1, 7, 2, 40), np.float32), np.array([1], np.int32))
    return {
        "attention": lambda: flashgen.attention(q, q, q),
        "lengths": lambda: flashgen.attention(q, q, q, kv_lengths=np.array([3], np.int32)),
        "plan": lambda: flashgen.plan(q, q[:, :3], q[:, :3]),
        "attention_backward": lambda: flashgen.attention_backward(out, q[:, :4], q, q, out, lse),
        "merge": lambda: flashgen.merge([(out, lse), (out, lse)]),
        "cascade": lambda: flashgen.cascade(q[:, :2], [(q, q), (q, q)]),
        "append": lambda: flashgen.append(cache, q[:, :1], q[:, :1]),
        "quantize": lambda: flashgen.quantize(q),
    }


@pytest.mark.parametrize("function", [*_calls_on_the_cpu()])
@pytest.mark.parametrize("wrong", ["missing", "empty", "broken"])
def test_specs_that_cannot_be_read_are_an_error_on_the_cpu_as_well(function, wrong, tmp_path, monkeypatch):
    call = _calls_on_the_cpu()[function]
    folder = tmp_path / "specs"
    if wrong != "missing":
        folder.mkdir()
    if wrong == "broken":
        (folder / "mine.yaml").write_text("family: [")
    monkeypatch.setenv("FLASHGEN_SPECS", str(folder))
    with pytest.raises(flashgen.SpecError, match=re.escape(str(folder))):
        call()
