"""Masks by a line, as a caller holds them: the line with its arrays and integers."""

from __future__ import annotations

import hashlib
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from flashgen.call.keywords import advice
from flashgen.errors import BadParam, BadTensorDtype, BadTensorShape, arg
from flashgen.operators.arguments import shown, shown_shape
from flashgen.operators.rules import PREFIX, RuleOfCall

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from flashgen.call.keptlists import KeptLists
    from flashgen.operators.maskblocks import Blocks
    from flashgen.operators.rules import Rule, RuleParam


class Mask:
    """Which keys each query sees, by one line. It is true where a key is **visible**; a mask array is true
    where a key is hidden.

    >>> flashgen.Mask("documents", doc=doc)
    >>> flashgen.Mask("kv <= q or kv < prefix[b]", prefix=prefix)

    line: the name of a mask of ``masks.yaml`` in a spec folder, or a condition over q and kv (positions among
        the keys, the last query at the last key), h (query head), b (batch entry) and parameters.
    params: by name. An integer, or an array of the library and on the device of q: int32, or bool or uint8
        where the line reads an element as a condition, as in "keep[q, kv] and kv <= q". An array with an
        element for each token is (batch, seqlen_kv), or (tokens of k,) where keys are packed; arrays
        broadcast from the right.

    Pass it as ``mask=`` to any number of calls of ``attention``. It keeps the arrays without a copy, and each
    call reads their current elements. A mask does not change: `update` returns another one.

    Raises BadParam, with the column of what is wrong in a line, BadTensorDtype or BadTensorShape.
    """

    __slots__ = ("__weakref__", "_arrays", "_digests", "_kept", "_line", "_numbers", "_rule")

    _line: str
    _rule: RuleOfCall
    _arrays: dict[str, Any]
    _numbers: dict[str, int]
    _digests: dict[str, bytes]
    _kept: KeptLists | None

    def __init__(self, line: str, /, **params: Any) -> None:
        rule = rule_of(line)
        names = {param.name for param in rule.params}
        for name in params.keys() - names:
            has = f"it has {', '.join(sorted(names)) or 'none'}{advice(name, names)}"
            raise BadParam(f"the mask {rule.title} has no parameter {name}; {has}")
        for param in rule.params:
            if params.get(param.name) is None:
                raise BadParam(
                    f"{arg(param.name)} is missing; the mask {rule.title} needs {_expected(param)}"
                )
        arrays = {param.name: _checked_array(rule, param, params[param.name]) for param in rule.arrays}
        numbers = {param.name: rule.number(param, params[param.name]) for param in rule.scalars}
        _sizes(rule, arrays)
        put = object.__setattr__
        put(self, "_line", line)
        put(self, "_rule", RuleOfCall(rule, tuple(numbers.values())))
        put(self, "_arrays", arrays)
        put(self, "_numbers", numbers)
        put(self, "_digests", {})
        put(self, "_kept", None)

    @classmethod
    def from_array(cls, hidden: Any) -> Mask:
        """The mask of an array that hides keys, as ``mask=`` takes it: bool or uint8, **nonzero hides**, of a
        shape that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv), the last dimension but seqlen_kv.

        >>> mask = flashgen.Mask.from_array(hidden)
        >>> for layer in layers: x = layer(x, mask=mask)

        Kernels skip blocks that it hides, compute blocks that it shows as without a mask, and read it only in
        the others. The lists of blocks, one pass over the array on the GPU, are kept as `keep_lists` says:
        layers and backward passes share them. Raises BadTensorDtype or BadTensorShape.
        """
        if not hasattr(hidden, "shape") or not hasattr(hidden, "dtype"):
            raise BadTensorDtype(f"{arg('hidden')} has type {type(hidden).__name__}; {_HIDDEN}")
        shape = tuple(hidden.shape)
        if str(hidden.dtype).rpartition(".")[2] not in ("bool", "uint8"):
            raise BadTensorDtype(f"{arg('hidden')} has dtype {hidden.dtype}; {_HIDDEN}")
        if not 1 <= len(shape) <= 4:
            raise BadTensorShape(f"{arg('hidden')} has shape {shape}; {_HIDDEN}")
        # A dimension of 1 has no index in the line, so that all its queries, heads or batch entries share
        # lists.
        names = ("b", "h", "q", "kv")[4 - len(shape) :]
        kept = [size != 1 or name == "kv" for name, size in zip(names, shape, strict=True)]
        indices = ", ".join(name for name, keeps in zip(names, kept, strict=True) if keeps)
        view = hidden if all(kept) else hidden[tuple(slice(None) if keeps else 0 for keeps in kept)]
        return _made(f"not hidden[{indices}]", {"hidden": view}, keeps=True)

    @property
    def line(self) -> str:
        """What the mask was made of: a name, or a condition."""
        return self._line

    @property
    def visible(self) -> str:
        """The condition under which a key is visible."""
        return self._rule.rule.text

    @property
    def rule(self) -> RuleOfCall:
        """The checked line, with the integers: an option of the operators."""
        return self._rule

    @property
    def arrays(self) -> Mapping[str, Any]:
        """The arrays by name."""
        return MappingProxyType(self._arrays)

    @property
    def numbers(self) -> Mapping[str, int]:
        """The integers by name."""
        return MappingProxyType(self._numbers)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arrays by the names of arguments, as a call of a ``Plan`` takes them."""
        return {PREFIX + name: x for name, x in self._arrays.items()}

    @property
    def kept(self) -> KeptLists | None:
        """The lists that the mask keeps; None if each call lists the blocks."""
        return self._kept

    def update(self, **params: Any) -> Mask:
        """The same line with other values of some parameters. It keeps lists if this mask does, but not
        the same ones. Raises as making one does.
        """
        return _made(self._line, {**self._arrays, **self._numbers, **params}, self._kept is not None)

    def keep_lists(self) -> Mask:
        """A mask with the same line and arrays that keeps its lists of blocks on the GPU. The first call of
        a kind makes them, for the tile of its kernel, and later calls take them: of other layers, and of
        their backward passes.

        Do not write to the arrays, or write to tensors by PyTorch, which counts their versions: lists of
        other elements give wrong results. `check` raises BadParam then. A call in a graph that is captured,
        with a ``stream``, or of packed sequences lists the blocks itself, and a plan does, too.
        """
        return _made(self._line, {**self._arrays, **self._numbers}, keeps=True)

    def blocks(
        self,
        rows: int = 128,
        keys: int = 128,
        *,
        seqlen_q: int | None = None,
        seqlen_kv: int | None = None,
        num_heads: int | None = None,
    ) -> Blocks:
        """Which blocks of ``rows`` queries and ``keys`` keys are empty, partial and full: lists of runs. No
        visible block is missed, and a full block has no hidden key; a partial one may be empty or full.

        The lengths follow from arrays with an element for each token; seqlen_q is seqlen_kv by default.
        Arrays on a GPU are copied to the host, which waits for them. Raises BadParam for a length that
        follows from no array and is not passed.
        """
        from flashgen.operators.maskblocks import blocks_of
        from flashgen.operators.visibility import visibility_on_host
        from flashgen.runtime.arrays import on_host

        for name, size in (("rows", rows), ("keys", keys)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise BadParam(f"{arg(name)} is {shown(size)}; a block has 1 or more")
        rule, sizes = self._rule.rule, _sizes(self._rule.rule, self._arrays)
        seqlen_kv = _length("seqlen_kv", seqlen_kv, sizes.get("seqlen_kv"), rule)
        seqlen_q = _length("seqlen_q", seqlen_q, sizes.get("seqlen_q"), rule, seqlen_kv)
        num_heads = num_heads or sizes.get("num_heads_q")
        if num_heads is None and "h" in rule.tree.reads():
            raise BadParam(f"num_heads is None; the mask {rule.title} differs from head to head")
        sizes = {
            "batch": 1,
            **sizes,
            "seqlen_q": seqlen_q,
            "seqlen_kv": seqlen_kv,
            "num_heads_q": num_heads or 1,
        }
        host = {name: on_host(x) for name, x in self._arrays.items()}
        self._digests.update({name: _digest(x) for name, x in host.items()})
        visibility = visibility_on_host(self._rule, host, sizes)
        return blocks_of(visibility, sizes["batch"], sizes["num_heads_q"], seqlen_q, seqlen_kv, rows, keys)

    def check(self) -> None:
        """Raise BadParam if an array was written to after the last `blocks`, whose lists are stale then, or
        if lists that the mask keeps are stale. Arrays on a GPU are copied to the host, which waits for them.
        """
        if self._kept is not None and self._kept.are_stale(tuple(self._arrays.values())):
            raise BadParam(
                f"an array of the mask {self._rule.rule.title} was written to after a call that keeps lists "
                "of its blocks; pass the new array to update()"
            )
        from flashgen.runtime.arrays import on_host

        for name, digest in self._digests.items():
            if _digest(on_host(self._arrays[name])) != digest:
                raise BadParam(
                    f"{arg(name)} was written to after the blocks of the mask {self._rule.rule.title} were "
                    "listed; list them anew, or pass the new array to update()"
                )

    def show(
        self, path: str | Path, rows: int | None = None, keys: int | None = None, **lengths: Any
    ) -> None:
        """Draw the blocks of the first batch entry and head as an SVG picture, by default some 64 blocks to a
        side; ``lengths`` as in `blocks`.
        """
        from flashgen.call.maskpicture import block_size, draw

        if rows is None or keys is None:
            one = self.blocks(1 << 30, 1 << 30, **lengths)  # only for the lengths
            rows, keys = rows or block_size(one.seqlen_q), keys or block_size(one.seqlen_kv)
        title = self._line if self._line == self.visible else f"{self._line}: {self.visible}"
        draw(self.blocks(rows, keys, **lengths), title, path)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a flashgen.Mask cannot be changed; update() returns one with another {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a flashgen.Mask cannot be changed")

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._line, {**self._arrays, **self._numbers}, self._kept is not None)

    def __repr__(self) -> str:
        params = (f", {name}={getattr(x, 'shape', x)}" for name, x in (self._arrays | self._numbers).items())
        return f"Mask({self._line!r}{''.join(params)})"


_HIDDEN = (
    "expected a bool or uint8 array whose shape broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv), "
    "nonzero where a key is hidden"
)


def _made(line: str, params: dict[str, Any], keeps: bool = False) -> Mask:
    from flashgen.call.keptlists import KeptLists

    mask = Mask(line, **params)
    object.__setattr__(mask, "_kept", KeptLists() if keeps else None)
    return mask


def mask_of(
    line: str, arrays: Mapping[str, Any], numbers: Mapping[str, int], kept: KeptLists | None = None
) -> Mask:
    """A mask made from the properties ``line``, ``arrays``, ``numbers`` and ``kept`` of a mask."""
    mask = Mask(line, **arrays, **numbers)
    object.__setattr__(mask, "_kept", kept)
    return mask


def lengths_of(mask: Mask) -> Mapping[str, int]:
    """The sizes that follow from the arrays of a mask."""
    return _sizes(mask.rule.rule, mask.arrays)


def rule_of(line: Any) -> Rule:
    """The rule of a name or a line. Raises BadParam and SpecError."""
    from flashgen.families.masks import load_masks, rule_of_line

    if not isinstance(line, str):
        hint = "; a mask array is passed as mask= itself" if hasattr(line, "shape") else ""
        raise BadParam(f"line has type {type(line).__name__}; expected the name of a mask or a line{hint}")
    if not line.isidentifier():
        return rule_of_line(" ".join(line.split()))
    rules = load_masks(os.environ.get("FLASHGEN_SPECS", ""))
    if line not in rules:
        there = ", ".join(map(repr, sorted(rules)))
        raise BadParam(
            f"line is {line!r}{advice(line, rules)}; there are {there}, and lines such as 'kv <= q'"
        )
    return rules[line]


def _expected(param: RuleParam) -> str:
    if not param.dimensions:
        return "an integer"
    return f"{'a bool or uint8' if param.is_bool else 'an int32'} array {shown_shape(_names(param))}"


def _names(param: RuleParam) -> tuple[str, ...]:
    """The sizes of an array's dimensions, as a caller calls them."""
    from flashgen.operators.rules import DIMENSIONS

    return tuple(DIMENSIONS.get(dimension, dimension) for dimension in param.dimensions)


def _checked_array(rule: Rule, param: RuleParam, x: Any) -> Any:
    """An array of a mask. Raises BadTensorDtype or BadTensorShape."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise BadTensorDtype(
            f"{arg(param.name)} has type {type(x).__name__}; the mask {rule.title} needs {_expected(param)}"
        )
    dtype = str(x.dtype).rpartition(".")[2]
    if dtype not in param.argument().dtypes:
        raise BadTensorDtype(
            f"{arg(param.name)} has dtype {dtype}; the mask {rule.title} needs {_expected(param)}"
        )
    if not 1 <= len(x.shape) <= len(param.dimensions):
        raise BadTensorShape(
            f"{arg(param.name)} has shape {tuple(x.shape)}; the mask {rule.title} needs {_expected(param)}"
        )
    return x


def _sizes(rule: Rule, arrays: Mapping[str, Any]) -> dict[str, int]:
    """Batch, heads and lengths, from the shapes of arrays. Raises BadTensorShape if two differ."""
    sizes: dict[str, int] = {}
    owners: dict[str, str] = {}
    for param in rule.arrays:
        shape = tuple(arrays[param.name].shape)
        for name, size in zip(reversed(_names(param)), reversed(shape), strict=False):
            if name in param.dimensions:  # its own
                continue
            if sizes.get(name, 1) == 1 or (name in ("batch", "num_heads_q") and size == 1):
                sizes[name] = max(size, sizes.get(name, 1)) if name in ("batch", "num_heads_q") else size
                owners[name] = param.name
            elif sizes[name] != size:
                other = owners[name]
                raise BadTensorShape(
                    f"{arg(param.name)} has shape {shape} but {arg(other)} has {tuple(arrays[other].shape)}; "
                    f"they must have one {name}"
                )
    return sizes


def _length(name: str, passed: Any, of_arrays: int | None, rule: Rule, default: int | None = None) -> int:
    """A length of a mask's blocks. Raises BadParam."""
    length = passed if passed is not None else of_arrays if of_arrays is not None else default
    if length is None:
        raise BadParam(
            f"{arg(name)} is None, and the arrays of the mask {rule.title} do not determine it; pass {name}="
        )
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise BadParam(f"{arg(name)} is {shown(length)}; expected an integer, 0 or more")
    if of_arrays is not None and length != of_arrays:
        raise BadParam(f"{arg(name)} is {length}; the arrays of the mask {rule.title} have {of_arrays}")
    return length


def _digest(x: Any) -> bytes:
    return hashlib.blake2b(x.tobytes(), digest_size=16).digest()
