"""The pages of the site, as `docs/site.py` hands them to MkDocs."""

import importlib.util
import json
import re
from pathlib import Path

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
    nav = json.loads(site.configuration(listed, ["a_kernel"]).partition("nav: ")[2])
    shown = [path for part in nav[1:] for paths in part.values() for path in paths]
    assert shown.pop() == {"a_kernel": "kernels/a_kernel.html"}
    logs = {page.relative_to(folder).as_posix() for page in folder.glob("log/*.md")}
    pages = {page.relative_to(folder).as_posix() for page in folder.rglob("*.md")} - logs - {"index.md"}
    assert pages == {*shown}
    reference = (folder / "api.md").read_text()
    for name in flashgen.__all__:
        assert f"## {name}\n" in reference or f"| `{name}` |" in reference
