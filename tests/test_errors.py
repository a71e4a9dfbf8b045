"""Errors name what the caller gave."""

import pytest

from flashgen import errors


def test_names_are_exchanged_all_at_once_and_as_whole_words():
    given = "k has 3 heads but k_new has 2; k and k_new, of kv_lengths, must agree"
    with pytest.raises(errors.BadTensorShape) as caught, errors.naming(k="k_cache", k_new="k"):
        raise errors.BadTensorShape(given)
    assert str(caught.value) == "k_cache has 3 heads but k has 2; k_cache and k, of kv_lengths, must agree"


def test_words_that_are_no_names_stay():
    error = errors.BadParam("pages[0, 0] is 7; there are 1 pages, and pages say which pages are whose")
    errors.rename(error, pages="block_table")
    assert str(error).split("; ") == [
        "block_table[0, 0] is 7",
        "there are 1 pages, and block_table say which pages are whose",
    ]
    error = errors.BadParam("splits is 4, but no kernel that splits keys has so many")
    errors.rename(error, splits="num_splits")
    assert str(error) == "num_splits is 4, but no kernel that splits keys has so many"


def test_a_phrase_goes_ahead_of_the_names_in_it():
    error = errors.BadParam("cap is -1; pass None for no cap, or 'auto'")
    errors.rename(error, **{"cap": "softcap", "None for no cap": "0 for no cap", "'auto'": "0"})
    assert str(error) == "softcap is -1; pass 0 for no cap, or 0"


def test_what_else_an_error_knows_is_kept():
    error = errors.SimulationError("slope is read by two threads", check="race", line=7)
    errors.rename(error, slope="alibi_slopes")
    assert (str(error), error.check, error.line) == ("alibi_slopes is read by two threads", "race", 7)
    errors.rename(error)
    assert str(error) == "alibi_slopes is read by two threads"


def test_other_errors_pass_as_they_are():
    with pytest.raises(ValueError, match=r"^k is no number$"), errors.naming(k="k_cache"):
        raise ValueError("k is no number")
