"""`flashgen inspect`: one kernel, from its place in the spec down to its machine code."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from flashgen.tools.cli.options import (
    Architecture,
    OutputFile,
    OutputFolder,
    json_option,
    load_variants,
    score_option,
    specs_option,
    variant_named,
    with_score,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flashgen.families.variant import Variant

_VIEWS = ("source", "flat", "ptx", "sass", "resources", "html", "out")
# View -> the lexer that colours it.
_LEXERS = {"source": "cuda", "flat": "cuda", "ptx": "ptx", "sass": "gas"}


@click.command(
    "inspect",
    short_help="One kernel: source, PTX, machine code, resources.",
    epilog="""
\b
Examples:
  flashgen inspect flash_fwd_hdim128_fp16_causal_sm80
  flashgen inspect --head-dim 128 --dtype fp16 --mask-type causal --source
  flashgen inspect flash_fwd_hdim128_fp16_sm90 --source --section roles
  flashgen inspect flash_fwd_hdim128_fp16_sm90 --html kernel.html
  flashgen inspect --head-dim 64 --target sm86 --resources --arch sm_89
  flashgen inspect generated/flash_fwd_hdim128_fp16_sm80.cu --flat > kernel.cu
  flashgen inspect flash_fwd_hdim128_fp16_sm80 --sass | grep -c HMMA

NAME is a variant's name as `flashgen list` prints it, or the path of its generated file. Instead of NAME,
give axes; of several variants that fit, the first that `flashgen list` prints is shown, and a remark says
so. With --arch only variants that dispatch prefers there are considered.
""",
)
@click.argument("name", required=False)
@click.option("--source", is_flag=True, help="The CUDA source, as rendered.")
@click.option(
    "--section",
    "parts",
    multiple=True,
    metavar="PART",
    help="With --source: only this part: header, map, constants, params, verbs, roles (the algorithm), "
    "definitions, assertions, or a seam, such as visible. Repeatable.",
)
@click.option("--flat", is_flag=True, help="The CUDA source with flashgen's own headers in it: one file.")
@click.option("--ptx", is_flag=True, help="The PTX that NVRTC generates.")
@click.option("--sass", is_flag=True, help="The machine code; needs nvdisasm, from CUDA or its wheel.")
@click.option("--resources", is_flag=True, help="Registers, spills, stack, shared memory, instructions.")
@click.option(
    "--html",
    type=OutputFile(),
    metavar="FILE",
    help="Write a page: map, barriers, shared memory, registers, source beside the machine code.",
)
@click.option(
    "--out",
    type=OutputFolder(),
    metavar="FOLDER",
    help="Write the source, its headers and a compile_commands.json, for an editor with clangd.",
)
@click.option(
    "--arch",
    type=Architecture(),
    help="Architecture to pick and compile for. [default: this GPU's, else the first of the spec's]",
)
@click.option("--head-dim", type=int, help="Pick by axis, such as 64 or 128.")
@click.option("--head-dim-v", type=int, help="Pick by axis, if v has another: 128 with --head-dim 192.")
@click.option("--dtype", help="Pick by axis: fp16, bf16 or fp32.")
@click.option("--mask-type", help="Pick by axis: none, causal, local or dense.")
@click.option("--gqa", help="Pick by axis: mha, gqa or packed.")
@click.option("--target", help="Pick by target: sm80 (data centre), sm86 (GeForce and workstation), ...")
@click.option("--tile", help="Pick by the tile's name; `default` is the ordinary one.")
@specs_option
@score_option
@json_option
def command(
    name: str | None,
    arch: str | None,
    specs: Path | None,
    score: str | None,
    parts: tuple[str, ...],
    as_json: bool,
    **others: Any,
) -> None:
    """Show one kernel: what it is, its source, PTX, machine code or resources.

    Without a view it prints what the variant is and where it comes from. Source is highlighted in a terminal
    and printed byte for byte in a pipe. No view needs a GPU.
    """
    from flashgen.tools.cli.output import note, print_code, print_json, print_pairs

    html, out = others["html"], others["out"]
    views = [view for view in _VIEWS if others.pop(view)]
    if len(views) > 1:
        raise click.UsageError(f"one view at a time, not {' and '.join(f'--{view}' for view in views)}")
    view = views[0] if views else None
    if parts and view != "source":
        raise click.UsageError("--section is a part of the source; give it with --source")
    (variant,) = with_score([_resolve(name, others, arch, specs)], specs, score)
    if arch:
        arch = _arch(variant, arch)
    if view is None:
        if as_json:
            print_json(_described(variant))
            return
        print_pairs(_card(variant), title=variant.name)
        note("\nSee it with --source, --flat, --ptx, --sass, --resources or --html.")
    elif view in ("source", "flat"):
        text = _source(variant, flat=view == "flat")
        if parts:
            text = _parts(variant, text, parts)
        if as_json:
            print_json({"variant": variant.name, view: text})
        else:
            print_code(text, _LEXERS[view])
    elif html or out:
        _write(variant, arch or _default_arch(variant), html, out, as_json)
    else:
        arch = arch or _default_arch(variant)
        if view == "resources":
            _resources(variant, arch, as_json)
            return
        text = _ptx(variant, arch) if view == "ptx" else _sass(variant, arch)
        if as_json:
            print_json({"variant": variant.name, "arch": arch, view: text})
        else:
            note(f"{variant.name} for {arch}")
            print_code(text, _LEXERS[view])


def _resolve(
    name: str | None, axes: dict[str, str | int | None], arch: str | None, specs: Path | None
) -> Variant:
    """The variant that NAME or the axes mean; of several the one that dispatch prefers on ``arch``."""
    from flashgen.families.selection import find_by_axes
    from flashgen.schedule.dispatch import preferred
    from flashgen.tools.cli.output import note

    conditions = {key: str(value) for key, value in axes.items() if value is not None}
    if name and conditions:
        options = ", ".join(f"--{key.replace('_', '-')}" for key in conditions)
        raise click.UsageError(f"NAME says which variant already; leave out {options}.")
    if not name and not conditions:
        raise click.UsageError("Which variant? Give a NAME, which `flashgen list` prints, or axes.")
    if name:
        return variant_named(specs, name)
    candidates = find_by_axes(load_variants(specs), conditions)
    if arch:
        running = _running(candidates, arch)
        if not running:
            raise click.ClickException(f"none of the {len(candidates)} variants that fit runs on {arch}")
        candidates = preferred(running)
    if len(candidates) > 1:
        note(f"{len(candidates)} variants fit; this is the first, {candidates[0].name}")
    return candidates[0]


def _running(variants: Sequence[Variant], arch: str) -> tuple[Variant, ...]:
    """Those that run on ``arch``, as far as is known of its shared memory."""
    from flashgen.families.arch import KNOWN_ARCHS, typical
    from flashgen.schedule.dispatch import runs_on

    device = typical(arch) if arch in KNOWN_ARCHS else None
    return tuple(
        variant for variant in variants if (runs_on(variant, device) if device else variant.code_for(arch))
    )


def _described(variant: Variant) -> dict[str, Any]:
    """The variant as JSON, with the files that it comes from."""
    from flashgen.tools.cli.kernels import places

    return variant.as_dict() | {"files": asdict(places(variant))}


def _card(variant: Variant) -> list[tuple[str, str]]:
    """What the variant is, for a person."""
    from flashgen.families.arch import range_of
    from flashgen.source.params import layout
    from flashgen.tools.cli.kernels import places

    files = places(variant)
    schedule = variant.grid.schedule.replace("_", " ")
    if variant.grid.kinds == 2:
        schedule += ", one of each kind"
    smem = f"{variant.smem_bytes:,} bytes of dynamic shared memory, of at most {variant.max_smem:,}"
    return [
        *((key, str(value)) for key, value in variant.axes),
        ("tile", ", ".join(f"{key} {value}" for key, value in variant.tile)),
        ("block", f"{variant.threads} threads\n{smem}"),
        ("schedule", schedule),
        ("target", f"{variant.target}: {range_of(variant.min_arch)}; built for {', '.join(variant.archs)}"),
        ("parameters", f"{layout(variant.params).size} bytes: {', '.join(p.name for p in variant.params)}"),
        ("spec", files.spec),
        ("template", files.template),
        ("source", files.generated or "rendered when needed; see it with --source"),
    ]


def _source(variant: Variant, flat: bool) -> str:
    from flashgen.source.render import flatten, include_dirs, render

    text = render(variant)
    return flatten(text, include_dirs(variant)) if flat else text


def _parts(variant: Variant, source: str, names: Sequence[str]) -> str:
    """Parts of a source, in its order."""
    from flashgen.source.order import seams, sections

    parts = (*sections(source), *seams(source))
    present = [*dict.fromkeys(part.name for part in parts)]
    lacking = [name for name in names if name not in present]
    if lacking:
        raise click.BadParameter(
            f"{variant.name} has no part {lacking[0]!r}; it has {', '.join(present)}", param_hint="--section"
        )
    return "\n".join(part.text.strip("\n") + "\n" for part in parts if part.name in names)


def _write(variant: Variant, arch: str, html: Path | None, out: Path | None, as_json: bool) -> None:
    """Write the page, or the folder for an editor."""
    from flashgen.toolchain import atomic
    from flashgen.tools.cli.output import note, print_json

    if html is not None:
        from flashgen.tools.page import page

        atomic.check(html)
        atomic.replace(html, page(variant, arch).encode())
        files = [html]
    else:
        from flashgen.tools import editor

        assert out is not None
        files = editor.write(variant, out)
    if as_json:
        print_json({"variant": variant.name, "arch": arch, "files": [str(file) for file in files]})
        return
    for file in files:
        note(f"wrote {file}")


def _arch(variant: Variant, target: str) -> str:
    """The architecture that `flashgen build --arch` compiles the variant for."""
    from flashgen.toolchain.build import pairs
    from flashgen.toolchain.compile import check_known

    check_known([target])
    ((_, arch),) = pairs([variant], [target])
    return arch


def _default_arch(variant: Variant) -> str:
    """This machine's GPU where the variant runs on it, else the first architecture of the spec."""
    from flashgen.runtime.device import available, device
    from flashgen.schedule.dispatch import runs_on
    from flashgen.toolchain.obtain import arch_for

    if available() and runs_on(variant, device(0)):
        return arch_for(variant, device(0))
    return variant.archs[0]


def _ptx(variant: Variant, arch: str) -> str:
    from flashgen.source.render import headers, include_dirs, render
    from flashgen.toolchain.compile import compile_ptx
    from flashgen.toolchain.origins import template_lines_named

    source = render(variant)
    texts = headers(source, include_dirs(variant))
    with template_lines_named(variant, source):
        return compile_ptx(source, variant.name, arch, variant.options, texts)


def _sass(variant: Variant, arch: str) -> str:
    from flashgen.toolchain.disassemble import sass
    from flashgen.toolchain.obtain import obtain

    return sass(obtain(variant, arch)[0].cubin)


def _resources(variant: Variant, arch: str, as_json: bool) -> None:
    from flashgen.errors import CompileError, InternalError
    from flashgen.toolchain.build import build
    from flashgen.toolchain.disassemble import sass, summary
    from flashgen.tools.cli.output import print_json, print_pairs

    (built,) = build([(variant, arch)])
    kernel = built.compiled
    if kernel is None:
        raise CompileError(built.error)
    instructions, why = None, "not known: this is PTX"
    if not kernel.is_ptx:
        try:
            instructions, why = summary(sass(kernel.cubin)), ""
        except InternalError as error:  # there is no nvdisasm, or it is too old
            why = f"not counted: {error}"
    if as_json:
        print_json(built.as_dict() | {"instructions": instructions, "no_instructions": why or None})
        return
    pairs = [("architecture", arch), ("threads", f"{variant.threads} a block")]
    if kernel.registers is None:
        pairs += [
            ("registers", "not known: this is PTX, which the driver translates when it loads it"),
            ("shared memory", f"{variant.smem_bytes:,} bytes a block"),
        ]
    else:
        total = variant.smem_bytes + kernel.smem_static
        pairs += [
            ("registers", f"{kernel.registers} a thread, {kernel.registers * variant.threads:,} a block"),
            ("spills", f"{kernel.spill_stores} bytes stored, {kernel.spill_loads} bytes loaded, a thread"),
            ("stack", f"{kernel.stack} bytes a thread"),
            ("shared memory", f"{total:,} bytes a block, {kernel.smem_static:,} of them static"),
        ]
    pairs.append(("machine code", f"{len(kernel.cubin):,} bytes"))
    lines = [
        f"{count:>6,} {'in all' if name == 'instructions' else name}"
        for name, count in (instructions or {}).items()
    ]
    pairs.append(("instructions", "\n".join(lines) or why))
    print_pairs(pairs, title=variant.name)
