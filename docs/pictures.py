"""Draws the pictures of these pages: ``python docs/pictures.py`` writes docs/pictures/*.svg.

A picture has a ground and colours of its own, for light and dark. Times in the pipelines are not to scale.
"""

from __future__ import annotations

import itertools
import sys
from html import escape
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
WIDTH = 760
EM = 0.58  # of a text's size, the width of a letter at most, on average

STYLE = """
svg { --page: #ffffff; --text: #1c1e21; --faint: #5c636b; --line: #8a939c;
  --c0: #8ecae6; --c1: #b7dfa3; --c2: #ffd08a; --c3: #d9b8f0; --c4: #f4a7b0; --c5: #dfe4e9; }
@media (prefers-color-scheme: dark) {
  svg { --page: #16181b; --text: #e4e6e8; --faint: #9aa3ab; --line: #79828b;
    --c0: #2f6f8f; --c1: #4d7a38; --c2: #8a621c; --c3: #6b4a86; --c4: #8d444e; --c5: #3c444c; }
}
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--text); }
.small { font-size: 11px; } .title { font-weight: 600; } .faint { fill: var(--faint); }
.ground { fill: var(--page); }
.c0, .bar0 { fill: var(--c0); } .c1, .bar1 { fill: var(--c1); } .c2, .bar2 { fill: var(--c2); }
.c3, .bar3 { fill: var(--c3); } .c4, .bar4 { fill: var(--c4); } .c5, .bar5 { fill: var(--c5); }
.none { fill: none; stroke-dasharray: 3; } .box { stroke: var(--line); }
.arrow, .leader, line.edge { stroke: var(--line); fill: none; } .head { fill: var(--line); }
.label { font-size: 12px; } rect.edge { fill: none; stroke: var(--line); stroke-dasharray: 2; }
"""


class Picture:
    """An SVG picture of a height, made of boxes, texts and arrows."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, classes: str = "", anchor: str = "start") -> None:
        """Words whose base line begins, ends or has its middle at (x, y)."""
        size = 11 if "small" in classes else 13
        left = {"start": x, "middle": x - EM * size * len(words) / 2, "end": x - EM * size * len(words)}[
            anchor
        ]
        if left < 0 or left + EM * size * len(words) > WIDTH:
            raise ValueError(f"{self.title}: {words!r} leaves the picture")
        named = f' class="{classes}"' if classes else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{named}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, words: str = "", kind: str = "c5") -> None:
        """A rectangle with words in its middle."""
        self.parts.append(
            f'<rect class="box {kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"/>'
        )
        if words:
            size = 13 if EM * 13 * len(words) <= width else 11
            if EM * size * len(words) > width + 4:
                raise ValueError(f"{self.title}: {words!r} is wider than its box")
            self.text(
                x + width / 2, y + height / 2 + size / 3, words, "small" if size == 11 else "", "middle"
            )

    def arrow(self, *points: tuple[float, float]) -> None:
        """An arrow through the points."""
        (x, y), (end_x, end_y) = points[-2:]
        line = " ".join(f"{a:g},{b:g}" for a, b in points)
        self.parts.append(f'<polyline class="arrow" points="{line}"/>')
        if abs(end_x - x) > abs(end_y - y):
            back = -6 if end_x > x else 6
            corners = [(end_x, end_y), (end_x + back, end_y - 4), (end_x + back, end_y + 4)]
        else:
            back = -6 if end_y > y else 6
            corners = [(end_x, end_y), (end_x - 4, end_y + back), (end_x + 4, end_y + back)]
        self.parts.append(f'<polygon class="head" points="{" ".join(f"{a:g},{b:g}" for a, b in corners)}"/>')

    def svg(self) -> str:
        """The file."""
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}">\n<title>{escape(self.title)}</title>\n'
            f"<style>{STYLE}</style>\n"
            f'<rect class="ground" width="{WIDTH}" height="{self.height}"/>\n{body}\n</svg>\n'
        )


def road() -> Picture:
    picture = Picture("From a line of YAML to a launch", 250)
    width, gap, left = 92, 34, 20
    place = [left + number * (width + gap) for number in range(6)]
    upper = [
        ("specs/*.yaml", ""),
        ("Spec", "families/"),
        ("Variant", "families/"),
        ("CUDA source", "source/"),
    ]
    upper += [("cubin", "toolchain/"), ("kernel", "runtime/")]
    lower = [("q, k, v, ...", ""), ("Call", "call/"), ("Problem", "operators/"), ("dispatch", "schedule/")]
    lower += [("steps", "schedule/"), ("Plan", "runtime/")]
    for top, stages, kind in ((45, upper, "c0"), (165, lower, "c2")):
        for number, (words, folder) in enumerate(stages):
            picture.box(place[number], top, width, 34, words, kind if folder else "c5")
            middle = place[number] + width / 2
            picture.text(middle, top + 50, folder, "small faint", "middle")
            if number:
                picture.arrow((place[number] - gap, top + 17), (place[number] - 2, top + 17))
    picture.text(left, 24, "without a GPU, and without a call: flashgen build, flashgen inspect", "faint")
    picture.arrow((place[2] + 84, 79), (place[2] + 84, 125), (place[3] + 46, 125), (place[3] + 46, 163))
    picture.text(place[3] + 54, 140, "chooses a variant", "small faint")
    picture.arrow((place[5] + 12, 79), (place[5] + 12, 163))
    picture.text(place[5] + 18, 130, "launches", "small faint")
    picture.text(left, 240, "a call; a later call of the same layout goes straight to its plan", "faint")
    return picture


def batches() -> Picture:
    picture = Picture("A packed and a padded batch", 300)
    left, scale = 20, 1.3
    picture.text(left, 24, "packed: tokens of all sequences, one after another", "title")
    starts = [0, 200, 500, 512]
    for number, (begin, end) in enumerate(itertools.pairwise(starts)):
        words = f"sequence {number}: {end - begin} tokens" if end - begin > 50 else ""
        picture.box(left + scale * begin, 40, scale * (end - begin), 34, words, f"c{number}")
    for number, start in enumerate(starts):
        x = left + scale * start
        anchor = "start" if number == 0 else "middle"
        shift = {2: -10, 3: 14}.get(number, 0)
        picture.text(x + shift, 92, str(start), "small", anchor)
    picture.text(left, 112, "cu_seqlens = [0, 200, 500, 512]; sequence 2 has 12 tokens", "faint")
    picture.text(left, 158, "padded: a row for each sequence, and kv_lengths", "title")
    for row, length in enumerate((300, 512)):
        top = 172 + 44 * row
        picture.box(left, top, scale * 512, 34, "", "none")
        picture.box(left, top, scale * length, 34, f"sequence {row}: {length} keys", f"c{row}")
    picture.text(left + scale * 406, 172 + 22, "not read", "faint", "middle")
    picture.text(left, 280, "kv_lengths = [300, 512]", "faint")
    return picture


def pages() -> Picture:
    picture = Picture("Two sequences in pages, the first page shared", 262)
    left, size = 20, 54
    picture.text(left, 24, "pages: the page of each 16 keys", "title")
    table = [[3, 1, 6], [3, 4, -1]]
    kinds = {3: "c3", 1: "c0", 6: "c0", 4: "c1", -1: "none"}
    for row, entries in enumerate(table):
        top = 40 + 42 * row
        picture.text(left, top + 22, f"sequence {row}")
        for column, entry in enumerate(entries):
            picture.box(left + 95 + 60 * column, top, 54, 32, str(entry), kinds[entry])
    picture.text(left + 300, 62, "lengths[0] = 40: two pages, and 8 keys of the third")
    picture.text(left + 300, 104, "lengths[1] = 20: one page, and 4 keys of the second")
    picture.text(left, 158, "k and v in memory: (num_pages, page_size, heads, head_dim)", "title")
    for page in range(8):
        kind = kinds.get(page, "none")
        picture.box(left + page * (size + 8), 172, size, 40, "", kind)
        picture.text(left + page * (size + 8) + size / 2, 196, f"page {page}", "small", "middle")
    used = {3: "shared", 1: "seq. 0", 6: "seq. 0", 4: "seq. 1"}
    for page, words in used.items():
        picture.text(left + page * (size + 8) + size / 2, 228, words, "small faint", "middle")
    picture.text(left, 252, "a page of -1 is never read: the sequence has ended before it", "faint")
    return picture


def windows() -> Picture:
    picture = Picture("How masks align with four queries and six keys", 236)
    cell, queries, keys = 24, 4, 6
    shift = keys - queries
    masks = [
        ("causal=True", "j ≤ i + 2", lambda i, j: j <= i + shift),
        ("causal_top_left", "j ≤ i", lambda i, j: j <= i),
        ("window_size=(1, 1)", "i + 1 ≤ j ≤ i + 3", lambda i, j: i + shift - 1 <= j <= i + shift + 1),
    ]
    for number, (name, rule, sees) in enumerate(masks):
        left, top = 70 + 236 * number, 74
        picture.text(left, 24, name, "title")
        picture.text(left, 42, rule, "small faint")
        for j in range(keys):
            picture.text(left + cell * j + cell / 2, top - 6, str(j), "small", "middle")
        for i in range(queries):
            picture.text(left - 8, top + cell * i + 16, f"i = {i}", "small", "end")
            for j in range(keys):
                kind = "c0" if sees(i, j) else "none"
                picture.box(left + cell * j, top + cell * i, cell, cell, "", kind)
    picture.text(
        20,
        196,
        "A row is a query, a column a key. The last query is at the last key, so query i is at key i + 2.",
    )
    picture.text(20, 218, "Filled: the query sees the key.", "faint")
    return picture


def splits() -> Picture:
    picture = Picture("Split-KV, and clusters", 428)
    left, block = 20, 24
    picture.text(
        left, 24, "split-KV: thread blocks take equal shares of the KV blocks of all sequences", "title"
    )
    lengths, at = [15, 4, 9], 0
    for number, length in enumerate(lengths):
        for _ in range(length):
            picture.box(left + block * at, 58, block, 26, "", f"c{number}")
            at += 1
        picture.text(left + block * (at - length / 2), 50, f"sequence {number}", "small", "middle")
    for share in range(4):
        x = left + 7 * block * share
        picture.arrow((x + 84, 88), (x + 84, 110))
        picture.box(x + 8, 112, 152, 26, f"thread block {share}", "c5")
        picture.arrow((x + 84, 140), (x + 84, 162))
    picture.box(
        left, 164, 28 * block, 28, "parts in memory: O, row_max and row_sum of each share of a tile", "none"
    )
    picture.arrow((left + 336, 194), (left + 336, 214))
    picture.box(left + 186, 216, 300, 28, "a second kernel adds up the parts", "c4")
    picture.text(
        left, 282, "cluster (Hopper): the thread blocks of a cluster split the KV blocks of one tile", "title"
    )
    for number in range(28):
        picture.box(left + block * number, 296, block, 26, "", "c0")
    for rank in range(4):
        x = left + 7 * block * rank
        picture.arrow((x + 84, 326), (x + 84, 344))
        picture.box(x + 8, 346, 152, 26, f"thread block {rank}", "c5")
    for rank in range(3):
        x = left + 7 * block * (rank + 1)
        picture.arrow((x - 8, 354), (x + 8, 354))
        picture.arrow((x + 8, 364), (x - 8, 364))
    picture.text(
        left, 396, "Each sends O, row_max and row_sum of a row to the thread block that combines this row,"
    )
    picture.text(left, 416, "through shared memory: one launch, no parts in memory.")
    return picture


def _lanes(picture: Picture, names: list[str], top: int, height: int) -> None:
    for number, name in enumerate(names):
        y = top + number * height
        picture.text(16, y + 20, name, "small")
        picture.parts.append(
            f'<line class="edge" x1="130" x2="{WIDTH - 16}" y1="{y + 32}" y2="{y + 32}" opacity="0.5"/>'
        )


def forward() -> Picture:
    picture = Picture("The forward kernel for Hopper, two consumers", 262)
    left, unit, top, height = 136, 21, 44, 40
    names = ["producer, TMA", "tensor cores", "consumer 0", "consumer 1"]
    _lanes(picture, names, top, height)

    def put(lane: int, begin: float, length: float, words: str, kind: str) -> None:
        picture.box(left + unit * begin, top + height * lane, unit * length - 2, 28, words, kind)

    for begin, words in (
        (0, "K0"),
        (1.5, "V0"),
        (3, "K1"),
        (4.5, "V1"),
        (7, "K2"),
        (14.5, "K3"),
        (16.5, "V2"),
    ):
        put(0, begin, 1.5, words, "c5")
    for begin, words, kind in (
        (2, "S0", "c0"),
        (4, "S0", "c1"),
        (8, "S1", "c0"),
        (10, "P V0", "c0"),
        (12, "S1", "c1"),
        (14, "P V0", "c1"),
        (16, "S2", "c0"),
        (18, "P V1", "c0"),
        (20, "S2", "c1"),
        (22, "P V1", "c1"),
        (24, "S3", "c0"),
        (26, "P V2", "c0"),
    ):
        put(1, begin, 2, words, kind)
    for begin, length, words in ((4, 4, "softmax 0"), (10, 6, "softmax 1"), (18, 6, "softmax 2")):
        put(2, begin, length, words, "c0")
    for begin, length, words in ((6, 6, "softmax 0"), (14, 6, "softmax 1"), (22, 6, "softmax 2")):
        put(3, begin, length, words, "c1")
    picture.text(16, 24, "The consumers take turns at the tensor cores", "title")
    picture.text(
        16,
        222,
        "Colour: the consumer, which has 64 rows. Number: the KV block. Softmax runs while the consumer's",
    )
    picture.text(
        16,
        242,
        "P V and the other consumer's MMAs run. Two buffers: K2 is loaded when both are done with S0.",
    )
    return picture


def backward() -> Picture:
    picture = Picture("A step of the backward kernel for Hopper, two consumers", 306)
    left, unit, top, height = 136, 25, 44, 40
    names = ["producer, TMA", "0: tensor cores", "0: other work", "1: tensor cores", "1: other work"]
    _lanes(picture, names, top, height)

    def put(lane: int, begin: float, length: float, words: str, kind: str) -> None:
        picture.box(left + unit * begin, top + height * lane, unit * length - 2, 28, words, kind)

    hand_off, issued, starts = left + unit * 4.5, top + height + 14, top + 3 * height + 14
    picture.arrow(
        (left + unit * 4 - 2, issued), (hand_off, issued), (hand_off, starts), (left + unit * 5, starts)
    )
    for begin, words in ((0, "Q, dO of i + 1"), (12, "Q, dO of i + 2")):
        put(0, begin, 5, words, "c5")
    for lane, first, kind in ((1, 0, "c0"), (3, 5, "c1")):
        for begin, length, words in (
            (0, 2, "S"),
            (2, 2, "dP"),
            (6, 2, "dV"),
            (10, 2, "dQ i-1"),
            (12, 2, "dK"),
        ):
            put(lane, first + begin, length, words, kind)
        for begin, length, words in (
            (2, 4, "P: mask, exp"),
            (6, 2, "dS"),
            (8, 2, "dS out"),
            (12, 2, "+= dQ"),
        ):
            put(lane + 1, first + begin, length, words, kind)
    for begin, length, words in ((14, 2, "S"), (16, 2, "dP")):
        put(1, begin, length, words, "c0")
    put(2, 16, 4, "P: mask, exp", "c0")
    picture.text(16, 24, "A consumer starts a step when the other one has issued S and dP", "title")
    picture.text(
        16,
        264,
        "Colour: the consumer, which has 64 keys. S, dP, P and dS are transposed. dQ is of step i - 1:",
    )
    picture.text(
        16, 284, "it takes the dS of both consumers from shared memory, and is added to memory while dK runs."
    )
    return picture


def memory() -> Picture:
    """The shared memory of the kernel that reading-a-kernel.md reads."""
    sys.path.insert(0, str(ROOT / "codegen"))
    from flashgen.families.load import load_specs
    from flashgen.source.render import render
    from flashgen.source.sharedmemory import regions
    from flashgen.tools.page.drawing import shared_memory

    picture = Picture("Shared memory of a forward and a backward kernel, to scale", 432)
    names = ("flash_fwd_hdim128_fp16_causal_m128_sm90", "flash_bwd_hdim128_bf16_causal_sm90")
    specs = {spec.name: spec for spec in load_specs()}
    for number, (name, spec) in enumerate(zip(names, ("flash_fwd_sm90", "flash_bwd_sm90"), strict=True)):
        variant = next(variant for variant in specs[spec].variants() if variant.name == name)
        left = 24 + 376 * number
        picture.text(left, 22, f"flash_{'bwd' if number else 'fwd'}_sm90, head_dim 128", "title")
        picture.text(left, 40, f"{variant.smem_bytes:,} bytes of {variant.max_smem:,}", "small faint")
        drawing = shared_memory(regions(render(variant), variant))
        picture.parts.append(f'<g transform="translate({left - 8}, 42)">{drawing}</g>')
    return picture


def masks() -> Picture:
    """The blocks of each mask that flashgen ships."""
    from flashgen.call.mask import Mask

    tokens, size, side, across = 64, 4, 120, 5
    token = np.arange(tokens, dtype=np.int32)
    doc = np.repeat(np.array([0, 1, 2, 3], np.int32), (18, 10, 24, 12))
    last = token.copy()
    last[12:28] = 27
    last[40:56] = 55
    params = {
        "documents": {"doc": doc},
        "documents_full": {"doc": doc},
        "document_starts": {"start": np.searchsorted(doc, doc).astype(np.int32)},
        "prefix_lm": {"prefix": np.array([22], np.int32)},
        "image_spans": {"last": last},
        "window_first": {"width": 14, "first": 6},
        "window_global": {"reach": 6, "is_global": np.isin(token, (0, 1, 36)).astype(np.int32)},
        "chunks": {"size": 20},
        "block_causal": {"size": 12},
        "frames": {"frame": token // 16},
        "shared_prefix": {"segment": np.repeat(np.arange(4, dtype=np.int32), (16, 16, 14, 18))},
        "padding": {"begin": np.array([10], np.int32), "end": np.array([50], np.int32)},
        "dilated": {"step": 2},
        "neighbourhood": {"width": 8, "reach": 1},
    }
    rows = -(-len(params) // across)
    picture = Picture("The masks that flashgen ships", 20 + rows * (side + 40))
    for number, (name, values) in enumerate(params.items()):
        x, y = 20 + number % across * (side + 29), 32 + number // across * (side + 40)
        blocks = Mask(name, **values).blocks(size, size, seqlen_kv=tokens)
        step = side / blocks.num_key_blocks
        picture.text(x, y - 8, name, "small")
        outlines: dict[str, str] = {"--c0": "", "--faint": ""}
        for i in range(blocks.num_row_blocks):
            for run in blocks.of_row(i):
                begin, width = x + step * run.begin, step * (run.end - run.begin)
                colour = "--faint" if run.is_full else "--c0"
                outlines[colour] += f"M{begin:g} {y + step * i:g}h{width:g}v{step:g}h-{width:g}z"
        for colour, outline in outlines.items():
            if outline:
                picture.parts.append(f'<path style="fill: var({colour})" d="{outline}"/>')
        frame = 'style="fill: none; stroke: var(--line)"'
        picture.parts.append(f'<rect {frame} x="{x}" y="{y}" width="{side}" height="{side}"/>')
    return picture


PICTURES = {
    "road": road,
    "batches": batches,
    "pages": pages,
    "windows": windows,
    "masks": masks,
    "splits": splits,
    "forward-pipeline": forward,
    "backward-pipeline": backward,
    "shared-memory": memory,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
