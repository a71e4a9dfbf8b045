"""Text from files goes to the terminal without what a terminal obeys."""

from __future__ import annotations

import json
import unicodedata
import zipfile

import pytest
from click.testing import CliRunner

from flashgen import __version__
from flashgen.tools.cli import output
from flashgen.tools.cli.app import main

# Controls of a terminal, of the direction of text, of lines; what is invisible; and half a character.
EVIL = "flash\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r\x08\u202e\u2066\u200f\u2028\u2029\u200b\xad\ufeff\ud800_end"


def is_harmless(text):
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return not any(unicodedata.category(each) in hidden and each not in "\n\t" for each in text)


@pytest.fixture(params=[False, True])
def as_terminal(request, monkeypatch):
    """Whether rich takes the output for a terminal; without colours, whose escapes are flashgen's own."""
    if request.param:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("TTY_COMPATIBLE", "1")


def evil_bundle(path):
    key = "ab" * 32
    manifest = {"format": 2, "flashgen": __version__, "compiler": EVIL, "specs": []}
    manifest["kernels"] = [{"variant": EVIL, "arch": EVIL, "key": key}]
    from flashgen.toolchain.cacheentry import pack

    with zipfile.ZipFile(path, "w") as file:
        file.writestr("manifest.json", json.dumps(manifest))
        file.writestr(f"entries/{key}", pack(key, b"payload"))
    return path


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_bundle_that_names_kernels_by_escapes(options, tmp_path):
    done = CliRunner().invoke(main, ["bundle", "--show", str(evil_bundle(tmp_path / "b.zip")), *options])
    assert done.exit_code == 0, done.output
    assert "_end" in done.stdout
    assert is_harmless(done.stdout)
    assert is_harmless(done.stderr)
    if options:
        assert json.loads(done.stdout)["compiler"] == EVIL


def test_errors_with_text_of_files(tmp_path):
    (tmp_path / "evil.yaml").write_text(json.dumps({"family": EVIL, "operator": EVIL}))
    for options in ([], ["--json"]):
        done = CliRunner().invoke(main, ["list", "--specs", str(tmp_path), *options])
        assert done.exit_code == 1
        assert is_harmless(done.output)
        assert "evil.yaml" in done.output


def test_every_way_to_print(as_terminal, capsys):
    columns = [output.Column("name")]
    output.print_table(columns, [[EVIL]])
    output.print_pairs([("name", EVIL)], title=EVIL)
    output.note(EVIL)
    output.say(EVIL)
    output.say(EVIL, err=True)
    output.print_json({"name": EVIL})
    found = capsys.readouterr()
    assert found.out.count("_end") == 5
    assert found.err.count("_end") == 2
    assert is_harmless(found.out.replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\x1b[36m", ""))
    assert is_harmless(found.err)


def test_text_is_printed_by_one_module():
    """click.echo and print know nothing of control characters."""
    from pathlib import Path

    folder = Path(output.__file__).parent
    for path in folder.glob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "click.echo(" in line and path.name != "output.py":
                assert (
                    "click.echo()" in line or "as_json(" in line or "plain(" in line or "fitted(" in line
                ), f"{path}:{number}"
            assert not line.strip().startswith("print("), f"{path}:{number}"
