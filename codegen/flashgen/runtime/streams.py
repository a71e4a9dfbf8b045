"""CUDA streams as callers have them: of CuPy, of PyTorch, of anybody who has a handle."""

from __future__ import annotations

import operator
from typing import Any

from flashgen.errors import BadParam


def stream_pointer(stream: Any) -> int:
    """The CUDA handle of a stream of CuPy, of PyTorch, or with ``__cuda_stream__``; or of a handle itself."""
    for attribute in ("ptr", "cuda_stream"):
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return int(handle)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    try:
        return operator.index(stream)
    except TypeError:
        raise BadParam(
            f"stream is {stream!r}; expected None, a CuPy or PyTorch stream, or the handle of a CUDA stream"
        ) from None


class StreamHandle:
    """The handle of a CUDA stream in the form of the stream protocol. Who made the stream keeps it alive."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
