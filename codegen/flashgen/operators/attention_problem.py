"""The problem of a call of ``attention``: sizes, strides and options, without pointers."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashgen.errors import BadParam, arg
from flashgen.operators import contract, kvcodes, operator_for
from flashgen.operators import lengths as of_lengths
from flashgen.operators.arguments import DTYPE_BYTES, place, strides_of
from flashgen.operators.dropout import NO_DROPOUT, keep_scale, keep_threshold
from flashgen.operators.maskoptions import KernelMask, simplify
from flashgen.operators.masks import Band
from flashgen.operators.operator import Number, Problem, Value
from flashgen.operators.rules import PREFIX, sizes_of_tokens
from flashgen.operators.splits import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from flashgen.operators.arguments import Argument, ArrayView
    from flashgen.operators.blocklists import BlockLists
    from flashgen.operators.lengths import Lengths
    from flashgen.operators.operator import Operator
    from flashgen.operators.rules import RuleOfCall
    from flashgen.operators.scores import Score
    from flashgen.operators.splits import Splits

# Keys of the sequence that represents all where the kernel must not depend on their lengths.
_STANDARD_KEYS = 4096
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
    probability that a score is dropped, ``dropout_row`` the row of random numbers of the first query.
    ``kv_dtype`` is the dtype of k and v if q has another, ``kv_scales`` is ``token`` if each token has
    scales, else ``none``. ``sm_margin`` is how many multiprocessors the kernel leaves to others.

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
    dropout_row: int = 0
    kv_dtype: str | None = None
    sm_margin: int = 0
    kv_scales: str = kvcodes.PER_TILE
    operator_name: ClassVar[str] = "attention"

    @property
    def operator(self) -> Operator:
        rule = self.rule and self.rule.rule
        return operator_for(self.operator_name, self.score, self.lengths is not None, rule)

    @staticmethod
    def check_sizes(sizes: Mapping[str, int], dtype: str) -> None:
        """That there are kernels for head dims, heads and lengths such as these. Raises BadTensorShape."""
        contract.check_extents(sizes, dtype)

    def dtype_of(self, argument: Argument) -> str:
        if argument.name == "sinks" and self.sinks_dtype is not None:
            return self.sinks_dtype
        if argument.name in ("k", "v") and self.kv_dtype is not None:
            return self.kv_dtype
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
        if self.lengths is None:
            return sizes
        return (
            sizes
            | self.lengths.sizes_of(self.batch)
            | kvcodes.sizes_of(self.kv_scales, self.batch, self.lengths)
        )

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
            + (", kv_starts" if starts_of(self) == "starts" else "")
            + (", tree" if self.has("tree") else "")
            + (", dropout" if self.has("dropout_seed") else "")
            + ("" if self.kv_dtype is None else f", kv_dtype {self.kv_dtype}")
            + (", kv_scales token" if self.kv_scales == kvcodes.TOKEN else "")
            + ("" if self.splits == AUTO else f", splits {self.splits}")
            + (f", pages {pages_of(self)}" if "pages" in self.operator.axes else "")
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
        ``lists`` are a caller's; a mask by a line has the extents of the steps that make its lists.
        """
        packed = axes["gqa"] == "packed"
        group = self.group_size if packed else 1
        extents = {
            "query_rows": self.seqlen_q * group,
            "key_rows": self.seqlen_kv,
            "heads": self.num_heads_kv if packed else self.num_heads_q,
            "kv_heads": self.num_heads_kv,
            "batch": self.batch,
            "lists": 0,
        }
        if self.rule is None and self.block_lists is not None:
            extents["lists"] = self.block_lists.batch * self.block_lists.heads
        if self.rule is not None and self.block_lists is not None:
            from flashgen.operators.masklists import extents_of_lists

            extents |= extents_of_lists(self.rule.rule, self.block_lists, self.seqlen_q, self.seqlen_kv)
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
            "dropout_row": self.dropout_row,
            "keep_threshold": keep_threshold(self.dropout_p),
            "keep_scale": keep_scale(self.dropout_p),
        } | self.scalar_values()
        if self.rule is not None:
            values |= {PREFIX + name: number for name, number in self.rule.by_name().items()}
        if self.block_lists is not None:
            values |= self.block_lists.values(self.seqlen_kv)
            # Lists that a step makes are no argument, whose strides would be counted.
            return values if self.has("block_indptr") else values | self.block_lists.strides(self.seqlen_q)
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
        mask_type = self.mask_type if self.mask_type in ("dense", "lines") else "local"
        offset = kv_length - q_length + self.shift
        mask = KernelMask(mask_type, offset, self.window_left, self.window_right)
        sizes = {name: getattr(self, name) for name in _SIZES}
        sizes |= {"batch": 1, "seqlen_q": q_length, "seqlen_kv": kv_length}
        rule_sizes: tuple[tuple[str, int], ...] = ()
        if self.rule is not None:
            rule_sizes = tuple((dict(self.rule_sizes) | sizes_of_tokens(sizes)).items())
        symbols = sizes | dict(self.score_sizes) | dict(rule_sizes)
        rule = self.rule and self.rule.rule
        return AttentionProblem(
            **sizes,
            **simplify(mask, q_length, kv_length)._asdict(),
            dtype=self.dtype,
            softmax_scale=self.softmax_scale,
            splits=self.splits,
            strides=tuple(
                place(argument, None, symbols, self.dtype).strides if self.has(argument.name) else None
                for argument in operator_for(AttentionProblem.operator_name, self.score, rule=rule).arguments
            ),
            score=self.score,
            score_scalars=self.score_scalars,
            score_sizes=self.score_sizes,
            sinks_dtype=self.sinks_dtype,
            rule=self.rule,
            rule_sizes=rule_sizes,
            dropout_p=self.dropout_p,
            dropout_row=self.dropout_row,
            kv_dtype=self.kv_dtype,
            kv_scales=self.kv_scales,
        )

    def fields_of(
        self, arguments: Sequence[Argument], views: Mapping[str, ArrayView | None], **sizes: int
    ) -> dict[str, Any]:
        """The fields of this problem for another operator of the same call, with the strides of its arguments
        as `strides_of` has them; ``sizes`` are of symbols that only that operator has.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"strides": strides_of(arguments, views, self.sizes | sizes, self.dtype)}

    def with_lists(self, rows: int, keys: int) -> Self:
        """This problem of a mask by a line with lists of its blocks of ``rows`` queries and ``keys`` keys,
        which a step makes. Raises BadTensorShape for more blocks than kernels count.
        """
        from flashgen.operators.masklists import lists_of_tile  # other calls need no formulas

        sizes = self.batch, self.num_heads_q, self.seqlen_q, self.seqlen_kv
        return dataclasses.replace(self, block_lists=lists_of_tile(self.rule, *sizes, rows, keys))

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


def pages_of(problem: AttentionProblem) -> str:
    """The value of the axis ``pages`` that serves a problem."""
    return "paged" if problem.lengths is not None and problem.lengths.paged else "none"


def starts_of(problem: AttentionProblem) -> str:
    """The value of the axis ``kv_starts`` that serves a problem."""
    return "starts" if problem.lengths is not None and problem.has("kv_starts") else "none"
