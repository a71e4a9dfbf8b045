"""Few queries on many keys: the kernels of both families on a GPU, bitwise repeatable, in a graph with other
inputs, in a workspace that nobody clears."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch", reason="the float64 reference is computed with PyTorch on the GPU")

import flashgen  # noqa: E402
from flashgen.families.load import load_specs  # noqa: E402
from flashgen.runtime.device import device  # noqa: E402
from flashgen.runtime.launch import bind  # noqa: E402
from flashgen.runtime.plans import Plan  # noqa: E402
from flashgen.schedule.dispatch import candidates, offers  # noqa: E402
from flashgen.schedule.plan import plan_steps  # noqa: E402
from gpu.cases import Case, check, compare, front_door, make, new_seed, problem_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch does not see a GPU"),
]

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
# Batch, queries, keys, query heads, kv heads: one tile on all multiprocessors, ragged shares, more tiles than
# multiprocessors, none split, several queries in one tile, 32 and 64 rows.
SHAPES = (
    (1, 1, 40_001, 4, 1),
    (1, 1, 4096, 32, 8),
    (5, 1, 3001, 8, 8),
    (64, 1, 700, 16, 4),
    (3, 4, 9000, 8, 2),
    (2, 3, 5000, 16, 2),
    (2, 8, 5000, 16, 2),
)


def case_of(shape, head_dim, dtype, **options):
    batch, seqlen_q, seqlen_kv, heads_q, heads_kv = shape
    return Case(batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim, dtype, **options)


def kernels(problem):
    """The variants that split keys among thread blocks and may serve it, in shares or in clusters."""
    found = candidates(problem, device(0), offers(problem, device(0), load_specs()))
    return [variant for variant in found if variant.grid.shares or variant.grid.shared_tiles]


def plans(arrays, out=None):
    """A plan for each of the kernels."""
    given = arrays.q, arrays.k, arrays.v
    problem = flashgen.plan(*given, out=out, return_lse=True, **arrays.options).problem
    for variant in kernels(problem):
        yield plan_by(problem, variant, arrays, out)


def plan_by(problem, variant, arrays, out=None, gpu=None):
    examples = problem.operator.in_order(q=arrays.q, k=arrays.k, v=arrays.v, out=out)
    gpu = gpu or device(0)
    return Plan(problem, bind(plan_steps(problem, variant, gpu), gpu), examples)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_few_queries_are_right(head_dim):
    """Every shape at the usual head dims; at the others one of each grouping and tile."""
    usual = head_dim in (64, 128, 256)
    for index, shape in enumerate(SHAPES if usual else SHAPES[::3]):
        dtype = ("fp16", "bf16")[index % 2]
        for options in ({"causal": True}, {"window_size": (1000, 0)}):
            case = case_of(shape, head_dim, dtype, **options)
            check(case, front_door, "cuda")
            for variant in kernels(problem_of(make(case, "cuda", 0))):
                check(case, by_kernel(variant), "cuda")


def by_kernel(variant):
    def attend(arrays):
        plan = plan_by(problem_of(arrays), variant, arrays, arrays.out)
        return plan(arrays.q, arrays.k, arrays.v, out=arrays.out, lse=arrays.lse)

    return attend


def test_dispatch_takes_the_families():
    for shape in SHAPES:
        arrays = make(case_of(shape, 128, "bf16", causal=True), "cuda", new_seed())
        plan = flashgen.plan(arrays.q, arrays.k, arrays.v, return_lse=True, **arrays.options)
        assert plan.variant in kernels(plan.problem)


@pytest.mark.parametrize("num_sms", [1, 2, 3, 7, 29, 132])
@pytest.mark.parametrize("name", ["", "m32", "m64"])
def test_shares_of_every_size(num_sms, name):
    """As if the GPU had fewer multiprocessors."""
    gpu = dataclasses.replace(device(0), num_sms=num_sms)

    def attend(arrays):
        problem = problem_of(arrays)
        decode = (v for v in kernels(problem) if v.spec == "flash_decode_sm80")
        (variant,) = (v for v in decode if v.tile_name == name)
        plan = plan_by(problem, variant, arrays, arrays.out, gpu)
        return plan(arrays.q, arrays.k, arrays.v, out=arrays.out, lse=arrays.lse)

    for shape in SHAPES:
        check(case_of(shape, 64, "bf16", causal=True), attend, "cuda")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_repeat(shape, dtype):
    """One launch right after another, each in the workspace that the one before it left."""
    arrays = make(case_of(shape, 128, dtype, causal=True), "cuda", new_seed())
    for plan in plans(arrays):
        workspace = torch.full((max(256, plan.workspace_bytes),), 255, dtype=torch.uint8, device="cuda")
        results = [plan(arrays.q, arrays.k, arrays.v, workspace=workspace) for _ in range(50)]
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])
        compare(case_of(shape, 128, dtype, causal=True), arrays, *results[0], f"{shape}, {plan.variant}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_calls_that_overlap_share_a_workspace(shape):
    """Those of two inputs in turns: one may begin before the one ahead has ended, and has other parts."""
    case = case_of(shape, 128, "bf16", causal=True)
    inputs = [make(case, "cuda", new_seed()) for _ in range(2)]
    for plan in plans(inputs[0]):
        workspace = torch.full((max(256, plan.workspace_bytes),), 255, dtype=torch.uint8, device="cuda")

        def call(index, plan=plan, workspace=workspace):
            arrays = inputs[index % 2]
            return plan(arrays.q, arrays.k, arrays.v, workspace=workspace)

        expected = []
        for index in range(2):
            expected.append(call(index))
            torch.cuda.synchronize()
        for index, (out, lse) in enumerate([call(index) for index in range(50)]):
            assert torch.equal(out, expected[index % 2][0]), plan.variant
            assert torch.equal(lse, expected[index % 2][1]), plan.variant


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_graph_replays_with_other_inputs(shape):
    case = case_of(shape, 128, "bf16", causal=True)
    arrays = make(case, "cuda", new_seed())
    for plan in plans(arrays, arrays.out):
        replay_with_other_inputs(case, arrays, plan)


def replay_with_other_inputs(case, arrays, plan):
    workspace = torch.full((max(256, plan.workspace_bytes),), 255, dtype=torch.uint8, device="cuda")

    def call():
        return plan(arrays.q, arrays.k, arrays.v, out=arrays.out, lse=arrays.lse, workspace=workspace)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                call()
    for _ in range(3):
        for x in (arrays.q, arrays.k, arrays.v):
            x.copy_(torch.randn_like(x))
        for x in (arrays.out, arrays.lse):
            x.fill_(torch.nan)
        workspace.fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        compare(case, arrays, arrays.out, arrays.lse, f"{case}, {plan.variant}")


def test_calls_on_two_streams_do_not_meet():
    case = case_of((1, 1, 40_001, 4, 1), 128, "bf16", causal=True)
    sets = [make(case, "cuda", new_seed()) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in sets]
    for plan in plans(sets[0]):
        torch.cuda.synchronize()
        results = []
        for _ in range(20):
            for arrays, stream in zip(sets, streams, strict=True):
                with torch.cuda.stream(stream):
                    results.append(plan(arrays.q, arrays.k, arrays.v))
        torch.cuda.synchronize()
        for index, (out, lse) in enumerate(results):
            assert torch.equal(out, results[index % 2][0]), plan.variant
            assert torch.equal(lse, results[index % 2][1]), plan.variant
        for arrays, (out, lse) in zip(sets, results[:2], strict=True):
            compare(case, arrays, out, lse, f"{case}, {plan.variant}")


# Keys and queries of sequences that decode side by side.
LENGTHS = (1, 8191, 1024, 40_000, 1025, 0, 700, 5000)


def own_bits(found, out, lse):
    """Checks that a sequence has the results that it had before, or keeps them."""
    kept = found.setdefault("out", out), found.setdefault("lse", lse)
    assert torch.equal(kept[0], out)
    assert torch.equal(kept[1], lse)


@pytest.mark.parametrize("splits", [1, 7, flashgen.SplitEvery(1024)], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_fixed_splits_give_a_sequence_the_same_bits_in_any_batch(seqlen_q, splits):
    """Of one length, and of several in rows of a cache and in pages."""
    torch.manual_seed(new_seed())
    capacity, size, count = max(LENGTHS), 16, len(LENGTHS)
    q = torch.randn(count, seqlen_q, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(count, capacity, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    pool_k, pool_v = (x.reshape(-1, size, 8, 128) for x in (k, v))
    table = torch.arange(len(pool_k), device="cuda", dtype=torch.int32).reshape(count, -1)
    lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
    options = {"causal": True, "splits": splits, "return_lse": True}
    rectangle, rows, pages = ([{} for _ in LENGTHS] for _ in range(3))
    for batch in (*([b] for b in range(count)), range(count), (7, 3, 1), (4, 0, 5, 3, 2)):
        which = torch.tensor(list(batch), device="cuda")
        index = which.to(torch.int32)
        calls = (
            (rectangle, (k[which, :5000], v[which, :5000])),
            (rows, (flashgen.KVCache(k, v, lengths[which], index=index),)),
            (pages, (flashgen.KVCache(pool_k, pool_v, lengths[which], pages=table[which]),)),
        )
        for found, keys in calls:
            out, lse = flashgen.attention(q[which], *keys, **options)
            for place, b in enumerate(batch):
                own_bits(found[b], out[place], lse[place])
    for b, length in enumerate(LENGTHS):
        expected = flashgen.attention(q[b], k[b, :length], v[b, :length], causal=True).float()
        for found in (rows, pages):
            torch.testing.assert_close(found[b]["out"].float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("splits", [1, 7, flashgen.SplitEvery(1024)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fixed_splits_are_right(shape, splits):
    def attend(arrays):
        options = {"return_lse": True, "splits": splits, **arrays.options}
        plan = flashgen.plan(arrays.q, arrays.k, arrays.v, out=arrays.out, **options)
        workspace = torch.full((max(256, plan.workspace_bytes),), 255, dtype=torch.uint8, device="cuda")
        return plan(arrays.q, arrays.k, arrays.v, out=arrays.out, lse=arrays.lse, workspace=workspace)

    for options in ({"causal": True}, {"window_size": (1000, 0)}):
        check(case_of(shape, 128, "bf16", **options), attend, "cuda")


@pytest.mark.parametrize("num_sms", [1, 13, 132])
def test_fixed_splits_do_not_depend_on_the_multiprocessors(num_sms):
    """As if the GPU had fewer: shares of many splits each, or of one."""
    torch.manual_seed(0)
    lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
    q = torch.randn(len(LENGTHS), 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn(len(LENGTHS), max(LENGTHS), 8, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv"
    )
    plan = flashgen.plan(q, k, v, kv_lengths=lengths, splits=flashgen.SplitEvery(1024))
    gpu = dataclasses.replace(device(0), num_sms=num_sms)
    given = {"kv_lengths": lengths}
    examples = {"q": q, "k": k, "v": v, **given}
    fewer = Plan(
        plan.problem,
        bind(plan_steps(plan.problem, plan.variant, gpu), gpu),
        tuple(examples.get(argument.name) for argument in plan.problem.operator.arguments),
    )
    assert num_sms == 132 or fewer.steps[0].launch.blocks < plan.steps[0].launch.blocks
    assert torch.equal(fewer(q, k, v, **given), plan(q, k, v, **given))
