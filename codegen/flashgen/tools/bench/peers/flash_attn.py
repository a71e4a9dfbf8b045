"""flash-attn and its successor for Hopper: FlashAttention-2 and -3 as their own packages."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from flashgen.tools.bench.cases import SOFTCAP
from flashgen.tools.bench.peers.base import TorchPeer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.hosts import Inputs
    from flashgen.tools.bench.peers.base import Run

# A module of each package that no other one has: flash-attn-4 has the folder flash_attn, too.
_OWN = {2: "flash_attn_2_cuda", 3: "flash_attn_interface"}
_FUNCTIONS = {2: "flash_attn", 3: "flash_attn_interface"}


class FlashAttn(TorchPeer):
    """``flash_attn_func`` of FlashAttention ``generation`` 2 or 3, on arrays without lengths."""

    def __init__(self, generation: int) -> None:
        self.name = f"flash-attn-{generation}"
        self._generation = generation

    def unavailable(self) -> str | None:
        if reason := super().unavailable():
            return reason
        if find_spec(_OWN[self._generation]) is None:
            return f"FlashAttention-{self._generation} is not installed"
        try:
            importlib.import_module(_FUNCTIONS[self._generation])
        except Exception as error:  # noqa: BLE001 - built for another PyTorch it may raise anything
            return f"it cannot be imported: {type(error).__name__}: {error}"
        return None

    def declines(self, case: Case) -> str | None:
        if case.lengths != "none":
            return "timed without lengths only"
        if case.dtype == "fp32":
            return "fp16 and bf16 only"
        if case.is_dense:
            return "no mask array"
        if case.score == "alibi":
            return "timed without ALiBi"
        if case.width_v != case.head_dim:
            return "timed with one head dim for q, k and v"
        return None

    def forward(self, case: Case, sets: Sequence[Inputs]) -> Run:
        function = importlib.import_module(_FUNCTIONS[self._generation]).flash_attn_func
        options: dict[str, Any] = {"softcap": SOFTCAP} if case.score == "softcap" else {}
        if case.dropout_p:
            options["dropout_p"] = case.dropout_p
        if case.deterministic:
            options["deterministic"] = True
        window = (case.window, 0) if case.mask == "window" else (-1, -1)

        def run(index: int) -> Any:
            inputs = sets[index]
            result = function(
                inputs.q, inputs.k, inputs.v, causal=case.mask == "causal", window_size=window, **options
            )
            return result[0] if isinstance(result, tuple) else result

        return run
