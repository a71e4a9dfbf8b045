"""The named grids: which cases are timed side by side, and what their table shows.

The file benchmarks/workloads.yaml has them as data.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import yaml

from flashgen.errors import BadParam
from flashgen.host import paths
from flashgen.tools.bench.cases import Case, short_length

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

# The keys of an entry that are no fields of a case.
_SHORT = ("over", "against", "seqlen", "tokens", "width", "heads")


@dataclass(frozen=True, slots=True)
class Grid:
    """A named list of cases. ``metric`` is what its table shows: ``TFLOP/s``, ``GB/s`` of k and v, or
    ``µs``. ``peers`` are those that it is about; empty: all that can be used.
    """

    name: str
    doc: str
    cases: tuple[Case, ...]
    metric: str = "TFLOP/s"
    peers: tuple[str, ...] = ()

    def choose(
        self, dtypes: Iterable[str] | None = None, where: dict[str, Sequence[Any]] | None = None
    ) -> Grid:
        """The cases of these dtypes whose fields have one of the values given in ``where``, and their
        baselines.

        Raises BadParam when nothing is left or a field is unknown.
        """
        conditions = {key: {str(value) for value in values} for key, values in (where or {}).items()}
        if dtypes is not None:
            conditions["dtype"] = set(dtypes)
        unknown = set(conditions) - set(Case.__dataclass_fields__)
        if unknown:
            raise BadParam(
                f"a case has no {', '.join(sorted(unknown))}; it has {', '.join(Case.__dataclass_fields__)}"
            )
        kept = [
            c for c in self.cases if all(str(getattr(c, key)) in values for key, values in conditions.items())
        ]
        if not kept:
            described = ", ".join(
                f"{key} {' or '.join(sorted(values))}" for key, values in conditions.items()
            )
            there = [
                f"{key} {', '.join(sorted({str(getattr(c, key)) for c in self.cases}))}" for key in conditions
            ]
            raise BadParam(f"grid {self.name} has no case with {described}; it has {'; '.join(there)}")
        names = {case.name for case in kept} | {case.baseline for case in kept}
        return replace(self, cases=tuple(c for c in self.cases if c.name in names))

    def groups(self) -> list[tuple[Case, ...]]:
        """The cases in the sets that are timed together: each case with those that are set against it."""
        by_baseline: dict[str, list[Case]] = {}
        for case in self.cases:
            by_baseline.setdefault(case.baseline or case.name, []).append(case)
        return [tuple(group) for group in by_baseline.values()]


def find_grid(name: str) -> Grid:
    """The grid of that name. Raises BadParam listing the names."""
    if name not in GRIDS:
        raise BadParam(f"there is no grid {name!r}; grids: {', '.join(GRIDS)}")
    return GRIDS[name]


def read(path: Path) -> dict[str, Grid]:
    """The grids of a file, by name. The comment at the head of workloads.yaml says what a grid may have.

    Raises BadParam, which names the file and the grid, for an unknown field and for a case that makes no
    sense.
    """
    grids = {}
    for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        try:
            cases = _expanded(entry.pop("defaults", {}), entry.pop("cases"))
            grids[name] = Grid(name, cases=cases, peers=tuple(entry.pop("peers", ())), **entry)
        except (TypeError, KeyError, BadParam) as error:
            raise BadParam(f"{path}: grid {name!r}: {error}") from error
    return grids


def _expanded(defaults: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> tuple[Case, ...]:
    """The cases of a grid, each followed by those that are set against it."""
    cases = []
    for entry in entries:
        against = entry.get("against", ())
        for fields in _combinations({**defaults, **entry}):
            case = Case(**fields)
            cases.append(case)
            for other in against:
                cases += (
                    Case(**changed | {"baseline": case.name})
                    for changed in _combinations(other, asdict(case))
                )
    return tuple(cases)


def _combinations(
    entry: Mapping[str, Any], base: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Fields of a case for each combination of the values in ``over``, on top of the fields ``base``."""
    over = entry.get("over", {})
    for values in product(*over.values()):
        own = _fields_of({**entry, **dict(zip(over, values, strict=True))})
        fields = {**(base or {}), **own}
        words = {key: short_length(x) if key.startswith("seqlen") else x for key, x in fields.items()}
        words["seqlen"] = words["seqlen_kv"]
        words["masked"] = "causal" if fields.get("mask") == "causal" else "full"
        words["name"] = base and base["name"]
        yield {**fields, "name": entry["name"].format_map(words)}


def _fields_of(entry: dict[str, Any]) -> dict[str, Any]:
    """The fields of a case that an entry has, and those that its short keys stand for."""
    fields = {key: value for key, value in entry.items() if key not in _SHORT}
    if "seqlen" in entry:
        fields = {"seqlen_q": entry["seqlen"], "seqlen_kv": entry["seqlen"]} | fields
    if "tokens" in entry:
        fields["batch"] = entry["tokens"] // fields["seqlen_q"]
    # 96 and 192 do not divide 2,048; the nearest count below keeps the work alike.
    heads = entry["width"] // fields["head_dim"] if "width" in entry else entry.get("heads")
    if heads is not None:
        num_heads_q, num_heads_kv = heads if isinstance(heads, list) else (heads, heads)
        fields = {"num_heads_q": num_heads_q, "num_heads_kv": num_heads_kv} | fields
    return fields


GRIDS = read(paths.data_dir("benchmarks") / "workloads.yaml")
