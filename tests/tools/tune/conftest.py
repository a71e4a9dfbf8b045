"""The tiny family as one that dispatch knows, and a bench whose clock the test sets."""

from types import SimpleNamespace

import pytest

from fake_bench import FakeBench
from fake_gpu import H200
from flashgen.families.load import load_spec
from flashgen.tools.tune import contest
from flashgen.tools.tune.subjects import subjects


@pytest.fixture
def spec_file(tiny_folder, edit_spec):
    """The tiny spec, as one that the front door takes."""
    return edit_spec("{prefer: on_request}", "{prefer: least_time}")


@pytest.fixture
def subject(spec_file):
    """``subject(**axes)``: one point of the tiny spec on an H200, by default of fp16 and head_dim 64."""

    def choose(gpu=None, **axes):
        spec = load_spec(spec_file, gpu=gpu)
        wanted = {"head_dim": 64, "dtype": "fp16", "mask_type": "none", "gqa": "mha"} | axes
        (found,) = subjects([spec], spec.select(**wanted), H200)
        return found

    return choose


@pytest.fixture
def bench(monkeypatch):
    """A `FakeBench`, which compiles as well."""
    fake = FakeBench()
    monkeypatch.setattr(contest, "build", fake.build)
    return fake


@pytest.fixture
def case():
    """``case(name, seqlen)``: what ranking asks of a problem."""
    return lambda name, seqlen=1024: SimpleNamespace(name=name, seqlen_q=seqlen, seqlen_kv=seqlen, flops=1e12)
