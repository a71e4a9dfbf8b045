"""Sequences of several lengths on a GPU: within the bound, nothing else touched, replay with new lengths."""

from __future__ import annotations

import dataclasses
import secrets

import pytest

import flashgen
from flashgen.families.load import load_specs
from flashgen.runtime.device import device
from flashgen.schedule.dispatch import runs_on
from flashgen.simulator.example import Shape, make
from gpu.copies import computed
from simulator.covering import covering, is_plain

pytestmark = pytest.mark.gpu

FIXED = "flash_varlen_decode_hdim64_bf16"
SPLIT = "flash_varlen_split"
SHIPPED = [
    variant
    for spec in load_specs()
    if spec.operator == "attention" and spec.has_lengths
    for variant in spec.variants()
    if variant.is_main and variant.head_dim in (64, 128, 256)
]
VARIANTS = [
    variant
    for variant in SHIPPED
    if is_plain(variant)
    # With fixed splits only what numbers them differs: every mask, layout, grouping and tile, once.
    and (variant.axis("splits") != "fixed" or (variant.name.startswith(FIXED) and variant.target == "sm80"))
    # Of chunks of queries every mask, layout and tile once, and each grouping.
    and (
        variant.family != SPLIT
        or (variant.dtype == "bf16" and (variant.gqa == "packed" or variant.head_dim == 64))
    )
]
VARIANTS += covering(variant for variant in SHIPPED if not is_plain(variant))
# Small enough that the float64 of hundreds of variants takes a minute of the host.
PREFILL = (Shape(300, 500, batch=9), Shape(130, 70, batch=30))
DECODE = (Shape(3, 5000, batch=5), Shape(1, 300, batch=70))
CHUNKS = (Shape(130, 3000, batch=3), Shape(130, 70, batch=30))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_within_the_bound_and_nothing_else_is_touched(variant):
    if not runs_on(variant, device(0)):
        pytest.skip(f"{device(0)} does not run it")
    seed = secrets.randbits(32)
    for shape in DECODE if variant.dispatch.rows_at_most else CHUNKS if variant.family == SPLIT else PREFILL:
        if variant.gqa != "mha":
            shape = dataclasses.replace(shape, heads=4, kv_heads=1)
        for each in range(seed, seed + 2):
            example = make(variant, shape, each)
            rows = example.problem.seqlen_q * example.problem.group_size
            if variant.dispatch.rows_at_most and rows > variant.dispatch.rows_at_most:
                continue
            found = computed(example, variant, ("out", "lse"))
            verdict = dataclasses.replace(example, **found).judge()
            assert verdict.ok, f"{shape}, seed {each}: {verdict}"


def test_a_graph_is_replayed_with_other_lengths_and_pages():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch does not see a GPU")
    batch, pages, size = 16, 640, 16
    k, v = (torch.randn(pages, size, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    q = torch.randn(batch, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pages, device="cuda").to(torch.int32).reshape(batch, pages // batch)
    lengths = torch.full((batch,), 640, dtype=torch.int32, device="cuda")
    cache = flashgen.KVCache(k, v, lengths, pages=table)
    plan = flashgen.plan(q, cache)
    out = torch.empty_like(q)
    given = {"kv_lengths": lengths, "pages": table, "out": out}
    plan(q, k, v, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(q, k, v, **given)
    for _ in range(3):
        lengths.copy_(torch.randint(0, 641, (batch,), device="cuda", dtype=torch.int32))
        table.copy_(torch.randperm(pages, device="cuda").to(torch.int32).reshape(batch, -1))
        out.fill_(torch.nan)
        graph.replay()
        for b, length in enumerate(lengths.tolist()):
            rows = slice(b, b + 1)
            own_k, own_v = (x[table[b].long()].reshape(1, -1, 8, 128)[:, :length] for x in (k, v))
            expected = flashgen.attention(q[rows], own_k, own_v)
            torch.testing.assert_close(out[rows].float(), expected.float(), rtol=0.02, atol=0.02)
