"""A mask by a line with the arrays of a call, for the CPU path, the reference and block lists.

It is evaluated element by element (`Visibility.visible`), and for whole blocks from the least and the largest
element of each array there (`Visibility.at`), by `intervals`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.operators.formula import Node, bounds, clamped, evaluate, loader
from flashgen.operators.intervals import Algebra, Interval, Intervals, Truth
from flashgen.operators.keyranges import row_keys, run_begin, run_end
from flashgen.operators.linetable import RangesOfRows
from flashgen.operators.packedrules import places_of
from flashgen.operators.rules import NAMES, TOKEN, index_of_block, loads_by, sizes_of_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.operators.packedrules import Places
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
        if self.rule.pack is None:
            return evaluate(self.rule.tree, self._values(b, h, rows, keys), xp)
        place = places_of(rows, self.arrays, xp)
        inside = (place.first_key <= keys) & (keys < place.end_key)
        return inside & evaluate(self.rule.tree, self._values_in_pack(place, h, rows, keys, xp), xp)

    def _values(self, b: Any, h: Any, rows: Any, keys: Any) -> dict[str, Any]:
        """What a line reads, by name."""
        at = {"b": b, "h": h, "q": rows, "kv": keys}
        loads = {
            param.name: loader(param.dimensions, self.arrays[param.name], at) for param in self.rule.arrays
        }
        names = {"b": b + self.first_batch, "q": rows + self.offset}
        return {**self.numbers, **loads, **at, **names}

    def _values_in_pack(self, place: Places, h: Any, rows: Any, keys: Any, xp: Any) -> dict[str, Any]:
        """`_values` of packed sequences: rows and keys are tokens."""
        tokens = {"q": rows, "kv": keys, "h": h}

        def of_tokens(param: RuleParam) -> Any:
            array = self.arrays[param.name]

            def index(dimension: str, position: Any, extent: int) -> Any:
                if dimension == TOKEN:  # within the sequence
                    return place.tokens(position, extent, xp)
                if param.per_token is not None and dimension == "b":
                    return 0
                return tokens.get(dimension, clamped(position, extent))

            return lambda *positions: array[
                tuple(index(*axis) for axis in zip(param.dimensions, positions, array.shape, strict=True))
            ]

        loads = {param.name: of_tokens(param) for param in self.rule.arrays}
        names = {"b": place.sequence, "h": h, "q": place.position, "kv": keys - place.first_key}
        return {**self.numbers, **loads, **names}

    def key_ranges(self, b: int, h: int, queries: int, keys: int) -> RangesOfRows | None:
        """The keys that each query of a batch entry and head sees, as `keyranges.row_keys` has them; None for
        a line that has no ranges.
        """
        of_line = row_keys(self.rule)
        if of_line is None:
            return None
        rows = np.arange(queries)
        ranges = np.zeros((queries, len(of_line.ranges), 2), np.int64)
        if not keys:
            return RangesOfRows(ranges, False)
        first, end = 0, np.full(queries, keys)
        if self.rule.pack is None:
            values = self._values(b, h, rows, 0)
        else:
            place = places_of(rows, self.arrays, np)
            first, end = place.first_key, np.maximum(place.end_key, place.first_key)
            values = self._values_in_pack(place, h, rows, place.first_key, np)
        follow = True
        for element in of_line.runs:
            elements = np.broadcast_to(evaluate(element, self._values(b, h, 0, np.arange(keys)), np), keys)
            begin, end_of_run, rises = _runs(elements, np.clip(rows + self.offset, 0, keys - 1))
            follow = follow and rises
            values |= {str(run_begin(element).value): begin, str(run_end(element).value): end_of_run}
        for place_of_range, of_row in enumerate(of_line.ranges):
            for side, (node, default) in enumerate(zip(of_row, (first, end), strict=True)):
                at = default if node is None else np.clip(first + evaluate(node, values, np), first, end)
                ranges[:, place_of_range, side] = at
        return RangesOfRows(ranges, not follow)

    def elements_in_pack(self, position: str, blocks: Sequence[range]) -> dict[Node, Interval]:
        """The bounds of arrays in blocks of tokens of queries ("q") or keys ("kv") of packed sequences."""
        found = {}
        for node in loads_by(self.rule, position):
            array, parts = self.arrays[str(node.value)][0], []
            (param,) = (param for param in self.rule.arrays if param.name == node.value)
            for block in blocks:
                at = np.arange(block.start, block.stop)
                if position == "q" and param.dimensions[1] == TOKEN:
                    place = places_of(at, self.arrays, np)
                    at = place.tokens(place.position, len(array), np)
                parts.append(array[at])
            bounds = [part.min() for part in parts], [part.max() for part in parts]
            found[node] = Interval(*(np.array(bound, np.int64) for bound in bounds))
        return found

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
        for node in loads_by(self.rule, position):
            elements = self._elements(node, b, h, position, shift)
            parts = [elements(block) for block in blocks]
            found[node] = [part.min() for part in parts], [part.max() for part in parts]
        shape = (-1, 1) if position == "q" else (-1,)
        return {
            node: Interval(*(np.array(bound, np.int64).reshape(shape) for bound in bounds))
            for node, bounds in found.items()
        }

    def spans_of_scores(
        self, b: int, h: int, row_blocks: Sequence[range], key_blocks: Sequence[range]
    ) -> Mapping[Node, Interval]:
        """What blocks of scores have of arrays that are read by both positions: (rows, keys). Blocks of keys
        follow one another.
        """
        found = {}
        for node in loads_by(self.rule, "block"):
            param = next(param for param in self.rule.arrays if param.name == node.value)
            keys = np.arange(key_blocks[0].start, key_blocks[-1].stop)
            begins = [block.start - keys[0] for block in key_blocks]
            low, high = (np.empty((len(row_blocks), len(key_blocks)), np.int64) for _ in range(2))
            for i, block in enumerate(row_blocks):
                at = {"b": b, "h": h, "q": np.arange(block.start, block.stop)[:, None], "kv": keys}
                load = loader(param.dimensions, self.arrays[param.name], at)
                positions = {**at, **self.numbers, "b": b + self.first_batch, "q": at["q"] + self.offset}
                elements = load(*(evaluate(index, positions, np) for index in node.args))
                low[i] = np.minimum.reduceat(elements.min(0), begins)
                high[i] = np.maximum.reduceat(elements.max(0), begins)
            found[node] = Interval(low, high)
        return found

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
                one = clamped(self._fixed(at, b, h), array.shape[place])
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
        load = loader(param.dimensions, self.arrays[param.name], {"b": b, "h": h, "q": 0, "kv": 0})
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

    def truth(
        self,
        rows: Mapping[Node, Interval],
        keys: Mapping[Node, Interval],
        scores: Mapping[Node, Interval] = MappingProxyType({}),
    ) -> Truth:
        """Whether blocks of scores can have visible keys, and hidden ones, of what `Visibility.spans` gives
        for their rows and keys, and `Visibility.spans_of_scores` for them. The results broadcast to (rows,
        keys).
        """
        of_blocks = {**rows, **keys, **scores}

        def leaf(node: Node) -> Interval:
            if node in of_blocks:
                return of_blocks[node]
            if node.op == "load":
                if index_of_block(node):
                    return Interval(*map(np.int64, bounds(node)))
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
    own = {param.name: arrays[param.argument_name] for param in problem.rule.rule.arrays}
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
        if param.is_bool:
            wide = array if str(array.dtype).endswith("bool") else array != 0
        else:
            wide = array.to(xp.int64) if xp.__name__ == "torch" else array.astype(xp.int64, copy=False)
        tables[param.name] = xp.broadcast_to(wide, param.argument().extents(sizes))
    return Visibility(rule.rule, rule.by_name(), tables, sizes["seqlen_kv"] - sizes["seqlen_q"])


def _runs(elements: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """The first key of the run that each position is in, and the key after the run; and whether the elements
    rise, counted from the first one upwards and on from the least 32-bit integer.
    """
    rising = (elements - elements[0]).astype(np.uint32)
    begin, end = (np.searchsorted(rising, rising[positions], side) for side in ("left", "right"))
    return begin, end, bool((rising[1:] >= rising[:-1]).all())
