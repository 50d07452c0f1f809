"""`skeinformer.models.MultiheadAttention` is `torch.nn.MultiheadAttention` where the budget covers all keys."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from skeinformer.attention import METHODS
from skeinformer.models import MultiheadAttention
from tests.cases import cases
from tests.helpers import EXACT, lengths_mask, random_mask

pytestmark = pytest.mark.usefixtures("always_sketched")

LARGE = 64  # above every number of keys here
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False},
    "kdim": {"kdim": 6, "vdim": 10},
    "kdim-batch_first": {"kdim": 6, "batch_first": True},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
}


def pair(
    budget: int = LARGE,
    dtype: torch.dtype = torch.float64,
    method: str = "skeinformer",
    seed: int | None = 0,
    **options: Any,
) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's and ours, with the same weights and biases that are not zero."""
    theirs = nn.MultiheadAttention(8, 2, dtype=dtype, **options)
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    ours = MultiheadAttention(8, 2, dtype=dtype, method=method, budget=budget, seed=seed, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(
    module: nn.MultiheadAttention, b: int | None, n: int, n_k: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Query, key and value in the layout of the module; b = None is without a batch."""
    leading = {None: lambda n: (n,), True: lambda n: (b, n), False: lambda n: (n, b)}
    layout = leading[None if b is None else module.batch_first]
    shapes = [(*layout(n), 8), (*layout(n_k), module.kdim), (*layout(n_k), module.vdim)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def run(module: nn.Module, tensors: list[Tensor], rows: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Output and gradients of a function of it, with respect to inputs and parameters; only `rows` of it if given."""
    output, weights = module(*tensors, need_weights=False, **options)
    assert weights is None
    seen = output if rows is None else output[rows]
    weight = torch.randn(seen.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaves = [*{id(x): x for x in [*tensors, *module.parameters()]}.values()]
    gradients = torch.autograd.grad((seen * weight.to(seen.dtype)).sum(), leaves)
    return [seen, *gradients]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("b", [None, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_equals_torch(kind: str, b: int | None, padded: bool) -> None:
    theirs, ours = pair(**KINDS[kind])
    tensors = inputs(theirs, b, 7, 11)
    padding = None
    if padded:
        padding = ~random_mask(b or 1, 11)
        padding = padding[0] if b is None else padding
    torch.testing.assert_close(
        run(ours, tensors, key_padding_mask=padding), run(theirs, tensors, key_padding_mask=padding)
    )


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("floats", [False, True])
def test_self_attention_equals_torch_in_real_rows(batch_first: bool, floats: bool) -> None:
    theirs, ours = pair(batch_first=batch_first)
    x = inputs(theirs, 3, 9, 9)[0]
    padding = ~random_mask(3, 9)
    mask = torch.zeros(3, 9, dtype=torch.float64).masked_fill(padding, -torch.inf) if floats else padding
    rows = ~padding if batch_first else ~padding.T
    expected = run(theirs, [x, x, x], rows, key_padding_mask=mask)
    torch.testing.assert_close(run(ours, [x, x, x], rows, key_padding_mask=mask), expected)


@settings(max_examples=cases(40))
@given(st.data())
def test_any_shape_and_mask_equals_torch(data: st.DataObject) -> None:
    sizes = st.integers(1, 9)
    options = {name: data.draw(st.booleans(), name) for name in ("batch_first", "bias", "add_bias_kv", "add_zero_attn")}
    theirs, ours = pair(**options, kdim=data.draw(st.sampled_from([None, 8, 5])))
    b = data.draw(st.one_of(st.none(), st.integers(1, 4)))
    same = theirs.kdim == 8 and data.draw(st.booleans(), "self-attention")
    tensors = inputs(theirs, b, data.draw(sizes, "n"), data.draw(sizes, "n_k"))
    tensors = tensors[:1] * 3 if same else tensors
    n_k = tensors[1].shape[1 if options["batch_first"] and b is not None else 0]
    real = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=n_k, max_size=n_k), min_size=4, max_size=4))
    )
    real[:, data.draw(st.integers(0, n_k - 1))] = True  # torch gives NaN without any
    padding = ~(real[0] if b is None else real[:b])
    rows = None
    if same:
        rows = ~padding if options["batch_first"] or b is None else ~padding.T
    expected = run(theirs, tensors, rows, key_padding_mask=padding)
    torch.testing.assert_close(run(ours, tensors, rows, key_padding_mask=padding), expected)


@pytest.mark.parametrize("method", sorted(name for name in METHODS if name in EXACT))
def test_every_exact_method_equals_torch_at_full_budget(method: str) -> None:
    budget = EXACT[method] * 11
    theirs, ours = pair(budget, method=method)
    theirs.eval(), ours.eval()
    x = inputs(theirs, 2, 11, 11)[0]
    padding = ~lengths_mask([11, 6], 11)
    rows = ~padding.T
    expected = run(theirs, [x, x, x], rows, key_padding_mask=padding)
    torch.testing.assert_close(
        run(ours, [x, x, x], rows, key_padding_mask=padding), expected, rtol=1e-5, atol=1e-6
    )  # the iterated inverse of nystromformer is one to 1e-6


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_other_precisions(dtype: torch.dtype, tolerance: float) -> None:
    theirs, ours = pair(dtype=dtype)
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}
    tensors = inputs(theirs, 2, 9, 12, dtype)
    expected, found = run(theirs, tensors), run(ours, tensors)
    assert found[0].dtype == dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_load_both_ways_and_start_the_same(kind: str) -> None:
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(8, 2, **KINDS[kind])
    torch.manual_seed(3)
    ours = MultiheadAttention(8, 2, **KINDS[kind])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
    torch.manual_seed(4)
    ours._reset_parameters()
    torch.manual_seed(4)
    theirs._reset_parameters()
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
    nn.init.normal_(ours.out_proj.weight)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.out_proj.weight, ours.out_proj.weight)


def test_padded_queries_are_zero_before_the_output_projection() -> None:
    _, ours = pair(budget=3, batch_first=True)
    x = inputs(ours, 2, 9, 9)[0]
    padding = ~lengths_mask([9, 4], 9)
    with torch.no_grad():
        together, _ = ours(x, x, x, key_padding_mask=padding)
        torch.testing.assert_close(together[padding], ours.out_proj.bias.expand_as(together[padding]))
        other, _ = ours(x, x.clone(), x, key_padding_mask=padding)  # cross-attention: only keys are masked
    assert not torch.allclose(other[padding], ours.out_proj.bias.expand_as(other[padding]))


@torch.no_grad()
def test_a_small_budget_is_a_sketch_and_evaluation_repeats() -> None:
    theirs, ours = pair(budget=4, batch_first=True)
    x = inputs(ours, 2, 50, 50)[0]
    first = ours.eval()(x, x, x)[0]
    assert not torch.allclose(first, theirs(x, x, x)[0])
    assert torch.equal(ours(x, x, x)[0], first)
    assert not torch.equal(ours.train()(x, x, x)[0], ours(x, x, x)[0])
    unseeded = pair(budget=4, batch_first=True, seed=None)[1].eval()
    assert not torch.equal(unseeded(x, x, x)[0], unseeded(x, x, x)[0])


def test_all_padding_gives_the_bias_and_not_nan() -> None:
    _, ours = pair(batch_first=True)
    query, key, value = inputs(ours, 2, 5, 6)
    output, _ = ours(query, key, value, key_padding_mask=torch.ones(2, 6, dtype=torch.bool))
    torch.testing.assert_close(output, ours.out_proj.bias.expand_as(output))


def test_a_method_with_parameters_for_each_position() -> None:
    with pytest.raises(ValueError, match="max_len"):
        MultiheadAttention(8, 2, method="linformer")
    ours = MultiheadAttention(8, 2, method="linformer", max_len=20, budget=4, dtype=torch.bfloat16)
    assert list(ours.state_dict())[-1] == "attention.key_projection"
    assert ours.attention.key_projection.dtype == torch.bfloat16
    meta = MultiheadAttention(8, 2, method="linformer", max_len=20, budget=4, device="meta")
    assert meta.attention.key_projection.is_meta


def test_options_of_the_method_arrive() -> None:
    ours = MultiheadAttention(8, 2, method="skeinformer", budget=32, num_pilots=5, seed=3)
    assert (ours.attention.method.budget, ours.attention.method.num_pilots, ours.policy.seed) == (32, 5, 3)
    assert "method='skeinformer'" in repr(ours)
    assert MultiheadAttention(8, 2, method="nystromformer", conv_kernel=3).attention.conv.groups == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"need_weights": True}, "need_weights=True is not possible"),
        ({"attn_mask": torch.zeros(5, 5)}, "attn_mask is not possible"),
        ({"is_causal": True}, "is_causal=True is not possible"),
        ({"key_padding_mask": torch.full((2, 5), -1e9)}, "numbers other than 0 and -inf"),
        ({"key_padding_mask": torch.full((2, 5), torch.nan)}, "numbers other than 0 and -inf"),
        ({"key_padding_mask": torch.zeros(2, 6)}, re.escape("key_padding_mask has shape (2, 6), expected (2, 5)")),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    ours = pair(batch_first=True, dtype=torch.float32)[1]
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match=message):
        ours(x, x, x, **arguments)


def test_wrong_tensors_are_refused() -> None:
    ours = pair(dtype=torch.float32)[1]
    x = torch.randn(5, 2, 8)
    with pytest.raises(TypeError, match=r"int64, expected a boolean"):
        ours(x, x, x, key_padding_mask=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"query has shape \(5, 2, 7\).*the last of 8"):
        ours(x[..., :7], x, x)
    with pytest.raises(ValueError, match=r"key has shape \(5, 8\)"):
        ours(x, x[:, 0], x[:, 0])
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    with pytest.raises(ValueError, match="enable_nested_tensor=False"):
        ours(nested, nested, nested)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "must be greater than 0"),
        ({"method": "reformer"}, "the same vectors as queries and as keys"),
        ({"method": "bigbird", "add_bias_kv": True}, "bigbird is a pattern over one sequence"),
        ({"method": "longformer", "add_zero_attn": True}, "longformer is a pattern over one sequence"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(**{"embed_dim": 8, "num_heads": 2, **arguments})


@pytest.mark.parametrize("training", [False, True])
def test_compiles_without_breaks(training: bool) -> None:
    ours = pair(budget=4, batch_first=True, dtype=torch.float32)[1].train(training)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 20, 8)
    mask = torch.zeros(2, 20).masked_fill(~lengths_mask([20, 11], 20), -torch.inf)
    with torch.set_grad_enabled(training):
        output = compiled(x, x, x, key_padding_mask=mask)[0]
        if training:
            output.sum().backward()
        else:
            torch.testing.assert_close(output, ours(x, x, x, key_padding_mask=mask)[0])
    with pytest.raises(RuntimeError, match="numbers other than 0 and -inf"):
        compiled(x, x, x, key_padding_mask=mask.clamp(min=-5))
