"""Calls of packed sequences with a mask by a line, converted for kernels to one sequence of all tokens; and
which calls with lengths and such a mask have no gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from flashgen.errors import BadTensorShape, DeviceTypeNotSupported, NullPointer, arg
from flashgen.operators.arguments import flag, shown
from flashgen.operators.dropout import NO_DROPOUT
from flashgen.operators.maskoptions import NO_WINDOW, MaskOptions, mask_semantics, mask_type_name
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.rules import ENDS, RuleOfCall
from flashgen.runtime.arrays import runs_kernels

if TYPE_CHECKING:
    from flashgen.call.mask import Mask
    from flashgen.call.record import Call
    from flashgen.operators.rules import Rule
    from flashgen.operators.scores import Score


class OneSequence(NamedTuple):
    """A call without lengths, with the rule of its packed sequences and the arrays of the rule."""

    call: Call
    rule: RuleOfCall
    arrays: tuple[Any, ...]


def is_for_kernels(call: Call) -> bool:
    """Whether a call of packed q and k with a mask by a line has kernels: in host memory the CPU path takes
    sequence after sequence.
    """
    if call.cu_seqlens_q is None or call.cu_seqlens_kv is None or call.dropout_p != NO_DROPOUT:
        return False
    if call.kv_lengths is not None or call.kv_starts is not None:
        return False
    return runs_kernels(call.q, call.backend)


def check_gradients(call: Call, mask: Mask) -> None:
    """Raise DeviceTypeNotSupported where no kernel has the gradients of a call with lengths and a mask by a
    line.
    """
    if runs_kernels(call.q, call.backend) and not is_for_kernels(call):
        refuse_gradients(mask.rule.rule)


def refuse_gradients(rule: Rule) -> NoReturn:
    """Raise DeviceTypeNotSupported for gradients of a call with lengths and a mask by a line."""
    raise DeviceTypeNotSupported(
        f"{arg('mask')} is a Mask, {rule.title}, and no kernel has gradients of one with lengths: the CPU "
        f"path does, for arrays in host memory; on a GPU pack queries and keys, with {arg('cu_seqlens_q')} "
        f"and {arg('cu_seqlens_kv')} alone, or pass sequences of one length"
    )


def one_sequence(call: Call, mask: Mask, score: Score | None) -> OneSequence:
    """The call of all tokens as one sequence. Raises DeviceTypeNotSupported for features that no kernel has
    with it, and the errors of the contract of lengths.
    """
    from flashgen.operators.packedrules import packed  # other calls need no formulas

    title = mask.rule.rule.title
    if score is not None and (reads := {"q", "kv", "b"} & score.tree.reads()):
        raise DeviceTypeNotSupported(
            f"{arg('score')} {score.title} reads {', '.join(sorted(reads))}, and {arg('mask')} is a Mask, "
            f"{title}, of packed sequences: no kernel has the positions of both. The CPU path does, for "
            "arrays in host memory; on a GPU leave one out, or make a call for each sequence"
        )
    if mask_type_name(call.mask_type) == "causal_top_left":
        raise DeviceTypeNotSupported(
            f"{arg('mask_type')} is {shown(call.mask_type)}, and {arg('mask')} is a Mask, {title}, of packed "
            "sequences, which kernels align at the end; write it into the line, or leave it out"
        )
    causal = flag("causal", call.causal)
    semantics = mask_semantics(MaskOptions(causal, call.mask_type, call.window_size, False), 1, 1)
    sides = semantics.window_left, semantics.window_right
    left, right = (None if side == UNBOUNDED else side for side in sides)
    rule = packed(mask.rule.rule, left is not None, right is not None)
    bounds = tuple(side for side in (left, right) if side is not None)
    ends = call.cu_seqlens_q, call.cu_seqlens_kv
    _check_ends(*ends)
    _check_sizes(call, mask)
    one = call.replace(
        mask=None,
        causal=False,
        mask_type=None,
        window_size=NO_WINDOW,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        **dict.fromkeys(ENDS),
    )
    return OneSequence(one, RuleOfCall(rule, (*mask.rule.numbers, *bounds)), (*mask.arrays.values(), *ends))


def _check_ends(of_q: Any, of_kv: Any) -> None:
    """Raise BadTensorShape for ends that are not of the same sequences."""
    for name, x in zip(ENDS, (of_q, of_kv), strict=True):
        if len(x.shape) != 1 or x.shape[0] < 1:
            raise BadTensorShape(f"{arg(name)} has shape {tuple(x.shape)}; expected (sequences + 1,)")
    if of_q.shape != of_kv.shape:
        first, second = map(arg, ENDS)
        raise BadTensorShape(
            f"{second} has shape {tuple(of_kv.shape)} but {first} has {tuple(of_q.shape)}; both have an end "
            "for each sequence, after a 0"
        )


def _check_sizes(call: Call, mask: Mask) -> None:
    """Raise NullPointer or BadTensorShape for arrays that are not of as many sequences or tokens."""
    if call.q is None or call.k is None:
        raise NullPointer(f"{arg('q' if call.q is None else 'k')} is None; expected an array")
    count = call.cu_seqlens_q.shape[0] - 1
    for param in mask.rule.rule.arrays:
        shape = tuple(mask.arrays[param.name].shape)
        if param.per_token is not None or "b" not in param.dimensions:
            continue
        axis = param.dimensions.index("b") - len(param.dimensions) + len(shape)
        if axis >= 0 and shape[axis] not in (1, count):
            raise BadTensorShape(
                f"{arg(param.argument_name)} has shape {shape}, and there are {count} sequences; expected "
                f"{count} or 1 of them"
            )
