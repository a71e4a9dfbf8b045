import numpy as np

from flashgen.runtime import arrays


def test_a_layout_is_a_key_without_the_pointer():
    a, b = np.zeros((2, 4, 8)), np.zeros((2, 4, 8))
    kind = arrays.kind_of(a)
    assert (
        len({kind.layout(a), kind.layout(b), kind.layout(a[:, ::2]), kind.layout(a.astype(np.float32))}) == 3
    )


def test_empty_is_contiguous_and_of_the_same_kind():
    x = np.zeros((3, 4, 8), np.float16)[:, ::2]
    kind = arrays.kind_of(x)
    out, lse = kind.empty((3, 2, 8), x, None), kind.empty((3, 2), x, None, "fp32")
    assert (out.dtype, lse.dtype, out.flags.c_contiguous) == (np.float16, np.float32, True)
