"""Masks by a line: what they mean, element by element and block by block."""

import numpy as np
import pytest

import flashgen
from flashgen.operators.maskblocks import EMPTY, FULL, PARTIAL, blocks_of
from flashgen.operators.parser import MASK, FormulaError, parse
from operators.lines import BATCH, HEADS, ORDERS, line_and_values, python_value, visibility_of_line

NAMES = {"q": "int", "kv": "int", "h": "int", "b": "int", "n": "int"}
ARRAYS = {"doc": (("b", "token"), "int"), "table": (("axis0",), "int")}


def seen(visibility, b, h, seqlen_q, seqlen_kv):
    """Which keys each row of a head sees, element by element."""
    hidden = visibility.hides(b, h, np.arange(seqlen_q)[:, None], np.arange(seqlen_kv))
    return ~np.broadcast_to(hidden, (seqlen_q, seqlen_kv))


@pytest.mark.parametrize("case", range(12))
def test_a_line_means_what_python_makes_of_it(case):
    rng = np.random.default_rng()
    for _ in range(10):
        seqlen_q, seqlen_kv = rng.integers(1, 30, 2)
        line, visibility, values = line_and_values(rng, seqlen_q, seqlen_kv)
        b, h, i, j = (int(rng.integers(0, n)) for n in (BATCH, HEADS, seqlen_q, seqlen_kv))
        expected = python_value(line, values, b, h, i, j, int(seqlen_kv - seqlen_q))
        assert seen(visibility, b, h, seqlen_q, seqlen_kv)[i, j] == expected, (line, values, b, h, i, j)


def check_blocks(visibility, line, seqlen_q, seqlen_kv, rows, keys):
    """No visible block is missed, and a full block is full. Returns the blocks."""
    blocks = blocks_of(visibility, BATCH, HEADS, seqlen_q, seqlen_kv, rows, keys)
    for b in range(BATCH):
        for h in range(HEADS):
            visible = seen(visibility, b, h, seqlen_q, seqlen_kv)
            verdicts = blocks.verdicts(b, h)
            for i in range(blocks.num_row_blocks):
                for j in range(blocks.num_key_blocks):
                    part = visible[i * rows : (i + 1) * rows, j * keys : (j + 1) * keys]
                    assert verdicts[i, j] != EMPTY or not part.any(), (line, b, h, i, j)
                    assert verdicts[i, j] != FULL or part.all(), (line, b, h, i, j)
    return blocks


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seqlen_kv", [1, 127, 129, 1000])
def test_no_visible_block_is_missed_and_a_full_block_is_full(seqlen_kv, order):
    rng = np.random.default_rng()
    for _ in range(3 if seqlen_kv == 1000 else 12):
        seqlen_q = int(rng.choice([seqlen_kv, seqlen_kv, 1, seqlen_kv // 2 + 1, seqlen_kv + 70]))
        line, visibility, _ = line_and_values(rng, seqlen_q, seqlen_kv, order)
        rows, keys = (int(rng.choice([16, 64, 80, 128])) for _ in range(2))
        check_blocks(visibility, line, seqlen_q, seqlen_kv, rows, keys)


def exact(visibility, seqlen, size=128):
    """The verdicts that every element of a block decides."""
    visible = seen(visibility, 0, 0, seqlen, seqlen)
    blocks = visible.reshape(seqlen // size, size, seqlen // size, size)
    return np.where(blocks.all((1, 3)), FULL, np.where(blocks.any((1, 3)), PARTIAL, EMPTY))


SEQLEN = 2048
DOC = np.sort(np.random.default_rng(3).integers(0, 9, SEQLEN)).astype(np.int32)
FIRST = np.searchsorted(DOC, DOC).astype(np.int32)
SHIPPED = {
    "documents": {"doc": DOC},
    "documents_full": {"doc": DOC},
    "document_starts": {"start": FIRST},
    "prefix_lm": {"prefix": np.array([700], np.int32)},
    "window_first": {"width": 300, "first": 64},
    "chunks": {"size": 300},
    "block_causal": {"size": 96},
    "frames": {"frame": (np.arange(SEQLEN) // 390).astype(np.int32)},
    "padding": {"begin": np.array([173], np.int32), "end": np.array([1800], np.int32)},
    "neighbourhood": {"width": 64, "reach": 6},
}


@pytest.mark.parametrize("name", SHIPPED)
def test_blocks_of_shipped_masks_are_exact(name):
    mask = flashgen.Mask(name, **SHIPPED[name])
    blocks = mask.blocks(seqlen_kv=SEQLEN)
    (visibility,) = visibility_of_line(mask.visible, SHIPPED[name], SEQLEN, SEQLEN)
    np.testing.assert_array_equal(blocks.verdicts(), exact(visibility, SEQLEN))


def verdicts(line, seqlen=512, **values):
    return flashgen.Mask(line, **values).blocks(64, 64, seqlen_kv=seqlen).verdicts()


@pytest.mark.parametrize("place", [0, 1, 63, 64, 127, 128, 129])
def test_every_element_of_a_block_counts(place):
    mark = np.zeros(130, np.int32)
    mark[place] = 1
    for line, axis in (("mark[kv] == 1", 1), ("mark[q] == 1", 0)):
        found = verdicts(line, 130, mark=mark)
        expected = np.zeros((3, 3), int)
        expected[(place // 64,) if axis == 0 else (slice(None), place // 64)] = PARTIAL
        np.testing.assert_array_equal(found, expected)
        hidden = verdicts(line.replace("== 1", "== 0"), 130, mark=mark)
        np.testing.assert_array_equal(hidden, FULL - expected)


# Pitfalls. A verdict "partial" where a block is full or empty costs time, and never a result.
def test_equal_operands_on_both_sides_cancel():
    same = verdicts("kv <= q")
    for line in ("q + kv + 5 >= kv + kv + 5", "kv - q <= 0", "0 <= q - kv", "2 * kv <= q + kv", "not kv > q"):
        np.testing.assert_array_equal(verdicts(line), same, line)
    doc = np.arange(512, dtype=np.int32) // 100
    equal, difference = (verdicts(x, doc=doc) for x in ("doc[q] == doc[kv]", "doc[q] - doc[kv] == 0"))
    np.testing.assert_array_equal(equal, difference)


def test_a_tautology_over_two_terms_stays_partial_and_right():
    assert (verdicts("q >= kv or q < kv") == PARTIAL).sum() == 8  # the diagonal
    assert (verdicts("q >= kv or not q >= kv") != EMPTY).all()


def test_a_sentinel_widens_a_block_to_partial():
    spans = np.full(512, -1, np.int32)
    spans[100:300] = 1
    by_id = verdicts("kv <= q or (span[q] == span[kv] and span[q] >= 0)", span=spans)
    last = np.arange(512, dtype=np.int32)
    last[100:300] = 299
    by_bound = verdicts("kv <= q or kv <= last[q]", last=last)
    assert (by_bound == PARTIAL).sum() <= (by_id == PARTIAL).sum()


def test_rows_and_keys_past_the_end_do_not_count():
    assert (verdicts("kv < 130 and q < 130", seqlen=130) == FULL).all()
    doc = np.zeros(130, np.int32)
    assert (verdicts("doc[q] == doc[kv]", seqlen=130, doc=doc) == FULL).all()


def test_division_rounds_down_before_the_first_key():
    mask = flashgen.Mask("q // 4 == -1 and q % 4 == 3 and kv >= 0")
    (visibility,) = visibility_of_line(mask.visible, {}, 20, 10)  # row 9 is at position -1
    assert np.flatnonzero(seen(visibility, 0, 0, 20, 10).any(1)).tolist() == [9]


def test_products_of_positions_have_64_bits():
    far = 2**29
    mask = flashgen.Mask("q * kv < 100 * n", n=3)
    (visibility,) = visibility_of_line(mask.visible, {"n": 3}, far, far)
    rows, keys = np.array([[far - 1], [2]]), np.array([far - 1, 100])
    np.testing.assert_array_equal(~visibility.hides(0, 0, rows, keys), [[False, False], [False, True]])
    with pytest.raises(FormulaError, match=r"'q \* kv \* kv' may be too large"):
        parse("q * kv * kv < 5", NAMES, {}, MASK)


def test_an_index_that_is_computed_counts_as_partial_and_is_clamped():
    doc = np.arange(512, dtype=np.int32)
    assert (verdicts("doc[kv + 1] >= 0", doc=doc) == PARTIAL).all()
    (visibility,) = visibility_of_line("doc[b, kv + 1] == 511", {"doc": np.stack([doc, doc])}, 512, 512)
    assert np.flatnonzero(seen(visibility, 0, 0, 512, 512)[0]).tolist() == [510, 511]
    table = np.array([1, 0, 1], np.int32)
    assert (verdicts("table[2] == 1 and table[0] > 0", table=table) == FULL).all()


def test_lists_follow_the_names_that_a_line_reads():
    shapes = {"kv <= q": (1, 1), "kv <= p[b]": (2, 1), "kv <= q + h": (1, 3), "kv <= p[b] - h": (2, 3)}
    p = np.array([4, 70], np.int32)
    for line, shape in shapes.items():
        params = {"p": p} if "p" in line else {}
        blocks = flashgen.Mask(line, **params).blocks(64, 64, seqlen_kv=128, num_heads=3)
        assert blocks.starts.shape[:2] == shape


def test_a_row_that_sees_nothing_makes_its_block_partial():
    blocks = verdicts("q != 70", seqlen=128)
    assert (blocks == [[FULL, FULL], [PARTIAL, PARTIAL]]).all()


def test_runs_and_counts():
    blocks = flashgen.Mask("prefix_lm", prefix=np.array([128 * 40], np.int32)).blocks(seqlen_kv=131072)
    assert blocks.counts.runs == len(blocks.runs) < 3 * 1024  # 524,000 full blocks
    assert sum(blocks.counts[:3]) == 1024**2
    assert blocks.of_row(100) == [(0, 100, True), (100, 101, False)]
    assert str(blocks).startswith("1,048,576 blocks of 128 x 128: ")
    nothing = flashgen.Mask("kv < 0").blocks(seqlen_kv=256)
    assert nothing.counts == (4, 0, 0, 0)
    assert flashgen.Mask("kv <= q").blocks(seqlen_kv=0).verdicts().shape == (0, 0)
    assert flashgen.Mask("kv <= q").blocks(seqlen_q=10, seqlen_kv=0).verdicts().shape == (1, 0)


def test_memory_grows_with_runs_and_not_with_pairs():
    import tracemalloc

    doc = (np.arange(131072) // 4000).astype(np.int32)
    mask = flashgen.Mask("documents", doc=doc)
    tracemalloc.start()
    try:
        blocks = mask.blocks()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(x.nbytes for x in (blocks.starts, blocks.runs, blocks.is_full)) < 100_000
    assert peak < 100_000_000  # one verdict for each block, and no more


@pytest.mark.parametrize(
    ("line", "at", "says"),
    [
        ("q + kv", 0, "'q \\+ kv' is a number; a mask is a condition"),
        ("q < 1.5", 4, "'1.5' is not an integer"),
        ("q < 3000000000", 4, "not an integer below 2"),
        ("q / 2 < kv", 0, "integers are divided by //"),
        ("q // 0 < kv", 5, "a divisor is an integer above 0"),
        ("q % kv < 2", 4, "a divisor is an integer above 0, or a number among the parameters"),
        ("q < kv & 3", 4, "'kv' is not a condition; & and | bind more tightly than comparisons"),
        ("(q < kv) & q", 11, "'q' is not a condition"),
        ("q < inf", 4, "unknown name 'inf'"),
        ("tanh(q) < 1", 0, "not allowed"),
        ("doc[q] < 1", 0, "doc has 2 dimensions"),
        ("doc[b + 1, q] < 1", 4, "the index of dimension b of doc is b itself"),
        ("doc[b, table[q]] < 1", 7, "cannot itself be an element"),
        ("q < kv or docs < 3", 10, "unknown name 'docs'"),
        ("True", 0, "not allowed"),
        ("~q", 1, "'q' is not a condition"),
        ("q <", None, "is not an expression"),
        ("(" * 60 + "q < kv" + ")" * 60 + " and " + "not " * 60 + "q < 1", None, "nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_with_its_place(line, at, says):
    with pytest.raises(FormulaError, match=says) as caught:
        parse(line, NAMES, ARRAYS, MASK)
    assert at is None or caught.value.column == at


def test_words_and_signs_are_one_language():
    def tree(line):
        return parse(line, NAMES, ARRAYS, MASK)

    assert tree("(q < kv) & ~(q == 3) | (kv > n)") is tree("q < kv and not q == 3 or kv > n")
    assert tree("0 <= q - kv < n") is tree("0 <= q - kv and q - kv < n")
