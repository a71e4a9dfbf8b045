"""What flashgen does as soon as PyTorch is imported, before or after flashgen: ``torch.ops.flashgen`` finds
operators, for which no room is imported until one is looked up, and tensors are known as arrays.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

# The module that registers each operator.
OPERATORS = {
    "append": "flashgen.call.compiled",
    "attention": "flashgen.call.autograd",
    "attention_backward": "flashgen.call.autograd",
    "attention_backward_into": "flashgen.call.compiled",
    "attention_into": "flashgen.call.compiled",
    "attention_weights": "flashgen.call.compiled",
    "distributed_attention": "flashgen.distributed.operators",
    "distributed_attention_backward": "flashgen.distributed.operators",
    "merge": "flashgen.call.compiled",
    "quantize": "flashgen.call.compiled",
    "score_gradient": "flashgen.call.autograd",
}


def follow() -> None:
    """Do so now, where PyTorch is imported already, or once it is."""
    if sys.modules.get("torch") is None:
        sys.meta_path.insert(0, _Finder())
    else:
        _imported()


class _Finder:
    """Finds PyTorch as the other finders do, and adds `_imported` to the end of its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _imported()

            spec.loader.exec_module = exec_module
        return spec


def _imported() -> None:
    import torch  # another thread may still be at it

    if not hasattr(torch, "ops"):  # flashgen is imported by a part of PyTorch's own import
        return
    _name_operators(torch)
    arrays = sys.modules.get("flashgen.runtime.arrays")
    if arrays is not None:
        arrays.know_tensors()


def _name_operators(torch: Any) -> None:
    """Have ``torch.ops.flashgen`` import what registers an operator, when it is looked up first."""

    class Operators(torch._ops._OpNamespace):
        __module__ = torch._ops._OpNamespace.__module__  # part of the operators' names in saved programs

        def __getattr__(self, name: str) -> Any:
            home = OPERATORS.get(name)
            if home is not None and home not in sys.modules:  # else it may be registering right now
                importlib.import_module(home)
            return super().__getattr__(name)

    torch.ops.flashgen = Operators("flashgen")
