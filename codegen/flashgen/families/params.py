"""The parameters of a kernel: the members of the struct that is its only argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.operators.rules import Rule
    from flashgen.operators.scores import Score

# A parameter of this type describes an array to TMA (``schedule.tensormap``).
TENSOR_MAP = "tensor_map"
# The suffix after an array's name in the parameter that says how wide its rows may be loaded.
VECTOR_WIDTH = "_vector_width"
# C type -> (size in bytes, struct code, numpy code)
C_TYPES: dict[str, tuple[int, str, str]] = {
    f"{const}{pointed}*": (8, "Q", "<u8")
    for pointed in ("element", "float", "uint8_t", "int32_t", "int64_t", "fp16", "bf16", "e4m3")
    for const in ("const ", "")
} | {
    "int64_t": (8, "q", "<i8"),
    "uint64_t": (8, "Q", "<u8"),
    "int32_t": (4, "i", "<i4"),
    "uint32_t": (4, "I", "<u4"),
    "float": (4, "f", "<f4"),
    TENSOR_MAP: (128, "128s", "V128"),
}
CTYPES = tuple(C_TYPES)
# The lowest bit that numbers have in common -> how many bytes may be loaded at once.
_VECTOR_WIDTHS = {1: 1, 2: 1, 4: 4, 8: 8, 16: 16}


class Box(NamedTuple):
    """What one TMA load or store moves: ``rows`` rows of ``columns`` elements each."""

    columns: int
    rows: int


class Param(NamedTuple):
    """One member of the parameter struct. ``ctype`` is one of ``CTYPES``; ``doc`` is its comment in the C
    struct.

    ``when`` lists, per axis or tile key, the values for which the member exists; empty means always, as it is
    in a variant. ``box`` is the box of a tensor map in a variant, and None for any other type.
    """

    name: str
    ctype: str
    doc: str = ""
    when: tuple[tuple[str, tuple[str | int, ...]], ...] = ()
    box: Box | None = None

    def present(self, values: Mapping[str, str | int]) -> bool:
        """Whether a variant with these values of axes and tile keys has the member."""
        return all(values[key] in limit for key, limit in self.when)

    def excludes(self, other: Param) -> bool:
        """Whether no variant has both: some key is limited to values that have none in common."""
        limits = dict(other.when)
        return any(set(limits[key]).isdisjoint(limit) for key, limit in self.when if key in limits)


def score_params(score: Score, dtype: str, differentiated: bool = False) -> tuple[Param, ...]:
    """What kernels take besides for a score modification, as `Score.lowered` has it for them: its arrays,
    with strides and sizes, the scalars that the kernel reads as they are, and its constants.
    """
    # Only a call with a modification waits for what knows formulas.
    from flashgen.operators.formula import short_text
    from flashgen.operators.scores import TYPES

    params: list[Param] = []
    lowered = score.lowered(dtype, differentiated)
    for array in score.arrays:
        ctype = f"const {TYPES[array.type].ctype}*"
        params.append(Param(array.name, ctype, f"({', '.join(array.symbols)})"))
        params += [Param(name, "int64_t") for name in array.argument().stride_names()]
        size_names = (symbol for symbol in array.symbols if symbol.startswith(f"{array.name}_"))
        params += [Param(symbol, "int32_t") for symbol in size_names]
    read = frozenset().union(*(tree.reads() for tree in lowered.trees))
    params += [Param(p.name, TYPES[p.type].ctype) for p in score.scalars if p.name in read]
    if "softmax_scale" in read:
        params.append(Param("softmax_scale", "float"))
    params += [Param(name, "float", short_text(it)) for name, it in lowered.constants.items()]
    return tuple(params)


def rule_params(rule: Rule, step: str = "", tables: Sequence[str] = ()) -> tuple[Param, ...]:
    """What kernels take besides for a mask by a line: its arrays, with strides and sizes, and integers; of
    packed sequences also the table of queries, which the step of bounds writes. ``step`` is the step if it
    makes lists. The step of bounds takes the size of blocks of queries for arrays that it bounds in blocks of
    scores, and writes where elements break a run, which the main step reads. ``tables``
    has ``block_indptr`` if a kernel takes the tables of lists for the ranges of queries, and ``key_order``.
    """
    from flashgen.operators.keyranges import row_keys
    from flashgen.operators.rules import loads_by

    of_bounds = step == "bounds"

    params: list[Param] = []
    for array in rule.arrays:
        argument = array.argument()
        ctype = "const uint8_t*" if array.is_bool else "const int32_t*"
        params.append(Param(argument.name, ctype, f"({', '.join(array.symbols)})"))
        params += [Param(name, "int64_t") for name in argument.stride_names()]
        own = (symbol for symbol in array.symbols if symbol.startswith(f"{argument.name}_"))
        params += [Param(symbol, "int32_t") for symbol in own]
    if rule.pack is not None:
        doc = "(queries, 4): first key, one past the last key, position, sequence"
        params.append(Param("line_rows", "int32_t*" if of_bounds else "const int32_t*", doc))
    if of_bounds and loads_by(rule, "block"):
        params.append(Param("block_rows", "int32_t"))
    keys = row_keys(rule)
    if keys is not None and keys.runs and step in ("bounds", "main"):
        doc = "(lists, arrays of keys, blocks of keys): not 0 where elements fall"
        params.append(Param("line_breaks", "int32_t*" if of_bounds else "const int32_t*", doc))
    if "key_order" in tables:
        params.append(Param("key_order", "const int32_t*", "how many blocks are long; all blocks in order"))
    if "block_indptr" in tables and keys is not None:
        params.append(Param("block_indptr", "const int32_t*", "for each list a table"))
        params += [Param(f"block_indptr_{name}_stride", "int64_t") for name in ("batch", "head")]
    return (*params, *(Param(f"mask_{param.name}", "int32_t") for param in rule.scalars))


def vector_width(*numbers: int) -> int:
    """The widest of 1, 4, 8 and 16 bytes that divides every number, be it an address or a stride."""
    bits = 16
    for number in numbers:
        bits |= number
    return _VECTOR_WIDTHS[bits & -bits]
