"""The calls of common models, whose kernels `flashgen bundle --models` puts together.

A model counts by what dispatch sees of it: heads, head dimension, mask, score, sinks. The calls are the ones
that training and serving it make, at a few lengths and batches: dispatch takes another tile where a GPU has
too little work to fill it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashgen.call.kvcache import KVCache, Rotary
from flashgen.families.arch import arch_parts, reaches
from flashgen.operators.latentrows import LAYOUT, ROW_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

# The architectures that a bundle of all models is for, and the first whose tensor cores multiply e4m3 codes.
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90")
_FIRST_WITH_FP8 = "sm_89"
_CAPACITY = 8192
# Keys of a page, 0 for a cache without pages. Latent caches have kernels for pages of 64.
_PAGES, _LATENT_PAGES = (0, 16), (0, 16, 64)
# (batch, length) of a training step or a prompt, and of a cache that is decoded from.
_LONG = ((1, 512), (1, 2048), (1, 8192), (1, 32768), (8, 512), (8, 2048), (8, 8192), (64, 128), (64, 512))
_DECODED = ((1, 1024), (1, 8192), (8, 1024), (8, 8192), (64, 1024), (64, 8192))


@dataclass(frozen=True)
class Latent:
    """A cache of MLA: rows of ``width`` elements, the last ``rotary`` of which are rotated. Values are the
    elements before these. ``listed`` is how many tokens each query attends to, if it has a list of them.
    """

    width: int = 576
    rotary: int = 64
    listed: int | None = None


@dataclass(frozen=True)
class Model:
    """``of`` has published models with these heads. A causal one generates text, by caches: of keys and
    values, or ``latent`` ones. ``layers`` has the options of each type of layer. With ``fp8`` its layers are
    also computed from e4m3 codes.
    """

    of: str
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int | None = None
    layers: tuple[dict[str, Any], ...] = field(default=({"causal": True},))
    causal: bool = True
    latent: Latent | None = None
    fp8: bool = False


def _window(keys: int, **options: Any) -> dict[str, Any]:
    return {"window_size": (keys - 1, 0), **options}


_CAPPED = {"softcap": 50.0}
MODELS = (
    Model("Llama 3 8B, Qwen 3 8B, Mistral", 32, 8, 128, layers=({"causal": True}, _window(4096)), fp8=True),
    Model("Llama 3 70B, Qwen 2.5 72B", 64, 8, 128, fp8=True),
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
    Model("DeepSeek V3", 128, 128, 192, 128, latent=Latent()),
    Model("DeepSeek V3.2", 128, 128, 192, 128, latent=Latent(listed=2048)),
    Model("Kimi K2", 64, 64, 192, 128, latent=Latent()),
    Model("DeepSeek V2 Lite", 16, 16, 192, 128, latent=Latent()),
    Model("BERT, ViT-B", 12, 12, 64, layers=({},), causal=False),
    Model("ViT-L, Stable Diffusion 3", 16, 16, 64, layers=({},), causal=False),
    Model("Flux, Wan", 24, 24, 128, layers=({},), causal=False, fp8=True),
)


def calls(arch: str) -> Iterator[dict[str, Any]]:
    """The calls of all models on an architecture, as `warmup` takes them.

    Gradients and caches of codes in bf16, e4m3 codes where the tensor cores multiply them, the rest in fp16
    and bf16.
    """
    for model in MODELS:
        for options in model.layers:
            for call in _of_layer(model, options):
                yield from ({**call, "dtype": dtype} for dtype in _dtypes(call))
            if model.fp8 and reaches(arch_parts(arch)[0], _FIRST_WITH_FP8):
                yield from (_padded(model, *sizes) | options | {"dtype": "e4m3"} for sizes in _LONG)


def _dtypes(call: dict[str, Any]) -> tuple[str, ...]:
    cache = call.get("k", call.get("cache"))
    of_codes = isinstance(cache, KVCache) and cache.kv_dtype is not None
    return ("bf16",) if of_codes or call.get("operator") == "attention_backward" else ("fp16", "bf16")


def _of_layer(model: Model, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for batch, length in _LONG:
        for call in (_padded(model, batch, length), _packed(model, batch, length)):
            yield call | options
            yield call | options | {"operator": "attention_backward"}
    if not model.causal:
        return
    for batch, length in _DECODED:
        if model.latent:
            for page in _LATENT_PAGES:
                yield from _decoded_latent(model, model.latent, batch, length, page)
        else:
            for page in _PAGES:
                yield from _decoded(model, options, batch, length, page)


def _padded(model: Model, *leading: int) -> dict[str, Any]:
    """q, k and v with these dimensions before the heads."""
    keys = (*leading, model.heads_kv, model.head_dim)
    values = (*keys[:-1], model.head_dim_v or model.head_dim)
    return {"q": (*leading, model.heads_q, model.head_dim), "k": keys, "v": values}


def _packed(model: Model, batch: int, length: int) -> dict[str, Any]:
    ends, longest = (batch + 1,), {"max_seqlen_q": length, "max_seqlen_kv": length}
    return _padded(model, batch * length) | {"cu_seqlens_q": ends, "cu_seqlens_kv": ends} | longest


def _decoded(
    model: Model, options: dict[str, Any], batch: int, length: int, page: int
) -> Iterator[dict[str, Any]]:
    """Calls with a cache of keys and values, and with one of e4m3 codes that has a scale for each array: of
    a token, and of a part of a prompt.
    """
    rows, pages = _rows(batch, length, page)
    held, new = _padded(model, *rows), _padded(model, batch, 1)
    scale = {"kv_dtype": "e4m3", "k_scale": (), "v_scale": ()}
    for codes in ({}, scale):
        cache = KVCache(held["k"], held["v"], (batch,), pages=pages, **codes)
        for tokens in (1, length // 4):
            yield {"q": (batch, tokens, model.heads_q, model.head_dim), "k": cache} | options
        yield _append(cache, model.head_dim, k_new=new["k"], v_new=new["v"])


def _decoded_latent(
    model: Model, latent: Latent, batch: int, length: int, page: int
) -> Iterator[dict[str, Any]]:
    """Calls with a latent cache of 16 bits, and with both kinds of codes: of a token, and of a token and a
    draft. A prompt takes keys and values, not latents.
    """
    rows, pages = _rows(batch, length, page)
    head_dim_v = latent.width - latent.rotary
    one_scale = {"kv_dtype": "e4m3", "k_scale": ()}
    caches = {"": (latent.width, {}), "e4m3": (latent.width, one_scale)}
    caches[LAYOUT] = (ROW_BYTES, {"kv_dtype": LAYOUT})
    for kind, (width, codes) in caches.items():
        cache = KVCache((*rows, 1, width), None, (batch,), pages=pages, head_dim_v=head_dim_v, **codes)
        for tokens in (1, 2):
            call = {"q": (batch, tokens, model.heads_q, latent.width), "k": cache}
            call |= {"softmax_scale": model.head_dim**-0.5}
            if latent.listed is None:
                yield call | {"causal": True}
            elif not kind:
                yield call | {"indices": (batch, tokens, latent.listed)}
        if not kind:
            yield _append(cache, latent.rotary, k_new=(batch, 1, 1, latent.width))


def _rows(batch: int, length: int, page: int) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """The first two dimensions of a cache of sequences of this length, and the shape of its page table; with
    a page of 0 there are no pages.
    """
    pages = length // page if page else 0
    return ((batch * pages, page), (batch, pages)) if page else ((batch, length), None)


def _append(cache: KVCache, rotary_dim: int, **new: tuple[int, ...]) -> dict[str, Any]:
    table = (_CAPACITY, rotary_dim // 2)
    return {"operator": "append", "cache": cache, "rotary": Rotary(table, table)} | new
