"""Which problems the forward kernels are checked on: lists of Case, the same on every machine."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import TYPE_CHECKING, Any

from gpu.cases import INPUT_LAYOUTS, LAYOUTS, MASK_SHAPES, VALUES, Case, Mask

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashgen.families.variant import Variant

SEQLENS = (0, 1, 7, 64, 127, 129, 1000, 4096)
HEAD_DIMS = {
    "fp16": (8, 32, 40, 64, 80, 96, 128, 160, 192, 256),
    "bf16": (8, 32, 40, 64, 80, 96, 128, 160, 192, 256),
    "fp32": (4, 32, 36, 64, 96, 100, 128, 192, 256),
}
# Of q and k, and of v: 192 with 128 has kernels of its own, the others are held by one that is wider.
HEAD_DIMS_OF_V = {
    "fp16": (
        (192, 128),
        (184, 120),
        (136, 8),
        (192, 136),
        (128, 64),
        (64, 128),
        (80, 40),
        (40, 256),
        (8, 32),
    ),
    "bf16": ((192, 128), (160, 128), (128, 192), (256, 64), (96, 72), (72, 96)),
    "fp32": ((40, 72), (72, 40), (192, 128), (128, 4), (4, 64), (36, 256)),
}
STEPS = {"fp16": 8, "bf16": 8, "fp32": 4}
KV_HEADS = (1, 2, 4, 16)
# The contract's masks, as options of a Case.
MASKINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "bottom_right": {"causal": True},
    "top_left": {"mask_type": "causal_top_left"},
    "window": {"window_size": (100, 20)},
    "causal_window": {"causal": True, "window_size": (65, -1)},
    "dense": {"mask": Mask()},
    "dense_causal": {"mask": Mask(), "causal": True},
    "dense_window": {"mask": Mask(), "window_size": (130, 40)},
}
HEADS = {"mha": ((3, 3), (2, 2)), "gqa": ((6, 2), (4, 1)), "packed": ((6, 2), (16, 1))}
HEADS_THAT_DIVIDE_A_BOX = ((8, 2), (16, 1))  # for a tensor map whose box holds whole groups


def of_variant(variant: Variant, smaller: tuple[int, int]) -> list[Case]:
    """What each variant is launched on: ragged and exact tiles, several blocks of keys, both ends of its head
    dims, one or few queries, more queries than keys. ``smaller`` is as from ``smaller_head_dims``."""
    rows, keys = variant.tile_value("block_m"), variant.tile_value("block_n")
    narrow, narrow_v = (width + STEPS[variant.dtype] for width in smaller)
    own, own_v = variant.head_dim, variant.head_dim_v
    heads = HEADS[variant.gqa]
    boxes = [p.box.rows for p in variant.params if p.box and p.name in ("q", "out")]
    if variant.gqa == "packed" and any(box % (q // kv) for box in boxes for q, kv in heads):
        heads = HEADS_THAT_DIVIDE_A_BOX
    (q, kv), (other_q, other_kv) = heads
    few = 1 if variant.mask_type in ("none", "dense") else 7
    ragged = Case(2, rows + 17, 4 * keys + 5, q, kv, own, variant.dtype)
    exact = Case(1, 2 * rows, 3 * keys, other_q, other_kv, own, variant.dtype, layout="heads_first")
    short = Case(32, few, 2 * keys - 1, q, kv, narrow, variant.dtype, layout="packed")
    tall = Case(2, 2 * rows + 1, keys + 3, other_q, other_kv, narrow, variant.dtype, out_layout="heads_first")
    wide = Case(1, rows // 2, 20 * keys + 1, q, kv, own, variant.dtype, layout="alternate_heads")
    widths_v = (own_v, own_v, own_v, narrow_v, own_v)
    shapes = (
        dataclasses.replace(case, head_dim_v=None if width_v == case.head_dim else width_v)
        for case, width_v in zip((ragged, exact, short, tall, wide), widths_v, strict=True)
    )
    options: dict[str, tuple[dict[str, Any], ...]] = {
        "none": ({},) * 5,
        "causal": (
            {"causal": True},
            {"mask_type": "causal_top_left"},
            {"causal": True},
            {"causal": True},
            {"mask_type": "causal_top_left"},
        ),
        "local": (
            {"window_size": (keys, 3)},
            {"causal": True, "window_size": (2 * keys + 1, 0)},
            {"window_size": (5, -1)},
            {"window_size": (3, 0)},
            {"window_size": (0, keys + 7)},
        ),
        "dense": (
            {"mask": Mask()},
            {"mask": Mask("qk", "bool"), "causal": True},
            {"mask": Mask("k", alignment=4)},
            {"mask": Mask("b1qk", alignment=4), "mask_type": "causal_top_left"},
            {"mask": Mask("hqk", alignment=1, offset=1), "window_size": (keys + 7, 3)},
        ),
    }
    return [
        dataclasses.replace(shape, **option)
        for shape, option in zip(shapes, options[variant.mask_type], strict=True)
    ]


def smaller_head_dims(variant: Variant, variants: Iterable[Variant]) -> tuple[int, int]:
    """The next smaller head dim of the variant's own spec and dtype, or 0; and that of v for which dispatch
    takes another variant when the head dim is above that one."""
    alike = [other for other in variants if (other.spec, other.dtype) == (variant.spec, variant.dtype)]
    smaller = max((other.head_dim for other in alike if other.head_dim < variant.head_dim), default=0)
    narrower = (
        other.head_dim_v
        for other in alike
        if other.head_dim == variant.head_dim and other.head_dim_v < variant.head_dim_v
    )
    return smaller, max(narrower, default=0)


def every_seqlen() -> list[Case]:
    """Every pair of SEQLENS under every masking. Dtypes, head dims and kv heads are spread over them."""
    spread = random.Random("the same in every process")
    found = []
    for masking, seqlen_q, seqlen_kv in itertools.product(MASKINGS, SEQLENS, SEQLENS):
        dtype = spread.choice(list(HEAD_DIMS))
        head_dim, kv_heads = spread.choice(HEAD_DIMS[dtype]), spread.choice(KV_HEADS)
        options = dict(MASKINGS[masking])
        if "mask" in options:
            shape = (
                spread.choice(("11qk", "qk", "k"))
                if seqlen_q * seqlen_kv > 1 << 20
                else spread.choice(MASK_SHAPES)
            )
            options["mask"] = Mask(shape, spread.choice(("uint8", "bool")), spread.choice((1, 4, 16)))
        # Of few queries, several batch entries.
        batch = max(1, min(16, 64 // max(1, seqlen_q)))
        found.append(Case(batch, seqlen_q, seqlen_kv, 16, kv_heads, head_dim, dtype, **options))
    return found


def every_head_dim() -> list[Case]:
    """Every head dim that the contract allows, one masking each."""
    return [
        Case(2, 129, 200, 4, 4, head_dim, dtype, **options)
        for dtype, step in STEPS.items()
        for head_dim, options in zip(range(step, 257, step), itertools.cycle(MASKINGS.values()), strict=False)
    ]


def head_dims_of_v() -> list[Case]:
    """Head dims of v that are not those of q and k: each masking, one query head to a kv head, several, and
    so few queries that they are packed."""
    groups = ((1, 300, 4, 4), (2, 150, 8, 2), (2, 3, 16, 2))
    return [
        Case(batch, seqlen_q, 333, heads, kv_heads, head_dim, dtype, head_dim_v=head_dim_v, **options)
        for dtype, pairs in HEAD_DIMS_OF_V.items()
        for head_dim, head_dim_v in pairs
        for options, (batch, seqlen_q, heads, kv_heads) in itertools.product(MASKINGS.values(), groups)
    ]


def head_groups() -> list[Case]:
    """16 heads on few kv heads, with few and with many queries; groups that are no power of two."""
    return [
        Case(max(2, 32 // seqlen_q), seqlen_q, 777, heads, kv_heads, 64, dtype, **MASKINGS[masking])
        for heads, kv_heads in ((16, 1), (16, 2), (16, 4), (16, 16), (12, 4), (7, 1))
        for seqlen_q, dtype in ((1, "fp16"), (4, "bf16"), (16, "fp16"), (500, "bf16"), (300, "fp32"))
        for masking in ("none", "bottom_right", "window", "dense")
    ]


def layouts() -> list[Case]:
    """Each layout of the inputs and of the output, with the widest and the narrowest element."""
    base = [
        Case(3, 150, 170, 8, heads_kv, 72, dtype, **options)
        for heads_kv, dtype, options in (
            (8, "fp16", {}),
            (2, "fp32", {"causal": True}),
            (8, "bf16", {"causal": True}),
        )
    ]
    inputs = [dataclasses.replace(case, layout=layout) for case in base for layout in INPUT_LAYOUTS]
    outputs = [dataclasses.replace(case, out_layout=layout) for case in base for layout in LAYOUTS]
    return list(dict.fromkeys(inputs + outputs))


def dense_masks() -> list[Case]:
    """Shapes, dtypes, contents, row strides and pointers of dense masks."""
    forms = [
        *(Mask(shape, dtype) for shape in MASK_SHAPES for dtype in ("uint8", "bool")),
        *(
            Mask(shape, content=content)
            for shape in ("bhqk", "k")
            for content in ("random", "all", "nothing")
        ),
        *(
            Mask(shape, alignment=alignment, offset=offset)
            for shape in ("bhqk", "qk", "k")
            for alignment, offset in (
                (16, 1),
                (16, 2),
                (16, 4),
                (16, 8),
                (8, 0),
                (8, 8),
                (4, 0),
                (4, 4),
                (4, 3),
                (2, 0),
                (1, 0),
                (1, 5),
            )
        ),
    ]
    return [
        Case(2, 300, seqlen_kv, 6, heads_kv, 64, dtype, mask=mask)
        for n, mask in enumerate(forms)
        for seqlen_kv, heads_kv, dtype in (
            (1000, (6, 2)[n % 2], ("fp16", "bf16", "fp32")[n % 3]),
            (4095, (2, 6)[n % 2], ("bf16", "fp16")[n % 2]),
        )
    ]


def masks_and_ranges() -> list[Case]:
    """A mask together with each diagonal and with windows: every alignment of the mask, broadcast or not,
    tiles of each head dim, packed heads, more queries than keys and the other way round, rows that see
    nothing of what is left, and more tiles than multiprocessors.
    """
    forms = (
        Mask(content="random"),
        Mask("qk", "bool", content="random"),
        Mask("hqk", alignment=4, offset=3, content="blocks"),
        Mask("b1qk", alignment=1, content="blocks"),
        Mask("k", alignment=8, content="random"),
        Mask("qk", content="nothing"),
        Mask("h1k", content="all"),
    )
    ranges: tuple[dict[str, Any], ...] = (
        {"causal": True},
        {"mask_type": "causal_top_left"},
        {"causal": True, "window_size": (200, 0)},
        {"window_size": (0, 0)},
        {"window_size": (130, -1)},
        {"window_size": (-1, 130)},
    )
    sizes = ((1000, 1500), (1500, 1000), (257, 2049), (129, 128), (1, 3000), (3000, 1))
    found = []
    for n, (mask, options, (seqlen_q, seqlen_kv)) in enumerate(itertools.product(forms, ranges, sizes)):
        dtype = ("fp16", "bf16", "fp16", "fp32")[n % 4]
        head_dim = HEAD_DIMS[dtype][n // 4 % len(HEAD_DIMS[dtype])]
        kv_heads = (8, 2)[n // 3 % 2]
        found.append(Case(4, seqlen_q, seqlen_kv, 8, kv_heads, head_dim, dtype, mask=mask, **options))
    return found


def hidden_blocks() -> list[Case]:
    """Masks that hide whole blocks of keys from whole tiles, or everything: each head dim, with more tiles
    than multiprocessors, aligned and not, and a row or two of queries beside a boundary of tiles."""
    forms = (
        Mask(content="blocks"),
        Mask("hqk", "bool", alignment=1, content="blocks"),
        Mask("b1qk", alignment=4, offset=3, content="blocks"),
        Mask("k", content="blocks"),
        Mask("qk", content="all"),
    )
    sizes = ((1000, 1500), (1000, 1536), (257, 2049), (129, 128), (1, 3000))
    pairs = itertools.product(forms, sizes)
    return [
        Case(8, seqlen_q, seqlen_kv, 8, (8, 2)[n // 2 % 2], head_dim, ("fp16", "bf16")[n % 2], mask=mask)
        for n, ((mask, (seqlen_q, seqlen_kv)), head_dim) in enumerate(
            itertools.product(pairs, (64, 96, 128, 192, 256))
        )
    ]


def windows() -> list[Case]:
    """Windows of all kinds: of one key, unbounded on a side, longer than everything, beside all keys."""
    shapes = ((257, 257), (129, 1000), (1000, 129), (300, 10), (64, 4096), (4, 100))
    sizes = ((0, 0), (1, 0), (0, 1), (5, -1), (-1, 5), (3, 0), (63, 0), (64, 64), (127, 3), (1000, 1000))
    sizes += ((100, 2**40), (2**40, 0), (2**31, -1))
    found = []
    for n, ((seqlen_q, seqlen_kv), window) in enumerate(itertools.product(shapes, sizes)):
        dtype, kv_heads = ("fp16", "bf16", "fp32")[n % 3], (4, 1)[n // 3 % 2]
        case = Case(
            max(2, 64 // seqlen_q),
            seqlen_q,
            seqlen_kv,
            4,
            kv_heads,
            (64, 128)[n % 2],
            dtype,
            window_size=window,
        )
        found.append(case)
        if window[1] in (0, -1):
            found.append(dataclasses.replace(case, causal=True))
    return found


def values() -> list[Case]:
    """Inputs that are not normal numbers, and scales that are not the usual one."""
    maskings = ("none", "bottom_right", "window", "dense")
    found = [
        Case(2, 200, 1000, 4, (4, 1)[n % 2], (64, 128)[n // 2 % 2], dtype, values=name, **MASKINGS[masking])
        for n, (name, dtype, masking) in enumerate(itertools.product(VALUES, HEAD_DIMS, maskings))
    ]
    # A score of 0.01 or 10 times the usual size; 0 weighs all keys alike.
    scales = ((0.0, "usual"), (1e-3, "usual"), (0.3, "large"), (1.0, "large"), (1.25, "usual"))
    found += [
        Case(2, 200, 300, 4, 2, 64, dtype, softmax_scale=scale, values=name, **MASKINGS[masking])
        for (scale, name), dtype, masking in itertools.product(scales, HEAD_DIMS, ("none", "bottom_right"))
    ]
    return found


def many_tiles() -> list[Case]:
    """More than 65,535 blocks in a grid."""
    small = Case(9000, 3, 5, 8, 8, 8, "fp16", layout="contiguous", out_layout="contiguous")
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"dtype": "fp32", "causal": True},
        {"dtype": "bf16", "window_size": (1, 0)},
        {"batch": 36000, "heads_kv": 2, "mask_type": "causal_top_left"},
        {"dtype": "bf16", "mask": Mask("b1qk", alignment=1)},
    )
    return [dataclasses.replace(small, **change) for change in changes]


def at_random(seed: int) -> Case:
    """Some problem of the contract; the same for one seed."""
    draw = random.Random(seed)
    dtype = draw.choice(list(STEPS))
    kv_heads, group = draw.choice(((1, 1), (1, 3), (2, 1), (2, 4), (5, 1), (1, 8)))
    seqlen_q, seqlen_kv = (int(2 ** draw.uniform(0, 10.5)) for _ in range(2))
    head_dim, other = (STEPS[dtype] * draw.randint(1, 256 // STEPS[dtype]) for _ in range(2))
    masking = draw.choice(list(MASKINGS))
    options = dict(MASKINGS[masking])
    if "mask" in options:
        content = draw.choice(("tiles", "random"))
        options["mask"] = Mask(
            draw.choice(MASK_SHAPES),
            draw.choice(("uint8", "bool")),
            draw.choice((1, 2, 4, 8, 16)),
            draw.randint(0, 16),
            content,
        )
    if masking in ("window", "dense_window"):
        options["window_size"] = (draw.randint(-1, seqlen_kv), draw.randint(-1, seqlen_kv))
    elif masking == "causal_window":
        options["window_size"] = (draw.randint(0, seqlen_kv), 0)
    return Case(
        batch=max(2, 128 // (seqlen_q * kv_heads * group)),
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        heads_q=kv_heads * group,
        heads_kv=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        layout=draw.choice(INPUT_LAYOUTS),
        out_layout=draw.choice(LAYOUTS),
        head_dim_v=draw.choice((None, other)),
        **options,
    )
