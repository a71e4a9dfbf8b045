"""The seed of a call with dropout: an array on the device of the call, whatever the caller passed."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from flashgen.call.features import refuse_features
from flashgen.errors import BadParam, NullPointer, arg
from flashgen.operators.arguments import shown
from flashgen.operators.dropout import NO_DROPOUT, probability_of
from flashgen.runtime import dlpack, torchkind
from flashgen.runtime.arrays import kind_of

if TYPE_CHECKING:
    from flashgen.call.record import Call

_WORD = 1 << 64


def seeded(call: Call, draws: bool = True) -> Call:
    """The call with ``dropout_p`` as a float, and with dropout an array as ``dropout_seed``. ``draws`` is
    whether PyTorch's generator gives one to a call without a seed. Raises BadParam and NullPointer.
    """
    dropout_p = probability_of(call.dropout_p)
    if dropout_p == NO_DROPOUT:
        return call.replace(dropout_p=dropout_p)
    refuse_features(call)
    seed, kind, like = call.dropout_seed, kind_of(call.q), call.q
    if seed is None:
        if not (draws and isinstance(kind, torchkind.TorchKind)):
            raise NullPointer(
                f"{arg('dropout_seed')} is None and {arg('dropout_p')} is {dropout_p:g}; expected (seed, "
                "offset), two integers, or an int64 array of them"
                + (": PyTorch tensors alone draw their own" if draws else ", as in the forward call")
            )
        seed = kind.random_integers(2, call.q, call.stream)
    elif isinstance(seed, (tuple, list)):
        if kind is None:
            like = dlpack.adopt(call.q, "q", call.stream)
            kind = kind_of(like)
        seed = kind.integers(_integers(seed), like, call.stream)
    return call.replace(dropout_p=dropout_p, dropout_seed=seed)


def _integers(seed: Any) -> list[int]:
    """Seed and offset as int64, with the same bits as the integers of a caller. Raises BadParam."""
    try:
        numbers = [operator.index(x) for x in seed]
    except TypeError:
        numbers = []
    if len(numbers) != 2 or min(numbers) < -_WORD // 2 or max(numbers) >= _WORD:
        raise BadParam(
            f"{arg('dropout_seed')} is {shown(seed)}; expected (seed, offset), integers of 64 bits, or an "
            "int64 array of them"
        )
    return [x - _WORD if x >= _WORD // 2 else x for x in numbers]
