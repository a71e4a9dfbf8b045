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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashgen.errors import BadParam, BadTensorDtype, arg
from flashgen.operators import attention, blocklists, contract, lengths, operator_for
from flashgen.operators.arguments import Argument, check_devices, flag
from flashgen.operators.attention import ATTENTION, SCALARS
from flashgen.operators.attention_problem import AttentionProblem
from flashgen.operators.combinations import Feature, refuse
from flashgen.operators.kvcodes import E4M3, SCALES
from flashgen.operators.lengths import BOUNDS, CACHE_ARRAYS
from flashgen.operators.operator import Axis, Operator, Value, by_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.rules import RuleOfCall
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


ARGUMENTS = gradient_arguments(attention.ARGUMENTS, without=(*CACHE_ARRAYS, *SCALES, "tree"))
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
    *("dropout_p", "dropout_row", "score", "deterministic", "dkv_dtype"),
)
# The dimensions of grids that go over lists of key blocks.
LISTS = ("list_columns", "list_entries", "line_columns")
_OF_KEYS = ("dk", "dv")
# In what order thread blocks add to dq: in none, or always in the same; or the one that has its rows does
# all of them.
DQ_ORDERS = ("none", "ordered", "direct")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardProblem(AttentionProblem):
    """Shapes, strides and options of one call, as in the forward call, and whether the gradients must have
    the same bits each time. ``dkv_dtype`` is the dtype of dk and dv if q has another.
    """

    deterministic: bool = False
    dkv_dtype: str | None = None
    operator_name: ClassVar[str] = "attention_backward"

    def dtype_of(self, argument: Argument) -> str:
        if argument.name in _OF_KEYS and self.dkv_dtype is not None:
            return self.dkv_dtype
        return AttentionProblem.dtype_of(self, argument)

    def new_dtype(self, argument: Argument) -> str | None:
        return self.dkv_dtype if argument.name in _OF_KEYS else AttentionProblem.new_dtype(self, argument)

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
        dkv = "" if self.dkv_dtype is None else f", dk and dv {self.dkv_dtype}"
        return f"{AttentionProblem.description(self)}, dq_order {orders}{dkv}"

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """With lengths ``query_rows`` and ``key_rows`` are the rows of an entry of q and k, whatever the
        bounds: all are written. ``sequence_rows`` and ``sequence_keys`` are the rows of all entries, and
        ``sequences`` counts the rows past the last sequence as one more. ``sinks`` are the query heads of a
        call with sinks. ``list_columns`` are the key blocks of all lists of such, ``list_entries`` their
        entries, and ``line_columns`` the key blocks of lists of a mask by a line.
        """
        extents = AttentionProblem.grid_extents(self, axes)
        extents["sinks"] = self.num_heads_q if self.has("sinks") else 0
        lists = self.block_lists
        columns = lists.batch * lists.heads * lists.key_blocks(self.seqlen_kv) if lists else 0
        of_line = columns if self.rule is not None else 0
        extents |= zip(LISTS, (columns, lists.entries if lists else 0, of_line), strict=True)
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
        arguments = operator_for(self.operator_name, self.score, rule=rule).arguments
        fields = forward.fields_of(arguments, with_gradients(present))
        return BackwardProblem(**fields, deterministic=self.deterministic, dkv_dtype=self.dkv_dtype)


def normalise(
    dout: ArrayView,
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    out: ArrayView,
    lse: ArrayView,
    *,
    deterministic: bool = False,
    dkv_dtype: str | None = None,
    score: Score | None = None,
    score_arrays: Sequence[ArrayView | None] = (),
    rule: RuleOfCall | None = None,
    rule_arrays: Sequence[ArrayView | None] = (),
    **others: Any,
) -> BackwardProblem:
    """The Problem of a call, or the error of the contract that it breaks. Arguments as in
    ``attention_backward``: ``others`` has arrays of ARGUMENTS, and what `attention.normalise` takes.
    ``dkv_dtype`` is "fp32" if dk and dv are to be, where the caller passes neither.

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
    lengths_of_call = [Feature(name) for name in LENGTH_ARRAYS if name in inputs]
    if lengths_of_call and "mask" in inputs:
        refuse({"gradients_of_lengths": lengths_of_call[0], "mask_array": Feature("mask")})
    if k.dtype == E4M3 or v.dtype == E4M3:
        name = "k" if k.dtype == E4M3 else "v"
        raise BadTensorDtype(
            f"{arg(name)} has dtype e4m3, and e4m3 codes have no gradients; pass k and v of the dtype of q"
        )
    forward = attention.normalise(
        *(q, k, v),
        **others,
        return_lse=True,
        score=score,
        score_arrays=score_arrays,
        rule=rule,
        rule_arrays=rule_arrays,
    )
    name = BackwardProblem.operator_name
    operator = operator_for(name, score, forward.lengths_on_device, rule and rule.rule)
    check_devices({"q": q} | views)
    dkv_dtype = _dkv_dtype(views, forward, dkv_dtype)
    for name, view in views.items():
        argument = operator.arguments[operator.position(name)]
        if dkv_dtype is not None and name in _OF_KEYS:
            argument = argument._replace(dtypes=(dkv_dtype,))
        contract.check_beside_q(argument, view, forward.sizes, forward.dtype, forward.missing(argument))
    views |= {"q": q, "k": k, "v": v} | inputs | contract.score_views(score, score_arrays)
    views |= contract.rule_views(rule, rule_arrays)
    fields = forward.fields_of(operator.arguments, with_gradients(views))
    return BackwardProblem(**fields, deterministic=deterministic, dkv_dtype=dkv_dtype)


def _dkv_dtype(
    views: Mapping[str, ArrayView], forward: AttentionProblem, dkv_dtype: str | None
) -> str | None:
    """fp32 where the caller passes dk and dv of that dtype, or says so, and q has 16 bits; None where they
    are as q. Raises BadTensorDtype and BadParam.
    """
    wide = [name for name in _OF_KEYS if name in views and views[name].dtype == "fp32"]
    if dkv_dtype is not None and not {*_OF_KEYS} & views.keys():
        wide = [*_OF_KEYS]
    if not wide or forward.dtype not in ("fp16", "bf16"):
        return None
    if forward.lengths is None:
        raise BadTensorDtype(
            f"{arg(wide[0])} has dtype fp32; expected {forward.dtype}, as of q: only calls with lengths, "
            f"for example {arg('kv_lengths')}, also take dk and dv of fp32"
        )
    if len(wide) < len(_OF_KEYS):
        (other,) = {*_OF_KEYS} - {*wide}
        what = f"has dtype {views[other].dtype}" if other in views else "is None"
        raise BadTensorDtype(
            f"{arg(wide[0])} has dtype fp32 and {arg(other)} {what}; pass both as fp32, or both as "
            f"{forward.dtype}"
        )
    present = {"kv_starts": "kv_starts", "dropout": "dropout_seed"}
    beside = {feature: Feature(name) for feature, name in present.items() if forward.has(name)}
    refuse({"fp32_dkv": Feature(wide[0], "has dtype fp32"), **beside})
    return "fp32"


def with_gradients(views: Mapping[str, ArrayView | None]) -> dict[str, ArrayView | None]:
    """The arrays of a call, and a new one for each gradient of an input that has none."""
    return {name: None for name, of in INPUT_OF.items() if of in views} | dict(views)


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
        "dkv_dtype": Axis.either("fp32dkv", lambda problem: problem.dkv_dtype == "fp32"),
    },
    grid_dimensions=(*ATTENTION.grid_dimensions, "sequence_keys", "sequences", "sinks", *LISTS),
    contract=by_name(normalise),
    elements_checked=(*LENGTH_ARRAYS, *blocklists.NAMES),
    check_elements=attention.check_elements,
    differentiates=True,
    of_lengths=(*LENGTH_ARRAYS, *BOUNDS, "sequence_rows", "sequence_keys", "sequences"),
    of_plain=("mask", *LISTS, *attention.OF_PLAIN),
)
