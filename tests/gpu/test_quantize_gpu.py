"""quantize() on a GPU: the bits of the CPU path, which is within the bound of float64."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="arrays lie on the GPU by PyTorch")

import flashgen  # noqa: E402
from flashgen.errors import BadParam  # noqa: E402
from gpu.cases import new_seed  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch does not see a GPU"),
]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Batch, tokens, heads, head dim: one row, decode, ragged thread blocks, long rows, many rows.
SHAPES = ((1, 1, 1, 8), (64, 1, 8, 128), (3, 301, 5, 104), (2, 130, 3, 256), (2, 4096, 16, 64))


def numbers(shape, dtype):
    random = torch.Generator("cuda").manual_seed(new_seed())
    x = torch.randn(shape, generator=random, device="cuda")
    x *= torch.randn(shape[:-1], generator=random, device="cuda").mul(3).exp()[..., None]
    strange = torch.rand(shape, generator=random, device="cuda")
    for limit, value in ((3e-4, torch.inf), (2e-4, -torch.inf), (1e-4, torch.nan)):
        x[strange < limit] = value
    return x.to(dtype)


def same(found, right):
    for x, y in zip(found, right, strict=True):
        bits = torch.uint8 if x.dtype == torch.float8_e4m3fn else torch.int32
        assert torch.equal(x.cpu().view(bits), y.view(bits))


@pytest.mark.parametrize("per", ["tensor", "head", "token"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_the_cpu_path(dtype, shape, per):
    x = numbers(shape, DTYPES[dtype])
    same(flashgen.quantize(x, per), flashgen.quantize(x.cpu(), per))


@pytest.mark.parametrize("extents", [(), (5,), (3, 1, 5), (3, 301, 5)])
def test_a_scale_of_the_callers_and_strided_rows(extents):
    x = numbers((3, 301, 10, 104), torch.bfloat16)[:, :, ::2]
    scale = torch.rand(extents, device="cuda") + 0.01
    out = torch.full((3, 301, 5, 112), 0x7F, dtype=torch.uint8, device="cuda")[..., :104]
    codes, _ = flashgen.quantize(x, scale=scale, out=out.view(torch.float8_e4m3fn))
    right, _ = flashgen.quantize(x.cpu(), scale=scale.cpu())
    assert torch.equal(codes.cpu().view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("per", ["tensor", "token"])
def test_a_graph_takes_other_numbers(per):
    x = numbers((2, 700, 4, 64), torch.float16)
    flashgen.quantize(x, per)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = flashgen.quantize(x, per)
    for _ in range(3):
        x.copy_(numbers(x.shape, x.dtype))
        graph.replay()
        same(results, flashgen.quantize(x.cpu(), per))


def test_cupy_gives_codes_in_uint8():
    cupy = pytest.importorskip("cupy")
    x = cupy.random.standard_normal((2, 33, 4, 64), dtype=cupy.float32)
    codes, scale = flashgen.quantize(x, "head")
    right, right_scale = flashgen.quantize(x.get(), "head")
    assert codes.dtype == np.uint8
    assert (codes.get() == right.view(np.uint8)).all()
    assert (scale.get() == right_scale).all()


def test_jax_gives_float8():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((2, 33, 4, 64), "float32")
    codes, _ = flashgen.quantize(x, "head")
    assert codes.dtype.name == "float8_e4m3fn"
    assert (np.asarray(codes).astype(np.float32) == 448).all()


def test_a_checked_scale(monkeypatch):
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    x = numbers((1, 5, 2, 64), torch.float16)
    with pytest.raises(BadParam, match="scale has an element"):
        flashgen.quantize(x, scale=torch.zeros(1, device="cuda"))
