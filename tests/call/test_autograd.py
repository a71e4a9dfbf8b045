"""``attention`` in the graphs of PyTorch: autograd, torch.compile, torch.export. On the CPU."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

import flashgen
from flashgen.errors import BadParam, BadTensorShape, DeviceTypeNotSupported, NullPointer
from flashgen.simulator import hostcompiler

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from flashgen.api import backward  # noqa: E402
from flashgen.call import autograd, codec  # noqa: E402  # autograd registers the operators
from flashgen.call.record import AttentionCall, call_of  # noqa: E402

functional = torch.nn.functional

HEADS, KV_HEADS = 4, 2


def tensors(dtype=torch.float32, batch=2):
    """q, k and v that require gradients, and a gradient of the result."""
    shapes = (6, HEADS, 16), (7, KV_HEADS, 16), (7, KV_HEADS, 8)
    made = [torch.randn(batch, *shape).to(dtype).requires_grad_() for shape in shapes]
    return (*made, torch.randn(batch, 6, HEADS, 8).to(dtype))


def gradients(function, *inputs):
    """Those of what a function gives as its loss."""
    return torch.autograd.grad(function(*inputs), inputs)


def sdpa(q, k, v, **options):
    group = HEADS // KV_HEADS
    k, v = (x.repeat_interleave(group, -2) for x in (k, v))
    turned = (x.transpose(-3, -2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(*turned, **options).transpose(-3, -2)


def same(found, expected, tolerance=1e-5):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def test_gradients_are_those_of_sdpa():
    q, k, v, dout = tensors()
    hidden = torch.rand(2, 1, 6, 7) < 0.4
    hidden[..., 0] = False  # a row that sees nothing is NaN in PyTorch
    options = {"mask": hidden, "softmax_scale": 0.3}
    found = gradients(lambda *x: (flashgen.attention(*x, **options) * dout).sum(), q, k, v)
    expected = gradients(lambda *x: (sdpa(*x, attn_mask=~hidden, scale=0.3) * dout).sum(), q, k, v)
    same(found, expected)


def test_they_are_those_of_attention_backward_bit_by_bit():
    q, k, v, dout = tensors(torch.bfloat16)
    out, lse = flashgen.attention(q, k, v, causal=True, softcap=1.5, return_lse=True)
    dlse = torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    with torch.no_grad():
        expected = flashgen.attention_backward(dout, q, k, v, out, lse, causal=True, softcap=1.5, dlse=dlse)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def with_sinks(q, k, v, sinks):
    """Attention with logits that join the denominator, and its LSE, by PyTorch alone."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
    scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], v), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_sinks_have_a_gradient(compiled, dtype):
    *inputs, dout = tensors()
    inputs.append(torch.randn(HEADS).to(dtype).requires_grad_())
    dlse = torch.randn(2, HEADS, 6)

    def attend(q, k, v, sinks):
        return flashgen.attention(q, k, v, sinks=sinks, return_lse=True)

    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    found, expected = (torch.autograd.grad(f(*inputs), inputs, (dout, dlse)) for f in (function, with_sinks))
    same(found[:3], expected[:3])
    assert found[3].dtype == dtype
    same(found[3:], expected[3:], 1e-5 if dtype == torch.float32 else 1e-2)


def test_an_lse_alone_has_a_gradient():
    q, k, v, _ = tensors()
    scores = lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / 4  # noqa: E731
    found = gradients(lambda *x: flashgen.attention(*x, v, return_lse=True)[1].square().sum(), q, k)
    same(found, gradients(lambda *x: scores(*x).logsumexp(-1).square().sum(), q, k))


def test_the_gradient_of_a_result_may_have_any_strides():
    q, k, v, _ = tensors()
    weights = torch.randn(8, HEADS, 6, 2).permute(3, 2, 1, 0)  # its last dimension is not contiguous
    for loss in (lambda x: x.sum(), lambda x: (x * weights).sum(), lambda x: x[:, ::2, :, 1:].sum()):
        same(
            gradients(lambda *x, loss=loss: loss(flashgen.attention(*x)), q, k, v),
            gradients(lambda *x, loss=loss: loss(sdpa(*x)), q, k, v),
        )


def requests_of_gradients(monkeypatch):
    """A list that gets the requests of backward passes to come."""
    requests, compute = [], autograd.compute

    def watched(request, kind):
        if request.operator.name == "attention_backward":
            requests.append(request)
        return compute(request, kind)

    monkeypatch.setattr(autograd, "compute", watched)
    return requests


def test_a_gradient_whose_rows_no_kernel_could_read_is_copied(monkeypatch):
    """One that begins within 16 bytes, has odd strides, or is still to be negated; of out and of lse."""
    q, k, v, dout = (x.half() for x in tensors())
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    results = flashgen.attention(q, k, v, return_lse=True)
    dlse = torch.randn_like(results[1])
    expected = torch.autograd.grad(results, (q, k, v), (dout, dlse), retain_graph=True)
    calls = requests_of_gradients(monkeypatch)
    size, flat = dout.shape, dout.flatten()
    odd = torch.cat([flat[:1], flat])[1:].view(size)
    rows = torch.cat([dout, dout[..., :1]], -1)[..., :-1]
    for given in ((odd, dlse), (rows, dlse), (torch._neg_view(-dout), torch._neg_view(-dlse))):
        found = torch.autograd.grad(results, (q, k, v), given, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        read = calls.pop().by_name()["dout"]
        assert (read.data_ptr() % 16, read.stride(), read.is_neg()) == (0, dout.stride(), False)


def test_without_batch_and_of_some_inputs():
    q, k, v, dout = tensors(batch=1)
    q, k, v, dout = (x.detach()[0] for x in (q, k, v, dout))
    k.requires_grad_()
    (found,) = gradients(lambda k: (flashgen.attention(q, k, v) * dout).sum(), k)
    (expected,) = gradients(lambda k: (sdpa(q, k, v) * dout).sum(), k)
    same((found,), (expected,))


def test_the_operators_pass_torchs_own_checks():
    q, k, v, dout = tensors()
    slopes = torch.rand(HEADS)
    plain = call_of(AttentionCall, q=q, causal=True)
    scored = plain.replace(
        causal=False,
        window_size=(3, -1),
        softmax_scale=0.2,
        score=["alibi", "softcap"],
        params={"slope": slopes, "cap": 2.0},
        splits=4,
        deterministic=True,
        backend="cpu",
    )
    absent = [None] * (len(codec.INPUTS) - 3)
    for call, dtype in ((plain, torch.float32), (scored, torch.float16)):
        inputs = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
        score_arrays, entries = codec.encode(call)
        arguments = *inputs, *absent, score_arrays, *entries
        torch.library.opcheck(torch.ops.flashgen.attention.default, arguments)
    with torch.no_grad():
        out, lse = flashgen.attention(q, k, v, return_lse=True)
    inputs = [x.detach() for x in (dout, q, k, v)]
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(
            torch.ops.flashgen.attention_backward.default,
            (*inputs, *absent, out, lse, dlse, [], *codec.encode(plain)[1]),
        )


def packed(dtype=torch.float32):
    """q, k and v of three sequences that require gradients, a gradient of the result, and their lengths."""
    shapes = (9, HEADS, 16), (13, KV_HEADS, 16), (13, KV_HEADS, 8)
    made = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    cu_q, cu_kv = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 2, 2, 8], [0, 3, 7, 13]))
    return (*made, torch.randn(9, HEADS, 8).to(dtype), {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv})


def one_by_one(q, k, v, cu_seqlens_q, cu_seqlens_kv, **options):
    """The results of packed sequences, each by a call of its own."""
    ends = zip(cu_seqlens_q.tolist(), cu_seqlens_kv.tolist(), strict=True)
    pairs = list(itertools.pairwise(ends))
    parts = [flashgen.attention(q[a:b], k[c:d], v[c:d], **options) for (a, c), (b, d) in pairs if b > a]
    return torch.cat([*parts, torch.zeros(len(q) - pairs[-1][1][0], HEADS, v.shape[-1])])


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (1, 0), "softcap": 2.0}], ids=str)
def test_packed_sequences(options):
    q, k, v, dout, lengths = packed()
    dout[8:] = 0  # nothing is written behind the last sequence
    found = gradients(lambda *x: (flashgen.attention(*x, **lengths, **options)[:8] * dout[:8]).sum(), q, k, v)
    same(found, gradients(lambda *x: (one_by_one(*x, **lengths, **options) * dout).sum(), q, k, v))


def test_padded_sequences():
    q, k, v, dout = tensors()
    lengths = torch.tensor([4, 0], dtype=torch.int32)
    found = gradients(lambda *x: (flashgen.attention(*x, kv_lengths=lengths) * dout).sum(), q, k, v)
    own = q[0].detach(), k[0, :4].detach(), v[0, :4].detach()
    leaves = [x.requires_grad_() for x in own]
    expected = gradients(lambda *x: (flashgen.attention(*x) * dout[0]).sum(), *leaves)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x[0, : len(y)], y)
        assert not x[1].any()
        assert not x[0, len(y) :].any()


def test_packed_sequences_pass_torchs_own_checks_and_compile():
    q, k, v, dout, lengths = packed()
    lengths["cu_seqlens_q"][-1] = 9  # what lies behind the last sequence is any number, as the checks compare
    score_arrays, entries = codec.encode(call_of(AttentionCall, q=q, causal=True, max_seqlen_q=7))
    absent = [lengths.get(name) for name in codec.INPUTS[3:]]
    arguments = q, k, v, *absent, score_arrays, *entries
    torch.library.opcheck(torch.ops.flashgen.attention.default, arguments)
    with torch.no_grad():
        out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True, **lengths)
    inputs = [x.detach() for x in (dout, q, k, v)]
    arguments = *inputs, *absent, out, lse, None, score_arrays, *entries
    torch.library.opcheck(torch.ops.flashgen.attention_backward.default, arguments)

    def loss(q, k, v):
        return flashgen.attention(q, k, v, causal=True, max_seqlen_q=7, **lengths).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    same(gradients(compiled, q, k, v), gradients(loss, q, k, v))


FIRST_CALL = """
import torch
from torch._dynamo.testing import CompileCounter

import flashgen

def attend(x):
    return flashgen.attention(x, x, x, causal=True)

graphs, x = CompileCounter(), torch.nn.Parameter(torch.randn(1, 5, 2, 8), requires_grad=REQUIRES_GRAD)
compiled = torch.compile(attend, fullgraph=True, backend=graphs)
for _ in range(2):
    torch.testing.assert_close(compiled(x), attend(x))
assert graphs.frame_count == 1, f"traced {graphs.frame_count} times"
"""


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_first_call_of_a_process_may_be_compiled_and_is_traced_once(requires_grad):
    program = FIRST_CALL.replace("REQUIRES_GRAD", str(requires_grad))
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


class Watching(TorchDispatchMode):
    """Keeps the names of flashgen's operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "flashgen":
            self.seen.append(operator._opname)
        return operator(*args, **kwargs or {})


def test_a_dispatch_mode_sees_the_operators_and_other_calls_do_without():
    """Recording an operator takes ten times as long as queueing kernels."""
    q, k, v, dout = tensors()
    with Watching() as all_of_it:
        out = flashgen.attention(q, k, v)
        expected = torch.autograd.grad(out, (q, k, v), dout)
    assert all_of_it.seen == ["attention", "attention_backward"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        out = flashgen.attention(q, k, v)
        found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    names = {event.key for event in profiler.key_averages()}
    assert "_AttentionBackward" in names
    assert not any(name.startswith("flashgen::") for name in names)
    with Watching() as backward:
        again = torch.autograd.grad(out, (q, k, v), dout)
    assert backward.seen == ["attention_backward"]
    for gradients_found in (found, again):
        assert all(torch.equal(x, y) for x, y in zip(gradients_found, expected, strict=True))


@pytest.mark.parametrize("tracer", ["real", "fake", "symbolic", "jit"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_traced_computes_what_is_called(tracer, requires_grad):
    """A call that is not recorded would be traced as memory that nothing writes to."""
    example, given = (torch.randn(2, 6, HEADS, 16, requires_grad=requires_grad) for _ in range(2))

    def call(q):
        return flashgen.attention(q, q, q, causal=True)

    if tracer == "jit":
        traced = torch.jit.trace(call, (example,), check_trace=False)
    else:
        traced = make_fx(call, tracing_mode=tracer)(example)
    assert torch.equal(traced(given), call(given))


def test_fake_tensors_and_subclasses_need_no_gradient():
    q, k, v, _ = (x.detach() for x in tensors())
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        assert flashgen.attention(*fakes).shape == (*q.shape[:3], v.shape[3])
    assert isinstance(flashgen.attention(*fakes), FakeTensor)
    pairs = [TwoTensor(x, x.clone()) for x in (q, k, v)]
    out = flashgen.attention(*pairs)
    assert isinstance(out, TwoTensor)
    assert torch.equal(out.b, flashgen.attention(q, k, v))


def test_tensors_without_memory_have_shapes_of_gradients():
    leaves = [x.detach().to("meta").requires_grad_() for x in tensors()[:3]]
    found = gradients(lambda *x: flashgen.attention(*x).sum(), *leaves)
    assert [x.shape for x in found] == [x.shape for x in leaves]


@pytest.mark.parametrize("name", ["k", "v", "mask", "kv_lengths", "alibi_slopes"])
def test_all_tensors_are_without_memory_or_none(name):
    q, k, v = (x.detach() for x in tensors()[:3])
    given = {
        "k": k,
        "v": v,
        "mask": torch.ones(6, 7, dtype=torch.bool),
        "kv_lengths": torch.ones(2, dtype=torch.int32),
        "alibi_slopes": torch.ones(HEADS),
    }
    others = {other: given[other].to("meta") for other in "kv"}
    with pytest.raises(DeviceTypeNotSupported, match=f"^q is on meta but {name} is on cpu; all arrays must"):
        flashgen.attention(q.to("meta"), **others | {name: given[name]})
    assert flashgen.attention(q.to("meta"), **others | {name: given[name].to("meta")}).is_meta


def test_what_is_no_plain_tensor_is_refused_by_name():
    q, k, v, _ = tensors()
    nested = torch.nested.nested_tensor(
        [q[0].detach(), q[1].detach()], layout=torch.jagged, requires_grad=True
    )
    with pytest.raises(BadParam, match=r"^q: a nested tensor"):
        flashgen.attention(nested, k, v)
    with pytest.raises(BadParam, match=r"^q: a tensor inside torch.func"):
        torch.func.grad(lambda q: flashgen.attention(q, k, v).sum())(q)


def test_a_call_within_a_transform_of_other_tensors_is_refused_by_name():
    """What it allocates there is a tensor of the transform, without memory."""
    q, k, v = (x.detach() for x in tensors()[:3])
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    for call in (
        lambda: flashgen.attention(q, k, v),
        lambda: flashgen.merge([(out, lse), (out, lse)])[0],
        lambda: flashgen.attention_backward(out, q, k, v, out, lse)[0],
    ):
        with pytest.raises(BadParam, match=r"a tensor inside torch\.func .* or would be the result"):
            torch.func.grad(lambda s, call=call: s * call().sum())(torch.tensor(2.0))


TRANSFORMS = {
    "grad": lambda call, q: torch.func.grad(lambda q: call(q).sum())(q),
    "vmap": lambda call, q: torch.func.vmap(call)(q[None]),
    "jvp": lambda call, q: torch.func.jvp(call, (q,), (q,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused_where_they_are_compiled_as_well(transform):
    q, k, v = (x.detach() for x in tensors()[:3])

    def transformed(q):
        return TRANSFORMS[transform](lambda q: flashgen.attention(q, k, v), q)

    with pytest.raises(BadParam, match=r"inside torch\.func"):
        transformed(q)
    for fullgraph, error in ((False, BadParam), (True, torch._dynamo.exc.Unsupported)):
        torch.compiler.reset()
        with pytest.raises(error, match=r"inside torch\.func"):
            torch.compile(transformed, backend="aot_eager", fullgraph=fullgraph)(q)


def test_plans_have_no_gradients_and_say_so():
    q, k, v, dout = tensors()
    out, lse = flashgen.attention(q.detach(), k.detach(), v.detach(), return_lse=True)
    for plan in (
        lambda: flashgen.plan(q, k, v),
        lambda: flashgen.plan_backward(dout, q, k, v, out, lse),
        lambda: flashgen.plan(q, flashgen.KVCache(k, v, torch.ones(2, dtype=torch.int32))),
    ):
        with pytest.raises(BadParam, match=r"requires a gradient, .*\. There are no gradients of plans$"):
            plan()
        with torch.no_grad():
            plan()


def test_calls_of_plans_have_no_gradients_and_say_so():
    q, k, v, _ = tensors()
    cache = flashgen.KVCache(
        *(x.detach().new_zeros(len(k), 50, *x.shape[2:]) for x in (k, v)),
        torch.ones(len(k), dtype=torch.int32),
    )
    with torch.no_grad():
        plan, held = flashgen.plan(q, k, v), flashgen.plan(q, cache, append=(k, v))
    for name, call in (
        ("q", lambda: plan(q, k, v)),
        ("k_new", lambda: held(q.detach(), cache, (k, v.detach()))),
        ("q", lambda: held(q, cache, (k.detach(), v.detach()))),
    ):
        said = rf"^{name}: a tensor requires a gradient, .*\. There are no gradients of plans$"
        with pytest.raises(BadParam, match=said) as caught:
            call()
        assert caught.type is BadParam
    assert not cache.k.any()


def test_a_plan_in_a_graph_is_named():
    q, k, v = (x.detach() for x in tensors()[:3])

    def planned(q):
        return flashgen.plan(q, k, v)(q, k, v)

    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"plan\(\) was called inside torch\.compile"):
        torch.compile(planned, backend="aot_eager", fullgraph=True)(q)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(planned, backend="aot_eager")(q), planned(q))
    plan = flashgen.plan(q, k, v)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"a plan was called inside torch\.compile"):
        torch.compile(lambda q: plan(q, k, v), backend="aot_eager", fullgraph=True)(q)
    torch.compiler.reset()
    compiled = torch.compile(lambda q: plan(q, k, v), backend="aot_eager")
    torch.testing.assert_close(compiled(q), planned(q))


def test_saved_tensors_may_be_packed_and_must_not_change():
    q, k, v, dout = tensors()
    slopes = torch.rand(HEADS)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
        out = flashgen.attention(q, k, v, alibi_slopes=slopes)
    assert any(torch.equal(x, slopes) for x in packed)
    found = torch.autograd.grad(out, (q, k, v), dout)
    out = flashgen.attention(q, k, v, alibi_slopes=slopes)
    same(found, torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), tolerance=0)
    slopes.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, (q, k, v), dout)


def elsewhere(x):
    """Of one element more, so that it starts at no multiple of 16 bytes."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)
    flat[1:] = x.detach().reshape(-1)
    return flat[1:].view(x.shape)


@pytest.mark.parametrize(
    "hooks",
    [
        (elsewhere, lambda x: x),
        (lambda x: x.transpose(0, -1).contiguous(), lambda x: x.transpose(0, -1)),
    ],
)
def test_saved_tensors_may_lie_anywhere(hooks):
    q, k, v, dout = tensors()
    expected = torch.autograd.grad(flashgen.attention(q, k, v), (q, k, v), dout)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        out = flashgen.attention(q, k, v)
    same(torch.autograd.grad(out, (q, k, v), dout), expected, tolerance=0)


def test_slopes_that_are_no_tensor_are_named():
    q, k, v, _ = tensors()
    with pytest.raises(BadParam, match=r"alibi_slopes has type ndarray.*torch\.as_tensor"):
        flashgen.attention(q, k, v, alibi_slopes=np.ones(HEADS, np.float32))


@pytest.mark.parametrize("write", ["out", "lse", "merge", "append", "append=", "plan", "dk"])
def test_what_is_written_to_is_known_to_autograd(write):
    """Else a backward pass through a tensor that was saved would take what is there now."""
    q, k, v, dout = (x.detach() for x in tensors())
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    cache = flashgen.KVCache(k.clone(), v.clone(), torch.tensor([3, 4], dtype=torch.int32))
    new = torch.randn(2, 1, KV_HEADS, 16), torch.randn(2, 1, KV_HEADS, 8)
    given = cache.v if write.startswith("append") else torch.zeros_like({"lse": lse, "dk": k}.get(write, out))
    calls = {
        "out": lambda: flashgen.attention(q, k, v, out=given),
        "lse": lambda: flashgen.plan(q, k, v, return_lse=True)(q, k, v, lse=given),
        "merge": lambda: flashgen.merge([(out, lse), (out, lse)], out=given),
        "append": lambda: flashgen.append(cache, *new),
        "append=": lambda: flashgen.attention(q[:, :1], cache, append=new),
        "plan": lambda: flashgen.plan(q, k, v)(q, k, v, out=given),
        "dk": lambda: flashgen.attention_backward(dout, q, k, v, out, lse, dk=given),
    }
    weight = torch.ones_like(given, requires_grad=True)
    for grad in (True, False):
        loss = (weight * given).sum()
        with torch.set_grad_enabled(grad):
            calls[write]()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        flashgen.attention(q, k, v, out=torch.empty_like(out))


def test_a_mask_beside_lengths_is_traced_where_no_gradient_is_wanted():
    q, k, v, _ = tensors()
    lengths, hidden = torch.tensor([4, 7], dtype=torch.int32), torch.rand(6, 7) < 0.4

    def call(q):
        return flashgen.attention(q, k, v, mask=hidden, kv_lengths=lengths)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for traced in (compiled, make_fx(call)(q)):
            assert torch.equal(traced(q), call(q))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="kv_lengths and mask were given"):
        compiled(q)
    with pytest.raises(BadParam, match=r"^kv_lengths and mask were given"):
        make_fx(call)(q)


def test_compiled_into_one_graph():
    q, k, v, dout = tensors()
    slopes = torch.rand(HEADS)

    def loss(q, k, v):
        out = flashgen.attention(q * 2, k, v, window_size=(3, 0), softcap=2.0, alibi_slopes=slopes)
        return (torch.nn.functional.silu(out) * dout).sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    same(gradients(compiled, q, k, v), gradients(loss, q, k, v))
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k, v), loss(q, k, v))


@pytest.mark.parametrize("strict", [True, False])
def test_exported(strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return flashgen.attention(q, k, v, causal=True) + 1

    given = tuple(x.detach() for x in tensors()[:3])
    exported = torch.export.export(Module(), given, strict=strict)
    assert any(node.target == torch.ops.flashgen.attention.default for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(*given), Module()(*given))


def test_under_autocast():
    layer, x = torch.nn.Linear(32, 3 * 32), torch.randn(2, 6, 32)

    def loss(attend):
        with torch.autocast("cpu", torch.bfloat16):
            q, k, v = layer(x).unflatten(-1, (3, 2, 16)).unbind(2)
            assert q.dtype == torch.bfloat16
            return attend(q, k, v).float().square().sum()

    def of_sdpa(q, k, v):
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)

    found, expected = (
        torch.autograd.grad(loss(attend), layer.parameters())
        for attend in (lambda *x: flashgen.attention(*x, causal=True), of_sdpa)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() < 2e-2 * theirs.norm()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    q, k, v, dout = tensors()

    def loss(q, k, v):
        return (flashgen.attention(q, k, v, causal=True) * dout).sum()

    def checkpointed(q, k, v):
        return torch.utils.checkpoint.checkpoint(loss, q, k, v, use_reentrant=reentrant)

    found = []
    for function in (loss, checkpointed):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        function(*leaves).backward()
        found.append([x.grad for x in leaves])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize(("policy", "passes"), [("MUST_SAVE", 1), ("PREFER_RECOMPUTE", 2)])
def test_selective_checkpointing_knows_the_operator_by_its_name(policy, passes, monkeypatch):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    called, real = [], autograd._attend
    monkeypatch.setattr(autograd, "_attend", lambda *given: called.append(given) or real(*given))
    q, k, v, dout = tensors()

    def policy_of(ctx, operator, *args, **kwargs):
        ours = operator is torch.ops.flashgen.attention.default
        return CheckpointPolicy[policy] if ours else CheckpointPolicy.PREFER_RECOMPUTE

    out = checkpoint(
        lambda *x: flashgen.attention(*x, causal=True) * 2,
        *(q, k, v),
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy_of),
    )
    found = torch.autograd.grad(out, (q, k, v), dout)
    assert len(called) == passes
    same(found, gradients(lambda *x: (flashgen.attention(*x, causal=True) * 2 * dout).sum(), q, k, v))


def test_second_derivatives_are_refused():
    q, k, v, dout = tensors()
    first = torch.autograd.grad(flashgen.attention(q, k, v), (q, k, v), dout, create_graph=True)
    with pytest.raises(BadParam, match="double backward"):
        first[0].sum().backward()


def test_derivatives_of_other_kinds_are_refused():
    q, k, v, dout = tensors()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q.detach(), torch.ones_like(q))
        with pytest.raises(BadParam, match=r"forward-mode"):
            flashgen.attention(dual, k, v)
        slopes, bias = (
            forward_ad.make_dual(x, torch.ones_like(x)) for x in (torch.rand(HEADS), torch.rand(6, 7))
        )
        for given in (q, q.detach()):
            with pytest.raises(BadParam, match=r"^alibi_slopes: .* forward-mode"):
                flashgen.attention(given, k, v, alibi_slopes=slopes)
            with pytest.raises(BadParam, match=r"^bias: .* forward-mode"):
                flashgen.attention(given, k, v, score="bias", params={"bias": bias})
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    for result, gradient in ((out, dout), (lse, torch.ones_like(lse))):
        with pytest.raises(BadParam, match=r"is_grads_batched"):
            torch.autograd.grad(
                result, q, torch.stack([gradient, gradient]), is_grads_batched=True, retain_graph=True
            )


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_missing_or_of_no_rank_is_named_as_without_gradients(compiled):
    q, k, v, _ = tensors()
    call = flashgen.attention
    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, backend="aot_eager")
    with pytest.raises(NullPointer, match="v is None; expected an array"):
        call(q, k)
    with pytest.raises(BadTensorShape, match=r"q has shape \(6, 16\); expected \(batch"):
        call(q[0, :, 0], k, v)


def test_what_has_no_gradient_is_refused_by_name():
    q, k, v, _ = tensors()
    slopes, bias = torch.rand(HEADS, requires_grad=True), torch.rand(6, 7, requires_grad=True)
    with pytest.raises(BadParam, match=r"^q: .* with out$"):
        flashgen.attention(q, k, v, out=torch.empty(2, 6, HEADS, 8))
    with pytest.raises(BadParam, match=r"^q: .* with stream$"):
        flashgen.attention(q, k, v, stream=0)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    for given in (q, q.detach()):
        with pytest.raises(BadParam, match=r"^alibi_slopes requires a gradient"):
            flashgen.attention(given, k, v, alibi_slopes=slopes, kv_lengths=lengths)
        with pytest.raises(BadParam, match=r"^bias requires a gradient"):
            flashgen.attention(given, k, v, score="bias", params={"bias": bias}, kv_lengths=lengths)
    with pytest.raises(BadParam, match=r"^kv_lengths has type ndarray"):
        flashgen.attention(q, k, v, kv_lengths=lengths.numpy())
    with pytest.raises(BadParam, match=r"^kv_lengths and mask were given"):
        flashgen.attention(q, k, v, kv_lengths=lengths, mask=torch.zeros(6, 7, dtype=torch.bool))
    with pytest.raises(BadParam, match=r"^max_seqlen_q is 1.5"):
        flashgen.attention(q, k, v, kv_lengths=lengths, max_seqlen_q=1.5)
    with pytest.raises(BadParam, match=r"^max_seqlen_q is True; expected an integer"):
        flashgen.attention(q, k, v, kv_lengths=lengths, max_seqlen_q=True)
    with pytest.raises(BadParam, match=r"^q: .* with a KVCache$"):
        flashgen.attention(q, flashgen.KVCache(k, v, lengths))
    with pytest.raises(BadParam, match=r"^append was given, and k has type Tensor"):
        flashgen.attention(q, k, v, append=(k, v))
    with pytest.raises(BadParam, match=r"^rotary was given without append"):
        flashgen.attention(q, k, v, rotary=flashgen.Rotary(q, q))
    with pytest.raises(BadParam, match=r"^k has type ndarray.*torch.as_tensor makes$"):
        flashgen.attention(q, k.detach().numpy(), v)
    with pytest.raises(BadParam, match=r"^dout: .*no_grad"):
        flashgen.attention_backward(q, q, k, k, q, torch.ones(2, HEADS, 6))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"causal": None}, "causal is None"),
        ({"window_size": 3}, "window_size is 3"),
        ({"mask_type": "diagonal"}, "mask_type is 'diagonal'"),
        ({"softmax_scale": -1.0}, "softmax_scale is -1.0"),
        ({"softmax_scale": True}, "softmax_scale is True"),
        ({"softmax_scale": 10**400}, "softmax_scale is an integer of 401 digits"),
        ({"window_size": (True, 0)}, r"window_size is \(True, 0\)"),
        ({"softcap": 0}, "softcap is 0"),
        ({"softcap": 10**400}, "^softcap is an integer of 401 digits"),
        ({"softcap": 1e39}, "^softcap is 1e.39"),
        ({"softcap": True}, "^softcap is True"),
        ({"score": "softcap", "params": {"cap": True}}, "^cap is True"),
        ({"score": "softcap", "params": {"cap": "30"}}, "^cap is '30'"),
        ({"softcap": 10**5000}, "^softcap is an integer of 5001 digits"),
        ({"score": "unheard"}, "score is 'unheard'"),
        ({"score": ""}, "^score is ''"),
        ({"score": ("",), "params": {"cap": 3.0}}, "^score is ''"),
        ({"score": "softcap,alibi", "params": {"cap": 3.0}}, "^score is 'softcap,alibi'"),
        ({"score": "softcap", "params": {"cap": 3.0, "a,b": 1.0}}, "^score softcap has no parameter a,b"),
        ({"score": "softcap", "params": {"cap": 3.0, "": torch.ones(3)}}, "^score softcap has no parameter "),
        ({"return_lse": None}, "return_lse is None"),
        ({"deterministic": 3}, "deterministic is 3"),
    ],
)
def test_options_are_checked_as_without_a_graph(options, words):
    q, k, v, _ = tensors()
    for given in (q, q.detach()):
        with pytest.raises(BadParam, match=words):
            flashgen.attention(given, k.detach(), v.detach(), **options)


def test_an_array_beside_a_tensor_that_requires_a_gradient_is_told_of_it():
    q, k, v = (x.detach() for x in tensors()[:3])
    with pytest.raises(BadParam, match=r"^q has type ndarray, and k requires a gradient; pass a tensor"):
        flashgen.attention(q.numpy(), k.requires_grad_(), v)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("nested", ["q", "k", "v", "mask"])
def test_nested_tensors_beside_those_that_require_gradients_are_named(nested, layout):
    given = dict(zip("qkv", tensors()[:3], strict=True))
    parts = [torch.ones(3, HEADS, 16), torch.ones(2, HEADS, 16)]
    given[nested] = torch.nested.nested_tensor(parts, layout=layout)
    with pytest.raises(BadParam, match=f"^{nested}: a nested tensor"):
        flashgen.attention(**given)


def test_bounds_beyond_64_bits_are_none():
    q, k, v, _ = tensors()
    options = {"window_size": (2**63, 2**70), "kv_lengths": torch.tensor([7, 5], dtype=torch.int32)}
    out = flashgen.attention(q, k, v, max_seqlen_kv=2**65, **options)
    (found,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    out = flashgen.attention(q, k, v, kv_lengths=options["kv_lengths"])
    same([found.detach()], torch.autograd.grad(out.sum(), q))


def test_a_tensor_without_a_gradient_is_computed_without_a_graph(monkeypatch):
    monkeypatch.setattr(autograd, "attention", None)
    q, k, v, _ = tensors()
    with torch.no_grad():
        flashgen.attention(q, k, v)
    with torch.inference_mode():
        flashgen.attention(q, k, v)
    assert not flashgen.attention(*(x.detach() for x in (q, k, v))).requires_grad


def test_deterministic_reaches_the_gradients(monkeypatch):
    q, k, v = tensors()[:3]
    calls = requests_of_gradients(monkeypatch)
    for deterministic in (False, True):
        flashgen.attention(q, k, v, deterministic=deterministic).sum().backward()
    recorded = flashgen.attention(q, k, v).sum()
    torch.use_deterministic_algorithms(True)
    try:
        flashgen.attention(q, k, v).sum().backward()
        recorded.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    options = [dict(zip(x.operator.options, x.options, strict=True)) for x in calls]
    assert [x["deterministic"] for x in options] == [False, True, True, True]


@pytest.mark.parametrize("function", ["attention_backward", "plan_backward"])
def test_direct_calls_are_deterministic_where_pytorch_is(function, monkeypatch):
    q, k, v, dout = (x.detach() for x in tensors())
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    calls, real = [], backward.gradients_of
    monkeypatch.setattr(backward, "gradients_of", lambda call: calls.append(call.deterministic) or real(call))
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            getattr(flashgen, function)(dout, q, k, v, out, lse)
        finally:
            torch.use_deterministic_algorithms(False)
    assert calls == [False, True]


def test_kernels_of_both_passes_in_the_simulator():
    if hostcompiler.why_unavailable():
        pytest.skip(hostcompiler.why_unavailable())
    q, k, v, dout = (torch.randn(1, 40, heads, 32).half() for heads in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found, expected = (
        torch.autograd.grad(flashgen.attention(*leaves, causal=True, backend=backend), leaves, dout)
        for backend in ("simulator", "cpu")
    )
    same(found, expected, tolerance=4e-3)


def test_splits_are_those_of_the_forward_pass():
    q, k, v, _ = tensors(torch.float16)
    with torch.no_grad():
        expected = [flashgen.attention(q, k, v, splits=splits) for splits in (2, flashgen.SplitEvery(256))]
    for splits, x in zip((2, flashgen.SplitEvery(256)), expected, strict=True):
        found = flashgen.attention(q, k, v, splits=splits)
        assert found.requires_grad
        assert torch.equal(found, x)
    with pytest.raises(BadParam, match="splits is 0"):
        flashgen.attention(q, k, v, splits=0)


def test_a_graph_takes_splits_as_an_argument():
    q, k, v, _ = tensors(torch.float16)

    def split(splits):
        with torch.no_grad():
            return flashgen.attention(q, k, v, splits=splits)

    graph = torch.compile(split, fullgraph=True, backend="aot_eager")
    # The second number of each kind is symbolic where Dynamo traces the call again.
    for splits in (2, 3, flashgen.SplitEvery(256), flashgen.SplitEvery(512), "auto"):
        assert torch.equal(graph(splits), split(splits))


def test_queries_and_keys_of_length_zero():
    q, k, v, _ = tensors()
    for rows, keys in ((0, 7), (6, 0)):
        out = flashgen.attention(q[:, :rows], k[:, :keys], v[:, :keys])
        found = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(not x.any() for x in found)
        assert np.prod(out.shape) == 2 * rows * HEADS * 8
