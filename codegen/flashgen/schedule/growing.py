"""Steps for more keys: how the steps of a call follow from the steps of a call with fewer keys.

Where a cache grows by a key with every call, each call is another problem. Up to the next whole KV block of
any kernel, dispatch takes the same variant, and grids and shares stay. Only a few numbers in the parameter
structs and the tensor maps of k and v change.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING, NamedTuple

from flashgen.families.params import C_TYPES
from flashgen.operators.arguments import DTYPE_BYTES
from flashgen.operators.splits import AUTO
from flashgen.schedule.plan import plan_steps
from flashgen.schedule.tensormap import stride_bytes
from flashgen.source.params import layout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.operators.arguments import Strides
    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.operators.operator import Problem
    from flashgen.schedule.parameters import Struct
    from flashgen.schedule.plan import Step, Steps

_ARRAYS, _KEYS = ("k", "v"), "seqlen_kv"
NO_KEYS = range(0)


def keys_alike(problem: Problem, variants: Iterable[Variant]) -> range:
    """The numbers of keys from which dispatch chooses among ``variants`` as for ``problem``, and for which
    the choice has the same grid and shares. Empty for a problem of which that is not known.

    Of a problem without a mask and without lengths, the model of time and the shares see the number of keys
    only in whole KV blocks.
    """
    if problem.operator.name != "attention" or problem.lengths_on_device or problem.splits != AUTO:
        return NO_KEYS
    if problem.mask_type != "none" or problem.score is not None or problem.empty:
        return NO_KEYS
    if problem.rule is not None or problem.block_lists is not None or any(v.visits is None for v in variants):
        return NO_KEYS
    keys, blocks = problem.seqlen_kv, {variant.visits.keys for variant in variants}
    first = max((-(-keys // block) - 1) * block + 1 for block in blocks)
    # With one key a causal mask from the first key on hides nothing, either.
    return range(max(2, first), min(-(-keys // block) * block for block in blocks) + 1)


def with_keys(problem: AttentionProblem, keys: int, of_k: Strides, of_v: Strides) -> AttentionProblem:
    """The problem with another number of keys, for k and v with these strides."""
    strides = list(problem.strides)
    for name, new in zip(_ARRAYS, (of_k, of_v), strict=True):
        strides[problem.operator.position(name)] = new
    return dataclasses.replace(problem, seqlen_kv=keys, strides=tuple(strides))


class _Place(NamedTuple):
    """Where a struct has the number of keys, or, of the array at a position, the stride of an axis."""

    offset: int
    code: str
    position: int = -1
    axis: int = 0


class Growth:
    """The steps of a problem for other numbers of keys."""

    def __init__(self, problem: AttentionProblem, steps: Steps) -> None:
        self.problem, self.steps = problem, steps
        self._places = [list(self._places_of(step)) for step in steps.steps]

    def _places_of(self, step: Step) -> Iterable[_Place]:
        operator, table = self.problem.operator, layout(step.variant.params)
        names = {_KEYS: (-1, 0)}
        for position in map(operator.position, _ARRAYS):
            for axis, name in enumerate(operator.arguments[position].stride_names()):
                names[name] = position, axis
        for param in step.variant.params:
            if param.name in names:
                yield _Place(table.offsets[param.name], "<" + C_TYPES[param.ctype][1], *names[param.name])

    def at(self, problem: AttentionProblem) -> Steps:
        """The steps of ``problem``, which is `with_keys`."""
        pairs = zip(self.steps.steps, self._places, strict=True)
        steps = [step._replace(struct=_moved(problem, step.struct, places)) for step, places in pairs]
        return self.steps._replace(steps=tuple(steps))

    def holds(self, device: Device, numbers: Iterable[int]) -> bool:
        """Whether the steps `at` these numbers of keys are what planning gives."""
        of_k, of_v = (self.problem.strides[self.problem.operator.position(name)] for name in _ARRAYS)
        problems = [with_keys(self.problem, keys, of_k, of_v) for keys in numbers]
        return all(self.at(x) == plan_steps(x, self.steps.main, device) for x in problems)


def _moved(problem: AttentionProblem, params: Struct, places: Iterable[_Place]) -> Struct:
    template, strides = bytearray(params.template), problem.strides
    for place in places:
        value = problem.seqlen_kv if place.position < 0 else strides[place.position][place.axis]
        struct.pack_into(place.code, template, place.offset, value)
    positions = [problem.operator.position(name) for name in _ARRAYS]
    maps = []
    for offset, position, map in params.maps:
        if position in positions:
            columns, _, *others = map.extents
            extents = columns, problem.seqlen_kv, *others
            of_batch, of_row, of_head = strides[position]
            size = DTYPE_BYTES[problem.dtype_of(problem.operator.arguments[position])]
            in_bytes = stride_bytes(extents, (of_row, of_head, of_batch), size)
            map = map._replace(extents=extents, strides=in_bytes)
        maps.append((offset, position, map))
    return params._replace(template=bytes(template), maps=tuple(maps))
