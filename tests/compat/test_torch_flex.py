"""flex_attention: the results and the gradients of PyTorch's own, for the functions that people write."""

import pytest

torch = pytest.importorskip("torch", reason="flex_attention is of PyTorch")

from torch.nn.attention import flex_attention as theirs  # noqa: E402

from flashgen.compat.torch import flex_attention  # noqa: E402
from flashgen.errors import BadParam, BadTensorShape  # noqa: E402

BATCH, HEADS, LENGTH = 2, 4, 150
DOC = torch.arange(LENGTH).mul(7).div(LENGTH, rounding_mode="floor")
DOCS = torch.stack([DOC, DOC.flip(0)])
PREFIX = torch.tensor([40, 90])
IS_GLOBAL = torch.arange(200) % 37 == 0
SLOPES = 2.0 ** -torch.arange(1, HEADS + 1)
BIAS = torch.randn(1, HEADS, LENGTH, LENGTH)
TABLE = torch.randn(HEADS, 2 * LENGTH)
CAP = torch.tensor(3.0)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= 32


def documents(b, h, q_idx, kv_idx):
    return DOCS[b, q_idx] == DOCS[b][kv_idx]


def prefix(b, h, q_idx, kv_idx):
    return kv_idx < PREFIX[b]


def transfusion(b, h, q_idx, kv_idx):  # attention-gym's form: a product of comparisons by torch functions
    return torch.logical_and(torch.ge(q_idx, 10), torch.lt(kv_idx, 60)) | IS_GLOBAL[q_idx] | (kv_idx == q_idx)


def dilated(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) % 3 == 0) & torch.where(h < 2, q_idx >= kv_idx, q_idx // 16 == kv_idx // 16)


MASKS = {
    "causal": causal,
    "window": theirs.and_masks(causal, window),
    "prefix": theirs.or_masks(causal, prefix),
    "documents": theirs.and_masks(documents, causal),
    "transfusion": transfusion,
    "dilated": dilated,
    "all": theirs.or_masks(causal, lambda b, h, q_idx, kv_idx: q_idx.new_ones((), dtype=torch.bool)),
}
SCORES = {
    "alibi": lambda score, b, h, q_idx, kv_idx: score + SLOPES[h] * (kv_idx - q_idx),
    "softcap": lambda score, b, h, q_idx, kv_idx: CAP * torch.tanh(score / CAP),
    "bias": lambda score, b, h, q_idx, kv_idx: score + BIAS[0, h, q_idx, kv_idx],
    "relative": lambda score, b, h, q_idx, kv_idx: score + TABLE[h, q_idx - kv_idx + LENGTH],
    "hides": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf")),
    "distance": lambda score, b, h, q_idx, kv_idx: score * torch.exp((q_idx - kv_idx).abs().float() * -0.01),
}


def tensors(seqlen_q=LENGTH, seqlen_kv=LENGTH, kv_heads=HEADS):
    shapes = (HEADS, seqlen_q), (kv_heads, seqlen_kv), (kv_heads, seqlen_kv)
    return [torch.randn(BATCH, *shape, 32, requires_grad=True) for shape in shapes]


def block_mask(mask_mod, seqlen_q=LENGTH, seqlen_kv=LENGTH):
    return theirs.create_block_mask(mask_mod, BATCH, HEADS, seqlen_q, seqlen_kv, "cpu", BLOCK_SIZE=64)


def dense(q, k, v, score_mod=None, block_mask=None):
    """The same by PyTorch's autograd: its own FlexAttention has no gradients on a CPU."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    positions = [torch.arange(extent).view([-1, *[1] * (3 - at)]) for at, extent in enumerate(scores.shape)]
    if score_mod is not None:
        scores = score_mod(scores, *positions)
    if block_mask is not None:
        visible = theirs.create_mask(block_mask.mask_mod, *scores.shape, device="cpu")
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - torch.where(lse > -torch.inf, lse, 0)[..., None]) @ v, lse


def compare(arrays, others=(), **options):
    """That out and the LSE are those of PyTorch's own, and all gradients right."""
    mine = flex_attention(*arrays, return_lse=True, **options)
    right = theirs.flex_attention(*(x.detach() for x in arrays), return_lse=True, **options)
    for x, y in zip(mine, right, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    gradients = []
    for out, lse in (mine, dense(*arrays, **options)):
        loss = (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum()
        loss = loss + lse[torch.isfinite(lse)].sum() / 8
        gradients.append(torch.autograd.grad(loss, [*arrays, *others]))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("mask", "score"), [*zip(MASKS, [*SCORES, None], strict=True)])
def test_results_are_those_of_pytorch(mask, score):
    compare(tensors(), block_mask=block_mask(MASKS[mask]), score_mod=SCORES.get(score))


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(70, 150), (150, 90)])
def test_queries_count_from_the_first_key(seqlen_q, seqlen_kv):
    def mask_mod(b, h, q_idx, kv_idx):
        return (DOC[q_idx] >= DOC[kv_idx]) & (BIAS[0, 0] > 0)[q_idx, kv_idx] | (q_idx == kv_idx)

    arrays = tensors(seqlen_q, seqlen_kv)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + SLOPES[h] * (kv_idx - q_idx) + BIAS[0, h, q_idx, kv_idx]

    both = theirs.or_masks(mask_mod, dilated)
    compare(arrays, block_mask=block_mask(both, seqlen_q, seqlen_kv), score_mod=score_mod)


def test_groups_of_heads_scale_and_a_function_as_mask():
    q, k, v = (x.detach() for x in tensors(kv_heads=2))
    right = theirs.flex_attention(q, k, v, block_mask=block_mask(causal), scale=0.3, enable_gqa=True)
    torch.testing.assert_close(flex_attention(q, k, v, None, causal, 0.3, True), right, atol=1e-5, rtol=1e-5)
    with pytest.raises(BadTensorShape, match="enable_gqa=True"):
        flex_attention(q, k, v)


def test_captured_tensors_get_gradients_and_may_change():
    bias = torch.randn(HEADS, LENGTH, LENGTH, requires_grad=True)
    table = torch.randn(HEADS, 2 * LENGTH, requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx, kv_idx] + table[h, kv_idx - q_idx + LENGTH]

    compare(tensors(), [bias, table], score_mod=score_mod)
    q, k, v = (x.detach() for x in tensors())
    ends = torch.full((LENGTH,), 3)
    mask_mod = lambda b, h, q_idx, kv_idx: kv_idx < ends[q_idx]  # noqa: E731
    before = flex_attention(q, k, v, None, mask_mod)
    ends += 9
    right, _ = dense(q, k, v, block_mask=block_mask(mask_mod))
    torch.testing.assert_close(flex_attention(q, k, v, None, mask_mod), right, atol=1e-5, rtol=1e-5)
    assert not torch.equal(before, right)


@pytest.mark.parametrize(
    ("mask_mod", "message"),
    [
        (lambda b, h, q, kv: q >= kv and kv > 3, "mask_mod uses a traced value in Python's if, and"),
        (lambda b, h, q, kv: (3 if q > 4 else 5) > kv, "mask_mod uses a traced value"),
        (lambda b, h, q, kv: torch.sin(q) > 0, r"mask_mod calls sin\(\)"),
        (lambda b, h, q, kv: q & 1 == 0, "mask_mod uses & | or . of the bits of integers"),
        (lambda b, h, q, kv: SLOPES[h] > 0, "mask_mod reads a tensor of torch.float32"),
        (lambda b, h, q, kv: [1, 2][q] > 0, "mask_mod makes a Python number"),
        (lambda b, h, q, kv: DOC + q > kv, r"mask_mod computes with a tensor of shape \(150,\)"),
        (lambda b, h, q, kv: kv % (q + 1) == 0, "mask_mod is .* a divisor is"),
        (lambda b, h, q, kv: q / 2 > kv, "mask_mod is .* is not allowed"),
        (lambda b, h, q, kv: "yes", "mask_mod computes with a str"),
    ],
)
def test_masks_outside_of_the_language_are_refused(mask_mod, message):
    with pytest.raises(BadParam, match=message):
        flex_attention(*tensors(), None, mask_mod)


def test_scores_outside_of_the_language_are_refused():
    for score_mod, message in (
        (lambda score, b, h, q, kv: score + q // 2, "score_mod is .*//"),
        (lambda score, b, h, q, kv: score + DOC.double()[q], "score_mod reads a tensor of torch.float64"),
        (lambda score, b, h, q, kv: score.sigmoid(), r"score_mod calls sigmoid\(\)"),
        (lambda score, b, h, q, kv: q * 1.0, "score_mod is .* does not read `score`"),
    ):
        with pytest.raises(BadParam, match=message):
            flex_attention(*tensors(), score_mod)
    with pytest.raises(BadTensorShape, match=r"score_mod reads a tensor of shape .* 150 elements"):
        flex_attention(*tensors(), lambda score, b, h, q, kv: score + SLOPES[q])


def test_lists_that_are_not_those_of_mask_mod_are_refused():
    whole = block_mask(causal)
    counts, indices = whole.kv_num_blocks.clone(), whole.kv_indices
    counts[:, :, -1] = 0  # the diagonal blocks of the last queries
    cut = theirs.BlockMask.from_kv_blocks(
        counts, indices, whole.full_kv_num_blocks, whole.full_kv_indices, 64, causal, (LENGTH, LENGTH)
    )
    with pytest.raises(BadParam, match="block_mask leaves out key block 0 for query block 2, against its"):
        flex_attention(*tensors(), None, cut)
    full = theirs.BlockMask.from_kv_blocks(
        whole.full_kv_num_blocks,
        whole.full_kv_indices,
        whole.kv_num_blocks,
        whole.kv_indices,
        64,
        causal,
        (LENGTH, LENGTH),
    )
    with pytest.raises(BadParam, match="block_mask lists key block 0 for query block 0, against its"):
        flex_attention(*tensors(), None, full)
    with pytest.raises(BadParam, match="block_mask has no mask_mod;"):
        flex_attention(*tensors(), None, block_mask(theirs.noop_mask))
    with pytest.raises(BadTensorShape, match="block_mask is of 70 queries"):
        flex_attention(*tensors(), None, block_mask(causal, 70))
