"""Where the arrays of a call of attention_backward may lie."""

import pytest

from flashgen.errors import DeviceTypeNotSupported
from flashgen.operators.arguments import view_of_shape
from flashgen.operators.backward import normalise

ROWS, LSE = (9, 4, 16), (4, 9)
SHAPES = dict.fromkeys(("dout", "q", "k", "v", "out", "dq", "dk", "dv"), ROWS) | {"lse": LSE, "dlse": LSE}


@pytest.mark.parametrize("other", [None, 1])
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "q"])
@pytest.mark.parametrize("packed", [False, True])
def test_all_arrays_are_on_one_device(packed, name, other):
    views = {x: view_of_shape(shape, "fp32" if "lse" in x else "bf16", 0) for x, shape in SHAPES.items()}
    if packed:
        cu = view_of_shape((3,), "int32", 0)
        views |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    normalise(**views)
    views[name] = view_of_shape(SHAPES[name], views[name].dtype, other)
    with pytest.raises(DeviceTypeNotSupported, match=f"^{name} is .* but q is on GPU 0"):
        normalise(**views)
