"""The CUDA of a mask by a line: whether a key is visible.

    struct LineHead;  LineHead line_head(params, b, h, seqlen_q, seqlen_kv, first_query, first_key);
    struct LineRow;   LineRow line_row(params, head, query);
    struct LineKey;   LineKey line_key(params, head, key);
    bool visible(params, head, row, key);
    KeyRange line_range(params, head, row);              // of a line that shows each row a range of keys
    KeyRange line_range_N(params, head, row, runs);      // each of a few ranges that a row sees

    LineRow line_row_inside(params, head, first, step);  // of row first + step
    LineKey line_key_inside(params, head, first, step);  // of key first + step

The last two are for a row that exists and is at the position of a key, and for a key that exists: they clamp
no index that is a position. With a constant ``step`` an element is at a constant distance from the element
of ``first``.

What depends on a row alone, or on a key alone, is a member of a struct, so that a kernel may keep it:
elements of arrays, quotients and remainders, and where an array by q and kv has the row of a query. Sequences
have ``seqlen_q`` queries and ``seqlen_kv`` keys. Where sequences are packed, ``first_query`` and
``first_key`` are their first tokens, else 0. Rows and keys past the end read the last element of an array.

Needs ``Params`` in scope, with the members of `params.rule_params`. `verdicts` has the functions of blocks.

A rule with a ``pack`` counts queries and keys of a call as tokens of several sequences. A row has the keys
and the number of its sequence, and its position there, from the table ``line_rows``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.operators.formula import bounds, text
from flashgen.operators.intervals import Intervals
from flashgen.operators.keyranges import key_range, row_keys, run_begin, run_end
from flashgen.operators.rules import PREFIX, TOKEN, index_of_block, loads_by
from flashgen.source.cppcode import bare, fresh_name, function
from flashgen.source.integercode import CALLS, HELPERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.formula import Node
    from flashgen.operators.keyranges import KeyRange
    from flashgen.operators.rules import Rule, RuleParam

_SIGNS = {"and": "&&", "or": "||"}
_LARGEST_INT = 2**31 - 1


def rule_functions(rule: Rule, packed_heads: bool = False) -> str:
    """``visible`` and what it needs. With ``packed_heads`` a LineKey may go with heads other than the one
    that it was made for. No final newline.
    """
    return RuleWriter(rule, packed_heads=packed_heads).functions()


def range_function(rule: Rule) -> str:
    """``line_range``, after `rule_functions`; "" where rows see no range of keys. No final newline."""
    return RuleWriter(rule).key_range()


def ranges_functions(rule: Rule) -> tuple[str, ...]:
    """``line_range_N`` for each of the ranges that a row sees, none where it sees other keys; after
    `rule_functions`. ``runs`` is there if the line has `runs_of`: a struct ``LineRuns`` with
    ``NAME_begin`` and ``NAME_end`` for each.
    """
    keys = row_keys(rule)
    if keys is None:
        return ()
    words = {}
    for name, element in runs_of(rule).items():
        words[str(run_begin(element).value)] = f"runs.{name}_begin"
        words[str(run_end(element).value)] = f"runs.{name}_end"
    writer = RuleWriter(rule, of_runs=words)
    return tuple(writer.range_number(number) for number in range(len(keys.ranges)))


def runs_of(rule: Rule) -> dict[str, Node]:
    """The elements, read by keys, whose runs the ranges of rows need, by names for members."""
    keys, names = row_keys(rule), dict[str, "Node"]()
    for element in () if keys is None else keys.runs:
        names[fresh_name(str(element.value), [*names])] = element
    return names


class RuleWriter:
    """The functions of a rule, and the C++ of its numbers and elements."""

    def __init__(
        self,
        rule: Rule,
        names: Mapping[str, str] | None = None,
        packed_heads: bool = False,
        of_runs: Mapping[str, str] | None = None,
    ) -> None:
        """``names`` has words for positions and b in functions that have no LineRow and LineKey to read them
        of. ``packed_heads`` is as in `rule_functions`. ``of_runs`` has words for the ends of runs.
        """
        self._rule, self._packed_heads = rule, packed_heads
        self._arrays = {param.name: param for param in rule.arrays}
        self._intervals = Intervals(bounds)
        self._members: dict[str, dict[Node, str]] = {"head": {}, "row": {}, "key": {}}
        self._names = {**(names or (_NAMES if rule.pack is None else _NAMES_IN_PACK)), **(of_runs or {})}
        self._inside = False  # whether a function has rows or keys that exist, by ``first`` and ``step``
        self._rows: dict[Node, str] = {}
        if names is None:
            self._assign(rule.tree)
            self._rows = self._rows_of_arrays()

    def functions(self) -> str:
        """The text of all structs and functions."""
        keys = row_keys(self._rule)
        sides = () if keys is None else (side for of_row in keys.ranges for side in of_row)
        trees = (self._rule.tree, *filter(None, (*sides, *(key_range(self._rule.tree) or ()))))
        operations = {node.op for tree in trees for node in tree.walk()}
        if "%" in operations:
            operations.add("//")  # of verdicts
        parts = [
            f"// The mask `{self._rule.name}`: a key is visible where {self._rule.text}",
            *(helper for op, helper in HELPERS.items() if op in operations),
            *self._struct("LineHead", "a query head", "head", ("b", "h", *_LENGTHS)),
            self._maker("LineHead", "head", {"b": "int", "h": "int"} | dict.fromkeys(_LENGTHS, "int")),
            *self._struct("LineRow", "a row", "row", _ROW if self._rule.pack is None else _ROW_IN_PACK),
            *self._makers("LineRow", "row", {"head": "const LineHead&", "query": "int"}),
            *self._struct("LineKey", "a key", "key", _KEY if not self._rows else (*_KEY, "column")),
            *self._makers("LineKey", "key", {"head": "const LineHead&", "kv": "int"}),
            self._visible(),
        ]
        return "\n\n".join(parts)

    def _assign(self, node: Node) -> None:
        """Make members of loads and divisions that depend on a head, a row or a key alone."""
        if node.op in ("load", "//", "%"):
            reads = self._positions(node)
            owner = "head" if not reads else "row" if reads == {"q"} else "key" if reads == {"kv"} else ""
            if owner:
                names = self._members[owner]
                word = {"//": "quotient", "%": "remainder"}.get(node.op, str(node.value))
                names.setdefault(node, fresh_name(word, [*names.values(), *_MEMBERS]))
                return
        for arg in node.args:
            self._assign(arg)

    def _rows_of_arrays(self) -> dict[Node, str]:
        """The names of members with the address of a row, of what is read by q and kv."""
        rows: dict[Node, str] = {}
        for node in loads_by(self._rule, "block"):
            if self._arrays[str(node.value)].dimensions[-2:] == ("q", "kv"):
                taken = [*self._members["row"].values(), *self._members["head"].values(), *rows.values()]
                rows[node] = fresh_name(f"{node.value}_row", [*taken, *_MEMBERS])
        return rows

    def _positions(self, node: Node) -> set[str]:
        """Which of q and kv a value depends on."""
        reads = {"q", "kv"} & node.reads()
        if self._rule.pack is None:
            return {"q", *reads} if self._packed_heads and {"h", "kv"} <= node.reads() else reads
        if node.op == "load" and index_of_block(node) == "kv":  # of a token, whatever its sequence
            return {"kv"}
        # A key has its position, and a row its sequence.
        return {"q", *reads} if {"b", "kv"} & node.reads() else reads

    def _struct(self, name: str, of: str, owner: str, positions: tuple[str, ...]) -> list[str]:
        lines = [f"    {'int64_t' if position == 'column' else 'int'} {position};" for position in positions]
        lines += [
            f"    {self._type(node)} {member};  // {text(node)}"
            for node, member in self._members[owner].items()
        ]
        if owner in ("head", "row"):
            lines += [
                f"    const {'uint8_t' if node.type == 'bool' else 'int32_t'}* {name};  // of {text(node)}"
                for node, name in self._rows.items()
            ]
        return ["\n".join((f"// What the mask needs of {of}.", f"struct {name} {{", *lines, "};"))]

    def _makers(self, kind: str, owner: str, types: dict[str, str]) -> tuple[str, str]:
        """The function that makes a struct, and the one for a row or a key that exists."""
        clamped = self._maker(kind, owner, types)
        self._inside = True
        of_step = {"head": types["head"], "first": "int", "step": "int"}
        inside = self._maker(kind, owner, of_step, "_inside")
        self._inside = False
        return clamped, inside

    def _maker(self, kind: str, owner: str, types: dict[str, str], suffix: str = "") -> str:
        if owner == "head":
            values = [f"head.{name} = {name};" for name in ("b", "h", *_LENGTHS)]
        elif owner == "row":
            query = "first + step" if self._inside else "query"
            values = [f"row.query = {query};", f"row.q = {query} + head.seqlen_kv - head.seqlen_q;"]
            if self._rule.pack is not None:
                values[1:] = [line.replace("query", "row.query") for line in _FROM_TABLE]
        else:
            values = [f"key.kv = {'first + step' if self._inside else 'kv'};"]
            if self._rows:
                column = "int64_t(first) + step" if self._inside else "min(kv, head.seqlen_kv - 1)"
                values.append(f"key.column = {column};")
        # A value may read another member: the smaller tree has its value first.
        members = sorted(self._members[owner].items(), key=lambda item: len(list(item[0].walk())))
        for node, member in members:
            value = self._element_of_step(node) if self._inside and node.op == "load" else ""
            values.append(f"{owner}.{member} = {value or bare(self._value(node))};")
        for node, name in self._rows.items() if owner in ("head", "row") else ():
            base, *steps, of_query, _ = self._steps(node, self._names)
            address = " + ".join((base, *steps)) if owner == "head" else f"head.{name} + {of_query}"
            values.append(f"{owner}.{name} = {address};")
        body = [f"{kind} {owner};", *values, f"return {owner};"]
        return function(f"{kind} line_{owner}{suffix}", {"params": "const Params&"} | types, body)

    def _visible(self) -> str:
        types = {"params": "const Params&", "head": "const LineHead&"}
        types |= {"row": "const LineRow&", "key": "const LineKey&"}
        condition = self.code(self._rule.tree)
        if self._rule.pack is not None:
            condition = f"row.first_key <= key.kv && key.kv < row.end_key && {condition}"
        result = function("bool visible", types, [f"return {bare(condition)};"])
        return f"// Whether a row sees a key.\n{result}"

    def key_range(self) -> str:
        """The function of the range of a row, "" where there is none."""
        of_row = key_range(self._rule.tree)
        if of_row is None:
            return ""
        return f"// The keys that a row sees.\n{self._range_function('line_range', of_row)}"

    def range_number(self, number: int) -> str:
        """The function of one of the ranges that a row sees."""
        keys = row_keys(self._rule)
        assert keys is not None
        of_runs = {"runs": "const LineRuns&"} if keys.runs else {}
        return self._range_function(f"line_range_{number}", keys.ranges[number], of_runs)

    def _range_function(self, name: str, of_row: KeyRange, of_runs: Mapping[str, str] | None = None) -> str:
        length, shift, defaults = "head.seqlen_kv", "", ("0", "head.seqlen_kv")
        if self._rule.pack is not None:
            length, shift = "row.end_key - row.first_key", "row.first_key + "
            defaults = "row.first_key", "row.end_key"
        sides = (
            f"{shift}int(min(max({bare(self._as('int64_t', side))}, int64_t(0)), int64_t({length})))"
            if side is not None
            else default
            for side, default in zip(of_row, defaults, strict=True)
        )
        types = {"params": "const Params&", "head": "const LineHead&", "row": "const LineRow&"}
        body = [f"const int {which} = {side};" for which, side in zip(of_row._fields, sides, strict=True)]
        return function(f"KeyRange {name}", types | dict(of_runs or {}), [*body, "return {begin, end};"])

    def code(self, node: Node) -> str:
        """A value, as an operand of another."""
        for owner, names in self._members.items():
            if node in names:
                return f"{owner}.{names[node]}"
        return self._value(node)

    def _value(self, node: Node) -> str:
        if node.op == "number":
            return str(node.value) if node.value >= 0 else f"({node.value})"
        if node.op == "name":
            return self._names.get(str(node.value), f"params.{PREFIX}{node.value}")
        if node in self._rows:
            return _loaded(node, f"row.{self._rows[node]} + key.column")
        if node.op == "load":
            return self.element(node)
        if node.op in ("and", "or"):
            return f"({f' {_SIGNS[node.op]} '.join(map(self.code, node.args))})"
        if node.op == "not":
            return f"!{self.code(node.args[0])}"
        if node.type == "bool":
            return f"({self.code(node.args[0])} {node.op} {self.code(node.args[1])})"
        kind = self._type(node)
        if node.op == "where":
            condition, *choices = node.args
            one, other = (self._as(kind, arg) for arg in choices)
            return f"({self.code(condition)} ? {one} : {other})"
        args = [self._as(kind, arg) for arg in node.args]
        if node.op in ("//", "%", "min", "max", "abs"):
            wide = "int64_t" in (kind, *map(self._type, node.args))
            kind = "int64_t" if wide else "int"
            return f"{CALLS[node.op]}<{kind}>({', '.join(map(bare, args))})"
        return f"(-{args[0]})" if node.op == "neg" else f"({args[0]} {node.op} {args[1]})"

    def _type(self, node: Node) -> str:
        if node.op in ("name", "load"):
            return node.type
        if node.op in ("min", "max", "where", "//", "%"):  # no larger than their operands
            numbers = node.args[1:] if node.op == "where" else node.args
            return "int64_t" if "int64_t" in map(self._type, numbers) else "int"
        return "int64_t" if self._intervals.magnitude(node) > _LARGEST_INT else "int"

    def _as(self, kind: str, node: Node) -> str:
        """A number, as an operand of an operation of this type."""
        code = self.code(node)
        return code if kind == "int" or self._type(node) == kind else f"int64_t({bare(code)})"

    def element(self, node: Node, names: Mapping[str, str] | None = None) -> str:
        """An element of an array; ``names`` has other words for positions."""
        return _loaded(node, self.address(node, names))

    def address(self, node: Node, names: Mapping[str, str] | None = None) -> str:
        """Where an element is; arguments as `element`."""
        words = {**self._names, **(names or {})}
        if self._rule.pack is not None:
            return self._address_in_pack(node, words)
        return " + ".join(self._steps(node, words))

    def _steps(self, node: Node, words: Mapping[str, str]) -> list[str]:
        """The array, and what each index adds to its address."""
        array, indices = self._arrays[str(node.value)], []
        for dimension, symbol, index in zip(array.dimensions, array.symbols, node.args, strict=True):
            if dimension in ("b", "h"):
                indices.append(words[dimension])
            elif dimension == "q":
                at = words["query"] if self._inside else f"min({words['query']}, head.seqlen_q - 1)"
                indices.append(_shifted(at, array, "first_query"))
            elif dimension == "kv":
                indices.append(_shifted(f"min({words['kv']}, head.seqlen_kv - 1)", array, "first_key"))
            else:
                size = "head.seqlen_kv" if dimension == "token" else f"params.{symbol}"
                at = self._index(index, words)
                clamped = f"min(max({at}, 0), {size} - 1)"
                indices.append(_shifted(clamped, array, "first_key") if dimension == "token" else clamped)
        return _steps(array, indices)

    def _element_of_step(self, node: Node) -> str:
        """An element at a position ``first`` + ``step`` of queries or keys that exists; "" where the index is
        none.
        """
        array = self._arrays[str(node.value)]
        moving = [place for place, index in enumerate(node.args) if {"q", "kv"} & index.reads()]
        if len(moving) != 1 or index_of_block(node) not in ("q", "kv"):
            return ""
        (place,), by_key = moving, index_of_block(node) == "kv"
        dimension, packed = array.dimensions[place], self._rule.pack is not None
        if dimension not in ("q", "kv", TOKEN) or array.dimensions.count(TOKEN) > 1:
            return ""
        if packed and dimension == TOKEN and not by_key:
            return ""  # a row's token depends on its sequence
        counts_tokens = dimension == "q" or by_key or packed
        first = "first" if counts_tokens else "first + head.seqlen_kv - head.seqlen_q"
        indices = []
        for other, (name, index) in enumerate(zip(array.dimensions, node.args, strict=True)):
            if other == place:
                at = f"({first})"
                of_tokens = "first_query" if name == "q" else "first_key"
                indices.append(at if packed else _shifted(at, array, of_tokens))
            elif packed and name == "b":
                indices.append("")
            elif name in ("b", "h"):
                indices.append(self._names[name])
            else:
                at = self._index(index, self._names)
                indices.append(f"min(max({at}, 0), params.{array.symbols[other]} - 1)")
        strides = array.argument().stride_names()
        # A pack has b and the tokens in one dimension.
        step = "step" if place == len(array.dimensions) - 1 else f"step * params.{strides[place]}"
        return _loaded(node, " + ".join((*_steps(array, indices), step)))

    def _address_in_pack(self, node: Node, words: Mapping[str, str]) -> str:
        """`address` of packed sequences: an array with an element for each token has all tokens of a pack."""
        array = self._arrays[str(node.value)]
        indices = []
        for dimension, symbol, index in zip(array.dimensions, array.symbols, node.args, strict=True):
            if dimension == "b":
                indices.append("")
            elif dimension == "h":
                indices.append("head.h")
            elif dimension == "q":
                indices.append(f"min({words['query']}, head.seqlen_q - 1)")
            elif dimension == "kv" or (dimension == "token" and index_of_block(node) == "kv"):
                indices.append(f"min({words['token']}, head.seqlen_kv - 1)")
            elif dimension == "token":
                row, at = words["row"], self._index(index, words)
                # A sequence without keys may begin past the last token.
                of_pack = f"{row}.first_key + max(min({at}, {row}.end_key - {row}.first_key - 1), 0)"
                indices.append(f"min({of_pack}, head.seqlen_kv - 1)")
            else:
                indices.append(f"min(max({self._index(index, words)}, 0), params.{symbol} - 1)")
        return " + ".join(_steps(array, indices))

    def _index(self, node: Node, words: Mapping[str, str]) -> str:
        """An index of a dimension of the array, an int: one that is larger is past an end as well."""
        if node.op == "name" and node.value in words:
            return words[str(node.value)]
        code = bare(self.code(node))
        if self._type(node) == "int":
            return code
        return f"int(min(max({code}, int64_t(-1)), int64_t({_LARGEST_INT})))"


# Lengths of a sequence, and its first tokens.
_LENGTHS = ("seqlen_q", "seqlen_kv", "first_query", "first_key")
_ROW, _ROW_IN_PACK, _KEY = ("query", "q"), ("query", "q", "b", "first_key", "end_key"), ("kv",)
_MEMBERS = ("h", *_ROW_IN_PACK, "kv", "column", *_LENGTHS)
_FROM_TABLE = (
    "const uint4 of_row = load_global_128(params.line_rows + 4 * int64_t(min(query, head.seqlen_q - 1)));",
    "row.first_key = int(of_row.x);",
    "row.end_key = int(of_row.y);",
    "row.q = int(of_row.z);",
    "row.b = int(of_row.w);",
)
_NAMES = {"b": "head.b", "h": "head.h", "query": "row.query", "q": "row.q", "kv": "key.kv"}
_NAMES_IN_PACK = _NAMES | {
    "b": "row.b",
    "kv": "(key.kv - row.first_key)",
    "token": "key.kv",
    "row": "row",
}


def _loaded(node: Node, address: str) -> str:
    """The element of an array at an address."""
    return f"(load_global_8({address}) != 0)" if node.type == "bool" else f"int(load_global_32({address}))"


def _steps(array: RuleParam, indices: list[str]) -> list[str]:
    """The array, and what each index adds to the address of an element; one that is "" adds nothing."""
    strides = array.argument().stride_names()
    pairs = zip(indices, strides, strict=False)
    terms = [f"{index} * params.{stride}" for index, stride in pairs if index]
    return [f"params.{array.argument_name}", *terms, indices[-1]]


def _shifted(index: str, array: RuleParam, first: str) -> str:
    """An index of tokens, where these are packed after the tokens of other sequences."""
    return f"(head.{first} + {index})" if array.per_token is not None else index
