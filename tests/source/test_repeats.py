"""Patterns over the text of templates and kernels take linear time, whatever the text repeats."""

from __future__ import annotations

import re
import time

import pytest

from flashgen.errors import InternalError, SpecError
from flashgen.simulator.library import _definitions
from flashgen.source import render
from flashgen.source.closure import included_by

N = 20_000
REPEATED = {
    "spaces": " " * N + "x",
    "tabs": "\t" * N + "x",
    "blank lines": "\n" * N + "x",
    "lines of spaces": ("\n" + " " * 200) * 200 + "x",
    "spaces in a statement": "//% set a = 1" + " " * N + " + 2\n",
    "spaces at the end of a statement": "//% set a = 1" + " " * N + "\n",
    "beginnings of values": "//" + "$" * N,
    "beginnings of includes": '#include "flashgen/' * N,
    "beginnings of kernels": "__global__ void __cluster_dims__ (" * (N // 10),
    "beginnings of foreign values": "{{ a" * N,
    "beginnings of foreign values with calls": "{{ a(" * N + ")" * N,
    "beginnings of foreign statements": "{%" + " " * N + "{% for " * N,
    "beginnings of foreign comments": "{#" * N,
    "shared memory": "extern __shared__ " + "a " * N,
}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", REPEATED)
def test_repeats_take_linear_time(name, marked, tmp_path):
    text = REPEATED[name]
    (tmp_path / "x.j2").write_text(text)
    begin = time.process_time()
    try:
        rendered = render._environment((str(tmp_path),), marked).get_template("x.j2").render()
    except SpecError:
        assert "foreign" in name
        rendered = text
    re.sub(render._BLANK_LINES, "\n\n", rendered)
    re.sub(render._PRAGMA_ONCE, "", text)
    included_by(text, "x")
    with pytest.raises(InternalError, match="no __global__"):
        _definitions(text, "kernel")
    assert time.process_time() - begin < 2


def test_statements_and_comments_as_before(tmp_path):
    (tmp_path / "x.j2").write_text("a  //# gone\n  //%- if true \t\n  b //#\n//%+ endif\n//# gone\nc   d\n")
    environment = render._environment((str(tmp_path),), False)
    source = environment.loader.get_source(environment, "x.j2")[0]
    begin, end = render._BEGIN, render._END
    comment = render._BEGIN_COMMENT + render._END_COMMENT
    assert source == f"a\n{begin}- if true {end}\n  b\n{begin}+ endif {end}\n{comment}\nc   d\n"
