"""Greedy generation with a DeepSeek-V3 of transformers that decodes in latent space, on flashgen.

    python examples/deepseek_latent.py [--new-tokens N] [--seed N]

The model is tiny and has random weights. `LatentAttention` replaces the attention of each layer. Its cache
has one row of 512 + 64 elements for each token. Keys and values are never expanded: the up-projections are
applied to the queries and to the result. The tokens are compared with the tokens of the same model with
transformers' eager attention, which expands keys and values. Needs PyTorch and transformers, no GPU.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import flashgen

PAGE_SIZE = 64
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # so that scores differ
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


class LatentAttention(torch.nn.Module):
    """The attention of a layer over a latent cache, with the weights of ``layer``, a DeepseekV3Attention.

    pages: int32 (batch, pages of a sequence), for all layers.
    lengths: int32 (batch,), the tokens of each sequence before the call.
    rotary: cosines and sines of all positions.
    """

    def __init__(
        self, layer: Any, pages: torch.Tensor, lengths: torch.Tensor, rotary: flashgen.Rotary
    ) -> None:
        super().__init__()
        self.layer, self.pages, self.lengths, self.rotary = layer, pages, lengths, rotary
        weight = layer.kv_b_proj.weight
        width = layer.kv_lora_rank + layer.qk_rope_head_dim
        self.latent = torch.zeros(
            pages.numel(), PAGE_SIZE, 1, width, dtype=weight.dtype, device=weight.device
        )
        # Of each head: from the latent to its keys, and to its values.
        heads = weight.view(layer.num_heads, -1, layer.kv_lora_rank)
        self.up_k, self.up_v = heads.split((layer.qk_nope_head_dim, layer.v_head_dim), 1)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """What a decoder layer calls, with (batch, tokens, hidden); its other arguments are not needed."""
        layer, (batch, count) = self.layer, hidden_states.shape[:2]
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden_states)))
        q = q.view(batch, count, layer.num_heads, layer.qk_head_dim)
        q_nope, q_rope = q.split((layer.qk_nope_head_dim, layer.qk_rope_head_dim), -1)
        q = torch.cat((torch.einsum("bnhd,hdl->bnhl", q_nope, self.up_k), q_rope), -1)

        row = layer.kv_a_proj_with_mqa(hidden_states)
        latent, k_rope = row.split((layer.kv_lora_rank, layer.qk_rope_head_dim), -1)
        row = torch.cat((layer.kv_a_layernorm(latent), k_rope), -1)[:, :, None]
        cache = flashgen.KVCache(
            self.latent, None, self.lengths, pages=self.pages, head_dim_v=layer.kv_lora_rank
        )
        out = flashgen.attention(
            q, cache, append=(row, None), rotary=self.rotary, causal=True, softmax_scale=layer.scaling
        )
        out = torch.einsum("bnhl,hdl->bnhd", out, self.up_v)
        return layer.o_proj(out.flatten(2)), None


@torch.no_grad()
def generate(model: DeepseekV3ForCausalLM, prompts: torch.Tensor, count: int) -> torch.Tensor:
    """The next ``count`` tokens of prompts of one length, (batch, tokens), by `LatentAttention`."""
    batch, longest = len(prompts), prompts.shape[1] + count
    number = -(-longest // PAGE_SIZE)
    pages = torch.randperm(batch * number, device=model.device).to(torch.int32).view(batch, number)
    lengths = torch.zeros(batch, dtype=torch.int32, device=model.device)
    positions = torch.arange(longest, device=model.device)[None]
    angles = model.model.rotary_emb(model.lm_head.weight, positions)  # twice side by side
    cos, sin = (x[0].chunk(2, -1)[0].contiguous() for x in angles)
    rotary = flashgen.Rotary(cos, sin, interleaved=model.config.rope_interleave)
    of_layers = [layer.self_attn for layer in model.model.layers]
    for layer in model.model.layers:
        layer.self_attn = LatentAttention(layer.self_attn, pages, lengths, rotary)
    try:
        tokens, results = prompts, []
        for _ in range(count):
            position = lengths[:, None] + torch.arange(tokens.shape[1], device=model.device)
            logits = model(tokens, position_ids=position, use_cache=False, logits_to_keep=1).logits
            lengths += tokens.shape[1]
            tokens = logits.argmax(-1)
            results.append(tokens)
    finally:
        for layer, attention in zip(model.model.layers, of_layers, strict=True):
            layer.self_attn = attention
    return torch.cat(results, 1)


def main(arguments: list[str] | None = None) -> int:
    """Compare tokens; the exit code is 1 where one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    # No GPU kernel of a latent cache computes in fp32, in which the tokens of both are the same.
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, attn_implementation="eager")).eval()
    prompts = torch.randint(1, SIZES["vocab_size"], (3, 70))
    expected = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=options.new_tokens, do_sample=False
    )[:, prompts.shape[1] :]
    if not torch.equal(generate(model, prompts, options.new_tokens), expected):
        print("fp32, CPU: the tokens are not those of eager attention")
        return 1
    print(f"fp32, CPU: {expected.numel()} tokens as with eager attention")
    if torch.cuda.is_available():
        model, prompts = model.to("cuda", torch.bfloat16), prompts.cuda()
        found = generate(model, prompts, options.new_tokens).cpu()
        print(f"bf16, GPU: {(found == expected).sum()} of {expected.numel()} tokens as in fp32")
    return 0


if __name__ == "__main__":
    sys.exit(main())
