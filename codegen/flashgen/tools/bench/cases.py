"""What is timed: one attention problem, and the work that it counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashgen.errors import BadParam
from flashgen.operators import OPERATORS
from flashgen.operators.arguments import DTYPE_BYTES, total_bytes
from flashgen.operators.contract import DTYPES
from flashgen.operators.masks import UNBOUNDED, Band
from flashgen.tools.bench.choices import CHOICES
from flashgen.tools.bench.lines import LINES, Line, line_of
from flashgen.tools.bench.zipf import zipf_lengths

__all__ = ["Case"]

MASKS = ("none", "causal", "window", "random", "random_causal", "documents", "blocks", "line", "tree")
# Queries, and keys, of a block of the mask "blocks", and the share of its blocks that are visible.
BLOCK, VISIBLE_BLOCKS = 128, 0.1
SCORES = ("none", "softcap", "alibi")
LENGTH_KINDS = ("none", "cache", "packed", "zipf")
DIRECTIONS = ("forward", "backward")
SOFTCAP = 30.0
# Seed and offset of dropout: what PyTorch's generator has after manual_seed(), so that peers which draw their
# random numbers as flash-attn does drop the same scores.
DROPOUT_SEED = 5, 0
CLOCKS = ("stream", "graph")

# Five products for each pair, where the forward pass has two.
_BACKWARD_WORK = 2.5


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem to time. ``head_dim_v`` None: v has the head dim of q and k.

    ``mask`` is one of ``none``; ``causal``; ``window``: causal, and ``window`` keys back at most;
    ``random``: a dense mask that hides each key with probability 1/8; ``random_causal``: that and causal
    together; ``documents``: a dense mask that keeps ``documents`` equal blocks on the diagonal; ``blocks``:
    one that keeps VISIBLE_BLOCKS of the blocks of BLOCK by BLOCK, or the blocks that the entry ``choice`` of
    `choices.CHOICES` chooses, up to the diagonal, which flashgen takes as lists; ``line``: a
    mask by a line, the one of `lines.LINES` that ``line`` names; ``tree``: queries on a cache are the drafts
    of a binary tree, counted as causal ones. ``score`` is
    one of ``none``; ``softcap``, of SOFTCAP; ``alibi``, with the usual slopes. ``sinks``: each query head has
    a sink, and a backward pass its gradient; flashgen alone times such a case. ``dropout_p``: the probability
    of dropout, of DROPOUT_SEED; PyTorch's FlashAttention-2 and flash-attn time it, too. ``lengths`` is one of
    ``none``; ``cache``: keys are a KV cache with lengths on the device, all of seqlen_kv, contiguous or, with
    ``page_size``, in pages in random order; ``packed``: sequences are packed, all equally long; ``zipf``:
    packed, of lengths by Zipf's law, seqlen_q = seqlen_kv in the mean. ``left_padding``: as many rows of a
    cache come before the keys of each sequence, which begin at ``kv_starts``. ``codes``: a cache holds e4m3
    codes, with a scale of each kv head, with ``token_scales`` of each token and head. ``latent``: v is the
    first head_dim_v elements of k, as in the cache of MLA; ``topk``: each query attends to as many random
    tokens of it, by a list; ``q_rope``: the rotary part of q is an array of its own. flashgen alone times
    cases with codes or latent. ``appends``: the last seqlen_q keys and values go
    into the cache in the call, rotated, as q is. ``direction`` is one of ``forward``;
    ``backward``: the gradients of q, k and v alone, from what a forward call left; ``deterministic``: the
    same bits of them each time. ``also`` names a peer that
    times this case though it leaves cases of its kind to the others elsewhere. ``clock`` is
    ``stream`` (events around calls) or ``graph`` (events around replays of a CUDA graph, for kernels shorter
    than a call's host time). ``baseline`` names the case of the same grid that this one is set against, in
    the same rounds; ``loss_limit`` is the share of that case's rate that this one may lose.
    """

    name: str
    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    dtype: str = "fp16"
    mask: str = "none"
    score: str = "none"
    sinks: bool = False
    dropout_p: float = 0.0
    also: str = ""
    window: int = 0
    documents: int = 1
    line: str = ""
    choice: str = ""
    head_dim_v: int | None = None
    lengths: str = "none"
    page_size: int = 0
    left_padding: int = 0
    codes: bool = False
    token_scales: bool = False
    latent: bool = False
    topk: int = 0
    q_rope: bool = False
    appends: bool = False
    direction: str = "forward"
    deterministic: bool = False
    clock: str = "stream"
    baseline: str | None = None
    loss_limit: float | None = None

    def __post_init__(self) -> None:
        for value, allowed in (
            (self.mask, MASKS),
            (self.score, SCORES),
            (self.clock, CLOCKS),
            (self.dtype, DTYPES),
            (self.lengths, LENGTH_KINDS),
            (self.direction, DIRECTIONS),
        ):
            self._refuse(value not in allowed, f"{value!r} is none of {', '.join(allowed)}")
        line, tree = self.mask == "line", self.mask == "tree"
        has_lengths, is_cache = self.lengths != "none", self.lengths == "cache"
        is_square = self.seqlen_q == self.seqlen_kv
        self._refuse(line != (self.line in LINES), f"line is {self.line!r}, and mask {self.mask!r}")
        self._refuse(
            self.choice and (self.mask != "blocks" or self.choice not in CHOICES),
            f"choice is {self.choice!r}, and mask {self.mask!r}; expected blocks and one of "
            f"{', '.join(CHOICES)}",
        )
        self._refuse(self.choice and not is_square, "chosen blocks are of as many keys as queries")
        plain = self.mask in ("none", "causal", "tree", "line") and self.score == "none"
        why = "with lengths it is full, causal, a tree or a line, without score"
        self._refuse(has_lengths and not plain, why)
        why = "with lengths a line is of a cache, as it is"
        self._refuse(line and has_lengths and (not is_cache or self.appends), why)
        why = "a tree is of queries on a cache of keys and values"
        self._refuse(tree and (not is_cache or self.latent), why)
        self._refuse(self.sinks and self.score != "none", "with sinks it has no score")
        self._refuse(self.dropout_p and has_lengths, "with dropout it has no lengths")
        why = "sequences of Zipf lengths have as many keys as queries"
        self._refuse(self.lengths == "zipf" and not is_square, why)
        why = "only a cache has pages or padding, or is appended to"
        self._refuse(not is_cache and (self.page_size or self.appends or self.left_padding), why)
        why = "with padding it has no sinks, and nothing to append"
        self._refuse(self.left_padding and (self.appends or self.sinks), why)
        why = "only a cache has codes, and nothing is appended to it"
        self._refuse(self.codes and (not is_cache or self.appends), why)
        why = "tokens have scales where rows of a cache are codes"
        self._refuse(self.token_scales and (self.latent or not self.codes), why)
        why = "a latent cache has lengths and codes, and nothing else"
        others = not is_cache or self.left_padding or self.appends or self.sinks
        self._refuse(self.latent and others, why)
        why = "topk is tokens of a latent cache, for one query"
        self._refuse(self.topk and (not self.latent or self.seqlen_q > 1 or self.topk > self.seqlen_kv), why)
        self._refuse(self.q_rope and not self.latent, "q has a rotary part on a latent cache")
        self._refuse(self.is_backward and is_cache, "a cache has no gradients")
        self._refuse(self.deterministic and not self.is_backward, "deterministic is said of gradients")

    def _refuse(self, wrong: object, why: str) -> None:
        if wrong:
            raise BadParam(f"bench case {self.name!r}: {why}")

    @property
    def group_size(self) -> int:
        """Query heads on one kv head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def width_v(self) -> int:
        """Head dim of v and the output."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def is_dense(self) -> bool:
        """Whether the case needs a mask array."""
        return self.mask in ("random", "random_causal", "documents", "blocks", "line")

    @property
    def is_causal(self) -> bool:
        """Whether the diagonal alone, or beside a dense mask, bounds the keys."""
        return self.mask in ("causal", "random_causal", "tree")

    @property
    def is_backward(self) -> bool:
        """Whether it is the backward pass that is timed."""
        return self.direction == "backward"

    @property
    def is_packed(self) -> bool:
        """Whether sequences follow one another, without a dimension for the batch."""
        return self.lengths in ("packed", "zipf")

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each sequence."""
        if self.lengths != "zipf":
            return ((self.seqlen_q, self.seqlen_kv),) * self.batch
        return tuple((length, length) for length in zipf_lengths(self.batch, self.seqlen_q))

    @property
    def band(self) -> Band:
        """Which keys a query may see, apart from a dense mask; where sequences differ, in one of the mean
        length.
        """
        return self.band_of(self.seqlen_q, self.seqlen_kv)

    def band_of(self, seqlen_q: int, seqlen_kv: int) -> Band:
        """`band` in a sequence of these lengths."""
        if not self.is_causal and self.mask != "window":
            return Band()
        left = self.window if self.mask == "window" else UNBOUNDED
        return Band(seqlen_kv - seqlen_q, left, 0)

    @property
    def pairs(self) -> float:
        """Query-key pairs of one head that count as work, in the mean of the sequences.

        Where sequences have lengths, the visible ones. Else half of all for ``causal``, the exact number of
        visible pairs for ``window``, ``documents``, ``blocks`` and ``line``, all for ``random``: no tile of a
        random mask is empty, so no kernel can leave any out. ``random_causal`` counts as ``causal``.
        """
        everything = self.seqlen_q * self.seqlen_kv
        if self.topk:
            return self.topk
        if self.lengths != "none" and not self.line:
            return sum(_visible_pairs(self.is_causal, *lengths) for lengths in self.sequences) / self.batch
        if self.is_causal:
            return everything / 2
        if self.mask == "window":
            ranges = (self.band.keys_of_every(row, row + 1, self.seqlen_kv) for row in range(self.seqlen_q))
            return sum(end - begin for begin, end in ranges)
        if self.choice:
            return CHOICES[self.choice].pairs(self.seqlen_kv)
        if self.mask == "blocks":
            sizes = (np.diff(np.append(np.arange(0, n, BLOCK), n)) for n in (self.seqlen_q, self.seqlen_kv))
            rows, keys = sizes
            return int(rows @ self.listed_blocks() @ keys)
        if self.mask == "line":
            return self.visible_by_line().pairs
        if self.mask == "documents":
            return everything - int(np.count_nonzero(self.hidden(np.random.default_rng(0))))
        return everything

    @property
    def flops(self) -> float:
        """Floating-point operations: 2 · batch · heads · pairs · (head_dim + head_dim_v), as is usual for
        attention forward, and 2.5 times that for the backward pass.
        """
        forward = 2.0 * self.batch * self.num_heads_q * self.pairs * (self.head_dim + self.width_v)
        return forward * _BACKWARD_WORK if self.is_backward else forward

    @property
    def bytes_moved(self) -> int:
        """Fewest bytes that must pass through device memory: each input that there must be, such as q, k and
        v, read once, and each output written once.
        """
        operator = OPERATORS["attention_backward" if self.is_backward else "attention"].without_lengths
        sizes = {name: getattr(self, name) for name in ("batch", "seqlen_q", "seqlen_kv", "head_dim")}
        sizes |= {"num_heads_q": self.num_heads_q, "num_heads_kv": self.num_heads_kv}
        sizes |= {"seqlen_kv": self.topk} if self.topk else {}
        required = [argument for argument in operator.arguments if not argument.optional]
        if self.latent:
            required = [argument for argument in required if argument.name != "v"]
        moved = total_bytes(required, sizes | {"head_dim_v": self.width_v}, self.dtype)
        if not self.codes:
            return moved
        saved = self.head_dim + (0 if self.latent else self.width_v) - (8 if self.token_scales else 0)
        return moved - self.batch * sizes["seqlen_kv"] * self.num_heads_kv * saved

    @property
    def kv_bytes(self) -> int:
        """Bytes of k and v that some query may see, read once: the bound of decoding. With a window they
        begin with the first key of its first query.
        """
        keys = self.topk or self.seqlen_kv
        if self.mask == "window":
            keys = min(keys, self.window + self.seqlen_q)
        width = self.head_dim + (0 if self.latent else self.width_v)
        return self.batch * keys * self.num_heads_kv * width * DTYPE_BYTES[self.dtype]

    def slopes(self) -> np.ndarray:
        """The slopes of ALiBi's paper, 2^(-8 (h + 1) / heads) for head h: float32, (num_heads_q,)."""
        heads = np.arange(1, self.num_heads_q + 1)
        return np.exp2(-8 * heads / self.num_heads_q).astype(np.float32)

    def sink_logits(self) -> np.ndarray:
        """A sink of each query head, between -1 and 1: float32, (num_heads_q,)."""
        return np.linspace(-1, 1, self.num_heads_q, dtype=np.float32)

    def hidden(self, rng: np.random.Generator) -> np.ndarray:
        """The dense mask, bool (seqlen_q, seqlen_kv), True where the key is hidden. Only for dense cases."""
        if self.mask in ("random", "random_causal"):
            return rng.random((self.seqlen_q, self.seqlen_kv), dtype=np.float32) < 0.125
        if self.mask == "documents":
            document_q = np.arange(self.seqlen_q) * self.documents // self.seqlen_q
            document_kv = np.arange(self.seqlen_kv) * self.documents // self.seqlen_kv
            return document_q[:, None] != document_kv[None, :]
        if self.mask == "line":
            return self.visible_by_line().hidden()
        if self.mask == "blocks":
            rows, keys = self.block
            hidden = ~self.listed_blocks().repeat(rows, 0)[: self.seqlen_q]
            hidden = hidden.repeat(keys, 1)[:, : self.seqlen_kv]
            return hidden | ~np.tri(self.seqlen_q, dtype=bool) if self.choice else hidden
        raise BadParam(f"bench case {self.name!r} has no mask array: its mask is {self.mask!r}")

    def visible_by_line(self) -> Line:
        """The mask by a line; the queries are the last positions of the keys."""
        return line_of(self.line, self.seqlen_kv).of_last(self.seqlen_q)

    def tree(self) -> np.ndarray:
        """The words of a binary tree of drafts, the same for all sequences: int64, (seqlen_q,)."""
        words: list[int] = []
        for draft in range(self.seqlen_q):
            words.append((words[(draft - 1) // 2] if draft else 0) | 1 << draft)
        return np.array(words, np.uint64).view(np.int64)

    @property
    def block(self) -> tuple[int, int]:
        """Queries and keys of a block of the mask "blocks"."""
        return CHOICES[self.choice][:2] if self.choice else (BLOCK, BLOCK)

    def listed_blocks(self) -> np.ndarray:
        """The visible blocks of the mask "blocks", always the same: bool (blocks of rows, blocks of keys).
        Blocks on the diagonal are among them.
        """
        if self.choice:
            return CHOICES[self.choice].listed(self.seqlen_kv)
        rows, keys = -(-self.seqlen_q // BLOCK), -(-self.seqlen_kv // BLOCK)
        listed = np.random.default_rng(0).random((rows, keys)) < VISIBLE_BLOCKS
        listed[np.arange(rows), np.arange(rows) * keys // rows] = True
        return listed


def _visible_pairs(causal: bool, seqlen_q: int, seqlen_kv: int) -> int:
    """Query-key pairs of a sequence; causal ones aligned with its end."""
    if not causal:
        return seqlen_q * seqlen_kv
    rows = min(seqlen_q, seqlen_kv)  # those that see a key
    return rows * seqlen_kv - rows * (rows - 1) // 2


def short_length(length: int) -> str:
    """A sequence length as people say it: 16384 is ``16k``, 128 is ``128``."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)
