"""What a call requests of an operator: arrays, options and scalars, in the operator's order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.call import blockmask, latent, packedmask
from flashgen.call.blockmask import BlockMask
from flashgen.call.features import refuse_features
from flashgen.call.fields import LENGTHS, OF_CODES, SHORTHANDS
from flashgen.call.generate import function
from flashgen.call.kvcache import FIELDS, KVCache, kv_dtype_of
from flashgen.call.mask import Mask
from flashgen.call.record import AttentionCall, GradientCall
from flashgen.call.scores import score_of
from flashgen.errors import BadParam, BadTensorDtype, NullPointer, arg
from flashgen.operators import operator_of
from flashgen.operators.arguments import shown
from flashgen.operators.combinations import Feature
from flashgen.operators.dropout import NO_DROPOUT
from flashgen.operators.lengths import refuse_bounds
from flashgen.operators.maskoptions import mask_type_name
from flashgen.operators.operator import extended, modified
from flashgen.operators.rules import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.call.keptlists import KeptLists
    from flashgen.call.record import Call
    from flashgen.operators.operator import Operator


WITHOUT_GRADIENTS = (
    "attention of e4m3 codes has no gradients: rounding to a code has the derivative 0. Train with q, k and "
    "v of 16 bits, and quantise them to compute results"
)

NO_GRADIENTS_OF_TREES = (
    f"{arg('tree')} was given, and there are no gradients of calls with a tree: pass q, k and v that need "
    "none, or sequences of one length with a mask array"
)

INDICES_WITHOUT_LATENT = (
    f"{arg('indices')} was given without a latent cache, whose rows it names; pass {arg('k')} as "
    "KVCache(latent, None, lengths, head_dim_v=...), or a mask array that hides the other keys"
)


Q_ROPE_WITHOUT_LATENT = (
    f"{arg('q_rope')} was given without a latent cache, whose rows have a rotary part; pass {arg('k')} as "
    f"KVCache(latent, None, lengths, head_dim_v=...), or {arg('q')} with all elements of a head"
)


@dataclass(slots=True, eq=False)
class Request:
    """``arrays`` has an array or None for each argument of the operator; ``workspace`` is memory of the
    caller for what the kernels keep, and ``kept`` lists of blocks that a mask keeps.
    """

    operator: Operator
    arrays: tuple[Any, ...]
    options: tuple[Any, ...] = ()
    scalars: tuple[Any, ...] = ()
    stream: Any = None
    backend: str | None = None
    algorithm: str | None = None
    workspace: Any = None
    kept: KeptLists | None = None

    def another(self, operator: Operator, arrays: tuple[Any, ...], options: tuple[Any, ...]) -> Request:
        """A request of another operator on the same backend."""
        return Request(operator, arrays, options, backend=self.backend)

    def with_arrays(self, arrays: tuple[Any, ...], stream: Any) -> Request:
        """The request with other arrays, on a stream; no lists of blocks are kept for these."""
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
    """A request whose attributes are set one by one after it is made. This is quicker than arguments by
    position, and torch.compile of PyTorch 2.11 traces it, which it does not with object.__new__.
    """

    __slots__ = ()

    def __init__(self) -> None:
        pass


def packing(
    operator: Operator, record: type[Call], parameters: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> Callable[..., Request]:
    """``pack(call, operator, score, scalars, *parameters)``: the request of a record. Its ``operator`` is
    this one, or has a score modification, whose arrays are still to be added. The arrays ``parameters`` do
    not come from the record, and fields ``without`` are left out.
    """
    names = {field.name for field in record.fields} - {*without}

    def value(name: str) -> str:
        return name if name in parameters else f"call.{name}" if name in names else "None"

    arrays = "".join(f"{value(name)}, " for name in operator.positions)
    options = "".join(f"{'score' if name == 'score' else value(name)}, " for name in operator.options)
    lines = (
        f"def pack({', '.join(('call', 'operator', 'score', 'scalars', *parameters))}):",
        "    request = Packed()",
        "    request.operator, request.scalars = operator, scalars",
        f"    request.arrays = ({arrays})",
        f"    request.options = ({options})",
        *(f"    request.{name} = {value(name)}" for name in ("stream", "backend", "algorithm", "workspace")),
        "    request.kept = None",
        "    return request",
        "",
    )
    return function("pack", "\n".join(lines), {"Packed": _Packed})


class _Operators:
    """An operator, with or without a score modification, and how records become its requests. Loaded when a
    call first needs it, so that the first call of a process does not wait for all modules.
    """

    __slots__ = ("_lengths", "name", "pack", "plain", "record", "with_lengths")

    def __init__(self, name: str, record: type[Call], lengths: bool = False) -> None:
        self.name, self.record, self._lengths = name, record, lengths
        self.with_lengths: Any = None
        self.plain: Any = None
        self.pack: Any = None

    def load(self) -> None:
        operator = operator_of(self.name, self._lengths)
        self.pack = packing(operator, self.record)
        self.plain = operator

    def request(self, call: Call) -> Request:
        """What a call requests. Raises BadParam."""
        if self.plain is None:
            self.load()
        if isinstance(call.mask, Mask):
            return self.lined(call, call.mask)
        if not call.has_score():
            return self.pack(call, self.plain, None, (call.softmax_scale,))
        score, arrays, numbers = score_of(call)
        request = self.pack(call, extended(self.plain, score), score, (call.softmax_scale, *numbers))
        request.arrays += arrays
        return request

    def lined(self, call: Call, mask: Mask, of_pack: bool = False) -> Request:
        """What a call with a mask by a line requests; ``of_pack`` is whether it is of packed sequences, for
        kernels. Raises BadParam, and of a pack as `packedmask.one_sequence`.
        """
        if self.plain is None:
            self.load()
        if mask_type_name(call.mask_type) in ("none", "dense"):
            raise BadParam(
                f"{arg('mask_type')} is {shown(call.mask_type)}, and {arg('mask')} is a Mask, which is true "
                f"where a key is visible; leave {arg('mask_type')} out"
            )
        score, arrays, numbers = score_of(call) if call.has_score() else (None, (), ())
        one = packedmask.OneSequence(call.replace(mask=None), mask.rule, tuple(mask.arguments.values()))
        if of_pack:
            one = packedmask.one_sequence(call, mask, score)
        operator = extended(self.plain, score, one.rule.rule)
        request = self.pack(one.call, operator, score, (call.softmax_scale, *numbers))
        request.arrays += (*arrays, *one.arrays)
        request.options += (one.rule,)
        request.kept = None if self._lengths else mask.kept  # with lengths kernels take no lists
        return request


_ATTENTION = _Operators("attention", AttentionCall)
_BACKWARD = _Operators("attention_backward", GradientCall)
_FP8 = _Operators("attention_fp8", AttentionCall)
for _plain in (_ATTENTION, _BACKWARD, _FP8):
    _plain.with_lengths = _Operators(_plain.name, _plain.record, lengths=True)
_LATENT = _Operators("latent_attention", AttentionCall, lengths=True)
_LATENT.with_lengths = _LATENT
_SPARSE_LATENT = _Operators("sparse_latent_attention", AttentionCall)
_SPARSE_LATENT.with_lengths = _SPARSE_LATENT
_WEIGHTS = _Operators("attention_weights", AttentionCall)
_SCORE_GRADIENT = _Operators("score_gradient", GradientCall)


def load_operators() -> None:
    """Load all operators, before torch.compile traces the functions below."""
    plain, others = (_ATTENTION, _BACKWARD, _FP8), (_LATENT, _SPARSE_LATENT, _WEIGHTS, _SCORE_GRADIENT)
    for operators in (*plain, *(x.with_lengths for x in plain), *others):
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
    if not is_plain and call.has_codes():
        refuse_beside_codes(call)
        return _requested(_of_cache_of_codes(call) if isinstance(call.k, KVCache) else call, is_plain, _FP8)
    operators = _ATTENTION
    if isinstance(call.k, KVCache):
        call = of_cache(call)
        if call.head_dim_v is not None:
            latent.check(call)
            operators = _LATENT if call.indices is None else _SPARSE_LATENT
    if operators is _ATTENTION:
        refuse_parts_of_latent(call)
    return _requested(call, is_plain, operators)


def refuse_parts_of_latent(call: Call) -> None:
    """Raise BadParam for an array that only a call of a latent cache has."""
    if call.indices is not None:
        raise BadParam(INDICES_WITHOUT_LATENT)
    if call.q_rope is not None:
        raise BadParam(Q_ROPE_WITHOUT_LATENT)


def gradients_of(call: Call) -> Request:
    """What a call of ``attention_backward`` requests. Raises BadParam."""
    if call.tree is not None:
        raise BadParam(NO_GRADIENTS_OF_TREES)
    is_plain = call.is_plain()
    if not is_plain and call.has_codes():
        raise BadParam(WITHOUT_GRADIENTS)
    if not is_plain and not call.is_normal():
        call = call.normalised()
    if isinstance(call.k, KVCache):
        raise BadParam(
            f"{arg('k')} is a KVCache, which has no gradients; pass k and v, with kv_lengths if need be"
        )
    return _requested(call, is_plain, _BACKWARD)


def gradient_packing(lengths: bool, arrays: tuple[str, ...]) -> Callable[..., Request]:
    """``pack(call, *arrays)``: what the gradients of a recorded call of ``attention`` without a score
    modification request. ``call`` has its options, and is normal.
    """
    operator = operator_of("attention_backward", lengths)
    pack = packing(operator, AttentionCall, arrays, without=("stream", "algorithm"))
    return lambda call, *values: pack(call, operator, None, (call.softmax_scale,), *values)


def _requested(call: Call, is_plain: bool, operators: _Operators) -> Request:
    """What a call without a KVCache requests. ``operators`` are of calls without lengths. Raises BadParam."""
    mask = call.mask
    if mask is not None and isinstance(mask, BlockMask):
        call = blockmask.with_arrays(call)
    elif mask is not None and isinstance(mask, str):
        raise BadTensorDtype(
            f"{arg('mask')} is {shown(mask)}; expected an array that is true where a key is hidden, or a "
            'mask by a line: flashgen.Mask("kv <= q")'
        )
    if (
        call.kv_lengths is None
        and call.kv_starts is None
        and call.cu_seqlens_q is None
        and call.cu_seqlens_kv is None
    ):
        if call.max_seqlen_q is not None or call.max_seqlen_kv is not None:
            refuse_bounds(call.max_seqlen_q, call.max_seqlen_kv)
        if call.tree is not None:
            raise BadParam(
                f"{arg('tree')} was given without lengths; pass a KVCache, or {arg('kv_lengths')}, the keys "
                "of each sequence with its drafts"
            )
    else:
        if mask is not None or call.block_indptr is not None:
            refuse_features(call)
            if isinstance(mask, Mask) and packedmask.is_for_kernels(call):
                return operators.lined(call, mask, of_pack=True)
        operators = operators.with_lengths
    if is_plain and operators.plain is not None and (mask is None or not isinstance(mask, Mask)):
        return operators.pack(call, operators.plain, None, (call.softmax_scale,))
    return operators.request(call)


def refuse_beside_codes(call: Call) -> None:
    """Raise BadParam for features that calls with e4m3 codes lack."""
    first = next(name for name in OF_CODES if getattr(call, name) is not None)
    others = {"codes": Feature(first)}
    if isinstance(call.k, KVCache):
        if call.k.head_dim_v is not None:
            others["latent"] = Feature("k", "is a latent cache")
        if call.k.starts is not None:
            others["kv_starts"] = Feature("starts")
    refuse_features(call, **others)
    if isinstance(call.mask, Mask):
        lengths = [name for name in LENGTHS if getattr(call, name) is not None]
        if lengths:
            refuse_features(call, codes_of_lengths=Feature(lengths[0]))


def of_cache(call: Call) -> Call:
    """A call with a KVCache, with the arrays of the cache as fields of the call. Raises BadParam and
    NullPointer.
    """
    keys: KVCache = call.k
    if call.v is not None:
        raise BadParam(f"{arg('v')} was given with a KVCache, which holds {arg('v')} as well; leave v out")
    for name in ("kv_lengths", "cu_seqlens_kv"):
        if getattr(call, name) is not None:
            raise BadParam(f"{arg(name)} was given with a KVCache, which has its own lengths")
    if call.kv_starts is not None:
        raise BadParam(f"{arg('kv_starts')} was given with a KVCache; pass KVCache(..., starts=...)")
    if call.dropout_p != NO_DROPOUT or isinstance(call.mask, BlockMask):
        refuse_features(call)
    if keys.lengths is None:
        raise NullPointer(f"{arg('lengths')} of the KVCache is None; expected an int32 array, (batch,)")
    other: Any = call.copy()  # `replace` would take longer
    other.k, other.v, other.kv_lengths, other.kv_starts = keys.k, keys.v, keys.lengths, keys.starts
    other.pages, other.index = keys.pages, keys.index
    if keys.head_dim_v is not None:
        other.head_dim_v = latent.width_of_values(keys)
    other.k_scale, other.v_scale, other.kv_dtype = keys.k_scale, keys.v_scale, kv_dtype_of(keys)
    return other


def _of_cache_of_codes(call: Call) -> Call:
    """`of_cache` of a call whose q is e4m3, too. Raises BadParam and NullPointer."""
    for name in ("k_scale", "v_scale"):
        if getattr(call, name) is not None:
            raise BadParam(
                f"{arg(name)} was given with a KVCache, which has its own scales; pass "
                f"KVCache(..., {name}=...)"
            )
    other = of_cache(call)
    if other.dtype is None and other.kv_dtype == "e4m3":
        other.dtype = other.kv_dtype  # for a cache in uint8
    return other


def weights_of(call: Call, lse: Any) -> Request:
    """What a call of ``attention`` without lengths requests of the operator of its weights. ``lse`` is of the
    forward call. Raises BadParam.
    """
    if not call.is_normal():
        call = call.normalised()
    check_weights(call)
    if call.max_seqlen_q is not None or call.max_seqlen_kv is not None:
        refuse_bounds(call.max_seqlen_q, call.max_seqlen_kv)
    request = _WEIGHTS.request(call)
    place = request.operator.position("lse")
    request.arrays = *request.arrays[:place], lse, *request.arrays[place + 1 :]
    request.algorithm = None  # there is one kernel, beside any algorithm
    return request


def check_weights(call: Call) -> None:
    """That there are attention weights of a call. Raises BadParam."""
    refuse_features(call, weights=Feature("return_weights", "is True"))


def score_gradient_of(call: Call, name: str) -> Request:
    """What a call of ``attention_backward`` requests for the gradient of an array of its score modification,
    which the caller calls ``name``. Raises BadParam.
    """
    if not call.is_normal():
        call = call.normalised()
    check_features(call, name)
    score, arrays, numbers = score_of(call)
    array = {of: shorthand.param for of, shorthand in SHORTHANDS}.get(name, name)
    there = [] if score is None else [param.name for param in score.arrays if not param.is_integer]
    if array not in there:
        has = f"has the arrays of numbers {', '.join(there)}" if there else "has no array of numbers"
        raise BadParam(f"{arg('dparams')} has {shown(name)}; the score of the call {has}")
    if _SCORE_GRADIENT.plain is None:
        _SCORE_GRADIENT.load()
    score = score.with_respect_to(array)
    operator = modified(_SCORE_GRADIENT.plain, score)
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
        check_features(call, name)
        indices_of(score.with_respect_to(array))


def check_features(call: Call, name: str) -> None:
    """That an array ``name`` of the score modification of a call can have a gradient beside the other
    features of the call. Raises BadParam.
    """
    refuse_features(call, score_gradient=Feature(name, "is to have a gradient"))


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
