"""Arrays of several libraries in one call are refused by each public function, which names the libraries."""

import numpy as np
import pytest

import flashgen
from flashgen.compat.flash_attn import flash_attn_func
from flashgen.errors import BadParam

Q = np.ones((1, 4, 2, 8), np.float16)
LSE = np.zeros((1, 2, 4), np.float32)


def cache():
    return flashgen.KVCache(Q.copy(), Q.copy(), np.zeros(1, np.int32))


def new(x):
    return x[:, :1], x[:, :1]


CALLS = {
    "k": lambda x: flashgen.attention(Q, x, x),
    "q": lambda x: flashgen.attention(x, Q, Q),
    "out": lambda x: flashgen.attention(x, x, x, out=Q.copy()),
    "mask": lambda x: flashgen.attention(Q, Q, Q, mask=x[0, :, :1, 0] > 9),
    "plan": lambda x: flashgen.plan(Q, x, x),
    "call of a plan": lambda x: flashgen.plan(Q, Q, Q)(Q, x, x),
    "backward": lambda x: flashgen.attention_backward(x, Q, Q, Q, Q, LSE),
    "plan_backward": lambda x: flashgen.plan_backward(x, Q, Q, Q, Q, LSE),
    "merge of two": lambda x: flashgen.merge([(Q, LSE), (x, LSE)]),
    "merge of three": lambda x: flashgen.merge([(Q, LSE), (Q, LSE), (x, LSE)]),
    "merge of one": lambda x: flashgen.merge([(x, LSE)]),
    "cascade": lambda x: flashgen.cascade(Q, [(Q, Q), (x, x)]),
    "cascade of one": lambda x: flashgen.cascade(Q, [(x, x)]),
    "cascade into out": lambda x: flashgen.cascade(x, [(x, x), (x, x)], out=Q.copy()),
    "append": lambda x: flashgen.append(cache(), x[:, :1], Q[:, :1]),
    "append before attention": lambda x: flashgen.attention(Q[:, :1], cache(), append=new(x)),
    "attention after append": lambda x: flashgen.attention(x[:, :1], cache(), append=new(Q)),
    "mask after append": lambda x: flashgen.attention(Q, cache(), append=new(Q), mask=x[0, :, :1, 0] > 9),
    "plan of an append": lambda x: flashgen.plan(x[:, :1], cache(), append=new(Q)),
    "call of a plan of an append": lambda x: flashgen.plan(Q, cache(), append=new(Q))(x, cache(), new(Q)),
    "explain": lambda x: flashgen.explain(Q, x, x, arch="sm_90"),
    "warmup": lambda x: flashgen.warmup([{"q": Q, "k": x, "v": x}], arch="sm_90"),
    "drop-in": lambda x: flash_attn_func(Q, x, x),
}


def from_jax():
    return pytest.importorskip("jax.numpy").asarray(Q)


def from_torch():
    return pytest.importorskip("torch").from_numpy(Q.copy())


@pytest.mark.parametrize("make", [from_jax, from_torch])
@pytest.mark.parametrize("name", CALLS)
def test_libraries_do_not_mix(name, make):
    x = make()
    either = f"({make.__name__.removeprefix('from_')}|numpy)"
    with pytest.raises(BadParam, match=rf"is a {either} array(,| but .* is a {either} one)"):
        CALLS[name](x)


def test_a_cache_may_be_of_a_library_that_can_be_written_to_beside_jax():
    x = from_jax()
    held, own = cache(), cache()
    total, _ = flashgen.append(held, *new(x))
    flashgen.append(own, *new(Q))
    np.testing.assert_array_equal(held.k, own.k)
    assert type(total) is type(x)
    after = flashgen.KVCache(held.k, held.v, np.ones(1, np.int32))
    out = flashgen.attention(x[:, :1], after)
    np.testing.assert_array_equal(np.asarray(out), flashgen.attention(Q[:, :1], after))
    table = pytest.importorskip("jax.numpy").zeros((1, 1), np.int32)
    with pytest.raises(BadParam, match="pages is a jax array but k is a numpy one"):
        flashgen.attention(x[:, :1], flashgen.KVCache(held.k, held.v, after.lengths, table))
