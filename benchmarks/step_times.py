"""GPU time of each kernel of a call. Needs a GPU.

    python benchmarks/step_times.py [GRID] [--where FIELD=A,B ...] [--rounds N] [--json FILE]

GRID is a grid of `flashgen bench`, by default backward; its cases without lengths are timed. A kernel has no
input until the earlier kernels have run. So the program times calls of the first kernel, of the first two,
and so on up to all, in the same interleaved rounds. A kernel adds the difference. In dependent launches this
is less than its time alone, as it begins while the previous kernel ends.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashgen.tools.bench.cases import Case
from flashgen.tools.bench.grids import find_grid
from flashgen.tools.bench.hosts import Host
from flashgen.tools.bench.peers.own import Flashgen
from flashgen.tools.bench.timing import Timing, input_sets, step_of, time_interleaved


def measure(case: Case, host: Host, rounds: int, sample_ms: float) -> dict[str, Any]:
    """The kernels of a case in their order, each with the microseconds that it adds to the earlier ones."""
    sets = input_sets(case, host, 0)
    whole = Flashgen()
    whole.prepare(case, sets)
    names = [step.variant.name for step in whole.plan.steps]
    steps = {}
    for count in range(1, len(names) + 1):
        run = Flashgen(steps=count).prepare(case, sets)
        steps[count] = step_of(case, run, len(sets), host)
    timings = time_interleaved(steps, host, rounds=rounds, sample_ms=sample_ms)
    return {"case": case.name, "kernels": added(names, timings)}


def added(names: Sequence[str], timings: Mapping[int, Timing]) -> list[dict[str, Any]]:
    """What each kernel adds in µs and as a share, from the times of calls of the first 1, 2, ... kernels."""
    ends = [0.0, *(1e3 * timings[count].median_ms for count in range(1, len(names) + 1))]
    return [
        {"variant": name, "added_us": end - begin, "share": (end - begin) / ends[-1]}
        for name, begin, end in zip(names, ends, ends[1:], strict=False)
    ]


def main() -> None:
    """Measure and print a line per kernel; with ``--json`` write the same numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", nargs="?", default="backward", metavar="GRID")
    parser.add_argument("--where", action="append", default=[], metavar="FIELD=A,B", help="only these cases")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    where = {field: values.split(",") for field, _, values in (text.partition("=") for text in options.where)}
    cases = find_grid(options.grid).choose(where=where | {"lengths": ["none"]}).cases

    from flashgen.tools.bench.hosts import CupyHost

    host, found = CupyHost(), []
    for case in cases:
        found.append(measure(case, host, options.rounds, 2.0))
        for kernel in found[-1]["kernels"]:
            share = f"{kernel['added_us']:9.1f} µs {100 * kernel['share']:5.1f} %"
            print(f"{case.name:36}{share}  {kernel['variant']}", flush=True)
    if options.json:
        from flashgen.tools.bench import environment

        report = {"environment": environment.describe(), "grid": options.grid, "cases": found}
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
