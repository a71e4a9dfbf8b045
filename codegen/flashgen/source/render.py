"""From a Variant to CUDA source.

Templates are Jinja with delimiters that leave C++ alone: ``//%`` starts a line statement, ``//#`` a comment,
and ``${ x }`` prints a value. A line ``//: name`` begins a part of a file, which others include as
``file:name``. Undefined names are errors, and so are the usual delimiters of Jinja. What a template finds by
name is in `source.context`.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.errors import FlashgenError, InternalError, SpecError, TemplateWarning
from flashgen.families.arch import range_of
from flashgen.host.paths import code_digest, specs_dir
from flashgen.source import files
from flashgen.source.closure import (
    INCLUDE,
    PRINTED,
    REFERENCE,
    closure,
    folders_for,
    headers_of,
    included_by,
    search_path,
    spec_file,
)
from flashgen.source.context import context
from flashgen.source.parts import SOME_HEADERS, some_headers

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    import jinja2

    from flashgen.families.model import Spec
    from flashgen.families.variant import Variant

# The line of the header comment by which a rendered file is known.
RENDERED_BY = "Rendered by flashgen: edit the spec or the template, not this file."

# Patterns from here on are for rendering alone: a call of a kernel on disk does not wait for them.
_SPACES = " \t"
_NO_BREAK = "\xa0"  # a space at which no line of the header comment ends
_VALUE = r"\$\{[^}]*\}"
# Delimiters of statements and comments within this module, which neither C++ nor PTX has.
_BEGIN, _END, _BEGIN_COMMENT, _END_COMMENT = "\x02%", "%\x03", "\x02#", "#\x03"
# Jinja with its usual delimiters: a statement, a comment, a value. C++ has {{0, 1}, {2, 3}}, {{x}} and, in
# PTX, "{%0, %1}". So a statement here begins with a word of Jinja, and a value is one expression between
# blanks.
_FOREIGN = (
    (
        re.compile(
            r"\{%[-+]?\s*(?:autoescape|block|break|call|continue|do|elif|else|end\w+|extends|filter|for|from|if|"
            r"import|include|macro|raw|set|with)\b[^\n]*"
        ),
        "a statement is a line of its own that begins with //%",
    ),
    (re.compile(r"\{#[-+]?[ \t][^\n]*"), "a comment begins with //# and goes on to the end of its line"),
    (
        re.compile(r"\{\{[-+]?[ \t]+[A-Za-z_](?:[^{}(),;\n]|\([^()\n]*\))*[ \t][-+]?\}\}"),
        "a value is printed by ${ name }",
    ),
)
# The mark of the template line that a rendered line is made of: its file and number.
_MARK = re.compile("\x04([^\x05]*)\x05")
# What the filter trim leaves out of a marked text: blank lines at both ends, which may have marks.
_MARKED_BLANK = re.compile("\\A(?:[ \t]*(?:\x04[^\x05]*\x05)?\n)+|(?:\n[ \t]*(?:\x04[^\x05]*\x05)?)+\\Z")
# Jinja's own line statements swallow the blank lines after them, its line comments leave one, and it looks
# for either at each character. In a run of spaces a match begins at the first one alone, so that a long run
# takes linear time.
_STATEMENT_LINE = r"(?m)^[ \t]*//%([-+]?)(.*)$"
_COMMENT_LINE = r"(?m)^[ \t]*//#.*$"
_COMMENT = r"(?<![ \t])[ \t]*//#.*"
_BLANK_LINES = r"\n(?:[ \t]*\n){2,}"
_PRAGMA_ONCE = r"(?m)^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n"


def render(variant: Variant) -> str:
    """The CUDA source of one variant; ends with a newline.

    Raises SpecError when there is no such template in its ``search_path``, or outside of it, or one of the
    user's own is wrong, and InternalError when a shipped one is: the message names its file and line.
    """
    return _rendered(variant, marked=False)


def line_origins(variant: Variant) -> list[str]:
    """``file:line`` of the template line that each line of the rendered source is made of; "" for an empty
    line. Of an included template it is that template's own line; of a value of several lines the line that
    prints it. Raises as ``render``.
    """
    places: list[str] = []
    waiting: list[str] = []  # lines of a value, of which the last one has the mark
    for line in _rendered(variant, marked=True).splitlines():
        marks = _MARK.findall(line)
        if marks or (not waiting and not line.strip()):
            mark = marks[0] if marks else ""
            places += [mark if text.strip() else "" for text in (*waiting, mark)]
            waiting = []
        else:
            waiting.append(line)
    return places


def _rendered(variant: Variant, marked: bool) -> str:
    """The source; where it is ``marked``, lines end with a `_MARK`."""
    import jinja2

    folders = search_path(variant)
    form = variant.rendered_form()
    environment = _environment(folders, marked)
    try:
        text = environment.get_template(variant.template).render(context(form, header_comment(form)))
    except jinja2.TemplateSyntaxError as error:
        raise files.wrong(f"{error.filename or error.name}:{error.lineno}", error.message) from error
    except jinja2.TemplateNotFound as error:
        at = "" if error.name == variant.template else files.template_line(error, folders)
        raise files.missing(error.name, spec_file(variant), folders, at) from error
    except files.BadName as error:
        raise SpecError(f"{files.template_line(error, folders) or spec_file(variant)}: {error}") from error
    except FlashgenError:
        raise
    except Exception as error:
        where = files.template_line(error, folders) or variant.template
        raise files.wrong(where, f"{error} (rendering {variant.name})") from error
    text = re.sub(_BLANK_LINES, "\n\n", text).strip("\n") + "\n"
    if not text.startswith(header_comment(form)):
        where = str(files.find(variant.template, folders))
        raise files.wrong(where, "a template starts with ${ header }; this one does not")
    return text


def header_comment(variant: Variant) -> str:
    """The comment at the top of a generated file: what the kernel is, and from what it was rendered."""
    import textwrap

    axes = ", ".join(f"{axis} {value}" for axis, value in variant.axes)
    tile = ", ".join(f"{key}{_NO_BREAK}{value}" for key, value in variant.tile)
    rows = {
        "axes": axes,
        "tile": tile + (f" ({variant.tile_name})" if variant.tile_name else ""),
        "block": f"{variant.threads} threads, {variant.smem_bytes} bytes of dynamic shared memory",
        "target": f"{variant.target}: {range_of(variant.min_arch)}, "
        f"with {variant.max_smem} bytes or more of shared memory per block",
        "spec": f"{variant.spec}.yaml",
        "template": variant.template,
    }
    lines = [variant.name, "", RENDERED_BY, ""]
    for key, value in rows.items():
        lines += textwrap.wrap(value, 120, initial_indent=f"{key:<10}", subsequent_indent=" " * 10)
    return "\n".join(f"// {line}".rstrip() for line in lines).replace(_NO_BREAK, " ")


def headers(source: str, include_dirs: Sequence[str | os.PathLike[str]] | None = None) -> dict[str, str]:
    """The text of each ``flashgen/...`` header that ``source`` includes, directly or through another, by its
    name.

    ``include_dirs`` are the folders that hold ``flashgen/``; the shipped one by default. Raises InternalError
    for a header that is in none of them, SpecError where it is a header of the user's own that includes it.
    """
    return headers_of(included_by(source, "the rendered source"), files.include_folders(include_dirs))


def include_dirs(variant: Variant) -> tuple[str, ...]:
    """Where the headers of a variant are looked for: ``include`` in each folder of ``search_path`` that has
    one.
    """
    return files.including(search_path(variant))


def flatten(source: str, include_dirs: Sequence[str | os.PathLike[str]] | None = None) -> str:
    """``source`` as a single file: each ``flashgen/...`` header replaces its first ``#include``.

    ``include_dirs`` as for ``headers``. CUDA's own headers stay includes.
    """
    texts = headers(source, include_dirs)
    done: set[str] = set()

    def inline(text: str) -> str:
        return INCLUDE.sub(replace, text)

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name in done:
            return ""
        done.add(name)
        body = inline(re.sub(_PRAGMA_ONCE, "", texts[name])).strip("\n")
        return f"// begin {name}\n{body}\n// end {name}\n"

    return inline(source)


def source_digest(variant: Variant) -> str:
    """Hex SHA-256 over all that the source depends on: the variant, its templates and headers, and this
    renderer.

    Costs a few file reads and no Jinja, so a kernel in the disk cache is found without rendering it. Equal
    digests mean equal sources; a changed comment changes the digest.
    """
    folders = search_path(variant)
    form = variant.rendered_form()
    # The operator, which is no part of this renderer, gives an axis that the spec does not have its value.
    digest = hashlib.sha256(repr((form, form.axis_values)).encode())
    # The C++ of a score modification, or of a mask by a line, follows from its text as `operators` say.
    plain = variant.score is None and variant.rule is None
    digest.update(code_digest("source") if plain else code_digest("source", "operators"))
    headers = (variant.header, *some_headers(form))
    for name, text in closure(variant.template, headers, spec_file(variant), folders).items():
        digest.update(f"\0{name}\0{len(text)}\0".encode())
        digest.update(text.encode())
    return digest.hexdigest()


def _statement(match: re.Match[str]) -> str:
    sign, words = match.groups()
    include = REFERENCE.match(match[0])
    if include and include[1]:  # the name of an included template may print values
        quote = include[1][0]
        words = PRINTED.sub(rf"{quote} ~ \1 ~ {quote}", words)
    return f"{_BEGIN}{sign}{words.rstrip(_SPACES)} {_END}"


@lru_cache(maxsize=8)
def _environment(folders: tuple[str, ...], marked: bool) -> jinja2.Environment:
    import jinja2

    from flashgen.source.order import from_the_top

    class Lines(jinja2.BaseLoader):
        def __init__(self) -> None:
            self.read: dict[Path, tuple[int, dict[str, files.Part]]] = {}

        def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Any]:
            file, _, name = template.partition(":")
            path = files.find(file, folders)
            if path is None:
                raise jinja2.TemplateNotFound(file)
            changed = path.stat().st_mtime_ns
            if self.read.get(path, (0,))[0] != changed:
                self.read[path] = changed, files.parts_of(files.read(path), str(path))
            parts = self.read[path][1]
            part = parts[files.matching(parts, name, str(path))[0]]

            def is_current() -> bool:
                # A new file in a user's folder may now come before it.
                return files.find(file, folders) == path and path.stat().st_mtime_ns == changed

            return _source_of(part, str(path), marked), str(path), is_current

    environment = jinja2.Environment(
        loader=Lines(),
        undefined=jinja2.StrictUndefined,
        block_start_string=_BEGIN,
        block_end_string=_END,
        comment_start_string=_BEGIN_COMMENT,
        comment_end_string=_END_COMMENT,
        variable_start_string="${",
        variable_end_string="}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        optimized=False,  # an eighth of a first rendering goes into folding constants, of which there are few
    )
    environment.filters["from_the_top"] = from_the_top
    if marked:
        environment.filters["trim"] = lambda text: _MARKED_BLANK.sub("", text).strip(_SPACES)
    return environment


def _source_of(part: files.Part, file: str, marked: bool) -> str:
    """What Jinja reads of a part. A comment before it has as many lines as the file has before the part, so
    lines have their numbers in the file.
    """
    source = re.sub(_COMMENT_LINE, _BEGIN_COMMENT + _END_COMMENT, part.text)
    source = re.sub(_COMMENT, "", source)
    refuse_foreign(source, file, part.first_line)
    source = re.sub(_STATEMENT_LINE, _statement, source)
    if marked:
        source = _marked(source, file, part.first_line)
    if part.first_line == 1:
        return source
    return _BEGIN_COMMENT + "\n" * (part.first_line - 2) + _END_COMMENT + "\n" + source


def refuse_foreign(text: str, file: str, first_line: int = 1) -> None:
    """That no template has the usual delimiters of Jinja, which would go into the CUDA as they are. Raises
    SpecError, or InternalError for a shipped one.
    """
    for pattern, instead in _FOREIGN:
        match = pattern.search(text)
        if match:
            raise files.wrong(
                f"{file}:{first_line - 1 + files.line_of(match)}",
                f"{match[0].strip()!r} has Jinja's usual delimiters. flashgen has its own: {instead}",
            )


def _marked(source: str, file: str, first_line: int) -> str:
    """A template with a `_MARK` at the end of each line that makes text. One within a value has none."""
    inside = [match.span() for match in re.finditer(_VALUE, source)]
    lines, end = source.split("\n"), -1
    for number, line in enumerate(lines):
        end += len(line) + 1
        makes_text = line.strip() and not line.lstrip().startswith((_BEGIN, _BEGIN_COMMENT))
        if makes_text and not any(first < end < last for first, last in inside):
            lines[number] = f"{line}\x04{file}:{first_line + number}\x05"
    return "\n".join(lines)


def warn_of_unused_overrides(specs: Iterable[Spec]) -> None:
    """A TemplateWarning for each of `unused_overrides` of the specs that are not shipped."""
    shipped = specs_dir()
    for path in unused_overrides(spec for spec in specs if spec.path.parent != shipped):
        warnings.warn(
            f"no kernel uses {path}: a template serves the specs in the folder beside it. Add a spec there "
            "with `extends:` and the name of a shipped one",
            TemplateWarning,
            stacklevel=3,
        )


def unused_overrides(specs: Iterable[Spec]) -> list[Path]:
    """Templates and headers beside the users' own specs that no kernel of these reads.

    A template serves the specs of the folder beside it alone, so one that is meant to change a shipped kernel
    needs a spec there as well. Nothing is said of a folder in which a template is missing: rendering will.
    """
    used: dict[tuple[str, ...], set[str]] = {}
    incomplete = set()
    for spec in specs:
        folders = folders_for(str(spec.path.parent))
        names = used.setdefault(folders, {*SOME_HEADERS})
        for step in spec.content.steps:
            try:
                names.update(
                    closure(step.template, (spec.content.family["header"],), str(spec.path), folders)
                )
            except (InternalError, SpecError):
                incomplete.add(folders)
    unused = []
    for folders, names in used.items():
        if folders in incomplete:
            continue
        for folder in map(Path, folders[:-1]):
            for path in sorted([*folder.rglob("*.j2"), *folder.rglob("*.cuh")]):
                name = path.relative_to(folder).as_posix()
                if name.removeprefix("include/") not in names and name not in names:
                    unused.append(path)
    return sorted(set(unused))


def check_files(specs: Iterable[Spec]) -> None:
    """That all templates and headers of these specs are there, can be read, and have the delimiters of
    flashgen. Raises SpecError or InternalError.
    """
    for spec in specs:
        for step in spec.content.steps:
            folders = folders_for(str(spec.path.parent))
            texts = closure(step.template, (spec.content.family["header"],), str(spec.path), folders)
            for name, text in texts.items():
                if not name.endswith(".cuh"):  # headers are not rendered
                    refuse_foreign(re.sub(_COMMENT, "", text), str(files.find(name, folders)))
