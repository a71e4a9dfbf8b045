"""Attention over ranks on GPUs: the bits of a rank's launches, which one GPU shows, and two processes with
NCCL, which need two.
"""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

import flashgen
from flashgen.call.record import AttentionCall, call_of

torch = pytest.importorskip("torch")

from flashgen.distributed import kernels  # noqa: E402
from flashgen.distributed.gather import cu_seqlens_of, rank_major, table_of  # noqa: E402
from flashgen.distributed.layouts import runs_of  # noqa: E402
from flashgen.distributed.segments import launches_of, longest_of, visibility  # noqa: E402

CASES = [
    {"heads": (8, 2), "causal": True},
    {"heads": (8, 2), "causal": True, "head_dim": 64, "dtype": "float16"},
    {"heads": (4, 4), "causal": True, "window": (700, 0)},
    {"heads": (8, 8), "causal": False, "window": (300, 200)},
    {"heads": (4, 1), "causal": False},
    {"heads": (8, 2), "causal": True, "sinks": True, "softcap": 20.0},
    {"heads": (8, 2), "causal": True, "layout": "documents", "cu": (0, 3, 900, 901, 5000, 8192)},
    {"heads": (8, 2), "causal": False, "window": (300, 40), "layout": "documents", "cu": (0, 2500, 8192)},
    {"heads": (8, 2), "causal": True, "layout": "whole_documents", "cu": (0, 3, 900, 901, 5000, 8192)},
]


@pytest.mark.parametrize("tables", [False, True], ids=["launches", "tables"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_launches_of_ranks_have_the_bits_of_one_gpu(case, world, tables):
    """Of ranks whose keys are all here: what `gather` computes, without what it sends. With ``tables`` of one
    batch entry, whose launches take all keys and ranges of them.
    """
    tokens, (heads, kv_heads), dim = 8192, case["heads"], case.get("head_dim", 128)
    dtype, cu, window = (
        getattr(torch, case.get("dtype", "bfloat16")),
        case.get("cu"),
        case.get("window", (-1, -1)),
    )
    lead = () if cu else (1 if tables else 2,)
    q, k, v = (
        torch.randn(*lead, tokens, h, dim, device="cuda").to(dtype) for h in (heads, kv_heads, kv_heads)
    )
    options = {"causal": case["causal"], "softcap": case.get("softcap")}
    if case.get("sinks"):
        options["sinks"] = torch.randn(heads, device="cuda")
    lengths, longest = {}, tokens
    if cu:
        of_q, of_kv = (torch.tensor(cu, dtype=torch.int32, device="cuda") for _ in "qk")
        longest = max(y - x for x, y in pairwise(cu))
        lengths = {
            "cu_seqlens_q": of_q,
            "cu_seqlens_kv": of_kv,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }
    right = flashgen.attention(q, k, v, window_size=window, return_lse=True, **options, **lengths)
    bounds = cu or (0, tokens)
    whole = kernels.Whole(
        1 if cu or tables else 2, tokens, len(cu) - 1 if cu else 0, longest, heads, kv_heads, window
    )
    visible = visibility(case["causal"], window)
    axis = 0 if cu else 1
    for runs in runs_of(case.get("layout", "zigzag"), bounds, world):
        rows = rank_major([tuple(run) for run in runs], q.device)
        queries = q.index_select(axis, rows)
        for launch in launches_of(runs, bounds, visible, bool(cu) or tables):
            keys = rank_major([(x.k_begin, x.k_end) for x in launch.segments], q.device)
            arrays = {"k": k.index_select(axis, keys), "v": v.index_select(axis, keys)}
            arrays["q"] = queries.narrow(axis, launch.rows.start, launch.rows.stop - launch.rows.start)
            if cu:
                of_q, of_kv = cu_seqlens_of(launch, q.device)
                arrays |= {"cu_seqlens_q": of_q, "cu_seqlens_kv": of_kv}
                arrays |= dict(zip(("max_seqlen_q", "max_seqlen_kv"), longest_of(launch), strict=True))
            moved = (
                window[0] if window[0] < 0 else window[0] + launch.shift,
                window[1] if window[1] < 0 else window[1] - launch.shift,
            )
            options |= {"window_size": moved, "return_lse": True}
            call, like = call_of(AttentionCall, **arrays, **options), None
            if tables:
                like, table = call.replace(k=k, v=v), table_of(launch, q.device)
                entry = (x if x.ndim == 4 else x[None] for x in (k, v))
                cache = flashgen.KVCache(*entry, table.lengths, index=table.index, starts=table.starts)
                packed = arrays["q"] if cu else arrays["q"][0]
                of_q = {"cu_seqlens_q": table.cu_seqlens_q, "max_seqlen_q": longest_of(launch)[0]}
                call = call_of(AttentionCall, q=packed, k=cache, **of_q, **options)
            out, lse = kernels.attend(call, whole, launch.shift, like and (lambda like=like: like))
            out, lse = (out, lse) if cu or not tables else (out[None], lse[None])
            here = rows[launch.rows]
            assert torch.equal(out, right[0].index_select(axis, here))
            assert torch.equal(lse, right[1].index_select(-1, here))


def _whole_documents(q, k, v, dout):
    """Documents of which one is cut and the others are whole: bits of one GPU, and gradients."""
    from flashgen.distributed import attention, shard

    cu = (0, 300, 5300, 5301, 6000, 6900, 8192)
    where = {"layout": "whole_documents", "cu_seqlens": cu}
    lengths = {f"cu_seqlens_{side}": torch.tensor(cu, dtype=torch.int32).cuda() for side in ("q", "kv")}
    lengths |= {"max_seqlen_q": 5000, "max_seqlen_kv": 5000}
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = flashgen.attention(*inputs, causal=True, return_lse=True, **lengths)
    right = torch.autograd.grad(out, inputs, dout)
    shards = [shard(x, 0, **where).requires_grad_() for x in (q, k, v)]
    for steps in (None, 1):
        ours = attention(
            *shards, causal=True, method="gather", return_lse=True, kv_heads_per_step=steps, **where
        )
        assert torch.equal(ours[0], shard(out, 0, **where))
        assert torch.equal(ours[1], shard(lse, 1, **where))
        gradients = torch.autograd.grad(ours[0], shards, shard(dout, 0, **where).contiguous())
        for x, y in zip(gradients, right, strict=True):
            part = shard(y, 0, **where).float()
            assert float((x.float() - part).norm() / part.norm()) < 6e-3


def _masks(q, k, v, dout):
    """Masks by a line, of one sequence and of packed documents, beside one GPU."""
    from flashgen.distributed import attention, shard

    tokens, cu = q.shape[1], (0, 300, 5300, 5301, 8192)
    doc = torch.arange(tokens, dtype=torch.int32, device=q.device) // 700
    masks = (
        flashgen.Mask("documents", doc=doc),
        flashgen.Mask("kv <= q and (q - kv < width[h] or kv < 64)", width=doc[::1024].contiguous() * 99),
        flashgen.Mask.from_array(torch.rand(tokens, tokens, device=q.device) < 0.5),
    )
    cases = [(mask, None, layout) for mask in masks for layout in ("zigzag", "contiguous")]
    cases += [(mask, cu, layout) for mask in masks[:2] for layout in ("documents", "whole_documents")]
    for mask, bounds, layout in cases:
        # The same mask on both ranks: an array of random numbers is drawn on each.
        for x in mask.arrays.values():
            torch.distributed.broadcast(x, 0)
        axis, lengths = 1 if bounds is None else 0, {}
        arrays = [x if bounds is None else x[0] for x in (q, k, v, dout)]
        if bounds is not None:
            ends = torch.tensor(bounds, dtype=torch.int32).cuda()
            lengths = {f"cu_seqlens_{side}": ends for side in ("q", "kv")}
            lengths |= {"max_seqlen_q": 5000, "max_seqlen_kv": 5000}
        inputs = [x.clone().requires_grad_() for x in arrays[:3]]
        out = flashgen.attention(*inputs, mask=mask, **lengths)
        right = torch.autograd.grad(out, inputs, arrays[3])
        where = {"layout": layout, "cu_seqlens": bounds}
        shards = [shard(x, axis, **where).requires_grad_() for x in arrays[:3]]
        for method in ("gather", "ulysses"):
            ours = attention(*shards, mask=mask, method=method, **where)
            gradients = torch.autograd.grad(ours, shards, shard(arrays[3], axis, **where).contiguous())
            for x, y in zip((ours.detach(), *gradients), (out.detach(), *right), strict=True):
                part = shard(y, axis, **where).float()
                assert float((x.float() - part).norm() / part.norm()) < 8e-3


def _rank(rank, folder):
    """A process of two: `gather`, `ulysses` and their gradients beside one GPU; raises what is wrong."""
    import torch.distributed as dist

    from flashgen.distributed import attention, shard

    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    generator = torch.Generator(device="cuda").manual_seed(7)
    shapes = ((1, 8192, heads, 128) for heads in (8, 2, 2, 8))
    q, k, v, dout = (torch.randn(*x, device="cuda", generator=generator).bfloat16() for x in shapes)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    right = torch.autograd.grad(out, (q, k, v), dout)
    for method in ("gather", "ulysses"):
        for steps in (None, 1):
            shards = [shard(x.detach(), 1).requires_grad_() for x in (q, k, v)]
            passes = []
            for _ in range(2):
                ours = attention(
                    *shards,
                    causal=True,
                    method=method,
                    return_lse=True,
                    deterministic=True,
                    kv_heads_per_step=steps,
                )
                passes.append((*ours, *torch.autograd.grad(ours[0], shards, shard(dout, 1).contiguous())))
            first, second = passes
            assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
            if method == "gather":
                assert torch.equal(first[0], shard(out, 1))
                assert torch.equal(first[1], shard(lse, 2))
            for x, y in zip(first[2:], right, strict=True):
                whole = shard(y, 1).float()
                assert float((x.float() - whole).norm() / whole.norm()) < 6e-3
    options = {"causal": True, "dropout_p": 0.25, "dropout_seed": (5, 7)}
    dropped = attention(*shards, method="ulysses", **options)
    whole = shard(flashgen.attention(q, k, v, **options), 1)
    assert float((dropped - whole).float().norm() / whole.float().norm()) < 6e-3
    _whole_documents(q.detach()[0], k.detach()[0], v.detach()[0], dout[0])
    _masks(q.detach(), k.detach(), v.detach(), dout)
    os.environ["FLASHGEN_CHECK"] = "1"
    with pytest.raises(flashgen.BadParam, match="layout differs between ranks"):
        attention(*shards, causal=True, layout=("zigzag", "contiguous")[rank])
    with pytest.raises(flashgen.DeviceTypeNotSupported, match="NCCL serves GPUs"):
        attention(*(x.cpu() for x in shards), causal=True)
    dist.destroy_process_group()


def test_two_gpus_give_what_one_gives(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), 2)
