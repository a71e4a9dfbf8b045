"""Recorded calls as the list of a command: their kernels, their shapes, their cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashgen.tools.cli.output import note

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from flashgen.families.variant import Variant
    from flashgen.operators.operator import Problem
    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.grids import Grid

calls_option = click.option(
    "--calls",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The calls of a run, as flashgen.record() wrote them.",
)


def problems(path: Path) -> list[Problem]:
    """The problems of the calls. Raises BadParam."""
    from flashgen.call.recorded import problem_of, read

    return [problem_of(call) for call in read(path)]


def kernels(calls: Iterable[Mapping[str, Any]] | Path, arch: str) -> tuple[Variant, ...]:
    """The main kernel of each call on an architecture, each once. Raises BadParam, and what dispatch does."""
    from flashgen.api.explain import device_of, problems_of
    from flashgen.call.backends import specs_for
    from flashgen.schedule.dispatch import offers, select

    device = device_of(arch)
    specs = specs_for(device)
    mains = (
        select(problem, device, offers(problem, device, specs, algorithm))
        for problem, algorithm in dict.fromkeys(problems_of(calls))
    )
    return tuple(dict.fromkeys(mains))


def _of_attention(path: Path) -> Iterator[Problem]:
    """The calls of attention and its gradients whose arrays all belong to sequences of one length; a note
    counts the others.
    """
    left_out = 0
    for problem in problems(path):
        if problem.operator.name in ("attention", "attention_backward") and problem.lengths is None:
            yield problem
        else:
            left_out += 1
    if left_out:
        note(f"left out: {left_out} calls with lengths, or of other operators than attention")


def shapes(path: Path) -> str:
    """The shapes of calls of attention, as `flashgen tune --shapes` takes them. Raises ClickException where
    there is none.
    """
    texts = dict.fromkeys(
        f"{x.batch}x{x.seqlen_q}x{x.seqlen_kv}@{x.num_heads_q}/{x.num_heads_kv}" for x in _of_attention(path)
    )
    if not texts:
        raise click.ClickException(f"{path} has no calls of attention without lengths")
    return ",".join(texts)


def grid(path: Path) -> Grid:
    """The cases of calls of attention: full, causal, or in a causal window; a note counts the others. Raises
    ClickException where there is none.
    """
    from flashgen.operators.masks import UNBOUNDED
    from flashgen.tools.bench.cases import Case
    from flashgen.tools.bench.grids import Grid

    cases, left_out = {}, 0
    for x in _of_attention(path):
        masks = {"none": "none", "causal": "causal", "local": "window"}
        causal_window = x.mask_type != "local" or (x.window_right == 0 and x.window_left < UNBOUNDED)
        if x.mask_type not in masks or x.score is not None or x.has("sinks") or not causal_window:
            left_out += 1
            continue
        backward = x.operator.name == "attention_backward"
        case = Case(
            name="",
            batch=x.batch,
            seqlen_q=x.seqlen_q,
            seqlen_kv=x.seqlen_kv,
            num_heads_q=x.num_heads_q,
            num_heads_kv=x.num_heads_kv,
            head_dim=x.head_dim,
            dtype=x.dtype,
            mask=masks[x.mask_type],
            window=x.window_left if x.mask_type == "local" else 0,
            head_dim_v=None if x.head_dim_v == x.head_dim else x.head_dim_v,
            direction="backward" if backward else "forward",
            deterministic=backward and x.deterministic,
        )
        cases[case] = None
    if left_out:
        note(f"left out: {left_out} calls with a dense mask, another window, a score or sinks")
    if not cases:
        raise click.ClickException(f"{path} has no calls that the bench times")
    named = (replace(case, name=f"{number}: {_described(case)}") for number, case in enumerate(cases, 1))
    return Grid("calls", f"the calls of {path}", tuple(named))


def _described(case: Case) -> str:
    sizes = f"{case.batch}x{case.seqlen_q}x{case.seqlen_kv} {case.num_heads_q}/{case.num_heads_kv}"
    return f"{sizes} d{case.head_dim} {case.dtype} {case.mask} {case.direction}"
