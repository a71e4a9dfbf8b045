"""The example of paged generation in transformers runs on the CPU, and notices a wrong result."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.extra

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def generation(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("transformers_pages")


@pytest.fixture(autouse=True)
def without_a_gpu(generation, monkeypatch):
    monkeypatch.setattr(generation.torch.cuda, "is_available", lambda: False)


def test_generation_by_transformers_has_the_tokens_of_sdpa(generation, capsys):
    assert generation.main(["--new-tokens", "8"]) == 0
    first, *rates = capsys.readouterr().out.splitlines()
    assert first == "fp32: 24 of 24 tokens as with SDPA, 3 prompts, 8 tokens each"
    assert [line.split("tokens/s")[1].strip() for line in rates] == ["SDPA, generate()", "flashgen"]


def test_a_cache_that_forgets_is_noticed(generation, monkeypatch, capsys):
    attend = generation.PagedCache.attend

    def forgetful(self, layer, *given):
        out = attend(self, layer, *given)
        self.k[layer, self.pages[1, 0].item()] = 0
        return out

    monkeypatch.setattr(generation.PagedCache, "attend", forgetful)
    assert generation.main(["--new-tokens", "8"]) == 1
    assert "of prompt 1 is not SDPA's" in capsys.readouterr().out
