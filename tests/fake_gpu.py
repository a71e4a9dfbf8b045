"""A GPU that keeps what it is asked to launch, for tests of the way there on machines without one."""

import ctypes
import threading
import time
from types import SimpleNamespace

import numpy as np

from flashgen.families.arch import Device
from flashgen.source.params import layout

H200 = Device(0, "sm_90", (9, 0), 132, 232448, 233472, 50 << 20, 4917, "NVIDIA H200")


class Driver:
    """Stands in for CUDA. ``launches`` has (function, shape of the launch, stream, the parameter struct's
    bytes at the start and at the end of the call, the context that was current). Device n has context
    1000 + n. ``dependent`` has the attributes of each launch that had a configuration, as {id: value}.
    """

    def __init__(self):
        self.launches = []
        self.dependent = []
        self.version = 13000
        self.status = 0
        self.variants = {}
        self.current = {}
        self.delay = 0.0

    def add(self, variant):
        """The function of a variant's kernel."""
        function = 77 + len(self.variants)
        self.variants[function] = variant
        return function

    def load(self, variant, device):
        """For ``kernel.load``."""
        return SimpleNamespace(variant=variant, function_ptr=self.add(variant))

    def launch(self, function, gx, gy, gz, bx, by, bz, smem, stream, kernel_params, extra):
        address = ctypes.c_void_p.from_address(kernel_params).value
        table = layout(self.variants[function].params)
        size = table.size
        assert address % table.alignment == 0
        before = ctypes.string_at(address, size)
        time.sleep(self.delay)  # the real call drops the GIL
        after = ctypes.string_at(address, size)
        shape = ((gx, gy, gz), (bx, by, bz), smem)
        self.launches.append((function, shape, stream, before, after, self.context()))

    def launch_dependently(self, config, kernel, arguments, extra):
        """For ``cuLaunchKernelEx``, with its arguments as ctypes would hand them over."""
        assert extra is None
        (one,) = config
        attributes = one.attributes[: one.num_attributes]
        self.dependent.append({attribute.id: attribute.value for attribute in attributes})
        shape = (*one.grid, *one.block, one.shared_bytes)
        self.launch(kernel.value, *shape, one.stream or 0, ctypes.addressof(arguments), 0)
        return self.status

    def members(self, index=-1):
        """The parameter struct of a launch, by name."""
        function, _, _, seen, *_ = self.launches[index]
        return np.frombuffer(seen, layout(self.variants[function].params).dtype)[0]

    def context(self):
        return self.current.get(threading.get_ident(), 0)

    def set_device(self, ordinal):
        self.current[threading.get_ident()] = 1000 + ordinal

    def get_device(self):
        return max(self.context() - 1000, 0)


def array(shape, dtype=np.float16, address=1 << 40, strides=None, device=0):
    """A CuPy array that only looks as if it had memory."""
    import cupy

    memory = cupy.cuda.UnownedMemory(address, 1 << 30, None, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


class Memory:
    """Addresses that CuPy's allocator hands out, one behind the other, with nothing behind them."""

    def __init__(self):
        self._end = 1 << 40

    def __enter__(self):
        import cupy

        self._before = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(self._allocate)
        return self

    def __exit__(self, *_):
        import cupy

        cupy.cuda.set_allocator(self._before)

    def _allocate(self, size):
        import cupy

        address, self._end = self._end, self._end + -(-size // 256) * 256
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, size, None, 0), 0)

    def array(self, shape, dtype):
        """An array of these elements, of NumPy or by flashgen's name for them."""
        import cupy
        import ml_dtypes

        names = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
        return cupy.empty(shape, names.get(dtype, dtype) if isinstance(dtype, str) else dtype)


class Binding(dict):
    """Stands in for `tensormap.binding`. An encoded map begins with the address of its array.

    ``calls`` has the arguments of each encoding but its place, with lists for arrays, ``moves`` the address
    of each replacement.
    """

    def __init__(self, status=0):
        super().__init__(cuTensorMapEncodeTiled=self.encode, cuTensorMapReplaceAddress=self.replace)
        self.status, self.calls, self.moves = status, [], []

    def encode(self, place, kind, rank, pointer, *arguments):
        assert place % 64 == 0
        self.calls.append((kind, rank, pointer, *(x if isinstance(x, int) else list(x) for x in arguments)))
        (ctypes.c_uint64 * 16).from_address(place)[:] = [pointer, *range(1, 16)]
        return self.status

    def replace(self, place, pointer):
        assert place % 64 == 0
        words = (ctypes.c_uint64 * 16).from_address(place)
        assert words[1:] == list(range(1, 16)), "nothing was encoded here"
        words[0] = pointer
        self.moves.append(pointer)
        return self.status
