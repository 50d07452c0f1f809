"""Converted models of torch really attend by the method: encoders in every mode, decoders, wrapped, compiled."""

import copy
import runpy
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from skeinformer import convert, restore
from skeinformer.attention import METHODS
from skeinformer.models import Call, Policy, policy
from tests.helpers import lengths_mask
from tests.models.test_convert import LARGE, encoder, padded_input

pytestmark = pytest.mark.usefixtures("always_sketched")

EXAMPLE = Path(__file__).parents[2] / "examples" / "convert_pytorch_encoder.py"


class Counted:
    """Counts the calls of the attention of every converted layer, whoever makes them, by its method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        attend = Policy.attend

        def counting(policy: Policy, call: Call, attention: Any = None) -> Tensor:
            self.calls[policy.method] += 1
            return attend(policy, call, attention)

        monkeypatch.setattr(Policy, "attend", counting)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("no_grad", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_every_layer_of_an_encoder_is_really_called(
    batch_first: bool, norm_first: bool, training: bool, no_grad: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder(3, batch_first=batch_first, norm_first=norm_first).train(training)
    x, padding = padded_input(batch_first)
    rows = ~padding if batch_first else ~padding.T
    mask = padding if padded else None
    with torch.set_grad_enabled(not no_grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: its nested tensors may change
        expected = model(x, src_key_padding_mask=mask)
        counted = Counted(monkeypatch)
        convert(model, budget=LARGE)
        output = model(x, src_key_padding_mask=mask)
        assert counted.calls == {"cluster": 3}
        torch.testing.assert_close(output[rows], expected[rows])
        convert(model, budget=2)
        assert not torch.allclose(model(x, src_key_padding_mask=mask)[rows], expected[rows])


@torch.no_grad()
@pytest.mark.parametrize("padded", [True, False])
def test_a_short_encoder_in_evaluation_is_exact_in_our_layers(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own call for a whole layer would go around them, and so would its nested tensors."""
    monkeypatch.undo()  # lengths decide again
    model = encoder(2).eval()
    x, padding = padded_input()
    mask = padding if padded else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: its nested tensors may change
        expected = model(x, src_key_padding_mask=mask)
    calls: list[str | None] = []
    convert(model, "cluster")
    with policy.observe(lambda call, reason, site: calls.append(reason)):
        observed = model(x, src_key_padding_mask=mask)
    output = model(x, src_key_padding_mask=mask)
    assert calls == [policy.FEW_KEYS] * 2
    assert torch.equal(output, observed)
    torch.testing.assert_close(output[~padding], expected[~padding])


def test_a_converted_encoder_compiles() -> None:
    model = encoder(1)
    x, padding = padded_input()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    exact = compiled(x, src_key_padding_mask=padding)[~padding]
    convert(compiled, budget=2)  # a model that was compiled before is compiled again
    sketched = compiled(x, src_key_padding_mask=padding)[~padding]
    assert not torch.allclose(sketched, exact)
    sketched.sum().backward()
    model.eval()
    with torch.no_grad():
        output = compiled(x, src_key_padding_mask=padding)[~padding]
        torch.testing.assert_close(output, model(x, src_key_padding_mask=padding)[~padding])


@torch.no_grad()
def test_decoders_keep_their_causal_self_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True).eval()
    source, target = torch.randn(3, 12, 8), torch.randn(3, 7, 8)
    padding = ~lengths_mask([12, 5, 9], 12)
    masks = {
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
        "tgt_mask": torch.ones(7, 7, dtype=torch.bool).triu(1),
    }
    expected = model(source, target, **masks)
    counted = Counted(monkeypatch)
    report = convert(model, budget=LARGE, decoder_cross_attention=True)
    assert {name: "causal" in reason for name, reason in report.skipped.items()} == {
        "decoder.layers.0.self_attn": True,
        "decoder.layers.1.self_attn": True,
    }
    assert "decoder.layers.1.multihead_attn" in report.converted
    torch.testing.assert_close(model(source, target, **masks), expected)
    assert counted.calls == {"cluster": 4}
    convert(model, "skeinformer_uniform", budget=2)
    sketched = model(source, target, **masks)
    assert not torch.allclose(sketched, expected)
    target[:, -1] = 0  # what comes last changes nothing before it
    torch.testing.assert_close(model(source, target, **masks)[:, :-1], sketched[:, :-1])


@pytest.mark.parametrize("method", ["skeinformer", "cluster", "nystromformer", "performer"])
def test_a_converted_decoder_does_not_see_later_tokens_unless_told(method: str) -> None:
    model = nn.Transformer(8, 2, 1, 2, 16, dropout=0.0, batch_first=True).eval()
    source, target = torch.randn(2, 24, 8), 3 * torch.randn(2, 20, 8)
    changed = torch.cat([target[:, :12], 3 * torch.randn(2, 8, 8)], 1)
    causal = {"tgt_mask": torch.ones(20, 20, dtype=torch.bool).triu(1)}

    def leak() -> float:
        with torch.no_grad():
            rows = model(source, target, **causal) - model(source, changed, **causal)
        return float(rows[:, :12].abs().max())

    names = {f"decoder.layers.{i}.multihead_attn" for i in range(2)}
    report = convert(model, method, budget=4)
    assert leak() < 1e-5
    assert names.isdisjoint(report.skipped) is METHODS[method].row_by_row
    report = convert(model, method, budget=4, decoder_cross_attention=True)
    assert names <= set(report.converted)
    assert (leak() > 1e-5) is not METHODS[method].row_by_row


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrap_ddp(model: nn.TransformerEncoder) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def shard_layers(model: nn.TransformerEncoder) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def shard_attention(model: nn.TransformerEncoder) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer.self_attn)
    return fully_shard(model)


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize("wrap", [wrap_ddp, shard_layers, shard_attention])
def test_wrapped_models(one_process: None, wrap: Any) -> None:
    plain = encoder()
    model = wrap(copy.deepcopy(plain))
    x, padding = padded_input()

    def gradients(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        output = model(x, src_key_padding_mask=padding)[~padding]
        output.square().sum().backward()
        found = [parameter.grad for parameter in model.parameters()]
        return [output.detach(), *(getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in found)]

    kinds = [type(module) for module in model.modules()]
    expected = gradients(plain)
    assert len(convert(model, budget=LARGE).converted) == 2
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-5)
    convert(model, budget=2)
    assert not torch.allclose(gradients(model)[0], expected[0])
    restore(model)
    assert [type(module) for module in model.modules()] == kinds
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-5)


def test_the_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), "256"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "layers.0.self_attn" in capsys.readouterr().out
