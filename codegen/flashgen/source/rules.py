"""The CUDA of a mask by a line: whether a key is visible, and what a block of scores may have.

    struct LineHead;  LineHead line_head(params, b, h, seqlen_q, seqlen_kv, first_query, first_key);
    struct LineRow;   LineRow line_row(params, head, query);
    struct LineKey;   LineKey line_key(params, head, key);
    bool visible(params, head, row, key);

What depends on a row alone, or on a key alone, is a member of a struct, so that a kernel may keep it:
elements of arrays, quotients and remainders. Sequences have ``seqlen_q`` queries and ``seqlen_kv`` keys.
Where sequences are packed, ``first_query`` and ``first_key`` are their first tokens, else 0. Rows and keys
past the end read the last element of an array.

    struct LineRows;  struct LineKeys;                   // bounds of a block of rows, and of keys
    int line_rows_NAME(params, head, query);  int line_keys_NAME(params, head, key);
    BlockVerdict line_verdict(params, head, rows, keys)

``line_verdict`` is `intervals` as C++, in 64-bit integers. Needs ``Params`` in scope, with the members of
`params.rule_params`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.operators.formula import bounds, text
from flashgen.operators.intervals import Algebra, Interval, Intervals
from flashgen.operators.rules import PREFIX
from flashgen.operators.visibility import index_of_block
from flashgen.source.scores import arguments, bare, used, wrapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.formula import Node
    from flashgen.operators.rules import Rule, RuleParam

_SIGNS = {"and": "&&", "or": "||"}
_LARGEST_INT = 2**31 - 1
# The functions that a line may call, by the operation.
_HELPERS = {
    "//": """\
// The quotient, rounded down, for a divisor above 0.
template <typename Int>
__device__ __forceinline__ Int floor_divide(Int a, Int b) {
    return a / b - Int(a % b < 0);
}""",
    "%": """\
// The remainder of floor_divide().
template <typename Int>
__device__ __forceinline__ Int floor_remainder(Int a, Int b) {
    const Int remainder = a % b;
    return remainder < 0 ? remainder + b : remainder;
}""",
    "min": """\
template <typename Int>
__device__ __forceinline__ Int smaller_of(Int a, Int b) {
    return a < b ? a : b;
}""",
    "max": """\
template <typename Int>
__device__ __forceinline__ Int larger_of(Int a, Int b) {
    return a > b ? a : b;
}""",
    "abs": """\
template <typename Int>
__device__ __forceinline__ Int magnitude_of(Int a) {
    return a < 0 ? -a : a;
}""",
}
_CALLS = {
    "//": "floor_divide",
    "%": "floor_remainder",
    "min": "smaller_of",
    "max": "larger_of",
    "abs": "magnitude_of",
}
VERDICTS = """\
// What a block of scores has of a mask by a line.
enum BlockVerdict { kBlockEmpty = 0, kBlockPartial = 1, kBlockFull = 2 };
"""


class Span(NamedTuple):
    """An array whose least and largest elements a block of rows ("q") or keys ("kv") has: ``name`` is a part
    of the names of members and of the function of its elements.
    """

    position: str
    name: str
    node: Node


def rule_functions(rule: Rule) -> str:
    """``visible`` and what it needs. No final newline."""
    return _Writer(rule).functions()


def verdict_functions(rule: Rule) -> str:
    """``line_verdict`` and what it needs, after `rule_functions`. No final newline."""
    return _Verdicts(rule).functions()


def spans_of(rule: Rule) -> tuple[Span, ...]:
    """The arrays whose bounds blocks of rows and keys have."""
    loads = dict.fromkeys(node for node in rule.tree.walk() if node.op == "load")
    spans: list[Span] = []
    for node in loads:
        position = index_of_block(node)
        if position in ("q", "kv"):
            taken = [span.name for span in spans if span.position == position]
            spans.append(Span(position, _fresh(str(node.value), taken), node))
    return tuple(spans)


class _Writer:
    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._arrays = {param.name: param for param in rule.arrays}
        self._intervals = Intervals(bounds)
        self._members: dict[str, dict[Node, str]] = {"head": {}, "row": {}, "key": {}}
        self._assign(rule.tree)

    def functions(self) -> str:
        """All of it."""
        operations = {node.op for node in self._rule.tree.walk()}
        if "%" in operations:
            operations.add("//")  # of verdicts
        parts = [
            f"// The mask `{self._rule.name}`: a key is visible where {self._rule.text}",
            *(helper for op, helper in _HELPERS.items() if op in operations),
            *self._struct("LineHead", "a query head", "head", ("b", "h", *_LENGTHS)),
            self._maker("LineHead", "head", {"b": "int", "h": "int"} | dict.fromkeys(_LENGTHS, "int")),
            *self._struct("LineRow", "a row", "row", ("query", "q")),
            self._maker("LineRow", "row", {"head": "const LineHead&", "query": "int"}),
            *self._struct("LineKey", "a key", "key", ("kv",)),
            self._maker("LineKey", "key", {"head": "const LineHead&", "kv": "int"}),
            self._visible(),
        ]
        return "\n\n".join(parts)

    def _assign(self, node: Node) -> None:
        """Make members of what depends on a row alone or on a key alone and costs something."""
        if node.op in ("load", "//", "%"):
            reads = _positions(node)
            owner = "head" if not reads else "row" if reads == {"q"} else "key" if reads == {"kv"} else ""
            if owner:
                names = self._members[owner]
                word = {"//": "quotient", "%": "remainder"}.get(node.op, str(node.value))
                names.setdefault(node, _fresh(word, [*names.values(), *_MEMBERS]))
                return
        for arg in node.args:
            self._assign(arg)

    def _struct(self, name: str, of: str, owner: str, positions: tuple[str, ...]) -> list[str]:
        lines = [f"    int {position};" for position in positions]
        lines += [
            f"    {self._type(node)} {member};  // {text(node)}"
            for node, member in self._members[owner].items()
        ]
        return ["\n".join((f"// What the mask needs of {of}.", f"struct {name} {{", *lines, "};"))]

    def _maker(self, kind: str, owner: str, types: dict[str, str]) -> str:
        if owner == "head":
            values = [f"head.{name} = {name};" for name in ("b", "h", *_LENGTHS)]
        elif owner == "row":
            values = ["row.query = query;", "row.q = query + head.seqlen_kv - head.seqlen_q;"]
        else:
            values = ["key.kv = kv;"]
        for node, member in self._members[owner].items():
            values.append(f"{owner}.{member} = {bare(self._value(node))};")
        body = [f"{kind} {owner};", *values, f"return {owner};"]
        return _function(f"{kind} line_{owner}", {"params": "const Params&"} | types, body)

    def _visible(self) -> str:
        types = {"params": "const Params&", "head": "const LineHead&"}
        types |= {"row": "const LineRow&", "key": "const LineKey&"}
        result = _function("bool visible", types, [f"return {bare(self.code(self._rule.tree))};"])
        return f"// Whether a row sees a key.\n{result}"

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
            return _NAMES.get(str(node.value), f"params.{PREFIX}{node.value}")
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
            return f"{_CALLS[node.op]}<{kind}>({', '.join(map(bare, args))})"
        return f"(-{args[0]})" if node.op == "neg" else f"({args[0]} {node.op} {args[1]})"

    def _type(self, node: Node) -> str:
        if node.op in ("name", "load"):
            return "int"
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
        array = self._arrays[str(node.value)]
        words = _NAMES | dict(names or {})
        indices = []
        for dimension, symbol, index in zip(array.dimensions, array.symbols, node.args, strict=True):
            if dimension in ("b", "h"):
                indices.append(words[dimension])
            elif dimension == "q":
                indices.append(_shifted(f"min({words['query']}, head.seqlen_q - 1)", array, "first_query"))
            elif dimension == "kv":
                indices.append(_shifted(f"min({words['kv']}, head.seqlen_kv - 1)", array, "first_key"))
            else:
                size = "head.seqlen_kv" if dimension == "token" else f"params.{symbol}"
                at = self._index(index, words)
                clamped = f"min(max({at}, 0), {size} - 1)"
                indices.append(_shifted(clamped, array, "first_key") if dimension == "token" else clamped)
        strides = array.argument().stride_names()
        terms = [f"{index} * params.{stride}" for index, stride in zip(indices, strides, strict=False)]
        address = " + ".join((f"params.{PREFIX}{array.name}", *terms, indices[-1]))
        return f"int(load_global_32({address}))"

    def _index(self, node: Node, words: Mapping[str, str]) -> str:
        """An index of a dimension of the array, an int: one that is larger is past an end as well."""
        if node.op == "name" and node.value in words:
            return words[str(node.value)]
        code = bare(self.code(node))
        if self._type(node) == "int":
            return code
        return f"int(min(max({code}, int64_t(-1)), int64_t({_LARGEST_INT})))"


class _Code(Algebra):
    """Bounds that are C++: a number of Python, or the name of a variable of ``lines``."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[str, str] = {}

    def _put(self, kind: str, code: str) -> str:
        line = f"{kind} {code}"
        if line not in self._names:
            name = f"{'is' if kind == 'bool' else 'bound'}_{len(self._names)}"
            self.lines.append(f"const {kind} {name} = {code};")
            self._names[line] = name
        return self._names[line]

    def _of(self, a: Any, b: Any, python: Any, kind: str, code: str) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return python(a, b)
        return self._put(kind, code.format(a=_literal(a), b=_literal(b)))

    def add(self, a: Any, b: Any) -> Any:
        return b if a == 0 else a if b == 0 else self._of(a, b, super().add, "int64_t", "{a} + {b}")

    def subtract(self, a: Any, b: Any) -> Any:
        return a if b == 0 else self._of(a, b, super().subtract, "int64_t", "{a} - {b}")

    def multiply(self, a: Any, b: Any) -> Any:
        return self._of(a, b, super().multiply, "int64_t", "{a} * {b}")

    def divide(self, a: Any, b: Any) -> Any:
        return self._of(a, b, super().divide, "int64_t", "floor_divide<int64_t>({a}, {b})")

    def minimum(self, a: Any, b: Any) -> Any:
        return self._of(a, b, super().minimum, "int64_t", "{a} < {b} ? {a} : {b}")

    def maximum(self, a: Any, b: Any) -> Any:
        return self._of(a, b, super().maximum, "int64_t", "{a} > {b} ? {a} : {b}")

    def is_below(self, a: Any, b: Any) -> Any:
        return self._of(a, b, super().is_below, "bool", "{a} < {b}")

    def is_equal(self, a: Any, b: Any) -> Any:
        return self._of(a, b, super().is_equal, "bool", "{a} == {b}")

    def both(self, a: Any, b: Any) -> Any:
        return self._joined(a, b, "&&", neutral=True)

    def either(self, a: Any, b: Any) -> Any:
        return self._joined(a, b, "||", neutral=False)

    def _joined(self, a: Any, b: Any, sign: str, neutral: bool) -> Any:
        for one, other in ((a, b), (b, a)):
            if isinstance(one, bool):
                return other if one == neutral else one
        return self._put("bool", f"{a} {sign} {b}")

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, bool):
            return a if condition else b
        return self._put("int64_t", f"{condition} ? {_literal(a)} : {_literal(b)}")


class _Verdicts:
    def __init__(self, rule: Rule) -> None:
        self._rule, self._spans = rule, spans_of(rule)
        self._writer = _Writer(rule)

    def functions(self) -> str:
        parts = [VERDICTS.rstrip()]
        for position, kind in (("q", "LineRows"), ("kv", "LineKeys")):
            spans = [span for span in self._spans if span.position == position]
            parts.append(self._struct(position, kind, spans))
            parts += [self._elements(span) for span in spans]
        return "\n\n".join((*parts, self._verdict()))

    def _struct(self, position: str, kind: str, spans: list[Span]) -> str:
        what = "rows" if position == "q" else "keys"
        members = [f"    int {position}_low, {position}_high;  // their positions"]
        members += [
            f"    int {span.name}_low, {span.name}_high;  // the bounds of {text(span.node)}"
            for span in spans
        ]
        lines = (f"// What a block of {what} has, both ends included.", f"struct {kind} {{", *members, "};")
        return "\n".join(lines)

    def _elements(self, span: Span) -> str:
        what, argument = ("rows", "query") if span.position == "q" else ("keys", "kv")
        names = {"kv": "kv", "query": "query", "q": "(query + head.seqlen_kv - head.seqlen_q)"}
        types = {"params": "const Params&", "head": "const LineHead&", argument: "int"}
        body = [f"return {self._writer.element(span.node, names)};"]
        function = _function(f"int line_{what}_{span.name}", types, body)
        return f"// {text(span.node)} of a {what[:-1]}.\n{function}"

    def _verdict(self) -> str:
        code = _Code()
        of_blocks = {
            span.node: (("rows" if span.position == "q" else "keys"), span.name) for span in self._spans
        }

        def leaf(node: Node) -> Interval:
            if node in of_blocks:
                block, name = of_blocks[node]
                return _widened(code, f"{block}.{name}_low", f"{block}.{name}_high")
            if node.op == "load":
                if index_of_block(node):
                    return bounds(node)
                one = code.add(_wide(code, self._writer.code(node)), 0)
                return Interval(one, one)
            if node.value in ("q", "kv"):
                block = "rows" if node.value == "q" else "keys"
                return _widened(code, f"{block}.{node.value}_low", f"{block}.{node.value}_high")
            one = _wide(code, self._writer.code(node))
            return Interval(one, one)

        truth = Intervals(leaf, code).truth(self._rule.tree)
        true, false = (_condition(x) for x in truth)
        types = {"params": "const Params&", "head": "const LineHead&"}
        types |= {"rows": "const LineRows&", "keys": "const LineKeys&"}
        result = f"return !{true} ? kBlockEmpty : {false} ? kBlockPartial : kBlockFull;"
        function = _function("BlockVerdict line_verdict", types, [*code.lines, result])
        return f"// What a block of scores may have: empty and full are certain.\n{function}"


# Lengths of a sequence, and its first tokens.
_LENGTHS = ("seqlen_q", "seqlen_kv", "first_query", "first_key")
_MEMBERS = ("b", "h", "query", "q", "kv", *_LENGTHS)
_NAMES = {"b": "head.b", "h": "head.h", "query": "row.query", "q": "row.q", "kv": "key.kv"}


def _function(name: str, types: dict[str, str], body: list[str]) -> str:
    """A function; arguments that it does not read have no name."""
    opening = wrapped(name, arguments(types, used(types, "\n".join(body))))
    return "\n".join((*opening, *(f"    {line}" for line in body), "}"))


def _wide(code: _Code, value: str) -> Any:
    return int(value) if value.lstrip("-").isdigit() else code._put("int64_t", value)


def _widened(code: _Code, low: str, high: str) -> Interval:
    return Interval(code._put("int64_t", low), code._put("int64_t", high))


def _positions(node: Node) -> set[str]:
    return {"q", "kv"} & node.reads()


def _shifted(index: str, array: RuleParam, first: str) -> str:
    """An index of tokens, where these are packed after the tokens of other sequences."""
    return f"(head.{first} + {index})" if array.per_token is not None else index


def _fresh(name: str, taken: list[str]) -> str:
    count, fresh = 1, name
    while fresh in taken:
        count += 1
        fresh = f"{name}_{count}"
    return fresh


def _literal(x: Any) -> str:
    """A bound in C++."""
    return x if isinstance(x, str) else f"int64_t({x})"


def _condition(x: Any) -> str:
    return x if isinstance(x, str) else str(bool(x)).lower()
