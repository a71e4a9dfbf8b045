"""cuDNN's flex attention: kernels for Hopper and Blackwell in CuTe, of masks that are intervals of keys."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.tools.bench.lines import line_of
from flashgen.tools.bench.peers.base import TorchPeer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.hosts import Inputs
    from flashgen.tools.bench.peers.base import Run


class CudnnFlex(TorchPeer):
    """``cudnn.flex_attention`` of nvidia-cudnn-frontend 1.32 or later, with a plan made beforehand."""

    name = "cudnn-flex"

    def unavailable(self) -> str | None:
        if reason := super().unavailable():
            return reason
        try:
            there = find_spec("cudnn.flex_attention") is not None and find_spec("cutlass") is not None
        except ModuleNotFoundError:
            there = False
        return None if there else "nvidia-cudnn-frontend 1.32 with CuTe's DSL is not installed"

    def declines(self, case: Case) -> str | None:
        return None if case.line else "timed on masks by a line"

    def forward(self, case: Case, sets: Sequence[Inputs]) -> Run:
        import torch
        from cudnn.flex_attention import create_mask_plan, flex_attn_func

        # A query of each batch entry has the endpoints of its row.
        endpoints = np.tile(line_of(case.line, case.seqlen_q).endpoints(), (1, case.batch))
        of_rows = torch.from_numpy(endpoints[None]).cuda()
        plans = [create_mask_plan(of_rows, s.q, s.k, s.v, build_backward=case.is_backward) for s in sets]

        def run(index: int) -> Any:
            s = sets[index]
            options = {"mask_plan": plans[index], "deterministic": case.deterministic}
            return flex_attn_func(s.q, s.k, s.v, **options)

        return run
