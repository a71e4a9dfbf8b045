"""flashgen as an attention implementation of transformers, beside its eager one, on tiny models."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from transformers.masking_utils import sliding_window_causal_mask_function  # noqa: E402

from flashgen import errors  # noqa: E402
from flashgen.compat import transformers as compat  # noqa: E402

pytestmark = pytest.mark.extra

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # so that scores differ
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 5, "head_dim": 16},
    "Gemma2": {"sliding_window": 5, "head_dim": 24, "attn_logit_softcapping": 3.0},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "GptOss": {"sliding_window": 5, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}
TOKENS = 12


@pytest.fixture(autouse=True)
def registered():
    compat.register()


def model_of(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "sinks"):
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def tokens(batch=2):
    return torch.randint(1, SIZES["vocab_size"], (batch, TOKENS))


def padding(kind):
    """(batch, tokens), true where there is no padding."""
    visible = torch.ones(2, TOKENS, dtype=torch.int64)
    if kind == "left":
        visible[0, :5] = 0
    elif kind == "right":
        visible[1, 7:] = 0
    elif kind == "both":
        visible[0, :3], visible[1, 9:] = 0, 0
    elif kind == "between":
        visible[0, 3:5] = 0
    return visible


def both(model, function):
    """What ``function`` returns by eager attention, and by flashgen."""
    results = []
    for implementation in ("eager", compat.NAME):
        model.set_attn_implementation(implementation)
        results.append(function(model))
    return results


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_eager_attention(name):
    model, ids = model_of(name), tokens()
    for kind in ("none", "left", "right", "both", "between"):
        visible = padding(kind)
        with torch.no_grad():
            right, found = both(model, lambda m, x=visible: m(input_ids=ids, attention_mask=x).logits)
        torch.testing.assert_close(found[visible.bool()], right[visible.bool()], rtol=1e-3, atol=1e-3)
    positions = torch.tensor([[*range(4), *range(8)]])  # two sequences in one row
    with torch.no_grad():
        right, found = both(
            model, lambda m: m(input_ids=ids[:1], position_ids=positions, use_cache=False).logits
        )
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_those_of_eager_attention(name, cache):
    model, ids = model_of(name), tokens()
    options = {"max_new_tokens": 7, "do_sample": False, "cache_implementation": cache}
    for kind in ("none", "left", "between") if name == "Llama" else ("left",):
        visible = padding(kind)
        right, found = both(
            model, lambda m, x=visible: m.generate(ids, attention_mask=x, disable_compile=True, **options)
        )
        assert torch.equal(found, right), kind


class LowRank(torch.nn.Module):
    """A linear layer whose weight is frozen, with a trained update of rank 2, as PEFT makes it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(2, layer.in_features) / 4)
        self.up = torch.nn.Parameter(torch.randn(layer.out_features, 2) / 4)

    def forward(self, x):
        return self.layer(x) + x @ self.down.t() @ self.up.t()


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_a_step_of_low_rank_training_is_that_of_eager_attention(name):
    base, ids, visible = model_of(name).requires_grad_(False), tokens(), padding("left")
    for layer in base.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    # Nor does padding predict the first token.
    labels = ids.masked_fill((visible == 0) | (visible.cumsum(-1) == 1), -100)

    def step(model):
        model = copy.deepcopy(model).train()
        optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.1)
        loss = model(input_ids=ids, attention_mask=visible, labels=labels).loss
        loss.backward()
        optimizer.step()
        return [loss.detach(), *(x for x in model.parameters() if x.requires_grad)]

    right, found = both(base, step)
    assert len(found) == 1 + 4 * SIZES["num_hidden_layers"]
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3)


def test_packed_sequences_by_their_ends():
    """As collators without padding pass them; the mask of position_ids is not needed then."""
    model, ids = model_of("Mistral"), tokens(1)
    ends = torch.tensor([0, 4, TOKENS])
    positions = torch.tensor([[*range(4), *range(8)]])
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 8, "max_length_k": 8}
    with torch.no_grad():
        model.set_attn_implementation("eager")
        right = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        model.set_attn_implementation(compat.NAME)
        found = model(input_ids=ids, position_ids=positions, use_cache=False, **packed).logits
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)


def test_masks_of_the_caller_are_served():
    model, ids = model_of("Llama"), tokens()
    visible = torch.rand(2, 1, TOKENS, TOKENS) < 0.6
    visible |= torch.eye(TOKENS, dtype=torch.bool)
    added = torch.where(visible, torch.randn(visible.shape), torch.finfo(torch.float32).min)
    with torch.no_grad():
        right, found = both(model, lambda m: m(input_ids=ids, attention_mask=added).logits)
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)
        model.set_attn_implementation("sdpa")
        right = model(input_ids=ids, attention_mask=visible).logits
        model.set_attn_implementation(compat.NAME)
        found = model(input_ids=ids, attention_mask=visible).logits
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)


def test_an_encoder_sees_both_sides():
    torch.manual_seed(0)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    config = transformers.BertConfig(**{name: SIZES[name] for name in names})
    model, ids = transformers.BertModel(config).eval(), tokens()
    for kind in ("none", "right"):
        visible = padding(kind)
        with torch.no_grad():
            right, found = both(
                model, lambda m, x=visible: m(input_ids=ids, attention_mask=x).last_hidden_state
            )
        kept = visible.bool()
        torch.testing.assert_close(found[kept], right[kept], rtol=1e-3, atol=1e-3)


def test_a_compiled_forward_pass_sees_no_padding():
    model, ids, visible = model_of("Mistral"), tokens(), padding("left")
    kept = visible.bool()
    with torch.no_grad():
        right, _ = both(model, lambda m: m(input_ids=ids, attention_mask=visible).logits)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        found = compiled(input_ids=ids, attention_mask=visible).logits
    torch.testing.assert_close(found[kept], right[kept], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "options", "shape"),
    [
        ("none", {}, (2, 1, 1, 0)),
        ("right", {}, (2, 1, 1, 0)),
        ("none", {"mask_function": sliding_window_causal_mask_function(5)}, (2, 1, 5, 0)),
        ("left", {"mask_function": sliding_window_causal_mask_function(5)}, (2, 1, 5, 3)),
        ("none", {"q_offset": torch.tensor(0), "kv_length": 40}, (2, 1, 1, 1)),
        ("left", {"q_offset": 0, "kv_length": 40}, (2, 1, 1, 2)),
    ],
)
def test_a_range_of_keys_takes_no_dense_mask(kind, options, shape):
    arguments = {"batch_size": 2, "q_length": TOKENS, "kv_length": TOKENS, "attention_mask": padding(kind)}
    ranges = compat.mask(**arguments | options)
    assert (ranges.dtype, ranges.shape) == (torch.int32, shape)
    if shape[-1] in (2, 3):
        assert ranges[:, 0, 0, 0].tolist() == [5, 0]
    if shape[-1] in (1, 2):
        assert ranges[:, 0, 0, -1].tolist() == [TOKENS, TOKENS]


@pytest.mark.parametrize("name", ["flash", "my_Flash_2", 3])
def test_a_name_that_transformers_takes_for_a_package_is_refused(name):
    with pytest.raises(errors.BadParam, match=r"name is .*; expected a string without 'flash'"):
        compat.register(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_bias": torch.zeros(1, 4, 6, 6)}, "position_bias was given"),
        ({"block_table": torch.zeros(2, 3)}, "block_table was given"),
        ({"attention_mask": torch.ones(2, 6)}, r"attention_mask has shape \(2, 6\)"),
        (
            {"attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.int64)},
            r"attention_mask has dtype torch\.int64",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(options, message):
    query, key, value = (torch.randn(2, heads, 6, 16) for heads in (4, 2, 2))
    arguments = {"attention_mask": None} | options
    with pytest.raises(NotImplementedError, match=message):
        compat.attention_forward(torch.nn.Identity(), query, key, value, **arguments)
    with pytest.raises(errors.BadTensorDtype, match=r"^key has dtype fp16 but query has fp32"):
        compat.attention_forward(torch.nn.Identity(), query, key.half(), value.half(), None)


@pytest.mark.parametrize("kind", ["none", "left", "right", "both", "between"])
@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_those_of_eager_attention(name, kind):
    ids, visible = tokens(), padding(kind)

    def weights(model):
        return model(input_ids=ids, attention_mask=visible, output_attentions=True).attentions

    expected, found = both(model_of(name), weights)
    assert len(found) == SIZES["num_hidden_layers"]
    rows = visible.bool()[:, None, :, None].expand_as(expected[0])  # of tokens that are no padding
    for x, y in zip(found, expected, strict=True):
        assert x.shape == (2, SIZES["num_attention_heads"], TOKENS, TOKENS)
        torch.testing.assert_close(x[rows], y[rows], rtol=1e-4, atol=1e-5)


def test_weights_while_a_static_cache_grows():
    """Also with queries that are fewer than the keys, whose number is on the device."""
    model, ids = model_of("Llama"), tokens()

    def steps(model):
        cache = transformers.StaticCache(model.config, max_cache_len=2 * TOKENS)
        parts = [ids[:, :7], ids[:, 7:8], ids[:, 8:]]
        return [model(input_ids=x, past_key_values=cache, output_attentions=True).attentions for x in parts]

    for expected, found in zip(*both(model, steps), strict=True):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"cu_seq_lens_q": torch.tensor([0, 6]), "cu_seq_lens_k": torch.tensor([0, 6])}, "output_attentions"),
    ],
)
def test_weights_that_are_not_served_are_refused_by_name(options, message):
    query, key, value = (torch.randn(1, heads, 6, 16) for heads in (4, 2, 2))
    if "cu_seq_lens_q" in options:
        options |= {"max_length_q": 6, "max_length_k": 6}
    with pytest.raises(errors.BadParam, match=message):
        compat.attention_forward(
            torch.nn.Identity(), query, key, value, None, output_attentions=True, **options
        )


def test_training_with_dropout():
    model = model_of("Llama")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.set_attn_implementation(compat.NAME)
    ids = tokens()
    without = model.eval()(input_ids=ids).logits
    model.train()
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        results.append(model(input_ids=ids, labels=ids))
    assert torch.equal(results[0].logits, results[1].logits)
    assert not torch.equal(results[0].logits, without)
    results[0].loss.backward()
    assert all(torch.isfinite(x.grad).all() for x in model.parameters())
    with pytest.raises(errors.BadParam, match=r"dropout is 0\.1 and attention_mask was given"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0))


def test_autocast_casts_as_for_sdpa():
    model, ids = model_of("Llama"), tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.set_attn_implementation("sdpa")
        right = model(input_ids=ids).logits
        model.set_attn_implementation(compat.NAME)
        found = model(input_ids=ids).logits
    torch.testing.assert_close(found, right, rtol=0.1, atol=0.3)
