"""The tiny family as one that dispatch knows, and a bench whose clock the test sets."""

from types import SimpleNamespace

import pytest

from fake_gpu import H200
from flashgen.bench.timing import Timing
from flashgen.build import Built
from flashgen.compile import Compiled
from flashgen.spec import load_spec
from flashgen.tune import contest
from flashgen.tune.subjects import subjects


@pytest.fixture
def spec_file(tiny_folder, edit_spec):
    """The tiny spec, in the family of the front door."""
    return edit_spec("family: tiny_fwd", "family: flash_fwd")


@pytest.fixture
def subject(spec_file):
    """``subject(**axes)``: one point of the tiny spec on an H200, by default of fp16 and head_dim 64."""

    def choose(gpu=None, **axes):
        spec = load_spec(spec_file, gpu=gpu)
        wanted = {"head_dim": 64, "dtype": "fp16", "mask_type": "none", "gqa": "mha"} | axes
        (found,) = subjects([spec], spec.select(**wanted), H200)
        return found

    return choose


class FakeBench:
    """Times and faults by tile: ``ms`` gives the time of a variant on a case."""

    def __init__(self):
        self.ms = lambda variant, case: 1.0
        self.faults = {}
        self.late = {}
        self.timed = []

    def arch(self, variant):
        return "sm_90"

    def wrong(self, variant):
        return self.faults.get(dict(variant.tile)["block_n"], "")

    def blocks_per_sm(self, variant):
        return 2

    def time(self, variants, case):
        self.timed.append((case.name, [dict(variant.tile) for variant in variants]))
        found = []
        for variant in variants:
            fault = self.late.get((dict(variant.tile)["block_n"], case.name))
            ms = self.ms(variant, case)
            found.append(fault or Timing(ms, ms, ms, rounds=3, calls=1))
        return found


@pytest.fixture
def bench(monkeypatch):
    """A `FakeBench`, and a compiler that takes no time: tiles with ``stages`` of ``bench.broken`` do not
    compile, those with ``warps`` of ``bench.spilling`` spill."""
    fake = FakeBench()
    fake.broken, fake.spilling = (), ()

    def build(pairs, jobs, on_done):
        results = []
        for variant, arch in pairs:
            tile = dict(variant.tile)
            spilled = 16 if tile["warps"] in fake.spilling else 0
            made = Compiled(variant.name, arch, b"", "", 128, spilled, spilled, 0, 0, 0.1)
            error = "static_assert failed" if tile["stages"] in fake.broken else ""
            built = Built(variant, arch, 0.1, compiled=None if error else made, error=error)
            results.append(built)
            on_done(built)
        return results

    monkeypatch.setattr(contest, "build", build)
    return fake


@pytest.fixture
def case():
    """``case(name, seqlen)``: what ranking asks of a problem."""
    return lambda name, seqlen=1024: SimpleNamespace(name=name, seqlen_q=seqlen, seqlen_kv=seqlen, flops=1e12)
