"""Calls of a drop-in that are like an earlier one: from its arguments straight to the plan.

A drop-in checks its arguments and makes arguments of ``attention`` of them. Where a call has
the options of an earlier call, and a guard of PyTorch finds that its tensors have the same types and layouts,
the plan is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.call import compute
from flashgen.errors import FlashgenError
from flashgen.operators.arguments import ROW_ALIGNMENT
from flashgen.runtime.arrays import tensor_kind
from flashgen.runtime.torchkind import picking

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.call.request import Request


class Shortcuts:
    """The shortcuts of one drop-in. ``names`` are what the operator calls the drop-in's arrays, of which the
    first three are q, k and v; all others may be None.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        # By options and shapes: what puts the drop-in's arrays into the operator's order, and the scalars;
        # None where a call copied an array.
        self._ways: dict[Any, tuple[Callable[[Any], Any], tuple[Any, ...]] | None] = {}

    def run(self, options: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
        """The results of a call, or None for one that no shortcut serves: the drop-in does what it does for a
        first call.
        """
        kind = tensor_kind(arrays[0])
        if kind is None or kind.records(*arrays[:3]) or kind.on_host(arrays[0]):
            return None
        key = self._key(options, arrays)
        try:
            way = self._ways.get(key)
        except TypeError:  # an option is not hashable
            return None
        if way is None:
            return None
        plan, pointers = compute.recent(key, arrays)
        if pointers is None or (pointers[0] | pointers[1] | pointers[2]) % ROW_ALIGNMENT:
            return None
        in_order, scalars = way
        try:
            return plan.run(in_order((*arrays, None)), in_order((*pointers, 0)), scalars, None)
        except FlashgenError:  # before anything is queued; the drop-in raises it by its names, or copies
            return None

    def keep(self, options: tuple[Any, ...], arrays: tuple[Any, ...], request: Callable[[], Request]) -> None:
        """After a call: keep the shortcut of calls like it. ``request`` makes what it requested of these very
        arrays, or views of them. A call that was recorded, or copied an array, has none.
        """
        kind = tensor_kind(arrays[0])
        if kind is None or kind.on_host(arrays[0]) or kind.expecting is None or kind.records(*arrays[:3]):
            return
        key = self._key(options, arrays)
        try:
            if self._ways.get(key, ()) is None:
                return
        except TypeError:  # an option is not hashable
            return
        if len(self._ways) >= compute.MAX_PLANS:
            self._ways.clear()
        requested = request()
        plan = compute.kept_plan(requested, kind)
        if plan is None:
            self._ways[key] = None
            return
        places = {name: place for place, name in enumerate(self.names)}
        absent = len(self.names)
        in_order = picking([places.get(x.name, absent) for x in requested.operator.arguments])
        self._ways[key] = in_order, requested.scalars
        compute.note(key, plan, kind.expecting, arrays)

    def _key(self, options: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
        # 1, 1.0 and True are equal, and not each is a flag.
        return self.names, arrays[0].shape, arrays[1].shape, options, *map(type, options)
