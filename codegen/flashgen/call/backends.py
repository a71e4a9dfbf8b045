"""Which backend computes a call, and which specs it chooses among."""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING

from flashgen.errors import (
    BadParam,
    BadTensorDtype,
    CompileError,
    DeviceTypeNotSupported,
    InternalError,
    TunedWarning,
    arg,
)
from flashgen.families.arch import KNOWN_ARCHS, typical
from flashgen.host import logs
from flashgen.operators.arguments import on_device, shown
from flashgen.operators.contract import DOUBLE
from flashgen.operators.rules import LISTING
from flashgen.operators.splits import AUTO

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashgen.errors import FlashgenError
    from flashgen.families.arch import Device
    from flashgen.families.model import Spec
    from flashgen.operators.operator import Problem
    from flashgen.runtime.plans import Runner
    from flashgen.schedule.plan import Steps

BACKENDS = ("cuda", "cpu", "simulator")
_ON_HOST = ("cpu", "simulator")

_log = logs.logger("runtime")


def backend_for(device: int | None, backend: str | None = None) -> str:
    """The backend that computes arrays on ``device``, a CUDA ordinal or None for host memory.

    It is ``backend``, else FLASHGEN_BACKEND, else the CPU path in host memory and CUDA on a GPU.
    Raises BadParam for an unknown name, DeviceTypeNotSupported for a backend that cannot reach the arrays:
    flashgen does not copy them.
    """
    chosen = (os.environ.get("FLASHGEN_BACKEND") or None) if backend is None else backend
    of_device = "cpu" if device is None else "cuda"
    if chosen is None:
        return of_device
    if not isinstance(chosen, str) or chosen not in BACKENDS:
        of_environment = isinstance(chosen, str) and chosen == os.environ.get("FLASHGEN_BACKEND")
        name = "FLASHGEN_BACKEND" if of_environment else "backend"
        raise BadParam(f"{arg(name)} is {shown(chosen)}; allowed are {', '.join(map(repr, BACKENDS))}")
    if chosen != of_device and not (device is None and chosen in _ON_HOST):
        place = on_device(device)
        raise DeviceTypeNotSupported(f"backend {chosen!r} cannot compute arrays {place}; copy them first")
    return chosen


def runner_for(problem: Problem, backend: str | None, algorithm: str | None) -> Runner:
    """The runner of a problem, with its kernels. Raises as `backend_for` and `prepare`."""
    chosen = backend_for(problem.device, backend)
    folders = os.environ.get("FLASHGEN_SPECS", "")
    if chosen == "cpu":
        from flashgen.cpu import runner_of

        if folders:
            _specs(folders)  # raises the errors of these specs, though no kernel is needed
        if algorithm is not None:
            from flashgen.schedule.dispatch import named

            named(problem, _specs(folders), algorithm)  # raises for an unknown name
        if problem.splits not in (AUTO, 1):
            from flashgen.schedule.dispatch import candidates, offers

            # Raises for splits that no kernel makes. Kernels that split keys run on every GPU.
            any_gpu = typical(KNOWN_ARCHS[0])
            candidates(problem, any_gpu, offers(problem, any_gpu, _specs(folders), algorithm))
        return runner_of(problem.operator.name)
    if problem.dtype == DOUBLE:
        raise BadTensorDtype(
            f"{arg('q')} has dtype {DOUBLE}, which no kernel computes; backend {chosen!r} takes fp16, bf16 "
            "and fp32: cast, or use backend 'cpu'"
        )
    _refuse_line(problem)
    if chosen == "simulator":
        from flashgen.simulator.backend import prepare as simulated

        return simulated(problem, _specs(folders), algorithm)
    from flashgen.runtime.device import device
    from flashgen.schedule.dispatch import offers
    from flashgen.schedule.plan import choices

    here = device(problem.device)
    offered = offers(problem, here, specs_of(problem, here), algorithm)
    runner = prepare(choices(problem, here, offered), here)
    runner.offered = offered
    return runner


def _refuse_line(problem: Problem) -> None:
    """Raise DeviceTypeNotSupported if no kernel has the call's mask by a line with its other features."""
    if problem.rule is None:
        return
    if problem.has("dropout_seed") and problem.lengths_on_device:
        raise DeviceTypeNotSupported(
            f"{arg('mask')} is a Mask, {problem.rule.rule.title}, of sequences of several lengths, and no "
            f"kernel takes one with {arg('dropout_p')}: the CPU path does, for arrays in host memory; on a "
            "GPU leave one out, or pass sequences of one length, whose line says where they begin and end"
        )
    if problem.lengths_on_device and problem.operator.differentiates:
        from flashgen.call.packedmask import refuse_gradients

        refuse_gradients(problem.rule.rule)


def prepare(choices: Iterable[Steps], device: Device) -> Runner:
    """The first of the choices of dispatch whose kernels can be loaded, compiling what no cache has.

    A tile tuned on this machine that no longer compiles is skipped with a TunedWarning. A kernel whose
    clusters do not fit on the device, for example on a slice of a GPU, is skipped without a warning. Raises
    NoCompilerError, NoBindingError, DeviceTypeNotSupported, CompileError, and the errors of ``choices``.
    """
    from flashgen.families.variant import TUNED_TILE
    from flashgen.runtime.clusters import NoRoomForClusters
    from flashgen.runtime.launch import bind

    failure: FlashgenError = InternalError("dispatch made no choice")
    for steps in choices:
        try:
            return bind(steps, device)
        except NoRoomForClusters as error:
            failure = error
            _log.info("%s; choosing among the other kernels", error)
        except CompileError as error:
            if steps.main.tile_name != TUNED_TILE:
                raise
            failure = error
            warnings.warn(
                f"{steps.main} was tuned on this machine and does not compile any more; the shipped tile is "
                f"used. `flashgen tune --select '{steps.main}' --write` measures anew. {error}",
                TunedWarning,
                stacklevel=2,
            )
    raise failure


def specs_of(problem: Problem, device: Device) -> tuple[Spec, ...]:
    """The specs for calls of this problem, with the specs that list the blocks of its mask by a line."""
    specs = specs_for(device, problem.operator.name, problem.lengths_on_device)
    if problem.rule is None or problem.lengths_on_device or any(spec.operator == LISTING for spec in specs):
        return specs
    return (*specs, *specs_for(device, LISTING, has_lengths=False))


def specs_for(
    device: Device, operator: str | None = None, has_lengths: bool | None = None
) -> tuple[Spec, ...]:
    """The specs for calls on a device, with its tuned tiles: all specs, or the specs of an operator, for
    calls with lengths, without them, or (None) both. Other specs are not read, so the first call of a process
    does not wait for them. Folders of the caller are always read whole.
    """
    folders, tuned = os.environ.get("FLASHGEN_SPECS", ""), os.environ.get("FLASHGEN_TUNED", "")
    return _specs(folders, tuned, device.name, None if folders else operator, has_lengths)


@lru_cache(maxsize=32)
def _specs(
    folders: str,
    tuned: str = "",
    gpu: str | None = None,
    operator: str | None = None,
    has_lengths: bool | None = None,
) -> tuple[Spec, ...]:
    """The shipped specs and those in ``folders``, with what is tuned for ``gpu``; ``folders`` and ``tuned``
    are the values of FLASHGEN_SPECS and FLASHGEN_TUNED. Read once for each set of these."""
    from flashgen.families.load import load_specs
    from flashgen.toolchain import cache as caches

    specs = load_specs(cache=caches.default(), gpu=gpu, operator=operator, has_lengths=has_lengths)
    if folders:
        from flashgen.source.render import warn_of_unused_overrides

        warn_of_unused_overrides(specs)
    return specs
