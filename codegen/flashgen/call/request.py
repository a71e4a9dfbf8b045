"""What a call requests of an operator: arrays, options and scalars, in the operator's order."""

from __future__ import annotations

import importlib
import math
import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from flashgen.call import blockmask
from flashgen.call.blockmask import BlockMask
from flashgen.call.dropout import refuse_cache
from flashgen.call.fields import LENGTHS, PLAN_KEYWORDS, SHORTHANDS
from flashgen.call.generate import function
from flashgen.call.keywords import advice
from flashgen.call.kvcache import FIELDS, KVCache
from flashgen.call.mask import Mask
from flashgen.call.record import AttentionCall, GradientCall
from flashgen.errors import BadParam, NullPointer, arg
from flashgen.operators.arguments import shown
from flashgen.operators.dropout import NO_DROPOUT
from flashgen.operators.lengths import refuse_bounds, refuse_mask
from flashgen.operators.maskoptions import mask_type_name, sees_no_later_key
from flashgen.operators.rules import PREFIX

if TYPE_CHECKING:
    from flashgen.call.record import Call
    from flashgen.operators.operator import Operator
    from flashgen.operators.scores import Score

# The names of score modifications or their formulas, the type of each parameter of a formula, and the numbers
# that tensors hold.
ScoreKey = tuple[tuple[str, ...], tuple[tuple[str, str], ...], tuple[str, ...]]


@dataclass(slots=True, eq=False)
class Request:
    """``arrays`` has an array or None for each argument of the operator; ``workspace`` is memory of the
    caller for what the kernels keep.
    """

    operator: Operator
    arrays: tuple[Any, ...]
    options: tuple[Any, ...] = ()
    scalars: tuple[Any, ...] = ()
    stream: Any = None
    backend: str | None = None
    algorithm: str | None = None
    workspace: Any = None

    def with_arrays(self, arrays: tuple[Any, ...], stream: Any) -> Request:
        """The request with other arrays, on a stream."""
        return Request(
            self.operator,
            arrays,
            self.options,
            self.scalars,
            stream,
            self.backend,
            self.algorithm,
            self.workspace,
        )

    def by_name(self) -> dict[str, Any]:
        """The arrays by the names of the arguments."""
        # Not by positions, a cached property, which torch.compile does not trace.
        return {x.name: array for x, array in zip(self.operator.arguments, self.arrays, strict=True)}


class _Packed(Request):
    """A request made empty, to be filled attribute by attribute: quicker than its arguments by position, and
    torch.compile of PyTorch 2.11 traces it, but not object.__new__.
    """

    __slots__ = ()

    def __init__(self) -> None:
        pass


def packing(
    operator: Operator, record: type[Call]
) -> Callable[[Any, Operator, Any, tuple[Any, ...]], Request]:
    """``pack(call, operator, score, scalars)``: the request of a record. Its ``operator`` is this one, or has
    a score modification, whose arrays are still to be added.
    """
    names = {field.name for field in record.fields}

    def value(name: str) -> str:
        return f"call.{name}" if name in names else "None"

    arrays = "".join(f"{value(name)}, " for name in operator.positions)
    options = "".join(f"{'score' if name == 'score' else value(name)}, " for name in operator.options)
    lines = (
        "def pack(call, operator, score, scalars):",
        "    request = Packed()",
        "    request.operator, request.scalars = operator, scalars",
        f"    request.arrays = ({arrays})",
        f"    request.options = ({options})",
        *(f"    request.{name} = {value(name)}" for name in ("stream", "backend", "algorithm", "workspace")),
        "    return request",
        "",
    )
    return function("pack", "\n".join(lines), {"Packed": _Packed})


class _Operators:
    """An operator, with a score modification or without, and how records become its requests. Loaded when a
    call first needs it: the first calls of a process need not wait for all modules.
    """

    __slots__ = ("_lengths", "_module", "_record", "operator_for", "pack", "plain")

    def __init__(self, module: str, record: type[Call], lengths: bool) -> None:
        self._module, self._record, self._lengths = module, record, lengths
        self.plain: Any = None
        self.operator_for: Any = None
        self.pack: Any = None

    def load(self) -> None:
        operator_for = importlib.import_module(f"flashgen.operators.{self._module}").operator_for
        self.operator_for = partial(operator_for, lengths=self._lengths)
        operator = operator_for(None, self._lengths)
        self.pack = packing(operator, self._record)
        self.plain = operator

    def request(self, call: Call) -> Request:
        """What a call requests. Raises BadParam."""
        if self.plain is None:
            self.load()
        if isinstance(call.mask, Mask):
            return self._lined(call, call.mask)
        if not call.has_score():
            return self.pack(call, self.plain, None, (call.softmax_scale,))
        score, arrays, numbers = score_of(call)
        request = self.pack(call, self.operator_for(score), score, (call.softmax_scale, *numbers))
        request.arrays += arrays
        return request

    def _lined(self, call: Call, mask: Mask) -> Request:
        """What a call with a mask by a line requests. Raises BadParam."""
        if mask_type_name(call.mask_type) in ("none", "dense"):
            raise BadParam(
                f"{arg('mask_type')} is {shown(call.mask_type)}, and {arg('mask')} is a Mask, which is true "
                f"where a key is visible; leave {arg('mask_type')} out"
            )
        score, arrays, numbers = score_of(call) if call.has_score() else (None, (), ())
        operator = self.operator_for(score, rule=mask.rule.rule)
        request = self.pack(call.replace(mask=None), operator, score, (call.softmax_scale, *numbers))
        request.arrays += (*arrays, *mask.arguments.values())
        request.options += (mask.rule,)
        return request


_ATTENTION = _Operators("attention", AttentionCall, lengths=False)
_WITH_LENGTHS = _Operators("attention", AttentionCall, lengths=True)
_BACKWARD = _Operators("backward", GradientCall, lengths=False)
_BACKWARD_WITH_LENGTHS = _Operators("backward", GradientCall, lengths=True)
_WEIGHTS = _Operators("weights", AttentionCall, lengths=False)
_SCORE_GRADIENT = _Operators("score_gradient", GradientCall, lengths=False)


def load_operators() -> None:
    """Load what the functions below use, before torch.compile traces them."""
    plain = _ATTENTION, _WITH_LENGTHS, _BACKWARD, _BACKWARD_WITH_LENGTHS
    for operators in (*plain, _WEIGHTS, _SCORE_GRADIENT):
        if operators.plain is None:
            operators.load()


def request_of(call: Call) -> Request:
    """What a call of ``attention`` requests. Raises BadParam, and NullPointer for a KVCache without
    lengths.
    """
    # Every call comes here, and most are plain.
    is_plain = call.is_plain()
    if not is_plain and not call.is_normal():
        call = call.normalised()
    if isinstance(call.k, KVCache):
        call = of_cache(call)
    if isinstance(call.mask, BlockMask):
        call = blockmask.with_arrays(call)
    if (
        call.kv_lengths is None
        and call.kv_starts is None
        and call.cu_seqlens_q is None
        and call.cu_seqlens_kv is None
    ):
        if call.max_seqlen_q is not None or call.max_seqlen_kv is not None:
            refuse_bounds(call.max_seqlen_q, call.max_seqlen_kv)
        operators = _ATTENTION
    else:
        blockmask.refuse(call, "a call with lengths")
        operators = _WITH_LENGTHS
    if is_plain and operators.plain is not None and (call.mask is None or not isinstance(call.mask, Mask)):
        return operators.pack(call, operators.plain, None, (call.softmax_scale,))
    return operators.request(call)


def of_cache(call: Call) -> Call:
    """A call over a KVCache, with what the cache holds as arrays of the call. Raises BadParam and
    NullPointer.
    """
    keys: KVCache = call.k
    if call.v is not None:
        raise BadParam(f"{arg('v')} was given with a KVCache, which holds {arg('v')} as well; leave v out")
    for name in ("kv_lengths", "cu_seqlens_kv"):
        if getattr(call, name) is not None:
            raise BadParam(f"{arg(name)} was given with a KVCache, which has lengths of its own")
    if call.kv_starts is not None:
        raise BadParam(f"{arg('kv_starts')} was given with a KVCache; pass KVCache(..., starts=...)")
    refuse_cache(call)
    if keys.lengths is None:
        raise NullPointer(f"{arg('lengths')} of the KVCache is None; expected an int32 array, (batch,)")
    other: Any = call.copy()  # `replace` would take longer
    other.k, other.v, other.kv_lengths, other.kv_starts = keys.k, keys.v, keys.lengths, keys.starts
    other.pages, other.index = keys.pages, keys.index
    return other


def gradients_of(call: Call) -> Request:
    """What a call of ``attention_backward`` requests. Raises BadParam."""
    is_plain = call.is_plain()
    if not is_plain and not call.is_normal():
        call = call.normalised()
    if isinstance(call.k, KVCache):
        raise BadParam(
            f"{arg('k')} is a KVCache, which has no gradients; pass k and v, with kv_lengths if need be"
        )
    if isinstance(call.mask, BlockMask):
        call = blockmask.with_arrays(call)
    if (
        call.kv_lengths is None
        and call.kv_starts is None
        and call.cu_seqlens_q is None
        and call.cu_seqlens_kv is None
    ):
        if call.max_seqlen_q is not None or call.max_seqlen_kv is not None:
            refuse_bounds(call.max_seqlen_q, call.max_seqlen_kv)
        operators = _BACKWARD
    else:
        if not isinstance(call.mask, Mask):
            refuse_mask(call.mask)
        blockmask.refuse(call, "a call with lengths")
        operators = _BACKWARD_WITH_LENGTHS
    if is_plain and operators.plain is not None and (call.mask is None or not isinstance(call.mask, Mask)):
        return operators.pack(call, operators.plain, None, (call.softmax_scale,))
    return operators.request(call)


def weights_of(call: Call, lse: Any) -> Request:
    """What a call of ``attention`` without lengths requests of the operator of its weights. ``lse`` is of the
    forward call. Raises BadParam.
    """
    if not call.is_normal():
        call = call.normalised()
    blockmask.refuse(call, "return_weights")
    if call.max_seqlen_q is not None or call.max_seqlen_kv is not None:
        refuse_bounds(call.max_seqlen_q, call.max_seqlen_kv)
    refuse_line(call)
    request = _WEIGHTS.request(call)
    place = request.operator.position("lse")
    request.arrays = *request.arrays[:place], lse, *request.arrays[place + 1 :]
    request.algorithm = None  # there is one kernel, beside any algorithm
    return request


def refuse_line(call: Call) -> None:
    """Raise BadParam for the weights of a call with a mask by a line."""
    if isinstance(call.mask, Mask):
        raise BadParam(
            f"{arg('mask')} is a Mask, of which there are no attention weights; pass a mask array, or leave "
            "return_weights out"
        )


def score_gradient_of(call: Call, name: str) -> Request:
    """What a call of ``attention_backward`` requests for the gradient of an array of its score modification,
    which the caller calls ``name``. Raises BadParam.
    """
    if not call.is_normal():
        call = call.normalised()
    refuse_lengths_beside(name, call)
    _refuse_beside(name, call)
    score, arrays, numbers = score_of(call)
    array = {of: shorthand.param for of, shorthand in SHORTHANDS}.get(name, name)
    there = [] if score is None else [param.name for param in score.arrays if not param.is_integer]
    if array not in there:
        has = f"has the arrays of numbers {', '.join(there)}" if there else "has no array of numbers"
        raise BadParam(f"{arg('dparams')} has {shown(name)}; the score of the call {has}")
    if _SCORE_GRADIENT.plain is None:
        _SCORE_GRADIENT.load()
    score = score.with_respect_to(array)
    operator = _SCORE_GRADIENT.operator_for(score)
    request = _SCORE_GRADIENT.pack(call, operator, score, (call.softmax_scale, *numbers))
    request.arrays += arrays
    request.workspace = None  # it is for the gradients of the other arrays
    return request


def check_gradient(call: Call, name: str) -> None:
    """That an array ``name`` of the score modification of a call can have a gradient. Raises BadParam."""
    from flashgen.operators.reduction import indices_of

    array = {of: shorthand.param for of, shorthand in SHORTHANDS}.get(name, name)
    score, _, _ = score_of(call)
    if any(param.name == array for param in score.arrays):
        _refuse_beside(name, call)
        indices_of(score.with_respect_to(array))


def _refuse_beside(name: str, call: Call) -> None:
    """Raise BadParam for the gradient of an array ``name`` of a score, if the call has a mask by a line,
    lists of key blocks, or dropout.
    """
    blockmask.refuse(call, "a gradient of an array of a score")
    if call.dropout_p != NO_DROPOUT:
        raise BadParam(
            f"{arg('dropout_p')} is {shown(call.dropout_p)}, and {arg(name)} is to have a gradient, which "
            f"flashgen does not compute beside dropout; leave {arg('dropout_p')} out, or detach {arg(name)}"
        )
    if isinstance(call.mask, Mask):
        raise BadParam(
            f"{arg('mask')} is a Mask, and {arg(name)} is to have a gradient, which flashgen does not "
            f"compute beside one; pass a mask array, or detach {arg(name)}"
        )


def refuse_lengths_beside(name: str, call: Call) -> None:
    """Raise BadParam for the gradient of an array ``name`` of a score, if the call has lengths."""
    present = [other for other in LENGTHS if getattr(call, other) is not None]
    if present or isinstance(call.k, KVCache):
        what = f"{arg(present[0])} was given" if present else f"{arg('k')} is a KVCache"
        raise BadParam(
            f"{what}, and {arg(name)} is to have a gradient; there are gradients of arrays of a score for "
            f"sequences of one length alone: call attention for each sequence, or detach {arg(name)}"
        )


def names_of(call: Call) -> dict[str, str]:
    """What the caller of ``attention`` calls arguments of the operators, for `errors.naming`."""
    names = {"cu_seqlens_new": "cu_seqlens_q"}
    if isinstance(call.mask, Mask):
        names |= {PREFIX + name: f"{name} of the mask" for name in call.mask.arrays}
    for name, shorthand in SHORTHANDS:
        if getattr(call, name) is not None:
            names[shorthand.param] = name
    if isinstance(call.k, KVCache) and call.kv_lengths is None:
        names |= {"kv_lengths": "lengths"} | FIELDS
        if call.kv_starts is None:
            names["kv_starts"] = "starts"
    if isinstance(call.mask, BlockMask) or call.block_indptr is not None:
        names |= blockmask.FIELDS
    return names


def score_of(call: Call) -> tuple[Score | None, tuple[Any, ...], tuple[Any, ...]]:
    """The score modification of a call, None where params are empty, its arrays and its numbers. Raises
    BadParam.
    """
    names, values = named_score(call)
    if not names:
        return None, (), ()
    score = _chain(os.environ.get("FLASHGEN_SPECS", ""), names, _types(names, values))
    params = {param.name for param in score.params}
    # A name that is wrong comes first: because of it another is missing.
    for name in sorted(values.keys() - params, key=str):
        has = f"it has {', '.join(sorted(params)) or 'none'}{advice(str(name), params)}"
        raise BadParam(f"{arg('score')} {score.title} has no parameter {name}; {has}")
    for name in sorted(params - values.keys()):
        example = ", ".join(f"{param!r}: ..." for param in sorted(params))
        raise BadParam(f"{arg('score')} {score.title} needs the parameter {name}; pass params={{{example}}}")
    tensors = _tensors(score, values)
    if tensors:
        score = _with_tensors(score, tensors)
        values |= {name: values[name].reshape(1) for name in tensors}
    return (
        score,
        tuple([values[param.name] for param in score.arrays]),
        tuple([values[param.name] for param in score.scalars]),
    )


def score_key(call: Call) -> ScoreKey | None:
    """What tells the score modification of a call from all others, None without one. Raises BadParam."""
    names, values = named_score(call)
    if not names:
        return None
    types = _types(names, values)
    return names, types, _tensors(score_of_key((names, types, ())), values)


def _types(names: tuple[str, ...], values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The type of each parameter, where the modification depends on it."""
    typed = not all(map(str.isidentifier, names))
    for x in values.values():
        # Arrays of 16-bit elements have kernels of their own.
        typed = typed or getattr(getattr(x, "dtype", None), "itemsize", 0) == 2
    return tuple((name, _type(values[name])) for name in sorted(values, key=str)) if typed else ()


def _tensors(score: Score, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The numbers of a modification that arrays hold."""
    tensors: tuple[str, ...] = ()
    for param in score.scalars:
        if _is_tensor(values.get(param.name)) and not param.is_integer:
            tensors += (param.name,)
    return tensors


def score_of_key(key: ScoreKey) -> Score:
    """The score modification with this key, of the folders of FLASHGEN_SPECS. Raises BadParam."""
    names, types, tensors = key
    score = _chain(os.environ.get("FLASHGEN_SPECS", ""), names, types)
    return _with_tensors(score, tensors) if tensors else score


def named_score(call: Call) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of the score modifications of a call, and their parameters. Raises BadParam."""
    score, params = call.score, call.params
    names = [score] if isinstance(score, str) else score
    if names is not None and not (isinstance(names, (list, tuple)) and names):
        raise BadParam(_no_score(score))
    for name in names or ():
        if not isinstance(name, str):
            raise BadParam(_no_score(name))
    if params is not None and not isinstance(params, Mapping):
        raise BadParam(
            f"{arg('params')} is {shown(params)}; it must map the names of parameters to numbers and arrays"
        )
    names = [name if name.isidentifier() else " ".join(name.split()) for name in names or ()]
    values = dict(params or {})
    if not names and values:
        raise BadParam(f"{arg('params')} has {', '.join(map(str, values))}, but no score was given")
    for name, shorthand in SHORTHANDS:
        value = getattr(call, name)
        if value is None:
            continue
        if score is not None:
            raise BadParam(
                f"{arg('score')} is {shown(score)} and softcap or alibi_slopes was given as well; name all "
                "in score, such as ('softcap', 'mine'), and give their params"
            )
        if shorthand.positive:
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                none = f"{arg(f'no {name}', 'None')} for {shorthand.without}"
                raise BadParam(f"{arg(name)} is {shown(value)}; it must be a number above 0, or {none}")
        is_causal = sees_no_later_key(call.causal, call.mask_type, call.window_size)
        names.append(shorthand.causal if is_causal else shorthand.other)
        values[shorthand.param] = value
    return tuple(names), values


def _no_score(x: Any) -> str:
    return (
        f"{arg('score')} is {shown(x)}; it must be the name of a score modification, a formula, or a list of "
        "these"
    )


def _type(value: Any) -> str:
    """The type in a formula of a parameter that has this value."""
    if type(value) is float:
        return "f32"
    if isinstance(value, numbers.Number):
        return "i32" if isinstance(value, numbers.Integral) else "f32"
    return _type_of_elements(getattr(value, "dtype", None))


@lru_cache(maxsize=64)
def _type_of_elements(dtype: Any) -> str:
    """The type in a formula of an array with elements of a library's dtype."""
    from flashgen.operators.scores import HALF_TYPES

    name = str(dtype).rpartition(".")[2]
    return "i32" if name.endswith("int32") else HALF_TYPES.get(name, "f32")


def _is_tensor(value: Any) -> bool:
    """Whether a value is an array of one element, which takes the place of a number."""
    if type(value) is float or getattr(value, "shape", None) not in ((), (1,)):
        return False
    return not isinstance(value, numbers.Number)


@lru_cache(maxsize=64)
def _with_tensors(score: Score, names: tuple[str, ...]) -> Score:
    return score.with_tensors(names)


@lru_cache(maxsize=256)
def _chain(folders: str, names: tuple[str, ...], types: tuple[tuple[str, str], ...]) -> Score:
    """The modifications of these names, one after another, as the value ``folders`` of FLASHGEN_SPECS has
    them, or formulas. ``types`` has the types of the parameters of formulas.
    """
    from flashgen.families.formulas import modification
    from flashgen.families.scores import load_scores
    from flashgen.operators.scores import chained

    scores = load_scores(keywords=PLAN_KEYWORDS).by_name
    chain = []
    for name in names:
        score = modification(name, scores, dict(types), keywords=PLAN_KEYWORDS)
        if score is None:
            there = ", ".join(map(repr, sorted(scores)))
            raise BadParam(f"{arg('score')} is {name!r}; there are {there}, and formulas that read `score`")
        chain.append(score)
    score = chained(chain).with_types(dict(types))
    _sources[score] = names, types
    return score


# The names and types from which `_chain` made a score modification.
_sources: dict[Score, tuple[tuple[str, ...], tuple[tuple[str, str], ...]]] = {}


def names_of_score(score: Score) -> list[Any]:
    """What `score_named` makes the score modification of a call from, as JSON holds it. Raises TypeError for
    one that no name or formula made.
    """
    if score not in _sources:
        raise TypeError(f"its score {score.title} has neither a name nor a formula")
    names, types = _sources[score]
    return [list(names), [list(pair) for pair in types]]


def score_named(source: list[Any]) -> Score:
    """A score modification of `names_of_score`. Raises BadParam."""
    names, types = source
    pairs = tuple((name, kind) for name, kind in types)
    return _chain(os.environ.get("FLASHGEN_SPECS", ""), tuple(names), pairs)
