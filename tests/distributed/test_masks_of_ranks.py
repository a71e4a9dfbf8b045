"""Masks by a line for the rows of a rank: each row sees the keys that it sees in the whole call. Of all
ranks, without processes.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import flashgen

torch = pytest.importorskip("torch")

from flashgen.distributed.layouts import LAYOUTS, shards_of, unit_of  # noqa: E402
from flashgen.distributed.masks import Rows, mask_of, rows_of  # noqa: E402
from flashgen.distributed.parts import parts_of  # noqa: E402
from flashgen.distributed.segments import visibility  # noqa: E402
from flashgen.errors import BadParam  # noqa: E402
from flashgen.operators.formula import evaluate  # noqa: E402

CU = (0, 40, 41, 41, 90, 700)
BATCH, HEADS = 2, 4
# The shapes of arrays; N is the number of tokens, D of documents, or of batch entries.
LINES = {
    "documents": {"doc": "N"},
    "prefix_lm": {"prefix": "D"},
    "kv <= q and (q - kv < width or kv < first)": {"width": 30, "first": 4},
    "start[b, q] <= kv <= q + n": {"start": "N", "n": 3},
    "doc[b, kv] == doc[b, q] or doc[b, kv] == b": {"doc": "N"},
    "(q + kv + h * 5 + b) % n != 0": {"n": 3},
    "near[h] > q - kv and far[b, h] > kv - q": {"near": "H", "far": "DH"},
    "abs(q // n - kv // n) <= reach": {"n": 8, "reach": 2},
    "row_position[q // 4] > kv % 5": {"row_position": "N"},  # a name that the new line would take
}
# Lines that packed documents have not.
ALONE = {
    "keep[q, kv] or q == kv": {"keep": "NN"},
    "not keep[b, h, q, kv]": {"keep": "DHNN"},
    "keep[q // 32, kv // 32]": {"keep": "KK"},
    "start[kv + 1] <= q and start[q - 2] > 9": {"start": "N"},
}


def arrays_of(params, tokens, documents):
    rng = np.random.default_rng(4)
    sizes = {"N": tokens, "D": documents, "H": HEADS, "K": tokens // 32 + 1}
    result = {}
    for name, shape in params.items():
        if isinstance(shape, int):
            result[name] = shape
        elif name == "keep":
            result[name] = torch.from_numpy(rng.random([sizes[x] for x in shape]) < 0.5)
        else:
            most = 3 if name == "doc" else 60
            result[name] = torch.from_numpy(rng.integers(0, most, [sizes[x] for x in shape], np.int32))
    return result


def shown(mask, positions, keys, packed_tokens, b, h):
    """What a line shows of one document or sequence: (rows, keys), by its text alone. ``packed_tokens`` are
    the tokens of the document among those of the call, None for a sequence of its own.
    """
    rule = mask.rule.rule

    def load(param):
        x = mask.arrays[param.name].numpy()
        x = x.reshape((1,) * (len(param.dimensions) - x.ndim) + x.shape)

        def element(*indices):
            if packed_tokens is not None and param.per_token is not None:
                return x[0][packed_tokens[indices[1]]]
            return x[tuple(np.clip(i, 0, size - 1) for i, size in zip(indices, x.shape, strict=True))]

        return element

    names = {"q": positions[:, None], "kv": keys, "b": b, "h": h, **mask.numbers}
    result = evaluate(rule.tree, names | {param.name: load(param) for param in rule.arrays}, np)
    return np.broadcast_to(result, (len(positions), len(keys)))


def whole(mask, cu, packed, visible, b, h):
    """What the call shows, (tokens, tokens)."""
    seen = np.zeros((cu[-1], cu[-1]), bool)
    for number, (begin, end) in enumerate(pairwise(cu)):
        at = np.arange(end - begin)
        some = shown(mask, at, at, np.arange(begin, end) if packed else None, number if packed else b, h)
        far = at - at[:, None]
        some = some & (visible.left is None or far >= -visible.left)
        seen[begin:end, begin:end] = some & (visible.right is None or far <= visible.right)
    return seen


def of_ranks(mask, cu, packed, visible, b, h, layout, world, change=lambda rows: rows):
    """The same, of the launches of all ranks; each launch has one query head."""
    seen = np.zeros((cu[-1], cu[-1]), int)
    units = tuple(unit_of((shard,), world == 1) for shard in shards_of(layout, cu, world))
    for place in range(world):
        for part in parts_of(units, place, cu):
            rows = change(rows_of(part, cu))
            count = len(rows.position)
            if not count:
                continue
            cpu = torch.device("cpu")
            other = mask_of(mask, rows, visible, packed, slice(h, h + 1), cpu)
            keys = len(rows.tokens)
            for param in other.rule.rule.arrays:  # of tokens as long as the keys, as kernels expect
                if "token" in param.dimensions:
                    assert other.arrays[param.name].shape[-1] == keys
            at = np.arange(keys - count, keys)
            tree_of_rows = _with_rows_from_0(other, at, keys)
            tokens = rows.tokens[rows.first_key + rows.position]
            seen[np.ix_(tokens, rows.tokens)] += tree_of_rows(b)
    return seen


def _with_rows_from_0(mask, at, keys):
    """What a new line shows to its rows; an array with dimensions q and kv counts queries from 0."""
    rule = mask.rule.rule

    def load(param):
        x = mask.arrays[param.name].numpy()
        x = x.reshape((1,) * (len(param.dimensions) - x.ndim) + x.shape)

        def element(*indices):
            shifted = (
                i - at[0] if dimension == "q" else i
                for dimension, i in zip(param.dimensions, indices, strict=True)
            )
            return x[tuple(np.clip(i, 0, size - 1) for i, size in zip(shifted, x.shape, strict=True))]

        return element

    loads = {param.name: load(param) for param in rule.arrays}

    def of_batch(b):
        names = {"q": at[:, None], "kv": np.arange(keys), "b": b, "h": 0, **mask.numbers, **loads}
        return np.broadcast_to(evaluate(rule.tree, names, np), (len(at), keys))

    return of_batch


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("line", [*LINES, *ALONE])
def test_rows_see_what_they_see_in_the_whole_call(line, layout):
    windows = (-1, -1), (-1, 0), (50, 20)
    visible = visibility(False, windows[([*LINES, *ALONE].index(line) + LAYOUTS.index(layout)) % 3])
    for packed in (False, True) if line in LINES else (False,):
        cu = CU if packed else (0, 260)
        params = arrays_of(LINES.get(line) or ALONE[line], cu[-1], len(cu) - 1 if packed else BATCH)
        mask = flashgen.Mask(line, **params)
        for b, h, world in ((0, 0, 2), (0 if packed else 1, 3, 3)):
            right = whole(mask, cu, packed, visible, b, h)
            assert (of_ranks(mask, cu, packed, visible, b, h, layout, world) == right).all()


FAULTS = {
    "positions of a shard": lambda x: x._replace(position=np.arange(len(x.position))),
    "a row of another document": lambda x: x._replace(document=x.document[::-1].copy()),
    "keys from another token on": lambda x: x._replace(first_key=x.first_key + 1),
    "keys past the document": lambda x: x._replace(length=x.length + 9),
    "keys in another order": lambda x: x._replace(tokens=np.roll(x.tokens, 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_that_are_elsewhere_are_noticed(fault):
    line = "doc[b, q] == doc[b, kv] or kv < prefix[b] or (kv + q) % 7 == 0"
    mask = flashgen.Mask(line, **arrays_of({"doc": "N", "prefix": "D"}, CU[-1], len(CU) - 1))
    visible = visibility(False, (-1, -1))
    call = mask, CU, True, visible, 0, 0
    right = whole(*call)
    assert (of_ranks(*call, "whole_documents", 2) == right).all()

    def change(rows: Rows) -> Rows:
        return FAULTS[fault](rows)

    try:
        wrong = of_ranks(*call, "whole_documents", 2, change)
    except IndexError:
        return
    assert (wrong != right).any()


def test_what_depends_on_other_positions_is_refused():
    from flashgen.distributed.masks import check_mask

    table = torch.zeros(9, dtype=torch.int32)
    for line, packed in (("table[q - kv] > 0", False), ("table[kv // 2] > 0", True), ("table[kv] > q", True)):
        mask = flashgen.Mask(line, table=table)
        with pytest.raises(BadParam, match="no rank has the index"):
            check_mask(mask, 9, packed, 4, True)
    check_mask(flashgen.Mask("table[q - kv] > 0", table=table), 9, False, 4, False)
