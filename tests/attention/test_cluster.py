"""The cluster sketch against its transcription, by hand and by autograd, on weighted sets, and its certificate."""

from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import ClusterInfo, ClusterNoise, build, choose_budget, cluster_attention, skein_attention
from skeinformer.attention import cluster, clusters, pilots
from skeinformer.attention.clusters import nearest
from skeinformer.attention.selection import Selection, uniform_rows
from skeinformer.attention.virtual_keys import VirtualKeys, attend, from_mask
from skeinformer.kernels import clusters as kernels
from skeinformer.kernels import merge
from skeinformer.noise import gumbel
from tests import reference, reference_cluster
from tests.helpers import (
    copies,
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

MASKS = {
    "none": (9, 9, None, None),
    "suffix": (9, 9, lengths_mask([9, 7], 9), lengths_mask([9, 7], 9)),
    "anywhere": (9, 12, random_mask(2, 12, seed=5, share=0.8), random_mask(2, 9, seed=2)),
    "cross": (5, 11, random_mask(2, 11, seed=3, share=0.9), None),
}


def transcribed(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, info: ClusterInfo, first: bool
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
        )

    return over_heads(one_head, q, k, v, key_mask, query_mask)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("first_order", [True, False])
@pytest.mark.parametrize("p_v", [4, 3])
def test_values_and_gradients_are_those_of_the_transcription(masks: str, first_order: bool, p_v: int) -> None:
    """p_v = p takes the gradient by hand, another width autograd's."""
    n, n_k, key_mask, query_mask = MASKS[masks]
    q, k, v = tensors(2, 2, n, n_k, p_v=p_v, peak=2)
    output, info = cluster_attention(
        q,
        k,
        v,
        key_mask=key_mask,
        query_mask=query_mask,
        budget=4,
        num_pilots=3,
        first_order=first_order,
        gradient="keys",
        generator=generator(1),
        return_info=True,
    )
    expected = transcribed(q, k, v, key_mask, query_mask, info, first_order)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    for ours, theirs in zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    if first_order and key_mask is None:
        assert (info.factor > 0).any()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_clusters_are_those_of_lloyd(steps: int) -> None:
    """The sample by Eq. (5) and Gumbel noise, the first of it as centers, Lloyd steps over it, then all keys."""
    q, k, v = tensors(1, 2, 80, p=4, p_v=4, peak=2)
    noise = ClusterNoise(*(torch.rand(1, 2, 80, generator=generator(seed)) for seed in (1, 2)))
    _, info = cluster_attention(q, k, v, budget=5, num_pilots=4, num_steps=steps, noise=noise, return_info=True)
    for head in range(2):
        Q, K, V = q[0, head].detach(), k[0, head].detach(), v[0, head].detach()
        rows = noise.pilots[0, head].argsort(descending=True)[:4].tolist()
        assert info.pilots[0, head].tolist() == rows
        p = torch.stack(reference.estimated_probability(Q, K, V, rows, 0.5, [True] * 80))
        ranked = (
            (p.log() + gumbel(noise.centers[0, head])).argsort(descending=True)[: 5 * clusters.SAMPLED_KEYS].tolist()
        )
        asked = noise.pilots[0, head].argsort()[: 4 * clusters.METRIC_QUERIES].tolist()  # 16 of 80
        metric = reference_cluster.query_metric(Q, asked, clusters.RIDGE)
        assert info.assignment[0, head].tolist() == reference_cluster.lloyd(K, ranked, 5, steps, metric)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_by_hand_equals_autograd(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, masked: bool, many: bool) -> None:
    """Also where so many rows are pilots that the others are gathered."""
    n = 40
    mask = random_mask(2, n, seed=1) if masked else None
    inputs = tuple(x.detach().to(dtype).requires_grad_() for x in tensors(2, 3, n, p=8, p_v=8, peak=2))
    results = []
    for by_hand in (True, False):
        with monkeypatch.context() as patch:
            if not by_hand:
                patch.setattr(merge, "by_hand", lambda query, value: False)
            output = cluster_attention(
                *inputs,
                key_mask=mask,
                query_mask=mask,
                budget=6,
                num_pilots=12 if many else 5,
                generator=generator(3),
            )
            results.append([output, *gradients(output, inputs)])
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}[dtype]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.detach().abs().max().item())


def test_nothing_of_size_n_times_d_is_saved() -> None:
    n, d = 512, 64
    q, k, v = tensors(1, 1, n, p=8, p_v=8)
    sizes: list[int] = []

    def note(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        cluster_attention(q, k, v, budget=d, num_pilots=d)
    assert max(sizes) == n * 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("n", [1, 63, 200])
def test_nearest_in_pieces_is_argmin(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n: int) -> None:
    """Scores of any size and sign. A key that is not a number gets some cluster."""
    keys, centers = (torch.randn(2, 3, size, 5, generator=generator(size)).to(dtype) * 30 for size in (n, 7))
    monkeypatch.setattr(kernels, "PIECE", 1)
    found = nearest(keys, centers)
    assert torch.equal(found, torch.cdist(keys.double(), centers.double()).argmin(-1))
    root = torch.randn(5, 5, generator=generator(0)).to(dtype)
    expected = torch.cdist(keys.double() @ root.double(), centers.double() @ root.double()).argmin(-1)
    assert torch.equal(nearest(keys, centers, root @ root.mT), expected)
    for scale in (1e-15, 1e15):
        assert torch.equal(nearest(keys * scale, centers * scale), found)
    assert torch.equal(nearest(keys + 500, centers + 500), found)
    keys[0, 0, 0] = torch.nan
    assert 0 <= nearest(keys, centers).min() <= nearest(keys, centers).max() < 7


def test_mass_that_comes_with_the_rows_is_the_mean_of_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in tensors(2, 2, 30, peak=3))
    source = from_mask(k, v, random_mask(2, 30)[:, None])
    rows = uniform_rows(torch.rand(2, 2, 30, generator=generator(0)), random_mask(2, 30, share=0.1)[:, None], 6)
    held = pilots.compute_pilots(q, rows, source, 0.5, with_mass=True)
    assert held.mass is not None
    assert not rows.live.all()
    B = (0.5 * q @ k.mT + source.log_weights()[..., None, :]).softmax(-1)
    B_J = B.gather(-2, rows.indices[..., None].expand(-1, -1, -1, 30)) * rows.live[..., None]
    mean = B_J.sum(-2) / rows.live.sum(-1, keepdim=True)
    torch.testing.assert_close(held.mass, mean)
    torch.testing.assert_close(pilots.column_mass(held._replace(mass=None), source, 0.5), mean)
    assert pilots.compute_pilots(q, rows, source, 0.5).mass is None


def test_each_cluster_has_its_mass_on_the_pilots() -> None:
    """What the log weight is for: mean_J exp(s q_J . k_c + log weight - lse_J) = mass of the cluster's keys."""
    q, k, v = (x.detach() for x in tensors(1, 1, 50, peak=3))
    rows = uniform_rows(torch.rand(1, 1, 50, generator=generator(0)), None, 8)
    held = pilots.compute_pilots(q, rows, from_mask(k, v), 0.5, with_mass=True)
    assert held.mass is not None
    found = clusters.merge_clusters(
        held,
        from_mask(k, v),
        torch.rand(1, 1, 50, generator=generator(1)),
        6,
        num_steps=1,
        first_order=False,
        scale=0.5,
    )
    virtual = found.virtual
    assert virtual.log_weight is not None
    scores = 0.5 * held.queries @ virtual.keys.mT + virtual.log_weight[..., None, :] - held.normalizer[..., None]
    mass = torch.zeros(1, 1, 6, dtype=torch.float64).scatter_add_(-1, found.merge.assignment, held.mass)
    torch.testing.assert_close(scores.exp().mean(-2), mass)


def test_a_slot_of_weight_three_counts_as_three() -> None:
    """A weighted source gives what its slots repeated as often would, for the same clusters."""
    q, k, v = (x.detach() for x in tensors(1, 2, 30, peak=2))
    count = torch.randint(1, 4, (30,), generator=generator(0))
    weighted = VirtualKeys(k, v, count.double().log().expand(1, 2, 30))
    repeated = from_mask(k.repeat_interleave(count, 2), v.repeat_interleave(count, 2))
    rows = torch.arange(5).expand(1, 2, 5)
    results = []
    for source in (weighted, repeated):
        held = pilots.compute_pilots(
            q, Selection(rows, torch.ones_like(rows, dtype=torch.bool)), source, 0.5, with_mass=True
        )
        mass = pilots.column_mass(held, source, 0.5)
        centers = torch.arange(4).expand(1, 2, 4)
        if source is repeated:
            centers = (count.cumsum(0) - count)[:4].expand(1, 2, 4)
        chosen = Selection(centers, torch.ones_like(centers, dtype=torch.bool))
        full = torch.zeros(1, 2, 1, dtype=torch.bool)
        moments = clusters.find_moments(source, mass, chosen, 4, full, 0, None, True)
        assert moments.covariance is not None
        results.append((*moments[1:], clusters.calibrate(held, moments.keys, moments.total, torch.zeros(1, 2, 4), 0.5)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def compress(pilot_queries: Tensor, source: VirtualKeys, d: int, u: Tensor, *, scale: float) -> VirtualKeys:
    """d slots for a weighted set, by what pilot queries see of it, without the linear term."""
    rows = torch.arange(pilot_queries.shape[-2]).expand(pilot_queries.shape[:-1])
    selection = Selection(rows, torch.ones_like(rows, dtype=torch.bool))
    held = pilots.compute_pilots(pilot_queries, selection, source, scale, with_mass=True)
    return clusters.merge_clusters(held, source, u, d, num_steps=1, first_order=False, scale=scale).virtual


def test_compress_of_a_weighted_set() -> None:
    q, k, v = (x.detach() for x in tensors(1, 2, 20))
    source = VirtualKeys(k, v, torch.randn(1, 2, 20, generator=generator(2), dtype=torch.float64))
    u = torch.rand(1, 2, 20, generator=generator(0))
    torch.testing.assert_close(
        attend(q, compress(q[..., :3, :], source, 20, u, scale=0.5), 0.5), attend(q, source, 0.5)
    )
    few = attend(q, compress(q, source, 10, u, scale=0.5), 0.5)
    assert few.isfinite().all()
    assert (few - attend(q, source, 0.5)).norm() < (few.mean(-2, keepdim=True) - attend(q, source, 0.5)).norm()


def test_equal_keys_keep_their_own_gradients_at_full_budget() -> None:
    q, k, v = tensors(1, 1, 8, p_v=4)
    k = k.detach().index_copy(2, torch.tensor([3, 5]), k.detach()[:, :, [1, 1]]).requires_grad_()
    output = cluster_attention(q, k, v, budget=8, num_pilots=2, generator=generator(0))
    expected = exact(q, k, v)
    torch.testing.assert_close(output, expected)
    for ours, theirs in zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs)


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


def test_better_than_skeinformer_where_keys_cluster() -> None:
    source = generator(0)
    places = 3 * torch.randn(1, 1, 12, 8, generator=source)
    k = places.repeat(1, 1, 40, 1) + 0.3 * torch.randn(1, 1, 480, 8, generator=source)
    q, v = torch.randn(1, 1, 480, 8, generator=source), k @ torch.randn(8, 8, generator=source)
    q, k, v = (copies(x, 8) for x in (q, k, v))
    truth = dense_exact(q, k, v)
    ours = cluster_attention(q, k, v, budget=48, num_pilots=16, generator=generator(1))
    theirs = skein_attention(q, k, v, budget=48, num_pilots=16, generator=generator(1))
    assert relative_error(ours, truth).mean() < 0.5 * relative_error(theirs, truth).mean()


def test_certificate_estimates_the_error_of_the_output() -> None:
    q, k, v = (x.detach() for x in tensors(2, 3, 300, p=8, p_v=8, peak=2, dtype=torch.float32))
    options = {"budget": 12, "num_pilots": 16}
    output, info = cluster_attention(q, k, v, return_info=True, num_checks=100, generator=generator(0), **options)
    assert torch.equal(output, cluster_attention(q, k, v, generator=generator(0), **options))
    truth = relative_error(output, dense_exact(q, k, v))
    assert ((info.error - truth).abs() <= 4 * info.error_se).all()
    assert info.error_se.max() < 0.2 * truth.min()
    _, all_checked = cluster_attention(q, k, v, return_info=True, num_checks=284, generator=generator(0), **options)
    torch.testing.assert_close(all_checked.error.double(), truth, rtol=1e-4, atol=0)


def test_certificate_is_not_too_low() -> None:
    """On average over draws."""
    q, k, v = (x.detach() for x in tensors(1, 4, 640, p=16, p_v=16, dtype=torch.float32))
    q, truth = 0.3 * q, dense_exact(0.3 * q, k, v)
    found = [cluster_attention(q, k, v, budget=64, return_info=True, generator=generator(seed)) for seed in range(20)]
    estimated = torch.stack([info.error for _, info in found]).mean()
    assert estimated > 0.97 * torch.stack([relative_error(output, truth) for output, _ in found]).mean()


@pytest.mark.parametrize("n", [128, 160, 200])
def test_check_rows_may_be_rows_that_made_the_output(n: int) -> None:
    """Most rows of so few make the metric, and yet error^2 has the mean of the truth: numbers of its own draw checks.

    Over draws of sketch and checks, within 3 standard errors.
    """
    q, k, v = (copies(x.detach().float(), 400) for x in tensors(1, 1, n, p=32, p_v=8, peak=0.7))
    output, info = cluster_attention(q, k, v, budget=16, return_info=True, generator=generator(0))
    assert torch.equal(output, cluster_attention(q, k, v, budget=16, generator=generator(0)))
    truth = relative_error(output, dense_exact(q, k, v))
    off = info.error.double().square() / truth.square().mean() - truth.square() / truth.square().mean()
    assert off.numel() == 400
    assert off.mean().abs() < 3 * off.std() / off.numel() ** 0.5
    assert off.std() / off.numel() ** 0.5 < 0.03  # so a bias of 10 % would be seen


def test_the_metric_is_of_queries_that_are_no_pilots() -> None:
    u, mask = torch.rand(2, 1, 50, generator=generator()), lengths_mask([50, 20], 50)[:, None]
    pilots = uniform_rows(u, mask, 16)
    asked = cluster.rows_of_metric(u, mask, 16, 40)
    assert asked.live.sum(-1).tolist() == [[34], [4]]
    for example in range(2):
        of_pilots, of_asked = (set(x.indices[example][x.live[example]].tolist()) for x in (pilots, asked))
        assert not of_pilots & of_asked
        assert len(of_pilots | of_asked) == (50, 20)[example]


def test_module_certifies_what_it_returns_and_takes_its_budget() -> None:
    q, k, v = (x.detach() for x in tensors(1, 2, 50))
    module = build("cluster", head_dim=4, budget=6, quality="accurate", seed=3).eval()
    output, info = module.certify(q, k, v)
    assert torch.equal(output, module(q, k, v))
    assert info.log_weight.shape == (1, 2, 6)
    assert info.pilots.shape == (1, 2, 6)  # no more pilots than clusters, unless asked for
    assert "budget=6" in repr(module)
    assert choose_budget(q, k, v, tolerance=0.5, attention=cluster_attention, generator=generator(0)) <= 50


@pytest.mark.parametrize("method", ["cluster", "skeinformer"])
@pytest.mark.parametrize("seed", [None, 0])
def test_what_is_certified_is_checked_like_what_is_called(method: str, seed: int | None) -> None:
    module = build(method, head_dim=8, budget=6, seed=seed).eval()
    for call in (module, module.certify):
        with pytest.raises(ValueError, match="head width 4"):
            call(*tensors(1, 2, 20))
        with pytest.raises(TypeError, match="query must be a tensor, got list"):
            call([1], 2, 3)


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


def test_dimensions_that_no_query_asks_for_hardly_matter() -> None:
    """The metric of the queries: a plain distance would sort keys by what nobody sees."""
    q, k, v = (x.detach() for x in tensors(1, 4, 400, p=8, p_v=8, peak=2))
    q[..., 4:] = 0
    errors = []
    for size in (0.0, 30.0):
        wide = torch.cat([k[..., :4], size * k[..., 4:]], -1)
        found = cluster_attention(q, wide, v, budget=16, num_pilots=16, generator=generator(0))
        errors.append(relative_error(found, dense_exact(q, wide, v)).mean().item())
    assert errors[1] < 1.5 * errors[0]


def test_compress_takes_any_leading_dimensions_and_has_gradients() -> None:
    q, k, v = tensors(2, 3, 30, p=8, p_v=8)
    u = torch.rand(2, 3, 30, generator=generator(0))
    whole = compress(q[..., :6, :], from_mask(k, v), 5, u, scale=0.5)
    for at in ((0, slice(None)), (slice(None), None)):  # (3, ...) and (2, 1, 3, ...)
        part = compress(q[at][..., :6, :], from_mask(k[at], v[at]), 5, u[at], scale=0.5)
        torch.testing.assert_close(part.keys, whole.keys[at])
        torch.testing.assert_close(part.log_weights(), whole.log_weights()[at])
    d_key, d_value = torch.autograd.grad(whole.keys.sum() + whole.values.square().sum(), (k, v))
    assert (d_key != 0).any()
    assert (d_value != 0).any()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("attention", [cluster_attention, skein_attention])
def test_vmap_over_some_of_the_inputs(attention: Any, mapped: tuple[int | None, ...]) -> None:
    inputs = [x.detach() for x in tensors(1, 2, 40)]
    noise = build("cluster", head_dim=4).sample_noise(inputs[0], inputs[1], generator=generator(0))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = attention(q, k, v, budget=6, num_pilots=4, noise=noise)
        return found

    many = [x if dim is None else torch.stack([x, x.flip(-1)]) for x, dim in zip(inputs, mapped, strict=True)]
    found = torch.func.vmap(call, in_dims=mapped)(*many)
    for i in range(2):
        expected = call(*(x if dim is None else x[i] for x, dim in zip(many, mapped, strict=True)))
        torch.testing.assert_close(found[i], expected)


def test_wrong_options_are_refused_in_words() -> None:
    q, k, v = tensors(1, 1, 5)
    with pytest.raises(ValueError, match="quality"):
        cluster_attention(q, k, v, quality="best")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="num_steps must be at least 0"):
        cluster_attention(q, k, v, num_steps=-1)
    with pytest.raises(TypeError, match="budget must be an integer of at least 1"):
        cluster_attention(q, k, v, budget=2.5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="first_order"):
        cluster_attention(q, k, v, first_order="yes")  # type: ignore[call-overload]
