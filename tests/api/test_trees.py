"""Trees of drafts beside caches: results, plans, compiled calls, errors."""

import numpy as np
import pytest

import flashgen
from flashgen import KVCache, errors

RNG = np.random.default_rng()
DRAFTS, HEADS, WIDTH = 7, 4, 32
LENGTHS = np.array([80, 9, 7], np.int32)
# The draft that each draft continues.
PARENTS = (-1, 0, 0, 1, 1, 2, 4)


def tree_of(parents):
    """The word of each draft: the drafts from the root to itself."""
    words = []
    for draft, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << draft)
    return np.array(words, np.int64)


TREE = np.stack([tree_of(PARENTS), tree_of(range(-1, DRAFTS - 1)), tree_of([-1] * DRAFTS)])


def arrays(dtype=np.float32):
    q = RNG.standard_normal((3, DRAFTS, HEADS, WIDTH), np.float32)
    k, v = RNG.standard_normal((2, 3, 90, HEADS // 2, WIDTH), np.float32)
    return [x.astype(dtype) for x in (q, k, v)]


def mask_of(tree, lengths, columns):
    """The dense mask of a tree."""
    hidden = np.ones((len(tree), 1, tree.shape[1], columns), bool)
    for b, length in enumerate(lengths):
        first = length - tree.shape[1]
        hidden[b, ..., : max(0, first)] = False
        for draft in range(max(0, -first), tree.shape[1]):
            hidden[b, 0, :, first + draft] = tree[b] >> draft & 1 == 0
    return hidden


@pytest.mark.parametrize("options", [{}, {"window_size": (20, 0)}, {"softcap": 5.0}], ids=str)
def test_results_are_of_the_dense_mask(options):
    q, k, v = arrays()
    cache = KVCache(k, v, LENGTHS)
    right = flashgen.attention(q, cache, mask=mask_of(TREE, LENGTHS, 90), return_lse=True, **options)
    for x, y in zip(flashgen.attention(q, cache, tree=TREE, return_lse=True, **options), right, strict=True):
        assert np.array_equal(x, y)
    out = flashgen.attention(q, k, v, kv_lengths=LENGTHS, tree=TREE, causal=True, **options)
    assert np.array_equal(out, right[0])
    packed = flashgen.attention(
        q.reshape(-1, HEADS, WIDTH),
        cache,
        cu_seqlens_q=np.arange(4, dtype=np.int32) * DRAFTS,
        tree=TREE.reshape(-1),
        max_seqlen_q=DRAFTS,
        **options,
    )
    assert np.array_equal(packed.reshape(q.shape), right[0])


def test_a_chain_is_the_causal_mask_and_starts_move_no_draft():
    q, k, v = arrays()
    chain = np.broadcast_to(TREE[1], TREE.shape)
    cache = KVCache(k, v, LENGTHS)
    assert np.array_equal(flashgen.attention(q, cache, tree=chain), flashgen.attention(q, cache, causal=True))
    starts = np.array([60, 1, 0], np.int32)
    moved = flashgen.attention(q, KVCache(k, v, LENGTHS, starts=starts), tree=TREE)
    for b, (start, end) in enumerate(zip(starts, LENGTHS, strict=True)):
        rows = KVCache(k[b : b + 1, start:end], v[b : b + 1, start:end], LENGTHS[b : b + 1] - start)
        assert np.array_equal(moved[b : b + 1], flashgen.attention(q[b : b + 1], rows, tree=TREE[b : b + 1]))


def test_append_and_plans_take_a_tree():
    q, k, v = arrays()
    new, before = RNG.standard_normal((2, 3, DRAFTS, HEADS // 2, WIDTH), np.float32), LENGTHS - DRAFTS
    cache = KVCache(k.copy(), v.copy(), before)
    out = flashgen.attention(q, cache, append=tuple(new), tree=TREE)
    right = flashgen.attention(q, KVCache(cache.k, cache.v, LENGTHS), tree=TREE)
    assert np.array_equal(out, right)
    again = KVCache(k.copy(), v.copy(), before)
    plan = flashgen.plan(q, again, append=tuple(new), tree=TREE)
    assert np.array_equal(plan(q, again, tuple(new), tree=TREE), right)
    plan = flashgen.plan(q, KVCache(cache.k, cache.v, LENGTHS), tree=TREE)
    assert np.array_equal(plan(q, cache.k, cache.v, kv_lengths=LENGTHS, tree=TREE), right)
    assert plan.problem.mask_type == "tree"


def test_calls_are_compiled_and_have_no_gradients():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in arrays())
    lengths, tree = torch.from_numpy(LENGTHS), torch.from_numpy(TREE)
    right = flashgen.attention(q, KVCache(k, v, lengths), tree=tree)

    def rows(q, k, v, tree):
        return flashgen.attention(q, k, v, kv_lengths=lengths, tree=tree)

    def cached(q, k, v, tree):
        return flashgen.attention(q, KVCache(k, v, lengths), tree=tree)

    for function in (rows, cached):
        assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(q, k, v, tree), right)
    with pytest.raises(errors.BadParam, match=r"^tree was given, and there are no gradients"):
        rows(q.requires_grad_(), k, v, tree)
    with pytest.raises(errors.BadParam, match=r"^tree was given, and there are no gradients"):
        flashgen.attention_backward(right, q, k, v, right, right, tree=tree)


LATER = TREE.copy()
LATER[1, 2] |= 1 << 5


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tree": TREE.astype(np.int32)}, errors.BadTensorDtype, "^tree has dtype int32; expected int64"),
        ({"tree": TREE[:2]}, errors.BadTensorShape, r"^tree has shape \(2, 7\) and q \(3, 7, 4, 32\)"),
        ({"tree": LATER}, errors.BadParam, "^tree says that draft 2 of sequence 1 sees draft 5"),
        (
            {"mask": mask_of(TREE, LENGTHS, 90)},
            errors.BadParam,
            "^tree and mask were given; no kernel has both",
        ),
        ({"mask": flashgen.Mask("kv <= q")}, errors.BadParam, "^tree was given and mask is a Mask"),
        ({"window_size": (3, 2)}, errors.BadParam, r"^window_size is \(3, 2\)"),
        ({"mask_type": "causal_top_left"}, errors.BadParam, "^mask_type is 'causal_top_left'"),
    ],
    ids=str,
)
def test_errors_name_the_argument(changes, error, message):
    q, k, v = arrays()
    with pytest.raises(error, match=message):
        flashgen.attention(q, KVCache(k, v, LENGTHS), **{"tree": TREE} | changes)


def test_a_tree_of_more_than_64_drafts_or_without_lengths_is_refused():
    q, k, v = (np.zeros((1, rows, 1, 32), np.float16) for rows in (65, 80, 80))
    tree = np.zeros((1, 65), np.int64)
    lengths = np.array([80], np.int32)
    with pytest.raises(errors.BadTensorShape, match="up to 65 queries; a tree has at most 64 drafts"):
        flashgen.attention(q, KVCache(k, v, lengths), tree=tree)
    packed = {"cu_seqlens_q": np.array([0, 65], np.int32), "tree": tree[0], "max_seqlen_q": 64}
    with pytest.raises(errors.BadParam, match="sequence 0 has length 65; the bound max_seqlen_q is "):
        flashgen.attention(q[0], KVCache(k, v, lengths), **packed)
    with pytest.raises(errors.BadParam, match=r"^tree was given without lengths; pass a KVCache"):
        flashgen.attention(q[:, :64], k, v, tree=tree[:, :64])
    with pytest.raises(TypeError, match="did you mean tree"):
        flashgen.attention(q, k, v, tree_mask=tree)


def test_programs_of_jax_take_a_tree():
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        q, k, v, lengths, tree = map(jax.numpy.asarray, (*arrays(), LENGTHS, TREE))

        def call(q, k, v, tree):
            return flashgen.attention(q, KVCache(k, v, lengths), tree=tree)

        right = call(q, k, v, tree)
        assert np.array_equal(jax.jit(call)(q, k, v, tree), right)
