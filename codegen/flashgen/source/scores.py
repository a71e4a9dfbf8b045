"""The CUDA of a score modification: what the keys of a row share, and the function of one score.

    struct ScoreHead;  ScoreHead score_head(params, b, h);
    struct ScoreRow;   ScoreRow score_row(params, head, query);
    float modified_score(params, row, first_key, step, product);
    float score_offset(params, row, first_key);

Kernels that differentiate have, unless the derivative is 1, instead of ``modified_score``

    struct ModifiedScore { float score, derivative; };
    ModifiedScore differentiated_score(params, row, first_key, step, product);

Elements of arrays that do not depend on the key are members of the two structs, which are made before a
block's scores. So are rows of arrays whose last dimension is the key: a pointer, to which a score adds its
key. A kernel that stages an array has that array's element as a last argument, `element`. ``step`` is a
compile-time constant: an integer that grows with the key is taken at ``first_key``, where it is the same for
all of a lane's keys, and the step is added as a float.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashgen.operators.formula import Node, number, text
from flashgen.operators.lowering import key_slope
from flashgen.operators.scores import TYPES
from flashgen.source.cppcode import arguments, bare, fresh_name, used, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flashgen.operators.lowering import Lowered
    from flashgen.operators.scores import Score, ScoreParam

_CALLS = {
    "exp2": "exp2_approx",
    "log2": "log2_approx",
    "rcp": "rcp_approx",
    "tanh": "tanh_approx",
    "abs": "fabsf",
    "min": "fminf",
    "max": "fmaxf",
    "fma": "fmaf",
}
# A value that one score needs twice has a name if it is larger than this.
_LONG = 16
_SLOW = ("exp2", "log2", "rcp", "tanh")
# Names of such values, where the operation is no name in C++.
_WORDS = {
    "+": "sum",
    "-": "difference",
    "*": "product",
    "where": "choice",
    "neg": "negative",
    "float": "real",
}
_INT_CALLS = {"abs": "abs", "min": "min", "max": "max"}
_SIGNS = {"and": "&&", "or": "||"}
# How an element of an array is loaded, by its type in C.
_LOADS = {
    "float": "__uint_as_float(load_global_32({}))",
    "int32_t": "int(load_global_32({}))",
    "fp16": "unpack<fp16>(load_global_16({})).x",
    "bf16": "__uint_as_float(load_global_16({}) << 16)",
}


def score_functions(score: Score, dtype: str, differentiated: bool = False, staged: str | None = None) -> str:
    """The structs and the functions as C++, for a kernel of elements of ``dtype`` that computes the
    derivative as well if ``differentiated``, and stages the array ``staged``, if any. No final newline. Needs
    ``Params`` in scope.
    """
    return _Writer(score, score.lowered(dtype, differentiated), differentiated, staged).functions()


def loads_by_key(score: Score, dtype: str, differentiated: bool = False, staged: str | None = None) -> bool:
    """Whether the functions load elements of rows by key, so that a row has the member ``whole``: where it is
    true, keys are not clamped. The other arguments as for `score_functions`.
    """
    return _Writer(score, score.lowered(dtype, differentiated), differentiated, staged).loads_by_key


class _Writer:
    def __init__(
        self, score: Score, lowered: Lowered, differentiated: bool, staged: str | None = None
    ) -> None:
        self._score, self._lowered, self._differentiated = score, lowered, differentiated
        self._body, self._offset = lowered.body, lowered.offset
        self._arrays = {param.name: param for param in score.arrays}
        self._scalars = {param.name for param in score.scalars} | {"softmax_scale", *self._lowered.constants}
        trees = list(lowered.trees)
        nodes = [node for tree in trees for node in tree.walk()]
        self._loads = list(dict.fromkeys(node for node in nodes if node.op == "load"))
        # The members of the two structs, by the elements that they hold.
        self._of_head = self._members(lambda node: not _read_by(node.args) & {"q", "kv"})
        self._of_row = self._members(lambda node: _read_by(node.args) & {"q", "kv"} == {"q"})
        # Rows of arrays, by the elements of them that scores read.
        self._rows = self._members(self._is_in_row)
        kept = {**self._of_head, **self._of_row, **self._rows}
        self._kept = {node: f"row.head.{name}" for node, name in self._of_head.items()}
        self._kept |= {node: f"row.{name}" for node, name in self._of_row.items()}
        self._names = self._names_read(trees, set(kept))
        self._staged = next((node for node in self._rows if node.value == staged), None)
        self._of_score = {**_OF_SCORE, **({"element": "float"} if self._staged else {})}
        # What has a name in the function of one score, by that name.
        self._named: dict[Node, str] = {}

    @property
    def loads_by_key(self) -> bool:
        return bool(self._rows.keys() - {self._staged})

    def functions(self) -> str:
        """The text of all structs and functions."""
        about = [f"// The score modification `{self._score.name}`: {self._score.text}", ""]
        modify = self._modify() if self._lowered.derivative is None else self._differentiate()
        parts = [self._head(), self._row(), modify]
        if self._offset is not None:
            parts.append(self._offset_function())
        return "\n".join([*about, "\n\n".join("\n".join(part) for part in parts)])

    def _is_in_row(self, node: Node) -> bool:
        """Whether the element is in a row of its array whose address does not depend on the key."""
        by_key = self._arrays[str(node.value)].dimensions[-1] == "kv"
        return by_key and "kv" not in _read_by(node.args[:-1])

    def _members(self, suits: Callable[[Node], bool]) -> dict[Node, str]:
        members: dict[Node, str] = {}
        for node in self._loads:
            if suits(node):
                members[node] = fresh_name(str(node.value), [*_MEMBERS, *members.values()])
        return members

    def _names_read(self, trees: list[Node], kept: set[Node]) -> set[str]:
        """Positions that the functions of scores read; ``query`` is the index that q is in an array."""
        positions: set[str] = set()
        seen: set[tuple[Node, bool]] = set()

        def visit(node: Node, is_index: bool = False) -> None:
            if (node, is_index) in seen:
                return
            seen.add((node, is_index))
            if node in kept:  # score_row() needs the head of its elements
                positions.update(() if node in self._of_head else {"b", "h"} & node.reads())
                return
            if node.op == "name":
                positions.add("query" if is_index and node.value == "q" else str(node.value))
            for index, arg in enumerate(node.args):
                is_query = node.op == "load" and self._arrays[str(node.value)].dimensions[index] == "q"
                visit(arg, is_query)

        for tree in trees:
            visit(tree)
        return positions

    def _head(self) -> list[str]:
        members = [
            (f"int {name};", what)
            for name, what in (("h", "query head"), ("b", "batch entry"))
            if name in self._names
        ]
        members += [(f"{node.type} {name};", text(node)) for node, name in self._of_head.items()]
        reads = {name for node in self._of_head for index in node.args for name in index.reads()}
        uses = {
            "params": bool(self._of_head),
            "b": "b" in reads | self._names,
            "h": "h" in reads | self._names,
        }
        values = [f"head.{name} = {name};" for name in ("h", "b") if name in self._names]
        values += [
            f"head.{name} = {self._load(node, {'b': 'b', 'h': 'h'}, '')};"
            for node, name in self._of_head.items()
        ]
        types = {"params": "const Params&", "b": "int", "h": "int"}
        return _struct("ScoreHead", "all rows of a query head", members) + _maker(
            "ScoreHead", "score_head", "head", types, uses, values
        )

    def _row(self) -> list[str]:
        members = [("ScoreHead head;", "")]
        values = ["row.head = head;"]
        if "query" in self._names:
            members.append(("int query;", "index of the query"))
            values.append("row.query = query;")
        if "q" in self._names:
            members.append(("int q;", "its position: the last query stands at the last key"))
            values.append("row.q = query + params.seqlen_kv - params.seqlen_q;")
        names = {"b": "head.b", "h": "head.h", "q": "(query + params.seqlen_kv - params.seqlen_q)"}
        for node, name in self._of_row.items():
            members.append((f"{node.type} {name};", text(node)))
            values.append(f"row.{name} = {self._load(node, names, 'query')};")
        if self.loads_by_key:
            members.append(("bool whole = false;", "all keys of the block exist"))
        for node, name in self._rows.items():
            array = self._arrays[str(node.value)]
            shown = text(Node("load", (*node.args[:-1], number(0)), node.value))
            members.append((f"const {TYPES[array.type].ctype}* {name};", f"the row from {shown} on"))
            *indices, _ = self._indices(node, names | {"kv": "0"}, "query")
            values.append(f"row.{name} = {_address(array, indices)};")
        uses = {
            "params": "q" in self._names or bool(self._of_row or self._rows),
            "head": True,
            "query": len(values) > 1,
        }
        types = {"params": "const Params&", "head": "const ScoreHead&", "query": "int"}
        return _struct("ScoreRow", "all keys of a row", members) + _maker(
            "ScoreRow", "score_row", "row", types, uses, values
        )

    def _modify(self) -> list[str]:
        """The function of one score."""
        result = bare(self._code(self._body))
        head = arguments(self._of_score, used(self._of_score, result))
        opening = wrapped("float modified_score", head)
        return [*self._about_score("The modified score"), *opening, f"    return {result};", "}"]

    def _about_score(self, what: str) -> list[str]:
        about = [f"// {what} of key first_key + step, from q . k before any scale."]
        if self._lowered.factor != number(1.0):
            about.append("// The exponent of P is this score times scale_log2, less row_max or the LSE.")
        if self._offset is not None:
            about.append("// What is the same for all of a row's keys in a block is left to score_offset().")
        return about

    def _differentiate(self) -> list[str]:
        """The function of one score and its derivative; what both read or call has a name."""
        lines = []
        for node in self._shared():
            name = f"{node.value if node.op == 'load' else _WORDS.get(node.op, node.op)}_{len(self._named)}"
            lines.append(f"    const {node.type} {name} = {bare(self._code(node))};")
            self._named[node] = name
        lines += [
            "    ModifiedScore modified;",
            f"    modified.score = {bare(self._code(self._body))};",
            f"    modified.derivative = {bare(self._code(self._lowered.derivative))};",
            "    return modified;",
        ]
        self._named = {}
        head = arguments(self._of_score, used(self._of_score, "\n".join(lines)))
        return [
            "struct ModifiedScore {",
            "    float score;",
            "    float derivative;  // d(score) / d(softmax_scale q . k), with all factors of the score",
            "};",
            "",
            *self._about_score("The modified score and the derivative"),
            *wrapped("ModifiedScore differentiated_score", head),
            *lines,
            "}",
        ]

    def _shared(self) -> list[Node]:
        """What one score needs several times, inner ones first: loads, approximate functions, and whatever is
        long.
        """
        uses: dict[Node, int] = {}

        def count(node: Node) -> None:
            if node in self._kept:
                return
            again = node in uses
            if not again:
                for arg in node.args:
                    count(arg)
            if node.op == "load" or node.op in _SLOW or (node.type == "float" and node.size > _LONG):
                uses[node] = uses.get(node, 0) + 1

        for tree in (self._body, self._lowered.derivative):
            count(tree)
        return [node for node, times in uses.items() if times > 1]

    def _offset_function(self) -> list[str]:
        code = bare(self._code(self._offset, at_first_key=True))
        types = {"params": "const Params&", "row": "const ScoreRow&", "first_key": "int"}
        return [
            "// What is still to be added to the modified scores of a row.",
            *wrapped("float score_offset", arguments(types, used(types, code))),
            f"    return {code};",
            "}",
        ]

    def _code(self, node: Node, at_first_key: bool = False) -> str:
        """A value of one score; what has an operator outside of calls is in parentheses."""
        if node in self._kept or node in self._named:
            return self._kept.get(node) or self._named[node]
        if node.op == "number":
            return _literal(node.value)
        if node.op == "load":
            key = "first_key" if at_first_key else _KEY
            return self._load(
                node, {"q": "row.q", "h": "row.head.h", "b": "row.head.b", "kv": key}, "row.query"
            )
        if node.op == "name":
            return f"params.{node.value}" if node.value in self._scalars else "product"
        if node.op == "float":
            return self._converted(node.args[0], at_first_key)
        if node.type == "bool" and all(arg.type == "int" for arg in node.args):
            return _joined(node, [self._int(arg) for arg in node.args])
        args = [self._code(arg, at_first_key) for arg in node.args]
        if node.op in _CALLS:
            return f"{_CALLS[node.op]}({', '.join(map(bare, args))})"
        if node.op == "where":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        if node.op == "neg":
            return _negative(args[0])
        return f"!{args[0]}" if node.op == "not" else _joined(node, args)

    def _converted(self, node: Node, at_first_key: bool) -> str:
        """An integer as a float."""
        if node.op == "name" and node.value in self._scalars:
            return f"float(params.{node.value})"
        if node.op == "name" and node.value == "step":
            return f"float{_STEP}"
        slope = key_slope(node)
        if at_first_key or not slope:
            key = "first_key" if at_first_key or slope == 0 else _KEY
            return f"float({bare(self._int(node, key))})"
        base = f"float({bare(self._int(node, 'first_key'))})"
        if abs(slope) == 1:
            return f"({base} {'+' if slope > 0 else '-'} float{_STEP})"
        return f"({base} + {_literal(float(slope))} * float{_STEP})"

    def _int(self, node: Node, key: str = "") -> str:
        names = {"q": "row.q", "h": "row.head.h", "b": "row.head.b", "kv": key or _KEY}
        return self.integer(node, names, "row.query")

    def integer(self, node: Node, names: dict[str, str], query: str) -> str:
        if names.get("q") == "row.q" and (node in self._kept or node in self._named):
            return self._kept.get(node) or self._named[node]
        if node.op == "number":
            return str(node.value)
        if node.op == "name":
            return f"params.{node.value}" if node.value in self._scalars else names[str(node.value)]
        if node.op == "load":
            return self._load(node, names, query)
        args = [self.integer(arg, names, query) for arg in node.args]
        if node.type == "bool":
            return f"!{args[0]}" if node.op == "not" else _joined(node, args)
        if node.op in _INT_CALLS:
            return f"{_INT_CALLS[node.op]}({', '.join(map(bare, args))})"
        if node.op == "where":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        return _negative(args[0]) if node.op == "neg" else _joined(node, args)

    def _load(self, node: Node, names: dict[str, str], query: str) -> str:
        """An element of an array. Indices of its own dimensions, and keys past the last, are clamped."""
        array = self._arrays[str(node.value)]
        if node == self._staged and names.get("q") == "row.q":
            return "element"
        *indices, last = self._indices(node, names, query)
        if node in self._rows and names.get("q") == "row.q":
            at = f"row.{self._rows[node]}"
            return _element(array, f"row.whole ? {at} + first_key + step : {at} + {last}")
        return _element(array, f"{_address(array, indices)} + {last}")

    def _indices(self, node: Node, names: dict[str, str], query: str) -> list[str]:
        array = self._arrays[str(node.value)]
        positions = {"b": names["b"], "h": names["h"], "q": query}
        if "kv" in names:
            positions["kv"] = f"min({bare(names['kv'])}, params.seqlen_kv - 1)"
        return [
            positions[dimension]
            if dimension in positions
            else f"min(max({bare(self.integer(index, names, query))}, 0), params.{symbol} - 1)"
            for dimension, symbol, index in zip(array.dimensions, array.symbols, node.args, strict=True)
        ]


# The members that the structs may have beside elements of arrays.
_MEMBERS = ("h", "b", "head", "query", "q", "whole")
# The arguments of the function of one score.
_OF_SCORE = {
    "params": "const Params&",
    "row": "const ScoreRow&",
    "first_key": "int",
    "step": "int",
    "product": "float",
}
_STEP = "(step)"
_KEY = "(first_key + step)"


def _read_by(indices: Sequence[Node]) -> frozenset[str]:
    return frozenset().union(*(index.reads() for index in indices))


def _struct(name: str, of: str, members: list[tuple[str, str]]) -> list[str]:
    if not members:
        return [f"// What {of} share: nothing.", f"struct {name} {{}};", ""]
    width = max(len(member) for member, _ in members)
    lines = [f"    {member:<{width}}  // {what}" if what else f"    {member}" for member, what in members]
    return [f"// What {of} share.", f"struct {name} {{", *lines, "};", ""]


def _maker(
    type: str, name: str, variable: str, types: dict[str, str], uses: dict[str, bool], values: list[str]
) -> list[str]:
    opening = wrapped(f"{type} {name}", arguments(types, uses))
    if not values:
        return [*opening, "    return {};", "}"]
    return [
        *opening,
        f"    {type} {variable};",
        *(f"    {value}" for value in values),
        f"    return {variable};",
        "}",
    ]


def _negative(code: str) -> str:
    return f"-({code})" if code.startswith("-") else f"-{code}"


def _joined(node: Node, args: list[str]) -> str:
    return f"({f' {_SIGNS.get(node.op, node.op)} '.join(args)})"


def _address(array: ScoreParam, indices: list[str]) -> str:
    """Where the elements with these indices of all dimensions but the last begin."""
    strides = array.argument().stride_names()
    terms = [f"{index} * params.{stride}" for index, stride in zip(indices, strides, strict=False)]
    return " + ".join((f"params.{array.name}", *terms))


def _element(array: ScoreParam, address: str) -> str:
    return _LOADS[TYPES[array.type].ctype].format(address)


def _literal(value: float) -> str:
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    digits = f"{value:.9g}"
    return f"{digits}f" if any(c in digits for c in ".e") else f"{digits}.0f"


def integer(score: Score, node: Node) -> str:
    """An integer of a formula, of variables ``b``, ``h``, ``q``, ``kv`` and numbers of ``params``."""
    writer = _Writer(score, score.lowered("fp32"), differentiated=False)
    return bare(writer.integer(node, {name: name for name in ("b", "h", "q", "kv")}, "query"))
