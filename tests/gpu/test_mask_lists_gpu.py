"""Lists of the blocks of a mask by a line on a GPU: the bits of the lists that the CPU makes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="arrays lie on the GPU by PyTorch")

from flashgen.call.compute import make_plan  # noqa: E402
from flashgen.call.request import Request  # noqa: E402
from flashgen.families.load import load_specs  # noqa: E402
from flashgen.families.masks import load_masks, rule_of_line  # noqa: E402
from flashgen.operators import operator as operators  # noqa: E402
from flashgen.operators.masklists import ARGUMENTS, MASK_LISTS, OPTIONS  # noqa: E402
from flashgen.operators.masks import UNBOUNDED  # noqa: E402
from flashgen.operators.packedrules import packed  # noqa: E402
from flashgen.simulator.example import Shape, make  # noqa: E402
from flashgen.simulator.mask_lists_example import UNUSED, lists_on_host  # noqa: E402
from gpu.cases import new_seed  # noqa: E402
from operators.lines import random_line  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch does not see a GPU"),
]

MAIN = next(v for s in load_specs() if s.name == "mask_lists_sm80" for v in s.variants() if v.is_main)
SHAPES = (
    Shape(1000, 3000, heads=3, batch=2, window=(1500, 40)),
    Shape(8192, 8192, heads=2, batch=3),
    Shape(33, 65, heads=1, batch=1),
)


def lined(line):
    return MAIN.lined(load_masks("").get(line) or rule_of_line(line))


class OnGpu:
    """A plan for an example of the simulator, and its arrays."""

    def __init__(self, example):
        problem = example.problem
        operator, lists = operators.lined(MASK_LISTS, problem.rule.rule), problem.block_lists
        self.problem = problem
        self.names = tuple(operator.positions)
        self.arrays = [torch.from_numpy(x.copy()).cuda() for x in example.arrays]
        sides = problem.window_left, problem.window_right
        window = tuple(-1 if side == UNBOUNDED else side for side in sides)
        values = {
            "batch": problem.batch,
            "num_heads": problem.num_heads_q,
            "seqlen_q": problem.seqlen_q,
            "seqlen_kv": problem.seqlen_kv,
            "block": (lists.rows, lists.keys),
            "window": window,
            "entries": lists.entries // (lists.batch * lists.heads),
        }
        options = (*(values[name] for name in OPTIONS), problem.rule)
        self.plan = make_plan(Request(operator, tuple(self.arrays), options))

    def run(self):
        self.plan(**dict(zip(self.names, self.arrays, strict=True)))

    def clear(self):
        """Forget the lists."""
        for x in self.arrays[: len(ARGUMENTS)]:
            x.fill_(UNUSED)

    def check(self):
        """That the lists are those of the CPU."""
        host = {name: x.cpu().numpy() for name, x in zip(self.names, self.arrays, strict=True)}
        for name, right in lists_on_host(self.problem, host).items():
            np.testing.assert_array_equal(host[name], right, name)


@pytest.mark.parametrize("line", [*load_masks(""), "not hidden[q, kv]", "not hidden[b, h, q, kv]", "random"])
def test_lists_have_the_bits_of_the_cpu(line):
    seed = new_seed()
    variant = lined(random_line(np.random.default_rng(seed), 1000) if line == "random" else line)
    for shape in SHAPES:
        on_gpu = OnGpu(make(variant, shape, seed))
        on_gpu.run()
        on_gpu.check()


@pytest.mark.parametrize("line", ["documents", "prefix_lm", "kv // 9 <= q // 9 + far[h] and b != 2"])
def test_lists_of_packed_sequences_have_the_bits_of_the_cpu(line):
    seed = new_seed()
    variant = MAIN.lined(packed(load_masks("").get(line) or rule_of_line(line), left=False, right=True))
    for shape in (Shape(1000, 3000, heads=3, batch=1), Shape(8192, 8192, heads=1, batch=1)):
        on_gpu = OnGpu(make(variant, shape, seed))
        on_gpu.run()
        on_gpu.check()


def test_a_graph_lists_what_arrays_hold_in_its_replay():
    on_gpu = OnGpu(make(lined("documents"), SHAPES[0], new_seed()))
    on_gpu.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_gpu.run()
    for _ in range(3):
        doc = on_gpu.arrays[-1]
        doc.copy_(torch.randint(0, 9, doc.shape, device="cuda", dtype=torch.int32).sort(-1).values)
        on_gpu.clear()
        graph.replay()
        torch.cuda.synchronize()
        on_gpu.check()
