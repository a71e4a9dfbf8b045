"""What ``splits`` may be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashgen
from flashgen.errors import BadParam
from flashgen.operators.splits import SplitEvery, splits_of


@given(st.integers(1, 2**40))
def test_numbers_and_split_every_are_values(count):
    assert splits_of(np.int64(count)) == count
    assert splits_of(SplitEvery(count)) == SplitEvery(np.int64(count))
    assert len({SplitEvery(count), SplitEvery(np.int64(count)), SplitEvery(count + 1)}) == 2
    assert type(splits_of(np.int64(count))) is type(SplitEvery(np.int64(count)).keys) is int


@pytest.mark.parametrize("wrong", [0, -3, 2.0, True, None, "4", "Auto", np.ones(1, np.int32)])
def test_anything_else_is_refused(wrong):
    with pytest.raises(BadParam, match=r"^splits is .*expected an integer of 1 or more, 'auto', or"):
        splits_of(wrong)
    with pytest.raises(BadParam, match=r"^keys of SplitEvery is .*expected an integer of 1 or more$"):
        flashgen.SplitEvery(wrong)


def test_the_contract_refuses_it_on_every_road():
    q = np.zeros((2, 1, 4, 32), np.float16)
    k = np.zeros((2, 9, 4, 32), np.float16)
    lengths = np.array([9, 3], np.int32)
    for options in ({}, {"kv_lengths": lengths}):
        with pytest.raises(BadParam, match="splits is 0"):
            flashgen.attention(q, k, k, splits=0, **options)


@pytest.mark.parametrize("splits", [1, 4, SplitEvery(256)])
def test_packed_queries_need_the_bound_by_which_their_kernel_is_chosen(splits):
    q = np.zeros((3, 4, 32), np.float16)
    cache = flashgen.KVCache(*np.zeros((2, 2, 9, 4, 32), np.float16), np.array([9, 3], np.int32))
    cu_seqlens = np.array([0, 1, 3], np.int32)
    flashgen.attention(q, cache, cu_seqlens_q=cu_seqlens)
    flashgen.attention(q, cache, cu_seqlens_q=cu_seqlens, max_seqlen_q=2, splits=splits)
    with pytest.raises(BadParam, match="pass max_seqlen_q"):
        flashgen.attention(q, cache, cu_seqlens_q=cu_seqlens, splits=splits)
