"""The operator ``attention``: its arguments, its contract, and the problems of its calls.

`normalise` makes the Problem of a call from array views; the contract is checked nowhere else. A call may
have sequences of several lengths, which only kernels read: see `lengths`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam, NullPointer, arg
from flashgen.operators import blocklists, contract
from flashgen.operators import lengths as of_lengths
from flashgen.operators.arguments import DTYPE_BYTES, Argument, check_devices, check_strides, flag, place
from flashgen.operators.dropout import NO_DROPOUT, check_bias, keep_scale, keep_threshold, probability_of
from flashgen.operators.lengths import BOUNDS, CACHE_ARRAYS, LENGTH_ARRAYS, PAGES, STARTS, Lengths
from flashgen.operators.maskoptions import mask_semantics, simplify
from flashgen.operators.masks import Band
from flashgen.operators.operator import Axis, Number, Operator, Problem, Value, by_name, lined, modified
from flashgen.operators.rules import NOT_PACKED, PREFIX, PackedTokens, sizes_of_tokens
from flashgen.operators.splits import AUTO, splits_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from flashgen.operators.arguments import ArrayView, Expected
    from flashgen.operators.blocklists import BlockLists
    from flashgen.operators.rules import Rule, RuleOfCall
    from flashgen.operators.scores import Score
    from flashgen.operators.splits import Splits

__all__ = ["normalise"]

# What a kernel implements; see `AttentionProblem`.
KERNEL_MASKS = ("none", "causal", "local", "dense", "lines", "blocks")

ARGUMENTS = (
    Argument("q", "input", "batch_q rows_q num_heads_q head_dim", differentiable=True),
    Argument("k", "input", "batch_kv rows_kv num_heads_kv head_dim", differentiable=True),
    Argument("v", "input", "batch_kv rows_kv num_heads_kv head_dim_v", differentiable=True),
    *of_lengths.ARGUMENTS,
    contract.MASK._replace(shape="batch num_heads_q rows_q seqlen_kv"),
    Argument("out", "output", "batch_q rows_q num_heads_q head_dim_v"),
    Argument(
        "lse",
        "output",
        "batch_q num_heads_q rows_q",
        dtypes=("fp32",),
        layout="contiguous",
        alignment=4,
        optional=True,
    ),
    # The gradient is of the last dtype, whatever the array has.
    Argument(
        "sinks",
        "input",
        "num_heads_q",
        dtypes=("bf16", "fp32"),
        layout="contiguous",
        alignment=4,
        optional=True,
        differentiable=True,
    ),
    of_lengths.KV_STARTS,
    *blocklists.ARGUMENTS,
    Argument(
        "dropout_seed",
        "input",
        "2",
        dtypes=("int64",),
        layout="contiguous",
        alignment=8,
        optional=True,
    ),
)
# The optional inputs but the mask, whose check is of its own.
_INPUTS = tuple(x.name for x in ARGUMENTS if x.optional and not x.is_output and x.name != "mask")
# Who splits keys: a kernel, into equal shares of all that there are, or the call; of a family that a call of
# either kind may take, nobody ("any").
SPLITS = ("none", "fixed")
OPTIONS = (
    *("causal", "mask_type", "window_size", "block_size", "return_lse", "splits"),
    *BOUNDS,
    *("dropout_p", "score"),
)
# What only calls without lengths have.
OF_PLAIN = (*blocklists.NAMES, "block_size")
# Keys of the sequence that represents all where the kernel must not depend on their lengths.
_STANDARD_KEYS = 4096
SCALARS = ("softmax_scale",)
_SIZES = ("batch", "seqlen_q", "seqlen_kv", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem(Problem):
    """Shapes, strides and options of one call of attention.

    Key j is visible to query i iff ``p - window_left <= j <= p + window_right``, where ``p = i +
    diagonal_offset``, and the dense mask, if any, is zero there; a side that is ``UNBOUNDED`` hides nothing.
    ``mask_type`` is what a kernel must implement: ``none``, ``causal`` (bounded on the right only,
    ``window_right`` 0), ``local``, or ``dense``, ``lines`` or ``blocks``, whose keys may be bounded too.
    ``lines`` is a mask by a line, ``rule``, true where a key is visible; ``rule_sizes`` are the sizes of
    symbols that are its own. Of ``blocks``, ``block_lists`` says which arrays have the lists of key blocks
    that are visible. ``score`` is the score modification, if any; ``score_scalars`` are its numbers, NaN
    until a call gives them, and ``score_sizes`` the sizes of symbols that are its own. ``splits`` is what the
    call says of split-KV, ``sinks_dtype`` the dtype of its sinks, None without them. ``dropout_p`` is the
    probability that a score is dropped.

    With ``lengths`` sequences have several lengths, whose bounds are ``seqlen_q`` and ``seqlen_kv``; kernels
    and grids are chosen by the bounds. Mask and window fit a sequence that is as long as the bounds, and move
    with the end of any other (`of_sequence`).
    """

    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    mask_type: str
    diagonal_offset: int
    window_left: int
    window_right: int
    softmax_scale: float
    lengths: Lengths | None = None
    splits: Splits = AUTO
    score: Score | None = None
    score_scalars: tuple[float, ...] = ()
    score_sizes: tuple[tuple[str, int], ...] = ()
    sinks_dtype: str | None = None
    rule: RuleOfCall | None = None
    rule_sizes: tuple[tuple[str, int], ...] = ()
    block_lists: BlockLists | None = None
    dropout_p: float = NO_DROPOUT

    @property
    def operator(self) -> Operator:
        return operator_for(self.score, self.lengths is not None, self.rule and self.rule.rule)

    def dtype_of(self, argument: Argument) -> str:
        if argument.name == "sinks" and self.sinks_dtype is not None:
            return self.sinks_dtype
        return argument.dtype(self.dtype)

    @property
    def lengths_on_device(self) -> bool:
        return self.lengths is not None

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def sizes(self) -> dict[str, int]:
        sizes = {name: getattr(self, name) for name in _SIZES} | dict(self.score_sizes)
        sizes |= dict(self.rule_sizes)
        if self.block_lists is not None:
            return sizes | self.block_lists.sizes_of(self.seqlen_q)
        return sizes | (self.lengths.sizes_of(self.batch) if self.lengths else {})

    def symbol_name(self, symbol: str) -> str:
        return symbol if self.lengths is None else self.lengths.symbol_name(symbol)

    def missing(self, argument: Argument) -> int:
        """As `lengths.missing`."""
        return of_lengths.missing(argument, self.lengths, self.batched)

    def shape(self, position: int) -> tuple[int, ...]:
        argument = self.operator.arguments[position]
        return argument.extents(self.sizes)[self.missing(argument) :]

    @property
    def return_lse(self) -> bool:
        return self.has("lse")

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of ``out``: the shape of ``q``, with the head dim of ``v``."""
        return self.shape(self.operator.position("out"))

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp: (batch, num_heads_q, seqlen_q), without batch if ``q`` has none."""
        return self.shape(self.operator.position("lse"))

    @property
    def seen_keys(self) -> tuple[int, int]:
        if not self.seqlen_q:
            return 0, 0
        return Band.of(self).keys_of_some(0, self.seqlen_q, self.seqlen_kv)

    @property
    def empty(self) -> bool:
        if self.lengths is None:
            return self.batch * self.seqlen_q == 0
        return self.batch * self.lengths.batch_q * self.lengths.rows_q == 0

    def description(self) -> str:
        grouping = "mha" if self.group_size == 1 else "gqa or packed"
        return (
            f"head_dim {self.head_dim}, head_dim_v {self.head_dim_v}, dtype {self.dtype}, "
            f"mask_type {self.mask_type}, gqa {grouping}"
            + ("" if self.block_lists is None else f", {self.block_lists}")
            + ("" if self.score is None else f", score {self.score.title}")
            + (", sinks" if self.has("sinks") else "")
            + ("" if self.rule is None else f", mask {self.rule.rule.title}")
            + (", kv_starts" if _starts(self) == "starts" else "")
            + (", dropout" if self.has("dropout_seed") else "")
            + ("" if self.splits == AUTO else f", splits {self.splits}")
            + (f", pages {_pages(self)}" if "pages" in self.operator.axes else "")
        )

    def standard(self) -> AttentionProblem:
        """One entry of the batch; with lengths a sequence with as many keys as queries, or, if more,
        _STANDARD_KEYS.
        """
        if self.lengths is None:
            return dataclasses.replace(self, batch=1)
        seqlen_kv = max(self.seqlen_q, _STANDARD_KEYS)
        moved = seqlen_kv - self.seqlen_kv if self.mask_type != "none" else 0
        return dataclasses.replace(
            self,
            batch=1,
            lengths=dataclasses.replace(self.lengths, batch_q=1, rows_q=self.seqlen_q),
            seqlen_kv=seqlen_kv,
            diagonal_offset=self.diagonal_offset + moved,
        )

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        """In packed GQA ``query_rows`` counts a query once for each head of its group, and ``heads`` are the
        kv heads. ``sequence_rows`` are the rows of all sequences, of which one has ``query_rows`` at most.
        """
        packed = axes["gqa"] == "packed"
        group = self.group_size if packed else 1
        extents = {
            "query_rows": self.seqlen_q * group,
            "key_rows": self.seqlen_kv,
            "heads": self.num_heads_kv if packed else self.num_heads_q,
            "kv_heads": self.num_heads_kv,
            "batch": self.batch,
        }
        if self.lengths is not None:
            extents["sequence_rows"] = self.lengths.batch_q * self.lengths.rows_q * group
        return extents

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        """With lengths ``diagonal_offset`` is `shift`, ``seqlen_kv`` is ``most_keys``, and ``page_size``
        means something where there are pages.
        """
        values = {
            "batch_size": self.batch,
            "group_size": self.group_size,
            "diagonal_offset": self.diagonal_offset,
            "window_left": self.window_left,
            "window_right": self.window_right,
            "sink_bytes": DTYPE_BYTES[self.sinks_dtype or "fp32"],
            "keep_threshold": keep_threshold(self.dropout_p),
            "keep_scale": keep_scale(self.dropout_p),
        } | self.scalar_values()
        if self.rule is not None:
            values |= {PREFIX + name: number for name, number in self.rule.by_name().items()}
        if self.block_lists is not None:
            return values | self.block_lists.values(self.seqlen_kv)
        if self.lengths is None:
            return values
        return values | {
            "seqlen_kv": self.lengths.most_keys,
            "diagonal_offset": self.shift,
            "page_size": self.lengths.rows_kv,
            "kv_start": 0,
        }

    @property
    def shift(self) -> int:
        """How far the diagonal of a sequence is right of the diagonal that ends with it."""
        return self.diagonal_offset - (self.seqlen_kv - self.seqlen_q) if self.mask_type == "causal" else 0

    def of_sequence(self, q_length: int, kv_length: int) -> AttentionProblem:
        """The problem of one sequence of these lengths, with contiguous arrays that have no other."""
        kind, offset, left, right = simplify(
            self.mask_type if self.mask_type in ("dense", "lines") else "local",
            q_length,
            kv_length,
            kv_length - q_length + self.shift,
            self.window_left,
            self.window_right,
        )
        sizes = {name: getattr(self, name) for name in _SIZES}
        sizes |= {"batch": 1, "seqlen_q": q_length, "seqlen_kv": kv_length}
        rule_sizes: tuple[tuple[str, int], ...] = ()
        if self.rule is not None:
            rule_sizes = tuple((dict(self.rule_sizes) | sizes_of_tokens(sizes)).items())
        symbols = sizes | dict(self.score_sizes) | dict(rule_sizes)
        rule = self.rule and self.rule.rule
        return AttentionProblem(
            **sizes,
            dtype=self.dtype,
            mask_type=kind,
            diagonal_offset=offset,
            window_left=left,
            window_right=right,
            softmax_scale=self.softmax_scale,
            splits=self.splits,
            strides=tuple(
                place(argument, None, symbols, self.dtype).strides if self.has(argument.name) else None
                for argument in operator_for(self.score, rule=rule).arguments
            ),
            score=self.score,
            score_scalars=self.score_scalars,
            score_sizes=self.score_sizes,
            sinks_dtype=self.sinks_dtype,
            rule=self.rule,
            rule_sizes=rule_sizes,
            dropout_p=self.dropout_p,
        )

    def scalar_values(self) -> dict[str, Number]:
        """``scale_log2`` is what a kernel's scores are multiplied by for exp2: the softmax scale, or what a
        score modification leaves to be multiplied, times log2(e).
        """
        values: dict[str, Number] = {"softmax_scale": self.softmax_scale}
        if self.score is None:
            return values | {"scale_log2": self.softmax_scale * math.log2(math.e)}
        values |= self._scalars_of_score()
        values |= self.score.constants(values, self.dtype, self.operator.differentiates)
        # As with softmax_scale: a factor of 0 would turn the -inf of a masked score into NaN.
        return values | {"scale_log2": max(values["scale_log2"], contract.MIN_SCALE)}

    def with_scalars(self, scalars: Sequence[Any]) -> AttentionProblem:
        softmax_scale, *rest = scalars
        if softmax_scale is None and self.score is None:
            return self
        scale = (
            self.softmax_scale if softmax_scale is None else contract.scale_of(softmax_scale, self.head_dim)
        )
        called = dataclasses.replace(self, softmax_scale=scale, score_scalars=self._score_scalars(rest))
        if called.score is not None:
            scalars = called._scalars_of_score() | {"softmax_scale": scale}
            called.score.check(scalars, self.dtype, self.operator.differentiates)
        return called

    def _score_scalars(self, values: Sequence[Any]) -> tuple[float, ...]:
        """The numbers of the score modification; None in ``values`` takes this problem's number."""
        numbers = []
        for param, value, current in zip(
            self.score.scalars if self.score else (), values, self.score_scalars, strict=True
        ):
            if value is None and math.isnan(current):
                raise BadParam(f"{arg(param.name)} is None; the score {self.score.title} needs a number")
            numbers.append(current if value is None else self.score.number(param, value))
        return tuple(numbers)

    def _scalars_of_score(self) -> dict[str, Number]:
        """By name; an integer that no call has given yet is 0, since a struct has no other word for it."""
        return {
            param.name: 0 if param.is_integer and math.isnan(value) else value
            for param, value in zip(self.score.scalars, self.score_scalars, strict=True)
        }


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
    score: Score | None = None,
    score_arrays: Sequence[ArrayView | None] = (),
    score_scalars: Sequence[Any] = (),
    rule: RuleOfCall | None = None,
    rule_arrays: Sequence[ArrayView | None] = (),
    **inputs: ArrayView | None,
) -> AttentionProblem:
    """The Problem of a call, or the error of the contract that it breaks. Arguments as in ``attention``; the
    bounds may be `Expected`. ``score_arrays`` and ``score_scalars`` are in the order of the modification's,
    ``rule_arrays`` in the order of a mask by a line, which is ``rule``.
    ``inputs`` has all other optional inputs of ARGUMENTS, by name: the arrays of lengths, and arrays that are
    checked by their row of the table alone.

    Raises BadTensorShape, BadTensorDtype, BadTensorStrides, DeviceTypeNotSupported, NullPointer or BadParam.
    """
    causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    splits = splits_of(splits)
    views = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
    for name in inputs.keys() - set(_INPUTS):
        raise TypeError(f"attention has no optional input {name}")
    inputs = {name: inputs[name] for name in _INPUTS if inputs.get(name) is not None}
    dropout_p = _probability(dropout_p, inputs, splits)
    arrays = {name: view for name, view in inputs.items() if name in LENGTH_ARRAYS}
    masks = {} if mask is None else {"mask": mask}
    tables = contract.score_views(score, score_arrays)
    lines = contract.rule_views(rule, rule_arrays)
    check_devices(views | inputs | masks | tables | lines)
    dtype = contract.check_dtypes(views)
    lengths = None
    if arrays:
        sizes, lengths = of_lengths.read(q, k, v, arrays, max_seqlen_q, max_seqlen_kv, splits)
    else:
        of_lengths.refuse_bounds(max_seqlen_q, max_seqlen_kv)
        sizes = contract.sizes_of(q, k, v)
    contract.check_extents(sizes, dtype)
    contract.check_out(out, q, v)
    for argument in ARGUMENTS:
        view = (views | arrays).get(argument.name)
        if view is not None:
            check_strides(argument, view, DTYPE_BYTES[view.dtype])
    seqlens = sizes["seqlen_q"], sizes["seqlen_kv"]
    of_blocks = {name: view for name, view in inputs.items() if name in blocklists.NAMES}
    block_lists = blocklists.read(of_blocks, block_size, mask_type, sizes)
    if lengths is None:
        kind, *band = mask_semantics(causal, mask_type, window_size, mask is not None, *seqlens)
        kind = kind if rule is None else "lines"
        kind, offset, left, right = simplify(kind, *seqlens, *band)
        if mask is not None:
            contract.check_mask(mask, sizes)
        if block_lists is not None:
            kind = "blocks"
        score_sizes = contract.check_score_arrays(score, tables, sizes)
    else:
        # Where a call says how keys are split, its kernel must not depend on how many there are.
        most_keys = lengths.most_keys if splits == AUTO else None
        kind, offset, left, right = of_lengths.band(
            causal, mask_type, window_size, mask is not None, *seqlens, most_keys, rule is not None
        )
        if mask is not None:
            of_lengths.check_mask(mask, arrays, sizes, bounded=max_seqlen_kv is not None)
        score_sizes = of_lengths.check_score_arrays(score, tables, sizes)
        if "kv_starts" in arrays:
            of_lengths.refuse_arrays_of_keys(score)
            if rule is not None:
                raise BadParam(
                    f"{arg('kv_starts')} was given together with a Mask, whose keys are counted from the "
                    "first row; put the start into its line, as kv >= start[b], and leave "
                    f"{arg('kv_starts')} out"
                )
    packed = NOT_PACKED
    if lengths is not None:
        of_q = lengths.rows_q if lengths.packed_q else None
        packed = PackedTokens(of_q, lengths.rows_kv if lengths.packed_kv else None)
    rule_sizes = contract.check_rule_arrays(rule, lines, sizes, packed)
    symbols = sizes | dict(score_sizes) | dict(rule_sizes)
    symbols |= block_lists.sizes_of(sizes["seqlen_q"]) if block_lists else {}
    symbols |= lengths.sizes_of(sizes["batch"]) if lengths else {}
    batched = len(q.shape) == 4 if lengths is None else not lengths.packed_q
    operator = operator_for(score, lengths is not None, rule and rule.rule)
    for name in inputs.keys() - arrays.keys() - of_blocks.keys():
        argument = operator.arguments[operator.position(name)]
        missing = of_lengths.missing(argument, lengths, batched)
        contract.check_beside_q(argument, inputs[name], symbols, dtype, missing)
    present = views | inputs | masks | tables | lines
    problem = AttentionProblem(
        **sizes,
        lengths=lengths,
        dtype=dtype,
        mask_type=kind,
        diagonal_offset=offset,
        window_left=left,
        window_right=right,
        softmax_scale=contract.scale_of(softmax_scale, sizes["head_dim"]),
        strides=tuple(
            place(argument, present.get(argument.name), symbols, dtype).strides
            if argument.name in present or not argument.optional or (argument.name == "lse" and return_lse)
            else None
            for argument in operator.arguments
        ),
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
    )
    if any(value is not None for value in score_scalars):
        return problem.with_scalars((None, *score_scalars))
    return problem


def _probability(dropout_p: Any, inputs: Mapping[str, ArrayView], splits: Splits) -> float:
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
    for_serving = f"{arg('splits')} is {splits}" if splits != AUTO else ""
    if not inputs.keys().isdisjoint(CACHE_ARRAYS):
        for_serving = "the keys are in a KV cache"
    if for_serving:
        raise BadParam(
            f"{arg('dropout_p')} is {dropout_p:g} and {for_serving}; dropout is for training: leave one of "
            "the two out"
        )
    for name, what in (("block_indptr", "a BlockMask"), ("kv_starts", arg("kv_starts"))):
        if name in inputs:
            raise BadParam(
                f"{arg('dropout_p')} is {dropout_p:g} and {what} was given; no kernel has both: leave one of "
                "the two out"
            )
    return dropout_p


def _serves_grouping(problem: AttentionProblem, gqa: Value) -> bool:
    return (gqa == "mha") == (problem.group_size == 1)


def _pages(problem: AttentionProblem) -> str:
    return "paged" if problem.lengths is not None and problem.lengths.paged else "none"


def _starts(problem: AttentionProblem) -> str:
    return "starts" if problem.lengths is not None and problem.has("kv_starts") else "none"


def check_elements(problem: AttentionProblem, arrays: Mapping[str, np.ndarray | None]) -> None:
    """Raise BadParam for lengths that contradict a problem, or lists of key blocks that are none; ``arrays``
    has them by name, in host memory.
    """
    if problem.block_lists is not None:
        blocklists.check(problem.block_lists, problem.seqlen_kv, arrays)
    if problem.lengths is None:
        return
    from flashgen.operators.sequences import sequences

    sequences(problem, arrays)


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
        "dtype": Axis(lambda problem, value: value == problem.dtype, contract.DTYPES),
        "mask_type": Axis(lambda problem, value: value == problem.mask_type, KERNEL_MASKS, default="none"),
        "gqa": Axis(_serves_grouping, ("mha", "gqa", "packed"), default="mha"),
        "splits": Axis(
            lambda problem, value: value == "any" or (value == "fixed") == (problem.splits != AUTO),
            SPLITS,
            default="any",
        ),
        "pages": Axis(lambda problem, value: value == _pages(problem), PAGES, default="none"),
        "kv_starts": Axis(lambda problem, value: value == _starts(problem), STARTS, default="none"),
        "sinks": Axis(
            lambda problem, value: (value == "sink") == problem.has("sinks"), ("none", "sink"), default="none"
        ),
        "dropout": Axis(
            lambda problem, value: (value == "dropout") == problem.has("dropout_seed"),
            ("none", "dropout"),
            default="none",
        ),
    },
    grid_dimensions=("query_rows", "key_rows", "heads", "kv_heads", "batch", "sequence_rows"),
    contract=by_name(normalise, without=("lse",)),
    elements_checked=(*LENGTH_ARRAYS, *blocklists.NAMES),
    check_elements=check_elements,
    of_lengths=(*LENGTH_ARRAYS, *BOUNDS, "sequence_rows"),
    of_plain=OF_PLAIN,
)
_WITH_LENGTHS, _PLAIN = ATTENTION.with_lengths, ATTENTION.without_lengths


def operator_for(score: Score | None, lengths: bool = False, rule: Rule | None = None) -> Operator:
    """Attention with that score modification and that mask by a line, if any, as calls with or without
    lengths have it.
    """
    operator = _WITH_LENGTHS if lengths else _PLAIN
    operator = operator if score is None else modified(operator, score)
    return operator if rule is None else lined(operator, rule)
