"""Writing down who won, for one GPU of a user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen import __version__
from flashgen.toolchain.compile import compiler_version
from flashgen.tools.bench import environment
from flashgen.tools.tune.userfile import Measured, Written, merge

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from flashgen.families.model import Point, Spec
    from flashgen.tools.tune.ranking import Ranking


def in_users_files(
    rankings: Sequence[Ranking], gpu: str, folder: str | os.PathLike[str] | None = None
) -> list[Written]:
    """Bring the winners into the files for ``gpu``, one for each spec; see `userfile.merge`."""
    specs: dict[str, Spec] = {ranking.subject.spec.name: ranking.subject.spec for ranking in rankings}
    return [
        merge(spec, gpu, _winners([r for r in rankings if r.subject.spec.name == name]), folder)
        for name, spec in specs.items()
    ]


def _winners(rankings: Sequence[Ranking]) -> dict[Point, Measured | None]:
    """By point what won; None where the ordinary tile did. A kernel with sinks takes what won without."""
    made_with = {
        "flashgen": __version__,
        "compiler": compiler_version(),
        "driver": environment.gpu()["driver"],
    }
    return {
        point: None
        if ranking.winner is ranking.ordinary
        else Measured(dict(ranking.winner.variant.tile), ranking.efficiency, made_with | _measured(ranking))
        for ranking in rankings
        for point in ranking.subject.points
    }


def _measured(ranking: Ranking) -> dict[str, Any]:
    return {
        "gain": round(ranking.gain, 3),
        "against": " ".join(str(value) for _, value in ranking.subject.ordinary.tile),
        "shapes": [case.name for case in ranking.cases],
    }
