"""Host time of calls, on arrays of CuPy and, where it is installed, of PyTorch. Needs a GPU.

    python benchmarks/host_time.py [--json FILE]

A call's time is what it takes on the host to queue its kernels: the median of many calls, with the queue
drained between batches so that it never fills. The goals are 12 µs for `attention`, 8 µs for a held plan, and
12 µs for a held plan that decodes, with either library. `first_use.py` has the time of first uses.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CALLS, BATCH = 4000, 200
SHAPE = (1, 128, 16, 64)
Figures = dict[str, tuple[float, float]]


def main() -> None:
    """Measure and print a table; with ``--json`` write the same numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    figures = on_cupy()
    if find_spec("torch") is not None:
        figures |= {f"PyTorch: {name}": found for name, found in on_torch().items()}
    for name, (median, low) in figures.items():
        print(f"{median:9.2f} µs  (10th percentile {low:.2f})  {name}")
    if options.json:
        from flashgen.tools.bench import environment

        report = {"environment": environment.describe(), "calls_us": figures}
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def on_cupy() -> Figures:
    """Median and 10th percentile of the host time in µs, by the kind of call."""
    import cupy

    sets = [
        [cupy.random.standard_normal(SHAPE, dtype=cupy.float32).astype(cupy.float16) for _ in range(4)]
        for _ in range(2)
    ]
    batch, seqlen, heads, _ = SHAPE
    lse, mask = cupy.empty((batch, heads, seqlen), cupy.float32), cupy.zeros((seqlen, seqlen), bool)
    (q, k, _, out), _ = sets
    kinds = calls(sets, lse, mask, cupy.cuda.get_current_stream()) | decoding(cupy.zeros)
    kinds |= {
        "for scale: cupy.add(q, k, out)": lambda: cupy.add(q, k, out),
        "for scale: an empty function": lambda: None,
    }
    return {name: host_time(call, cupy.cuda.Device().synchronize) for name, call in kinds.items()}


def on_torch() -> Figures:
    """As `on_cupy`."""
    import torch

    sets = [[torch.randn(SHAPE, device="cuda", dtype=torch.float16) for _ in range(4)] for _ in range(2)]
    batch, seqlen, heads, _ = SHAPE
    lse = torch.empty((batch, heads, seqlen), device="cuda")
    mask = torch.zeros((seqlen, seqlen), dtype=torch.bool, device="cuda")
    (q, k, _, out), _ = sets
    kinds = calls(sets, lse, mask, torch.cuda.current_stream())
    kinds |= decoding(lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda"))
    kinds |= training(sets[0]) | dropins(sets[0])
    kinds["for scale: torch.add(q, k, out=out)"] = lambda: torch.add(q, k, out=out)
    figures = {name: host_time(call, torch.cuda.synchronize) for name, call in kinds.items()}
    return figures | by_registry(sets[0])


def calls(sets: list[list[Any]], lse: Any, mask: Any, stream: Any) -> dict[str, Callable[[], Any]]:
    """The kinds of call, on two sets of q, k, v and out."""
    import flashgen

    q, k, v, out = sets[0]
    plan, with_lse = flashgen.plan(q, k, v), flashgen.plan(q, k, v, return_lse=True)
    turns = itertools.cycle(sets)

    def in_turn() -> None:
        a, b, c, d = next(turns)
        plan(a, b, c, out=d)

    return {
        "attention(q, k, v)": lambda: flashgen.attention(q, k, v),
        "attention(q, k, v, causal=True)": lambda: flashgen.attention(q, k, v, causal=True),
        "attention(q, k, v, mask=mask)": lambda: flashgen.attention(q, k, v, mask=mask),
        "attention(q, k, v, out=out)": lambda: flashgen.attention(q, k, v, out=out),
        "attention(q, k, v, return_lse=True)": lambda: flashgen.attention(q, k, v, return_lse=True),
        "plan(q, k, v, out=out)": lambda: plan(q, k, v, out=out),
        "plan(q, k, v, out=out), two sets in turn": in_turn,
        "plan(q, k, v, out=out, stream=stream)": lambda: plan(q, k, v, out=out, stream=stream),
        "plan(q, k, v, out=out, lse=lse)": lambda: with_lse(q, k, v, out=out, lse=lse),
        "plan(q, k, v)": lambda: plan(q, k, v),
    }


def decoding(zeros: Callable[[tuple[int, ...], str], Any]) -> dict[str, Callable[[], Any]]:
    """One query for each of 8 sequences on a paged cache, without and with append and rotary; ``zeros`` makes
    an array of a shape and dtype. What is in them makes no difference to the host.
    """
    import flashgen

    q, out, q_rotated = (zeros((8, 1, 32, 128), "float16") for _ in range(3))
    k, v = (zeros((1024, 16, 8, 128), "float16") for _ in "kv")
    lengths, total_lengths = zeros((8,), "int32"), zeros((8,), "int32")
    cache = flashgen.KVCache(k, v, lengths, pages=zeros((8, 128), "int32"))
    new = zeros((8, 1, 8, 128), "float16"), zeros((8, 1, 8, 128), "float16")
    rotary = flashgen.Rotary(zeros((2048, 64), "float32"), zeros((2048, 64), "float32"))
    plan, both = flashgen.plan(q, cache), flashgen.plan(q, cache, append=new, rotary=rotary)
    workspace = zeros((max(1, plan.workspace_bytes, both.workspace_bytes),), "uint8")
    named = {"kv_lengths": lengths, "pages": cache.pages, "out": out, "workspace": workspace}
    written = {"total_lengths": total_lengths, "q_rotated": q_rotated, "out": out, "workspace": workspace}
    return {
        "attention(q, cache)": lambda: flashgen.attention(q, cache),
        "attention(q, cache, append=new, rotary=rotary)": lambda: flashgen.attention(
            q, cache, append=new, rotary=rotary
        ),
        "plan(q, cache, out=out, workspace=workspace)": lambda: plan(q, k, v, **named),
        "plan(q, cache, append=new, rotary=rotary, out=out, workspace=workspace, ...)": lambda: both(
            q, cache, new, rotary=rotary, **written
        ),
    }


def training(tensors: list[Any]) -> dict[str, Callable[[], Any]]:
    """Forward and backward passes of q, k, v and a gradient of the result, and PyTorch's own beside them."""
    import torch

    import flashgen

    *inputs, dout = tensors
    leaves = [x.clone().requires_grad_() for x in inputs]
    plain = [x.transpose(1, 2).contiguous() for x in inputs]
    turned = [x.clone().requires_grad_() for x in plain]
    dout_turned = dout.transpose(1, 2).contiguous()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    grad = torch.autograd.grad
    return {
        "attention(q, k, v), recorded": lambda: flashgen.attention(*leaves),
        "attention(q, k, v) and gradients": lambda: grad(flashgen.attention(*leaves), leaves, dout),
        "for scale: SDPA": lambda: sdpa(*plain),
        "for scale: SDPA, recorded": lambda: sdpa(*turned),
        "for scale: SDPA and gradients": lambda: grad(sdpa(*turned), turned, dout_turned),
    }


def dropins(tensors: list[Any]) -> dict[str, Callable[[], Any]]:
    """The functions of flash-attn, with q, k and v as one sequence and as four packed ones."""
    import torch

    from flashgen.compat import flash_attn
    from flashgen.compat.xformers import memory_efficient_attention

    *inputs, dout = tensors
    leaves = [x.clone().requires_grad_() for x in inputs]
    rows = inputs[0].shape[0] * inputs[0].shape[1]
    packed = [x.reshape(rows, *x.shape[2:]) for x in inputs]
    ends = torch.arange(0, rows + 1, rows // 4, dtype=torch.int32, device=dout.device)
    bounds = (ends, ends, rows // 4, rows // 4)
    return {
        "flash_attn_func(q, k, v)": lambda: flash_attn.flash_attn_func(*inputs),
        "flash_attn_func(q, k, v) and gradients": lambda: torch.autograd.grad(
            flash_attn.flash_attn_func(*leaves), leaves, dout
        ),
        "flash_attn_varlen_func(q, k, v, ...)": lambda: flash_attn.flash_attn_varlen_func(*packed, *bounds),
        "memory_efficient_attention(q, k, v)": lambda: memory_efficient_attention(*inputs),
    }


def by_registry(tensors: list[Any]) -> Figures:
    """SDPA with flashgen in PyTorch's registry of flash attention, from PyTorch 2.11 on."""
    import torch
    from torch.nn import attention

    from flashgen.compat.torch import register

    if not hasattr(attention, "activate_flash_attention_impl"):
        return {}
    *inputs, dout = (x.transpose(1, 2).contiguous() for x in tensors)
    leaves = [x.clone().requires_grad_() for x in inputs]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    kinds = {
        "SDPA by the registry": lambda: sdpa(*inputs),
        "SDPA by the registry, and gradients": lambda: torch.autograd.grad(sdpa(*leaves), leaves, dout),
    }
    register()
    attention.activate_flash_attention_impl("flashgen")
    try:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            return {name: host_time(call, torch.cuda.synchronize) for name, call in kinds.items()}
    finally:
        attention.restore_flash_attention_impl()


def host_time(call: Callable[[], Any], drain: Callable[[], None]) -> tuple[float, float]:
    """Median and 10th percentile of the time of ``call`` in µs."""
    times = []
    for _ in range(CALLS // BATCH):
        drain()
        for _ in range(BATCH):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1e3)
    drain()
    times = sorted(times[BATCH:])  # the first batch warms up
    return statistics.median(times), times[len(times) // 10]


if __name__ == "__main__":
    main()
