"""Which features of the table of combinations the record of a call has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.call.blockmask import BlockMask
from flashgen.call.fields import LENGTHS, SCORES
from flashgen.call.kvcache import KVCache
from flashgen.call.mask import Mask
from flashgen.call.record import GradientCall
from flashgen.operators.arguments import shown
from flashgen.operators.combinations import Feature, refuse
from flashgen.operators.dropout import NO_DROPOUT
from flashgen.operators.lengths import BOUNDS
from flashgen.operators.maskoptions import NO_WINDOW
from flashgen.operators.splits import AUTO

if TYPE_CHECKING:
    from flashgen.call.record import Call

# Features that a record has where one of these arguments is not None.
_ARGUMENTS = {
    "lengths": LENGTHS,
    "kv_starts": ("kv_starts",),
    "bounds": BOUNDS,
    "append": ("append", "rotary"),
    "sinks": ("sinks",),
    "tree": ("tree",),
    "indices": ("indices",),
    "q_rope": ("q_rope",),
    "rotary": ("rotary",),
    "dropout_seed": ("dropout_seed",),
    "score": SCORES,
}


def features_of(call: Call) -> dict[str, Feature]:
    """The features of a call of attention or its gradients, by their names in the table."""
    features: dict[str, Feature] = {}
    if isinstance(call.k, KVCache):
        features["KVCache"] = Feature("k", "is a KVCache")
    for feature, names in _ARGUMENTS.items():
        present = [name for name in names if getattr(call, name, None) is not None]
        if present:
            features[feature] = Feature(present[0])
    if "lengths" in features and isinstance(call, GradientCall):
        features["gradients_of_lengths"] = features["lengths"]
    if isinstance(call.mask, Mask):
        features["Mask"] = Feature("mask", "is a Mask")
    elif isinstance(call.mask, BlockMask) or call.block_indptr is not None:
        features["BlockMask"] = Feature("mask", "is a BlockMask")
    elif call.mask is not None:
        features["mask_array"] = Feature("mask")
    if call.dropout_p != NO_DROPOUT:
        features["dropout"] = Feature("dropout_p", f"is {shown(call.dropout_p)}")
    splits = getattr(call, "splits", AUTO)
    if splits != AUTO:
        features["splits"] = Feature("splits", f"is {shown(splits)}")
    if call.window_size != NO_WINDOW:
        features["window"] = Feature("window_size", f"is {shown(call.window_size)}")
    return features


def refuse_features(call: Call, **others: Feature) -> None:
    """Raise BadParam if a call, with ``others`` beside its record, has two features that do not go
    together.
    """
    refuse(others | features_of(call))
