"""The GPU that a simulated launch pretends to run on: what dispatch and the launcher want to know of it."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from flashgen.errors import BadParam
from flashgen.families.arch import KNOWN_ARCHS, typical

if TYPE_CHECKING:
    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant

DEFAULT_ARCH = "sm_80"
ARCH_VARIABLE = "FLASHGEN_SIMULATOR_ARCH"


def pretend(arch: str | None = None) -> Device:
    """The device of ``arch``; None: FLASHGEN_SIMULATOR_ARCH, else sm_80. Raises BadParam where it is
    not known.
    """
    told = None if arch else os.environ.get(ARCH_VARIABLE)
    arch = arch or told or DEFAULT_ARCH
    if arch not in KNOWN_ARCHS:
        where = f"{ARCH_VARIABLE} is {arch!r}, which" if told else f"{arch} is what"
        raise BadParam(f"{where} the simulator cannot pretend to be; it knows {', '.join(KNOWN_ARCHS)}")
    device = typical(arch)
    return dataclasses.replace(device, name=f"simulated {device.name}")


def pretend_for(variant: Variant) -> Device:
    """The device of the variant's own architecture where the simulator knows it; else as ``pretend``."""
    arch = variant.min_arch.rstrip("af")
    return pretend(arch if arch in KNOWN_ARCHS else None)
