"""What a run found: measurements, ratios, summaries, and their JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple, dataclass, field, fields
from itertools import product
from typing import TYPE_CHECKING, Any

from flashgen.errors import BadParam
from flashgen.tools.bench.cases import Case
from flashgen.tools.bench.peers.registry import OURS, RIVALS
from flashgen.tools.bench.timing import Timing

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = 2
_DIGITS = 6  # of the numbers in a file; no table shows more than four


def figure(metric: str, case: Case, timing: Timing) -> float:
    """The median of a timing in a `Grid.metric`: TFLOP/s by the case's count of work, GB/s of K and V, µs."""
    if metric == "µs":
        return timing.median_ms * 1e3
    if metric == "GB/s":
        return case.kv_bytes / timing.median_ms / 1e6
    return case.flops / timing.median_ms / 1e9


@dataclass(frozen=True, slots=True)
class Measurement:
    """One peer on one case: a timing, or a note that says why there is none.

    ``error_share`` is flashgen's largest error against float64 as a share of its bound, ``relative_error`` a
    peer's against flashgen; ``agrees`` whether it is small enough. ``first_call_s`` is the wall time of the
    first call, compilation included.
    ``workspace_bytes`` is what a peer of one algorithm holds, ``extra_bytes`` that and what the allocator
    grew by in a call; ``moved_bytes`` is what its kernels read and write in global memory, counted by the
    simulator or, as ``moved_by`` says, by its formula (`traffic`).
    ``failed`` tells a peer that raised an error from one that does not take the case.
    """

    peer: str
    timing: Timing | None = None
    error_share: float | None = None
    relative_error: float | None = None
    agrees: bool | None = None
    first_call_s: float | None = None
    variant: str | None = None
    note: str | None = None
    failed: bool = False
    workspace_bytes: int | None = None
    extra_bytes: int | None = None
    moved_bytes: int | None = None
    moved_by: str | None = None

    def tflops(self, case: Case) -> float | None:
        """Rate in TFLOP/s by the case's count of work."""
        return None if self.timing is None else figure("TFLOP/s", case, self.timing)


@dataclass(frozen=True, slots=True)
class Row:
    """A case with what every peer did on it."""

    case: Case
    measurements: dict[str, Measurement]

    def ratio(self, peer: str) -> float | None:
        """How many times as fast flashgen was as the peer; None unless both were timed and agree."""
        ours, theirs = self.measurements.get(OURS), self.measurements.get(peer)
        if (
            ours is None
            or theirs is None
            or not (ours.timing and theirs.timing and ours.agrees and theirs.agrees)
        ):
            return None
        return theirs.timing.median_ms / ours.timing.median_ms

    def best_rival(self) -> tuple[float, str] | None:
        """The ratio to the fastest of the rivals that have one, and its name."""
        return min(((ratio, name) for name in RIVALS if (ratio := self.ratio(name))), default=None)


@dataclass(frozen=True, slots=True)
class Summary:
    """The ratios flashgen / peer over the cases of one dtype."""

    peer: str
    dtype: str
    cases: int
    geometric_mean: float
    lowest: float
    lowest_case: str


@dataclass(frozen=True, slots=True)
class Loss:
    """The shares of their baselines' rates that the cases of one dtype lose; negative where they gain."""

    dtype: str
    cases: int
    mean: float
    largest: float
    largest_case: str
    limit: float


@dataclass(slots=True)
class Report:
    """A run of one grid."""

    grid: str
    metric: str
    protocol: dict[str, Any]
    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def peers(self) -> list[str]:
        """Every peer with at least one timing, in the order of the run, flashgen first."""
        timed = [name for row in self.rows for name, m in row.measurements.items() if m.timing]
        return sorted(dict.fromkeys(timed), key=lambda name: name != OURS)

    @property
    def disagreements(self) -> list[tuple[str, str]]:
        """(case, peer) wherever a result was out of tolerance."""
        return [(r.case.name, n) for r in self.rows for n, m in r.measurements.items() if m.agrees is False]

    def baseline_ratio(self, row: Row) -> float | None:
        """Flashgen's TFLOP/s on this case over its TFLOP/s on the case's baseline."""
        base = self._baseline(row)
        if base is None:
            return None
        ours, theirs = row.measurements[OURS].tflops(row.case), base.measurements[OURS].tflops(base.case)
        return ours / theirs if ours and theirs else None

    def added_ms(self, row: Row) -> float | None:
        """Milliseconds that flashgen takes on this case beyond those on the case's baseline."""
        base = self._baseline(row)
        if base is None:
            return None
        ours, theirs = row.measurements[OURS].timing, base.measurements[OURS].timing
        return ours.median_ms - theirs.median_ms if ours and theirs else None

    def _baseline(self, row: Row) -> Row | None:
        """The row of the case's baseline, where flashgen was measured on both."""
        base = next((r for r in self.rows if r.case.name == row.case.baseline), None)
        return base if base and OURS in row.measurements and OURS in base.measurements else None

    @property
    def dtypes(self) -> list[str]:
        """In the order of the run."""
        return list(dict.fromkeys(row.case.dtype for row in self.rows))

    @property
    def best_of(self) -> str | None:
        """What to call the best of the rivals that were timed; None where fewer than two were."""
        timed = [name for name in RIVALS if name in self.peers]
        return f"best of {', '.join(timed)}" if len(timed) > 1 else None

    def summaries(self) -> list[Summary]:
        """One Summary for each peer, and for the best of the rivals, and each dtype that have ratios."""
        by_peer = {name: [row.ratio(name) for row in self.rows] for name in self.peers if name != OURS}
        if self.best_of:
            best = (row.best_rival() for row in self.rows)
            by_peer[self.best_of] = [rival and rival[0] for rival in best]
        summaries = []
        for peer, dtype in product(by_peer, self.dtypes):
            ratios = [
                (ratio, row.case.name)
                for ratio, row in zip(by_peer[peer], self.rows, strict=True)
                if ratio is not None and row.case.dtype == dtype
            ]
            if ratios:
                mean = math.exp(math.fsum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
                summaries.append(Summary(peer, dtype, len(ratios), mean, *min(ratios)))
        return summaries

    def losses(self) -> list[Loss]:
        """One Loss for each dtype and limit that cases have."""
        results = []
        kinds = dict.fromkeys((r.case.dtype, r.case.loss_limit) for r in self.rows if r.case.loss_limit)
        for dtype, limit in kinds:
            losses = [
                (1 - ratio, row.case.name)
                for row in self.rows
                if (row.case.dtype, row.case.loss_limit) == (dtype, limit)
                and (ratio := self.baseline_ratio(row))
            ]
            if losses:
                mean = math.fsum(loss for loss, _ in losses) / len(losses)
                results.append(Loss(dtype, len(losses), mean, *max(losses), limit))
        return results

    def as_dict(self) -> dict[str, Any]:
        """Plain types, with the derived figures beside the measured ones."""
        rows = []
        for row in self.rows:
            results = [
                asdict(m) | {"tflops": m.tflops(row.case), "flashgen_ratio": row.ratio(name)}
                for name, m in row.measurements.items()
            ]
            case = asdict(row.case) | {"flops": row.case.flops}
            ratio, peer = row.best_rival() or (None, None)
            derived = {
                "baseline_ratio": self.baseline_ratio(row),
                "baseline_added_ms": self.added_ms(row),
                "best_rival": peer,
                "best_rival_ratio": ratio,
            }
            rows.append({"case": case, **derived, "results": results})
        summary, losses = ([asdict(x) for x in found] for found in (self.summaries(), self.losses()))
        return self._head() | {"summary": summary, "losses": losses, "rows": rows}

    def _head(self) -> dict[str, Any]:
        """The facts about the run as a whole."""
        names = ("grid", "metric", "environment", "protocol", "left_out")
        return {"schema": SCHEMA} | {name: getattr(self, name) for name in names}

    def save(self, path: Path) -> None:
        """Write what was measured as JSON, one line a case: fields that have their default are left out, and
        a timing is the list of its values. What derives from it, ``load`` computes again.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = (
            {"case": _stored(r.case), "peers": list(map(_stored, r.measurements.values()))} for r in self.rows
        )
        facts = ",\n".join(f"{_json(key)}:{_json(value)}" for key, value in self._head().items())
        lines = ",\n".join(map(_json, rows))
        path.write_text(f'{{{facts},\n"rows":[\n{lines}\n]}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read what ``save`` wrote. Raises BadParam for another schema."""
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("schema") != SCHEMA:
            raise BadParam(f"{path} has schema {data.get('schema')!r}; this flashgen reads {SCHEMA}")
        rows = [
            Row(Case(**row["case"]), {m.peer: m for m in map(_measurement, row["peers"])})
            for row in data["rows"]
        ]
        return cls(
            data["grid"], data["metric"], data["protocol"], data["environment"], rows, data["left_out"]
        )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _stored(record: Case | Measurement) -> dict[str, Any]:
    """The fields of a record that differ from their defaults, as JSON has them."""
    values = {f.name: getattr(record, f.name) for f in fields(record) if getattr(record, f.name) != f.default}
    return {
        name: [_short(x) for x in astuple(value)] if isinstance(value, Timing) else _short(value)
        for name, value in values.items()
    }


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _measurement(stored: dict[str, Any]) -> Measurement:
    timing = Timing(*stored["timing"]) if "timing" in stored else None
    return Measurement(**stored | {"timing": timing})
