"""On which problems tiles compete."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from flashgen.errors import BadParam
from flashgen.tools.bench.cases import Case, short_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.families.variant import Variant

DEFAULT = ("1k", "4k", "16k")
# For families of few rows: batch and keys.
FEW_ROWS = ((1, "16k"), (8, "8k"), (64, "8k"))
TOKENS = 16_384
WIDTH = 2_048
GROUP = 8
WINDOW = 1_024

_MASKS = {"none": "none", "causal": "causal", "local": "window", "dense": "random"}
_NUMBER = r"(\d+)(k?)"
_SHAPE = re.compile(rf"{_NUMBER}(?:x{_NUMBER}x{_NUMBER})?(?:@(\d+)(?:/(\d+))?)?")
# Below this a kernel may take less time than the host needs for its launch: 20 µs at 500 TFLOP/s.
_SMALL_FLOPS = 1e10


def default(variant: Variant) -> Sequence[str]:
    """Shapes that calls of the variant's family have: one query, or up to four under a causal mask, where it
    is for few rows.
    """
    if variant.dispatch.rows_at_most is None:
        return DEFAULT
    most = variant.dispatch.rows_at_most // (GROUP if variant.gqa == "packed" else 1)
    queries = min(4, most) if variant.mask_type == "causal" else 1
    return tuple(f"{batch}x{queries}x{keys}" for batch, keys in FEW_ROWS)


class Unsuited(BadParam):
    """A shape that no call of a variant has: of other heads, of more rows, or of a single query under a
    causal mask.
    """


def suited(variants: Sequence[Variant], shapes: Sequence[str] | None = None) -> list[list[Case] | Unsuited]:
    """For each variant its `cases`, or why it has none.

    Raises BadParam for a text that is no shape, and Unsuited where no variant has a problem.
    """
    problems: list[list[Case] | Unsuited] = []
    for variant in variants:
        try:
            problems.append(cases(variant, shapes))
        except Unsuited as reason:
            problems.append(reason)
    reasons = [entry for entry in problems if isinstance(entry, Unsuited)]
    if reasons and len(reasons) == len(problems):
        raise reasons[0]
    return problems


def cases(variant: Variant, shapes: Sequence[str] | None = None) -> list[Case]:
    """The problems of a variant's axes in the ``shapes`` that its calls may have; None: in `default`.

    A shape is a length (``4k``, ``1000``) of queries and keys alike in a batch of 16,384 tokens, or
    ``BATCHxSEQLEN_QxSEQLEN_KV``, optionally followed by ``@HEADS_Q`` or ``@HEADS_Q/HEADS_KV``. By default
    heads × head_dim is about 2,048, and eight query heads share a kv head where the variant is for groups. A
    window has 1,024 keys, or a quarter of them where there are fewer than 4,096. Raises BadParam for a text
    that is no shape, and Unsuited where no call of the variant has any of them.
    """
    by_name: dict[str, Case] = {}
    reasons = []
    for text in default(variant) if shapes is None else shapes:
        try:
            case = _case(variant, text)
        except Unsuited as reason:
            reasons.append(reason)
        else:
            by_name[case.name] = case
    if not by_name:
        raise reasons[0]
    return list(by_name.values())


def _case(variant: Variant, text: str) -> Case:
    parts = _SHAPE.fullmatch(text.strip())
    if parts is None:
        raise BadParam(
            f"{text!r} is not a shape; write a length such as 4k or BATCHxSEQLEN_QxSEQLEN_KV such as "
            "32x16x16k, optionally with @HEADS_Q/HEADS_KV"
        )
    first = _number(parts[1], parts[2])
    if parts[3]:
        batch, seqlen_q, seqlen_kv = first, _number(parts[3], parts[4]), _number(parts[5], parts[6])
    else:
        batch, seqlen_q, seqlen_kv = max(1, TOKENS // max(1, first)), first, first
    heads_q, heads_kv = _heads(variant, parts[7], parts[8], text)
    if not (batch and seqlen_q and seqlen_kv):
        raise BadParam(f"shape {text!r} holds a 0; there is nothing to time")
    if variant.mask_type == "causal" and seqlen_q == 1:
        raise Unsuited(f"shape {text!r}: a single query sees every key, so {variant} never serves it")
    rows = seqlen_q * (heads_q // heads_kv if variant.gqa == "packed" else 1)
    most = variant.dispatch.rows_at_most
    if most is not None and rows > most:
        raise Unsuited(
            f"shape {text!r}: {rows} rows of a head; {variant} is for at most {most}, such "
            f"as {default(variant)[0]}"
        )
    lengths = (
        short_length(seqlen_q)
        if seqlen_q == seqlen_kv
        else f"{short_length(seqlen_q)}x{short_length(seqlen_kv)}"
    )
    case = Case(
        name=f"{batch}x{lengths} {heads_q}/{heads_kv}",
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=variant.head_dim,
        head_dim_v=variant.head_dim_v,
        dtype=variant.dtype,
        mask=_MASKS[variant.mask_type],
        window=min(WINDOW, max(1, seqlen_kv // 4)) if variant.mask_type == "local" else 0,
    )
    return dataclasses.replace(case, clock="graph") if case.flops < _SMALL_FLOPS else case


def _heads(variant: Variant, heads_q: str | None, heads_kv: str | None, text: str) -> tuple[int, int]:
    grouped = variant.gqa != "mha"
    if heads_q is None:
        total = max(1, WIDTH // variant.head_dim)
        return (max(1, total // GROUP) * GROUP, max(1, total // GROUP)) if grouped else (total, total)
    queries = int(heads_q)
    keys = int(heads_kv) if heads_kv else max(1, queries // GROUP) if grouped else queries
    if not (queries and keys) or queries % keys or (queries > keys) != grouped:
        needed = (
            "a multiple of the kv heads, and more than they are" if grouped else "as many as the kv heads"
        )
        raise Unsuited(f"shape {text!r}: {queries} query heads on {keys} kv heads; {variant} needs {needed}")
    return queries, keys


def _number(digits: str, kilo: str) -> int:
    return int(digits) * (1024 if kilo else 1)
