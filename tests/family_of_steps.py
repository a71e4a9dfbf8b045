"""The family of tests/fixtures/steps, whose calls take three kernels, and plans of it."""

from pathlib import Path

from flashgen.families.load import load_spec
from flashgen.operators.attention import normalise
from flashgen.runtime.arrays import view
from flashgen.runtime.plans import Plan
from flashgen.schedule.plan import plan_steps

SPEC = load_spec(Path(__file__).parent / "fixtures" / "steps" / "specs" / "row_sums.yaml")
(MAIN,) = (variant for variant in SPEC.variants() if variant.is_main)


def plan_of(arrays, runner, device):
    """A plan of the family for q, k and v; ``runner(steps)`` makes the backend."""
    views = [view(x, name) for x, name in zip(arrays, "qkv", strict=True)]
    problem = normalise(*views)
    return Plan(problem, runner(plan_steps(problem, MAIN, device)), (*arrays, *[None] * 7))
