"""The named grids: which cases are timed side by side, and what their table shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam
from flashgen.tools.bench.cases import SCORES, Case, short_length
from flashgen.tools.bench.peers.registry import LINEAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PREFILL_TOKENS = 16_384
_PREFILL_WIDTH = 2_048
# Lengths that no tile divides, each with the next one that all tiles' rows divide.
_RAGGED_LENGTHS = {1000: 1024, 4095: 4096, 8191: 8192}
_RAGGED_LOSS = 0.05
_DETERMINISTIC_LOSS = 0.08
_SINKS_LOSS = 0.02
_STARTS_LOSS = 0.03


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
        conditions = {key: {str(value) for value in values} for key, values in (where or {}).items()}
        if dtypes is not None:
            conditions["dtype"] = set(dtypes)
        unknown = set(conditions) - set(Case.__dataclass_fields__)
        if unknown:
            raise BadParam(
                f"a case has no {', '.join(sorted(unknown))}; it has {', '.join(Case.__dataclass_fields__)}"
            )
        kept = [
            c for c in self.cases if all(str(getattr(c, key)) in values for key, values in conditions.items())
        ]
        if not kept:
            described = ", ".join(
                f"{key} {' or '.join(sorted(values))}" for key, values in conditions.items()
            )
            there = [
                f"{key} {', '.join(sorted({str(getattr(c, key)) for c in self.cases}))}" for key in conditions
            ]
            raise BadParam(f"grid {self.name} has no case with {described}; it has {'; '.join(there)}")
        names = {case.name for case in kept} | {case.baseline for case in kept}
        return replace(self, cases=tuple(c for c in self.cases if c.name in names))

    def groups(self) -> list[tuple[Case, ...]]:
        """The cases in the sets that are timed together: each case with those that are set against it."""
        by_baseline: dict[str, list[Case]] = {}
        for case in self.cases:
            by_baseline.setdefault(case.baseline or case.name, []).append(case)
        return [tuple(group) for group in by_baseline.values()]


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
        case("blocks 10 %, 16k", mask="blocks", batch=1, seqlen_q=16_384, seqlen_kv=16_384, baseline="full"),
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


def _sinks() -> Grid:
    """Forward, backward and decode, plain and with sinks."""
    long = _self_attention("bf16", 128, "causal", 4096, 4)
    window = replace(long, name="bf16 d128 window 128 4k", mask="window", window=128)
    cases = []
    for plain in (
        long,
        window,
        replace(long, name=f"{long.name} backward", direction="backward"),
        _decoding(8, 8192, 32, 8, 128),
        _decoding(64, 8192, 32, 8, 128),
    ):
        plain = replace(plain, lengths="none")
        against = {"baseline": plain.name, "loss_limit": _SINKS_LOSS}
        cases += [plain, replace(plain, name=f"{plain.name}, sinks", sinks=True, **against)]
    doc = "sinks against the same call without: 4k causal and in a window, its backward pass, decoding"
    return Grid("sinks", doc, tuple(cases), peers=("flashgen",))


def _starts() -> Grid:
    """Decoding and a chunk of a prompt on a cache whose sequences begin with their first row, or later."""
    cases = []
    for plain in (
        _decoding(8, 8192, 32, 8, 128),
        _decoding(64, 8192, 32, 8, 128),
        replace(_decoding(64, 8192, 32, 8, 128), name="64 × 8k, 32/8, d128, pages of 16", page_size=16),
        replace(_decoding(8, 4096, 32, 8, 128), name="8 × 128 on 4k, d128", seqlen_q=128, mask="causal"),
    ):
        against = {"baseline": plain.name, "loss_limit": _STARTS_LOSS}
        cases += [plain, replace(plain, name=f"{plain.name}, padded", left_padding=1000, **against)]
    doc = "keys that begin after 1,000 rows of padding against the same keys without: µs in a CUDA graph"
    return Grid("starts", doc, tuple(cases), metric="µs", peers=("flashgen",))


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
    return Grid("lineage", doc, tuple(cases), peers=tuple(LINEAGE))


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


def _chunked() -> Grid:
    cases = []
    for batch, seqlen_q, seqlen_kv, head_dim in (
        (4, 512, 4096, 64),
        (8, 128, 4096, 128),
        (2, 512, 8192, 128),
        (2, 2048, 8192, 128),
        (2, 512, 8192, 256),
    ):
        name = f"{batch} × {short_length(seqlen_q)} on {short_length(seqlen_kv)}, d{head_dim}"
        shape: dict[str, Any] = {"num_heads_q": 32, "num_heads_kv": 8, "head_dim": head_dim}
        options = {"dtype": "bf16", "mask": "causal", "lengths": "cache", "clock": "graph"}
        base = Case(name, batch, seqlen_q, seqlen_kv, **shape, **options)
        cases.append(base)
        for size in (16, 256):
            against = {"baseline": base.name, "loss_limit": _PAGE_LOSSES[size]}
            cases.append(replace(base, name=f"{base.name}, pages of {size}", page_size=size, **against))
    doc = (
        "chunks of prompts on a KV cache, contiguous and in pages of 16 and 256 keys, causal, bf16, "
        "32 heads on 8: TFLOP/s of the visible pairs"
    )
    return Grid("chunked", doc, tuple(cases))


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
        replace(cell(128, "none", 16_384), name="blocks 10 %, 16k", mask="blocks"),
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
        "2,048; deterministic at 4k; grouped heads, a window, a dense mask, fp32, 1×512, packed sequences"
    )
    packed: dict[str, Any] = {
        "num_heads_q": 32,
        "num_heads_kv": 8,
        "batch": 64,
        "seqlen_q": 512,
        "seqlen_kv": 512,
    }
    name = "64 of Zipf lengths, 32k in all, gqa 32q/8kv causal"
    zipf = replace(long, name=name, lengths="zipf", **packed)
    wide = {"num_heads_q": 16, "num_heads_kv": 16, "head_dim": 192, "head_dim_v": 128}
    cases += [
        zipf,
        replace(zipf, name="64 of Zipf lengths, d192 and 128, 16 heads causal", **wide),
        replace(
            zipf,
            name="64 of Zipf lengths, d256, gqa 16q/4kv causal",
            num_heads_q=16,
            num_heads_kv=4,
            head_dim=256,
        ),
    ]
    return Grid("backward", doc, tuple(cases))


GRIDS: dict[str, Grid] = {
    grid.name: grid
    for grid in (
        *(_prefill(), _head_dims(), _masks(), _scores(), _sinks(), _starts(), _small(), _ragged()),
        *(_lineage(), _decode(), _paged(), _chunked(), _append(), _varlen(), _backward()),
    )
}
