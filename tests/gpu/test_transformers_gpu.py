"""The example of generation by transformers, on a GPU in a CUDA graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


def test_generation_by_transformers_has_the_tokens_of_sdpa():
    command = [sys.executable, ROOT / "examples" / "transformers_pages.py", "--tiny", "--new-tokens", "24"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens as with SDPA, 3 prompts, 24 tokens each" in done.stdout
    assert "flashgen, a CUDA graph" in done.stdout


def generated(model, ids, **options):
    return model.generate(ids, do_sample=False, max_new_tokens=16, pad_token_id=0, **options)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_fgen_generates_the_tokens_of_eager_attention(name, cache):
    """In fp32, where two tokens are hardly ever as likely; padded on the left; the static cache compiled."""
    import torch
    import transformers

    from flashgen.compat.transformers import register

    register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(
        **sizes, num_key_value_heads=2, head_dim=64, vocab_size=512, initializer_range=0.1
    )
    if name != "Llama":
        config.sliding_window = 24
    model = getattr(transformers, f"{name}ForCausalLM")(config).cuda().eval()
    ids = torch.randint(1, 512, (2, 40), device="cuda")
    visible = (torch.arange(40, device="cuda") >= torch.tensor([[13], [0]], device="cuda")).long()
    options = {"attention_mask": visible, "cache_implementation": cache}
    model.set_attn_implementation("eager")
    right = generated(model, ids, **options, disable_compile=True)
    logits = model(input_ids=ids, attention_mask=visible).logits
    model.set_attn_implementation("fgen")
    assert torch.equal(generated(model, ids, **options), right)
    found = model(input_ids=ids, attention_mask=visible).logits
    torch.testing.assert_close(found[visible.bool()], logits[visible.bool()], rtol=2e-3, atol=2e-3)


def test_a_step_of_training_in_bf16_is_near_eager_attention():
    import copy

    import torch
    import transformers

    from flashgen.compat.transformers import register

    register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=512)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    ids = torch.randint(1, 512, (2, 200), device="cuda")
    visible = (torch.arange(200, device="cuda") >= torch.tensor([[50], [0]], device="cuda")).long()
    labels = ids.masked_fill((visible == 0) | (visible.cumsum(-1) == 1), -100)
    gradients = []
    for implementation in ("eager", "fgen"):
        other = copy.deepcopy(model).train()
        other.set_attn_implementation(implementation)
        other(input_ids=ids, attention_mask=visible, labels=labels).loss.backward()
        gradients.append(other.model.layers[0].self_attn.v_proj.weight.grad.float())
    right, found = gradients
    assert (found - right).norm() < 0.05 * right.norm()
