"""How the text of one variable is read and written."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.env.variable import FALSE_WORDS, TRUE_WORDS, Variable, parse_flag

NAMES = st.text(st.characters(exclude_characters=",", exclude_categories=("Z", "C")), min_size=1)
VALUES = {
    "flag": st.booleans(),
    "flags": st.lists(st.booleans(), min_size=1, max_size=4).map(tuple),
    "int": st.integers(),
    "float": st.floats(allow_nan=False),
    "str": st.text(),
    "list": st.lists(NAMES),
}


@pytest.mark.parametrize("kind", VALUES)
def test_parse_undoes_format(kind):
    variable = Variable("X", kind, None, "A test.")

    @given(VALUES[kind])
    def check(value):
        assert variable.parse(variable.format(value)) == value
        assert type(variable.parse(variable.format(value))) is type(value)

    check()


@pytest.mark.parametrize("kind", VALUES)
def test_format_takes_text_that_parses(kind):
    variable = Variable("X", kind, None, "A test.")

    @given(VALUES[kind])
    def check(value):
        text = variable.format(value)
        assert variable.format(text) == text

    check()


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        *[("flag", word, True) for word in sorted(TRUE_WORDS)],
        *[("flag", word, False) for word in sorted(FALSE_WORDS)],
        ("flag", " TRUE ", True),
        ("flags", "(True, no,1)", (True, False, True)),
        ("flags", "yes", (True,)),
        ("int", "1e8", 100_000_000),
        ("int", "-1", -1),
        ("int", " 12 ", 12),
        ("int", "1.0", 1),
        ("float", "1e-3", 1e-3),
        ("str", " kept as it is ", " kept as it is "),
        ("list", " A, B ,,C,", ["A", "B", "C"]),
        ("list", "", []),
    ],
)
def test_parse(kind, text, value):
    assert Variable("X", kind, None, "A test.").parse(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "allowed"),
    [
        ("flag", "maybe", r"true or false \(also 1/0, yes/no, on/off\)"),
        ("flag", "2", "true or false"),
        ("flags", "true,maybe", "comma-separated list"),
        ("flags", "", "comma-separated list"),
        ("int", "1.5", "an integer"),
        ("int", "three", "an integer"),
        ("int", "inf", "an integer"),
        ("int", "nan", "an integer"),
        ("float", "a lot", "a number"),
    ],
)
def test_parse_error_names_variable_value_and_allowed(kind, text, allowed):
    variable = Variable("MY_VARIABLE", kind, None, "Counts things.")
    with pytest.raises(
        ValueError, match=rf"MY_VARIABLE has the value '{text}'; allowed: .*{allowed}.*Counts things"
    ):
        variable.parse(text)
    with pytest.raises(ValueError, match="MY_VARIABLE"):
        variable.format(text)


def test_choices_are_found_in_any_letter_case_and_by_alias():
    variable = Variable("X", "str", None, "A test.", ("Fast", "slow"), {"1": "Fast", "lazy": "slow"})
    assert [variable.parse(text) for text in ("fast", "SLOW", " Fast ", "1", "LAZY")] == [
        "Fast",
        "slow",
        "Fast",
        "Fast",
        "slow",
    ]
    assert variable.format("1") == "Fast"
    with pytest.raises(ValueError, match="'medium'; allowed: Fast, slow"):
        variable.parse("medium")


def test_choices_of_numbers():
    variable = Variable("X", "int", 1, "A test.", (1, 2))
    assert variable.parse("2") == 2
    assert variable.format(1) == "1"
    with pytest.raises(ValueError, match="'3'; allowed: 1, 2"):
        variable.parse("3")
    with pytest.raises(ValueError, match="'3'; allowed: 1, 2"):
        variable.format(3)


@pytest.mark.parametrize("names", [["A,B"], [" A"], [""], ["A", ""]])
def test_a_list_cannot_hold_a_name_that_would_be_cut_or_lost(names):
    with pytest.raises(ValueError, match=r"X cannot contain .*a name is empty, has a comma"):
        Variable("X", "list", (), "A test.").format(names)


def test_lists_are_written_from_any_sequence():
    assert Variable("X", "list", (), "A test.").format(("A", "B")) == "A,B"
    assert Variable("X", "list", (), "A test.").format("A, B") == "A,B"


def test_infinity_is_a_number():
    assert Variable("X", "float", None, "A test.").parse("inf") == math.inf


def test_parse_flag_says_what_it_takes():
    assert parse_flag("On") is True
    with pytest.raises(ValueError, match="'maybe' is neither true nor false; allowed: true or false"):
        parse_flag("maybe")


def test_a_variable_cannot_be_changed():
    with pytest.raises(AttributeError):
        Variable("X", "int", 1, "A test.").default = 2
