"""flashgen: attention kernels generated from YAML specs and Jinja templates, compiled when first needed.

>>> out = flashgen.attention(q, k, v, causal=True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.api import attention, explain, plan, warmup
    from flashgen.appending import AppendPlan, append
    from flashgen.errors import (
        BadParam,
        BadTensorDtype,
        BadTensorShape,
        BadTensorStrides,
        CacheWarning,
        CompileError,
        DeviceTypeNotSupported,
        FlashgenError,
        InsufficientWorkspace,
        InternalError,
        NoBindingError,
        NoCompilerError,
        NoHostCompilerError,
        NullPointer,
        SimulationError,
        SpecError,
        TemplateWarning,
        TunedWarning,
    )
    from flashgen.kvcache import KVCache, Rotary
    from flashgen.operators.splits import SplitEvery
    from flashgen.parts import cascade, merge
    from flashgen.runtime.plans import Plan
    from flashgen.training import attention_backward, plan_backward

__version__ = "0.1.0"

__all__ = [
    "AppendPlan",
    "BadParam",
    "BadTensorDtype",
    "BadTensorShape",
    "BadTensorStrides",
    "CacheWarning",
    "CompileError",
    "DeviceTypeNotSupported",
    "FlashgenError",
    "InsufficientWorkspace",
    "InternalError",
    "KVCache",
    "NoBindingError",
    "NoCompilerError",
    "NoHostCompilerError",
    "NullPointer",
    "Plan",
    "Rotary",
    "SimulationError",
    "SpecError",
    "SplitEvery",
    "TemplateWarning",
    "TunedWarning",
    "append",
    "attention",
    "attention_backward",
    "cascade",
    "explain",
    "merge",
    "plan",
    "plan_backward",
    "warmup",
]

_HOMES = {
    "AppendPlan": "flashgen.appending",
    "KVCache": "flashgen.kvcache",
    "Plan": "flashgen.runtime.plans",
    "Rotary": "flashgen.kvcache",
    "SplitEvery": "flashgen.operators.splits",
    "append": "flashgen.appending",
    "attention": "flashgen.api",
    "attention_backward": "flashgen.training",
    "cascade": "flashgen.parts",
    "explain": "flashgen.api",
    "merge": "flashgen.parts",
    "plan": "flashgen.api",
    "plan_backward": "flashgen.training",
    "warmup": "flashgen.api",
}


def __getattr__(name: str) -> Any:
    # Importing flashgen costs nothing that a caller does not go on to use.
    if name not in __all__:
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "flashgen.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # What is imported here for this module's own use is no part of the package.
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
