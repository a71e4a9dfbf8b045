"""What a call of ``attention`` or ``attention_backward`` asks for: the operator, with its arrays, options and
scalars.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashgen.api.keywords import advice
from flashgen.api.kvcache import FIELDS, KVCache
from flashgen.errors import BadParam, NullPointer
from flashgen.operators.arguments import flag, length_bound, shown
from flashgen.operators.attention import operator_for
from flashgen.operators.lengths import MASK_WITH_LENGTHS, refuse_bounds
from flashgen.operators.maskoptions import NO_WINDOW, mask_type_name, sees_no_later_key, window_of
from flashgen.operators.splits import AUTO, splits_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.operators.operator import Operator
    from flashgen.operators.scores import Score

# An operator, and what a call gives it: an array or None for each argument, options, scalars.
Asked = tuple["Operator", tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
# What a call says of the lengths of sequences.
LENGTHS = ("kv_lengths", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")


def asked(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    out: Any,
    options: tuple[Any, ...],
    softmax_scale: float | None,
    of_score: tuple[Any, ...],
    lengths: tuple[Any, ...],
) -> Asked:
    """The operator that a call asks for, with its arrays, options and scalars. Raises BadParam."""
    causal, mask_type, window_size, return_lse, splits = options
    # On the way of every call, so what most of them have is known at a glance.
    if (
        not _is_key(causal, mask_type, window_size)
        or (return_lse is not True and return_lse is not False)
        or splits is not AUTO
    ):
        options = *_as_key(*options[:3]), flag("return_lse", return_lse), splits_of(splits)
    modification, arrays_of_score, scalars = None, (), (softmax_scale,)
    softcap, alibi_slopes, score, params = of_score
    if softcap is not None or alibi_slopes is not None or score is not None or params is not None:
        modification, arrays_of_score, of_score = score_of(
            softcap, alibi_slopes, score, params, sees_no_later_key(*options[:3])
        )
        scalars = (softmax_scale, *of_score)
    kv_lengths, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv = lengths
    index = pages = None
    if v is not None and isinstance(k, KVCache):
        raise BadParam("v was given with a KVCache, which holds v as well; leave v out")
    if v is None and isinstance(k, KVCache):
        if kv_lengths is not None or cu_seqlens_kv is not None:
            given = "cu_seqlens_kv" if kv_lengths is None else "kv_lengths"
            raise BadParam(f"{given} was given with a KVCache, which has lengths of its own")
        k, v, kv_lengths, pages, index = k.k, k.v, k.lengths, k.pages, k.index
        if kv_lengths is None:
            raise NullPointer("lengths of the KVCache is None; expected an int32 array, (batch,)")
    elif kv_lengths is None and cu_seqlens_q is None and cu_seqlens_kv is None:
        if max_seqlen_q is not None or max_seqlen_kv is not None:
            refuse_bounds(max_seqlen_q, max_seqlen_kv)
        given = (q, k, v, mask, out, None, *arrays_of_score)
        return operator_for(modification), given, (*options, modification), scalars
    arrays_of_lengths = cu_seqlens_q, cu_seqlens_kv, kv_lengths, index, pages
    given = (q, k, v, *arrays_of_lengths, mask, out, None, *arrays_of_score)
    bounds = length_bound("max_seqlen_q", max_seqlen_q), length_bound("max_seqlen_kv", max_seqlen_kv)
    options = (*options, *bounds, modification)
    return operator_for(modification, lengths=True), given, options, scalars


def asked_backward(
    given: tuple[Any, ...],
    masking: tuple[Any, ...],
    softmax_scale: float | None,
    of_score: tuple[Any, ...],
    lengths: tuple[Any, ...],
    deterministic: bool,
) -> Asked:
    """`asked` for a call of ``attention_backward``. ``given`` are dout, q, k, v, mask, out, lse, dlse, dq, dk
    and dv; ``masking`` is causal, mask_type and window_size. Raises BadParam.
    """
    if not _is_key(*masking):
        masking = _as_key(*masking)
    deterministic = flag("deterministic", deterministic)
    modification, arrays_of_score, scalars = None, (), ()
    if any(each is not None for each in of_score):
        modification, arrays_of_score, scalars = score_of(*of_score, sees_no_later_key(*masking))
    scalars = (softmax_scale, *scalars)
    kv_lengths, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv = lengths
    if isinstance(given[2], KVCache):
        raise BadParam("k is a KVCache, which has no gradients; pass k and v, with kv_lengths if need be")
    from flashgen.operators.backward import operator_for as backward_for  # other first calls need not wait

    if kv_lengths is None and cu_seqlens_q is None and cu_seqlens_kv is None:
        if max_seqlen_q is not None or max_seqlen_kv is not None:
            refuse_bounds(max_seqlen_q, max_seqlen_kv)
        options = (*masking, modification, deterministic)
        return backward_for(modification), (*given, *arrays_of_score), options, scalars
    dout, q, k, v, mask, *rest = given
    if mask is not None:
        raise BadParam(MASK_WITH_LENGTHS)
    given = (dout, q, k, v, cu_seqlens_q, cu_seqlens_kv, kv_lengths, *rest, *arrays_of_score)
    bounds = length_bound("max_seqlen_q", max_seqlen_q), length_bound("max_seqlen_kv", max_seqlen_kv)
    options = (*masking, *bounds, modification, deterministic)
    return backward_for(modification, lengths=True), given, options, scalars


def _is_key(causal: Any, mask_type: Any, window_size: Any) -> bool:
    """Whether these are as `_as_key` gives them, at a glance: they are where neither a mask type nor a window
    was given.
    """
    return (
        (causal is True or causal is False)
        and mask_type is None
        and (window_size is NO_WINDOW or _is_no_window(window_size))
    )


def _is_no_window(window_size: Any) -> bool:
    return (
        type(window_size) is tuple
        and len(window_size) == 2
        and type(window_size[0]) is type(window_size[1]) is int  # of an array == is no truth value
        and window_size == NO_WINDOW
    )


def _as_key(causal: Any, mask_type: Any, window_size: Any) -> tuple[Any, ...]:
    """These in the form in which they are part of a plan's key: a list is none, and 1.0, which is refused,
    would find the plan of 1. Raises BadParam.
    """
    return flag("causal", causal), mask_type_name(mask_type), window_of(window_size)


def names_given(k: Any, alibi_slopes: Any, kv_lengths: Any = None, softcap: Any = None) -> dict[str, str]:
    """Arguments of the operators that the caller of ``attention`` knows by other names."""
    names = {"cu_seqlens_new": "cu_seqlens_q"}
    if alibi_slopes is not None:
        names["slope"] = "alibi_slopes"
    if softcap is not None:
        names |= {"cap": "softcap", "no cap": "no cap"}  # these words stay as they are
    if isinstance(k, KVCache) and kv_lengths is None:
        names |= {"kv_lengths": "lengths"} | FIELDS
    return names


def score_of(
    softcap: float | None,
    alibi_slopes: Any,
    score: str | Sequence[str] | None,
    params: Mapping[str, Any] | None,
    sees_no_later_key: bool,
) -> tuple[Score | None, tuple[Any, ...], tuple[Any, ...]]:
    """The score modification that a call asks for, None where params are empty, its arrays and its numbers.
    Raises BadParam.
    """
    names, given = named_score(softcap, alibi_slopes, score, params, sees_no_later_key)
    if not names:
        return None, (), ()
    modification = _chain(os.environ.get("FLASHGEN_SPECS", ""), names)
    wanted = {param.name for param in modification.params}
    # A name that is wrong comes first: for its sake another is missing.
    for name in sorted(given.keys() - wanted, key=str):
        has = f"it has {', '.join(sorted(wanted)) or 'none'}{advice(str(name), wanted)}"
        raise BadParam(f"score {modification.name} has no parameter {name}; {has}")
    for name in sorted(wanted - given.keys()):
        params = ", ".join(f"{each!r}: ..." for each in sorted(wanted))
        raise BadParam(f"score {modification.name} needs the parameter {name}; pass params={{{params}}}")
    return (
        modification,
        tuple(given[param.name] for param in modification.arrays),
        tuple(given[param.name] for param in modification.scalars),
    )


def named_score(
    softcap: float | None,
    alibi_slopes: Any,
    score: str | Sequence[str] | None,
    params: Mapping[str, Any] | None,
    sees_no_later_key: bool,
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of the score modifications that a call asks for, and their parameters. Raises BadParam."""
    names = [score] if isinstance(score, str) else score
    if names is not None and not (isinstance(names, (list, tuple)) and names):
        raise BadParam(f"score is {score!r}; it must be the name of a score modification, or several")
    for name in names or ():
        if not isinstance(name, str):
            raise BadParam(f"score is {name!r}; it must be the name of a score modification, or several")
    if params is not None and not isinstance(params, Mapping):
        raise BadParam(f"params is {params!r}; it must map the names of parameters to numbers and arrays")
    names, given = list(names or ()), dict(params or {})
    if names and (softcap is not None or alibi_slopes is not None):
        raise BadParam(
            f"score is {score!r} and softcap or alibi_slopes was given as well; name all in score, such as "
            "('softcap', 'mine'), and give their params"
        )
    if not names:
        if given:
            raise BadParam(f"params has {', '.join(map(str, given))}, but no score was given")
        if softcap is not None:
            number = isinstance(softcap, numbers.Real) and not isinstance(softcap, bool)
            if not number or not 0 < softcap < math.inf:
                raise BadParam(
                    f"softcap is {shown(softcap)}; it must be a number above 0, or None for no cap"
                )
            names, given = ["softcap"], {"cap": softcap}
        if alibi_slopes is not None:
            # Where no later key is seen the bias is linear, which costs less.
            names = [*names, "alibi" if sees_no_later_key else "alibi_symmetric"]
            given |= {"slope": alibi_slopes}
    return tuple(names), given


@lru_cache(maxsize=64)
def _chain(folders: str, names: tuple[str, ...]) -> Score:
    """The modifications of these names, one after another, as the value ``folders`` of FLASHGEN_SPECS has
    them.
    """
    from flashgen.families.scores import load_scores
    from flashgen.operators.scores import chained

    known = load_scores().by_name
    for name in names:
        if name not in known:
            raise BadParam(f"score is {name!r}; there are {', '.join(map(repr, sorted(known)))}")
    return chained([known[name] for name in names])
