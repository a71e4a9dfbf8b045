"""What `flashgen doctor` found, as lists for a person."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashgen.tools.cli.output import counted, size


def sections(facts: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The facts as titled lists of names and values, for a person."""
    versions = facts["versions"] or {}
    gpus = facts["gpus"] or []
    compiler = facts["compiler"] or {}
    disassembler = facts["disassembler"] or {}
    simulator = facts["simulator"] or {}
    cache = facts["cache"]
    attention = facts["attention"]
    specs = facts["specs"]
    machine = [
        ("GPU" if len(gpus) < 2 else f"GPU {index}", _gpu_line(gpu)) for index, gpu in enumerate(gpus)
    ] or [("GPU", "none that nvidia-smi knows of")]
    works = f"{compiler.get('version')}, for {' '.join(compiler.get('archs', []))}"
    machine.append(("compiler", works if compiler.get("works") else f"none: {compiler.get('why')}"))
    machine.append(("disassembler", disassembler.get("path") or f"none: {disassembler.get('why')}"))
    pretended = f"{simulator.get('compiler')}\npretends to be {simulator.get('arch')}"
    why = simulator.get("why", "it breaks when loaded")
    machine.append(("simulator", f"none: {why}" if why else pretended))
    if specs:
        machine.append(("specs", _specs_lines(specs)))
    tuned = facts["tuned"]
    if tuned:
        counts = f"{counted(len(tuned['variants']), 'tile')} in use on {tuned['gpu']}"
        machine.append(("tuned", "\n".join([*tuned["files"], counts]) if tuned["files"] else "nothing"))
    if cache:
        usage = f"{cache['entries']} entries, {size(cache['bytes'])} of {size(cache['max_bytes'])}"
        if cache["problem"] and cache["entries"]:
            usage += (
                f"\nread-only ({cache['problem']}): these entries are used, "
                "other kernels are compiled anew by each process"
            )
        machine.append(("cache", f"{cache['root']}\n{usage}"))
    for bundle in facts["bundles"] or []:
        counts = f"{counted(bundle['kernels'], 'kernel')}, compiled by {bundle['compiler']}"
        machine.append(("bundle", f"{bundle['path']}\n{counts}"))
    paths = [(f"{place} arrays", _path_line(entry)) for place, entry in (attention or {}).items()]
    return [
        ("versions", [(name, version or "-") for name, version in versions.items()]),
        ("machine", machine),
        ("attention()", paths),
    ]


def _specs_lines(specs: dict[str, Any]) -> str:
    """The shipped folder with its number of files, and each file of the user's folders."""
    from flashgen.host.paths import specs_dir

    shipped = [path for path in specs["files"] if Path(path).parent == specs_dir()]
    own = [path for path in specs["files"] if path not in shipped]
    folder = [f"{counted(len(shipped), 'file')} in {specs_dir()}"] if shipped else []
    return "\n".join([*folder, *own])


def _gpu_line(gpu: dict[str, Any]) -> str:
    memory = f"{gpu['memory_mib'] / 1024:.0f} GB, " if gpu["memory_mib"] else ""
    return f"{gpu['name']}, {gpu['arch']}, {memory}driver {gpu['driver']}"


def _path_line(facts: dict[str, Any]) -> str:
    path = {
        "cpu": "CPU",
        "kernel": "generated kernel",
        "simulator": "generated kernel on the CPU",
        None: "not possible here",
    }[facts["path"]]
    example = f"\na causal fp16 call with head_dim 128 takes {facts['example']}" if "example" in facts else ""
    return f"{path}: {facts['why']}{example}"
