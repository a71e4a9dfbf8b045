"""The gradients of attention: ``attention_backward`` and ``plan_backward``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.api.asked import LENGTHS, asked_backward, names_given
from flashgen.api.calls import call, make_plan, planning
from flashgen.api.keywords import unexpected
from flashgen.errors import BadParam, FlashgenError, naming, rename
from flashgen.operators.arguments import flag
from flashgen.operators.maskoptions import NO_WINDOW
from flashgen.operators.splits import AUTO
from flashgen.runtime import arrays, torchkind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flashgen.api.asked import Asked
    from flashgen.runtime.arrays import Kind
    from flashgen.runtime.plans import Plan

# Options of attention() that have no gradients, or no part in them, and what they are by default.
NOT_BACKWARD = {"append": None, "rotary": None, "splits": AUTO, "algorithm": None}


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    mask: Any = None,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score: str | Sequence[str] | None = None,
    params: Mapping[str, Any] | None = None,
    kv_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    dlse: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    deterministic: bool = False,
    workspace: Any = None,
    stream: Any = None,
    backend: str | None = None,
    **refused: Any,
) -> tuple[Any, Any, Any]:
    """The gradients of ``attention`` in q, k and v, for that of its result. PyTorch tensors that require a
    gradient get it from ``attention`` itself.

    dout: the gradient of out: (batch, seqlen_q, num_heads_q, head_dim_v), or without batch as q, of the dtype
        and device of q; any strides, but the last dimension is contiguous and rows are 16-byte aligned.
    q, k, v, and all options up to max_seqlen_kv: those of the call of ``attention``. With packed queries dout
        is (tokens, num_heads_q, head_dim_v), and lse (num_heads_q, tokens).
    out, lse: what ``attention(..., return_lse=True)`` returned for them. lse is contiguous.
    dlse: the gradient of lse, where it has one: fp32, of the shape of lse, contiguous.
    dq, dk, dv: receive the results: of the shape and dtype of q, k and v, in memory that no other argument
        touches. Not for JAX, whose arrays cannot be written to.
    deterministic: give the same bits each time. Otherwise thread blocks of a GPU may add to dq in any order,
        and its last bits differ from call to call; dk and dv are always the same. On the CPU all may have
        other last bits where BLAS has another number of threads. For PyTorch tensors it is on under
        ``torch.use_deterministic_algorithms(True)``.
    workspace: memory for the call, as for a plan, which says how much it needs (`Plan.__call__`); None: it is
        allocated. On the CPU nothing is needed, and what is given is checked, but not used.
    stream, backend: as in ``attention``.

    Returns (dq, dk, dv), of the kind of dout: new arrays, or those given. Rows that see no key, keys that no
    row sees, and rows that are no sequence's, have gradients of 0: those behind the last packed sequence, and
    padded keys past a length. torch.compile sees an operator; tensors on meta give results there.

    Raises what ``attention`` raises, before anything is queued or written; BadParam for a gradient of what
    has none: arrays in params, and calls with a KV cache; InsufficientWorkspace.
    """
    _refuse(attention_backward, refused)
    kind = arrays.kind_of(dout)
    wanted = (
        (dout, q, k, v, mask, out, lse, dlse, dq, dk, dv),
        (causal, mask_type, window_size),
        softmax_scale,
        (softcap, alibi_slopes, score, params),
        (kv_lengths, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv),
        _same_bits(deterministic, kind),
    )
    how = {"stream": stream, "backend": backend, "workspace": workspace}
    try:
        if kind is not None and kind.watched(dout):
            from flashgen.api import compiled

            return compiled.attention_backward(*wanted, **how)
        return call(*asked_backward(*wanted), **how)
    except FlashgenError as error:
        # Not of a KVCache, for which the error says to pass kv_lengths.
        rename(error, **names_given(None, alibi_slopes, softcap=softcap))
        if isinstance(error, torchkind.RequiresGradient):
            raise error.of("attention_backward()") from None
        raise


def plan_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    mask: Any = None,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score: str | Sequence[str] | None = None,
    params: Mapping[str, Any] | None = None,
    kv_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    dlse: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    deterministic: bool = False,
    backend: str | None = None,
    **refused: Any,
) -> Plan:
    """A ``Plan`` for all calls of ``attention_backward`` whose arrays have the layouts of these.

    Arguments and errors are those of ``attention_backward``. The plan is called with dout, q, k, v, mask, out
    and lse, in this order, or by name; with lengths with dout, q, k, v, cu_seqlens_q, cu_seqlens_kv,
    kv_lengths, out and lse. None stands for what the call has not. ``workspace_bytes`` of the plan is what a
    call needs. See ``plan``.
    """
    _refuse(plan_backward, refused)
    operator, given, options, scalars = asked_backward(
        (dout, q, k, v, mask, out, lse, dlse, dq, dk, dv),
        (causal, mask_type, window_size),
        softmax_scale,
        (softcap, alibi_slopes, score, params),
        (kv_lengths, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv),
        _same_bits(deterministic, arrays.kind_of(dout)),
    )
    with naming(**names_given(None, alibi_slopes, softcap=softcap)), planning("plan_backward", q):
        return make_plan(operator, given, options, scalars, backend, None)


def _same_bits(deterministic: Any, kind: Kind | None) -> bool:
    """Whether the call, or else the library of its arrays, asks for the same bits each time. Raises
    BadParam.
    """
    return flag("deterministic", deterministic) or (kind is not None and kind.wants_same_bits())


def asked_by_name(call: Mapping[str, Any]) -> Asked:
    """`asked_backward` of all parameters of ``attention_backward`` by name."""
    names = ("dout", "q", "k", "v", "mask", "out", "lse", "dlse", "dq", "dk", "dv")
    return asked_backward(
        tuple(call[name] for name in names),
        tuple(call[name] for name in ("causal", "mask_type", "window_size")),
        call["softmax_scale"],
        tuple(call[name] for name in ("softcap", "alibi_slopes", "score", "params")),
        tuple(call[name] for name in LENGTHS),
        call["deterministic"],
    )


def _refuse(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise BadParam for what ``attention`` takes and has no gradients, TypeError for anything else."""
    for name, value in given.items():
        if name not in NOT_BACKWARD:
            raise unexpected(function, {name: value})
        default = NOT_BACKWARD[name]
        if type(value) is not type(default) or value != default:
            raise BadParam(
                f"{name} was given, which {function.__name__} does not take: no KV caches, splits or "
                "algorithms"
            )
