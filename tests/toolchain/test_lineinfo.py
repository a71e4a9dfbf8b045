"""Instructions with the lines that they come from."""

from flashgen.families.load import load_specs
from flashgen.source.render import render
from flashgen.toolchain.disassemble import mnemonics, sass
from flashgen.toolchain.lineinfo import Place, _parsed, compile_with_lines, instructions

TEXT = """\
.text.kernel:
\t//## File "/some/folder/kernel.cu", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File "/some/folder/flashgen/ptx.cuh", line 3 inlined at "/some/folder/kernel.cu", line 9
\t//## File "/some/folder/kernel.cu", line 9 inlined at "/some/folder/kernel.cu", line 20
\t//## File "/some/folder/kernel.cu", line 20
.L_x_1:
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   EXIT ;
"""


def test_an_instruction_has_its_line_and_the_calls_around_it():
    first, branch, last = _parsed(TEXT)
    assert (first.address, first.text, first.label) == (0, "LDC R1, c[0x0][0x28] ;", "")
    assert first.places == (Place("kernel.cu", 7),)
    assert (branch.address, branch.text, branch.label) == (16, "@!P0 BRA `(.L_x_1) ;", ".L_x_1")
    assert branch.places == (Place("ptx.cuh", 3), Place("kernel.cu", 9), Place("kernel.cu", 20))
    assert (last.label, last.places) == ("", branch.places)


def test_lines_do_not_change_the_machine_code(disassembler):
    from flashgen.toolchain.obtain import obtain

    variant = next(v for s in load_specs() for v in s.variants() if v.name == "flash_fwd_hdim64_fp16_sm80")
    plain, _ = obtain(variant, "sm_80")
    kernel = compile_with_lines(variant, "sm_80")
    code = instructions(kernel.cubin)
    assert (kernel.registers, kernel.spill_stores) == (plain.registers, plain.spill_stores)
    assert mnemonics(sass(kernel.cubin)) == mnemonics(sass(plain.cubin))
    assert len(code) == mnemonics(sass(plain.cubin)).total()
    lines = len(render(variant).splitlines())
    own = [place for one in code for place in one.places if place.file == f"{variant.name}.cu"]
    assert own
    assert all(1 <= place.line <= lines for place in own)
