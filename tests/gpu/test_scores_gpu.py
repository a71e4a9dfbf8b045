"""Score modifications on a GPU, against float64 on the host: both families, graphs, plans, PyTorch."""

from __future__ import annotations

import itertools

import cupy as cp
import ml_dtypes
import numpy as np
import pytest

import flashgen
from flashgen.call.backends import prepare
from flashgen.families.load import load_specs
from flashgen.operators.reference import judge
from flashgen.runtime.device import device
from flashgen.runtime.plans import Plan
from flashgen.schedule.dispatch import offers
from flashgen.schedule.plan import choices
from named import by_name

ELEMENTS = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
LINES = """\
scores:
  by_key:
    score: "score * gain + bias[h, q, kv] + table[h, min(abs(q - kv), 15)] + shift[b, kv]"
    params: {gain: f32, bias: [h, q, kv, f32], table: [h, distance, f32], shift: [b, kv, i32]}
  hides: {score: "where(abs(kv - q) <= n, score, -inf)", params: {n: i32}}
"""
MASKS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window_size": (150, 20)},
    "dense": {"mask": True},
    "dense causal": {"mask": True, "causal": True},
}
MODIFICATIONS = ("softcap", "alibi", "both", "by_key", "hides")
# Queries, keys, query heads, kv heads.
MANY, GROUPED, PACKED = (700, 900, 4, 4), (500, 700, 8, 2), (5, 700, 16, 2)
GROUPS = (MANY, GROUPED, PACKED)


@pytest.fixture(autouse=True)
def own_lines(tmp_path, forget_plans, monkeypatch):
    (tmp_path / "scores.yaml").write_text(LINES)
    monkeypatch.setenv("FLASHGEN_SPECS", str(tmp_path))


@pytest.fixture
def rng(fresh_seed):
    return np.random.default_rng(fresh_seed)


def arrays_of(rng, dtype, shape, widths, batch=2):
    seqlen_q, seqlen_kv, heads, kv_heads = shape
    shapes = (
        (seqlen_q, heads, widths[0]),
        (seqlen_kv, kv_heads, widths[0]),
        (seqlen_kv, kv_heads, widths[1]),
    )
    q, k, v = (rng.standard_normal((batch, *each), np.float32).astype(ELEMENTS[dtype]) for each in shapes)
    return q * ELEMENTS[dtype](2), k, v


def modification(name, rng, q, k):
    """Keywords of ``attention``, and the arrays of the modification in their order."""
    (batch, seqlen_q, heads, _), seqlen_kv = q.shape, k.shape[1]
    slopes = rng.uniform(0.001, 0.5, (batch, heads)).astype(np.float32)
    cap = float(rng.uniform(1, 30))
    if name == "softcap":
        return {"softcap": cap}, ()
    if name == "alibi":
        return {"alibi_slopes": slopes}, (slopes,)
    if name == "both":
        return {"softcap": cap, "alibi_slopes": slopes[0]}, (slopes[0],)
    if name == "hides":
        return {"score": "hides", "params": {"n": int(rng.integers(0, 200))}}, ()
    params = {
        "gain": float(rng.uniform(-1, 1)),
        "bias": rng.standard_normal((heads, seqlen_q, seqlen_kv), np.float32),
        "table": rng.standard_normal((heads, int(rng.integers(1, 30))), np.float32),
        "shift": rng.integers(-2, 3, (batch, seqlen_kv), np.int32),
    }
    return {"score": "by_key", "params": params}, tuple(params[name] for name in ("bias", "table", "shift"))


def on_gpu(options):
    def moved(x):
        if isinstance(x, dict):
            return {name: moved(each) for name, each in x.items()}
        return cp.asarray(x) if isinstance(x, np.ndarray) else x

    return {name: moved(x) for name, x in options.items()}


def options_of(masking, rng, q, k):
    options = dict(MASKS[masking])
    if "mask" in options:
        options["mask"] = rng.random((q.shape[1], k.shape[1])) < 0.4
        options["mask"][3] = True
    return options


def checked(rng, q, k, v, options, score_arrays, target=None):
    """Compute on the GPU, into NaN, and compare with float64; the plan. ``target`` pins the family."""
    on_device = [cp.asarray(x) for x in (q, k, v)]
    given = on_gpu(options)
    plan = flashgen.plan(*on_device, **given, return_lse=True)
    if target is not None:
        problem, here = plan.problem, device(0)
        variants = tuple(x for x in offers(problem, here, load_specs(gpu=here.name)) if x.target == target)
        examples = dict(zip("qkv", on_device, strict=True)) | {"mask": given.get("mask")}
        examples |= dict(zip(names_of(problem), map(cp.asarray, score_arrays), strict=True))
        runner = prepare(choices(problem, here, variants), here)
        plan = Plan(problem, runner, problem.operator.in_order(**examples))
        assert plan.variant.target == target
    assert plan.variant.score is plan.problem.score is not None
    out = cp.full((*q.shape[:-1], v.shape[-1]), np.nan, dtype=q.dtype)
    of_score = dict(zip(names_of(plan.problem), map(cp.asarray, score_arrays), strict=True))
    found, lse = plan(*on_device, mask=given.get("mask"), out=out, **of_score)
    assert found is out
    mask = options.get("mask")
    verdict = judge(
        plan.problem,
        by_name(plan.problem, q, k, v, mask, cp.asnumpy(out), cp.asnumpy(lse), *(None,) * 4, *score_arrays),
    )
    assert verdict.ok, f"{plan.variant}: {verdict}"
    return plan


def names_of(problem):
    return [param.name for param in problem.score.arrays]


CASES = [
    (dtype, widths, masking, shape, name)
    for n, ((dtype, widths), masking, (group, shape)) in enumerate(
        itertools.product(
            [
                *(("fp16", widths) for widths in ((64, 64), (128, 128), (256, 256), (192, 128))),
                *(("bf16", widths) for widths in ((128, 128), (40, 72))),
                *(("fp32", widths) for widths in ((64, 64), (128, 128))),
            ],
            MASKS,
            enumerate(GROUPS),
        )
    )
    if group in (0, 1 + n // 3 % 2)
    for name in [MODIFICATIONS[(n + n // 15) % len(MODIFICATIONS)]]
]


@pytest.mark.parametrize(
    ("dtype", "widths", "masking", "shape", "name"), CASES, ids=lambda x: str(x).replace(" ", "")
)
def test_as_dispatched(dtype, widths, masking, shape, name, rng):
    q, k, v = arrays_of(rng, dtype, shape, widths)
    options, score_arrays = modification(name, rng, q, k)
    checked(rng, q, k, v, options | options_of(masking, rng, q, k), score_arrays)


@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("name", MODIFICATIONS)
@pytest.mark.parametrize("width", [64, 128])
def test_the_ampere_class_family(width, name, masking, rng):
    shape = GROUPS[(len(name) + len(masking)) % 3]
    q, k, v = arrays_of(rng, "fp16", shape, (width, width))
    options, score_arrays = modification(name, rng, q, k)
    checked(rng, q, k, v, options | options_of(masking, rng, q, k), score_arrays, target="sm80")


@pytest.mark.parametrize("lengths", [(1, 500), (1, 1), (500, 1), (129, 4097), (3000, 100)])
@pytest.mark.parametrize("masking", ["none", "causal"])
def test_positions_of_other_lengths(masking, lengths, rng):
    """One causal query takes the kernel without masks, and stands at the last key all the same."""
    q, k, v = arrays_of(rng, "fp16", (*lengths, 4, 4), (128, 128))
    options, score_arrays = modification("both", rng, q, k)
    checked(rng, q, k, v, options | options_of(masking, rng, q, k), score_arrays)


def test_numbers_that_differ_from_call_to_call_compile_nothing(rng, monkeypatch):
    q, k, v = arrays_of(rng, "fp16", MANY, (128, 128))
    on_device = [cp.asarray(x) for x in (q, k, v)]
    plan = flashgen.plan(*on_device, softcap=5.0, return_lse=True)
    flashgen.attention(*on_device, softcap=5.0, return_lse=True)
    monkeypatch.setattr("flashgen.toolchain.obtain.obtain", None)
    monkeypatch.setattr("flashgen.call.compute.make_plan", None)
    for cap in (5.0, 1.0, 30.0, np.float32(2.5), 5.0):
        problem = plan.problem.with_scalars((None, cap))
        for out, lse in (
            flashgen.attention(*on_device, softcap=cap, return_lse=True),
            plan(*on_device, cap=cap),
        ):
            verdict = judge(problem, by_name(problem, q, k, v, None, cp.asnumpy(out), cp.asnumpy(lse)))
            assert verdict.ok, f"cap {cap}: {verdict}"


def test_a_graph_reads_the_slopes_that_are_there_when_it_runs(rng):
    q, k, v = arrays_of(rng, "fp16", MANY, (64, 64))
    on_device = [cp.asarray(x) for x in (q, k, v)]
    slopes = cp.zeros(4, np.float32)
    plan = flashgen.plan(*on_device, alibi_slopes=slopes, causal=True, return_lse=True)
    out, lse = cp.empty_like(on_device[0]), cp.empty((2, 4, 700), np.float32)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        plan(*on_device, slope=slopes, out=out, lse=lse)
        stream.begin_capture()
        plan(*on_device, slope=slopes, out=out, lse=lse)
        graph = stream.end_capture()
    for _ in range(3):
        drawn = rng.uniform(0, 0.3, 4).astype(np.float32)
        stream.synchronize()
        slopes.set(drawn)
        cp.cuda.Device().synchronize()
        out.fill(np.nan)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        verdict = judge(
            plan.problem,
            by_name(plan.problem, q, k, v, None, cp.asnumpy(out), cp.asnumpy(lse), *(None,) * 4, drawn),
        )
        assert verdict.ok, str(verdict)


@pytest.mark.parametrize("name", MODIFICATIONS)
def test_pytorch_tensors(name, rng):
    torch = pytest.importorskip("torch")
    q, k, v = arrays_of(rng, "fp16", GROUPED, (64, 64))
    options, score_arrays = modification(name, rng, q, k)

    def moved(x):
        if isinstance(x, dict):
            return {key: moved(each) for key, each in x.items()}
        return torch.from_numpy(x).cuda() if isinstance(x, np.ndarray) else x

    tensors = [moved(x) for x in (q, k, v)]
    out, lse = flashgen.attention(*tensors, **moved(options), causal=True, return_lse=True)
    assert isinstance(out, torch.Tensor)
    plan = flashgen.plan(*tensors, **moved(options), causal=True, return_lse=True)
    verdict = judge(
        plan.problem,
        by_name(
            plan.problem, q, k, v, None, out.cpu().numpy(), lse.cpu().numpy(), *(None,) * 4, *score_arrays
        ),
    )
    assert verdict.ok, str(verdict)


def test_the_definitions_of_flash_attn(rng):
    """cap tanh(s / cap), then -slope |i + seqlen_k - seqlen_q - j|, in one line of NumPy each."""
    q, k, v = arrays_of(rng, "fp32", (65, 130, 2, 2), (64, 64))
    slopes, cap = rng.uniform(0, 0.2, 2).astype(np.float32), 3.0
    s = np.einsum("bihd,bjhd->bhij", q.astype("f8"), k.astype("f8")) / 8
    distance = np.abs(np.arange(65)[:, None] + 130 - 65 - np.arange(130))
    s = cap * np.tanh(s / cap) - slopes[:, None, None] * distance
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    expected = np.einsum("bhij,bjhd->bihd", p / p.sum(axis=-1, keepdims=True), v.astype("f8"))
    out = flashgen.attention(*map(cp.asarray, (q, k, v)), softcap=cap, alibi_slopes=cp.asarray(slopes))
    np.testing.assert_allclose(cp.asnumpy(out), expected, rtol=2e-5, atol=2e-5)


def test_arrays_of_the_host_are_refused(rng):
    q, k, v = (cp.asarray(x) for x in arrays_of(rng, "fp16", MANY, (64, 64)))
    with pytest.raises(
        flashgen.DeviceTypeNotSupported, match=r"^alibi_slopes is in host memory but q is on GPU 0"
    ):
        flashgen.attention(q, k, v, alibi_slopes=np.ones(4, np.float32))


def spaced(x, pitch, offset):
    """The elements in rows of ``pitch`` elements, the first ``offset`` elements past an aligned one."""
    memory = cp.full((*x.shape[:-1], pitch), np.nan, x.dtype)
    memory[..., offset : offset + x.shape[-1]] = x
    return memory[..., offset : offset + x.shape[-1]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("keys", "pitch", "offset"), [(640, 640, 0), (630, 632, 0), (630, 636, 2), (637, 637, 0), (640, 648, 1)]
)
def test_a_bias_of_any_alignment(keys, pitch, offset, head_dim, causal, rng):
    """Forward kernels stream its elements of 16 and 32 bits, backward kernels stage those of 16 bits."""
    q, k, v = map(cp.asarray, arrays_of(rng, "fp16", (500, keys, 4, 2), (head_dim, head_dim)))
    dout = cp.asarray(rng.standard_normal(q.shape, np.float32).astype(np.float16))
    bias = spaced(
        cp.asarray(rng.standard_normal((1, 4, 500, keys), np.float32).astype(np.float16)), pitch, offset
    )
    results = []
    for array in (bias, bias.astype(np.float32)):
        options = {"score": "bias", "params": {"bias": array}, "causal": causal}
        out, lse = flashgen.attention(q, k, v, return_lse=True, **options)
        results.append((out, lse, *flashgen.attention_backward(dout, q, k, v, out, lse, **options)))
    on_host = {"score": "bias", "params": {"bias": cp.asnumpy(bias).astype(np.float32)}, "causal": causal}
    out, lse = flashgen.attention(*map(cp.asnumpy, (q, k, v)), return_lse=True, **on_host)
    for of_16_bits, of_32_bits, expected in zip(*(result[:2] for result in results), (out, lse), strict=True):
        for found in (of_16_bits, of_32_bits):
            np.testing.assert_allclose(cp.asnumpy(found).astype("f4"), expected, rtol=1e-2, atol=1e-2)
    for of_16_bits, of_32_bits in zip(*results, strict=True):
        np.testing.assert_allclose(
            cp.asnumpy(of_16_bits).astype("f4"), cp.asnumpy(of_32_bits).astype("f4"), rtol=1e-2, atol=1e-2
        )


@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_that_a_batch_shares(causal, dtype, rng):
    """Many tiles a multiprocessor, in the order in which the batch changes fastest."""
    batch, heads, tokens = 24, 12, 520
    shape = (batch, tokens, heads, 128)
    q, k, v = (cp.asarray(rng.standard_normal(shape, np.float32).astype("f2")) for _ in "qkv")
    bias = cp.asarray(rng.standard_normal((1, heads, tokens, tokens), np.float32).astype(dtype))
    out = flashgen.attention(q, k, v, score="bias", params={"bias": bias}, causal=causal)
    for entry in (0, 7, batch - 1):
        expected = flashgen.attention(
            *(cp.asnumpy(x[entry : entry + 1]) for x in (q, k, v)),
            score="bias",
            params={"bias": cp.asnumpy(bias).astype(np.float32)},
            causal=causal,
        )
        np.testing.assert_allclose(cp.asnumpy(out[entry]), expected[0], rtol=1e-2, atol=1e-2)
