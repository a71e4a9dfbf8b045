"""The front door: ``attention`` and ``plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.call.blockmask import BlockMask, with_arrays
from flashgen.call.compute import compute, make_plan, planning
from flashgen.call.dropout import seeded
from flashgen.call.kvcache import KVCache
from flashgen.call.record import AttentionCall, call_of
from flashgen.call.request import Request, names_of, request_of
from flashgen.call.signature import described, public
from flashgen.errors import FlashgenError, naming
from flashgen.operators.arguments import flag
from flashgen.operators.dropout import NO_DROPOUT
from flashgen.runtime import arrays, dlpack, torchkind

if TYPE_CHECKING:
    from flashgen.api.append_and_attend import AppendPlan
    from flashgen.api.weights import WeightsPlan
    from flashgen.call.record import Call
    from flashgen.runtime.plans import Plan


def _attention(call: Call) -> Any:
    if call.return_weights is not False:
        from flashgen.api.weights import attention_with_weights

        try:
            return attention_with_weights(call, _attention)
        except FlashgenError as error:
            error.rename(names_of(call))
            raise
    dropout_p = call.dropout_p
    if type(dropout_p) is not float or dropout_p != NO_DROPOUT:
        try:
            call = seeded(call)
        except FlashgenError as error:
            error.rename(names_of(call))
            raise
    kind = arrays.kind_of(call.q)
    if kind is not None and kind.records(call.q, call.k, call.v):
        return _recorded(call)
    if call.deterministic is not False:
        flag("deterministic", call.deterministic)
    try:
        if call.append is not None or call.rotary is not None:
            from flashgen.api.append_and_attend import append_and_attend

            return append_and_attend(call)
        return compute(request_of(call), kind)
    except dlpack.Traced:
        pass  # below, so that its errors are not chained to this one
    except torchkind.RequiresGradient as error:
        # Raised where layouts are read, which looks at each tensor anyway: other calls pay nothing.
        unrecorded = _unrecorded(call)
        if not unrecorded:
            return _recorded(call)
        error.raise_as(names_of(call), f"calls with {unrecorded}")
    except FlashgenError as error:
        error.rename(names_of(call))
        raise
    return _traced(call)


_attention.__doc__ = f"""softmax(q k^T * softmax_scale, masked) v, exactly, without the matrix of scores.

    Takes CuPy, NumPy, PyTorch and JAX arrays, or arrays of any library with DLPack or
    ``__cuda_array_interface__``, without a copy. All arrays of a call belong to one library; with JAX arrays,
    which cannot be written to, a KVCache may belong to another. Arrays in host memory need no GPU.

    {described("attention")}

    Returns ``out``, of the kind of q, or a tuple: ``out``, then the LSE and the weights, if the call requests
    them. A row that sees no key is 0, with an LSE of -inf. Finite scores give finite results. If all scaled
    scores of a row are above 1e7 in size in fp16, or 1e9 in bf16 and fp32, for example after a finite mask of
    -1e10, fp32 cannot distinguish them. Then a GPU may return 0 for that row, with an LSE of -inf, instead of
    a mean of v.

    If q, k or v is a PyTorch tensor that requires a gradient, autograd records the call. Such a call raises
    BadParam with out, stream or a KVCache, if a mask requires a gradient, and with lengths if an array of a
    score does.
    torch.compile sees operators, also for calls with out or a KVCache. For tensors on meta the results are
    on meta. Inside jax.jit and JAX's other transformations the call is an operation of the program; with
    append it also returns the new KVCache, last.

    Raises a FlashgenError, before anything is queued or written: BadParam, BadTensorShape, BadTensorDtype,
    BadTensorStrides, NullPointer, DeviceTypeNotSupported, NoCompilerError, or CompileError.
    """
attention = public("attention", AttentionCall, _attention, __name__)


def _recorded(call: Call) -> Any:
    """The call as an operator of PyTorch, or recorded by autograd."""
    if isinstance(call.mask, BlockMask):
        call = with_arrays(call)
    unrecorded = _unrecorded(call)
    if not unrecorded and type(call.return_lse) is type(call.deterministic) is bool:
        from flashgen.call import autograd

        try:
            results = autograd.plain(call)
        except FlashgenError as error:
            error.rename(names_of(call))
            raise
        if results is not None:
            return results
    call = call.replace(
        return_lse=flag("return_lse", call.return_lse),
        deterministic=flag("deterministic", call.deterministic),
    )
    with naming(names_of(call)):
        if unrecorded:
            from flashgen.call import compiled

            append_request = None
            if call.append is not None or call.rotary is not None:
                from flashgen.api.append_and_attend import requested_append

                append_request = requested_append(call.replace(stream=None))
            results = compiled.attention(call, append_request, f"calls with {unrecorded}")
        else:
            from flashgen.call import autograd

            results = autograd.attention(call)
    return results if call.return_lse else results[0]


def _traced(call: Call) -> Any:
    """The call inside a program that JAX traces."""
    from flashgen.call.xla import traced

    with naming(names_of(call)):
        append_request = None
        if call.append is not None or call.rotary is not None:
            from flashgen.api.append import traced_request
            from flashgen.api.append_and_attend import append_call

            append_request = traced_request(append_call(call))
        return traced.attention(call, append_request)


def _unrecorded(call: Call) -> str:
    """What a call has that autograd's operators lack, empty if nothing."""
    if isinstance(call.k, KVCache) or call.append is not None or call.rotary is not None:
        return "a KVCache"
    return "out" if call.out is not None else "stream" if call.stream is not None else ""


def _plan(call: Call) -> Plan | AppendPlan | WeightsPlan:
    """A ``Plan`` for all calls whose arrays have the layouts of these; with ``append`` an ``AppendPlan``,
    with ``return_weights`` a ``WeightsPlan``.

    Arguments and errors are as in ``attention``. The kernel is compiled and loaded here, so calls of the plan
    only queue it. The elements of the arrays are not read. An ``out`` here fixes the layout of every later
    ``out``; if it is not contiguous, each call needs an ``out``. Without one here, ``out`` is contiguous.
    Calls of the plan take parameters of a score modification by their names in the formula: ``cap`` of
    softcap, ``slope`` of ALiBi. Pass arrays to each call; numbers are by default the numbers passed here.
    """
    with naming(names_of(call)), planning("plan", call.q):
        call = seeded(call)
        if flag("return_weights", call.return_weights):
            from flashgen.api.weights import weights_plan

            return weights_plan(call)
        if call.append is not None or call.rotary is not None:
            from flashgen.api.append_and_attend import append_plan, requested_append

            return append_plan(call, requested_append(call))
        return make_plan(request_of(call))


plan = public("plan", AttentionCall, _plan, __name__)


def request_by_name(values: dict[str, Any]) -> Request:
    """What ``attention`` requests, of its parameters by name. Raises BadParam."""
    return request_of(call_of(AttentionCall, **values))
