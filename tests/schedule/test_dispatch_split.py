"""Which calls with lengths on the device take the kernels that split the keys of many queries."""

import dataclasses
import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fake_gpu import H200
from flashgen.families.load import load_specs
from flashgen.operators.arguments import Expected, view_of_shape
from flashgen.operators.attention import normalise
from flashgen.operators.splits import SplitEvery
from flashgen.schedule.cost import cost
from flashgen.schedule.dispatch import offers, select
from flashgen.schedule.plan import plan_steps
from flashgen.tools.bench.grids import GRIDS

SPECS = load_specs()
SPLIT = "flash_varlen_split"


def chunks(
    batch, queries, keys, *, heads=(32, 8), head_dim=128, tokens=None, page_size=None, bound=None, **options
):
    """Packed sequences of at most so many queries, and as many keys or pages for them."""

    def integers(*shape):
        return view_of_shape(shape, "int32", 0)

    q = view_of_shape((tokens or batch * queries, heads[0], head_dim), "bf16", 0)
    if page_size is None:
        kv = view_of_shape((tokens or batch * keys, heads[1], head_dim), "bf16", 0)
        lengths = {"cu_seqlens_kv": integers(batch + 1)}
        bound = keys if bound is None else bound
    else:
        pages = -(-keys // page_size)
        kv = view_of_shape((batch * pages, page_size, heads[1], head_dim), "bf16", 0)
        lengths = {"kv_lengths": integers(batch), "pages": integers(batch, pages)}
    lengths["max_seqlen_kv"] = bound
    return normalise(q, kv, kv, cu_seqlens_q=integers(batch + 1), max_seqlen_q=queries, **lengths, **options)


def chosen(problem, device=H200):
    return select(problem, device, offers(problem, device, SPECS))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("queries", [1, 4, 32, 128, 700])
def test_an_expected_bound_makes_the_grid_of_a_bound(queries, page_size):
    """Of caches with room for far more keys than sequences have."""
    for batch, keys in itertools.product((1, 8, 64), (200, 2000, 8192)):
        given = {"tokens": batch * (queries + 8192), "page_size": page_size}
        plans = [
            plan_steps(problem, chosen(problem), H200)
            for kind in (int, Expected)
            for problem in [chunks(batch, queries, 8192, bound=kind(keys), **given)]
        ]
        assert [step.variant for step in plans[0].steps] == [step.variant for step in plans[1].steps]
        assert [step.launch for step in plans[0].steps] == [step.launch for step in plans[1].steps]
        assert plans[0].workspace.nbytes == plans[1].workspace.nbytes


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("batch", "queries", "gqa"),
    [(1, 32, "packed"), (1, 128, "gqa"), (1, 256, "gqa"), (2, 128, "gqa"), (3, 96, "packed")],
)
def test_a_few_hundred_queries_on_many_keys_are_split(batch, queries, gqa, causal, page_size):
    problem = chunks(batch, queries, 32_768, causal=causal, page_size=page_size)
    variant = chosen(problem)
    assert (variant.family, variant.gqa) == (SPLIT, gqa)
    plan = plan_steps(problem, variant, H200)
    blocks = plan.steps[0].launch.blocks
    assert 0.95 * H200.num_sms < blocks <= H200.num_sms
    # Two parts of a tile for each thread block: O, row_max and row_sum.
    block_m = variant.tile_value("block_m")
    assert plan.workspace.nbytes == 2 * blocks * block_m * (128 + 2) * 4


@pytest.mark.parametrize("case", [case for case in GRIDS["varlen"].cases if case.seqlen_kv < 32_768])
def test_prompts_are_not(case):
    heads = (case.num_heads_q, case.num_heads_kv)
    problem = chunks(case.batch, case.seqlen_q, case.seqlen_kv, heads=heads, tokens=32_768, causal=True)
    assert chosen(problem).family == "flash_fwd_varlen"


@settings(max_examples=60)
@given(
    st.sampled_from([1, 2, 7, 64]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 150_000),
    st.sampled_from([64, 80, 128, 192, 256]),
    st.booleans(),
)
def test_decoding_is_not(batch, queries, keys, head_dim, causal):
    """Up to 64 rows of a kv head."""
    problem = chunks(batch, queries, keys, head_dim=head_dim, page_size=16, causal=causal)
    assert chosen(problem).family != SPLIT


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 512, 32_768), (2, 512, 32_768), (4, 256, 8192)])
def test_tiles_that_fill_their_last_wave_are_whole(batch, queries, keys, varlen):
    """Tiles of 128 rows do; of 192 rows there are fewer, of which some multiprocessors have two."""
    if varlen:
        problem = chunks(batch, queries, keys, causal=True)
    else:
        q, kv = (view_of_shape((batch, n, heads, 128), "bf16", 0) for n, heads in ((queries, 32), (keys, 8)))
        problem = normalise(q, kv, kv, causal=True)
    variant = chosen(problem)
    assert (variant.target, variant.grid.schedule.startswith("persistent")) == ("sm90", True)
    assert variant.tile_value("block_m") == 128


@pytest.mark.parametrize("splits", [1, SplitEvery(1024)])
def test_splits_that_the_call_fixes_are_not_equal_shares(splits):
    assert chosen(chunks(1, 128, 32_768)).family == SPLIT
    assert chosen(chunks(1, 128, 32_768, splits=splits)).family == "flash_fwd_varlen"


def test_pages_that_no_box_fits_and_other_gpus():
    assert chosen(chunks(1, 128, 32_768, page_size=8)).spec == "flash_fwd_varlen_sm80"
    blackwell = replace(H200, arch="sm_100", compute_capability=(10, 0))
    assert chosen(chunks(1, 128, 32_768), blackwell).spec == "flash_fwd_varlen_sm80"


def plain_and_with_lengths(batch, queries, keys, heads, head_dim, causal):
    """A call, and the same one whose sequences have their lengths on the device."""
    q = view_of_shape((batch, queries, heads[0], head_dim), "bf16", 0)
    kv = view_of_shape((batch, keys, heads[1], head_dim), "bf16", 0)
    lengths = view_of_shape((batch,), "int32", 0)
    return normalise(q, kv, kv, causal=causal), normalise(q, kv, kv, kv_lengths=lengths, causal=causal)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 1500),
    st.sampled_from([77, 1024, 4096, 16_384, 32_768, 131_072]),
    st.sampled_from([(32, 8), (16, 16), (16, 2), (8, 1)]),
    st.sampled_from([64, 80, 96, 128, 192, 256]),
    st.booleans(),
)
@example(1, 1, 4096, (8, 1), 64, False)
def test_no_plain_call_is_slower_than_the_same_call_with_lengths(
    batch, queries, keys, heads, head_dim, causal
):
    """By the model. Kernels of the same tile and grid may have efficiencies that were measured apart."""
    problems = plain_and_with_lengths(batch, queries, keys, heads, head_dim, causal)
    plain, with_lengths = variants = [chosen(problem) for problem in problems]
    times = [cost(problem, H200, variant) for problem, variant in zip(problems, variants, strict=True)]
    alike = (plain.tile, plain.grid) == (with_lengths.tile, with_lengths.grid)
    assert alike or times[0] <= 1.005 * times[1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "queries"), [(1, 128), (1, 256), (2, 128)])
def test_a_few_hundred_queries_without_lengths_are_split_as_well(batch, queries, causal):
    plain, varlen = plain_and_with_lengths(batch, queries, 16_384, (32, 8), 128, causal)
    assert chosen(varlen).family == SPLIT
    variant = chosen(plain)
    assert variant.family == "flash_split"
    assert variant.tile == chosen(varlen).tile
    plan = plan_steps(plain, variant, H200)
    assert 0.95 * H200.num_sms < plan.steps[0].launch.blocks <= H200.num_sms


@pytest.mark.parametrize("splits", [1, SplitEvery(1024)])
def test_splits_that_a_plain_call_fixes_are_not_equal_shares(splits):
    plain, _ = plain_and_with_lengths(1, 128, 32_768, (32, 8), 128, causal=False)
    assert chosen(plain).family == "flash_split"
    assert chosen(dataclasses.replace(plain, splits=splits)).family == "flash_fwd"
