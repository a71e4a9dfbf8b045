"""GPU time of the gradient of a bias, slopes or a table, beside PyTorch's kernels. Needs a GPU and PyTorch.

    python benchmarks/array_gradients.py [--rounds N] [--json FILE]

Each cell is a backward pass with the gradients of q, k, v and of the array, on graphs that are retained, in
the same interleaved rounds: flashgen's, flashgen's without the array's gradient, FlexAttention's, and SDPA's
by its memory-efficient kernel, which takes a bias. Rates count the work of the plain backward pass: 10 FLOP
for each score and dimension of a head.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import flashgen
from flashgen.tools.bench.hosts import TorchHost
from flashgen.tools.bench.timing import Step, time_interleaved

FORMULAS = {
    "bias": "score + a[b, h, q, kv]",
    "slopes": "score + a[b, h] * (kv - q)",
    "table": "score + a[h, min(abs(kv - q), 127)]",
}


@dataclass(frozen=True)
class Cell:
    """``array`` is one of FORMULAS, of ``shape``; lengths and heads of q, k and v are the same."""

    name: str
    array: str
    shape: tuple[int, ...]
    batch: int = 4
    seqlen: int = 4096
    heads: int = 16
    head_dim: int = 128
    array_dtype: str = "bfloat16"

    @property
    def flops(self) -> float:
        """Of the plain backward pass."""
        return 10 * self.batch * self.heads * self.seqlen**2 * self.head_dim


CELLS = (
    Cell("bias (1, h, q, kv) bf16 4k", "bias", (1, 16, 4096, 4096)),
    Cell("bias (1, h, q, kv) fp32 4k", "bias", (1, 16, 4096, 4096), array_dtype="float32"),
    Cell("bias (b, h, q, kv) bf16 2k", "bias", (4, 16, 2048, 2048), seqlen=2048),
    Cell("bias (b, 1, 1, kv) bf16 4k", "bias", (4, 1, 1, 4096)),
    Cell("slopes (h) 4k", "slopes", (16,), array_dtype="float32"),
    Cell("table of 128 distances (h, d) 4k", "table", (16, 128), array_dtype="float32"),
    # Of AlphaFold's size: many rows share a pair bias.
    Cell("Evoformer: 256 rows, bias (1, h, q, kv) bf16, 384, d32", "bias", (1, 8, 384, 384), 256, 384, 8, 32),
    Cell("triangle: 256 rows, bias (1, h, q, kv) bf16, 256, d32", "bias", (1, 4, 256, 256), 256, 256, 4, 32),
    Cell("512 rows, bias (1, h, q, kv) bf16, 256, d64", "bias", (1, 8, 256, 256), 512, 256, 8, 64),
)


def by_flashgen(cell: Cell, q: Any, k: Any, v: Any, array: Any) -> Any:
    return flashgen.attention(q, k, v, score=FORMULAS[cell.array], params={"a": array})


def by_sdpa(cell: Cell, q: Any, k: Any, v: Any, array: Any) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if cell.array != "bias":
        raise NotImplementedError("SDPA takes a bias alone")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = array.to(q.dtype).expand(cell.batch, cell.heads, cell.seqlen, cell.seqlen)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def by_flex_attention(cell: Cell, q: Any, k: Any, v: Any, array: Any) -> Any:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._functorch.config.donated_buffer = False  # the graph is retained
    whole = array
    if cell.array == "bias":
        whole = array.expand(cell.batch, cell.heads, cell.seqlen, cell.seqlen)

    def modify(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if cell.array == "bias":
            return score + whole[b, h, i, j]
        if cell.array == "slopes":
            return score + array[h] * (j - i)
        return score + array[h, (j - i).abs().clamp(max=127)]

    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return compiled(q, k, v, score_mod=modify).transpose(1, 2)


Attend = Callable[[Cell, Any, Any, Any, Any], Any]
PEERS: dict[str, Attend] = {
    "flashgen": by_flashgen,
    "flashgen, q, k and v alone": by_flashgen,
    "FlexAttention": by_flex_attention,
    "SDPA efficient": by_sdpa,
}


def backward(cell: Cell, attend: Attend, arrays: list[Any], of: list[Any]) -> Callable[[], Any]:
    """A backward pass with gradients of ``of``, some of the arrays, of a forward pass that is run here."""
    out = attend(cell, *arrays)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, of, dout, retain_graph=True)


def prepared(cell: Cell, device: str) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The backward passes of a cell by their names, and why peers have none."""
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in "qkv")
    array = torch.randn(cell.shape, device=device) / cell.seqlen
    array = array.to(getattr(torch, cell.array_dtype)).requires_grad_()
    calls, failures = {}, {}
    for name, attend in PEERS.items():
        of = [q, k, v] if "alone" in name else [q, k, v, array]
        used = array.detach() if "alone" in name else array
        try:
            calls[name] = backward(cell, attend, [q, k, v, used], of)
            calls[name]()
        except (RuntimeError, NotImplementedError, torch._dynamo.exc.TorchDynamoException) as error:
            failures[name] = str(error).partition("\n")[0]
            calls.pop(name, None)
    return calls, failures


def main() -> None:
    """Measure and print a line per pass; with ``--json`` write the same numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    host, report = TorchHost(), []
    for cell in CELLS:
        calls, failures = prepared(cell, "cuda")
        steps = {name: Step(call, 1) for name, call in calls.items()}
        timings = time_interleaved(steps, host, rounds=options.rounds, sample_ms=20.0)
        ms = {name: timing.median_ms for name, timing in timings.items()}
        report.append({"cell": asdict(cell), "ms": ms, "without": failures})
        for name, time in ms.items():
            print(f"{cell.name:56}{name:28}{time:9.3f} ms {cell.flops / time / 1e9:7.0f} TFLOP/s", flush=True)
    if options.json:
        from flashgen.tools.bench import environment

        whole = {"environment": environment.describe(), "cells": report}
        options.json.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
