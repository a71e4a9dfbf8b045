"""flashgen as a backend of vLLM, against stubs of the interface (vllm.v1.attention) as far as it is used. The
stubs are no proof that it runs in vLLM.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from flashgen.compat import vllm as plugin  # noqa: E402

BLOCK, HEADS, KV_HEADS, WIDTH = 16, 4, 2, 32


class Custom(enum.Enum):
    """AttentionBackendEnum, with the place for others."""

    CUSTOM = None

    def is_overridden(self):
        return self in PATHS

    def get_path(self):
        return PATHS[self]


PATHS = {}


class Generic:
    def __class_getitem__(cls, _):
        return cls


class Builder(Generic):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device


@pytest.fixture
def backend(monkeypatch):
    """The backend's class by the path that is registered."""
    PATHS.clear()
    interface = types.SimpleNamespace(
        AttentionBackend=type("AttentionBackend", (), {}),
        AttentionImpl=type("AttentionImpl", (Generic,), {}),
        AttentionMetadataBuilder=Builder,
        AttentionCGSupport=enum.Enum("AttentionCGSupport", ["UNIFORM_BATCH"]),
        AttentionType=types.SimpleNamespace(DECODER="decoder", ENCODER_ONLY="encoder_only"),
        MultipleOf=lambda base: ("multiple of", base),
    )
    registry = types.SimpleNamespace(AttentionBackendEnum=Custom, register_backend=PATHS.__setitem__)
    packages = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")
    stubs = {name: types.ModuleType(name) for name in packages}
    stubs |= {"vllm.v1.attention.backend": interface, "vllm.v1.attention.backends.registry": registry}
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "flashgen.compat.vllm_backend", raising=False)
    plugin.register()
    module, name = PATHS[Custom.CUSTOM].rsplit(".", 1)
    yield getattr(importlib.import_module(module), name)
    sys.modules.pop("flashgen.compat.vllm_backend", None)


def test_another_package_keeps_the_name(backend, caplog):
    PATHS[Custom.CUSTOM] = "theirs.Backend"
    plugin.register()
    assert PATHS[Custom.CUSTOM] == "theirs.Backend"
    assert "flashgen leaves it" in caplog.text


def test_what_the_backend_says_of_itself(backend):
    assert backend.get_name() == "CUSTOM"
    assert backend.get_kv_cache_shape(7, BLOCK, 2, 64) == (2, 7, BLOCK, 2, 64)
    assert backend.get_supported_kernel_block_sizes() == [("multiple of", BLOCK)]
    assert [backend.supports_head_size(x) for x in (64, 80, 100, 256, 264)] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert backend.supports_attn_type("decoder")
    assert not backend.supports_attn_type("encoder_only")
    for capability, served in ((75, False), (80, True), (90, True)):
        assert (
            backend.supports_compute_capability(types.SimpleNamespace(to_int=lambda x=capability: x))
            is served
        )


def common(new, before, table, causal=True):
    """CommonAttentionMetadata of sequences with these new tokens, after keys that are cached."""
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0)], dtype=torch.int32)
    lengths = torch.tensor(new, dtype=torch.int32) + torch.tensor(before, dtype=torch.int32)
    return types.SimpleNamespace(
        query_start_loc=starts,
        seq_lens=lengths,
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(new),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table,
        causal=causal,
    )


def formula(q, k, v, left, softcap, slopes, sinks):
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.2
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    if slopes is not None:
        scores = scores - torch.tensor(slopes)[:, None, None] * (rows - keys)
    hidden = keys > rows
    if left is not None:
        hidden |= keys < rows - left
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
        v = torch.cat((v, torch.zeros_like(v[:1])))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize(
    ("sliding_window", "softcap", "slopes", "has_sinks"),
    [
        (None, None, None, False),
        (7, 0.0, None, True),
        (None, 3.0, None, False),
        (None, None, [0.5] * 4, False),
    ],
)
def test_steps_of_a_server(backend, sliding_window, softcap, slopes, has_sinks):
    """A prompt, a step with a prompt beside it, and a step whose batch is padded, as by a CUDA graph."""
    torch.manual_seed(0)
    sinks = torch.randn(HEADS) if has_sinks else None
    layer = backend.get_impl_cls()(
        HEADS, WIDTH, 0.2, KV_HEADS, slopes, sliding_window, "auto", softcap, "decoder", None, sinks
    )
    config = types.SimpleNamespace(scheduler_config=types.SimpleNamespace(max_num_seqs=8))
    builder = backend.get_builder_cls()(None, ["layer"], config, torch.device("cpu"))
    kv_cache = torch.full(backend.get_kv_cache_shape(9, BLOCK, KV_HEADS, WIDTH), torch.nan)
    table = torch.tensor([[4, 1, 8], [6, 2, 0], [0, 0, 0]], dtype=torch.int32)
    seen = [[torch.zeros(0, KV_HEADS, WIDTH)] * 2 for _ in range(3)]
    memory = None
    for new in ([30, 0, 0], [1, 21, 0], [1, 1, 0]):
        before = [len(k) for k, _ in seen]
        batch = builder.build(0, common(new, before, table))
        assert memory in (None, batch.lengths.data_ptr())
        memory = batch.lengths.data_ptr()
        padding = 3  # rows of query and key that belong to no sequence
        q = torch.randn(sum(new) + padding, HEADS, WIDTH)
        k, v = (torch.randn(sum(new) + padding, KV_HEADS, WIDTH) for _ in "kv")
        output = torch.full((sum(new) + padding, HEADS, WIDTH), 7.0)
        assert layer.forward(None, q, k, v, kv_cache, batch, output) is output
        first = 0
        for b, count in enumerate(new):
            rows = slice(first, first + count)
            first += count
            seen[b] = [torch.cat((x, y[rows])) for x, y in zip(seen[b], (k, v), strict=True)]
            if count:
                left = None if sliding_window is None else sliding_window - 1
                right = formula(
                    q[rows].double(), *(x.double() for x in seen[b]), left, softcap, slopes, sinks
                )
                torch.testing.assert_close(output[rows].double(), right, atol=3e-5, rtol=3e-5)
        assert bool((output[first:] == 7).all())
    shared = backend.get_impl_cls()(
        HEADS, WIDTH, 0.2, KV_HEADS, slopes, sliding_window, "auto", softcap, "decoder", "other layer", sinks
    )
    again = torch.empty_like(output)
    shared.forward(None, q, None, None, kv_cache, batch, again)
    assert torch.equal(again[:first], output[:first])


def test_what_is_not_served_is_named(backend):
    impl = backend.get_impl_cls()
    with pytest.raises(NotImplementedError, match="attn_type is 'encoder_only'"):
        impl(HEADS, WIDTH, 0.2, attn_type="encoder_only")
    with pytest.raises(NotImplementedError, match="kv_cache_dtype is 'fp8'"):
        impl(HEADS, WIDTH, 0.2, kv_cache_dtype="fp8")
    layer, x = impl(HEADS, WIDTH, 0.2), torch.zeros(2, HEADS, WIDTH)
    assert bool((layer.forward(None, x, x, x, None, None, torch.ones_like(x)) == 0).all())
    with pytest.raises(NotImplementedError, match="output_scale was given"):
        layer.forward(None, x, x, x, None, None, x, output_scale=x)
    mixed = types.SimpleNamespace(causal=torch.ones(1, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="causal differs between the sequences"):
        layer.forward(None, x, x, x, None, mixed, x)
