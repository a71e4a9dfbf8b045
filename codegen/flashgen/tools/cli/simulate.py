"""`flashgen simulate`: one variant's generated CUDA, run and examined on the CPU."""

from __future__ import annotations

import secrets
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from flashgen.tools.cli.options import (
    OutputFolder,
    json_option,
    load_variants,
    mask_type_option,
    score_option,
    specs_option,
    with_score,
)
from flashgen.tools.cli.output import say

if TYPE_CHECKING:
    from pathlib import Path

    from flashgen.families.variant import Variant
    from flashgen.operators.reference import Verdict
    from flashgen.simulator.execute import Access, Report

_SIZE = click.IntRange(1, 2**31 - 1)  # kernels count in int32
_GAP = 128  # bytes between rows: they begin at a cache line where they would without it
_KINDS = {
    "mma": ("mma_m16n8k16_f16", "mma_m16n8k16_bf16", "mma_m16n8k8_tf32", "mma_m16n8k32_e4m3"),
    "wgmma, of warpgroups": ("wgmma_f16", "wgmma_bf16", "wgmma_e4m3"),
    "ldmatrix": ("ldmatrix",),
    "stmatrix": ("stmatrix",),
    "cp.async": ("cp_async",),
    "cp.async waits": ("cp_async_wait",),
    "tensor loads": ("tensor_loads",),
    "tensor stores": ("tensor_stores",),
    "mbarrier arrivals": ("mbarrier_arrivals",),
    "mbarrier waits (threads)": ("mbarrier_waits",),
    "block barriers": ("barriers",),
    "warp barriers": ("warp_syncs",),
    "shuffles and votes": ("shuffles", "votes"),
    "exp2 (threads)": ("exp2",),
}


@click.command(
    "simulate",
    short_help="Run one kernel's CUDA on the CPU and check it.",
    epilog="""
\b
Examples:
  flashgen simulate flash_fwd_hdim64_fp16_causal_sm80 --seqlen-q 300
  flashgen simulate flash_fwd_hdim64_bf16_packgqa_sm80 --heads 8 --kv-heads 2
  flashgen simulate flash_fwd_hdim64_fp16_local_sm80 --window 64 0 --seeds 20
  flashgen simulate flash_fwd_hdim64_fp16_dense_sm80 --window -1 0
  flashgen simulate flash_fwd_hdim64_fp16_sm80 --json | jq .accesses
  flashgen simulate flash_fwd_hdim128_fp16_causal_sm90 --multiprocessors 2
  flashgen simulate flash_fwd_hdim64_fp16_sm80 --debug kernel

NAME is a variant's name as `flashgen list` prints it, or the path of its generated file. The seed decides the
random inputs and the order of the threads. Exit code 1 if the kernel makes an error on a GPU, is
too far from float64, or gives other bits under another order.
""",
)
@click.argument("name")
@click.option("--seqlen-q", type=_SIZE, default=128, show_default=True, help="Queries.")
@click.option("--seqlen-kv", type=click.IntRange(0, 2**31 - 1), default=128, show_default=True, help="Keys.")
@click.option(
    "--heads", type=_SIZE, help="Query heads. [default: --kv-heads, if given; else 2, or 4 for grouped heads]"
)
@click.option(
    "--kv-heads",
    type=_SIZE,
    help="Heads of k and v; merge has none. "
    "[default: --heads; 1 for grouped heads, half of --heads for append]",
)
@click.option("--batch", type=_SIZE, default=1, show_default=True, help="Batch entries.")
@click.option(
    "--head-dim", type=_SIZE, help="Head dim of the call. [default: from NAME; 128 for append and merge]"
)
@click.option("--head-dim-v", type=_SIZE, help="Head dim of v. [default: as --head-dim, if NAME holds it]")
@mask_type_option
@click.option(
    "--window", type=int, nargs=2, metavar="LEFT RIGHT", help="For local and dense variants; -1 is no bound."
)
@click.option(
    "--multiprocessors",
    type=click.IntRange(1),
    help="Multiprocessors of the simulated GPU, which bound persistent blocks. [default: that GPU's]",
)
@click.option("--seed", type=click.IntRange(0), help="First seed. [default: a fresh one]")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="How many seeds to run.")
@click.option(
    "--debug",
    type=OutputFolder(),
    metavar="DIR",
    help="Compile without optimisation into DIR and keep source and object there, for gdb.",
)
@specs_option
@score_option
@json_option
def command(
    name: str,
    seqlen_q: int,
    seqlen_kv: int,
    heads: int | None,
    kv_heads: int | None,
    batch: int,
    head_dim: int | None,
    head_dim_v: int | None,
    mask_type: str | None,
    window: tuple[int, int] | None,
    multiprocessors: int | None,
    seed: int | None,
    seeds: int,
    debug: Path | None,
    specs: Path | None,
    score: str | None,
    as_json: bool,
) -> None:
    """Run one variant's CUDA on the CPU; print its error, instructions, bank conflicts and skipped tiles.

    Needs a C++ compiler and no GPU. Races, reads of uninitialised memory, accesses out of bounds and
    divergent warps are errors that name block, thread and source line.

    If a call takes several kernels, all of them run: the error is the call's, the rest is about NAME.
    """
    from flashgen.families.selection import find_one
    from flashgen.simulator.example import Shape
    from flashgen.simulator.library import supports
    from flashgen.tools.cli.output import print_json

    variants = load_variants(specs)
    chosen = find_one(variants, name)
    main = next(variant for variant in variants if chosen in variant.steps)
    (main,) = with_score([main], specs, score)
    variant = next(step for step in main.steps if step.step == chosen.step)
    if not supports(variant):
        raise click.ClickException(f"{variant.name} includes {variant.header}, which has no host bodies yet")
    grouped = dict(variant.axes).get("gqa", "mha") != "mha"
    in_sets = variant.grid.shares and variant.grid.cluster > 1  # latent caches: a set has 64 heads
    heads = heads or kv_heads or (64 * variant.grid.cluster if in_sets else 4 if grouped else 2)
    masked = "mask_type" in dict(main.axes)
    for option, value in (("--mask-type", mask_type), ("--window", window)):
        if value is not None and not masked:
            raise click.ClickException(f"{variant.name} has no masks, so {option} does not fit; leave it out")
    if mask_type is not None and mask_type.partition("_")[0] != variant.mask_type:
        raise click.ClickException(
            f"{variant.name} has mask type {variant.mask_type}; {mask_type} does not fit"
        )
    top_left = mask_type == "causal_top_left"
    sizes = (seqlen_q, seqlen_kv, heads, kv_heads, batch, head_dim, head_dim_v)
    shape = Shape(*sizes, window, top_left, gap=_GAP)
    first = secrets.randbits(32) if seed is None else seed
    facts, verdict = _run(variant, main, shape, range(first, first + seeds), debug, multiprocessors)
    if as_json:
        print_json(facts)
    else:
        _print(facts, verdict)
    if not facts["ok"]:
        sys.exit(1)


def _run(
    variant: Variant, main: Variant, shape: Any, seeds: range, debug: Path | None, multiprocessors: int | None
) -> tuple[dict[str, Any], Verdict]:
    """Simulate the call of ``main`` on the same inputs under every seed's order of threads: what ``variant``,
    one of its steps, executed, and how far the results are from float64.
    """
    from dataclasses import replace

    import numpy as np

    from flashgen.errors import SimulationError
    from flashgen.simulator.example import make, outputs, run_steps
    from flashgen.simulator.figures import masked_tiles
    from flashgen.simulator.hardware import pretend_for
    from flashgen.simulator.library import load, load_in
    from flashgen.source.render import render
    from flashgen.toolchain.origins import template_lines_named
    from flashgen.tools.cli.output import counted
    from flashgen.tools.cli.progress import waiting

    source = render(variant)
    device = pretend_for(variant)
    if multiprocessors is not None:
        device = replace(device, num_sms=multiprocessors)
    # The same inputs for each seed, before compiling: this raises the error of a wrong shape.
    try:
        examples = [make(variant, shape, seeds.start) for _ in seeds]
    except MemoryError as error:
        raise click.ClickException(f"the inputs do not fit into memory: {error}; make them smaller") from None
    begin = time.perf_counter()
    libraries = []
    with waiting(f"compiling {main.name} for the simulator"):
        for step in main.steps:
            text = render(step)
            with template_lines_named(step, text):
                libraries.append(load_in(debug, text, step.name) if debug else load(text, step.name))
    compiled = time.perf_counter() - begin
    facts: dict[str, Any] = {
        "variant": variant.name,
        "seed": seeds.start,
        "seeds": len(seeds),
        "compile_seconds": compiled,
    }
    report: Report | None = None
    begin = time.perf_counter()
    with waiting(f"simulating {counted(len(seeds), 'seed')}"):
        for seed, example in zip(seeds, examples, strict=True):
            try:
                reports = run_steps(libraries, main, example, seed=seed, device=device)
            except SimulationError as error:
                raise click.ClickException(f"{error}\nseed {seed}") from error
            report = reports[main.steps.index(variant)]
            if report is None:
                raise click.ClickException(f"no tile is split here, so the call leaves {variant.name} out")
    facts["seconds"] = (time.perf_counter() - begin) / len(seeds)
    verdict = examples[0].judge()
    facts["repeatable"] = all(
        np.array_equal(x, y, equal_nan=True)
        for other in examples[1:]
        for x, y in zip(outputs(examples[0]), outputs(other), strict=True)
    )
    facts["out"] = verdict.out.as_dict()
    if verdict.lse is not None:  # operators without one have a single error
        facts["lse"] = verdict.lse.as_dict()
    facts["ok"] = verdict.ok and facts["repeatable"]
    facts |= examples[0].described
    facts["counters"] = report.counters
    facts["accesses"] = [_described(access, source) for access in report.accesses]
    if variant.visits is not None and not examples[0].problem.lengths_on_device:
        tiles = masked_tiles(examples[0].problem, variant, examples[0].mask, report)
        facts["tiles"] = asdict(tiles) | {"skipped_share": tiles.skipped_share}
    return facts, verdict


def _described(access: Access, source: str) -> dict[str, Any]:
    lines = source.splitlines()
    text = lines[access.line - 1].strip() if 0 < access.line <= len(lines) else ""
    return asdict(access) | {"conflicts": access.conflicts, "source": text}


def _print(facts: dict[str, Any], verdict: Verdict) -> None:
    from flashgen.tools.cli.output import Column, counted, print_pairs, print_table, size

    counters, tiles = facts["counters"], facts.get("tiles")
    run = f"{counted(facts['seeds'], 'seed')} from {facts['seed']}, {facts['seconds']:.2f} s each"
    problem = "x".join(map(str, facts["shape"]))
    if "seqlen_kv" in facts:  # operators without keys have a shape alone
        keys = counted(facts["seqlen_kv"], "key")
        problem += f", {facts['num_heads_kv']} kv heads of {keys}, head_dim_v {facts['head_dim_v']}"
    if "sequences" in facts:
        problem += f"; {counted(facts['sequences'], 'sequence')} of random lengths up to that"
    pairs = [("problem", problem), ("ran", f"{counted(counters['blocks'], 'block')}, {run}")]
    for title, worst in (("error", verdict.out), ("error of LSE", verdict.lse)):
        if worst is None:
            continue
        pairs.append((title, worst.describe() + ("" if worst.share <= 1 else "  !")))
    if facts["seeds"] > 1:
        pairs.append(("repeatable", "yes" if facts["repeatable"] else "no: the order of threads shows  !"))
    counts = [(title, sum(counters[name] for name in names)) for title, names in _KINDS.items()]
    pairs.append(("instructions", "\n".join(f"{count:>12,} {title}" for title, count in counts if count)))
    pairs.append(
        ("global memory", f"{size(counters['global_bytes_read'])} read, "
                          f"{size(counters['global_bytes_written'])} written")
    )  # fmt: skip
    if tiles is not None:
        share = tiles["skipped_share"]
        part = "warpgroup" if any(counters[name] for name in _KINDS["wgmma, of warpgroups"]) else "warp"
        skipped = (
            "none is masked" if share is None else f"{share:.0%} of {tiles['masked']} masked ones skipped"
        )
        pairs.append(("tiles", f"{tiles['total']} of a {part} and a block of keys, {skipped}"))
    print_pairs(pairs, title=facts["variant"])
    click.echo()
    columns = [Column("line", number=True), Column("access")]
    columns += [Column(header, number=True) for header in ("instructions", "bytes", "cost", "conflicts")]
    columns.append(Column("source", optional=True))
    rows = [
        [
            str(access["line"]),
            access["kind"],
            f"{access['instructions']:,}",
            f"{access['bytes']:,}",
            f"{access['actual']:,}",
            f"{access['conflicts']:,}",
            access["source"],
        ]
        for access in facts["accesses"]
    ]
    print_table(columns, rows, ["yellow" if access["conflicts"] else "" for access in facts["accesses"]])
    say(
        "\ncost: wavefronts of shared memory, 32-byte sectors of global memory; "
        "conflicts: those beyond the fewest"
    )
