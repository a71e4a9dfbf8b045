"""A headless browser, where one is installed, and what it says of a page."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_MEASURE = """<script>
addEventListener("load", () => parent.postMessage([innerWidth, (() => {{ {} }})()], "*"));
</script></body>"""
# A window is at least 500 pixels wide, a frame is as narrow as one says.
_FRAME = '<iframe style="border: 0; width: {width}px; height: 1000px" srcdoc="{page}"></iframe>'
_FRAMES = """<!DOCTYPE html><html><body style="margin: 0"><pre id="measured"></pre>
<script>
const results = [];
addEventListener("message", (event) => {{
  results.push(event.data);
  if (results.length == {count}) document.getElementById("measured").textContent = JSON.stringify(results);
}});
</script>
{frames}</body></html>"""


def measured(page, folder, script, widths, dark=False):
    """What a function with the body ``script`` returns within the page, by the page's width in pixels."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip(f"there is no headless browser: none of {', '.join(_NAMES)}")
    whole = html.escape(page.replace("</body>", _MEASURE.format(script)))
    frames = "\n".join(_FRAME.format(width=width, page=whole) for width in widths)
    file = folder / "frames.html"
    file.write_text(_FRAMES.format(count=len(widths), frames=frames), encoding="utf-8")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={max(widths)},2000"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="measured">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return dict(json.loads(html.unescape(found[1])))
