"""The forward kernels against float64: each shipped variant by itself, then what dispatch makes of a call."""

from __future__ import annotations

import dataclasses
import os

import pytest

torch = pytest.importorskip("torch", reason="the float64 reference is computed with PyTorch on the GPU")

import flashgen  # noqa: E402
from flashgen.families.load import load_specs  # noqa: E402
from flashgen.runtime.device import device  # noqa: E402
from flashgen.runtime.launch import bind  # noqa: E402
from flashgen.runtime.plans import Plan  # noqa: E402
from flashgen.schedule.dispatch import runs_on  # noqa: E402
from flashgen.schedule.grid import tiles  # noqa: E402
from flashgen.schedule.plan import plan_steps  # noqa: E402
from flashgen.simulator import example as simulated  # noqa: E402
from flashgen.simulator.randomlists import block_sizes  # noqa: E402
from flashgen.toolchain import build, obtain  # noqa: E402
from gpu import forward_cases  # noqa: E402
from gpu.cases import DTYPES, Arrays, Case, Mask, check, compare, front_door, make, new_seed, problem_of  # noqa: E402
from gpu.copies import computed  # noqa: E402
from simulator.covering import covering, is_plain, shapes  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch does not see a GPU"),
]

SHIPPED = [
    variant
    for spec in load_specs()
    if spec.operator == "attention" and not spec.has_lengths and not spec.on_request
    for variant in spec.variants()
    if variant.is_main and (variant.mask_type != "blocks" or block_sizes(variant))
]
PLAIN = [variant for variant in SHIPPED if is_plain(variant)]
# Of split-KV, a third of all kernels, and of kernels with sinks, dropout and the like, a set that has all
# pairs of values of its axes.
VARIANTS = [variant for variant in PLAIN if not variant.grid.shares]
VARIANTS += covering(variant for variant in PLAIN if variant.grid.shares)
FEATURED = covering(variant for variant in SHIPPED if not is_plain(variant))


def named(cases):
    return pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in cases])


@pytest.fixture(scope="module", autouse=True)
def compiled(request, tmp_path_factory):
    """Compile the variants that the chosen tests name, all processors at work, into a cache of this run.

    One that does not compile fails its own test, which tries again.
    """
    gpu = device(0)
    items = request.session.items
    given = {item.callspec.params.get("variant") for item in items if hasattr(item, "callspec")}
    chosen = [variant for variant in (*VARIANTS, *FEATURED) if variant in given and runs_on(variant, gpu)]
    wanted = [step for variant in chosen for step in variant.steps]
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the cache lets its processes build each kernel once
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(folder / "kernels"))
        build.build([(variant, obtain.arch_for(variant, gpu)) for variant in wanted])
        yield


def forced(variant):
    """``attend`` for ``check``: this variant, whatever dispatch would take."""
    gpu = device(0)

    def attend(arrays):
        problem = problem_of(arrays)
        assert problem.mask_type == variant.mask_type
        launcher = bind(plan_steps(problem, variant, gpu), gpu)
        q, k, v, mask, out = arrays.q, arrays.k, arrays.v, arrays.mask, arrays.out
        return Plan(problem, launcher, problem.operator.in_order(q=q, k=k, v=v, mask=mask, out=out))(
            q, k, v, mask=mask, out=out, lse=arrays.lse
        )

    return attend


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variant(variant):
    gpu = device(0)
    if not runs_on(variant, gpu):
        pytest.skip(
            f"needs {variant.min_arch} and {variant.smem_bytes} bytes of shared memory; this is {gpu}"
        )
    attend = forced(variant)
    for case in forward_cases.of_variant(variant, forward_cases.smaller_head_dims(variant, VARIANTS)):
        check(case, attend, "cuda")


@pytest.mark.parametrize("variant", FEATURED, ids=lambda variant: variant.name)
def test_variant_with_sinks_dropout_or_lists(variant):
    gpu = device(0)
    if not runs_on(variant, gpu):
        pytest.skip(
            f"needs {variant.min_arch} and {variant.smem_bytes} bytes of shared memory; this is {gpu}"
        )
    for shape in shapes(variant):
        seed = new_seed()
        example = simulated.make(variant, shape, seed)
        verdict = dataclasses.replace(example, **computed(example, variant, ("out", "lse"))).judge()
        assert verdict.ok, f"{shape}, seed {seed}: {verdict}"


@named(forward_cases.every_seqlen())
def test_every_sequence_length(case):
    check(case, front_door, "cuda")


@named(forward_cases.every_head_dim())
def test_every_head_dim(case):
    check(case, front_door, "cuda")


@named(forward_cases.head_dims_of_v())
def test_head_dim_of_v(case):
    check(case, front_door, "cuda")


@named(forward_cases.head_groups())
def test_query_heads_share_kv_heads(case):
    check(case, front_door, "cuda")


@named(forward_cases.layouts())
def test_layout(case):
    check(case, front_door, "cuda")


@named(forward_cases.dense_masks())
def test_dense_mask(case):
    check(case, front_door, "cuda")


@named(forward_cases.masks_and_ranges())
def test_dense_mask_together_with_a_range(case):
    check(case, front_door, "cuda")


@named(forward_cases.hidden_blocks())
def test_dense_mask_that_hides_whole_blocks(case):
    check(case, front_door, "cuda")


@named(forward_cases.windows())
def test_window(case):
    check(case, front_door, "cuda")


@named(forward_cases.values())
def test_unusual_values(case):
    check(case, front_door, "cuda")


@named(forward_cases.many_tiles())
def test_grid_past_65535_blocks(case):
    def attend(arrays):
        problem = problem_of(arrays)
        plan = flashgen.plan(arrays.q, arrays.k, arrays.v, mask=arrays.mask, out=arrays.out, **arrays.options)
        assert tiles(problem, plan.variant) > 65535
        return front_door(arrays)

    check(case, attend, "cuda")


@pytest.mark.parametrize("run", range(150))
def test_random_problem(run):
    seed = new_seed()
    check(forward_cases.at_random(seed), front_door, "cuda", seed)


@pytest.mark.parametrize("masking", ["none", "bottom_right", "window", "dense", "dense_causal"])
@pytest.mark.parametrize("dtype", forward_cases.STEPS)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_bits_repeat_when_the_gpu_is_full(head_dim, dtype, masking):
    """Many waves of blocks, one launch right after another: a race would show as other bits."""
    case = Case(4, 1100, 1900, 16, 16, head_dim, dtype, **forward_cases.MASKINGS[masking])
    arrays = make(case, "cuda", new_seed())
    results = [front_door(arrays) if n == 0 else call_without_out(arrays) for n in range(8)]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def call_without_out(arrays):
    return flashgen.attention(
        arrays.q, arrays.k, arrays.v, mask=arrays.mask, return_lse=True, **arrays.options
    )


@pytest.fixture
def roomy():
    """Skips where two arrays of more than 2**31 elements would not fit."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < 16 << 30:
        pytest.skip(f"needs 16 GiB of free GPU memory; there are {free >> 30}")


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("far", ["batch", "rows", "heads"])
def test_offsets_past_2_to_the_31_elements(far, kv_heads, roomy):
    case = Case(2, 1040, 1040, 3, kv_heads, 64, "fp16", causal=True)
    strides, slot = {
        "batch": ((2**31 + 64, 192, 64, 1), 2**20),
        "rows": ((192, 2**21 + 64, 64, 1), 2**12),
        "heads": ((2**17, 64, 2**30 + 64, 1), 2**20),
    }[far]
    usual = make(case, "cuda", new_seed())
    # q, k and v lie between each other's rows; the rest is NaN, so that an offset that wraps around shows.
    inputs, output = (
        torch.full((2**31 + 2**26,), -1, dtype=torch.int16, device="cuda").view(torch.float16)
        for _ in range(2)
    )
    views = {}
    for place, name in enumerate(("q", "k", "v")):
        like = getattr(usual, name)
        views[name] = inputs.as_strided(like.shape, strides, place * slot).copy_(like)
    views["out"] = output.as_strided(usual.out.shape, strides)
    arrays = Arrays(**views, mask=None, lse=usual.lse, options=usual.options, buffers={})
    out, lse = front_door(arrays)
    compare(case, arrays, out, lse, f"{case}, far {far}")
    written = sum(int((part != -1).sum()) for part in output.view(torch.int16).split(1 << 28))
    assert written == out.numel(), "wrote beside out"


@pytest.mark.parametrize("far", ["batch", "rows", "heads"])
def test_mask_offsets_past_2_to_the_31_bytes(far, roomy):
    case = Case(2, 260, 300, 2, 2, 64, "fp16", mask=Mask())
    strides = {
        "batch": (2**31 + 32, 2**20, 304, 1),
        "rows": (2**11, 2**10, 2**23 + 16, 1),
        "heads": (2**20, 2**31 + 32, 304, 1),
    }[far]
    usual = make(case, "cuda", new_seed())
    buffer = torch.ones(
        2**31 + 2**26, dtype=torch.uint8, device="cuda"
    )  # hidden, wherever it is not the mask
    usual.mask = buffer.as_strided(usual.mask.shape, strides).copy_(usual.mask)
    out, lse = front_door(usual)
    compare(case, usual, out, lse, f"{case}, far {far}")


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("dtype", forward_cases.STEPS)
def test_one_packed_tensor_of_q_k_and_v(dtype, kv_heads):
    case = Case(2, 333, 333, 6, kv_heads, 64, dtype, causal=True)
    arrays = make(case, "cuda", new_seed())
    packed = torch.cat([arrays.q, arrays.k, arrays.v], dim=2)
    arrays.q, arrays.k, arrays.v = packed.split([6, kv_heads, kv_heads], dim=2)
    out, lse = front_door(arrays)
    compare(case, arrays, out, lse, str(case))


@pytest.mark.parametrize("masking", forward_cases.MASKINGS)
def test_three_dimensions_give_the_bits_of_four(masking):
    options = dict(forward_cases.MASKINGS[masking])
    if "mask" in options:
        options["mask"] = Mask("hqk")
    arrays = make(Case(1, 150, 210, 4, 2, 80, "bf16", **options), "cuda", new_seed())
    out, lse = call_without_out(arrays)
    arrays.q, arrays.k, arrays.v = arrays.q[0], arrays.k[0], arrays.v[0]
    flat_out, flat_lse = call_without_out(arrays)
    assert torch.equal(flat_out, out[0])
    assert torch.equal(flat_lse, lse[0])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_negative_strides_give_the_same_bits(axis):
    cupy = pytest.importorskip("cupy")
    # fp32, which one family serves whatever the strides: another family adds up in another order.
    case = Case(3, 150, 210, 4, 4, 64, "fp32", causal=True, layout="contiguous")
    arrays = make(case, "cuda", new_seed())
    torch.cuda.synchronize()
    q, k, v = (cupy.flip(cupy.asarray(x), axis) for x in (arrays.q, arrays.k, arrays.v))
    assert min(q.strides) < 0
    out = cupy.flip(cupy.full(q.shape, cupy.nan, q.dtype), axis)
    flashgen.attention(q, k, v, out=out, causal=True)
    straight = flashgen.attention(*map(cupy.ascontiguousarray, (q, k, v)), causal=True)
    assert bool((out == straight).all())


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("masking", forward_cases.MASKINGS)
@pytest.mark.parametrize("dtype", forward_cases.STEPS)
def test_a_nan_stays_in_its_row(dtype, masking, kv_heads):
    case = Case(1, 200, 200, 4, kv_heads, 64, dtype, **forward_cases.MASKINGS[masking])
    arrays = make(case, "cuda", new_seed())
    if arrays.mask is not None:
        arrays.mask[:, :, 77, 5] = 0  # a row that sees no key is 0 even so
    clean, clean_lse = call_without_out(arrays)
    number = arrays.q[0, 77, 2, 13].clone()
    arrays.q[0, 77, 2, 13] = torch.nan
    out, lse = call_without_out(arrays)
    assert bool(torch.isnan(out[0, 77, 2]).all())
    assert bool(torch.isnan(lse[0, 2, 77]))
    # The other rows are right, but not to the bit: rows of a tile are rescaled at the same moments.
    arrays.q[0, 77, 2, 13] = number
    out[0, 77, 2], lse[0, 2, 77] = clean[0, 77, 2], clean_lse[0, 2, 77]
    compare(case, arrays, out, lse, str(case))


@pytest.mark.parametrize("masking", forward_cases.MASKINGS)
def test_no_batch_and_no_queries_launch_nothing(masking):
    for batch, seqlen_q in ((0, 5), (2, 0), (0, 0)):
        case = Case(batch, seqlen_q, 7, 4, 2, 64, "fp16", **forward_cases.MASKINGS[masking])
        out, lse = front_door(make(case, "cuda", new_seed()))
        assert (out.shape, lse.shape) == ((batch, seqlen_q, 4, 64), (batch, 4, seqlen_q))


def test_a_plan_without_lse_gives_the_bits_of_one_with_it():
    for dtype in DTYPES:
        arrays = make(Case(2, 300, 400, 4, 2, 128, dtype, causal=True), "cuda", new_seed())
        plan = flashgen.plan(arrays.q, arrays.k, arrays.v, causal=True)
        assert torch.equal(plan(arrays.q, arrays.k, arrays.v), call_without_out(arrays)[0])
