"""Attention of DTensors: sharded by the batch and by heads, beside one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flashgen.distributed.dtensor import _divides  # noqa: E402

pytestmark = pytest.mark.xdist_group("gloo")

CASE = {"heads": (8, 4), "seqlen": 40, "batch": 4, "causal": True, "sinks": True}


@pytest.mark.parametrize(
    ("case", "placements"),
    [
        (CASE, (0,)),
        (CASE | {"window_size": (9, 0)}, (2,)),
        (CASE, (0, 2)),
        (CASE, (2, 2)),
        (CASE, (None, 0)),
        ({"heads": (8, 4), "cu_seqlens": [0, 17, 17, 60, 150], "causal": True}, (1,)),
    ],
    ids=str,
)
def test_shards_give_what_one_process_gives(case, placements, pool):
    for difference, sharded in pool.run("on_dtensors", case, placements):
        assert difference < 2e-5
        assert sharded


def test_heads_that_ranks_do_not_divide_are_gathered(pool):
    case = CASE | {"heads": (12, 6)}
    for difference, sharded in pool.run("on_dtensors", case, (2,)):
        assert difference < 2e-5
        assert not sharded
    assert _divides(6, (2, 3))
    assert not _divides(6, (4,))
    assert not _divides(12, (2, 4))
    assert _divides(2, (4, 2))


def test_dropout_has_the_bits_of_one_process(pool):
    assert all(pool.run("dropout_of_dtensors", 2))
