"""Checks that run beside every timing: a part of the results against float64, and peers against flashgen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from ml_dtypes import float8_e4m3fn

from flashgen.operators import gradients, reference
from flashgen.operators.dropout import LANES, Dropout, keep_scale, keep_threshold
from flashgen.operators.modification import ScoreOfCall
from flashgen.operators.trees import hidden_by_tree
from flashgen.runtime.hostarrays import host_array
from flashgen.tools.bench.cases import DROPOUT_SEED, SOFTCAP

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.hosts import Host, Inputs

# The limit of ‖out - ours‖ / ‖ours‖, also of each gradient. Rounding alone stays well below it: a peer may
# round at other places, and may run fp32 through TF32. A wrong mask or tail is far above.
PEER_TOLERANCE = {"fp16": 2e-3, "bf16": 1.6e-2, "fp32": 1e-3}

_ROWS = 24
# What a case's score modification is called in the specs, for any mask.
_SCORES = {"softcap": "softcap", "alibi": "alibi_symmetric"}


def sampled_share(
    case: Case, inputs: Inputs, results: tuple[Any, ...], host: Host, rng: np.random.Generator
) -> float:
    """The largest error of a part of the results against float64, as a share of its bound; infinite where
    they hold a NaN there.

    Of a forward pass these are some rows of a random head, the first, the last, and random ones between; of a
    backward pass all of a random kv head and of its query heads.
    """
    if case.is_backward:
        return _share_of_gradients(case, inputs, results, host, rng)
    (out,) = results
    batch = int(rng.integers(case.batch))
    head = int(rng.integers(case.num_heads_q))
    q, k, v, result = _one_head(case, inputs, out, batch, head, host)
    rows = np.unique(np.r_[0, len(q) - 1, rng.integers(len(q), size=_ROWS)])
    dense = None if inputs.mask is None else host.numpy(inputs.mask)[rows]
    if case.mask == "tree":
        dense = hidden_by_tree(case.tree()[None], case.seqlen_kv)[0, 0, rows]
    q, k, v, result = (x[None, :, None] for x in (q[rows], k, v, result[rows]))
    band = case.band_of(*case.sequences[batch])
    modification = _modification(case, case.slopes()[None, head : head + 1].astype(np.float64))
    sinks = case.sink_logits()[head : head + 1].astype(np.float64) if case.sinks else None
    scale = case.head_dim**-0.5
    options = {"modification": modification, "sinks": sinks, "scaled": case.codes}
    options["rounds_v"] = case.token_scales
    options["dropout"] = _dropout(case, batch, head, 1)
    expected = reference.attention(q, k, v, case.dtype, scale, band, dense, rows, **options)
    return reference.largest(result, expected.out, expected.out_bound).share


def _share_of_gradients(
    case: Case, inputs: Inputs, results: tuple[Any, ...], host: Host, rng: np.random.Generator
) -> float:
    """On the device: gradients of keys are sums over all queries. Gradients of sinks are left out, because
    they are sums over all batch entries.
    """
    batch, kv_head = map(int, rng.integers((case.batch, case.num_heads_kv)))
    heads = slice(kv_head * case.group_size, (kv_head + 1) * case.group_size)

    def of_heads(x: Any, some: slice, side: int) -> Any:
        if not case.is_packed:
            return host.double(x[batch : batch + 1, :, some])
        begin, end = np.cumsum([0, *(lengths[side] for lengths in case.sequences)])[batch : batch + 2]
        return host.double(x[int(begin) : int(end), some])[None]

    dout, q, dq = (of_heads(x, heads, 0) for x in (inputs.dout, inputs.q, results[0]))
    of_kv = (inputs.k, inputs.v, *results[1:3])
    k, v, dk, dv = (of_heads(x, slice(kv_head, kv_head + 1), 1) for x in of_kv)
    scale, band = case.head_dim**-0.5, case.band_of(*case.sequences[batch])
    slopes = None if inputs.slopes is None else host.double(inputs.slopes)[None, heads]
    modification = _modification(case, slopes)
    sinks = None if inputs.sinks is None else host.double(inputs.sinks)[heads]
    right = gradients.gradients(
        dout,
        q,
        k,
        v,
        case.dtype,
        scale,
        band,
        inputs.mask,
        modification=modification,
        sinks=sinks,
        dropout=_dropout(case, batch, heads.start, case.group_size),
    )
    results = {"dq": dq, "dk": dk, "dv": dv}
    return max(reference.largest(x, *right[name]).share for name, x in results.items())


def _one_head(
    case: Case, inputs: Inputs, out: Any, batch: int, head: int, host: Host
) -> tuple[np.ndarray, ...]:
    """q, k, v and out of a query head of one sequence, (tokens, width) each, in host memory: as the kernel is
    to see them, rotated and with what it is to append.
    """
    kv_head = head // case.group_size
    if case.is_packed:
        begins = np.cumsum([(0, 0), *case.sequences], axis=0)[batch : batch + 2]
        of_q, of_kv = (slice(int(begin), int(end)) for begin, end in begins.T)
        q, result = (host.numpy(x[of_q, head]) for x in (inputs.q, out))
        return q, *(host.numpy(x[of_kv, kv_head]) for x in (inputs.k, inputs.v)), result
    q, result = (host.numpy(x[batch, :, head]) for x in (inputs.q, out))
    numbers = _numbers_of_codes if case.codes else host.numpy

    def of_keys(x: Any, read: Callable[[Any], np.ndarray]) -> np.ndarray:
        """What an array with the layout of the cache has for the keys of the sequence."""
        if not case.page_size:
            return read(x[batch, :, kv_head])
        pages = host.numpy(inputs.pages[batch]).astype(int).tolist()
        rows = read(x[:, :, kv_head][pages])
        return rows.reshape(-1, *rows.shape[2:])[: case.left_padding + case.seqlen_kv]

    k, v = (of_keys(x, numbers) for x in (inputs.k, inputs.v))
    if case.topk:
        tokens = host.numpy(inputs.indices[batch, 0]).astype(int)
        k, v = k[tokens], v[tokens]
    if case.token_scales:
        k, v = (x * of_keys(y, host.numpy)[:, None] for x, y in ((k, inputs.k_scale), (v, inputs.v_scale)))
    elif case.codes:
        k, v = (x * host.numpy(y)[kv_head] for x, y in ((k, inputs.k_scale), (v, inputs.v_scale)))
    k, v = k[case.left_padding :], v[case.left_padding :]
    if case.appends:
        k_new, v_new = (host.numpy(x[batch, :, kv_head]) for x in (inputs.k_new, inputs.v_new))
        cos, sin = (host.numpy(x) for x in (inputs.cos, inputs.sin))
        positions = np.arange(case.seqlen_kv - case.seqlen_q, case.seqlen_kv)
        of_q = positions if case.is_causal else positions[:1]
        q = _rotated(q, cos[of_q], sin[of_q])
        k = np.concatenate((k[: positions[0]], _rotated(k_new, cos[positions], sin[positions])))
        v = np.concatenate((v[: positions[0]], v_new))
    return q, k, v, result


def _numbers_of_codes(codes: Any) -> np.ndarray:
    """The numbers that codes of PyTorch or CuPy stand for, without a scale."""
    on_host = codes.view(np.uint8).get() if hasattr(codes, "get") else host_array(codes.cpu())
    return on_host.view(float8_e4m3fn).astype(np.float64)


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Elements i and i + head_dim / 2 are a pair."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((cos * first - sin * second, cos * second + sin * first), axis=-1)


def _dropout(case: Case, batch: int, head: int, heads: int) -> Dropout | None:
    """The dropout of some heads of a batch entry, from ``head`` on, which the reference takes for the only
    ones.
    """
    if not case.dropout_p:
        return None
    seed, offset = DROPOUT_SEED
    before = (batch * case.num_heads_q + head) * LANES
    threshold, scale = keep_threshold(case.dropout_p), keep_scale(case.dropout_p)
    return Dropout(seed, offset + before, threshold, scale, heads)


def _modification(case: Case, slopes: Any) -> ScoreOfCall | None:
    """The score modification of some heads, which the reference takes for the only ones; ``slopes`` are
    theirs, (1, heads).
    """
    if case.score == "none":
        return None
    from flashgen.call.fields import PLAN_KEYWORDS
    from flashgen.families.scores import load_scores

    score = load_scores(keywords=PLAN_KEYWORDS).by_name[_SCORES[case.score]]
    return ScoreOfCall(score, {"cap": SOFTCAP}, {"slope": slopes}, case.seqlen_kv - case.seqlen_q)
