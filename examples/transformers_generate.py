"""Generation with a transformers model whose attention is flashgen's: padded prompts, greedy."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flashgen.compat.transformers

flashgen.compat.transformers.register()
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=512, attn_implementation="fgen")
model = LlamaForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu").eval()
prompts = torch.randint(1, 512, (2, 16), device=model.device)
visible = (torch.arange(16, device=model.device) >= torch.tensor([[5], [0]], device=model.device)).long()
print(model.generate(prompts, attention_mask=visible, max_new_tokens=24, do_sample=False, pad_token_id=0))
