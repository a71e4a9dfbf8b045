"""Which features of a call do not go together: one table, a row a pair, from which errors are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashgen.errors import BadParam, arg

if TYPE_CHECKING:
    from collections.abc import Mapping


class Feature(NamedTuple):
    """How a message says that a call has a feature: by an argument, and a predicate of it."""

    argument: str
    predicate: str = "was given"


class Pair(NamedTuple):
    """Two features that no call has together, in the order of the message. ``advice`` says why, and what
    would do; arguments are in braces there, and ``{first}`` and ``{second}`` are the arguments of both.
    """

    first: str
    second: str
    advice: str


_ONE_LENGTH = "there are weights of sequences of one length alone: {}, or leave {{first}} out".format
_GRADIENT = "there are gradients of arrays of a score {}, or detach {{first}}".format
_ALONE = "no kernel has both: leave one of the two out"
_OF_CODES = (
    "attention of e4m3 codes has {causal}, {window_size}, masks, scores, sinks, packed or padded "
    "sequences, and caches: leave {first} out, or pass {q}, {k} and {v} of 16 bits"
)
_OF_LATENT = (
    "no kernel reads it with such a cache: leave {first} out, or expand the cache into keys and values"
)
PAIRS = (
    Pair(
        "dropout",
        "KVCache",
        "dropout is for training: pass k and v, with {kv_lengths} if need be, or leave {first} out",
    ),
    *(
        Pair("dropout", name, "dropout is for training: leave one of the two out")
        for name in ("index", "pages", "splits")
    ),
    Pair("dropout", "kv_starts", _ALONE),
    Pair("fp32_dkv", "kv_starts", _ALONE),
    Pair("fp32_dkv", "dropout", _ALONE),
    Pair("weights", "dropout", "there are weights without dropout alone: leave one of the two out"),
    Pair("weights", "KVCache", _ONE_LENGTH("pass k and v of one length")),
    Pair("weights", "lengths", _ONE_LENGTH("call attention for each sequence by itself")),
    Pair("weights", "append", _ONE_LENGTH("pass k and v of one length")),
    Pair("weights", "Mask", "it has no weights: pass a mask array, or leave {first} out"),
    Pair("weights", "BlockMask", "it has no weights: pass a mask array, or leave {first} out"),
    Pair("score_gradient", "KVCache", _GRADIENT("for sequences of one length alone: pass k and v of one")),
    Pair(
        "score_gradient",
        "lengths",
        _GRADIENT("for sequences of one length alone: call attention for each sequence"),
    ),
    Pair("score_gradient", "BlockMask", _GRADIENT("without lists of key blocks alone: pass a mask array")),
    Pair("score_gradient", "Mask", _GRADIENT("without a mask by a line alone: pass a mask array")),
    Pair("score_gradient", "dropout", _GRADIENT("without dropout alone: leave {second} out")),
    Pair("KVCache", "BlockMask", "no kernel has both: pass k and v of one length, or a mask array"),
    Pair("lengths", "BlockMask", "no kernel has both: pass sequences of one length, or a mask array"),
    Pair(
        "kv_starts",
        "Mask",
        "its keys are counted from the first row: put the start into its line, as kv >= start[b], and leave "
        "{first} out",
    ),
    Pair(
        "kv_starts",
        "array_of_keys",
        "with starts the keys of a score are counted from the start of their sequence: use an array without "
        "seqlen_kv, or leave {first} out",
    ),
    Pair(
        "gradients_of_lengths",
        "mask_array",
        "gradients of sequences of several lengths take causal or {window_size}",
    ),
    Pair(
        "mask_array",
        "packed",
        "a {mask} needs as many rows and columns for each sequence: pass queries that are padded, not "
        "packed, and keys that are padded or in a KVCache",
    ),
    *(
        Pair("tree", name, "no kernel has both: put the tree into a mask array, or leave one of the two out")
        for name in ("mask_array", "Mask", "dropout")
    ),
    *(
        Pair("cu_seqlens_kv", name, "packed keys have no {second}")
        for name in ("kv_lengths", "kv_starts", "index", "pages")
    ),
    Pair("pages", "index", "each row of {first} is a sequence's already"),
    *(
        Pair(name, "codes", _OF_CODES)
        for name in ("kv_starts", "dropout", "dropout_seed", "splits", "tree", "indices", "q_rope")
    ),
    Pair("latent", "codes", "queries of a latent cache have 16 bits: leave {second} out, and pass such {q}"),
    Pair(
        "append",
        "codes",
        "q of such a call has 16 bits: call append() first, and then attention over the cache with {q} of "
        "e4m3",
    ),
    Pair("Mask", "codes_of_lengths", "no kernel has both: pass q, k and v of one length, or of 16 bits"),
    *(
        Pair(name, "latent", _OF_LATENT)
        for name in ("mask_array", "Mask", "sinks", "score", "kv_starts", "scales", "tree")
    ),
    Pair(
        "indices",
        "packed",
        "lists are of padded queries: pass {q} as (batch, seqlen_q, num_heads_q, head_dim), or the cache as "
        "one sequence of all its slots, {q} as (1, tokens, num_heads_q, head_dim), and slots in {first}",
    ),
    Pair(
        "q_rope",
        "rotary",
        "append rotates {q} alone: rotate {first} before the call, and append the rotated rows without "
        "{second}, or pass {q} with all its elements",
    ),
    Pair("indices", "bounds", "the lists say how many keys there are: leave {second} out"),
    Pair("window", "latent", "its calls take {causal}, or no mask"),
)


def refuse(features: Mapping[str, Feature]) -> None:
    """Raise BadParam for the first pair in the table of which a call has both; ``features`` are the call's,
    by their names in the table.
    """
    for pair in PAIRS:
        if pair.first in features and pair.second in features:
            raise BadParam(_message(pair, features[pair.first], features[pair.second]))


def _message(pair: Pair, first: Feature, second: Feature) -> str:
    one, other = arg(first.argument), arg(second.argument)
    if first.predicate == second.predicate == "was given":
        both = f"{one} and {other} were given"
    else:
        both = f"{one} {first.predicate} and {other} {second.predicate}"
    advice, *rest = pair.advice.split("{")
    for part in rest:
        name, _, after = part.partition("}")
        advice += {"first": one, "second": other}.get(name, arg(name)) + after
    return f"{both}; {advice}"
