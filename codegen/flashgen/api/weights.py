"""``attention(return_weights=True)`` and ``plan(return_weights=True)``: attention, and then its weights by an
operator of their own, from the LSE that the attention computes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from flashgen.api.pair_of_plans import PairOfPlans
from flashgen.call.compute import compute, make_plan
from flashgen.call.record import AttentionCall, call_of
from flashgen.call.request import Request, check_weights, request_of, weights_of
from flashgen.operators.arguments import flag
from flashgen.runtime import arrays, dlpack, torchkind
from flashgen.runtime.adopted import adopted

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.call.record import Call
    from flashgen.runtime.plans import Plan


class WeightsPlan(PairOfPlans):
    """``attention`` and then its weights, for calls of one layout; made by
    ``flashgen.plan(return_weights=True)``.

    ``attention`` and ``weights`` are the plans of the two. ``steps`` are the launches of both in order,
    ``variant`` is the main kernel of the attention and ``source`` its CUDA, ``workspace_bytes`` the memory
    that a call needs beyond inputs and outputs. May be called from many threads.
    """

    __slots__ = ("_return_lse", "weights")

    def __init__(self, attention: Plan, weights: Plan, return_lse: bool) -> None:
        super().__init__((attention, weights), attention)
        self.weights, self._return_lse = weights, return_lse

    # A parameter of a score may be called self.
    def __call__(
        self, /, *inputs: Any, weights: Any = None, stream: Any = None, workspace: Any = None, **named: Any
    ) -> Any:
        """Compute arrays that have the layouts of the plan; arguments and errors as for a ``Plan``. With
        ``weights``, a contiguous fp32 array, the weights are written there.

        Returns (out, weights), or (out, lse, weights) with ``return_lse``.
        """
        values, scalars = self.attention.bound(inputs, named)
        operator = self.attention.problem.operator
        out, lse = self.attention(*inputs, stream=stream, workspace=workspace, **named)
        by_name = dict(zip(operator.positions, values, strict=True))
        by_name |= dict(zip(operator.scalars, scalars, strict=True)) | {"lse": lse, "weights": weights}
        of_weights = self.weights.problem.operator
        names = (*of_weights.positions, *of_weights.scalars)
        result = self.weights(**{name: by_name[name] for name in names}, stream=stream)
        return (out, lse, result) if self._return_lse else (out, result)


def attention_with_weights(call: Call, attend: Callable[[Call], Any]) -> Any:
    """``attention(return_weights=True)``; ``attend`` computes a call without weights. Raises as it does, and
    BadParam for lengths and for a ``return_weights`` that is not a truth value.
    """
    if not flag("return_weights", call.return_weights):
        return attend(call.replace(return_weights=False))
    check_weights(call)
    return_lse = flag("return_lse", call.return_lse)
    out, lse = attend(call.replace(return_weights=False, return_lse=True))
    kind = arrays.kind_of(call.q)
    if isinstance(kind, torchkind.TorchKind):
        from flashgen.call.compiled import attention_weights

        weights = attention_weights(call, lse, kind)
    else:
        weights = None
        with contextlib.suppress(dlpack.Traced):
            weights = compute(weights_of(call, lse), kind)
        if weights is None:
            from flashgen.call.xla import traced

            weights = traced.attention_weights(call, lse)
    return (out, lse, weights) if return_lse else (out, weights)


def weights_plan(call: Call) -> WeightsPlan:
    """``plan(return_weights=True)``. Raises what `make_plan` does, and BadParam for lengths."""
    check_weights(call)
    return_lse = flag("return_lse", call.return_lse)
    request = request_of(call.replace(return_lse=True))
    attention = make_plan(request)
    # The weights are planned for native arrays, among them the LSE that the plan of the attention allocates.
    native = tuple(adopted(request.operator, request.by_name(), None).values())
    filled = attention.ready(native, attention.pointers(native), request.scalars, None)[1]
    by_name = dict(zip(request.operator.positions, filled, strict=True))
    of_weights = weights_of(call, None)
    of_weights.arrays = tuple(by_name.get(name) for name in of_weights.operator.positions)
    return WeightsPlan(attention, make_plan(of_weights), return_lse)


def request_by_name(values: dict[str, Any]) -> Request:
    """What the weights of a call request, of the parameters of ``attention`` by name. Raises BadParam."""
    call = call_of(AttentionCall, **values)
    return weights_of(call, None)
