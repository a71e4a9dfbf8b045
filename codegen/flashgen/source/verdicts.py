"""The CUDA of verdicts: whether a mask by a line hides all, some or none of a block of scores.

    struct LineRows;  struct LineKeys;                   // bounds of a block of rows, and of keys
    int line_rows_NAME(params, head, query);  int line_keys_NAME(params, head, key);
    BlockVerdict line_verdict(params, head, rows, keys)

Of an array that the line reads by query and key, a[q, kv], a block of scores has bounds:

    struct LineBlock;  int line_block_NAME(params, head, query, key);
    const uint8_t* line_block_NAME_address(params, head, query, key);    // of bools by q and kv
    BlockVerdict line_verdict(params, head, rows, keys, block)

``line_verdict`` is `intervals` as C++, in 64-bit integers. It needs what `rules` writes. Of a rule with a
``pack``, ``rows`` and ``keys`` are of one sequence, ``rows.b``. Without bounds of blocks of scores, a[q, kv]
may be any element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.operators.formula import bounds, text
from flashgen.operators.intervals import Interval, Intervals
from flashgen.operators.rules import index_of_block, loads_by
from flashgen.source.boundscode import BoundsCode, condition
from flashgen.source.cppcode import bare, fresh_name, function
from flashgen.source.rules import RuleWriter

if TYPE_CHECKING:
    from flashgen.operators.formula import Node
    from flashgen.operators.rules import Rule

_VERDICTS = """\
// Whether a mask by a line hides all, some or none of a block of scores.
enum BlockVerdict { kBlockEmpty = 0, kBlockPartial = 1, kBlockFull = 2 };"""
# By the position of a span: the word in names, and the arguments of functions of elements.
_OF_SPANS = {"q": ("rows", "query"), "kv": ("keys", "kv"), "block": ("block", "query", "kv")}
_OF_ONE = {"q": "row", "kv": "key", "block": "score"}
# Of a block of one sequence.
_NAMES_OF_BLOCK = {"b": "rows.b", "h": "head.h"}


class Span(NamedTuple):
    """An array whose least and largest elements a block of rows ("q"), keys ("kv") or scores ("block") has:
    ``name`` is a part of the names of members and of the function of its elements. ``row_stride`` is the
    parameter with the stride of queries where rows of bools may be read many elements at once, else "".
    """

    position: str
    name: str
    node: Node
    row_stride: str = ""

    @property
    def text(self) -> str:
        """The element in the line."""
        return text(self.node)


def verdict_functions(rule: Rule, of_scores: bool = True) -> str:
    """``line_verdict`` and what it needs, after `rule_functions`; ``of_scores`` is whether blocks of scores
    have bounds. No final newline.
    """
    return _Verdicts(rule, of_scores).functions()


def spans_of(rule: Rule, of_scores: bool = True) -> tuple[Span, ...]:
    """The arrays whose bounds blocks of rows, of keys and, with ``of_scores``, of scores have."""
    spans: list[Span] = []
    arrays = {param.name: param for param in rule.arrays}
    for position in ("q", "kv", "block") if of_scores else ("q", "kv"):
        names: list[str] = []
        for node in loads_by(rule, position):
            names.append(fresh_name(str(node.value), names))
            array, stride = arrays[str(node.value)], ""
            if array.is_bool and array.dimensions[-2:] == ("q", "kv"):
                stride = array.argument().stride_names()[-1]
            spans.append(Span(position, names[-1], node, stride))
    return tuple(spans)


class _Verdicts:
    def __init__(self, rule: Rule, of_scores: bool) -> None:
        self._rule, self._spans = rule, spans_of(rule, of_scores)
        self._writer = RuleWriter(rule, None if rule.pack is None else _NAMES_OF_BLOCK)

    def functions(self) -> str:
        parts = [_VERDICTS]
        for position, kind in (("q", "LineRows"), ("kv", "LineKeys")):
            spans = [span for span in self._spans if span.position == position]
            parts.append(self._struct(position, kind, spans))
            parts += [self._elements(span) for span in spans]
        of_block = [span for span in self._spans if span.position == "block"]
        if of_block:
            lines = (f"    {_member(span)}" for span in of_block)
            parts.append("\n".join(("// Bounds in a block of scores.", "struct LineBlock {", *lines, "};")))
        parts += [self._elements(span) for span in of_block]
        return "\n\n".join((*parts, self._verdict()))

    def _struct(self, position: str, kind: str, spans: list[Span]) -> str:
        what = "rows" if position == "q" else "keys"
        members = [f"    int {position}_low, {position}_high;  // their positions"]
        if self._rule.pack is not None and position == "q":
            members.append("    int first_sequence, last_sequence;")
            members.append("    int b;  // the sequence in question")
        members += [f"    {_member(span)}" for span in spans]
        lines = (f"// The bounds of a block of {what}, inclusive.", f"struct {kind} {{", *members, "};")
        return "\n".join(lines)

    def _elements(self, span: Span) -> str:
        what, *positions = _OF_SPANS[span.position]
        names = {"kv": "kv", "query": "query", "q": "(query + head.seqlen_kv - head.seqlen_q)"}
        types = {"params": "const Params&", "head": "const LineHead&"} | dict.fromkeys(positions, "int")
        body = []
        if self._rule.pack is not None:
            names = {"token": "kv", "query": "query", "q": "row.q", "row": "row"}
            if span.position == "q":
                body = ["const LineRow row = line_row(params, head, query);"]
        if span.position == "block" and span.row_stride:
            body.append(f"return {self._writer.address(span.node, names)};")
            result = function(f"const uint8_t* line_block_{span.name}_address", types, body)
            return f"// Where {span.text} is.\n{result}"
        body.append(f"return {bare(self._writer.element(span.node, names))};")
        result = function(f"int line_{what}_{span.name}", types, body)
        return f"// {span.text} of a {_OF_ONE[span.position]}.\n{result}"

    def _verdict(self) -> str:
        code = BoundsCode()
        of_blocks = {span.node: (_OF_SPANS[span.position][0], span.name) for span in self._spans}

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
        true, false = (condition(x) for x in truth)
        types = {"params": "const Params&", "head": "const LineHead&"}
        types |= {"rows": "const LineRows&", "keys": "const LineKeys&"}
        if any(span.position == "block" for span in self._spans):
            types["block"] = "const LineBlock&"
        verdict = f"return !{true} ? kBlockEmpty : {false} ? kBlockPartial : kBlockFull;"
        result = function("BlockVerdict line_verdict", types, [*code.lines, verdict])
        return f"// The verdict of a block of scores: empty and full are certain.\n{result}"


def _member(span: Span) -> str:
    return f"int {span.name}_low, {span.name}_high;  // the bounds of {span.text}"


def _wide(code: BoundsCode, value: str) -> Any:
    return int(value) if value.lstrip("-").isdigit() else code.put("int64_t", value)


def _widened(code: BoundsCode, low: str, high: str) -> Interval:
    return Interval(code.put("int64_t", low), code.put("int64_t", high))
