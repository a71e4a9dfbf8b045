import ctypes
import gc
import shutil
import subprocess
import threading
import weakref
from pathlib import Path

import pytest

from fake_gpu import H200, Binding
from flashgen.errors import BadParam
from flashgen.families.load import load_specs
from flashgen.runtime import dependent, launch, tensormap
from flashgen.runtime.dependent import LaunchAttribute, LaunchConfig
from flashgen.schedule.grid import launch_of
from flashgen.schedule.plan import plan_steps
from problems import problem, replace

PROBLEM = problem(
    batch=2,
    seqlen_q=100,
    seqlen_kv=300,
    num_heads_q=4,
    num_heads_kv=4,
    head_dim=64,
    q_strides=(25600, 256, 64),
    k_strides=(76800, 256, 64),
    v_strides=(76800, 256, 64),
    out_strides=(25600, 256, 64),
)
POINTERS = (16, 32, 48, 0, 64, 0)
SHIPPED = {variant.name: variant for spec in load_specs() for variant in spec.variants()}
SM90 = SHIPPED["flash_fwd_hdim64_fp16_sm90"]
SM80 = SHIPPED["flash_fwd_hdim64_fp16_m64_sm80"]
CUDA = ("/usr/local/cuda/include", "/usr/include", "/usr/include/cuda")


@pytest.fixture
def binding(monkeypatch):
    monkeypatch.setattr(tensormap, "binding", Binding)


@pytest.fixture
def make(driver, binding, monkeypatch):
    """``make(variant, switch, device)`` is a runner of one step for PROBLEM."""

    def launcher(variant=SM90, switch=None, device=H200):
        if switch is None:
            monkeypatch.delenv(dependent.SWITCH, raising=False)
        else:
            monkeypatch.setenv(dependent.SWITCH, switch)
        planned = plan_steps(PROBLEM, variant, device)
        return launch.Runner(planned, device, [driver.load(variant, device)])

    return launcher


def run(launcher, stream=0, pointers=POINTERS):
    launcher.at(pointers, PROBLEM)((None,) * 6, stream)


def test_the_structs_are_those_of_cuda_h():
    """Compiled, where the header is; no CUDA of 64 bits has had other ones."""
    fields = {
        "CUlaunchConfig": (
            LaunchConfig,
            {
                "grid": "gridDimX",
                "block": "blockDimX",
                "shared_bytes": "sharedMemBytes",
                "stream": "hStream",
                "attributes": "attrs",
                "num_attributes": "numAttrs",
            },
        ),
        "CUlaunchAttribute": (LaunchAttribute, {"id": "id", "value": "value"}),
    }
    assert (ctypes.sizeof(LaunchConfig), ctypes.sizeof(LaunchAttribute)) == (56, 72)
    header = next((folder for folder in include_folders() if (folder / "cuda.h").is_file()), None)
    compiler = shutil.which("cc")
    if header is None or compiler is None:
        pytest.skip("there is no cuda.h, or no C compiler")
    wanted = ["CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == 6"]
    for name, (struct, members) in fields.items():
        wanted.append(f"sizeof({name}) == {ctypes.sizeof(struct)}")
        for ours, theirs in members.items():
            wanted.append(f"offsetof({name}, {theirs}) == {getattr(struct, ours).offset}")
    lines = ["#include <cuda.h>", "#include <stddef.h>", *(f'_Static_assert({x}, "{x}");' for x in wanted)]
    command = [compiler, f"-I{header}", "-fsyntax-only", "-x", "c", "-"]
    done = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def include_folders():
    yield from map(Path, CUDA)
    try:
        import nvidia
    except ImportError:
        return
    for folder in nvidia.__path__:
        yield from Path(folder).glob("*/include")


@pytest.mark.parametrize(
    ("says", "version", "switch", "expected"),
    [
        (True, 12030, None, True),
        (True, 12030, "", True),
        (True, 13000, "1", True),
        (True, 12020, None, False),
        (True, 12020, "1", False),
        (True, 13000, "0", False),
        (False, 13000, "1", False),
    ],
)
def test_who_is_launched_dependently(says, version, switch, expected, make, driver):
    driver.version = version
    run(make(replace(SM90, dependent_launch=says), switch))
    assert driver.dependent == ([{6: 1}] if expected else [])
    assert len(driver.launches) == 1


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("sm_80", False),
        ("sm_86", False),
        ("sm_89", False),
        ("sm_90", True),
        ("sm_100", True),
        ("sm_120", True),
    ],
)
def test_gpus_before_hopper_get_an_ordinary_launch_and_later_ones_a_dependent(arch, expected, make, driver):
    """The same kernel, for which the header then has no instruction to wait with."""
    run(make(SM80, device=replace(H200, arch=arch)))
    assert driver.dependent == ([{6: 1}] if expected else [])
    assert len(driver.launches) == 1


def test_a_switch_that_is_neither_on_nor_off(make):
    with pytest.raises(BadParam, match=r"FLASHGEN_DEPENDENT_LAUNCH is 'off'; expected 0 or 1"):
        make(switch="off")


def test_every_variant_that_waits_says_so(tiny_variants):
    """The key of the spec stands for what the template does."""
    from flashgen.source.render import render

    # Of each template one head dim: 64, or the smallest.
    smallest = {"flash_bwd_wide_sm90.cu.j2": 192, "attention_weights_sm80.cu.j2": 256}
    smallest |= {v.template: 576 for v in SHIPPED.values() if "latent" in v.operator}
    smallest |= {v.template: 256 for v in SHIPPED.values() if v.operator == "score_gradient"}
    variants = [
        v for v in SHIPPED.values() if dict(v.axes).get("head_dim", 64) == smallest.get(v.template, 64)
    ]
    assert {variant.template for variant in variants} == {v.template for v in SHIPPED.values()}
    for variant in (*variants, *tiny_variants):
        assert variant.dependent_launch == ("griddepcontrol_wait();" in render(variant))


def test_a_dependent_launch_is_the_ordinary_one_otherwise(make, driver):
    run(make(switch="0"), 5)
    run(make(), 5)
    (_, *ordinary), (_, *launched) = driver.launches
    assert launched == ordinary
    grid = launch_of(PROBLEM, SM90, H200)
    assert launched[0] == ((grid.blocks, 1, 1), (grid.threads, 1, 1), grid.smem_bytes)
    assert launched[1] == 5


def test_streams_come_and_go_and_threads_share_a_launcher(make, driver, monkeypatch):
    """More streams than a launcher remembers, each thread going through them in another order."""
    config, configs = dependent.config, []

    def watched(*arguments):
        made = config(*arguments)
        configs.append(weakref.ref(made))
        return made

    monkeypatch.setattr(dependent, "config", watched)
    made, streams = make(), [0, *(1 << 40 | n for n in range(2 * dependent.MAX_CONFIGS))]
    work = made.at(POINTERS, PROBLEM)

    def thread(first):
        for at in range(len(streams)):
            work((None,) * 6, streams[(first + 17 * at) % len(streams)])

    threads = [threading.Thread(target=thread, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    gc.collect()
    assert len(configs) > len(streams)
    assert sum(each() is not None for each in configs) <= dependent.MAX_CONFIGS
    thread(0)
    grid = launch_of(PROBLEM, SM90, H200)
    assert sorted(seen[2] for seen in driver.launches) == sorted(5 * streams)
    assert {seen[1] for seen in driver.launches} == {
        ((grid.blocks, 1, 1), (grid.threads, 1, 1), grid.smem_bytes)
    }
    assert driver.dependent == [{6: 1}] * len(driver.launches)


def test_what_the_driver_refuses_is_raised(make, driver, monkeypatch):
    from cupy_backends.cuda.api import driver as cuda

    def check_status(status):
        raise cuda.CUDADriverError(status)

    monkeypatch.setattr(cuda, "check_status", check_status)
    monkeypatch.setattr(cuda, "CUDADriverError", type("Refused", (RuntimeError,), {}))
    made = make()
    run(made)
    driver.status = 719
    with pytest.raises(cuda.CUDADriverError, match="719"):
        run(made)


def test_the_device_becomes_current_for_it(driver, make):
    made = make(device=replace(H200, ordinal=3))
    run(made)
    assert driver.launches[0][5] == 1003
    assert driver.get_device() == 0
    assert driver.dependent


def test_arguments_reach_a_function_in_c_as_pointers(make, monkeypatch, tmp_path):
    """Through ctypes itself: what it hands over without being told the types."""
    callback = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    seen = []

    @callback
    def entry(config, kernel, arguments, extra):
        made = LaunchConfig.from_address(config)
        seen.append((made.stream, made.attributes[0].id, kernel, extra))
        seen.append(ctypes.c_uint64.from_address(arguments).value)
        return 0

    # As CDLL gives functions: of an address, without types of arguments.
    address = ctypes.cast(entry, ctypes.c_void_p).value
    untyped = ctypes.CFUNCTYPE(ctypes.c_int)(address)
    monkeypatch.setattr(dependent, "driver_function", lambda: untyped)
    big = (1 << 47) + 64
    arguments = (ctypes.c_uint64 * 4)(big)
    dependent.bind(big, (7, 1, 1), (384, 1, 1), 1000)(big, arguments, 0)
    assert seen == [(big, 6, big, None), big]
