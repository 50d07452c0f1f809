"""Shares divided and put together, and what losses need of all ranks."""

import numpy as np
import pytest
import torch

from skeinformer.distributed import share_lengths
from tests.distributed.cases import Case, compute
from tests.distributed.pool import Pool
from tests.distributed.test_equality import assert_near

pytestmark = pytest.mark.xdist_group("distributed")


def test_lengths_are_as_equal_as_possible() -> None:
    assert share_lengths(10, 4) == (3, 3, 2, 2)
    assert share_lengths(2, 4) == (1, 1, 0, 0)


def test_shard_and_gather(pool: Pool) -> None:
    for rank, result in enumerate(pool.run("shard_and_gather", 3)):
        assert result["ids"].shape == (2, (4, 3, 3)[rank])
        assert result["unequal"].shape == (2, (1, 0, 9)[rank])
        assert result["none"]
        assert result["held"] == result["ids"].size  # and not the whole
        np.testing.assert_array_equal(result["back"], np.arange(20).reshape(2, 10))
        assert "must be one whole number for each of 3 ranks and sum to the 10 tokens" in result["wrong"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_of_several_dtypes_are_gathered_in_one_buffer(ranks: int, pool: Pool) -> None:
    """Of one rank too, where three numbers of 4 bytes are no place at which one of 8 could begin."""
    for result in pool.run("gathered_dtypes", ranks):
        np.testing.assert_array_equal(result["short"], [[0, 1, 2]] * ranks)
        np.testing.assert_array_equal(result["long"], [[0.5]] * ranks)


def test_what_losses_need_has_the_gradient_of_one_process(pool: Pool) -> None:
    x = torch.randn(2, 10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    mask = torch.arange(10) < torch.tensor([[7], [0]])
    mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    token = x[:, 6]
    loss = mean.square().sum() + token.square().sum() + x.pow(3).sum()
    loss.backward()
    results = pool.run("losses", 3)
    for result in results:
        assert_near(result["mean"], mean.detach().numpy(), 1e-12, "mean")
        assert_near(result["token"], token.detach().numpy(), 1e-12, "token")
    assert x.grad is not None
    # the gradient is that of the sum of the three losses, which are all the same
    assert_near(np.concatenate([result["gradient"] for result in results], 1) / 3, x.grad.numpy(), 1e-12, "gradient")
    assert "position=10 is not among the 10 tokens" in results[0]["wrong"]


def test_means_in_half_precision_are_of_any_number_of_tokens(pool: Pool) -> None:
    for result in pool.run("mean_in_half_precision", 2):
        assert result["mean"] == 2  # a count of 100,000 is infinite in float16
        assert result["dtype"] == "torch.float16"
        assert "mask is torch.float32, expected a boolean tensor" in result["wrong"]


def test_average_gradients_leaves_none_where_no_rank_has_one(pool: Pool) -> None:
    for result in pool.run("averaged", 2):
        np.testing.assert_allclose(result["used"], [[0.5, 0.5]])
        assert result["unused"] is None


@pytest.mark.parametrize("method", ["cluster", "performer"])
def test_ranks_of_different_random_states_draw_alike(method: str, pool: Pool) -> None:
    case = Case(method, {"budget": 5}, noise="global", certify=True)
    one, two = (pool.run("drawn_twice", ranks, case) for ranks in (1, 3))
    for result in two:
        for name in ("error", *(["pilots"] if method == "cluster" else [])):
            for call in range(2):
                assert_near(result[call][name], one[0][call][name], 1e-9, name)
    assert (one[0][0]["error"] != one[0][1]["error"]).all()


@pytest.mark.parametrize("method", ["cluster", "skeinformer"])
def test_the_steps_of_other_devices_over_shares(method: str, pool: Pool) -> None:
    case = Case(method, {"budget": 5}, n=60)
    expected = compute(case)
    parts = pool.run("plainly", 3, case)
    for name, whole in expected.items():
        assert_near(np.concatenate([part[name] for part in parts], 2), whole, 1e-9, name)
