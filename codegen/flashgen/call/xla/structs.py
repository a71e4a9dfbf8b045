"""The structs of XLA's foreign function interface (FFI), as ctypes.

They follow ``xla/ffi/api/c_api.h``, which jaxlib ships. Versions 0.3 and 0.4 of the interface lay out all
members that are here in the same way.
"""

from __future__ import annotations

import re
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from functools import cache
from pathlib import Path

# The versions whose structs these are.
SUPPORTED = ((0, 3), (0, 4))
# Members of enumerations: types of extensions, stages, types of attributes, codes of errors, traits.
METADATA, INITIALIZE, EXECUTE, STRING = 1, 2, 3, 4
INVALID_ARGUMENT, INTERNAL = 3, 13
COMMAND_BUFFER_COMPATIBLE = 1


class Extension(Structure):
    """XLA_FFI_Extension_Base; since 0.4 XLA_FFI_InternalExtension."""


Extension._fields_ = [("struct_size", c_size_t), ("type", c_int), ("next", POINTER(Extension))]


class Version(Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("major_version", c_int),
        ("minor_version", c_int),
    ]


class Metadata(Structure):
    """XLA_FFI_Metadata."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("api_version", Version),
        ("traits", c_uint32),
        ("state_type_id", c_int64),
    ]


class MetadataExtension(Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = [("extension_base", Extension), ("metadata", POINTER(Metadata))]


class ErrorArguments(Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("message", c_char_p),
        ("errc", c_int),
    ]


class StreamArguments(Structure):
    """XLA_FFI_Stream_Get_Args."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("ctx", c_void_p),
        ("stream", c_void_p),
    ]


class OrdinalArguments(Structure):
    """XLA_FFI_DeviceOrdinal_Get_Args."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("ctx", c_void_p),
        ("device_ordinal", c_int32),
    ]


ErrorCreate = CFUNCTYPE(c_void_p, POINTER(ErrorArguments))
StreamGet = CFUNCTYPE(c_void_p, POINTER(StreamArguments))
OrdinalGet = CFUNCTYPE(c_void_p, POINTER(OrdinalArguments))


class Api(Structure):
    """XLA_FFI_Api. Members that nothing here calls are plain pointers."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("api_version", Version),
        ("internal_api", c_void_p),
        ("XLA_FFI_Error_Create", ErrorCreate),
        ("error_message", c_void_p),
        ("XLA_FFI_Error_Destroy", c_void_p),
        ("XLA_FFI_Handler_Register", c_void_p),
        ("XLA_FFI_Stream_Get", StreamGet),
        ("XLA_FFI_Type_Register", c_void_p),
        ("context_get", c_void_p),
        ("XLA_FFI_State_Set", c_void_p),
        ("XLA_FFI_State_Get", c_void_p),
        ("XLA_FFI_DeviceMemory_Allocate", c_void_p),
        ("XLA_FFI_DeviceMemory_Free", c_void_p),
        ("XLA_FFI_ThreadPool_Schedule", c_void_p),
        ("XLA_FFI_ThreadPool_NumThreads", c_void_p),
        ("XLA_FFI_Future_Create", c_void_p),
        ("XLA_FFI_Future_SetAvailable", c_void_p),
        ("XLA_FFI_Future_SetError", c_void_p),
        ("XLA_FFI_RunId_Get", c_void_p),
        ("XLA_FFI_DeviceOrdinal_Get", OrdinalGet),
    ]


class ByteSpan(Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = [("ptr", c_void_p), ("len", c_size_t)]


class Buffer(Structure):
    """XLA_FFI_Buffer."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    ]


class Arguments(Structure):
    """XLA_FFI_Args; XLA_FFI_Rets has the same layout, with ``rets`` for ``args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("args", POINTER(c_void_p)),
    ]


class Attributes(Structure):
    """XLA_FFI_Attrs."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("names", POINTER(POINTER(ByteSpan))),
        ("attrs", POINTER(c_void_p)),
    ]


class CallFrame(Structure):
    """XLA_FFI_CallFrame, without ``future`` at its end, which a handler may leave alone."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", POINTER(Extension)),
        ("api", POINTER(Api)),
        ("ctx", c_void_p),
        ("stage", c_int),
        ("args", Arguments),
        ("rets", Arguments),
        ("attrs", Attributes),
    ]


Handler = CFUNCTYPE(c_void_p, POINTER(CallFrame))


@cache
def shipped_version(folder: str) -> tuple[int, int] | None:
    """The version of the interface that the headers of jaxlib in `jax.ffi.include_dir` have, None without."""
    try:
        text = (Path(folder) / "xla" / "ffi" / "api" / "c_api.h").read_text(encoding="utf-8")
    except OSError:
        return None
    numbers = [re.search(rf"^#define XLA_FFI_API_{name} (\d+)", text, re.M) for name in ("MAJOR", "MINOR")]
    major, minor = (int(number[1]) if number else -1 for number in numbers)
    return (major, minor)
