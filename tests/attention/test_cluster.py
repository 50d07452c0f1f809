"""The cluster sketch against its transcription: values, gradients, clusters, calibration, certificate."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import cluster_attention
from skeinformer.attention import Cluster, ClusterInfo, ClusterNoise
from skeinformer.attention.centers import METRIC_QUERIES, RIDGE, linear_scores
from skeinformer.attention.cluster import SAMPLED_KEYS
from skeinformer.attention.inputs import prepare
from skeinformer.kernels import loops, plain
from skeinformer.noise import gumbel
from tests import reference, reference_cluster
from tests.helpers import (
    dense_exact,
    exact,
    generator,
    gradients,
    lengths_mask,
    over_heads,
    random_mask,
    relative_error,
    tensors,
)

STEPS = pytest.mark.parametrize("steps", [loops, plain], ids=["loops", "plain"])

MASKS = {
    "none": (9, 9, None, None),
    "suffix": (9, 9, lengths_mask([9, 7], 9), lengths_mask([9, 7], 9)),
    "anywhere": (9, 12, random_mask(2, 12, seed=5, share=0.8), random_mask(2, 9, seed=2)),
    "cross": (5, 11, random_mask(2, 11, seed=3, share=0.9), None),
}


def transcribed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    info: ClusterInfo,
    first: bool,
    window: int = 0,
) -> Tensor:
    def one_head(Q: Tensor, K: Tensor, V: Tensor, keys: list[bool], queries: list[bool], at: tuple[int, int]) -> Tensor:
        return reference_cluster.cluster_attention(
            Q,
            K,
            V,
            [i for i in info.pilots[at].tolist() if i >= 0],
            info.assignment[at].tolist(),
            scale=0.5,
            key_mask=keys,
            query_mask=queries,
            first_order=first,
            window=window,
        )

    return over_heads(one_head, q, k, v, key_mask, query_mask)


@STEPS
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("first_order", [True, False])
@pytest.mark.parametrize("p_v", [4, 3])
def test_values_and_gradients_are_those_of_the_transcription(
    monkeypatch: pytest.MonkeyPatch, steps: ModuleType, masks: str, first_order: bool, p_v: int
) -> None:
    monkeypatch.setattr("skeinformer.attention.cluster.steps_for", lambda x: steps)
    n, n_k, key_mask, query_mask = MASKS[masks]
    q, k, v = tensors(2, 2, n, n_k, p_v=p_v, peak=2)
    options: dict[str, Any] = {"budget": 4, "num_pilots": 3, "first_order": first_order, "generator": generator(1)}
    output, info = cluster_attention(q, k, v, key_mask=key_mask, query_mask=query_mask, return_info=True, **options)
    expected = transcribed(q, k, v, key_mask, query_mask, info, first_order)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), rtol=1e-8, atol=1e-10)
    if first_order and key_mask is None:
        assert (info.factor > 0).any()


@pytest.mark.parametrize("masked", [False, True])
def test_pilots_of_very_long_sequences_give_the_same(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    """Where they do not fit into the cache of a CPU they are computed in another way, with another layout."""
    inputs, mask = tensors(2, 3, 40, p=8, p_v=6), random_mask(2, 40) if masked else None
    results = []
    for held in (loops.HELD, 1):
        monkeypatch.setattr(loops, "HELD", held)
        output = cluster_attention(*inputs, budget=6, key_mask=mask, query_mask=mask, generator=generator())
        results.append([output, *gradients(output, inputs)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("real", [80, 18])
def test_clusters_are_those_of_lloyd(steps: int, real: int) -> None:
    """The sample by Eq. (5) and Gumbel noise, the first of it as centers, Lloyd steps over it, then all keys.

    The metric is that of 16 queries that are no pilots, of 14 where there are no more.
    """
    q, k, v = tensors(1, 2, 80, p=4, p_v=4, peak=2)
    noise = ClusterNoise(*(torch.rand(1, 2, 80, generator=generator(seed)) for seed in (1, 2)))
    options: dict[str, Any] = {"budget": 5, "num_pilots": 4, "num_steps": steps, "noise": noise, "return_info": True}
    _, info = cluster_attention(q, k, v, query_mask=lengths_mask([real], 80), **options)
    for head in range(2):
        Q, K, V = q[0, head].detach(), k[0, head].detach(), v[0, head].detach()
        rows = noise.pilots[0, head, :real].argsort(descending=True)[:4].tolist()
        assert info.pilots[0, head].tolist() == rows
        p = torch.stack(reference.estimated_probability(Q, K, V, rows, 0.5, [True] * 80))
        ranked = (p.log() + gumbel(noise.centers[0, head])).argsort(descending=True)[: 5 * SAMPLED_KEYS].tolist()
        asking = [i for i in noise.pilots[0, head, :real].argsort().tolist() if i not in rows][: 4 * METRIC_QUERIES]
        metric = reference_cluster.query_metric(Q, asking, RIDGE)
        assert info.assignment[0, head].tolist() == reference_cluster.lloyd(K, ranked, 5, steps, metric)


def nearest(keys: Tensor, centers: Tensor, metric: Tensor, steps: ModuleType) -> Tensor:
    return steps.nearest_center(keys, *linear_scores(centers.flatten(0, 1), metric.flatten(0, 1)))


@STEPS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("n", [1, 63, 200])
def test_nearest_is_argmin(steps: ModuleType, dtype: torch.dtype, n: int) -> None:
    """Scores of any size and sign, by any metric. A key that is not a number gets some cluster."""
    keys, centers = (torch.randn(2, 3, size, 5, generator=generator(size)).to(dtype) * 30 for size in (n, 7))
    for root in (torch.eye(5).to(dtype), torch.randn(5, 5, generator=generator(0)).to(dtype)):
        metric = (root @ root.mT).expand(2, 3, 5, 5)
        expected = torch.cdist(keys.double() @ root.double(), centers.double() @ root.double()).argmin(-1)
        assert torch.equal(nearest(keys, centers, metric, steps), expected)
    metric = torch.eye(5, dtype=dtype).expand(2, 3, 5, 5)
    expected = nearest(keys, centers, metric, steps)
    for scale in (1e-15, 1e15):
        assert torch.equal(nearest(keys * scale, centers * scale, metric, steps), expected)
    assert torch.equal(nearest(keys + 500, centers + 500, metric, steps), expected)
    keys[0, 0, 0] = torch.nan
    clusters = nearest(keys, centers, metric, steps)
    assert 0 <= clusters.min() <= clusters.max() < 7


def test_each_cluster_has_its_mass_on_the_pilots() -> None:
    """What the log weight is for: mean_J exp(s q_J . k_c + log weight - lse_J) = mass of the cluster's keys."""
    q, k, v = (x.detach() for x in tensors(1, 1, 50, peak=3))
    noise = ClusterNoise(*(torch.rand(1, 1, 50, generator=generator(seed)) for seed in (0, 1)))
    sketch, _ = Cluster(budget=6, num_pilots=6, first_order=False).sketch(prepare(q, k, v), noise)
    pilots, virtual, assignment = sketch.pilots, sketch.virtual, sketch.saved[0]
    assert pilots is not None
    assert assignment is not None
    log_b = 0.5 * pilots.queries @ virtual.keys.mT + virtual.log_weights()[..., None, :] - pilots.lse[..., None]
    mass = (0.5 * pilots.queries @ k.mT).softmax(-1).mean(-2)
    expected = torch.zeros(1, 1, 6, dtype=torch.float64).scatter_add_(-1, assignment, mass)
    torch.testing.assert_close(log_b.exp().mean(-2), expected)


def test_equal_keys_keep_their_own_gradients_at_full_budget() -> None:
    q, k, v = tensors(1, 1, 8, p_v=4)
    k = k.detach().index_copy(2, torch.tensor([3, 5]), k.detach()[:, :, [1, 1]]).requires_grad_()
    output = cluster_attention(q, k, v, budget=8, num_pilots=2, generator=generator(0))
    expected = exact(q, k, v)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(output, (q, k, v)), gradients(expected, (q, k, v)))


def test_keys_that_no_pilot_sees_are_counted() -> None:
    """In float32 e^-200 is 0: such keys keep finite means, and a weight that is their number."""
    k = torch.randn(1, 1, 60, 4, generator=generator(0)) * 0.01
    k[..., 30:, 0] -= 400
    q = torch.tensor([1.0, 0, 0, 0]).expand(1, 1, 60, 4) + torch.randn(1, 1, 60, 4, generator=generator(1)) * 0.1
    v = torch.randn(1, 1, 60, 4, generator=generator(2))
    output, info = cluster_attention(q, k, v, budget=6, num_pilots=4, return_info=True, generator=generator(3))
    assert relative_error(output, dense_exact(q, k, v)).max() < 0.1
    far = info.assignment[0, 0, 30:].unique()
    assert (info.log_weight[0, 0, far] > -1e-6).all()
    torch.testing.assert_close(info.log_weight[0, 0, far].exp().sum(), torch.tensor(30.0))


def test_flat_attention_is_nearly_linear_and_the_linear_term_has_it() -> None:
    """Scores of size 0.05: what means of few clusters miss is of first order, what the linear term misses of second."""
    q, k, v = (x.detach() for x in tensors(1, 2, 400, p=8, p_v=8))
    q, truth = 0.05 * q, dense_exact(0.05 * q, k, v)
    off = [
        (cluster_attention(q, k, v, budget=8, first_order=first, generator=generator(0)) - truth).norm().item()
        for first in (False, True)
    ]
    assert off[1] < 0.2 * off[0]


def test_a_budget_bounds_the_pilots_of_a_quality() -> None:
    assert Cluster(quality="accurate") == Cluster(budget=128, quality="accurate", num_pilots=64, num_steps=1)
    assert Cluster(budget=6, quality="accurate").num_pilots == 6
    assert Cluster(budget=6, num_pilots=9).num_pilots == 9
    _, info = cluster_attention(*tensors(1, 2, 5), budget=6, return_info=True)
    assert info.log_weight.shape == info.pilots.shape == (1, 2, 6)


def test_a_scale_of_zero_is_the_mean() -> None:
    q, k, v = (x.detach() for x in tensors(1, 2, 40, p=8, p_v=8))
    output, info = cluster_attention(q, k, v, budget=6, num_pilots=4, scale=0.0, return_info=True)
    torch.testing.assert_close(output, v.mean(-2, keepdim=True).expand_as(v))
    assert info.factor.isfinite().all()


def test_gradients_of_keys_that_no_pilot_sees_are_finite() -> None:
    """Their mass is next to nothing, the gradient of their mean is not; and a scaled loss makes both larger."""
    k = torch.randn(1, 1, 64, 8, generator=generator(0)) * 0.1
    q = torch.zeros(1, 1, 64, 8)
    k[..., 32:, 0], q[..., :4, 0], q[..., 4:, 1] = 30.0, 30.0, 30.0
    noise = ClusterNoise(torch.linspace(0.01, 0.99, 64).expand(1, 1, 64), torch.rand(1, 1, 64, generator=generator(1)))
    inputs = tuple(x.requires_grad_() for x in (q, k, torch.randn(1, 1, 64, 8, generator=generator(2))))
    output = cluster_attention(*inputs, budget=4, num_pilots=4, noise=noise)
    for gradient in torch.autograd.grad(output, inputs, torch.full_like(output, 1e9)):
        assert gradient.isfinite().all()
