"""Timing several callables against each other with device events, in interleaved rounds."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.hosts import Clock, Host, Inputs
    from flashgen.tools.bench.peers.base import Run

Key = TypeVar("Key", bound="Hashable")

_MAX_REPETITIONS = 256
_WARM_UP = 3
# A graph begins some µs after its launch, and its first call overlaps with none before it.
_GRAPH_CALLS = 16


@dataclass(frozen=True, slots=True)
class Timing:
    """Device milliseconds of one call: median and quartiles over the rounds.

    ``calls`` is how many calls shared one pair of events.
    """

    median_ms: float
    q25_ms: float
    q75_ms: float
    rounds: int
    calls: int

    @property
    def spread(self) -> float:
        """Interquartile range relative to the median."""
        return (self.q75_ms - self.q25_ms) / self.median_ms


def summarize(samples_ms: Sequence[float], calls: int) -> Timing:
    """Median and quartiles of samples that each hold the time of one call, in milliseconds."""
    q25, median, q75 = np.percentile(samples_ms, (25, 50, 75))
    return Timing(float(median), float(q25), float(q75), len(samples_ms), calls)


def rotation(set_bytes: int, l2_bytes: int, limit: int = 128) -> int:
    """How many input sets to rotate among, so that a set has left L2 when its turn comes again.

    One set that is over twice the L2 by itself needs no company.
    """
    return max(1, min(limit, -(-2 * l2_bytes // set_bytes)))


def input_sets(case: Case, host: Host, seed: int) -> list[Inputs]:
    """The inputs to rotate among in a case: `rotation` of them, of seeds that count from ``seed``."""
    return [host.inputs(case, seed + i) for i in range(rotation(case.bytes_moved, host.l2_bytes))]


@dataclass(frozen=True, slots=True)
class Step:
    """What one repetition does: ``launches`` calls of a peer, on one input set after the other. ``holds``
    owns the inputs that ``run`` reads without owning them.
    """

    run: Callable[[], object]
    launches: int
    holds: object = None


def stream_step(run: Run, sets: int) -> Step:
    """A step that calls ``run`` once, on the next of ``sets`` input sets each time."""
    turn = itertools.cycle(range(sets))
    return Step(lambda: run(next(turn)), 1)


def graph_step(run: Run, sets: int, clock: Clock) -> Step:
    """A step that replays a CUDA graph holding at least 16 calls, as many on each of ``sets`` input sets."""
    calls = sets * -(-_GRAPH_CALLS // sets)

    def body() -> None:
        for index in range(calls):
            run(index % sets)

    # A graph has the addresses of its arrays alone.
    return Step(clock.capture(body), calls, holds=run)


def step_of(case: Case, run: Run, sets: int, clock: Clock) -> Step:
    """A step of a case, by the clock that it asks for."""
    return graph_step(run, sets, clock) if case.clock == "graph" else stream_step(run, sets)


def time_interleaved(
    steps: Mapping[Key, Step], clock: Clock, *, rounds: int, sample_ms: float
) -> dict[Key, Timing]:
    """Time each of ``steps`` in the same rounds and return the Timing of one call by its key.

    In every round each step gives one sample: an untimed repetition, so that the host is faster than the
    device and no launch gap is measured, then as many repetitions between two events as take about
    ``sample_ms``. The order is drawn anew for each round: under a power limit a kernel's clock depends on the
    one before it. Nothing waits for the device inside a round.
    """
    repetitions = {name: _repetitions(step, clock, sample_ms) for name, step in steps.items()}
    samples: dict[Key, list[float]] = {name: [] for name in steps}
    names = list(steps)
    order = random.Random(0)
    for _ in range(rounds):
        order.shuffle(names)
        spans = {name: _span(steps[name], repetitions[name], clock) for name in names}
        clock.synchronize()
        for name, (start, end) in spans.items():
            samples[name].append(clock.elapsed_ms(start, end) / (repetitions[name] * steps[name].launches))
    return {name: summarize(samples[name], repetitions[name] * steps[name].launches) for name in names}


def _span(step: Step, repetitions: int, clock: Clock) -> tuple[Any, Any]:
    """Events around the repetitions, after one that is not timed."""
    step.run()
    start = clock.record()
    for _ in range(repetitions):
        step.run()
    return start, clock.record()


def _repetitions(step: Step, clock: Clock, sample_ms: float) -> int:
    """How many repetitions take about ``sample_ms``, after a warm-up."""
    for _ in range(_WARM_UP):
        step.run()
    start, end = _span(step, _WARM_UP, clock)
    clock.synchronize()
    one = clock.elapsed_ms(start, end) / _WARM_UP
    return max(1, min(_MAX_REPETITIONS, round(sample_ms / max(one, 1e-6))))
