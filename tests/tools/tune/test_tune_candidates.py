"""Which tiles compete."""

from fake_gpu import H200
from flashgen.families import tuned
from flashgen.families.load import load_spec
from flashgen.tools.tune.candidates import fields
from flashgen.tools.tune.userfile import Measured, merge


def tiles(variants):
    return [dict(variant.tile) for variant in variants]


def test_candidates_are_what_the_spec_wants_tried_without_the_ordinary_tile(subject):
    (field,) = fields([subject()])
    ordinary = field.subject.ordinary
    assert len(field.candidates) == 2 * 3 * 2 + 1  # all combinations of one row, and one of the other
    assert dict(ordinary.tile) not in tiles(field.candidates)
    for each in field.candidates:
        assert each.axes == ordinary.axes
        assert each.target == ordinary.target
        assert each.threads == 32 * each.tile_value("warps")
        assert each.name == ordinary.name.replace("_sm80", "_tuned_sm80")
        assert each.no_spills == ordinary.no_spills


def test_a_tile_that_a_block_cannot_have_is_dropped_with_the_reason(subject, edit_spec):
    edit_spec("{from: 32, to: 112, step: 40}", "[32, 800]")
    (field,) = fields([subject()])
    assert {each.tile["block_n"] for each in field.dropped} == {800}
    assert all("bytes of shared memory" in each.why for each in field.dropped)
    assert {tile["block_n"] for tile in tiles(field.candidates)} == {32, 64}


def test_a_point_for_which_the_spec_lists_nothing_has_no_candidates(subject):
    (field,) = fields([subject(dtype="fp32", head_dim=32)])
    assert (field.candidates, field.dropped) == ((), ())


def test_the_winner_of_last_time_competes_again_and_is_the_kernel_that_a_call_gets(subject, spec_file):
    first = subject()
    odd = dict(first.ordinary.tile) | {"block_n": 48}
    merge(first.spec, H200.name, {first.point: Measured(odd, 1.1, {})})
    again = subject(gpu=H200.name)
    (field,) = fields([again])
    assert tiles(field.candidates)[0] == odd
    assert len(field.candidates) == 1 + 13
    # But for the figures that steer dispatch, the candidate is the variant that will be loaded.
    assert field.candidates[0].rendered_form() == again.tuned.rendered_form()
    assert tuned.path_for("tiny", H200.name).exists()
    assert load_spec(spec_file).variants() == first.spec.variants()


def test_each_subject_has_its_own_field(subject):
    found = fields([subject(), subject(mask_type="causal")])
    assert [field.subject.ordinary.mask_type for field in found] == ["none", "causal"]
    assert [{v.mask_type for v in field.candidates} for field in found] == [{"none"}, {"causal"}]
