"""What a peer is to the benchmark, and the gradients of one in PyTorch: those that autograd finds for its
forward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from flashgen.tools.bench.cases import DROPOUT_SEED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.hosts import Inputs

Run = Callable[[int], Any]
"""Launches one call on input set ``i`` and returns the output, of the shape of `Inputs.out`; of a backward
pass the gradients of q, k and v.
"""


class Peer(Protocol):
    """One implementation of attention.

    ``hosts`` names the array libraries whose arrays it takes. ``name`` is what tables, JSON and the command
    line say.
    """

    name: str
    hosts: tuple[str, ...]

    def unavailable(self) -> str | None:
        """Why it cannot be used here, or None. Must not raise and must not need a GPU."""

    def declines(self, case: Case) -> str | None:
        """Why it cannot serve the case, or None."""

    def prepare(self, case: Case, sets: Sequence[Inputs]) -> Run:
        """Everything that a user would do once for a shape: plans, workspaces, masks in the peer's own
        form; for a backward pass also the forward pass.
        """


class TorchPeer:
    """A peer in PyTorch, whose ``forward`` autograd can record. Its backward pass is ``torch.autograd.grad``
    with the graph retained, which queues what a training step does, copies and sums around the kernels
    included.
    """

    hosts = ("torch",)

    def unavailable(self) -> str | None:
        """Why PyTorch cannot be used on a GPU here, or None."""
        if find_spec("torch") is None:
            return "PyTorch is not installed"
        import torch

        return None if torch.cuda.is_available() else "this PyTorch sees no CUDA device"

    def prepare(self, case: Case, sets: Sequence[Inputs]) -> Run:
        """As `Peer.prepare`. With dropout the first forward pass draws DROPOUT_SEED."""
        if case.dropout_p:
            import torch

            torch.manual_seed(DROPOUT_SEED[0])
        return self._gradients(case, sets) if case.is_backward else self.forward(case, sets)

    def forward(self, case: Case, sets: Sequence[Inputs]) -> Run:
        """`prepare` of a forward pass."""
        raise NotImplementedError

    def _gradients(self, case: Case, sets: Sequence[Inputs]) -> Run:
        import torch

        leaves = [replace(s, **{x: getattr(s, x).detach().requires_grad_() for x in "qkv"}) for s in sets]
        forward = self.forward(case, leaves)

        # Once for each stream: autograd queues gradients where it saw the forward pass.
        @functools.cache
        def recorded(index: int, stream: int) -> Any:
            return forward(index)

        def run(index: int) -> Any:
            inputs = leaves[index]
            stream = torch.cuda.current_stream().cuda_stream if inputs.q.is_cuda else 0
            out, tensors = recorded(index, stream), (inputs.q, inputs.k, inputs.v)
            with _same_bits() if case.deterministic else contextlib.nullcontext():
                return torch.autograd.grad(out, tensors, inputs.dout, retain_graph=True)

        return run


@contextlib.contextmanager
def _same_bits() -> Iterator[None]:
    """Deterministic algorithms of PyTorch, which would also fill memory that they allocate."""
    import torch
    from torch.utils import deterministic

    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        deterministic.fill_uninitialized_memory = before[1]
