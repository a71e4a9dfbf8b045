"""The handler that XLA calls: functions of its foreign function interface, in Python by ctypes.

XLA calls one in its threads, which hold no lock of Python; ctypes takes it. XLA keeps the addresses of the
handlers for as long as the process lives, so they are never collected.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from flashgen.call.xla import pending, structs
from flashgen.call.xla.execution import execution
from flashgen.errors import FlashgenError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashgen.call.xla.execution import Execution

# The name of the handler in programs of XLA, and the name of its attribute.
TARGET, ATTRIBUTE = "flashgen", "call"
_ADDRESS = ctypes.c_void_p
_DATA = structs.Buffer.data.offset


def _answer(frame: Any, traits: int) -> None:
    """Tell XLA, while it registers the handler, the handler's version and traits."""
    extension = frame.extension_start
    if extension.contents.type != structs.METADATA:
        raise InternalError(f"XLA has an extension of type {extension.contents.type}, which is unknown here")
    metadata = ctypes.cast(extension, ctypes.POINTER(structs.MetadataExtension)).contents.metadata.contents
    version = structs.SUPPORTED[-1]
    if frame.api:
        api = frame.api.contents.api_version
        version = min(version, (api.major_version, api.minor_version))
    metadata.api_version.major_version, metadata.api_version.minor_version = version
    metadata.traits = traits


def _text(frame: Any) -> bytes:
    """The text of the call, the one attribute of its type."""
    attributes = frame.attrs
    for place in range(attributes.size):
        if attributes.types[place] == structs.STRING:
            span = structs.ByteSpan.from_address(attributes.attrs[place])
            return ctypes.string_at(span.ptr, span.len)
    raise InternalError("a call of flashgen in a program of XLA has no text")


def _pointers(buffers: Any) -> list[int]:
    items = buffers.args
    return [_ADDRESS.from_address(items[place] + _DATA).value or 0 for place in range(buffers.size)]


def _run(frame: Any, call: Execution, stream: int) -> None:
    outputs, workspace = _pointers(frame.rets), (0, 0)
    if len(outputs) > call.result_count:
        last = structs.Buffer.from_address(frame.rets.args[call.result_count])
        workspace = outputs.pop(), last.dims[0]
    call.run(_pointers(frame.args), outputs, stream, workspace)


def _on_host(frame: Any) -> None:
    with pending.call("cpu"):
        _run(frame, execution(_text(frame), None), 0)


def _on_gpu(frame: Any) -> None:
    """Compile and load kernels in the stage before the first execution, then only launch: so XLA may record
    an execution in a CUDA graph.
    """
    api = frame.api.contents
    ordinal = structs.OrdinalArguments(ctypes.sizeof(structs.OrdinalArguments), None, frame.ctx)
    _raise(api.XLA_FFI_DeviceOrdinal_Get(ctypes.byref(ordinal)), "the device")
    with pending.call("cuda"):
        call = execution(_text(frame), ordinal.device_ordinal)
        if frame.stage == structs.INITIALIZE:
            call.load()
            return
        stream = structs.StreamArguments(ctypes.sizeof(structs.StreamArguments), None, frame.ctx)
        _raise(api.XLA_FFI_Stream_Get(ctypes.byref(stream)), "the stream")
        _run(frame, call, stream.stream or 0)


def _raise(error: int | None, what: str) -> None:
    if error:
        raise InternalError(f"XLA does not say {what} of a call")


def _error(frame: Any, error: BaseException) -> int:
    """XLA's form of an error, which JAX raises with this message."""
    message = f"flashgen: {type(error).__name__}: {error}".encode()
    is_argument = isinstance(error, FlashgenError) and isinstance(error, ValueError)
    code = structs.INVALID_ARGUMENT if is_argument else structs.INTERNAL
    arguments = structs.ErrorArguments(ctypes.sizeof(structs.ErrorArguments), None, message, code)
    return frame.api.contents.XLA_FFI_Error_Create(ctypes.byref(arguments))


def _handler(work: Callable[[Any], None], traits: int) -> Any:
    def handle(pointer: Any) -> int | None:
        frame = pointer.contents
        try:
            if frame.extension_start:
                _answer(frame, traits)
            else:
                work(frame)
        except BaseException as error:  # noqa: BLE001  # nothing passes through XLA but its own errors
            return _error(frame, error)
        return None

    return structs.Handler(handle)


ON_HOST = _handler(_on_host, 0)
ON_GPU = _handler(_on_gpu, structs.COMMAND_BUFFER_COMPATIBLE)


def register(jax: Any) -> None:
    """Tell JAX of the handlers."""

    def capsule(handler: Any) -> Any:
        return jax.ffi.pycapsule(ctypes.cast(handler, ctypes.c_void_p).value)

    jax.ffi.register_ffi_target(TARGET, capsule(ON_HOST), platform="cpu")
    on_gpu = {"initialize": capsule(ON_GPU), "execute": capsule(ON_GPU)}
    jax.ffi.register_ffi_target(TARGET, on_gpu, platform="CUDA")


def call_back(text: bytes, on_gpu: bool, context: Any, outputs: Any, *inputs: Any) -> None:
    """The call by `jax.experimental.buffer_callback`: buffers have addresses, and on a GPU ``context`` has
    the stream.
    """
    with pending.call("cuda" if on_gpu else "cpu"):
        call = execution(text, inputs[0].__dlpack_device__()[1] if on_gpu else None)
        if on_gpu and context.stage.name == "INITIALIZE":
            call.load()
            return
        addresses = [_address(x, on_gpu) for x in outputs]
        workspace = (0, 0)
        if len(addresses) > call.result_count:
            workspace = addresses.pop(), outputs[-1].shape[0]
        stream = context.stream if on_gpu else 0
        call.run([_address(x, on_gpu) for x in inputs], addresses, stream, workspace)


def _address(buffer: Any, on_gpu: bool) -> int:
    if on_gpu:
        return buffer.__cuda_array_interface__["data"][0]
    import numpy as np

    return np.asarray(buffer).__array_interface__["data"][0]
