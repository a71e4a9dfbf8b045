"""The operator ``sparse_latent_attention``: each query attends to the tokens that its list names, as in
DeepSeek's sparse attention (https://arxiv.org/abs/2512.02556).

The cache is a latent cache, see `latent`. All heads of a query share its list, so a tile is heads of one
query, and its keys are gathered rows of the cache. Kernels cut lists into shares as if they were the keys of
sequences of one length.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from flashgen.errors import BadParam, NullPointer, arg
from flashgen.operators import contract, latent, latentrows
from flashgen.operators.arguments import INT32, Argument, check_devices, place, shown
from flashgen.operators.attention import ATTENTION, SCALARS
from flashgen.operators.kvcodes import whole_scales
from flashgen.operators.latent import LATENT, Q_ROPE, LatentProblem
from flashgen.operators.operator import Operator, by_name
from flashgen.operators.sequences import check_scales, sequences, whole_q

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flashgen.operators.arguments import ArrayView
    from flashgen.operators.attention_problem import AttentionProblem
    from flashgen.operators.operator import Number, Value
    from flashgen.operators.sequences import Sequence

NO_TOKEN = -1
INDICES = Argument("indices", "input", "batch seqlen_q topk", **INT32)
# The arrays of lengths that a call may have.
_LENGTHS = ("kv_lengths", "index", "pages")
_NAMES = ("q", "k", *_LENGTHS, "out", "lse")
ARGUMENTS = (
    *(LATENT.arguments[LATENT.position(name)] for name in _NAMES),
    INDICES,
    LATENT.arguments[LATENT.position("k_scale")],
    Q_ROPE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLatentProblem(LatentProblem):
    """Shapes, strides and options of one call: ``seqlen_kv`` is ``topk``, the entries of a list.

    ``lengths`` describes the cache, of which ``most_keys`` is the room of a sequence.
    """

    operator_name: ClassVar[str] = "sparse_latent_attention"

    @property
    def lengths_on_device(self) -> bool:
        return False  # all lists have the same number of entries

    @property
    def sizes(self) -> dict[str, int]:
        return LatentProblem.sizes.fget(self) | {"topk": self.seqlen_kv}

    def grid_extents(self, axes: Mapping[str, Value]) -> dict[str, int]:
        extents = LatentProblem.grid_extents(self, axes)
        return extents | {"query_rows": self.group_size, "batch": self.batch * self.seqlen_q}

    def values(self, axes: Mapping[str, Value]) -> dict[str, Number]:
        """As of attention with lengths; ``seqlen_q`` is 1, since a tile has one query."""
        return LatentProblem.values(self, axes) | {"seqlen_q": 1}

    def standard(self) -> SparseLatentProblem:
        return dataclasses.replace(self, batch=1)

    def description(self) -> str:
        return f"{LatentProblem.description(self)}, indices"


def normalise(q: ArrayView, k: ArrayView, indices: ArrayView | None, **others: Any) -> SparseLatentProblem:
    """The Problem of a call, or the error of the contract that it breaks. ``others`` as in
    `latent.normalise`.
    """
    for name in ("causal", "mask_type"):
        if others.get(name) not in (None, False, 0, "none"):
            raise BadParam(
                f"{arg(name)} is {shown(others[name])}, and {arg('indices')} was given; a query sees the "
                f"tokens of its list alone: leave {arg(name)} out, and list no token after the query"
            )
    problem = latent.normalise(q, k, **others)
    if indices is None:
        raise NullPointer(f"{arg('indices')} is None; expected an int32 array, (batch, seqlen_q, topk)")
    check_devices({"q": q, "indices": indices})
    topk = indices.shape[-1] if indices.shape else 0
    sizes = problem.sizes | {"topk": topk}
    contract.check_beside_q(INDICES, indices, sizes, problem.dtype, 0)
    strides = {x.name: of for x, of in zip(LATENT.arguments, problem.strides, strict=True)}
    strides[INDICES.name] = place(INDICES, indices, sizes, problem.dtype).strides
    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    of_lists = {"seqlen_kv": topk, "strides": tuple(strides[x.name] for x in ARGUMENTS)}
    return SparseLatentProblem(**fields | of_lists)


class Query(NamedTuple):
    """One query and the keys that its list names: the problem of a call of attention with this query alone,
    and its arrays by name. ``out`` and ``lse`` are views of the arrays of the call.
    """

    problem: AttentionProblem
    arrays: dict[str, np.ndarray | None]


def queries(problem: SparseLatentProblem, arrays: Mapping[str, np.ndarray | None]) -> Iterator[Query]:
    """The queries of a call; ``arrays`` has its arrays in host memory, by name.

    Raises BadParam, at the first step, for lengths or indices that contradict the problem.
    """
    of_call = checked_sequences(problem, arrays)
    indices, k, lse = arrays["indices"], arrays["k"], arrays.get("lse")
    scale = whole_scales(problem.sizes, arrays).get("k_scale")
    for sequence in of_call:
        b = sequence.number
        for i in range(problem.seqlen_q):
            tokens = indices[b, i][indices[b, i] != NO_TOKEN]
            rows = _rows(sequence, k, tokens)[None]
            if problem.has_packed_rows:
                rows = latentrows.unpacked(rows)
            of_codes = None if scale is None else scale[b : b + 1]
            one = {
                "q": whole_q(arrays["q"], arrays.get("q_rope"))[b : b + 1, i : i + 1],
                "k": rows,
                "v": rows[..., : problem.head_dim_v],
                "k_scale": of_codes,
                "v_scale": of_codes,
                "out": None if arrays.get("out") is None else arrays["out"][b : b + 1, i : i + 1],
                "lse": None if lse is None else lse[b : b + 1, :, i : i + 1],
            }
            yield Query(problem.of_sequence(1, len(tokens)), one)


def _rows(sequence: Sequence, k: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The rows of tokens of a sequence: (tokens, 1, head_dim)."""
    if sequence.pages is None:
        return sequence.keys(k)[tokens]
    return k[sequence.pages[tokens // k.shape[1]], tokens % k.shape[1]]


def checked_sequences(
    problem: SparseLatentProblem, arrays: Mapping[str, np.ndarray | None]
) -> list[Sequence]:
    """The sequences of a call. Raises BadParam for lengths that contradict the problem, for a scale that is
    not a finite number above 0, and for an index that is neither NO_TOKEN nor a token of its sequence.
    """
    of_call = sequences(problem, arrays)
    check_scales(problem, of_call, arrays)
    for sequence in of_call:
        indices = arrays["indices"][sequence.number]
        wrong = np.argwhere((indices < NO_TOKEN) | (indices >= sequence.kv_length))
        if wrong.size:
            i, j = wrong[0].tolist()
            raise BadParam(
                f"{arg('indices')}[{sequence.number}, {i}, {j}] is {indices[i, j]}; sequence "
                f"{sequence.number} has {sequence.kv_length} tokens: expected 0 to "
                f"{sequence.kv_length - 1}, or {NO_TOKEN} for none"
            )
    return of_call


SPARSE_LATENT = Operator(
    name="sparse_latent_attention",
    arguments=ARGUMENTS,
    options=("causal", "mask_type", "head_dim_v", "return_lse", "splits", "kv_dtype"),
    scalars=SCALARS,
    axes=LATENT.axes,
    grid_dimensions=ATTENTION.without_lengths.grid_dimensions,
    contract=by_name(normalise, without=("lse",)),
    elements_checked=(*_LENGTHS, "indices", "k_scale"),
    check_elements=checked_sequences,
)
