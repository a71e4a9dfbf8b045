"""Train a small GPT in PyTorch, once with flashgen's attention and once with PyTorch's own, from one seed.

    python examples/train_gpt.py                      # on a GPU in bfloat16, else in host memory in fp32
    python examples/train_gpt.py --steps 500 --chart loss.png
    python examples/train_gpt.py --busy               # how much of a step the GPU is at work, too

The text is made on the spot: who gives what to whom, and who has it then, which takes attention to foretell.
Prints the loss and the tokens per second of both; ``--chart`` draws both loss curves, with matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import flashgen

NAMES = ["Ada", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jo", "Kim", "Lee"]
COLOURS = ["red", "blue", "green", "white", "black"]
THINGS = ["key", "book", "cup", "coin", "map", "lamp", "rope"]


@dataclass(frozen=True)
class Size:
    """Of the model and its batches: ``width`` in channels, ``context`` in tokens, ``batch`` in sequences."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    context: int
    batch: int


def story(sentences: int, seed: int) -> Tensor:
    """The characters of a text, as bytes."""
    rng = random.Random(seed)
    lines = []
    for _ in range(sentences):
        giver, taker = rng.sample(NAMES, 2)
        things = [f"{rng.choice(COLOURS)} {rng.choice(THINGS)}" for _ in range(2)]
        given = rng.choice(things)
        lines.append(
            f"{giver} has the {things[0]} and the {things[1]}. {giver} gives {taker} the {given}. "
            f"Now {taker} has the {given}.\n"
        )
    return torch.frombuffer(bytearray("".join(lines), "ascii"), dtype=torch.uint8)


def by_flashgen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (batch, seqlen, heads, head_dim)."""
    return flashgen.attention(q, k, v, causal=True)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by PyTorch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
ATTENTIONS: dict[str, Attend] = {"flashgen": by_flashgen, "sdpa": by_sdpa}


class Block(nn.Module):
    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.heads = (size.heads, size.kv_heads, size.kv_heads)
        self.head_dim = size.width // size.heads
        self.attend = attend
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.qkv = nn.Linear(size.width, sum(self.heads) * self.head_dim)
        self.out = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        # q, k and v are views of one array, read by their strides.
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.head_dim))
        x = x + self.out(self.attend(*qkv.split(self.heads, dim=2)).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size, attend) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def train(
    size: Size, attention: str, steps: int, seed: int = 0, device: str = "cpu", compiled: bool = False
) -> tuple[list[float], float]:
    """The loss of each step, and tokens per second without the first steps, which compile and warm up."""
    torch.manual_seed(seed)
    model = GPT(size, ATTENTIONS[attention]).to(device)
    step_model = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    warm_up = max(1, min(20, steps // 4))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )
    text, batches = story(20_000, seed).to(device), torch.Generator().manual_seed(seed)
    window = torch.arange(size.context + 1, device=device)
    losses, begin, untimed = [], 0.0, min(5, steps - 1)
    for step in range(steps):
        if step == untimed:
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
        starts = torch.randint(len(text) - size.context - 1, (size.batch, 1), generator=batches)
        tokens = text[starts.to(device) + window].long()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = step_model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    losses = torch.stack(losses).tolist()  # waits for the GPU
    seconds = time.perf_counter() - begin
    return losses, (steps - untimed) * size.batch * size.context / seconds


def busy(size: Size, attention: str, steps: int, given: argparse.Namespace) -> float:
    """Milliseconds of a step in which the GPU is at work, by PyTorch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        train(size, attention, steps, given.seed, "cuda", given.compile)
    return sum(each.self_device_time_total for each in seen.key_averages()) / 1e3 / steps


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Both loss curves on one chart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=False):
        axes.plot(losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss, nats a character", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if gpu else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=300 if gpu else 60)
    parser.add_argument("--layers", type=int, default=6 if gpu else 2)
    parser.add_argument("--width", type=int, default=768 if gpu else 64)
    parser.add_argument("--heads", type=int, default=12 if gpu else 4)
    parser.add_argument("--kv-heads", type=int, default=4 if gpu else 2)
    parser.add_argument("--context", type=int, default=2048 if gpu else 128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model, in one graph")
    parser.add_argument("--busy", action="store_true", help="also how long the GPU is at work in a step")
    parser.add_argument("--chart", type=Path, help="a PNG of both loss curves")
    given = parser.parse_args()
    for name in ("steps", "layers", "width", "heads", "kv_heads", "context", "batch"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(given, name)}; expected 1 or more")
    if given.width % (8 * given.heads):
        parser.error(f"--width is {given.width}; {given.heads} heads need a multiple of {8 * given.heads}")
    if given.heads % given.kv_heads:
        parser.error(f"--kv-heads is {given.kv_heads}; it has to divide the {given.heads} heads")
    if given.busy and given.device != "cuda":
        parser.error("--busy is about a GPU; pass --device cuda")
    if given.chart and importlib.util.find_spec("matplotlib") is None:
        parser.error("--chart needs matplotlib")
    size = Size(given.layers, given.width, given.heads, given.kv_heads, given.context, given.batch)
    curves = {}
    for name in ATTENTIONS:
        losses, rate = train(size, name, given.steps, given.seed, given.device, given.compile)
        curves[name] = losses
        print(f"{name:9} loss {losses[0]:.3f} -> {losses[-1]:.3f}, {rate:,.0f} tokens/s")
        if given.busy:
            step, at_work = 1e3 * size.batch * size.context / rate, busy(size, name, 20, given)
            print(f"{name:9} {step:.2f} ms a step, the GPU at work for {at_work:.2f}")
    apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    print(f"the curves are at most {apart:.3g} apart")
    if given.chart:
        draw(curves, given.chart)


if __name__ == "__main__":
    main()
