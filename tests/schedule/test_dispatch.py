import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import flashgen
from fake_gpu import H200
from flashgen.errors import BadParam, BadTensorShape, DeviceTypeNotSupported, SpecError
from flashgen.families.load import load_spec, load_specs
from flashgen.families.model import Spec
from flashgen.families.scores import load_scores
from flashgen.operators.arguments import view_of_shape
from flashgen.operators.attention import normalise as varlen
from flashgen.operators.masks import UNBOUNDED
from flashgen.operators.splits import SplitEvery
from flashgen.schedule.cost import cost
from flashgen.schedule.dispatch import candidates, offers, runs_on, select
from flashgen.schedule.explain import explain
from flashgen.schedule.grid import launch_of, rows, tiles
from flashgen.schedule.plan import plan_steps
from flashgen.schedule.tensormap import expressible
from problems import problem as make_problem
from problems import replace
from variants import variant

GEFORCE = replace(
    H200, name="GeForce", arch="sm_89", compute_capability=(8, 9), smem_per_block=101376, smem_per_sm=102400
)
TURING = replace(H200, name="Turing", arch="sm_75", compute_capability=(7, 5))


def problem(**changes):
    fields = {
        "batch": 2,
        "seqlen_q": 1024,
        "seqlen_kv": 1024,
        "num_heads_q": 16,
        "num_heads_kv": 16,
        "head_dim": 64,
        "softmax_scale": 0.125,
        "q_strides": (1, 1, 1),
        "k_strides": (1, 1, 1),
        "v_strides": (1, 1, 1),
        "out_strides": (1, 1, 1),
    }
    if changes.get("mask_type") == "causal":
        fields["window_right"] = 0
    return make_problem(**(fields | changes))


def two_dims(head_dim, head_dim_v):
    plain = variant(head_dim)
    return replace(plain, axes=(("head_dim", head_dim), ("head_dim_v", head_dim_v), *plain.axes[1:]))


EVERY = [
    variant(head_dim, dtype, mask_type, gqa, block_m=block_m, tile_name=name, efficiency=efficiency, **target)
    for head_dim in (32, 64, 128, 256)
    for dtype in ("fp16", "fp32")
    for mask_type in ("none", "causal")
    for gqa in ("mha", "gqa", "packed")
    for target in (
        {"target": "sm80", "priority": 0, "smem_bytes": 600 * head_dim, "max_smem": 166912},
        {"target": "sm86", "priority": 1, "smem_bytes": 300 * head_dim, "max_smem": 101376},
    )
    for name, block_m, efficiency in (("", 128, 1.0), ("m64", 64, 0.8))
]


def forward_specs():
    """The families that serve any number of rows."""
    return [spec for spec in load_specs() if spec.family == "flash_fwd"]


problems = st.builds(
    lambda group, num_heads_kv, **fields: problem(
        num_heads_q=group * num_heads_kv, num_heads_kv=num_heads_kv, **fields
    ),
    batch=st.integers(1, 8),
    seqlen_q=st.integers(0, 5000),
    num_heads_kv=st.integers(1, 16),
    group=st.sampled_from([1, 2, 8]),
    head_dim=st.integers(1, 32).map(lambda n: 8 * n),
    dtype=st.sampled_from(["fp16", "fp32"]),
    mask_type=st.sampled_from(["none", "causal"]),
)


@given(problems, st.sampled_from([H200, GEFORCE]))
def test_the_choice_serves_the_problem_and_no_other_that_does_is_cheaper(call, device):
    chosen = select(call, device, EVERY)
    assert chosen.dtype == call.dtype
    assert chosen.mask_type == call.mask_type
    assert chosen.head_dim == min(d for d in (32, 64, 128, 256) if d >= call.head_dim)
    assert (chosen.gqa == "mha") == (call.group_size == 1)
    assert chosen.smem_bytes <= device.smem_per_block
    siblings = [v for v in EVERY if v.axes[:3] == chosen.axes[:3] and v.target == chosen.target]
    siblings = [v for v in siblings if (v.gqa == "mha") == (call.group_size == 1)]
    assert cost(call, device, chosen) == min(cost(call, device, v) for v in siblings)


@given(problems, st.randoms())
def test_what_cannot_serve_does_not_change_the_choice(call, random):
    useful = set(candidates(call, H200, EVERY))
    fewer = [v for v in EVERY if v in useful or random.random() < 0.5]
    assert select(call, H200, fewer) == select(call, H200, EVERY)


@given(problems)
def test_tiles_cover_all_rows_of_all_heads(call):
    for v in candidates(call, H200, EVERY):
        covered = tiles(call, v) * v.tile_value("block_m")
        needed = call.batch * call.num_heads_q * call.seqlen_q
        assert covered >= needed
        assert (
            rows(call, v) * (call.num_heads_kv if v.gqa == "packed" else call.num_heads_q) * call.batch
            == needed
        )


@given(problems, st.sampled_from([H200, GEFORCE]), st.randoms())
def test_a_tuned_tile_takes_the_place_of_the_ordinary_one_and_of_no_other(call, device, random):
    """At some points, whatever its efficiency."""
    at = [v for v in EVERY if not v.tile_name and random.random() < 0.5]
    tuned = [
        replace(v, tile_name="tuned", dispatch=v.dispatch._replace(efficiency=random.choice([0.5, 1.2])))
        for v in at
    ]
    before, after = (set(candidates(call, device, variants)) for variants in (EVERY, [*EVERY, *tuned]))
    replaced = {v for v in before if v in at}
    assert after == before - replaced | {t for v, t in zip(at, tuned, strict=True) if v in replaced}


def test_short_queries_of_a_group_are_packed():
    call = problem(batch=16, num_heads_q=16, num_heads_kv=2, seqlen_q=4, seqlen_kv=4096)
    assert select(call, H200, EVERY).gqa == "packed"


def test_rows_that_a_tile_could_not_count_are_not_packed():
    call = problem(num_heads_q=64, num_heads_kv=1, seqlen_q=1 << 26, batch=1)
    assert {v.gqa for v in candidates(call, H200, EVERY)} == {"gqa"}


def test_a_small_grid_takes_the_small_tile_and_a_large_one_the_efficient_tile():
    assert select(problem(batch=1, seqlen_q=128), H200, EVERY).tile_name == "m64"
    assert select(problem(batch=64, seqlen_q=4096), H200, EVERY).tile_name == ""


@pytest.mark.parametrize(
    ("sizes", "named"), [({"seqlen_q": 2**30}, "query rows"), ({"batch": 2**30}, "batch")]
)
def test_a_call_that_no_kernel_counts_to_the_end_of_is_too_large(sizes, named):
    with pytest.raises(
        BadTensorShape, match=f"^the call has 1073741824 {named}, and kernels for it count at most"
    ):
        select(problem(**sizes), H200, EVERY)
    assert select(problem(**dict.fromkeys(sizes, 2**29)), H200, EVERY)


@given(problems, st.sampled_from([H200, GEFORCE]))
def test_a_start_is_paid_by_no_more_tiles_than_the_busiest_multiprocessor_has(call, device):
    """Of tiles that differ in length, with what the end of the grid adds to an equal share."""
    for plain in candidates(call, device, EVERY):
        cheap, dear = (
            cost(call, device, plain),
            cost(call, device, replace(plain, dispatch=plain.dispatch._replace(start=2))),
        )
        block_m, count = plain.tile_value("block_m"), tiles(call, plain)
        rate = plain.dispatch.efficiency * (0.97 if plain.gqa == "packed" else 1)
        paid = (dear - cheap) * rate / (2 * block_m * block_m)
        waves = count / device.num_sms
        assert min(1, waves) - 1e-9 <= paid <= max(math.ceil(waves), waves + 0.35) + 1e-9


def test_a_tile_alone_where_three_have_room_is_slower_than_the_one_that_has_all_the_room():
    call = problem(batch=1, num_heads_q=H200.num_sms, num_heads_kv=H200.num_sms, seqlen_q=128)
    alone, beside = (variant(min_blocks=room, fill=0.5) for room in (1, 3))
    assert cost(call, H200, beside) == pytest.approx(cost(call, H200, alone) * 3**0.5)
    # Three to a multiprocessor reach the rate of all.
    full = replace(call, batch=3)
    assert cost(full, H200, beside) == pytest.approx(cost(full, H200, alone))


# Problems for which one tile of the shipped spec was clearly faster than another on an H200: head_dim, mask
# type, grouping, batch, seqlen, query heads, kv heads, rows of the best tile.
MEASURED = [
    (64, "none", "mha", 1, 512, 32, 32, 128),
    (64, "none", "mha", 1, 1024, 32, 32, 256),
    (64, "none", "mha", 1, 2048, 32, 32, 256),
    (64, "causal", "mha", 1, 512, 32, 32, 64),
    (64, "causal", "mha", 4, 512, 32, 32, 128),
    (64, "causal", "mha", 1, 2048, 32, 32, 256),
    (64, "causal", "mha", 16, 1024, 32, 32, 128),
    (64, "causal", "packed", 1, 512, 32, 4, 64),
    (64, "causal", "packed", 32, 512, 32, 4, 128),
    (128, "none", "mha", 1, 1024, 16, 16, 128),
    (128, "causal", "mha", 4, 512, 16, 16, 64),
    (128, "causal", "mha", 4, 1024, 16, 16, 128),
    (96, "none", "mha", 2, 1024, 21, 21, 128),
    (32, "none", "mha", 1, 1024, 64, 64, 128),
]


@pytest.mark.parametrize("measured", MEASURED, ids=lambda row: "-".join(map(str, row)))
def test_the_tile_that_was_measured_fastest_is_taken(measured):
    head_dim, mask_type, gqa, batch, seqlen, heads_q, heads_kv, block_m = measured
    call = problem(
        batch=batch,
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim,
        mask_type=mask_type,
    )
    (spec,) = (spec for spec in load_specs() if spec.name == "flash_fwd_sm80")
    offered = spec.select(head_dim=head_dim, dtype="fp16", mask_type=mask_type, gqa=gqa, target="sm80")
    assert select(call, H200, offered).tile_value("block_m") == block_m


@pytest.mark.parametrize("head_dim", [32, 256])
def test_the_target_follows_the_shared_memory_of_the_device(head_dim):
    call = problem(head_dim=head_dim)  # at 32 the tile for the larger class would fit the smaller too
    assert select(call, H200, EVERY).target == "sm80"
    assert select(call, GEFORCE, EVERY).target == "sm86"


def test_a_newer_spec_is_preferred_where_it_runs():
    newer = variant(spec="flash_fwd_sm90", target="sm90", min_arch="sm_90a", smem_bytes=200000)
    assert select(problem(), H200, [variant(), newer]) == newer
    assert select(problem(), GEFORCE, [variant(), newer]) == variant()


@pytest.mark.parametrize(
    ("min_arch", "runs"),
    [("sm_80", True), ("sm_90", True), ("sm_90a", True), ("sm_100", False), ("sm_100f", False)],
)
def test_architectures_of_a_hopper(min_arch, runs):
    assert runs_on(variant(min_arch=min_arch), H200) == runs
    assert runs_on(variant(min_arch=min_arch, smem_bytes=232449), H200) is False


def test_an_arch_specific_kernel_runs_on_that_arch_only():
    blackwell = replace(H200, compute_capability=(10, 3))
    assert not runs_on(variant(min_arch="sm_90a"), blackwell)
    assert not runs_on(variant(min_arch="sm_100a"), blackwell)
    assert runs_on(variant(min_arch="sm_100f"), blackwell)


def test_kernels_for_hopper_run_on_hopper_alone():
    variants = [variant for spec in load_specs() for variant in spec.variants()]
    for name in ("sm_100", "sm_103", "sm_110"):
        number = int(name.removeprefix("sm_"))
        newer = replace(H200, arch=name, compute_capability=divmod(number, 10))
        assert {v.target for v in variants if runs_on(v, newer)} == {"sm80", "sm86", "sm89"}


def test_a_grid_that_no_launch_has_room_for_is_not_chosen():
    call = problem(batch=2**27, seqlen_q=1, seqlen_kv=1000, num_heads_q=8, num_heads_kv=8, **CONTIGUOUS)
    chosen = select(call, H200, offers(call, H200, load_specs()))
    assert not chosen.grid.shared_tiles
    plan_steps(call, chosen, H200)
    clusters = next(v for spec in load_specs() for v in spec.variants() if v.grid.shared_tiles)
    with pytest.raises(BadTensorShape, match="thread blocks, and one launch has at most"):
        launch_of(call, clusters, H200)


def test_a_device_is_told_the_shared_memory_that_decides():
    large = variant(max_smem=GEFORCE.smem_per_block + 1024, smem_bytes=1024)
    with pytest.raises(DeviceTypeNotSupported, match=f"they need sm_80 with {large.max_smem} bytes"):
        select(problem(), GEFORCE, [large])


def test_an_old_device_is_told_what_is_needed():
    with pytest.raises(DeviceTypeNotSupported, match=r"Turing \(sm_75.*of attention for head_dim 64,.*sm_80"):
        select(problem(), TURING, EVERY)


def test_a_missing_variant_is_an_error_of_the_specs():
    with pytest.raises(SpecError, match="head_dim 64, head_dim_v 64, dtype bf16"):
        select(problem(dtype="bf16"), H200, EVERY)


def test_another_operator_is_not_attention():
    with pytest.raises(SpecError):
        select(problem(), H200, [replace(variant(), operator="attention_backward")])


def test_the_least_work_that_holds_both_head_dims():
    variants = [variant(64), variant(128), two_dims(192, 128), variant(192), two_dims(128, 256), variant(256)]
    for call, held in {
        (192, 128): (192, 128),
        (136, 8): (192, 128),
        (128, 128): (128, 128),
        (64, 128): (128, 128),
        (128, 64): (128, 128),
        (160, 136): (192, 192),
        (128, 192): (128, 256),  # as much work as 192 and 192, less of it for scores
        (8, 200): (128, 256),
        (200, 8): (256, 256),
    }.items():
        chosen = select(problem(head_dim=call[0], head_dim_v=call[1]), H200, variants)
        assert (chosen.head_dim, chosen.head_dim_v) == held


def test_what_is_offered_is_enough_to_choose_among_the_shipped_variants():
    specs = load_specs()
    every = [v for spec in specs if not spec.on_request for v in spec.variants()]
    for head_dim, head_dim_v in ((8, 8), (40, 64), (128, 128), (192, 128), (136, 8), (192, 136), (64, 256)):
        for dtype in ("fp16", "bf16", "fp32"):
            for mask_type in ("none", "causal", "local", "dense"):
                for heads in (2, 16):
                    widths = {"head_dim": head_dim, "head_dim_v": head_dim_v}
                    call = problem(**widths, dtype=dtype, mask_type=mask_type, num_heads_kv=heads)
                    for device in (H200, GEFORCE):
                        offered, chosen = offers(call, device, specs), select(call, device, every)
                        assert select(call, device, offered) == chosen
                        suited = {v for v in offered if runs_on(v, device) and expressible(call, v)}
                        assert {v.head_dim for v in suited} == {chosen.head_dim}


def test_a_larger_head_dim_is_offered_where_the_smallest_does_not_run():
    (spec,) = (spec for spec in load_specs() if spec.name == "flash_fwd_sm80")
    entries = {
        point: () if point[0] == 64 and point[-1] == "sm86" else tiles
        for point, tiles in spec.content.entries.items()
    }
    spec = Spec(spec.path, b"", spec.content._replace(entries=entries))
    for device, head_dim in ((H200, 64), (GEFORCE, 80)):
        call = problem(head_dim=40)
        chosen = select(call, device, offers(call, device, [spec]))
        assert chosen == select(call, device, spec.select(head_dim=[64, 80, 96, 128, 192, 256]))
        assert chosen.head_dim == head_dim


TMA = load_spec(Path(__file__).parents[1] / "fixtures" / "tma" / "specs" / "copy_tma.yaml")
CONTIGUOUS = {
    "q_strides": (1024 * 1024, 1024, 64),
    "k_strides": (1024 * 1024, 1024, 64),
    "v_strides": (1024 * 1024, 1024, 64),
    "out_strides": (1024 * 1024, 1024, 64),
}


def test_arrays_that_tensor_maps_cannot_describe_go_to_the_family_without_them():
    specs = [*load_specs(), TMA]
    every = [v for spec in specs if not spec.on_request for v in spec.variants()]
    newer = problem(**CONTIGUOUS)
    older = problem(**CONTIGUOUS | {"k_strides": (1024 * 1024, 1024, 0)})
    for offered in (offers(newer, H200, specs), offers(older, H200, specs), every):
        assert select(newer, H200, offered).target == "tma"
        assert select(older, H200, offered).spec == "flash_fwd_sm80"
        assert select(newer, GEFORCE, offered).spec == "flash_fwd_sm80"


def test_a_head_dim_that_only_tensor_maps_serve_is_passed_over():
    specs = [*load_specs(), TMA]  # the shipped family has no head_dim 16
    call = problem(**CONTIGUOUS | {"head_dim": 16})
    assert select(call, H200, offers(call, H200, specs)).head_dim == 16
    call = replace(call, q_strides=(0, 1024, 64))
    chosen = select(call, H200, offers(call, H200, specs))
    assert (chosen.spec, chosen.head_dim) == ("flash_fwd_sm80", 32)


def test_a_group_that_does_not_fill_a_box_is_not_packed():
    for heads, groupings in ((4, {"gqa", "packed"}), (3, {"gqa"})):
        call = problem(**CONTIGUOUS, num_heads_q=heads, num_heads_kv=1)
        assert {v.gqa for v in candidates(call, H200, TMA.variants())} == groupings


def grouped(group, *, seqlen_q, head_dim, mask_type="none", batch=64):
    """Contiguous arrays with 8 kv heads and ``group`` query heads to each."""
    heads = 8 * group
    q_strides, k_strides = (
        (rows * count * head_dim, count * head_dim, head_dim)
        for rows, count in ((seqlen_q, heads), (1024, 8))
    )
    return problem(
        batch=batch,
        seqlen_q=seqlen_q,
        num_heads_q=heads,
        num_heads_kv=8,
        head_dim=head_dim,
        mask_type=mask_type,
        diagonal_offset=1024 - seqlen_q if mask_type == "causal" else 0,
        window_right=0 if mask_type == "causal" else UNBOUNDED,
        q_strides=q_strides,
        k_strides=k_strides,
        v_strides=k_strides,
        out_strides=q_strides,
    )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask_type", ["none", "causal"])
def test_packed_groups_of_three_and_six_have_a_hopper_kernel_of_their_own(head_dim, mask_type):
    """They do not divide the 64 rows that a copy of the output writes; 2, 8 and 64 do."""
    specs = forward_specs()
    for group, seqlen_q, packed in ((3, 1, {"odd"}), (6, 1, {"odd"}), (8, 24, {"", "odd", "m128", "m64"})):
        call = grouped(group, seqlen_q=seqlen_q, head_dim=head_dim, mask_type=mask_type)
        offered = offers(call, H200, specs)
        suited = candidates(call, H200, offered)
        assert {v.spec for v in suited} == {"flash_fwd_sm90"}
        assert {v.tile_name for v in suited if v.gqa == "packed"} - {"n80"} == packed
        # Rows of a single head would leave more of each tile empty.
        chosen = select(call, H200, offered)
        assert (chosen.gqa, chosen.tile_name) == ("packed", "" if "" in packed else "odd")
        assert chosen.tile_value("q_stages") == (2 if "" in packed else 1)
    # A query on its own for each multiprocessor: nothing is gained by packing three.
    lone = grouped(3, seqlen_q=1, head_dim=head_dim, mask_type=mask_type, batch=1)
    assert select(lone, H200, offers(lone, H200, specs)).gqa == "gqa"


def test_a_group_without_a_packed_tile_is_served_all_the_same():
    call = grouped(5, seqlen_q=1, head_dim=64)  # 5 divides no number of rows that a tile has
    suited = candidates(call, H200, offers(call, H200, forward_specs()))
    assert {(v.spec, v.gqa) for v in suited} == {("flash_fwd_sm90", "gqa")}


def test_without_another_family_the_error_says_what_tensor_maps_need():
    call = problem(**CONTIGUOUS | {"q_strides": (1024 * 1024, -1024, 64)})
    with pytest.raises(SpecError, match=r"flash_fwd_hdim64_fp16_tma.*positive multiples of 16 bytes"):
        select(call, H200, TMA.variants())


SPECS = load_specs()
ALGORITHMS = {
    "naive": "flash_fwd_naive",
    "v1": "flash_fwd_v1",
    "v2": "flash_fwd_sm80",
    "v3": "flash_fwd_sm90",
}


def served_by_all(**changes):
    return problem(**CONTIGUOUS | {"head_dim": 64, "head_dim_v": 64, "mask_type": "causal"} | changes)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_offered_to_who_asks_for_it_alone(name):
    call = served_by_all()
    asked = offers(call, H200, SPECS, name)
    assert {variant.spec for variant in asked} == {ALGORITHMS[name]}
    assert select(call, H200, asked).spec == ALGORITHMS[name]
    taken = {variant.spec for variant in offers(call, H200, SPECS)}
    assert (ALGORITHMS[name] in taken) == (name in ("v2", "v3"))


def test_no_two_families_share_an_algorithm():
    named = [spec for spec in SPECS if spec.algorithm and spec.operator == "attention"]
    assert {spec.algorithm: spec.name for spec in named} == ALGORITHMS
    assert len(named) == len(ALGORITHMS)
    assert {spec.algorithm for spec in SPECS if spec.on_request} == {"naive", "v1"}


def test_a_smaller_head_dim_takes_the_kernel_that_holds_it():
    for name in ("naive", "v1"):
        for widths, held in (((40, 8), 64), ((64, 72), 128), ((72, 64), 128)):
            call = served_by_all(head_dim=widths[0], head_dim_v=widths[1])
            assert select(call, GEFORCE, offers(call, GEFORCE, SPECS, name)).head_dim == held


@pytest.mark.parametrize("name", ["v4", "V1", "", "none", 1, ("v1",)])
def test_an_unknown_algorithm_is_told_which_there_are(name):
    with pytest.raises(BadParam, match=r"algorithm is .*'naive', 'v1', 'v2', 'v3', or None") as caught:
        offers(served_by_all(), H200, SPECS, name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        ("naive", {"dtype": "fp32"}, "dtype fp32"),
        ("naive", {"num_heads_q": 32}, "gqa gqa or packed"),
        ("v1", {"mask_type": "local", "window_left": 3, "window_right": 0}, "mask_type local"),
        ("v1", {"mask_type": "dense", "mask_strides": (0, 0, 1)}, "mask_type dense"),
        ("v1", {"head_dim": 136, "head_dim_v": 64}, "head_dim 136"),
        ("naive", {"head_dim_v": 192}, "head_dim_v 192"),
        ("v3", {"dtype": "fp32"}, "dtype fp32"),
    ],
)
def test_what_an_algorithm_does_not_serve_is_an_error_that_says_what_it_does(name, changes, found):
    with pytest.raises(BadParam) as caught:
        offers(served_by_all(**changes), H200, SPECS, name)
    message = str(caught.value)
    served = {spec.algorithm: spec for spec in SPECS}[name]
    assert f"algorithm is {name!r}" in message
    assert found in message
    assert served.path.name in message
    for axis, values in served.axes.items():
        assert f"{axis} {' '.join(map(str, values))}" in message


def test_an_algorithm_of_another_gpu_is_no_question_of_the_call():
    call = served_by_all()
    with pytest.raises(DeviceTypeNotSupported, match=r"GeForce .*sm_90a"):
        select(call, GEFORCE, offers(call, GEFORCE, SPECS, "v3"))


def test_a_family_of_the_users_own_may_have_an_algorithm(tmp_path):
    text = Path(load_specs()[0].path).with_name("flash_fwd_v1.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(
        text.replace("family: flash_v1", "family: mine").replace("algorithm: v1", "algorithm: mine")
    )
    specs = [*SPECS, load_spec(path)]
    call = served_by_all()
    assert {variant.family for variant in offers(call, H200, specs, "mine")} == {"mine"}
    path.write_text(text.replace("family: flash_v1", "family: mine").replace("algorithm: v1\n", ""))
    nameless = load_spec(path)
    assert nameless.algorithm == ""
    with pytest.raises(BadParam):
        offers(call, H200, [*SPECS, nameless], "")


FEW_ROWS = """\
extends: flash_fwd_sm80
axes:
  head_dim: [72]
tiles:
  - {head_dim: 72, block_m: 64, block_n: 32, warps: 4, loop: stages, min_blocks: 2}
dispatch: {prefer: least_time, rows_at_most: 64}
"""


def test_a_head_dim_that_is_there_for_few_rows_alone_is_passed_over_for_more(tmp_path):
    path = tmp_path / "few_rows.yaml"
    path.write_text(FEW_ROWS)
    specs = [*SPECS, load_spec(path)]
    for seqlen_q, head_dim in ((64, 72), (65, 80)):
        call = problem(head_dim=72, seqlen_q=seqlen_q, **CONTIGUOUS)
        assert select(call, GEFORCE, offers(call, GEFORCE, specs)).head_dim == head_dim


shipped_problems = st.builds(
    lambda group, num_heads_kv, **fields: problem(
        num_heads_q=group * num_heads_kv, num_heads_kv=num_heads_kv, **CONTIGUOUS, **fields
    ),
    batch=st.integers(1, 64),
    seqlen_q=st.integers(1, 200),
    seqlen_kv=st.sampled_from([64, 1000, 4096, 16_384]),
    num_heads_kv=st.integers(1, 16),
    group=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([64, 128]),
    dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
    mask_type=st.sampled_from(["none", "causal"]),
)


def for_few_rows(variant):
    return (variant.family, variant.step) == ("flash", "decode") or variant.family == "flash_decode"


@settings(max_examples=40)
@given(shipped_problems, st.sampled_from([H200, GEFORCE]))
def test_a_family_for_few_rows_changes_no_other_choice(call, device):
    of_any_rows = [spec for spec in load_specs() if spec.family in ("flash_fwd", "flash_split")]
    before = select(call, device, offers(call, device, of_any_rows))
    chosen = select(call, device, offers(call, device, load_specs()))
    if call.seqlen_q * call.group_size > 64 or call.dtype == "fp32":
        assert chosen == before
    else:
        assert chosen == before or for_few_rows(chosen)


# Batch, keys, query heads, kv heads, head dim.
DECODING = [
    (1, 4096, 32, 8, 128),
    (1, 131_072, 32, 8, 128),
    (8, 8192, 32, 8, 128),
    (64, 8192, 32, 8, 128),
    (128, 2048, 64, 8, 128),
    (16, 16_384, 16, 2, 64),
    (1, 16_384, 16, 16, 256),
]


@pytest.mark.parametrize("device", [H200, GEFORCE], ids=lambda device: device.name)
@pytest.mark.parametrize("shape", DECODING, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("seqlen_q", [1, 2, 4])
def test_few_queries_on_many_keys_share_them_out(seqlen_q, shape, device):
    batch, seqlen_kv, heads_q, heads_kv, head_dim = shape
    call = problem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        mask_type="none" if seqlen_q == 1 else "causal",
        diagonal_offset=0 if seqlen_q == 1 else seqlen_kv - seqlen_q,
        **CONTIGUOUS,
    )
    chosen = select(call, device, offers(call, device, load_specs()))
    assert for_few_rows(chosen)
    assert chosen.family == "flash" or device is H200
    assert chosen.tile_value("block_m") == (16 if seqlen_q * call.group_size <= 16 else 32)


SOFTCAP = load_scores(keywords=()).by_name["softcap"]


def capped(**changes):
    made = problem(**changes)
    return dataclasses.replace(made, score=SOFTCAP, score_scalars=(30.0,))


def test_a_modification_is_no_matter_of_choice():
    """The same tile as without, modified."""
    for changes in ({}, {"mask_type": "causal"}, {"num_heads_kv": 2, "seqlen_q": 1}, {"dtype": "fp32"}):
        plain, modified = problem(**changes), capped(**changes)
        chosen = select(modified, H200, offers(modified, H200, load_specs()))
        assert chosen == select(plain, H200, offers(plain, H200, load_specs())).modified(SOFTCAP)
        assert chosen.score is SOFTCAP


def test_only_families_with_a_seam_take_a_modification():
    with_seam, without = variant(score_seam=True), variant()
    modified = with_seam.modified(SOFTCAP)
    assert candidates(capped(), H200, [with_seam, modified]) == (modified,)
    assert candidates(problem(), H200, [with_seam, modified]) == (with_seam,)
    assert without.modified(SOFTCAP) is without
    with pytest.raises(SpecError, match="score softcap"):
        select(capped(), H200, [without])


def test_the_seam_of_a_call_may_be_in_any_of_its_steps():
    before = variant(score_seam=True, step="scores", is_main=False)
    main = variant(step="softmax", before=(before,))
    modified = main.modified(SOFTCAP)
    assert [step.score for step in modified.steps] == [SOFTCAP, None]
    assert candidates(capped(), H200, [main, modified]) == (modified,)
    assert candidates(problem(), H200, [main, modified]) == (main,)


@pytest.mark.parametrize(
    ("sequences", "mean", "longest", "heads", "head_dim", "causal", "tile"),
    [
        (200, 700, 23_800, 8, 128, False, ""),
        (200, 700, 700, 8, 128, False, ""),
        (200, 100, 3_400, 16, 64, False, ""),
        (200, 200, 6_800, 16, 64, True, ""),
        (200, 200, 200, 16, 64, False, "m128"),  # two tiles each, of either kind
        (200, 200, 210, 16, 64, False, "m128"),
        (200, 200, None, 16, 64, False, ""),  # as those whose lengths differ
    ],
)
def test_packed_sequences_are_taken_for_unequal_unless_the_longest_says_no(
    sequences, mean, longest, heads, head_dim, causal, tile
):
    """Where tiles of a sequence are counted whole, the largest loses 10 to 50 % (docs/tuning.md)."""
    q = view_of_shape((sequences * mean, heads, head_dim), "bf16", 0)
    cu_seqlens = view_of_shape((sequences + 1,), "int32", 0)
    bounds = {} if longest is None else {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    made = varlen(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, causal=causal, **bounds)
    assert select(made, H200, offers(made, H200, SPECS)).tile_name == tile


SPLITS = st.one_of(st.integers(1, 9), st.sampled_from([SplitEvery(256), SplitEvery(1024)]))


def chosen(made, num_sms, **sizes):
    gpu = replace(H200, num_sms=num_sms, **sizes)
    return select(made, gpu, offers(made, gpu, SPECS))


def of_lengths(batch, tokens, seqlen_q, heads_q, window, splits):
    """Packed sequences of at most seqlen_q queries and ``tokens`` keys."""
    q, kv = (view_of_shape((tokens, heads, 64), "bf16", 0) for heads in (heads_q, 2))
    cu_seqlens = view_of_shape((batch + 1,), "int32", 0)
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": seqlen_q}
    return varlen(q, kv, kv, **lengths, window_size=window, splits=splits)


@settings(max_examples=40)
@given(
    st.sampled_from([1, 3, 20, 900]),
    st.sampled_from([2, 8]),
    st.sampled_from([(-1, -1), (-1, 0), (100, 0)]),
    SPLITS,
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 90_000), st.integers(1, 150)), min_size=2),
)
def test_where_the_call_fixes_its_splits_neither_batch_nor_gpu_nor_lengths_choose_the_kernel(
    seqlen_q, heads_q, window, splits, batches
):
    assume(splits in (1, SplitEvery(256), SplitEvery(1024)) or seqlen_q * heads_q // 2 <= 64)
    rectangles, packed = set(), set()
    for batch, tokens, num_sms in batches:
        made = problem(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_kv=3000,
            num_heads_q=heads_q,
            num_heads_kv=2,
            splits=splits,
            **CONTIGUOUS,
        )
        rectangles.add(chosen(made, num_sms))
        packed.add(chosen(of_lengths(batch, tokens, seqlen_q, heads_q, window, splits), num_sms))
    assert len(rectangles) == len(packed) == 1
    (of_batch,), (of_sequences,) = rectangles, packed
    if splits != 1:
        assert of_batch.grid.shares == of_sequences.grid.shares == (seqlen_q * heads_q // 2 <= 64)
    assert of_sequences.axis("splits") == ("fixed" if of_sequences.grid.shares else "any")


def test_automatic_splits_take_the_kernels_that_they_took():
    made = of_lengths(4, 5000, 1, 8, (-1, -1), "auto")
    assert chosen(made, 132).axis("splits") == "none"


def test_splits_that_no_kernel_can_make():
    rows = problem(batch=1, seqlen_q=65, seqlen_kv=3000, splits=2, **CONTIGUOUS)
    with pytest.raises(BadParam, match=r"splits is 2, but 65 queries x 1 head are 65 rows .* at most 64"):
        chosen(rows, 132)
    group = dataclasses.replace(rows, seqlen_q=17, num_heads_q=4 * rows.num_heads_kv)
    with pytest.raises(BadParam, match=r"but 17 queries x 4 heads are 68 rows of a kv head; .* at most 64"):
        chosen(group, 132)
    wide = dataclasses.replace(rows, seqlen_q=1, dtype="fp32")
    with pytest.raises(BadParam, match=r"no kernel that splits keys serves .*fp32, .* take fp16 and bf16"):
        chosen(wide, 132)
    assert not chosen(dataclasses.replace(rows, splits=1), 132).grid.shares
    assert not chosen(dataclasses.replace(rows, splits=SplitEvery(100)), 132).grid.shares
    few = dataclasses.replace(rows, seqlen_q=1, splits=SplitEvery(100))
    with pytest.raises(BadParam, match=r"pass a multiple of 128, such as 128"):
        chosen(few, 132)
    for made in (rows, group, wide, few):
        with pytest.raises(BadParam, match=r"^splits is") as by_call:
            chosen(made, 132)
        with pytest.raises(BadParam, match=r"^splits is") as explained:
            explain(made, H200, SPECS)
        assert str(explained.value) == str(by_call.value)


def test_explain_agrees_and_says_what_is_shared():
    for splits in ("auto", 1, 5, SplitEvery(512)):
        # Many short sequences: of fewer, or longer ones, clusters have tiles unless the call says its splits.
        batch, keys = (256, 128) if splits == "auto" else (17, 9000)
        made = problem(batch=batch, seqlen_q=1, seqlen_kv=keys, splits=splits, **CONTIGUOUS)
        found = explain(made, H200, SPECS)
        assert found.variant == chosen(made, H200.num_sms)
        assert f"  {found.shares}" in str(found).splitlines()
        assert found.shares.count == {5: 17 * 16 * 5, SplitEvery(512): 17 * 16 * 18}.get(
            splits, found.shares.count
        )


@pytest.mark.parametrize(
    ("batch", "heads_kv", "keys", "cluster"),
    [
        (1, 1, 4096, 16),
        (1, 4, 4096, 16),
        (1, 8, 1024, 8),
        (1, 8, 8192, 8),
        (1, 8, 131_072, 0),
        (2, 8, 4096, 6),
        (3, 8, 8192, 4),
        (5, 4, 8192, 4),
        (6, 1, 8192, 16),
        (4, 8, 4096, 3),
        (8, 8, 8192, 2),
        (64, 8, 8192, 2),
        (64, 8, 1024, 2),
        (256, 8, 128, 0),
    ],
)
def test_a_cluster_has_the_fewer_thread_blocks_the_more_tiles_there_are(batch, heads_kv, keys, cluster):
    """As measured, mostly on an H200; of many short and of few long tiles, thread blocks have shares."""
    call = problem(
        batch=batch,
        seqlen_q=1,
        seqlen_kv=keys,
        num_heads_q=4 * heads_kv,
        num_heads_kv=heads_kv,
        head_dim=128,
        **CONTIGUOUS,
    )
    taken = chosen(call, 132)
    assert taken.grid.shares if not cluster else taken.grid.shared_tiles and taken.grid.cluster == cluster
    assert launch_of(call, taken, H200, 1).blocks == (batch * heads_kv * cluster or 1)
    assert not chosen(dataclasses.replace(call, splits=2), 132).grid.shared_tiles
    assert not chosen(dataclasses.replace(call, splits=1), 132).grid.shared_tiles


@pytest.mark.parametrize(("batch", "cluster"), [(8, 2), (9, 3), (12, 2)])
def test_no_cluster_is_left_to_a_round_of_its_own(batch, cluster):
    """At head_dim 256 a multiprocessor has room for one thread block: 66 clusters of two run at a time.
    Eight and twelve as measured on an H100, nine on an H200.
    """
    sizes = {"seqlen_q": 1, "seqlen_kv": 4096, "num_heads_q": 32, "num_heads_kv": 8, "head_dim": 256}
    made = problem(batch=batch, **sizes, **CONTIGUOUS)
    assert chosen(made, 132, memory_gbps=3352).grid.cluster == cluster


def test_a_slice_of_a_gpu_has_clusters_of_every_size():
    """Clusters leave multiprocessors idle, but one cluster runs wherever there is room for it."""
    made = problem(
        batch=2, seqlen_q=1, seqlen_kv=4096, num_heads_q=32, num_heads_kv=8, head_dim=128, **CONTIGUOUS
    )
    offered = [v for v in offers(made, H200, SPECS) if v.grid.shared_tiles]
    assert {v.grid.cluster for v in offered} == {2, 3, 4, 6, 8, 16}
    scores = 2 * 8 * 4096 * 16  # tiles, their keys, their rows
    for num_sms, shared in itertools.product(range(1, 133), offered):
        gpu = replace(H200, num_sms=num_sms)
        assert cost(made, gpu, shared) > scores / num_sms / shared.dispatch.efficiency


def test_a_thread_block_alone_reads_at_its_own_rate():
    """Few thread blocks read at `alone_gbps`, whatever memory has. The model counts in keys that a
    multiprocessor reads at its part of memory's rate: the larger that part, the more of them this takes.
    """
    made = problem(
        batch=1, seqlen_q=1, seqlen_kv=65536, num_heads_q=4, num_heads_kv=1, head_dim=128, **CONTIGUOUS
    )
    shared = next(v for v in offers(made, H200, SPECS) if v.grid.shared_tiles and v.grid.cluster == 8)
    base = cost(made, H200, shared)
    for factor in (0.5, 2):
        faster = replace(H200, memory_gbps=H200.memory_gbps * factor)
        assert cost(made, faster, shared) == pytest.approx(base * factor)
        larger = replace(H200, num_sms=int(H200.num_sms * factor))
        assert cost(made, larger, shared) == pytest.approx(base / factor)


@pytest.mark.parametrize(("gbps", "clusters"), [(3352, True), (4917, False)])
def test_thread_blocks_too_few_for_faster_memory_make_way_for_equal_shares(gbps, clusters):
    """64 thread blocks draw what an H100's memory has, and less than an H200's."""
    sizes = {"batch": 1, "seqlen_q": 1, "seqlen_kv": 131072, "num_heads_q": 32, "num_heads_kv": 8}
    made = problem(**sizes, head_dim=128, **CONTIGUOUS)
    assert chosen(made, 132, memory_gbps=gbps).grid.shared_tiles is clusters


def test_a_long_sequence_among_short_ones_has_a_larger_cluster():
    """Where lengths are on the device, one sequence may have nearly all keys."""
    q, kv = (view_of_shape(shape, "bf16", 0) for shape in ((16, 1, 32, 128), (16, 4096, 8, 128)))
    lengths = view_of_shape((16,), "int32", 0)
    sizes = {
        "batch": 16,
        "seqlen_q": 1,
        "seqlen_kv": 4096,
        "num_heads_q": 32,
        "num_heads_kv": 8,
        "head_dim": 128,
    }
    assert chosen(problem(**sizes, **CONTIGUOUS), 132).grid.cluster == 2
    assert chosen(varlen(q, kv, kv, kv_lengths=lengths), 132).grid.cluster == 6


@pytest.mark.parametrize(
    ("dtype", "keys", "streams"), [("f2", 1024, True), ("f2", 1028, False), ("f4", 1028, True)]
)
def test_rows_of_a_bias_that_begin_at_16_bytes_are_streamed(dtype, keys, streams):
    shapes = (2, 1024, 4, 64), (2, keys, 4, 64), (2, keys, 4, 64)
    bias = np.zeros((4, 1024, keys), dtype)
    taken = flashgen.explain(*shapes, arch="sm_90", score="bias", params={"bias": bias}).variant
    assert taken.streams is streams
    assert taken.staged is not None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "keys"), [("f2", 128), ("f4", 64)])
def test_a_bias_of_head_dim_64_has_two_buffers(dtype, keys, causal):
    bias = np.zeros((1, 2048, 2048), dtype)
    taken = flashgen.explain(
        *((8, 2048, 16, 64),) * 3, arch="sm_90", causal=causal, score="bias", params={"bias": bias}
    ).variant
    assert taken.tile_value("block_n") == keys
    assert taken.tile_value("element_stages") == 2
