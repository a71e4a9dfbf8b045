"""The backward kernel of small problems on Hopper: its results, the calls that it is taken for, the same bits
each time."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flashgen  # noqa: E402
from gpu.test_backward_gpu import MASKS, Call, check  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
    ),
]


def tiles_of(head_dim):
    """The tiles by name: thread blocks of one kind, and of both."""
    return ("", "both") if head_dim <= 64 else ("",)


@pytest.mark.parametrize("mask", ["none", "causal", "local"])
@pytest.mark.parametrize("head_dims", [(d, d) for d in (32, 64, 80, 96, 128)] + [(112, 72)], ids=str)
def test_within_the_bound(head_dims, mask):
    for index, dtype in enumerate(("fp16", "bf16")):
        heads = (4, 4) if index else (6, 2)
        for seqlen_q, seqlen_kv in ((300, 429), (1, 1), (700, 260), (130, 1100), (512, 512)):
            shape = (2, seqlen_q, seqlen_kv, *heads)
            options = {"dlse": index == 0, "order": "direct", **MASKS[mask]}
            for tile in tiles_of(max(head_dims)):
                check(shape, head_dims, dtype, target="sm90", tile=tile, **options)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv"), [(1, 200), (239, 1), (113, 203), (256, 512), (1023, 1024), (1024, 1023)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(head_dim, seqlen_q, seqlen_kv):
    for options in ({}, {"causal": True}, {"mask_type": "causal_top_left"}, {"window_size": (7, 0)}):
        shape = (1, seqlen_q, seqlen_kv, 2, 1)
        for tile in tiles_of(head_dim):
            check(shape, (head_dim, head_dim), "bf16", target="sm90", tile=tile, order="direct", **options)


@pytest.mark.parametrize("strided", [False, True])
def test_more_tiles_than_multiprocessors(strided):
    """Which it is not taken for, but which it computes."""
    for options in ({}, {"causal": True}):
        shape = (3, 900, 1000, 16, 8)
        for tile in tiles_of(64):
            check(
                shape, (64, 64), "bf16", target="sm90", tile=tile, order="direct", strided=strided, **options
            )


@pytest.mark.parametrize("causal", [False, True])
def test_a_small_call_takes_it(causal):
    if torch.cuda.get_device_properties(0).multi_processor_count < 128:
        pytest.skip("its thread blocks would not run all at once here")
    call = Call((1, 512, 512, 16, 16), (64, 64), "bf16", causal=causal, dlse=False)
    out, lse = call.forward()
    inputs = {"dout": call.dout, "q": call.q, "k": call.k, "v": call.v, "out": out, "lse": lse}
    for deterministic in (False, True):
        plan = flashgen.plan_backward(**inputs, causal=causal, deterministic=deterministic)
        assert plan.variant.spec == "flash_bwd_direct_sm90"
        assert plan.variant.tile_name == "both"
        assert plan.workspace_bytes == 0
        found = flashgen.attention_backward(**inputs, causal=causal, deterministic=deterministic)
        call.check(found, plan.problem)


@pytest.mark.parametrize("tile", tiles_of(64))
def test_the_same_bits_each_time(tile):
    call = Call((1, 512, 512, 8, 4), (64, 64), "bf16", causal=True)
    plan = call.plan("sm90", deterministic=True, tile=tile, order="direct")
    first = [x.clone() for x in call.run(plan)]
    other = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(100):
        with torch.cuda.stream(torch.cuda.Stream()):
            other @ other
        assert all(torch.equal(x, y) for x, y in zip(call.run(plan), first, strict=True))
    torch.cuda.synchronize()
