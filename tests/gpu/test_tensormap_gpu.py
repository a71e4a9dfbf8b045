"""Tensor maps on a real GPU: what the copy engine brings by them is what the arrays hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flashgen
from flashgen.families.load import load_spec, load_specs
from flashgen.operators.attention import normalise
from flashgen.runtime.arrays import view
from flashgen.runtime.device import available, device, why_unavailable
from flashgen.runtime.launch import bind
from flashgen.schedule.plan import plan_steps
from flashgen.schedule.tensormap import expressible

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason=why_unavailable())]

COPY = Path(__file__).parents[1] / "fixtures" / "tma" / "specs" / "copy_tma.yaml"


@pytest.fixture(autouse=True)
def hopper():
    gpu = device(0)
    if gpu.compute_capability != (9, 0):
        pytest.skip(f"{gpu} has no copy engine of compute capability 9.0")
    return gpu


def spaced(rng, shape, axes, dtype=np.float16):
    """Random fp16 values of ``shape``, stored in the order ``axes`` with gaps between the rows."""
    import cupy

    stored = cupy.asarray(rng.standard_normal([shape[axis] for axis in axes] + [shape[3] + 8]), dtype)
    return stored[..., : shape[3]].transpose([axes.index(axis) for axis in range(3)] + [3])


def copied(gpu, gqa, head_dim, q, k):
    """``q`` as the copy kernel of the fixtures hands it on, in memory that held NaN before."""
    import cupy

    out = cupy.full(q.shape, np.nan, q.dtype)
    problem = normalise(view(q, "q"), view(k, "k"), view(k, "v"), out=view(out, "out"))
    (variant,) = load_spec(COPY).select(head_dim=head_dim, dtype="fp16", mask_type="none", gqa=gqa)
    assert expressible(problem, variant)
    run = bind(plan_steps(problem, variant, gpu), gpu)
    stream = cupy.cuda.get_current_stream().ptr
    run.at((q.data.ptr, k.data.ptr, k.data.ptr, 0, out.data.ptr, 0), problem)((None,) * 6, stream)
    return out.get()


# Heads, then head dim of the variant and of the call: a partial last panel, columns that are not there.
@pytest.mark.parametrize(
    ("gqa", "heads", "kv_heads", "head_dim", "width"),
    [
        ("mha", 3, 3, 64, 64),
        ("mha", 1, 1, 64, 40),
        ("mha", 2, 2, 96, 72),
        ("mha", 2, 2, 16, 16),
        ("gqa", 6, 2, 96, 96),
        ("packed", 8, 2, 64, 64),
        ("packed", 16, 1, 64, 56),
        ("packed", 6, 2, 96, 96),
        ("packed", 8, 4, 16, 8),
    ],
)
@pytest.mark.parametrize(("batch", "seqlen"), [(1, 1), (2, 127), (3, 128), (2, 1000)])
def test_a_copy_by_tensor_map_is_the_array(hopper, gqa, heads, kv_heads, head_dim, width, batch, seqlen):
    rng = np.random.default_rng()
    for axes in ((0, 1, 2), (2, 0, 1), (0, 2, 1)):
        q = spaced(rng, (batch, seqlen, heads, width), axes)
        k = spaced(rng, (batch, 9, kv_heads, width), axes)
        np.testing.assert_array_equal(copied(hopper, gqa, head_dim, q, k), q.get())


def test_a_launcher_follows_the_addresses(hopper):
    import cupy

    rng = np.random.default_rng()
    shape = (1, 64, 2, 64)
    arrays = [spaced(rng, shape, (0, 1, 2)) for _ in range(9)]
    out = cupy.empty(shape, np.float16)
    problem = normalise(*(view(arrays[0], name) for name in "qkv"), out=view(out, "out"))
    (variant,) = load_spec(COPY).select(head_dim=64, dtype="fp16", mask_type="none", gqa="mha")
    run = bind(plan_steps(problem, variant, hopper), hopper)
    stream = cupy.cuda.get_current_stream().ptr
    # Maps that were encoded for the first address and then moved; each is used twice.
    works = [run.at((q.data.ptr, q.data.ptr, q.data.ptr, 0, out.data.ptr, 0), problem) for q in arrays]
    for q, work in 2 * list(zip(arrays, works, strict=True)):
        out.fill(np.nan)
        work((None,) * 6, stream)
        cupy.testing.assert_array_equal(out, q)


def test_attention_by_tensor_maps_and_without(hopper, check):
    """Whatever the specs hold for this GPU: a layout that maps describe, and one that they do not."""
    import cupy

    rng = np.random.default_rng()
    q, k, v = (cupy.asarray(rng.standard_normal((2, 333, heads, 64)), np.float16) for heads in (8, 2, 2))
    backwards = k[:, ::-1]
    broadcast = cupy.broadcast_to(v[:, :, :1], v.shape)
    for keys, values in ((k, v), (backwards, v), (k, broadcast)):
        plan = flashgen.plan(q, keys, values, causal=True)
        out = cupy.full(q.shape, np.nan, q.dtype)
        plan(q, keys, values, out=out)
        check(out.get(), q.get(), keys.get(), values.get(), causal=True)
        mapped = any(param.ctype == "tensor_map" for param in plan.variant.params)
        problem = plan.problem
        usable = [
            variant
            for spec in load_specs()
            if spec.family == "flash_fwd"
            for variant in spec.select(head_dim=64, dtype="fp16", mask_type="causal", gqa=["gqa", "packed"])
            if variant.min_arch == "sm_90a" and expressible(problem, variant)
        ]
        assert mapped == bool(usable)
        assert not mapped or keys is k
