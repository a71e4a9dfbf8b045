import json
import re
import subprocess
import sys

import click
import pytest

from flashgen.errors import BadParam
from flashgen.host.paths import specs_dir
from flashgen.tools.cli.app import COMMANDS, CommandGroup, main

HEAVY = ("rich", "jinja2", "numpy", "cupy", "torch", "yaml")


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from flashgen.tools.cli import main
try:
    main(["--help"], prog_name="flashgen")
except SystemExit as done:
    assert done.code == 0
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert python(code).splitlines()[-1] == "[]"


def test_a_command_imports_no_other():
    code = """
import sys
from flashgen.tools.cli import main
try:
    main(["cache", "--help"], prog_name="flashgen")
except SystemExit:
    pass
print([name for name in sys.modules if name.startswith("flashgen.tools.cli.")])
"""
    assert "flashgen.tools.cli.build" not in python(code)


@pytest.mark.parametrize("name", [[], *([each] for each in COMMANDS)])
def test_help_teaches_with_examples_that_fit(flashgen, name):
    result = flashgen(*name, "--help", COLUMNS="80")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout or "Start here:" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_help_examples_are_understood(flashgen, name):
    """Every option in an example is one that the command has."""
    text = flashgen(name, "--help").stdout
    options, _, examples = text.partition("Examples:")
    command = main.get_command(click.Context(main), name)
    for each in getattr(command, "commands", ()):
        options += flashgen(name, each, "--help").stdout
    used = {
        word
        for line in examples.splitlines()
        if line.strip().startswith("flashgen ")
        for word in line.split()
        if word.startswith("--")
    }
    known = {word.strip(",.") for word in options.split() if word.startswith("-")}
    assert used <= known


def test_a_mistyped_command_gets_a_suggestion(flashgen):
    result = flashgen("isnpect")
    assert result.exit_code == 2
    assert "Did you mean 'inspect'?" in result.stderr


def test_python_m_runs_the_same():
    done = subprocess.run([sys.executable, "-m", "flashgen", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("flashgen ")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BadParam("q is odd"), "Error: q is odd\n"),
        (PermissionError(13, "denied", "/x/y"), "Error: /x/y: denied\n"),
    ],
)
def test_errors_are_one_message_without_a_traceback(error, message):
    from click.testing import CliRunner

    @click.command(cls=CommandGroup, invoke_without_command=True)
    def group():
        raise error

    result = CliRunner().invoke(group)
    assert result.exit_code == 1
    assert result.stderr == message


def test_a_command_in_a_checkout_that_is_not_in_use_says_so(flashgen, tmp_path, monkeypatch):
    for name in ("specs", "templates", "codegen/flashgen/host"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "codegen" / "flashgen" / "host" / "paths.py").write_text("")
    monkeypatch.chdir(tmp_path / "specs")
    result = flashgen("list", "--select", "flash_fwd_hdim64_fp16_sm80")
    assert result.exit_code == 0
    said = f"{tmp_path} is a checkout of flashgen, but this command uses {specs_dir().parent}"
    assert said in result.stderr
    assert f"pip install -e {tmp_path}" in result.stderr
    monkeypatch.chdir(specs_dir())
    assert "checkout" not in flashgen("list", "--select", "flash_fwd_hdim64_fp16_sm80").stderr


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "message"),
    [
        (("list", "--select", "head_dim=7"), 2, "SelectionError", "no variant has head_dim=7"),
        (("inspect", "no_such_kernel"), 2, "SelectionError", "no variant is called"),
        (("list", "--no-such-option"), 2, "NoSuchOption", "--no-such-option"),
        (("lits",), 2, "UsageError", "Did you mean 'list'?"),
        (("build", "--arch", "x"), 2, "BadParameter", "is not an architecture"),
        (("list", "--specs", "."), 1, "SpecError", "needs at least one .yaml file"),
    ],
)
def test_errors_are_json_where_the_output_is(flashgen, arguments, code, kind, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, result = flashgen(*arguments), flashgen(*arguments, "--json")
    assert plain.exit_code == result.exit_code == code
    assert plain.stdout == result.stderr == ""
    found = json.loads(result.stdout)
    assert found["kind"] == kind
    assert message in found["error"]


@pytest.mark.parametrize("columns", [80, 100])
def test_no_summary_is_cut(flashgen, columns):
    for arguments in (["--help"], ["cache", "--help"]):
        lines = flashgen(*arguments, COLUMNS=str(columns)).stdout.partition("Commands:")[2].splitlines()
        assert lines
        assert not [line for line in lines if line.endswith("...")]


def test_a_path_stays_whole_in_a_narrow_terminal(in_terminal):
    result = in_terminal(40, "inspect", "flash_fwd_hdim64_fp16_sm80")
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    assert str(specs_dir() / "flash_fwd_sm80.yaml") in text
    assert "dynamic shared memory" in " ".join(text.split())
    assert all(len(line.split()) <= 2 for line in text.splitlines() if len(line) > 40)


def test_a_shell_completes_commands():
    environment = {"_FLASHGEN_COMPLETE": "bash_complete", "COMP_WORDS": "flashgen ex", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from flashgen.tools.cli import main; main(prog_name='flashgen')"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)} | environment,
    )
    assert done.stdout == "plain,explain\n"


def test_bugs_keep_their_traceback():
    from click.testing import CliRunner

    @click.command(cls=CommandGroup, invoke_without_command=True)
    def group():
        raise ZeroDivisionError

    assert isinstance(CliRunner().invoke(group).exception, ZeroDivisionError)


def test_a_reader_that_stops_early_is_no_error(tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m flashgen list --json | head -n 1", shell=True, capture_output=True, text=True
    )
    assert done.stdout == "[\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("build --no-compile --out", "folder"),
        ("tune --select head_dim=64 --write --out", "folder"),
        ("simulate flash_fwd_hdim64_fp16_sm80 --debug", "folder"),
        ("bundle --out", "file"),
        ("bench --save", "file"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(command, what, flashgen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = flashgen(*command.split(), "")
    assert result.exit_code == 2
    assert f"the path is empty; name a {what}" in result.stderr
    assert not [*tmp_path.iterdir()]
