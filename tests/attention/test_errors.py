"""Errors say what was expected, what came and what to do, before any number is drawn."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skeinformer import METHODS, build, choose_budget, cluster_attention, draw, skein_attention
from skeinformer.attention import SkeinNoise
from tests.helpers import SHARED_QK, VARIANTS, generator, inputs_for, tensors

Q, K, V = (x.detach() for x in tensors(2, 3, 5, 7, p=4, p_v=6))
MASK = torch.ones(2, 7, dtype=torch.bool)
U = torch.rand(2, 3, 5, generator=generator()), torch.rand(2, 3, 7, generator=generator())


def call_function(q: Any, k: Any, v: Any, **options: Any) -> Tensor:
    output: Tensor = skein_attention(q, k, v, budget=3, **options)
    return output


def call_certify(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return VARIANTS["cluster"].build(budget=3, seed=1).certify(q, k, v, **options)


CALLS = {
    "skein_attention": call_function,
    "certify": call_certify,
    **{name: VARIANTS[name].build(budget=3) for name in METHODS},
}
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
    source = generator(1)
    before = source.get_state()
    with pytest.raises(ValueError, match=re.escape(message)):
        call(*inputs, generator=source)
    assert torch.equal(source.get_state(), before)


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
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes(call: Callable[..., Tensor], case: str, autocast: bool) -> None:
    """Autocast makes floats of one precision, and nothing else a float."""
    inputs, message = DTYPES[case], "query, key and value have dtypes "
    if autocast and case in ("key", "value", "query"):
        return
    message += "" if autocast else ", ".join(str(x.dtype) for x in inputs)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        pytest.raises(TypeError, match=re.escape(message)) as error,
    ):
        call(*inputs)
    assert "float16, bfloat16, float32, float64" in str(error.value)
    assert ".to(dtype)" in str(error.value)


@every_call
def test_devices(call: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="query, key and value are on cpu, meta, cpu; move them to one device"):
        call(Q, K.to("meta"), V)
    with pytest.raises(ValueError, match="key_mask is on meta, the tensors are on cpu"):
        call(Q, K, V, key_mask=MASK.to("meta"))


MASKS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "integers": ({"key_mask": MASK.long()}, TypeError, "key_mask is torch.int64, expected a boolean tensor"),
    "floats": ({"query_mask": torch.zeros(2, 5)}, TypeError, "query_mask is torch.float32, expected a boolean tensor"),
    "list": ({"key_mask": MASK.tolist()}, TypeError, "key_mask is list, expected a boolean tensor, True = real"),
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


OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "generator": ({"generator": 0}, TypeError, "generator must be a torch.Generator or None, got int"),
    "no tuple": ({"noise": U[0]}, TypeError, "noise must be a tuple of floating point tensors"),
    "no tensors": ({"noise": (None, None)}, TypeError, "noise must be a tuple of floating point tensors"),
    "integers": ({"noise": (U[0].long(), U[1])}, TypeError, "noise must be a tuple of floating point tensors"),
    "both": ({"noise": U, "generator": generator()}, ValueError, "both noise and generator were given"),
    "device": ({"noise": tuple(x.to("meta") for x in U)}, ValueError, "noise is not on cpu"),
    "names": (
        {"noise": SkeinNoise(U[0][..., :4], U[1])},
        ValueError,
        "noise has shapes [(2, 3, 4), (2, 3, 7)], expected [(2, 3, 5), (2, 3, 7)] (pilots, columns)",
    ),
    "scale": ({"scale": "x"}, TypeError, "scale must be a finite number"),
    "scale of NaN": ({"scale": float("nan")}, ValueError, "scale must be a finite number"),
    "flag": ({"reuse_pilots": "no"}, TypeError, "reuse_pilots must be True or False, got 'no'"),
    "columns": ({"columns": "importence"}, ValueError, "columns='importence' is not known; did you mean 'importance'?"),
    "row_norm": ({"row_norm": "adaptiv"}, ValueError, "row_norm='adaptiv' is not known; did you mean 'adaptive'?"),
    "None": ({"row_norm": None}, ValueError, "row_norm=None is not known"),
    "zero": ({"num_pilots": 0}, ValueError, "num_pilots must be at least 1, got 0"),
    "negative": ({"num_checks": -1}, ValueError, "num_checks must be at least 1, got -1"),
    "fraction": ({"num_pilots": 2.5}, TypeError, "num_pilots must be an integer of at least 1, got 2.5"),
    "text": ({"num_checks": "8"}, TypeError, "num_checks must be an integer of at least 1, got '8'"),
    "truth": ({"num_pilots": True}, TypeError, "num_pilots must be an integer of at least 1, got True"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_a_function(case: str) -> None:
    options, kind, message = OPTIONS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call_function(Q, K, V, **options)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"quality": "best"}, ValueError, "quality='best' is not known"),
        ({"num_steps": -1}, ValueError, "num_steps must be at least 0"),
        ({"budget": 2.5}, TypeError, "budget must be an integer of at least 1"),
        ({"first_order": "yes"}, TypeError, "first_order must be True or False"),
    ],
)
def test_options_of_the_cluster_sketch(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        cluster_attention(Q, K, V, **options)


@pytest.mark.parametrize("name", METHODS)
def test_options_of_build(name: str) -> None:
    """Nothing is dropped without a word."""
    for argument in ("head_dim", "budget", "max_len"):
        options: dict[str, Any] = {"head_dim": 4, argument: 0}
        with pytest.raises(ValueError, match=f"{argument} must be at least 1, got 0"):
            build(name, **options)
        with pytest.raises(TypeError, match=f"{argument} must be an integer of at least 1, got 1.5"):
            build(name, **{**options, argument: 1.5})
    for seed in ("7", 1.5):
        with pytest.raises(TypeError, match="seed must be an integer or None"):
            build(name, head_dim=4, seed=seed)
    for scale in ("x", float("nan")):
        with pytest.raises((TypeError, ValueError), match="scale must be a finite number"):
            build(name, head_dim=4, scale=scale)
    with pytest.raises(TypeError, match=f"{name}'.*has no option 'bugdet'"):
        build(name, head_dim=4, bugdet=3)
    with pytest.raises(ValueError, match=re.escape("query has head width 4, but this module was built with self")):
        VARIANTS[name].build(head_dim=8)(Q, K, V)


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
    with pytest.raises(TypeError, match="has no option 'num_nonzero'; did you mean 'num_nonzeros'"):
        build("sketched", head_dim=4, sketch="sparse_embedding", num_nonzero=2)
    with pytest.raises(ValueError, match="num_nonzeros must be at least 1, got 0"):
        build("sketched", head_dim=4, sketch="sparse_embedding", num_nonzeros=0)


def test_wrong_kinds_elsewhere() -> None:
    with pytest.raises(TypeError, match="dropout must be at least 0 and below 1, got 'x'"):
        build("softmax", head_dim=4, dropout="x")
    with pytest.raises(TypeError, match=r"tolerance must be above 0, a relative error such as 0\.1, got 'x'"):
        choose_budget(Q, K, V, tolerance="x")
    with pytest.raises(TypeError, match="dtype must be a floating point type"):
        draw("gaussian", 4, 2, dtype="float32")
    with pytest.raises(TypeError, match="batch must be a tuple of sizes"):
        draw("gaussian", 4, 2, batch=(-1,))


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


@pytest.mark.parametrize("name", sorted(SHARED_QK))
def test_a_key_that_is_not_the_query(name: str) -> None:
    with pytest.raises(ValueError, match="key is another tensor than query; tie the two projections"):
        VARIANTS[name].build(budget=3)(Q, Q.clone(), V[:, :, :5])
