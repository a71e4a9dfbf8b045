"""Every cell of every grid can be planned: a run on a GPU must not end at one that no kernel serves."""

from __future__ import annotations

import itertools

import pytest

from flashgen.errors import BadParam
from flashgen.runtime.cupykind import CupyKind
from flashgen.schedule.grid import MAX_BLOCKS
from flashgen.tools.bench.grids import GRIDS, read
from flashgen.tools.bench.peers import all_peers


@pytest.mark.parametrize("grid", GRIDS.values(), ids=lambda grid: grid.name)
def test_each_cell_has_a_kernel_for_an_h200(grid, fake_gpu, fake_arrays):
    for case in grid.cases:
        inputs = fake_arrays(case)
        for peer in (all_peers()[name] for name in ("flashgen", "flashgen-fixed")):
            if peer.declines(case):
                continue
            call = peer.prepare(case, [inputs])
            fake_gpu.launches.clear()
            call(0)
            variants = [fake_gpu.variants[function] for function, *_ in fake_gpu.launches]
            assert peer.variant in [variant.name for variant in variants], case.name
            assert all(0 < blocks[0] <= MAX_BLOCKS for _, (blocks, *_), *_ in fake_gpu.launches), case.name
            kernels = (variant for variant in variants if variant.operator != "mask_lists")
            assert all(dict(variant.axes)["dtype"] == case.dtype for variant in kernels), case.name


@pytest.mark.parametrize("name", ["append", "chunked", "paged", "varlen"])
def test_lengths_are_read_by_the_kernels_that_are_timed(name, fake_gpu, fake_arrays):
    for case in GRIDS[name].cases:
        peer = all_peers()["flashgen"]
        call = peer.prepare(case, [fake_arrays(case)])
        fake_gpu.launches.clear()
        call(0)
        variants = [fake_gpu.variants[function] for function, *_ in fake_gpu.launches]
        kernels = [(variant.operator, variant.has_lengths) for variant in variants]
        reading = [("attention", True)] * (len(kernels) - case.appends)
        assert kernels == [("append", False)] * case.appends + reading
        (main,) = (variant for variant in variants if variant.name == peer.variant)
        assert dict(main.axes).get("pages", "none") == ("paged" if case.page_size else "none")


def grids_of(tmp_path, text):
    path = tmp_path / "workloads.yaml"
    path.write_text(text, encoding="utf-8")
    return read(path)


def test_an_entry_is_a_case_for_each_combination_and_those_against_it(tmp_path):
    text = """
    g:
      doc: for a test
      metric: µs
      peers: [flashgen]
      defaults: {tokens: 4096, width: 512, dtype: bf16}
      cases:
        - name: "{masked} {seqlen} d{head_dim}"
          over: {mask: [none, causal], head_dim: [64, 96]}
          seqlen: 2048
          against: [{name: "{name}, {seqlen}", over: {seqlen: [2047, 2046]}, loss_limit: 0.5}]
    """
    grid = grids_of(tmp_path, text)["g"]
    assert (grid.metric, grid.peers, grid.doc) == ("µs", ("flashgen",), "for a test")
    names = [case.name for case in grid.cases]
    assert names[:4] == ["full 2k d64", "full 2k d64, 2047", "full 2k d64, 2046", "full 2k d96"]
    assert names[6::3] == ["causal 2k d64", "causal 2k d96"]
    base, shorter, *_ = grid.cases
    assert (base.batch, base.num_heads_q, base.num_heads_kv, base.seqlen_q) == (2, 8, 8, 2048)
    # The batch is the baseline's, though 4,096 tokens are no multiple of 2,047.
    assert (shorter.batch, shorter.seqlen_kv, shorter.baseline) == (2, 2047, base.name)
    assert grid.cases[3].num_heads_q == 5
    assert (base.loss_limit, shorter.loss_limit) == (None, 0.5)


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        ("[{name: x, seqlen: 8, heads: 1, head_dim: 8, batch: 1, colour: red}]", "colour"),
        ("[{name: x, seqlen: 8, heads: 1, head_dim: 8}]", "batch"),
        ("[{name: x, seqlen: 8, heads: 1, head_dim: 8, batch: 1, mask: oval}]", "oval"),
        ("[{name: '{shape}', seqlen: 8, heads: 1, head_dim: 8, batch: 1}]", "shape"),
        ("[{name: x, seqlen: 8, heads: 1, head_dim: 8, batch: 1}]\n  color: red", "color"),
    ],
)
def test_what_a_grid_cannot_have_is_told_with_its_file(tmp_path, cases, words):
    with pytest.raises(BadParam, match=rf"workloads.yaml: grid 'g': .*{words}"):
        grids_of(tmp_path, f"g:\n  doc: d\n  cases: {cases}\n")


def test_lists_that_are_there_are_not_made_again(fake_gpu, fake_arrays, monkeypatch):
    from fake_gpu import array

    places = itertools.count(1 << 50, 1 << 30)
    monkeypatch.setattr(
        CupyKind,
        "empty",
        lambda _, shape, like, stream, dtype=None: array(shape, dtype or like.dtype, address=next(places)),
    )
    monkeypatch.setattr(CupyKind, "is_capturing", lambda _: False)
    for case in GRIDS["lines"].cases:
        peer = all_peers()["flashgen-kept"]
        if peer.declines(case):
            continue
        call = peer.prepare(case, [fake_arrays(case)])
        fake_gpu.launches.clear()
        call(0)
        operators = {fake_gpu.variants[function].operator for function, *_ in fake_gpu.launches}
        assert operators == {"attention_backward" if case.is_backward else "attention"}, case.name
