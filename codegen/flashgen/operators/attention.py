"""The operator ``attention``: its arguments and its contract.

`normalise` makes the Problem of a call from array views; the contract is checked nowhere else. A call may
have sequences of several lengths, which only kernels read: see `lengths`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam, InternalError, NullPointer, arg
from flashgen.operators import blocklists, contract, kvcodes, operator_for, trees
from flashgen.operators import lengths as of_lengths
from flashgen.operators.arguments import (
    WHOLE_FP32,
    Argument,
    check_devices,
    check_layouts,
    flag,
    shown,
    strides_of,
)
from flashgen.operators.attention_problem import AttentionProblem, pages_of, starts_of
from flashgen.operators.combinations import Feature, refuse
from flashgen.operators.dropout import NO_DROPOUT, QUERIES, check_bias, probability_of
from flashgen.operators.lengths import BOUNDS, LENGTH_ARRAYS, PAGES, STARTS
from flashgen.operators.maskoptions import KernelMask, MaskOptions, mask_semantics, simplify
from flashgen.operators.operator import Axis, Operator, Value, by_name
from flashgen.operators.rules import NOT_PACKED
from flashgen.operators.splits import AUTO, splits_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

    from flashgen.operators.arguments import ArrayView, Expected
    from flashgen.operators.rules import RuleOfCall
    from flashgen.operators.scores import Score
    from flashgen.operators.splits import Splits

__all__ = ["normalise"]

# What a kernel implements; see `AttentionProblem`.
KERNEL_MASKS = ("none", "causal", "local", "dense", "blocks", "tree")

ARGUMENTS = (
    Argument("q", "input", "batch_q rows_q num_heads_q head_dim", differentiable=True),
    Argument("k", "input", "batch_kv rows_kv num_heads_kv head_dim", differentiable=True),
    Argument("v", "input", "batch_kv rows_kv num_heads_kv head_dim_v", differentiable=True),
    *of_lengths.ARGUMENTS,
    contract.MASK._replace(shape="batch num_heads_q rows_q seqlen_kv"),
    Argument("out", "output", "batch_q rows_q num_heads_q head_dim_v"),
    Argument("lse", "output", "batch_q num_heads_q rows_q", optional=True, **WHOLE_FP32),
    # The gradient is of the last dtype, whatever the array has.
    Argument(
        "sinks",
        "input",
        "num_heads_q",
        **WHOLE_FP32 | {"dtypes": ("bf16", "fp32")},
        optional=True,
        differentiable=True,
    ),
    of_lengths.KV_STARTS,
    *blocklists.ARGUMENTS,
    Argument("dropout_seed", "input", "2", ("int64",), "contiguous", alignment=8, optional=True),
    *kvcodes.ARGUMENTS,
    trees.ARGUMENT,
)
# The optional inputs except the mask, which has its own check.
_INPUTS = tuple(x.name for x in ARGUMENTS if x.optional and not x.is_output and x.name != "mask")
# Who splits the keys: the kernel, into equal shares, or the call. A family for both kinds of calls has "any".
SPLITS = ("none", "fixed")
OPTIONS = (
    *("causal", "mask_type", "window_size", "block_size", "return_lse", "splits"),
    *BOUNDS,
    *("dropout_p", "dropout_row", "kv_dtype", "sm_margin", "score"),
)
# What only calls without lengths have.
OF_PLAIN = (*blocklists.NAMES, "block_size")
SCALARS = ("softmax_scale",)


def normalise(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    *,
    mask: ArrayView | None = None,
    out: ArrayView | None = None,
    causal: bool = False,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = (-1, -1),
    block_size: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    max_seqlen_q: int | Expected | None = None,
    max_seqlen_kv: int | Expected | None = None,
    splits: Splits = AUTO,
    dropout_p: float = NO_DROPOUT,
    dropout_row: int | None = None,
    kv_dtype: str | None = None,
    sm_margin: int | None = 0,
    problem_class: type[AttentionProblem] = AttentionProblem,
    score: Score | None = None,
    score_arrays: Sequence[ArrayView | None] = (),
    score_scalars: Sequence[Any] = (),
    rule: RuleOfCall | None = None,
    rule_arrays: Sequence[ArrayView | None] = (),
    of_codes: bool = False,
    **inputs: ArrayView | None,
) -> AttentionProblem:
    """The Problem of a call, or the error of the contract that it breaks. Arguments as in ``attention``; the
    bounds may be `Expected`. ``problem_class`` names the operator, and limits the sizes. ``rule`` is a mask
    by a line. ``score_arrays``, ``score_scalars`` and ``rule_arrays`` are in the order of the parameters of
    ``score`` and ``rule``. ``inputs`` has all other optional inputs of ARGUMENTS by name. ``of_codes`` is
    whether q, k and v are all e4m3: then the caller, `fp8.normalise`, checks their scales and the dtype of
    ``out``.

    Raises BadTensorShape, BadTensorDtype, BadTensorStrides, DeviceTypeNotSupported, NullPointer or BadParam.
    """
    causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    splits = splits_of(splits)
    views = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
    for name in inputs.keys() - set(_INPUTS):
        raise TypeError(f"attention has no optional input {name}")
    inputs = {name: inputs[name] for name in _INPUTS if inputs.get(name) is not None}
    dropout_p = _probability(dropout_p, inputs)
    masks = {} if mask is None else {"mask": mask}
    refuse(_features(inputs | masks, dropout_p, splits, score, rule))
    length_arrays = {name: view for name, view in inputs.items() if name in LENGTH_ARRAYS}
    score_tables = contract.score_views(score, score_arrays)
    rule_tables = contract.rule_views(rule, rule_arrays)
    check_devices(views | inputs | masks | score_tables | rule_tables)
    dtype = kvcodes.E4M3
    if not of_codes:
        kv_dtype = kvcodes.kv_dtype_of(views, kv_dtype, bool(length_arrays))
        codes = () if kv_dtype is None else ("k", "v")
        dtype = contract.check_dtypes({name: view for name, view in views.items() if name not in codes})
    lengths = None
    if length_arrays:
        sizes, lengths = of_lengths.read(q, k, v, length_arrays, max_seqlen_q, max_seqlen_kv, splits)
    else:
        of_lengths.refuse_bounds(max_seqlen_q, max_seqlen_kv)
        sizes = contract.sizes_of(q, k, v)
    problem_class.check_sizes(sizes, dtype)
    kvcodes.check(inputs, kv_dtype, sizes)
    kv_scales = kvcodes.PER_TILE if of_codes else kvcodes.kind_of(inputs, lengths)
    inputs |= kvcodes.whole_scales_of(inputs, kv_scales, sizes, lengths)
    contract.check_out(out, q, v)
    check_layouts(ARGUMENTS, views | length_arrays)
    has_tree = trees.ARGUMENT.name in inputs
    if has_tree:
        trees.check_drafts(inputs["tree"], q, sizes["seqlen_q"])
        causal = True
    block_lists = _block_lists(inputs, block_size, mask_type, sizes, rule)
    mask_options = MaskOptions(causal, mask_type, window_size, mask is not None)
    if lengths is None:
        kernel_mask = _mask_of_one_length(mask_options, sizes, rule, block_lists is not None)
        if mask is not None:
            contract.check_mask(mask, sizes)
        score_sizes = contract.check_score_arrays(score, score_tables, sizes)
    else:
        kernel_mask = _mask_of_lengths(mask_options, sizes, rule, lengths, splits, has_tree)
        if mask is not None:
            of_lengths.check_mask(mask, sizes, bounded=max_seqlen_kv is not None)
        score_sizes = of_lengths.check_score_arrays(score, score_tables, sizes)
    packed = NOT_PACKED if lengths is None else lengths.packed_tokens
    rule_sizes = contract.check_rule_arrays(rule, rule_tables, sizes, packed)
    symbols = sizes | dict(score_sizes) | dict(rule_sizes)
    symbols |= block_lists.sizes_of(sizes["seqlen_q"]) if block_lists else {}
    if lengths is not None:
        symbols |= lengths.sizes_of(sizes["batch"]) | kvcodes.sizes_of(kv_scales, sizes["batch"], lengths)
    batched = len(q.shape) == 4 if lengths is None else not lengths.packed_q
    name = problem_class.operator_name
    operator = operator_for(name, score, lengths is not None, rule and rule.rule)
    for name in inputs.keys() - length_arrays.keys() - set(blocklists.NAMES):
        argument = operator.arguments[operator.position(name)]
        missing = of_lengths.missing(argument, lengths, batched)
        contract.check_beside_q(argument, inputs[name], symbols, dtype, missing)
    present = views | inputs | masks | score_tables | rule_tables | ({"lse": None} if return_lse else {})
    problem = problem_class(
        **sizes,
        **kernel_mask._asdict(),
        lengths=lengths,
        dtype=dtype,
        softmax_scale=contract.scale_of(softmax_scale, sizes["head_dim"]),
        strides=strides_of(operator.arguments, present, symbols, dtype),
        batched=batched,
        device=q.device,
        splits=splits,
        score=score,
        score_scalars=tuple(math.nan for _ in score.scalars) if score else (),
        score_sizes=score_sizes,
        sinks_dtype=inputs["sinks"].dtype if "sinks" in inputs else None,
        rule=rule,
        rule_sizes=rule_sizes,
        block_lists=block_lists,
        dropout_p=dropout_p,
        dropout_row=_first_row(dropout_row),
        kv_dtype=kv_dtype,
        sm_margin=sm_margin or 0,
        kv_scales=kv_scales,
    )
    if any(value is not None for value in score_scalars):
        return problem.with_scalars((None, *score_scalars))
    return problem


def _block_lists(
    inputs: Mapping[str, ArrayView],
    block_size: tuple[int, int] | None,
    mask_type: int | str | None,
    sizes: Mapping[str, int],
    rule: RuleOfCall | None,
) -> blocklists.BlockLists | None:
    """The lists of key blocks among the inputs of a call; raises as `blocklists.read`."""
    views = {name: view for name, view in inputs.items() if name in blocklists.NAMES}
    heads = sizes["num_heads_kv" if rule is None else "num_heads_q"]
    ranges = None
    if rule is not None and views:
        from flashgen.operators.keyranges import num_ranges  # other calls need no formulas

        ranges = num_ranges(rule.rule)
    return blocklists.read(views, block_size, mask_type, sizes, heads, ranges)


def _mask_of_one_length(
    options: MaskOptions, sizes: Mapping[str, int], rule: RuleOfCall | None, has_lists: bool
) -> KernelMask:
    """The mask of a call without lengths."""
    mask = mask_semantics(options, sizes["seqlen_q"], sizes["seqlen_kv"])
    if rule is not None:
        mask = mask._replace(mask_type="lines")
    mask = simplify(mask, sizes["seqlen_q"], sizes["seqlen_kv"])
    return mask._replace(mask_type="blocks") if has_lists and rule is None else mask


def _mask_of_lengths(
    options: MaskOptions,
    sizes: Mapping[str, int],
    rule: RuleOfCall | None,
    lengths: of_lengths.Lengths,
    splits: Splits,
    has_tree: bool,
) -> KernelMask:
    """The mask of a call with lengths."""
    # If the call says how keys are split, the kernel must not depend on their number.
    most_keys = lengths.most_keys if splits == AUTO else None
    kernel_mask = "tree" if has_tree else "lines" if rule is not None else None
    mask = of_lengths.band(options, sizes["seqlen_q"], sizes["seqlen_kv"], most_keys, kernel_mask)
    if rule is None:
        return mask
    from flashgen.operators.keyranges import window_of_line  # other calls need no formulas

    line = window_of_line(rule)
    left, right = min(mask.window_left, line.left), min(mask.window_right, line.right)
    return mask._replace(window_left=left, window_right=right)


def _first_row(dropout_row: int | None) -> int:
    """The row of random numbers of the first query. Raises InternalError."""
    if dropout_row is None:
        return 0
    if dropout_row < 0 or dropout_row % QUERIES:
        raise InternalError(f"dropout_row is {dropout_row}; it must be a multiple of {QUERIES}, 0 or more")
    return dropout_row


def _probability(dropout_p: Any, inputs: Mapping[str, ArrayView]) -> float:
    """The probability of dropout of a call with these optional inputs. Raises BadParam and NullPointer."""
    dropout_p = probability_of(dropout_p)
    check_bias(dropout_p)
    if dropout_p == NO_DROPOUT:
        if "dropout_seed" in inputs:
            raise BadParam(f"{arg('dropout_seed')} was given without {arg('dropout_p')}; leave it out")
        return dropout_p
    if "dropout_seed" not in inputs:
        raise NullPointer(
            f"{arg('dropout_seed')} is None and {arg('dropout_p')} is {dropout_p:g}; expected an int64 array "
            "of two elements: seed and offset"
        )
    return dropout_p


def _features(
    arrays: Iterable[str], dropout_p: float, splits: Splits, score: Score | None, rule: RuleOfCall | None
) -> dict[str, Feature]:
    """The features of a call with these optional arrays, by their names in the table of combinations."""
    features = {name: Feature(name) for name in arrays}
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        if name in features:
            features.setdefault("packed", features[name])
    if "mask" in features:
        features["mask_array"] = features["mask"]
    if "block_indptr" in features:
        features["BlockMask"] = Feature("mask", "is a BlockMask")
    if rule is not None:
        features["Mask"] = Feature("mask", "is a Mask")
    if dropout_p != NO_DROPOUT:
        features["dropout"] = Feature("dropout_p", f"is {dropout_p:g}")
    if splits != AUTO:
        features["splits"] = Feature("splits", f"is {shown(splits)}")
    for param in score.arrays if score else ():
        if "seqlen_kv" in param.symbols:
            what = f"has the parameter {param.name}, with an element for each key"
            features["array_of_keys"] = Feature("score", what)
    return features


def _serves_grouping(problem: AttentionProblem, gqa: Value) -> bool:
    return (gqa == "mha") == (problem.group_size == 1)


def _mask_of_kernels(problem: AttentionProblem) -> str:
    """The mask type of the kernels that serve a problem. A mask by a line modifies a kernel of lists of key
    blocks, or with lengths on the device a kernel of windows.
    """
    if problem.rule is None:
        return problem.mask_type
    return "local" if problem.lengths_on_device else "blocks"


def check_elements(problem: AttentionProblem, arrays: Mapping[str, np.ndarray | None]) -> None:
    """Raise BadParam for lengths that contradict a problem, and for malformed lists of key blocks.
    ``arrays`` has them by name, in host memory.
    """
    if problem.block_lists is not None and problem.rule is None:
        blocklists.check(problem.block_lists, problem.seqlen_kv, arrays)
    if problem.rule is not None and problem.rule.rule.pack is not None:
        from flashgen.operators.packedrules import check_ends

        check_ends(arrays, problem.seqlen_q, problem.seqlen_kv)
    if problem.lengths is None:
        return
    from flashgen.operators.sequences import check_scales, sequences

    of_call = sequences(problem, arrays)
    check_scales(problem, of_call, arrays)
    if arrays.get("tree") is not None:
        trees.check_order(arrays["tree"], of_call)


ATTENTION = Operator(
    name="attention",
    arguments=ARGUMENTS,
    options=OPTIONS,
    scalars=SCALARS,
    axes={
        "head_dim": Axis(lambda problem, value: value >= problem.head_dim, size=True),
        "head_dim_v": Axis(
            lambda problem, value: value >= problem.head_dim_v, size=True, default_from="head_dim"
        ),
        "dtype": Axis.equal(lambda problem: problem.dtype, contract.DTYPES),
        "mask_type": Axis.equal(_mask_of_kernels, KERNEL_MASKS, "none"),
        "gqa": Axis(_serves_grouping, ("mha", "gqa", "packed"), default="mha"),
        "splits": Axis(
            lambda problem, value: value == "any" or (value == "fixed") == (problem.splits != AUTO),
            SPLITS,
            default="any",
        ),
        "pages": Axis.equal(pages_of, PAGES, "none"),
        "kv_starts": Axis.equal(starts_of, STARTS, "none"),
        "sinks": Axis.either("sink", lambda problem: problem.has("sinks")),
        "dropout": Axis.either("dropout", lambda problem: problem.has("dropout_seed")),
        "kv_dtype": Axis.equal(kvcodes.kv_dtype_word, kvcodes.KV_DTYPES, "none"),
        "kv_scales": Axis.equal(lambda problem: problem.kv_scales, kvcodes.KV_SCALES, kvcodes.PER_TILE),
    },
    grid_dimensions=("query_rows", "key_rows", "heads", "kv_heads", "batch", "sequence_rows", "lists"),
    contract=by_name(normalise, without=("lse",)),
    elements_checked=(*LENGTH_ARRAYS, *kvcodes.SCALES, *blocklists.NAMES, trees.ARGUMENT.name),
    check_elements=check_elements,
    of_lengths=(*LENGTH_ARRAYS, *BOUNDS, *kvcodes.SCALES, "kv_dtype", "kv_scales", "tree", "sequence_rows"),
    of_plain=OF_PLAIN,
)
