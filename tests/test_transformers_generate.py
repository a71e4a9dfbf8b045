"""The example of generation by transformers, whose attention is flashgen's, has the tokens of SDPA."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.extra

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "transformers_generate.py"


def test_the_example_has_the_tokens_of_sdpa(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = runpy.run_path(str(EXAMPLE))
    printed = capsys.readouterr().out
    model = names["model"]
    assert model.config._attn_implementation == "fgen"
    model.set_attn_implementation("sdpa")
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    right = model.generate(names["prompts"], attention_mask=names["visible"], **options)
    assert str(right) in printed
