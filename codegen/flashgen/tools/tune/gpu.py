"""The bench on a real GPU: candidates run on it as a plan would run them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.call.backends import prepare
from flashgen.errors import InternalError
from flashgen.operators.attention import normalise
from flashgen.operators.reference import judge
from flashgen.runtime import kernel
from flashgen.runtime.arrays import view
from flashgen.runtime.plans import Plan
from flashgen.schedule.plan import choices
from flashgen.toolchain import obtain
from flashgen.tools.bench import agreement
from flashgen.tools.bench.cases import Case
from flashgen.tools.bench.timing import input_sets, step_of, time_interleaved
from flashgen.tools.tune.contest import label

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flashgen.families.arch import Device
    from flashgen.families.variant import Variant
    from flashgen.tools.bench.hosts import Host, Inputs
    from flashgen.tools.bench.timing import Step, Timing

# The problem of the check: no multiple of any tile, and more than one of each.
_SEQLEN_Q, _SEQLEN_KV = 333, 517
_WINDOW = (150, 20)
_REPEATS = 3


class GpuBench:
    """A `contest.Bench` on ``device``, with arrays and a clock of ``host``; ``seed`` is of the inputs."""

    def __init__(
        self, device: Device, host: Host, *, rounds: int = 15, sample_ms: float = 4.0, seed: int = 0
    ) -> None:
        self._device, self._host = device, host
        self._rounds, self._sample_ms, self._seed = rounds, sample_ms, seed

    def arch(self, variant: Variant) -> str:
        return obtain.arch_for(variant, self._device)

    def wrong(self, variant: Variant) -> str:
        """Compare a ragged problem with float64, all elements, by the bound of ``reference``; then run it
        again: the result is the same to the bit.

        A kernel that cannot be loaded or launched is wrong as well. Raises InternalError for one that the GPU
        stops: after that nothing can run in this process.
        """
        try:
            return self._wrong(variant)
        except RuntimeError as error:
            try:
                self._host.synchronize()
            except RuntimeError:
                raise InternalError(
                    f"{label(variant)} was stopped by the GPU: {error}. Take that tile out of `tune` in "
                    f"{variant.spec}, and report it"
                ) from error
            return f"does not run: {error}"

    def _wrong(self, variant: Variant) -> str:
        heads_q = 2 if variant.gqa == "mha" else 4
        most = variant.dispatch.rows_at_most
        case = Case(
            name="check",
            batch=2,
            seqlen_q=_SEQLEN_Q if most is None else most * 2 // heads_q,
            seqlen_kv=_SEQLEN_KV,
            num_heads_q=heads_q,
            num_heads_kv=2,
            # Columns that are not there, too.
            head_dim=variant.head_dim - 8,
            head_dim_v=variant.head_dim_v - 8,
            dtype=variant.dtype,
            mask={"dense": "random"}.get(variant.mask_type, "none"),
        )
        inputs = self._host.inputs(case, self._seed)
        window = _WINDOW if variant.mask_type == "local" else (-1, -1)
        plan = self._plan(
            variant, inputs, causal=variant.mask_type == "causal", window_size=window, return_lse=True
        )
        results = []
        for _ in range(_REPEATS):
            self._host.poison(inputs.out)
            computed = plan(inputs.q, inputs.k, inputs.v, mask=inputs.mask, out=inputs.out)
            results.append([self._host.numpy(x) for x in computed])
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "mask": inputs.mask}
        named = {name: self._host.numpy(x) for name, x in arrays.items() if x is not None}
        verdict = judge(plan.problem, named | dict(zip(("out", "lse"), results[0], strict=False)))
        if not verdict.ok:
            return f"wrong result: {verdict}"
        first = [x.tobytes() for x in results[0]]
        if any([x.tobytes() for x in again] != first for again in results[1:]):
            return "two runs on the same inputs differ"
        return ""

    def blocks_per_sm(self, variant: Variant) -> int | None:
        from cupy_backends.cuda.api import driver

        loaded = kernel.load(variant, self._device)
        return driver.occupancyMaxActiveBlocksPerMultiprocessor(
            loaded.function_ptr, variant.threads, variant.smem_bytes
        )

    def time(self, variants: Sequence[Variant], case: Case) -> list[Timing | str]:
        """The benchmark's protocol: interleaved rounds, device events, medians, inputs that have left L2; and
        its check of some rows against float64, before the timing.
        """
        host = self._host
        sets = input_sets(case, host, self._seed)
        steps: dict[str, Step] = {}
        wrong: dict[int, str] = {}
        for index, variant in enumerate(variants):
            run = self._runner(variant, case, sets)
            host.poison(sets[0].out)
            out = run(0)
            share = agreement.sampled_share(case, sets[0], (out,), host, np.random.default_rng(self._seed))
            if share > 1:
                wrong[index] = f"wrong result: error {share:.2g} of its bound"
                continue
            steps[str(index)] = step_of(case, run, len(sets), host)
        timings = time_interleaved(steps, host, rounds=self._rounds, sample_ms=self._sample_ms)
        return [wrong[i] if i in wrong else timings[str(i)] for i in range(len(variants))]

    def _runner(self, variant: Variant, case: Case, sets: Sequence[Inputs]) -> Callable[[int], Any]:
        window = (case.window, 0) if case.mask == "window" else (-1, -1)
        plan = self._plan(variant, sets[0], causal=case.mask == "causal", window_size=window)

        def run(index: int) -> Any:
            inputs = sets[index]
            return plan(inputs.q, inputs.k, inputs.v, mask=inputs.mask, out=inputs.out)

        return run

    def _plan(self, variant: Variant, inputs: Inputs, **options: Any) -> Plan:
        """A plan with this variant, whatever dispatch would take."""
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "mask": inputs.mask, "out": inputs.out}
        q, k, v, mask, out = (None if x is None else view(x, name) for name, x in arrays.items())
        problem = normalise(q, k, v, mask=mask, out=out, **options)
        runner = prepare(choices(problem, self._device, (variant,)), self._device)
        return Plan(problem, runner, problem.operator.in_order(**arrays))
