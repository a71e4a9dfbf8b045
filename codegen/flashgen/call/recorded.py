"""The calls of a run in a file: ``record`` writes them, and ``warmup``, ``flashgen bundle``, ``flashgen
tune`` and ``flashgen bench`` take the file as their list.

A call is there once for each layout of its arrays: shapes, strides, dtypes and options, no elements. Its
kernel follows from these on any GPU, also where it ran on the CPU.
"""

from __future__ import annotations

import atexit
import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.call import compute
from flashgen.call.text import VERSION, members, request_from
from flashgen.errors import BadParam, arg
from flashgen.host import forks
from flashgen.operators.arguments import DTYPE_BYTES, ArrayView, shown
from flashgen.operators.contract import DOUBLE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from flashgen.call.request import Request
    from flashgen.operators.operator import Problem

_KIND = "flashgen calls"
_lock = forks.guard()


class record:
    """Keep the calls of this process from now on, and write them to the file ``path``: at the end of a
    ``with`` block, by ``close()``, or when the process ends.

    >>> with flashgen.record("calls.json"):
    ...     serve_typical_requests()
    >>> flashgen.warmup("calls.json")

    Calls of all threads are kept: of ``attention``, ``attention_backward``, ``append``, ``merge``, of plans
    as they are made, and by autograd and the drop-ins. The file has each layout once. Raises BadParam for a
    path of another type, and while another recording is active; OSError if the path cannot be written. A call
    that the file cannot hold is left out, with a warning.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from flashgen.toolchain import atomic

        if not isinstance(path, str | os.PathLike):
            raise BadParam(
                f"{arg('path')} is {shown(path)}; expected the path of a file, such as 'calls.json'"
            )
        self.path = Path(path)
        atomic.check(self.path)
        self._entries: dict[str, None] = {}
        with _lock:
            if compute.observer is not None:
                raise BadParam("calls are being recorded already; close() that recording first")
            compute.forget()
            compute.observer = self._add
        atexit.register(self.close)

    def _add(self, request: Request, views: Mapping[str, ArrayView | None], problem: Problem) -> None:
        if problem.dtype == DOUBLE:  # which no kernel computes
            return
        try:
            entry = json.dumps(_entry(request, views))
        except (BadParam, TypeError) as error:
            warnings.warn(
                f"record() leaves out a call of {request.operator.name}, which its file cannot hold: {error}",
                stacklevel=2,
            )
            return
        with _lock:
            self._entries.setdefault(entry)

    def close(self) -> None:
        """Stop, and write the file. A second call does nothing."""
        from flashgen.toolchain import atomic

        with _lock:
            if compute.observer != self._add:
                return
            compute.observer = None
            calls = [json.loads(entry) for entry in self._entries]
        atexit.unregister(self.close)
        text = ",\n".join(f"  {json.dumps(call)}" for call in calls)
        atomic.replace(self.path, f'{{"kind": "{_KIND}", "calls": [\n{text}\n]}}\n'.encode())

    def __enter__(self) -> record:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _entry(request: Request, views: Mapping[str, ArrayView | None]) -> dict[str, Any]:
    """A call as JSON holds it. Raises BadParam for what JSON cannot hold."""
    arrays = {
        name: {"dtype": view.dtype, "shape": list(view.shape), "strides": list(view.strides or ())}
        for name, view in views.items()
        if view is not None
    }
    return members(request) | {"arrays": arrays}


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The calls in a file that ``record`` wrote. Raises BadParam for another file, and OSError."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["kind"] == _KIND:
            return list(content["calls"])
    except (ValueError, KeyError, TypeError):
        pass
    raise BadParam(f"{os.fspath(path)} holds no calls; expected a file that flashgen.record() wrote")


def is_recorded(call: Mapping[str, Any]) -> bool:
    """Whether a call of a list is one of `read`."""
    return "arrays" in call


def problem_of(call: Mapping[str, Any]) -> Problem:
    """The Problem of a recorded call on GPU 0. Raises BadParam for an entry that is damaged or of another
    version, and what the call would raise.
    """
    try:
        request = request_from(call)
        operator = request.operator
        views = [_view(call["arrays"].get(argument.name)) for argument in operator.arguments]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, BadParam) and call.get("version") == VERSION:
            raise
        raise BadParam(
            f"a recorded call of {call.get('operator')!r} is damaged, or of another version of flashgen "
            f"({type(error).__name__}: {error}); record it anew"
        ) from None
    return operator.normalise(views, request.options, request.scalars)


def _view(array: Mapping[str, Any] | None) -> ArrayView | None:
    if array is None:
        return None
    dtype = array["dtype"]
    if dtype not in DTYPE_BYTES:
        raise KeyError(dtype)
    return ArrayView("recorded", 256, tuple(array["shape"]), tuple(array["strides"]), dtype, 0)
