"""Properties of the CUDA text itself: PTX in its place, loads where they are written."""

import random
import re

import pytest

from flashgen import paths
from flashgen.source.render import render
from flashgen.spec.load import load_specs

HEADERS = sorted((paths.templates_dir() / "include" / "flashgen").glob("*.cuh"))
ASM = re.compile(r"\basm\b( volatile)?\s*\((.*?)\);", re.DOTALL)
# What a kernel has besides its header: the matrix instructions of its shapes.
IN_KERNEL = re.compile(r"^#ifndef FLASHGEN_SIMULATOR.*?^#endif$", re.DOTALL | re.MULTILINE)
COMMITTED = [variant for spec in load_specs() for variant in spec.variants() if variant.committed]


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_a_load_of_global_memory_stays_behind_the_wait_for_the_grids_ahead(header):
    """Those may write what is loaded, so a load is neither moved ahead of the wait nor served by the cache of
    read-only data.
    """
    for volatile, body in ASM.findall(header.read_text()):
        if "ld.global" in body:
            assert volatile, body
            assert '"memory"' in body
            assert ".nc" not in body


@pytest.mark.parametrize("variant", COMMITTED, ids=str)
def test_a_kernel_has_no_asm_but_its_matrix_instructions(variant):
    source = render(variant)
    assert not re.search(r"\basm\b", IN_KERNEL.sub("", source))
    apart = "".join(IN_KERNEL.findall(source))
    functions = re.findall(r"^__device__ __forceinline__ void (\w+)\(.*?^}", apart, re.DOTALL | re.MULTILINE)
    assert len(functions) == len(ASM.findall(apart)) == apart.count("wgmma.mma_async.sync")
    assert all(name in IN_KERNEL.sub("", source) for name in functions)


@pytest.mark.parametrize("spec", load_specs(), ids=lambda spec: spec.name)
def test_a_kernel_reads_each_of_its_parameters(spec, fresh_seed):
    """One of the variants that differ in head dims and numbers of their tiles, another in each run."""
    alike = {}
    for variant in spec.variants():
        if variant.dtype == "bf16":  # of types alone it differs from fp16
            continue
        axes = tuple(axis for axis in variant.axes if not axis[0].startswith("head_dim"))
        key = (variant.template, variant.target, axes, dict(variant.tile).get("loop"))
        alike.setdefault(key, []).append(variant)
    unread = {}
    for variant in map(random.Random(fresh_seed).choice, alike.values()):
        source = render(variant)
        names = [p.name for p in variant.params if not re.search(rf"\bparams\.{p.name}\b", source)]
        if names:
            unread[variant.name] = names
    assert unread == {}
