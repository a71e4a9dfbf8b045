"""What to say of a keyword that a public function does not have: the name here of what other libraries call
so, or the name that is spelled most like it.
"""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

# Keywords of other libraries, by what they are here.
_ELSEWHERE = {
    "causal": ("is_causal", "use_causal_mask", "causal_mask"),
    "softmax_scale": ("scale", "sm_scale", "scaling", "softmax_scaling", "qk_scale"),
    "mask": ("attn_mask", "attention_mask", "key_padding_mask", "block_mask", "custom_mask"),
    "window_size": ("window", "sliding_window", "window_left", "local_window_size", "attention_window"),
    "softcap": ("logits_soft_cap", "attn_logit_softcapping", "logit_cap", "cap"),
    "score": ("score_mod", "attn_bias", "bias"),
    "kv_lengths": ("cache_seqlens", "seqused_k", "seqlens_k", "seqlens_kv", "context_lens", "lengths"),
    "cu_seqlens_q": ("qo_indptr", "query_start_loc", "cu_seqlens"),
    "cu_seqlens_kv": ("cu_seqlens_k", "kv_indptr"),
    "cu_seqlens_new": ("cu_seqlens_q", "append_indptr"),
    "max_seqlen_q": ("max_query_len", "max_seqlen"),
    "max_seqlen_kv": ("max_seqlen_k", "max_seq_len"),
    "splits": ("num_splits",),
    "return_lse": ("return_softmax_lse", "return_attn_probs", "lse"),
    "rotary": ("rotary_cos", "rotary_sin", "rotary_emb"),
    "out": ("output", "o"),
    "lse_out": ("out_lse", "lse"),
    "dout": ("do", "grad_out", "grad_output"),
    "dlse": ("grad_lse",),
    "stream": ("cuda_stream",),
}
_HERE = {"mask": ", which hides where it is nonzero"}
_LEFT_OUT = {
    "dropout_p": "flashgen has no dropout; leave it out",
    "dropout": "flashgen has no dropout; leave it out",
    "enable_gqa": "heads are grouped by their numbers; leave it out",
    "block_table": "pass k as a flashgen.KVCache with pages",
    "page_table": "pass k as a flashgen.KVCache with pages",
    "pages": "pass k as a flashgen.KVCache with pages",
    "cache_batch_idx": "pass k as a flashgen.KVCache with index",
}


def unexpected(function: Callable[..., Any], given: Mapping[str, Any]) -> TypeError:
    """The error of keywords that a function does not have, in Python's words."""
    name = next(iter(given))
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    why = f"{function.__name__}() got an unexpected keyword argument {name!r}"
    return TypeError(why + advice(name, known))


def advice(name: str, known: Collection[str]) -> str:
    """What the caller may have meant by a keyword, from "; " on; nothing where nobody can tell."""
    for here, elsewhere in _ELSEWHERE.items():
        if name in elsewhere and here in known:
            return f"; did you mean {here}{_HERE.get(here, '')}?"
    if name in _LEFT_OUT:
        return f"; {_LEFT_OUT[name]}"
    close = difflib.get_close_matches(str(name), known, 1, 0.6)
    return f"; did you mean {close[0]}?" if close else ""
