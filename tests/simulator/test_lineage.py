"""naive and v1, each kernel of a call after the other, against float64; and the calls that ask for them."""

from __future__ import annotations

import numpy as np
import pytest

import flashgen
from flashgen.errors import SimulationError
from flashgen.operators.reference import judge
from flashgen.simulator.example import Shape
from flashgen.source.render import render
from named import by_name
from simulator import faults_lineage
from simulator.calls import ORDERS, calls_of
from simulator.faults import WRONG
from simulator.lineage import KERNELS, MAIN_OF, MAINS, simulated


def checked(main, shape, seed, **options):
    """The example after a call that is near enough to float64."""
    example = simulated(main, shape, seed, **options)
    verdict = example.judge()
    assert verdict.ok, f"{main.name}, {shape}: {verdict}"
    return example


def shapes(main):
    """Ragged tiles with short head dims, few queries on many keys, more queries than keys with some that see
    none, the other alignment of a diagonal, and no keys at all.
    """
    width = main.head_dim
    return [
        Shape(100, 150, heads=3, head_dim=width - 8, head_dim_v=width - 24),
        Shape(7, 300, batch=2, head_dim=24, head_dim_v=width, spread=6.0),
        Shape(200, 70, heads=1, return_lse=False),
        Shape(150, 70, heads=1, top_left=True),
        Shape(64, 128),
        Shape(5, 0, batch=2),
    ]


@pytest.mark.parametrize("main", MAINS, ids=str)
def test_every_variant(main, compiler, fresh_seed):
    for shape in shapes(main):
        checked(main, shape, fresh_seed)


SMALL = [main for main in MAINS if (main.head_dim, main.dtype, main.mask_type) == (64, "bf16", "causal")]


@pytest.mark.parametrize("main", SMALL, ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (64, 64), (65, 63), (1, 200), (129, 257)])
def test_lengths_at_the_edges_of_tiles(main, seqlen_q, seqlen_kv, compiler, fresh_seed):
    checked(main, Shape(seqlen_q, seqlen_kv), fresh_seed)


@pytest.mark.parametrize("main", SMALL, ids=str)
def test_no_order_of_threads_changes_a_bit(main, compiler, fresh_seed):
    shape = Shape(100, 150)
    results = [checked(main, shape, fresh_seed, order=order) for order in range(20)]
    assert len({(example.out.tobytes(), example.lse.tobytes()) for example in results}) == 1


@pytest.mark.parametrize("main", MAINS, ids=str)
def test_many_rounds_through_memory_stay_within_the_bound(main, compiler, fresh_seed):
    """v1 divides and multiplies O by l once for each KV block, with one maximum for all or a moving one."""
    if main.mask_type == "none":
        for spread in (1.0, 8.0):
            checked(main, Shape(16, 4096, heads=1, spread=spread), fresh_seed)


def test_a_family_takes_what_its_algorithm_keeps_in_memory():
    q = np.zeros((2, 30, 3, 64), np.float16)
    k = np.zeros((2, 41, 3, 64), np.float16)
    naive, v1 = (
        flashgen.plan(q, k, k, backend="simulator", algorithm=algorithm) for algorithm in ("naive", "v1")
    )
    assert [step.variant.step for step in naive.steps] == ["scores", "softmax", "output"]
    assert len(v1.steps) == 1
    rows = 2 * 3 * 30
    slices = [rows * 48 * 4, rows * 4]  # a row of S has whole chunks of P
    assert naive.workspace_bytes == sum(-(-size // 256) * 256 for size in slices)
    assert v1.workspace_bytes == sum(-(-size // 256) * 256 for size in (rows * 64 * 4, rows * 4, rows * 4))


@pytest.mark.parametrize("algorithm", ["naive", "v1", "v2", "v3"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_that_asks_for_an_algorithm_gets_it(algorithm, causal, compiler, monkeypatch, fresh_seed):
    monkeypatch.setenv("FLASHGEN_SIMULATOR_ARCH", "sm_90")
    rng = np.random.default_rng(fresh_seed)
    sizes = [(2, 70, 2, 40), (2, 90, 2, 40), (2, 90, 2, 40)]
    q, k, v = (rng.standard_normal(size, np.float32).astype(np.float16) for size in sizes)
    options = {"causal": causal, "backend": "simulator", "algorithm": algorithm, "return_lse": True}
    plan = flashgen.plan(q, k, v, **options)
    specs = {"naive": "flash_fwd_naive", "v1": "flash_fwd_v1", "v2": "flash_fwd_sm80", "v3": "flash_fwd_sm90"}
    assert plan.variant.spec == specs[algorithm]
    out, lse = flashgen.attention(q, k, v, **options)
    assert judge(plan.problem, by_name(plan.problem, q, k, v, None, out, lse)).ok


def verdict_of(fault, seed, plant=True):
    """The check that found something, or None; and the SimulationError, if it was one."""
    main = MAIN_OF[fault.variant]

    def source_of(step):
        source = render(step)
        return fault.plant(source) if plant and step.name == fault.variant else source

    try:
        example = simulated(main, fault.shape, seed, source_of=source_of)
    except SimulationError as error:
        return error.check, error
    return (None if example.judge().ok else WRONG), None


def test_there_are_faults_in_every_kernel():
    families = {name[: name.index("_hdim")] for name in KERNELS}
    assert {fault.variant[: fault.variant.index("_hdim")] for fault in faults_lineage.FAULTS} == families
    assert len({fault.name for fault in faults_lineage.FAULTS}) == len(faults_lineage.FAULTS)


@pytest.mark.parametrize("fault", faults_lineage.FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, compiler, fixed_seed):
    check, error = verdict_of(fault, fixed_seed)
    assert check in fault.caught
    assert error is None or error.kernel in [step.name for step in MAIN_OF[fault.variant].steps]


@pytest.mark.parametrize(
    "fault", calls_of(faults_lineage.FAULTS), ids=lambda fault: f"{fault.variant} {fault.shape}"
)
def test_without_it_nothing_is_found(fault, compiler, fresh_seed):
    seeds = range(fresh_seed, fresh_seed + ORDERS)
    assert [verdict_of(fault, seed, plant=False) for seed in seeds] == [(None, None)] * ORDERS
