"""`convert` changes the attention of a model in place and `restore` undoes it, exactly."""

import copy
import io
import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import skeinformer
from skeinformer import convert, restore
from tests.helpers import lengths_mask

pytestmark = pytest.mark.usefixtures("always_sketched")

LARGE = 64  # above every number of keys here
Snapshot = list[tuple[type, list[tuple[str, Any]]]]


def encoder(num_layers: int = 2, **options: Any) -> nn.TransformerEncoder:
    options = {"dropout": 0.0, "batch_first": True, **options}
    nested = options["batch_first"] and not options.get("norm_first", False)
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, **options), num_layers, enable_nested_tensor=nested
    )


def padded_input(batch_first: bool = True) -> tuple[Tensor, Tensor]:
    """(x, padding), True = padding."""
    x = torch.randn(3, 12, 8)
    return (x if batch_first else x.transpose(0, 1)), ~lengths_mask([12, 5, 9], 12)


def snapshot(model: nn.Module) -> Snapshot:
    """All that the modules of a model are and hold, by identity, with the contents of their tables."""
    found = []
    for module in model.modules():
        entries: list[tuple[str, Any]] = []
        for name, value in vars(module).items():
            entries.append((name, list(value.items()) if isinstance(value, dict) else value))
        found.append((type(module), entries))
    return found


def test_patterns_over_one_sequence_leave_cross_attention_alone() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    report = convert(model, "bigbird", budget=8)
    assert report.converted == ("encoder.layers.0.self_attn",)
    assert "pattern over one sequence" in report.skipped["decoder.layers.0.multihead_attn"]
    model(torch.randn(2, 12, 8), torch.randn(2, 7, 8))
    bare = nn.ModuleList([nn.MultiheadAttention(8, 2, add_bias_kv=True), nn.MultiheadAttention(8, 2)])
    report = convert(bare, "longformer")
    assert report.converted == ("1",)
    assert "add_bias_kv" in report.skipped["0"]


def test_a_causal_encoder_raises_and_says_what_to_do() -> None:
    model = encoder(1)
    convert(model)
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    with pytest.raises(ValueError, match=r"attn_mask is not possible.*filter"):
        model(padded_input()[0], mask=mask)


def test_convert_keeps_all_that_the_layers_hold() -> None:
    model = encoder().to(torch.float64).eval()
    model.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    seen: list[str] = []
    attention = model.layers[0].self_attn
    attention.register_forward_hook(lambda *_: seen.append("forward"))
    attention.register_full_backward_hook(lambda *_: seen.append("backward"))
    attention.mark = "a user's attribute"
    convert(model, budget=4)
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not attention.in_proj_weight.requires_grad
    assert not any(module.training for module in model.modules())
    assert isinstance(attention, nn.MultiheadAttention)
    assert attention is model.layers[0].self_attn
    output = model(torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True))
    output.sum().backward()
    assert output.dtype == torch.float64
    assert seen == ["forward", "backward"]
    assert attention.mark == "a user's attribute"


def test_restore_is_exact() -> None:
    model = nn.Transformer(8, 2, 2, 1, 16, dropout=0.0, batch_first=True).eval()
    model.encoder.layers[1].self_attn.register_forward_hook(lambda *_: None)
    before = snapshot(model)
    convert(model, budget=4, decoder_cross_attention=True)
    convert(model, "cluster", budget=4, filter="encoder.*")
    assert snapshot(model) != before
    names = restore(model)
    assert names == ("encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "decoder.layers.0.multihead_attn")
    assert snapshot(model) == before
    assert restore(model) == ()


def test_a_second_conversion_changes_options() -> None:
    model = encoder()
    convert(model, "skeinformer", budget=4)
    report = convert(model, "cluster", budget=8, filter=["layers.1.*"])
    assert report.skipped == {"layers.0.self_attn": "not chosen by filter; it attends by skeinformer"}
    assert [layer.self_attn.method for layer in model.layers] == ["skeinformer", "cluster"]
    assert model.layers[1].self_attn.attention.method.budget == 8


@torch.no_grad()
def test_layer_i_draws_by_the_seed_of_layer_i() -> None:
    model = encoder(3).eval()
    report = convert(model, seed=10, budget=4)
    x = padded_input()[0]
    assert [layer.self_attn.index for layer in model.layers] == [0, 1, 2]
    ours = model.layers[1].self_attn
    assert ours.attention.seed is None
    q, k, v = (ours._heads(y) for y in ours._project(x, x, x, together=False))
    module = skeinformer.build("cluster", head_dim=4, budget=4, seed=10_091).eval()
    expected = ours.out_proj(module(q, k, v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(ours(x, x, x)[0], expected)
    assert report.arguments()["seed"] == 10
    convert(model, seed=None, budget=4)
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_filters() -> None:
    model = encoder(4)
    assert convert(model, filter=lambda name, module: name.startswith("layers.3")).converted == ("layers.3.self_attn",)
    assert convert(model, filter=("layers.0.*", "*.2.*")).converted == ("layers.0.self_attn", "layers.2.self_attn")
    with pytest.raises(ValueError, match=r"'layer\.9\*' matches no attention layer; the model has: layers.0.self_attn"):
        convert(model, filter="layer.9*")


def test_shared_layers_stay_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = nn.MultiheadAttention(8, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleDict({"c": shared})})
    report = convert(model, filter="b.c")
    assert report.converted == ("a",)
    assert report.notes[0] == "b.c is the same layer as a"
    assert model["a"] is model["b"]["c"] is shared


class OwnForward(nn.MultiheadAttention):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        return super().forward(*inputs, **options)


class NoForward(nn.MultiheadAttention):
    """A subclass that computes what torch does."""

    def doubled(self) -> int:
        return 2 * int(self.embed_dim)


class OwnAttribute(NoForward):
    method = "mine"


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def test_what_cannot_be_converted_is_left_alone_with_a_reason() -> None:
    parametrized, projected, replaced, quantized = (nn.MultiheadAttention(8, 2) for _ in range(4))
    nn.utils.parametrize.register_parametrization(parametrized, "in_proj_weight", Halved())
    nn.utils.parametrize.register_parametrization(projected.out_proj, "weight", Halved())
    replaced.forward = lambda *_, **__: None
    quantized.out_proj = nn.Identity()
    quantized.out_proj.weight = torch.zeros(8, 8, dtype=torch.int8)
    model = nn.ModuleDict(
        {
            "own": OwnForward(8, 2),
            "quantizable": torch.ao.nn.quantizable.MultiheadAttention(8, 2),
            "parametrized": parametrized,
            "projected": projected,
            "replaced": replaced,
            "quantized": quantized,
            "attribute": OwnAttribute(8, 2),
            "plain": nn.MultiheadAttention(8, 2),
        }
    )
    before = snapshot(model)
    report = convert(model)
    assert report.converted == ("plain",)
    reasons = ["of its own", "of its own", "parametrized", "parametrized", "replaced on the object", "quantized", "own"]
    for (name, reason), expected in zip(report.skipped.items(), reasons, strict=True):
        assert expected in reason, name
    restore(model)
    assert snapshot(model) == before


def test_subclasses_without_a_forward_are_converted() -> None:
    model = nn.ModuleDict({"attention": NoForward(8, 2)})
    x = torch.randn(5, 2, 8)
    exact = model["attention"](x, x, x)[0]
    assert convert(model, budget=LARGE).converted == ("attention",)
    for copied in (model, copy.deepcopy(model), reloaded(model)):
        attention = copied["attention"]
        torch.testing.assert_close(attention(x, x, x)[0], exact)
        assert attention.doubled() == 16
        assert isinstance(attention, NoForward)
        restore(copied)
        assert type(attention) is NoForward


def reloaded(model: Any) -> Any:
    """Saved and loaded as a whole."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@torch.no_grad()
@pytest.mark.parametrize("duplicate", [copy.deepcopy, reloaded])
def test_copies_compute_the_same_and_can_be_restored(duplicate: Any) -> None:
    model = encoder().eval()
    x, padding = padded_input()
    exact = model(x, src_key_padding_mask=padding)
    convert(model, budget=3)
    twin = duplicate(model)
    assert torch.equal(twin(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding))
    assert len(restore(twin)) == 2
    assert twin.use_nested_tensor
    torch.testing.assert_close(twin(x, src_key_padding_mask=padding), exact)
    assert model.layers[0].self_attn.method == "cluster"  # the first one is as it was


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("skeinformer", {"budget": 3, "num_pilots": 2, "seed": 7, "filter": "*layers.1.*"}),
        ("cluster", {"budget": 3, "decoder_cross_attention": True}),
        ("linformer", {"budget": 3, "max_len": 12}),
        ("performer", {"budget": 4, "filter": "encoder.*"}),
    ],
)
@torch.no_grad()
def test_arguments_and_a_state_dict_are_the_converted_model(method: str, options: dict[str, Any]) -> None:
    def build() -> nn.Transformer:
        return nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True).eval()

    model, twin = build(), build()
    arguments = json.loads(json.dumps(convert(model, method, **options).arguments()))
    report = convert(twin, **arguments)
    twin.load_state_dict(model.state_dict())
    inputs = torch.randn(2, 12, 8), torch.randn(2, 7, 8)
    assert torch.equal(twin(*inputs), model(*inputs))
    assert report.arguments() == arguments
    restore(model)
    assert not torch.allclose(twin(*inputs), model(*inputs), atol=1e-4)


def test_an_error_changes_nothing() -> None:
    model = encoder()
    before = snapshot(model)
    for method, options, error in [
        ("skienformer", {}, ValueError),
        ("skeinformer", {"num_pilot": 3}, TypeError),
        ("skeinformer", {"budget": 0}, ValueError),
        ("linformer", {}, ValueError),
        ("reformer", {}, ValueError),
        ("skeinformer", {"decoder_cross_attention": 1}, TypeError),
        ("skeinformer", {"self_attention": True}, TypeError),
    ]:
        with pytest.raises(error):
            convert(model, method, **options)
    assert snapshot(model) == before


def test_layers_built_as_ours_are_changed_and_restored() -> None:
    model = nn.Sequential(skeinformer.models.MultiheadAttention(8, 2, method="vmean"))
    convert(model, "cluster", budget=4)
    assert model[0].method == "cluster"
    model.eval().to(torch.float64)
    restore(model)
    assert model[0].method == "vmean"
    assert not model[0].attention.training
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    model[0](x, x, x)


def test_the_report_names_what_changed_and_what_did_not() -> None:
    report = convert(nn.Transformer(8, 2, 1, 1, 16, batch_first=True), "performer", budget=32)
    assert all(name in str(report) for name in (*report.converted, *report.skipped.values()))
    assert report.notes == ()
    linformer = encoder()
    assert "160 new parameters" in convert(linformer, "linformer", max_len=20, budget=4).notes[0]
    linformer(padded_input()[0])
    restore(linformer)
    assert list(linformer.state_dict()) == list(encoder().state_dict())


class OwnAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_a_model_without_layers_of_torch_is_told_the_way_that_fits() -> None:
    with pytest.warns(UserWarning, match="nothing was converted") as caught:
        (note,) = convert(nn.Sequential(OwnAttention(), OwnAttention())).notes
    assert caught[0].filename == __file__
    assert "sketched" in note
    with pytest.warns(UserWarning, match="no module called attention"):
        assert convert(nn.Linear(2, 2)).converted == ()
    for function in (convert, restore):
        with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got str"):
            function("model")  # type: ignore[arg-type]


def test_a_decoder_is_warned_of_once() -> None:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8, batch_first=True), 3)
    with pytest.warns(UserWarning, match="3 of 6 attention layers of TransformerDecoder are causal") as caught:
        report = convert(decoder, "cluster")
    assert len(caught) == 1
    assert report.converted == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(decoder, "cluster", decoder_cross_attention=True)
        convert(nn.Transformer(8, 2, 1, 1, 8, batch_first=True), "cluster")
