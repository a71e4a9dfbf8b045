import ml_dtypes
import pytest

from flashgen.runtime.hostarrays import host_array


def test_host_array_shares_memory_and_bits():
    torch = pytest.importorskip("torch")
    x = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    bits = host_array(x)
    assert bits.view(ml_dtypes.bfloat16).tolist() == [1.5, -2.0]
    bits[0] = 0
    assert x[0] == 0
