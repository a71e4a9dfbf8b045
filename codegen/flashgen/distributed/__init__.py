"""Attention of sequences that are cut over ranks, on the process groups of PyTorch.

>>> out = flashgen.distributed.attention(q, k, v, group=group, causal=True)

PyTorch is imported with the first name that needs it; `partition` needs none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.distributed.attend import attention
    from flashgen.distributed.decoding import decode, local_lengths
    from flashgen.distributed.model import Partition, partition
    from flashgen.distributed.rates import Rates
    from flashgen.distributed.shards import positions, shard, unshard

__all__ = [
    "Partition",
    "Rates",
    "attention",
    "decode",
    "local_lengths",
    "partition",
    "positions",
    "shard",
    "unshard",
]

# No module has the name of a function: an import of the module would replace the function.
_HOMES = {
    "Partition": "model",
    "Rates": "rates",
    "attention": "attend",
    "decode": "decoding",
    "local_lengths": "decoding",
    "partition": "model",
    "positions": "shards",
    "shard": "shards",
    "unshard": "shards",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'flashgen.distributed' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"flashgen.distributed.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = f"flashgen.distributed.{name} needs PyTorch; pip install torch"
        raise ModuleNotFoundError(message, name="torch") from None
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
