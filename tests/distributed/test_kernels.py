"""A rank's launch takes the kernel of the whole call: dispatch alone, for an H100, without a GPU."""

from __future__ import annotations

import pytest

from flashgen.call.kvcache import KVCache
from flashgen.call.record import AttentionCall, call_of
from flashgen.call.request import request_of
from flashgen.distributed import kernels
from flashgen.distributed.layouts import runs_of
from flashgen.distributed.segments import launches_of, longest_of, visibility
from flashgen.families.arch import typical
from flashgen.operators.arguments import view_of_shape
from flashgen.operators.masks import Band, visible_keys
from flashgen.schedule.dispatch import offers, select

CASES = [
    {"causal": True},
    {"causal": False, "window": (600, 0)},
    {"causal": False, "window": (600, 90)},
    {"causal": False, "window": (-1, 90)},
    {"causal": False},
    {"causal": True, "cu": (0, 1, 1300, 4096), "layout": "documents"},
    {"causal": False, "window": (90, 600), "cu": (0, 1, 1300, 4096), "layout": "contiguous"},
]


def request(case, launch=None):
    """What a call of a launch, or of one GPU, requests; and views of its arrays, on GPU 0."""
    packed = case.get("cu")
    rows, keys, window = 4096, 4096, case.get("window", (-1, -1))
    documents, longest_q, longest_kv = 3, 2796, 2796
    if launch is not None:
        rows = launch.rows.stop - launch.rows.start
        keys = sum(x.k_end - x.k_begin for x in launch.segments)
        left, right = window
        window = (left if left < 0 else left + launch.shift, right if right < 0 else right - launch.shift)
        documents, (longest_q, longest_kv) = len(launch.segments), longest_of(launch)
    lead = () if packed else (1,)
    shapes = {"q": (*lead, rows, 8, 128), "k": (*lead, keys, 2, 128), "v": (*lead, keys, 2, 128)}
    options = {"causal": case["causal"], "window_size": window, "return_lse": True}
    if packed:
        shapes |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), (documents + 1,))
        options |= {"max_seqlen_q": longest_q, "max_seqlen_kv": longest_kv}
    needed = request_of(call_of(AttentionCall, **shapes, **options))
    views = {
        name: None if x is None else view_of_shape(x, "int32" if "cu_" in name else "bf16", 0)
        for name, x in needed.by_name().items()
    }
    return needed, views


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("world", [2, 8])
def test_every_launch_takes_the_kernel_of_the_whole_call(case, world):
    device, cu, window = typical("sm_90"), case.get("cu"), case.get("window", (-1, -1))
    one = kernels.problem_of(*request(case))
    main = select(one, device, offers(one, device, kernels.specs_for(device, "attention", bool(cu))))
    assert not main.grid.shares
    whole = kernels.Whole(1, 4096, 3 if cu else 0, 2796 if cu else 4096, 8, 2, window)
    alone = set()
    for runs in runs_of(case.get("layout", "zigzag"), cu or (0, 4096), world):
        for launch in launches_of(runs, cu or (0, 4096), visibility(case["causal"], window), bool(cu)):
            needed, views = request(case, launch)
            part = kernels.problem_of(needed, views)
            assert kernels.problem_of(needed, kernels.whole_views(views, whole), whole) == one
            problem = kernels.masked_like(part, one, launch.shift)
            steps = next(kernels.steps_like(problem, kernels.mains_of(one, device), device))
            assert steps.main == main
            assert problem.mask_type == one.mask_type
            if not cu:  # hides what the part hides
                assert (visible_keys(problem) == visible_keys(part)).all()
            alone.add(
                select(part, device, offers(part, device, kernels.specs_for(device, "attention", bool(cu))))
            )
    assert Band.of(one).bounded == (case["causal"] or window != (-1, -1))
    if case == CASES[0] and world == 8:
        assert alone != {main}  # by itself a launch of 256 rows takes another one


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_table_of_segments_takes_the_tile_of_the_whole_call(case):
    device, cu, window = typical("sm_90"), case.get("cu"), case.get("window", (-1, -1))
    one = kernels.problem_of(*request(case))
    main = next(kernels.mains_of(one, device))
    runs = runs_of(case.get("layout", "zigzag"), cu or (0, 4096), 2)[0]
    for launch in launches_of(runs, cu or (0, 4096), visibility(case["causal"], window), packed=True):
        keys, segments = (1, 4096, 2, 128), (len(launch.segments),)
        needed = request_of(
            call_of(
                AttentionCall,
                q=(launch.rows.stop - launch.rows.start, 8, 128),
                k=KVCache(keys, keys, segments, index=segments, starts=segments),
                cu_seqlens_q=(segments[0] + 1,),
                max_seqlen_q=longest_of(launch)[0],
                causal=case["causal"],
                window_size=window,
                return_lse=True,
            )
        )
        views = {
            name: None if x is None else view_of_shape(x, "bf16" if name in "qkv" else "int32", 0)
            for name, x in needed.by_name().items()
        }
        problem = kernels.masked_like(kernels.problem_of(needed, views), one, launch.shift)
        (of_table,) = kernels.kernels_of(problem, one, device)
        assert of_table.axis("kv_starts") == "starts"
        for key in ("block_m", "block_n"):
            assert of_table.tile_value(key) == main.tile_value(key)
