"""Appending to a KV cache on the CPU, rotations in float32. Lengths can be read here, so what has no place is
an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators import latentrows
from flashgen.operators.append import ARGUMENTS
from flashgen.operators.append_rows import (
    check_places,
    new_tokens,
    pair_slices,
    queries,
    slots,
    total_lengths,
)
from flashgen.operators.kvcodes import TOKEN, check_elements, scales_of_sequences
from flashgen.operators.numbers import bfloat16_bits, codes_of, widened
from flashgen.operators.quantize_reference import scales_of_rows
from flashgen.runtime.hostarrays import check_writable, host_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.append import AppendProblem
    from flashgen.operators.append_rows import Tokens
    from flashgen.runtime.plans import Arrays

    Named = Mapping[str, np.ndarray | None]


def run(problem: AppendProblem, arrays: Arrays, stream: int) -> None:
    """Compute the outputs among ``arrays``, which are in the operator's order."""
    check_writable(problem, arrays)
    on_host = (None if x is None else host_array(x) for x in arrays)
    append(problem, dict(zip((argument.name for argument in ARGUMENTS), on_host, strict=True)))


def append(problem: AppendProblem, arrays: Named) -> None:
    """Fill the outputs. ``arrays`` has all arguments by name, None for what is absent, with the shapes of the
    contract; bfloat16 elements are their bits in uint16.

    Raises, before anything is written, BadTensorShape for a sequence that outgrows the cache or the tables,
    and BadParam for lengths, pages and boundaries that are none.
    """
    check_elements(arrays)
    check_places(problem, arrays)
    new = new_tokens(problem, arrays)
    where = slots(problem, new, arrays)
    at = where.page[new.real], where.slot[new.real]
    rows = {"k": _rotated(problem, "k_new", new, arrays)}
    if not problem.latent:
        rows["v"] = _batched(problem, arrays["v_new"])
    scales = {}
    if problem.kv_scales == TOKEN:
        for name, x in rows.items():
            scales[f"{name}_scale"] = scale = scales_of_rows(widened(x, problem.dtype, np.float32))
            arrays[f"{name}_scale_out"][at] = scale[new.real][..., 0]
    elif problem.has_packed_rows:
        rows["k"] = _packed(rows["k"])
    elif problem.kv_dtype is not None:
        of_sequences = scales_of_sequences(arrays, problem.sequences, problem.num_heads_kv)
        scales = {name: x[new.sequence] for name, x in of_sequences.items()}
    for name, x in rows.items():
        is_whole = problem.kv_dtype is None or problem.has_packed_rows
        of_cache = x if is_whole else _codes(problem, x, scales.get(f"{name}_scale"))
        arrays[f"{name}_cache"][at] = of_cache[new.real]
    if arrays["q"] is not None:
        of_q = queries(problem, arrays)
        _batched(problem, arrays["q_rotated"])[of_q.real] = _rotated(problem, "q", of_q, arrays)[of_q.real]
    arrays["total_lengths"][...] = total_lengths(problem, arrays)


def _batched(problem: AppendProblem, x: np.ndarray) -> np.ndarray:
    return x if problem.batched else x[None]


def _packed(x: np.ndarray) -> np.ndarray:
    """Rows of `latentrows`, (..., 656) bytes, of elements (..., 576), bfloat16 as its bits. The scale of a
    quarter is its largest finite |x| / 448, as in `quantize`.
    """
    latent = widened(x[..., : latentrows.HEAD_DIM_V], "bf16", np.float32).reshape(
        *x.shape[:-1], 4, latentrows.HEAD_DIM_V // 4
    )
    scales = scales_of_rows(latent)
    with np.errstate(all="ignore"):
        codes = codes_of(latent, scales)
    parts = (
        codes.reshape(*x.shape[:-1], latentrows.HEAD_DIM_V),
        scales[..., 0],
        x[..., latentrows.HEAD_DIM_V :],
    )
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], -1)


@np.errstate(all="ignore")
def _codes(problem: AppendProblem, x: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """The codes of an array, by the scales of its tokens, (batch, tokens, num_heads_kv, 1)."""
    numbers = widened(x, problem.dtype, np.float32)
    return codes_of(numbers, np.float32(1) if scale is None else scale)


@np.errstate(all="ignore")
def _rotated(problem: AppendProblem, name: str, tokens: Tokens, arrays: Named) -> np.ndarray:
    """An array as it is to be stored."""
    x = _batched(problem, arrays[name])
    if problem.pairs == "none":
        return x
    row = np.where(tokens.real, tokens.row, 0)
    c, s = (
        widened(arrays[table][row], problem.table_dtype, np.float32)[:, :, None] for table in ("cos", "sin")
    )
    first, second = pair_slices(problem)
    numbers = widened(x, problem.dtype, np.float32)
    out = x.copy()
    for half, other, sine in ((first, second, -s), (second, first, s)):
        rotated = c * numbers[..., half] + sine * numbers[..., other]
        out[..., half] = bfloat16_bits(rotated) if problem.dtype == "bf16" else rotated
    return out
