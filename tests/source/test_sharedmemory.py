"""The regions of a kernel's shared memory cover all of it, and have the names and buffers of its map."""

import random

import pytest

from flashgen.families.load import load_specs
from flashgen.source.render import render
from flashgen.source.sharedmemory import Region, regions


@pytest.mark.parametrize("spec", load_specs(), ids=lambda spec: spec.name)
def test_regions_cover_the_shared_memory_of_a_launch(spec, fresh_seed):
    for variant in random.Random(fresh_seed).choices(spec.variants(), k=4):
        for step in variant.steps:
            parts = regions(render(step), step)
            ends = [0, *(part.end for part in parts)]
            assert [part.begin for part in parts] == ends[:-1]
            assert sum(part.size for part in parts) == step.smem_bytes
            assert all(part.size > 0 and part.size % part.buffers == 0 for part in parts)
            assert (len(parts) > 0) == (step.smem_bytes > 0), step.name


def test_regions_of_a_kernel_whose_map_has_them():
    variant = next(
        v for s in load_specs() for v in s.variants() if v.name == "flash_fwd_hdim128_fp16_causal_m128_sm90"
    )
    assert regions(render(variant), variant) == (
        Region("Q", 0, 65536, 2),
        Region("K", 65536, 131072, 2),
        Region("V", 131072, 196608, 2),
        Region("barriers", 196608, 196704),
        Region("alignment", 196704, 197728),
    )


def test_a_kernel_without_such_constants_has_one_region():
    variant = next(v for s in load_specs() for v in s.variants() if v.smem_bytes)
    whole = (Region("shared memory", 0, variant.smem_bytes),)
    assert regions("// nothing\n", variant) == whole
    assert regions("constexpr int kSharedBytes = sizeof(Storage);\n", variant) == whole
    assert (
        regions("constexpr int kSharedBytes = kOffset + 8;\nconstexpr int kOffset = 4;\n", variant) == whole
    )


STORAGE = """\
constexpr int kStages = 2;
constexpr int kWords = sizeof(Entry) / 4;
struct Entry {
    int row;
    int head;

    void load() {
        row = 1;
    }
};
struct alignas(64) SharedStorage {
    element k[kStages][4][8];  // K
    float lse_log2[3];
    uint64_t full[kStages];
    uint64_t empty;
    int32_t entry[kWords];
};
"""


def test_members_of_a_struct_are_regions():
    variant = next(
        v for s in load_specs() for v in s.variants() if v.smem_bytes > 512 and v.element_bytes == 2
    )
    parts = regions(STORAGE, variant)
    assert parts[:4] == (
        Region("K", 0, 128, 2),
        Region("LSE", 128, 144),  # and four bytes, so that a barrier begins at a multiple of 8
        Region("barriers", 144, 168),
        Region("entry", 168, 192),  # to the end of the struct
    )
    assert parts[-1].end == variant.smem_bytes
