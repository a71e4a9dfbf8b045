"""Problems of attention for tests, with the strides of each array by its name."""

import dataclasses

from flashgen.operators import operator_of
from flashgen.operators.attention_problem import AttentionProblem
from flashgen.operators.masks import UNBOUNDED

DEFAULTS = {
    "dtype": "fp16",
    "mask_type": "none",
    "diagonal_offset": 0,
    "window_left": UNBOUNDED,
    "window_right": UNBOUNDED,
    "softmax_scale": 0.25,
    "return_lse": False,
}
NAMES = tuple(argument.name for argument in operator_of("attention", has_lengths=False).arguments)


def problem(**fields):
    """A problem whose strides are given as ``q_strides``, ...; ``return_lse`` gives it a contiguous lse. By
    default it is of fp16, has no mask, no window and no lse, and v has the head dim of q.
    """
    fields = DEFAULTS | {"head_dim_v": fields["head_dim"]} | fields
    fields["strides"] = _strides(fields, (None,) * len(NAMES))
    return AttentionProblem(**fields)


def replace(made, **changes):
    """``dataclasses.replace``, also of a named tuple; of a problem, strides by name."""
    if isinstance(made, AttentionProblem):
        changes["strides"] = _strides(changes, made.strides)
    return made._replace(**changes) if isinstance(made, tuple) else dataclasses.replace(made, **changes)


def _strides(fields, before):
    found = dict(zip(NAMES, before, strict=True))
    for name in NAMES:
        if f"{name}_strides" in fields:
            found[name] = fields.pop(f"{name}_strides")
    if "return_lse" in fields:
        found["lse"] = (0, 0) if fields.pop("return_lse") else None
    return tuple(found.values())
