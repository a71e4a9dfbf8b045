"""What a peer is to the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
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


def torch_unavailable() -> str | None:
    """Why PyTorch cannot be used on a GPU here, or None."""
    if find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    return None if torch.cuda.is_available() else "this PyTorch sees no CUDA device"
