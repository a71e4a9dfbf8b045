import ctypes
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.errors import CompileError
from flashgen.families.params import CTYPES, TENSOR_MAP, Param
from flashgen.source.params import layout, struct_text
from flashgen.toolchain.compile import compile_cubin

C = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "float": ctypes.c_float,
}
PRELUDE = """#include "flashgen/types.cuh"
using element = fp16;
struct alignas(64) tensor_map { uint64_t opaque[16]; };
"""


def params_of(types):
    return tuple(Param(f"m{i}", ctype) for i, ctype in enumerate(types))


def c_struct(params):
    fields = [(param.name, C.get(param.ctype, ctypes.c_void_p)) for param in params]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields})


# ctypes cannot align a member to more than its type's own alignment, so tensor maps have a test of their own.
PLAIN = [ctype for ctype in CTYPES if ctype != TENSOR_MAP]
structs = st.lists(st.sampled_from(PLAIN), min_size=1, max_size=24).map(params_of)


@given(structs)
def test_layout_is_the_c_layout(params):
    ours, theirs = layout(params), c_struct(params)
    assert ours.offsets == {param.name: getattr(theirs, param.name).offset for param in params}
    assert (ours.size, ours.alignment) == (ctypes.sizeof(theirs), ctypes.alignment(theirs))
    assert ours.struct.size == ours.size


@given(structs, st.data())
def test_packed_bytes_read_back_as_c_and_as_numpy(params, data):
    values = {}
    for param in params:
        kind = param.ctype if param.ctype in C else "pointer"
        ranges = {
            "int64_t": st.integers(-(2**63), 2**63 - 1),
            "int32_t": st.integers(-(2**31), 2**31 - 1),
            "uint32_t": st.integers(0, 2**32 - 1),
            "float": st.floats(width=32, allow_nan=False),
            "pointer": st.integers(1, 2**64 - 1),
        }
        values[param.name] = data.draw(ranges[kind])
    packed = layout(params).pack(values)
    as_c = c_struct(params).from_buffer_copy(packed)
    as_numpy = np.frombuffer(packed, dtype=layout(params).dtype)[0]
    for name, value in values.items():
        assert getattr(as_c, name) == value == as_numpy[name]


def test_a_tensor_map_is_aligned_to_64_bytes():
    table = layout(params_of(["int32_t", TENSOR_MAP, "float", "int64_t"]))
    assert table.offsets == {"m0": 0, "m1": 64, "m2": 192, "m3": 200}
    assert (table.size, table.alignment) == (256, 64)
    encoded = bytes(range(128))
    packed = table.pack({"m0": -1, "m1": encoded, "m2": 0.5, "m3": 7})
    assert packed[64:192] == encoded
    assert np.frombuffer(packed, table.dtype)[0]["m1"].tobytes() == encoded


def test_pack_wants_every_member():
    with pytest.raises(KeyError, match="m1"):
        layout(params_of(["float", "int32_t"])).pack({"m0": 1.0})


def test_text_has_docs_behind_members():
    text = struct_text((Param("q", "const element*", "queries"), Param("n", "int32_t")))
    assert re.search(r"^    const element\* q; +// queries$", text, re.MULTILINE)
    assert re.search(r"^    int32_t n;$", text, re.MULTILINE)
    assert text.startswith("struct Params {")


def test_every_offset_is_asserted_in_a_third_of_the_lines():
    params = params_of([*CTYPES, *CTYPES])
    asserts = [line for line in struct_text(params).splitlines() if line.startswith("static_assert")]
    found = dict(re.findall(r"offsetof\(Params, (\w+)\) == (\d+)", "\n".join(asserts)))
    assert found == {name: str(offset) for name, offset in layout(params).offsets.items()}
    assert len(asserts) <= len(params) // 3 + 1


def test_the_compiler_agrees_with_the_offsets_and_notices_a_change():
    params = params_of(ctype for ctype in (*CTYPES, *CTYPES[::-1]))
    kernel = '\nextern "C" __global__ void kernel(Params params) {}\n'
    text = PRELUDE + struct_text(params) + kernel
    compile_cubin(text, "kernel", "sm_80")
    member = f"m{CTYPES.index('int32_t')};"
    wider = text.replace(f"  int32_t {member}", f"  int64_t {member}")
    assert wider != text
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_cubin(wider, "kernel", "sm_80")
