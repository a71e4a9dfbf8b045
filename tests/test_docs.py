"""The README and docs/ are true: their snippets run, their command lines parse, their links and names exist.

An HTML comment before a fenced block says what a test does with it:

    <!-- run -->             run it after the blocks before it; a page has one folder and one shell
    <!-- run: fails -->      the same; its last command must fail
    <!-- run: needs A B -->  the same, where there are A and B: a `gpu`, `nvdisasm`, a `compiler` of C++
    <!-- not run: WHY -->    for the reader alone; its commands are only parsed
    <!-- edit: FILE -->      a diff that is applied to FILE there
    <!-- output -->          each line must occur in what the last block printed; `...` is anything
    <!-- needs: A B -->      a Python block that needs libraries, or a `gpu`
    <!-- quotes: FILE -->    pieces of FILE in their order there; a line `...` is what lies between two

A shell block needs such a comment. Python blocks without `run` are run by themselves, and those without a
comment must run anywhere. Commands in running text are parsed. What is compiled goes into the cache of the
process, as in other tests.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from flashgen.call.fields import PLAN_KEYWORDS
from flashgen.errors import FlashgenError
from flashgen.families.load import load_specs
from flashgen.families.params import CTYPES
from flashgen.families.schema import BUFFER, DISPATCH, FILE, GRID, PARAM, RESERVED, STEP, TARGET, VISITS
from flashgen.families.scores import CPP_WORDS, load_scores, read_scores, reserved_names
from flashgen.host.paths import cache_dir
from flashgen.operators import OPERATORS
from flashgen.operators.lowering import CONSTANT
from flashgen.schedule.parameters import parameters
from flashgen.schedule.shares import shares_of
from flashgen.simulator import hostcompiler
from flashgen.source.files import parts_of
from flashgen.source.scores import score_functions
from flashgen.toolchain import disassemble
from flashgen.tools.cli import main

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
KERNELS = ROOT / "docs" / "kernels.md"
REFERENCE = ROOT / "docs" / "spec-reference.md"
SCORES = ROOT / "docs" / "scores.md"
READINGS = sorted((ROOT / "docs").glob("reading-*.md"))

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block: the page it is on, its line, language, text, and the comment before it."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def needs(self) -> list[str]:
        needs = re.fullmatch("(?:needs:|run: needs) (.*)", self.mark)
        return needs[1].split() if needs else []

    @property
    def runs(self) -> bool:
        return self.mark in ("run", "run: fails") or self.mark.startswith("run: needs ")


def blocks(page):
    text = page.read_text(encoding="utf-8")
    assert len(re.findall("^```", text, re.M)) == 2 * len(_BLOCK.findall(text)), f"{page} has an open block"
    return [
        Block(page, text.count("\n", 0, m.start("language")) + 1, m["language"], m["text"], m["mark"] or "")
        for m in _BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]
QUOTES = [b for b in BLOCKS if b.mark.startswith("quotes: ")]
SNIPPETS = [b for b in BLOCKS if b.language == "python" and not b.runs]
RUN = [page for page in PAGES if any(block.runs for block in blocks(page))]
RUN_ON_A_GPU = [page for page in PAGES if any(block.runs and "gpu" in block.needs for block in blocks(page))]
# These set up an environment from nothing: CI runs one, and tests/test_packaging.py reads both.
INSTALL = ("install-and-demo", "install-and-test")
_COLUMNS = 90


def marked(snippet):
    return pytest.param(snippet, id=str(snippet), marks=[pytest.mark.gpu] if "gpu" in snippet.needs else [])


@pytest.mark.parametrize("snippet", [marked(snippet) for snippet in SNIPPETS])
def test_a_snippet_runs(snippet, monkeypatch, capsys):
    for library in set(snippet.needs) - {"gpu"}:
        pytest.importorskip(library)
    monkeypatch.delenv("FLASHGEN_BACKEND", raising=False)
    monkeypatch.setenv("FLASHGEN_SPECS", "")  # which a snippet may set
    exec(compile(snippet.text, str(snippet), "exec"), {"__name__": "__main__"})
    # What a line's comment says that it prints. On a GPU the variant depends on which it is.
    printed = capsys.readouterr().out
    if "gpu" not in snippet.needs:
        for said in re.findall(r"print\(.*\)  # (.*)$", snippet.text, re.M):
            assert matches(said, printed)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("python", "sh")], ids=str)
def test_code_fits_the_site(block):
    """Longer lines are scrolled. CI and other tests read the commands that install."""
    assert block.mark in INSTALL or all(len(line) <= _COLUMNS for line in block.text.splitlines())


def test_snippets_cover_each_kind_of_array():
    on_readme = [s for s in SNIPPETS if s.page.parent == ROOT]
    assert {"cupy", "torch", "jax"} <= {need for s in on_readme for need in s.needs}
    assert any("numpy" in s.text and not s.needs for s in on_readme)


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.drawn
@pytest.mark.parametrize("page", RUN, ids=name)
def test_the_commands_of_a_page_run(page, tmp_path):
    lacking = walk(page, tmp_path, {"gpu": "that is a test of its own"} | tools())
    if lacking:
        pytest.skip(f"all but: {lacking}")


@pytest.mark.gpu
@pytest.mark.parametrize("page", RUN_ON_A_GPU, ids=name)
def test_the_commands_of_a_page_run_on_a_gpu(page, tmp_path):
    walk(page, tmp_path, tools())


def tools():
    """What blocks may need and this machine lacks, and why."""
    missing = {"compiler": hostcompiler.why_unavailable()}
    try:
        disassemble.nvdisasm()
    except FlashgenError as error:
        missing["nvdisasm"] = str(error)
    return {tool: why for tool, why in missing.items() if why}


def walk(page, tmp_path, missing):
    """Run the blocks of a page but those that need what is missing; returns why, except for a GPU."""
    pytest.importorskip("cupy", reason="the commands compile kernels")
    (tmp_path / "bin").mkdir()
    for command, arguments in (("flashgen", "-m flashgen"), ("python", "")):
        script = tmp_path / "bin" / command
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        script.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASHGEN_")} | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "codegen"),
        "FLASHGEN_CACHE_DIR": str(cache_dir()),
        "FLASHGEN_TUNED": str(tmp_path / "tuned"),
    }
    folder = tmp_path / "work"
    folder.mkdir()
    printed, lacked = "", set()
    for block in blocks(page):
        if block.mark.startswith("edit: "):
            apply(folder / block.mark.removeprefix("edit: "), block)
        elif block.runs and missing.keys() & block.needs:
            lacked |= missing.keys() & block.needs
        elif block.runs:
            command = block.text if block.language == "sh" else f"python - <<'END'\n{block.text}END\n"
            # What a block exports is there for the ones that follow.
            script = f"set -eo pipefail\n{command}\nexport -p > ../exports\n"
            exports = tmp_path / "exports"
            done = subprocess.run(
                ["bash", "-c", (exports.read_text() if exports.exists() else "") + script],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            printed = done.stdout + done.stderr
            assert (done.returncode != 0) == (block.mark == "run: fails"), f"{block}\n{printed}"
        elif block.mark == "output":
            for line in block.text.splitlines():
                assert matches(line, printed), f"{block}: {line!r} is not in\n{printed}"
    return "; ".join(missing[tool] for tool in sorted(lacked - {"gpu"}))


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh"], ids=str)
def test_a_shell_block_runs_or_says_why_not(block):
    assert block.runs or block.mark.startswith("not run: ") or block.mark in INSTALL
    assert set(block.needs) <= {"gpu", "nvdisasm", "compiler"}


def apply(path, block):
    lines = block.text.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
    new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{block}: {old!r} stands {text.count(old)} times in {path.name}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def matches(line, printed):
    words = r"\s+".join(re.escape(word) for word in line.split())
    return re.search(words.replace(re.escape("..."), r"[^\n]*?"), printed)


@pytest.mark.parametrize("block", QUOTES, ids=str)
def test_a_quote_stands_in_the_file(block):
    file = ROOT / block.mark.removeprefix("quotes: ")
    lines = file.read_text(encoding="utf-8").splitlines()
    at = 0
    for piece in block.text.split("...\n"):
        quoted = piece.splitlines()
        places = (i for i in range(at, len(lines)) if lines[i : i + len(quoted)] == quoted)
        assert quoted, f"{block}: nothing between two ..."
        at = next(places, -1)
        assert at >= 0, f"{block}: not in {file.name} in this order:\n{piece}"
        at += len(quoted)


@pytest.mark.parametrize("page", READINGS, ids=lambda page: page.stem)
def test_a_reading_names_what_is_in_its_kernels(page):
    text = page.read_text(encoding="utf-8")
    files = {b.mark.removeprefix("quotes: ") for b in blocks(page) if b.mark.startswith("quotes: ")}
    source = "".join((ROOT / file).read_text(encoding="utf-8") for file in sorted(files))
    names = re.findall(r"`([A-Za-z]\w*(?:\.\w+)?(?:<\d>)?)`", _BLOCK.sub("", text))
    assert names
    assert not [name for name in names if name not in source]


def command_lines():
    """Each `flashgen ...` in a shell block or in backticks, with where it stands."""
    found = []
    for block in BLOCKS:
        if block.language == "sh":
            found += [(str(block), line) for line in block.text.replace("\\\n", "").splitlines()]
    for page in PAGES:
        prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
        found += [
            (str(page.relative_to(ROOT)), re.sub(r"\s+", " ", code))
            for code in re.findall(r"`(flashgen [^`]+)`", prose)
        ]
    for where, line in found:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.commenters, lexer.whitespace_split = "#", True
        command = []
        for token in [*lexer, "|"]:
            if set(token) <= set("|&;<>()"):
                if command and Path(command[0]).name == "flashgen":
                    yield pytest.param(command[1:], id=f"{where} {' '.join(command)}")
                command = []
            else:
                command.append(token)


@pytest.mark.parametrize("arguments", [*command_lines()])
def test_a_command_line_parses(arguments, tmp_path):
    calls = tmp_path / "calls.json"
    calls.touch()
    arguments = [str(calls) if argument == calls.name else argument for argument in arguments]
    # `native` asks for a GPU, and parsing is all that is wanted here.
    arguments = ["sm_90" if argument == "native" else argument for argument in arguments]
    command, context = main, click.Context(main, info_name="flashgen")
    while isinstance(command, click.Group):
        name, *arguments = arguments
        command = command.get_command(context, name)
        assert command is not None, f"there is no command {name}"
    parsed = command.make_context(name, [*arguments], parent=context)
    for selection in parsed.params.get("selections", ()):
        assert "head_dim=224" in selection or select_some(selection)


def select_some(selection):
    from flashgen.families.selection import select

    return select([variant for spec in load_specs() for variant in spec.variants()], [selection])


def test_every_command_is_shown_in_the_readme():
    shown = {str(value.values[0][0]) for value in command_lines() if value.id.startswith("README.md")}
    assert set(main.list_commands(click.Context(main))) <= shown


def anchors(page):
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)]+)\)", text)
    for link in links:
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if target.suffix == ".png" and not any((ROOT / "benchmarks").rglob("*.png")):
            continue  # nothing has been measured in this checkout
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_kernels_and_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    variants = [variant for spec in load_specs() for variant in spec.variants()]
    scores = load_scores(keywords=()).by_name.values()
    names = {variant.name for variant in variants}
    names |= {v.modified(score).name for v in variants if v.family == "flash_fwd" for score in scores}
    for name in re.findall(r"\bflash_fwd_hdim\w+", text):
        assert name in names or "hdim224" in name, name
    folders = "specs|templates|generated|codegen|tests|docs|benchmarks"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*\w)`", text):
        if not path.startswith("benchmarks/results"):
            assert (ROOT / path).exists(), path


FILES = [
    str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".git" not in path.parts and path.is_file()
]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_in_short_exist(page):
    """Such as `api/merge.py`, or `merge.py` in the row of its folder: the end of a path outside the tests. Of
    a template also its part, as in `produce.cuh.j2:pages`.
    """
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    shipped = [f"/{path}" for path in FILES if not path.startswith("tests/")]
    for named in re.findall(r"`([\w./-]+\.(?:py|j2|cuh|cpp|cu|yaml|md))`", text):
        if named.startswith("tests/") or re.search(r"[A-Z]{3}", named.rpartition("/")[2]):
            continue  # checked above; a placeholder such as NAME_example.py, or README.md
        assert any(path.endswith(f"/{named}") for path in shipped), named
    for named, part in re.findall(r"`([\w./-]+\.j2):(\w+)`", text):
        paths = [ROOT / path[1:] for path in shipped if path.endswith(f"/{named}")]
        assert any(part in parts_of(path.read_text(encoding="utf-8"), named) for path in paths), (named, part)


def test_tables_of_earlier_kernels_say_so():
    """Each table of these files, as long as the page says that some are of earlier kernels."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    remark = "Measured with earlier kernels ([the difference](#performance)).\n\n"
    files = {"prefill", "head_dims", "ragged", "masks", "small"} if "with earlier kernels" in text else set()
    for match in re.finditer(r"<!-- table: (\S+) (?:sm80/)?(\w+)\.json", text):
        if match[1] != "environment":
            assert text[: match.start()].endswith(remark) == (match[2] in files), match[0]


def test_lines_of_scores_are_modifications(tmp_path):
    """Each `{score: ...}` of the page is a line that a folder may have."""
    text = (ROOT / "docs" / "scores.md").read_text(encoding="utf-8")
    lines = re.findall(r"`(\{score: .*?\})`", text)
    assert len(lines) > 4
    path = tmp_path / "scores.yaml"
    path.write_text("scores:\n" + "".join(f"  line_{n}: {line}\n" for n, line in enumerate(lines)))
    for score in read_scores(path, keywords=()).by_name.values():
        assert score_functions(score, "fp16")


ROOMS = ROOT / "codegen" / "flashgen"
# Arrows up that the page names.
EXCEPTIONS = {("source/generated.py", "toolchain"), ("families/tuned.py", "runtime")}


def imported_rooms(module):
    """The rooms that a module imports from when it runs; what is for type checkers alone is left out."""
    waiting = [ast.parse(module.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("flashgen."):
            yield node.module.split(".")[1]


def test_rooms_import_from_the_rooms_above_them():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    table = re.search(r"^## Rooms\n(.*?)^### ", text, re.M | re.S)[1]
    rooms = re.findall(r"^\| `(\w+)/` \|", table, re.M)
    assert set(rooms) == {folder.parent.name for folder in ROOMS.glob("*/__init__.py")}
    arrows_up = {
        (f"{room}/{module.name}", other)
        for place, room in enumerate(rooms)
        for module in (ROOMS / room).rglob("*.py")
        for other in imported_rooms(module)
        if other in rooms[place + 1 :]
    }
    assert arrows_up == EXCEPTIONS
    assert all(f"`{module}`" in table for module, _ in EXCEPTIONS)


def test_the_architecture_names_each_template_and_each_folder_of_parts():
    templates = ROOT / "templates"
    text = ARCHITECTURE.read_text(encoding="utf-8")
    assert {path.name for path in templates.glob("*.j2")} <= first_cells(text)
    table = re.search(r"^\| folder of `templates/lib` \|.*?^$", text, re.M | re.S)[0]
    assert first_cells(table) == {path.name for path in (templates / "lib").iterdir() if path.is_dir()}


def section(title, page=REFERENCE):
    """A section of a page without its title and its blocks."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", text, re.M | re.S)[1]


def first_cells(text):
    """The code in the first column of the tables in ``text``."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.M)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("Top level", FILE),
        ("Targets", TARGET),
        ("Steps", STEP),
        ("Grid", GRID),
        ("Visits", VISITS),
        ("Workspace", BUFFER),
        ("Dispatch", DISPATCH),
        ("Parameters", PARAM),
    ],
)
def test_the_reference_has_the_keys_that_are_checked(title, kind):
    text = re.split("The launcher knows|The dimensions of", section(title))[0]
    assert first_cells(text) == set(kind.fields)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_the_reference_has_the_axes_and_the_grid_dimensions_of_the_operator(operator):
    described = section("Axes").split("These are the axes of")[1]
    assert first_cells(described) >= set(operator.axes)
    for name, axis in operator.axes.items():
        if axis.choices == ("e4m3",):  # not in the table, which has the dtypes of the other operators
            assert "`dtype`, which is `e4m3`" in section("Axes")
            continue
        row = re.search(rf"^\| `{name}` \| ([^|]*) \|", described, re.M)[1]
        listed, choices = re.findall(r"`([^`]+)`", row), list(axis.choices or ())
        # Operators apart from those of the table have some of the values.
        of_table = operator.name.startswith("attention")
        assert choices == listed if of_table else {*choices} <= {*listed, "int32", "fp8dsmla"}
    dimensions = first_cells(section("Grid").split("The dimensions of")[1])
    assert dimensions >= set(operator.grid_dimensions)
    assert dimensions == {name for each in OPERATORS.values() for name in each.grid_dimensions}


# The arrays of a BlockMask for one query and one key, with their shapes.
_LISTS = {"block_indptr": (1, 1, 2), "block_indices": (1,)}


def test_the_reference_has_the_parameters_that_the_launcher_knows():
    import numpy as np

    from flashgen.families.arch import Device
    from flashgen.operators.attention import normalise
    from flashgen.runtime.arrays import view

    q = view(np.zeros((1, 1, 1, 64), np.float16), "q")
    gpu = Device(0, "sm_90", (9, 0), 132, 232448, 233472, 50 << 20, 3352, "some GPU")
    lists = {name: view(np.zeros(shape, np.int32), name) for name, shape in _LISTS.items()}
    problem = normalise(q, q, q, **lists, block_size=(64, 64))
    arrays = problem.operator.positions.keys()
    known = set(arrays)
    for spec in load_specs():
        if spec.operator != "attention" or spec.has_lengths:
            continue
        main = next(variant for variant in spec.variants() if variant.is_main)
        shares = shares_of(problem, main, gpu) if main.grid.shares else None
        for step in main.steps:
            known |= set(parameters(problem, step, gpu, shares))
    known |= {f"{array}_vector_width" for array in arrays}
    text = re.split("The launcher knows|With lengths `attention` has", section("Parameters"))[1]
    described = first_cells(text)
    # Rows about several arrays name one and list the rest.
    for array in ("k", "v", "out"):
        described |= {f"{array}_{axis}_stride" for axis in ("batch", "row", "head")}
    described |= {
        f"{array}_vector_width" for array in ("q", "k", "v", "sinks", *_LISTS, "dropout_seed", "out", "lse")
    }
    assert described == known


def test_the_reference_has_the_parameters_with_lengths():
    text = section("Parameters").split("The launcher knows")[1]
    described = first_cells(text)
    for array in ("k", "v", "out"):
        described |= {f"{array}_{axis}_stride" for axis in ("batch", "row", "head")}
    specs = [spec for spec in load_specs() if spec.operator == "attention" and spec.has_lengths]
    main = [v for spec in specs for v in spec.variants() if v.is_main]
    named = {param.name for variant in main for step in variant.steps for param in step.params}
    assert named - described == {"part_outputs", "part_sums", "tiles_taken"}  # of the workspace
    assert not OPERATORS["attention"].symbols - described


def test_the_reference_has_the_types_and_the_reserved_names():
    assert set(re.findall(r"`([^`]+)`", section("Parameters"))) >= set(CTYPES)
    assert set(re.findall(r"`([a-z0-9_]+)`", section("Reserved names"))) == RESERVED


def test_the_page_of_scores_has_the_names_that_no_parameter_may_have():
    text = section("Reserved names", SCORES).split("The name of a kernel's own")[0]
    listed = set(re.findall(r"`([a-z0-9_]+)`", text))
    assert listed == (reserved_names() | PLAN_KEYWORDS | {CONSTANT}) - CPP_WORDS


def test_the_specs_explain_their_tile_keys():
    """In a comment ``# KEY  what it is``, of the spec or of the one with whose keys it shares templates."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "specs").glob("*.yaml")))
    rows = re.findall(r"^# ((?:\w+, )*\w+)  +\S", text, re.M)
    explained = {key for row in rows for key in row.split(", ")}
    for spec in load_specs():
        assert {key for key, _ in spec.variants()[0].tile} <= explained
    described = first_cells(section("Tiles"))
    assert {key for key, _ in load_spec_of("flash_fwd_sm80").variants()[0].tile} <= described


def load_spec_of(name):
    return next(spec for spec in load_specs() if spec.name == name)


def test_the_main_loops_are_those_of_the_shipped_specs():
    text = KERNELS.read_text(encoding="utf-8")
    table = re.search(r"^\| `loop` \|.*?\n\n", text, re.M | re.S)[0]
    tiles = [dict(variant.tile) for spec in load_specs() for variant in spec.variants()]
    assert first_cells(table) - {"loop"} == {tile["loop"] for tile in tiles if "loop" in tile}


def widths_of_v(spec):
    pairs = dict.fromkeys((v.head_dim, v.head_dim_v) for v in spec.variants())
    others = [f"{of_v} with {width}" for width, of_v in pairs if of_v != width]
    return "; ".join(["as `head_dim`", *others])


def test_the_axes_are_those_of_the_shipped_specs():
    text = KERNELS.read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in row.split("|")] for row in re.findall(r"^\| (.*) \|$", text, re.M)]
    targets = next(row[1:] for row in rows if row[0] == "target")
    taken = [spec for spec in load_specs() if spec.name.startswith("flash_fwd_sm")]
    specs = {", ".join(f"`{target}`" for target in spec.targets): spec for spec in taken}
    assert set(targets) == set(specs)
    for axis in specs[targets[0]].axes:
        listed = next(row[1:] for row in rows if row[0] == f"`{axis}`")
        expected = [", ".join(map(str, specs[target].axes[axis])) for target in targets]
        assert listed == (
            expected if axis != "head_dim_v" else [widths_of_v(specs[target]) for target in targets]
        )

    shipped = {value for spec in specs.values() for value in spec.axes["head_dim"]}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    row = re.search(r"^\| head dimension \|(.*)$", readme, re.M)[1]
    listed = re.search(r"Kernels exist for ([\d, and]+);", row)[1]
    assert list(map(int, re.findall(r"\d+", listed))) == sorted(shipped)
