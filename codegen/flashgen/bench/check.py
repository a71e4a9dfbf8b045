"""Checks that run beside every timing: a few rows against float64, and peers against flashgen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from flashgen.bench.cases import Case
    from flashgen.bench.hosts import Host, Inputs

# ‖out - reference‖ / ‖reference‖ that rounding alone stays well below. A wrong mask or tail is far above.
OWN_TOLERANCE = {"fp16": 2e-3, "bf16": 1.6e-2, "fp32": 1e-5}
# Peers may run fp32 through TF32 products.
PEER_TOLERANCE = {"fp16": 2e-3, "bf16": 1.6e-2, "fp32": 1e-3}

_ROWS = 24


def sampled_error(case: Case, inputs: Inputs, out: Any, host: Host, rng: np.random.Generator) -> float:
    """‖out - reference‖ / ‖reference‖ over some rows of one random head, the reference in float64 on the
    host.

    The rows are the first, the last, and random ones between. NaN where ``out`` holds one there.
    """
    batch = int(rng.integers(case.batch))
    head = int(rng.integers(case.num_heads_q))
    rows = np.unique(np.r_[0, case.seqlen_q - 1, rng.integers(case.seqlen_q, size=_ROWS)])
    q = host.numpy(inputs.q[batch, :, head])[rows]
    k = host.numpy(inputs.k[batch, :, head // case.group_size])
    v = host.numpy(inputs.v[batch, :, head // case.group_size])
    hidden = None if inputs.mask is None else host.numpy(inputs.mask)

    scores = q @ k.T / np.sqrt(case.head_dim)
    scores[~case.visible_rows(rows, hidden)] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    reference = weights @ v / weights.sum(axis=1, keepdims=True)
    difference = host.numpy(out[batch, :, head])[rows] - reference
    return float(np.linalg.norm(difference) / np.linalg.norm(reference))
