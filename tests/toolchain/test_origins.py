import pytest

from flashgen.errors import CompileError
from flashgen.families.load import load_spec
from flashgen.source.render import render
from flashgen.toolchain.origins import template_lines_named


@pytest.mark.parametrize("form", ["{name}.cu({line}): error: no", "/tmp/x/{name}.cu:{line}:7: error: no"])
def test_the_line_of_the_template_is_named(form, tiny_folder):
    variant = load_spec(tiny_folder / "specs" / "tiny.yaml").variants()[0]
    source = render(variant)
    line = 1 + next(n for n, text in enumerate(source.splitlines()) if 'extern "C"' in text)
    template = tiny_folder / "templates" / "tiny.cu.j2"
    number = 1 + next(n for n, text in enumerate(template.read_text().splitlines()) if 'extern "C"' in text)
    message = form.format(name=variant.name, line=line)
    with pytest.raises(CompileError) as caught, template_lines_named(variant, source):
        raise CompileError(f"it does not compile\n{message}")
    assert str(caught.value).splitlines()[1:] == [
        message,
        "in the templates:",
        f"  line {line} is made of {template}:{number}",
    ]


def test_an_error_elsewhere_stays_as_it_is(tiny_folder):
    variant = load_spec(tiny_folder / "specs" / "tiny.yaml").variants()[0]
    for message in ("flashgen/tiny.cuh(2): error: no", f"{variant.name}.cu(99999): error: no", "no"):
        with pytest.raises(CompileError) as caught, template_lines_named(variant, render(variant)):
            raise CompileError(message)
        assert str(caught.value) == message
