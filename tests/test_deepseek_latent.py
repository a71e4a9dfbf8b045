"""The example of a DeepSeek-V3 in latent space has the tokens of eager attention, and notices other ones."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.extra

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def deepseek(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("deepseek_latent")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    return module


def test_tokens_are_those_of_eager_attention(deepseek, capsys):
    assert deepseek.main(["--new-tokens", "8"]) == 0
    assert capsys.readouterr().out == "fp32, CPU: 24 tokens as with eager attention\n"


def test_a_rotation_of_other_pairs_is_noticed(deepseek, monkeypatch, capsys):
    rotary = deepseek.flashgen.Rotary
    monkeypatch.setattr(deepseek.flashgen, "Rotary", lambda cos, sin, interleaved: rotary(cos, sin))
    assert deepseek.main(["--new-tokens", "8"]) == 1
    assert "not those of eager attention" in capsys.readouterr().out
