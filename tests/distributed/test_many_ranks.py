"""Sixteen ranks as threads of one process, by the process group of PyTorch's own tests: collectives of many
ranks, with no more than one interpreter.
"""

from __future__ import annotations

import threading

import pytest

import flashgen

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

pytest.importorskip("torch.testing._internal.distributed.multi_threaded_pg")

WORLD = 16


def on_threads(function):
    """What ``function(rank)`` returns on each of WORLD threads, each a rank of its own default group."""
    from torch._C._distributed_c10d import _set_thread_isolation_mode
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    _set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store, results, errors = dist.HashStore(), [None] * WORLD, []

    def work(rank):
        try:
            dist.init_process_group("threaded", rank=rank, world_size=WORLD, store=store)
            results[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001  # the test raises it
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(WORLD)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize(
    ("method", "layout", "cu"),
    [
        ("gather", "zigzag", None),
        ("gather", "documents", (0, 300, 301, 1300)),
        ("gather", "whole_documents", (0, 90, 91, 2500, 2570, 2600, 2700, 2755)),
        ("ulysses", "zigzag", None),
    ],
)
def test_sixteen_ranks_give_what_one_process_gives(method, layout, cu):
    tokens = cu[-1] if cu else 333
    generator = torch.Generator().manual_seed(1)
    lead = () if cu else (1,)
    shapes = ((*lead, tokens, heads, 8) for heads in (16, 2, 2, 16))
    q, k, v, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    lengths = {}
    if cu:
        of_q, of_kv = (torch.tensor(cu, dtype=torch.int32) for _ in "qk")
        lengths = {"cu_seqlens_q": of_q, "cu_seqlens_kv": of_kv}
    out = flashgen.attention(*inputs, causal=True, **lengths)
    out.backward(dout)
    dim, more = (0, {"cu_seqlens": cu}) if cu else (1, {"seqlen": tokens})

    def rank_of(rank):
        distributed = flashgen.distributed
        options = {"layout": layout, "cu_seqlens": cu}
        shards = [distributed.shard(x, dim, **options).requires_grad_() for x in (q, k, v)]
        out = distributed.attention(*shards, causal=True, method=method, layout=layout, **more)
        out.backward(distributed.shard(dout, dim, **options))
        return [out.detach(), *(x.grad for x in shards)], distributed.positions(
            **({"cu_seqlens": cu} if cu else {"seqlen": tokens}), layout=layout
        )

    from flashgen.distributed.layouts import runs_of

    for rank, (results, positions) in enumerate(on_threads(rank_of)):
        rows = torch.tensor(
            [t for run in runs_of(layout, cu or (0, tokens), WORLD)[rank] for t in range(*run)],
            dtype=torch.int64,
        )
        assert len(positions) == len(rows)
        for ours, right in zip(results, (out.detach(), *(x.grad for x in inputs)), strict=True):
            assert torch.allclose(ours, right.index_select(dim, rows), atol=2e-5)
