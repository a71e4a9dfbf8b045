"""What flashgen does as soon as PyTorch is imported, before or after flashgen: ``torch.ops.flashgen`` finds
operators, for which no room is imported until one is looked up, and tensors are known as arrays.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from flashgen.host.libraryimport import after_import

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
    """Prepare PyTorch, now if it is imported already, else once it is."""
    after_import("torch", _imported)


def is_file_of(file: str, module: str) -> None:
    """Tell ``inspect`` of which module a file is, before the module registers operators.

    PyTorch notes where an operator is registered, by ``inspect``, which asks every module for its file. That
    loads the modules that load when they are first used: CuPy's cupyx, and with it SciPy and pytest.
    """
    # As inspect writes it, which does not follow links.
    inspect.modulesbyfile.setdefault(os.path.normcase(os.path.abspath(file)), module)  # noqa: PTH100


def _imported() -> None:
    import torch  # waits for another thread that is importing it

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
