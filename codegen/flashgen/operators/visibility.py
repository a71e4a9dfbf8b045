"""A mask by a line with the arrays of a call, for the CPU path, the reference and block lists.

It is evaluated element by element (`Visibility.visible`), and for whole blocks from the least and the largest
element of each array there (`Visibility.at`), by `intervals`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.operators.formula import ELEMENTS, Node, evaluate
from flashgen.operators.intervals import Algebra, Interval, Intervals, Truth
from flashgen.operators.rules import NAMES, PREFIX, sizes_of_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.attention import AttentionProblem
    from flashgen.operators.rules import Rule, RuleOfCall, RuleParam
    from flashgen.operators.sequences import Sequence as OfBatch


class _Arrays(Algebra):
    """Bounds that are arrays of NumPy."""

    def minimum(self, a: Any, b: Any) -> Any:
        return np.minimum(a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return np.maximum(a, b)

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        return np.where(condition, a, b)


_ARRAYS = _Arrays()


def index_of_block(node: Node) -> str:
    """By which positions the elements of an array are that a block reads: "q" or "kv", "" where it reads one
    element, or "any" where that is not simply said.
    """
    words = [
        str(index.value)
        if index.op == "name" and index.value in ("q", "kv")
        else "any"
        if {"q", "kv"} & index.reads()
        else ""
        for index in node.args
    ]
    moving = [word for word in words if word]
    if len(moving) > 1:
        return "any"
    return moving[0] if moving else ""


class Visibility(NamedTuple):
    """A rule with the integers and arrays of a call, all of one library. ``arrays`` have the shapes that
    their parameters declare, by broadcasting. ``offset`` is seqlen_kv - seqlen_q. What a line calls b is
    ``first_batch`` for the first entry of the arrays.
    """

    rule: Rule
    numbers: Mapping[str, int]
    arrays: Mapping[str, Any]
    offset: int
    first_batch: int = 0

    def visible(self, b: Any, h: Any, rows: Any, keys: Any, xp: Any = np) -> Any:
        """Whether keys are visible, for batch entries, query heads, rows of queries and keys, integers that
        broadcast to the shape of the scores.
        """
        at = {"b": b, "h": h, "q": rows, "kv": keys}
        loads = {param.name: _loader(param, self.arrays[param.name], at) for param in self.rule.arrays}
        names = {"b": b + self.first_batch, "q": rows + self.offset}
        return evaluate(self.rule.tree, {**self.numbers, **loads, **at, **names}, xp)

    def hides(self, b: Any, h: Any, rows: Any, keys: Any, xp: Any = np) -> Any:
        """Where keys are not visible; arguments as `visible`. The result has dimensions."""
        visible = self.visible(b, h, rows, keys, xp)
        if not hasattr(visible, "dtype"):  # a line that reads no position
            visible = (keys == keys) & visible
        return ~visible

    @property
    def reads_head(self) -> bool:
        """Whether query heads see different keys."""
        return "h" in self.rule.tree.reads()

    @property
    def reads_batch(self) -> bool:
        """Whether batch entries see different keys."""
        return "b" in self.rule.tree.reads()

    def at(self, b: int, h: int) -> _OfHead:
        """The rule for one batch entry and query head."""
        return _OfHead(self, b, h)

    def spans(self, b: int, h: int, position: str, blocks: Sequence[range]) -> Mapping[Node, Interval]:
        """What blocks of queries ("q") or keys ("kv") have of names and arrays: (rows, 1), or (keys,)."""
        shift = self.offset if position == "q" else 0
        found = {
            Node("name", (), position, "int"): (
                [block.start + shift for block in blocks],
                [block.stop - 1 + shift for block in blocks],
            )
        }
        for node in self.rule.tree.walk():
            if node.op == "load" and index_of_block(node) == position:
                elements = self._elements(node, b, h, position, shift)
                parts = [elements(block) for block in blocks]
                found[node] = [part.min() for part in parts], [part.max() for part in parts]
        shape = (-1, 1) if position == "q" else (-1,)
        return {
            node: Interval(*(np.array(bound, np.int64).reshape(shape) for bound in bounds))
            for node, bounds in found.items()
        }

    def _elements(self, node: Node, b: int, h: int, position: str, shift: int) -> Any:
        """A function from a block of queries or keys to the elements of an array that it reads."""
        param = next(param for param in self.rule.arrays if param.name == node.value)
        array = self.arrays[param.name]
        fixed = {"b": b, "h": h}
        index: list[Any] = []
        axis = 0
        for place, (dimension, at) in enumerate(zip(param.dimensions, node.args, strict=True)):
            if at.op == "name" and at.value == position:
                axis, one = place, slice(None)
            elif dimension in fixed:
                one = fixed[dimension]
            else:
                one = _clamped(self._fixed(at, b, h), array.shape[place])
            index.append(one)
        line, counts_queries = array[tuple(index)], param.dimensions[axis] == "q"

        def elements(block: range) -> Any:
            # A position before the first key, or past the last, stands for that.
            start = block.start if counts_queries else block.start + shift
            begin = min(max(start, 0), len(line) - 1)
            end = min(max(start + len(block), begin + 1), len(line))
            return line[begin:end]

        return elements

    def _fixed(self, node: Node, b: int, h: int) -> int:
        """The value of an index that reads no position."""
        return evaluate(node, {**self.numbers, "b": b + self.first_batch, "h": h}, np)

    def element(self, node: Node, b: int, h: int) -> int:
        """The element of an array whose indices read no position."""
        param = next(param for param in self.rule.arrays if param.name == node.value)
        load = _loader(param, self.arrays[param.name], {"b": b, "h": h, "q": 0, "kv": 0})
        return int(load(*(self._fixed(index, b, h) for index in node.args)))

    def of_sequence(self, sequence: OfBatch, problem: AttentionProblem) -> Visibility:
        """The rule of one sequence, whose problem has its lengths. Its arrays have a batch of one."""
        cut = {
            "batch": slice(sequence.number, sequence.number + 1),
            "token_batch_q": slice(sequence.number, sequence.number + 1),
            "token_batch_kv": slice(sequence.number, sequence.number + 1),
            "tokens_q": slice(sequence.q_length),
            "tokens_kv": slice(sequence.kv_length),
            "seqlen_q": slice(sequence.q_length),
            "seqlen_kv": slice(sequence.kv_length),
        }
        lengths = problem.lengths
        if lengths is not None and lengths.packed_q:
            begin, end = sequence.q_begin, sequence.q_begin + sequence.q_length
            cut |= {"token_batch_q": slice(None), "tokens_q": slice(begin, end)}
        if lengths is not None and lengths.packed_kv:
            begin, end = sequence.kv_begin, sequence.kv_begin + sequence.kv_length
            cut |= {"token_batch_kv": slice(None), "tokens_kv": slice(begin, end)}
        arrays = {
            param.name: self.arrays[param.name][
                tuple(cut.get(symbol, slice(None)) for symbol in param.symbols)
            ]
            for param in self.rule.arrays
        }
        offset = sequence.kv_length - sequence.q_length
        return self._replace(arrays=arrays, offset=offset, first_batch=sequence.number)


class _OfHead(NamedTuple):
    """A rule for one batch entry and query head."""

    visibility: Visibility
    b: int
    h: int

    def truth(self, rows: Mapping[Node, Interval], keys: Mapping[Node, Interval]) -> Truth:
        """Whether blocks of scores can have visible keys, and hidden ones, of what `Visibility.spans` gives
        for their rows and keys. The results broadcast to (rows, keys).
        """
        of_blocks = {**rows, **keys}

        def leaf(node: Node) -> Interval:
            if node in of_blocks:
                return of_blocks[node]
            if node.op == "load":
                if index_of_block(node):
                    return Interval(*map(np.int64, ELEMENTS))
                value = self.visibility.element(node, self.b, self.h)
            elif node.value in NAMES:
                value = self.b + self.visibility.first_batch if node.value == "b" else self.h
            else:
                value = self.visibility.numbers[str(node.value)]
            one = np.int64(value)
            return Interval(one, one)

        return Intervals(leaf, _ARRAYS).truth(self.visibility.rule.tree)


def visibility_of(problem: AttentionProblem, arrays: Mapping[str, Any], xp: Any = np) -> Visibility | None:
    """The mask by a line of a problem, None if it has none. ``arrays`` has the arrays of a call by the names
    of arguments, of the library ``xp``.
    """
    if problem.rule is None:
        return None
    own = {param.name: arrays[PREFIX + param.name] for param in problem.rule.rule.arrays}
    return _visibility(problem.rule, own, problem.sizes, xp)


def visibility_on_host(rule: RuleOfCall, arrays: Mapping[str, Any], sizes: Mapping[str, int]) -> Visibility:
    """A rule with arrays of NumPy by their names, whose sequences have one length. ``sizes`` are batch,
    num_heads_q, seqlen_q and seqlen_kv; the arrays have the other sizes.
    """
    symbols = {**sizes, **sizes_of_tokens(sizes)}
    for param in rule.rule.arrays:
        shape = arrays[param.name].shape
        for symbol, size in zip(reversed(param.symbols), reversed(shape), strict=False):
            symbols.setdefault(symbol, size)
        symbols |= {symbol: 1 for symbol in param.symbols if symbol not in symbols}
    return _visibility(rule, arrays, symbols, np)


def _visibility(rule: RuleOfCall, arrays: Mapping[str, Any], sizes: Mapping[str, int], xp: Any) -> Visibility:
    tables = {}
    for param in rule.rule.arrays:
        array = arrays[param.name]
        wide = array.to(xp.int64) if xp.__name__ == "torch" else array.astype(xp.int64, copy=False)
        tables[param.name] = xp.broadcast_to(wide, param.argument().extents(sizes))
    return Visibility(rule.rule, rule.by_name(), tables, sizes["seqlen_kv"] - sizes["seqlen_q"])


def _loader(param: RuleParam, array: Any, at: Mapping[str, Any]) -> Any:
    """A function from the indices in a line to elements. An index past an end stands for the last one."""

    def load(*positions: Any) -> Any:
        index = tuple(
            at[dimension] if dimension in at else _clamped(position, extent)
            for dimension, position, extent in zip(param.dimensions, positions, array.shape, strict=True)
        )
        return array[index]

    return load


def _clamped(index: Any, extent: int) -> Any:
    if not hasattr(index, "dtype"):
        return min(max(index, 0), extent - 1)
    return index.clip(0, extent - 1)
