"""Masks by a line beside packed sequences, as kernels take them: one sequence of all tokens."""

import json

import numpy as np
import pytest

import flashgen
from flashgen import Mask
from flashgen.call import text
from flashgen.errors import BadParam, BadTensorShape, DeviceTypeNotSupported
from flashgen.operators import rules
from flashgen.operators.packedrules import packed
from flashgen.simulator import hostcompiler

rng = np.random.default_rng()
ENDS = np.array([0, 40, 40, 100, 187], np.int32)
TOKENS = 190  # three of no sequence
OPTIONS = {"cu_seqlens_q": ENDS, "cu_seqlens_kv": ENDS, "max_seqlen_q": 87}


@pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="there is no C++ compiler")
@pytest.mark.parametrize("ranges", [{}, {"causal": True}, {"window_size": (30, 5)}], ids=str)
def test_kernels_compute_what_the_cpu_computes(ranges, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    q, k, v = rng.standard_normal((3, TOKENS, 2, 32)).astype(np.float16)
    doc = np.sort(rng.integers(0, 6, TOKENS)).astype(np.int32)
    limit = rng.integers(0, 50, 4).astype(np.int32)
    mask = Mask("doc[b, q] == doc[b, kv] or kv < limit[b] and b != 2", doc=doc, limit=limit)
    options = {"mask": mask, **OPTIONS, **ranges}
    out, lse = flashgen.attention(q, k, v, return_lse=True, backend="simulator", **options)
    right, right_lse = flashgen.attention(q, k, v, return_lse=True, **options)
    used = slice(ENDS[-1])
    np.testing.assert_allclose(out[used], right[used], atol=4e-3)
    np.testing.assert_allclose(lse[:, used], right_lse[:, used], atol=4e-3)
    assert not out[ENDS[-1] :].any()
    dout = rng.standard_normal(out.shape).astype(np.float16)
    inputs = (dout, q, k, v, out, lse)
    for gradient, expected in zip(
        flashgen.attention_backward(*inputs, backend="simulator", **options),
        flashgen.attention_backward(*inputs, **options),
        strict=True,
    ):
        np.testing.assert_allclose(gradient[used], expected[used], atol=2e-2)


@pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="there is no C++ compiler")
@pytest.mark.parametrize("ends", [None, [0, 2, 5], [0]])
def test_without_keys_results_are_zero(ends):
    q, k = rng.standard_normal((5, 2, 32)).astype(np.float16), np.zeros((0, 2, 32), np.float16)
    options = {"mask": Mask("documents", doc=np.zeros(0, np.int32)), "backend": "simulator"}
    if ends is not None:
        options |= {"cu_seqlens_q": np.array(ends, np.int32), "cu_seqlens_kv": np.zeros(len(ends), np.int32)}
    out, lse = flashgen.attention(q, k, k, return_lse=True, **options)
    assert not out.any()
    assert np.isneginf(lse).all()
    dq, dk, dv = flashgen.attention_backward(q, q, k, k, out, lse, **options)
    assert not dq.any()
    assert dk.shape == dv.shape == k.shape


def on_fake_gpu(line="documents", tokens=300, count=5, **params):
    from fake_gpu import array

    ends = array((count,), "int32")
    params = params or {"doc": array((tokens,), "int32")}
    options = {"mask": Mask(line, **params), "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    return array((tokens, 4, 128)), options


def test_a_gpu_lists_blocks_of_all_tokens(fake_gpu):
    from fake_gpu import array

    q, options = on_fake_gpu()
    plan = flashgen.plan(q, q, q, causal=True, return_lse=True, **options)
    assert [step.variant.name for step in plan.steps] == [
        "mask_lists_bounds_int32_documents_packed_right_sm80",
        "mask_lists_counts_int32_documents_packed_right_sm80",
        "mask_lists_int32_documents_packed_right_sm80",
        "flash_fwd_hdim128_fp16_blocks_documents_packed_right_m64_sm90",
    ]
    problem = plan.problem
    assert (problem.out_shape, problem.lse_shape) == ((300, 4, 128), (4, 300))
    plan.bound((q, q, q), {**options["mask"].arguments, **{name: options[name] for name in rules.ENDS}})
    lse = array((4, 300), "float32")
    names = [step.variant.name for step in flashgen.plan_backward(q, q, q, q, q, lse, **options).steps]
    assert any(name.startswith("flash_bwd_hdim128_fp16_blocks_documents_packed") for name in names)


def test_what_kernels_do_not_have_is_refused(fake_gpu):
    from fake_gpu import array

    q, options = on_fake_gpu()
    with pytest.raises(DeviceTypeNotSupported, match=r"^score alibi_.* reads .*q, and mask is a Mask"):
        flashgen.attention(q, q, q, alibi_slopes=array((4,), "float32"), **options)
    flashgen.plan(q, q, q, softcap=20.0, **options)
    with pytest.raises(DeviceTypeNotSupported, match=r"^mask_type is 'causal_top_left', and mask is a Mask"):
        flashgen.attention(q, q, q, mask_type="causal_top_left", **options)
    with pytest.raises(BadTensorShape, match=r"^cu_seqlens_kv has shape \(4,\) but cu_seqlens_q has \(5,\)"):
        flashgen.attention(q, q, q, **options | {"cu_seqlens_kv": array((4,), "int32")})
    q, options = on_fake_gpu("a[q] <= kv", a=array((300,), "int32"))
    with pytest.raises(DeviceTypeNotSupported, match=r"^a of the mask has an element for each position"):
        flashgen.attention(q, q, q, **options)
    q, options = on_fake_gpu("prefix_lm", prefix=array((7,), "int32"))
    with pytest.raises(BadTensorShape, match=r"^prefix of the mask has shape \(7,\), and there are 4"):
        flashgen.attention(q, q, q, **options)


def test_a_rule_of_a_pack_goes_through_text():
    rule = packed(Mask("kv <= q + n", n=3).rule.rule, True, False)
    option = text.RuleOfCall(rule, (3, 7))
    assert text.option_of(json.loads(json.dumps(text._option("rule", option)))) == option


@pytest.mark.skipif(bool(hostcompiler.why_unavailable()), reason="there is no C++ compiler")
def test_ends_that_fall_are_found(monkeypatch):
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    q, k, v = rng.standard_normal((3, 50, 1, 32)).astype(np.float16)
    ends = np.array([0, 40, 30, 50], np.int32)
    with pytest.raises(BadParam, match=r"^cu_seqlens_kv is \[0, 40, 30, 50\]; expected ends"):
        flashgen.attention(
            *(q, k, v),
            mask=Mask("kv <= q"),
            cu_seqlens_q=np.array([0, 30, 40, 50], np.int32),
            cu_seqlens_kv=ends,
            backend="simulator",
        )
