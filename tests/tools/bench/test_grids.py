"""Every cell of every grid can be planned: a run on a GPU must not end at one that no kernel serves."""

from __future__ import annotations

import pytest

from flashgen.schedule.grid import MAX_BLOCKS
from flashgen.tools.bench.grids import GRIDS
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
            assert all(dict(variant.axes)["dtype"] == case.dtype for variant in variants), case.name


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
