"""What a call says of a KV cache, and of rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from flashgen.host.libraryimport import after_import

if TYPE_CHECKING:
    from collections.abc import Mapping

# Arguments of the operator ``append`` that are fields of a KVCache, for messages.
FIELDS = {"k_cache": "k", "v_cache": "v", "k_scale_out": "k_scale", "v_scale_out": "v_scale"}


def arrays_instead(arrays: Mapping[str, Any]) -> str:
    """What the messages of a plan made with these arrays say of a KVCache: which of its arrays to pass. Empty
    for a plan without lengths of keys.
    """
    if arrays.get("kv_lengths") is None:
        return ""
    same = "pages", "index", "k_scale", "v_scale"
    of_cache = ("kv_lengths", "lengths"), ("kv_starts", "starts"), *((name, name) for name in same)
    named = (f", {name}=cache.{field}" for name, field in of_cache if arrays.get(name) is not None)
    return f"; of a KVCache pass cache.k, cache.v{''.join(named)}"


def kv_dtype_of(cache: KVCache) -> str | None:
    """The option ``kv_dtype`` of a cache: "e4m3" also if its arrays have that dtype."""
    if cache.kv_dtype is None and getattr(getattr(cache.k, "dtype", None), "itemsize", 2) == 1:
        # The call may convert the arrays to a library without this dtype.
        return "e4m3" if str(cache.k.dtype).endswith("float8_e4m3fn") else None
    return cache.kv_dtype


class ShapesShown:
    """Printed, arrays are their shapes: their elements may be gigabytes."""

    __slots__ = ()

    def __repr__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        shown = (f"{name}={getattr(x, 'shape', x)}" for name, x in values if x is not None)
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class KVCache(ShapesShown):
    """A cache of keys and values in the caller's memory.

    k, v: (rows, capacity, num_heads_kv, head_dim), for v with head_dim_v: a row for each sequence. With pages
        (num_pages, page_size, num_heads_kv, head_dim). Of the dtype of q; or e4m3 (float8_e4m3fn) under q of
        fp16, bf16 or e4m3, with head dims that are multiples of 16. Any strides, but the last dimension is
        contiguous and rows are 16-byte aligned.
    lengths: int32 (batch,), contiguous, on the device of k: the tokens that each sequence has in the cache.
        No call changes it.
    pages: int32 (batch, max_pages): pages[b, j] has the keys j * page_size to (j + 1) * page_size - 1 of
        sequence b. Entries after the last token, or before a window, may have any value.
    index: int32 (batch,): the row of k and v of each sequence; by default its own number. Not with pages.
    starts: int32 (batch,): the first key of each sequence, if its row or pages have padding on the left; by
        default 0. ``lengths`` counts the padding.
    head_dim_v: only for a latent cache, as in MLA, whose v is None: k has one head, a key is a row of k, and
        its value is the first head_dim_v elements of that row. fp16 or bf16, in host memory also fp32, or
        e4m3; rows of up to 576 elements, head_dim_v up to 512. Calls need ``softmax_scale``.
    k_scale, v_scale: the factors that turn e4m3 codes into numbers, fp32 on the device of k: (),
        (num_heads_kv,) or (batch, num_heads_kv), finite and above 0; by default 1. Or one of them, or both,
        have a scale for each token and head, in the shape of k without head_dim; then the other may be () or
        (num_heads_kv,). ``append`` computes and writes such scales.
    kv_dtype: "e4m3" if k and v are codes in uint8, for example with CuPy, which has no such dtype.
        "fp8_ds_mla" if rows of a latent cache are 656 bytes that contain their scales: uint8 or e4m3
        (..., 1, 656) if q is bf16, with 512 codes, 4 fp32 scales of 128 codes each, and 64 elements.
    """

    k: Any
    v: Any
    lengths: Any
    pages: Any = None
    index: Any = None
    starts: Any = None
    head_dim_v: int | None = None
    k_scale: Any = None
    v_scale: Any = None
    kv_dtype: str | None = None


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Rotary(ShapesShown):
    """Rotary embedding: by which angles queries and keys are rotated.

    cos, sin: (num_positions, rotary_dim / 2), of the dtype of q, or fp32. rotary_dim is a multiple of 16. The
        first rotary_dim elements of a head are rotated; in a latent cache the last ones of a row.
    interleaved: whether elements 2i and 2i + 1 are a pair (as in GPT-J), instead of i and i + rotary_dim / 2
        (as in GPT-NeoX and Llama).
    positions: int32 (batch, seqlen_new), or (tokens,) where tokens are packed: the row of cos and sin for
        each new token, and for the query of the same number. By default the token's position in its sequence.
    """

    cos: Any
    sin: Any
    interleaved: bool = False
    positions: Any = None


def _register_pytrees() -> None:
    """Tell JAX that a cache goes through its functions as its arrays do."""
    import jax

    if not hasattr(jax, "tree_util"):  # flashgen is imported by a part of JAX's own import
        return
    for record in (KVCache, Rotary):
        constants = [x.name for x in fields(record) if x.type in ("bool", "int | None", "str | None")]
        names = [x.name for x in fields(record) if x.name not in constants]
        jax.tree_util.register_dataclass(record, data_fields=names, meta_fields=constants)


after_import("jax", _register_pytrees)
