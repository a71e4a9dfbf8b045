"""Attention in the graphs of PyTorch: recorded by autograd, and as the operators ``flashgen::attention`` and
``flashgen::attention_backward`` for torch.compile, torch.export, and whatever else looks at operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from operator import index as index_of
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.api.asked import LENGTHS, asked, asked_backward, named_score, names_given
from flashgen.api.calls import call
from flashgen.errors import BadParam, DeviceTypeNotSupported, FlashgenError, NullPointer, rename
from flashgen.operators.arguments import ROW_ALIGNMENT, Expected, flag, length_bound, shown
from flashgen.operators.contract import check_rank, scale_of
from flashgen.operators.lengths import MASK_WITH_LENGTHS
from flashgen.operators.maskoptions import mask_type_name, sees_no_later_key, window_of
from flashgen.operators.splits import AUTO, SplitEvery, Splits, splits_of
from flashgen.runtime.arrays import kind_of
from flashgen.runtime.torchkind import INSIDE_TORCH_FUNC, NESTED, WITH_TANGENT

if TYPE_CHECKING:
    from flashgen.api.asked import Asked

_EVERY = "every "
# The largest integers of the schemas, and of a score modification.
_LARGEST, _LARGEST_PARAM = 2**63 - 1, 2**128
# The tensors whose operators nobody but autograd looks at.
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


class Options(NamedTuple):
    """What is no tensor of a call, in types that a graph can hold. ``score`` and ``array_names`` are names
    joined by commas, ``numbers`` such as "cap=30.0,other=2.0": autograd takes no list of floats. Where
    ``score`` is empty they are "alibi_slopes" and "softcap=30.0", as errors are to call them. ``splits`` is
    "auto", "4", or "every 256". Where ``bounds_expected``, the bounds of lengths are `Expected`.
    """

    causal: bool
    mask_type: str | None
    window_left: int
    window_right: int
    softmax_scale: float | None
    score: str
    array_names: str
    numbers: str
    splits: str
    deterministic: bool
    backend: str | None
    algorithm: str | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    bounds_expected: bool

    @property
    def splitting(self) -> Splits:
        if self.splits.startswith(_EVERY):
            return SplitEvery(int(self.splits.removeprefix(_EVERY)))
        return self.splits if self.splits == AUTO else int(self.splits)

    @property
    def bounds(self) -> tuple[Any, Any]:
        bounds = self.max_seqlen_q, self.max_seqlen_kv
        return tuple(map(Expected, bounds)) if self.bounds_expected else bounds

    @property
    def masking(self) -> tuple[Any, ...]:
        return self.causal, self.mask_type, (self.window_left, self.window_right)

    def of_score(self, arrays: list[Tensor]) -> tuple[Any, ...]:
        """softcap, alibi_slopes, score and params, as ``attention`` takes them."""
        given: dict[str, Any] = dict(zip(_split(self.array_names), arrays, strict=True))
        for pair in _split(self.numbers):
            name, value = pair.split("=")
            # A parameter that is an integer takes no float.
            given[name] = int(value) if value.lstrip("-").isdigit() else float(value)
        if not self.score:
            return given.get("softcap"), given.get("alibi_slopes"), None, None
        return None, None, _split(self.score), given

    def names_given(self, k: Any, arrays: list[Tensor]) -> dict[str, str]:
        """`asked.names_given` of a call in a graph, where no error passes through ``attention``."""
        softcap, alibi_slopes, *_ = self.of_score(arrays)
        return names_given(k, alibi_slopes, softcap=softcap)

    def asked(
        self,
        tensors: tuple[Any, ...],
        arrays: list[Tensor],
        lengths: tuple[Tensor | None, ...],
        return_lse: bool,
    ) -> Asked:
        """What a call with these options asks for, of q, k, v, mask and out."""
        options = *self.masking, return_lse, self.splitting
        lengths = *lengths, *self.bounds
        return asked(*tensors, options, self.softmax_scale, self.of_score(arrays), lengths)


# Its fields in the schemas of the operators, in their order.
SCHEMA = (
    "bool causal, str? mask_type, SymInt window_left, SymInt window_right, float? softmax_scale, str score, "
    "str array_names, str numbers, str splits, bool deterministic, str? backend, str? algorithm, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_kv, bool bounds_expected"
)
# The arrays of lengths, behind those of a score modification.
LENGTHS_SCHEMA = "Tensor? kv_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv"


def attention(
    tensors: tuple[Any, Any, Any, Any],
    masking: tuple[Any, ...],
    softmax_scale: float | None,
    of_score: tuple[Any, ...],
    lengths: tuple[Any, ...],
    *,
    splits: Splits,
    deterministic: bool,
    backend: str | None,
    algorithm: str | None,
) -> tuple[Tensor, Tensor]:
    """out and lse of q, k, v and mask, recorded. ``masking`` is causal, mask_type and window_size;
    ``of_score`` softcap, alibi_slopes, score and params; ``lengths`` as in `asked.asked`. Raises BadParam.
    """
    *on_device, max_seqlen_q, max_seqlen_kv = lengths
    given = dict(zip(("q", "k", "v", "mask", *LENGTHS[:3]), (*tensors, *on_device), strict=True))
    check_tensors(given)
    q, k, v, mask = tensors
    for name, x in (("k", k), ("v", v)):
        if x is None:
            raise NullPointer(f"{name} is None; expected an array")
    if q.is_meta:
        _, alibi_slopes, _, params = of_score
        check_meta(given | {"alibi_slopes": alibi_slopes} | (params if isinstance(params, dict) else {}))
    if mask is not None and any(x is not None for x in on_device) and _differentiable(q, k, v):
        raise BadParam(MASK_WITH_LENGTHS)
    bounds = max_seqlen_q, max_seqlen_kv
    arrays, options = options_of(
        q, masking, softmax_scale, of_score, bounds, splits, deterministic, backend, algorithm
    )
    rest = arrays, *on_device, *options
    if _is_eager(tensors):
        return _Attention.apply(q, k, v, (mask, *rest))
    refuse_transforms()
    return _forward(*tensors, *rest)


def check_tensors(given: Mapping[str, Any]) -> None:
    """That all arrays of a call that is recorded are tensors, and dense. Raises BadParam."""
    for name, x in given.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            leaves = [other for other, y in given.items() if isinstance(y, Tensor) and y.requires_grad]
            why = f"{leaves[0]} requires a gradient" if leaves else "another array is traced"
            raise BadParam(
                f"{name} has type {type(x).__name__}, and {why}; pass a tensor, which torch.as_tensor makes"
            )
        if x.is_nested:
            raise BadParam(f"{name}: {NESTED}")


def check_meta(given: Mapping[str, Any]) -> None:
    """That no tensor has memory where the first one has none. Raises DeviceTypeNotSupported."""
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    first, *others = tensors
    if tensors[first].is_meta:
        for name in others:
            if not tensors[name].is_meta:
                raise DeviceTypeNotSupported(
                    f"{first} is on meta but {name} is on {tensors[name].device}; all arrays must be on one "
                    "device"
                )


def refuse_transforms() -> None:
    """Raise BadParam inside torch.func, where an operator would lose tangents. Dynamo cannot tell of a tensor
    whether it is wrapped.
    """
    if torch._C._are_functorch_transforms_active():
        raise BadParam(INSIDE_TORCH_FUNC)


def options_of(
    q: Tensor,
    masking: tuple[Any, ...],
    softmax_scale: float | None,
    of_score: tuple[Any, ...],
    bounds: tuple[Any, Any],
    splits: Splits,
    deterministic: bool,
    backend: str | None,
    algorithm: str | None,
) -> tuple[list[Tensor], Options]:
    """The arrays of a score modification, and what is no tensor of a call. Raises BadParam, and
    BadTensorShape for q, whose dimensions the shapes of results are made of.
    """
    check_rank(q.shape)
    score, array_names, numbers, arrays = _written(of_score, masking)
    expected = isinstance(bounds[0], Expected)
    max_seqlen_q, max_seqlen_kv = (x.bound if expected else x for x in bounds)
    causal, mask_type, window_size = masking
    left, right = window_of(window_size)
    return arrays, Options(
        flag("causal", causal),
        mask_type_name(mask_type),
        _fitting(left),
        _fitting(right),
        None if softmax_scale is None else scale_of(softmax_scale, q.shape[-1]),
        score,
        array_names,
        numbers,
        _splits_written(splits),
        deterministic or torch.are_deterministic_algorithms_enabled(),
        backend,
        algorithm,
        _whole("max_seqlen_q", max_seqlen_q),
        _whole("max_seqlen_kv", max_seqlen_kv),
        expected,
    )


def _written(of_score: tuple[Any, ...], masking: tuple[Any, ...]) -> tuple[str, str, str, list[Tensor]]:
    """``score``, ``array_names`` and ``numbers`` of `Options`, and the arrays. Raises BadParam."""
    softcap, alibi_slopes, score, params = of_score
    if softcap is None and alibi_slopes is None and score is None and params is None:
        return "", "", "", []
    _refuse_derivatives({"alibi_slopes": alibi_slopes, **(params if isinstance(params, Mapping) else {})})
    names, given = named_score(*of_score, sees_no_later_key(*masking))
    # Names go to the operators in strings, where a comma would make two of one, and nothing of "".
    for name in names:
        if not name.isidentifier():
            raise BadParam(f"score is {name!r}; no score modification has such a name")
    for name in given:
        if not (isinstance(name, str) and name.isidentifier()):
            raise BadParam(f"score {', '.join(names)} has no parameter {name}")
    if score is None:
        both = {"softcap": softcap, "alibi_slopes": alibi_slopes}
        names, given = (), {name: x for name, x in both.items() if x is not None}
        if alibi_slopes is not None and not isinstance(alibi_slopes, Tensor):
            raise BadParam(
                f"alibi_slopes has type {type(alibi_slopes).__name__}, beside tensors; pass a tensor, which "
                "torch.as_tensor makes"
            )
    arrays = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    numbers = (f"{name}={_number(name, x)!r}" for name, x in given.items() if name not in arrays)
    return ",".join(names), ",".join(arrays), ",".join(numbers), list(arrays.values())


def _splits_written(splits: Splits) -> str:
    """``splits`` of `Options`. Raises BadParam."""
    splits = splits_of(splits)
    if isinstance(splits, str):
        return splits
    # Dynamo may have made a number symbolic, which no string holds; operator.index makes it a constant.
    if isinstance(splits, SplitEvery):
        return f"{_EVERY}{index_of(splits.keys)}"
    return str(index_of(splits))


def _is_eager(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether nothing needs to see an operator: nothing watches, there is no transform of torch.func, and no
    subclass of tensors.
    """
    return not (
        kind_of(tensors[0]).watched(tensors[0]) or torch._C._are_functorch_transforms_active()
    ) and _PLAIN.issuperset(map(type, tensors))


def _differentiable(*tensors: Tensor | None) -> bool:
    """Whether a result of these gets a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _refuse_derivatives(arrays: Mapping[str, Any]) -> None:
    """Raise BadParam for an array of a score modification that wants a gradient or has a tangent, of which
    `_Attention` and the operators, which get these arrays in a list, know nothing.
    """
    for name, x in arrays.items():
        if not isinstance(x, Tensor):
            continue
        if x.requires_grad and torch.is_grad_enabled():
            raise BadParam(
                f"{name} requires a gradient; flashgen has gradients of q, k and v alone: pass "
                f"{name}.detach()"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise BadParam(f"{name}: {WITH_TANGENT}")


def _number(name: str, x: Any) -> float:
    if not isinstance(x, Real) or isinstance(x, bool):  # ahead of the float that hides what it was
        what = f"has type {type(x).__name__}" if hasattr(x, "shape") else f"is {x!r}"
        raise BadParam(f"{name} {what}; expected a tensor or a number")
    if not isinstance(x, Integral):
        return float(x)
    if abs(x) > _LARGEST_PARAM:  # Python may refuse to print it
        raise BadParam(f"{name} is {shown(x)}; it must be finite, at most 3e+38")
    return int(x)


def _whole(name: str, bound: Any) -> int | None:
    """A bound in a type that a graph can hold. Raises BadParam."""
    # Dynamo calls one that is symbolic an int, of which operator.index would make a constant.
    if bound is None:
        return None
    whole = type(bound) is int or isinstance(bound, torch.SymInt)
    return _fitting(bound if whole else length_bound(name, bound))


def _fitting(bound: int) -> int:
    """A bound as the schemas of the operators hold it, above any length."""
    return bound if isinstance(bound, torch.SymInt) else min(bound, _LARGEST)


def _split(names: str) -> list[str]:
    return names.split(",") if names else []


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    arrays: list[Tensor],
    kv_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    *given: Any,
) -> tuple[Tensor, Tensor]:
    """out and lse, where nothing is recorded."""
    options = Options(*given)
    lengths = kv_lengths, cu_seqlens_q, cu_seqlens_kv
    try:
        wanted = options.asked((q, k, v, mask, None), arrays, lengths, return_lse=True)
        return call(*wanted, stream=None, backend=options.backend, algorithm=options.algorithm)
    except FlashgenError as error:
        rename(error, **options.names_given(k, arrays))
        raise


@torch.library.custom_op(
    "flashgen::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor[] arrays, "
    f"{LENGTHS_SCHEMA}, {SCHEMA}) -> (Tensor, Tensor)",
)
@torch.no_grad()
def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    # Inductor drops a copy that a caller has made: to it a tensor that starts elsewhere is as good.
    return _attend(*map(with_rows, given[:3]), *given[3:])


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    rows, heads = q.shape[-3], q.shape[-2]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((*q.shape[:-3], heads, rows), dtype=torch.float32)


def _differentiate(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    arrays: list[Tensor],
    kv_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, where nothing is recorded."""
    options = Options(*given)
    dlse = None if dlse is None else _one(dlse).contiguous()
    # Hooks of saved tensors keep values, and not where these lie.
    q, k, v = map(with_rows, (q, k, v))
    tensors = with_rows(dout), q, k, v, mask, with_rows(out), lse.contiguous(), dlse, None, None, None
    return differentiate(tensors, arrays, (kv_lengths, cu_seqlens_q, cu_seqlens_kv), options)


def differentiate(
    tensors: tuple[Any, ...], arrays: list[Tensor], lengths: tuple[Any, ...], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv. ``tensors`` are dout, q, k, v, mask, out, lse, dlse, dq, dk and dv."""
    try:
        wanted = asked_backward(
            tensors,
            options.masking,
            options.softmax_scale,
            options.of_score(arrays),
            (*lengths, *options.bounds),
            options.deterministic or torch.are_deterministic_algorithms_enabled(),
        )
        return call(*wanted, stream=None, backend=options.backend)
    except FlashgenError as error:
        rename(error, **options.names_given(None, arrays))
        raise


@torch.library.custom_op(
    "flashgen::attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, Tensor? dlse, "
    f"Tensor[] arrays, {LENGTHS_SCHEMA}, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
@torch.no_grad()
def _backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _differentiate(*given)


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _one(gradient: Tensor) -> Tensor:
    """``gradient`` without a pending negation. Raises BadParam where it is several at once."""
    gradient = gradient.resolve_neg()
    try:
        gradient.data_ptr()
    except RuntimeError:
        raise BadParam(
            "several gradients of one result were given at once (is_grads_batched, or vmap), which flashgen "
            "does not take; pass one after another"
        ) from None
    return gradient


def with_rows(x: Tensor) -> Tensor:
    """``x``, or a copy of it where kernels could not read its rows: they are apart, such as those of a sum's
    gradient, or start elsewhere than at 16 bytes. Raises as `_one`.
    """
    x = _one(x)
    *strides, last = x.stride()
    size = x.element_size()
    rows = last == 1 and x.data_ptr() % ROW_ALIGNMENT == 0
    for stride, extent in zip(strides, x.shape, strict=False):
        rows = rows and (extent < 2 or stride * size % ROW_ALIGNMENT == 0)
    return x if rows else x.clone(memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, arrays, kv_lengths, cu_seqlens_q, cu_seqlens_kv, *options = inputs
    ctx.options = options
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, mask, *output, kv_lengths, cu_seqlens_q, cu_seqlens_kv, *arrays)


def _kept(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """What the backward pass of a call takes."""
    q, k, v, mask, out, lse, kv_lengths, cu_seqlens_q, cu_seqlens_kv, *arrays = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    lengths = kv_lengths, cu_seqlens_q, cu_seqlens_kv
    return dout, q, k, v, mask, out, lse, dlse, arrays, *lengths, *ctx.options


class _Attention(torch.autograd.Function):
    """The same in eager mode, where recording an operator takes ten times as long as queueing kernels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        output = _attend(q, k, v, *rest)
        _keep(ctx, (q, k, v, *rest), output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        given = _kept(ctx, dout, dlse)
        # Where gradients are recorded themselves, the operator refuses to have its own.
        unseen = not torch.is_grad_enabled() and _is_eager(given[:8])
        return *(_differentiate if unseen else _backward)(*given), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        raise BadParam(WITH_TANGENT)


def _of_operator(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    given = _kept(ctx, dout, dlse)
    arrays = given[8]
    return (*_backward(*given), None, [None] * len(arrays), *[None] * len(given[9:]))


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _refuse_second_derivatives(ctx: Any, *gradients: Tensor) -> None:
    raise BadParam(
        "a gradient of attention's gradients (double backward) was asked for, which flashgen does not compute"
    )


_forward.register_autograd(_of_operator, setup_context=_keep)
_backward.register_autograd(_refuse_second_derivatives, setup_context=_keep_nothing)
