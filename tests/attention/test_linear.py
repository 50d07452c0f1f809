"""Performer and the Linear Transformer: transcriptions, features, convergence, and logits that underflow a feature."""

import math

import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention.linear import PerformerModule, log_elu_plus_one, orthogonal_features
from skeinformer.noise import from_generator, from_seed, normal
from tests import reference_linear as reference
from tests.helpers import draw, generator, gradients, lengths_mask, over_heads, random_mask, tensors

MASKS = {
    "none": (None, None),
    "right": (lengths_mask([8, 3], 8), lengths_mask([6, 2], 6)),
    "anywhere": (random_mask(2, 8, seed=1), random_mask(2, 6, seed=2)),
    "nothing real": (lengths_mask([8, 0], 8), lengths_mask([0, 6], 6)),
}
every_mask = pytest.mark.parametrize("case", MASKS)


def features_of(noise: tuple[Tensor, Tensor]) -> Tensor:
    """W, (b, h, m, p), by the transcription."""
    directions, lengths = (normal(u.double()) for u in noise)
    b, h = lengths.shape[:2]
    return torch.stack(
        [
            torch.stack([reference.orthogonal_random_features(directions[i, j], lengths[i, j]) for j in range(h)])
            for i in range(b)
        ]
    )


def assert_same(output: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(gradients(output, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@every_mask
@pytest.mark.parametrize("num_features", [1, 3, 4, 9])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_performer_is_the_transcription(case: str, num_features: int, scale: float | None) -> None:
    key_mask, query_mask = MASKS[case]
    q, k, v = tensors(2, 2, 6, 8, p_v=3, peak=2)
    module = build("performer", head_dim=4, budget=num_features, scale=scale)
    noise = draw(module, q, k)
    W = features_of(noise)
    expected = over_heads(
        lambda Q, K, V, keys, queries, at: reference.performer(
            Q, K, V, W[at], 0.5 if scale is None else scale, keys, queries
        ),
        q,
        k,
        v,
        key_mask,
        query_mask,
    )
    assert_same(module(q, k, v, key_mask=key_mask, query_mask=query_mask, noise=noise), expected, (q, k, v))


@every_mask
def test_linear_transformer_is_the_transcription(case: str) -> None:
    key_mask, query_mask = MASKS[case]
    q, k, v = tensors(2, 2, 6, 8, p_v=3, peak=2)
    expected = over_heads(
        lambda Q, K, V, keys, queries, _: reference.linear_transformer(Q, K, V, keys, queries),
        q,
        k,
        v,
        key_mask,
        query_mask,
    )
    output = build("linear_transformer", head_dim=4)(q, k, v, key_mask=key_mask, query_mask=query_mask)
    assert_same(output, expected, (q, k, v))


def test_log_of_elu_plus_one() -> None:
    x = torch.tensor([-1e4, -100.0, -1.0, -1e-9, 0.0, 1e-9, 1.0, 1e4], dtype=torch.float64, requires_grad=True)
    y = log_elu_plus_one(x)
    plain = torch.nn.functional.elu(x) + 1
    torch.testing.assert_close(y[2:].exp(), plain[2:])
    assert plain[0] == 0  # where the feature itself is lost, its logarithm is not
    assert y[0] == -1e4
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, 1 / (1 + x.detach().clamp(min=0)))


def performer_noise(b: int, h: int, m: int, p: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rand = from_generator((b, h), generator=generator(seed))
    return rand(math.ceil(m / p), p, p), rand(m, p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_are_orthogonal_in_blocks_and_have_their_lengths(dtype: torch.dtype) -> None:
    noise = performer_noise(3, 2, 13, 5)
    W = orthogonal_features(noise, dtype)
    assert W.shape == (3, 2, 13, 5)
    assert not W.requires_grad
    tolerance = 50 * torch.finfo(dtype).eps
    lengths = normal(noise[1].to(dtype)).norm(dim=-1)
    torch.testing.assert_close(W.norm(dim=-1), lengths, rtol=tolerance, atol=0)
    units = W / lengths[..., None]
    for start in (0, 5, 10):
        block = units[:, :, start : start + 5]
        identity = torch.eye(block.shape[-2], dtype=dtype).expand(3, 2, -1, -1)
        torch.testing.assert_close(block @ block.mT, identity, rtol=0, atol=tolerance)
    torch.testing.assert_close(W.double(), features_of(noise), rtol=0, atol=1e3 * tolerance)


def test_every_feature_is_a_standard_normal_vector() -> None:
    """Mean 0 and second moments I for each row of a block, within 4.5 standard errors: no direction is preferred."""
    draws, p = 20_000, 3
    W = orthogonal_features(performer_noise(draws, 1, p, p, seed=4), torch.float64)[:, 0]  # (draws, p, p)
    for f in range(p):
        mean, moment = W[:, f].mean(0), W[:, f].T @ W[:, f] / draws
        assert (mean.abs() <= 4.5 / math.sqrt(draws)).all()
        deviation = torch.full((p, p), 1.0, dtype=torch.float64).fill_diagonal_(math.sqrt(2))
        assert ((moment - torch.eye(p)).abs() <= 4.5 * deviation / math.sqrt(draws)).all()
    share = (W[:, 0, 0] > 0).double().mean()
    assert abs(share - 0.5) <= 4.5 * 0.5 / math.sqrt(draws)


@pytest.mark.parametrize("scale", [0.0, -0.5, math.nan])
def test_scale_has_a_root(scale: float) -> None:
    with pytest.raises(ValueError, match="scale must be"):
        build("performer", head_dim=4, scale=scale)
    with pytest.raises(ValueError, match="scale must be"):
        build("performer", head_dim=4)(*tensors(1, 1, 5), scale=scale)


def test_a_seed_gives_features_per_head_shared_by_all_examples() -> None:
    """The features of a seed are orthogonalized once; it is the same as doing it for every example."""
    rand = from_seed((5, 3), 7)
    noise = (rand(2, 4, 4), rand(6, 4))
    W = orthogonal_features(noise, torch.float32)
    assert W.shape == (5, 3, 6, 4)
    assert W.stride(0) == 0
    each = orthogonal_features(tuple(u.contiguous() for u in noise), torch.float32)
    torch.testing.assert_close(W, each, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(W[0, 0], W[0, 1])


METHODS = ["performer", "linear_transformer"]


def peaked(n: int, size: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Each query meets one key at logit `size` and the others at -size or 0: the features of most pairs underflow."""
    q, _, v = tensors(1, 2, n, dtype=torch.float64)
    direction = torch.nn.functional.normalize(q.detach(), dim=-1) * math.sqrt(2 * size)
    return direction.to(dtype).requires_grad_(), direction.flip(2).neg().to(dtype).requires_grad_(), v.to(dtype)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_features_that_underflow_leave_a_convex_combination(name: str, dtype: torch.dtype, size: float) -> None:
    q, k, v = peaked(12, size, dtype)
    output = build(name, head_dim=4, budget=8)(q, k, v, generator=generator())
    slack = 4 * torch.finfo(dtype).eps
    assert (output <= v.amax(-2, keepdim=True) * (1 + slack) + slack).all()
    assert (output >= v.amin(-2, keepdim=True) * (1 + slack) - slack).all()
    for gradient in gradients(output, (q, k)):
        assert gradient.isfinite().all()


def test_gradient_of_keys_alone_and_of_values_alone() -> None:
    """The mass of a feature has a gradient of its own only where keys have one."""
    q, k, v = tensors(1, 2, 7)
    module = build("performer", head_dim=4, budget=6)
    noise = draw(module, q, k)
    together = gradients(module(q, k, v, noise=noise), (q, k, v))
    for i in range(3):
        alone = [x if i == j else x.detach() for j, x in enumerate((q, k, v))]
        (gradient,) = gradients(module(*alone, noise=noise), (alone[i],))
        torch.testing.assert_close(gradient, together[i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", [None, 3])
def test_redraw_on_request(seed: int | None) -> None:
    """With redraw=False the features stay, in training and evaluation, through a state_dict, until they are redrawn."""
    q, k, v = tensors(2, 3, 9)
    module = build("performer", head_dim=4, budget=5, redraw=False, seed=seed).train()
    assert isinstance(module, PerformerModule)
    first = module(q, k, v)
    assert torch.equal(first, module(q, k, v))
    assert torch.equal(first, module.eval()(q, k, v))
    module.redraw_features()
    second = module(q, k, v)
    assert not torch.allclose(first, second)
    other = build("performer", head_dim=4, budget=5, redraw=False, seed=seed)
    assert torch.equal(first, other(q, k, v))
    other.load_state_dict(module.state_dict())
    assert torch.equal(second, other(q, k, v))
    assert all(isinstance(x, Tensor) for x in module.state_dict().values())  # as safetensors wants it


def test_features_drawn_at_every_call_have_no_state() -> None:
    module = build("performer", head_dim=4, budget=5)
    assert isinstance(module, PerformerModule)
    assert not module.state_dict()
    with pytest.raises(ValueError, match="build with redraw=False to keep them"):
        module.redraw_features()
