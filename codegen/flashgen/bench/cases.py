"""What is timed: attention problems, the work that each one counts, and the named grids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.errors import BadParam
from flashgen.operators import OPERATORS
from flashgen.operators.arguments import DTYPE_BYTES, total_bytes
from flashgen.operators.attention import DTYPES
from flashgen.operators.masks import UNBOUNDED, Band

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MASKS = ("none", "causal", "window", "random", "random_causal", "documents")
SCORES = ("none", "softcap", "alibi")
LENGTHS = ("none", "cache", "packed", "zipf")
DIRECTIONS = ("forward", "backward")
SOFTCAP = 30.0
CLOCKS = ("stream", "graph")

_PREFILL_TOKENS = 16_384
_PREFILL_WIDTH = 2_048
# Lengths that no tile divides, each with the next one that all tiles' rows divide.
_RAGGED_LENGTHS = {1000: 1024, 4095: 4096, 8191: 8192}
_RAGGED_LOSS = 0.05
_DETERMINISTIC_LOSS = 0.08
# Five products for each pair, where the forward pass has two.
_BACKWARD_WORK = 2.5


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem to time. ``head_dim_v`` None: v has the head dim of q and k.

    ``mask`` is one of ``none``; ``causal``; ``window``: causal, and ``window`` keys back at most;
    ``random``: a dense mask that hides each key with probability 1/8; ``random_causal``: that and causal
    together; ``documents``: a dense mask that keeps ``documents`` equal blocks on the diagonal. ``score`` is
    one of ``none``; ``softcap``, of SOFTCAP; ``alibi``, with the usual slopes. ``lengths`` is one of
    ``none``; ``cache``: keys are a KV cache with lengths on the device, all of seqlen_kv, contiguous or, with
    ``page_size``, in pages in random order; ``packed``: sequences are packed, all equally long; ``zipf``:
    packed, of lengths by Zipf's law, seqlen_q = seqlen_kv in the mean. ``appends``: the last seqlen_q keys
    and values go into the cache in the call, rotated, as q is. ``direction`` is one of ``forward``;
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
    also: str = ""
    window: int = 0
    documents: int = 1
    head_dim_v: int | None = None
    lengths: str = "none"
    page_size: int = 0
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
            (self.lengths, LENGTHS),
            (self.direction, DIRECTIONS),
        ):
            if value not in allowed:
                raise BadParam(f"bench case {self.name!r}: {value!r} is none of {', '.join(allowed)}")
        if self.lengths != "none" and (self.mask not in ("none", "causal") or self.score != "none"):
            raise BadParam(f"bench case {self.name!r}: with lengths it is full or causal, and has no score")
        if self.lengths == "zipf" and self.seqlen_q != self.seqlen_kv:
            raise BadParam(
                f"bench case {self.name!r}: sequences of Zipf lengths have as many keys as queries"
            )
        if self.lengths != "cache" and (self.page_size or self.appends):
            raise BadParam(f"bench case {self.name!r}: only a cache has pages, or is appended to")
        if self.is_backward and self.lengths == "cache":
            raise BadParam(f"bench case {self.name!r}: a cache has no gradients")
        if self.deterministic and not self.is_backward:
            raise BadParam(f"bench case {self.name!r}: deterministic is said of gradients")

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
        return self.mask in ("random", "random_causal", "documents")

    @property
    def is_causal(self) -> bool:
        """Whether the diagonal alone, or beside a dense mask, bounds the keys."""
        return self.mask in ("causal", "random_causal")

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

        Where sequences are packed, the visible ones. Else half of all for ``causal``, the exact number of
        visible pairs for ``window`` and ``documents``, all for ``random``: no tile of a random mask is empty,
        so no kernel can leave any out. ``random_causal`` counts as ``causal``.
        """
        everything = self.seqlen_q * self.seqlen_kv
        if self.is_packed:
            return sum(_visible_pairs(self.is_causal, *lengths) for lengths in self.sequences) / self.batch
        if self.is_causal:
            return everything / 2
        if self.mask == "window":
            ranges = (self.band.keys_of_every(row, row + 1, self.seqlen_kv) for row in range(self.seqlen_q))
            return sum(end - begin for begin, end in ranges)
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
        operator = OPERATORS["attention_backward" if self.is_backward else "attention"]
        sizes = {name: getattr(self, name) for name in ("batch", "seqlen_q", "seqlen_kv", "head_dim")}
        sizes |= {"num_heads_q": self.num_heads_q, "num_heads_kv": self.num_heads_kv}
        required = [argument for argument in operator.arguments if not argument.optional]
        return total_bytes(required, sizes | {"head_dim_v": self.width_v}, self.dtype)

    @property
    def kv_bytes(self) -> int:
        """Bytes of k and v that some query may see, read once: what decoding is bound by. Those of a window
        begin with its first query's first key.
        """
        keys = self.seqlen_kv
        if self.mask == "window":
            keys = min(keys, self.window + self.seqlen_q)
        width = self.head_dim + self.width_v
        return self.batch * keys * self.num_heads_kv * width * DTYPE_BYTES[self.dtype]

    def slopes(self) -> np.ndarray:
        """The slopes of ALiBi's paper, 2^(-8 (h + 1) / heads) for head h: float32, (num_heads_q,)."""
        heads = np.arange(1, self.num_heads_q + 1)
        return np.exp2(-8 * heads / self.num_heads_q).astype(np.float32)

    def hidden(self, rng: np.random.Generator) -> np.ndarray:
        """The dense mask, bool (seqlen_q, seqlen_kv), True where the key is hidden. Only for dense cases."""
        if self.mask in ("random", "random_causal"):
            return rng.random((self.seqlen_q, self.seqlen_kv), dtype=np.float32) < 0.125
        if self.mask == "documents":
            document_q = np.arange(self.seqlen_q) * self.documents // self.seqlen_q
            document_kv = np.arange(self.seqlen_kv) * self.documents // self.seqlen_kv
            return document_q[:, None] != document_kv[None, :]
        raise BadParam(f"bench case {self.name!r} has no mask array: its mask is {self.mask!r}")


@dataclass(frozen=True, slots=True)
class Grid:
    """A named list of cases. ``metric`` is what its table shows: ``TFLOP/s``, ``GB/s`` of k and v, or
    ``µs``. ``peers`` are those that it is about; empty: all that can be used.
    """

    name: str
    doc: str
    cases: tuple[Case, ...]
    metric: str = "TFLOP/s"
    peers: tuple[str, ...] = ()

    def choose(
        self, dtypes: Iterable[str] | None = None, where: dict[str, Sequence[Any]] | None = None
    ) -> Grid:
        """The cases of these dtypes whose fields have one of the values given in ``where``, and their
        baselines.

        Raises BadParam when nothing is left or a field is unknown.
        """
        wanted = {key: {str(value) for value in values} for key, values in (where or {}).items()}
        if dtypes is not None:
            wanted["dtype"] = set(dtypes)
        unknown = set(wanted) - set(Case.__dataclass_fields__)
        if unknown:
            raise BadParam(
                f"a case has no {', '.join(sorted(unknown))}; it has {', '.join(Case.__dataclass_fields__)}"
            )
        kept = [
            c for c in self.cases if all(str(getattr(c, key)) in values for key, values in wanted.items())
        ]
        if not kept:
            raise BadParam(f"grid {self.name!r} has no case with {wanted}")
        names = {case.name for case in kept} | {case.baseline for case in kept}
        return replace(self, cases=tuple(c for c in self.cases if c.name in names))

    def groups(self) -> list[tuple[Case, ...]]:
        """The cases in the sets that are timed together: each case with those that are set against it."""
        found: dict[str, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.baseline or case.name, []).append(case)
        return [tuple(group) for group in found.values()]


def zipf_lengths(count: int, mean: int) -> list[int]:
    """Lengths of ``count`` sequences that fall as 1 / rank and add up to ``count`` times ``mean``, in an
    order that is always the same.
    """
    ranks = np.arange(1, count + 1)
    lengths = np.floor(count * mean / (ranks * (1 / ranks).sum())).astype(int)
    lengths[0] += count * mean - lengths.sum()
    return np.random.default_rng(0).permutation(lengths).tolist()


def _visible_pairs(causal: bool, seqlen_q: int, seqlen_kv: int) -> int:
    """Query-key pairs of a sequence; causal ones aligned with its end."""
    if not causal:
        return seqlen_q * seqlen_kv
    rows = min(seqlen_q, seqlen_kv)  # those that see a key
    return rows * seqlen_kv - rows * (rows - 1) // 2


def short_length(length: int) -> str:
    """A sequence length as people say it: 16384 is ``16k``, 128 is ``128``."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def find_grid(name: str) -> Grid:
    """The grid of that name. Raises BadParam listing the names."""
    if name not in GRIDS:
        raise BadParam(f"there is no grid {name!r}; grids: {', '.join(GRIDS)}")
    return GRIDS[name]


def _self_attention(dtype: str, head_dim: int, mask: str, seqlen: int, batch: int, **changes: Any) -> Case:
    """Queries on keys of the same length, heads × head_dim = 2,048."""
    # 96 and 192 do not divide the width; the nearest count below keeps the work alike.
    heads = _PREFILL_WIDTH // head_dim
    name = f"{dtype} d{head_dim} {'causal' if mask == 'causal' else 'full'} {short_length(seqlen)}"
    return Case(name, batch, seqlen, seqlen, heads, heads, head_dim, dtype, mask, **changes)


def _sweep(name: str, doc: str, shapes: Iterable[tuple[int, int]]) -> Grid:
    """Self-attention of 16,384 tokens at each (head_dim, seqlen), full and causal, fp16 and bf16."""
    cells = product(("fp16", "bf16"), tuple(shapes), ("none", "causal"))
    cases = (
        _self_attention(dtype, head_dim, mask, seqlen, _PREFILL_TOKENS // seqlen)
        for dtype, (head_dim, seqlen), mask in cells
    )
    return Grid(name, doc, tuple(cases))


def _prefill() -> Grid:
    doc = "head_dim 64, 128, 256 at 1k to 16k; 16,384 tokens in all, heads × head_dim = 2,048"
    return _sweep("prefill", doc, product((64, 128, 256), (1024, 2048, 4096, 8192, 16_384)))


def _ragged() -> Grid:
    cases = []
    cells = product(("fp16", "bf16"), (64, 128, 256), ("none", "causal"), _RAGGED_LENGTHS.items())
    for dtype, head_dim, mask, (seqlen, multiple) in cells:
        batch = _PREFILL_TOKENS // multiple
        base = _self_attention(dtype, head_dim, mask, multiple, batch)
        against = {"baseline": base.name, "loss_limit": _RAGGED_LOSS}
        cases += [base, _self_attention(dtype, head_dim, mask, seqlen, batch, **against)]
    doc = "lengths 1,000, 4,095 and 8,191 against 1,024, 4,096 and 8,192, per useful FLOP; else as prefill"
    return Grid("ragged", doc, tuple(cases))


def _head_dims() -> Grid:
    return _sweep(
        "head_dims", "head_dim 32, 96, 192 at 4,096 tokens, else as prefill", product((32, 96, 192), (4096,))
    )


def _masks() -> Grid:
    def case(name: str, **changes: Any) -> Case:
        shape: dict[str, Any] = {
            "batch": 4,
            "seqlen_q": 4096,
            "seqlen_kv": 4096,
            "num_heads_q": 16,
            "num_heads_kv": 16,
        }
        return Case(name=name, **(shape | {"head_dim": 128} | changes))

    cases = [
        case("full"),
        case("dense random", mask="random", baseline="full"),
        case("dense random causal", mask="random_causal", baseline="full"),
        case("dense documents", mask="documents", documents=4, baseline="full"),
        case("causal", mask="causal"),
        case("window 1k", mask="window", window=1024, baseline="causal"),
        case("gqa 16q/2kv causal", mask="causal", num_heads_kv=2, baseline="causal"),
        case("fp32 full", dtype="fp32", batch=1),
        case("fp32 causal", dtype="fp32", batch=1, mask="causal"),
        case("d192/128 full", head_dim=192, head_dim_v=128),
        case("d192/128 causal", head_dim=192, head_dim_v=128, mask="causal"),
    ]
    cases += [
        case(
            f"gqa 16q/2kv {seqlen_q} on 16k",
            batch=32,
            seqlen_q=seqlen_q,
            seqlen_kv=16_384,
            num_heads_kv=2,
            clock="graph",
        )
        for seqlen_q in (1, 4, 16)
    ]
    return Grid(
        "masks",
        "batch 4, 4,096 tokens, 16 heads, head_dim 128: masks, fp32, grouped heads, a narrower v",
        tuple(cases),
    )


def _scores() -> Grid:
    cases = []
    for dtype, masks in (("fp16", ("full", "causal")), ("bf16", ("full",))):
        for mask in masks:
            plain = f"{dtype} {mask}"
            shape: dict[str, Any] = {"batch": 4, "seqlen_q": 4096, "seqlen_kv": 4096, "head_dim": 128}
            shape |= {"num_heads_q": 16, "num_heads_kv": 16, "dtype": dtype}
            shape |= {"mask": "none" if mask == "full" else mask}
            cases.append(Case(plain, **shape, also="flex-attention"))
            cases += [Case(f"{plain} {score}", **shape, score=score, baseline=plain) for score in SCORES[1:]]
    return Grid(
        "scores",
        "batch 4, 4,096 tokens, 16 heads, head_dim 128: softcap and ALiBi beside the plain kernels",
        tuple(cases),
    )


def _small() -> Grid:
    cases = [
        Case(
            name=f"{dtype} 1×{seqlen} {'causal' if mask == 'causal' else 'full'}",
            batch=1,
            seqlen_q=seqlen,
            seqlen_kv=seqlen,
            num_heads_q=16,
            num_heads_kv=16,
            head_dim=64,
            dtype=dtype,
            mask=mask,
            clock="graph",
        )
        for dtype, seqlen, mask in product(("fp16", "bf16"), (128, 512), ("none", "causal"))
    ]
    return Grid(
        "small", "batch 1, 16 heads, head_dim 64: GPU time inside a CUDA graph", tuple(cases), metric="µs"
    )


def _lineage() -> Grid:
    cases = [
        Case(
            f"fp16 d64 {batch}×{short_length(seqlen)}, 1 head", batch, seqlen, seqlen, 1, 1, 64, clock="graph"
        )
        for batch, seqlen in ((1, 256), (2, 512), (4, 1024))
    ]
    cells = product((64, 128), (1024, 2048, 4096, 8192, 16_384), ("none", "causal"))
    cases += [
        _self_attention("fp16", head_dim, mask, seqlen, _PREFILL_TOKENS // seqlen)
        for head_dim, seqlen, mask in cells
    ]
    doc = "algorithms naive, v1, v2, v3: one head of 256 to 1,024 tokens; head_dim 64, 128 as in prefill"
    peers = tuple(f"flashgen-{algorithm}" for algorithm in ("naive", "v1", "v2", "v3"))
    return Grid("lineage", doc, tuple(cases), peers=peers)


# Batch, keys, query heads, kv heads, head_dim.
_DECODED = (
    (1, 4096, 32, 8, 128),
    (1, 131_072, 32, 8, 128),
    (8, 8192, 32, 8, 128),
    (64, 8192, 32, 8, 128),
    (64, 32_768, 32, 8, 128),
    (128, 2048, 64, 8, 128),
    (16, 16_384, 16, 2, 64),
)


def _decode() -> Grid:
    """One query for each sequence; of the longest batch also a window, and a few queries, as drafts are."""

    def case(batch: int, seqlen_kv: int, heads_q: int, heads_kv: int, head_dim: int, **changes: Any) -> Case:
        name = f"{batch} × {short_length(seqlen_kv)}, {heads_q}/{heads_kv}, d{head_dim}"
        shape: dict[str, Any] = {"name": name, "seqlen_q": 1, "dtype": "bf16", "clock": "graph"} | changes
        return Case(
            batch=batch,
            seqlen_kv=seqlen_kv,
            num_heads_q=heads_q,
            num_heads_kv=heads_kv,
            head_dim=head_dim,
            **shape,
        )

    cases = [case(*shape) for shape in _DECODED]
    cases += [
        case(64, 8192, 32, 8, 128, name="64 × 8k, window 1k", mask="window", window=1024),
        case(8, 8192, 32, 8, 128, name="4 queries, 8 × 8k", seqlen_q=4, mask="causal"),
        case(8, 8192, 32, 8, 128, name="8 queries, 8 × 8k", seqlen_q=8, mask="causal"),
        case(8, 8192, 32, 8, 128, name="16 queries, 8 × 8k", seqlen_q=16, mask="causal"),
        case(8, 8192, 16, 16, 256, name="8 × 8k, 16/16, d256"),
    ]
    doc = "one query on many keys, and a few queries: GB/s of K and V, GPU time inside a CUDA graph"
    return Grid("decode", doc, tuple(cases), metric="GB/s")


_PAGE_SIZES = (1, 16, 64, 256)
# The share of a contiguous cache's rate that pages may lose: of one key, and of more.
_PAGE_LOSSES = {1: 0.10, 16: 0.03, 64: 0.03, 256: 0.03}


def _decoding(batch: int, seqlen_kv: int, heads_q: int, heads_kv: int, head_dim: int) -> Case:
    """One query on a contiguous cache."""
    return Case(
        f"{batch} × {short_length(seqlen_kv)}, {heads_q}/{heads_kv}, d{head_dim}",
        batch,
        seqlen_q=1,
        seqlen_kv=seqlen_kv,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        dtype="bf16",
        lengths="cache",
        clock="graph",
    )


def _paged() -> Grid:
    cases = []
    for shape in _DECODED:
        base = _decoding(*shape)
        cases.append(base)
        for size in _PAGE_SIZES:
            against = {"baseline": base.name, "loss_limit": _PAGE_LOSSES[size]}
            cases.append(replace(base, name=f"{base.name}, pages of {size}", page_size=size, **against))
    doc = "one query on a KV cache, contiguous and in pages of 1 to 256 keys: GB/s of K and V"
    return Grid("paged", doc, tuple(cases), metric="GB/s")


def _append() -> Grid:
    cases = []
    for shape in (
        (1, 4096, 32, 8, 128),
        (8, 8192, 32, 8, 128),
        (64, 8192, 32, 8, 128),
        (128, 2048, 64, 8, 128),
    ):
        for size in (0, 16):
            base = _decoding(*shape)
            if size:
                base = replace(base, name=f"{base.name}, pages of {size}", page_size=size)
            against = {"name": f"{base.name}, append", "baseline": base.name}
            cases += [base, replace(base, appends=True, **against)]
    doc = "one query on a KV cache, without and with append and rotary: GPU time inside a CUDA graph"
    return Grid("append", doc, tuple(cases), metric="µs")


def _varlen() -> Grid:
    def case(name: str, batch: int, seqlen_q: int, seqlen_kv: int, lengths: str = "packed") -> Case:
        shape: dict[str, Any] = {"num_heads_q": 32, "num_heads_kv": 8, "head_dim": 128}
        options = {"dtype": "bf16", "mask": "causal", "lengths": lengths, "clock": "graph"}
        return Case(name, batch, seqlen_q, seqlen_kv, **shape, **options)

    cases = (
        case("64 of Zipf lengths, 32k in all", 64, 512, 512, "zipf"),
        case("8 × 4k", 8, 4096, 4096),
        case("256 × 128", 256, 128, 128),
        case("2 × 512 on 32k", 2, 512, 32_768),
    )
    doc = "packed sequences, causal, bf16, 32 heads on 8, head_dim 128: TFLOP/s of the visible pairs"
    return Grid("varlen", doc, cases)


def _backward() -> Grid:
    """Each head dim at three lengths, the middle one in the deterministic order as well, and what else there
    is of masks and heads.
    """

    def cell(head_dim: int, mask: str, seqlen: int, dtype: str = "bf16", **changes: Any) -> Case:
        shape: dict[str, Any] = {"batch": _PREFILL_TOKENS // seqlen, "direction": "backward"} | changes
        return _self_attention(dtype, head_dim, mask, seqlen, **shape)

    cases = []
    for head_dim, mask, seqlen in product(
        (32, 64, 96, 128, 192, 256), ("none", "causal"), (1024, 4096, 16_384)
    ):
        plain = seqlen == 4096
        base = cell(head_dim, mask, seqlen, also="flex-attention" if plain and head_dim == 128 else "")
        cases.append(base)
        if plain:
            against = {"baseline": base.name, "loss_limit": _DETERMINISTIC_LOSS, "also": ""}
            cases.append(replace(base, name=f"{base.name} deterministic", deterministic=True, **against))
    long = cell(128, "causal", 8192)
    cases += [
        replace(long, name="gqa 32q/8kv causal 8k", num_heads_q=32, num_heads_kv=8),
        replace(long, name="gqa 16q/1kv causal 8k", num_heads_kv=1),
        replace(long, name="window 1k, 8k", mask="window", window=1024),
        replace(cell(128, "none", 4096), name="dense random 4k", mask="random"),
        replace(cell(128, "none", 4096), name="softcap full 4k", score="softcap"),
        replace(cell(128, "causal", 4096), name="alibi causal 4k", score="alibi"),
        replace(cell(128, "none", 4096, "fp32", batch=1), name="fp32 d128 full 4k"),
        replace(cell(128, "causal", 4096, "fp32", batch=1), name="fp32 d128 causal 4k"),
    ]
    small = cell(64, "none", 512, batch=1, clock="graph")
    small = replace(small, name="1×512 d64 full", num_heads_q=16, num_heads_kv=16)
    cases += [small, replace(small, name="1×512 d64 causal", mask="causal")]
    doc = (
        "the backward pass alone: head_dim 32 to 256 at 1k, 4k, 16k, bf16, 16,384 tokens, heads × head_dim = "
        "2,048; deterministic at 4k; grouped heads, a window, a dense mask, fp32, one short sequence"
    )
    packed: dict[str, Any] = {
        "num_heads_q": 32,
        "num_heads_kv": 8,
        "batch": 64,
        "seqlen_q": 512,
        "seqlen_kv": 512,
    }
    name = "64 of Zipf lengths, 32k in all, gqa 32q/8kv causal"
    cases.append(replace(long, name=name, lengths="zipf", **packed))
    return Grid("backward", doc, tuple(cases))


GRIDS: dict[str, Grid] = {
    grid.name: grid
    for grid in (
        *(_prefill(), _head_dims(), _masks(), _scores(), _small(), _ragged()),
        *(_lineage(), _decode(), _paged(), _append(), _varlen(), _backward()),
    )
}
