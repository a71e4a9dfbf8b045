"""The competition on a bench whose times the test sets."""

import pytest

from flashgen.errors import InternalError
from flashgen.tools.tune.candidates import fields
from flashgen.tools.tune.contest import hold, steps


def compete(subject, bench, *cases, **axes):
    competing = fields([subject(**axes)])
    (ranking,) = hold(competing, {0: cases}, bench)
    return ranking


def test_the_fastest_over_all_problems_wins(subject, bench, case):
    """block_n 32 is best at 1k and bad at 4k, 112 the other way round, 72 good at both."""
    times = {"1k": {32: 0.5, 64: 1.0, 72: 0.8, 112: 1.5}, "4k": {32: 1.9, 64: 1.0, 72: 0.9, 112: 0.6}}
    bench.ms = lambda variant, case: times[case.name][dict(variant.tile)["block_n"]]
    found = compete(subject, bench, case("1k", 1024), case("4k", 4096))
    speeds = [trial.speed(found.ordinary) for trial in found.trials]
    assert speeds == sorted(speeds, reverse=True)
    assert dict(found.winner.variant.tile)["block_n"] == 72
    assert found.gain == pytest.approx((1 / 0.8 / 0.9) ** 0.5)
    # Dispatch is told the rate on the longest problem.
    assert found.efficiency == pytest.approx(1 / 0.9, abs=1e-3)
    assert found.ordinary in found.trials


def test_a_gain_within_the_noise_changes_nothing(subject, bench, case):
    bench.ms = lambda variant, case: 1.0 if not variant.tile_name else 0.995
    found = compete(subject, bench, case("1k"))
    assert found.trials[0] is not found.ordinary
    assert found.winner is found.ordinary
    assert (found.gain, found.efficiency) == (1.0, 1.0)


def test_the_scale_of_efficiency_is_that_of_the_ordinary_row(subject, bench, case, edit_spec):
    edit_spec("warps: 8, stages: 2, min_blocks: 1}", "warps: 8, stages: 2, min_blocks: 1, efficiency: 0.8}")
    bench.ms = lambda variant, case: 1.0 if not variant.tile_name else 0.5
    assert compete(subject, bench, case("1k")).efficiency == 1.6


def test_what_fails_is_dropped_with_its_reason_and_not_timed_further(subject, bench, case):
    bench.spilling = (4,)
    bench.faults = {112: "wrong result: error 3"}
    bench.late = {(72, "4k"): "wrong result: relative error 0.5"}
    found = compete(subject, bench, case("1k", 1024), case("4k", 4096), case("16k", 16384))
    whys = [(each.tile["block_n"], each.tile["warps"], each.why) for each in found.dropped]
    assert {why for *_, warps, why in whys if warps == 4} == {
        "spills 32 bytes of registers, and tiny says no_spills"
    }
    assert {why for n, warps, why in whys if (n, warps) == (112, 8)} == {"wrong result: error 3"}
    assert {why for n, warps, why in whys if (n, warps) == (72, 8)} == {
        "4k: wrong result: relative error 0.5"
    }
    ranked = {(dict(t.variant.tile)["block_n"], dict(t.variant.tile)["warps"]) for t in found.trials}
    assert ranked == {(32, 8), (64, 8)}
    timed = [{tile["block_n"] for tile in tiles} for _, tiles in bench.timed]
    assert timed == [{64, 32, 72}, {64, 32, 72}, {64, 32}]


def test_what_does_not_compile_is_dropped(subject, bench, case, edit_spec):
    edit_spec("warps: [4, 8], stages: 2}", "warps: [4, 8], stages: [2, 3]}")
    bench.broken = (3,)
    found = compete(subject, bench, case("1k"))
    assert {(each.tile["stages"], each.why) for each in found.dropped} == {(3, "static_assert failed")}
    assert len(found.dropped) == 12
    assert {dict(trial.variant.tile)["stages"] for trial in found.trials} == {2}


def test_tiles_may_spill_where_the_ordinary_one_may(subject, bench, case, edit_spec):
    edit_spec("min_blocks: 1}\n  - {block_m: 128", "min_blocks: 1, no_spills: false}\n  - {block_m: 128")
    bench.spilling = (4, 8)
    assert compete(subject, bench, case("1k")).dropped == ()


def test_an_ordinary_tile_that_is_wrong_stops_everything(subject, bench, case):
    bench.faults = {64: "wrong result: error 3"}
    with pytest.raises(InternalError, match=r"tiny_fwd_hdim64_fp16_sm80.*wrong result"):
        compete(subject, bench, case("1k"))


def test_steps_are_as_many_as_announced(subject, bench, case):
    competing = fields([subject(), subject(mask_type="causal")])
    cases = {0: [case("1k")], 1: [case("1k"), case("4k")]}
    bench.spilling = (4,)
    seen = []
    assert len(hold(competing, cases, bench, on_step=seen.append)) == 2
    assert len(seen) == steps(competing, cases) == 14 + 14 + 3


def test_a_field_of_one_keeps_the_ordinary_tile(subject, bench, case):
    found = compete(subject, bench, case("1k"), dtype="fp32", head_dim=32)
    assert found.winner is found.ordinary
    assert len(found.trials) == 1
