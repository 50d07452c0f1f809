"""What models return is found by name, and compared over real rows."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from skeinformer.compare.outputs import compare_outputs, tensors_of
from tests.helpers import lengths_mask

B, N, WIDTH = 3, 5, 4


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (torch.randn(B, N, WIDTH), ["output"]),
        (torch.randn(B, WIDTH), ["output"]),  # logits, sentence embeddings, or an encoder's rows: nothing tells
        (torch.randn(B), ["output"]),
        ((torch.arange(3), None, torch.randn(B, N, WIDTH)), ["output"]),
        ({"pooler_output": torch.randn(B, 2), "last_hidden_state": torch.randn(B, N, 2)}, ["last_hidden_state"]),
        ({"loss": torch.tensor(1.0), "logits": torch.randn(B, 2), "past": None}, ["logits"]),
        ({"embedding": torch.randn(B, 2), "other": torch.randn(B, 2)}, ["embedding"]),
        ("text", []),
    ],
)
def test_the_main_output_comes_first(result: Any, names: list[str]) -> None:
    assert list(tensors_of(result))[:1] == names


def test_logits_without_a_name_are_logits_if_one_says_so() -> None:
    assert list(tensors_of(torch.randn(B, WIDTH), logits=True)) == ["logits"]
    assert list(tensors_of({"embedding": torch.randn(B, WIDTH)}, logits=True)) == ["embedding"]


def test_rows_pooled_rows_and_logits() -> None:
    exact = {"last_hidden_state": torch.randn(B, N, WIDTH), "logits": torch.randn(B, 2)}
    sketched = {name: x + 0.1 * torch.randn(x.shape) for name, x in exact.items()}
    mask = lengths_mask([5, 2, 4], N)
    record = compare_outputs(exact, sketched, mask)
    x, y = exact["last_hidden_state"], sketched["last_hidden_state"]
    cosine = F.cosine_similarity(x[mask], y[mask], dim=-1)
    pooled = [F.cosine_similarity(x[i, m].mean(0), y[i, m].mean(0), dim=-1) for i, m in enumerate(mask)]
    expected = {
        "cosine": cosine.mean(),
        "cosine_min": cosine.min(),
        "pooled_cosine": min(pooled),
        "change": (x[mask] - y[mask]).norm() / x[mask].norm(),
        "logits_change": (exact["logits"] - sketched["logits"]).abs().mean(),
        "logits_change_max": (exact["logits"] - sketched["logits"]).abs().max(),
    }
    for name, value in expected.items():
        assert record[name] == pytest.approx(float(value), rel=1e-5), name


def test_tokens_first_is_recognized_by_the_mask() -> None:
    x = torch.randn(B, N, WIDTH)
    y, mask = x + 0.1 * torch.randn(x.shape), lengths_mask([5, 2, 4], N)
    first = compare_outputs({"output": x}, {"output": y}, mask)
    turned = compare_outputs({"output": x.transpose(0, 1)}, {"output": y.transpose(0, 1)}, mask)
    for name in ("cosine", "cosine_min", "pooled_cosine", "change"):
        assert turned[name] == pytest.approx(first[name])


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ValueError, match="returns no tensor of numbers"):
        compare_outputs({}, {}, None)
    zeros = {"output": torch.zeros(B)}
    assert compare_outputs(zeros, zeros, None)["change"] == 0
