"""The documentation as a site: `python docs/site.py` writes it to build/site.

It needs the extra `site` (mkdocs-material). The pages are those that the README lists. A link to a page leads
to the page of the site, a link to another file to a copy of it. The reference of functions follows from their
docstrings, and the inspected kernels are pages of `flashgen inspect --html`.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import flashgen
from flashgen import distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
# A fenced block, or a link outside of one.
_FENCE_OR_LINK = re.compile(
    r"(?P<fence>^ *```.*?^ *```$)|\[(?P<text>[^][]*)\]\((?!\w+:)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)",
    re.M | re.S,
)
_SECTION = re.compile(r"^\| (?P<title>[^|]+) \| \|\n\| --- \| --- \|\n(?P<rows>(?:\|.*\n)+)", re.M)
# What `benchmarks/report.py` writes before a table.
_TABLE = re.compile(r"^<!-- table: [^\n]*?(?P<file>[\w/]+\.json)[^\n]* -->\n", re.M)
# Kernels that have a page: forward and backward on Hopper, and decoding.
KERNELS = {
    "Forward on Hopper": "flash_fwd_hdim128_fp16_causal_m128_sm90",
    "Backward on Hopper": "flash_bwd_hdim128_bf16_causal_sm90",
    "Decoding on Hopper": "flash_decode_hdim128_bf16_packgqa_sm90",
}
_MKDOCS = """\
site_name: flashgen
theme:
  name: material
  font: false
  features: [navigation.sections, navigation.top, search.highlight, content.code.copy]
  palette:
    - media: "(prefers-color-scheme: light)"
      scheme: default
      primary: black
    - media: "(prefers-color-scheme: dark)"
      scheme: slate
      primary: black
plugins: [search]
extra_css: [site.css]
validation: {anchors: warn, omitted_files: ignore}
markdown_extensions:
  - tables
  - pymdownx.superfences
  - pymdownx.highlight: {pygments_lang_class: true}
  - toc: {permalink: true, slugify: !!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}}
"""
# The methods of classes; others are for flashgen's own use. Docstrings of classes have the fields.
_MEMBERS = {
    "Mask": ("from_array", "line", "arguments", "update", "keep_lists", "blocks", "check", "show"),
    "record": ("close",),
}
# Names in tables stay whole, tables have room for ten columns and code for a line of 90 characters. Longer
# lines of kernels, specs and messages continue below. Wide screens are used, and a picture on a phone is
# scrolled, as its text would be too small.
_STYLES = """\
.md-grid { max-width: 76rem; }
.md-typeset td code, .md-typeset th code { word-break: normal; overflow-wrap: normal; }
.md-typeset table:not([class]) th { min-width: 0; }
.md-typeset table:not([class]) th, .md-typeset table:not([class]) td { padding: .5em .7em; }
.md-typeset pre > code { font-size: .72em; }
@media screen and (min-width: 45em) {
  :is(.language-cpp, .language-diff, .language-yaml) pre > code { white-space: pre-wrap; }
}
@media screen and (max-width: 44.9375em) {
  .md-typeset p:has(> img) { overflow-x: auto; }
  .md-typeset p > img { max-width: none; width: 640px; }
}
"""
# The way back from an inspected kernel, whose page is none of MkDocs'.
_BACK = '<p><a href="../index.html">The documentation of flashgen</a></p>'


def sections() -> dict[str, list[Path]]:
    """The pages that the README lists, by the title of their table."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Documentation")[2]
    found = {}
    for table in _SECTION.finditer(text):
        links = re.findall(r"\[[^]]+\]\(([^)]+)\)", re.sub(r"(?m)^(\|[^|]*\|).*$", r"\1", table["rows"]))
        found[table["title"].strip()] = [ROOT / link for link in links]
    return found


def place(page: Path) -> str:
    """The path of a page in the site's folder."""
    path = page.relative_to(ROOT)
    if path == Path("README.md"):
        return "index.md"
    return path.relative_to("docs").as_posix() if path.parts[0] == "docs" else "-".join(path.parts).lower()


def prepare(folder: Path) -> dict[str, list[Path]]:
    """Write the pages, and the files that they link to, into ``folder``. Returns the sections."""
    listed = sections()
    pages = dict.fromkeys([ROOT / "README.md", *(page for part in listed.values() for page in part)])
    pages |= dict.fromkeys(sorted((ROOT / "docs").rglob("*.md")))
    for page in pages:
        target = folder / place(page)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_with_links(page, pages, folder), encoding="utf-8")
    (folder / "api.md").write_text(reference(), encoding="utf-8")
    (folder / "api-distributed.md").write_text(reference_of_several_gpus(), encoding="utf-8")
    (folder / "site.css").write_text(_STYLES, encoding="utf-8")
    return listed


def _title(page: Path) -> str:
    """The first heading of a page."""
    return re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.M)[1]


def _with_links(page: Path, pages: dict[Path, None], folder: Path) -> str:
    """The text of a page whose links lead to other pages of the site, and to copies of files."""
    here = (folder / place(page)).parent

    def moved(match: re.Match[str]) -> str:
        if match["fence"]:
            return match[0]
        linked = (page.parent / match["path"]).resolve()
        if linked.is_dir():
            return match["text"]
        target = folder / (place(linked) if linked in pages else f"files/{linked.relative_to(ROOT)}")
        if linked not in pages:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(linked, target)
        text = match["text"]
        # In a clone a page is a file; here it has a title.
        if linked in pages and match["path"].endswith(text):
            text = _title(linked)
        return f"[{text}]({Path(os.path.relpath(target, here)).as_posix()}{match['anchor'] or ''})"

    text = _TABLE.sub(_with_source, page.read_text(encoding="utf-8"))
    text = _FENCE_OR_LINK.sub(moved, text)
    # Markdown in Python wants an empty line before a list.
    return re.sub(r"(?m)^(?!\s*[-*|] |\s*\d+\. |\s*$|#)(.+)\n(?=(?:-|\*|\d+\.) )", r"\1\n\n", text)


def _with_source(match: re.Match[str]) -> str:
    """The comment before a table of measurements, with the run that the table is of."""
    results = ROOT / "benchmarks" / "results" / match["file"]
    environment = json.loads(results.read_text(encoding="utf-8"))["environment"]
    day, commit = environment["date"].split()[0], environment["commit"][:8]
    return f"{match[0]}\n<small>{match['file']}: {day}, commit {commit}</small>\n\n"


def reference() -> str:
    """The page of all public functions and classes, from their signatures and docstrings."""
    functions, classes, errors = [], [], []
    for name in flashgen.__all__:
        value = getattr(flashgen, name)
        doc = inspect.getdoc(value) or ""
        if isinstance(value, type) and issubclass(value, Exception):
            errors.append(f"| `{name}` | {as_markdown(' '.join(doc.split()))} |")
        elif isinstance(value, type):
            classes += [*_entry(name, _signature(name, value), doc), *_members(name, value)]
        elif callable(value):
            functions += _entry(name, _signature(name, value), doc)
        else:
            functions += [f"## {name}", "", "Functions for [several GPUs](api-distributed.md).", ""]
    head = ["# Reference", "", "Everything that `import flashgen` has: functions, classes, errors.", ""]
    table = ["## Errors and warnings", "", "| class | raised |", "| --- | --- |", *errors, ""]
    return "\n".join([*head, *functions, *classes, *table])


def reference_of_several_gpus() -> str:
    """The page of `flashgen.distributed`. The functions are read, not imported: they need PyTorch."""
    lines = ["# Reference: several GPUs", "", as_markdown(inspect.getdoc(distributed)), ""]
    folder = Path(distributed.__file__).parent
    for name in distributed.__all__:
        text = (folder / f"{distributed._HOMES[name]}.py").read_text(encoding="utf-8")
        (found,) = (each for each in ast.parse(text).body if getattr(each, "name", None) == name)
        if isinstance(found, ast.FunctionDef):
            doc = ast.get_docstring(found) or ""
            lines += _entry(name, _laid_out(name, _parameters(found), _returned(found)), doc)
        else:
            value = getattr(distributed, name)
            lines += [*_entry(name, _signature(name, value), inspect.getdoc(value)), *_members(name, value)]
    return "\n".join(lines)


def _entry(name: str, signature: str, doc: str, level: str = "##") -> list[str]:
    return [f"{level} {name}", "", "```python", signature, "```", "", as_markdown(doc), ""]


def _members(name: str, cls: type) -> Iterator[str]:
    """The methods and properties of a class that users call."""
    for member in _MEMBERS.get(name, ()):
        held, title = vars(cls)[member], f"{name}.{member}"
        signature = title
        if not isinstance(held, property):
            signature = _signature(title, getattr(cls, member))
        yield from _entry(title, signature, inspect.getdoc(held) or "", "###")


def _parameters(function: ast.FunctionDef) -> list[str]:
    """The parameters of a function as its source has them."""
    args = function.args
    first = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(first) - len(args.defaults)) + args.defaults
    every = [*zip(first, defaults, strict=True)]
    every += [None, *zip(args.kwonlyargs, args.kw_defaults, strict=True)] if args.kwonlyargs else []
    shown = []
    for pair in every:
        text = ast.unparse(pair[0]) if pair else "*"
        shown.append(text + (f" = {ast.unparse(pair[1])}" if pair and pair[1] is not None else ""))
    return shown


def _returned(function: ast.FunctionDef) -> str:
    return ast.unparse(function.returns) if function.returns else "None"


def as_markdown(doc: str) -> str:
    """A docstring as Markdown: arguments, whose texts are indented, as a list, and examples as code."""
    blocks = []
    for block in re.split(r"\n\s*\n", doc):
        if block.startswith(">>>"):
            blocks.append(f"```pycon\n{block}\n```")
            continue
        entries = re.sub(r"\n\s+", " ", block.replace("``", "`").replace("<", "&lt;")).split("\n")
        named = [re.sub(r"^(\w+(?:, \w+)*): ", r"- **\1**: ", entry) for entry in entries]
        is_list = len(named) > 1 or "\n " in block
        blocks.append("\n".join(named) if is_list and named[0].startswith("- ") else " ".join(entries))
    return "\n\n".join(blocks)


def _signature(name: str, value: Callable[..., object]) -> str:
    """The signature of a function or a class."""
    signature = inspect.signature(value)
    parameters = []
    for parameter in signature.parameters.values():
        # Keywords of the type Never are there for the message about a misspelled one.
        if parameter.name == "self" or parameter.annotation == "Never":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        # Annotations are text, of which a signature would show the quotes.
        text = str(parameter.replace(annotation=parameter.empty))
        if parameter.annotation is not parameter.empty:
            variable, equals, default = text.partition("=")
            kind = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)
            text = f"{variable}: {kind}" + (f" = {default}" if equals else "")
        parameters.append(text)
    returns = signature.return_annotation
    return _laid_out(name, parameters, "None" if returns is signature.empty else str(returns))


def _laid_out(name: str, parameters: list[str], returns: str) -> str:
    """A signature, one parameter a line where it is long."""
    arrow = "" if returns == "None" else f" -> {returns}"
    line = f"{name}({', '.join(parameters)}){arrow}"
    if len(line) <= 70:
        return line
    return f"{name}(\n" + "".join(f"    {x},\n" for x in parameters) + f"){arrow}"


def inspected(folder: Path) -> dict[str, str]:
    """Pages of `flashgen inspect --html`; their titles, and the kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in KERNELS.values():
        page = folder / f"{name}.html"
        subprocess.run([sys.executable, "-m", "flashgen", "inspect", name, "--html", str(page)], check=True)
        page.write_text(with_way_back(page.read_text(encoding="utf-8")), encoding="utf-8")
    return KERNELS


def with_way_back(page: str) -> str:
    """A page of `flashgen inspect --html` with a link to the site."""
    return page.replace("<body>", f"<body>\n{_BACK}", 1)


def configuration(listed: dict[str, list[Path]], kernels: dict[str, str]) -> str:
    """The configuration of MkDocs; JSON is YAML as well."""
    parts: list[object] = [{"Overview": "index.md"}]
    parts += [
        {title[0].upper() + title[1:]: [place(page) for page in pages]} for title, pages in listed.items()
    ]
    parts.append({"Reference": [{"flashgen": "api.md"}, {"flashgen.distributed": "api-distributed.md"}]})
    if kernels:
        parts.append(
            {"Inspected kernels": [{title: f"kernels/{name}.html"} for title, name in kernels.items()]}
        )
    return f"{_MKDOCS}nav: {json.dumps(parts)}\n"


def main() -> None:
    """Write the site."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="the folder of the site")
    parser.add_argument(
        "--kernels", action="store_true", help="with inspected kernels; needs NVRTC, nvdisasm"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "site-pages", help="the folder of MkDocs' sources"
    )
    options = parser.parse_args()
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    listed = prepare(work / "docs")
    kernels = inspected(work / "docs" / "kernels") if options.kernels else {}
    (work / "mkdocs.yml").write_text(configuration(listed, kernels), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(work / "mkdocs.yml")]
    sys.exit(subprocess.run([*command, "--site-dir", str(options.out.resolve())]).returncode)


if __name__ == "__main__":
    main()
