"""Arguments of the wrong kind are named; noise can be drawn by hand; a module certifies its own output."""

from typing import Any

import numpy as np
import pytest
import torch

from skeinformer import SkeinNoise, build, choose_budget, draw, skein_attention
from skeinformer.attention import METHODS
from skeinformer.attention.virtual_keys import from_mask
from tests.helpers import generator, relative_error, tensors

Q, K, V = (x.detach() for x in tensors(2, 2, 9, dtype=torch.float32))
U = torch.rand(2, 2, 9, generator=generator())


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"generator": 0}, TypeError, "generator must be a torch.Generator or None, got int"),
        ({"noise": U}, TypeError, "noise must be a tuple of floating point tensors"),
        ({"noise": (None, None)}, TypeError, "noise must be a tuple of floating point tensors"),
        ({"noise": (U.long(), U.long())}, TypeError, "noise must be a tuple of floating point tensors"),
        ({"noise": (U, U), "generator": generator()}, ValueError, "both noise and generator were given"),
        ({"scale": "x"}, TypeError, "scale must be a finite number"),
        ({"scale": float("nan")}, ValueError, "scale must be a finite number"),
        ({"reuse_pilots": "no"}, TypeError, "reuse_pilots must be True or False, got 'no'"),
    ],
)
def test_wrong_kinds_are_named(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        skein_attention(Q, K, V, budget=3, **options)


def test_wrong_kinds_elsewhere() -> None:
    with pytest.raises(TypeError, match="dropout must be at least 0 and below 1, got 'x'"):
        build("softmax", head_dim=4, dropout="x")
    with pytest.raises(TypeError, match=r"tolerance must be above 0, a relative error such as 0\.1, got 'x'"):
        choose_budget(Q, K, V, tolerance="x")
    with pytest.raises(TypeError, match="dtype must be a floating point type"):
        draw("gaussian", 4, 2, dtype="float32")
    with pytest.raises(TypeError, match="batch must be a tuple of sizes"):
        draw("gaussian", 4, 2, batch=(-1,))


def test_an_unknown_option_of_sketched_attention_is_met_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="has no option 'sid'; did you mean 'side'"):
        build("sketched", head_dim=4, sid="rows")
    with pytest.raises(TypeError, match="has no option 'num_nonzero'; did you mean 'num_nonzeros'"):
        build("sketched", head_dim=4, sketch="sparse_embedding", num_nonzero=2)
    with pytest.raises(ValueError, match="num_nonzeros must be at least 1, got 0"):
        build("sketched", head_dim=4, sketch="sparse_embedding", num_nonzeros=0)


def test_integers_of_numpy_are_integers() -> None:
    assert torch.equal(
        skein_attention(Q, K, V, budget=np.int64(3), generator=generator()),
        skein_attention(Q, K, V, budget=3, generator=generator()),
    )


def test_noise_at_the_ends_of_the_interval_is_still_exact_at_full_size() -> None:
    expected = build("softmax", head_dim=4)(Q, K, V)
    for end in (0.0, 1.0):
        noise = SkeinNoise(torch.full_like(U, end), torch.full_like(U, end))
        torch.testing.assert_close(skein_attention(Q, K, V, budget=9, num_pilots=2, noise=noise), expected)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].cross_attention])
def test_noise_sampled_by_hand_is_what_a_call_draws(name: str) -> None:
    torch.manual_seed(0)
    module = build(name, head_dim=4, max_len=9, budget=3)
    noise = module.sample_noise(Q, K, generator=generator(5))
    given = {"noise": noise} if noise is not None else {}
    assert torch.equal(module(Q, K, V, **given), module(Q, K, V, generator=generator(5)))


@pytest.mark.parametrize("training", [True, False])
def test_a_module_certifies_its_own_output(training: bool) -> None:
    mask = torch.arange(9) < 7
    masks = {"key_mask": mask.expand(2, 9), "query_mask": mask.expand(2, 9)}
    module = build("skeinformer", head_dim=4, budget=3, num_pilots=2, seed=5).train(training)
    draw_from = {"generator": generator(1)} if training else {}
    output, info = module.certify(Q, K, V, num_checks=4, **masks, **draw_from)
    if training:
        assert torch.equal(output, module(Q, K, V, generator=generator(1), **masks))
    else:
        assert torch.equal(output, module(Q, K, V, **masks))
    assert info.error.shape == info.error_se.shape == (2, 2)
    assert (info.error > 0).all()


@pytest.mark.parametrize("factor", [1e-15, 1e15])
def test_the_certificate_and_the_importance_do_not_depend_on_the_unit_of_v(factor: float) -> None:
    _, info = skein_attention(Q, K, V * factor, budget=3, num_pilots=2, generator=generator(), return_info=True)
    _, expected = skein_attention(Q, K, V, budget=3, num_pilots=2, generator=generator(), return_info=True)
    torch.testing.assert_close(info.error, expected.error, rtol=1e-4, atol=0)
    torch.testing.assert_close(info.error_se, expected.error_se, rtol=1e-3, atol=0)
    torch.testing.assert_close(info.log_probability, expected.log_probability, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_the_certificate_holds_where_squares_of_v_leave_float32(factor: float) -> None:
    """The error of what comes out is told as for other units, and importance is the same."""
    v = V * factor
    output, info = skein_attention(
        Q, K, v, budget=3, num_pilots=2, num_checks=9, generator=generator(), return_info=True
    )
    expected = build("softmax", head_dim=4)(Q, K, v)
    torch.testing.assert_close(info.error.double(), relative_error(output, expected), rtol=1e-4, atol=0)
    assert (info.error > 0.01).all()


def test_no_mask_means_no_mask_for_the_kernel() -> None:
    """A mask of zeros costs time, and on a GPU the flash kernel."""
    assert from_mask(K, V).log_weight is None
    expected = torch.nn.functional.scaled_dot_product_attention(Q, K, V)
    assert torch.equal(build("softmax", head_dim=4)(Q, K, V), expected)


def test_shapes_alone_can_be_traced() -> None:
    """On the meta device nothing is computed, and no autocast exists."""
    q, k, v = (x.to("meta") for x in (Q, K, V))
    assert build("vmean", head_dim=4)(q, k, v).shape == (2, 2, 9, 4)
