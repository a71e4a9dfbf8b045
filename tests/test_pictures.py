"""The pictures of docs/ are what their script draws, have a place on a page, and no text on another."""

import importlib.util
import re
from pathlib import Path

import pytest

from browser import measured

DOCS = Path(__file__).resolve().parents[1] / "docs"
_SPEC = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
pictures = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(pictures)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_the_script_draws(name):
    file = DOCS / "pictures" / f"{name}.svg"
    assert file.read_text(encoding="utf-8") == pictures.PICTURES[name]().svg(), "run: python docs/pictures.py"


def test_each_picture_is_on_a_page():
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    placed = set(re.findall(r"!\[[^\]]+\]\(pictures/([\w-]+)\.svg\)", text))
    assert placed == set(pictures.PICTURES) == {file.stem for file in (DOCS / "pictures").glob("*.svg")}


def test_a_text_that_leaves_its_box_is_refused():
    picture = pictures.Picture("a picture", 100)
    with pytest.raises(ValueError, match="wider than its box"):
        picture.box(0, 0, 40, 20, "many words")
    with pytest.raises(ValueError, match="leaves the picture"):
        picture.text(700, 10, "many words")


SCRIPT = """
  return [...document.querySelectorAll("body > svg")].map((picture) => {
    const frame = picture.getBoundingClientRect();
    const texts = [...picture.querySelectorAll("text")];
    const boxes = texts.map((text) => text.getBoundingClientRect());
    const overlap = (a, b) =>
      a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom;
    const pairs = boxes.flatMap((a, i) => boxes.slice(i + 1).map((b, j) => [a, b, i, i + 1 + j]));
    return {
      overlaps: pairs.filter(([a, b]) => overlap(a, b)).map(([, , i, j]) => texts[i].textContent + " | " +
                                                                             texts[j].textContent),
      outside: texts.filter((_, i) => boxes[i].left < frame.left || boxes[i].right > frame.right ||
                                      boxes[i].bottom > frame.bottom + 1).map((text) => text.textContent),
    };
  });
"""


def test_no_text_of_a_picture_is_on_another_or_outside(tmp_path):
    drawn = "\n".join(draw().svg() for draw in pictures.PICTURES.values())
    page = f'<!DOCTYPE html><html><body style="width: 760px">{drawn}</body></html>'
    seen = measured(page, tmp_path, SCRIPT, (900,))[900]
    assert len(seen) == len(pictures.PICTURES)
    assert [picture for picture in seen if picture["overlaps"] or picture["outside"]] == []
