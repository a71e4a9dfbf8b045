from flashgen.cli.output import Column, print_table


def test_a_table_without_rows_is_its_headers(capsys):
    print_table([Column("variant"), Column("regs", number=True)], [])
    assert capsys.readouterr().out == "variant  regs\n"
