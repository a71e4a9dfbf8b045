"""Calls that write into arrays of the caller, in the graphs of PyTorch: caches, ``out``, append, merge and
cascade do what they do in eager mode. On the CPU.
"""

import copy
import dataclasses

import pytest

import flashgen
from flashgen.errors import BadParam, BadTensorShape, DeviceTypeNotSupported, FlashgenError, NullPointer
from flashgen.simulator import hostcompiler

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounter  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from flashgen.call import codec, compiled  # noqa: E402, F401  # registers the operators
from flashgen.call.record import AttentionCall, call_of  # noqa: E402
from flashgen.compat.flash_attn import flash_attn_func  # noqa: E402

ROWS, HEADS, KV_HEADS, WIDTH = 3, 4, 2, 16
pytestmark = pytest.mark.extra
needs_compiler = pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="Inductor compiles C++")


def given():
    """A batch of 3 with a cache in pages, k and v parts of one allocation, and new tokens."""
    positions = torch.rand(40, WIDTH // 2)
    return {
        "q": torch.randn(3, ROWS, HEADS, WIDTH),
        "new": torch.randn(2, 3, ROWS, KV_HEADS, WIDTH),
        "kv": torch.randn(9, 2, 8, KV_HEADS, WIDTH),
        "lengths": torch.tensor([5, 0, 19], dtype=torch.int32),
        "pages": torch.randperm(9, dtype=torch.int32).reshape(3, 3),
        "cos": positions.cos(),
        "sin": positions.sin(),
        "slopes": torch.rand(HEADS),
        "cu": torch.tensor([0, 4, 4, 9], dtype=torch.int32),
    }


def over_pages(x, **options):
    k, v = x["kv"].unbind(1)
    return flashgen.attention(x["q"], flashgen.KVCache(k, v, x["lengths"], x["pages"]), **options)


def appending(x):
    rotary = flashgen.Rotary(x["cos"], x["sin"])
    return over_pages(x, append=x["new"].unbind(), rotary=rotary, causal=True)


def packed(x):
    options = {"append": x["new"].flatten(1, 2).unbind(), "cu_seqlens_q": x["cu"], "max_seqlen_q": 6}
    return over_pages(x | {"q": x["q"].flatten(0, 1)}, **options, return_lse=True)


def indexed(x):
    k, v = x["kv"].unbind(1)
    index = x["pages"][:, 0].contiguous()
    return flashgen.attention(x["q"], flashgen.KVCache(k, v, x["lengths"].clamp(max=8), index=index))


def appended(x):
    k, v = x["kv"].unbind(1)
    cache = flashgen.KVCache(k, v, x["lengths"], x["pages"])
    rotary = flashgen.Rotary(x["cos"], x["sin"], interleaved=True)
    with_q = flashgen.append(cache, *x["new"].unbind(), rotary=rotary, q=x["q"])
    total, none = flashgen.append(flashgen.KVCache(k, v, with_q[0], x["pages"]), *x["new"][:, :, :1].unbind())
    assert none is None
    return *with_q, total


def parts(x):
    k, v = x["kv"].unbind(1)
    return [(k[:3], v[:3]), (k[3:4], v[3:4]), (k[4:7], v[4:7])]


def into_out(x):
    out = torch.full_like(x["q"], torch.nan)
    found = flashgen.attention(x["q"], *parts(x)[0], alibi_slopes=x["slopes"], softcap=2.0, out=out)
    assert found is out
    return out


def merged(x):
    results = [flashgen.attention(x["q"], *part, return_lse=True) for part in (parts(x)[0], parts(x)[2])]
    out = torch.full_like(x["q"], torch.nan)
    assert flashgen.merge(results, out=out)[0] is out
    return *flashgen.merge([*results, results[0]]), out


def cascaded(x):
    strided = x["q"].transpose(0, 1).contiguous().transpose(0, 1)
    of_one = flashgen.cascade(x["q"], parts(x)[1:2])
    return *flashgen.cascade(strided, parts(x), causal=True, return_lse=True), of_one


def cascaded_over_caches(x):
    k, v = x["kv"].unbind(1)
    own = flashgen.KVCache(k, v, x["lengths"], x["pages"])
    prefix = flashgen.KVCache(k, v, x["lengths"][:1], x["pages"][:1])
    return flashgen.cascade(x["q"], [prefix, own], causal=True, return_lse=True)


def differentiated(x):
    k, v = parts(x)[0]
    of_lengths = {"kv_lengths": x["lengths"].clamp(max=8), "max_seqlen_kv": 8, "causal": True}
    gradients = []
    for options in ({"alibi_slopes": x["slopes"], "softcap": 2.0}, of_lengths):
        out, lse = flashgen.attention(x["q"], k, v, return_lse=True, **options)
        dk = torch.full_like(k, torch.nan)
        options = options | {"dlse": lse.sin(), "dk": dk, "deterministic": True}
        gradients += flashgen.attention_backward(out.cos(), x["q"], k, v, out, lse, **options)
        assert gradients[-2] is dk
    return tuple(gradients)


CALLS = [
    over_pages,
    appending,
    packed,
    indexed,
    appended,
    into_out,
    merged,
    cascaded,
    cascaded_over_caches,
    differentiated,
]


def same(found, expected):
    found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("call", CALLS)
def test_one_graph_computes_and_writes_what_the_call_does(call, dynamic):
    torch.compiler.reset()
    graph = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for _ in range(2):
        x = given()
        other = copy.deepcopy(x)
        same(graph(x), call(other))
        same(x["kv"], other["kv"])


@pytest.mark.parametrize("call", CALLS)
def test_what_is_traced_computes_and_writes_what_the_call_does(call):
    x = given()
    traced = make_fx(lambda x: call(x))(copy.deepcopy(x))
    other = copy.deepcopy(x)
    same(traced(x), call(other))
    same(x["kv"], other["kv"])


@pytest.mark.parametrize("of_cache", [True, False], ids=["cache", "recorded"])
def test_a_graph_serves_any_bound_of_lengths(of_cache):
    def bounded(x, max_seqlen_kv):
        k, v = parts(x)[0]
        k = flashgen.KVCache(k, v, x["lengths"].clamp(max=8)) if of_cache else k
        lengths = {} if of_cache else {"v": v, "kv_lengths": x["lengths"].clamp(max=8)}
        return flashgen.attention(x["q"], k, **lengths, max_seqlen_kv=max_seqlen_kv)

    torch.compiler.reset()
    x, counter = given(), CompileCounter()
    graph = torch.compile(bounded, fullgraph=True, backend=counter, dynamic=True)
    for max_seqlen_kv in (8, 9, 10):
        graph(x, max_seqlen_kv)
    assert counter.frame_count == 1


def windowed(x, window_size):
    return flashgen.attention(x["q"], *parts(x)[0], window_size=window_size)


def windowed_cache(x, window_size):
    return over_pages(x, window_size=window_size, causal=True)


def windowed_append(x, window_size):
    rotary = flashgen.Rotary(x["cos"], x["sin"])
    return over_pages(x, append=x["new"].unbind(), rotary=rotary, window_size=window_size)


def windowed_backward(x, window_size):
    k, v = parts(x)[0]
    out, lse = flashgen.attention(x["q"], k, v, window_size=window_size, return_lse=True)
    return flashgen.attention_backward(out, x["q"], k, v, out, lse, window_size=window_size)


def windowed_drop_in(x, window_size):
    return flash_attn_func(x["q"], *parts(x)[0], window_size=window_size)


@pytest.mark.parametrize("dynamic", [None, True], ids=["default", "dynamic"])
@pytest.mark.parametrize(
    "call", [windowed, windowed_cache, windowed_append, windowed_backward, windowed_drop_in]
)
def test_two_graphs_serve_any_window(call, dynamic):
    torch.compiler.reset()
    counter = CompileCounter()
    graph = torch.compile(call, fullgraph=True, backend=counter, dynamic=dynamic)
    for left in range(2, 12):
        x = given()
        other = copy.deepcopy(x)
        same(graph(x, (left, 0)), call(other, (left, 0)))
    assert counter.frame_count <= (1 if dynamic else 2)


@pytest.mark.parametrize("call", [windowed, windowed_cache])
def test_an_exported_program_serves_any_window(call):
    class Model(torch.nn.Module):
        def forward(self, x, left):
            return call(x, (left, 0))

    x = given()
    shapes = dict.fromkeys(x)
    program = torch.export.export(
        Model(), (x, 3), dynamic_shapes=(shapes, torch.export.Dim.DYNAMIC), strict=False
    ).module()
    for left in (3, 5, 2):
        same(program(x, left), call(copy.deepcopy(x), (left, 0)))


class Layer(torch.nn.Module):
    """One of a decoder, with a cache of its own."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(24, (HEADS + 2 * KV_HEADS) * WIDTH)
        for name, x in given().items():
            if name != "q":
                self.register_buffer(name, x)

    def forward(self, x):
        qkv = self.project(x).unflatten(-1, (-1, WIDTH))
        q, *new = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=-2)
        out = appending(dict(self.named_buffers()) | {"q": q, "new": torch.stack(new)})
        self.lengths += x.shape[1]
        return torch.nn.functional.silu(out)


@needs_compiler
@pytest.mark.parametrize("gradients", [False, True])
def test_a_copy_that_inductor_drops_is_made(gradients):
    def attend(x):
        y = x[1:641].view(2, 4, 5, 16).clone()
        return flashgen.attention(y, y, y)

    x = torch.randn(700, requires_grad=gradients)
    torch.compiler.reset()
    out = torch.compile(attend, fullgraph=True)(x)
    torch.testing.assert_close(out, attend(x), rtol=0, atol=0)
    if gradients:
        (found,), (expected,) = (torch.autograd.grad(y.sum(), x) for y in (out, attend(x)))
        torch.testing.assert_close(found, expected)


def test_a_copy_of_new_keys_that_inductor_drops_is_made():
    k_cache, v_cache = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 4, 16)

    def attend(x):
        q, new = x[1:129].view(2, 1, 4, 16).clone(), x[130:258].view(2, 1, 4, 16).clone()
        lengths = torch.tensor([3, 5], dtype=torch.int32)
        own = flashgen.KVCache(k_cache.clone(), v_cache.clone(), lengths)
        return flashgen.attention(q, own, append=(new, new))

    x = torch.randn(300)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(attend, fullgraph=True)(x), attend(x), rtol=0, atol=0)


def test_inductor_writes_into_the_cache_of_a_layer_and_keeps_no_copy():
    from torch._inductor.utils import run_and_get_code

    layer, x = Layer(), torch.randn(3, 1, 24)
    other = copy.deepcopy(layer)
    torch.compiler.reset()
    with torch.no_grad():
        graph = torch.compile(layer, fullgraph=True)
        found, (code,) = run_and_get_code(graph, x)
        for step in range(2):
            torch.testing.assert_close(graph(x) if step else found, other(x))
            torch.testing.assert_close(layer.kv, other.kv)
    assert layer.lengths.tolist() == [7, 2, 21]
    assert "flashgen.append" in code
    assert f"empty_strided_cpu({tuple(layer.kv.shape)}" not in code


@needs_compiler
def test_inductor_writes_into_parts_of_an_allocation_of_any_sizes():
    def of_layer(x):
        rotary = flashgen.Rotary(x["cos"], x["sin"])
        cache = flashgen.KVCache(x["kv"][:, 1], x["layers"][1], x["lengths"], x["pages"])
        return flashgen.attention(x["q"], cache, append=x["new"].unbind(), rotary=rotary, causal=True)

    torch.compiler.reset()
    x = given() | {"layers": torch.randn(2, 9, 8, KV_HEADS, WIDTH)}
    other = copy.deepcopy(x)
    with torch.no_grad():
        found = torch.compile(of_layer, fullgraph=True, dynamic=True)(x)
    torch.testing.assert_close(found, of_layer(other))
    for name in ("kv", "layers"):
        torch.testing.assert_close(x[name], other[name])


@needs_compiler
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "default"])
def test_inductor_writes_into_a_layer_of_a_cache_and_a_place_of_out_for_any_batch(dynamic):
    def of_layer(q, layers, new, lengths, results):
        cache = flashgen.KVCache(layers[0, 1], layers[1, 1], lengths)
        flashgen.attention(q, cache, append=(new, new), causal=True, out=results[:, 1])
        return flashgen.merge([(q, lse(q)), (new, lse(new))], out=results[:, 2])

    def lse(x):
        return x.new_zeros((x.shape[0], x.shape[2], x.shape[1]), dtype=torch.float32)

    torch.compiler.reset()
    graph = torch.compile(of_layer, fullgraph=True, dynamic=dynamic)
    for batch in (2, 3):
        q, new = torch.randn(2, batch, 1, HEADS, 32).unbind()
        lengths = torch.full((batch,), 5, dtype=torch.int32)
        written = torch.randn(2, 3, batch, 16, HEADS, 32), torch.randn(batch, 3, 1, HEADS, 32)
        others = copy.deepcopy(written)
        with torch.no_grad():
            graph(q, written[0], new, lengths, written[1])
            of_layer(q, others[0], new, lengths, others[1])
        torch.testing.assert_close(written, others)


def test_exported():
    layer, x = Layer(), torch.randn(3, 1, 24)
    with torch.no_grad():
        exported = torch.export.export(copy.deepcopy(layer), (x,)).module()
        same(exported(x), layer(x))
        same(exported.kv, layer.kv)


def check_operator(name, entries=(), **arguments):
    """PyTorch's checks of an operator with these arguments, and without the others. ``entries`` are what the
    codec makes of the options of a call.
    """
    operator = getattr(torch.ops.flashgen, name).default
    names = [argument.name for argument in operator._schema.arguments]
    first = names.index("causal") if entries else 0
    arguments |= dict(zip(names[first:], entries, strict=False))
    assert arguments.keys() <= {*names}
    torch.library.opcheck(operator, tuple(arguments.get(name) for name in names))


def test_the_operators_pass_torchs_own_checks():
    x = given()
    q = x["q"]
    k, v = (part.contiguous() for part in x["kv"].unbind(1))
    call = call_of(AttentionCall, q=q, causal=True, score="alibi", params={"slope": x["slopes"]})
    score_arrays, entries = codec.encode(call)
    results = {"out": torch.empty_like(q), "lse": torch.empty(3, HEADS, ROWS)}
    cache = {"k": k, "v": v, "kv_lengths": x["lengths"], "pages": x["pages"], "is_cache": True}
    check_operator("attention_into", entries, q=q, **cache, score_arrays=score_arrays, **results)
    check_operator(
        "append",
        **dict(zip(("k_new", "v_new"), x["new"].unbind(), strict=True)),
        **{name: x[name] for name in ("lengths", "q", "pages", "cos", "sin")},
        k_cache=k,
        v_cache=v,
        total_lengths=torch.empty_like(x["lengths"]),
        q_rotated=torch.empty_like(q),
        interleaved=False,
        q_positions="each",
        before_attention=False,
    )
    k, v = parts(x)[0]
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    results = torch.empty_like(out), torch.empty_like(lse)
    torch.library.opcheck(torch.ops.flashgen.merge.default, (out, lse, out, lse, *results, None))
    gradients = {name: torch.empty_like(y) for name, y in (("dq", q), ("dk", k), ("dv", v))}
    arrays = {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": lse}
    check_operator("attention_backward_into", entries, **arrays, score_arrays=score_arrays, **gradients)


@pytest.mark.parametrize("way", ["eager", "traced", "compiled"])
def test_what_has_no_gradient_says_so(way):
    def refuses(words, call, *leaf):
        def on_a_leaf(x):
            return call(x)

        x = torch.randn(*leaf or (3, ROWS, HEADS, WIDTH), requires_grad=True)
        if way == "compiled":
            torch.compiler.reset()
            # Up to PyTorch 2.11 as the ConstantVariable that it is to Dynamo.
            said = r"BadParam\((?:\(ConstantVariable\(str: )?['\"]"
            quoted = said + words.removeprefix("^").replace("$", r"['\"]\)")
            with pytest.raises(torch._dynamo.exc.Unsupported, match=quoted):
                torch.compile(on_a_leaf, fullgraph=True, backend="eager")(x)
        else:
            with pytest.raises(BadParam, match=words) as caught:
                make_fx(on_a_leaf)(x) if way == "traced" else on_a_leaf(x)
            assert caught.type is BadParam  # no class that nobody can import
        with torch.no_grad():
            on_a_leaf(x)

    x = given()
    k, v = parts(x)[0]
    lse = torch.zeros(3, HEADS, ROWS)
    refuses(r"^q: .*of calls with a KVCache", lambda q: over_pages(x | {"q": q}))
    refuses(r"^q: .* of calls with out$", lambda q: flashgen.attention(q, k, v, out=torch.empty_like(q)))
    refuses(
        "^alibi_slopes",
        lambda slopes: flashgen.attention(x["q"], k, v, alibi_slopes=slopes, out=torch.empty_like(x["q"])),
        HEADS,
    )
    refuses(r"^o of parts\[1\]: .* of merge\(\)$", lambda o: flashgen.merge([(x["q"], lse), (o, lse)]))
    refuses(r"^o of parts\[2\]: .* of merge\(\)$", lambda o: flashgen.merge([(x["q"], lse)] * 2 + [(o, lse)]))
    refuses(r"^q: .* of cascade\(\)$", lambda q: flashgen.cascade(q, parts(x)))
    refuses(
        r"^parts\[2\]: k: .* of cascade\(\)$",
        lambda k: flashgen.cascade(x["q"], [*parts(x)[:2], (k, v)]),
        *k.shape,
    )
    refuses(
        r"^q: .* of attention_backward\(\)$",
        lambda q: flashgen.attention_backward(x["q"], q, k, v, x["q"], lse),
    )
    cache = flashgen.KVCache(k, v, x["lengths"].clamp(max=5))
    refuses(
        r"^k_new: .* of append\(\)$", lambda new: flashgen.append(cache, new, new), 3, ROWS, KV_HEADS, WIDTH
    )
    new = torch.zeros(3, ROWS, KV_HEADS, WIDTH)
    # Dynamo shows an error as it was made: the field of the cache gets its name behind that.
    name = "k_cache" if way == "compiled" else "k"
    refuses(
        rf"^{name}: .* of append\(\)$",
        lambda k: flashgen.append(flashgen.KVCache(k, v, cache.lengths), new, new),
        *k.shape,
    )


def calls_that_fail():
    """By what is wrong in each: found when the graph runs, as tensors are looked at there."""
    x = given()
    q, (k, v), (new, _) = x["q"], parts(x)[0], x["new"]
    slopes, lse = torch.rand(HEADS - 1), torch.zeros(3, HEADS, ROWS)
    pages = flashgen.KVCache(*x["kv"].unbind(1), x["lengths"], x["pages"])
    wrong = dataclasses.replace(pages, lengths=x["lengths"].long())
    halves = dataclasses.replace(pages, k=pages.k.half())
    rows = flashgen.KVCache(k, v, x["lengths"].long())
    return {
        "alibi_slopes": lambda q: flashgen.attention(q, k, v, alibi_slopes=slopes, causal=True),
        "softcap": lambda q: flashgen.attention(q, k, v, softcap=1e39),
        "cap": lambda q: flashgen.attention(q, k, v, score="softcap", params={"cap": 1e39}),
        "alibi_slopes beside out": lambda q: flashgen.attention(
            q, k, v, alibi_slopes=slopes, out=torch.empty_like(q)
        ),
        "slope": lambda q: flashgen.attention(q, k, v, score="alibi", params={"slope": slopes}),
        "softcap of a backward pass": lambda q: flashgen.attention_backward(q, q, k, v, q, lse, softcap=1e39),
        "lengths": lambda q: flashgen.attention(q, wrong),
        "lengths of rows": lambda q: flashgen.attention(q, rows, splits=2),
        "cu_seqlens_q beside append": lambda q: flashgen.attention(
            q[0], pages, append=(new[0], new[0]), cu_seqlens_q=torch.zeros(4, dtype=torch.int64)
        ),
        "k beside append": lambda q: flashgen.attention(q, halves, append=(new, new)),
        "k": lambda q: flashgen.append(halves, q[:, :, :KV_HEADS], new),
    }, q


@pytest.mark.parametrize("name", calls_that_fail()[0])
def test_errors_in_a_graph_call_arguments_as_those_of_eager_calls_do(name):
    calls, q = calls_that_fail()
    with pytest.raises(FlashgenError, match=f"^{name.partition(' ')[0]} ") as eager:
        calls[name](q)
    torch.compiler.reset()
    with pytest.raises(eager.type) as found:
        torch.compile(calls[name], fullgraph=True, backend="aot_eager")(q)
    message, _, _ = str(found.value).partition("\n\nWhile executing %")  # which PyTorch 2.8 adds
    assert message == str(eager.value)


def test_what_is_wrong_is_told_where_it_is_traced():
    x = given()
    with pytest.raises(NullPointer, match=r"^v is None"):
        make_fx(lambda q: flashgen.attention(q, q))(x["q"])
    with pytest.raises(BadParam, match="stream was given, but a traced call has no stream yet"):
        make_fx(lambda q: flashgen.attention(q, *parts(x)[0], stream=0))(x["q"])
    k, v = parts(x)[0]
    for part in ((k, v[:1]), (k[:1], v)):
        with pytest.raises(BadTensorShape, match=r"^v has shape"):
            make_fx(lambda q: flashgen.cascade(q, [part, (k, v)]))(x["q"])  # noqa: B023
    with pytest.raises(BadParam, match=r"^parts\[0\]: v has type ndarray.* is traced; pass a tensor"):
        make_fx(lambda q: flashgen.cascade(q, [(k, v.numpy())]))(x["q"])
    part = x["q"], torch.zeros(3, HEADS, ROWS)
    for words, options in (
        ("^deterministic is 2", {"deterministic": 2}),
        ("^workspace was given, but a traced call allocates its own", {"workspace": torch.zeros(9)}),
        ("^stream was given, but a traced call has no stream yet", {"stream": 0}),
        ("^kv_lengths and mask were given", {"mask": torch.zeros(3, 8), "kv_lengths": x["lengths"]}),
        (r"^alibi_slopes requires a gradient", {"alibi_slopes": torch.rand(HEADS, requires_grad=True)}),
    ):
        with pytest.raises(BadParam, match=words):
            make_fx(lambda q: flashgen.attention_backward(q, q, k, v, *part, **options))(x["q"])  # noqa: B023
    with pytest.raises(BadParam, match="out was given with one part"):
        make_fx(lambda o: flashgen.merge([(o, part[1])], out=part[0]))(x["q"])


def laid_out(found):
    return [(x.shape, x.dtype, x.stride()) for x in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.parametrize("call", CALLS)
def test_tensors_without_memory_have_layouts_of_results(call):
    x = given()
    found = call({name: tensor.to("meta") for name, tensor in x.items()})
    assert all(one.is_meta for one in (found if isinstance(found, tuple) else (found,)))
    assert laid_out(found) == laid_out(call(x))


@pytest.mark.parametrize("call", CALLS)
def test_fake_tensors_have_them_as_well(call):
    x = given()
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in x.items()}
        found = call(fakes)
    assert laid_out(found) == laid_out(call(fakes)) == laid_out(call(x))


def test_some_tensors_without_memory_are_refused_by_name():
    x = given()
    with pytest.raises(DeviceTypeNotSupported, match=r"^k: a tensor is on meta"):
        flashgen.attention(x["q"], *(part.to("meta") for part in parts(x)[0]))
    with pytest.raises(DeviceTypeNotSupported, match=r"^lengths: a tensor is on meta"):
        over_pages(x | {"lengths": x["lengths"].to("meta")})
    part = flashgen.attention(x["q"], *parts(x)[0], return_lse=True)
    with pytest.raises(DeviceTypeNotSupported, match=r"^o of parts\[1\]: a tensor is on meta"):
        flashgen.merge([part, (part[0].to("meta"), part[1])])
    with pytest.raises(DeviceTypeNotSupported, match=r"^out: a tensor is on meta"):
        flashgen.attention_backward(x["q"], x["q"], *parts(x)[0], part[0].to("meta"), part[1])
    with pytest.raises(DeviceTypeNotSupported, match=r"^dout is on meta but q is on cpu"):
        flashgen.attention_backward(x["q"].to("meta"), x["q"], *parts(x)[0], *part)
    with pytest.raises(DeviceTypeNotSupported, match=r"^q is on meta but out is on cpu"):
        flashgen.attention(x["q"].to("meta"), *(one.to("meta") for one in parts(x)[0]), out=part[0])
