"""Faults at the score seam of the backward kernels: which row, head and key a score is of, the derivative,
and what is hidden."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.simulator.example import Shape
from simulator.faults import WRONG
from simulator.faults_backward import Fault

AMPERE = "flash_bwd_hdim32_fp16_causal_gqa_sm80"
HOPPER = "flash_bwd_hdim32_fp16_causal_gqa_sm90"
WIDE = "flash_bwd_hdim192_128_fp16_causal_gqa_sm90"

# A last block of queries that is mostly empty.
SHAPE = Shape(seqlen_q=70, seqlen_kv=150, heads=4, kv_heads=2, spread=2.0)
ROWS = Shape(seqlen_q=140, seqlen_kv=150, heads=4, kv_heads=2, spread=2.0)
FEW = Shape(seqlen_q=70, seqlen_kv=80, heads=2, kv_heads=1, spread=2.0)


@dataclass(frozen=True)
class ScoreFault(Fault):
    """A fault of a kernel with these modifications, one after another."""

    scores: tuple[str, ...] = ()


CHAIN = ("softcap", "alibi")


def fault(name, variant, scores, old, new, caught=(WRONG,)):
    shape = {AMPERE: SHAPE, HOPPER: ROWS, WIDE: FEW}[variant]
    return ScoreFault(name, variant, "main", shape, caught, old, new, scores)


SCORE = "score = offset.add_to(modified.score);"
GUARD = "== 0.0f ? 0.0f : "

FAULTS = (
    fault("modification left out", AMPERE, CHAIN, SCORE, ""),
    fault("derivative left out", AMPERE, CHAIN, " * modified.derivative;", ";"),
    fault("derivative at the modified score", AMPERE, CHAIN,
          "1.0f - (tanh_0 * tanh_0)", "1.0f - tanh_approx(tanh_0) * tanh_approx(tanh_0)"),
    fault("slope of the group's first head", AMPERE, CHAIN, "head_of(params, block, step), p,",
          "kv_head_of(params, block) * 2, p,"),
    fault("offset of the query beside", AMPERE, CHAIN, "min(first_query + 8 * j + lane % 4 * 2 + e,",
          "min(first_query + 8 * j + lane % 4 * 2,"),
    fault("a derivative of hidden keys", AMPERE, ("falls",), "p[i][j][e] " + GUARD, ""),
    fault("scores of rows past the last", AMPERE, ("falls",), "if (hidden) score", "if (false) score"),
    fault("modification left out on Hopper", HOPPER, CHAIN, SCORE, ""),
    fault("derivative left out on Hopper", HOPPER, CHAIN, " * modified.derivative;", ";"),
    fault("delta without the derivative", HOPPER, CHAIN,
          "ds = (ds - (e == 0 ? values.x : values.y)) * modified.derivative;",
          "ds = ds * modified.derivative - (e == 0 ? values.x : values.y);"),
    fault("dP is not awaited for its derivative", HOPPER, CHAIN,
          "        wgmma_wait<0>();\n        pin_registers(p);\n",
          "        wgmma_wait<1>();\n        pin_registers(p);\n", ("register in flight",)),
    fault("slope of the group's first head on Hopper", HOPPER, CHAIN, "head_of(params, block, step), p,",
          "kv_head_of(params, block) * 2, p,"),
    fault("offset of the query beside on Hopper", HOPPER, CHAIN, "min(lane_query + 8 * j + e,",
          "min(lane_query + 8 * j,"),
    fault("key of the first eight rows", HOPPER, CHAIN, "lane_key, 8 * key8, score)", "lane_key, 0, score)"),
    fault("a derivative of hidden keys on Hopper", HOPPER, ("falls",), "p[i] " + GUARD, ""),
    fault("scores of rows past the last on Hopper", HOPPER, ("falls",),
          " || query >= range.end - lane_query", ""),
    fault("P without the derivative to the other consumer", WIDE, CHAIN,
          "store_p(derivatives,", "store_p(p,"),
    fault("the derivative in dV", WIDE, CHAIN, "packed_p.set(p);", "packed_p.set(derivatives);"),
    fault("slope of the group's first head at wide head dims", WIDE, CHAIN,
          "head_of(params, block, step), p,",
          "kv_head_of(params, block) * params.group_parts * params.heads_per_part, p,"),
    fault("a derivative of hidden keys at wide head dims", WIDE, ("falls",), "p[i] " + GUARD, ""),
)  # fmt: skip
