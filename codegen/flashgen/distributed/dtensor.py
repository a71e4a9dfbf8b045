"""DTensors as arguments of ``attention``: how a call may be sharded, by the batch and by heads."""

from __future__ import annotations

from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.utils._pytree import tree_leaves

from flashgen.call.autograd import OF_BACKWARD  # its import makes the operators
from flashgen.call.codec import INPUTS
from flashgen.call.fields import DIFFERENTIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

# Arrays of tokens, and arrays with a value for each query.
_OF_TOKENS, _OF_ROWS = ("q", "k", "v", "out", "dout"), ("lse", "dlse")
# Arrays that say how long each batch entry is.
_OF_BATCH = ("kv_lengths", "kv_starts")
_Rule = tuple[list[Any], list[Any]]


def register() -> None:
    """Let DTensors be arguments of ``attention``, and of its gradients.

    Each rank computes its shard where q, k and v are sharded by the batch or by heads, if the ranks divide
    the kv heads. PyTorch brings other placements into one of these, or replicates. A call with dropout, a
    mask, lists of key blocks or a score modification is computed whole on each rank. Sequences are not
    sharded: ``flashgen.distributed.attention`` cuts them.
    """
    register_sharding(torch.ops.flashgen.attention.default)(_forward_rules)
    register_sharding(torch.ops.flashgen.attention_backward.default)(_backward_rules)


def _forward_rules(*args: Any) -> Sequence[_Rule]:
    return _rules(dict(zip(INPUTS, args, strict=False)), args, ("out", "lse"))


def _backward_rules(*args: Any) -> Sequence[_Rule]:
    arrays = dict(zip(OF_BACKWARD, args, strict=False))
    return _rules(arrays, args, tuple("d" + name for name in DIFFERENTIABLE))


def _rules(arrays: dict[str, Any], args: Sequence[Any], results: tuple[str, ...]) -> list[_Rule]:
    """The placements of one dimension of a mesh: of the results, and of the arguments that are tensors."""
    tensors = [x for x in tree_leaves(list(args)) if hasattr(x, "placements")]
    rules: list[_Rule] = [([Replicate()] * len(results), [Replicate()] * len(tensors))]
    there = {name: x for name, x in arrays.items() if x is not None}
    known = {*_OF_TOKENS, *_OF_ROWS, *_OF_BATCH, "sinks", "cu_seqlens_q", "cu_seqlens_kv"}
    # Random numbers depend on the place of a batch entry and a head among all of them.
    if not there.keys() <= known or len(tensors) > len(there):
        return rules
    has_batch = there["q"].ndim == 4
    if has_batch:
        rules.append(_sharded(there, results, _of_batch))
    if _divides(there["k"].shape[-2], tuple(there["q"].mesh.shape)):
        heads = _of_heads_with_batch if has_batch else _of_heads
        rules.append(_sharded(there, results, heads))
    return rules


def _sharded(there: dict[str, Any], results: tuple[str, ...], placement: Any) -> _Rule:
    outputs = []
    for name in results:
        of = name.removeprefix("d")
        if name != "dsinks":
            outputs.append(placement(of))
        elif "sinks" not in there:
            outputs.append(Replicate())  # an empty tensor
        else:
            outputs.append(Partial() if placement("sinks") == Replicate() else placement("sinks"))
    return outputs, [placement(name) for name in there]


def _of_batch(name: str) -> Any:
    return Replicate() if name == "sinks" else Shard(0)


def _of_heads_with_batch(name: str) -> Any:
    places = dict.fromkeys(_OF_TOKENS, 2) | dict.fromkeys(_OF_ROWS, 1) | {"sinks": 0}
    return Shard(places[name]) if name in places else Replicate()


def _of_heads(name: str) -> Any:
    places = dict.fromkeys(_OF_TOKENS, 1) | dict.fromkeys(_OF_ROWS, 0) | {"sinks": 0}
    return Shard(places[name]) if name in places else Replicate()


def _divides(heads: int, mesh: tuple[int, ...]) -> bool:
    """Whether any dimensions of a mesh, together, cut the heads evenly. PyTorch leaves out by itself what has
    fewer heads than ranks.
    """
    products = (prod(some) for n in range(1, len(mesh) + 1) for some in combinations(mesh, n))
    return all(count > heads or heads % count == 0 for count in products)
