"""Properties of the CUDA text itself: PTX in its place, loads where they are written."""

import random
import re

import pytest

from flashgen.errors import CompileError
from flashgen.families.load import load_specs
from flashgen.families.masks import load_masks
from flashgen.host import paths
from flashgen.source.render import render
from flashgen.toolchain.compile import compile_ptx

HEADERS = sorted((paths.templates_dir() / "include" / "flashgen").glob("*.cuh"))
ASM = re.compile(r"\basm\b( volatile)?\s*\((.*?)\);", re.DOTALL)
# What a kernel has besides its header: the matrix instructions of its shapes.
IN_KERNEL = re.compile(r"^#ifndef FLASHGEN_SIMULATOR.*?^#endif$", re.DOTALL | re.MULTILINE)
# Of each template for Hopper a variant of each size of thread block, with a dense mask and without.
SIZES = {
    (v.template, v.threads, v.mask_type == "dense"): v
    for spec in load_specs()
    for v in spec.variants()
    if v.target == "sm90" and v.is_main
}
TRADES = [variant for variant in SIZES.values() if "setmaxnreg" in render(variant)]


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


def covering(spec, seed):
    """A random variant of each combination that changes more than head dims and the numbers of a tile."""
    alike = {}
    for variant in spec.variants():
        if variant.dtype == "bf16":  # differs from fp16 only in the names of types
            continue
        axes = tuple(axis for axis in variant.axes if not axis[0].startswith("head_dim"))
        key = (variant.template, variant.target, axes, dict(variant.tile).get("loop"))
        alike.setdefault(key, []).append(variant)
    return list(map(random.Random(seed).choice, alike.values()))


@pytest.mark.drawn
@pytest.mark.parametrize("spec", load_specs(), ids=lambda spec: spec.name)
def test_a_kernel_has_no_asm_but_its_matrix_instructions(spec, fresh_seed):
    for variant in covering(spec, fresh_seed):
        source = render(variant)
        portable = IN_KERNEL.sub("", source)
        assert not re.search(r"\basm\b", portable), variant
        apart = "".join(IN_KERNEL.findall(source))
        pattern = r"^__device__ __forceinline__ void (\w+)\(.*?^}"
        functions = re.findall(pattern, apart, re.DOTALL | re.MULTILINE)
        assert len(functions) == len(ASM.findall(apart)) == apart.count("wgmma.mma_async.sync"), variant
        assert all(name in portable for name in functions), variant


@pytest.mark.drawn
@pytest.mark.parametrize("spec", load_specs(), ids=lambda spec: spec.name)
def test_a_kernel_reads_each_of_its_parameters(spec, fresh_seed):
    unread = {}
    for variant in covering(spec, fresh_seed):
        if variant.operator == "mask_lists":  # which reads no bounds where a line has no arrays
            variant = variant.lined(load_masks("")["documents"])
        source = render(variant)
        names = [p.name for p in variant.params if not re.search(rf"\bparams\.{p.name}\b", source)]
        if names:
            unread[variant.name] = names
    assert unread == {}


@pytest.mark.parametrize("variant", TRADES, ids=str)
def test_a_kernel_that_asks_for_more_registers_than_its_launch_has_does_not_compile(variant):
    """On a GPU its consumers would wait for ever."""
    pytest.importorskip("cupy", reason="NVRTC evaluates the assertions")
    blocks = dict(variant.tile).get("min_blocks", 1)
    warpgroups = variant.threads // 128 // variant.grid.kinds  # that trade registers with each other
    at_launch = min(65536 // (blocks * variant.threads) // 8 * 8, 240)
    # One unit of 8 registers more than the warpgroups have together.
    consumer = min(at_launch + 8, 240)
    registers = {"Producer": warpgroups * at_launch - (warpgroups - 1) * consumer + 8, "Consumer": consumer}
    source = render(variant)
    for role, count in registers.items():
        source, found = re.subn(rf"(constexpr int k{role}Registers = ).*;", rf"\g<1>{count};", source)
        assert found == 1
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_ptx(source, variant.name, "sm_90a")
