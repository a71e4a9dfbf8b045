"""naive and v1 on a GPU, through ``algorithm``: against float64, captured and replayed, past 2^31 scores."""

import numpy as np
import pytest

cp = pytest.importorskip("cupy")
torch = pytest.importorskip("torch", reason="the float64 reference is computed with PyTorch on the GPU")

import flashgen  # noqa: E402
from flashgen.families.load import load_specs  # noqa: E402
from flashgen.operators.reference import judge  # noqa: E402
from gpu import forward_cases  # noqa: E402
from gpu.cases import check  # noqa: E402
from named import by_name  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch does not see a GPU"),
]

SPECS = {spec.algorithm: spec for spec in load_specs() if spec.algorithm in ("naive", "v1")}
VARIANTS = [variant for spec in SPECS.values() for variant in spec.variants() if variant.is_main]


def front_door(algorithm):
    """``attend`` for ``check``: ``flashgen.attention`` by one algorithm."""

    def attend(arrays):
        q, k, v, out = arrays.q, arrays.k, arrays.v, arrays.out
        return flashgen.attention(q, k, v, out=out, return_lse=True, algorithm=algorithm, **arrays.options)

    return attend


def served(case):
    return (
        case.dtype != "fp32"
        and case.heads_q == case.heads_kv
        and case.window_size == (-1, -1)
        and case.mask is None
        and max(case.head_dim, case.width_v) <= 128
        and case.batch * case.heads_q * case.seqlen_q * case.seqlen_kv <= 1 << 28
    )


LISTS = (
    forward_cases.every_seqlen,
    forward_cases.head_dims_of_v,
    forward_cases.layouts,
    forward_cases.values,
)

CASES = [case for make in LISTS for case in make() if served(case)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variant(variant):
    (algorithm,) = (name for name, spec in SPECS.items() if spec.name == variant.spec)
    for case in forward_cases.of_variant(variant, forward_cases.smaller_head_dims(variant, VARIANTS)):
        check(case, front_door(algorithm), "cuda")


@pytest.mark.parametrize("algorithm", SPECS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls(algorithm, case):
    check(case, front_door(algorithm), "cuda")


def normal(shape):
    return cp.random.standard_normal(shape, dtype=cp.float32).astype(cp.float16)


@pytest.mark.parametrize("algorithm", SPECS)
@pytest.mark.parametrize("causal", [False, True])
def test_in_a_graph_with_memory_of_the_callers(algorithm, causal):
    q, k, v = normal((2, 300, 3, 64)), normal((2, 500, 3, 64)), normal((2, 500, 3, 64))
    out, lse = cp.full(q.shape, cp.nan, cp.float16), cp.full((2, 3, 300), cp.nan, cp.float32)
    plan = flashgen.plan(q, k, v, causal=causal, out=out, return_lse=True, algorithm=algorithm)
    assert plan.variant.spec == SPECS[algorithm].name
    workspace = cp.full(plan.workspace_bytes, 0xFF, cp.uint8)
    given = {"out": out, "lse": lse, "workspace": workspace}
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        plan(q, k, v, **given)
        stream.synchronize()
        stream.begin_capture()
        plan(q, k, v, **given)
        graph = stream.end_capture()
        for _ in range(3):
            for x in (q, k, v):
                x[...] = normal(x.shape)
            for x in (out, lse):
                x.fill(cp.nan)
            workspace.fill(0xFF)
            graph.launch(stream)
            stream.synchronize()
            assert judge(
                plan.problem,
                by_name(plan.problem, *map(cp.asnumpy, (q, k, v)), None, *map(cp.asnumpy, (out, lse))),
            ).ok


def test_more_than_2_to_the_31_scores():
    heads, seqlen = 9, 16_384
    if cp.cuda.Device().mem_info[0] < 12 << 30:
        pytest.skip("S takes 9 GiB")
    q, k, v = (normal((1, seqlen, heads, 64)) for _ in "qkv")
    plan = flashgen.plan(q, k, v, causal=True, algorithm="naive")
    assert plan.workspace_bytes > 4 << 31
    found = plan(q, k, v)[0, -256:, -1].astype(cp.float32)
    # The same rows as the last 256 queries of the last head alone, which another family computes.
    rows = (q[:, -256:, -1:], k[:, :, -1:], v[:, :, -1:])
    expected = flashgen.attention(*map(cp.ascontiguousarray, rows), causal=True)[0, :, 0].astype(cp.float32)
    assert float(cp.linalg.norm(found - expected) / cp.linalg.norm(expected)) < 2e-3
    cp.get_default_memory_pool().free_all_blocks()


def test_on_a_gpu_that_does_not_run_it_the_error_says_so():
    from flashgen.runtime.device import device

    if device(0).arch == "sm_90":
        pytest.skip("Hopper runs all of them")
    q = normal((1, 64, 1, 64))
    with pytest.raises(flashgen.DeviceTypeNotSupported, match="sm_90a"):
        flashgen.attention(q, q, q, algorithm="v3")


@pytest.mark.parametrize("algorithm", ["naive", "v1", "v2", None])
def test_plans_of_different_algorithms_are_kept_apart(algorithm):
    q = normal((1, 200, 2, 64))
    expected = flashgen.attention(q, q, q, causal=True).astype(cp.float32)
    for _ in range(2):
        found = flashgen.attention(q, q, q, causal=True, algorithm=algorithm).astype(cp.float32)
        assert float(abs(found - expected).max()) < 1e-2
    assert np.isfinite(float(found.sum()))
