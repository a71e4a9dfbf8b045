"""Lengths, pages, indices and boundaries with values out of range, in the simulator: no serving kernel
touches memory outside of its arrays, nor rows that no sequence has.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from flashgen.families.load import load_specs
from flashgen.families.params import TENSOR_MAP
from flashgen.families.scores import load_scores
from flashgen.operators.numbers import bfloat16_bits
from flashgen.simulator import hardware
from flashgen.simulator.example import Shape, make, run_steps
from flashgen.simulator.library import load
from flashgen.source.render import render
from simulator import test_decode_clusters as clusters
from simulator import test_varlen_split as split
from simulator.test_splits_simulated import FIXED, FIXED_PAGED, MAIN_OF
from simulator.test_varlen_simulated import (
    CAUSAL_PAGED,
    DECODE,
    DECODE_PAGED,
    HOPPER_PAGED,
    HOPPER_SINGLE,
    PLAIN,
)

PREFILL = Shape(70, 150, heads=1, batch=8)
FEW_QUERIES = Shape(6, 900, heads=1, batch=8)
CHUNKS = dataclasses.replace(split.CHUNKS, batch=6)
CASES = (
    (PLAIN, PREFILL),
    (CAUSAL_PAGED, PREFILL),
    (HOPPER_SINGLE, PREFILL),
    (HOPPER_PAGED, PREFILL),
    (DECODE, FEW_QUERIES),
    (DECODE_PAGED, FEW_QUERIES),
    (FIXED, FEW_QUERIES),
    (FIXED_PAGED, FEW_QUERIES),
    (clusters.ROWS, FEW_QUERIES),
    (clusters.PAGED, FEW_QUERIES),
    (split.FULL, CHUNKS),
    (split.WINDOW_PAGED, CHUNKS),
)
DECODING = (DECODE, DECODE_PAGED, FIXED, FIXED_PAGED, clusters.ROWS, clusters.PAGED)
LEAST, MOST = -(2**31), 2**31 - 1


def example_with(variant, shape, seed, *arrays):
    """The example of the first seed from ``seed`` on whose queries are packed and that has the arrays."""
    shape = split.shape_of(variant, shape)
    for each in range(seed, seed + 200):
        example = make(variant, shape, each)
        if all(example.lengths[name] is not None for name in ("cu_seqlens_q", *arrays)):
            return example
    raise AssertionError("no seed has such arrays")


def plant(rng, array, *values):
    """Each of the values, in place of a random element, and of another one for each ten that there are."""
    count = max(len(values), array.size // 10 * len(values))
    places = rng.permutation(array.size)[:count]
    array.flat[places] = np.resize(rng.permutation(values), len(places))


def simulate(variant, example, seed):
    """The call on a GPU whose thread blocks take several tiles each."""
    libraries = [load(render(step), step.name) for step in variant.steps]
    device = dataclasses.replace(hardware.pretend_for(variant), num_sms=7)
    run_steps(libraries, variant, example, seed=seed, device=device)


def cut(variant, example):
    """The example with values in range, of which the call has the result."""
    problem, lengths = example.problem, dict(example.lengths)
    lengths["kv_lengths"] = lengths["kv_lengths"].clip(0, problem.seqlen_kv)
    if not problem.lengths.paged:
        lengths["index"] = lengths["index"].clip(0, problem.lengths.batch_kv - 1)
        return dataclasses.replace(example, lengths=lengths)
    k, v = example.k, example.v
    if any(param.ctype == TENSOR_MAP for param in variant.params):  # zeros follow the last page
        k, v = (np.concatenate([x, np.zeros_like(x[:1])]) for x in (k, v))
        lengths_of = dataclasses.replace(problem.lengths, batch_kv=len(k))
        problem = dataclasses.replace(problem, lengths=lengths_of)
    lengths["pages"] = lengths["pages"].clip(0, len(k) - 1)
    return dataclasses.replace(example, problem=problem, k=k, v=v, lengths=lengths)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_lengths_pages_and_indices_are_cut_to_their_range(name, shape, compiler, fresh_seed):
    """The result is that of the values in range, where the bound is the capacity and where it is below."""
    variant, rng = MAIN_OF[name], np.random.default_rng(fresh_seed)
    places = "pages" if variant.axis("pages") == "paged" else "index"
    example = example_with(variant, shape, fresh_seed, "kv_lengths", places)
    for x in (example.k, example.v):  # lengths that are cut reach slots that were NaN
        numbers = rng.standard_normal(x.shape, np.float32)
        x[...] = bfloat16_bits(numbers) if variant.dtype == "bf16" else numbers
    problem = example.problem
    plant(rng, example.lengths[places], -5, -1, problem.lengths.batch_kv, MOST, LEAST)
    capacity = problem.lengths.capacity(problem.batch)
    for bound in (capacity, capacity // 2):
        plant(rng, example.lengths["kv_lengths"], -1, bound + 1, capacity + 1, MOST, LEAST)
        cut_at = dataclasses.replace(problem.lengths, most_keys=bound)
        bounded = dataclasses.replace(problem, seqlen_kv=bound, lengths=cut_at)
        called = dataclasses.replace(example, problem=bounded)
        simulate(variant, called, fresh_seed)
        assert cut(variant, called).judge().ok


@pytest.mark.parametrize("name", DECODING)
def test_no_element_of_a_sequence_without_keys_is_read(name, compiler, fresh_seed):
    """Of an array with an element for each key: such a sequence has none ahead of those of the next one."""
    variant = MAIN_OF[name].modified(load_scores(keywords=()).by_name["bias"])
    example = example_with(variant, FEW_QUERIES, fresh_seed, "kv_lengths")
    example.lengths["kv_lengths"][0] = 0
    simulate(variant, example, fresh_seed)
    assert example.judge().ok


@pytest.mark.parametrize("name", ["flash_decode_hdim64_bf16_sm80", "flash_decode_hdim64_bf16_c4_sm90"])
def test_nothing_of_an_empty_array_is_read(name, compiler, fresh_seed):
    variant = next(v for spec in load_specs() for v in spec.variants() if v.name == name)
    variant = variant.modified(load_scores(keywords=()).by_name["bias"])
    example = make(variant, Shape(3, 0, splits=2 if name.endswith("sm80") else 1), fresh_seed)
    simulate(variant, example, fresh_seed)
    assert example.judge().ok


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_rows_that_no_sequence_has_are_not_touched(name, shape, compiler, fresh_seed):
    """Boundaries fall and pass the tokens, and sequences are longer than ``max_seqlen_q``."""
    variant, rng = MAIN_OF[name], np.random.default_rng(fresh_seed)
    packed_keys = () if variant.axis("pages") == "paged" else ("cu_seqlens_kv",)
    example = example_with(variant, shape, fresh_seed, *packed_keys)
    bound = shape.seqlen_q // 2
    example = dataclasses.replace(example, problem=dataclasses.replace(example.problem, seqlen_q=bound))
    rows = example.problem.lengths.rows_q
    for planted in (False, True):
        if planted:
            plant(rng, example.lengths["cu_seqlens_q"], rng.integers(rows), rows + 1, MOST, LEAST)
        if planted and packed_keys:
            keys = len(example.k)
            plant(rng, example.lengths["cu_seqlens_kv"], rng.integers(keys), keys + 1, MOST, LEAST)
        example.out.view(np.uint16)[...] = 0xFFFF
        example.lse[...] = np.nan
        simulate(variant, example, fresh_seed)
        ends = example.lengths["cu_seqlens_q"].clip(0, rows)
        untouched = np.ones(rows, bool)
        for begin, end in itertools.pairwise(ends):
            untouched[begin : min(end, begin + bound)] = False
        assert (example.out.view(np.uint16)[untouched] == 0xFFFF).all()
        assert np.isnan(example.lse[:, untouched]).all()
        assert planted or untouched.any()
