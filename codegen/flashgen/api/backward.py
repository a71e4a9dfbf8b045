"""The gradients of attention: ``attention_backward`` and ``plan_backward``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.call.blockmask import BlockMask, with_arrays
from flashgen.call.compute import compute, make_plan, planning
from flashgen.call.dropout import seeded
from flashgen.call.field import listed
from flashgen.call.fields import BY_NAME, DIFFERENTIABLE, GRADIENTS, SHORTHANDS
from flashgen.call.keywords import unexpected
from flashgen.call.record import GradientCall, call_of
from flashgen.call.request import Request, gradients_of, names_of, score_gradient_of
from flashgen.call.signature import public
from flashgen.errors import BadParam, FlashgenError, arg, naming
from flashgen.operators.arguments import flag, shown
from flashgen.runtime import arrays, dlpack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flashgen.call.record import Call
    from flashgen.runtime.plans import Plan

# Options of attention() that have no gradients, or no part in them.
NOT_BACKWARD = ("append", "rotary", "splits", "algorithm")


def _attention_backward(call: Call) -> tuple[Any, ...]:
    kind = arrays.kind_of(call.dout)
    try:
        call = _repeatable(seeded(call, draws=False), kind)
        if isinstance(call.mask, BlockMask):
            call = with_arrays(call)
        if kind is not None and kind.watched(call.dout):
            from flashgen.call import compiled

            return compiled.attention_backward(call)
        if call.dparams is None:
            return compute(gradients_of(call), kind)
        requests = [score_gradient_of(call, name) for name in _names(call.dparams)]
        arrays_of_score = {name: getattr(call, name) for name, _ in SHORTHANDS} | dict(call.params or {})
        shapes = [arrays_of_score[name].shape for name in call.dparams]
        of_score = [
            compute(request, kind).reshape(shape) for request, shape in zip(requests, shapes, strict=True)
        ]
        return (*compute(gradients_of(call), kind), *of_score)
    except dlpack.Traced:
        pass  # below, so that its errors are not chained to this one
    except FlashgenError as error:
        error.raise_as(names_of(call), "attention_backward()")
    from flashgen.call.xla import traced

    with naming(names_of(call)):
        return traced.attention_backward(call)


_attention_backward.__doc__ = f"""The gradients of ``attention`` in {listed(DIFFERENTIABLE)}, from dout.
    PyTorch tensors that require a gradient get it from ``attention`` itself.

    dout: the gradient of out: (batch, seqlen_q, num_heads_q, head_dim_v), or without batch as q, of the dtype
        and device of q; any strides, but the last dimension is contiguous and rows are 16-byte aligned.
    {", ".join(DIFFERENTIABLE)}, and all options up to max_seqlen_kv: as in the call of ``attention``.
        With packed queries dout is (tokens, num_heads_q, head_dim_v), and lse (num_heads_q, tokens).
    out, lse: what ``attention(..., return_lse=True)`` returned. lse is contiguous.
    dlse: the gradient of lse, if the loss depends on it: fp32, of the shape of lse, contiguous.
    {", ".join(GRADIENTS)}: the results are written here: of the shape and dtype of
        {listed(DIFFERENTIABLE)}, in memory that no other argument uses. Not for JAX, whose arrays cannot
        be written to. With kv_lengths or cu_seqlens_kv, dk and dv of 16-bit calls may both be fp32, for sums
        over several calls; not with kv_starts or dropout_p.
    deterministic: return the same bits each time. Otherwise thread blocks of a GPU may add to dq in any
        order, and its last bits differ from call to call; dk and dv are always the same. On the CPU the last
        bits may depend on the number of BLAS's threads. For PyTorch tensors it is on under
        ``torch.use_deterministic_algorithms(True)``.
    dparams: names of arrays of the score modification whose gradients are returned as well, for example
        ``("bias",)`` or ``("alibi_slopes",)``: of the shape and dtype of the array, summed over the
        dimensions that it broadcasts, the same bits each time. Not with lengths.
    workspace: memory for the call, as for a plan, whose ``workspace_bytes`` says how much; None: the call
        allocates it. On the CPU it is checked, but not used.
    stream, backend: as in ``attention``.

    Returns ({", ".join(GRADIENTS)}), and then the gradients of dparams, of the kind of dout: new arrays, or
    the arrays passed. The gradient of an array that the call lacks is left out. Rows that see no key, keys
    that no row sees, rows after the last packed sequence, and padded keys have gradients of 0.
    torch.compile sees an operator; for tensors on meta the results are on meta.

    Raises the errors of ``attention``, before anything is queued or written; BadParam for numbers in dparams
    and for calls with a KV cache; InsufficientWorkspace.
    """


def _plan_backward(call: Call) -> Plan:
    """A ``Plan`` for all calls of ``attention_backward`` whose arrays have the layouts of these.

    Arguments and errors are as in ``attention_backward``. The plan is called with dout, q, k, v, mask, out
    and lse, in this order, or by name; with lengths with dout, q, k, v, cu_seqlens_q, cu_seqlens_kv,
    kv_lengths, out and lse. None stands for an array that the call lacks. ``workspace_bytes`` of the plan is
    what a call needs. See ``plan``.
    """
    call = _repeatable(call, arrays.kind_of(call.dout))
    with naming(names_of(call)), planning("plan_backward", call.q):
        call = seeded(call, draws=False)
        return make_plan(gradients_of(call))


def _names(dparams: Any) -> tuple[str, ...]:
    """The arrays whose gradients are returned as well. Raises BadParam."""
    is_list = isinstance(dparams, (list, tuple)) and all(isinstance(name, str) for name in dparams)
    if not is_list or len(set(dparams)) < len(dparams):
        raise BadParam(
            f"{arg('dparams')} is {shown(dparams)}; it must list names of arrays of the score, each once"
        )
    return tuple(dparams)


def _repeatable(call: Call, kind: arrays.Kind | None) -> Call:
    """The call as it is, or deterministic where the library of its arrays says so. Raises BadParam."""
    if flag("deterministic", call.deterministic) or kind is None or not kind.wants_same_bits():
        return call
    return call.replace(deterministic=True)


def _refuse(function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Raise BadParam for what ``attention`` takes and has no gradients, TypeError for anything else."""
    for name, value in unknown.items():
        if name not in NOT_BACKWARD:
            raise unexpected(function, {name: value})
        default = BY_NAME[name].default
        if type(value) is not type(default) or value != default:
            raise BadParam(
                f"{arg(name)} was given, which {function.__name__} does not take: no KV caches, splits or "
                "algorithms"
            )


attention_backward = public("attention_backward", GradientCall, _attention_backward, __name__, _refuse)
plan_backward = public("plan_backward", GradientCall, _plan_backward, __name__, _refuse)


def request_by_name(values: dict[str, Any]) -> Request:
    """What ``attention_backward`` requests, of its parameters by name. Raises BadParam."""
    return gradients_of(call_of(GradientCall, **values))
