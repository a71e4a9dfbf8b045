"""What calls lose by dispatch's choice of a kernel. Needs a GPU, and compiles some hundred kernels.

    python benchmarks/dispatch_loss.py [--calls N] [--seed N] [--near X] [--rounds N] [--json FILE]

The program makes random calls of each kind: forward without lengths, on a KV cache and packed, backward
without lengths and packed. For each call it times all candidates whose modelled time is at most ``--near``
times the least, in the same interleaved rounds, inside a CUDA graph. The loss is the time of the candidate
that dispatch takes over the time of the fastest.
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flashgen.tools.bench.cases import Case
from flashgen.tools.bench.hosts import Host
from flashgen.tools.bench.peers.own import Flashgen
from flashgen.tools.bench.timing import graph_step, time_interleaved

HEADS = ((32, 8), (16, 16), (16, 2), (8, 1), (12, 12), (40, 8), (28, 4), (8, 8))
HEAD_DIMS = (64, 64, 128, 128, 128, 32, 80, 96, 192, 256)
# Of a call, so that some thousand are timed in minutes.
MOST_FLOPS, MOST_BYTES = 5e11, 1.2e9


def calls(count: int, seed: int) -> Iterator[tuple[str, Case]]:
    """So many calls of each kind, with its name. Sizes are spread evenly over their logarithms."""
    rng = random.Random(seed)

    def size(least: int, most: int) -> int:
        return round(math.exp(rng.uniform(math.log(least), math.log(most))))

    def square(batch: int, seqlen: int) -> dict[str, int]:
        return {"batch": batch, "seqlen_q": seqlen, "seqlen_kv": seqlen}

    def masked() -> str:
        return rng.choice(("none", "causal"))

    def alike(direction: str) -> dict[str, Any]:
        seqlen, mask = size(16, 8192), rng.choice(("none", "causal", "causal", "window"))
        window = rng.choice((128, 512, 1024)) if mask == "window" else 0
        return {**square(size(1, 64), seqlen), "mask": mask, "window": window, "direction": direction}

    def few(lengths: str) -> dict[str, Any]:
        queries = rng.choice((1, 1, 1, 2, 4, 8, 16, 32))
        sizes = {"batch": size(1, 128), "seqlen_q": queries, "seqlen_kv": queries + size(64, 65_536)}
        return {**sizes, "mask": "causal", "lengths": lengths}

    def chunk(lengths: str) -> dict[str, Any]:
        queries = size(16, 2048)
        sizes = {"batch": size(1, 16), "seqlen_q": queries, "seqlen_kv": queries + size(64, 32_768)}
        return {**sizes, "mask": masked(), "lengths": lengths}

    def packed(direction: str) -> dict[str, Any]:
        sizes, lengths = square(size(2, 128), size(32, 4096)), rng.choice(("packed", "zipf"))
        return {**sizes, "mask": masked(), "lengths": lengths, "direction": direction}

    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "alike": lambda: alike("forward"),
        "few queries": lambda: few("none"),
        "chunks": lambda: chunk("none"),
        "few queries, cache": lambda: few("cache"),
        "chunks, cache": lambda: chunk("cache"),
        "packed": lambda: packed("forward"),
        "gradients": lambda: alike("backward"),
        "gradients, packed": lambda: packed("backward"),
    }
    for kind, make in kinds.items():
        left = count
        while left:
            heads, head_dim = rng.choice(HEADS), rng.choice(HEAD_DIMS)
            case = Case(kind, num_heads_q=heads[0], num_heads_kv=heads[1], head_dim=head_dim, **make())
            if case.flops <= MOST_FLOPS and case.bytes_moved <= MOST_BYTES:
                left -= 1
                yield kind, case


def measure(case: Case, host: Host, near: float, rounds: int, sample_ms: float) -> dict[str, Any]:
    """Microseconds of each candidate by its name, and which one dispatch takes."""
    from flashgen.call.backends import specs_for
    from flashgen.runtime.device import device
    from flashgen.schedule.cost import cost
    from flashgen.schedule.dispatch import candidates, offers

    sets = [host.inputs(case, 0)]
    taken = Flashgen()
    taken.prepare(case, sets)
    problem, here = taken.plan.problem, device(0)
    offered = offers(problem, here, specs_for(here, problem.operator.name))
    times = {variant.name: cost(problem, here, variant) for variant in candidates(problem, here, offered)}
    names = [name for name, time in times.items() if time <= near * min(times.values())]
    steps = {name: graph_step(Flashgen(pinned=name).prepare(case, sets), 1, host) for name in names}
    timings = time_interleaved(steps, host, rounds=rounds, sample_ms=sample_ms)
    return {"taken": taken.variant, "us": {name: 1e3 * timing.median_ms for name, timing in timings.items()}}


def loss(found: dict[str, Any]) -> float:
    """The time of the kernel that dispatch takes over the time of the fastest."""
    return found["us"][found["taken"]] / min(found["us"].values())


def summary(losses: Sequence[float]) -> str:
    """Geometric mean, most, and how many calls lose more than a tenth."""
    mean = math.exp(sum(map(math.log, losses)) / len(losses))
    over = sum(each > 1.1 for each in losses)
    return f"{len(losses):5} calls  mean {mean:.3f}  most {max(losses):.2f}  {over} over 1.10"


def main() -> None:
    """Measure, print a line per kind and the calls that lose most; with ``--json`` write all figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=60, metavar="N", help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--near", type=float, default=2.0, metavar="X")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()

    from flashgen.tools.bench.hosts import CupyHost

    host, found = CupyHost(), []
    for kind, case in calls(options.calls, options.seed):
        times = measure(case, host, options.near, options.rounds, 0.5)
        sizes = f"{case.batch} × {case.seqlen_q} on {case.seqlen_kv}, {case.num_heads_q}/{case.num_heads_kv}"
        name = f"{sizes}, d{case.head_dim} {case.mask} {case.lengths}"
        found.append({"kind": kind, "call": name, "loss": loss(times), **times})
    for kind in dict.fromkeys(each["kind"] for each in found):
        print(f"{kind:20}{summary([each['loss'] for each in found if each['kind'] == kind])}")
    print(f"{'all':20}{summary([each['loss'] for each in found])}")
    for each in sorted(found, key=lambda each: -each["loss"])[:20]:
        fastest = min(each["us"], key=each["us"].get)
        print(f"{each['loss']:.2f}  {each['kind']}, {each['call']}: {each['taken']}, {fastest} is faster")
    if options.json:
        from flashgen.tools.bench import environment

        report = {"environment": environment.describe(), "seed": options.seed, "calls": found}
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
