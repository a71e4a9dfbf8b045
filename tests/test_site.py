"""The pages of the site, as `docs/site.py` hands them to MkDocs."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import flashgen

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(site, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    site.prepare(folder)
    return folder


def titles(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"^#+ (.*)$", text, re.M)
    return text, {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in found}


def test_every_link_leads_to_a_page_or_a_file_of_the_site(folder):
    broken = []
    for page in folder.rglob("*.md"):
        for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", titles(page)[0]):
            target = page.parent / path if path else page
            if not target.is_file() or (anchor and anchor not in titles(target)[1]):
                broken.append((page.name, path, anchor))
    assert not broken


def test_the_navigation_has_every_page_and_the_reference_every_name(site, folder):
    listed = site.sections()
    nav = json.loads(site.configuration(listed, {"A title": "a_kernel"}).partition("nav: ")[2])
    assert nav[0] == {"Overview": "index.md"}
    shown = [path for part in nav[1:] for paths in part.values() for path in paths]
    assert shown.pop() == {"A title": "kernels/a_kernel.html"}
    shown = [path if isinstance(path, str) else path.popitem()[1] for path in shown]
    logs = {page.relative_to(folder).as_posix() for page in folder.glob("log/*.md")}
    pages = {page.relative_to(folder).as_posix() for page in folder.rglob("*.md")} - logs - {"index.md"}
    assert pages == {*shown}
    reference = (folder / "api.md").read_text()
    for name in flashgen.__all__:
        assert f"## {name}\n" in reference or f"| `{name}` |" in reference
    several = (folder / "api-distributed.md").read_text()
    for name in flashgen.distributed.__all__:
        assert f"## {name}\n" in several
    assert "### Mask.blocks" in reference
    assert "    self" not in reference
    assert "ForwardRef" not in several
    assert "**unknown" not in reference


def test_a_link_to_a_page_has_the_title_of_the_page(folder):
    quickstart = (folder / "quickstart.md").read_text()
    assert "[Training](training.md)" in quickstart
    assert "[training.md]" not in quickstart


def test_a_table_of_measurements_names_its_run(folder):
    text = (folder / "performance.md").read_text()
    tables = re.findall(
        r"<!-- table: .*\n\n<small>[\w/]+\.json: 20\d\d-\d\d-\d\d, commit \w{8}</small>\n\n", text
    )
    assert len(tables) == text.count("<!-- table: ") > 0


class _Page(HTMLParser):
    """The links, pictures and anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.targets, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.anchors.add(named.get("id"))
        self.targets += [named[key] for key in ("href", "src") if named.get(key)]


@pytest.mark.once
def test_the_built_site_has_every_link_its_search_and_its_pictures(tmp_path):
    """MkDocs makes the anchors and the index of the search."""
    pytest.importorskip("mkdocs", reason="the site needs mkdocs-material")
    command = [sys.executable, str(ROOT / "docs" / "site.py"), "--out", str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "codegen"), "NO_MKDOCS_2_WARNING": "1"}
    command += ["--work", str(tmp_path / "work")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {path: _Page(path.read_text()) for path in (tmp_path / "site").rglob("*.html")}
    broken = []
    for path, page in files.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for target in page.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc or target.startswith("data:"):
                assert url.scheme in ("https", "data", ""), target
                continue
            linked = (path.parent / unquote(url.path)).resolve() if url.path else path
            linked = linked / "index.html" if linked.is_dir() else linked
            anchor = unquote(url.fragment)
            if not linked.is_file() or (anchor and linked in files and anchor not in files[linked].anchors):
                broken.append((path.parent.name, target))
    assert not broken
    found = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    assert any(entry["location"].startswith("api/#attention") for entry in found)
    assert sum(target.endswith(".svg") for page in files.values() for target in page.targets) >= 9


def test_an_inspected_kernel_leads_back_to_the_site(site):
    template = ROOT / "codegen" / "flashgen" / "tools" / "page" / "page.html.j2"
    assert "../index.html" in site.with_way_back(template.read_text())
