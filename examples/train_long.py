"""Train a small GPT on documents that are cut over processes, and once more in one process, from one seed.

    torchrun --nproc-per-node 2 examples/train_long.py                  # NCCL on GPUs, else gloo on the CPU
    torchrun --nproc-per-node 2 examples/train_long.py --method ulysses

Each process has a part of the tokens of every document (layout "documents"), and the whole model. Its loss is
the mean over all tokens of all processes, so gradients of weights are summed. Prints the losses of both
trainings, which are equal but for rounding.
"""

from __future__ import annotations

import argparse
import os
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flashgen
from flashgen import distributed
from train_gpt import GPT, Attend, Size, story


class LongGPT(GPT):
    """The GPT of train_gpt.py, for tokens at any positions of their documents."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


def cut(tokens: int, parts: int, generator: torch.Generator) -> list[int]:
    """The bounds of documents of random lengths."""
    inside = torch.randperm(tokens - 1, generator=generator)[: parts - 1] + 1
    return [0, *sorted(inside.tolist()), tokens]


def train(
    size: Size,
    steps: int,
    *,
    over_ranks: bool,
    method: str = "auto",
    documents: int = 4,
    seed: int = 0,
    device: str = "cpu",
) -> list[float]:
    """The loss of each step, of ``size.batch`` * ``size.context`` tokens in so many documents: over all ranks
    or in this process alone.
    """
    torch.manual_seed(seed)
    bounds: list[int] = []
    model = LongGPT(size, attend_by(bounds, over_ranks, method)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text, generator = story(20_000, seed), torch.Generator().manual_seed(seed)
    total, losses = size.batch * size.context, []
    for _ in range(steps):
        bounds[:] = cut(total, documents, generator)
        start = int(torch.randint(len(text) - total - 1, (1,), generator=generator))
        tokens = text[start : start + total + 1].long().to(device)
        inputs, targets = tokens[:-1], tokens[1:]
        positions = torch.cat([torch.arange(y - x) for x, y in pairwise(bounds)]).to(device)
        if over_ranks:
            inputs, targets = (
                distributed.shard(x, 0, layout="documents", cu_seqlens=bounds) for x in (inputs, targets)
            )
            positions = distributed.positions(layout="documents", cu_seqlens=bounds, device=device)
        with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=device != "cpu"):
            logits = model(inputs[None], positions[None])
        loss = nn.functional.cross_entropy(logits[0].float(), targets, reduction="sum") / total
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if over_ranks:
            for x in (loss, *(weight.grad for weight in model.parameters())):
                dist.all_reduce(x)
        optimizer.step()
        losses.append(float(loss))
    return losses


def attend_by(bounds: list[int], over_ranks: bool, method: str) -> Attend:
    """Causal attention of packed documents, whose bounds each step sets anew. q, k and v: (1, tokens, heads,
    head_dim).
    """

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of_q, of_kv = (torch.tensor(bounds, dtype=torch.int32, device=q.device) for _ in range(2))
        longest = max(y - x for x, y in pairwise(bounds))
        out = flashgen.attention(
            *(x[0] for x in (q, k, v)),
            causal=True,
            cu_seqlens_q=of_q,
            cu_seqlens_kv=of_kv,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return out[None]

    def over_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0] for x in (q, k, v))
        out = distributed.attention(
            q, k, v, layout="documents", method=method, causal=True, cu_seqlens=bounds
        )
        return out[None]

    return over_all if over_ranks else alone


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="auto", choices=["auto", "gather", "ulysses"])
    parser.add_argument("--steps", type=int, default=100 if gpu else 20)
    parser.add_argument("--context", type=int, default=1 << 15 if gpu else 512)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/train_long.py")
    device = "cpu"
    if gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    size = Size(4, 512, 8, 4, options.context, 1) if gpu else Size(2, 64, 4, 2, options.context, 1)
    curves = [
        train(size, options.steps, over_ranks=over, method=options.method, device=device)
        for over in (True, False)
    ]
    if dist.get_rank() == 0:
        for step, (over, alone) in enumerate(zip(*curves, strict=True)):
            print(f"step {step:3}  {dist.get_world_size()} processes {over:.5f}  one process {alone:.5f}")
        apart = max(abs(x - y) for x, y in zip(*curves, strict=True))
        print(f"the losses are at most {apart:.2g} apart")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
