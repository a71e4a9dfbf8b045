"""From a problem and a variant to a queued kernel: the grid, the parameter struct and the driver's launch
call."""

from __future__ import annotations

import ctypes
import math
import struct
import warnings
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from flashgen import dependent, tensormap
from flashgen.device import activated
from flashgen.device import device as device_of
from flashgen.dispatch import select
from flashgen.divisor import divisor
from flashgen.errors import BadTensorShape, CompileError, SpecError
from flashgen.params import TENSOR_MAP, layout
from flashgen.sections import blocks_at_a_time, sections
from flashgen.tiling import heads, row_blocks, rows_ahead, tiles
from flashgen.tuned import TunedWarning
from flashgen.variant import TUNED_TILE

if TYPE_CHECKING:
    from flashgen.arrays import Pointers
    from flashgen.device import Device
    from flashgen.kernel import Kernel
    from flashgen.plans import Arrays, Work
    from flashgen.problem import Problem
    from flashgen.variant import Variant

POINTERS = ("q", "k", "v", "mask", "out", "lse")
MAX_GRID = 2**31 - 1
_VECTOR_WIDTHS = {1: 1, 2: 1, 4: 4, 8: 8, 16: 16}


class Geometry(NamedTuple):
    """A one-dimensional launch: blocks, threads of a block, and dynamic shared memory of a block in bytes."""

    blocks: int
    threads: int
    smem_bytes: int


def geometry(problem: Problem, variant: Variant, device: Device) -> Geometry:
    """One block for each tile, or, with a persistent schedule, no more than run at a time.

    Raises BadTensorShape when there are more tiles than a grid can have.
    """
    blocks = tiles(problem, variant)
    if blocks > MAX_GRID:
        raise BadTensorShape(
            f"batch {problem.batch}, {problem.num_heads_q} heads and seqlen_q {problem.seqlen_q} make "
            f"{blocks} tiles, and one launch has at most {MAX_GRID}; split the batch"
        )
    if variant.schedule == "persistent":
        blocks = min(blocks, blocks_at_a_time(variant, device))
    return Geometry(blocks, variant.threads, variant.smem_bytes)


def parameters(problem: Problem, variant: Variant, device: Device) -> dict[str, int | float]:
    """Every value that a spec may name in ``params``, by name; pointers are 0.

    Strides are in elements (of the mask: bytes). ``scale_log2`` is the softmax scale times log2(e), for exp2.
    ``num_row_blocks`` is the tiles of one (batch, head). ``heads_per_section`` and ``num_sections`` are those
    of `flashgen.sections`; what ends in ``_divisor`` is a `flashgen.divisor`. ``mask_vector_width`` is the
    bytes of the mask, 1, 4, 8 or 16, that every row allows to load at once from an aligned pointer.
    """
    group = problem.group_size
    values: dict[str, int | float] = dict.fromkeys(POINTERS, 0)
    for name in ("num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v"):
        values[name] = getattr(problem, name)
    for array in ("q", "k", "v", "out"):
        strides = getattr(problem, f"{array}_strides")
        values |= zip(
            (f"{array}_batch_stride", f"{array}_row_stride", f"{array}_head_stride"), strides, strict=True
        )
    mask_strides = problem.mask_strides or (0, 0, 0)
    cut = sections(problem, variant, device)
    heads_in_grid = heads(problem, variant)
    last_section = heads_in_grid * problem.batch - (cut.count - 1) * cut.heads
    values |= zip(("mask_batch_stride", "mask_head_stride", "mask_row_stride"), mask_strides, strict=True)
    values |= {
        "batch_size": problem.batch,
        "group_size": group,
        "diagonal_offset": problem.diagonal_offset,
        "window_left": problem.window_left,
        "window_right": problem.window_right,
        "softmax_scale": problem.softmax_scale,
        "scale_log2": problem.softmax_scale * math.log2(math.e),
        "num_row_blocks": row_blocks(problem, variant),
        "rows_ahead": rows_ahead(problem, variant),
        "num_tiles": tiles(problem, variant),
        "heads_per_section": cut.heads,
        "num_sections": cut.count,
        # A grid without tiles is not launched, but it has a struct.
        "num_heads_divisor": divisor(max(1, heads_in_grid)),
        "group_size_divisor": divisor(group),
        "section_tiles_divisor": divisor(max(1, cut.heads * row_blocks(problem, variant))),
        "section_heads_divisor": divisor(cut.heads),
        "last_section_heads_divisor": divisor(max(1, last_section)),
        "mask_vector_width": vector_width(*mask_strides),
    }
    return values


def vector_width(*numbers: int) -> int:
    """The widest of 1, 4, 8 and 16 bytes that divides every number, be it an address or a stride."""
    bits = 16
    for number in numbers:
        bits |= number
    return _VECTOR_WIDTHS[bits & -bits]


class Launcher:
    """Queues one kernel for one problem; see ``plans.Runner``. Safe to call from many threads at once."""

    workspace_bytes = 0

    def __init__(self, problem: Problem, variant: Variant, device: Device, kernel: Kernel) -> None:
        from cupy_backends.cuda.api import driver

        grid = geometry(problem, variant, device)
        self.variant = variant
        self._kernel = kernel  # holds the module loaded
        self._template, self._pointer_slots, self._width = pack(problem, variant, device)
        self._maps = maps(problem, variant)
        self._encoded = False  # whether the template has these maps, of whatever address
        size, self._alignment = len(self._template), max(8, layout(variant.params).alignment)
        # A word for a pointer, and the struct at whatever aligned address comes next.
        self._memory = ctypes.c_uint64 * (1 + -(-(size + self._alignment) // 8))
        self._copy = struct.Struct(f"{size}s").pack_into
        self._mask_strides = problem.mask_strides or (0, 0, 0)
        self._device = device.ordinal
        with activated(device.ordinal) as context:
            self._context = context
        self._current_context = driver.ctxGetCurrent
        blocks, threads = (grid.blocks, 1, 1), (grid.threads, 1, 1)
        self._dependent = dependent.wanted(variant, device)
        if self._dependent:
            self._launch = dependent.bind(kernel.function_ptr, blocks, threads, grid.smem_bytes)
        else:
            shape = (*blocks, *threads, grid.smem_bytes)
            self._launch = partial(driver.launchKernel, kernel.function_ptr, *shape)

    @property
    def source(self) -> str:
        """The CUDA that runs."""
        from flashgen.render import render

        return render(self.variant)

    def at(self, pointers: Pointers) -> Work:
        """What queues the kernel with its parameter struct for arrays at ``pointers``."""
        # First the array of one pointer to the struct that the driver wants, then the struct. Both are only
        # read once they are filled in, so any number of calls may share them.
        memory = self._memory()
        argument = ctypes.addressof(memory)
        address = (argument + 8 + self._alignment - 1) & -self._alignment
        first = (address - argument) // 8
        memory[0] = address
        encoded = self._encoded  # read ahead of the template: another thread may just be changing both
        self._copy(memory, 8 * first, self._template)
        for word, position in self._pointer_slots:
            memory[first + word] = pointers[position]
        if self._width is not None:
            width = vector_width(pointers[3], *self._mask_strides)
            ctypes.c_int32.from_address(address + 4 * self._width).value = width
        if self._maps:
            self._map(address, pointers, encoded)
        # CuPy's function takes the array's address, that of a dependent launch the array.
        return partial(self._queue, memory, memory if self._dependent else argument)

    def _queue(self, memory: ctypes.Array, argument: int | ctypes.Array, arrays: Arrays, stream: int) -> None:
        if self._current_context() == self._context:
            self._launch(stream, argument, 0)
        else:
            # The thread's current device is another one, or it has not used CUDA yet.
            with activated(self._device):
                self._launch(stream, argument, 0)

    def _map(self, address: int, pointers: Pointers, encoded: bool) -> None:
        """Fill in the tensor maps of a struct: anew, or, where they are ``encoded``, for other addresses."""
        if self._current_context() != self._context:
            # The driver may refuse in a thread that has not used the device.
            with activated(self._device):
                self._map(address, pointers, encoded)
        elif encoded:
            for offset, position, _ in self._maps:
                tensormap.move(address + offset, pointers[position])
        else:
            for offset, position, map in self._maps:
                tensormap.encode(map, pointers[position], address + offset)
            self._template = ctypes.string_at(address, len(self._template))
            self._encoded = True


def pack(
    problem: Problem, variant: Variant, device: Device
) -> tuple[bytes, tuple[tuple[int, int], ...], int | None]:
    """The parameter struct without its pointers and tensor maps, and what a call has to fill in.

    Returns the bytes of the struct, the (8-byte word, position in POINTERS) of each pointer, and the 4-byte
    word of ``mask_vector_width`` or None; ``maps`` gives the tensor maps. Raises SpecError for a parameter
    that the launcher does not know or that overflows.
    """
    values = parameters(problem, variant, device)
    unknown = [param.name for param in variant.params if param.name not in values]
    if unknown:
        raise SpecError(
            f"{variant.spec}: params names {', '.join(unknown)}, which the launcher cannot give; "
            f"it knows {', '.join(sorted(values))}"
        )
    table = layout(variant.params)
    mapped = [param.name for param in variant.params if param.ctype == TENSOR_MAP]
    try:
        template = table.pack(values | dict.fromkeys(mapped, bytes(tensormap.BYTES)))
    except struct.error as error:
        raise SpecError(
            f"{variant.spec}: a parameter of {variant.name} does not hold its value: {error}"
        ) from error
    pointers = tuple(
        (table.offsets[name] // 8, position)
        for position, name in enumerate(POINTERS)
        if name in table.offsets and name not in mapped
    )
    width = table.offsets.get("mask_vector_width")
    return template, pointers, None if width is None else width // 4


def maps(problem: Problem, variant: Variant) -> tuple[tuple[int, int, tensormap.TensorMap], ...]:
    """The tensor maps in the parameter struct: for each its offset in bytes, the position in POINTERS of its
    array, and what it describes.

    Raises SpecError for an array that a tensor map cannot describe; dispatch does not choose such a variant.
    """
    offsets = layout(variant.params).offsets
    found = []
    for param in variant.params:
        if param.ctype == TENSOR_MAP:
            described = tensormap.describe(problem, variant, param)
            if described is None:
                raise SpecError(
                    f"{variant.name} needs, for its tensor map of {param.name}, {tensormap.REQUIREMENTS}"
                )
            found.append((offsets[param.name], POINTERS.index(param.name), described))
    return tuple(found)


def prepare(problem: Problem, device_ordinal: int, variants: tuple[Variant, ...]) -> Launcher:
    """Choose a variant for ``problem``, load its kernel (compiling it if no cache has it) and bind the two.

    A tile tuned on this machine that no longer compiles is passed over with a TunedWarning. Raises
    NoCompilerError, NoBindingError, DeviceTypeNotSupported, SpecError, CompileError or BadTensorShape.
    """
    from flashgen import kernel

    device = device_of(device_ordinal)
    variant = select(problem, device, variants)
    # Ahead of compiling: a grid that is too large, and a binding that is missing.
    geometry(problem, variant, device)
    if any(param.ctype == TENSOR_MAP for param in variant.params):
        tensormap.binding()
    try:
        loaded = kernel.load(variant, device)
    except CompileError as error:
        if variant.tile_name != TUNED_TILE:
            raise
        warnings.warn(
            f"{variant} was tuned on this machine and does not compile any more; the shipped tile serves. "
            f"`flashgen tune --select '{variant}' --write` measures anew. {error}",
            TunedWarning,
            stacklevel=2,
        )
        return prepare(problem, device_ordinal, tuple(v for v in variants if v != variant))
    return Launcher(problem, variant, device, loaded)
