"""merge in the simulator: ragged rows, every width of a row, parts that saw nothing, planted faults."""

from __future__ import annotations

import pytest

from flashgen.families.load import load_specs
from flashgen.simulator.example import Shape
from simulator.calls import check_of, with_fault
from simulator.faults import NUMBERS, WRONG, fault

VARIANTS = {
    variant.name: variant for spec in load_specs() if spec.operator == "merge" for variant in spec.variants()
}
SHAPE = Shape(37, heads=3, batch=2, head_dim=104)
SHAPES = (
    SHAPE,
    Shape(1, heads=1, head_dim=8),
    Shape(1, heads=32, batch=3, head_dim=64),
    Shape(40, heads=5, head_dim=256, spread=60.0),
    Shape(33, heads=1, batch=2, head_dim=128, spread=3000.0, gap=48),
)
NAME = "merge_bf16_sm80"
FAULTS = (
    fault("LSEs of the next head", NAME, SHAPE, NUMBERS, "(int64_t(batch) * params.num_heads_q + head)",
          "(int64_t(batch) * params.num_heads_q + (head + 1) % params.num_heads_q)"),
    fault("NaN of a part that saw nothing", NAME, SHAPE, (WRONG,), "if (lse2 != -INFINITY) values2",
          "if (true) values2"),
    fault("-inf minus itself", NAME, Shape(200, heads=3, head_dim=8), (WRONG,),
          "larger == -INFINITY ? 0.0f : larger", "larger"),
    fault("flash-attn's mark of a row without keys weighs", NAME, SHAPE, (WRONG,),
          "loaded == INFINITY ? -INFINITY : loaded", "loaded"),
    fault("a part not divided by the sum", NAME, SHAPE, (WRONG,),
          "add_scaled(merged, values2, term2 * factor)",
          "add_scaled(merged, values2, term2)"),
    fault("the last rows of a batch entry run on", NAME, SHAPE, ("global bounds", WRONG),
          "if (row >= params.seqlen_q * params.num_heads_q) return;", ""),
    fault("columns past the head dim", NAME, SHAPE, ("global bounds", "global access"),
          "column < params.head_dim_v;", "column < 128;"),
    fault("does not wait for the grid ahead", NAME, SHAPE, ("dependency",),
          "    griddepcontrol_wait();\n", ""),
)  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_within_the_bound(name, compiler, fresh_seed):
    for shape in SHAPES:
        assert check_of(VARIANTS[name], shape, fresh_seed) is None, shape


@pytest.mark.parametrize("each", FAULTS, ids=lambda each: each.name)
def test_a_planted_fault_is_found(each, compiler, fixed_seed):
    variant = VARIANTS[each.variant]
    assert check_of(variant, each.shape, fixed_seed, with_fault(each.plant)) in each.caught


def test_without_them_nothing_is_found(compiler, fresh_seed):
    for shape in {each.shape for each in FAULTS}:
        assert check_of(VARIANTS[NAME], shape, fresh_seed) is None
