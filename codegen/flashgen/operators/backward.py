"""The operator ``attention_backward``: the gradients of attention in q, k and v.

With p the softmax of a row, o its result and do the gradient of that, by the chain rule

    dv_j = sum_i p_ij do_i,  ds_ij = p_ij (do_i v_j - delta_i),  delta_i = do_i o_i - dlse_i,
    dq_i = softmax_scale sum_j ds_ij k_j,  dk_j = softmax_scale sum_i ds_ij q_i

p is computed again from q, k and the log-sum-exp of the forward call, so nothing of seqlen_q x seqlen_kv is
kept (https://arxiv.org/abs/2205.14135, appendix B). A row that sees nothing has p = 0.

With lengths, each sequence is a call by itself. Rows of q, k and v outside all sequences have gradients of 0:
rows past the last packed sequence, and padded keys past a length.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam, arg
from flashgen.operators import attention, blocklists, contract, lengths
from flashgen.operators.arguments import Argument, check_devices, flag, place
from flashgen.operators.attention import ATTENTION, SCALARS, AttentionProblem
from flashgen.operators.lengths import BOUNDS, CACHE_ARRAYS, refuse_mask
from flashgen.operators.operator import Axis, Operator, Value, by_name, lined, modified

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.rules import Rule, RuleOfCall
    from flashgen.operators.scores import Score


def gradient_arguments(forward: Sequence[Argument], without: Sequence[str]) -> tuple[Argument, ...]:
    """The arguments of the gradients of an operator, in this order: the gradient of its first output; its
    arguments, but for the names in ``without``, all as inputs; the gradients of its other outputs; a gradient
    of each differentiable input, of the last dtype that the input may have.

    An optional output of the forward call is required here. The gradient of an optional input is optional:
    a call has both or neither.
    """
    kept = [argument for argument in forward if argument.name not in without]
    outputs = [argument for argument in kept if argument.is_output]
    dout, *others = [argument._replace(name=f"d{argument.name}", role="input") for argument in outputs]
    return (
        dout,
        *(
            argument._replace(
                role="input",
                optional=argument.optional and not argument.is_output,
                differentiable=False,
            )
            for argument in kept
        ),
        *others,
        *(
            argument._replace(
                name=f"d{argument.name}",
                role="output",
                dtypes=argument.dtypes[-1:],
                differentiable=False,
            )
            for argument in kept
            if argument.differentiable
        ),
    )


ARGUMENTS = gradient_arguments(attention.ARGUMENTS, without=CACHE_ARRAYS)
# The input that a gradient among the outputs is of, by the name of the gradient.
INPUT_OF = {f"d{argument.name}": argument.name for argument in attention.ARGUMENTS if argument.differentiable}
# What the forward call does not take: its outputs, and all gradients.
_OF_GRADIENTS = tuple(
    argument.name
    for argument in ARGUMENTS
    if argument.name not in {x.name for x in attention.ARGUMENTS if not x.is_output}
)
LENGTH_ARRAYS = tuple(name for name in lengths.LENGTH_ARRAYS if name not in CACHE_ARRAYS)
OPTIONS = (
    *("causal", "mask_type", "window_size", "block_size"),
    *BOUNDS,
    *("dropout_p", "score", "deterministic"),
)
# The dimensions of grids that go over lists of key blocks.
LISTS = ("list_columns", "list_entries")
# In what order thread blocks add to dq: in none, or always in the same; or the one that has its rows does
# all of them.
DQ_ORDERS = ("none", "ordered", "direct")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardProblem(AttentionProblem):
    """Shapes, strides and options of one call, as in the forward call, and whether the gradients must have
    the same bits each time.
    """

    deterministic: bool = False

    @property
    def operator(self) -> Operator:
        return operator_for(self.score, self.lengths is not None, self.rule and self.rule.rule)

    @property
    def return_lse(self) -> bool:
        """That the forward call had to keep its LSE, which here is an input."""
        return True

    @property
    def empty(self) -> bool:
        if self.has("sinks"):
            return False
        if self.lengths is None:
            return self.batch * (self.seqlen_q + self.seqlen_kv) == 0
        of_q, of_kv = self.lengths.batch_q * self.lengths.rows_q, self.lengths.batch_kv * self.lengths.rows_kv
        return of_q + of_kv == 0

    def description(self) -> str:
        # Not super(): a class with slots is made anew, and the function would not know which.
        orders = "ordered or direct" if self.deterministic else "none, ordered or direct"
        return f"{AttentionProblem.description(self)}, dq_order {orders}"

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """With lengths ``query_rows`` and ``key_rows`` are the rows of an entry of q and k, whatever the
        bounds: all are written. ``sequence_rows`` and ``sequence_keys`` are the rows of all entries, and
        ``sequences`` counts the rows past the last sequence as one more. ``sinks`` are the query heads of a
        call with sinks. ``list_columns`` are the key blocks of all lists of such, ``list_entries`` their
        entries.
        """
        extents = AttentionProblem.grid_extents(self, axes)
        extents["sinks"] = self.num_heads_q if self.has("sinks") else 0
        lists = self.block_lists
        columns = lists.batch * lists.heads * lists.key_blocks(self.seqlen_kv) if lists else 0
        extents |= zip(LISTS, (columns, lists.entries if lists else 0), strict=True)
        if self.lengths is None:
            return extents
        return extents | {
            "query_rows": self.lengths.rows_q,
            "key_rows": self.lengths.rows_kv,
            "sequence_rows": self.lengths.batch_q * self.lengths.rows_q,
            "sequence_keys": self.lengths.batch_kv * self.lengths.rows_kv,
            "sequences": self.batch + 1,
        }

    def of_sequence(self, q_length: int, kv_length: int) -> BackwardProblem:
        """The problem of one sequence of these lengths, with contiguous arrays that have no other."""
        forward = AttentionProblem.of_sequence(self, q_length, kv_length)
        present = dict.fromkeys(name for name in self.operator.positions if self.has(name))
        rule = self.rule and self.rule.rule
        fields = kept_of(forward, operator_for(self.score, rule=rule).arguments, present)
        return BackwardProblem(**fields, deterministic=self.deterministic)


def normalise(
    dout: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    out: ArrayView,
    lse: ArrayView,
    *,
    deterministic: bool = False,
    score: Score | None = None,
    score_arrays: Sequence[ArrayView | None] = (),
    rule: RuleOfCall | None = None,
    rule_arrays: Sequence[ArrayView | None] = (),
    **others: Any,
) -> BackwardProblem:
    """The Problem of a call, or the error of the contract that it breaks. Arguments as in
    ``attention_backward``: ``others`` has arrays of ARGUMENTS, and what `attention.normalise` takes.

    Raises as `attention.normalise`.
    """
    deterministic = flag("deterministic", deterministic)
    views = {name: others.pop(name) for name in _OF_GRADIENTS if name in others}
    views |= {"dout": dout, "out": out, "lse": lse}
    views = {name: view for name, view in views.items() if view is not None}
    inputs = {name: others[name] for name in ATTENTION.positions if others.get(name) is not None}
    for name in views:
        if (of := INPUT_OF.get(name)) and of not in ("q", "k", "v", *inputs):
            raise BadParam(
                f"{arg(name)} was given without {arg(of)}; pass {arg(of)}, or leave {arg(name)} out"
            )
    if not inputs.keys().isdisjoint(LENGTH_ARRAYS):
        refuse_mask(inputs.get("mask"))
    forward = attention.normalise(
        *(q, k, v),
        **others,
        return_lse=True,
        score=score,
        score_arrays=score_arrays,
        rule=rule,
        rule_arrays=rule_arrays,
    )
    operator = operator_for(score, forward.lengths_on_device, rule and rule.rule)
    check_devices({"q": q} | views)
    for name, view in views.items():
        argument = operator.arguments[operator.position(name)]
        contract.check_beside_q(argument, view, forward.sizes, forward.dtype, forward.missing(argument))
    views |= {"q": q, "k": k, "v": v} | inputs | contract.score_views(score, score_arrays)
    views |= contract.rule_views(rule, rule_arrays)
    return BackwardProblem(**kept_of(forward, operator.arguments, views), deterministic=deterministic)


def kept_of(
    forward: AttentionProblem, arguments: Sequence[Argument], views: Mapping[str, ArrayView | None]
) -> dict[str, Any]:
    """The fields of a forward call's problem, with the strides of these arguments of its gradients. ``views``
    has those that the call has, None for an array that is contiguous. The gradient of an optional input is
    there where the input is; any other optional argument without an entry is absent.
    """
    kept = {field.name: getattr(forward, field.name) for field in dataclasses.fields(forward)}
    kept["strides"] = tuple(
        None
        if argument.optional and INPUT_OF.get(argument.name, argument.name) not in views
        else place(argument, views.get(argument.name), forward.sizes, forward.dtype).strides
        for argument in arguments
    )
    return kept


def _serves_order(problem: BackwardProblem, order: Value) -> bool:
    if order == "direct" and problem.has("sinks"):
        return False  # it keeps no delta, of which dsinks is a sum
    return order != "none" or not problem.deterministic


BACKWARD = Operator(
    name="attention_backward",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=SCALARS,
    axes={
        # Sinks are in the LSE. Their gradient has a step of its own, which calls without them leave out.
        **{name: axis for name, axis in ATTENTION.axes.items() if name not in (*CACHE_ARRAYS, "sinks")},
        "dq_order": Axis(_serves_order, DQ_ORDERS, default="none"),
    },
    grid_dimensions=(*ATTENTION.grid_dimensions, "sequence_keys", "sequences", "sinks", *LISTS),
    contract=by_name(normalise),
    elements_checked=(*LENGTH_ARRAYS, *blocklists.NAMES),
    check_elements=attention.check_elements,
    differentiates=True,
    of_lengths=(*LENGTH_ARRAYS, *BOUNDS, "sequence_rows", "sequence_keys", "sequences"),
    of_plain=("mask", *LISTS, *attention.OF_PLAIN),
)
_WITH_LENGTHS, _PLAIN = BACKWARD.with_lengths, BACKWARD.without_lengths


def operator_for(score: Score | None, lengths: bool = False, rule: Rule | None = None) -> Operator:
    """``attention_backward`` with that score modification and that mask by a line, if any, for calls with or
    without lengths.
    """
    operator = _WITH_LENGTHS if lengths else _PLAIN
    operator = operator if score is None else modified(operator, score)
    return operator if rule is None else lined(operator, rule)
