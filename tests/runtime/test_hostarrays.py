import ml_dtypes
import numpy as np
import pytest

from flashgen.runtime.hostarrays import host_array


def test_host_array_shares_memory_and_bits():
    torch = pytest.importorskip("torch")
    x = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    bits = host_array(x)
    assert bits.view(ml_dtypes.bfloat16).tolist() == [1.5, -2.0]
    bits[0] = 0
    assert x[0] == 0


def test_a_subclass_multiplies_and_indexes_as_any_array():
    x = np.matrix([[1.0, 2.0]], np.float32)
    seen = host_array(x)
    assert (seen * seen).tolist() == [[1.0, 4.0]]
    assert seen[0].shape == (2,)
    assert np.shares_memory(seen, x)
