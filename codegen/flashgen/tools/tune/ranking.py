"""Who won: tiles in the order of their speed over all problems, and what the winner is worth to dispatch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashgen.families.variant import Variant
    from flashgen.toolchain.build import Built
    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.timing import Timing
    from flashgen.tools.tune.candidates import Dropped
    from flashgen.tools.tune.subjects import Subject

# What a tile must gain over the ordinary one to take its place. Below, the gain may be noise.
MIN_GAIN = 1.01


@dataclass(frozen=True, slots=True)
class Trial:
    """A tile that was compiled, was right, and was timed on every problem, by the problem's name.

    ``blocks_per_sm`` is how many of its thread blocks a multiprocessor holds at a time.
    """

    variant: Variant
    built: Built
    blocks_per_sm: int | None
    timings: Mapping[str, Timing]

    def speed(self, other: Trial) -> float:
        """Geometric mean over the problems of how many times as fast as ``other`` this one is."""
        ratios = [other.timings[name].median_ms / mine.median_ms for name, mine in self.timings.items()]
        return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


@dataclass(frozen=True, slots=True)
class Ranking:
    """What came out for one subject: ``trials``, fastest first, the ordinary tile among them."""

    subject: Subject
    cases: Sequence[Case]
    ordinary: Trial
    trials: tuple[Trial, ...]
    dropped: tuple[Dropped, ...]

    @property
    def winner(self) -> Trial:
        """The fastest tile; the ordinary one, unless the gain over it is at least `MIN_GAIN`."""
        best = self.trials[0]
        return best if best.speed(self.ordinary) >= MIN_GAIN else self.ordinary

    @property
    def gain(self) -> float:
        """How many times as fast as the ordinary tile the winner is, over all problems."""
        return self.winner.speed(self.ordinary)

    @property
    def efficiency(self) -> float:
        """What dispatch should know of the winner: its rate on the longest problem, on the scale on which the
        ordinary tile has its own ``efficiency``. So tiles with names keep their place beside both.
        """
        longest = max(self.cases, key=lambda case: (case.seqlen_kv, case.seqlen_q)).name
        ratio = self.ordinary.timings[longest].median_ms / self.winner.timings[longest].median_ms
        return round(self.subject.ordinary.dispatch.efficiency * ratio, 3)


def rank(
    subject: Subject,
    cases: Sequence[Case],
    ordinary: Trial,
    others: Sequence[Trial],
    dropped: Sequence[Dropped],
) -> Ranking:
    """Put the trials in order. Equal speeds stay in the order of the spec, the ordinary tile first."""
    trials = sorted((ordinary, *others), key=lambda trial: -trial.speed(ordinary))
    return Ranking(subject, tuple(cases), ordinary, tuple(trials), tuple(dropped))
