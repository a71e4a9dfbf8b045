"""The map of a kernel as tables: no word of the comment is lost."""

import random
import re

import pytest

from flashgen.families.load import load_specs
from flashgen.source.order import sections
from flashgen.source.render import render
from flashgen.tools.page.mapcomment import BarrierRow, MapRow, read_map

TEXT = """\
// Computes a sum
// of rows:
//
//     S = Q K^T
//
// Map
//   warpgroup 0       loads
//                     by TMA
//   shared memory     Q, kQBytes = 16; then
//                     the mbarriers
//   mbarrier          arrivals of a phase                 who waits
//   q_full, k_full, v_full  1: the producer               consumers
//   q_full, dout_full 1, and the bytes                    producer,
//                                                         consumers
//   named barriers    see NamedBarrier
//   warp 3            counts
//
// Consumers take turns:
//
//   consumer 0        S | P V

"""
CONSTANTS = """\
struct Mbarriers {
    uint64_t q_full[kStages];  // Q has arrived
    uint64_t turn;             // 2: the threads that keep turns; consumers wait
};
enum NamedBarrier : int {  // __syncthreads() has the number 0
    kTurn = 1,  // + consumer: its turn, 256 threads
    kLast = kTurn + kConsumers,
};
"""
# Words of the table's head, and of the line that named barriers replace.
_HEAD = {
    "Map",
    "barrier",
    "mbarrier",
    "arrivals",
    "of",
    "a",
    "phase",
    "who",
    "waits",
    "named",
    "barriers",
    "see",
    "NamedBarrier",
    "other",
    "and",
    "Mbarriers",
}


def test_a_map_has_rows_barriers_and_named_barriers():
    found = read_map(TEXT, CONSTANTS)
    assert found.summary == "Computes a sum of rows:\n\n    S = Q K^T"
    assert found.rows == (
        MapRow("warpgroup 0", "loads by TMA"),
        MapRow("shared memory", "Q, kQBytes = 16; then the mbarriers"),
        MapRow("warp 3", "counts"),
    )
    assert found.notes == "Consumers take turns:\n\n  consumer 0        S | P V"
    assert found.barriers == (
        BarrierRow("q_full, k_full, v_full", "1: the producer", "consumers"),
        BarrierRow("q_full, dout_full", "1, and the bytes", "producer, consumers"),
        BarrierRow("turn", "2: the threads that keep turns; consumers wait", ""),
        BarrierRow("kTurn = 1", "+ consumer: its turn, 256 threads", ""),
        BarrierRow("kLast = kTurn + kConsumers", "", ""),
    )


def test_a_kernel_without_a_map_has_a_summary_alone():
    found = read_map("// Merges two results.\n//\n//     out = a + b\n\n", "")
    assert found.summary == "Merges two results.\n\n    out = a + b"
    assert (found.rows, found.barriers, found.notes) == ((), (), "")


@pytest.mark.parametrize("spec", load_specs(), ids=lambda spec: spec.name)
def test_no_word_of_a_shipped_map_is_lost(spec, fresh_seed):
    for step in random.Random(fresh_seed).choice(spec.variants()).steps:
        texts = {part.name: part.text for part in sections(render(step))}
        found = read_map(texts["map"], texts["constants"])
        shown = [found.summary, found.notes, *(f"{row.label} {row.text}" for row in found.rows)]
        shown += [f"{row.name} {row.arrivals} {row.waits}" for row in found.barriers]
        lost = set(re.findall(r"\w+", texts["map"])) - set(re.findall(r"\w+", " ".join(shown)))
        assert lost <= _HEAD
        if "arrivals of a phase" in texts["map"]:
            assert any(row.waits for row in found.barriers)
        named = re.search(r"enum NamedBarrier.*?\};", texts["constants"], re.DOTALL)
        for name in re.findall(r"^ +(k\w+) =", named[0], re.MULTILINE) if named else []:
            assert sum(row.name.split(" ")[0] == name for row in found.barriers) == 1
        struct = re.search(r"struct Mbarriers.*?\};", texts["constants"], re.DOTALL)
        for name in (
            re.findall(r"^ +uint64_t (\w+)", struct[0], re.MULTILINE) if struct and found.barriers else []
        ):
            assert sum(name in row.name.split(", ") for row in found.barriers) == 1
