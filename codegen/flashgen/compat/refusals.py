"""What drop-ins refuse, so that nothing is lost silently: some gradients and results."""

from __future__ import annotations

import numbers
from typing import Any

from flashgen.operators.arguments import shown
from flashgen.runtime.arrays import tensor_kind


def refuse_gradients(**arrays: Any) -> None:
    """Raise NotImplementedError, with the name, for a PyTorch tensor that wants a gradient of this call."""
    for name, x in arrays.items():
        kind = tensor_kind(x)
        if kind is not None and x.requires_grad and kind.torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} requires a gradient, which flashgen does not compute: call it under "
                f"torch.no_grad(), or pass {name}.detach()"
            )


def refuse_dropout(dropout_p: float) -> None:
    """Raise NotImplementedError unless the probability is 0."""
    if not isinstance(dropout_p, numbers.Real) or dropout_p != 0:
        raise NotImplementedError(f"dropout_p is {shown(dropout_p)}; this call takes no dropout: pass 0.0")


def refuse_probabilities(return_attn_probs: Any, dropout_p: Any) -> None:
    """Raise NotImplementedError for what flash-attn returns of a call with dropout alone."""
    if return_attn_probs and isinstance(dropout_p, numbers.Real) and dropout_p > 0:
        raise NotImplementedError(
            f"return_attn_probs is True and dropout_p is {shown(dropout_p)}; flashgen has no S_dmask, the "
            "probabilities whose signs say what is dropped: leave one of the two out"
        )
