"""Attention of a sequence over several GPUs: milliseconds of both passes, beside one GPU, beside the
prediction of `flashgen.distributed.partition`, and beside torch's context_parallel with cuDNN.

    python benchmarks/context_parallel.py --json results.json --trace timeline.json
    python benchmarks/context_parallel.py --small --ranks 4    # on CPUs, by gloo: that it runs

Starts a process for each GPU of this host, or `--ranks` of them; under torchrun it is one of the processes.
Heads 32 and 8 of 128, bf16, causal. One GPU computes the first length, what is no longer, and packed
documents of no more tokens. "gather, whole documents" is a gather of these in the layout "whole_documents".
At the first length and of these documents bits of the forward pass, errors of gradients and repeatability are
checked. The prediction of a time follows it in brackets. A time is of a call in a row of `--calls`, as layers
follow each other, while the host is ahead of the GPU. It is the largest of all ranks, the median of several
rounds; a long call has fewer calls in a row and fewer rounds, so that a time takes about `--seconds` at most.
A speed-up is over one GPU: at the same length, or at its rate of the first one where it does not compute it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Way(NamedTuple):
    """A way to compute over ranks: its name, the layout of its shards, and the options of the call."""

    name: str
    layout: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One line of the results. ``speedup`` is over one GPU."""

    name: str
    tokens: int
    ranks: int
    forward_ms: float
    backward_ms: float | None
    predicted_ms: tuple[float, float] | None
    speedup: tuple[float, float | None]


class Bench:
    """A process of the benchmark."""

    def __init__(self, small: bool, rounds: int, calls: int, seconds: float, **init: Any) -> None:
        self.gpu = torch.cuda.is_available() and not small
        self.device = torch.device("cpu")
        if self.gpu:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.gpu else "gloo", timeout=timedelta(minutes=2), **init)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.heads, self.head_dim = (HEADS, HEAD_DIM) if self.gpu else ((8, 4), 16)
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self.rounds, self.calls, self.seconds = rounds, calls, seconds
        kind = self.device.type
        self.meshes = {"": init_device_mesh(kind, (self.world,))}
        if self.world >= 4:
            self.meshes["2-D"] = init_device_mesh(kind, (2, self.world // 2))
        self.cells: list[Cell] = []
        self.facts: dict[str, Any] = {}
        self.one_gpu: dict[str, tuple[float, float]] = {}
        self.begin = time.perf_counter()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"{time.perf_counter() - self.begin:5.0f} s  {text}", flush=True)

    def time_ms(self, function: Callable[[], Any]) -> float:
        """The median of rounds, each the largest time of all ranks."""
        function()
        first = self._round(function, 1) / 1e3
        calls = max(1, min(self.calls, int(self.seconds / 2 / first)))
        rounds = max(1, min(self.rounds, int(self.seconds / first / calls)))
        return statistics.median(self._round(function, calls) for _ in range(rounds))

    def _round(self, function: Callable[[], Any], calls: int) -> float:
        """Milliseconds of a call, the mean of ``calls`` in a row; the largest of all ranks."""
        if self.gpu:
            torch.cuda.synchronize()
        dist.barrier()
        if self.gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
            ms = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            for _ in range(calls):
                function()
            ms = 1e3 * (time.perf_counter() - start)
        longest = torch.tensor([ms / calls], device=self.device)
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

    def alone(self, tokens: int, bounds: list[int] | None = None, checked: bool = True) -> None:
        """One GPU: times of one sequence or of packed documents; if ``checked``, also whether all ways over
        ranks give its results.
        """
        q, k, v, dout = self.tensors(tokens, 5, (1,) if bounds is None else ())
        for x in (q, k, v):
            x.requires_grad_()
        options: dict[str, Any] = {"causal": True}
        if bounds is not None:
            for side in ("q", "kv"):
                options[f"cu_seqlens_{side}"] = torch.tensor(bounds, dtype=torch.int32, device=self.device)
                options[f"max_seqlen_{side}"] = max(end - begin for begin, end in pairwise(bounds))
        out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
        right = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        with torch.no_grad():
            forward = self.time_ms(lambda: flashgen.attention(q, k, v, **options))
        backward = self.time_ms(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
        kind = _documents(bounds)
        self.one_gpu[f"{tokens}{kind}"] = forward, backward
        self.add(Cell("one GPU" + kind, tokens, 1, forward, backward, None, (1.0, 1.0)))
        if not checked:
            return
        axis = 1 if bounds is None else 0
        for name, layout, options in self.ways(bounds is not None):
            where = {"mesh": options["mesh"], "layout": layout, "cu_seqlens": bounds}
            shards = [distributed.shard(x.detach(), axis, **where).requires_grad_() for x in (q, k, v)]
            some = distributed.shard(dout, axis, **where).contiguous()
            results, passes = None, []
            for _ in range(2):
                results = distributed.attention(
                    *shards,
                    causal=True,
                    return_lse=True,
                    deterministic=True,
                    layout=layout,
                    cu_seqlens=bounds,
                    **options,
                )
                passes.append((*results, *torch.autograd.grad(results[0], shards, some)))
            same = all(
                torch.equal(x, distributed.shard(y, dim, **where))
                for x, y, dim in zip(results, (out.detach(), lse.detach()), (axis, -1), strict=True)
            )
            parts = (distributed.shard(x, axis, **where).float() for x in right)
            errors = [
                float((x.float() - y).norm() / y.norm()) for x, y in zip(passes[0][2:], parts, strict=True)
            ]
            repeated = all(torch.equal(x, y) for x, y in zip(*passes, strict=True))
            flags = torch.tensor([same, repeated], dtype=torch.int32, device=self.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MIN)
            worst = torch.tensor(errors, device=self.device)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            self.facts[name + kind] = {
                "bits of one GPU": bool(flags[0]),
                "repeatable": bool(flags[1]),
                "errors of dq, dk, dv": [float(x) for x in worst],
            }
            self.say(f"{name}{kind}: {self.facts[name + kind]}")

    def ways(self, packed: bool) -> list[Way]:
        """The ways over ranks, of one sequence or of ``packed`` documents."""
        layout, flat = "documents" if packed else "zigzag", self.meshes[""]
        ways = [Way(method, layout, {"mesh": flat, "method": method}) for method in ("gather", "ulysses")]
        if "2-D" in self.meshes:
            ways.append(Way(f"2 x {self.world // 2}", layout, {"mesh": self.meshes["2-D"]}))
        if packed:
            whole = {"mesh": flat, "method": "gather"}
            ways.insert(1, Way("gather, whole documents", "whole_documents", whole))
        return ways

    def shards(self, tokens: int, cu_seqlens: list[int] | None, layout: str) -> tuple[Any, ...]:
        """q, k, v and dout of this rank, of one sequence or packed documents, and the options of a call."""
        bounds = (0, tokens) if cu_seqlens is None else tuple(cu_seqlens)
        count = tokens_of(runs_of(layout, bounds, self.world)[self.rank])
        options: dict[str, Any] = {"seqlen": tokens} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        *inputs, dout = self.tensors(count, self.rank, (1,) if cu_seqlens is None else ())
        for x in inputs:
            x.requires_grad_()
        return (*inputs, dout, options | {"layout": layout, "causal": True})

    def measure(self, tokens: int, cu_seqlens: list[int] | None = None) -> None:
        """All ways over ranks, of one sequence or of packed documents."""
        alone = self.ms_alone(tokens, cu_seqlens)
        for name, layout, options in self.ways(cu_seqlens is not None):
            q, k, v, dout, more = self.shards(tokens, cu_seqlens, layout)

            forward = partial(distributed.attention, q, k, v, **more, **options)
            with torch.no_grad():
                ms = self.time_ms(forward)
            out = forward()
            back = self.time_ms(partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True))
            del out
            inner = {"gather": 1, "ulysses": self.world}.get(options.get("method"), self.world // 2)
            part = distributed.partition(
                cu_seqlens or (0, tokens),
                world=self.world,
                heads=self.heads,
                head_dim=self.head_dim,
                layout=layout,
                inner=inner,
            )
            speedup = tuple(one / x for one, x in zip(alone, (ms, back), strict=True))
            predicted = (part.forward.total, part.backward.total)
            self.add(Cell(name + _documents(cu_seqlens), tokens, self.world, ms, back, predicted, speedup))

    def masked(self, tokens: int, bounds: list[int]) -> None:
        """Packed documents as a mask by a line of one sequence: one GPU, and a gather."""
        doc = torch.zeros(tokens, dtype=torch.int32)
        doc[bounds[1:-1]] = 1
        mask = flashgen.Mask("documents", doc=doc.cumsum(0, dtype=torch.int32).to(self.device))
        alone: tuple[float, float] | None = None
        for name, ranks in (("one GPU", 1), ("gather", self.world)):
            *inputs, dout = self.tensors(tokens, 5)
            if ranks > 1:
                where = {"mesh": self.meshes[""]}
                *inputs, dout = (distributed.shard(x, 1, **where).contiguous() for x in (*inputs, dout))
                options = where | {"mask": mask, "method": "gather", "seqlen": tokens}
                attend = partial(distributed.attention, *inputs, **options)
            else:
                attend = partial(flashgen.attention, *inputs, mask=mask)
            with torch.no_grad():
                ms = self.time_ms(attend)
            for x in inputs:
                x.requires_grad_()
            back = self.time_ms(partial(torch.autograd.grad, attend(), inputs, dout, retain_graph=True))
            alone = alone or (ms, back)
            speedup = alone[0] / ms, alone[1] / back
            kind = f", {len(bounds) - 1} documents as a mask"
            self.add(Cell(name + kind, tokens, ranks, ms, back, None, speedup))

    def torch_context_parallel(self, tokens: int) -> None:
        """Both passes of torch's context_parallel with cuDNN, kv heads repeated."""
        if not self.gpu:
            return
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn import functional
        from torch.nn.attention import SDPBackend, sdpa_kernel

        *tensors, dout = self.tensors(tokens, 5)
        group = self.heads[0] // self.heads[1]
        times = (1, group, group, 1)
        buffers = [
            x.repeat_interleave(count, 2).transpose(1, 2).contiguous()
            for x, count in zip((*tensors, dout), times, strict=True)
        ]
        del tensors, dout
        with (
            context_parallel(
                self.meshes[""], buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers={*buffers}
            ),
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        ):
            *inputs, dout = buffers

            # context_parallel replaces the function in its module.
            def forward() -> Tensor:
                return functional.scaled_dot_product_attention(*inputs, is_causal=True)

            with torch.no_grad():
                ms = self.time_ms(forward)
            for x in inputs:
                x.requires_grad_()
            out = forward()
            back = self.time_ms(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))
        alone = self.ms_alone(tokens)
        speedup = alone[0] / ms, alone[1] / back
        self.add(Cell("torch context_parallel, cuDNN", tokens, self.world, ms, back, None, speedup))

    def trace(self, tokens: int, path: Path, bounds: list[int] | None = None) -> None:
        """A timeline of both passes of a gather on rank 0, for chrome://tracing; the longest kernels, and how
        long none ran.
        """
        layout = "zigzag" if bounds is None else "whole_documents"
        q, k, v, dout, options = self.shards(tokens, bounds, layout)

        def both() -> None:
            out = distributed.attention(q, k, v, method="gather", mesh=self.meshes[""], **options)
            torch.autograd.grad(out, (q, k, v), dout)

        both()
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as profile:
            both()
            if self.gpu:
                torch.cuda.synchronize()
        if self.rank:
            return
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        kernels = sorted(
            (x["ts"], x["ts"] + x["dur"], x["name"])
            for x in events
            if x.get("cat") in ("kernel", "gpu_memcpy")
        )
        times: dict[str, float] = {}
        idle, last = 0.0, kernels[0][0] if kernels else 0.0
        for begin, end, name in kernels:
            times[name] = times.get(name, 0.0) + (end - begin) / 1e3
            idle, last = idle + max(0.0, begin - last) / 1e3, max(last, end)
        span = (last - kernels[0][0]) / 1e3 if kernels else 0.0
        self.say(f"timeline{_documents(bounds)}: {span:.2f} ms, without a kernel {idle:.2f} ms")
        for name, ms in sorted(times.items(), key=lambda item: -item[1])[:12]:
            self.say(f"{ms:9.3f} ms  {name[:90]}")

    def ms_alone(self, tokens: int, bounds: list[int] | None = None) -> tuple[float, float]:
        """Both passes on one GPU, where not measured by the pairs of the first length that was."""
        times = self.one_gpu.get(f"{tokens}{_documents(bounds)}")
        if times is None:
            (first, times), *_ = self.one_gpu.items()
            ratio = _pairs(bounds or [0, tokens]) / _pairs([0, int(first)])
            times = times[0] * ratio, times[1] * ratio
        return times

    def add(self, cell: Cell) -> None:
        self.cells.append(cell)
        passes = []
        for number, name in enumerate(("forward", "backward")):
            ms = (cell.forward_ms, cell.backward_ms)[number]
            if ms is not None:
                predicted = f" [{cell.predicted_ms[number]:.2f}]" if cell.predicted_ms else ""
                passes.append(f"{name} {ms:.2f}{predicted} ms, {cell.speedup[number]:.2f} x")
        self.say(f"{cell.name}, {cell.tokens:,} tokens on {cell.ranks}: {'; '.join(passes)}")

    def save(self, path: Path | None) -> None:
        """Rank 0 writes all numbers so far as JSON."""
        if path is None or self.rank:
            return
        record = {
            "world": self.world,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name() if self.gpu else None,
            "checks": self.facts,
            "cells": [asdict(cell) for cell in self.cells],
        }
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def zipf(tokens: int, documents: int) -> list[int]:
    """The bounds of documents whose lengths follow Zipf's law, in random order."""
    total = sum(1 / rank for rank in range(1, documents + 1))
    sizes = [max(1, int(tokens / total / rank)) for rank in range(1, documents + 1)]
    random.Random(0).shuffle(sizes)
    bounds = [0]
    for size in sizes:
        bounds.append(min(tokens, bounds[-1] + size))
    return [*bounds[:-1], tokens]


def _documents(bounds: list[int] | None) -> str:
    """What the name of a cell says of packed documents."""
    return "" if bounds is None else f", {len(bounds) - 1} documents"


def _pairs(bounds: list[int]) -> float:
    """The (query, key) pairs of causal documents with these bounds."""
    return sum((end - begin) * (end - begin + 1) / 2 for begin, end in pairwise(bounds))


def _process(rank: int, options: argparse.Namespace, ranks: int, folder: str) -> None:
    """One process of several that `main` starts."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks)}
    init = {"store": dist.FileStore(f"{folder}/rendezvous", ranks), "rank": rank, "world_size": ranks}
    measure(options, **init)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; rank 0 writes the same as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 17, 1 << 19, 1 << 20])
    parser.add_argument("--documents", type=int, default=1 << 19, help="tokens of the packed documents")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=4, help="calls in a row, of which one has a time")
    parser.add_argument("--seconds", type=float, default=20.0, help="about the most that a time takes")
    parser.add_argument("--ranks", type=int, help="processes to start; by default one for each GPU")
    parser.add_argument("--small", action="store_true", help="few tokens on CPUs")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--trace", type=Path, help="write a timeline of the first length here")
    options = parser.parse_args(arguments)
    # Multicast over NVLink is off: some hosts reset links when a process with it ends.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if "RANK" in os.environ:
        measure(options)
        return
    ranks = options.ranks or (2 if options.small else torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (options, ranks, folder), ranks)


def measure(options: argparse.Namespace, **init: Any) -> None:
    """One process: all cells. ``init`` says how processes meet, where the environment does not."""
    few = options.small
    rounds, calls = (1, 1) if few else (options.rounds, options.calls)
    bench = Bench(few, rounds, calls, options.seconds, **init)
    lengths = [bench.world * 256, bench.world * 128] if options.small else options.tokens
    documents = bench.world * 200 if options.small else options.documents
    bounds = zipf(documents, 20 if options.small else DOCUMENTS)
    for tokens in sorted(lengths, key=lambda tokens: tokens != lengths[0]):
        if tokens <= lengths[0]:
            bench.alone(tokens, checked=tokens == lengths[0])
        bench.measure(tokens)
    if documents <= lengths[0]:
        bench.alone(documents, bounds)
    bench.measure(documents, bounds)
    if documents <= lengths[0]:
        bench.masked(documents, bounds)
    bench.save(options.json)
    for tokens in lengths:
        bench.torch_context_parallel(tokens)
    bench.save(options.json)
    if options.trace:
        bench.trace(lengths[0], options.trace)
        bench.trace(documents, options.trace.with_stem(options.trace.stem + "_documents"), bounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
