"""flashgen: attention kernels generated from YAML specs and Jinja templates, compiled when first needed.

>>> out = flashgen.attention(q, k, v, causal=True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flashgen.host import torchimport

if TYPE_CHECKING:
    from flashgen import distributed
    from flashgen.api.append import append
    from flashgen.api.append_and_attend import AppendPlan
    from flashgen.api.attention import attention, plan
    from flashgen.api.backward import attention_backward, plan_backward
    from flashgen.api.cascade import cascade
    from flashgen.api.explain import explain, warmup
    from flashgen.api.merge import merge
    from flashgen.api.quantize import quantize
    from flashgen.api.weights import WeightsPlan
    from flashgen.call.blockmask import BlockMask
    from flashgen.call.kvcache import KVCache, Rotary
    from flashgen.call.mask import Mask
    from flashgen.call.recorded import record
    from flashgen.errors import (
        BadParam,
        BadTensorDtype,
        BadTensorShape,
        BadTensorStrides,
        CacheWarning,
        CompileError,
        CompileWarning,
        DeviceTypeNotSupported,
        FlashgenError,
        GatherWarning,
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
        UnexpectedCompile,
    )
    from flashgen.operators.splits import SplitEvery
    from flashgen.runtime.plans import Plan
    from flashgen.toolchain.policy import compiling

__version__ = "0.2.0"

__all__ = [
    "AppendPlan",
    "BadParam",
    "BadTensorDtype",
    "BadTensorShape",
    "BadTensorStrides",
    "BlockMask",
    "CacheWarning",
    "CompileError",
    "CompileWarning",
    "DeviceTypeNotSupported",
    "FlashgenError",
    "GatherWarning",
    "InsufficientWorkspace",
    "InternalError",
    "KVCache",
    "Mask",
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
    "UnexpectedCompile",
    "WeightsPlan",
    "append",
    "attention",
    "attention_backward",
    "cascade",
    "compiling",
    "distributed",
    "explain",
    "merge",
    "plan",
    "plan_backward",
    "quantize",
    "record",
    "warmup",
]

_HOMES = {
    "AppendPlan": "flashgen.api.append_and_attend",
    "BlockMask": "flashgen.call.blockmask",
    "KVCache": "flashgen.call.kvcache",
    "Mask": "flashgen.call.mask",
    "Plan": "flashgen.runtime.plans",
    "Rotary": "flashgen.call.kvcache",
    "SplitEvery": "flashgen.operators.splits",
    "WeightsPlan": "flashgen.api.weights",
    "append": "flashgen.api.append",
    "attention": "flashgen.api.attention",
    "attention_backward": "flashgen.api.backward",
    "cascade": "flashgen.api.cascade",
    "compiling": "flashgen.toolchain.policy",
    "explain": "flashgen.api.explain",
    "merge": "flashgen.api.merge",
    "plan": "flashgen.api.attention",
    "plan_backward": "flashgen.api.backward",
    "quantize": "flashgen.api.quantize",
    "record": "flashgen.call.recorded",
    "warmup": "flashgen.api.explain",
}


torchimport.follow()


def __getattr__(name: str) -> Any:
    # Importing flashgen costs nothing that a caller does not go on to use.
    if name not in __all__:
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}")
    if name == "distributed":  # a room; its import sets the attribute
        return importlib.import_module("flashgen.distributed")
    value = getattr(importlib.import_module(_HOMES.get(name, "flashgen.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # What is imported here for this module's own use is no part of the package.
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
