"""The benchmark's arithmetic, protocol and outputs, with synthetic clocks and peers: no GPU is needed."""

from __future__ import annotations

import gc
import io
import itertools
import json
import math
import re
import warnings
import weakref
from dataclasses import astuple, replace
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flashgen.errors import BadParam, DeviceTypeNotSupported
from flashgen.tools.bench import agreement, chart, environment, traffic
from flashgen.tools.bench.cases import Case
from flashgen.tools.bench.grids import GRIDS, find_grid
from flashgen.tools.bench.hosts import Inputs, filled, quarter_turns
from flashgen.tools.bench.peers import all_peers, choose_peers, registry, torch_sdpa
from flashgen.tools.bench.peers.own import Flashgen
from flashgen.tools.bench.results import Measurement, Report, Row
from flashgen.tools.bench.roofline import roofline
from flashgen.tools.bench.runner import measure, run
from flashgen.tools.bench.table import cell, line, print_tables, tables
from flashgen.tools.bench.timing import (
    Step,
    Timing,
    graph_step,
    rotation,
    stream_step,
    summarize,
    time_interleaved,
)
from flashgen.tools.bench.zipf import zipf_lengths


def a_case(**changes) -> Case:
    shape = {"batch": 2, "seqlen_q": 48, "seqlen_kv": 64, "num_heads_q": 4, "num_heads_kv": 2, "head_dim": 16}
    return Case(name=changes.pop("name", "a"), **(shape | changes))


def visible(case: Case) -> np.ndarray:
    distance = (
        np.arange(case.seqlen_kv) - np.arange(case.seqlen_q)[:, None] - (case.seqlen_kv - case.seqlen_q)
    )
    left = {"causal": case.seqlen_kv, "random_causal": case.seqlen_kv, "window": case.window}.get(case.mask)
    seen = np.ones_like(distance, bool) if left is None else (-left <= distance) & (distance <= 0)
    return seen & ~case.hidden(np.random.default_rng(0)) if case.is_dense else seen


# Cases


@given(
    seqlen_q=st.integers(1, 40),
    seqlen_kv=st.integers(1, 40),
    window=st.integers(0, 50),
    mask=st.sampled_from(["none", "window", "documents"]),
    documents=st.integers(1, 5),
)
def test_counted_pairs_are_the_visible_ones(seqlen_q, seqlen_kv, window, mask, documents):
    case = a_case(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, window=window, mask=mask, documents=documents)
    assert case.pairs == np.count_nonzero(visible(case))


@pytest.mark.parametrize("seqlen", [700, 1024])
@pytest.mark.parametrize(("choice", "most"), [("moba", 3 * 512), ("nsa", 16 * 64)])
def test_a_choice_of_blocks_counts_and_shows_the_same_pairs(seqlen, choice, most):
    case = a_case(mask="blocks", choice=choice, seqlen_q=seqlen, seqlen_kv=seqlen)
    seen = visible(case)
    assert case.pairs == np.count_nonzero(seen)
    assert seen.diagonal().all()
    assert not np.triu(seen, 1).any()
    assert seen.sum(1).max() <= most


def test_a_choice_is_of_blocks_and_of_as_many_keys_as_queries():
    with pytest.raises(BadParam, match="choice is 'nsa'"):
        a_case(choice="nsa")
    with pytest.raises(BadParam, match="as many keys as queries"):
        a_case(mask="blocks", choice="nsa", seqlen_q=64, seqlen_kv=128)


def test_window_counts_itself_and_the_keys_before_it():
    case = a_case(seqlen_q=4096, seqlen_kv=4096, mask="window", window=1024)
    assert case.pairs == sum(min(row, 1024) + 1 for row in range(4096))


def test_flops_are_four_per_pair_and_channel_and_halved_by_causal():
    full, causal = a_case(), a_case(mask="causal")
    assert full.flops == 4 * 2 * 4 * 48 * 64 * 16
    assert causal.flops == full.flops / 2


def test_a_narrower_v_makes_less_work_and_moves_less():
    case = a_case(head_dim=24, head_dim_v=8, dtype="fp16")
    assert case.flops == a_case().flops
    host = FakeHost()
    q, k, v, out, *_ = astuple(host.inputs(case, 0))
    assert out.shape == (*q.shape[:-1], 8)
    assert case.bytes_moved == 2 * (q.size + k.size + v.size + out.size)


def test_bytes_of_keys_are_those_that_are_seen():
    whole = a_case(seqlen_q=1, seqlen_kv=64, dtype="fp16", head_dim=16, num_heads_kv=2, batch=2)
    assert whole.kv_bytes == 2 * 64 * 2 * (16 + 16) * 2
    assert replace(whole, head_dim_v=8).kv_bytes == whole.kv_bytes * 3 // 4
    assert replace(whole, mask="window", window=15, seqlen_q=4).kv_bytes == whole.kv_bytes * 19 // 64


def test_bytes_count_every_array_once():
    case = a_case(dtype="fp32")
    q = np.zeros((2, 48, 4, 16), np.float32)
    k = np.zeros((2, 64, 2, 16), np.float32)
    assert case.bytes_moved == 2 * q.nbytes + 2 * k.nbytes


@pytest.mark.parametrize(
    ("grid", "head_dims", "lengths"),
    [("prefill", (64, 128, 256), (1024, 2048, 4096, 8192, 16_384)), ("head_dims", (32, 96, 192), (4096,))],
)
def test_sweeps_hold_tokens_and_width_and_exactly_their_cells(grid, head_dims, lengths):
    cases = GRIDS[grid].cases
    cells = [(c.dtype, c.head_dim, c.mask, c.seqlen_q) for c in cases]
    assert sorted(cells) == sorted(product(("fp16", "bf16"), head_dims, ("none", "causal"), lengths))
    assert all(c.batch * c.seqlen_q == 16_384 for c in cases)
    assert all(c.num_heads_q == 2048 // c.head_dim for c in cases)


def test_ragged_lengths_stand_beside_the_next_multiple_of_every_tile():
    cases = {case.name: case for case in GRIDS["ragged"].cases}
    ragged = [case for case in cases.values() if case.baseline]
    cells = [(c.dtype, c.head_dim, c.mask, c.seqlen_q) for c in ragged]
    assert sorted(cells) == sorted(
        product(("fp16", "bf16"), (64, 128, 256), ("none", "causal"), (1000, 4095, 8191))
    )
    for case in ragged:
        base = cases[case.baseline]
        rounded = -(-case.seqlen_q // 1024) * 1024
        assert replace(case, name="", seqlen_q=0, seqlen_kv=0, baseline=None, loss_limit=None) == replace(
            base, name="", seqlen_q=0, seqlen_kv=0
        )
        assert (base.seqlen_q, base.seqlen_kv) == (rounded, rounded)
        assert case.loss_limit == 0.05


@pytest.mark.parametrize("grid", GRIDS.values(), ids=lambda grid: grid.name)
def test_groups_hold_each_case_once_beside_its_baseline(grid):
    groups = grid.groups()
    assert sorted(c.name for group in groups for c in group) == sorted(c.name for c in grid.cases)
    for first, *others in groups:
        assert first.baseline is None
        assert all(case.baseline == first.name for case in others)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=lambda grid: grid.name)
def test_names_are_unique_and_baselines_exist_before_their_users(grid):
    names = [case.name for case in grid.cases]
    assert len(set(names)) == len(names)
    for index, case in enumerate(grid.cases):
        assert case.baseline is None or case.baseline in names[:index]
        assert case.num_heads_q % case.num_heads_kv == 0


def test_a_grouping_is_pinned_whatever_dispatch_would_take(fake_gpu):
    from fake_gpu import array

    case = a_case(head_dim=64, num_heads_q=16, mask="causal")
    q, kv = (2, 48, 16, 64), (2, 64, 2, 64)
    inputs = Inputs(*(array(shape, address=(n + 1) << 32) for n, shape in enumerate((q, kv, kv, q))), None)
    for grouping in ("gqa", "packed"):
        peer = Flashgen(grouping)
        peer.prepare(case, [inputs])(0)
        function, *_ = fake_gpu.launches[-1]
        assert fake_gpu.variants[function].gqa == grouping
        assert fake_gpu.variants[function].name == peer.variant


def test_choosing_keeps_baselines_and_refuses_the_unknown():
    grid = find_grid("masks").choose(where={"mask": ["window"]})
    assert [case.name for case in grid.cases] == ["causal", "window 1k"]
    assert {c.dtype for c in find_grid("prefill").choose(["bf16"]).cases} == {"bf16"}
    with pytest.raises(BadParam, match="head_dims"):
        find_grid("masks").choose(where={"head_dims": [64]})
    with pytest.raises(BadParam, match="no case"):
        find_grid("masks").choose(["e4m3"])
    with pytest.raises(BadParam, match="prefill"):
        find_grid("prefil")


LENGTHS = {
    "cache": {"lengths": "cache", "seqlen_q": 1},
    "pages": {"lengths": "cache", "seqlen_q": 1, "page_size": 16},
    "append": {"lengths": "cache", "seqlen_q": 1, "appends": True},
    "append pages": {"lengths": "cache", "seqlen_q": 3, "page_size": 4, "appends": True, "mask": "causal"},
    "packed": {"lengths": "packed", "mask": "causal"},
    "zipf": {"lengths": "zipf", "seqlen_q": 64, "batch": 5, "mask": "causal"},
}
LATENT = {"lengths": "cache", "seqlen_q": 1, "page_size": 16, "num_heads_kv": 1}
LATENT |= {"head_dim": 320, "head_dim_v": 256, "latent": True}
PADDED = {
    "padded": {"lengths": "cache", "seqlen_q": 1, "left_padding": 5},
    "latent pages": LATENT,
    "lists of tokens": LATENT | {"topk": 9},
    "tree": {"lengths": "cache", "seqlen_q": 5, "page_size": 16, "mask": "tree"},
    "padded pages": {"lengths": "cache", "seqlen_q": 1, "page_size": 16, "left_padding": 21},
    "line": {"lengths": "cache", "seqlen_q": 5, "page_size": 16, "mask": "line", "line": "documents"},
}


@given(count=st.integers(1, 80), mean=st.integers(1, 600))
def test_zipf_lengths_add_up_and_fall_by_rank(count, mean):
    lengths = zipf_lengths(count, mean)
    assert sum(lengths) == count * mean
    assert lengths == zipf_lengths(count, mean)
    first, *rest = sorted(lengths, reverse=True)
    for rank, length in enumerate(rest, 2):
        assert length <= first / rank < length + 1 + count  # whole tokens, and the first has the remainder


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("lengths", ["packed", "zipf"])
def test_packed_sequences_count_the_visible_pairs(lengths, mask):
    shape = {"seqlen_q": 64} if lengths == "zipf" else {"seqlen_q": 70, "seqlen_kv": 64}
    case = a_case(lengths=lengths, mask=mask, batch=6, **shape)
    one = {"batch": 1, "mask": mask, "lengths": "none"}
    seen = [visible(replace(case, **one, seqlen_q=q, seqlen_kv=kv)) for q, kv in case.sequences]
    assert case.pairs * case.batch == sum(np.count_nonzero(x) for x in seen)
    q, k, v, out, *_ = astuple(FakeHost().inputs(case, 0))
    assert case.bytes_moved == 2 * (q.size + k.size + v.size + out.size)


@pytest.mark.parametrize(
    "fields",
    [
        {"lengths": "cache", "mask": "window", "window": 3},
        {"lengths": "packed", "score": "softcap"},
        {"lengths": "zipf", "seqlen_q": 3},
        {"page_size": 16},
        {"lengths": "packed", "appends": True},
        {"lengths": "some"},
        {"direction": "sideways"},
        {"direction": "backward", "lengths": "cache", "seqlen_q": 1},
        {"deterministic": True},
    ],
    ids=str,
)
def test_a_case_that_no_peer_can_time_is_refused(fields):
    with pytest.raises(BadParam, match="bench case 'a'"):
        a_case(**fields)


def test_gradients_are_two_and_a_half_times_the_work_and_move_what_they_take_and_make():
    for changes in ({}, {"mask": "causal"}, {"mask": "window", "window": 5}):
        case = a_case(**changes)
        assert replace(case, direction="backward").flops == 2.5 * case.flops
    case = a_case(dtype="fp32", direction="backward", head_dim_v=8)
    s = FakeHost().inputs(case, 0)
    arrays = (s.dout, s.q, s.k, s.v, s.out, s.lse, s.dq, s.dk, s.dv)
    assert case.bytes_moved == 4 * sum(x.size for x in arrays)
    assert [x.shape for x in s.results] == [s.q.shape, s.k.shape, s.v.shape]


def test_the_grid_of_gradients_has_its_cells_and_each_deterministic_one_beside_the_default():
    cases = {case.name: case for case in GRIDS["backward"].cases}
    sweep = [c for c in cases.values() if c.name.startswith("bf16") and not c.deterministic]
    assert sorted((c.head_dim, c.mask, c.seqlen_q) for c in sweep) == sorted(
        product((32, 64, 96, 128, 192, 256), ("none", "causal"), (1024, 4096, 16_384))
    )
    assert all(c.batch * c.seqlen_q == 16_384 and c.num_heads_q == 2048 // c.head_dim for c in sweep)
    assert all(c.is_backward for c in cases.values())
    fixed = [c for c in cases.values() if c.deterministic]
    assert [c.baseline for c in fixed] == [c.name for c in sweep if c.seqlen_q == 4096]
    for case in fixed:
        plain = {"name": "", "also": ""}
        assert replace(case, deterministic=False, baseline=None, loss_limit=None, **plain) == replace(
            cases[case.baseline], **plain
        )
        assert case.loss_limit == 0.08
    others = [c for c in cases.values() if c not in sweep and c not in fixed]
    assert {(c.num_heads_q, c.num_heads_kv, c.mask, c.seqlen_q, c.dtype, c.clock) for c in others} == {
        (32, 8, "causal", 8192, "bf16", "stream"),
        (16, 1, "causal", 8192, "bf16", "stream"),
        (16, 16, "window", 8192, "bf16", "stream"),
        (16, 16, "random", 4096, "bf16", "stream"),
        (16, 16, "blocks", 16_384, "bf16", "stream"),
        (16, 16, "none", 4096, "bf16", "stream"),  # with a softcap
        (16, 16, "causal", 4096, "bf16", "stream"),  # with ALiBi
        (16, 16, "none", 4096, "fp32", "stream"),
        (16, 16, "causal", 512, "bf16", "stream"),  # packed, as is the next
        (16, 4, "causal", 512, "bf16", "stream"),
        (16, 16, "causal", 4096, "fp32", "stream"),
        (16, 16, "none", 512, "bf16", "graph"),
        (16, 16, "causal", 512, "bf16", "graph"),
        (32, 8, "causal", 512, "bf16", "stream"),  # in the mean
    }


def test_pages_are_set_against_the_contiguous_cache_and_appends_against_decode():
    cases = {case.name: case for case in GRIDS["paged"].cases}
    assert [c for c in cases if "pages" not in c] == [c.name for c in GRIDS["decode"].cases[:7]]
    for case in cases.values():
        if case.page_size:
            base = cases[case.baseline]
            assert (base.lengths, base.page_size) == ("cache", 0)
            assert case.kv_bytes == base.kv_bytes
            assert case.loss_limit == (0.10 if case.page_size == 1 else 0.03)
    assert {case.page_size for case in cases.values()} == {0, 1, 16, 64, 256}
    cases = {case.name: case for case in GRIDS["append"].cases}
    for case in cases.values():
        assert case.appends == (case.baseline is not None)
        if case.appends:
            assert replace(case, name="", appends=False, baseline=None) == replace(
                cases[case.baseline], name=""
            )


# Timing


class FakeClock:
    """A device whose time passes only when something is launched on it."""

    def __init__(self):
        self.now = 0.0
        self.launched = []
        self.open = 0

    def launch(self, name, ms):
        self.launched.append(name)
        self.now += ms

    def record(self):
        self.open += 1
        return SimpleNamespace(at=self.now, passed=False, clock=self)

    def synchronize(self):
        self.open = 0

    def elapsed_ms(self, start, end):
        assert self.open == 0, "events were read before the device was waited for"
        return end.at - start.at

    def capture(self, body):
        before = self.now
        body()
        took, self.now = self.now - before, before
        return lambda: self.launch("replay", took)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40))
def test_summary_orders_its_quartiles_within_the_samples(samples):
    timing = summarize(samples, 1)
    assert min(samples) <= timing.q25_ms <= timing.median_ms <= timing.q75_ms <= max(samples) * (1 + 1e-12)
    assert timing.rounds == len(samples)


def test_one_outlier_moves_neither_median_nor_spread():
    timing = summarize([1.0] * 9 + [100.0], 1)
    assert (timing.median_ms, timing.spread) == (1.0, 0.0)


def test_interleaving_finds_each_time_and_every_round_has_an_order_of_its_own():
    clock = FakeClock()
    costs = {"a": 0.5, "b": 2.0, "c": 40.0}
    steps = {name: stream_step(lambda _, n=name: clock.launch(n, costs[n]), 1) for name in costs}
    timings = time_interleaved(steps, clock, rounds=60, sample_ms=4.0)
    assert {name: timing.median_ms for name, timing in timings.items()} == pytest.approx(costs)
    assert {name: timing.calls for name, timing in timings.items()} == {"a": 8, "b": 2, "c": 1}
    # A launch run of equal names is one sample, or two where rounds meet. Each follows each.
    runs = [name for i, name in enumerate(clock.launched) if i == 0 or clock.launched[i - 1] != name]
    assert set(itertools.pairwise(runs[3:])) == set(itertools.permutations("abc", 2))


def test_drift_during_a_run_cancels_in_the_ratio():
    clock = FakeClock()
    slowing = {"x": 1.0}

    def launch(name, ms):
        slowing["x"] *= 1.002
        clock.launch(name, ms * slowing["x"])

    steps = {n: stream_step(lambda _, n=n, ms=ms: launch(n, ms), 1) for n, ms in (("a", 1.0), ("b", 3.0))}
    timings = time_interleaved(steps, clock, rounds=30, sample_ms=3.0)
    assert timings["b"].median_ms / timings["a"].median_ms == pytest.approx(3.0, rel=0.02)


def test_a_stream_step_rotates_among_its_sets():
    seen = []
    step = stream_step(seen.append, 3)
    for _ in range(7):
        step.run()
    assert seen == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(("sets", "launches"), [(1, 16), (5, 20), (8, 16), (16, 16), (40, 40)])
def test_a_graph_is_captured_once_and_timed_per_launch(sets, launches):
    """A graph begins late, and its first call alone: of few calls, that would be much of what is timed."""
    clock = FakeClock()
    sets_seen = []

    def call(index):
        sets_seen.append(index)
        clock.launch("kernel", 0.005)

    step = graph_step(call, sets, clock)
    timing = time_interleaved({"g": step}, clock, rounds=3, sample_ms=4.0)["g"]
    assert sets_seen == list(range(sets)) * (launches // sets)
    assert step.launches == launches
    assert timing.median_ms == pytest.approx(0.005)
    assert timing.calls == round(4.0 / (0.005 * launches)) * launches


def test_a_graph_step_keeps_what_its_graph_reads():
    """Cases of a group are all prepared before they are timed, and a graph does not own its arrays."""

    def prepared():
        inputs = np.zeros(3)
        clock = SimpleNamespace(capture=lambda body: [body()] and (lambda: None))
        return graph_step(lambda index: float(inputs[index]), 3, clock), weakref.ref(inputs)

    step, inputs = prepared()
    gc.collect()
    assert inputs() is not None
    del step
    gc.collect()
    assert inputs() is None


@given(st.integers(1, 10**10), st.integers(1, 10**8))
def test_rotated_sets_exceed_twice_the_l2_and_no_fewer_would(set_bytes, l2_bytes):
    count = rotation(set_bytes, l2_bytes, limit=10**9)
    assert count * set_bytes >= 2 * l2_bytes
    assert count == 1 or (count - 1) * set_bytes < 2 * l2_bytes
    assert rotation(1, 10**12) == 128


# Algorithms side by side


def test_the_grid_of_algorithms_has_the_small_cases_and_those_of_prefill():
    small, rest = GRIDS["lineage"].cases[:3], GRIDS["lineage"].cases[3:]
    assert [(c.batch, c.seqlen_q, c.head_dim, c.num_heads_q) for c in small] == [
        (1, 256, 64, 1),
        (2, 512, 64, 1),
        (4, 1024, 64, 1),
    ]
    prefill = GRIDS["prefill"].choose(["fp16"], {"head_dim": [64, 128]}).cases
    assert sorted(rest, key=str) == sorted(prefill, key=str)


LINEAGE = [
    ("naive_scores_hdim{}_fp16{}_sm80", 64, ""),
    ("naive_scores_hdim{}_fp16{}_sm80", 128, "_causal"),
    ("flash_v1_hdim{}_fp16{}_sm80", 64, "_causal"),
    ("flash_v1_hdim{}_fp16{}_sm80", 128, ""),
    ("flash_fwd_hdim{}_fp16{}_sm80", 64, "_causal"),
    ("flash_fwd_hdim{}_fp16{}_m64_sm80", 64, ""),
    ("flash_fwd_hdim{}_fp16{}_sm80", 128, "_causal"),
    ("flash_fwd_hdim{}_fp16{}_sm90", 64, ""),
    ("flash_fwd_hdim{}_fp16{}_sm90", 128, "_causal"),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "head_dim", "mask"), LINEAGE)
@pytest.mark.parametrize("seqlen", [256, 300])
def test_the_formula_of_bytes_is_what_the_simulator_counts(name, head_dim, mask, seqlen, monkeypatch):
    reason = traffic.hostcompiler.why_unavailable()
    if reason:
        pytest.skip(reason)
    name = name.format(head_dim, mask)
    case = a_case(
        batch=2,
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        num_heads_q=3,
        num_heads_kv=3,
        head_dim=head_dim,
        mask="causal" if mask else "none",
    )
    counted, by = traffic.moved(case, name)
    assert by == "simulator"
    monkeypatch.setattr(traffic, "MOST_SCORES", 0)
    assert traffic.moved(case, name) == (counted, "formula")
    assert counted >= case.bytes_moved


def test_what_a_peer_of_one_algorithm_takes_and_moves_is_in_its_measurement(monkeypatch):
    host = FakeHost()
    host.growth = lambda call: 512
    monkeypatch.setattr(traffic, "moved", lambda case, name: (1234, f"formula of {name}"))
    v1 = FakePeer("flashgen-v1", host, 1.0)
    v1.algorithm, v1.workspace_bytes, v1.variant = "v1", 4096, "a_kernel"
    (row,) = measure([a_case()], [FakePeer("flashgen", host, 1.0), v1], host, rounds=1, sample_ms=1.0, seed=0)
    found = row.measurements["flashgen-v1"]
    assert (found.workspace_bytes, found.extra_bytes) == (4096, 4608)
    assert (found.moved_bytes, found.moved_by) == (1234, "formula of a_kernel")
    assert row.measurements["flashgen"].extra_bytes is None


def test_short_cases_beside_longer_ones_are_no_part_of_a_sweep(tmp_path, monkeypatch):
    cases = GRIDS["lineage"].cases
    rows = [
        Row(c, {"flashgen": Measurement("flashgen", timing=Timing(1.0, 1.0, 1.0, 1, 1), agrees=True)})
        for c in cases
    ]
    seen = []
    monkeypatch.setattr(chart, "_panels", lambda rows: seen.extend(rows))
    chart.draw(Report("lineage", "TFLOP/s", {}, {}, rows), tmp_path / "c.png")
    assert [row.case for row in seen] == list(cases[3:])


# Checks and the runner, on NumPy arrays


def attention64(case: Case, inputs: Inputs) -> np.ndarray:
    """softmax(QKᵀ / √d)V in float64, key by visibility, for whole arrays."""
    k, v = (np.repeat(x, case.group_size, axis=2) for x in (inputs.k, inputs.v))
    scores = np.einsum("bqhd,bkhd->bhqk", inputs.q, k) / math.sqrt(case.head_dim)
    position = np.arange(case.seqlen_q)[:, None] + case.seqlen_kv - case.seqlen_q
    distance = abs(position - np.arange(case.seqlen_kv))
    if case.score == "softcap":
        scores = 30 * np.tanh(scores / 30)
    elif case.score == "alibi":
        scores = scores - np.asarray(inputs.slopes)[:, None, None] * distance
    seen = visible(case) if inputs.mask is None else ~inputs.mask
    if case.mask == "random_causal":
        seen = seen & visible(replace(case, mask="causal"))
    scores = np.where(seen, scores, -np.inf)
    row_max = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - row_max)
    row_sum = weights.sum(axis=-1, keepdims=True)
    if case.sinks:
        row_sum = row_sum + np.exp(inputs.sinks[:, None, None] - row_max)
    return np.einsum("bhqk,bkhd->bqhd", weights / row_sum, v)


def gradients64(case: Case, inputs: Inputs) -> tuple[np.ndarray, ...]:
    """Those of `attention64` in q, k and v, in float64, by the chain rule over whole arrays."""
    k, v = (np.repeat(x, case.group_size, axis=2) for x in (inputs.k, inputs.v))
    scale = 1 / math.sqrt(case.head_dim)
    scores = np.einsum("bqhd,bkhd->bhqk", inputs.q, k) * scale
    slope = 1.0
    if case.score == "softcap":
        slope = 1 - np.tanh(scores / 30) ** 2
        scores = 30 * np.tanh(scores / 30)
    elif case.score == "alibi":
        position = np.arange(case.seqlen_q)[:, None] + case.seqlen_kv - case.seqlen_q
        distance = abs(position - np.arange(case.seqlen_kv))
        scores = scores - np.asarray(inputs.slopes)[:, None, None] * distance
    scores = np.where(visible(case) if inputs.mask is None else ~inputs.mask, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = np.einsum("bqhd,bkhd->bhqk", inputs.dout, v)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * slope * scale

    def of_group(x):
        return x.reshape(*x.shape[:2], case.num_heads_kv, case.group_size, -1).sum(axis=3)

    return (
        np.einsum("bhqk,bkhd->bqhd", ds, k),
        of_group(np.einsum("bhqk,bqhd->bkhd", ds, inputs.q)),
        of_group(np.einsum("bhqk,bqhd->bkhd", p, inputs.dout)),
    )


class FakeHost(FakeClock):
    """NumPy arrays and the synthetic clock."""

    name = "numpy"
    l2_bytes = 10_000

    def inputs(self, case, seed):
        normal = np.random.default_rng(seed).standard_normal
        return filled(case, seed, normal, np.zeros, lambda array: array)

    def copy(self, array):
        return array.copy()

    def poison(self, array):
        array.fill(np.nan)

    def double(self, array):
        return np.asarray(array, np.float64)

    def numpy(self, array):
        return array

    def relative_error(self, array, reference):
        return float(np.linalg.norm(array - reference) / np.linalg.norm(reference))


class FakePeer:
    """Computes in float64 and takes ``ms`` of synthetic time; ``flaw`` may spoil its output."""

    hosts = ("cupy",)

    def __init__(self, name, host, ms, flaw=lambda out: out, declined=None):
        self.name, self.host, self.ms, self.flaw, self.declined = name, host, ms, flaw, declined

    def unavailable(self):
        return None

    def declines(self, case):
        return self.declined

    def prepare(self, case, sets):
        def call(index):
            self.host.launch(self.name, self.ms)
            results = sets[index].results
            found = gradients64(case, sets[index]) if case.is_backward else (attention64(case, sets[index]),)
            for result, x in zip(results, found, strict=True):
                result[:] = self.flaw(x)
            return results if case.is_backward else results[0]

        return call


@pytest.mark.parametrize("mask", ["none", "causal", "window", "random", "documents"])
def test_sampled_rows_accept_the_formula_and_reject_another_mask(mask):
    host = FakeHost()
    case = a_case(mask=mask, window=9, documents=3)
    inputs = host.inputs(case, 1)
    out = attention64(case, inputs)
    assert agreement.sampled_share(case, inputs, (out,), host, np.random.default_rng(2)) < 1e-9
    other = replace(case, mask="none" if mask == "causal" else "causal")
    wrong = attention64(other, replace(inputs, mask=None))
    assert agreement.sampled_share(case, inputs, (wrong,), host, np.random.default_rng(2)) > 10


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_flashgen_takes_blocks_as_lists(direction, monkeypatch):
    taken = []
    monkeypatch.setattr(Flashgen, "_changed", lambda self, plan, examples: taken.append(plan) or plan)
    case = a_case(mask="blocks", seqlen_q=300, seqlen_kv=400, direction=direction)
    assert case.pairs == np.count_nonzero(visible(case)) > 0
    inputs = FakeHost().inputs(case, 1)
    half = {x: getattr(inputs, x).astype(np.float16) for x in ("q", "k", "v", "out")}
    more = ("dout", "dq", "dk", "dv") if case.is_backward else ()
    inputs = replace(inputs, **half, **{x: getattr(inputs, x).astype(np.float16) for x in more})
    Flashgen().prepare(case, [inputs])(0)
    assert taken[0].problem.mask_type == "blocks"
    right = gradients64(case, inputs) if case.is_backward else (attention64(case, inputs),)
    for result, expected in zip(inputs.results, right, strict=True):
        np.testing.assert_allclose(result, expected, atol=0.02)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("score", ["softcap", "alibi"])
def test_sampled_rows_are_of_modified_scores(score, mask):
    host = FakeHost()
    case = a_case(mask=mask, score=score)
    inputs = host.inputs(case, 1)
    inputs = replace(inputs, q=inputs.q * 10)  # so that scores come near the cap
    rng = np.random.default_rng(2)
    assert agreement.sampled_share(case, inputs, (attention64(case, inputs),), host, rng) < 1e-9
    plain = attention64(replace(case, score="none"), inputs)
    assert agreement.sampled_share(case, inputs, (plain,), host, rng) > 10


def test_sampled_rows_are_of_a_call_with_sinks():
    host = FakeHost()
    case = a_case(sinks=True)
    inputs = host.inputs(case, 1)
    rng = np.random.default_rng(2)
    assert agreement.sampled_share(case, inputs, (attention64(case, inputs),), host, rng) < 1e-9
    plain = attention64(replace(case, sinks=False), inputs)
    assert agreement.sampled_share(case, inputs, (plain,), host, rng) > 10
    with pytest.raises(BadParam, match="with sinks it has no score"):
        a_case(sinks=True, score="alibi")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_flashgen_drops_what_the_check_expects(direction, monkeypatch):
    """The check of sampled heads beside flashgen's CPU path; it rejects another seed."""
    monkeypatch.setattr(Flashgen, "_changed", lambda self, plan, examples: plan)
    case = a_case(batch=2, mask="causal", dtype="fp32", dropout_p=0.25, direction=direction)
    host = FakeHost()
    inputs = host.inputs(case, 1)
    floats = {
        name: x.astype(np.float32)
        for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
        if (x := getattr(inputs, name)) is not None
    }
    inputs = replace(inputs, **floats)
    results = Flashgen().prepare(case, [inputs])(0)
    results = results if isinstance(results, tuple) else (results,)
    for number in range(6):
        rng = np.random.default_rng(number)
        assert agreement.sampled_share(case, inputs, results[:3], host, rng) < 1
    monkeypatch.setattr(agreement, "DROPOUT_SEED", (6, 0))
    assert agreement.sampled_share(case, inputs, results[:3], host, np.random.default_rng(2)) > 10
    with pytest.raises(BadParam, match="with dropout it has no lengths"):
        a_case(dropout_p=0.1, lengths="packed")


GRADIENTS = [
    {},
    {"mask": "causal"},
    {"mask": "window", "window": 9},
    {"mask": "random", "seqlen_q": 64},
    {"score": "softcap"},
    {"score": "alibi", "mask": "causal"},
    {"deterministic": True},
]


@pytest.mark.parametrize("changes", GRADIENTS, ids=str)
def test_all_gradients_of_a_head_are_checked(changes):
    host, rng = FakeHost(), np.random.default_rng(2)
    case = a_case(direction="backward", batch=1, num_heads_q=2, num_heads_kv=1, **changes)
    inputs = host.inputs(case, 1)
    found = gradients64(case, inputs)
    assert agreement.sampled_share(case, inputs, found, host, rng) < 1e-6
    for index in range(3):
        wrong = [x.copy() for x in found]
        place = tuple(rng.integers(wrong[index].shape))
        wrong[index][place] += 0.1
        assert agreement.sampled_share(case, inputs, tuple(wrong), host, rng) > 1
        wrong[index][place] = np.nan
        assert agreement.sampled_share(case, inputs, tuple(wrong), host, rng) == math.inf
    other = replace(case, mask="none" if case.is_causal else "causal", score="none")
    wrong = gradients64(other, replace(inputs, mask=None))
    assert agreement.sampled_share(case, inputs, wrong, host, rng) > 10


@pytest.mark.parametrize("changes", [*GRADIENTS, LENGTHS["packed"], LENGTHS["zipf"]], ids=str)
def test_flashgen_itself_is_timed_on_the_gradients_that_are_named(changes):
    """On arrays in host memory, where the same plan computes on the CPU."""
    case = a_case(**({"head_dim": 64, "dtype": "fp32", "direction": "backward"} | changes))
    sets = []
    for seed in (4, 5):
        given = zip(Inputs.__dataclass_fields__, astuple(FakeHost().inputs(case, seed)), strict=True)
        kept = {n: x if x is None or x.dtype.kind in "bi" else x.astype(np.float32) for n, x in given}
        sets.append(Inputs(**kept))
    peer = Flashgen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashgen.runtime.plans.Plan.variant", case)
        call = peer.prepare(case, sets)
    host, rng = FakeHost(), np.random.default_rng(2)
    for index, inputs in enumerate(sets):
        assert call(index) == inputs.results
        assert agreement.sampled_share(case, inputs, inputs.results, host, rng) <= 1


def test_a_target_is_pinned_and_the_order_of_additions_asked_for(fake_gpu, fake_arrays):
    # Long enough that dq is added up in memory.
    changes = {
        "direction": "backward",
        "dtype": "fp16",
        "head_dim": 64,
        "mask": "causal",
        "seqlen_q": 8192,
        "seqlen_kv": 8192,
    }
    for deterministic, target in product((False, True), ("sm80", "sm90")):
        case = a_case(**changes, deterministic=deterministic)
        peer = Flashgen(target="sm80") if target == "sm80" else Flashgen()
        before = len(fake_gpu.launches)
        peer.prepare(case, [fake_arrays(case)])(0)
        forward, *steps = (fake_gpu.variants[function] for function, *_ in fake_gpu.launches[before:])
        assert forward.operator == "attention"
        assert [step.step for step in steps] == ["preprocess", "main", "convert", "sum"][: len(steps)]
        main = next(step for step in steps if step.is_main)
        assert peer.variant == main.name
        if target == "sm80":
            assert main.target == "sm80"
        if deterministic:
            assert dict(main.axes)["dq_order"] == "ordered"


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("score", ["none", "softcap", "alibi"])
def test_flashgen_itself_is_timed_on_the_case_that_is_named(score, mask):
    """On arrays in host memory, where the same plan computes on the CPU."""
    case = a_case(mask=mask, score=score, head_dim=64, dtype="fp32")
    arrays = astuple(FakeHost().inputs(case, 4))
    inputs = Inputs(*(None if x is None else x.astype(np.float32) for x in arrays))
    peer = Flashgen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashgen.runtime.plans.Plan.variant", case)
        out = peer.prepare(case, [inputs])(0)
    np.testing.assert_allclose(out, attention64(case, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", LENGTHS | PADDED)
def test_flashgen_itself_is_timed_on_the_lengths_that_are_named(kind):
    case = a_case(**({"head_dim": 64, "dtype": "fp32"} | (LENGTHS | PADDED)[kind]))
    arrays = astuple(FakeHost().inputs(case, 4))
    inputs = Inputs(*(x.astype(np.float32) if getattr(x, "dtype", None) == np.float64 else x for x in arrays))
    peer, rng = Flashgen(), np.random.default_rng(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashgen.runtime.plans.Plan.variant", case)
        out = peer.prepare(case, [inputs])(0)
        if kind in ("cache", "packed"):
            found = all_peers()["flashgen-fixed"].prepare(case, [replace(inputs, out=np.empty_like(out))])(0)
            np.testing.assert_allclose(found, out, rtol=1e-4, atol=1e-4)
    assert peer.variant == case.name
    shares = [agreement.sampled_share(case, inputs, (out,), FakeHost(), rng) for _ in range(9)]
    assert max(shares) <= 1
    other = {"k_new": 3 * inputs.k_new} if case.appends else {"v": np.flip(inputs.v, axis=(0, 1))}
    if case.latent:
        other["k"] = np.flip(inputs.k, axis=(0, 1))
    assert agreement.sampled_share(case, replace(inputs, **other), (out,), FakeHost(), rng) > 10


def test_quarter_turns_are_exact():
    cos, sin = quarter_turns(9, 6)
    assert set(np.unique(cos)) == set(np.unique(sin)) == {-1, 0, 1}
    np.testing.assert_array_equal(cos * cos + sin * sin, np.ones_like(cos))
    angles = np.pi / 2 * (np.arange(9)[:, None] + np.arange(6))
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-12)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-12)


def test_sampled_rows_notice_an_unwritten_last_row():
    host = FakeHost()
    case = a_case()
    inputs = host.inputs(case, 1)
    out = attention64(case, inputs)
    out[:, -1] = np.nan
    assert agreement.sampled_share(case, inputs, (out,), host, np.random.default_rng(0)) == math.inf


def drop_last_row(out):
    out[:, -1] = np.nan
    return out


def fail(_out):
    warnings.warn("head_dim is odd", stacklevel=1)
    raise RuntimeError("no kernel")


@pytest.mark.parametrize("clock", ["stream", "graph"])
def test_a_row_has_ratios_for_agreeing_peers_and_reasons_for_the_others(clock):
    host = FakeHost()
    peers = [
        FakePeer("flashgen", host, 1.0),
        FakePeer("slow", host, 1.5),
        FakePeer("wrong", host, 0.1, flaw=lambda out: out * 1.1),
        FakePeer("partial", host, 0.1, flaw=drop_last_row),
        FakePeer("broken", host, 1.0, flaw=fail),
        FakePeer("narrow", host, 1.0, declined="not this one"),
    ]
    (row,) = measure([a_case(clock=clock)], peers, host, rounds=4, sample_ms=4.0, seed=3)
    assert ("replay" in host.launched) == (clock == "graph")
    assert row.ratio("slow") == pytest.approx(1.5)
    assert row.measurements["slow"].relative_error == 0.0
    assert [row.ratio(name) for name in ("wrong", "partial", "broken", "narrow")] == [None] * 4
    assert row.measurements["wrong"].agrees is False
    assert row.measurements["partial"].agrees is False
    assert row.measurements["broken"].note == "RuntimeError: no kernel; head_dim is odd"
    assert row.measurements["narrow"].note == "not this one"
    assert [name for name, m in row.measurements.items() if m.failed] == ["broken"]
    assert list(row.measurements) == [peer.name for peer in peers]


def test_gradients_are_compared_one_by_one():
    host, seen = FakeHost(), iter(range(3))
    peers = [
        FakePeer("flashgen", host, 1.0),
        FakePeer("slow", host, 1.5),
        FakePeer("wrong", host, 0.1, flaw=lambda x: x * 1.1 if next(seen) == 2 else x),
        FakePeer("partial", host, 0.1, flaw=drop_last_row),
    ]
    seen = itertools.cycle(range(3))
    (row,) = measure([a_case(direction="backward")], peers, host, rounds=4, sample_ms=4.0, seed=3)
    assert row.ratio("slow") == pytest.approx(1.5)
    assert row.measurements["flashgen"].error_share < 1e-6
    assert row.measurements["wrong"].relative_error == pytest.approx(0.1)
    assert [row.measurements[name].agrees for name in ("wrong", "partial")] == [False, False]


@pytest.mark.filterwarnings("ignore:head_dim")
def test_flashgen_failing_is_raised_not_noted():
    host = FakeHost()
    with pytest.raises(RuntimeError, match="no kernel"):
        measure(
            [a_case()], [FakePeer("flashgen", host, 1.0, flaw=fail)], host, rounds=1, sample_ms=1.0, seed=0
        )


def test_a_wrong_flashgen_has_no_ratio():
    host = FakeHost()
    peers = [FakePeer("flashgen", host, 1.0, flaw=lambda out: out + 1), FakePeer("slow", host, 2.0)]
    (row,) = measure([a_case()], peers, host, rounds=2, sample_ms=1.0, seed=0)
    assert row.measurements["flashgen"].agrees is False
    assert row.ratio("slow") is None


def test_a_case_and_its_baseline_are_timed_in_the_same_rounds():
    host = FakeHost()
    slowing = {"x": 1.0}

    class Slowing(FakePeer):
        def prepare(self, case, sets):
            call = super().prepare(case, sets)

            def slower(index):
                slowing["x"] *= 1.01
                self.ms = slowing["x"] * case.seqlen_q
                return call(index)

            return slower

    base = a_case(name="base")
    half = a_case(name="half", seqlen_q=24, baseline="base", loss_limit=0.05)
    report = Report("ragged", "TFLOP/s", {}, {})
    report.rows = measure(
        [base, half], [Slowing("flashgen", host, 1.0)], host, rounds=20, sample_ms=1.0, seed=1
    )
    assert [row.case for row in report.rows] == [base, half]
    # One after the other, the second would have been slower by a factor above 1.01 ** 40.
    assert report.baseline_ratio(report.rows[1]) == pytest.approx(1.0, abs=0.03)
    (loss,) = report.losses()
    assert (loss.cases, loss.largest_case, loss.limit) == (1, "half", 0.05)
    assert loss.largest == pytest.approx(1 - report.baseline_ratio(report.rows[1]))


def test_run_says_which_peer_failed_and_why(monkeypatch):
    host = FakeHost()
    peers = {p.name: p for p in (FakePeer("flashgen", host, 1.0), FakePeer("broken", host, 1.0, flaw=fail))}
    monkeypatch.setitem(GRIDS, "tiny", replace(GRIDS["prefill"], name="tiny", cases=(a_case(),)))
    monkeypatch.setattr(registry, "all_peers", lambda: peers)
    monkeypatch.setattr("flashgen.tools.bench.runner._host", lambda _: host)
    console = Console(record=True, width=200, file=io.StringIO())
    run("tiny", rounds=1, console=console)
    assert "broken failed: RuntimeError: no kernel" in console.export_text()


def test_run_writes_json_charts_and_tables(tmp_path, monkeypatch):
    host = FakeHost()
    host.l2_bytes = 1
    peers = {p.name: p for p in (FakePeer("flashgen", host, 1.0), FakePeer("slow", host, 1.25))}
    small = [
        a_case(name=f"{dtype} {s}", seqlen_q=s, seqlen_kv=s, dtype=dtype)
        for dtype in ("fp16", "bf16")
        for s in (16, 32)
    ]
    monkeypatch.setitem(GRIDS, "tiny", replace(GRIDS["prefill"], name="tiny", cases=tuple(small)))
    monkeypatch.setattr(registry, "all_peers", lambda: peers)
    monkeypatch.setattr("flashgen.tools.bench.runner._host", lambda _: host)
    console = Console(record=True, width=200, file=io.StringIO())
    report = run(
        "tiny",
        rounds=2,
        json_path=tmp_path / "out" / "r.json",
        png_path=tmp_path / "c.png",
        seed=5,
        console=console,
    )

    loaded = Report.load(tmp_path / "out" / "r.json")
    assert [row.case for row in loaded.rows] == [row.case for row in report.rows]
    data = loaded.as_dict()
    assert data["protocol"]["seed"] == 5
    assert [s["geometric_mean"] for s in data["summary"]] == pytest.approx([1.25, 1.25])
    assert [r["results"][1]["flashgen_ratio"] for r in data["rows"]] == pytest.approx([1.25] * 4)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("c.png", "c-bf16.png"))
    assert "1.250×" in console.export_text()
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "out" / "r.json").read_bytes()


def test_run_without_a_gpu_says_so():
    from flashgen.runtime import device

    if device.available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceTypeNotSupported, match="flashgen cannot be timed here"):
        run("small")


# Reports


def a_report(metric="TFLOP/s", **times) -> Report:
    """Times in ms by peer, one list entry per sequence length."""
    lengths = (1024, 4096, 16384)
    rows = []
    for index, seqlen in enumerate(lengths):
        for mask in ("none", "causal"):
            case = a_case(name=f"{mask} {seqlen}", seqlen_q=seqlen, seqlen_kv=seqlen, mask=mask)
            measurements = {
                peer: Measurement(peer, Timing(ms[index], ms[index], ms[index], 5, 1), 1e-4, True, 0.1)
                for peer, ms in times.items()
            }
            rows.append(Row(case, measurements))
    return Report("prefill", metric, {}, {"gpu": "test"}, rows)


def test_summary_is_the_geometric_mean_and_names_the_lowest():
    report = a_report(flashgen=[1.0, 2.0, 4.0], peer=[0.5, 2.0, 16.0])
    (summary,) = report.summaries()
    assert summary.geometric_mean == pytest.approx((0.5 * 1.0 * 4.0) ** (1 / 3))
    assert (summary.lowest, summary.cases) == (0.5, 6)
    assert "1024" in summary.lowest_case


def test_the_best_of_the_rivals_is_taken_cell_by_cell():
    report = a_report(
        **{"flashgen": [1.0, 1.0, 1.0], "torch-cudnn": [0.8, 2.0, 1.0], "flash-attn-4": [1.6, 0.5, 4.0]}
    )
    assert [row.best_rival() for row in report.rows[::2]] == [
        (0.8, "torch-cudnn"),
        (0.5, "flash-attn-4"),
        (1.0, "torch-cudnn"),
    ]
    best = report.summaries()[-1]
    assert best.peer == report.best_of == "best of torch-cudnn, flash-attn-4"
    assert best.geometric_mean == pytest.approx((0.8 * 0.5) ** (1 / 3))
    assert (best.lowest, best.cases) == (0.5, 6)
    text = Console(record=True, width=200, file=io.StringIO())
    print_tables(report, text)
    assert "0.50× flash-attn-4" in text.export_text()
    data = report.as_dict()["rows"][2]
    assert (data["best_rival"], data["best_rival_ratio"]) == ("flash-attn-4", 0.5)


def test_one_rival_alone_has_no_column_of_the_best():
    report = a_report(
        **{"flashgen": [1.0, 1.0, 1.0], "torch-cudnn": [0.8, 2.0, 1.0], "other": [0.1, 0.1, 0.1]}
    )
    assert report.best_of is None
    assert {summary.peer for summary in report.summaries()} == {"torch-cudnn", "other"}
    assert report.rows[0].best_rival() == (0.8, "torch-cudnn")


def test_a_loss_is_in_percent_of_the_baseline_and_has_its_limit_beside_it():
    report = a_report(flashgen=[1.0, 1.0, 1.0])
    base = report.rows[2].case
    for seqlen, share in ((4095, 0.98), (4000, 0.93), (4001, 1.01)):
        case = replace(base, name=f"n{seqlen}", seqlen_q=seqlen, baseline=base.name, loss_limit=0.05)
        ms = case.flops / base.flops / share
        report.rows.append(
            Row(case, {"flashgen": Measurement("flashgen", Timing(ms, ms, ms, 5, 1), agrees=True)})
        )
    (loss,) = report.losses()
    assert (loss.dtype, loss.cases, loss.largest_case, loss.limit) == ("fp16", 3, "n4000", 0.05)
    assert (loss.mean, loss.largest) == pytest.approx((0.08 / 3, 0.07))
    text = Console(record=True, width=200, file=io.StringIO())
    print_tables(report, text)
    shown = text.export_text()
    assert f"-7.0% on {base.name}" in shown
    assert f"+1.0% on {base.name}" in shown
    assert re.search(r"fp16 +│ +3 +│ +2.7% +│ +7.0% +│ +5% +│ n4000", shown)


def test_summaries_keep_dtypes_apart():
    report = a_report(flashgen=[1.0, 1.0, 1.0], peer=[2.0, 2.0, 2.0])
    report.rows[0] = Row(replace(report.rows[0].case, dtype="bf16"), report.rows[0].measurements)
    assert [(s.dtype, s.cases) for s in report.summaries()] == [("bf16", 1), ("fp16", 5)]


def test_tflops_and_cells():
    report = a_report(flashgen=[1.0, 1.0, 1.0], peer=[1.1, 1.1, 1.1])
    row = report.rows[0]
    flops = 4 * 2 * 4 * 1024 * 1024 * 16
    assert row.measurements["flashgen"].tflops(row.case) == pytest.approx(flops / 1e-3 / 1e12)
    assert cell(report, row, "flashgen") == "0.5 ±0.0%"
    assert cell(report, row, "peer").endswith("(1.10×)")
    assert cell(report, row, "absent") == "–"
    report.metric = "µs"
    assert cell(report, row, "peer") == "1100.0 (1.10×)"
    longer = Row(replace(row.case, name="x", baseline=row.case.name), {"flashgen": row.measurements["peer"]})
    longer.measurements["flashgen"] = replace(row.measurements["peer"], peer="flashgen")
    report.rows.append(longer)
    assert report.added_ms(longer) == pytest.approx(0.1)
    shown = Console(record=True, width=200, file=io.StringIO())
    print_tables(report, shown)
    assert f"+100.0 µs on {row.case.name}" in shown.export_text()
    report.metric = "GB/s"
    assert row.case.kv_bytes == 2 * 2 * 1024 * row.case.num_heads_kv * 16 * 2
    assert cell(report, row, "peer") == f"{row.case.kv_bytes / 1.1e-3 / 1e9:.1f} (1.10×)"
    assert line(report, row).startswith(row.case.name)


def test_a_case_is_set_against_its_baseline_by_rate():
    report = a_report(flashgen=[1.0, 1.0, 1.0])
    window = replace(report.rows[1].case, name="w", mask="window", window=128, baseline="causal 1024")
    report.rows.append(
        Row(window, {"flashgen": Measurement("flashgen", Timing(0.5, 0.5, 0.5, 5, 1), agrees=True)})
    )
    expected = (window.flops / 0.5) / (report.rows[1].case.flops / 1.0)
    assert report.baseline_ratio(report.rows[-1]) == pytest.approx(expected)
    text = Console(record=True, width=200, file=io.StringIO())
    for table in tables(report):
        text.print(table)
    assert f"{expected:.2f} × causal 1024" in text.export_text()


def test_a_table_has_the_share_of_the_limit_of_a_known_gpu():
    report = a_report(flashgen=[1.0, 1.0, 1.0])
    assert "of the limit" not in [str(column.header) for column in next(tables(report)).columns]
    report.environment |= {"arch": "sm_90", "sms": 132, "clock_mhz": 1980, "memory_gbps": 4800.0}
    text = Console(record=True, width=200, file=io.StringIO())
    text.print(next(tables(report)))
    limits = [roofline(row.case, report.environment) for row in report.rows]
    shown = text.export_text()
    assert all(f"{x.floor_ms:.0%} {x.limit}" in shown for x in limits)


def test_tables_keep_every_figure_where_the_console_is_narrow():
    report = a_report(**{peer: [1.0, 1.0, 1.0] for peer in all_peers()})
    text = Console(record=True, width=40, file=io.StringIO())
    print_tables(report, text)
    shown = text.export_text()
    assert "…" not in shown
    assert all(f"{peer} (ratio)" in shown for peer in all_peers() if peer != registry.OURS)
    assert shown.count("(1.00×)") == 6 * (len(all_peers()) - 1)
    assert all(f"\n{row.case.name}\n  flashgen ± IQR" in shown for row in report.rows)


def test_a_file_has_a_line_a_case_and_the_digits_that_a_table_shows(tmp_path):
    report = a_report(flashgen=[1 / 3, 2 / 3, 4 / 3], peer=[1.0, 2.0, 4.0])
    report.rows[0].measurements["absent"] = Measurement("absent", note="takes no such case")
    report.left_out["gone"] = "not installed"
    report.save(tmp_path / "r.json")
    lines = (tmp_path / "r.json").read_text().splitlines()
    first = lines.index('"rows":[') + 1
    assert len(lines[first:]) == len(report.rows) + 1
    cases = [json.loads(text.rstrip(","))["case"]["name"] for text in lines[first:-1]]
    assert cases == [row.case.name for row in report.rows]
    loaded = Report.load(tmp_path / "r.json")
    assert [row.case for row in loaded.rows] == [row.case for row in report.rows]
    assert loaded.rows[0].measurements["absent"] == report.rows[0].measurements["absent"]
    assert loaded.rows[0].measurements["flashgen"].timing == Timing(*[0.333333] * 3, 5, 1)
    assert (loaded.left_out, loaded.environment) == (report.left_out, report.environment)
    before, after = report.summaries(), loaded.summaries()
    assert [s.geometric_mean for s in after] == pytest.approx([s.geometric_mean for s in before], rel=1e-5)


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"schema": 99}')
    with pytest.raises(BadParam, match="99"):
        Report.load(path)


def test_a_sweep_has_a_panel_per_head_dim_and_mask_and_a_line_per_peer():
    from matplotlib.figure import Figure

    report = a_report(flashgen=[1.0, 2.0, 3.0], peer=[2.0, 2.0, 2.0])
    panels = chart._panels(report.rows)
    assert list(panels) == [(16, False), (16, True)]
    figure = chart._sweep(Figure, report, panels)
    axes = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_title() for axis in axes] == ["head_dim 16, full", "head_dim 16, causal"]
    for axis, rows in zip(axes, panels.values(), strict=True):
        assert [line.get_label() for line in axis.lines] == ["flashgen", "peer"]
        tflops = [row.measurements["flashgen"].tflops(row.case) for row in rows]
        np.testing.assert_allclose(axis.lines[0].get_ydata(), tflops)
        assert list(axis.lines[0].get_xdata()) == [1024, 4096, 16384]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["flashgen", "peer"]


def test_no_two_labels_of_lengths_overlap():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [
        Row(case, {"flashgen": Measurement("flashgen", Timing(1.0, 1.0, 1.0, 5, 1), agrees=True)})
        for case in GRIDS["prefill"].choose(["fp16"]).cases
    ]
    report = Report("prefill", "TFLOP/s", {}, {}, rows)
    figure = chart._sweep(Figure, report, chart._panels(rows))
    FigureCanvasAgg(figure).draw()
    assert len(figure.axes) == 6
    for axis in figure.axes:
        labels = axis.get_xticklabels()
        assert [label.get_text() for label in labels] == ["1k", "2k", "4k", "8k", "16k"]
        boxes = [label.get_window_extent() for label in labels]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_no_line_leaves_its_panel():
    from matplotlib.figure import Figure

    report = a_report(flashgen=[1.0, 2.0, 3.0])
    for seqlen in (1024, 4096):
        case = a_case(name=f"wide {seqlen}", seqlen_q=seqlen, seqlen_kv=seqlen, head_dim=256)
        report.rows.append(
            Row(case, {"flashgen": Measurement("flashgen", Timing(0.1, 0.1, 0.1, 5, 1), agrees=True)})
        )
    figure = chart._sweep(Figure, report, chart._panels(report.rows))
    for axis in figure.axes:
        low, high = axis.get_ylim()
        assert all(low == 0 <= value <= high for line in axis.lines for value in line.get_ydata())


def test_a_grid_that_is_no_sweep_has_no_panels():
    report = a_report(flashgen=[1.0, 2.0, 3.0])
    short = replace(report.rows[0].case, name="short", seqlen_q=1)
    assert chart._panels([*report.rows, Row(short, report.rows[0].measurements)]) == {}
    assert chart._panels(report.rows[:2]) == {}
    beside = replace(report.rows[0].case, name="ragged", seqlen_q=1000, seqlen_kv=1000, baseline="none 1024")
    assert chart._panels([*report.rows, Row(beside, report.rows[0].measurements)]) == {}


def test_bars_leave_out_what_was_not_timed():
    from matplotlib.figure import Figure

    report = a_report(flashgen=[1.0, 2.0, 3.0], peer=[2.0, 2.0, 2.0])
    report.rows[0].measurements["peer"] = Measurement("peer", note="declined")
    figure = chart._bars(Figure, report, report.rows)
    assert len(figure.axes[0].patches) == 2 * len(report.rows) - 1


def test_an_empty_report_draws_nothing(tmp_path):
    with pytest.raises(BadParam, match="nothing was timed"):
        chart.draw(Report("prefill", "TFLOP/s", {}, {}), tmp_path / "c.png")


# Peers and the environment


def test_every_peer_has_a_colour_of_its_own():
    assert len(all_peers()) <= len(chart._STYLES)
    assert next(iter(all_peers())) == registry.OURS


def test_an_unknown_peer_is_refused_with_the_names():
    with pytest.raises(BadParam, match=r"torch-flahs.*torch-flash"):
        choose_peers(["torch-flahs"])


def test_an_unusable_peer_is_refused_when_named_and_left_out_otherwise(monkeypatch):
    host = FakeHost()
    missing = FakePeer("missing", host, 1.0)
    missing.unavailable = lambda: "it is not installed"
    ours = FakePeer("flashgen", host, 1.0)
    monkeypatch.setattr(registry, "all_peers", lambda: {"flashgen": ours, "missing": missing})
    with pytest.raises(BadParam, match="not installed"):
        choose_peers(["missing"])
    assert choose_peers(None) == ([ours], {"missing": "it is not installed"})
    assert choose_peers([]) == ([ours], {})
    ours.unavailable = lambda: "no GPU"
    with pytest.raises(DeviceTypeNotSupported, match="no GPU"):
        choose_peers(None)


def test_one_algorithm_is_timed_only_where_it_is_named(monkeypatch):
    host = FakeHost()
    peers = {name: FakePeer(name, host, 1.0) for name in ("flashgen", "torch-flash", *registry.LINEAGE)}
    monkeypatch.setattr(registry, "all_peers", lambda: peers)
    assert [peer.name for peer in choose_peers(None)[0]] == ["flashgen", "torch-flash"]
    assert [peer.name for peer in choose_peers(GRIDS["lineage"].peers)[0]] == ["flashgen", *registry.LINEAGE]
    assert GRIDS["lineage"].choose(None, {"head_dim": [64]}).peers == GRIDS["lineage"].peers


MHA = {"plain", "window", "dense", "fp32", "wide", "skewed", "192/128", "64/128", "softcap", "alibi", "also"}
CACHES = {kind for kind in LENGTHS if kind not in ("packed", "zipf")}
NO_CACHE = {*LENGTHS} - {"cache"}
WITHOUT = {*MHA, "grouped"}  # lengths
BACKWARD = {"backward", "same bits", "packed backward"}
DECLINED = {
    # name: cases that it must decline, out of the test's; it must take every other
    "flashgen": set(),
    "flashgen-gqa": {*MHA, *LENGTHS, *BACKWARD},
    "flashgen-packed": {*MHA, *LENGTHS, *BACKWARD},
    "flashgen-fixed": {*WITHOUT, *BACKWARD, "pages", "append", "append pages", "zipf"},
    "flashgen-sm80": {*WITHOUT, *LENGTHS},
    "torch-varlen": {*WITHOUT, "backward", "same bits", "cache", "pages", "append", "append pages"},
    "torch-flash": {
        *NO_CACHE,
        "packed backward",
        "window",
        "dense",
        "fp32",
        "skewed",
        "192/128",
        "64/128",
        "softcap",
        "alibi",
    },
    "torch-cudnn": {
        *NO_CACHE,
        "packed backward",
        "window",
        "fp32",
        "skewed",
        "softcap",
        "alibi",
        "same bits",
    },
    "torch-efficient": {*LENGTHS, "packed backward", "window", "grouped", "skewed", "softcap", "alibi"},
    "flash-attn-2": {*LENGTHS, "packed backward", "dense", "fp32", "192/128", "64/128", "alibi"},
    "flash-attn-3": {*LENGTHS, "packed backward", "dense", "fp32", "192/128", "64/128", "alibi"},
    "flash-attn-4": {"dense", "fp32", "alibi", "pages", "append", "append pages"},
    "flashinfer-fa2": {"dense", "fp32", "wide", "64/128", "alibi", *CACHES, *BACKWARD},
    "flashinfer-fa3": {"dense", "fp32", "wide", "64/128", "alibi", *CACHES, *BACKWARD},
    "flashinfer-decode": {*WITHOUT, *BACKWARD, "append", "append pages", "packed", "zipf"},
    "flex-attention": {
        *LENGTHS,
        *BACKWARD,
        *("plain", "fp32", "wide", "grouped", "skewed", "192/128", "64/128"),
    },
    "flashgen-kept": {*WITHOUT, *LENGTHS, *BACKWARD},
    "cudnn-flex": {*WITHOUT, *LENGTHS, *BACKWARD},
    "flashgen-naive": {"window", "dense", "fp32", "grouped", "192/128", *LENGTHS, *BACKWARD},
    "flashgen-v1": {"window", "dense", "fp32", "grouped", "192/128", *LENGTHS, *BACKWARD},
    "flashgen-v2": {*LENGTHS, *BACKWARD},
    "flashgen-v3": {"fp32", *LENGTHS, *BACKWARD},
    "flashgen-fp8": {"window", "fp32", "softcap", "alibi", "append", "append pages", *BACKWARD},
    "flashgen-fp8-fast": {"window", "fp32", "softcap", "alibi", "append", "append pages", *BACKWARD},
    "flashgen-fp8-vt": {"window", "fp32", "softcap", "alibi", *LENGTHS, *BACKWARD},
}


def test_peers_decline_exactly_what_they_cannot_do():
    plain = a_case(num_heads_kv=4, seqlen_q=64, head_dim=64)
    cases = {
        "plain": plain,
        "window": replace(plain, mask="window", window=4),
        "dense": replace(plain, mask="random"),
        "fp32": replace(plain, dtype="fp32"),
        "wide": replace(plain, head_dim=96),
        "grouped": replace(plain, num_heads_kv=2),
        "192/128": replace(plain, head_dim=192, head_dim_v=128),
        "64/128": replace(plain, head_dim_v=128),
        "skewed": replace(plain, mask="causal", seqlen_q=8),
        "softcap": replace(plain, score="softcap"),
        "alibi": replace(plain, score="alibi"),
        "also": replace(plain, also="flex-attention"),
        "backward": replace(plain, direction="backward"),
        "same bits": replace(plain, direction="backward", deterministic=True),
        "packed backward": replace(plain, direction="backward", lengths="packed"),
    }
    cases |= {kind: replace(plain, num_heads_kv=2, **changes) for kind, changes in LENGTHS.items()}
    found = {
        name: {kind for kind, case in cases.items() if peer.declines(case)}
        for name, peer in all_peers().items()
    }
    assert found == DECLINED


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": "causal"},
        {"mask": "random"},
        {"mask": "random_causal", "seqlen_q": 48},
        {"num_heads_kv": 2},
    ],
)
def test_sdpa_gets_views_scale_and_mask_the_right_way_round(changes):
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend

    case = a_case(**({"seqlen_q": 64, "num_heads_kv": 4} | changes))
    arrays = FakeHost().inputs(case, 4)
    tensors = Inputs(*(None if x is None else torch.from_numpy(x) for x in astuple(arrays)))
    peer = torch_sdpa.TorchSdpa("flash")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sdpa, "_BACKENDS", {"flash": SDPBackend.MATH.name})
        out = peer.prepare(case, [tensors])(0)
    np.testing.assert_allclose(out.numpy(), attention64(case, arrays), atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("peer", "changes"),
    [
        ("torch-flash", {}),
        ("torch-flash", {"mask": "causal"}),
        ("torch-flash", {"num_heads_kv": 2}),
        ("torch-flash", {"deterministic": True}),
        ("torch-efficient", {"mask": "random"}),
        ("flex-attention", {"mask": "window", "window": 9, "num_heads_kv": 2}),
        ("flex-attention", {"score": "softcap"}),
    ],
)
def test_gradients_of_a_peer_are_those_of_autograd_again_and_again(peer, changes):
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, flex_attention

    case = a_case(**({"seqlen_q": 64, "num_heads_kv": 4, "direction": "backward"} | changes))
    sets = [FakeHost().inputs(case, seed) for seed in (4, 5)]
    tensors = [Inputs(*(None if x is None else torch.from_numpy(x) for x in astuple(s))) for s in sets]
    settings = []

    def grad(*arguments, **options):
        filled = torch.utils.deterministic.fill_uninitialized_memory
        settings.append((torch.are_deterministic_algorithms_enabled(), filled))
        return genuine(*arguments, **options)

    genuine = torch.autograd.grad
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sdpa, "_BACKENDS", dict.fromkeys(("flash", "efficient"), SDPBackend.MATH.name))
        patch.setattr(torch, "compile", lambda function, **options: function)
        patch.setattr(flex_attention, "_validate_device", lambda *_: None)  # it refuses gradients on a CPU
        patch.setattr(torch.autograd, "grad", grad)
        call = all_peers()[peer].prepare(case, tensors)
        for index in (0, 1, 0):
            found = call(index)
            for x, expected in zip(found, gradients64(case, sets[index]), strict=True):
                np.testing.assert_allclose(x.numpy(), expected, atol=1e-12)
    assert set(settings) == {(case.deterministic, not case.deterministic)}
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert not any(x.requires_grad for s in tensors for x in (s.q, s.k, s.v))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("generation", [2, 3])
def test_flash_attn_gets_mask_window_and_order(generation, deterministic, monkeypatch):
    torch = pytest.importorskip("torch")
    from flashgen.tools.bench.peers import flash_attn

    asked = []

    def flash_attn_func(q, k, v, *, causal, window_size, deterministic=False):
        asked.append((causal, window_size, deterministic))
        return q + 2 * v if generation == 2 else (q + 2 * v, None)

    module = SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setattr(flash_attn.importlib, "import_module", lambda name: module)
    case = a_case(
        mask="window",
        window=9,
        seqlen_q=64,
        num_heads_kv=4,
        direction="backward",
        deterministic=deterministic,
    )
    inputs = FakeHost().inputs(case, 4)
    tensors = Inputs(*(None if x is None else torch.from_numpy(x) for x in astuple(inputs)))
    monkeypatch.setattr(torch.autograd, "grad", lambda out, *_, **__: out.detach())
    out = all_peers()[f"flash-attn-{generation}"].prepare(case, [tensors])(0)
    np.testing.assert_array_equal(out.numpy(), inputs.q + 2 * inputs.v)
    assert asked == [(False, (9, 0), deterministic)]


@pytest.mark.parametrize("knows_groups", [False, True])
@pytest.mark.parametrize("kind", ["packed", "zipf"])
def test_varlen_attn_gets_sequences_bounds_and_heads(kind, knows_groups, monkeypatch):
    torch = pytest.importorskip("torch")
    from torch.nn.attention import varlen

    case = a_case(**LENGTHS[kind])
    arrays = FakeHost().inputs(case, 4)
    tensors = Inputs(*(None if x is None else torch.from_numpy(x) for x in astuple(arrays)))

    def grouped(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa=False):
        assert (max_q, max_k) == max(case.sequences)
        assert enable_gqa == knows_groups
        assert len(k[0]) == (2 if knows_groups else 4)
        assert window_size == (-1, 0)
        return cu_seq_q.tolist(), cu_seq_k.tolist()

    def plain(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size):
        return grouped(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", grouped if knows_groups else plain)
    ends = all_peers()["torch-varlen"].prepare(case, [tensors])(0)
    assert [list(np.diff(x)) for x in ends] == [list(x) for x in zip(*case.sequences, strict=True)]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "window", "window": 9, "num_heads_kv": 2},
        {"mask": "window", "window": 9, "seqlen_q": 48},
        {"mask": "random"},
        {"mask": "random_causal", "seqlen_q": 48},
        {"mask": "documents", "documents": 3},
        {"score": "softcap"},
        {"score": "alibi"},
        {"score": "alibi", "mask": "causal", "seqlen_q": 48, "num_heads_kv": 2},
        {"also": "flex-attention"},
    ],
)
def test_flex_attention_gets_the_rule_and_the_heads(changes):
    torch = pytest.importorskip("torch")
    case = a_case(**({"seqlen_q": 64, "num_heads_kv": 4} | changes))
    sets = [FakeHost().inputs(case, seed) for seed in (4, 5)]
    tensors = [Inputs(*(None if x is None else torch.from_numpy(x) for x in astuple(s))) for s in sets]
    peer = all_peers()["flex-attention"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        call = peer.prepare(case, tensors)
    for index, arrays in enumerate(sets):
        np.testing.assert_allclose(call(index).numpy(), attention64(case, arrays), atol=1e-12)


def test_the_environment_is_json_and_names_the_kernels():
    found = environment.describe()
    assert json.loads(json.dumps(found)) == found
    assert found["kernels"] == environment.kernels_digest()
    assert len(found["kernels"]) == 12
    assert {"gpu", "driver", "torch", "cudnn", "cupy", "nvrtc", "flashgen", "commit"} <= set(found)


def test_steps_say_how_many_launches_they_hold():
    assert stream_step(lambda _: None, 4).launches == 1
    assert graph_step(lambda _: None, 17, FakeClock()).launches == 17
    assert Step(lambda: None, 1).launches == 1
