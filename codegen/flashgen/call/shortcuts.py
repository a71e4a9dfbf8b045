"""Shortcuts: a call like an earlier one goes from its arguments straight to its plan, or to both plans.

A drop-in, or ``attention(append=)``, checks its arguments and makes requests from them. If a call has the
options of an earlier call, and a guard of PyTorch finds that its tensors have the same types and layouts,
the plans are the same.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.call import compute
from flashgen.errors import FlashgenError
from flashgen.operators.arguments import ROW_ALIGNMENT
from flashgen.runtime.arrays import tensor_kind
from flashgen.runtime.torchkind import picking

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.call.request import Request
    from flashgen.runtime.arrays import Kind
    from flashgen.runtime.plans import Plan


class Leg(NamedTuple):
    """A plan with its scalars; ``in_order`` puts the arrays of a call, or their pointers, into its order."""

    plan: Plan
    in_order: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    scalars: tuple[Any, ...]


Way = tuple[Leg, ...]


def keep(key: Any, arrays: tuple[Any, ...], kind: Kind, *legs: tuple[Any, ...]) -> None:
    """Keep the plans of calls like one with these arrays of ``kind``. For each plan ``legs`` has the plan,
    the places of its arguments among the arrays of a call, and the scalars.
    """
    try:
        compute.note(key, _way(*legs), kind.expecting, arrays)
    except TypeError:  # an option is not hashable
        return


@lru_cache(maxsize=compute.MAX_PLANS)
def _way(*legs: tuple[Plan, tuple[int, ...], tuple[Any, ...]]) -> Way:
    return tuple(Leg(plan, picking(places), scalars) for plan, places, scalars in legs)


class Shortcuts:
    """The shortcuts of one drop-in. ``names`` are the operator's names of the drop-in's arrays. The first
    three are q, k and v; the others may be None.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self._copying: set[Any] = set()  # keys of calls that copied an array, which have no shortcut

    def run(self, options: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
        """The results of a call, or None without a shortcut: then the drop-in computes it as a first call."""
        kind = tensor_kind(arrays[0])
        if kind is None or kind.records(*arrays[:3]) or kind.on_host(arrays[0]):
            return None
        try:
            way, pointers = compute.recent(self._key(options, arrays), arrays)
        except TypeError:  # an option is not hashable
            return None
        if pointers is None or (pointers[0] | pointers[1] | pointers[2]) % ROW_ALIGNMENT:
            return None
        ((plan, in_order, scalars),) = way
        try:
            return plan.run(in_order((*arrays, None)), in_order((*pointers, 0)), scalars, None)
        except FlashgenError:  # before anything is queued; the drop-in raises it by its names, or copies
            return None

    def keep(self, options: tuple[Any, ...], arrays: tuple[Any, ...], request: Callable[[], Request]) -> None:
        """Keep the shortcut of calls like this one, after it. ``request`` makes its request again, with these
        arrays or views of them. A call that records gradients, or copied an array, has no shortcut.
        """
        kind = tensor_kind(arrays[0])
        if kind is None or kind.on_host(arrays[0]) or kind.expecting is None or kind.records(*arrays[:3]):
            return
        key = self._key(options, arrays)
        try:
            if key in self._copying:
                return
        except TypeError:  # an option is not hashable
            return
        requested = request()
        plan = compute.kept_plan(requested, kind)
        if plan is None:
            if len(self._copying) >= compute.MAX_PLANS:
                self._copying.clear()
            self._copying.add(key)
            return
        places = {name: place for place, name in enumerate(self.names)}
        in_order = tuple(places.get(x.name, len(places)) for x in requested.operator.arguments)
        keep(key, arrays, kind, (plan, in_order, requested.scalars))

    def _key(self, options: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
        # The types are part of the key, because 1, 1.0 and True are equal.
        return self.names, arrays[0].shape, arrays[1].shape, options, *map(type, options)
