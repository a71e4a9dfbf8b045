"""Errors name what the caller gave."""

import pickle

import pytest

from flashgen import errors
from flashgen.errors import arg, naming


def test_references_are_exchanged_all_at_once_and_nothing_else_is():
    words = f"{arg('k')} has 3 heads but {arg('k_new')} has 2; k, which is one of kv_lengths, must agree"
    with pytest.raises(errors.BadTensorShape) as caught, naming({"k": "k_cache", "k_new": "k"}):
        raise errors.BadTensorShape(words)
    assert str(caught.value) == "k_cache has 3 heads but k has 2; k, which is one of kv_lengths, must agree"


def test_a_function_that_calls_another_has_its_names_last():
    names = naming({"kv_lengths": "lengths"}), naming({"lengths": "cache_seqlens", "kv_lengths": "no"})
    with pytest.raises(errors.BadParam) as caught, names[1], names[0]:
        raise errors.BadParam(f"{arg('kv_lengths')}[3] is -1; expected 0 or more")
    assert str(caught.value) == "cache_seqlens[3] is -1; expected 0 or more"


def test_advice_is_in_the_words_of_the_caller():
    error = errors.BadParam(f"{arg('cap')} is -1; pass {arg('no softcap', 'None')} for no cap")
    assert str(error) == "cap is -1; pass None for no cap"
    error.rename({"cap": "softcap", "no softcap": "0"})
    assert str(error) == "softcap is -1; pass 0 for no cap"


def test_arguments_of_one_name_are_listed_once():
    error = errors.BadTensorShape(f"with {arg('cu_seqlens_q, cu_seqlens_kv, index')} it is packed")
    assert str(error) == "with cu_seqlens_q, cu_seqlens_kv, index it is packed"
    error.rename({"cu_seqlens_q": "cu_seqlens", "cu_seqlens_kv": "cu_seqlens"})
    assert str(error) == "with cu_seqlens, index it is packed"


def test_what_else_an_error_knows_is_kept():
    error = errors.SimulationError(f"{arg('slope')} is read by two threads", check="race", line=7)
    error.rename({"slope": "alibi_slopes"})
    assert (str(error), error.check, error.line) == ("alibi_slopes is read by two threads", "race", 7)
    error.rename({})
    assert str(error) == "alibi_slopes is read by two threads"


def test_an_error_in_another_one_keeps_its_references():
    inner = errors.BadParam(f"{arg('mask')} is None")
    outer = errors.BadTensorShape(f"parts[1]: {inner.message}; pass one")
    outer.rename({"mask": "attn_mask"})
    assert str(outer) == "parts[1]: attn_mask is None; pass one"


def test_the_subject_is_the_argument_that_a_message_begins_with():
    assert errors.BadParam(f"{arg('softcap')} is -1").subject == "softcap"
    assert errors.BadParam(f"{arg('columns', 'seqlen_kv')} are 3").subject == "columns"
    assert errors.BadParam(f"softcap is -1, {arg('q')} is not").subject == ""
    assert errors.BadParam().subject == str(errors.BadParam()) == ""


def test_errors_are_shown_and_pickled_as_any_others():
    error = errors.BadParam(f"{arg('q')} is None")
    assert repr(error) == "BadParam('q is None')"
    copy = pickle.loads(pickle.dumps(error))
    copy.rename({"q": "query"})
    assert (str(copy), str(error)) == ("query is None", "q is None")


def test_text_of_a_caller_is_no_reference():
    error = errors.BadParam(f"{arg('score')} is {arg('q')!r}; it must be a name")
    error.rename({"q": "query"})
    assert str(error) == f"score is {arg('q')!r}; it must be a name"


def test_other_errors_pass_as_they_are():
    with pytest.raises(ValueError, match=r"^k is no number$"), naming({"k": "k_cache"}):
        raise ValueError("k is no number")
