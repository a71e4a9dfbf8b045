"""flashgen as an implementation in PyTorch's registry of flash attention (``torch.nn.attention``).

`library` registers kernels for PyTorch's own operators of flash attention, forward and backward. Whatever
dispatches to these operators then runs flashgen: ``scaled_dot_product_attention``, ``varlen_attn``, and what
is built on them. The kernels are called below autograd, with tensors in memory.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from flashgen.compat import torch_operators
from flashgen.errors import naming

if TYPE_CHECKING:
    from collections.abc import Callable


# What errors of ``attention`` call arguments, in the words of PyTorch's operators.
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "dout": "grad_out",
    "lse": "logsumexp",
    "softmax_scale": "scale",
    "window_size": "window_size_left, window_size_right",
    "cu_seqlens_q": "cum_seq_q",
    "cu_seqlens_kv": "cum_seq_k",
    "kv_lengths": "seqused_k",
    "lengths": "seqused_k",
    "pages": "block_table",
    "max_seqlen_q": "max_q",
    "max_seqlen_kv": "max_k",
    "splits": "num_splits",
    "one split": "1, or None to let flashgen choose",
    "mask": "attn_mask",
    "bias": "attn_mask",
    "dropout_seed": "rng_state",
    "q_scale": "q_descale",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}


class Handle:
    """What the registry keeps while flashgen is active."""

    def __init__(self, kernels: torch.library.Library) -> None:
        self._kernels: torch.library.Library | None = kernels

    def remove(self) -> None:
        """Give the operators back to PyTorch's kernels."""
        self._kernels = None  # a Library removes its kernels with itself


def library(cpu: bool) -> Handle:
    """The kernels for CUDA tensors; with ``cpu`` also for tensors in host memory."""
    kernels = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        _implement(kernels, cpu)
    return Handle(kernels)


def _implement(kernels: torch.library.Library, cpu: bool) -> None:
    for name, function in _KERNELS.items():
        if not _is_operator(name):  # the one in place comes with 2.12
            continue
        kernels.impl(name, function, "CUDA")
        if cpu:
            kernels.impl(name, function, "CPU")
    if cpu:
        for name, function in _CPU_KERNELS.items():
            kernels.impl(name, function, "CPU")


def _is_operator(name: str) -> bool:
    """Whether PyTorch has the operator, "name" or "name.overload"."""
    name, _, overload = name.partition(".")
    operator = getattr(torch.ops.aten, name, None)
    return operator is not None and (not overload or overload in operator.overloads())


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as a kernel: it records nothing, and errors have the names of PyTorch's operators."""

    def kernel(*args: Any, **options: Any) -> Any:
        with torch.no_grad(), naming(_NAMES):
            return function(*args, **options)

    kernel.__name__ = function.__name__
    return kernel


# PyTorch's operators of flash attention, for tensors of any device, and those for tensors in host memory.
_KERNELS = {
    "_flash_attention_forward": _kernel(torch_operators.flash_attention_forward),
    "_flash_attention_forward_no_dropout_inplace": _kernel(torch_operators.attend_varlen),
    "_flash_attention_backward": _kernel(torch_operators.flash_attention_backward),
    "_scaled_dot_product_flash_attention": _kernel(torch_operators.scaled_dot_product_flash_attention),
    "_scaled_dot_product_flash_attention_backward": _kernel(
        torch_operators.scaled_dot_product_flash_attention_backward
    ),
    "_flash_attention_forward.quantized": _kernel(torch_operators.flash_attention_forward_quantized),
    "_scaled_dot_product_flash_attention.quantized": _kernel(
        torch_operators.scaled_dot_product_flash_attention_quantized
    ),
}
_CPU_KERNELS = {
    "_scaled_dot_product_flash_attention_for_cpu": _kernel(torch_operators.for_cpu),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _kernel(torch_operators.for_cpu_backward),
}
