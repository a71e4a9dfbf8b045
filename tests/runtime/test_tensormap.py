import ctypes
import itertools
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_gpu import Binding
from flashgen.errors import InternalError, NoBindingError, SpecError
from flashgen.families.params import Box, Param
from flashgen.runtime import tensormap
from flashgen.runtime.tensormap import encode, move
from flashgen.schedule.tensormap import TensorMap, describe, expressible
from problems import problem, replace
from variants import variant

PROBLEM = problem(
    batch=2,
    seqlen_q=100,
    seqlen_kv=300,
    num_heads_q=6,
    num_heads_kv=2,
    head_dim=40,
    softmax_scale=0.125,
    q_strides=(24000, 240, 40),
    k_strides=(24000, 80, 40),
    v_strides=(24000, 40, 12000),
    out_strides=(24000, 240, 40),
)
Q, K, V, OUT = (Param(name, "tensor_map", box=Box(64, 96)) for name in ("q", "k", "v", "out"))
GQA, PACKED = variant(gqa="gqa", params=(Q, K, V)), variant(gqa="packed", params=(Q, K, V, OUT))


def addresses(described, box_of):
    """Offset in bytes of each row of the box at the given coordinates of its first, in the box's order."""
    steps = (0, *described.strides)
    inner = itertools.product(*(range(extent) for extent in reversed(described.box[1:])))
    for place in inner:
        at = [0, *(first + step for first, step in zip(box_of, reversed(place), strict=True))]
        inside = all(c < extent for c, extent in zip(at, described.extents, strict=True))
        yield sum(c * step for c, step in zip(at, steps, strict=True)) if inside else None


def test_a_map_of_rows_of_one_head():
    assert describe(PROBLEM, GQA, K) == TensorMap(
        "fp16", (40, 300, 2, 2), (160, 80, 48000), (64, 96, 1, 1), swizzle=128
    )
    assert describe(PROBLEM, GQA, replace(V, box=Box(16, 1))) == TensorMap(
        "fp16", (40, 300, 2, 2), (80, 24000, 48000), (16, 1, 1, 1), swizzle=32
    )


@given(
    st.sampled_from([1, 2, 4, 6]),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 3),
    st.permutations(["batch", "row", "head"]),
    st.sampled_from(["q", "out"]),
    st.booleans(),
    st.data(),
)
def test_a_box_holds_the_rows_of_a_tile_in_their_order(
    group, kv_heads, seqlen, batch, order, name, packed, data
):
    heads = kv_heads * group
    extents = {"batch": batch, "row": seqlen, "head": heads}
    strides, span = {}, 64
    for axis in order:  # from the fastest to the slowest
        strides[axis], span = span if extents[axis] > 1 else 0, span * extents[axis] + 16
        span += -span % 8
    call = replace(
        PROBLEM,
        batch=batch,
        seqlen_q=seqlen,
        num_heads_q=heads,
        num_heads_kv=kv_heads,
        head_dim=64,
        head_dim_v=64,
        **{f"{name}_strides": (strides["batch"], strides["row"], strides["head"])},
    )
    packed = packed and group > 1
    rows = 24
    param = Param(name, "tensor_map", box=Box(64, rows))
    described = describe(call, variant(gqa="packed" if packed else "gqa"), param)
    assert described.extents[0] == 64
    tile_heads, tile_rows = (kv_heads, seqlen * group) if packed else (heads, seqlen)
    first = data.draw(st.integers(0, (tile_rows - 1) // rows)) * rows
    head, at_batch = data.draw(st.integers(0, tile_heads - 1)), data.draw(st.integers(0, batch - 1))
    corner = (0, first // group, head, at_batch) if packed else (first, head, at_batch)
    expected = []
    for row in range(first, first + rows):
        query, query_head = (row // group, head * group + row % group) if packed else (row, head)
        address = at_batch * strides["batch"] + query * strides["row"] + query_head * strides["head"]
        expected.append(2 * address if row < tile_rows else None)
    assert list(addresses(described, corner)) == expected


def test_the_maps_of_v_and_out_end_where_its_head_dim_does():
    call = replace(PROBLEM, head_dim_v=24)
    for variant_ in (GQA, PACKED):
        extents = {
            name: describe(call, variant_, replace(Q, name=name)).extents[0]
            for name in ("q", "k", "v", "out")
        }
        assert extents == {"q": 40, "k": 40, "v": 24, "out": 24}


@pytest.mark.parametrize(
    ("band", "begin", "end"),
    [
        ({"mask_type": "local", "diagonal_offset": 200, "window_left": 50}, 150, 300),
        ({"mask_type": "dense", "diagonal_offset": 200, "window_left": 50, "window_right": 0}, 150, 300),
        ({"mask_type": "causal", "diagonal_offset": 0, "window_right": 0}, 0, 100),
        ({"mask_type": "dense"}, 0, 300),
    ],
)
def test_the_maps_of_k_and_v_have_the_keys_that_some_query_sees(band, begin, end):
    """100 queries of 300 keys. All other rows arrive as zeros."""
    call = replace(PROBLEM, **band)
    for name in "kv":
        seen = describe(call, GQA, replace(K, name=name))
        whole = describe(PROBLEM, GQA, replace(K, name=name))
        assert seen.distance == begin * whole.strides[0]
        assert seen._replace(distance=0) == whole._replace(extents=(40, end - begin, 2, 2))
    assert describe(call, GQA, Q) == describe(PROBLEM, GQA, Q)


def test_the_map_of_out_has_strides_and_rows_of_its_own():
    call = replace(PROBLEM, head_dim_v=24, out_strides=(28800, 288, 48))
    out = replace(OUT, box=Box(64, 48))
    assert describe(call, GQA, out) == TensorMap(
        "fp16", (24, 100, 6, 2), (576, 96, 57600), (64, 48, 1, 1), swizzle=128
    )
    # Of a group of three heads a copy writes 16 queries.
    assert describe(call, PACKED, out) == TensorMap(
        "fp16", (24, 3, 100, 2, 2), (96, 576, 288, 57600), (64, 3, 16, 1, 1), swizzle=128
    )
    assert describe(call, PACKED, Q).box == (64, 3, 32, 1, 1)


def test_a_group_may_divide_the_rows_that_are_read_and_not_those_that_are_written():
    assert expressible(PROBLEM, PACKED)
    narrow = replace(PACKED, params=(Q, K, V, replace(OUT, box=Box(64, 64))))
    assert describe(PROBLEM, narrow, narrow.params[3]) is None
    assert not expressible(PROBLEM, narrow)
    assert expressible(PROBLEM, replace(narrow, axes=GQA.axes))


def test_a_group_that_does_not_divide_the_rows_of_a_box_has_no_map():
    assert describe(PROBLEM, PACKED, Q) is not None
    other = replace(PROBLEM, num_heads_q=10, q_strides=(40000, 400, 40))
    assert describe(other, PACKED, Q) is None
    assert describe(other, PACKED, OUT) is None
    assert describe(other, PACKED, K) is not None
    assert describe(other, GQA, Q) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"k_strides": (0, 80, 40)},
        {"k_strides": (24000, -80, 40)},
        {"k_strides": (24000, 84, 40)},
        {"k_strides": (2**39, 80, 40)},
        {"seqlen_kv": 0},
        {"seqlen_q": 0},
        {"batch": 0},
    ],
    ids=repr,
)
def test_what_no_map_describes(changes):
    assert expressible(PROBLEM, GQA)
    assert not expressible(replace(PROBLEM, **changes), GQA)
    assert expressible(replace(PROBLEM, **changes), variant(gqa="gqa"))  # one that has no maps


@given(st.integers(1, 2**30), st.sampled_from([8, 40, 64, 256]), st.sampled_from(["fp16", "fp32"]))
def test_strides_that_are_never_multiplied_are_sound(seqlen, head_dim, dtype):
    """The 0 that a Problem has for the stride of an extent of 1 never reaches a map."""
    call = replace(
        PROBLEM,
        batch=1,
        seqlen_kv=seqlen,
        num_heads_q=1,
        num_heads_kv=1,
        head_dim=head_dim,
        dtype=dtype,
        k_strides=(0, 512 if seqlen > 1 else 0, 0),
    )
    described = describe(call, GQA, replace(K, box=Box(16, 8)))
    assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in described.strides)


def test_an_array_that_has_no_map_is_an_error_of_the_spec():
    with pytest.raises(SpecError, match="tensor_map of lse; only these arrays have one: q, k, v, out"):
        describe(PROBLEM, GQA, replace(Q, name="lse"))


MAP = TensorMap("bf16", (40, 300, 2, 2), (160, 80, 48000), (32, 96, 1, 1), swizzle=64)


@pytest.fixture
def place():
    """An address for a map."""
    memory = ctypes.create_string_buffer(192)
    yield (ctypes.addressof(memory) + 63) & -64
    del memory


def test_what_the_driver_is_asked_for(place, monkeypatch):
    binding = Binding()
    monkeypatch.setattr(tensormap, "binding", lambda: binding)
    encode(MAP, 4096, place)
    move(place, 8192)
    assert ctypes.string_at(place, 8) == (8192).to_bytes(8, "little")
    none, swizzle_64b, promotion_256b, zeros = 0, 2, 3, 0
    assert binding.calls == [
        (
            9,  # bf16
            4,
            4096,
            [40, 300, 2, 2],
            [160, 80, 48000],
            [32, 96, 1, 1],
            [1, 1, 1, 1],
            *(none, swizzle_64b, promotion_256b, zeros),
        )
    ]


def test_the_enumerations_are_those_of_the_driver():
    driver = pytest.importorskip("cuda.bindings.driver")
    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    assert {
        "e4m3": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "fp16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp32": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    } == tensormap._DATA_TYPES
    assert {
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    } == tensormap._SWIZZLES
    others = (
        (tensormap._NO_INTERLEAVE, driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        (tensormap._L2_PROMOTION_256B, driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        (tensormap._FILL_WITH_ZEROS, driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    assert all(ours == theirs for ours, theirs in others)


def test_what_the_driver_refuses(place, monkeypatch):
    monkeypatch.setattr(tensormap, "binding", lambda: Binding(status=1))
    with pytest.raises(
        InternalError, match=r"cuTensorMapEncodeTiled gives CUDA error 1 .*40, 300, 2, 2.*0x1000"
    ):
        encode(MAP, 4096, place)
    with pytest.raises(InternalError, match="cuTensorMapReplaceAddress gives CUDA error 1 "):
        move(place, 4096)


# The driver's functions in C, as far as they tell what they were called with.
STUB = """
#include <stdint.h>
int cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, void *address, const uint64_t *extents,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
                           int interleave, int swizzle, int promotion, int fill) {
  uint64_t seen[] = {type, rank, (uint64_t)address, extents[rank - 1], strides[rank - 2], box[rank - 1],
                     steps[rank - 1], interleave, swizzle, promotion, fill};
  for (int i = 0; i < 11; ++i) map[i] = seen[i];
  return 0;
}
int cuTensorMapReplaceAddress(uint64_t *map, void *address) { map[2] = (uint64_t)address; return 0; }
"""


@pytest.fixture
def fresh(monkeypatch):
    """``fresh(load)``: `binding` anew, with ``load`` in the place of what opens the driver."""

    def reopen(load):
        monkeypatch.setattr(ctypes, "PyDLL", load)
        tensormap.binding.cache_clear()

    yield reopen
    tensormap.binding.cache_clear()


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_the_driver_gets_every_argument_whole(place, fresh, tmp_path):
    (tmp_path / "stub.c").write_text(STUB)
    library = str(tmp_path / "stub.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "stub.c")], check=True)
    load = ctypes.PyDLL
    fresh(lambda name: load(library) if name == "libcuda.so.1" else load(name))
    address = (1 << 47) + 4096
    encode(MAP, address, place)
    words = (ctypes.c_uint64 * 11).from_address(place)
    assert list(words) == [
        tensormap._DATA_TYPES[MAP.dtype],
        len(MAP.extents),
        address,
        MAP.extents[-1],
        MAP.strides[-1],
        MAP.box[-1],
        1,
        *(0, tensormap._SWIZZLES[MAP.swizzle], 3, 0),
    ]
    move(place, address + 256)
    assert words[2] == address + 256


def test_without_a_driver_the_error_says_what_is_missing(fresh):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    fresh(absent)
    with pytest.raises(NoBindingError, match=r"libcuda\.so\.1: cannot open.*CUDA 12 or later"):
        tensormap.binding()


def test_an_old_driver_has_no_tensor_maps(fresh):
    fresh(lambda name: SimpleNamespace(cuTensorMapEncodeTiled=None))
    with pytest.raises(NoBindingError, match="cuTensorMapReplaceAddress"):
        tensormap.binding()
