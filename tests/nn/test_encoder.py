"""Converted encoders of torch: short calls are torch's own, long ones are sketched. No clock is asked."""

import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import transformer
from torch.nn.utils import prune

import skeinformer
from skeinformer import convert, restore
from skeinformer.nn import encoder as ours
from tests.helpers import lengths_mask
from tests.nn.test_convert import snapshot

WIDTH, HEADS = 32, 4
SHORT_N, MIDDLE_N, LONG_N = 24, 256, 2048


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        yield


class Taken:
    """What computed the calls: torch's one call for a layer, nested tensors, our sketches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole = self.packed = self.sketched = 0
        one_call, forward = torch._transformer_encoder_layer_fwd, skeinformer.Attention.forward

        def whole(src: Tensor, *args: Any) -> Tensor:
            self.whole += 1
            self.packed += src.is_nested
            return one_call(src, *args)

        def sketched(module: skeinformer.Attention, *inputs: Tensor, **options: Any) -> Tensor:
            self.sketched += 1
            return forward(module, *inputs, **options)

        monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", whole)
        monkeypatch.setattr(skeinformer.Attention, "forward", sketched)

    def of(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[int, int, int]:
        """(whole, packed, sketched) of one call."""
        self.whole = self.packed = self.sketched = 0
        model(*args, **kwargs)
        return self.whole, self.packed, self.sketched


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 48, **{"dropout": 0.0, "batch_first": True, **options}).eval()


def stack(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(**options), 2, norm=nn.LayerNorm(WIDTH)).eval()


def padded(n: int) -> tuple[Tensor, Tensor]:
    """Half of it is padding, True."""
    return torch.randn(4, n, WIDTH), ~lengths_mask([n, n // 4, n // 2, n // 4], n)


@pytest.mark.parametrize("method", ["cluster", "skeinformer"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_short_calls_are_torchs_own_and_long_ones_are_sketched(
    method: str, norm_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = layer(norm_first=norm_first)
    model = copy.deepcopy(exact)
    convert(model, method)
    taken = Taken(monkeypatch)
    with torch.no_grad():
        x = torch.randn(2, SHORT_N, WIDTH)
        assert torch.equal(model(x), exact(x))
        assert taken.of(model, x) == (1, 0, 0)
        assert taken.of(model, torch.randn(1, MIDDLE_N, WIDTH)) == (0, 0, 0)  # the fused kernel is faster
        assert taken.of(model, torch.randn(1, LONG_N, WIDTH)) == (0, 0, 1)
        assert taken.of(exact, torch.randn(1, LONG_N, WIDTH)) == (1, 0, 0)


def test_long_batches_are_sketched_and_short_ones_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = stack()
    model = copy.deepcopy(exact)
    convert(model)
    taken = Taken(monkeypatch)
    with torch.no_grad():
        x, padding = padded(SHORT_N)
        assert torch.equal(model(x, src_key_padding_mask=padding), exact(x, src_key_padding_mask=padding))
        assert taken.of(model, x, src_key_padding_mask=padding) == (2, 2, 0)
        assert taken.of(model, x) == (2, 0, 0)
        few = ~lengths_mask([SHORT_N, SHORT_N, SHORT_N, SHORT_N - 1], SHORT_N)
        assert taken.of(model, x, src_key_padding_mask=few) == (0, 0, 0)  # there is nothing to gain
        x, padding = padded(LONG_N)
        assert taken.of(model, x, src_key_padding_mask=padding) == (0, 0, 2)
        assert not model.use_nested_tensor


def test_rows_of_real_tokens_do_not_depend_on_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack()
    convert(model)
    taken = Taken(monkeypatch)
    x, padding = padded(SHORT_N)
    few = torch.zeros_like(padding)
    few[1] = padding[1]  # too few to pack
    with torch.no_grad():
        packed, whole = (model(x, src_key_padding_mask=mask)[1] for mask in (padding, few))
        assert (taken.whole, taken.packed) == (2, 2)
    real = ~padding[1]
    torch.testing.assert_close(packed[real], whole[real])
    assert torch.equal(packed[~real], model.norm(torch.zeros(WIDTH)).expand(int((~real).sum()), -1))


def told(name: str, model: nn.TransformerEncoder) -> dict[str, Any]:
    """A model, or a call of it, that torch or we must compute operation by operation."""
    x, padding = padded(SHORT_N)
    call: dict[str, Any] = {"src": x}
    if name == "hooks":
        model.layers[1].linear1.register_forward_hook(lambda *_: None)
    elif name == "scale":
        convert(model, scale=0.3)
    elif name == "min_length=0":
        convert(model, min_length=0, budget=8)
    elif name == "training":
        model.train()
    elif name == "filter":
        restore(model.layers[0])
        convert(model, filter="layers.0.*", min_length=0, budget=8)
    elif name == "all of one example is padding":
        padding[1] = True
        call["src_key_padding_mask"] = padding.flip(1)  # not what torch packs
    return call


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hooks", (1, 0, 0)),
        ("scale", (0, 0, 0)),
        ("min_length=0", (0, 0, 2)),
        ("training", (0, 0, 0)),
        ("filter", (1, 0, 1)),
        ("all of one example is padding", (0, 0, 0)),
    ],
)
def test_what_must_not_be_torchs_own(
    name: str, expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stack()
    convert(model)
    call = told(name, model)
    taken = Taken(monkeypatch)
    with torch.no_grad():
        assert taken.of(model, **call) == expected
        assert model(**call).isfinite().all()


def test_scale_is_that_of_the_layer() -> None:
    model = layer()
    exact, x = copy.deepcopy(model), torch.randn(2, SHORT_N, WIDTH)
    convert(model, scale=2.0)
    with torch.no_grad():
        assert not torch.allclose(model(x), exact(x))


@pytest.mark.parametrize("where", ["layers.0", "layers.1", "layers.1.self_attn", "layers.0.linear2"])
def test_hooks_see_what_is_padded(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack()
    x, padding = padded(SHORT_N)
    convert(model)
    seen: list[bool] = []
    model.get_submodule(where).register_forward_pre_hook(lambda _, args: seen.append(args[0].is_nested))
    taken = Taken(monkeypatch)
    with torch.no_grad():
        assert taken.of(model, x, src_key_padding_mask=padding)[1] == 0
    assert seen == [False]


def test_a_layer_that_torch_computes_by_parts_takes_what_was_packed() -> None:
    exact = stack()
    exact.layers[1].norm1.eps = 1e-4  # the one call for a layer wants the same twice
    model = copy.deepcopy(exact)
    convert(model)
    x, padding = padded(SHORT_N)
    with torch.no_grad():
        torch.testing.assert_close(model(x, src_key_padding_mask=padding), exact(x, src_key_padding_mask=padding))


def test_nested_tensors_of_a_caller_are_refused_as_before() -> None:
    model = stack()
    convert(model)
    nested = torch.nested.nested_tensor([torch.randn(5, WIDTH), torch.randn(9, WIDTH)])
    for part in (model, model.layers[0]):
        with torch.no_grad(), pytest.raises(ValueError, match="nested tensor"):
            part(nested)


@pytest.mark.parametrize("n", [SHORT_N, MIDDLE_N])
def test_masks_mean_the_same_at_every_length(n: int) -> None:
    model = stack()
    convert(model)
    x, padding = padded(n)
    causal = nn.Transformer.generate_square_subsequent_mask(n)
    with torch.no_grad():
        with pytest.raises(ValueError, match="attn_mask is not possible"):
            model(x, mask=causal)
        with pytest.raises(ValueError, match="numbers other than 0 and -inf"):
            model(x, src_key_padding_mask=torch.where(padding, -2.0, 0.0))
        padding[1:] = True
        assert model(x, src_key_padding_mask=padding).isfinite().all()
        assert model(x, src_key_padding_mask=padding | True).isfinite().all()


class Adapted(nn.Module):
    """A linear layer and an adapter; it shows the weight of the layer, as adapters do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.added = nn.Linear(base.in_features, base.out_features)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.added(x)


def replace(part: str, layer: nn.TransformerEncoderLayer) -> None:
    """Change a part of a layer in a way that torch's one call for it does not see."""
    if part == "adapter":
        layer.linear1 = Adapted(layer.linear1)  # type: ignore[assignment]
    elif part == "another norm":
        layer.norm1, layer.norm2 = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)  # type: ignore[assignment]
    elif part == "norm without weights":
        layer.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
    elif part == "forward of the object":
        layer.linear2.forward = lambda x: 2 * F.linear(x, layer.linear2.weight)  # type: ignore[method-assign]
    elif part == "dropout in training":
        layer.dropout1 = nn.Dropout(0.999).train()
    elif part == "activation":
        layer.activation = F.silu
    elif part == "approximate gelu":
        layer.activation, layer.activation_relu_or_gelu = nn.GELU(approximate="tanh"), 2
    elif part == "pruned":
        prune.random_unstructured(layer.linear1, "weight", amount=0.5)


PARTS = [
    "adapter",
    "another norm",
    "norm without weights",
    "forward of the object",
    "dropout in training",
    "activation",
    "approximate gelu",
    "pruned",
]


@pytest.mark.parametrize("part", PARTS)
def test_parts_that_torch_would_overlook_are_called(part: str) -> None:
    """Torch's one call reads weights alone: short sequences would be by another model than long ones."""
    model = stack()
    convert(model)
    for each in model.layers:
        replace(part, each)
    x, padding = padded(SHORT_N)
    rows = ~padding
    for call, where in (({}, torch.ones_like(rows)), ({"src_key_padding_mask": padding}, rows)):
        torch.manual_seed(0)
        expected = model(x, **call)[where]  # gradients are recorded, which torch's one call does not do
        torch.manual_seed(0)
        with torch.no_grad():
            torch.testing.assert_close(model(x, **call)[where], expected)


def test_quantized_parts_are_called() -> None:
    model = stack()
    convert(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    x, padding = padded(SHORT_N)
    with torch.no_grad():
        assert quantized(x).shape == quantized(x, src_key_padding_mask=padding).shape == x.shape


def test_autocast_on_a_cpu_gives_one_dtype_at_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's one call casts what its parts do not, and what it has packed fails there."""
    model = stack()
    convert(model)
    taken = Taken(monkeypatch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = set()
        for n in (SHORT_N, MIDDLE_N, LONG_N):
            x, padding = padded(n)
            found |= {model(x).dtype, model.layers[0](x).dtype, model(x, src_key_padding_mask=padding).dtype}
        assert taken.whole == 0
    assert found == {torch.float32}


def test_an_encoder_that_an_earlier_version_has_converted_is_restored() -> None:
    model = stack()
    convert(model)
    model.__class__ = nn.TransformerEncoder
    model.use_nested_tensor, model.__dict__["_use_nested_tensor_before"] = False, True
    convert(model, budget=4)
    restore(model)
    assert type(model) is nn.TransformerEncoder
    assert model.use_nested_tensor
    assert "_use_nested_tensor_before" not in vars(model)


def test_second_conversions_verdicts_and_groups_of_layers_go_back_to_what_was() -> None:
    model = nn.Sequential(stack(), layer())
    before = snapshot(model)
    convert(model, budget=4)
    convert(model, "skeinformer", filter="0.layers.1.*")
    assert type(model[0]) is ours.TransformerEncoder
    assert {type(part) for part in (*model[0].layers, model[1])} == {ours.TransformerEncoderLayer}
    restore(model)
    assert snapshot(model) == before
    verdict = {"layers": {"0.layers.0.self_attn": {"method": "cluster"}, "1.self_attn": {"method": "reformer"}}}
    with pytest.raises(ValueError, match="the same vectors as queries and as keys"):
        skeinformer.apply(model, verdict)
    assert snapshot(model) == before


def test_copies_pickles_and_compiled_models() -> None:
    model = stack()
    convert(model, budget=4)
    x, padding = padded(SHORT_N)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert torch.equal(twin(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding))
        restore(twin)
        assert type(twin) is nn.TransformerEncoder
        assert twin.use_nested_tensor
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        rows = ~padding
        expected = model(x, src_key_padding_mask=padding)[rows]
        torch.testing.assert_close(compiled(x, src_key_padding_mask=padding)[rows], expected)


def test_a_subclass_of_an_encoder_keeps_its_class_and_never_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Encoder(nn.TransformerEncoder):
        pass

    class Layer(nn.TransformerEncoderLayer):
        pass

    model = Encoder(Layer(WIDTH, HEADS, 48, batch_first=True), 1).eval()
    convert(model)
    taken = Taken(monkeypatch)
    x, padding = padded(SHORT_N)
    with torch.no_grad():
        assert taken.of(model, x, src_key_padding_mask=padding) == (0, 0, 0)
    assert type(model) is Encoder
    assert type(model.layers[0]) is Layer
    restore(model)
    assert model.use_nested_tensor


def test_a_layer_moved_into_an_encoder_of_torch_is_sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = layer(), layer()
    convert(first)
    second.self_attn = first.self_attn
    taken = Taken(monkeypatch)
    with torch.no_grad():
        assert taken.of(second, torch.randn(1, LONG_N, WIDTH)) == (0, 0, 1)


def test_a_thread_does_not_decide_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a short call runs in one thread, a long one of the same layer in another is sketched."""
    model = layer()
    convert(model)
    taken = Taken(monkeypatch)
    merge = nn.MultiheadAttention.merge_masks
    begun: list[int] = []

    def meanwhile(module: nn.MultiheadAttention, *args: Any) -> Any:
        if not begun:
            begun.append(1)
            other = threading.Thread(target=lambda: torch.no_grad()(model)(torch.randn(1, LONG_N, WIDTH)))
            other.start()
            other.join()
        return merge(module, *args)

    monkeypatch.setattr(nn.MultiheadAttention, "merge_masks", meanwhile)
    with torch.no_grad():
        assert taken.of(model, torch.randn(1, SHORT_N, WIDTH)) == (1, 0, 1)


def test_torch_asks_the_flags_that_we_answer() -> None:
    """What the classes stand on: torch's forwards read these attributes."""
    layers = transformer.TransformerEncoderLayer.forward.__code__.co_names
    assert {"_qkv_same_embed_dim", "_transformer_encoder_layer_fwd"} <= set(layers)
    assert "use_nested_tensor" in transformer.TransformerEncoder.forward.__code__.co_names
