"""quantize(): codes and scales of arrays of each library, against ml_dtypes and the float64 bound."""

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn

import flashgen
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, BadTensorStrides
from flashgen.operators.quantize import ARGUMENTS, normalise
from flashgen.operators.quantize_reference import judge
from flashgen.simulator.example import view_of

NAMES = {"fp16": np.float16, "bf16": bfloat16, "fp32": np.float32}
EXTENTS = {"tensor": (1, 1, 1), "head": (1, 1, 3), "token": (2, 37, 3)}


def numbers(rng, dtype="fp32", shape=(2, 37, 3, 24)):
    x = rng.standard_normal(shape) * np.exp(rng.normal(0, 3, shape[:-1]))[..., None]
    return x.astype(NAMES[dtype])


@pytest.mark.parametrize("per", EXTENTS)
@pytest.mark.parametrize("dtype", NAMES)
def test_within_the_bound(dtype, per, fresh_seed):
    x = numbers(np.random.default_rng(fresh_seed), dtype)
    x[0, 3, 1, 5:8] = np.inf, -np.inf, np.nan
    x[1, :, 2] = 0
    codes, scale = flashgen.quantize(x, per)
    assert (codes.dtype, codes.shape) == (float8_e4m3fn, x.shape)
    assert (scale.dtype, scale.shape) == (np.float32, EXTENTS[per])
    views = (view_of(x, dtype), None, view_of(codes, "e4m3"), view_of(scale, "fp32"))
    verdict = judge(
        normalise(*views, per=per),
        {a.name: y for a, y in zip(ARGUMENTS, (x, None, codes, scale), strict=True)},
    )
    assert verdict.ok, str(verdict)
    assert codes[0, 3, 1, 5] == 448
    assert codes[0, 3, 1, 6] == -448
    assert np.isnan(codes[0, 3, 1, 7].astype(np.float32))
    if per == "token":
        assert (scale[1, :, 2] == 1).all()


@pytest.mark.parametrize("extents", [(), (1,), (3,), (2, 1, 3), (37, 1), (2, 37, 3)])
def test_a_scale_of_the_callers(extents, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    x, scale = numbers(rng), np.asarray(np.exp(rng.normal(-4, 1, extents)), np.float32)
    out = np.full(x.shape, 0x7F, np.uint8).view(float8_e4m3fn)
    codes, same = flashgen.quantize(x, scale=scale, out=out)
    assert codes is out
    assert same is scale
    scaled = np.clip(x * (np.float32(1) / scale)[..., None], -448, 448)
    assert (codes.view(np.uint8) == scaled.astype(float8_e4m3fn).view(np.uint8)).all()


def test_a_power_of_two_keeps_what_fits(fresh_seed):
    """Codes times such a scale are what they were quantised from: quantising again changes nothing."""
    rng = np.random.default_rng(fresh_seed)
    codes = rng.integers(0, 0x7F, (3, 5, 2, 16)).astype(np.uint8).view(float8_e4m3fn)
    scale = np.float32(2.0) ** rng.integers(-9, 3, (3, 5, 2)).astype(np.float32)
    x = codes.astype(np.float32) * scale[..., None]
    assert (flashgen.quantize(x, scale=scale)[0] == codes).all()


def test_without_batch_and_without_tokens():
    x = numbers(np.random.default_rng())
    codes, scale = flashgen.quantize(x[0], "head")
    assert (codes.shape, scale.shape) == (x.shape[1:], (1, 3))
    codes, scale = flashgen.quantize(x[:, :0], "head")
    assert codes.shape == (2, 0, 3, 24)
    assert (scale == 1).all()


def test_the_least_numbers_have_a_scale_with_a_reciprocal():
    x = np.full((1, 1, 1, 8), 1e-44, np.float32)
    codes, scale = flashgen.quantize(x)
    assert scale == np.float32(2.0**-126)
    assert np.isfinite(codes.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"per": "row"}, BadParam, "per is 'row'; expected 'token' or 'head' or 'tensor'"),
        ({"per": "given"}, BadParam, "per is 'given'"),
        ({"per": None}, BadParam, "per is None"),
        ({"per": "token", "scale": np.ones(3, np.float32)}, BadParam, "leave per out"),
        ({"scale": np.ones(3)}, BadTensorDtype, "scale has dtype float64"),
        ({"scale": np.ones(2, np.float32)}, BadTensorShape, "scale has shape"),
        ({"scale": np.ones((1, 2, 37, 3), np.float32)}, BadTensorShape, "scale has shape"),
        ({"scale": np.ones((37, 6), np.float32)[:, ::2]}, BadTensorStrides, "scale has strides"),
        ({"scale": np.zeros(3, np.float32)}, BadParam, "scale has an element"),
        ({"scale": np.float32([1, np.nan, 1])}, BadParam, "scale has an element"),
        ({"scale": np.float32([1, -1, 1])}, BadParam, "scale has an element"),
        ({"scale": np.float32([1, 1, np.inf])}, BadParam, "scale has an element"),
        ({"out": np.empty((2, 37, 3, 24), np.float32)}, BadTensorDtype, "out has dtype fp32"),
        ({"out": np.empty((2, 37, 3, 16), np.uint8)}, BadTensorShape, "out has shape"),
        ({"x": np.empty((2, 37, 3, 12), np.float32)}, BadTensorShape, "head_dim of 12"),
        ({"x": np.empty((2, 37, 3, 264), np.float32)}, BadTensorShape, "head_dim of 264"),
        ({"x": np.empty((37, 24), np.float32)}, BadTensorShape, "x has shape"),
        ({"x": np.empty((2, 37, 3, 24))}, BadTensorDtype, "x has dtype float64"),
        ({"x": np.empty((2, 37, 3, 24), float8_e4m3fn)}, BadTensorDtype, "x has dtype e4m3"),
    ],
)
def test_what_does_not_fit_is_named(changes, error, words):
    x = np.ones((2, 37, 3, 24), np.float32)
    with pytest.raises(error, match=words):
        flashgen.quantize(**({"x": x} | changes))


class TestTorch:
    torch = None

    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")

    def test_the_codes_of_numpy(self):
        x = numbers(np.random.default_rng())
        for per in EXTENTS:
            codes, scale = flashgen.quantize(self.torch.from_numpy(x), per)
            right, right_scale = flashgen.quantize(x, per)
            assert codes.dtype is self.torch.float8_e4m3fn
            assert (codes.view(self.torch.uint8).numpy() == right.view(np.uint8)).all()
            assert (scale.numpy() == right_scale).all()

    def test_compiled(self):
        x = self.torch.from_numpy(numbers(np.random.default_rng()))
        out = self.torch.empty(x.shape, dtype=self.torch.float8_e4m3fn)

        @self.torch.compile(fullgraph=True, backend="aot_eager")
        def both(x, out):
            codes, scale = flashgen.quantize(x, "head")
            again, _ = flashgen.quantize(x, scale=scale, out=out)
            return codes, scale, again

        codes, scale, again = both(x, out)
        right, right_scale = flashgen.quantize(x, "head")
        for found in (codes, again, out):
            assert self.torch.equal(found.view(self.torch.uint8), right.view(self.torch.uint8))
        assert self.torch.equal(scale, right_scale)

    def test_there_is_no_gradient(self):
        x = self.torch.ones(1, 2, 2, 8, requires_grad=True)
        with pytest.raises(BadParam, match=r"x: .* no gradients of quantize"):
            flashgen.quantize(x)
        with self.torch.no_grad():
            flashgen.quantize(x)


def test_jax():
    jax = pytest.importorskip("jax")
    x = numbers(np.random.default_rng())
    codes, scale = flashgen.quantize(jax.numpy.asarray(x), "token")
    assert codes.dtype == float8_e4m3fn
    right, right_scale = flashgen.quantize(x, "token")
    assert (np.asarray(codes).view(np.uint8) == right.view(np.uint8)).all()
    assert (np.asarray(scale) == right_scale).all()
