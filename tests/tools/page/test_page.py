"""The page of a kernel: links lead both ways, it needs nothing else, and it can be read."""

import re
from functools import cache
from html.parser import HTMLParser

import pytest

from browser import measured
from flashgen.families.load import load_specs
from flashgen.source.order import SECTIONS
from flashgen.source.render import render
from flashgen.source.sharedmemory import regions
from flashgen.toolchain.disassemble import NoDisassemblerError
from flashgen.tools.page import page

SPECS = {
    "flash_fwd_hdim128_fp16_causal_m128_sm90": "flash_fwd_sm90",
    "flash_bwd_hdim192_bf16_causal_pair_sm90": "flash_bwd_wide_sm90",
    "merge_bf16_sm80": "merge_sm80",
}
KERNELS = [*SPECS]
_VOID = {"meta", "br", "hr", "img", "link", "input"}


class Parsed(HTMLParser):
    """The elements of a page; an element that is closed in the wrong order is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in _VOID:
            self.open.append((tag, dict(attributes).get("id")))

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, identity in self.open:
            if identity:
                self.texts[identity] = self.texts.get(identity, "") + data


@cache
def step(name):
    spec = next(spec for spec in load_specs() if spec.name == SPECS[name])
    return next(variant for variant in spec.variants() if variant.name == name)


@pytest.fixture(scope="module")
def pages(disassembler):
    return {name: page(step(name), step(name).archs[0]) for name in KERNELS}


@pytest.mark.parametrize("name", KERNELS)
def test_source_and_machine_code_are_linked_both_ways(pages, name):
    parsed = Parsed(pages[name])
    identities = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(set(identities)) == len(identities)
    links = [attributes["href"] for tag, attributes in parsed.elements if tag == "a"]
    assert {link.removeprefix("#") for link in links} <= set(identities)
    # A line that leads to a run of instructions is one of the lines that the run leads to.
    text = pages[name]
    leads = dict(re.findall(r'id="L(\d+)"><span>\d+</span><a href="#R(\d+)"', text))
    assert len(leads) > 20
    runs = dict(re.findall(r'class="run" id="R(\d+)"><span class="from">(.*?)</span>', text, re.DOTALL))
    assert all(f'href="#L{line}"' in runs[run] for line, run in leads.items())
    assert {line for run in runs.values() for line in re.findall(r"#L(\d+)", run)} == set(leads)


@pytest.mark.parametrize("name", KERNELS)
def test_a_page_has_all_of_the_source_in_sections_and_needs_nothing_else(pages, name):
    parsed = Parsed(pages[name])
    source = render(step(name))
    shown = re.findall(r'id="L\d+">.*?<code>(.*?)</code></div>', pages[name])
    assert len(shown) == len(source.splitlines())
    for number, line in enumerate(source.splitlines(), 1):
        assert parsed.texts[f"L{number}"].endswith(line), number
    folds = [attributes["id"] for tag, attributes in parsed.elements if tag == "details"]
    assert [fold.rpartition("-")[0] for fold in folds] == [*SECTIONS]
    assert not any(tag in ("script", "link", "img", "iframe") for tag, _ in parsed.elements)
    assert not any({"src", "onload", "onclick"} & set(attributes) for _, attributes in parsed.elements)
    assert all(attributes["href"].startswith("#") for tag, attributes in parsed.elements if tag == "a")
    assert "url(" not in pages[name]
    assert "@import" not in pages[name]


def test_a_page_has_the_barriers_and_the_regions_of_shared_memory(pages):
    name = KERNELS[1]
    parsed = Parsed(pages[name])
    cells = pages[name]
    for barrier in ("p_full", "slot_free", "kAddedBarrier"):
        assert re.search(rf"<td>{barrier}\b[^<]*</td>", cells)
    for region in regions(render(step(name)), step(name)):
        assert re.search(rf"{re.escape(region.name.replace(chr(39), '&#x27;'))}: [\d,× ]+ bytes", cells)
    assert sum(tag == "svg" for tag, _ in parsed.elements) == 1
    assert "registers" in cells
    assert "UTMALDG" in cells
    assert "HGMMA" in cells


def test_the_registers_are_those_of_the_kernel_that_calls_use(pages):
    from flashgen.toolchain.obtain import obtain

    variant = step(KERNELS[0])
    kernel, _ = obtain(variant, variant.archs[0])
    assert f"{kernel.registers} a thread at launch" in pages[KERNELS[0]]
    assert f"{kernel.spill_stores} bytes stored" in pages[KERNELS[0]]


def test_text_of_a_spec_is_escaped(tiny_folder):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    from flashgen.families.load import load_spec

    template = tiny_folder / "templates" / "tiny.cu.j2"
    template.write_text(
        template.read_text().replace("${ header }", "${ header }\n// <script>alert(1)</script> & <b>", 1)
    )
    variant = load_spec(tiny_folder / "specs" / "tiny.yaml").variants()[0]
    text = page(variant, variant.archs[0])
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    Parsed(text)


def test_a_page_without_a_disassembler_says_so(monkeypatch):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")

    def missing():
        raise NoDisassemblerError("install <it> so")

    monkeypatch.setattr("flashgen.toolchain.disassemble.nvdisasm", missing)
    variant = step(KERNELS[2])
    text = page(variant, variant.archs[0])
    parsed = Parsed(text)
    assert "There is no machine code on this page: install &lt;it&gt; so" in text
    assert "a thread at launch" in text
    assert not any(attributes.get("class") == "run" for _, attributes in parsed.elements)


def test_a_page_without_a_compiler_says_so(monkeypatch):
    from flashgen.errors import NoCompilerError

    def missing(*_):
        raise NoCompilerError("install a compiler")

    monkeypatch.setattr("flashgen.toolchain.lineinfo.compile_with_lines", missing)
    variant = step(KERNELS[2])
    text = page(variant, variant.archs[0])
    Parsed(text)
    assert "There is no machine code on this page: install a compiler" in text
    assert "a thread at launch" not in text


# The width of the page's content, where the panes are, sizes of fonts, contrast of texts, and texts of the
# drawing that overlap or leave it.
SCRIPT = """
  const light = (text) => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map((n) => n / 255)
      .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const contrast = (selector) => [...document.querySelectorAll(selector)].slice(0, 400).map((element) => {
    const style = getComputedStyle(element);
    const pair = [light(style.color), light(ground(element))].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
  });
  const texts = ["h1", "p", "nav a", "td", "tbody th", ".summary", "summary",
                 ".line > span:first-child", ".line a", ".line code", ".line code span", ".from", ".from a",
                 ".machine"];
  const boxes = [...document.querySelectorAll("svg text")].map((t) => t.getBoundingClientRect());
  const frame = document.querySelector("svg").getBoundingClientRect();
  const overlap = (a, b) =>
    a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
  return {
    width: document.documentElement.scrollWidth,
    panes: [...document.querySelectorAll(".pane")].map((p) => [p.getBoundingClientRect().left,
                                                              p.getBoundingClientRect().top]),
    font: Math.min(...texts.flatMap((s) => [...document.querySelectorAll(s)].slice(0, 5)
      .map((e) => parseFloat(getComputedStyle(e).fontSize)))),
    contrast: Object.fromEntries(texts.map((s) => [s, Math.min(...contrast(s))])),
    overlaps: boxes.filter((a, i) => boxes.some((b, j) => i < j && overlap(a, b))).length,
    outside: boxes.filter((b) => b.right > frame.right + 1 || b.bottom > frame.bottom + 1).length,
  };
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_can_be_read_in_a_browser(pages, tmp_path, dark):
    measures = measured(pages[KERNELS[0]], tmp_path, SCRIPT, (1280, 390), dark)
    assert [*sorted(measures)] == [390, 1280]
    for width, seen in measures.items():
        assert seen["width"] <= width
        (left, top), (left_of_code, top_of_code) = seen["panes"]
        assert (left < left_of_code) == (width == 1280)
        assert (top < top_of_code) == (width == 390)
        assert seen["font"] >= 11
        assert {text: value for text, value in seen["contrast"].items() if value < 4.5} == {}
        assert (seen["overlaps"], seen["outside"]) == (0, 0)
