"""Greedy generation with a decoder of the transformers library, whose attention is flashgen's.

    python examples/transformers_pages.py [--new-tokens N] [--tiny] [--seed N]

The model is made on the spot, a Llama with random weights. Prompts of several lengths are packed, not padded.
All layers keep their keys and values in pages, and on a GPU a step of decoding is one CUDA graph. The same
model generates with PyTorch's SDPA, by the library's own ``generate()``. In fp32 the tokens must be the same;
in bf16 both are timed. Needs PyTorch and transformers; without a GPU it runs a tiny model on the CPU.

flashgen comes in at two places: ``attention``, which transformers calls in every layer, and ``PagedCache``,
which knows where keys and values are.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import flashgen

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_SIZE = 16


@dataclass(frozen=True)
class Size:
    """How large the model is, and its prompts in tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    prompts: tuple[int, ...]
    new_tokens: int


TINY = Size(hidden=128, layers=2, heads=4, kv_heads=2, vocabulary=512, prompts=(5, 17, 9), new_tokens=12)
LARGE = Size(
    hidden=2048,
    layers=16,
    heads=16,
    kv_heads=4,
    vocabulary=32_000,
    prompts=(1000, 17, 400, 128, 640, 251, 33, 777),
    new_tokens=128,
)


class PagedCache:
    """Keys and values of all layers in pages, and which of them belong to which sequence. ``lengths`` are the
    tokens that each sequence has, on the device. While prompts are filled in, ``cu_seqlens`` says where they
    begin among the packed tokens.
    """

    def __init__(self, model: LlamaForCausalLM, batch: int, capacity: int) -> None:
        config, device = model.config, model.device
        each = -(-capacity // PAGE_SIZE)
        shape = (
            config.num_hidden_layers,
            batch * each,
            PAGE_SIZE,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.k, self.v = (torch.zeros(shape, dtype=model.dtype, device=device) for _ in "kv")
        # An engine hands out pages as sequences grow; here each has all that it will need, in no order.
        self.pages = torch.randperm(batch * each, device=device).to(torch.int32).view(batch, each)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.cu_seqlens: torch.Tensor | None = None
        self.longest = 0
        self._decode: flashgen.AppendPlan | None = None

    def attend(self, layer: int, q: Any, k: Any, v: Any, scale: float) -> torch.Tensor:
        """Append k and v of new tokens, (batch, tokens, heads, head_dim), and attend to all so far."""
        cache = flashgen.KVCache(self.k[layer], self.v[layer], self.lengths, pages=self.pages)
        if self.cu_seqlens is None:
            # All layers and steps have one layout, so they share one plan.
            if self._decode is None:
                self._decode = flashgen.plan(q, cache, append=(k, v), softmax_scale=scale)
            return self._decode(q, cache, (k, v))
        packed = {"cu_seqlens_q": self.cu_seqlens, "max_seqlen_q": self.longest}
        return flashgen.attention(
            q[0], cache, causal=True, append=(k[0], v[0]), softmax_scale=scale, **packed
        )[None]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    paged_cache: PagedCache,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer, with queries and keys that it has rotated, (batch, heads,
    tokens, head_dim). Keywords that the model's forward does not know, such as ``paged_cache``, come through.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return paged_cache.attend(module.layer_idx, q, k, v, scaling), None


# Of a name with "flash" transformers expects a package of kernels.
NAME = "paged_cache"
AttentionInterface.register(NAME, attention)


@torch.no_grad()
def generate(
    model: LlamaForCausalLM, prompts: list[torch.Tensor], count: int, in_graph: bool
) -> torch.Tensor:
    """The next ``count`` tokens of each prompt, (batch, count); nothing waits for the device."""
    model.set_attn_implementation(NAME)
    lengths = [len(prompt) for prompt in prompts]
    cache = PagedCache(model, len(prompts), max(lengths) + count)
    forward = partial(model, use_cache=False, paged_cache=cache)

    ends = torch.tensor([0, *lengths]).cumsum(0)
    cache.cu_seqlens, cache.longest = ends.to(model.device, torch.int32), max(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(model.device)
    last = (ends[1:] - 1).to(model.device)
    logits = forward(torch.cat(prompts)[None], position_ids=positions[None], logits_to_keep=last).logits[0]
    cache.lengths += cache.cu_seqlens.diff()
    cache.cu_seqlens = None

    token = logits.argmax(-1)
    found = torch.empty(len(prompts), count, dtype=token.dtype, device=model.device)
    found[:, 0] = token

    def step() -> None:
        positions = cache.lengths[:, None].long()
        token.copy_(forward(token[:, None], position_ids=positions).logits[:, -1].argmax(-1))
        cache.lengths += 1

    for index in range(1, count):
        if index == 2 and in_graph:  # the first step has compiled and loaded what it needs
            step = captured(step)
        step()
        found[:, index] = token
    return found


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph. It reads lengths on the device, so one graph serves all steps."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def generate_with_sdpa(model: LlamaForCausalLM, prompts: list[torch.Tensor], count: int) -> torch.Tensor:
    """The same by transformers: prompts padded on the left, a cache that grows, and SDPA."""
    model.set_attn_implementation("sdpa")
    longest = max(len(prompt) for prompt in prompts)
    shape = (len(prompts), longest)
    tokens, mask = (torch.zeros(shape, dtype=torch.int64, device=model.device) for _ in "tm")
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    options = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count}
    return model.generate(tokens, attention_mask=mask, **options)[:, longest:]


def make(size: Size, device: str, seed: int) -> tuple[LlamaForCausalLM, list[torch.Tensor]]:
    """A model in fp32 with random weights, and random prompts."""
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=max(size.prompts) + size.new_tokens,
        initializer_range=2 * size.hidden**-0.5,  # so that scores differ, and heads attend to some keys
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
        prompts = [torch.randint(1, size.vocabulary, (length,)) for length in size.prompts]
    return model, prompts


@torch.no_grad()
def first_wrong(
    model: LlamaForCausalLM, prompts: list[torch.Tensor], expected: torch.Tensor, found: torch.Tensor
) -> tuple[int, int] | None:
    """The token and the prompt where ``found`` first leaves ``expected``, or None. Where two tokens are as
    likely but for the last bits of fp32, either is right, and what follows cannot be compared.
    """
    model.set_attn_implementation("sdpa")
    for number, prompt in enumerate(prompts):
        different = (found[number] != expected[number]).nonzero()
        if len(different):
            index = int(different[0])
            tokens = torch.cat((prompt, expected[number, :index]))
            logits = model(tokens[None], use_cache=False).logits[0, -1]
            if logits[expected[number, index]] - logits[found[number, index]] > 1e-3 * logits.std():
                return index, number
    return None


def seconds(call: Callable[[], torch.Tensor]) -> float:
    """Of the second call: the first one compiles."""
    for _ in range(2):
        wait()
        start = time.perf_counter()
        call()
        wait()
    return time.perf_counter() - start


def wait() -> None:
    """For the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> int:
    """Compare tokens, print rates; the exit code is 1 where a token differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--new-tokens", type=int, help="of each prompt; by default 128, of the tiny model 12")
    parser.add_argument("--tiny", action="store_true", help="the model that is taken without a GPU")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    options = parser.parse_args(arguments)
    if options.new_tokens is not None and options.new_tokens < 1:
        parser.error(f"--new-tokens is {options.new_tokens}; it must be at least 1")
    on_gpu = torch.cuda.is_available()
    size = LARGE if on_gpu and not options.tiny else TINY
    count = size.new_tokens if options.new_tokens is None else options.new_tokens
    model, prompts = make(size, "cuda" if on_gpu else "cpu", options.seed)

    expected = generate_with_sdpa(model, prompts, count)
    found = generate(model, prompts, count, in_graph=on_gpu)
    wrong = first_wrong(model, prompts, expected, found)
    if wrong is not None:
        print("fp32: token {} of prompt {} is not SDPA's".format(*wrong))
        return 1
    same = (found == expected).sum()
    print(f"fp32: {same} of {found.numel()} tokens as with SDPA, {len(prompts)} prompts, {count} tokens each")

    model.to(torch.bfloat16)
    calls = {"SDPA, generate()": partial(generate_with_sdpa, model, prompts, count)}
    calls["flashgen"] = partial(generate, model, prompts, count, in_graph=False)
    if on_gpu:
        calls["flashgen, a CUDA graph"] = partial(generate, model, prompts, count, in_graph=True)
    for name, call in calls.items():
        print(f"bf16: {found.numel() / seconds(call):8.0f} tokens/s  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
