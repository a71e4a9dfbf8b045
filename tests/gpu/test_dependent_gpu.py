"""Launches that may begin before the one ahead of them has ended give what launches one by one give.

A chain is a number of calls of which each takes the output of the one before as its queries, and writes where
that one's queries were. Keys outweigh each other so clearly that a query which comes too early, in whatever
row, changes every log-sum-exp after it. That this finds a missing wait is a test of its own.
"""

import copy
import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest

import flashgen
from flashgen.call.backends import prepare
from flashgen.families.load import load_specs
from flashgen.host.paths import templates_dir
from flashgen.runtime import dependent, kernel, launch
from flashgen.runtime.device import device
from flashgen.runtime.plans import Plan
from flashgen.schedule.dispatch import offers
from flashgen.schedule.plan import choices, plan_steps

cupy = pytest.importorskip("cupy")

STEPS = 24
# (batch, seqlen_q, seqlen_kv, heads, head_dim), causal: a few blocks that leave most of the GPU to the next
# launch and take long, so that it is there in time; short ones; more tiles than multiprocessors.
SHAPES = [
    ((1, 64, 4096, 4, 64), False),
    ((1, 128, 128, 16, 64), False),
    ((2, 256, 1024, 8, 128), True),
    ((1, 2048, 2048, 16, 128), False),
]
TEMPLATES = ("flash_fwd_sm80.cu.j2", "flash_fwd_sm90.cu.j2")
WAIT = "    griddepcontrol_wait();\n"


@pytest.fixture(autouse=True)
def hopper():
    if device(0).arch != "sm_90" or dependent.driver_version() < dependent.MIN_DRIVER:
        pytest.skip("needs compute capability 9.0 and a driver of CUDA 12.3")


@pytest.fixture(params=TEMPLATES)
def template(request):
    return request.param


@pytest.fixture(params=SHAPES, ids=str)
def chain(request, template):
    return Chain(*request.param, template)


class Chain:
    """Arrays of one shape, and the plan of their calls with the best kernel of one template."""

    def __init__(self, shape, causal, template, seed=0):
        batch, seqlen_q, seqlen_kv, heads, head_dim = shape
        rng = cupy.random.default_rng(seed)

        def normal(seqlen, factor):
            values = rng.standard_normal((batch, seqlen, heads, head_dim), dtype=np.float32)
            return (factor * values).astype(np.float16)

        self.first, self.k, self.v = normal(seqlen_q, 8), normal(seqlen_kv, 1), normal(seqlen_kv, 8)
        self.lse_shape = (STEPS, batch, heads, seqlen_q)
        self.causal, self.template = causal, template
        self.plan = self.planned()
        assert dependent.applies_to(self.plan.variant, device(0))

    def planned(self):
        problem = flashgen.plan(self.first, self.k, self.v, causal=self.causal, return_lse=True).problem
        offered = offers(problem, device(0), load_specs())
        variants = (v for v in offered if v.template == self.template)
        runner = prepare(choices(problem, device(0), variants), device(0))
        return Plan(problem, runner, problem.operator.in_order(q=self.first, k=self.k, v=self.v))

    def start(self):
        """Two buffers to go back and forth between, and room for what each call says of its queries."""
        buffers = self.first.copy(), cupy.full_like(self.first, np.nan)
        lse = cupy.full(self.lse_shape, np.nan, np.float32)
        cupy.cuda.Device().synchronize()
        return (*buffers, lse)

    def queue(self, buffers, stream, call=None, after=None):
        """All the calls, with ``after()`` behind each."""
        here, there, lse = buffers
        for step in range(STEPS):
            (call or self.call)(here, there, lse[step], stream)
            here, there = there, here
            if after is not None:
                after()

    def call(self, q, out, lse, stream):
        self.plan(q, self.k, self.v, out=out, lse=lse, stream=stream)

    def one_by_one(self):
        buffers = self.start()
        self.queue(buffers, cupy.cuda.Stream.null, after=cupy.cuda.Device().synchronize)
        return bits(buffers)


def bits(buffers):
    cupy.cuda.Device().synchronize()
    return [x.view(np.uint16 if x.dtype == np.float16 else np.uint32).get() for x in buffers]


def same(some, others):
    return all(np.array_equal(x, y) for x, y in zip(some, others, strict=True))


@pytest.mark.parametrize("kind", ["null", "non-blocking"])
def test_a_chain_in_a_stream(chain, kind, busy):
    expected = chain.one_by_one()
    stream = cupy.cuda.Stream.null if kind == "null" else cupy.cuda.Stream(non_blocking=True)
    for _ in range(3):
        buffers = chain.start()
        busy(stream)  # so that all of the chain is queued before it begins
        chain.queue(buffers, stream)
        assert same(bits(buffers), expected)


def test_the_switch_changes_no_bit(chain, monkeypatch):
    expected = chain.one_by_one()
    monkeypatch.setenv(dependent.SWITCH, "0")
    ordinary = copy.copy(chain)
    ordinary.plan = chain.planned()
    assert not dependent.applies_to(ordinary.plan.variant, device(0))
    buffers = chain.start()
    ordinary.queue(buffers, cupy.cuda.Stream.null)
    assert same(bits(buffers), expected)


def test_a_chain_in_a_graph(chain):
    expected = chain.one_by_one()
    stream = cupy.cuda.Stream(non_blocking=True)
    buffers = chain.start()
    with stream:
        stream.begin_capture()
        chain.queue(buffers, stream)
        graph = stream.end_capture()
    for _ in range(3):
        for buffer, fresh in zip(buffers, chain.start(), strict=True):
            buffer[...] = fresh
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        assert same(bits(buffers), expected)


def test_chains_in_two_streams(template, busy):
    """Each of them alone, at the same time."""
    chains = [Chain(shape, causal, template, seed) for seed, (shape, causal) in enumerate(SHAPES[:2])]
    expected = [chain.one_by_one() for chain in chains]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in chains]
    for _ in range(3):
        started = [chain.start() for chain in chains]
        for stream in streams:
            busy(stream)
        # In turns, a call of each.
        for step in range(STEPS):
            for chain, (here, there, lse), stream in zip(chains, started, streams, strict=True):
                q, out = (here, there) if step % 2 == 0 else (there, here)
                chain.call(q, out, lse[step], stream)
        for buffers, each in zip(started, expected, strict=True):
            assert same(bits(buffers), each)


def test_a_chain_that_changes_streams(chain, busy):
    """Each call on the other of two streams, which wait for each other by events."""
    expected = chain.one_by_one()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    here, there, lse = buffers = chain.start()
    for stream in streams:
        busy(stream)
    for step in range(STEPS):
        stream, other = streams[step % 2], streams[1 - step % 2]
        chain.call(here, there, lse[step], stream)
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        other.wait_event(event)
        here, there = there, here
    assert same(bits(buffers), expected)


@pytest.mark.parametrize("captured", [False, True])
def test_other_kernels_before_and_behind(chain, captured, busy):
    """One writes the queries just ahead of a call, others read the output and overwrite it, and the queries,
    right behind.
    """
    rng = cupy.random.default_rng(1)
    inputs = (8 * rng.standard_normal((STEPS, *chain.first.shape), dtype=np.float32)).astype(np.float16)
    q, out, _ = chain.start()
    lse = cupy.empty(chain.lse_shape, np.float32)
    assign = cupy.ElementwiseKernel("T x", "T y", "y = x", "assign_elements")
    wipe = cupy.ElementwiseKernel("", "T y", 'y = nanf("")', "wipe_elements")
    results = cupy.empty_like(inputs)

    def round_of(step, stream, after):
        assign(inputs[step], q)
        after()
        chain.call(q, out, lse[step], stream)
        after()
        assign(out, results[step])
        wipe(out)
        wipe(q)
        after()

    device_wide = cupy.cuda.Device().synchronize
    for step in range(STEPS):
        round_of(step, cupy.cuda.Stream.null, device_wide)
    expected = bits((results, lse))
    results[...], lse[...] = 0, 0
    device_wide()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        if captured:
            stream.begin_capture()
        else:
            busy(stream)
        for step in range(STEPS):
            round_of(step, stream, lambda: None)
        if captured:
            stream.end_capture().launch(stream)
        stream.synchronize()
    assert same(bits((results, lse)), expected)


@pytest.mark.parametrize("captured", [False, True])
def test_a_chain_tells_a_missing_wait(captured, template, busy, tmp_path, monkeypatch):
    """The same kernel without the line: launches overlap, and the results are wrong."""
    chain = Chain(*SHAPES[0], template)
    name = "lib/sm90.cuh.j2:dependent_launch"
    main, begin, last = (templates_dir() / name).read_text().partition("//: last\n")
    assert main.count(WAIT) == 1
    (tmp_path / "templates" / "lib").mkdir(parents=True)
    (tmp_path / "templates" / name).write_text(main.replace(WAIT, "") + begin + last)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel, "_kernels", {})
    variant = dataclasses.replace(chain.plan.variant, spec_dir=str(tmp_path / "specs"))
    gpu = device(0)
    made = launch.bind(plan_steps(chain.plan.problem, variant, gpu), gpu)
    k, v = chain.k.data.ptr, chain.v.data.ptr

    def call(q, out, lse, stream):
        made.at((q.data.ptr, k, v, 0, out.data.ptr, lse.data.ptr), chain.plan.problem)(
            (None,) * 6, stream.ptr
        )

    expected = chain.one_by_one()
    buffers = chain.start()
    chain.queue(buffers, cupy.cuda.Stream.null, call, after=cupy.cuda.Device().synchronize)
    assert same(bits(buffers), expected), "one by one it is the same kernel"
    stream = cupy.cuda.Stream(non_blocking=True)
    found = False
    for _ in range(5):
        buffers = chain.start()
        with stream if captured else nullcontext():
            if captured:
                stream.begin_capture()
            else:
                busy(stream)
            chain.queue(buffers, stream, call)
            if captured:
                stream.end_capture().launch(stream)
        found |= not same(bits(buffers), expected)
    assert found, "launches did not overlap, so the other tests of this module show nothing"


def test_what_the_driver_refuses(template):
    """As CuPy's own launches raise it."""
    from cupy_backends.cuda.api import driver

    chain = Chain(*SHAPES[1], template)
    gpu = device(0)
    loaded = kernel.load(chain.plan.variant, gpu)
    made = launch.bind(plan_steps(chain.plan.problem, chain.plan.variant, gpu), gpu)
    q, out, lse = chain.start()
    pointers = (q.data.ptr, chain.k.data.ptr, chain.v.data.ptr, 0, out.data.ptr, lse.data.ptr)
    _, arguments, _ = launch.Launcher(made.steps[0], gpu, loaded).at(pointers, chain.plan.problem)
    too_much = gpu.smem_per_sm + 1024
    queue = dependent.bind(loaded.function_ptr, (1, 1, 1), (chain.plan.variant.threads, 1, 1), too_much)
    with pytest.raises(driver.CUDADriverError, match="CUDA_ERROR_INVALID_VALUE"):
        queue(0, arguments, 0)


@pytest.fixture(scope="session")
def write_late():
    """``write_late(source, target)`` queues a kernel that lets the next grid begin, and copies int32 a few
    microseconds later. Meanwhile its blocks, one to each multiprocessor, have the old values in their L1.
    """
    kernel = cupy.RawKernel(
        r"""
        extern "C" __global__ void write_late(const int* source, int* target, int count) {
          asm volatile("griddepcontrol.launch_dependents;");
          const long long start = clock64();
          while (clock64() - start < 20000) {
            for (int i = threadIdx.x; i < count; i += blockDim.x) {
              int old;
              asm volatile("ld.global.ca.s32 %0, [%1];" : "=r"(old) : "l"(target + i) : "memory");
            }
          }
          if (blockIdx.x > 0) return;
          for (int i = threadIdx.x; i < count; i += blockDim.x) target[i] = source[i];
        }
        """,
        "write_late",
    )

    def queue(source, target):
        kernel((device(0).num_sms,), (128,), (source, target, np.int32(target.size)))

    return queue


# Sequences, whether in pages, with an index, in fixed splits; and who decodes.
SHARES, CLUSTERS = "flash_varlen_decode_sm80.cu.j2", "flash_varlen_decode_sm90.cu.j2"
LATE = {
    "contiguous": (8, False, False, "auto", SHARES),
    "index": (8, False, True, "auto", SHARES),
    "pages": (8, True, False, "auto", SHARES),
    "fixed splits": (8, True, False, flashgen.SplitEvery(256), SHARES),
    "more than a warp has lanes": (70, True, False, "auto", SHARES),
    "contiguous, in clusters": (8, False, False, "auto", CLUSTERS),
    "index, in clusters": (8, False, True, "auto", CLUSTERS),
    "pages, in clusters": (8, True, False, "auto", CLUSTERS),
    "one sequence": (1, True, False, "auto", CLUSTERS),
}


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("captured", [False, True])
def test_decoding_takes_lengths_that_are_written_while_it_has_begun(kind, captured, write_late):
    """And page tables, and an index: it looks at them before the grid ahead has ended, and then again."""
    batch, paged, indexed, splits, template = LATE[kind]
    capacity, rounds, rng = 2048, 12, np.random.default_rng(0)
    group = 20 if template == SHARES else 4  # a cluster has at most 16 rows
    rows = (batch * capacity // 16, 16) if paged else (batch, capacity)
    k, v = (cupy.asarray(rng.standard_normal((*rows, 2, 64)).astype(np.float16)) for _ in range(2))
    q = cupy.asarray(rng.standard_normal((batch, 1, 2 * group, 64)).astype(np.float16))
    arrays = {"lengths": lambda: rng.integers(0, capacity + 1, batch)}
    if paged:
        arrays["pages"] = lambda: rng.permutation(batch * capacity // 16).reshape(batch, -1)
    if indexed:
        arrays["index"] = lambda: rng.permutation(batch)
    written = {
        name: [cupy.asarray(draw().astype(np.int32)) for _ in range(2)] for name, draw in arrays.items()
    }
    written["lengths"][1][: batch // 2] = written["lengths"][0][: batch // 2]  # these stay
    held = {name: cupy.zeros_like(versions[0]) for name, versions in written.items()}
    out = cupy.full((2, rounds, *q.shape), np.nan, np.float16)
    cache = flashgen.KVCache(k, v, **held)
    other = flashgen.KVCache(k, v, **{name: versions[1] for name, versions in written.items()})
    plan = flashgen.plan(q, cache, splits=splits)
    assert plan.variant.template == template
    assert dependent.applies_to(plan.variant, device(0))

    def round_of(step, after=lambda: None):
        # The lengths change in every fourth round, whatever else does in every second.
        for name, versions in written.items():
            write_late(versions[step // (4 if name == "lengths" else 1) % 2], held[name])
            after()
        flashgen.attention(q, cache, out=out[0, step], splits=splits)
        after()
        # It begins while the parts of the call before, of other lengths, are combined.
        flashgen.attention(q, other, out=out[1, step], splits=splits)
        after()

    synchronize = cupy.cuda.Device().synchronize
    synchronize()
    for step in range(rounds):
        round_of(step, synchronize)
    expected = bits((out,))
    assert not cupy.isnan(out).any()
    for array in (out, *held.values()):
        array.fill(0)
    synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        if captured:
            stream.begin_capture()
        for step in range(rounds):
            round_of(step)
        if captured:
            stream.end_capture().launch(stream)
        stream.synchronize()
    assert same(bits((out,)), expected)
