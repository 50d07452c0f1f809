"""Errors say what was expected, what came and what to do."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skeinformer import METHODS, SkeinNoise, build, skein_attention
from tests.helpers import SHARED_QK, VARIANTS, generator, inputs_for, tensors

Q, K, V = (x.detach() for x in tensors(2, 3, 5, 7, p=4, p_v=6))
MASK = torch.ones(2, 7, dtype=torch.bool)


def call_function(q: Any, k: Any, v: Any, **options: Any) -> Tensor:
    return skein_attention(q, k, v, budget=3, **options)


def call_module(name: str) -> Callable[..., Tensor]:
    return VARIANTS[name].build(budget=3)


CALLS = {"skein_attention": call_function, **{name: call_module(name) for name in METHODS}}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)

SHAPES = {
    "rank 3": ((Q[0], K, V), "query has shape (3, 5, 4), expected four dimensions (batch, heads, tokens, width)"),
    "rank 5": ((Q, K[None], V), "key has shape (1, 2, 3, 7, 4), expected four dimensions"),
    "rank 2": ((Q, K, V[0, 0]), "value has shape (7, 6), expected four dimensions"),
    "no tokens": ((Q[:, :, :0], K, V), "query has shape (2, 3, 0, 4), expected four dimensions"),
    "no keys": ((Q, K[:, :, :0], V), "key has shape (2, 3, 0, 4)"),
    "no width": ((Q, K, V[..., :0]), "value has shape (2, 3, 7, 0)"),
    "batch": ((Q, K[:1], V), "key has shape (1, 3, 7, 4), expected (2, 3, keys, 4) to match the query's (2, 3, 5, 4)"),
    "heads": ((Q, K[:, :1], V), "key has shape (2, 1, 7, 4), expected (2, 3, keys, 4)"),
    "width": ((Q, K[..., :3], V), "key has shape (2, 3, 7, 3), expected (2, 3, keys, 4)"),
    "value tokens": ((Q, K, V[:, :, :6]), "value has shape (2, 3, 6, 6), expected (2, 3, 7, width) to match the key's"),
    "value batch": ((Q, K, V[:1]), "value has shape (1, 3, 7, 6), expected (2, 3, 7, width)"),
}


@every_call
@pytest.mark.parametrize("case", SHAPES)
def test_shapes(call: Callable[..., Tensor], case: str) -> None:
    inputs, message = SHAPES[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(*inputs)


@every_call
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("wrong", [None, [[1.0]], "q", 3.0])
def test_what_is_no_tensor(call: Callable[..., Tensor], position: int, wrong: object) -> None:
    inputs: list[Any] = [Q, K, V]
    inputs[position] = wrong
    name = ("query", "key", "value")[position]
    with pytest.raises(TypeError, match=f"{name} must be a tensor, got {type(wrong).__name__}"):
        call(*inputs)


DTYPES = {
    "key": (Q, K.float(), V),
    "value": (Q, K, V.half()),
    "query": (Q.bfloat16(), K, V),
    "integers": (Q.long(), K.long(), V.long()),
    "one of integers": (Q, K, V.long()),
    "booleans": (Q.bool(), K.bool(), V.bool()),
    "complex": (Q.to(torch.complex64), K.to(torch.complex64), V.to(torch.complex64)),
}


@every_call
@pytest.mark.parametrize("case", DTYPES)
def test_dtypes(call: Callable[..., Tensor], case: str) -> None:
    inputs = DTYPES[case]
    found = ", ".join(str(x.dtype) for x in inputs)
    with pytest.raises(TypeError, match=re.escape(f"query, key and value have dtypes {found}")) as error:
        call(*inputs)
    assert "float16, bfloat16, float32, float64" in str(error.value)
    assert ".to(dtype)" in str(error.value)


@every_call
@pytest.mark.parametrize("case", ["integers", "one of integers", "booleans", "complex"])
def test_autocast_does_not_turn_other_dtypes_into_floats(call: Callable[..., Tensor], case: str) -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TypeError, match="query, key and value have dtypes"),
    ):
        call(*DTYPES[case])


@every_call
def test_devices(call: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="query, key and value are on cpu, meta, cpu; move them to one device"):
        call(Q, K.to("meta"), V)
    with pytest.raises(ValueError, match="key_mask is on meta, the tensors are on cpu"):
        call(Q, K, V, key_mask=MASK.to("meta"))


MASKS = {
    "integers": (
        {"key_mask": MASK.long()},
        TypeError,
        "key_mask is torch.int64, expected a boolean tensor, True = real",
    ),
    "floats": ({"query_mask": torch.zeros(2, 5)}, TypeError, "query_mask is torch.float32, expected a boolean tensor"),
    "list": ({"key_mask": MASK.tolist()}, TypeError, "key_mask is list, expected a boolean tensor"),
    "length": ({"key_mask": MASK[:, :5]}, ValueError, "key_mask has shape (2, 5), expected (2, 7) = (batch, keys)"),
    "queries": ({"query_mask": MASK}, ValueError, "query_mask has shape (2, 7), expected (2, 5) = (batch, queries)"),
    "batch": ({"key_mask": MASK[:1]}, ValueError, "key_mask has shape (1, 7), expected (2, 7)"),
    "rank": ({"key_mask": MASK[:, None, None]}, ValueError, "key_mask has shape (2, 1, 1, 7), expected (2, 7)"),
}


@every_call
@pytest.mark.parametrize("case", MASKS)
def test_masks(call: Callable[..., Tensor], case: str) -> None:
    options, kind, message = MASKS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call(Q, K, V, **options)


@pytest.mark.parametrize("name", METHODS)
def test_head_width_of_a_module(name: str) -> None:
    module = VARIANTS[name].build(head_dim=8)
    with pytest.raises(
        ValueError, match=re.escape("query has head width 4, but this module was built with self.head_dim=8")
    ):
        module(Q, K, V)


@pytest.mark.parametrize("name", ["budget", "num_pilots", "num_checks"])
def test_counts(name: str) -> None:
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
            skein_attention(Q, K, V, **{name: value})
    for wrong in (2.5, "8", True):
        with pytest.raises(TypeError, match=f"{name} must be an integer of at least 1, got {wrong!r}"):
            skein_attention(Q, K, V, **{name: wrong})


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("argument", ["head_dim", "budget", "max_len"])
def test_counts_of_build(name: str, argument: str) -> None:
    given: dict[str, Any] = {"head_dim": 4, argument: 0}
    with pytest.raises(ValueError, match=f"{argument} must be at least 1, got 0"):
        build(name, **given)
    with pytest.raises(TypeError, match=f"{argument} must be an integer of at least 1, got 1.5"):
        build(name, **{**given, argument: 1.5})


@pytest.mark.parametrize("seed", ["7", 1.5])
def test_seed_that_is_no_integer(seed: object) -> None:
    with pytest.raises(TypeError, match="seed"):
        build("skeinformer", head_dim=4, seed=seed)


CHOICES = {
    "columns": ("importence", "columns='importence' is not known; did you mean 'importance'?"),
    "row_norm": ("adaptiv", "row_norm='adaptiv' is not known; did you mean 'adaptive'?"),
}


@pytest.mark.parametrize("option", CHOICES)
def test_choices(option: str) -> None:
    value, message = CHOICES[option]
    with pytest.raises(ValueError, match=re.escape(message)):
        skein_attention(Q, K, V, **{option: value})
    with pytest.raises(ValueError, match=re.escape(message)):
        build("skeinformer", head_dim=4, **{option: value})
    with pytest.raises(ValueError, match=f"{option}=None is not known"):
        skein_attention(Q, K, V, **{option: None})


def test_unknown_method() -> None:
    with pytest.raises(
        ValueError, match=re.escape("unknown attention 'skienformer'; did you mean 'skeinformer'?")
    ) as error:
        build("skienformer", head_dim=4)
    assert all(name in str(error.value) for name in METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_unknown_option(name: str) -> None:
    """Nothing is dropped silently."""
    with pytest.raises(TypeError, match="has no option 'bugdet'"):
        build(name, head_dim=4, bugdet=3)


def test_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(TypeError, match="attention 'skeinformer' has no option 'num_pilot'; did you mean 'num_pilots'"):
        build("skeinformer", head_dim=4, num_pilot=3)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.random])
def test_noise_of_another_shape(name: str) -> None:
    module = VARIANTS[name].build(budget=3)
    q, k, v = inputs_for(name, 2, 3, 5, 7)
    noise = module.draw_noise(q[:1], k[:1], lambda *shape, dtype=torch.float32: torch.rand(1, 3, *shape, dtype=dtype))
    assert noise is not None
    with pytest.raises(ValueError, match=r"noise has shapes .*; draw it with the module.s sample_noise"):
        module(q, k, v, noise=noise)
    with pytest.raises(ValueError, match="noise has shapes"):
        module(q[:1], k[:1], v[:1], noise=(*noise, noise[0]))


@pytest.mark.parametrize("name", METHODS)
def test_cross_attention(name: str) -> None:
    """Works, or says before any number is drawn why it does not and what to do: as the table has it."""
    module, source = VARIANTS[name].build(budget=3), generator(1)
    if METHODS[name].cross_attention:
        assert module(Q, K, V, generator=source).shape == (2, 3, 5, 6)
        return
    before = source.get_state()
    message = "pass the queries twice" if name in SHARED_QK else "query has 5 tokens and key 7.*needs the same number"
    with pytest.raises(ValueError, match=message):
        module(Q, K, V, generator=source)
    assert torch.equal(source.get_state(), before)


@pytest.mark.parametrize("name", sorted(SHARED_QK))
def test_a_key_that_is_not_the_query(name: str) -> None:
    with pytest.raises(ValueError, match="key is another tensor than query; tie the two projections"):
        VARIANTS[name].build(budget=3)(Q, Q.clone(), V[:, :, :5])


def test_noise_for_a_method_that_takes_none() -> None:
    with pytest.raises(ValueError, match=re.escape("noise has shapes [(2, 3, 5)], expected []")):
        build("vmean", head_dim=4)(Q, K, V, noise=(torch.rand(2, 3, 5),))


def test_noise_on_another_device() -> None:
    noise = SkeinNoise(torch.rand(2, 3, 5, device="meta"), torch.rand(2, 3, 7, device="meta"))
    with pytest.raises(ValueError, match="noise is not on cpu"):
        skein_attention(Q, K, V, budget=3, noise=noise)


def test_noise_names_its_parts() -> None:
    noise = SkeinNoise(torch.rand(2, 3, 4), torch.rand(2, 3, 7))
    message = "noise has shapes [(2, 3, 4), (2, 3, 7)], expected [(2, 3, 5), (2, 3, 7)] (pilots, columns)"
    with pytest.raises(ValueError, match=re.escape(message)):
        skein_attention(Q, K, V, budget=3, noise=noise)


def test_a_method_without_attend_cannot_be_made() -> None:
    from skeinformer import Attention

    with pytest.raises(TypeError, match="attend"):
        Attention(head_dim=4)
    assert issubclass(Attention, nn.Module)


def test_errors_come_before_numbers_are_drawn() -> None:
    source = generator(1)
    before = source.get_state()
    with pytest.raises(ValueError, match="key has shape"):
        skein_attention(Q, K[..., :3], V, generator=source)
    assert torch.equal(source.get_state(), before)
