import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.families.expression import Expression

NAMES = frozenset(("a", "b", "c", "dtype"))
small = st.integers(-1000, 1000)


@given(a=small, b=small.filter(bool), c=small)
def test_it_computes_as_python_does(a, b, c):
    text = "(a - 2 * -b) // b % 7 + max(a, b, c) if a < b <= c or not (a == c and b) else min(a, c)"
    expected = (a - 2 * -b) // b % 7 + max(a, b, c) if a < b <= c or not (a == c and b) else min(a, c)
    assert Expression(text, NAMES)({"a": a, "b": b, "c": c}) == expected


def test_an_integer_and_folded_lines_are_expressions():
    assert Expression(48, NAMES)({}) == 48
    assert Expression("a\n  + b", NAMES)({"a": 1, "b": 2}) == 3


def test_strings_compare():
    choose = Expression("4 if dtype == 'fp32' else 2", NAMES)
    assert [choose({"dtype": dtype}) for dtype in ("fp32", "fp16")] == [4, 2]


@pytest.mark.parametrize(
    "text",
    [
        "a.real",
        "a[0]",
        "a ** b",
        "a / b",
        "a << b",
        "print(a)",
        "max()",
        "max(a, default=b)",
        "(lambda: a)()",
        "[a for a in b]",
        "f'{a}'",
        "1.5 * a",
        "True",
        "(a := 1)",
        "max(*a)",
        "a +",
        "",
        "a; b",
    ],
)
def test_nothing_else_is_allowed(text):
    with pytest.raises(ValueError, match=r"allowed: names, integers"):
        Expression(text, NAMES)


@pytest.mark.parametrize("text", ["d", "max", "__builtins__", "a + eval"])
def test_unknown_names_are_named_with_the_known(text):
    with pytest.raises(ValueError, match=r"unknown name .*; known: a, b, c, dtype"):
        Expression(text, NAMES)


@pytest.mark.parametrize("text", ["a // b", "a % b", "dtype", "dtype * a", "a < b", "a - dtype"])
def test_a_value_that_is_no_integer(text):
    with pytest.raises(ValueError, match=r"cannot be computed|an integer is needed"):
        Expression(text, NAMES)({"a": 1, "b": 0, "dtype": "fp16"})


def test_it_says_which_names_it_reads():
    assert Expression("max(a, 2) if dtype == 'b' else 3", NAMES).reads == {"a", "dtype"}
    assert Expression(48, NAMES).reads == frozenset()
