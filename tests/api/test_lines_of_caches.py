"""Masks by a line beside lengths and caches: results of the CPU path, plans, kernels, and what is refused."""

import numpy as np
import pytest

import flashgen
from flashgen import KVCache, Mask, SplitEvery
from flashgen.call.mask import rule_of
from flashgen.errors import BadParam, BadTensorShape, DeviceTypeNotSupported
from flashgen.operators.keyranges import window_of_line
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.rules import RuleOfCall
from flashgen.simulator import hostcompiler

RNG = np.random.default_rng(7)
QUERIES, HEADS, WIDTH, ROOM = 5, 4, 32, 96
LENGTHS = np.array([80, 5, 96], np.int32)
LINE = "(doc[b, q] == doc[b, kv] or kv < 3 * h + b) and kv <= q"
DOC = np.sort(RNG.integers(0, 5, (3, ROOM)).astype(np.int32))


def arrays():
    q = RNG.standard_normal((3, QUERIES, HEADS, WIDTH), np.float32)
    return q, *RNG.standard_normal((2, 3, ROOM, HEADS // 2, WIDTH), np.float32)


def hidden(extra=0):
    """`LINE` as a dense mask, of sequences of LENGTHS and ``extra`` keys."""
    h, i, kv = np.ogrid[:HEADS, :QUERIES, :ROOM]
    masks = []
    for b, length in enumerate(LENGTHS + extra):
        q = i + length - QUERIES
        same = DOC[b][np.clip(q, 0, ROOM - 1)] == DOC[b][kv]
        masks.append(~((same | (kv < 3 * h + b)) & (kv <= q)))
    return np.stack(masks)


@pytest.mark.parametrize("options", [{}, {"window_size": (20, 0)}, {"softcap": 5.0}], ids=str)
def test_results_are_of_the_dense_mask(options):
    q, k, v = arrays()
    cache, mask = KVCache(k, v, LENGTHS), Mask(LINE, doc=DOC)
    right = flashgen.attention(q, cache, mask=hidden(), **options)
    assert np.allclose(flashgen.attention(q, cache, mask=mask, **options), right, atol=1e-5)
    packed = {"cu_seqlens_q": np.arange(4, dtype=np.int32) * QUERIES}
    out = flashgen.attention(q.reshape(-1, HEADS, WIDTH), cache, mask=mask, **packed, **options)
    assert np.allclose(out.reshape(q.shape), right, atol=1e-5)
    order = RNG.permutation(3 * ROOM // 16).astype(np.int32).reshape(3, -1)
    pools = [np.empty((3 * ROOM // 16, 16, *x.shape[2:]), x.dtype) for x in (k, v)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[order] = x.reshape(3, -1, 16, *x.shape[2:])
    paged = KVCache(*pools, LENGTHS, order)
    assert np.allclose(flashgen.attention(q, paged, mask=mask, **options), right, atol=1e-5)
    plan = flashgen.plan(q, cache, mask=mask, **options)
    assert np.allclose(plan(q, k, v, kv_lengths=LENGTHS, **mask.arguments), right, atol=1e-5)


def test_keys_are_appended_before():
    q, k, v = arrays()
    lengths = np.minimum(LENGTHS, ROOM - QUERIES)
    new = tuple(RNG.standard_normal((2, 3, QUERIES, HEADS // 2, WIDTH), np.float32))
    cache, mask = KVCache(k.copy(), v.copy(), lengths), Mask(LINE, doc=DOC)
    out = flashgen.attention(q, cache, append=new, mask=mask)
    for b, length in enumerate(lengths):
        k[b, length : length + QUERIES], v[b, length : length + QUERIES] = new[0][b], new[1][b]
    right = flashgen.attention(q, KVCache(k, v, lengths + np.int32(QUERIES)), mask=mask)
    assert np.array_equal(out, right)


@pytest.mark.parametrize(
    ("line", "window"),
    [
        ("kv <= q", (UNBOUNDED, 0)),
        ("abs(q - kv) <= n", (10, 10)),
        ("doc[b, q] == doc[b, kv] and q - kv < n and kv - q < 3", (9, 2)),
        ("not (kv > q or q - kv >= n)", (9, 0)),
        ("kv <= q and (q - kv < n or kv < 4)", (UNBOUNDED, 0)),
        ("(q - kv) % n == 0 and kv * 2 <= 2 * q + 7", (UNBOUNDED, 3)),
        ("kv <= q or kv < last[b]", (UNBOUNDED, UNBOUNDED)),
        ("kv < q - 5", (UNBOUNDED, 0)),
        ("q // n == kv // n and kv <= q", (9, 0)),
        ("kv // n <= q // n", (UNBOUNDED, 9)),
        ("not (q // 4 > (kv + 1) // 4 or kv > q)", (4, 0)),
        ("q // n < kv // n and kv // 3 <= q // 3", (0, 2)),
        ("q // n != kv // n and kv <= q", (UNBOUNDED, 0)),
        ("q // n == kv // 9 and kv <= q", (UNBOUNDED, 0)),
    ],
)
def test_a_line_has_a_window(line, window):
    rule = rule_of(line)
    assert window_of_line(RuleOfCall(rule, tuple(10 for _ in rule.scalars))) == window


def test_keys_past_the_window_of_a_line_are_not_read():
    q, k, v = arrays()
    mask = Mask("kv <= q and q - kv < n", n=20)
    right = flashgen.attention(q, KVCache(k, v, LENGTHS), mask=mask)
    for b, length in enumerate(LENGTHS):
        k[b, : max(0, length - QUERIES - 19)] = v[b, : max(0, length - QUERIES - 19)] = np.nan
    assert np.array_equal(flashgen.attention(q, KVCache(k, v, LENGTHS), mask=mask), right)


@pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="there is no C++ compiler")
def test_a_call_in_the_simulator():
    q, k, v = (x.astype(np.float16) for x in arrays())
    cache, mask = KVCache(k, v, LENGTHS), Mask(LINE, doc=DOC)
    out = flashgen.attention(q, cache, mask=mask.keep_lists(), backend="simulator")
    np.testing.assert_allclose(out, flashgen.attention(q, cache, mask=mask), atol=4e-3)


def test_a_gpu_has_kernels_of_all_families(fake_gpu):
    from fake_gpu import array

    k, pool, pages = array((8, 8192, 8, 128)), array((8 * 512, 16, 8, 128)), array((8, 512), "int32")
    lengths = array((8,), "int32")
    mask = Mask("documents", doc=array((8, 8192), "int32"))
    rows, paged = KVCache(k, k, lengths), KVCache(pool, pool, lengths, pages)

    def kernel(queries, cache, **options):
        return flashgen.plan(array((8, queries, 32, 128)), cache, mask=mask, **options).steps[0].variant

    one = kernel(1, paged)
    assert one.name == "flash_varlen_decode_hdim128_fp16_local_paged_documents_packgqa_sm90"
    names = [kernel(1, rows, splits=SplitEvery(512)), kernel(300, rows), kernel(300, paged, softcap=5.0)]
    families = [variant.spec for variant in names]
    assert families == ["flash_varlen_decode_sm80", "flash_fwd_varlen_sm90", "flash_fwd_varlen_sm90"]
    assert all(variant.rule is mask.rule.rule for variant in names)


def test_calls_are_compiled():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in arrays())
    lengths, mask = torch.from_numpy(LENGTHS), Mask(LINE, doc=torch.from_numpy(DOC))

    def cached(q, k, v):
        return flashgen.attention(q, KVCache(k, v, lengths), mask=mask)

    assert torch.equal(torch.compile(cached, backend="aot_eager", fullgraph=True)(q, k, v), cached(q, k, v))


def test_no_kernel_has_gradients(fake_gpu):
    from fake_gpu import array

    q, lengths, lse = array((2, 64, 4, 64)), array((2,), "int32"), array((2, 4, 64), "float32")
    with pytest.raises(
        DeviceTypeNotSupported, match=r"^mask is a Mask, `kv <= q`, and no kernel has gradients"
    ):
        flashgen.attention_backward(q, q, q, q, q, lse, mask=Mask("kv <= q"), kv_lengths=lengths)


def test_errors_name_the_argument():
    q, k, v = arrays()
    with pytest.raises(BadTensorShape, match=r"doc of the mask"):
        flashgen.attention(q, KVCache(k, v, LENGTHS), mask=Mask(LINE, doc=DOC[:, :-1]))
    with pytest.raises(BadParam, match=r"^starts was given and mask is a Mask; its keys are counted"):
        flashgen.attention(q, KVCache(k, v, LENGTHS, starts=LENGTHS // 2), mask=Mask(LINE, doc=DOC))
