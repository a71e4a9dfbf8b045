"""One call of attention, normalised: the operator contract is checked here and nowhere else.

A ``Problem`` holds everything about a call except its pointers, so it is hashable and the same for every call
of one shape. ``normalise`` makes it from array views; ``check_memory`` checks what only the pointers of a
call can tell.
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    BadTensorShape,
    BadTensorStrides,
    DeviceTypeNotSupported,
    NullPointer,
)
from flashgen.operators.masks import UNBOUNDED

if TYPE_CHECKING:
    from flashgen.runtime.arrays import ArrayView

ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
MASK_TYPES = ("none", "dense", "causal_top_left", "causal_bottom_right")
ROW_ALIGNMENT = 16
MAX_HEAD_DIM = 256
MAX_SEQLEN = UNBOUNDED - 4096
# Smallest normal fp32: a scale of zero would turn the -inf of a masked score into NaN.
MIN_SCALE = 2.0**-126
MAX_SCALE = 3.0e38

Strides = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Problem:
    """Shapes, strides and options of one call.

    Strides are (batch, row, head) in elements, and 0 for an extent of at most 1; those of the mask are
    (batch, head, row) in bytes, or None without a mask. Key j is visible to query i iff
    ``p - window_left <= j <= p + window_right``, where ``p = i + diagonal_offset``, and the dense mask, if
    any, is zero there; a side that is ``UNBOUNDED`` hides nothing. ``mask_type`` is what a kernel must
    implement: ``none``, ``causal`` (bounded on the right only, ``window_right`` 0), ``local`` or ``dense``.
    ``device`` is a CUDA ordinal, or None for host memory. ``batched`` is False for three dimensions.
    """

    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask_type: str
    diagonal_offset: int
    window_left: int
    window_right: int
    softmax_scale: float
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    out_strides: Strides
    mask_strides: Strides | None
    return_lse: bool
    batched: bool = True
    device: int | None = None

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of ``out``: that of ``q``, with the head dim of ``v``."""
        shape = (self.batch, self.seqlen_q, self.num_heads_q, self.head_dim_v)
        return shape if self.batched else shape[1:]

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp: (batch, num_heads_q, seqlen_q), without batch if ``q`` has none."""
        shape = (self.batch, self.num_heads_q, self.seqlen_q)
        return shape if self.batched else shape[1:]

    @property
    def empty(self) -> bool:
        """Whether there is no output element to write."""
        return self.batch * self.seqlen_q == 0

    def extents(self) -> tuple[tuple[int, int], ...]:
        """For q, k, v, mask, out, lse: the first byte touched and the one past the last, from the pointer."""
        size = self.element_bytes
        q = (self.batch, self.seqlen_q, self.num_heads_q)
        kv = (self.batch, self.seqlen_kv, self.num_heads_kv)
        row, row_v = self.head_dim * size, self.head_dim_v * size
        mask = (0, 0)
        if self.mask_strides is not None:
            shape = (self.batch, self.num_heads_q, self.seqlen_q)
            mask = _extent(shape, self.mask_strides, 1, self.seqlen_kv)
        return (
            _extent(q, self.q_strides, size, row),
            _extent(kv, self.k_strides, size, row),
            _extent(kv, self.v_strides, size, row_v),
            mask,
            _extent(q, self.out_strides, size, row_v),
            (0, 4 * math.prod(self.lse_shape)),
        )


def normalise(
    q: ArrayView,
    k: ArrayView,
    v: ArrayView,
    *,
    mask: ArrayView | None = None,
    out: ArrayView | None = None,
    causal: bool = False,
    mask_type: int | str | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Problem:
    """The Problem of a call, or the error of the contract that it breaks. Arguments as in ``attention``.

    Raises BadTensorShape, BadTensorDtype, BadTensorStrides, DeviceTypeNotSupported, NullPointer or BadParam.
    """
    views = {"q": q, "k": k, "v": v}
    if out is not None:
        views["out"] = out
    _check_devices(views if mask is None else views | {"mask": mask})
    dtype = _check_dtypes(views)
    batch, seqlen_q, heads_q, head_dim, head_dim_v = _check_shapes(q, k, v, out, dtype)
    _, seqlen_kv, heads_kv, _ = _batched(k.shape)
    for name, view in views.items():
        _check_strides(name, view, ELEMENT_BYTES[dtype])

    kind, offset, left, right = _mask_semantics(
        causal, mask_type, window_size, mask is not None, seqlen_q, seqlen_kv
    )
    kind, offset, left, right = simplify(kind, seqlen_q, seqlen_kv, offset, left, right)
    mask_strides = None
    if mask is not None:
        mask_strides = _mask_strides(mask, (batch, heads_q, seqlen_q, seqlen_kv))
    if out is None:
        out_shape, row = (batch, seqlen_q, heads_q, head_dim_v), heads_q * head_dim_v
        out_strides = _strides(out_shape, (seqlen_q * row, row, head_dim_v, 1))
    else:
        out_strides = _view_strides(out)
    return Problem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        mask_type=kind,
        diagonal_offset=offset,
        window_left=left,
        window_right=right,
        softmax_scale=_scale(softmax_scale, head_dim),
        q_strides=_view_strides(q),
        k_strides=_view_strides(k),
        v_strides=_view_strides(v),
        out_strides=out_strides,
        mask_strides=mask_strides,
        return_lse=bool(return_lse),
        batched=len(q.shape) == 4,
        device=q.device,
    )


def simplify(
    mask_type: str, seqlen_q: int, seqlen_kv: int, diagonal_offset: int, left: int, right: int
) -> tuple[str, int, int, int]:
    """The cheapest (mask_type, diagonal_offset, window_left, window_right) that hides exactly the same keys.

    A side of the band that even the row nearest to it does not reach is unbounded; a band without a left side
    is causal, with its right side folded into the offset; one without sides is no mask. So a causal call with
    one query, or a window longer than the keys, takes the kernel without masks. A dense mask stays as it is.
    """
    if mask_type == "dense":
        return "dense", 0, UNBOUNDED, UNBOUNDED
    if seqlen_q == 0 or seqlen_kv == 0 or right >= UNBOUNDED or diagonal_offset + right >= seqlen_kv - 1:
        right = UNBOUNDED
    if seqlen_q == 0 or seqlen_kv == 0 or left >= UNBOUNDED or seqlen_q - 1 + diagonal_offset - left <= 0:
        left = UNBOUNDED
    if left < UNBOUNDED:
        return "local", diagonal_offset, left, right
    if right < UNBOUNDED:
        return "causal", diagonal_offset + right, UNBOUNDED, 0
    return "none", 0, UNBOUNDED, UNBOUNDED


def check_memory(
    extents: tuple[tuple[int, int], ...], pointers: tuple[int, ...], written: tuple[int, ...]
) -> None:
    """Check the pointers of one call: ``extents`` is ``Problem.extents()``, ``pointers`` in the same order.

    ``written`` lists the positions of the outputs that the caller passed, whose overlap with another array
    must be ruled out. Two arrays overlap when their address ranges do, even if they interleave without
    sharing an element.

    Raises NullPointer for an array without memory, BadTensorStrides for a misaligned or overlapping one.
    """
    for position, ((low, high), pointer) in enumerate(zip(extents, pointers, strict=True)):
        if high == low:
            continue
        name = _NAMES[position]
        if pointer == 0 and name not in ("mask", "lse"):
            raise NullPointer(f"{name} has no memory behind it")
        alignment = _ALIGNMENTS[position]
        if pointer % alignment:
            raise BadTensorStrides(
                f"{name} starts at address {pointer:#x}, which is not a multiple of {alignment} bytes; "
                "pass a copy or a slice that starts at an aligned element"
            )
    for target in written:
        start, end = pointers[target] + extents[target][0], pointers[target] + extents[target][1]
        for other, ((low, high), pointer) in enumerate(zip(extents, pointers, strict=True)):
            if other != target and low < high and pointer + low < end and start < pointer + high:
                raise BadTensorStrides(
                    f"{_NAMES[target]} overlaps {_NAMES[other]} in memory; pass memory of its own"
                )


_NAMES = ("q", "k", "v", "mask", "out", "lse")
_ALIGNMENTS = (ROW_ALIGNMENT, ROW_ALIGNMENT, ROW_ALIGNMENT, 1, ROW_ALIGNMENT, 4)


def _check_devices(views: dict[str, ArrayView]) -> None:
    first = views["q"]
    for name, view in views.items():
        if view.device != first.device:
            raise DeviceTypeNotSupported(
                f"{name} is {_place(view)} but q is {_place(first)}; all arrays must be on one device"
            )


def _place(view: ArrayView) -> str:
    return "in host memory" if view.device is None else f"on GPU {view.device}"


def _check_dtypes(views: dict[str, ArrayView]) -> str:
    dtype = views["q"].dtype
    if dtype not in ELEMENT_BYTES:
        raise BadTensorDtype(f"q has dtype {dtype}; supported are {', '.join(ELEMENT_BYTES)}")
    for name, view in views.items():
        if view.dtype != dtype:
            raise BadTensorDtype(f"{name} has dtype {view.dtype} but q has {dtype}; they must be the same")
    return dtype


def _check_shapes(
    q: ArrayView, k: ArrayView, v: ArrayView, out: ArrayView | None, dtype: str
) -> tuple[int, int, int, int, int]:
    if len(q.shape) not in (3, 4):
        raise BadTensorShape(
            f"q has shape {q.shape}; expected (batch, seqlen_q, num_heads_q, head_dim), or that without batch"
        )
    for name, view in (("k", k), ("v", v)):
        if len(view.shape) != len(q.shape):
            raise BadTensorShape(
                f"{name} has shape {view.shape} but q has {q.shape}; expected as many dimensions"
            )
    batch, seqlen_q, heads_q, head_dim = _batched(q.shape)
    batch_kv, seqlen_kv, heads_kv, head_dim_kv = _batched(k.shape)
    if k.shape[:-1] != v.shape[:-1]:
        raise BadTensorShape(
            f"v has shape {v.shape} but k has {k.shape}; all but the last dimension must be the same"
        )
    if batch_kv != batch:
        raise BadTensorShape(f"k has batch {batch_kv} but q has {batch}; they must be the same")
    if head_dim_kv != head_dim:
        raise BadTensorShape(f"k has head_dim {head_dim_kv} but q has {head_dim}; they must be the same")
    step = ROW_ALIGNMENT // ELEMENT_BYTES[dtype]
    head_dim_v = v.shape[-1]
    for name, width in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if not 1 <= width <= MAX_HEAD_DIM or width % step:
            raise BadTensorShape(
                f"{name} is {width}; {dtype} needs a multiple of {step} from {step} to {MAX_HEAD_DIM}"
            )
    if heads_kv < 1 or heads_q < 1 or heads_q % heads_kv:
        raise BadTensorShape(
            f"q has {heads_q} heads, k has {heads_kv}; those of q must be a positive multiple of those of k"
        )
    for name, seqlen in (("q", seqlen_q), ("k", seqlen_kv)):
        if seqlen > MAX_SEQLEN:
            raise BadTensorShape(
                f"{name} has sequence length {seqlen}; the longest supported is {MAX_SEQLEN}"
            )
    out_shape = (*q.shape[:-1], head_dim_v)
    if out is not None and out.shape != out_shape:
        raise BadTensorShape(
            f"out has shape {out.shape}; expected that of q with the last dimension of v, {out_shape}"
        )
    return batch, seqlen_q, heads_q, head_dim, head_dim_v


def _check_strides(name: str, view: ArrayView, element_bytes: int) -> None:
    if 0 in view.shape:
        return
    if view.strides is None:
        raise BadTensorStrides(f"{name} has rows that do not start at a whole number of elements")
    if view.strides[-1] != 1:
        raise BadTensorStrides(
            f"{name} has strides {view.strides} (in elements); the last dimension must be contiguous"
        )
    for extent, stride in zip(view.shape[:-1], view.strides[:-1], strict=True):
        if extent > 1 and stride * element_bytes % ROW_ALIGNMENT:
            raise BadTensorStrides(
                f"{name} has strides {view.strides} (in elements); each row must start at a multiple of "
                f"{ROW_ALIGNMENT} bytes, that is {ROW_ALIGNMENT // element_bytes} elements"
            )
    if name == "out" and _shares_elements(view):
        raise BadTensorStrides(
            f"out has shape {view.shape} and strides {view.strides}: several elements share one address"
        )


def _shares_elements(view: ArrayView) -> bool:
    reach = 0
    pairs = sorted((abs(stride), extent) for extent, stride in zip(view.shape, view.strides, strict=True))
    for stride, extent in pairs:
        if extent > 1:
            if stride <= reach:
                return True
            reach += stride * (extent - 1)
    return False


def _mask_semantics(
    causal: bool,
    mask_type: int | str | None,
    window_size: tuple[int, int],
    has_mask: bool,
    seqlen_q: int,
    seqlen_kv: int,
) -> tuple[str, int, int, int]:
    name = _mask_type_name(mask_type)
    if causal:
        if name not in (None, "causal_bottom_right"):
            raise BadParam(f"causal=True means mask_type 'causal_bottom_right', but mask_type is {name!r}")
        name = "causal_bottom_right"
    if name is None:
        name = "dense" if has_mask else "none"
    if has_mask and name != "dense":
        raise BadParam(
            f"a mask was given, but {'causal=True' if causal else f'mask_type {name!r}'} takes none"
        )
    if name == "dense" and not has_mask:
        raise NullPointer("mask_type 'dense' needs mask, which is None")
    left, right = _window(window_size)
    windowed = (left, right) != (-1, -1)
    if windowed and name in ("dense", "causal_top_left"):
        raise BadParam(f"window_size is {(left, right)}, but mask_type {name!r} takes no window")
    if name == "causal_bottom_right":
        if right > 0:
            raise BadParam(
                f"window_size is {(left, right)}, but causal hides every later key: right must be 0 or -1"
            )
        right = 0
    elif name == "causal_top_left":
        return "local", 0, UNBOUNDED, 0
    elif name == "dense":
        return "dense", 0, UNBOUNDED, UNBOUNDED
    left = UNBOUNDED if left < 0 else min(left, UNBOUNDED)
    right = UNBOUNDED if right < 0 else min(right, UNBOUNDED)
    return "local", seqlen_kv - seqlen_q, left, right


def _mask_type_name(mask_type: int | str | None) -> str | None:
    if mask_type is None or mask_type in MASK_TYPES:
        return mask_type
    try:
        return MASK_TYPES[range(len(MASK_TYPES)).index(operator.index(mask_type))]
    except (TypeError, ValueError):
        allowed = ", ".join(f"{number} {name!r}" for number, name in enumerate(MASK_TYPES))
        raise BadParam(f"mask_type is {mask_type!r}; allowed are {allowed}") from None


def _window(window_size: Any) -> tuple[int, int]:
    try:
        left, right = (operator.index(side) for side in window_size)
    except (TypeError, ValueError):
        raise BadParam(
            f"window_size is {window_size!r}; expected two integers (left, right), -1 for no bound"
        ) from None
    if left < -1 or right < -1:
        raise BadParam(f"window_size is {(left, right)}; each side must be -1 (no bound), 0 or more")
    return left, right


def _scale(softmax_scale: float | None, head_dim: int) -> float:
    if softmax_scale is None:
        return head_dim**-0.5
    if not isinstance(softmax_scale, numbers.Real):
        raise BadParam(f"softmax_scale is {softmax_scale!r}; expected a number or None")
    scale = float(softmax_scale)
    # The running maximum is taken before scaling, so the scale must keep the order of the scores.
    if not 0.0 <= scale <= MAX_SCALE:
        raise BadParam(
            f"softmax_scale is {scale}; it must be finite in fp32 and not negative (negate q instead)"
        )
    return max(scale, MIN_SCALE)


def _mask_strides(mask: ArrayView, shape: tuple[int, int, int, int]) -> Strides:
    if mask.dtype not in ("bool", "uint8"):
        raise BadTensorDtype(
            f"mask has dtype {mask.dtype}; expected bool or uint8, nonzero where a key is hidden"
        )
    rank = len(mask.shape)
    fits = 1 <= rank <= 4 and mask.shape[-1] == shape[-1]
    for extent, full in zip(mask.shape[:-1], shape[4 - rank : -1], strict=False):
        fits = fits and extent in (1, full)
    if not fits:
        raise BadTensorShape(
            f"mask has shape {mask.shape}; it must broadcast, from the right, to (batch, num_heads_q, "
            f"seqlen_q, seqlen_kv) = {shape}, and its last dimension must be seqlen_kv itself"
        )
    if mask.shape[-1] > 1 and 0 not in mask.shape and (mask.strides is None or mask.strides[-1] != 1):
        raise BadTensorStrides(
            f"mask has strides {mask.strides} (in elements); its last dimension must be contiguous"
        )
    if 0 in mask.shape or mask.strides is None:
        return (0, 0, 0)
    return _strides((1,) * (4 - rank) + mask.shape, (0,) * (4 - rank) + mask.strides)


def _batched(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if len(shape) == 4 else (1, *shape)


def _view_strides(view: ArrayView) -> Strides:
    if 0 in view.shape or view.strides is None:
        return (0, 0, 0)
    strides = view.strides if len(view.shape) == 4 else (0, *view.strides)
    return _strides(_batched(view.shape), strides)


def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> Strides:
    """The leading three strides, with those that are never multiplied set to 0."""
    first, second, third = (
        stride if extent > 1 else 0 for extent, stride in zip(shape[:3], strides[:3], strict=True)
    )
    return first, second, third


def _extent(shape: tuple[int, ...], strides: Strides, size: int, row: int) -> tuple[int, int]:
    if 0 in shape or row == 0:
        return 0, 0
    steps = [(extent - 1) * stride * size for extent, stride in zip(shape, strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + row
