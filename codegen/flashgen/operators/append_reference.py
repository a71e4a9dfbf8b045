"""`append` in float64, and its bound.

The bound, with u the unit roundoff of the dtype, and r the result:

    |error of r| <= 1.01 u |r| + 1.01 2^-23 (|c x| + |s y|) + least_out

- 2^-23: the product with s, and the sum, are each rounded to fp32; that with c may be. |r| is no larger.
- 1.01 u |r|: the result is rounded to the dtype. least_out: half of the least step of the dtype.

What is not rotated is copied: to the bit. A cache of codes is compared in units of codes: r divided by its
scale and limited to 448, with

    |error| <= 1.01 (bound of r) / scale + 1.01 max(2^-4 |r / scale|, 2^-10)

as e4m3 has 4 bits and steps of 2^-9, and the product with the reciprocal of the scale adds 2^-23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashgen.operators import latentrows
from flashgen.operators.append_rows import new_tokens, pair_slices, queries, slots, total_lengths
from flashgen.operators.kvcodes import TOKEN, scales_of_sequences
from flashgen.operators.numbers import Decoded, widened
from flashgen.operators.quantize import LARGEST
from flashgen.operators.quantize_reference import scales_of_rows
from flashgen.operators.reference import LEAST_OUT, UNIT_ROUNDOFF, Largest, Verdict, largest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashgen.operators.append import AppendProblem
    from flashgen.operators.append_rows import Tokens


def judge(
    problem: AppendProblem, before: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray | None]
) -> Verdict:
    """Compare the results of a call with float64, on the host; what a call must not touch has to be, to the
    bit, as ``before``, which has k_cache, and v_cache and q_rotated if the call has them. ``arrays`` has all
    arguments by name, None for what is absent; bfloat16 elements are their bits in uint16. Of the worst
    element ``index`` is the (batch, token, head, column), or, of what must not be touched, the place in its
    array.
    """

    def batched(x: np.ndarray) -> np.ndarray:
        return x if problem.batched else x[None]

    def numbers(x: np.ndarray) -> np.ndarray:
        return widened(batched(x), problem.dtype)

    def compared(
        name: str,
        places: tuple[np.ndarray, ...],
        written: np.ndarray,
        value: np.ndarray,
        bound: np.ndarray,
        part: str | None = None,
    ) -> Largest:
        """The worst element of an output; where ``written``, it is to have ``value`` at ``places``. ``part``
        is of rows that carry their scales.
        """
        result, old = arrays[name], before[name]
        if name == "q_rotated":
            result, old = batched(result), batched(old)
        if part is not None:
            result, old = latentrows.parts(result)[part], latentrows.parts(old)[part]
        bits = f"u{result.itemsize}"
        changed = result.view(bits) != old.view(bits)
        changed[tuple(place[written] for place in places)] = False
        if changed.any():
            index = tuple(int(i[0]) for i in np.nonzero(changed))
            return Largest(np.inf, np.inf, 0.0, index)
        mask = written.reshape(*written.shape, *[1] * (value.ndim - 2))
        of_codes = problem.kv_dtype is not None and name in ("k_cache", "v_cache") and part in (None, "codes")
        taken = (
            Decoded(result, None, np.float64).whole()[places]
            if of_codes
            else widened(result[places], problem.dtype)
        )
        return largest(np.where(mask, taken, 0), np.where(mask, value, 0), np.where(mask, bound, 0))

    tables = None
    if problem.pairs != "none":
        tables = tuple(widened(arrays[name], problem.table_dtype) for name in ("cos", "sin"))

    def with_row(tokens: Tokens) -> np.ndarray:
        if tables is None:
            return tokens.real
        return tokens.real & (tokens.row >= 0) & (tokens.row < problem.num_positions)

    new = new_tokens(problem, arrays)
    page, slot, there = slots(problem, new, arrays)
    stored = there & with_row(new)
    scales = {}
    if problem.kv_dtype is not None and problem.kv_scales != TOKEN and not problem.has_packed_rows:
        of_sequences = scales_of_sequences(arrays, problem.sequences, problem.num_heads_kv)
        scales = {name: x[new.sequence] for name, x in of_sequences.items()}
    worst = []
    for name in ("k", "v") if not problem.latent else ("k",):
        value = numbers(arrays[f"{name}_new"])
        bound = np.zeros(value.shape)
        if tables is not None and name == "k":
            value, bound = _rotated(problem, value, new.row, tables)
        scale = scales.get(f"{name}_scale")
        if problem.kv_scales == TOKEN:
            worst.append(compared(f"{name}_scale_out", (page, slot), stored, *_scales(value, bound)))
            scale = arrays[f"{name}_scale_out"][page, slot][..., None]
        if problem.has_packed_rows:
            of_parts = _parts(value, bound, latentrows.parts(arrays["k_cache"])["scales"][page, slot])
            worst += [compared("k_cache", (page, slot), stored, *x, part) for part, x in of_parts.items()]
            continue
        if problem.kv_dtype is not None:
            value, bound = _codes(value, bound, scale)
        worst.append(compared(f"{name}_cache", (page, slot), stored, value, bound))
    if arrays["q"] is not None:
        of_q = queries(problem, arrays)
        value, bound = _rotated(problem, numbers(arrays["q"]), of_q.row, tables)
        places = tuple(np.indices(of_q.row.shape))
        worst.append(compared("q_rotated", places, with_row(of_q), value, bound))
    total = total_lengths(problem, arrays)
    worst.append(largest(arrays["total_lengths"].astype(float), total.astype(float), np.zeros(total.shape)))
    return Verdict(max(worst, key=lambda element: element.share), None)


def _scales(x: np.ndarray, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each row of x, whose bound this is, and the bound of the scale."""
    scale = scales_of_rows(x)[..., 0]
    return scale, 2.0**-24 * scale + bound.max(axis=-1, initial=0) / LARGEST


def _parts(x: np.ndarray, bound: np.ndarray, scales: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rows of x as rows that carry their ``scales``, and the bound of each part."""
    latent = (*x.shape[:-1], 4, latentrows.HEAD_DIM_V // 4)
    of_latent = [y[..., : latentrows.HEAD_DIM_V].reshape(latent) for y in (x, bound)]
    codes = _codes(*of_latent, scales[..., None])
    flat = (*x.shape[:-1], latentrows.HEAD_DIM_V)
    return {
        "codes": tuple(y.reshape(flat) for y in codes),
        "scales": _scales(*of_latent),
        "rotary": tuple(y[..., latentrows.HEAD_DIM_V :] for y in (x, bound)),
    }


@np.errstate(all="ignore")  # a wrong scale may be 0, and slots that are left out NaN
def _codes(x: np.ndarray, bound: np.ndarray, scale: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """x in units of codes, and its bound, by the scale of each token."""
    of_token = 1.0 if scale is None else scale.astype(np.float64)
    scaled = np.clip(x / of_token, -LARGEST, LARGEST)
    return scaled, 1.01 * (bound / of_token + np.maximum(2.0**-4 * np.abs(scaled), 2.0**-10))


def _rotated(
    problem: AppendProblem, x: np.ndarray, row: np.ndarray, tables: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """x rotated, in float64, and its bound. Rows past the tables count as row 0."""
    c, s = (table[np.where(row < problem.num_positions, row, 0)][:, :, None] for table in tables)
    first, second = pair_slices(problem)
    out, bound = x.copy(), np.zeros(x.shape)
    for half, other, sign in ((first, second, -1), (second, first, 1)):
        out[..., half] = c * x[..., half] + sign * s * x[..., other]
        terms = np.abs(c * x[..., half]) + np.abs(s * x[..., other])
        bound[..., half] = 1.01 * (UNIT_ROUNDOFF[problem.dtype] * np.abs(out[..., half]) + 2.0**-23 * terms)
        bound[..., half] += LEAST_OUT[problem.dtype]
    return out, bound
