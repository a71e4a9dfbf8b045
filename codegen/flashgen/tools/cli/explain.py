"""`flashgen explain`: which kernel a call takes, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flashgen.tools.cli.options import Architecture, ShapeType, SplitsType, json_option, mask_type_option
from flashgen.tools.cli.output import say

if TYPE_CHECKING:
    from flashgen.families.variant import Variant
    from flashgen.operators.splits import Splits
    from flashgen.schedule.explain import Explanation
    from flashgen.schedule.plan import Step

# The option of this command for each argument, in messages.
_WORDS = {
    "cu_seqlens_q": "--packed",
    "cu_seqlens_kv": "--packed",
    "max_seqlen_q": "--max-seqlen-q",
    "kv_lengths": "--kv-lengths",
    "window_size": "--window",
}


@click.command(
    "explain",
    short_help="Which kernel a call takes, and why not the others.",
    epilog="""
\b
Examples:
  flashgen explain --shape 1x4096x16x128 --causal --arch sm_90
  flashgen explain --shape 1x4096x16x128 --kv 1x8192x4x128 --dtype bf16
  flashgen explain --shape 8x1x32x128 --kv 8x4000x8x128 --arch sm_80 --json
  flashgen explain --shape 1x4096x16x192 --v 1x4096x16x128 --arch sm_90
  flashgen explain --shape 2x1000x8x64 --window 256 0 --arch sm_86 --all
  flashgen explain --shape 64x1x32x128 --kv 64x8192x8x128 --kv-lengths
  flashgen explain --shape 64x1x32x128 --kv 9000x16x8x128 --pages 64x512
  flashgen explain --shape 9000x32x128 --packed 12 --max-seqlen-q 2048
  flashgen explain --shape 8x1x32x128 --kv 8x4000x8x128 --splits every:1024
  flashgen explain --shape 4x4096x16x128 --operator attention_backward

Shapes are BATCHxSEQLENxHEADSxHEAD_DIM; attention() also takes arrays without batch, which have a batch of 1
here. Arrays are assumed to be contiguous. Times come from dispatch's model; compare them within one call
only.

Without --arch the GPU is this machine's, with the tiles that were tuned on it. With --arch it is a well-known
one of that architecture, such as the H100 for sm_90. Exit code 1 if no kernel serves the call.
""",
)
@click.option("--shape", "q", type=ShapeType(), required=True, help="Shape of q.")
@click.option("--kv", "k", type=ShapeType(), help="Shape of k. [default: the shape of q]")
@click.option("--v", "v", type=ShapeType(), help="Shape of v. [default: the shape of k]")
@click.option("--dtype", default="fp16", show_default=True, help="fp16, bf16 or fp32.")
@click.option("--causal", is_flag=True, help="A causal mask, aligned bottom right.")
@mask_type_option
@click.option("--mask", type=ShapeType(), help="Shape of a dense mask, such as 4096x4096.")
@click.option("--window", type=int, nargs=2, metavar="LEFT RIGHT", help="A window; -1 is no bound.")
@click.option("--softcap", type=float, help="A cap of the scores.")
@click.option("--kv-lengths", is_flag=True, help="Each sequence has its own number of keys.")
@click.option("--pages", type=ShapeType(), help="Shape of a page table; --kv is PAGESxPAGE_SIZExHEADSxDIM.")
@click.option(
    "--packed",
    type=click.IntRange(0),
    metavar="N",
    help="N packed sequences: --shape is TOKENSxHEADSxHEAD_DIM.",
)
@click.option("--max-seqlen-q", type=click.IntRange(0), help="The most queries of a packed sequence.")
@click.option("--splits", type=SplitsType(), help="auto, a number of splits, or every:KEYS for SplitEvery.")
@click.option("--deterministic", is_flag=True, help="Gradients with the same bits each time.")
@click.option(
    "--operator",
    type=click.Choice(("attention", "attention_backward", "attention_weights")),
    default="attention",
    show_default=True,
    help="What is computed: attention, attention_backward for its gradients, or attention_weights for the "
    "weights of return_weights=True.",
)
@click.option("--algorithm", help="A family by its name: naive, v1, v2 or v3.")
@click.option("--arch", type=Architecture(), help="Architecture, such as sm_90. [default: this GPU's]")
@click.option("--all", "everything", is_flag=True, help="A line for each variant.")
@json_option
def command(
    q: tuple[int, ...],
    k: tuple[int, ...] | None,
    v: tuple[int, ...] | None,
    dtype: str,
    causal: bool,
    mask_type: str | None,
    mask: tuple[int, ...] | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    kv_lengths: bool,
    pages: tuple[int, ...] | None,
    packed: int | None,
    max_seqlen_q: int | None,
    splits: Splits | None,
    deterministic: bool,
    operator: str,
    algorithm: str | None,
    arch: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Say which kernel a call of attention(), or of its gradients, takes, and why not the others.

    Needs no GPU, and nothing is compiled.
    """
    from flashgen.api.explain import explain
    from flashgen.call.kvcache import KVCache
    from flashgen.errors import naming
    from flashgen.tools.cli.output import print_json

    options: dict[str, Any] = {"causal": causal, "mask_type": mask_type, "mask": mask}
    options |= {"softcap": softcap, "deterministic": deterministic, "algorithm": algorithm}
    if window is not None:
        options["window_size"] = window
    if splits is not None:
        options["splits"] = splits
    if packed is None:
        for option, shape in (("--shape", q), ("--kv", k), ("--v", v)):
            _require_batch(option, shape)
    batch = q[0] if packed is None else packed
    if packed is not None:
        options |= {"cu_seqlens_q": (packed + 1,), "max_seqlen_q": max_seqlen_q}
    elif max_seqlen_q is not None:
        raise click.UsageError("--max-seqlen-q is a bound of packed sequences; give --packed")
    if pages is not None:
        if k is None:
            raise click.UsageError("--pages needs --kv, the shape of the pages")
        if kv_lengths:
            raise click.UsageError("--pages is of a cache, which has lengths; leave out --kv-lengths")
        k, v = KVCache(k, v or k, (batch,), pages=pages), None
    elif kv_lengths:
        options["kv_lengths"] = (batch,)
    elif packed is not None:
        options["cu_seqlens_kv"] = (packed + 1,)
    with naming(_WORDS):
        found = explain(q, k, v, dtype=dtype, arch=arch, operator=operator, **options)
    if as_json:
        print_json(_as_dict(found))
    else:
        _print(found, everything)
    if found.variant is None:
        raise click.exceptions.Exit(1)


def _require_batch(option: str, shape: tuple[int, ...] | None) -> None:
    """That a shape of three sizes, which attention() would take for one without batch, is meant so."""
    if shape is None or len(shape) != 3:
        return
    seqlen, heads, head_dim = shape
    count = f"{seqlen} row{'s' * (seqlen != 1)} of {heads} heads of {head_dim}"
    raise click.BadParameter(
        f"{seqlen}x{heads}x{head_dim} has three sizes, and BATCHxSEQLENxHEADSxHEAD_DIM are four. Without a "
        f"batch it is {count}; if that is meant, write 1x{seqlen}x{heads}x{head_dim}",
        param_hint=option,
    )


def _as_dict(result: Explanation) -> dict[str, Any]:
    return {
        "arch": result.device.arch,
        "gpu": result.device.name,
        "problem": result.problem.description(),
        "variant": result.variant.name if result.variant else None,
        "tile": dict(result.variant.tile) if result.variant else None,
        "shares": str(result.shares) if result.shares else None,
        "steps": [{"variant": step.variant.name} | step.launch._asdict() for step in result.steps],
        "workspace_bytes": result.workspace_bytes,
        "others": [
            {"variant": other.variant.name, "rule": other.rule, "why": other.why, "time": other.time}
            for other in result.others
        ],
    }


def _tile(variant: Variant) -> str:
    return ", ".join(f"{key} {value}" for key, value in variant.tile)


def _launched(step: Step) -> str:
    return f"{step.variant.name}: {step.launch}"


def _print(result: Explanation, everything: bool) -> None:
    from flashgen.tools.cli.output import Column, counted, print_pairs, print_table

    device, problem = result.device, result.problem
    sizes = ", ".join(f"{name} {size}" for name, size in problem.sizes.items())
    gpu = f"{device.num_sms} multiprocessors, {device.memory_gbps:,.0f} GB/s"
    print_pairs(
        [
            ("GPU", f"{device.name}, {device.arch}, {gpu}"),
            ("call", f"{sizes}\n{problem.dtype}, mask type {problem.mask_type}"),
            ("takes", str(result.variant) if result.variant else "nothing: no variant serves this call here"),
            *([("tile", _tile(result.variant))] if result.variant else []),
            *([("shares", str(result.shares))] if result.shares else []),
            *([("launches", "\n".join(map(_launched, result.steps)))] if result.steps else []),
            *([("workspace", f"{result.workspace_bytes:,} bytes")] if result.workspace_bytes else []),
        ]
    )
    shown = result.others if everything else result.slower
    if shown:
        click.echo()
        print_table(
            [Column("other variant"), Column("why not", wraps=True)],
            [[other.variant.name, other.why] for other in shown],
        )
    counts = result.counts()
    if counts and not everything:
        say("\nruled out before their time was modelled (--all lists them):")
        for rule, count in counts.items():
            say(f"  {counted(count, 'variant'):>13}  by {rule}")
