"""Latent caches, of multi-head latent attention: the values are the first elements of the keys."""

from __future__ import annotations

from operator import index as index_of
from typing import TYPE_CHECKING

from flashgen.call.features import refuse_features
from flashgen.errors import BadParam, arg
from flashgen.operators.arguments import shown
from flashgen.operators.combinations import Feature

if TYPE_CHECKING:
    from flashgen.call.kvcache import KVCache
    from flashgen.call.record import Call


def width_of_values(cache: KVCache) -> int:
    """The elements of a row of a latent cache that are its value. Raises BadParam."""
    if cache.v is not None:
        raise BadParam(
            f"{arg('head_dim_v')} of the KVCache is {shown(cache.head_dim_v)}, and it has {arg('v')}; a "
            "latent cache has its values within k: pass KVCache(latent, None, lengths, head_dim_v=...), or "
            "leave head_dim_v out"
        )
    try:
        return index_of(cache.head_dim_v)
    except TypeError:
        raise BadParam(
            f"{arg('head_dim_v')} of the KVCache is {shown(cache.head_dim_v)}; expected an integer"
        ) from None


def check(call: Call) -> None:
    """Raise BadParam for what kernels of a latent cache do not compute, and where ``softmax_scale`` is
    missing.
    """
    if call.softmax_scale is None:
        raise BadParam(
            f"{arg('softmax_scale')} is None, and {arg('k')} is a latent cache; pass the scale of the model, "
            "(128 + 64) ** -0.5 for DeepSeek-V3 without YaRN: rows of a latent cache are longer than heads"
        )
    features = {"latent": Feature("k", "is a latent cache")}
    if call.v_scale is not None:
        features["scales"] = Feature("v_scale")
    if call.indices is not None and call.cu_seqlens_q is not None:
        features["packed"] = Feature("cu_seqlens_q")
    refuse_features(call, **features)
