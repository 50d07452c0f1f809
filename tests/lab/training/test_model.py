"""The model with every method: padding has no influence, training works, evaluation is deterministic."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention import METHODS, Attention
from skeinformer.kernels.rows import masked_mean
from skeinformer.lab.training.model import (
    Classifier,
    Dropout,
    Encoder,
    Layer,
    ModelConfig,
    PairClassifier,
    SelfAttention,
)
from tests.helpers import PADDING_IS_DRAWN, generator, lengths_mask

VOCABULARY, CLASSES, N = 11, 3, 24


def config(method: str = "skeinformer", **options: Any) -> ModelConfig:
    """Small, and with a budget below the number of tokens."""
    sizes: dict[str, Any] = {"budget": 8, "dim": 16, "feedforward_dim": 32, "classifier_dim": 16, "max_len": 2 * N}
    return ModelConfig(VOCABULARY, CLASSES, method=method, **{**sizes, **options})


def tokens(b: int = 3, n: int = N, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (b, n), generator=generator(seed))


@pytest.mark.parametrize("method", METHODS)
def test_padding_never_influences_the_logits(method: str) -> None:
    """Whatever stands in it, also what is no token; nor its amount, unless the method draws padding, as published."""
    model = Classifier(config(method)).eval()
    mask = lengths_mask([N, 9, 1], N)
    x = tokens()
    logits = model(x, mask)
    assert logits.shape == (3, CLASSES)
    assert torch.equal(model(x.masked_fill(~mask, -7), mask), logits)
    if method not in PADDING_IS_DRAWN:
        longer, longer_mask = F.pad(x, (0, 13), value=99), F.pad(mask, (0, 13))
        torch.testing.assert_close(model(longer, longer_mask), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_training_step(method: str) -> None:
    """Every parameter has a finite gradient and moves, but for queries and keys where the method reads none."""
    model = Classifier(config(method)).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mask = lengths_mask([N, 9, 1], N)
    loss = F.cross_entropy(model(tokens(), mask), torch.tensor([0, 1, 2]))
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        unread = method == "vmean" and (".query." in name or ".key." in name)
        assert (parameter.grad is None) == unread, name
        if not unread:
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
            assert "bias" in name or not torch.equal(parameter, before[name])  # a bias of the keys changes nothing


@pytest.mark.parametrize("method", METHODS)
def test_a_fully_padded_example_is_finite(method: str) -> None:
    model = Classifier(config(method)).train()
    logits = model(tokens(), lengths_mask([N, 0, 2], N))
    logits.square().sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_it_learns() -> None:
    """Which of two tokens is more frequent, by exact and by sketched attention."""
    x = torch.randint(2, (32, 15), generator=generator())
    labels = (x.sum(1) > 7).long()
    for method in ("softmax", "skeinformer"):
        torch.manual_seed(0)
        model = Classifier(config(method, budget=4)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()
        assert (model.eval()(x).argmax(1) == labels).float().mean() > 0.9


def test_evaluation_is_deterministic_and_training_is_not() -> None:
    model = Classifier(config()).eval()
    assert torch.equal(model(tokens()), model(tokens()))
    torch.testing.assert_close(model(tokens())[1:2], model(tokens()[1:2]), rtol=1e-4, atol=1e-5)
    model.train()
    assert not torch.equal(model(tokens()), model(tokens()))
    drawing = Classifier(config(seed=None, dropout=0.0)).eval()
    assert not torch.equal(drawing(tokens()), drawing(tokens()))


def test_each_layer_draws_its_own_noise() -> None:
    def seeds(seed: int) -> set[int | None]:
        encoder = Encoder(config(seed=seed, num_layers=3))
        return {module.seed for module in encoder.modules() if isinstance(module, Attention)}

    assert len(seeds(5)) == len(seeds(6)) == 3
    assert not seeds(5) & seeds(6)


def test_no_mask_is_all_real() -> None:
    model = Classifier(config()).eval()
    torch.testing.assert_close(model(tokens()), model(tokens(), torch.ones(3, N, dtype=torch.bool)))


def test_the_paper_s_sizes() -> None:
    """2 layers of width 64 with 2 heads of 32, feed-forward 128, head 64 -> 128 -> classes."""
    model = Classifier(ModelConfig(vocab_size=256, num_classes=2, max_len=4096))
    count = sum(p.numel() for p in model.parameters())
    attention, feedforward, norms = 4 * (64 * 64 + 64), 64 * 128 + 128 + 128 * 64 + 64, 2 * 2 * 64
    head = 64 * 128 + 128 + 128 * 2 + 2
    assert count == 256 * 64 + 4096 * 64 + 2 * (attention + feedforward + norms) + 2 * 64 + head
    pair = PairClassifier(ModelConfig(vocab_size=256, num_classes=2, max_len=4096))
    assert sum(p.numel() for p in pair.parameters()) == count + 3 * 64 * 128
    (first, *_) = model.encoder.layers
    assert isinstance(first, Layer)
    assert (first.attention.num_heads, first.attention.attention.head_dim) == (2, 32)
    assert first.attention.attention.method.budget == 256


def test_self_attention_is_multi_head_attention() -> None:
    """With torch's own module, the same weights and exact attention, padding included."""
    ours = SelfAttention(config("softmax"), 0)
    theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    assert ours.key is not None
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key.bias, ours.value.bias]))
        theirs.out_proj.weight.copy_(ours.output.weight)
        theirs.out_proj.bias.copy_(ours.output.bias)
    x, mask = torch.randn(3, N, 16, generator=generator()), lengths_mask([N, 9, 4], N)
    expected, _ = theirs(x, x, x, key_padding_mask=~mask, need_weights=False)
    torch.testing.assert_close(ours(x, mask)[mask], expected[mask], rtol=1e-5, atol=1e-5)


def test_a_pair_shares_its_encoder() -> None:
    model = PairClassifier(config()).eval()
    x, y = tokens(), tokens(n=2 * N, seed=1)
    mask, other = lengths_mask([N, 5, 1], N), lengths_mask([2 * N, 7, 0], 2 * N)
    logits = model(x, y, mask, other)
    a, b = masked_mean(model.encoder(x, mask), mask), masked_mean(model.encoder(y, other), other)
    torch.testing.assert_close(logits, model.head(torch.cat([a, b, a * b, a - b], 1)))
    assert logits.isfinite().all()
    assert not torch.allclose(logits[:2], model(y, x, other, mask)[:2])
    assert torch.equal(model(x.masked_fill(~mask, 99), y.masked_fill(~other, -1), mask, other), logits)


def test_reformer_has_no_keys_of_its_own() -> None:
    for method in METHODS:
        layer = SelfAttention(config(method), 0)
        assert (layer.key is None) == METHODS[method].shares_keys == (method == "reformer")


def test_masked_mean() -> None:
    x = torch.randn(3, 5, 2, generator=generator())
    x[1, 2:] = torch.nan
    mean = masked_mean(x, lengths_mask([5, 2, 0], 5))
    torch.testing.assert_close(mean, torch.stack([x[0].mean(0), x[1, :2].mean(0), torch.zeros(2)]))


def test_a_state_dict_restores_the_model() -> None:
    first, second = Classifier(config()).eval(), Classifier(config()).eval()
    assert not torch.allclose(first(tokens()), second(tokens()))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(tokens()), second(tokens()))


def test_options_reach_the_method() -> None:
    layer = SelfAttention(config("skeinformer", options={"num_pilots": 3}), 0)
    assert "num_pilots=3" in repr(layer)
    with pytest.raises(TypeError, match="did you mean 'num_pilots'"):
        Classifier(config("skeinformer", options={"pilots": 3}))


@pytest.mark.parametrize("shape", [(7,), (3, 5), (100, 101)])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout(shape: tuple[int, ...], rate: float) -> None:
    dropout = Dropout(rate)
    x = torch.rand(shape, generator=generator()).add(1).requires_grad_()
    output = dropout(x)
    kept = output != 0
    torch.testing.assert_close(output[kept], x[kept] / (1 - rate), rtol=1e-4, atol=0)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(gradient, kept / (1 - rate), rtol=1e-4, atol=0)
    share = kept.float().mean().item()
    assert abs(share - (1 - rate)) <= 4.5 * math.sqrt(rate * (1 - rate) / x.numel())
    assert torch.equal(dropout.eval()(x), x)


def test_dropout_of_almost_everything_is_finite() -> None:
    """A rate that rounds to 1 in steps of 2^-16 is the greatest below."""
    assert Dropout(1 - 2**-20)(torch.ones(1000)).isfinite().all()


def test_dropout_under_vmap_draws_as_vmap_is_told() -> None:
    """For gradients per example: another draw for each, or the same for all, not silently one of them."""
    dropout, x = Dropout(0.5), torch.ones(3, 1000)
    assert not torch.equal(*torch.func.vmap(dropout, randomness="different")(x)[:2])
    assert torch.equal(*torch.func.vmap(dropout, randomness="same")(x)[:2])


def test_dropout_draws_each_number_apart() -> None:
    """No correlation between neighbours, nor between numbers that come from one 64-bit draw."""
    kept = (Dropout(0.5)(torch.ones(40_000)) != 0).double() * 2 - 1
    for distance in (1, 2, 3, 4, 8):
        assert abs((kept[:-distance] * kept[distance:]).mean()) <= 4.5 / math.sqrt(len(kept) - distance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dropout_keeps_the_dtype(dtype: torch.dtype) -> None:
    assert Dropout(0.1)(torch.ones(9, dtype=dtype)).dtype == dtype
    x = torch.ones(9, dtype=dtype)
    assert Dropout(0.0)(x) is x


def test_autocast_and_float64() -> None:
    model = Classifier(config()).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens(), lengths_mask([N, 5, 1], N)).isfinite().all()
    assert model.double()(tokens()).dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 15}, "dim=15 is not a multiple of num_heads=2"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"max_len": 0}, "max_len must be at least 1"),
        ({"method": "skienformer"}, "did you mean 'skeinformer'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Classifier(config(**options))


@pytest.mark.parametrize("shape", [(3, 2 * N + 1), (3, 0), (3,)])
def test_wrong_tokens_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \(batch, n\) with n from 1 to max_len=48"):
        Classifier(config())(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("kind", [Encoder, Classifier, PairClassifier])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("skeinformer", {"num_pilots": 3, "columns": "uniform"}),
        ("cluster", {"num_steps": 2}),
        ("linformer", {}),
        ("performer", {}),
    ],
)
def test_a_saved_model_computes_the_same_number_by_number(
    kind: Any, method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"vocab_size": 9, "num_classes": 3, "max_len": 32, "dim": 16, "num_layers": 2}
    made = kind(ModelConfig(**sizes, method=method, budget=6, options=options, seed=5)).eval()
    made.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path).eval()
    assert loaded.config == made.config
    tokens = torch.randint(9, (2, 2, 32))
    mask = torch.arange(32) < torch.tensor([[32], [20]])
    given = (*tokens, mask, mask) if kind is PairClassifier else (tokens[0], mask)
    with torch.no_grad():
        assert torch.equal(loaded(*given), made(*given))
        other = kind(ModelConfig(**sizes, method=method, budget=6, options=options, seed=6)).eval()
        other.load_state_dict(made.state_dict())
        assert torch.equal(other(*given), made(*given)) is (method == "linformer")  # the seed is part of it


def test_a_model_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    config = ModelConfig(vocab_size=5, num_classes=2, max_len=8, method="softmax")
    Classifier(config).save_pretrained(tmp_path)
    assert Classifier.from_pretrained(tmp_path).config == config
    with pytest.raises(ValueError, match=r"model\.safetensors has a tensor 'encoder\.[^']*', which the model has not"):
        Encoder.from_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"there is no .*model\.safetensors"):
        Classifier.from_pretrained(tmp_path)
