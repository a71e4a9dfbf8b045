"""Attention problems to check: fresh inputs laid out in poisoned memory, a call, and what must hold after it.

Every array is a view into a larger buffer. The bytes between and around the elements of q, k, v, out and lse
are 0xFF, a NaN in each dtype: a kernel that reads beside its inputs spoils its result, and one that writes
beside its outputs is seen. Masks lie among random bytes.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

import flashgen
from draw import VARIABLE, run_seed, seed_of
from flashgen.operators import reference
from flashgen.operators.attention import normalise
from flashgen.operators.masks import Band
from flashgen.runtime.arrays import view as view_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Generator, Tensor

    from flashgen.operators.operator import Problem

    Attend = Callable[["Arrays"], tuple[Tensor, Tensor]]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
GUARD_BYTES = 1024
# Shapes of masks, by the extents that they have in full; broadcasting supplies the rest.
MASK_SHAPES = ("bhqk", "b1qk", "1hqk", "11qk", "hqk", "qk", "1k", "k", "b11k", "h1k")
LAYOUTS = (
    "contiguous",
    "padded",
    "heads_first",
    "seqlen_first",
    "packed",
    "alternate_heads",
    "alternate_rows",
)
INPUT_LAYOUTS = (*LAYOUTS, "broadcast_batch", "broadcast_heads")
VALUES = ("large", "dominant", "equal", "rising", "falling", "big_values")


@dataclass(frozen=True)
class Mask:
    """``alignment``: the largest power of two, up to 16, that divides its row stride; ``offset`` that of its
    pointer in bytes. ``shape`` is one of MASK_SHAPES. ``content``: "tiles" mixes hidden, visible and random
    64x64 tiles and hidden rows; "blocks" the same in 320x320, so that whole blocks of a kernel are hidden;
    "random" hides each key with probability 0.5; "all" and "nothing"."""

    shape: str = "bhqk"
    dtype: str = "uint8"
    alignment: int = 16
    offset: int = 0
    content: str = "tiles"

    def __str__(self) -> str:
        return f"{self.shape}-{self.dtype}-{self.content}-align{self.alignment}+{self.offset}"


@dataclass(frozen=True)
class Case:
    """One call of attention, without its inputs. ``values`` is "usual" (normal numbers) or one of VALUES;
    ``head_dim_v`` None is that of q and k."""

    batch: int
    seqlen_q: int
    seqlen_kv: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str
    causal: bool = False
    mask_type: str | None = None
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    mask: Mask | None = None
    layout: str = "padded"
    out_layout: str = "padded"
    values: str = "usual"
    head_dim_v: int | None = None

    def __str__(self) -> str:
        widths = f"{self.head_dim}" if self.head_dim_v is None else f"{self.head_dim}v{self.head_dim_v}"
        name = f"{self.dtype}-d{widths}-b{self.batch}-{self.seqlen_q}x{self.seqlen_kv}"
        name += f"-h{self.heads_q}on{self.heads_kv}"
        for each in fields(self)[7:-1]:
            value = getattr(self, each.name)
            if value != each.default:
                label = each.name if value is True else str(value).replace(" ", "")
                name += f"-in_{label}" if each.name == "layout" else f"-{label}"
        return name

    @property
    def width_v(self) -> int:
        """Head dim of v and the output."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v


@dataclass
class Arrays:
    """The arguments of one call. ``options`` are keywords of ``flashgen.attention`` other than the arrays."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor
    lse: Tensor
    options: dict[str, Any]
    buffers: dict[str, Tensor] = field(repr=False)

    def poison(self) -> None:
        """Fill the outputs, and all around them, with NaN."""
        for name in ("out", "lse"):
            self.buffers[name].fill_(-1)

    def written_outside(self) -> list[str]:
        """The outputs whose surroundings are no longer as ``poison`` left them."""
        found = []
        for name, view in (("out", self.out), ("lse", self.lse)):
            rest = self.buffers[name].clone()
            rest.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(-1)
            if bool((rest != -1).any()):
                found.append(name)
        return found


def front_door(arrays: Arrays) -> tuple[Tensor, Tensor]:
    """``flashgen.attention``, for ``check``."""
    q, k, v, mask, out = arrays.q, arrays.k, arrays.v, arrays.mask, arrays.out
    return flashgen.attention(q, k, v, mask=mask, out=out, return_lse=True, **arrays.options)


def problem_of(arrays: Arrays) -> Problem:
    """The call as dispatch sees it."""
    q, k, v, out = (view_of(getattr(arrays, name), name) for name in ("q", "k", "v", "out"))
    mask = None if arrays.mask is None else view_of(arrays.mask, "mask")
    return normalise(q, k, v, mask=mask, out=out, return_lse=True, **arrays.options)


def check(case: Case, attend: Attend, device: str, seed: int | None = None) -> float:
    """Call ``attend`` twice on fresh inputs and raise AssertionError unless it did what the contract says.

    ``attend`` writes ``arrays.out`` and returns it and the log-sum-exp, in ``arrays.lse`` or an array of its
    own. Returns the largest error as a share of its bound.
    """
    seed = new_seed() if seed is None else seed
    where = f"{case}, seed {seed}"
    arrays = make(case, device, seed)
    before = {name: buffer.clone() for name, buffer in arrays.buffers.items() if name not in ("out", "lse")}
    results = []
    for _ in range(2):
        arrays.poison()
        out, lse = attend(arrays)
        assert (out.shape, out.stride()) == (arrays.out.shape, arrays.out.stride()), f"{where}: not into out"
        outside = arrays.written_outside()
        assert not outside, f"{where}: wrote outside {' and '.join(outside)}"
        results.append((out.clone(), lse.clone()))
    for name, buffer in before.items():
        assert torch.equal(buffer, arrays.buffers[name]), f"{where}: {name} was changed"
    (out, lse), (again, lse_again) = results
    share = compare(case, arrays, out, lse, where)
    # After compare, so that there are no NaNs, which differ from themselves.
    assert torch.equal(out, again), f"{where}: a second call gave other bits"
    assert torch.equal(lse, lse_again), f"{where}: a second call gave another log-sum-exp"
    return share


def compare(case: Case, arrays: Arrays, out: Tensor, lse: Tensor, where: str) -> float:
    """Raise AssertionError unless ``out`` and ``lse`` are near enough to float64; the heart of ``check``.

    Returns the largest error as a share of its bound."""
    problem = problem_of(arrays)
    q, k, v = (x.double() for x in (arrays.q, arrays.k, arrays.v))
    expected = reference.attention(q, k, v, case.dtype, problem.softmax_scale, Band.of(problem), arrays.mask)
    assert out.dtype == arrays.q.dtype, where
    assert lse.dtype == torch.float32, where
    assert lse.shape == expected.lse.shape, f"{where}: lse has shape {tuple(lse.shape)}"
    bad = ~torch.isfinite(out)
    assert not bool(bad.any()), f"{where}: out is {out[bad][0]} {locate(bad)}"
    worst = []
    for name, found, right, bound in (
        ("lse", lse, expected.lse, expected.lse_bound),
        ("out", out, expected.out, expected.out_bound),
    ):
        shares = reference.shares(found.double(), right, bound)
        wrong = shares > 1
        assert not bool(wrong.any()), (
            f"{where}: {name} is {found[wrong][0]}, expected {right[wrong][0]} within {bound[wrong][0]:.3g} "
            f"{locate(wrong)}; the largest error is {float(shares.max()):.3g} of its bound"
        )
        worst.append(float(shares.max()) if shares.numel() else 0.0)
    return max(worst)


def locate(wrong: Tensor) -> str:
    """How many elements are wrong, and the range of their indices: it shows the tile or the tail."""
    indices = wrong.nonzero()
    ranges = ", ".join(
        f"{low}..{high}" for low, high in zip(indices.amin(0).tolist(), indices.amax(0).tolist(), strict=True)
    )
    return f"in {len(indices)} of {wrong.numel()} places, at [{ranges}]"


def new_seed() -> int:
    """A fresh seed, from that of the run, which pytest shows where a test fails."""
    print(f"{VARIABLE}={run_seed()}")
    return seed_of(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])


def make(case: Case, device: str, seed: int) -> Arrays:
    """The arrays of ``case`` on ``device``, the same for one seed, with poisoned outputs."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[case.dtype]
    q_shape = (case.batch, case.seqlen_q, case.heads_q, case.head_dim)
    k_shape = (case.batch, case.seqlen_kv, case.heads_kv, case.head_dim)
    inputs = {"q": q_shape, "k": k_shape, "v": (*k_shape[:-1], case.width_v)}
    buffers, views = {}, {}
    for name, shape in inputs.items():
        views[name], buffers[name] = embed(shape, dtype, case.layout, device)
    fill(case, views, generator)
    for name, shape in inputs.items():
        views[name] = views[name].expand(shape)
    if case.mask is not None:
        views["mask"], buffers["mask"] = embed_mask(case, generator)
    views["out"], buffers["out"] = embed((*q_shape[:-1], case.width_v), dtype, case.out_layout, device)
    lse_shape = (case.batch, case.heads_q, case.seqlen_q)
    views["lse"], buffers["lse"] = embed(lse_shape, torch.float32, "contiguous", device)
    names = ("causal", "mask_type", "window_size", "softmax_scale")
    given = {name: getattr(case, name) for name in names}
    defaults = {each.name: each.default for each in fields(case)}
    options = {name: value for name, value in given.items() if value is not defaults[name]}
    return Arrays(**{"mask": None} | views, options=options, buffers=buffers)


def embed(shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: str) -> tuple[Tensor, Tensor]:
    """A view in the named layout, and the buffer of -1 around it, in integers of the size of ``dtype``.

    In the broadcast layouts the view has the extent 1 where it is to be expanded.
    """
    step = 16 // dtype.itemsize  # rows are 16-byte aligned
    if layout == "contiguous":
        whole, take = shape, lambda x: x
    else:
        b, s, h, d = shape
        whole, take = {
            "padded": ((b, s + 2, h + 1, d + step), lambda x: x[:, 1:-1, :-1, :d]),
            "heads_first": ((b, h, s, d), lambda x: x.transpose(1, 2)),
            "seqlen_first": ((s, b, h, d), lambda x: x.transpose(0, 1)),
            "packed": ((b, s, 3, h, d), lambda x: x[:, :, 1]),
            "alternate_heads": ((b, s, 2 * h, d), lambda x: x[:, :, 1::2]),
            "alternate_rows": ((b, 2 * s, h, d), lambda x: x[:, 1::2]),
            "broadcast_batch": ((1, s, h, d), lambda x: x),
            "broadcast_heads": ((b, s, 1, d), lambda x: x),
        }[layout]
    size, guard = math.prod(whole), GUARD_BYTES // dtype.itemsize
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    buffer = torch.full((size + 2 * guard,), -1, dtype=integers, device=device)
    return take(buffer.view(dtype)[guard : guard + size].view(whole)), buffer


def fill(case: Case, views: dict[str, Tensor], generator: Generator) -> None:
    """Draw q, k and v."""
    q, k, v = views["q"], views["k"], views["v"]

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device=q.device)

    drawn = {name: normal(view.shape) for name, view in views.items()}
    width, keys = case.head_dim, max(1, case.seqlen_kv)
    # Of length sqrt(head_dim): a query along it has the score c * sqrt(head_dim) with the key c * direction.
    direction = normal((1, 1, 1, width)).sign()
    if case.values == "large":  # scores of standard deviation 2500, so up to about 1e4
        drawn["q"] *= 50
        drawn["k"] *= 50
    elif case.values == "dominant":  # one key of each head far above all others
        drawn["q"] = direction + drawn["q"] / 8
        place = torch.randint(keys, (k.shape[0], 1, k.shape[2], 1), generator=generator, device=k.device)
        chosen = torch.arange(k.shape[1], device=k.device)[None, :, None, None] == place
        drawn["k"] = torch.where(chosen, direction * 100 / width**0.5, drawn["k"] / 8)
    elif case.values == "equal":  # no key stands out
        drawn["k"] = drawn["k"][:, :1].expand(k.shape)
    elif case.values in ("rising", "falling"):  # scores from -60 to 60 along the keys, or back
        height = torch.linspace(-60, 60, k.shape[1], device=k.device)[None, :, None, None] / width**0.5
        drawn["q"] = direction + drawn["q"] / 8
        drawn["k"] = direction * (height if case.values == "rising" else -height) + drawn["k"] / 8
    elif case.values == "big_values":  # near the largest of fp16, far up in the others
        drawn["v"] = torch.tanh(drawn["v"]) * (6e4 if case.dtype == "fp16" else 1e30)
    for name, view in (("q", q), ("k", k), ("v", v)):
        view.copy_(drawn[name])


def embed_mask(case: Case, generator: Generator) -> tuple[Tensor, Tensor]:
    """The mask of a case, and the buffer around it: bytes of which uint8 uses all values, bool 0 and 1."""
    mask, device = case.mask, generator.device
    extents = {"b": case.batch, "h": case.heads_q, "q": case.seqlen_q, "k": case.seqlen_kv, "1": 1}
    shape = tuple(extents[letter] for letter in mask.shape)
    stride = -(-shape[-1] // mask.alignment) * mask.alignment
    if mask.alignment < 16 and stride % (2 * mask.alignment) == 0:
        stride += mask.alignment
    size = math.prod(shape[:-1]) * stride
    top = 256 if mask.dtype == "uint8" else 2
    length = GUARD_BYTES + mask.offset + size + GUARD_BYTES
    buffer = torch.randint(top, (length,), generator=generator, device=device).to(torch.uint8)
    start = GUARD_BYTES + mask.offset
    view = buffer[start : start + size].view(*shape[:-1], stride)[..., : shape[-1]]
    hidden = _hidden(mask.content, shape, generator)
    view.copy_(torch.where(hidden, view.clamp(min=1), 0))
    return view.view(torch.bool) if mask.dtype == "bool" else view, buffer


def _hidden(content: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=generator.device)

    if content in ("all", "nothing"):
        return torch.full(shape, content == "all", device=generator.device)
    hidden = random(*shape) < 0.5
    if content in ("tiles", "blocks"):
        side = 64 if content == "tiles" else 320
        rows, keys = (1, *shape)[-2:]
        kind = random(*shape[:-2], -(-rows // side), -(-keys // side))
        kind = kind.repeat_interleave(side, -1)[..., :keys].repeat_interleave(side, -2)[..., :rows, :]
        kind = kind.reshape(shape)
        hidden = (hidden | (kind < 1 / 3)) & (kind < 2 / 3)
        if rows > 1:
            hidden |= random(*shape[:-1], 1) < 0.1
    return hidden
