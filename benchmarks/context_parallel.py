"""Attention of a sequence over several GPUs: milliseconds of both passes, beside one GPU, beside the
prediction of `flashgen.distributed.partition`, and beside torch's context_parallel with cuDNN.

    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --json results.json --trace timeline.json
    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --small        # on CPUs, by gloo: that it runs

Heads 32 and 8 of 128, bf16, causal. At the first length, which one GPU computes too, bits of the forward
pass, errors of gradients and repeatability are checked. A time is the largest of all ranks, the median of
several rounds. A speed-up is over one GPU at its rate of the first length.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import flashgen
from flashgen import distributed
from flashgen.distributed.layouts import runs_of, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEADS, HEAD_DIM = (32, 8), 128
DOCUMENTS = 256


@dataclass(frozen=True)
class Cell:
    """One line of the results. ``speedup`` is over one GPU at its rate of the first length."""

    name: str
    tokens: int
    ranks: int
    forward_ms: float
    backward_ms: float | None
    predicted_ms: tuple[float, float] | None
    speedup: tuple[float, float | None]


class Bench:
    """A process of the benchmark."""

    def __init__(self, small: bool, rounds: int) -> None:
        self.gpu = torch.cuda.is_available() and not small
        self.device = torch.device("cpu")
        if self.gpu:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.gpu else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.heads, self.head_dim = (HEADS, HEAD_DIM) if self.gpu else ((8, 4), 16)
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self.rounds = rounds
        kind = self.device.type
        self.meshes = {"": init_device_mesh(kind, (self.world,))}
        if self.world >= 4:
            self.meshes["2-D"] = init_device_mesh(kind, (2, self.world // 2))
        self.cells: list[Cell] = []
        self.facts: dict[str, Any] = {}
        self.one_gpu: tuple[float, float] = (0.0, 0.0)
        self.one_flops = 0.0

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def time_ms(self, function: Callable[[], Any]) -> float:
        """The median of rounds, each the largest time of all ranks."""
        function()
        return statistics.median(self._round(function) for _ in range(self.rounds))

    def _round(self, function: Callable[[], Any]) -> float:
        if self.gpu:
            torch.cuda.synchronize()
        dist.barrier()
        if self.gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            ms = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            function()
            ms = 1e3 * (time.perf_counter() - start)
        longest = torch.tensor([ms], device=self.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)

    def tensors(self, tokens: int, seed: int, lead: tuple[int, ...] = (1,)) -> list[Tensor]:
        """q, k, v and dout of so many tokens."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        heads = (self.heads[0], self.heads[1], self.heads[1], self.heads[0])
        return [
            torch.randn(
                *lead, tokens, count, self.head_dim, device=self.device, dtype=self.dtype, generator=generator
            )
            for count in heads
        ]

    def alone(self, tokens: int) -> None:
        """One GPU: times, and whether all ways over ranks give its results."""
        q, k, v, dout = self.tensors(tokens, 5)
        for x in (q, k, v):
            x.requires_grad_()
        out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
        right = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        with torch.no_grad():
            forward = self.time_ms(lambda: flashgen.attention(q, k, v, causal=True))
        backward = self.time_ms(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
        self.one_gpu, self.one_flops = (forward, backward), self.flops(((0, tokens),))
        self.add(Cell("one GPU", tokens, 1, forward, backward, None, (1.0, 1.0)))
        for name, options in self.ways():
            where = {"mesh": options["mesh"]}
            shards = [distributed.shard(x.detach(), 1, **where).requires_grad_() for x in (q, k, v)]
            some = distributed.shard(dout, 1, **where).contiguous()
            results, passes = None, []
            for _ in range(2):
                results = distributed.attention(
                    *shards, causal=True, return_lse=True, deterministic=True, **options
                )
                passes.append((*results, *torch.autograd.grad(results[0], shards, some)))
            dims = (1, 2)
            same = all(
                torch.equal(x, distributed.shard(y, dim, **where))
                for x, y, dim in zip(results, (out.detach(), lse.detach()), dims, strict=True)
            )
            parts = (distributed.shard(x, 1, **where).float() for x in right)
            errors = [
                float((x.float() - y).norm() / y.norm()) for x, y in zip(passes[0][2:], parts, strict=True)
            ]
            repeated = all(torch.equal(x, y) for x, y in zip(*passes, strict=True))
            flags = torch.tensor([same, repeated], dtype=torch.int32, device=self.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MIN)
            worst = torch.tensor(errors, device=self.device)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            self.facts[name] = {
                "bits of one GPU": bool(flags[0]),
                "repeatable": bool(flags[1]),
                "errors of dq, dk, dv": [float(x) for x in worst],
            }
            self.say(f"{name}: {self.facts[name]}")

    def ways(self) -> list[tuple[str, dict[str, Any]]]:
        ways: list[tuple[str, dict[str, Any]]] = [
            (method, {"mesh": self.meshes[""], "method": method}) for method in ("gather", "ulysses")
        ]
        if "2-D" in self.meshes:
            ways.append((f"2 x {self.world // 2}", {"mesh": self.meshes["2-D"]}))
        return ways

    def measure(self, tokens: int, cu_seqlens: list[int] | None = None) -> None:
        """All ways over ranks, of one sequence or of packed documents."""
        layout = "zigzag" if cu_seqlens is None else "documents"
        bounds = (0, tokens) if cu_seqlens is None else tuple(cu_seqlens)
        count = tokens_of(runs_of(layout, bounds, self.world)[self.rank])
        more: dict[str, Any] = {"seqlen": tokens} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        q, k, v, dout = self.tensors(count, self.rank, (1,) if cu_seqlens is None else ())
        for x in (q, k, v):
            x.requires_grad_()
        ideal = self.flops(pairwise(bounds)) / self.one_flops
        for name, options in self.ways():

            def forward(options: dict[str, Any] = options) -> Tensor:
                return distributed.attention(q, k, v, layout=layout, causal=True, **more, **options)

            with torch.no_grad():
                ms = self.time_ms(forward)
            out = forward()
            back = self.time_ms(lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
            del out
            inner = {"gather": 1, "ulysses": self.world}.get(name, self.world // 2)
            part = distributed.partition(
                bounds,
                world=self.world,
                heads=self.heads,
                head_dim=self.head_dim,
                layout=layout,
                inner=inner,
            )
            speedup = tuple(ideal * one / x for one, x in zip(self.one_gpu, (ms, back), strict=True))
            predicted = (part.forward.total, part.backward.total)
            kind = "" if cu_seqlens is None else f", {len(cu_seqlens) - 1} documents"
            self.add(Cell(name + kind, tokens, self.world, ms, back, predicted, speedup))

    def torch_context_parallel(self, tokens: int) -> None:
        """The forward pass of torch's context_parallel with cuDNN, kv heads repeated."""
        if not self.gpu:
            return
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v, _ = self.tensors(tokens, 5)
        group = self.heads[0] // self.heads[1]
        q, k, v = (
            x.repeat_interleave(times, 2).transpose(1, 2).contiguous()
            for x, times in ((q, 1), (k, group), (v, group))
        )
        with (
            torch.no_grad(),
            context_parallel(self.meshes[""], buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]),
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        ):
            ms = self.time_ms(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
        speedup = (self.one_gpu[0] / ms, None)
        self.add(Cell("torch context_parallel, cuDNN", tokens, self.world, ms, None, None, speedup))

    def trace(self, tokens: int, path: Path) -> None:
        """A timeline of both passes of a gather on rank 0, for chrome://tracing, and how long no kernel of
        attention ran in it.
        """
        q, k, v, dout = self.tensors(tokens // self.world, self.rank)
        for x in (q, k, v):
            x.requires_grad_()

        def both() -> None:
            out = distributed.attention(q, k, v, causal=True, method="gather", mesh=self.meshes[""])
            torch.autograd.grad(out, (q, k, v), dout)

        both()
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as profile:
            both()
            if self.gpu:
                torch.cuda.synchronize()
        if self.rank == 0:
            profile.export_chrome_trace(str(path))
            times = {
                event.key: event.self_device_time_total / 1e3
                for event in profile.key_averages()
                if getattr(event, "self_device_time_total", 0)
            }
            for name, ms in sorted(times.items(), key=lambda item: -item[1])[:12]:
                self.say(f"{ms:9.3f} ms  {name[:90]}")

    def flops(self, documents: Any) -> float:
        """Of the forward pass, of causal documents with these bounds."""
        pairs = sum((end - begin) * (end - begin + 1) / 2 for begin, end in documents)
        return 4.0 * self.heads[0] * self.head_dim * pairs

    def add(self, cell: Cell) -> None:
        self.cells.append(cell)
        back = "" if cell.backward_ms is None else f", backward {cell.backward_ms:.2f} ms"
        predicted = ""
        if cell.predicted_ms:
            predicted = f" (predicted {cell.predicted_ms[0]:.2f} and {cell.predicted_ms[1]:.2f})"
        speedup = " and ".join(f"{x:.2f} x" for x in cell.speedup if x is not None)
        self.say(
            f"{cell.name}, {cell.tokens:,} tokens on {cell.ranks}: forward {cell.forward_ms:.2f} ms{back}"
            f"{predicted}; {speedup}"
        )


def zipf(tokens: int, documents: int) -> list[int]:
    """The bounds of documents whose lengths follow Zipf's law, in random order."""
    total = sum(1 / rank for rank in range(1, documents + 1))
    sizes = [max(1, int(tokens / total / rank)) for rank in range(1, documents + 1)]
    random.Random(0).shuffle(sizes)
    bounds = [0]
    for size in sizes:
        bounds.append(min(tokens, bounds[-1] + size))
    return [*bounds[:-1], tokens]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; rank 0 writes the same as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 17, 1 << 19, 1 << 20])
    parser.add_argument("--documents", type=int, default=1 << 19, help="tokens of the packed documents")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="few tokens on CPUs")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--trace", type=Path, help="write a timeline of the first length here")
    options = parser.parse_args(arguments)
    # Multicast over NVLink is off: some hosts reset links when a process with it ends.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    bench = Bench(options.small, 1 if options.small else options.rounds)
    lengths = [bench.world * 256, bench.world * 512] if options.small else options.tokens
    documents = bench.world * 300 if options.small else options.documents
    bench.alone(lengths[0])
    bench.torch_context_parallel(lengths[0])
    for tokens in lengths:
        bench.measure(tokens)
    bench.measure(documents, zipf(documents, 20 if options.small else DOCUMENTS))
    if options.trace:
        bench.trace(lengths[0], options.trace)
    if options.json and bench.rank == 0:
        record = {
            "world": bench.world,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name() if bench.gpu else None,
            "checks": bench.facts,
            "cells": [asdict(cell) for cell in bench.cells],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
