"""The rules of docs/drop-in.md, "What every drop-in does", once for each of the three sites that ask the policy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import skeinformer
from skeinformer.models import Call, MultiheadAttention, observe, policy
from skeinformer.models.policy import ONE_QUERY, exact_attention, shared_policy
from tests.helpers import lengths_mask

B, H, N, P = 2, 2, 40, 8
SKETCH: dict[str, Any] = {"budget": 8, "min_length": 0}
Site = Callable[..., Tensor]


def layer(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **options: Any) -> Tensor:
    """A layer of torch's kind whose projections are the identity; mask as in torch, True or 0 = real."""
    dropout, training = options.pop("dropout", 0.0), options.pop("training", False)
    module = MultiheadAttention(H * P, H, dropout, bias=False, batch_first=True, **options).train(training)
    module.requires_grad_(False)
    module.in_proj_weight.copy_(torch.eye(H * P).repeat(3, 1))
    module.out_proj.weight.copy_(torch.eye(H * P))
    padding = None if mask is None else ~mask if mask.dtype == torch.bool else mask
    output, _ = module(*(x.transpose(1, 2).flatten(2) for x in (q, k, v)), key_padding_mask=padding)
    return output.unflatten(-1, (H, P)).transpose(1, 2)


def function(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **options: Any) -> Tensor:
    """A call of SDPA inside `sketched`."""
    dropout, training = options.pop("dropout", 0.0), options.pop("training", False)
    assert not training, "a function has no training mode"
    mask = None if mask is None else mask[:, None, None]
    with skeinformer.sketched(**options):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, enable_gqa=q.shape[1] != k.shape[1])


class HuggingFaceLayer(nn.Module):
    is_causal = False
    is_decoder = False
    layer_idx = 0

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.config = type("Config", (), {"skeinformer": options})()


def huggingface(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **options: Any) -> Tensor:
    """A layer of transformers, which hands its heads to the attention interface."""
    module = pytest.importorskip("skeinformer.models.huggingface")
    dropout, training = options.pop("dropout", 0.0), options.pop("training", False)
    mask = None if mask is None else mask[:, None, None]
    owner = HuggingFaceLayer(**options).train(training)
    output: Tensor = module.attend(owner, q, k, v, mask, dropout=dropout if training else 0.0)[0]
    return output.transpose(1, 2)


SITES: list[Site] = [layer, function, huggingface]
each_site = pytest.mark.parametrize("site", SITES, ids=lambda site: site.__name__)


def heads(n: int = N, h_kv: int = H) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, n, P), torch.randn(B, h_kv, N, P), torch.randn(B, h_kv, N, P)


def observed(site: Site, *tensors: Tensor, **options: Any) -> tuple[Call, str | None]:
    seen: list[tuple[Call, str | None]] = []
    with observe(lambda call, reason, _: seen.append((call, reason))):
        site(*tensors, **options)
    (one,) = seen
    return one


@each_site
@torch.no_grad()
def test_every_site_computes_the_same_call(site: Site) -> None:
    q, k, v = heads()
    module = skeinformer.build("cluster", head_dim=P, budget=8, seed=3 * 1009).eval()
    torch.testing.assert_close(site(q, k, v, seed=3, **SKETCH), module(q, k, v))
    call, reason = observed(site, q, k, v, **SKETCH)
    assert reason is None
    assert (call.number, call.training) == (0, False)
    torch.testing.assert_close(exact_attention(call), F.scaled_dot_product_attention(q, k, v))


@each_site
def test_gradients_needed_or_training_mode_count_as_training(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = heads()
    asked: list[bool] = []
    monkeypatch.setattr(policy, "worth_sketching", lambda *sizes: bool(asked.append(sizes[7])))
    site(q, k, v, method="cluster")
    site(q, k, v.clone().requires_grad_(), method="cluster")
    with torch.no_grad():
        site(q, k, v.clone().requires_grad_(), method="cluster")
        if site is not function:
            site(
                q, k, v, method="cluster", training=True
            )  # as the first pass of a checkpointed layer, which records nothing
    assert asked == ([False, True, False] if site is function else [False, False, False, True])


@each_site
def test_draws_are_fresh_in_training_and_by_seed_elsewhere(site: Site) -> None:
    q, k, v = heads()
    assert torch.equal(site(q, k, v, **SKETCH), site(q, k, v, **SKETCH))
    assert not torch.equal(site(q, k, v, seed=1, **SKETCH), site(q, k, v, **SKETCH))
    assert not torch.equal(site(q, k, v, seed=None, **SKETCH), site(q, k, v, seed=None, **SKETCH))
    if site is not function:
        assert not torch.equal(site(q, k, v, training=True, **SKETCH), site(q, k, v, training=True, **SKETCH))
    v.requires_grad_()  # a module in evaluation draws by the seed; a function has no mode but what autograd records
    assert torch.equal(site(q, k, v, **SKETCH), site(q, k, v, **SKETCH)) == (site is not function)


@each_site
@torch.no_grad()
def test_padding_is_read_alike_and_its_contents_do_not_matter(site: Site) -> None:
    q, k, v = heads()
    real = lengths_mask([N, 25], N)
    expected = site(q, k, v, mask=real, **SKETCH)
    assert not torch.allclose(expected, site(q, k, v, **SKETCH))
    added = torch.zeros(B, N).masked_fill(~real, -torch.inf)
    assert torch.equal(site(q, k, v, mask=added, **SKETCH), expected)
    full, exact = (
        site(q, k, v, mask=real, budget=N, min_length=0),
        F.scaled_dot_product_attention(q, k, v, real[:, None, None]),
    )
    torch.testing.assert_close(full[0], exact[0])
    torch.testing.assert_close(full[1, :, :25], exact[1, :, :25])
    k[1, :, 25:] = v[1, :, 25:] = torch.nan
    assert torch.equal(site(q, k, v, mask=real, **SKETCH), expected)


@pytest.mark.parametrize("site", [function, huggingface])  # a layer has as many heads of keys as of queries
@torch.no_grad()
def test_grouped_heads_are_sketched_group_by_group(site: Site) -> None:
    q, k, v = heads(h_kv=1)
    output = site(q, k, v, **SKETCH)
    module = skeinformer.build("cluster", head_dim=P, budget=8, seed=0).eval()
    for head in range(H):
        torch.testing.assert_close(output[:, head : head + 1], module(q[:, head : head + 1], k, v))
    repeated = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
    torch.testing.assert_close(site(q, k, v, budget=N, min_length=0), repeated)


@each_site
@torch.no_grad()
def test_a_sketch_ignores_dropout_with_one_warning_and_exact_calls_apply_it(site: Site) -> None:
    q, k, v = heads()
    options = {"dropout": 0.5, "training": site is not function}
    with pytest.warns(UserWarning, match=r"dropout=0.5 is ignored: it acts on attention weights") as caught:
        output = site(q, k, v, budget=7, min_length=0, **options)
    assert len(caught) == 1
    assert bool((output != 0).all())
    if site is function:
        assert torch.equal(output, site(q, k, v, budget=7, min_length=0))
    if site is not layer:  # `site` makes another layer with a policy of its own
        site(q, k, v, budget=7, min_length=0, **options)
    weights = torch.full((B, H, N, N), 1 / N)
    assert not torch.allclose(site(0 * q, k, v, method="softmax", **options), weights @ v, atol=1e-2)


@each_site
@torch.no_grad()
def test_one_query_is_exact(site: Site) -> None:
    q, k, v = heads(n=1)
    torch.testing.assert_close(site(q, k, v, **SKETCH), F.scaled_dot_product_attention(q, k, v))
    assert observed(site, q, k, v, **SKETCH)[1] == ONE_QUERY


class Scaled(nn.Module):
    """A model whose gradients are recorded, around one of the sites."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(P))
        self.site = site
        self.layer = MultiheadAttention(H * P, H, batch_first=True, **SKETCH)
        self.huggingface = HuggingFaceLayer(**SKETCH)

    def forward(self, q: Tensor) -> Tensor:
        q = q * self.weight
        if self.site is layer:
            x = q.transpose(1, 2).flatten(2)
            return self.layer(x, x, x)[0]
        if self.site is function:
            return skeinformer.scaled_dot_product_attention(q, q, q, **SKETCH)
        from skeinformer.models.huggingface import attend

        return attend(self.huggingface, q, q, q, None)[0]


@each_site
def test_an_exported_program_draws_by_the_seed(site: Site) -> None:
    if site is huggingface:
        pytest.importorskip("transformers")
    model, (q, _, _) = Scaled(site).eval(), heads()
    assert torch.equal(model(q), model(q)) == (site is not function)
    program = torch.export.export(model, (q,)).module()
    assert torch.equal(program(q), program(q))
    with torch.no_grad():
        torch.testing.assert_close(program(q), model(q))


def test_equal_arguments_give_one_policy() -> None:
    first, second, other = (shared_policy((("budget", budget),)) for budget in (8, 8, 9))
    assert first is second
    assert first is not other
