"""The backward kernels on a GPU: within the bound of float64 in poisoned memory, over any strides, the same
bits each time where that was asked for, in a graph with other inputs."""

from __future__ import annotations

import functools
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="the float64 reference is computed with PyTorch on the GPU")

import flashgen  # noqa: E402
from flashgen.call.record import AttentionCall, call_of  # noqa: E402
from flashgen.call.request import score_of  # noqa: E402
from flashgen.families.load import load_specs  # noqa: E402
from flashgen.operators.backward import BACKWARD, normalise  # noqa: E402
from flashgen.operators.gradients import gradients  # noqa: E402
from flashgen.operators.masks import Band  # noqa: E402
from flashgen.operators.modification import modification_of  # noqa: E402
from flashgen.operators.reference import largest  # noqa: E402
from flashgen.runtime.arrays import view  # noqa: E402
from flashgen.runtime.device import device  # noqa: E402
from flashgen.runtime.launch import bind  # noqa: E402
from flashgen.runtime.plans import Plan  # noqa: E402
from flashgen.schedule.dispatch import offers, runs_on  # noqa: E402
from flashgen.schedule.groups import group_parts  # noqa: E402
from flashgen.schedule.plan import plan_steps  # noqa: E402
from gpu.cases import DTYPES, new_seed  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch does not see a GPU"),
]

HEAD_DIMS = ((32, 32), (64, 64), (80, 80), (128, 128), (112, 96), (192, 128), (192, 192), (256, 256))
MASKS = {
    "none": {},
    "causal": {"causal": True},
    "local": {"window_size": (90, 20)},
    "dense": {"mask": "random"},
    "dense and causal": {"mask": "random", "causal": True},
}
TARGETS = ("sm80", "sm86", "sm90")
# A head dim of each way through the main kernels.
FEW = (("sm80", 64), ("sm80", 128), ("sm90", 64), ("sm90", 128), ("sm90", 192), ("sm90", 256))


@functools.cache
def specs(target):
    return [
        s
        for s in load_specs()
        if s.operator == "attention_backward" and not s.has_lengths and target in s.targets
    ]


def variant_for(problem, target, tile="", order=None):
    """The kernel of a target that serves the problem, with the ordinary tile or the one of that name, and an
    order of additions to dq: by default the one that was asked for.
    """
    gpu = device(0)
    found = [v for v in offers(problem, gpu, specs(target)) if v.target == target and runs_on(v, gpu)]
    order = order or ("ordered" if problem.deterministic else "none")
    if target == "sm90" and not found:
        pytest.skip("Hopper's family has no kernel of it")
    (variant,) = (v for v in found if dict(v.axes)["dq_order"] == order and v.tile_name == tile)
    return variant


class Call:
    """Random inputs, the results of the forward call, and gradients in memory whose gaps are NaN. ``scored``
    are the keywords of a score modification.
    """

    def __init__(
        self,
        shape,
        head_dims,
        dtype,
        *,
        mask=None,
        scale=(1.0, 1.0),
        dlse=True,
        strided=False,
        scored=None,
        **options,
    ):
        batch, seqlen_q, seqlen_kv, heads, kv_heads = shape
        head_dim, head_dim_v = head_dims
        random = torch.Generator("cuda").manual_seed(new_seed())
        self.dtype, self.options, element = dtype, options, DTYPES[dtype]

        def rows(count, of, width, factor=1.0, filled=True):
            # Heads first in memory, or a gap behind each row.
            size = (batch, of, count, width) if strided else (batch, count, of, width + 8)
            memory = torch.full(size, torch.nan, dtype=element, device="cuda")
            x = memory.transpose(1, 2) if strided else memory[..., :width]
            if filled:
                x.copy_(factor * torch.randn(x.shape, generator=random, device="cuda"))
            return x

        self.q = rows(seqlen_q, heads, head_dim, scale[0])
        self.k, self.v = (rows(seqlen_kv, kv_heads, width, scale[1]) for width in head_dims)
        self.dout = rows(seqlen_q, heads, head_dim_v)
        self.outputs = [
            rows(seqlen_q, heads, head_dim, filled=False),
            rows(seqlen_kv, kv_heads, head_dim, filled=False),
            rows(seqlen_kv, kv_heads, head_dim_v, filled=False),
        ]
        self.mask = None
        if mask is not None:
            self.mask = torch.rand(heads, seqlen_q, seqlen_kv, generator=random, device="cuda") < 0.4
            self.mask[:, 1::50] = True  # rows that see nothing
        self.dlse = None
        if dlse:
            self.dlse = torch.randn(batch, heads, seqlen_q, generator=random, device="cuda")
        self.random = random
        self.scored, self.modification, self.arrays, self.numbers = scored or {}, None, (), ()
        if scored:
            masking = {name: x for name, x in options.items() if name in ("causal", "window_size")}
            call = call_of(AttentionCall, **masking, **scored)
            self.modification, self.arrays, self.numbers = score_of(call)

    def forward(self):
        """The results of the forward call for the inputs as they are."""
        options = self.options | self.scored
        out, lse = flashgen.attention(self.q, self.k, self.v, mask=self.mask, return_lse=True, **options)
        if self.dlse is not None:
            self.dlse[lse.isneginf()] = torch.nan  # has no effect
        return out, lse

    def plan(self, target, deterministic=False, parts=None, tile="", order=None):
        out, lse = self.forward()
        given = (
            self.dout,
            self.q,
            self.k,
            self.v,
            self.mask,
            out,
            lse,
            *(None,) * 4,
            self.dlse,
            *self.outputs,
            None,
        )
        names = BACKWARD.without_lengths.positions
        views = {name: view(x, name) for name, x in zip(names, given, strict=True) if x is not None}
        of_score = {"score": self.modification, "score_scalars": self.numbers}
        of_score["score_arrays"] = [view(x, "an array") for x in self.arrays]
        problem = normalise(**views, deterministic=deterministic, **of_score, **self.options)
        main = variant_for(problem, target, tile, order)
        with mock.patch(
            "flashgen.schedule.plan.group_parts", group_parts if parts is None else lambda *_: parts
        ):
            runner = bind(plan_steps(problem, main, device(0)), device(0))
        return Plan(problem, runner, (*given, *self.arrays))

    @property
    def named_arrays(self):
        """The arrays of the score modification by name."""
        params = self.modification.arrays if self.modification is not None else ()
        return dict(zip((x.name for x in params), self.arrays, strict=True))

    def run(self, plan):
        """dq, dk and dv, of which nothing is left from before, nor of the workspace."""
        out, lse = self.forward()
        for x in self.outputs:
            x.fill_(torch.nan)
        workspace = torch.full((plan.workspace_bytes + 256,), 0xFF, dtype=torch.uint8, device="cuda")
        inputs = {"dout": self.dout, "q": self.q, "k": self.k, "v": self.v, "out": out, "lse": lse}
        optional = {"mask": self.mask, "dlse": self.dlse}
        inputs |= {name: x for name, x in optional.items() if x is not None}
        inputs |= self.named_arrays
        outputs = dict(zip(("dq", "dk", "dv"), self.outputs, strict=True))
        plan(**inputs, **outputs, workspace=workspace)
        return self.outputs

    def check(self, found, problem):
        right = gradients(
            *(x.double() for x in (self.dout, self.q, self.k, self.v)),
            self.dtype,
            problem.softmax_scale,
            Band.of(problem),
            self.mask,
            None if self.dlse is None else self.dlse.double(),
            modification_of(problem, self.named_arrays, torch),
        )
        for (name, gradient), x in zip(right.items(), found, strict=True):
            worst = largest(x.double(), *gradient)
            assert worst.share <= 1, f"{name}: {worst.describe()} at {worst.index}"


def check(*args, target="sm80", deterministic=False, tile="", order=None, **options):
    call = Call(*args, **options)
    plan = call.plan(target, deterministic, tile=tile, order=order)
    call.check(call.run(plan), plan.problem)
    return plan


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_within_the_bound(head_dims, mask, target):
    for index, dtype in enumerate(("fp16", "bf16")):
        heads = (4, 4) if index else (6, 2)
        check((2, 300, 429, *heads), head_dims, dtype, target=target, dlse=index == 0, **MASKS[mask])


@pytest.mark.parametrize("target", TARGETS[:2])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_fp32(head_dims, target):
    if head_dims == (256, 256) and target == "sm86":
        pytest.skip("no fp32 kernel of this head dim in 99 KB")
    for mask in ("causal", "local", "dense"):
        check((1, 150, 201, 4, 2), head_dims, "fp32", target=target, **MASKS[mask])


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "head_dims",
    [*((d, d) for d in (32, 64, 80, 96, 112, 128, 160, 192, 248, 256)), (136, 8), (192, 96), (192, 128)],
    ids=str,
)
def test_hopper_within_the_bound(head_dims, mask):
    for index, dtype in enumerate(("fp16", "bf16")):
        heads = (4, 4) if index else (6, 2)
        for seqlen_q, seqlen_kv in ((300, 429), (1, 1), (700, 260), (130, 1100), (128, 128)):
            shape = (2, seqlen_q, seqlen_kv, *heads)
            check(shape, head_dims, dtype, target="sm90", dlse=index == 0, **MASKS[mask])


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv"),
    [(1, 1), (1, 200), (239, 1), (113, 203), (108, 256), (256, 512), (512, 256), (1023, 1024), (1024, 1023)],
)
@pytest.mark.parametrize(("target", "head_dim"), FEW)
def test_lengths(target, head_dim, seqlen_q, seqlen_kv):
    for options in ({}, {"causal": True}, {"mask_type": "causal_top_left"}, {"window_size": (7, 0)}):
        check((1, seqlen_q, seqlen_kv, 2, 1), (head_dim, head_dim), "bf16", target=target, **options)


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(0, 90), (90, 0)])
def test_without_queries_or_keys_gradients_are_zero(seqlen_q, seqlen_kv):
    """Dispatch takes the Ampere-class kernels: a tensor map describes no empty array."""
    call = Call((2, seqlen_q, seqlen_kv, 2, 2), (64, 64), "fp16")
    found = call.run(call.plan("sm80"))
    assert all(not x.any() for x in found)


@pytest.mark.parametrize("target", TARGETS[::2])
def test_long_sequences(target):
    check((1, 4096, 4096, 2, 1), (64, 64), "bf16", target=target, causal=True)
    check((1, 2048, 4096, 2, 2), (128, 128), "fp16", target=target)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)
def test_long_sequences_of_wide_heads():
    check((1, 4096, 2048, 2, 2), (256, 256), "bf16", target="sm90")
    check((1, 2048, 4096, 2, 1), (192, 192), "fp16", target="sm90", causal=True)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)
@pytest.mark.parametrize("mask", ["none", "causal", "local"])
@pytest.mark.parametrize(
    "head_dims", [(192, 192), (136, 160), (192, 128), (136, 8), (256, 256), (200, 216)], ids=str
)
def test_pairs_of_thread_blocks_within_the_bound(head_dims, mask):
    """Heads of an odd number of blocks of keys and of an even one; many more pairs than run together."""
    for index, dtype in enumerate(("fp16", "bf16")):
        heads = (4, 4) if index else (6, 2)
        for seqlen_q, seqlen_kv in ((300, 429), (1, 1), (65, 64), (700, 260), (130, 1100), (1024, 1023)):
            shape = (2, seqlen_q, seqlen_kv, *heads)
            check(shape, head_dims, dtype, target="sm90", dlse=index == 0, tile="pair", **MASKS[mask])
    check((1, 2048, 4000, 8, 4), head_dims, "bf16", target="sm90", tile="pair", **MASKS[mask])


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)
@pytest.mark.parametrize("head_dim", [192, 256])
def test_dk_and_dv_of_pairs_repeat(head_dim):
    """Also with the query heads of a group in parts."""
    call = Call((2, 1000, 1200, 12, 2), (head_dim, head_dim), "bf16", causal=True)
    for parts in (1, 6):
        plan = call.plan("sm90", parts=parts, tile="pair")
        first = [x.clone() for x in call.run(plan)]
        call.check(first, plan.problem)
        for _ in range(20):
            assert all(torch.equal(*pair) for pair in zip(call.run(plan)[1:], first[1:], strict=True))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)
@pytest.mark.parametrize("mask", ["none", "causal", "local"])
@pytest.mark.parametrize("head_dims", [(192, 192), (192, 128), (256, 256)], ids=str)
def test_pairs_of_thread_blocks_in_turns(head_dims, mask, busy):
    """Within the bound, and the same bits beside other work, where clusters come in other orders."""
    import cupy

    other = cupy.cuda.Stream(non_blocking=True)
    for shape in ((2, 300, 429, 6, 2), (1, 65, 64, 4, 4), (3, 700, 260, 4, 4), (2, 2048, 4000, 8, 4)):
        call = Call(shape, head_dims, "bf16", **MASKS[mask])
        plan = call.plan("sm90", deterministic=True, tile="pair")
        first = [x.clone() for x in call.run(plan)]
        call.check(first, plan.problem)
        for repeat in range(100):
            if repeat % 10 == 0:
                busy(other)
            assert all(torch.equal(*pair) for pair in zip(call.run(plan), first, strict=True))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_dq_of_heads_that_earlier_ones_clear(head_dim, deterministic, busy):
    """Many more heads than the preprocess kernel clears, also beside other work."""
    import cupy

    other = cupy.cuda.Stream(non_blocking=True)
    tile = "pair" if head_dim > 128 else ""
    for shape, options in (
        ((16, 200, 300, 16, 16), {}),
        ((12, 300, 260, 32, 16), {"causal": True}),
        ((3, 2100, 600, 40, 20), {"window_size": (300, 20)}),
    ):
        call = Call(shape, (head_dim, head_dim), "bf16", **options)
        plan = call.plan("sm90", deterministic=deterministic, tile=tile)
        call.check(call.run(plan), plan.problem)
        busy(other)
        for _ in range(3):
            call.check(call.run(plan), plan.problem)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("target", TARGETS[::2])
def test_great_scores(target, dtype):
    check((1, 500, 500, 2, 2), (64, 64), dtype, target=target, scale=(5.0, 3.0))


@pytest.mark.parametrize("target", TARGETS[::2])
def test_strides(target):
    plan = check((2, 200, 300, 4, 2), (128, 64), "bf16", target=target, strided=True, causal=True)
    assert plan.variant.head_dim == 128


@pytest.mark.parametrize("target", TARGETS[::2])
def test_nothing_beside_the_gradients_is_written(target):
    call = Call((2, 100, 150, 2, 2), (64, 64), "fp16")
    call.run(call.plan(target))
    for x in call.outputs:
        memory = torch.as_strided(x, (*x.shape[:-1], x.shape[-1] + 8), x.stride())
        assert memory[..., x.shape[-1] :].isnan().all()


@pytest.mark.parametrize(
    ("target", "head_dim"),
    [("sm80", 64), ("sm80", 128), ("sm80", 256), *(("sm90", d) for d in (32, 64, 128, 192, 256))],
)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (300, 20)}], ids=["none", "causal", "local"]
)
def test_deterministic_runs_repeat_to_the_bit(options, target, head_dim, busy):
    """Also while the GPU has other work, so that thread blocks come in other orders."""
    import cupy

    call = Call((2, 1500, 1500, 4, 2), (head_dim, head_dim), "bf16", **options)
    plan = call.plan(target, deterministic=True)
    first = [x.clone() for x in call.run(plan)]
    call.check(first, plan.problem)
    other = cupy.cuda.Stream(non_blocking=True)
    for repeat in range(100):
        if repeat % 10 == 0:
            busy(other)
        assert all(torch.equal(*pair) for pair in zip(call.run(plan), first, strict=True))


@pytest.mark.parametrize("target", TARGETS[::2])
def test_more_thread_blocks_in_turn_than_the_gpu_has_room_for(target):
    check((1, 256, 40_000, 1, 1), (64, 64), "bf16", target=target, deterministic=True)


@pytest.mark.parametrize("target", TARGETS[::2])
@pytest.mark.parametrize("mask", MASKS)
def test_in_turns_within_the_bound(mask, target):
    """A last section with fewer heads; both groupings; queries and keys that have no partner."""
    for head_dim, dtype, shape in (
        (64, "bf16", (3, 300, 429, 47, 47)),
        (96, "fp16", (1, 700, 260, 6, 2)),
        (128, "bf16", (2, 130, 1100, 4, 1)),
        (192, "fp16", (1, 300, 429, 6, 2)),
        (256, "bf16", (1, 150, 200, 47, 47)),
        (32, "fp16", (1, 1, 1, 2, 2)),
    ):
        options = MASKS[mask]
        check(shape, (head_dim, head_dim), dtype, target=target, deterministic=True, dlse=False, **options)


@pytest.mark.parametrize(("target", "head_dim"), FEW[1:])
def test_dk_and_dv_always_repeat(target, head_dim):
    call = Call((2, 1500, 1500, 4, 2), (head_dim, head_dim), "bf16", causal=True)
    plan = call.plan(target)
    first = [x.clone() for x in call.run(plan)[1:]]
    for _ in range(10):
        assert all(torch.equal(*pair) for pair in zip(call.run(plan)[1:], first, strict=True))


@pytest.mark.parametrize("mask", ["none", "causal", "local"])
@pytest.mark.parametrize(
    ("target", "head_dim", "deterministic"),
    [(*few, False) for few in FEW] + [(*few, True) for few in FEW[:4]],
)
def test_groups_of_query_heads_in_parts(target, head_dim, deterministic, mask):
    """Each head by itself, whole groups, and in between; dk and dv repeat to the bit."""
    call = Call((2, 500, 1200, 24, 2), (head_dim, head_dim), "bf16", **MASKS[mask])
    for parts in (1, 3, 12):
        plan = call.plan(target, deterministic, parts)
        first = [x.clone() for x in call.run(plan)]
        call.check(first, plan.problem)
        again = call.run(plan)
        assert all(torch.equal(*pair) for pair in zip(again[1:], first[1:], strict=True))
        assert not deterministic or torch.equal(again[0], first[0])


@pytest.mark.parametrize("target", TARGETS)
def test_many_query_heads_on_one_kv_head(target):
    """As many parts as there are of use on this GPU, in fp32 too; rows and keys that see nothing."""
    for shape, dtype in (((1, 900, 2000, 16, 1), "bf16"), ((2, 1000, 300, 9, 1), "fp16")):
        check(shape, (64, 48), dtype, target=target, causal=True)
    if target != "sm90":
        check((1, 200, 300, 6, 1), (64, 64), "fp32", target=target, causal=True)


@pytest.mark.parametrize(
    ("target", "deterministic"), [("sm80", False), ("sm80", True), ("sm90", False), ("sm90", True)]
)
def test_a_graph_replays_with_other_inputs(target, deterministic):
    call = Call((2, 400, 400, 4, 4), (64, 64), "bf16", causal=True)
    plan = call.plan(target, deterministic)
    call.run(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run(plan)
    for _ in range(3):
        for x in (call.q, call.dout):
            x.copy_(torch.randn(x.shape, generator=call.random, device="cuda"))
        graph.replay()
        call.check(call.outputs, plan.problem)
