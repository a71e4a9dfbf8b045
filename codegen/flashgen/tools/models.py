"""The calls of common models, whose kernels `flashgen bundle --models` puts together.

A model counts by what dispatch sees of it: heads, head dimension, mask, score, sinks. The calls are the ones
that training and serving it make, at a few lengths and batches: dispatch takes another tile where a GPU has
too little work to fill it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashgen.call.kvcache import KVCache, Rotary

if TYPE_CHECKING:
    from collections.abc import Iterator

# The architectures that a bundle of all models is for.
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90")
_PAGE, _CAPACITY = 16, 8192
# (batch, length) of a training step or a prompt, and of a cache that is decoded from.
_LONG = ((1, 512), (1, 2048), (1, 8192), (1, 32768), (8, 512), (8, 2048), (8, 8192), (64, 128), (64, 512))
_DECODED = ((1, 1024), (1, 8192), (8, 1024), (8, 8192), (64, 1024), (64, 8192))


@dataclass(frozen=True)
class Model:
    """``of`` has published models with these heads. A causal one generates text, by caches. ``layers`` has
    the options of each type of layer. ``dtypes`` are the types it is trained in.
    """

    of: str
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int | None = None
    layers: tuple[dict[str, Any], ...] = field(default=({"causal": True},))
    causal: bool = True


def _window(keys: int, **options: Any) -> dict[str, Any]:
    return {"window_size": (keys - 1, 0), **options}


_CAPPED = {"softcap": 50.0}
MODELS = (
    Model("Llama 3 8B, Qwen 3 8B, Mistral", 32, 8, 128, layers=({"causal": True}, _window(4096))),
    Model("Llama 3 70B, Qwen 2.5 72B", 64, 8, 128),
    Model("Qwen 2.5 7B", 28, 4, 128),
    Model("Qwen 3 30B-A3B", 32, 4, 128),
    Model("Llama 2 7B, OLMo", 32, 32, 128),
    Model("Llama 3.2 1B", 32, 8, 64),
    Model("Qwen 2.5 0.5B", 14, 2, 64),
    Model("GPT-2, Whisper", 12, 12, 64),
    Model("GPT-OSS", 64, 8, 64, layers=({"causal": True, "sinks": (64,)}, _window(128, sinks=(64,)))),
    Model("Phi 3 mini", 32, 32, 96),
    Model("Gemma 2 9B", 16, 8, 256, layers=({"causal": True, **_CAPPED}, _window(4096, **_CAPPED))),
    Model("Gemma 3 4B", 8, 4, 256, layers=({"causal": True}, _window(1024))),
    Model("DeepSeek V3", 128, 128, 192, 128),
    Model("BERT, ViT-B", 12, 12, 64, layers=({},), causal=False),
    Model("ViT-L, Stable Diffusion 3", 16, 16, 64, layers=({},), causal=False),
    Model("Flux, Wan", 24, 24, 128, layers=({},), causal=False),
)


def calls() -> Iterator[dict[str, Any]]:
    """The calls of all models, as `warmup` takes them: gradients in bf16, the rest in fp16 and bf16."""
    for model in MODELS:
        for options in model.layers:
            for call in _of_layer(model, options):
                dtypes = ("bf16",) if call.get("operator") == "attention_backward" else ("fp16", "bf16")
                for dtype in dtypes:
                    yield {**call, "dtype": dtype}


def _of_layer(model: Model, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for batch, length in _LONG:
        for call in (_padded(model, batch, length), _packed(model, batch, length)):
            yield call | options
            yield call | options | {"operator": "attention_backward"}
    if not model.causal:
        return
    for batch, length in _DECODED:
        for paged in (False, True):
            cache = _cache(model, batch, length, paged)
            for new in (1, length // 4):
                yield {"q": (batch, new, model.heads_q, model.head_dim), "k": cache} | options
            yield _append(model, batch, cache)


def _padded(model: Model, *leading: int) -> dict[str, Any]:
    """q, k and v with these dimensions before the heads."""
    keys = (*leading, model.heads_kv, model.head_dim)
    values = (*keys[:-1], model.head_dim_v or model.head_dim)
    return {"q": (*leading, model.heads_q, model.head_dim), "k": keys, "v": values}


def _packed(model: Model, batch: int, length: int) -> dict[str, Any]:
    ends, longest = (batch + 1,), {"max_seqlen_q": length, "max_seqlen_kv": length}
    return _padded(model, batch * length) | {"cu_seqlens_q": ends, "cu_seqlens_kv": ends} | longest


def _cache(model: Model, batch: int, length: int, paged: bool) -> KVCache:
    pages = length // _PAGE
    held = _padded(model, *((batch * pages, _PAGE) if paged else (batch, length)))
    return KVCache(held["k"], held["v"], (batch,), pages=(batch, pages) if paged else None)


def _append(model: Model, batch: int, cache: KVCache) -> dict[str, Any]:
    new = _padded(model, batch, 1)
    table = (_CAPACITY, model.head_dim // 2)
    call = {"operator": "append", "cache": cache, "k_new": new["k"], "v_new": new["v"]}
    return call | {"rotary": Rotary(table, table)}
