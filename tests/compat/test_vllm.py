"""flashgen as a backend of vLLM, against stubs of the interface (vllm.v1.attention) as far as it is used, and
against vLLM's own classes where vLLM can be imported, which it can be on a machine without a GPU. Neither is
a proof that it runs in a server.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from flashgen.compat import vllm as plugin  # noqa: E402

BLOCK, HEADS, WIDTH = 16, 4, 32
# vLLM's layouts of a cache of several layers: the logical dimensions (layers, blocks, kv_heads, block size,
# head_size of k and of v) in their order in memory.
LAYOUTS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BHLNC": (1, 2, 0, 3, 4)}


class Custom(enum.Enum):
    """AttentionBackendEnum, with the place for others."""

    CUSTOM = None

    def is_overridden(self):
        return self in PATHS

    def get_path(self):
        return PATHS[self]

    def clear_override(self):
        PATHS.pop(self, None)


PATHS = {}


class Generic:
    def __class_getitem__(cls, _):
        return cls


class Builder(Generic):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device


def stub_modules(monkeypatch):
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


@pytest.fixture(params=["stubs", "vllm"])
def custom(request, monkeypatch):
    """vLLM's name for the backends of others, which flashgen has taken."""
    if request.param == "stubs":
        stub_modules(monkeypatch)
    else:
        pytest.importorskip("vllm.v1.attention.backend")
    monkeypatch.delitem(sys.modules, "flashgen.compat.vllm_backend", raising=False)
    name = importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum.CUSTOM
    name.clear_override()
    plugin.register()
    yield name
    name.clear_override()
    sys.modules.pop("flashgen.compat.vllm_backend", None)


@pytest.fixture
def backend(custom):
    """The backend's class by the path that is registered."""
    module, name = custom.get_path().rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def test_another_package_keeps_the_name(custom, caplog):
    plugin.register()
    assert not caplog.records
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    registry.register_backend(custom, "theirs.Backend")
    plugin.register()
    assert custom.get_path() == "theirs.Backend"
    assert "flashgen leaves it" in caplog.text


def test_what_the_backend_says_of_itself(backend):
    assert backend.get_name() == "CUSTOM"
    multiple_of = importlib.import_module("vllm.v1.attention.backend").MultipleOf
    assert backend.get_supported_kernel_block_sizes() == [multiple_of(BLOCK)]
    assert [backend.supports_head_size(x) for x in (64, 80, 100, 256, 264)] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert backend.supports_attn_type("decoder")
    assert not backend.supports_attn_type("encoder_only")
    assert backend.supports_sink()
    assert backend.supports_sliding_window()
    for capability, served in ((75, False), (80, True), (90, True)):
        assert (
            backend.supports_compute_capability(types.SimpleNamespace(to_int=lambda x=capability: x))
            is served
        )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"has_sink": True, "has_sliding_window": True}, None),
        ({"head_size": 260}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"block_size": 8}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"attn_type": "encoder"}, "attention type encoder not supported"),
    ],
)
@pytest.mark.parametrize("custom", ["vllm"], indirect=True)
def test_vllm_takes_it_where_it_serves(changes, reason, backend):
    """By vLLM's own check of a backend, before a server starts."""
    interface = importlib.import_module("vllm.platforms.interface")
    asked = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "device_capability": interface.DeviceCapability(9, 0),
        "attn_type": "decoder",
    }
    asked |= dict.fromkeys(
        ("use_mla", "has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales"), False
    )
    assert backend.validate_configuration(**asked | changes) == ([reason] if reason else [])


def cache_of(layout, blocks, kv_heads):
    """A layer's cache of two layers, as vLLM hands it over: (blocks, kv_heads, block size, 2 * head_size)."""
    order = LAYOUTS[layout]
    sizes = (2, blocks, kv_heads, BLOCK, 2 * WIDTH)
    memory = torch.full([sizes[i] for i in order], torch.nan)
    return memory.permute([order.index(i) for i in range(5)])[1]


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
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
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
    ("layout", "kv_heads", "sliding_window", "softcap", "slopes", "has_sinks"),
    [
        ("LBHNC", 2, None, None, None, False),
        ("LBNHC", 2, 7, 0.0, None, True),
        ("BHLNC", 1, None, 3.0, None, False),
        ("LBHNC", 1, None, None, [0.5] * 4, False),
    ],
)
def test_steps_of_a_server(backend, layout, kv_heads, sliding_window, softcap, slopes, has_sinks):
    """A prompt, a step with a prompt beside it, and a step whose batch is padded, as by a CUDA graph."""
    torch.manual_seed(0)
    sinks = torch.randn(HEADS) if has_sinks else None
    layer = backend.get_impl_cls()(
        HEADS, WIDTH, 0.2, kv_heads, slopes, sliding_window, "auto", softcap, "decoder", None, sinks
    )
    config = types.SimpleNamespace(scheduler_config=types.SimpleNamespace(max_num_seqs=8))
    builder = backend.get_builder_cls()(None, ["layer"], config, torch.device("cpu"))
    kv_cache = cache_of(layout, 9, kv_heads)
    table = torch.tensor([[4, 1, 8], [6, 2, 0], [0, 0, 0]], dtype=torch.int32)
    seen = [[torch.zeros(0, kv_heads, WIDTH)] * 2 for _ in range(3)]
    memory = None
    for new in ([30, 0, 0], [1, 21, 0], [1, 1, 0]):
        before = [len(k) for k, _ in seen]
        batch = builder.build(0, common(new, before, table))
        assert memory in (None, batch.lengths.data_ptr())
        memory = batch.lengths.data_ptr()
        padding = 3  # rows of query and key that belong to no sequence
        q = torch.randn(sum(new) + padding, HEADS, WIDTH)
        k, v = (torch.randn(sum(new) + padding, kv_heads, WIDTH) for _ in "kv")
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
        HEADS, WIDTH, 0.2, kv_heads, slopes, sliding_window, "auto", softcap, "decoder", "other layer", sinks
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
