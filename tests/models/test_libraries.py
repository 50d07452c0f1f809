"""`skeinformer.sketched` around models of other libraries, with random weights: a ViT, a U-Net, a DiT."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import sketched

EXAMPLES = Path(__file__).parents[2] / "examples"
SKETCH: dict[str, Any] = {"budget": 32, "min_length": 0}


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@torch.no_grad()
def test_a_vit_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra `hf`")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=64, patch_size=4, attn_implementation="sdpa")
    model, pixels = transformers.ViTModel(config).eval(), torch.randn(2, 3, 64, 64)
    exact = model(pixels).last_hidden_state
    with sketched("cluster", **SKETCH, certify=True) as report:
        found = model(pixels).last_hidden_state
    assert not report.exact
    assert report.sketched == 2
    assert 0 < relative_error(found, exact) < 0.1
    assert torch.equal(model(pixels).last_hidden_state, exact)


@torch.no_grad()
def test_a_padded_bert_of_transformers() -> None:
    """Its mask is a whole matrix whose rows are alike."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra `hf`")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=99, **sizes, attn_implementation="sdpa")
    model, tokens = transformers.BertModel(config).eval(), torch.randint(99, (2, 128))
    mask = (torch.arange(128) < torch.tensor([[128], [90]])).long()
    exact = model(tokens, attention_mask=mask).last_hidden_state
    with sketched("cluster", **SKETCH) as report:
        found = model(tokens, attention_mask=mask).last_hidden_state
    assert (report.sketched, report.exact) == (2, 0)
    assert 0 < relative_error(found[mask == 1], exact[mask == 1]) < 0.1


@pytest.mark.parametrize("name", ["custom_model.py", "diffusers_sketched.py"])
def test_the_examples_run(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if "diffusers" in name:
        pytest.importorskip("diffusers")
    monkeypatch.setattr(sys, "argv", [name, "--size", "32"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert "sketched" in printed
    assert "error of the output" in printed
