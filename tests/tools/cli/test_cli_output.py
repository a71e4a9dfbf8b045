"""What the commands print in terminals: nothing in a table or a card is cut, however narrow the terminal."""

import random
import re

import pytest

from fake_bench import FakeBench
from fake_gpu import H200
from flashgen.simulator import hostcompiler
from flashgen.tools.cli import output
from flashgen.tools.cli.output import Column, print_pairs, print_table

ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
WIDTHS = (120, 100, 80, 60, 40, 24)


@pytest.fixture
def shown(capsys, monkeypatch):
    """What a function prints in a terminal of that width, without colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(width, function, *arguments):
        monkeypatch.setenv("COLUMNS", str(width))
        capsys.readouterr()
        function(*arguments)
        return ANSI.sub("", capsys.readouterr().out)

    return run


def check_table(text, columns, rows, width):
    """Each cell is in the text, whole. Only an optional column may be missing, and then the text says so. A
    line is wider than the terminal only if a single cell is.
    """
    table, *hidden = re.split(r"also\s+shows", text)
    words, hidden = (
        set(table.split()),
        {name.strip() for name in " ".join(" ".join(hidden).split()).split(",")},
    )
    widest = 0
    for at, column in enumerate(columns):
        cells = {column.header, *(row[at] for row in rows)}
        widest = max(
            widest, *(len(part) for cell in cells for part in (cell.split() if column.wraps else [cell]))
        )
        if column.optional and column.header in hidden:
            continue
        for cell in cells:
            assert set(cell.split()) <= words, (column.header, cell)
            assert column.wraps or " " not in cell or cell in table
    assert max(map(len, text.splitlines())) <= max(width, output._INDENT + widest)


def check_pairs(text, pairs):
    """Each word of a card is in the text, whole."""
    words = text.split()
    for name, value in pairs:
        assert set(name.split()) <= set(words)
        assert set(value.split()) <= set(words)


def test_a_table_without_rows_is_its_headers(capsys):
    print_table([Column("variant"), Column("regs", number=True)], [])
    assert capsys.readouterr().out == "variant  regs\n"


def random_table(rng):
    """A column that is always shown, others of every kind, and some rows."""
    columns = [Column("name")]
    for at in range(rng.randint(0, 7)):
        optional, wraps = rng.random() < 0.4, rng.random() < 0.2
        columns.append(Column(f"c{at}" * rng.randint(1, 4), rng.random() < 0.5, optional, wraps))

    def word():
        return "".join(rng.choices("abcxyz0189_", k=rng.randint(1, rng.choice((6, 30)))))

    def cell(column):
        return " ".join(word() for _ in range(rng.randint(1, 9))) if column.wraps else word()

    return columns, [[cell(column) for column in columns] for _ in range(rng.randint(1, 6))]


def test_no_cell_is_cut_in_a_terminal_of_any_width(shown):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(100):
        columns, rows = random_table(rng)
        width = rng.randint(16, 130)
        check_table(shown(width, print_table, columns, rows), columns, rows, width)


def test_what_does_not_fit_goes_on_below_in_aligned_lines(shown):
    columns = [Column("variant"), Column("regs", number=True), Column("seconds", number=True)]
    rows = [["a_kernel_of_20_chars", "8", "0.25"], ["another", "128", "12.00"]]
    assert shown(20, print_table, columns, rows).splitlines() == [
        "variant",
        "  regs  seconds",
        "a_kernel_of_20_chars",
        "     8     0.25",
        "another",
        "   128    12.00",
    ]


def test_optional_columns_go_before_a_row_takes_two_lines(shown):
    columns = [Column("variant"), Column("block"), Column("threads", optional=True)]
    rows = [["a_kernel_of_20_chars", "128x128", "384"]]
    assert shown(28, print_table, columns, rows).splitlines() == [
        "variant              block",
        "a_kernel_of_20_chars 128x128",
        "a wider terminal, a pipe or",
        "--json also shows threads",
    ]


@pytest.fixture
def printed(monkeypatch):
    """The columns and rows of each table that commands print, and the pairs of each card."""
    tables, cards = [], []
    for module in ("output", "kernels"):
        monkeypatch.setattr(f"flashgen.tools.cli.{module}.print_table", lambda *table: tables.append(table))
    monkeypatch.setattr("flashgen.tools.cli.output.print_pairs", lambda pairs, title="": cards.append(pairs))
    return tables, cards


def check_at_every_width(printed, shown):
    tables, cards = printed
    assert tables or cards
    for width in WIDTHS:
        for table in tables:
            check_table(shown(width, print_table, *table), *table[:2], width)
        for pairs in cards:
            check_pairs(shown(width, print_pairs, pairs), pairs)


CALL = ("--shape", "1x4096x16x128", "--causal", "--arch", "sm_90")


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--select", "head_dim=128 dtype=bf16 mask_type=causal"),
        ("list", "--select", "head_dim=64 dtype=fp16", "--score", "softcap"),
        ("explain", *CALL),
        ("explain", *CALL, "--all"),
        ("inspect", "flash_fwd_hdim128_fp16_causal_sm80"),
        ("bench", "--list"),
        ("cache", "info"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_tables_of_what_is_shipped(arguments, printed, flashgen, shown):
    flashgen(*arguments)
    check_at_every_width(printed, shown)


def test_tables_of_compiled_kernels(tiny, printed, flashgen, shown, tmp_path):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    select = ("--select", "tiny_fwd_hdim64_fp16_sm80", "--arch", "sm_90")
    assert flashgen("build", *select).exit_code == 0
    assert flashgen("bundle", *select, "-o", tmp_path / "kernels.zip").exit_code == 0
    assert flashgen("inspect", "tiny_fwd_hdim64_fp16_sm80", "--resources").exit_code == 0
    assert len(printed[0]) == 2
    check_at_every_width(printed, shown)


def test_tables_of_a_simulation(printed, flashgen, shown):
    if hostcompiler.why_unavailable():
        pytest.skip(hostcompiler.why_unavailable())
    flashgen("simulate", "flash_fwd_hdim64_fp16_causal_m64_sm80")
    assert [len(each) for each in printed] == [1, 1]
    check_at_every_width(printed, shown)


def test_tables_of_the_demo(printed, flashgen, shown, monkeypatch, tmp_path):
    pytest.importorskip("cupy", reason="nothing can be compiled without CuPy and NVRTC")
    monkeypatch.setattr("flashgen.runtime.device.available", lambda: False)
    monkeypatch.setattr("flashgen.simulator.hostcompiler.why_unavailable", lambda: "install one")
    monkeypatch.setattr("flashgen.tools.cli.demo._CPU_TOKENS", 100)
    monkeypatch.setattr("flashgen.toolchain.build.build", lambda wanted, **_: [])
    monkeypatch.setattr("flashgen.tools.cli.demo._REPEATS", 1)
    assert flashgen("demo").exit_code == 0
    assert len(printed[0]) == 1
    check_at_every_width(printed, shown)


def test_tables_of_tuning(tiny, edit_spec, printed, flashgen, shown, monkeypatch):
    edit_spec("{prefer: on_request}", "{prefer: least_time}")
    bench = FakeBench()
    monkeypatch.setattr("flashgen.runtime.device.available", lambda: True)
    monkeypatch.setattr("flashgen.runtime.device.device", lambda ordinal: H200)
    monkeypatch.setattr("flashgen.tools.tune.contest.build", bench.build)
    monkeypatch.setattr("flashgen.tools.cli.tune._bench", lambda *_: bench)
    select = "head_dim=64 dtype=fp16 mask_type=causal gqa=mha"
    assert flashgen("tune", "--select", select, "--shapes", "1k,4k").exit_code == 0
    assert len(printed[0]) == 1
    check_at_every_width(printed, shown)
