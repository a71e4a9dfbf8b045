import gc
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_gpu import H200, Binding
from flashgen.call.backends import prepare
from flashgen.errors import BadTensorShape, NoBindingError, SpecError
from flashgen.families.load import load_spec, load_specs
from flashgen.families.params import Param, vector_width
from flashgen.operators.blocklists import BlockLists
from flashgen.runtime import launch, tensormap
from flashgen.schedule.grid import heads, launch_of, rows, tiles
from flashgen.schedule.parameters import filled, pack, parameters
from flashgen.schedule.plan import choices, plan_steps
from flashgen.schedule.tensormap import BYTES
from flashgen.schedule.workspace import workspace_of
from flashgen.simulator.example import Shape, make
from flashgen.simulator.hardware import pretend_for
from flashgen.source.params import layout
from problems import NAMES, problem, replace

PROBLEM = problem(
    batch=2,
    seqlen_q=1000,
    seqlen_kv=3000,
    num_heads_q=16,
    num_heads_kv=4,
    head_dim=40,
    mask_type="dense",
    q_strides=(2**33, -640, 40),
    k_strides=(480000, 160, 40),
    v_strides=(480000, 160, 0),
    out_strides=(640000, 640, 40),
    mask_strides=(0, 0, 3000),
    return_lse=True,
)
SHIPPED = [
    variant
    for spec in load_specs()
    if spec.family == "flash_fwd"
    for variant in spec.variants()
    if variant.is_main
]
DENSE_PACKED = next(v for v in SHIPPED if (v.mask_type, v.gqa, v.dtype) == ("dense", "packed", "fp16"))


def unpacked(variant, template):
    return np.frombuffer(template, layout(variant.params).dtype)[0]


@pytest.mark.parametrize("spec", sorted({variant.spec for variant in SHIPPED}))
def test_the_struct_of_every_shipped_variant_holds_the_problem(spec):
    wrong = {}
    for variant in (variant for variant in SHIPPED if variant.spec == spec):
        try:
            check_struct(variant)
        except AssertionError as error:
            wrong[variant.name] = error
    assert not wrong


def check_struct(variant):
    # A tensor map has no negative strides.
    mappable = {"q_strides": (2**33, 640, 40), "v_strides": (480000, 160, 40)}
    call = replace(PROBLEM, **mappable) if variant.target == "sm90" else PROBLEM
    if variant.mask_type == "blocks":
        call = replace(call, block_lists=BlockLists(128, 128, 1, 1, 99))
    made = pack(call, variant, H200, workspace_of(call, variant))
    members = unpacked(variant, made.template)
    expected = {"q_batch_stride": 2**33, "q_row_stride": -640, "v_head_stride": 0, "out_row_stride": 640}
    expected |= {"seqlen_kv": 3000}
    assert {"seqlen_kv", "scale_log2"} <= set(members.dtype.names)
    assert all(members[name] == value for name, value in expected.items() if name in members.dtype.names)
    table = layout(variant.params)
    mapped = {param.name for param in variant.params if param.ctype == "tensor_map"}
    # A map knows the strides of its array; a pointer does not.
    assert ("out_row_stride" in members.dtype.names) == ("out" not in mapped)
    named = {NAMES[source]: offset for offset, source, _ in made.pointers if source < len(NAMES)}
    assert named == {name: table.offsets[name] for name in NAMES if name in table.offsets.keys() - mapped}
    assert {"q", "k", "v", "out", "lse"} <= named.keys() | mapped
    assert ("mask" in named) == (variant.mask_type == "dense") == bool(made.widths)


def test_a_parameter_that_nobody_can_give_is_an_error_of_the_spec():
    variant = replace(DENSE_PACKED, params=(Param("q", "const element*"), Param("softcap", "float")))
    with pytest.raises(SpecError, match=rf"{variant.spec}.*softcap.*knows.*softmax_scale"):
        pack(PROBLEM, variant, H200)


def test_a_value_that_does_not_fit_its_parameter_is_an_error_of_the_spec():
    variant = replace(DENSE_PACKED, params=(Param("q_batch_stride", "int32_t"),))
    with pytest.raises(SpecError, match="does not hold its value"):
        pack(PROBLEM, variant, H200)


@given(
    st.sampled_from(SHIPPED),
    st.integers(1, 9),
    st.integers(0, 70000),
    st.integers(1, 8),
    st.sampled_from([1, 4]),
)
def test_tiles_are_row_blocks_times_heads(variant, batch, seqlen_q, kv_heads, group):
    group = 1 if variant.gqa == "mha" else group
    heads_q = kv_heads * group
    call = replace(PROBLEM, batch=batch, seqlen_q=seqlen_q, num_heads_kv=kv_heads, num_heads_q=heads_q)
    values = parameters(call, variant, H200)
    assert (
        values["num_tiles"] == values["num_row_blocks"] * heads(call, variant) * batch == tiles(call, variant)
    )
    assert values["num_row_blocks"] == -(-rows(call, variant) // variant.tile_value("block_m"))


def test_an_empty_batch_has_parameters_too():
    assert parameters(replace(PROBLEM, batch=0), DENSE_PACKED, H200)["num_tiles"] == 0


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1))
def test_vector_width_is_the_widest_that_divides(numbers):
    width = vector_width(*numbers)
    assert all(number % width == 0 for number in numbers)
    assert width == max(w for w in (1, 4, 8, 16) if all(number % w == 0 for number in numbers))


def test_a_grid_that_is_too_large():
    call = replace(PROBLEM, batch=1 << 20, seqlen_q=1 << 30)
    with pytest.raises(BadTensorShape, match="split the batch"):
        launch_of(call, DENSE_PACKED, H200)


def launcher(driver):
    device = replace(H200, ordinal=3, l2_bytes=1)
    return launcher_of(PROBLEM, DENSE_PACKED, device, driver)


def launcher_of(problem, variant, device, driver):
    """A runner of one step."""
    return launch.Runner(plan_steps(problem, variant, device), device, [driver.load(variant, device)])


def run(launcher, pointers, stream=0):
    launcher.at(pointers, PROBLEM)((None,) * 6, stream)


def test_a_launch(driver):
    run(launcher(driver), (16, 32, 48, 4096 + 8, 64, 80), 5)
    function, shape, stream, *_, context = driver.launches[0]
    assert (function, stream, context) == (77, 5, 1003)
    assert shape == (
        (tiles(PROBLEM, DENSE_PACKED), 1, 1),
        (DENSE_PACKED.threads, 1, 1),
        DENSE_PACKED.smem_bytes,
    )
    members = driver.members()
    assert [int(members[name]) for name in ("q", "k", "v", "mask", "out", "lse")] == [
        16,
        32,
        48,
        4104,
        64,
        80,
    ]
    assert members["mask_vector_width"] == 8
    assert members["seqlen_q"] == 1000
    assert driver.get_device() == 0


def test_threads_do_not_see_each_others_pointers(driver):
    """Each of them with work of its own, then all with the same one."""
    driver.delay = 0.002
    made = launcher(driver)

    def addresses(n):
        return tuple(16 * (6 * n + i + 1) for i in range(6))

    shared = made.at(addresses(99), PROBLEM)

    def thread(n):
        for _ in range(5):
            run(made, addresses(n), n)
            shared((None,) * 6, 99)

    threads = [threading.Thread(target=thread, args=(n,)) for n in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(driver.launches) == 80
    for _, _, stream, before, after, context in driver.launches:
        assert before == after
        assert context == 1003
        members = unpacked(DENSE_PACKED, before)
        given = [int(members[name]) for name in ("q", "k", "v", "mask", "out", "lse")]
        assert given == list(addresses(stream))


def test_work_outlives_its_launcher(driver):
    work = launcher(driver).at((16, 32, 48, 64, 80, 96), PROBLEM)
    gc.collect()
    scribble = [launcher(driver).at((0,) * 6, PROBLEM) for _ in range(100)]
    work((None,) * 6, 0)
    assert [int(driver.members()[name]) for name in ("q", "lse")] == [16, 96]
    assert scribble


def test_a_failed_launch_is_not_swallowed(driver):
    made = launcher(driver)

    def fail(*arguments):
        raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")

    made._launchers[0]._launch = fail
    with pytest.raises(RuntimeError, match="LAUNCH_FAILED"):
        run(made, (16,) * 6)


TMA = load_spec(Path(__file__).parents[1] / "fixtures" / "tma" / "specs" / "copy_tma.yaml")
MAPPED = replace(PROBLEM, mask_type="none", mask_strides=None, q_strides=(640000, 640, 40))


def tma_variant(gqa="gqa", **changes):
    return replace(TMA.select(head_dim=64, dtype="fp16", mask_type="none", gqa=gqa)[0], **changes)


def test_a_persistent_grid_is_no_larger_than_what_runs_at_a_time():
    variant = tma_variant()
    assert dict(variant.tile)["min_blocks"] == 2
    assert tiles(MAPPED, variant) == 256
    for num_sms, blocks in ((132, 256), (100, 200), (1, 2)):
        assert launch_of(MAPPED, variant, replace(H200, num_sms=num_sms)).blocks == blocks
    one = replace(variant, grid=replace(variant.grid, blocks_per_sm=1))
    assert launch_of(MAPPED, one, H200).blocks == 132
    assert (
        launch_of(MAPPED, replace(one, grid=replace(one.grid, schedule="tile_per_block")), H200).blocks == 256
    )
    assert parameters(MAPPED, variant, replace(H200, num_sms=1))["num_tiles"] == 256
    assert launch_of(replace(MAPPED, batch=0), variant, H200).blocks == 0


@pytest.fixture
def binding(monkeypatch):
    fake = Binding()
    monkeypatch.setattr(tensormap, "binding", lambda: fake)
    return fake


def test_tensor_maps_are_encoded_once_and_then_moved(driver, binding):
    variant = tma_variant()
    made = launcher_of(MAPPED, variant, H200, driver)
    first, other, third = (16, 32, 48, 0, 64, 80), (16, 96, 48, 0, 112, 80), (1 << 50, 32, 48, 0, 64, 80)
    for pointers in (first, other, third, first):
        run(made, pointers)
        members = driver.members()
        found = [np.frombuffer(members[name].tobytes(), "<u8")[0] for name in ("q", "k")]
        assert [*found, members["out"]] == [pointers[0], pointers[1], pointers[4]]
    # Type, rank and address; k is not packed, q would be.
    fp16 = 6
    assert [call[:4] for call in binding.calls] == [
        (fp16, 4, 16, [40, 1000, 16, 2]),
        (fp16, 4, 32, [40, 3000, 4, 2]),
    ]
    assert [call[5] for call in binding.calls] == [[64, 128, 1, 1], [16, 64, 1, 1]]
    assert binding.moves == [16, 96, 1 << 50, 32, 16, 32]


def test_a_struct_copied_while_another_thread_encodes_is_encoded_itself(driver, binding):
    variant = tma_variant()
    made = launcher_of(MAPPED, variant, H200, driver)
    (launcher,) = made._launchers
    copy = launcher._copy

    def interrupted(*arguments):
        copy(*arguments)
        launcher._copy = copy
        made.at((32,) * 6, PROBLEM)  # as a thread would that comes in between

    launcher._copy = interrupted
    run(made, (16,) * 6)
    assert np.frombuffer(driver.members()["q"].tobytes(), "<u8")[0] == 16
    assert not binding.moves


def test_packed_rows_have_a_map_of_their_own(driver, binding):
    variant = tma_variant("packed")
    run(launcher_of(MAPPED, variant, H200, driver), (16,) * 6)
    assert binding.calls[0][3] == [40, 4, 1000, 4, 2]


def test_tensor_maps_are_made_where_the_device_is_current(driver, binding):
    """The driver may refuse in a thread that has not used the device."""
    variant, seen = tma_variant(), []
    for name, function in list(binding.items()):
        binding[name] = lambda *a, call=function: seen.append(driver.context()) or call(*a)
    made = launcher_of(MAPPED, variant, replace(H200, ordinal=3), driver)
    for address in (16, 32):
        run(made, (address,) * 6)
    assert seen == [1003] * 4
    assert driver.get_device() == 0


def test_every_struct_is_aligned_as_its_members_need(driver, binding):
    """Wherever memory is to be had; the driver of the tests looks at each address."""
    for variant in (DENSE_PACKED, tma_variant()):
        problem = MAPPED if variant.grid.persistent else PROBLEM
        made = launcher_of(problem, variant, H200, driver)
        works = [made.at((16 * n,) * 6, PROBLEM) for n in range(1, 200)]
        for n, work in enumerate(works, 1):
            work((None,) * 6, 0)
            assert driver.members()["out"] == 16 * n


def test_a_map_that_cannot_be_is_no_launch(driver, binding):
    variant = tma_variant()
    with pytest.raises(SpecError, match=r"tensor map of k.*strides that are positive"):
        launcher_of(replace(MAPPED, k_strides=(0, 160, 40)), variant, H200, driver)


def test_a_missing_binding_is_noticed_before_compiling(monkeypatch):
    from flashgen.runtime import kernel

    monkeypatch.setattr(kernel, "load_all", lambda *_: pytest.fail("compiled"))

    def absent():
        raise NoBindingError("no driver")

    monkeypatch.setattr(tensormap, "binding", absent)
    with pytest.raises(NoBindingError):
        prepare(choices(MAPPED, H200, (tma_variant(),)), H200)


@pytest.mark.parametrize("spec", load_specs(), ids=lambda spec: spec.name)
def test_a_launch_fills_a_struct_in_as_the_simulator_does(spec, driver, binding):
    """All but tensor maps, which each encodes by itself."""
    rng = random.Random(spec.name)
    # Sums by distance are of a score with such an array.
    mains = [v for v in spec.variants() if v.is_main and dict(v.axes).get("sums") != "diagonals"]
    for variant in rng.sample(mains, min(6, len(mains))):
        few = (
            {"seqlen_q": rng.randint(1, 4), "heads": 2, "kv_heads": 2}
            if variant.dispatch.rows_at_most
            else {}
        )
        if spec.operator == "latent_attention" and variant.grid.cluster > 1:
            few["heads"] = 64 * variant.grid.cluster  # each thread block has 64 of them
        shape = Shape(seqlen_kv=rng.randint(1, 600), batch=rng.randint(1, 3), **few)
        problem = make(variant, shape, rng.randrange(100)).problem
        gpu = pretend_for(variant)
        planned = plan_steps(problem, variant, gpu)
        kernels = [driver.load(step.variant, gpu) for step in planned.steps]
        made = launch.Runner(planned, gpu, kernels)
        arguments, names = problem.operator.arguments, problem.operator.scalars
        for _ in range(3):
            called = problem.with_scalars(
                tuple(rng.uniform(0.01, 2) if name == "softmax_scale" else None for name in names)
            )
            alignments = (*(argument.alignment for argument in arguments), 256)
            pointers = tuple(alignment * rng.randrange(1, 1 << 40) for alignment in alignments)
            driver.launches.clear()
            made.at(pointers, called)((None,) * len(arguments), 0)
            for step, launched in zip(planned.steps, driver.launches, strict=True):
                found = bytearray(launched[3])
                for offset, source, map in step.struct.maps:
                    begin = pointers[source] + map.distance
                    assert int.from_bytes(found[offset : offset + 8], "little") == begin
                    found[offset : offset + BYTES] = bytes(BYTES)
                assert found == filled(step.struct, pointers, called.scalar_values())
