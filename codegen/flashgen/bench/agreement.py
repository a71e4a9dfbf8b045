"""Checks that run beside every timing: a few rows against float64, and peers against flashgen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.bench.cases import SOFTCAP
from flashgen.operators import reference
from flashgen.operators.scores import ScoreOfCall

if TYPE_CHECKING:
    from flashgen.bench.cases import Case
    from flashgen.bench.hosts import Host, Inputs

# ‖out - ours‖ / ‖ours‖ that rounding alone stays well below: a peer rounds where it likes, and may run fp32
# through TF32. A wrong mask or tail is far above.
PEER_TOLERANCE = {"fp16": 2e-3, "bf16": 1.6e-2, "fp32": 1e-3}

_ROWS = 24
# What a case's score modification is called in the specs, for any mask.
_SCORES = {"softcap": "softcap", "alibi": "alibi_symmetric"}


def sampled_share(case: Case, inputs: Inputs, out: Any, host: Host, rng: np.random.Generator) -> float:
    """The largest error of some rows of one random head against float64 on the host, as a share of its bound;
    infinite where ``out`` holds a NaN there.

    The rows are the first, the last, and random ones between.
    """
    batch = int(rng.integers(case.batch))
    head = int(rng.integers(case.num_heads_q))
    rows = np.unique(np.r_[0, case.seqlen_q - 1, rng.integers(case.seqlen_q, size=_ROWS)])
    kv_head = head // case.group_size
    q, found = (host.numpy(x[batch, :, head])[rows] for x in (inputs.q, out))
    k, v = (host.numpy(x[batch, :, kv_head]) for x in (inputs.k, inputs.v))
    dense = None if inputs.mask is None else host.numpy(inputs.mask)[rows]
    q, k, v = (x[None, :, None] for x in (q, k, v))
    expected = reference.attention(
        q, k, v, case.dtype, case.head_dim**-0.5, case.band, dense, rows, _modification(case, head)
    )
    return reference.largest(found[None, :, None], expected.out, expected.out_bound).share


def _modification(case: Case, head: int) -> ScoreOfCall | None:
    """The score modification of one head, which the reference takes for the only one."""
    if case.score == "none":
        return None
    from flashgen.spec.scores import load_scores

    arrays = {"slope": case.slopes()[None, head : head + 1].astype(np.float64)}
    score = load_scores().by_name[_SCORES[case.score]]
    return ScoreOfCall(score, {"cap": SOFTCAP}, arrays, case.seqlen_kv - case.seqlen_q)
