"""Signs of life of long commands, in a terminal and elsewhere."""

import re

import pytest

from flashgen.tools.cli import progress as module
from flashgen.tools.cli.progress import progress, waiting

ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
STEPS = [f"flash_bwd_varlen_preprocess_hdim128_bf16_causal_ordered_gqa_{n}_sm90 sm_90a" for n in range(3)]


@pytest.fixture
def frames(capsys, monkeypatch):
    """The lines that a terminal of that width shows while the steps are done."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")

    def run(width):
        monkeypatch.setenv("COLUMNS", str(width))
        with progress(len(STEPS), "compiling 3 kernels") as step:
            for each in STEPS:
                step(each)
        return [line.rstrip() for line in re.split(r"[\r\n]+", ANSI.sub("", capsys.readouterr().err))]

    return run


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_bar_fits_a_terminal_and_the_step_is_whole(frames, width):
    lines = frames(width)
    assert max(map(len, lines)) <= width
    assert any(re.search(r"3/3 0:0", line) for line in lines)
    assert STEPS[-1].replace(" ", "") in "".join(lines).replace(" ", "")
    assert not any(line.endswith(("…", "...")) for line in lines)
    if width >= 80:
        assert any(re.fullmatch(r"\S+ 3/3 0:00:\d\d so far, 0:00:\d\d left", line.strip()) for line in lines)
        assert STEPS[-1] in lines


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr("flashgen.tools.cli.progress.time.monotonic", lambda: now[0])
    return now


def test_elsewhere_each_step_of_a_few_has_a_line(clock, capsys):
    with progress(3, "compiling 3 kernels") as step:
        for at, each in enumerate(STEPS):
            clock[0] = 10.0 * at + 9
            step(each)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"compiling 3 kernels: {n + 1} of 3 done, {step} the last" for n, step in enumerate(STEPS)
    ]


def test_elsewhere_many_steps_have_few_lines(clock, capsys):
    with progress(1000, "compiling") as step:
        for at in range(1000):
            clock[0] = 0.5 * at
            step(f"kernel{at}")
    lines = capsys.readouterr().err.splitlines()
    assert 15 <= len(lines) <= 25
    assert lines[0] == "compiling: 3 of 1000 done, kernel2 the last"


@pytest.mark.parametrize(
    "begin", [lambda: progress(3, "compiling 3 kernels"), lambda: waiting("compiling 3 kernels")]
)
def test_elsewhere_silence_ends_with_what_is_done(begin, capsys, monkeypatch):
    monkeypatch.setattr(module, "_REMARK_AFTER", 0.0)
    with begin():
        for thread in [each for each in module.threading.enumerate() if hasattr(each, "function")]:
            thread.join()
    assert capsys.readouterr().err == "compiling 3 kernels ...\n"
