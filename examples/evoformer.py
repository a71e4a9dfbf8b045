"""Train attention with a pair bias, as in Evoformer: once with flashgen, once with PyTorch's own.

    python examples/evoformer.py                      # on a GPU in bfloat16, else in host memory in fp32
    python examples/evoformer.py --steps 500

Each row of an alignment has residues in pairs: a residue decides its partner. Some residues are masked, and
the model fills them in from their partners. Where a partner is follows from nothing but the pair features,
which all rows share: they become a bias of each head, (heads, residues, residues), so its gradient is a sum
over the rows. Prints the loss of both, and how far the curves are apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import flashgen

LETTERS = 8  # and one that stands for a masked residue
_MASKED_SHARE = 0.2


@dataclass(frozen=True)
class Size:
    """Of the model and its alignments: ``width`` in channels, ``rows`` of ``residues`` in a step."""

    width: int
    heads: int
    residues: int
    rows: int


def by_flashgen(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention of (rows, residues, heads, head_dim) with a bias (heads, residues, residues)."""
    return flashgen.attention(q, k, v, score="bias", params={"bias": bias})


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The same by PyTorch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]).transpose(1, 2)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ATTENTIONS: dict[str, Attend] = {"flashgen": by_flashgen, "sdpa": by_sdpa}


class RowAttention(nn.Module):
    """Attention among the residues of a row, with a bias from the pair features."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.head_dim = size.width // size.heads
        self.letters = nn.Embedding(LETTERS + 1, size.width)
        self.pairs = nn.Parameter(torch.zeros(size.residues, size.residues, size.heads))
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, LETTERS)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.letters(rows)
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).chunk(3, dim=2)
        bias = self.pairs.permute(2, 0, 1).to(q.dtype).contiguous()
        return self.out(x + self.attend(q, k, v, bias).flatten(2))


def alignment(
    size: Size, generator: torch.Generator, partners: Tensor, code: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows whose residues decide their partners, and which residues are masked."""
    rows = torch.randint(LETTERS, (size.rows, size.residues), generator=generator)
    first = torch.arange(size.residues) < partners
    rows = torch.where(first, rows, code[rows[:, partners]])
    masked = torch.rand(rows.shape, generator=generator) < _MASKED_SHARE
    return rows, masked


def train(size: Size, attention: str, steps: int, seed: int = 0, device: str = "cpu") -> list[float]:
    """The loss of each step, in nats a masked residue."""
    torch.manual_seed(seed)
    model = RowAttention(size, ATTENTIONS[attention]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    generator = torch.Generator().manual_seed(seed)
    # Residues in pairs, and a letter's partner: the code is its own inverse.
    order = torch.randperm(size.residues, generator=generator).view(2, -1)
    partners = torch.empty(size.residues, dtype=torch.long)
    partners[order[0]], partners[order[1]] = order[1], order[0]
    code = LETTERS - 1 - torch.arange(LETTERS)
    losses = []
    for _ in range(steps):
        rows, masked = alignment(size, generator, partners, code)
        shown = rows.masked_fill(masked, LETTERS).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(shown)
        loss = nn.functional.cross_entropy(logits[masked.to(device)].float(), rows[masked].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if gpu else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--residues", type=int, default=12)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in ("steps", "width", "heads", "residues", "rows"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; expected 1 or more")
    if options.width % (8 * options.heads):
        parser.error(
            f"--width is {options.width}; {options.heads} heads need a multiple of {8 * options.heads}"
        )
    if options.residues % 2:
        parser.error(f"--residues is {options.residues}; residues come in pairs")
    size = Size(options.width, options.heads, options.residues, options.rows)
    curves = {}
    for name in ATTENTIONS:
        curves[name] = losses = train(size, name, options.steps, options.seed, options.device)
        print(f"{name:9} loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    print(f"the curves are at most {apart:.3g} apart")


if __name__ == "__main__":
    main()
