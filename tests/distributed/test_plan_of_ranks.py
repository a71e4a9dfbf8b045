"""Layouts, segments and the partition, for any number of ranks: pure Python, so all ranks are here."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashgen
from flashgen.distributed.heads import head_shares
from flashgen.distributed.layouts import (
    LAYOUTS,
    TILE_ROWS,
    Run,
    joined,
    runs_of,
    shards_of,
    tokens_of,
    unit_of,
)
from flashgen.distributed.parts import parts_of
from flashgen.distributed.segments import (
    Launch,
    Segment,
    Visibility,
    launches_of,
    longest_of,
    pairs_of,
    visibility,
)
from flashgen.errors import BadParam

WINDOWS = ((-1, -1), (5, 0), (5, 3), (-1, 2), (4, -1))


def visible_pairs(cu, visible):
    """How often each (query, key) pair of all tokens is to be computed: once where it is visible."""
    seen = np.zeros((cu[-1], cu[-1]), int)
    for begin, end in pairwise(cu):
        rows, keys = np.arange(end - begin)[:, None], np.arange(end - begin)
        shown = np.ones((end - begin, end - begin), bool)
        if visible.left is not None:
            shown &= keys >= rows - visible.left
        if visible.right is not None:
            shown &= keys <= rows + visible.right
        seen[begin:end, begin:end] = shown
    return seen


def computed_pairs(shards, launches, visible, count):
    """How often kernels compute each pair: masks align with the last row and the last key of a segment."""
    seen = np.zeros((count, count), int)
    for runs, of_rank in zip(shards, launches, strict=True):
        tokens = np.concatenate([np.arange(*run) for run in runs]) if runs else np.empty(0, int)
        for launch in of_rank:
            for x in launch.segments:
                rows = np.arange(x.q_end - x.q_begin)[:, None] + (x.k_end - x.k_begin) - (x.q_end - x.q_begin)
                keys = np.arange(x.k_end - x.k_begin)
                shown = np.ones((len(rows), len(keys)), bool)
                if visible.left is not None:
                    shown &= keys >= rows - visible.left - launch.shift
                if visible.right is not None:
                    shown &= keys <= rows + visible.right - launch.shift
                seen[np.ix_(tokens[x.q_begin : x.q_end], np.arange(x.k_begin, x.k_end))] += shown
    return seen


def plan(layout, cu, world, visible, packed):
    shards = runs_of(layout, cu, world)
    return shards, [launches_of(runs, cu, visible, packed) for runs in shards]


def parts_of_units(layout, cu, world, inner):
    """The units of a call, and the parts of each of them."""
    shards = shards_of(layout, cu, world)
    alone = inner == world
    units = tuple(unit_of(shards[i : i + inner], alone) for i in range(0, world, inner))
    return units, [parts_of(units, place, cu) for place in range(len(units))]


def computed_by_parts(units, parts, visible, packed, cu):
    """How often each pair is computed by the launches of parts. A part counts the tokens of its documents
    from 0, and its rows are some of the unit's.
    """
    seen = np.zeros((cu[-1], cu[-1]), int)
    lengths = {begin: end - begin for begin, end in pairwise(cu) if begin < end}
    for unit, of_unit in zip(units, parts, strict=True):
        rows = np.array([token for run in unit.runs for token in range(*run)], int)
        for part in of_unit:
            chosen = dict.fromkeys(first for first in part.documents if first in lengths)
            tokens = np.array([first + i for first in chosen for i in range(lengths[first])], int)
            assert len(tokens) == part.cu_seqlens[-1]
            own = [token for run in part.own for token in range(*run)]
            assert (tokens[own] == rows[part.rows]).all()
            launches = launches_of(part.own, part.cu_seqlens, visible, packed)
            seen[np.ix_(tokens, tokens)] += computed_pairs([part.own], [launches], visible, len(tokens))
    return seen


documents = st.lists(st.integers(0, 40), min_size=1, max_size=6).map(
    lambda sizes: tuple(np.cumsum([0, *sizes]).tolist())
)


@given(
    documents,
    st.sampled_from(LAYOUTS),
    st.sampled_from((1, 2, 3, 4, 16)),
    st.booleans(),
    st.sampled_from(WINDOWS),
)
def test_every_visible_pair_is_computed_once(cu, layout, world, causal, window):
    visible = visibility(causal, (window[0], 0) if causal else window)
    for bounds, packed in ((cu, True), ((0, cu[-1]), False)):
        shards, launches = plan(layout, bounds, world, visible, packed)
        assert sorted(token for runs in shards for run in runs for token in range(*run)) == [*range(cu[-1])]
        seen = computed_pairs(shards, launches, visible, cu[-1])
        assert (seen == visible_pairs(bounds, visible)).all()
        for runs, of_rank in zip(shards, launches, strict=True):
            assert seen[[t for run in runs for t in range(*run)]].sum() == pairs_of(runs, bounds, visible)
            for launch in of_rank:
                for layer in range(launch.layers):  # gradients of a layer are added at distinct rows
                    of_layer = sorted((x.k_begin, x.k_end) for x in launch.segments if x.layer == layer)
                    assert all(x[1] <= y[0] for x, y in pairwise(of_layer))


long_and_short = st.lists(st.sampled_from((1, 40, 130, 300)), min_size=1, max_size=6).map(
    lambda sizes: tuple(np.cumsum([0, *sizes]).tolist())
)


@given(
    st.one_of(documents, long_and_short),
    st.sampled_from(LAYOUTS),
    st.sampled_from(((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (16, 1))),
    st.sampled_from(WINDOWS),
)
def test_parts_compute_every_visible_pair_once(cu, layout, ranks, window):
    world, inner = ranks
    visible = visibility(False, window)
    for bounds, packed in ((cu, True), ((0, cu[-1]), False)):
        units, parts = parts_of_units(layout, bounds, world, inner)
        seen = computed_by_parts(units, parts, visible, packed, bounds)
        assert (seen == visible_pairs(bounds, visible)).all()
        for unit, of_unit in zip(units, parts, strict=True):
            assert sum(part.rows.stop - part.rows.start for part in of_unit) == tokens_of(unit.runs)
            assert [part.gathers for part in of_unit] in ([], [True], [False], [True, False])
            for part in of_unit:  # a part that gathers nothing is one launch, which writes dk and dv
                launches = launches_of(part.own, part.cu_seqlens, visible, packed)
                assert part.gathers or len(launches) == 1


PARTS = {
    "a run is dropped": lambda part: part._replace(runs=(part.runs[0][1:], *part.runs[1:])),
    "a run is doubled": lambda part: part._replace(runs=(part.runs[0] + part.runs[0][-1:], *part.runs[1:])),
    "a run is shifted": lambda part: part._replace(
        runs=(tuple(Run(x.begin - 1, x.end - 1) for x in part.runs[0]), *part.runs[1:])
    ),
    "rows are shifted": lambda part: part._replace(rows=slice(part.rows.start + 1, part.rows.stop + 1)),
    "documents change places": lambda part: part._replace(
        documents=(part.documents[1], part.documents[0], *part.documents[2:])
    ),
}


@pytest.mark.parametrize("fault", PARTS)
@pytest.mark.parametrize("number", [0, 1])
def test_a_wrong_part_is_noticed(fault, number):
    cu, visible = (0, 90, 690, 690, 790, 890, 1890, 1990, 2090), Visibility(None, 0)
    units, parts = parts_of_units("whole_documents", cu, 2, 1)
    assert [part.gathers for part in parts[0]] == [True, False]
    assert all(len(part.documents) >= 2 for part in parts[0])
    broken = list(parts[0])
    broken[number] = PARTS[fault](broken[number])

    def is_right(parts):
        try:
            return (computed_by_parts(units, parts, visible, True, cu) == visible_pairs(cu, visible)).all()
        except (AssertionError, IndexError, ValueError):
            return False

    assert is_right(parts)
    assert not is_right([tuple(broken), parts[1]])


CU, WORLD = (0, 50, 170, 330), 4
FAULTS = {
    "a segment is dropped": lambda launch: launch._replace(segments=launch.segments[1:]),
    "a segment is doubled": lambda launch: launch._replace(segments=(launch.segments[0], *launch.segments)),
    "keys are shifted": lambda launch: launch._replace(
        segments=tuple(x._replace(k_begin=x.k_begin - 1, k_end=x.k_end - 1) for x in launch.segments)
    ),
    "rows are shifted": lambda launch: launch._replace(
        segments=tuple(x._replace(q_begin=x.q_begin + 1) for x in launch.segments)
    ),
    "the last key is missing": lambda launch: launch._replace(
        segments=tuple(x._replace(k_end=x.k_end - 1) for x in launch.segments)
    ),
    "the window is not moved": lambda launch: launch._replace(shift=launch.shift + 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_plan_is_noticed(fault):
    visible = Visibility(7, 4)
    shards, launches = plan("zigzag", CU, WORLD, visible, packed=True)
    right = visible_pairs(CU, visible)
    assert (computed_pairs(shards, launches, visible, CU[-1]) == right).all()
    broken = [
        [FAULTS[fault](of_rank[0]), *of_rank[1:]] if rank == 1 else of_rank
        for rank, of_rank in enumerate(launches)
    ]
    assert (computed_pairs(shards, broken, visible, CU[-1]) != right).any()


@pytest.mark.parametrize("world", [2, 8, 64, 512])
@pytest.mark.parametrize("tokens", [1 << 20, (1 << 17) + 77])
def test_zigzag_is_even_to_a_row_of_tiles(world, tokens):
    shards = runs_of("zigzag", (0, tokens), world)
    work = [pairs_of(runs, (0, tokens), Visibility(None, 0)) for runs in shards]
    assert max(work) - min(work) <= TILE_ROWS * tokens
    assert max(map(tokens_of, shards)) - min(map(tokens_of, shards)) <= 1
    contiguous = [
        pairs_of(x, (0, tokens), Visibility(None, 0)) for x in runs_of("contiguous", (0, tokens), world)
    ]
    assert max(contiguous) > 1.4 * max(work)


def zipf(tokens, documents, seed):
    sizes = [max(1, int(tokens / i / 7)) for i in range(1, documents + 1)]
    random.Random(seed).shuffle(sizes)
    cu = np.minimum(np.cumsum([0, *sizes]), tokens).tolist()
    return (*cu, tokens)


@pytest.mark.parametrize("world", [2, 8])
def test_packed_documents_are_even_to_a_few_rows_of_tiles(world, fresh_seed):
    cu = zipf(1 << 19, 300, fresh_seed)
    shards = runs_of("documents", cu, world)
    work = [pairs_of(runs, cu, Visibility(None, 0)) for runs in shards]
    longest = max(y - x for x, y in pairwise(cu))
    assert max(work) - min(work) <= 3 * TILE_ROWS * longest
    assert max(map(tokens_of, shards)) - min(map(tokens_of, shards)) <= 16 * TILE_ROWS
    assert flashgen.distributed.partition(
        cu, world=world, heads=(32, 8), layout="documents", inner=1
    ).whole_tiles


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("tokens", [1 << 17, 1 << 19])
def test_whole_documents_are_even_in_work_and_tokens(world, tokens, fresh_seed):
    cu = zipf(tokens, 300, fresh_seed)
    shards = shards_of("whole_documents", cu, world)
    for measure in (lambda runs: pairs_of(runs, cu, Visibility(None, 0)), tokens_of):
        of_ranks = [measure(shard.runs) for shard in shards]
        assert max(of_ranks) < 1.05 * sum(of_ranks) / world
    moved = sum(tokens_of(shard.cut) for shard in shards)
    assert 0 < moved < 0.5 * tokens
    assert runs_of("whole_documents", (0, 512, 1024), 2) == ((Run(0, 512),), (Run(512, 1024),))
    few = shards_of("whole_documents", tuple(range(0, 9 * 1024 + 1, 1024)), 8)  # eight are whole
    assert sum(tokens_of(shard.cut) for shard in few) == 1024


@pytest.mark.parametrize(("tokens", "world", "least"), [(1 << 17, 2, 1.8), (1 << 19, 8, 6.7)])
def test_whole_documents_leave_little_to_wait_for_by_the_model(tokens, world, least):
    cu = zipf(tokens, 256, 0)
    whole, cut = (
        flashgen.distributed.partition(cu, world=world, heads=(32, 8), layout=layout, inner=1)
        for layout in ("whole_documents", "documents")
    )
    for name, one in zip(("forward", "backward"), whole.one_gpu, strict=True):
        assert one / getattr(whole, name).total > least
        assert getattr(whole, name).total < getattr(cut, name).total
        assert getattr(whole, name).moving < 0.6 * getattr(cut, name).moving
    assert whole.whole_tiles


def test_a_pair_of_mesh_dimensions_has_runs_as_its_units_alone():
    """Ranks of a unit are neighbours, so what a unit has under zigzag is zigzag over units."""
    inner = runs_of("zigzag", (0, 1600), 8)
    units = tuple(joined(run for runs in inner[i : i + 4] for run in runs) for i in (0, 4))
    assert units == runs_of("zigzag", (0, 1600), 2) == ((Run(0, 400), Run(1200, 1600)), (Run(400, 1200),))


# Per rank in GB, forward: scale-up of 128k and 1M tokens, heads 32 and 8 of 128 in bf16.
@pytest.mark.parametrize(
    ("tokens", "world", "method", "gigabytes"),
    [
        (1 << 17, 2, "gather", 0.268),
        (1 << 17, 2, "ulysses", 0.671),
        (1 << 17, 8, "gather", 0.470),
        (1 << 17, 8, "ulysses", 0.294),
        (1 << 20, 8, "gather", 3.758),
        (1 << 20, 8, "ulysses", 2.349),
        (1 << 20, 64, "gather", 4.228),
    ],
)
def test_bytes_by_formula(tokens, world, method, gigabytes):
    heads = (64, 8) if (method, world) == ("ulysses", 64) else (32, 8)
    part = flashgen.distributed.partition(tokens, world=world, heads=heads, method=method)
    assert part.shares[0].forward_bytes / 1e9 == pytest.approx(gigabytes, abs=6e-4)
    row = 2 * 8 * 128
    if method == "gather":
        share = part.shares[0]
        reduced = 4 * row * (world - 1) * tokens // world
        assert share.backward_bytes == share.forward_bytes + reduced
    assert part.balance == pytest.approx(1, abs=1e-3)


def test_the_model_gives_what_was_measured():
    """Two H200, heads 32 and 8, causal: one and two of them, forward and backward, in ms."""
    for tokens, one_gpu, two_gpus in (
        (1 << 17, (208.2, 577.0), (103.2, 300.8)),
        (1 << 15, (11.04, 34.1), (None, None)),
    ):
        part = flashgen.distributed.partition(tokens, world=2, heads=(32, 8))
        assert part.method == "gather"
        assert part.one_gpu == pytest.approx(one_gpu, rel=0.03)
        for times, ms in zip((part.forward, part.backward), two_gpus, strict=True):
            assert ms is None or times.total == pytest.approx(ms, rel=0.03)


def test_a_million_tokens_over_eight_are_within_95_percent_by_the_model():
    part = flashgen.distributed.partition(1 << 20, world=8, heads=(32, 8))
    for one, times in zip(part.one_gpu, (part.forward, part.backward), strict=True):
        assert one / times.total > 0.95 * 8


def test_between_nodes_two_dimensions_move_less():
    flat = flashgen.distributed.partition(1 << 17, world=64, heads=(32, 8), method="gather")
    square = flashgen.distributed.partition(1 << 17, world=64, heads=(32, 8), inner=8)
    assert (square.method, square.outer, square.inner) == ("gather x ulysses", 8, 8)
    assert square.forward.total < 0.5 * flat.forward.total
    assert "8 x 8" in str(square)


def test_a_partition_prints():
    text = str(
        flashgen.distributed.partition([0, 1000, 1003, 5000], world=2, heads=(8, 2), layout="documents")
    )
    assert "5,000 tokens in 3 documents over 2 ranks" in text
    assert len(text.splitlines()) == 7
    assert "..." in str(flashgen.distributed.partition(4096, world=32, heads=(8, 2)))
    empty = flashgen.distributed.partition(0, world=2, heads=(8, 2), method="gather")
    assert empty.balance == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "ring"}, "'gather' and 'ulysses' can compute"),
        ({"method": "rings"}, "allowed are 'auto', 'gather', 'ulysses'"),
        ({"layout": "striped"}, "'zigzag', 'contiguous', 'documents', 'whole_documents'"),
        ({"world": 0}, "world is 0"),
        ({"inner": 3}, "must divide the 4 ranks"),
        ({"cu_seqlens": [1, 5]}, "expected 0, then the end"),
        ({"cu_seqlens": [0, 5, 3]}, "ascending"),
        ({"cu_seqlens": "many"}, "bounds of all documents"),
        ({"heads": (8, 3)}, r"heads is \(8, 3\); num_heads_q must be a positive multiple"),
        ({"heads": 8}, r"heads is 8; expected \(num_heads_q, num_heads_kv\)"),
        ({"heads": (6, 2), "method": "ulysses"}, "6 heads, which 4 ranks cannot share.*'gather' can"),
    ],
)
def test_what_no_partition_has_is_refused(arguments, message):
    call = {"cu_seqlens": 64, "world": 4, "heads": (8, 2)} | arguments
    with pytest.raises(BadParam, match=message):
        flashgen.distributed.partition(call.pop("cu_seqlens"), **call)


def test_a_function_that_needs_pytorch_says_so():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import flashgen\n"
        "print(flashgen.distributed.partition(64, world=2, heads=(8, 2)).balance)\n"
        "try: flashgen.distributed.attention\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == ("flashgen.distributed.attention needs PyTorch; pip install torch")


def test_heads_are_shared_with_the_kv_heads_that_they_read():
    assert head_shares(8, 4, 2).kv == ((0, 1), (2, 3))
    few = head_shares(8, 2, 4)
    assert (few.kv, few.replicated) == (((0,), (0,), (1,), (1,)), True)
    # Groups of six over four ranks of three: two ranks read one kv head, none reads parts of both.
    assert head_shares(12, 2, 4).kv == ((0,), (0,), (1,), (1,))
    # Groups of three over six ranks of two: a rank has kv head 0 once and 1 once.
    assert head_shares(12, 4, 6).kv == ((0, 0), (0, 1), (1, 1), (2, 2), (2, 3), (3, 3))


def test_a_partition_imports_no_torch():
    code = (
        "import sys, flashgen; assert 'flashgen.distributed' not in sys.modules; "
        "flashgen.distributed.partition(64, world=2, heads=(8, 2)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parts_are_records():
    segment = Segment(0, 4, 0, 4)
    launch = Launch((segment, segment._replace(q_begin=4, q_end=9)), 0)
    assert (launch.rows, longest_of(launch)[0], launch.layers) == (slice(0, 9), 5, 1)
    part = flashgen.distributed.partition(64, world=2, heads=(8, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        part.world = 3
