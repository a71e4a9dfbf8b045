"""Faults are planted where their code is, however its comments and lines are."""

from __future__ import annotations

import pytest

from simulator.edits import replace

KERNEL = """\
void consume(int stage) {
    wait(full(stage));  // K is here
    barrier_sync(128);  // P is written
    /* P V */ mma(o,
                  p, v[stage]);
    barrier_sync(128);  // V has been read
}
"""


@pytest.mark.parametrize(
    ("old", "new", "without"),
    [
        ("wait(full(stage));  // once K is there\n", "", "wait(full(stage));"),
        ("mma(o, p, v[stage]);", "mma(o, p, v[0]);", "stage]"),
        ("    wait( full( stage ) );\n    barrier_sync(128);\n    mma", "    mma", "P is written"),
    ],
)
def test_comments_and_lines_do_not_count(old, new, without):
    planted = replace(KERNEL, old, new, "a fault")
    assert without in KERNEL
    assert without not in planted
    assert new in planted
    assert planted.endswith("barrier_sync(128);  // V has been read\n}\n")


def test_a_comment_that_is_put_in_ends_with_its_line():
    planted = replace(KERNEL, "wait(full(stage));", "// no wait", "a fault")
    assert planted.splitlines()[1] == "    // no wait"
    tight = replace("wait(full); mma();", "wait(full);", "// no wait", "a fault")
    assert tight == "// no wait\n mma();"


def test_of_several_places_a_statement_beside_it_tells_which():
    planted = replace(KERNEL, "barrier_sync(128);\n}", "}", "a fault")
    assert planted.count("barrier_sync") == 1
    assert "P is written" in planted


def test_what_is_not_there_is_named_with_the_nearest_lines():
    with pytest.raises(AssertionError) as caught:
        replace(KERNEL, "wait(empty(stage));", "", "no wait for K")
    message = str(caught.value)
    assert message.startswith("no wait for K: 'wait(empty(stage));' is not in the kernel")
    assert "\n  2: wait(full(stage));  // K is here" in message


def test_what_stands_several_times_is_named_with_its_lines():
    with pytest.raises(AssertionError) as caught:
        replace(KERNEL, "barrier_sync(128);", "", "no barrier")
    message = str(caught.value)
    assert message.startswith("no barrier: 'barrier_sync(128);' stands 2 times")
    assert "\n  3: barrier_sync(128);  // P is written\n  6: " in message


def test_a_comment_alone_is_no_place():
    with pytest.raises(AssertionError, match="is no code"):
        replace(KERNEL, "// K is here", "", "a fault")
