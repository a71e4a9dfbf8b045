"""The table of features that do not go together."""

import re

import pytest

from flashgen.errors import BadParam
from flashgen.operators.combinations import PAIRS, Feature, refuse


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.first} {pair.second}")
def test_each_pair_is_refused_with_both_arguments_and_advice(pair):
    first, second = Feature("one", "is 1"), Feature("other")
    refuse({pair.first: first})
    refuse({pair.second: second})
    with pytest.raises(BadParam, match=r"^one is 1 and other was given; ") as caught:
        refuse({pair.first: first, pair.second: second})
    assert not re.search("[{}]", str(caught.value))


def test_two_that_were_given_share_their_verb():
    with pytest.raises(BadParam, match=r"^pages and index were given; each row of pages is a sequence's"):
        refuse({"pages": Feature("pages"), "index": Feature("index")})
