"""On which problems tiles compete."""

import numpy as np
import pytest

from fake_gpu import H200
from flashgen.errors import BadParam
from flashgen.families.load import load_specs
from flashgen.operators.attention import normalise
from flashgen.runtime.arrays import view
from flashgen.schedule.dispatch import candidates
from flashgen.tools.tune.shapes import Unsuited, cases, suited

ORDINARY = [
    v
    for spec in load_specs()
    if spec.operator == "attention" and not spec.has_lengths
    for v in spec.variants()
    if v.is_main
    and not v.tile_name
    and v.target != "sm86"
    and v.axis("sinks") == v.axis("dropout") == "none"
    and v.mask_type != "blocks"
]


def variant(**axes):
    return next(
        v
        for v in ORDINARY
        if v.family == "flash_fwd" and all(v.axis(axis) == value for axis, value in axes.items())
    )


@pytest.mark.drawn
@pytest.mark.parametrize("each", ORDINARY, ids=str)
def test_every_default_problem_is_one_that_the_kernel_serves(each):
    for case in cases(each):
        if each.dtype == "bf16":
            continue  # NumPy has none; fp16 goes the same way
        dtype = {"fp16": np.float16, "fp32": np.float32}[each.dtype]
        shape_q = (case.batch, case.seqlen_q, case.num_heads_q, case.head_dim)
        shape_kv = (case.batch, case.seqlen_kv, case.num_heads_kv, case.head_dim)
        # Never touched, so there is no memory behind them.
        shape_v = (*shape_kv[:3], case.head_dim_v or case.head_dim)
        q, k = view(np.empty(shape_q, dtype), "q"), view(np.empty(shape_kv, dtype), "k")
        v = view(np.empty(shape_v, dtype), "v")
        mask = view(np.empty((case.seqlen_q, case.seqlen_kv), bool), "mask") if case.is_dense else None
        window = (case.window, 0) if case.mask == "window" else (-1, -1)
        problem = normalise(q, k, v, mask=mask, causal=case.mask == "causal", window_size=window)
        assert each in candidates(problem, H200, [each])


def test_lengths_fill_16384_tokens_and_2048_columns():
    found = cases(variant(head_dim=64, gqa="mha"), ["1k", "1000", "4k"])
    assert [(c.batch, c.seqlen_q, c.seqlen_kv) for c in found] == [
        (16, 1024, 1024),
        (16, 1000, 1000),
        (4, 4096, 4096),
    ]
    assert {(c.num_heads_q, c.num_heads_kv) for c in found} == {(32, 32)}
    (grouped,) = cases(variant(head_dim=256, gqa="packed"), ["4k"])
    assert (grouped.num_heads_q, grouped.num_heads_kv) == (8, 1)


def test_a_shape_may_say_everything():
    (case,) = cases(variant(head_dim=128, gqa="gqa", mask_type="none"), ["32x16x16k@32/4"])
    assert (case.batch, case.seqlen_q, case.seqlen_kv) == (32, 16, 16_384)
    assert (case.num_heads_q, case.num_heads_kv) == (32, 4)
    assert case.clock == "stream"
    (tiny,) = cases(variant(head_dim=64, gqa="mha"), ["1x128x128"])
    assert tiny.clock == "graph"  # shorter than the launch of it


def test_a_shape_that_is_named_twice_is_timed_once():
    assert len(cases(variant(head_dim=64, gqa="mha"), ["1k", "1024", "16x1kx1k"])) == 1


@pytest.mark.parametrize("text", ["", "4kk", "2x4k", "0", "4x0x1k", "1k@8/3", "1k@0", "1k@16/4", "-1"])
def test_what_is_no_shape_of_the_kernel_is_an_error(text):
    with pytest.raises(BadParam, match="shape"):
        cases(variant(head_dim=64, gqa="mha"), [text])


def test_one_query_is_no_causal_problem():
    with pytest.raises(BadParam, match="single query"):
        cases(variant(head_dim=64, gqa="mha", mask_type="causal"), ["8x1x4k"])


def test_more_rows_than_a_family_takes_are_refused_with_an_example():
    few = next(
        v for v in ORDINARY if v.dispatch.rows_at_most == 64 and v.gqa == "packed" and v.mask_type == "causal"
    )
    assert [case.seqlen_q for case in cases(few)] == [4, 4, 4]
    assert cases(few, ["1x8x4k@32/4"])
    with pytest.raises(BadParam, match=r"72 rows .* at most 64, such as 1x4x16k"):
        cases(few, ["1x9x4k@32/4"])


def test_each_kernel_gets_the_shapes_that_its_calls_have():
    of_rows = variant(head_dim=64, gqa="mha", mask_type="causal")
    few = next(
        v
        for v in ORDINARY
        if v.dispatch.rows_at_most == 64 and (v.gqa, v.mask_type, v.head_dim) == ("mha", "causal", 64)
    )
    prefill, decode = suited([of_rows, few], ["4k", "8x4x4k", "8x1x4k"])
    assert ([case.seqlen_q for case in prefill], [case.seqlen_q for case in decode]) == ([4096, 4], [4])
    prefill, reason = suited([of_rows, few], ["4k"])
    assert len(prefill) == 1
    assert isinstance(reason, Unsuited)
    assert few.name in str(reason)
    for shapes, message in ((["4k"], "4096 rows of a head"), (["4k", "4kk"], "'4kk' is not a shape")):
        with pytest.raises(BadParam, match=message):
            suited([few], shapes)
