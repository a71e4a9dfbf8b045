"""Attention over ranks on the CPU, by gloo processes, against one process: results, gradients, refusals."""

from __future__ import annotations

import re

import pytest

import flashgen

pytestmark = pytest.mark.xdist_group("gloo")

CU = [0, 17, 17, 60, 149, 150, 203]
LONG = [0, 100, 420, 450, 700]
# On two or four ranks one document of 900 tokens is cut, and the others are whole.
MIXED = [0, 90, 170, 170, 1070, 1130, 1230, 1300]
WHOLE = {"cu_seqlens": MIXED, "layout": "whole_documents"}
PLAIN = {"heads": (8, 4), "seqlen": 203, "causal": True}
GATHER, ULYSSES, SQUARE = ({**PLAIN, "method": x} for x in ("gather", "ulysses", "auto"))
SQUARE["mesh"] = "square"
MANY = {"prefix": (2,), "start": (2, 203)}
HEADS = {"width": (8,), "n": 7}
BLOCKS = {"keep": (13, 13), "start": (203,)}
# By what they are: the number of ranks, and the case.
CASES = {
    "gather": (4, GATHER),
    "gather, equal shards, whose number nobody says": (2, GATHER | {"seqlen": 256, "layout": "contiguous"}),
    "gather, a head at a time, a batch, sinks": (
        4,
        GATHER | {"kv_heads_per_step": 1, "batch": 2, "sinks": True, "layout": "contiguous"},
    ),
    "gather, ALiBi and softcap": (2, GATHER | {"alibi": True, "deterministic": True}),
    "gather, softcap": (2, GATHER | {"softcap": 3.0, "kv_heads_per_step": 3, "sm_margin": 8}),
    "gather, a window on both sides": (4, GATHER | {"causal": False, "window_size": (20, 9)}),
    "gather, a window on the left alone": (2, GATHER | {"causal": False, "window_size": (20, -1)}),
    "gather, a causal window": (4, GATHER | {"window_size": (20, 0), "dims": (16, 24)}),
    "gather, no mask": (4, GATHER | {"causal": False, "heads": (4, 1)}),
    "gather, fewer tokens than ranks": (4, GATHER | {"seqlen": 3}),
    "gather, no tokens": (2, GATHER | {"seqlen": 0}),
    "gather, documents over a zigzag": (4, GATHER | {"cu_seqlens": CU, "alibi": True}),
    "gather, documents": (
        4,
        GATHER | {"cu_seqlens": LONG, "layout": "documents", "sinks": True, "deterministic": True},
    ),
    "gather, documents, contiguous": (
        2,
        GATHER | {"cu_seqlens": CU, "layout": "contiguous", "dtype": "float16"},
    ),
    "gather, documents, windows": (
        4,
        GATHER | {"cu_seqlens": LONG, "causal": False, "window_size": (30, 9), "layout": "documents"},
    ),
    "gather, documents, no mask": (4, GATHER | {"cu_seqlens": LONG, "causal": False, "layout": "documents"}),
    "gather, whole documents": (4, GATHER | WHOLE | {"sinks": True, "deterministic": True}),
    "gather, whole documents, a head at a time": (
        2,
        GATHER | WHOLE | {"kv_heads_per_step": 1, "alibi": True, "dtype": "float16"},
    ),
    "gather, whole documents, a window on both sides": (
        4,
        GATHER | WHOLE | {"causal": False, "window_size": (30, 9), "softcap": 3.0},
    ),
    "gather, whole documents, no mask": (2, GATHER | WHOLE | {"causal": False, "dims": (16, 24)}),
    "gather, whole documents, of which none is cut": (
        4,
        GATHER | {"cu_seqlens": [*range(0, 900, 75)], "layout": "whole_documents"},
    ),
    "gather, whole documents, fewer than ranks": (
        4,
        GATHER | {"cu_seqlens": [0, 5, 8], "layout": "whole_documents"},
    ),
    "gather, whole documents, one sequence": (2, GATHER | {"layout": "whole_documents", "batch": 2}),
    "gather, a mask": (
        4,
        GATHER | {"causal": False, "mask": ("documents_full", {"doc": (203,)}), "sinks": True},
    ),
    "gather, a mask beside causal": (
        2,
        GATHER | {"mask": ("kv < prefix[b] or kv >= start[b, q] - 9", MANY), "batch": 2, "softcap": 3.0},
    ),
    "gather, a mask beside a window": (
        4,
        GATHER | {"causal": False, "window_size": (50, 20), "mask": ("q // n == kv // n", {"n": 37})},
    ),
    "gather, a mask of heads": (
        2,
        GATHER | {"mask": ("q - kv < width[h] or (kv + h) % n == 0", HEADS), "kv_heads_per_step": 1},
    ),
    "gather, a mask of bools": (4, GATHER | {"mask": ("keep[q, kv] or q == kv", {"keep": (203, 203)})}),
    "gather, a mask of bools of heads": (
        2,
        GATHER
        | {"mask": ("not keep[b, h, q, kv]", {"keep": (2, 8, 203, 203)}), "batch": 2, "layout": "contiguous"},
    ),
    "gather, a mask of blocks": (
        4,
        GATHER | {"causal": False, "mask": ("keep[q // 16, kv // 16] or start[kv + 1] > q", BLOCKS)},
    ),
    "gather, a mask in float16": (
        2,
        GATHER | {"mask": ("window_first", {"width": 30, "first": 5}), "dtype": "float16"},
    ),
    "gather, documents, a mask": (
        4,
        GATHER | {"cu_seqlens": LONG, "layout": "documents", "mask": ("prefix_lm", {"prefix": (4,)})},
    ),
    "gather, documents, a mask beside a window": (
        2,
        GATHER
        | {"cu_seqlens": CU, "causal": False, "window_size": (30, 9), "layout": "contiguous"}
        | {"mask": ("(q + kv + b) % 3 != 0 or doc[b, q] == doc[b, kv]", {"doc": (203,)})},
    ),
    "gather, whole documents, a mask": (
        4,
        GATHER
        | WHOLE
        | {"mask": ("doc[b, q] == doc[b, kv] or kv < width[b, h]", {"doc": (1300,), "width": (7, 8)})}
        | {"deterministic": True},
    ),
    "ulysses, a mask": (4, ULYSSES | {"mask": ("q - kv < width[h] or (kv + h) % n == 0", HEADS)}),
    "ulysses, documents, a mask": (
        2,
        ULYSSES | {"cu_seqlens": CU, "mask": ("documents", {"doc": (203,)}), "layout": "contiguous"},
    ),
    "two dimensions, a mask": (
        4,
        SQUARE | {"mask": ("q - kv < width[h] or (kv + h) % n == 0", HEADS), "heads": (8, 1), "batch": 2},
    ),
    "ulysses, whole documents": (4, ULYSSES | WHOLE | {"heads": (8, 2), "sinks": True}),
    "two dimensions, whole documents": (4, SQUARE | WHOLE | {"sinks": True, "deterministic": True}),
    "ulysses": (4, ULYSSES | {"batch": 2, "sinks": True, "alibi": True}),
    "ulysses, ALiBi without causal": (2, ULYSSES | {"causal": False, "alibi": True}),
    "ulysses, dropout": (4, ULYSSES | {"batch": 3, "sinks": True, "dropout_p": 0.25}),
    "ulysses, dropout, fewer kv heads than ranks": (
        4,
        ULYSSES | {"heads": (8, 2), "batch": 2, "dropout_p": 0.25, "layout": "contiguous"},
    ),
    "ulysses, documents, dropout": (
        4,
        ULYSSES | {"cu_seqlens": CU, "sinks": True, "dropout_p": 0.25, "layout": "documents"},
    ),
    "ulysses, documents, dropout, fewer kv heads than ranks": (
        4,
        ULYSSES | {"cu_seqlens": CU, "heads": (8, 2), "dropout_p": 0.25, "dtype": "float16"},
    ),
    "auto, documents, dropout": (2, PLAIN | WHOLE | {"dropout_p": 0.25}),
    "gather, dropout": (4, GATHER | {"batch": 3, "sinks": True, "dropout_p": 0.25}),
    "gather, dropout, contiguous, GQA": (
        4,
        GATHER | {"heads": (8, 2), "batch": 2, "dropout_p": 0.25, "layout": "contiguous", "causal": False},
    ),
    "gather, dropout, a window, some heads at a time": (
        2,
        GATHER | {"kv_heads_per_step": 1, "causal": False, "window_size": (30, 5), "dropout_p": 0.25},
    ),
    "gather, dropout, ALiBi, softcap": (4, GATHER | {"alibi": True, "softcap": 3.0, "dropout_p": 0.25}),
    "gather, documents, dropout": (
        4,
        GATHER | {"cu_seqlens": CU, "sinks": True, "dropout_p": 0.25, "layout": "documents"},
    ),
    "gather, documents cut in zigzag, dropout": (
        4,
        GATHER | {"cu_seqlens": CU, "heads": (8, 2), "dropout_p": 0.25, "dtype": "float16"},
    ),
    "gather, whole documents, dropout": (4, GATHER | WHOLE | {"dropout_p": 0.25}),
    "two dimensions, dropout": (4, SQUARE | {"batch": 2, "sinks": True, "dropout_p": 0.25}),
    "two dimensions, documents, dropout": (
        4,
        SQUARE | {"cu_seqlens": LONG, "layout": "documents", "deterministic": True, "dropout_p": 0.25},
    ),
    "one rank, dropout": (1, GATHER | {"kv_heads_per_step": 1, "batch": 2, "dropout_p": 0.25}),
    "ulysses, documents": (4, ULYSSES | {"cu_seqlens": LONG, "layout": "documents"}),
    "ulysses, fewer kv heads than ranks": (4, ULYSSES | {"heads": (8, 2), "sinks": True}),
    "ulysses, kv heads that no rank has alone": (4, ULYSSES | {"heads": (12, 3), "causal": False}),
    "two dimensions": (4, SQUARE | {"batch": 2, "sinks": True, "softcap": 3.0}),
    "two dimensions, documents": (
        4,
        SQUARE | {"cu_seqlens": LONG, "layout": "documents", "deterministic": True},
    ),
    "two dimensions, one kv head": (4, SQUARE | {"heads": (4, 1), "layout": "contiguous"}),
    "a mesh of one dimension": (4, PLAIN | {"mesh": "flat"}),
    "one rank": (1, PLAIN),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_give_what_one_process_gives(pool, name):
    world, case = CASES[name]
    for differences, _ in pool.run("compare", case, world=world):
        limit = 2e-3 if case.get("dtype") == "float16" else 2e-6
        assert max(differences, default=0) < limit


def test_all_ranks_take_the_seed_that_the_first_one_draws(pool):
    for environment in ({}, {"FLASHGEN_CHECK": "1"}):
        first, *others = pool.run("drawn_dropout", environment=environment)
        assert all(other == first for other in others)
        assert first[0] != first[1]


@pytest.mark.parametrize("mesh", [None, "flat", "square"])
def test_shards_come_together_again(pool, mesh):
    assert all(pool.run("cut_and_join", mesh, world=4))


def test_two_passes_have_the_same_bits(pool):
    case = GATHER | {"cu_seqlens": LONG, "layout": "documents", "deterministic": True, "sinks": True}
    assert all(pool.run("deterministic", case))
    assert all(pool.run("deterministic", SQUARE | {"deterministic": True, "heads": (4, 1)}))


@pytest.mark.extra
@pytest.mark.parametrize(
    ("arch", "case"),
    [
        ("sm_80", {"heads": (2, 1)}),
        ("sm_80", {"heads": (2, 1), "causal": False, "window_size": (40, 9)}),
        ("sm_80", {"heads": (2, 1), "cu_seqlens": [0, 17, 17, 60, 61, 450], "layout": "documents"}),
        ("sm_80", {"heads": (2, 1), "dropout_p": 0.25}),
        ("sm_90", {"heads": (2, 1), "seqlen": 512, "dropout_p": 0.25}),
        ("sm_90", {"heads": (4, 2), "seqlen": 512}),
        ("sm_90", {"heads": (2, 1), "seqlen": 512, "causal": False, "window_size": (90, 9)}),
        ("sm_90", {"heads": (2, 2), "cu_seqlens": [0, 17, 17, 60, 61, 450], "layout": "documents"}),
        ("sm_90", {"heads": (2, 1), "cu_seqlens": [0, 17, 60, 572, 612], "layout": "whole_documents"}),
        ("sm_80", {"heads": (2, 1), "seqlen": 512, "mask": ("documents", {"doc": (512,)})}),
        ("sm_90", {"heads": (2, 1), "seqlen": 512, "mask": ("prefix_lm", {"prefix": (1,)})}),
    ],
)
def test_a_gather_has_the_bits_of_one_gpu(pool, arch, case):
    """Of kernels, in the simulator; cuts are at whole tiles."""
    environment = {"FLASHGEN_BACKEND": "simulator", "FLASHGEN_SIMULATOR_ARCH": arch}
    case = {"seqlen": 256, "causal": True, "dims": (64, 64), "dtype": "float16"} | case
    for bits in pool.run("compare_forward", case, world=2, environment=environment):
        assert bits == [True, True]


def test_the_gradients_of_a_weight_add_up_over_ranks(pool):
    """Bug group 8: gradients off by up to 1.2, and loss scales of context parallelism."""
    for method in ("gather", "ulysses"):
        assert max(pool.run("weight_gradients", method)) < 1e-5


@pytest.mark.parametrize(
    "case",
    [
        GATHER | {"seqlen": 64},
        GATHER | {"seqlen": 64, "mask": ("documents", {"doc": (64,)})},
        GATHER | {"seqlen": 64, "dropout_p": 0.25},
        ULYSSES | {"seqlen": 64},
        SQUARE | {"seqlen": 64},
    ],
)
def test_a_call_is_compiled_as_one_graph(pool, case):
    for difference, graphs in pool.run("compiled", case):
        assert difference == 0
        assert graphs == 1


@pytest.mark.parametrize("case", [GATHER | {"seqlen": 203}, ULYSSES | {"seqlen": 64}])
def test_weights_may_be_sharded_over_the_same_ranks(pool, case):
    assert max(pool.run("fully_sharded", case)) < 1e-4


@pytest.mark.extra
@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_a_gpt_learns_over_ranks_as_in_one_process(pool, method):
    for over, alone in pool.run("example", method):
        assert over == pytest.approx(alone, rel=1e-4)
        assert over[-1] < over[0] - 0.1


# Bug groups of other implementations of context parallelism.


def test_errors_do_not_grow_with_the_number_of_ranks(pool):
    """1: states in bf16 lose bits at each rank."""
    case = GATHER | {"dtype": "bfloat16", "heads": (4, 2), "seqlen": 512}
    two, four = (
        [
            max(x)
            for x in zip(
                *(differences for differences, _ in pool.run("compare", case, world=world)), strict=True
            )
        ]
        for world in (2, 4)
    )
    assert max(two + four) < 2**-7
    assert sum(four) < 1.5 * sum(two) + 1e-3


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "change", [{"method": "gather", "batch": 2}, {"method": "ulysses", "heads": (8, 1)}], ids=str
)
def test_gradients_are_rounded_once(pool, world, change):
    """1 and 8: parts of dK and dV that are rounded before they are added."""
    case = PLAIN | {"dtype": "bfloat16", "seqlen": 300} | change
    assert max(pool.run("error_of_dv", case, world=world)) < 1.02


@pytest.mark.parametrize("change", [{"cu_seqlens": [0, 17, 60]}, {"seqlen": 200}, {"tokens": 50}])
def test_padding_and_lengths_are_never_cut_in_silence(pool, change):
    """2: padding after packed documents, and lengths that were rounded down."""
    case = (
        GATHER | {"seqlen": 208} if "tokens" in change or "seqlen" in change else GATHER | {"cu_seqlens": CU}
    )
    for error, text in pool.run("call", case, change, environment={"FLASHGEN_CHECK": "1"}):
        assert error == "BadTensorShape" or "rank 0 of the group has an error" in text
        assert "layout 'zigzag' gives rank" in text


@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("layout", ["zigzag", "documents", "whole_documents"])
def test_documents_do_not_see_each_other(pool, method, layout):
    """3, 4 and 6: attention across documents; losses of packed batches; documents of any length."""
    case = {"heads": (8, 4), "cu_seqlens": LONG, "method": method, "layout": layout}
    for first, others in pool.run("documents_apart", case):
        assert first
        assert not others


def test_no_mask_with_a_balanced_layout(pool):
    """5: crashes and illegal accesses without causal."""
    case = GATHER | {"causal": False, "seqlen": 77, "layout": "zigzag"}
    assert max(max(differences) for differences, _ in pool.run("compare", case)) < 2e-6


def test_more_ranks_than_kv_heads(pool):
    """7: Ulysses stops where there are fewer kv heads than ranks."""
    case = ULYSSES | {"heads": (8, 1), "cu_seqlens": CU}
    assert max(max(differences) for differences, _ in pool.run("compare", case)) < 2e-6


@pytest.mark.parametrize(
    "case",
    [
        {"lengths": [13, 1, 0, 40], "sinks": True},
        {"lengths": [9, 30], "interleave": 4, "mesh": "square"},
        {"lengths": [37, 5, 64], "page": 4, "interleave": 2},
        {"lengths": [20, 3], "size": 1e4},
    ],
)
def test_decoding_over_a_cache_on_all_ranks(pool, case):
    """9, 10 and 12: LSEs to base 2 or e, pages counted by global lengths, exponents that overflow."""
    answers = pool.run("decoded", case)
    for difference, same_lse, same_bits, _ in answers:
        assert difference < 2e-6
        assert same_lse
        assert same_bits
    assert sum(tokens for *_, tokens in answers) == sum(case["lengths"])


def test_calls_do_not_share_options(pool):
    """11 and 13: heads that are global to the process, and ranks that send in other orders."""
    assert max(pool.run("many_calls", 9)) < 2e-6
    assert max(pool.run("many_calls", 6, world=2)) < 2e-6


# What ranks must agree on. A pool that does not answer fails, so these tests also show that nobody waits.


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layout": "contiguous"}, "layout"),
        ({"causal": False}, "causal"),
        ({"window_size": (8, 0)}, "window_size"),
        ({"softcap": 5.0}, "softcap"),
        ({"softmax_scale": 0.5}, "softmax_scale"),
        ({"method": "ulysses"}, "method"),
        ({"deterministic": True}, "deterministic"),
        ({"kv_heads_per_step": 2}, "kv_heads_per_step"),
        ({"mask": flashgen.Mask("kv <= q")}, "mask"),
    ],
)
def test_ranks_that_differ_get_an_error_on_every_rank(pool, changes, word):
    case = GATHER | {"seqlen": 64}
    of_rank = [({},), (changes,), ({},), ({},)]
    for error, text in pool.run("call", case, of_rank=of_rank, environment={"FLASHGEN_CHECK": "1"}):
        assert error == "BadParam"
        assert text.startswith(f"{word} differs between ranks")
        assert "rank 1" in text


@pytest.mark.parametrize("changes", [{"tokens": 9}, {"layout": "stripes"}, {"window_size": (3, 3)}])
@pytest.mark.parametrize("mesh", [None, "square"])
def test_an_error_of_one_rank_is_an_error_of_all(pool, changes, mesh):
    case = (SQUARE if mesh else GATHER) | {"seqlen": 64}
    of_rank = [({},), ({},), (changes,), ({},)]
    answers = pool.run("call", case, of_rank=of_rank, environment={"FLASHGEN_CHECK": "1"})
    assert all(answers)
    assert sum("so no rank computes" in text for _, text in answers) == 3


def test_shards_of_other_lengths_are_noticed(pool):
    """Each rank takes all shards to be as long as its own."""
    case = GATHER | {"seqlen": 203}
    answers = pool.run("call", case, {"seqlen": "unknown"}, environment={"FLASHGEN_CHECK": "1"})
    assert all("cu_seqlens differs between ranks" in text for _, text in answers)


def test_ranks_that_agree_compute(pool):
    assert pool.run("call", GATHER, environment={"FLASHGEN_CHECK": "1"}) == [None] * 4
    assert pool.run("call", SQUARE, environment={"FLASHGEN_CHECK": "1"}) == [None] * 4


@pytest.mark.parametrize(
    ("case", "changes", "error", "text"),
    [
        (ULYSSES | {"heads": (6, 2)}, {}, "BadParam", "6 heads, which 4 ranks cannot share.*'gather' can"),
        (GATHER | {"alibi": True, "causal": False}, {}, "BadParam", "'ulysses' can compute"),
        (GATHER, {"method": "ring"}, "BadParam", "'gather' and 'ulysses' can"),
        (SQUARE, {"method": "gather"}, "BadParam", "mesh has two dimensions"),
        (ULYSSES, {"dropout_p": 0.9}, "BadParam", "dropout_p is 0.9; a score has one random byte"),
        (ULYSSES, {"dropout_seed": (1, 2)}, "BadParam", "dropout_seed was given without dropout_p"),
        (GATHER, {"window_size": (1, 1)}, "BadParam", "causal hides every later key"),
        (GATHER, {"softmax_scale": -1.0}, "BadParam", "softmax_scale is -1.0"),
        (GATHER, {"group": "all"}, "BadParam", "group has type str"),
        (GATHER, {"kv_heads_per_step": 0}, "BadParam", "kv_heads_per_step is 0"),
        (GATHER, {"kv_heads_per_step": 1.5}, "BadParam", "kv_heads_per_step is 1.5; expected an integer"),
        (GATHER, {"softcap": -2.0}, "BadParam", "softcap is -2.0; it must be a number above 0"),
        (GATHER, {"softcap": "much"}, "BadParam", "softcap is 'much'; expected a number"),
        (GATHER | {"cu_seqlens": CU}, {"seqlen": 5}, "BadParam", "make padding a document"),
        (ULYSSES | {"mask": ("kv <= q", {})}, {"dropout_p": 0.1}, "BadParam", "0.1 and mask was given"),
        (GATHER | {"mask": ("kv <= q", {}), "alibi": True}, {}, "BadParam", "alibi_slopes and mask were"),
        (
            GATHER | {"mask": ("documents", {"doc": (51,)})},
            {},
            "BadTensorShape",
            r"shape \(51,\); expected an element for each of the 203 tokens of all ranks",
        ),
        (
            GATHER | {"mask": ("doc[q - kv] > 0", {"doc": (9,)})},
            {},
            "BadParam",
            r"no rank has the index q - kv",
        ),
        (
            GATHER | {"cu_seqlens": CU, "mask": ("doc[kv // 2] > 0", {"doc": (9,)})},
            {},
            "BadParam",
            r"which reads doc\[kv // 2\]: no rank has the index kv // 2",
        ),
        (GATHER, {"mask": "documents"}, "BadParam", "mask has type str; pass a flashgen.Mask"),
    ],
)
def test_what_a_method_lacks_is_refused_by_the_name_of_one_that_has_it(pool, case, changes, error, text):
    for kind, message in pool.run("call", case, changes):
        assert kind == error
        assert re.search(text, message)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"queries": 2}, "BadTensorShape", "one query a sequence"),
        ({"causal": True}, "BadParam", "causal was given"),
        ({"window_size": (5, 0)}, "BadParam", "window_size was given"),
        ({"pages": 1}, "TypeError", "unexpected keyword argument 'pages'"),
    ],
)
def test_what_no_rank_can_know_of_tokens_elsewhere_is_refused(pool, changes, error, text):
    for kind, message in pool.run("refused_decode", changes, world=2):
        assert kind == error
        assert text in message


def test_a_group_that_does_not_serve_the_device_is_refused():
    torch = pytest.importorskip("torch")
    from flashgen.distributed.groups import Ranks, check_device

    class Group:
        _device_types = (torch.device("cuda"),)

    ranks = Ranks(Group(), None, 2, 1, 0, 0)
    with pytest.raises(flashgen.DeviceTypeNotSupported, match=r"q is on cpu.*serves cuda; NCCL serves GPUs"):
        check_device(ranks, torch.zeros(2), "q")


def test_without_process_groups_it_is_said_how_to_have_them():
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(flashgen.BadParam, match=r"call torch.distributed.init_process_group first"):
        flashgen.distributed.attention(x, x, x)
    with pytest.raises(flashgen.BadParam, match="group and mesh were both given"):
        flashgen.distributed.attention(x, x, x, group=1, mesh=2)
