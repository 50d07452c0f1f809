"""Errors say what was expected, what came and what to do, before any number is drawn."""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

from skeinformer import METHODS, build, skein_attention
from skeinformer.attention import SkeinNoise
from tests.helpers import SHARED_QK, VARIANTS, generator, inputs_for, tensors

Q, K, V = (x.detach() for x in tensors(2, 3, 5, 7, p=4, p_v=6))
MASK = torch.ones(2, 7, dtype=torch.bool)
U = torch.rand(2, 3, 5, generator=generator()), torch.rand(2, 3, 7, generator=generator())
NO_DTYPES = "query, key and value have dtypes "
Case = tuple[tuple[Any, Any, Any], dict[str, Any], type[Exception], str]


def shapes(q: Any, k: Any, v: Any, message: str) -> Case:
    return (q, k, v), {}, ValueError, message


def kinds(q: Any, k: Any, v: Any, message: str) -> Case:
    return (q, k, v), {}, TypeError, message


def option(name: str, value: Any, kind: type[Exception], message: str) -> Case:
    return (Q, K, V), {name: value}, kind, message


CASES: dict[str, Case] = {
    "rank 3": shapes(Q[0], K, V, "query has shape (3, 5, 4), expected four dimensions (batch, heads, tokens, width)"),
    "rank 5": shapes(Q, K[None], V, "key has shape (1, 2, 3, 7, 4), expected four dimensions"),
    "rank 2": shapes(Q, K, V[0, 0], "value has shape (7, 6), expected four dimensions"),
    "no tokens": shapes(Q[:, :, :0], K, V, "query has shape (2, 3, 0, 4), expected four dimensions"),
    "no keys": shapes(Q, K[:, :, :0], V, "key has shape (2, 3, 0, 4)"),
    "no width": shapes(Q, K, V[..., :0], "value has shape (2, 3, 7, 0)"),
    "batch": shapes(Q, K[:1], V, "key has shape (1, 3, 7, 4), expected (2, 3, keys, 4)"),
    "heads": shapes(Q, K[:, :1], V, "key has shape (2, 1, 7, 4), expected (2, 3, keys, 4)"),
    "width": shapes(Q, K[..., :3], V, "key has shape (2, 3, 7, 3), expected (2, 3, keys, 4)"),
    "value tokens": shapes(Q, K, V[:, :, :6], "value has shape (2, 3, 6, 6), expected (2, 3, 7, width)"),
    "value batch": shapes(Q, K, V[:1], "value has shape (1, 3, 7, 6), expected (2, 3, 7, width)"),
    "devices": shapes(Q, K.to("meta"), V, "query, key and value are on cpu, meta, cpu; move them to one device"),
    "None": kinds(None, K, V, "query must be a tensor, got NoneType"),
    "list": kinds(Q, [[1.0]], V, "key must be a tensor, got list"),
    "number": kinds(Q, K, 3.0, "value must be a tensor, got float"),
    "dtype of the key": kinds(Q, K.float(), V, NO_DTYPES + "torch.float64, torch.float32, torch.float64"),
    "dtype of the value": kinds(Q, K, V.half(), NO_DTYPES),
    "dtype of the query": kinds(Q.bfloat16(), K, V, NO_DTYPES),
    "integers": kinds(Q.long(), K.long(), V.long(), NO_DTYPES),
    "booleans": kinds(Q.bool(), K.bool(), V.bool(), NO_DTYPES),
    "complex": kinds(*(x.to(torch.complex64) for x in (Q, K, V)), NO_DTYPES),
    "mask of integers": option("key_mask", MASK.long(), TypeError, "key_mask is torch.int64, expected a boolean"),
    "mask of floats": option("query_mask", torch.zeros(2, 5), TypeError, "query_mask is torch.float32, expected"),
    "mask as a list": option("key_mask", MASK.tolist(), TypeError, "key_mask is list, expected a boolean tensor"),
    "mask length": option("key_mask", MASK[:, :5], ValueError, "key_mask has shape (2, 5), expected (2, 7)"),
    "mask of queries": option("query_mask", MASK, ValueError, "query_mask has shape (2, 7), expected (2, 5)"),
    "mask batch": option("key_mask", MASK[:1], ValueError, "key_mask has shape (1, 7), expected (2, 7)"),
    "mask rank": option("key_mask", MASK[:, None, None], ValueError, "key_mask has shape (2, 1, 1, 7)"),
    "mask device": option("key_mask", MASK.to("meta"), ValueError, "key_mask is on meta, the tensors are on cpu"),
    "generator": option("generator", 0, TypeError, "generator must be a torch.Generator or None, got int"),
    "noise, no tuple": option("noise", U[0], TypeError, "noise must be a tuple of floating point tensors"),
    "noise, no tensors": option("noise", (None, None), TypeError, "noise must be a tuple of floating point tensors"),
    "noise of integers": option("noise", (U[0].long(), U[1]), TypeError, "noise must be a tuple of floating point"),
    "noise device": option("noise", tuple(x.to("meta") for x in U), ValueError, "noise is not on cpu"),
    "noise shape": option(
        "noise",
        SkeinNoise(U[0][..., :4], U[1]),
        ValueError,
        "noise has shapes [(2, 3, 4), (2, 3, 7)], expected [(2, 3, 5), (2, 3, 7)] (pilots, columns)",
    ),
    "scale": option("scale", "x", TypeError, "scale must be a finite number"),
    "scale of NaN": option("scale", float("nan"), ValueError, "scale must be a finite number"),
    "num_checks": option("num_checks", -1, ValueError, "num_checks must be at least 1, got -1"),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_inputs(case: str) -> None:
    inputs, options, kind, message = CASES[case]
    with pytest.raises(kind, match=re.escape(message)):
        skein_attention(*inputs, budget=3, **options)


def test_noise_and_a_generator_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="both noise and generator"):
        skein_attention(Q, K, V, budget=3, noise=U, generator=generator())


def test_autocast_makes_floats_of_one_precision_and_nothing_else_a_float() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert skein_attention(Q.float(), K.bfloat16(), V.half(), budget=3).dtype == torch.bfloat16
        with pytest.raises(TypeError, match=NO_DTYPES):
            skein_attention(Q, K, V.long(), budget=3)


def certify(*inputs: Any, **options: Any) -> Any:
    return VARIANTS["cluster"].build(budget=3, seed=1).certify(*inputs, **options)


@pytest.mark.parametrize("call", [certify, *(VARIANTS[name].build(budget=3) for name in METHODS)])
def test_every_method_checks_its_inputs_before_it_draws(call: Callable[..., Tensor]) -> None:
    source = generator(1)
    before = source.get_state()
    with pytest.raises(ValueError, match="query has shape"):
        call(Q[0], K, V, generator=source)
    with pytest.raises(ValueError, match="key_mask has shape"):
        call(Q, K, V, key_mask=MASK[:1], generator=source)
    assert torch.equal(source.get_state(), before)


# what is wrong for an option beyond its type
WRONG: dict[tuple[str, str], tuple[Any, ...]] = {
    ("softmax", "dropout"): (-0.1, 1.0, float("nan"), "x"),
    ("informer", "factor"): (0.0, -1.0, float("nan"), float("inf")),
    ("nystromformer", "conv_kernel"): (4,),
    ("sketched", "sketch"): ("gausian", 3),
    ("longformer", "global_tokens"): ((0, -1), (True,)),
    ("blockbert", "shifts"): ((), (0, 0.5)),
    ("adaptive", "tolerance"): (0, -1.0, "x", float("nan")),
}
MAY_BE_ZERO = {("cluster", "num_steps"), ("cluster", "window")}


@pytest.mark.parametrize("name", {row.method: name for name, row in reversed(METHODS.items())}.values())
def test_wrong_options_of_a_method(name: str) -> None:
    """Every option by its type: a count, a flag, one of some words, or what WRONG has."""
    hints = get_type_hints(METHODS[name].method)
    for field in fields(METHODS[name].method):
        hint = hints[field.name]
        wrong = WRONG.get((name, field.name), ())
        if hint is bool:
            wrong += ("no", 2)
        elif hint is int or int in get_args(hint):
            wrong += (-1, 1.5, True, "8", *([] if (name, field.name) in MAY_BE_ZERO else [0]))
        elif all(isinstance(word, str) for word in get_args(hint)) and get_args(hint):
            wrong += ("other", 3, *([] if field.name == "sketch" else [None]))
        for value in wrong:
            with pytest.raises((TypeError, ValueError), match=field.name):
                build(name, head_dim=4, max_len=8, **{field.name: value})


def test_wrong_options_of_build() -> None:
    """Nothing is dropped without a word."""
    for argument in ("head_dim", "budget", "max_len"):
        for value in (0, 1.5):
            with pytest.raises((TypeError, ValueError), match=f"{argument} must be"):
                build("skeinformer", **{"head_dim": 4, argument: value})
    for seed in ("7", 1.5):
        with pytest.raises(TypeError, match="seed must be an integer or None"):
            build("skeinformer", head_dim=4, seed=seed)
    for scale in ("x", float("nan")):
        with pytest.raises((TypeError, ValueError), match="scale must be a finite number"):
            build("skeinformer", head_dim=4, scale=scale)
    with pytest.raises(ValueError, match=re.escape("query has head width 4, but this module was built with self")):
        VARIANTS["skeinformer"].build(head_dim=8)(Q, K, V)


def test_the_nearest_name_is_suggested() -> None:
    with pytest.raises(
        ValueError, match=re.escape("unknown attention 'skienformer'; did you mean 'skeinformer'?")
    ) as error:
        build("skienformer", head_dim=4)
    assert all(name in str(error.value) for name in METHODS)
    with pytest.raises(TypeError, match="attention 'skeinformer' has no option 'num_pilot'; did you mean 'num_pilots'"):
        build("skeinformer", head_dim=4, num_pilot=3)
    with pytest.raises(TypeError, match="has no option 'sid'; did you mean 'side'"):
        build("sketched", head_dim=4, sid="rows")


def test_integers_of_numpy_are_integers() -> None:
    outputs = [skein_attention(Q, K, V, budget=size, generator=generator()) for size in (np.int64(3), 3)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.random])
def test_noise_of_another_shape(name: str) -> None:
    module = VARIANTS[name].build(budget=3)
    q, k, v = inputs_for(name, 2, 3, 5, 7)
    noise = module.sample_noise(q[:1], k[:1])
    with pytest.raises(ValueError, match=r"noise has shapes .*; draw it with the module.s sample_noise"):
        module(q, k, v, noise=noise)
    with pytest.raises(ValueError, match="noise has shapes"):
        module(q[:1], k[:1], v[:1], noise=(*noise, noise[0]))


def test_noise_for_a_method_that_takes_none() -> None:
    with pytest.raises(ValueError, match=re.escape("noise has shapes [(2, 3, 5)], expected []")):
        build("vmean", head_dim=4)(Q, K, V, noise=U[:1])


@pytest.mark.parametrize("name", METHODS)
def test_cross_attention(name: str) -> None:
    """Works, or says before any number is drawn why it does not and what to do, as the table has it."""
    module, source = VARIANTS[name].build(budget=3), generator(1)
    if METHODS[name].cross_attention:
        assert module(Q, K, V, generator=source).shape == (2, 3, 5, 6)
        return
    before = source.get_state()
    message = "pass the queries twice" if name in SHARED_QK else "query has 5 tokens and key 7.*needs the same number"
    with pytest.raises(ValueError, match=message):
        module(Q, K, V, generator=source)
    assert torch.equal(source.get_state(), before)
