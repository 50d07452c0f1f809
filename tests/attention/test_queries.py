"""Virtual queries: the transcription, exactness, masks, precision, checkpoints, compilation, and that they gain."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skeinformer import build
from skeinformer import cluster_attention as any_cluster_attention
from skeinformer import skein_attention as any_skein_attention
from skeinformer.attention import queries
from skeinformer.attention.queries import SAMPLED_QUERIES, fresh_numbers, query_rows
from skeinformer.kernels import row_gradients
from skeinformer.kernels.choice import plain_forms
from skeinformer.lab.measure.memory import peak_memory
from skeinformer.noise import gumbel
from tests import reference_queries
from tests.helpers import generator, gradients, lengths_mask, random_mask, tensors


def cluster_attention(*inputs: Tensor, gradient: str = "queries", **options: Any) -> Tensor:
    """The cluster sketch with virtual queries, unless told otherwise."""
    return any_cluster_attention(*inputs, gradient=gradient, **options)


def skein_attention(*inputs: Tensor, **options: Any) -> Tensor:
    """Skeinformer with virtual queries."""
    return any_skein_attention(*inputs, gradient="queries", **options)


BOTH = [pytest.param(cluster_attention, id="cluster"), pytest.param(skein_attention, id="skein")]


def exact_gradients(q: Tensor, k: Tensor, v: Tensor, G: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    """Of exact attention, by plain float64 operations."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    return torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), G.double())


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("n", [9, 40])
@pytest.mark.parametrize("width", [4, 6])
def test_is_the_transcription(n: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "num_rows", min)  # as few virtual queries as are asked for
    q, k, v = (x.detach() for x in tensors(1, 2, n, 30, p_v=width, peak=2))
    G = torch.randn(1, 2, n, width, generator=generator(1), dtype=torch.float64)
    G[:, :, 3] = 0
    G[:, :, 4:7] *= 0.01
    output = torch.randn(1, 2, n, width, generator=generator(2), dtype=torch.float64)
    u = torch.rand(1, 2, n, generator=generator(3), dtype=torch.float64)
    asked = torch.arange(16).expand(1, 2, 16)
    mass = torch.rand(1, 2, 30, generator=generator(4), dtype=torch.float64)
    live = torch.ones_like(asked, dtype=torch.bool)
    rows = query_rows(q, k, output, G, None, u, asked, live, 5, 0.5)
    d_key, d_value = rows.gradients(k, v, None, mass, 0.5)
    for head in range(2):
        Q, K, V, R, D, m = (x[0, head] for x in (q, k, v, output, G, mass))
        ranked = (D.abs().amax(-1).log() + gumbel(u[0, head])).argsort(descending=True)
        live = [i for i in ranked.tolist() if D[i].norm() > 0][: 5 * SAMPLED_QUERIES]
        expected = reference_queries.gradients(Q, K, V, R, D, m, live, list(range(16)), 5, 0.5)
        torch.testing.assert_close(d_key[0, head], expected[0], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(d_value[0, head], expected[1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", ["cluster", "skeinformer"])
def test_the_whole_gradient_is_the_transcription(
    name: str, plain: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the noise on: the pilots' exact rows, their mass, and virtual queries of all others."""
    monkeypatch.setattr(queries, "num_rows", min)  # as few virtual queries as are asked for
    q, k, v = tensors(2, 2, 30, 26, peak=2)
    key_mask = lengths_mask([26, 19], 26) if masked else None
    query_mask = lengths_mask([30, 22], 30) if masked else None
    G = torch.randn(2, 2, 30, 4, generator=generator(1), dtype=torch.float64)
    G = G if query_mask is None else G * query_mask[:, None, :, None]
    attention = {"cluster": cluster_attention, "skeinformer": skein_attention}[name]
    noise = build(name, head_dim=4, budget=5).sample_noise(q, k, generator=generator(0))
    options = {"budget": 5, "num_pilots": 5, "noise": noise, "key_mask": key_mask, "query_mask": query_mask}
    with plain_forms() if plain else nullcontext():
        output, info = attention(q, k, v, return_info=True, **options)  # type: ignore[misc]
        found = torch.autograd.grad(output, (k, v), G)
    fresh = fresh_numbers(noise[0])
    for at in ((0, 0), (0, 1), (1, 0), (1, 1)):
        Q, K, V, R, D = (x[at].detach() for x in (q, k, v, output, G))
        keys = list(range(26)) if key_mask is None else key_mask[at[0]].nonzero()[:, 0].tolist()
        pilots = [i for i in info.pilots[at].tolist() if i >= 0]
        of_pilots = torch.zeros_like(D).index_copy(0, torch.tensor(pilots), D[pilots])
        exact = exact_gradients(Q[None, None], K[None, None, keys], V[None, None, keys], of_pilots[None, None])
        mass = torch.stack([(0.5 * K[keys] @ Q[i]).softmax(0) for i in pilots]).mean(0)
        others = D - of_pilots
        order = (others.abs().amax(-1).log() + gumbel(fresh[at])).argsort(descending=True).tolist()
        ranked = [i for i in order if others[i].norm() > 0][: 5 * SAMPLED_QUERIES]
        asked = noise[1][at][keys].argsort(descending=True)[:16].tolist()
        expected = reference_queries.gradients(Q, K[keys], V[keys], R, others, mass, ranked, asked, 5, 0.5)
        for ours, estimated, of_rows in zip(found, expected, exact[1:], strict=True):
            torch.testing.assert_close(ours[at][keys], estimated + of_rows[0, 0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("plain", [False, True])
def test_rows_that_are_left_out_count_for_nothing(plain: bool) -> None:
    """As if their gradients were zero, however large these are."""
    q, k, _ = (x.detach() for x in tensors(1, 2, 40, 30, peak=2))
    G = torch.randn(q.shape, generator=generator(1), dtype=torch.float64)
    output = torch.randn(q.shape, generator=generator(2), dtype=torch.float64)
    u = torch.rand(1, 2, 40, generator=generator(3), dtype=torch.float64)
    asked = torch.arange(16).expand(1, 2, 16)
    left_out = torch.tensor([[[3, 17, 20], [0, 39, 5]]])
    where = left_out[..., None].expand(1, 2, 3, q.shape[-1])
    drawn = (u, asked, torch.ones_like(asked, dtype=torch.bool), 5, 0.5)
    with plain_forms() if plain else nullcontext():
        found = query_rows(q, k, output, G.scatter(-2, where, 1e12), left_out, *drawn)
        expected = query_rows(q, k, output, G.scatter(-2, where, 0), None, *drawn)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [4, 6])
def test_exact_where_every_query_has_its_own(masked: bool, width: int) -> None:
    """More virtual queries than queries, and more keys than clusters: dK is exact, whatever the output is."""
    q, k, v = (x.detach() for x in tensors(2, 2, 12, 50, p_v=width, peak=2))
    mask = lengths_mask([50, 31], 50) if masked else None
    G = torch.randn(2, 2, 12, width, generator=generator(1), dtype=torch.float64)
    log_weight = (
        None if mask is None else torch.zeros(2, 1, 50).double().where(mask[:, None], -torch.inf).expand(2, 2, 50)
    )
    scores = 0.5 * q @ k.mT if log_weight is None else 0.5 * q @ k.mT + log_weight[..., None, :]
    output = scores.softmax(-1) @ v
    asked = torch.arange(16).expand(2, 2, 16)
    u = torch.rand(2, 2, 12, generator=generator(3), dtype=torch.float64)
    mass = torch.rand(2, 2, 50, generator=generator(4), dtype=torch.float64)
    live = torch.ones_like(asked, dtype=torch.bool)
    rows = query_rows(q, k, output, G, None, u, asked, live, 12, 0.5)
    d_key, d_value = rows.gradients(k, v, log_weight, mass, 0.5)
    _, expected_key, expected_value = exact_gradients(q, k, v, G, mask)
    torch.testing.assert_close(d_key, expected_key, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(d_value, expected_value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["smooth", "constant", "random"])
def test_keys_get_nearly_the_gradient_of_exact_attention(kind: str) -> None:
    """On flat attention, where the derivative of the sketched output is as wrong as none for smooth gradients."""
    q, k, v = tensors(1, 2, 600, p=8, p_v=8, dtype=torch.float32)
    q = (0.3 * q.detach() + 0.5).requires_grad_()
    noise = torch.randn(1, 2, 600, 8, generator=generator(1))
    G = {"smooth": (q.detach() * 3).tanh() + 0.1 * noise, "constant": noise[:, :, :1].expand_as(v), "random": noise}[
        kind
    ]
    truth = exact_gradients(q, k, v, G)
    errors = {}
    for gradient in ("queries", "keys"):
        output = cluster_attention(q, k, v, gradient=gradient, generator=generator(0))
        found = torch.autograd.grad(output, (q, k, v), G)
        errors[gradient] = [relative(x, y) for x, y in zip(found, truth, strict=True)]
    # queries get the derivative of the output either way; those of pilots are summed in another order
    assert errors["queries"][0] == pytest.approx(errors["keys"][0], rel=1e-6)
    assert errors["queries"][1] < (0.35 if kind == "random" else 0.2)
    if kind != "random":  # random gradients hide that the derivative of the output gives a cluster's keys the same
        assert errors["queries"][1] < errors["keys"][1]
    assert errors["queries"][2] < (0.3 if kind == "random" else 0.1)


@pytest.mark.parametrize("peak", [4, 6, 12])
def test_rows_of_wide_clusters_are_not_believed(peak: float) -> None:
    """On peaked attention dK once erred by 1.2 to 3.2, worse than no gradient. Means over four draws."""
    q, k, v = tensors(1, 2, 600, p=8, p_v=8, dtype=torch.float32)
    q = (peak * q.detach()).requires_grad_()
    G = (q.detach() / 2).tanh() + 0.1 * torch.randn(q.shape, generator=generator(1))
    truth = exact_gradients(q, k, v, G)
    errors = {}
    for gradient in ("queries", "keys"):
        outputs = [cluster_attention(q, k, v, gradient=gradient, generator=generator(seed)) for seed in range(4)]
        found = [torch.autograd.grad(output, (k, v), G) for output in outputs]
        errors[gradient] = [sum(relative(x[i], truth[i + 1]) for x in found) / len(found) for i in range(2)]
    assert errors["queries"][0] < 1.1
    assert errors["queries"][0] < errors["keys"][0] + 0.1
    assert errors["queries"][1] < errors["keys"][1]


def test_queries_with_faint_gradients_do_not_widen_the_clusters_of_others() -> None:
    """Fifteen queries have gradients, the others next to none: dK once erred by 0.26, as if clusters were wide."""
    q, k, v = tensors(1, 2, 60, p=8, p_v=8, dtype=torch.float32)
    q = (6 * q.detach()).requires_grad_()
    G = torch.randn(q.shape, generator=generator(1))
    G[:, :, 15:] *= 1e-6
    output = cluster_attention(q, k, v, budget=16, num_pilots=1, generator=generator(0))
    d_key = torch.autograd.grad(output, k, G)[0]
    assert relative(d_key, exact_gradients(q, k, v, G)[1]) < 0.05


@pytest.mark.parametrize("num_pilots", [1, 8, 20])
def test_as_many_queries_as_are_asked_for_have_virtual_queries_of_their_own(num_pilots: int) -> None:
    """Beside the pilots, whose gradients are exact already, whether the others are gathered or not."""
    q, k, v = tensors(1, 2, 64, 150, p=8, p_v=8)
    G = torch.randn(q.shape, generator=generator(1), dtype=torch.float64)
    output = cluster_attention(q, k, v, budget=64 - num_pilots, num_pilots=num_pilots, generator=generator(0))
    d_key = torch.autograd.grad(output, k, G)[0]
    assert relative(d_key, exact_gradients(q, k, v, G)[1]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("attention", BOTH)
def test_by_hand_equals_autograd(attention: Any, dtype: torch.dtype, masked: bool, many: bool) -> None:
    """Also where so many rows are pilots that the others are gathered, and where an example has few keys."""
    inputs = tuple(x.detach().to(dtype).requires_grad_() for x in tensors(3, 2, 60, p=8, p_v=8, peak=2))
    mask = lengths_mask([60, 41, 5], 60) if masked else None
    options: dict[str, Any] = {"budget": 6, "num_pilots": 20 if many else 5, "key_mask": mask, "query_mask": mask}
    results = []
    for plain in (False, True):
        if plain:
            with plain_forms():
                output = attention(*inputs, generator=generator(3), **options)
                results.append([output, *gradients(output, inputs)])
        else:
            output = attention(*inputs, generator=generator(3), **options)
            results.append([output, *gradients(output, inputs)])
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}[dtype]
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.detach().abs().max().item())


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize(("plain", "p_v"), [(False, 4), (False, 3), (True, 4)])
def test_full_budget_has_the_exact_gradient_example_by_example(attention: Any, plain: bool, p_v: int) -> None:
    """One example has no more keys than clusters: its gradients are exact, those of its mate are estimated."""
    q, k, v = tensors(2, 2, 80, p_v=p_v)
    mask = lengths_mask([80, 10], 80)
    G = torch.randn(2, 2, 80, p_v, generator=generator(1), dtype=torch.float64)
    with plain_forms() if plain else nullcontext():
        output = attention(q, k, v, budget=12, key_mask=mask, generator=generator(0))
        found = torch.autograd.grad(output, (q, k, v), G)
    truth = exact_gradients(q, k, v, G, mask)
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-8, atol=1e-9)
    assert relative(found[1][0], truth[1][0]) > 1e-3


@pytest.mark.parametrize("name", ["cluster", "skeinformer"])
def test_padding_and_batch_mates_change_nothing(name: str) -> None:
    module = build(name, head_dim=4, budget=6, seed=2, gradient="queries").eval()
    q, k, v = tensors(2, 2, 50)
    mask = random_mask(2, 50)
    G = torch.randn(2, 2, 50, 4, generator=generator(1), dtype=torch.float64)
    together = torch.autograd.grad(module(q, k, v, key_mask=mask, query_mask=mask), (q, k, v), G)
    for x in together:
        assert (x.masked_select(~mask[:, None, :, None]) == 0).all()
    for i in range(2):
        alone = [x.detach()[i : i + 1].requires_grad_() for x in (q, k, v)]
        output = module(*alone, key_mask=mask[i : i + 1], query_mask=mask[i : i + 1])
        for ours, theirs in zip(torch.autograd.grad(output, alone, G[i : i + 1]), together, strict=True):
            torch.testing.assert_close(ours[0], theirs[i], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("name", "attention"), [("cluster", cluster_attention), ("skeinformer", skein_attention)])
def test_a_checkpoint_gives_the_same_gradients(name: str, attention: Any) -> None:
    inputs = tensors(1, 2, 60)
    noise = build(name, head_dim=4, budget=6).sample_noise(inputs[0], inputs[1], generator=generator(0))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, budget=6, noise=noise)

    plain = gradients(attend(*inputs), inputs)
    checked = gradients(checkpoint(attend, *inputs, use_reentrant=False), inputs)
    for ours, theirs in zip(checked, plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("attention", BOTH)
def test_extreme_logits_and_gradients_stay_finite(attention: Any, dtype: torch.dtype, size: float) -> None:
    q, k, v = (x.detach().to(dtype) for x in tensors(1, 2, 100, p=8, p_v=8))
    q = (q.float() * 1e3).clamp(-3e4, 3e4).to(dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    size = min(size, 1.0) if dtype == torch.float16 else size  # the gradient itself is beyond its range
    G = (size * torch.randn(1, 2, 100, 8, generator=generator(1))).to(dtype)
    for gradient in torch.autograd.grad(attention(*inputs, budget=8, generator=generator(0)), inputs, G):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("size", [1e-6, 1.0, 100.0])
def test_half_precision_keeps_the_size_of_gradients(size: float, plain: bool) -> None:
    """Values, also of small and large gradients: against float64 with the same draws."""
    q, k, v = (x.detach() for x in tensors(1, 2, 100, p=8, p_v=8))
    G = size * torch.randn(1, 2, 100, 8, generator=generator(1), dtype=torch.float64)
    noise = build("cluster", head_dim=8, budget=8).sample_noise(q, k, generator=generator(0))
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        inputs = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in (q, k, v)]
        with plain_forms() if plain else nullcontext():
            output = cluster_attention(*inputs, budget=8, noise=noise)
            found.append(torch.autograd.grad(output, inputs[1:], G.to(torch.bfloat16).to(dtype)))
    for truth, ours in zip(*found, strict=True):
        assert relative(ours, truth) < 0.01


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("attention", BOTH)
def test_a_gradient_beyond_the_range_is_infinite(attention: Any, plain: bool) -> None:
    """As exact attention's, so that a scaler of gradients sees it: it was cut off at half of the range."""
    q, k, v = (x.detach() for x in tensors(1, 1, 2048, p=8, p_v=8))
    k[:, :, 0] = 8.0  # a key to which all queries attend
    inputs = [x.half().requires_grad_() for x in (q.abs() + 1, k, v)]
    G = torch.full_like(v, 60.0).half()
    with plain_forms() if plain else nullcontext():
        (d_value,) = torch.autograd.grad(attention(*inputs, budget=16, generator=generator(0)), inputs[2], G)
    assert d_value[0, 0, 0].isinf().all()
    assert not d_value.isnan().any()


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("plain", [False, True])
def test_half_precision_holds_products_of_large_queries_and_values(attention: Any, plain: bool) -> None:
    """Small gradients, of which the true dK is in range: it was infinite at any scale of the loss."""
    draws, size = generator(0), 80.0
    q = size * (1 + 0.05 * torch.randn(1, 1, 1024, 32, generator=draws))
    k = torch.full_like(q, -0.5)
    k[:, :, :2] = 0.5  # two keys to which all queries attend, with values far apart
    v = torch.randn(q.shape, generator=draws)
    v[:, :, 0], v[:, :, 1] = size, -size
    inputs = [x.half() for x in (q, k, v)]
    for unit in (1e-4, 1e-6):
        G = torch.full_like(inputs[2], unit)
        leaves = [x.clone().requires_grad_() for x in inputs]
        with plain_forms() if plain else nullcontext():
            (found,) = torch.autograd.grad(attention(*leaves, budget=16, generator=generator(0)), leaves[1], G)
        assert relative(found, exact_gradients(*inputs, G)[1]) < 0.1


def test_how_many_virtual_queries_there_are() -> None:
    """7/8 of what is asked for: clusters, or pilots; at least 20, and no more than there are queries."""
    assert [queries.num_rows(asked, 1000) for asked in (1, 16, 23, 24, 64, 128)] == [20, 20, 20, 21, 56, 112]
    assert [queries.num_rows(16, n) for n in (0, 1, 20, 21)] == [1, 1, 20, 20]
    for name, expected in (("cluster", 64), ("skeinformer", 32)):
        sketch = build(name, head_dim=8, budget=64, num_pilots=32)
        assert sketch.num_virtual_queries(sketch.options) == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("p_v", [8, 6])
def test_a_backward_pass_inside_autocast_rounds_nothing(attention: Any, p_v: int) -> None:
    """By hand, and with values of another width by autograd, where queries get theirs from torch's own operations."""
    inputs = tensors(1, 2, 100, p=8, p_v=p_v, dtype=torch.float32)
    G = torch.randn(1, 2, 100, p_v, generator=generator(1))
    output = attention(*inputs, budget=8, generator=generator(0))
    outside = torch.autograd.grad(output, inputs, G, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(output, inputs, G)
    ours_alone = slice(0 if p_v == 8 else 1, None)
    for ours, theirs in zip(inside[ours_alone], outside[ours_alone], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7 * float(theirs.abs().max()))


@pytest.mark.parametrize("attention", BOTH)
def test_long_rows_take_the_fused_kernel(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(2, 3, 100, p=8, p_v=8)
    G = torch.randn(2, 3, 100, 8, generator=generator(1), dtype=torch.float64)
    found = []
    for held in (row_gradients.HELD, 1):
        monkeypatch.setattr(row_gradients, "HELD", held)
        found.append(torch.autograd.grad(attention(*inputs, budget=8, generator=generator(0)), inputs, G))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("attention", BOTH)
def test_nothing_of_size_n_times_d_is_held(attention: Any) -> None:
    """Half of the memory that n x d numbers take is enough for all of the backward pass, its results included.

    n is large: pieces of a bounded size are held, see tests/kernels/test_row_gradients.py.
    """
    n, d = 32768, 256
    inputs = tensors(1, 1, n, p=8, p_v=8, dtype=torch.float32)
    output = attention(*inputs, budget=d, num_pilots=d, generator=generator(0))
    G = torch.randn(output.shape, generator=generator(1))
    peak = peak_memory(lambda: torch.autograd.grad(output, inputs, G, retain_graph=True))
    assert 3 * 4 * n * 8 < peak < 4 * n * d / 2


def test_fresh_numbers_are_uniform_and_of_another_order() -> None:
    u = torch.rand(20_000, generator=generator(0))
    fresh = fresh_numbers(u)
    assert 0 < fresh.min() < 0.001 < 0.999 < fresh.max() < 1
    assert abs(torch.corrcoef(torch.stack([u, fresh]))[0, 1]) < 0.03
    assert abs(float(fresh.mean()) - 0.5) < 0.01


def test_an_unknown_gradient_is_an_error() -> None:
    q, k, v = tensors(1, 1, 5)
    with pytest.raises(ValueError, match="gradient='query' is not known; did you mean 'queries'"):
        cluster_attention(q, k, v, gradient="query")


def test_skeinformer_without_pilots_or_normalization_says_what_to_set() -> None:
    q, k, v = tensors(1, 1, 5)
    for options in ({"row_norm": "none"}, {"columns": "uniform", "reuse_pilots": False}):
        with pytest.raises(ValueError, match='gradient="queries" needs pilot rows'):
            skein_attention(q, k, v, **options)
