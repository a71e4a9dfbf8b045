"""What drop-ins refuse, so that nothing is lost without a word: some gradients, and dropout."""

from __future__ import annotations

import numbers
import sys
from typing import Any


def refuse_gradients(**arrays: Any) -> None:
    """Raise NotImplementedError, with the name, for a PyTorch tensor that wants a gradient of this call."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, x in arrays.items():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise NotImplementedError(
                f"{name} requires a gradient, which flashgen does not compute: call it under "
                f"torch.no_grad(), or pass {name}.detach()"
            )


def refuse_dropout(dropout_p: float) -> None:
    """Raise NotImplementedError unless the probability is 0."""
    if not isinstance(dropout_p, numbers.Real) or dropout_p != 0:
        raise NotImplementedError(f"dropout_p is {dropout_p!r}; flashgen has no dropout: pass 0.0")
