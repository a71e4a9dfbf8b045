"""softcap, alibi_slopes, score and params of attention() and plan(), on NumPy arrays and in the simulator.

What is expected is written down here in one line of NumPy each, apart from the formulas in specs/.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import flashgen
from flashgen import errors
from flashgen.call import compute
from flashgen.operators.masks import Band
from flashgen.operators.modification import modification_of
from flashgen.operators.reference import attention as reference
from flashgen.operators.reference import largest
from flashgen.simulator import hostcompiler

pytestmark = pytest.mark.once

simulated = pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="there is no C++ compiler")
ON = ("cpu", pytest.param("simulator", marks=simulated))
CAP = {"cap": 1}

LINES = """\
scores:
  mine: {score: "score * gain + bias[h, q, kv]", params: {gain: f32, bias: [h, q, kv, f32]}}
  near: {score: "score + table[h, min(abs(q - kv), 15)]", params: {table: [h, distance, f32]}}
  far: {score: "where(abs(kv - q) <= n and kv - q < 3, score, -inf)", params: {n: i32}}
  documents: {score: "where(kv < ends[b, q], score, -inf)", params: {ends: [b, q, i32]}}
"""


@pytest.fixture(autouse=True)
def fresh(forget_plans, monkeypatch):
    monkeypatch.delenv("FLASHGEN_BACKEND", raising=False)
    monkeypatch.delenv("FLASHGEN_SPECS", raising=False)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    (tmp_path / "scores.yaml").write_text(LINES)
    monkeypatch.setenv("FLASHGEN_SPECS", str(tmp_path))
    return tmp_path


def qkv(rng, seqlen_q=40, seqlen_kv=75, heads=4, kv_heads=2, batch=2, dtype=np.float16):
    shapes = ((seqlen_q, heads), (seqlen_kv, kv_heads), (seqlen_kv, kv_heads))
    return [rng.standard_normal((batch, *shape, 32), np.float32).astype(dtype) for shape in shapes]


def scores_of(q, k):
    """Scaled scores in float64, (batch, heads, seqlen_q, seqlen_kv)."""
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2).astype(np.float64)
    return np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k) * q.shape[-1] ** -0.5


def attend(s, v, hidden=None):
    """softmax(s) v and the LSE; rows that see nothing are 0 and -inf."""
    v = np.repeat(v, s.shape[1] // v.shape[2], axis=2).astype(np.float64)
    s = s if hidden is None else np.where(hidden, -np.inf, s)
    top = s.max(axis=-1, keepdims=True)
    p = np.exp(s - np.where(np.isinf(top), 0, top))
    total = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return np.einsum("bhij,bjhd->bihd", p / np.where(total == 0, 1, total), v), lse


def causal(seqlen_q, seqlen_kv):
    return np.arange(seqlen_kv) > np.arange(seqlen_q)[:, None] + seqlen_kv - seqlen_q


def distances(seqlen_q, seqlen_kv):
    """FlashAttention's |i + seqlen_k - seqlen_q - j|."""
    return np.abs(np.arange(seqlen_q)[:, None] + seqlen_kv - seqlen_q - np.arange(seqlen_kv))


def near(found, expected, dtype=np.float16):
    (out, lse), (right, right_lse) = found, expected
    tolerance = {np.float16: 4e-3, np.float32: 2e-5}[dtype]
    np.testing.assert_allclose(out.astype(np.float64), right, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, right_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ON)
def test_softcap_is_that_of_flash_attn_and_of_onnx(backend, is_causal, dtype):
    """softcap * tanh(scores / softcap), of the scaled scores, ahead of the mask."""
    rng = np.random.default_rng()
    q, k, v = qkv(rng, dtype=dtype)
    q *= 4
    cap = float(rng.uniform(0.5, 6))
    expected = attend(cap * np.tanh(scores_of(q, k) / cap), v, causal(40, 75) if is_causal else None)
    found = flashgen.attention(q, k, v, softcap=cap, causal=is_causal, return_lse=True, backend=backend)
    near(found, expected, dtype)
    plain = flashgen.attention(q, k, v, causal=is_causal, backend=backend)
    assert np.abs(found[0].astype(np.float64) - plain).max() > 0.1  # the cap is felt


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (20, 0)}, {"window_size": (20, 9)}, {"mask_type": 2}],
    ids=str,
)
@pytest.mark.parametrize("backend", ON)
def test_alibi_is_that_of_flash_attn(backend, options, per_batch):
    """-slope * |i + seqlen_k - seqlen_q - j|, whatever the mask."""
    rng = np.random.default_rng()
    q, k, v = qkv(rng)
    slopes = rng.uniform(0, 0.5, (2, 4) if per_batch else (4,)).astype(np.float32)
    s = scores_of(q, k) - slopes.reshape(-1, 4, 1, 1) * distances(40, 75)
    offset, (left, right) = 35, options.get("window_size", (-1, -1))
    position, keys = np.arange(40)[:, None] + offset, np.arange(75)
    hidden = np.zeros((40, 75), bool)
    if left >= 0:
        hidden |= keys < position - left
    if right >= 0 or "causal" in options:
        hidden |= keys > position + max(right, 0)
    if "mask_type" in options:
        hidden |= keys > position - offset
    found = flashgen.attention(q, k, v, alibi_slopes=slopes, return_lse=True, backend=backend, **options)
    near(found, attend(s, v, hidden))


@pytest.mark.parametrize("backend", ON)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (300, 0)}], ids=str)
def test_one_query_stands_at_the_last_key(options, backend):
    """Causal hides nothing from it, so it takes the kernel without masks; the distances stay."""
    rng = np.random.default_rng()
    q, k, v = qkv(rng, 1, 500)
    slopes = rng.uniform(0.01, 0.1, 4).astype(np.float32)
    s = scores_of(q, k) - slopes.reshape(4, 1, 1) * (499 - np.arange(500))
    hidden = np.arange(500) < 499 - 300 if "window_size" in options else None
    found = flashgen.attention(q, k, v, alibi_slopes=slopes, return_lse=True, backend=backend, **options)
    near(found, attend(s, v, hidden))


@pytest.mark.parametrize("seqlen_q", [100, 40, 3])
def test_more_queries_than_keys_and_a_top_left_diagonal(seqlen_q):
    """Then queries see keys behind their positions, and ALiBi is symmetric."""
    rng = np.random.default_rng()
    q, k, v = qkv(rng, seqlen_q, 60)
    slopes = rng.uniform(0.01, 0.5, 4).astype(np.float32)
    s = scores_of(q, k) - slopes.reshape(4, 1, 1) * distances(seqlen_q, 60)
    found = flashgen.attention(q, k, v, alibi_slopes=slopes, mask_type="causal_top_left", return_lse=True)
    near(found, attend(s, v, np.arange(60) > np.arange(seqlen_q)[:, None]))


@pytest.mark.parametrize("backend", ON)
def test_softcap_then_alibi_then_a_dense_mask(backend):
    rng = np.random.default_rng()
    q, k, v = qkv(rng)
    slopes, hidden = rng.uniform(0, 0.5, 4).astype(np.float32), rng.random((40, 75)) < 0.3
    hidden[7] = True
    s = 2 * np.tanh(scores_of(q, k) / 2) - slopes.reshape(4, 1, 1) * distances(40, 75)
    given = {"softcap": 2, "alibi_slopes": slopes, "mask": hidden, "causal": True}
    found = flashgen.attention(q, k, v, **given, return_lse=True, backend=backend)
    near(found, attend(s, v, hidden | causal(40, 75)))
    assert not found[0][:, 7].any()


@pytest.mark.parametrize("backend", ON)
def test_one_line_of_yaml_is_a_modification(own_folder, backend):
    rng = np.random.default_rng()
    q, k, v = qkv(rng)
    bias, gain = rng.standard_normal((4, 40, 75), np.float32), float(rng.uniform(-2, 2))
    found = flashgen.attention(
        q, k, v, score="mine", params={"gain": gain, "bias": bias}, return_lse=True, backend=backend
    )
    near(found, attend(scores_of(q, k) * gain + bias, v))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("shape", [(2, 4, 40, 75), (4, 40, 75), (2, 1, 1, 75), (40, 75), (75,)], ids=str)
@pytest.mark.parametrize("backend", ON)
def test_bias_is_an_additive_mask(backend, shape, dtype):
    """It broadcasts from the right; its -inf hides a key, and a row of nothing else is 0."""
    rng = np.random.default_rng()
    q, k, v = qkv(rng, dtype=dtype)
    bias = np.where(rng.random(shape) < 0.3, -math.inf, rng.standard_normal(shape)).astype(np.float32)
    if len(shape) > 1 and shape[-2] == 40:
        bias[..., 7, :] = -math.inf
    found = flashgen.attention(
        q, k, v, score="bias", params={"bias": bias}, causal=True, return_lse=True, backend=backend
    )
    near(found, attend(scores_of(q, k) + bias, v, causal(40, 75)), dtype)


@pytest.mark.parametrize("backend", ON)
@pytest.mark.parametrize("entries", [1, 9, 16, 40])
def test_a_table_with_a_dimension_of_its_own(own_folder, backend, entries):
    """An index past the end reads the last entry."""
    rng = np.random.default_rng()
    q, k, v = qkv(rng)
    table = rng.standard_normal((4, entries), np.float32)
    found = flashgen.attention(
        q, k, v, score="near", params={"table": table}, return_lse=True, backend=backend
    )
    reached = np.minimum(np.minimum(distances(40, 75), 15), entries - 1)
    near(found, attend(scores_of(q, k) + table[:, reached], v))


@pytest.mark.parametrize("backend", ON)
def test_a_formula_may_hide_keys(own_folder, backend):
    """Rows of which it hides every key are 0 with an LSE of -inf, as with a mask."""
    rng = np.random.default_rng()
    q, k, v = qkv(rng)
    found = flashgen.attention(q, k, v, score="far", params={"n": 7}, return_lse=True, backend=backend)
    ahead = np.arange(75) - (np.arange(40)[:, None] + 35)
    near(found, attend(scores_of(q, k), v, (np.abs(ahead) > 7) | (ahead >= 3)))
    ends = rng.integers(0, 80, (2, 40)).astype(np.int32)
    ends[:, ::5] = 0
    found = flashgen.attention(
        q, k, v, score="documents", params={"ends": ends}, return_lse=True, backend=backend
    )
    near(found, attend(scores_of(q, k), v, np.arange(75) >= ends[:, None, :, None]))
    assert not found[0][:, ::5].any()
    assert np.all(found[1][:, :, ::5] == -np.inf)


@pytest.mark.parametrize("backend", ON)
def test_a_chain_of_a_shipped_and_an_own_line(own_folder, backend):
    rng = np.random.default_rng()
    q, k, v = qkv(rng)
    table = rng.standard_normal((4, 20), np.float32)
    found = flashgen.attention(
        q,
        k,
        v,
        score=("near", "softcap"),
        params={"table": table, "cap": 3},
        return_lse=True,
        backend=backend,
    )
    s = scores_of(q, k) + table[:, np.minimum(distances(40, 75), 15)]
    near(found, attend(3 * np.tanh(s / 3), v))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_results_are_within_the_bound_of_float64(dtype, is_causal):
    rng = np.random.default_rng()
    q, k, v = qkv(rng, 300, 500, dtype=dtype)
    slopes = rng.uniform(0, 1, 4).astype(np.float32)
    given = {"softcap": 5.0, "alibi_slopes": slopes, "causal": is_causal}
    plan = flashgen.plan(q, k, v, **given, return_lse=True)
    out, lse = plan(q, k, v, slope=slopes)
    problem = plan.problem
    expected = reference(
        *(x.astype(np.float64) for x in (q, k, v)),
        problem.dtype,
        problem.softmax_scale,
        Band.of(problem),
        modification=modification_of(problem, {"slope": slopes}),
    )
    assert largest(out, expected.out, expected.out_bound).share <= 1
    assert largest(lse, expected.lse, expected.lse_bound).share <= 1


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"softcap": 0.0}, errors.BadParam, "softcap is 0.0; it must be a number above 0, or None"),
        ({"softcap": -3}, errors.BadParam, "softcap is -3"),
        ({"softcap": math.nan}, errors.BadParam, "softcap is nan"),
        ({"softcap": math.inf}, errors.BadParam, "softcap is inf"),
        ({"softcap": "30"}, errors.BadParam, "softcap is '30'"),
        ({"softcap": np.ones(1)}, errors.BadParam, "softcap is array"),
        ({"softcap": 1e-44}, errors.BadParam,
         r"cannot be computed with softmax_scale = .*, softcap = 1e-44: .* softcap.* may be at most 3e.38"),
        ({"softcap": 1e39}, errors.BadParam, "^softcap is 1e.39; it must be finite, at most 3e.38$"),
        ({"softcap": 10**400}, errors.BadParam, "^softcap is an integer of 401 digits; it must be"),
        ({"softcap": 10**5000}, errors.BadParam, "^softcap is an integer of 5001 digits; it must be"),
        ({"alibi_slopes": np.ones(3, np.float32)}, errors.BadTensorShape, r"^alibi_slopes has shape \(3,\)"),
        ({"alibi_slopes": np.ones((4, 1), np.float32)}, errors.BadTensorShape,
         r"^alibi_slopes has shape \(4, 1\)"),
        ({"alibi_slopes": np.ones(4)}, errors.BadTensorDtype, "^alibi_slopes has dtype float64"),
        ({"alibi_slopes": [0.5] * 4}, errors.FlashgenError, "slope"),
        ({"alibi_slopes": 0.5}, errors.FlashgenError, "slope"),
        ({"alibi_slopes": np.ones(8, np.float32)[::2]}, errors.BadTensorStrides, "^alibi_slopes has strides"),
        ({"score": "mine"}, errors.BadParam, "score is 'mine'; there are 'alibi', "),
        ({"score": 3}, errors.BadParam, "score is 3"),
        ({"score": ["softcap", 3], "params": CAP}, errors.BadParam, "score is 3"),
        ({"score": [["softcap"]], "params": CAP}, errors.BadParam, r"score is \['softcap'\]; it must be"),
        ({"score": "softcap", "params": {1: 2} | CAP}, errors.BadParam, "softcap has no parameter 1"),
        ({"params": {1: 2}}, errors.BadParam, "params has 1, but no score was given"),
        ({"score": "softcap"}, errors.BadParam, r"cap; pass params=\{'cap': \.\.\.\}$"),
        ({"score": ("softcap", "bias"), "params": CAP}, errors.BadParam, r"needs the parameter bias; .*cap"),
        ({"score": "softcap", "params": {"capp": 1}}, errors.BadParam,
         r"has no parameter capp; it has cap; did you mean cap\?$"),
        ({"score": "softcap", "params": {"pac": 1, "x": 2}}, errors.BadParam, "no parameter pac; it has cap"),
        ({"score": "softcap", "params": {"cap": None}}, errors.BadParam, "cap is None"),
        ({"score": "softcap", "params": {"cap": 1, "a": 2}}, errors.BadParam, "softcap has no parameter a"),
        ({"score": "softcap", "params": 3}, errors.BadParam, "params is 3"),
        ({"score": "alibi", "params": {"slope": None}}, errors.NullPointer, "slope is None"),
        ({"params": CAP}, errors.BadParam, "params has cap, but no score was given"),
        ({"score": "softcap", "params": CAP, "softcap": 3.0}, errors.BadParam, "score is 'softcap' and"),
        ({"score": "softcap", "params": CAP, "alibi_slopes": 1}, errors.BadParam, "name all in score"),
        ({"score": ("softcap", "softcap"), "params": CAP}, errors.BadParam, "each have a parameter cap"),
        ({"score": ()}, errors.BadParam, r"score is \(\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", [flashgen.attention, flashgen.plan])
def test_bad_input_is_named_before_anything_is_written(call, given, error, says):
    q, k, v = qkv(np.random.default_rng(0))
    out = np.full_like(q, np.nan)
    with pytest.raises(error, match=says):
        call(q, k, v, out=out, **given)
    assert np.isnan(out).all()


@pytest.mark.parametrize("backend", ON)
def test_a_number_that_changes_makes_no_new_plan(backend, monkeypatch):
    q, k, v = qkv(np.random.default_rng())
    flashgen.attention(q, k, v, softcap=3.0, backend=backend)
    assert len(compute._plans) == 1
    monkeypatch.setattr(compute, "make_plan", None)
    monkeypatch.setattr("flashgen.source.render.render", None)
    for cap in (1.0, 2.0, np.float32(0.5)):
        out = flashgen.attention(q, k, v, softcap=cap, backend=backend)
        expected, _ = attend(cap * np.tanh(scores_of(q, k) / cap), v)
        np.testing.assert_allclose(out.astype(np.float64), expected, rtol=4e-3, atol=4e-3)
    slopes = np.ones(4, np.float32)
    monkeypatch.undo()
    compute._plans.clear()
    compute._recent.clear()
    for factor in (1, 2, 3):  # other contents of an array are no new plan either
        flashgen.attention(q, k, v, alibi_slopes=slopes * np.float32(factor), backend=backend)
    assert len(compute._plans) == 1


def test_a_plan_keeps_its_numbers_and_takes_others():
    q, k, v = qkv(np.random.default_rng())
    plan = flashgen.plan(q, k, v, softcap=2.0)
    capped = {cap: attend(cap * np.tanh(scores_of(q, k) / cap), v)[0] for cap in (2.0, 0.5)}
    np.testing.assert_allclose(plan(q, k, v).astype(np.float64), capped[2.0], rtol=4e-3, atol=4e-3)
    np.testing.assert_allclose(plan(q, k, v, cap=0.5).astype(np.float64), capped[0.5], rtol=4e-3, atol=4e-3)
    np.testing.assert_allclose(plan(q, k, v).astype(np.float64), capped[2.0], rtol=4e-3, atol=4e-3)
    with pytest.raises(errors.BadParam, match="cap is nan"):
        plan(q, k, v, cap=math.nan)
    with pytest.raises(errors.BadParam, match=r"slope is not an argument; .*softmax_scale, cap"):
        plan(q, k, v, slope=np.ones(4, np.float32))


def test_a_parameter_may_be_called_self(own_folder):
    (own_folder / "scores.yaml").write_text('scores: {mine: {score: "score * self", params: {self: f32}}}')
    q, k, v = qkv(np.random.default_rng())
    cache = flashgen.KVCache(
        *(np.zeros((2, 75, *x.shape[2:]), x.dtype) for x in (k, v)), np.zeros(2, np.int32)
    )
    options = {"score": "mine", "params": {"self": 1.0}}
    expected = flashgen.attention(q, k, v, score="mine", params={"self": 0.5})
    assert np.array_equal(flashgen.plan(q, k, v, **options)(q, k, v, self=0.5), expected)
    held = flashgen.plan(q, cache, append=(k, v), **options)
    np.testing.assert_allclose(held(q, cache, (k, v), self=0.5), expected, atol=2e-3)


def test_arrays_of_a_plan_go_to_each_call():
    q, k, v = qkv(np.random.default_rng())
    slopes = np.linspace(0.1, 0.5, 4, dtype=np.float32)
    plan = flashgen.plan(q, k, v, alibi_slopes=np.zeros(4, np.float32), causal=True)
    expected = flashgen.attention(q, k, v, alibi_slopes=slopes, causal=True)
    assert np.array_equal(plan(q, k, v, slope=slopes), expected)
    with pytest.raises(errors.NullPointer, match="slope is None; expected an array"):
        plan(q, k, v)
    with pytest.raises(errors.BadTensorShape, match=r"^slope has shape"):
        plan(q, k, v, slope=slopes[None])


@pytest.mark.usefixtures("own_folder")
def test_with_lengths_an_array_is_as_large_as_its_sequences_may_be():
    rng = np.random.default_rng()
    q = rng.standard_normal((40, 4, 32), np.float32)
    ends = np.array([0, 30, 40], np.int32)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_kv": 64, "score": "mine"}
    bias = rng.standard_normal((4, 30, 64), np.float32)

    def call(bias, **options):
        return flashgen.attention(q, q, q, **packed, params={"gain": 2.0, "bias": bias}, **options)

    with pytest.raises(errors.BadTensorShape, match=r"bias has .* With lengths seqlen_q and seqlen_kv are"):
        call(bias, max_seqlen_q=30)
    found = call(bias[..., :40], max_seqlen_q=30)
    for begin, end in itertools.pairwise(ends):
        own, rows = q[begin:end], end - begin
        params = {"gain": 2.0, "bias": np.ascontiguousarray(bias[:, :rows, :rows])}
        np.testing.assert_allclose(
            found[begin:end], flashgen.attention(own, own, own, score="mine", params=params), atol=1e-5
        )
    slopes = np.ones(3, np.float32)
    with pytest.raises(errors.BadTensorShape, match=r"alibi_slopes has [^.]*itself$"):
        flashgen.attention(q, q, q, cu_seqlens_q=ends, cu_seqlens_kv=ends, alibi_slopes=slopes)


def test_an_output_must_not_be_a_parameter():
    q, k, v = qkv(np.random.default_rng(), dtype=np.float32)
    memory = np.zeros(q.size + 4, np.float32)
    slopes, out = memory[:4], memory[: q.size].reshape(q.shape)
    with pytest.raises(errors.BadTensorStrides, match="out overlaps alibi_slopes"):
        flashgen.attention(q, k, v, alibi_slopes=slopes, out=out)


def test_a_folder_that_changes_changes_the_modification(tmp_path, monkeypatch):
    """Of two folders each has its own `mine`; nothing that one left behind serves the other."""
    q, k, v = qkv(np.random.default_rng())
    found = []
    for factor in (2, 3):
        folder = tmp_path / str(factor)
        folder.mkdir()
        (folder / "scores.yaml").write_text(f"scores:\n  mine: {{score: score * {factor}}}\n")
        monkeypatch.setenv("FLASHGEN_SPECS", str(folder))
        found.append(flashgen.attention(q, k, v, score="mine"))
        expected, _ = attend(scores_of(q, k) * factor, v)
        np.testing.assert_allclose(found[-1].astype(np.float64), expected, rtol=4e-3, atol=4e-3)


def test_without_batch(own_folder):
    q, k, v = qkv(np.random.default_rng(), batch=1)
    table = np.random.default_rng().standard_normal((4, 20), np.float32)
    whole = flashgen.attention(q, k, v, score="near", params={"table": table})
    one = flashgen.attention(q[0], k[0], v[0], score="near", params={"table": table})
    assert np.array_equal(whole[0], one)
    slopes = np.ones((1, 4), np.float32)
    assert flashgen.attention(q[0], k[0], v[0], alibi_slopes=slopes).shape == q[0].shape


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_modify(seqlen_q, seqlen_kv):
    q, k, v = qkv(np.random.default_rng(), seqlen_q, seqlen_kv)
    out, lse = flashgen.attention(q, k, v, softcap=3, alibi_slopes=np.ones(4, np.float32), return_lse=True)
    assert not out.any()
    assert np.all(lse == -np.inf)


@simulated
def test_where_no_family_has_a_seam_the_call_says_so(tmp_path, monkeypatch):
    from flashgen.host.paths import specs_dir

    for path in specs_dir().glob("flash*.yaml"):
        (tmp_path / path.name).write_text(path.read_text().replace("score_seam: true", "score_seam: false"))
    monkeypatch.setenv("FLASHGEN_SPECS", str(tmp_path))
    q, k, v = qkv(np.random.default_rng())
    with pytest.raises(errors.FlashgenError, match="score softcap"):
        flashgen.attention(q, k, v, softcap=3, backend="simulator")
    assert flashgen.attention(q, k, v, backend="simulator").shape == q.shape


@pytest.mark.parametrize("name", ["stream", "append", "q_rotated"])
def test_no_parameter_has_the_name_of_a_keyword_of_calls(name, tmp_path, monkeypatch):
    path = tmp_path / "scores.yaml"
    path.write_text(f"scores:\n  mine: {{score: score + {name}, params: {{{name}: f32}}}}\n")
    monkeypatch.setenv("FLASHGEN_SPECS", str(tmp_path))
    message = rf"^{path}:2: scores\.mine\.params\.{name}: `{name}` is reserved"
    with pytest.raises(errors.SpecError, match=message):
        flashgen.attention(*qkv(np.random.default_rng()), score="mine", params={name: 1.0})
