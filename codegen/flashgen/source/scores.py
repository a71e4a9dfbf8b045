"""The CUDA of a score modification: what the keys of a row share, and the function of one score.

    struct ScoreRow;
    ScoreRow score_row(params, b, h, query);
    float modified_score(params, row, first_key, step, product);

The first part is read once a row, so that elements of arrays that no key changes stay in registers. In the
second, ``step`` is known when the kernel is compiled: an integer that grows with the key is taken at
``first_key``, where it is the same for all of a lane's keys, and the step is added as a float.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from flashgen.operators.formula import Node, text

if TYPE_CHECKING:
    from flashgen.operators.scores import Score, ScoreParam

_CALLS = {
    "exp2": "exp2_approx",
    "log2": "log2_approx",
    "rcp": "rcp_approx",
    "abs": "fabsf",
    "min": "fminf",
    "max": "fmaxf",
    "fma": "fmaf",
}
_INT_CALLS = {"abs": "abs", "min": "min", "max": "max"}
_SIGNS = {"and": "&&", "or": "||"}
_COLUMNS = 132


def score_functions(score: Score) -> str:
    """The struct and the two functions as C++. No final newline. Needs ``Params`` in scope."""
    return _Writer(score).functions()


class _Writer:
    def __init__(self, score: Score) -> None:
        self._score, self._body = score, score.lowered.body
        self._arrays = {param.name: param for param in score.arrays}
        self._scalars = {param.name for param in score.scalars} | {"softmax_scale", *score.lowered.constants}
        # Row-wise loads by their text, and the names of their members.
        self._members: dict[Node, str] = {}
        for node in self._body.walk():
            if node.op == "load" and not self._reads_key(node) and node not in self._members:
                earlier = sum(other.value == node.value for other in self._members)
                self._members[node] = f"{node.value}_{earlier + 1}" if earlier else str(node.value)
        self._temporaries: dict[Node, str] = {}

    def functions(self) -> str:
        """All of it."""
        lines = [f"// The score modification `{self._score.name}`: {self._score.text}"]
        positions = self._positions()
        if positions or self._members:
            lines += ["", "// What the keys of a row share.", "struct ScoreRow {"]
            lines += [f"    int {name};  // {what}" for name, (what, _) in positions.items()]
            lines += [f"    {node.type} {name};  // {text(node)}" for node, name in self._members.items()]
            lines += ["};"]
        else:
            lines += ["", "// What the keys of a row share: nothing.", "struct ScoreRow {};"]
        lines += ["", *self._row_function(positions), "", *self._score_function()]
        return "\n".join(lines)

    def _positions(self) -> dict[str, tuple[str, str]]:
        """Members for positions: a comment, and the C++ of the value."""
        loads = {node for node in self._body.walk() if node.op == "load"}
        indices = {id(index) for node in loads for index in node.args if node not in self._members}
        used: set[str] = set()
        inside = {id(each) for node in self._members for index in node.args for each in index.walk()}
        for node in self._body.walk():
            if node.op == "name" and id(node) not in inside:
                used.add("query" if node.value == "q" and id(node) in indices else str(node.value))
        found = {}
        if "query" in used:
            found["query"] = ("index of the query", "query")
        if "q" in used:
            found["q"] = (
                "position of the query: the last one stands at the last key",
                "query + params.seqlen_kv - params.seqlen_q",
            )
        if "h" in used:
            found["h"] = ("query head", "h")
        if "b" in used:
            found["b"] = ("batch entry", "b")
        return found

    def _row_function(self, positions: dict[str, tuple[str, str]]) -> list[str]:
        reads = {name for node in self._members for index in node.args for name in index.reads()}
        given = {name: code for name, (_, code) in positions.items()}
        names = {
            "params": bool(self._members) or "q" in given,
            "b": "b" in given or "b" in reads,
            "h": "h" in given or "h" in reads,
            "query": "query" in given or "q" in given or "q" in reads,
        }
        types = {"params": "const Params&", "b": "int", "h": "int", "query": "int"}
        head = ", ".join(f"{types[name]} {name}" if used else types[name] for name, used in names.items())
        lines = [f"__device__ __forceinline__ ScoreRow score_row({head}) {{"]
        if not given and not self._members:
            return [*lines, "    return {};", "}"]
        lines.append("    ScoreRow row;")
        lines += [f"    row.{name} = {code};" for name, code in given.items()]
        own = {"q": "(query + params.seqlen_kv - params.seqlen_q)", "h": "h", "b": "b"}
        lines += [
            f"    row.{name} = {self._load(node, own, 'query')};" for node, name in self._members.items()
        ]
        return [*lines, "    return row;", "}"]

    def _score_function(self) -> list[str]:
        counts = Counter(node for node in self._body.walk() if node.op not in ("number", "name", "float"))
        lines: list[str] = []
        for node in self._inside_out(self._body):
            repeated = counts[node] > 1 and node.type == "float"
            if (repeated or node.op in ("exp2", "log2")) and node not in self._members and node != self._body:
                if node not in self._temporaries:
                    code, name = self._code(node), f"t{len(self._temporaries)}"
                    lines.append(f"    const float {name} = {code};")
                    self._temporaries[node] = name
        lines.append(f"    return {_bare(self._code(self._body))};")
        code = "\n".join(lines)
        kinds = {
            "params": "const Params&",
            "row": "const ScoreRow&",
            "first_key": "int",
            "step": "int",
            "product": "float",
        }
        uses = {name: any(part in code for part in (f"{name}.", f"{name} ", f"{name})", f"{name},")) for name in kinds}
        head = ", ".join(f"{kinds[name]} {name}" if uses[name] else kinds[name] for name in kinds)
        opening = f"__device__ __forceinline__ float modified_score({head}) {{"
        if len(opening) > _COLUMNS:
            split = opening.rindex(", ", 0, _COLUMNS) + 1
            opening = opening[:split] + "\n" + " " * opening.index("(") + opening[split:]
        about = "// The modified score of the key `step` past `first_key`, from its q . k, which is not scaled yet."
        return [about, opening, *lines, "}"]

    def _inside_out(self, node: Node) -> list[Node]:
        return [*(each for arg in node.args for each in self._inside_out(arg)), node]

    def _reads_key(self, node: Node) -> bool:
        return "kv" in node.reads()

    def _code(self, node: Node) -> str:
        """A value of the score's own function; what has an operator outside of calls is in parentheses."""
        if node in self._temporaries:
            return self._temporaries[node]
        if node.op == "number":
            return _literal(node.value)
        if node.op == "load":
            if node in self._members:
                return f"row.{self._members[node]}"
            return self._load(node, {"q": "row.q", "h": "row.h", "b": "row.b", "kv": "(first_key + step)"}, "row.query")
        if node.op == "name":
            return f"params.{node.value}" if node.value in self._scalars else "product"
        if node.op == "float":
            return self._converted(node.args[0])
        if node.type == "bool" and all(arg.type == "int" for arg in node.args):
            return self._joined(node, [self._int(arg) for arg in node.args])
        args = [self._code(arg) for arg in node.args]
        if node.op in _CALLS:
            return f"{_CALLS[node.op]}({', '.join(map(_bare, args))})"
        if node.op == "where":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        if node.op == "neg":
            return f"-{args[0]}"
        if node.op == "not":
            return f"!{args[0]}"
        return self._joined(node, args)

    def _joined(self, node: Node, args: list[str]) -> str:
        return f"({f' {_SIGNS.get(node.op, node.op)} '.join(args)})"

    def _converted(self, node: Node) -> str:
        """An integer as a float."""
        if node.op == "name" and node.value in self._scalars:
            return f"float(params.{node.value})"
        slope = _slope(node)
        if not slope:
            return f"float({_bare(self._int(node))})"
        base = f"float({_bare(self._int(node, 'first_key'))})"
        if abs(slope) == 1:
            return f"({base} {'+' if slope > 0 else '-'} float(step))"
        return f"({base} + {_literal(float(slope))} * float(step))"

    def _int(self, node: Node, key: str = "(first_key + step)") -> str:
        if node.op == "load":
            return self._code(node)
        names = {"q": "row.q", "h": "row.h", "b": "row.b", "kv": key}
        return _integer(node, names, self._scalars)

    def _load(self, node: Node, names: dict[str, str], query: str) -> str:
        """An element of an array. Indices of its own dimensions, and keys past the last, are clamped."""
        array = self._arrays[str(node.value)]
        own = {
            "b": names["b"],
            "h": names["h"],
            "q": query,
            "kv": "min(first_key + step, params.seqlen_kv - 1)",
        }
        indices = [
            own[dimension]
            if dimension in own
            else f"min(max({_bare(_integer(index, names, self._scalars))}, 0), params.{symbol} - 1)"
            for dimension, symbol, index in zip(array.dimensions, array.symbols, node.args, strict=True)
        ]
        return _element(array, indices)


def _element(array: ScoreParam, indices: list[str]) -> str:
    strides = array.argument().stride_names()
    terms = [f"{index} * params.{stride}" for index, stride in zip(indices, strides, strict=False)]
    address = " + ".join((f"params.{array.name}", *terms, indices[-1]))
    loaded = f"load_global_32({address})"
    return f"__uint_as_float({loaded})" if array.type == "f32" else f"int({loaded})"


def _integer(node: Node, names: dict[str, str], scalars: set[str]) -> str:
    if node.op == "number":
        return str(node.value)
    if node.op == "name":
        return f"params.{node.value}" if node.value in scalars else names[str(node.value)]
    args = [_integer(arg, names, scalars) for arg in node.args]
    if node.op in _INT_CALLS:
        return f"{_INT_CALLS[node.op]}({', '.join(map(_bare, args))})"
    if node.op == "neg":
        return f"-{args[0]}"
    return f"({f' {node.op} '.join(args)})"


def _slope(node: Node) -> int | None:
    """By how much an integer grows from key to key; None where that is no constant."""
    if node.op in ("number", "name"):
        return int(node.value == "kv")
    args = [_slope(arg) for arg in node.args]
    if node.op == "load" or None in args:
        return 0 if "kv" not in node.reads() else None
    if node.op in ("+", "-", "neg"):
        first = -args[0] if node.op == "neg" else args[0]
        return first + (args[1] if node.op == "+" else -args[1] if node.op == "-" else 0)
    return None if any(args) else 0


def _literal(value: float) -> str:
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    digits = f"{value:.9g}"
    return f"{digits}f" if any(c in digits for c in ".e") else f"{digits}.0f"


def _bare(code: str) -> str:
    """Without parentheses around all of it."""
    if not (code.startswith("(") and code.endswith(")")):
        return code
    depth = 0
    for place, character in enumerate(code):
        depth += (character == "(") - (character == ")")
        if depth == 0 and place < len(code) - 1:
            return code
    return code[1:-1]
